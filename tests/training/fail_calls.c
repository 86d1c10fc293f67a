/* Preloaded: makes the n-th allocation by libpyops, or the n-th call for a file, fail.  fail_at(n) and fail_file_at(n) count
   from 1; 0: none.  allocations(), file_calls(): calls since then.  Threads may call at the same time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static int at, calls, file_at, file_count;

void fail_at(int n) {
    at = n;
    calls = 0;
}

int allocations(void) { return calls; }

void fail_file_at(int n) {
    file_at = n;
    file_count = 0;
}

int file_calls(void) { return file_count; }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libpyops") &&
        __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) == at)
        return ENOMEM;
    *memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    return *memory ? 0 : ENOMEM;
}

/* Whether the n-th call for a regular file is this one. */
static int fails(int descriptor, int code) {
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) || !S_ISREG(status.st_mode) ||
        __atomic_add_fetch(&file_count, 1, __ATOMIC_SEQ_CST) != file_at)
        return 0;
    errno = code;
    return 1;
}

ssize_t write(int descriptor, const void *bytes, size_t count) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return fails(descriptor, ENOSPC) ? -1 : next(descriptor, bytes, count);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t place) {
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (!next) next = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    return fails(descriptor, ENOSPC) ? -1 : next(descriptor, bytes, count, place);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off64_t place) {
    static void *(*next)(void *, size_t, int, int, int, off64_t);
    if (!next) next = (void *(*)(void *, size_t, int, int, int, off64_t))dlsym(RTLD_NEXT, "mmap64");
    return fails(descriptor, ENOMEM) ? MAP_FAILED : next(address, length, protection, flags, descriptor, place);
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t place) {
    return mmap64(address, length, protection, flags, descriptor, place);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t place) {
    return pwrite64(descriptor, bytes, count, place);
}
