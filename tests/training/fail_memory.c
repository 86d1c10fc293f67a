/* Preloaded: makes the n-th allocation by libpyops fail.  fail_at(n) counts from 1; 0: none.  allocations(): calls since then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int at, calls;

void fail_at(int n) {
    at = n;
    calls = 0;
}

int allocations(void) { return calls; }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libpyops") &&
        ++calls == at)
        return ENOMEM;
    *memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    return *memory ? 0 : ENOMEM;
}
