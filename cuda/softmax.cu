// softmax.cu - softmax along an axis, and of attention scores in memory, for attention that is composed of separate products.
//
// Along an axis: a warp has a contiguous row (inner 1), or a lane has a column, which is next to the column of the next lane.
// Short rows are also read by a lane each.
//
// Attention: a warp has a row, the scores of one query; a block has eight rows.  A lane has four adjacent keys of every 128,
// which share a counter of dropout:
//
//     row   | 0 1 2 3 | 4 5 6 7 | ...  | 124 ... 127 | 128 ... 131 | ...
//           | lane 0  | lane 1  | ...  | lane 31     | lane 0      | ...
//
// Forward reads a row twice: for its log-sum-exp (one pass), and for the weights.  Backward does too: for the sum of weights
// times gradients, and for the gradients of the scores.  The second read hits a cache.
#include "block.cuh"
#include "log_sum_exp.cuh"
#include "philox.cuh"

namespace {
static constexpr int THREADS = 256, WARPS = THREADS / 32, EACH = 4;

struct Call {
    int64_t Tq, Tk, heads, rows;
    const int64_t *step;                        // NULL: no dropout
    uint64_t key;
    uint32_t threshold;
    float kept;                                 // 1 / (1 - share)
};

// Apply dropout: x[i] = D[row, j + i] x[i] for four adjacent keys.
DEVICE void drop(const Call &c, float (&x)[EACH], int64_t row, int64_t j) {
    const Words random = philox(static_cast<uint64_t>(row * ((c.Tk + 3) / 4) + j / 4), static_cast<uint64_t>(c.step[0]), c.key);
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = random.word[i] >= c.threshold ? x[i] * c.kept : 0.0f;
}

// The number of rows of sequence b, with offsets as in attention.cu.
DEVICE int64_t rows_of(const int32_t *offsets, int64_t b, int64_t T) {
    return offsets ? min(max(int64_t(offsets[b + 1]) - offsets[b], int64_t(0)), T) : T;
}

static __global__ void __launch_bounds__(THREADS)
    forward(Call c, float *p, float *w, const float *s, const int32_t *lengths, const int32_t *q_offsets,
            const int32_t *k_offsets, int32_t causal, float scale, FaultRecord *faults) {
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * int64_t(WARPS) + threadIdx.x / 32; row < c.rows; row += int64_t(gridDim.x) * WARPS) {
        const int64_t i = row % c.Tq, sequence = row / (c.heads * c.Tq);
        const int64_t queries = rows_of(q_offsets, sequence, c.Tq), keys = rows_of(k_offsets, sequence, c.Tk);
        const int64_t length = lengths ? min(max(int64_t(lengths[sequence]), int64_t(0)), c.Tk) : keys;
        if (i == 0 && lane == 0 && faults) {
            constexpr Who WHO = Who::attention_softmax_forward;
            if (lengths) check_length(faults, WHO, lengths, sequence, c.Tk);
            if (q_offsets) check_offset(faults, Fault::q_offset, WHO, q_offsets, sequence, c.Tq);
            if (k_offsets) check_offset(faults, Fault::k_offset, WHO, k_offsets, sequence, c.Tk);
        }
        const int64_t seen = i >= queries ? 0 : causal ? max(min(length, i + 1 + keys - queries), int64_t(0)) : length;
        const float *const from = s + row * c.Tk;
        LogSumExp found;
        for (int64_t j = lane * EACH; j < seen; j += 32 * EACH) {
            float score[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) score[k] = j + k < seen ? scale * from[j + k] : -INFINITY;
            found.add(score);
        }
        found = warp_log_sum_exp(found);
        const float top = __shfl_sync(ALL_LANES, found.max, 0), share = 1.0f / __shfl_sync(ALL_LANES, found.sum, 0);
        for (int64_t j = lane * EACH; j < c.Tk; j += 32 * EACH) {
            float weight[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                weight[k] = j + k < seen ? expf(scale * from[j + k] - top) * share : 0.0f;
                if (j + k < c.Tk) p[row * c.Tk + j + k] = weight[k];
            }
            if (!w) continue;
            if (c.step) drop(c, weight, row, j);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (j + k < c.Tk) w[row * c.Tk + j + k] = weight[k];
        }
    }
}

// Gradients of the weights of four adjacent keys.  0 beyond the last key, and for masked keys whatever dw contains there.
DEVICE void gradients(const Call &c, float (&d)[EACH], float (&weight)[EACH], const float *dw, const float *p, int64_t row,
                      int64_t j) {
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const bool there = j + k < c.Tk;
        weight[k] = there ? p[row * c.Tk + j + k] : 0.0f;
        d[k] = weight[k] != 0.0f ? dw[row * c.Tk + j + k] : 0.0f;
    }
    if (c.step) drop(c, d, row, j);
}

static __global__ void __launch_bounds__(THREADS) backward(Call c, float *ds, const float *dw, const float *p) {
    const int lane = threadIdx.x % 32;
    for (int64_t row = blockIdx.x * int64_t(WARPS) + threadIdx.x / 32; row < c.rows; row += int64_t(gridDim.x) * WARPS) {
        float d[EACH], weight[EACH], sum = 0.0f;
        for (int64_t j = lane * EACH; j < c.Tk; j += 32 * EACH) {
            gradients(c, d, weight, dw, p, row, j);
#pragma unroll
            for (int k = 0; k < EACH; k++) sum += weight[k] * d[k];
        }
        sum = warp_sum(sum);
        for (int64_t j = lane * EACH; j < c.Tk; j += 32 * EACH) {
            gradients(c, d, weight, dw, p, row, j);
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (j + k < c.Tk) ds[row * c.Tk + j + k] = weight[k] != 0.0f ? weight[k] * (d[k] - sum) : 0.0f;
        }
    }
}

