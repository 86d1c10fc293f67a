/* dispatch.c - choice of kernels, number of threads, text of the last error, scratch.
 *
 * The kernels are chosen once, when the library is loaded: the best table supported by CPU and operating system
 * (__builtin_cpu_supports checks XCR0 too), or the one named by PYOPS_ISA.  An unsupported request falls back to generic;
 * pyops_isa() returns the table in use, and the Python side raises an error if it differs from the request.
 */
#include <omp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "internal.h"

static _Thread_local char last_error[512];

const char *pyops_last_error(void) { return last_error; }
int32_t pyops_abi_version(void) { return PYOPS_ABI_VERSION; }
const char *pyops_isa(void) { return pyops_active()->name; }
const char *pyops_gemm_tile(void) { return pyops_active()->tile; }

pyops_status pyops_fail(pyops_status code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last_error, sizeof last_error, fmt, ap);
    va_end(ap);
    return code;
}

/* ---- kernels ---- */
/* Set in a test build with AVX-512 files compiled for AVX2: the same tiles on a CPU without AVX-512. */
#ifndef PYOPS_LOWERED
#define PYOPS_LOWERED 0
#endif
static const pyops_kernels *choose(void) {
    const char *requested = getenv("PYOPS_ISA");
    if (requested && !*requested) requested = NULL;
#if defined __x86_64__ || defined __i386__
    __builtin_cpu_init();
#define KERNEL(isa, test) \
    if ((PYOPS_LOWERED || (test)) && (!requested || !strcmp(requested, #isa))) return &pyops_kernels_##isa;
#include "kernels/kernels.inc"
#undef KERNEL
#else
    (void)requested;
#endif
    return &pyops_kernels_generic;
}

static const pyops_kernels *active;
__attribute__((constructor)) static void init_kernels(void) { active = choose(); }
const pyops_kernels *pyops_active(void) { return active; }

/* ---- threads ---- */
int32_t pyops_threads(void) { return omp_get_max_threads(); }

pyops_status pyops_set_threads(int32_t threads) {
    PYOPS_REQUIRE(threads >= 1 && threads <= 1024, "set_threads: threads=%d, expected 1 to 1024", threads);
    omp_set_num_threads(threads);
    return PYOPS_OK;
}

/* ---- scratch ---- */
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

float *pyops_scratch(size_t floats) {
    static _Thread_local size_t have;
    pthread_once(&scratch_once, make_scratch_key);
    void *buffer = pthread_getspecific(scratch_key);
    if (have >= floats) return buffer;
    free(buffer);
    have = 0;
    pthread_setspecific(scratch_key, NULL);
    if (posix_memalign(&buffer, 64, floats * sizeof(float))) return NULL;
    if (pthread_setspecific(scratch_key, buffer)) {
        free(buffer);
        return NULL;
    }
    have = floats;
    return buffer;
}
