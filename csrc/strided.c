/* strided.c - element-wise operations, copies and reductions on arrays with any strides.
 *
 * The axes of a call are first simplified: axes of size 1 are dropped, the others are ordered by stride, and adjacent axes are
 * merged where possible.  A contiguous array of any shape becomes a single axis.  The rest is cut into units, which threads
 * share; a unit is a block of rows for the loops in kernels/strided_rows.inc, or a tile if an operand is transposed with
 * respect to the result.  float and int32 have the same size, so only those loops depend on the type.
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"

enum { AXES = PYOPS_AXES, OPERANDS = 4, TILE_ROWS = 32, TILE_COLUMNS = 128 };
#define CHUNK PYOPS_TUNED(strided_chunk, 16384, 1, 65536, 1)
/* Rows of fewer than SHORT elements are shorter than the call of a row function takes.  A block has about BLOCK elements, or
 * SHORT_ROWS short rows, which fit in L1 together with the skipped elements between them. */
#define SHORT PYOPS_TUNED(strided_short, 16, 1, 32, 1)
#define BLOCK PYOPS_TUNED(strided_block, 4096, 32, 8192, 1)
#define SHORT_ROWS PYOPS_TUNED(strided_short_rows, 256, 1, 512, 1)
typedef char element[4];                /* float or int32: only the row functions interpret it */
_Static_assert(sizeof(float) == sizeof(element) && sizeof(int32_t) == sizeof(element), "all elements have the same size");

typedef struct {
    int n;                              /* axes, the last one innermost; at least one */
    int64_t size[AXES], stride[OPERANDS][AXES];
} space;

static int64_t abs_stride(int64_t stride) { return stride < 0 ? -stride : stride; }

/* Whether axis a belongs outside axis b, by the strides of operand `by`; broadcast axes go outermost. */
static int outside(const space *s, int by, int a, int b) {
    const int64_t at_a = abs_stride(s->stride[by][a]), at_b = abs_stride(s->stride[by][b]);
    return !at_a ? at_b != 0 : at_b && at_a > at_b;
}

static void swap_axes(space *s, int operands, int a, int b) {
    const int64_t size = s->size[a];
    s->size[a] = s->size[b], s->size[b] = size;
    for (int o = 0; o < operands; o++) {
        const int64_t stride = s->stride[o][a];
        s->stride[o][a] = s->stride[o][b], s->stride[o][b] = stride;
    }
}

/* The simplified axes, ordered by the strides of operand `by`. */
static space simplify(const int64_t *shape, const int64_t *strides, int64_t ndim, int operands, int by) {
    space s = {0};
    for (int64_t d = 0; d < ndim; d++) {
        if (shape[d] == 1) continue;
        s.size[s.n] = shape[d];
        for (int o = 0; o < operands; o++) s.stride[o][s.n] = strides[o * ndim + d];
        for (int a = s.n++; a > 0 && outside(&s, by, a, a - 1); a--) swap_axes(&s, operands, a, a - 1);
    }
    int last = 0;                       /* merge axis d into axis `last` if a step along `last` spans all of d */
    for (int d = 1; d < s.n; d++) {
        int joins = 1;
        for (int o = 0; o < operands; o++) joins &= s.stride[o][last] == s.stride[o][d] * s.size[d];
        s.size[joins ? last : last + 1] = joins ? s.size[last] * s.size[d] : s.size[d];
        last += !joins;
        for (int o = 0; o < operands; o++) s.stride[o][last] = s.stride[o][d];
    }
    if (!s.n) {                         /* one element */
        s.size[0] = 1;
        for (int o = 0; o < operands; o++) s.stride[o][0] = 1;
    }
    s.n = last + 1;
    return s;
}

static int64_t elements(const space *s) {
    int64_t product = 1;
    for (int d = 0; d < s->n; d++) product *= s->size[d];
    return product;
}

/* ---- element by element ---- */
typedef void row_function(void *const *p, const int64_t *step, int64_t n, int op);

/* The axis along which an input is contiguous although y is not; -1 if no input is transposed. */
static int transposed_axis(const space *s, int operands) {
    int best = -1;
    int64_t nearest = INT64_MAX;
    for (int o = 1; o < operands; o++)
        for (int d = 0; d < s->n - 1; d++) {
            const int64_t along = abs_stride(s->stride[o][d]);
            if (along && along < abs_stride(s->stride[o][s->n - 1]) && along < nearest) best = d, nearest = along;
        }
    return best;
}

