/* run_calls.c - run kernel calls from a file on a build of the CPU library, and compare the results with those in the file.
 *
 *     run_calls LIBRARY FILE
 *
 * It prints each difference and a summary.  Exit status 1 if a result differs, 2 if the library or the file cannot be used.
 * Compiled with -DUNDEFINED, it leaves the memory of workspaces undefined, for valgrind; else it has NaN.
 * tests/helpers/recorded_calls.py writes the file and describes it.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pyops.h"

enum { INTEGER, REAL, NIL, ARRAY };         /* of recorded_calls.py */
enum { EXACT, FLOAT, DOUBLE };
enum { MOST = 64, AXES = 16, GUARD = 64 };  /* ranges and arguments of a call; axes of an array; bytes around a range */

/* Of the largest element of a result.  Compilers order sums and fuse multiplications and additions differently. */
static const double TOLERANCE[] = {[FLOAT] = 2e-5, [DOUBLE] = 1e-12};

static const char *at, *end;

static void stop(const char *problem) {
    fprintf(stderr, "run_calls: error: %s\n", problem);
    exit(2);
}

static const char *bytes(int64_t n) {
    const char *start = at;
    const int64_t padded = (n + 7) / 8 * 8;
    if (n < 0 || padded > end - at) stop("the file of calls is truncated; record it again");
    at += padded;
    return start;
}

static int64_t number(void) {
    int64_t value;
    memcpy(&value, bytes(sizeof value), sizeof value);
    return value;
}

static int64_t below(int64_t most, const char *problem) {
    const int64_t value = number();
    if (value < 0 || value > most) stop(problem);
    return value;
}

typedef struct {
    char *memory;
    int64_t size;
} range;

static double real(const char *p, int type) {
    float single;
    double result;
    if (type == DOUBLE) memcpy(&result, p, sizeof result);
    else memcpy(&single, p, sizeof single), result = single;
    return result;
}

/* Compare an array with the expected elements.  Return the number of those that differ, and set the largest difference, as a
 * fraction of the largest element. */
static int64_t compare(const char *array, int type, int64_t item, int axes, const int64_t *shape, const int64_t *strides,
                       double *worst) {
    int64_t count = 1, failed = 0, index[AXES] = {0};
    for (int d = 0; d < axes; d++) count *= shape[d];
    const char *want = bytes(count * item);
    double largest = 0.0;
    *worst = 0.0;
    for (int64_t i = 0; type != EXACT && i < count; i++) {
        const double x = fabs(real(want + i * item, type));
        if (isfinite(x) && x > largest) largest = x;
    }
    for (int64_t i = 0; i < count; i++) {
        const char *got = array;
        for (int d = 0; d < axes; d++) got += index[d] * strides[d];
        if (memcmp(got, want + i * item, (size_t)item)) {
            const double x = type == EXACT ? 0.0 : real(got, type), y = type == EXACT ? 1.0 : real(want + i * item, type);
            const double share = type == EXACT ? INFINITY : x == y || (isnan(x) && isnan(y)) ? 0.0 : fabs(x - y) / largest;
            if (!(share <= *worst)) *worst = share;
            failed += type == EXACT || !(share <= TOLERANCE[type]);
        }
        for (int d = axes - 1; d >= 0 && ++index[d] == shape[d]; d--) index[d] = 0;
    }
    return failed;
}

