// product.cuh - shared by the files that compute whole matrix products.
#pragma once
#include <cstdlib>
#include "dropout.cuh"
#include "exponentials.cuh"
#include "real.cuh"

// A size that only the device knows: M, or with `of_k` K, is count[0] - first where that is less than the size of the launch.
struct Limit {
    const int32_t *count = nullptr;         // NULL: no limit
    int64_t first = 0;
    bool of_k = false;

    __device__ __forceinline__ int64_t rows(int64_t M) const { return count && !of_k ? limited(M) : M; }
    __device__ __forceinline__ int64_t summands(int64_t K) const { return count && of_k ? limited(K) : K; }
    __device__ __forceinline__ int64_t limited(int64_t n) const {
        const int64_t left = count[0] - first;
        return left < 0 ? 0 : left < n ? left : n;
    }
};

// An activation function in the epilogue.  Only hopper_product computes it, where all matrices are bfloat16 and laid out as in
// pyops_linear_activation, without limit.
struct Activation {
    int32_t kind = 0;                       // a pyops_activation
    bf16 *result = nullptr;                 // not NULL: result = activation(c), of the rounded c; laid out as c
    const bf16 *at = nullptr;               // not NULL: the rounded c is multiplied by the derivative there; laid out as c
};

// A residual connection in the epilogue, with dropout.  Only hopper_product computes it, where all matrices are bfloat16 and laid
// out as in pyops_linear_residual, without limit and in one part of K.
struct Residual {
    const bf16 *x = nullptr;                // not NULL: c = x + dropout of the rounded sums; laid out as c, without gaps
    Dropout dropout = {};
};

// c[m,n] (+)= sum_k a[m,k] b[n,k] + bias[n], then max(0, ...) if relu is 1.  The row strides of a, b and c are lda, ldb, ldc.
// Element: bf16, or float for floats rounded to TF32.   Out: float; if Element is bf16 also bf16; or the exponential of Element,
// Exp16 or Exp32: then the result is `exps`, and of the other members a, b, M, N, K, lda, ldb and limit are used.
template <class Element, class Out = float> struct RowProduct {
    Out *c;
    const Element *a, *b;
    const float *bias;                      // or NULL
    int64_t M, N, K, ldc, lda, ldb;
    int32_t accumulate, relu;
    bool a_k = true, b_k = true;            // false (bf16 only): the operand is stored transposed, a[m,k] at a + k * lda + m
    // splits > 1: sums of parts of K, multiples of 64 k's, go to parts (splits,M,N); the last of them to finish adds them.
    int64_t splits = 1;
    float *parts = nullptr;
    unsigned *tickets = nullptr;            // two for each tile, if splits > 1
    float *row_sums = nullptr;              // not NULL: as in RealProduct;  splits > 1: parts are (splits,M,N+1)
    Limit limit = {};
    const int32_t *scatter = nullptr;       // not NULL: row m of the product is row scatter[m] of c
    const Out *gate = nullptr;              // not NULL: laid out as c, which is 0 where gate is not above 0
    Activation activation = {};
    Residual residual = {};
    Exponentials<std::conditional_t<IS_EXP<Out>, Out, Exp16>> exps = {};
};

// The product on Hopper's tensor cores (hopper_gemm.cu).  `fits`: the device has them, and addresses and row strides are
// multiples of 16 bytes.  `has_map`: also for c, whose rows are not scattered, and its activation or residual; required for one.
// `sums_rows`: it can add to row_sums.
template <class Element, class Out> bool hopper_product_fits(const RowProduct<Element, Out> &g);
template <class Element, class Out> bool hopper_sums_rows(const RowProduct<Element, Out> &g);
template <class Element, class Out> bool hopper_has_map(const RowProduct<Element, Out> &g);
template <class Element, class Out> cudaError_t hopper_product(const RowProduct<Element, Out> &g, cudaStream_t stream);

// A product with bfloat16 operands, for arrays of any strides (gemm.cu).
// Element (row, k) is at p + row * row_step + k * k_step.  whole16: bfloat16 elements, and copies of 16 bytes along the inner
// dimension are possible.  Otherwise elements are read one by one; floats are rounded.
struct RealOperand {
    const void *p;
    bool is_float, whole16;
    int64_t rows, row_step, k_step;

