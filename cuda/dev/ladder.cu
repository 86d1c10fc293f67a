// ladder.cu - how a matrix product gets fast: c = a b in nine steps, one idea each (explained in docs/cuda_gemm.md).
//
//   ladder M N K [library]       M and N multiples of 256, K of 64; library: libpyops_cuda.so, timed for comparison
//
// a (M,K), b (K,N) and c (M,N) are row-major.  Their elements are small integers, so every step must compute exactly the same
// sums, also with rounded operands.  On a GPU every step is timed; on the emulator it is only checked.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include "device.h"
#include "hopper.cuh"
#include "real.cuh"

struct Problem {
    float *c;
    const float *a, *b;
    const uint16_t *a_bf16, *b_bf16;        // operands of the last step: a (M,K), and b transposed, (N,K)
    int M, N, K;
};

// ---- 1. A thread for each sum -------------------------------------------------------------------------------------------
// Adjacent threads, which access memory at the same time, are in one column: every access of a warp touches 32 rows and moves
// 32 sectors of memory for 4 bytes of each.
static __global__ void naive(Problem p) {
    const int m = blockIdx.y * 32 + threadIdx.x, n = blockIdx.x * 32 + threadIdx.y;
    float sum = 0;
    for (int k = 0; k < p.K; k++) sum += p.a[size_t(m) * p.K + k] * p.b[size_t(k) * p.N + n];
    p.c[size_t(m) * p.N + n] = sum;
}

// ---- 2. Coalesced accesses ----------------------------------------------------------------------------------------------
// Adjacent threads are in one row: a warp reads 128 contiguous bytes of b, writes 128 of c, and all its threads read the same
// number of a.
static __global__ void coalesced(Problem p) {
    const int m = blockIdx.y * 32 + threadIdx.y, n = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < p.K; k++) sum += p.a[size_t(m) * p.K + k] * p.b[size_t(k) * p.N + n];
    p.c[size_t(m) * p.N + n] = sum;
}

