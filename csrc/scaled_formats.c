/* scaled_formats.c - numbers rounded to narrow formats in blocks with a float as their scale, in one or two dimensions.
 *
 * The scales of some adjacent blocks, then their numbers, row by row: a row crosses the blocks beside each other.  If blocks are
 * tall, first the scales of all blocks, then all numbers.
 */
#include "internal.h"
#define FORMAT_INLINE static inline
#include "number_format.inc"

enum {
    CHUNK = 1024,       /* numbers of a row processed at a time */
    BAND = 128 /* rows of a block up to which scales and numbers are computed together, so that x is read from memory once */
};

/* A matrix and its blocks; down, across: numbers of blocks. */
typedef struct { int64_t rows, columns, block_rows, block_columns, down, across; } grid;

static grid make_grid(int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    return (grid){
        .rows = rows,
        .columns = columns,
        .block_rows = block_rows,
        .block_columns = block_columns,
        .down = rows / block_rows + (rows % block_rows != 0),
        .across = columns / block_columns + (columns % block_columns != 0),
    };
}

/* The largest |x| of a matrix, as bits; the threads share it. */
static uint32_t amax_of_all(const grid *g, const float *x) {
    const pyops_kernels *k = pyops_active();
    const int64_t all = g->rows * g->columns;
    uint32_t amax = 0;
    #pragma omp parallel for schedule(static) reduction(max : amax) if (all > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < all; i += CHUNK) {
        const uint32_t most = k->amax(x + i, pyops_min(CHUNK, all - i));
        amax = most > amax ? most : amax;
    }
    return amax;
}

/* Copy the numbers from i to i + n of block (b, c), counted row by row. */
static void copy_of_block(float *to, const grid *g, const float *x, int64_t b, int64_t c, int64_t i, int64_t n) {
    const int64_t left = c * g->block_columns, width = pyops_min(g->block_columns, g->columns - left);
    for (int64_t row = i / width, column = i % width, done = 0; done < n; row++, column = 0) {
        const int64_t piece = pyops_min(width - column, n - done);
        memcpy(to + done, x + (b * g->block_rows + row) * g->columns + left + column, (size_t)piece * sizeof *to);
        done += piece;
    }
}

/* The sum of the errors of block (b, c) with this scale. */
static double error_of(const grid *g, const float *x, int64_t b, int64_t c, float scale, int32_t rule) {
    const int64_t height = pyops_min(g->block_rows, g->rows - b * g->block_rows);
    const int64_t width = pyops_min(g->block_columns, g->columns - c * g->block_columns), size = height * width;
    const pyops_rounding_of how = {.format = PYOPS_E2M1, .rounding = PYOPS_ROUND_EVEN, .saturate = 1};
    const int32_t one = SCALE_ONE;
    double sums[ERROR_SUMS], all = 0;
    float of[ERROR_SUMS], ratio[ERROR_SUMS], value[ERROR_SUMS];
    const int64_t used = pyops_min(ERROR_SUMS, size);
    memset(sums, 0, (size_t)used * sizeof *sums);
    for (int64_t i = 0; i < size; i += ERROR_SUMS) {
        const int64_t n = pyops_min(ERROR_SUMS, size - i);
        copy_of_block(of, g, x, b, c, i, n);
        for (int64_t p = 0; p < n; p++) ratio[p] = scale == 0.0f ? 0.0f : of[p] / scale;
        pyops_active()->round_numbers(value, ratio, &one, 0, NULL, n, &how);
        for (int64_t p = 0; p < n; p++) sums[p] += error_term(value[p], scale, of[p], rule);
    }
    for (int64_t p = 0; p < used; p++) all += sums[p];
    return all;
}

/* The arguments of a call. */
typedef struct {
    const pyops_kernels *k;
    grid g;
    number_format f;
    pyops_rounding_of how;
    float *y, *scales;
    uint16_t *codes;
    const float *x;
    float scaling;
    const int64_t *step;                    /* NULL unless rounding is stochastic */
    uint64_t key;
    int is_one;                             /* all numbers are one block */
} call;

/* The scale of a block that has a choice: this one, or the one that maps its amax to 4. */
static float better_scale(const call *c, const float *x, int64_t b, int64_t i, uint32_t amax, float scale) {
    const float other = scale_to_four(amax, c->scaling);
    const double error = error_of(&c->g, x, b, i, scale / c->scaling, c->how.rule);
    return error_of(&c->g, x, b, i, other / c->scaling, c->how.rule) < error ? other : scale;
}

/* The scales of blocks first, ..., end - 1 of row `line` of blocks, counted over all matrices. */
static void find_scales(const call *c, int64_t line, int64_t first, int64_t end) {
    const grid *g = &c->g;
    const int64_t b = line % g->down, from = b * g->block_rows, to = pyops_min(from + g->block_rows, g->rows);
    const float *x = c->x + line / g->down * g->rows * g->columns;
    float *scales = c->scales + line * g->across;
    uint32_t amax[CHUNK];
    for (int64_t i = first; i < end; i += CHUNK) {
        const int64_t n = pyops_min(CHUNK, end - i), left = i * g->block_columns;
        const int64_t width = pyops_min((i + n) * g->block_columns, g->columns) - left;
        memset(amax, 0, (size_t)n * sizeof *amax);
        if (c->is_one) amax[0] = amax_of_all(g, x);
        else
            for (int64_t r = from; r < to; r++) c->k->amax_blocks(amax, x + r * g->columns + left, width, g->block_columns);
        c->k->number_scales(scales + i, amax, n, c->scaling, &c->how);
        for (int64_t j = 0; j < n; j++)
            if (has_choice(amax[j], c->how.rule)) scales[i + j] = better_scale(c, x, b, i + j, amax[j], scales[i + j]);
    }
}

