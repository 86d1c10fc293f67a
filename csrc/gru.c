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
#include <string.h>
#include "recurrent.h"

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
    const weight w_rz = weight_of(k, (pyops_view){w_hh, 1, H}, H, reset_before ? 2 * H : 3 * H, work + l.rz, B);
    const weight w_n = weight_of(k, (pyops_view){w_hh + 2 * H * H, 1, H}, H, H, work + l.n, B);
    int failed = 0;
    #pragma omp parallel if (p.count * H * H > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed),
              *product = work + l.rows + share.from * 3 * H;
        pack(&w_rz);
        if (reset_before) pack(&w_n);
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
            multiply(product, 3 * H, (pyops_view){h_prev, H, 1}, &w_rz, b_hh, rows, K, 0, scratch);
            if (reset_before) {
                for (int64_t i = 0; i < rows; i++) {
                    const float *a_i = I ? ours + (at.from + i) * lda : a + index[i] * lda;
                    float *gates_i = gates + index[i] * (4 * H), *product_i = product + i * 3 * H;
                    k->gru_before_1(gates_i, a_i, product_i, h_prev + i * H, H);
                    pyops_copy(product_i, gates_i + 3 * H, H);
                }
                multiply(product + 2 * H, 3 * H, (pyops_view){product, 3 * H, 1}, &w_n, b_hh + 2 * H, rows, K, 0, scratch);
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
    const weight w_rz = weight_of(k, (pyops_view){w_hh, H, 1}, 2 * H, H, work + l.rz, B);
    const weight w_n = weight_of(k, (pyops_view){w_hh + 2 * H * H, H, 1}, H, H, work + l.n, B);
    float *zeros = work + l.state + B * H;
    k->fill(zeros, H, 0.0f);
    int failed = 0;
    #pragma omp parallel if (p.count * H * H > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        float *carry = work + l.state + share.from * H;   /* the gradient of h[t] */
        pack(&w_rz);
        pack(&w_n);
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
            if (reset_before) multiply(ours_t + 3 * H, 4 * H, dn, &w_n, NULL, rows, H, 0, scratch);
            else if (carry_on) multiply(carry, H, du, &w_n, NULL, rows, H, PYOPS_ADD, scratch);
            for (int64_t i = 0; i < rows && reset_before; i++) {
                const int64_t r = index[i];
                const float *h_prev = t ? h + (r + p.back) * H : h0 ? h0 + sequence[i] * H : zeros;
                k->gru_back_reset_before(ours_t + i * 4 * H, carry + i * H, gates + r * 4 * H, h_prev, H);
                if (!p.whole) pyops_copy(dgates + r * 4 * H, ours_t + i * 4 * H, 4 * H);
            }
            if (carry_on) multiply(carry, H, (pyops_view){ours_t, 4 * H, 1}, &w_rz, NULL, rows, 2 * H, PYOPS_ADD, scratch);
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
