// formats.cu - round numbers to narrow formats, individually or in blocks with a shared scale, with the arithmetic of the CPU
// library.
//
// Individual numbers: a thread takes the four adjacent numbers of one random counter.  Contiguous blocks: as many lanes of a
// warp as the block has numbers, or float4s, find its maximum by shuffles:
//
//     block of 32   [ lane 0 | lane 1 | .. | lane 7 ][ next 8 lanes: the next block ] ..      4 blocks to a warp
//
// Strided blocks (inner > 1): a thread block takes 32 adjacent columns, eight rows at a time:
//
//     inner ->     lane 0 .. 31
//     n         warp 0   row 0, 8, 16, ..     the maximum of a column: the warps combine theirs in shared memory
//               warp 1   row 1, 9, 17, ..
#include "amax.cuh"
#include "block.cuh"
#include "index.cuh"
#include "philox.cuh"
#include "reduce.cuh"
#define FORMAT_INLINE static __host__ __device__ __forceinline__
#include "number_format.inc"

namespace {
static constexpr int THREADS = 256, COLUMNS = 32, WARPS = THREADS / COLUMNS;

struct How {
    number_format f;
    const float *factor;
    const int64_t *step;            // nullptr unless rounding is stochastic
    uint64_t key;
    int32_t rounding, saturate, rule, shift, flush;
};

// The destination of a rounded number and of the scale of a block.
struct ToNumbers {
    float *y;
    __device__ void number(int64_t i, rounded r, int32_t scale, const How &how) const {
        const float value = value_of(r, scale);
        y[i] = how.factor ? __fdiv_rn(value, how.factor[0]) : value;
    }
    __device__ void scale(int64_t, int32_t) const {}
};
struct ToCodes {
    uint16_t *codes;
    uint8_t *scales;
    __device__ void number(int64_t i, rounded r, int32_t, const How &how) const {
        codes[i] = static_cast<uint16_t>(code_of(r, how.f));
    }
    __device__ void scale(int64_t line, int32_t code) const {
        scales[line] = static_cast<uint8_t>(code == SCALE_DEAD ? 0 : code);
    }
};

// The number to round: x times the factor.
DEVICE float given(float x, const How &how) { return how.factor ? __fmul_rn(x, how.factor[0]) : x; }

template <class Out>
DEVICE void round_at(const Out &out, int64_t i, float x, int32_t scale, uint32_t word, const How &how) {
    out.number(i, round_number(given(x, how), scale, word, how.f, how.rounding, how.saturate), scale, how);
}
// The random word of one number.
DEVICE uint32_t word_of(int64_t i, const How &how) {
    if (!how.step) return 0;
    const Words random = philox(static_cast<uint64_t>(i / 4), static_cast<uint64_t>(how.step[0]), how.key);
    const int word = static_cast<int>(i % 4);          // no dynamic index, so the words stay in registers
    return word < 2 ? word ? random.word[1] : random.word[0] : word > 2 ? random.word[3] : random.word[2];
}

template <class Out>
static __global__ void __launch_bounds__(THREADS) round_numbers(Out out, const float *x, int64_t n, How how, bool whole) {
    for (int64_t group = blockIdx.x * int64_t(THREADS) + threadIdx.x; 4 * group < n; group += int64_t(gridDim.x) * THREADS) {
        const int64_t first = 4 * group;
        const Words random = how.step ? philox(static_cast<uint64_t>(group), static_cast<uint64_t>(how.step[0]), how.key)
                                      : Words{};
        const int some = n - first < 4 ? static_cast<int>(n - first) : 4;
        Pack<float, 4> in = {};
        if (whole && some == 4) in = load_pack<4>(x + first);
        else
            for (int j = 0; j < some; j++) in.at[j] = x[first + j];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < some) round_at(out, first + j, in.at[j], SCALE_ONE, random.word[j], how);
    }
}

// Rows of n numbers; `lanes` lanes (a power of two) process a block, WIDTH numbers each at a time.
template <int WIDTH, class Out>
static __global__ void __launch_bounds__(THREADS)
    round_blocks(Out out, const float *x, int64_t n, int64_t block, int64_t blocks, int64_t lines, int lanes, How how) {
    const int lane = threadIdx.x % lanes, teams = THREADS / lanes;
    // all lanes of a warp run the same iterations, for the shuffles
    for (int64_t turn = blockIdx.x * int64_t(teams); turn < lines; turn += int64_t(gridDim.x) * teams) {
        const int64_t line = turn + threadIdx.x / lanes, b = line % blocks * block;
        const int64_t first = line / blocks * n + b, count = line < lines ? (n - b < block ? n - b : block) : 0;
        uint32_t amax = 0;
        for (int64_t i = lane * WIDTH; i < count; i += lanes * WIDTH) {
            const Pack<float, WIDTH> in = load_pack<WIDTH>(x + first + i);
            for (int w = 0; w < WIDTH; w++) amax = max(amax, magnitude_of(given(in.at[w], how)));
        }
        for (int step = 1; step < lanes; step *= 2) amax = max(amax, __shfl_xor_sync(ALL_LANES, amax, step));
        const int32_t scale = block_scale(amax, how.f, how.rule, how.shift, how.flush);
        if (lane == 0 && line < lines) out.scale(line, scale);
        for (int64_t i = lane * WIDTH; i < count; i += lanes * WIDTH) {
            const Pack<float, WIDTH> in = load_pack<WIDTH>(x + first + i);
            for (int w = 0; w < WIDTH; w++) round_at(out, first + i + w, in.at[w], scale, word_of(first + i + w, how), how);
        }
    }
}

