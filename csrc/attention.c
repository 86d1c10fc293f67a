/* attention.c - scaled dot-product attention of several heads, and the lengths of padded sequences.
 *
 * A task is one head of one sequence.  It is computed in tiles of scores, so the whole matrix of scores is never in memory;
 * tiles that no query may see are skipped.  After each tile y and stats are the results of attention over the keys so far (the
 * online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867), so any number of keys takes one pass.  Backward recomputes
 * the weights from stats: the largest score of each query and the sum of exponentials, which a log-sum-exp would round to the
 * last digit of a large score.
 *
 * A tile has a row for each key and a column for each query.  If sequences are short, the queries of several tasks share the
 * columns of one tile, because most lanes of the softmax would be empty otherwise; products are computed per task.  Threads
 * share these groups of tasks, and a group gives the same bits on any thread.
 *
 * The rows of a head are a whole step (B,D) apart, often a power of two that maps them to the same few cache sets: so the rows
 * of a tile are first copied to contiguous memory.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

enum { QUERIES = 32, KEYS = 64 };           /* of a task in a tile */
enum { COLUMNS = 48 };                      /* maximum of a tile: queries of several tasks */
enum { FEW = 3 };                           /* so few queries are computed without tiles, as in incremental decoding */

/* The fields common to all tasks of a call.  Copied rows are `ld` floats apart. */
typedef struct {
    const pyops_kernels *k;
    int64_t Tq, Tk, B, heads, C, ld;
    int64_t ldy, ldq, ldk, lddq, lddk;  /* distance of rows: of y and dy, of q, of k and v, of dq, of dk and dv */
    int64_t group, columns, keys;   /* tasks of a group; maximum columns and keys of a tile */
    const int32_t *lengths;
    const int64_t *step;            /* NULL if p is 0 */
    int32_t causal;
    float p, scale;
    uint64_t key;
} call;

static pyops_status make_call(call *c, const char *who, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                              int64_t ldq, int64_t ldk, const int32_t *lengths, const int64_t *step, int32_t causal, float p,
                              uint64_t key) {
    pyops_status status = check_attention(who, Tq, Tk, B, heads, C, p);
    if (!status) status = check_attention_rows(who, "ldq", ldq, heads, C);
    if (!status) status = check_attention_rows(who, "ldk", ldk, heads, C);
    if (status) return status;
    for (int64_t b = 0; lengths && b < B; b++)
        PYOPS_REQUIRE(lengths[b] >= 0 && lengths[b] <= Tk, "%s: lengths[%lld]=%d, expected 0 to %lld", who, LL(b), lengths[b],
                      LL(Tk));
    *c = (call){
        .k = pyops_active(),
        .Tq = Tq,
        .Tk = Tk,
        .B = B,
        .heads = heads,
        .C = C,
        .ld = pyops_round_up(C, PYOPS_LANES),
        .ldy = heads * C,
        .ldq = ldq,
        .ldk = ldk,
        .lengths = lengths,
        .step = p > 0.0f ? step : NULL,
        .causal = causal,
        .p = p,
        .scale = 1.0f / sqrtf((float)C),
        .key = key,
        .group = pyops_max(1, pyops_min(B * heads, COLUMNS / pyops_max(1, pyops_max(Tq, Tk)))),
        .keys = pyops_min(Tk, KEYS),
    };
    c->columns = pyops_round_up(c->group * pyops_min(Tq, QUERIES), PYOPS_LANES);
    return PYOPS_OK;
}

/* The offset of a task's head in the first step of its sequence, in an array with rows ld floats apart. */
static int64_t head_at(const call *c, int64_t task, int64_t ld) { return task / c->heads * ld + task % c->heads * c->C; }

/* Whether to use several threads for this many multiply-adds.  Rows are copied too, which costs more than short products. */
static int shared(const call *c, int64_t products) {
    const int64_t moved = (c->Tq + c->Tk) * (PYOPS_SHARE_FMAS / PYOPS_SHARE_FLOATS);
    return c->B * c->heads * c->C * (c->Tq * c->Tk * products + moved) > PYOPS_SHARE_FMAS;
}

