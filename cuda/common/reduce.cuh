// reduce.cuh - sums, maxima and minima over any axes of an array.
//
// Every axis is kept or reduced.  Outputs (over the kept axes) and the terms of an output (over the reduced axes) are
// numbered.  A block of 256 threads computes several outputs, with several threads per output.  The lanes of a warp follow the
// dimension that is contiguous in memory:
//
//     contiguous terms                             contiguous outputs
//          terms ->                                     outputs ->
//     o   [0 1 2 .. 31] [0 1 2 .. 31] ..           t   [0 1 2 .. 31]     warp 0
//     u    lanes of a warp                         e   [0 1 2 .. 31]     warp 1
//     t                                            r    ..
//     p   a warp or less per output,               m   8 warps, each with a share of the
//     u   or a whole block                         s   terms of the same outputs
//
// With n threads per output, a thread reads every n-th term, eight at a time: it adds these in a tree in float32, and the
// results of the trees in double.  Then lanes are combined by shuffles, and warps through shared memory.  With few outputs and
// many terms, blocks reduce pieces of the terms, and the last of the blocks with the same outputs combines their results.
//
// The order of the operations depends only on the shape, so results are bitwise reproducible, also across devices.
#pragma once
#include <cmath>
#include <type_traits>
#include "block.cuh"
#include "real.cuh"
#include "tickets.cuh"

constexpr int REDUCE_THREADS = 256, TERMS_AT_ONCE = 8;
constexpr int64_t MANY_BLOCKS = 4096;                             // more gain nothing
static_assert(MANY_BLOCKS / 2 <= TICKETS, "several pieces need a ticket for each block of outputs");

// ---- operations: Term is the type of the input, Wide the type of the accumulator ----------------------
template <class T, class W = T> struct SumOf {          // floats in double; int32 as uint32_t, modulo 2^32
    using Term = T;
    using Wide = W;
    __device__ static T nothing() { return T(0); }
    template <class U> __device__ static U meet(U a, U b) { return a + b; }
};

// The identities of max and min: the lowest and highest value of a type.
DEVICE float lowest(float) { return -INFINITY; }
DEVICE float highest(float) { return INFINITY; }
DEVICE int32_t lowest(int32_t) { return INT32_MIN; }
DEVICE int32_t highest(int32_t) { return INT32_MAX; }

template <class T> struct MaxOf {       // NaN if any term is NaN
    using Term = T;
    using Wide = T;
    __device__ static T nothing() { return lowest(T()); }
    __device__ static T meet(T a, T b) { return a >= b || a != a ? a : b; }
};
template <class T> struct MinOf {
    using Term = T;
    using Wide = T;
    __device__ static T nothing() { return highest(T()); }
    __device__ static T meet(T a, T b) { return a <= b || a != a ? a : b; }
};

// ---- how the threads of a block are divided ----------------------------------------------------------
struct ReduceShape {
    bool along;                         // lanes follow the terms
    int outputs, threads;               // outputs per block, threads per output: powers of two with product 256
    int64_t pieces, piece;              // pieces of the terms of an output, terms per piece
};

static inline int64_t power_above(int64_t n, int64_t least, int64_t most) {       // the smallest power of two >= n
    int64_t power = least;
    while (power < n && power < most) power *= 2;
    return power;
}

