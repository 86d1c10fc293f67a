// packed.cuh - packed rows: sequence b is rows offsets[b] to offsets[b+1] - 1.
#pragma once
#include "internal.cuh"

// Where step t of a sequence is stored.
struct Sequences {
    const int32_t *offsets;                 // packed rows, or NULL: step t of all B sequences is contiguous
    int64_t T, B, N;
    bool reverse;                           // packed rows are read from the end of the sequence

    // The number of steps of a sequence; 0 if its offsets are invalid.
    __device__ __forceinline__ int64_t length(int64_t sequence) const {
        if (!offsets) return T;
        const int64_t from = offsets[sequence], to = offsets[sequence + 1];
        return from < 0 || to < from || to > N ? 0 : min(to - from, T);
    }
    // The row of a step, or -1 after the end of the sequence.
    __device__ __forceinline__ int64_t row(int64_t t, int64_t sequence) const {
        if (!offsets) return t * B + sequence;
        const int64_t steps = length(sequence);
        return t < steps ? offsets[sequence] + (reverse ? steps - 1 - t : t) : -1;
    }
};

// Report offsets that are not 0, then at most T more each, then N.  A thread checks the offsets first, first + step, ...
DEVICE void check_offsets(const Sequences &in, int64_t first, int64_t step, Who who, FaultRecord *faults) {
    for (int64_t b = first; b <= in.B && faults; b += step) {
        const int64_t at = in.offsets[b], length = b ? at - in.offsets[b - 1] : at, most = b ? in.T : 0;
        if (b == in.B && at != in.N) report(faults, Fault::last_offset, who, b, at, in.N);
        else if (length < 0 || length > most) report(faults, Fault::offset, who, b - 1, length, most);
    }
}
