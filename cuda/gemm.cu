// gemm.cu - matrix products: c (+)= a b + bias, for operands of any strides.
//
// A block computes a tile of c (tile.cuh) of 128 x 128, 64 x 64 or 32 x 32 sums.  If there are fewer tiles than
// multiprocessors and K is long, several blocks share a tile, each with a part of K (split-K): their sums go to the workspace,
// and the last of these blocks to finish adds them in order.  Both choices depend only on the sizes, so a product has the same
// bits in every run, alone or in a batch.
//
// If any operand or c is bfloat16, the product is one of bfloat16 operands: on Hopper with bulk copies and wgmma
// (hopper_gemm.cu), otherwise in tiles with bfloat16 panels (tile_bf16.cuh).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include "product.cuh"
#include "tickets.cuh"
#include "tile.cuh"
#include "tile_bf16.cuh"

namespace {
struct Product {
    float *c;
    const float *a, *b, *bias;
    int64_t M, N, K, ldc, a_row, a_col, b_row, b_col;
    int32_t accumulate, relu;
    const float *gate = nullptr;            // see RealProduct
    float *row_sums = nullptr;
};
struct Batch {                              // the axes of a batch, and the strides of the matrices along each
    int32_t ndim;
    int64_t products, shape[8], c_step[8], a_step[8], b_step[8];
};
struct Work {                               // the division of a launch: blocks = products * splits * tiles
    int64_t tiles_m, tiles_n, splits, k_part;
    int64_t first;                          // index in the batch of the first product of this launch
    float *parts;                           // sums of parts of K: (splits, products, M, N); NULL if there is one part
    unsigned *tickets;                      // one for each tile of this launch, if there are several parts
    bool a16, b16;                          // whether copies of 16 bytes are possible
};

// ---- kernels -----------------------------------------------------------------------------------------------
__host__ __device__ static inline void move_to(Product &g, const Batch &batch, int64_t product) {
    for (int d = batch.ndim - 1; d >= 0; product /= batch.shape[d--]) {
        const int64_t at = product % batch.shape[d];
        g.c += at * batch.c_step[d], g.a += at * batch.a_step[d], g.b += at * batch.b_step[d];
    }
}

DEVICE void finish(const Product &g, int64_t m, int64_t n, float sum) {
    float *c = g.c + m * g.ldc + n;
    *c = finished(sum, c, g.bias ? g.bias + n : nullptr, g.accumulate, g.relu, g.gate ? g.gate + m * g.ldc + n : nullptr);
}

// Tiles with at most this number of rows also sum the rows of a; larger ones have no registers left.
static constexpr int MOST_SUMMED = 64;

// After a product, in each block: add the sums of the rows of a to `to`.  With parts of K, write them to `parts` (splits, M),
// stored after the parts of c; the last block adds these with add_row_sums.
template <class S, class RowSums> DEVICE void finish_row_sums(const RowSums &rows, float *shared, float *to, int64_t m0,
                                                              int64_t M, float *parts) {
    rows.each(shared, [&](int m, float sum) {
        if (m0 + m >= M) return;
        if (parts) parts[m0 + m] = sum;
        else to[m0 + m] += sum;
    });
}
template <class S> DEVICE void add_row_sums(float *to, const float *parts, int64_t m0, int64_t M, int64_t splits) {
    for (int m = threadIdx.x; m < S::M && m0 + m < M; m += S::THREADS) to[m0 + m] += sum_of_parts(parts + m0 + m, splits, M);
}

// A block of product number `product` of `products`.
template <class S, Precision P, bool A_K, bool B_K>
DEVICE void product_block(float *shared, const Product &g, const Work &work, int64_t products, int64_t product, int64_t split,
                          int64_t tile) {
    using T = Tile<S, P, Stored<A_K>, Stored<B_K>>;
    const TileIndex at = tile_index<8>(tile, work.tiles_m, work.tiles_n);
    const int64_t m0 = at.m * S::M, n0 = at.n * S::N, size = g.M * g.N;
    const int64_t k0 = split * work.k_part, k1 = k0 + work.k_part < g.K ? k0 + work.k_part : g.K;
    const Stored<A_K> a = {g.a, g.M, g.a_row, g.a_col, work.a16};
    const Stored<B_K> b = {g.b, g.N, g.b_col, g.b_row, work.b16};
    typename T::RowSums rows = {S::M <= MOST_SUMMED && g.row_sums && n0 == 0};
    if constexpr (S::M <= MOST_SUMMED) T::product(shared, a, b, m0, n0, k0, k1, rows);
    else T::product(shared, a, b, m0, n0, k0, k1);
    float *const parts = work.parts ? work.parts + product * size : nullptr;
    T::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= g.M || n0 + n >= g.N) return;
        if (parts) parts[split * products * size + (m0 + m) * g.N + n0 + n] = sum;
        else finish(g, m0 + m, n0 + n, sum);
    });
    float *const of_rows = parts ? parts + work.splits * size : nullptr;
    if (rows.wanted) finish_row_sums<S>(rows, shared, g.row_sums, m0, g.M, parts ? of_rows + split * g.M : nullptr);
    if (!parts || !block_arrives_last(work.tickets + product * work.tiles_m * work.tiles_n + tile, work.splits)) return;
    if (rows.wanted) add_row_sums<S>(g.row_sums, of_rows, m0, g.M, work.splits);
    T::each(shared, [&](int m, int n, float) {
        if (m0 + m >= g.M || n0 + n >= g.N) return;
        const float *const part = parts + (m0 + m) * g.N + n0 + n;
        finish(g, m0 + m, n0 + n, sum_of_parts(part, work.splits, products * size));
    });
}

template <class S, Precision P, bool A_K, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) tile_product(Product g, Batch batch, Work work) {
    DYN_SHARED(float, shared);
    const int64_t tiles = work.tiles_m * work.tiles_n, product = blockIdx.x / tiles / work.splits;
    move_to(g, batch, work.first + product);
    wait_for_last_kernel();
    product_block<S, P, A_K, B_K>(shared, g, work, batch.products, product, blockIdx.x / tiles % work.splits,
                                  blockIdx.x % tiles);
}

// Several products in one launch.  Either all have a b with adjacent elements along N, and a_k is true if a has adjacent
// elements along K; or, with B_K, both operands of all have adjacent elements along K.
template <class G> struct Group {
    G product[MOST_GROUPED];
    Work work[MOST_GROUPED];
    int64_t blocks[MOST_GROUPED];
    bool a_k[MOST_GROUPED];
};

// Find the product of this block -> its index and the number of the block within the product.
template <class G> DEVICE int find_product(const Group<G> &group, int64_t *block) {
    int i = 0;
    for (*block = blockIdx.x; *block >= group.blocks[i]; i++) *block -= group.blocks[i];
    return i;
}

template <class S, Precision P, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) product_group(const __grid_constant__ Group<Product> group) {
    DYN_SHARED(float, shared);
    int64_t block;
    const int i = find_product(group, &block);
    const Work &work = group.work[i];
    const int64_t tiles = work.tiles_m * work.tiles_n, split = block / tiles, tile = block % tiles;
    wait_for_last_kernel();
    if constexpr (B_K) product_block<S, P, true, true>(shared, group.product[i], work, 1, 0, split, tile);
    else if (group.a_k[i]) product_block<S, P, true, false>(shared, group.product[i], work, 1, 0, split, tile);
    else product_block<S, P, false, false>(shared, group.product[i], work, 1, 0, split, tile);
}

