/* rnn.c - LSTM and simple recurrent network over a whole sequence.
 *
 * As in gru.c, the input product is computed for all steps at once, into the memory of the gates or of h.  Then each thread
 * computes all T steps of its rows of the batch: it adds the recurrent product and applies the cell.  Backward runs the steps
 * in reverse and stores the gradients of a in `dgates`; dx and the weight gradients are then one product each over all steps.
 * If sequences have lengths, the rows of operands are compacted.
 */
#include <string.h>
#include "recurrent.h"

static int64_t blocks_of(int32_t cell) { return cell == PYOPS_CELL_LSTM ? 4 : 1; }

/* ---- work: offsets of its parts, in floats; G = blocks_of(cell) ---- */
typedef struct { int64_t zeros, bias, indices, state, cells, x, a, h, dx, total; } layout;

static layout forward_layout(const pyops_kernels *k, int64_t T, int64_t B, int64_t I, int64_t H, int64_t G) {
    layout l = {0};                                     /* packed w_hh' (H,GH) */
    l.zeros = pyops_packed_b_size(k, H, G * H);         /* (H) */
    l.bias = l.zeros + H;                               /* b_ih + b_hh (GH) */
    l.indices = l.bias + G * H;
    l.state = l.indices + indices_size(T, T * B);       /* if rows are compacted: h[t-1] of one step (B,H), x (TB,I), a */
    l.x = l.state + B * H;                              /* (TB,GH) */
    l.a = l.x + padded(T * B) * I;
    l.total = l.a + padded(T * B) * G * H;
    return l;
}

static layout backward_layout(const pyops_kernels *k, int64_t T, int64_t B, int64_t I, int64_t H, int64_t G) {
    layout l = {0};                                     /* packed w_hh (GH,H) */
    l.zeros = pyops_packed_b_size(k, G * H, H);
    l.bias = l.zeros + H;                               /* sums of dgates, for the biases (GH) */
    l.indices = l.bias + G * H;
    l.state = l.indices + indices_size(T, T * B);       /* dh (B,H) and dc (B,H) of one step */
    l.cells = l.state + B * H;
    l.h = l.cells + B * H;                              /* h[t-1] (TB,H), with an h0 or compacted rows */
    l.a = l.h + T * B * H;                              /* if rows are compacted: dgates (TB,GH), x, dx (TB,I) */
    l.x = l.a + T * B * G * H;
    l.dx = l.x + T * B * I;
    l.total = l.dx + T * B * I;
    return l;
}

int64_t pyops_rnn_forward_work(int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell) {
    return forward_layout(pyops_active(), T, B, I, H, blocks_of(cell)).total;
}

int64_t pyops_rnn_backward_work(int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell) {
    return backward_layout(pyops_active(), T, B, I, H, blocks_of(cell)).total;
}