/* Elements y[r,c] of a tile.  An input contiguous along r is read in that order into a buffer in the order of y, so that every
 * cache line is used completely. */
static void tile(row_function *row, int op, int operands, void *const *base, const int64_t *row_step, const int64_t *step,
                 int64_t rows, int64_t columns) {
    uint32_t buffer[OPERANDS - 1][TILE_ROWS * TILE_COLUMNS];
    element *p[OPERANDS];
    int64_t down[OPERANDS], along[OPERANDS];
    for (int o = 0; o < operands; o++) {
        p[o] = base[o], down[o] = row_step[o], along[o] = step[o];
        if (!o || !row_step[o] || abs_stride(row_step[o]) >= abs_stride(step[o])) continue;
        element *to = (element *)buffer[o - 1];
        for (int64_t c = 0; c < columns; c++)
            for (int64_t r = 0; r < rows; r++)
                memcpy(to + r * TILE_COLUMNS + c, p[o] + r * row_step[o] + c * step[o], sizeof(element));
        p[o] = to, down[o] = TILE_COLUMNS, along[o] = 1;
    }
    for (int64_t r = 0; r < rows; r++) {
        void *at[OPERANDS];
        for (int o = 0; o < operands; o++) at[o] = p[o] + r * down[o];
        row(at, along, columns, op);
    }
}

/* The axis that a block of rows spans, besides the innermost one; -1 if there is a single axis.  With short rows the loops run
 * along it, so it must be long: the nearest axis of at least SHORT, or the longest. */
static int rows_axis(const space *s, int across) {
    const int inner = s->n - 1;
    if (across >= 0 || s->size[inner] >= SHORT) return across >= 0 ? across : inner - 1;
    int best = inner - 1;
    for (int d = inner - 1; d >= 0 && s->size[best] < SHORT; d--)
        if (s->size[d] > s->size[best]) best = d;
    return best;
}

/* Elements y[r,c] of a block, with a loop along c, or along r if rows are short. */
static void block(row_function *row, int op, int operands, void *const *base, const int64_t *row_step, const int64_t *step,
                  int64_t rows, int64_t columns, int is_short) {
    const int64_t *along = is_short ? row_step : step, *down = is_short ? step : row_step;
    const int64_t n = is_short ? rows : columns, loops = is_short ? columns : rows;
    for (int64_t i = 0; i < loops; i++) {
        void *at[OPERANDS];
        for (int o = 0; o < operands; o++) at[o] = (element *)base[o] + i * down[o];
        row(at, along, n, op);
    }
}

/* The units of a call: blocks of rows or tiles. */
typedef struct {
    row_function *row;
    int op, operands, rows_at, is_short, is_tile;
    void *const *base;                  /* y and the inputs */
    space s;
    int64_t part[AXES], parts[AXES];    /* elements of an axis in a unit, and units along the axis */
} units;

/* Units [first, first + count). */
static void run(const units *w, int64_t first, int64_t count) {
    const int inner = w->s.n - 1, operands = w->operands, rows_at = w->rows_at;
    int64_t at[AXES], step[OPERANDS], down[OPERANDS] = {0}, rest = first;
    element *p[OPERANDS];
    for (int o = 0; o < operands; o++) {
        p[o] = w->base[o], step[o] = w->s.stride[o][inner];
        if (rows_at >= 0) down[o] = w->s.stride[o][rows_at];
    }
    for (int d = inner; d >= 0; d--) {
        at[d] = rest % w->parts[d], rest /= w->parts[d];
        for (int o = 0; o < operands; o++) p[o] += at[d] * w->part[d] * w->s.stride[o][d];
    }
    for (int64_t u = 0; u < count; u++) {
        const int64_t columns = pyops_min(w->part[inner], w->s.size[inner] - at[inner] * w->part[inner]);
        const int64_t rows = rows_at < 0 ? 1 : pyops_min(w->part[rows_at], w->s.size[rows_at] - at[rows_at] * w->part[rows_at]);
        void *q[OPERANDS];
        for (int o = 0; o < operands; o++) q[o] = p[o];
        /* The minimum tells the compiler the length of the unrolled copy of a column: half the time for 2048 x 2048. */
        if (w->is_tile) tile(w->row, w->op, operands, q, down, step, pyops_min(rows, TILE_ROWS), columns);
        else block(w->row, w->op, operands, q, down, step, rows, columns, w->is_short);
        for (int d = inner; d >= 0; d--) {              /* advance to the next unit */
            for (int o = 0; o < operands; o++) p[o] += w->part[d] * w->s.stride[o][d];
            if (++at[d] < w->parts[d]) break;
            for (int o = 0; o < operands; o++) p[o] -= w->parts[d] * w->part[d] * w->s.stride[o][d];
            at[d] = 0;
        }
    }
}