static inline ReduceShape reduce_shape(int64_t outputs, int64_t terms, bool along) {
    constexpr int64_t FEW_BLOCKS = 128;                           // fewer leave multiprocessors idle
    constexpr int64_t MANY_OUTPUTS = 16384, SECTOR = 8;           // floats in a memory sector, the unit of a transfer
    int64_t threads;
    if (along) {
        threads = power_above(blocks_for<int64_t>(terms, TERMS_AT_ONCE), 1, 32);
        if (threads == 32 && terms > 4 * REDUCE_THREADS && outputs < MANY_OUTPUTS) threads = REDUCE_THREADS;
    } else if (terms <= 4 * TERMS_AT_ONCE && outputs >= MANY_OUTPUTS) threads = 1;
    else {
        int64_t columns = power_above(outputs, 1, 32);
        while (columns > SECTOR && blocks_for(outputs, columns) < FEW_BLOCKS) columns /= 2;
        threads = REDUCE_THREADS / columns;
    }
    const int64_t blocks = blocks_for(outputs, REDUCE_THREADS / threads), worthwhile = terms / (threads * 4 * TERMS_AT_ONCE);
    int64_t pieces = MANY_BLOCKS / blocks < worthwhile ? MANY_BLOCKS / blocks : worthwhile;
    const int64_t piece = blocks_for(terms, pieces < 2 ? 1 : pieces);
    pieces = terms ? blocks_for(terms, piece) : 1;
    return {along, static_cast<int>(REDUCE_THREADS / threads), static_cast<int>(threads), pieces, piece};
}

// An element of the input as a term.
template <class T> DEVICE T term_of(T x) { return x; }
DEVICE float term_of(bf16 x) { return as_float(x); }

// Reduce the terms from, from + step, ... below `to`; offset(t) is the offset of term t.
template <class Op, class X, class Index, class Offset>
DEVICE typename Op::Wide gather_terms(const X *x, Index from, Index to, int step, const Offset &offset) {
    typename Op::Wide sum = Op::nothing();
    for (Index t = from; t < to; t += TERMS_AT_ONCE * step) {
        typename Op::Term term[TERMS_AT_ONCE];
#pragma unroll
        for (int u = 0; u < TERMS_AT_ONCE; u++) {
            const bool inside = t + u * step < to;
            const typename Op::Term value = term_of(x[offset(inside ? t + u * step : t)]);
            term[u] = inside ? value : Op::nothing();
        }
#pragma unroll
        for (int half = TERMS_AT_ONCE / 2; half; half /= 2)
#pragma unroll
            for (int u = 0; u < half; u++) term[u] = Op::meet(term[u], term[u + half]);
        sum = Op::meet(sum, typename Op::Wide(term[0]));
    }
    return sum;
}

// Combine lanes whose numbers differ in the bits from `low` up to `high`, then with `warps` the same lanes of all warps: the
// result is in the first warp.
template <class Op, class Wide> DEVICE Wide combine_lanes(Wide sum, int low, int high, bool warps, Wide *of_warps) {
    for (int step = low; step < high && step < 32; step *= 2) sum = Op::meet(sum, __shfl_xor_sync(ALL_LANES, sum, step));
    if (!warps) return sum;
    of_warps[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32)
        for (int warp = 1; warp < REDUCE_THREADS / 32; warp++) sum = Op::meet(sum, of_warps[32 * warp + threadIdx.x]);
    return sum;
}

