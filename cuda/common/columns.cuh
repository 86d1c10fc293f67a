// columns.cuh - sums over the rows of a matrix, in an order that depends on nothing but the number of rows.
#pragma once
#include "internal.cuh"

// A block of 32 x 32 threads takes 32 neighbouring columns, so that a warp reads 128 bytes of a row; its rows are dealt out
// to the warps one by one, and the warps' sums are added in their order.  The threads with threadIdx.y = 0 get the sums.
constexpr int COLUMNS = 32, COLUMN_THREADS = 32;

DEVICE float column_sum(const float *x, int64_t rows, int64_t ld, int64_t column, int64_t columns) {
    SHARED(float, sums, [COLUMN_THREADS][COLUMNS]);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t row = threadIdx.y; row < rows; row += COLUMN_THREADS) sum += x[row * ld + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0)
        for (int i = 1; i < COLUMN_THREADS; i++) sum += sums[i][threadIdx.x];
    return sum;
}
