/* pixel_linear.c - a linear layer on rows of a table of bytes that are mostly 0 (80 % in MNIST).
 *
 * Gather, conversion and product are one loop that adds a row of weight for each nonzero pixel, so the cost is proportional to
 * the number of nonzero pixels.  Threads share images in forward and ranges of pixels in backward, so every sum runs in the
 * order of the pixels or of the images for any number of threads.
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

/* The float of each pixel value. */
static void list_values(float *values, float scale) {
    for (int v = 0; v < 256; v++) values[v] = scale * (float)v;
}

/* Forward of the images [from, to).  work: (I + 1) PYOPS_PIXEL_BLOCK floats, and space for the indices of one image. */
static void forward_share(const pyops_kernels *k, float *y, int32_t *ink, uint16_t *places, const uint8_t *table,
                          const int64_t *rows, const float *weight, const float *bias, const float *values, float *work,
                          int64_t from, int64_t to, int64_t I, int64_t O) {
    float *const w = work, *const sums = w + I * PYOPS_PIXEL_BLOCK;
    uint16_t *const own_places = (uint16_t *)(sums + PYOPS_PIXEL_BLOCK);
    for (int64_t b = from; b < pyops_min(from + AHEAD, to); b++) prefetch_row(table + rows[b] * I, I);
    for (int64_t o = 0; o < O; o += PYOPS_PIXEL_BLOCK) {
        const size_t size = (size_t)pyops_min(PYOPS_PIXEL_BLOCK, O - o) * sizeof *sums;
        k->pixels_pack(w, weight + o, I, O, I * O - o);
        for (int64_t b = from; b < to; b++) {
            uint16_t *const places_b = places ? places + b * (I + 8) : own_places;
            const uint8_t *const x = table + rows[b] * I;
            if (o == 0 && b + AHEAD < to) prefetch_row(table + rows[b + AHEAD] * I, I);
            const int32_t ink_b = o > 0 && places ? ink[b] : k->pixels_find(places_b, x, I);
            if (places) ink[b] = ink_b;
            memcpy(sums, bias + o, size);
            k->pixels_times(sums, places_b, ink_b, x, values, w);
            memcpy(y + b * O + o, sums, size);
        }
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
    #pragma omp parallel if (B * I > PYOPS_SHARE_FLOATS)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        float *const work = pyops_scratch_or_fail((size_t)((I + 1) * PYOPS_PIXEL_BLOCK + I + 8), &failed);
        if (work)
            forward_share(k, y, ink, places, table, rows, weight, bias, values, work, B * thread / threads,
                          B * (thread + 1) / threads, I, O);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "pixel_linear_forward: no memory for %lld pixels", LL(I)) : PYOPS_OK;
}

/* the sums of dweight (I,O padded), then dy (B,O padded): rows of whole blocks */
int64_t pyops_pixel_linear_backward_work(int64_t B, int64_t I, int64_t O) { return (I + B) * padded(O); }

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

pyops_status pyops_pixel_linear_backward(float *dweight, float *dbias, const float *dy, const uint8_t *table,
                                         const int64_t *rows, const int32_t *ink, const uint16_t *places, float *work,
                                         int64_t N, int64_t B, int64_t I, int64_t O, float scale, void *stream) {
    (void)stream;
    const pyops_status status = check("pixel_linear_backward", rows, N, B, I, O, scale);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t P = padded(O);
    float *const dw = work, *const d = work + I * P;
    for (int64_t b = 0; b < B; b++) {
        memcpy(d + b * P, dy + b * O, (size_t)O * sizeof *d);
        memset(d + b * P + O, 0, (size_t)(P - O) * sizeof *d);
    }
    float values[256];
    list_values(values, scale);
    #pragma omp parallel if (B * I > PYOPS_SHARE_FLOATS)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t from = I * thread / threads, to = I * (thread + 1) / threads;
        k->fill(dw + from * P, (to - from) * P, 0.0f);
        for (int64_t b = 0; b < B; b++) {
            const uint16_t *places_b = places + b * (I + 8);
            const int64_t first = before(places_b, ink[b], from), last = before(places_b, ink[b], to);
            k->pixels_outer(dw, places_b + first, last - first, table + rows[b] * I, values, d + b * P, P);
        }
        k->add_rows(dweight + from * O, dw + from * P, to - from, O, P);
    }
    pyops_add_column_sums(dbias, dy, B, O, O);
    return PYOPS_OK;
}
