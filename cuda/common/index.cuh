// index.cuh - loops over all elements of an array, and the offset of an element from its index.
#pragma once
#include <type_traits>
#include "internal.cuh"

// ---- vector loads and stores: a pack of adjacent elements --------------------------------------------
template <class T, int WIDTH> struct Pack { T at[WIDTH]; };

template <int WIDTH, class T> DEVICE Pack<T, WIDTH> load_pack(const T *p) {
    static_assert(WIDTH == 1 || (WIDTH == 4 && (std::is_same_v<T, float> || std::is_same_v<T, int32_t> || sizeof(T) == 1)));
    if constexpr (WIDTH == 1) return {{*p}};
    else if constexpr (std::is_same_v<T, float>) {
        const float4 four = *reinterpret_cast<const float4 *>(p);
        return {{four.x, four.y, four.z, four.w}};
    } else if constexpr (std::is_same_v<T, int32_t>) {
        const int4 four = *reinterpret_cast<const int4 *>(p);
        return {{four.x, four.y, four.z, four.w}};
    } else {
        const uint32_t four = *reinterpret_cast<const uint32_t *>(p);
        return {{T(four), T(four >> 8), T(four >> 16), T(four >> 24)}};
    }
}

template <int WIDTH, class T> DEVICE void store_pack(T *p, const Pack<T, WIDTH> &x) {
    if constexpr (WIDTH == 1) *p = x.at[0];
    else if constexpr (std::is_same_v<T, float>)
        *reinterpret_cast<float4 *>(p) = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
    else *reinterpret_cast<int4 *>(p) = make_int4(x.at[0], x.at[1], x.at[2], x.at[3]);
}

// Whether an address is aligned to 16 bytes.
static inline bool aligned(const void *p) { return (uintptr_t(p) & 15) == 0; }

// ---- n / d for a divisor that is the same in all threads ---------------------------------------------
// 32 bits: a product and a shift (Granlund and Montgomery 1994, "Division by invariant integers using multiplication"), exact
// for n below 2^31.  64 bits: an ordinary division, which is slow.
template <class Index> struct Divider {
    Index divisor = 1;
    Divider() = default;
    explicit Divider(int64_t d) : divisor(static_cast<Index>(d)) {}
    __device__ Index divide(Index n) const { return n / divisor; }
};
template <> struct Divider<uint32_t> {
    uint32_t divisor = 1, multiplier = 1, shift = 0;
    Divider() = default;
    explicit Divider(int64_t d) : divisor(static_cast<uint32_t>(d)) {         // 2^shift: the smallest power of two >= d
        if (d < 1) return;                                                     // an empty axis: never used
        while (uint64_t(1) << shift < divisor) shift++;
        multiplier = static_cast<uint32_t>((((uint64_t(1) << shift) - divisor) << 32) / divisor + 1);
    }
    __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// ---- loops over all elements -------------------------------------------------------------------------
// A load takes hundreds of cycles, so bandwidth depends on the number of loads in flight.  Therefore a thread runs several
// iterations of a grid-stride loop together: it loads for all of them before it stores the first result.  Adjacent threads
// always access adjacent memory:
//
//     round 0                       round 1
//     | block 0 | block 1 | ... |   | block 0 | block 1 | ... |   ...
//
// load(i) returns a value, store(i, value) consumes it; i in [from, to).
template <int ROUNDS, class Index, class Load, class Store>
DEVICE void in_rounds(Index from, Index to, const Load &load, const Store &store) {
    const Index step = Index(gridDim.x) * blockDim.x;
    for (Index first = from + Index(blockIdx.x) * blockDim.x + threadIdx.x; first < to; first += ROUNDS * step) {
        decltype(load(from)) value[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            if (first + r * step < to) value[r] = load(first + r * step);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            if (first + r * step < to) store(first + r * step, value[r]);
    }
}

// Blocks for such a loop.  A few elements are spread over all multiprocessors.  With many elements each thread runs its rounds
// once, and the hardware assigns blocks to free multiprocessors.
static inline unsigned grid_of_rounds(int64_t n, int threads, int rounds) {
    const int64_t spread = int64_t(pyops_multiprocessors()) * (1024 / threads), most = blocks_for<int64_t>(n, threads);
    const int64_t filled = blocks_for<int64_t>(n, int64_t(threads) * rounds);
    return static_cast<unsigned>(filled > spread ? filled : most < spread ? most : spread);
}

// Whether indices up to n, plus a few strides of the grid, fit in 32 bits.
static inline bool fits_int32(int64_t n) { return n < (int64_t(1) << 30); }

// ---- axes --------------------------------------------------------------------------------------------
constexpr int AXES = 8, OPERANDS = 3;

struct Axis { int64_t size, stride[OPERANDS]; };         // strides in elements

struct Space {                          // on the host: axes, the last one innermost; no axes: a single element
    int n = 0;
    Axis axis[AXES] = {};
    void add(const Axis &a) { axis[n++] = a; }
    int64_t elements() const {
        int64_t product = 1;
        for (int d = 0; d < n; d++) product *= axis[d].size;
        return product;
    }
};

template <class Index> struct Axes {    // the same as a kernel parameter
    int n;
    Divider<Index> size[AXES];
    int64_t stride[AXES][OPERANDS];
    explicit Axes(const Space &s) : n(s.n), stride{} {
        for (int d = 0; d < n; d++) {
            size[d] = Divider<Index>(s.axis[d].size);
            for (int o = 0; o < OPERANDS; o++) stride[d][o] = s.axis[d].stride[o];
        }
    }
    // Add the offset of element i in each operand to `at`.
    template <int N> __device__ __forceinline__ void walk(Index i, int64_t (&at)[N]) const {
#pragma unroll 1
        for (int d = n - 1; d > 0; d--) {
            const Index rest = size[d].divide(i), here = i - rest * size[d].divisor;
#pragma unroll
            for (int o = 0; o < N; o++) at[o] += int64_t(here) * stride[d][o];
            i = rest;
        }
#pragma unroll
        for (int o = 0; o < N; o++) at[o] += int64_t(i) * stride[0][o];
    }
};
