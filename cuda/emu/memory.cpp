// memory.cpp - device memory, pinned memory and shared memory.
//
// All memory is initialised to 0xFF bytes, NaN as floats and -1 as integers, so that missing writes show in the results.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>
#include "block.h"
#include "host.h"
#include "sanitizer.h"
#include "settings.h"

namespace emu {
static void *pages(size_t bytes) {              // a direct system call, which TSan does not intercept
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = reinterpret_cast<void *>(syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    if (p == MAP_FAILED) die("no memory");
    return p;
}

void *own_memory(size_t bytes) { return has_tsan() ? pages(bytes) : aligned_alloc(64, (bytes + 63) / 64 * 64); }
void own_memory_back(void *p) {
    if (!has_tsan()) free(p);
}

// At least 64 bytes after the end are poisoned.
static size_t with_margin(size_t bytes, size_t alignment) { return (bytes + 64 + alignment - 1) / alignment * alignment; }

char *fresh_memory(size_t bytes, size_t alignment) {
    char *p = static_cast<char *>(aligned_alloc(alignment, with_margin(bytes, alignment)));
    if (!p) return nullptr;
    if (!settings().launches) fill(p, 0xff, bytes);     // no kernel reads it: pages that nothing writes take no memory
    if (has_asan()) __asan_poison_memory_region(p + bytes, with_margin(bytes, alignment) - bytes);
    return p;
}
void memory_back(char *p, size_t bytes, size_t alignment) {
    if (has_asan()) __asan_unpoison_memory_region(p, with_margin(bytes, alignment));
    free(p);
}

// ---- shared memory ----------------------------------------------------------------------------------------------
// Under TSan it comes from an arena that returns no address twice within a launch: reuse of memory by a later block would look
// like a race.
constexpr size_t ARENA = size_t(4) << 30;
static std::atomic<size_t> arena_used;

char *new_shared(size_t bytes, size_t alignment) {
    if (!has_tsan()) return fresh_memory(bytes, alignment);
    static char *const arena = static_cast<char *>(pages(ARENA));
    const size_t at = arena_used.fetch_add((bytes + 2047) / 1024 * 1024);
    if (at + bytes > ARENA) die("too much shared memory in one launch for a run under ThreadSanitizer");
    fill(arena + at, 0xff, bytes);
    return arena + at;
}
void shared_back(char *p, size_t bytes, size_t alignment) {
    if (!has_tsan()) memory_back(p, bytes, alignment);
}
void reuse_shared_arena() { arena_used = 0; }

void *shared_variable(const void *key, size_t bytes) {
    Block *b = block;
    size_t in_all = b->grid->launch.shared;
    for (SharedVariable &v : b->shared_variables) {
        if (v.key == key) return v.memory;
        in_all += v.bytes;
    }
    if (in_all + bytes > SHARED_MOST) die("more than %zu bytes of shared memory", SHARED_MOST);
    char *memory = new_shared(bytes, 128);
    b->shared_variables.add({key, memory, bytes});
    return memory;
}

unsigned shared_offset(const void *address) {
    const ptrdiff_t offset = static_cast<const char *>(address) - current->dynamic_shared;
    if (offset < 0 || static_cast<size_t>(offset) > block->grid->launch.shared)
        die("an address that is not in dynamic shared memory");
    return static_cast<unsigned>(offset);
}

void *of_block(const void *address, int rank) {
    if (rank < 0 || rank >= cluster_size()) die("block %d of a cluster of %d", rank, cluster_size());
    Block *own = block, *other = own->cluster ? own->cluster->blocks[rank] : own;
    const char *p = static_cast<const char *>(address);
    const ptrdiff_t offset = p - own->thread[0].dynamic_shared;
    if (offset >= 0 && static_cast<size_t>(offset) < own->grid->launch.shared) return other->thread[0].dynamic_shared + offset;
    for (SharedVariable &v : own->shared_variables) {
        if (p < v.memory || p >= v.memory + v.bytes) continue;
        for (SharedVariable &w : other->shared_variables)
            if (w.key == v.key) return w.memory + (p - v.memory);
        die("block %d of the cluster has not reached this shared variable yet", rank);
    }
    die("an address that is not in shared memory");
}

// ---- device memory ----------------------------------------------------------------------------------------------
// With EMU_GUARD=1 each array has its own pages, which are inaccessible except during kernels and copies.
static std::map<char *, size_t> device_arrays, pinned_arrays;           // address and size
static size_t device_bytes;
static int openings;

static const size_t PAGE = static_cast<size_t>(sysconf(_SC_PAGESIZE));
static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static void set_access(int access) {
    for (const auto &[address, bytes] : device_arrays) mprotect(address, whole_pages(bytes), access);
}
DeviceMemoryOpen::DeviceMemoryOpen() {
    if (settings().guard && openings++ == 0) set_access(PROT_READ | PROT_WRITE);
}
DeviceMemoryOpen::~DeviceMemoryOpen() {
    if (settings().guard && --openings == 0) set_access(PROT_NONE);
}

static const std::pair<char *const, size_t> *array_with(const std::map<char *, size_t> &arrays, const void *address) {
    char *p = const_cast<char *>(static_cast<const char *>(address));
    auto next = arrays.upper_bound(p);
    if (next == arrays.begin()) return nullptr;
    --next;
    return p < next->first + next->second ? &*next : nullptr;
}
bool is_pinned(const void *p) { return array_with(pinned_arrays, p) != nullptr; }

// What the instruction did that faulted.
static const char *attempt([[maybe_unused]] void *context) {
#if defined(__x86_64__)
    constexpr int WRITE = 2;                    // a bit of the error code of a page fault
    return static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_ERR] & WRITE ? "writes" : "reads";
#else
    return "accesses";
#endif
}
static void report_fault(int, siginfo_t *info, void *context) {
    if (block && block->is_early && array_with(device_arrays, info->si_addr))
        die("%s device memory before wait_for_last_kernel", attempt(context));
    if (array_with(device_arrays, info->si_addr)) {
        static const char text[] = "emulator: the host touched device memory\n";
        if (write(2, text, sizeof text - 1)) {}
    }
    signal(SIGSEGV, SIG_DFL);                   // the access is retried and ends the process
}

static void report_faults() {
    [[maybe_unused]] static const bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = report_fault;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGSEGV, &action, nullptr) == 0;
    }();
}

