/* error_sums.c - how far rounded numbers are from the originals, block by block.
 *
 * Numbers are added in lanes, then the lanes of a block that lies along the last axis are added in order.  The blocks are cut into a
 * fixed number of parts, whose counts are added in order, whatever the number of threads.
 */
#include "internal.h"

enum { LANES = PYOPS_ERROR_LANES, PARTS = 64 };

typedef struct {
    double *sums;
    const float *x, *q;
    const double *scales;
    const float *each;
    const uint8_t *valid;
    int64_t outer, n, inner, block, blocks;
    double smallest, largest;
} errors;

typedef struct {
    int64_t nan, inf, poisoned, subnormal, nonzero_pairs;
    double relative;
} counted;

/* Add `count` neighbours from number i on.   scale (LANES): of the block; numbers with scales of their own replace it */
static void add(const pyops_kernels *k, pyops_error_lanes *lanes, const errors *e, int64_t i, int64_t count, double *scale) {
    int32_t valid[LANES];
    for (int64_t lane = 0; lane < count; lane++) valid[lane] = e->valid ? e->valid[i + lane] != 0 : 1;
    if (e->each)
        for (int64_t lane = 0; lane < count; lane++) scale[lane] = (double)e->each[i + lane];
    k->error_sums(lanes, e->x + i, e->q + i, valid, scale, e->smallest, e->largest, count);
}

static double sum(const double *lanes, int64_t n) {
    double all = 0.0;
    for (int64_t lane = 0; lane < n; lane++) all += lanes[lane];
    return all;
}

static int64_t count(const int32_t *lanes, int64_t n) {
    int64_t all = 0;
    for (int64_t lane = 0; lane < n; lane++) all += lanes[lane];
    return all;
}

static double largest(const double *lanes, int64_t n) {
    double all = 0.0;
    for (int64_t lane = 0; lane < n; lane++) all = lanes[lane] > all ? lanes[lane] : all;
    return all;
}

/* Store the sums of block b, inner index i, from `n` lanes. */
static void store(const errors *e, int64_t b, int64_t i, const pyops_error_lanes *lanes, int64_t lane, int64_t n) {
    const int64_t size = e->outer * e->blocks * e->inner;
    const int is_lost = count(lanes->lost + lane, n) > 0;
    const double infinity = __builtin_inff();
    const double found[PYOPS_ERROR_SUMS] = {
        (double)count(lanes->pairs + lane, n),
        (double)count(lanes->finite + lane, n),
        (double)count(lanes->lost + lane, n),
        (double)count(lanes->nonzero + lane, n),
        (double)count(lanes->underflow + lane, n),
        sum(lanes->saturated + lane, n),
        sum(lanes->x2 + lane, n),
        sum(lanes->q2 + lane, n),
        sum(lanes->xq + lane, n),
        is_lost ? infinity : sum(lanes->e2 + lane, n),
        largest(lanes->amax + lane, n),
        is_lost ? infinity : largest(lanes->error + lane, n),
    };
    for (int64_t of = 0; of < PYOPS_ERROR_SUMS; of++) e->sums[of * size + b * e->inner + i] = found[of];
}

/* Measure block b of all outer ones. */
static void measure(const pyops_kernels *k, const errors *e, int64_t b, counted *more) {
    const int64_t start = b % e->blocks * e->block, length = pyops_min(e->block, e->n - start);
    const int64_t first = (b / e->blocks * e->n + start) * e->inner;
    double scale[LANES];
    for (int64_t i = 0; i < e->inner; i += LANES) {
        const int64_t width = pyops_min(LANES, e->inner - i);
        pyops_error_lanes lanes = {0};
        for (int64_t lane = 0; lane < LANES; lane++)
            scale[lane] = e->scales ? e->scales[b * e->inner + i + pyops_min(lane, width - 1)] : 1.0;
        if (e->inner == 1) {
            for (int64_t j = 0; j < length; j += LANES) add(k, &lanes, e, first + j, pyops_min(LANES, length - j), scale);
            store(e, b, 0, &lanes, 0, LANES);
        } else {
            for (int64_t j = 0; j < length; j++) add(k, &lanes, e, first + j * e->inner + i, width, scale);
            for (int64_t lane = 0; lane < width; lane++) store(e, b, i + lane, &lanes, lane, 1);
        }
        more->nan += count(lanes.nan, LANES);
        more->inf += count(lanes.inf, LANES);
        more->poisoned += count(lanes.finite, LANES) - count(lanes.pairs, LANES);
        more->subnormal += (int64_t)sum(lanes.subnormal, LANES);
        more->nonzero_pairs += (int64_t)sum(lanes.nonzero_pairs, LANES);
        more->relative += sum(lanes.relative, LANES);
    }
}

pyops_status pyops_error_sums(double *sums, int64_t *counts, double *relative, const float *x, const float *q,
                              const double *scales, const float *each, const uint8_t *valid, int64_t outer, int64_t n,
                              int64_t inner, int64_t block, double smallest, double largest, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(outer >= 0 && n >= 0 && inner >= 0 && block >= 1,
                  "error_sums: outer=%lld n=%lld inner=%lld block=%lld, expected at least 0, 0, 0, 1", LL(outer), LL(n),
                  LL(inner), LL(block));
    const pyops_kernels *k = pyops_active();
    const errors e = {sums, x, q, scales, each, valid, outer, n, inner, block, (n + block - 1) / block, smallest, largest};
    const int64_t all = outer * e.blocks;
    counted parts[PARTS] = {{0}}, whole = {0};
    #pragma omp parallel for schedule(static) if (outer * n * inner > PYOPS_SHARE_FLOATS)
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t b = all * part / PARTS; b < all * (part + 1) / PARTS; b++) measure(k, &e, b, &parts[part]);
    for (int part = 0; part < PARTS; part++) {
        whole.nan += parts[part].nan;
        whole.inf += parts[part].inf;
        whole.poisoned += parts[part].poisoned;
        whole.subnormal += parts[part].subnormal;
        whole.nonzero_pairs += parts[part].nonzero_pairs;
        whole.relative += parts[part].relative;
    }
    counts[0] = whole.nan;
    counts[1] = whole.inf;
    counts[2] = whole.poisoned;
    counts[3] = whole.subnormal;
    counts[4] = whole.nonzero_pairs;
    *relative = whole.relative;
    return PYOPS_OK;
}
