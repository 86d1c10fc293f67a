// pool2d.cu - the maximum or the average of each window of a plane.
//
// Forward: a thread per output.  Backward: a thread per input, which adds the outputs whose windows contain it, in their order.
#include "internal.cuh"

namespace {
static constexpr int THREADS = 256;

// The outputs along an axis whose windows contain position i: by step a of the window from last to first, so in their order.
struct Reader {
    int64_t stride, padding, dilation, outputs;
    // The output that reads position i at step a, or -1.
    __device__ int64_t at(int64_t i, int64_t a) const {
        const int64_t first = i + padding - a * dilation;
        return first >= 0 && first % stride == 0 && first / stride < outputs ? first / stride : -1;
    }
};
DEVICE Reader rows_of(const pyops_pool2d &s) { return {s.stride_h, s.pad_h, s.dilation_h, s.Ho}; }
DEVICE Reader cols_of(const pyops_pool2d &s) { return {s.stride_w, s.pad_w, s.dilation_w, s.Wo}; }

static __global__ void __launch_bounds__(THREADS) max_forward(float *y, int32_t *index, const float *x, pyops_pool2d s) {
    const int64_t size = s.planes * s.Ho * s.Wo;
    for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < size; i += gridDim.x * int64_t(THREADS)) {
        const float *const plane = x + i / (s.Ho * s.Wo) * s.H * s.W;
        const int64_t top = i / s.Wo % s.Ho * s.stride_h - s.pad_h, left = i % s.Wo * s.stride_w - s.pad_w;
        float most = -INFINITY;
        int64_t at = -1;
        for (int64_t a = 0; a < s.kh; a++)
            for (int64_t b = 0; b < s.kw; b++) {
                const int64_t row = top + a * s.dilation_h, col = left + b * s.dilation_w;
                if (row < 0 || row >= s.H || col < 0 || col >= s.W) continue;
                const float value = plane[row * s.W + col];
                if (at < 0 || value > most || value != value) most = value, at = row * s.W + col;
            }
        y[i] = most;
        index[i] = static_cast<int32_t>(at);
    }
}

static __global__ void __launch_bounds__(THREADS)
    max_backward(float *dx, const float *dy, const int32_t *index, pyops_pool2d s) {
    const int64_t size = s.planes * s.H * s.W;
    const Reader rows = rows_of(s), cols = cols_of(s);
    for (int64_t p = blockIdx.x * int64_t(THREADS) + threadIdx.x; p < size; p += gridDim.x * int64_t(THREADS)) {
        const int64_t plane = p / (s.H * s.W), here = p % (s.H * s.W);
        float sum = 0.0f;
        for (int64_t a = s.kh - 1; a >= 0; a--)
            for (int64_t b = s.kw - 1; b >= 0; b--) {
                const int64_t i = rows.at(here / s.W, a), j = cols.at(here % s.W, b), output = (plane * s.Ho + i) * s.Wo + j;
                if (i >= 0 && j >= 0 && index[output] == here) sum += dy[output];
            }
        dx[p] = sum;
    }
}

// One over the elements that count in the window of output (i, j).
DEVICE float share(const pyops_pool2d &s, int64_t i, int64_t j, bool count_pad) {
    const int64_t top = i * s.stride_h - s.pad_h, left = j * s.stride_w - s.pad_w;
    const int64_t more_rows = count_pad ? s.pad_h : 0, more_cols = count_pad ? s.pad_w : 0;
    const int64_t rows = min(top + s.kh, s.H + more_rows) - max(top, -more_rows);
    const int64_t cols = min(left + s.kw, s.W + more_cols) - max(left, -more_cols);
    return 1.0f / static_cast<float>(max(max(rows, int64_t(0)) * max(cols, int64_t(0)), int64_t(1)));
}