int main(int argc, char **argv) {
    if (argc != 3) stop("usage: run_calls LIBRARY FILE");
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) stop(dlerror());
    int64_t (*const kernel_number)(const char *) = (int64_t (*)(const char *))dlsym(library, "pyops_kernel_number");
    const char *(*const last_error)(void) = (const char *(*)(void))dlsym(library, "pyops_last_error");
    pyops_status (*const replay)(const pyops_action *, const pyops_value *, double *, int64_t *, int64_t, int64_t,
                                 void *) = (pyops_status (*)(const pyops_action *, const pyops_value *, double *, int64_t *,
                                                             int64_t, int64_t, void *))dlsym(library, "pyops_replay");
    if (!kernel_number || !last_error || !replay) stop("not the library of pyops");
    FILE *file = fopen(argv[2], "rb");
    if (!file || fseek(file, 0, SEEK_END)) stop("the file of calls cannot be read");
    const long size = ftell(file);
    char *contents = malloc((size_t)size + 1);
    rewind(file);
    if (!contents || fread(contents, 1, (size_t)size, file) != (size_t)size) stop("the file of calls cannot be read");
    fclose(file);
    at = contents, end = contents + size;

    int64_t calls = 0, failed = 0;
    double most = 0.0;
    while (at < end) {
        char name[128] = "";
        const int64_t length = below(sizeof name - 1, "a name is too long");
        memcpy(name, bytes(length), (size_t)length);
        range ranges[MOST];
        const int64_t n_ranges = below(MOST, "too many ranges of memory");
        for (int64_t i = 0; i < n_ranges; i++) {
            const int64_t n = number(), has_contents = number();
            /* the work size of this library may be larger than that of the one that recorded the call */
            ranges[i].size = has_contents ? n : 2 * n + 4096;
            const size_t whole = (size_t)(ranges[i].size + 3 * GUARD) / GUARD * GUARD;
            char *const block = n < 0 ? NULL : aligned_alloc(GUARD, whole);
            if (!block) stop("no memory");
            ranges[i].memory = block + GUARD;
#ifdef UNDEFINED
            memset(block, 0xff, GUARD);
            memset(ranges[i].memory + ranges[i].size, 0xff, whole - GUARD - (size_t)ranges[i].size);
#else
            memset(block, 0xff, whole);
#endif
            if (has_contents) memcpy(ranges[i].memory, bytes(n), (size_t)n);
        }
        pyops_value values[MOST] = {0};
        const int64_t n_values = below(MOST, "too many arguments");
        for (int64_t i = 0; i < n_values; i++) {
            const int64_t kind = number(), first = number(), second = number();
            if (kind == ARRAY && (first < 0 || first >= n_ranges)) stop("an argument is in no range");
            if (kind == ARRAY) values[i].pointer = ranges[first].memory + second;
            else if (kind == REAL) memcpy(&values[i].real, &(int32_t){(int32_t)first}, sizeof values[i].real);
            else if (kind == INTEGER) values[i].integer = first;
        }
        const pyops_action action = {.kernel = kernel_number(name), .first_value = 0};
        int64_t done = 0;
        const pyops_status status = replay(&action, values, NULL, &done, 0, 1, NULL);
        int64_t wrong = 0;
        if (status) printf("%s: %s\n", name, action.kernel < 0 ? "no such kernel" : last_error()), wrong++;
        for (int64_t n = number(); n > 0; n--) {
            const int64_t place = below(n_ranges - 1, "a result is in no range"), offset = number();
            const int type = (int)below(DOUBLE, "a type is unknown");
            const int64_t item = number();
            const int axes = (int)below(AXES, "too many axes");
            int64_t shape[AXES], strides[AXES];
            for (int d = 0; d < axes; d++) shape[d] = number();
            for (int d = 0; d < axes; d++) strides[d] = number();
            double worst;
            const int64_t differ = compare(ranges[place].memory + offset, type, item, axes, shape, strides, &worst);
            if (differ && !status)
                printf("%s: call %lld: %lld elements differ, by up to %.3g of the largest\n", name, (long long)calls,
                       (long long)differ, worst);
            wrong += differ > 0;
            if (type != EXACT && worst > most) most = worst;
        }
        for (int64_t i = 0; i < n_ranges; i++) {
            for (int64_t j = 0; j < GUARD; j++) {
                if (ranges[i].memory[-1 - j] != (char)0xff || ranges[i].memory[ranges[i].size + j] != (char)0xff) {
                    printf("%s: call %lld: writes outside its arrays\n", name, (long long)calls), wrong++;
                    break;
                }
            }
            free(ranges[i].memory - GUARD);
        }
        calls++, failed += wrong > 0;
    }
    printf("%lld calls, %lld failed, largest difference %.3g of the largest element\n", (long long)calls, (long long)failed,
           most);
    return failed || !calls;
}
