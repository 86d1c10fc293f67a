// hopper_fp8.cu - products of matrices in FP8 on Hopper, with bulk copies and wgmma, and sums that are promoted every 128 k's.
//
// Three warpgroups of 128 threads share a block, as in hopper_gemm.cu: a thread of the third issues copies, the others multiply
// 64 x 128 sums each.  A row of a panel is 128 bytes, so a slot of the ring has the 128 k's that share a scale:
//
//     ring of 6 slots       a 128 x 128 | b 128 x 128     each full[slot]: both panels have arrived
//                                                              empty[slot]: the 8 warps have multiplied them
//     for each slot         sum  = a b'                  four wgmma of 32 k's, which begin anew: they keep some 14 bits
//                           total += sum * (scale of the row of a * scale of the row of b)       in float32 registers
//
// While a warpgroup promotes its sums, the other one multiplies.  The scales are loaded between the launch of the wgmma and the
// wait for them: for a two rows of a lane, for b one scale or 32 columns of a lane.
//
// If there are few tiles, several blocks share one, each with a part of K (split-K): a warpgroup writes its totals to memory,
// and the last one to finish adds the parts, in order.
#include "block.cuh"
#include "hopper.cuh"
#include "product.cuh"
#include "tickets.cuh"

namespace {
static constexpr int TM = 128, TN = 128, TK = PYOPS_FP8_BLOCK, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1);
static constexpr int A_BYTES = TM * TK, SLOT = A_BYTES + TN * TK, SLOTS = 6, BARRIERS = SLOTS * SLOT; // where they start
static constexpr int BYTES = BARRIERS + 2 * SLOTS * int(sizeof(uint64_t)) + CONSUMERS * int(sizeof(int));
static_assert(BYTES <= 227 * 1024, "the shared memory of a block");
static constexpr int LEAST_STEPS = 4; // of a part of K

// The scales of an operand.  TENSOR: 1 in the loop, and p[0] at the end.
struct Scales {
    const float *p;
    int64_t per_step; // scales for each 128 k's
    int shift; // 2^shift rows share one
    bool whole;

    __device__ __forceinline__ float at(int64_t row, int64_t step) const {
        return whole ? 1.0f : p[step * per_step + (row >> shift)];
    }
    __device__ __forceinline__ float last() const { return whole ? p[0] : 1.0f; }
};

struct Fp8Product {
    void *c;
    const float *bias;
    Scales a, b;
    int64_t M, N, K, ldc, splits;
    int32_t accumulate, relu;
    bool to_bf16;
    float *parts; // splits > 1: (splits,M,N)
    unsigned *tickets; // two for each tile
};

// Call visit(i, m, n) for each pair of sums i and i + 1 of a lane, in row m and columns n and n + 1.   row, column: of the first
template <class Visit> DEVICE void for_pairs(const Fp8Product &g, int64_t row, int64_t column, Visit visit) {
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
        const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        if (m < g.M && n < g.N) visit(i, m, n);
    }
}
DEVICE void write_two(float *c, float first, float second) { *reinterpret_cast<float2 *>(c) = make_float2(first, second); }
DEVICE void write_two(bf16 *c, float first, float second) { *reinterpret_cast<unsigned *>(c) = pack_bf16(first, second); }

template <class Out>
DEVICE void write_pairs(Out *to, int64_t ld, const Fp8Product &g, const float (&sum)[TN / 2], int64_t row, int64_t column) {
    const bool pairs = ld % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0;
    for_pairs(g, row, column, [&](int i, int64_t m, int64_t n) {
        Out *const c = to + m * ld + n;
        if (n + 1 == g.N) c[0] = as<Out>(sum[i]);
        else if (pairs) write_two(c, sum[i], sum[i + 1]);
        else c[0] = as<Out>(sum[i]), c[1] = as<Out>(sum[i + 1]);
    });
}

template <class Out>
DEVICE void finish(Out *to, const Fp8Product &g, float (&total)[TN / 2], int64_t row, int64_t column) {
    const float whole = g.a.last() * g.b.last();
    for_pairs(g, row, column, [&](int i, int64_t m, int64_t n) {
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (n + j < g.N)
                total[i + j] = finished(total[i + j] * whole, to + m * g.ldc + n + j, g.bias ? g.bias + n + j : nullptr,
                                        g.accumulate, g.relu, static_cast<const Out *>(nullptr));
    });
    write_pairs(to, g.ldc, g, total, row, column);
}

