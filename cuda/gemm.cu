// gemm.cu - matrix products: c (+)= a b + bias, for operands of any strides.
#include "internal.cuh"

// ---- one product or a batch of them ------------------------------------------------------------------------
// A block makes a tile of 64 x 64 sums with 16 x 16 threads, of 4 x 4 each: in steps of 16 along K, both operands' parts
// are copied into shared memory, from which every value is used 64 times.
static constexpr int TILE = 64, STEP = 16, EACH = 4, SIDE = TILE / EACH;

struct Batch {
    int64_t shape[8], c_step[8], a_step[8], b_step[8];
    int32_t ndim;
};
struct Product {
    float *c;
    const float *a, *b, *bias;
    int64_t M, N, K, ldc, a_row, a_col, b_row, b_col;
    int32_t accumulate, relu, precision;
};

DEVICE float rounded(float x, int32_t precision) {
    if (precision == int32_t(Precision::tf32)) return __uint_as_float(to_tf32(x));
    if (precision == int32_t(Precision::bf16)) return __bfloat162float(__float2bfloat16(x));
    return x;
}

static __global__ void __launch_bounds__(SIDE * SIDE) product(Product g, Batch batch, int64_t tiles_m, int64_t tiles_n) {
    SHARED(float, a_tile, [STEP][TILE + 1]);
    SHARED(float, b_tile, [STEP][TILE + 1]);
    int64_t rest = blockIdx.x;
    const int64_t n0 = rest % tiles_n * TILE, m0 = rest / tiles_n % tiles_m * TILE;
    rest /= tiles_n * tiles_m;
    for (int d = batch.ndim - 1; d >= 0; rest /= batch.shape[d--]) {
        const int64_t at = rest % batch.shape[d];
        g.c += at * batch.c_step[d], g.a += at * batch.a_step[d], g.b += at * batch.b_step[d];
    }
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    float sum[EACH][EACH] = {};
    for (int64_t k0 = 0; k0 < g.K; k0 += STEP) {
        for (int i = threadIdx.x; i < STEP * TILE; i += SIDE * SIDE) {
            const int ak = g.a_col == 1 ? i % STEP : i / TILE, am = g.a_col == 1 ? i / STEP : i % TILE;
            const int bk = g.b_row == 1 ? i % STEP : i / TILE, bn = g.b_row == 1 ? i / STEP : i % TILE;
            a_tile[ak][am] = m0 + am < g.M && k0 + ak < g.K
                ? rounded(g.a[(m0 + am) * g.a_row + (k0 + ak) * g.a_col], g.precision) : 0.0f;
            b_tile[bk][bn] = n0 + bn < g.N && k0 + bk < g.K
                ? rounded(g.b[(k0 + bk) * g.b_row + (n0 + bn) * g.b_col], g.precision) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP; k++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += a_tile[k][y + i * SIDE] * b_tile[k][x + j * SIDE];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t m = m0 + y + i * SIDE, n = n0 + x + j * SIDE;
            if (m >= g.M || n >= g.N) continue;
            float out = sum[i][j];
            if (g.bias) out += g.bias[n];
            if (g.accumulate) out += g.c[m * g.ldc + n];
            g.c[m * g.ldc + n] = g.relu && out < 0.0f ? 0.0f : out;         // NaN stays
        }
}

static cudaError_t launch(const Product &g, const Batch &batch, int64_t products, void *stream) {
    const int64_t tiles_m = blocks_for<int64_t>(g.M, TILE), tiles_n = blocks_for<int64_t>(g.N, TILE);
    if (tiles_m * tiles_n * products == 0) return cudaSuccess;
    return LAUNCH(product, static_cast<unsigned>(tiles_m * tiles_n * products), SIDE * SIDE, 0, stream_of(stream), g, batch, tiles_m, tiles_n);
}

extern "C" pyops_status pyops_gemm(float *c, const float *a, const float *b, const float *bias,
                                   int64_t M, int64_t N, int64_t K, int64_t ldc,
                                   int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                                   int32_t accumulate, int32_t relu, void *stream) {
    PYOPS_REQUIRE(M >= 0 && N >= 0 && K >= 0, "gemm: M=%lld N=%lld K=%lld", LL(M), LL(N), LL(K));
    PYOPS_REQUIRE(ldc >= N, "gemm: ldc=%lld, want at least N=%lld", LL(ldc), LL(N));
    const Product g = {c, a, b, bias, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, relu, int32_t(pyops_precision_now())};
    return pyops_launched("gemm", launch(g, Batch{}, 1, stream), stream);
}

extern "C" pyops_status pyops_gemm_batched(float *c, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
                                           int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
                                           int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                                           int32_t accumulate, void *stream) {
    PYOPS_REQUIRE(ndim >= 0 && ndim <= 8, "gemm_batched: ndim=%lld, want 0 to 8", LL(ndim));
    PYOPS_REQUIRE(M >= 0 && N >= 0 && K >= 0, "gemm_batched: M=%lld N=%lld K=%lld", LL(M), LL(N), LL(K));
    PYOPS_REQUIRE(ldc >= N, "gemm_batched: ldc=%lld, want at least N=%lld", LL(ldc), LL(N));
    Batch batch = {};
    batch.ndim = static_cast<int32_t>(ndim);
    int64_t products = 1;
    for (int64_t d = 0; d < ndim; d++) {
        PYOPS_REQUIRE(shape[d] >= 0, "gemm_batched: shape[%lld]=%lld", LL(d), LL(shape[d]));
        products *= shape[d];
        batch.shape[d] = shape[d];
        batch.c_step[d] = strides[d], batch.a_step[d] = strides[ndim + d], batch.b_step[d] = strides[2 * ndim + d];
    }
    const Product g = {c, a, b, nullptr, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, 0, int32_t(pyops_precision_now())};
    return pyops_launched("gemm_batched", launch(g, batch, products, stream), stream);
}

// ---- bfloat16 ----------------------------------------------------------------------------------------------
DEVICE uint16_t bits_of(__nv_bfloat16 x) { return *reinterpret_cast<uint16_t *>(&x); }
DEVICE float value_of(uint16_t x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }

static __global__ void to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < R * C; i += int64_t(gridDim.x) * blockDim.x)
        y[i / C * ld + i % C] = bits_of(__float2bfloat16(x[i / C * row + i % C * col]));
}

