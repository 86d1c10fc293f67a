/* strided_double.c - operations on strided arrays of double, which only the CPU has.
 *
 * They serve code that needs more digits than float has, such as checks of gradients by differences: one plain loop for each
 * operation, without tiles and without code for each instruction set.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

enum { AXES = PYOPS_AXES, OPERANDS = 4, REAL = sizeof(double), SINGLE = sizeof(float), WHOLE = sizeof(int32_t) };
#define CHUNK PYOPS_TUNED(strided_double_chunk, 8192, 1, 16384, 1)

typedef struct {
    int n;                              /* axes, the last one innermost; at least one */
    int64_t size[AXES], stride[OPERANDS][AXES];         /* strides in bytes */
} space;

/* The axes longer than 1; adjacent ones are merged where all operands allow it.  item: bytes of an element. */
static space merged(const int64_t *shape, const int64_t *strides, int64_t ndim, int operands, const int64_t *item) {
    space s = {0};
    for (int64_t d = 0; d < ndim; d++) {
        if (shape[d] == 1) continue;
        int joins = s.n > 0;
        for (int o = 0; joins && o < operands; o++) joins = s.stride[o][s.n - 1] == strides[o * ndim + d] * item[o] * shape[d];
        if (joins) s.size[s.n - 1] *= shape[d];
        else s.size[s.n++] = shape[d];
        for (int o = 0; o < operands; o++) s.stride[o][s.n - 1] = strides[o * ndim + d] * item[o];
    }
    if (!s.n) s.n = 1, s.size[0] = 1;
    return s;
}

/* Set p to the first elements of row `row` of the outer axes. */
static void locate(const space *s, int operands, void *const *base, int64_t row, char **p) {
    for (int o = 0; o < operands; o++) p[o] = base[o];
    for (int d = s->n - 2; d >= 0; d--) {
        for (int o = 0; o < operands; o++) p[o] += row % s->size[d] * s->stride[o][d];
        row /= s->size[d];
    }
}

static int64_t rows_of(const space *s) {
    int64_t rows = 1;
    for (int d = 0; d < s->n - 1; d++) rows *= s->size[d];
    return rows;
}

/* ---- element by element ---- */
typedef void row_function(char *const *p, const int64_t *step, int64_t n, int op);

static void elementwise(row_function *row, int op, int operands, void *const *base, const int64_t *item, const int64_t *shape,
                        const int64_t *strides, int64_t ndim) {
    const space s = merged(shape, strides, ndim, operands, item);
    const int64_t inner = s.size[s.n - 1], chunks = (inner + CHUNK - 1) / CHUNK, units = rows_of(&s) * chunks;
    int64_t step[OPERANDS] = {0};
    for (int o = 0; o < operands; o++) step[o] = s.stride[o][s.n - 1];
    PYOPS_FOR(u, units, units * inner > PYOPS_SHARE_FLOATS, {
        const int64_t from = u % chunks * CHUNK;
        char *p[OPERANDS];
        locate(&s, operands, base, u / chunks, p);
        for (int o = 0; o < operands; o++) p[o] += from * step[o];
        row(p, step, pyops_min(CHUNK, inner - from), op);
    });
}

PYOPS_FLOOR_DIVISION(double, double, fmod, floor, copysign)

static double relu6(double x) {
    const double y = x < 0.0 ? 0.0 : x;                 /* NaN stays */
    return y > 6.0 ? 6.0 : y;
}

static double unary(double x, int op) {
    const double e = op == PYOPS_OP_SIGMOID ? exp(-fabs(x)) : 0.0;
    switch (op) {
    case PYOPS_OP_NEGATE:      return -x;
    case PYOPS_OP_ABS:         return fabs(x);
    case PYOPS_OP_SQRT:        return sqrt(x);
    case PYOPS_OP_EXP:         return exp(x);
    case PYOPS_OP_LOG:         return log(x);
    case PYOPS_OP_TANH:        return tanh(x);
    case PYOPS_OP_SIGMOID:     return (x < 0.0 ? e : 1.0) / (1.0 + e);
    case PYOPS_OP_FLOOR:       return floor(x);
    case PYOPS_OP_SIN:         return sin(x);
    case PYOPS_OP_COS:         return cos(x);
    case PYOPS_OP_EXPM1:       return expm1(x);
    case PYOPS_OP_LOG1P:       return log1p(x);
    case PYOPS_OP_ARCTAN:      return atan(x);
    case PYOPS_OP_ARCSIN:      return asin(x);
    case PYOPS_OP_ARCCOS:      return acos(x);
    case PYOPS_OP_ERF:         return erf(x);
    case PYOPS_OP_ROUND:       return rint(x);
    case PYOPS_OP_CEIL:        return ceil(x);
    case PYOPS_OP_TRUNC:       return trunc(x);
    case PYOPS_OP_SIGN:        return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x == 0.0 ? 0.0 : x;
    case PYOPS_OP_TAN:         return tan(x);
    case PYOPS_OP_ELU:         return x > 0.0 ? x : expm1(x);
    case PYOPS_OP_SOFTPLUS:    return (x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x)));
    case PYOPS_OP_HARDSIGMOID: return relu6(x + 3.0) / 6.0;
    case PYOPS_OP_HARDSWISH:   return x * (relu6(x + 3.0) / 6.0);
    default:                   return x;
    }
}

