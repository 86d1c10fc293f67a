/* embedding_linear.c - rows of a table by number, a context beside them, and a linear layer over both.
 *
 * A token has the same row wherever it stands in a batch, and a sentence the same context at every step.  So the weight
 * [w_e w_c] is taken apart: the product with w_e is formed once for each distinct token, that with w_c once for each
 * sentence, and a position adds the two.  Backward is the same the other way round: the gradients of the positions are
 * summed by token and by sentence first, in the order of the positions, and the products are formed of these sums.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* ---- work: where its parts begin, in floats ---- */
typedef struct { int64_t tokens, place, seen, rows, by_token, by_sentence, total; } layout;

static layout layout_of(int64_t R, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O) {
    const int64_t most = pyops_min(R, V);               /* distinct tokens */
    layout l = {0};
    l.place = pyops_round_up(most, PYOPS_LANES);        /* the distinct tokens (most), then which of them a position has (R), */
    l.seen = l.place + pyops_round_up(R, PYOPS_LANES);  /* and which of them a token of the table is (V); all int32 */
    l.rows = l.seen + pyops_round_up(V, PYOPS_LANES);   /* their rows of the table (most,E) */
    l.by_token = l.rows + pyops_round_up(most * E, PYOPS_LANES);        /* products, or sums of gradients (most,O) */
    l.by_sentence = l.by_token + pyops_round_up(most * O, PYOPS_LANES); /* the same (B,O), where there is a context */
    l.total = l.by_sentence + (C ? B * O : 0);
    return l;
}

int64_t pyops_embedding_linear_forward_work(int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O) {
    return layout_of(T * B, B, V, E, C, O).total;
}

int64_t pyops_embedding_linear_backward_work(int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O) {
    return layout_of(T * B, B, V, E, C, O).total;
}

static pyops_status check(const char *who, const int32_t *ids, const float *context, int64_t T, int64_t B, int64_t V,
                          int64_t E, int64_t C, int64_t O) {
    PYOPS_REQUIRE(T >= 0 && B >= 0 && V >= 1 && E >= 1 && C >= 0 && O >= 1, "%s: T=%lld B=%lld V=%lld E=%lld C=%lld O=%lld",
                  who, LL(T), LL(B), LL(V), LL(E), LL(C), LL(O));
    PYOPS_REQUIRE(!C == !context, "%s: C=%lld, want 0 where there is no context, and only there", who, LL(C));
    for (int64_t r = 0; r < T * B; r++)
        PYOPS_REQUIRE(ids[r] >= 0 && ids[r] < V, "%s: ids[%lld]=%d, want 0 to %lld", who, LL(r), ids[r], LL(V - 1));
    return PYOPS_OK;
}

/* -> how many distinct tokens there are; tokens has them in the order in which they first occur, so a position has a new one
 * where its place is the number of those before. */
static int64_t distinct(int32_t *tokens, int32_t *place, int32_t *seen, const int32_t *ids, int64_t R, int64_t V) {
    int32_t count = 0;
    memset(seen, 0xFF, (size_t)V * sizeof *seen);       /* -1: not yet */
    for (int64_t r = 0; r < R; r++) {
        int32_t *const its = seen + ids[r];
        if (*its < 0) {
            tokens[count] = ids[r];
            *its = count++;
        }
        place[r] = *its;
    }
    return count;
}