/* base: y and the inputs.  Threads share the work above `share` elements.  A parallel region costs as much as some hundred
 * elements even with one thread, so small arrays do without. */
static void elementwise(row_function *row, int op, int operands, void *const *base, const int64_t *shape,
                        const int64_t *strides, int64_t ndim, int64_t share) {
    units w = {.row = row, .op = op, .operands = operands, .base = base, .s = simplify(shape, strides, ndim, operands, 0)};
    const space *s = &w.s;
    const int64_t n = elements(s);
    if (!n) return;
    const int inner = s->n - 1, across = transposed_axis(s, operands);
    if (!inner && n <= CHUNK) {
        int64_t step[OPERANDS];
        for (int o = 0; o < operands; o++) step[o] = s->stride[o][0];
        row(base, step, n, op);
        return;
    }
    w.rows_at = rows_axis(s, across);
    w.is_short = w.rows_at >= 0 && s->size[inner] < SHORT;
    w.is_tile = across >= 0 && !w.is_short && s->size[across] >= SHORT;
    const int64_t columns_most = w.is_tile ? TILE_COLUMNS : across >= 0 ? BLOCK / SHORT : CHUNK;
    const int64_t rows_most = w.is_tile ? TILE_ROWS : w.is_short ? SHORT_ROWS : pyops_max(1, BLOCK / s->size[inner]);
    int64_t count = 1;
    for (int d = 0; d < s->n; d++) {
        w.part[d] = d == inner ? columns_most : d != w.rows_at ? 1 : across >= 0 ? pyops_max(rows_most, SHORT) : rows_most;
        w.parts[d] = (s->size[d] + w.part[d] - 1) / w.part[d];
        count *= w.parts[d];
    }
    const int64_t threads = n > share ? pyops_min(omp_get_max_threads(), count) : 1;
    if (threads == 1) {
        run(&w, 0, count);
        return;
    }
    #pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t t = 0; t < threads; t++) run(&w, count * t / threads, count * (t + 1) / threads - count * t / threads);
}

static int64_t share(int op) { return op >= PYOPS_OP_EXP ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS; }

static pyops_status unary(const char *who, row_function *row, int op, void *y, const void *x, const int64_t *shape,
                          const int64_t *strides, int64_t ndim) {
    const pyops_status status = check_strided(who, op, PYOPS_OP_HARDSWISH, shape, ndim);
    if (!status) elementwise(row, op, 2, (void *[]){y, (void *)x}, shape, strides, ndim, share(op));
    return status;
}

static pyops_status binary(const char *who, row_function *row, int op, void *y, const void *a, const void *b,
                           const int64_t *shape, const int64_t *strides, int64_t ndim) {
    const pyops_status status = check_strided(who, op, PYOPS_OP_XOR, shape, ndim);
    if (!status)
        elementwise(row, op, 3, (void *[]){y, (void *)a, (void *)b}, shape, strides, ndim,
                    op == PYOPS_OP_POWER ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS);
    return status;
}

/* The value replaces an input: one element, stride 0. */
static pyops_status scalar(const char *who, row_function *row, int op, void *y, const void *x, const void *value,
                           const int64_t *shape, const int64_t *strides, int64_t ndim, int reflected) {
    int64_t three[OPERANDS * AXES] = {0};
    const pyops_status status = check_shape(who, shape, ndim);
    if (status) return status;
    memcpy(three, strides, (size_t)ndim * sizeof *three);
    memcpy(three + (reflected ? 2 : 1) * ndim, strides + ndim, (size_t)ndim * sizeof *three);
    return binary(who, row, op, y, reflected ? value : x, reflected ? x : value, shape, three, ndim);
}

