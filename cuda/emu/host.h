// host.h - what the host's half of the emulator shares: the runtime API over memory, streams and launches.
#pragma once
#include <functional>
#include <mutex>
#include "engine.h"

namespace emu {
// Limits of a block, as on a device of capability 9.0; a block gets more than SHARED_DEFAULT only where the kernel asks.
constexpr int THREADS_MOST = 1024, CLUSTER_MOST = 8;
constexpr size_t SHARED_DEFAULT = 48 << 10, SHARED_MOST = 227 << 10, SHARED_IN_ALL = 228 << 10;

cudaError_t fail(cudaError_t error);            // remembered for cudaGetLastError
cudaError_t absent();                           // why there is no device, or cudaSuccess

// The runtime may be called from any thread; one at a time is inside.
extern std::recursive_mutex runtime;
using Inside = std::lock_guard<std::recursive_mutex>;

// Give a stream something to do: now, later (EMU_LAZY), or each time that the graph runs which the stream is captured into.
using Work = std::function<void()>;
cudaError_t tell(cudaStream_t stream, Work work);
cudaError_t unsafe_while_capturing();           // an error if some stream is captured now, and that capture is spoilt
void finish_all_streams();

// ---- memory ----
char *fresh_memory(size_t bytes, size_t alignment);             // full of NaNs; AddressSanitizer knows its end
void memory_back(char *p, size_t bytes, size_t alignment);
bool is_pinned(const void *p);
struct DeviceMemoryOpen {                       // while one lives, device memory may be touched (see EMU_GUARD)
    DeviceMemoryOpen();
    ~DeviceMemoryOpen();
};

// ---- launches ----
void run_grid(const Launch &what, const Kernel &kernel);
}