pyops_status pyops_rnn_forward(float *y, float *gates, const float *x, const float *h0, const float *c0, const int32_t *lengths,
                               const float *w_ih, const float *w_hh, const float *b_ih, const float *b_hh, float *work,
                               int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell, void *stream) {
    (void)stream;
    pyops_status status = check_rnn("rnn_forward", c0, gates, b_ih, b_hh, T, B, I, H, cell);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t G = blocks_of(cell), GH = G * H;
    const int is_lstm = cell == PYOPS_CELL_LSTM;
    const layout l = forward_layout(k, T, B, I, H, G);
    positions p;
    status = positions_of(&p, "rnn_forward", lengths, NULL, work + l.indices, T, B, 0, 0);
    if (status) return status;
    float *a = !p.whole ? work + l.a : is_lstm ? gates : y, *c = y + T * B * H;
    float *zeros = work + l.zeros, *bias = b_ih ? work + l.bias : NULL;
    k->fill(zeros, H, 0.0f);
    if (bias) pyops_copy(bias, b_ih, GH), k->add(bias, b_hh, GH);
    int64_t rows_in = p.count;
    if (!p.whole) {
        rows_in = T * B > PYOPS_FEW_ROWS ? padded(rows_in) : rows_in;
        gather(work + l.x, x, &p, I, I);
        k->fill(work + l.x + p.count * I, (rows_in - p.count) * I, 0.0f);
        x = work + l.x;
    }
    status = pyops_product_threaded(a, GH, (pyops_view){x, I, 1}, (pyops_view){w_ih, 1, I}, bias, rows_in, GH, I, 0);
    if (status) return status;
    const weight w = weight_of(k, (pyops_view){w_hh, 1, H}, H, GH, work, B);
    int failed = 0;
    #pragma omp parallel if (p.count * H * GH > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed), *state = work + l.state + share.from * H;
        pack(&w);
        #pragma omp barrier
        for (int64_t t = 0; t < T && scratch; t++) {
            const pyops_range at = positions_at(&p, t, share);
            const int64_t rows = at.to - at.from;
            if (!rows) break;
            const int32_t *index = p.index + at.from, *sequence = p.sequence + at.from;
            const float *h_prev = !p.whole ? state : (t ? y + (t - 1) * B * H : h0) + (t || h0 ? share.from * H : 0);
            for (int64_t i = 0; !p.whole && !t && h0 && i < rows; i++) pyops_copy(state + i * H, h0 + sequence[i] * H, H);
            float *a_t = a + at.from * GH;
            if (t || h0) multiply(a_t, GH, (pyops_view){h_prev, H, 1}, &w, NULL, rows, H, PYOPS_ADD, scratch);
            for (int64_t i = 0, next = 0; i < rows; i++) {
                const int64_t r = index[i];
                const float *c_prev = t ? c + (r - B) * H : c0 ? c0 + sequence[i] * H : zeros;
                if (is_lstm) k->lstm(y + r * H, c + r * H, gates + r * GH, a_t + i * GH, c_prev, H);
                else k->rnn(y + r * H, a_t + i * GH, H, cell == PYOPS_CELL_RELU);
                if (!p.whole && t + 1 < lengths[sequence[i]]) pyops_copy(state + next++ * H, y + r * H, H);
            }
        }
        if (lengths) {
            clear_rest(k, y, lengths, T, B, H, share);
            if (is_lstm) clear_rest(k, c, lengths, T, B, H, share);
            if (is_lstm) clear_rest(k, gates, lengths, T, B, GH, share);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "rnn_forward: no memory for packed tiles") : PYOPS_OK;
}

