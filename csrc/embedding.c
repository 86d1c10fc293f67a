/* embedding.c - rows of a table by id, and their gradient.
 *
 * Backward: a token that occurs twice adds twice.  Each thread owns the tokens of one residue class, so two threads
 * never add to the same row, and a row is summed in the order of the positions for any number of threads.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

static pyops_status check(const char *who, const int32_t *ids, int64_t R, int64_t V, int64_t E) {
    const pyops_status status = check_embedding(who, R, V, E);
    return status ? status : pyops_check_ids(who, ids, R, V);
}

pyops_status pyops_embedding_forward(float *y, const float *weight, const int32_t *ids, int64_t R, int64_t V, int64_t E,
                                     void *stream) {
    (void)stream;
    const pyops_status status = check("embedding_forward", ids, R, V, E);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (R * E > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++) memcpy(y + r * E, weight + ids[r] * E, (size_t)E * sizeof *y);
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
