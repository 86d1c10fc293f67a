/* formats.c - numbers rounded to narrow formats, alone or in blocks with a scale each.
 *
 * If blocks are contiguous (inner 1), a row is processed block by block.  Otherwise a block is a column of `block` rows, and
 * many adjacent columns are processed together, row by row: their scales are contiguous.
 */
#include "internal.h"
#define FORMAT_INLINE static inline
#include "number_format.inc"

enum { COLUMNS = 512, CHUNK = PYOPS_LONGEST_BLOCK };      /* columns, and contiguous numbers, processed at a time */
enum { EXACT = 100 };     /* scales from 2^-EXACT to 2^EXACT multiply exactly */

typedef struct {
    const pyops_kernels *k;
    pyops_rounding_of how;
    const float *factor;
    const int64_t *step;                    /* NULL unless rounding is stochastic */
    uint64_t key;
} call;

static call make_call(const float *factor, const int64_t *step, int64_t block, int32_t format, int32_t rounding,
                      int32_t saturate, int32_t rule, int32_t shift, int32_t flush, uint64_t key) {
    return (call){
        .k = pyops_active(),
        .factor = factor,
        .step = rounding == PYOPS_ROUND_STOCHASTIC ? step : NULL,
        .key = key,
        .how = {.format = format,
                .rounding = rounding,
                .saturate = saturate,
                .rule = rule,
                .shift = shift,
                .flush = flush,
                .block = block},
    };
}

/* Prepare n <= CHUNK contiguous numbers that start at element `first`: write x times the factor, if any, to `scaled`, and
 * their random words.  Returns the numbers to round: scaled or x. */
static const float *prepare(const call *c, float *scaled, uint32_t *words, const float *x, int64_t first, int64_t n) {
    if (c->step) c->k->random_words(words, first, n, (uint64_t)c->step[0], c->key);
    if (!c->factor) return x;
    c->k->scale(scaled, x, c->factor[0], n);
    return scaled;
}

static void divide(const call *c, float *y, int64_t n) {
    for (int64_t i = 0; c->factor && i < n; i++) y[i] /= c->factor[0];
}

static void quantize_numbers(const call *c, float *y, const float *x, int64_t first, int64_t n) {
    float scaled[CHUNK];
    uint32_t words[CHUNK];
    const int32_t one = SCALE_ONE;
    const float *from = prepare(c, scaled, words, x + first, first, n);
    if (c->how.block) c->k->round_blocks(y + first, from, c->step ? words : NULL, n, &c->how);
    else c->k->round_numbers(y + first, from, &one, 0, c->step ? words : NULL, n, &c->how);
    divide(c, y + first, n);
}

static uint8_t scale_byte(int32_t scale) { return scale == SCALE_DEAD ? 0 : (uint8_t)scale; }

static void encode_numbers(const call *c, uint16_t *codes, uint8_t *bytes, const float *x, int64_t first, int64_t n) {
    float scaled[CHUNK];
    uint32_t words[CHUNK], amax[CHUNK];
    int32_t scales[CHUNK] = {SCALE_ONE};
    const float *from = prepare(c, scaled, words, x + first, first, n);
    if (!c->how.block) return c->k->encode_numbers(codes + first, from, scales, 0, c->step ? words : NULL, n, &c->how);
    const int64_t length = c->how.block, blocks = (n + length - 1) / length;
    memset(amax, 0, (size_t)blocks * sizeof *amax);
    c->k->amax_blocks(amax, from, n, length);
    c->k->block_scales(scales, amax, blocks, &c->how);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t i = b * length;
        bytes[b] = scale_byte(scales[b]);
        c->k->encode_numbers(codes + first + i, from + i, scales + b, 0, c->step ? words + i : NULL, pyops_min(length, n - i),
                             &c->how);
    }
}

/* The largest |x| of `rows` rows, `inner` numbers apart, in n adjacent columns, and the scales of these blocks. */
static void column_scales(const call *c, int32_t *scales, const float *x, int64_t rows, int64_t inner, int64_t n) {
    uint32_t amax[COLUMNS] = {0};
    float scaled[COLUMNS];
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * inner;
        if (c->factor) c->k->scale(scaled, from, c->factor[0], n), from = scaled;
        c->k->amax_blocks(amax, from, n, 1);
    }
    c->k->block_scales(scales, amax, n, &c->how);
}

