/* topk.c - the k largest elements of each row and their log softmax; the same for the logits of the output layer.
 *
 * A row is processed in chunks of columns, with a maximum and a sum of exponentials each, which are combined in order.  So the
 * logits of a chunk are used while they are in cache, and are never in memory at once.  Columns whose maximum is below the
 * k-th largest element so far are not searched, so few elements are compared one by one.  A result depends on its row alone,
 * and not on the number of rows or threads.  Logits are products with float32 weights, or with compact ones.
 */
#include <math.h>
#include "internal.h"
#include "kernels/math.inc"

/* Columns and rows of a chunk; columns that are searched or skipped together. */
enum { COLUMNS = PYOPS_COMPACT_COLUMNS, ROWS = 128, PART = 128 };

static int64_t chunks_of(int64_t C) { return (C + COLUMNS - 1) / COLUMNS; }

/* ---- the largest keys (internal.h), descending; 0 is none ---- */
static void insert(uint64_t *best, int64_t k, uint64_t key) {
    int64_t j = k - 1;
    if (key <= best[j]) return;
    for (; j && best[j - 1] < key; j--) best[j] = best[j - 1];
    best[j] = key;
}

/* Search n columns, which start with column `first`. */
static void search(const pyops_kernels *kernels, uint64_t *best, int64_t k, const float *x, int64_t n, int64_t first) {
    for (int64_t from = 0; from < n; from += PART) {
        const int64_t end = pyops_min(from + PART, n);
        if (kernels->max(x + from, end - from) < pyops_key_value(best[k - 1])) continue;        /* false if either is NaN */
        for (int64_t c = from; c < end; c++)
            if (!(x[c] < pyops_key_value(best[k - 1]))) insert(best, k, pyops_key_of(x[c], first + c));
    }
}

/* ---- the sum of exponentials ---- */
typedef struct { float max, sum; } part;                /* of a chunk: the sum of exp(x - max) */

static part part_of(const pyops_kernels *kernels, const float *x, int64_t n) {
    const float max = kernels->max(x, n);
    return (part){max, kernels->sum_exp(x, max, n)};
}

/* Write the results of a row; parts are `step` apart. */
static void finish(int32_t *index, float *logp, const uint64_t *best, int64_t k, const part *parts, int64_t chunks,
                   int64_t step) {
    const float max = pyops_key_value(best[0]);
    float sum = 0.0f;
    for (int64_t i = 0; i < chunks; i++) {
        const part p = parts[i * step];
        if (!(p.max == -INFINITY && max > p.max)) sum += p.sum * exp_or_0(p.max - max);
    }
    const float log_sum = log_f(sum);
    for (int64_t j = 0; j < k; j++) {
        index[j] = pyops_key_index(best[j]);
        logp[j] = pyops_key_value(best[j]) - max - log_sum;
    }
}

pyops_status pyops_log_softmax_topk(int32_t *index, float *logp, const float *x, int64_t R, int64_t C, int64_t k,
                                    void *stream) {
    (void)stream;
    const pyops_status status = check_topk("log_softmax_topk", R, C, k);
    if (status) return status;
    const pyops_kernels *kernels = pyops_active();
    const int64_t chunks = chunks_of(C);
    int failed = 0;
    #pragma omp parallel if (R * C > PYOPS_SHARE_EXPS)
    {
        part *parts = (part *)pyops_scratch_or_fail((size_t)(2 * chunks), &failed);
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            uint64_t best[PYOPS_TOPK] = {0};
            for (int64_t i = 0; i < chunks && parts; i++) {
                const float *x_i = x + r * C + i * COLUMNS;
                const int64_t n = pyops_min(COLUMNS, C - i * COLUMNS);
                parts[i] = part_of(kernels, x_i, n);
                search(kernels, best, k, x_i, n, i * COLUMNS);
            }
            if (parts) finish(index + r * k, logp + r * k, best, k, parts, chunks, 1);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "log_softmax_topk: no memory for %lld chunks", LL(chunks)) : PYOPS_OK;
}

/* keys (R,k) of 64 bits, aligned; parts (chunks,R) */
int64_t pyops_linear_topk_work(int64_t R, int64_t D, int64_t V, int64_t k) {
    (void)D;
    return 2 * R * k + 1 + 2 * chunks_of(V) * R;
}

/* The factors of logits: float32, or a call with compact weights. */
typedef struct {
    const pyops_kernels *kernels;
    const float *x, *weight, *bias;
    const pyops_compact *compact;       /* NULL: float32 */
    int64_t R, D, V;
} factors;

static int64_t packed_size(const factors *f) { return f->compact ? 0 : pyops_packed_b_size(f->kernels, f->D, COLUMNS); }
static int is_packed(const factors *f) { return !f->compact && (f->R > PYOPS_FEW_ROWS || f->kernels->micro.is_split); }

/* z (rows,n), rows COLUMNS apart: logits of the rows from `first` on and the columns from v on.  weight_packed: of these
 * columns, if is_packed(f). */
