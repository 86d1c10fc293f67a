// compact.cuh - the numbers i < n that a block keeps, in order.
#pragma once
#include "block.cuh"

// Calls emit(place, i) for each i < n with keep(i), where `place` counts them from 0 in the order of i; returns how many.
// Each warp has a slice of consecutive numbers.  It counts what it keeps, the counts of the warps before it say where its
// own begin, and then it goes over its slice again.  A lane knows its place among 32 from the bits of a ballot.
// `counts` has a place for each warp.  All threads of the block call it; keep is called twice for each i.
template <class Keep, class Emit> DEVICE int block_compact(int n, int *counts, Keep keep, Emit emit) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int slice = round_up(blocks_for(n, warps), 32), first = warp * slice, end = first + slice < n ? first + slice : n;
    int kept = 0;
    for (int i = first + lane; i < end; i += 32) kept += keep(i);
    kept = warp_sum(kept);
    if (lane == 0) counts[warp] = kept;
    __syncthreads();
    int rank = 0, all = 0;
    for (int w = 0; w < warps; w++) {
        rank += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    for (int i = first; i < end; i += 32) {
        const bool mine = i + lane < end && keep(i + lane);
        const unsigned keepers = __ballot_sync(ALL_LANES, mine);
        if (mine) emit(rank + __popc(keepers & ((1u << lane) - 1)), i + lane);
        rank += __popc(keepers);
    }
    __syncthreads();                                            // what was emitted is there, and `counts` is free again
    return all;
}