// ---- choice of the tile size and the number of parts of K --------------------------------------------------------
enum class Size { large, medium, small };
template <Precision P, Size> struct ShapeOf;
template <Precision P> struct ShapeOf<P, Size::large> { using S = TileShape<128, 128, 32, 2, 2, 3>; };
template <> struct ShapeOf<Precision::fp32, Size::large> { using S = TileShape<128, 128, 16, 4, 2, 3>; };
template <Precision P> struct ShapeOf<P, Size::medium> { using S = TileShape<64, 64, 32, 2, 2, 3>; };
template <Precision P> struct ShapeOf<P, Size::small> { using S = TileShape<32, 32, 64, 2, 2, 4>; };

static constexpr int64_t side_of(Size size) { return size == Size::large ? 128 : size == Size::medium ? 64 : 32; }

static constexpr int64_t PART = 64, MOST_PARTS = 32;            // parts of K are multiples of PART

// The number of parts that fit in `room` floats.  1 if there are fewer tickets than tiles of side x side sums, the smallest.
static constexpr int64_t WORK_FLOATS = PYOPS_WORKSPACE / sizeof(float);
static int64_t most_parts(int64_t M, int64_t N, int64_t side, int64_t room = WORK_FLOATS) {
    if (blocks_for(M, side) * blocks_for(N, side) > TICKETS) return 1;
    return std::min<int64_t>(MOST_PARTS, room / (M * (N + 1)));         // and sums of rows of a
}

// With split-K the last block of a tile waits for the others, then reads the parts of its sums, 64 bytes a cycle.
static double cycles_of_parts(int64_t sums, int64_t splits) { return splits == 1 ? 0 : 1500 + double(sums) * splits / 16; }

// Cost model of a product, in cycles: blocks run in waves over the multiprocessors, small tiles wait longer for memory than
// large ones, and every wave has a fixed latency.
static double block_cycles(Size size, int64_t splits, int64_t K, Precision precision) {
    const int64_t side = side_of(size);
    const double fmas_a_cycle = (precision == Precision::fp32       ? 110
                                     : precision == Precision::tf32 ? 450
                                                                    : 520) *
        (size == Size::large        ? 1.0
             : size == Size::medium ? 0.6
                                    : 0.3);
    return 1500 + side * side * double(blocks_for(K, splits)) / fmas_a_cycle;
}
static int64_t blocks_of(Size size, int64_t splits, int64_t M, int64_t N) {
    return blocks_for(M, side_of(size)) * blocks_for(N, side_of(size)) * splits;
}
static double cycles(Size size, int64_t splits, int64_t products, int64_t M, int64_t N, int64_t K, Precision precision) {
    const int64_t processors = pyops_multiprocessors(), side = side_of(size);
    const double waves = blocks_for(blocks_of(size, splits, M, N) * products, processors);
    return waves * block_cycles(size, splits, K, precision) + cycles_of_parts(side * side, splits);
}

// The large tiles of tensor cores require more shared memory than consumer devices have.
static bool has_room(Size size, Precision precision) {
    using T = Tile<ShapeOf<Precision::tf32, Size::large>::S, Precision::tf32, Stored<true>, Stored<true>>;
    return size != Size::large || precision == Precision::fp32 || pyops_shared_memory() >= int(T::BYTES);
}

static Size best_size(int64_t splits, int64_t products, int64_t M, int64_t N, int64_t K, Precision precision) {
    Size best = Size::small;
    const auto cost = [&](Size size) { return cycles(size, splits, products, M, N, K, precision); };
    for (Size size : {Size::medium, Size::large})
        if (has_room(size, precision) && cost(size) <= cost(best)) best = size;
    return best;
}

static double least_cycles(int64_t splits, int64_t M, int64_t N, int64_t K, Precision precision) {
    return cycles(best_size(splits, 1, M, N, K, precision), splits, 1, M, N, K, precision);
}

// Depends only on the sizes of one product.  In float32 at most 2048 terms are added in sequence, if the workspace is large
// enough: the rounding error grows with their number.
static int64_t best_splits(int64_t M, int64_t N, int64_t K, Precision precision) {
    if (!K) return 1;
    const int64_t most = std::min({most_parts(M, N, 32), blocks_for(K, 4 * PART)});
    int64_t best = std::max<int64_t>(1, std::min(most, precision == Precision::fp32 ? blocks_for<int64_t>(K, 2048) : 1));
    for (int64_t splits = best + 1; splits <= most; splits++)
        if (least_cycles(splits, M, N, K, precision) < least_cycles(best, M, N, K, precision)) best = splits;
    return blocks_for(K, round_up(blocks_for(K, best), PART));
}

// ---- launches ----------------------------------------------------------------------------------------------
// Whether copies of 16 bytes are possible: contiguous elements, and all lines and matrices of the batch aligned to 16 bytes.
static bool whole16(const float *p, int64_t inner_step, int64_t line_step, const int64_t *steps, const Batch &batch) {
    bool whole = reinterpret_cast<uintptr_t>(p) % 16 == 0 && inner_step == 1 && line_step % 4 == 0;
    for (int d = 0; d < batch.ndim; d++) whole = whole && steps[d] % 4 == 0;
    return whole;
}

static void set_alignment(Work *work, const Product &g, const Batch &batch, bool a_k, bool b_k) {
    work->a16 = whole16(g.a, a_k ? g.a_col : g.a_row, a_k ? g.a_row : g.a_col, batch.a_step, batch);
    work->b16 = whole16(g.b, b_k ? g.b_row : g.b_col, b_k ? g.b_col : g.b_row, batch.b_step, batch);
}

template <class S, Precision P, bool A_K, bool B_K> static cudaError_t launch_tiles(const Product &g, const Batch &batch,
                                                                                    Work work, cudaStream_t stream) {
    using T = Tile<S, P, Stored<A_K>, Stored<B_K>>;
    set_alignment(&work, g, batch, A_K, B_K);
    const cudaError_t error = allow_shared<tile_product<S, P, A_K, B_K>>(T::BYTES);
    if (error != cudaSuccess) return error;
    work.tiles_m = blocks_for<int64_t>(g.M, S::M), work.tiles_n = blocks_for<int64_t>(g.N, S::N);
    const unsigned blocks = static_cast<unsigned>(work.tiles_m * work.tiles_n * work.splits * batch.products);
    return LAUNCH_DEPENDENT((tile_product<S, P, A_K, B_K>), blocks, T::THREADS, T::BYTES, stream, g, batch, work);
}

template <class S, Precision P> static cudaError_t launch_layout(const Product &g, const Batch &batch, const Work &work,
                                                                 cudaStream_t stream) {
    const bool a_k = std::abs(g.a_col) <= std::abs(g.a_row), b_k = std::abs(g.b_row) <= std::abs(g.b_col);
    return a_k && b_k ? launch_tiles<S, P, true, true>(g, batch, work, stream)
        : a_k         ? launch_tiles<S, P, true, false>(g, batch, work, stream)
        : b_k         ? launch_tiles<S, P, false, true>(g, batch, work, stream)
                      : launch_tiles<S, P, false, false>(g, batch, work, stream);
}

template <Precision P> static cudaError_t launch_size(Size size, const Product &g, const Batch &batch, const Work &work,
                                                      cudaStream_t stream) {
    return size == Size::large ? launch_layout<typename ShapeOf<P, Size::large>::S, P>(g, batch, work, stream)
        : size == Size::medium ? launch_layout<typename ShapeOf<P, Size::medium>::S, P>(g, batch, work, stream)
                               : launch_layout<typename ShapeOf<P, Size::small>::S, P>(g, batch, work, stream);
}

