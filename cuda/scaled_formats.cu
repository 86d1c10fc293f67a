// scaled_formats.cu - round numbers to narrow formats in blocks with a float as their scale, in one or two dimensions.
//
// The first launch computes the scales: a thread block per block of numbers, or, for blocks one column wide, a thread per
// column.  The second rounds: a thread per number, which reads the scale of its block.
#include "amax.cuh"
#include "block.cuh"
#include "index.cuh"
#include "philox.cuh"
#include "reduce.cuh"
#define FORMAT_INLINE static __host__ __device__ __forceinline__
#include "number_format.inc"

namespace {
static constexpr int THREADS = 256;
static_assert(THREADS == ERROR_SUMS, "a thread per sum of errors");

struct Grid {
    int64_t outer, rows, columns, block_rows, block_columns, down, across;

    __device__ int64_t block_of(int64_t i) const {
        const int64_t row = i / columns;
        return (row / rows * down + row % rows / block_rows) * across + i % columns / block_columns;
    }
};

struct Rules {
    number_format f;
    int32_t rule, shift, flush;
};

static Grid grid_of(int64_t outer, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    return {outer, rows, columns, block_rows, block_columns, blocks_for(rows, block_rows), blocks_for(columns, block_columns)};
}

DEVICE float scaling_of(const float *factor) { return factor ? factor[0] : 1.0f; }
// The number by which the numbers of a block are divided.
DEVICE float total_of(float scale, const float *factor) { return factor ? __fdiv_rn(scale, factor[0]) : scale; }

// The error of one number if the scale of its block is scale, which is 0 or above.
DEVICE double error_with(float x, float scale, const Rules &rules) {
    const rounded r = round_scaled(x, scale, 0, rules.f, PYOPS_ROUND_EVEN);
    return error_term(value_of(r, SCALE_ONE), scale, x, rules.rule);
}

// One block of numbers by all threads.
static __global__ void __launch_bounds__(THREADS)
    find_scales(float *scales, const float *x, Grid g, const float *factor, Rules rules) {
    SHARED(uint32_t, of_warps, [THREADS / 32]);
    SHARED(double, errors, [2][THREADS]);
    for (int64_t block = blockIdx.x; block < g.outer * g.down * g.across; block += gridDim.x) {
        const int64_t line = block / g.across, from = line % g.down * g.block_rows, left = block % g.across * g.block_columns;
        const int64_t height = g.rows - from < g.block_rows ? g.rows - from : g.block_rows;
        const int64_t width = g.columns - left < g.block_columns ? g.columns - left : g.block_columns;
        const float *first = x + (line / g.down * g.rows + from) * g.columns + left;
        uint32_t amax = 0;
        for (int64_t i = threadIdx.x; i < height * width; i += THREADS)
            amax = max(amax, magnitude_of(first[i / width * g.columns + i % width]));
        for (int step = 16; step; step >>= 1) amax = max(amax, __shfl_xor_sync(ALL_LANES, amax, step));
        if (lane_id() == 0) of_warps[threadIdx.x / 32] = amax;
        __syncthreads();
        for (int warp = 0; warp < THREADS / 32; warp++) amax = max(amax, of_warps[warp]);
        float scale = number_scale(amax, scaling_of(factor), rules.f, rules.rule, rules.shift, rules.flush);
        if (has_choice(amax, rules.rule)) {
            const float other = scale_to_four(amax, scaling_of(factor));
            double with_six = 0, with_four = 0;
            for (int64_t i = threadIdx.x; i < height * width; i += THREADS) {
                const float number = first[i / width * g.columns + i % width];
                with_six += error_with(number, total_of(scale, factor), rules);
                with_four += error_with(number, total_of(other, factor), rules);
            }
            errors[0][threadIdx.x] = with_six;
            errors[1][threadIdx.x] = with_four;
            __syncthreads();
            if (threadIdx.x == 0) {
                for (int p = 1; p < THREADS && p < height * width; p++) {
                    with_six += errors[0][p];
                    with_four += errors[1][p];
                }
                if (with_four < with_six) scale = other;
            }
        }
        if (threadIdx.x == 0) scales[block] = scale;
        __syncthreads();            // before the next block writes of_warps and errors
    }
}

// One thread per block of one column.
static __global__ void __launch_bounds__(THREADS)
    find_column_scales(float *scales, const float *x, Grid g, const float *factor, Rules rules) {
    const int64_t blocks = g.outer * g.down * g.columns;
    for (int64_t block = blockIdx.x * int64_t(THREADS) + threadIdx.x; block < blocks; block += int64_t(gridDim.x) * THREADS) {
        const int64_t line = block / g.columns, from = line % g.down * g.block_rows;
        const int64_t height = g.rows - from < g.block_rows ? g.rows - from : g.block_rows;
        const float *first = x + (line / g.down * g.rows + from) * g.columns + block % g.columns;
        uint32_t amax = 0;
        for (int64_t r = 0; r < height; r++) amax = max(amax, magnitude_of(first[r * g.columns]));
        float scale = number_scale(amax, scaling_of(factor), rules.f, rules.rule, rules.shift, rules.flush);
        if (has_choice(amax, rules.rule)) {
            const float other = scale_to_four(amax, scaling_of(factor));
            double with_six = 0, with_four = 0;
            for (int64_t p = 0; p < ERROR_SUMS && p < height; p++) {
                double six = 0, four = 0;
                for (int64_t r = p; r < height; r += ERROR_SUMS) {
                    six += error_with(first[r * g.columns], total_of(scale, factor), rules);
                    four += error_with(first[r * g.columns], total_of(other, factor), rules);
                }
                with_six += six;
                with_four += four;
            }
            if (with_four < with_six) scale = other;
        }
        scales[block] = scale;
    }
}

static __global__ void __launch_bounds__(THREADS)
    round_all(float *y, uint16_t *codes, const float *scales, const float *x, Grid g, const float *factor, const int64_t *step,
              uint64_t key, number_format f, int32_t rounding) {
    const int64_t n = g.outer * g.rows * g.columns;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < n; i += int64_t(gridDim.x) * THREADS) {
        uint32_t word = 0;
        if (step) {
            const Words random = philox(static_cast<uint64_t>(i / 4), static_cast<uint64_t>(step[0]), key);
            const int at = static_cast<int>(i % 4);         // no dynamic index, so the words stay in registers
            word = at < 2 ? at ? random.word[1] : random.word[0] : at > 2 ? random.word[3] : random.word[2];
        }
        const float scale = total_of(scales[g.block_of(i)], factor);
        const rounded r = round_scaled(x[i], scale, word, f, rounding);
        if (codes) codes[i] = static_cast<uint16_t>(code_of(r, f));
        if (y) y[i] = scaled_value(r, scale);
    }
}

