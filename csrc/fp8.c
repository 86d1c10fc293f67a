/* fp8.c - matrices in FP8: codes and scales, and products that add a sum of 128 terms at a time in float32.
 *
 * A task of the encoding is a tile of 128 x 128 numbers, which has whole blocks of each kind; of a product, a tile of c.
 */
#include "internal.h"
#define FORMAT_INLINE static inline
#include "number_format.inc"

enum { BLOCK = PYOPS_FP8_BLOCK, ROWS = 64, COLUMNS = 64 };

/* ---- codes and scales ---- */
typedef struct {
    const pyops_kernels *k;
    number_format f;
    pyops_rounding_of how;
    uint8_t *codes, *transposed;
    float *scales, *transposed_scales;
    const float *x;
    int64_t R, C, ldx, ld, transposed_ld;
    int32_t blocks;
} encoding;

static void scales_of(const encoding *e, float *scales, const uint32_t *amax, int64_t n) {
    e->k->number_scales(scales, amax, n, 1.0f, &e->how);
}

/* The codes of at most BLOCK numbers, each with its scale. */
static void encode_row(const encoding *e, uint16_t *codes, const float *x, const float *scale, int64_t n) {
    const int32_t one = SCALE_ONE;
    float ratio[BLOCK], positive = 1.0f;
    for (int64_t i = 0; i < n; i++) {
        positive = scale[i] > 0.0f ? positive : 0.0f; /* also for NaN */
        ratio[i] = x[i] / scale[i];
    }
    if (positive > 0.0f) {
        e->k->encode_numbers(codes, ratio, &one, 0, NULL, n, &e->how);
        return;
    }
    for (int64_t i = 0; i < n; i++) codes[i] = (uint16_t)code_of(round_scaled(x[i], scale[i], 0, e->f, PYOPS_ROUND_EVEN), e->f);
}

/* Tile (b, c);  whole: the scale of the matrix. */
static void encode_tile(const encoding *e, int64_t b, int64_t c, float whole) {
    const int64_t top = b * BLOCK, left = c * BLOCK, rows = pyops_min(BLOCK, e->R - top),
                  columns = pyops_min(BLOCK, e->C - left);
    const float *const x = e->x + top * e->ldx + left;
    const int64_t down = fp8_scale_rows(e->R, e->blocks), across = fp8_scale_rows(e->C, e->blocks);
    float of_rows[BLOCK], of_columns[BLOCK];
    for (int64_t i = 0; i < BLOCK; i++) of_rows[i] = of_columns[i] = whole;
    if (e->blocks != PYOPS_FP8_TENSOR) {
        uint32_t row_amax[BLOCK], column_amax[BLOCK] = {0}, amax = 0;
        for (int64_t r = 0; r < rows; r++) {
            row_amax[r] = e->k->amax(x + r * e->ldx, columns);
            amax = row_amax[r] > amax ? row_amax[r] : amax;
            e->k->amax_blocks(column_amax, x + r * e->ldx, columns, 1);
        }
        if (e->blocks == PYOPS_FP8_SQUARES) {
            scales_of(e, of_rows, &amax, 1);
            for (int64_t i = 0; i < BLOCK; i++) of_columns[i] = of_rows[i] = of_rows[0];
            if (e->codes) e->scales[c * down + b] = of_rows[0];
            if (e->transposed) e->transposed_scales[b * across + c] = of_rows[0];
        } else {
            scales_of(e, of_rows, row_amax, rows);
            scales_of(e, of_columns, column_amax, columns);
            if (e->codes) memcpy(e->scales + c * down + top, of_rows, (size_t)rows * sizeof *of_rows);
            if (e->transposed)
                memcpy(e->transposed_scales + b * across + left, of_columns, (size_t)columns * sizeof *of_columns);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        uint16_t codes[BLOCK];
        float scale[BLOCK];
        for (int64_t i = 0; i < columns; i++) scale[i] = of_rows[r];
        if (e->codes || e->blocks != PYOPS_FP8_ROWS) encode_row(e, codes, x + r * e->ldx, scale, columns);
        for (int64_t i = 0; e->codes && i < columns; i++) e->codes[(top + r) * e->ld + left + i] = (uint8_t)codes[i];
        if (!e->transposed) continue;
        if (e->blocks == PYOPS_FP8_ROWS) encode_row(e, codes, x + r * e->ldx, of_columns, columns);
        for (int64_t i = 0; i < columns; i++) e->transposed[(left + i) * e->transposed_ld + top + r] = (uint8_t)codes[i];
    }
}

/* The scale of the whole matrix, which the threads share. */
static float whole_scale(const encoding *e) {
    uint32_t amax = 0;
    #pragma omp parallel for schedule(static) reduction(max : amax) if (e->R * e->C > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < e->R; r++) {
        const uint32_t most = e->k->amax(e->x + r * e->ldx, e->C);
        amax = most > amax ? most : amax;
    }
    float scale;
    scales_of(e, &scale, &amax, 1);
    if (e->codes) e->scales[0] = scale;
    if (e->transposed) e->transposed_scales[0] = scale;
    return scale;
}