static double binary(double a, double b, int op) {
    switch (op) {
    case PYOPS_OP_ADD:          return a + b;
    case PYOPS_OP_SUBTRACT:     return a - b;
    case PYOPS_OP_MULTIPLY:     return a * b;
    case PYOPS_OP_DIVIDE:       return a / b;
    case PYOPS_OP_POWER:        return pow(a, b);
    case PYOPS_OP_MAXIMUM:      return a >= b || a != a ? a : b;
    case PYOPS_OP_MINIMUM:      return a <= b || a != a ? a : b;
    case PYOPS_OP_EQUAL:        return a == b;
    case PYOPS_OP_NOT_EQUAL:    return a != b;
    case PYOPS_OP_LESS:         return a < b;
    case PYOPS_OP_LESS_EQUAL:   return a <= b;
    case PYOPS_OP_GREATER:      return a > b;
    case PYOPS_OP_FLOOR_DIVIDE: return pyops_floor_divide_double(a, b);
    case PYOPS_OP_REMAINDER:    return pyops_remainder_double(a, b);
    case PYOPS_OP_AND:          return a != 0.0 && b != 0.0;
    case PYOPS_OP_OR:           return a != 0.0 || b != 0.0;
    case PYOPS_OP_XOR:          return (a != 0.0) != (b != 0.0);
    default:                    return a >= b;
    }
}

static void unary_row(char *const *p, const int64_t *step, int64_t n, int op) {
    for (int64_t i = 0; i < n; i++) *(double *)(p[0] + i * step[0]) = unary(*(const double *)(p[1] + i * step[1]), op);
}

static void binary_row(char *const *p, const int64_t *step, int64_t n, int op) {
    for (int64_t i = 0; i < n; i++)
        *(double *)(p[0] + i * step[0]) = binary(*(const double *)(p[1] + i * step[1]), *(const double *)(p[2] + i * step[2]),
                                                 op);
}

static void where_row(char *const *p, const int64_t *step, int64_t n, int op) {
    (void)op;
    for (int64_t i = 0; i < n; i++) {
        const int is_true = *(const double *)(p[1] + i * step[1]) != 0.0;
        *(double *)(p[0] + i * step[0]) = *(const double *)(is_true ? p[2] + i * step[2] : p[3] + i * step[3]);
    }
}

static void from_float_row(char *const *p, const int64_t *step, int64_t n, int op) {
    (void)op;
    for (int64_t i = 0; i < n; i++) *(double *)(p[0] + i * step[0]) = (double)*(const float *)(p[1] + i * step[1]);
}

static void from_int32_row(char *const *p, const int64_t *step, int64_t n, int op) {
    (void)op;
    for (int64_t i = 0; i < n; i++) *(double *)(p[0] + i * step[0]) = (double)*(const int32_t *)(p[1] + i * step[1]);
}

static void to_float_row(char *const *p, const int64_t *step, int64_t n, int op) {
    (void)op;
    for (int64_t i = 0; i < n; i++) *(float *)(p[0] + i * step[0]) = (float)*(const double *)(p[1] + i * step[1]);
}

static void to_int32_row(char *const *p, const int64_t *step, int64_t n, int op) {
    (void)op;
    for (int64_t i = 0; i < n; i++) {
        const double x = *(const double *)(p[1] + i * step[1]);
        *(int32_t *)(p[0] + i * step[0]) = x > -2147483649.0 && x < 2147483648.0 ? (int32_t)x : INT32_MIN;
    }
}

pyops_status pyops_strided_unary_double(double *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                        int32_t op, void *stream) {
    (void)stream;
    const pyops_status status = check_strided("strided_unary_double", op, PYOPS_OP_HARDSWISH, shape, ndim);
    if (!status) elementwise(unary_row, op, 2, (void *[]){y, (void *)x}, (int64_t[]){REAL, REAL}, shape, strides, ndim);
    return status;
}

