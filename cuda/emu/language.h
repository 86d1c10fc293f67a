// language.h - the CUDA language: qualifiers, indices, barriers, shuffles, votes, atomics, device functions.
#pragma once
#include <cmath>
#include "engine.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (emu::current->thread_index)
#define blockIdx (emu::current->block_index)
#define blockDim (emu::current->block_size)
#define gridDim (emu::current->grid_size)
constexpr int warpSize = 32;

// ---- barriers ----
static EMU_INLINE void __syncthreads() { emu::barrier(0, 0); }
static EMU_INLINE int __syncthreads_count(int vote) { return emu::barrier_count(vote != 0); }
static EMU_INLINE int __syncthreads_or(int vote) { return emu::barrier_count(vote != 0) > 0; }
static EMU_INLINE int __syncthreads_and(int vote) { return emu::barrier_count(vote == 0) == 0; }
static EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_barrier(mask); }
static EMU_INLINE void __threadfence() { emu::fence(); }
static EMU_INLINE void __threadfence_block() {}
static EMU_INLINE void __nanosleep(unsigned) { emu::poll("__nanosleep"); }

// ---- warps ----
namespace emu {
// Lanes outside the segment of `width` lanes keep their own value.
template <class T> static EMU_INLINE T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof value == 4 || sizeof value == 8);
    Shuffle own{&value, sizeof value, source};
    warp(mask, do_shuffle, &own);
    return value;
}
static EMU_INLINE unsigned ballot(unsigned mask, bool vote) {
    unsigned own = vote;
    warp(mask, do_ballot, &own);
    return own;
}
template <class T> static EMU_INLINE T reduce(unsigned mask, Reduction how, T value) {
    Reduce<T> own{value, how};
    warp(mask, do_reduce<T>, &own);
    return own.value;
}
static EMU_INLINE int segment(int width) { return current->lane & ~(width - 1); }
}
template <class T> static EMU_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emu::shuffle(mask, value, emu::segment(width) | (source & (width - 1)));
}
template <class T> static EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = emu::current->lane, source = lane ^ bits;
    return emu::shuffle(mask, value, source < emu::segment(width) + width ? source : lane);
}
template <class T> static EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int lane = emu::current->lane, source = lane + static_cast<int>(lanes);
    return emu::shuffle(mask, value, source < emu::segment(width) + width ? source : lane);
}
template <class T> static EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int lane = emu::current->lane, source = lane - static_cast<int>(lanes);
    return emu::shuffle(mask, value, source >= emu::segment(width) ? source : lane);
}
static EMU_INLINE unsigned __ballot_sync(unsigned mask, int vote) { return emu::ballot(mask, vote != 0); }
static EMU_INLINE int __any_sync(unsigned mask, int vote) { return emu::ballot(mask, vote != 0) != 0; }
static EMU_INLINE int __all_sync(unsigned mask, int vote) { return emu::ballot(mask, vote == 0) == 0; }
template <class T> static EMU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    emu::Match own{0, 0};
    __builtin_memcpy(&own.value, &value, sizeof value);
    emu::warp(mask, emu::do_match, &own);
    return own.same;
}
static EMU_INLINE unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::Reduction::add, v); }
static EMU_INLINE unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::Reduction::min, v); }
static EMU_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::Reduction::max, v); }
static EMU_INLINE int __reduce_add_sync(unsigned mask, int v) { return emu::reduce(mask, emu::Reduction::add, v); }
static EMU_INLINE int __reduce_min_sync(unsigned mask, int v) { return emu::reduce(mask, emu::Reduction::min, v); }
static EMU_INLINE int __reduce_max_sync(unsigned mask, int v) { return emu::reduce(mask, emu::Reduction::max, v); }
static EMU_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned v) {
    return emu::reduce(mask, emu::Reduction::bit_and, v);
}
static EMU_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emu::reduce(mask, emu::Reduction::bit_or, v); }
static EMU_INLINE unsigned __reduce_xor_sync(unsigned mask, unsigned v) {
    return emu::reduce(mask, emu::Reduction::bit_xor, v);
}
// The lanes that execute it together: here always a single one.
static EMU_INLINE unsigned __activemask() { return 1u << emu::current->lane; }

// ---- atomics on integers: relaxed as on the device, so they do not order other accesses ----
namespace emu {
template <class T, class F> static inline T atomic(T *address, F change) {
    T before = __atomic_load_n(address, __ATOMIC_RELAXED);
    for (;;) {
        const T after = change(before);
        if (__atomic_compare_exchange_n(address, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return before;
    }
}
}
#define EMU_ATOMICS(T) \
    static inline T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); } \
    static inline T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); } \
    static inline T atomicMin(T *p, T v) { \
        return emu::atomic(p, [=](T old) { return old < v ? old : v; }); \
    } \
    static inline T atomicMax(T *p, T v) { \
        return emu::atomic(p, [=](T old) { return old > v ? old : v; }); \
    } \
    static inline T atomicAnd(T *p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); } \
    static inline T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); } \
    static inline T atomicXor(T *p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); } \
    static inline T atomicCAS(T *p, T expected, T v) { \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
        return expected; \
    }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS
static inline int atomicSub(int *p, int v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicSub(unsigned *p, unsigned v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicInc(unsigned *p, unsigned last) {
    return emu::atomic(p, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}
// Atomic sums of floats have a different order, and different bits, in every run.
float atomicAdd(float *, float) = delete;
double atomicAdd(double *, double) = delete;

// ---- loads and stores with cache hints ----
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldca(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldlu(const T *p) { return *p; }
template <class T> static inline T __ldcv(const T *p) { return *p; }
template <class T> static inline void __stwb(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stwt(T *p, T v) { *p = v; }

// ---- bits ----
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
static inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}

// ---- arithmetic: the fast functions of the device are less accurate than these ----
#define __expf(x) expf(x)                       // macros: glibc has functions with these names
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }

// For floats, min and max on the device are fminf and fmaxf, which ignore NaN.
#define EMU_MIN_MAX(T) \
    static constexpr T min(T a, T b) { return b < a ? b : a; } \
    static constexpr T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
