// good.cu - kernels of every kind that the emulator must run right, in every order of threads, and without a false alarm.
//
//     good [name of a kernel, or all] [side of the matrices, a multiple of 64] [repetitions]
//
// prints for each kernel the largest difference from the result in double precision, and the best time.
#include "common.h"

constexpr unsigned ALL = 0xffffffffu;

// ---- sums over a block: shuffles, shared memory, then shuffles; over the grid in a fixed order by the last block to come ----
static __device__ float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
    return x;
}
static __device__ float block_sum(float x) {
    SHARED(float, partial, [32]);
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.0f);
    __syncthreads();
    return x;
}
static __global__ void sum(const float *x, float *partial, unsigned *done, float *result, int n) {
    SHARED(bool, last, [1]);
    float mine = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) mine += x[i];
    mine = block_sum(mine);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = mine;
        __threadfence();
        last[0] = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last[0] && threadIdx.x == 0) {
        float total = 0.0f;
        for (unsigned i = 0; i < gridDim.x; i++) total += partial[i];
        *result = total;
    }
}

// ---- matrix products: one output for each thread; 4 x 4 of them; tensor cores ----
template <int TILE> static __global__ void matmul(const float *a, const float *b, float *c, int n) {
    SHARED(float, a_tile, [TILE][TILE]);
    SHARED(float, b_tile, [TILE][TILE]);
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float total = 0.0f;
    for (int k0 = 0; k0 < n; k0 += TILE) {
        a_tile[y][x] = a[row * n + k0 + x];
        b_tile[y][x] = b[(k0 + y) * n + column];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; k++) total += a_tile[y][k] * b_tile[k][x];
        __syncthreads();
    }
    c[row * n + column] = total;
}

static __global__ void __launch_bounds__(256) matmul_registers(const float *a, const float *b, float *c, int n) {
    SHARED(float, a_tile, [16][68]);            // transposed
    SHARED(float, b_tile, [16][64]);
    const int t = threadIdx.x, row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    float total[4][4] = {};
    for (int k0 = 0; k0 < n; k0 += 16) {
        const float4 in = *reinterpret_cast<const float4 *>(&a[(row0 + t / 4) * n + k0 + t % 4 * 4]);
        const float values[4] = {in.x, in.y, in.z, in.w};
        for (int i = 0; i < 4; i++) a_tile[t % 4 * 4 + i][t / 4] = values[i];
        const float *from = &b[(k0 + t / 16) * n + column0 + t % 16 * 4];
        *reinterpret_cast<float4 *>(&b_tile[t / 16][t % 16 * 4]) = *reinterpret_cast<const float4 *>(from);
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            const float4 x = *reinterpret_cast<float4 *>(&a_tile[k][t / 16 * 4]);
            const float4 y = *reinterpret_cast<float4 *>(&b_tile[k][t % 16 * 4]);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) total[i][j] += xs[i] * ys[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        float *to = &c[(row0 + t / 16 * 4 + i) * n + column0 + t % 16 * 4];
        *reinterpret_cast<float4 *>(to) = make_float4(total[i][0], total[i][1], total[i][2], total[i][3]);
    }
}

