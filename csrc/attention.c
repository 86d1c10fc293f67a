/* attention.c - scaled dot-product attention of several heads, and the lengths of padded sequences.
 *
 * A task is one head of one sentence: threads share tasks, and a task runs the same way on any of them.  It goes through
 * tiles of QUERIES x KEYS scores, so that the whole matrix of scores is never in memory; tiles that no query may see are
 * left out.  y and lse are, after each tile, those of attention over the keys so far (the online softmax of Milakov and
 * Gimelshein 2018, arXiv:1805.02867), so any number of keys takes one pass.  Backward makes the weights again from lse.
 *
 * The rows of a head lie a whole step (B,D) apart, often a power of two that maps them to the same few sets of a cache: so
 * the rows of a tile are copied side by side first.  All products then have one form, `direct`, and nothing is packed.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

enum { QUERIES = 32, KEYS = 64 };
enum { FEW = 3 };           /* queries that are not worth tiles, as in incremental decoding */

/* What all tasks of a call share.  Rows of q, k, v, y are `row` floats apart, their copies `ld`. */
typedef struct {
    const pyops_kernels *k;
    int64_t Tq, Tk, B, heads, C, row, ld;
    const int32_t *lengths;
    const int64_t *step;            /* NULL where p is 0 */
    int32_t causal;
    float p, scale;
    uint64_t key;
} call;

static pyops_status make_call(call *c, const char *who, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                              const int32_t *lengths, const int64_t *step, int32_t causal, float p, uint64_t key) {
    PYOPS_REQUIRE(Tq >= 0 && Tk >= 0 && B >= 0 && heads >= 1 && C >= 1, "%s: Tq=%lld Tk=%lld B=%lld heads=%lld C=%lld",
                  who, LL(Tq), LL(Tk), LL(B), LL(heads), LL(C));
    PYOPS_REQUIRE(p >= 0.0f && p < 1.0f, "%s: p=%g, want 0 <= p < 1", who, (double)p);
    for (int64_t b = 0; lengths && b < B; b++)
        PYOPS_REQUIRE(lengths[b] >= 0 && lengths[b] <= Tk, "%s: lengths[%lld]=%d, want 0 to %lld",
                      who, LL(b), lengths[b], LL(Tk));
    *c = (call){
        .k = pyops_active(), .Tq = Tq, .Tk = Tk, .B = B, .heads = heads, .C = C, .row = B * heads * C,
        .ld = pyops_round_up(C, PYOPS_LANES), .lengths = lengths, .step = p > 0.0f ? step : NULL, .causal = causal,
        .p = p, .scale = 1.0f / sqrtf((float)C), .key = key,
    };
    return PYOPS_OK;
}

/* Are so many products worth several threads? */
static int shared(const call *c, int64_t products) {
    return c->B * c->heads * c->Tq * c->Tk * c->C * products > PYOPS_SHARE_FMAS;
}

/* How many keys query i of sentence b may see: the first ones. */
static int64_t seen(const call *c, int64_t b, int64_t i) {
    const int64_t length = c->lengths ? c->lengths[b] : c->Tk;
    return c->causal ? pyops_max(0, pyops_min(length, i + 1 + c->Tk - c->Tq)) : length;
}

/* keep (rows,n) / (1 - p) of the queries from i on and the keys from j on, a multiple of 4; returns the distance of its
 * rows.  Where n is all keys, rows lie side by side in the count of elements too, and are drawn at once. */
static int64_t draw(const call *c, float *keep, int64_t task, int64_t i, int64_t rows, int64_t j, int64_t n) {
    const int64_t Tk4 = pyops_round_up(c->Tk, 4), ld = pyops_round_up(n, 4), at_once = ld == Tk4;
    const int64_t first = ((task * c->Tq + i) * Tk4 + j) / 4, count = at_once ? rows * ld : ld;
    for (int64_t r = 0; r < (at_once ? 1 : rows); r++) {
        c->k->fill(keep + r*ld, count, 1.0f);
        c->k->dropout(keep + r*ld, keep + r*ld, first + r * Tk4 / 4, count, (uint64_t)c->step[0], c->key,
                      pyops_dropout_threshold(c->p), 1.0f / (1.0f - c->p));
    }
    return ld;
}

