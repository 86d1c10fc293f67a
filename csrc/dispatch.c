/* dispatch.c - choice of kernels, number of threads, text of the last error, scratch.
 *
 * The kernels are chosen once, when the library is loaded: the kernels of the best instruction set that CPU and operating system
 * support (__builtin_cpu_supports checks XCR0 too), or of the one named by PYOPS_ISA.  An unsupported request falls back to
 * generic; pyops_isa(), pyops_bf16_isa() and pyops_int8_isa() return the kernels in use, and the Python side raises an error if
 * none is the request.
 */
#if defined __x86_64__ || defined __i386__
#include <cpuid.h>
#endif
#include <omp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "internal.h"

static _Thread_local char last_error[512];

const char *pyops_last_error(void) { return last_error; }
int32_t pyops_abi_version(void) { return PYOPS_ABI_VERSION; }
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
/* Whether CPU and operating system have AMX's tiles of a type, a bit of cpuid, and this process may use them. */
enum { AMX_BF16 = 1 << 22, AMX_INT8 = 1 << 25 };
static inline int has_amx(unsigned type) {
#if defined __linux__ && defined __x86_64__
    enum { TILES_IN_XCR0 = 3 << 17, AMX_TILE = 1 << 24, TILE_DATA = 18, REQUEST_PERMISSION = 0x1023 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILES_IN_XCR0) != TILES_IN_XCR0 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (d & type) && (d & AMX_TILE) && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    (void)type;
    return 0;
#endif
}

/* Whether the CPU has AVX-VNNI; compilers do not agree on a name for __builtin_cpu_supports. */
static inline int has_avx2_vnni(void) {
#if defined __x86_64__ || defined __i386__
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#else
    return 0;
#endif
}

/* Of float32, bfloat16, float32 with equal bits everywhere, and float32 for large products with AMX. */
enum { FLOAT32, BF16, EXACT, SPLIT, TABLES };
static pyops_kernels tables[TABLES];
static const char *int8_name;

static void set_micro_kernel(pyops_kernels *table, const pyops_micro_kernel *micro) {
    table->micro = *micro;
    if (micro->MR) table->MR = micro->MR, table->MC = micro->MC;
}

/* exact: a table without fused multiply-adds, or NULL */
static void use(const pyops_kernels *table, const pyops_micro_kernel *bf16, const pyops_kernels *exact) {
    for (int i = 0; i < TABLES; i++) tables[i] = *table;
    set_micro_kernel(&tables[BF16], bf16);
    const int splits = bf16 == &pyops_bf16_amx_bf16 && pyops_float32_amx_bf16.gemm;
    for (int i = 0; i < TABLES; i++) tables[i].may_split = splits;
    if (splits) { /* one block of K, so that a packed b fits in L2: L3 would have to deliver it again for every block of rows */
        set_micro_kernel(&tables[SPLIT], &pyops_float32_amx_bf16);
        tables[SPLIT].KB = PYOPS_KC, tables[SPLIT].B = 1024 * PYOPS_KC;
    }
#if PYOPS_BUGGIFY
    for (int i = 0; i < TABLES; i++) {
        pyops_kernels *const t = &tables[i];
        t->MC = PYOPS_TUNED(table_mc, t->MC, t->MR, t->MC, t->MR);
        t->KB = PYOPS_TUNED(table_kb, t->KB, t->KC, t->KB, t->KC);
        t->B = PYOPS_TUNED(table_b, t->B, pyops_max(t->KB, pyops_steps(t, t->KB)) * 512, t->B, 1);
    }
#endif
    if (!exact) return;
    tables[EXACT].is_exact = 1;
    tables[EXACT].micro = exact->micro;
#define ROW(result, name, arguments) tables[EXACT].name = exact->name;
    PYOPS_FLOAT_ROWS(ROW)
#undef ROW
}

/* The table without fused multiply-adds that belongs to a table. */
#ifdef __x86_64__
#define EXACT_OF(table) EXACT_OF_##table
#define EXACT_OF_generic &pyops_kernels_generic
#if PYOPS_WITHOUT_EXACT /* a library for tests of all else, which compiles faster */
#define EXACT_OF_avx2 NULL
#define EXACT_OF_avx512 NULL
#else
#define EXACT_OF_avx2 &pyops_kernels_exact_avx2
#define EXACT_OF_avx512 &pyops_kernels_exact_avx512
#endif
#else
#define EXACT_OF(table) NULL
#endif

