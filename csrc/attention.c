/* attention.c - scaled dot-product attention of several heads, and the lengths of padded sequences.
 *
 * A task is one head of one sequence.  It is computed in tiles of scores, so the whole matrix of scores is never in memory;
 * tiles that no query may see are skipped.  After each tile y and stats are the results of attention over the keys so far (the
 * online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867), so any number of keys takes one pass.  Backward recomputes
 * the weights from stats: the largest score of each query and the sum of exponentials, which a log-sum-exp would round to the
 * last digit of a large score.
 *
 * A tile has a row for each key and a column for each query.  If sequences are short, the queries of several tasks share the
 * columns of one tile, because most lanes of the softmax would be empty otherwise; products are computed per task.  In packed
 * rows these tasks have different numbers of queries and keys.  A task gives the same bits in any group, so each thread takes
 * a range of tasks with its share of the work, and forms the groups of its range.
 *
 * The rows of a head are a whole step (B,D) apart, often a power of two that maps them to the same few cache sets: so the rows
 * of a tile are first copied to contiguous memory.
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"

/* Of a task in a tile. */
#define QUERIES PYOPS_TUNED(attention_queries, 32, 16, 32, 16)
#define KEYS PYOPS_TUNED(attention_keys, 64, 48, 64, 16)
enum { COLUMNS = 48 };                      /* maximum of a tile: queries of several tasks */
/* So few queries are computed without tiles, as in incremental decoding. */
#define FEW PYOPS_TUNED(attention_few, 3, 0, 16, 1)

/* The fields common to all tasks of a call.  Copied rows are `ld` floats apart. */
typedef struct {
    const pyops_kernels *k;
    int64_t Tq, Tk, B, heads, C, ld;
    int64_t ldy, ldq, ldk, lddq, lddk;  /* distance of rows: of y and dy, of q, of k and v, of dq, of dk and dv */
    int64_t q_next, k_next;         /* rows from a query or a key to the next one of its sequence */
    int64_t group, columns, keys;   /* maxima: tasks of a group, columns of a tile, keys of a task in a tile */
    int64_t copied;                 /* maximum of copied keys, of all tasks of a group */
    const int32_t *lengths, *q_offsets, *k_offsets;
    const int64_t *step;            /* NULL if p is 0 */
    int32_t causal;
    float p, scale;
    uint64_t key;
} call;

static pyops_status make_call(call *c, const char *who, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                              int64_t ldq, int64_t ldk, const int32_t *lengths, const int32_t *q_offsets,
                              const int32_t *k_offsets, const int64_t *step, int32_t causal, float p, uint64_t key) {
    pyops_status status = check_attention(who, lengths, k_offsets, Tq, Tk, B, heads, C, p);
    if (!status) status = check_attention_rows(who, "ldq", ldq, heads, C);
    if (!status) status = check_attention_rows(who, "ldk", ldk, heads, C);
    if (!status) status = pyops_check_lengths(who, lengths, q_offsets, k_offsets, Tq, Tk, B);
    if (status) return status;
    const int packed = q_offsets || k_offsets;              /* then any sequence may be short */
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
        .q_next = q_offsets ? 1 : B,
        .k_next = k_offsets ? 1 : B,
        .lengths = lengths,
        .q_offsets = q_offsets,
        .k_offsets = k_offsets,
        .step = p > 0.0f ? step : NULL,
        .causal = causal,
        .p = p,
        .scale = 1.0f / sqrtf((float)C),
        .key = key,
        .group = pyops_max(1, pyops_min(B * heads, packed ? COLUMNS : COLUMNS / pyops_max(1, pyops_max(Tq, Tk)))),
        .keys = pyops_min(Tk, KEYS),
    };
    c->columns = pyops_round_up(pyops_min(COLUMNS, c->group * pyops_min(Tq, QUERIES)), PYOPS_LANES);
    c->copied = pyops_min(KEYS, c->group * c->keys);
    return PYOPS_OK;
}

/* ---- tasks and groups of them ---- */
typedef struct {
    int64_t number, head;           /* number: of all tasks, sequence * heads + head */
    int64_t Tq, Tk;                 /* numbers of queries and keys */
    int64_t length;                 /* number of keys that are not padding */
    int64_t q, k;                   /* row of the first query, row of the first key */
    int64_t column, copy;           /* in a group: its first column in a tile, its first copied key */
} task;