pyops_status pyops_strided_unary(float *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                 int32_t op, void *stream) {
    (void)stream;
    return unary("strided_unary", pyops_active()->strided_unary, op, y, x, shape, strides, ndim);
}

pyops_status pyops_strided_unary_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                       int32_t op, void *stream) {
    (void)stream;
    PYOPS_REQUIRE(op >= PYOPS_OP_COPY && op <= PYOPS_OP_ABS,
                  "strided_unary_int32: op=%d, expected copy, negate or abs for int32", op);
    return unary("strided_unary_int32", pyops_active()->strided_unary_int32, op, y, x, shape, strides, ndim);
}

pyops_status pyops_strided_binary(float *y, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
                                  int64_t ndim, int32_t op, void *stream) {
    (void)stream;
    return binary("strided_binary", pyops_active()->strided_binary, op, y, a, b, shape, strides, ndim);
}

pyops_status pyops_strided_binary_int32(int32_t *y, const int32_t *a, const int32_t *b, const int64_t *shape,
                                        const int64_t *strides, int64_t ndim, int32_t op, void *stream) {
    (void)stream;
    pyops_status status = check_no_division("strided_binary_int32", op);
    if (!status) status = check_shape("strided_binary_int32", shape, ndim);
    if (op == PYOPS_OP_POWER && !status) {
        int64_t two[2 * AXES] = {0};
        int32_t least = 0;
        memcpy(two + ndim, strides + 2 * ndim, (size_t)ndim * sizeof *two);
        int64_t n = 1;
        for (int64_t d = 0; d < ndim; d++) n *= shape[d];
        if (n) status = pyops_strided_reduce_int32(&least, b, shape, two, ndim, PYOPS_OP_MIN, stream);
        PYOPS_REQUIRE(status || least >= 0,
                      "strided_binary_int32: int32 to a negative power, expected exponents of at least 0 or float32");
    }
    if (status) return status;
    return binary("strided_binary_int32", pyops_active()->strided_binary_int32, op, y, a, b, shape, strides, ndim);
}

pyops_status pyops_strided_scalar(float *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                  int32_t op, int32_t reflected, float value, void *stream) {
    (void)stream;
    const pyops_kernels *k = pyops_active();
    if (op == PYOPS_OP_POWER && !reflected) {           /* powers without a logarithm */
        if (value == 1.0f) return pyops_strided_unary(y, x, shape, strides, ndim, PYOPS_OP_COPY, stream);
        if (value == 0.5f) return pyops_strided_unary(y, x, shape, strides, ndim, PYOPS_OP_SQRT, stream);
        if (value == -1.0f) return pyops_strided_scalar(y, x, shape, strides, ndim, PYOPS_OP_DIVIDE, 1, 1.0f, stream);
        if (value == 2.0f) {
            int64_t three[OPERANDS * AXES];
            const pyops_status status = check_shape("strided_scalar", shape, ndim);
            if (status) return status;
            memcpy(three, strides, (size_t)(2 * ndim) * sizeof *three);
            memcpy(three + 2 * ndim, strides + ndim, (size_t)ndim * sizeof *three);
            return pyops_strided_binary(y, x, x, shape, three, ndim, PYOPS_OP_MULTIPLY, stream);
        }
    }
    return scalar("strided_scalar", k->strided_binary, op, y, x, &value, shape, strides, ndim, reflected);
}

pyops_status pyops_strided_scalar_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                        int64_t ndim, int32_t op, int32_t reflected, int32_t value, void *stream) {
    pyops_status status = check_no_division("strided_scalar_int32", op);
    if (status) return status;
    if (op == PYOPS_OP_POWER) {                         /* that function checks the exponents */
        int64_t three[OPERANDS * AXES] = {0};
        status = check_shape("strided_scalar_int32", shape, ndim);
        if (status) return status;
        memcpy(three, strides, (size_t)ndim * sizeof *three);
        memcpy(three + (reflected ? 2 : 1) * ndim, strides + ndim, (size_t)ndim * sizeof *three);
        return pyops_strided_binary_int32(y, reflected ? &value : x, reflected ? x : &value, shape, three, ndim, op, stream);
    }
    return scalar("strided_scalar_int32", pyops_active()->strided_binary_int32, op, y, x, &value, shape, strides, ndim,
                  reflected);
}

