// log_sum_exp.cuh - the maximum of x and the sum of exp(x - max) in one pass over x, by any number of threads.  Callers keep
// both values: max + log(sum) would lose the low digits of log(sum) if the maximum is large.
#pragma once
#include <cfloat>
#include "block.cuh"

// The maximum of the added elements, and the sum of exp(x - max): no exponent is above 0, so nothing overflows.  A larger
// element scales the sum down (Milakov and Gimelshein 2018, arXiv:1805.02867).  The initial max is finite, so that an x of
// -infinity adds exp(-infinity) = 0 to any sum; a NaN or +infinity makes the sum NaN, and later elements keep it NaN.
struct LogSumExp {
    float max = -FLT_MAX, sum = 0.0f;

    template <int N> __device__ void add(const float (&x)[N]) {
        float top = max;
#pragma unroll
        for (int i = 0; i < N; i++) top = x[i] > top ? x[i] : top;
        if (top > max) sum *= expf(max - top);
        max = top;
#pragma unroll
        for (int i = 0; i < N; i++) sum += expf(x[i] - top);
    }

    __device__ void add(LogSumExp other) {
        const float top = other.max > max ? other.max : max;
        sum = sum * expf(max - top) + other.sum * expf(other.max - top);
        max = top;
    }

    // NaN if every x is -infinity, as in the C library.
    __device__ float total() const { return sum > 0.0f ? sum : NAN; }
};

// max is the same in all lanes.  The sum is taken from lane 0: add(a, b) and add(b, a) may round differently, so the sums of
// other lanes may differ in the last bit.
template <int LANES = 32> DEVICE LogSumExp warp_log_sum_exp(LogSumExp mine) {
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) {
        LogSumExp other;
        other.max = __shfl_xor_sync(ALL_LANES, mine.max, step);
        other.sum = __shfl_xor_sync(ALL_LANES, mine.sum, step);
        mine.add(other);
    }
    return mine;
}
