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
//
// A bfloat16 operand that is stored transposed, with its rows along M or N, is copied as it is: as blocks of 64 k's x 64 rows,
// which wgmma reads transposed.  If there are few tiles, several blocks share one, each with a part of K (split-K): a warpgroup
// writes its sums to memory, and the last one to finish adds the parts, in order.
//
// If there are many tiles, two blocks are a cluster and compute two tiles, one below the other, which have the same panels of
// b.  Each block loads half of such a panel for both (multicast), so it is read from L2 once:
//
//    block 0:  a of tile 0 --> block 0        full[slot] of a block: its panel of a, and both halves of b, have arrived
//              upper half of b --> blocks 0, 1
//    block 1:  a of tile 1 --> block 1        empty[slot] of a block: the warps of both blocks have multiplied it, because
//              lower half of b --> blocks 0, 1                        the block will write to both
#include "hopper.cuh"
#include "product.cuh"
#include "tickets.cuh"

namespace {
static constexpr int TM = 128, ROW = 128, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), WARPS_READING = 4 * CONSUMERS;

template <int TN> struct Ring {
    static constexpr int A_BYTES = TM * ROW, B_BYTES = TN * ROW, SLOT = A_BYTES + B_BYTES, SLOTS = TN == 256 ? 4 : 6;
    // panels, barriers, and a word for each consumer
    static constexpr int BYTES = SLOTS * SLOT + 2 * SLOTS * int(sizeof(uint64_t)) + CONSUMERS * int(sizeof(int));
};

// The settings of a kernel: types, columns of a tile, and whether the operands are stored along K.
template <class Element_, class Out_, int TN_, bool A_K_, bool B_K_> struct Setup {
    using Element = Element_;
    using Out = Out_;
    static constexpr int TN = TN_, TK = ROW / int(sizeof(Element)); // TK: k's in a slot
    static constexpr bool A_K = A_K_, B_K = B_K_;
};
static constexpr int BLOCK = 64, BLOCK_BYTES = BLOCK * ROW; // of a transposed operand: 64 k's x 64 rows

// 64 x TN sums += 32 bytes of k's: 16 elements in bfloat16, 8 in TF32.
template <class S> DEVICE void multiply(float (&sum)[S::TN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (sizeof(typename S::Element) == 2) wgmma_bf16<S::TN, !S::A_K, !S::B_K>(sum, a, b, accumulate);
    else wgmma_tf32<S::TN>(sum, a, b, accumulate);
}
// The descriptor of rows that start at row `row` of a panel, and the step to the next 32 bytes of k's.
template <bool K> DEVICE uint64_t descriptor(const char *panel, int row) {
    if constexpr (K) return wg_desc(panel + row * ROW);
    else return wg_desc_trans(panel + row / BLOCK * BLOCK_BYTES, BLOCK_BYTES);
}
template <bool K> static constexpr int NEXT = K ? 2 : 128;
// Copy ROWS rows of an operand, from `row` on, and the k's of a slot; with BOTH to both blocks of a cluster.
template <bool BOTH> DEVICE void load_box(char *to, const CUtensorMap *map, int column, int row, uint64_t *bar) {
    if constexpr (BOTH) tma_load_2d_to_all(to, map, column, row, bar, 3);
    else tma_load_2d(to, map, column, row, bar);
}
template <bool K, int ROWS, bool BOTH = false>
DEVICE void load_panel(char *panel, const CUtensorMap *map, int k, int row, uint64_t *bar) {
    if constexpr (K) {
        load_box<BOTH>(panel, map, k, row, bar);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS / BLOCK; i++) load_box<BOTH>(panel + i * BLOCK_BYTES, map, row + i * BLOCK, k, bar);
    }
}
// The warp has multiplied a slot.
DEVICE void release_slot(uint64_t *empty, int blocks, int lane) {
    if (blocks == 1 && lane == 0) mbar_arrive(empty);
    if (blocks > 1 && lane < blocks) mbar_arrive_at(empty, lane);
}

