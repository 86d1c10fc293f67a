/* compact.c - weights of linear layers in int8, bfloat16 or packed float32, for inference: packing, products, embeddings.
 *
 * A layer is packed once.  INT8: groups of PYOPS_GROUP rows (kernels/int8_body.inc), which a product with one row of x reads
 * from beginning to end, then for each row the start of its sums, its scale and its bias.  BF16 and FLOAT32: for each
 * PYOPS_COMPACT_COLUMNS rows the packed operand of gemm.c, then the biases; FLOAT32 ends with the layout of the operand.
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"

enum { GROUP = PYOPS_GROUP, CHUNK = PYOPS_COMPACT_COLUMNS };
_Static_assert(CHUNK % GROUP == 0, "a chunk of columns must be whole groups");
static const float LEAST = 1e-30f;      /* smaller rows become 0: the factor 127 / LEAST is finite */

typedef struct { int64_t start, scales, bias, is_split, total; } layout;    /* panels come first */

/* The table of a format, whatever the precision is. */
static const pyops_kernels *table_of(int64_t O, int64_t I, int32_t format) {
    if (format == PYOPS_COMPACT_INT8) return pyops_active();
    return format == PYOPS_COMPACT_BF16 ? pyops_in_bf16() : pyops_for_product(pyops_in_float32(), O, I);
}

/* Floats of I numbers of a packed row. */
static int64_t steps_of(const pyops_kernels *k, int64_t I, int32_t format) {
    return format == PYOPS_COMPACT_INT8 ? (I + 7) / 8 * 2 : pyops_steps(k, I);
}

static layout lay_out(int64_t O, int64_t I, int32_t format) {
    const int is_int8 = format == PYOPS_COMPACT_INT8;
    const pyops_kernels *const k = table_of(O, I, format);
    const int64_t rows = pyops_round_up(O, is_int8 ? GROUP : k->NR);
    layout l = {.start = steps_of(k, I, format) * rows};
    l.scales = l.start + (is_int8 ? rows : 0);
    l.bias = l.scales + (is_int8 ? rows : 0);
    l.is_split = l.bias + rows;
    l.total = l.is_split + (format == PYOPS_COMPACT_FLOAT32);
    return l;
}

pyops_status pyops_compact_check(const char *who, int64_t R, int64_t O, int64_t I, int32_t format) {
    PYOPS_REQUIRE(format >= PYOPS_COMPACT_INT8 && format <= PYOPS_COMPACT_FLOAT32,
                  "%s: format=%d, expected 0 (int8), 1 (bf16) or 2 (float32)", who, format);
    PYOPS_REQUIRE(R >= 0 && O >= 1 && I >= 1, "%s: R=%lld O=%lld I=%lld, expected R of at least 0, O and I of at least 1", who,
                  LL(R), LL(O), LL(I));
    PYOPS_REQUIRE(format != PYOPS_COMPACT_INT8 || I <= PYOPS_LONGEST_INT8, "%s: I=%lld, expected at most %d in int8", who,
                  LL(I), PYOPS_LONGEST_INT8);
    return PYOPS_OK;
}

pyops_status pyops_compact_check_layout(const char *who, const float *compact, int64_t O, int64_t I, int32_t format) {
    PYOPS_REQUIRE(format != PYOPS_COMPACT_FLOAT32 ||
                      compact[lay_out(O, I, format).is_split] == (float)table_of(O, I, format)->micro.is_split,
                  "%s: the weight was packed before set_exact changed its layout, expected a weight packed after it", who);
    return PYOPS_OK;
}

/* Round n numbers to bytes, padded to n_padded.  Return their scale. */
static float round_row(const pyops_kernels *k, uint8_t *y, const float *x, int64_t n, int64_t n_padded) {
    const uint32_t bits = k->amax(x, n);
    float most;
    memcpy(&most, &bits, sizeof most);
    const int fits = most >= LEAST && most <= FLT_MAX;
    const int64_t rounded = fits ? n : 0;
    memset(y + rounded, PYOPS_BYTE_ZERO, (size_t)(n_padded - rounded));
    if (!fits) return most < LEAST ? 0.0f : NAN;
    k->to_bytes(y, x, 127.0f / most, n);
    return most / 127.0f;
}

