/* The micro-kernels of AMX for bfloat16 and float32, compiled with -mamx-tile -mamx-bf16 (see Makefile).  All other kernels are
 * the AVX-512 ones.
 *
 * A tile register has 16 x 16 sums, or 16 pairs of bfloat16 of 16 rows of a, or 16 rows of pairs of 16 columns of b.  One
 * instruction adds the product of two such tiles to sums.  It multiplies 32 x 32 sums: 4 registers of sums, 2 of a and 2 of b.
 * a is in tiles of 16 rows and 16 pairs, which are contiguous; b is in panels as for AVX512_BF16 or, for float32, in tiles.
 *
 * A float32 is the sum of three bfloat16, x = x1 + x2 + x3, since its 24 bits are three times 8.  Six of the nine products of
 * such parts are added: a1 b1, a1 b2, a2 b1, a2 b2, a1 b3, a3 b1.  The others are at most 2^-21 of |a b|, have any sign, and
 * change a sum less than its roundings do (Henry, Tang and Heinecke 2019, arXiv:1904.06376).  So a product has the errors of
 * float32 but takes six bfloat16 products, which AMX computes in 0.4 of the time of the multiply-adds of AVX-512.  AMX takes
 * subnormal factors and products for 0, so factors and products below 2^-102 lose bits.
 */
#include "../internal.h"
#if defined __x86_64__ && (defined __AMX_BF16__ || defined __AMXBF16__ || PYOPS_LOWERED)
#define ISA amx_bf16
#define VL 16
#define TILE_M 32
#define TILE_N 32
enum { PARTS_OF_FLOAT = 3, SPLIT_STEPS = 3 * PYOPS_SPLIT / 2 }; /* steps of PYOPS_SPLIT terms of a sum */
#include "amx.inc"
#include "bf16_pack.inc"

#if PYOPS_LOWERED
static void emulated_dpbf16ps(int c, int a, int b) {
    for (int m = 0; m < rows_of[c]; m++) {
        vec even = {0}, odd = {0};
        for (int k = 0; k < SIDE; k++) {
            const uint32_t pair = registers[a].words[m][k];
            const uints pairs = (uints)load(registers[b].sums[k]);
            even += pyops_from_bf16_bits(pair) * (vec)(pairs << 16);
            odd += pyops_from_bf16_bits(pair >> 16) * (vec)(pairs & 0xFFFF0000u);
        }
        store(registers[c].sums[m], load(registers[c].sums[m]) + (even + odd));
    }
}
#endif

/* Sums: registers 0 to 3; a: 4, 5; b: 6, 7.   down, across: whether the lower rows and the right columns are needed */
#define EACH_SUM(action, p, ld) \
    do { \
        TILE(action, 0, p, 4 * (ld)); \
        if (across) TILE(action, 1, (p) + SIDE, 4 * (ld)); \
        if (down) TILE(action, 2, (p) + SIDE * (ld), 4 * (ld)); \
        if (down && across) TILE(action, 3, (p) + SIDE * (ld) + SIDE, 4 * (ld)); \
    } while (0)
#define LOAD_A(p) \
    do { \
        TILE(loadd, 4, p, 4 * SIDE); \
        if (down) TILE(loadd, 5, (p) + below, 4 * SIDE); \
    } while (0)
#define LOAD_B(p, right, ld) \
    do { \
        TILE(loadd, 6, p, 4 * (ld)); \
        if (across) TILE(loadd, 7, (p) + (right), 4 * (ld)); \
    } while (0)
#define ADD_PRODUCTS() \
    do { \
        TILE(dpbf16ps, 0, 4, 6); \
        if (across) TILE(dpbf16ps, 1, 4, 7); \
        if (down) TILE(dpbf16ps, 2, 5, 6); \
        if (down && across) TILE(dpbf16ps, 3, 5, 7); \
    } while (0)

/* line: of the run */
typedef struct {
    pyops_lines of;
    int64_t line;
} stream;

