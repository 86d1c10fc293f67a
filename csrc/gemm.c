/* gemm.c - matrix products: blocked for three levels of cache, threads share the result.
 *
 * The loops of BLIS (Van Zee and van de Geijn 2015, doi:10.1145/2764454) around the tile of kernels/gemm_body.inc:
 * columns by NC, K by KC, rows by MC, then tiles.  b is packed; a is read in place, and packed only where that would be
 * slow.  Each thread owns a rectangle of c and packs its own operands, so threads never wait for each other; the rectangles
 * are chosen to pack little twice, and follow the speeds of the threads.  The order of every sum is independent of the
 * rectangle: blocks of KC, and term by term in a block.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

static float relu(float x) { return x < 0.0f ? 0.0f : x; }       /* NaN stays */

/* Further flags: partial sums of a block of c are read from or written to `sums` instead of c. */
enum { FROM_SUMS = 4, TO_SUMS = 8 };

/* The largest tile of any instruction set: AMX has several tiles one below the other. */
enum { MOST_MR = 128, MOST_NR = 32 };

/* A part of an operand (rows,columns) that will be packed soon.  None if its strides are not those of a matrix. */
static pyops_lines lines_of(pyops_view a, int64_t rows, int64_t columns) {
    enum { LINE = 16 };
    const int64_t of_row = (columns + LINE - 1) / LINE, of_column = (rows + LINE - 1) / LINE;
    if (a.col == 1) return (pyops_lines){a.p, rows * of_row, of_row, a.row};
    return a.row == 1 ? (pyops_lines){a.p, columns * of_column, of_column, a.col} : (pyops_lines){0};
}

/* Part number `part` of `parts`: whole runs. */
static pyops_lines part_of_lines(pyops_lines all, int64_t part, int64_t parts) {
    if (!all.lines) return all;
    const int64_t runs = all.lines / all.run, share = (runs + parts - 1) / parts, first = pyops_min(part * share, runs);
    return (pyops_lines){all.at + first * all.far, pyops_min(share, runs - first) * all.run, all.run, all.far};
}

/* c (mc,nc) = a (mc,kc) x packed b (kc,nc), tile by tile.  `t` holds the fields common to all tiles, with a and b at their
 * start and kc in steps.  Partial sums of unfinished tiles go to `sums`, stored tile after tile to avoid TLB misses and
 * cache-set conflicts.  Tiles at the edge of c go through a buffer. */
