/* embedding_linear.c - embedding, concatenation with a context, and a linear layer over both.
 *
 * A token has the same row at every position, and a sequence the same context at every step.  So the weight [w_e w_c] is
 * split: the product with w_e is computed once for each distinct token, the product with w_c once for each sequence, and a
 * position adds the two.  Backward first sums the gradients of the positions by token and by sequence, in the order of the
 * positions, and then computes the products of these sums.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* ---- work: offsets of its parts, in floats ---- */
typedef struct { int64_t tokens, slot, seen, sequence, rows, drows, by_token, by_sequence, total; } layout;

static layout layout_of(int64_t R, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O) {
    const int64_t most = pyops_min(R, V);               /* distinct tokens */
    layout l = {0};
    l.slot = pyops_round_up(most, PYOPS_LANES);        /* after the tokens (most): their index at each position (R), */
    l.seen = l.slot + pyops_round_up(R, PYOPS_LANES);  /* and for each row of the table (V); all int32 */
    l.sequence = l.seen + pyops_round_up(V, PYOPS_LANES);               /* the sequence of each position (R) */
    l.rows = l.sequence + (C ? pyops_round_up(R, PYOPS_LANES) : 0);     /* the rows of the tokens in the table (most,E) */
    l.drows = l.rows + pyops_round_up(most * E, PYOPS_LANES);           /* their gradients, in backward */
    l.by_token = l.drows + pyops_round_up(most * E, PYOPS_LANES);       /* products, or sums of gradients (most,O) */
    l.by_sequence = l.by_token + pyops_round_up(most * O, PYOPS_LANES); /* the same (B,O), with a context */
    l.total = l.by_sequence + (C ? B * O : 0);
    return l;
}

int64_t pyops_embedding_linear_forward_work(int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O) {
    return layout_of(N ? N : T * B, B, V, E, C, O).total;
}

int64_t pyops_embedding_linear_backward_work(int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O) {
    return layout_of(N ? N : T * B, B, V, E, C, O).total;
}

static pyops_status check(const char *who, const int32_t *ids, const float *context, const int32_t *offsets, int64_t T,
                          int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O) {
    pyops_status status = check_embedding_linear(who, context, offsets, T, B, N, V, E, C, O);
    if (!status && offsets) status = pyops_check_offsets(who, "offsets", offsets, T, B, N);
    return status ? status : pyops_check_ids(who, ids, offsets ? N : T * B, V);
}

static void set_sequences(int32_t *sequence, const int32_t *offsets, int64_t R, int64_t B) {
    for (int64_t r = 0, b = 0; r < R; r++) {
        while (offsets && r >= offsets[b + 1]) b++;
        sequence[r] = (int32_t)(offsets ? b : r % B);
    }
}

/* Return the number of distinct tokens and list them in `tokens` in the order of their first occurrence.  So a token is new at
 * position r if slot[r] equals the number of tokens before it. */
static int64_t distinct(int32_t *tokens, int32_t *slot, int32_t *seen, const int32_t *ids, int64_t R, int64_t V) {
    int32_t count = 0;
    memset(seen, 0xFF, (size_t)V * sizeof *seen);       /* -1: not yet */
    for (int64_t r = 0; r < R; r++) {
        int32_t *const its = seen + ids[r];
        if (*its < 0) {
            tokens[count] = ids[r];
            *its = count++;
        }
        slot[r] = *its;
    }
    return count;
}

/* ---- the part of n for this thread: contiguous, in whole units except the last ---- */
static pyops_range share_of(int64_t n, int64_t unit) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    return (pyops_range){pyops_min(n, pyops_round_up(n * thread / threads, unit)),
                         pyops_min(n, pyops_round_up(n * (thread + 1) / threads, unit))};
}

static pyops_view columns(pyops_view b, int64_t from) { return (pyops_view){b.p + from * b.col, b.row, b.col}; }
static pyops_view transposed(pyops_view a) { return (pyops_view){a.p, a.col, a.row}; }

/* Compute this thread's rows of c (M,N) = a b and return their range.  The first thread computes all rows of a small product,
 * and of one whose parts would have too few rows to repay packing. */
static pyops_range multiply(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, int64_t M, int64_t N,
                            int64_t K, int flags, float *scratch) {
    const int shared = M * N * K > PYOPS_SHARE_FMAS && M / omp_get_num_threads() > PYOPS_FEW_ROWS;
    const pyops_range own = shared ? share_of(M, 1) : (pyops_range){0, omp_get_thread_num() ? 0 : M};
    if (own.from < own.to)
        pyops_product(pyops_for_product(k, N, K), c + own.from * ldc, ldc, (pyops_view){a.p + own.from * a.row, a.row, a.col},
                      b, NULL, own.to - own.from, N, K, flags, scratch);
    return own;
}

