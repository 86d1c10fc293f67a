/* linear_argmax.c - argmax of each row of logits, x weight' + bias, without computing most logits.
 *
 * Decoding needs one token of thousands, and an approximate product rules out almost all of them.  So weight is rounded once
 * to 8 bits per number: a row w of weight is s q + e, with integers q from -127 to 127 and the rounding error e.  A row x is
 * likewise a u + f, with 16 bits.  Then
 *
 *     w . x  =  a s (q . u)  +  s q . f  +  e . x        and        |s q . f + e . x|  <=  (|w| + |e|) |f| + |e| |x|
 *
 * by Cauchy and Schwarz.  q . u is exact in 32 bits, so with the bound on the right it gives an upper bound of the logit.  The
 * logit itself is computed, from the unrounded weight, only if that bound is not below the largest logit so far: for some tens
 * of 13387 tokens.  The result is the argmax of all logits, the first of equal ones, for any order and number of threads.
 *
 * |f| is at most half a unit, |x| / levels, times sqrt(D), since no |x[d]| exceeds |x|; rounding within the float sums is
 * bounded by D eps |w| |x|.  So the bound is |x| margin + top, with two numbers per token.  If a row of x or weight has NaN,
 * an infinity, or numbers too small or large for these formulas, its bound is infinite or NaN, and all its logits are
 * computed.
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"

/* A block of sums is 64 KiB: WORDS tokens (their weights are 64 KiB too if D is 256) by ROWS rows.  DOTS: logits per call. */
enum { WORDS = 256, ROWS = 64, DOTS = 64 };
_Static_assert(WORDS % PYOPS_PANEL == 0, "a block must be whole panels");

/* Rows are rounded only if their largest number is in this range: then the product of scales is a normal float, as every
 * logit. */
static const float LEAST = 1e-12f, MOST = 1e12f;

/* ---- memory ---- */
typedef struct { int64_t scales, margins, tops, total; } layout;

static int64_t pairs_of(int64_t D) { return (D + 1) / 2; }

static layout prepared_layout(int64_t D, int64_t V) {
    const int64_t words = pyops_round_up(V, PYOPS_PANEL);
    layout l = {.scales = pairs_of(D) * words / 2};     /* panels of int8 come first */
    l.margins = l.scales + words;
    l.tops = l.margins + words;
    l.total = l.tops + words;
    return l;
}

int64_t pyops_linear_argmax_prepare_work(int64_t D, int64_t V) { return prepared_layout(D, V).total; }

/* keys (R) of 64 bits, aligned; scales and lengths of the rows (R); the rounded rows (R,D) of 16 bits */
int64_t pyops_linear_argmax_work(int64_t R, int64_t D, int64_t V) {
    (void)V;
    return 2 * R + 1 + 2 * R + R * pairs_of(D);
}