typedef struct {
    int64_t n, Tq, Tk;              /* number of tasks; maximum of queries and keys */
    task tasks[COLUMNS];
} group;

static int64_t count_of(const int32_t *offsets, int64_t b, int64_t T) { return offsets ? offsets[b + 1] - offsets[b] : T; }

static task find(const call *c, int64_t number) {
    const int64_t b = number / c->heads, Tk = count_of(c->k_offsets, b, c->Tk);
    return (task){
        .number = number,
        .head = number % c->heads,
        .Tq = count_of(c->q_offsets, b, c->Tq),
        .Tk = Tk,
        .length = c->lengths ? c->lengths[b] : Tk,
        .q = c->q_offsets ? c->q_offsets[b] : b,
        .k = c->k_offsets ? c->k_offsets[b] : b,
    };
}

/* Form the group of the tasks from `from` on that fit in one tile, or of one task with several tiles.  Tasks with at most `few`
 * queries are left out.  Returns the first task after the group. */
static int64_t make_group(const call *c, group *g, int64_t from, int64_t to, int64_t few) {
    int64_t columns = 0, copied = 0;
    g->n = g->Tq = g->Tk = 0;
    for (; from < to && g->n < c->group; from++) {
        task x = find(c, from);
        if (x.Tq <= few) continue;
        const int64_t longest = pyops_max(g->Tq, x.Tq);
        if (g->n && (longest > QUERIES || columns + x.Tq > COLUMNS || copied + x.Tk > COLUMNS)) break;
        x.column = columns;
        x.copy = copied;
        g->tasks[g->n++] = x;
        g->Tq = longest;
        g->Tk = pyops_max(g->Tk, x.Tk);
        columns += x.Tq;
        copied += x.Tk;
    }
    return from;
}

/* The offset of a task's head in its first query or key, in an array with rows ld floats apart. */
static int64_t at_q(const call *c, const task *x, int64_t ld) { return x->q * ld + x->head * c->C; }
static int64_t at_k(const call *c, const task *x, int64_t ld) { return x->k * ld + x->head * c->C; }

/* The multiply-adds of a task of sequence b, per channel.  Rows are copied too, which costs more than short products. */
static int64_t cost(const call *c, int64_t b, int64_t products) {
    const task x = find(c, b * c->heads);
    return x.Tq * x.length * products + (x.Tq + x.Tk) * (PYOPS_SHARE_FMAS / PYOPS_SHARE_FLOATS);
}

static int64_t total_cost(const call *c, int64_t products) {
    int64_t sum = 0;
    for (int64_t b = 0; b < c->B; b++) sum += c->heads * cost(c, b, products);
    return sum;
}

/* The first of this thread's tasks, or of the next thread's: tasks are shared by the work before them. */
static int64_t first_task(const call *c, int64_t products, int64_t total, int64_t thread) {
    const int64_t threads = omp_get_num_threads(), all = c->B * c->heads;
    if (thread == 0 || thread == threads) return thread ? all : 0;
    if (!c->lengths && !c->q_offsets && !c->k_offsets) return all * thread / threads;
    const double before = (double)total * (double)thread / (double)threads;
    int64_t b = 0;
    double sum = 0.0, each = (double)cost(c, b, products);
    while (sum + each * (double)c->heads < before) {        /* ends: less than total, which is above 0 if threads share it */
        sum += each * (double)c->heads;
        each = (double)cost(c, ++b, products);
    }
    return b * c->heads + pyops_min(c->heads, (int64_t)((before - sum) / each + 0.5));
}

/* Query i of a task may see this many keys, the first ones. */
static int64_t seen(const call *c, const task *x, int64_t i) {
    return c->causal ? pyops_max(0, pyops_min(x->length, i + 1 + x->Tk - x->Tq)) : x->length;
}

/* The number of keys from j on in a tile that query i of a task may see; 0 before the first query. */
static int64_t seen_from(const call *c, const task *x, int64_t i, int64_t j) {
    return i < 0 ? 0 : pyops_max(0, pyops_min(c->keys, seen(c, x, i) - j));
}

