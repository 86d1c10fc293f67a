// dispatch.cu - the text of the last error, launches, faults, and settings shared by all kernels.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include "device.h"
#include "tickets.cuh"

static thread_local char last_error[512];

extern "C" {
const char *pyops_last_error(void) { return last_error; }
int32_t pyops_abi_version(void) { return PYOPS_ABI_VERSION; }
const char *pyops_isa(void) { return "cuda"; }
const char *pyops_float32_isa(void) { return "cuda"; }
const char *pyops_bf16_isa(void) { return "cuda"; }
int32_t pyops_is_exact(void) { return 0; }
pyops_status pyops_set_exact(int32_t exact) {
    PYOPS_REQUIRE(exact == 0, "set_exact: exact=%d, expected 0: kernels of a GPU and of the CPU have different sums", exact);
    return PYOPS_OK;
}
const char *pyops_int8_isa(void) { return "cuda"; }
const char *pyops_gemm_tile(void) { return "128x128"; }
int32_t pyops_threads(void) { return 1; }
pyops_status pyops_set_threads(int32_t threads) {               // host threads: the host only launches
    PYOPS_REQUIRE(threads >= 1 && threads <= 1024, "set_threads: threads=%d, expected 1 to 1024", threads);
    return PYOPS_OK;
}
}

pyops_status pyops_fail(pyops_status code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

// ---- faults ------------------------------------------------------------------------------------------------
// The stream of faults.  The legacy stream would wait for all blocking streams of the process, e.g. of PyTorch, and invalidate
// a graph that another thread captures.
static cudaStream_t fault_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t made = nullptr;
        if (cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking) == cudaSuccess) return made;
        cudaGetLastError();
        return (cudaStream_t) nullptr;
    }();
    return stream;
}
// Clear memory and wait for completion: the next writer may be on another stream.
static cudaError_t clear(void *memory, size_t bytes) {
    const cudaError_t error = cudaMemsetAsync(memory, 0, bytes, fault_stream());
    return error == cudaSuccess ? cudaStreamSynchronize(fault_stream()) : error;
}
// Return `memory`, allocated at first use: zeros if `is_zero`.  NULL if that fails, which the next use tries again; the next
// launch must not report the error as its own.
template <class T> static T *kept(T *&memory, size_t bytes, bool is_zero) {
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    if (memory) return memory;
    T *made = nullptr;
    if (cudaMalloc(&made, bytes) == cudaSuccess && (!is_zero || clear(made, bytes) == cudaSuccess)) return memory = made;
    cudaFree(made);
    cudaGetLastError();
    return nullptr;
}

FaultRecord *pyops_faults() {
    static FaultRecord *record = nullptr;
    return kept(record, sizeof *record, true);
}

unsigned *pyops_tickets() {
    static unsigned *tickets = nullptr;
    return kept(tickets, TICKETS * sizeof *tickets, true);
}

static const char *const WHO[] = {"embedding_forward",
                                  "embedding_backward",
                                  "gather_pixels",
                                  "gather_sequences",
                                  "pixel_linear_forward",
                                  "pixel_linear_backward",
                                  "cross_entropy_forward",
                                  "linear_cross_entropy",
                                  "attention_forward",
                                  "adam",
                                  "mlp_gradients",
                                  "strided_binary_int32",
                                  "mlp_step",
                                  "attention_softmax_forward",
                                  "gru_forward",
                                  "pack_sequences",
                                  "add_positions_forward",
                                  "embedding_linear_forward",
                                  "pad_rows",
                                  "unpad_rows",
                                  "gather_rows",
                                  "rnn_forward",
                                  "scatter_rows",
                                  "embedding_positions_forward",
                                  "embedding_positions_backward",
                                  "pack_pairs"};

