// embedding.cu - rows of a table by index, and their gradient; also with positions and dropout.
//
// Forward: a warp copies a row, or adds a position to it and drops some of its elements.
//
// Backward: a token that occurs several times adds several gradients, in the order of its positions.  So one warp must have
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
#include "block.cuh"
#include "compact.cuh"
#include "dropout.cuh"
#include "real.cuh"

namespace {
static constexpr int THREADS = 256;
static constexpr int GROUP_THREADS = 512;
static constexpr int CHUNK = 65536;                     // positions per pair of launches: every class scans all of them
static constexpr int IN_CLASS = 64;                     // approximate number of positions in a class
static constexpr int MOST_BITS = 9;                     // of the index of a class

DEVICE bool in_table(int32_t id, int64_t V) { return id >= 0 && id < V; }

// ---- forward ---------------------------------------------------------------------------------------------------
template <class T>
static __global__ void __launch_bounds__(THREADS)
    copy_rows(T *y, const float *weight, const int32_t *ids, FaultRecord *faults, int64_t R, int64_t V, int64_t E) {
    const bool whole = ((uintptr_t(y) | uintptr_t(weight)) & 15) == 0 && E % 4 == 0;
    const int lane = threadIdx.x & 31;
    for (int64_t r = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / 32; r < R; r += int64_t(gridDim.x) * (THREADS / 32)) {
        const int32_t id = ids[r];
        if (!in_table(id, V)) {
            if (lane == 0) report(faults, Fault::embedding_id, Who::embedding_forward, r, id, V - 1);
            for (int64_t e = lane; e < E; e += 32) y[r * E + e] = as<T>(0.0f);
        } else if (whole) {
#pragma unroll 4
            for (int64_t e = 4 * lane; e < E; e += 4 * 32) store_reals<4>(y + r * E + e, load_reals<4>(weight + id * E + e));
        } else {
            for (int64_t e = lane; e < E; e += 32) y[r * E + e] = as<T>(weight[id * E + e]);
        }
    }
}

// The same with positions and dropout; positions may be NULL.
struct Positions {
    const float *table;
    const int32_t *positions;
    int64_t longest;
    float scale;
};
template <class T>
static __global__ void __launch_bounds__(THREADS)
    look_up(T *y, const float *weight, const int32_t *ids, Positions add, Dropout dropout, FaultRecord *faults, int64_t R,
            int64_t V, int64_t E) {
    const Who who = Who::embedding_positions_forward;
    const bool whole = ((uintptr_t(y) | uintptr_t(weight) | uintptr_t(add.table)) & 15) == 0 && E % 4 == 0;
    const int lane = threadIdx.x & 31;
    for (int64_t r = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / 32; r < R; r += int64_t(gridDim.x) * (THREADS / 32)) {
        const int32_t id = ids[r], position = add.positions ? add.positions[r] : 0;
        const bool has_position = position >= 0 && position < add.longest;
        if (lane == 0 && !in_table(id, V)) report(faults, Fault::embedding_id, who, r, id, V - 1);
        if (lane == 0 && !has_position) report(faults, Fault::position, who, r, position, add.longest - 1);
        const float *const from = in_table(id, V) ? weight + id * E : nullptr;
        const float *const at = has_position ? add.table + position * E : nullptr;
        const auto row = [&](auto width) {
            constexpr int WIDTH = decltype(width)::value;
#pragma unroll 4
            for (int64_t e = WIDTH * lane; e < E; e += WIDTH * 32) {
                const Pack<float, WIDTH> x = from ? load_reals<WIDTH>(from + e) : Pack<float, WIDTH>{};
                Pack<float, WIDTH> sum = at ? load_reals<WIDTH>(at + e) : Pack<float, WIDTH>{};
#pragma unroll
                for (int w = 0; w < WIDTH; w++) sum.at[w] = add.scale * x.at[w] + sum.at[w];
                if (dropout.step) sum = dropout.add(Pack<float, WIDTH>{}, sum, r * E + e);
                store_reals<WIDTH>(y + r * E + e, sum);
            }
        };
        if (whole) row(std::integral_constant<int, 4>());
        else row(std::integral_constant<int, 1>());
    }
}

// ---- backward --------------------------------------------------------------------------------------------------
DEVICE int class_of(int32_t id, int bits) { return bits ? (uint32_t(id) * 2654435769u) >> (32 - bits) : 0; }

struct Groups {                                         // in the workspace of the library, for the launches of one call
    int32_t position[CHUNK], id[CHUNK];                 // sorted by class, then by position
    int32_t order[CHUNK], length[CHUNK];              // sorted by token; length: count at its first position, 0 at the others
};

// ids has R positions, the first of which is position `first` of the call.  A block for each of the 2^bits classes.
static __global__ void __launch_bounds__(GROUP_THREADS)
    group(Groups *groups, const int32_t *ids, Who who, FaultRecord *faults, int64_t first, int R, int64_t V, int bits) {
    SHARED(int, counts, [GROUP_THREADS / 32]);
    const int own = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int before = 0;                                     // positions in lower classes
    for (int r = threadIdx.x; r < R; r += GROUP_THREADS) {
        const int32_t id = ids[r];
        if (in_table(id, V)) before += class_of(id, bits) < own;
        else if (own == 0) report(faults, Fault::embedding_id, who, first + r, id, V - 1);
    }
    before = block_sum(before, counts);

    int32_t *const position = groups->position + before, *const id = groups->id + before;
    int32_t *const order = groups->order + before, *const length = groups->length + before;
    const int n = block_compact(
        R, counts, [&](int r) { return in_table(ids[r], V) && class_of(ids[r], bits) == own; },
        [&](int rank, int r) {
            position[rank] = r;
            id[rank] = ids[r];
        });
    if (own == int(gridDim.x) - 1)                      // invalid ids leave unused entries at the end
        for (int p = before + n + threadIdx.x; p < R; p += GROUP_THREADS) groups->length[p] = 0;

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

// The gradients of rows of the table, from dy: element i of the chunk, which begins at element `first` of the call.
template <class T> struct Plain {
    const T *dy;
    __device__ __forceinline__ float operator()(int64_t i) const { return as_float(dy[i]); }
};
template <class T> struct Dropped {                     // of look_up
    const T *dy;
    Dropout dropout;
    float scale;
    int64_t first;
    __device__ __forceinline__ float operator()(int64_t i) const {
        Pack<float, 1> x = {{as_float(dy[i])}};
        if (dropout.step) x = dropout.add(Pack<float, 1>{}, x, first + i);
        return __fmul_rn(scale, x.at[0]);               // not contracted with the sum: the bits of separate kernels
    }
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
    add(float *dweight, int32_t *touched, const Groups *groups, F dy, const int32_t *ids, int R, int64_t E, int slices) {
    const int64_t index = (blockIdx.x * int64_t(THREADS) + threadIdx.x) / 32;
    const int p = static_cast<int>(index / slices), lane = threadIdx.x & 31;
    const int n = p < R ? groups->length[p] : 0;
    if (n == 0) return;
    const int32_t *const order = groups->order + p;
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
}

extern "C" pyops_status pyops_embedding_forward(pyops_real *y, const float *weight, const int32_t *ids, int64_t R, int64_t V,
                                                int64_t E, void *stream) {
    const pyops_status status = check_embedding("embedding_forward", R, V, E);
    if (status || R == 0) return status;
    return with_type(
        "embedding_forward",
        [&](auto type) {
            using T = decltype(type);
            return pyops_launched("embedding_forward",
                                  LAUNCH(copy_rows<T>, grid_for(R * 32, THREADS), THREADS, 0, stream_of(stream), elements<T>(y),
                                         weight, ids, pyops_faults(), R, V, E),
                                  stream);
        },
        y);
}

namespace {
// gradient(first, T()): the functor of the chunk from position `first` on, for dy of type T.
template <class Gradient>
static pyops_status launch_backward(const char *name, Who who, float *dweight, int32_t *touched, const pyops_real *dy,
                                    const int32_t *ids, int64_t R, int64_t V, int64_t E, void *stream, Gradient gradient) {
    Groups *const groups = static_cast<Groups *>(pyops_workspace(sizeof(Groups)));
    if (!groups) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for the order of the positions", name);
    const int64_t slices = blocks_for<int64_t>(E, 32);
    Launches launches;
    for (int64_t first = 0; first < R; first += CHUNK) {
        const int rows = static_cast<int>(R - first < CHUNK ? R - first : CHUNK);
        int bits = 0;
        while (bits < MOST_BITS && IN_CLASS << bits < rows) bits++;
        launches << LAUNCH(group, 1u << bits, GROUP_THREADS, 0, stream_of(stream), groups, ids + first, who, pyops_faults(),
                           first, rows, V, bits);
        const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(rows * slices * 32, THREADS));
        const auto launch_add = [&](auto type) {
            const auto of_chunk = gradient(first, type);
            launches << LAUNCH(add<decltype(gradient(first, type))>, blocks, THREADS, 0, stream_of(stream), dweight, touched,
                               groups, of_chunk, ids + first, rows, E, static_cast<int>(slices));
            return PYOPS_OK;
        };
        if (E) with_type(name, launch_add, dy);
    }
    return pyops_launched(name, launches.error, stream);
}
}

extern "C" pyops_status pyops_embedding_backward(float *dweight, int32_t *touched, const pyops_real *dy, const int32_t *ids,
                                                 int64_t R, int64_t V, int64_t E, void *stream) {
    const pyops_status status = check_embedding("embedding_backward", R, V, E);
    if (status || R == 0) return status;
    const auto gradient = [&](int64_t first, auto type) {
        using T = decltype(type);
        return Plain<T>{elements<T>(dy) + first * E};
    };
    return launch_backward("embedding_backward", Who::embedding_backward, dweight, touched, dy, ids, R, V, E, stream, gradient);
}

extern "C" pyops_status pyops_embedding_positions_forward(pyops_real *y, const float *weight, const int32_t *ids,
                                                          const float *table, const int32_t *positions, const int64_t *step,
                                                          int64_t R, int64_t V, int64_t E, int64_t longest, float scale,
                                                          float p, uint64_t key, void *stream) {
    const char *const who = "embedding_positions_forward";
    const pyops_status status = check_embedding_positions(who, R, V, E, longest, p);
    if (status || R == 0) return status;
    const auto launch = [&](auto type) {
        using T = decltype(type);
        return pyops_launched(who,
                              LAUNCH(look_up<T>, grid_for(R * 32, THREADS), THREADS, 0, stream_of(stream), elements<T>(y),
                                     weight, ids, Positions{table, positions, longest, scale}, dropout_of(step, p, key),
                                     pyops_faults(), R, V, E),
                              stream);
    };
    return with_type(who, launch, y);
}

extern "C" pyops_status pyops_embedding_positions_backward(float *dweight, int32_t *touched, const pyops_real *dy,
                                                           const int32_t *ids, const int64_t *step, int64_t R, int64_t V,
                                                           int64_t E, float scale, float p, uint64_t key, void *stream) {
    const char *const who = "embedding_positions_backward";
    const pyops_status status = check_embedding_positions(who, R, V, E, 1, p);
    if (status || R == 0) return status;
    const auto gradient = [&](int64_t first, auto type) {
        using T = decltype(type);
        return Dropped<T>{elements<T>(dy) + first * E, dropout_of(step, p, key), scale, first * E};
    };
    return launch_backward(who, Who::embedding_positions_backward, dweight, touched, dy, ids, R, V, E, stream, gradient);
}