// 64 x 64 tiles by 4 warps, and two stages of asynchronous copies.
static __global__ void __launch_bounds__(128) matmul_tf32(const float *a, const float *b, float *c, int n) {
    DYN_SHARED(float, shared);
    auto a_tile = reinterpret_cast<float (*)[64][20]>(shared);
    auto b_tile = reinterpret_cast<float (*)[16][72]>(shared + 2 * 64 * 20);
    const int t = threadIdx.x, warp = t / 32, g = t % 32 / 4, q = t % 4, row = warp / 2 * 32, column = warp % 2 * 32;
    const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    float total[2][4][4] = {};
    auto load = [&](int stage, int k0) {
        for (int i = t; i < 256; i += 128) {
            cp_async16(&a_tile[stage][i / 4][i % 4 * 4], &a[(row0 + i / 4) * n + k0 + i % 4 * 4]);
            cp_async16(&b_tile[stage][i / 16][i % 16 * 4], &b[(k0 + i / 16) * n + column0 + i % 16 * 4]);
        }
        cp_async_commit();
    };
    load(0, 0);
    for (int k0 = 0, stage = 0; k0 < n; k0 += 16, stage ^= 1) {
        if (k0 + 16 < n) {
            load(stage ^ 1, k0 + 16);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        for (int k = 0; k < 16; k += 8) {
            unsigned x[2][4], y[4][2];
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++) x[i][j] = to_tf32(a_tile[stage][row + 16 * i + g + j % 2 * 8][k + q + j / 2 * 4]);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) y[i][j] = to_tf32(b_tile[stage][k + q + 4 * j][column + 8 * i + g]);
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 4; j++) mma_tf32(total[i][j], x[i], y[j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            for (int e = 0; e < 4; e++) {
                const int y = row0 + row + 16 * i + g + e / 2 * 8, x = column0 + column + 8 * j + 2 * q + e % 2;
                c[y * n + x] = total[i][j][e];
            }
}

// c = a * b^T in bfloat16: a 64 x 64 tile for a warpgroup, which computes, and one more warp, which loads a ring of 3 stages.
static __global__ void __launch_bounds__(160)
    matmul_wgmma(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float *c, int n) {
    constexpr int STAGES = 3, TILE = 64 * 128;
    DYN_SHARED(unsigned char, shared);
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + STAGES * 2 * TILE), *empty = full + STAGES;
    const int t = threadIdx.x, row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    if (t == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], 128);
        }
        mbar_fence_init();
    }
    __syncthreads();
    if (t >= 128) {
        if (t > 128) return;
        for (int i = 0; i < n / 64; i++) {
            const int stage = i % STAGES, phase = i / STAGES & 1;
            mbar_wait(&empty[stage], phase ^ 1);
            mbar_expect(&full[stage], 2 * TILE);
            tma_load_2d(shared + stage * 2 * TILE, &a, i * 64, row0, &full[stage]);
            tma_load_2d(shared + stage * 2 * TILE + TILE, &b, i * 64, column0, &full[stage]);
        }
        return;
    }
    float d[32];
    for (int i = 0; i < n / 64; i++) {
        const int stage = i % STAGES, phase = i / STAGES & 1;
        mbar_wait(&full[stage], phase);
        wg_fence();
        const uint64_t x = wg_desc(shared + stage * 2 * TILE), y = wg_desc(shared + stage * 2 * TILE + TILE);
        for (int k = 0; k < 4; k++) wgmma_bf16<64>(d, x + 2 * k, y + 2 * k, i || k);
        wg_commit();
        wg_wait<0>();
        mbar_arrive(&empty[stage]);
    }
    for (int i = 0; i < 32; i++)
        c[(row0 + t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * n + column0 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}

// c (64 x 64) = a * b^T, a in E4M3 and b in E5M2.  Each 128 k of a row of a, and of b, have a scale; their sum is added to c in
// float32.
constexpr int SLICES = 4, NARROW_K = SLICES * 128;
static __global__ void narrow(unsigned short *a, unsigned short *b, const float *wide_a, const float *wide_b) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a[i] = static_cast<unsigned short>(fp8_pair<Fp8::e4m3>(wide_a[2 * i], wide_a[2 * i + 1]));
    b[i] = static_cast<unsigned short>(fp8_pair<Fp8::e5m2>(wide_b[2 * i], wide_b[2 * i + 1]));
}
static __global__ void __launch_bounds__(160)
    matmul_fp8(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const float *scales_a,
               const float *scales_b, float *c) {
    constexpr int STAGES = 2, TILE = 64 * 128;
    DYN_SHARED(unsigned char, shared);
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + STAGES * 2 * TILE), *empty = full + STAGES;
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4;
    if (t == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], 128);
        }
        mbar_fence_init();
    }
    __syncthreads();
    if (t >= 128) {
        if (t > 128) return;
        for (int i = 0; i < SLICES; i++) {
            const int stage = i % STAGES;
            mbar_wait(&empty[stage], (i / STAGES & 1) ^ 1);
            mbar_expect(&full[stage], 2 * TILE);
            tma_load_2d(shared + stage * 2 * TILE, &a, i * 128, 0, &full[stage]);
            tma_load_2d(shared + stage * 2 * TILE + TILE, &b, i * 128, 0, &full[stage]);
        }
        return;
    }
    float d[32], total[32] = {};
    for (int i = 0; i < SLICES; i++) {
        const int stage = i % STAGES;
        mbar_wait(&full[stage], i / STAGES & 1);
        wg_fence();
        const uint64_t x = wg_desc(shared + stage * 2 * TILE), y = wg_desc(shared + stage * 2 * TILE + TILE);
        for (int k = 0; k < 4; k++) wgmma_fp8<64, Fp8::e4m3, Fp8::e5m2>(d, x + 2 * k, y + 2 * k, k > 0);
        wg_commit();
        wg_wait<0>();
        mbar_arrive(&empty[stage]);
        for (int j = 0; j < 32; j++) total[j] += d[j] * (scales_a[(row + j / 2 % 2 * 8) * SLICES + i] * scales_b[i]);
    }
    for (int j = 0; j < 32; j++) c[(row + j / 2 % 2 * 8) * 64 + j / 4 * 8 + t % 4 * 2 + j % 2] = total[j];
}

