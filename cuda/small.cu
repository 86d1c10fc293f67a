// small.cu - fill, axpy, scale, column sums, argmax, counters, relu, silu, gelu in two forms, concatenation with a
// context, positions, the log of steps.
//
// All are bound by memory bandwidth.  Flat arrays use flat.cuh, column sums reduce.cuh.  In the other kernels a thread takes
// four adjacent floats, or one, at a time, and accesses of a warp are coalesced.
#include <array>
#include <cmath>
#include "activation.cuh"
#include "block.cuh"
#include "flat.cuh"
#include "index.cuh"
#include "reduce.cuh"
#include "step_log.cuh"

namespace {
static constexpr int THREADS = 256;

// ---- flat arrays -------------------------------------------------------------------------------------
struct Fill {
    static constexpr int INPUTS = 0, OUTPUTS = 1;
    float value;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&)[1], float (&y)[1]) const { y[0] = value; }
};

struct Axpy {
    static constexpr int INPUTS = 2, OUTPUTS = 1;                              // y, x -> y
    const float *from;
    float alpha;
    __device__ bool begin() {
        alpha = from[0];
        return true;
    }
    __device__ void operator()(const float (&in)[2], float (&y)[1]) const { y[0] = in[0] + alpha * in[1]; }
};

struct Scale {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    const float *from;                                                         // NULL: alpha is given
    float alpha;
    __device__ bool begin() {
        if (from) alpha = from[0];
        return true;
    }
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = alpha * x[0]; }
};

struct Relu {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&x)[1], float (&y)[1]) const { y[0] = x[0] < 0.0f ? 0.0f : x[0]; } // NaN stays NaN
};

struct ReluBackward {
    static constexpr int INPUTS = 2, OUTPUTS = 1; // dy, y -> dx
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&in)[2], float (&dx)[1]) const { dx[0] = in[1] > 0.0f ? in[0] : 0.0f; }
};
}

// Launch F on arrays of either type.
template <class F> static pyops_status flat_call(const char *who, const F &f, std::array<const pyops_real *, F::INPUTS> in,
                                                 std::array<pyops_real *, F::OUTPUTS> out, int64_t n, void *stream) {
    bool mixed = false;
    for (const pyops_real *x : in) mixed |= is_bf16(x) != is_bf16(out[0]);
    PYOPS_REQUIRE(!mixed, "%s: float32 and bfloat16 activations in one call, expected one type", who);
    return with_type(
        who,
        [&](auto type) {
            using T = decltype(type);
            FlatArrays<F::INPUTS, F::OUTPUTS, T> arrays;
            for (int a = 0; a < F::INPUTS; a++) arrays.in[a] = elements<T>(in[a]);
            for (int a = 0; a < F::OUTPUTS; a++) arrays.out[a] = elements<T>(out[a]);
            return pyops_launched(who, launch_flat<T>(f, arrays, n, stream), stream);
        },
        out[0]);
}

extern "C" pyops_status pyops_fill(pyops_real *y, int64_t n, float value, void *stream) {
    PYOPS_REQUIRE(n >= 0, "fill: n=%lld, expected at least 0", LL(n));
    return flat_call("fill", Fill{value}, {}, {y}, n, stream);
}

extern "C" pyops_status pyops_axpy(pyops_real *y, const pyops_real *x, const float *alpha, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "axpy: n=%lld, expected at least 0", LL(n));
    return flat_call("axpy", Axpy{alpha, 0.0f}, {y, x}, {y}, n, stream);
}

extern "C" pyops_status pyops_scale(pyops_real *y, const pyops_real *x, const float *alpha, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "scale: n=%lld, expected at least 0", LL(n));
    return flat_call("scale", Scale{alpha, 0.0f}, {x}, {y}, n, stream);
}

extern "C" pyops_status pyops_relu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "relu_forward: n=%lld, expected at least 0", LL(n));
    return flat_call("relu_forward", Relu{}, {x}, {y}, n, stream);
}

