/* dropout.c - dropout from counters instead of a stored mask; the residual connection, with dropout of the branch it adds.
 *
 * Philox computes random words from (index, step, key), so any thread can start anywhere, the backward pass recomputes the
 * same mask, and a resumed run gets the same masks as an uninterrupted one.
 */
#include "internal.h"

enum { CHUNK = 6144 };                  /* a multiple of the words per call of philox in every table */

pyops_status pyops_dropout(float *y, const float *x, const int64_t *step, int64_t n, float p, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_dropout("dropout", n, p);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const uint32_t threshold = pyops_dropout_threshold(p);
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_EXPS)
    for (int64_t i = 0; i < n; i += CHUNK)
        k->dropout(y + i, x + i, i / 4, pyops_min(CHUNK, n - i), (uint64_t)step[0], key, threshold, 1.0f / (1.0f - p));
    return PYOPS_OK;
}

pyops_status pyops_residual(float *y, const float *x, const float *branch, const int64_t *step, int64_t n, float p,
                            uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_dropout("residual", n, p);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const uint32_t threshold = pyops_dropout_threshold(p);
    const int drops = step && p > 0.0f;
    #pragma omp parallel for schedule(static) if (n > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t m = pyops_min(CHUNK, n - i);
        if (drops)
            k->residual_dropout(y + i, x + i, branch + i, i / 4, m, (uint64_t)step[0], key, threshold, 1.0f / (1.0f - p));
        else k->residual(y + i, x + i, branch + i, m);
    }
    return PYOPS_OK;
}
