// columns.cuh - sums over the rows of a matrix, in an order that depends only on the number of rows.
#pragma once
#include "real.cuh"

// A block of 32 x 32 threads sums 32 adjacent columns, so a warp reads 128 contiguous bytes of a row.  Rows are assigned to
// the warps in turn, and the sums of the warps are added in order.  The threads with threadIdx.y = 0 get the result.
constexpr int COLUMNS = 32, COLUMN_THREADS = 32;

template <class T> DEVICE float column_sum(const T *x, int64_t rows, int64_t ld, int64_t column, int64_t columns) {
    SHARED(float, sums, [COLUMN_THREADS][COLUMNS]);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t row = threadIdx.y; row < rows; row += COLUMN_THREADS) sum += as_float(x[row * ld + column]);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0)
        for (int i = 1; i < COLUMN_THREADS; i++) sum += sums[i][threadIdx.x];
    return sum;
}
