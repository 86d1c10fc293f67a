// device.cu - a device, its memory, streams and graphs: the implementation of device.h.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include "device.h"
#include "internal.cuh"

static cudaStream_t stream_at(uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
static void *at(uint64_t address) { return reinterpret_cast<void *>(address); }

// Convert an error of the runtime into a status and a text that begins with `what`.
static pyops_status check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return PYOPS_OK;
    cudaGetLastError();                     // clear it, so that the next call does not report it again
    return pyops_fail(error == cudaErrorMemoryAllocation ? PYOPS_NO_MEMORY : PYOPS_DEVICE_ERROR, "%s: %s", what,
                      cudaGetErrorString(error));
}
#define TRY(call, what) \
    do { \
        const pyops_status tried = check((call), (what)); \
        if (tried) return tried; \
    } while (0)

extern "C" {

// ---- the device ---------------------------------------------------------------------------------------------
pyops_status pyops_device_count(int32_t *count) {
    int found = 0;
    const cudaError_t error = cudaGetDeviceCount(&found);
    *count = error == cudaSuccess ? found : 0;
    return check(error, "no GPU can be used");
}

// An empty kernel: its launch succeeds if this build contains code for the device.
static __global__ void nothing() {}

pyops_status pyops_device_open(int32_t device) {
    TRY(cudaSetDevice(device), "device_open");
    const cudaError_t error = LAUNCH(nothing, 1, 1, 0, nullptr);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion) {
        int32_t major = 0, minor = 0, multiprocessors = 0;
        pyops_device_properties(&major, &minor, &multiprocessors);
        cudaGetLastError();
        return pyops_fail(PYOPS_DEVICE_ERROR, "%s has compute capability %d.%d, and this library was not built for it",
                          pyops_device_name(), major, minor);
    }
    TRY(error, "device_open");
    if (!pyops_faults() || !pyops_workspace(0))     // allocate now, so that the error does not appear in a kernel
        return pyops_fail(PYOPS_NO_MEMORY, "device_open: %s has less than %d MiB of free memory", pyops_device_name(),
                          int(PYOPS_WORKSPACE >> 20));
    return check(cudaStreamSynchronize(nullptr), "device_open");
}

const char *pyops_device_name(void) {
    static cudaDeviceProp properties;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "?";
    return properties.name;
}

pyops_status pyops_device_properties(int32_t *major, int32_t *minor, int32_t *multiprocessors) {
    int device = 0, value = 0;
    TRY(cudaGetDevice(&device), "device_properties");
    TRY(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, device), "device_properties");
    *major = value;
    TRY(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMinor, device), "device_properties");
    *minor = value;
    *multiprocessors = pyops_multiprocessors();
    return PYOPS_OK;
}

pyops_status pyops_device_memory(int64_t *free, int64_t *total) {
    size_t unused = 0, all = 0;
    TRY(cudaMemGetInfo(&unused, &all), "device_memory");
    *free = static_cast<int64_t>(unused);
    *total = static_cast<int64_t>(all);
    return PYOPS_OK;
}

// ---- memory -------------------------------------------------------------------------------------------------
pyops_status pyops_device_malloc(uint64_t *address, int64_t bytes) {
    PYOPS_REQUIRE(bytes >= 0, "device_malloc: bytes=%lld, expected at least 0", LL(bytes));
    void *made = nullptr;
    TRY(cudaMalloc(&made, bytes ? static_cast<size_t>(bytes) : 1), "device_malloc");
    *address = reinterpret_cast<uint64_t>(made);
    return PYOPS_OK;
}

pyops_status pyops_device_free(uint64_t address) { return check(cudaFree(at(address)), "device_free"); }

// A ring of pinned memory.  A copy from pageable memory would block the host until the device has reached it; a copy from
// pinned memory is only enqueued.  An event after each piece shows when it may be overwritten.
namespace {
constexpr size_t PIECE = size_t(1) << 20;
constexpr int PIECES = 8;
struct Ring {
    char *memory = nullptr;
    cudaEvent_t free[PIECES];
    int next = 0;
    std::mutex lock;                        // a thread that loads data may copy while another trains, except during a capture

    cudaError_t open() {
        if (memory) return cudaSuccess;
        cudaError_t error = cudaSuccess;
        for (int i = 0; i < PIECES && error == cudaSuccess; i++)
            error = cudaEventCreateWithFlags(&free[i], cudaEventDisableTiming);
        return error == cudaSuccess ? cudaMallocHost(reinterpret_cast<void **>(&memory), PIECES * PIECE) : error;
    }
} ring;
}

pyops_status pyops_device_upload(uint64_t to, const void *from, int64_t bytes, void *stream) {
    PYOPS_REQUIRE(bytes >= 0, "device_upload: bytes=%lld, expected at least 0", LL(bytes));
    std::lock_guard<std::mutex> guard(ring.lock);
    TRY(ring.open(), "device_upload");
    for (size_t done = 0; done < static_cast<size_t>(bytes); done += PIECE) {
        const size_t n = static_cast<size_t>(bytes) - done < PIECE ? static_cast<size_t>(bytes) - done : PIECE;
        char *piece = ring.memory + ring.next * PIECE;
        TRY(cudaEventSynchronize(ring.free[ring.next]), "device_upload");       // returns at once if nothing was recorded yet
        memcpy(piece, static_cast<const char *>(from) + done, n);
        TRY(cudaMemcpyAsync(static_cast<char *>(at(to)) + done, piece, n, cudaMemcpyHostToDevice, stream_of(stream)),
            "device_upload");
        TRY(cudaEventRecord(ring.free[ring.next], stream_of(stream)), "device_upload");
        ring.next = (ring.next + 1) % PIECES;
    }
    return PYOPS_OK;
}

