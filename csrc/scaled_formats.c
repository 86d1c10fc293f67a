/* scaled_formats.c - numbers rounded to narrow formats in blocks with a float as their scale, in one or two dimensions.
 *
 * First the scales of all blocks, then the numbers, row by row: a row crosses the blocks beside each other.
 */
#include "internal.h"
#define FORMAT_INLINE static inline
#include "number_format.inc"

enum { CHUNK = 1024 };              /* numbers of a row processed at a time */

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

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* The largest |x| of block (b, c) of a matrix, as bits. */
static uint32_t amax_of(const grid *g, const float *x, int64_t b, int64_t c) {
    const pyops_kernels *k = pyops_active();
    const int64_t from = b * g->block_rows, to = pyops_min(from + g->block_rows, g->rows);
    const int64_t left = c * g->block_columns, width = pyops_min(g->block_columns, g->columns - left);
    uint32_t amax = 0;
    for (int64_t row = from; row < to; row++) amax = larger(amax, k->amax(x + row * g->columns + left, width));
    return amax;
}

/* The same for a matrix that is one block: the threads share it. */
static uint32_t amax_of_all(const grid *g, const float *x) {
    const pyops_kernels *k = pyops_active();
    const int64_t all = g->rows * g->columns;
    uint32_t amax = 0;
    #pragma omp parallel for schedule(static) reduction(max : amax) if (all > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < all; i += CHUNK) amax = larger(amax, k->amax(x + i, pyops_min(CHUNK, all - i)));
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

/* The scale of block (b, c), whose amax has these bits. */
static float scale_of(const grid *g, const float *x, int64_t b, int64_t c, uint32_t amax, float factor, number_format f,
                      int32_t rule, int32_t shift, int32_t flush) {
    const float scale = number_scale(amax, factor, f, rule, shift, flush);
    if (!has_choice(amax, rule)) return scale;
    const float other = scale_to_four(amax, factor);
    return error_of(g, x, b, c, other / factor, rule) < error_of(g, x, b, c, scale / factor, rule) ? other : scale;
}

/* The scales of the rows of blocks when blocks are one column wide: adjacent columns together. */
static void column_scales(const grid *g, float *scales, const float *x, int64_t b, float factor, number_format f, int32_t rule,
                          int32_t shift, int32_t flush) {
    const pyops_kernels *k = pyops_active();
    const int64_t from = b * g->block_rows, to = pyops_min(from + g->block_rows, g->rows);
    uint32_t amax[CHUNK];
    for (int64_t j = 0; j < g->columns; j += CHUNK) {
        const int64_t n = pyops_min(CHUNK, g->columns - j);
        memset(amax, 0, sizeof amax);
        for (int64_t r = from; r < to; r++) k->amax_columns(amax, x + r * g->columns + j, n);
        for (int64_t i = 0; i < n; i++) scales[j + i] = scale_of(g, x, b, j + i, amax[i], factor, f, rule, shift, flush);
    }
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
    const pyops_kernels *k = pyops_active();
    const grid g = make_grid(rows, columns, block_rows, block_columns);
    const number_format f = number_formats[format];
    const pyops_rounding_of how = {.format = format, .rounding = rounding, .saturate = 1};
    const float scaling = factor ? factor[0] : 1.0f;
    const int64_t blocks = g.down * g.across, matrix = rows * columns;
    const int is_one = outer * blocks == 1, is_stochastic = rounding == PYOPS_ROUND_STOCHASTIC;

    #pragma omp parallel for schedule(static) if (!is_one && all > PYOPS_SHARE_FLOATS)
    for (int64_t task = 0; task < outer * g.down; task++) {
        const int64_t b = task % g.down;
        const float *of = x + task / g.down * matrix;
        float *to = scales + task * g.across;
        if (block_columns == 1) column_scales(&g, to, of, b, scaling, f, rule, shift, flush);
        else
            for (int64_t c = 0; c < g.across; c++)
                to[c] = scale_of(&g, of, b, c, is_one ? amax_of_all(&g, of) : amax_of(&g, of, b, c), scaling, f, rule, shift,
                                 flush);
    }

    const int64_t pieces = (columns + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
    for (int64_t task = 0; task < outer * rows * pieces; task++) {
        const int64_t row = task / pieces, j = task % pieces * CHUNK, n = pyops_min(CHUNK, columns - j), at = row * columns + j;
        const float *to_scales = scales + (row / rows * g.down + row % rows / block_rows) * g.across;
        float scale[CHUNK];
        uint32_t words[CHUNK];
        for (int64_t i = 0, c = j / block_columns, left = block_columns - j % block_columns; i < n; c++, left = block_columns) {
            const float s = factor ? to_scales[c] / scaling : to_scales[c];
            for (const int64_t end = pyops_min(i + left, n); i < end; i++) scale[i] = s;
        }
        if (is_stochastic) k->random_words(words, at, n, (uint64_t)step[0], key);
        if (codes)
            for (int64_t i = 0; i < n; i++)
                codes[at + i] = (uint16_t)code_of(round_scaled(x[at + i], scale[i], is_stochastic ? words[i] : 0, f, rounding),
                                                  f);
        if (y) k->round_scaled(y + at, x + at, scale, is_stochastic ? words : NULL, n, &how);
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