extern "C" pyops_status pyops_relu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *y, int64_t n,
                                            void *stream) {
    PYOPS_REQUIRE(n >= 0, "relu_backward: n=%lld, expected at least 0", LL(n));
    return flat_call("relu_backward", ReluBackward{}, {dy, y}, {dx}, n, stream);
}

extern "C" pyops_status pyops_silu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "silu_forward: n=%lld, expected at least 0", LL(n));
    return flat_call("silu_forward", activations::Silu{}, {x}, {y}, n, stream);
}

extern "C" pyops_status pyops_silu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n,
                                            void *stream) {
    PYOPS_REQUIRE(n >= 0, "silu_backward: n=%lld, expected at least 0", LL(n));
    return flat_call("silu_backward", activations::SiluBackward{}, {dy, x}, {dx}, n, stream);
}

extern "C" pyops_status pyops_gelu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "gelu_forward: n=%lld, expected at least 0", LL(n));
    return flat_call("gelu_forward", activations::Gelu{}, {x}, {y}, n, stream);
}

extern "C" pyops_status pyops_gelu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n,
                                            void *stream) {
    PYOPS_REQUIRE(n >= 0, "gelu_backward: n=%lld, expected at least 0", LL(n));
    return flat_call("gelu_backward", activations::GeluBackward{}, {dy, x}, {dx}, n, stream);
}

extern "C" pyops_status pyops_gelu_tanh_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "gelu_tanh_forward: n=%lld, expected at least 0", LL(n));
    return flat_call("gelu_tanh_forward", activations::GeluTanh{}, {x}, {y}, n, stream);
}

extern "C" pyops_status pyops_gelu_tanh_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n,
                                                 void *stream) {
    PYOPS_REQUIRE(n >= 0, "gelu_tanh_backward: n=%lld, expected at least 0", LL(n));
    return flat_call("gelu_tanh_backward", activations::GeluTanhBackward{}, {dy, x}, {dx}, n, stream);
}

extern "C" pyops_status pyops_add_positions_backward(pyops_real *dx, const pyops_real *dy, int64_t n, float scale,
                                                     void *stream) {
    PYOPS_REQUIRE(n >= 0, "add_positions_backward: n=%lld, expected at least 0", LL(n));
    return flat_call("add_positions_backward", Scale{nullptr, scale}, {dy}, {dx}, n, stream);
}

// ---- another type ----------------------------------------------------------------------------------
namespace {
// n, width: elements of all rows and of a row, in packs.
template <int WIDTH, class Index, class Y, class X>
static __global__ void __launch_bounds__(THREADS)
    convert(Y *y, const X *x, Index n, Divider<Index> width, int64_t ldy, int64_t ldx) {
    wait_for_last_kernel();
    const auto row = [&](Index i) { return width.divide(i); };
    const auto column = [&](Index i) { return int64_t(WIDTH) * (i - width.divide(i) * width.divisor); };
    in_rounds<2>(
        Index(0), n, [&](Index i) { return load_reals<WIDTH>(x + row(i) * ldx + column(i)); },
        [&](Index i, const Pack<float, WIDTH> &pack) { store_reals<WIDTH>(y + row(i) * ldy + column(i), pack); });
}

template <int WIDTH, class Index, class Y, class X>
static cudaError_t launch_convert(Y *y, const X *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx, void *stream) {
    const int64_t n = R * C / WIDTH;
    return LAUNCH_DEPENDENT((convert<WIDTH, Index, Y, X>), grid_of_rounds(n, THREADS, 2), THREADS, 0, stream_of(stream), y, x,
                            Index(n), Divider<Index>(C / WIDTH), ldy, ldx);
}
}

