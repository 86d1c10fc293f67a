/* layer_norm.c - normalise rows to mean 0 and variance 1, then scale and shift by column.
 *
 * Rows are independent, and threads share them.  dweight and dbias are sums over all rows: partial sums of ROWS rows are
 * computed in `work` together with dx, then added in the order of the rows, for any number of threads.
 */
#include "internal.h"

enum { ROWS = 64 };

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

/* For each chunk of rows, its partial sums of dweight (C) and dbias (C). */
int64_t pyops_layer_norm_backward_work(int64_t R, int64_t C) { return (R + ROWS - 1) / ROWS * 2 * C; }

pyops_status pyops_layer_norm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                       const float *weight, const float *mean, const float *rstd, float *work, int64_t R,
                                       int64_t C, int32_t accumulate, void *stream) {
    (void)stream;
    const pyops_status status = check_rows("layer_norm_backward", R, C);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t chunks = (R + ROWS - 1) / ROWS;
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < chunks; i++) {
        float *sums = work + i * 2 * C;
        k->fill(sums, 2 * C, 0.0f);
        for (int64_t r = i * ROWS; r < pyops_min((i + 1) * ROWS, R); r++)
            k->layer_norm_back(dx + r * C, sums, sums + C, dy + r * C, x + r * C, weight, mean[r], rstd[r], C, accumulate != 0);
    }
    pyops_add_column_sums(dweight, work, chunks, C, 2 * C);
    pyops_add_column_sums(dbias, work + C, chunks, C, 2 * C);
    return PYOPS_OK;
}
