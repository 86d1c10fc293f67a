/* pyops.h - the ABI of pyops.  csrc/ implements it for the CPU, cuda/ for NVIDIA GPUs.
 *
 * Rules for every function below
 *   order     outputs, inputs, saved tensors, work, sizes, scalars, stream
 *   pointers  contiguous float32 unless stated otherwise, at any alignment; outputs may not alias inputs unless stated
 *   real      pyops_real *: activations, their gradients, and weights of products.  The CPU library has float32 only.  In the
 *             CUDA library each such argument is an array of float32 or, if bit 63 of its address is set, of bfloat16 at the
 *             address without that bit.  Arithmetic is float32; a result is rounded once, when it is stored, to the nearest,
 *             ties to even.  The pyops_real arguments of a call have one type unless stated otherwise
 *   shapes    row-major, written (T,B,H) with T slowest; sequences are time-major, so each step is contiguous
 *   memory    the caller owns every buffer; `work` is scratch of pyops_<function>_work(...) floats, whose contents are
 *             undefined after the call unless stated otherwise; the CPU library keeps only a few MiB per thread for
 *             packed tiles
 *   d<param>  accumulates (+=);  d<activation> overwrites (=);  repeated below where it matters
 *   state     values that change from one training step to the next (step, learning rate, gradient norm) are read
 *             from memory, never passed by value, so that a recorded call can be replayed
 *   sums      in an order that does not depend on the number of threads: the same bits for 1, 2 or 8
 *   stream    cudaStream_t in the CUDA library, ignored by the CPU library
 *   errors    status code; text in pyops_last_error() of the calling thread; never prints, exits or aborts
 *
 * The Python side parses this file for prototypes and argument names: one function per declaration, no macro inside a
 * declaration except PYOPS_API.
 */
#ifndef PYOPS_H
#define PYOPS_H
#include <stdint.h>