// Read and clear a fault; the stream must be synchronised.
pyops_status pyops_check_faults() {
    FaultRecord *record = pyops_faults(), found;
    if (!record) return PYOPS_OK;
    if (cudaMemcpyAsync(&found, record, sizeof found, cudaMemcpyDeviceToHost, fault_stream()) != cudaSuccess ||
        cudaStreamSynchronize(fault_stream()) != cudaSuccess || !found.fault)
        return PYOPS_OK;
    clear(record, sizeof *record);
    const char *who = WHO[found.who];
    const auto out_of_range = [&](const char *array) {
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: %s[%lld]=%lld, expected 0 to %lld", who, array, found.index, found.value,
                          found.limit);
    };
    const auto out_of_order = [&](const char *array) {
        const long long b = found.index;
        if (b < 0) return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: %s[0]=%lld, expected 0", who, array, found.value);
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: %s[%lld] - %s[%lld]=%lld, expected 0 to %lld", who, array, b + 1, array, b,
                          found.value, found.limit);
    };
    switch (static_cast<Fault>(found.fault)) {
    case Fault::embedding_id: return out_of_range("ids");
    case Fault::label:        return out_of_range("labels");
    case Fault::row:          return out_of_range("rows");
    case Fault::length:       return out_of_range("lengths");
    case Fault::position:     return out_of_range("positions");
    case Fault::offset:       return out_of_order("offsets");
    case Fault::q_offset:     return out_of_order("q_offsets");
    case Fault::k_offset:     return out_of_order("k_offsets");
    case Fault::step:         return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: step=%lld, expected at least 1", who, found.value);
    case Fault::last_offset:
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: offsets[%lld]=%lld, expected the number of rows, %lld", who, found.index,
                          found.value, found.limit);
    case Fault::exponent:
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: int32 to a negative power, expected exponents of at least 0 or float32",
                          who);
    case Fault::start:
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: starts[%lld]=%lld, expected at most starts[%lld]=%lld", who, found.index,
                          found.value, found.index + 1, found.limit);
    case Fault::total:
        return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: total=%lld, expected %lld, the sum of the lengths", who, found.value,
                          found.limit);
    default: return pyops_fail(PYOPS_DEVICE_ERROR, "%s: an unknown fault", who);
    }
}

pyops_status pyops_launched(const char *who, cudaError_t error, void *stream) {
    static const bool waits = [] {
        const char *value = getenv("PYOPS_SYNC");
        return value && *value && *value != '0';
    }();
    if (error == cudaSuccess && waits) {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        cudaStreamIsCapturing(stream_of(stream), &capture);
        if (capture == cudaStreamCaptureStatusNone) {
            error = cudaStreamSynchronize(stream_of(stream));
            if (error == cudaSuccess) return pyops_check_faults();
        }
    }
    if (error == cudaSuccess) return PYOPS_OK;
    cudaGetLastError();                                         // report an error only once, unless it is sticky
    return pyops_fail(error == cudaErrorMemoryAllocation ? PYOPS_NO_MEMORY : PYOPS_DEVICE_ERROR, "%s: %s", who,
                      cudaGetErrorString(error));
}

// ---- settings ------------------------------------------------------------------------------------------------
static Precision precision = Precision::fp32;
Precision pyops_precision_now() { return precision; }
extern "C" pyops_status pyops_set_precision(int32_t wanted) {
    PYOPS_REQUIRE(wanted >= 0 && wanted <= 2, "set_precision: precision=%d, expected 0 (float32), 1 (TF32) or 2 (bfloat16)",
                  wanted);
    precision = static_cast<Precision>(wanted);
    return PYOPS_OK;
}

static AttentionKernels attention = AttentionKernels::by_size;
AttentionKernels pyops_attention_now() { return attention; }
extern "C" pyops_status pyops_set_attention(int32_t kernels) {
    PYOPS_REQUIRE(kernels >= 0 && kernels <= 2, "set_attention: kernels=%d, expected 0 (by size), 1 (mma.sync) or 2 (wgmma)",
                  kernels);
    attention = static_cast<AttentionKernels>(kernels);
    return PYOPS_OK;
}

static Exchange exchange = Exchange::by_device;
Exchange pyops_exchange_now() { return exchange; }
extern "C" pyops_status pyops_set_exchange(int32_t wanted) {
    PYOPS_REQUIRE(wanted >= 0 && wanted <= 1, "set_exchange: exchange=%d, expected 0 (by device and size) or 1 (global memory)",
                  wanted);
    exchange = static_cast<Exchange>(wanted);
    return PYOPS_OK;
}

static Multicast multicast = Multicast::by_size;
Multicast pyops_multicast_now() { return multicast; }
extern "C" pyops_status pyops_set_multicast(int32_t wanted) {
    PYOPS_REQUIRE(wanted >= 0 && wanted <= 2, "set_multicast: multicast=%d, expected 0 (by size), 1 (never) or 2 (always)",
                  wanted);
    multicast = static_cast<Multicast>(wanted);
    return PYOPS_OK;
}

static int attribute(cudaDeviceAttr which) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}
int pyops_multiprocessors() {
    static const int count = attribute(cudaDevAttrMultiProcessorCount);
    return count;
}
int pyops_shared_memory() {
    static const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return bytes;
}
bool pyops_has_hopper() {
#if defined(__CUDACC__) && !defined(PYOPS_FOR_90A)      // e.g. built for 80 or 90: the code of hopper.cuh traps
    return false;
#else
    static const bool has = attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
        attribute(cudaDevAttrComputeCapabilityMinor) == 0;
    return has;
#endif
}

void *pyops_workspace(size_t bytes) {
    static void *memory = nullptr;
    return bytes <= PYOPS_WORKSPACE ? kept(memory, PYOPS_WORKSPACE, false) : nullptr;
}