INLINED void prefetch_lines(stream *s, int64_t n) {
    for (int64_t i = pyops_min(n, s->of.lines); i > 0; i--, s->of.lines--) {
        __builtin_prefetch(s->of.at, 0, 2);
        s->of.at += SIDE;
        if (++s->line == s->of.run) s->line = 0, s->of.at += s->of.far - s->of.run * SIDE;
    }
}

/* c (32,32) = start + the product of `steps` steps.   start: sums, ld_start apart: 0 for one row that all begin with; or NULL.
 * a: tiles of 16 rows, `below` apart.   split: the factors are parts of floats, tile after tile */
INLINED void tile_product(float *c, int64_t ldc, const float *start, int64_t ld_start, const float *a, int64_t below,
                          const float *b, int64_t steps, stream *ahead, const int down, const int across, const int split) {
    before_tiles_read(a), before_tiles_read(b), before_tiles_read(start);
    if (start) {
        EACH_SUM(loadd, start, ld_start);
    } else {
        TILE(zero, 0);
        TILE(zero, 1);
        TILE(zero, 2);
        TILE(zero, 3);
    }
    if (!split)
        for (int64_t k = 0; k < steps; k += SIDE) {
            LOAD_B(b + k * TILE_N, SIDE, TILE_N);
            LOAD_A(a + k * SIDE);
            ADD_PRODUCTS();
        }
    for (int64_t k = 0, row = 0; split && k < steps; k += SPLIT_STEPS) {
        /* the small products first; every step but the first loads one factor only */
#define PART_OF_A(i) LOAD_A(a + (k + (i) * SIDE) * SIDE)
#define PART_OF_B(i) LOAD_B(b + (k + (i) * SIDE) * TILE_N, SIDE * SIDE, SIDE)
        PART_OF_A(1);
        PART_OF_B(1);
        ADD_PRODUCTS();
        for (int64_t end = pyops_min(row + 4, TILE_M); row < end; row++) {
            __builtin_prefetch(c + row * ldc, 1);
            __builtin_prefetch(c + row * ldc + SIDE, 1);
        }
        PART_OF_B(0);
        ADD_PRODUCTS();
        prefetch_lines(ahead, 4);
        PART_OF_A(2);
        ADD_PRODUCTS();
        PART_OF_A(0);
        ADD_PRODUCTS();
        prefetch_lines(ahead + 1, 8);
        PART_OF_B(1);
        ADD_PRODUCTS();
        PART_OF_B(2);
        ADD_PRODUCTS();
#undef PART_OF_A
#undef PART_OF_B
    }
    EACH_SUM(stored, c, ldc);
}

static void copy_rows(float *to, int64_t ld_to, const float *from, int64_t ld_from, int64_t rows) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < TILE_N; j += VL) store(to + i * ld_to + j, load(from + i * ld_from + j));
}

static void begin_whole_tiles(void) { begin_tiles(SIDE); }

INLINED void gemm_of(const pyops_tile *t, const int across, const int split) {
    const int64_t unit = split ? SPLIT_STEPS : SIDE;
    const int64_t whole = t->K / unit * unit, rest = t->K - whole, below = pyops_round_up(t->K, unit) * SIDE;
    float sums[TILE_M * TILE_N] __attribute__((aligned(64)));
    stream ahead[2] = {{t->ahead[0], 0}, {t->ahead[1], 0}};
    for (int64_t i = 0; i < t->rows; i += TILE_M) {
        const int64_t rows = pyops_min(TILE_M, t->rows - i);
        const float *const a = t->a + i / SIDE * below, *start = t->bias;
        float *const c = t->c + i * t->ldc, *to = c;
        int64_t ld_start = 0, ld = t->ldc;
        if (t->before) start = t->before + i * t->ld_before, ld_start = t->ld_before;
        if (rows < TILE_M) { /* not all rows may be read or written */
            if (t->before) copy_rows(sums, TILE_N, start, ld_start, rows), start = sums, ld_start = TILE_N;
            to = sums, ld = TILE_N;
        } else if (!split) {
            for (int64_t r = 0; r < TILE_M; r++)
                for (int64_t j = 0; j < TILE_N; j += SIDE) __builtin_prefetch(c + r * ld + j, 1);
        }
        if (rows <= SIDE) tile_product(to, ld, start, ld_start, a, below, t->b, whole, ahead, 0, across, split);
        else tile_product(to, ld, start, ld_start, a, below, t->b, whole, ahead, 1, across, split);
        if (!split && rest) { /* what follows b in memory may be a NaN, so its product with 0 is not 0 */
            float b[SIDE * TILE_N] __attribute__((aligned(64))) = {0};
            pyops_copy(b, t->b + whole * TILE_N, rest * TILE_N);
            tile_product(to, ld, to, ld, a + whole * SIDE, below, b, SIDE, ahead, 1, across, split);
        }
        const int adds_bias = t->bias && t->before;
        if (to == c && !adds_bias && !t->relu) continue;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < (across ? TILE_N : SIDE); j += VL) {
                vec sum = load(to + r * ld + j);
                if (adds_bias) sum += load(t->bias + j);
                store(c + r * t->ldc + j, t->relu ? relu(sum) : sum);
            }
    }
}