static void encode_piece(const call *c, uint16_t *codes, const float *x, const float *scale, const uint32_t *words, int64_t n) {
    const int32_t one = SCALE_ONE;
    float ratio[CHUNK], positive = 1.0f;
    for (int64_t i = 0; i < n; i++) {
        positive = scale[i] > 0.0f ? positive : 0.0f;       /* also for NaN */
        ratio[i] = x[i] / scale[i];
    }
    if (positive > 0.0f) return c->k->encode_numbers(codes, ratio, &one, 0, words, n, &c->how);
    for (int64_t i = 0; i < n; i++)
        codes[i] = (uint16_t)code_of(round_scaled(x[i], scale[i], words ? words[i] : 0, c->f, c->how.rounding), c->f);
}

/* Round at most CHUNK numbers of a row, counted over all matrices, from column j on. */
static void round_piece(const call *c, int64_t row, int64_t j, int64_t n) {
    const grid *g = &c->g;
    const int64_t at = row * g->columns + j;
    const float *scales = c->scales + (row / g->rows * g->down + row % g->rows / g->block_rows) * g->across;
    float scale[CHUNK];
    uint32_t words[CHUNK];
    c->k->expand_scales(scale, scales, j, n, g->block_columns, c->scaling);
    if (c->step) c->k->random_words(words, at, n, (uint64_t)c->step[0], c->key);
    if (c->codes) encode_piece(c, c->codes + at, c->x + at, scale, c->step ? words : NULL, n);
    if (c->y) c->k->round_scaled(c->y + at, c->x + at, scale, c->step ? words : NULL, n, &c->how);
}

/* Scales and numbers of blocks first, ..., end - 1 of row `line` of blocks: the numbers are read twice, from a cache. */
static void quantize_blocks(const call *c, int64_t line, int64_t first, int64_t end) {
    const grid *g = &c->g;
    const int64_t from = line % g->down * g->block_rows, to = pyops_min(from + g->block_rows, g->rows);
    const int64_t left = first * g->block_columns, right = pyops_min(end * g->block_columns, g->columns);
    find_scales(c, line, first, end);
    for (int64_t row = from; row < to; row++)
        for (int64_t j = left; j < right; j += CHUNK)
            round_piece(c, line / g->down * g->rows + row, j, pyops_min(CHUNK, right - j));
}

pyops_status pyops_scaled_quantize(float *y, uint16_t *codes, float *scales, const float *x, const float *factor,
                                   const int64_t *step, int64_t outer, int64_t rows, int64_t columns, int64_t block_rows,
                                   int64_t block_columns, int32_t format, int32_t rounding, int32_t rule, int32_t shift,
                                   int32_t flush, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_scaled("scaled_quantize", step, outer, rows, columns, block_rows, block_columns, format,
                                             rounding, rule, shift);
    if (status) return status;
    const int64_t all = outer * rows * columns;
    if (all == 0) return PYOPS_OK;
    const grid g = make_grid(rows, columns, block_rows, block_columns);
    const call c = {
        .k = pyops_active(),
        .g = g,
        .f = number_formats[format],
        .how = {.format = format, .rounding = rounding, .saturate = 1, .rule = rule, .shift = shift, .flush = flush},
        .y = y,
        .scales = scales,
        .codes = codes,
        .x = x,
        .scaling = factor ? factor[0] : 1.0f,
        .step = rounding == PYOPS_ROUND_STOCHASTIC ? step : NULL,
        .key = key,
        .is_one = outer * g.down * g.across == 1,
    };
    const int64_t lines = outer * g.down, together = block_columns < CHUNK ? CHUNK / block_columns : 1;
    if (block_rows <= BAND && !c.is_one) {
        const int64_t strips = (g.across + together - 1) / together;
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t task = 0; task < lines * strips; task++) {
            const int64_t first = task % strips * together;
            quantize_blocks(&c, task / strips, first, pyops_min(first + together, g.across));
        }
        return PYOPS_OK;
    }
    #pragma omp parallel for schedule(static) if (!c.is_one && all > PYOPS_SHARE_FLOATS)
    for (int64_t line = 0; line < lines; line++) find_scales(&c, line, 0, g.across);

    const int64_t pieces = (columns + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
    for (int64_t task = 0; task < outer * rows * pieces; task++) {
        const int64_t j = task % pieces * CHUNK;
        round_piece(&c, task / pieces, j, pyops_min(CHUNK, columns - j));
    }
    return PYOPS_OK;
}

pyops_status pyops_scaled_decode(float *y, const uint16_t *codes, const float *scales, const float *factor, int64_t outer,
                                 int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns, int32_t format,
                                 void *stream) {
    (void)stream;
    const pyops_status status = check_scaled("scaled_decode", NULL, outer, rows, columns, block_rows, block_columns, format,
                                             PYOPS_ROUND_EVEN, PYOPS_SCALE_FLOOR, 0);
    if (status || outer * rows * columns == 0) return status;
    const grid g = make_grid(rows, columns, block_rows, block_columns);
    const number_format f = number_formats[format];
    #pragma omp parallel for schedule(static) if (outer * rows * columns > PYOPS_SHARE_EXPS)
    for (int64_t row = 0; row < outer * rows; row++) {
        const float *of = scales + (row / rows * g.down + row % rows / block_rows) * g.across;
        for (int64_t j = 0; j < columns; j++) {
            const float scale = of[j / block_columns];
            y[row * columns + j] = scaled_value(from_code(codes[row * columns + j], f), factor ? scale / factor[0] : scale);
        }
    }
    return PYOPS_OK;
}
