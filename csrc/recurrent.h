/* recurrent.h - shared code of gru.c and rnn.c: recurrent products, sequences of different lengths, threads. */
#ifndef PYOPS_RECURRENT_H
#define PYOPS_RECURRENT_H
#include <omp.h>
#include "internal.h"

/* ---- recurrent products: w (K,N), packed, or in index for few rows ---- */
typedef struct {
    pyops_view at;
    int64_t K, N;
    float *packed;
    const pyops_kernels *k;                             /* of its products */
} weight;

static inline weight weight_of(const pyops_kernels *k, pyops_view at, int64_t K, int64_t N, float *packed, int64_t B) {
    k = pyops_for_product(k, N, K);
    return (weight){at, K, N, B > PYOPS_FEW_ROWS || k->micro.is_split ? packed : NULL, k};
}

/* Every thread packs a part; the packed weight may be used after a barrier. */
static inline void pack(const weight *w) {
    if (!w->packed) return;
    #pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < w->N; j += w->k->NR)
        pyops_pack_b(w->k, w->packed, w->at, w->K, w->N, j, pyops_min(j + w->k->NR, w->N));
}

/* c (M,N) = a w + bias; K is the K of w, or 0 if a is zeros, which leaves only the bias */
static inline void multiply(float *c, int64_t ldc, pyops_view a, const weight *w, const float *bias, int64_t M, int64_t K,
                            int flags, float *scratch) {
    if (w->packed) pyops_product_packed(w->k, c, ldc, a, w->packed, bias, M, w->N, K, 0, w->N, flags, scratch);
    else pyops_product(w->k, c, ldc, a, w->at, bias, M, w->N, K, flags, scratch);
}

/* ---- positions (b,t) with t less than the length of sequence b, in the order of t, then b ---- */
typedef struct {
    const int32_t *lengths, *offsets;                   /* both NULL: all sequences have T steps */
    const int32_t *first;                               /* (T+1): first position of each step */
    const int32_t *index, *sequence;                    /* (first[T]): row and sequence of each position */
    int64_t count;
    int64_t back;                                       /* from the row of a position to the row of the step before it */
    int whole;                                          /* all have T steps and are not packed: index[v] = v */
    const pyops_pace *pace;                             /* of the threads that share the sequences */
} positions;

/* rows of x: N if they are packed, else T * B */
static inline int64_t rows_of(int64_t T, int64_t B, int64_t N) { return N ? N : T * B; }
static inline int64_t indices_size(int64_t T, int64_t rows) { return pyops_round_up(T + 1 + 2 * rows, PYOPS_LANES); }
static inline int64_t length_of(const positions *p, int64_t b, int64_t T) {
    return p->offsets ? p->offsets[b + 1] - p->offsets[b] : p->lengths ? p->lengths[b] : T;
}

static inline pyops_status positions_of(positions *p, const char *who, const int32_t *lengths, const int32_t *offsets,
                                        float *work, int64_t T, int64_t B, int64_t N, int reverse) {
    const int64_t rows = rows_of(T, B, N);
    int32_t *first = (int32_t *)work, *index = first + T + 1, *sequence = index + rows;
    PYOPS_REQUIRE(rows <= INT32_MAX, "%s: T=%lld B=%lld, expected T * B < 2^31", who, LL(T), LL(B));
    for (int64_t b = 0; lengths && b < B; b++)
        PYOPS_REQUIRE(lengths[b] >= 0 && lengths[b] <= T, "%s: lengths[%lld]=%d, expected 0 to %lld", who, LL(b), lengths[b],
                      LL(T));
    if (offsets) {
        const pyops_status status = pyops_check_offsets(who, "offsets", offsets, T, B, N);
        if (status) return status;
    }
    const int64_t back = !offsets ? -B : reverse ? 1 : -1;
    *p = (positions){lengths, offsets, first, index, sequence, 0, back, 0, pyops_pace_of(omp_get_max_threads())};
    for (int64_t t = 0; t < T; t++) {
        first[t] = (int32_t)p->count;
        for (int64_t b = 0; b < B; b++) {
            const int64_t length = length_of(p, b, T);
            if (t >= length) continue;
            sequence[p->count] = (int32_t)b;
            index[p->count++] = (int32_t)(!offsets ? t * B + b : offsets[b] + (reverse ? length - 1 - t : t));
        }
    }
    first[T] = (int32_t)p->count;
    p->whole = !offsets && p->count == T * B;
    return PYOPS_OK;
}

/* The sequences of this thread, with its share of the positions. */
static inline pyops_range share_of(const positions *p, int64_t T, int64_t B) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const pyops_range own = pyops_part_of(pyops_pace_in(p->pace, threads), thread, threads, 0, 1, p->count, 1);
    pyops_range share = {0, B};
    for (int64_t b = 0, before = 0; b < B; before += length_of(p, b++, T)) {
        if (before < own.from) share.from = b + 1;
        if (before >= own.to && thread < threads - 1 && b < share.to) share.to = b;
    }
    return share;
}

/* The positions of these sequences at step t. */
static inline pyops_range positions_at(const positions *p, int64_t t, pyops_range share) {
    pyops_range at = {p->first[t], p->first[t + 1]};
    while (at.from < at.to && p->sequence[at.from] < share.from) at.from++;
    while (at.from < at.to && p->sequence[at.to - 1] >= share.to) at.to--;
    return at;
}

/* y (count,C) = the rows of x, ldx apart, at the positions */
static inline void gather(float *y, const float *x, const positions *p, int64_t C, int64_t ldx) {
    #pragma omp parallel for schedule(static) if (p->count * C > PYOPS_SHARE_FLOATS)
    for (int64_t v = 0; v < p->count; v++) pyops_copy(y + v * C, x + p->index[v] * ldx, C);
}

/* Zero x (T,B,C) after the end of each sequence of this thread. */
static inline void clear_rest(const pyops_kernels *k, float *x, const int32_t *lengths, int64_t T, int64_t B, int64_t C,
                              pyops_range share) {
    for (int64_t b = share.from; b < share.to; b++)
        for (int64_t t = lengths[b]; t < T; t++) k->fill(x + (t * B + b) * C, C, 0.0f);
}

/* A product of few rows sums in another order.  So fewer compacted rows are padded to more than a few. */
static inline int64_t padded(int64_t rows) { return pyops_max(rows, PYOPS_FEW_ROWS + 1); }
#endif