static char *new_array(size_t bytes) {
    if (!settings().guard) return fresh_memory(bytes, PAGE);
    report_faults();
    char *p = static_cast<char *>(pages(whole_pages(bytes)));
    fill(p, 0xff, bytes);
    if (openings == 0) mprotect(p, whole_pages(bytes), PROT_NONE);
    return p;
}

// Every word of the parameters that is an address in device memory counts as a pointer, also inside a struct.
static std::vector<char *> closed;              // the beginnings of arrays
void close_arrays(const Kernel &kernel) {
    report_faults();
    size_t bytes;
    const char *parameters = kernel.parameters(&bytes);
    for (size_t at = 0; at + sizeof(char *) <= bytes; at += sizeof(char *)) {
        char *p;
        memcpy(&p, parameters + at, sizeof p);
        if (const auto *array = array_with(device_arrays, p)) closed.push_back(array->first);
    }
    for (char *array : closed) mprotect(array, whole_pages(device_arrays[array]), PROT_NONE);
}
void open_arrays() {
    for (char *array : closed) mprotect(array, whole_pages(device_arrays[array]), PROT_READ | PROT_WRITE);
    closed.clear();
}

// Whether an access of `bytes` fits in its array.  Unknown addresses are accepted: tests pass host memory.
static bool fits(const void *p, size_t bytes) {
    const auto *array = array_with(device_arrays, p);
    return !array || static_cast<size_t>(array->first + array->second - static_cast<const char *>(p)) >= bytes;
}

static void move(void *to, const void *from, size_t bytes) {
    DeviceMemoryOpen open;
    check(const_cast<void *>(from), bytes, false);
    check(to, bytes, true);
    memmove(to, from, bytes);
}
}
using namespace emu;

cudaError_t cudaMalloc(void **address, size_t bytes) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    *address = nullptr;
    if (!bytes) return cudaSuccess;
    if (bytes > settings().memory - device_bytes) return fail(cudaErrorMemoryAllocation);
    char *made = new_array(bytes);
    if (!made) return fail(cudaErrorMemoryAllocation);
    device_arrays[made] = bytes;
    device_bytes += bytes;
    *address = made;
    return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
    Inside inside(runtime);
    if (!address) return cudaSuccess;
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    finish_all_streams();
    const auto found = device_arrays.find(static_cast<char *>(address));
    if (found == device_arrays.end()) return fail(cudaErrorInvalidValue);
    if (settings().guard) munmap(found->first, whole_pages(found->second));
    else memory_back(found->first, found->second, PAGE);
    device_bytes -= found->second;
    device_arrays.erase(found);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    *total = settings().memory;
    *free = *total - device_bytes;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    char *made = fresh_memory(bytes ? bytes : 1, 4096);
    if (!made) return fail(cudaErrorMemoryAllocation);
    pinned_arrays[made] = bytes ? bytes : 1;
    *address = made;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *address) {
    Inside inside(runtime);
    if (!address) return cudaSuccess;
    finish_all_streams();
    const auto found = pinned_arrays.find(static_cast<char *>(address));
    if (found == pinned_arrays.end()) return fail(cudaErrorInvalidValue);
    memory_back(found->first, found->second, 4096);
    pinned_arrays.erase(found);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (!fits(to, bytes) || !fits(from, bytes)) return fail(cudaErrorInvalidValue);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &capture);
    if (settings().lazy && kind == cudaMemcpyHostToDevice && capture == cudaStreamCaptureStatusNone && !is_pinned(from)) {
        // The driver copies from pageable memory before it returns; the device copies from pinned memory some time later.
        std::string copied(static_cast<const char *>(from), bytes);
        return enqueue(stream, [to, copied] { move(to, copied.data(), copied.size()); });
    }
    return enqueue(stream, [=] { move(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    Inside inside(runtime);
    if (const cudaError_t error = absent()) return error;
    if (!fits(to, bytes)) return fail(cudaErrorInvalidValue);
    return enqueue(stream, [=] {
        DeviceMemoryOpen open;
        check(to, bytes, true);
        memset(to, value, bytes);
    });
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    Inside inside(runtime);
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return error ? error : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    Inside inside(runtime);
    if (const cudaError_t error = unsafe_while_capturing()) return error;
    return cudaMemsetAsync(to, value, bytes, nullptr);
}
