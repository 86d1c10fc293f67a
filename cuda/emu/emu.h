// emu.h - compile CUDA C++ kernels with g++ and run them on the CPU, for tests (see emu.cpp for how).
#pragma once
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sched.h>
#include <tuple>
#include <utility>
#include <vector>
#include <algorithm>
// ---------------------------------------------------------------- vector types
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
#define CUEMU_VEC(T, N) \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; }; struct N##3 { T x, y, z; }; \
  struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) N##4 { T x, y, z, w; }; \
  static inline N##2 make_##N##2(T a, T b) { return {a, b}; } static inline N##3 make_##N##3(T a, T b, T c) { return {a, b, c}; } \
  static inline N##4 make_##N##4(T a, T b, T c, T d) { return {a, b, c, d}; }
CUEMU_VEC(float, float) CUEMU_VEC(int, int) CUEMU_VEC(double, double)
struct alignas(8) uint2 { unsigned x, y; }; struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
// ---------------------------------------------------------------- what the runtime offers
enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInvalidConfiguration = 9, cudaErrorInsufficientDriver = 35, cudaErrorInvalidDeviceFunction = 98, cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101, cudaErrorNoKernelImageForDevice = 209, cudaErrorUnsupportedPtxVersion = 222, cudaErrorInvalidResourceHandle = 400, cudaErrorNotReady = 600, cudaErrorIllegalAddress = 700, cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720, cudaErrorNotSupported = 801, cudaErrorStreamCaptureUnsupported = 900, cudaErrorStreamCaptureInvalidated = 901, cudaErrorStreamCaptureImplicit = 906, cudaErrorUnknown = 999 };
namespace cuemu {
struct AsyncCopy { void* dst; const void* src; int n, valid, group; };
struct Block;
struct Thr {                                     // one CUDA thread
  uint3 tid; int lane; uint3 bid; Block* blk; dim3 bd, gd; char* dyn; int lin, warp, cpgroup, ncp, capcp; AsyncCopy* cp; void* wg; int nwg, wggroup;
  int st; struct Fiber* f; unsigned wmask; const void* wop; void* warg; int bar; const void* site;
};
extern __thread Thr* cur;
extern bool poison;
using WarpOp = void (*)(void** lanes, unsigned mask);
void warp_op(unsigned mask, WarpOp op, void* arg, bool sync);      // the last lane of mask to arrive runs op for all
void bar_sync(int id, int nthreads, const void* site, bool arrive_only);
int bar_vote(int pred);                                            // __syncthreads_count
void grid_sync();
void yield();
void* shared_var(void* key, size_t n);
void cp_async(void* dst, const void* src, int n, int valid); void cp_commit(); void cp_wait(int n);
[[noreturn]] void die(const char* fmt, const char* a = "", long b = 0, long c = 0);
const char* kname();
cudaError launch(bool coop, const void* fn, const char* name, dim3 g, dim3 b, size_t smem, struct CuStreamTag* s, std::function<void()> body);
template <class... P, class... A> cudaError launch_k(bool coop, void (*k)(P...), const char* name, dim3 g, dim3 b, size_t smem, void* s, A&&... a) {
  std::tuple<std::decay_t<P>...> args(std::forward<A>(a)...);      // copied at launch, as on the device
  return launch(coop, (const void*)k, name, g, b, smem, (struct CuStreamTag*)s, [k, args] { std::apply(k, args); });
}
}
#if defined(__SANITIZE_THREAD__)
#define CUEMU_NOTSAN __attribute__((no_sanitize("thread")))
#else
#define CUEMU_NOTSAN
#endif
// ---------------------------------------------------------------- runtime API
typedef cudaError cudaError_t;
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
typedef struct CuStream* cudaStream_t; typedef struct CuEvent* cudaEvent_t; typedef struct CuGraph* cudaGraph_t; typedef struct CuGraph* cudaGraphExec_t;
cudaError_t cudaMalloc(void** p, size_t n); cudaError_t cudaFree(void* p); cudaError_t cudaMallocHost(void** p, size_t n); cudaError_t cudaFreeHost(void* p);
template <class T> inline cudaError_t cudaMalloc(T** p, size_t n) { return cudaMalloc((void**)p, n); }
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind k, cudaStream_t st = nullptr);
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st = nullptr);
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k); cudaError_t cudaMemset(void* d, int v, size_t n);
cudaError_t cudaStreamCreate(cudaStream_t* s); cudaError_t cudaStreamDestroy(cudaStream_t s); cudaError_t cudaStreamSynchronize(cudaStream_t s); cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetLastError(); cudaError_t cudaPeekAtLastError(); const char* cudaGetErrorString(cudaError_t e);
cudaError_t cudaEventCreate(cudaEvent_t* e); cudaError_t cudaEventDestroy(cudaEvent_t e); cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = nullptr); cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b); cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f = 0);
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode m); cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long fl = 0); cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t g); cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g);
enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10, cudaDevAttrMultiProcessorCount = 16, cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76, cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrCooperativeLaunch = 95, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
struct cudaDeviceProp { char name[256]; size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor; int warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, multiProcessorCount, major, minor, l2CacheSize; };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocWriteCombined = 4 };
cudaError_t cudaGetDeviceCount(int* n); cudaError_t cudaSetDevice(int d); cudaError_t cudaGetDevice(int* d); cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d); cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total); cudaError_t cudaHostAlloc(void** p, size_t n, unsigned flags); const char* cudaGetErrorName(cudaError_t e);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags); cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags); cudaError_t cudaEventQuery(cudaEvent_t e); cudaError_t cudaStreamQuery(cudaStream_t s);
template <class T> inline cudaError_t cudaMallocHost(T** p, size_t n) { return cudaMallocHost((void**)p, n); }
template <class T> inline cudaError_t cudaHostAlloc(T** p, size_t n, unsigned f) { return cudaHostAlloc((void**)p, n, f); }
namespace cuemu { int occupancy(int threads, size_t smem); }
template <class F> inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, F, int threads, size_t smem) { *n = cuemu::occupancy(threads, smem); return cudaSuccess; }
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st);
namespace cuemu { cudaError_t set_max_smem(const void* f, int v); }
template <class F> inline cudaError_t cudaFuncSetAttribute(F f, cudaFuncAttribute a, int v) { return a == cudaFuncAttributeMaxDynamicSharedMemorySize ? cuemu::set_max_smem((const void*)f, v) : cudaSuccess; }
template <class T> inline cudaError_t cudaMemcpyToSymbol(T& sym, const void* s, size_t n, size_t off = 0) { memcpy((char*)&sym + off, s, n); return cudaSuccess; }
// ---------------------------------------------------------------- device language
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static thread_local            /* works for launches that are not cooperative; SHARED() in gpu.cuh is better */
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (cuemu::cur->tid)
#define blockIdx (cuemu::cur->bid)
#define blockDim (cuemu::cur->bd)
#define gridDim (cuemu::cur->gd)
constexpr int warpSize = 32;
__attribute__((noinline, unused)) static void __syncthreads() { cuemu::bar_sync(0, 0, __builtin_return_address(0), false); }
static inline int __syncthreads_count(int p) { return cuemu::bar_vote(p != 0); }
static inline int __syncthreads_or(int p) { return cuemu::bar_vote(p != 0) > 0; }
static inline int __syncthreads_and(int p) { return cuemu::bar_vote(p == 0) == 0; }
static inline void __syncwarp(unsigned m = 0xffffffffu) { cuemu::warp_op(m, nullptr, nullptr, true); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) { cuemu::yield(); }
namespace cuemu {
template <class T> struct ShArg { T v, r; int src; };
template <class T> CUEMU_NOTSAN void sh_run(void** a, unsigned mask) {
  for (int i = 0; i < 32; i++) if (a[i]) { auto* x = (ShArg<T>*)a[i]; int s = x->src;
    if (mask >> s & 1) x->r = ((ShArg<T>*)a[s])->v; else for (size_t k = 0; k < sizeof(T); k++) ((char*)&x->r)[k] = -1; } }   // inactive lane: undefined
template <class T> CUEMU_NOTSAN T shfl(unsigned m, T v, int src) { static_assert(sizeof(T) <= 8); ShArg<T> a; a.v = v; a.src = src; warp_op(m, sh_run<T>, &a, false); return a.r; }
inline CUEMU_NOTSAN void ballot_run(void** a, unsigned) { unsigned r = 0; for (int i = 0; i < 32; i++) if (a[i] && *(unsigned*)a[i]) r |= 1u << i; for (int i = 0; i < 32; i++) if (a[i]) *(unsigned*)a[i] = r; }
template <class T, int K> CUEMU_NOTSAN void red_run(void** a, unsigned) { bool f = true; T r{}; for (int i = 0; i < 32; i++) if (a[i]) { T x = *(T*)a[i]; r = f ? x : K == 0 ? r + x : K == 1 ? (x < r ? x : r) : (x > r ? x : r); f = false; } for (int i = 0; i < 32; i++) if (a[i]) *(T*)a[i] = r; }
template <class T> struct MatchArg { T v; unsigned r; };
template <class T> CUEMU_NOTSAN void match_run(void** a, unsigned) { for (int i = 0; i < 32; i++) if (a[i]) { unsigned r = 0; for (int j = 0; j < 32; j++) if (a[j] && ((MatchArg<T>*)a[i])->v == ((MatchArg<T>*)a[j])->v) r |= 1u << j; ((MatchArg<T>*)a[i])->r = r; } }
}
template <class T> CUEMU_NOTSAN static inline T __shfl_sync(unsigned m, T v, int s, int w = 32) { int l = cuemu::cur->lane; return cuemu::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1))); }
template <class T> CUEMU_NOTSAN static inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) { int l = cuemu::cur->lane, s = l ^ x; if (s >= (l & ~(w - 1)) + w) s = l; return cuemu::shfl(m, v, s); }
template <class T> CUEMU_NOTSAN static inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) { int l = cuemu::cur->lane, s = l + (int)d; if (s >= (l & ~(w - 1)) + w) s = l; return cuemu::shfl(m, v, s); }
template <class T> CUEMU_NOTSAN static inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) { int l = cuemu::cur->lane, s = l - (int)d; if (s < (l & ~(w - 1))) s = l; return cuemu::shfl(m, v, s); }
CUEMU_NOTSAN static inline unsigned __ballot_sync(unsigned m, int p) { unsigned a = p != 0; cuemu::warp_op(m, cuemu::ballot_run, &a, false); return a; }
static inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
template <class T> CUEMU_NOTSAN static inline T __reduce_add_sync(unsigned m, T v) { cuemu::warp_op(m, cuemu::red_run<T, 0>, &v, false); return v; }
template <class T> CUEMU_NOTSAN static inline T __reduce_min_sync(unsigned m, T v) { cuemu::warp_op(m, cuemu::red_run<T, 1>, &v, false); return v; }
template <class T> CUEMU_NOTSAN static inline T __reduce_max_sync(unsigned m, T v) { cuemu::warp_op(m, cuemu::red_run<T, 2>, &v, false); return v; }
template <class T> CUEMU_NOTSAN static inline unsigned __match_any_sync(unsigned m, T v) { cuemu::MatchArg<T> a; a.v = v; cuemu::warp_op(m, cuemu::match_run<T>, &a, false); return a.r; }
// atomics: relaxed, as on the device
template <class T, class F> static inline T cuemu_rmw(T* p, F f) { T o, n; __atomic_load(p, &o, __ATOMIC_RELAXED); do n = f(o); while (!__atomic_compare_exchange(p, &o, &n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); return o; }
#define CUEMU_ATOMIC(name, expr) template <class T> static inline T name(T* p, std::common_type_t<T> v) { return cuemu_rmw(p, [=](T o) { return T(expr); }); }
CUEMU_ATOMIC(atomicAdd, o + v) CUEMU_ATOMIC(atomicSub, o - v) CUEMU_ATOMIC(atomicMax, o > v ? o : v) CUEMU_ATOMIC(atomicMin, o < v ? o : v) CUEMU_ATOMIC(atomicExch, v) CUEMU_ATOMIC(atomicOr, o | v) CUEMU_ATOMIC(atomicAnd, o & v)
template <class T> static inline T atomicCAS(T* p, std::common_type_t<T> c, std::common_type_t<T> v) { return cuemu_rmw(p, [=](T o) { return o == c ? v : o; }); }
static inline unsigned atomicInc(unsigned* p, unsigned m) { return cuemu_rmw(p, [=](unsigned o) { return o >= m ? 0u : o + 1; }); }
// math and bit intrinsics
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
#define __expf(x) expf(x)      /* glibc declares these names */
#define __logf(x) logf(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline float __uint_as_float(unsigned u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float __int_as_float(int u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline int __float_as_int(float f) { int u; __builtin_memcpy(&u, &f, 4); return u; }
using std::min; using std::max;
// half and bfloat16: storage types and conversions (round to nearest even)
struct __nv_bfloat16 { unsigned short x; }; struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline __nv_bfloat16 __float2bfloat16(float f) { unsigned u = __float_as_uint(f); if ((u & 0x7fffffffu) > 0x7f800000u) return {(unsigned short)0x7fff}; return {(unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16)}; }
static inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float((unsigned)h.x << 16); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
struct __half { _Float16 x; }; struct alignas(4) __half2 { __half x, y; };
static inline __half __float2half(float f) { return {(_Float16)f}; }
static inline float __half2float(__half h) { return (float)h.x; }