/* Query i of sequence b may see this many keys, the first ones. */
static int64_t seen(const call *c, int64_t b, int64_t i) {
    const int64_t length = c->lengths ? c->lengths[b] : c->Tk;
    return c->causal ? pyops_max(0, pyops_min(length, i + 1 + c->Tk - c->Tq)) : length;
}

/* The number of keys from j on in a tile that query i of a task may see; 0 before the first query. */
static int64_t seen_from(const call *c, int64_t task, int64_t i, int64_t j) {
    return i < 0 ? 0 : pyops_max(0, pyops_min(c->keys, seen(c, task / c->heads, i) - j));
}

/* Draw dropout_mask (rows,n) / (1 - p) for the queries from i on (also of the next tasks) and the keys from j on, a multiple
 * of 4; return the stride of its rows.  Whole rows have consecutive counters, so they are drawn together, padding included. */
static int64_t draw(const call *c, float *dropout_mask, int64_t task, int64_t i, int64_t rows, int64_t j, int64_t n) {
    const int64_t Tk4 = pyops_round_up(c->Tk, 4), ld = Tk4 <= KEYS ? Tk4 : pyops_round_up(n, 4), at_once = ld == Tk4;
    const int64_t first = ((task * c->Tq + i) * Tk4 + j) / 4, count = at_once ? rows * ld : ld;
    for (int64_t r = 0; r < (at_once ? 1 : rows); r++) {
        c->k->fill(dropout_mask + r * ld, count, 1.0f);
        c->k->dropout(dropout_mask + r * ld, dropout_mask + r * ld, first + r * Tk4 / 4, count, (uint64_t)c->step[0], c->key,
                      pyops_dropout_threshold(c->p), 1.0f / (1.0f - c->p));
    }
    return ld;
}

/* ---- a tile of scores (KEYS,columns), so that a vector holds one score each of several queries ----------------- */
typedef struct {
    int64_t task, tasks, i, rows;       /* queries [i, i + rows) of each of these tasks */
    int64_t columns, width;             /* tasks * rows; the same, padded */
    int64_t j, n;                       /* keys [j, j + n), the most that any task sees */
    int32_t seen[COLUMNS];              /* the number of these keys that each query may see */
    const float *dropout_mask;          /* transposed and divided by 1 - p, or one row of ones for all keys */
    int64_t ld_mask;                    /* stride of its rows */
} tile;

/* The number of keys of the tile that any query of task g sees: the last query sees most. */
static int64_t keys_of(const tile *t, int64_t g) { return t->seen[(g + 1) * t->rows - 1]; }

/* The tile of the queries from i on and the keys from j on; returns 0 if no query sees any of the keys. */
static int make_tile(const call *c, tile *t, int64_t task, int64_t tasks, int64_t i, int64_t j) {
    *t = (tile){.task = task, .tasks = tasks, .i = i, .rows = pyops_min(QUERIES, c->Tq - i), .j = j};
    t->columns = tasks * t->rows;
    t->width = pyops_round_up(t->columns, PYOPS_LANES);
    for (int64_t g = 0; g < tasks; g++) {
        for (int64_t r = 0; r < t->rows; r++) t->seen[g * t->rows + r] = (int32_t)seen_from(c, task + g, i + r, j);
        t->n = pyops_max(t->n, keys_of(t, g));
    }
    return t->n > 0;
}

/* The dropout mask of a tile; drawn and dropout_mask are scratch. */
static void draw_tile(const call *c, tile *t, float *dropout_mask, float *drawn) {
    t->dropout_mask = dropout_mask;
    if (c->step) {
        t->ld_mask = c->columns;
        c->k->transpose(dropout_mask, drawn, t->columns, t->n, c->columns,
                        draw(c, drawn, t->task, t->i, t->columns, t->j, t->n));
    } else {
        c->k->fill(dropout_mask, t->width, 1.0f);
    }
}

/* s (n,rows), the part of a tile of one task, = a b' of rows a (n,C), copied, and b (rows,C), ldb apart.  If rows fill the
 * lanes they are transposed; otherwise (also copied) each sum is split over the lanes.  transposed is scratch. */
