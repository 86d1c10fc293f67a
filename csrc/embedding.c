/* embedding.c - rows of a table by id, and their gradient; also with positions and dropout.
 *
 * Backward: a token that occurs twice adds twice.  Each thread owns the tokens of one residue class, so two threads
 * never add to the same row, and a row is summed in the order of the positions for any number of threads.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* Lookup and dropout take turns on blocks of BLOCK rows, which stay in the caches.  A block begins with a whole group of random
 * words: 4 divides BLOCK. */
#define BLOCK PYOPS_TUNED(embedding_block, 16, 4, 64, 4)

static pyops_status check(const char *who, const int32_t *ids, int64_t R, int64_t V, int64_t E) {
    const pyops_status status = check_embedding(who, R, V, E);
    return status ? status : pyops_check_ids(who, ids, R, V);
}

pyops_status pyops_embedding_forward(float *y, const float *weight, const int32_t *ids, int64_t R, int64_t V, int64_t E,
                                     void *stream) {
    (void)stream;
    const pyops_status status = check("embedding_forward", ids, R, V, E);
    if (status) return status;
    PYOPS_FOR(r, R, R * E > PYOPS_SHARE_FLOATS, { memcpy(y + r * E, weight + ids[r] * E, (size_t)E * sizeof *y); });
    return PYOPS_OK;
}

pyops_status pyops_embedding_backward(float *dweight, int32_t *touched, const float *dy, const int32_t *ids, int64_t R,
                                      int64_t V, int64_t E, void *stream) {
    (void)stream;
    const pyops_status status = check("embedding_backward", ids, R, V, E);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    for (int64_t r = 0; r < R; r++) pyops_touch(touched, ids[r] * E, ids[r] * E + E);
    #pragma omp parallel if (R * E > PYOPS_SHARE_FLOATS)
    {
        const int32_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        for (int64_t r = 0; r < R; r++)
            if (ids[r] % threads == thread) k->add(dweight + ids[r] * E, dy + r * E, E);
    }
    return PYOPS_OK;
}

pyops_status pyops_embedding_positions_forward(float *y, const float *weight, const int32_t *ids, const float *table,
                                               const int32_t *positions, const int64_t *step, int64_t R, int64_t V, int64_t E,
                                               int64_t longest, float scale, float p, uint64_t key, void *stream) {
    (void)stream;
    const char *const who = "embedding_positions_forward";
    pyops_status status = check_embedding_positions(who, R, V, E, longest, p);
    if (!status) status = pyops_check_ids(who, ids, R, V);
    if (status) return status;
    for (int64_t r = 0; positions && r < R; r++)
        PYOPS_REQUIRE(positions[r] >= 0 && positions[r] < longest, "%s: positions[%lld]=%d, expected 0 to %lld", who, LL(r),
                      positions[r], LL(longest - 1));
    const pyops_kernels *k = pyops_active();
    const int drops = step && p > 0.0f;
    const uint32_t threshold = pyops_dropout_threshold(p);
    #pragma omp parallel for schedule(static) if (R * E > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t from = 0; from < R; from += BLOCK) {
        const int64_t to = pyops_min(from + BLOCK, R), i = from * E;
        for (int64_t r = from; r < to; r++)
            k->scale_add(y + r * E, weight + ids[r] * E, table + (positions ? positions[r] : 0) * E, scale, E);
        if (drops) k->dropout(y + i, y + i, i / 4, (to - from) * E, (uint64_t)step[0], key, threshold, 1.0f / (1.0f - p));
    }
    return PYOPS_OK;
}

pyops_status pyops_embedding_positions_backward(float *dweight, int32_t *touched, const float *dy, const int32_t *ids,
                                                const int64_t *step, int64_t R, int64_t V, int64_t E, float scale, float p,
                                                uint64_t key, void *stream) {
    (void)stream;
    const char *const who = "embedding_positions_backward";
    pyops_status status = check_embedding_positions(who, R, V, E, 1, p);
    if (!status) status = pyops_check_ids(who, ids, R, V);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int drops = step && p > 0.0f;
    const uint32_t threshold = pyops_dropout_threshold(p);
    int failed = 0;
    for (int64_t r = 0; r < R; r++) pyops_touch(touched, ids[r] * E, ids[r] * E + E);
    #pragma omp parallel if (R * E > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    {
        const int32_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        float *const row = pyops_scratch_or_fail((size_t)E + 4, &failed);
        for (int64_t r = 0; row && r < R; r++) {
            if (ids[r] % threads != thread) continue;
            /* from the first element of the group of random words in which the row begins */
            const int64_t before = r * E % 4, i = r * E - before, n = before + E;
            if (drops) k->dropout(row, dy + i, i / 4, n, (uint64_t)step[0], key, threshold, 1.0f / (1.0f - p));
            k->scale(row, drops ? row : dy + i, scale, n);
            k->add(dweight + ids[r] * E, row + before, E);
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for a row of %lld floats per thread", who, LL(E));
    return PYOPS_OK;
}