// c (64 x n) = a * b^T in bfloat16: a cluster of two blocks, each with 32 columns of c.  Each loads its rows of b, and half of
// the rows of a for both, into a ring of 2 stages.
constexpr int SHARING_K = 512;
static __global__ void __launch_bounds__(160)
    matmul_multicast(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, float *c, int n) {
    constexpr int STAGES = 2, HALF = 32 * 128, STAGE = 3 * HALF;
    DYN_SHARED(unsigned char, shared);
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + STAGES * STAGE), *empty = full + STAGES;
    const int t = threadIdx.x, rank = cluster_rank(), column0 = blockIdx.x * 32;
    if (t == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], 2 * 4);
        }
        mbar_fence_init();
    }
    cluster_sync();
    if (t == 128)
        for (int i = 0; i < SHARING_K / 64; i++) {
            const int stage = i % STAGES;
            unsigned char *const to = shared + stage * STAGE;
            mbar_wait(&empty[stage], (i / STAGES & 1) ^ 1);
            mbar_expect(&full[stage], 3 * HALF);
            tma_load_2d(to + 2 * HALF, &b, i * 64, column0, &full[stage]);
            tma_load_2d_to_all(to + rank * HALF, &a, i * 64, rank * 32, &full[stage], 3);
        }
    if (t < 128) {
        float d[16];
        for (int i = 0; i < SHARING_K / 64; i++) {
            const int stage = i % STAGES;
            mbar_wait(&full[stage], i / STAGES & 1);
            wg_fence();
            const uint64_t x = wg_desc(shared + stage * STAGE), y = wg_desc(shared + stage * STAGE + 2 * HALF);
            for (int k = 0; k < 4; k++) wgmma_bf16<32>(d, x + 2 * k, y + 2 * k, i || k);
            wg_commit();
            wg_wait<0>();
            if (t % 32 < 2) mbar_arrive_at(&empty[stage], t % 32);
        }
        for (int i = 0; i < 16; i++)
            c[(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * n + column0 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
    }
    cluster_sync();
}

// y += x: each of two warps has 16 rows, and stores sums by bulk copies from two places in turn.
static __global__ void add_in_pieces(const __grid_constant__ CUtensorMap map, const float *x, const float *y, int columns) {
    DYN_SHARED(float, places);
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    for (int first = 0; first < columns; first += 32) {
        float *const piece = places + (row0 * 2 + first % 64 / 2) * 32;
        if (lane == 0) tma_store_wait_read<1>();
        __syncwarp();
        for (int i = lane; i < 16 * 16; i += 32) {
            const int at = (row0 + i / 16) * columns + first + i % 16 * 2;
            write_for_copy(reinterpret_cast<float2 *>(piece) + i, make_float2(x[at] + y[at], x[at + 1] + y[at + 1]));
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(&map, first, row0, piece);
            tma_store_commit();
        }
    }
    if (lane == 0) tma_store_wait_read<0>();
}

// ---- softmax of rows: a warp for each, a block for each ----
static __global__ void softmax_warp(const float *x, float *y, int rows, int columns) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * columns;
    y += row * columns;
    float most = -INFINITY, total = 0.0f;
    for (int i = lane; i < columns; i += 32) most = fmaxf(most, x[i]);
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    for (int i = lane; i < columns; i += 32) total += __expf(x[i] - most);
    total = warp_sum(total);
    for (int i = lane; i < columns; i += 32) y[i] = __expf(x[i] - most) / total;
}
static __global__ void softmax_block(const float *x, float *y, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    SHARED(float, partial, [32]);
    float most = -INFINITY, total = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) most = fmaxf(most, x[i]);
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = most;
    __syncthreads();
    most = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : -INFINITY;
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    for (int i = threadIdx.x; i < columns; i += blockDim.x) total += __expf(x[i] - most);
    total = block_sum(total);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) y[i] = __expf(x[i] - most) / total;
}

