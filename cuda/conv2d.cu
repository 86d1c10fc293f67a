// conv2d.cu - convolutions in two dimensions as matrix products whose operands are computed from indices.
//
//     forward          y  (O, N Ho Wo)        =  weight (O, C kh kw)   x  windows of x (C kh kw, N Ho Wo)
//     backward_x       dx (C, N H W)          =  weight' (C, O kh kw)  x  windows of dy (O kh kw, N H W)
//     backward_weight  dweight (O, C kh kw)  +=  dy (O, N Ho Wo)       x  windows of x (N Ho Wo, C kh kw)
//
// A block computes a tile of 64 x 64 in steps of 16 along the sum.  Groups with few rows would leave most of a tile empty: then
// a thread computes one element, or for the weight a block does.  The batch of backward_weight is cut into parts, whose sums
// are added in order, so that small weights fill the device, too.
#include "block.cuh"

namespace {
static constexpr int TILE = 64, DEPTH = 16, THREADS = 256, EACH = 4, FEW_ROWS = 8, MOST_PARTS = 64;

struct Position { int64_t n, i, j; }; // of an output, an input, or in a filter: n is a channel there

DEVICE Position position(int64_t index, int64_t rows, int64_t cols) {
    const int64_t n = index / (rows * cols), rest = index - n * (rows * cols);
    return {n, rest / cols, rest % cols};
}

// The product of a group: c (rows, columns) = a (rows, depth) b (depth, columns).  `z`: the group and, for the weight, the part.
struct Forward {
    static constexpr bool ALONG_SUM = false; // whether adjacent elements of b along the sum are adjacent in memory
    pyops_conv2d s;
    float *y;
    const float *x, *weight, *bias;
    __host__ __device__ int64_t rows() const { return s.O / s.groups; }
    __host__ __device__ int64_t columns() const { return s.N * s.Ho * s.Wo; }
    __host__ __device__ int64_t from(int64_t) const { return 0; }
    __host__ __device__ int64_t to(int64_t) const { return s.C / s.groups * s.kh * s.kw; }
    __device__ float a(int64_t z, int64_t m, int64_t k) const { return weight[(z * rows() + m) * to(z) + k]; }
    __device__ float b(int64_t z, int64_t k, int64_t q) const {
        const Position at = position(q, s.Ho, s.Wo), tap = position(k, s.kh, s.kw);
        const int64_t row = at.i * s.stride_h + tap.i * s.dilation_h - s.pad_h;
        const int64_t col = at.j * s.stride_w + tap.j * s.dilation_w - s.pad_w;
        if (row < 0 || row >= s.H || col < 0 || col >= s.W) return 0.0f;
        return x[((at.n * s.C + z * (s.C / s.groups) + tap.n) * s.H + row) * s.W + col];
    }
    __device__ void store(int64_t z, int64_t m, int64_t q, float sum) const {
        const int64_t area = s.Ho * s.Wo, o = z * rows() + m;
        y[(q / area * s.O + o) * area + q % area] = sum + (bias ? bias[o] : 0.0f);
    }
};

struct BackwardX {
    static constexpr bool ALONG_SUM = false;
    pyops_conv2d s;
    float *dx;
    const float *dy, *weight;
    __host__ __device__ int64_t rows() const { return s.C / s.groups; }
    __host__ __device__ int64_t columns() const { return s.N * s.H * s.W; }
    __host__ __device__ int64_t from(int64_t) const { return 0; }
    __host__ __device__ int64_t to(int64_t) const { return s.O / s.groups * s.kh * s.kw; }
    __device__ float a(int64_t z, int64_t m, int64_t k) const {
        const int64_t taps = s.kh * s.kw;
        return weight[((z * (s.O / s.groups) + k / taps) * rows() + m) * taps + k % taps];
    }
    __device__ float b(int64_t z, int64_t k, int64_t q) const {
        const Position at = position(q, s.H, s.W), tap = position(k, s.kh, s.kw);
        const int64_t row = at.i + s.pad_h - tap.i * s.dilation_h, col = at.j + s.pad_w - tap.j * s.dilation_w;
        if (row < 0 || col < 0 || row % s.stride_h || col % s.stride_w) return 0.0f;
        const int64_t i = row / s.stride_h, j = col / s.stride_w;
        if (i >= s.Ho || j >= s.Wo) return 0.0f;
        return dy[((at.n * s.O + z * (s.O / s.groups) + tap.n) * s.Ho + i) * s.Wo + j];
    }
    __device__ void store(int64_t z, int64_t m, int64_t q, float sum) const {
        const int64_t area = s.H * s.W;
        dx[(q / area * s.C + z * rows() + m) * area + q % area] = sum;
    }
};

struct BackwardWeight {
    static constexpr bool ALONG_SUM = true;
    pyops_conv2d s;
    float *partial; // (parts, O, C / groups, kh, kw)
    const float *dy, *x;
    int64_t parts;
    __host__ __device__ int64_t rows() const { return s.O / s.groups; }
    __host__ __device__ int64_t columns() const { return s.C / s.groups * s.kh * s.kw; }
    __host__ __device__ int64_t from(int64_t z) const { return z / s.groups * (s.N * s.Ho * s.Wo) / parts; }
    __host__ __device__ int64_t to(int64_t z) const { return (z / s.groups + 1) * (s.N * s.Ho * s.Wo) / parts; }
    __device__ float a(int64_t z, int64_t m, int64_t k) const {
        const int64_t area = s.Ho * s.Wo;
        return dy[(k / area * s.O + z % s.groups * rows() + m) * area + k % area];
    }
    __device__ float b(int64_t z, int64_t k, int64_t q) const {
        return Forward{s, nullptr, x, nullptr, nullptr}.b(z % s.groups, q, k);
    }
    __device__ void store(int64_t z, int64_t m, int64_t q, float sum) const {
        partial[(z / s.groups * s.O + z % s.groups * rows() + m) * columns() + q] = sum;
    }
};

template <class F> static __global__ void __launch_bounds__(THREADS) tiles(F f) {
    SHARED(float, a, [DEPTH][TILE + 1]);
    SHARED(float, b, [DEPTH][TILE + 1]);
    const int64_t z = blockIdx.z, to = f.to(z), rows = f.rows(), columns = f.columns();
    const int64_t first_row = blockIdx.y * int64_t(TILE), first_column = blockIdx.x * int64_t(TILE);
    const int across = threadIdx.x % (TILE / EACH), down = threadIdx.x / (TILE / EACH);
    float sums[EACH][EACH] = {};
    for (int64_t k = f.from(z); k < to; k += DEPTH) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int element = e * THREADS + threadIdx.x, deep = element % DEPTH, wide = element / DEPTH;
            a[deep][wide] = k + deep < to && first_row + wide < rows ? f.a(z, first_row + wide, k + deep) : 0.0f;
            const int depth = F::ALONG_SUM ? deep : element / TILE, column = F::ALONG_SUM ? wide : element % TILE;
            b[depth][column] = k + depth < to && first_column + column < columns ? f.b(z, k + depth, first_column + column)
                                                                                 : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            float of_a[EACH], of_b[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                of_a[e] = a[d][e * (TILE / EACH) + down];
                of_b[e] = b[d][e * (TILE / EACH) + across];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sums[i][j] += of_a[i] * of_b[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t m = first_row + i * (TILE / EACH) + down, q = first_column + j * (TILE / EACH) + across;
            if (m < rows && q < columns) f.store(z, m, q, sums[i][j]);
        }
}

// A thread per element.
template <class F> static __global__ void __launch_bounds__(THREADS) elements(F f, int64_t size) {
    const int64_t rows = f.rows(), columns = f.columns();
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < size; i += gridDim.x * int64_t(THREADS)) {
        const int64_t z = i / columns / rows, m = i / columns % rows, q = i % columns;
        float sum = 0.0f;
        for (int64_t k = f.from(z); k < f.to(z); k++) sum += f.a(z, m, k) * f.b(z, k, q);
        f.store(z, m, q, sum);
    }
}

// A block per element: the grid is (columns, rows, z).
static __global__ void __launch_bounds__(THREADS) sums(BackwardWeight f) {
    SHARED(float, of_warps, [THREADS / 32]);
    const int64_t z = blockIdx.z, m = blockIdx.y, q = blockIdx.x;
    float sum = 0.0f;
    for (int64_t k = f.from(z) + threadIdx.x; k < f.to(z); k += THREADS) sum += f.a(z, m, k) * f.b(z, k, q);
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) f.store(z, m, q, sum);
}