static void scores(const call *c, float *s, const float *a, const float *b, int64_t ldb, int64_t n, int64_t rows,
                   float *transposed) {
    if (rows < PYOPS_LANES) {
        c->k->dot_products(s, a, b, n, rows, c->ld, c->columns, c->ld);
    } else {
        c->k->transpose(transposed, b, rows, c->C, QUERIES, ldb);
        c->k->direct(s, a, transposed, n, rows, c->C, c->columns, c->ld, 1, QUERIES, 0);
    }
}

/* ---- forward ---- */
typedef struct { int64_t k, v, q, transposed, s, dropout_mask, drawn, total; } forward_layout;

static forward_layout lay_out_forward(const call *c) {
    const int64_t copied = c->group * c->keys * c->ld;
    forward_layout l = {0};
    l.v = l.k + copied;                                 /* k, v of each task (keys,C) */
    l.q = l.v + copied;                                 /* q of a task (QUERIES,C) */
    l.transposed = l.q + QUERIES * c->ld;                   /* (C,QUERIES) */
    l.s = l.transposed + c->C * QUERIES;                    /* scores, then weights (KEYS,columns) */
    l.dropout_mask = l.s + KEYS * c->columns;           /* (KEYS,columns) */
    l.drawn = l.dropout_mask + KEYS * c->columns;       /* (columns,KEYS) */
    l.total = l.drawn + c->columns * KEYS;
    return l;
}

static void forward(const call *c, float *work, int64_t task, int64_t tasks, float *y, float *max, float *sum, const float *q,
                    const float *k, const float *v) {
    const pyops_kernels *kernels = c->k;
    const forward_layout l = lay_out_forward(c);
    const int64_t C = c->C, ld = c->ld, copied = c->keys * ld;
    const int64_t y_step = c->B * c->ldy, q_step = c->B * c->ldq, k_step = c->B * c->ldk;
    float *const s = work + l.s;
    for (int64_t j = 0; j == 0 || j < c->Tk; j += KEYS) {
        for (int64_t g = 0; g < tasks; g++) {
            const int64_t n = seen_from(c, task + g, c->Tq - 1, j), at = head_at(c, task + g, c->ldk) + j * k_step;
            kernels->scale_rows(work + l.k + g * copied, k + at, 1.0f, n, C, ld, k_step);
            kernels->scale_rows(work + l.v + g * copied, v + at, 1.0f, n, C, ld, k_step);
        }
        for (int64_t i = 0; i < c->Tq; i += QUERIES) {
            tile t;
            float max_i[COLUMNS] = {0}, sum_i[COLUMNS] = {0}, before[COLUMNS];
            if (!make_tile(c, &t, task, tasks, i, j) && j) continue;
            for (int64_t g = 0; g < tasks; g++) {
                const float *q_g = q + head_at(c, task + g, c->ldq) + i * q_step;
                const int copy = t.rows < PYOPS_LANES;
                if (copy) kernels->scale_rows(work + l.q, q_g, 1.0f, t.rows, C, ld, q_step), q_g = work + l.q;
                scores(c, s + g * t.rows, work + l.k + g * copied, q_g, copy ? ld : q_step, keys_of(&t, g), t.rows,
                       work + l.transposed);
            }
            draw_tile(c, &t, work + l.dropout_mask, work + l.drawn);
            if (j) pyops_copy(max_i, max + i, t.columns), pyops_copy(sum_i, sum + i, t.columns);
            kernels->softmax_online(s, max_i, sum_i, before, t.dropout_mask, t.seen, c->scale, t.n, t.width, c->columns,
                                    t.ld_mask, j > 0);
            pyops_copy(max + i, max_i, t.columns);
            pyops_copy(sum + i, sum_i, t.columns);
            for (int64_t g = 0; g < tasks; g++) {
                float *const y_g = y + head_at(c, task + g, c->ldy) + i * y_step;
                for (int64_t r = 0; j && r < t.rows; r++) kernels->scale(y_g + r * y_step, y_g + r * y_step, before[r], C);
                kernels->direct(y_g, s + g * t.rows, work + l.v + g * copied, t.rows, C, keys_of(&t, g), y_step, 1, c->columns,
                                ld, j > 0);
            }
        }
    }
}

