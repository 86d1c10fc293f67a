// rnn.cu - LSTM and simple recurrent network over a whole sequence.
//
// The input product of all steps, dx and the weight gradients are one product each (pyops_gemm).  A step is a product with the
// recurrent weights and a kernel with a thread for each unit of each sequence.  A step after the end of a sequence writes
// zeros: no earlier or other row depends on them.
#include "gru_gates.cuh"
#include "product.cuh"

namespace {
using gru::given;
using gru::sigmoid;
static constexpr int THREADS = 256;

struct Call {
    const int32_t *lengths;
    const float *c0;
    int64_t T, B, H;
    int32_t cell;

    __device__ __forceinline__ bool has_ended(int64_t t, int64_t b) const { return lengths && t >= lengths[b]; }
};

// a (T,B,GH): the product of the inputs with b_ih, in the memory of gates or y.  product (B,GH) of h[t-1], NULL for zeros.
static __global__ void __launch_bounds__(THREADS)
    forward_step(Call call, float *y, float *gates, const float *product, const float *b_hh, int64_t t, FaultRecord *faults) {
    const int64_t H = call.H, step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < call.B * H; i += step) {
        const int64_t b = i / H, unit = i % H, row = t * call.B + b;
        if (t == 0 && unit == 0 && call.lengths && faults) check_length(faults, Who::rnn_forward, call.lengths, b, call.T);
        const bool ended = call.has_ended(t, b);
        float *const h = y + row * H + unit;
        if (call.cell != PYOPS_CELL_LSTM) {
            const float a = *h + given(product, i) + given(b_hh, unit);
            *h = ended ? 0.0f : call.cell == PYOPS_CELL_TANH ? tanhf(a) : a < 0.0f ? 0.0f : a;
            continue;
        }
        float *const gate = gates + row * 4 * H + unit, *const c = h + call.T * call.B * H;
        const float *const of = product ? product + b * 4 * H + unit : nullptr;
        float a[4];
#pragma unroll
        for (int k = 0; k < 4; k++) a[k] = gate[k * H] + (of ? of[k * H] : 0.0f) + given(b_hh, k * H + unit);
        const float in = sigmoid(a[0]), forget = sigmoid(a[1]), g = tanhf(a[2]), out = sigmoid(a[3]);
        const float state = forget * (t ? c[-call.B * H] : given(call.c0, i)) + in * g;
        gate[0] = ended ? 0.0f : in;
        gate[H] = ended ? 0.0f : forget;
        gate[2 * H] = ended ? 0.0f : g;
        gate[3 * H] = ended ? 0.0f : out;
        *c = ended ? 0.0f : state;
        *h = ended ? 0.0f : out * tanhf(state);
    }
}

// dh, dc (B,H): the gradients of h[t] and c[t] from later steps; dh is only read.  dc becomes the gradient of c[t-1].
static __global__ void __launch_bounds__(THREADS)
    backward_step(Call call, float *dgates, float *dc, const float *dh, const float *dy, const float *y, const float *gates,
                  int64_t t) {
    const int64_t H = call.H, states = call.T * call.B * H, step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < call.B * H; i += step) {
        const int64_t b = i / H, unit = i % H, row = t * call.B + b, at = row * H + unit;
        const bool ended = call.has_ended(t, b);
        const float d = dy[at] + (t + 1 < call.T ? dh[i] : 0.0f), h = y[at];
        if (call.cell != PYOPS_CELL_LSTM) {
            const float da = call.cell == PYOPS_CELL_TANH ? d * (1.0f - h * h) : h > 0.0f ? d : 0.0f;
            dgates[at] = ended ? 0.0f : da;
            continue;
        }
        const float *const gate = gates + row * 4 * H + unit;
        float *const da = dgates + row * 4 * H + unit;
        const float in = gate[0], forget = gate[H], g = gate[2 * H], out = gate[3 * H];
        const float c_prev = t ? y[states + at - call.B * H] : given(call.c0, i), bounded = tanhf(y[states + at]);
        const float total = dy[states + at] + (t + 1 < call.T ? dc[i] : 0.0f) + d * out * (1.0f - bounded * bounded);
        da[0] = ended ? 0.0f : total * g * in * (1.0f - in);
        da[H] = ended ? 0.0f : total * c_prev * forget * (1.0f - forget);
        da[2 * H] = ended ? 0.0f : total * in * (1.0f - g * g);
        da[3 * H] = ended ? 0.0f : d * bounded * out * (1.0f - out);
        dc[i] = ended ? 0.0f : total * forget;
    }
}