    __device__ __forceinline__ bf16 at(int64_t row, int64_t k) const {
        const int64_t i = row * row_step + k * k_step;
        return is_float ? as<bf16>(static_cast<const float *>(p)[i]) : static_cast<const bf16 *>(p)[i];
    }
};
static inline RealOperand operand(const pyops_real *x, int64_t rows, int64_t row_step, int64_t k_step) {
    const bool is_float = !is_bf16(x), k_inner = std::abs(k_step) <= std::abs(row_step);
    const bool contiguous = (k_inner ? k_step : row_step) == 1 && (k_inner ? row_step : k_step) % 8 == 0;
    const void *p = elements<char>(x);
    return {p, is_float, !is_float && contiguous && reinterpret_cast<uintptr_t>(p) % 16 == 0, rows, row_step, k_step};
}
struct RealProduct {
    float *to_float;                        // c is the one of these two that is not NULL
    bf16 *to_bf16;
    RealOperand a, b;                       // b has N rows
    const float *bias;
    int64_t M, N, K, ldc;
    int32_t accumulate, relu;
    Limit limit = {};
    const int32_t *scatter = nullptr;
    const void *gate = nullptr;             // of the type of c, see RowProduct
    float *row_sums = nullptr;              // not NULL: (M), row_sums[m] += sum_k a[m,k], if the product can add them
    Activation activation = {};
    Residual residual = {};
};
// row_sums_added: whether the product has added to row_sums.
cudaError_t real_product(const RealProduct &g, cudaStream_t stream, bool *row_sums_added);
cudaError_t real_product(const RealProduct &g, cudaStream_t stream);
// A product by wgmma of floats that are rounded to TF32, in as many parts of K as take least time.  It uses the workspace.
cudaError_t tf32_product(const RowProduct<float> &g, cudaStream_t stream);

// A product as in pyops_gemm, with arrays of either type.   gate, row_sums: as in RealProduct
struct AnyProduct {
    pyops_real *c;
    const pyops_real *a, *b;
    const float *bias;
    int64_t M, N, K, ldc, a_row, a_col, b_row, b_col;
    int32_t accumulate, relu;
    const pyops_real *gate = nullptr;
    float *row_sums = nullptr;
    Activation activation = {};
    Residual residual = {};
};
// Products that do not read each other's results, in one launch if that takes less time.  row_sums_added (count): which of them
// have added to their row_sums.
constexpr int MOST_GROUPED = 4;
cudaError_t any_products(const AnyProduct *p, int count, cudaStream_t stream, bool *row_sums_added);

// pyops_gemm with float32 arrays only.
static inline pyops_status pyops_gemm(float *c, const float *a, const float *b, const float *bias, int64_t M, int64_t N,
                                      int64_t K, int64_t ldc, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                                      int32_t accumulate, int32_t relu, void *stream) {
    return pyops_gemm(real(c), real(a), real(b), bias, M, N, K, ldc, a_row, a_col, b_row, b_col, accumulate, relu, stream);
}

// Convert rows of x to rows of bfloat16, ld elements apart (gemm.cu); element (r, c) of x is at r * row + c * col.
cudaError_t convert_to_bf16(__nv_bfloat16 *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                            cudaStream_t stream);

// The epilogue of a product for one element, given its sum over k.
template <class Out>
DEVICE float finished(float sum, const Out *c, const float *bias, int32_t accumulate, int32_t relu, const Out *gate) {
    if (gate && !(as_float(*gate) > 0.0f)) return 0.0f;
    if (bias) sum += *bias;
    if (accumulate) sum += as_float(*c);
    return relu && sum < 0.0f ? 0.0f : sum;                     // NaN stays NaN
}

// The position of tile `tile` in c.  Concurrent blocks should read the same rows of a and b, so that these stay in the L2
// cache: the order is by bands of BAND rows of tiles, column by column within a band.
struct TileIndex { int64_t m, n; };
template <int BAND> static __device__ __forceinline__ TileIndex tile_index(int64_t tile, int64_t tiles_m, int64_t tiles_n) {
    const int64_t first = tile / (BAND * tiles_n) * BAND, rows = tiles_m - first < BAND ? tiles_m - first : BAND;
    const int64_t within = tile % (BAND * tiles_n);
    return {first + within % rows, within / rows};
}
