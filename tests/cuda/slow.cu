// slow.cu - kernels whose code is slow, and one that is not.  scripts/cuda_resources.py must name each of the slow ones.
#include "hopper.cuh"

// 64 numbers at once, with at most 32 registers per thread.
__global__ void __launch_bounds__(1024, 2) spilling(float *x) {
    float held[64];
#pragma unroll
    for (int i = 0; i < 64; i++) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = held[63 - i];
}

// A register has no address, so an array that a variable indexes is in local memory.
__global__ void indexing(float *x, int n) {
    float held[8] = {};
    for (int i = 0; i < n; i++) held[x[i] > 0.0f ? i & 7 : i >> 2 & 7] += x[i];
    for (int i = 0; i < 8; i++) x[i] = held[i];
}

// CHANGED: the sums change between two products of a group, so the second one must wait for the first.
template <bool CHANGED> __global__ void __launch_bounds__(128) multiplying(float *x, uint64_t a, uint64_t b) {
    float d[32] = {};
    wg_fence();
    wgmma_bf16<64>(d, a, b);
    if (CHANGED) d[0] += 1.0f;
    wgmma_bf16<64>(d, a + 2, b + 2);
    wg_commit();
    wg_wait<0>();
    wg_finished(d);
    for (int i = 0; i < 32; i++) x[i * 128 + threadIdx.x] = d[i];
}
template __global__ void multiplying<false>(float *, uint64_t, uint64_t);
template __global__ void multiplying<true>(float *, uint64_t, uint64_t);
