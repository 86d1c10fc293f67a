// gather.cu - rows by index: of a data set that is resident on the device, pixels to floats and token ids to time-major steps or
// to packed sentences; and of activations.
//
// The row indices are in device memory, so the kernel checks them: a row outside the data set is reported, and the batch gets
// zeros instead.
#include "block.cuh"
#include "index.cuh"

namespace {
static constexpr int THREADS = 256;

// Whether rows[b] is a row of the table; reports a fault if not.
template <class Id> DEVICE bool in_table(const Id *rows, int64_t b, int64_t N, Who who, FaultRecord *faults) {
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

// ---- packed sentences --------------------------------------------------------------------------------
namespace {
static constexpr int SENTENCES = THREADS / 32; // per block

// Where the sentences of a batch come from and go to.
struct Packing {
    int32_t *ids, *positions, *offsets; // may be NULL
    const int32_t *table;
    const int64_t *starts;
    int64_t total;
    int32_t first;
};

// The number of tokens of sentence rows[b].  0 after a fault, so nothing outside the table is read.
DEVICE int64_t tokens(const int64_t *starts, const int64_t *rows, int64_t b, int64_t N, Who who, FaultRecord *faults) {
    if (!in_table(rows, b, N, who, faults)) return 0;
    const int64_t from = starts[rows[b]], to = starts[rows[b] + 1];
    if (from <= to) return to - from;
    report(faults, Fault::start, who, rows[b], from, to);
    return 0;
}

// A warp copies one sentence.  Each block adds the lengths of all sentences before its own: that takes less time than a launch
// that only computes offsets.  The warp after the last sentence writes what follows it.
DEVICE void pack_sentences(const Packing &p, const int64_t *rows, int64_t N, int64_t B, Who who, FaultRecord *faults) {
    SHARED(int64_t, of_warps, [SENTENCES]);
    const int64_t block = int64_t(blockIdx.x) * SENTENCES, b = block + threadIdx.x / 32, shift = p.first >= 0;
    int64_t from = 0;
    for (int64_t n = threadIdx.x; n < block; n += THREADS) from += tokens(p.starts, rows, n, N, who, faults);
    from = block_sum(from, of_warps);
    if (b > B) return;
    for (int64_t n = block; n < b; n++) from += tokens(p.starts, rows, n, N, who, faults);
    const int lane = threadIdx.x % 32;
    if (b == B && from != p.total && lane == 0) report(faults, Fault::total, who, 0, p.total, from);
    const int64_t length = b < B ? tokens(p.starts, rows, b, N, who, faults) : p.total - from, room = p.total - from;
    const int32_t *const sentence = b < B && length > 0 ? p.table + p.starts[rows[b]] : nullptr;
    if (p.offsets && lane == 0) p.offsets[b] = static_cast<int32_t>(min(from, p.total));
#pragma unroll 2
    for (int64_t t = lane; t < min(length, room); t += 32) {
        if (p.ids) p.ids[from + t] = !sentence ? 0 : t < shift ? p.first : sentence[t - shift];
        if (p.positions) p.positions[from + t] = sentence ? static_cast<int32_t>(t) : 0;
    }
}

static __global__ void __launch_bounds__(THREADS, 4)
    pack(Packing p, const int64_t *rows, int64_t N, int64_t B, FaultRecord *faults) {
    wait_for_last_kernel();
    pack_sentences(p, rows, N, B, Who::pack_sequences, faults);
}

struct Pairs { Packing source, target, labels; };
static __global__ void __launch_bounds__(THREADS, 4)
    pack_pairs(Pairs pairs, const int64_t *rows, int64_t N, int64_t B, FaultRecord *faults) {
    wait_for_last_kernel();
    const Packing p = blockIdx.y == 0 ? pairs.source : blockIdx.y == 1 ? pairs.target : pairs.labels;
    pack_sentences(p, rows, N, B, Who::pack_pairs, faults);
}

static unsigned pack_blocks(int64_t B) { return static_cast<unsigned>(blocks_for<int64_t>(B + 1, SENTENCES)); }
}

extern "C" pyops_status pyops_pack_sequences(int32_t *ids, int32_t *positions, int32_t *offsets, const int32_t *table,
                                             const int64_t *starts, const int64_t *rows, int64_t N, int64_t B, int64_t total,
                                             int32_t first, void *stream) {
    const pyops_status status = check_pack("pack_sequences", N, B, total);
    if (status) return status;
    const Packing p = {ids, positions, offsets, table, starts, total, first};
    return pyops_launched("pack_sequences",
                          LAUNCH_DEPENDENT(pack, pack_blocks(B), THREADS, 0, stream_of(stream), p, rows, N, B, pyops_faults()),
                          stream);
}

extern "C" pyops_status pyops_pack_pairs(int32_t *source, int32_t *source_positions, int32_t *source_offsets, int32_t *target,
                                         int32_t *target_positions, int32_t *target_offsets, int32_t *labels,
                                         const int32_t *source_table, const int64_t *source_starts, const int32_t *label_table,
                                         const int64_t *label_starts, const int64_t *rows, int64_t N, int64_t B,
                                         int64_t source_total, int64_t target_total, int32_t first, void *stream) {
    pyops_status status = check_pack("pack_pairs", N, B, source_total);
    if (!status) status = check_pack("pack_pairs", N, B, target_total);
    if (status) return status;
    const Pairs pairs = {{source, source_positions, source_offsets, source_table, source_starts, source_total, -1},
                         {target, target_positions, target_offsets, label_table, label_starts, target_total, first},
                         {labels, nullptr, nullptr, label_table, label_starts, target_total, -1}};
    return pyops_launched(
        "pack_pairs",
        LAUNCH_DEPENDENT(pack_pairs, dim3(pack_blocks(B), 3), THREADS, 0, stream_of(stream), pairs, rows, N, B, pyops_faults()),
        stream);
}

// ---- rows of activations -----------------------------------------------------------------------------
namespace {
// A thread takes one float, or four, at a time.  C: in packs.
template <int WIDTH, class Index>
static __global__ void __launch_bounds__(THREADS) activations(float *y, const float *x, const int32_t *rows, int64_t N, Index n,
                                                              Divider<Index> batch, Divider<Index> width, FaultRecord *faults) {
    const auto load = [&](Index i) {
        const Index tr = width.divide(i), t = batch.divide(tr), r = tr - t * batch.divisor, c = i - tr * width.divisor;
        const bool valid = in_table(rows, r, N, Who::gather_rows, faults);
        return valid ? load_pack<WIDTH>(x + int64_t(WIDTH) * ((int64_t(t) * N + rows[r]) * width.divisor + c))
                     : Pack<float, WIDTH>{};
    };
    const auto store = [&](Index i, const Pack<float, WIDTH> &value) { store_pack(y + int64_t(WIDTH) * i, value); };
    in_rounds<4>(Index(0), n, load, store);
}

template <int WIDTH, class Index>
static cudaError_t launch_activations(float *y, const float *x, const int32_t *rows, int64_t T, int64_t N, int64_t R, int64_t C,
                                      void *stream) {
    const int64_t n = T * R * C / WIDTH;
    return LAUNCH((activations<WIDTH, Index>), grid_of_rounds(n, THREADS, 4), THREADS, 0, stream_of(stream), y, x, rows, N,
                  Index(n), Divider<Index>(R), Divider<Index>(C / WIDTH), pyops_faults());
}
}

extern "C" pyops_status pyops_gather_rows(float *y, const float *x, const int32_t *rows, int64_t T, int64_t N, int64_t R,
                                          int64_t C, void *stream) {
    const pyops_status status = check_gather_rows(T, N, R, C);
    if (status || T * R * C == 0) return status;
    const bool fours = C % 4 == 0 && aligned(y) && aligned(x);
    const cudaError_t error = !fits_int32(T * R * C) ? launch_activations<1, uint64_t>(y, x, rows, T, N, R, C, stream)
        : fours                                      ? launch_activations<4, uint32_t>(y, x, rows, T, N, R, C, stream)
                                                     : launch_activations<1, uint32_t>(y, x, rows, T, N, R, C, stream);
    return pyops_launched("gather_rows", error, stream);
}

namespace {
// A thread takes one float of x.
static __global__ void __launch_bounds__(THREADS) scattered(float *y, const float *x, const int32_t *rows, int64_t N, int64_t n,
                                                            int64_t C, int64_t ldy, int64_t ldx, FaultRecord *faults) {
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < n; i += gridDim.x * int64_t(THREADS)) {
        const int64_t r = i / C, c = i - r * C;
        if (in_table(rows, r, N, Who::scatter_rows, faults)) y[rows[r] * ldy + c] = x[r * ldx + c];
    }
}
}

extern "C" pyops_status pyops_scatter_rows(float *y, const float *x, const int32_t *rows, int64_t N, int64_t R, int64_t C,
                                           int64_t ldy, int64_t ldx, void *stream) {
    const pyops_status status = check_scatter_rows(N, R, C, ldy, ldx);
    if (status || R * C == 0) return status;
    return pyops_launched("scatter_rows",
                          LAUNCH(scattered, grid_of_rounds(R * C, THREADS, 1), THREADS, 0, stream_of(stream), y, x, rows, N,
                                 R * C, C, ldy, ldx, pyops_faults()),
                          stream);
}
