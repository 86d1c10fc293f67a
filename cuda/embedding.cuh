// embedding.cuh - rows of a table by index, and their gradient: the kernels that embedding.cu and embedding_linear.cu share.
//
// Gradient: a token that occurs several times adds several gradients, in the order of its positions.  So one warp must have
// all positions of a token.  Two launches per CHUNK of positions:
//
//   group   Tokens are distributed over classes, one block each (Fibonacci hashing puts adjacent ids into different classes:
//           Knuth, The Art of Computer Programming 3, section 6.4).  A block scans all ids and keeps the positions of its
//           class, in order; then its warps group equal tokens:
//
//               ids        7  4  7  9  4  7  2                    positions 0 to 6
//               classes    [ 0 2 4 1 5 | 3 6 ]                    tokens 4 and 7 in the first, 2 and 9 in the second
//               order      [ 1 4 0 2 5 | 6 3 ]
//               length       2 0 3 0 0   1 1                      number of positions of a token, at the first of them
//
//   add     A warp per token and 32 columns of the table adds the rows of dy in sequence to the row of dweight.  Loads do not
//           depend on the sums, so up to 32 rows are in flight at a time.
//
// No two warps write to the same address, and every sum is in the order of the positions.
#pragma once
#include "block.cuh"
#include "compact.cuh"
#include "real.cuh"