static void block(const pyops_kernels *k, float *c, int64_t ldc, float *sums, pyops_tile t, int is_packed, const float *bias,
                  int64_t mc, int64_t nc, int flags, pyops_lines next_a, pyops_lines next_b) {
    const int64_t NR = k->NR, kc = t.K, tiles = (mc + k->MR - 1) / k->MR;
    /* Rows of a tile.  A packed a has panels of MR rows; otherwise tiles are about equally high, because few rows have too few
     * sums to hide the latency of one: 16 rows are 8 and 8, not 14 and 2. */
    const int64_t MR = is_packed ? k->MR : (mc + tiles - 1) / tiles;
    const int64_t panel = MR * (is_packed ? kc * k->micro.a_step : t.a_row); /* of a */
    const float *const a = t.a, *const b = t.b;
    /* floats of the next panel of b that a tile prefetches, in all and per step of K */
    const int64_t share = NR * kc / tiles, far = (share + kc - 1) / kc;
    float edge[MOST_MR * MOST_NR], edge_bias[MOST_NR];
    t.relu = flags & PYOPS_RELU;
    if (k->micro.begin) k->micro.begin();
    for (int64_t j = 0; j < nc; j += NR) {
        const int64_t n = pyops_min(NR, nc - j), ld = n < NR ? NR : ldc;
        t.b = b + j * kc;
        t.is_half = 2 * n <= NR;
        t.bias = bias ? bias + j : NULL;
        if (bias && n < NR) {
            for (int64_t l = 0; l < NR; l++) edge_bias[l] = l < n ? bias[j + l] : 0.0f;
            t.bias = edge_bias;
        }
        t.ldc = flags & TO_SUMS ? NR : ld;
        t.ld_before = flags & FROM_SUMS ? NR : ld;
        for (int64_t i = 0; i < mc; i += MR, sums += MR * NR) {
            float *const c_ij = c + i * ldc + j, *const at = n < NR ? edge : c_ij;
            t.c = flags & TO_SUMS ? sums : at;
            t.before = flags & FROM_SUMS ? sums : flags & PYOPS_ADD ? at : NULL;
            t.a = a + i / MR * panel;
            t.rows = pyops_min(MR, mc - i);
            if (k->micro.is_split) {
                const int64_t tile = j / NR * tiles + i / MR, all = (nc + NR - 1) / NR * tiles;
                t.ahead[0] = part_of_lines(next_a, tile, all), t.ahead[1] = part_of_lines(next_b, tile, all);
            } else if (!j && !is_packed) { /* prefetch the next rows of a, which may be far apart */
                t.next = t.a + panel + (t.a_row == 1 ? MR - 1 : 0);
                t.far = t.a_row == 1 ? t.a_col : PYOPS_RUN;
                t.jump = t.a_row == 1 ? 0 : t.a_row - PYOPS_RUN * PYOPS_RUN;
            } else {
                t.next = b + (j + NR) * kc + i / MR * share;
                t.far = far, t.jump = 0;
            }
            if (t.before == edge)
                for (int64_t r = 0; r < t.rows; r++)
                    for (int64_t s = 0; s < NR; s++) edge[r * NR + s] = s < n ? c_ij[r * ldc + s] : 0.0f;
            k->micro.gemm(&t);
            if (t.c == edge)
                for (int64_t r = 0; r < t.rows; r++) memcpy(c_ij + r * ldc, edge + r * NR, (size_t)n * sizeof *c);
        }
    }
    if (k->micro.end) k->micro.end();
}

/* Columns of a block of c whose partial sums are kept. */
#define SUMS PYOPS_TUNED(gemm_sums, 512, 32, 512, 32)

/* Floats of a packed block of a. */
static int64_t block_of_a(const pyops_kernels *k) { return k->MC * pyops_max(k->KC, pyops_steps(k, k->KC)); }
static int64_t scratch_of(const pyops_kernels *k) { return k->B + block_of_a(k) + k->MC * SUMS; }

size_t pyops_product_scratch(const pyops_kernels *k) {
    return (size_t)pyops_max(scratch_of(k), scratch_of(pyops_for_product(k, INT32_MAX, INT32_MAX)));
}

/* K = 0: only the bias remains. */
static void bias_only(float *c, int64_t ldc, const float *bias, int64_t M, int64_t N, int flags) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            const float sum = (bias ? bias[n] : 0.0f) + (flags & PYOPS_ADD ? c[m * ldc + n] : 0.0f);
            c[m * ldc + n] = flags & PYOPS_RELU ? relu(sum) : sum;
        }
}

/* ---- products that do not repay packing: few rows, which use a packed b only once or twice, and small ones.  Factors that are
 * rounded or split are always packed: that costs as much as packing. ---- */
#define SMALL PYOPS_TUNED(gemm_small, 32768, 0, 1 << 20, 1) /* multiply-adds */

static int is_few(pyops_view a, pyops_view b, int64_t M) { return M <= PYOPS_FEW_ROWS && a.col == 1 && b.row == 1; }

/* The rows of b are contiguous and there is no bias: nothing is packed. */
static void unpacked(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, int64_t M, int64_t N, int64_t K,
                     int flags) {
    k->direct(c, a.p, b.p, M, N, K, ldc, a.row, a.col, b.row, flags & PYOPS_ADD);
    if (flags & PYOPS_RELU) bias_only(c, ldc, NULL, M, N, flags | PYOPS_ADD);
}