extern "C" pyops_status pyops_convert(pyops_real *y, const pyops_real *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx,
                                      void *stream) {
    const pyops_status status = check_convert(R, C, ldy, ldx);
    if (status || R * C == 0) return status;
    const bool whole = aligned(y) && aligned(x) && C % 8 == 0 && ldy % 8 == 0 && ldx % 8 == 0;
    const auto run = [&](auto to, auto from) {
        using Y = decltype(to);
        using X = decltype(from);
        const auto launch = whole && fits_int32(R * C) ? launch_convert<8, uint32_t, Y, X>
            : fits_int32(R * C)                        ? launch_convert<1, uint32_t, Y, X>
            : whole                                    ? launch_convert<8, uint64_t, Y, X>
                                                       : launch_convert<1, uint64_t, Y, X>;
        return pyops_launched("convert", launch(elements<Y>(y), elements<X>(x), R, C, ldy, ldx, stream), stream);
    };
    return is_bf16(y) ? is_bf16(x) ? run(bf16(), bf16()) : run(bf16(), float())
        : is_bf16(x)  ? run(float(), bf16())
                      : run(float(), float());
}

// ---- column sums -------------------------------------------------------------------------------------
extern "C" pyops_status pyops_column_sums(float *y, const pyops_real *x, int64_t R, int64_t C, void *stream) {
    PYOPS_REQUIRE(R >= 0 && C >= 0, "column_sums: R=%lld C=%lld, expected at least 0", LL(R), LL(C));
    Space columns, rows;
    columns.add({C, {1, 1}});
    rows.add({R, {C}});
    return with_type(
        "column_sums",
        [&](auto type) {
            return reduce_axes<SumOf<float, double>, SumOf<double>>("column_sums", y, elements<decltype(type)>(x), columns,
                                                                    rows, false, true, stream);
        },
        x);
}

// ---- argmax: a warp for a short row, a block for a long one ------------------------------------------
namespace {
struct Candidate {
    float value;
    int32_t index;
    // The larger value wins; NaN wins over all others; among equals the first.
    __device__ bool beats(const Candidate &other) const {
        const bool nan = value != value, other_nan = other.value != other.value;
        if (nan != other_nan) return nan;
        if (nan || value == other.value) return index < other.index;
        return value > other.value;
    }
};

DEVICE Candidate best_of_warp(Candidate best) {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        const Candidate other = {__shfl_xor_sync(ALL_LANES, best.value, step), __shfl_xor_sync(ALL_LANES, best.index, step)};
        if (other.beats(best)) best = other;
    }
    return best;
}

static __global__ void __launch_bounds__(THREADS) argmax(int32_t *index, const float *x, int64_t R, int64_t C, int threads) {
    SHARED(Candidate, of_warps, [THREADS / 32]);
    const int thread = threadIdx.x % threads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t r = blockIdx.x * int64_t(THREADS / threads) + threadIdx.x / threads;
    constexpr Candidate NONE = {-INFINITY, INT32_MAX}; // loses to everything
    constexpr int AT_ONCE = 4;
    Candidate best = NONE;
    for (int64_t from = thread; r < R && from < C; from += AT_ONCE * threads) {
        Candidate here[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t c = from + j * threads;
            here[j] = c < C ? Candidate{x[r * C + c], static_cast<int32_t>(c)} : NONE;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (here[j].beats(best)) best = here[j];
    }
    best = best_of_warp(best);
    if (threads > 32) {
        if (lane == 0) of_warps[warp] = best;
        __syncthreads();
        if (warp == 0) best = best_of_warp(lane < THREADS / 32 ? of_warps[lane] : NONE);
    }
    if (r < R && thread == 0) index[r] = best.index;
}
}

extern "C" pyops_status pyops_argmax(int32_t *index, const float *x, int64_t R, int64_t C, void *stream) {
    PYOPS_REQUIRE(R >= 0 && C >= 1 && C <= INT32_MAX, "argmax: R=%lld C=%lld, expected R >= 0, C from 1 to 2^31 - 1", LL(R),
                  LL(C));
    if (R == 0) return PYOPS_OK;
    const int threads = C <= 1024 ? 32 : THREADS;
    const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(R, THREADS / threads));
    return pyops_launched("argmax", LAUNCH(argmax, blocks, THREADS, 0, stream_of(stream), index, x, R, C, threads), stream);
}

