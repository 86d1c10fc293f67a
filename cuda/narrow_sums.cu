// narrow_sums.cu - matrix products whose sums have few bits, as in tensor cores: a thread for each element of c.
#include "block.cuh"
#include "index.cuh"
#define NARROW_INLINE static __host__ __device__ __forceinline__
#include "narrow_sums.inc"

namespace {
static constexpr int THREADS = 128;

struct NarrowProduct {
    float *c;
    const float *a, *b, *bias;
    int64_t M, N, K, ldc, a_row, a_col, b_row, b_col, promote, ndim;
    int64_t shape[PYOPS_AXES], strides[3][PYOPS_AXES];
    int32_t accumulate, relu, bits;
};

static __global__ void __launch_bounds__(THREADS) narrow_products(NarrowProduct p, int64_t elements) {
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < elements; i += int64_t(gridDim.x) * THREADS) {
        const int64_t n = i % p.N, m = i / p.N % p.M;
        int64_t rest = i / p.N / p.M;
        float *c = p.c + m * p.ldc + n;
        const float *a = p.a + m * p.a_row, *b = p.b + n * p.b_col;
        for (int64_t d = p.ndim - 1; d >= 0; d--) {
            const int64_t at = rest % p.shape[d];
            rest /= p.shape[d];
            c += at * p.strides[0][d], a += at * p.strides[1][d], b += at * p.strides[2][d];
        }
        float total = 0.0f;
        double partial = 0.0;
        for (int64_t k = 0, length; k < p.K; k += length) {
            length = narrow_length(k, p.K, p.promote);
            partial = narrow_sum(partial, a + k * p.a_col, p.a_col, b + k * p.b_row, p.b_row, length, p.bits);
            if (k + length < p.K && !(p.promote && (k + length) % p.promote == 0)) continue;
            total = __fadd_rn(total, static_cast<float>(partial));
            partial = 0.0;
        }
        *c = narrow_result(total, p.bias ? p.bias + n : nullptr, p.accumulate ? c : nullptr, p.relu);
    }
}
}

extern "C" pyops_status pyops_gemm_narrow(float *c, const float *a, const float *b, const float *bias, const int64_t *shape,
                                          const int64_t *strides, int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
                                          int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int32_t accumulate,
                                          int32_t relu, int32_t bits, int64_t promote, void *stream) {
    const pyops_status status = check_narrow(shape, ndim, M, N, K, ldc, bits, promote);
    if (status) return status;
    NarrowProduct p = {c, a, b, bias, M, N, K, ldc, a_row, a_col, b_row, b_col, promote, ndim, {}, {}, accumulate, relu, bits};
    int64_t elements = M * N;
    for (int64_t d = 0; d < ndim; d++) {
        elements *= shape[d], p.shape[d] = shape[d];
        for (int operand = 0; operand < 3; operand++) p.strides[operand][d] = strides[operand * ndim + d];
    }
    if (!elements) return PYOPS_OK;
    const cudaError_t error = LAUNCH(narrow_products, grid_for(elements, THREADS), THREADS, 0, stream_of(stream), p, elements);
    return pyops_launched("gemm_narrow", error, stream);
}