/* ---- packing ---- */
int64_t pyops_compact_weight_work(int64_t O, int64_t I, int32_t format) { return lay_out(O, I, format).total; }

static void pack_group(const pyops_kernels *k, float *compact, const layout *l, const float *weight, int64_t first, int64_t O,
                       int64_t I, uint8_t *row) {
    const int64_t quads = steps_of(k, I, PYOPS_COMPACT_INT8);
    int8_t *const panel = (int8_t *)(compact + first * quads);
    int32_t *const start = (int32_t *)(compact + l->start);
    for (int64_t j = 0; j < GROUP; j++) {
        const int64_t o = first + j;
        int32_t sum = 0;
        if (o < O) compact[l->scales + o] = round_row(k, row, weight + o * I, I, 4 * quads);
        else compact[l->scales + o] = 0.0f, memset(row, PYOPS_BYTE_ZERO, (size_t)(4 * quads));
        for (int64_t i = 0; i < 4 * quads; i++) {
            const int32_t q = row[i] - PYOPS_BYTE_ZERO;
            sum += q;
            panel[(i / 4 * GROUP + j) * 4 + i % 4] = (int8_t)(q ^ k->flip);
        }
        start[o] = -PYOPS_BYTE_ZERO * sum;
    }
}

pyops_status pyops_compact_weight(float *compact, const float *weight, const float *bias, int64_t O, int64_t I, int32_t format,
                                  void *stream) {
    (void)stream;
    const pyops_status status = pyops_compact_check("compact_weight", 0, O, I, format);
    if (status) return status;
    const layout l = lay_out(O, I, format);
    const pyops_kernels *const k = table_of(O, I, format);
    const int64_t steps = steps_of(k, I, format), rows = l.is_split - l.bias;
    if (format == PYOPS_COMPACT_FLOAT32) compact[l.is_split] = (float)k->micro.is_split;
    for (int64_t o = 0; o < rows; o++) compact[l.bias + o] = bias && o < O ? bias[o] : 0.0f;
    int failed = 0;
    if (format == PYOPS_COMPACT_INT8) {
        #pragma omp parallel if (O * I > PYOPS_SHARE_FLOATS)
        {
            float *row = pyops_scratch_or_fail((size_t)steps, &failed);
            #pragma omp for schedule(static)
            for (int64_t o = 0; o < O; o += GROUP)
                if (row) pack_group(k, compact, &l, weight, o, O, I, (uint8_t *)row);
        }
        return failed ? pyops_fail(PYOPS_NO_MEMORY, "compact_weight: no memory for a row of %lld bytes", LL(4 * steps))
                      : PYOPS_OK;
    }
    #pragma omp parallel for schedule(static) if (O * I > PYOPS_SHARE_FLOATS)
    for (int64_t o = 0; o < O; o += CHUNK) {
        const int64_t n = pyops_min(CHUNK, O - o);
        pyops_pack_b(k, compact + o * steps, (pyops_view){weight + o * I, 1, I}, I, n, 0, n);
    }
    return PYOPS_OK;
}

/* ---- products ---- */
/* Floats of a rounded row. */
static int64_t row_floats(int64_t I) {
    return pyops_active()->int8_size(steps_of(NULL, I, PYOPS_COMPACT_INT8)) / (int64_t)sizeof(float);
}

int64_t pyops_compact_rows(int64_t R, int64_t I, int32_t format) {
    return format == PYOPS_COMPACT_INT8 ? R * row_floats(I) + R : 0;
}

pyops_compact pyops_compact_call(const float *compact, const float *x, float *work, int64_t R, int64_t O, int64_t I,
                                 int32_t format) {
    const int64_t row = format == PYOPS_COMPACT_INT8 ? row_floats(I) : 0;
    const pyops_kernels *const k = table_of(O, I, format);
    return (pyops_compact){.k = k,
                           .O = O,
                           .I = I,
                           .steps = steps_of(k, I, format),
                           .row = 4 * row,
                           .format = format,
                           .compact = compact,
                           .x = x,
                           .bytes = (uint8_t *)work,
                           .x_scales = work + R * row};
}

