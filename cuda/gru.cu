// gru.cu - a gated recurrent unit over a whole sequence.
//
// Everything that does not depend on the previous state is one product over all steps (pyops_gemm): in forward the products of
// the inputs; in backward dx and the gradients of the weights.  The recurrence itself runs in one of two ways:
//
//   gru_persistent.cuh    all steps in one kernel, with the recurrent weights in shared memory
//   below                 a product and a kernel for the gates per step, if the weights do not fit in shared memory, or the
//                         rows are many and long
//
// gru_gates.cuh has the formulas of the gates, for both and for the single steps at the end of this file.
#include <algorithm>
#include "columns.cuh"
#include "gru_gates.cuh"
#include "gru_persistent.cuh"
#include "product.cuh"

using namespace gru;

// ---- one step at a time ---------------------------------------------------------------------------------------------
namespace {
enum class Stage { after, before_1, before_2 };

// product (B,3H): of h[t-1], or in the last third of u, biases included
// With packed rows the rows of a step are not contiguous, so the operands of its products, h[t-1] and u, are stored again in
// `rows` and `u` (B,H); otherwise both are NULL.
template <Stage STAGE, class T>
static __global__ void forward_step(const Forward<T> f, int64_t t, const float *product, T *rows, T *u, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < f.in.B * H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t at = f.in.row(t, i / H), unit = i % H;
        if (at < 0) continue;
        T *const h = f.h + at * H + unit, *const gate = f.gates + at * 4 * H + unit;
        const float *const of = product + i / H * 3 * H + unit;
        GateInputs k = gate_inputs(f.a + at * f.a_row + unit, f.before(t, i / H, unit, H), H);
        if constexpr (STAGE == Stage::before_1) {
            f.keep_z(i / H, unit, H, before_gates_1(gate, H, k, of[0], of[H]).z);
            if (u) u[i] = gate[3 * H];
        } else {
            if constexpr (STAGE == Stage::before_2) k.z = f.z(at, i / H, unit, H);
            float state;
            if constexpr (STAGE == Stage::after) state = after_gates(h, gate, H, k, of[0], of[H], of[2 * H]);
            else state = before_gates_2(h, gate, H, k, of[2 * H]);
            f.keep(i / H, unit, H, state);
            if (rows) rows[i] = *h;
        }
    }
}

// work: product (B,3H), and with packed rows h[t-1] and u (B,H)
template <class T>
static pyops_status forward_by_steps(const Forward<T> &f, const pyops_real *w_hh, float *work, int64_t H, bool before,
                                     void *stream) {
    const int64_t B = f.in.B;
    const bool packed = f.in.offsets;
    float *const product = work;
    T *const states = packed ? reinterpret_cast<T *>(product + B * 3 * H) : nullptr,
             *const u = packed ? states + B * H : nullptr;
    const unsigned blocks = grid_for(B * H, THREADS);
    const cudaStream_t in = stream_of(stream);
    Launches launches;
    for (int64_t t = 0; t < f.in.T; t++) {
        const pyops_real *const rows = t ? real(packed ? states : f.h + (t - 1) * B * H) : real(f.h0);
        const int64_t K = rows ? H : 0, N = before ? 2 * H : 3 * H;    // K = 0 without a state: the bias alone
        pyops_status status = pyops_gemm(real(product), K ? rows : real(f.h), w_hh, f.b_hh, B, N, K, 3 * H, H, 1, 1, H, 0, 0,
                                         stream);
        if (status) return status;
        if (!before) {
            launches << LAUNCH((forward_step<Stage::after, T>), blocks, THREADS, 0, in, f, t, product, states, u, H);
            continue;
        }
        launches << LAUNCH((forward_step<Stage::before_1, T>), blocks, THREADS, 0, in, f, t, product, states, u, H);
        status = pyops_gemm(real(product + 2 * H), real(packed ? u : f.gates + (t * B * 4 + 3) * H), element(w_hh, 2 * H * H),
                            f.b_hh + 2 * H, B, H, H, 3 * H, packed ? H : 4 * H, 1, 1, H, 0, 0, stream);
        if (status) return status;
        launches << LAUNCH((forward_step<Stage::before_2, T>), blocks, THREADS, 0, in, f, t, product, states, u, H);
    }
    return pyops_launched("gru_forward", launches.error, stream);
}