static pyops_status where(const char *who, row_function *row, void *y, const void *condition, const void *a, const void *b,
                          const int64_t *shape, const int64_t *strides, int64_t ndim) {
    const pyops_status status = check_shape(who, shape, ndim);
    void *const base[] = {y, (void *)condition, (void *)a, (void *)b};
    if (!status) elementwise(row, 0, 4, base, shape, strides, ndim, PYOPS_SHARE_FLOATS);
    return status;
}

pyops_status pyops_strided_where(float *y, const float *condition, const float *a, const float *b, const int64_t *shape,
                                 const int64_t *strides, int64_t ndim, void *stream) {
    (void)stream;
    return where("strided_where", pyops_active()->strided_where, y, condition, a, b, shape, strides, ndim);
}

pyops_status pyops_strided_where_int32(int32_t *y, const int32_t *condition, const int32_t *a, const int32_t *b,
                                       const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream) {
    (void)stream;
    return where("strided_where_int32", pyops_active()->strided_where_int32, y, condition, a, b, shape, strides, ndim);
}

static pyops_status fill(const char *who, row_function *row, void *y, const void *value, const int64_t *shape,
                         const int64_t *strides, int64_t ndim) {
    int64_t two[2 * AXES] = {0};
    const pyops_status status = check_shape(who, shape, ndim);
    if (status) return status;
    memcpy(two, strides, (size_t)ndim * sizeof *two);
    return unary(who, row, PYOPS_OP_COPY, y, value, shape, two, ndim);
}

pyops_status pyops_strided_fill(float *y, const int64_t *shape, const int64_t *strides, int64_t ndim, float value,
                                void *stream) {
    (void)stream;
    return fill("strided_fill", pyops_active()->strided_unary, y, &value, shape, strides, ndim);
}

pyops_status pyops_strided_fill_int32(int32_t *y, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t value,
                                      void *stream) {
    (void)stream;
    return fill("strided_fill_int32", pyops_active()->strided_unary_int32, y, &value, shape, strides, ndim);
}

pyops_status pyops_strided_from_int32(float *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                      void *stream) {
    (void)stream;
    return unary("strided_from_int32", pyops_active()->strided_from_int32, PYOPS_OP_COPY, y, x, shape, strides, ndim);
}

pyops_status pyops_strided_to_int32(int32_t *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                    void *stream) {
    (void)stream;
    return unary("strided_to_int32", pyops_active()->strided_to_int32, PYOPS_OP_COPY, y, x, shape, strides, ndim);
}

/* ---- reductions ----
 * An axis of x is either kept, or reduced if y has stride 0 along it.  Outputs are computed in blocks of columns along one
 * kept axis; the reduced axes are the rows of a block.  Threads share the blocks.  If blocks are few and have many terms, the
 * outermost reduced axis is cut into pieces, whose sums are then added in order.  The cut depends on the shape alone, so the
 * order of a sum never depends on the number of threads.
 */
typedef void reduce_function(void *sums, const void *x, int64_t R, int64_t C, int64_t row_step, int64_t step, int op);
typedef union {
    double real;
    int64_t integer;
} wide;           /* type of partial sums: double for float, int64 for int32 */
enum { Y, X };                                                  /* the operands */

static void start(wide *sums, int64_t n, int op, int is_int) {
    const wide first = is_int ? (wide){.integer = op == PYOPS_OP_SUM ? 0
                                           : op == PYOPS_OP_MAX      ? INT32_MIN
                                                                     : INT32_MAX}
                              : (wide){.real = op == PYOPS_OP_SUM ? 0.0
                                           : op == PYOPS_OP_MAX   ? -INFINITY
                                                                  : INFINITY};
    for (int64_t i = 0; i < n; i++) sums[i] = first;
}

