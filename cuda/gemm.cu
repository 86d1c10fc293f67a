// gemm.cu - matrix products: c (+)= a b + bias, for operands of any strides.
//
// A block computes a tile of c (tile.cuh) of 128 x 128, 64 x 64 or 32 x 32 sums.  If there are fewer tiles than
// multiprocessors and K is long, several blocks share a tile, each with a part of K (split-K): their sums go to the workspace,
// and a second kernel adds them in order.  Both choices depend only on the sizes, so a product has the same bits in every run,
// alone or in a batch.
//
// If any operand or c is bfloat16, the product is one of bfloat16 operands: on Hopper with bulk copies and wgmma
// (hopper_gemm.cu), otherwise in tiles with bfloat16 panels (tile_bf16.cuh).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include "product.cuh"
#include "tile.cuh"
#include "tile_bf16.cuh"

namespace {
struct Product {
    float *c;
    const float *a, *b, *bias;
    int64_t M, N, K, ldc, a_row, a_col, b_row, b_col;
    int32_t accumulate, relu;
};
struct Batch {                              // the axes of a batch, and the strides of the matrices along each
    int32_t ndim;
    int64_t products, shape[8], c_step[8], a_step[8], b_step[8];
};
struct Work {                               // the division of a launch: blocks = products * splits * tiles
    int64_t tiles_m, tiles_n, splits, k_part;
    int64_t first;                          // index in the batch of the first product of this launch
    float *parts;                           // sums of parts of K: (splits, products, M, N); NULL if there is one part
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
    *c = finished(sum, c, g.bias ? g.bias + n : nullptr, g.accumulate, g.relu);
}

template <class S, Precision P, bool A_K, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) tile_product(Product g, Batch batch, Work work, bool a16, bool b16) {
    using T = Tile<S, P, Stored<A_K>, Stored<B_K>>;
    DYN_SHARED(float, shared);
    const int64_t tiles = work.tiles_m * work.tiles_n;
    const int64_t split = blockIdx.x / tiles % work.splits, product = blockIdx.x / tiles / work.splits;
    const TileIndex at = tile_index<8>(blockIdx.x % tiles, work.tiles_m, work.tiles_n);
    const int64_t m0 = at.m * S::M, n0 = at.n * S::N;
    move_to(g, batch, work.first + product);
    const int64_t k0 = split * work.k_part, k1 = k0 + work.k_part < g.K ? k0 + work.k_part : g.K;
    T::product(shared, {g.a, g.M, g.a_row, g.a_col, a16}, {g.b, g.N, g.b_col, g.b_row, b16}, m0, n0, k0, k1);
    float *part = work.parts ? work.parts + (split * batch.products + product) * g.M * g.N : nullptr;
    T::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= g.M || n0 + n >= g.N) return;
        if (part) part[(m0 + m) * g.N + n0 + n] = sum;
        else finish(g, m0 + m, n0 + n, sum);
    });
}

static __global__ void add_parts(Product g, Batch batch, Work work) {
    const int64_t size = g.M * g.N, all = batch.products * size;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < all; i += int64_t(gridDim.x) * blockDim.x) {
        float sum = work.parts[i];
        for (int64_t split = 1; split < work.splits; split++) sum += work.parts[split * all + i];
        Product at = g;
        move_to(at, batch, work.first + i / size);
        finish(at, i % size / g.N, i % size % g.N, sum);
    }
}

// ---- choice of the tile size and the number of parts of K --------------------------------------------------------
enum class Size { large, medium, small };
template <Precision P, Size> struct ShapeOf;
template <Precision P> struct ShapeOf<P, Size::large> { using S = TileShape<128, 128, 32, 2, 2, 3>; };
template <> struct ShapeOf<Precision::fp32, Size::large> { using S = TileShape<128, 128, 16, 4, 2, 3>; };
template <Precision P> struct ShapeOf<P, Size::medium> { using S = TileShape<64, 64, 32, 2, 2, 3>; };
template <Precision P> struct ShapeOf<P, Size::small> { using S = TileShape<32, 32, 64, 2, 2, 4>; };

struct Cut {
    Size size;
    int64_t splits;
};

static constexpr int64_t PART = 64, MOST_PARTS = 32;            // parts of K are multiples of PART

