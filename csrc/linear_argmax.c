/* linear_argmax.c - argmax of each row of logits, x weight' + bias, without computing most logits.
 *
 * Decoding needs one token of thousands, and an approximate product rules out almost all of them.  So weight is rounded once
 * to 8 bits per number: a row w of weight is s q + e, with integers q from -127 to 127 and the rounding error e.  A row x is
 * likewise a u + f, with integers up to 127 or, without an instruction for such products, up to 15, whose products can be added in
 * 16 bits.  Then
 *
 *     w . x  =  a s (q . u)  +  s q . f  +  e . x        and        |s q . f + e . x|  <=  (|w| + |e|) |f| + |e| |x|
 *
 * by Cauchy and Schwarz.  q . u is exact in 32 bits, so with the bound on the right it gives an upper bound of the logit.  The
 * logit itself is computed, from the unrounded weight, only if that bound is not below the largest logit so far: for some tens
 * of 13387 tokens.  The result is the argmax of all logits, the first of equal ones, for any order and number of threads.
 *
 * Rounding within the float sums is bounded by D eps |w| |x|.  So the bound is the approximate logit + |x| error + |f| length,
 * with two numbers per token.  If a row of x or weight has NaN, an infinity, or numbers too small or large for these formulas,
 * its bound is infinite or NaN, and all its logits are computed.
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"

/* A block of logits is 64 KiB: WORDS tokens (their weights are 64 KiB too if D is 256) by ROWS rows.  DOTS: logits per call. */
enum { WORDS = 256, DOTS = 64, GROUP = PYOPS_GROUP };
#define ROWS PYOPS_TUNED(linear_argmax_rows, 64, 1, 128, 1)
_Static_assert(WORDS % GROUP == 0, "a block must be whole groups");

/* Rows are rounded only if their largest number is in this range: then the product of scales is a normal float, as every
 * logit. */
static const float LEAST = 1e-12f, MOST = 1e12f;

/* ---- memory ---- */
typedef struct { int64_t start, scales, tops, errors, lengths, total; } layout;

static int64_t quads_of(int64_t D) { return (D + 3) / 4; }

static layout prepared_layout(int64_t D, int64_t V) {
    const int64_t words = pyops_round_up(V, GROUP);
    layout l = {.start = quads_of(D) * words};          /* groups of int8 come first */
    l.scales = l.start + words;
    l.tops = l.scales + words;
    l.errors = l.tops + words;
    l.lengths = l.errors + words;
    l.total = l.lengths + words;
    return l;
}

int64_t pyops_linear_argmax_prepare_work(int64_t D, int64_t V) { return prepared_layout(D, V).total; }

/* keys (R) of 64 bits, aligned; of each row its scale, its length and the length of its rounding error; the rounded rows */
int64_t pyops_linear_argmax_work(int64_t R, int64_t D, int64_t V) {
    (void)V;
    return 2 * R + 1 + 3 * R + R * quads_of(D);
}

/* ---- rounding ---- */
static double rounding_of_sums(int64_t D) { return (double)(D + 16) * FLT_EPSILON; }

typedef struct { float scale, length, error; } rounded;     /* upper bounds of |x| and of |f| */

/* Round a row to integers up to `largest`, padded with 0 to whole quads.  The length is infinite if it cannot be rounded. */
static rounded round_row(const pyops_kernels *k, int8_t *q, const float *x, int64_t D, int largest) {
    const uint32_t bits = k->amax(x, D);
    float most;
    memcpy(&most, &bits, sizeof most);
    memset(q, 0, (size_t)(4 * quads_of(D)));
    if (most == 0.0f) return (rounded){0.0f, 0.0f, 0.0f};
    if (!(most >= LEAST && most <= MOST)) return (rounded){0.0f, INFINITY, INFINITY};
    const float scale = most / (float)largest;
    const double left = k->to_int8(q, x, scale, D) * (1.0 + rounding_of_sums(D)), all = k->sum_squares(x, D);
    return (rounded){scale, (float)(sqrt(all) * (1.0 + 1e-6)), (float)(sqrt(left) * (1.0 + 1e-6))};
}

/* The bytes that screen_group multiplies. */
static void to_unsigned(uint8_t *y, const int8_t *q, int64_t n, int coarse) {
    for (int64_t i = 0; i < n; i++) y[i] = (uint8_t)(q[i] + coarse + 1);
}

static void prepare_group(const pyops_kernels *k, float *prepared, const layout *l, const float *weight, const float *bias,
                          int64_t first, int64_t D, int64_t V, int8_t *q) {
    const int64_t quads = quads_of(D);
    int8_t *const panel = (int8_t *)(prepared + first * quads);
    for (int64_t j = 0; j < GROUP; j++) {
        const int64_t v = first + j;
        rounded w = {0};
        if (v < V) w = round_row(k, q, weight + v * D, D, 127);
        else memset(q, 0, (size_t)(4 * quads));
        int32_t sum = 0;
        for (int64_t i = 0; i < 4 * quads; i++) {
            sum += q[i];
            panel[(i / 4 * GROUP + j) * 4 + i % 4] = q[i];
        }
        ((int32_t *)(prepared + l->start))[v] = -PYOPS_BYTE_ZERO * sum;
        prepared[l->scales + v] = w.scale;
        prepared[l->lengths + v] = (w.length + w.error) * (1.0f + 4 * FLT_EPSILON);
        prepared[l->errors + v] = (float)(w.error + rounding_of_sums(D) * (w.length + w.error)) * (1.0f + 4 * FLT_EPSILON);
        prepared[l->tops + v] = v < V ? bias[v] + (float)(4.0 * FLT_EPSILON) * fabsf(bias[v]) : 0.0f;
    }
}