static pyops_status make_call(Call *c, const char *who, const int32_t *lengths, const int32_t *k_offsets, int64_t Tq,
                              int64_t Tk, int64_t B, int64_t heads, const int64_t *step, float share, uint64_t key) {
    const pyops_status status = check_attention_softmax(who, lengths, k_offsets, Tq, Tk, B, heads, share);
    if (status) return status;
    *c = {Tq, Tk, heads, B * heads * Tq, share > 0.0f ? step : nullptr, key, dropout_threshold(share), 1.0f / (1.0f - share)};
    return PYOPS_OK;
}
}

namespace {
// x (outer,n,inner).  `lanes` threads, 32 or 1, have the n elements of each sum.
struct Axis {
    int64_t sums, n, inner;
    int lanes;
    bool log;
};

// Call each(first) for every sum of this thread; `first` is the index of its first element.
template <class Each> DEVICE void for_sums(const Axis &a, Each each) {
    const int64_t threads = int64_t(gridDim.x) * blockDim.x / a.lanes;
    for (int64_t s = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / a.lanes; s < a.sums; s += threads)
        each(s / a.inner * a.n * a.inner + s % a.inner);
}

static __global__ void __launch_bounds__(THREADS) axis_forward(Axis a, float *y, const float *x) {
    const int lane = a.lanes == 1 ? 0 : threadIdx.x % 32;
    for_sums(a, [&](int64_t first) {
        LogSumExp found;
        for (int64_t j = lane; j < a.n; j += a.lanes) {
            const float value[1] = {x[first + j * a.inner]};
            found.add(value);
        }
        if (a.lanes == 32) {
            found = warp_log_sum_exp(found);
            found.sum = __shfl_sync(ALL_LANES, found.sum, 0);
        }
        const float total = found.total(), log_total = logf(total), share = 1.0f / total;
        for (int64_t j = lane; j < a.n; j += a.lanes) {
            const int64_t i = first + j * a.inner;
            y[i] = a.log ? (x[i] - found.max) - log_total : expf(x[i] - found.max) * share;
        }
    });
}

static __global__ void __launch_bounds__(THREADS) axis_backward(Axis a, float *dx, const float *dy, const float *y) {
    const int lane = a.lanes == 1 ? 0 : threadIdx.x % 32;
    for_sums(a, [&](int64_t first) {
        float sum = 0.0f;
        for (int64_t j = lane; j < a.n; j += a.lanes) {
            const int64_t i = first + j * a.inner;
            sum += a.log ? dy[i] : dy[i] * y[i];
        }
        if (a.lanes == 32) sum = warp_sum(sum);
        for (int64_t j = lane; j < a.n; j += a.lanes) {
            const int64_t i = first + j * a.inner;
            dx[i] = a.log ? dy[i] - expf(y[i]) * sum : y[i] * (dy[i] - sum);
        }
    });
}

static Axis axis_of(int64_t outer, int64_t n, int64_t inner, int32_t log) {
    return {outer * inner, n, inner, inner == 1 && n >= 16 ? 32 : 1, log != 0};
}
}

extern "C" pyops_status pyops_softmax_forward(float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int32_t log,
                                              void *stream) {
    const pyops_status status = check_softmax("softmax_forward", outer, n, inner);
    const Axis a = axis_of(outer, n, inner, log);
    if (status || a.sums == 0 || n == 0) return status;
    return pyops_launched("softmax_forward",
                          LAUNCH(axis_forward, grid_for(a.sums * a.lanes, THREADS), THREADS, 0, stream_of(stream), a, y, x),
                          stream);
}

extern "C" pyops_status pyops_softmax_backward(float *dx, const float *dy, const float *y, int64_t outer, int64_t n,
                                               int64_t inner, int32_t log, void *stream) {
    const pyops_status status = check_softmax("softmax_backward", outer, n, inner);
    const Axis a = axis_of(outer, n, inner, log);
    if (status || a.sums == 0 || n == 0) return status;
    return pyops_launched(
        "softmax_backward",
        LAUNCH(axis_backward, grid_for(a.sums * a.lanes, THREADS), THREADS, 0, stream_of(stream), a, dx, dy, y), stream);
}

extern "C" pyops_status pyops_attention_softmax_forward(float *p, float *w, const float *s, const int32_t *lengths,
                                                        const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
                                                        int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int32_t causal,
                                                        float scale, float share, uint64_t key, void *stream) {
    Call c;
    const pyops_status status = make_call(&c, "attention_softmax_forward", lengths, k_offsets, Tq, Tk, B, heads, step, share,
                                          key);
    if (status) return status;
    PYOPS_REQUIRE(w || !c.step, "attention_softmax_forward: w is NULL, expected an array for the weights after dropout");
    if (c.rows == 0) return PYOPS_OK;
    return pyops_launched("attention_softmax_forward",
                          LAUNCH(forward, grid_for(c.rows * 32, THREADS), THREADS, 0, stream_of(stream), c, p, w, s, lengths,
                                 q_offsets, k_offsets, causal, scale, pyops_faults()),
                          stream);
}

extern "C" pyops_status pyops_attention_softmax_backward(float *ds, const float *dw, const float *p, const int64_t *step,
                                                         int64_t Tq, int64_t Tk, int64_t B, int64_t heads, float share,
                                                         uint64_t key, void *stream) {
    Call c;
    const pyops_status status = make_call(&c, "attention_softmax_backward", nullptr, nullptr, Tq, Tk, B, heads, step, share,
                                          key);
    if (status || c.rows == 0) return status;
    return pyops_launched("attention_softmax_backward",
                          LAUNCH(backward, grid_for(c.rows * 32, THREADS), THREADS, 0, stream_of(stream), c, ds, dw, p),
                          stream);
}
