/* The bfloat16 micro-kernel of AMX, compiled with -mamx-tile -mamx-bf16 (see Makefile).  All other kernels are the AVX-512 ones.
 *
 * A tile register has 16 x 16 sums, or 16 pairs of bfloat16 of 16 rows of a, or 16 rows of pairs of 16 columns of b.  One
 * instruction adds the product of two such tiles to sums.  It multiplies 32 x 32 sums: 4 registers of sums, 2 of a and 2 of b.
 * b is in panels as for AVX512_BF16; a is in tiles of 16 rows and 16 pairs, which are contiguous.
 */
#include "../internal.h"
#if defined __x86_64__ && (defined __AMX_BF16__ || defined __AMXBF16__ || PYOPS_LOWERED)
#define ISA amx_bf16
#define VL 16
#define TILE_M 32
#define TILE_N 32
#include "amx.inc"
#include "bf16_pack.inc"

#if PYOPS_LOWERED
static float half_of(uint32_t pair, int odd) {
    const uint32_t bits = odd ? pair & 0xFFFF0000u : pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static void emulated_dpbf16ps(int c, int a, int b) {
    for (int m = 0; m < rows_of[c]; m++)
        for (int n = 0; n < SIDE; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < SIDE; k++) {
                even += half_of(registers[a].words[m][k], 0) * half_of(registers[b].words[k][n], 0);
                odd += half_of(registers[a].words[m][k], 1) * half_of(registers[b].words[k][n], 1);
            }
            registers[c].sums[m][n] += even + odd;
        }
}
#endif

/* Sums: registers 0 to 3; a: 4, 5; b: 6, 7. */
#define EACH_SUM(action, p, ld) \
    do { \
        TILE(action, 0, p, 4 * (ld)); \
        TILE(action, 1, (p) + SIDE, 4 * (ld)); \
        TILE(action, 2, (p) + SIDE * (ld), 4 * (ld)); \
        TILE(action, 3, (p) + SIDE * (ld) + SIDE, 4 * (ld)); \
    } while (0)

/* c (32,32) = start + the product of `steps` steps.   start: sums, ld_start apart: 0 for one row that all begin with; or NULL.
 * a: tiles of 16 rows, `below` apart */
static inline void tile_product(float *c, int64_t ldc, const float *start, int64_t ld_start, const float *a, int64_t below,
                                const float *b, int64_t steps) {
    before_tiles_read(a), before_tiles_read(b), before_tiles_read(start);
    if (start) {
        EACH_SUM(loadd, start, ld_start);
    } else {
        TILE(zero, 0);
        TILE(zero, 1);
        TILE(zero, 2);
        TILE(zero, 3);
    }
    for (int64_t k = 0; k < steps; k += SIDE) {
        TILE(loadd, 6, b + k * TILE_N, 4 * TILE_N);
        TILE(loadd, 4, a + k * SIDE, 4 * SIDE);
        TILE(loadd, 7, b + k * TILE_N + SIDE, 4 * TILE_N);
        TILE(loadd, 5, a + below + k * SIDE, 4 * SIDE);
        TILE(dpbf16ps, 0, 4, 6);
        TILE(dpbf16ps, 1, 4, 7);
        TILE(dpbf16ps, 2, 5, 6);
        TILE(dpbf16ps, 3, 5, 7);
    }
    EACH_SUM(stored, c, ldc);
}

static void copy_rows(float *to, int64_t ld_to, const float *from, int64_t ld_from, int64_t rows) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < TILE_N; j += VL) store(to + i * ld_to + j, load(from + i * ld_from + j));
}

static void begin_whole_tiles(void) { begin_tiles(SIDE); }

static void gemm_amx(const pyops_tile *t) {
    const int64_t whole = t->K / SIDE * SIDE, rest = t->K - whole, below = pyops_round_up(t->K, SIDE) * SIDE;
    float sums[TILE_M * TILE_N] __attribute__((aligned(64)));
    for (int64_t i = 0; i < t->rows; i += TILE_M) {
        const int64_t rows = pyops_min(TILE_M, t->rows - i);
        const float *const a = t->a + i / SIDE * below, *start = t->bias;
        float *const c = t->c + i * t->ldc, *to = c;
        int64_t ld_start = 0, ld = t->ldc;
        if (t->before) start = t->before + i * t->ld_before, ld_start = t->ld_before;
        if (rows < TILE_M) { /* not all rows may be read or written */
            if (t->before) copy_rows(sums, TILE_N, start, ld_start, rows), start = sums, ld_start = TILE_N;
            to = sums, ld = TILE_N;
        } else {
            for (int64_t r = 0; r < TILE_M; r++)
                for (int64_t j = 0; j < TILE_N; j += SIDE) __builtin_prefetch(c + r * ld + j, 1);
        }
        tile_product(to, ld, start, ld_start, a, below, t->b, whole);
        if (rest) { /* what follows b in memory may be a NaN, so its product with 0 is not 0 */
            float b[SIDE * TILE_N] __attribute__((aligned(64))) = {0};
            pyops_copy(b, t->b + whole * TILE_N, rest * TILE_N);
            tile_product(to, ld, to, ld, a + whole * SIDE, below, b, SIDE);
        }
        const int adds_bias = t->bias && t->before;
        if (to == c && !adds_bias && !t->relu) continue;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < TILE_N; j += VL) {
                vec sum = load(to + r * ld + j);
                if (adds_bias) sum += load(t->bias + j);
                store(c + r * t->ldc + j, t->relu ? relu(sum) : sum);
            }
    }
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

const pyops_micro_kernel CAT(pyops_bf16, ISA) = {
    STR(ISA),
    .is_bf16 = 1,
    .a_step = 1,
    .a_in_rows = 1,
    .MR = 4 * TILE_M,
    .MC = 4 * TILE_M,
    .begin = begin_whole_tiles,
    .end = end_tiles,
    .gemm = gemm_amx,
    .pack_a = pack_a_amx,
    .pack_b = pack_b_bf16,
};
#else
const pyops_micro_kernel pyops_bf16_amx_bf16 = {0};         /* this compiler has no AMX: never used */
#endif
