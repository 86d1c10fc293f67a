// muon.cu - the parts of Muon that are no matrix product: momentum and scaling, the polynomial of an iteration, the update.
//
// A block handles a chunk of one matrix: the grid is (chunks, matrices).
#include "adam.cuh"
#include "block.cuh"
#include "index.cuh"

namespace {
static constexpr int THREADS = 256, CHUNK = 4096;

static int64_t chunks_of(int64_t n) { return blocks_for<int64_t>(n, CHUNK); }

static __global__ void __launch_bounds__(THREADS)
    with_momentum(float *x, float *m, const float *grad, const float *norm, const int64_t *offsets, double *sums, int64_t n,
                  float max_norm, float momentum, bool nesterov) {
    SHARED(double, of_warps, [THREADS / 32]);
    const int64_t first = blockIdx.x * int64_t(CHUNK), at = offsets[blockIdx.y] + first;
    const int count = n - first < CHUNK ? int(n - first) : CHUNK;
    float *const its_x = x + blockIdx.y * n + first;
    const float clip = norm ? clip_factor(norm[0], max_norm) : 1.0f, rest = 1.0f - momentum;
    const float of_m = nesterov ? momentum : 1.0f, of_grad = nesterov ? rest * clip : 0.0f;
    double sum = 0.0;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float g = grad[at + i], mean = momentum * m[at + i] + rest * (clip * g), u = of_m * mean + of_grad * g;
        m[at + i] = mean;
        its_x[i] = u;
        sum += square(u);
    }
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) sums[blockIdx.y * int64_t(gridDim.x) + blockIdx.x] = sum;
}

// Every block adds the sums of its matrix again, in the same order.
static __global__ void __launch_bounds__(THREADS) to_norm_one(float *x, const double *sums, int64_t n) {
    SHARED(double, of_warps, [THREADS / 32]);
    SHARED(float, factor, );
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) sum += sums[blockIdx.y * int64_t(gridDim.x) + i];
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) factor = static_cast<float>(1.0 / fmax(sqrt(sum), PYOPS_MUON_EPS));
    __syncthreads();
    const int64_t first = blockIdx.x * int64_t(CHUNK);
    const int count = n - first < CHUNK ? int(n - first) : CHUNK;
    float *const its_x = x + blockIdx.y * n + first;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) its_x[i] *= factor;
}

static __global__ void __launch_bounds__(THREADS)
    polynomial(float *p, const float *a, int64_t n, int64_t size, float c1, float c2, float c3) {
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < size; i += gridDim.x * int64_t(THREADS)) {
        const float y = c3 * p[i] + c2 * a[i];
        p[i] = i / n % n == i % n ? y + c1 : y;
    }
}

static __global__ void __launch_bounds__(THREADS)
    update(float *param, const float *x, const int64_t *offsets, const float *lr, int64_t n, float scale, float weight_decay) {
    const int64_t first = blockIdx.x * int64_t(CHUNK);
    const int count = n - first < CHUNK ? int(n - first) : CHUNK;
    float *const its_param = param + offsets[blockIdx.y] + first;
    const float *const its_x = x + blockIdx.y * n + first;
    const float keep = 1.0f - lr[0] * weight_decay, step = lr[0] * scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) its_param[i] = keep * its_param[i] - step * its_x[i];
}

static dim3 grid_of(int64_t count, int64_t n) { return dim3(unsigned(chunks_of(n)), unsigned(count)); }
}

extern "C" int64_t pyops_muon_momentum_work(int64_t count, int64_t n) { return 2 * count * chunks_of(n) + 1; }

extern "C" pyops_status pyops_muon_momentum(float *x, float *m, const float *grad, const float *norm, const int64_t *offsets,
                                            float *work, int64_t count, int64_t n, float max_norm, float momentum,
                                            int32_t nesterov, void *stream) {
    const pyops_status status = check_muon_momentum(count, n, max_norm, momentum);
    if (status || !count || !n) return status;
    double *const sums = sums_of(work);
    Launches launches;
    launches << LAUNCH(with_momentum, grid_of(count, n), THREADS, 0, stream_of(stream), x, m, grad, norm, offsets, sums, n,
                       max_norm, momentum, nesterov != 0);
    launches << LAUNCH(to_norm_one, grid_of(count, n), THREADS, 0, stream_of(stream), x, sums, n);
    return pyops_launched("muon_momentum", launches.error, stream);
}

extern "C" pyops_status pyops_muon_polynomial(float *p, const float *a, int64_t count, int64_t n, float c1, float c2, float c3,
                                              void *stream) {
    const pyops_status status = check_muon("muon_polynomial", count, n);
    if (status || !count || !n) return status;
    const int64_t size = count * n * n;
    const unsigned blocks = grid_of_rounds(size, THREADS, 4);
    return pyops_launched("muon_polynomial",
                          LAUNCH(polynomial, blocks, THREADS, 0, stream_of(stream), p, a, n, size, c1, c2, c3), stream);
}

extern "C" pyops_status pyops_muon_update(float *param, const float *x, const int64_t *offsets, const float *lr, int64_t count,
                                          int64_t n, float scale, float weight_decay, void *stream) {
    const pyops_status status = check_muon_update(count, n, weight_decay);
    if (status || !count || !n) return status;
    return pyops_launched(
        "muon_update",
        LAUNCH(update, grid_of(count, n), THREADS, 0, stream_of(stream), param, x, offsets, lr, n, scale, weight_decay),
        stream);
}