static Work work_of(int64_t splits, int64_t K) {
    Work work = {};
    work.splits = splits, work.k_part = round_up(std::max<int64_t>(1, blocks_for(K, splits)), PART);
    return work;
}

// A batch is launched in pieces if the workspace or the grid is too small for it.
static cudaError_t launch_products(const Product &g, Batch batch, int64_t splits, Precision precision, cudaStream_t stream) {
    const int64_t M = g.M, N = g.N, K = g.K, products = batch.products;
    const int64_t most_tiles = blocks_for<int64_t>(M, 32) * blocks_for<int64_t>(N, 32);
    const Size size = best_size(splits, products, M, N, K, precision);
    int64_t at_once = std::min(products, std::max<int64_t>(1, INT32_MAX / (most_tiles * splits)));
    Work work = work_of(splits, K);
    if (splits > 1) {
        const int64_t room = WORK_FLOATS / (M * (N + 1) * splits);
        at_once = std::min({at_once, room, std::max<int64_t>(1, TICKETS / most_tiles)});
        work.parts = static_cast<float *>(pyops_workspace(sizeof(float) * M * (N + 1) * splits * at_once));
        work.tickets = pyops_tickets();
        if (!work.parts || !work.tickets) return cudaErrorMemoryAllocation;
    }
    Launches launches;
    for (; work.first < products; work.first += at_once) {
        batch.products = std::min(at_once, products - work.first);
        launches << (precision == Precision::fp32       ? launch_size<Precision::fp32>(size, g, batch, work, stream)
                         : precision == Precision::tf32 ? launch_size<Precision::tf32>(size, g, batch, work, stream)
                                                        : launch_size<Precision::bf16>(size, g, batch, work, stream));
    }
    return launches.error;
}

// ---- conversions to bfloat16 and TF32 ---------------------------------------------------------------------------
template <class Element> DEVICE Element converted(float x) {
    if constexpr (std::is_same_v<Element, bf16>) return as<bf16>(x);
    else return __uint_as_float(to_tf32(x));
}

// A thread converts 8 adjacent elements of a row of y.  whole16: they are aligned to 16 bytes in x and in y.
template <class Element> static __global__ void convert_rows(Element *y, const float *x, int64_t R, int64_t C, int64_t ld,
                                                             int64_t row, int64_t col, bool whole16) {
    wait_for_last_kernel();
    const int64_t across = blocks_for<int64_t>(C, 8);
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < R * across; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t r = i / across, c = i % across * 8;
        const float *from = x + r * row + c * col;
        Element *to = y + r * ld + c;
        if (whole16 && c + 8 <= C) {
            struct alignas(16) Floats { float at[8]; };
            struct alignas(16) Elements { Element at[8]; };
            const Floats in = *reinterpret_cast<const Floats *>(from);
            Elements out;
#pragma unroll
            for (int j = 0; j < 8; j++) out.at[j] = converted<Element>(in.at[j]);
            *reinterpret_cast<Elements *>(to) = out;
        } else {
            for (int j = 0; j < 8 && c + j < C; j++) to[j] = converted<Element>(from[j * col]);
        }
    }
}

// If adjacent elements of x are in a column of y, a block transposes a tile of 64 x 64 in shared memory: it reads along the
// columns of y and writes along its rows.
static constexpr int SQUARE = 64;
template <class Element> static __global__ void convert_transposed(Element *y, const float *x, int64_t R, int64_t C, int64_t ld,
                                                                   int64_t row, int64_t col) {
    wait_for_last_kernel();
    SHARED(float, square, [SQUARE][SQUARE + 1]);
    const int64_t across = blocks_for<int64_t>(C, SQUARE), r0 = blockIdx.x / across * SQUARE, c0 = blockIdx.x % across * SQUARE;
    const int fast = threadIdx.x % SQUARE, step = blockDim.x / SQUARE;
    for (int slow = threadIdx.x / SQUARE; slow < SQUARE; slow += step)
        if (r0 + fast < R && c0 + slow < C) square[fast][slow] = x[(r0 + fast) * row + (c0 + slow) * col];
    __syncthreads();
    for (int slow = threadIdx.x / SQUARE; slow < SQUARE; slow += step)
        if (r0 + slow < R && c0 + fast < C) y[(r0 + slow) * ld + c0 + fast] = converted<Element>(square[slow][fast]);
}

template <class Element> static cudaError_t convert(Element *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row,
                                                    int64_t col, cudaStream_t stream) {
    if (std::abs(col) <= std::abs(row) || C == 1) {
        const uintptr_t addresses = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y);
        const bool whole16 = col == 1 && row % 4 == 0 && ld % 8 == 0 && addresses % 16 == 0;
        const unsigned blocks = grid_for(R * blocks_for<int64_t>(C, 8), 256);
        return LAUNCH_DEPENDENT(convert_rows<Element>, blocks, 256, 0, stream, y, x, R, C, ld, row, col, whole16);
    }
    const int64_t squares = blocks_for<int64_t>(R, SQUARE) * blocks_for<int64_t>(C, SQUARE);
    return LAUNCH_DEPENDENT(convert_transposed<Element>, static_cast<unsigned>(squares), 256, 0, stream, y, x, R, C, ld, row,
                            col);
}

// ---- products of bfloat16 -----------------------------------------------------------------------------------------
// Cost model of the product on Hopper, as for `cycles`.
static double hopper_cycles(int64_t splits, int64_t M, int64_t N, int64_t K, bool is_bf16) {
    const int64_t processors = pyops_multiprocessors(), rows = blocks_for<int64_t>(M, 128) * splits;
    const auto tiles = [&](int64_t width) {
        const double waves = blocks_for(rows * blocks_for(N, width), processors);
        const double each = 2000 + 128.0 * width * blocks_for(K, splits) / (is_bf16 ? 1500 : 750);
        return waves * each + cycles_of_parts(128 * width, splits);
    };
    return std::min(tiles(256), tiles(128));
}

static int64_t best_hopper_splits(int64_t M, int64_t N, int64_t K, bool is_bf16, int64_t room = WORK_FLOATS) {
    const int64_t most = std::min(most_parts(M, N, 64, room), K / 512);   // two tickets for each tile of 128 x 128
    int64_t best = 1;
    for (int64_t splits = 2; splits <= most; splits++)
        if (hopper_cycles(splits, M, N, K, is_bf16) < hopper_cycles(best, M, N, K, is_bf16)) best = splits;
    const int64_t steps = blocks_for<int64_t>(K, is_bf16 ? 64 : 32);
    return blocks_for(steps, blocks_for(steps, best));                 // no part is empty
}

DEVICE void finish(const RealProduct &g, int64_t m, int64_t n, float sum) {
    const int64_t at = (g.scatter ? g.scatter[m] : m) * g.ldc + n;
    const float *const bias = g.bias ? g.bias + n : nullptr;
    const auto gate = [&](auto *c) { return g.gate ? static_cast<decltype(c)>(g.gate) + at : nullptr; };
    const float *const float_gate = gate(static_cast<const float *>(nullptr));
    const bf16 *const bf16_gate = gate(static_cast<const bf16 *>(nullptr));
    if (g.to_float) g.to_float[at] = finished<float>(sum, g.to_float + at, bias, g.accumulate, g.relu, float_gate);
    else g.to_bf16[at] = as<bf16>(finished<bf16>(sum, g.to_bf16 + at, bias, g.accumulate, g.relu, bf16_gate));
}

