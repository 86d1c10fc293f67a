/* cross_entropy.c - masked softmax cross entropy on given logits; counts valid rows.
 *
 * Rows are independent; threads share them, and the losses of the rows are added in order.  Backward gets the maximum and the
 * sum of exponentials of each row, so it computes one exponential per element and no second maximum.  They are saved
 * separately: max + log(sum) would round log(sum) to the last digit of a large maximum.
 */
#include <math.h>
#include "internal.h"
#include "kernels/math.inc"

pyops_status pyops_count_valid(int32_t *valid, const char *who, const int32_t *labels, int64_t R, int64_t C, int32_t ignore) {
    int32_t n = 0;
    for (int64_t r = 0; r < R; r++) {
        if (labels[r] == ignore) continue;
        PYOPS_REQUIRE(labels[r] >= 0 && labels[r] < C, "%s: labels[%lld]=%d, expected 0 to %lld or %d (ignored)", who, LL(r),
                      labels[r], LL(C - 1), ignore);
        n++;
    }
    valid[0] = n;
    return PYOPS_OK;
}

pyops_status pyops_cross_entropy_forward(float *loss, int32_t *valid, float *stats, const float *x, const int32_t *labels,
                                         int64_t R, int64_t C, int32_t ignore, float smoothing, void *stream) {
    (void)stream;
    pyops_status status = check_cross_entropy("cross_entropy_forward", R, C, smoothing);
    if (!status) status = pyops_count_valid(valid, "cross_entropy_forward", labels, R, C, ignore);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    float *const max = stats, *const sum = stats + R;
    float *terms = pyops_scratch((size_t)R);                    /* losses of the rows without the term of the label */
    if (R && !terms) return pyops_fail(PYOPS_NO_MEMORY, "cross_entropy_forward: no memory for %lld rows", LL(R));
    const int64_t each = C <= PYOPS_NARROW ? 256 : 1;           /* rows */
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_EXPS)
    for (int64_t first = 0; first < R; first += each) {
        const int64_t end = pyops_min(first + each, R);
        if (C <= PYOPS_NARROW) k->narrow_softmax(max + first, sum + first, terms + first, x + first * C, end - first, C);
        for (int64_t r = first; r < end && C > PYOPS_NARROW; r++) {
            max[r] = k->max(x + r * C, C);
            sum[r] = k->sum_exp(x + r * C, max[r], C);
            terms[r] = log_f(sum[r]);
        }
        for (int64_t r = first; r < end && smoothing > 0.0f; r++)
            terms[r] -= smoothing * (k->sum_shifted(x + r * C, max[r], C) / (float)C);
    }
    double total = 0.0;
    for (int64_t r = 0; r < R; r++)
        if (labels[r] != ignore) total += terms[r] + (1.0f - smoothing) * (max[r] - x[r * C + labels[r]]);
    loss[0] = valid[0] ? (float)(total / valid[0]) : 0.0f;
    return PYOPS_OK;
}

pyops_status pyops_cross_entropy_backward(float *dx, const float *dloss, const float *x, const int32_t *labels,
                                          const float *stats, const int32_t *valid, int64_t R, int64_t C, int32_t ignore,
                                          float smoothing, void *stream) {
    (void)stream;
    const pyops_status status = check_cross_entropy("cross_entropy_backward", R, C, smoothing);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const float *const max = stats, *const sum = stats + R;
    const float scale = valid[0] ? dloss[0] / (float)valid[0] : 0.0f;
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_EXPS)
    for (int64_t r = 0; r < R; r++) {
        if (labels[r] == ignore) {
            k->fill(dx + r * C, C, 0.0f);
            continue;
        }
        k->scaled_exp(dx + r * C, x + r * C, max[r], scale / sum[r], C);
        if (smoothing > 0.0f) k->add_constant(dx + r * C, -scale * smoothing / (float)C, C);
        dx[r * C + labels[r]] -= scale * (1.0f - smoothing);
    }
    return PYOPS_OK;
}
