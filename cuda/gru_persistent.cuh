// gru_persistent.cuh - all steps of a GRU in one kernel, which keeps the recurrent weights in shared memory from the first
// step to the last (persistent RNNs: Diamos et al. 2016, ICML).
//
// The units of the state and the rows of the batch are divided among blocks.  There are at most as many blocks as
// multiprocessors:
//
//                unit 0 ..     U ..     2U ..              A block keeps the weights of its U units: in forward the rows
//               +--------+--------+--------+               of w_hh that produce them, in backward the columns.
//     row 0 ..  | block  | block  | block  |  a team       A step needs the whole previous state of the same rows.  So the
//               +--------+--------+--------+               blocks of a team exchange their results (h, u, the gradients of
//     row 8*n.. | block  | block  | block  |  a team       the gates) and wait for each other.  Teams do not wait for other
//               +--------+--------+--------+               teams.
//
// The rows of a team are tiles of 8 rows, and a chunk is several tiles.  A block runs step after step, and in a step chunk
// after chunk:
//
//     wait until all blocks of the team have finished these rows; copy them to shared memory    (in advance, during the
//     multiply: a warp has one tile, all columns and a slice of K                                product of another chunk)
//     add the sums of the slices in a fixed order, compute the gates, write them, arrive at the counter
//
// With reset before the product, a step has two such phases: r and z from h, then n from u = r * h.
//
// On Hopper a team of 2, 4 or 8 blocks is a cluster, whose blocks can store to each other's shared memory.  Every block has
// all rows of its team in shared memory, twice: it multiplies from one half and stores its results to the other half of every
// block.  So nothing is copied, and instead of counters there is the cluster's barrier, once per chunk.
#pragma once
#include <type_traits>
#include "block.cuh"
#include "gru_gates.cuh"
#include "hopper.cuh"

namespace gru {

// ---- how a block multiplies --------------------------------------------------------------------------------
// c (rows of a tile, N) = rows (K) x weights (K,N), N being the columns of the block.  K is padded with zeros to whole
// segments, which are divided among the slices.
static constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 8, SEGMENT = 16;

// In float32 a lane has 3 or 4 columns of all 8 rows.  If fewer than 32 lanes cover all columns, the slice of K is also
// divided among the lanes: each takes every PARTS-th group of four k.  On tensor cores the weights are the left operand, in
// tiles of 16 columns.
template <int N> struct Lanes {
    static constexpr int EACH = N % 3 ? 4 : 3, ACROSS = N / EACH, PARTS = 32 / ACROSS;
    // If fewer than 8 lanes cover all columns, 8 lanes that read at once read several k.  To avoid bank conflicts the columns
    // are swizzled: column c of group q is stored at index c ^ swizzle(q).
    static __device__ __forceinline__ int swizzle(int four) { return ACROSS < 8 ? four % (8 / ACROSS) * ACROSS : 0; }
};
static constexpr int weights_of_k(int n, Precision p) { return p == Precision::bf16 ? n / 2 : n; }     // floats per k
// Sums are stored as [warp][row][column]; the padding of the rows avoids bank conflicts when lanes write.
static constexpr int sums_of_row(int n) { return round_up(n, 16) + 4; }
static constexpr int sums_of_block(int n) { return WARPS * ROWS * sums_of_row(n); }

template <int N, Precision P> struct Product { static constexpr int WEIGHTS = weights_of_k(N, P), SUM_ROW = sums_of_row(N); };

// Four consecutive k, rounded for the tensor cores; bfloat16 is used as it is.
DEVICE uint4 rounded(float4 x, std::integral_constant<Precision, Precision::tf32>) {
    return {to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)};
}
DEVICE uint2 rounded(float4 x, std::integral_constant<Precision, Precision::bf16>) {
    return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
}
template <class Precise> DEVICE auto quad_at(const float *x, Precise precise) {
    return rounded(*reinterpret_cast<const float4 *>(x), precise);
}
template <class Precise> DEVICE uint2 quad_at(const bf16 *x, Precise) {
    static_assert(Precise::value == Precision::bf16);
    return *reinterpret_cast<const uint2 *>(x);
}

