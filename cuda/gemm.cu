// gemm.cu - matrix products: c (+)= a b + bias, for operands of any strides.
//
// A block computes a tile of c (tile.cuh) of 128 x 128, 64 x 64 or 32 x 32 sums.  If there are fewer tiles than
// multiprocessors and K is long, several blocks share a tile, each with a part of K (split-K): their sums go to the workspace,
// and a second kernel adds them in order.  Both choices depend only on the sizes, so a product has the same bits in every run,
// alone or in a batch.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include "product.cuh"
#include "tile.cuh"

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
    if constexpr (sizeof(Element) == 2) {
        const __nv_bfloat16 y = __float2bfloat16(x);
        uint16_t bits;
        memcpy(&bits, &y, sizeof bits);
        return bits;
    } else {
        return __uint_as_float(to_tf32(x));
    }
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

// ---- products of bfloat16 matrices, and products that are worth a conversion -----------------------------------------
// Without Hopper's tensor cores, or at addresses that bulk copies do not support: the same tiles as above.  The operands are
// converted to float32 on the way into shared memory and back to the same bfloat16 numbers in registers.
struct FromBf16 {
    static constexpr bool k_inner = true;
    static constexpr Way way = Way::made;
    struct Line {};
    const uint16_t *p;
    int64_t rows, ld;
    __device__ __forceinline__ float operator()(int64_t row, int64_t k) const {
        return __uint_as_float(static_cast<unsigned>(p[row * ld + k]) << 16);
    }
};
using TileBf16 = Tile<TileShape<128, 128, 32, 4, 2, 2>, Precision::bf16, FromBf16, FromBf16>;

static __global__ void __launch_bounds__(TileBf16::THREADS, 1) tile_product_bf16(RowProduct<uint16_t> g) {
    DYN_SHARED(float, shared);
    const TileIndex at = tile_index<8>(blockIdx.x, blocks_for<int64_t>(g.M, 128), blocks_for<int64_t>(g.N, 128));
    const int64_t m0 = at.m * 128, n0 = at.n * 128;
    TileBf16::product(shared, {g.a, g.M, g.lda}, {g.b, g.N, g.ldb}, m0, n0, 0, g.K);
    TileBf16::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= g.M || n0 + n >= g.N) return;
        float *c = g.c + (m0 + m) * g.ldc + n0 + n;
        *c = finished(sum, c, g.bias ? g.bias + n0 + n : nullptr, g.accumulate, g.relu);
    });
}

static cudaError_t launch_bf16(const RowProduct<uint16_t> &g, cudaStream_t stream) {
    if (hopper_product_fits(g)) return hopper_product(g, stream);
    const cudaError_t error = allow_shared<tile_product_bf16>(TileBf16::BYTES);
    if (error != cudaSuccess) return error;
    return LAUNCH(tile_product_bf16, static_cast<unsigned>(blocks_for<int64_t>(g.M, 128) * blocks_for<int64_t>(g.N, 128)),
                  TileBf16::THREADS, TileBf16::BYTES, stream, g);
}

// For large products it pays to convert the operands first, into rows along K, because wgmma is then available.
// Depends only on the sizes of one product, like best_splits.
static bool worth_converting(int64_t M, int64_t N, int64_t K, Precision precision) {
    if (precision == Precision::fp32 || !pyops_has_hopper() || !K || K > int64_t(PYOPS_WORKSPACE) / 16) return false;
    const bool bf16 = precision == Precision::bf16;
    const int64_t processors = pyops_multiprocessors();
    const double waves = blocks_for(blocks_for<int64_t>(M, 128) * blocks_for<int64_t>(N, 256), processors);
    const double passes = 6000 + (bf16 ? 6.0 : 8.0) * (double(M) + N) * K / (20.0 * processors);         // 20 bytes per cycle
    const double product = waves * (2000 + 128.0 * 256 * K / (bf16 ? 1500 : 750));
    return passes + product < least_cycles(best_splits(M, N, K, precision), M, N, K, precision);
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
            launches << hopper_product<Element>(
                {g.c + m * g.ldc + n, a, b, g.bias ? g.bias + n : nullptr, M, N, g.K, g.ldc, ld, ld, g.accumulate, g.relu},
                stream);
        }
    }
    return launches.error;
}
static cudaError_t launch_converted(const Product &g, Precision precision, cudaStream_t stream) {
    return precision == Precision::bf16 ? launch_converted<uint16_t>(g, stream) : launch_converted<float>(g, stream);
}
}

// ---- the ABI --------------------------------------------------------------------------------------------------
extern "C" pyops_status pyops_gemm(float *c, const float *a, const float *b, const float *bias, int64_t M, int64_t N, int64_t K,
                                   int64_t ldc, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int32_t accumulate,
                                   int32_t relu, void *stream) {
    const pyops_status status = check_gemm("gemm", M, N, K, ldc);
    if (status) return status;
    if (!M || !N) return PYOPS_OK;
    const Precision precision = pyops_precision_now();
    const Product g = {c, a, b, bias, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, relu};
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

cudaError_t convert_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                            cudaStream_t stream) {
    return convert(y, x, R, C, ld, row, col, stream);
}
extern "C" pyops_status pyops_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                                      void *stream) {
    const pyops_status status = check_to_bf16(R, C, ld);
    if (status) return status;
    if (!R || !C) return PYOPS_OK;
    return pyops_launched("to_bf16", convert(y, x, R, C, ld, row, col, stream_of(stream)), stream);
}

extern "C" pyops_status pyops_gemm_bf16(float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
                                        int64_t ldc, int64_t lda, int64_t ldb, int32_t accumulate, void *stream) {
    const pyops_status status = check_gemm_bf16(M, N, K, ldc, lda, ldb);
    if (status) return status;
    if (!M || !N) return PYOPS_OK;
    const RowProduct<uint16_t> g = {c, a, b, nullptr, M, N, K, ldc, lda, ldb, accumulate, 0};
    return pyops_launched("gemm_bf16", launch_bf16(g, stream_of(stream)), stream);
}