template <class S, bool A_K, bool B_K>
DEVICE void bf16_block(float *shared, const RealProduct &g, const Work &work, int64_t split, int64_t tile) {
    using T = HalfTile<S, A_K, B_K>;
    const TileIndex at = tile_index<8>(tile, work.tiles_m, work.tiles_n);
    const int64_t m0 = at.m * S::M, n0 = at.n * S::N, M = g.limit.rows(g.M), K = g.limit.summands(g.K);
    const int64_t k0 = split * work.k_part, k1 = k0 + work.k_part < K ? k0 + work.k_part : K;
    if (m0 >= M) return;
    RealOperand a = g.a;
    a.rows = M;
    typename T::RowSums rows = {S::M <= MOST_SUMMED && g.row_sums && n0 == 0};
    if constexpr (S::M <= MOST_SUMMED) T::product(shared, a, g.b, m0, n0, k0, k1, rows);
    else T::product(shared, a, g.b, m0, n0, k0, k1);
    T::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= M || n0 + n >= g.N) return;
        if (work.parts) work.parts[split * g.M * g.N + (m0 + m) * g.N + n0 + n] = sum;
        else finish(g, m0 + m, n0 + n, sum);
    });
    float *const of_rows = work.parts ? work.parts + work.splits * g.M * g.N : nullptr;
    if (rows.wanted) finish_row_sums<S>(rows, shared, g.row_sums, m0, M, of_rows ? of_rows + split * M : nullptr);
    if (!work.parts || !block_arrives_last(work.tickets + tile, work.splits)) return;
    if (rows.wanted) add_row_sums<S>(g.row_sums, of_rows, m0, M, work.splits);
    T::each(shared, [&](int m, int n, float) {
        if (m0 + m >= M || n0 + n >= g.N) return;
        finish(g, m0 + m, n0 + n, sum_of_parts(work.parts + (m0 + m) * g.N + n0 + n, work.splits, g.M * g.N));
    });
}

template <class S, bool A_K, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) bf16_product(RealProduct g, Work work) {
    wait_for_last_kernel();
    DYN_SHARED(float, shared);
    const int64_t tiles = work.tiles_m * work.tiles_n;
    bf16_block<S, A_K, B_K>(shared, g, work, blockIdx.x / tiles, blockIdx.x % tiles);
}

template <class S, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) bf16_group(const __grid_constant__ Group<RealProduct> group) {
    DYN_SHARED(float, shared);
    int64_t block;
    const int i = find_product(group, &block);
    const Work &work = group.work[i];
    const int64_t tiles = work.tiles_m * work.tiles_n;
    wait_for_last_kernel();
    if constexpr (B_K) bf16_block<S, true, true>(shared, group.product[i], work, block / tiles, block % tiles);
    else if (group.a_k[i]) bf16_block<S, true, false>(shared, group.product[i], work, block / tiles, block % tiles);
    else bf16_block<S, false, false>(shared, group.product[i], work, block / tiles, block % tiles);
}

template <Size> struct Bf16Shape { using S = TileShape<128, 128, 32, 2, 2, 3>; };
template <> struct Bf16Shape<Size::medium> { using S = TileShape<64, 64, 64, 2, 2, 3>; };
template <> struct Bf16Shape<Size::small> { using S = TileShape<32, 32, 64, 2, 2, 4>; };

template <Size SIZE, bool A_K, bool B_K> static cudaError_t launch_bf16_tiles(const RealProduct &g, Work work,
                                                                              cudaStream_t stream) {
    using S = typename Bf16Shape<SIZE>::S;
    using T = HalfTile<S, A_K, B_K>;
    const cudaError_t error = allow_shared<bf16_product<S, A_K, B_K>>(T::BYTES);
    if (error != cudaSuccess) return error;
    work.tiles_m = blocks_for<int64_t>(g.M, S::M), work.tiles_n = blocks_for<int64_t>(g.N, S::N);
    const unsigned blocks = static_cast<unsigned>(work.tiles_m * work.tiles_n * work.splits);
    return LAUNCH_DEPENDENT((bf16_product<S, A_K, B_K>), blocks, T::THREADS, T::BYTES, stream, g, work);
}
template <Size SIZE> static cudaError_t launch_bf16_layout(const RealProduct &g, const Work &work, cudaStream_t stream) {
    const auto along_k = [](const RealOperand &x) { return std::abs(x.k_step) <= std::abs(x.row_step); };
    const bool a_k = along_k(g.a), b_k = along_k(g.b);
    return a_k && b_k ? launch_bf16_tiles<SIZE, true, true>(g, work, stream)
        : a_k         ? launch_bf16_tiles<SIZE, true, false>(g, work, stream)
        : b_k         ? launch_bf16_tiles<SIZE, false, true>(g, work, stream)
                      : launch_bf16_tiles<SIZE, false, false>(g, work, stream);
}

static float *room_for_parts(int64_t splits, int64_t M, int64_t N) {
    return splits > 1 ? static_cast<float *>(pyops_workspace(sizeof(float) * M * (N + 1) * splits)) : nullptr;
}

static cudaError_t launch_bf16_mma(const RealProduct &g, cudaStream_t stream, bool *row_sums_added) {
    const int64_t splits = best_splits(g.M, g.N, g.K, Precision::bf16);
    const Size size = best_size(splits, 1, g.M, g.N, g.K, Precision::bf16);
    *row_sums_added = g.row_sums && size != Size::large;
    Work work = work_of(splits, g.K);
    work.parts = room_for_parts(splits, g.M, g.N), work.tickets = splits > 1 ? pyops_tickets() : nullptr;
    if (splits > 1 && (!work.parts || !work.tickets)) return cudaErrorMemoryAllocation;
    return size == Size::large ? launch_bf16_layout<Size::large>(g, work, stream)
        : size == Size::medium ? launch_bf16_layout<Size::medium>(g, work, stream)
                               : launch_bf16_layout<Size::small>(g, work, stream);
}

template <class Out> static RowProduct<bf16, Out> row_product(const RealProduct &g, Out *c) {
    const auto ld = [](const RealOperand &x) { return x.k_step == 1 ? x.row_step : x.row_step == 1 ? x.k_step : -1; };
    RowProduct<bf16, Out> p = {c,
                               static_cast<const bf16 *>(g.a.p),
                               static_cast<const bf16 *>(g.b.p),
                               g.bias,
                               g.M,
                               g.N,
                               g.K,
                               g.ldc,
                               ld(g.a),
                               ld(g.b),
                               g.accumulate,
                               g.relu,
                               g.a.k_step == 1,
                               g.b.k_step == 1};
    p.limit = g.limit, p.scatter = g.scatter, p.gate = static_cast<const Out *>(g.gate), p.activation = g.activation;
    p.residual = g.residual;
    return p;
}

static double least_bf16_cycles(const RealProduct &g) {
    return least_cycles(best_splits(g.M, g.N, g.K, Precision::bf16), g.M, g.N, g.K, Precision::bf16);
}

