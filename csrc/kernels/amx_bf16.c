/* The bfloat16 micro-kernel of AMX, compiled with -mamx-tile -mamx-bf16 (see Makefile).  Tests run it on an emulation of its
 * instructions in C, in the library whose AVX-512 code is lowered to AVX2; it has not run on a CPU with AMX yet.  All other
 * kernels are the AVX-512 ones.
 *
 * A tile register has 16 rows of 64 bytes: 16 x 16 sums, or 16 pairs of bfloat16 of 16 rows of a, or 16 rows of pairs of 16
 * columns of b.  One instruction adds the product of two such tiles to sums.  The result is 32 x 32: 4 registers of sums, 2
 * of a and 2 of b.  b is in panels as for AVX512_BF16, a always in rows.
 */
#include "../internal.h"
#if (defined __x86_64__ || defined __i386__) && (defined __AMX_BF16__ || defined __AMXBF16__ || PYOPS_LOWERED)
#define ISA amx_bf16
#define VL 16
#define TILE_M 32
#define TILE_N 32
#include "bf16_pack.inc"

enum { SIDE = 16 };         /* rows of a tile register, and its 32-bit columns */

#if PYOPS_LOWERED
/* The instructions, as Intel's manual defines them, for tiles of 16 rows of 64 bytes. */
static _Thread_local union {
    float sums[SIDE][SIDE];
    uint32_t pairs[SIDE][SIDE];
} registers[8];
static _Thread_local int is_configured;

#define TILE(name, ...) emulated_##name(__VA_ARGS__)
static void emulated_loadconfig(const void *config) {
    const uint8_t *const bytes = config;
    is_configured = bytes[0] == 1;
    for (int i = 0; i < 8; i++) is_configured &= bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == SIDE;
    memset(registers, 0, sizeof registers);
}
static void emulated_release(void) { is_configured = 0; }
static void emulated_zero(int i) { memset(registers + i, is_configured ? 0 : 0xFF, sizeof *registers); }
static void emulated_loadd(int i, const void *from, int64_t stride) {
    for (int r = 0; r < SIDE; r++) memcpy(registers[i].pairs[r], (const char *)from + r * stride, 64);
}
static void emulated_stored(int i, void *to, int64_t stride) {
    for (int r = 0; r < SIDE; r++) memcpy((char *)to + r * stride, registers[i].pairs[r], 64);
}
static float half_of(uint32_t pair, int odd) {
    const uint32_t bits = odd ? pair & 0xFFFF0000u : pair << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static void emulated_dpbf16ps(int c, int a, int b) {
    for (int m = 0; m < SIDE; m++)
        for (int n = 0; n < SIDE; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < SIDE; k++) {
                even += half_of(registers[a].pairs[m][k], 0) * half_of(registers[b].pairs[k][n], 0);
                odd += half_of(registers[a].pairs[m][k], 1) * half_of(registers[b].pairs[k][n], 1);
            }
            registers[c].sums[m][n] += even + odd;
        }
}
#else
#define TILE(name, ...) _tile_##name(__VA_ARGS__)
#endif

/* Sums: registers 0 to 3; a: 4, 5; b: 6, 7. */
#define MULTIPLY(a, a_stride, b) \
    do { \
        TILE(loadd, 6, b, 4 * TILE_N); \
        TILE(loadd, 7, (b) + SIDE, 4 * TILE_N); \
        TILE(loadd, 4, a, a_stride); \
        TILE(dpbf16ps, 0, 4, 6); \
        TILE(dpbf16ps, 1, 4, 7); \
        if (is_tall) { \
            TILE(loadd, 5, (const char *)(a) + SIDE * (a_stride), a_stride); \
            TILE(dpbf16ps, 2, 5, 6); \
            TILE(dpbf16ps, 3, 5, 7); \
        } \
    } while (0)

