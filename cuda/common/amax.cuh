// amax.cuh - the largest magnitude of an array, as the bits of a float: these have the order of the numbers, and NaN is largest.
#pragma once
#include "block.cuh"
#include "real.cuh"

DEVICE uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The maximum of a word of each lane, in all lanes of a warp.
DEVICE uint32_t warp_largest(uint32_t word) {
    for (int step = 16; step; step >>= 1) word = max(word, __shfl_xor_sync(ALL_LANES, word, step));
    return word;
}
// The maximum of n words, in all lanes of a warp.
DEVICE uint32_t largest_of(const uint32_t *words, int64_t n) {
    uint32_t found = 0;
    for (int64_t i = lane_id(); i < n; i += 32) found = max(found, words[i]);
    return warp_largest(found);
}

namespace {
// largest[b] = the maximum magnitude that block b of the grid found in x (R,C), rows ldx apart.
constexpr int AMAX_THREADS = 256;
template <class T>
static __global__ void __launch_bounds__(AMAX_THREADS)
    find_amax(uint32_t *largest, const T *x, int64_t R, int64_t C, int64_t ldx) {
    SHARED(uint32_t, of_warps, [AMAX_THREADS / 32]);
    wait_for_last_kernel();
    uint32_t amax = 0;
    for (int64_t i = blockIdx.x * int64_t(AMAX_THREADS) + threadIdx.x; i < R * C; i += int64_t(gridDim.x) * AMAX_THREADS)
        amax = max(amax, magnitude_of(as_float(x[ldx == C ? i : i / C * ldx + i % C])));
    amax = warp_largest(amax);
    if (lane_id() == 0) of_warps[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < AMAX_THREADS / 32; warp++) amax = max(amax, of_warps[warp]);
    largest[blockIdx.x] = amax;
}

// Launch find_amax.  *largest: its results, *count of them; NULL without memory for them.
template <class T>
static cudaError_t find_amax_of(const T *x, int64_t R, int64_t C, int64_t ldx, uint32_t **largest, unsigned *count,
                                void *stream) {
    *count = R * C > 0 ? grid_for(R * C, AMAX_THREADS) : 1;
    *largest = static_cast<uint32_t *>(pyops_workspace(*count * sizeof(uint32_t)));
    if (!*largest) return cudaSuccess;
    return LAUNCH_DEPENDENT(find_amax<T>, *count, AMAX_THREADS, 0, stream_of(stream), *largest, x, R, C, ldx);
}

static inline pyops_status no_memory_for_amax(const char *who, unsigned count) {
    return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %lld bytes", who, LL(count * sizeof(uint32_t)));
}
}