void pyops_compact_round(const pyops_compact *c, int64_t from, int64_t to) {
    if (c->format != PYOPS_COMPACT_INT8) return;            /* gemm.c rounds x when it packs it */
    for (int64_t r = from; r < to; r++) {
        uint8_t *const bytes = c->bytes + r * c->row;
        c->x_scales[r] = round_row(c->k, bytes + c->row - 4 * c->steps, c->x + r * c->I, c->I, 4 * c->steps);
        c->k->int8_row(bytes, c->steps);
    }
}

/* Rows of a group with fewer than GROUP columns, and rows, that are computed at once. */
#define EDGE PYOPS_TUNED(compact_edge, 32, 1, 64, 1)
#define PART PYOPS_TUNED(compact_part, 192, 1, 384, 1)

size_t pyops_compact_scratch(const pyops_compact *c) {
    return c->format == PYOPS_COMPACT_INT8 ? (size_t)(EDGE * GROUP) : pyops_product_scratch(c->k);
}

void pyops_compact_columns(const pyops_compact *c, float *y, int64_t ldy, int64_t first, int64_t rows, int64_t from, int64_t n,
                           int flags, float *scratch) {
    const layout l = lay_out(c->O, c->I, c->format);
    if (c->format != PYOPS_COMPACT_INT8) {
        const pyops_view x = {c->x + first * c->I, c->I, 1};
        for (int64_t o = from; o < from + n; o += CHUNK) {
            const int64_t some = pyops_min(CHUNK, from + n - o);
            pyops_product_packed(c->k, y + (o - from), ldy, x, c->compact + o * c->steps, c->compact + l.bias + o, rows, some,
                                 c->I, 0, some, flags, scratch);
        }
        return;
    }
    const uint8_t *const bytes = c->bytes + first * c->row;
    const float *const x_scales = c->x_scales + first;
    for (int64_t o = from; o < from + n; o += GROUP) {
        const pyops_int8_group w = {.panel = (const int8_t *)(c->compact + o * c->steps),
                                    .start = (const int32_t *)(c->compact + l.start) + o,
                                    .scales = c->compact + l.scales + o,
                                    .bias = c->compact + l.bias + o};
        const int64_t some = pyops_min(GROUP, from + n - o);
        float *const y_o = y + (o - from);
        if (some == GROUP) {
            c->k->int8_group(y_o, bytes, c->row, x_scales, &w, rows, c->steps, ldy, flags);
            continue;
        }
        for (int64_t r = 0; r < rows; r += EDGE) {
            const int64_t height = pyops_min(EDGE, rows - r);
            for (int64_t i = 0; i < height && flags & PYOPS_ADD; i++)
                pyops_copy(scratch + i * GROUP, y_o + (r + i) * ldy, some);
            c->k->int8_group(scratch, bytes + r * c->row, c->row, x_scales + r, &w, height, c->steps, GROUP, flags);
            for (int64_t i = 0; i < height; i++) pyops_copy(y_o + (r + i) * ldy, scratch + i * GROUP, some);
        }
    }
}

int64_t pyops_compact_linear_work(int64_t R, int64_t I, int32_t format) { return pyops_compact_rows(R, I, format); }