DEVICE void write_two(float *c, float first, float second) { *reinterpret_cast<float2 *>(c) = make_float2(first, second); }
DEVICE void write_two(bf16 *c, float first, float second) { *reinterpret_cast<unsigned *>(c) = pack_bf16(first, second); }

// Of each 8 columns, a lane has rows lane/4 and lane/4 + 8, and columns 2 (lane%4) and the next one: a warp writes 32
// contiguous bytes of floats per row.
template <int TN, class Out>
DEVICE void write_sums(Out *to, const int32_t *scatter, int64_t ldc, int64_t M, int64_t N, const float *all_bias,
                       bool accumulate, bool relu, const Out *all_gates, const float (&sum)[TN / 2], int64_t row,
                       int64_t column) {
    const bool pairs = ldc % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0;
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
        const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        if (m >= M || n >= N) continue;
        const int64_t at = (scatter ? scatter[m] : m) * ldc + n;
        Out *const c = to + at;
        const float *bias = all_bias ? all_bias + n : nullptr;
        const Out *gate = all_gates ? all_gates + at : nullptr;
        const float first = finished(sum[i], c, bias, accumulate, relu, gate);
        if (n + 1 == N) {
            *c = as<Out>(first);
            continue;
        }
        const float second = finished(sum[i + 1], c + 1, bias ? bias + 1 : nullptr, accumulate, relu,
                                      gate ? gate + 1 : nullptr);
        if (pairs) write_two(c, first, second);
        else c[0] = as<Out>(first), c[1] = as<Out>(second);
    }
}

// The sums of all parts of K, in order, in the layout of write_sums.
template <int TN>
DEVICE void read_sums(float (&sum)[TN / 2], const float *parts, int64_t splits, int64_t all_rows, int64_t M, int64_t N,
                      int64_t row, int64_t column) {
    const bool pairs = N % 2 == 0;
    for (int64_t split = 0; split < splits; split++, parts += all_rows * N) {
#pragma unroll
        for (int i = 0; i < TN / 2; i += 2) {
            const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
            if (m >= M || n >= N) continue;
            const float *const from = parts + m * N + n;
            float2 two = make_float2(0.0f, 0.0f);
            if (pairs) two = *reinterpret_cast<const float2 *>(from);
            else two.x = from[0], two.y = n + 1 < N ? from[1] : 0.0f;
            sum[i] = split ? sum[i] + two.x : two.x;
            sum[i + 1] = split ? sum[i + 1] + two.y : two.y;
        }
    }
}