static void gemm_amx(const pyops_tile *t) {
    if (t->is_half) gemm_of(t, 0, 0);
    else gemm_of(t, 1, 0);
}
static void gemm_split(const pyops_tile *t) {
    if (t->is_half) gemm_of(t, 0, 1);
    else gemm_of(t, 1, 1);
}

/* A packed a: for each 16 rows the tiles of 16 pairs along K, the last one filled with zeros. */
static void rows_of_tiles(float *dst, const float *src, int64_t step, int64_t n, int64_t kc) {
    const int64_t below = pyops_round_up((kc + 1) / 2, SIDE) * SIDE, whole = kc / (2 * SIDE) * 2 * SIDE;
    for (int64_t i = 0; i < n; i++) {
        const float *const from = src + i * step;
        float *const to = dst + i / SIDE * below + i % SIDE * SIDE;
        for (int64_t k = 0; k < whole; k += 2 * SIDE) {
            __builtin_prefetch(from + step + k);
            __builtin_prefetch(from + step + k + SIDE);
            store_pairs(to + k / 2 * SIDE, pairs_along(from + k));
        }
        if (whole < kc) {
            float last[2 * SIDE] = {0};
            pyops_copy(last, from + whole, kc - whole);
            store_pairs(to + whole / 2 * SIDE, pairs_along(last));
        }
    }
}

/* Rows whose columns are contiguous: 16 pairs of 16 rows at a time are transposed. */
static void columns_of_tiles(float *dst, const float *src, int64_t along, int64_t n, int64_t kc) {
    const int64_t steps = (kc + 1) / 2, below = pyops_round_up(steps, SIDE) * SIDE;
    for (int64_t k = 0; k < steps; k += SIDE)
        for (int64_t i = 0; i < n; i += SIDE) {
            const int64_t some = pyops_min(SIDE, steps - k);
            float pairs[SIDE * SIDE] __attribute__((aligned(64)));
            for (int64_t s = 0; s < some; s++) {
                const float *const even = src + 2 * (k + s) * along + i;
                const vec zeros = {0}, odd = 2 * (k + s) + 1 < kc ? load_some(even + along, n - i) : zeros;
                __builtin_prefetch(even + 2 * SIDE);
                __builtin_prefetch(even + along + 2 * SIDE);
                store_pairs(pairs + s * SIDE, pairs_of(load_some(even, n - i), odd));
            }
            float *const to = dst + i / SIDE * below + k * SIDE;
            if (some == SIDE) transpose_tile(to, pairs, SIDE, SIDE, SIDE, SIDE);
            else transpose_tile(to, pairs, some, SIDE, SIDE, SIDE);
        }
}

/* Rows with any strides. */
static void any_tiles(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc) {
    const int64_t steps = (kc + 1) / 2, below = pyops_round_up(steps, SIDE) * SIDE;
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < below / SIDE; k++) {
            const float *const even = src + i * step + 2 * k * along;
            ((pair *)dst)[i / SIDE * below + k / SIDE * SIDE * SIDE + i % SIDE * SIDE + k % SIDE] = k < steps
                ? one_pair(even[0], 2 * k + 1 < kc ? even[along] : 0.0f)
                : 0;
        }
}

