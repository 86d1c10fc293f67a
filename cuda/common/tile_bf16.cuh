// tile_bf16.cuh - the matrix product of a block with bfloat16 operands:  c[m,n] = sum_k a[m,k] b[n,k].
//
// As in tile.cuh, a block traverses K with panels of both operands in a ring in shared memory, and panels keep the memory order
// of their operand.  But panels have bfloat16 elements, 16 bytes are 8 of them, and ldmatrix loads whole fragments:
//
//   k_inner     a line per row, S::K elements + 8      ldmatrix          8 rows x 8 k's
//   otherwise   a line per k, ROWS elements + 8        ldmatrix.trans    8 k's x 8 rows, transposed
//
// Use, in a kernel of T::THREADS threads with T::BYTES of dynamic shared memory, T = HalfTile<TileShape<...>, A_K, B_K>:
//   T::product(shared, a, b, m0, n0, k0, k1);          the whole block; k0 and the offsets of k a multiple of 8
//   T::each(shared, [&](int m, int n, float sum) { ... });
#pragma once
#include "fragments.cuh"
#include "product.cuh"
#include "tile.cuh"

template <class S, int ROWS, bool K_INNER> struct HalfPanel {
    static constexpr int INNER = K_INNER ? S::K : ROWS, LINES = K_INNER ? ROWS : S::K;
    static constexpr int STRIDE = INNER + 8, SIZE = LINES * STRIDE; // in elements
    static constexpr int ACROSS = INNER / 8, STEP = S::THREADS / ACROSS, COUNT = LINES / STEP;
    static_assert(S::THREADS % ACROSS == 0 && LINES % STEP == 0, "threads do not divide a panel evenly");

    // Fill the panel for the k's from k on, below k1, and the rows from row0 on.
    static __device__ __forceinline__ void fill(bf16 *panel, const RealOperand &x, int64_t row0, int64_t k, int64_t k1) {
        const int inner = threadIdx.x % ACROSS * 8, first = threadIdx.x / ACROSS;
        const int64_t rows = x.rows - row0, ks = k1 - k;
        const int64_t along = (K_INNER ? ks : rows) - inner, lines = (K_INNER ? rows : ks) - first;
        const int there = along >= 8 ? 8 : along > 0 ? static_cast<int>(along) : 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int line = first + i * STEP, n = i * STEP < lines ? there : 0;
            const int64_t row = row0 + (K_INNER ? line : inner), at_k = k + (K_INNER ? inner : line);
            bf16 *const to = panel + line * STRIDE + inner;
            if (x.whole16) {
                const bf16 *from = static_cast<const bf16 *>(x.p);
                cp_async16_part(to, n ? from + row * x.row_step + at_k * x.k_step : from, 2 * n);
            } else {
#pragma unroll 1
                for (int j = 0; j < 8; j++)
                    to[j] = j < n ? x.at(row + (K_INNER ? 0 : j), at_k + (K_INNER ? j : 0)) : as<bf16>(0.0f);
            }
        }
    }
};

template <class S, bool A_K, bool B_K> struct HalfTile {
    using PanelA = HalfPanel<S, S::M, A_K>;
    using PanelB = HalfPanel<S, S::N, B_K>;
    static constexpr int THREADS = S::THREADS, SLOT = PanelA::SIZE + PanelB::SIZE, STRIDE = S::N + 2;
    static constexpr int ROWS = S::WARP_M / 16, COLUMNS = S::WARP_N / 8;
    static constexpr size_t RING = sizeof(bf16) * S::STAGES * SLOT, SUMS = sizeof(float) * S::M * STRIDE;
    static constexpr size_t BYTES = RING > SUMS ? RING : SUMS;

    using RowSums = RowSumsOf<S, PanelA::STRIDE, A_K>;

    template <class Watch = Unwatched>
    static __device__ __forceinline__ void product(float *shared, const RealOperand &a, const RealOperand &b, int64_t m0,
                                                   int64_t n0, int64_t k0, int64_t k1, Watch &&watch = Watch()) {
        bf16 *const ring = reinterpret_cast<bf16 *>(shared);
        const int warp = threadIdx.x / 32, m = warp / S::WARPS_N * S::WARP_M, n = warp % S::WARPS_N * S::WARP_N;
        const int steps = static_cast<int>(blocks_for<int64_t>(k1 - k0, S::K));
        const auto fill = [&](int slot, int step) {
            PanelA::fill(ring + slot * SLOT, a, m0, k0 + int64_t(step) * S::K, k1);
            PanelB::fill(ring + slot * SLOT + PanelA::SIZE, b, n0, k0 + int64_t(step) * S::K, k1);
        };
        float sum[ROWS][COLUMNS][4] = {};
        for (int slot = 0; slot < S::STAGES - 1; slot++) {
            if (slot < steps) fill(slot, slot);
            cp_async_commit();
        }
        int here = 0, ahead = S::STAGES - 1; // the slot to compute from, the slot to fill
        for (int step = 0; step < steps; step++) {
            cp_async_wait<S::STAGES - 2>();
            __syncthreads(); // the panels have arrived, and no thread reads `ahead` any more
            if (step + S::STAGES - 1 < steps) fill(ahead, step + S::STAGES - 1);
            cp_async_commit();
            const bf16 *const of_a = ring + here * SLOT, *const of_b = of_a + PanelA::SIZE;
            watch(of_a);
#pragma unroll
            for (int k = 0; k < S::K; k += 16) {
                unsigned y[COLUMNS / 2][4];
#pragma unroll
                for (int j = 0; j < COLUMNS / 2; j++) fragment<PanelB::STRIDE, B_K, false>(y[j], of_b, n + 16 * j, k);
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    unsigned x[4];
                    fragment<PanelA::STRIDE, A_K, true>(x, of_a, m + 16 * i, k);
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++) {
                        const unsigned column[2] = {y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]};
                        mma_bf16(sum[i][j], x, column);
                    }
                }
            }
            here = here + 1 == S::STAGES ? 0 : here + 1;
            ahead = ahead + 1 == S::STAGES ? 0 : ahead + 1;
        }
        cp_async_wait<0>();
        __syncthreads();
        const int g = (threadIdx.x & 31) / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    *reinterpret_cast<float2 *>(shared + (m + 16 * i + 8 * r + g) * STRIDE + n + 8 * j +
                                                2 * t) = make_float2(sum[i][j][2 * r], sum[i][j][2 * r + 1]);
        __syncthreads();
    }

    template <class F> static __device__ __forceinline__ void each(const float *shared, const F &f) {
        for (int m = threadIdx.x / 32; m < S::M; m += S::WARPS)
#pragma unroll
            for (int n = threadIdx.x & 31; n < S::N; n += 32) f(m, n, shared[m * STRIDE + n]);
    }
};