template <class S> static __global__ void __launch_bounds__(THREADS, 1)
    hopper_tiles(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                 RowProduct<typename S::Element, typename S::Out> g) {
    constexpr int TN = S::TN, TK = S::TK;
    using R = Ring<TN>;
    DYN_SHARED(char, shared); // aligned to 1024 bytes for the swizzle
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + R::SLOTS * R::SLOT), *empty = full + R::SLOTS;
    int *const is_last = reinterpret_cast<int *>(empty + R::SLOTS);
    const int blocks = cluster_size(), rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < R::SLOTS; slot++) mbar_init(full + slot, 1), mbar_init(empty + slot, WARPS_READING * blocks);
        mbar_fence_init();
    }
    if (blocks > 1) cluster_sync();
    else __syncthreads();
    const int64_t M = g.limit.rows(g.M), K = g.limit.summands(g.K);
    // An even number of rows of tiles in a cluster.  Tiles of a band are numbered down its columns, so 2 i and 2 i + 1 are one
    // below the other, and both blocks have the same part of K.  A tile below c is computed, from zeros, but not written.
    const int64_t tiles_m = round_up<int64_t>(blocks_for<int64_t>(M, TM), blocks);
    const int64_t tiles_n = blocks_for<int64_t>(g.N, TN), tiles = tiles_m * tiles_n;
    const int all_steps = static_cast<int>(blocks_for<int64_t>(K, TK)), group = threadIdx.x / 128;
    const int steps_a_part = blocks_for(all_steps, static_cast<int>(g.splits));
    Turn<R::SLOTS> turn;

    if (group == CONSUMERS) {
        reg_dealloc<24>();
        if (threadIdx.x != CONSUMERS * 128) return;
        for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
            const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
            const int from = static_cast<int>(task / tiles) * steps_a_part, to = min(from + steps_a_part, all_steps);
            for (int step = from; step < to; step++, turn.next()) {
                mbar_wait(empty + turn.slot, turn.round ^ 1); // in the first round every slot is empty
                uint64_t *const bar = full + turn.slot;
                mbar_expect(bar, R::SLOT);
                char *const a = shared + turn.slot * R::SLOT, *const b = a + R::A_BYTES;
                const int k = step * TK, column = static_cast<int>(at.n * TN), half = rank * TN / 2;
                load_panel<S::A_K, TM>(a, &a_map, k, static_cast<int>(at.m * TM), bar);
                if (blocks == 1) load_panel<S::B_K, TN>(b, &b_map, k, column, bar);
                else load_panel<S::B_K, TN / 2, true>(b + half * ROW, &b_map, k, column + half, bar);
            }
        }
    } else {
        reg_alloc<240>();
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
        for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
            const int64_t split = task / tiles;
            const int from = static_cast<int>(split) * steps_a_part, to = min(from + steps_a_part, all_steps);
            float sum[TN / 2];
            int before = -1; // the slot whose products may still be in flight
            for (int step = from; step < to; step++, turn.next()) {
                mbar_wait(full + turn.slot, turn.round);
                const char *slot = shared + turn.slot * R::SLOT;
                const uint64_t a = descriptor<S::A_K>(slot, group * 64), b = descriptor<S::B_K>(slot + R::A_BYTES, 0);
                wg_fence();
#pragma unroll
                for (int k = 0; k < ROW / 32; k++)
                    multiply<S>(sum, a + NEXT<S::A_K> * k, b + NEXT<S::B_K> * k, step > from || k > 0);
                wg_commit();
                wg_wait<1>(); // the products of the previous slot have finished
                if (before >= 0) release_slot(empty + before, blocks, lane);
                before = turn.slot;
            }
            wg_wait<0>();
            if (before >= 0) release_slot(empty + before, blocks, lane);
            if (before < 0) // no summands
#pragma unroll
                for (int i = 0; i < TN / 2; i++) sum[i] = 0.0f;
            const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
            const int64_t row = at.m * TM + group * 64 + warp * 16 + lane / 4, column = at.n * TN + lane % 4 * 2;
            if (at.m * TM >= M) continue;
            if (g.parts) {
                write_sums<TN, float>(g.parts + split * g.M * g.N, nullptr, g.N, M, g.N, nullptr, false, false, nullptr, sum,
                                      row, column);
                named_bar(1 + group, 128);
                if (threadIdx.x % 128 == 0)
                    is_last[group] = arrives_last(g.tickets + 2 * (at.m * tiles_n + at.n) + group,
                                                  static_cast<unsigned>(g.splits));
                named_bar(1 + group, 128);
                if (!is_last[group]) continue;
                read_sums<TN>(sum, g.parts, g.splits, g.M, M, g.N, row, column);
            }
            write_sums<TN>(g.c, g.scatter, g.ldc, M, g.N, g.bias, g.accumulate, g.relu, g.gate, sum, row, column);
        }
        if (blocks > 1) cluster_sync(); // the other block's warps may still arrive at this block's mbarriers
    }
}
}

template <class Element, class Out> bool hopper_product_fits(const RowProduct<Element, Out> &g) {
    const int64_t whole = 16 / sizeof(Element);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(g.a) | reinterpret_cast<uintptr_t>(g.b);
    const bool aligned = addresses % 16 == 0 && g.lda % whole == 0 && g.ldb % whole == 0;
    return pyops_has_hopper() && aligned && g.K > 0 && g.M <= INT32_MAX && g.N <= INT32_MAX && g.K <= INT32_MAX;
}

