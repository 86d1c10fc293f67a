/* narrow_sums.c - matrix products whose sums have few bits, as in tensor cores.
 *
 * A task is a tile of c.  For each group of K, columns of b and rows of a become doubles, and the row kernel adds the group to the
 * running sums of a row of the tile.
 */
#include <string.h>
#include "internal.h"
#define NARROW_INLINE static inline
#include "narrow_sums.inc"

enum { ROWS = 64, COLUMNS = PYOPS_NARROW_COLUMNS };

typedef struct {
    const pyops_kernels *k;
    float *c;
    pyops_view a, b;
    const float *bias;
    int64_t K, ldc, promote;
    int32_t accumulate, relu, bits;
} product;

/* Copy n numbers as doubles, and return whether all are finite. */
static int widen(double *to, int64_t step, const float *from, int64_t from_step, int64_t n) {
    float suspect = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        to[i * step] = (double)from[i * from_step];
        suspect += from[i * from_step] * 0.0f;
    }
    return suspect == 0.0f;
}

/* Rows i to i + rows - 1, columns j to j + columns - 1. */
static void tile(const product *p, int64_t i, int64_t rows, int64_t j, int64_t columns) {
    double partial[ROWS][COLUMNS], b[NARROW_GROUP][COLUMNS], a[NARROW_GROUP];
    float total[ROWS][COLUMNS];
    char broken[ROWS] = {0}; /* an infinity or NaN is among the sums of the row */
    memset(partial, 0, sizeof partial);
    memset(total, 0, sizeof total);
    memset(b, 0, sizeof b);
    for (int64_t k = 0, n; k < p->K; k += n) {
        n = narrow_length(k, p->K, p->promote);
        const float *const from_a = p->a.p + i * p->a.row + k * p->a.col, *const from_b = p->b.p + k * p->b.row + j * p->b.col;
        int b_is_finite = 1;
        for (int64_t l = 0; l < columns; l++) b_is_finite &= widen(&b[0][l], COLUMNS, from_b + l * p->b.col, p->b.row, n);
        for (int64_t r = 0; r < rows; r++) {
            const float *const row = from_a + r * p->a.row;
            const int a_is_finite = widen(a, 1, row, p->a.col, n);
            if (a_is_finite && b_is_finite && !broken[r]) {
                p->k->narrow_sums(partial[r], a, b[0], n, p->bits);
                continue;
            }
            broken[r] = 1;
            for (int64_t l = 0; l < columns; l++)
                partial[r][l] = narrow_sum(partial[r][l], row, p->a.col, from_b + l * p->b.col, p->b.row, n, p->bits);
        }
        if (!(k + n == p->K || (p->promote && (k + n) % p->promote == 0))) continue;
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t l = 0; l < columns; l++) total[r][l] += (float)partial[r][l], partial[r][l] = 0.0;
            broken[r] = 0;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t l = 0; l < columns; l++) {
            float *const c = p->c + (i + r) * p->ldc + j + l;
            *c = narrow_result(total[r][l], p->bias ? p->bias + j + l : NULL, p->accumulate ? c : NULL, p->relu);
        }
}

pyops_status pyops_gemm_narrow(float *c, const float *a, const float *b, const float *bias, const int64_t *shape,
                               const int64_t *strides, int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
                               int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int32_t accumulate, int32_t relu,
                               int32_t bits, int64_t promote, void *stream) {
    (void)stream;
    const pyops_status status = check_narrow(shape, ndim, M, N, K, ldc, bits, promote);
    if (status) return status;
    int64_t products = 1;
    for (int64_t d = 0; d < ndim; d++) products *= shape[d];
    const int64_t down = (M + ROWS - 1) / ROWS, across = (N + COLUMNS - 1) / COLUMNS, tasks = products * down * across;
    const product all = {.k = pyops_active(),
                         .c = c,
                         .a = {a, a_row, a_col},
                         .b = {b, b_row, b_col},
                         .bias = bias,
                         .K = K,
                         .ldc = ldc,
                         .promote = promote,
                         .accumulate = accumulate,
                         .relu = relu,
                         .bits = bits};
    PYOPS_FOR(task, tasks, products * M * N * K > PYOPS_SHARE_EXPS, {
        const int64_t i = task % down * ROWS, j = task / down % across * COLUMNS;
        product one = all;
        for (int64_t d = ndim - 1, rest = task / down / across; d >= 0; rest /= shape[d--]) {
            const int64_t at = rest % shape[d];
            one.c += at * strides[d], one.a.p += at * strides[ndim + d], one.b.p += at * strides[2 * ndim + d];
        }
        tile(&one, i, pyops_min(ROWS, M - i), j, pyops_min(COLUMNS, N - j));
    });
    return PYOPS_OK;
}