static __global__ void __launch_bounds__(THREADS) add_parts(float *dweight, const float *partial, int64_t size, int64_t parts) {
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < size; i += gridDim.x * int64_t(THREADS)) {
        float sum = 0.0f;
        for (int64_t part = 0; part < parts; part++) sum += partial[part * size + i];
        dweight[i] += sum;
    }
}

// A block per filter.
static __global__ void __launch_bounds__(THREADS)
    bias_gradient(float *dbias, const float *dy, int64_t N, int64_t O, int64_t area) {
    SHARED(double, of_warps, [THREADS / 32]);
    const int64_t o = blockIdx.x;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < N * area; i += THREADS) sum += dy[(i / area * O + o) * area + i % area];
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) dbias[o] += static_cast<float>(sum);
}

// The grid's second and third sizes have 16 bits.
static constexpr int64_t MOST = 65535;

template <class F> static cudaError_t launch_product(const F &f, int64_t z, void *stream) {
    const int64_t columns = blocks_for<int64_t>(f.columns(), TILE), rows = blocks_for<int64_t>(f.rows(), TILE);
    if (f.rows() < FEW_ROWS || z > MOST || rows > MOST) {
        const int64_t size = z * f.rows() * f.columns();
        return LAUNCH(elements<F>, grid_for(size, THREADS), THREADS, 0, stream_of(stream), f, size);
    }
    const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows), static_cast<unsigned>(z));
    return LAUNCH(tiles<F>, grid, THREADS, 0, stream_of(stream), f);
}