// Store the weights in the layout that `multiply` reads; quad(column, k) returns k .. k+3, zeros outside the matrix.
//   float32        [k/4][column] of 4 k each: adjacent lanes read adjacent columns
//   tensor cores   [segment][8 columns][lane] of 4 k each: lane = 4 g + t has column g and k = 4t .. 4t+3 of the segment.  The
//                  instruction defines them as k = t, t+4 (bfloat16: 2t, 2t+1, 2t+8, 2t+9), but any permutation of k is
//                  correct if both operands use it, and four consecutive k are one access.
template <int N, Precision P, class Quad> DEVICE void store_weights(float *weights, int segments, Quad quad) {
    if constexpr (P == Precision::fp32) {
        float4 *const to = reinterpret_cast<float4 *>(weights);
#pragma unroll 4
        for (int i = threadIdx.x; i < segments * 4 * N; i += THREADS) {        // a warp: 8 columns, 16 k
            const int column = i % 8 + i / 32 % (N / 8) * 8, four = i / (4 * N) * 4 + i / 8 % 4;
            to[four * N + (column ^ Lanes<N>::swizzle(four))] = quad(column, four * 4);
        }
    } else {
        using Precise = std::integral_constant<Precision, P>;
        auto *const to = reinterpret_cast<decltype(rounded(float4{}, Precise{})) *>(weights);
#pragma unroll 4
        for (int i = threadIdx.x; i < segments * 4 * N; i += THREADS) {
            const int column = i % 32 / 4 + i / 32 % (N / 8) * 8, k = i / (4 * N) * SEGMENT + i % 4 * 4;
            to[i] = rounded(quad(column, k), Precise{});
        }
    }
}

// Reduce COUNT sums over the lanes that differ in the bits STEP down to LAST (reduce-scatter): each step exchanges half of the
// remaining sums.  At the end each lane has COUNT / parts of the totals, at the start of `sum`, in the order of those bits.
template <int COUNT, int STEP, int LAST> DEVICE void add_parts(float *sum) {
    if constexpr (STEP >= LAST) {
        const bool upper = threadIdx.x & STEP;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const float mine = upper ? sum[COUNT / 2 + i] : sum[i], theirs = upper ? sum[i] : sum[COUNT / 2 + i];
            sum[i] = mine + __shfl_xor_sync(ALL_LANES, theirs, STEP);
        }
        add_parts<COUNT / 2, STEP / 2, LAST>(sum);
    }
}

// This warp's contribution to the sums of a chunk: its slice of K for one tile of rows, `stride` elements apart.
template <int N, Precision P, class T>
DEVICE void multiply(float *sums, const float *weights, const T *rows, int stride, int segments, int slices) {
    constexpr int SUM_ROW = Product<N, P>::SUM_ROW;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp / slices, slice = warp % slices;
    const int from = segments * slice / slices, to = segments * (slice + 1) / slices;
    rows += tile * ROWS * stride;
    sums += warp * ROWS * SUM_ROW;
    if constexpr (P == Precision::fp32) {
        constexpr int EACH = Lanes<N>::EACH, ACROSS = Lanes<N>::ACROSS, PARTS = Lanes<N>::PARTS;
        const int column = lane % ACROSS, part = lane / ACROSS, swizzle = Lanes<N>::swizzle(part);
        const float4 *const w = reinterpret_cast<const float4 *>(weights) + column;
        float sum[ROWS * EACH] = {};
#pragma unroll 2
        for (int four = from * 4 + part; four < to * 4; four += PARTS) {
            float4 b[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) b[j] = w[four * N + (j * ACROSS ^ swizzle)];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 a = *reinterpret_cast<const float4 *>(rows + i * stride + four * 4);
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    float &s = sum[i * EACH + j];
                    s = fmaf(a.x, b[j].x, s);
                    s = fmaf(a.y, b[j].y, s);
                    s = fmaf(a.z, b[j].z, s);
                    s = fmaf(a.w, b[j].w, s);
                }
            }
        }
        add_parts<ROWS * EACH, 16, ACROSS>(sum);
        constexpr int LEFT = ROWS * EACH / PARTS;
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const int row = (part * LEFT + i) / EACH, j = (part * LEFT + i) % EACH;
            sums[row * SUM_ROW + column + j * ACROSS] = sum[i];
        }
    } else {
        using Precise = std::integral_constant<Precision, P>;
        using Quad = decltype(rounded(float4{}, Precise{}));
        constexpr int TILES = round_up(N, 16) / 16;             // of 16 columns; the last may have only 8
        const int g = lane / 4, t = lane % 4;
        const Quad *w = reinterpret_cast<const Quad *>(weights) + from * (N * 4) + lane;
        float sum[TILES][4] = {};                               // columns g, g+8 of rows 2t, 2t+1
        for (int segment = from; segment < to; segment++, w += N * 4) {
            const Quad b = quad_at(rows + g * stride + segment * SEGMENT + t * 4, Precise{});
            Quad a[2 * TILES] = {};
#pragma unroll
            for (int i = 0; i < N / 8; i++) a[i] = w[i * 32];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const Quad &low = a[2 * m], &high = a[2 * m + 1];
                if constexpr (P == Precision::tf32) mma_tf32(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                else mma_bf16(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
            }
            if constexpr (P == Precision::tf32) {               // its instruction takes only 8 k
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const Quad &low = a[2 * m], &high = a[2 * m + 1];
                    mma_tf32(sum[m], {low.z, high.z, low.w, high.w}, {b.z, b.w});
                }
            }
        }
        sums += 2 * t * SUM_ROW + g;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i % 2 * SUM_ROW + m * 16 + i / 2 * 8] = sum[m][i];
    }
}

