// optim.cu - zeroing, gradient norm, clipping, Adam and gradient descent over one flat buffer of all parameters; the learning
// rate schedules.
//
// Each is one pass over memory (flat.cuh) and bound by bandwidth: Adam moves 28 bytes per parameter.  Kernels read the step,
// the learning rate and the norm from memory, since a call is recorded once and replayed.
#include "adam.cuh"
#include "block.cuh"
#include "flat.cuh"
#include "index.cuh"
#include "step_log.cuh"
#include "tickets.cuh"

namespace {
// Whether the gradient is dense, or the block of element i was added to.
DEVICE bool is_touched(const int32_t *touched, int64_t i) { return !touched || touched[i / PYOPS_GRAD_BLOCK]; }

// ---- zeroing ---------------------------------------------------------------------------------------------
static constexpr int ZERO_THREADS = 256;

// A warp per 32 blocks: each lane reads and clears the word of one block, then all lanes write zeros to the touched blocks.
static __global__ void __launch_bounds__(ZERO_THREADS) zero(float *grad, int32_t *touched, int64_t n, bool whole) {
    wait_for_last_kernel();
    const int lane = threadIdx.x & 31;
    const int64_t group = (blockIdx.x * int64_t(ZERO_THREADS) + threadIdx.x) / 32 * 32, block = group + lane;
    const int32_t word = block * PYOPS_GRAD_BLOCK < n ? touched[block] : 0;
    if (word & PYOPS_TOUCHED) touched[block] = word & ~PYOPS_TOUCHED;
    for (unsigned left = __ballot_sync(ALL_LANES, word != 0); left; left &= left - 1) {
        const int64_t first = (group + __ffs(static_cast<int>(left)) - 1) * PYOPS_GRAD_BLOCK;
        if (whole && first + PYOPS_GRAD_BLOCK <= n) {
            for (int i = 4 * lane; i < PYOPS_GRAD_BLOCK; i += 128)
                *reinterpret_cast<float4 *>(grad + first + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else {
            for (int64_t i = first + lane; i < n && i < first + PYOPS_GRAD_BLOCK; i += 32) grad[i] = 0.0f;
        }
    }
}
}

extern "C" pyops_status pyops_zero_touched(float *grad, int32_t *touched, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "zero_touched: n=%lld, expected at least 0", LL(n));
    if (!touched) return pyops_fill(real(grad), n, 0.0f, stream);
    const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(blocks_for<int64_t>(n, PYOPS_GRAD_BLOCK), ZERO_THREADS));
    if (!blocks) return PYOPS_OK;
    return pyops_launched("zero_touched",
                          LAUNCH_DEPENDENT(zero, blocks, ZERO_THREADS, 0, stream_of(stream), grad, touched, n, aligned(grad)),
                          stream);
}

// ---- the norm ----------------------------------------------------------------------------------------
namespace {
// A block sums the squares of a chunk, and the last block to finish adds the sums of the chunks.  All sums are in double, since
// float32 would lose small gradients among ten million.  Their order depends only on the number of elements.
static constexpr int NORM_THREADS = 256, CHUNK = 8192;
static_assert(PYOPS_NORM_CHUNK % CHUNK == 0, "ranks share multiples of PYOPS_NORM_CHUNK, which must be whole chunks");
}
extern "C" int64_t pyops_grad_norm_work(int64_t n) { return 2 * blocks_for<int64_t>(n, CHUNK) + 1; }

namespace {
// What else the last block does for grad_norm_logged.
struct Logged {
    int64_t *step = nullptr;                // NULL: nothing
    float *log = nullptr;
    int64_t *written = nullptr;
    const float *loss = nullptr;
    const int32_t *valid = nullptr;
    int64_t capacity = 1;

    // By the thread that has computed the norm.
    __device__ __forceinline__ void operator()(float norm) const {
        if (!step) return;
        step[0]++;
        write_entry(log, written[0] % capacity, loss, valid, norm);
        written[0]++;
    }
};

// norm[0] = the root of the sum of all chunks, by one block.
DEVICE void root_of_sum(float *norm, const double *sums, int64_t chunks, double *of_warps) {
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < chunks; i += NORM_THREADS) sum += sums[i];
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) norm[0] = static_cast<float>(sqrt(sum));
}

