// product.cuh - shared by the files that compute whole matrix products.
#pragma once
#include "internal.cuh"

// c[m,n] (+)= sum_k a[m,k] b[n,k] + bias[n], then max(0, ...) if relu is 1.  The row strides of a, b and c are lda, ldb, ldc.
// Element: uint16_t for bfloat16, float for floats rounded to TF32.
template <class Element> struct RowProduct {
    float *c;
    const Element *a, *b;
    const float *bias;                      // or NULL
    int64_t M, N, K, ldc, lda, ldb;
    int32_t accumulate, relu;
};

// The product on Hopper's tensor cores (hopper_gemm.cu).  `fits`: the device has them, and addresses and row strides are
// multiples of 16 bytes.
template <class Element> bool hopper_product_fits(const RowProduct<Element> &g);
template <class Element> cudaError_t hopper_product(const RowProduct<Element> &g, cudaStream_t stream);

// Convert rows of x to rows of bfloat16, ld elements apart (gemm.cu); element (r, c) of x is at r * row + c * col.
cudaError_t convert_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                            cudaStream_t stream);

// The epilogue of a product for one element, given its sum over k.
DEVICE float finished(float sum, const float *c, const float *bias, int32_t accumulate, int32_t relu) {
    if (bias) sum += *bias;
    if (accumulate) sum += *c;
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
