/* optim.c - zeroing, gradient norm, clipping, Adam and gradient descent over one flat buffer of all parameters.
 *
 * The norm is summed in double over 64 KiB chunks, whose partial sums are added in order: a float sum over ten million
 * gradients would lose the small ones, and the order must not depend on the threads.  Adam clips while it reads, so a clipped
 * step reads every gradient once.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

/* Adam computes a root and a division per element, so its chunks are smaller.  Threads take several chunks at a time,
 * dynamically: chunks with few touched blocks finish early. */
enum { CHUNK = PYOPS_NORM_CHUNK, ADAM_CHUNK = 4096 };
#define TURN PYOPS_TUNED(optim_turn, 65536, CHUNK, 1 << 20, 1)

_Static_assert(ADAM_CHUNK % PYOPS_GRAD_BLOCK == 0 && CHUNK % PYOPS_GRAD_BLOCK == 0, "a chunk must be whole blocks");

/* Not pow() and cos(): the last bit of a result of libm depends on its version and on the CPU. */
static double power(double base, int64_t exponent) {
    double y = 1.0;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1) y *= base;
    return y;
}

/* (1 + cos(pi x)) / 2 for x in [0, 1]: the square of sin(pi (1 - x) / 2), a Taylor series whose next term is below 2e-18. */
static double half_cosine(double x) {
    const double a = 0.5 * M_PI * (1.0 - x), square = a * a;
    double y = 1.0;
    for (int n = 21; n > 1; n -= 2) y = 1.0 - y * square / (n * (n - 1));
    return a * y * (a * y);
}

/* The first index after `from`, at most `to`, whose block differs from the block of `from` in being touched. */
static int64_t end_of_run(const int32_t *touched, int64_t from, int64_t to) {
    if (!touched) return to;
    int64_t i = from / PYOPS_GRAD_BLOCK * PYOPS_GRAD_BLOCK + PYOPS_GRAD_BLOCK;
    while (i < to && !pyops_is_touched(touched, i) == !pyops_is_touched(touched, from)) i += PYOPS_GRAD_BLOCK;
    return pyops_min(i, to);
}

pyops_status pyops_zero_touched(float *grad, int32_t *touched, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "zero_touched: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(dynamic, TURN / CHUNK) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t end = pyops_min(i + CHUNK, n);
        for (int64_t from = i, to; from < end; from = to) {
            to = end_of_run(touched, from, end);
            if (pyops_is_touched(touched, from)) k->fill(grad + from, to - from, 0.0f);
        }
        if (!touched) continue;
        for (int64_t from = i; from < end; from += PYOPS_GRAD_BLOCK) touched[from / PYOPS_GRAD_BLOCK] &= ~PYOPS_TOUCHED;
    }
    return PYOPS_OK;
}

int64_t pyops_grad_norm_work(int64_t n) { return 2 * ((n + CHUNK - 1) / CHUNK); }

pyops_status pyops_norm_of_chunks(float *norm, const float *work, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "norm_of_chunks: n=%lld, expected at least 0", LL(n));
    double sum = 0.0;
    for (int64_t i = 0; i < (n + CHUNK - 1) / CHUNK; i++) {
        double s;
        memcpy(&s, work + 2 * i, sizeof s);
        sum += s;
    }
    norm[0] = (float)sqrt(sum);
    return PYOPS_OK;
}

pyops_status pyops_grad_norm(float *norm, const float *grad, const int32_t *touched, float *work, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "grad_norm: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(dynamic, TURN / CHUNK) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t end = pyops_min(i * CHUNK + CHUNK, n);
        double s = 0.0;
        for (int64_t b = i * CHUNK; b < end; b += PYOPS_GRAD_BLOCK)
            if (pyops_is_touched(touched, b)) s += k->sum_squares(grad + b, pyops_min(PYOPS_GRAD_BLOCK, end - b));
        memcpy(work + 2 * i, &s, sizeof s);           /* a double in two floats */
    }
    return pyops_norm_of_chunks(norm, work, n, stream);
}

pyops_status pyops_grad_norm_logged(float *norm, int64_t *step, float *log, int64_t *written, const float *grad,
                                    const int32_t *touched, const float *loss, const int32_t *valid, float *work, int64_t n,
                                    int64_t capacity, void *stream) {
    pyops_status status = check_grad_norm_logged(n, capacity);
    if (!status) status = pyops_grad_norm(norm, grad, touched, work, n, stream);
    if (!status) status = pyops_increment(step, stream);
    return status ? status : pyops_log_step(log, written, loss, valid, norm, 1, capacity, stream);
}