static __global__ void __launch_bounds__(THREADS) avg_forward(float *y, const float *x, pyops_pool2d s, bool count_pad) {
    const int64_t size = s.planes * s.Ho * s.Wo;
    for (int64_t p = blockIdx.x * int64_t(THREADS) + threadIdx.x; p < size; p += gridDim.x * int64_t(THREADS)) {
        const int64_t line = p / s.Wo, plane = line / s.Ho, i = line - plane * s.Ho, j = p - line * s.Wo;
        const int64_t top = i * s.stride_h - s.pad_h, left = j * s.stride_w - s.pad_w;
        const int64_t end_row = min(top + s.kh, s.H), end_col = min(left + s.kw, s.W);
        float sum = 0.0f;
        for (int64_t row = max(top, int64_t(0)); row < end_row; row++)
            for (int64_t col = max(left, int64_t(0)); col < end_col; col++) sum += x[(plane * s.H + row) * s.W + col];
        y[p] = sum * share(s, i, j, count_pad);
    }
}

static __global__ void __launch_bounds__(THREADS) avg_backward(float *dx, const float *dy, pyops_pool2d s, bool count_pad) {
    const int64_t size = s.planes * s.H * s.W;
    const Reader rows = rows_of(s), cols = cols_of(s);
    for (int64_t p = blockIdx.x * int64_t(THREADS) + threadIdx.x; p < size; p += gridDim.x * int64_t(THREADS)) {
        const int64_t plane = p / (s.H * s.W);
        float sum = 0.0f;
        for (int64_t a = s.kh - 1; a >= 0; a--)
            for (int64_t b = s.kw - 1; b >= 0; b--) {
                const int64_t i = rows.at(p / s.W % s.H, a), j = cols.at(p % s.W, b);
                if (i >= 0 && j >= 0) sum += dy[(plane * s.Ho + i) * s.Wo + j] * share(s, i, j, count_pad);
            }
        dx[p] = sum;
    }
}
}

#define SIZES \
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw, int64_t stride_h, int64_t stride_w, \
        int64_t pad_h, int64_t pad_w
#define SIZES_OF {planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w}

extern "C" pyops_status pyops_max_pool2d_forward(float *y, int32_t *index, const float *x, SIZES, int64_t dilation_h,
                                                 int64_t dilation_w, void *stream) {
    const pyops_pool2d s = SIZES_OF;
    const pyops_status status = check_pool2d("max_pool2d_forward", &s);
    if (status || !planes) return status;
    return pyops_launched(
        "max_pool2d_forward",
        LAUNCH(max_forward, grid_for(planes * Ho * Wo, THREADS), THREADS, 0, stream_of(stream), y, index, x, s), stream);
}

extern "C" pyops_status pyops_max_pool2d_backward(float *dx, const float *dy, const int32_t *index, SIZES, int64_t dilation_h,
                                                  int64_t dilation_w, void *stream) {
    const pyops_pool2d s = SIZES_OF;
    const pyops_status status = check_pool2d("max_pool2d_backward", &s);
    if (status || !planes) return status;
    return pyops_launched(
        "max_pool2d_backward",
        LAUNCH(max_backward, grid_for(planes * H * W, THREADS), THREADS, 0, stream_of(stream), dx, dy, index, s), stream);
}

extern "C" pyops_status pyops_avg_pool2d_forward(float *y, const float *x, SIZES, int32_t count_pad, void *stream) {
    const int64_t dilation_h = 1, dilation_w = 1;
    const pyops_pool2d s = SIZES_OF;
    const pyops_status status = check_avg_pool2d("avg_pool2d_forward", &s);
    if (status || !planes) return status;
    return pyops_launched(
        "avg_pool2d_forward",
        LAUNCH(avg_forward, grid_for(planes * Ho * Wo, THREADS), THREADS, 0, stream_of(stream), y, x, s, count_pad != 0),
        stream);
}

extern "C" pyops_status pyops_avg_pool2d_backward(float *dx, const float *dy, SIZES, int32_t count_pad, void *stream) {
    const int64_t dilation_h = 1, dilation_w = 1;
    const pyops_pool2d s = SIZES_OF;
    const pyops_status status = check_avg_pool2d("avg_pool2d_backward", &s);
    if (status || !planes) return status;
    return pyops_launched(
        "avg_pool2d_backward",
        LAUNCH(avg_backward, grid_for(planes * H * W, THREADS), THREADS, 0, stream_of(stream), dx, dy, s, count_pad != 0),
        stream);
}
