/* small.c - fill, axpy, scale, column sums, argmax, counters, relu, silu, gelu in two forms, concatenation with a
 * context, positions.
 *
 * All are memory-bound.  Threads share fixed chunks or columns, so the order of a sum never depends on their number.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

/* 64 KiB per chunk: large enough for a thread, small enough to balance the load. */
enum { CHUNK = 16384 };

pyops_status pyops_fill(float *y, int64_t n, float value, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "fill: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) k->fill(y + i, pyops_min(CHUNK, n - i), value);
    return PYOPS_OK;
}

pyops_status pyops_axpy(float *y, const float *x, const float *alpha, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "axpy: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) k->axpy(y + i, x + i, alpha[0], pyops_min(CHUNK, n - i));
    return PYOPS_OK;
}

pyops_status pyops_convert(float *y, const float *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx, void *stream) {
    (void)stream;
    const pyops_status status = check_convert(R, C, ldy, ldx);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++) memcpy(y + r * ldy, x + r * ldx, (size_t)C * sizeof *y);
    return PYOPS_OK;
}

pyops_status pyops_scale(float *y, const float *x, const float *alpha, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "scale: n=%lld, expected at least 0", LL(n));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) k->scale(y + i, x + i, alpha[0], pyops_min(CHUNK, n - i));
    return PYOPS_OK;
}

void pyops_add_column_sums(float *y, const float *x, int64_t R, int64_t C, int64_t ldx) {
    enum { COLUMNS = 256 };             /* the sums of a thread fit in L1 */
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_FLOATS)
    for (int64_t c = 0; c < C; c += COLUMNS) {
        const int64_t n = pyops_min(COLUMNS, C - c);
        float sums[COLUMNS] = {0};
        for (int64_t r = 0; r < R; r++) k->add(sums, x + r * ldx + c, n);
        k->add(y + c, sums, n);
    }
}

pyops_status pyops_column_sums(float *y, const float *x, int64_t R, int64_t C, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && C >= 0, "column_sums: R=%lld C=%lld, expected at least 0", LL(R), LL(C));
    pyops_add_column_sums(y, x, R, C, C);
    return PYOPS_OK;
}

pyops_status pyops_argmax(int32_t *index, const float *x, int64_t R, int64_t C, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && C >= 1 && C <= INT32_MAX, "argmax: R=%lld C=%lld, expected R >= 0, C from 1 to 2^31 - 1", LL(R),
                  LL(C));
    const pyops_kernels *k = pyops_active();
    PYOPS_FOR(r, R, R * C > PYOPS_SHARE_FLOATS, {
        const float *x_r = x + r * C, m = k->max(x_r, C);
        int64_t c = 0;
        while (c < C - 1 && !(x_r[c] == m || x_r[c] != x_r[c])) c++;
        index[r] = (int32_t)c;
    });
    return PYOPS_OK;
}

pyops_status pyops_increment(int64_t *counter, void *stream) {
    (void)stream;
    counter[0]++;
    return PYOPS_OK;
}

pyops_status pyops_tick(int64_t *now, int64_t *counter, void *stream) {
    (void)stream;
    now[0] = ++counter[0];
    return PYOPS_OK;
}

typedef void row_forward(float *y, const float *x, int64_t n);
typedef void row_backward(float *dx, const float *dy, const float *saved, int64_t n);

/* Activations follow a layer, whose threads are awake, and most of them compute exponentials. */
static pyops_status forward(const char *name, row_forward *row, float *y, const float *x, int64_t n) {
    PYOPS_REQUIRE(n >= 0, "%s_forward: n=%lld, expected at least 0", name, LL(n));
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_EXPS)
    for (int64_t i = 0; i < n; i += CHUNK) row(y + i, x + i, pyops_min(CHUNK, n - i));
    return PYOPS_OK;
}

static pyops_status backward(const char *name, row_backward *row, float *dx, const float *dy, const float *saved, int64_t n) {
    PYOPS_REQUIRE(n >= 0, "%s_backward: n=%lld, expected at least 0", name, LL(n));
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_EXPS)
    for (int64_t i = 0; i < n; i += CHUNK) row(dx + i, dy + i, saved + i, pyops_min(CHUNK, n - i));
    return PYOPS_OK;
}

pyops_status pyops_relu_forward(float *y, const float *x, int64_t n, void *stream) {
    (void)stream;
    return forward("relu", pyops_active()->relu, y, x, n);
}

pyops_status pyops_relu_backward(float *dx, const float *dy, const float *y, int64_t n, void *stream) {
    (void)stream;
    return backward("relu", pyops_active()->relu_back, dx, dy, y, n);
}

pyops_status pyops_silu_forward(float *y, const float *x, int64_t n, void *stream) {
    (void)stream;
    return forward("silu", pyops_active()->silu, y, x, n);
}

