// layer_norm.cu - normalise rows to mean 0 and variance 1, then scale and shift by column; with a residual sum before it, too.
//
// A row is read once and stays in the registers of a team: a warp, or a block for longer rows.  All sums over the row use
// these registers, in as many passes as accuracy requires.  A lane of the team has every n-th pack of adjacent elements: 16
// bytes, that is 4 floats or 8 bfloat16 (one access if aligned), or 1 element if rows do not consist of whole packs:
//
//     row   | pack 0 | pack 1 | ... | pack n-1 | pack n | pack n+1 | ...         n = 32 or 256 lanes of a team,
//           | lane 0 | lane 1 | ... | lane n-1 | lane 0 | lane 1   | ...         each with up to 4 or 8 packs
//
// In backward a lane has the same columns in every row of its team, and accumulates their part of dweight and dbias in
// registers too.  So blocks are persistent, as many as fit on the device; each adds the sums of its teams in order and writes
// them to `work`.  Blocks form groups of about the square root of their number.  The last block of a group to finish adds the
// sums of its blocks; the last group to finish adds the sums of all groups.  Both add in order.
// Rows too long for registers are read again in each pass, and their sums over rows are accumulated in `work`.
#include <algorithm>
#include <cmath>
#include "block.cuh"
#include "dropout.cuh"
#include "real.cuh"
#include "tickets.cuh"

namespace {
static constexpr int THREADS = 256, WARPS = THREADS / 32;

// Sum each of N values over a team of LANES threads; all of them get the sums.
template <int LANES, int N> DEVICE void row_sums(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
    if constexpr (LANES > 32) {
        SHARED(float, sums, [WARPS][N]);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) x[i] += sums[w][i];
        }
        __syncthreads();
    }
}

// Load a pack at p, in one access if `whole` (all packs are aligned to 16 bytes).  Results do not depend on `whole`.
template <int WIDTH, class T> DEVICE Pack<float, WIDTH> load(const T *p, bool whole) {
    if (whole) return load_reals<WIDTH>(p);
    Pack<float, WIDTH> x;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) x.at[k] = as_float(p[k]);
    return x;
}
template <int WIDTH, class T> DEVICE void store(T *p, const Pack<float, WIDTH> &x, bool whole) {
    if (whole) return store_reals<WIDTH>(p, x);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) p[k] = as<T>(x.at[k]);
}
// The pack as it will be read again after the store.
template <class T, int WIDTH> DEVICE Pack<float, WIDTH> stored_pack(Pack<float, WIDTH> x) {
#pragma unroll
    for (int k = 0; k < WIDTH; k++) x.at[k] = stored<T>(x.at[k]);
    return x;
}

// A lane's share of a row of T: PACKS packs of WIDTH, fewer at the end of the row.  PACKS = 0: not kept in registers but read
// again.
template <class T, int LANES_, int WIDTH_, int PACKS_> struct Share {
    using Element = T;
    static constexpr int LANES = LANES_, WIDTH = WIDTH_, PACKS = PACKS_, HELD = PACKS * WIDTH, SLOTS = HELD ? PACKS : 1;
    using Neighbours = Pack<float, WIDTH>;

    // Call f(i, c) for each pack of the lane: c is its first column, i its slot in registers.
    template <class F> static __device__ __forceinline__ void each(int64_t C, F f) {
        const int64_t first = int(threadIdx.x) % LANES * WIDTH;
        if constexpr (PACKS == 0) {
            for (int64_t c = first; c < C; c += LANES * WIDTH) f(0, c);
        } else {
#pragma unroll
            for (int i = 0; i < PACKS; i++)
                if (first + i * LANES * WIDTH < C) f(i, first + i * LANES * WIDTH);
        }
    }
    struct Row {
        const T *row;
        bool whole;
        Neighbours held[SLOTS];
        __device__ __forceinline__ Row(const T *row, bool whole) : row(row), whole(whole) {}     // nothing held yet
        __device__ __forceinline__ Row(const T *row, int64_t C, bool whole) : Row(row, whole) {
            if constexpr (PACKS > 0) {              // one branch for all packs, so that no branch separates the loads
                if (whole) each(C, [&](int i, int64_t c) { held[i] = load<WIDTH>(row + c, true); });
                else each(C, [&](int i, int64_t c) { held[i] = load<WIDTH>(row + c, false); });
            }
        }
        __device__ __forceinline__ Neighbours at(int i, int64_t c) const {
            if constexpr (PACKS > 0) return held[i];
            return load<WIDTH>(row + c, whole);
        }
    };
};

