// device.cpp - the device as the host sees it: settings, properties, errors.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include "host.h"
#include "sanitizer.h"
#include "settings.h"

namespace emu {
static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    const long value = strtol(text, &end, 10);
    if (*end) die("%s=%s: not a number", name, text);
    return value;
}

static Settings read_settings() {
    Settings s = {};
    const char *order = getenv("EMU_ORDER");
    if (!order || !*order || !strcmp(order, "forward")) {
        s.order = Settings::Order::forward;
    } else if (!strcmp(order, "reverse")) {
        s.order = Settings::Order::reverse;
    } else {
        s.order = Settings::Order::shuffled;
        char *end;
        s.seed = static_cast<unsigned>(strtoul(order, &end, 10));
        if (*end) die("EMU_ORDER=%s: not forward, reverse or a number", order);
    }
    s.workers = static_cast<int>(number("EMU_WORKERS", 1));
    s.lazy = number("EMU_LAZY", 0) != 0;
    s.guard = number("EMU_GUARD", 0) != 0;
    s.stack = static_cast<size_t>(number("EMU_STACK", has_asan() || has_tsan() ? 256 << 10 : 64 << 10));
    s.patience = static_cast<double>(number("EMU_PATIENCE", 60));
    s.launches = getenv("EMU_LAUNCHES");
    s.devices = static_cast<int>(number("EMU_DEVICES", 1));
    s.major = 9;
    const char *capability = getenv("EMU_CAPABILITY");
    if (capability && *capability && sscanf(capability, "%d.%d", &s.major, &s.minor) != 2)
        die("EMU_CAPABILITY=%s: not a number such as 8.0", capability);
    s.multiprocessors = static_cast<int>(number("EMU_MULTIPROCESSORS", 4));
    s.memory = static_cast<size_t>(number("EMU_MEMORY", sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE)));
    return s;
}

const Settings &settings() {
    static const Settings read = read_settings();
    return read;
}

// ---- errors -------------------------------------------------------------------------------------------------
static thread_local cudaError_t last_error;

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t absent() {
    if (settings().devices < 0) return fail(cudaErrorInsufficientDriver);
    return settings().devices ? cudaSuccess : fail(cudaErrorNoDevice);
}

void needs_hopper(const char *what) {
    if (settings().major != 9 || settings().minor != 0)
        die("%s requires a device of capability 9.0, this one has %d.%d", what, settings().major, settings().minor);
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
#define ERROR(name, text) {name, #name, text},
    ERROR(cudaSuccess, "no error") ERROR(cudaErrorInvalidValue, "invalid argument") ERROR(
        cudaErrorMemoryAllocation, "out of memory") ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument")
        ERROR(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") ERROR(
            cudaErrorInvalidDeviceFunction, "invalid device function") ERROR(cudaErrorNoDevice,
                                                                             "no CUDA-capable device is detected")
            ERROR(cudaErrorInvalidDevice, "invalid device ordinal") ERROR(
                cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")
                ERROR(cudaErrorUnsupportedPtxVersion, "the provided PTX was compiled with an unsupported toolchain.") ERROR(
                    cudaErrorInvalidResourceHandle, "invalid resource handle") ERROR(cudaErrorNotReady, "device not ready")
                    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered") ERROR(
                        cudaErrorLaunchOutOfResources,
                        "too many resources requested for launch") ERROR(cudaErrorLaunchFailure, "unspecified launch failure")
                        ERROR(cudaErrorCooperativeLaunchTooLarge,
                              "too many blocks in cooperative launch") ERROR(cudaErrorNotSupported, "operation not supported")
                            ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing") ERROR(
                                cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")
                                ERROR(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream")
                                    ERROR(cudaErrorStreamCaptureUnjoined,
                                          "capture sequence contains a fork that was not joined to the primary stream")
                                        ERROR(cudaErrorStreamCaptureImplicit,
                                              "operation would make the legacy stream depend on a capturing blocking stream")
                                            ERROR(cudaErrorUnknown, "unknown error")
#undef ERROR
};
}
using namespace emu;

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
    for (const auto &known : errors)
        if (known.error == error) return known.name;
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (const auto &known : errors)
        if (known.error == error) return known.text;
    return "unrecognized error code";
}

// ---- devices ------------------------------------------------------------------------------------------------
cudaError_t cudaGetDeviceCount(int *count) {
    *count = settings().devices > 0 ? settings().devices : 0;
    return absent();
}
static thread_local int current_device;

static cudaError_t check_device(int device) {
    if (const cudaError_t error = absent()) return error;
    return device >= 0 && device < settings().devices ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaSetDevice(int device) {
    const cudaError_t error = check_device(device);
    if (!error) current_device = device;
    return error;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return absent();
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = settings().devices < 0 ? 0 : 12080;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 12080;
    return cudaSuccess;
}

static cudaDeviceProp properties() {
    cudaDeviceProp p = {};
    snprintf(p.name, sizeof p.name, "emulated device");
    p.totalGlobalMem = settings().memory;
    p.sharedMemPerBlock = SHARED_DEFAULT;
    p.sharedMemPerBlockOptin = SHARED_MOST;
    p.sharedMemPerMultiprocessor = SHARED_IN_ALL;
    p.warpSize = 32;
    p.maxThreadsPerBlock = THREADS_MOST;
    p.maxThreadsPerMultiProcessor = 2048;
    p.multiProcessorCount = settings().multiprocessors;
    p.major = settings().major;
    p.minor = settings().minor;
    p.l2CacheSize = 50 << 20;
    return p;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
    if (const cudaError_t error = check_device(device)) return error;
    *found = properties();
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
    if (const cudaError_t error = check_device(device)) return error;
    const cudaDeviceProp p = properties();
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:               *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock:          *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize:                         *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount:              *value = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize:                      *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:      *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor:           *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor:           *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrCooperativeLaunch:                *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:     *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    default:                                          return fail(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
int emu::clusters_at_once(int cluster, int threads, size_t shared) {
    return settings().multiprocessors * blocks_per_multiprocessor(threads, shared) / cluster;
}
int emu::blocks_per_multiprocessor(int threads, size_t shared) {
    if (threads < 1 || threads > THREADS_MOST || shared > SHARED_MOST) return 0;
    const size_t by_threads = static_cast<size_t>(2048 / ((threads + 31) / 32 * 32));
    const size_t by_shared = SHARED_IN_ALL / (shared + 1024);
    const size_t fewer = by_threads < by_shared ? by_threads : by_shared;
    return static_cast<int>(fewer < 32 ? fewer : 32);
}
