// adam.cuh - clipping and Adam's arithmetic, one parameter at a time, for optim.cu, muon.cu and mlp.cu.
#pragma once
#include <cfloat>

#include "internal.cuh"

// For a sum in double: in float32, a sum over ten million gradients loses the small ones.
DEVICE double square(float x) { return double(x) * x; }

// The array of such sums in `work`, aligned for double: one float more than they need.
static inline double *sums_of(float *work) { return reinterpret_cast<double *>((uintptr_t(work) + 7) & ~uintptr_t(7)); }

// A NaN norm does not clip, so the NaN reaches the parameters and the next loss shows it.
DEVICE float clip_factor(float norm, float max_norm) { return norm > max_norm ? max_norm / norm : 1.0f; }

// b^t by squaring, t >= 1: a few multiplications; pow takes about a hundred times as long.
DEVICE double power(double b, int64_t t) {
    double y = 1.0;
    for (; t > 0; t >>= 1, b *= b)
        if (t & 1) y *= b;
    return y;
}

// A moment, 0 if it is denormal, as on the CPU, where denormal numbers are slow.
DEVICE float moment(float x) { return fabsf(x) < FLT_MIN ? 0.0f : x; }

struct AdamRule {
    float beta1, beta2, eps, weight_decay;
    // the same for all parameters of a step;  keep: factor of the parameter, 1 - lr * decoupled weight decay
    float clip, step_size, root_correction, keep;

    // Corrections of the bias in step t, in double.
    __device__ void correct(float lr, int64_t t) {
        step_size = static_cast<float>(lr / (1.0 - power(beta1, t)));
        root_correction = static_cast<float>(1.0 / sqrt(1.0 - power(beta2, t)));
    }
    __device__ void operator()(float &param, float &m, float &v, float grad) const {
        const float g = grad * clip + weight_decay * param;
        m = moment(beta1 * m + (1.0f - beta1) * g);
        v = moment(beta2 * v + (1.0f - beta2) * g * g);
        param = keep * param - step_size * m / (sqrtf(v) * root_correction + eps);
    }
};