// The first row of a team, and the number of rows that the grid processes at once.
template <int LANES> DEVICE int64_t first_row() { return (blockIdx.x * int64_t(THREADS) + threadIdx.x) / LANES; }
template <int LANES> DEVICE int64_t rows_at_once() { return int64_t(gridDim.x) * (THREADS / LANES); }

// ---- forward ----------------------------------------------------------------------------------------------------
// RESIDUAL: normalise sum = x + dropout(branch) instead of x, and store it.
template <class S, bool RESIDUAL>
static __global__ void __launch_bounds__(THREADS)
    forward(typename S::Element *y, typename S::Element *total, float *mean, float *rstd, const typename S::Element *x,
            const typename S::Element *branch, Dropout dropout, const float *weight, const float *bias, int64_t R, int64_t C,
            float eps, bool whole) {
    wait_for_last_kernel();
    using Neighbours = typename S::Neighbours;
    const float share = 1.0f / static_cast<float>(C);
    for (int64_t r = first_row<S::LANES>(); r < R; r += rows_at_once<S::LANES>()) {
        const auto row = [&] {
            if constexpr (!RESIDUAL) {
                return typename S::Row(x + r * C, C, whole);
            } else {
                const typename S::Row in(x + r * C, C, whole), added(branch + r * C, C, whole);
                typename S::Row both(total + r * C, whole);
                S::each(C, [&](int i, int64_t c) {
                    const Neighbours out = stored_pack<typename S::Element>(
                        dropout.add(in.at(i, c), added.at(i, c), r * C + c));
                    if constexpr (S::PACKS > 0) both.held[i] = out;
                    store<S::WIDTH>(total + r * C + c, out, whole);
                });
                return both;
            }
        }();
        float sum[1] = {};
        S::each(C, [&](int i, int64_t c) {
            const Neighbours in = row.at(i, c);
#pragma unroll
            for (int k = 0; k < S::WIDTH; k++) sum[0] += in.at[k];
        });
        row_sums<S::LANES>(sum);
        const float first = sum[0] * share;
        float sums[2] = {};                // of the deviations, which corrects the rounding of the mean, and of their squares
        S::each(C, [&](int i, int64_t c) {
            const Neighbours in = row.at(i, c);
#pragma unroll
            for (int k = 0; k < S::WIDTH; k++) {
                const float d = in.at[k] - first;
                sums[0] += d;
                sums[1] += d * d;
            }
        });
        row_sums<S::LANES>(sums);
        const float m = first + sums[0] * share, v = (sums[1] - sums[0] * (sums[0] * share)) * share;
        const float s = 1.0f / sqrtf((v < 0.0f ? 0.0f : v) + eps);
        S::each(C, [&](int i, int64_t c) {
            const Neighbours in = row.at(i, c), w = load<S::WIDTH>(weight + c, whole), b = load<S::WIDTH>(bias + c, whole);
            Neighbours out;
#pragma unroll
            for (int k = 0; k < S::WIDTH; k++) out.at[k] = (in.at[k] - m) * s * w.at[k] + b.at[k];
            store<S::WIDTH>(y + r * C + c, out, whole);
        });
        if (threadIdx.x % S::LANES == 0) {
            mean[r] = m;
            rstd[r] = s;
        }
    }
}

// ---- backward ---------------------------------------------------------------------------------------------------
// Resident blocks per multiprocessor: fewer, with more registers each, if a lane has more floats of a row, or a row has a block.
static constexpr int MOST_RESIDENT = 5;
template <class S> static constexpr int RESIDENT = S::HELD == 0 ? (S::WIDTH > 4 ? 3 : 4)
    : S::HELD <= 4                                              ? (S::LANES == THREADS ? 4 : MOST_RESIDENT)
    : S::HELD <= 8                                              ? 3
                                                                : 2;

// The sums of a launch over its rows.
struct RowSums {
    float *dweight, *dbias;
    float *of_block;                    // (blocks, 2, C): the contribution of each block to dweight and to dbias
    int64_t group;                      // blocks in a group; the last one may have fewer
    unsigned *tickets;                  // of the launch, then of each group