// Cost model of a product, in cycles: blocks run in waves over the multiprocessors, small tiles wait longer for memory than
// large ones, every wave has a fixed latency, and split-K costs a second kernel and memory traffic.
static double cycles(Size size, int64_t splits, int64_t products, int64_t M, int64_t N, int64_t K, Precision precision) {
    const int64_t side = size == Size::large ? 128 : size == Size::medium ? 64 : 32, processors = pyops_multiprocessors();
    const double fmas_a_cycle = (precision == Precision::fp32       ? 110
                                     : precision == Precision::tf32 ? 450
                                                                    : 520) *
        (size == Size::large        ? 1.0
             : size == Size::medium ? 0.6
                                    : 0.3);
    const double waves = blocks_for(blocks_for(M, side) * blocks_for(N, side) * splits * products, processors);
    const double parts = splits == 1 ? 0 : 3000 + 2.0 * M * N * products * splits / (8.0 * processors);
    return waves * (1500 + side * side * double(blocks_for(K, splits)) / fmas_a_cycle) + parts;
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
    const int64_t room = int64_t(PYOPS_WORKSPACE / sizeof(float)) / (M * N);
    const int64_t most = std::min({MOST_PARTS, room, blocks_for(K, 4 * PART)});
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

template <class S, Precision P, bool A_K, bool B_K> static cudaError_t launch_tiles(const Product &g, const Batch &batch,
                                                                                    Work work, cudaStream_t stream) {
    using T = Tile<S, P, Stored<A_K>, Stored<B_K>>;
    const bool a16 = whole16(g.a, A_K ? g.a_col : g.a_row, A_K ? g.a_row : g.a_col, batch.a_step, batch);
    const bool b16 = whole16(g.b, B_K ? g.b_row : g.b_col, B_K ? g.b_col : g.b_row, batch.b_step, batch);
    const cudaError_t error = allow_shared<tile_product<S, P, A_K, B_K>>(T::BYTES);
    if (error != cudaSuccess) return error;
    work.tiles_m = blocks_for<int64_t>(g.M, S::M), work.tiles_n = blocks_for<int64_t>(g.N, S::N);
    const unsigned blocks = static_cast<unsigned>(work.tiles_m * work.tiles_n * work.splits * batch.products);
    return LAUNCH((tile_product<S, P, A_K, B_K>), blocks, T::THREADS, T::BYTES, stream, g, batch, work, a16, b16);
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

// A batch is launched in pieces if the workspace or the grid is too small for it.
static cudaError_t launch_products(const Product &g, Batch batch, int64_t splits, Precision precision, cudaStream_t stream) {
    const int64_t M = g.M, N = g.N, K = g.K, products = batch.products;
    const int64_t most_tiles = blocks_for<int64_t>(M, 32) * blocks_for<int64_t>(N, 32);
    const Size size = best_size(splits, products, M, N, K, precision);
    int64_t at_once = std::min(products, std::max<int64_t>(1, INT32_MAX / (most_tiles * splits)));
    Work work = {0, 0, splits, round_up(std::max<int64_t>(1, blocks_for(K, splits)), PART), 0, nullptr};
    if (splits > 1) {
        at_once = std::min<int64_t>(at_once, PYOPS_WORKSPACE / sizeof(float) / (M * N * splits));
        work.parts = static_cast<float *>(pyops_workspace(sizeof(float) * M * N * splits * at_once));
        if (!work.parts) return cudaErrorMemoryAllocation;
    }
    Launches launches;
    for (; work.first < products; work.first += at_once) {
        batch.products = std::min(at_once, products - work.first);
        launches << (precision == Precision::fp32       ? launch_size<Precision::fp32>(size, g, batch, work, stream)
                         : precision == Precision::tf32 ? launch_size<Precision::tf32>(size, g, batch, work, stream)
                                                        : launch_size<Precision::bf16>(size, g, batch, work, stream));
        if (work.parts) launches << LAUNCH(add_parts, grid_for(M * N * batch.products, 256), 256, 0, stream, g, batch, work);
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
        return LAUNCH(convert_rows<Element>, blocks, 256, 0, stream, y, x, R, C, ld, row, col, whole16);
    }
    const int64_t squares = blocks_for<int64_t>(R, SQUARE) * blocks_for<int64_t>(C, SQUARE);
    return LAUNCH(convert_transposed<Element>, static_cast<unsigned>(squares), 256, 0, stream, y, x, R, C, ld, row, col);
}

// ---- products of bfloat16 -----------------------------------------------------------------------------------------
// Cost model of the product on Hopper, as for `cycles`.
static double hopper_cycles(int64_t splits, int64_t M, int64_t N, int64_t K, bool is_bf16) {
    const int64_t processors = pyops_multiprocessors(), rows = blocks_for<int64_t>(M, 128) * splits;
    const auto tiles = [&](int64_t width) {
        const double waves = blocks_for(rows * blocks_for(N, width), processors);
        return waves * (2000 + 128.0 * width * blocks_for(K, splits) / (is_bf16 ? 1500 : 750));
    };
    const double parts = splits == 1 ? 0 : 3000 + 2.0 * M * N * splits / (8.0 * processors);
    return std::min(tiles(256), tiles(128)) + parts;
}

static int64_t best_hopper_splits(int64_t M, int64_t N, int64_t K) {
    const int64_t room = int64_t(PYOPS_WORKSPACE / sizeof(float)) / (M * N), most = std::min({MOST_PARTS, room, K / 512});
    int64_t best = 1;
    for (int64_t splits = 2; splits <= most; splits++)
        if (hopper_cycles(splits, M, N, K, true) < hopper_cycles(best, M, N, K, true)) best = splits;
    const int64_t steps = blocks_for<int64_t>(K, 64);
    return blocks_for(steps, blocks_for(steps, best));                 // no part is empty
}

DEVICE void finish(const RealProduct &g, int64_t m, int64_t n, float sum) {
    const int64_t at = (g.scatter ? g.scatter[m] : m) * g.ldc + n;
    const float *const bias = g.bias ? g.bias + n : nullptr;
    if (g.to_float) g.to_float[at] = finished(sum, g.to_float + at, bias, g.accumulate, g.relu);
    else g.to_bf16[at] = as<bf16>(finished(sum, g.to_bf16 + at, bias, g.accumulate, g.relu));
}

template <class S, bool A_K, bool B_K>
static __global__ void __launch_bounds__(S::THREADS, 2) bf16_product(RealProduct g, Work work) {
    using T = HalfTile<S, A_K, B_K>;
    DYN_SHARED(float, shared);
    const int64_t tiles = work.tiles_m * work.tiles_n, split = blockIdx.x / tiles;
    const TileIndex at = tile_index<8>(blockIdx.x % tiles, work.tiles_m, work.tiles_n);
    const int64_t m0 = at.m * S::M, n0 = at.n * S::N, M = g.limit.rows(g.M), K = g.limit.summands(g.K);
    const int64_t k0 = split * work.k_part, k1 = k0 + work.k_part < K ? k0 + work.k_part : K;
    if (m0 >= M) return;
    g.a.rows = M;
    T::product(shared, g.a, g.b, m0, n0, k0, k1);
    float *const part = work.parts ? work.parts + split * g.M * g.N : nullptr;
    T::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= M || n0 + n >= g.N) return;
        if (part) part[(m0 + m) * g.N + n0 + n] = sum;
        else finish(g, m0 + m, n0 + n, sum);
    });
}

