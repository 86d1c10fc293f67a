/* internal.h - shared declarations of the CPU library: the kernel table, errors, scratch, packed products. */
#ifndef PYOPS_INTERNAL_H
#define PYOPS_INTERNAL_H
#include <stddef.h>
#include <string.h>
#include "pyops.h"

/* How numbers are rounded to a narrow format: see pyops_fake_quantize. */
typedef struct {
    int32_t format, rounding, saturate;
    int32_t rule, shift, flush;         /* of the block scales */
    int64_t block;                      /* length of a block; 0: no blocks */
} pyops_rounding_of;

/* The source of the windows of a convolution with stride 1.  Tap t reads at its plane, at the position of the window plus (row,
 * col); positions outside the plane are zeros. */
typedef struct { int64_t plane, row, col; } pyops_tap;
typedef struct {
    const float *source;
    int64_t size;                       /* floats of the source */
    int64_t image, channel;             /* strides of images and channels */
    int64_t H, W;                       /* a plane */
    int64_t grid_h, grid_w, columns;    /* positions of an image; positions in all */
    int64_t T;
    const pyops_tap *taps;
} pyops_windows;

/* The tiles of a convolution by Winograd's algorithm: 4 x 4 elements of the source, two apart, for 2 x 2 results. */
typedef struct {
    const float *source;
    int64_t size, image, channel;       /* as in pyops_windows */
    int64_t H, W, top, left;            /* a plane; the row and column of the first element of the first tile */
    int64_t rows, lanes;                /* rows of tiles in an image; tiles of a row, rounded up to whole vectors */
} pyops_tiles;

/* PYOPS_GROUP rows of a weight in int8: see kernels/int8_body.inc. */
enum { PYOPS_GROUP = 64, PYOPS_BYTE_ZERO = 128 };   /* the byte of x that means 0 */
enum { PYOPS_LONGEST_INT8 = 131072 };               /* so many products, and as many times PYOPS_BYTE_ZERO, fit in 32 bits */
typedef struct {
    const int8_t *panel;                /* (quads,PYOPS_GROUP,4); for int8_group xor pyops_kernels.flip, and quads is even */
    const int32_t *start;               /* -PYOPS_BYTE_ZERO times the sum of each row */
    const float *scales, *bias;
} pyops_int8_group;

/* ---- kernels: one table per instruction set ------------------------------------------
 * ROW(result, name, arguments): functions on one row or chunk, without threads, allocation or checks.
 * The lists declare the fields of the table here and initialise them in kernels/table_body.inc.  The first one has the kernels
 * that may round sums in another order on another instruction set; exact tables have their own.  The others compute with
 * integers, or round each element alone without a fused operation, or (next_not_below) compare with a margin.
 */
