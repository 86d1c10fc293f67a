/* layer_norm.c - normalise rows to mean 0 and variance 1, then scale and shift by column; with a residual sum before it, too.
 *
 * Rows are independent, and threads share them.  dweight and dbias are sums over all rows: partial sums of ROWS rows are
 * computed in `work` together with dx, then added in the order of the rows, for any number of threads.
 */
#include "internal.h"

/* Dropout and norm take turns on blocks of BLOCK rows, which stay in the caches.  A block begins with a whole group of random
 * words: 4 divides BLOCK. */
#define ROWS PYOPS_TUNED(layer_norm_rows, 64, 4, 128, 4)
#define BLOCK PYOPS_TUNED(layer_norm_block, 16, 4, 64, 4)

typedef struct {
    uint64_t step, key;
    uint32_t threshold;
    float scale;
} masks;

static masks masks_of(const int64_t *step, float p, uint64_t key) {
    return (masks){step ? (uint64_t)step[0] : 0, key, pyops_dropout_threshold(p), 1.0f / (1.0f - p)};
}

pyops_status pyops_layer_norm_forward(float *y, float *mean, float *rstd, const float *x, const float *weight,
                                      const float *bias, int64_t R, int64_t C, float eps, void *stream) {
    (void)stream;
    pyops_status status = check_rows("layer_norm_forward", R, C);
    if (!status) status = check_eps("layer_norm_forward", eps);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++) k->layer_norm(y + r * C, mean + r, rstd + r, x + r * C, weight, bias, C, eps);
    return PYOPS_OK;
}

pyops_status pyops_residual_norm_forward(float *y, float *sum, float *mean, float *rstd, const float *x, const float *branch,
                                         const int64_t *step, const float *weight, const float *bias, int64_t R, int64_t C,
                                         float p, uint64_t key, float eps, void *stream) {
    (void)stream;
    const pyops_status status = check_residual_norm("residual_norm_forward", R, C, p, eps);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int drops = step && p > 0.0f;
    const masks m = masks_of(step, p, key);
    #pragma omp parallel for schedule(static) if (R * C > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t from = 0; from < R; from += BLOCK) {
        const int64_t to = pyops_min(from + BLOCK, R), i = from * C, n = (to - from) * C;
        if (drops) k->residual_dropout(sum + i, x + i, branch + i, i / 4, n, m.step, m.key, m.threshold, m.scale);
        else k->residual(sum + i, x + i, branch + i, n);
        for (int64_t r = from; r < to; r++) k->layer_norm(y + r * C, mean + r, rstd + r, sum + r * C, weight, bias, C, eps);
    }
    return PYOPS_OK;
}

/* For each chunk of rows, its partial sums of dweight (C) and dbias (C). */
int64_t pyops_layer_norm_backward_work(int64_t R, int64_t C) { return (R + ROWS - 1) / ROWS * 2 * C; }

/* dbranch: also dropout of dx, unless it is NULL */
static void backward(float *dx, float *dbranch, float *dweight, float *dbias, const float *dy, const float *x,
                     const float *weight, const float *mean, const float *rstd, float *work, int64_t R, int64_t C,
                     int accumulate, masks m) {
    const pyops_kernels *k = pyops_active();
    const int64_t chunks = (R + ROWS - 1) / ROWS;
    #pragma omp parallel for schedule(static) if (R * C > (dbranch ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float *sums = work + chunk * 2 * C;
        k->fill(sums, 2 * C, 0.0f);
        const int64_t end = pyops_min((chunk + 1) * ROWS, R);
        for (int64_t from = chunk * ROWS; from < end; from += BLOCK) {
            const int64_t to = pyops_min(from + BLOCK, end), i = from * C;
            for (int64_t r = from; r < to; r++)
                k->layer_norm_back(dx + r * C, sums, sums + C, dy + r * C, x + r * C, weight, mean[r], rstd[r], C, accumulate);
            if (dbranch) k->dropout(dbranch + i, dx + i, i / 4, (to - from) * C, m.step, m.key, m.threshold, m.scale);
        }
    }
    pyops_add_column_sums(dweight, work, chunks, C, 2 * C);
    pyops_add_column_sums(dbias, work + C, chunks, C, 2 * C);
}

pyops_status pyops_layer_norm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                       const float *weight, const float *mean, const float *rstd, float *work, int64_t R,
                                       int64_t C, int32_t accumulate, void *stream) {
    (void)stream;
    const pyops_status status = check_rows("layer_norm_backward", R, C);
    if (status) return status;
    backward(dx, NULL, dweight, dbias, dy, x, weight, mean, rstd, work, R, C, accumulate != 0, (masks){0});
    return PYOPS_OK;
}

pyops_status pyops_residual_norm_backward(float *dx, float *dbranch, float *dweight, float *dbias, const float *dy,
                                          const float *sum, const int64_t *step, const float *weight, const float *mean,
                                          const float *rstd, float *work, int64_t R, int64_t C, float p, uint64_t key,
                                          int32_t accumulate, void *stream) {
    (void)stream;
    const pyops_status status = check_residual_norm_backward(dbranch, step, R, C, p);
    if (status) return status;
    backward(dx, dbranch, dweight, dbias, dy, sum, weight, mean, rstd, work, R, C, accumulate != 0, masks_of(step, p, key));
    return PYOPS_OK;
}