/* Whether a is float32 and reading it in place is as fast as reading a packed copy.  Its rows (contiguous along K) must not
 * all map to the same 8-way L1 set. */
static int is_fast_in_place(const pyops_kernels *k, pyops_view a) {
    if (k->micro.is_bf16 || k->micro.is_split || PYOPS_TUNED(gemm_packs_a, 0, 0, 1, 1)) return 0;
    return a.row == 1 ? k->any_col : a.col == 1 && (k->MR <= 8 || a.row % 1024);
}

static int64_t blocks_of(const pyops_kernels *k, int64_t K) { return (K + k->KC - 1) / k->KC; }

/* Rows of c in the outer loop, blocks of K in the inner: partial sums of a block of c stay in L2, and c is written once.
 * parts: blocks of KC in a row of a packed a.   next_b: what the caller packs next */
static void product_packed(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, const float *packed_b,
                           const float *bias, int64_t M, int64_t N, int64_t K, int64_t from, int64_t to, int flags,
                           float *scratch, int64_t parts, pyops_lines next_b) {
    const int64_t padded = pyops_round_up(N, k->NR);
    const int is_packed = a.col == PYOPS_PACKED;
    const int packs = is_packed || !is_fast_in_place(k, a);
    const int along = is_packed ? a.row == 1 : a.col == 1; /* whether rows of a were contiguous before it was packed */
    float *packed_a = scratch, *sums = scratch + block_of_a(k);
    if (!K) bias_only(c + from, ldc, bias ? bias + from : NULL, M, to - from, flags);
    for (int64_t ic = 0; ic < M; ic += k->MC)
        for (int64_t jc = from; jc < to; jc += (K > k->KC ? SUMS : to - from))
            for (int64_t pc = 0; pc < K; pc += k->KC) {
                const int64_t mc = pyops_min(k->MC, M - ic), kc = pyops_min(k->KC, K - pc);
                const int64_t nc = K > k->KC ? pyops_min(SUMS, to - jc) : to - from;
                const int more = (pc ? FROM_SUMS : flags & PYOPS_ADD) | (pc + kc < K ? TO_SUMS : flags & PYOPS_RELU);
                const int64_t length = pyops_steps(k, kc);
                pyops_tile t = {.a_row = a.row, .a_col = a.col, .K = length};
                t.b = packed_b + pyops_steps(k, pc) * padded + jc * length;
                if (is_packed) t.a = a.p + (ic / k->MC * parts + pc / k->KC) * block_of_a(k);
                else t.a = a.p + ic * a.row + pc * a.col;
                if (packs) {
                    if (!is_packed) k->micro.pack_a(packed_a, t.a, a.row, a.col, mc, kc), t.a = packed_a;
                    t.a_row = 1, t.a_col = k->MR;
                    if (k->micro.a_in_rows || (k->micro.is_bf16 && along)) t.a_row = length * k->micro.a_step; /* in rows */
                }
                /* the block of a that is packed next, if it is not this one */
                const int64_t next_pc = pc + kc < K ? pc + kc : 0, next_ic = next_pc ? ic : ic + mc;
                pyops_lines next = {0};
                if (!is_packed && next_ic < M)
                    next = lines_of((pyops_view){a.p + next_ic * a.row + next_pc * a.col, a.row, a.col},
                                    pyops_min(k->MC, M - next_ic), pyops_min(k->KC, K - next_pc));
                block(k, c + ic * ldc + jc, ldc, sums, t, packs, bias && !pc ? bias + jc : NULL, mc, nc, more, next,
                      part_of_lines(next_b, ic / k->MC, (M + k->MC - 1) / k->MC));
            }
}

