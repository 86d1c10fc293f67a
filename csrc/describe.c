/* describe.c - counts, sums and the range of the numbers of a tensor, while it is copied.
 *
 * The tensor is cut into chunks, and the chunks into a fixed number of parts.  Each part is summed in order, then the parts are
 * added in order, whatever the number of threads.
 */
#include "internal.h"

enum { CHUNK = 8192, PARTS = 64 };

/* Copy the numbers from i to i + n of x (rows,columns) that lie in valid rows; return how many. */
static int64_t valid_numbers(float *to, const float *x, const uint8_t *valid, int64_t columns, int64_t i, int64_t n) {
    int64_t count = 0;
    for (const int64_t end = i + n; i < end;) {
        const int64_t row = i / columns, some = pyops_min((row + 1) * columns, end) - i;
        if (valid[row]) {
            memcpy(to + count, x + i, (size_t)some * sizeof *to);
            count += some;
        }
        i += some;
    }
    return count;
}

static void add(pyops_description *all, const pyops_description *part) {
    all->numbers += part->numbers;
    all->nan += part->nan;
    all->finite += part->finite;
    all->zeros += part->zeros;
    all->sum += part->sum;
    all->sum_abs += part->sum_abs;
    all->squares += part->squares;
    if (part->low < all->low) all->low = part->low;
    if (part->high > all->high) all->high = part->high;
}

pyops_status pyops_describe(int64_t *counts, double *sums, float *range, float *copy, const float *x, const uint8_t *valid,
                            int64_t rows, int64_t columns, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(rows >= 0 && columns >= 0, "describe: rows=%lld columns=%lld, expected at least 0", LL(rows), LL(columns));
    const pyops_kernels *k = pyops_active();
    const int64_t all = rows * columns, chunks = (all + CHUNK - 1) / CHUNK;
    pyops_description parts[PARTS];
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_FLOATS)
    for (int64_t part = 0; part < PARTS; part++) {
        float numbers[CHUNK];
        parts[part] = (pyops_description){.low = __builtin_inff(), .high = -__builtin_inff()};
        for (int64_t chunk = chunks * part / PARTS; chunk < chunks * (part + 1) / PARTS; chunk++) {
            const int64_t i = chunk * CHUNK, n = pyops_min(CHUNK, all - i);
            if (copy) memcpy(copy + i, x + i, (size_t)n * sizeof *copy);
            if (valid) k->describe(&parts[part], numbers, valid_numbers(numbers, x, valid, columns, i, n));
            else k->describe(&parts[part], x + i, n);
        }
    }
    pyops_description d = {.low = __builtin_inff(), .high = -__builtin_inff()};
    for (int part = 0; part < PARTS; part++) add(&d, &parts[part]);
    counts[0] = d.numbers;
    counts[1] = d.nan;
    counts[2] = d.numbers - d.nan - d.finite;
    counts[3] = d.zeros;
    sums[0] = d.sum;
    sums[1] = d.sum_abs;
    sums[2] = d.squares;
    range[0] = d.low;
    range[1] = d.high;
    return PYOPS_OK;
}