/* The group of the dropout mask, four elements, of query i and key j of a task; j is a multiple of 4. */
static int64_t mask_group(const call *c, const task *x, int64_t i, int64_t j) {
    return (x->number * c->Tq + i) * (pyops_round_up(c->Tk, 4) / 4) + j / 4;
}

/* ---- a tile of scores (KEYS,columns), so that a vector holds one score each of several queries ----------------- */
typedef struct {
    const group *g;
    int64_t i, j;                       /* queries from i on, keys from j on */
    int64_t columns, width;             /* queries of all tasks; the same, padded */
    int64_t n;                          /* keys: the most that any task sees */
    int32_t seen[COLUMNS];              /* the number of these keys that each query may see */
    const float *dropout_mask;          /* transposed and divided by 1 - p, or one row of ones for all keys */
    int64_t ld_mask;                    /* stride of its rows */
} tile;

/* The number of queries of a task in the tile. */
static int64_t rows_of(const tile *t, const task *x) { return pyops_min(QUERIES, x->Tq - t->i); }

/* The number of keys of the tile that any query of a task sees: the last query sees most. */
static int64_t keys_of(const tile *t, const task *x) {
    const int64_t rows = rows_of(t, x);
    return rows ? t->seen[x->column + rows - 1] : 0;
}

/* The tile of the queries from i on and the keys from j on; returns 0 if no query sees any of the keys. */
static int make_tile(const call *c, tile *t, const group *g, int64_t i, int64_t j) {
    *t = (tile){.g = g, .i = i, .j = j};
    for (const task *x = g->tasks; x < g->tasks + g->n; x++) {
        const int64_t rows = rows_of(t, x);
        for (int64_t r = 0; r < rows; r++) t->seen[x->column + r] = (int32_t)seen_from(c, x, i + r, j);
        t->columns = x->column + rows;
        t->n = pyops_max(t->n, keys_of(t, x));
    }
    t->width = pyops_round_up(t->columns, PYOPS_LANES);
    return t->n > 0;
}

/* The dropout mask of a tile.  groups, drawn and dropout_mask are scratch. */
static void draw_tile(const call *c, tile *t, float *dropout_mask, float *drawn, float *groups) {
    t->dropout_mask = dropout_mask;
    if (!c->step) {
        c->k->fill(dropout_mask, t->width, 1.0f);
        return;
    }
    uint64_t *const list = (uint64_t *)groups, quarter = (uint64_t)(t->n + 3) / 4;
    for (const task *x = t->g->tasks; x < t->g->tasks + t->g->n; x++)
        for (int64_t r = 0; r < rows_of(t, x); r++) {
            const uint64_t first = (uint64_t)mask_group(c, x, t->i + r, t->j);
            for (uint64_t m = 0; m < quarter; m++) list[(uint64_t)(x->column + r) * quarter + m] = first + m;
        }
    c->k->dropout_mask(drawn, list, t->columns * (int64_t)quarter, (uint64_t)c->step[0], c->key, pyops_dropout_threshold(c->p),
                       1.0f / (1.0f - c->p));
    t->ld_mask = c->columns;
    c->k->transpose(dropout_mask, drawn, t->columns, t->n, c->columns, 4 * (int64_t)quarter);
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

/* Prefetch n rows needed soon: they may have left the cache, and they are too short and too far apart for the hardware
 * prefetcher.  Always inline, since gcc drops calls of a function that only prefetches. */
static inline __attribute__((always_inline)) void fetch(const call *c, const float *x, int64_t step, int64_t n) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < c->C; i += PYOPS_LANES) __builtin_prefetch(x + r * step + i, 0, 2);
}

/* The same for the queries or the keys of a task of the next group. */
static inline __attribute__((always_inline)) void fetch_queries(const call *c, const float *a, int64_t ld, const task *x) {
    fetch(c, a + at_q(c, x, ld), c->q_next * ld, pyops_min(QUERIES, x->Tq));
}
static inline __attribute__((always_inline)) void fetch_keys(const call *c, const float *a, int64_t ld, const task *x) {
    fetch(c, a + at_k(c, x, ld), c->k_next * ld, pyops_min(KEYS, x->Tk));
}

/* ---- forward ---- */
typedef struct { int64_t k, v, q, transposed, s, dropout_mask, drawn, groups, total; } forward_layout;