pyops_status pyops_embedding_linear_forward(float *y, const float *table, const int32_t *ids, const float *context,
                                            const int32_t *offsets, const float *weight, const float *bias, float *work,
                                            int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O,
                                            void *stream) {
    (void)stream;
    const pyops_status status = check("embedding_linear_forward", ids, context, offsets, T, B, N, V, E, C, O);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t R = offsets ? N : T * B, I = E + C;
    const layout l = layout_of(R, B, V, E, C, O);
    int32_t *const tokens = (int32_t *)(work + l.tokens), *const slot = (int32_t *)(work + l.slot);
    int32_t *const sequence = (int32_t *)(work + l.sequence);
    if (C) set_sequences(sequence, offsets, R, B);
    float *const rows = work + l.rows, *const by_token = work + l.by_token, *const by_sequence = work + l.by_sequence;

    const pyops_view w_e = {weight, 1, I}, w_c = {weight + E, 1, I};           /* transposed */
    const int64_t count = distinct(tokens, slot, (int32_t *)(work + l.seen), ids, R, V);
    int failed = 0;
    #pragma omp parallel if (R * O > PYOPS_SHARE_FLOATS || (count + (C ? B : 0)) * O * I > PYOPS_SHARE_FMAS)
    {
        const pyops_range own = share_of(O, k->NR);
        const int64_t j = own.from, n = own.to - own.from;
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) pyops_copy(rows + i * E, table + tokens[i] * E, E);
        if (scratch && n) {
            const pyops_kernels *const k_e = pyops_for_product(k, O, E), *const k_c = pyops_for_product(k, O, C);
            pyops_product(k_e, by_token + j, O, (pyops_view){rows, E, 1}, columns(w_e, j), bias + j, count, n, E, 0, scratch);
            if (C)
                pyops_product(k_c, by_sequence + j, O, (pyops_view){context, C, 1}, columns(w_c, j), NULL, B, n, C, 0, scratch);
        }
        #pragma omp barrier
        #pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < R; r++) {
            if (C) k->residual(y + r * O, by_token + slot[r] * O, by_sequence + sequence[r] * O, O);
            else pyops_copy(y + r * O, by_token + slot[r] * O, O);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "embedding_linear_forward: no memory for packed tiles") : PYOPS_OK;
}

pyops_status pyops_embedding_linear_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight, float *dbias,
                                             const float *dy, const float *table, const int32_t *ids, const float *context,
                                             const int32_t *offsets, const float *weight, float *work, int64_t T, int64_t B,
                                             int64_t N, int64_t V, int64_t E, int64_t C, int64_t O, int64_t ld,
                                             int32_t add_dcontext, void *stream) {
    (void)stream;
    const pyops_status status = check("embedding_linear_backward", ids, context, offsets, T, B, N, V, E, C, O);
    if (status) return status;
    PYOPS_REQUIRE(ld >= O, "embedding_linear_backward: ld=%lld, expected at least O=%lld", LL(ld), LL(O));
    const pyops_kernels *k = pyops_active();
    const int64_t R = offsets ? N : T * B, I = E + C;
    const layout l = layout_of(R, B, V, E, C, O);
    int32_t *const tokens = (int32_t *)(work + l.tokens), *const slot = (int32_t *)(work + l.slot);
    int32_t *const sequence = (int32_t *)(work + l.sequence);
    if (C) set_sequences(sequence, offsets, R, B);
    float *const rows = work + l.rows, *const drows = work + l.drows;
    float *const by_token = work + l.by_token, *const by_sequence = work + l.by_sequence;

    const int64_t count = distinct(tokens, slot, (int32_t *)(work + l.seen), ids, R, V);
    for (int64_t i = 0; i < count; i++) pyops_touch(touched, tokens[i] * E, tokens[i] * E + E);
    const pyops_view c = {context, C, 1}, u = {by_token, O, 1}, s = {by_sequence, O, 1};
    int failed = 0;
    #pragma omp parallel if (R * O > PYOPS_SHARE_FLOATS || (count + (C ? B : 0)) * O * I > PYOPS_SHARE_FMAS)
    {
        /* threads share columns, so every sum is in the order of the positions */
        const pyops_range own = share_of(O, k->NR);
        const int64_t j = own.from, n = own.to - own.from;
        float *scratch = pyops_scratch_or_fail((size_t)pyops_max((int64_t)pyops_product_scratch(k), n), &failed);
        #pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; i++) pyops_copy(rows + i * E, table + tokens[i] * E, E);
        int32_t before = 0;                             /* distinct tokens so far */
        for (int64_t b = 0; b < B && C && n; b++) k->fill(by_sequence + b * O + j, n, 0.0f);
        for (int64_t r = 0; r < R && n; r++) {
            const float *dy_r = dy + r * ld + j;
            const int is_new = slot[r] == before;
            if (is_new) pyops_copy(by_token + slot[r] * O + j, dy_r, n);
            else k->add(by_token + slot[r] * O + j, dy_r, n);
            if (C) k->add(by_sequence + sequence[r] * O + j, dy_r, n);
            before += is_new;
        }
        if (scratch && n) {
            k->fill(scratch, n, 0.0f);
            for (int64_t i = 0; i < count; i++) k->add(scratch, by_token + i * O + j, n);
            k->add(dbias + j, scratch, n);
        }
        #pragma omp barrier
        if (scratch) {
            /* for tokens, then contexts: gradient' x input for the weight, gradient x weight for the input */
            multiply(k, dweight, I, transposed(u), (pyops_view){rows, E, 1}, O, E, count, PYOPS_ADD, scratch);
            if (C) multiply(k, dweight + E, I, transposed(s), c, O, C, B, PYOPS_ADD, scratch);
            const pyops_range own_tokens = multiply(k, drows, E, u, (pyops_view){weight, I, 1}, count, E, O, 0, scratch);
            for (int64_t i = own_tokens.from; i < own_tokens.to; i++) k->add(dtable + tokens[i] * E, drows + i * E, E);
            if (C) multiply(k, dcontext, C, s, (pyops_view){weight + E, I, 1}, B, C, O, add_dcontext ? PYOPS_ADD : 0, scratch);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "embedding_linear_backward: no memory for packed tiles") : PYOPS_OK;
}