// ---- votes, matches and shuffles of every kind, a row of results for each --------------------------------------------
constexpr int VOTES = 16, VOTERS = 96;
static __host__ __device__ bool votes(int thread, int round) { return thread * 7 % 11 < 3 + round; }
static __global__ void voting(float *out) {
    const int t = threadIdx.x, lane = t % 32;
    auto row = [=](int i, float value) { out[i * VOTERS + t] = value; };
    for (int round = 0; round < 3; round++) row(round, static_cast<float>(__syncthreads_count(votes(t, round))));
    row(3, static_cast<float>(__syncthreads_or(t == 50)) + static_cast<float>(__syncthreads_or(t == 500)));
    row(4, static_cast<float>(__syncthreads_and(t >= 0)) + static_cast<float>(__syncthreads_and(t < 50)));
    row(5, static_cast<float>(__ballot_sync(ALL, votes(lane, 1)) & 0xffff));
    row(6, static_cast<float>(__any_sync(ALL, t == 40)) + 2.0f * static_cast<float>(__all_sync(ALL, t < 64)));
    row(7, static_cast<float>(__match_any_sync(ALL, lane % 5) & 0xffff));
    row(8, static_cast<float>(__reduce_add_sync(ALL, lane - 9)));
    row(9, static_cast<float>(__reduce_min_sync(ALL, -lane)) + static_cast<float>(__reduce_max_sync(ALL, 2u * lane)));
    row(10, static_cast<float>(__shfl_up_sync(ALL, t, 3)));
    row(11, static_cast<float>(__shfl_down_sync(ALL, t, 3, 8)));
    row(12, static_cast<float>(__shfl_xor_sync(ALL, t, 5)));
    row(13, static_cast<float>(__shfl_sync(ALL, t, 9, 8)));
    row(14, static_cast<float>(__shfl_sync(ALL, static_cast<double>(t), lane + 1)));
    float half = 0.0f;                          // only the even lanes
    if (lane % 2 == 0) half = static_cast<float>(__shfl_xor_sync(0x55555555u, t, 2));
    row(15, half);
}

// ---- recurrences h = tanh(w h + x_t) in one kernel: blocks that wait for each other, four ways ----
static __device__ float dot(const float *w, const float *h, int n) {
    float mine = 0.0f;
    for (int i = threadIdx.x % 32; i < n; i += 32) mine += w[i] * h[i];
    return warp_sum(mine);
}
enum class Wait { grid, flag, cluster };
template <Wait HOW>
static __global__ void recurrence(const float *w, const float *x, float *h, unsigned *flag, int n, int steps) {
    SHARED(float, before, [256]);
    SHARED(float, after, [256]);
    const int rows = n / gridDim.x, row0 = blockIdx.x * rows, lane = threadIdx.x % 32;
    for (int t = 0; t < steps; t++) {
        const float *from = h + (t & 1) * n;
        float *to = h + ((t + 1) & 1) * n;
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            before[i] = HOW == Wait::cluster && t ? map_shared(after, i / rows)[i] : from[i];
        __syncthreads();
        if (HOW == Wait::cluster) cluster_sync();               // all have read, so `after` may change
        for (int r = threadIdx.x / 32; r < rows; r += blockDim.x / 32) {
            const float total = dot(w + (row0 + r) * n, before, n);
            if (lane == 0) after[row0 + r] = to[row0 + r] = tanhf(total + x[t * n + row0 + r]);
        }
        if (HOW == Wait::grid) grid_sync();
        if (HOW == Wait::cluster) cluster_sync();
        if (HOW == Wait::flag) {
            __syncthreads();
            if (threadIdx.x == 0) {
                add_release(flag, 1);
                while (load_acquire(flag) < (t + 1) * gridDim.x) {}
            }
            __syncthreads();
        }
    }
}

