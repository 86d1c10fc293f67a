// activation.cuh - SiLU and GELU in two forms, forward and backward, as operations of flat.cuh.
#pragma once
#include "internal.cuh"

namespace activations {
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float normal_cdf(float x) { return 0.5f * erfcf(-0.70710678f * x); } // accurate for negative x, unlike 1 + erf

struct Silu {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] * sigmoid(x[0]); }
};

struct SiluBackward {
    static constexpr int INPUTS = 2, OUTPUTS = 1; // dy, x -> dx
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&in)[2], float (&dx)[1]) const {
        const float x = in[1], s = sigmoid(x);
        dx[0] = in[0] * (s + x * (s * (1.0f - s)));
    }
};

struct Gelu {
    static constexpr int INPUTS = 1, OUTPUTS = 1, ROUNDS = 2;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] * normal_cdf(x[0]); }
};

struct GeluBackward {
    static constexpr int INPUTS = 2, OUTPUTS = 1, ROUNDS = 1; // dy, x -> dx
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&in)[2], float (&dx)[1]) const {
        const float x = in[1], density = 0.39894228f * expf(-0.5f * x * x); // 1 / sqrt(2 pi)
        dx[0] = in[0] * (normal_cdf(x) + x * density);
    }
};

// Twice the argument of the tanh: sqrt(8 / pi) (x + 0.044715 x^3).  The sigmoid is 0 or 1 where the square is cut.
DEVICE float cut_square(float x) { return fminf(x * x, 400.0f); }
DEVICE float gelu_twice(float x) { return x * (1.5957691f + 0.07135482f * cut_square(x)); }

struct GeluTanh {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] * sigmoid(gelu_twice(x[0])); }
};

struct GeluTanhBackward {
    static constexpr int INPUTS = 2, OUTPUTS = 1; // dy, x -> dx
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&in)[2], float (&dx)[1]) const {
        const float x = in[1], v = gelu_twice(x), s = sigmoid(v), slope = 1.5957691f + 0.21406445f * cut_square(x);
        dx[0] = in[0] * (s + x * (s * sigmoid(-v)) * slope); // 1 - s would cancel
    }
};

// Call run(operation) with the forward or the backward operation of a pyops_activation.
template <class Run> DEVICE void forward_of(int kind, Run run) {
    if (kind == PYOPS_SILU) run(Silu());
    else if (kind == PYOPS_GELU) run(Gelu());
    else run(GeluTanh());
}
template <class Run> DEVICE void backward_of(int kind, Run run) {
    if (kind == PYOPS_SILU) run(SiluBackward());
    else if (kind == PYOPS_GELU) run(GeluBackward());
    else run(GeluTanhBackward());
}
}
