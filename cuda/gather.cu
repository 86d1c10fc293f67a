// gather.cu - a batch of a data set that is resident on the device: pixels to floats, token ids to time-major steps.
//
// The row indices are in device memory, so the kernel checks them: a row outside the data set is reported, and the batch gets
// zeros instead.
#include "index.cuh"

namespace {
static constexpr int THREADS = 256;

// Whether rows[b] is a row of the table; reports a fault if not.
DEVICE bool in_table(const int64_t *rows, int64_t b, int64_t N, Who who, FaultRecord *faults) {
    const int64_t row = rows[b];
    if (row >= 0 && row < N) return true;
    report(faults, Fault::row, who, b, row, N - 1);
    return false;
}

// ---- pixels ------------------------------------------------------------------------------------------
// A thread takes one pixel, or four, at a time, so the reads and writes of a warp are coalesced.
template <int WIDTH, class Index>
static __global__ void __launch_bounds__(THREADS) pixels(float *y, const uint8_t *table, const int64_t *rows, int64_t N,
                                                         float scale, Index n, Divider<Index> width, FaultRecord *faults) {
    const auto load = [&](Index i) {
        const Index b = width.divide(i), c = i - b * width.divisor;
        const bool valid = in_table(rows, b, N, Who::gather_pixels, faults);
        return valid ? load_pack<WIDTH>(table + WIDTH * (rows[b] * width.divisor + c)) : Pack<uint8_t, WIDTH>{};
    };
    const auto store = [&](Index i, const Pack<uint8_t, WIDTH> &pixel) {
        Pack<float, WIDTH> value;
#pragma unroll
        for (int w = 0; w < WIDTH; w++) value.at[w] = scale * static_cast<float>(pixel.at[w]);
        store_pack(y + int64_t(WIDTH) * i, value);
    };
    in_rounds<4>(Index(0), n, load, store);
}

template <int WIDTH, class Index>
static cudaError_t launch_pixels(float *y, const uint8_t *table, const int64_t *rows, int64_t N, int64_t B, int64_t C,
                                 float scale, void *stream) {
    const int64_t n = B * C / WIDTH;
    return LAUNCH((pixels<WIDTH, Index>), grid_of_rounds(n, THREADS, 4), THREADS, 0, stream_of(stream), y, table, rows, N,
                  scale, Index(n), Divider<Index>(C / WIDTH), pyops_faults());
}
}

extern "C" pyops_status pyops_gather_pixels(float *y, const uint8_t *table, const int64_t *rows, int64_t N, int64_t B,
                                            int64_t C, float scale, void *stream) {
    const pyops_status status = check_gather("gather_pixels", N, B, C);
    if (status || B * C == 0) return status;
    const bool fours = C % 4 == 0 && aligned(y) && (uintptr_t(table) & 3) == 0;
    const cudaError_t error = !fits_int32(B * C) ? launch_pixels<1, uint64_t>(y, table, rows, N, B, C, scale, stream)
        : fours                                  ? launch_pixels<4, uint32_t>(y, table, rows, N, B, C, scale, stream)
                                                 : launch_pixels<1, uint32_t>(y, table, rows, N, B, C, scale, stream);
    return pyops_launched("gather_pixels", error, stream);
}

// ---- token ids ---------------------------------------------------------------------------------------
namespace {
// A row of the table is a sequence and a row of the batch is a step, so this is a transpose.  A block takes 32 sequences with
// all their steps, and a warp one step of the 32 at a time.  Its writes are coalesced, and the eight ids that a memory
// transaction fetches from each sequence are used by the other warps.
static __global__ void __launch_bounds__(THREADS)
    sequences(int32_t *__restrict__ ids, const int32_t *__restrict__ table, const int64_t *rows, int64_t N, int64_t B,
              int64_t T, int32_t first, FaultRecord *faults) {
    const int64_t b = blockIdx.x * int64_t(32) + threadIdx.x % 32, shift = first >= 0;
    if (b >= B) return;
    const bool valid = in_table(rows, b, N, Who::gather_sequences, faults);
    const int32_t *sequence = valid ? table + rows[b] * T : nullptr;
#pragma unroll 4
    for (int64_t t = threadIdx.x / 32; t < T; t += THREADS / 32)
        ids[t * B + b] = t < shift ? first : valid ? sequence[t - shift] : 0;
}
}

extern "C" pyops_status pyops_gather_sequences(int32_t *ids, const int32_t *table, const int64_t *rows, int64_t N, int64_t B,
                                               int64_t T, int32_t first, void *stream) {
    const pyops_status status = check_gather("gather_sequences", N, B, T);
    if (status || B * T == 0) return status;
    return pyops_launched("gather_sequences",
                          LAUNCH(sequences, static_cast<unsigned>(blocks_for<int64_t>(B, 32)), THREADS, 0, stream_of(stream),
                                 ids, table, rows, N, B, T, first, pyops_faults()),
                          stream);
}
