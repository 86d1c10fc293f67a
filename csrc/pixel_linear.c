/* pixel_linear.c - a linear layer on rows of a table of bytes that are mostly 0 (80 % in MNIST).
 *
 * Gather, conversion and product are one loop that adds a row of weight for each nonzero pixel, so the cost is proportional to
 * the number of nonzero pixels.  Threads share images and blocks of outputs in forward, and ranges of pixels in backward, so every
 * sum runs in the order of the pixels or of the images for any number of threads.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

enum { AHEAD = 16 };        /* images to prefetch */

static pyops_status check(const char *who, const int64_t *rows, int64_t N, int64_t B, int64_t I, int64_t O, float scale) {
    const pyops_status status = check_pixel_linear(who, N, B, I, O, scale);
    return status ? status : pyops_check_rows(who, rows, B, N);
}

/* The rows of a shuffled batch are scattered: prefetch one while others are computed.  A cache miss per image costs as much as
 * its product.  Prefetch into L2, since L1 is full of weights. */
static void prefetch_row(const uint8_t *row, int64_t I) {
    for (int64_t i = 0; i < I; i += 64) __builtin_prefetch(row + i, 0, 2);
    __builtin_prefetch(row + I - 1, 0, 2);      /* rows need not start at a cache line */
}

static int64_t padded(int64_t O) { return pyops_round_up(O, PYOPS_PIXEL_BLOCK); }

/* A fifth of the multiply-adds are computed, and each takes about five times as long as in a product of matrices. */
static int shares(int64_t B, int64_t I, int64_t O) { return B * I * O > PYOPS_SHARE_FMAS; }

/* The float of each pixel value. */
static void list_values(float *values, float scale) {
    for (int v = 0; v < 256; v++) values[v] = scale * (float)v;
}

/* List the nonzero pixels of the images [from, to). */
static void find_share(const pyops_kernels *k, int32_t *ink, uint16_t *places, const uint8_t *table, const int64_t *rows,
                       int64_t from, int64_t to, int64_t I) {
    for (int64_t b = from; b < pyops_min(from + AHEAD, to); b++) prefetch_row(table + rows[b] * I, I);
    for (int64_t b = from; b < to; b++) {
        if (b + AHEAD < to) prefetch_row(table + rows[b + AHEAD] * I, I);
        ink[b] = k->pixels_find(places + b * (I + 8), table + rows[b] * I, I);
    }
}

/* Forward of the images [from, to) and the block of outputs that begins at o.
 * work: (I + 1) PYOPS_PIXEL_BLOCK floats, and space for the indices of one image, used without places */
static void forward_block(const pyops_kernels *k, float *y, const int32_t *ink, const uint16_t *places, const uint8_t *table,
                          const int64_t *rows, const float *weight, const float *bias, const float *values, float *work,
                          int64_t from, int64_t to, int64_t o, int64_t I, int64_t O) {
    float *const w = work, *const sums = w + I * PYOPS_PIXEL_BLOCK;
    uint16_t *const own_places = (uint16_t *)(sums + PYOPS_PIXEL_BLOCK);
    const size_t size = (size_t)pyops_min(PYOPS_PIXEL_BLOCK, O - o) * sizeof *sums;
    k->pixels_pack(w, weight + o, I, O, I * O - o);
    for (int64_t b = from; b < to; b++) {
        const uint8_t *const x = table + rows[b] * I;
        if (!places && b + 1 < to) prefetch_row(table + rows[b + 1] * I, I);
        const int32_t ink_b = places ? ink[b] : k->pixels_find(own_places, x, I);
        memcpy(sums, bias + o, size);
        k->pixels_times(sums, places ? places + b * (I + 8) : own_places, ink_b, x, values, w);
        memcpy(y + b * O + o, sums, size);
    }
}