pyops_status pyops_fp8_encode(uint8_t *codes, uint8_t *transposed, float *scales, float *transposed_scales, const pyops_real *x,
                              int64_t R, int64_t C, int64_t ldx, int64_t ld, int64_t transposed_ld, int32_t format,
                              int32_t blocks, void *stream) {
    (void)stream;
    const pyops_status status = check_fp8_encode(codes, transposed, scales, transposed_scales, R, C, ldx, ld, transposed_ld,
                                                 format, blocks);
    if (status) return status;
    const encoding e = {
        .k = pyops_active(),
        .f = number_formats[format],
        .how = {.format = format, .rounding = PYOPS_ROUND_EVEN, .saturate = 1, .rule = PYOPS_SCALE_FLOAT},
        .codes = codes,
        .transposed = transposed,
        .scales = scales,
        .transposed_scales = transposed_scales,
        .x = x,
        .R = R,
        .C = C,
        .ldx = ldx,
        .ld = fp8_ld(ld, C),
        .transposed_ld = fp8_ld(transposed_ld, R),
        .blocks = blocks,
    };
    const float whole = blocks == PYOPS_FP8_TENSOR ? whole_scale(&e) : 1.0f;
    const int64_t down = (R + BLOCK - 1) / BLOCK, across = (C + BLOCK - 1) / BLOCK;
    PYOPS_FOR(task, down * across, R * C > PYOPS_SHARE_EXPS, { encode_tile(&e, task / across, task % across, whole); });
    return PYOPS_OK;
}

/* ---- products ---- */
typedef struct {
    const uint8_t *codes;
    const float *scales;
    int64_t rows, ld, scale_rows;
    int32_t blocks;
    float values[256]; /* of the codes */
} operand;

static operand operand_of(const uint8_t *codes, const float *scales, int64_t rows, int64_t ld, int32_t format, int32_t blocks) {
    operand o = {codes, scales, rows, ld, fp8_scale_rows(rows, blocks), blocks, {0}};
    for (uint32_t code = 0; code < 256; code++) o.values[code] = value_of(from_code(code, number_formats[format]), SCALE_ONE);
    return o;
}

/* The scale of a row for block `k` of 128 k's; 1 if the whole matrix has one scale. */
static float scale_at(const operand *o, int64_t row, int64_t k) {
    if (o->blocks == PYOPS_FP8_TENSOR) return 1.0f;
    return o->scales[k * o->scale_rows + (o->blocks == PYOPS_FP8_ROWS ? row : row / BLOCK)];
}
static float whole_of(const operand *o) { return o->blocks == PYOPS_FP8_TENSOR ? o->scales[0] : 1.0f; }

typedef struct {
    float *c;
    operand a, b;
    const float *bias;
    int64_t K, ldc;
    int32_t accumulate, relu;
} product;

/* Rows i to i + rows - 1, columns j to j + columns - 1. */
static void multiply_tile(const product *p, int64_t i, int64_t rows, int64_t j, int64_t columns) {
    float total[ROWS][COLUMNS] = {{0}}, b[BLOCK][COLUMNS] = {{0}}, b_scales[COLUMNS] = {0};
    for (int64_t k = 0; k < p->K; k += BLOCK) {
        const int64_t n = pyops_min(BLOCK, p->K - k);
        for (int64_t l = 0; l < columns; l++) {
            const uint8_t *const codes = p->b.codes + (j + l) * p->b.ld + k;
            for (int64_t t = 0; t < n; t++) b[t][l] = p->b.values[codes[t]];
            b_scales[l] = scale_at(&p->b, j + l, k / BLOCK);
        }
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *const codes = p->a.codes + (i + r) * p->a.ld + k;
            const float a_scale = scale_at(&p->a, i + r, k / BLOCK);
            float partial[COLUMNS] = {0};
            for (int64_t t = 0; t < n; t++) {
                const float a = p->a.values[codes[t]];
                for (int64_t l = 0; l < COLUMNS; l++) partial[l] += a * b[t][l];
            }
            for (int64_t l = 0; l < COLUMNS; l++) total[r][l] += partial[l] * (a_scale * b_scales[l]);
        }
    }
    const float whole = whole_of(&p->a) * whole_of(&p->b);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t l = 0; l < columns; l++) {
            float *const c = p->c + (i + r) * p->ldc + j + l;
            float sum = total[r][l] * whole;
            if (p->bias) sum += p->bias[j + l];
            if (p->accumulate) sum += *c;
            *c = p->relu && sum < 0.0f ? 0.0f : sum;
        }
}

pyops_status pyops_gemm_fp8(pyops_real *c, const uint8_t *a, const uint8_t *b, const float *a_scales, const float *b_scales,
                            const float *bias, int64_t M, int64_t N, int64_t K, int64_t ldc, int64_t lda, int64_t ldb,
                            int32_t a_format, int32_t b_format, int32_t a_blocks, int32_t b_blocks, int32_t accumulate,
                            int32_t relu, void *stream) {
    (void)stream;
    const pyops_status status = check_gemm_fp8(a, b, M, N, K, ldc, lda, ldb, a_format, b_format, a_blocks, b_blocks);
    if (status) return status;
    const product p = {
        .c = c,
        .a = operand_of(a, a_scales, M, fp8_ld(lda, K), a_format, a_blocks),
        .b = operand_of(b, b_scales, N, fp8_ld(ldb, K), b_format, b_blocks),
        .bias = bias,
        .K = K,
        .ldc = ldc,
        .accumulate = accumulate,
        .relu = relu,
    };
    const int64_t down = (M + ROWS - 1) / ROWS, across = (N + COLUMNS - 1) / COLUMNS;
    PYOPS_FOR(task, down * across, M * N * K > PYOPS_SHARE_FMAS, {
        const int64_t i = task % down * ROWS, j = task / down * COLUMNS;
        multiply_tile(&p, i, pyops_min(ROWS, M - i), j, pyops_min(COLUMNS, N - j));
    });
    return PYOPS_OK;
}