/* ---- a tile of scores: (KEYS,QUERIES), so that a vector holds one score each of several queries --------------- */
typedef struct {
    int64_t i, rows, width, j, n;       /* queries [i, i + rows), padded to width; keys [j, j + n) */
    int32_t seen[QUERIES];              /* how many of these keys each of them may see */
    const float *keep;                  /* keep' / (1 - p), or one row of ones for all keys, */
    int64_t ld_keep;                    /* which are this far apart */
} tile;

/* The tile of the queries from i on and the keys from j on; 0 if none of them may see any of these. */
static int make_tile(const call *c, tile *t, int64_t task, int64_t i, int64_t j) {
    const int64_t b = task / c->heads;
    *t = (tile){.i = i, .rows = pyops_min(QUERIES, c->Tq - i), .j = j};
    t->width = pyops_round_up(t->rows, PYOPS_LANES);
    t->n = pyops_max(0, pyops_min(KEYS, seen(c, b, i + t->rows - 1) - j));
    for (int64_t r = 0; r < t->rows; r++) t->seen[r] = (int32_t)pyops_max(0, pyops_min(t->n, seen(c, b, i + r) - j));
    return t->n > 0;
}

/* Its dropout; drawn and keep are scratch. */
static void keep_tile(const call *c, tile *t, int64_t task, float *keep, float *drawn) {
    t->keep = keep;
    if (c->step) {
        t->ld_keep = QUERIES;
        c->k->transpose(keep, drawn, t->rows, t->n, QUERIES, draw(c, drawn, task, t->i, t->rows, t->j, t->n));
    } else {
        c->k->fill(keep, t->width, 1.0f);
    }
}

/* ---- forward ---- */
typedef struct { int64_t k, v, q_t, s, keep, drawn, total; } forward_layout;

static forward_layout lay_out_forward(const call *c) {
    forward_layout l = {0};
    l.v = l.k + KEYS * c->ld;                           /* k / sqrt(C), v (KEYS,C) */
    l.q_t = l.v + KEYS * c->ld;                         /* q' (C,QUERIES) */
    l.s = l.q_t + c->C * QUERIES;                       /* scores, then weights (KEYS,QUERIES) */
    l.keep = l.s + KEYS * QUERIES;                      /* (KEYS,QUERIES) */
    l.drawn = l.keep + KEYS * QUERIES;                  /* (QUERIES,KEYS) */
    l.total = l.drawn + QUERIES * KEYS;
    return l;
}

static void forward(const call *c, float *work, int64_t task, float *y, float *lse,
                    const float *q, const float *k, const float *v) {
    const pyops_kernels *kernels = c->k;
    const forward_layout l = lay_out_forward(c);
    const int64_t row = c->row, ld = c->ld, all = seen(c, task / c->heads, c->Tq - 1);
    float *const s = work + l.s;
    for (int64_t j = 0; j == 0 || j < all; j += KEYS) {
        const int64_t keys = pyops_min(KEYS, all - j);
        kernels->scale_rows(work + l.k, k + j*row, c->scale, keys, c->C, ld, row);
        kernels->scale_rows(work + l.v, v + j*row, 1.0f, keys, c->C, ld, row);
        for (int64_t i = 0; i < c->Tq; i += QUERIES) {
            tile t;
            float lse_i[QUERIES] = {0}, before[QUERIES];
            if (!make_tile(c, &t, task, i, j)) {
                if (!j) kernels->fill_rows(y + i*row, t.rows, c->C, row, 0.0f), kernels->fill(lse + i, t.rows, -INFINITY);
                continue;
            }
            kernels->transpose(work + l.q_t, q + i*row, t.rows, c->C, QUERIES, row);
            kernels->direct(s, work + l.k, work + l.q_t, t.n, t.width, c->C, QUERIES, ld, 1, QUERIES, 0);
            keep_tile(c, &t, task, work + l.keep, work + l.drawn);
            if (j) memcpy(lse_i, lse + i, (size_t)t.rows * sizeof *lse);
            kernels->softmax_online(s, lse_i, before, t.keep, t.seen, t.n, t.width, QUERIES, t.ld_keep, j > 0);
            memcpy(lse + i, lse_i, (size_t)t.rows * sizeof *lse);
            for (int64_t r = 0; j && r < t.rows; r++) kernels->scale(y + (i + r)*row, y + (i + r)*row, before[r], c->C);
            kernels->direct(y + i*row, s, work + l.v, t.rows, c->C, t.n, row, 1, QUERIES, ld, j > 0);
        }
    }
}