static void pack_a_amx(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc) {
    if (along == 1) rows_of_tiles(dst, src, step, n, kc);
    else if (step == 1) columns_of_tiles(dst, src, along, n, kc);
    else any_tiles(dst, src, step, along, n, kc);
}

/* ---- float32: the parts of 16 rows and 32 columns at a time, in a tile each.  Pair i has the terms i and 16 + i of a sum. ---- */
static inline vec upper_half(vec x) { return (vec)((uints)x & 0xFFFF0000u); }

/* The parts of a float.  The first one is cut off, so that it cannot become infinite; the second one is rounded to nearest, so
 * that the third one has any sign.  An infinity is 1, 0, infinity: its last part is multiplied by the first part of the other
 * factor alone, so its product is not a NaN, as infinity times a part that is 0 would be. */
typedef struct { vec first, second, third; } parts_of_float;

static inline parts_of_float parts_of(vec x) {
    const vec cut = upper_half(x);
#if VL == 16 && defined __AVX512F__
    enum { INFINITIES = 0x18 };
    const __mmask16 infinite = _mm512_fpclass_ps_mask((__m512)x, INFINITIES), finite = _knot_mask16(infinite);
    const __m512i one = _mm512_set1_epi32((int)0xBFFF0000u); /* the bits of an infinity without one: 1 */
    const vec first = (vec)_mm512_mask_and_epi32((__m512i)cut, infinite, (__m512i)x, one);
    const vec rest = (vec)_mm512_maskz_sub_ps(finite, (__m512)x, (__m512)cut);
    const vec second = upper_half((vec)((uints)rest + 0x8000u));
    return (parts_of_float){first, second, (vec)_mm512_mask_sub_ps((__m512)x, finite, (__m512)rest, (__m512)second)};
#else
    const uints infinite = (uints)(((uints)x & 0x7FFFFFFFu) == 0x7F800000u);
    const vec rest = (vec)((uints)(x - cut) & ~infinite), second = upper_half((vec)((uints)rest + 0x8000u));
    return (parts_of_float){(vec)((uints)cut & ~(infinite & 0x40000000u)), second,
                            (vec)(((uints)(rest - second) & ~infinite) | ((uints)x & infinite))};
#endif
}

static inline void store_part(float *to, vec low, vec high) { store_pairs(to, ((uints)high & 0xFFFF0000u) | (uints)low >> 16); }

static inline void store_parts(float *to, int64_t step, vec low, vec high) {
    const parts_of_float l = parts_of(low), h = parts_of(high);
    store_part(to, l.first, h.first);
    store_part(to + step, l.second, h.second);
    store_part(to + 2 * step, l.third, h.third);
}

static inline void prefetch_ahead(const float *p) { __builtin_prefetch(p + 2 * PYOPS_SPLIT); }

/* The numbers of a pair of tiles: 16 rows of 16 lanes each, strides row and lane, `next` floats apart. */
typedef struct { int64_t row, lane, next; } numbers;