/* The same for few queries: each has a row of scores, and k and v are read in place, since each row is read once. */
static void forward_few(const call *c, float *work, int64_t task, float *y, float *max, float *sum, const float *q,
                        const float *k, const float *v) {
    const pyops_kernels *kernels = c->k;
    float *const s = work, *const dropout_mask = work + pyops_round_up(c->Tk, 4);
    const int64_t y_step = c->B * c->ldy, q_step = c->B * c->ldq, k_step = c->B * c->ldk;
    y += head_at(c, task, c->ldy);
    q += head_at(c, task, c->ldq);
    k += head_at(c, task, c->ldk);
    v += head_at(c, task, c->ldk);
    for (int64_t i = 0; i < c->Tq; i++) {
        const int64_t n = seen(c, task / c->heads, i);
        kernels->dots(s, k, q + i * q_step, c->scale, n, c->C, k_step, 0);
        max[i] = kernels->max(s, n);
        sum[i] = kernels->exp_sum(s, s, max[i], n);
        kernels->scale(s, s, 1.0f / sum[i], n);
        if (c->step) {
            draw(c, dropout_mask, task, i, 1, 0, n);
            kernels->mul(s, dropout_mask, n);
        }
        kernels->direct(y + i * y_step, s, v, 1, c->C, n, y_step, 0, 1, k_step, 0);
    }
}

pyops_status pyops_attention_forward(float *y, float *stats, const float *q, const float *k, const float *v,
                                     const int32_t *lengths, const int64_t *step, int64_t Tq, int64_t Tk, int64_t B,
                                     int64_t heads, int64_t C, int64_t ldq, int64_t ldk, int32_t causal, float p, uint64_t key,
                                     void *stream) {
    (void)stream;
    call c;
    const pyops_status status = make_call(&c, "attention_forward", Tq, Tk, B, heads, C, ldq, ldk, lengths, step, causal, p,
                                          key);
    if (status) return status;
    const int64_t group = Tq <= FEW ? 1 : c.group;
    float *const max = stats, *const sum = stats + B * heads * Tq;
    const int64_t floats = Tq <= FEW ? 2 * pyops_round_up(Tk + 1, 4) : lay_out_forward(&c).total;      /* never 0 */
    int failed = 0;
    #pragma omp parallel if (shared(&c, 2))
    {
        float *work = pyops_scratch_or_fail((size_t)floats, &failed);
        if (work && Tq > FEW && c.ld > C) c.k->fill(work, lay_out_forward(&c).transposed, 0.0f);  /* beyond the copied rows */
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * heads; task += group) {
            if (!work) continue;
            if (Tq <= FEW) forward_few(&c, work, task, y, max + task * Tq, sum + task * Tq, q, k, v);
            else forward(&c, work, task, pyops_min(group, B * heads - task), y, max + task * Tq, sum + task * Tq, q, k, v);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_forward: no memory for tiles") : PYOPS_OK;
}

/* ---- backward ---- */
typedef struct { int64_t k, v, q, dy, transposed, s, ds, dropout_mask, drawn, dsum, total; } backward_layout;

static backward_layout lay_out_backward(const call *c) {
    const int64_t keys = c->group * c->keys * c->ld, queries = c->group * pyops_min(c->Tq, QUERIES) * c->ld;
    backward_layout l = {0};
    l.v = l.k + keys;                                   /* k, v of each task (keys,C) */
    l.q = l.v + keys;                                   /* q, dy of each task (queries,C) */
    l.dy = l.q + queries;
    l.transposed = l.dy + queries;                          /* (C,QUERIES) */
    l.s = l.transposed + c->C * QUERIES;                /* scores, then weights times dropout_mask (KEYS,columns) */
    l.ds = l.s + KEYS * c->columns;                     /* their gradients (KEYS,columns) */
    l.dropout_mask = l.ds + KEYS * c->columns;          /* (KEYS,columns) */
    l.drawn = l.dropout_mask + KEYS * c->columns;       /* (columns,KEYS) */
    l.dsum = l.drawn + c->columns * KEYS;               /* dy . y (tasks,Tq) */
    l.total = l.dsum + pyops_round_up(c->group * c->Tq, COLUMNS);
    return l;
}

/* Prefetch n rows needed soon: forward's results have left the cache by now, and rows are too short and too far apart for the
 * hardware prefetcher.  Always inline, since gcc drops calls of a function that only prefetches. */
static inline __attribute__((always_inline)) void fetch(const call *c, const float *x, int64_t step, int64_t n) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < c->C; i += PYOPS_LANES) __builtin_prefetch(x + r * step + i, 0, 2);
}