    // Add the sums of all blocks to dweight and dbias, in order.  Call after the block has written its own.
    __device__ __forceinline__ void finish(int64_t C) const {
        const int64_t first = blockIdx.x / group * group, end = first + group < gridDim.x ? first + group : gridDim.x;
        if (!block_arrives_last(tickets + 1 + blockIdx.x / group, end - first)) return;
        float *const of_group = of_block + first * 2 * C;
        for (int64_t c = threadIdx.x; c < 2 * C; c += THREADS) of_group[c] = sum_of_parts(of_group + c, end - first, 2 * C);
        const int64_t groups = blocks_for<int64_t>(gridDim.x, group);
        if (!block_arrives_last(tickets, groups)) return;
        for (int64_t c = threadIdx.x; c < 2 * C; c += THREADS) {
            const float sum = sum_of_parts(of_block + c, groups, group * 2 * C);
            if (c < C) dweight[c] += sum;
            else dbias[c - C] += sum;
        }
    }
};

// RESIDUAL: also dbranch = dropout(dx).
template <class S, bool RESIDUAL>
static __global__ void __launch_bounds__(THREADS, RESIDENT<S>)
    backward(typename S::Element *dx, typename S::Element *dbranch, RowSums over_rows, const typename S::Element *dy,
             const typename S::Element *x, Dropout dropout, const float *weight, const float *mean, const float *rstd,
             int64_t R, int64_t C, bool accumulate, bool whole) {
    wait_for_last_kernel();
    using Neighbours = typename S::Neighbours;
    constexpr int WIDTH = S::WIDTH;
    const float share = 1.0f / static_cast<float>(C);
    Neighbours dweight[S::SLOTS] = {}, dbias[S::SLOTS] = {};
    float *const sums = over_rows.of_block + blockIdx.x * 2 * C;
    if constexpr (S::PACKS == 0)
        S::each(C, [&](int, int64_t c) {
            store<WIDTH>(sums + c, Neighbours{}, whole);
            store<WIDTH>(sums + C + c, Neighbours{}, whole);
        });
    for (int64_t r = first_row<S::LANES>(); r < R; r += rows_at_once<S::LANES>()) {
        const typename S::Row row_dy(dy + r * C, C, whole), row_x(x + r * C, C, whole);
        const float m = mean[r], s = rstd[r];
        float of_g[2] = {};                                     // sums of g = dy weight, and of g xhat
        S::each(C, [&](int i, int64_t c) {
            const Neighbours d = row_dy.at(i, c), in = row_x.at(i, c), w = load<WIDTH>(weight + c, whole);
            if constexpr (S::PACKS == 0) {
                dweight[0] = load<WIDTH>(sums + c, whole);
                dbias[0] = load<WIDTH>(sums + C + c, whole);
            }
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                const float xhat = (in.at[k] - m) * s, g = d.at[k] * w.at[k];
                of_g[0] += g;
                of_g[1] += g * xhat;
                dweight[i].at[k] += d.at[k] * xhat;
                dbias[i].at[k] += d.at[k];
            }
            if constexpr (S::PACKS == 0) {
                store<WIDTH>(sums + c, dweight[0], whole);
                store<WIDTH>(sums + C + c, dbias[0], whole);
            }
        });
        row_sums<S::LANES>(of_g);
        const float a = of_g[0] * share, b = of_g[1] * share;
        S::each(C, [&](int i, int64_t c) {
            const Neighbours d = row_dy.at(i, c), in = row_x.at(i, c), w = load<WIDTH>(weight + c, whole);
            Neighbours out = accumulate ? load<WIDTH>(dx + r * C + c, whole) : Neighbours{};
#pragma unroll
            for (int k = 0; k < WIDTH; k++) out.at[k] += s * (d.at[k] * w.at[k] - a - (in.at[k] - m) * s * b);
            out = stored_pack<typename S::Element>(out);
            store<WIDTH>(dx + r * C + c, out, whole);
            if constexpr (RESIDUAL) store<WIDTH>(dbranch + r * C + c, dropout.add(Neighbours{}, out, r * C + c), whole);
        });
    }
    if constexpr (S::PACKS > 0 && S::LANES == THREADS)
        S::each(C, [&](int i, int64_t c) {
            store<WIDTH>(sums + c, dweight[i], whole);
            store<WIDTH>(sums + C + c, dbias[i], whole);
        });
    if constexpr (S::LANES == 32) {                              // add the warps first, one array after the other
        SHARED(float, of_warp, [WARPS][32 * S::HELD]);
        const auto add_warps = [&](float *to, const Neighbours(&mine)[S::SLOTS]) {
            S::each(C, [&](int i, int64_t c) {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) of_warp[threadIdx.x / 32][c + k] = mine[i].at[k];
            });
            __syncthreads();
            for (int c = threadIdx.x; c < C; c += THREADS) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += of_warp[w][c];
                to[c] = sum;
            }
            __syncthreads();
        };
        add_warps(sums, dweight);
        add_warps(sums + C, dbias);
    }
    over_rows.finish(C);
}