pyops_status pyops_linear_argmax_prepare(float *prepared, const float *weight, const float *bias, int64_t D, int64_t V,
                                         void *stream) {
    (void)stream;
    PYOPS_REQUIRE(D >= 1 && D <= PYOPS_LONGEST_INT8 && V >= 1,
                  "linear_argmax_prepare: D=%lld V=%lld, expected D from 1 to %d, V of at least 1", LL(D), LL(V),
                  PYOPS_LONGEST_INT8);
    const layout l = prepared_layout(D, V);
    int failed = 0;
    #pragma omp parallel if (V * D > PYOPS_SHARE_FLOATS)
    {
        float *const row = pyops_scratch_or_fail((size_t)quads_of(D), &failed);
        #pragma omp for schedule(static)
        for (int64_t first = 0; first < V; first += GROUP)
            if (row) prepare_group(pyops_active(), prepared, &l, weight, bias, first, D, V, (int8_t *)row);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "linear_argmax_prepare: no memory for a row of %lld bytes", LL(4 * quads_of(D)))
                  : PYOPS_OK;
}

/* The largest so far is a key (internal.h), so threads may offer keys in any order. */
static uint64_t offer(uint64_t *best, uint64_t key) {
    uint64_t seen = __atomic_load_n(best, __ATOMIC_RELAXED);
    while (key > seen && !__atomic_compare_exchange_n(best, &seen, key, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return key > seen ? key : seen;
}

/* Compute the logits of the tokens [v, v + n) for one row, from the unrounded weight. */
static uint64_t compute(const pyops_kernels *k, uint64_t *best, const float *x, const float *weight, const float *bias,
                        int64_t v, int64_t n, int64_t D) {
    uint64_t found = 0;
    for (int64_t end = v + n; v < end; v += DOTS) {
        float z[DOTS];
        const int64_t some = pyops_min(DOTS, end - v);
        k->dots(z, weight + v * D, x, 1.0f, some, D, D, 0);
        for (int64_t i = 0; i < some; i++) {
            const uint64_t key = pyops_key_of(z[i] + bias[v + i], v + i);
            if (key > found) found = key;
        }
    }
    return offer(best, found);
}

pyops_status pyops_linear_argmax(int32_t *index, const float *x, const float *weight, const float *bias, const float *prepared,
                                 float *work, int64_t R, int64_t D, int64_t V, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && D >= 1 && V >= 1 && V <= INT32_MAX,
                  "linear_argmax: R=%lld D=%lld V=%lld, expected R >= 0, D >= 1, V from 1 to 2^31 - 1", LL(R), LL(D), LL(V));
    PYOPS_REQUIRE(!prepared || D <= PYOPS_LONGEST_INT8, "linear_argmax: D=%lld, expected at most %d if it is prepared", LL(D),
                  PYOPS_LONGEST_INT8);
    const pyops_kernels *k = pyops_active();
    const layout l = prepared_layout(D, V);
    const int64_t quads = quads_of(D);
    uint64_t *const best = (uint64_t *)(((uintptr_t)work + 7) & ~(uintptr_t)7);
    float *const scales = work + 2 * R + 1, *const lengths = scales + R, *const errors = lengths + R;
    uint8_t *const bytes = (uint8_t *)(errors + R);
    int failed = 0;
    #pragma omp parallel if (R * D * V > PYOPS_SHARE_FMAS || D * V > 4 * PYOPS_SHARE_FLOATS)
    {
        float *const logits = pyops_scratch_or_fail((size_t)pyops_max(WORDS * ROWS, quads), &failed);
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            best[r] = 0;
            if (!prepared || !logits) continue;
            const rounded x_r = round_row(k, (int8_t *)logits, x + r * D, D, k->coarse);
            to_unsigned(bytes + 4 * r * quads, (int8_t *)logits, 4 * quads, k->coarse);
            scales[r] = x_r.scale, lengths[r] = x_r.length, errors[r] = x_r.error;
        }
        #pragma omp for schedule(dynamic)
        for (int64_t v = 0; v < V; v += WORDS) {
            const int64_t n = pyops_min(WORDS, V - v);
            for (int64_t r0 = 0; r0 < R && logits; r0 += ROWS) {
                const int64_t rows = pyops_min(ROWS, R - r0);
                for (int64_t j = v; j < v + n && prepared; j += GROUP) {
                    const pyops_int8_group w = {.panel = (const int8_t *)(prepared + j * quads),
                                                .start = (const int32_t *)(prepared + l.start) + j,
                                                .scales = prepared + l.scales + j,
                                                .bias = prepared + l.tops + j};
                    k->screen_group(logits + j - v, bytes + 4 * r0 * quads, 4 * quads, scales + r0, &w, rows, quads, WORDS, 0);
                }
                for (int64_t r = r0; r < r0 + rows; r++) {
                    if (!prepared || !isfinite(lengths[r])) {
                        compute(k, best + r, x + r * D, weight, bias, v, n, D);
                        continue;
                    }
                    uint64_t seen = __atomic_load_n(best + r, __ATOMIC_RELAXED);
                    for (int64_t i = 0;; i++) {
                        i = k->next_not_below(logits + (r - r0) * WORDS, prepared + l.errors + v, prepared + l.lengths + v,
                                              lengths[r], errors[r], pyops_key_value(seen), i, n);
                        if (i >= n) break;
                        seen = compute(k, best + r, x + r * D, weight, bias, v + i, 1, D);
                    }
                }
            }
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "linear_argmax: no memory for a block of logits");
    for (int64_t r = 0; r < R; r++) index[r] = pyops_key_index(best[r]);
    return PYOPS_OK;
}
