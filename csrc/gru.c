/* gru.c - a gated recurrent unit over a whole sequence.
 *
 * The input product is computed for all steps at once, or by the caller.  After it the rows of the batch are independent: each
 * thread computes all T steps of its rows and never waits for another.  The recurrent weights are packed once for all steps.
 * Backward runs the steps in reverse in the same way and stores the gate gradients of all steps in `dgates`; dx and the weight
 * gradients are then one product each over all steps.
 *
 * If sequences have lengths, or are packed, the rows of operands are compacted, so that a product has one row per position,
 * in the order of t, then b: sums do not depend on the threads or the layout.  The states of a thread's sequences are
 * compacted when one ends; backward inserts a row where one begins.
 *
 * With the reset gate before the product w_hh is used in two parts, [r z] (2H,H) and n (H,H), which multiply different inputs.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* ---- recurrent products: w (K,N), packed, or in index for few rows ---- */
typedef struct {
    pyops_view at;
    int64_t K, N;
    float *packed;
} weight;

static weight weight_of(pyops_view at, int64_t K, int64_t N, float *packed, int64_t B) {
    return (weight){at, K, N, B > PYOPS_FEW_ROWS ? packed : NULL};
}

/* Every thread packs a part; the packed weight may be used after a barrier. */
static void pack(const pyops_kernels *k, const weight *w) {
    if (!w->packed) return;
    #pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < w->N; j += k->NR) pyops_pack_b(k, w->packed, w->at, w->K, w->N, j, pyops_min(j + k->NR, w->N));
}

/* c (M,N) = a w + bias; K is the K of w, or 0 if a is zeros, which leaves only the bias */
static void multiply(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, const weight *w, const float *bias, int64_t M,
                     int64_t K, int flags, float *scratch) {
    if (w->packed) pyops_product_packed(k, c, ldc, a, w->packed, bias, M, w->N, K, 0, w->N, flags, scratch);
    else pyops_product(k, c, ldc, a, w->at, bias, M, w->N, K, flags, scratch);
}

/* ---- positions (b,t) with t less than the length of sequence b, in the order of t, then b ---- */
typedef struct {
    const int32_t *lengths, *offsets;                   /* both NULL: all sequences have T steps */
    const int32_t *first;                               /* (T+1): first position of each step */
    const int32_t *index, *sequence;                    /* (first[T]): row and sequence of each position */
    int64_t count;
    int64_t back;                                       /* from the row of a position to the row of the step before it */
    int whole;                                          /* all have T steps and are not packed: index[v] = v */
} positions;

/* rows of x: N if they are packed, else T * B */
static int64_t rows_of(int64_t T, int64_t B, int64_t N) { return N ? N : T * B; }
static int64_t indices_size(int64_t T, int64_t rows) { return pyops_round_up(T + 1 + 2 * rows, PYOPS_LANES); }
static int64_t length_of(const positions *p, int64_t b, int64_t T) {
    return p->offsets ? p->offsets[b + 1] - p->offsets[b] : p->lengths ? p->lengths[b] : T;
}

static pyops_status positions_of(positions *p, const char *who, const int32_t *lengths, const int32_t *offsets, float *work,
                                 int64_t T, int64_t B, int64_t N, int reverse) {
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
    *p = (positions){lengths, offsets, first, index, sequence, 0, back, 0};
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

/* The sequences of this thread; threads get about equally many positions. */
static pyops_range share_of(const positions *p, int64_t T, int64_t B) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    pyops_range share = {0, B};
    for (int64_t b = 0, before = 0; b < B; before += length_of(p, b++, T)) {
        if (before * threads < p->count * thread) share.from = b + 1;
        if (before * threads >= p->count * (thread + 1) && thread < threads - 1 && b < share.to) share.to = b;
    }
    return share;
}

/* The positions of these sequences at step t. */
static pyops_range positions_at(const positions *p, int64_t t, pyops_range share) {
    pyops_range at = {p->first[t], p->first[t + 1]};
    while (at.from < at.to && p->sequence[at.from] < share.from) at.from++;
    while (at.from < at.to && p->sequence[at.to - 1] >= share.to) at.to--;
    return at;
}