pyops_status pyops_silu_backward(float *dx, const float *dy, const float *x, int64_t n, void *stream) {
    (void)stream;
    return backward("silu", pyops_active()->silu_back, dx, dy, x, n);
}

pyops_status pyops_gelu_forward(float *y, const float *x, int64_t n, void *stream) {
    (void)stream;
    return forward("gelu", pyops_active()->gelu, y, x, n);
}

pyops_status pyops_gelu_backward(float *dx, const float *dy, const float *x, int64_t n, void *stream) {
    (void)stream;
    return backward("gelu", pyops_active()->gelu_back, dx, dy, x, n);
}

pyops_status pyops_gelu_tanh_forward(float *y, const float *x, int64_t n, void *stream) {
    (void)stream;
    return forward("gelu_tanh", pyops_active()->gelu_tanh, y, x, n);
}

pyops_status pyops_gelu_tanh_backward(float *dx, const float *dy, const float *x, int64_t n, void *stream) {
    (void)stream;
    return backward("gelu_tanh", pyops_active()->gelu_tanh_back, dx, dy, x, n);
}

pyops_status pyops_normal_cdf_double(double *y, const double *x, int64_t n, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "normal_cdf_double: n=%lld, expected at least 0", LL(n));
    PYOPS_FOR(i, n, n > PYOPS_SHARE_EXPS, { y[i] = erfc(-0.70710678118654752 * x[i]) / 2; });     /* x / sqrt(2) */
    return PYOPS_OK;
}

pyops_status pyops_concat_context_forward(float *y, const float *x, const float *context, int64_t T, int64_t B, int64_t E,
                                          int64_t H, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(T >= 0 && B >= 0 && E >= 0 && H >= 0,
                  "concat_context_forward: T=%lld B=%lld E=%lld H=%lld, expected at least 0", LL(T), LL(B), LL(E), LL(H));
    #pragma omp parallel for schedule(static) if (T * B * (E + H) > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < T * B; r++) {
        memcpy(y + r * (E + H), x + r * E, (size_t)E * sizeof *y);
        memcpy(y + r * (E + H) + E, context + r % B * H, (size_t)H * sizeof *y);
    }
    return PYOPS_OK;
}

pyops_status pyops_concat_context_backward(float *dx, float *dcontext, const float *dy, int64_t T, int64_t B, int64_t E,
                                           int64_t H, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(T >= 0 && B >= 0 && E >= 0 && H >= 0,
                  "concat_context_backward: T=%lld B=%lld E=%lld H=%lld, expected at least 0", LL(T), LL(B), LL(E), LL(H));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (T * B * (E + H) > PYOPS_SHARE_FLOATS)
    for (int64_t b = 0; b < B; b++) {
        k->fill(dcontext + b * H, H, 0.0f);
        for (int64_t t = 0; t < T; t++) {
            const float *dy_tb = dy + (t * B + b) * (E + H);
            memcpy(dx + (t * B + b) * E, dy_tb, (size_t)E * sizeof *dx);
            k->add(dcontext + b * H, dy_tb + E, H);
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_add_positions_forward(float *y, const float *x, const float *table, const int32_t *positions, int64_t T,
                                         int64_t B, int64_t D, int64_t longest, float scale, void *stream) {
    (void)stream;
    const pyops_status status = check_positions(positions, T, B, D, longest);
    if (status) return status;
    for (int64_t r = 0; positions && r < T * B; r++)
        PYOPS_REQUIRE(positions[r] >= 0 && positions[r] < longest,
                      "add_positions_forward: positions[%lld]=%d, expected 0 to %lld", LL(r), positions[r], LL(longest - 1));
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (T * B * D > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < T * B; r++)
        k->scale_add(y + r * D, x + r * D, table + (positions ? positions[r] : r / B) * D, scale, D);
    return PYOPS_OK;
}

pyops_status pyops_add_positions_backward(float *dx, const float *dy, int64_t n, float scale, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "add_positions_backward: n=%lld, expected at least 0", LL(n));
    return pyops_scale(dx, dy, &scale, n, stream);
}

pyops_status pyops_log_step(float *log, int64_t *written, const float *loss, const int32_t *valid, const float *norm,
                            int64_t steps, int64_t capacity, void *stream) {
    (void)stream;
    const pyops_status status = check_log_step(steps, capacity);
    if (status) return status;
    for (int64_t k = 0; k < steps; k++) {
        float *entry = log + (written[0] + k) % capacity * 3;
        entry[0] = loss[k];
        entry[1] = valid ? (float)valid[k] : 0.0f;
        entry[2] = norm ? norm[k] : 0.0f;
    }
    written[0] += steps;
    return PYOPS_OK;
}
