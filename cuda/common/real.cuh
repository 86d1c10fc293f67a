// real.cuh - arrays of activations: float32 or bfloat16, as bit 63 of a pyops_real address says.
//
// A kernel for both types is a template over the element type T, float or bf16.  It loads packs of floats, calculates in
// float32, and stores packs, which rounds.  The function of the ABI calls
//
//     return with_type("relu_forward", [&](auto type) {
//         using T = decltype(type);
//         ... LAUNCH(kernel<T>, ..., elements<T>(y), elements<T>(x));
//     }, y, x);
//
// pyops_real is an incomplete type, so an address that has not passed through `elements` cannot be dereferenced.
#pragma once
#include "index.cuh"

typedef __nv_bfloat16 bf16;

constexpr uintptr_t BF16_MARK = uintptr_t(1) << 63;     // no address of a process has this bit
static inline bool is_bf16(const pyops_real *p) { return uintptr_t(p) & BF16_MARK; }
template <class T> static inline T *elements(pyops_real *p) { return reinterpret_cast<T *>(uintptr_t(p) & ~BF16_MARK); }
template <class T> static inline const T *elements(const pyops_real *p) {
    return reinterpret_cast<const T *>(uintptr_t(p) & ~BF16_MARK);
}
static inline pyops_real *real(float *p) { return reinterpret_cast<pyops_real *>(p); }
static inline const pyops_real *real(const float *p) { return reinterpret_cast<const pyops_real *>(p); }
static inline pyops_real *real(bf16 *p) { return reinterpret_cast<pyops_real *>(uintptr_t(p) | (p ? BF16_MARK : 0)); }
static inline const pyops_real *real(const bf16 *p) { return real(const_cast<bf16 *>(p)); }
// The address of an element.
static inline const pyops_real *element(const pyops_real *p, int64_t i) {
    return reinterpret_cast<const pyops_real *>(uintptr_t(p) + i * int64_t(is_bf16(p) ? sizeof(bf16) : sizeof(float)));
}

// Return run(float()) or run(bf16()), according to the type of the arrays; NULL has no type.
template <class Run, class... P> static pyops_status with_type(const char *who, Run run, P... arrays) {
    const int halves = ((arrays && is_bf16(arrays)) + ...), all = ((arrays != nullptr) + ...);
    PYOPS_REQUIRE(halves == 0 || halves == all, "%s: float32 and bfloat16 activations in one call, expected one type", who);
    return halves ? run(bf16()) : run(float());
}

// ---- elements in registers ---------------------------------------------------------------------------
template <class T> constexpr int WIDEST = 16 / sizeof(T);       // elements per access of 16 bytes

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(bf16 x) { return __bfloat162float(x); }
template <class T> DEVICE T as(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return __float2bfloat16(x);
}
// x as it will be read again after a store.
template <class T> DEVICE float stored(float x) { return as_float(as<T>(x)); }

// The two elements of a word, the lower one first.
DEVICE float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// WIDTH adjacent elements, in one access (two for 8 floats) that must be aligned to its size.  WIDTH is 1, 4 or 8.
template <int WIDTH> DEVICE Pack<float, WIDTH> load_reals(const float *p) {
    if constexpr (WIDTH == 8) {
        const float4 a = *reinterpret_cast<const float4 *>(p), b = *reinterpret_cast<const float4 *>(p + 4);
        return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
        return load_pack<WIDTH>(p);
    }
}
template <int WIDTH> DEVICE Pack<float, WIDTH> load_reals(const bf16 *p) {
    if constexpr (WIDTH == 1) {
        return {{as_float(*p)}};
    } else if constexpr (WIDTH == 4) {
        const uint2 x = *reinterpret_cast<const uint2 *>(p);
        return {{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)}};
    } else {
        const uint4 x = *reinterpret_cast<const uint4 *>(p);
        return {{low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y), low_bf16(x.z), high_bf16(x.z), low_bf16(x.w),
                 high_bf16(x.w)}};
    }
}
template <int WIDTH> DEVICE void store_reals(float *p, const Pack<float, WIDTH> &x) {
    if constexpr (WIDTH == 8) {
        reinterpret_cast<float4 *>(p)[0] = make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
        reinterpret_cast<float4 *>(p)[1] = make_float4(x.at[4], x.at[5], x.at[6], x.at[7]);
    } else {
        store_pack<WIDTH>(p, x);
    }
}
template <int WIDTH> DEVICE void store_reals(bf16 *p, const Pack<float, WIDTH> &x) {
    if constexpr (WIDTH == 1) *p = as<bf16>(x.at[0]);
    else if constexpr (WIDTH == 4)
        *reinterpret_cast<uint2 *>(p) = make_uint2(pack_bf16(x.at[0], x.at[1]), pack_bf16(x.at[2], x.at[3]));
    else
        *reinterpret_cast<uint4 *>(p) = make_uint4(pack_bf16(x.at[0], x.at[1]), pack_bf16(x.at[2], x.at[3]),
                                                   pack_bf16(x.at[4], x.at[5]), pack_bf16(x.at[6], x.at[7]));
}
