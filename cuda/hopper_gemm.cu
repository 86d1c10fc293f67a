// hopper_gemm.cu - products on Hopper, in bfloat16 or TF32, with bulk copies and wgmma.
//
// Three warpgroups of 128 threads share a block; a tile of c has 128 x TN sums, TN = 256 or 128:
//
//                           ring of rows of 128 bytes along K in shared memory
//    warpgroup 2            +--------------+--------------+--------------+---   warpgroup 0: wgmma, rows  0 ..  63 of the tile
//    one thread issues -->  | a 128, b TN  | a 128, b TN  |   arriving   |  --> warpgroup 1: wgmma, rows 64 .. 127
//    bulk copies            +--------------+--------------+--------------+---     64 x TN sums each, in registers
//                                full[slot]: its bytes have arrived;   empty[slot]: all 8 warps have multiplied it
//
// The copying warpgroup runs ahead of the others by up to the number of slots, also across tiles: while sums are written, the
// panels of the next tile arrive.  It needs few registers and releases the rest.  Blocks are persistent: each computes every
// gridDim.x-th tile.  Tiles are ordered in bands, so that concurrent blocks share rows of a and b in L2.  Rows in shared
// memory have the 128-byte swizzle of bulk copies and wgmma.
#include "hopper.cuh"
#include "product.cuh"

namespace {
static constexpr int TM = 128, ROW = 128, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), WARPS_READING = 4 * CONSUMERS;

template <int TN> struct Ring {
    static constexpr int A_BYTES = TM * ROW, B_BYTES = TN * ROW, SLOT = A_BYTES + B_BYTES, SLOTS = TN == 256 ? 4 : 6;
    static constexpr int BYTES = SLOTS * SLOT + 2 * SLOTS * int(sizeof(uint64_t));
};

// 64 x TN sums += 32 bytes of rows along K: 16 elements in bfloat16, 8 in TF32.
template <class Element, int TN> DEVICE void multiply(float (&sum)[TN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (sizeof(Element) == 2) wgmma_bf16<TN>(sum, a, b, accumulate);
    else wgmma_tf32<TN>(sum, a, b, accumulate);
}

// Of each 8 columns, a lane has rows lane/4 and lane/4 + 8, and columns 2 (lane%4) and the next one: a warp writes 32
// contiguous bytes per row.
template <class Element, int TN> DEVICE void write_sums(const RowProduct<Element> &g, const float (&sum)[TN / 2], int64_t row,
                                                        int64_t column) {
    const bool pairs = g.ldc % 2 == 0 && reinterpret_cast<uintptr_t>(g.c) % 8 == 0;
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
        const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        if (m >= g.M || n >= g.N) continue;
        float *c = g.c + m * g.ldc + n;
        const float *bias = g.bias ? g.bias + n : nullptr;
        const float first = finished(sum[i], c, bias, g.accumulate, g.relu);
        if (n + 1 == g.N) {
            *c = first;
            continue;
        }
        const float second = finished(sum[i + 1], c + 1, bias ? bias + 1 : nullptr, g.accumulate, g.relu);
        if (pairs) *reinterpret_cast<float2 *>(c) = make_float2(first, second);
        else c[0] = first, c[1] = second;
    }
}