namespace {
// A map of one operand: `box` rows of an operand stored along K, blocks of 64 x 64 of another.
template <bool K, int TK, class Element>
static cudaError_t make_map(CUtensorMap *map, const Element *x, int64_t rows, int64_t k, int64_t ld, int box) {
    constexpr int SIZE = sizeof(Element);
    return K ? make_tensor_map_2d(map, x, SIZE, k, rows, ld * SIZE, TK, box, true)
             : make_tensor_map_2d(map, x, SIZE, rows, k, ld * SIZE, BLOCK, BLOCK, true);
}

// Whether blocks are clusters of two, given the tiles in a column of c, the columns (times parts of K), and the number of
// clusters that run at once.  By size: there are enough pairs for all of them, and a tile below the last row costs no time
// (13387 rows are 105 tiles, so an odd number must not exclude a product).
static bool has_clusters(int64_t rows, int64_t columns, int64_t clusters) {
    const Multicast wanted = pyops_multicast_now();
    if (clusters == 0 || wanted != Multicast::by_size) return clusters != 0 && wanted == Multicast::always;
    const int64_t pairs = blocks_for<int64_t>(rows, 2) * columns;
    return rows > 1 && pairs >= clusters &&
        blocks_for(pairs, clusters) <= blocks_for<int64_t>(rows * columns, pyops_multiprocessors());
}

template <class S> static cudaError_t launch(const RowProduct<typename S::Element, typename S::Out> &g, cudaStream_t stream) {
    using R = Ring<S::TN>;
    if (const cudaError_t error = allow_shared<hopper_tiles<S>>(R::BYTES); error != cudaSuccess) return error;
    static const int clusters = clusters_at_once(hopper_tiles<S>, 2, THREADS, R::BYTES);
    const int64_t rows = blocks_for<int64_t>(g.M, TM), columns = blocks_for<int64_t>(g.N, S::TN) * g.splits;
    const bool in_pairs = has_clusters(rows, columns, clusters);
    CUtensorMap a_map, b_map;
    Launches launches;
    launches << make_map<S::A_K, S::TK>(&a_map, g.a, g.M, g.K, g.lda, TM)
             << make_map<S::B_K, S::TK>(&b_map, g.b, g.N, g.K, g.ldb, in_pairs ? S::TN / 2 : S::TN);
    if (launches.error != cudaSuccess) return launches.error;
    const int64_t tasks = (in_pairs ? round_up<int64_t>(rows, 2) : rows) * columns;
    const int64_t most = in_pairs ? 2 * clusters : pyops_multiprocessors();
    const unsigned blocks = static_cast<unsigned>(tasks < most ? tasks : most);
    return in_pairs ? LAUNCH_CLUSTER(2, hopper_tiles<S>, blocks, THREADS, R::BYTES, stream, a_map, b_map, g)
                    : LAUNCH(hopper_tiles<S>, blocks, THREADS, R::BYTES, stream, a_map, b_map, g);
}

// Tiles of 256 columns read less per sum; tiles of 128 columns are twice as many, which fills the device better.
template <bool A_K, bool B_K, class Element, class Out>
static cudaError_t launch_best(const RowProduct<Element, Out> &g, cudaStream_t stream) {
    const int64_t rows = blocks_for<int64_t>(g.M, TM) * g.splits, processors = pyops_multiprocessors();
    const int64_t wide = 2 * blocks_for(rows * blocks_for<int64_t>(g.N, 256), processors);
    const int64_t narrow = blocks_for(rows * blocks_for<int64_t>(g.N, 128), processors);
    return wide <= narrow ? launch<Setup<Element, Out, 256, A_K, B_K>>(g, stream)
                          : launch<Setup<Element, Out, 128, A_K, B_K>>(g, stream);
}
}

template <class Element, class Out> cudaError_t hopper_product(const RowProduct<Element, Out> &g, cudaStream_t stream) {
    if constexpr (sizeof(Element) == 2) {
        if (!g.a_k) return g.b_k ? launch_best<false, true>(g, stream) : launch_best<false, false>(g, stream);
        if (!g.b_k) return launch_best<true, false>(g, stream);
    }
    return launch_best<true, true>(g, stream);
}

template bool hopper_product_fits(const RowProduct<bf16> &);
template bool hopper_product_fits(const RowProduct<bf16, bf16> &);
template cudaError_t hopper_product(const RowProduct<bf16> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<bf16, bf16> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<float> &, cudaStream_t);
