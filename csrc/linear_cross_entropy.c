/* linear_cross_entropy.c - output layer, masked softmax cross entropy and their gradients in one pass.
 *
 * Only valid rows are gathered and computed.  A block of ROWS rows goes through four phases while its logits
 * (ROWS x V) are in cache:
 *   1  logits = x weight' + bias, maxima    threads share columns of the vocabulary
 *   2  e = exp(logits - max), loss          threads share rows
 *   3  dx = dlogits weight                  threads share columns, and if there are few of them also rows
 *   4  dweight += dlogits' x, dbias         threads share rows of weight
 * A row of dlogits is dloss / (valid sum(e)) (e - sum(e) target).  The factor dloss / (valid sum(e)) is not applied to the row:
 * phase 3 applies it to dx, and phase 4 uses x scaled by it.  So there is one exponential and one pass over the logits between
 * the products.
 * This takes three products, not the four of a separate backward (which would compute the logits again), and no (R,V) matrix.
 * weight is packed once for phase 1 and once for phase 3 if several blocks use it and it is small.  Otherwise each thread packs a
 * part of it just before the product: the same multiply-adds, without two copies of a large weight.  With AMX every weight is packed
 * so: a packed copy has 6 bytes a number and would come from L3, while the next part of the weight itself is prefetched.  Every sum
 * runs in the order of the rows in a block, of the blocks, or of the vocabulary, independent of the threads.
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include "internal.h"
#include "kernels/math.inc"

/* The most rows in a block: 280 x 13387 logits take 15 MB of L3, and weight and dweight are read once per block.  Blocks are
 * about equally high, because a block of few rows reads as much as one of many. */
#define ROWS PYOPS_TUNED(linear_cross_entropy_rows, 280, 1, 504, 1)

/* The most floats of a weight that is packed ahead, in two copies of at most 64 MiB. */
#define AHEAD PYOPS_TUNED(linear_cross_entropy_ahead, 1 << 24, 0, 1 << 24, 1)

/* A multiple of the tile heights 14 and 6.  The blocks must not depend on the instruction set: sums over rows are added block by
 * block, and with --exact they have the same bits on all. */
enum { TILES = 42 };

/* The same with factors in bfloat16: KC, a block of K for phase 4, and a multiple of the tile height 32 of AMX, which multiplies so
 * fast that a few rows more cost as much as another block of K. */
#define ROWS_BF16 PYOPS_TUNED(linear_cross_entropy_rows_bf16, 256, 1, 512, 1)
enum { TILES_BF16 = 32 };

static const pyops_kernels *kernels_for(int64_t V, int64_t D) { return pyops_for_product(pyops_active(), V, D); }
static int is_fast(const pyops_kernels *k) { return k->micro.is_bf16 || k->micro.is_split; }
static int64_t most_rows(const pyops_kernels *k) { return is_fast(k) ? ROWS_BF16 : ROWS; }

/* The logits of a block are stored in chunks of COLUMNS columns, (ROWS, COLUMNS) each, rows LD apart.  With rows of all V
 * columns every row would be on another page, and with a stride of 2 KiB all rows would map to the same cache sets. */
enum { COLUMNS = 512, LD = COLUMNS + 16 };
_Static_assert(COLUMNS % PYOPS_KC == 0, "a chunk of weight must be whole packed blocks");

typedef struct { int64_t rows, x, dx, logits, x_packed, w_logits, w_dx, losses, maxima, factors, total, ahead; } layout;

static layout make_layout(const pyops_kernels *k, int64_t R, int64_t D, int64_t V, int gradients) {
    const int64_t block = pyops_min(R, most_rows(k));
    layout l = {0};
    l.x = l.rows + R;                                   /* before it: indices of the valid rows, int32 (R) */
    l.losses = l.x + block * D;                         /* x: the rows of a block (ROWS,D) */
    l.factors = l.losses + block;                       /* losses of its rows (ROWS) */
    l.maxima = l.factors + block;                       /* factors of the rows of dlogits (ROWS) */
    l.logits = l.maxima + (V + COLUMNS - 1) / COLUMNS * block;  /* largest logits of each chunk (V/COLUMNS,ROWS) */
    l.dx = l.logits + (V + COLUMNS - 1) / COLUMNS * block * LD; /* chunks of logits (ROWS,COLUMNS) */
    l.x_packed = l.dx + (gradients ? block * D : 0);    /* dx of a block (ROWS,D) */
    l.w_logits = l.x_packed + (gradients ? pyops_packed_b_size(k, block, D) : 0);       /* x of a block packed (ROWS,D) */
    l.total = l.w_logits;
    l.ahead = R > block && D * V <= AHEAD && !k->micro.is_split;
    if (!l.ahead) return l;
    l.w_dx = l.w_logits + pyops_packed_b_size(k, D, V);         /* weight' packed (D,V) */
    l.total = l.w_dx + (gradients ? pyops_packed_b_size(k, V, D) : 0);  /* weight packed (V,D) */
    return l;
}

/* The chunk of logits with column v, in a block of `block` rows.  COLUMNS is a multiple of KC, so a chunk of weight is also a
 * whole number of packed blocks. */