void pyops_product_packed(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, const float *packed_b, const float *bias,
                          int64_t M, int64_t N, int64_t K, int64_t from, int64_t to, int flags, float *scratch) {
    product_packed(k, c, ldc, a, packed_b, bias, M, N, K, from, to, flags, scratch, blocks_of(k, K), (pyops_lines){0});
}

void pyops_product(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, const float *bias, int64_t M,
                   int64_t N, int64_t K, int flags, float *scratch) {
    const int in_place = K && !k->micro.is_bf16 && !k->micro.is_split;
    if (in_place && is_few(a, b, M)) return k->few(c, a.p, b.p, bias, M, N, K, ldc, a.row, b.col, flags);
    if (in_place && !bias && b.col == 1 && (M <= PYOPS_FEW_ROWS || M * N * K <= SMALL))
        return unpacked(k, c, ldc, a, b, M, N, K, flags);
    pyops_product_in_blocks(k, c, ldc, a, b, NULL, bias, M, N, K, flags, scratch);
}

void pyops_product_in_blocks(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, const float *then,
                             const float *bias, int64_t M, int64_t N, int64_t K, int flags, float *scratch) {
    float *packed_b = scratch, *packed_a = scratch + k->B;
    if (!K) return bias_only(c, ldc, bias, M, N, flags);
    /* rows and columns of b packed at a time; for few rows so few that they fit in L2 */
    const int64_t steps = pyops_min(K, k->KB), floats = pyops_max(steps, pyops_steps(k, steps));
    const int64_t most = K > k->KC ? SUMS : k->B / floats / k->NR * k->NR;
    const int64_t columns = M <= PYOPS_FEW_ROWS ? pyops_min(most, 2 * k->NR) : most;
    for (int64_t jc = 0; jc < N; jc += columns)
        for (int64_t pb = 0; pb < K; pb += steps) {
            const int64_t nc = pyops_min(columns, N - jc), kb = pyops_min(steps, K - pb);
            /* what is packed next: the next block of b, or the first one of the next b */
            const int64_t next_pb = pb + kb < K ? pb + kb : 0, next_jc = next_pb ? jc : jc + nc < N ? jc + nc : 0;
            const float *const from = next_pb || next_jc ? b.p : then;
            pyops_lines next = {0};
            if (from)
                next = lines_of((pyops_view){from + next_pb * b.row + next_jc * b.col, b.row, b.col},
                                pyops_min(steps, K - next_pb), pyops_min(columns, N - next_jc));
            const pyops_view of_a = a.col == PYOPS_PACKED ? (pyops_view){a.p + pb / k->KC * block_of_a(k), a.row, a.col}
                                                          : (pyops_view){a.p + pb * a.col, a.row, a.col};
            pyops_pack_b(k, packed_b, (pyops_view){b.p + pb * b.row + jc * b.col, b.row, b.col}, kb, nc, 0, nc);
            product_packed(k, c + jc, ldc, of_a, packed_b, bias && !pb ? bias + jc : NULL, M, nc, kb, 0, nc,
                           (pb ? PYOPS_ADD : flags & PYOPS_ADD) | (pb + kb < K ? 0 : flags & PYOPS_RELU), packed_a,
                           blocks_of(k, K), next);
        }
}

void pyops_pack_b(const pyops_kernels *k, float *packed, pyops_view b, int64_t K, int64_t N, int64_t from, int64_t to) {
    const int64_t padded = pyops_round_up(N, k->NR);
    for (int64_t pc = 0; pc < K; pc += k->KC) {
        const int64_t kc = pyops_min(k->KC, K - pc);
        k->micro.pack_b(packed + pyops_steps(k, pc) * padded + from * pyops_steps(k, kc), b.p + pc * b.row + from * b.col,
                        b.col, b.row, to - from, kc);
    }
}

int64_t pyops_packed_a_size(const pyops_kernels *k, pyops_view a, int64_t M, int64_t K) {
    return is_fast_in_place(k, a) ? 0 : (M + k->MC - 1) / k->MC * ((K + k->KC - 1) / k->KC) * block_of_a(k);
}