// The sum over all slices of one row of the chunk and one column.
template <int N, Precision P> DEVICE float total(const float *sums, int slices, int row, int column) {
    constexpr int SUM_ROW = Product<N, P>::SUM_ROW;
    sums += (row / ROWS * slices * ROWS + row % ROWS) * SUM_ROW + column;
    float sum = 0.0f;
    for (int i = 0; i < slices; i++) sum += sums[i * ROWS * SUM_ROW];
    return sum;
}

// ---- how the work is divided -----------------------------------------------------------------------------------
struct Partition {
    int64_t T, B;
    int H, padded;                          // padded: H rounded up to whole segments
    int units, teams, team;                 // units per block, number of teams, blocks per team
    int tiles, chunk;                       // tiles per team, tiles per chunk
    int stride, buffers;                    // elements from row to row in shared memory; 2 buffers: chunks are prefetched
    int held;                               // rows in shared memory
    size_t element, others;                 // bytes of an element of these rows; of shared memory for everything else
    bool cluster;

    int most_chunks() const { return blocks_for(tiles, chunk); }
    size_t shared() const { return others + element * size_t(held) * stride; }
};

// Shared memory and traffic of a kernel, for blocks of 8, 16 and 32 units.  K consists of parts of H.
struct Needs {
    int weights[3], sums[3];                // floats of a block: of weights per k of a part; of sums
    int kept, at_once, copied;              // number of parts: resident, multiplied at once, copied per row and step
    size_t element;                         // bytes of an element of a row
};

// Of the partitions that fit, return the one with the fewest multiplications per block and step; on a tie the one that copies
// least (the weights once, the rows in each step).  teams = 0: none fits.
static Partition partition_for(int64_t T, int64_t B, int64_t H, const Needs &needs) {
    // Every block of a team copies all rows of the team in each step.  More bytes than this take longer, at the bandwidth of
    // the L2 cache, than launching a product per step, which reuses its operands better.
    constexpr int64_t MOST_COPIED = 512 * 1024;
    Partition best = {};
    if (H > 32 * pyops_multiprocessors()) return best;
    const int64_t all = blocks_for<int64_t>(B, ROWS);           // tiles
    int64_t least = INT64_MAX, least_copied = INT64_MAX;
    for (int i = 2; i >= 0; i--) {
        Partition p = {T, B, int(H), round_up(int(H), SEGMENT), 8 << i};
        p.team = blocks_for(p.H, p.units);
        if (p.team > pyops_multiprocessors()) continue;
        const int64_t tiles = blocks_for<int64_t>(all, pyops_multiprocessors() / p.team);
        const int64_t work = tiles * p.units, in_step = tiles * ROWS * needs.copied * p.padded * int64_t(needs.element);
        const int64_t copied = int64_t(needs.kept) * p.padded * needs.weights[i] * int64_t(sizeof(float)) + T * in_step;
        if (in_step > MOST_COPIED || work > least || (work == least && copied >= least_copied)) continue;
        p.tiles = int(tiles);
        p.teams = int(blocks_for<int64_t>(all, tiles));
        p.stride = needs.at_once * p.padded;
        if (p.stride % 32 == 0) p.stride += 16;                 // rows begin 16 banks apart, in bfloat16 8 or 24
        p.element = needs.element;
        // At least three chunks if there are enough tiles: then a block has work while it waits for its team.
        for (p.chunk = WARPS; p.chunk > 1 && 3 * p.chunk > p.tiles; p.chunk /= 2) {}
        p.buffers = p.most_chunks() > 2 ? 2 : 1;
        p.others = sizeof(float) * (size_t(needs.kept) * p.padded * needs.weights[i] + needs.sums[i]);
        const auto fits = [&] {
            p.held = p.buffers * p.chunk * ROWS;
            return p.shared() <= size_t(pyops_shared_memory());
        };
        while (!fits() && p.chunk > 1) p.chunk /= 2;
        if (!fits()) p.buffers = 1;
        if (!fits()) continue;
        best = p;
        least = work;
        least_copied = copied;
    }
    return best;
}

// Elements of bfloat16 are multiplied as they are; float32 is rounded to the current precision.
template <class T> static Precision precision_of() { return std::is_same_v<T, bf16> ? Precision::bf16 : pyops_precision_now(); }

