// launch.cpp - the checks of a launch, and the list of launches (EMU_LAUNCHES).
#include <dlfcn.h>
#include <cstdio>
#include <map>
#include <memory>
#include "host.h"
#include "settings.h"

namespace emu {
static std::map<const void *, size_t> allowed_shared;           // dynamic shared memory enabled by cudaFuncSetAttribute

cudaError_t set_attribute(const void *kernel, cudaFuncAttribute which, int value) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || static_cast<size_t>(value) > SHARED_MOST) return fail(cudaErrorInvalidValue);
    allowed_shared[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

static cudaError_t check(const Launch &l) {
    if (const cudaError_t error = absent()) return error;
    if (settings().major < 8) return cudaErrorNoKernelImageForDevice;           // libraries are built for 8.0 and later
    const unsigned long threads = static_cast<unsigned long>(l.block.x) * l.block.y * l.block.z;
    const unsigned long blocks = static_cast<unsigned long>(l.grid.x) * l.grid.y * l.grid.z;
    if (!threads || threads > THREADS_MOST || l.block.z > 64) return cudaErrorInvalidConfiguration;
    if (!blocks || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535) return cudaErrorInvalidConfiguration;
    const auto allowed = allowed_shared.find(l.function);
    if (l.shared > SHARED_DEFAULT && (allowed == allowed_shared.end() || l.shared > allowed->second))
        return cudaErrorInvalidValue;
    if (l.cluster < 1 || l.cluster > CLUSTER_MOST || l.grid.x % l.cluster) return cudaErrorInvalidConfiguration;
    if (l.cluster > 1 && settings().major < 9) return cudaErrorNotSupported;
    const int at_once = settings().multiprocessors * blocks_per_multiprocessor(static_cast<int>(threads), l.shared);
    if (l.start == Start::cooperative && blocks > static_cast<unsigned long>(at_once))
        return cudaErrorCooperativeLaunchTooLarge;
    return cudaSuccess;
}

// A line: the kernel, its blocks, threads per block, bytes of dynamic shared memory per block, blocks per cluster, whether it
// starts early, and its address in the library, as nm prints it.
static void list(const Launch &l) {
    static FILE *const file = fopen(settings().launches, "a");
    if (!file) die("EMU_LAUNCHES=%s: cannot be written", settings().launches);
    Dl_info library = {};
    dladdr(l.function, &library);
    const auto address = static_cast<const char *>(l.function) - static_cast<const char *>(library.dli_fbase);
    fprintf(file, "%s\t%u,%u,%u\t%u\t%zu\t%d\t%d\t%zx\n", l.name, l.grid.x, l.grid.y, l.grid.z,
            l.block.x * l.block.y * l.block.z, l.shared, l.cluster, l.start == Start::early, static_cast<size_t>(address));
    fflush(file);
}

cudaError_t launch(const Launch &what, Kernel *kernel) {
    Inside inside(runtime);
    std::shared_ptr<Kernel> owned(kernel);
    if (const cudaError_t error = check(what)) return fail(error);
    if (settings().launches) {
        list(what);
        return cudaSuccess;
    }
    return enqueue(what.stream, [what, owned] { run_grid(what, *owned); });
}
}