/* ---- rounding ---- */
static float largest(const pyops_kernels *k, const float *x, int64_t n) {
    const uint32_t bits = k->amax(x, n);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Whether a row with the largest number `most` can be rounded; a row of zeros can. */
static int fits(float most) { return most == 0.0f || (most >= LEAST && most <= MOST); }

/* The largest u, such that a sum of D products with 127 fits in 32 bits. */
static int32_t levels(int64_t D) { return (int32_t)pyops_max(1, pyops_min(INT16_MAX, INT32_MAX / (127 * 2 * pairs_of(D)))); }

static double rounding_of_sums(int64_t D) { return (double)(D + 16) * FLT_EPSILON; }

/* Round a row of weight: its scale, its margin, and q. */
static void round_word(const pyops_kernels *k, int8_t *q, float *scale, float *margin, const float *w, int64_t D) {
    const float most = largest(k, w, D);
    memset(q, 0, (size_t)(2 * pairs_of(D)));
    *scale = 0.0f, *margin = 0.0f;
    if (most == 0.0f) return;
    if (!fits(most)) {
        *margin = INFINITY;
        return;
    }
    *scale = most / 127.0f;
    const double left = sqrt((double)k->to_int8(q, w, *scale, D) * (1.0 + rounding_of_sums(D)));
    const double length = sqrt(k->sum_squares(w, D)), share = 0.51 * sqrt((double)D) / levels(D);
    *margin = (float)((left + (share + rounding_of_sums(D)) * (length + left)) * (1.0 + 1e-6));
}

pyops_status pyops_linear_argmax_prepare(float *prepared, const float *weight, const float *bias, int64_t D, int64_t V,
                                         void *stream) {
    (void)stream;
    PYOPS_REQUIRE(D >= 1 && V >= 1, "linear_argmax_prepare: D=%lld V=%lld, expected D >= 1, V >= 1", LL(D), LL(V));
    const pyops_kernels *k = pyops_active();
    const layout l = prepared_layout(D, V);
    const int64_t pairs = pairs_of(D);
    int failed = 0;
    #pragma omp parallel if (V * D > PYOPS_SHARE_FLOATS)
    {
        uint16_t *rows = (uint16_t *)pyops_scratch_or_fail((size_t)(pairs * PYOPS_PANEL + 1) / 2, &failed);   /* of a panel */
        #pragma omp for schedule(static)
        for (int64_t first = 0; first < V; first += PYOPS_PANEL) {
            if (!rows) continue;
            uint16_t *panel = (uint16_t *)prepared + first * pairs;
            for (int64_t j = 0; j < PYOPS_PANEL; j++) {
                const int64_t v = first + j;
                int8_t *q = (int8_t *)(rows + j * pairs);
                if (v >= V) {
                    memset(q, 0, (size_t)(2 * pairs));
                    continue;
                }
                round_word(k, q, prepared + l.scales + v, prepared + l.margins + v, weight + v * D, D);
                prepared[l.tops + v] = bias[v] + (float)(4.0 * FLT_EPSILON) * fabsf(bias[v]);
            }
            for (int64_t i = 0; i < pairs; i++)
                for (int64_t j = 0; j < PYOPS_PANEL; j++) panel[i * PYOPS_PANEL + j] = rows[j * pairs + i];
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "linear_argmax_prepare: no memory for a panel of %lld words", LL(PYOPS_PANEL))
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
    const pyops_kernels *k = pyops_active();
    const layout l = prepared_layout(D, V);
    const int64_t pairs = pairs_of(D);
    uint64_t *const best = (uint64_t *)(((uintptr_t)work + 7) & ~(uintptr_t)7);
    float *const scales = work + 2 * R + 1, *const lengths = scales + R;
    int16_t *const rounded = (int16_t *)(lengths + R);
    int failed = 0;
    #pragma omp parallel if (R * D * V > PYOPS_SHARE_FMAS || D * V > 4 * PYOPS_SHARE_FLOATS)
    {
        int32_t *sums = (int32_t *)pyops_scratch_or_fail((size_t)(WORDS * ROWS), &failed);
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            const float most = largest(k, x + r * D, D);
            best[r] = 0;
            if (!prepared) continue;
            scales[r] = fits(most) ? most / (float)levels(D) : 0.0f;
            lengths[r] = fits(most) ? (float)(sqrt(k->sum_squares(x + r * D, D)) * (1.0 + 1e-6)) : INFINITY;
            memset(rounded + r * 2 * pairs, 0, (size_t)(2 * pairs) * sizeof *rounded);
            if (scales[r] != 0.0f) k->to_int16(rounded + r * 2 * pairs, x + r * D, scales[r], D);
        }
        #pragma omp for schedule(dynamic)
        for (int64_t v = 0; v < V; v += WORDS) {
            const int64_t n = pyops_min(WORDS, V - v);
            for (int64_t r0 = 0; r0 < R && sums; r0 += ROWS) {
                const int64_t rows = pyops_min(ROWS, R - r0);
                for (int64_t j = 0; j < n && prepared; j += PYOPS_PANEL)
                    k->screen(sums + j, rounded + r0 * 2 * pairs, (const int8_t *)prepared + (v + j) * 2 * pairs, rows, pairs,
                              WORDS);
                for (int64_t r = r0; r < r0 + rows; r++) {
                    if (!prepared || !isfinite(lengths[r])) {
                        compute(k, best + r, x + r * D, weight, bias, v, n, D);
                        continue;
                    }
                    uint64_t seen = __atomic_load_n(best + r, __ATOMIC_RELAXED);
                    for (int64_t i = 0;; i++) {
                        i = k->next_not_below(sums + (r - r0) * WORDS, prepared + l.scales + v, prepared + l.margins + v,
                                              prepared + l.tops + v, scales[r], lengths[r], pyops_key_value(seen), i, n);
                        if (i >= n) break;
                        seen = compute(k, best + r, x + r * D, weight, bias, v + i, 1, D);
                    }
                }
            }
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "linear_argmax: no memory for a block of sums");
    for (int64_t r = 0; r < R; r++) index[r] = pyops_key_index(best[r]);
    return PYOPS_OK;
}