// The blocks of a cluster store to each other's next state, while others may still read the one before.
static __global__ void recurrence_by_stores(const float *w, const float *x, float *h, int n, int steps) {
    DYN_SHARED(float, states);                                  // [2][n]
    const int rows = n / gridDim.x, row0 = blockIdx.x * rows, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < n; i += blockDim.x) states[i] = h[i];
    cluster_sync();
    for (int t = 0; t < steps; t++) {
        const float *from = states + (t & 1) * n;
        float *to = states + ((t + 1) & 1) * n;
        for (int r = threadIdx.x / 32; r < rows; r += blockDim.x / 32) {
            const float state = tanhf(dot(w + (row0 + r) * n, from, n) + x[t * n + row0 + r]);
            if (lane < cluster_size()) store_shared(to + row0 + r, lane, state);
            if (lane == 0) h[((t + 1) & 1) * n + row0 + r] = state;
        }
        cluster_arrive();
        cluster_wait();
    }
}

// ---- a step of training, as a graph replays it: what changes from step to step is on the device ----
static __global__ void tick(int *step) { *step += 1; }
static __global__ void use_step(const int *step, float *p, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += static_cast<float>(*step);
}

// ---- running them -----------------------------------------------------------------------------------------------
static const char *wanted;
static int repetitions, failures;

static bool asked_for(const char *name) { return !strcmp(wanted, "all") || !strcmp(wanted, name); }
static void report(const char *name, cudaError_t error, double difference, double tolerance, double time) {
    const bool ok = error == cudaSuccess && difference <= tolerance;
    if (!ok) failures++;
    printf("%-18s %-4s %-10.3g %.3f ms %s\n", name, ok ? "ok" : "BAD", difference, time, error ? cudaGetErrorName(error) : "");
}
// Of a kernel that fills `result`, launched by `run`.
template <class F>
static void try_kernel(const char *name, const float *result, const std::vector<double> &expected, double tolerance, F run) {
    if (!asked_for(name)) return;
    double best = INFINITY;
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < repetitions; i++) {
        const double begun = milliseconds();
        error = run();
        cudaDeviceSynchronize();
        best = fmin(best, milliseconds() - begun);
    }
    report(name, error, largest_difference(to_host(result, expected.size()), expected), tolerance, best);
}

static void try_sum() {
    const int n = 65536;
    const std::vector<float> x = uniform(n, 1);
    double total = 0.0;
    for (float value : x) total += value;
    const float *device = to_device(x);
    float *partial = on_device<float>(8), *result = on_device<float>(1);
    unsigned *done = to_device(std::vector<unsigned>{0});
    try_kernel("sum", result, {total}, 1e-3, [=] { return LAUNCH(sum, 8, 256, 0, nullptr, device, partial, done, result, n); });
}

static void try_matmul(int n) {
    const std::vector<float> a = uniform(n * n, 1), b = uniform(n * n, 2);
    std::vector<double> expected(n * n), transposed(n * n);
    const std::vector<__nv_bfloat16> a16 = as_bf16(a), b16 = as_bf16(b);
    const std::vector<float> a_rounded = as_float(a16), b_rounded = as_float(b16);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++)
            for (int j = 0; j < n; j++) {
                expected[i * n + j] += static_cast<double>(a[i * n + k]) * b[k * n + j];
                transposed[i * n + j] += static_cast<double>(a_rounded[i * n + k]) * b_rounded[j * n + k];
            }
    const float *x = to_device(a), *y = to_device(b);
    float *c = on_device<float>(n * n);
    const unsigned tiles = n / 64;
    const std::vector<float> wrong(n * n, NAN);
    auto forget = [&] { cudaMemcpy(c, wrong.data(), n * n * sizeof(float), cudaMemcpyHostToDevice); };
    try_kernel("matmul_16", c, expected, 1e-4,
               [=] { return LAUNCH(matmul<16>, dim3(n / 16, n / 16), dim3(16, 16), 0, nullptr, x, y, c, n); });
    forget();
    try_kernel("matmul_32", c, expected, 1e-4,
               [=] { return LAUNCH(matmul<32>, dim3(n / 32, n / 32), dim3(32, 32), 0, nullptr, x, y, c, n); });
    forget();
    try_kernel("matmul_registers", c, expected, 1e-4,
               [=] { return LAUNCH(matmul_registers, dim3(tiles, tiles), 256, 0, nullptr, x, y, c, n); });
    forget();
    const size_t stages = (2 * 64 * 20 + 2 * 16 * 72) * sizeof(float);
    try_kernel("matmul_tf32", c, expected, 2e-2,
               [=] { return LAUNCH(matmul_tf32, dim3(tiles, tiles), 128, stages, nullptr, x, y, c, n); });
    forget();
    CUtensorMap a_map, b_map;
    const uint64_t size = n;
    const __nv_bfloat16 *x16 = to_device(a16), *y16 = to_device(b16);
    make_tensor_map_2d(&a_map, x16, 2, size, size, 2 * size, 64, 64, true);
    make_tensor_map_2d(&b_map, y16, 2, size, size, 2 * size, 64, 64, true);
    const int ring = 3 * 2 * 64 * 128 + 64;
    cudaFuncSetAttribute(matmul_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, ring);
    try_kernel("matmul_wgmma", c, transposed, 1e-4,
               [&] { return LAUNCH(matmul_wgmma, dim3(tiles, tiles), 160, ring, nullptr, a_map, b_map, c, n); });
}

