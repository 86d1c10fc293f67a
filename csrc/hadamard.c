/* hadamard.c - the Hadamard transform of blocks of numbers, with random signs.
 *
 * LANES lines of a block are transformed together, so that the additions are vectorised for any length: adjacent columns if
 * blocks are strided in memory, otherwise the same block of adjacent rows.
 */
#include "internal.h"
#include <string.h>
#define HADAMARD_INLINE static inline
#include "hadamard.inc"

enum { LANES = 16 };

typedef struct {
    int64_t stride, step;                               /* between the numbers of a line, and between lines */
    uint32_t signs[PYOPS_LONGEST_HADAMARD];             /* bit 31, the sign bit of a float */
    int32_t inverse;
} call;

static inline float with_sign(float x, uint32_t sign) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= sign;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* signs: of the numbers of the piece. */
static void transform(const call *c, const uint32_t *signs, float *y, const float *x, int64_t length, int64_t lanes) {
    float v[PYOPS_LONGEST_HADAMARD][LANES];
    const float factor = hadamard_factor(length);
    for (int64_t i = 0; i < length; i++) {
        const uint32_t sign = c->inverse ? 0 : signs[i];
        for (int64_t l = 0; l < lanes; l++) v[i][l] = with_sign(x[i * c->stride + l * c->step], sign);
    }
    for (int64_t distance = 1; distance < length; distance *= 2)
        for (int64_t i = 0; i < length; i++) {
            if (i & distance) continue;
            for (int64_t l = 0; l < lanes; l++) {
                const float a = v[i][l], b = v[i + distance][l];
                v[i][l] = a + b;
                v[i + distance][l] = a - b;
            }
        }
    for (int64_t i = 0; i < length; i++) {
        const uint32_t sign = c->inverse ? signs[i] : 0;
        for (int64_t l = 0; l < lanes; l++) y[i * c->stride + l * c->step] = with_sign(v[i][l] * factor, sign);
    }
}

pyops_status pyops_hadamard(float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t inverse,
                            uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_hadamard(outer, n, inner, block);
    const int64_t all = outer * n * inner;
    if (status || all == 0) return status;
    const int is_contiguous = inner == 1;
    call c = {.stride = inner, .step = is_contiguous ? n : 1, .inverse = inverse};
    pyops_active()->random_words(c.signs, 0, block, 0, key);
    for (int64_t i = 0; i < block; i++) c.signs[i] &= 0x80000000u;
    const int64_t lines = is_contiguous ? outer : inner, groups = (lines + LANES - 1) / LANES, blocks = (n + block - 1) / block;
    #pragma omp parallel for schedule(static) if (all > PYOPS_SHARE_FLOATS)
    for (int64_t task = 0; task < (is_contiguous ? 1 : outer) * blocks * groups; task++) {
        const int64_t line = task % groups * LANES, first = task / groups % blocks * block, o = task / groups / blocks;
        const int64_t end = pyops_min(first + block, n), lanes = pyops_min(LANES, lines - line);
        for (int64_t i = first, length; i < end; i += length) {
            length = hadamard_length(i, n, block);
            const int64_t at = (o * n + i) * inner + line * c.step;
            transform(&c, c.signs + (i - first), y + at, x + at, length, lanes);
        }
    }
    return PYOPS_OK;
}
