// block.cuh - sums over a warp or a block and maxima over a warp, in an order that is always the same.
#pragma once
#include "internal.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Every lane gets the result.
template <class T> DEVICE T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// NaN where there is one.
DEVICE float nan_max(float a, float b) { return a > b || a != a ? a : b; }

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = nan_max(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Every thread of a block of whole warps gets the result; `shared` has a place for each warp and may be used again at once.
template <class T> DEVICE T block_sum(T x, T *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : T(0));
    __syncthreads();
    return x;
}
