// embedding.cu - rows of a table by index, and their gradient; also with positions and dropout.
//
// Forward: a warp copies a row, or adds a position to it and drops some of its elements.  Backward: embedding.cuh.
#include "dropout.cuh"
#include "embedding.cuh"

using namespace embedding;

namespace {
// ---- forward ---------------------------------------------------------------------------------------------------
template <class T>
static __global__ void __launch_bounds__(THREADS)
    copy(T *y, const float *weight, const int32_t *ids, FaultRecord *faults, int64_t R, int64_t V, int64_t E) {
    wait_for_last_kernel();
    copy_rows(y, weight, ids, R, V, E, (blockIdx.x * int64_t(THREADS) + threadIdx.x) / 32, int64_t(gridDim.x) * (THREADS / 32),
              Who::embedding_forward, faults);
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
    wait_for_last_kernel();
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
                                  LAUNCH_DEPENDENT(copy<T>, grid_for(R * 32, THREADS), THREADS, 0, stream_of(stream),
                                                   elements<T>(y), weight, ids, pyops_faults(), R, V, E),
                                  stream);
        },
        y);
}

namespace {
// gradient(first, T()): the functor of the chunk from position `first` on, for dy of type T.
template <class Gradient>
static pyops_status launch_backward(const char *name, Who who, float *dweight, int32_t *touched, const pyops_real *dy,
                                    const int32_t *ids, int64_t R, int64_t V, int64_t E, void *stream, Gradient gradient) {
    const int64_t most = R < CHUNK ? R : CHUNK;
    int32_t *const words = static_cast<int32_t *>(pyops_workspace(sizeof(int32_t) * GROUP_WORDS * most));
    if (!words) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for the order of the positions", name);
    const Groups groups = groups_in(words, most, 0);
    Launches launches;
    for (int64_t first = 0; first < R; first += CHUNK) {
        const int64_t rows = R - first < CHUNK ? R - first : CHUNK;
        launches << launch_group(groups, ids + first, who, first, rows, V, Nothing(), 0, stream_of(stream));
        with_type(
            name,
            [&](auto type) {
                launches << launch_add(dweight, touched, groups, gradient(first, type), ids + first, rows, E,
                                       stream_of(stream));
                return PYOPS_OK;
            },
            dy);
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
                              LAUNCH_DEPENDENT(look_up<T>, grid_for(R * 32, THREADS), THREADS, 0, stream_of(stream),
                                               elements<T>(y), weight, ids, Positions{table, positions, longest, scale},
                                               dropout_of(step, p, key), pyops_faults(), R, V, E),
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