template <class T> static Partition forward_partition(int64_t steps, int64_t B, int64_t H, bool before) {
    const Precision p = precision_of<T>();
    Needs needs = {{}, {}, 1, 1, before ? 2 : 1, sizeof(T)};
    for (int i = 0; i < 3; i++) {
        const int u = 8 << i;
        needs.weights[i] = before ? weights_of_k(2 * u, p) + weights_of_k(u, p) : weights_of_k(3 * u, p);
        needs.sums[i] = before ? sums_of_block(2 * u) : sums_of_block(3 * u);
    }
    return partition_for(steps, B, H, needs);
}

template <class T> static Partition backward_partition(int64_t steps, int64_t B, int64_t H, bool before) {
    const Precision p = precision_of<T>();
    Needs needs = {{}, {}, 3, before ? 2 : 3, 3, sizeof(T)};
    for (int i = 0; i < 3; i++) {
        needs.weights[i] = weights_of_k(8 << i, p);
        needs.sums[i] = sums_of_block(8 << i);
    }
    return partition_for(steps, B, H, needs);
}

// ---- the schedule of a block -----------------------------------------------------------------------------------
struct Item {                               // a phase of a step, for a chunk of rows
    int64_t step;
    int phase, chunk;
};

struct Assignment {                         // the work of a block, and of this thread in it
    int unit, chunks;                       // the thread's unit, which may exceed H; chunks of the team
    int64_t steps;                          // of the team: the largest number of steps of its rows
    int64_t first_row, end_row;             // of the team
    unsigned *counters;                     // one per chunk: how many times blocks of the team have finished it
};
static constexpr int COUNTER = 32;          // words from one counter to the next: a cache line each
// Words for all counters: one per chunk, and there are at most as many chunks as tiles of rows.
static int64_t counter_words(int64_t B) { return blocks_for<int64_t>(B, ROWS) * COUNTER; }

DEVICE Assignment assignment_of(const Partition &p, const Sequences &in, unsigned *counters) {
    const int team = blockIdx.x / p.team;
    Assignment own;
    own.unit = blockIdx.x % p.team * p.units + threadIdx.x % p.units;
    own.first_row = int64_t(team) * p.tiles * ROWS;
    own.end_row = min(own.first_row + int64_t(p.tiles) * ROWS, p.B);
    const int chunk = p.chunk * ROWS;
    own.chunks = int((own.end_row - own.first_row + chunk - 1) / chunk);
    own.counters = counters + int64_t(team) * p.tiles * COUNTER;
    own.steps = in.offsets ? 0 : in.T;
    for (int64_t row = own.first_row; row < own.end_row && in.offsets; row++) own.steps = max(own.steps, in.length(row));
    return own;
}

// The rows of a chunk: `count` rows of the batch, starting at row `from`.
struct RowRange {
    int64_t from;
    int count;
};
DEVICE RowRange rows_of(const Partition &p, const Assignment &own, int chunk) {
    const int64_t from = own.first_row + int64_t(chunk) * p.chunk * ROWS;
    return {from, int(min(own.end_row - from, int64_t(p.chunk * ROWS)))};
}

// Prepare the exchange, and wait until this block has stored its weights, and all blocks that it exchanges with are ready.
template <class T> DEVICE void start(const Partition &p, const Assignment &own, T *rows, bool exchange) {
    if (p.padded != p.H)                                               // nothing overwrites the zeros of the padding
        for (int i = threadIdx.x; i < p.held * p.stride; i += THREADS) rows[i] = as<T>(0.0f);
    if (!exchange) return __syncthreads();
    if (p.cluster) return cluster_sync();
    if (blockIdx.x % p.team == 0)
        for (int i = threadIdx.x; i < own.chunks; i += THREADS) own.counters[i * COUNTER] = 0;
    grid_sync();
}

// In a cluster: where a block has the rows of a chunk, of the stage-th phase since the first step.
template <class T> DEVICE T *rows_in_cluster(T *rows, const Partition &p, int64_t stage, int chunk) {
    return rows + ((stage & 1) * (p.held / 2) + chunk * p.chunk * ROWS) * p.stride;
}
// Store a result of this thread for all blocks of the team; each starts with another block.
template <class T> DEVICE void share(const Partition &p, const Assignment &own, T *rows, int row, int part, float value) {
    T *const to = rows + row * p.stride + part * p.padded + own.unit;
    for (int i = 0; i < p.team; i++) store_shared(to, (blockIdx.x + i) % p.team, as<T>(value));
}

// Wait until each block of the team has finished a chunk `times` times.
DEVICE void wait_for(const Partition &p, const Assignment &own, int chunk, int64_t times) {
    if (threadIdx.x == 0)
        while (load_acquire(own.counters + chunk * COUNTER) < unsigned(times * p.team)) {}
    __syncthreads();
}

DEVICE void arrive(const Assignment &own, int chunk) {
    __syncthreads();
    if (threadIdx.x == 0) add_release(own.counters + chunk * COUNTER, 1);
}