pyops_status pyops_embedding_linear_forward(float *y, const float *table, const int32_t *ids, const float *context,
                                            const float *weight, const float *bias, float *work,
                                            int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O, void *stream) {
    pyops_status status = check("embedding_linear_forward", ids, context, T, B, V, E, C, O);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t R = T * B, I = E + C;
    const layout l = layout_of(R, B, V, E, C, O);
    int32_t *const tokens = (int32_t *)(work + l.tokens), *const place = (int32_t *)(work + l.place);
    float *const rows = work + l.rows, *const by_token = work + l.by_token, *const by_sentence = work + l.by_sentence;

    const pyops_view w_e = {weight, 1, I}, w_c = {weight + E, 1, I};           /* transposed */
    const int64_t count = distinct(tokens, place, (int32_t *)(work + l.seen), ids, R, V);
    status = pyops_embedding_forward(rows, table, tokens, count, V, E, stream);
    if (!status) status = pyops_product_threaded(by_token, O, (pyops_view){rows, E, 1}, w_e, bias, count, O, E, 0);
    if (!status && C) status = pyops_product_threaded(by_sentence, O, (pyops_view){context, C, 1}, w_c, NULL, B, O, C, 0);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (R * O > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++) {
        if (C) k->residual(y + r*O, by_token + place[r]*O, by_sentence + r % B * O, O);
        else memcpy(y + r*O, by_token + place[r]*O, (size_t)O * sizeof *y);
    }
    return PYOPS_OK;
}

static void add_or_set(const pyops_kernels *k, float *sum, const float *x, int64_t n, int is_first) {
    if (is_first) memcpy(sum, x, (size_t)n * sizeof *sum);
    else k->add(sum, x, n);
}

pyops_status pyops_embedding_linear_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight, float *dbias,
                                             const float *dy, const float *table, const int32_t *ids, const float *context,
                                             const float *weight, float *work, int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, int64_t O,
                                             int64_t ld, void *stream) {
    pyops_status status = check("embedding_linear_backward", ids, context, T, B, V, E, C, O);
    if (status) return status;
    PYOPS_REQUIRE(ld >= O, "embedding_linear_backward: ld=%lld, want at least O=%lld", LL(ld), LL(O));
    const pyops_kernels *k = pyops_active();
    const int64_t R = T * B, I = E + C;
    const layout l = layout_of(R, B, V, E, C, O);
    int32_t *const tokens = (int32_t *)(work + l.tokens), *const place = (int32_t *)(work + l.place);
    float *const rows = work + l.rows, *const by_token = work + l.by_token, *const by_sentence = work + l.by_sentence;

    const int64_t count = distinct(tokens, place, (int32_t *)(work + l.seen), ids, R, V);
    status = pyops_embedding_forward(rows, table, tokens, count, V, E, stream);
    if (status) return status;
    #pragma omp parallel if (R * O > PYOPS_SHARE_FLOATS)
    {
        /* threads share columns, so that every sum is in the order of the positions */
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t from = pyops_min(O, pyops_round_up(O * thread / threads, PYOPS_LANES));
        const int64_t n = pyops_min(O, pyops_round_up(O * (thread + 1) / threads, PYOPS_LANES)) - from;
        int32_t before = 0;                             /* tokens that have been met */
        for (int64_t r = 0; r < R && n; r++) {
            const float *dy_r = dy + r*ld + from;
            const int is_new = place[r] == before;
            add_or_set(k, by_token + place[r]*O + from, dy_r, n, is_new);
            if (C) add_or_set(k, by_sentence + r % B * O + from, dy_r, n, r < B);
            before += is_new;
        }
    }

    /* of tokens, then of contexts: gradient' x input for the weight, gradient x weight for the input */
    const pyops_view w_e = {weight, I, 1}, w_c = {weight + E, I, 1}, u = {by_token, O, 1}, u_t = {by_token, 1, O};
    status = pyops_product_threaded(dweight, I, u_t, (pyops_view){rows, E, 1}, NULL, O, E, count, PYOPS_ADD);
    if (!status) status = pyops_product_threaded(rows, E, u, w_e, NULL, count, E, O, 0);     /* the tokens' rows have served */
    if (!status) status = pyops_embedding_backward(dtable, touched, rows, tokens, count, V, E, stream);
    if (C) {
        const pyops_view c = {context, C, 1}, s = {by_sentence, O, 1}, s_t = {by_sentence, 1, O};
        if (!status) status = pyops_product_threaded(dweight + E, I, s_t, c, NULL, O, C, T ? B : 0, PYOPS_ADD);
        if (!status) status = pyops_product_threaded(dcontext, C, s, w_c, NULL, B, C, T ? O : 0, 0);
    }
    if (!status) pyops_add_column_sums(dbias, by_token, count, O, O);
    return status;
}