template <bool BEFORE, class T> static __global__ void backward_step(const Backward<T> b, int64_t t) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < b.in.B * b.H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / b.H, unit = i % b.H;
        if (b.in.row(t, row) < 0) {                    // after the end: no gradient; without a step, last is h0
            for (int gate = 0; gate < 4; gate++) b.step[(row * 4 + gate) * b.H + unit] = as<T>(0.0f);
            if (t == 0) b.carry[i] = given(b.dh_last, i);
            continue;
        }
        const Saved s = saved(b, t, row, unit);
        back_gates<BEFORE>(b, t, row, unit, s, s.d);
    }
}

template <class T> static __global__ void backward_reset(const Backward<T> b, const float *du, int64_t t) { // du (B,H)
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < b.in.B * b.H; i += int64_t(gridDim.x) * blockDim.x)
        back_reset(b, t, i / b.H, i % b.H, saved(b, t, i / b.H, i % b.H), du[i]);
}

template <class T>
static pyops_status backward_by_steps(const Backward<T> &b, const pyops_real *w_hh, float *du, bool before, void *stream) {
    const int64_t B = b.in.B, H = b.H;
    const unsigned blocks = grid_for(B * H, THREADS);
    const pyops_real *const w_hn = element(w_hh, 2 * H * H);
    pyops_status status = PYOPS_OK;
    // c (+)= part of the gradients of the gates x part of w_hh
    const auto product = [&](float *c, const T *d, const pyops_real *w, int64_t K, int32_t accumulate) {
        if (!status) status = pyops_gemm(real(c), real(d), w, nullptr, B, H, K, H, 4 * H, 1, H, 1, accumulate, 0, stream);
    };
    Launches launches;
    for (int64_t t = b.in.T - 1; t >= 0; t--) {
        const T *const d = b.step ? b.step : b.dgates + t * B * 4 * H;
        if (before) {
            launches << LAUNCH((backward_step<true, T>), blocks, THREADS, 0, stream_of(stream), b, t);
            product(du, d + 2 * H, w_hn, H, 0);
            launches << LAUNCH(backward_reset<T>, blocks, THREADS, 0, stream_of(stream), b, du, t);
        } else {
            launches << LAUNCH((backward_step<false, T>), blocks, THREADS, 0, stream_of(stream), b, t);
        }
        if (t == 0 && !b.dh0) break;
        if (!before) product(b.carry, d + 3 * H, w_hn, H, 1);
        product(b.carry, d, w_hh, 2 * H, 1);
    }
    if (b.dh0) launches << cudaMemcpyAsync(b.dh0, b.carry, B * H * sizeof(float), cudaMemcpyDeviceToDevice, stream_of(stream));
    return status ? status : pyops_launched("gru_backward", launches.error, stream);
}

// ---- kernels after the steps -------------------------------------------------------------------------------------------
// The biases of the input (3H), of r and z (2H), and of n (H), whose gradient is the sum of H columns from `n` on.  NULL: not
// wanted.
template <class T>
static __global__ void add_bias_gradients(float *db_ih, float *db_rz, float *db_n, const T *dgates, int64_t rows, int64_t H,
                                          int64_t n) {
    const int64_t column = blockIdx.x * int64_t(COLUMNS) + threadIdx.x, columns = n + H;
    const float sum = column_sum(dgates, rows, 4 * H, column, columns);
    if (threadIdx.y || column >= columns) return;
    if (db_ih && column < 3 * H) db_ih[column] += sum;
    if (db_rz && column < 2 * H) db_rz[column] += sum;
    if (db_n && column >= n) db_n[column - n] += sum;
}

// Write zeros after the end of each sequence.  The steps there were computed like all others; no other row depends on them.
template <class T>
static __global__ void clear_rest(T *h, T *gates, const int32_t *lengths, int64_t steps, int64_t B, int64_t H,
                                  FaultRecord *faults) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    for (int64_t b = first; b < B && faults; b += step)
        if (lengths[b] < 0 || lengths[b] > steps) report(faults, Fault::length, Who::gru_forward, b, lengths[b], steps);
    for (int64_t i = first; i < steps * B * H; i += step) {
        const int64_t row = i / H;
        if (row / B < lengths[row % B]) continue;
        h[i] = as<T>(0.0f);
        for (int gate = 0; gate < 4; gate++) gates[(row * 4 + gate) * H + i % H] = as<T>(0.0f);
    }
}