// y[o] = op over the terms of output o (+ y[o]).  Strides of `kept`: of y, of x.   With several pieces, partial (outputs, pieces)
// has their results, and tickets one counter for each block of outputs.
template <class Op, class Again, class Out, class Index, class X>
static __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce(Out *y, const X *x, Axes<Index> kept, Axes<Index> reduced, Index outputs, Index terms, ReduceShape shape, bool add,
           typename Op::Wide *partial, unsigned *tickets) {
    wait_for_last_kernel();
    using Wide = typename Op::Wide;
    SHARED(Wide, of_warps, [REDUCE_THREADS]);
    const int thread = threadIdx.x;
    const Index output = Index(blockIdx.x) * shape.outputs + (shape.along ? thread / shape.threads : thread % shape.outputs);
    const int first = shape.along ? thread % shape.threads : thread / shape.outputs;

    int64_t at[2] = {0, 0};
    if (output < outputs) kept.walk(output, at);
    const Index from = Index(shape.piece) * blockIdx.y, end = from + Index(shape.piece);
    const Index to = output < outputs ? (end < terms ? end : terms) : 0;
    const auto along_one_axis = [&](Index t) { return int64_t(t) * reduced.stride[0][0]; };
    const auto along_several = [&](Index t) {
        int64_t offset[1] = {0};
        reduced.walk(t, offset);
        return offset[0];
    };
    Wide sum = reduced.n > 1 ? gather_terms<Op>(x + at[1], from + first, to, shape.threads, along_several)
                             : gather_terms<Op>(x + at[1], from + first, to, shape.threads, along_one_axis);
    sum = combine_lanes<Op>(sum, shape.along ? 1 : shape.outputs, shape.along ? shape.threads : 32,
                            shape.threads > (shape.along ? 32 : 1), of_warps);
    const auto store = [&](Out *to) { *to = add ? *to + Out(sum) : Out(sum); };
    if (shape.pieces == 1) {
        if (first == 0 && output < outputs) store(y + at[0]);
        return;
    }
    if (first == 0 && output < outputs) partial[output * shape.pieces + blockIdx.y] = sum;
    if (!block_arrives_last(tickets + blockIdx.x, gridDim.y)) return;

    // the same outputs again: lanes follow the pieces, all threads of the block if there is one output
    const int share = shape.outputs == 1 ? REDUCE_THREADS : shape.threads < 32 ? shape.threads : 32, own = thread / share;
    const Index again = Index(blockIdx.x) * shape.outputs + own;
    const bool has_output = own < shape.outputs && again < outputs;
    sum = gather_terms<Again>(partial + again * shape.pieces, Index(thread % share), Index(has_output ? shape.pieces : 0),
                              share, [](Index t) { return t; });
    sum = combine_lanes<Again>(sum, 1, share, share > 32, of_warps);
    if (thread % share || !has_output) return;
    at[0] = at[1] = 0;
    kept.walk(again, at);
    store(y + at[0]);
}

template <class Op, class Again, class Index, class Out, class X>
static cudaError_t launch_reduce(Out *y, const X *x, const Space &kept, const Space &reduced, ReduceShape shape, bool add,
                                 typename Op::Wide *partial, unsigned *tickets, void *stream) {
    const int64_t outputs = kept.elements(), terms = reduced.elements();
    const dim3 grid(static_cast<unsigned>(blocks_for<int64_t>(outputs, shape.outputs)), static_cast<unsigned>(shape.pieces));
    return LAUNCH_DEPENDENT((reduce<Op, Again, Out, Index, X>), grid, REDUCE_THREADS, 0, stream_of(stream), y, x,
                            Axes<Index>(kept), Axes<Index>(reduced), Index(outputs), Index(terms), shape, add, partial,
                            tickets);
}

// y = op over the reduced axes of x, or += it.  Strides of the kept axes: of y, of x; of the reduced axes: of x, in front.
// Op accumulates in Op::Wide; Again is the same operation on terms of that type.
template <class Op, class Again, class Out, class X>
static pyops_status reduce_axes(const char *who, Out *y, const X *x, const Space &kept, const Space &reduced, bool along,
                                bool add, void *stream) {
    using Wide = typename Op::Wide;
    const int64_t outputs = kept.elements(), terms = reduced.elements();
    if (!outputs) return PYOPS_OK;
    const ReduceShape shape = reduce_shape(outputs, terms, along);
    Wide *partial = nullptr;
    unsigned *tickets = nullptr;
    if (shape.pieces > 1) {                             // then there are at most MANY_BLOCKS / 2 blocks of outputs
        const size_t bytes = static_cast<size_t>(outputs * shape.pieces) * sizeof(Wide);
        partial = static_cast<Wide *>(pyops_workspace(bytes)), tickets = pyops_tickets();
        if (!partial || !tickets) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %lld bytes", who, LL(bytes));
    }
    const bool is_short = fits_int32(outputs) && fits_int32(terms);
    const auto launch = is_short ? launch_reduce<Op, Again, uint32_t, Out, X> : launch_reduce<Op, Again, uint64_t, Out, X>;
    return pyops_launched(who, launch(y, x, kept, reduced, shape, add, partial, tickets, stream), stream);
}