/* The same for the corresponding task of the next group, if there is one. */
static inline __attribute__((always_inline)) void fetch_next(const call *c, const float *x, int64_t ldx, int64_t n,
                                                             int64_t task) {
    if (task + c->group < c->B * c->heads) fetch(c, x + head_at(c, task + c->group, ldx), c->B * ldx, n);
}

static void backward(const call *c, float *work, int64_t task, int64_t tasks, float *dq, float *dk, float *dv, const float *dy,
                     const float *q, const float *k, const float *v, const float *y, const float *max, const float *sum) {
    const pyops_kernels *kernels = c->k;
    const backward_layout l = lay_out_backward(c);
    const int64_t C = c->C, ld = c->ld, keys = c->keys * ld, queries = pyops_min(c->Tq, QUERIES) * ld;
    const int64_t y_step = c->B * c->ldy, q_step = c->B * c->ldq, k_step = c->B * c->ldk;
    const int64_t dq_step = c->B * c->lddq, dk_step = c->B * c->lddk;
    float *const s = work + l.s, *const ds = work + l.ds, *const dsum = work + l.dsum;
    const int whole = c->Tk <= KEYS;                      /* a tile has all keys, so dsum is computed from it */
    for (int64_t g = 0; !whole && g < tasks; g++) {
        const int64_t at = head_at(c, task + g, c->ldy);
        kernels->dots(dsum + g * c->Tq, dy + at, y + at, 1.0f, c->Tq, C, y_step, y_step);
    }
    if (!whole) kernels->fill(dsum + tasks * c->Tq, l.total - l.dsum - tasks * c->Tq, 0.0f);
    for (int64_t j = 0; j == 0 || j < c->Tk; j += KEYS) {
        for (int64_t g = 0; g < tasks; g++) {
            const int64_t all = pyops_min(KEYS, c->Tk - j), used = seen_from(c, task + g, c->Tq - 1, j);
            const int64_t written = seen_from(c, task + g, pyops_min(QUERIES, c->Tq) - 1, j);
            const int64_t at = head_at(c, task + g, c->ldk) + j * k_step;
            const int64_t others = head_at(c, task + g, c->lddk) + (j + written) * dk_step;
            kernels->scale_rows(work + l.k + g * keys, k + at, 1.0f, used, C, ld, k_step);
            kernels->scale_rows(work + l.v + g * keys, v + at, 1.0f, used, C, ld, k_step);
            kernels->fill_rows(dk + others, all - written, C, dk_step, 0.0f);   /* the first queries write the rest, */
            kernels->fill_rows(dv + others, all - written, C, dk_step, 0.0f);   /* and later ones add */
        }
        for (int64_t i = 0; i < c->Tq; i += QUERIES) {
            tile t;
            float max_i[COLUMNS] = {0}, sum_i[COLUMNS] = {0};
            const int first = i == 0 && j == 0;
            if (!make_tile(c, &t, task, tasks, i, j) && j) continue;
            for (int64_t g = 0; g < tasks; g++) {
                float *const q_g = work + l.q + g * queries, *const dy_g = work + l.dy + g * queries;
                const int64_t n = keys_of(&t, g), at = g * t.rows, mine = task + g;
                const int64_t dk_at = head_at(c, mine, c->lddk);
                kernels->scale_rows(q_g, q + head_at(c, mine, c->ldq) + i * q_step, 1.0f, t.rows, C, ld, q_step);
                kernels->scale_rows(dy_g, dy + head_at(c, mine, c->ldy) + i * y_step, 1.0f, t.rows, C, ld, y_step);
                if (first) fetch_next(c, k, c->ldk, c->keys, mine), fetch(c, dv + dk_at, dk_step, n);
                scores(c, s + at, work + l.k + g * keys, q_g, ld, n, t.rows, work + l.transposed);
                if (first) {
                    fetch_next(c, v, c->ldk, c->keys, mine);
                    fetch(c, dk + dk_at, dk_step, n);
                    fetch(c, dq + head_at(c, mine, c->lddq), dq_step, t.rows);
                }
                scores(c, ds + at, work + l.v + g * keys, dy_g, ld, n, t.rows, work + l.transposed);
            }
            draw_tile(c, &t, work + l.dropout_mask, work + l.drawn);
            pyops_copy(max_i, max + i, t.columns);
            pyops_copy(sum_i, sum + i, t.columns);
            kernels->softmax_back(s, ds, max_i, sum_i, whole ? NULL : dsum + i, t.dropout_mask, t.seen, c->scale, t.n, t.width,
                                  c->columns, t.ld_mask);
            for (int64_t g = 0; g < tasks; g++) {
                const int64_t n = keys_of(&t, g), at = g * t.rows, mine = task + g;
                const int64_t dk_at = head_at(c, mine, c->lddk) + j * dk_step;
                float *const dq_g = dq + head_at(c, mine, c->lddq) + i * dq_step;
                if (first) fetch_next(c, q, c->ldq, t.rows, mine);
                kernels->direct(dv + dk_at, s + at, work + l.dy + g * queries, n, C, t.rows, dk_step, c->columns, 1, ld, i > 0);
                if (first) fetch_next(c, dy, c->ldy, t.rows, mine);
                kernels->direct(dk + dk_at, ds + at, work + l.q + g * queries, n, C, t.rows, dk_step, c->columns, 1, ld, i > 0);
                kernels->direct(dq_g, ds + at, work + l.k + g * keys, t.rows, C, n, dq_step, 1, c->columns, ld, j > 0);
            }
        }
    }
}