// last (B,H), unless it is NULL: h after the last step of each packed sequence, h0 or 0 if it has none.  Only after steps that
// were launched one at a time: the kernel of all steps writes `last` itself.
template <class T> static __global__ void last_states(const Forward<T> f, int64_t H) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    check_offsets(f.in, first, step, Who::gru_forward, f.faults);
    for (int64_t i = first; i < f.in.B * H && f.last; i += step) f.last[i] = f.before(f.in.length(i / H), i / H, i % H, H);
}

// Workspace at the end: the counters of the persistent kernel, or `floats` for one step at a time.
static int64_t counters_or(int64_t floats, int64_t B) { return std::max(counter_words(B), floats); }
static int64_t rows_of(int64_t T, int64_t B, int64_t N) { return N ? N : T * B; }

static pyops_status check_weights(const char *who, bool bf16_h, const pyops_real *w_ih, const pyops_real *w_hh) {
    PYOPS_REQUIRE(bf16_h || !(is_bf16(w_ih) || is_bf16(w_hh)), "%s: w_ih or w_hh is bfloat16 and h float32, expected one type",
                  who);
    return PYOPS_OK;
}
}

// ---- the functions of the ABI ------------------------------------------------------------------------------------------
// With bfloat16 activations h and z in float32 are first.
extern "C" int64_t pyops_gru_forward_work(int64_t, int64_t B, int64_t, int64_t, int64_t H) {
    return 2 * B * H + counters_or(B * 5 * H, B);
}

extern "C" int64_t pyops_gru_backward_work(int64_t T, int64_t B, int64_t N, int64_t, int64_t H) {
    return rows_of(T, B, N) * H + B * H + counters_or(B * 5 * H, B);
}

extern "C" pyops_status pyops_gru_forward(pyops_real *h, pyops_real *gates, float *last, const pyops_real *x,
                                          const pyops_real *a, const float *h0, const int32_t *lengths, const int32_t *offsets,
                                          const pyops_real *w_ih, const pyops_real *w_hh, const float *b_ih, const float *b_hh,
                                          float *work, int64_t T, int64_t B, int64_t N, int64_t I, int64_t H,
                                          int32_t reset_before, int32_t reverse, void *stream) {
    const char *const who = "gru_forward";
    pyops_status status = check_gru(who, x, lengths, offsets, T, B, N, I, H, reverse);
    if (!status) status = check_weights(who, is_bf16(h), w_ih, w_hh);
    if (status || B == 0) return status;
    PYOPS_REQUIRE(!I == !!a, "gru_forward: I=%lld, expected 0 if a is given, else at least 1", LL(I));
    PYOPS_REQUIRE(!last || offsets, "gru_forward: last without offsets, expected NULL");
    const auto run = [&](auto type) {
        using Real = decltype(type);
        // a = x w_ih' + b_ih of all steps, stored where r, z, n will overwrite it
        const int64_t R = offsets ? N : T * B;
        if (I && R) status = pyops_gemm(gates, x, w_ih, b_ih, R, 3 * H, I, 4 * H, I, 1, 1, I, 0, 0, stream);
        if (status) return status;
        float *const state = is_bf16(h) ? work : nullptr, *const rest = state ? work + 2 * B * H : work;
        const Forward<Real> f = {elements<Real>(h),
                                 elements<Real>(gates),
                                 elements<Real>(I ? gates : a),
                                 h0,
                                 Weights<Real>(w_hh),
                                 b_hh,
                                 I ? 4 * H : 3 * H,
                                 {offsets, T, B, N, reverse != 0},
                                 reinterpret_cast<unsigned *>(rest),
                                 last,
                                 state,
                                 pyops_faults()};
        const Partition p = forward_partition<Real>(T, B, H, reset_before);
        Launches launches;
        if (p.teams) launches << launch_forward(f, p, reset_before, stream);
        else status = forward_by_steps(f, w_hh, rest, H, reset_before, stream);
        if (status) return status;
        if (offsets && !p.teams)
            launches << LAUNCH(last_states<Real>, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream), f, H);
        if (lengths)
            launches << LAUNCH(clear_rest<Real>, grid_for(T * B * H, THREADS), THREADS, 0, stream_of(stream), f.h, f.gates,
                               lengths, T, B, H, pyops_faults());
        return pyops_launched(who, launches.error, stream);
    };
    return with_type(who, run, h, gates, x, a);
}

