// block.cuh - sums over a warp or a block and maxima over a warp, in a fixed order.
#pragma once
#include "internal.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Every lane gets the result.
template <class T> DEVICE T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// NaN if either is NaN.
DEVICE float nan_max(float a, float b) { return a > b || a != a ? a : b; }

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = nan_max(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Every thread gets the result; the block consists of whole warps.  `shared` has one element per warp and can be reused at
// once.
template <class T> DEVICE T block_sum(T x, T *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : T(0));
    __syncthreads();
    return x;
}