/* y (count,C) = the rows of x, ldx apart, at the positions */
static void gather(float *y, const float *x, const positions *p, int64_t C, int64_t ldx) {
    #pragma omp parallel for schedule(static) if (p->count * C > PYOPS_SHARE_FLOATS)
    for (int64_t v = 0; v < p->count; v++) pyops_copy(y + v * C, x + p->index[v] * ldx, C);
}

/* Zero x (T,B,C) after the end of each sequence of this thread. */
static void clear_rest(const pyops_kernels *k, float *x, const int32_t *lengths, int64_t T, int64_t B, int64_t C,
                       pyops_range share) {
    for (int64_t b = share.from; b < share.to; b++)
        for (int64_t t = lengths[b]; t < T; t++) k->fill(x + (t * B + b) * C, C, 0.0f);
}

/* A product of few rows sums in another order.  So fewer compacted rows are padded to more than a few. */
static int64_t padded(int64_t rows) { return pyops_max(rows, PYOPS_FEW_ROWS + 1); }

/* ---- work: offsets of its parts, in floats ---- */
typedef struct { int64_t rz, n, rows, state, sums, h, gates, x, dx, indices, total; } layout;

static layout forward_layout(const pyops_kernels *k, int64_t T, int64_t B, int64_t N, int64_t I, int64_t H, int before) {
    const int64_t rows = rows_of(T, B, N);
    layout l = {0};                                     /* packed: w_hh[r z]' (H,2H) and w_hh[n]' (H,H), or w_hh' (H,3H) */
    l.n = pyops_packed_b_size(k, H, before ? 2 * H : 3 * H);
    l.rows = l.n + (before ? pyops_packed_b_size(k, H, H) : 0);         /* recurrent products of one step (B,3H) */
    l.indices = l.rows + B * 3 * H;
    l.state = l.indices + indices_size(T, rows);        /* if rows are compacted: h[t-1] of one step (B,H), */
    l.x = l.state + B * H;                              /* x (TB,I), a (TB,3H) */
    l.gates = l.x + padded(rows) * I;
    l.total = l.gates + (I ? padded(rows) * 3 * H : 0);
    return l;
}

static layout backward_layout(const pyops_kernels *k, int64_t T, int64_t B, int64_t N, int64_t I, int64_t H) {
    const int64_t rows = rows_of(T, B, N);
    layout l = {0};
    l.n = pyops_packed_b_size(k, 2 * H, H);             /* packed: w_hh[r z] (2H,H) and w_hh[n] (H,H) */
    l.state = l.n + pyops_packed_b_size(k, H, H);       /* dh of one step (B,H), then zeros (H) */
    l.sums = l.state + (B + 1) * H;                     /* of dgates, for the biases */
    l.indices = l.sums + 4 * H;
    l.h = l.indices + indices_size(T, rows);            /* h[t-1] (TB,H), with an h0 or compacted rows */
    l.gates = l.h + rows * H;                           /* if rows are compacted: dgates (TB,4H), x, dx (TB,I) */
    l.x = l.gates + rows * 4 * H;
    l.dx = l.x + rows * I;
    l.total = l.dx + rows * I;
    return l;
}

int64_t pyops_gru_forward_work(int64_t T, int64_t B, int64_t N, int64_t I, int64_t H) {
    const pyops_kernels *k = pyops_active();
    return pyops_max(forward_layout(k, T, B, N, I, H, 0).total, forward_layout(k, T, B, N, I, H, 1).total);
}

int64_t pyops_gru_backward_work(int64_t T, int64_t B, int64_t N, int64_t I, int64_t H) {
    return backward_layout(pyops_active(), T, B, N, I, H).total;
}