pyops_view pyops_pack_a(const pyops_kernels *k, float *packed, pyops_view a, int64_t M, int64_t K) {
    if (is_fast_in_place(k, a)) return a;
    float *to = packed;
    for (int64_t ic = 0; ic < M; ic += k->MC)
        for (int64_t pc = 0; pc < K; pc += k->KC, to += block_of_a(k))
            k->micro.pack_a(to, a.p + ic * a.row + pc * a.col, a.row, a.col, pyops_min(k->MC, M - ic),
                            pyops_min(k->KC, K - pc));
    return (pyops_view){packed, a.col, PYOPS_PACKED};
}

/* Rows of the grid of threads: tm * tn threads read A tn times and pack B tm times.  Each thread gets more than
 * PYOPS_FEW_ROWS rows of c, because fewer do not repay packing. */
static int64_t grid_rows(int64_t threads, int64_t M, int64_t N) {
    int64_t best = 1;
    for (int64_t tm = 2; tm <= threads && M / tm > PYOPS_FEW_ROWS; tm++)
        if (threads % tm == 0 && (threads / tm) * M + tm * N < (threads / best) * M + best * N) best = tm;
    return best;
}

static pyops_status no_memory(const pyops_kernels *k) {
    return pyops_fail(PYOPS_NO_MEMORY, "gemm: no memory for %zu packed floats per thread", pyops_product_scratch(k));
}

static pyops_status threaded(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, const float *bias,
                             int64_t M, int64_t N, int64_t K, int flags) {
    /* A single column is computed as a row, which reads a unpacked: packing all of it costs more than using it once. */
    if (N == 1 && ldc == 1 && !bias && M > PYOPS_FEW_ROWS && !k->micro.is_bf16)
        return threaded(k, c, M, (pyops_view){b.p, b.col, b.row}, (pyops_view){a.p, a.col, a.row}, NULL, 1, M, K, flags);
    /* by its multiply-adds or, with few rows, by the size of b */
    const int is_large = M * N * K > PYOPS_SHARE_FMAS || (M <= PYOPS_FEW_ROWS && N * K > PYOPS_SHARE_FLOATS);
    const int64_t threads = is_large ? omp_get_max_threads() : 1;
    const int64_t tm = grid_rows(threads, M, N), tn = threads / tm;
    int failed = 0;
    if (threads == 1) { /* a parallel region costs more than a product of a few rows, even with one thread */
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        if (scratch && M && N) pyops_product(k, c, ldc, a, b, bias, M, N, K, flags, scratch);
        return failed ? no_memory(k) : PYOPS_OK;
    }
    /* few rows wait for memory; with more the least share repays packing */
    pyops_pace *const paced = M > PYOPS_FEW_ROWS ? pyops_pace_of(threads) : NULL;
    const pyops_pace *const in_rows = M >= 128 * tm ? paced : NULL;
    const int64_t unit = in_rows ? 16 : 1;
    #pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t t = 0; t < threads; t++) {
        const pyops_range down = pyops_part_of(in_rows, t / tn, tm, 0, tn, M, unit);
        const pyops_range across = pyops_part_of(paced, t % tn, tn, t - t % tn, 1, N, k->NR);
        const int64_t i = down.from, j = across.from, rows = down.to - i, columns = across.to - j;
        if (paced) paced->speeds[t] = 0.0;
        if (!rows || !columns) continue;
        float *scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed);
        if (!scratch) continue;
        const double start = omp_get_wtime();
        pyops_product(k, c + i * ldc + j, ldc, (pyops_view){a.p + i * a.row, a.row, a.col},
                      (pyops_view){b.p + j * b.col, b.row, b.col}, bias ? bias + j : NULL, rows, columns, K, flags, scratch);
        const double seconds = omp_get_wtime() - start;
        if (paced && seconds > 0.0) paced->speeds[t] = (double)(rows * columns) / seconds;
    }
    if (paced) pyops_follow(paced);
    return failed ? no_memory(k) : PYOPS_OK;
}

