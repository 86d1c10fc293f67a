/* dropout.c - zero a share p of the elements and scale the rest, from counters instead of a stored mask.
 *
 * Philox turns (index, step, key) into random words, so any thread can start anywhere, the backward pass makes the
 * same mask again, and a resumed run goes on with the masks it would have had.
 */
#include "internal.h"

pyops_status pyops_dropout(float *y, const float *x, const int64_t *step, int64_t n, float p, uint64_t key, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0, "dropout: n=%lld", LL(n));
    PYOPS_REQUIRE(p >= 0.0f && p < 1.0f, "dropout: p=%g, want 0 <= p < 1", (double)p);
    enum { CHUNK = 4096 };              /* a multiple of the four words of a counter */
    const pyops_kernels *k = pyops_active();
    const uint32_t threshold = (uint32_t)((double)p * 4294967296.0);
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_EXPS)
    for (int64_t i = 0; i < n; i += CHUNK)
        k->dropout(y + i, x + i, i / 4, pyops_min(CHUNK, n - i), (uint64_t)step[0], key, threshold, 1.0f / (1.0f - p));
    return PYOPS_OK;
}
