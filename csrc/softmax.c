/* softmax.c - softmax along an axis, and of attention scores in memory, for attention computed by separate products. */
#include <math.h>
#include "internal.h"
#include "kernels/math.inc"

/* ---- along an axis: x (outer,n,inner) is never transposed ----
 * Long contiguous rows (inner 1) are read in vectors along the row.  Columns (inner > 1) are read in vectors across columns;
 * sums of few columns, and short rows, are first gathered into LANES columns, from several indices of the outer axis.
 */
enum { LANES = PYOPS_LANES, GATHER_MOST = 512 };

typedef struct {
    float *to;                          /* y or dx */
    const float *x, *y;                 /* x, or dy and y: y is NULL in forward */
    int64_t outer, n, inner;
    int log;
} softmax_call;

static void softmax_block(const pyops_kernels *k, const softmax_call *s, float *to, const float *x, const float *y, int64_t ld,
                          int64_t C) {
    if (y) k->softmax_columns_back(to, x, y, s->n, ld, C, s->log);
    else k->softmax_columns(to, x, s->n, ld, C, s->log);
}

/* a (n,LANES) = the columns c of x (outer,n,inner), numbered along the outer and inner axis */
static void gather_columns(float *a, const float *x, const int64_t *at, const softmax_call *s, int64_t columns) {
    for (int64_t c = 0; c < columns; c++)
        for (int64_t j = 0; j < s->n; j++) a[j * LANES + c] = x[at[c] + j * s->inner];
}

static void softmax_gathered(const pyops_kernels *k, const softmax_call *s, int64_t first, int64_t columns) {
    float a[GATHER_MOST * LANES], b[GATHER_MOST * LANES];
    int64_t at[LANES];
    for (int64_t c = 0; c < columns; c++) at[c] = (first + c) / s->inner * s->n * s->inner + (first + c) % s->inner;
    if (columns < LANES) {                              /* the rest is computed and not used */
        k->fill(a, s->n * LANES, 0.0f);
        if (s->y) k->fill(b, s->n * LANES, 0.0f);
    }
    gather_columns(a, s->x, at, s, columns);
    if (s->y) gather_columns(b, s->y, at, s, columns);
    softmax_block(k, s, a, a, s->y ? b : NULL, LANES, LANES);
    for (int64_t c = 0; c < columns; c++)
        for (int64_t j = 0; j < s->n; j++) s->to[at[c] + j * s->inner] = a[j * LANES + c];
}

/* Softmax of rows so long that threads share each of them.  The parts of a row, and so the bits, depend on n alone. */
enum { LONG = 262144, PART = 32768, MOST_PARTS = 1024 };

static void softmax_long_rows(const pyops_kernels *k, const softmax_call *s) {
    const int64_t n = s->n, size = pyops_max(PART, pyops_round_up((n + MOST_PARTS - 1) / MOST_PARTS, LANES)), parts = n / size;
    float found[MOST_PARTS];
    for (int64_t r = 0; r < s->outer; r++) {
        const float *const x = s->x + r * n;
        float *const y = s->to + r * n;
        float max = -INFINITY;
        double total = 0.0;
#define EACH_PART(statement) \
    _Pragma("omp parallel for schedule(static)") for (int64_t p = 0; p < parts; p++) { \
        const int64_t at = p * size, length = p + 1 < parts ? size : n - at; \
        statement; \
    }
        EACH_PART(found[p] = k->max(x + at, length))
        for (int64_t p = 0; p < parts; p++)
            if (found[p] > max || found[p] != found[p]) max = found[p];     /* a NaN stays: nothing is larger */
        EACH_PART(found[p] = k->softmax_exps(y + at, x + at, max, length, s->log))
        for (int64_t p = 0; p < parts; p++) total += found[p];
        const float log_total = log_f((float)total), share = (float)(1.0 / total);
        EACH_PART(if (s->log) k->softmax_logs(y + at, x + at, max, log_total, length);
                  else k->scale(y + at, y + at, share, length))
#undef EACH_PART
    }
}