// ---- concatenation with a context --------------------------------------------------------------------
namespace {
// E, H, width: sizes of a row of x, of the context and of y = E + H, in packs.
template <int WIDTH, class Index, class T>
static __global__ void __launch_bounds__(THREADS)
    concat(T *y, const T *x, const T *context, Index n, Index E, Index H, Divider<Index> width, Divider<Index> batch) {
    const auto load = [&](Index i) {
        const Index r = width.divide(i), c = i - r * width.divisor, b = r - batch.divide(r) * batch.divisor;
        return load_reals<WIDTH>(c < E ? x + int64_t(WIDTH) * (r * E + c) : context + int64_t(WIDTH) * (b * H + c - E));
    };
    const auto store = [&](Index i, const Pack<float, WIDTH> &value) { store_reals(y + int64_t(WIDTH) * i, value); };
    in_rounds<4>(Index(0), n, load, store);
}

// A thread takes one element of a sequence over all steps, eight at once.  It copies them (dx) or adds them in order
// (dcontext).
template <class Index, class Element>
static __global__ void __launch_bounds__(THREADS)
    split(Element *dx, Element *dcontext, const Element *dy, int64_t T, Index B, Index E, Index H, Divider<Index> width) {
    constexpr int STEPS = 8;
    const Index n = B * (E + H), i = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    const Index b = width.divide(i), c = i - b * width.divisor;
    float sum = 0.0f;
    for (int64_t from = 0; from < T; from += STEPS) {
        float value[STEPS];
#pragma unroll
        for (int t = 0; t < STEPS; t++) value[t] = from + t < T ? as_float(dy[(from + t) * n + i]) : 0.0f;
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            if (from + t >= T) break;
            if (c < E) dx[((from + t) * B + b) * E + c] = as<Element>(value[t]);
            else sum += value[t];
        }
    }
    if (c >= E) dcontext[b * H + c - E] = as<Element>(sum);
}

template <int WIDTH, class Index, class T>
static cudaError_t launch_concat(T *y, const T *x, const T *context, int64_t n, int64_t B, int64_t E, int64_t H, void *stream) {
    return LAUNCH((concat<WIDTH, Index, T>), grid_of_rounds(n / WIDTH, THREADS, 4), THREADS, 0, stream_of(stream), y, x,
                  context, Index(n / WIDTH), Index(E / WIDTH), Index(H / WIDTH), Divider<Index>((E + H) / WIDTH),
                  Divider<Index>(B));
}
}

extern "C" pyops_status pyops_concat_context_forward(pyops_real *y, const pyops_real *x, const pyops_real *context, int64_t T,
                                                     int64_t B, int64_t E, int64_t H, void *stream) {
    PYOPS_REQUIRE(T >= 0 && B >= 0 && E >= 0 && H >= 0,
                  "concat_context_forward: T=%lld B=%lld E=%lld H=%lld, expected at least 0", LL(T), LL(B), LL(E), LL(H));
    const int64_t n = T * B * (E + H);
    if (n == 0) return PYOPS_OK;
    const auto launch = [&](auto type) {
        using Element = decltype(type);
        constexpr int WIDTH = WIDEST<Element>;
        const bool whole = E % WIDTH == 0 && H % WIDTH == 0 && aligned(y) && aligned(x) && aligned(context);
        const auto run = whole && fits_int32(n) ? launch_concat<WIDTH, uint32_t, Element>
            : fits_int32(n)                     ? launch_concat<1, uint32_t, Element>
                                                : launch_concat<1, uint64_t, Element>;
        return pyops_launched("concat_context_forward",
                              run(elements<Element>(y), elements<Element>(x), elements<Element>(context), n, B, E, H, stream),
                              stream);
    };
    return with_type("concat_context_forward", launch, y, x, context);
}

