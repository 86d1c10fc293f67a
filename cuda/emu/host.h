// host.h - shared by the host side of the emulator: the runtime API for memory, streams and launches.
#pragma once
#include <functional>
#include <mutex>
#include "engine.h"

namespace emu {
// Limits of a block on a device of compute capability 9.0; more than SHARED_DEFAULT requires cudaFuncSetAttribute.
constexpr int THREADS_MOST = 1024, CLUSTER_MOST = 8;
constexpr size_t SHARED_DEFAULT = 48 << 10, SHARED_MOST = 227 << 10, SHARED_IN_ALL = 228 << 10;

cudaError_t fail(cudaError_t error);            // store the error for cudaGetLastError
cudaError_t absent();                           // the reason why there is no device, or cudaSuccess

// The runtime may be called from any thread; this lock admits one at a time.
extern std::recursive_mutex runtime;
using Inside = std::lock_guard<std::recursive_mutex>;

// Enqueue work on a stream.  It runs now, later (EMU_LAZY), or during a capture at each launch of the graph.
using Work = std::function<void()>;
cudaError_t enqueue(cudaStream_t stream, Work work);
cudaError_t unsafe_while_capturing();           // an error if a stream is being captured; also invalidates that capture
void finish_all_streams();

// ---- memory ----
char *fresh_memory(size_t bytes, size_t alignment);             // filled with NaN; AddressSanitizer checks its end
void memory_back(char *p, size_t bytes, size_t alignment);
bool is_pinned(const void *p);
struct DeviceMemoryOpen {                       // while one exists, device memory is accessible (see EMU_GUARD)
    DeviceMemoryOpen();
    ~DeviceMemoryOpen();
};

// ---- launches ----
void run_grid(const Launch &what, const Kernel &kernel);
}