pyops_status pyops_pixel_linear_forward(float *y, int32_t *ink, uint16_t *places, const uint8_t *table, const int64_t *rows,
                                        const float *weight, const float *bias, int64_t N, int64_t B, int64_t I, int64_t O,
                                        float scale, void *stream) {
    (void)stream;
    const pyops_status status = check("pixel_linear_forward", rows, N, B, I, O, scale);
    if (status) return status;
    PYOPS_REQUIRE(!ink == !places, "pixel_linear_forward: ink and places: expected both or neither");
    const pyops_kernels *k = pyops_active();
    float values[256];
    list_values(values, scale);
    int failed = 0;
    const int64_t all = padded(O) / PYOPS_PIXEL_BLOCK * B;      /* images of each block, one block after the other */
    #pragma omp parallel if (shares(B, I, O))
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        if (places) {
            find_share(k, ink, places, table, rows, B * thread / threads, B * (thread + 1) / threads, I);
            #pragma omp barrier
        }
        float *const work = pyops_scratch_or_fail((size_t)((I + 1) * PYOPS_PIXEL_BLOCK + I + 8), &failed);
        const int64_t end = all * (thread + 1) / threads;
        for (int64_t at = all * thread / threads, next; work && at < end; at = next) {
            const int64_t from = at % B;
            next = pyops_min(at - from + B, end);
            forward_block(k, y, ink, places, table, rows, weight, bias, values, work, from, from + next - at,
                          at / B * PYOPS_PIXEL_BLOCK, I, O);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "pixel_linear_forward: no memory for %lld pixels", LL(I)) : PYOPS_OK;
}

/* the sums of a block (I,PYOPS_PIXEL_BLOCK), then dy (B,O padded): rows of whole blocks */
int64_t pyops_pixel_linear_backward_work(int64_t B, int64_t I, int64_t O) { return I * PYOPS_PIXEL_BLOCK + B * padded(O); }

/* The number of the n ascending indices below `limit`. */
static int64_t before(const uint16_t *places, int64_t n, int64_t limit) {
    int64_t low = 0;
    while (low < n) {
        const int64_t middle = (low + n) / 2;
        if (places[middle] < limit) low = middle + 1;
        else n = middle;
    }
    return low;
}

/* Backward of the pixels [from, to), a block of outputs after the other, so that the block's sums stay in a cache.
 * dw (I,PYOPS_PIXEL_BLOCK): sums of a block;  d (B,P): dy with rows of whole blocks;  ends: 2 B numbers */
static void backward_share(const pyops_kernels *k, float *dweight, float *dw, const float *d, const uint8_t *table,
                           const int64_t *rows, const int32_t *ink, const uint16_t *places, const float *values, int32_t *ends,
                           int64_t from, int64_t to, int64_t B, int64_t I, int64_t O) {
    for (int64_t b = 0; b < B; b++) {
        ends[2 * b] = (int32_t)before(places + b * (I + 8), ink[b], from);
        ends[2 * b + 1] = (int32_t)before(places + b * (I + 8), ink[b], to);
    }
    for (int64_t o = 0; o < O; o += PYOPS_PIXEL_BLOCK) {
        k->fill(dw + from * PYOPS_PIXEL_BLOCK, (to - from) * PYOPS_PIXEL_BLOCK, 0.0f);
        for (int64_t b = 0; b < B; b++)
            k->pixels_outer(dw, places + b * (I + 8) + ends[2 * b], ends[2 * b + 1] - ends[2 * b], table + rows[b] * I, values,
                            d + b * padded(O) + o);
        k->add_rows(dweight + from * O + o, dw + from * PYOPS_PIXEL_BLOCK, to - from, pyops_min(PYOPS_PIXEL_BLOCK, O - o), O,
                    PYOPS_PIXEL_BLOCK);
    }
}

pyops_status pyops_pixel_linear_backward(float *dweight, float *dbias, const float *dy, const uint8_t *table,
                                         const int64_t *rows, const int32_t *ink, const uint16_t *places, float *work,
                                         int64_t N, int64_t B, int64_t I, int64_t O, float scale, void *stream) {
    (void)stream;
    const pyops_status status = check("pixel_linear_backward", rows, N, B, I, O, scale);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t P = padded(O);
    float *const dw = work, *const d = work + I * PYOPS_PIXEL_BLOCK;
    for (int64_t b = 0; b < B; b++) {
        memcpy(d + b * P, dy + b * O, (size_t)O * sizeof *d);
        memset(d + b * P + O, 0, (size_t)(P - O) * sizeof *d);
    }
    float values[256];
    list_values(values, scale);
    int failed = 0;
    #pragma omp parallel if (shares(B, I, O))
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int32_t *const ends = (int32_t *)pyops_scratch_or_fail((size_t)(2 * B), &failed);
        if (ends)
            backward_share(k, dweight, dw, d, table, rows, ink, places, values, ends, I * thread / threads,
                           I * (thread + 1) / threads, B, I, O);
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "pixel_linear_backward: no memory for %lld images", LL(B));
    pyops_add_column_sums(dbias, dy, B, O, O);
    return PYOPS_OK;
}