extern "C" pyops_status pyops_gru_backward(pyops_real *dx, float *dh0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh,
                                           pyops_real *dgates, const pyops_real *dh, const float *dh_last, const pyops_real *x,
                                           const float *h0, const int32_t *lengths, const int32_t *offsets,
                                           const pyops_real *w_ih, const pyops_real *w_hh, const pyops_real *h,
                                           const pyops_real *gates, float *work, int64_t T, int64_t B, int64_t N, int64_t I,
                                           int64_t H, int32_t reset_before, int32_t reverse, void *stream) {
    const char *const who = "gru_backward";
    pyops_status status = check_gru(who, x, lengths, offsets, T, B, N, I, H, reverse);
    if (!status) status = check_weights(who, is_bf16(h), w_ih, w_hh);
    if (status || B == 0) return status;
    const int64_t R = offsets ? N : T * B;
    const bool copies_h = h0 || offsets;                // the rows of h are not shifted by one step from the rows of dgates
    float *const carry = work + R * H, *const rest = carry + B * H;
    const pyops_real *const states = is_bf16(h) ? real(reinterpret_cast<bf16 *>(work)) : real(work);

    // Sums over all steps.  The gradient of the n part of w_hh is du x h[t-1] with the reset gate after the product, and dn x
    // u with it before.  Without an h0 the first step adds nothing to dw_hh, and h contains the h[t-1] of the other steps.
    const int64_t skipped = copies_h ? 0 : B, rows = R - skipped;
    const pyops_real *const d = element(dgates, skipped * 4 * H), *const h_before = copies_h ? states : h;
    AnyProduct products[MOST_GROUPED];
    float **bias[MOST_GROUPED] = {};                    // whose gradient the product also computes
    int count = 0;
    float *db_rz = db_hh, *db_n = db_hh + 2 * H;
    const auto add_weight_gradient = [&](float *dw, float **db, const pyops_real *d, int64_t M, const pyops_real *input,
                                         int64_t N, int64_t ld, int64_t rows) {
        if (!rows) return;
        products[count] = {real(dw), d, input, nullptr, M, N, rows, N, 1, 4 * H, ld, 1, 1, 0};
        if (!skipped) products[count].row_sums = *db, bias[count] = db;         // the biases need all rows
        count++;
    };
    if (I && dx) products[count++] = {dx, dgates, w_ih, nullptr, R, I, 3 * H, I, 4 * H, 1, I, 1, 0, 0};
    if (I) add_weight_gradient(dw_ih, &db_ih, dgates, 3 * H, x, I, I, R);
    add_weight_gradient(dw_hh, &db_rz, d, 2 * H, h_before, H, H, rows);
    float *const dw_n = dw_hh + 2 * H * H;
    if (reset_before) add_weight_gradient(dw_n, &db_n, element(dgates, 2 * H), H, element(gates, 3 * H), H, 4 * H, R);
    else add_weight_gradient(dw_n, &db_n, element(d, 3 * H), H, h_before, H, H, rows);

    const auto run = [&](auto type) {
        using Real = decltype(type);
        const Partition p = backward_partition<Real>(T, B, H, reset_before);
        Real *const step = offsets && !p.teams ? reinterpret_cast<Real *>(rest + B * H) : nullptr;
        const Backward<Real> b = {dh0,
                                  elements<Real>(dgates),
                                  copies_h ? reinterpret_cast<Real *>(work) : nullptr,
                                  carry,
                                  elements<Real>(dh),
                                  dh_last,
                                  h0,
                                  Weights<Real>(w_hh),
                                  elements<Real>(h),
                                  elements<Real>(gates),
                                  lengths,
                                  {offsets, T, B, N, reverse != 0},
                                  H,
                                  reinterpret_cast<unsigned *>(rest),
                                  step};
        if (p.teams) status = pyops_launched(who, launch_backward(b, p, reset_before, stream), stream);
        else status = backward_by_steps(b, w_hh, rest, reset_before, stream);
        if (status || R == 0) return status;
        bool added[MOST_GROUPED];
        Launches launches;
        launches << any_products(products, count, stream_of(stream), added);
        for (int i = 0; i < count; i++)
            if (bias[i] && added[i]) *bias[i] = nullptr;
        const int64_t n = (reset_before ? 2 : 3) * H;
        if (db_ih || db_rz || db_n)
            launches << LAUNCH(add_bias_gradients<Real>, unsigned(blocks_for<int64_t>(n + H, COLUMNS)),
                               dim3(COLUMNS, COLUMN_THREADS), 0, stream_of(stream), db_ih, db_rz, db_n, b.dgates, R, H, n);
        return pyops_launched(who, launches.error, stream);
    };
    return with_type(who, run, dx, dgates, dh, x, h, gates);
}

