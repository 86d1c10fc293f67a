// conformance.cu - a small kernel for each wrapper of gpu.cuh and hopper.cuh, with inputs from a test.
//
// A kernel and the emulator could share a wrong assumption about a layout.  So these kernels are a separate library, built for
// the emulator and for a GPU, and tests/cuda/conformance.py compares both results with a formula.  Every case
// takes and returns float32 numbers; conversions to bfloat16 happen here.
#include <cmath>
#include <cstring>
#include "hopper.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))
constexpr int SCRATCH = 1 << 20;                // bytes of device memory in addition to input and output

static __global__ void round_to_bf16(__nv_bfloat16 *y, const float *x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = __float2bfloat16(x[i]);
}
template <Fp8 F> static __global__ void round_to_fp8(unsigned short *y, const float *x, int n) {
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x)
        y[i] = static_cast<unsigned short>(fp8_pair<F>(x[2 * i], x[2 * i + 1]));
}

// ---- shared memory and barriers ---------------------------------------------------------------------------------
// out[i] = in[63 - i], through both kinds of shared memory; then the lanes; then differences of addresses
static __global__ void shared(const float *in, float *out) {
    SHARED(float, one, [64]);
    DYN_SHARED(float, two);
    const int t = threadIdx.x;
    one[63 - t] = in[t];
    __syncthreads();
    two[t] = one[t];
    __syncthreads();
    out[t] = two[t];
    out[64 + t] = static_cast<float>(lane_id());
    out[128 + t] = static_cast<float>(smem_u32(two + t) - smem_u32(two));
}
// warp 2 writes and does not wait; warps 0 and 1 wait for it
static __global__ void named_barriers(const float *in, float *out) {
    SHARED(float, tile, [64]);
    const int t = threadIdx.x;
    if (t >= 64) {
        for (int i = t - 64; i < 64; i += 32) tile[i] = in[i];
        named_bar_arrive(1, 96);
    } else {
        named_bar(1, 96);
        out[t] = tile[63 - t];
    }
}
// 4 blocks: each passes its part to the next
static __global__ void grid_barrier(const float *in, float *out, float *scratch) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    scratch[i] = 2.0f * in[i];
    grid_sync();
    out[i] = scratch[(i + 64) % 256];
}
// Two kernels, the second an early launch: 4 blocks double their part, late, and then each reads another one's
static __global__ void doubled_late(const float *in, float *scratch) {
    wait_for_last_kernel();                     // and let the next kernel start
    const int i = blockIdx.x * 64 + threadIdx.x;
    float x = in[i];
    for (int round = 0; round < 1000; round++) x = __shfl_xor_sync(0xffffffffu, x, 1);
    scratch[i] = 2.0f * x;
}
static __global__ void early_start(float *out, const float *scratch) {
    SHARED(int, from, [64]);
    from[threadIdx.x] = (blockIdx.x * 64 + threadIdx.x + 64) % 256;
    __syncthreads();
    wait_for_last_kernel();
    out[blockIdx.x * 64 + threadIdx.x] = scratch[from[threadIdx.x]];
}
// 4 blocks in sequence, by a flag; then all count, and the last one writes
static __global__ void flags(const float *in, float *out, float *scratch) {
    unsigned *turn = reinterpret_cast<unsigned *>(scratch), *arrived = turn + 1, *order = turn + 2;
    float *sum = scratch + 64;
    if (threadIdx.x) return;
    while (load_acquire(turn) != blockIdx.x) {}
    *sum = (blockIdx.x ? *sum : 0.0f) * 0.5f + in[blockIdx.x];
    store_release(turn, blockIdx.x + 1);
    add_release(arrived, 10);
    if (add_acquire_release(order, 1) == 3) {
        while (load_acquire(arrived) != 40) {}
        out[0] = *sum;
        out[1] = static_cast<float>(*turn);
    }
}
static __global__ void loads(const float *in, float *out) {
    const int t = threadIdx.x;
    if (t < 32) out[t] = load_once(in + t);
    else reinterpret_cast<float4 *>(out)[t - 24] = load_once(reinterpret_cast<const float4 *>(in) + t - 24);
}
static __global__ void exp2_case(const float *in, float *out) { out[threadIdx.x] = exp2_fast(in[threadIdx.x]); }

// ---- cp.async: every third copy has ok = false --------------------------------------------------------------------
static __global__ void async_copies(const float *in, float *out) {
    DYN_SHARED(float, tile);                    // 16 copies each of 4, 8 and 16 bytes, and 16 partial ones
    const int t = threadIdx.x;
    float *two = tile + 16, *four = tile + 48, *parts = tile + 112;
    cp_async4(tile + t, in + t, t % 3 != 0);
    cp_async8(two + 2 * t, in + 16 + 2 * t, t % 3 != 0);
    cp_async_commit();
    cp_async16(four + 4 * t, in + 48 + 4 * t, t % 3 != 0);
    cp_async_commit();
    cp_async16_part(parts + 4 * t, in + 112 + 4 * t, t % 5 * 4);
    cp_async_commit();
    cp_async_wait<2>();
    out[t] = tile[t];
    out[16 + 2 * t] = two[2 * t];
    out[17 + 2 * t] = two[2 * t + 1];
    cp_async_wait<0>();
    for (int i = 0; i < 4; i++) {
        out[48 + 4 * t + i] = four[4 * t + i];
        out[112 + 4 * t + i] = parts[4 * t + i];
    }
}