static void try_fp8() {
    std::vector<float> a = uniform(64 * NARROW_K, 3), b = uniform(64 * NARROW_K, 4);
    for (float &x : a) x = floorf(16.0f * x) / 8.0f;                    // exact in E4M3
    for (float &x : b) x = floorf(4.0f * x) / 2.0f;                     // exact in E5M2
    const std::vector<float> scales_a = uniform(64 * SLICES, 5), scales_b = uniform(SLICES, 6);
    std::vector<double> expected(64 * 64);
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < 64; j++)
            for (int k = 0; k < NARROW_K; k++)
                expected[i * 64 + j] += static_cast<double>(a[i * NARROW_K + k]) * b[j * NARROW_K + k] *
                    scales_a[i * SLICES + k / 128] * scales_b[k / 128];
    auto *a8 = on_device<unsigned short>(32 * NARROW_K), *b8 = on_device<unsigned short>(32 * NARROW_K);
    const float *wide_a = to_device(a), *wide_b = to_device(b), *of_a = to_device(scales_a), *of_b = to_device(scales_b);
    float *c = on_device<float>(64 * 64);
    CUtensorMap a_map, b_map;
    make_tensor_map_2d(&a_map, a8, 1, NARROW_K, 64, NARROW_K, 128, 64, true);
    make_tensor_map_2d(&b_map, b8, 1, NARROW_K, 64, NARROW_K, 128, 64, true);
    const int ring = 2 * 2 * 64 * 128 + 64;
    cudaFuncSetAttribute(matmul_fp8, cudaFuncAttributeMaxDynamicSharedMemorySize, ring);
    try_kernel("matmul_fp8", c, expected, 1e-4, [&] {
        const cudaError_t error = LAUNCH(narrow, 64, NARROW_K / 2, 0, nullptr, a8, b8, wide_a, wide_b);
        return error ? error : LAUNCH(matmul_fp8, 1, 160, ring, nullptr, a_map, b_map, of_a, of_b, c);
    });
}

static void try_multicast() {
    const int n = 128, rows = 64, k = SHARING_K;
    const std::vector<__nv_bfloat16> a = as_bf16(uniform(rows * k, 3)), b = as_bf16(uniform(n * k, 4));
    const std::vector<float> wide_a = as_float(a), wide_b = as_float(b);
    std::vector<double> expected(rows * n);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++)
            for (int l = 0; l < k; l++) expected[i * n + j] += static_cast<double>(wide_a[i * k + l]) * wide_b[j * k + l];
    float *c = on_device<float>(rows * n);
    CUtensorMap a_map, b_map;
    make_tensor_map_2d(&a_map, to_device(a), 2, k, rows, 2 * k, 64, 32, true);
    make_tensor_map_2d(&b_map, to_device(b), 2, k, n, 2 * k, 64, 32, true);
    const int ring = 2 * 3 * 32 * 128 + 64;
    try_kernel("matmul_multicast", c, expected, 1e-4,
               [&] { return LAUNCH_CLUSTER(2, matmul_multicast, n / 32, 160, ring, nullptr, a_map, b_map, c, n); });
}