static forward_layout lay_out_forward(const call *c) {
    const int64_t copied = c->copied * c->ld;
    forward_layout l = {0};
    l.v = l.k + copied;                                 /* k, v of each task (keys,C) */
    l.q = l.v + copied;                                 /* q of a task (QUERIES,C) */
    l.transposed = l.q + QUERIES * c->ld;                   /* (C,QUERIES) */
    l.s = l.transposed + c->C * QUERIES;                    /* scores, then weights (KEYS,columns) */
    l.dropout_mask = l.s + KEYS * c->columns;           /* (KEYS,columns) */
    l.drawn = l.dropout_mask + KEYS * c->columns;       /* (columns,KEYS) */
    l.groups = l.drawn + c->columns * KEYS;             /* (columns,KEYS/4) uint64 */
    l.total = l.groups + c->columns * KEYS / 2;
    return l;
}

static void forward(const call *c, float *work, const group *g, const group *next, float *y, float *stats, const float *q,
                    const float *k, const float *v) {
    const pyops_kernels *kernels = c->k;
    const forward_layout l = lay_out_forward(c);
    const int64_t C = c->C, ld = c->ld;
    const int64_t y_step = c->q_next * c->ldy, q_step = c->q_next * c->ldq, k_step = c->k_next * c->ldk;
    float *const s = work + l.s, *const max = stats, *const sum = stats + c->B * c->heads * c->Tq;
    const task *const end = g->tasks + g->n;
    for (int64_t j = 0; j == 0 || j < g->Tk; j += KEYS) {
        for (const task *x = g->tasks; x < end; x++) {
            const int64_t n = seen_from(c, x, x->Tq - 1, j), at = at_k(c, x, c->ldk) + j * k_step;
            kernels->scale_rows(work + l.k + x->copy * ld, k + at, 1.0f, n, C, ld, k_step);
            kernels->scale_rows(work + l.v + x->copy * ld, v + at, 1.0f, n, C, ld, k_step);
        }
        for (int64_t i = 0; i < g->Tq; i += QUERIES) {
            tile t;
            float max_i[COLUMNS] = {0}, sum_i[COLUMNS] = {0}, before[COLUMNS];
            if (!make_tile(c, &t, g, i, j) && j) continue;
            for (const task *x = g->tasks; x < end; x++) {
                const float *q_x = q + at_q(c, x, c->ldq) + i * q_step;
                const int64_t rows = rows_of(&t, x), stat = x->number * c->Tq + i;
                const int copy = rows < PYOPS_LANES;
                const task *const after = i == 0 && j == 0 && x - g->tasks < next->n ? next->tasks + (x - g->tasks) : NULL;
                if (after) fetch_keys(c, k, c->ldk, after), fetch_queries(c, q, c->ldq, after);
                if (copy) kernels->scale_rows(work + l.q, q_x, 1.0f, rows, C, ld, q_step), q_x = work + l.q;
                scores(c, s + x->column, work + l.k + x->copy * ld, q_x, copy ? ld : q_step, keys_of(&t, x), rows,
                       work + l.transposed);
                if (j) pyops_copy(max_i + x->column, max + stat, rows), pyops_copy(sum_i + x->column, sum + stat, rows);
            }
            draw_tile(c, &t, work + l.dropout_mask, work + l.drawn, work + l.groups);
            kernels->softmax_online(s, max_i, sum_i, before, t.dropout_mask, t.seen, c->scale, t.n, t.width, c->columns,
                                    t.ld_mask, j > 0);
            for (const task *x = g->tasks; x < end; x++) {
                float *const y_x = y + at_q(c, x, c->ldy) + i * y_step;
                const int64_t rows = rows_of(&t, x), stat = x->number * c->Tq + i;
                const task *const after = i == 0 && j == 0 && x - g->tasks < next->n ? next->tasks + (x - g->tasks) : NULL;
                if (after) fetch_keys(c, v, c->ldk, after), fetch_queries(c, y, c->ldy, after);
                pyops_copy(max + stat, max_i + x->column, rows);
                pyops_copy(sum + stat, sum_i + x->column, rows);
                for (int64_t r = 0; j && r < rows; r++) kernels->scale(y_x + r * y_step, y_x + r * y_step, before[r], C);
                kernels->direct(y_x, s + x->column, work + l.v + x->copy * ld, rows, C, keys_of(&t, x), y_step, 1, c->columns,
                                ld, j > 0);
            }
        }
    }
}