pyops_status pyops_attention_backward(float *dq, float *dk, float *dv, const float *dy, const float *q, const float *k,
                                      const float *v, const int32_t *lengths, const int64_t *step, const float *y,
                                      const float *stats, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                                      int64_t ldq, int64_t ldk, int64_t lddq, int64_t lddk, int32_t causal, float p,
                                      uint64_t key, void *stream) {
    (void)stream;
    call c;
    const char *const who = "attention_backward";
    pyops_status status = make_call(&c, who, Tq, Tk, B, heads, C, ldq, ldk, lengths, step, causal, p, key);
    if (!status) status = check_attention_rows(who, "lddq", lddq, heads, C);
    if (!status) status = check_attention_rows(who, "lddk", lddk, heads, C);
    if (status) return status;
    c.lddq = lddq;
    c.lddk = lddk;
    int failed = 0;
    #pragma omp parallel if (shared(&c, 5))
    {
        float *work = pyops_scratch_or_fail((size_t)lay_out_backward(&c).total, &failed);
        if (work && c.ld > C) c.k->fill(work, lay_out_backward(&c).transposed, 0.0f); /* beyond the copied rows */
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * heads; task += c.group)
            if (work)
                backward(&c, work, task, pyops_min(c.group, B * heads - task), dq, dk, dv, dy, q, k, v, y, stats + task * Tq,
                         stats + (B * heads + task) * Tq);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_backward: no memory for tiles") : PYOPS_OK;
}

/* ---- lengths of padded sequences ---- */
pyops_status pyops_sequence_lengths(int32_t *lengths, const int32_t *ids, int64_t T, int64_t B, int32_t pad, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(T >= 0 && T <= INT32_MAX && B >= 0, "sequence_lengths: T=%lld B=%lld, expected T from 0 to 2^31 - 1, B >= 0",
                  LL(T), LL(B));
    memset(lengths, 0, (size_t)B * sizeof *lengths);
    for (int64_t t = 0; t < T; t++)
        for (int64_t b = 0; b < B; b++)
            if (ids[t * B + b] != pad) lengths[b] = (int32_t)(t + 1);
    return PYOPS_OK;
}