pyops_status pyops_product_threaded(float *c, int64_t ldc, pyops_view a, pyops_view b, const float *bias, int64_t M, int64_t N,
                                    int64_t K, int flags) {
    return threaded(pyops_for_product(pyops_active(), N, K), c, ldc, a, b, bias, M, N, K, flags);
}

pyops_status pyops_gemm(float *c, const float *a, const float *b, const float *bias, int64_t M, int64_t N, int64_t K,
                        int64_t ldc, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col, int32_t accumulate,
                        int32_t relu, void *stream) {
    (void)stream;
    const pyops_status status = check_gemm("gemm", M, N, K, ldc);
    if (status) return status;
    return pyops_product_threaded(c, ldc, (pyops_view){a, a_row, a_col}, (pyops_view){b, b_row, b_col}, bias, M, N, K,
                                  (accumulate ? PYOPS_ADD : 0) | (relu ? PYOPS_RELU : 0));
}

pyops_status pyops_linear_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                   const float *weight, int64_t R, int64_t O, int64_t I, int32_t relu, int32_t accumulate,
                                   void *stream) {
    pyops_status status = check_linear(dx, R, O, I, relu, accumulate);
    if (!status) status = pyops_gemm(dweight, dy, x, NULL, O, I, R, I, 1, O, I, 1, 1, 0, stream);
    if (!status && dbias) status = pyops_column_sums(dbias, dy, R, O, stream);
    if (!status && dx) status = pyops_gemm(dx, dy, weight, NULL, R, I, O, I, O, 1, I, 1, accumulate, 0, stream);
    return status || !relu ? status : pyops_relu_backward(dx, dx, x, R * I, stream);
}

typedef pyops_status activation_forward(float *y, const float *x, int64_t n, void *stream);
typedef pyops_status activation_backward(float *dx, const float *dy, const float *x, int64_t n, void *stream);
static activation_forward *const forward_of[] = {pyops_silu_forward, pyops_gelu_forward, pyops_gelu_tanh_forward};
static activation_backward *const backward_of[] = {pyops_silu_backward, pyops_gelu_backward, pyops_gelu_tanh_backward};

pyops_status pyops_linear_activation(float *y, float *a, const float *x, const float *weight, const float *bias, int64_t R,
                                     int64_t O, int64_t I, int32_t activation, void *stream) {
    pyops_status status = check_linear_activation("linear_activation", R, O, I, activation);
    if (!status) status = pyops_gemm(a, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0, stream);
    return status ? status : forward_of[activation](y, a, R * O, stream);
}

pyops_status pyops_linear_activation_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                              const float *a, const float *weight, int64_t R, int64_t O, int64_t I,
                                              int32_t activation, void *stream) {
    pyops_status status = check_linear_activation_backward(dx, R, O, I, activation);
    if (!status) status = pyops_linear_backward(dx, dweight, dbias, dy, x, weight, R, O, I, 0, 0, stream);
    return status ? status : backward_of[activation](dx, dx, a, R * I, stream);
}

pyops_status pyops_linear_residual(float *y, const float *x, const float *weight, const float *bias, const float *residual,
                                   const int64_t *step, int64_t R, int64_t O, int64_t I, float p, uint64_t key, void *stream) {
    pyops_status status = check_linear_residual("linear_residual", R, O, I, p);
    if (!status) status = pyops_gemm(y, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0, stream);
    return status ? status : pyops_residual(y, residual, y, step, R * O, p, key, stream);
}