/* The same for few queries: each has a row of scores, and k and v are read in place, since each row is read once. */
static void forward_few(const call *c, float *work, const task *x, float *y, float *stats, const float *q, const float *k,
                        const float *v) {
    const pyops_kernels *kernels = c->k;
    float *const s = work, *const dropout_mask = work + pyops_round_up(c->Tk, 4);
    float *const max = stats + x->number * c->Tq, *const sum = max + c->B * c->heads * c->Tq;
    const int64_t y_step = c->q_next * c->ldy, q_step = c->q_next * c->ldq, k_step = c->k_next * c->ldk;
    y += at_q(c, x, c->ldy);
    q += at_q(c, x, c->ldq);
    k += at_k(c, x, c->ldk);
    v += at_k(c, x, c->ldk);
    for (int64_t i = 0; i < x->Tq; i++) {
        const int64_t n = seen(c, x, i);
        kernels->dots(s, k, q + i * q_step, c->scale, n, c->C, k_step, 0);
        max[i] = kernels->max(s, n);
        sum[i] = kernels->exp_sum(s, s, max[i], n);
        kernels->scale(s, s, 1.0f / sum[i], n);
        if (c->step) {
            const int64_t drawn = pyops_round_up(n, 4);
            kernels->fill(dropout_mask, drawn, 1.0f);
            kernels->dropout(dropout_mask, dropout_mask, mask_group(c, x, i, 0), drawn, (uint64_t)c->step[0], c->key,
                             pyops_dropout_threshold(c->p), 1.0f / (1.0f - c->p));
            kernels->mul(s, dropout_mask, n);
        }
        kernels->direct(y + i * y_step, s, v, 1, c->C, n, y_step, 0, 1, k_step, 0);
    }
}