static void logits(const factors *f, float *z, const float *weight_packed, int64_t first, int64_t rows, int64_t v, int64_t n,
                   float *scratch) {
    if (f->compact) {
        pyops_compact_columns(f->compact, z, COLUMNS, first, rows, v, n, 0, scratch);
        return;
    }
    const pyops_view x = {f->x + first * f->D, f->D, 1}, w = {f->weight + v * f->D, 1, f->D};
    if (is_packed(f))
        pyops_product_packed(f->kernels, z, COLUMNS, x, weight_packed, f->bias + v, rows, n, f->D, 0, n, 0, scratch);
    else pyops_product(f->kernels, z, COLUMNS, x, w, f->bias + v, rows, n, f->D, 0, scratch);
}

/* work as in pyops_linear_topk_work; logp may be NULL. */
static pyops_status topk(const char *who, int32_t *index, float *logp, float *work, const factors *f, int64_t k) {
    const pyops_kernels *kernels = f->kernels;
    const int64_t R = f->R, V = f->V;
    uint64_t *const best = (uint64_t *)(((uintptr_t)work + 7) & ~(uintptr_t)7);
    part *const parts = (part *)(best + R * k);
    memset(best, 0, (size_t)(R * k) * sizeof *best);
    const size_t needed = f->compact ? pyops_compact_scratch(f->compact) : pyops_product_scratch(kernels);
    const int64_t product = pyops_round_up((int64_t)needed, PYOPS_LANES), packed = packed_size(f), block = ROWS * COLUMNS;
    int failed = 0;
    #pragma omp parallel if (R * f->D * V > PYOPS_SHARE_FMAS || f->D * V > PYOPS_SHARE_FLOATS)
    {
        float *scratch = pyops_scratch_or_fail((size_t)(product + packed + block + 2 * R * k), &failed);
        float *const weight_packed = scratch + product, *const z = weight_packed + packed;
        uint64_t *const own = (uint64_t *)(z + block);
        if (scratch) memset(own, 0, (size_t)(R * k) * sizeof *own);
        #pragma omp for schedule(static) nowait
        for (int64_t v = 0; v < V; v += COLUMNS) {
            const int64_t n = pyops_min(COLUMNS, V - v);
            if (scratch && is_packed(f))
                pyops_pack_b(kernels, weight_packed, (pyops_view){f->weight + v * f->D, 1, f->D}, f->D, n, 0, n);
            for (int64_t first = 0; first < R && scratch; first += ROWS) {
                const int64_t rows = pyops_min(ROWS, R - first);
                logits(f, z, weight_packed, first, rows, v, n, scratch);
                for (int64_t r = 0; r < rows; r++) {
                    uint64_t *const own_r = own + (first + r) * k;
                    part *const found = parts + v / COLUMNS * R + first + r;
                    if (logp) *found = part_of(kernels, z + r * COLUMNS, n);
                    if (logp && found->max < pyops_key_value(own_r[k - 1])) continue;
                    search(kernels, own_r, k, z + r * COLUMNS, n, v);
                }
            }
        }
        #pragma omp critical
        for (int64_t i = 0; i < R * k && scratch; i++)
            if (own[i]) insert(best + i / k * k, k, own[i]);
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %lld packed words", who, LL((int64_t)COLUMNS));
    for (int64_t r = 0; r < R && logp; r++) finish(index + r * k, logp + r * k, best + r * k, k, parts + r, chunks_of(V), R);
    for (int64_t i = 0; i < R * k && !logp; i++) index[i] = pyops_key_index(best[i]);
    return PYOPS_OK;
}

pyops_status pyops_linear_topk(int32_t *index, float *logp, const float *x, const float *weight, const float *bias, float *work,
                               int64_t R, int64_t D, int64_t V, int64_t k, void *stream) {
    (void)stream;
    const pyops_status status = check_topk("linear_topk", R, V, k);
    if (status) return status;
    PYOPS_REQUIRE(D >= 0, "linear_topk: D=%lld, expected at least 0", LL(D));
    const factors f = {
        .kernels = pyops_for_product(pyops_active(), V, D), .x = x, .weight = weight, .bias = bias, .R = R, .D = D, .V = V};
    return topk("linear_topk", index, logp, work, &f, k);
}

/* The rows of x rounded, then as for linear_topk */
int64_t pyops_compact_topk_work(int64_t R, int64_t O, int64_t I, int64_t k, int32_t format) {
    return pyops_compact_rows(R, I, format) + pyops_linear_topk_work(R, I, O, k);
}

pyops_status pyops_compact_topk(int32_t *index, float *logp, const float *x, const float *compact, float *work, int64_t R,
                                int64_t O, int64_t I, int64_t k, int32_t format, void *stream) {
    (void)stream;
    pyops_status status = pyops_compact_check("compact_topk", R, O, I, format);
    if (!status) status = check_topk("compact_topk", R, O, k);
    if (!status) status = pyops_compact_check_layout("compact_topk", compact, O, I, format);
    if (status) return status;
    const pyops_compact call = pyops_compact_call(compact, x, work, R, O, I, format);
    pyops_compact_round(&call, 0, R);
    const factors f = {.kernels = pyops_active(), .compact = &call, .R = R, .D = I, .V = O};
    return topk("compact_topk", index, logp, work + pyops_compact_rows(R, I, format), &f, k);
}