pyops_status pyops_linear_residual_norm(float *y, float *sum, float *mean, float *rstd, const float *x, const float *weight,
                                        const float *bias, const float *residual, const int64_t *step, const float *norm_weight,
                                        const float *norm_bias, int64_t R, int64_t O, int64_t I, float p, uint64_t key,
                                        float eps, void *stream) {
    pyops_status status = check_linear_residual_norm("linear_residual_norm", R, O, I, p, eps);
    if (!status) status = pyops_gemm(sum, x, weight, bias, R, O, I, O, I, 1, 1, I, 0, 0, stream);
    if (status) return status;
    return pyops_residual_norm_forward(y, sum, mean, rstd, residual, sum, step, norm_weight, norm_bias, R, O, p, key, eps,
                                       stream);
}

pyops_status pyops_linear_pair(float *y1, float *y2, const float *x1, const float *x2, const float *weight1,
                               const float *weight2, const float *bias1, const float *bias2, int64_t R1, int64_t R2, int64_t O1,
                               int64_t O2, int64_t I1, int64_t I2, void *stream) {
    pyops_status status = check_linear_pair("linear_pair", R1, R2, O1, O2, I1, I2);
    if (!status) status = pyops_gemm(y1, x1, weight1, bias1, R1, O1, I1, O1, I1, 1, 1, I1, 0, 0, stream);
    return status ? status : pyops_gemm(y2, x2, weight2, bias2, R2, O2, I2, O2, I2, 1, 1, I2, 0, 0, stream);
}

pyops_status pyops_linear_pair_backward(float *dx1, float *dx2, float *dweight1, float *dweight2, float *dbias1, float *dbias2,
                                        const float *dy1, const float *dy2, const float *x1, const float *x2,
                                        const float *weight1, const float *weight2, int64_t R1, int64_t R2, int64_t O1,
                                        int64_t O2, int64_t I1, int64_t I2, int32_t accumulate1, int32_t accumulate2,
                                        void *stream) {
    pyops_status status = check_linear_pair("linear_pair_backward", R1, R2, O1, O2, I1, I2);
    if (!status) status = pyops_linear_backward(dx1, dweight1, dbias1, dy1, x1, weight1, R1, O1, I1, 0, accumulate1, stream);
    if (!status) status = pyops_linear_backward(dx2, dweight2, dbias2, dy2, x2, weight2, R2, O2, I2, 0, accumulate2, stream);
    return status;
}

/* Products whose b, or a copy of it with contiguous rows, is multiplied in place. */
enum { TRANSPOSED = 1024 }; /* floats of such a copy */

static int is_tiny(const pyops_kernels *k, pyops_view b, int64_t M, int64_t N, int64_t K) {
    return K && !k->micro.is_bf16 && !k->micro.is_split && M * N * K <= SMALL && (b.col == 1 || K * N <= TRANSPOSED);
}

static void tiny_product(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, pyops_view b, int64_t M, int64_t N,
                         int64_t K, int flags) {
    float rows[TRANSPOSED];
    if (b.col != 1) {
        for (int64_t n = 0; n < N; n++)
            for (int64_t j = 0; j < K; j++) rows[j * N + n] = b.p[j * b.row + n * b.col];
        b = (pyops_view){rows, N, 1};
    }
    unpacked(k, c, ldc, a, b, M, N, K, flags);
}