static void merge(wide *sums, const wide *more, int64_t n, int op, int is_int) {
    for (int64_t i = 0; i < n; i++) {
        if (is_int) {
            const int64_t a = sums[i].integer, b = more[i].integer;
            sums[i].integer = op == PYOPS_OP_SUM ? a + b : (op == PYOPS_OP_MAX ? a >= b : a <= b) ? a : b;
        } else {
            const double a = sums[i].real, b = more[i].real;
            sums[i].real = op == PYOPS_OP_SUM ? a + b : (op == PYOPS_OP_MAX ? a >= b : a <= b) || a != a ? a : b;
        }
    }
}

static void finish(element *y, int64_t step, const wide *sums, int64_t n, int is_int) {
    for (int64_t i = 0; i < n; i++, y += step) {
        if (is_int) memcpy(y, &(int32_t){(int32_t)(uint32_t)sums[i].integer}, sizeof *y);
        else memcpy(y, &(float){(float)sums[i].real}, sizeof *y);
    }
}

typedef struct {
    reduce_function *block;
    int op, is_int;
    space s;
    int column, row, piece;             /* axes: a kept axis or -1; the innermost and the outermost reduced axis */
    int64_t columns;                    /* columns of a block */
    int64_t parts[AXES], blocks;        /* blocks along each kept axis (1 along the others); all blocks */
    int64_t pieces, piece_size;
} reduction;

/* Return the number of columns of block u, and its offsets in x and y. */
static int64_t locate(const reduction *r, int64_t u, int64_t *x, int64_t *y) {
    int64_t columns = 1;
    *x = *y = 0;
    for (int d = r->s.n - 1; d >= 0; d--) {
        const int64_t at = u % r->parts[d] * (d == r->column ? r->columns : 1);
        u /= r->parts[d];
        *x += at * r->s.stride[X][d];
        *y += at * r->s.stride[Y][d];
        if (d == r->column) columns = pyops_min(r->columns, r->s.size[d] - at);
    }
    return columns;
}

/* Combine all terms of a block in one piece into sums. */
static void gather_terms(const reduction *r, wide *sums, const element *x, int64_t columns, int64_t piece) {
    const space *s = &r->s;
    int64_t from[AXES], size[AXES], at[AXES] = {0}, step = r->column < 0 ? 1 : s->stride[X][r->column];
    for (int d = 0; d < s->n; d++) {
        from[d] = d == r->piece ? piece * r->piece_size : 0;
        size[d] = s->stride[Y][d] ? 1 : d == r->piece ? pyops_min(r->piece_size, s->size[d] - from[d]) : s->size[d];
        if (size[d] <= 0) return;
        x += from[d] * s->stride[X][d];
    }
    for (int d;;) {
        r->block(sums, x, size[r->row], columns, s->stride[X][r->row], step, r->op);
        for (d = s->n - 1; d >= 0; d--) {               /* advance to the next rows */
            if (d == r->row || s->stride[Y][d]) continue;
            x += s->stride[X][d];
            if (++at[d] < size[d]) break;
            x -= size[d] * s->stride[X][d];
            at[d] = 0;
        }
        if (d < 0) return;
    }
}

/* Reduce block u % blocks of piece u / blocks, into y or, if they are not NULL, into sums. */
static void reduce_unit(const reduction *r, int64_t u, wide *sums, void *y, const void *x) {
    int64_t x_at, y_at;
    wide own[PYOPS_REDUCE_COLUMNS];
    const int64_t columns = locate(r, u % r->blocks, &x_at, &y_at), slots = r->blocks * r->columns;
    wide *to = sums ? sums + u / r->blocks * slots + u % r->blocks * r->columns : own;
    start(to, columns, r->op, r->is_int);
    gather_terms(r, to, (const element *)x + x_at, columns, u / r->blocks);
    if (!sums) finish((element *)y + y_at, r->column < 0 ? 1 : r->s.stride[Y][r->column], own, columns, r->is_int);
}

