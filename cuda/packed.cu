// packed.cu - copies between packed rows and padded, time-major sequences.
#include "packed.cuh"

namespace {
static constexpr int THREADS = 256;

static __global__ void __launch_bounds__(THREADS) pad(float *y, float *first, const float *x, const float *last,
                                                      const Sequences in, int64_t C, int64_t ldx, FaultRecord *faults) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, from = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    check_offsets(in, from, step, Who::pad_rows, faults);
    for (int64_t i = from; i < in.T * in.B * C; i += step) {
        const int64_t t = i / C / in.B, b = i / C % in.B, c = i % C, length = in.length(b);
        float value = t < length && x ? x[in.row(t, b) * ldx + c] : 0.0f;
        if (last && t == length - 1) value += last[b * C + c];
        y[i] = value;
        if (first && t == 0) first[b * C + c] = length || !last ? 0.0f : last[b * C + c];
    }
}

static __global__ void __launch_bounds__(THREADS)
    unpad(float *x, float *last, const float *y, const float *first, const Sequences in, int64_t C, FaultRecord *faults) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, from = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    check_offsets(in, from, step, Who::unpad_rows, faults);
    for (int64_t i = from; i < in.T * in.B * C; i += step) {
        const int64_t t = i / C / in.B, b = i / C % in.B, c = i % C, length = in.length(b);
        if (t < length) x[in.row(t, b) * C + c] = y[i];
        if (last && t == length - 1) last[b * C + c] = y[i];
        if (last && t == 0 && !length) last[b * C + c] = first ? first[b * C + c] : 0.0f;
    }
}
}

extern "C" pyops_status pyops_pad_rows(float *y, float *first, const float *x, const float *last, const int32_t *offsets,
                                       int64_t T, int64_t B, int64_t N, int64_t C, int64_t ldx, int32_t reverse, void *stream) {
    const pyops_status status = check_pad("pad_rows", offsets, T, B, N, C, ldx);
    if (status || B * C == 0) return status;
    const Sequences in = {offsets, T, B, N, reverse != 0};
    return pyops_launched(
        "pad_rows",
        LAUNCH(pad, grid_for(T * B * C, THREADS), THREADS, 0, stream_of(stream), y, first, x, last, in, C, ldx, pyops_faults()),
        stream);
}

extern "C" pyops_status pyops_unpad_rows(float *x, float *last, const float *y, const float *first, const int32_t *offsets,
                                         int64_t T, int64_t B, int64_t N, int64_t C, int32_t reverse, void *stream) {
    const pyops_status status = check_pad("unpad_rows", offsets, T, B, N, C, C);
    if (status || B * C == 0) return status;
    const Sequences in = {offsets, T, B, N, reverse != 0};
    return pyops_launched(
        "unpad_rows",
        LAUNCH(unpad, grid_for(T * B * C, THREADS), THREADS, 0, stream_of(stream), x, last, y, first, in, C, pyops_faults()),
        stream);
}