pyops_status pyops_gru_forward(float *h, float *gates, float *last, const float *x, const float *a, const float *h0,
                               const int32_t *lengths, const int32_t *offsets, const float *w_ih, const float *w_hh,
                               const float *b_ih, const float *b_hh, float *work, int64_t T, int64_t B, int64_t N, int64_t I,
                               int64_t H, int32_t reset_before, int32_t reverse, void *stream) {
    (void)stream;
    pyops_status status = check_gru("gru_forward", x, lengths, offsets, T, B, N, I, H, reverse);
    if (status) return status;
    PYOPS_REQUIRE(!I == !!a, "gru_forward: I=%lld, expected 0 if a is given, else at least 1", LL(I));
    PYOPS_REQUIRE(!last || offsets, "gru_forward: last without offsets, expected NULL");
    const pyops_kernels *k = pyops_active();
    const layout l = forward_layout(k, T, B, N, I, H, reset_before);
    positions p;
    status = positions_of(&p, "gru_forward", lengths, offsets, work + l.indices, T, B, N, reverse);
    if (status) return status;

    float *ours = p.whole ? gates : work + l.gates;    /* a = x w_ih' + b_ih for all steps, stored in r, z, n, or compacted */
    const int64_t lda = I && p.whole ? 4 * H : 3 * H;
    if (I) {
        int64_t rows = p.count;
        if (!p.whole) {
            rows = T * B > PYOPS_FEW_ROWS ? padded(rows) : rows;
            gather(work + l.x, x, &p, I, I);
            k->fill(work + l.x + p.count * I, (rows - p.count) * I, 0.0f);
            x = work + l.x;
        }
        status = pyops_product_threaded(ours, lda, (pyops_view){x, I, 1}, (pyops_view){w_ih, 1, I}, b_ih, rows, 3 * H, I, 0);
        if (status) return status;
    }
    /* w_rz contains r and z, or all three gates */
    const weight w_rz = weight_of((pyops_view){w_hh, 1, H}, H, reset_before ? 2 * H : 3 * H, work + l.rz, B);
    const weight w_n = weight_of((pyops_view){w_hh + 2 * H * H, 1, H}, H, H, work + l.n, B);
    int failed = 0;
    #pragma omp parallel if (p.count * H * H > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed),
              *product = work + l.rows + share.from * 3 * H;
        pack(k, &w_rz);
        if (reset_before) pack(k, &w_n);
        #pragma omp barrier
        for (int64_t b = share.from; last && b < share.to; b++) {
            if (length_of(&p, b, T)) continue;
            if (h0) pyops_copy(last + b * H, h0 + b * H, H);
            else k->fill(last + b * H, H, 0.0f);
        }
        for (int64_t t = 0; t < T && scratch; t++) {
            const pyops_range at = positions_at(&p, t, share);
            const int64_t rows = at.to - at.from, K = t || h0 ? H : 0;
            if (!rows) break;
            const int32_t *index = p.index + at.from, *sequence = p.sequence + at.from;
            float *state = (p.whole ? h : work + l.state) + share.from * H;
            const float *h_prev = p.whole && t ? state + (t - 1) * B * H : p.whole && h0 ? h0 + share.from * H : state;
            if (!K) k->fill(state, rows * H, 0.0f);
            else if (!t && !p.whole)
                for (int64_t i = 0; i < rows; i++) pyops_copy(state + i * H, h0 + sequence[i] * H, H);
            multiply(k, product, 3 * H, (pyops_view){h_prev, H, 1}, &w_rz, b_hh, rows, K, 0, scratch);
            if (reset_before) {
                for (int64_t i = 0; i < rows; i++) {
                    const float *a_i = I ? ours + (at.from + i) * lda : a + index[i] * lda;
                    float *gates_i = gates + index[i] * (4 * H), *product_i = product + i * 3 * H;
                    k->gru_before_1(gates_i, a_i, product_i, h_prev + i * H, H);
                    pyops_copy(product_i, gates_i + 3 * H, H);
                }
                multiply(k, product + 2 * H, 3 * H, (pyops_view){product, 3 * H, 1}, &w_n, b_hh + 2 * H, rows, K, 0, scratch);
            }
            for (int64_t i = 0, next = 0; i < rows; i++) {
                const float *a_i = I ? ours + (at.from + i) * lda : a + index[i] * lda, *product_i = product + i * 3 * H;
                float *h_i = h + index[i] * H, *gates_i = gates + index[i] * (4 * H);
                if (reset_before) k->gru_before_2(h_i, gates_i, a_i, product_i + 2 * H, h_prev + i * H, H);
                else k->gru_after(h_i, gates_i, a_i, product_i, h_prev + i * H, H);
                if (p.whole) continue;
                if (t + 1 < length_of(&p, sequence[i], T)) pyops_copy(state + next++ * H, h_i, H);
                else if (last) pyops_copy(last + sequence[i] * H, h_i, H);
            }
        }
        if (lengths) {
            clear_rest(k, h, lengths, T, B, H, share);
            clear_rest(k, gates, lengths, T, B, 4 * H, share);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "gru_forward: no memory for packed tiles") : PYOPS_OK;
}