// ---- the functions of the ABI -----------------------------------------------------------------------------------------
// Call launch(share) with the share for rows of C columns, with at most MOST packs.
template <class T, int WIDTH, int MOST, class Launch> static cudaError_t with_share_of(int64_t C, Launch launch) {
    const int64_t packs = blocks_for<int64_t>(C, WIDTH);
    if (packs <= 32) return launch(Share<T, 32, WIDTH, 1>());
    if (packs <= 64) return launch(Share<T, 32, WIDTH, 2>());
    if constexpr (MOST >= 4)
        if (packs <= 128) return launch(Share<T, 32, WIDTH, 4>());
    if constexpr (MOST >= 8)
        if (packs <= 256) return launch(Share<T, 32, WIDTH, 8>());
    if (packs <= 256) return launch(Share<T, THREADS, WIDTH, 1>());
    if (packs <= 512) return launch(Share<T, THREADS, WIDTH, 2>());
    if constexpr (MOST >= 4)
        if (packs <= 1024) return launch(Share<T, THREADS, WIDTH, 4>());
    if constexpr (MOST >= 8)
        if (packs <= 2048) return launch(Share<T, THREADS, WIDTH, 8>());
    return launch(Share<T, THREADS, WIDTH, 0>());
}
// A lane has at most MOST packs of 4 floats in registers.
template <class T, int MOST, class Launch> static cudaError_t with_share(int64_t C, Launch launch) {
    constexpr int WIDTH = WIDEST<T>;
    return C % WIDTH == 0 ? with_share_of<T, WIDTH, MOST * 4 / WIDTH>(C, launch) : with_share_of<T, 1, MOST>(C, launch);
}

template <class T, bool RESIDUAL>
static pyops_status launch_forward(const char *who, T *y, T *total, float *mean, float *rstd, const T *x, const T *branch,
                                   Dropout dropout, const float *weight, const float *bias, int64_t R, int64_t C, float eps,
                                   void *stream) {
    if (R == 0) return PYOPS_OK;
    const bool whole = aligned(y) && aligned(total) && aligned(x) && aligned(branch) && aligned(weight) && aligned(bias);
    const cudaError_t error = with_share<T, 8>(C, [&](auto share) {
        using S = decltype(share);
        // a team per row; the hardware assigns blocks to free multiprocessors
        const int64_t blocks = std::min(blocks_for<int64_t>(R, THREADS / S::LANES), int64_t(INT32_MAX));
        return LAUNCH_DEPENDENT((forward<S, RESIDUAL>), static_cast<unsigned>(blocks), THREADS, 0, stream_of(stream), y, total,
                                mean, rstd, x, branch, dropout, weight, bias, R, C, eps, whole);
    });
    return pyops_launched(who, error, stream);
}

template <class T, bool RESIDUAL>
static pyops_status launch_backward(const char *who, T *dx, T *dbranch, float *dweight, float *dbias, const T *dy, const T *x,
                                    Dropout dropout, const float *weight, const float *mean, const float *rstd, float *work,
                                    int64_t R, int64_t C, bool accumulate, void *stream) {
    if (R == 0) return PYOPS_OK;
    const bool whole = aligned(dx) && aligned(dbranch) && aligned(dy) && aligned(x) && aligned(weight) && aligned(work);
    unsigned *const tickets = pyops_tickets();
    if (!tickets) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for counters", who);
    const cudaError_t error = with_share<T, 4>(C, [&](auto share) {
        using S = decltype(share);
        const int64_t most = int64_t(pyops_multiprocessors()) * RESIDENT<S>;
        const int64_t blocks = std::min(blocks_for<int64_t>(R, THREADS / S::LANES), most);
        const int64_t group = std::max<int64_t>(1, std::lround(std::sqrt(static_cast<double>(blocks))));
        const RowSums over_rows = {dweight, dbias, work, group, tickets};
        return LAUNCH_DEPENDENT((backward<S, RESIDUAL>), static_cast<unsigned>(blocks), THREADS, 0, stream_of(stream), dx,
                                dbranch, over_rows, dy, x, dropout, weight, mean, rstd, R, C, accumulate, whole);
    });
    return pyops_launched(who, error, stream);
}
}