static __global__ void product_bf16(float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
                                    int64_t ldc, int64_t lda, int64_t ldb, int32_t accumulate) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < M * N; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t m = i / N, n = i % N;
        float sum = 0.0f;
        for (int64_t k = 0; k < K; k++) sum += value_of(a[m * lda + k]) * value_of(b[n * ldb + k]);
        c[m * ldc + n] = (accumulate ? c[m * ldc + n] : 0.0f) + sum;
    }
}

extern "C" pyops_status pyops_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                                      void *stream) {
    PYOPS_REQUIRE(R >= 0 && C >= 0 && ld >= C, "to_bf16: R=%lld C=%lld ld=%lld", LL(R), LL(C), LL(ld));
    if (!R || !C) return PYOPS_OK;
    return pyops_launched("to_bf16", LAUNCH(to_bf16, grid_for(R * C, 256), 256, 0, stream_of(stream), y, x, R, C, ld, row, col), stream);
}

extern "C" pyops_status pyops_gemm_bf16(float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
                                        int64_t ldc, int64_t lda, int64_t ldb, int32_t accumulate, void *stream) {
    PYOPS_REQUIRE(M >= 0 && N >= 0 && K >= 0 && ldc >= N && lda >= K && ldb >= K,
                  "gemm_bf16: M=%lld N=%lld K=%lld ldc=%lld lda=%lld ldb=%lld",
                  LL(M), LL(N), LL(K), LL(ldc), LL(lda), LL(ldb));
    if (!M || !N) return PYOPS_OK;
    return pyops_launched("gemm_bf16", LAUNCH(product_bf16, grid_for(M * N, 256), 256, 0, stream_of(stream),
                                              c, a, b, M, N, K, ldc, lda, ldb, accumulate), stream);
}