pyops_status pyops_strided_binary_double(double *y, const double *a, const double *b, const int64_t *shape,
                                         const int64_t *strides, int64_t ndim, int32_t op, void *stream) {
    (void)stream;
    const pyops_status status = check_strided("strided_binary_double", op, PYOPS_OP_XOR, shape, ndim);
    if (!status)
        elementwise(binary_row, op, 3, (void *[]){y, (void *)a, (void *)b}, (int64_t[]){REAL, REAL, REAL}, shape, strides,
                    ndim);
    return status;
}

pyops_status pyops_strided_where_double(double *y, const double *condition, const double *a, const double *b,
                                        const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream) {
    (void)stream;
    const pyops_status status = check_shape("strided_where_double", shape, ndim);
    if (!status)
        elementwise(where_row, 0, 4, (void *[]){y, (void *)condition, (void *)a, (void *)b},
                    (int64_t[]){REAL, REAL, REAL, REAL}, shape, strides, ndim);
    return status;
}

static pyops_status convert(const char *who, row_function *row, void *y, int64_t y_item, const void *x, int64_t x_item,
                            const int64_t *shape, const int64_t *strides, int64_t ndim) {
    const pyops_status status = check_shape(who, shape, ndim);
    if (!status) elementwise(row, 0, 2, (void *[]){y, (void *)x}, (int64_t[]){y_item, x_item}, shape, strides, ndim);
    return status;
}

pyops_status pyops_strided_double_from_float(double *y, const float *x, const int64_t *shape, const int64_t *strides,
                                             int64_t ndim, void *stream) {
    (void)stream;
    return convert("strided_double_from_float", from_float_row, y, REAL, x, SINGLE, shape, strides, ndim);
}

pyops_status pyops_strided_double_from_int32(double *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                             int64_t ndim, void *stream) {
    (void)stream;
    return convert("strided_double_from_int32", from_int32_row, y, REAL, x, WHOLE, shape, strides, ndim);
}

pyops_status pyops_strided_double_to_float(float *y, const double *x, const int64_t *shape, const int64_t *strides,
                                           int64_t ndim, void *stream) {
    (void)stream;
    return convert("strided_double_to_float", to_float_row, y, SINGLE, x, REAL, shape, strides, ndim);
}

pyops_status pyops_strided_double_to_int32(int32_t *y, const double *x, const int64_t *shape, const int64_t *strides,
                                           int64_t ndim, void *stream) {
    (void)stream;
    return convert("strided_double_to_int32", to_int32_row, y, WHOLE, x, REAL, shape, strides, ndim);
}

/* ---- reductions ---- */
static double combined(double a, double b, int op) {
    if (op == PYOPS_OP_SUM) return a + b;
    return (op == PYOPS_OP_MAX ? a >= b : a <= b) || a != a ? a : b;
}

/* One thread: the order of the terms is the order of the axes. */
pyops_status pyops_strided_reduce_double(double *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                         int32_t op, void *stream) {
    const pyops_status status = check_strided("strided_reduce_double", op, PYOPS_OP_MIN, shape, ndim);
    if (status) return status;
    int64_t outputs[AXES + 1], zeros[2 * AXES] = {0}, n = 1;
    for (int64_t d = 0; d < ndim; d++) {
        outputs[d] = strides[d] ? shape[d] : 1;
        zeros[d] = strides[d];
        n *= shape[d];
    }
    PYOPS_REQUIRE(n || op == PYOPS_OP_SUM,
                  "strided_reduce_double: no elements, expected at least one for a maximum or minimum");
    const double first = op == PYOPS_OP_SUM ? 0.0 : op == PYOPS_OP_MAX ? -INFINITY : INFINITY;
    const pyops_status filled = pyops_strided_unary_double(y, &first, outputs, zeros, ndim, PYOPS_OP_COPY, stream);
    if (filled || !n) return filled;
    const space s = merged(shape, strides, ndim, 2, (int64_t[]){REAL, REAL});
    const int64_t inner = s.size[s.n - 1], rows = rows_of(&s), y_step = s.stride[0][s.n - 1], x_step = s.stride[1][s.n - 1];
    void *const base[] = {y, (void *)x};
    for (int64_t row = 0; row < rows; row++) {
        char *p[OPERANDS];
        locate(&s, 2, base, row, p);
        if (y_step) {
            for (int64_t i = 0; i < inner; i++) {
                double *const to = (double *)(p[0] + i * y_step);
                *to = combined(*to, *(const double *)(p[1] + i * x_step), op);
            }
            continue;
        }
        double lane[4] = {first, first, first, first};
        for (int64_t i = 0; i < inner; i++) lane[i % 4] = combined(lane[i % 4], *(const double *)(p[1] + i * x_step), op);
        double *const to = (double *)p[0];
        *to = combined(*to, combined(combined(lane[0], lane[1], op), combined(lane[2], lane[3], op), op), op);
    }
    return PYOPS_OK;
}