namespace embedding {
static constexpr int THREADS = 256;
static constexpr int GROUP_THREADS = 512;
static constexpr int CHUNK = 65536;                     // positions per pair of launches: every class scans all of them
static constexpr int IN_CLASS = 64;                     // approximate number of positions in a class
static constexpr int MOST_BITS = 9;                     // of the index of a class

DEVICE bool in_table(int32_t id, int64_t V) { return id >= 0 && id < V; }

// Copy rows of the table to y (R,E), a row per warp: this warp is number `warp` of `warps`.  faults NULL: do not report.
template <class T> DEVICE void copy_rows(T *y, const float *weight, const int32_t *ids, int64_t R, int64_t V, int64_t E,
                                         int64_t warp, int64_t warps, Who who, FaultRecord *faults) {
    const bool whole = ((uintptr_t(y) | uintptr_t(weight)) & 15) == 0 && E % 4 == 0;
    const int lane = threadIdx.x & 31;
    for (int64_t r = warp; r < R; r += warps) {
        const int32_t id = ids[r];
        if (!in_table(id, V)) {
            if (lane == 0 && faults) report(faults, Fault::embedding_id, who, r, id, V - 1);
            for (int64_t e = lane; e < E; e += 32) y[r * E + e] = as<T>(0.0f);
        } else if (whole) {
#pragma unroll 4
            for (int64_t e = 4 * lane; e < E; e += 4 * 32) store_reals<4>(y + r * E + e, load_reals<4>(weight + id * E + e));
        } else {
            for (int64_t e = lane; e < E; e += 32) y[r * E + e] = as<T>(weight[id * E + e]);
        }
    }
}

// ---- the positions of each token ---------------------------------------------------------------------------------
DEVICE int class_of(int32_t id, int bits) { return bits ? (uint32_t(id) * 2654435769u) >> (32 - bits) : 0; }

struct Groups {
    int32_t *position, *id;                             // sorted by class, then by position
    int32_t *order, *length;                            // sorted by token; length: count at the first position, else 0
};
static constexpr int GROUP_WORDS = 4;                   // int32 per position
// The groups of the positions from `first` on, of R in all, in memory of GROUP_WORDS * R words.
static inline Groups groups_in(int32_t *words, int64_t R, int64_t first) {
    return {words + first, words + R + first, words + 2 * R + first, words + 3 * R + first};
}

// Other work in the same launch: also(i) is called by block i of those that have no class.
struct Nothing {
    __device__ void operator()(int64_t) const {}
};

// ids has R positions; the first is position `first` of the call.  A block for each of the 2^bits classes.
template <class Also>
static __global__ void __launch_bounds__(GROUP_THREADS)
    group(const Groups groups, const int32_t *ids, Who who, FaultRecord *faults, int64_t first, int R, int64_t V, int bits,
          const Also also) {
    wait_for_last_kernel();
    SHARED(int, counts, [GROUP_THREADS / 32]);
    const int own = blockIdx.x, classes = 1 << bits, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (own >= classes) {
        also(own - classes);
        return;
    }
    int before = 0;                                     // positions in lower classes
    for (int r = threadIdx.x; r < R; r += GROUP_THREADS) {
        const int32_t id = ids[r];
        if (in_table(id, V)) before += class_of(id, bits) < own;
        else if (own == 0) report(faults, Fault::embedding_id, who, first + r, id, V - 1);
    }
    before = block_sum(before, counts);

    int32_t *const position = groups.position + before, *const id = groups.id + before;
    int32_t *const order = groups.order + before, *const length = groups.length + before;
    const int n = block_compact(
        R, counts, [&](int r) { return in_table(ids[r], V) && class_of(ids[r], bits) == own; },
        [&](int rank, int r) {
            position[rank] = r;
            id[rank] = ids[r];
        });
    if (own == classes - 1)                             // invalid ids leave unused entries at the end
        for (int p = before + n + threadIdx.x; p < R; p += GROUP_THREADS) groups.length[p] = 0;

    for (int i = warp; i < n; i += GROUP_THREADS / 32) {
        const int32_t token = id[i];
        int smaller = 0;                                // number of smaller tokens in the class: the offset of this token
        bool leads = true;                              // whether i is the first position of this token
        for (int j = 0; j < n && leads; j += 32) {
            const int32_t other = j + lane < n ? id[j + lane] : INT32_MAX;
            const unsigned same = __ballot_sync(ALL_LANES, other == token && j + lane < i);
            smaller += __popc(__ballot_sync(ALL_LANES, other < token));
            leads = same == 0;
        }
        if (!leads) continue;
        int found = 0;
        for (int j = i & ~31; j < n; j += 32) {
            const bool mine = j + lane < n && id[j + lane] == token;
            const unsigned same = __ballot_sync(ALL_LANES, mine);
            const int rank = found + __popc(same & ((1u << lane) - 1));
            if (mine) order[smaller + rank] = position[j + lane];
            if (mine && rank) length[smaller + rank] = 0;
            found += __popc(same);
        }
        if (lane == 0) length[smaller] = found;
    }
}

// Launch `group` for one chunk; more: number of blocks for `also`.
template <class Also>
static cudaError_t launch_group(const Groups &groups, const int32_t *ids, Who who, int64_t first, int64_t rows, int64_t V,
                                const Also &also, int64_t more, cudaStream_t stream) {
    int bits = 0;
    while (bits < MOST_BITS && IN_CLASS << bits < rows) bits++;
    const unsigned blocks = (1u << bits) + static_cast<unsigned>(more);
    return LAUNCH_DEPENDENT(group<Also>, blocks, GROUP_THREADS, 0, stream, groups, ids, who, pyops_faults(), first,
                            static_cast<int>(rows), V, bits, also);
}

// ---- the sums ----------------------------------------------------------------------------------------------------
// The gradients of rows of the table, from dy: element i of the chunk, which begins at element `first` of the call.
template <class T> struct Plain {
    const T *dy;
    __device__ __forceinline__ float operator()(int64_t i) const { return as_float(dy[i]); }
};

// Add column e of rows at[0], at[1], ... at[N - 1] of dy to sum, in this order; at[i] is the value of lane from + i.
template <int N, class F> DEVICE float add_rows(float sum, const F &dy, int64_t e, int32_t at, int from, int64_t E,
                                                bool inside) {
    float value[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int64_t r = __shfl_sync(ALL_LANES, at, from + i);
        value[i] = inside ? dy(r * E + e) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < N; i++) sum += value[i];
    return sum;
}

// dy: of the chunk.  A warp per entry of `order` and slice of 32 columns.
template <class F>
static __global__ void __launch_bounds__(THREADS)
    add(float *dweight, int32_t *touched, const Groups groups, F dy, const int32_t *ids, int R, int64_t E, int slices) {
    wait_for_last_kernel();
    const int64_t index = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / 32;
    const int p = static_cast<int>(index / slices), lane = threadIdx.x & 31;
    const int n = p < R ? groups.length[p] : 0;
    if (n == 0) return;
    const int32_t *const order = groups.order + p;
    const int64_t e = index % slices * 32 + lane;
    const bool inside = e < E;
    int32_t next = lane < n ? order[lane] : 0;
    const int64_t offset = ids[__shfl_sync(ALL_LANES, next, 0)] * E + e;
    // the first and the last of the 32 columns; atomic, since rows of other warps may be in the same block
    if (touched && inside && (lane == 0 || lane == 31 || e == E - 1))
        atomicOr(&touched[offset / PYOPS_GRAD_BLOCK], PYOPS_TOUCHED);
    float *const to = dweight + offset;
    float sum = inside ? *to : 0.0f;
    for (int i = 0; i < n; i += 32) {
        const int32_t now = next;
        next = i + 32 + lane < n ? order[i + 32 + lane] : 0;
        int done = 0;
        if (i + 32 <= n) {
            sum = add_rows<32>(sum, dy, e, now, 0, E, inside);
            continue;
        }
        for (; i + done + 4 <= n; done += 4) sum = add_rows<4>(sum, dy, e, now, done, E, inside);
        for (; i + done < n; done++) sum = add_rows<1>(sum, dy, e, now, done, E, inside);
    }
    if (inside) *to = sum;
}

// Launch `add` for one chunk; dy and ids begin at its first position.
template <class F> static cudaError_t launch_add(float *dweight, int32_t *touched, const Groups &groups, const F &dy,
                                                 const int32_t *ids, int64_t rows, int64_t E, cudaStream_t stream) {
    const int64_t slices = blocks_for<int64_t>(E, 32), blocks = blocks_for<int64_t>(rows * slices * 32, THREADS);
    if (!blocks) return cudaSuccess;
    return LAUNCH_DEPENDENT(add<F>, static_cast<unsigned>(blocks), THREADS, 0, stream, dweight, touched, groups, dy, ids,
                            static_cast<int>(rows), E, static_cast<int>(slices));
}
}