// Copy rows of `ld` elements to shared memory: from each, `parts` parts of H elements, the first at column `first`.  The zeros
// that pad each part to whole segments are already there.  A third part skips one: of dr dz dn du it is du.
// at(i) is the index of the i-th row; a row with a negative index is not copied, and its products must not be used.
template <class T, class From, class At>
DEVICE void load(T *to, const From *from, int64_t ld, int count, At at, int first, int parts, const Partition &p) {
    constexpr int WIDE = WIDEST<T>;
    // then every row and part is aligned to 16 bytes
    const bool whole = std::is_same_v<T, From> && p.H % WIDE == 0 && uintptr_t(from) % 16 == 0;
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < count; row += WARPS) {
        const int64_t index = at(row);
        for (int part = 0; part < parts && index >= 0; part++) {
            const From *const source = from + index * ld + first + (part + part / 2) * p.H;
            T *const target = to + row * p.stride + part * p.padded;
            if (whole) {
                for (int k = lane * WIDE; k < p.H; k += 32 * WIDE) cp_async16(target + k, source + k);
            } else {
                for (int k = lane; k < p.H; k += 32) target[k] = as<T>(as_float(source[k]));
            }
        }
    }
    cp_async_commit();
}

DEVICE Item next_item(Item item, const Assignment &own, int phases) {
    if (++item.chunk < own.chunks) return item;
    item.chunk = 0;
    if (++item.phase == phases) item.phase = 0, item.step++;
    return item;
}

// run_items in a cluster.  `rows` is shared memory, and begin(item, rows) is called in the first stage only: in the others the
// rows are there.  An item stores to rows that all blocks have read: they have arrived after the item that did, at least one
// wait ago.  With several chunks, that holds even if a thread waits only after its next item.
template <class T, class Fetch, class Begin, class Finish>
DEVICE void run_items_in_cluster(const Partition &p, const Assignment &own, int64_t items, int phases, T *rows, Fetch fetch,
                                 Begin begin, Finish finish) {
    Item item = {0, 0, 0};
    bool arrived = false;                                              // and not yet waited
    for (int64_t i = 0; i < items; i++, item = next_item(item, own, phases)) {
        const auto fetched = fetch(item);
        const int64_t stage = item.step * phases + item.phase;
        T *const from = rows_in_cluster(rows, p, stage, item.chunk);
        const bool onward = i + own.chunks < items;                    // whether another item reads the results
        if (arrived && own.chunks == 1) {
            cluster_wait();
            arrived = false;
        }
        if (stage == 0) begin(item, from);
        cp_async_wait<0>();
        __syncthreads();
        finish(item, from, fetched, onward ? rows_in_cluster(rows, p, stage + 1, item.chunk) : nullptr);
        if (arrived) cluster_wait();
        arrived = onward;
        if (arrived) cluster_arrive();
    }
}

// Run `items` items: fetch(item) reads the inputs that do not depend on the team, begin(item, rows) waits for the team and
// starts to copy its results, finish(item, rows, fetched, onward) computes.  onward: NULL, or in a cluster where the rows of the
// next stage are, in each block.
template <class T, class Fetch, class Begin, class Finish>
DEVICE void run_items(const Partition &p, const Assignment &own, int64_t items, int phases, T *buffer, Fetch fetch, Begin begin,
                      Finish finish) {
    if (p.cluster) return run_items_in_cluster(p, own, items, phases, buffer, fetch, begin, finish);
    const bool ahead = p.buffers == 2 && own.chunks > 1;               // a single chunk's next item depends on this one
    T *other = buffer + (p.buffers - 1) * p.chunk * ROWS * p.stride;
    Item item = {0, 0, 0};
    for (int64_t i = 0; i < items; i++) {
        const Item next = next_item(item, own, phases);
        const auto fetched = fetch(item);
        if (i == 0 || !ahead) begin(item, buffer);
        cp_async_wait<0>();
        __syncthreads();
        if (ahead && i + 1 < items) begin(next, other);
        finish(item, buffer, fetched, static_cast<T *>(nullptr));
        arrive(own, item.chunk);
        item = next;
        T *const used = buffer;
        if (ahead) buffer = other, other = used;
    }
}