pyops_status pyops_clip(float *grad, const float *norm, int64_t n, float max_norm, void *stream) {
    (void)stream;
    const pyops_status status = check_max_norm("clip", n, max_norm);
    if (status) return status;
    const float factor = pyops_clip_factor(norm, max_norm);
    return factor == 1.0f ? PYOPS_OK : pyops_scale(grad, grad, &factor, n, stream);
}

pyops_status pyops_adam(float *param, float *m, float *v, const float *grad, const int32_t *touched, const float *norm,
                        const int64_t *step, const float *lr, int64_t n, float max_norm, float beta1, float beta2, float eps,
                        float weight_decay, int32_t decoupled, void *stream) {
    (void)stream;
    const pyops_status status = check_adam("adam", n, max_norm, beta1, beta2, weight_decay);
    if (status) return status;
    PYOPS_REQUIRE(step[0] >= 1, "adam: step=%lld, expected at least 1", LL(step[0]));
    const pyops_kernels *k = pyops_active();
    const float step_size = (float)(lr[0] / (1.0 - power(beta1, step[0])));
    const float root_correction = (float)(1.0 / sqrt(1.0 - power(beta2, step[0])));
    const float clip = pyops_clip_factor(norm, max_norm), keep = decoupled ? 1.0f - lr[0] * weight_decay : 1.0f;
    const float added = decoupled ? 0.0f : weight_decay;
    #pragma omp parallel for schedule(dynamic, TURN / ADAM_CHUNK) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += ADAM_CHUNK) {
        const int64_t end = pyops_min(i + ADAM_CHUNK, n);
        for (int64_t from = i, to; from < end; from = to) {
            to = end_of_run(touched, from, end);
            k->adam(param + from, m + from, v + from, pyops_is_touched(touched, from) ? grad + from : NULL, to - from, clip,
                    beta1, beta2, step_size, root_correction, eps, added, keep);
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_sgd(float *param, float *velocity, const float *grad, const float *norm, const int64_t *step,
                       const float *lr, int64_t n, float max_norm, float momentum, float dampening, float weight_decay,
                       int32_t nesterov, void *stream) {
    (void)stream;
    const pyops_status status = check_sgd(velocity, n, max_norm, momentum, dampening, weight_decay);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const float clip = pyops_clip_factor(norm, max_norm), undamped = step[0] > 1 ? 1.0f - dampening : 1.0f;
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t m = pyops_min(CHUNK, n - i);
        if (velocity)
            k->sgd_momentum(param + i, velocity + i, grad + i, m, clip, lr[0], momentum, undamped, weight_decay, nesterov != 0);
        else k->sgd(param + i, grad + i, m, clip, lr[0], weight_decay);
    }
    return PYOPS_OK;
}

pyops_status pyops_ema(float *average, const float *param, const int64_t *step, int64_t n, float decay, void *stream) {
    (void)stream;
    const pyops_status status = check_ema(n, decay);
    if (status) return status;
    const double t = (double)step[0];
    const float share = (float)(1.0 - fmin(decay, (1.0 + t) / (10.0 + t)));
    #pragma omp parallel for simd schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i++) average[i] += share * (param[i] - average[i]);
    return PYOPS_OK;
}

pyops_status pyops_inverse_square_root(float *lr, const int64_t *step, int64_t warmup, float base, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(warmup >= 0, "inverse_square_root: warmup=%lld, expected at least 0", LL(warmup));
    const double t = (double)step[0] + 1.0, w = (double)warmup;
    lr[0] = warmup ? (float)((double)base * fmin(t / w, sqrt(w / t))) : base;
    return PYOPS_OK;
}

pyops_status pyops_decaying_rate(float *lr, const int64_t *step, int64_t warmup, int64_t hold, int64_t total, float base,
                                 float final, int32_t decay, void *stream) {
    (void)stream;
    const pyops_status status = check_decaying_rate(warmup, hold, total, decay);
    if (status) return status;
    const int64_t s = step[0];
    double factor = 1.0;
    if (s < warmup) factor = (double)(s + 1) / (double)warmup;
    else if (s >= hold) {
        const double x = s < total ? (double)(s - hold) / (double)(total - hold) : 1.0;
        factor = final + (1.0 - final) * (decay == PYOPS_DECAY_LINEAR ? 1.0 - x : half_cosine(x));
    }
    lr[0] = (float)(base * factor);
    return PYOPS_OK;
}
