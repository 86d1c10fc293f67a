/* Products in int8 with AMX, compiled with -mamx-tile -mamx-int8 (see Makefile).  The AVX-512 table supplies all other kernels.
 *
 * A tile register has 16 x 16 sums, or 64 bytes of 16 rows of x, or 16 quads of 16 columns of a group (see int8_body.inc), whose
 * rows are 4 * PYOPS_GROUP bytes apart.  One instruction adds the product of two such tiles to sums: 16,384 multiplications,
 * where VNNI has 64.
 */
#include "../internal.h"
#if defined __x86_64__ && (defined __AMX_INT8__ || defined __AMXINT8__ || PYOPS_LOWERED)
#define VL 16
#define INT8_UNSIGNED /* x has unsigned bytes, also for the few rows without AMX in the emulation */
#include "amx.inc"
#include "int8_body.inc"

#if PYOPS_LOWERED
static void emulated_dpbusd(int c, int a, int b) {
    for (int m = 0; m < rows_of[c]; m++)
        for (int n = 0; n < SIDE; n++)
            for (int k = 0; k < 4 * SIDE; k++)
                registers[c].integers[m][n] += registers[a].bytes[m][k] * (int8_t)registers[b].bytes[k / 4][4 * n + k % 4];
}
#endif

enum { LINE = 4 * PYOPS_GROUP }; /* bytes of a group per quad */

/* Two tiles of rows by two of columns: sums 0 to 3, x 4 and 5, weights 6 and 7. */
static void square(int32_t *sums, const uint8_t *x, int64_t ldx, const int8_t *panel, const int32_t *start, int64_t quads) {
    before_tiles_read(x), before_tiles_read(start);
    TILE(loadd, 0, start, 0);
    TILE(loadd, 1, start + SIDE, 0);
    TILE(loadd, 2, start, 0);
    TILE(loadd, 3, start + SIDE, 0);
    for (int64_t k = 0; k < quads; k += SIDE) {
        TILE(loadd, 6, panel + k * LINE, LINE);
        TILE(loadd, 4, x + 4 * k, ldx);
        TILE(loadd, 7, panel + k * LINE + 4 * SIDE, LINE);
        TILE(loadd, 5, x + SIDE * ldx + 4 * k, ldx);
        TILE(dpbusd, 0, 4, 6);
        TILE(dpbusd, 1, 4, 7);
        TILE(dpbusd, 2, 5, 6);
        TILE(dpbusd, 3, 5, 7);
    }
    TILE(stored, 0, sums, LINE);
    TILE(stored, 1, sums + SIDE, LINE);
    TILE(stored, 2, sums + SIDE * PYOPS_GROUP, LINE);
    TILE(stored, 3, sums + SIDE * PYOPS_GROUP + SIDE, LINE);
}

/* One tile of rows by all columns: sums 0 to 3, x 4, weights 6 and 7.   start: PYOPS_GROUP apart for each row, or 0 */
static void strip(int32_t *sums, const uint8_t *x, int64_t ldx, const int8_t *panel, const int32_t *start, int64_t ld_start,
                  int64_t quads) {
    before_tiles_read(x), before_tiles_read(panel), before_tiles_read(start);
    TILE(loadd, 0, start, 4 * ld_start);
    TILE(loadd, 1, start + SIDE, 4 * ld_start);
    TILE(loadd, 2, start + 2 * SIDE, 4 * ld_start);
    TILE(loadd, 3, start + 3 * SIDE, 4 * ld_start);
    for (int64_t k = 0; k < quads; k += SIDE) {
        TILE(loadd, 4, x + 4 * k, ldx);
        TILE(loadd, 6, panel + k * LINE, LINE);
        TILE(dpbusd, 0, 4, 6);
        TILE(loadd, 7, panel + k * LINE + 4 * SIDE, LINE);
        TILE(dpbusd, 1, 4, 7);
        TILE(loadd, 6, panel + k * LINE + 8 * SIDE, LINE);
        TILE(dpbusd, 2, 4, 6);
        TILE(loadd, 7, panel + k * LINE + 12 * SIDE, LINE);
        TILE(dpbusd, 3, 4, 7);
    }
    TILE(stored, 0, sums, LINE);
    TILE(stored, 1, sums + SIDE, LINE);
    TILE(stored, 2, sums + 2 * SIDE, LINE);
    TILE(stored, 3, sums + 3 * SIDE, LINE);
}

/* sums += the products of the last quads, fewer than a tile has */
static void last_quads(int32_t *sums, const uint8_t *x, int64_t ldx, const int8_t *panel, int64_t rows, int64_t quads) {
    uint8_t some_x[SIDE * 4 * SIDE] = {0};
    int8_t some_weights[SIDE * LINE] = {0};
    for (int64_t r = 0; r < rows; r++) memcpy(some_x + r * 4 * SIDE, x + r * ldx, (size_t)(4 * quads));
    memcpy(some_weights, panel, (size_t)(quads * LINE));
    strip(sums, some_x, 4 * SIDE, some_weights, sums, PYOPS_GROUP, SIDE);
}

static void amx_int8_group(float *restrict y, const uint8_t *restrict x, int64_t ldx, const float *restrict x_scales,
                           const pyops_int8_group *w, int64_t R, int64_t quads, int64_t ldy, int flags) {
    enum { FEW = 2 }; /* rows that take longer with AMX */
    const int64_t whole = quads / SIDE * SIDE;
    int32_t sums[2 * SIDE * PYOPS_GROUP] __attribute__((aligned(64)));
    int64_t configured = 0;
    for (int64_t rows; R > FEW; R -= rows) {
        rows = R >= 2 * SIDE ? 2 * SIDE : pyops_min(R, SIDE);
        if (pyops_min(rows, SIDE) != configured) begin_tiles(configured = pyops_min(rows, SIDE));
        if (rows > SIDE)
            for (int n = 0; n < PYOPS_GROUP; n += 2 * SIDE) square(sums + n, x, ldx, w->panel + 4 * n, w->start + n, whole);
        else strip(sums, x, ldx, w->panel, w->start, 0, whole);
        for (int64_t r = 0; r < rows && whole < quads; r += SIDE)
            last_quads(sums + r * PYOPS_GROUP, x + r * ldx + 4 * whole, ldx, w->panel + whole * LINE, pyops_min(SIDE, rows - r),
                       quads - whole);
        finish_rows(y, sums, x_scales, w, rows, ldy, flags);
        x += rows * ldx, x_scales += rows, y += rows * ldy;
    }
    if (configured) end_tiles();
    if (R) row_int8_group(y, x, ldx, x_scales, w, R, quads, ldy, flags);
}
pyops_int8_kernel *const pyops_int8_amx_int8 = amx_int8_group;
#else
pyops_int8_kernel *const pyops_int8_amx_int8 = NULL;        /* this compiler has no AMX */
#endif