/* The same for few queries: each has a row of scores, and k and v are read where they lie, since each row is read once. */
static void forward_few(const call *c, float *work, int64_t task, float *y, float *lse,
                        const float *q, const float *k, const float *v) {
    const pyops_kernels *kernels = c->k;
    float *const s = work, *const keep = work + pyops_round_up(c->Tk, 4);
    for (int64_t i = 0; i < c->Tq; i++) {
        const int64_t n = seen(c, task / c->heads, i);
        kernels->dots(s, k, q + i * c->row, c->scale, n, c->C, c->row, 0);
        const float max = kernels->max(s, n);
        lse[i] = max + logf(kernels->sum_exp(s, max, n));
        kernels->scaled_exp(s, s, lse[i], 1.0f, n);
        if (c->step) {
            draw(c, keep, task, i, 1, 0, n);
            kernels->mul(s, keep, n);
        }
        kernels->direct(y + i * c->row, s, v, 1, c->C, n, c->row, 0, 1, c->row, 0);
    }
}

pyops_status pyops_attention_forward(float *y, float *lse, const float *q, const float *k, const float *v,
                                     const int32_t *lengths, const int64_t *step,
                                     int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                                     int32_t causal, float p, uint64_t key, void *stream) {
    (void)stream;
    call c;
    const pyops_status status = make_call(&c, "attention_forward", Tq, Tk, B, heads, C, lengths, step, causal, p, key);
    if (status) return status;
    const int64_t floats = Tq <= FEW ? 2 * pyops_round_up(Tk + 1, 4) : lay_out_forward(&c).total;      /* never 0 */
    int failed = 0;
    #pragma omp parallel if (shared(&c, 2))
    {
        float *work = pyops_scratch((size_t)floats);
        if (!work) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * heads; task++)
            if (work)
                (Tq <= FEW ? forward_few : forward)(&c, work, task, y + task * C, lse + task * Tq, q + task * C, k + task * C,
                                                    v + task * C);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_forward: no memory for tiles") : PYOPS_OK;
}

/* ---- backward ---- */
typedef struct { int64_t k, v, q, dy, q_t, dy_t, s, ds, keep, drawn, dsum, total; } backward_layout;

static backward_layout lay_out_backward(const call *c) {
    backward_layout l = {0};
    l.v = l.k + KEYS * c->ld;                           /* k / sqrt(C), v (KEYS,C) */
    l.q = l.v + KEYS * c->ld;                           /* q / sqrt(C), dy (QUERIES,C) */
    l.dy = l.q + QUERIES * c->ld;
    l.q_t = l.dy + QUERIES * c->ld;                     /* q', dy' (C,QUERIES) */
    l.dy_t = l.q_t + c->C * QUERIES;
    l.s = l.dy_t + c->C * QUERIES;                      /* scores, then weights times keep (KEYS,QUERIES) */
    l.ds = l.s + KEYS * QUERIES;                        /* their gradients (KEYS,QUERIES) */
    l.keep = l.ds + KEYS * QUERIES;                     /* (KEYS,QUERIES) */
    l.drawn = l.keep + KEYS * QUERIES;                  /* (QUERIES,KEYS) */
    l.dsum = l.drawn + QUERIES * KEYS;                  /* dy . y (Tq) */
    l.total = l.dsum + pyops_round_up(c->Tq, QUERIES);
    return l;
}