namespace {
template <class Index, class Element>
static cudaError_t launch_split(Element *dx, Element *dcontext, const Element *dy, int64_t T, int64_t B, int64_t E, int64_t H,
                                void *stream) {
    const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(B * (E + H), THREADS));
    return LAUNCH((split<Index, Element>), blocks, THREADS, 0, stream_of(stream), dx, dcontext, dy, T, Index(B), Index(E),
                  Index(H), Divider<Index>(E + H));
}
}

extern "C" pyops_status pyops_concat_context_backward(pyops_real *dx, pyops_real *dcontext, const pyops_real *dy, int64_t T,
                                                      int64_t B, int64_t E, int64_t H, void *stream) {
    PYOPS_REQUIRE(T >= 0 && B >= 0 && E >= 0 && H >= 0,
                  "concat_context_backward: T=%lld B=%lld E=%lld H=%lld, expected at least 0", LL(T), LL(B), LL(E), LL(H));
    const int64_t n = B * (E + H);
    if (n == 0) return PYOPS_OK;
    const auto launch = [&](auto type) {
        using Element = decltype(type);
        const auto run = fits_int32(n) ? launch_split<uint32_t, Element> : launch_split<uint64_t, Element>;
        return pyops_launched(
            "concat_context_backward",
            run(elements<Element>(dx), elements<Element>(dcontext), elements<Element>(dy), T, B, E, H, stream), stream);
    };
    return with_type("concat_context_backward", launch, dx, dcontext, dy);
}

// ---- positions ---------------------------------------------------------------------------------------
namespace {
// n, step (of all sequences) and row: sizes in packs.  positions may be NULL.
template <int WIDTH, class Index, class T>
static __global__ void __launch_bounds__(THREADS)
    add_positions(T *y, const T *x, const float *table, const int32_t *positions, int64_t longest, float scale, Index n,
                  Divider<Index> step, Divider<Index> row, FaultRecord *faults) {
    struct Read { Pack<float, WIDTH> x, table; };
    const auto position = [&](Index i, Index r) {
        if (!positions) return int64_t(step.divide(i));
        const int64_t given = positions[r];
        if (given >= 0 && given < longest) return given;
        report(faults, Fault::position, Who::add_positions_forward, r, given, longest - 1);
        return int64_t(-1);
    };
    const auto load = [&](Index i) {
        const Index r = row.divide(i), c = i - r * row.divisor;
        const int64_t t = position(i, r);
        return Read{load_reals<WIDTH>(x + int64_t(WIDTH) * i),
                    t < 0 ? Pack<float, WIDTH>{} : load_reals<WIDTH>(table + int64_t(WIDTH) * (t * row.divisor + c))};
    };
    const auto store = [&](Index i, const Read &read) {
        Pack<float, WIDTH> sum;
#pragma unroll
        for (int w = 0; w < WIDTH; w++) sum.at[w] = scale * read.x.at[w] + read.table.at[w];
        store_reals(y + int64_t(WIDTH) * i, sum);
    };
    in_rounds<2>(Index(0), n, load, store);
}

template <int WIDTH, class Index, class T>
static cudaError_t launch_positions(T *y, const T *x, const float *table, const int32_t *positions, int64_t longest,
                                    float scale, int64_t n, int64_t B, int64_t D, void *stream) {
    return LAUNCH((add_positions<WIDTH, Index, T>), grid_of_rounds(n / WIDTH, THREADS, 2), THREADS, 0, stream_of(stream), y, x,
                  table, positions, longest, scale, Index(n / WIDTH), Divider<Index>(B * D / WIDTH), Divider<Index>(D / WIDTH),
                  pyops_faults());
}
}

