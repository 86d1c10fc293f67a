/* attention_step.c - attention of one query per hypothesis, in decoding, and the rows of a hypothesis' earlier tokens.
 *
 * Keys and values of earlier tokens are never moved: hypotheses of a beam that have a token in common read the same row.
 */
#include <math.h>
#include "internal.h"

/* Check the positions of R hypotheses, and the rows of the keys that they read. */
static pyops_status check_positions_of(const int32_t *index, const int32_t *positions, int64_t R, int64_t T, int64_t W) {
    const pyops_status status = pyops_check_ids("attention_step", positions, R, T);
    if (status) return status;
    for (int64_t r = 0; r < R; r++)
        for (int64_t s = 0; s <= positions[r]; s++)
            PYOPS_REQUIRE(index[s * W + r] >= 0 && index[s * W + r] < T * W,
                          "attention_step: index[%lld,%lld]=%d, expected 0 to %lld", LL(s), LL(r), index[s * W + r],
                          LL(T * W - 1));
    return PYOPS_OK;
}

pyops_status pyops_attention_step(float *y, const float *q, const float *k, const float *v, const int32_t *index,
                                  const int32_t *offsets, const int32_t *positions, int64_t R, int64_t T, int64_t M, int64_t W,
                                  int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk, int32_t causal, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && T >= 1 && heads >= 1 && C >= 1,
                  "attention_step: R=%lld T=%lld heads=%lld C=%lld, expected R of at least 0, the others of at least 1", LL(R),
                  LL(T), LL(heads), LL(C));
    PYOPS_REQUIRE(
        offsets || (R <= (causal ? T : W) && M >= 0 && M <= T && (index || !M)),
        "attention_step: R=%lld W=%lld M=%lld T=%lld, expected R of at most W (with causal T), M from 0 to T, and an index for M "
        "above 0",
        LL(R), LL(W), LL(M), LL(T));
    PYOPS_REQUIRE(!causal || (W == 1 && !index && !offsets),
                  "attention_step: W=%lld with causal, expected W=1 without index and offsets", LL(W));
    PYOPS_REQUIRE(!offsets || (B >= 1 && R % B == 0), "attention_step: R=%lld B=%lld with offsets, expected R a multiple of B",
                  LL(R), LL(B));
    PYOPS_REQUIRE(!offsets || index || B == W, "attention_step: B=%lld W=%lld with offsets, expected B=W without an index",
                  LL(B), LL(W));
    PYOPS_REQUIRE(!positions || (index && !offsets && !causal),
                  "attention_step: positions with causal=%d, expected causal=0, an index, and no offsets", causal);
    pyops_status status = check_attention_rows("attention_step", "ldq", ldq, heads, C);
    if (!status) status = check_attention_rows("attention_step", "ldk", ldk, heads, C);
    if (status) return status;
    if (offsets) status = pyops_check_offsets("attention_step", "offsets", offsets, T, W, -1);
    if (!status && positions) status = check_positions_of(index, positions, R, T, W);
    else if (!status && index) status = pyops_check_ids("attention_step", index, offsets ? B : M * R, W);
    if (status) return status;
    const pyops_kernels *kernels = pyops_active();
    const int64_t D = heads * C;
    const float scale = 1.0f / sqrtf((float)C);
    int failed = 0;
    #pragma omp parallel if (R * T * D > PYOPS_SHARE_FMAS / 8)
    {
        float *const scratch = pyops_scratch_or_fail((size_t)(3 * T + PYOPS_LANES), &failed);
        int64_t *const at = (int64_t *)scratch;
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            if (!scratch) continue;
            int64_t n = T;
            if (causal) {
                n = T - R + r + 1;
                for (int64_t s = 0; s < n; s++) at[s] = s * ldk;
            } else if (offsets) {
                const int64_t b = index ? index[r % B] : r % B, first = offsets[b];
                n = offsets[b + 1] - first;
                for (int64_t s = 0; s < n; s++) at[s] = (first + s) * ldk;
            } else if (positions) {
                n = positions[r] + 1;
                for (int64_t s = 0; s < n; s++) at[s] = index[s * W + r] * ldk;
            } else {
                for (int64_t s = 0; s < T; s++) at[s] = (s * W + (s < M ? index[s * R + r] : r)) * ldk;
            }
            if (n) kernels->attend(y + r * D, q + r * ldq, k, v, at, scratch + 2 * T, n, heads, C, scale);
            else kernels->fill(y + r * D, D, 0.0f);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_step: no memory for %lld keys", LL(T)) : PYOPS_OK;
}

pyops_status pyops_follow_parents(int32_t *index, const int32_t *before, const int32_t *parents, int64_t T, int64_t M,
                                  int64_t N, int64_t R, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(
        T >= 0 && N >= 0 && R >= 0 && M >= 0 && M <= T && (before || !M),
        "follow_parents: T=%lld M=%lld N=%lld R=%lld, expected T, N and R of at least 0, M from 0 to T, and `before` for M "
        "above 0",
        LL(T), LL(M), LL(N), LL(R));
    const pyops_status status = pyops_check_ids("follow_parents", parents, R, N);
    if (status) return status;
    for (int64_t s = 0; s < T; s++)
        for (int64_t r = 0; r < R; r++) index[s * R + r] = s < M ? before[s * N + parents[r]] : parents[r];
    return PYOPS_OK;
}