/* clang-format off */
#define PYOPS_FLOAT_ROWS(ROW) \
    ROW(void,   fill,         (float *y, int64_t n, float value)) \
    ROW(void,   add,          (float *y, const float *x, int64_t n)) \
    ROW(void,   add_constant, (float *y, float value, int64_t n)) \
    ROW(void,   mul,          (float *y, const float *x, int64_t n)) \
    ROW(void,   axpy,         (float *y, const float *x, float alpha, int64_t n)) \
    ROW(void,   scale,        (float *y, const float *x, float alpha, int64_t n)) \
    ROW(void,   scale_add,    (float *y, const float *x, const float *other, float alpha, int64_t n)) \
    ROW(void,   relu,         (float *y, const float *x, int64_t n)) \
    ROW(void,   relu_back,    (float *dx, const float *dy, const float *y, int64_t n)) \
    ROW(void,   silu,         (float *y, const float *x, int64_t n)) \
    ROW(void,   silu_back,    (float *dx, const float *dy, const float *x, int64_t n)) \
    ROW(void,   gelu,         (float *y, const float *x, int64_t n)) \
    ROW(void,   gelu_back,    (float *dx, const float *dy, const float *x, int64_t n)) \
    ROW(void,   gelu_tanh,    (float *y, const float *x, int64_t n)) \
    ROW(void,   gelu_tanh_back, (float *dx, const float *dy, const float *x, int64_t n)) \
    ROW(void,   from_bytes,   (float *y, const uint8_t *x, float scale, int64_t n)) \
    ROW(void,   pixels_pack,  (float *packed, const float *w, int64_t n, int64_t step, int64_t readable)) \
    ROW(void,   pixels_times, (float *sums, const uint16_t *indices, int64_t nonzero, const uint8_t *x, const float *values, \
                               const float *w)) \
    ROW(void,   pixels_outer, (float *dw, const uint16_t *indices, int64_t nonzero, const uint8_t *x, const float *values, \
                               const float *dy)) \
    ROW(void,   add_rows,     (float *y, const float *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx)) \
    ROW(double, sum_squares,  (const float *x, int64_t n)) \
    ROW(float,  sum_shifted,  (const float *x, float shift, int64_t n)) \
    ROW(float,  max,          (const float *x, int64_t n)) \
    ROW(float,  sum_exp,      (const float *x, float shift, int64_t n)) \
    ROW(float,  exp_sum,      (float *y, const float *x, float shift, int64_t n)) \
    ROW(void,   narrow_softmax, (float *max, float *sum, float *log_sum, const float *x, int64_t R, int64_t C)) \
    /* y = e^(x - max), 0 below e^-87; returns the sum.  log: only the sum */ \
    ROW(float,  softmax_exps, (float *y, const float *x, float max, int64_t n, int log)) \
    ROW(void,   softmax_logs, (float *y, const float *x, float max, float log_total, int64_t n)) \
    ROW(void,   scaled_exp,   (float *y, const float *x, float shift, float scale, int64_t n)) \
    ROW(void,   dropout,      (float *y, const float *x, int64_t first_group, int64_t n, uint64_t step, \
                               uint64_t key, uint32_t threshold, float scale)) \
    ROW(void,   dropout_mask, (float *y, const uint64_t *groups, int64_t n, uint64_t step, uint64_t key, \
                               uint32_t threshold, float scale)) \
    ROW(void,   residual,     (float *y, const float *x, const float *branch, int64_t n)) \
    ROW(void,   residual_dropout, (float *y, const float *x, const float *branch, int64_t first_group, int64_t n, \
                                   uint64_t step, uint64_t key, uint32_t threshold, float scale)) \
    ROW(void,   layer_norm,   (float *y, float *mean, float *rstd, const float *x, const float *weight, \
                               const float *bias, int64_t C, float eps)) \
    ROW(void,   layer_norm_back, (float *dx, float *dweight, float *dbias, const float *dy, const float *x, \
                                  const float *weight, float mean, float rstd, int64_t C, int add)) \
    ROW(void,   adam,         (float *param, float *m, float *v, const float *grad, int64_t n, float clip, \
                               float beta1, float beta2, float step_size, float root_correction, float eps, \
                               float weight_decay, float keep)) \
    ROW(void,   sgd,          (float *param, const float *grad, int64_t n, float clip, float lr, float weight_decay)) \
    ROW(void,   sgd_momentum, (float *param, float *velocity, const float *grad, int64_t n, float clip, float lr, \
                               float momentum, float undamped, float weight_decay, int nesterov)) \
    ROW(void,   add_deviations, (float *sum, float *squares, const float *x, const float *mean, int64_t n)) \
    ROW(void,   batch_norm,   (float *y, const float *x, const float *mean, const float *rstd, const float *weight, \
                               const float *bias, int64_t n)) \
    ROW(void,   add_normed,   (float *sum, float *products, const float *dy, const float *x, const float *mean, \
                               const float *rstd, int64_t n)) \
    ROW(void,   batch_norm_back, (float *dx, const float *dy, const float *x, const float *mean, const float *rstd, \
                                  const float *weight, const float *share, const float *share_normed, int64_t n)) \
    ROW(void,   deviations,   (float *sums, const float *x, float mean, int64_t n)) \
    ROW(void,   channel_norm, (float *y, const float *x, float mean, float scale, float bias, int64_t n)) \
    ROW(void,   normed_sums,  (float *sums, const float *dy, const float *x, float mean, float rstd, int64_t n)) \
    ROW(void,   channel_norm_back, (float *dx, const float *dy, const float *x, float mean, float rstd, float factor, \
                                    float share, float share_normed, int64_t n)) \
    ROW(void,   gru_after,    (float *h, float *gates, const float *a, const float *product, const float *h_prev, \
                               int64_t H)) \
    ROW(void,   gru_before_1, (float *gates, const float *a, const float *product, const float *h_prev, int64_t H)) \
    ROW(void,   gru_before_2, (float *h, float *gates, const float *a, const float *product, const float *h_prev, \
                               int64_t H)) \
    ROW(void,   gru_back,     (float *dgates, float *dh, const float *gates, const float *h_prev, int64_t H)) \
    ROW(void,   gru_back_reset_after,  (float *dgates, const float *gates, int64_t H)) \
    ROW(void,   gru_back_reset_before, (float *dgates, float *dh, const float *gates, const float *h_prev, int64_t H)) \
    ROW(void,   lstm,         (float *h, float *c, float *gates, const float *a, const float *c_prev, int64_t H)) \
    ROW(void,   lstm_back,    (float *dgates, float *dc, const float *dh, const float *dy, const float *dy_c, \
                               const float *gates, const float *c, const float *c_prev, int64_t H)) \
    ROW(void,   rnn,          (float *h, const float *a, int64_t H, int relu)) \
    ROW(void,   rnn_back,     (float *da, const float *dh, const float *dy, const float *h, int64_t H, int relu)) \
    /* c (M,N), rows ldc apart, (+)= sum_k a[m,k] b[k,n]: a with any strides, b with rows ldb apart, nothing packed */ \
    ROW(void,   direct,       (float *c, const float *a, const float *b, int64_t M, int64_t N, int64_t K, int64_t ldc, \
                               int64_t a_row, int64_t a_col, int64_t ldb, int add)) \
    /* c (M,N) (+)= a b + bias for at most PYOPS_FEW_ROWS rows: rows of a and columns of b (ldb apart) are contiguous */ \
    ROW(void,   few,          (float *c, const float *a, const float *b, const float *bias, int64_t M, int64_t N, int64_t K, \
                               int64_t ldc, int64_t lda, int64_t ldb, int flags)) \
    /* y[r] (+)= sum_k a[r,k] b[r,k] */ \
    ROW(void,   row_dots,     (float *y, const float *a, const float *b, int64_t R, int64_t K, int64_t ldy, int64_t lda, \
                               int64_t ldb, int add)) \
    ROW(void,   windows,      (float *dst, int64_t ld, const pyops_windows *w, int64_t c, int64_t q, int64_t n, int64_t from, \
                               int64_t to)) \
    ROW(void,   planes_in,    (float *dst, int64_t width, const float *src, int64_t ld, int64_t rows, int64_t before, int64_t n, \
                               int64_t size, int64_t step, int64_t at, int is_whole)) \
    ROW(void,   planes_out,   (float *dst, int64_t n, const float *src, int64_t width, int64_t rows)) \
    ROW(void,   planes_times, (float *sums, int64_t ld, const float *planes, const int64_t *offsets, const float *filters, \
                               int64_t ld_filters, const float *bias, int64_t M, int64_t K, int64_t n, int add)) \
    ROW(void,   planes_dots,  (float *y, int64_t ldy, const float *dy, int64_t ld, const float *planes, \
                               const int64_t *offsets, int64_t M, int64_t K, int64_t lines, int64_t width, int64_t n)) \
    ROW(void,   winograd_in,  (float *packed, int64_t ld, int64_t NR, const pyops_tiles *t, int64_t c, int64_t C, int64_t q, \
                               int64_t n)) \
    ROW(void,   winograd_out, (float *dst, int64_t image, int64_t plane, int64_t H, int64_t W, const float *sums, int64_t ld, \
                               int64_t lds, const pyops_tiles *t, const float *bias, int64_t M, int64_t q, int64_t n)) \
    ROW(void,   winograd_back, (float *y, int64_t ld, int64_t ldy, const pyops_tiles *t, int64_t C, int64_t q, int64_t n)) \
    ROW(void,   dots,         (float *y, const float *a, const float *b, float scale, int64_t R, int64_t C, \
                               int64_t lda, int64_t ldb)) \
    ROW(void,   attend,       (float *y, const float *q, const float *k, const float *v, const int64_t *at, float *weights, \
                               int64_t n, int64_t heads, int64_t C, float scale)) \
    ROW(void,   dot_products, (float *y, const float *a, const float *b, int64_t M, int64_t N, int64_t C, int64_t ldy, \
                               int64_t ld)) \
    ROW(void,   scale_rows,   (float *y, const float *x, float scale, int64_t R, int64_t C, int64_t ldy, int64_t ldx)) \
    ROW(void,   fill_rows,    (float *y, int64_t R, int64_t C, int64_t ldy, float value)) \
    ROW(void,   transpose,    (float *y, const float *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx)) \
    ROW(void,   softmax_online, (float *x, float *max, float *sum, float *before, const float *dropout_mask, \
                                 const int32_t *n, float factor, int64_t keys, int64_t queries, int64_t ldx, \
                                 int64_t ld_mask, int add)) \
    ROW(void,   softmax_rows, (float *y, const float *x, int64_t R, int64_t n, int log)) \
    ROW(void,   softmax_rows_back, (float *dx, const float *dy, const float *y, int64_t R, int64_t n, int log)) \
    ROW(void,   softmax_columns, (float *y, const float *x, int64_t n, int64_t ld, int64_t C, int log)) \
    ROW(void,   softmax_columns_back, (float *dx, const float *dy, const float *y, int64_t n, int64_t ld, int64_t C, \
                                       int log)) \
    ROW(void,   softmax_row_back, (float *ds, const float *dw, const float *p, int64_t n)) \
    ROW(void,   softmax_back, (float *x, float *dx, const float *max, const float *sum, const float *dsum, \
                               const float *dropout_mask, const int32_t *n, float factor, int64_t keys, int64_t queries, \
                               int64_t ldx, int64_t ld_mask)) \
    ROW(void,   strided_unary,        (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_binary,       (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_where,        (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_reduce,       (void *sums, const void *x, int64_t R, int64_t C, int64_t row_step, int64_t step, \
                                       int op))
#define PYOPS_OTHER_ROWS(ROW) \
    ROW(int32_t, pixels_find, (uint16_t *indices, const uint8_t *x, int64_t I)) \
    ROW(double, fma_loop,     (int64_t n)) \
    ROW(float,  to_int8,      (int8_t *y, const float *x, float scale, int64_t n)) \
    ROW(void,   to_bytes,     (uint8_t *y, const float *x, float factor, int64_t n)) \
    /* the bytes of a row of x for int8_group; complete such a row, which ends with integers plus PYOPS_BYTE_ZERO */ \
    ROW(int64_t, int8_size,   (int64_t quads)) \
    ROW(void,   int8_row,     (uint8_t *row, int64_t quads)) \
    ROW(void,   int8_group,   (float *y, const uint8_t *x, int64_t ldx, const float *x_scales, const pyops_int8_group *w, \
                               int64_t R, int64_t quads, int64_t ldy, int flags)) \
    /* the same for bytes of x that are integers from -coarse to coarse plus coarse + 1 */ \
    ROW(void,   screen_group, (float *y, const uint8_t *x, int64_t ldx, const float *x_scales, const pyops_int8_group *w, \
                               int64_t R, int64_t quads, int64_t ldy, int flags)) \
    ROW(int64_t, next_not_below, (const float *x, const float *errors, const float *lengths, float length, float error, \
                                  float least, int64_t from, int64_t n)) \
    ROW(void,   random_words, (uint32_t *out, int64_t first, int64_t n, uint64_t step, uint64_t key)) \
    ROW(void,   round_numbers, (float *y, const float *x, const int32_t *scales, int each, const uint32_t *words, int64_t n, \
                                const pyops_rounding_of *how)) \
    ROW(void,   round_blocks, (float *y, const float *x, const uint32_t *words, int64_t n, const pyops_rounding_of *how)) \
    ROW(void,   round_scaled, (float *y, const float *x, const float *scales, const uint32_t *words, int64_t n, \
                               const pyops_rounding_of *how)) \
    ROW(uint32_t, amax,       (const float *x, int64_t n)) \
    ROW(void,   describe,     (pyops_description *d, const float *x, int64_t n)) \
    /* add n numbers: number i to lane i */ \
    ROW(void,   error_sums,   (pyops_error_lanes *sums, const float *x, const float *q, const int32_t *valid, \
                               const double *scale, double smallest, double largest, int64_t n)) \
    /* places in the counts of pyops_bin_counts and pyops_octave_counts; their size for numbers that are not counted */ \
    ROW(void,   bins,         (int32_t *places, const float *x, const float *q, int64_t n, double low, double factor, \
                               int32_t bins)) \
    ROW(void,   half_octaves, (int32_t *places, const float *x, const float *each, const int32_t *scales, int64_t n)) \
    /* keys[i] = max(keys[i], key of x[i] - minus[i]): 0 where valid is 0; larger for a larger magnitude */ \
    ROW(void,   largest_keys, (uint32_t *keys, const float *x, const float *minus, const uint8_t *valid, int64_t n)) \
    ROW(void,   amax_blocks,  (uint32_t *amax, const float *x, int64_t n, int64_t block)) \
    ROW(void,   block_scales, (int32_t *scales, const uint32_t *amax, int64_t n, const pyops_rounding_of *how)) \
    ROW(void,   number_scales, (float *scales, const uint32_t *amax, int64_t n, float factor, const pyops_rounding_of *how)) \
    ROW(void,   expand_scales, (float *each, const float *scales, int64_t first, int64_t n, int64_t block, float divisor)) \
    /* the codes of the numbers that round_numbers returns */ \
    ROW(void,   encode_numbers, (uint16_t *codes, const float *x, const int32_t *scales, int each, const uint32_t *words, \
                                 int64_t n, const pyops_rounding_of *how)) \
    /* r[0..PYOPS_NARROW_COLUMNS) after a group of n finite products a[k] b[k][column]: see narrow_sums.inc */ \
    ROW(void,   narrow_sums,  (double *r, const double *a, const double *b, int64_t n, int32_t bits)) \
    ROW(void,   strided_unary_int32,  (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_binary_int32, (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_where_int32,  (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_from_int32,   (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_to_int32,     (void *const *p, const int64_t *step, int64_t n, int op)) \
    ROW(void,   strided_reduce_int32, (void *sums, const void *x, int64_t R, int64_t C, int64_t row_step, int64_t step, \
                                       int op))
#define PYOPS_ROWS(ROW) PYOPS_FLOAT_ROWS(ROW) PYOPS_OTHER_ROWS(ROW)
/* clang-format on */

/* Counts and sums of numbers; low, high: of the finite ones. */
typedef struct {
    int64_t numbers, nan, finite, zeros;
    double sum, sum_abs, squares;
    float low, high;
} pyops_description;

/* Sums of pyops_error_sums in lanes. */
enum { PYOPS_ERROR_LANES = 16 };
typedef struct {
    int32_t pairs[PYOPS_ERROR_LANES], finite[PYOPS_ERROR_LANES], lost[PYOPS_ERROR_LANES], nonzero[PYOPS_ERROR_LANES],
        underflow[PYOPS_ERROR_LANES], nan[PYOPS_ERROR_LANES], inf[PYOPS_ERROR_LANES];
    double saturated[PYOPS_ERROR_LANES], x2[PYOPS_ERROR_LANES], q2[PYOPS_ERROR_LANES], xq[PYOPS_ERROR_LANES],
        e2[PYOPS_ERROR_LANES], amax[PYOPS_ERROR_LANES], error[PYOPS_ERROR_LANES], subnormal[PYOPS_ERROR_LANES],
        nonzero_pairs[PYOPS_ERROR_LANES], relative[PYOPS_ERROR_LANES];
} pyops_error_lanes;

enum { PYOPS_NARROW_COLUMNS = 16 };     /* whose sums of few bits are computed together */

/* Products with at most this many rows read b unpacked if its rows or its columns are contiguous. */
enum { PYOPS_FEW_ROWS = 8 };

/* Flags of a product, which otherwise overwrites c. */
enum {
    PYOPS_ADD = 1,                  /* c += a b */
    PYOPS_RELU = 2                  /* c = max(c, 0) after everything else */
};

/* So many cache lines to prefetch into L2: `run` adjacent ones, then others `far` floats after them. */
typedef struct {
    const float *at;
    int64_t lines, run, far;
} pyops_lines;

/* One tile of a product: c (rows,NR) = a (rows,K) b (K,NR) + bias (NR) + before (rows,NR), followed by max(c, 0) if relu. */
typedef struct {
    const float *a, *b, *bias, *before;     /* b packed; bias and before may be NULL, before may be c */
    float *c;
    int64_t a_row, a_col;           /* one of them is 1; packed: 1, MR */
    int64_t ldc, ld_before;
    int64_t K, rows;                /* 1 <= rows <= MR */
    int relu;
    int is_half;                    /* only the first NR / 2 columns are needed; float32's kernel then skips the others */
    /* Prefetched into L2, one cache line at each step of K: next, next + far, ...; if a_col is 1, it also advances by `jump`
     * floats after every PYOPS_RUN steps. */
    const float *next;
    int64_t far, jump;
    pyops_lines ahead[2]; /* with split factors instead: of a and b */
} pyops_tile;

enum { PYOPS_RUN = 16 }; /* cache lines in a row of KC floats */

/* The micro-kernel of a product and the packing of its operands. */
typedef struct {
    const char *name; /* "avx2" */
    int is_bf16; /* a packed b has pairs of bfloat16 in place of floats; a step along K is a pair */
    int is_split; /* packed factors have three bfloat16 for each float; a step along K is a pair of such parts */
    int a_step; /* floats of a row of a packed a in a step */
    int a_in_rows; /* a packed a is always in rows, not in panels */
    int64_t MR, MC; /* as in pyops_kernels, or 0: float32's */
    void (*begin)(void), (*end)(void); /* before the first tile of a block and after the last one, or NULL */
    void (*gemm)(const pyops_tile *t);
    /* Pack n rows of A (columns of B), `step` floats apart, each of kc elements with stride `along`.  A: in panels or, if
     * a_in_rows, or if is_bf16 and along is 1, in rows. */
    void (*pack_a)(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc);
    void (*pack_b)(float *dst, const float *src, int64_t step, int64_t along, int64_t n, int64_t kc);
} pyops_micro_kernel;

typedef struct {
    const char *name; /* "avx2" */
    const char *tile; /* "6x16" = MR x NR */
    int64_t MR, NR; /* a tile */
    int64_t lanes; /* floats of a vector */
    int64_t MC, KC; /* size of the block of a that fits in L2 */
    int64_t KB, B; /* at most KB rows and B floats of b are packed at a time, to fit in L3 */
    int any_col; /* whether a tile with a_row 1 accepts any a_col, or only MR (a packed a) */
    int coarse; /* see screen_group */
    int flip; /* for int8_group, 0 or PYOPS_BYTE_ZERO: xor the bytes of weights with it */
    int is_exact; /* the order of every sum must be the same for every instruction set: see pyops_set_exact */
    int may_split; /* a table that splits factors exists: see pyops_for_product */
    pyops_micro_kernel micro; /* for the current precision */
#define ROW(result, name, arguments) result(*name) arguments;
    PYOPS_ROWS(ROW)
#undef ROW
} pyops_kernels;

/* The tables of float32, and the micro-kernels of bfloat16.  float32 has a further one for AMX. */
#define KERNEL(isa, table, test) \
    extern const pyops_kernels pyops_kernels_##table; \
    extern const pyops_micro_kernel pyops_bf16_##isa;
#include "kernels/kernels.inc"
#undef KERNEL
extern const pyops_micro_kernel pyops_float32_amx_bf16;
/* The tables without fused multiply-adds; they have the kernels of PYOPS_FLOAT_ROWS and the micro-kernel alone. */
extern const pyops_kernels pyops_kernels_exact_avx2, pyops_kernels_exact_avx512;
const pyops_kernels *pyops_active(void);
const pyops_kernels *pyops_in_float32(void), *pyops_in_bf16(void); /* the tables of a type, whatever the precision is */
/* The table for products with a factor b (K,N): k itself or, for a large one in float32 with AMX, the table that splits factors.
 * It does not depend on the rows of a, so each row of a product has the same bits for any number of rows.  The packed b, tiles and
 * scratch of the product then belong to this table. */
const pyops_kernels *pyops_for_product(const pyops_kernels *k, int64_t N, int64_t K);

/* int8_group with the instructions of VNNI or AMX, or NULL if the compiler has none. */
typedef void pyops_int8_kernel(float *y, const uint8_t *x, int64_t ldx, const float *x_scales, const pyops_int8_group *w,
                               int64_t R, int64_t quads, int64_t ldy, int flags);
extern pyops_int8_kernel *const pyops_int8_avx2_vnni, *const pyops_int8_avx512_vnni, *const pyops_int8_amx_int8;

/* ---- errors ------------------------------------------------------------------------------ */
pyops_status pyops_fail(pyops_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define PYOPS_REQUIRE(cond, ...) \
    do { \
        if (!(cond)) return pyops_fail(PYOPS_BAD_ARGUMENT, __VA_ARGS__); \
    } while (0)
#define LL(x) ((long long)(x)) /* for %lld: int64_t is long on some systems, long long on others */
#include "checks.h"

static inline pyops_status pyops_check_ids(const char *who, const int32_t *ids, int64_t n, int64_t V) {
    for (int64_t r = 0; r < n; r++)
        PYOPS_REQUIRE(ids[r] >= 0 && ids[r] < V, "%s: ids[%lld]=%d, expected 0 to %lld", who, LL(r), ids[r], LL(V - 1));
    return PYOPS_OK;
}
static inline pyops_status pyops_check_rows(const char *who, const int64_t *rows, int64_t B, int64_t N) {
    for (int64_t b = 0; b < B; b++)
        PYOPS_REQUIRE(rows[b] >= 0 && rows[b] < N, "%s: rows[%lld]=%lld, expected 0 to %lld", who, LL(b), LL(rows[b]),
                      LL(N - 1));
    return PYOPS_OK;
}
/* Check the offsets of packed rows in B sequences of at most T rows each, and N in all, if that is known (else -1). */
static inline pyops_status pyops_check_offsets(const char *who, const char *name, const int32_t *offsets, int64_t T, int64_t B,
                                               int64_t N) {
    PYOPS_REQUIRE(offsets[0] == 0, "%s: %s[0]=%d, expected 0", who, name, offsets[0]);
    for (int64_t b = 0; b < B; b++) {
        const int64_t length = (int64_t)offsets[b + 1] - offsets[b];
        PYOPS_REQUIRE(length >= 0 && length <= T, "%s: %s[%lld] - %s[%lld]=%lld, expected 0 to %lld", who, name, LL(b + 1),
                      name, LL(b), LL(length), LL(T));
    }
    PYOPS_REQUIRE(N < 0 || offsets[B] == N, "%s: %s[%lld]=%d, expected the number of rows, %lld", who, name, LL(B), offsets[B],
                  LL(N));
    return PYOPS_OK;
}
/* Of attention.  Any of them may be NULL. */
static inline pyops_status pyops_check_lengths(const char *who, const int32_t *lengths, const int32_t *q_offsets,
                                               const int32_t *k_offsets, int64_t Tq, int64_t Tk, int64_t B) {
    for (int64_t b = 0; lengths && b < B; b++)
        PYOPS_REQUIRE(lengths[b] >= 0 && lengths[b] <= Tk, "%s: lengths[%lld]=%d, expected 0 to %lld", who, LL(b), lengths[b],
                      LL(Tk));
    const pyops_status status = q_offsets ? pyops_check_offsets(who, "q_offsets", q_offsets, Tq, B, -1) : PYOPS_OK;
    return status || !k_offsets ? status : pyops_check_offsets(who, "k_offsets", k_offsets, Tk, B, -1);
}

/* ---- constants that results must not depend on, except for the order of sums -------------------------------------
 * PYOPS_TUNED(name, usual, least, most, unit) is `usual`.  In a test build with PYOPS_BUGGIFY (`make buggify`) it is a multiple
 * of `unit` from `least` to `most`, or `usual`, drawn from a seed and the name once per process.
 */
#if PYOPS_BUGGIFY
int64_t pyops_drawn(const char *name, int64_t usual, int64_t least, int64_t most, int64_t unit);
#define PYOPS_TUNED(name, usual, least, most, unit) pyops_drawn(#name, usual, least, most, unit)
#else
#define PYOPS_TUNED(name, usual, least, most, unit) (usual)
#endif

/* ---- when to use several threads --------------------------------------------------------------
 * A parallel region costs a few microseconds on an idle machine, and more on a busy one, until the scheduler has run every
 * thread.  So a second thread must save about 100 microseconds.  The limits are the work of one core in that time: floats
 * moved, floats with one exponential or root each, and multiply-adds.
 */
#define PYOPS_SHARE_FLOATS PYOPS_TUNED(share_floats, 262144, 1, 1 << 20, 1)
#define PYOPS_SHARE_EXPS PYOPS_TUNED(share_exps, 65536, 1, 1 << 18, 1)
#define PYOPS_SHARE_FMAS PYOPS_TUNED(share_fmas, 8000000, 8, 32000000, 8)
/* Run a block for each i from 0 to n - 1; threads share them if `shares`.  Not by an `if` clause: a parallel region of one thread
 * takes 0.3 microseconds, as long as some hundred elements. */
#define PYOPS_FOR(i, n, shares, ...) \
    do { \
        if (shares) { \
            _Pragma("omp parallel for schedule(static)") for (int64_t i = 0; i < (n); i++) __VA_ARGS__ \
        } else { \
            for (int64_t i = 0; i < (n); i++) __VA_ARGS__ \
        } \
    } while (0)

/* ---- scratch: one buffer per thread, grown on demand, freed when the thread ends; NULL without memory.
 * A second call by the same thread returns the same memory. */
float *pyops_scratch(size_t floats);
/* The same in a parallel region, which cannot return a status: sets failed[0] = 1 without memory. */
static inline float *pyops_scratch_or_fail(size_t floats, int *failed) {
    float *scratch = pyops_scratch(floats);
    if (!scratch) {
        #pragma omp atomic write
        failed[0] = 1;
    }
    return scratch;
}

/* A sum over K runs in blocks of this many terms in every table, so it has the same order on every instruction set. */
enum { PYOPS_KC = 256 };

/* Kernels pad rows in scratch to a multiple of this, the longest vector of any table. */
enum { PYOPS_LANES = 16 };

/* Outputs of a linear layer on pixels are computed in blocks of this many. */
enum { PYOPS_PIXEL_BLOCK = 32 };

/* Rows with at most this many columns are too short for a loop of their own. */
enum { PYOPS_NARROW = 16 };

/* A softmax along columns takes at most this many of them. */
enum { PYOPS_SOFTMAX_COLUMNS = 64 };

/* Operations on strided arrays with a vectorised loop each; angles and powers have one for blocks of usual numbers. */
/* clang-format off */
#define PYOPS_UNARY_OPS(OP) OP(PYOPS_OP_COPY) OP(PYOPS_OP_NEGATE) OP(PYOPS_OP_ABS) OP(PYOPS_OP_SQRT) OP(PYOPS_OP_EXP) \
    OP(PYOPS_OP_LOG) OP(PYOPS_OP_TANH) OP(PYOPS_OP_SIGMOID) OP(PYOPS_OP_FLOOR) OP(PYOPS_OP_EXPM1) \
    OP(PYOPS_OP_LOG1P) OP(PYOPS_OP_ARCTAN) OP(PYOPS_OP_ARCSIN) OP(PYOPS_OP_ARCCOS) OP(PYOPS_OP_ERF) OP(PYOPS_OP_ROUND) \
    OP(PYOPS_OP_CEIL) OP(PYOPS_OP_TRUNC) OP(PYOPS_OP_SIGN) OP(PYOPS_OP_ELU) OP(PYOPS_OP_SOFTPLUS) \
    OP(PYOPS_OP_HARDSIGMOID) OP(PYOPS_OP_HARDSWISH)
#define PYOPS_ANGLE_OPS(OP) OP(PYOPS_OP_SIN) OP(PYOPS_OP_COS) OP(PYOPS_OP_TAN)
#define PYOPS_BINARY_OPS(OP) OP(PYOPS_OP_ADD) OP(PYOPS_OP_SUBTRACT) OP(PYOPS_OP_MULTIPLY) OP(PYOPS_OP_DIVIDE) \
    OP(PYOPS_OP_MAXIMUM) OP(PYOPS_OP_MINIMUM) OP(PYOPS_OP_EQUAL) OP(PYOPS_OP_NOT_EQUAL) \
    OP(PYOPS_OP_LESS) OP(PYOPS_OP_LESS_EQUAL) OP(PYOPS_OP_GREATER) OP(PYOPS_OP_GREATER_EQUAL) \
    OP(PYOPS_OP_AND) OP(PYOPS_OP_OR) OP(PYOPS_OP_XOR)
#define PYOPS_CALLED_OPS(OP) OP(PYOPS_OP_FLOOR_DIVIDE) OP(PYOPS_OP_REMAINDER)
#define PYOPS_REDUCE_OPS(OP) OP(PYOPS_OP_SUM) OP(PYOPS_OP_MAX) OP(PYOPS_OP_MIN)
/* clang-format on */

/* Division that rounds towards minus infinity, and its remainder, which has the sign of b: as in Python and NumPy. */
#define PYOPS_FLOOR_DIVISION(TYPE, NAME, FMOD, FLOOR, COPYSIGN) \
    static inline TYPE pyops_remainder_##NAME(TYPE a, TYPE b) { \
        const TYPE rest = FMOD(a, b); \
        if (b == 0 || rest != rest) return rest; \
        if (rest == 0) return COPYSIGN(0, b); \
        return (b < 0) != (rest < 0) ? rest + b : rest; \
    } \
    static inline TYPE pyops_floor_divide_##NAME(TYPE a, TYPE b) { \
        if (b == 0) return a / b; \
        const TYPE rest = FMOD(a, b); \
        TYPE quotient = (a - rest) / b; \
        if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1; \
        if (quotient == 0) return COPYSIGN(0, a / b); \
        const TYPE whole = FLOOR(quotient); \
        return quotient - whole > (TYPE)0.5 ? whole + 1 : whole; \
    }

/* A reduction processes at most this many columns at a time, so that their sums fit in L1 and L2. */
enum { PYOPS_REDUCE_COLUMNS = 4096 };

/* ---- packed products, for kernels that use an operand several times ------------------------
 * A packed A is panels of MR rows of one block of KC columns.  A packed B is panels of NR columns for each block of KC rows.
 * The last panel is padded with zeros.
 * With the precision bf16 each float of a packed B is replaced by a pair of bfloat16, the terms k and k + 1 of a sum, and a
 * packed A has such pairs, or two floats rounded to bfloat16.  With AMX a float32 is split into three bfloat16.
 */
typedef struct {
    const float *p;
    int64_t row, col;
} pyops_view; /* strides in floats */

static inline int64_t pyops_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t pyops_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pyops_max(int64_t a, int64_t b) { return a > b ? a : b; }
/* x as bfloat16, rounded to nearest, ties to even; a NaN stays a NaN. */
static inline uint16_t pyops_to_bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((bits >> 16) | 0x40u); /* a quiet NaN */
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
static inline float pyops_from_bf16_bits(uint32_t x) {
    const uint32_t bits = x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
static inline void pyops_copy(float *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof *to); }

typedef struct { int64_t from, to; } pyops_range; /* [from, to) */

/* Split factors are padded to this many terms of a sum. */
enum { PYOPS_SPLIT = 32 };
static inline int64_t pyops_split_steps(int64_t K) { return pyops_round_up(K, PYOPS_SPLIT) / 2 * 3; }

/* Steps of a micro-kernel along K, of four bytes each: floats, pairs of bfloat16, or pairs of the parts of floats. */
static inline int64_t pyops_steps(const pyops_kernels *k, int64_t K) {
    return k->micro.is_split ? pyops_split_steps(K) : k->micro.is_bf16 ? (K + 1) / 2 : K;
}

/* The size in floats of a packed B (K,N); pack its columns [from, to), where `from` is a multiple of NR.  The size is the
 * largest one of any precision, because a plan may be replayed with another precision than it was recorded with. */
static inline int64_t pyops_packed_b_size(const pyops_kernels *k, int64_t K, int64_t N) {
    return (k->may_split ? pyops_split_steps(K) : K) * pyops_round_up(N, k->NR);
}
void pyops_pack_b(const pyops_kernels *k, float *packed, pyops_view b, int64_t K, int64_t N, int64_t from, int64_t to);
/* The offset of row K, a multiple of KC, in a packed B with N columns. */
static inline int64_t pyops_packed_b_row(const pyops_kernels *k, int64_t K, int64_t N) {
    return pyops_steps(k, K) * pyops_round_up(N, k->NR);
}

/* A factor a that several products with a packed b use: packed once, with room for pyops_packed_a_size floats, or a itself if it
 * is read in place.  The column stride of a packed one is PYOPS_PACKED. */
#define PYOPS_PACKED INT64_MIN
int64_t pyops_packed_a_size(const pyops_kernels *k, pyops_view a, int64_t M, int64_t K);
pyops_view pyops_pack_a(const pyops_kernels *k, float *packed, pyops_view a, int64_t M, int64_t K);

/* Scratch of pyops_product_* for one thread, in floats, with k or with the table for products that belongs to it. */
size_t pyops_product_scratch(const pyops_kernels *k);

/* One thread: c (M,N) = a (M,K) b (K,N) + bias; flags: PYOPS_ADD, PYOPS_RELU. */
void pyops_product(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, const float *bias, int64_t M,
                   int64_t N, int64_t K, int flags, float *scratch);
/* The same, and a may be packed.  It always packs b, block by block, also for a few rows: then the sums have the order of
 * pyops_product_packed.   then: the b of the thread's next product, with the same size and strides, or NULL: not known */
void pyops_product_in_blocks(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, const float *then,
                             const float *bias, int64_t M, int64_t N, int64_t K, int flags, float *scratch);
/* The same with a packed b, for the columns [from, to) of c; `from` is a multiple of NR. */
void pyops_product_packed(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, const float *packed_b, const float *bias,
                          int64_t M, int64_t N, int64_t K, int64_t from, int64_t to, int flags, float *scratch);
/* All threads: pyops_gemm without its checks. */
pyops_status pyops_product_threaded(float *c, int64_t ldc, pyops_view a, pyops_view b, const float *bias, int64_t M, int64_t N,
                                    int64_t K, int flags);

/* ---- compact weights: csrc/compact.c ---- */
typedef struct {
    const pyops_kernels *k;
    int64_t O, I, steps, row; /* steps: floats of a packed row of the weight; row: bytes of a rounded row of x */
    int32_t format;
    const float *compact, *x;
    uint8_t *bytes; /* INT8: x rounded, (R,row), and the scales of its rows */
    float *x_scales;
} pyops_compact;

enum { PYOPS_COMPACT_COLUMNS = 512 }; /* a range of columns that starts with a multiple of these can be computed alone */
pyops_status pyops_compact_check(const char *who, int64_t R, int64_t O, int64_t I, int32_t format);
pyops_status pyops_compact_check_layout(const char *who, const float *compact, int64_t O, int64_t I, int32_t format);
/* The floats of `work` for R rows. */
int64_t pyops_compact_rows(int64_t R, int64_t I, int32_t format);
/* A call on x (R,I); round rows [from, to) of x before the columns are computed. */
pyops_compact pyops_compact_call(const float *compact, const float *x, float *work, int64_t R, int64_t O, int64_t I,
                                 int32_t format);
void pyops_compact_round(const pyops_compact *c, int64_t from, int64_t to);
/* One thread: y (rows,n), rows ldy apart, of the rows of x from `first` on and the columns from `from` on, a multiple of
 * PYOPS_COMPACT_COLUMNS with INT8 of PYOPS_GROUP.  scratch: pyops_compact_scratch(k) floats. */
void pyops_compact_columns(const pyops_compact *c, float *y, int64_t ldy, int64_t first, int64_t rows, int64_t from, int64_t n,
                           int flags, float *scratch);
size_t pyops_compact_scratch(const pyops_compact *c);

/* y[c] += sum_r x[r*ldx + c], in the order of the rows; threads share columns. */
void pyops_add_column_sums(float *y, const float *x, int64_t R, int64_t C, int64_t ldx);

/* ---- a value and its index as one key, larger for a larger value (NaN is largest) and, of equal values, for the first index.
 * No key is 0. ---- */
static inline uint64_t pyops_key_of(float value, int64_t index) {
    uint32_t bits;
    value += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &value, sizeof bits);
    const uint32_t order = value != value ? UINT32_MAX : bits >> 31 ? ~bits : bits | UINT32_C(1) << 31;
    return (uint64_t)order << 32 | ~(uint32_t)index;
}

/* The value of a key; NaN for 0. */
static inline float pyops_key_value(uint64_t key) {
    const uint32_t order = (uint32_t)(key >> 32), bits = order >> 31 ? order & ~(UINT32_C(1) << 31) : ~order;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t pyops_key_index(uint64_t key) { return (int32_t)~(uint32_t)key; }

/* ---- shares of threads that follow their speeds, see pace.c ----------------------------------- */
enum { PYOPS_PACED = 256 }; /* threads; more have equal shares */

typedef struct {
    int64_t threads;
    double shares[PYOPS_PACED]; /* of the work, their sum is 1 */
    double speeds[PYOPS_PACED]; /* in the last product, work of a second; 0: it had none */
} pyops_pace;

/* Those of the threads that work for the calling thread, or NULL: equal shares.  Call outside of the parallel region. */
pyops_pace *pyops_pace_of(int64_t threads);
/* Inside of it, with the threads that it has: NULL if they are others. */
static inline const pyops_pace *pyops_pace_in(const pyops_pace *p, int64_t threads) {
    return p && p->threads == threads ? p : NULL;
}
/* After a product whose threads have set their speeds. */
void pyops_follow(pyops_pace *p);
/* Part `part` of n, in multiples of unit.  Each of the parts belongs to `members` threads from thread `first` on.  p NULL: equal
 * parts */
pyops_range pyops_part_of(const pyops_pace *p, int64_t part, int64_t parts, int64_t first, int64_t members, int64_t n,
                          int64_t unit);

/* ---- dropout: an element is kept if its random word is at least this ----------------------- */
static inline uint32_t pyops_dropout_threshold(float p) { return (uint32_t)((double)p * 4294967296.0); }

/* ---- clipping: the factor of all gradients; a NaN norm does not clip --------------------------- */
static inline float pyops_clip_factor(const float *norm, float max_norm) {
    return norm && norm[0] > max_norm ? max_norm / norm[0] : 1.0f;
}

/* ---- sparse gradients, see pyops_zero_touched ------------------------------------------------ */
static inline int pyops_is_touched(const int32_t *touched, int64_t i) { return !touched || touched[i / PYOPS_GRAD_BLOCK]; }
/* Mark grad[from, to) as added to.  Call from one thread: two rows may share a block. */
static inline void pyops_touch(int32_t *touched, int64_t from, int64_t to) {
    if (!touched) return;
    for (int64_t b = from / PYOPS_GRAD_BLOCK; b * PYOPS_GRAD_BLOCK < to; b++) touched[b] |= PYOPS_TOUCHED;
}

/* ---- labels with masked rows, for both cross entropies --------------------------------------- */
pyops_status pyops_count_valid(int32_t *valid, const char *who, const int32_t *labels, int64_t R, int64_t C, int32_t ignore);
#endif