static void encode_columns(const call *c, uint16_t *codes, uint8_t *bytes, const float *x, int64_t first, int64_t rows,
                           int64_t inner, int64_t n) {
    int32_t scales[COLUMNS];
    uint32_t words[COLUMNS];
    float scaled[COLUMNS];
    column_scales(c, scales, x + first, rows, inner, n);
    for (int64_t l = 0; l < n; l++) bytes[l] = scale_byte(scales[l]);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = first + r * inner;
        const float *from = prepare(c, scaled, words, x + i, i, n);
        c->k->encode_numbers(codes + i, from, scales, 1, c->step ? words : NULL, n, &c->how);
    }
}

/* Blocks of `rows` rows, `inner` numbers apart, in n adjacent columns. */
static void quantize_columns(const call *c, float *y, const float *x, int64_t first, int64_t rows, int64_t inner, int64_t n) {
    int32_t scales[COLUMNS];
    uint32_t words[COLUMNS];
    float scaled[COLUMNS];
    column_scales(c, scales, x + first, rows, inner, n);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = first + r * inner;
        const float *from = prepare(c, scaled, words, x + i, i, n);
        c->k->round_numbers(y + i, from, scales, 1, c->step ? words : NULL, n, &c->how);
        divide(c, y + i, n);
    }
}

pyops_status pyops_fake_quantize(float *y, const float *x, const float *factor, const int64_t *step, int64_t outer, int64_t n,
                                 int64_t inner, int64_t block, int32_t format, int32_t rounding, int32_t saturate, int32_t rule,
                                 int32_t shift, int32_t flush, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_quantize("fake_quantize", step, outer, n, inner, block, format, rounding, rule, shift);
    if (status) return status;
    const call c = make_call(factor, step, block, format, rounding, saturate, rule, shift, flush, key);
    const int64_t all = outer * n * inner;
    if (block == 0) {
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t i = 0; i < all; i += CHUNK) quantize_numbers(&c, y, x, i, pyops_min(CHUNK, all - i));
    } else if (inner == 1) {
        const int64_t piece = CHUNK / block * block, pieces = (n + piece - 1) / piece;     /* whole blocks */
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t task = 0; task < outer * pieces; task++) {
            const int64_t i = task % pieces * piece;
            quantize_numbers(&c, y, x, task / pieces * n + i, pyops_min(piece, n - i));
        }
    } else if (inner) {
        const int64_t blocks = (n + block - 1) / block, strips = (inner + COLUMNS - 1) / COLUMNS;
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t task = 0; task < outer * blocks * strips; task++) {
            const int64_t strip = task % strips * COLUMNS, b = task / strips % blocks * block, o = task / strips / blocks;
            quantize_columns(&c, y, x, (o * n + b) * inner + strip, pyops_min(block, n - b), inner,
                             pyops_min(COLUMNS, inner - strip));
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_encode(uint16_t *codes, uint8_t *scales, const float *x, const float *factor, const int64_t *step,
                          int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t format, int32_t rounding,
                          int32_t saturate, int32_t rule, int32_t shift, int32_t flush, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_quantize("encode", step, outer, n, inner, block, format, rounding, rule, shift);
    if (status) return status;
    const call c = make_call(factor, step, block, format, rounding, saturate, rule, shift, flush, key);
    const int64_t all = outer * n * inner;
    if (block == 0) {
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t i = 0; i < all; i += CHUNK) encode_numbers(&c, codes, NULL, x, i, pyops_min(CHUNK, all - i));
    } else if (inner == 1) {
        const int64_t piece = CHUNK / block * block, pieces = (n + piece - 1) / piece, blocks = (n + block - 1) / block;
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t task = 0; task < outer * pieces; task++) {
            const int64_t i = task % pieces * piece, o = task / pieces;
            encode_numbers(&c, codes, scales + o * blocks + i / block, x, o * n + i, pyops_min(piece, n - i));
        }
    } else if (inner) {
        const int64_t blocks = (n + block - 1) / block, strips = (inner + COLUMNS - 1) / COLUMNS;
        #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
        for (int64_t task = 0; task < outer * blocks * strips; task++) {
            const int64_t strip = task % strips * COLUMNS, b = task / strips % blocks * block, o = task / strips / blocks;
            encode_columns(&c, codes, scales + task / strips * inner + strip, x, (o * n + b) * inner + strip,
                           pyops_min(block, n - b), inner, pyops_min(COLUMNS, inner - strip));
        }
    }
    return PYOPS_OK;
}

enum { TABLE = 256 }; /* codes of 8 bits */

/* The codes of bf16 and fp16, as exponent and digits of a float, have another bias. */
static void decode_halves(float *y, const uint16_t *codes, int64_t n, number_format f) {
    const float bias = two_to(126 + f.qmin + f.digits);
    const uint32_t infinity = 0x7fffu >> f.digits << f.digits;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t size = codes[i] & 0x7fffu, sign = (uint32_t)(codes[i] & 0x8000u) << 16;
        const uint32_t finite = bits_of(float_of(size << (23 - f.digits)) * bias);
        const uint32_t special = size == infinity ? 0x7f800000u | sign : 0x7fc00000u;
        y[i] = float_of(size >= infinity ? special : finite | sign);
    }
}

