// tickets.cuh - the last of several blocks adds their partial sums, so that no second launch is needed.
#pragma once
#include "internal.cuh"

// Counters in device memory: zero before each launch and after it.  A function may use them only for its own launches on one
// stream.  NULL if allocation failed.
constexpr int64_t TICKETS = 16384;
unsigned *pyops_tickets();

// Count one of `count` arrivals and return whether it is the last one; then the counter is zero again, and everything that the
// others wrote before they arrived is visible.  For one thread: barriers must order it with the others of its team.
DEVICE bool arrives_last(unsigned *ticket, unsigned count) {
    if (add_acquire_release(ticket, 1) + 1 != count) return false;
    *ticket = 0;
    return true;
}

// The same for all threads of a block, which counts once.
DEVICE bool block_arrives_last(unsigned *ticket, int64_t count) {
    __syncthreads();
    return __syncthreads_or(threadIdx.x + threadIdx.y == 0 && arrives_last(ticket, static_cast<unsigned>(count)));
}

// The sum of an element over `splits` parts, in order.  The parts are `distance` floats apart.
DEVICE float sum_of_parts(const float *part, int64_t splits, int64_t distance) {
    float sum = *part;
#pragma unroll 4
    for (int64_t split = 1; split < splits; split++) sum += part[split * distance];
    return sum;
}