static int64_t filters_size(const pyops_conv2d &s) { return s.O * (s.C / s.groups) * s.kh * s.kw; }

// Parts of the batch, to fill the device with tiles of the weight: at least 256 positions each, and 4 Mi floats in all.
static int64_t parts_of(const pyops_conv2d &s) {
    int64_t parts = blocks_for<int64_t>(s.N * s.Ho * s.Wo, 256);
    if (parts > MOST_PARTS) parts = MOST_PARTS;
    const int64_t most = (int64_t(1) << 22) / filters_size(s);
    if (parts > most) parts = most;
    return parts > 1 ? parts : 1;
}
}

#define SIZES \
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw, int64_t stride_h, \
        int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, int64_t groups
#define SIZES_OF {N, C, H, W, O, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups}

extern "C" int64_t pyops_conv2d_forward_work(SIZES) { return 0; }
extern "C" int64_t pyops_conv2d_backward_x_work(SIZES) { return 0; }
extern "C" int64_t pyops_conv2d_backward_weight_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    return parts_of(s) * filters_size(s);
}

extern "C" pyops_status pyops_conv2d_forward(float *y, const float *x, const float *weight, const float *bias, float *, SIZES,
                                             void *stream) {
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_forward", &s);
    if (status || !N) return status;
    return pyops_launched("conv2d_forward", launch_product(Forward{s, y, x, weight, bias}, groups, stream), stream);
}

extern "C" pyops_status pyops_conv2d_backward_x(float *dx, const float *dy, const float *weight, float *, SIZES, void *stream) {
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_backward_x", &s);
    if (status || !N) return status;
    return pyops_launched("conv2d_backward_x", launch_product(BackwardX{s, dx, dy, weight}, groups, stream), stream);
}

extern "C" pyops_status pyops_conv2d_backward_weight(float *dweight, float *dbias, const float *dy, const float *x, float *work,
                                                     SIZES, void *stream) {
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_backward_weight", &s);
    if (status || !N) return status;
    const int64_t parts = parts_of(s), size = filters_size(s), z = parts * groups;
    const BackwardWeight f = {s, work, dy, x, parts};
    Launches launches;
    if (f.rows() < FEW_ROWS && z <= MOST)
        launches << LAUNCH(sums, dim3(unsigned(f.columns()), unsigned(f.rows()), unsigned(z)), THREADS, 0, stream_of(stream),
                           f);
    else launches << launch_product(f, z, stream);
    launches << LAUNCH(add_parts, grid_for(size, THREADS), THREADS, 0, stream_of(stream), dweight, work, size, parts);
    if (dbias) launches << LAUNCH(bias_gradient, unsigned(O), THREADS, 0, stream_of(stream), dbias, dy, N, O, Ho * Wo);
    return pyops_launched("conv2d_backward_weight", launches.error, stream);
}