/* n numbers with one scale, a scale each, or none (NULL).  values: of all codes, with the scale 1; NULL without a table */
static void decode_numbers(float *y, const uint16_t *codes, const uint8_t *scales, int each, int64_t n, number_format f,
                           const float *values) {
    const int32_t one = scales ? scales[0] : SCALE_ONE;
    if (f.bits == 16 && !scales) {
        decode_halves(y, codes, n, f);
        return;
    }
    if (values && !each && one >= SCALE_ONE - EXACT && one <= SCALE_ONE + EXACT) {
        const float up = two_to(one - SCALE_ONE);
        for (int64_t i = 0; i < n; i++) y[i] = values[codes[i] & (TABLE - 1)] * up;
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t scale = each ? scales[i] : one;
        if (values && scale >= SCALE_ONE - EXACT && scale <= SCALE_ONE + EXACT) {
            y[i] = values[codes[i] & (TABLE - 1)] * two_to(scale - SCALE_ONE);
            continue;
        }
        rounded r = from_code(codes[i], f);
        if (scale == SCALE_NAN) r.special = 2;
        y[i] = value_of(r, scale);
    }
}

pyops_status pyops_decode(float *y, const uint16_t *codes, const uint8_t *scales, const float *factor, int64_t outer, int64_t n,
                          int64_t inner, int64_t block, int32_t format, void *stream) {
    (void)stream;
    const pyops_status status = check_quantize("decode", NULL, outer, n, inner, block, format, PYOPS_ROUND_EVEN,
                                               PYOPS_SCALE_FLOOR, 0);
    if (status) return status;
    const number_format f = number_formats[format];
    const int64_t blocks = block ? (n + block - 1) / block : 0, all = outer * n * inner;
    float values[TABLE];
    const int has_table = f.bits <= 8 && all > TABLE;
    if (has_table)
        for (uint32_t code = 0; code < TABLE; code++) values[code] = value_of(from_code(code, f), SCALE_ONE);
    /* pieces of a line of numbers that are contiguous: of all numbers without blocks, of a block, or of a row across blocks */
    const int64_t length = !block ? CHUNK : inner == 1 ? block : CHUNK, line = !block ? all : inner == 1 ? n : inner;
    const int64_t pieces = line ? (line + length - 1) / length : 0, lines = line ? all / line : 0;
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_EXPS)
    for (int64_t task = 0; task < lines * pieces; task++) {
        const int64_t at = task % pieces * length, row = task / pieces, i = row * line + at;
        const int64_t count = pyops_min(length, line - at);
        const int each = block && inner > 1;
        const uint8_t *of = !block ? NULL
            : each                 ? scales + (row / n * blocks + row % n / block) * inner + at
                                   : scales + row * blocks + at / block;
        decode_numbers(y + i, codes + i, of, each, count, f, has_table ? values : NULL);
        for (int64_t l = 0; factor && l < count; l++) y[i + l] /= factor[0];
    }
    return PYOPS_OK;
}

/* The largest |x|, as bits. */
static uint32_t amax_of(const float *x, int64_t n) {
    const pyops_kernels *k = pyops_active();
    uint32_t amax = 0;
    #pragma omp parallel for schedule(static) reduction(max : amax) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < n; i += CHUNK) {
        const uint32_t some = k->amax(x + i, pyops_min(CHUNK, n - i));
        amax = some > amax ? some : amax;
    }
    return amax;
}

pyops_status pyops_amax_factor(float *factor, const float *x, int64_t n, float target, void *stream) {
    (void)stream;
    const pyops_status status = check_target("amax_factor", n, target);
    if (status) return status;
    factor[0] = target_factor(amax_of(x, n), target);
    return PYOPS_OK;
}

pyops_status pyops_delayed_factor(float *factor, float *amax, const float *history, const float *x, int64_t n, int64_t length,
                                  float target, void *stream) {
    (void)stream;
    const pyops_status status = check_delayed(n, length, target);
    if (status) return status;
    factor[0] = delayed_factor(amax, amax_of(history, length), amax_of(x, n), target);
    return PYOPS_OK;
}

pyops_status pyops_advance_amax(float *history, float *amax, int64_t rows, int64_t length, void *stream) {
    (void)stream;
    const pyops_status status = check_advance(rows, length);
    if (status) return status;
    for (int64_t row = 0; row < rows; row++) advance_amax(history + row * length, amax + row, length);
    return PYOPS_OK;
}