/* The parts of two tiles, zeros beyond `rows` and `lanes` of each.   step: from one part to the next */
static void split_tiles(float *to, int64_t step, const float *src, numbers at, const int64_t rows[2], const int64_t lanes[2]) {
    const int is_whole = rows[0] >= SIDE && rows[1] >= SIDE && lanes[0] >= SIDE && lanes[1] >= SIDE;
    if (is_whole && at.lane == 1) {
        for (int64_t r = 0; r < SIDE; r++, src += at.row) {
            prefetch_ahead(src), prefetch_ahead(src + at.next);
            store_parts(to + r * SIDE, step, load(src), load(src + at.next));
        }
        return;
    }
    float block[2][SIDE * SIDE] __attribute__((aligned(64)));
    for (int64_t half = 0; half < 2; half++, src += at.next) {
        if (at.row == 1 && rows[half] > 0) {
            float columns[SIDE * SIDE] __attribute__((aligned(64)));
            const int is_here = rows[half] >= SIDE;
            for (int64_t l = 0; l < pyops_min(SIDE, lanes[half]); l++) prefetch_ahead(src + l * at.lane);
            for (int64_t l = 0; !is_here && l < pyops_min(SIDE, lanes[half]); l++)
                store(columns + l * SIDE, load_some(src + l * at.lane, rows[half]));
            transpose_tile(block[half], is_here ? src : columns, lanes[half], SIDE, is_here ? at.lane : SIDE, SIDE);
            continue;
        }
        for (int64_t r = 0; r < SIDE; r++) {
            float *const to_r = block[half] + r * SIDE;
            if (at.lane == 1) {
                store(to_r, r < rows[half] ? load_some(src + r * at.row, lanes[half]) : (vec){0});
                continue;
            }
            for (int64_t l = 0; l < SIDE; l++)
                to_r[l] = r < rows[half] && l < lanes[half] ? src[r * at.row + l * at.lane] : 0.0f;
        }
    }
    for (int64_t r = 0; r < SIDE; r++) store_parts(to + r * SIDE, step, load(block[0] + r * SIDE), load(block[1] + r * SIDE));
}

/* A packed a: for each 16 rows, then each 32 terms, a tile of each part.  Whole rows are read one by one. */
static void pack_a_split(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc) {
    enum { TILES = PARTS_OF_FLOAT * SIDE * SIDE };
    const numbers at = {step, along, SIDE * along};
    const int64_t units = (kc + PYOPS_SPLIT - 1) / PYOPS_SPLIT, by_row = along == 1 ? kc / PYOPS_SPLIT : 0;
    for (int64_t i = 0; i < n; i += SIDE, dst += units * TILES) {
        const int64_t rows = by_row ? pyops_min(SIDE, n - i) : 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t u = 0; u < by_row; u++) {
                const float *const from = src + (i + r) * step + u * PYOPS_SPLIT;
                store_parts(dst + u * TILES + r * SIDE, SIDE * SIDE, load(from), load(from + SIDE));
            }
        for (int64_t u = by_row; u < units; u++) {
            const int64_t k = u * PYOPS_SPLIT;
            split_tiles(dst + u * TILES, SIDE * SIDE, src + i * step + k * along, at, (int64_t[]){n - i, n - i},
                        (int64_t[]){kc - k, kc - k - SIDE});
        }
    }
}

/* A packed b: for each 32 columns, then each 32 terms, two tiles of each part. */
static void pack_b_split(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc) {
    const numbers at = {along, step, SIDE * along};
    for (int64_t j = 0; j < n; j += TILE_N)
        for (int64_t k = 0; k < kc; k += PYOPS_SPLIT, dst += PARTS_OF_FLOAT * SIDE * TILE_N)
            for (int64_t right = 0; right < TILE_N; right += SIDE) {
                const int64_t columns = n - j - right;
                split_tiles(dst + right * SIDE, SIDE * TILE_N, src + (j + right) * step + k * along, at,
                            (int64_t[]){kc - k, kc - k - SIDE}, (int64_t[]){columns, columns});
            }
}

#define OF_TILES .a_step = 1, .a_in_rows = 1, .MR = 4 * TILE_M, .MC = 4 * TILE_M, .begin = begin_whole_tiles, .end = end_tiles
const pyops_micro_kernel CAT(pyops_float32, ISA) = {
    STR(ISA), .is_split = 1, OF_TILES, .gemm = gemm_split, .pack_a = pack_a_split, .pack_b = pack_b_split,
};

const pyops_micro_kernel CAT(pyops_bf16, ISA) = {
    STR(ISA), .is_bf16 = 1, OF_TILES, .gemm = gemm_amx, .pack_a = pack_a_amx, .pack_b = pack_b_bf16,
};
#else
const pyops_micro_kernel pyops_bf16_amx_bf16 = {0}, pyops_float32_amx_bf16 = {0}; /* this compiler has no AMX: never used */
#endif