template <int U, Precision P, bool BEFORE, class T>
static __global__ void __launch_bounds__(THREADS, 1) forward_steps(const Forward<T> f, const Partition p) {
    constexpr int PHASES = BEFORE ? 2 : 1, N = BEFORE ? 2 * U : 3 * U;         // columns of the first phase
    DYN_SHARED(float, weights);
    float *const weights_n = weights + p.padded * Product<N, P>::WEIGHTS;
    T *const buffer = reinterpret_cast<T *>(weights_n + (BEFORE ? p.padded * Product<U, P>::WEIGHTS : 0));
    float *const sums = reinterpret_cast<float *>(buffer + p.held * p.stride);
    const int64_t H = p.H;
    const int segments = p.padded / SEGMENT, slices = WARPS / p.chunk, column = threadIdx.x % U;
    const Assignment own = assignment_of(p, f.in, f.counters);

    // The columns of a product are the block's units, gate after gate, starting with gate `first`.
    const auto row_of_w = [&](int first, int column, int k) {
        const int unit = blockIdx.x % p.team * U + column % U;
        if (unit >= H) return make_float4(0, 0, 0, 0);
        return f.w_hh.four(((first + column / U) * H + unit) * H + k, H - k);
    };
    store_weights<N, P>(weights, segments, [&](int column, int k) { return row_of_w(0, column, k); });
    if (BEFORE) store_weights<U, P>(weights_n, segments, [&](int column, int k) { return row_of_w(2, column, k); });
    const bool mine = own.unit < H;
    const auto bias = [&](int gate) { return mine ? f.b_hh[gate * H + own.unit] : 0.0f; };
    const float b_r = bias(0), b_z = bias(1), b_n = bias(2);
    if (f.in.offsets && blockIdx.x == 0) check_offsets(f.in, threadIdx.x, THREADS, Who::gru_forward, f.faults);
    for (int64_t row = own.first_row + threadIdx.x / U; row < own.end_row && mine && f.last; row += THREADS / U)
        if (f.in.length(row) == 0) f.last[row * H + own.unit] = given(f.h0, row * H + own.unit);
    start(p, own, buffer, p.T * PHASES > 1);

    const auto fetch_row = [&](const Item &item, RowRange rows, int row) {
        if (!mine || row >= rows.count) return GateInputs{};
        const int64_t sequence = rows.from + row, at = f.in.row(item.step, sequence);
        if (at < 0) return GateInputs{};
        const float h = f.before(item.step, sequence, own.unit, H);
        GateInputs k = gate_inputs(f.a + at * f.a_row + own.unit, h, H);
        if (BEFORE && item.phase) k.z = f.z(at, sequence, own.unit, H);
        return k;
    };
    run_items(
        p, own, own.steps * PHASES * own.chunks, PHASES, buffer,
        [&](const Item &item) { return fetch_row(item, rows_of(p, own, item.chunk), threadIdx.x / U); },
        [&](const Item &item, T *to) {
            const RowRange rows = rows_of(p, own, item.chunk);
            const auto row_at = [&](int64_t t) { return [=, &f](int row) { return f.in.row(t, rows.from + row); }; };
            const auto now = row_at(item.step);                                // a row after its end is not copied
            const auto before = [&](int row) { return now(row) < 0 ? -1 : f.in.row(item.step - 1, rows.from + row); };
            if (item.step || item.phase) wait_for(p, own, item.chunk, item.step * PHASES + item.phase);
            if (BEFORE && item.phase) load(to, f.gates, 4 * H, rows.count, now, 3 * p.H, 1, p);
            else if (item.step) load(to, f.h, H, rows.count, before, 0, 1, p);
            else if (f.h0) load(to, f.h0, H, rows.count, [&](int row) { return rows.from + row; }, 0, 1, p);
        },
        [&](const Item &item, const T *from, GateInputs next, T *onward) {
            const RowRange rows = rows_of(p, own, item.chunk);
            const bool zeros = item.phase == 0 && !item.step && !f.h0;         // h[-1] = 0: only the bias remains
            if (BEFORE && item.phase) multiply<U, P>(sums, weights_n, from, p.stride, segments, slices);
            else if (!zeros) multiply<N, P>(sums, weights, from, p.stride, segments, slices);
            __syncthreads();
            const auto product = [&](int row, int gate) {
                return zeros ? 0.0f : total<N, P>(sums, slices, row, gate * U + column);
            };
            for (int row = threadIdx.x / U; row < rows.count; row += THREADS / U) {
                const GateInputs k = next;
                next = fetch_row(item, rows, row + THREADS / U);
                const int64_t at = f.in.row(item.step, rows.from + row);
                if (!mine || at < 0) continue;
                T *const h = f.h + at * H + own.unit, *const gate = f.gates + at * 4 * H + own.unit;
                float result;
                if constexpr (!BEFORE)
                    result = after_gates(h, gate, H, k, b_r + product(row, 0), b_z + product(row, 1), b_n + product(row, 2));
                else if (item.phase) result = before_gates_2(h, gate, H, k, b_n + total<U, P>(sums, slices, row, column));
                else {
                    const ResetBefore of = before_gates_1(gate, H, k, b_r + product(row, 0), b_z + product(row, 1));
                    f.keep_z(rows.from + row, own.unit, H, of.z);
                    result = of.u;
                }
                if (onward) share(p, own, onward, row, 0, result);
                const bool has_h = !BEFORE || item.phase, is_last = item.step == f.in.length(rows.from + row) - 1;
                if (has_h) f.keep(rows.from + row, own.unit, H, result);
                if (f.last && has_h && is_last) f.last[(rows.from + row) * H + own.unit] = result;
            }
        });
}