// Add the sums of a slot.   B_ROWS: the rows of b, which are columns of c, have scales of their own
template <bool B_ROWS> struct Promotion {
    float of_a[2], of_b[B_ROWS ? TN / 4 : 1];

    __device__ __forceinline__ void load(const Fp8Product &g, int64_t row, int64_t column, int64_t step) {
#pragma unroll
        for (int r = 0; r < 2; r++) of_a[r] = g.a.at(min(row + 8 * r, g.M - 1), step);
        if constexpr (B_ROWS) {
#pragma unroll
            for (int i = 0; i < TN / 4; i++) of_b[i] = g.b.at(min(column + i / 2 * 8 + i % 2, g.N - 1), step);
        } else {
            of_b[0] = g.b.at(column, step); // the columns of a tile share a scale, also beyond the last column
        }
    }
    __device__ __forceinline__ void add(float (&total)[TN / 2], const float (&sum)[TN / 2]) const {
#pragma unroll
        for (int i = 0; i < TN / 2; i++)
            total[i] = fmaf(sum[i], of_a[i / 2 % 2] * of_b[B_ROWS ? i / 4 * 2 + i % 2 : 0], total[i]);
    }
};

template <Fp8 A, Fp8 B, bool B_ROWS> static __global__ void __launch_bounds__(THREADS, 1)
    fp8_tiles(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, Fp8Product g) {
    DYN_SHARED(char, shared); // aligned to 1024 bytes for the swizzle
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + BARRIERS), *empty = full + SLOTS;
    int *const is_last = reinterpret_cast<int *>(empty + SLOTS);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) mbar_init(full + slot, 1), mbar_init(empty + slot, 4 * CONSUMERS);
        mbar_fence_init();
    }
    __syncthreads();
    wait_for_last_kernel();
    const int64_t tiles_m = blocks_for<int64_t>(g.M, TM), tiles_n = blocks_for<int64_t>(g.N, TN), tiles = tiles_m * tiles_n;
    const int all_steps = static_cast<int>(blocks_for<int64_t>(g.K, TK)), group = threadIdx.x / 128;
    const int steps_a_part = blocks_for(all_steps, static_cast<int>(g.splits));
    Turn<SLOTS> turn;

    if (group == CONSUMERS) {
        reg_dealloc<24>();
        if (threadIdx.x != CONSUMERS * 128) return;
        for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
            const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
            const int from = static_cast<int>(task / tiles) * steps_a_part, to = min(from + steps_a_part, all_steps);
            for (int step = from; step < to; step++, turn.next()) {
                mbar_wait(empty + turn.slot, turn.round ^ 1); // in the first round every slot is empty
                uint64_t *const bar = full + turn.slot;
                mbar_expect(bar, SLOT);
                char *const a = shared + turn.slot * SLOT;
                tma_load_2d(a, &a_map, step * TK, static_cast<int>(at.m * TM), bar);
                tma_load_2d(a + A_BYTES, &b_map, step * TK, static_cast<int>(at.n * TN), bar);
            }
        }
        return;
    }
    reg_alloc<240>();
    const int lane = lane_id(), warp = threadIdx.x / 32 % 4;
    for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
        const int64_t split = task / tiles;
        const int from = static_cast<int>(split) * steps_a_part, to = min(from + steps_a_part, all_steps);
        const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
        const int64_t row = at.m * TM + group * 64 + warp * 16 + lane / 4, column = at.n * TN + lane % 4 * 2; // of the lane
        float sum[TN / 2], total[TN / 2];
        Promotion<B_ROWS> promotion;
#pragma unroll
        for (int i = 0; i < TN / 2; i++) total[i] = 0.0f;
        for (int step = from; step < to; step++, turn.next()) {
            mbar_wait(full + turn.slot, turn.round);
            const char *slot = shared + turn.slot * SLOT;
            const uint64_t a = wg_desc(slot + group * 64 * TK), b = wg_desc(slot + A_BYTES);
            wg_fence();
#pragma unroll
            for (int k = 0; k < TK / 32; k++) wgmma_fp8<TN, A, B>(sum, a + 2 * k, b + 2 * k, k > 0);
            wg_commit();
            promotion.load(g, row, column, step);
            wg_wait<0>();
            wg_finished(sum);
            if (lane == 0) mbar_arrive(empty + turn.slot);
            promotion.add(total, sum);
        }
        if (g.splits > 1) {
            write_pairs(g.parts + split * g.M * g.N, g.N, g, total, row, column);
            named_bar(1 + group, 128);
            if (threadIdx.x % 128 == 0)
                is_last[group] = arrives_last(g.tickets + 2 * (at.m * tiles_n + at.n) + group, static_cast<unsigned>(g.splits));
            named_bar(1 + group, 128);
            if (!is_last[group]) continue;
            for_pairs(g, row, column, [&](int i, int64_t m, int64_t n) {
                for (int j = 0; j < 2; j++)
                    if (n + j < g.N) total[i + j] = sum_of_parts(g.parts + m * g.N + n + j, g.splits, g.M * g.N);
            });
        }
        if (g.to_bf16) finish(static_cast<bf16 *>(g.c), g, total, row, column);
        else finish(static_cast<float *>(g.c), g, total, row, column);
    }
}