// The cycles of the product on Hopper's tensor cores; infinite if they cannot compute it, or need longer than smaller tiles.
template <class Out> static double best_hopper_cycles(const RealProduct &g, Out *c) {
    const RowProduct<bf16, Out> p = row_product(g, c);
    if (!g.K || g.a.is_float || g.b.is_float || p.lda < 0 || p.ldb < 0 || !hopper_product_fits(p)) return INFINITY;
    const double cycles = hopper_cycles(best_hopper_splits(g.M, g.N, g.K, true), g.M, g.N, g.K, true);
    return cycles > least_bf16_cycles(g) ? INFINITY : cycles;
}

// parts: room for the parts of c, if there are several
template <class Element, class Out>
static cudaError_t launch_hopper(RowProduct<Element, Out> p, int64_t splits, float *parts, cudaStream_t stream) {
    if (splits > 1) p.splits = splits, p.parts = parts, p.tickets = pyops_tickets();
    return splits > 1 && (!p.parts || !p.tickets) ? cudaErrorMemoryAllocation : hopper_product(p, stream);
}

template <class Out>
static cudaError_t launch_bf16_hopper(const RealProduct &g, Out *c, cudaStream_t stream, bool *row_sums_added) {
    RowProduct<bf16, Out> p = row_product(g, c);
    *row_sums_added = g.row_sums && !g.limit.count && hopper_sums_rows(p);
    p.row_sums = *row_sums_added ? g.row_sums : nullptr;
    const int64_t splits = best_hopper_splits(g.M, g.N, g.K, true);
    return launch_hopper(p, splits, room_for_parts(splits, g.M, g.N), stream);
}

static double best_hopper_cycles(const RealProduct &g) {
    return g.to_float ? best_hopper_cycles(g, g.to_float) : best_hopper_cycles(g, g.to_bf16);
}
}

cudaError_t real_product(const RealProduct &g, cudaStream_t stream, bool *row_sums_added) {
    if (best_hopper_cycles(g) == INFINITY) return launch_bf16_mma(g, stream, row_sums_added);
    return g.to_float ? launch_bf16_hopper(g, g.to_float, stream, row_sums_added)
                      : launch_bf16_hopper(g, g.to_bf16, stream, row_sums_added);
}
cudaError_t real_product(const RealProduct &g, cudaStream_t stream) {
    bool row_sums_added;
    return real_product(g, stream, &row_sums_added);
}
cudaError_t tf32_product(const RowProduct<float> &g, cudaStream_t stream) {
    const int64_t splits = best_hopper_splits(g.M, g.N, g.K, false);
    return launch_hopper(g, splits, room_for_parts(splits, g.M, g.N), stream);
}

namespace {
// The converted operands share the workspace, half each: c is computed in rectangles with as many rows and columns as fit.
template <class Element> static constexpr int64_t HALF = PYOPS_WORKSPACE / sizeof(Element) / 2;
static int64_t converted_ld(int64_t K) { return round_up<int64_t>(K, 8); }

// The number of parts of K: their sums need room behind the operands.
template <class Element> static int64_t converted_splits(int64_t M, int64_t N, int64_t K) {
    const int64_t a = M * converted_ld(K), b = N * converted_ld(K);
    if (a > HALF<Element> || b > HALF<Element>) return 1;
    const int64_t room = (PYOPS_WORKSPACE - (a + b) * sizeof(Element)) / sizeof(float);
    return best_hopper_splits(M, N, K, std::is_same_v<Element, bf16>, room);
}

// For large products it pays to convert the operands first, into rows along K, because wgmma is then available.
// Depends only on the sizes of one product, like best_splits.
static bool worth_converting(int64_t M, int64_t N, int64_t K, Precision precision) {
    if (precision == Precision::fp32 || !pyops_has_hopper() || !K || K > int64_t(PYOPS_WORKSPACE) / 16) return false;
    const bool is_bf16 = precision == Precision::bf16;
    const int64_t processors = pyops_multiprocessors();
    const double passes = 6000 + (is_bf16 ? 6.0 : 8.0) * (double(M) + N) * K / (20.0 * processors); // 20 bytes per cycle
    const int64_t splits = is_bf16 ? converted_splits<bf16>(M, N, K) : converted_splits<float>(M, N, K);
    return passes + hopper_cycles(splits, M, N, K, is_bf16) < least_cycles(best_splits(M, N, K, precision), M, N, K, precision);
}

template <class Element> static cudaError_t launch_converted(const Product &g, cudaStream_t stream) {
    const int64_t ld = converted_ld(g.K), rows = std::min(g.M, HALF<Element> / ld), columns = std::min(g.N, HALF<Element> / ld);
    const int64_t splits = converted_splits<Element>(g.M, g.N, g.K);
    Element *const a = static_cast<Element *>(pyops_workspace(PYOPS_WORKSPACE));
    if (!a) return cudaErrorMemoryAllocation;
    Element *const b = a + rows * ld;
    float *const parts = reinterpret_cast<float *>(b + columns * ld);
    Launches launches;
    for (int64_t n = 0; n < g.N; n += columns) {
        const int64_t N = std::min(columns, g.N - n);
        launches << convert(b, g.b + n * g.b_col, N, g.K, ld, g.b_col, g.b_row, stream);
        for (int64_t m = 0; m < g.M; m += rows) {
            const int64_t M = std::min(rows, g.M - m);
            if (n == 0 || rows < g.M) launches << convert(a, g.a + m * g.a_row, M, g.K, ld, g.a_row, g.a_col, stream);
            RowProduct<Element> part = {g.c + m * g.ldc + n, a,     b, g.bias ? g.bias + n : nullptr, M, N, g.K, g.ldc, ld, ld,
                                        g.accumulate,        g.relu};
            part.gate = g.gate ? g.gate + m * g.ldc + n : nullptr;
            launches << launch_hopper(part, splits, parts, stream);
        }
    }
    return launches.error;
}
static cudaError_t launch_converted(const Product &g, Precision precision, cudaStream_t stream) {
    return precision == Precision::bf16 ? launch_converted<bf16>(g, stream) : launch_converted<float>(g, stream);
}
}