pyops_status pyops_gru_backward(float *dx, float *dh0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh, float *dgates,
                                const float *dh, const float *dh_last, const float *x, const float *h0, const int32_t *lengths,
                                const int32_t *offsets, const float *w_ih, const float *w_hh, const float *h,
                                const float *gates, float *work, int64_t T, int64_t B, int64_t N, int64_t I, int64_t H,
                                int32_t reset_before, int32_t reverse, void *stream) {
    (void)stream;
    pyops_status status = check_gru("gru_backward", x, lengths, offsets, T, B, N, I, H, reverse);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const layout l = backward_layout(k, T, B, N, I, H);
    positions p;
    status = positions_of(&p, "gru_backward", lengths, offsets, work + l.indices, T, B, N, reverse);
    if (status) return status;
    float *ours = p.whole ? dgates : work + l.gates;    /* dgates, one row per position */
    const int moves_h = !p.whole || h0;                 /* h[t-1] has another layout */

    /* pass 1: the gate gradients of all steps, last step first */
    const weight w_rz = weight_of((pyops_view){w_hh, H, 1}, 2 * H, H, work + l.rz, B);
    const weight w_n = weight_of((pyops_view){w_hh + 2 * H * H, H, 1}, H, H, work + l.n, B);
    float *zeros = work + l.state + B * H;
    k->fill(zeros, H, 0.0f);
    int failed = 0;
    #pragma omp parallel if (p.count * H * H > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        float *carry = work + l.state + share.from * H;   /* the gradient of h[t] */
        pack(k, &w_rz);
        pack(k, &w_n);
        #pragma omp barrier
        int64_t later = 0;                              /* rows at step t + 1 */
        for (int64_t t = T - 1; t >= 0 && scratch; t--) {
            const pyops_range at = positions_at(&p, t, share);
            const int64_t rows = at.to - at.from;
            const int32_t *index = p.index + at.from, *sequence = p.sequence + at.from;
            const int has_last = dh_last && (offsets || t == T - 1);
            float *ours_t = ours + at.from * 4 * H;
            const int carry_on = t || dh0;              /* is the gradient of h[t-1] needed? */
            for (int64_t i = rows - 1; i >= 0; i--) {   /* insert a row for each sequence that ends here */
                const int64_t b = sequence[i];
                if (t + 1 >= length_of(&p, b, T)) pyops_copy(carry + i * H, has_last ? dh_last + b * H : zeros, H);
                else if (--later < i) pyops_copy(carry + i * H, carry + later * H, H);
            }
            for (int64_t i = 0; i < rows; i++) {
                const int64_t v = at.from + i, r = index[i];
                float *d = ours + v * 4 * H, *carry_i = carry + i * H;
                const float *gates_r = gates + r * 4 * H;
                const float *h_prev = t ? h + (r + p.back) * H : h0 ? h0 + sequence[i] * H : zeros;
                if (dh) k->add(carry_i, dh + r * H, H);
                k->gru_back(d, carry_i, gates_r, h_prev, H);
                if (moves_h) pyops_copy(work + l.h + v * H, h_prev, H);
                if (I && !p.whole) pyops_copy(work + l.x + v * I, x + r * I, I);
                if (reset_before) continue;
                k->gru_back_reset_after(d, gates_r, H);
                if (!p.whole) pyops_copy(dgates + r * 4 * H, d, 4 * H);
            }
            later = rows;
            const pyops_view dn = {ours_t + 2 * H, 4 * H, 1}, du = {ours_t + 3 * H, 4 * H, 1};
            if (reset_before) multiply(k, ours_t + 3 * H, 4 * H, dn, &w_n, NULL, rows, H, 0, scratch);
            else if (carry_on) multiply(k, carry, H, du, &w_n, NULL, rows, H, PYOPS_ADD, scratch);
            for (int64_t i = 0; i < rows && reset_before; i++) {
                const int64_t r = index[i];
                const float *h_prev = t ? h + (r + p.back) * H : h0 ? h0 + sequence[i] * H : zeros;
                k->gru_back_reset_before(ours_t + i * 4 * H, carry + i * H, gates + r * 4 * H, h_prev, H);
                if (!p.whole) pyops_copy(dgates + r * 4 * H, ours_t + i * 4 * H, 4 * H);
            }
            if (carry_on) multiply(k, carry, H, (pyops_view){ours_t, 4 * H, 1}, &w_rz, NULL, rows, 2 * H, PYOPS_ADD, scratch);
        }
        const int32_t *sequences = p.sequence + positions_at(&p, 0, share).from;
        for (int64_t i = 0; dh0 && i < later; i++) pyops_copy(dh0 + sequences[i] * H, carry + i * H, H);
        if (lengths) {
            clear_rest(k, dgates, lengths, T, B, 4 * H, share);
            if (I && dx) clear_rest(k, dx, lengths, T, B, I, share);
            if (dh0) clear_rest(k, dh0, lengths, 1, B, H, share);
        }
        for (int64_t b = share.from; offsets && dh0 && b < share.to; b++)       /* without a step, last is h0 */
            if (!length_of(&p, b, T)) pyops_copy(dh0 + b * H, dh_last ? dh_last + b * H : zeros, H);
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "gru_backward: no memory for packed tiles");

    /* pass 2: one product each over all steps.  For the n part of w_hh, gradient x input is
     * du x h[t-1] with the reset gate after the product, dn x u with the reset gate before it. */
    const int64_t V = p.count, first = h0 ? 0 : p.first[1];      /* h[-1] = 0 contributes nothing */
    const float *d_n = ours + (reset_before ? 2 * H : 3 * H);
    const pyops_view h_prev = {moves_h ? work + l.h + first * H : h, H, 1};
    if (I && dx) {
        float *to = p.whole ? dx : work + l.dx;
        status = pyops_product_threaded(to, I, (pyops_view){ours, 4 * H, 1}, (pyops_view){w_ih, I, 1}, NULL, V, I, 3 * H, 0);
        #pragma omp parallel for schedule(static) if (V * I > PYOPS_SHARE_FLOATS)
        for (int64_t v = 0; v < (p.whole ? 0 : V); v++) pyops_copy(dx + p.index[v] * I, to + v * I, I);
    }
    if (!status && I)
        status = pyops_product_threaded(dw_ih, I, (pyops_view){ours, 1, 4 * H}, (pyops_view){p.whole ? x : work + l.x, I, 1},
                                        NULL, 3 * H, I, V, PYOPS_ADD);
    if (!status)
        status = pyops_product_threaded(dw_hh, H, (pyops_view){ours + first * 4 * H, 1, 4 * H}, h_prev, NULL, 2 * H, H,
                                        V - first, PYOPS_ADD);
    if (!status && reset_before) {
        float *u = work + l.h;                          /* reuses the space of h[t-1] */
        if (!p.whole) gather(u, gates + 3 * H, &p, H, 4 * H);
        const pyops_view us = p.whole ? (pyops_view){gates + 3 * H, 4 * H, 1} : (pyops_view){u, H, 1};
        status = pyops_product_threaded(dw_hh + 2 * H * H, H, (pyops_view){d_n, 1, 4 * H}, us, NULL, H, H, V, PYOPS_ADD);
    }
    if (!status && !reset_before)
        status = pyops_product_threaded(dw_hh + 2 * H * H, H, (pyops_view){d_n + first * 4 * H, 1, 4 * H}, h_prev, NULL, H, H,
                                        V - first, PYOPS_ADD);
    if (status) return status;
    float *sums = work + l.sums;
    k->fill(sums, 4 * H, 0.0f);
    pyops_add_column_sums(sums, ours, V, 4 * H, 4 * H);
    if (I) k->add(db_ih, sums, 3 * H);
    k->add(db_hh, sums, 2 * H);
    k->add(db_hh + 2 * H, sums + (d_n - ours), H);
    return PYOPS_OK;
}