// The parts of K: as many as fill the device, but none with few steps, and as many as the workspace has room for.
static int64_t parts_of(const Fp8Product &g) {
    const int64_t tiles = blocks_for<int64_t>(g.M, TM) * blocks_for<int64_t>(g.N, TN);
    const int64_t wanted = min(pyops_multiprocessors() / tiles, blocks_for<int64_t>(g.K, TK) / LEAST_STEPS);
    const int64_t room = int64_t(PYOPS_WORKSPACE / sizeof(float)) / (g.M * g.N);
    return 2 * tiles > TICKETS ? 1 : max(min(wanted, room), int64_t(1));
}

template <Fp8 A, Fp8 B, bool B_ROWS>
static cudaError_t launch(const uint8_t *a, const uint8_t *b, int64_t lda, int64_t ldb, Fp8Product g, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared<fp8_tiles<A, B, B_ROWS>>(BYTES); error != cudaSuccess) return error;
    if (g.splits > 1) {
        g.parts = static_cast<float *>(pyops_workspace(sizeof(float) * g.M * g.N * g.splits)), g.tickets = pyops_tickets();
        if (!g.parts || !g.tickets) return cudaErrorMemoryAllocation;
    }
    CUtensorMap a_map, b_map;
    Launches launches;
    launches << make_tensor_map_2d(&a_map, a, 1, g.K, g.M, lda, TK, TM, true)
             << make_tensor_map_2d(&b_map, b, 1, g.K, g.N, ldb, TK, TN, true);
    if (launches.error != cudaSuccess) return launches.error;
    const int64_t tasks = blocks_for<int64_t>(g.M, TM) * blocks_for<int64_t>(g.N, TN) * g.splits;
    const unsigned blocks = static_cast<unsigned>(min(tasks, int64_t(pyops_multiprocessors())));
    return LAUNCH_DEPENDENT((fp8_tiles<A, B, B_ROWS>), blocks, THREADS, BYTES, stream, a_map, b_map, g);
}
template <Fp8 A, Fp8 B, class... Rest> static cudaError_t launch_scales(bool b_rows, const Rest &...rest) {
    return b_rows ? launch<A, B, true>(rest...) : launch<A, B, false>(rest...);
}
template <Fp8 A, class... Rest> static cudaError_t launch_b(int32_t format, const Rest &...rest) {
    return format == PYOPS_E4M3 ? launch_scales<A, Fp8::e4m3>(rest...) : launch_scales<A, Fp8::e5m2>(rest...);
}

static Scales scales_of(const float *scales, int64_t rows, int32_t blocks) {
    return {scales, fp8_scale_rows(rows, blocks), blocks == PYOPS_FP8_SQUARES ? 7 : 0, blocks == PYOPS_FP8_TENSOR};
}
}

extern "C" pyops_status pyops_gemm_fp8(pyops_real *c, const uint8_t *a, const uint8_t *b, const float *a_scales,
                                       const float *b_scales, const float *bias, int64_t M, int64_t N, int64_t K, int64_t ldc,
                                       int64_t lda, int64_t ldb, int32_t a_format, int32_t b_format, int32_t a_blocks,
                                       int32_t b_blocks, int32_t accumulate, int32_t relu, void *stream) {
    const pyops_status status = check_gemm_fp8(a, b, M, N, K, ldc, lda, ldb, a_format, b_format, a_blocks, b_blocks);
    if (status || M * N == 0) return status;
    PYOPS_REQUIRE(M <= INT32_MAX && N <= INT32_MAX && K <= INT32_MAX, "gemm_fp8: M=%lld N=%lld K=%lld, expected below 2^31",
                  LL(M), LL(N), LL(K));
    if (!pyops_has_hopper())
        return pyops_fail(PYOPS_DEVICE_ERROR,
                          "gemm_fp8: this device has no FP8 tensor cores that the library knows; "
                          "expected compute capability 9.0");
    const float *const nothing = nullptr; // K = 0: only the bias remains
    if (!K) return pyops_gemm(c, real(nothing), real(nothing), bias, M, N, 0, ldc, 1, 1, 1, 1, accumulate, relu, stream);
    Fp8Product g = {elements<char>(c),
                    bias,
                    scales_of(a_scales, M, a_blocks),
                    scales_of(b_scales, N, b_blocks),
                    M,
                    N,
                    K,
                    ldc,
                    1,
                    accumulate,
                    relu,
                    is_bf16(c),
                    nullptr,
                    nullptr};
    g.splits = parts_of(g);
    lda = fp8_ld(lda, K), ldb = fp8_ld(ldb, K);
    const bool b_rows = b_blocks == PYOPS_FP8_ROWS;
    const cudaError_t error = a_format == PYOPS_E4M3
        ? launch_b<Fp8::e4m3>(b_format, b_rows, a, b, lda, ldb, g, stream_of(stream))
        : launch_b<Fp8::e5m2>(b_format, b_rows, a, b, lda, ldb, g, stream_of(stream));
    return pyops_launched("gemm_fp8", error, stream);
}