extern "C" pyops_status pyops_add_positions_forward(pyops_real *y, const pyops_real *x, const float *table,
                                                    const int32_t *positions, int64_t T, int64_t B, int64_t D, int64_t longest,
                                                    float scale, void *stream) {
    const pyops_status status = check_positions(positions, T, B, D, longest);
    const int64_t n = T * B * D;
    if (status || n == 0) return status;
    const auto launch = [&](auto type) {
        using Element = decltype(type);
        constexpr int WIDTH = WIDEST<Element>;
        const bool whole = D % WIDTH == 0 && aligned(y) && aligned(x) && aligned(table);
        const auto run = whole && fits_int32(n) ? launch_positions<WIDTH, uint32_t, Element>
            : fits_int32(n)                     ? launch_positions<1, uint32_t, Element>
                                                : launch_positions<1, uint64_t, Element>;
        return pyops_launched(
            "add_positions_forward",
            run(elements<Element>(y), elements<Element>(x), table, positions, longest, scale, n, B, D, stream), stream);
    };
    return with_type("add_positions_forward", launch, y, x);
}

// ---- single numbers ----------------------------------------------------------------------------------
namespace {
static __global__ void count(int64_t *counter, int64_t *now) { // now may be NULL
    wait_for_last_kernel();
    counter[0]++;
    if (now) now[0] = counter[0];
}
}

extern "C" pyops_status pyops_increment(int64_t *counter, void *stream) {
    return pyops_launched("increment", LAUNCH_DEPENDENT(count, 1, 1, 0, stream_of(stream), counter, nullptr), stream);
}

extern "C" pyops_status pyops_tick(int64_t *now, int64_t *counter, void *stream) {
    return pyops_launched("tick", LAUNCH_DEPENDENT(count, 1, 1, 0, stream_of(stream), counter, now), stream);
}

namespace {
static __global__ void write_entries(float *log, int64_t *written, const float *loss, const int32_t *valid, const float *norm,
                                     int64_t steps, int64_t capacity) {
    wait_for_last_kernel();
    const int64_t first = written[0];
    for (int64_t k = threadIdx.x; k < steps; k += blockDim.x)
        write_entry(log, (first + k) % capacity, loss + k, valid ? valid + k : nullptr, norm ? norm[k] : 0.0f);
    __syncthreads(); // all have read written[0]
    if (threadIdx.x == 0) written[0] = first + steps;
}
}

extern "C" pyops_status pyops_log_step(float *log, int64_t *written, const float *loss, const int32_t *valid, const float *norm,
                                       int64_t steps, int64_t capacity, void *stream) {
    const pyops_status status = check_log_step(steps, capacity);
    if (status) return status;
    const unsigned threads = steps < 256 ? static_cast<unsigned>(steps) : 256;
    const cudaError_t error = LAUNCH_DEPENDENT(write_entries, 1, threads, 0, stream_of(stream), log, written, loss, valid, norm,
                                               steps, capacity);
    return pyops_launched("log_step", error, stream);
}

// ---- the peak of the machine -------------------------------------------------------------------------
namespace {
// Fill the device with threads; each has CHAINS independent sums, which hides the latency of an addition.
static constexpr int CHAINS = 16;

static __global__ void __launch_bounds__(THREADS) fma_loop(float *sink, int64_t n) {
    float sum[CHAINS], total = 0.0f;
    for (int j = 0; j < CHAINS; j++) sum[j] = static_cast<float>(threadIdx.x + j);
    for (int64_t i = 0; i < n; i++)
#pragma unroll
        for (int j = 0; j < CHAINS; j++) sum[j] = fmaf(sum[j], 0.999f, 0.001f);
    for (int j = 0; j < CHAINS; j++) total += sum[j];
    if (total < 0.0f) sink[0] = total; // never true (they converge to 1): prevents dead code elimination
}
}

extern "C" pyops_status pyops_fma_loop(double *flops, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "fma_loop: n=%lld, expected at least 0", LL(n));
    float *sink = static_cast<float *>(pyops_workspace(sizeof(float)));
    if (!sink) return pyops_fail(PYOPS_NO_MEMORY, "fma_loop: no memory");
    const unsigned blocks = static_cast<unsigned>(pyops_multiprocessors()) * (2048 / THREADS);
    flops[0] = 2.0 * CHAINS * THREADS * blocks * static_cast<double>(n); // in host memory
    return pyops_launched("fma_loop", LAUNCH(fma_loop, blocks, THREADS, 0, stream_of(stream), sink, n), stream);
}