// ---- products of a warp -------------------------------------------------------------------------------------------
static __global__ void tf32_bits(const float *in, float *out) { out[threadIdx.x] = __uint_as_float(to_tf32(in[threadIdx.x])); }

// in: a (16 x 8), b (8 x 8), d (16 x 8)
template <bool ROUNDED> static __global__ void mma_tf32_case(const float *in, float *out) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    auto bits = [](float x) { return ROUNDED ? to_tf32(x) : __float_as_uint(x); };
    const float *a = in, *b = a + 128, *c = b + 64;
    unsigned x[4], y[2];
    float d[4];
    for (int i = 0; i < 4; i++) x[i] = bits(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (int i = 0; i < 2; i++) y[i] = bits(b[(t + 4 * i) * 8 + g]);
    for (int i = 0; i < 4; i++) d[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_tf32(d, x, y);
    for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
DEVICE unsigned bf16_bits(float x) { return __bfloat16_as_ushort(__float2bfloat16(x)); }
DEVICE unsigned pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
// in: a (16 x 16), b (16 x 8), d (16 x 8)
static __global__ void mma_bf16_case(const float *in, float *out) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const float *a = in, *b = a + 256, *c = b + 128;
    unsigned x[4], y[2];
    float d[4];
    for (int i = 0; i < 4; i++) {
        const float *from = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        x[i] = pair(from[0], from[1]);
    }
    for (int i = 0; i < 2; i++) y[i] = pair(b[(2 * t + 8 * i) * 8 + g], b[(2 * t + 8 * i + 1) * 8 + g]);
    for (int i = 0; i < 4; i++) d[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    mma_bf16(d, x, y);
    for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// The codes of pairs of numbers, NaN for every code of NaN
template <Fp8 F> static __global__ void fp8_codes(const float *in, float *out) {
    const unsigned codes = fp8_pair<F>(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
    for (int i = 0; i < 2; i++) {
        const unsigned code = codes >> 8 * i & 0xff;
        out[2 * threadIdx.x + i] = (code & 0x7f) > (F == Fp8::e4m3 ? 0x7e : 0x7c) ? NAN : static_cast<float>(code);
    }
}

// in: COUNT matrices of 8 x 8; out: two elements per lane and matrix
template <int COUNT, bool TRANS> static __global__ void ldmatrix_case(const float *in, float *out) {
    DYN_SHARED(__nv_bfloat16, tile);
    const int lane = threadIdx.x;
    for (int i = lane; i < COUNT * 64; i += 32) tile[i] = __float2bfloat16(in[i]);
    __syncwarp();
    unsigned r[COUNT];
    const __nv_bfloat16 *row = tile + lane % (COUNT * 8) * 8;
    if constexpr (COUNT == 1 && !TRANS) ldmatrix_x1(r, row);
    if constexpr (COUNT == 2 && !TRANS) ldmatrix_x2(r, row);
    if constexpr (COUNT == 4 && !TRANS) ldmatrix_x4(r, row);
    if constexpr (COUNT == 1 && TRANS) ldmatrix_x1_trans(r, row);
    if constexpr (COUNT == 2 && TRANS) ldmatrix_x2_trans(r, row);
    if constexpr (COUNT == 4 && TRANS) ldmatrix_x4_trans(r, row);
    for (int m = 0; m < COUNT; m++) {
        out[(m * 32 + lane) * 2] = __uint_as_float(r[m] << 16);
        out[(m * 32 + lane) * 2 + 1] = __uint_as_float(r[m] & 0xffff0000u);
    }
}
// the inverse
template <int COUNT, bool TRANS> static __global__ void stmatrix_case(const float *in, float *out) {
    DYN_SHARED(__nv_bfloat16, tile);
    const int lane = threadIdx.x;
    unsigned r[COUNT];
    for (int m = 0; m < COUNT; m++) r[m] = pair(in[(m * 32 + lane) * 2], in[(m * 32 + lane) * 2 + 1]);
    __nv_bfloat16 *row = tile + lane % (COUNT * 8) * 8;
    if constexpr (COUNT == 2) stmatrix_x2(row, r);
    if constexpr (COUNT == 4 && !TRANS) stmatrix_x4(row, r);
    if constexpr (COUNT == 4 && TRANS) stmatrix_x4_trans(row, r);
    __syncwarp();
    for (int i = lane; i < COUNT * 64; i += 32) out[i] = __bfloat162float(tile[i]);
}

// ---- bulk copies --------------------------------------------------------------------------------------------------
// Boxes of a matrix of 20 x 39 floats, rows 48 floats apart, at any position; out: the bytes in shared memory.
constexpr int ROWS = 20, COLUMNS = 39, STRIDE = 48, BOX = 32, BOX_ROWS = 16;
static __global__ void bulk_loads(const __grid_constant__ CUtensorMap map, float *out) {
    DYN_SHARED(float, tile);
    uint64_t *arrived = reinterpret_cast<uint64_t *>(tile + 2 * BOX * BOX_ROWS);
    const int t = threadIdx.x;
    if (t == 0) {
        tma_prefetch(&map);
        mbar_init(arrived, 1);
        mbar_fence_init();
    }
    __syncthreads();
    for (int phase = 0; phase < 2; phase++) {   // inside and beyond the end; then before the beginning
        if (t == 0) {
            mbar_expect(arrived, 2 * BOX * BOX_ROWS * 4);
            tma_load_2d(tile, &map, phase ? -7 : 3, phase ? -4 : 2, arrived);
            tma_load_2d(tile + BOX * BOX_ROWS, &map, phase ? -100 : 16, phase ? 0 : 12, arrived);
        }
        if (phase)
            while (!mbar_test(arrived, phase)) {}
        else mbar_wait(arrived, phase);
        for (int i = t; i < 2 * BOX * BOX_ROWS; i += blockDim.x) out[phase * 2 * BOX * BOX_ROWS + i] = tile[i];
        __syncthreads();
    }
}
// out: the matrix after a store of one box inside it and one beyond its end
static __global__ void bulk_stores(const __grid_constant__ CUtensorMap map, const float *in) {
    DYN_SHARED(float, tile);
    for (int i = threadIdx.x; i < 2 * BOX * BOX_ROWS; i += blockDim.x) tile[i] = in[i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store_2d(&map, 0, 0, tile);
        tma_store_commit();
        tma_store_wait<0>();
        tma_store_2d(&map, 23, 12, tile + BOX * BOX_ROWS);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}
// A warp stores 16 x 192 numbers, in boxes of 128 bytes per row, from two places in turn, to a matrix of 20 x 150, from row 8.
constexpr int PIECE_COLUMNS = 192, TO_ROWS = 20, TO_COLUMNS = 150, TO_STRIDE = 152;
template <class T> static __global__ void pieces(const __grid_constant__ CUtensorMap map, const float *in) {
    DYN_SHARED(char, places);
    const int lane = threadIdx.x;
    constexpr int COLUMNS = 128 / sizeof(T);
    for (int first = 0; first < PIECE_COLUMNS; first += COLUMNS) {
        char *const piece = places + first / COLUMNS % 2 * 2048;
        if (lane == 0) tma_store_wait_read<1>();
        __syncwarp();
        for (int i = 0; i < 8; i += 2) {
            if constexpr (sizeof(T) == 4) {
                for (int j = i; j < i + 2; j++) {               // two rows of 16 pairs
                    const int row = 2 * j + lane / 16, pair = lane % 16;
                    const float *const x = in + row * PIECE_COLUMNS + first + 2 * pair;
                    char *const to = piece + row * 128 + ((pair / 2) ^ (row % 8)) * 16 + pair % 2 * 8;
                    write_for_copy(reinterpret_cast<float2 *>(to), make_float2(x[0], x[1]));
                }
            } else {                                            // two groups of 8 columns of 16 rows
                unsigned r[4];
                for (int j = 0; j < 4; j++) {
                    const float *const x = in + (lane / 4 + j % 2 * 8) * PIECE_COLUMNS + first + (i + j / 2) * 8 +
                        2 * (lane % 4);
                    r[j] = pair(x[0], x[1]);
                }
                stmatrix_x4(piece + lane % 16 * 128 + ((i + lane / 16) ^ (lane % 8)) * 16, r);
            }
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(&map, first, 8, piece);
            tma_store_commit();
        }
    }
    if (lane == 0) tma_store_wait_read<0>();
}
DEVICE float wide(float x) { return x; }
DEVICE float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T> DEVICE T narrow(float x) {
    if constexpr (sizeof(T) == 4) return x;
    else return __float2bfloat16(x);
}
template <class T> static __global__ void widen(float *out, const T *from, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = wide(from[i]);
}
template <class T> static cudaError_t run_pieces(const float *in, float *out, float *scratch) {
    CUtensorMap map;
    const int size = sizeof(T);
    cudaError_t error = make_tensor_map_2d(&map, scratch, size, TO_COLUMNS, TO_ROWS, TO_STRIDE * size, 128 / size, 16, true);
    if (!error) error = cudaMemset(scratch, 0, TO_ROWS * TO_STRIDE * size);
    if (!error) error = LAUNCH(pieces<T>, 1, 32, 2 * 2048, nullptr, map, in);
    return error ? error : LAUNCH(widen<T>, 1, 64, 0, nullptr, out, reinterpret_cast<const T *>(scratch), TO_ROWS * TO_STRIDE);
}
static __global__ void clear(float *out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = 0.0f;
}
// mbar_arrive: the last of 64 threads ends each phase, and then each sees the writes of the others
static __global__ void arrivals(const float *in, float *out) {
    DYN_SHARED(float, tile);
    uint64_t *all = reinterpret_cast<uint64_t *>(tile + 64);
    const int t = threadIdx.x;
    if (t == 0) {
        mbar_init(all, 64);
        mbar_fence_init();
    }
    __syncthreads();
    float value = in[t];
    for (int phase = 0; phase < 6; phase += 2) {
        tile[t] = value;
        mbar_arrive(all);
        mbar_wait(all, 0);
        value = tile[(t + 7) % 64];
        mbar_arrive(all);
        mbar_wait(all, 1);
    }
    out[t] = value;
}

// ---- wgmma: d (64 x N) = a (64 x K) * b (K x N), where a row of K is 128 bytes ---------------------------------------
// Bulk copies with the swizzle load the operands.  Plain: a as 64 rows of K, b as N rows of K.  Transposed: as K rows of 64 or
// N, in boxes of width 64.  The first product has !accumulate and a d full of ones, the second accumulates: so d = 2 a b.
// clang-format off
enum class Form {
    bf16, bf16_trans_a, bf16_trans_b, bf16_trans_both, bf16_ra, bf16_ra_trans_b, tf32, tf32_ra,
    e4m3, e5m2, e4m3_e5m2, e5m2_e4m3, e4m3_ra, e5m2_ra, e4m3_e5m2_ra, e5m2_e4m3_ra
};
// clang-format on
template <Form F> struct Operands {
    static constexpr bool TF32 = F == Form::tf32 || F == Form::tf32_ra, FP8 = F >= Form::e4m3;
    static constexpr Fp8 A = F == Form::e4m3 || F == Form::e4m3_ra || F == Form::e4m3_e5m2 || F == Form::e4m3_e5m2_ra
        ? Fp8::e4m3
        : Fp8::e5m2;
    static constexpr Fp8 B = F == Form::e4m3 || F == Form::e4m3_ra || F == Form::e5m2_e4m3 || F == Form::e5m2_e4m3_ra
        ? Fp8::e4m3
        : Fp8::e5m2;
    static constexpr bool TRANS_A = F == Form::bf16_trans_a || F == Form::bf16_trans_both;
    static constexpr bool TRANS_B = F == Form::bf16_trans_b || F == Form::bf16_trans_both || F == Form::bf16_ra_trans_b;
    static constexpr bool REGISTERS = F == Form::bf16_ra || F == Form::tf32_ra || F == Form::bf16_ra_trans_b ||
        F >= Form::e4m3_ra;
    static constexpr int SIZE = TF32 ? 4 : FP8 ? 1 : 2, DEPTH = 128 / SIZE;
};

template <int N, Form FORM>
static __global__ void __launch_bounds__(128, 1)
    wgmma_case(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float *out) {
    constexpr bool TRANS_A = Operands<FORM>::TRANS_A, TRANS_B = Operands<FORM>::TRANS_B, REGISTERS = Operands<FORM>::REGISTERS;
    constexpr int A_BYTES = 64 * 128, B_BYTES = (N < 64 && TRANS_B ? 64 : N) * 128;
    DYN_SHARED(char, a_tile);
    char *b_tile = a_tile + A_BYTES;
    uint64_t *arrived = reinterpret_cast<uint64_t *>(b_tile + B_BYTES);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, g = lane / 4, q = lane % 4;
    if (t == 0) {
        mbar_init(arrived, 1);
        mbar_fence_init();
    }
    __syncthreads();
    if (t == 0) {
        mbar_expect(arrived, A_BYTES + B_BYTES);
        tma_load_2d(a_tile, &a_map, 0, 0, arrived);
        if (TRANS_B)
            for (int n = 0; n < N; n += 64) tma_load_2d(b_tile + n * 128, &b_map, n, 0, arrived);
        else tma_load_2d(b_tile, &b_map, 0, 0, arrived);
    }
    mbar_wait(arrived, 0);

    const uint64_t a = TRANS_A ? wg_desc_trans(a_tile, 64 * 128) : wg_desc(a_tile);
    const uint64_t b = TRANS_B ? wg_desc_trans(b_tile, 64 * 128) : wg_desc(b_tile);
    const int a_step = TRANS_A ? 128 : 2, b_step = TRANS_B ? 128 : 2;
    // fragments of a, by hand, from the plain layout: byte k of row r is in piece (k / 16) ^ (r % 8)
    auto fragment = [&](int step, int i) {
        const int r = warp * 16 + g + i % 2 * 8, k = step * 32 + i / 2 * 16 + q * 4;
        return *reinterpret_cast<const unsigned *>(a_tile + r * 128 + ((k / 16) ^ (r % 8)) * 16 + k % 16);
    };
    unsigned fragments[4][4];
    if (REGISTERS)
        for (int step = 0; step < 4; step++)
            for (int i = 0; i < 4; i++) fragments[step][i] = fragment(step, i);
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) d[i] = 1.0f;
    for (int round = 0; round < 2; round++) {
        wg_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const bool accumulate = round || step;
            const uint64_t x = a + a_step * step, y = b + b_step * step;
            if constexpr (FORM == Form::tf32) wgmma_tf32<N>(d, x, y, accumulate);
            else if constexpr (FORM == Form::tf32_ra) wgmma_tf32_ra<N>(d, fragments[step], y, accumulate);
            else if constexpr (Operands<FORM>::FP8 && REGISTERS)
                wgmma_fp8_ra<N, Operands<FORM>::A, Operands<FORM>::B>(d, fragments[step], y, accumulate);
            else if constexpr (Operands<FORM>::FP8) wgmma_fp8<N, Operands<FORM>::A, Operands<FORM>::B>(d, x, y, accumulate);
            else if constexpr (REGISTERS) wgmma_bf16_ra<N, TRANS_B>(d, fragments[step], y, accumulate);
            else wgmma_bf16<N, TRANS_A, TRANS_B>(d, x, y, accumulate);
        }
        wg_commit();
    }
    wg_wait<0>();
    wg_finished(d);
    for (int i = 0; i < N / 2; i++) out[(warp * 16 + g + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * q + i % 2] = d[i];
}
// in: a as stored, then b as stored
template <int N, Form FORM> static cudaError_t run_wgmma(const float *in, float *out, float *scratch) {
    constexpr bool TRANS_B = Operands<FORM>::TRANS_B;
    constexpr int K = Operands<FORM>::DEPTH, SIZE = Operands<FORM>::SIZE;
    const void *a = in, *b = in + 64 * K;
    cudaError_t error = cudaSuccess;
    if (SIZE == 2) {
        auto *rounded = reinterpret_cast<__nv_bfloat16 *>(scratch);
        error = LAUNCH(round_to_bf16, 1, 256, 0, nullptr, rounded, in, (64 + N) * K);
        a = rounded;
        b = rounded + 64 * K;
    }
    if (SIZE == 1) {
        auto *codes = reinterpret_cast<unsigned short *>(scratch);
        error = LAUNCH(round_to_fp8<Operands<FORM>::A>, 1, 256, 0, nullptr, codes, in, 64 * K);
        if (!error) error = LAUNCH(round_to_fp8<Operands<FORM>::B>, 1, 256, 0, nullptr, codes + 32 * K, in + 64 * K, N * K);
        a = codes;
        b = codes + 32 * K;
    }
    CUtensorMap a_map, b_map;
    if (!error) error = make_tensor_map_2d(&a_map, a, SIZE, K, 64, K * SIZE, 128 / SIZE, 64, true);   // both layouts: 64 x 64
    if (!error)
        error = TRANS_B ? make_tensor_map_2d(&b_map, b, SIZE, N, K, N * SIZE, 64, K, true)
                        : make_tensor_map_2d(&b_map, b, SIZE, K, N, K * SIZE, 128 / SIZE, N, true);
    const int bytes = (64 + (N < 64 ? 64 : N)) * 128 + 64;
    if (!error) error = cudaFuncSetAttribute(wgmma_case<N, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return error ? error : LAUNCH((wgmma_case<N, FORM>), 1, 128, bytes, nullptr, a_map, b_map, out);
}

// Operands that threads wrote: a (64 x 64) by ordinary stores, b (64 rows of 64) by cp.async, by one warpgroup for another; the
// second slot of a ring.  out: a b', then a b
static __global__ void __launch_bounds__(256, 1) wgmma_written(const float *in, const __nv_bfloat16 *b_in, float *out) {
    constexpr int TILE = 64 * 128;
    DYN_SHARED(char, ring);
    uint64_t *const full = reinterpret_cast<uint64_t *>(ring + 4 * TILE);
    const int t = threadIdx.x % 128, lane = t % 32, warp = t / 32;
    Turn<2> turn;
    turn.next();
    char *const a_tile = ring + turn.slot * 2 * TILE, *const b_tile = a_tile + TILE;
    if (threadIdx.x == 0) {
        mbar_init(full, 4);
        mbar_fence_init();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        for (int i = t; i < 64 * 8; i += 128) {
            const int place = i / 8 * 128 + (i % 8 ^ (i / 8 % 8)) * 16;         // piece i % 8 of row i / 8
            cp_async16(b_tile + place, b_in + 8 * i);
            for (int k = 0; k < 8; k++) reinterpret_cast<__nv_bfloat16 *>(a_tile + place)[k] = __float2bfloat16(in[8 * i + k]);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbar_arrive(full);
        return;
    }
    mbar_wait(full, turn.round);
    float d[2][32];
    const uint64_t a = wg_desc(a_tile), rows = wg_desc(b_tile), transposed = wg_desc_trans(b_tile, TILE);
    wg_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma_bf16<64>(d[0], a + 2 * k, rows + 2 * k, k > 0);
        wgmma_bf16<64, false, true>(d[1], a + 2 * k, transposed + 128 * k, k > 0);
    }
    wg_commit();
    wg_wait<0>();
    wg_finished(d[0]);
    wg_finished(d[1]);
#pragma unroll
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 32; i++)
            out[n * 4096 + (warp * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[n][i];
}
static cudaError_t run_wgmma_written(const float *in, float *out, float *scratch) {
    auto *const b = reinterpret_cast<__nv_bfloat16 *>(scratch);
    constexpr int BYTES = 4 * 64 * 128 + 8;
    cudaError_t error = LAUNCH(round_to_bf16, 1, 256, 0, nullptr, b, in + 4096, 4096);
    if (!error) error = cudaFuncSetAttribute(wgmma_written, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    return error ? error : LAUNCH(wgmma_written, 1, 256, BYTES, nullptr, in, b, out);
}

// ---- registers and clusters ---------------------------------------------------------------------------------------
static __global__ void __launch_bounds__(256, 1) registers(const float *in, float *out) {
    if (threadIdx.x < 128) {
        reg_dealloc<24>();
        out[threadIdx.x] = in[threadIdx.x] + 1.0f;
    } else {
        reg_alloc<200>();
        out[threadIdx.x] = in[threadIdx.x] * 2.0f;
    }
}
static __global__ void clusters(const float *in, float *out) {          // 8 blocks in clusters of 4
    SHARED(float, mine, [32]);
    const int t = threadIdx.x, i = blockIdx.x * 32 + t;
    mine[t] = in[i];
    cluster_sync();
    float sum = 0.0f;
    for (int rank = 0; rank < cluster_size(); rank++) sum = 2.0f * sum + map_shared(mine, rank)[t];
    cluster_sync();
    out[i] = sum + 1000.0f * static_cast<float>(cluster_rank());
}

// Twice: each of 4 blocks stores to every block's half of `slots`, and reads them after the barrier.  A block may store for the
// second time while another one still reads what it stored first.
template <class T> static __global__ void cluster_stores(const float *in, float *out) { // 8 blocks in clusters of 4
    DYN_SHARED(T, slots);                                               // [2][4][32]
    const int t = threadIdx.x, i = blockIdx.x * 32 + t, rank = cluster_rank();
    cluster_sync();
    float value = in[i];
    for (int half = 0; half < 2; half++) {
        T *const mine = slots + half * 128 + rank * 32 + t;
        for (int to = 0; to < 4; to++) store_shared(mine, to, narrow<T>(value + static_cast<float>(to)));
        cluster_arrive();
        out[i] = static_cast<float>(rank);                              // work between the halves of the barrier
        cluster_wait();
        value = 0.0f;
        for (int from = 0; from < 4; from++) value = 2.0f * value + wide(slots[half * 128 + from * 32 + (t + 1) % 32]);
    }
    out[i] += value;
}

// An early launch after doubled_late: two clusters of two blocks, each of which reads the other one's part
static __global__ void early_cluster(float *out, const float *scratch) {
    SHARED(float, mine, [64]);
    const int t = threadIdx.x, i = blockIdx.x * 64 + t;
    cluster_sync();
    wait_for_last_kernel();
    mine[t] = scratch[i];
    cluster_sync();
    out[i] = map_shared(mine, cluster_rank() ^ 1)[t];
    cluster_sync();
}

// Each of 4 blocks loads a row to slot `rank` of all four blocks, and after they have read it, another row to that slot of
// itself and of the next block.  The other two keep the first row.
static __global__ void multicast(const __grid_constant__ CUtensorMap map, float *out) { // 8 blocks in clusters of 4
    DYN_SHARED(float, slots);                                                           // [4][32]
    uint64_t *const full = reinterpret_cast<uint64_t *>(slots + 4 * 32), *const empty = full + 1;
    const int t = threadIdx.x, rank = cluster_rank();
    if (t == 0) {
        mbar_init(full, 1);
        mbar_init(empty, 4 * 32);
        mbar_fence_init();
    }
    cluster_sync();
    for (int round = 0; round < 2; round++) {
        if (t == 0) {
            mbar_wait(empty, round ^ 1);
            mbar_expect(full, (round ? 2 : 4) * 128);
            const unsigned ranks = round ? 1u << rank | 1u << (rank + 1) % 4 : 15;
            tma_load_2d_to_all(slots + rank * 32, &map, 0, 2 * static_cast<int>(blockIdx.x) + round, full, ranks);
        }
        mbar_wait(full, round);
        for (int from = 0; from < 4; from++) out[((blockIdx.x * 2 + round) * 4 + from) * 32 + t] = slots[from * 32 + t];
        for (int to = 0; to < 4; to++) mbar_arrive_at(empty, to);
    }
    cluster_sync();
}
static cudaError_t run_multicast(const float *in, float *out, float *) {
    CUtensorMap map;
    const cudaError_t error = make_tensor_map_2d(&map, in, 4, 32, 16, 128, 32, 1, false);
    return error ? error : LAUNCH_CLUSTER(4, multicast, 8, 32, 4 * 128 + 16, nullptr, map, out);
}

// ---- the cases ----------------------------------------------------------------------------------------------------
struct Case {
    const char *name;
    int inputs, outputs, capability;            // number of floats; 80 or 90
    cudaError_t (*run)(const float *in, float *out, float *scratch);
};
#define RUN(...) \
    [](const float *in, float *out, float *scratch) -> cudaError_t { \
        (void)in, (void)out, (void)scratch; \
        __VA_ARGS__ \
    }
#define ONE_BLOCK(kernel, threads, shared) RUN(return LAUNCH(kernel, 1, threads, shared, nullptr, in, out);)
#define WGMMA(n, form) {"wgmma_" #form "_" #n, (64 + n) * Operands<Form::form>::DEPTH, 64 * n, 90, run_wgmma<n, Form::form>}

static const Case cases[] = {
    {"shared", 64, 192, 80, ONE_BLOCK(shared, 64, 256)},
    {"named_barriers", 64, 64, 80, ONE_BLOCK(named_barriers, 96, 0)},
    {"grid_barrier", 256, 256, 80, RUN(return LAUNCH_COOP(grid_barrier, 4, 64, 0, nullptr, in, out, scratch);)},
    {"early_start", 256, 256, 90,
     RUN(cudaError_t error = LAUNCH(doubled_late, 4, 64, 0, nullptr, in, scratch);
         return error ? error : LAUNCH_EARLY(early_start, 4, 64, 0, nullptr, out, scratch);)},
    {"early_cluster", 256, 256, 90,
     RUN(cudaError_t error = LAUNCH(doubled_late, 4, 64, 0, nullptr, in, scratch);
         return error ? error : LAUNCH_CLUSTER_EARLY(2, early_cluster, 4, 64, 0, nullptr, out, scratch);)},
    {"flags", 4, 2, 80, RUN(cudaMemset(scratch, 0, 256); return LAUNCH_COOP(flags, 4, 32, 0, nullptr, in, out, scratch);)},
    {"loads", 160, 160, 80, ONE_BLOCK(loads, 64, 0)},
    {"exp2", 256, 256, 80, ONE_BLOCK(exp2_case, 256, 0)},
    {"async_copies", 176, 176, 80, ONE_BLOCK(async_copies, 16, 176 * 4)},
    {"tf32_bits", 256, 256, 80, ONE_BLOCK(tf32_bits, 256, 0)},
    {"mma_tf32", 320, 128, 80, ONE_BLOCK(mma_tf32_case<true>, 32, 0)},
    {"mma_tf32_unrounded", 320, 128, 80, ONE_BLOCK(mma_tf32_case<false>, 32, 0)},
    {"mma_bf16", 512, 128, 80, ONE_BLOCK(mma_bf16_case, 32, 0)},
    {"ldmatrix_1", 64, 64, 80, ONE_BLOCK((ldmatrix_case<1, false>), 32, 128)},
    {"ldmatrix_2", 128, 128, 80, ONE_BLOCK((ldmatrix_case<2, false>), 32, 256)},
    {"ldmatrix_4", 256, 256, 80, ONE_BLOCK((ldmatrix_case<4, false>), 32, 512)},
    {"ldmatrix_trans_1", 64, 64, 80, ONE_BLOCK((ldmatrix_case<1, true>), 32, 128)},
    {"ldmatrix_trans_2", 128, 128, 80, ONE_BLOCK((ldmatrix_case<2, true>), 32, 256)},
    {"ldmatrix_trans_4", 256, 256, 80, ONE_BLOCK((ldmatrix_case<4, true>), 32, 512)},
    {"stmatrix_2", 128, 128, 90, ONE_BLOCK((stmatrix_case<2, false>), 32, 256)},
    {"stmatrix_4", 256, 256, 90, ONE_BLOCK((stmatrix_case<4, false>), 32, 512)},
    {"stmatrix_trans_4", 256, 256, 90, ONE_BLOCK((stmatrix_case<4, true>), 32, 512)},
    {"arrivals", 64, 64, 90, ONE_BLOCK(arrivals, 64, 64 * 4 + 8)},
#define LOADS(swizzle) \
    RUN(CUtensorMap map; \
        const cudaError_t error = make_tensor_map_2d(&map, in, 4, COLUMNS, ROWS, STRIDE * 4, BOX, BOX_ROWS, swizzle); \
        return error ? error : LAUNCH(bulk_loads, 1, 64, 2 * BOX * BOX_ROWS * 4 + 8, nullptr, map, out);)
    {"bulk_loads", ROWS * STRIDE, 4 * BOX * BOX_ROWS, 90, LOADS(false)},
    {"bulk_loads_swizzled", ROWS * STRIDE, 4 * BOX * BOX_ROWS, 90, LOADS(true)},
#define STORES(swizzle) \
    RUN(CUtensorMap map; \
        cudaError_t error = make_tensor_map_2d(&map, out, 4, COLUMNS, ROWS, STRIDE * 4, BOX, BOX_ROWS, swizzle); \
        if (!error) error = LAUNCH(clear, 1, 64, 0, nullptr, out, ROWS * STRIDE); \
        return error ? error : LAUNCH(bulk_stores, 1, 64, 2 * BOX * BOX_ROWS * 4, nullptr, map, in);)
    {"bulk_stores", 2 * BOX * BOX_ROWS, ROWS * STRIDE, 90, STORES(false)},
    {"bulk_stores_swizzled", 2 * BOX * BOX_ROWS, ROWS * STRIDE, 90, STORES(true)},
    {"pieces_float", 16 * PIECE_COLUMNS, TO_ROWS * TO_STRIDE, 90, run_pieces<float>},
    {"pieces_bf16", 16 * PIECE_COLUMNS, TO_ROWS * TO_STRIDE, 90, run_pieces<__nv_bfloat16>},
    WGMMA(32, bf16),
    WGMMA(64, bf16),
    WGMMA(128, bf16),
    WGMMA(192, bf16),
    WGMMA(256, bf16),
    WGMMA(64, bf16_trans_a),
    WGMMA(64, bf16_trans_b),
    WGMMA(256, bf16_trans_b),
    WGMMA(128, bf16_trans_both),
    WGMMA(64, bf16_ra),
    WGMMA(32, bf16_ra_trans_b),
    WGMMA(64, bf16_ra_trans_b),
    WGMMA(128, bf16_ra_trans_b),
    {"written_operands_mma", 8192, 8192, 90, run_wgmma_written},
    WGMMA(32, tf32),
    WGMMA(64, tf32),
    WGMMA(128, tf32),
    WGMMA(256, tf32),
    WGMMA(64, tf32_ra),
    {"fp8_codes_e4m3", 512, 512, 90, ONE_BLOCK(fp8_codes<Fp8::e4m3>, 256, 0)},
    {"fp8_codes_e5m2", 512, 512, 90, ONE_BLOCK(fp8_codes<Fp8::e5m2>, 256, 0)},
    WGMMA(32, e4m3),
    WGMMA(64, e4m3),
    WGMMA(128, e4m3),
    WGMMA(192, e4m3),
    WGMMA(256, e4m3),
    WGMMA(64, e5m2),
    WGMMA(128, e4m3_e5m2),
    WGMMA(128, e5m2_e4m3),
    WGMMA(64, e4m3_ra),
    WGMMA(64, e5m2_ra),
    WGMMA(32, e4m3_e5m2_ra),
    WGMMA(32, e5m2_e4m3_ra),
    {"registers", 256, 256, 90, ONE_BLOCK(registers, 256, 0)},
    {"cluster_stores", 256, 256, 90, RUN(return LAUNCH_CLUSTER(4, cluster_stores<float>, 8, 32, 1024, nullptr, in, out);)},
    {"cluster_stores_bf16", 256, 256, 90,
     RUN(return LAUNCH_CLUSTER(4, cluster_stores<__nv_bfloat16>, 8, 32, 512, nullptr, in, out);)},
    {"multicast", 512, 2048, 90, run_multicast},
    {"clusters", 256, 256, 90, RUN(return LAUNCH_CLUSTER(4, clusters, 8, 32, 0, nullptr, in, out);)},
};

EXPORT int conformance_capability() {           // compute capability of the device: 90 for 9.0
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    return 10 * major + minor;
}
EXPORT int conformance_emulated() { return EITHER(0, 1); }
EXPORT int conformance_count() { return sizeof cases / sizeof *cases; }
EXPORT const char *conformance_case(int i, int *inputs, int *outputs, int *capability) {
    *inputs = cases[i].inputs;
    *outputs = cases[i].outputs;
    *capability = cases[i].capability;
    return cases[i].name;
}
// Return the text of an error, or NULL.
EXPORT const char *conformance_run(int i, const float *host_in, float *host_out) {
    const size_t in_bytes = cases[i].inputs * sizeof(float), out_bytes = cases[i].outputs * sizeof(float);
    float *in = nullptr, *out = nullptr, *scratch = nullptr;
    cudaError_t error = cudaMalloc(&in, in_bytes);
    if (!error) error = cudaMalloc(&out, out_bytes);
    if (!error) error = cudaMalloc(&scratch, SCRATCH);
    if (!error) error = cudaMemcpy(in, host_in, in_bytes, cudaMemcpyHostToDevice);
    if (!error) error = cases[i].run(in, out, scratch);
    if (!error) error = cudaDeviceSynchronize();
    if (!error) error = cudaMemcpy(host_out, out, out_bytes, cudaMemcpyDeviceToHost);
    cudaFree(in);
    cudaFree(out);
    cudaFree(scratch);
    return error ? cudaGetErrorString(error) : nullptr;
}