// ---- the ABI --------------------------------------------------------------------------------------------------
namespace {
static bool has_bf16(const AnyProduct &p) { return is_bf16(p.c) || is_bf16(p.a) || is_bf16(p.b); }

static RealProduct as_real(const AnyProduct &p) {
    RealProduct g = {is_bf16(p.c) ? nullptr : elements<float>(p.c),
                     is_bf16(p.c) ? elements<bf16>(p.c) : nullptr,
                     operand(p.a, p.M, p.a_row, p.a_col),
                     operand(p.b, p.N, p.b_col, p.b_row),
                     p.bias,
                     p.M,
                     p.N,
                     p.K,
                     p.ldc,
                     p.accumulate,
                     p.relu};
    g.gate = elements<char>(p.gate), g.row_sums = p.row_sums, g.activation = p.activation;
    g.residual = p.residual;
    return g;
}

static Product as_float_product(const AnyProduct &p) {
    return {elements<float>(p.c),
            elements<float>(p.a),
            elements<float>(p.b),
            p.bias,
            p.M,
            p.N,
            p.K,
            p.ldc,
            p.a_row,
            p.a_col,
            p.b_row,
            p.b_col,
            p.accumulate,
            p.relu,
            elements<float>(p.gate),
            p.row_sums};
}

// Compute one product.  row_sums_added: whether it has added to p.row_sums.
static cudaError_t any_product(const AnyProduct &p, cudaStream_t stream, bool *row_sums_added) {
    *row_sums_added = false;
    if (!p.M || !p.N) return cudaSuccess;
    if (has_bf16(p)) return real_product(as_real(p), stream, row_sums_added);
    const Precision precision = pyops_precision_now();
    if (worth_converting(p.M, p.N, p.K, precision)) return launch_converted(as_float_product(p), precision, stream);
    Batch one = {};
    one.products = 1;
    const int64_t splits = best_splits(p.M, p.N, p.K, precision);
    *row_sums_added = p.row_sums && best_size(splits, 1, p.M, p.N, p.K, precision) != Size::large;
    return launch_products(as_float_product(p), one, splits, precision, stream);
}

// ---- several products in one launch -------------------------------------------------------------------------------
static constexpr double LAUNCH_CYCLES = 4000;           // between two kernels of a stream

// Whether adjacent elements of an operand are adjacent along K.
static bool a_along_k(const AnyProduct &p) { return std::abs(p.a_col) <= std::abs(p.a_row); }
static bool b_along_k(const AnyProduct &p) { return std::abs(p.b_row) <= std::abs(p.b_col); }

// The tile size for these products in one launch.  false: separate launches take less time, or one of the products cannot be in
// a group.  A product has as many parts as alone, so its bits are the same.
static bool best_group(Size *size, const AnyProduct *p, int count) {
    if (count < 2 || count > MOST_GROUPED) return false;
    const bool is_real = has_bf16(p[0]), b_k = b_along_k(p[0]);
    const Precision precision = is_real ? Precision::bf16 : pyops_precision_now();
    double alone = LAUNCH_CYCLES * (count - 1);
    int64_t floats = 0, tiles = 0;
    for (int i = 0; i < count; i++) {
        const int64_t M = p[i].M, N = p[i].N, K = p[i].K;
        if (!M || !N || !K || has_bf16(p[i]) != is_real || b_along_k(p[i]) != b_k || (b_k && !a_along_k(p[i]))) return false;
        if (!is_real && worth_converting(M, N, K, precision)) return false;
        const int64_t splits = best_splits(M, N, K, precision);
        const double wgmma = is_real ? best_hopper_cycles(as_real(p[i])) : INFINITY;
        alone += std::min(wgmma, least_cycles(splits, M, N, K, precision));
        floats += splits > 1 ? M * (N + 1) * splits : 0;
        tiles += blocks_of(Size::small, 1, M, N);
    }
    if (floats > WORK_FLOATS || tiles > TICKETS) return false;
    double best = alone;
    for (const Size each : {Size::small, Size::medium}) {
        double longest = 0, total = 0, parts = 0;
        for (int i = 0; i < count; i++) {
            const int64_t splits = best_splits(p[i].M, p[i].N, p[i].K, precision);
            const double block = block_cycles(each, splits, p[i].K, precision);
            longest = std::max(longest, block), total += block * blocks_of(each, splits, p[i].M, p[i].N);
            parts = std::max(parts, cycles_of_parts(side_of(each) * side_of(each), splits));
        }
        const double cycles = std::max(longest, total / pyops_multiprocessors()) + parts;
        if (cycles <= best) *size = each, best = cycles;
    }
    return best < alone;
}

// Whether wgmma computes p[i], in bfloat16 and with a map of c, when these products are computed together.
static bool has_map_of_c(const AnyProduct *p, int count, int i) {
    Size size;
    const auto fits = [](const RealProduct &g) {
        return best_hopper_cycles(g) < INFINITY && hopper_has_map(row_product(g, g.to_bf16));
    };
    return is_bf16(p[i].c) && p[i].M && p[i].N && !best_group(&size, p, count) && fits(as_real(p[i]));
}
// Whether the epilogue of p[i] computes its activation; otherwise take it out.
static bool keeps_activation(AnyProduct *p, int count, int i) {
    if (has_map_of_c(p, count, i)) return true;
    p[i].activation = {};
    return false;
}
// The same for its residual connection.  A part of K would load the residual without need.
static bool keeps_residual(AnyProduct *p) {
    if (has_map_of_c(p, 1, 0) && best_hopper_splits(p->M, p->N, p->K, true) == 1) return true;
    p->residual = {};
    return false;
}

// Fill the group for a tile size and launch it by run(group, blocks).  convert: AnyProduct to G.
template <class G, class Convert, class Run>
static cudaError_t launch_group(Size size, const AnyProduct *p, int count, Precision precision, Convert convert, Run run) {
    Group<G> group = {};
    Batch one = {};
    one.products = 1;
    float *parts = static_cast<float *>(pyops_workspace(PYOPS_WORKSPACE));
    unsigned *tickets = pyops_tickets();
    if (!parts || !tickets) return cudaErrorMemoryAllocation;
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t splits = best_splits(p[i].M, p[i].N, p[i].K, precision), side = side_of(size);
        Work &work = group.work[i];
        work = work_of(splits, p[i].K);
        work.tiles_m = blocks_for(p[i].M, side), work.tiles_n = blocks_for(p[i].N, side);
        if (splits > 1) {
            work.parts = parts, work.tickets = tickets;
            parts += p[i].M * (p[i].N + 1) * splits, tickets += work.tiles_m * work.tiles_n;
        }
        group.product[i] = convert(p[i]);
        group.a_k[i] = a_along_k(p[i]);
        if constexpr (std::is_same_v<G, Product>) set_alignment(&work, group.product[i], one, group.a_k[i], b_along_k(p[i]));
        group.blocks[i] = work.tiles_m * work.tiles_n * splits;
        blocks += group.blocks[i];
    }
    return run(group, static_cast<unsigned>(blocks));
}

template <class S, Precision P, bool B_K> static cudaError_t run_group(const Group<Product> &group, unsigned blocks,
                                                                       cudaStream_t stream) {
    constexpr size_t ROWS = Tile<S, P, Stored<true>, Stored<B_K>>::BYTES,
                     LINES = B_K ? 0 : Tile<S, P, Stored<false>, Stored<B_K>>::BYTES;
    constexpr size_t BYTES = ROWS > LINES ? ROWS : LINES;
    const cudaError_t error = allow_shared<product_group<S, P, B_K>>(BYTES);
    return error == cudaSuccess ? LAUNCH_DEPENDENT((product_group<S, P, B_K>), blocks, S::THREADS, BYTES, stream, group)
                                : error;
}
template <Precision P> static cudaError_t run_group_of(Size size, bool b_k, const Group<Product> &group, unsigned blocks,
                                                       cudaStream_t stream) {
    using Medium = typename ShapeOf<P, Size::medium>::S;
    using Small = typename ShapeOf<P, Size::small>::S;
    if (size == Size::medium)
        return b_k ? run_group<Medium, P, true>(group, blocks, stream) : run_group<Medium, P, false>(group, blocks, stream);
    return b_k ? run_group<Small, P, true>(group, blocks, stream) : run_group<Small, P, false>(group, blocks, stream);
}
template <class S, bool B_K>
static cudaError_t run_bf16_group(const Group<RealProduct> &group, unsigned blocks, cudaStream_t stream) {
    constexpr size_t BYTES = std::max(HalfTile<S, true, B_K>::BYTES, B_K ? 0 : HalfTile<S, false, B_K>::BYTES);
    const cudaError_t error = allow_shared<bf16_group<S, B_K>>(BYTES);
    return error == cudaSuccess ? LAUNCH_DEPENDENT((bf16_group<S, B_K>), blocks, S::THREADS, BYTES, stream, group) : error;
}
template <Size SIZE>
static cudaError_t run_bf16_group(bool b_k, const Group<RealProduct> &group, unsigned blocks, cudaStream_t stream) {
    using S = typename Bf16Shape<SIZE>::S;
    return b_k ? run_bf16_group<S, true>(group, blocks, stream) : run_bf16_group<S, false>(group, blocks, stream);
}
}