template <int U, Precision P, bool BEFORE, class T>
static __global__ void __launch_bounds__(THREADS, 1) backward_steps(const Backward<T> b, const Partition p) {
    constexpr int PHASES = BEFORE ? 2 : 1;
    DYN_SHARED(float, weights);
    float *const weights_n = weights + 2 * p.padded * Product<U, P>::WEIGHTS;
    T *const buffer = reinterpret_cast<T *>(weights + 3 * p.padded * Product<U, P>::WEIGHTS);
    float *const sums = reinterpret_cast<float *>(buffer + p.held * p.stride);
    const int64_t H = p.H;
    const int segments = p.padded / SEGMENT, slices = WARPS / p.chunk;
    const Assignment own = assignment_of(p, b.in, b.counters);
    // Items per step whose h[t-1] needs a gradient: one with reset after the product, two with reset before it.  The first of
    // the two is needed for dr even if h[t-1] needs no gradient.  A team of empty sequences has one step, for dh0.
    const int64_t all = max(own.steps, int64_t(1)), end = all - 1, steps = b.dh0 ? all : end;
    const int64_t items = (BEFORE ? steps + all : steps) * own.chunks;

    // k runs over the rows of r, then z, then n, each padded
    store_weights<U, P>(weights, 3 * segments, [&](int column, int k) {
        const int unit = blockIdx.x % p.team * U + column;
        const int in_gate = k % p.padded;
        const int64_t w = (k / p.padded * H + in_gate) * H + unit;
        const auto at = [&](int i) { return unit < H && in_gate + i < H ? b.w_hh.at(w + i * H) : 0.0f; };
        return make_float4(at(0), at(1), at(2), at(3));
    });
    const bool mine = own.unit < H;
    start(p, own, buffer, b.dh0 || BEFORE || p.T > 1);     // all teams or none

    const auto fetch_row = [&](int64_t t, RowRange rows, int row) {
        return mine && row < rows.count ? saved(b, t, rows.from + row, own.unit) : Saved{};
    };
    // The operand of the next product: dr dz du of a step, or with reset before it dn, then dr dz.
    const auto share_gates = [&](T *to, int row, const GateGradients &g) {
        share(p, own, to, row, 0, BEFORE ? g.n : g.r);
        if (!BEFORE) share(p, own, to, row, 1, g.z), share(p, own, to, row, 2, g.u);
    };
    for (int chunk = 0; chunk < own.chunks; chunk++) {                       // the last step
        const RowRange rows = rows_of(p, own, chunk);
        for (int row = threadIdx.x / U; row < rows.count && mine; row += THREADS / U) {
            const Saved s = fetch_row(end, rows, row);
            const GateGradients g = back_gates<BEFORE>(b, end, rows.from + row, own.unit, s, s.d);
            if (p.cluster) share_gates(rows_in_cluster(buffer, p, 0, chunk), row, g);
        }
        if (!p.cluster) arrive(own, chunk);
    }
    if (p.cluster) cluster_sync();
    // An item multiplies the gradients of the gates of step t.  The last phase of a step yields the gradient of h[t-1], from
    // which the gradients of the gates of step t - 1 follow.
    run_items(
        p, own, items, PHASES, buffer,
        [&](const Item &item) {
            const int64_t t = end - item.step;
            return fetch_row(item.phase == PHASES - 1 && t ? t - 1 : t, rows_of(p, own, item.chunk), threadIdx.x / U);
        },
        [&](const Item &item, T *to) {
            if (p.cluster) return;                                             // shared above
            const RowRange rows = rows_of(p, own, item.chunk);
            const auto at = [&](int row) { return b.in.row(end - item.step, rows.from + row); };
            wait_for(p, own, item.chunk, item.step * PHASES + item.phase + 1);
            if (!BEFORE) load(to, b.dgates, 4 * H, rows.count, at, 0, 3, p);   // dr dz du
            else if (item.phase == 0) load(to, b.dgates, 4 * H, rows.count, at, 2 * p.H, 1, p);        // dn
            else load(to, b.dgates, 4 * H, rows.count, at, 0, 2, p);           // dr dz
        },
        [&](const Item &item, const T *from, Saved next, T *onward) {
            const RowRange rows = rows_of(p, own, item.chunk);
            const int64_t t = end - item.step;
            const bool last = item.phase == PHASES - 1;                        // of the step
            const int parts = !BEFORE ? 3 : last ? 2 : 1;
            multiply<U, P>(sums, BEFORE && !last ? weights_n : weights, from, p.stride, parts * segments, slices);
            __syncthreads();
            for (int row = threadIdx.x / U; row < rows.count; row += THREADS / U) {
                const Saved s = next;
                next = fetch_row(last && t ? t - 1 : t, rows, row + THREADS / U);
                if (!mine) continue;
                const int64_t in_batch = rows.from + row, state = in_batch * H + own.unit;
                const bool valid = b.in.row(t, in_batch) >= 0;     // otherwise step t - 1 is the last, or there is none
                const float product = valid ? total<U, P>(sums, slices, row, threadIdx.x % U) : 0.0f;
                if (!last) {
                    const GateGradients g = back_reset(b, t, in_batch, own.unit, s, product);
                    if (!onward) continue;
                    share(p, own, onward, row, 0, g.r);
                    if (!valid) continue;
                    const int64_t dz = (b.in.row(t, in_batch) * 4 + 1) * H + own.unit;
                    share(p, own, onward, row, 1, as_float(b.dgates[dz]));
                } else if (t) {
                    const GateGradients g = back_gates<BEFORE>(b, t - 1, in_batch, own.unit, s, s.d + product);
                    if (onward) share_gates(onward, row, g);
                } else b.dh0[state] = valid ? b.carry[state] + product : given(b.dh_last, state);
            }
        });
}