static __global__ void __launch_bounds__(NORM_THREADS) root_of_chunks(float *norm, const double *sums, int64_t chunks) {
    wait_for_last_kernel();
    SHARED(double, of_warps, [NORM_THREADS / 32]);
    root_of_sum(norm, sums, chunks, of_warps);
}

// sums[chunk] = sum of the squares of a chunk, one per block; a thread has four loads in flight.
static_assert(CHUNK % PYOPS_GRAD_BLOCK == 0, "a chunk must be whole blocks");
static __global__ void __launch_bounds__(NORM_THREADS)
    root_of_squares(float *norm, double *sums, unsigned *ticket, const float *grad, const int32_t *touched, int64_t n,
                    bool whole, Logged logged) {
    wait_for_last_kernel();
    SHARED(double, of_warps, [NORM_THREADS / 32]);
    const float *x = grad + blockIdx.x * int64_t(CHUNK);
    const int32_t *const here = touched ? touched + blockIdx.x * int64_t(CHUNK / PYOPS_GRAD_BLOCK) : nullptr;
    const int64_t rest = n - blockIdx.x * int64_t(CHUNK);
    const int count = rest < CHUNK ? int(rest) : CHUNK;
    double sum = 0.0;
    if (whole && count == CHUNK) {
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i < CHUNK; i += 4 * NORM_THREADS) {
            if (!is_touched(here, i)) continue;
            const float4 four = *reinterpret_cast<const float4 *>(x + i);
            sum += (square(four.x) + square(four.y)) + (square(four.z) + square(four.w));
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += NORM_THREADS)
            if (is_touched(here, i)) sum += square(x[i]);
    }
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    if (!block_arrives_last(ticket, gridDim.x)) return;
    root_of_sum(norm, sums, gridDim.x, of_warps);
    if (threadIdx.x == 0) logged(norm[0]);
}

static pyops_status launch_norm(const char *who, float *norm, const float *grad, const int32_t *touched, float *work, int64_t n,
                                const Logged &logged, void *stream) {
    unsigned *const ticket = pyops_tickets();
    if (!ticket) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for counters", who);
    const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(n, CHUNK));
    return pyops_launched(who,
                          LAUNCH_DEPENDENT(root_of_squares, blocks, NORM_THREADS, 0, stream_of(stream), norm, sums_of(work),
                                           ticket, grad, touched, n, aligned(grad), logged),
                          stream);
}
}

extern "C" pyops_status pyops_grad_norm(float *norm, const float *grad, const int32_t *touched, float *work, int64_t n,
                                        void *stream) {
    PYOPS_REQUIRE(n >= 0, "grad_norm: n=%lld, expected at least 0", LL(n));
    if (n == 0) return pyops_fill(real(norm), 1, 0.0f, stream);
    return launch_norm("grad_norm", norm, grad, touched, work, n, {}, stream);
}

extern "C" pyops_status pyops_grad_norm_logged(float *norm, int64_t *step, float *log, int64_t *written, const float *grad,
                                               const int32_t *touched, const float *loss, const int32_t *valid, float *work,
                                               int64_t n, int64_t capacity, void *stream) {
    pyops_status status = check_grad_norm_logged(n, capacity);
    if (status) return status;
    if (n > 0)
        return launch_norm("grad_norm_logged", norm, grad, touched, work, n, {step, log, written, loss, valid, capacity},
                           stream);
    status = pyops_fill(real(norm), 1, 0.0f, stream);
    if (!status) status = pyops_increment(step, stream);
    return status ? status : pyops_log_step(log, written, loss, valid, norm, 1, capacity, stream);
}

extern "C" pyops_status pyops_norm_of_chunks(float *norm, const float *work, int64_t n, void *stream) {
    PYOPS_REQUIRE(n >= 0, "norm_of_chunks: n=%lld, expected at least 0", LL(n));
    return pyops_launched("norm_of_chunks",
                          LAUNCH_DEPENDENT(root_of_chunks, 1, NORM_THREADS, 0, stream_of(stream), norm,
                                           sums_of(const_cast<float *>(work)), blocks_for<int64_t>(n, CHUNK)),
                          stream);
}