// ---- 3. A tile in shared memory -------------------------------------------------------------------------------------------
// A block computes 32 x 32 sums and loads their operands into shared memory, 32 k's at a time: every number loaded from memory
// is used 32 times.
static __global__ void shared_tile(Problem p) {
    SHARED(float, a_tile, [32][32]);
    SHARED(float, b_tile, [32][32]);
    const int x = threadIdx.x, y = threadIdx.y, m = blockIdx.y * 32 + y, n = blockIdx.x * 32 + x;
    float sum = 0;
    for (int k0 = 0; k0 < p.K; k0 += 32) {
        a_tile[y][x] = p.a[size_t(m) * p.K + k0 + x];
        b_tile[y][x] = p.b[size_t(k0 + y) * p.N + n];
        __syncthreads();
        for (int k = 0; k < 32; k++) sum += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    p.c[size_t(m) * p.N + n] = sum;
}

// ---- 4. A tile in registers -----------------------------------------------------------------------------------------------
// Two reads of shared memory per multiplication are too many.  A thread computes 8 x 8 sums: 16 reads for 64 multiplications.
// The tile of a block is 128 x 128.
static __global__ void __launch_bounds__(256) register_tile(Problem p) {
    SHARED(float, a_tile, [8][128]);
    SHARED(float, b_tile, [8][128]);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const float *a = p.a + size_t(blockIdx.y) * 128 * p.K, *b = p.b + blockIdx.x * 128;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < p.K; k0 += 8) {
        for (int i = threadIdx.x; i < 8 * 128; i += 256) {
            a_tile[i % 8][i / 8] = a[size_t(i / 8) * p.K + k0 + i % 8];
            b_tile[i / 128][i % 128] = b[size_t(k0 + i / 128) * p.N + i % 128];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += a_tile[k][y * 8 + i] * b_tile[k][x * 8 + j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) p.c[size_t(blockIdx.y * 128 + y * 8 + i) * p.N + blockIdx.x * 128 + x * 8 + j] = sum[i][j];
}

// ---- 5. Four numbers at a time --------------------------------------------------------------------------------------------
// Loads and stores of 16 bytes: a quarter of the instructions.  No bank conflicts, since a thread takes columns 4 x .. 4 x + 3
// and the same columns + 64.
static __global__ void __launch_bounds__(256) vector_loads(Problem p) {
    SHARED(float4, a_tile, [8][33]);                // padding: rows of a are written along columns, to different banks
    SHARED(float4, b_tile, [8][32]);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const float *a = p.a + size_t(blockIdx.y * 128 + threadIdx.x / 2) * p.K + threadIdx.x % 2 * 4;
    const float *b = p.b + size_t(threadIdx.x / 32) * p.N + blockIdx.x * 128 + threadIdx.x % 32 * 4;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < p.K; k0 += 8, a += 8, b += size_t(8) * p.N) {
        const float4 four = *reinterpret_cast<const float4 *>(a);
        float *column = reinterpret_cast<float *>(a_tile[threadIdx.x % 2 * 4]) + threadIdx.x / 2;
        column[0] = four.x, column[132] = four.y, column[264] = four.z, column[396] = four.w;
        b_tile[threadIdx.x / 32][threadIdx.x % 32] = *reinterpret_cast<const float4 *>(b);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float4 a0 = a_tile[k][y], a1 = a_tile[k][16 + y], b0 = b_tile[k][x], b1 = b_tile[k][16 + x];
            const float rows[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
            const float columns[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += rows[i] * columns[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *c = p.c + size_t(blockIdx.y * 128 + i / 4 * 64 + y * 4 + i % 4) * p.N + blockIdx.x * 128 + half * 64 + x * 4;
            const float *four = sum[i] + half * 4;
            *reinterpret_cast<float4 *>(c) = make_float4(four[0], four[1], four[2], four[3]);
        }
}

// ---- 6. Tensor cores ------------------------------------------------------------------------------------------------------
// One instruction of a warp multiplies 16 x 8 by 8 x 8 numbers in TF32.  A warp computes WM x WN of the 128 x 128 sums of a
// block.  Lines in shared memory are padded by 4 and 8 floats, so that the 32 numbers of a fragment are in 32 banks.
constexpr int A_LINE = 32 + 4, B_LINE = 128 + 8, A_PANEL = 128 * A_LINE, PANELS = A_PANEL + 32 * B_LINE;

template <int WM, int WN> struct Warp {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m = threadIdx.x / 32 / (128 / WN) * WM, n = threadIdx.x / 32 % (128 / WN) * WN;     // start of the warp's part
    float sum[WM / 16][WN / 8][4] = {};

    __device__ __forceinline__ void multiply(const float *a, const float *b) {
#pragma unroll
        for (int k = 0; k < 32; k += 8) {
            unsigned y[WN / 8][2];
#pragma unroll
            for (int j = 0; j < WN / 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) y[j][h] = to_tf32(b[(k + t + 4 * h) * B_LINE + n + j * 8 + g]);
#pragma unroll
            for (int i = 0; i < WM / 16; i++) {
                unsigned x[4];
#pragma unroll
                for (int h = 0; h < 4; h++) x[h] = to_tf32(a[(m + i * 16 + h % 2 * 8 + g) * A_LINE + k + h / 2 * 4 + t]);
#pragma unroll
                for (int j = 0; j < WN / 8; j++) mma_tf32(sum[i][j], x, y[j]);
            }
        }
    }
    __device__ __forceinline__ void write(const Problem &p) const {
#pragma unroll
        for (int i = 0; i < WM / 16; i++)
#pragma unroll
            for (int j = 0; j < WN / 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = blockIdx.y * 128 + m + i * 16 + h * 8 + g, column = blockIdx.x * 128 + n + j * 8 + 2 * t;
                    *reinterpret_cast<float2 *>(p.c + size_t(row) * p.N + column) = {sum[i][j][2 * h], sum[i][j][2 * h + 1]};
                }
    }
};

static __global__ void __launch_bounds__(256) tensor_core(Problem p) {
    DYN_SHARED(float, panels);
    Warp<64, 32> warp;
    const float *a = p.a + size_t(blockIdx.y) * 128 * p.K, *b = p.b + blockIdx.x * 128;
    for (int k0 = 0; k0 < p.K; k0 += 32) {
        for (int i = threadIdx.x; i < 128 * 8; i += 256) {
            *reinterpret_cast<float4 *>(panels + i / 8 * A_LINE + i % 8 * 4) = *reinterpret_cast<const float4 *>(
                a + size_t(i / 8) * p.K + k0 + i % 8 * 4);
            *reinterpret_cast<float4 *>(panels + A_PANEL + i / 32 * B_LINE + i % 32 * 4) = *reinterpret_cast<const float4 *>(
                b + size_t(k0 + i / 32) * p.N + i % 32 * 4);
        }
        __syncthreads();
        warp.multiply(panels, panels + A_PANEL);
        __syncthreads();
    }
    warp.write(p);
}

// ---- 7. Asynchronous copies, and 8. more sums per warp ---------------------------------------------------------------------
// Copies from memory to shared memory are asynchronous and run two steps of K ahead of the multiplication.  With 64 x 32 sums
// a warp reads 24 numbers per lane for 16 instructions; with 64 x 64, 32 numbers for 32 instructions.
template <int WM, int WN> static __global__ void __launch_bounds__(128 * 128 / (WM * WN) * 32) pipeline(Problem p) {
    constexpr int THREADS = 128 * 128 / (WM * WN) * 32, SLOTS = 3;
    DYN_SHARED(float, ring);
    Warp<WM, WN> warp;
    const float *a = p.a + size_t(blockIdx.y) * 128 * p.K, *b = p.b + blockIdx.x * 128;
    const auto fetch = [&](int step) {
        float *slot = ring + step % SLOTS * PANELS;
        if (step * 32 < p.K)
            for (int i = threadIdx.x; i < 128 * 8; i += THREADS) {
                cp_async16(slot + i / 8 * A_LINE + i % 8 * 4, a + size_t(i / 8) * p.K + step * 32 + i % 8 * 4);
                cp_async16(slot + A_PANEL + i / 32 * B_LINE + i % 32 * 4, b + size_t(step * 32 + i / 32) * p.N + i % 32 * 4);
            }
        cp_async_commit();
    };
    for (int step = 0; step < SLOTS - 1; step++) fetch(step);
    for (int step = 0; step * 32 < p.K; step++) {
        cp_async_wait<SLOTS - 2>();             // this thread's copies of this step have arrived
        __syncthreads();                        // all copies have arrived, and no thread reads the previous slot any more
        fetch(step + SLOTS - 1);
        warp.multiply(ring + step % SLOTS * PANELS, ring + step % SLOTS * PANELS + A_PANEL);
    }
    cp_async_wait<0>();
    warp.write(p);
}

// ---- 9. Hopper: bulk copies and wgmma --------------------------------------------------------------------------------------
// One thread issues copies of whole panels, and four warps together multiply 64 x 16 by 16 x 256 numbers directly from shared
// memory, in bfloat16.  The library continues from here, with a separate warp for the copies and persistent blocks
// (hopper_gemm.cu).
constexpr int SLOTS9 = 4, SLOT9 = (128 + 256) * 64 * 2;

static __global__ void __launch_bounds__(256, 1)
    wgmma_tma(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, Problem p) {
    DYN_SHARED(char, ring);
    SHARED(uint64_t, full, [SLOTS9]);
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32, steps = p.K / 64;
    const auto fetch = [&](int step) {
        char *slot = ring + step % SLOTS9 * SLOT9;
        mbar_expect(full + step % SLOTS9, SLOT9);
        tma_load_2d(slot, &a_map, step * 64, blockIdx.y * 128, full + step % SLOTS9);
        tma_load_2d(slot + 128 * 128, &b_map, step * 64, blockIdx.x * 256, full + step % SLOTS9);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS9; i++) mbar_init(full + i, 1);
        mbar_fence_init();
        for (int step = 0; step < SLOTS9 && step < steps; step++) fetch(step);
    }
    __syncthreads();
    float sum[128] = {};
    for (int step = 0; step < steps; step++) {
        mbar_wait(full + step % SLOTS9, step / SLOTS9 % 2);
        const char *slot = ring + step % SLOTS9 * SLOT9;
        wg_fence();
        const uint64_t a = wg_desc(slot + group * 64 * 128), b = wg_desc(slot + 128 * 128);
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_bf16<256>(sum, a + 2 * k, b + 2 * k);
        wg_commit();
        wg_wait<0>();
        __syncthreads();                    // both groups have finished reading the slot
        if (threadIdx.x == 0 && step + SLOTS9 < steps) fetch(step + SLOTS9);
    }
    const int m = blockIdx.y * 128 + threadIdx.x / 32 * 16 + lane / 4, n = blockIdx.x * 256 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 128; i += 2)
        *reinterpret_cast<float2 *>(p.c + size_t(m + i / 2 % 2 * 8) * p.N + n + i / 4 * 8) = make_float2(sum[i], sum[i + 1]);
}

// ---- the steps -------------------------------------------------------------------------------------------------------------
static dim3 tiles(const Problem &p, int m, int n) { return dim3(p.N / n, p.M / m); }
template <auto *KERNEL> static cudaError_t squares(const Problem &p) {
    return LAUNCH(KERNEL, tiles(p, 32, 32), dim3(32, 32), 0, 0, p);
}
template <auto *KERNEL> static cudaError_t with_shared(const Problem &p, int threads, int bytes) {
    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return LAUNCH(KERNEL, tiles(p, 128, 128), threads, bytes, 0, p);
}
static cudaError_t hopper(const Problem &p) {
    CUtensorMap a_map, b_map;
    const cudaError_t a_made = make_tensor_map_2d(&a_map, p.a_bf16, 2, p.K, p.M, size_t(p.K) * 2, 64, 128, true);
    const cudaError_t b_made = make_tensor_map_2d(&b_map, p.b_bf16, 2, p.K, p.N, size_t(p.K) * 2, 64, 256, true);
    if (a_made != cudaSuccess || b_made != cudaSuccess) return cudaErrorInvalidValue;
    cudaFuncSetAttribute(wgmma_tma, cudaFuncAttributeMaxDynamicSharedMemorySize, SLOTS9 * SLOT9);
    return LAUNCH(wgmma_tma, tiles(p, 128, 256), 256, SLOTS9 * SLOT9, 0, a_map, b_map, p);
}

struct Step {
    const char *name;
    cudaError_t (*run)(const Problem &);
};
static const Step STEPS[] = {
    {"1 naive", squares<naive>},
    {"2 coalesced", squares<coalesced>},
    {"3 shared tile", squares<shared_tile>},
    {"4 register tile", [](const Problem &p) { return with_shared<register_tile>(p, 256, 0); }},
    {"5 vector loads", [](const Problem &p) { return with_shared<vector_loads>(p, 256, 0); }},
    {"6 tensor core, TF32", [](const Problem &p) { return with_shared<tensor_core>(p, 256, PANELS * 4); }},
    {"7 asynchronous copies", [](const Problem &p) { return with_shared<pipeline<64, 32>>(p, 256, 3 * PANELS * 4); }},
    {"8 64 x 64 sums a warp", [](const Problem &p) { return with_shared<pipeline<64, 64>>(p, 128, 3 * PANELS * 4); }},
    {"9 wgmma, TMA, bfloat16", hopper},
};

// ---- the program -----------------------------------------------------------------------------------------------------------
static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "ladder: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}
template <class T> static T *on_device(const std::vector<T> &host) {
    T *made = nullptr;
    check(cudaMalloc(&made, host.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(made, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return made;
}
static uint16_t to_bf16(float x) {                     // exact for small integers
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
}

// Every row of c times a vector of small integers, from the operands: exact, since all numbers are integers below 2^53.
struct Expected {
    std::vector<double> weights, rows;
    Expected(const Problem &p, const std::vector<float> &a, const std::vector<float> &b) : weights(p.N), rows(p.M) {
        uint32_t random = 2;
        std::vector<double> product(p.K);
        for (double &weight : weights) weight = 1 + ((random = random * 1664525u + 1013904223u) >> 28);
        for (int k = 0; k < p.K; k++)
            for (int n = 0; n < p.N; n++) product[k] += double(b[size_t(k) * p.N + n]) * weights[n];
        for (int m = 0; m < p.M; m++)
            for (int k = 0; k < p.K; k++) rows[m] += double(a[size_t(m) * p.K + k]) * product[k];
    }
};

// Check all sums; name one that is wrong.
static bool right(const Problem &p, const std::vector<float> &a, const std::vector<float> &b, const Expected &expected) {
    std::vector<float> c(size_t(p.M) * p.N);
    check(cudaMemcpy(c.data(), p.c, c.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int m = 0; m < p.M; m++) {
        double row = 0;
        for (int n = 0; n < p.N; n++) row += double(c[size_t(m) * p.N + n]) * expected.weights[n];
        if (row == expected.rows[m]) continue;
        for (int n = 0; n < p.N; n++) {
            float sum = 0;
            for (int k = 0; k < p.K; k++) sum += a[size_t(m) * p.K + k] * b[size_t(k) * p.N + n];
            if (c[size_t(m) * p.N + n] == sum) continue;
            fprintf(stderr, "ladder: c[%d,%d] is %g, not %g\n", m, n, double(c[size_t(m) * p.N + n]), double(sum));
            break;
        }
        return false;
    }
    return true;
}

// The least time of up to five runs, of one run if it takes seconds; 0 on the emulator, which runs it once.
template <class F> static float milliseconds(const F &run) {
#ifdef __CUDACC__
    cudaEvent_t from, to;
    check(cudaEventCreate(&from), "cudaEventCreate"), check(cudaEventCreate(&to), "cudaEventCreate");
    float best = 1e30f, all = 0;
    for (int repeat = 0; repeat < 5 && all < 2000; repeat++) {
        float took = 0;
        check(cudaEventRecord(from), "cudaEventRecord"), check(run(), "a step"), check(cudaEventRecord(to), "cudaEventRecord");
        check(cudaEventSynchronize(to), "a step");
        check(cudaEventElapsedTime(&took, from, to), "cudaEventElapsedTime");
        best = took < best ? took : best, all += took;
    }
    cudaEventDestroy(from), cudaEventDestroy(to);
    return best;
#else
    check(run(), "a step");
    return 0;
#endif
}

// Run a step and check its sums, time it, and check them again.  Each time c is NaN before the run.
template <class F> static bool measure(const char *name, const Problem &p, const std::vector<float> &a,
                                       const std::vector<float> &b, const Expected &expected, const F &run) {
    bool good = true;
    float took = 0;
    for (int when = 0; when < 2; when++) {
        check(cudaMemset(p.c, 0xff, size_t(p.M) * p.N * sizeof(float)), "cudaMemset");
        check(run(), name);
        check(cudaDeviceSynchronize(), name);
        good &= right(p, a, b, expected);
        if (when == 0) took = milliseconds(run);
    }
    printf("%-26s %s", name, good ? "right" : "WRONG");
    if (took > 0) printf(" %10.3f ms %8.1f TFLOPS", double(took), 2e-9 * p.M * p.N * p.K / double(took));
    puts("");
    fflush(stdout);
    return good;
}

int main(int count, char **arguments) {
    Problem p = {};
    if (count >= 4) p.M = atoi(arguments[1]), p.N = atoi(arguments[2]), p.K = atoi(arguments[3]);
    if (p.M < 1 || p.N < 1 || p.K < 1 || p.M % 256 || p.N % 256 || p.K % 64) {
        fprintf(stderr, "usage: ladder M N K [library]     M and N multiples of 256, K of 64\n");
        return 2;
    }
    std::vector<float> a(size_t(p.M) * p.K), b(size_t(p.K) * p.N);
    std::vector<uint16_t> a_bf16(a.size()), b_bf16(b.size());
    uint32_t random = 1;
    const auto small = [&] { return float(int((random = random * 1664525u + 1013904223u) >> 28) - 8); };
    for (size_t i = 0; i < a.size(); i++) a_bf16[i] = to_bf16(a[i] = small());
    for (size_t i = 0; i < b.size(); i++) b_bf16[i % p.N * p.K + i / p.N] = to_bf16(b[i] = small());
    p.a = on_device(a), p.b = on_device(b), p.a_bf16 = on_device(a_bf16), p.b_bf16 = on_device(b_bf16);
    p.c = on_device(std::vector<float>(size_t(p.M) * p.N));

    const Expected expected(p, a, b);
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "the device");
    bool good = true;
    printf("c = a b of %d x %d x %d\n", p.M, p.N, p.K);
    for (const Step &step : STEPS) {
        if (step.run == hopper && major != 9) continue;
        good &= measure(step.name, p, a, b, expected, [&] { return step.run(p); });
    }
    if (count >= 5) {
        void *library = dlopen(arguments[4], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "ladder: %s\n", dlerror()), 1;
        const auto gemm = reinterpret_cast<decltype(&pyops_gemm)>(dlsym(library, "pyops_gemm"));
        const auto gemm_bf16 = reinterpret_cast<decltype(&pyops_gemm_bf16)>(dlsym(library, "pyops_gemm_bf16"));
        const auto set_precision = reinterpret_cast<decltype(&pyops_set_precision)>(dlsym(library, "pyops_set_precision"));
        const auto status = [](pyops_status failed) { return failed ? cudaErrorInvalidValue : cudaSuccess; };
        const char *const names[] = {"pyops_gemm, float32", "pyops_gemm, TF32", "pyops_gemm, bfloat16"};
        for (int precision = 0; precision < 3; precision++) {
            set_precision(precision);
            good &= measure(names[precision], p, a, b, expected, [&] {
                return status(
                    gemm(real(p.c), real(p.a), real(p.b), nullptr, p.M, p.N, p.K, p.N, p.K, 1, p.N, 1, 0, 0, nullptr));
            });
        }
        good &= measure("pyops_gemm_bf16", p, a, b, expected,
                        [&] { return status(gemm_bf16(p.c, p.a_bf16, p.b_bf16, p.M, p.N, p.K, p.N, p.K, p.K, 0, nullptr)); });
    }
    return good ? 0 : 1;
}