cudaError_t any_products(const AnyProduct *p, int count, cudaStream_t stream, bool *row_sums_added) {
    Size size;
    if (!best_group(&size, p, count)) {
        Launches launches;
        if (count > 2)                                  // the first two may be a group, and so may the others
            launches << any_products(p, 2, stream, row_sums_added)
                     << any_products(p + 2, count - 2, stream, row_sums_added + 2);
        else
            for (int i = 0; i < count; i++) launches << any_product(p[i], stream, row_sums_added + i);
        return launches.error;
    }
    for (int i = 0; i < count; i++) row_sums_added[i] = p[i].row_sums;
    const bool b_k = b_along_k(p[0]);
    if (has_bf16(p[0]))
        return launch_group<RealProduct>(size, p, count, Precision::bf16, as_real, [&](const auto &group, unsigned blocks) {
            return size == Size::medium ? run_bf16_group<Size::medium>(b_k, group, blocks, stream)
                                        : run_bf16_group<Size::small>(b_k, group, blocks, stream);
        });
    const Precision precision = pyops_precision_now();
    return launch_group<Product>(size, p, count, precision, as_float_product, [&](const auto &group, unsigned blocks) {
        return precision == Precision::fp32 ? run_group_of<Precision::fp32>(size, b_k, group, blocks, stream)
            : precision == Precision::tf32  ? run_group_of<Precision::tf32>(size, b_k, group, blocks, stream)
                                            : run_group_of<Precision::bf16>(size, b_k, group, blocks, stream);
    });
}

extern "C" pyops_status pyops_gemm(pyops_real *c, const pyops_real *a, const pyops_real *b, const float *bias, int64_t M,
                                   int64_t N, int64_t K, int64_t ldc, int64_t a_row, int64_t a_col, int64_t b_row,
                                   int64_t b_col, int32_t accumulate, int32_t relu, void *stream) {
    const pyops_status status = check_gemm("gemm", M, N, K, ldc);
    if (status) return status;
    bool row_sums_added;
    const AnyProduct p = {c, a, b, bias, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, relu};
    return pyops_launched("gemm", any_product(p, stream_of(stream), &row_sums_added), stream);
}

namespace {
struct LinearGradients {                    // see pyops_linear_backward
    pyops_real *dx;
    float *dweight, *dbias;
    const pyops_real *dy, *x, *weight;
    int64_t R, O, I;
    int32_t relu, accumulate, activation = 0;
    const pyops_real *at = nullptr;         // not NULL: dx is multiplied by the derivative of the activation there

    bool types_agree() const { return !dx || is_bf16(dx) == is_bf16(x); }
    // Write its products to p and return their number.
    int products(AnyProduct *p) const {
        p[0] = {real(dweight), dy, x, nullptr, O, I, R, I, 1, O, I, 1, 1, 0};
        p[0].row_sums = dbias;
        if (!dx) return 1;
        p[1] = {dx, dy, weight, nullptr, R, I, O, I, O, 1, I, 1, accumulate, 0};
        p[1].gate = relu ? x : nullptr;
        return 2;
    }
};

using ActivationForward = pyops_status (*)(pyops_real *y, const pyops_real *x, int64_t n, void *stream);
using ActivationBackward = pyops_status (*)(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n, void *stream);
static constexpr ActivationForward forward_of[] = {pyops_silu_forward, pyops_gelu_forward, pyops_gelu_tanh_forward};
static constexpr ActivationBackward backward_of[] = {pyops_silu_backward, pyops_gelu_backward, pyops_gelu_tanh_backward};

// The gradients of several layers, at most two.
static pyops_status linear_gradients(const char *who, const LinearGradients *layers, int count, void *stream) {
    AnyProduct p[MOST_GROUPED];
    int first[MOST_GROUPED], products = 0;
    for (int i = 0; i < count; i++) {
        PYOPS_REQUIRE(layers[i].types_agree(), "%s: dx and x have different types, expected one type", who);
        first[i] = products, products += layers[i].products(p + products);
    }
    const LinearGradients &one = layers[0]; // the only layer, if it has an activation function
    if (one.at) p[1].activation = {one.activation, nullptr, elements<bf16>(one.at)};
    const bool is_fused = one.at && keeps_activation(p, products, 1);
    bool row_sums_added[MOST_GROUPED];
    pyops_status status = pyops_launched(who, any_products(p, products, stream_of(stream), row_sums_added), stream);
    for (int i = 0; i < count && !status; i++)
        if (layers[i].dbias && !row_sums_added[first[i]])
            status = pyops_column_sums(layers[i].dbias, layers[i].dy, layers[i].R, layers[i].O, stream);
    return status || !one.at || is_fused ? status : backward_of[one.activation](one.dx, one.dx, one.at, one.R * one.I, stream);
}
}

extern "C" pyops_status pyops_linear_backward(pyops_real *dx, float *dweight, float *dbias, const pyops_real *dy,
                                              const pyops_real *x, const pyops_real *weight, int64_t R, int64_t O, int64_t I,
                                              int32_t relu, int32_t accumulate, void *stream) {
    const pyops_status status = check_linear(dx, R, O, I, relu, accumulate);
    if (status) return status;
    const LinearGradients layer = {dx, dweight, dbias, dy, x, weight, R, O, I, relu, accumulate};
    return linear_gradients("linear_backward", &layer, 1, stream);
}

extern "C" pyops_status pyops_linear_activation(pyops_real *y, pyops_real *a, const pyops_real *x, const pyops_real *weight,
                                                const float *bias, int64_t R, int64_t O, int64_t I, int32_t activation,
                                                void *stream) {
    pyops_status status = check_linear_activation("linear_activation", R, O, I, activation);
    if (status) return status;
    PYOPS_REQUIRE(is_bf16(y) == is_bf16(a), "linear_activation: y and a have different types, expected one type");
    AnyProduct p = {a, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0};
    p.activation = {activation, elements<bf16>(y), nullptr};
    const bool is_fused = keeps_activation(&p, 1, 0);
    bool row_sums_added;
    status = pyops_launched("linear_activation", any_product(p, stream_of(stream), &row_sums_added), stream);
    return status || is_fused ? status : forward_of[activation](y, a, R * O, stream);
}

namespace {
// y = residual + dropout(x weight' + bias), or without is_fused only x weight' + bias.
static pyops_status linear_residual(const char *who, pyops_real *y, const pyops_real *x, const pyops_real *weight,
                                    const float *bias, const pyops_real *residual, const Dropout &dropout, int64_t R, int64_t O,
                                    int64_t I, void *stream, bool *is_fused) {
    AnyProduct p = {y, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0};
    p.residual = {elements<bf16>(residual), dropout};
    *is_fused = keeps_residual(&p);
    bool row_sums_added;
    return pyops_launched(who, any_product(p, stream_of(stream), &row_sums_added), stream);
}
}

extern "C" pyops_status pyops_linear_residual(pyops_real *y, const pyops_real *x, const pyops_real *weight, const float *bias,
                                              const pyops_real *residual, const int64_t *step, int64_t R, int64_t O, int64_t I,
                                              float p, uint64_t key, void *stream) {
    pyops_status status = check_linear_residual("linear_residual", R, O, I, p);
    if (status) return status;
    PYOPS_REQUIRE(is_bf16(y) == is_bf16(residual), "linear_residual: y and residual have different types, expected one type");
    bool is_fused;
    status = linear_residual("linear_residual", y, x, weight, bias, residual, dropout_of(step, p, key), R, O, I, stream,
                             &is_fused);
    return status || is_fused ? status : pyops_residual(y, residual, y, step, R * O, p, key, stream);
}

