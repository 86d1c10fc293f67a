/* cumulate.c - sums and products of the first 1, 2, 3 ... elements along an axis, or of all of them.
 *
 * Columns are processed in blocks, whose running results stay in L1; threads share blocks.  float is computed in double, so a long
 * axis loses no more digits than a short one.
 */
#include "internal.h"

enum { COLUMNS = 64 };

static pyops_status check_cumulate(const char *who, int64_t outer, int64_t n, int64_t inner, int32_t op) {
    PYOPS_REQUIRE(outer >= 0 && n >= 0 && inner >= 0, "%s: outer=%lld n=%lld inner=%lld, expected at least 0", who, LL(outer),
                  LL(n), LL(inner));
    PYOPS_REQUIRE(op == PYOPS_OP_ADD || op == PYOPS_OP_MULTIPLY, "%s: op=%d, expected PYOPS_OP_ADD or PYOPS_OP_MULTIPLY", who,
                  op);
    return PYOPS_OK;
}

/* WIDE: the type of the running results */
/* clang-format off */
#define CUMULATE(NAME, TYPE, WIDE) \
    pyops_status pyops_##NAME(TYPE *y, const TYPE *x, int64_t outer, int64_t n, int64_t inner, int32_t op, int32_t last, \
                              void *stream) { \
        (void)stream; \
        const pyops_status status = check_cumulate(#NAME, outer, n, inner, op); \
        if (status) return status; \
        const int64_t blocks = (inner + COLUMNS - 1) / COLUMNS; \
        _Pragma("omp parallel for schedule(static) if (outer * n * inner > PYOPS_SHARE_FLOATS)") \
        for (int64_t b = 0; b < outer * blocks; b++) { \
            const int64_t o = b / blocks, from = b % blocks * COLUMNS, count = pyops_min(COLUMNS, inner - from); \
            WIDE run[COLUMNS]; \
            for (int64_t k = 0; k < count; k++) run[k] = op == PYOPS_OP_MULTIPLY; \
            for (int64_t i = 0; i < n; i++) { \
                const int64_t at = (o * n + i) * inner + from; \
                for (int64_t k = 0; k < count; k++) \
                    run[k] = op == PYOPS_OP_ADD ? run[k] + (WIDE)x[at + k] : run[k] * (WIDE)x[at + k]; \
                for (int64_t k = 0; k < (last ? 0 : count); k++) y[at + k] = (TYPE)run[k]; \
            } \
            for (int64_t k = 0; k < (last ? count : 0); k++) y[o * inner + from + k] = (TYPE)run[k]; \
        } \
        return PYOPS_OK; \
    }
/* clang-format on */

CUMULATE(cumulate, float, double)
CUMULATE(cumulate_int32, int32_t, uint32_t)
CUMULATE(cumulate_double, double, double)