#define FEW PYOPS_TUNED(reduce_few, 16, 1, 64, 1)
#define PIECES PYOPS_TUNED(reduce_pieces, 32, 1, 64, 1)
#define PIECE PYOPS_TUNED(reduce_piece, 65536, 1, 1 << 17, 1)
#define PIECE_ROWS PYOPS_TUNED(reduce_piece_rows, 64, 1, 128, 1)
#define NARROW PYOPS_TUNED(reduce_narrow, 32, 1, 64, 1)
static pyops_status reduce(const char *who, reduce_function *block, int is_int, void *y, const void *x, const int64_t *shape,
                           const int64_t *strides, int64_t ndim, int op) {
    const pyops_status status = check_strided(who, op, PYOPS_OP_MIN, shape, ndim);
    if (status) return status;
    reduction r = {.block = block,
                   .op = op,
                   .is_int = is_int,
                   .s = simplify(shape, strides, ndim, 2, X),
                   .column = -1,
                   .row = -1,
                   .piece = -1,
                   .columns = 1,
                   .blocks = 1,
                   .pieces = 1,
                   .piece_size = INT64_MAX};
    const space *s = &r.s;
    const int64_t n = elements(s), inner = s->n - 1;
    int64_t outputs = 1;
    int kept = -1;
    for (int d = 0; d < s->n; d++) {
        if (s->stride[Y][d]) kept = d, outputs *= s->size[d];
        else r.row = d, r.piece = r.piece < 0 ? d : r.piece;
    }
    if (!outputs) return PYOPS_OK;
    if (r.row < 0) {                    /* nothing to reduce */
        row_function *copy = is_int ? pyops_active()->strided_unary_int32 : pyops_active()->strided_unary;
        return unary(who, copy, PYOPS_OP_COPY, y, x, shape, strides, ndim);
    }
    PYOPS_REQUIRE(n || op == PYOPS_OP_SUM, "%s: no elements, expected at least one for a maximum or minimum", who);
    /* reduce contiguous rows, unless they are so short that loops over columns are longer */
    if (s->stride[Y][inner] || s->size[inner] < NARROW) r.column = kept;
    if (r.column >= 0) r.columns = pyops_min(PYOPS_REDUCE_COLUMNS, s->size[r.column]);
    for (int d = 0; d < s->n; d++) {
        r.parts[d] = !s->stride[Y][d] ? 1 : d == r.column ? (s->size[d] + r.columns - 1) / r.columns : s->size[d];
        r.blocks *= r.parts[d];
    }
    const int64_t slots = r.blocks * r.columns;        /* sums of a piece */
    if (r.blocks < FEW) {               /* cut into pieces large enough for a thread, with fewer sums than terms */
        r.pieces = pyops_min(pyops_min(PIECES, n / PIECE), pyops_min(s->size[r.piece], n / (slots * PIECE_ROWS)));
        r.pieces = pyops_max(r.pieces, 1);
        r.piece_size = (s->size[r.piece] + r.pieces - 1) / r.pieces;
    }
    wide *sums = NULL;
    if (r.pieces > 1 && !(sums = (wide *)pyops_scratch((size_t)(r.pieces * slots) * sizeof *sums / sizeof(float))))
        return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %lld sums", who, LL(r.pieces * slots));
    const int64_t count = r.blocks * r.pieces;
    if (n <= PYOPS_SHARE_FLOATS) {
        for (int64_t u = 0; u < count; u++) reduce_unit(&r, u, sums, y, x);
    } else {
        #pragma omp parallel for schedule(static)
        for (int64_t u = 0; u < count; u++) reduce_unit(&r, u, sums, y, x);
    }
    for (int64_t u = 0; sums && u < r.blocks; u++) {
        int64_t x_at, y_at;
        const int64_t columns = locate(&r, u, &x_at, &y_at);
        wide *first = sums + u * r.columns;
        for (int64_t piece = 1; piece < r.pieces; piece++) merge(first, first + piece * slots, columns, op, is_int);
        finish((element *)y + y_at, r.column < 0 ? 1 : s->stride[Y][r.column], first, columns, is_int);
    }
    return PYOPS_OK;
}

pyops_status pyops_strided_reduce(float *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                  int32_t op, void *stream) {
    (void)stream;
    return reduce("strided_reduce", pyops_active()->strided_reduce, 0, y, x, shape, strides, ndim, op);
}

pyops_status pyops_strided_reduce_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                        int64_t ndim, int32_t op, void *stream) {
    (void)stream;
    return reduce("strided_reduce_int32", pyops_active()->strided_reduce_int32, 1, y, x, shape, strides, ndim, op);
}