// ---- clipping ---------------------------------------------------------------------------------------------------------
namespace {
DEVICE float clip_factor_at(const float *norm, float max_norm) { return norm ? clip_factor(norm[0], max_norm) : 1.0f; }

struct Clip {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    const float *norm;
    float max_norm, factor;
    __device__ bool begin() { return (factor = clip_factor_at(norm, max_norm)) != 1.0f; }
    __device__ void operator()(const float (&in)[1], float (&out)[1]) const { out[0] = factor * in[0]; }
};
}

extern "C" pyops_status pyops_clip(float *grad, const float *norm, int64_t n, float max_norm, void *stream) {
    const pyops_status status = check_max_norm("clip", n, max_norm);
    if (status) return status;
    return pyops_launched("clip", launch_flat(Clip{norm, max_norm, 1.0f}, {{grad}, {grad}}, n, stream), stream);
}

// ---- Adam ------------------------------------------------------------------------------------------------------------
namespace {
struct Adam {
    static constexpr int INPUTS = 4, OUTPUTS = 3;                              // param, m, v, grad -> param, m, v
    const float *norm, *lr;
    const int64_t *step;
    FaultRecord *faults;
    float max_norm, decoupled;
    AdamRule rule;

    // The values common to all parameters, computed by one thread per block.
    __device__ bool begin() {
        SHARED(AdamRule, common, );
        const int64_t t = step[0];
        if (t < 1) {
            if (blockIdx.x == 0 && threadIdx.x == 0) report(faults, Fault::step, Who::adam, 0, t, 0);
            return false;
        }
        if (threadIdx.x == 0) {
            rule.correct(lr[0], t);
            rule.clip = clip_factor_at(norm, max_norm);
            rule.keep = 1.0f - lr[0] * decoupled;
            common = rule;
        }
        __syncthreads();
        rule = common;
        return true;
    }
    __device__ void operator()(const float (&in)[4], float (&out)[3]) const {
#pragma unroll
        for (int a = 0; a < OUTPUTS; a++) out[a] = in[a];
        rule(out[0], out[1], out[2], in[3]);
    }
};
}

// `touched` is not used: it would save 4 of 28 bytes per parameter, and an untouched gradient reads as 0 anyway.
extern "C" pyops_status pyops_adam(float *param, float *m, float *v, const float *grad, const int32_t *, const float *norm,
                                   const int64_t *step, const float *lr, int64_t n, float max_norm, float beta1, float beta2,
                                   float eps, float weight_decay, int32_t decoupled, void *stream) {
    const pyops_status status = check_adam("adam", n, max_norm, beta1, beta2, weight_decay);
    if (status) return status;
    const AdamRule rule{beta1, beta2, eps, decoupled ? 0.0f : weight_decay, 1.0f, 0.0f, 0.0f, 1.0f};
    const Adam adam{norm, lr, step, pyops_faults(), max_norm, decoupled ? weight_decay : 0.0f, rule};
    return pyops_launched("adam", launch_flat(adam, {{param, m, v, grad}, {param, m, v}}, n, stream, true), stream);
}

// ---- gradient descent --------------------------------------------------------------------------------
namespace {
struct Descent {
    static constexpr int INPUTS = 2, OUTPUTS = 1;                              // param, grad -> param
    const float *norm, *lr;
    float max_norm, weight_decay, clip, rate;
    __device__ bool begin() {
        clip = clip_factor_at(norm, max_norm);
        rate = lr[0];
        return true;
    }
    __device__ void operator()(const float (&in)[2], float (&out)[1]) const {
        out[0] = in[0] - rate * (in[1] * clip + weight_decay * in[0]);
    }
};

struct DescentWithMomentum {
    static constexpr int INPUTS = 3, OUTPUTS = 2;                              // param, velocity, grad -> param, velocity
    Descent plain;
    const int64_t *step;
    float momentum, dampening, undamped, own, ahead;                      // own, ahead: factors of gradient and velocity
    __device__ bool begin() {
        undamped = step[0] > 1 ? 1.0f - dampening : 1.0f;
        return plain.begin();
    }
    __device__ void operator()(const float (&in)[3], float (&out)[2]) const {
        const float g = in[2] * plain.clip + plain.weight_decay * in[0], velocity = moment(momentum * in[1] + undamped * g);
        out[0] = in[0] - plain.rate * (own * g + ahead * velocity);
        out[1] = velocity;
    }
};
}