extern "C" pyops_status pyops_layer_norm_forward(pyops_real *y, float *mean, float *rstd, const pyops_real *x,
                                                 const float *weight, const float *bias, int64_t R, int64_t C, float eps,
                                                 void *stream) {
    pyops_status status = check_rows("layer_norm_forward", R, C);
    if (!status) status = check_eps("layer_norm_forward", eps);
    if (status) return status;
    const auto launch = [&](auto type) {
        using T = decltype(type);
        return launch_forward<T, false>("layer_norm_forward", elements<T>(y), nullptr, mean, rstd, elements<T>(x), nullptr,
                                        Dropout(), weight, bias, R, C, eps, stream);
    };
    return with_type("layer_norm_forward", launch, y, x);
}

extern "C" pyops_status pyops_residual_norm_forward(pyops_real *y, pyops_real *sum, float *mean, float *rstd,
                                                    const pyops_real *x, const pyops_real *branch, const int64_t *step,
                                                    const float *weight, const float *bias, int64_t R, int64_t C, float p,
                                                    uint64_t key, float eps, void *stream) {
    const pyops_status status = check_residual_norm("residual_norm_forward", R, C, p, eps);
    if (status) return status;
    const auto launch = [&](auto type) {
        using T = decltype(type);
        return launch_forward<T, true>("residual_norm_forward", elements<T>(y), elements<T>(sum), mean, rstd, elements<T>(x),
                                       elements<T>(branch), dropout_of(step, p, key), weight, bias, R, C, eps, stream);
    };
    return with_type("residual_norm_forward", launch, y, sum, x, branch);
}

// RowSums::of_block; there are at most as many blocks as rows.
extern "C" int64_t pyops_layer_norm_backward_work(int64_t R, int64_t C) {
    return std::min(R, int64_t(pyops_multiprocessors()) * MOST_RESIDENT) * 2 * C;
}

extern "C" pyops_status pyops_layer_norm_backward(pyops_real *dx, float *dweight, float *dbias, const pyops_real *dy,
                                                  const pyops_real *x, const float *weight, const float *mean,
                                                  const float *rstd, float *work, int64_t R, int64_t C, int32_t accumulate,
                                                  void *stream) {
    const pyops_status status = check_rows("layer_norm_backward", R, C);
    if (status) return status;
    const auto launch = [&](auto type) {
        using T = decltype(type);
        return launch_backward<T, false>("layer_norm_backward", elements<T>(dx), nullptr, dweight, dbias, elements<T>(dy),
                                         elements<T>(x), Dropout(), weight, mean, rstd, work, R, C, accumulate != 0, stream);
    };
    return with_type("layer_norm_backward", launch, dx, dy, x);
}

extern "C" pyops_status pyops_residual_norm_backward(pyops_real *dx, pyops_real *dbranch, float *dweight, float *dbias,
                                                     const pyops_real *dy, const pyops_real *sum, const int64_t *step,
                                                     const float *weight, const float *mean, const float *rstd, float *work,
                                                     int64_t R, int64_t C, float p, uint64_t key, int32_t accumulate,
                                                     void *stream) {
    const pyops_status status = check_residual_norm_backward(dbranch, step, R, C, p);
    if (status) return status;
    const Dropout dropout = dropout_of(step, p, key);
    const auto launch = [&](auto type) {
        using T = decltype(type);
        const auto run = dbranch ? launch_backward<T, true> : launch_backward<T, false>;
        return run("residual_norm_backward", elements<T>(dx), elements<T>(dbranch), dweight, dbias, elements<T>(dy),
                   elements<T>(sum), dropout, weight, mean, rstd, work, R, C, accumulate != 0, stream);
    };
    return with_type("residual_norm_backward", launch, dx, dbranch, dy, sum);
}