template <class Out>
static __global__ void __launch_bounds__(THREADS)
    round_columns(Out out, const float *x, int64_t n, int64_t inner, int64_t block, int64_t blocks, int64_t tasks, How how) {
    SHARED(uint32_t, of_warps, [WARPS][COLUMNS]);
    const int lane = threadIdx.x % COLUMNS, warp = threadIdx.x / COLUMNS;
    const int64_t strips = blocks_for<int64_t>(inner, COLUMNS);
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        const int64_t j = task % strips * COLUMNS + lane, line = task / strips, b = line % blocks * block;      // line: o, b
        const int64_t first = (line / blocks * n + b) * inner + j, rows = n - b < block ? n - b : block;
        uint32_t amax = 0;
        if (j < inner)
            for (int64_t r = warp; r < rows; r += WARPS) amax = max(amax, magnitude_of(given(x[first + r * inner], how)));
        of_warps[warp][lane] = amax;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) amax = max(amax, of_warps[w][lane]);
        const int32_t scale = block_scale(amax, how.f, how.rule, how.shift, how.flush);
        if (j < inner) {
            if (warp == 0) out.scale(line * inner + j, scale);
            for (int64_t r = warp; r < rows; r += WARPS) {
                const int64_t i = first + r * inner;
                round_at(out, i, x[i], scale, word_of(i, how), how);
            }
        }
        __syncthreads();            // before the next task writes of_warps
    }
}

template <class Out>
static cudaError_t quantize(const Out &out, const float *x, int64_t outer, int64_t n, int64_t inner, int64_t block,
                            const How &how, void *stream) {
    const int64_t all = outer * n * inner;
    if (all == 0) return cudaSuccess;
    if (block == 0)
        return LAUNCH(round_numbers<Out>, grid_for(blocks_for<int64_t>(all, 4), THREADS), THREADS, 0, stream_of(stream), out, x,
                      all, how, aligned(x));
    const int64_t blocks = blocks_for(n, block), lines = outer * blocks;
    if (inner > 1) {
        const int64_t tasks = lines * blocks_for<int64_t>(inner, COLUMNS);
        return LAUNCH(round_columns<Out>, grid_for(tasks * THREADS, THREADS), THREADS, 0, stream_of(stream), out, x, n, inner,
                      block, blocks, tasks, how);
    }
    const bool fours = aligned(x) && n % 4 == 0 && block % 4 == 0;
    const int lanes = static_cast<int>(power_above(fours ? block / 4 : block, 1, 32));
    const unsigned grid = grid_for(lines * lanes, THREADS);
    return fours
        ? LAUNCH((round_blocks<4, Out>), grid, THREADS, 0, stream_of(stream), out, x, n, block, blocks, lines, lanes, how)
        : LAUNCH((round_blocks<1, Out>), grid, THREADS, 0, stream_of(stream), out, x, n, block, blocks, lines, lanes, how);
}
}

extern "C" pyops_status pyops_fake_quantize(float *y, const float *x, const float *factor, const int64_t *step, int64_t outer,
                                            int64_t n, int64_t inner, int64_t block, int32_t format, int32_t rounding,
                                            int32_t saturate, int32_t rule, int32_t shift, int32_t flush, uint64_t key,
                                            void *stream) {
    const pyops_status status = check_quantize("fake_quantize", step, outer, n, inner, block, format, rounding, rule, shift);
    if (status) return status;
    const How how = {number_formats[format],
                     factor,
                     rounding == PYOPS_ROUND_STOCHASTIC ? step : nullptr,
                     key,
                     rounding,
                     saturate,
                     rule,
                     shift,
                     flush};
    return pyops_launched("fake_quantize", quantize(ToNumbers{y}, x, outer, n, inner, block, how, stream), stream);
}