static float *chunk(float *logits, int64_t block, int64_t v) { return logits + v / COLUMNS * block * LD; }

/* The largest divisor of `threads` that is at most `most`. */
static int64_t columns_of_grid(int64_t threads, int64_t most) {
    int64_t columns = pyops_min(threads, most);
    while (threads % columns) columns--;
    return columns;
}

int64_t pyops_linear_cross_entropy_work(int64_t R, int64_t D, int64_t V, int32_t gradients, int32_t is_bf16, int32_t tf32) {
    (void)is_bf16, (void)tf32;
    return make_layout(kernels_for(V, D), R, D, V, gradients).total;
}

pyops_status pyops_linear_cross_entropy(float *loss, int32_t *valid, float *dx, float *dweight, float *dbias,
                                        const float *dloss, const float *x, const float *weight, const float *bias,
                                        const int32_t *labels, float *work, int64_t R, int64_t D, int64_t V, int32_t ignore,
                                        float smoothing, int32_t tf32, void *stream) {
    (void)tf32, (void)stream;
    pyops_status status = check_linear_cross_entropy(dx, dweight, dbias, dloss, R, D, V, smoothing);
    const int gradients = dx != NULL, adds = dloss != NULL;
    if (!status) status = pyops_count_valid(valid, "linear_cross_entropy", labels, R, V, ignore);
    if (status) return status;
    const pyops_kernels *k = kernels_for(V, D);
    const layout l = make_layout(k, R, D, V, gradients);
    const int64_t n_valid = valid[0], block = pyops_min(R, most_rows(k)), blocks = (n_valid + block - 1) / pyops_max(1, block);
    const int64_t tiles = is_fast(k) ? TILES_BF16 : TILES;
    /* rows of each block but the last: whole tiles of any instruction set, if that makes no block too high */
    const int64_t even = blocks ? (n_valid + blocks - 1) / blocks : 0, height = pyops_min(pyops_round_up(even, tiles), block);

    int32_t *row = (int32_t *)(work + l.rows);
    for (int64_t r = 0, n = 0; r < R; r++)
        if (labels[r] != ignore) row[n++] = (int32_t)r;
    if (gradients) {
        pyops_fill(dx, R * D, 0.0f, stream);            /* masked rows */
        if (!n_valid && !adds) {
            pyops_fill(dweight, V * D, 0.0f, stream);
            pyops_fill(dbias, V, 0.0f, stream);
        }
    }

    const pyops_view weight_t = {weight, 1, D};
    float *const x_b = work + l.x, *const dx_b = work + l.dx, *const logits = work + l.logits, *const losses = work + l.losses;
    float *const maxima = work + l.maxima, *const factors = work + l.factors;
    const float scale = n_valid ? (adds ? dloss[0] : 1.0f) / (float)n_valid : 0.0f;
    const pyops_pace *const pace = pyops_pace_of(omp_get_max_threads());
    double sum = 0.0;
    int failed = 0;
    #pragma omp parallel if (R * D * V > PYOPS_SHARE_FMAS)
    {
        const size_t product = pyops_product_scratch(k);
        const pyops_view x_rows = {x_b, D, 1};
        float *const scratch = pyops_scratch_or_fail(product + (size_t)pyops_packed_a_size(k, x_rows, block, D), &failed);
        if (l.ahead) {
            #pragma omp for schedule(dynamic) nowait
            for (int64_t v = 0; v < V; v += COLUMNS) { /* both copies of a chunk, which is then in L2 */
                const int64_t n = pyops_min(COLUMNS, V - v);
                pyops_pack_b(k, work + l.w_logits, weight_t, D, V, v, v + n);
                if (!gradients) continue;
                pyops_pack_b(k, work + l.w_dx + pyops_packed_b_row(k, v, D), (pyops_view){weight + v * D, D, 1}, n, D, 0, D);
            }
        }
        #pragma omp barrier                             /* every thread reads the same `failed` */
        const int go_on = !failed;
        const int64_t threads = omp_get_num_threads();
        const int64_t across = columns_of_grid(threads, (D + k->NR - 1) / k->NR), down = threads / across;
        const pyops_pace *const paced = pyops_pace_in(pace, threads);

        for (int64_t r0 = 0; go_on && r0 < n_valid; r0 += height) {
            const int64_t rows = pyops_min(height, n_valid - r0);
            const int64_t share = pyops_round_up((rows + down - 1) / down, k->MR);
            #pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) memcpy(x_b + r * D, x + row[r0 + r] * D, (size_t)D * sizeof *x_b);

            /* phase 1 */
            const pyops_view x_a = pyops_pack_a(k, scratch + product, x_rows, rows, D);
            #pragma omp for schedule(dynamic)
            for (int64_t v = 0; v < V; v += COLUMNS) {
                const int64_t n = pyops_min(COLUMNS, V - v);
                float *z = chunk(logits, block, v);
                if (l.ahead) {
                    pyops_product_packed(k, z - v, LD, x_a, work + l.w_logits, bias, rows, V, D, v, v + n, 0, scratch);
                } else {
                    /* of the chunk that this thread probably takes next */
                    const float *const then = v + (threads + 1) * COLUMNS <= V ? weight + (v + threads * COLUMNS) * D : NULL;
                    pyops_product_in_blocks(k, z, LD, x_a, (pyops_view){weight + v * D, 1, D}, then, bias + v, rows, n, D, 0,
                                            scratch);
                }
                for (int64_t r = 0; r < rows; r++) maxima[v / COLUMNS * block + r] = k->max(z + r * LD, n);
            }
            /* phase 2 */
            #pragma omp for schedule(dynamic, 8)
            for (int64_t r = 0; r < rows; r++) {
                const int32_t label = labels[row[r0 + r]];
                float *z_label = chunk(logits, block, label) + r * LD + label % COLUMNS;
                float max = -INFINITY, sum_exp = 0.0f, below = 0.0f;     /* below: sum of z - max */
                for (int64_t v = 0; v < V; v += COLUMNS) {
                    const float m = maxima[v / COLUMNS * block + r];
                    if (max == max && !(m <= max)) max = m;     /* NaN stays NaN */
                }
                const float missing = max - *z_label;
                for (int64_t v = 0; v < V; v += COLUMNS) {
                    const int64_t n = pyops_min(COLUMNS, V - v);
                    float *z = chunk(logits, block, v) + r * LD;
                    if (smoothing > 0.0f) below += k->sum_shifted(z, max, n);
                    sum_exp += k->exp_sum(z, z, max, n);
                }
                losses[r] = log_f(sum_exp) + (1.0f - smoothing) * missing;
                if (smoothing > 0.0f) losses[r] -= smoothing * (below / (float)V);
                if (!gradients) continue;
                if (smoothing > 0.0f)
                    for (int64_t v = 0; v < V; v += COLUMNS)
                        k->add_constant(chunk(logits, block, v) + r * LD, -smoothing / (float)V * sum_exp,
                                        pyops_min(COLUMNS, V - v));
                *z_label -= (1.0f - smoothing) * sum_exp;
                factors[r] = scale / sum_exp;
                k->scale(x_b + r * D, x_b + r * D, factors[r], D);
            }
            #pragma omp single nowait
            for (int64_t r = 0; r < rows; r++) sum += losses[r];
            if (!gradients) continue;
            /* phase 3 */
            #pragma omp for schedule(static) nowait
            for (int64_t d = 0; d < D; d += k->NR)
                pyops_pack_b(k, work + l.x_packed, (pyops_view){x_b, D, 1}, rows, D, d, pyops_min(d + k->NR, D));
            #pragma omp for schedule(static)
            for (int64_t t = 0; t < threads; t++) {
                const int64_t r = t / across * share, n = pyops_min(share, rows - r);
                const pyops_range columns = pyops_part_of(paced, t % across, across, t - t % across, 1, D, k->NR);
                const int64_t d = columns.from, d1 = columns.to;
                if (n <= 0 || d >= d1) continue;
                for (int64_t v = 0; v < V; v += COLUMNS) {
                    const int64_t K = pyops_min(COLUMNS, V - v);
                    const pyops_view dz = {chunk(logits, block, v) + r * LD, LD, 1};
                    const int flags = v ? PYOPS_ADD : 0;
                    if (l.ahead) {
                        pyops_product_packed(k, dx_b + r * D, D, dz, work + l.w_dx + pyops_packed_b_row(k, v, D), NULL, n, D, K,
                                             d, d1, flags, scratch);
                    } else {
                        const float *const w = weight + v * D + d;
                        pyops_product_in_blocks(k, dx_b + r * D + d, D, dz, (pyops_view){w, D, 1},
                                                v + 2 * COLUMNS <= V ? w + COLUMNS * D : NULL, NULL, n, d1 - d, K, flags,
                                                scratch);
                    }
                }
                for (int64_t i = r; i < r + n; i++) k->scale(dx + row[r0 + i] * D + d, dx_b + i * D + d, factors[i], d1 - d);
            }
            /* phase 4.  All threads have ended it when the next block has its rows, before it overwrites the logits. */
            #pragma omp for schedule(dynamic) nowait
            for (int64_t v = 0; v < V; v += COLUMNS) {
                const int64_t n = pyops_min(COLUMNS, V - v);
                const float *dz = chunk(logits, block, v);
                pyops_product_packed(k, dweight + v * D, D, (pyops_view){dz, 1, LD}, work + l.x_packed, NULL, n, D, rows, 0, D,
                                     r0 || adds ? PYOPS_ADD : 0, scratch);
                /* The block is summed first: each row added to a large dbias would be rounded to its digits. */
                float sums[COLUMNS];
                k->fill(sums, n, 0.0f);
                for (int64_t r = 0; r < rows; r++) k->axpy(sums, dz + r * LD, factors[r], n);
                if (!r0 && !adds) k->fill(dbias + v, n, 0.0f);
                k->axpy(dbias + v, sums, 1.0f, n);
            }
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "linear_cross_entropy: no memory for packed tiles");
    loss[0] = n_valid ? (float)(sum / (double)n_valid) : 0.0f;
    return PYOPS_OK;
}
