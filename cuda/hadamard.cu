// hadamard.cu - the Hadamard transform of blocks of numbers, with random signs, in the order of additions of the CPU library.
//
// Contiguous blocks (inner 1): a lane of a warp has a number, and butterflies are shuffles.  A warp takes 32 numbers of a row:
// one block of 32, or two of 16.  Strided blocks: a thread takes 32 numbers of a column, and adjacent threads have adjacent
// columns, so loads and stores are coalesced.
#include "block.cuh"
#include "philox.cuh"
#define HADAMARD_INLINE static __host__ __device__ __forceinline__
#include "hadamard.inc"

namespace {
static constexpr int THREADS = 256, CHUNK = PYOPS_LONGEST_HADAMARD;
static_assert(CHUNK == 32, "a warp transforms a chunk");

struct Transform {
    int64_t n, inner, block, chunks;        // chunks of CHUNK numbers along n
    int32_t inverse;
    uint64_t key;
};

// The sign of the number at this position of n, as the sign bit of a float.
DEVICE uint32_t sign_of(int64_t i, const Transform &t) {
    const int at = static_cast<int>(i % t.block);
    const Words random = philox(static_cast<uint64_t>(at / 4), 0, t.key);
    const int word = at % 4;                // no dynamic index, so the words stay in registers
    return (word < 2 ? word ? random.word[1] : random.word[0] : word > 2 ? random.word[3] : random.word[2]) & 0x80000000u;
}
DEVICE float with_sign(float x, uint32_t sign) { return __uint_as_float(__float_as_uint(x) ^ sign); }

static __global__ void __launch_bounds__(THREADS) transform_rows(float *y, const float *x, Transform t, int64_t tasks) {
    const int64_t warps = int64_t(gridDim.x) * (THREADS / 32);
    for (int64_t task = blockIdx.x * int64_t(THREADS / 32) + threadIdx.x / 32; task < tasks; task += warps) {
        const int64_t i = task % t.chunks * CHUNK + lane_id(), at = task / t.chunks * t.n + i;
        const int64_t length = i < t.n ? hadamard_length(i, t.n, t.block) : 1;
        const uint32_t sign = i < t.n ? sign_of(i, t) : 0;
        float v = i < t.n ? with_sign(x[at], t.inverse ? 0 : sign) : 0.0f;
#pragma unroll
        for (int distance = 1; distance < CHUNK; distance *= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, v, distance);
            if (distance < length) v = i & distance ? __fsub_rn(other, v) : __fadd_rn(v, other);
        }
        if (i < t.n) y[at] = with_sign(__fmul_rn(v, hadamard_factor(length)), t.inverse ? sign : 0);
    }
}

static __global__ void __launch_bounds__(THREADS) transform_columns(float *y, const float *x, Transform t, int64_t tasks) {
    for (int64_t task = blockIdx.x * int64_t(THREADS) + threadIdx.x; task < tasks; task += int64_t(gridDim.x) * THREADS) {
        const int64_t j = task % t.inner, first = task / t.inner % t.chunks * CHUNK, o = task / t.inner / t.chunks;
        const int64_t from = (o * t.n + first) * t.inner + j;
        float v[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            v[i] = first + i < t.n ? x[from + i * t.inner] : 0.0f;
            if (!t.inverse && first + i < t.n) v[i] = with_sign(v[i], sign_of(first + i, t));
        }
#pragma unroll
        for (int distance = 1; distance < CHUNK; distance *= 2) {
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                if (i & distance) continue;
                if (first + i >= t.n || distance >= hadamard_length(first + i, t.n, t.block)) continue;
                const float a = v[i], b = v[i | distance];
                v[i] = __fadd_rn(a, b);
                v[i | distance] = __fsub_rn(a, b);
            }
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            if (first + i >= t.n) continue;
            const float value = __fmul_rn(v[i], hadamard_factor(hadamard_length(first + i, t.n, t.block)));
            y[from + i * t.inner] = t.inverse ? with_sign(value, sign_of(first + i, t)) : value;
        }
    }
}
}

extern "C" pyops_status pyops_hadamard(float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int64_t block,
                                       int32_t inverse, uint64_t key, void *stream) {
    const pyops_status status = check_hadamard(outer, n, inner, block);
    if (status || outer * n * inner == 0) return status;
    const Transform t = {n, inner, block, blocks_for<int64_t>(n, CHUNK), inverse, key};
    const int64_t tasks = outer * t.chunks * inner;
    const cudaError_t error = inner == 1
        ? LAUNCH(transform_rows, grid_for(tasks * 32, THREADS), THREADS, 0, stream_of(stream), y, x, t, tasks)
        : LAUNCH(transform_columns, grid_for(tasks, THREADS), THREADS, 0, stream_of(stream), y, x, t, tasks);
    return pyops_launched("hadamard", error, stream);
}
