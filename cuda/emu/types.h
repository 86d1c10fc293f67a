// types.h - CUDA's types: dim3, vectors such as float4 with the alignment of the device, bfloat16 and half.
#pragma once
#include <cstdint>
#include <cstring>

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Loads and stores of a vector require an aligned address; UndefinedBehaviorSanitizer detects an unaligned one.
#define EMU_VECTORS(T, name) \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
    struct name##3 { T x, y, z; }; \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
#undef EMU_VECTORS

// ---- the same bits as another type ----
namespace emu {
template <class To, class From> static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
}
static inline float __uint_as_float(unsigned u) { return emu::same_bits<float>(u); }
static inline float __int_as_float(int i) { return emu::same_bits<float>(i); }
static inline unsigned __float_as_uint(float f) { return emu::same_bits<unsigned>(f); }
static inline int __float_as_int(float f) { return emu::same_bits<int>(f); }
static inline double __longlong_as_double(long long i) { return emu::same_bits<double>(i); }
static inline long long __double_as_longlong(double d) { return emu::same_bits<long long>(d); }

// ---- bfloat16 and half: storage and conversions (round to nearest, ties to even); no arithmetic ----
struct __nv_bfloat16 { unsigned short x; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half { _Float16 x; };
struct alignas(4) __half2 { __half x, y; };

static inline __nv_bfloat16 __float2bfloat16(float f) {
    const unsigned u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};                       // the NaN of the device
    return {static_cast<unsigned short>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __float2bfloat16(f); }
static inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float(static_cast<unsigned>(h.x) << 16); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
static inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
static inline float __low2float(__nv_bfloat162 h) { return __bfloat162float(h.x); }
static inline float __high2float(__nv_bfloat162 h) { return __bfloat162float(h.y); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return {u}; }
static inline __half __float2half(float f) { return {static_cast<_Float16>(f)}; }
static inline float __half2float(__half h) { return static_cast<float>(h.x); }