extern "C" pyops_status pyops_encode(uint16_t *codes, uint8_t *scales, const float *x, const float *factor, const int64_t *step,
                                     int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t format, int32_t rounding,
                                     int32_t saturate, int32_t rule, int32_t shift, int32_t flush, uint64_t key, void *stream) {
    const pyops_status status = check_quantize("encode", step, outer, n, inner, block, format, rounding, rule, shift);
    if (status) return status;
    const How how = {number_formats[format],
                     factor,
                     rounding == PYOPS_ROUND_STOCHASTIC ? step : nullptr,
                     key,
                     rounding,
                     saturate,
                     rule,
                     shift,
                     flush};
    return pyops_launched("encode", quantize(ToCodes{codes, scales}, x, outer, n, inner, block, how, stream), stream);
}

namespace {
static __global__ void __launch_bounds__(THREADS)
    decode(float *y, const uint16_t *codes, const uint8_t *scales, const float *factor, int64_t all, int64_t n, int64_t inner,
           int64_t block, number_format f) {
    const int64_t blocks = block ? blocks_for(n, block) : 0;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < all; i += int64_t(gridDim.x) * THREADS) {
        const int64_t j = i % inner, position = i / inner % n, o = i / inner / n;
        const int32_t scale = block ? scales[(o * blocks + position / block) * inner + j] : SCALE_ONE;
        rounded r = from_code(codes[i], f);
        if (scale == SCALE_NAN) r.special = 2;
        const float value = value_of(r, scale);
        y[i] = factor ? __fdiv_rn(value, factor[0]) : value;
    }
}
}

extern "C" pyops_status pyops_decode(float *y, const uint16_t *codes, const uint8_t *scales, const float *factor, int64_t outer,
                                     int64_t n, int64_t inner, int64_t block, int32_t format, void *stream) {
    const pyops_status status = check_quantize("decode", nullptr, outer, n, inner, block, format, PYOPS_ROUND_EVEN,
                                               PYOPS_SCALE_FLOOR, 0);
    const int64_t all = outer * n * inner;
    if (status || all == 0) return status;
    return pyops_launched("decode",
                          LAUNCH(decode, grid_for(all, THREADS), THREADS, 0, stream_of(stream), y, codes, scales, factor, all,
                                 n, inner, block, number_formats[format]),
                          stream);
}

namespace {
static __global__ void factor_of(float *factor, const uint32_t *largest, unsigned count, float target) {
    const uint32_t amax = largest_of(largest, count);
    if (threadIdx.x == 0) factor[0] = target_factor(amax, target);
}

// The numbers of a history are not negative, so their bits have the same order.
static __global__ void delayed_factor_of(float *factor, float *amax, const uint32_t *history, int64_t length,
                                         const uint32_t *largest, unsigned count, float target) {
    const uint32_t past = largest_of(history, length), now = largest_of(largest, count);
    if (threadIdx.x == 0) factor[0] = delayed_factor(amax, past, now, target);
}

static __global__ void __launch_bounds__(THREADS) advance_rows(float *history, float *amax, int64_t rows, int64_t length) {
    for (int64_t row = blockIdx.x * int64_t(THREADS) + threadIdx.x; row < rows; row += int64_t(gridDim.x) * THREADS)
        advance_amax(history + row * length, amax + row, length);
}
}

extern "C" pyops_status pyops_amax_factor(float *factor, const float *x, int64_t n, float target, void *stream) {
    const pyops_status status = check_target("amax_factor", n, target);
    if (status) return status;
    uint32_t *largest;
    unsigned count;
    Launches launches;
    launches << find_amax_of(x, 1, n, n, &largest, &count, stream);
    if (!largest) return no_memory_for_amax("amax_factor", count);
    launches << LAUNCH(factor_of, 1, 32, 0, stream_of(stream), factor, largest, count, target);
    return pyops_launched("amax_factor", launches.error, stream);
}

extern "C" pyops_status pyops_delayed_factor(float *factor, float *amax, const float *history, const float *x, int64_t n,
                                             int64_t length, float target, void *stream) {
    const pyops_status status = check_delayed(n, length, target);
    if (status) return status;
    uint32_t *largest;
    unsigned count;
    Launches launches;
    launches << find_amax_of(x, 1, n, n, &largest, &count, stream);
    if (!largest) return no_memory_for_amax("delayed_factor", count);
    launches << LAUNCH(delayed_factor_of, 1, 32, 0, stream_of(stream), factor, amax,
                       reinterpret_cast<const uint32_t *>(history), length, largest, count, target);
    return pyops_launched("delayed_factor", launches.error, stream);
}

extern "C" pyops_status pyops_advance_amax(float *history, float *amax, int64_t rows, int64_t length, void *stream) {
    const pyops_status status = check_advance(rows, length);
    if (status || rows == 0) return status;
    return pyops_launched(
        "advance_amax",
        LAUNCH(advance_rows, grid_for(rows, THREADS), THREADS, 0, stream_of(stream), history, amax, rows, length), stream);
}
