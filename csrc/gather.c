/* gather.c - rows by index: pixels to floats, token ids to time-major steps or to packed sentences, rows of activations; and
 * the indices of elements that are not 0. */
#include <string.h>
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

/* Add the lengths before anything is written, so that a wrong total writes nothing.  who: named in the texts of errors; total_name:
 * the argument with the total. */
static pyops_status check_sentences(const char *who, const char *total_name, const int64_t *starts, const int64_t *rows,
                                    int64_t N, int64_t B, int64_t total) {
    pyops_status status = check_pack(who, N, B, total);
    if (!status) status = pyops_check_rows(who, rows, B, N);
    if (status) return status;
    int64_t sum = 0;
    for (int64_t b = 0; b < B; b++) {
        const int64_t length = starts[rows[b] + 1] - starts[rows[b]];
        PYOPS_REQUIRE(length >= 0, "%s: starts[%lld]=%lld, expected at most starts[%lld]=%lld", who, LL(rows[b]),
                      LL(starts[rows[b]]), LL(rows[b] + 1), LL(starts[rows[b] + 1]));
        PYOPS_REQUIRE(length <= total - sum, "%s: %s=%lld, expected the sum of the lengths, which is larger", who, total_name,
                      LL(total));
        sum += length;
    }
    PYOPS_REQUIRE(sum == total, "%s: %s=%lld, expected %lld, the sum of the lengths", who, total_name, LL(total), LL(sum));
    return PYOPS_OK;
}

static void pack(int32_t *ids, int32_t *positions, int32_t *offsets, const int32_t *table, const int64_t *starts,
                 const int64_t *rows, int64_t B, int64_t total, int32_t first) {
    const int64_t shift = first >= 0;
    int64_t at = 0;
    for (int64_t b = 0; b < B; b++) {
        const int32_t *const sentence = table + starts[rows[b]];
        const int64_t length = starts[rows[b] + 1] - starts[rows[b]];
        if (offsets) offsets[b] = (int32_t)at;
        if (ids && shift && length) ids[at] = first;
        for (int64_t t = shift; ids && t < length; t++) ids[at + t] = sentence[t - shift];
        for (int64_t t = 0; positions && t < length; t++) positions[at + t] = (int32_t)t;
        at += length;
    }
    if (offsets) offsets[B] = (int32_t)total;
}

pyops_status pyops_pack_sequences(int32_t *ids, int32_t *positions, int32_t *offsets, const int32_t *table,
                                  const int64_t *starts, const int64_t *rows, int64_t N, int64_t B, int64_t total,
                                  int32_t first, void *stream) {
    (void)stream;
    const pyops_status status = check_sentences("pack_sequences", "total", starts, rows, N, B, total);
    if (!status) pack(ids, positions, offsets, table, starts, rows, B, total, first);
    return status;
}

pyops_status pyops_pack_pairs(int32_t *source, int32_t *source_positions, int32_t *source_offsets, int32_t *target,
                              int32_t *target_positions, int32_t *target_offsets, int32_t *labels, const int32_t *source_table,
                              const int64_t *source_starts, const int32_t *label_table, const int64_t *label_starts,
                              const int64_t *rows, int64_t N, int64_t B, int64_t source_total, int64_t target_total,
                              int32_t first, void *stream) {
    (void)stream;
    pyops_status status = check_sentences("pack_pairs", "source_total", source_starts, rows, N, B, source_total);
    if (!status) status = check_sentences("pack_pairs", "target_total", label_starts, rows, N, B, target_total);
    if (status) return status;
    pack(source, source_positions, source_offsets, source_table, source_starts, rows, B, source_total, -1);
    pack(target, target_positions, target_offsets, label_table, label_starts, rows, B, target_total, first);
    pack(labels, NULL, NULL, label_table, label_starts, rows, B, target_total, -1);
    return PYOPS_OK;
}

pyops_status pyops_gather_rows(float *y, const float *x, const int32_t *rows, int64_t T, int64_t N, int64_t R, int64_t C,
                               void *stream) {
    (void)stream;
    const pyops_status status = check_gather_rows(T, N, R, C);
    if (status) return status;
    for (int64_t r = 0; r < R; r++)
        PYOPS_REQUIRE(rows[r] >= 0 && rows[r] < N, "gather_rows: rows[%lld]=%d, expected 0 to %lld", LL(r), rows[r], LL(N - 1));
    #pragma omp parallel for schedule(static) if (T * R * C > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < T * R; i++) memcpy(y + i * C, x + (i / R * N + rows[i % R]) * C, (size_t)C * sizeof *y);
    return PYOPS_OK;
}

pyops_status pyops_scatter_rows(float *y, const float *x, const int32_t *rows, int64_t N, int64_t R, int64_t C, int64_t ldy,
                                int64_t ldx, void *stream) {
    (void)stream;
    const pyops_status status = check_scatter_rows(N, R, C, ldy, ldx);
    if (status) return status;
    for (int64_t r = 0; r < R; r++)
        PYOPS_REQUIRE(rows[r] >= 0 && rows[r] < N, "scatter_rows: rows[%lld]=%d, expected 0 to %lld", LL(r), rows[r],
                      LL(N - 1));
    PYOPS_FOR(r, R, R * C > PYOPS_SHARE_FLOATS, { pyops_copy(y + rows[r] * ldy, x + r * ldx, C); });
    return PYOPS_OK;
}

/* at[0] (count) holds numbers of elements of an array (shape) of n elements; replace them by indices, one axis at a time. */
static void split_axes(int32_t *at, int64_t count, int64_t n, const int64_t *shape, int64_t ndim) {
    for (int64_t d = ndim - 1; d > 0; d--)
        for (int64_t k = 0; k < count; k++) {
            at[d * n + k] = (int32_t)(at[k] % shape[d]);
            at[k] = (int32_t)(at[k] / shape[d]);
        }
}

#define NONZERO(name, type) \
    int64_t name(int32_t *at, const type *x, const int64_t *shape, int64_t ndim) { \
        int64_t n = 1, count = 0; \
        for (int64_t d = 0; d < ndim; d++) n *= shape[d]; \
        for (int64_t i = 0; i < n; i++) { \
            at[count] = (int32_t)i; /* written over unless x[i] is not 0: without a branch */ \
            count += x[i] != 0; \
        } \
        split_axes(at, count, n, shape, ndim); \
        return count; \
    }
NONZERO(pyops_nonzero, float)
NONZERO(pyops_nonzero_int32, int32_t)
NONZERO(pyops_nonzero_double, double)

#define SELECT(name, type) \
    int64_t name(void *y, const void *x, const type *mask, int64_t n, int64_t bytes) { \
        int64_t count = 0; \
        for (int64_t i = 0; i < n; i++) \
            if (mask[i] != 0) memcpy((char *)y + count++ * bytes, (const char *)x + i * bytes, (size_t)bytes); \
        return count; \
    }
SELECT(pyops_select, float)
SELECT(pyops_select_int32, int32_t)
SELECT(pyops_select_double, double)