static __global__ void add_real_parts(RealProduct g, const float *parts, int64_t splits) {
    const int64_t size = g.M * g.N, used = g.limit.rows(g.M) * g.N;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < used; i += int64_t(gridDim.x) * blockDim.x) {
        float sum = parts[i];
        for (int64_t split = 1; split < splits; split++) sum += parts[split * size + i];
        finish(g, i / g.N, i % g.N, sum);
    }
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
    return LAUNCH((bf16_product<S, A_K, B_K>), blocks, T::THREADS, T::BYTES, stream, g, work);
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
    return splits > 1 ? static_cast<float *>(pyops_workspace(sizeof(float) * M * N * splits)) : nullptr;
}

static cudaError_t launch_bf16_mma(const RealProduct &g, cudaStream_t stream) {
    const int64_t splits = best_splits(g.M, g.N, g.K, Precision::bf16);
    const Size size = best_size(splits, 1, g.M, g.N, g.K, Precision::bf16);
    const Work work = {
        0, 0, splits, round_up(std::max<int64_t>(1, blocks_for(g.K, splits)), PART), 0, room_for_parts(splits, g.M, g.N)};
    if (splits > 1 && !work.parts) return cudaErrorMemoryAllocation;
    Launches launches;
    launches << (size == Size::large        ? launch_bf16_layout<Size::large>(g, work, stream)
                     : size == Size::medium ? launch_bf16_layout<Size::medium>(g, work, stream)
                                            : launch_bf16_layout<Size::small>(g, work, stream));
    if (work.parts) launches << LAUNCH(add_real_parts, grid_for(g.M * g.N, 256), 256, 0, stream, g, work.parts, work.splits);
    return launches.error;
}

template <class Out> static bool launch_bf16_hopper(cudaError_t *error, const RealProduct &g, Out *c, cudaStream_t stream) {
    const auto ld = [](const RealOperand &x) { return x.k_step == 1 ? x.row_step : x.row_step == 1 ? x.k_step : -1; };
    if (g.a.is_float || g.b.is_float || ld(g.a) < 0 || ld(g.b) < 0) return false;
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
                               g.b.k_step == 1,
                               1,
                               nullptr,
                               g.limit,
                               g.scatter};
    if (!hopper_product_fits(p)) return false;
    p.splits = best_hopper_splits(g.M, g.N, g.K);
    const double tiles = least_cycles(best_splits(g.M, g.N, g.K, Precision::bf16), g.M, g.N, g.K, Precision::bf16);
    if (hopper_cycles(p.splits, g.M, g.N, g.K, true) > tiles) return false;
    p.parts = room_for_parts(p.splits, g.M, g.N);
    *error = p.splits > 1 && !p.parts ? cudaErrorMemoryAllocation : hopper_product(p, stream);
    if (*error == cudaSuccess && p.parts)
        *error = LAUNCH(add_real_parts, grid_for(g.M * g.N, 256), 256, 0, stream, g, p.parts, p.splits);
    return true;
}

}