static void choose_tables(const char *requested) {
#if defined __x86_64__ || defined __i386__
    __builtin_cpu_init();
#define KERNEL(isa, table, test) \
    if ((PYOPS_LOWERED || (test)) && (!requested || !strcmp(requested, #isa))) \
        return use(&pyops_kernels_##table, &pyops_bf16_##isa, EXACT_OF(table));
#include "kernels/kernels.inc"
#undef KERNEL
#else
    (void)requested;
#endif
    use(&pyops_kernels_generic, &pyops_bf16_generic, EXACT_OF(generic));
}

#if defined __x86_64__ || defined __i386__
/* The best extension for int8 of a table.   requested: the only one that may be used, or NULL.   name: becomes its name */
static pyops_int8_kernel *int8_extension(const char *table, const char *requested, const char **name) {
    const struct {
        const char *name, *table;
        pyops_int8_kernel *kernel;
        int is_here;
    } extensions[] = {
        {"amx_int8", "avx512", pyops_int8_amx_int8, PYOPS_LOWERED || has_amx(AMX_INT8)},
        {"avx512_vnni", "avx512", pyops_int8_avx512_vnni,
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")},
        {"avx2_vnni", "avx2", pyops_int8_avx2_vnni, has_avx2_vnni()},
    };
    for (size_t i = 0; i < sizeof extensions / sizeof *extensions; i++)
        if (extensions[i].kernel && extensions[i].is_here && !strcmp(extensions[i].table, table) &&
            (!requested || !strcmp(requested, extensions[i].name))) {
            *name = extensions[i].name;
            return extensions[i].kernel;
        }
    return NULL;
}
#endif

/* Use an extension for int8 with the tables of AVX2 and AVX-512, unless a table was requested by its own name. */
static void choose(void) {
    const char *requested = getenv("PYOPS_ISA");
    if (requested && !*requested) requested = NULL;
    const char *const extension = requested ? strchr(requested, '_') : "";
    const int is_int8 = extension && (!strcmp(extension, "_vnni") || !strcmp(extension, "_int8"));
    choose_tables(!is_int8 ? requested : !strcmp(requested, "avx2_vnni") ? "avx2" : "avx512");
    int8_name = tables[0].name;
#if defined __x86_64__ || defined __i386__
    pyops_int8_kernel *const kernel = extension ? int8_extension(tables[0].name, is_int8 ? requested : NULL, &int8_name) : NULL;
    const pyops_kernels *const generic = &pyops_kernels_generic; /* VNNI has the same rows */
    for (int i = 0; i < TABLES && kernel; i++) {
        tables[i].int8_group = tables[i].screen_group = kernel;
        tables[i].coarse = PYOPS_BYTE_ZERO - 1, tables[i].flip = generic->flip;
        tables[i].int8_size = generic->int8_size, tables[i].int8_row = generic->int8_row;
    }
#endif
}

const char *pyops_int8_isa(void) { return int8_name; }
const char *pyops_isa(void) { return tables[0].name; }
const char *pyops_float32_isa(void) { return tables[FLOAT32].may_split ? tables[SPLIT].micro.name : tables[FLOAT32].name; }
const char *pyops_bf16_isa(void) { return tables[BF16].micro.name; }

static int32_t current; /* the number of a table */
__attribute__((constructor)) static void init_kernels(void) { choose(); }
static int32_t current_table(void) { return __atomic_load_n(&current, __ATOMIC_RELAXED); }
const pyops_kernels *pyops_active(void) { return &tables[current_table()]; }

const pyops_kernels *pyops_in_float32(void) { return &tables[pyops_is_exact() ? EXACT : FLOAT32]; }
const pyops_kernels *pyops_in_bf16(void) { return &tables[BF16]; }

/* A test compares a product of 40 columns with columns alone. */
#define LEAST_SIDE PYOPS_TUNED(split_side, 64, 48, 128, 1)
#define LEAST_FACTOR PYOPS_TUNED(split_factor, 16384, 1, 1 << 16, 1)
const pyops_kernels *pyops_for_product(const pyops_kernels *k, int64_t N, int64_t K) {
    const int splits = k == &tables[FLOAT32] && k->may_split && N >= LEAST_SIDE && K >= LEAST_SIDE && N * K >= LEAST_FACTOR;
    return splits ? &tables[SPLIT] : k;
}

pyops_status pyops_set_precision(int32_t wanted) {
    PYOPS_REQUIRE(wanted == 0 || wanted == 2, "set_precision: precision=%d, expected 0 (float32) or 2 (bfloat16) on the CPU",
                  wanted);
    PYOPS_REQUIRE(wanted == 0 || !pyops_is_exact(),
                  "set_precision: precision=2, expected 0 with exact kernels, or set_exact(0) first");
    if (!pyops_is_exact()) __atomic_store_n(&current, wanted ? BF16 : FLOAT32, __ATOMIC_RELAXED);
    return PYOPS_OK;
}

pyops_status pyops_set_exact(int32_t exact) {
    PYOPS_REQUIRE(exact == 0 || exact == 1, "set_exact: exact=%d, expected 0 or 1", exact);
    PYOPS_REQUIRE(!exact || current_table() != BF16, "set_exact: exact=1, expected 0 with bfloat16, or set_precision(0) first");
    PYOPS_REQUIRE(!exact || tables[EXACT].is_exact,
                  "set_exact: exact=1, expected 0: this library has exact kernels for x86-64 alone");
    if (exact || pyops_is_exact()) __atomic_store_n(&current, exact ? EXACT : FLOAT32, __ATOMIC_RELAXED);
    return PYOPS_OK;
}

int32_t pyops_is_exact(void) { return current_table() == EXACT; }

/* ---- threads ---- */
int32_t pyops_threads(void) { return omp_get_max_threads(); }

pyops_status pyops_set_threads(int32_t threads) {
    PYOPS_REQUIRE(threads >= 1 && threads <= 1024, "set_threads: threads=%d, expected 1 to 1024", threads);
    omp_set_num_threads(threads);
    return PYOPS_OK;
}

/* ---- constants of a test build ---- */
#if PYOPS_BUGGIFY
static uint64_t mixed(uint64_t x) { /* SplitMix64 */
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

/* PYOPS_BUGGIFY: a seed; 0: all constants are as small as possible; unset: all are usual */
int64_t pyops_drawn(const char *name, int64_t usual, int64_t least, int64_t most, int64_t unit) {
    static int64_t seed = -2; /* the same for every thread that reads it */
    if (seed == -2) {
        const char *const text = getenv("PYOPS_BUGGIFY");
        seed = text && *text ? atoll(text) : -1;
    }
    if (seed <= 0) return seed ? usual : least;
    uint64_t x = mixed((uint64_t)seed);
    for (; *name; name++) x = mixed(x + (unsigned char)*name);
    const uint64_t units = (uint64_t)((most - least) / unit);
    const int64_t drawn = least + (int64_t)(mixed(x + 1) % (units + 1)) * unit;
    return (int64_t[]){usual, least, most, drawn}[x % 4];
}
#endif

/* ---- scratch ---- */
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static float *scratch_of(size_t floats) {
    static _Thread_local size_t have;
    pthread_once(&scratch_once, make_scratch_key);
    void *buffer = pthread_getspecific(scratch_key);
    if (buffer && have >= floats) return buffer;
    free(buffer);
    have = 0;
    pthread_setspecific(scratch_key, NULL);
    const size_t bytes = (floats ? floats : 1) * sizeof(float); /* of 0 bytes the address may be NULL */
    if (posix_memalign(&buffer, 64, bytes)) return NULL;
    if (pthread_setspecific(scratch_key, buffer)) {
        free(buffer);
        return NULL;
    }
    have = floats;
    return buffer;
}

#if PYOPS_BUGGIFY
/* NaN, and aligned as its largest type only. */
float *pyops_scratch(size_t floats) {
    const int64_t offset = PYOPS_TUNED(scratch_offset, 0, 0, 14, 2);
    float *const buffer = scratch_of(floats + (size_t)offset);
    if (buffer) memset(buffer, 0xFF, (floats + (size_t)offset) * sizeof(float));
    return buffer ? buffer + offset : NULL;
}
#else
float *pyops_scratch(size_t floats) { return scratch_of(floats); }
#endif
