// pixel_linear.cu - a linear layer on rows of a table of bytes, most of them 0 (in MNIST 80 %).
//
// Forward: a block has one image and up to OUTPUTS outputs.  Each warp lists its share of the nonzero pixels and adds up the
// corresponding rows of weight; then the sums of the warps are added in order.  The weight of a small layer stays in the L1
// cache from one image to the next.
//
// Backward: a block has eight adjacent pixels, one per warp, and up to OUTPUTS outputs.  It reads these pixels of all images,
// TERMS images at a time, and adds up the rows of dy in the order of the images.  Reading the bytes again is faster than
// searching `places` for them, so `places` and `ink` are not used here.
//
//              image 0  1  2  3 ...                      dy of image 0   [ ............ ]
//     warp 0   [ 17   0  0 80 ...      sum over images   dy of image 1   [ ............ ]     ->  dweight[pixel + 0, :]
//     warp 1   [ 99  12  0  0 ...      of pixel times    dy of image 2   [ ............ ]     ->  dweight[pixel + 1, :]
//
// The bias is the weight of a pixel that is 1 in every image, so dbias is one more row of dweight.
// Sums are short and rows are read once, so tensor cores would not help, whatever the precision.
#include "pixels.cuh"

namespace {
static constexpr int OUTPUTS = 128, TILE = 4096;
// Blocks per multiprocessor.  Without this bound the compiler targets eight and uses so few registers that it waits for each
// row of weight before it loads the next.
static constexpr int BLOCKS = 3;

static pyops_status check(const char *who, int64_t N, int64_t B, int64_t I, int64_t O, float scale) {
    const pyops_status status = check_pixel_linear(who, N, B, I, O, scale);
    if (status) return status;
    if (!pyops_faults()) return pyops_fail(PYOPS_NO_MEMORY, "%s: no device memory is left", who);
    return PYOPS_OK;
}

// Write the indices of the nonzero pixels that the warps found among PIXELS pixels; return their number.  counts: from
// list_ink.
DEVICE int write_places(uint16_t *places, const Term *terms, const int *counts) {
    static_assert(WARPS * VOTES == 32, "a lane has one of the counts");
    const int lane = lane_id(), count = counts[lane];
#pragma unroll
    for (int j = 0, listed = 0; j < VOTES; j++) {
        const int piece = WARPS * j + warp_id();
        const int here = counts[piece], before = __reduce_add_sync(ALL_LANES, lane < piece ? count : 0);
        if (lane < here) places[before + lane] = static_cast<uint16_t>(terms[listed + lane].row);
        listed += here;
    }
    return __reduce_add_sync(ALL_LANES, count);
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(float *y, int32_t *ink, uint16_t *places, const uint8_t *table, const int64_t *rows, const float *weight,
            const float *bias, int64_t N, int64_t B, int64_t I, int64_t O, int64_t slices, float scale, FaultRecord *faults) {
    SHARED(float, sums, [WARPS][OUTPUTS]);
    SHARED(Term, terms, [WARPS][TERMS]);
    SHARED(int, counts, [WARPS * VOTES]);
    const int warp = warp_id();
    for (int64_t job = blockIdx.x; job < B * slices; job += gridDim.x) {
        const int64_t b = job / slices, first = job % slices * OUTPUTS;
        const int width = static_cast<int>(min(O - first, int64_t(OUTPUTS)));
        const bool saves = places && first == 0;
        const int64_t row = rows[b];
        const uint8_t *image = image_of(table, row, N, I);
        if (!image && threadIdx.x == 0) report(faults, Fault::row, Who::pixel_linear_forward, b, row, N - 1);
        clear(sums[warp], width);
        int found = 0;
        for (int64_t from = 0; from < I; from += PIXELS) {
            const int n = list_ink(terms[warp], counts, image, from, I, scale);
            add_terms(sums[warp], terms[warp], n, weight + first, O, width);
            if (saves) {
                __syncthreads();
                found += write_places(places + b * (I + 8) + found, terms[warp], counts);
                __syncthreads();                // before the next counts
            }
        }
        if (saves && threadIdx.x == 0) ink[b] = found;
        __syncthreads();
#pragma unroll 1
        for (int o = threadIdx.x; o < width; o += THREADS) {
            float sum = bias[first + o];
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[w][o];
            y[b * O + first + o] = sum;
        }
        __syncthreads();                        // before the next sums
    }
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    backward(float *dweight, float *dbias, const float *dy, const uint8_t *table, const int64_t *rows, int64_t N, int64_t B,
             int64_t I, int64_t O, int64_t slices, int64_t jobs, float scale, FaultRecord *faults) {
    SHARED(float, sums, [WARPS][OUTPUTS]);
    SHARED(Term, terms, [WARPS][TERMS]);
    SHARED(uint64_t, columns, [TERMS]);
    SHARED(float, tile, [TILE]);
    const int thread = threadIdx.x, warp = warp_id(), lane = lane_id();
    for (int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int64_t pixel = job / slices * WARPS, own = pixel + warp, first = job % slices * OUTPUTS;
        const int width = static_cast<int>(min(O - first, int64_t(OUTPUTS))), most = min(TERMS, TILE / width);
        clear(sums[warp], width);
        for (int64_t from = 0; from < B; from += most) {
            const int count = static_cast<int>(min(B - from, int64_t(most)));
            const int64_t row = thread < count ? rows[from + thread] : -1;
#pragma unroll 1
            for (int o = lane; o < width; o += 32) {
                const float *column = dy + from * O + first + o;
                float value[TERMS / WARPS];
#pragma unroll
                for (int j = 0; j < TERMS / WARPS; j++) value[j] = column[min(warp + WARPS * j, count - 1) * O];
#pragma unroll
                for (int j = 0; j < TERMS / WARPS; j++)
                    if (warp + WARPS * j < count) tile[(warp + WARPS * j) * width + o] = value[j];
            }
            const uint8_t *image = image_of(table, row, N, I);
            if (!image && thread < count) report(faults, Fault::row, Who::pixel_linear_backward, from + thread, row, N - 1);
            if (thread < TERMS) columns[thread] = pixels_at(image, pixel, I);
            __syncthreads();
            const int n = own < I ? list_column(terms[warp], columns, scale)
                : own == I        ? list_all(terms[warp], nullptr, count)
                                  : 0;
            add_terms(sums[warp], terms[warp], n, tile, width, width);
            __syncthreads();                    // before the next columns and the next tile
        }
        float *const to = own < I ? dweight + own * O + first : dbias + first;
        if (own <= I)
#pragma unroll 1
            for (int o = lane; o < width; o += 32) to[o] += sums[warp][o];
    }
}

static int64_t slices_of(int64_t O) { return O > 0 ? blocks_for<int64_t>(O, OUTPUTS) : 1; }
}

extern "C" pyops_status pyops_pixel_linear_forward(float *y, int32_t *ink, uint16_t *places, const uint8_t *table,
                                                   const int64_t *rows, const float *weight, const float *bias, int64_t N,
                                                   int64_t B, int64_t I, int64_t O, float scale, void *stream) {
    const pyops_status status = check("pixel_linear_forward", N, B, I, O, scale);
    if (status || B == 0) return status;
    const int64_t slices = slices_of(O);
    const cudaError_t error = LAUNCH(forward, grid_for(B * slices * THREADS, THREADS), THREADS, 0, stream_of(stream), y, ink,
                                     places, table, rows, weight, bias, N, B, I, O, slices, scale, pyops_faults());
    return pyops_launched("pixel_linear_forward", error, stream);
}

extern "C" int64_t pyops_pixel_linear_backward_work(int64_t, int64_t, int64_t) { return 0; }

extern "C" pyops_status pyops_pixel_linear_backward(float *dweight, float *dbias, const float *dy, const uint8_t *table,
                                                    const int64_t *rows, const int32_t *, const uint16_t *, float *, int64_t N,
                                                    int64_t B, int64_t I, int64_t O, float scale, void *stream) {
    const pyops_status status = check("pixel_linear_backward", N, B, I, O, scale);
    if (status || B == 0 || O == 0) return status;
    const int64_t slices = slices_of(O), jobs = blocks_for<int64_t>(I + 1, WARPS) * slices;
    const cudaError_t error = LAUNCH(backward, grid_for(jobs * THREADS, THREADS), THREADS, 0, stream_of(stream), dweight, dbias,
                                     dy, table, rows, N, B, I, O, slices, jobs, scale, pyops_faults());
    return pyops_launched("pixel_linear_backward", error, stream);
}