static void try_pieces() {
    const int rows = 32, columns = 160;
    const std::vector<float> x = uniform(rows * columns, 8), y = uniform(rows * columns, 9);
    std::vector<double> expected(x.size());
    for (size_t i = 0; i < x.size(); i++) expected[i] = x[i] + y[i];
    const float *device_x = to_device(x);
    float *device_y = on_device<float>(y.size());
    CUtensorMap map;
    make_tensor_map_2d(&map, device_y, 4, columns, rows, columns * 4, 32, 16, false);
    try_kernel("add_in_pieces", device_y, expected, 0.0, [&] {
        cudaMemcpy(device_y, y.data(), y.size() * 4, cudaMemcpyHostToDevice);
        return LAUNCH(add_in_pieces, 1, 64, 2 * 2 * 2048, nullptr, map, device_x, device_y, columns);
    });
}

static void try_softmax() {
    const int rows = 128, columns = 512;
    const std::vector<float> x = uniform(rows * columns, 5);
    std::vector<double> expected(x.size());
    for (int r = 0; r < rows; r++) {
        double total = 0.0;
        for (int i = 0; i < columns; i++) total += exp(x[r * columns + i]);
        for (int i = 0; i < columns; i++) expected[r * columns + i] = exp(x[r * columns + i]) / total;
    }
    const float *device = to_device(x);
    float *y = on_device<float>(x.size()), *z = on_device<float>(x.size());
    try_kernel("softmax_warp", y, expected, 1e-6,
               [=] { return LAUNCH(softmax_warp, rows / 4, 128, 0, nullptr, device, y, rows, columns); });
    try_kernel("softmax_block", z, expected, 1e-6,
               [=] { return LAUNCH(softmax_block, rows, 128, 0, nullptr, device, z, columns); });
}

static void try_recurrence() {
    const int n = 256, steps = 32, blocks = 8;
    std::vector<float> w = uniform(n * n, 9), x = uniform(n * steps, 10);
    for (float &value : w) value *= 0.05f;
    std::vector<double> h(n, 0.0), next(n);
    for (int t = 0; t < steps; t++, h = next)
        for (int i = 0; i < n; i++) {
            double total = x[t * n + i];
            for (int j = 0; j < n; j++) total += w[i * n + j] * h[j];
            next[i] = tanh(total);
        }
    const float *dw = to_device(w), *dx = to_device(x);
    float *dh = on_device<float>(2 * n);
    unsigned *flag = on_device<unsigned>(1);
    auto clear = [=] {
        cudaMemsetAsync(dh, 0, 2 * n * sizeof(float), nullptr);
        cudaMemsetAsync(flag, 0, sizeof(unsigned), nullptr);
    };
    try_kernel("grid_sync", dh, h, 1e-5, [=] {
        clear();
        return LAUNCH_COOP(recurrence<Wait::grid>, blocks, 128, 0, nullptr, dw, dx, dh, flag, n, steps);
    });
    try_kernel("flag", dh, h, 1e-5, [=] {
        clear();
        return LAUNCH_COOP(recurrence<Wait::flag>, blocks, 128, 0, nullptr, dw, dx, dh, flag, n, steps);
    });
    try_kernel("cluster", dh, h, 1e-5, [=] {
        clear();
        return LAUNCH_CLUSTER(blocks, recurrence<Wait::cluster>, blocks, 128, 0, nullptr, dw, dx, dh, flag, n, steps);
    });
    try_kernel("cluster_stores", dh, h, 1e-5, [=] {
        clear();
        return LAUNCH_CLUSTER(blocks, recurrence_by_stores, blocks, 128, 2 * n * sizeof(float), nullptr, dw, dx, dh, n, steps);
    });
}

static void try_voting() {
    std::vector<double> expected(VOTES * VOTERS);
    for (int t = 0; t < VOTERS; t++) {
        const int lane = t % 32, warp = t - lane;
        auto row = [&](int i) -> double & { return expected[i * VOTERS + t]; };
        for (int i = 0; i < VOTERS; i++)
            for (int round = 0; round < 3; round++) row(round) += votes(i, round);
        row(3) = row(4) = 1;
        for (int i = 0; i < 16; i++) {
            row(5) += votes(i, 1) << i;
            row(7) += (i % 5 == lane % 5) << i;
        }
        row(6) = (warp == 32) + 2 * (warp < 64);
        row(8) = 31 * 16 - 9 * 32;
        row(9) = 31;
        row(10) = lane < 3 ? t : t - 3;
        row(11) = lane % 8 < 5 ? t + 3 : t;
        row(12) = warp + (lane ^ 5);
        row(13) = t - lane % 8 + 1;
        row(14) = warp + (lane + 1) % 32;
        row(15) = lane % 2 ? 0 : warp + (lane ^ 2);
    }
    float *out = on_device<float>(VOTES * VOTERS);
    try_kernel("voting", out, expected, 0.0, [=] { return LAUNCH(voting, 1, VOTERS, 0, nullptr, out); });
}