cudaError_t real_product(const RealProduct &g, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    if (g.K &&
        (g.to_float ? launch_bf16_hopper(&error, g, g.to_float, stream) : launch_bf16_hopper(&error, g, g.to_bf16, stream)))
        return error;
    return launch_bf16_mma(g, stream);
}

namespace {
// For large products it pays to convert the operands first, into rows along K, because wgmma is then available.
// Depends only on the sizes of one product, like best_splits.
static bool worth_converting(int64_t M, int64_t N, int64_t K, Precision precision) {
    if (precision == Precision::fp32 || !pyops_has_hopper() || !K || K > int64_t(PYOPS_WORKSPACE) / 16) return false;
    const bool is_bf16 = precision == Precision::bf16;
    const int64_t processors = pyops_multiprocessors();
    const double passes = 6000 + (is_bf16 ? 6.0 : 8.0) * (double(M) + N) * K / (20.0 * processors); // 20 bytes per cycle
    return passes + hopper_cycles(1, M, N, K, is_bf16) < least_cycles(best_splits(M, N, K, precision), M, N, K, precision);
}

// The converted operands share the workspace, half each: c is computed in rectangles with as many rows and columns as fit.
template <class Element> static cudaError_t launch_converted(const Product &g, cudaStream_t stream) {
    constexpr int64_t HALF = PYOPS_WORKSPACE / sizeof(Element) / 2;
    const int64_t ld = round_up<int64_t>(g.K, 8), rows = std::min(g.M, HALF / ld), columns = std::min(g.N, HALF / ld);
    Element *a = static_cast<Element *>(pyops_workspace(PYOPS_WORKSPACE)), *b = a + HALF;
    if (!a) return cudaErrorMemoryAllocation;
    Launches launches;
    for (int64_t n = 0; n < g.N; n += columns) {
        const int64_t N = std::min(columns, g.N - n);
        launches << convert(b, g.b + n * g.b_col, N, g.K, ld, g.b_col, g.b_row, stream);
        for (int64_t m = 0; m < g.M; m += rows) {
            const int64_t M = std::min(rows, g.M - m);
            if (n == 0 || rows < g.M) launches << convert(a, g.a + m * g.a_row, M, g.K, ld, g.a_row, g.a_col, stream);
            const RowProduct<Element> part = {
                g.c + m * g.ldc + n, a, b, g.bias ? g.bias + n : nullptr, M, N, g.K, g.ldc, ld, ld, g.accumulate, g.relu};
            launches << hopper_product(part, stream);
        }
    }
    return launches.error;
}
static cudaError_t launch_converted(const Product &g, Precision precision, cudaStream_t stream) {
    return precision == Precision::bf16 ? launch_converted<bf16>(g, stream) : launch_converted<float>(g, stream);
}
}

// ---- the ABI --------------------------------------------------------------------------------------------------
extern "C" pyops_status pyops_gemm(pyops_real *c, const pyops_real *a, const pyops_real *b, const float *bias, int64_t M,
                                   int64_t N, int64_t K, int64_t ldc, int64_t a_row, int64_t a_col, int64_t b_row,
                                   int64_t b_col, int32_t accumulate, int32_t relu, void *stream) {
    const pyops_status status = check_gemm("gemm", M, N, K, ldc);
    if (status) return status;
    if (!M || !N) return PYOPS_OK;
    if (is_bf16(c) || is_bf16(a) || is_bf16(b)) {
        float *const to_float = is_bf16(c) ? nullptr : elements<float>(c);
        bf16 *const to_bf16 = is_bf16(c) ? elements<bf16>(c) : nullptr;
        const RealProduct g = {
            to_float, to_bf16, operand(a, M, a_row, a_col), operand(b, N, b_col, b_row), bias, M, N, K, ldc, accumulate, relu};
        return pyops_launched("gemm", real_product(g, stream_of(stream)), stream);
    }
    const Precision precision = pyops_precision_now();
    const Product g = {elements<float>(c),
                       elements<float>(a),
                       elements<float>(b),
                       bias,
                       M,
                       N,
                       K,
                       ldc,
                       a_row,
                       a_col,
                       b_row,
                       b_col,
                       accumulate,
                       relu};
    Batch one = {};
    one.products = 1;
    const cudaError_t error = worth_converting(M, N, K, precision)
        ? launch_converted(g, precision, stream_of(stream))
        : launch_products(g, one, best_splits(M, N, K, precision), precision, stream_of(stream));
    return pyops_launched("gemm", error, stream);
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