static int64_t blocks_of(int32_t cell) { return cell == PYOPS_CELL_LSTM ? 4 : 1; }
}

extern "C" int64_t pyops_rnn_forward_work(int64_t, int64_t B, int64_t, int64_t H, int32_t cell) {
    return B * blocks_of(cell) * H;                     // the product of a step
}

extern "C" int64_t pyops_rnn_backward_work(int64_t, int64_t B, int64_t, int64_t H, int32_t) { return 2 * B * H; } // dh, dc

extern "C" pyops_status pyops_rnn_forward(float *y, float *gates, const float *x, const float *h0, const float *c0,
                                          const int32_t *lengths, const float *w_ih, const float *w_hh, const float *b_ih,
                                          const float *b_hh, float *work, int64_t T, int64_t B, int64_t I, int64_t H,
                                          int32_t cell, void *stream) {
    pyops_status status = check_rnn("rnn_forward", c0, gates, b_ih, b_hh, T, B, I, H, cell);
    if (status || B == 0) return status;
    const int64_t GH = blocks_of(cell) * H;
    const Call call = {lengths, c0, T, B, H, cell};
    status = pyops_gemm(gates ? gates : y, x, w_ih, b_ih, T * B, GH, I, GH, I, 1, 1, I, 0, 0, stream);
    Launches launches;
    for (int64_t t = 0; t < T && !status; t++) {
        const float *const h_prev = t ? y + (t - 1) * B * H : h0;
        if (h_prev) status = pyops_gemm(work, h_prev, w_hh, nullptr, B, GH, H, GH, H, 1, 1, H, 0, 0, stream);
        launches << LAUNCH(forward_step, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream), call, y, gates,
                           h_prev ? work : nullptr, b_hh, t, pyops_faults());
    }
    return status ? status : pyops_launched("rnn_forward", launches.error, stream);
}

extern "C" pyops_status pyops_rnn_backward(float *dx, float *dh0, float *dc0, float *dw_ih, float *dw_hh, float *db_ih,
                                           float *db_hh, float *dgates, const float *dy, const float *x, const float *h0,
                                           const float *c0, const int32_t *lengths, const float *w_ih, const float *w_hh,
                                           const float *y, const float *gates, float *work, int64_t T, int64_t B, int64_t I,
                                           int64_t H, int32_t cell, void *stream) {
    pyops_status status = check_rnn("rnn_backward", c0, gates, db_ih, db_hh, T, B, I, H, cell);
    if (status || B == 0) return status;
    const int64_t GH = blocks_of(cell) * H, R = T * B;
    const Call call = {lengths, c0, T, B, H, cell};
    float *const dh = work, *const dc = work + B * H;
    Launches launches;
    for (int64_t t = T - 1; t >= 0 && !status; t--) {
        launches << LAUNCH(backward_step, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream), call, dgates, dc, dh, dy, y,
                           gates, t);
        float *const to = t ? dh : dh0;
        if (to) status = pyops_gemm(to, dgates + t * B * GH, w_hh, nullptr, B, H, GH, H, GH, 1, H, 1, 0, 0, stream);
    }
    if (dc0) launches << cudaMemcpyAsync(dc0, dc, B * H * sizeof(float), cudaMemcpyDeviceToDevice, stream_of(stream));

    // Sums over all steps.  h[t-1] is h0 at the first step, then y without its last step.
    const auto add_weight_gradient = [&](float *dw, const float *d, const float *input, int64_t N, int64_t rows) {
        if (!status && rows) status = pyops_gemm(dw, d, input, nullptr, GH, N, rows, N, 1, GH, N, 1, 1, 0, stream);
    };
    if (!status && dx) status = pyops_gemm(dx, dgates, w_ih, nullptr, R, I, GH, I, GH, 1, I, 1, 0, 0, stream);
    add_weight_gradient(dw_ih, dgates, x, I, R);
    if (h0) add_weight_gradient(dw_hh, dgates, h0, H, B);
    add_weight_gradient(dw_hh, dgates + B * GH, y, H, R - B);
    if (!status && db_ih) status = pyops_column_sums(db_ih, real(dgates), R, GH, stream);
    if (!status && db_hh) status = pyops_column_sums(db_hh, real(dgates), R, GH, stream);
    return status ? status : pyops_launched("rnn_backward", launches.error, stream);
}