static void try_graph() {
    if (!asked_for("graph")) return;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    int *step = to_device(std::vector<int>{0});
    float *p = to_device(std::vector<float>(100, 0.0f));
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    LAUNCH(tick, 1, 1, 0, stream, step);
    LAUNCH(use_step, 4, 32, 0, stream, step, p, 100);
    cudaStreamEndCapture(stream, &graph);
    cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
    cudaGraphDestroy(graph);
    const double begun = milliseconds();
    for (int i = 0; i < 100; i++) cudaGraphLaunch(ready, stream);
    cudaStreamSynchronize(stream);
    const double time = milliseconds() - begun;
    report("graph", error, largest_difference(to_host(p, 100), std::vector<double>(100, 5050.0)), 0.0, time);
    cudaGraphExecDestroy(ready);
    cudaStreamDestroy(stream);
}

// Early launches: each moves all elements by one place, and half of the threads wait before the barrier.
static __global__ void move_by_one(float *y, const float *x, int n) {
    SHARED(int, from, [64]);
    const bool waits_first = threadIdx.x < 32;
    if (waits_first) wait_for_last_kernel();
    from[threadIdx.x] = (blockIdx.x * 64 + threadIdx.x + 1) % n;
    __syncthreads();
    if (!waits_first) wait_for_last_kernel();
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < n) y[i] = x[from[threadIdx.x]];
}
static void try_early() {
    constexpr int COUNT = 200;
    std::vector<float> values = uniform(COUNT, 1);
    float *x = to_device(values), *y = on_device<float>(COUNT);
    std::vector<double> expected(COUNT);
    for (int i = 0; i < COUNT; i++) expected[i] = values[(i + 3) % COUNT];
    try_kernel("early", y, expected, 0.0, [=] {
        const int blocks = (COUNT + 63) / 64;
        float *z = on_device<float>(COUNT);
        cudaError_t error = LAUNCH_EARLY(move_by_one, blocks, 64, 0, nullptr, y, x, COUNT);
        if (!error) error = LAUNCH_EARLY(move_by_one, blocks, 64, 0, nullptr, z, y, COUNT);
        return error ? error : LAUNCH_EARLY(move_by_one, blocks, 64, 0, nullptr, y, z, COUNT);
    });
}

// Two streams that wait for each other in turn.
static void try_streams() {
    if (!asked_for("streams")) return;
    cudaStream_t first, second;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    int *step = to_device(std::vector<int>{0});
    float *p = to_device(std::vector<float>(100, 0.0f));
    const double begun = milliseconds();
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 100 && !error; i++) {
        error = LAUNCH(tick, 1, 1, 0, first, step);
        cudaEventRecord(event, first);
        cudaStreamWaitEvent(second, event, 0);
        if (!error) error = LAUNCH(use_step, 4, 32, 0, second, step, p, 100);
        cudaEventRecord(event, second);
        cudaStreamWaitEvent(first, event, 0);
    }
    cudaStreamSynchronize(first);
    const double time = milliseconds() - begun;
    report("streams", error, largest_difference(to_host(p, 100), std::vector<double>(100, 5050.0)), 0.0, time);
    cudaEventDestroy(event);
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
}

int main(int argc, char **argv) {
    wanted = argc > 1 ? argv[1] : "all";
    const int n = argc > 2 ? atoi(argv[2]) : 128;
    repetitions = argc > 3 ? atoi(argv[3]) : 1;
    try_sum();
    try_voting();
    try_matmul(n);
    try_fp8();
    try_multicast();
    try_pieces();
    try_softmax();
    try_recurrence();
    try_early();
    try_graph();
    try_streams();
    return failures != 0;
}