#define PYOPS_ABI_VERSION 10
#define PYOPS_API __attribute__((visibility("default")))
#ifdef __cplusplus
extern "C" {
#endif

#ifdef __cplusplus
struct pyops_real;          /* opaque: cuda/common/real.cuh decodes the address */
#endif
#ifndef __cplusplus
typedef float pyops_real;
#endif

/* The lines of a prototype group its parameters by role. */
/* clang-format off */
typedef enum {
    PYOPS_OK = 0,
    PYOPS_BAD_ARGUMENT = 1,
    PYOPS_NO_MEMORY = 2,
    PYOPS_DEVICE_ERROR = 3
} pyops_status;

PYOPS_API int32_t      pyops_abi_version(void);
PYOPS_API const char  *pyops_last_error(void);    /* of the calling thread; "" if nothing has failed yet */
PYOPS_API const char  *pyops_isa(void);           /* the kernels in use: "generic", "avx2", "avx512" */
PYOPS_API const char  *pyops_float32_isa(void);   /* of large products in float32: the same or "amx_bf16" */
PYOPS_API const char  *pyops_bf16_isa(void);      /* of products in bfloat16: the same, "avx512_bf16" or "amx_bf16" */
PYOPS_API const char  *pyops_int8_isa(void);      /* of products in int8: the same, "avx2_vnni", "avx512_vnni" or "amx_int8" */
PYOPS_API const char  *pyops_gemm_tile(void);     /* their matrix micro-kernel: "4x8", "6x16", "14x32" */
PYOPS_API int32_t      pyops_threads(void);       /* threads that a call from this thread may use */
PYOPS_API pyops_status pyops_set_threads(int32_t threads);      /* for calls from this thread, as in OpenMP */
/* Round the factors of matrix products, also in fused kernels: 0 float32, 1 TF32 (CUDA library only), 2 bfloat16, to nearest,
 * ties to even.  Sums are float32.  For all threads; not while a kernel runs.  On the CPU linear_argmax and the products of
 * attention and of pixels stay float32, in the CUDA library convolutions. */
PYOPS_API pyops_status pyops_set_precision(int32_t precision);
/* exact 1: float32 kernels give the same bits on every instruction set of x86-64: sums have the same order, and no addition is
 * fused with a multiplication.  Not with bfloat16, and not in the CUDA library.  For all threads; not while a kernel runs. */
PYOPS_API pyops_status pyops_set_exact(int32_t exact);
PYOPS_API int32_t      pyops_is_exact(void);

/* ---- replay: run a recorded list of calls without returning to the caller between them ----------
 * Every function below whose last argument is `stream` is a kernel and has a number.  An action is a kernel number and the
 * index of its first argument in `values`; the arguments follow in the order of the prototype, without the stream.
 * pyops_replay runs actions [from, to).  at[0] is the index of the current action, so after an error it is the one that failed.
 * seconds (n) or NULL: the wall time of each action.
 */
typedef union { void *pointer; int64_t integer; float real; } pyops_value;
typedef struct { int64_t kernel, first_value; } pyops_action;

PYOPS_API int64_t      pyops_kernel_number(const char *name);      /* of, for instance, "pyops_gemm"; -1: no such kernel */
PYOPS_API pyops_status pyops_replay(
    const pyops_action *actions, const pyops_value *values, double *seconds, int64_t *at,
    int64_t from, int64_t to, void *stream);
/* A recording is a list of calls for arrays that have other addresses in every run: places name the pointers among the values,
 * which become arrays[array] + offset bytes.  Array 0 and 1 are results, 2 to 4 operands, 5 is memory for intermediate results.
 * On the CPU only, for small arrays; several threads may run one recording. */
enum { PYOPS_RECORDED_VALUES = 512, PYOPS_RECORDED_WORK = 4096 };  /* the most values; bytes of the memory in run_recording_1 */
typedef struct { int64_t value, array, offset; } pyops_place;
typedef struct {
    const pyops_action *actions; const pyops_value *values; const pyops_place *places;
    int64_t action_count, value_count, place_count;
} pyops_recording;

PYOPS_API pyops_status pyops_run_recording(
    const pyops_recording *recording, void *y, void *z, void *a, void *b, void *c, void *work);
/* The same for one result, at most two operands and little work: from Python each argument costs as much as a small kernel. */
PYOPS_API pyops_status pyops_run_recording_1(const pyops_recording *recording, void *y, void *a, void *b);
/* Measure peak throughput: n rounds of independent fused multiply-adds in registers, on every thread.
 * flops[0] = the number of floating point operations. */
PYOPS_API pyops_status pyops_fma_loop(double *flops, int64_t n, void *stream);

/* ---- matrix product ------------------------------------------------------------
 * c[m,n] (+)= sum_k a[m,k] * b[k,n] + bias[n]
 * c (M,N), rows ldc apart.  a (M,K) and b (K,N) have a stride for each axis, in floats, so a transposed
 * operand or a block of a larger matrix needs no copy.  bias (N) may be NULL.
 * accumulate 0 overwrites c (which may hold NaN), 1 adds to it.  With K = 0 the product is 0, so only the bias remains.
 * relu 1: c = max(c, 0) after everything else; NaN stays NaN.
 * a, b and c may have different types.  If one of them is bfloat16, so are the operands: a float32 operand is rounded first.
 */
PYOPS_API pyops_status pyops_gemm(
    pyops_real *c, const pyops_real *a, const pyops_real *b, const float *bias,
    int64_t M, int64_t N, int64_t K, int64_t ldc,
    int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
    int32_t accumulate, int32_t relu, void *stream);
/* The gradients of a linear layer y = x weight' + bias.
 * dweight[o,i] += sum_r dy[r,o] x[r,i];   dbias[o] += sum_r dy[r,o];   dx[r,i] (+)= sum_o dy[r,o] weight[o,i]
 * relu 1: x is the result of ReLU, and dx the gradient before it, 0 where x is not above 0.   accumulate 1: adds to dx, without
 * relu only.   dx overlaps none of the inputs.   dx, dbias may be NULL.   dx, x (R,I)   dy (R,O)   weight, dweight (O,I)
 */
PYOPS_API pyops_status pyops_linear_backward(
    pyops_real *dx, float *dweight, float *dbias,
    const pyops_real *dy, const pyops_real *x, const pyops_real *weight,
    int64_t R, int64_t O, int64_t I, int32_t relu, int32_t accumulate, void *stream);
/* A linear layer with an activation function after it, and its gradients.
 * linear_activation           a = x weight' + bias;   y = activation(a);   bias may be NULL
 * linear_activation_backward  x = activation(a).  dweight and dbias as in linear_backward;   dbias may be NULL
 *                             dx[r,i] = activation'(a[r,i]) * sum_o dy[r,o] weight[o,i]
 * The results have the bits of gemm or linear_backward, and then silu, gelu or gelu_tanh.  A GPU computes large ones in
 * bfloat16 without the second pass over memory.
 * dx overlaps none of the inputs.   y, dy (R,O)   x, dx (R,I)   weight, dweight (O,I)   a (R,O), in backward (R,I)
 */
typedef enum { PYOPS_SILU = 0, PYOPS_GELU, PYOPS_GELU_TANH } pyops_activation;
PYOPS_API pyops_status pyops_linear_activation(
    pyops_real *y, pyops_real *a, const pyops_real *x, const pyops_real *weight, const float *bias,
    int64_t R, int64_t O, int64_t I, int32_t activation, void *stream);
PYOPS_API pyops_status pyops_linear_activation_backward(
    pyops_real *dx, float *dweight, float *dbias,
    const pyops_real *dy, const pyops_real *x, const pyops_real *a, const pyops_real *weight,
    int64_t R, int64_t O, int64_t I, int32_t activation, void *stream);
/* A linear layer whose result is the branch of a residual connection, with dropout of the branch; and layer norm of the sum.
 * linear_residual       y = residual + (x weight' + bias) * keep / (1 - p);   keep as in pyops_dropout;   bias may be NULL
 *                       step NULL or p = 0: all are kept
 * linear_residual_norm  sum = that y;   y, mean, rstd = layer norm of sum, with norm_weight and norm_bias;   O >= 1
 * The results have the bits of gemm, and then residual or residual_norm_forward.  A GPU computes large ones in bfloat16 without
 * writing the branch to memory.   There is no backward function: residual_norm_backward or dropout computes the gradient of
 * the branch, the dy of linear_backward.
 * y and sum overlap no input and not each other.   x (R,I)   weight (O,I)   bias, norm_weight, norm_bias (O)
 * y, sum, residual (R,O), of one type   mean, rstd (R)   step (1) int64
 */
PYOPS_API pyops_status pyops_linear_residual(
    pyops_real *y, const pyops_real *x, const pyops_real *weight, const float *bias, const pyops_real *residual,
    const int64_t *step,
    int64_t R, int64_t O, int64_t I, float p, uint64_t key, void *stream);
PYOPS_API pyops_status pyops_linear_residual_norm(
    pyops_real *y, pyops_real *sum, float *mean, float *rstd,
    const pyops_real *x, const pyops_real *weight, const float *bias, const pyops_real *residual, const int64_t *step,
    const float *norm_weight, const float *norm_bias,
    int64_t R, int64_t O, int64_t I, float p, uint64_t key, float eps, void *stream);
/* Two linear layers that do not depend on each other.  The results have the bits of two calls; a GPU computes both in one launch
 * if that takes less time.
 * linear_pair           y1 = x1 weight1' + bias1;  y2 = x2 weight2' + bias2;  bias1, bias2 may be NULL
 * linear_pair_backward  as linear_backward of each layer, without relu;  dbias1, dbias2 may be NULL
 * dx1, x1 (R1,I1)   dy1, y1 (R1,O1)   weight1, dweight1 (O1,I1);   the second layer likewise
 */
PYOPS_API pyops_status pyops_linear_pair(
    pyops_real *y1, pyops_real *y2, const pyops_real *x1, const pyops_real *x2,
    const pyops_real *weight1, const pyops_real *weight2, const float *bias1, const float *bias2,
    int64_t R1, int64_t R2, int64_t O1, int64_t O2, int64_t I1, int64_t I2, void *stream);
PYOPS_API pyops_status pyops_linear_pair_backward(
    pyops_real *dx1, pyops_real *dx2, float *dweight1, float *dweight2, float *dbias1, float *dbias2,
    const pyops_real *dy1, const pyops_real *dy2, const pyops_real *x1, const pyops_real *x2,
    const pyops_real *weight1, const pyops_real *weight2,
    int64_t R1, int64_t R2, int64_t O1, int64_t O2, int64_t I1, int64_t I2,
    int32_t accumulate1, int32_t accumulate2, void *stream);
/* One product for each index of a batch.  Batch axes are as in the strided arrays below: shape (ndim), strides (3,ndim) of c, a
 * and b in floats; a stride of 0 broadcasts one matrix.  Every product has the same bits as from pyops_gemm. */
PYOPS_API pyops_status pyops_gemm_batched(
    float *c, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
    int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
    int32_t accumulate, void *stream);

/* The same with a bias (N) or NULL, relu as in pyops_gemm, and sums in few bits, as in the tensor cores of Hopper, whose sums of
 * 8-bit products have 14 bits.  With r = 0 at first, for every 32 terms p = a[m,k] * b[k,n] in their order (the last group may
 * have fewer):
 *   E = the largest floor(log2 |v|) of r and all p;  q = 2^(E - bits + 1)
 *   r = q (trunc(r / q) + sum of trunc(p / q)), then truncated to `bits` significant bits
 * The products are exact.  If r or some p is not finite, r is their sum.  After every `promote` terms, where a group ends, and
 * after the last one, r is added to a sum in float32, which starts at 0, and r = 0; promote 0: only after the last one.
 * c = (float32 sum + bias) + c before.   bits from 2 to 24.   The precision of pyops_set_precision does not matter. */
PYOPS_API pyops_status pyops_gemm_narrow(
    float *c, const float *a, const float *b, const float *bias, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc,
    int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
    int32_t accumulate, int32_t relu, int32_t bits, int64_t promote, void *stream);

/* Matrices of bfloat16 (the upper halves of floats), for products large enough to repay the conversion:
 * to_bf16    y[r,c] = x[r*row + c*col] rounded to the nearest, ties to even; NaN stays NaN.   y (R,C), rows ld apart
 * gemm_bf16  c[m,n] (+)= sum_k a[m,k] b[n,k], summed in float32.   a (M,K), rows lda apart;  b (N,K), rows ldb apart
 */
PYOPS_API pyops_status pyops_to_bf16(
    uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col, void *stream);
PYOPS_API pyops_status pyops_gemm_bf16(
    float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
    int64_t ldc, int64_t lda, int64_t ldb, int32_t accumulate, void *stream);

/* ---- small operations ----------------------------------------------------------------
 * convert      y[r,c] = x[r,c]; they may have different types.   y, x (R,C), rows ldy and ldx apart
 * fill         y[i] = value
 * axpy         y[i] += alpha[0] * x[i]                       alpha in memory
 * scale        y[i] = alpha[0] * x[i]                        alpha in memory
 * column_sums  y[c] += sum_r x[r,c]                          x (R,C); adds: it computes bias gradients
 * argmax       index[r] = the first c with the largest x[r,c]    x (R,C), index (R) int32, C >= 1; NaN is largest
 * increment    counter[0] += 1                               int64
 * tick         counter[0] += 1;  now[0] = counter[0]         int64: a fresh step number for each dropout mask
 * relu         y[i] = max(x[i], 0), NaN stays NaN;           backward dx[i] = dy[i] where y[i] > 0, else 0
 * silu         y[i] = x[i] s,  s = 1 / (1 + e^-x[i]);        backward dx[i] = dy[i] s (1 + x[i] (1 - s))
 * gelu         y[i] = x[i] P(x[i]);                          backward dx[i] = dy[i] (P(x[i]) + x[i] P'(x[i]))
 *              P(x) = (1 + erf(x / sqrt(2))) / 2, the normal distribution function
 * gelu_tanh    y[i] = x[i] s(v(x[i]));                       backward dx[i] = dy[i] s (1 + x[i] (1 - s) v'(x[i]))
 *              s = 1 / (1 + e^-v),  v(x) = sqrt(8 / pi) (x + 0.044715 x^3): x (1 + tanh(v / 2)) / 2
 * normal_cdf   y[i] = P(x[i]), on doubles and on the CPU only: its name ends in _double
 * y may be x, and dx may be dy, in scale, relu, silu, gelu and gelu_tanh.
 */
PYOPS_API pyops_status pyops_convert(
    pyops_real *y, const pyops_real *x, int64_t R, int64_t C, int64_t ldy, int64_t ldx, void *stream);
PYOPS_API pyops_status pyops_fill(pyops_real *y, int64_t n, float value, void *stream);
PYOPS_API pyops_status pyops_axpy(pyops_real *y, const pyops_real *x, const float *alpha, int64_t n, void *stream);
PYOPS_API pyops_status pyops_scale(pyops_real *y, const pyops_real *x, const float *alpha, int64_t n, void *stream);
PYOPS_API pyops_status pyops_column_sums(float *y, const pyops_real *x, int64_t R, int64_t C, void *stream);
PYOPS_API pyops_status pyops_argmax(int32_t *index, const float *x, int64_t R, int64_t C, void *stream);
PYOPS_API pyops_status pyops_increment(int64_t *counter, void *stream);
PYOPS_API pyops_status pyops_tick(int64_t *now, int64_t *counter, void *stream);
PYOPS_API pyops_status pyops_relu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_relu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *y, int64_t n, void *stream);
PYOPS_API pyops_status pyops_silu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_silu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_gelu_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_gelu_backward(pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_normal_cdf_double(double *y, const double *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_gelu_tanh_forward(pyops_real *y, const pyops_real *x, int64_t n, void *stream);
PYOPS_API pyops_status pyops_gelu_tanh_backward(
    pyops_real *dx, const pyops_real *dy, const pyops_real *x, int64_t n, void *stream);

/* ---- strided arrays: element by element, copies, reductions -----------------------------------------
 * A view is a pointer to its first element, a shape, and a stride for each axis, in elements.
 * shape (ndim) and strides (operands, ndim) are int64 in host memory: one shape for all operands; the strides of y, then of
 * each input in turn.  A stride may be negative, or 0 where an operand is broadcast.  0 <= ndim <= 8.
 * Axes are merged and reordered internally; no memory outside the elements is touched.
 * y may be an input with the same strides; otherwise it must not overlap any input.
 *
 * unary        y[i] = op(x[i]);   includes copy.   int32: copy, negate, abs.   round: halves to even;   sign of NaN: NaN
 *              elu: e^x - 1 for x < 0;   softplus: log(1 + e^x);   hardsigmoid: h(x) = min(max(x + 3, 0), 6) / 6;
 *              hardswish: x h(x)
 * binary       y[i] = op(a[i], b[i]);   comparisons give 1 or 0.   int32: all but divide; modulo 2^32
 *              floor_divide and remainder round towards minus infinity, as in Python; int32 by 0 gives 0
 *              and, or, xor: bit by bit; float: 1 or 0, of the truth values of a and b
 * scalar       y[i] = op(x[i], value), or op(value, x[i]) where reflected is 1
 * fill         y[i] = value
 * where        y[i] = a[i] if condition[i] is not 0, else b[i]; copies the bits.  On the CPU only
 * from_int32   y[i] = (float)x[i];    to_int32: rounds towards 0; INT32_MIN if the value does not fit in int32
 * reduce       y[i] = op over all x[i,j]:  j runs over the axes along which y has stride 0.  y has elements; x may have none.
 *              sum: short partial sums in float, added in double;  int32: modulo 2^32.   max, min: NaN if any element is NaN
 * IEEE 754 throughout: infinities, NaN, signed zeros and denormals give the same results as in C.
 */
typedef enum {
    PYOPS_OP_COPY = 0, PYOPS_OP_NEGATE, PYOPS_OP_ABS, PYOPS_OP_SQRT, PYOPS_OP_EXP, PYOPS_OP_LOG, PYOPS_OP_TANH,
    PYOPS_OP_SIGMOID, PYOPS_OP_FLOOR, PYOPS_OP_SIN, PYOPS_OP_COS, PYOPS_OP_EXPM1, PYOPS_OP_LOG1P, PYOPS_OP_ARCTAN,
    PYOPS_OP_ARCSIN, PYOPS_OP_ARCCOS, PYOPS_OP_ERF, PYOPS_OP_ROUND, PYOPS_OP_CEIL, PYOPS_OP_TRUNC, PYOPS_OP_SIGN,
    PYOPS_OP_TAN, PYOPS_OP_ELU, PYOPS_OP_SOFTPLUS, PYOPS_OP_HARDSIGMOID, PYOPS_OP_HARDSWISH
} pyops_unary_op;
typedef enum {
    PYOPS_OP_ADD = 0, PYOPS_OP_SUBTRACT, PYOPS_OP_MULTIPLY, PYOPS_OP_DIVIDE, PYOPS_OP_POWER, PYOPS_OP_MAXIMUM,
    PYOPS_OP_MINIMUM, PYOPS_OP_EQUAL, PYOPS_OP_NOT_EQUAL, PYOPS_OP_LESS, PYOPS_OP_LESS_EQUAL, PYOPS_OP_GREATER,
    PYOPS_OP_GREATER_EQUAL, PYOPS_OP_FLOOR_DIVIDE, PYOPS_OP_REMAINDER, PYOPS_OP_AND, PYOPS_OP_OR, PYOPS_OP_XOR
} pyops_binary_op;
typedef enum { PYOPS_OP_SUM = 0, PYOPS_OP_MAX, PYOPS_OP_MIN } pyops_reduce_op;

PYOPS_API pyops_status pyops_strided_unary(
    float *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_unary_int32(
    int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_binary(
    float *y, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_binary_int32(
    int32_t *y, const int32_t *a, const int32_t *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_scalar(
    float *y, const float *x, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int32_t op, int32_t reflected, float value, void *stream);
PYOPS_API pyops_status pyops_strided_scalar_int32(
    int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int32_t op, int32_t reflected, int32_t value, void *stream);
PYOPS_API pyops_status pyops_strided_fill(
    float *y, const int64_t *shape, const int64_t *strides, int64_t ndim, float value, void *stream);
PYOPS_API pyops_status pyops_strided_fill_int32(
    int32_t *y, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t value, void *stream);
PYOPS_API pyops_status pyops_strided_from_int32(
    float *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_to_int32(
    int32_t *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_where(
    float *y, const float *condition, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_where_int32(
    int32_t *y, const int32_t *condition, const int32_t *a, const int32_t *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_reduce(
    float *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_reduce_int32(
    int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);

/* Running sums and products along the second axis of x (outer,n,inner), on the CPU only.
 * last 0   y[o,i,k] = x[o,0,k] op x[o,1,k] op ... x[o,i,k], y (outer,n,inner);   1   y[o,k] = the last of them, y (outer,inner)
 * op: PYOPS_OP_ADD or PYOPS_OP_MULTIPLY.   float: in double, rounded when it is stored.   int32: modulo 2^32
 */
PYOPS_API pyops_status pyops_cumulate(
    float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int32_t op, int32_t last, void *stream);
PYOPS_API pyops_status pyops_cumulate_int32(
    int32_t *y, const int32_t *x, int64_t outer, int64_t n, int64_t inner, int32_t op, int32_t last, void *stream);
PYOPS_API pyops_status pyops_cumulate_double(
    double *y, const double *x, int64_t outer, int64_t n, int64_t inner, int32_t op, int32_t last, void *stream);

/* Where x (shape), compact, is not 0; NaN is not 0.  Returns the number of these elements.  at (ndim, elements of x) gets
 * their indices in row-major order: at[d,k] is the index of the k-th along axis d.   ndim of at least 1.   On the CPU only. */
PYOPS_API int64_t pyops_nonzero(int32_t *at, const float *x, const int64_t *shape, int64_t ndim);
PYOPS_API int64_t pyops_nonzero_int32(int32_t *at, const int32_t *x, const int64_t *shape, int64_t ndim);
PYOPS_API int64_t pyops_nonzero_double(int32_t *at, const double *x, const int64_t *shape, int64_t ndim);
/* Copy the rows of x (n rows of so many bytes) at which mask (n) is not 0 to y, and return their number.  y has memory for n
 * rows.   On the CPU only. */
PYOPS_API int64_t pyops_select(void *y, const void *x, const float *mask, int64_t n, int64_t bytes);
PYOPS_API int64_t pyops_select_int32(void *y, const void *x, const int32_t *mask, int64_t n, int64_t bytes);
PYOPS_API int64_t pyops_select_double(void *y, const void *x, const double *mask, int64_t n, int64_t bytes);

/* Operations on strided arrays of double, on the CPU only.  from_ and to_ name the other type of a conversion.
 * matmul   y (shape, M,N) = a (shape, M,K) b (shape, K,N):  strides (3,ndim) of the batch axes as in gemm_batched, in doubles
 * argmax   y[r] = the first index of the largest element of row r; NaN is largest.   x (R,C), C >= 1
 * argsort  y[r,:] = the indices that sort row r: ascending, equal elements in their order, NaN last.   x, y (R,C)
 * add_rows y[ids[r],:] += x[r,:], in the order of r.   y (V,E), x (R,E), ids (R) in [0,V)
 */
PYOPS_API pyops_status pyops_strided_unary_double(
    double *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_binary_double(
    double *y, const double *a, const double *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_strided_where_double(
    double *y, const double *condition, const double *a, const double *b, const int64_t *shape, const int64_t *strides,
    int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_double_from_float(
    double *y, const float *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_double_from_int32(
    double *y, const int32_t *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_double_to_float(
    float *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_double_to_int32(
    int32_t *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim, void *stream);
PYOPS_API pyops_status pyops_strided_reduce_double(
    double *y, const double *x, const int64_t *shape, const int64_t *strides, int64_t ndim, int32_t op, void *stream);
PYOPS_API pyops_status pyops_matmul_double(
    double *y, const double *a, const double *b, const int64_t *shape, const int64_t *strides, int64_t ndim,
    int64_t M, int64_t N, int64_t K, int64_t ldy, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, void *stream);
PYOPS_API pyops_status pyops_argmax_double(int32_t *y, const double *x, int64_t R, int64_t C, void *stream);
PYOPS_API pyops_status pyops_argsort_double(int32_t *y, const double *x, int64_t R, int64_t C, void *stream);
PYOPS_API pyops_status pyops_add_rows_double(
    double *y, const double *x, const int32_t *ids, int64_t R, int64_t V, int64_t E, void *stream);

/* ---- batches: gather rows of a resident data set ---------------------------------------------------
 * gather_pixels     y[b,:] = scale * table[rows[b],:]                  table (N,C) uint8, y (B,C)
 * gather_sequences  ids[t,b] = table[rows[b],t]                        table (N,T) int32, ids (T,B) int32
 *                   first >= 0: shifted by one step:  ids[0,b] = first, ids[t,b] = table[rows[b],t-1]
 * pack_sequences    a table of N sentences of any lengths: sentence n is table[starts[n]] .. table[starts[n+1] - 1]
 *                   the chosen ones follow each other: sentence b of the batch, a copy of sentence rows[b], is
 *                   ids[offsets[b]] .. ids[offsets[b+1] - 1];   positions: the index of each token in its sentence
 *                   first >= 0: shifted by one token: each sentence begins with `first` and loses its last token
 *                   total must equal the sum of the B lengths; offsets[B] is total, which is below 2^31
 *                   starts (N+1) int64, ascending   ids, positions (total)   offsets (B+1)   table int32.   ids, positions and
 *                   offsets may be NULL.
 * pack_pairs        pack_sequences three times, for the same rows: the sources; the labels, shifted, as the targets; the labels
 *                   source_total, target_total: of the sources, and of the targets or the labels
 * rows (B) int64 in [0,N)
 */
PYOPS_API pyops_status pyops_gather_pixels(
    float *y, const uint8_t *table, const int64_t *rows,
    int64_t N, int64_t B, int64_t C, float scale, void *stream);
PYOPS_API pyops_status pyops_gather_sequences(
    int32_t *ids, const int32_t *table, const int64_t *rows,
    int64_t N, int64_t B, int64_t T, int32_t first, void *stream);
PYOPS_API pyops_status pyops_pack_sequences(
    int32_t *ids, int32_t *positions, int32_t *offsets, const int32_t *table, const int64_t *starts, const int64_t *rows,
    int64_t N, int64_t B, int64_t total, int32_t first, void *stream);

PYOPS_API pyops_status pyops_pack_pairs(
    int32_t *source, int32_t *source_positions, int32_t *source_offsets,
    int32_t *target, int32_t *target_positions, int32_t *target_offsets, int32_t *labels,
    const int32_t *source_table, const int64_t *source_starts, const int32_t *label_table, const int64_t *label_starts,
    const int64_t *rows,
    int64_t N, int64_t B, int64_t source_total, int64_t target_total, int32_t first, void *stream);

/* ---- rows of activations by index: the states of the hypotheses of a beam search -------------------------
 * y[t,r,:] = x[t,rows[r],:]      x (T,N,C)   y (T,R,C), another array than x   rows (R) int32 in [0,N)
 */
PYOPS_API pyops_status pyops_gather_rows(
    float *y, const float *x, const int32_t *rows, int64_t T, int64_t N, int64_t R, int64_t C, void *stream);

/* y[rows[r],:] = x[r,:]: the inverse.   x (R,C), rows ldx floats apart   y (N,C), another array, ldy apart
 * rows (R) int32 in [0,N), all different
 */
PYOPS_API pyops_status pyops_scatter_rows(
    float *y, const float *x, const int32_t *rows,
    int64_t N, int64_t R, int64_t C, int64_t ldy, int64_t ldx, void *stream);

/* ---- linear layer on pixels ------------------------------------------------------------------------
 * y[b,:] = sum_i scale * table[rows[b],i] * weight[i,:] + bias      over the nonzero pixels
 * dweight[i,:] += sum_b scale * table[rows[b],i] * dy[b,:];   dbias += sum_b dy[b,:]
 * Gathers the batch, converts it to float and multiplies.  Pixels have no gradient.
 * table (N,I) uint8   rows (B) int64 in [0,N)   weight, dweight (I,O)   bias, dbias (O)   y, dy (B,O)   I < 65536
 * ink (B) int32, saved: the number of nonzero pixels of each image;  places (B,I+8) uint16, saved: their indices, ascending.
 * Both may be NULL in forward if no backward follows.
 */
PYOPS_API pyops_status pyops_pixel_linear_forward(
    float *y, int32_t *ink, uint16_t *places,
    const uint8_t *table, const int64_t *rows, const float *weight, const float *bias,
    int64_t N, int64_t B, int64_t I, int64_t O, float scale, void *stream);
PYOPS_API pyops_status pyops_pixel_linear_backward(
    float *dweight, float *dbias, const float *dy, const uint8_t *table, const int64_t *rows,
    const int32_t *ink, const uint16_t *places, float *work,
    int64_t N, int64_t B, int64_t I, int64_t O, float scale, void *stream);
PYOPS_API int64_t pyops_pixel_linear_backward_work(int64_t B, int64_t I, int64_t O);

/* ---- concatenation with a context ------------------------------------------------
 * y[t,b,:] = [x[t,b,:], context[b,:]]     the same context at every step
 * y, dy (T,B,E+H)   x, dx (T,B,E)   context, dcontext (B,H)
 * dcontext = sum_t dy[t,b,E:]
 */
PYOPS_API pyops_status pyops_concat_context_forward(
    pyops_real *y, const pyops_real *x, const pyops_real *context,
    int64_t T, int64_t B, int64_t E, int64_t H, void *stream);
PYOPS_API pyops_status pyops_concat_context_backward(
    pyops_real *dx, pyops_real *dcontext, const pyops_real *dy,
    int64_t T, int64_t B, int64_t E, int64_t H, void *stream);

/* ---- embedding -------------------------------------------------------------------
 * y[r,:] = weight[ids[r],:]          dweight[ids[r],:] += dy[r,:]   in the order of r
 * ids (R) int32 in [0,V)   weight, dweight (V,E)   y, dy (R,E)
 * touched (V*E / PYOPS_GRAD_BLOCK rounded up) int32 or NULL: marks the blocks that were added to, see pyops_zero_touched
 */
PYOPS_API pyops_status pyops_embedding_forward(
    pyops_real *y, const float *weight, const int32_t *ids,
    int64_t R, int64_t V, int64_t E, void *stream);
PYOPS_API pyops_status pyops_embedding_backward(
    float *dweight, int32_t *touched, const pyops_real *dy, const int32_t *ids,
    int64_t R, int64_t V, int64_t E, void *stream);

/* ---- embedding with positions and dropout: the input of a transformer -------------------
 * y[r,:] = keep * (scale * weight[ids[r],:] + table[positions[r],:]) / (1 - p);   positions NULL: table[0,:] for each row
 * dweight[ids[r],:] += scale * (keep * dy[r,:] / (1 - p)), in the order of r
 * keep as in pyops_dropout; step NULL or p = 0: all 1.   In float32 the results are bit-equal to pyops_embedding_*,
 * pyops_add_positions_* and pyops_dropout, one after the other.
 * ids (R) int32 in [0,V)   positions (R) int32 in [0,longest)   weight, dweight (V,E)   y, dy (R,E)   table (longest,E)
 * touched: as in pyops_embedding_backward
 */
PYOPS_API pyops_status pyops_embedding_positions_forward(
    pyops_real *y, const float *weight, const int32_t *ids, const float *table, const int32_t *positions, const int64_t *step,
    int64_t R, int64_t V, int64_t E, int64_t longest, float scale, float p, uint64_t key, void *stream);
PYOPS_API pyops_status pyops_embedding_positions_backward(
    float *dweight, int32_t *touched, const pyops_real *dy, const int32_t *ids, const int64_t *step,
    int64_t R, int64_t V, int64_t E, float scale, float p, uint64_t key, void *stream);

/* ---- embedding, a context and a linear layer over both ------------------------------
 * y[t,b,:] = [table[ids[t,b],:], context[b,:]] weight' + bias
 * With weight = [w_e w_c] this is table[id] w_e' + bias, computed once for each distinct token, plus context[b] w_c', the same
 * at every step.  backward, with u[v] = the sum of dy over the positions of token v, and s[b] = sum_t dy[t,b]:
 *   dtable[v] += u[v] w_e;   dcontext[b] = s[b] w_c, += with add_dcontext;   dbias += sum dy
 *   dweight += [sum_v u[v]' table[v], sum_b s[b]' context[b]]
 * ids (T,B) int32 in [0,V)   table, dtable (V,E)   context, dcontext (B,C), both NULL and C = 0 without a context
 * weight, dweight (O,E+C)   bias, dbias (O)   y (T,B,O)   dy (T,B,O), rows ld floats apart
 * touched: as in pyops_embedding_backward, for dtable
 * With a bfloat16 y or dy the weight may have either type.
 * offsets (B+1) int32, or NULL: packed rows.  ids (N), y (N,O), dy (N,O): sequence b is rows offsets[b] to offsets[b+1] - 1, at
 * most T of them.  Without offsets N is 0.
 */
PYOPS_API pyops_status pyops_embedding_linear_forward(
    pyops_real *y, const float *table, const int32_t *ids, const float *context, const int32_t *offsets,
    const pyops_real *weight, const float *bias,
    float *work,
    int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O, void *stream);
PYOPS_API int64_t pyops_embedding_linear_forward_work(
    int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O);
PYOPS_API pyops_status pyops_embedding_linear_backward(
    float *dtable, int32_t *touched, float *dcontext, float *dweight, float *dbias,
    const pyops_real *dy, const float *table, const int32_t *ids, const float *context, const int32_t *offsets,
    const pyops_real *weight,
    float *work,
    int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O, int64_t ld, int32_t add_dcontext,
    void *stream);
PYOPS_API int64_t pyops_embedding_linear_backward_work(
    int64_t T, int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O);

/* ---- dropout -----------------------------------------------------------------------
 * y[i] = x[i] * keep[i] / (1 - p),   keep[i] = word (i mod 4) of Philox4x32-10(counter, key) >= p * 2^32
 * counter = (i / 4, step[0]), 64 bits each; nothing is saved: backward is the same call on dy.
 * step (1) int64.  0 <= p < 1.  y may be x.   Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
 */
PYOPS_API pyops_status pyops_dropout(
    pyops_real *y, const pyops_real *x, const int64_t *step,
    int64_t n, float p, uint64_t key, void *stream);

/* ---- residual connection, with dropout of the branch ------------------------------------
 * y[i] = x[i] + branch[i] * keep[i] / (1 - p),   keep as in pyops_dropout;   step NULL or p = 0: y = x + branch
 * There is no backward function: dx is dy, and dbranch is pyops_dropout of dy.   y may be x or branch.
 */
PYOPS_API pyops_status pyops_residual(
    pyops_real *y, const pyops_real *x, const pyops_real *branch, const int64_t *step,
    int64_t n, float p, uint64_t key, void *stream);

/* ---- positions ------------------------------------------------------------------------------
 * y[t,b,:] = scale * x[t,b,:] + table[t,:];   backward dx = scale * dy, over n = T * B * D floats
 * positions not NULL: y[t,b,:] = scale * x[t,b,:] + table[positions[t,b],:];   packed rows (N,D) have T = N and B = 1
 * x, y, dx, dy (T,B,D)   positions (T,B) int32 in [0,longest), or NULL: then T <= longest
 * table (longest,D): points to the row of position 0, which the caller chooses
 */
PYOPS_API pyops_status pyops_add_positions_forward(
    pyops_real *y, const pyops_real *x, const float *table, const int32_t *positions,
    int64_t T, int64_t B, int64_t D, int64_t longest, float scale, void *stream);
PYOPS_API pyops_status pyops_add_positions_backward(
    pyops_real *dx, const pyops_real *dy,
    int64_t n, float scale, void *stream);

/* ---- layer norm over the last axis ---------------------------------------------------------
 * mean[r] = mean of x[r,:];  rstd[r] = 1 / sqrt(mean of (x[r,:] - mean[r])^2 + eps);  xhat = (x - mean) * rstd
 * y = xhat * weight + bias
 * backward:  g = dy * weight;   dx[r,:] (+)= rstd[r] * (g - mean of g[r,:] - xhat * mean of (g * xhat)[r,:])
 *            dweight += sum_r dy * xhat;   dbias += sum_r dy
 * x, y, dx, dy (R,C)   weight, bias, dweight, dbias (C)   mean, rstd (R), saved for backward   C >= 1, eps >= 0
 * accumulate 1: adds to dx, for an x with a second consumer whose gradient dx already holds.  dx may be dy.
 * Ba, Kiros and Hinton 2016, arXiv:1607.06450.
 */
PYOPS_API pyops_status pyops_layer_norm_forward(
    pyops_real *y, float *mean, float *rstd,
    const pyops_real *x, const float *weight, const float *bias,
    int64_t R, int64_t C, float eps, void *stream);
PYOPS_API pyops_status pyops_layer_norm_backward(
    pyops_real *dx, float *dweight, float *dbias,
    const pyops_real *dy, const pyops_real *x, const float *weight, const float *mean, const float *rstd,
    float *work,
    int64_t R, int64_t C, int32_t accumulate, void *stream);
PYOPS_API int64_t pyops_layer_norm_backward_work(int64_t R, int64_t C);

/* ---- layer norm of a residual connection ----------------------------------------------------
 * sum = x + branch * keep / (1 - p);  y, mean, rstd = layer norm of sum.   keep as in pyops_dropout; step NULL or p = 0: all 1
 * backward:  dx (+)= the gradient of sum, as in layer norm;   dbranch = dx * keep / (1 - p);   dweight, dbias add
 *            accumulate 1: adds to dx, which holds the gradient of another use of sum, as in a pre-norm transformer
 *            dbranch is NULL without dropout: it would equal dx
 * The results are bit-equal to pyops_residual, pyops_layer_norm_* and pyops_dropout, one after the other.
 * x, branch, sum, y, dy, dx, dbranch (R,C)   weight, bias, dweight, dbias (C)   sum, mean, rstd (R) are saved for backward
 * sum may be x or branch, dx may be dy.   work: pyops_layer_norm_backward_work(R, C) floats
 */
PYOPS_API pyops_status pyops_residual_norm_forward(
    pyops_real *y, pyops_real *sum, float *mean, float *rstd,
    const pyops_real *x, const pyops_real *branch, const int64_t *step, const float *weight, const float *bias,
    int64_t R, int64_t C, float p, uint64_t key, float eps, void *stream);
PYOPS_API pyops_status pyops_residual_norm_backward(
    pyops_real *dx, pyops_real *dbranch, float *dweight, float *dbias,
    const pyops_real *dy, const pyops_real *sum, const int64_t *step, const float *weight, const float *mean,
    const float *rstd, float *work,
    int64_t R, int64_t C, float p, uint64_t key, int32_t accumulate, void *stream);

/* ---- batch norm over rows and positions -----------------------------------------------------
 * training 1:  mean[c] = mean of x[:,c,:];   rstd[c] = 1 / sqrt(variance of x[:,c,:] + eps);   n = R P >= 2
 *              running_mean += momentum * (mean - running_mean);   running_var likewise, with the unbiased variance,
 *              n / (n - 1) times the variance of the batch;   either may be NULL
 * training 0:  mean = running_mean;   rstd = 1 / sqrt(running_var + eps);   running_mean and running_var are unchanged
 * xhat = (x - mean) * rstd;   y = xhat * weight + bias
 * backward:    g = dy * weight * rstd;   training 0: dx = g
 *              training 1: dx = g - mean of g[:,c,:] - xhat * mean of (g * xhat)[:,c,:]
 *              dweight += sum dy * xhat;   dbias += sum dy
 * x, y, dx, dy (R,C,P)   running_mean, running_var, weight, bias, dweight, dbias (C)   mean, rstd (C), saved for backward
 * P: the positions of an image, 1 for rows of features.   dx may be dy.   Ioffe and Szegedy 2015, arXiv:1502.03167.
 */
PYOPS_API pyops_status pyops_batch_norm_forward(
    float *y, float *running_mean, float *running_var, float *mean, float *rstd,
    const float *x, const float *weight, const float *bias,
    int64_t R, int64_t C, int64_t P, float eps, float momentum, int32_t training, void *stream);
PYOPS_API pyops_status pyops_batch_norm_backward(
    float *dx, float *dweight, float *dbias,
    const float *dy, const float *x, const float *weight, const float *mean, const float *rstd,
    int64_t R, int64_t C, int64_t P, int32_t training, void *stream);

/* ---- convolution in two dimensions ------------------------------------------------------------
 * y[n,o,i,j] = bias[o] + sum over c < C / groups, a < kh, b < kw of
 *              weight[o,c,a,b] * x[n, first + c, i stride_h + a dilation_h - pad_h, j stride_w + b dilation_w - pad_w]
 * where first = (o / (O / groups)) * (C / groups), and x is 0 outside (C,H,W).   Ho and Wo are the caller's choice, so padding
 * at the bottom and at the right needs no argument.
 * x, dx (N,C,H,W)   y, dy (N,O,Ho,Wo)   weight, dweight (O,C/groups,kh,kw)   bias, dbias (O), or NULL
 * conv2d_backward_x       dx = the transpose of this linear map, applied to dy; overwrites
 * conv2d_backward_weight  dweight += sum over n, i, j of dy[n,o,i,j] * the factor of weight above;   dbias += sum dy[n,o,i,j]
 * The functions that end in _double have no bias and are on the CPU only: plain loops, for checks of gradients.
 * C and O are multiples of groups.
 */
PYOPS_API pyops_status pyops_conv2d_forward(
    float *y, const float *x, const float *weight, const float *bias, float *work,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);
PYOPS_API int64_t pyops_conv2d_forward_work(
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups);
PYOPS_API pyops_status pyops_conv2d_backward_x(
    float *dx, const float *dy, const float *weight, float *work,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);
PYOPS_API int64_t pyops_conv2d_backward_x_work(
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups);
PYOPS_API pyops_status pyops_conv2d_backward_weight(
    float *dweight, float *dbias, const float *dy, const float *x, float *work,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);
PYOPS_API int64_t pyops_conv2d_backward_weight_work(
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups);
PYOPS_API pyops_status pyops_conv2d_forward_double(
    double *y, const double *x, const double *weight,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);
PYOPS_API pyops_status pyops_conv2d_backward_x_double(
    double *dx, const double *dy, const double *weight,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);
PYOPS_API pyops_status pyops_conv2d_backward_weight_double(
    double *dweight, const double *dy, const double *x,
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
    int64_t groups, void *stream);

/* ---- pooling in two dimensions -------------------------------------------------------------
 * The window of y[p,i,j] has rows i stride_h + a dilation_h - pad_h for a < kh, and columns likewise.
 * max_pool2d  y = the maximum of the window inside (H,W), -inf if none is inside;  NaN if one is NaN
 *             index[p,i,j] = row W + column of the first maximum, of the last NaN if one is NaN, and -1 if none is inside
 *             backward: dx = 0, then dx[p][index[p,i,j]] += dy[p,i,j]
 * avg_pool2d  y = the sum of the window inside (H,W) / n;   backward: dx = the sum of dy / n over the windows with that element
 *             n: the elements of the window inside (H,W) or, with count_pad 1, inside (H,W) and pad_h rows and pad_w columns
 *             around it;   dilation 1
 * x, dx (planes,H,W)   y, dy (planes,Ho,Wo)   index (planes,Ho,Wo) int32, saved for backward   dx overwrites   H W < 2^31
 * On doubles, on the CPU only: the functions that end in _double.
 */
PYOPS_API pyops_status pyops_max_pool2d_forward(
    float *y, int32_t *index, const float *x,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, void *stream);
PYOPS_API pyops_status pyops_max_pool2d_backward(
    float *dx, const float *dy, const int32_t *index,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, void *stream);
PYOPS_API pyops_status pyops_avg_pool2d_forward(
    float *y, const float *x,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int32_t count_pad, void *stream);
PYOPS_API pyops_status pyops_avg_pool2d_backward(
    float *dx, const float *dy,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int32_t count_pad, void *stream);
PYOPS_API pyops_status pyops_max_pool2d_forward_double(
    double *y, int32_t *index, const double *x,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, void *stream);
PYOPS_API pyops_status pyops_max_pool2d_backward_double(
    double *dx, const double *dy, const int32_t *index,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, void *stream);
PYOPS_API pyops_status pyops_avg_pool2d_forward_double(
    double *y, const double *x,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int32_t count_pad, void *stream);
PYOPS_API pyops_status pyops_avg_pool2d_backward_double(
    double *dx, const double *dy,
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw,
    int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int32_t count_pad, void *stream);

/* ---- packed rows and padded sequences ------------------------------------------------
 * offsets (B+1) int32: sequence b is rows offsets[b] to offsets[b+1] - 1 of x (N,C), at most T.  In y (T,B,C) its step t is row
 * offsets[b] + t of x, with reverse row offsets[b+1] - 1 - t.
 * pad_rows      y = x (NULL: zeros), rows ldx apart, 0 after the end of each sequence.  last (B,C) is added at its last step;
 *               first (B,C) = last of a sequence without a step, 0 for all others
 * unpad_rows    x = y without the steps after the end;  last (B,C) = y at the last step, or first (B,C) without a step
 * first and last may be NULL.  Each function is the gradient of the other.
 */
PYOPS_API pyops_status pyops_pad_rows(
    float *y, float *first, const float *x, const float *last, const int32_t *offsets,
    int64_t T, int64_t B, int64_t N, int64_t C, int64_t ldx, int32_t reverse, void *stream);
PYOPS_API pyops_status pyops_unpad_rows(
    float *x, float *last, const float *y, const float *first, const int32_t *offsets,
    int64_t T, int64_t B, int64_t N, int64_t C, int32_t reverse, void *stream);

/* ---- gated recurrent unit over a whole sequence --------------------------------------
 * For t = 0 .. T-1, with h[-1] = h0 (zeros where h0 is NULL) and gates stacked in the order r, z, n:
 *   a = x[t] w_ih' + b_ih
 *   r = sigmoid(a_r + h[t-1] w_hr' + b_hr)
 *   z = sigmoid(a_z + h[t-1] w_hz' + b_hz)
 *   n = tanh(a_n + r * u),  u = h[t-1] w_hn' + b_hn        reset_before 0: the reset gate after the product
 *   n = tanh(a_n + u w_hn' + b_hn),  u = r * h[t-1]        reset_before 1: before it
 *   h[t] = (1 - z) * n + z * h[t-1]
 * x, dx (T,B,I)   h, dh (T,B,H)   h0, dh0, dh_last (B,H)   gates (T,B,4H) = r, z, n, u, saved for backward
 * w_ih, dw_ih (3H,I)   w_hh, dw_hh (3H,H)   b_ih, b_hh, db_ih, db_hh (3H)   lengths (B) int32 in [0,T]
 * dgates (T,B,4H) = dr, dz, dn, du: dr, dz, dn are the gradients of the arguments of sigmoid and tanh, which are also the
 * gradients of a_r, a_z, a_n; du is the gradient of u
 * dh is the gradient of every h[t], dh_last a further gradient of h[T-1]; either may be NULL for zeros.
 * dx and dh0 may be NULL if they are not needed.
 * Sequence b has lengths[b] steps, or T if lengths is NULL.  In later steps h, gates, dgates and dx are 0, and dh and dh_last
 * are ignored.  There the CPU does not read x and a; on a GPU they must be finite.
 * offsets (B+1) int32, or NULL: packed rows, without lengths.  Sequence b has offsets[b+1] - offsets[b] steps, at most T.
 * Step t is row offsets[b] + t; with reverse it is row offsets[b+1] - 1 - t, so the sequence is read from its end.  x, a, h,
 * gates, dh, dx and dgates have N rows: (N,I), ...  Then last (B,H), which may be NULL, is h after the last step of each
 * sequence, h0 if it has no step, and dh_last is the gradient of last.  Without offsets N and reverse are 0, and last is NULL.
 * The caller may compute the input product and pass it as a (T,B,3H), otherwise NULL.  Then I = 0; x, w_ih, b_ih and their
 * gradients are NULL; and the gradient of a is in dgates.
 * With bfloat16 activations the weights may have either type, and the sum for h[t] reads h[t-1] before it is rounded.
 * Cho et al. 2014, arXiv:1406.1078 (reset before); cuDNN and PyTorch use reset after.
 */
PYOPS_API pyops_status pyops_gru_forward(
    pyops_real *h, pyops_real *gates, float *last,
    const pyops_real *x, const pyops_real *a, const float *h0, const int32_t *lengths, const int32_t *offsets,
    const pyops_real *w_ih, const pyops_real *w_hh, const float *b_ih, const float *b_hh,
    float *work,
    int64_t T, int64_t B, int64_t N, int64_t I, int64_t H, int32_t reset_before, int32_t reverse, void *stream);
PYOPS_API int64_t pyops_gru_forward_work(int64_t T, int64_t B, int64_t N, int64_t I, int64_t H);
PYOPS_API pyops_status pyops_gru_backward(
    pyops_real *dx, float *dh0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh, pyops_real *dgates,
    const pyops_real *dh, const float *dh_last,
    const pyops_real *x, const float *h0, const int32_t *lengths, const int32_t *offsets,
    const pyops_real *w_ih, const pyops_real *w_hh,
    const pyops_real *h, const pyops_real *gates,
    float *work,
    int64_t T, int64_t B, int64_t N, int64_t I, int64_t H, int32_t reset_before, int32_t reverse, void *stream);
PYOPS_API int64_t pyops_gru_backward_work(int64_t T, int64_t B, int64_t N, int64_t I, int64_t H);
/* One step, for a caller that computes the products itself.  h_prev (B,H) is h[t-1], a (B,3H) as above, gates (B,4H).
 * gates_forward   AFTER     product (B,3H) = h_prev w_hh' + b_hh:            y (B,H) = h[t], and all of gates
 *                 BEFORE_1  product (B,2H), the same for r and z only:       y = u = r * h_prev, and r, z, u of gates
 *                 BEFORE_2  product (B,H) = u w_hn' + b_hn:                  y = h[t], and n of gates
 * gates_backward  dh (B,H): on entry the gradient of h[t] from later steps, to which dy (B,H) is added unless it is NULL; on
 *                 return the part of the gradient of h_prev that does not pass through the products.
 *                 da (B,3H): the gradient of a.   dp: the gradient of product
 *                 AFTER     da = dr dz dn;   dp (B,3H) = dr dz du
 *                 BEFORE_1  dz, dn of da;    dp (B,H) = dn
 *                 BEFORE_2  with du (B,H) = dn w_hn:   dr of da;   dp (B,2H) = dr dz;   dh += du r;   dy is not read
 */
typedef enum { PYOPS_GRU_AFTER = 0, PYOPS_GRU_BEFORE_1, PYOPS_GRU_BEFORE_2 } pyops_gru_stage;
PYOPS_API pyops_status pyops_gru_gates_forward(
    float *y, float *gates, const float *a, const float *product, const float *h_prev,
    int64_t B, int64_t H, int32_t stage, void *stream);
PYOPS_API pyops_status pyops_gru_gates_backward(
    float *dh, float *da, float *dp, const float *dy, const float *du, const float *gates, const float *h_prev,
    int64_t B, int64_t H, int32_t stage, void *stream);

/* ---- LSTM and simple recurrent network over a whole sequence -----------------------------
 * For t = 0 .. T-1, with h[-1] = h0 and c[-1] = c0 (zeros if NULL):
 *   a = x[t] w_ih' + b_ih + h[t-1] w_hh' + b_hh           G blocks of H columns
 *   TANH, RELU (G = 1)   h[t] = tanh(a) or max(a, 0)
 *   LSTM (G = 4)         i = sigmoid(a_i);   f = sigmoid(a_f);   g = tanh(a_g);   o = sigmoid(a_o)
 *                        c[t] = f c[t-1] + i g;   h[t] = o tanh(c[t])
 * x, dx (T,B,I)   h0, dh0, c0, dc0 (B,H)   w_ih, dw_ih (GH,I)   w_hh, dw_hh (GH,H)   b_ih, b_hh, db_ih, db_hh (GH) or NULL
 * y, dy: h (T,B,H);  LSTM: h and c (2,T,B,H), and dy is the gradient of every h[t] and c[t]
 * gates (T,B,4H) = i, f, g, o, saved for backward; NULL without an LSTM   dgates (T,B,GH): the gradient of a
 * dx, dh0 and dc0 may be NULL if they are not needed.  dx, dh0, dc0 and dgates are overwritten, the others are added to.
 * lengths (B) int32 in [0,T], or NULL: sequence b has lengths[b] steps.  In later steps y, gates, dgates and dx are 0, and dy
 * is ignored.  There the CPU does not read x; on a GPU it must be finite.
 * Elman 1990; Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.  Gates are ordered as in PyTorch.
 */
typedef enum { PYOPS_CELL_TANH = 0, PYOPS_CELL_RELU, PYOPS_CELL_LSTM } pyops_cell;
PYOPS_API pyops_status pyops_rnn_forward(
    float *y, float *gates,
    const float *x, const float *h0, const float *c0, const int32_t *lengths,
    const float *w_ih, const float *w_hh, const float *b_ih, const float *b_hh,
    float *work,
    int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell, void *stream);
PYOPS_API int64_t pyops_rnn_forward_work(int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell);
PYOPS_API pyops_status pyops_rnn_backward(
    float *dx, float *dh0, float *dc0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh, float *dgates,
    const float *dy,
    const float *x, const float *h0, const float *c0, const int32_t *lengths,
    const float *w_ih, const float *w_hh,
    const float *y, const float *gates,
    float *work,
    int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell, void *stream);
PYOPS_API int64_t pyops_rnn_backward_work(int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell);

/* ---- scaled dot-product attention, several heads --------------------------------------------
 * For each b, head h, query i:
 *   s[i,j] = q[i,b,h,:] . k[j,b,h,:] / sqrt(C)     over the keys j that i may see: j < lengths[b], and with causal
 *                                                  j <= i + Tk - Tq: the last query sees every key for any Tq and Tk
 *   max[i] = max_j s[i,j];   sum[i] = sum_j exp(s[i,j] - max[i]);   saved as stats[0,b,h,i] and stats[1,b,h,i]
 *   P[i,j] = exp(s[i,j] - max[i]) / sum[i]
 *   y[i,b,h,:] = sum_j keep[i,j] / (1 - p) P[i,j] v[j,b,h,:]
 * A query that may see no key has y = 0, max = -infinity and sum = 0, and no gradient flows through it.
 * keep as in pyops_dropout, for element ((b*heads + h)*Tq + i)*Tk4 + j, where Tk4 is Tk rounded up to a multiple of 4.
 * backward, with D[i,j] = keep[i,j] / (1 - p):
 *   dsum[i] = dy[i,b,h,:] . y[i,b,h,:];   dS[i,j] = P[i,j] (D[i,j] dy[i,b,h,:] . v[j,b,h,:] - dsum[i])
 *   dq = dS k / sqrt(C);   dk = dS' q / sqrt(C);   dv = (D P)' dy;   0 for keys that no query may see
 * q, dq, y, dy (Tq,B,heads*C)   k, v, dk, dv (Tk,B,heads*C): head h of a row is floats [h*C, h*C + C)
 * Rows of q are ldq floats apart, rows of k and of v ldk, of dq lddq, of dk and of dv lddk; rows of y and dy are contiguous.
 * So q, k and v, and their gradients, may be columns of one array (T,B,3*heads*C).
 * stats (2,B,heads,Tq)   lengths (B) int32 in [0,Tk]; NULL: Tk   step (1) int64; NULL: no dropout   0 <= p < 1
 * Packed rows, without padding: with q_offsets (B+1) int32, query i of sequence b is row q_offsets[b] + i of q, dq, y and dy
 * (N,heads*C), and there are q_offsets[b+1] - q_offsets[b] <= Tq of them.  With k_offsets likewise the keys and Tk, and lengths
 * is NULL.  Either may be NULL.  q_offsets[0] = k_offsets[0] = 0.  For causal, Tq and Tk are the numbers of queries and of keys
 * of sequence b; in stats and in the index of keep they are the arguments, so the mask of a sequence does not depend on the
 * other lengths.  stats beyond the queries of a sequence are not written.
 * Vaswani et al. 2017, arXiv:1706.03762; in tiles: Dao et al. 2022, arXiv:2205.14135.
 */
PYOPS_API pyops_status pyops_attention_forward(
    pyops_real *y, float *stats,
    const pyops_real *q, const pyops_real *k, const pyops_real *v, const int32_t *lengths,
    const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
    int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk,
    int32_t causal, float p, uint64_t key, void *stream);
PYOPS_API pyops_status pyops_attention_backward(
    pyops_real *dq, pyops_real *dk, pyops_real *dv,
    const pyops_real *dy, const pyops_real *q, const pyops_real *k, const pyops_real *v, const int32_t *lengths,
    const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
    const pyops_real *y, const float *stats,
    int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk, int64_t lddq, int64_t lddk,
    int32_t causal, float p, uint64_t key, void *stream);

/* One step of decoding with a query for each of R hypotheses, or R tokens of one.  CPU library only.
 * attention_step   y[r,:] of the query q[r,:], as in attention_forward.
 *                  offsets NULL: over T keys of an array with W rows per token.  Key s is row index[s,r] of token s for s < M, and
 *                  else row r
 *                  positions: over the keys s <= positions[r], which are row index[s,r] of T * W rows
 *                  offsets (W+1): over the keys of sequence b, rows offsets[b] to offsets[b + 1] - 1, at most T, where b is
 *                  index[r % B], or r % B if index is NULL and B = W
 *                  causal, with W = 1: the queries are the last R of T tokens of one hypothesis, and see the keys up to their own
 * follow_parents   index[s,r] = before[s,parents[r]] for s < M, else parents[r]: the rows of the T tokens of each hypothesis, if
 *                  hypothesis r continues hypothesis parents[r] of N
 * q, y (R,heads*C)   k, v (T,W,heads*C), or with offsets (rows,heads*C)   attention_step: index (M,R) int32 in [0,W), M <= T,
 * or with offsets (B).  positions (R) int32 in [0,T), or NULL; with them index (T,W) in [0,T*W)
 * Rows of q are ldq floats apart, rows of k and of v ldk; rows of y are contiguous.
 * follow_parents: index (T,R), before (M,N) int32, parents (R) int32 in [0,N)
 */
PYOPS_API pyops_status pyops_attention_step(
    float *y, const float *q, const float *k, const float *v, const int32_t *index, const int32_t *offsets,
    const int32_t *positions, int64_t R, int64_t T, int64_t M, int64_t W, int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk,
    int32_t causal, void *stream);
PYOPS_API pyops_status pyops_follow_parents(
    int32_t *index, const int32_t *before, const int32_t *parents,
    int64_t T, int64_t M, int64_t N, int64_t R, void *stream);

/* The softmax alone, for scores in memory: s (B,heads,Tq,Tk), without the factor 1 / sqrt(C), which is `scale`.
 * forward   p[i,:] = softmax of scale * s[i,:] over the keys that query i may see, 0 elsewhere;   w = D p
 *           q_offsets, k_offsets as in attention_forward, but only for the numbers of queries and keys of each sequence:
 *           rows of further queries and the elements of further keys are 0
 * backward  ds[i,j] = p[i,j] (D[i,j] dw[i,j] - sum_j p[i,j] D[i,j] dw[i,j]):  the gradient of scale * s
 * Visible keys and D as in attention_forward, whose dropout rate p is `share` here; w may be NULL if nothing is dropped.
 * p may be s.   ds may be dw.
 */
PYOPS_API pyops_status pyops_attention_softmax_forward(
    float *p, float *w, const float *s, const int32_t *lengths,
    const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
    int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int32_t causal, float scale, float share, uint64_t key, void *stream);
PYOPS_API pyops_status pyops_attention_softmax_backward(
    float *ds, const float *dw, const float *p, const int64_t *step,
    int64_t Tq, int64_t Tk, int64_t B, int64_t heads, float share, uint64_t key, void *stream);

/* lengths[b] = 1 + the last t with ids[t,b] != pad, 0 if there is none.   ids (T,B) int32, lengths (B) int32 */
PYOPS_API pyops_status pyops_sequence_lengths(
    int32_t *lengths, const int32_t *ids, int64_t T, int64_t B, int32_t pad, void *stream);

/* ---- softmax along an axis -----------------------------------------------------------------
 * x, y, dy, dx (outer,n,inner): the axis of n elements is normalized.
 * forward   y = exp(x) / sum exp(x);   with log: y = x - log sum exp(x).   Overflow is avoided; weights below e^-87 are 0.
 * backward  dx = y (dy - sum dy y);    with log: dx = dy - exp(y) sum dy.   Overwrites.
 * y must not be x, and dx neither dy nor y.
 */
PYOPS_API pyops_status pyops_softmax_forward(
    float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int32_t log, void *stream);
PYOPS_API pyops_status pyops_softmax_backward(
    float *dx, const float *dy, const float *y, int64_t outer, int64_t n, int64_t inner, int32_t log, void *stream);

/* ---- masked softmax cross entropy ------------------------------------------------------
 * max[r] = max_c x[r,c];   sum[r] = sum_c exp(x[r,c] - max[r]);   saved as stats[0,r] and stats[1,r]
 * loss[0] = mean over valid r of log sum[r] + (max[r] - x[r,labels[r]])
 * dx[r,c] = dloss[0] / valid[0] * (exp(x[r,c] - max[r]) / sum[r] - [c = labels[r]]),  0 in masked rows
 * Only differences of x are used, so the loss and dx are as exact for large x as for small x.
 * A row is masked where labels[r] = ignore.  valid[0] counts the others; loss is 0 if there are none.
 * smoothing s, 0 <= s < 1: the target of a row is (1 - s) onehot(label) + s / C instead of onehot(label), so
 *   loss = mean over valid r of log sum + (1 - s) (max - x[r,label]) + s * mean over c of (max - x[r,c]),
 *   and in dx (1 - s) [c = label] + s / C
 * x, dx (R,C)   labels (R) int32 in [0,C) or = ignore   stats (2,R)   loss, dloss (1)   valid (1) int32
 */
PYOPS_API pyops_status pyops_cross_entropy_forward(
    float *loss, int32_t *valid, float *stats,
    const float *x, const int32_t *labels,
    int64_t R, int64_t C, int32_t ignore, float smoothing, void *stream);
PYOPS_API pyops_status pyops_cross_entropy_backward(
    float *dx, const float *dloss,
    const float *x, const int32_t *labels, const float *stats, const int32_t *valid,
    int64_t R, int64_t C, int32_t ignore, float smoothing, void *stream);

/* ---- output layer fused with masked softmax cross entropy ---------------------------------
 * logits = x weight' + bias, then the loss above.  Only valid rows are computed, in blocks of rows that stay in cache; all
 * logits are never in memory at once (a GPU keeps up to 1 GiB of them in `work`; if x is bfloat16, of exponentials in 16 bits).
 * tf32 not 0: `work` has room for products by wgmma.  A GPU then uses it if the precision is TF32 at the time of the call.
 * The gradients are computed in the same call, while a block is in cache:   dx (R,D) overwritten, 0 in masked rows;
 * dweight (V,D), dbias (V).
 * dloss (1): the upstream gradient, read from memory;  dweight and dbias accumulate.
 * dloss NULL: it is not known yet.  The gradients are for dloss = 1, and dweight and dbias are OVERWRITTEN: they belong to this
 * call, and the backward pass scales and adds them (pyops_scale, pyops_axpy).
 * dx, dweight, dbias, dloss NULL (all four): computes only the loss, as in evaluation.
 * smoothing as above.
 * x (R,D)   weight (V,D)   bias (V)   labels (R) int32 in [0,V) or = ignore   loss (1)   valid (1) int32
 */
PYOPS_API pyops_status pyops_linear_cross_entropy(
    float *loss, int32_t *valid, pyops_real *dx, float *dweight, float *dbias,
    const float *dloss, const pyops_real *x, const pyops_real *weight, const float *bias, const int32_t *labels,
    float *work,
    int64_t R, int64_t D, int64_t V, int32_t ignore, float smoothing, int32_t tf32, void *stream);
PYOPS_API int64_t pyops_linear_cross_entropy_work(              /* is_bf16: whether x is bfloat16 */
    int64_t R, int64_t D, int64_t V, int32_t gradients, int32_t is_bf16, int32_t tf32);

/* ---- argmax of the output layer ------------------------------------------------------
 * index[r] = the first v with the largest logits[r,v], logits = x weight' + bias; NaN is largest.
 * prepared, from linear_argmax_prepare for this weight and bias, rules out most v without computing their logits; the result
 * is the same.  NULL: all logits are computed.  A GPU computes all, writes them to `work`, and does not read prepared.
 * x (R,D)   weight (V,D)   bias (V)   index (R) int32   prepared: pyops_linear_argmax_prepare_work(D, V) floats
 */
PYOPS_API pyops_status pyops_linear_argmax_prepare(
    float *prepared, const float *weight, const float *bias, int64_t D, int64_t V, void *stream);
PYOPS_API int64_t pyops_linear_argmax_prepare_work(int64_t D, int64_t V);
PYOPS_API pyops_status pyops_linear_argmax(
    int32_t *index, const float *x, const float *weight, const float *bias, const float *prepared,
    float *work, int64_t R, int64_t D, int64_t V, void *stream);
PYOPS_API int64_t pyops_linear_argmax_work(int64_t R, int64_t D, int64_t V);

/* ---- the most likely classes, for beam search ----------------------------------------
 * log_softmax_topk  index[r,:] = the k columns with the largest x[r,c], the largest first; of equal ones the first
 *                   column first; NaN is largest
 *                   logp[r,j] = x[r,c] - max - log(sum over c of exp(x[r,c] - max)) for c = index[r,j];
 *                   NaN in a row with NaN or +infinity
 * linear_topk       the same for the logits x weight' + bias of the output layer; a GPU writes them to `work`
 * log_softmax_topk: x (R,C)   index, logp (R,k)   1 <= k <= PYOPS_TOPK, k <= C
 * linear_topk: x (R,D)   weight (V,D)   bias (V)   index, logp (R,k)   k <= V
 */
#define PYOPS_TOPK 32
PYOPS_API pyops_status pyops_log_softmax_topk(
    int32_t *index, float *logp, const float *x, int64_t R, int64_t C, int64_t k, void *stream);
PYOPS_API pyops_status pyops_linear_topk(
    int32_t *index, float *logp, const float *x, const float *weight, const float *bias,
    float *work, int64_t R, int64_t D, int64_t V, int64_t k, void *stream);
PYOPS_API int64_t pyops_linear_topk_work(int64_t R, int64_t D, int64_t V, int64_t k);

/* ---- compact weights: a linear layer in int8, bfloat16 or packed float32, for inference.  CPU library only -----------
 * compact_weight     pack weight and bias, once; the functions below read `compact`.  bias NULL: zeros
 * compact_linear     y[r,o] = sum_i x[r,i] weight[o,i] + bias[o];  accumulate: plus y[r,o];  relu: then max(y, 0)
 * compact_embedding  y[r,:] = weight[ids[r],:], as it is packed
 * compact_topk       linear_topk of the logits of compact_linear.  logp NULL: the indices only
 * INT8: a row w of weight becomes integers q = rint(w (127 / max |w|)), ties to even, with the scale s = max |w| / 127; a row of x
 * likewise in each call.  y = float(sum of q_x q_w) (s_x s_w) + bias, rounded after each operation.  The sum is exact, so the
 * bits do not depend on the instruction set.  A row with NaN or infinity gives NaN; one without |w| >= 1e-30 gives 0.
 * BF16: weight and x are rounded to bfloat16, to nearest, ties to even; sums are float32.
 * FLOAT32: nothing is rounded.  pyops_gemm returns the same bits, but packs the weight in each call.  With AMX the layout of
 * `compact` depends on pyops_set_exact.
 * x (R,I)   weight (O,I)   bias (O)   y (R,O)   ids (R) int32 in [0,O)   compact_embedding: y (R,I)
 * compact_topk: index, logp (R,k), 1 <= k <= PYOPS_TOPK, k <= O   INT8: I <= 131072
 */
typedef enum { PYOPS_COMPACT_INT8 = 0, PYOPS_COMPACT_BF16, PYOPS_COMPACT_FLOAT32 } pyops_compact_format;
PYOPS_API pyops_status pyops_compact_weight(
    float *compact, const float *weight, const float *bias, int64_t O, int64_t I, int32_t format, void *stream);
PYOPS_API int64_t pyops_compact_weight_work(int64_t O, int64_t I, int32_t format);          /* the floats of `compact` */
PYOPS_API pyops_status pyops_compact_linear(
    float *y, const float *x, const float *compact, float *work,
    int64_t R, int64_t O, int64_t I, int32_t format, int32_t accumulate, int32_t relu, void *stream);
PYOPS_API int64_t pyops_compact_linear_work(int64_t R, int64_t I, int32_t format);
PYOPS_API pyops_status pyops_compact_embedding(
    float *y, const float *compact, const int32_t *ids, int64_t R, int64_t O, int64_t I, int32_t format, void *stream);
PYOPS_API pyops_status pyops_compact_topk(
    int32_t *index, float *logp, const float *x, const float *compact, float *work,
    int64_t R, int64_t O, int64_t I, int64_t k, int32_t format, void *stream);
PYOPS_API int64_t pyops_compact_topk_work(int64_t R, int64_t O, int64_t I, int64_t k, int32_t format);

/* ---- a network of two linear layers on pixels: loss and all gradients in one operation ---------------------------
 * a = scale * table[rows] w1 + b1;  r = max(a, 0);  logits = r w2' + b2;  loss[0] = mean over b of the softmax cross
 * entropy of logits[b,:] with labels[rows[b]].   The gradients for dloss = 1 OVERWRITE dw1, db1, dw2, db2.
 * table (N,I) uint8   rows (B) int64 in [0,N)   labels (N) int32 in [0,C)   w1, dw1 (I,H)   w2, dw2 (C,H)   loss (1)
 * B >= 1, I < 65536, H and C from 1 to 128.
 */
PYOPS_API pyops_status pyops_mlp_gradients(
    float *loss, float *dw1, float *db1, float *dw2, float *db2,
    const uint8_t *table, const int64_t *rows, const int32_t *labels,
    const float *w1, const float *b1, const float *w2, const float *b2,
    float *work,
    int64_t N, int64_t B, int64_t I, int64_t H, int64_t C, float scale, void *stream);
PYOPS_API int64_t pyops_mlp_gradients_work(int64_t B, int64_t I, int64_t H, int64_t C);
/* K >= 1 training steps of that network, each with its own batch: mlp_gradients, grad_norm of the four gradients, increment of
 * step, adam.
 * rows (K,B)   loss (K): of each step   norm (1): of the last step   norms (K) or NULL: of each step
 * param, grad, m and v are flat buffers; w1, b1, w2 and b2 are the offsets of the parameters in them, in floats; floats between
 * the four are unchanged.   grad is overwritten;  step[0] += K;  param, m and v are updated as by adam, with its clipping.
 * norm NULL: the norm is not computed, norms is not written, and nothing is clipped.
 * If a row or label of a step does not exist, or step[0] < 0, then this step and those after it leave param, m, v and step
 * unchanged.  On a GPU the host gets the error later; until then the calls that follow do not change them either.
 */
PYOPS_API pyops_status pyops_mlp_step(
    float *loss, float *norm, float *norms, int64_t *step, float *param, float *grad, float *m, float *v,
    const uint8_t *table, const int64_t *rows, const int32_t *labels, const float *lr,
    float *work,
    int64_t N, int64_t K, int64_t B, int64_t I, int64_t H, int64_t C, int64_t w1, int64_t b1, int64_t w2, int64_t b2,
    float scale, float max_norm, float beta1, float beta2, float eps, float weight_decay, void *stream);
PYOPS_API int64_t pyops_mlp_step_work(int64_t B, int64_t I, int64_t H, int64_t C);

/* ---- logging and learning rate of a training run, without synchronising with the device ------------------------
 * log_step             for each k < steps:  log[(written[0] + k) mod capacity, :] = loss[k], valid[k] (0 if NULL), norm[k] (0 if
 *                      NULL);   then written[0] += steps.   log (capacity,3)   written (1) int64   steps from 1 to capacity
 * inverse_square_root  lr[0] = base * min(t / warmup, sqrt(warmup / t)),  t = step[0] + 1: the rate of the next step;
 *                      computed in double; warmup 0: base.   lr (1)   step (1) int64   Vaswani et al. 2017, section 5.3
 * decaying_rate        with s = step[0], the steps done:  lr[0] = base * (s + 1) / warmup while s < warmup;  base while s < hold;
 *                      then base * (final + (1 - final) * f(x)),  x = (s - hold) / (total - hold), 1 from s = total on;
 *                      f(x) = (1 + cos(pi x)) / 2 (COSINE) or 1 - x (LINEAR); computed in double
 */
typedef enum { PYOPS_DECAY_COSINE = 0, PYOPS_DECAY_LINEAR } pyops_decay;
PYOPS_API pyops_status pyops_log_step(
    float *log, int64_t *written, const float *loss, const int32_t *valid, const float *norm, int64_t steps, int64_t capacity,
    void *stream);
PYOPS_API pyops_status pyops_inverse_square_root(
    float *lr, const int64_t *step, int64_t warmup, float base, void *stream);
PYOPS_API pyops_status pyops_decaying_rate(
    float *lr, const int64_t *step, int64_t warmup, int64_t hold, int64_t total, float base, float final, int32_t decay,
    void *stream);

/* ---- number formats: rounding float32 to narrow formats ------------------------------------------------------------
 * x and y are (outer,n,inner): an array of any shape, with axis n in the middle.  block > 0: each block of that many
 * neighbours along n (the last one may be shorter) has a scale 2^s, which encode divides by and decode multiplies with;
 * block 0: no scales.  block is at most PYOPS_LONGEST_BLOCK.
 * fake_quantize  y = x rounded to the format and converted back: a value of the format times the scale of its block
 * encode         codes: the bits of each number in the format, in the low bits;  scales (outer, blocks, inner): s + 127, or 255
 *                for a block with an infinity or NaN: all of it decodes to NaN;  a NaN that the format cannot store becomes 0
 * decode         y from codes and scales.   In fake_quantize y may be x.
 * amax_factor    factor[0] = target / max |x|;  1 if that is not a finite number above 0
 * delayed_factor factor[0] = target / max of history (length), max |x| instead if that is 0;  1 as above.   amax[0] = max(amax[0],
 *                max |x|) if max |x| is finite.   history: the amax of past steps, 0 for none;  amax: of this step so far
 * advance_amax   at the end of a step, for each row r of history (rows,length): history[r,i] = history[r,i-1], history[r,0] =
 *                amax[r], amax[r] = 0.   amax (rows)
 * factor (1) or NULL: x is multiplied by it first, and y divided by it.   step (1) int64: read only for stochastic rounding,
 * which adds bits of word (i mod 4) of Philox4x32-10(counter, key) to the discarded bits; counter = (i / 4, step[0]) as in
 * pyops_dropout, i is the index of the number in x.
 * rounding HYBRID, only for HIFP8: AWAY for exponents from -3 to 3; otherwise upwards if the first 14 discarded bits are not
 * less than the last 14 bits of the fraction.
 * saturate 1: a finite number that is too large becomes the largest of the format; 0: it becomes infinity, NaN in a format
 * without infinity (E4M3), the largest number in a format with neither (E2M1).   An infinity stays infinite or becomes NaN.
 * rule: s = floor(log2 amax) - emax (FLOOR), ceil(log2 (amax / largest)) (RCEIL), ceil(log2 amax) - emax (CEIL), floor(log2
 * (amax rounded to the format's digits, half up)) - emax (EVEN); plus shift, clamped to -127..127.   flush 1: a block with
 * amax below 2^-126 becomes zeros.
 * csrc/number_format.inc has the arithmetic and the sources.
 */
typedef enum {
    PYOPS_HIFP8 = 0, PYOPS_E4M3, PYOPS_E5M2, PYOPS_E2M1, PYOPS_BF16, PYOPS_FP16, PYOPS_E3M2, PYOPS_E2M3, PYOPS_MXINT8,
    PYOPS_INT8, PYOPS_INT4
} pyops_number_format;
typedef enum {
    PYOPS_ROUND_EVEN = 0, PYOPS_ROUND_AWAY, PYOPS_ROUND_DOWN, PYOPS_ROUND_STOCHASTIC, PYOPS_ROUND_HYBRID
} pyops_rounding;       /* EVEN, AWAY: to nearest, ties to even or away from 0;  DOWN: towards 0 */
typedef enum {
    PYOPS_SCALE_FLOOR = 0, PYOPS_SCALE_RCEIL, PYOPS_SCALE_CEIL, PYOPS_SCALE_EVEN, PYOPS_SCALE_FLOAT, PYOPS_SCALE_E4M3,
    PYOPS_SCALE_E4M3_MSE, PYOPS_SCALE_E4M3_MAE
} pyops_scale_rule;
enum { PYOPS_LONGEST_BLOCK = 4096 };

PYOPS_API pyops_status pyops_fake_quantize(
    float *y, const float *x, const float *factor, const int64_t *step,
    int64_t outer, int64_t n, int64_t inner, int64_t block,
    int32_t format, int32_t rounding, int32_t saturate, int32_t rule, int32_t shift, int32_t flush,
    uint64_t key, void *stream);
PYOPS_API pyops_status pyops_encode(
    uint16_t *codes, uint8_t *scales, const float *x, const float *factor, const int64_t *step,
    int64_t outer, int64_t n, int64_t inner, int64_t block,
    int32_t format, int32_t rounding, int32_t saturate, int32_t rule, int32_t shift, int32_t flush,
    uint64_t key, void *stream);
PYOPS_API pyops_status pyops_decode(
    float *y, const uint16_t *codes, const uint8_t *scales, const float *factor,
    int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t format, void *stream);
PYOPS_API pyops_status pyops_amax_factor(float *factor, const float *x, int64_t n, float target, void *stream);
PYOPS_API pyops_status pyops_delayed_factor(
    float *factor, float *amax, const float *history, const float *x, int64_t n, int64_t length, float target, void *stream);
PYOPS_API pyops_status pyops_advance_amax(float *history, float *amax, int64_t rows, int64_t length, void *stream);

/* ---- number formats with a float as the scale of each block, in one or two dimensions ----
 * x, y and codes are (outer,rows,columns) in blocks of block_rows by block_columns, which may be smaller at the edges.
 * scaled_quantize  scales (outer, blocks down, blocks across): by the rules of fake_quantize, or with a = max |x| of the block
 *                  FLOAT: max(a / largest, 2^-126), 1 for a = 0;   E4M3: a / largest * factor[0], rounded to E4M3;
 *                  E4M3_MSE, E4M3_MAE, only for E2M1: this, or a / 4 * factor[0] rounded to E4M3 if the squares or the
 *                  magnitudes of the errors of the block, rounded to even, then have a smaller sum (Four Over Six,
 *                  arXiv:2512.02010).   The sum: in double, of the numbers i = p, p + 256, ... of the block for each p < 256
 *                  in order, then of these sums in order; an error y - x is rounded to float
 *                  y = t * (x / t rounded to the format), t the scale, for E4M3 divided by factor[0];   for t = 0: 0.   codes:
 *                  as by encode; either y or codes may be NULL, and y may be x.   A block with an infinity or NaN becomes NaN
 * scaled_decode    y from codes and scales
 * factor (1), only for E4M3 and its variants, else NULL.   step, rounding, shift, flush, key: as for fake_quantize; numbers saturate.
 */
PYOPS_API pyops_status pyops_scaled_quantize(
    float *y, uint16_t *codes, float *scales, const float *x, const float *factor, const int64_t *step,
    int64_t outer, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns,
    int32_t format, int32_t rounding, int32_t rule, int32_t shift, int32_t flush, uint64_t key, void *stream);
PYOPS_API pyops_status pyops_scaled_decode(
    float *y, const uint16_t *codes, const float *scales, const float *factor,
    int64_t outer, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns, int32_t format, void *stream);

/* ---- products of matrices in FP8: E4M3 or E5M2, with scales --------------------------------------------------------------
 * The codes of a matrix (R,C) are (R,ld), a byte each, ld a multiple of 16 of at least C, 0 for the least one; bytes from C on are
 * neither written nor read.  C is the axis that a product sums over.  Its scales, at the edges of smaller blocks:
 *   TENSOR   (1): one for the matrix
 *   ROWS     (ceil(C / 128), R): one for each block of 128 adjacent elements of a row
 *   SQUARES  (ceil(C / 128), ceil(R / 128)): one for each block of 128 rows by 128 columns
 * fp8_encode  codes (R,ld) and scales of x (R,C), and of its transpose: transposed (C,transposed_ld), transposed_scales.  The
 *             codes and scales equal scaled_quantize with the rule FLOAT and the rounding EVEN in these blocks, so they
 *             decode to the numbers of fake quantization.  With ROWS both matrices have blocks along their own rows.
 *             codes with scales, or transposed with transposed_scales, may be NULL.   x: rows ldx apart
 * gemm_fp8    c[m,n] (+)= sum_k a[m,k] b[n,k] + bias[n] of the decoded numbers, then relu as in pyops_gemm.   a: codes (M,lda) of
 *             (M,K);  b: codes (N,ldb) of (N,K);  c (M,N), rows ldc apart;  bias (N) or NULL
 *             For each 128 k's the codes' numbers are multiplied and summed in float32 (tensor cores keep some 14 bits); this sum
 *             is multiplied by the product of the scales of a and b, and added to one in float32.  Scales of TENSOR are
 *             multiplied once, at the end.   a and b are aligned to 16 bytes.   In the CUDA library: on compute capability 9.0
 */
typedef enum { PYOPS_FP8_TENSOR = 0, PYOPS_FP8_ROWS, PYOPS_FP8_SQUARES } pyops_fp8_scales;
enum { PYOPS_FP8_BLOCK = 128 };

PYOPS_API pyops_status pyops_fp8_encode(
    uint8_t *codes, uint8_t *transposed, float *scales, float *transposed_scales, const pyops_real *x,
    int64_t R, int64_t C, int64_t ldx, int64_t ld, int64_t transposed_ld, int32_t format, int32_t blocks, void *stream);
PYOPS_API pyops_status pyops_gemm_fp8(
    pyops_real *c, const uint8_t *a, const uint8_t *b, const float *a_scales, const float *b_scales, const float *bias,
    int64_t M, int64_t N, int64_t K, int64_t ldc, int64_t lda, int64_t ldb,
    int32_t a_format, int32_t b_format, int32_t a_blocks, int32_t b_blocks, int32_t accumulate, int32_t relu, void *stream);

/* ---- what a saved tensor contains.  CPU library only ----
 * describe  counts (4): numbers, NaN, infinities, zeros;  of the finite numbers: sums (3): sum, sum of magnitudes, sum of
 *           squares, in double;  range (2): least, greatest, infinity and -infinity without finite numbers
 * x (rows,columns).   valid (rows) or NULL: the numbers of rows with 0 are left out.   copy (rows,columns) or NULL: = x, all of
 * it.   The sums have the same bits for any number of threads.
 */
PYOPS_API pyops_status pyops_describe(
    int64_t *counts, double *sums, float *range, float *copy, const float *x, const uint8_t *valid,
    int64_t rows, int64_t columns, void *stream);

/* ---- errors of rounded numbers.  CPU library only ----
 * x, q (outer,n,inner), q = x rounded, in blocks of `block` neighbours along n, the last of which may be shorter.
 * sums (PYOPS_ERROR_SUMS,outer,blocks,inner): of the numbers of each block
 *   0 pairs       finite x whose q is finite, or is lost: infinite in a block with a scale
 *   1 finite      finite x                         2 overflow    finite x whose q is lost
 *   3 nonzero     finite x != 0                    4 underflow   of these: q = 0
 *   5 saturated   finite |x| > largest * scale
 *   6 x^2    7 q^2    8 x q    9 (q - x)^2         of pairs; of a lost q as if q = x, but with an infinite sum of squares
 *   10 max |x|    11 max |q - x|                   of pairs; infinite if a q is lost
 * counts (5): NaN and infinities in x, finite x whose q is NaN by its scale, |x| < smallest * scale of nonzero x, pairs with x != 0
 * relative (1): the sum of |q - x| / |x| of pairs with x != 0
 * scales (outer,blocks,inner), or each (outer,n,inner), or NULL, NULL: 1.   valid (outer,n,inner) or NULL: where it is 0, a number
 * is left out.   All sums are in double, and have the same bits for any number of threads.
 */
enum { PYOPS_ERROR_SUMS = 12 };
PYOPS_API pyops_status pyops_error_sums(
    double *sums, int64_t *counts, double *relative, const float *x, const float *q, const double *scales, const float *each,
    const uint8_t *valid, int64_t outer, int64_t n, int64_t inner, int64_t block, double smallest, double largest, void *stream);

/* ---- counts and maps of a tensor's numbers.  CPU library only ----
 * bin_counts      counts (bins) of the finite x (n) in equal bins from low to high; outside, in the outermost bin.   Bin of x:
 *                 (x - low) * (bins / (high - low)) in double, without its fraction.   q (n) or NULL: only where q is finite, too
 * octave_counts   counts (PYOPS_HALF_OCTAVES) of the finite x (outer,n,inner) other than 0, at floor(2 log2 |x|) - 2 scale -
 *                 PYOPS_LEAST_OCTAVE.   scales (outer,blocks,inner), from -127 to 127, of blocks of `block` neighbours along n, or
 *                 NULL: 0.   each (outer,n,inner) or NULL: the octave of x / each, unless it is 0 or NaN; that of the largest
 *                 number if it is infinite
 * patch_extremes  cells (rows / patch_rows, columns / patch_columns; rounded up): the number of largest magnitude of each patch of
 *                 x (rows,columns), the positive one of two; infinity if any is not finite, NaN if all are left out.
 *                 minus (rows,columns) or NULL: of x - minus
 * valid, in the shape of x, or NULL: where it is 0, a number is left out.
 */
enum { PYOPS_MOST_BINS = 256, PYOPS_LEAST_OCTAVE = -552, PYOPS_HALF_OCTAVES = 1062 };
PYOPS_API pyops_status pyops_bin_counts(
    int64_t *counts, const float *x, const float *q, const uint8_t *valid, int64_t n, int64_t bins, double low, double high,
    void *stream);
PYOPS_API pyops_status pyops_octave_counts(
    int64_t *counts, const float *x, const int32_t *scales, const float *each, const uint8_t *valid,
    int64_t outer, int64_t n, int64_t inner, int64_t block, void *stream);
PYOPS_API pyops_status pyops_patch_extremes(
    float *cells, const float *x, const float *minus, const uint8_t *valid, int64_t rows, int64_t columns,
    int64_t patch_rows, int64_t patch_columns, void *stream);

/* ---- Hadamard transform in blocks, with random signs ----
 * x and y are (outer,n,inner) in blocks of `block` neighbours along n, a power of two up to PYOPS_LONGEST_HADAMARD.  The rest of
 * n after the last whole block is cut into powers of two, the largest first.  A block or a piece v of L numbers becomes
 *   inverse 0   H (s v)                        H[i][j] = (-1)^(number of bits set in i & j) / sqrt(L), which is its own inverse
 *   inverse 1   s (H v), which undoes it       s[i] = -1 if bit 31 of word (p mod 4) of Philox4x32-10(counter, key) is set, with
 *                                              counter = (p / 4, 0) and p the position of the number in its block; else 1
 * The sum is a butterfly over distances 1, 2, 4, ..., in float32.   y may be x.
 */
enum { PYOPS_LONGEST_HADAMARD = 32 };
PYOPS_API pyops_status pyops_hadamard(
    float *y, const float *x, int64_t outer, int64_t n, int64_t inner, int64_t block, int32_t inverse, uint64_t key,
    void *stream);

/* ---- sparse gradients ----------------------------------------------------------------------
 * A batch looks up only some rows of an embedding; the gradient of the others stays 0 and need not be read.  So a buffer of
 * gradients (n) may come with touched (n / PYOPS_GRAD_BLOCK rounded up) int32, one word for each block of floats:
 *   0              nothing was added to the block since it was zeroed: it holds zeros
 *   PYOPS_TOUCHED  something may have been added
 *   PYOPS_DENSE    additions are not tracked; a separate bit, which is never cleared
 * A kernel that adds to blocks that are not dense must mark them.  touched NULL, here and below: all blocks are dense.
 * zero_touched  grad[i] = 0 in the blocks whose word is not 0, so all of grad is 0;  clears PYOPS_TOUCHED in the words
 */
enum { PYOPS_GRAD_BLOCK = 256, PYOPS_TOUCHED = 1, PYOPS_DENSE = 2, PYOPS_NORM_CHUNK = 16384 };

PYOPS_API pyops_status pyops_zero_touched(float *grad, int32_t *touched, int64_t n, void *stream);

/* ---- optimiser: one call for all parameters, stored in one buffer ---------------------------
 * grad_norm  norm[0] = sqrt(sum_i grad[i]^2), summed in double over fixed chunks;  work: pyops_grad_norm_work(n).  It begins,
 *            at a multiple of 8 bytes, with the sum of squares of each chunk, a double.  PYOPS_NORM_CHUNK floats are whole chunks
 * norm_of_chunks  the end of grad_norm alone: norm[0] from the sums of all chunks of n floats, which are in work.  So ranks that
 *            have the sums of whole chunks each can compute the norm together
 * grad_norm_logged  grad_norm, increment of step, and log_step of one step with that norm, in one launch on a GPU
 * clip       grad[i] *= min(1, max_norm / norm[0])
 * adam       g = grad[i] * min(1, max_norm / norm[0]) + weight_decay param[i]     (norm NULL: not clipped; grad is unchanged)
 *            m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
 *            param -= lr[0] * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),   t = step[0] >= 1
 *            decoupled: g without weight_decay, and first param *= 1 - lr[0] * weight_decay (Loshchilov and Hutter 2017,
 *            arXiv:1711.05101)
 * sgd        g as above;   velocity = momentum velocity + d g     (velocity NULL: as with momentum 0)
 *            d = 1 - dampening, in the first step 1;   param -= lr[0] * (nesterov ? g + momentum velocity : velocity)
 * ema        average += (1 - d) (param - average),   d = min(decay, (1 + t) / (10 + t)),  t = step[0]: an exponential moving
 *            average of the parameters, over fewer steps at first, when they change fast
 * m, v and velocity are 0 in place of denormal numbers, to which they decay without gradients, and which slow down many CPUs.
 * touched: NULL, or marks the blocks of grad that must be read; the others are 0.  The results have the same bits.
 * norm (1)   lr (1)   step (1) int64.   Kingma and Ba 2014, arXiv:1412.6980, algorithm 1.
 */
PYOPS_API pyops_status pyops_grad_norm(
    float *norm, const float *grad, const int32_t *touched, float *work, int64_t n, void *stream);
PYOPS_API int64_t pyops_grad_norm_work(int64_t n);
PYOPS_API pyops_status pyops_grad_norm_logged(
    float *norm, int64_t *step, float *log, int64_t *written,
    const float *grad, const int32_t *touched, const float *loss, const int32_t *valid,
    float *work, int64_t n, int64_t capacity, void *stream);
PYOPS_API pyops_status pyops_norm_of_chunks(float *norm, const float *work, int64_t n, void *stream);
PYOPS_API pyops_status pyops_clip(float *grad, const float *norm, int64_t n, float max_norm, void *stream);
PYOPS_API pyops_status pyops_adam(
    float *param, float *m, float *v,
    const float *grad, const int32_t *touched, const float *norm, const int64_t *step, const float *lr,
    int64_t n, float max_norm, float beta1, float beta2, float eps, float weight_decay, int32_t decoupled, void *stream);
PYOPS_API pyops_status pyops_sgd(
    float *param, float *velocity,
    const float *grad, const float *norm, const int64_t *step, const float *lr,
    int64_t n, float max_norm, float momentum, float dampening, float weight_decay, int32_t nesterov, void *stream);
PYOPS_API pyops_status pyops_ema(
    float *average, const float *param, const int64_t *step, int64_t n, float decay, void *stream);

/* ---- Muon: orthogonalised momentum for matrices of one shape -----------------------------------------
 * `count` matrices of n floats each: matrix b starts at offsets[b] in param, m and grad; x (count,n) is without gaps.
 * muon_momentum    g = grad * min(1, max_norm / norm[0])     (norm NULL: not clipped; grad is unchanged)
 *                  m = momentum m + (1 - momentum) g;   u = nesterov ? momentum m + (1 - momentum) g : m
 *                  x[b] = u / max(|u|, 1e-7),   |u| the square root of the sum of squares, summed in double
 * muon_polynomial  p = c1 I + c2 a + c3 p      a, p (count,n,n)
 * muon_update      param = (1 - lr[0] * weight_decay) param - lr[0] * scale * x
 * In between, x becomes nearly orthogonal by iterations p = a a', then muon_polynomial, then x = p x, with a = x x' (or a = x' x
 * and x = x p if that is smaller).   offsets (count) int64   norm, lr (1)   count < 65536
 * Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
 */
PYOPS_API pyops_status pyops_muon_momentum(
    float *x, float *m, const float *grad, const float *norm, const int64_t *offsets, float *work,
    int64_t count, int64_t n, float max_norm, float momentum, int32_t nesterov, void *stream);
PYOPS_API int64_t pyops_muon_momentum_work(int64_t count, int64_t n);
PYOPS_API pyops_status pyops_muon_polynomial(
    float *p, const float *a, int64_t count, int64_t n, float c1, float c2, float c3, void *stream);
PYOPS_API pyops_status pyops_muon_update(
    float *param, const float *x, const int64_t *offsets, const float *lr,
    int64_t count, int64_t n, float scale, float weight_decay, void *stream);

#ifdef __cplusplus
}
#endif
#endif