pyops_status pyops_attention_forward(float *y, float *stats, const float *q, const float *k, const float *v,
                                     const int32_t *lengths, const int32_t *q_offsets, const int32_t *k_offsets,
                                     const int64_t *step, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                                     int64_t ldq, int64_t ldk, int32_t causal, float p, uint64_t key, void *stream) {
    (void)stream;
    call c;
    const pyops_status status = make_call(&c, "attention_forward", Tq, Tk, B, heads, C, ldq, ldk, lengths, q_offsets, k_offsets,
                                          step, causal, p, key);
    if (status) return status;
    const int64_t few_floats = 2 * pyops_round_up(Tk + 1, 4), total = total_cost(&c, 2);       /* never 0 floats */
    const int64_t floats = Tq <= FEW ? few_floats : pyops_max(few_floats, lay_out_forward(&c).total);
    int failed = 0;
    #pragma omp parallel if (total * C > PYOPS_SHARE_FMAS)
    {
        float *const work = pyops_scratch_or_fail((size_t)floats, &failed);
        const int64_t thread = omp_get_thread_num();
        const int64_t from = first_task(&c, 2, total, thread), to = work ? first_task(&c, 2, total, thread + 1) : from;
        for (int64_t n = from; n < to && (Tq <= FEW || q_offsets); n++) {
            const task x = find(&c, n);
            if (x.Tq <= FEW) forward_few(&c, work, &x, y, stats, q, k, v);
        }
        if (work && Tq > FEW) {
            group groups[2];
            int now = 0;
            if (c.ld > C) c.k->fill(work, lay_out_forward(&c).transposed, 0.0f);    /* beyond the copied rows */
            for (int64_t n = make_group(&c, groups, from, to, FEW); groups[now].n; now = !now) {
                n = make_group(&c, &groups[!now], n, to, FEW);
                forward(&c, work, &groups[now], &groups[!now], y, stats, q, k, v);
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "attention_forward: no memory for tiles") : PYOPS_OK;
}

/* ---- backward ---- */
typedef struct { int64_t k, v, q, dy, transposed, s, ds, dropout_mask, drawn, groups, dsum, total; } backward_layout;

static backward_layout lay_out_backward(const call *c) {
    const int64_t keys = c->copied * c->ld, queries = pyops_min(COLUMNS, c->group * pyops_min(c->Tq, QUERIES)) * c->ld;
    backward_layout l = {0};
    l.v = l.k + keys;                                   /* k, v of each task (keys,C) */
    l.q = l.v + keys;                                   /* q, dy of each task (queries,C) */
    l.dy = l.q + queries;
    l.transposed = l.dy + queries;                          /* (C,QUERIES) */
    l.s = l.transposed + c->C * QUERIES;                /* scores, then weights times dropout_mask (KEYS,columns) */
    l.ds = l.s + KEYS * c->columns;                     /* their gradients (KEYS,columns) */
    l.dropout_mask = l.ds + KEYS * c->columns;          /* (KEYS,columns) */
    l.drawn = l.dropout_mask + KEYS * c->columns;       /* (columns,KEYS) */
    l.groups = l.drawn + c->columns * KEYS;             /* (columns,KEYS/4) uint64 */
    l.dsum = l.groups + c->columns * KEYS / 2;          /* dy . y (Tq) of one task with several tiles of keys */
    l.total = l.dsum + pyops_round_up(c->Tq, COLUMNS);
    return l;
}

static void backward(const call *c, float *work, const group *g, const group *next, float *dq, float *dk, float *dv,
                     const float *dy, const float *q, const float *k, const float *v, const float *y, const float *stats) {
    const pyops_kernels *kernels = c->k;
    const backward_layout l = lay_out_backward(c);
    const int64_t C = c->C, ld = c->ld;
    const int64_t y_step = c->q_next * c->ldy, q_step = c->q_next * c->ldq, k_step = c->k_next * c->ldk;
    const int64_t dq_step = c->q_next * c->lddq, dk_step = c->k_next * c->lddk;
    float *const s = work + l.s, *const ds = work + l.ds, *const dsum = work + l.dsum;
    const float *const max = stats, *const sum = stats + c->B * c->heads * c->Tq;
    const task *const end = g->tasks + g->n;
    const int whole = g->Tk <= KEYS;                      /* a tile has all keys, so dsum is computed from it */
    if (!whole) {                                         /* the group has one task */
        const int64_t at = at_q(c, g->tasks, c->ldy);
        kernels->dots(dsum, dy + at, y + at, 1.0f, g->Tq, C, y_step, y_step);
        kernels->fill(dsum + g->Tq, l.total - l.dsum - g->Tq, 0.0f);
    }
    for (int64_t j = 0; j == 0 || j < g->Tk; j += KEYS) {
        for (const task *x = g->tasks; x < end; x++) {
            const int64_t all = pyops_min(KEYS, x->Tk - j), used = seen_from(c, x, x->Tq - 1, j);
            const int64_t written = seen_from(c, x, pyops_min(QUERIES, x->Tq) - 1, j);
            const int64_t at = at_k(c, x, c->ldk) + j * k_step, others = at_k(c, x, c->lddk) + (j + written) * dk_step;
            kernels->scale_rows(work + l.k + x->copy * ld, k + at, 1.0f, used, C, ld, k_step);
            kernels->scale_rows(work + l.v + x->copy * ld, v + at, 1.0f, used, C, ld, k_step);
            kernels->fill_rows(dk + others, all - written, C, dk_step, 0.0f);   /* the first queries write the rest, */
            kernels->fill_rows(dv + others, all - written, C, dk_step, 0.0f);   /* and later ones add */
        }
        for (int64_t i = 0; i < g->Tq; i += QUERIES) {
            tile t;
            float max_i[COLUMNS] = {0}, sum_i[COLUMNS] = {0};
            const int first = i == 0 && j == 0;
            if (!make_tile(c, &t, g, i, j) && j) continue;
            for (const task *x = g->tasks; x < end; x++) {
                float *const q_x = work + l.q + x->column * ld, *const dy_x = work + l.dy + x->column * ld;
                const int64_t n = keys_of(&t, x), rows = rows_of(&t, x), stat = x->number * c->Tq + i;
                const task *const after = first && x - g->tasks < next->n ? next->tasks + (x - g->tasks) : NULL;
                kernels->scale_rows(q_x, q + at_q(c, x, c->ldq) + i * q_step, 1.0f, rows, C, ld, q_step);
                kernels->scale_rows(dy_x, dy + at_q(c, x, c->ldy) + i * y_step, 1.0f, rows, C, ld, y_step);
                if (after) fetch_keys(c, k, c->ldk, after);
                if (first) fetch(c, dv + at_k(c, x, c->lddk), dk_step, n);
                scores(c, s + x->column, work + l.k + x->copy * ld, q_x, ld, n, rows, work + l.transposed);
                if (after) fetch_keys(c, v, c->ldk, after);
                if (first) {
                    fetch(c, dk + at_k(c, x, c->lddk), dk_step, n);
                    fetch(c, dq + at_q(c, x, c->lddq), dq_step, rows);
                }
                scores(c, ds + x->column, work + l.v + x->copy * ld, dy_x, ld, n, rows, work + l.transposed);
                pyops_copy(max_i + x->column, max + stat, rows);
                pyops_copy(sum_i + x->column, sum + stat, rows);
            }
            draw_tile(c, &t, work + l.dropout_mask, work + l.drawn, work + l.groups);
            kernels->softmax_back(s, ds, max_i, sum_i, whole ? NULL : dsum + i, t.dropout_mask, t.seen, c->scale, t.n, t.width,
                                  c->columns, t.ld_mask);
            for (const task *x = g->tasks; x < end; x++) {
                const int64_t n = keys_of(&t, x), rows = rows_of(&t, x), dk_at = at_k(c, x, c->lddk) + j * dk_step;
                const float *const q_x = work + l.q + x->column * ld, *const dy_x = work + l.dy + x->column * ld;
                const task *const after = first && x - g->tasks < next->n ? next->tasks + (x - g->tasks) : NULL;
                float *const s_x = s + x->column, *const ds_x = ds + x->column;
                if (after) fetch_queries(c, q, c->ldq, after);
                kernels->direct(dv + dk_at, s_x, dy_x, n, C, rows, dk_step, c->columns, 1, ld, i > 0);
                if (after) fetch_queries(c, dy, c->ldy, after);
                kernels->direct(dk + dk_at, ds_x, q_x, n, C, rows, dk_step, c->columns, 1, ld, i > 0);
                kernels->direct(dq + at_q(c, x, c->lddq) + i * dq_step, ds_x, work + l.k + x->copy * ld, rows, C, n, dq_step, 1,
                                c->columns, ld, j > 0);
            }
        }
    }
}

pyops_status pyops_attention_backward(float *dq, float *dk, float *dv, const float *dy, const float *q, const float *k,
                                      const float *v, const int32_t *lengths, const int32_t *q_offsets,
                                      const int32_t *k_offsets, const int64_t *step, const float *y, const float *stats,
                                      int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk,
                                      int64_t lddq, int64_t lddk, int32_t causal, float p, uint64_t key, void *stream) {
    (void)stream;
    call c;
    const char *const who = "attention_backward";
    pyops_status status = make_call(&c, who, Tq, Tk, B, heads, C, ldq, ldk, lengths, q_offsets, k_offsets, step, causal, p,
                                    key);
    if (!status) status = check_attention_rows(who, "lddq", lddq, heads, C);
    if (!status) status = check_attention_rows(who, "lddk", lddk, heads, C);
    if (status) return status;
    c.lddq = lddq;
    c.lddk = lddk;
    const int64_t total = total_cost(&c, 5);
    int failed = 0;
    #pragma omp parallel if (total * C > PYOPS_SHARE_FMAS)
    {
        float *const work = pyops_scratch_or_fail((size_t)lay_out_backward(&c).total, &failed);
        if (work && c.ld > C) c.k->fill(work, lay_out_backward(&c).transposed, 0.0f); /* beyond the copied rows */
        const int64_t thread = omp_get_thread_num();
        const int64_t from = first_task(&c, 5, total, thread), to = work ? first_task(&c, 5, total, thread + 1) : from;
        group groups[2];
        int now = 0;
        for (int64_t n = make_group(&c, groups, from, to, -1); groups[now].n; now = !now) {
            n = make_group(&c, &groups[!now], n, to, -1);
            backward(&c, work, &groups[now], &groups[!now], dq, dk, dv, dy, q, k, v, y, stats);
        }
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