pyops_status pyops_compact_linear(float *y, const float *x, const float *compact, float *work, int64_t R, int64_t O, int64_t I,
                                  int32_t format, int32_t accumulate, int32_t relu, void *stream) {
    (void)stream;
    pyops_status status = pyops_compact_check("compact_linear", R, O, I, format);
    if (!status) status = pyops_compact_check_layout("compact_linear", compact, O, I, format);
    if (status) return status;
    const pyops_compact c = pyops_compact_call(compact, x, work, R, O, I, format);
    const int is_large = R * O * I > 2 * PYOPS_SHARE_FMAS || O * I > 2 * PYOPS_SHARE_FLOATS;
    const int64_t threads = omp_get_max_threads(), columns = format == PYOPS_COMPACT_INT8 ? GROUP : CHUNK;
    /* Parts of the rows.  INT8: each group of columns reads all rows of a part, so they must fit in L2.  Otherwise: a chunk of
     * columns is too wide to give each thread one, so threads share the rows. */
    const int64_t most = format == PYOPS_COMPACT_INT8 ? (R + PART - 1) / PART : pyops_min(threads, R / PYOPS_FEW_ROWS);
    const int64_t parts = pyops_max(1, most);
    const int flags = (accumulate ? PYOPS_ADD : 0) | (relu ? PYOPS_RELU : 0);
    int failed = 0;
    if (!is_large || threads == 1) {
        float *scratch = pyops_scratch_or_fail(pyops_compact_scratch(&c), &failed);
        for (int64_t part = 0; part < parts && scratch; part++) {
            const int64_t first = R * part / parts, rows = R * (part + 1) / parts - first;
            pyops_compact_round(&c, first, first + rows);
            pyops_compact_columns(&c, y + first * O, O, first, rows, 0, O, flags, scratch);
        }
    } else {
        #pragma omp parallel
        {
            float *scratch = pyops_scratch_or_fail(pyops_compact_scratch(&c), &failed);
            #pragma omp for schedule(static)
            for (int64_t r = 0; r < R; r++) pyops_compact_round(&c, r, r + 1);
            #pragma omp for schedule(static) collapse(2)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t o = 0; o < O; o += columns) {
                    const int64_t first = R * part / parts, rows = R * (part + 1) / parts - first;
                    if (scratch)
                        pyops_compact_columns(&c, y + first * O + o, O, first, rows, o, pyops_min(columns, O - o), flags,
                                              scratch);
                }
        }
    }
    return failed
        ? pyops_fail(PYOPS_NO_MEMORY, "compact_linear: no memory for %zu floats per thread", pyops_compact_scratch(&c))
        : PYOPS_OK;
}

/* ---- rows ---- */
/* bfloat16 in the upper or lower half of the word at p. */
static float half_of(const float *p, int upper) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return pyops_from_bf16_bits(upper ? word >> 16 : word);
}

/* Row i of column j of a split panel, see kernels/amx_bf16.c. */
static float joined(const float *panel, int64_t i, int64_t j, int64_t NR) {
    enum { SIDE = PYOPS_SPLIT / 2 };
    const float *const part = panel + i / PYOPS_SPLIT * 3 * SIDE * NR + j / SIDE * SIDE * SIDE + i % SIDE * SIDE + j % SIDE;
    const int upper = i % PYOPS_SPLIT >= SIDE;
    return half_of(part, upper) + (half_of(part + SIDE * NR, upper) + half_of(part + 2 * SIDE * NR, upper));
}

pyops_status pyops_compact_embedding(float *y, const float *compact, const int32_t *ids, int64_t R, int64_t O, int64_t I,
                                     int32_t format, void *stream) {
    (void)stream;
    pyops_status status = pyops_compact_check("compact_embedding", R, O, I, format);
    if (!status) status = pyops_compact_check_layout("compact_embedding", compact, O, I, format);
    if (!status) status = pyops_check_ids("compact_embedding", ids, R, O);
    if (status) return status;
    const layout l = lay_out(O, I, format);
    const pyops_kernels *const k = table_of(O, I, format);
    const int64_t steps = steps_of(k, I, format), NR = k->NR;
    #pragma omp parallel for schedule(static) if (R * I > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++) {
        const int64_t o = ids[r];
        float *const y_r = y + r * I;
        if (format == PYOPS_COMPACT_INT8) {
            const int8_t *const panel = (const int8_t *)(compact + o / GROUP * GROUP * steps) + o % GROUP * 4;
            const float scale = compact[l.scales + o];
            for (int64_t i = 0; i < I; i++) y_r[i] = scale * (float)(int8_t)(panel[i / 4 * GROUP * 4 + i % 4] ^ k->flip);
            continue;
        }
        const int64_t chunk = o / CHUNK * CHUNK, padded = pyops_round_up(pyops_min(CHUNK, O - chunk), NR), j = o - chunk;
        for (int64_t i = 0; i < I; i++) {
            const int64_t block = i / PYOPS_KC * PYOPS_KC, length = steps_of(k, pyops_min(PYOPS_KC, I - block), format);
            const float *const panel = compact + chunk * steps + steps_of(k, block, format) * padded + j / NR * NR * length;
            y_r[i] = k->micro.is_split            ? joined(panel, i - block, j % NR, NR)
                : format == PYOPS_COMPACT_FLOAT32 ? panel[(i - block) * NR + j % NR]
                                                  : half_of(panel + (i - block) / 2 * NR + j % NR, (int)(i % 2));
        }
    }
    return PYOPS_OK;
}