static __global__ void __launch_bounds__(THREADS)
    scaled_decode(float *y, const uint16_t *codes, const float *scales, Grid g, const float *factor, number_format f) {
    const int64_t n = g.outer * g.rows * g.columns;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < n; i += int64_t(gridDim.x) * THREADS)
        y[i] = scaled_value(from_code(codes[i], f), total_of(scales[g.block_of(i)], factor));
}
}

extern "C" pyops_status pyops_scaled_quantize(float *y, uint16_t *codes, float *scales, const float *x, const float *factor,
                                              const int64_t *step, int64_t outer, int64_t rows, int64_t columns,
                                              int64_t block_rows, int64_t block_columns, int32_t format, int32_t rounding,
                                              int32_t rule, int32_t shift, int32_t flush, uint64_t key, void *stream) {
    const pyops_status status = check_scaled("scaled_quantize", step, outer, rows, columns, block_rows, block_columns, format,
                                             rounding, rule, shift);
    const int64_t all = outer * rows * columns;
    if (status || all == 0) return status;
    const Grid g = grid_of(outer, rows, columns, block_rows, block_columns);
    const Rules rules = {number_formats[format], rule, shift, flush};
    const int64_t blocks = outer * g.down * g.across;
    Launches launches;
    if (block_columns == 1)
        launches << LAUNCH(find_column_scales, grid_for(blocks, THREADS), THREADS, 0, stream_of(stream), scales, x, g, factor,
                           rules);
    else
        launches << LAUNCH(find_scales, grid_for(blocks * THREADS, THREADS), THREADS, 0, stream_of(stream), scales, x, g,
                           factor, rules);
    launches << LAUNCH(round_all, grid_for(all, THREADS), THREADS, 0, stream_of(stream), y, codes, scales, x, g, factor,
                       rounding == PYOPS_ROUND_STOCHASTIC ? step : nullptr, key, rules.f, rounding);
    return pyops_launched("scaled_quantize", launches.error, stream);
}

extern "C" pyops_status pyops_scaled_decode(float *y, const uint16_t *codes, const float *scales, const float *factor,
                                            int64_t outer, int64_t rows, int64_t columns, int64_t block_rows,
                                            int64_t block_columns, int32_t format, void *stream) {
    const pyops_status status = check_scaled("scaled_decode", nullptr, outer, rows, columns, block_rows, block_columns, format,
                                             PYOPS_ROUND_EVEN, PYOPS_SCALE_FLOOR, 0);
    const int64_t all = outer * rows * columns;
    if (status || all == 0) return status;
    return pyops_launched("scaled_decode",
                          LAUNCH(scaled_decode, grid_for(all, THREADS), THREADS, 0, stream_of(stream), y, codes, scales,
                                 grid_of(outer, rows, columns, block_rows, block_columns), factor, number_formats[format]),
                          stream);
}