extern "C" pyops_status pyops_linear_residual_norm(pyops_real *y, pyops_real *sum, float *mean, float *rstd,
                                                   const pyops_real *x, const pyops_real *weight, const float *bias,
                                                   const pyops_real *residual, const int64_t *step, const float *norm_weight,
                                                   const float *norm_bias, int64_t R, int64_t O, int64_t I, float p,
                                                   uint64_t key, float eps, void *stream) {
    pyops_status status = check_linear_residual_norm("linear_residual_norm", R, O, I, p, eps);
    if (status) return status;
    PYOPS_REQUIRE(is_bf16(y) == is_bf16(sum) && is_bf16(sum) == is_bf16(residual),
                  "linear_residual_norm: y, sum and residual have different types, expected one type");
    bool is_fused;
    status = linear_residual("linear_residual_norm", sum, x, weight, bias, residual, dropout_of(step, p, key), R, O, I, stream,
                             &is_fused);
    if (status) return status;
    return is_fused ? pyops_layer_norm_forward(y, mean, rstd, sum, norm_weight, norm_bias, R, O, eps, stream)
                    : pyops_residual_norm_forward(y, sum, mean, rstd, residual, sum, step, norm_weight, norm_bias, R, O, p, key,
                                                  eps, stream);
}

extern "C" pyops_status pyops_linear_activation_backward(pyops_real *dx, float *dweight, float *dbias, const pyops_real *dy,
                                                         const pyops_real *x, const pyops_real *a, const pyops_real *weight,
                                                         int64_t R, int64_t O, int64_t I, int32_t activation, void *stream) {
    const pyops_status status = check_linear_activation_backward(dx, R, O, I, activation);
    if (status) return status;
    PYOPS_REQUIRE(is_bf16(a) == is_bf16(x), "linear_activation_backward: a and x have different types, expected one type");
    const LinearGradients layer = {dx, dweight, dbias, dy, x, weight, R, O, I, 0, 0, activation, a};
    return linear_gradients("linear_activation_backward", &layer, 1, stream);
}

extern "C" pyops_status pyops_linear_pair(pyops_real *y1, pyops_real *y2, const pyops_real *x1, const pyops_real *x2,
                                          const pyops_real *weight1, const pyops_real *weight2, const float *bias1,
                                          const float *bias2, int64_t R1, int64_t R2, int64_t O1, int64_t O2, int64_t I1,
                                          int64_t I2, void *stream) {
    const pyops_status status = check_linear_pair("linear_pair", R1, R2, O1, O2, I1, I2);
    if (status) return status;
    const AnyProduct p[2] = {{y1, x1, weight1, bias1, R1, O1, I1, O1, I1, 1, 1, I1, 0, 0},
                             {y2, x2, weight2, bias2, R2, O2, I2, O2, I2, 1, 1, I2, 0, 0}};
    bool row_sums_added[2];
    return pyops_launched("linear_pair", any_products(p, 2, stream_of(stream), row_sums_added), stream);
}

extern "C" pyops_status pyops_linear_pair_backward(pyops_real *dx1, pyops_real *dx2, float *dweight1, float *dweight2,
                                                   float *dbias1, float *dbias2, const pyops_real *dy1, const pyops_real *dy2,
                                                   const pyops_real *x1, const pyops_real *x2, const pyops_real *weight1,
                                                   const pyops_real *weight2, int64_t R1, int64_t R2, int64_t O1, int64_t O2,
                                                   int64_t I1, int64_t I2, int32_t accumulate1, int32_t accumulate2,
                                                   void *stream) {
    const pyops_status status = check_linear_pair("linear_pair_backward", R1, R2, O1, O2, I1, I2);
    if (status) return status;
    const LinearGradients layers[2] = {{dx1, dweight1, dbias1, dy1, x1, weight1, R1, O1, I1, 0, accumulate1},
                                       {dx2, dweight2, dbias2, dy2, x2, weight2, R2, O2, I2, 0, accumulate2}};
    return linear_gradients("linear_pair_backward", layers, 2, stream);
}

extern "C" pyops_status pyops_gemm_batched(float *c, const float *a, const float *b, const int64_t *shape,
                                           const int64_t *strides, int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
                                           int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int32_t accumulate,
                                           void *stream) {
    pyops_status status = check_gemm("gemm_batched", M, N, K, ldc);
    if (!status) status = check_shape("gemm_batched", shape, ndim);
    if (status) return status;
    Batch batch = {};
    batch.products = 1;
    for (int64_t d = 0; d < ndim; d++) {
        batch.products *= shape[d];
        batch.shape[d] = shape[d];
        batch.c_step[d] = strides[d], batch.a_step[d] = strides[ndim + d], batch.b_step[d] = strides[2 * ndim + d];
    }
    if (!M || !N || !batch.products) return PYOPS_OK;
    const Precision precision = pyops_precision_now();
    Product g = {c, a, b, nullptr, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, 0};
    batch.ndim = static_cast<int32_t>(ndim);
    if (worth_converting(M, N, K, precision)) {
        Launches launches;
        for (int64_t i = 0; i < batch.products; i++) {
            Product one = g;
            move_to(one, batch, i);
            launches << launch_converted(one, precision, stream_of(stream));
        }
        return pyops_launched("gemm_batched", launches.error, stream);
    }
    const int64_t splits = best_splits(M, N, K, precision);
    // consecutive matrices a with the same b are one taller matrix
    for (; batch.ndim > 0; batch.ndim--) {
        const int d = batch.ndim - 1;
        if (batch.shape[d] == 1) continue;
        if (batch.b_step[d] || batch.a_step[d] != g.M * a_row || batch.c_step[d] != g.M * ldc) break;
        g.M *= batch.shape[d], batch.products /= batch.shape[d];
    }
    return pyops_launched("gemm_batched", launch_products(g, batch, splits, precision, stream_of(stream)), stream);
}

cudaError_t convert_to_bf16(__nv_bfloat16 *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                            cudaStream_t stream) {
    return convert(y, x, R, C, ld, row, col, stream);
}
extern "C" pyops_status pyops_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                                      void *stream) {
    const pyops_status status = check_to_bf16(R, C, ld);
    if (status) return status;
    if (!R || !C) return PYOPS_OK;
    return pyops_launched("to_bf16", convert(reinterpret_cast<bf16 *>(y), x, R, C, ld, row, col, stream_of(stream)), stream);
}

extern "C" pyops_status pyops_gemm_bf16(float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
                                        int64_t ldc, int64_t lda, int64_t ldb, int32_t accumulate, void *stream) {
    const pyops_status status = check_gemm_bf16(M, N, K, ldc, lda, ldb);
    if (status) return status;
    if (!M || !N) return PYOPS_OK;
    const auto rows = [](const uint16_t *x) { return real(reinterpret_cast<const bf16 *>(x)); };
    const RealProduct g = {c,          nullptr, operand(rows(a), M, lda, 1), operand(rows(b), N, ldb, 1), nullptr, M, N, K, ldc,
                           accumulate, 0};
    return pyops_launched("gemm_bf16", real_product(g, stream_of(stream)), stream);
}