pyops_status pyops_argmax_double(int32_t *y, const double *x, int64_t R, int64_t C, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && C >= 1, "argmax_double: R=%lld C=%lld, expected R of at least 0 and C of at least 1", LL(R), LL(C));
    for (int64_t r = 0; r < R; r++) {
        const double *const row = x + r * C;
        int64_t best = 0;
        for (int64_t c = 1; c < C && row[best] == row[best]; c++)
            if (!(row[c] <= row[best])) best = c;
        y[r] = (int32_t)best;
    }
    return PYOPS_OK;
}

/* ---- sorting: merge sort of the indices, from runs of 1 upwards ---- */
static int in_order(double a, double b) { return a <= b || b != b; }            /* NaN is last */

static void argsort_row(int32_t *y, const double *row, int64_t C, int32_t *spare) {
    int32_t *from = y, *to = spare;
    for (int64_t c = 0; c < C; c++) from[c] = (int32_t)c;
    for (int64_t run = 1; run < C; run *= 2) {
        for (int64_t left = 0; left < C; left += 2 * run) {
            const int64_t middle = pyops_min(left + run, C), end = pyops_min(left + 2 * run, C);
            int64_t i = left, j = middle;
            for (int64_t k = left; k < end; k++)
                to[k] = i < middle && (j == end || in_order(row[from[i]], row[from[j]])) ? from[i++] : from[j++];
        }
        int32_t *const sorted = to;
        to = from, from = sorted;
    }
    if (from != y) memcpy(y, from, (size_t)C * sizeof *y);
}

pyops_status pyops_argsort_double(int32_t *y, const double *x, int64_t R, int64_t C, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(R >= 0 && C >= 0, "argsort_double: R=%lld C=%lld, expected at least 0", LL(R), LL(C));
    int failed = 0;
    PYOPS_FOR(r, R, R * C > PYOPS_SHARE_EXPS, {
        int32_t *const spare = (int32_t *)pyops_scratch_or_fail((size_t)C, &failed);
        if (spare) argsort_row(y + r * C, x + r * C, C, spare);
    });
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "argsort_double: no memory for %lld indices", LL(C)) : PYOPS_OK;
}

pyops_status pyops_add_rows_double(double *y, const double *x, const int32_t *ids, int64_t R, int64_t V, int64_t E,
                                   void *stream) {
    (void)stream;
    pyops_status status = check_embedding("add_rows_double", R, V, E);
    if (!status) status = pyops_check_ids("add_rows_double", ids, R, V);
    if (status) return status;
    for (int64_t r = 0; r < R; r++)
        for (int64_t e = 0; e < E; e++) y[ids[r] * E + e] += x[r * E + e];
    return PYOPS_OK;
}

/* ---- products ---- */
pyops_status pyops_matmul_double(double *y, const double *a, const double *b, const int64_t *shape, const int64_t *strides,
                                 int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldy, int64_t a_row, int64_t a_col,
                                 int64_t b_row, int64_t b_col, void *stream) {
    (void)stream;
    pyops_status status = check_shape("matmul_double", shape, ndim);
    if (!status) status = check_gemm("matmul_double", M, N, K, ldy);
    if (status) return status;
    int64_t count = 1;
    for (int64_t d = 0; d < ndim; d++) count *= shape[d];
    PYOPS_FOR(row, count * M, count * M * N * K > PYOPS_SHARE_FMAS, {
        int64_t rest = row / M, at[3] = {row % M * ldy, row % M * a_row, 0};
        for (int64_t d = ndim - 1; d >= 0; d--) {
            for (int o = 0; o < 3; o++) at[o] += rest % shape[d] * strides[o * ndim + d];
            rest /= shape[d];
        }
        double *const to = y + at[0];
        for (int64_t n = 0; n < N; n++) to[n] = 0.0;
        if (b_col == 1) {
            for (int64_t k = 0; k < K; k++) {
                const double factor = a[at[1] + k * a_col];
                const double *const b_k = b + at[2] + k * b_row;
                for (int64_t n = 0; n < N; n++) to[n] += factor * b_k[n];
            }
            continue;
        }
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++) to[n] += a[at[1] + k * a_col] * b[at[2] + k * b_row + n * b_col];
    });
    return PYOPS_OK;
}