extern "C" pyops_status pyops_sgd(float *param, float *velocity, const float *grad, const float *norm, const int64_t *step,
                                  const float *lr, int64_t n, float max_norm, float momentum, float dampening,
                                  float weight_decay, int32_t nesterov, void *stream) {
    const pyops_status status = check_sgd(velocity, n, max_norm, momentum, dampening, weight_decay);
    if (status) return status;
    const Descent plain{norm, lr, max_norm, weight_decay, 1.0f, 0.0f};
    const cudaError_t error = velocity ? launch_flat(DescentWithMomentum{plain, step, momentum, dampening, 1.0f,
                                                                         nesterov ? 1.0f : 0.0f, nesterov ? momentum : 1.0f},
                                                     {{param, velocity, grad}, {param, velocity}}, n, stream)
                                       : launch_flat(plain, {{param, grad}, {param}}, n, stream);
    return pyops_launched("sgd", error, stream);
}

// ---- the average of the parameters -------------------------------------------------------------------
namespace {
struct Average {
    static constexpr int INPUTS = 2, OUTPUTS = 1;                              // average, param -> average
    const int64_t *step;
    float decay, share;
    __device__ bool begin() {
        const double t = static_cast<double>(step[0]);
        share = static_cast<float>(1.0 - fmin(static_cast<double>(decay), (1.0 + t) / (10.0 + t)));
        return true;
    }
    __device__ void operator()(const float (&in)[2], float (&out)[1]) const { out[0] = in[0] + share * (in[1] - in[0]); }
};
}

extern "C" pyops_status pyops_ema(float *average, const float *param, const int64_t *step, int64_t n, float decay,
                                  void *stream) {
    const pyops_status status = check_ema(n, decay);
    if (status) return status;
    const Average f{step, decay, 0.0f};
    return pyops_launched("ema", launch_flat(f, {{average, param}, {average}}, n, stream), stream);
}

// ---- the schedule ------------------------------------------------------------------------------------
namespace {
static __global__ void schedule(float *lr, const int64_t *step, int64_t warmup, float base) {
    wait_for_last_kernel();
    const double t = static_cast<double>(step[0]) + 1.0, w = static_cast<double>(warmup);
    lr[0] = warmup ? static_cast<float>(static_cast<double>(base) * fmin(t / w, sqrt(w / t))) : base;
}
}

extern "C" pyops_status pyops_inverse_square_root(float *lr, const int64_t *step, int64_t warmup, float base, void *stream) {
    PYOPS_REQUIRE(warmup >= 0, "inverse_square_root: warmup=%lld, expected at least 0", LL(warmup));
    return pyops_launched("inverse_square_root", LAUNCH_DEPENDENT(schedule, 1, 1, 0, stream_of(stream), lr, step, warmup, base),
                          stream);
}

namespace {
static __global__ void decaying_rate(float *lr, const int64_t *step, int64_t warmup, int64_t hold, int64_t total, float base,
                                     float final, bool linear) {
    wait_for_last_kernel();
    const int64_t s = step[0];
    double factor = 1.0;
    if (s < warmup) {
        factor = double(s + 1) / double(warmup);
    } else if (s >= hold) {
        const double x = s < total ? double(s - hold) / double(total - hold) : 1.0;
        factor = final + (1.0 - final) * (linear ? 1.0 - x : 0.5 + 0.5 * cos(M_PI * x));
    }
    lr[0] = static_cast<float>(base * factor);
}
}

extern "C" pyops_status pyops_decaying_rate(float *lr, const int64_t *step, int64_t warmup, int64_t hold, int64_t total,
                                            float base, float final, int32_t decay, void *stream) {
    const pyops_status status = check_decaying_rate(warmup, hold, total, decay);
    if (status) return status;
    return pyops_launched("decaying_rate",
                          LAUNCH_DEPENDENT(decaying_rate, 1, 1, 0, stream_of(stream), lr, step, warmup, hold, total, base,
                                           final, decay == PYOPS_DECAY_LINEAR),
                          stream);
}