static void gemm_amx(const pyops_tile *t) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};
    float sums[TILE_M * TILE_N] __attribute__((aligned(64)));
    const int64_t stride = 4 * t->a_row, whole = t->K / SIDE * SIDE, rest = t->K - whole;
    const int is_tall = t->rows > SIDE;
    TILE(loadconfig, &config);
    TILE(zero, 0);
    TILE(zero, 1);
    TILE(zero, 2);
    TILE(zero, 3);
    for (int64_t k = 0; k < whole; k += SIDE) MULTIPLY(t->a + k, stride, t->b + k * TILE_N);
    if (rest) {             /* what follows in memory may be a NaN, so its product with 0 is not 0 */
        float a[TILE_M * SIDE] = {0}, b[SIDE * TILE_N] = {0};
        for (int64_t i = 0; i < t->rows; i++) pyops_copy(a + i * SIDE, t->a + i * t->a_row + whole, rest);
        pyops_copy(b, t->b + whole * TILE_N, rest * TILE_N);
        MULTIPLY(a, 4 * SIDE, b);
    }
    TILE(stored, 0, sums, 4 * TILE_N);
    TILE(stored, 1, sums + SIDE, 4 * TILE_N);
    TILE(stored, 2, sums + SIDE * TILE_N, 4 * TILE_N);
    TILE(stored, 3, sums + SIDE * TILE_N + SIDE, 4 * TILE_N);
    TILE(release);
    for (int64_t i = 0; i < t->rows; i++)
        for (int64_t j = 0; j < TILE_N; j += VL) {
            vec sum = load(sums + i * TILE_N + j);
            if (t->bias) sum += load(t->bias + j);
            if (t->before) sum += load(t->before + i * t->ld_before + j);
            store(t->c + i * t->ldc + j, t->relu ? relu(sum) : sum);
        }
}

/* Rows of A whose columns are contiguous: 16 pairs of 16 rows at a time are transposed.  Writes whole tiles of rows. */
static void transposed_rows(float *dst, const float *src, int64_t along, int64_t n, int64_t kc) {
    const int64_t steps = (kc + 1) / 2;
    float pairs[SIDE * SIDE];
    for (int64_t i = 0; i < n; i += SIDE)
        for (int64_t k = 0; k < steps; k += SIDE) {
            const int64_t some = pyops_min(SIDE, steps - k), rows = pyops_min(SIDE, n - i);
            for (int64_t s = 0; s < some; s++) {
                const float *const even = src + 2 * (k + s) * along + i;
                const vec zeros = {0}, odd = 2 * (k + s) + 1 < kc ? load_some(even + along, n - i) : zeros;
                store_pairs(pairs + s * SIDE, pairs_of(load_some(even, n - i), odd));
            }
            float turned[SIDE * SIDE];
            transpose_tile(turned, pairs, some, SIDE, SIDE, SIDE);
            for (int64_t r = 0; r < rows; r++) pyops_copy(dst + (i + r) * steps + k, turned + r * SIDE, some);
        }
}

static void pack_a_amx(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc) {
    const int64_t steps = (kc + 1) / 2;
    if (along != 1 && step == 1) transposed_rows(dst, src, along, n, kc);
    else if (along == 1)
        for (int64_t i = 0; i < n; i++) pair_row(dst + i * steps, src + i * step, kc);
    else
        for (int64_t i = 0; i < n; i++) pair_any(dst + i * steps, src + i * step, step, along, 1, kc, 1);
}

const pyops_micro_kernel CAT(pyops_bf16, ISA) = {
    STR(ISA),         .is_bf16 = 1,     .a_step = 1,          .a_in_rows = 1,        .MR = TILE_M,
    .MC = 4 * TILE_M, .gemm = gemm_amx, .pack_a = pack_a_amx, .pack_b = pack_b_bf16,
};
#else
const pyops_micro_kernel pyops_bf16_amx_bf16 = {0};         /* this compiler has no AMX: never used */
#endif