template <class Element, int TN> static __global__ void __launch_bounds__(THREADS, 1)
    hopper_tiles(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, RowProduct<Element> g) {
    using R = Ring<TN>;
    DYN_SHARED(char, shared);                                   // aligned to 1024 bytes for the swizzle
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + R::SLOTS * R::SLOT), *empty = full + R::SLOTS;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < R::SLOTS; slot++) mbar_init(full + slot, 1), mbar_init(empty + slot, WARPS_READING);
        mbar_fence_init();
    }
    __syncthreads();
    constexpr int TK = ROW / sizeof(Element);                   // elements along K in a slot
    const int64_t tiles_m = blocks_for<int64_t>(g.M, TM), tiles_n = blocks_for<int64_t>(g.N, TN), tiles = tiles_m * tiles_n;
    const int steps = static_cast<int>(blocks_for<int64_t>(g.K, TK)), group = threadIdx.x / 128;
    Turn<R::SLOTS> turn;

    if (group == CONSUMERS) {
        reg_dealloc<24>();
        if (threadIdx.x != CONSUMERS * 128) return;
        for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const TileIndex at = tile_index<16>(tile, tiles_m, tiles_n);
            for (int step = 0; step < steps; step++, turn.next()) {
                mbar_wait(empty + turn.slot, turn.round ^ 1);           // in the first round every slot is empty
                mbar_expect(full + turn.slot, R::SLOT);
                char *slot = shared + turn.slot * R::SLOT;
                tma_load_2d(slot, &a_map, step * TK, static_cast<int>(at.m * TM), full + turn.slot);
                tma_load_2d(slot + R::A_BYTES, &b_map, step * TK, static_cast<int>(at.n * TN), full + turn.slot);
            }
        }
    } else {
        reg_alloc<240>();
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
        for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            float sum[TN / 2];
            int before = -1;                                    // the slot whose products may still be in flight
            for (int step = 0; step < steps; step++, turn.next()) {
                mbar_wait(full + turn.slot, turn.round);
                const char *slot = shared + turn.slot * R::SLOT;
                const uint64_t a = wg_desc(slot + group * (64 * ROW)), b = wg_desc(slot + R::A_BYTES);
                wg_fence();
#pragma unroll
                for (int k = 0; k < ROW / 32; k++) multiply<Element, TN>(sum, a + 2 * k, b + 2 * k, step + k > 0);
                wg_commit();
                wg_wait<1>();                                   // the products of the previous slot have finished
                if (before >= 0 && lane == 0) mbar_arrive(empty + before);
                before = turn.slot;
            }
            wg_wait<0>();
            if (lane == 0) mbar_arrive(empty + before);
            const TileIndex at = tile_index<16>(tile, tiles_m, tiles_n);
            write_sums<Element, TN>(g, sum, at.m * TM + group * 64 + warp * 16 + lane / 4, at.n * TN + lane % 4 * 2);
        }
    }
}
}

template <class Element> bool hopper_product_fits(const RowProduct<Element> &g) {
    const int64_t whole = 16 / sizeof(Element);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(g.a) | reinterpret_cast<uintptr_t>(g.b);
    const bool aligned = addresses % 16 == 0 && g.lda % whole == 0 && g.ldb % whole == 0;
    return pyops_has_hopper() && aligned && g.K > 0 && g.M <= INT32_MAX && g.N <= INT32_MAX && g.K <= INT32_MAX;
}

namespace {
template <class Element, int TN> static cudaError_t launch(const RowProduct<Element> &g, cudaStream_t stream) {
    using R = Ring<TN>;
    constexpr int SIZE = sizeof(Element), TK = ROW / SIZE;
    CUtensorMap a_map, b_map;
    Launches launches;
    launches << make_tensor_map_2d(&a_map, g.a, SIZE, g.K, g.M, g.lda * SIZE, TK, TM, true)
             << make_tensor_map_2d(&b_map, g.b, SIZE, g.K, g.N, g.ldb * SIZE, TK, TN, true)
             << allow_shared<hopper_tiles<Element, TN>>(R::BYTES);
    if (launches.error != cudaSuccess) return launches.error;
    const int64_t tiles = blocks_for<int64_t>(g.M, TM) * blocks_for<int64_t>(g.N, TN), processors = pyops_multiprocessors();
    const unsigned blocks = static_cast<unsigned>(tiles < processors ? tiles : processors);
    return LAUNCH((hopper_tiles<Element, TN>), blocks, THREADS, R::BYTES, stream, a_map, b_map, g);
}
}

// Tiles of 256 columns read less per sum; tiles of 128 columns are twice as many, which fills the device better.
template <class Element> cudaError_t hopper_product(const RowProduct<Element> &g, cudaStream_t stream) {
    const int64_t rows = blocks_for<int64_t>(g.M, TM), processors = pyops_multiprocessors();
    const int64_t wide = 2 * blocks_for(rows * blocks_for<int64_t>(g.N, 256), processors);
    const int64_t narrow = blocks_for(rows * blocks_for<int64_t>(g.N, 128), processors);
    return wide <= narrow ? launch<Element, 256>(g, stream) : launch<Element, 128>(g, stream);
}

template bool hopper_product_fits(const RowProduct<uint16_t> &);
template bool hopper_product_fits(const RowProduct<float> &);
template cudaError_t hopper_product(const RowProduct<uint16_t> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<float> &, cudaStream_t);
