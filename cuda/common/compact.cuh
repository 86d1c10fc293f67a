// compact.cuh - stream compaction: the indices i < n that satisfy a condition, in order, by one block.
#pragma once
#include "block.cuh"

// Call emit(rank, i) for each i < n with keep(i), where rank = 0, 1, ... in the order of i; return their number.
// Each warp has a slice of consecutive indices.  It counts the indices that it keeps; the counts of the previous warps give
// the first rank of its slice; then it traverses the slice again.  Within 32 lanes the rank follows from a ballot.
// `counts` has one element per warp.  All threads of the block must call this; keep is called twice for each i.
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
    __syncthreads();                                            // all results are written, and `counts` can be reused
    return all;
}