// ---- launches -----------------------------------------------------------------------------------------------------
// The same partition with each team as a cluster, or `cluster` is false: the device has no clusters, the team is not a size
// that every such device supports, its rows do not fit twice, or the device would run some clusters after others, which takes
// longer than an exchange through global memory.
template <class Kernel> static Partition with_clusters(Partition p, Kernel kernel) {
    p.cluster = false;
    const Partition without = p;
    if (!pyops_has_hopper() || pyops_exchange_now() != Exchange::by_device) return without;
    if (p.team != 2 && p.team != 4 && p.team != 8) return without;
    p.held = 2 * p.most_chunks() * p.chunk * ROWS;
    p.cluster = p.shared() <= size_t(pyops_shared_memory()) && clusters_at_once(kernel, p.team, THREADS, p.shared()) >= p.teams;
    return p.cluster ? p : without;
}

// exchange: blocks wait for each other, so all of them must be resident (a cooperative launch), or at least those of a cluster.
template <class Arguments>
static cudaError_t launch_steps(void (*kernel)(Arguments, Partition), const Arguments &arguments, const Partition &partition,
                                bool exchange, void *stream) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, pyops_shared_memory());
    if (error != cudaSuccess) return error;
    const Partition p = exchange ? with_clusters(partition, kernel) : partition;
    const unsigned blocks = unsigned(p.teams * p.team);
    const cudaStream_t in = stream_of(stream);
    if (p.cluster) return LAUNCH_CLUSTER(p.team, kernel, blocks, THREADS, p.shared(), in, arguments, p);
    return exchange ? LAUNCH_COOP(kernel, blocks, THREADS, p.shared(), in, arguments, p)
                    : LAUNCH(kernel, blocks, THREADS, p.shared(), in, arguments, p);
}

// Call launch(units, precision, before), each an integral_constant of the value.
template <class T, class Launch> static cudaError_t with_constants(int units, bool before, Launch launch) {
    const auto with_before = [&](auto u, auto p) {
        return before ? launch(u, p, std::true_type()) : launch(u, p, std::false_type());
    };
    const auto with_precision = [&](auto u) {
        using Bf16 = std::integral_constant<Precision, Precision::bf16>;
        if constexpr (std::is_same_v<T, bf16>) {
            return with_before(u, Bf16());
        } else {
            switch (precision_of<T>()) {
            case Precision::tf32: return with_before(u, std::integral_constant<Precision, Precision::tf32>());
            case Precision::bf16: return with_before(u, Bf16());
            default:              return with_before(u, std::integral_constant<Precision, Precision::fp32>());
            }
        }
    };
    switch (units) {
    case 8:  return with_precision(std::integral_constant<int, 8>());
    case 16: return with_precision(std::integral_constant<int, 16>());
    default: return with_precision(std::integral_constant<int, 32>());
    }
}

template <class T> static cudaError_t launch_forward(const Forward<T> &f, const Partition &p, bool before, void *stream) {
    return with_constants<T>(p.units, before, [&](auto units, auto precision, auto before) {
        return launch_steps(forward_steps<units, precision, before, T>, f, p, p.T > 1 || before, stream);
    });
}

template <class T> static cudaError_t launch_backward(const Backward<T> &b, const Partition &p, bool before, void *stream) {
    return with_constants<T>(p.units, before, [&](auto units, auto precision, auto before) {
        return launch_steps(backward_steps<units, precision, before, T>, b, p, p.T > 1 || b.dh0 || before, stream);
    });
}

}