/* Rows of a unit of work, and their floats. */
#define ROWS PYOPS_TUNED(softmax_rows, 64, 1, 128, 1)
#define ROW_FLOATS PYOPS_TUNED(softmax_row_floats, 16384, 1, 32768, 1)
static void softmax_along(const softmax_call *s) {
    enum { COLUMNS = PYOPS_SOFTMAX_COLUMNS };
    const pyops_kernels *k = pyops_active();
    const int64_t sums = s->outer * s->inner, n = s->n;
    const int is_row = s->inner == 1 && n >= LANES, is_gathered = !is_row && s->inner < LANES && n <= GATHER_MOST;
    if (is_row && n >= LONG && !s->y) {
        softmax_long_rows(k, s);
        return;
    }
    /* rows of a unit of work: fewer if they are long, so that there is a unit for each thread */
    const int64_t rows_each = n ? pyops_max(1, pyops_min(ROWS, ROW_FLOATS / n)) : ROWS;
    const int64_t blocks = (s->inner + COLUMNS - 1) / COLUMNS, each = is_row ? rows_each : LANES;
    const int64_t units = is_row || is_gathered ? (sums + each - 1) / each : s->outer * blocks;
    if (!sums || !n) return;
    PYOPS_FOR(u, units, sums * n > PYOPS_SHARE_EXPS, {
        if (is_row) {
            const int64_t at = u * each * n, rows = pyops_min(each, sums - u * each);
            if (s->y) k->softmax_rows_back(s->to + at, s->x + at, s->y + at, rows, n, s->log);
            else k->softmax_rows(s->to + at, s->x + at, rows, n, s->log);
        } else if (is_gathered) {
            softmax_gathered(k, s, u * LANES, pyops_min(LANES, sums - u * LANES));
        } else {
            const int64_t c = u % blocks * COLUMNS, at = u / blocks * n * s->inner + c;
            softmax_block(k, s, s->to + at, s->x + at, s->y ? s->y + at : NULL, s->inner, pyops_min(COLUMNS, s->inner - c));
        }
    });
}

pyops_status pyops_softmax_forward(float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int32_t log,
                                   void *stream) {
    (void)stream;
    const pyops_status status = check_softmax("softmax_forward", outer, n, inner);
    if (!status) softmax_along(&(softmax_call){y, x, NULL, outer, n, inner, log});
    return status;
}

pyops_status pyops_softmax_backward(float *dx, const float *dy, const float *y, int64_t outer, int64_t n, int64_t inner,
                                    int32_t log, void *stream) {
    (void)stream;
    const pyops_status status = check_softmax("softmax_backward", outer, n, inner);
    if (!status) softmax_along(&(softmax_call){dx, dy, y, outer, n, inner, log});
    return status;
}

/* ---- attention: one row per query; threads share rows.  Masks and dropout as in attention.c. ---- */

/* y = D x of row r; y may be x */
static void drop(const pyops_kernels *k, float *y, const float *x, int64_t r, int64_t Tk, const int64_t *step, float share,
                 uint64_t key) {
    k->dropout(y, x, r * (pyops_round_up(Tk, 4) / 4), Tk, (uint64_t)step[0], key, pyops_dropout_threshold(share),
               1.0f / (1.0f - share));
}

pyops_status pyops_attention_softmax_forward(float *p, float *w, const float *s, const int32_t *lengths,
                                             const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
                                             int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int32_t causal, float scale,
                                             float share, uint64_t key, void *stream) {
    (void)stream;
    const char *const who = "attention_softmax_forward";
    pyops_status status = check_attention_softmax(who, lengths, k_offsets, Tq, Tk, B, heads, share);
    if (!status) status = pyops_check_lengths(who, lengths, q_offsets, k_offsets, Tq, Tk, B);
    if (status) return status;
    const int drops = step && share > 0.0f;
    PYOPS_REQUIRE(w || !drops, "attention_softmax_forward: w is NULL, expected an array for the weights after dropout");
    const pyops_kernels *k = pyops_active();
    const int64_t rows = B * heads * Tq;
    #pragma omp parallel for schedule(static) if (rows * Tk > PYOPS_SHARE_EXPS)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = r % Tq, b = r / (heads * Tq);
        const int64_t queries = q_offsets ? q_offsets[b + 1] - q_offsets[b] : Tq;
        const int64_t keys = k_offsets ? k_offsets[b + 1] - k_offsets[b] : Tk, length = lengths ? lengths[b] : keys;
        const int64_t n = i >= queries ? 0 : causal ? pyops_max(0, pyops_min(length, i + 1 + keys - queries)) : length;
        float *p_r = p + r * Tk;
        k->scale(p_r, s + r * Tk, scale, n);
        const float max = k->max(p_r, n), sum = k->exp_sum(p_r, p_r, max, n);
        k->scale(p_r, p_r, 1.0f / sum, n);
        k->fill(p_r + n, Tk - n, 0.0f);
        if (drops) drop(k, w + r * Tk, p_r, r, Tk, step, share, key);
        else if (w) k->scale(w + r * Tk, p_r, 1.0f, Tk);
    }
    return PYOPS_OK;
}

pyops_status pyops_attention_softmax_backward(float *ds, const float *dw, const float *p, const int64_t *step, int64_t Tq,
                                              int64_t Tk, int64_t B, int64_t heads, float share, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_attention_softmax("attention_softmax_backward", NULL, NULL, Tq, Tk, B, heads, share);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t rows = B * heads * Tq;
    const int drops = step && share > 0.0f;
    #pragma omp parallel for schedule(static) if (rows * Tk > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t r = 0; r < rows; r++) {
        if (drops) drop(k, ds + r * Tk, dw + r * Tk, r, Tk, step, share, key);
        k->softmax_row_back(ds + r * Tk, (drops ? ds : dw) + r * Tk, p + r * Tk, Tk);
    }
    return PYOPS_OK;
}