pyops_status pyops_rnn_backward(float *dx, float *dh0, float *dc0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh,
                                float *dgates, const float *dy, const float *x, const float *h0, const float *c0,
                                const int32_t *lengths, const float *w_ih, const float *w_hh, const float *y,
                                const float *gates, float *work, int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell,
                                void *stream) {
    (void)stream;
    pyops_status status = check_rnn("rnn_backward", c0, gates, db_ih, db_hh, T, B, I, H, cell);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t G = blocks_of(cell), GH = G * H;
    const int is_lstm = cell == PYOPS_CELL_LSTM;
    const layout l = backward_layout(k, T, B, I, H, G);
    positions p;
    status = positions_of(&p, "rnn_backward", lengths, NULL, work + l.indices, T, B, 0, 0);
    if (status) return status;
    float *ours = p.whole ? dgates : work + l.a, *zeros = work + l.zeros;       /* dgates, one row per position */
    const float *c = y + T * B * H, *dc_all = dy + T * B * H;
    const int moves_h = !p.whole || h0;                 /* h[t-1] has another layout */
    k->fill(zeros, H, 0.0f);

    /* pass 1: the gradients of a of all steps, last step first */
    const weight w = weight_of(k, (pyops_view){w_hh, H, 1}, GH, H, work, B);
    int failed = 0;
    #pragma omp parallel if (p.count * H * GH > PYOPS_SHARE_FMAS)
    {
        const pyops_range share = share_of(&p, T, B);
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        float *dh = work + l.state + share.from * H, *dc = work + l.cells;     /* dc has a row for each sequence */
        pack(&w);
        #pragma omp barrier
        k->fill(dc + share.from * H, (share.to - share.from) * H, 0.0f);
        int64_t later = 0;                              /* rows at step t + 1 */
        for (int64_t t = T - 1; t >= 0 && scratch; t--) {
            const pyops_range at = positions_at(&p, t, share);
            const int64_t rows = at.to - at.from;
            const int32_t *index = p.index + at.from, *sequence = p.sequence + at.from;
            for (int64_t i = rows - 1; i >= 0; i--) {   /* insert a row for each sequence that ends here */
                if (t + 1 >= length_of(&p, sequence[i], T)) pyops_copy(dh + i * H, zeros, H);
                else if (--later < i) pyops_copy(dh + i * H, dh + later * H, H);
            }
            for (int64_t i = 0; i < rows; i++) {
                const int64_t v = at.from + i, r = index[i], b = sequence[i];
                float *d = ours + v * GH, *dh_i = dh + i * H, *dc_b = dc + b * H;
                const float *dy_i = dy + r * H;
                if (is_lstm) {
                    const float *c_prev = t ? c + (r - B) * H : c0 ? c0 + b * H : zeros;
                    k->lstm_back(d, dc_b, dh_i, dy_i, dc_all + r * H, gates + r * GH, c + r * H, c_prev, H);
                } else {
                    k->rnn_back(d, dh_i, dy_i, y + r * H, H, cell == PYOPS_CELL_RELU);
                }
                if (moves_h) pyops_copy(work + l.h + v * H, t ? y + (r - B) * H : h0 ? h0 + b * H : zeros, H);
                if (p.whole) continue;
                pyops_copy(work + l.x + v * I, x + r * I, I);
                pyops_copy(dgates + r * GH, d, GH);
            }
            later = rows;
            if (t || dh0) multiply(dh, H, (pyops_view){ours + at.from * GH, GH, 1}, &w, NULL, rows, GH, 0, scratch);
        }
        const int32_t *sequences = p.sequence + positions_at(&p, 0, share).from;
        for (int64_t i = 0; dh0 && i < later; i++) pyops_copy(dh0 + sequences[i] * H, dh + i * H, H);
        if (dc0) pyops_copy(dc0 + share.from * H, dc + share.from * H, (share.to - share.from) * H);
        if (lengths) {
            clear_rest(k, dgates, lengths, T, B, GH, share);
            if (dx) clear_rest(k, dx, lengths, T, B, I, share);
            if (dh0) clear_rest(k, dh0, lengths, 1, B, H, share);
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "rnn_backward: no memory for packed tiles");

    /* pass 2: one product each over all steps */
    const int64_t V = p.count, first = h0 ? 0 : p.first[1];      /* h[-1] = 0 contributes nothing */
    if (dx) {
        float *to = p.whole ? dx : work + l.dx;
        status = pyops_product_threaded(to, I, (pyops_view){ours, GH, 1}, (pyops_view){w_ih, I, 1}, NULL, V, I, GH, 0);
        #pragma omp parallel for schedule(static) if (V * I > PYOPS_SHARE_FLOATS)
        for (int64_t v = 0; v < (p.whole ? 0 : V); v++) pyops_copy(dx + p.index[v] * I, to + v * I, I);
    }
    if (!status)
        status = pyops_product_threaded(dw_ih, I, (pyops_view){ours, 1, GH}, (pyops_view){p.whole ? x : work + l.x, I, 1}, NULL,
                                        GH, I, V, PYOPS_ADD);
    if (!status)
        status = pyops_product_threaded(dw_hh, H, (pyops_view){ours + first * GH, 1, GH},
                                        (pyops_view){moves_h ? work + l.h + first * H : y, H, 1}, NULL, GH, H, V - first,
                                        PYOPS_ADD);
    if (status || !db_ih) return status;
    float *sums = work + l.bias;
    k->fill(sums, GH, 0.0f);
    pyops_add_column_sums(sums, ours, V, GH, GH);
    k->add(db_ih, sums, GH);
    k->add(db_hh, sums, GH);
    return PYOPS_OK;
}
