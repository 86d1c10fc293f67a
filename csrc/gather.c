/* gather.c - a batch from a resident data set: pixels to floats, token ids to time-major steps. */
#include "internal.h"

static pyops_status check(const char *who, const int64_t *rows, int64_t N, int64_t B, int64_t C) {
    const pyops_status status = check_gather(who, N, B, C);
    return status ? status : pyops_check_rows(who, rows, B, N);
}

pyops_status pyops_gather_pixels(float *y, const uint8_t *table, const int64_t *rows, int64_t N, int64_t B, int64_t C,
                                 float scale, void *stream) {
    (void)stream;
    const pyops_status status = check("gather_pixels", rows, N, B, C);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (B * C > PYOPS_SHARE_FLOATS)
    for (int64_t b = 0; b < B; b++) k->from_bytes(y + b * C, table + rows[b] * C, scale, C);
    return PYOPS_OK;
}

pyops_status pyops_gather_sequences(int32_t *ids, const int32_t *table, const int64_t *rows, int64_t N, int64_t B, int64_t T,
                                    int32_t first, void *stream) {
    (void)stream;
    const pyops_status status = check("gather_sequences", rows, N, B, T);
    if (status) return status;
    const int64_t shift = first >= 0;
    for (int64_t b = 0; b < B; b++) {
        if (shift && T) ids[b] = first;
        for (int64_t t = shift; t < T; t++) ids[t * B + b] = table[rows[b] * T + t - shift];
    }
    return PYOPS_OK;
}
