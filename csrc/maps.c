/* maps.c - counts and maps of the numbers of a tensor, for a page that shows them.
 *
 * Counts of parts are added, and maps keep the largest key of a patch, so no result depends on the number of threads.
 */
#include "internal.h"

enum { CHUNK = 2048, PARTS = 8, BINS = PYOPS_MOST_BINS, OCTAVES = PYOPS_HALF_OCTAVES, NAN_BITS = 0x7fc00000 };

/* Count places (n), each below `size` or, of a number that is left out, equal to it. */
static void count(int64_t *counts, const int32_t *places, const uint8_t *valid, int64_t n, int32_t size) {
    if (valid)
        for (int64_t i = 0; i < n; i++) counts[valid[i] ? places[i] : size]++;
    else
        for (int64_t i = 0; i < n; i++) counts[places[i]]++;
}

pyops_status pyops_bin_counts(int64_t *counts, const float *x, const float *q, const uint8_t *valid, int64_t n, int64_t bins,
                              double low, double high, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(n >= 0 && bins >= 1 && bins <= BINS, "bin_counts: n=%lld bins=%lld, expected at least 0, and 1 to %d", LL(n),
                  LL(bins), BINS);
    const pyops_kernels *k = pyops_active();
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    const double factor = (double)bins / (high - low);
    int64_t parts[PARTS][BINS + 1] = {{0}};
    #pragma omp parallel for schedule(static) if (n > PYOPS_SHARE_FLOATS)
    for (int64_t part = 0; part < PARTS; part++) {
        int32_t places[CHUNK];
        for (int64_t chunk = chunks * part / PARTS; chunk < chunks * (part + 1) / PARTS; chunk++) {
            const int64_t i = chunk * CHUNK, some = pyops_min(CHUNK, n - i);
            k->bins(places, x + i, q ? q + i : x + i, some, low, factor, (int32_t)bins);
            count(parts[part], places, valid ? valid + i : NULL, some, (int32_t)bins);
        }
    }
    for (int64_t bin = 0; bin < bins; bin++) {
        counts[bin] = 0;
        for (int part = 0; part < PARTS; part++) counts[bin] += parts[part][bin];
    }
    return PYOPS_OK;
}

typedef struct {
    const float *x, *each;
    const int32_t *scales;
    const uint8_t *valid;
    int64_t n, inner, block, blocks;
} scaled_numbers;

/* The scales of numbers i to i + some of x (outer,n,inner). */
static void scales_of(int32_t *scales, const scaled_numbers *s, int64_t i, int64_t some) {
    while (some > 0) {
        const int64_t row = i / s->inner, k = i % s->inner, outer = row / s->n, b = row % s->n / s->block;
        const int32_t *from = s->scales + (outer * s->blocks + b) * s->inner + k;
        const int64_t left = s->inner > 1 ? s->inner - k : pyops_min((b + 1) * s->block, s->n) - row % s->n;
        const int64_t now = pyops_min(left, some);
        if (s->inner > 1) memcpy(scales, from, (size_t)now * sizeof *scales);
        else
            for (int64_t j = 0; j < now; j++) scales[j] = *from;
        scales += now;
        i += now;
        some -= now;
    }
}

pyops_status pyops_octave_counts(int64_t *counts, const float *x, const int32_t *scales, const float *each,
                                 const uint8_t *valid, int64_t outer, int64_t n, int64_t inner, int64_t block, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(outer >= 0 && n >= 0 && inner >= 0 && block >= 1,
                  "octave_counts: outer=%lld n=%lld inner=%lld block=%lld, expected at least 0, 0, 0, 1", LL(outer), LL(n),
                  LL(inner), LL(block));
    const pyops_kernels *k = pyops_active();
    const scaled_numbers s = {x, each, scales, valid, n, inner, block, (n + block - 1) / block};
    const int64_t all = outer * n * inner, chunks = (all + CHUNK - 1) / CHUNK;
    int64_t parts[PARTS][OCTAVES + 1] = {{0}};
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_FLOATS)
    for (int64_t part = 0; part < PARTS; part++) {
        int32_t places[CHUNK], of[CHUNK] = {0};
        for (int64_t chunk = chunks * part / PARTS; chunk < chunks * (part + 1) / PARTS; chunk++) {
            const int64_t i = chunk * CHUNK, some = pyops_min(CHUNK, all - i);
            if (scales) scales_of(of, &s, i, some);
            k->half_octaves(places, x + i, each ? each + i : NULL, of, some);
            count(parts[part], places, valid ? valid + i : NULL, some, OCTAVES);
        }
    }
    for (int64_t place = 0; place < OCTAVES; place++) {
        counts[place] = 0;
        for (int part = 0; part < PARTS; part++) counts[place] += parts[part][place];
    }
    return PYOPS_OK;
}

/* The number of a key of largest_keys. */
static float number_of(uint32_t key) {
    const uint32_t before = key - 1, bits = key ? before >> 1 | (before & 1 ? 0 : 0x80000000u) : NAN_BITS;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

pyops_status pyops_patch_extremes(float *cells, const float *x, const float *minus, const uint8_t *valid, int64_t rows,
                                  int64_t columns, int64_t patch_rows, int64_t patch_columns, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(rows >= 0 && columns >= 0 && patch_rows >= 1 && patch_columns >= 1,
                  "patch_extremes: rows=%lld columns=%lld patch_rows=%lld patch_columns=%lld, expected at least 0, 0, 1, 1",
                  LL(rows), LL(columns), LL(patch_rows), LL(patch_columns));
    const pyops_kernels *k = pyops_active();
    const int64_t down = (rows + patch_rows - 1) / patch_rows, across = (columns + patch_columns - 1) / patch_columns;
    #pragma omp parallel for schedule(static) if (rows * columns > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < down; r++) {
        uint32_t keys[CHUNK], most = 0;
        float *cell = cells + r * across;
        const int64_t end = pyops_min((r + 1) * patch_rows, rows);
        for (int64_t c = 0, left = patch_columns; c < columns; c += CHUNK) {
            const int64_t some = pyops_min(CHUNK, columns - c);
            memset(keys, 0, (size_t)some * sizeof *keys);
            for (int64_t row = r * patch_rows; row < end; row++) {
                const int64_t i = row * columns + c;
                k->largest_keys(keys, x + i, minus ? minus + i : NULL, valid ? valid + i : NULL, some);
            }
            for (int64_t j = 0; j < some; j++) {
                most = keys[j] > most ? keys[j] : most;
                if (--left && c + j + 1 < columns) continue;
                *cell++ = number_of(most);
                most = 0;
                left = patch_columns;
            }
        }
    }
    return PYOPS_OK;
}