static void backward(const call *c, float *work, int64_t task, float *dq, float *dk, float *dv, const float *dy,
                     const float *q, const float *k, const float *v, const float *y, const float *lse) {
    const pyops_kernels *kernels = c->k;
    const backward_layout l = lay_out_backward(c);
    const int64_t C = c->C, row = c->row, ld = c->ld;
    const int64_t first = c->Tq ? seen(c, task / c->heads, pyops_min(QUERIES, c->Tq) - 1) : 0;
    const int64_t all = c->Tq ? seen(c, task / c->heads, c->Tq - 1) : 0;
    float *const s = work + l.s, *const ds = work + l.ds, *const dsum = work + l.dsum;
    kernels->dots(dsum, dy, y, 1.0f, c->Tq, C, row, row);
    kernels->fill(dsum + c->Tq, l.total - l.dsum - c->Tq, 0.0f);
    for (int64_t j = 0; j == 0 || j < c->Tk; j += KEYS) {
        const int64_t keys = pyops_min(KEYS, c->Tk - j);
        const int64_t used = pyops_max(0, pyops_min(KEYS, all - j)), written = pyops_max(0, pyops_min(KEYS, first - j));
        kernels->scale_rows(work + l.k, k + j*row, c->scale, used, C, ld, row);
        kernels->scale_rows(work + l.v, v + j*row, 1.0f, used, C, ld, row);
        kernels->fill_rows(dk + (j + written)*row, keys - written, C, row, 0.0f);      /* the first queries write the others, */
        kernels->fill_rows(dv + (j + written)*row, keys - written, C, row, 0.0f);      /* and later ones add */
        for (int64_t i = 0; i < c->Tq; i += QUERIES) {
            tile t;
            float lse_i[QUERIES] = {0};
            if (!make_tile(c, &t, task, i, j)) {
                if (!j) kernels->fill_rows(dq + i*row, t.rows, C, row, 0.0f);
                continue;
            }
            kernels->scale_rows(work + l.q, q + i*row, c->scale, t.rows, C, ld, row);
            kernels->scale_rows(work + l.dy, dy + i*row, 1.0f, t.rows, C, ld, row);
            kernels->transpose(work + l.q_t, q + i*row, t.rows, C, QUERIES, row);
            kernels->transpose(work + l.dy_t, work + l.dy, t.rows, C, QUERIES, ld);
            kernels->direct(s, work + l.k, work + l.q_t, t.n, t.width, C, QUERIES, ld, 1, QUERIES, 0);
            kernels->direct(ds, work + l.v, work + l.dy_t, t.n, t.width, C, QUERIES, ld, 1, QUERIES, 0);
            keep_tile(c, &t, task, work + l.keep, work + l.drawn);
            memcpy(lse_i, lse + i, (size_t)t.rows * sizeof *lse);
            kernels->softmax_back(s, ds, lse_i, dsum + i, t.keep, t.seen, t.n, t.width, QUERIES, t.ld_keep);
            kernels->direct(dv + j*row, s, work + l.dy, t.n, C, t.rows, row, QUERIES, 1, ld, i > 0);
            kernels->direct(dk + j*row, ds, work + l.q, t.n, C, t.rows, row, QUERIES, 1, ld, i > 0);
            kernels->direct(dq + i*row, ds, work + l.k, t.rows, C, t.n, row, 1, QUERIES, ld, j > 0);
        }
    }
}

pyops_status pyops_attention_backward(float *dq, float *dk, float *dv, const float *dy,
                                      const float *q, const float *k, const float *v, const int32_t *lengths,
                                      const int64_t *step, const float *y, const float *lse,
                                      int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                                      int32_t causal, float p, uint64_t key, void *stream) {
    (void)stream;
    call c;
    const pyops_status status = make_call(&c, "attention_backward", Tq, Tk, B, heads, C, lengths, step, causal, p, key);
    if (status) return status;
    int failed = 0;
    #pragma omp parallel if (shared(&c, 5))
    {
        float *work = pyops_scratch((size_t)lay_out_backward(&c).total);
        if (!work) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * heads; task++)
            if (work)
                backward(&c, work, task, dq + task * C, dk + task * C, dv + task * C, dy + task * C, q + task * C, k + task * C,
                         v + task * C, y + task * C, lse + task * Tq);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_backward: no memory for tiles") : PYOPS_OK;
}

/* ---- lengths of padded sequences ---- */
pyops_status pyops_sequence_lengths(int32_t *lengths, const int32_t *ids, int64_t T, int64_t B, int32_t pad, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(T >= 0 && T <= INT32_MAX && B >= 0, "sequence_lengths: T=%lld B=%lld", LL(T), LL(B));
    memset(lengths, 0, (size_t)B * sizeof *lengths);
    for (int64_t t = 0; t < T; t++)
        for (int64_t b = 0; b < B; b++)
            if (ids[t*B + b] != pad) lengths[b] = (int32_t)(t + 1);
    return PYOPS_OK;
}
