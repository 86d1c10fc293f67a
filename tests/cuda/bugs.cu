// bugs.cu - kernels and calls that are wrong on purpose, one bug each: test_emulator.py has the expected reports.
//
//     bugs name
//
// prints what the launch gave, how many of 64 results are NaN, and how many others are not what they should be.
#include "common.h"

constexpr int N = 64;
constexpr unsigned ALL = 0xffffffffu;

// ---- memory: every kernel should leave y[i] = x[i], each thread one element of a block of 64 unless it says otherwise ----
static __global__ void missing_barrier(const float *x, float *y) {
    SHARED(float, tile, [N]);
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x ^ 32] = tile[threadIdx.x ^ 32];               // of the other warp, without __syncthreads
}
static __global__ void missing_warp_barrier(const float *x, float *y) {
    SHARED(float, tile, [N]);
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x ^ 1] = tile[threadIdx.x ^ 1];                 // of the neighbour, without __syncwarp
}
static __global__ void blocks_race(const float *x, float *y) {  // two blocks
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void missing_grid_barrier(const float *x, float *y) {         // two blocks of 32: each has the other's half
    const int mine = blockIdx.x * 32 + threadIdx.x;
    y[N + (mine ^ 32)] = x[mine ^ 32];
    y[mine] = y[N + mine];                                      // without grid_sync
}
static __global__ void relaxed_flag(const float *x, float *y, unsigned *flag) { // two cooperative blocks
    if (blockIdx.x == 1) {
        y[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) atomicExch(flag, 1);              // orders nothing: store_release would
    } else {
        if (threadIdx.x == 0)
            while (!load_acquire(flag)) {}
        __syncthreads();
        y[threadIdx.x] += 0.0f;
    }
}
static __global__ void shared_overrun(const float *x, float *y) {
    SHARED(float, tile, [N - 1]);
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = threadIdx.x < N - 1 ? tile[threadIdx.x] : x[threadIdx.x];
}
static __global__ void dynamic_overrun(const float *x, float *y) {              // with 63 floats of dynamic shared memory
    DYN_SHARED(float, tile);
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void global_overrun(const float *x, float *y, int n) {
    for (int i = threadIdx.x; i <= n; i += blockDim.x) y[i] = x[i];
}
static __global__ void misaligned(const float *x, float *y) {
    y[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x == 0) y[0] += reinterpret_cast<const float4 *>(x + 1)->x - x[1];
}
static __global__ void never_written(const float *x, float *y) {
    SHARED(float, tile, [N]);
    if (threadIdx.x < N - 1) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];
}
static __global__ void copy_not_waited_for(const float *x, float *y) {
    SHARED(float4, tile, [N / 4]);
    if (threadIdx.x < N / 4) {
        cp_async16(&tile[threadIdx.x], x + 4 * threadIdx.x);
        cp_async_commit();
    }
    __syncthreads();
    y[threadIdx.x] = reinterpret_cast<float *>(tile)[threadIdx.x];
    cp_async_wait<0>();
}
static __global__ void copy_of_other_threads(const float *x, float *y) {        // each waits for its own copies only
    SHARED(float, tile, [N]);
    cp_async4(&tile[threadIdx.x], x + threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    y[threadIdx.x ^ 32] = tile[threadIdx.x ^ 32];               // without __syncthreads
    __syncthreads();
}
static __global__ void copy_left_behind(const float *x, float *y) {
    SHARED(float, tile, [N]);
    cp_async4(&tile[threadIdx.x], x + threadIdx.x);
    y[threadIdx.x] = x[threadIdx.x];
}

// ---- warps and barriers ----
static __global__ void shuffle_in_a_branch(const float *x, float *y) {
    float value = x[threadIdx.x];
    if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(ALL, value, 1);
    y[threadIdx.x] = value;
}
static __global__ void mask_without_the_caller(const float *x, float *y) {
    y[threadIdx.x] = __shfl_sync(0xfffffffeu, x[threadIdx.x], threadIdx.x);
}
static __global__ void two_operations(const float *x, float *y) {
    if (threadIdx.x % 2) y[threadIdx.x] = __shfl_sync(ALL, x[threadIdx.x], threadIdx.x);
    else y[threadIdx.x] = __any_sync(ALL, 1) ? x[threadIdx.x] : 0.0f;
}
static __global__ void barrier_in_a_branch(const float *x, float *y) {
    if (threadIdx.x < 40) __syncthreads();
    else named_bar(1, 64);
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void grid_barrier_alone(const float *x, float *y) {
    grid_sync();
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void grid_barrier_of_some_blocks(const float *x, float *y) {  // two cooperative blocks
    if (blockIdx.x == 0) grid_sync();
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void flag_of_nobody(const float *x, float *y, unsigned *flag) {
    while (!load_acquire(flag)) {}
    y[threadIdx.x] = x[threadIdx.x];
}
static __global__ void plain(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x]; }

// ---- kernels that start before the last one has ended: two blocks of 32 ----
enum class Early { read, write, atomic, copy, read_by_some, returns };
template <Early BUG> static __global__ void early(const float *x, float *y) {
    DYN_SHARED(float, tile);
    const int t = threadIdx.x, i = blockIdx.x * 32 + t;
    if (BUG == Early::returns && i == N - 1) return;            // a thread that has nothing to do
    float value = 0.0f;
    if (BUG == Early::read || (BUG == Early::read_by_some && i > N - 4)) value = x[i];
    if (BUG == Early::write) y[i] = 0.0f;
    if (BUG == Early::atomic) atomicExch(reinterpret_cast<unsigned *>(y) + i, 0u);
    if (BUG == Early::copy) cp_async4(&tile[t], x + i);
    wait_for_last_kernel();
    if (BUG == Early::copy) {
        cp_async_commit();
        cp_async_wait<0>();
        value = tile[t];
    }
    y[i] = value != 0.0f ? value : x[i];
}
static __global__ void early_bulk_load(const __grid_constant__ CUtensorMap map, float *y) {
    DYN_SHARED(float, row);
    uint64_t *full = reinterpret_cast<uint64_t *>(row + N);
    if (threadIdx.x == 0) {
        mbar_init(full, 1);
        mbar_fence_init();
        mbar_expect(full, N * 4);
        tma_load_2d(row, &map, 0, 0, full);                     // which reads as late as the wait below
    }
    wait_for_last_kernel();
    __syncthreads();
    mbar_wait(full, 0);
    for (int i = threadIdx.x; i < N; i += 32) y[i] = row[i];
}

// ---- Hopper ----
// A ring of two stages: one thread loads pieces of 64 floats, 128 threads add them up, and y[i] = 0 + 1 + ... for all pieces.
// The bug is in who waits for whom.
enum class Ring { empty_not_waited_for, full_not_waited_for, never_released, released_twice, not_initialised, too_few_bytes };
template <Ring BUG> static __global__ void ring(const __grid_constant__ CUtensorMap map, float *y, int pieces) {
    DYN_SHARED(float, stage);
    uint64_t *full = reinterpret_cast<uint64_t *>(stage + 2 * N), *empty = full + 2;
    if (threadIdx.x == 0 && BUG != Ring::not_initialised) {
        for (int i = 0; i < 2; i++) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], N);
        }
        mbar_fence_init();
    }
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.x == N) {
        for (int i = 0; i < pieces; i++) {
            if (BUG != Ring::empty_not_waited_for) mbar_wait(&empty[i % 2], (i / 2 & 1) ^ 1);
            mbar_expect(&full[i % 2], BUG == Ring::too_few_bytes ? N * 4 + 16 : N * 4);
            tma_load_2d(stage + i % 2 * N, &map, 0, i, &full[i % 2]);
        }
    } else if (threadIdx.x < N) {
        for (int i = 0; i < pieces; i++) {
            if (BUG != Ring::full_not_waited_for) mbar_wait(&full[i % 2], i / 2 & 1);
            total += stage[i % 2 * N + threadIdx.x];
            if (BUG != Ring::never_released) mbar_arrive(&empty[i % 2]);
            if (BUG == Ring::released_twice) mbar_arrive(&empty[i % 2]);
        }
        y[threadIdx.x] = total;
    }
}
// Two blocks, a cluster: each loads half of every row for both.  y[i] = the sum of the elements i % 32 of both halves of all
// rows; each block writes half of y.
enum class Sharing { own_consumers_alone, never_released_there, too_few_bytes, no_first_barrier, no_last_barrier };
template <Sharing BUG>
static __global__ void sharing(const __grid_constant__ CUtensorMap map, float *y, unsigned *flag, int pieces) {
    DYN_SHARED(float, stage);
    uint64_t *full = reinterpret_cast<uint64_t *>(stage + 2 * N), *empty = full + 2;
    const int rank = cluster_rank(), t = threadIdx.x, here = BUG == Sharing::own_consumers_alone ? N : 2 * N;
    auto wait_for_flag = [=] {                  // this block is slower than the other one
        while (!load_acquire(flag)) {}
    };
    if (t == 0) {
        if (BUG == Sharing::no_first_barrier && rank == 0) wait_for_flag();
        for (int i = 0; i < 2; i++) {
            mbar_init(&full[i], 1);
            mbar_init(&empty[i], here);
        }
        mbar_fence_init();
    }
    if (BUG == Sharing::no_first_barrier) __syncthreads();
    else cluster_sync();
    float total = 0.0f;
    if (t == N) {
        for (int i = 0; i < pieces; i++) {
            mbar_wait(&empty[i % 2], (i / 2 & 1) ^ 1);
            mbar_expect(&full[i % 2], BUG == Sharing::too_few_bytes ? N * 2 : N * 4);
            tma_load_2d_to_all(stage + i % 2 * N + rank * 32, &map, rank * 32, i, &full[i % 2], 3);
            if (BUG == Sharing::no_first_barrier || (rank == 0 && i == 2)) store_release(flag, 1);
        }
    } else if (t < N) {
        if (BUG == Sharing::own_consumers_alone && rank == 1) wait_for_flag();
        for (int i = 0; i < pieces; i++) {
            mbar_wait(&full[i % 2], i / 2 & 1);
            total += stage[i % 2 * N + t % 32] + stage[i % 2 * N + t % 32 + 32];
            mbar_arrive(&empty[i % 2]);
            if (BUG != Sharing::own_consumers_alone && BUG != Sharing::never_released_there)
                mbar_arrive_at(&empty[i % 2], rank ^ 1);
        }
        if (t / 32 == rank) y[t] = total;
    }
    if (BUG != Sharing::no_last_barrier) cluster_sync();
}
// y[i] = the 64 accumulators of thread 0, of a product of ones: 16 each.
enum class Product { waited_for_late, not_waited_for, no_fence, half_a_warpgroup, read_too_early };
template <Product BUG> static __global__ void product(float *y) {
    DYN_SHARED(__nv_bfloat16, tile);            // 128 x 64, of which a is the first half and b is all
    for (int i = threadIdx.x; i < 128 * 64; i += blockDim.x) tile[i] = __float2bfloat16(1.0f);
    fence_proxy_async();
    __syncthreads();
    float d[64] = {};
    if (BUG == Product::half_a_warpgroup && threadIdx.x >= 64) return;
    if (BUG != Product::no_fence) wg_fence();
    wgmma_bf16<128>(d, wg_desc(tile), wg_desc(tile));
    wg_commit();
    if (BUG == Product::waited_for_late) {
        __syncthreads();
        for (int i = threadIdx.x; i < 128 * 64; i += blockDim.x) tile[i] = __float2bfloat16(2.0f);
    }
    if (BUG == Product::read_too_early && threadIdx.x == 0) y[0] = d[0];
    if (BUG != Product::not_waited_for) wg_wait<0>();
    if (threadIdx.x == 0)
        for (int i = BUG == Product::read_too_early; i < N; i++) y[i] = d[i];
}
// The same sum of two slices of FP8, each product added to a second accumulator.
enum class Promotion { added_too_early, not_begun_anew, other_format };
template <Promotion BUG> static __global__ void promotion(float *y) {
    DYN_SHARED(unsigned short, tile);           // 128 rows of 128 halves, of which a is the first 64 rows and b is all
    for (int i = threadIdx.x; i < 128 * 64; i += blockDim.x) tile[i] = fp8_pair<Fp8::e4m3>(0.5f, 0.5f);
    fence_proxy_async();
    __syncthreads();
    float d[64] = {}, total[64] = {};
    auto add = [&] {
        for (int i = 0; i < 64; i++) total[i] += d[i];
    };
    for (int slice = 0; slice < 2; slice++) {
        const uint64_t descriptor = wg_desc(tile) + 2 * slice;
        wg_fence();
        wgmma_fp8<128, Fp8::e4m3, BUG == Promotion::other_format ? Fp8::e5m2 : Fp8::e4m3>(
            d, descriptor, descriptor, BUG == Promotion::not_begun_anew && slice);
        wg_commit();
        if (BUG == Promotion::added_too_early) add();
        wg_wait<0>();
        if (BUG != Promotion::added_too_early) add();
    }
    if (threadIdx.x == 0)
        for (int i = 0; i < N; i++) y[i] = total[i];
}
enum class Store { not_waited_for, overwritten, not_fenced, fenced_by_the_storing_thread };
template <Store BUG> static __global__ void store(const __grid_constant__ CUtensorMap map, const float *x) {
    DYN_SHARED(float, tile);
    const int t = threadIdx.x;
    if (t < N / 2) write_for_copy(reinterpret_cast<float2 *>(tile) + t, make_float2(x[2 * t], x[2 * t + 1]));
    if (BUG == Store::not_waited_for || BUG == Store::overwritten) fence_proxy_async();
    __syncthreads();
    if (t == 0) {
        if (BUG == Store::fenced_by_the_storing_thread) fence_proxy_async();
        tma_store_2d(&map, 0, 0, tile);
        tma_store_commit();
    }
    if (BUG == Store::overwritten) {
        __syncthreads();
        tile[t] = 0.0f;
        __syncthreads();
        if (t == 0) tma_store_wait_read<0>();
    }
}
// A warp writes rows x, x + 1 and x + 2 to two places in turn, and stores them; y is the first of them.
enum class Pieces { not_waited_for, waited_for_late, matrices_not_fenced };
template <Pieces BUG> static __global__ void pieces(const __grid_constant__ CUtensorMap map, const float *x) {
    DYN_SHARED(float, places);
    const int lane = threadIdx.x;
    for (int i = 0; i < 3; i++) {
        float *const piece = places + i % 2 * N;
        if (lane == 0 && BUG != Pieces::not_waited_for) tma_store_wait_read<BUG == Pieces::waited_for_late ? 2 : 1>();
        __syncwarp();
        if (BUG == Pieces::matrices_not_fenced) {
            const unsigned bits[2] = {__float_as_uint(x[lane]), __float_as_uint(x[lane + 32])};
            stmatrix_x2(reinterpret_cast<char *>(piece) + lane % 16 * 16, bits);
        } else {
            write_for_copy(reinterpret_cast<float2 *>(piece) + lane, make_float2(x[2 * lane] + i, x[2 * lane + 1] + i));
            fence_proxy_async();
        }
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(&map, 0, i, piece);
            tma_store_commit();
        }
    }
    if (lane == 0) tma_store_wait_read<0>();
}
static __global__ void cluster_without_barrier(const float *x, float *y) {      // two blocks of 32, a cluster
    SHARED(float, half, [32]);
    half[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
    const int other = cluster_rank() ^ 1;
    y[other * 32 + threadIdx.x] = map_shared(half, other)[threadIdx.x];         // without cluster_sync
}

// Two blocks, a cluster, store to each other's shared memory and to the same place in each step.
enum class Passing { too_early, arrived_twice, not_waited_for };
template <Passing BUG> static __global__ void passing(const float *x, float *y) {
    DYN_SHARED(float, received);
    const int t = threadIdx.x, other = cluster_rank() ^ 1;
    cluster_sync();
    for (int step = 0; step < 4; step++) {
        store_shared(received + t, other, x[blockIdx.x * 32 + t]);              // the other block may still read it
        cluster_arrive();
        if (BUG == Passing::arrived_twice) cluster_arrive();
        if (BUG == Passing::not_waited_for) return;
        cluster_wait();
        y[other * 32 + t] = received[t];
    }
}

// ---- the host ---------------------------------------------------------------------------------------------------
static cudaError_t bug(const char *name, const std::vector<float> &host_x, float *x, float *y, std::vector<float> &result) {
    auto is = [=](const char *other) { return !strcmp(name, other); };
    unsigned *flag = to_device(std::vector<unsigned>{0});
    CUtensorMap map;                            // of rows of 64 ones
    float *rows = to_device(std::vector<float>(16 * N, 1.0f));
    make_tensor_map_2d(&map, rows, 4, N, 16, N * 4, N, 1, false);
    std::vector<float> numbers(16 * N);         // and of rows 1, 2, ...
    for (int i = 0; i < 16 * N; i++) numbers[i] = static_cast<float>(i / N + 1);
    CUtensorMap halves;
    make_tensor_map_2d(&halves, to_device(numbers), 4, N, 16, N * 4, N / 2, 1, false);
    const size_t ring_bytes = 2 * N * 4 + 64, tile_bytes = 128 * 64 * 2;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaGraph_t graph;

#define KERNEL(kernel, blocks, threads, shared, ...) \
    if (is(#kernel)) return LAUNCH(kernel, blocks, threads, shared, nullptr, ##__VA_ARGS__)
    KERNEL(missing_barrier, 1, N, 0, x, y);
    KERNEL(missing_warp_barrier, 1, N, 0, x, y);
    KERNEL(blocks_race, 2, N, 0, x, y);
    KERNEL(missing_grid_barrier, 2, 32, 0, x, y);
    KERNEL(shared_overrun, 1, N, 0, x, y);
    KERNEL(dynamic_overrun, 1, N, (N - 1) * 4, x, y);
    KERNEL(global_overrun, 1, N, 0, x, y, N);
    KERNEL(misaligned, 1, N, 0, x, y);
    KERNEL(never_written, 1, N, 0, x, y);
    KERNEL(copy_not_waited_for, 1, N, 0, x, y);
    KERNEL(copy_of_other_threads, 1, N, 0, x, y);
    KERNEL(copy_left_behind, 1, N, 0, x, y);
    KERNEL(shuffle_in_a_branch, 1, N, 0, x, y);
    KERNEL(mask_without_the_caller, 1, N, 0, x, y);
    KERNEL(two_operations, 1, N, 0, x, y);
    KERNEL(barrier_in_a_branch, 1, N, 0, x, y);
    KERNEL(grid_barrier_alone, 1, N, 0, x, y);
    KERNEL(flag_of_nobody, 1, N, 0, x, y, flag);
    if (is("relaxed_flag")) return LAUNCH_COOP(relaxed_flag, 2, N, 0, nullptr, x, y, flag);
    if (is("grid_barrier_of_some_blocks")) return LAUNCH_COOP(grid_barrier_of_some_blocks, 2, N, 0, nullptr, x, y);
    if (is("passed_too_early")) return LAUNCH_CLUSTER(2, passing<Passing::too_early>, 2, 32, 128, nullptr, x, y);
    if (is("passed_and_arrived_twice")) return LAUNCH_CLUSTER(2, passing<Passing::arrived_twice>, 2, 32, 128, nullptr, x, y);
    if (is("passed_without_waiting")) return LAUNCH_CLUSTER(2, passing<Passing::not_waited_for>, 2, 32, 128, nullptr, x, y);
    if (is("cluster_without_barrier")) return LAUNCH_CLUSTER(2, cluster_without_barrier, 2, 32, 0, nullptr, x, y);
#define EARLY(kernel) return LAUNCH_EARLY(kernel, 2, N / 2, N * 4, nullptr, x, y)
    if (is("early_read")) EARLY(early<Early::read>);
    if (is("early_write")) EARLY(early<Early::write>);
    if (is("early_atomic")) EARLY(early<Early::atomic>);
    if (is("early_copy")) EARLY(early<Early::copy>);
    if (is("early_read_by_some_threads")) EARLY(early<Early::read_by_some>);
    if (is("early_return")) EARLY(early<Early::returns>);
    if (is("early_cluster_copy")) return LAUNCH_CLUSTER_EARLY(2, early<Early::copy>, 2, N / 2, N * 4, nullptr, x, y);
    if (is("early_cluster_return")) return LAUNCH_CLUSTER_EARLY(2, early<Early::returns>, 2, N / 2, N * 4, nullptr, x, y);
    if (is("early_bulk_load")) return LAUNCH_EARLY(early_bulk_load, 1, 32, N * 4 + 8, nullptr, map, y);
    if (is("flag_of_a_later_block")) {          // which a device with few multiprocessors never starts
        LAUNCH(flag_of_nobody, 1, N, 0, nullptr, x, y, flag);
        return LAUNCH(plain, 1, N, 0, nullptr, x, y);
    }
    for (float &value : result) value = 6.0f;   // what the rings should give
    KERNEL(ring<Ring::empty_not_waited_for>, 1, 96, ring_bytes, map, y, 6);
    KERNEL(ring<Ring::full_not_waited_for>, 1, 96, ring_bytes, map, y, 6);
    KERNEL(ring<Ring::never_released>, 1, 96, ring_bytes, map, y, 6);
    KERNEL(ring<Ring::released_twice>, 1, 96, ring_bytes, map, y, 6);
    KERNEL(ring<Ring::not_initialised>, 1, 96, ring_bytes, map, y, 6);
    KERNEL(ring<Ring::too_few_bytes>, 1, 96, ring_bytes, map, y, 6);
    for (float &value : result) value = 42.0f;
    // clang-format off
#define SHARED_BY_TWO(kernel) \
    if (is(#kernel)) return LAUNCH_CLUSTER(2, kernel, 2, 96, ring_bytes, nullptr, halves, y, flag, 6)
    SHARED_BY_TWO(sharing<Sharing::own_consumers_alone>);
    SHARED_BY_TWO(sharing<Sharing::never_released_there>);
    SHARED_BY_TWO(sharing<Sharing::too_few_bytes>);
    SHARED_BY_TWO(sharing<Sharing::no_first_barrier>);
    SHARED_BY_TWO(sharing<Sharing::no_last_barrier>);
    // clang-format on
    for (float &value : result) value = 16.0f;  // and the products
    KERNEL(product<Product::waited_for_late>, 1, 128, tile_bytes, y);
    KERNEL(product<Product::not_waited_for>, 1, 128, tile_bytes, y);
    KERNEL(product<Product::no_fence>, 1, 128, tile_bytes, y);
    KERNEL(product<Product::half_a_warpgroup>, 1, 64, tile_bytes, y);
    KERNEL(product<Product::read_too_early>, 1, 128, tile_bytes, y);
    KERNEL(promotion<Promotion::added_too_early>, 1, 128, tile_bytes, y);
    KERNEL(promotion<Promotion::not_begun_anew>, 1, 128, tile_bytes, y);
    KERNEL(promotion<Promotion::other_format>, 1, 128, tile_bytes, y);
    result = host_x;
    make_tensor_map_2d(&map, y, 4, N, 1, N * 4, N, 1, false);
    KERNEL(store<Store::not_waited_for>, 1, N, N * 4, map, x);
    KERNEL(store<Store::overwritten>, 1, N, N * 4, map, x);
    KERNEL(store<Store::not_fenced>, 1, N, N * 4, map, x);
    KERNEL(store<Store::fenced_by_the_storing_thread>, 1, N, N * 4, map, x);
    KERNEL(pieces<Pieces::matrices_not_fenced>, 1, 32, 2 * N * 4, map, x);
    KERNEL(pieces<Pieces::not_waited_for>, 1, 32, 2 * N * 4, map, x);
    KERNEL(pieces<Pieces::waited_for_late>, 1, 32, 2 * N * 4, map, x);

    if (is("too_many_threads")) return LAUNCH(plain, 1, 2048, 0, nullptr, x, y);
    if (is("no_blocks")) return LAUNCH(plain, 0, N, 0, nullptr, x, y);
    if (is("too_much_shared_memory")) return LAUNCH(plain, 1, N, 100000, nullptr, x, y);
    if (is("cooperative_grid_too_large")) return LAUNCH_COOP(plain, 100000, N, 0, nullptr, x, y);
    if (is("cluster_does_not_divide_the_grid")) return LAUNCH_CLUSTER(2, plain, 3, N, 0, nullptr, x, y);
    if (is("legacy_stream_while_capturing")) {
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        return LAUNCH(plain, 1, N, 0, nullptr, x, y);
    }
    if (is("malloc_while_capturing")) {
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        return cudaMalloc(&flag, 4);
    }
    if (is("synchronise_while_capturing")) {
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        LAUNCH(plain, 1, N, 0, stream, x, y);
        cudaStreamSynchronize(stream);
        return cudaStreamEndCapture(stream, &graph);
    }
    if (is("read_without_waiting")) {           // a copy on another stream than the kernel
        cudaStream_t other;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
        const cudaError_t error = LAUNCH(plain, 1, N, 0, stream, x, y);
        std::vector<float> copied(N);
        cudaMemcpyAsync(copied.data(), y, N * 4, cudaMemcpyDeviceToHost, other);
        cudaStreamSynchronize(other);
        cudaStreamSynchronize(stream);
        cudaMemcpy(y, copied.data(), N * 4, cudaMemcpyHostToDevice);
        return error;
    }
    if (is("staging_changed_too_early")) {      // pinned memory is read when the copy is done, not when it is asked for
        float *pinned;
        cudaMallocHost(&pinned, N * 4);
        memcpy(pinned, host_x.data(), N * 4);
        const cudaError_t error = cudaMemcpyAsync(y, pinned, N * 4, cudaMemcpyHostToDevice, stream);
        memset(pinned, 0xff, N * 4);
        cudaStreamSynchronize(stream);
        return error;
    }
    if (is("host_reads_device_memory")) {
        result[0] = x[0];
        return LAUNCH(plain, 1, N, 0, nullptr, x, y);
    }
    if (is("used_after_free")) {
        cudaFree(x);
        return LAUNCH(plain, 1, N, 0, nullptr, x, y);
    }
    if (is("freed_twice")) {
        cudaFree(flag);
        return cudaFree(flag);
    }
    if (is("copy_beyond_the_end")) return cudaMemcpy(y + 1, x, N * 4, cudaMemcpyDeviceToDevice);
    if (is("unaligned_tensor_map")) return make_tensor_map_2d(&map, x + 1, 4, N, 1, N * 4, N, 1, false);
    fprintf(stderr, "no such bug: %s\n", name);
    exit(2);
}

int main(int, char **argv) {
    const std::vector<float> host_x = uniform(N, 1);
    float *x = to_device(host_x), *y = on_device<float>(2 * N);
    std::vector<float> expected = host_x;
    const std::vector<float> before(2 * N, NAN);
    cudaMemcpy(y, before.data(), 2 * N * 4, cudaMemcpyHostToDevice);
    float *overrun = on_device<float>(N);       // an array of 64 exactly
    const bool exact = !strcmp(argv[1], "global_overrun") || !strcmp(argv[1], "copy_beyond_the_end");
    const cudaError_t error = bug(argv[1], host_x, x, exact ? overrun : y, expected);
    cudaDeviceSynchronize();
    const std::vector<float> found = to_host(exact ? overrun : y, N);
    int nan = 0, wrong = 0;
    for (int i = 0; i < N; i++) {
        if (std::isnan(found[i])) nan++;
        else if (found[i] != expected[i]) wrong++;
    }
    printf("%s, %d NaN, %d wrong\n", cudaGetErrorName(error), nan, wrong);
    return 0;
}