/* ---- one step; the caller computes the products ---- */
pyops_status pyops_gru_gates_forward(float *y, float *gates, const float *a, const float *product, const float *h_prev,
                                     int64_t B, int64_t H, int32_t stage, void *stream) {
    (void)stream;
    const pyops_status status = check_gru_step("gru_gates_forward", B, H, stage);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (B * H > PYOPS_SHARE_EXPS)
    for (int64_t b = 0; b < B; b++) {
        float *gates_b = gates + b * 4 * H, *y_b = y + b * H;
        const float *a_b = a + b * 3 * H, *h_b = h_prev + b * H;
        if (stage == PYOPS_GRU_AFTER) {
            k->gru_after(y_b, gates_b, a_b, product + b * 3 * H, h_b, H);
        } else if (stage == PYOPS_GRU_BEFORE_1) {
            k->gru_before_1(gates_b, a_b, product + b * 2 * H, h_b, H);
            memcpy(y_b, gates_b + 3 * H, (size_t)H * sizeof *y_b);
        } else {
            k->gru_before_2(y_b, gates_b, a_b, product + b * H, h_b, H);
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_gru_gates_backward(float *dh, float *da, float *dp, const float *dy, const float *du, const float *gates,
                                      const float *h_prev, int64_t B, int64_t H, int32_t stage, void *stream) {
    (void)stream;
    const pyops_status status = check_gru_step("gru_gates_backward", B, H, stage);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const size_t row = (size_t)H * sizeof *dh;
    int failed = 0;
    #pragma omp parallel if (B * H > PYOPS_SHARE_FLOATS)
    {
        float *dgates = pyops_scratch_or_fail((size_t)(4 * H), &failed);         /* dr dz dn du of a row */
        #pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            if (!dgates) continue;
            float *dh_b = dh + b * H, *da_b = da + b * 3 * H;
            const float *gates_b = gates + b * 4 * H, *h_b = h_prev + b * H;
            if (stage == PYOPS_GRU_BEFORE_2) {
                memcpy(dgates + 3 * H, du + b * H, row);
                k->gru_back_reset_before(dgates, dh_b, gates_b, h_b, H);
                memcpy(da_b, dgates, row);
                memcpy(dp + b * 2 * H, da_b, 2 * row);
                continue;
            }
            if (dy) k->add(dh_b, dy + b * H, H);
            k->gru_back(dgates, dh_b, gates_b, h_b, H);
            if (stage == PYOPS_GRU_AFTER) {
                k->gru_back_reset_after(dgates, gates_b, H);
                memcpy(da_b, dgates, 3 * row);
                memcpy(dp + b * 3 * H, dgates, 2 * row);
                memcpy(dp + b * 3 * H + 2 * H, dgates + 3 * H, row);
            } else {
                memcpy(da_b + H, dgates + H, 2 * row);
                memcpy(dp + b * H, dgates + 2 * H, row);
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "gru_gates_backward: no memory for a row of gates") : PYOPS_OK;
}