// ---- one step; the caller computes the products ------------------------------------------------------------------------
namespace {
template <Stage STAGE> static __global__ void gates_forward(float *y, float *gates, const float *a, const float *product,
                                                            const float *h_prev, int64_t B, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < B * H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / H, unit = i % H;
        float *const gate = gates + row * 4 * H + unit;
        const float *const in = a + row * 3 * H + unit;
        GateInputs k = gate_inputs(in, h_prev[i], H);
        if constexpr (STAGE == Stage::after) {
            const float *const of = product + row * 3 * H + unit;
            after_gates(y + i, gate, H, k, of[0], of[H], of[2 * H]);
        }
        if constexpr (STAGE == Stage::before_1) {
            const float *const of = product + row * 2 * H + unit;
            y[i] = before_gates_1(gate, H, k, of[0], of[H]).u;
        }
        if constexpr (STAGE == Stage::before_2) {
            k.z = gate[H];
            before_gates_2(y + i, gate, H, k, product[i]);
        }
    }
}

template <Stage STAGE> static __global__ void gates_backward(float *dh, float *da, float *dp, const float *dy, const float *du,
                                                             const float *gates, const float *h_prev, int64_t B, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < B * H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / H, unit = i % H;
        const float *const gate = gates + row * 4 * H + unit;
        float *const da_of = da + row * 3 * H + unit;
        const Saved s = {gate[0], gate[H], gate[2 * H], gate[3 * H], h_prev[i], 0.0f};
        if constexpr (STAGE == Stage::before_2) {
            const GateGradients g = back_reset(s, du[i]);
            float *const dp_of = dp + row * 2 * H + unit;
            da_of[0] = dp_of[0] = g.r;
            dp_of[H] = da_of[H];
            dh[i] += g.h;
        } else {
            const GateGradients g = back_gates<STAGE == Stage::before_1>(s, dy ? dh[i] + dy[i] : dh[i]);
            da_of[H] = g.z;
            da_of[2 * H] = g.n;
            dh[i] = g.h;
            if constexpr (STAGE == Stage::before_1) {
                dp[i] = g.n;
            } else {
                float *const dp_of = dp + row * 3 * H + unit;
                da_of[0] = dp_of[0] = g.r;
                dp_of[H] = g.z;
                dp_of[2 * H] = g.u;
            }
        }
    }
}

}

extern "C" pyops_status pyops_gru_gates_forward(float *y, float *gates, const float *a, const float *product,
                                                const float *h_prev, int64_t B, int64_t H, int32_t stage, void *stream) {
    const pyops_status status = check_gru_step("gru_gates_forward", B, H, stage);
    if (status || B == 0) return status;
    const auto kernel = stage == PYOPS_GRU_AFTER ? gates_forward<Stage::after>
        : stage == PYOPS_GRU_BEFORE_1            ? gates_forward<Stage::before_1>
                                                 : gates_forward<Stage::before_2>;
    return pyops_launched(
        "gru_gates_forward",
        LAUNCH(kernel, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream), y, gates, a, product, h_prev, B, H), stream);
}

extern "C" pyops_status pyops_gru_gates_backward(float *dh, float *da, float *dp, const float *dy, const float *du,
                                                 const float *gates, const float *h_prev, int64_t B, int64_t H, int32_t stage,
                                                 void *stream) {
    const pyops_status status = check_gru_step("gru_gates_backward", B, H, stage);
    if (status || B == 0) return status;
    const auto kernel = stage == PYOPS_GRU_AFTER ? gates_backward<Stage::after>
        : stage == PYOPS_GRU_BEFORE_1            ? gates_backward<Stage::before_1>
                                                 : gates_backward<Stage::before_2>;
    return pyops_launched(
        "gru_gates_backward",
        LAUNCH(kernel, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream), dh, da, dp, dy, du, gates, h_prev, B, H),
        stream);
}