pyops_status pyops_gemm_batched(float *c, const float *a, const float *b, const int64_t *shape, const int64_t *strides,
                                int64_t ndim, int64_t M, int64_t N, int64_t K, int64_t ldc, int64_t a_row, int64_t a_col,
                                int64_t b_row, int64_t b_col, int32_t accumulate, void *stream) {
    (void)stream;
    pyops_status status = check_gemm("gemm_batched", M, N, K, ldc);
    if (!status) status = check_shape("gemm_batched", shape, ndim);
    if (status) return status;
    int64_t products = 1, n = ndim;
    for (int64_t d = 0; d < ndim; d++) products *= shape[d];
    if (!products) return PYOPS_OK;
    const int64_t *c_step = strides, *a_step = strides + ndim, *b_step = strides + 2 * ndim;
    /* consecutive matrices with the same b form one taller matrix */
    for (; n > 0; n--) {
        const int64_t d = n - 1;
        if (shape[d] == 1) continue;
        if (b_step[d] || a_step[d] != M * a_row || c_step[d] != M * ldc) break;
        M *= shape[d], products /= shape[d];
    }
    const int flags = accumulate ? PYOPS_ADD : 0;
    const pyops_kernels *const k = pyops_for_product(pyops_active(), N, K);
    /* Threads share each large product if there are few, otherwise the batch: then they wait for each other only once. */
    const int64_t most = omp_get_max_threads();
    const int few = products % most && products < 8 * most;
    const int whole = products == 1 || (M * N * K > PYOPS_SHARE_FMAS && few);
    const int tiny = is_tiny(k, (pyops_view){b, b_row, b_col}, M, N, K);
    const int64_t threads = whole || products * M * N * K <= PYOPS_SHARE_FMAS ? 1 : most;
    int failed = 0;
    /* products of a row and a column, along the last axis at a time: each term of such a sum waits for the one before it */
    const int64_t dots = tiny && threads == 1 && M == 1 && N == 1 && a_col == 1 && b_row == 1 && n ? shape[n - 1] : 1;
    if (dots > 1) n--, products /= dots;
    PYOPS_FOR(i, products, threads > 1, {
        float *c_i = c, *scratch;
        pyops_view a_i = {a, a_row, a_col}, b_i = {b, b_row, b_col};
        for (int64_t d = n - 1, rest = i; d >= 0; d--) {
            const int64_t at = d ? rest % shape[d] : rest; /* a division takes as long as the product of a few numbers */
            c_i += at * c_step[d], a_i.p += at * a_step[d], b_i.p += at * b_step[d];
            if (d) rest /= shape[d];
        }
        if (dots > 1) {
            k->row_dots(c_i, a_i.p, b_i.p, dots, K, c_step[n], a_step[n], b_step[n], accumulate);
        } else if (tiny) {
            tiny_product(k, c_i, ldc, a_i, b_i, M, N, K, flags);
        } else if (whole) {
            if (!status) status = pyops_product_threaded(c_i, ldc, a_i, b_i, NULL, M, N, K, flags);
        } else if ((scratch = pyops_scratch_or_fail(pyops_product_scratch(k), &failed))) {
            pyops_product(k, c_i, ldc, a_i, b_i, NULL, M, N, K, flags, scratch);
        }
    });
    if (status || failed)
        return pyops_fail(PYOPS_NO_MEMORY, "gemm_batched: no memory for %zu packed floats per thread",
                          pyops_product_scratch(k));
    return PYOPS_OK;
}

/* ---- matrices of bfloat16: a reference for the GPU, not a fast path on the CPU ---------------------------------- */

pyops_status pyops_to_bf16(uint16_t *y, const float *x, int64_t R, int64_t C, int64_t ld, int64_t row, int64_t col,
                           void *stream) {
    (void)stream;
    const pyops_status status = check_to_bf16(R, C, ld);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (R * C > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < C; c++) y[r * ld + c] = pyops_to_bf16_bits(x[r * row + c * col]);
    return PYOPS_OK;
}

pyops_status pyops_gemm_bf16(float *c, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                             int64_t lda, int64_t ldb, int32_t accumulate, void *stream) {
    (void)stream;
    const pyops_status status = check_gemm_bf16(M, N, K, ldc, lda, ldb);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (M * N * K > PYOPS_SHARE_FMAS)
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float sum = 0.0f;
            #pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < K; k++) sum += pyops_from_bf16_bits(a[m * lda + k]) * pyops_from_bf16_bits(b[n * ldb + k]);
            c[m * ldc + n] = (accumulate ? c[m * ldc + n] : 0.0f) + sum;
        }
    return PYOPS_OK;
}