pyops_status pyops_device_download(void *to, uint64_t from, int64_t bytes, void *stream) {
    PYOPS_REQUIRE(bytes >= 0, "device_download: bytes=%lld, expected at least 0", LL(bytes));
    TRY(cudaMemcpyAsync(to, at(from), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_of(stream)),
        "device_download");
    return pyops_stream_synchronize(stream);
}

pyops_status pyops_device_copy(uint64_t to, uint64_t from, int64_t bytes, void *stream) {
    PYOPS_REQUIRE(bytes >= 0, "device_copy: bytes=%lld, expected at least 0", LL(bytes));
    return check(cudaMemcpyAsync(at(to), at(from), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_of(stream)),
                 "device_copy");
}

pyops_status pyops_device_zero(uint64_t to, int64_t bytes, void *stream) {
    PYOPS_REQUIRE(bytes >= 0, "device_zero: bytes=%lld, expected at least 0", LL(bytes));
    return check(cudaMemsetAsync(at(to), 0, static_cast<size_t>(bytes), stream_of(stream)), "device_zero");
}

// ---- streams and graphs -------------------------------------------------------------------------------------
pyops_status pyops_stream_create(uint64_t *stream) {
    cudaStream_t made = nullptr;
    TRY(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "stream_create");
    *stream = reinterpret_cast<uint64_t>(made);
    return PYOPS_OK;
}

pyops_status pyops_stream_destroy(uint64_t stream) { return check(cudaStreamDestroy(stream_at(stream)), "stream_destroy"); }

pyops_status pyops_stream_synchronize(void *stream) {
    TRY(cudaStreamSynchronize(stream_of(stream)), "stream_synchronize");
    return pyops_check_faults();
}

pyops_status pyops_stream_wait(void *stream, void *other) {
    static std::mutex lock;                 // one event is enough: a wait refers to the latest record at the time of the call
    static cudaEvent_t event = nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (!event) TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "stream_wait");
    TRY(cudaEventRecord(event, stream_of(other)), "stream_wait");
    return check(cudaStreamWaitEvent(stream_of(stream), event, 0), "stream_wait");
}

pyops_status pyops_graph_begin(void *stream) {
    pyops_faults();                         // allocate first: not allowed during a capture
    pyops_workspace(0);
    return check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "graph_begin");
}

pyops_status pyops_graph_end(uint64_t *graph, void *stream) {
    cudaGraph_t captured = nullptr;
    cudaGraphExec_t ready = nullptr;
    TRY(cudaStreamEndCapture(stream_of(stream), &captured), "graph_end");
    const cudaError_t error = cudaGraphInstantiate(&ready, captured, 0);
    cudaGraphDestroy(captured);
    TRY(error, "graph_end");
    *graph = reinterpret_cast<uint64_t>(ready);
    return PYOPS_OK;
}

pyops_status pyops_graph_launch(uint64_t graph, void *stream) {
    return check(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(graph), stream_of(stream)), "graph_launch");
}

pyops_status pyops_graph_free(uint64_t graph) {
    return check(cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(graph)), "graph_free");
}
}

// ---- kernels that start before the last one has ended -----------------------------------------------------------
// The code that runs must contain the wait, which code of capability 8.0 that a driver translates does not; and a captured
// graph must keep the edge between two kernels that overlap, which began with CUDA 12.3.
static bool can_start_early() {
    int32_t major = 0, minor = 0, multiprocessors = 0;
    if (pyops_device_properties(&major, &minor, &multiprocessors) || major < 9) return false;
#ifdef __CUDACC__
    int driver = 0;
    cudaFuncAttributes code = {};
    return CUDART_VERSION >= 12030 && cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
        cudaFuncGetAttributes(&code, nothing) == cudaSuccess && code.ptxVersion >= 90;
#else
    return true;
#endif
}
static bool asked_for_in_environment() {
    const char *value = getenv("PYOPS_EARLY_START");
    return value && !strcmp(value, "1") && can_start_early();        // environment.py refuses other values than 0 and 1
}
enum class EarlyStart : int32_t { by_environment, never, always };
static EarlyStart early_start_now = EarlyStart::by_environment;
bool pyops_starts_early() {
    static const bool asked_for = asked_for_in_environment();
    return early_start_now == EarlyStart::by_environment ? asked_for : early_start_now == EarlyStart::always;
}

extern "C" pyops_status pyops_set_early_start(int32_t wanted) {
    PYOPS_REQUIRE(wanted >= 0 && wanted <= 2,
                  "set_early_start: early_start=%d, expected 0 (by PYOPS_EARLY_START), 1 (never) or 2 (always)", wanted);
    PYOPS_REQUIRE(wanted != 2 || can_start_early(),
                  "set_early_start: early_start=2, expected 0 or 1: a device of compute capability 9.0, code for it in this "
                  "library and CUDA 12.3 are required");
    early_start_now = static_cast<EarlyStart>(wanted);
    return PYOPS_OK;
}
