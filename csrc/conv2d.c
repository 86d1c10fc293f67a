/* conv2d.c - convolutions in two dimensions as matrix products, without the matrix of windows in memory.
 *
 *     forward          y  (O, N Ho Wo)         =  weight (O, C kh kw)   x  windows of x (C kh kw, N Ho Wo)
 *     backward_x       dx (C, N H W)           =  weight' (C, O kh kw)  x  windows of dy (O kh kw, N H W)
 *     backward_weight  dweight' (C kh kw, O)  +=  windows of x          x  dy' (N Ho Wo, O)
 *
 * Windows are written straight into the panels of a product, a block of columns at a time (kernels/windows.inc).  So each
 * block stays in L2 while all filters use it.
 *
 * A convolution with strides (s, t) reads every s-th row and every t-th column.  x is split into its phases first: element
 * (i, j) of phase (p, r) is x[i s + p, j t + r].  A tap then reads adjacent elements of one phase, as with stride 1.
 * backward_x does the reverse: a phase of dx is a convolution of dy with stride 1 and some of the taps.
 *
 * Filters of 3 x 3 on many channels take 16 products of tiles instead (kernels/winograd.inc).
 *
 * Threads share blocks of columns and, for dweight, parts of the batch; the parts depend on the sizes alone.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* Packed floats of windows that share L2 with the filters; columns of a block for dweight; most parts of a batch, and floats of
 * their partial sums. */
enum { BLOCK = PYOPS_KC };
#define PACKED PYOPS_TUNED(conv2d_packed, 1 << 16, 1, 1 << 18, 1)
#define PARTS PYOPS_TUNED(conv2d_parts, 16, 1, 64, 1)
#define PARTIAL PYOPS_TUNED(conv2d_partial, 1 << 20, 1, 1 << 20, 1)

#define SIZES \
    int64_t N, int64_t C, int64_t H, int64_t W, int64_t O, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw, int64_t stride_h, \
        int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w, int64_t groups
#define SIZES_OF {N, C, H, W, O, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups}

static int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- taps: the positions of a filter that read some element, with their rows and columns for stride 1 -------------------- */
typedef struct {
    int64_t a, b;                       /* position in the filter */
    int64_t row_phase, col_phase;       /* of x */
} filter_place;

static int reaches(int64_t first, int64_t grid, int64_t size) { return first < size && first + grid > 0; }

/* At most kh kw of them; returns their number. */
static int64_t taps_of_x(pyops_tap *taps, filter_place *places, const pyops_conv2d *s) {
    const int64_t rows = ceil_div(s->H, s->stride_h), cols = ceil_div(s->W, s->stride_w);
    int64_t T = 0;
    for (int64_t a = 0; a < s->kh; a++)
        for (int64_t b = 0; b < s->kw; b++) {
            const int64_t y = a * s->dilation_h - s->pad_h, x = b * s->dilation_w - s->pad_w;
            const int64_t row = floor_div(y, s->stride_h), col = floor_div(x, s->stride_w);
            if (!reaches(row, s->Ho, rows) || !reaches(col, s->Wo, cols)) continue;
            places[T] = (filter_place){a, b, y - row * s->stride_h, x - col * s->stride_w};
            taps[T++] = (pyops_tap){0, row, col};
        }
    return T;
}

/* The taps that phase (row_phase, col_phase) of dx reads in dy. */
static int64_t taps_of_dy(pyops_tap *taps, filter_place *places, const pyops_conv2d *s, int64_t row_phase, int64_t col_phase) {
    const int64_t rows = ceil_div(s->H - row_phase, s->stride_h), cols = ceil_div(s->W - col_phase, s->stride_w);
    int64_t T = 0;
    for (int64_t a = 0; a < s->kh; a++)
        for (int64_t b = 0; b < s->kw; b++) {
            const int64_t y = row_phase + s->pad_h - a * s->dilation_h, x = col_phase + s->pad_w - b * s->dilation_w;
            const int64_t row = floor_div(y, s->stride_h), col = floor_div(x, s->stride_w);
            if (row * s->stride_h != y || col * s->stride_w != x) continue;
            if (!reaches(row, rows, s->Ho) || !reaches(col, cols, s->Wo)) continue;
            places[T] = (filter_place){a, b, 0, 0};
            taps[T++] = (pyops_tap){0, row, col};
        }
    return T;
}

/* ---- phases of x --------------------------------------------------------------------------------------------------------- */
static int is_strided(const pyops_conv2d *s) { return s->stride_h > 1 || s->stride_w > 1; }

/* The phases that taps read, at most min(kh, stride_h) min(kw, stride_w). */
static int64_t most_phases(const pyops_conv2d *s) { return pyops_min(s->kh, s->stride_h) * pyops_min(s->kw, s->stride_w); }

static int64_t phases_size(const pyops_conv2d *s) {
    if (!is_strided(s)) return 0;
    return s->N * s->C * most_phases(s) * ceil_div(s->H, s->stride_h) * ceil_div(s->W, s->stride_w);
}

/* to[j] = from[j step]; a constant step lets the compiler use vectors. */
static inline __attribute__((always_inline)) void every(float *restrict to, const float *restrict from, int64_t n,
                                                        const int64_t step) {
    for (int64_t j = 0; j < n; j++) to[j] = from[j * step];
}

enum { SPLIT = 4 };                     /* the largest stride of split_plane */

/* All phases (H,W) of a plane of x; each of its rows is read once.  plane_at: their places.  The step between columns
 * is a constant, so that the compiler can use vectors. */
static inline __attribute__((always_inline)) void split_plane(float *phases, const float *restrict x,
                                                              int64_t plane_at[SPLIT][SPLIT], int64_t H, int64_t W,
                                                              int64_t step_h, const int64_t step) {
    for (int64_t i = 0; i < H; i++)
        for (int64_t top = 0; top < step_h; top++, x += W * step) {
            float *restrict const a = phases + plane_at[top][0] + i * W, *restrict const b = phases + plane_at[top][1] + i * W;
            if (step == 2) {
                for (int64_t j = 0; j < W; j++) a[j] = x[2 * j], b[j] = x[2 * j + 1];
                continue;
            }
            float *restrict const c = phases + plane_at[top][2] + i * W, *restrict const d = phases + plane_at[top][3] + i * W;
            for (int64_t j = 0; j < W; j++) a[j] = x[4 * j], b[j] = x[4 * j + 1], c[j] = x[4 * j + 2], d[j] = x[4 * j + 3];
        }
}

/* Windows of x for stride 1; with strides, split x into `phases` and set the planes of the taps. */
static pyops_windows windows_of_x(const float *x, float *phases, pyops_tap *taps, const filter_place *places, int64_t T,
                                  const pyops_conv2d *s) {
    const int64_t H = ceil_div(s->H, s->stride_h), W = ceil_div(s->W, s->stride_w);
    int64_t count = 1;
    pyops_windows w = {
        .source = x, .H = H, .W = W, .grid_h = s->Ho, .grid_w = s->Wo, .columns = s->N * s->Ho * s->Wo, .T = T, .taps = taps};
    if (is_strided(s)) {
        int64_t plane_at[SPLIT][SPLIT];
        const int is_even = pyops_max(s->stride_h, s->stride_w) <= SPLIT && (s->stride_w == 2 || s->stride_w == 4) &&
            s->H % s->stride_h == 0 && s->W % s->stride_w == 0;
        count = 0;
        for (int64_t t = 0; t < T; t++) {
            int64_t same = 0;
            while (same < t && (places[same].row_phase != places[t].row_phase || places[same].col_phase != places[t].col_phase))
                same++;
            taps[t].plane = same < t ? taps[same].plane : count++ * H * W;
            if (is_even) plane_at[places[t].row_phase][places[t].col_phase] = taps[t].plane;
        }
        const int all = is_even && count == s->stride_h * s->stride_w;
        /* all phases of a channel at a time, so that it is read from memory once */
        #pragma omp parallel for schedule(static) if (s->N * s->C * H * W > PYOPS_SHARE_FLOATS)
        for (int64_t c = 0; c < s->N * s->C; c++) {
            float *const own = phases + c * count * H * W;
            if (all && s->stride_w == 2) split_plane(own, x + c * s->H * s->W, plane_at, H, W, s->stride_h, 2);
            else if (all) split_plane(own, x + c * s->H * s->W, plane_at, H, W, s->stride_h, 4);
            for (int64_t t = 0, done = 0; t < (all ? 0 : T); t++) {
                if (taps[t].plane != done * H * W) continue;
                const int64_t top = places[t].row_phase, left = places[t].col_phase;
                const int64_t rows = pyops_min(H, ceil_div(s->H - top, s->stride_h));
                const int64_t cols = pyops_min(W, ceil_div(s->W - left, s->stride_w));
                float *to = own + done++ * H * W;
                const float *from = x + (c * s->H + top) * s->W + left;
                for (int64_t i = 0; i < rows; i++, to += W, from += s->stride_h * s->W) {
                    if (s->stride_w == 2) every(to, from, cols, 2);
                    else if (s->stride_w == 4) every(to, from, cols, 4);
                    else every(to, from, cols, s->stride_w);
                    if (cols < W) to[cols] = 0.0f;          /* the last phases may have a row or a column less */
                }
                if (rows < H) memset(to, 0, (size_t)W * sizeof *to);
            }
        }
        w.source = phases;
    }
    w.channel = count * H * W, w.image = s->C * w.channel, w.size = s->N * w.image;
    return w;
}

/* ---- a correlation of stride 1 ------------------------------------------------------------------------------------------- */
typedef struct {
    float *p;
    int64_t image, plane;               /* strides of images and channels */
} planes;

/* Rows [from, from + K) and columns [q, q + n) of the windows, from channel c, as a packed b. */
static void pack_windows(const pyops_kernels *k, float *packed, float *rows, const pyops_windows *w, int64_t c, int64_t q,
                         int64_t n, int64_t from, int64_t K) {
    const int64_t padded = pyops_round_up(n, k->NR);
    for (int64_t pc = 0; pc < K; pc += k->KC) {
        const int64_t kc = pyops_min(k->KC, K - pc);
        float *const to = packed + pyops_steps(k, pc) * padded;
        if (k->micro.is_bf16) {
            k->windows(rows, padded, w, c, q, padded, from + pc, from + pc + kc);
            k->micro.pack_b(to, rows, 1, padded, n, kc);
        } else {
            for (int64_t j = 0; j < n; j += k->NR)
                k->windows(to + j * kc, k->NR, w, c, q + j, k->NR, from + pc, from + pc + kc);
        }
    }
}

/* Whether channels with filters of their own are multiplied without a product, which would have M rows only. */
static int is_direct(const pyops_kernels *k, int64_t C, int64_t M, int64_t T) {
    return C == 1 && M <= 2 && T <= PYOPS_DIRECT_TAPS && !k->micro.is_bf16;
}

/* dst[n, m, :] = filters (groups M, C T) x windows (groups C T, columns) + bias, group by group. */
static pyops_status correlate(const char *who, planes dst, const float *filters, const float *bias, const pyops_windows *w,
                              int64_t M, int64_t C, int64_t groups) {
    const pyops_kernels *k = pyops_active();
    const int64_t K = C * w->T, area = w->grid_h * w->grid_w, threads = omp_get_max_threads();
    if (is_direct(k, C, M, w->T)) {
        const int64_t step = 64, blocks = ceil_div(w->columns, step);
        #pragma omp parallel for schedule(static) if (w->columns * groups * M * w->T > PYOPS_SHARE_FMAS)
        for (int64_t i = 0; i < blocks; i++)
            k->windows_direct(dst.p, dst.image, dst.plane, w, filters, bias, groups, M, i * step,
                              pyops_min(step, w->columns - i * step));
        return PYOPS_OK;
    }
    const int64_t steps = pyops_max(pyops_min(K, k->KB), 1);
    const int64_t most = pyops_min(512, pyops_max(PACKED / steps / k->NR, 2) * k->NR);
    /* blocks of columns within an image write to dst directly, unless much of their last panel would be empty */
    const int in_image = pyops_round_up(area, k->NR) * 16 <= area * 17;
    const int64_t length = in_image ? area : w->columns, pieces = in_image ? w->columns / area : 1;
    const int64_t blocks = ceil_div(length, most), columns = pyops_round_up(ceil_div(length, blocks), k->NR);
    const int is_large = w->columns * groups * M * K > PYOPS_SHARE_FMAS;
    const int64_t cuts = is_large ? pyops_min(ceil_div(threads, pieces * blocks * groups), ceil_div(M, k->MR)) : 1;
    const size_t own = (size_t)(columns * M + k->KC * columns);
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (is_large)
    for (int64_t i = 0; i < pieces * groups * blocks * cuts; i++) {
        const int64_t g = i / cuts % groups, piece = i / cuts / groups / blocks, j = i / cuts / groups % blocks * columns;
        const int64_t first = i % cuts * M / cuts, rows = (i % cuts + 1) * M / cuts - first;
        const int64_t n = pyops_min(columns, length - j), q = piece * area + j, m = g * M + first;
        if (n <= 0 || !rows) continue;
        float *const scratch = pyops_scratch_or_fail(pyops_product_scratch(k) + own, &failed);
        if (!scratch) continue;
        float *const packed = scratch, *const rest = packed + k->B, *const block = scratch + pyops_product_scratch(k);
        float *const c = in_image ? dst.p + piece * dst.image + m * dst.plane + j : block;
        const int64_t ldc = in_image ? dst.plane : columns;
        if (bias || !K)
            for (int64_t r = 0; r < rows; r++) k->fill(c + r * ldc, n, bias ? bias[m + r] : 0.0f);
        for (int64_t pb = 0; pb < K; pb += steps) {
            const int64_t kb = pyops_min(steps, K - pb);
            pack_windows(k, packed, block + columns * M, w, g * C, q, n, pb, kb);
            pyops_product_packed(k, c, ldc, (pyops_view){filters + m * K + pb, K, 1}, packed, NULL, rows, n, kb, 0, n,
                                 pb || bias ? PYOPS_ADD : 0, rest);
        }
        for (int64_t from = 0, run; !in_image && from < n; from += run) {
            const int64_t p = (q + from) % area;
            float *const to = dst.p + (q + from) / area * dst.image + m * dst.plane + p;
            run = pyops_min(area - p, n - from);
            if (run == 4) { /* images of a few positions: a call for each would take longer than its copy */
                for (int64_t r = 0; r < rows; r++) memcpy(to + r * dst.plane, c + r * ldc + from, 4 * sizeof *to);
            } else if (run == 1) {
                for (int64_t r = 0; r < rows; r++) to[r * dst.plane] = c[r * ldc + from];
            } else {
                for (int64_t r = 0; r < rows; r++) pyops_copy(to + r * dst.plane, c + r * ldc + from, run);
            }
        }
    }
    return failed
        ? pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %zu packed floats per thread", who, pyops_product_scratch(k) + own)
        : PYOPS_OK;
}

/* ---- Winograd's algorithm: 16 multiplications for 2 x 2 results of a 3 x 3 filter instead of 36 -------------------------- */
/* Columns of a block; fewer channels do not repay the transforms. */
#define TILES PYOPS_TUNED(conv2d_tiles, 64, 1, 256, 1)
#define WINOGRAD_CHANNELS PYOPS_TUNED(conv2d_winograd_channels, 16, 1, 64, 1)

/* Whether M filters of C channels on rows of W results are computed so: most lanes of a vector of tiles must be used. */
static int has_tiles(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W) {
    const int64_t tiles = ceil_div(W, 2);
    return s->kh == 3 && s->kw == 3 && s->stride_h == 1 && s->stride_w == 1 && s->dilation_h == 1 && s->dilation_w == 1 &&
        s->groups == 1 && pyops_min(M, C) >= WINOGRAD_CHANNELS && 4 * tiles >= 3 * pyops_round_up(tiles, PYOPS_LANES);
}
static int64_t tile_filters_size(int64_t M, int64_t C) { return 16 * M * C; }

/* The tiles of images (N,C,H,W) for results (rows,cols); the first starts at (top,left). */
static pyops_tiles tiles_of(const float *source, int64_t N, int64_t C, int64_t H, int64_t W, int64_t top, int64_t left,
                            int64_t rows, int64_t cols) {
    return (pyops_tiles){.source = source,
                         .size = N * C * H * W,
                         .image = C * H * W,
                         .channel = H * W,
                         .H = H,
                         .W = W,
                         .top = top,
                         .left = left,
                         .rows = ceil_div(rows, 2),
                         .lanes = pyops_round_up(ceil_div(cols, 2), PYOPS_LANES)};
}

/* G g G' of a filter, to 16 places that are ld apart.  step: 1, or -1 for a filter turned by half a turn, with g at its end. */
static void transform_filter(float *to, int64_t ld, const float *g, int64_t step) {
    float rows[4][3];
    for (int b = 0; b < 3; b++, g += step) {
        const float g_0 = g[0], g_1 = g[3 * step], g_2 = g[6 * step];
        rows[0][b] = g_0;
        rows[1][b] = 0.5f * (g_0 + g_1 + g_2);
        rows[2][b] = 0.5f * (g_0 - g_1 + g_2);
        rows[3][b] = g_2;
    }
    for (int a = 0; a < 4; a++) {
        const float *const r = rows[a];
        to[(4 * a) * ld] = r[0];
        to[(4 * a + 1) * ld] = 0.5f * (r[0] + r[1] + r[2]);
        to[(4 * a + 2) * ld] = 0.5f * (r[0] - r[1] + r[2]);
        to[(4 * a + 3) * ld] = r[2];
    }
}

/* dweight[0..9) += G' u G, for 16 elements u that are ld apart. */
static void add_filter(float *dweight, const float *u, int64_t ld) {
    float rows[3][4];
    for (int j = 0; j < 4; j++, u += ld) {
        const float sum = 0.5f * (u[4 * ld] + u[8 * ld]);
        rows[0][j] = u[0] + sum;
        rows[1][j] = 0.5f * (u[4 * ld] - u[8 * ld]);
        rows[2][j] = sum + u[12 * ld];
    }
    for (int i = 0; i < 3; i++) {
        const float *const r = rows[i], sum = 0.5f * (r[1] + r[2]);
        dweight[3 * i] += r[0] + sum;
        dweight[3 * i + 1] += 0.5f * (r[1] - r[2]);
        dweight[3 * i + 2] += sum + r[3];
    }
}

/* The rows of tiles in a block. */
static int64_t block_rows(const pyops_tiles *t) { return pyops_max(1, TILES / t->lanes); }

/* dst[n] (M, H, W) = the images of t (C channels) times filters, 16 matrices (M,C), plus bias. */
static pyops_status correlate_tiles(const char *who, planes dst, int64_t H, int64_t W, const float *filters, const float *bias,
                                    pyops_tiles t, int64_t N, int64_t M, int64_t C) {
    const pyops_kernels *k = pyops_active();
    const int64_t n = block_rows(&t), most = pyops_round_up(n * t.lanes, k->NR), all = N * t.rows;
    /* a cache line more, since strides of a power of 2 would map all 16 matrices to one set of L1 */
    const int64_t ld_x = C * most + PYOPS_LANES, ld_y = M * most + PYOPS_LANES;
    const size_t floats = pyops_product_scratch(k) + (size_t)(16 * (ld_x + ld_y));
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (16 * all * t.lanes * M * C > PYOPS_SHARE_FMAS)
    for (int64_t q = 0; q < all; q += n) {
        const int64_t rows = pyops_min(n, all - q), columns = rows * t.lanes;
        float *const scratch = pyops_scratch_or_fail(floats, &failed);
        if (!scratch) continue;
        float *const x = scratch + pyops_product_scratch(k), *const y = x + 16 * ld_x;
        for (int64_t c = 0; c < C; c += k->KC)
            k->winograd_in(x + c * pyops_round_up(columns, k->NR), ld_x, k->NR, &t, c, pyops_min(k->KC, C - c), q, rows);
        for (int64_t p = 0; p < 16; p++)
            pyops_product_packed(k, y + p * ld_y, most, (pyops_view){filters + p * M * C, C, 1}, x + p * ld_x, NULL, M, columns,
                                 C, 0, columns, 0, scratch);
        k->winograd_out(dst.p, dst.image, dst.plane, H, W, y, ld_y, most, &t, bias, M, q, rows);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %zu floats per thread", who, floats) : PYOPS_OK;
}

/* ---- the parts of `work` ------------------------------------------------------------------------------------------------- */
static int64_t taps_size(const pyops_conv2d *s) {
    return s->kh * s->kw * (int64_t)((sizeof(pyops_tap) + sizeof(filter_place)) / sizeof(float)) + 2;
}
static int64_t filters_size(const pyops_conv2d *s) { return s->O * (s->C / s->groups) * s->kh * s->kw; }
/* The filters as the product for M results of C channels takes them, on rows of W results. */
static int64_t factors_size(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W) {
    return has_tiles(s, M, C, W) ? tile_filters_size(M, C) : filters_size(s);
}

/* The taps, aligned, at the start of work. */
static pyops_tap *taps_in(float *work) { return (pyops_tap *)(((uintptr_t)work + 7) & ~(uintptr_t)7); }
static filter_place *places_in(float *work, const pyops_conv2d *s) { return (filter_place *)(taps_in(work) + s->kh * s->kw); }

/* ---- forward ------------------------------------------------------------------------------------------------------------- */
int64_t pyops_conv2d_forward_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    return taps_size(&s) + phases_size(&s) + factors_size(&s, O, C, Wo);
}

pyops_status pyops_conv2d_forward(float *y, const float *x, const float *weight, const float *bias, float *work, SIZES,
                                  void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_forward", &s);
    if (status || !N) return status;
    pyops_tap *const taps = taps_in(work);
    filter_place *const places = places_in(work, &s);
    float *const phases = work + taps_size(&s), *const filters = phases + phases_size(&s);
    const planes to = {y, O * Ho * Wo, Ho * Wo};
    if (has_tiles(&s, O, C, Wo) && !pyops_active()->micro.is_bf16) {
        #pragma omp parallel for schedule(static) if (16 * O * C > PYOPS_SHARE_FLOATS)
        for (int64_t i = 0; i < O * C; i++) transform_filter(filters + i, O * C, weight + 9 * i, 1);
        const pyops_tiles t = tiles_of(x, N, C, H, W, -pad_h, -pad_w, Ho, Wo);
        return correlate_tiles("conv2d_forward", to, Ho, Wo, filters, bias, t, N, O, C);
    }
    const int64_t T = taps_of_x(taps, places, &s), all = kh * kw, Cg = C / groups;
    const pyops_windows w = windows_of_x(x, phases, taps, places, T, &s);
    for (int64_t i = 0; T < all && i < O * Cg; i++)
        for (int64_t t = 0; t < T; t++) filters[i * T + t] = weight[i * all + places[t].a * kw + places[t].b];
    return correlate("conv2d_forward", to, T < all ? filters : weight, bias, &w, O / groups, Cg, groups);
}

/* ---- the gradient of x --------------------------------------------------------------------------------------------------- */
static int64_t phase_size(const pyops_conv2d *s) {
    return s->N * s->C * ceil_div(s->H, s->stride_h) * ceil_div(s->W, s->stride_w);
}

int64_t pyops_conv2d_backward_x_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    return taps_size(&s) + factors_size(&s, C, O, W) + (is_strided(&s) ? pyops_min(stride_w, W) * phase_size(&s) : 0);
}

pyops_status pyops_conv2d_backward_x(float *dx, const float *dy, const float *weight, float *work, SIZES, void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    pyops_status status = check_conv2d("conv2d_backward_x", &s);
    if (status || !N) return status;
    pyops_tap *const taps = taps_in(work);
    filter_place *const places = places_in(work, &s);
    float *const filters = work + taps_size(&s), *const phase = filters + filters_size(&s);
    const int64_t Cg = C / groups, Og = O / groups, all = kh * kw;
    if (has_tiles(&s, C, O, W) && !pyops_active()->micro.is_bf16) {
        #pragma omp parallel for schedule(static) if (16 * O * C > PYOPS_SHARE_FLOATS)
        for (int64_t i = 0; i < C * O; i++) /* filters (C,O), turned by half a turn */
            transform_filter(filters + i, C * O, weight + 9 * (i % O * C + i / O) + 8, -1);
        const pyops_tiles t = tiles_of(dy, N, O, Ho, Wo, pad_h - 2, pad_w - 2, H, W);
        return correlate_tiles("conv2d_backward_x", (planes){dx, C * H * W, H * W}, H, W, filters, NULL, t, N, C, O);
    }
    for (int64_t top = 0; top < pyops_min(stride_h, H) && !status; top++) {
        const int64_t rows = ceil_div(H - top, stride_h), lefts = pyops_min(stride_w, W), size = phase_size(&s);
        for (int64_t left = 0; left < lefts && !status; left++) {
            const int64_t T = taps_of_dy(taps, places, &s, top, left), cols = ceil_div(W - left, stride_w);
            const pyops_windows w = {.source = dy,
                                     .size = N * O * Ho * Wo,
                                     .image = O * Ho * Wo,
                                     .channel = Ho * Wo,
                                     .H = Ho,
                                     .W = Wo,
                                     .grid_h = rows,
                                     .grid_w = cols,
                                     .columns = N * rows * cols,
                                     .T = T,
                                     .taps = taps};
            #pragma omp parallel for schedule(static) if (O * Cg * T > PYOPS_SHARE_FLOATS)
            for (int64_t i = 0; i < C; i++) /* filters[c, (o, t)] = weight[o, c, t], group by group */
                for (int64_t o = 0; o < Og; o++)
                    for (int64_t t = 0; t < T; t++)
                        filters[(i * Og + o) * T + t] =
                            weight[((i / Cg * Og + o) * Cg + i % Cg) * all + places[t].a * kw + places[t].b];
            const planes to = {is_strided(&s) ? phase + left * size : dx, C * rows * cols, rows * cols};
            status = correlate("conv2d_backward_x", to, filters, NULL, &w, Cg, Og, groups);
        }
        #pragma omp parallel for schedule(static) if (N * C * rows * W > PYOPS_SHARE_FLOATS)
        for (int64_t c = 0; c < (is_strided(&s) && !status ? N * C : 0); c++)
            for (int64_t i = 0; i < rows; i++) {                /* whole rows of dx at a time */
                float *restrict const to = dx + (c * H + i * stride_h + top) * W;
                if (stride_w == 2 && W % 2 == 0) {
                    const float *restrict const even = phase + (c * rows + i) * (W / 2), *restrict const odd = even + size;
                    for (int64_t j = 0; j < W / 2; j++) to[2 * j] = even[j], to[2 * j + 1] = odd[j];
                    continue;
                }
                for (int64_t left = 0; left < lefts; left++) {
                    const int64_t cols = ceil_div(W - left, stride_w);
                    const float *const from = phase + left * size + (c * rows + i) * cols;
                    for (int64_t j = 0; j < cols; j++) to[j * stride_w + left] = from[j];
                }
            }
    }
    return status;
}

/* ---- the gradients of weight and bias ------------------------------------------------------------------------------------ */
static int64_t parts_of(const pyops_conv2d *s) {
    const int64_t blocks = ceil_div(s->N * s->Ho * s->Wo, BLOCK);
    return pyops_max(1, pyops_min(pyops_min(PARTS, blocks), PARTIAL / filters_size(s)));
}
static int64_t tile_parts_of(const pyops_conv2d *s) {
    const pyops_tiles t = tiles_of(NULL, s->N, s->C, s->H, s->W, 0, 0, s->Ho, s->Wo);
    const int64_t blocks = ceil_div(s->N * t.rows, block_rows(&t));
    return pyops_max(1, pyops_min(pyops_min(PARTS, blocks), PARTIAL / tile_filters_size(s->O, s->C)));
}

int64_t pyops_conv2d_backward_weight_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    const int64_t tiles = has_tiles(&s, O, C, Wo) ? tile_parts_of(&s) * tile_filters_size(O, C) : 0;
    return taps_size(&s) + phases_size(&s) + pyops_max(parts_of(&s) * filters_size(&s), tiles);
}

/* Rows of windows and of dy in scratch; not a multiple of 1024 bytes apart, which would map many rows to one set of L1. */
enum { ROW = BLOCK + PYOPS_LANES };

/* partial (M, C T) = sum over the columns [q, to) of dy[m, column] * window[k, column], for k in [first, last) of group g.
 * M, C: per group. */
static void add_windows(const pyops_kernels *k, float *partial, const pyops_windows *dy, const pyops_windows *w, int64_t M,
                        int64_t C, int64_t g, int64_t q, int64_t to, int64_t first, int64_t last, float *scratch) {
    const int64_t K = C * w->T, count = last - first;
    float *const rows = scratch + pyops_product_scratch(k), *const rows_of_dy = rows + k->MC * ROW;
    float *const packed = rows_of_dy + M * ROW, *const sums = packed + pyops_packed_b_size(k, BLOCK, M);
    float *const products = sums + count * M;       /* room for round_up(count, PYOPS_LANES) or MC rows of M */
    /* A panel of a product has NR columns: with few filters, products of rows waste less.  The two add in other orders. */
    const int by_rows = !k->micro.is_bf16 && 4 * M < 3 * pyops_round_up(M, k->is_exact ? 16 : k->NR);
    k->fill(sums, count * M, 0.0f);
    for (; q < to; q += BLOCK) {
        const int64_t n = pyops_min(BLOCK, to - q), padded = pyops_round_up(n, PYOPS_LANES);
        k->windows(rows_of_dy, ROW, dy, g * M, q, padded, 0, M);
        if (!by_rows) pyops_pack_b(k, packed, (pyops_view){rows_of_dy, 1, ROW}, n, M, 0, M);
        for (int64_t i = 0; i < count; i += k->MC) {
            const int64_t some = pyops_min(k->MC, count - i);
            k->windows(rows, ROW, w, g * C, q, padded, first + i, first + i + some);
            if (by_rows) {
                k->dot_products(products, rows, rows_of_dy, some, M, padded, M, ROW);
                k->add(sums + i * M, products, some * M);
            } else {
                pyops_product_packed(k, sums + i * M, M, (pyops_view){rows, ROW, 1}, packed, NULL, some, M, n, 0, M, PYOPS_ADD,
                                     scratch);
            }
        }
    }
    const int64_t padded = pyops_round_up(count, PYOPS_LANES);     /* the transpose writes whole vectors */
    k->transpose(products, sums, count, M, padded, M);
    for (int64_t m = 0; m < M; m++) pyops_copy(partial + m * K + first, products + m * padded, count);
}

/* The same for one channel per group and few filters, all groups at once. */
static void add_products(const pyops_kernels *k, float *partial, const pyops_windows *dy, const pyops_windows *w, int64_t M,
                         int64_t groups, int64_t q, int64_t to, float *sums) {
    const int64_t count = groups * M * w->T;
    k->fill(sums, count * PYOPS_LANES, 0.0f);
    k->windows_outer(sums, dy, w, groups, M, q, to - q);
    for (int64_t i = 0; i < count; i++) {
        partial[i] = 0.0f;
        for (int l = 0; l < PYOPS_LANES; l++) partial[i] += sums[i * PYOPS_LANES + l];
    }
}

/* dweight by Winograd's algorithm: the gradients of the transformed filters are 16 products over all tiles,
 * u (C,O) = tiles of x (C, tiles) x tiles of dy' (tiles, O), summed in parts of the batch. */
static pyops_status add_tiles(float *dweight, const float *dy, const float *x, float *partial, const pyops_conv2d *s) {
    const pyops_kernels *k = pyops_active();
    const pyops_tiles t = tiles_of(x, s->N, s->C, s->H, s->W, -s->pad_h, -s->pad_w, s->Ho, s->Wo);
    const pyops_tiles of_dy = tiles_of(dy, s->N, s->O, s->Ho, s->Wo, 0, 0, s->Ho, s->Wo);
    const int64_t C = s->C, O = s->O, n = block_rows(&t), columns = n * t.lanes, all = s->N * t.rows, blocks = ceil_div(all, n);
    const int64_t parts = tile_parts_of(s), size = tile_filters_size(O, C);
    const int64_t ld_x = C * columns + PYOPS_LANES, ld_y = O * columns + PYOPS_LANES;
    const size_t floats = pyops_product_scratch(k) + (size_t)(16 * (ld_x + ld_y) + pyops_packed_b_size(k, columns, O));
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (all * t.lanes * size > PYOPS_SHARE_FMAS)
    for (int64_t part = 0; part < parts; part++) {
        float *const scratch = pyops_scratch_or_fail(floats, &failed), *const u = partial + part * size;
        if (!scratch) continue;
        float *const tiles = scratch + pyops_product_scratch(k), *const gradients = tiles + 16 * ld_x;
        float *const packed = gradients + 16 * ld_y;
        const int64_t first = part * blocks / parts, last = (part + 1) * blocks / parts;
        for (int64_t b = first; b < last; b++) {
            const int64_t rows = pyops_min(n, all - b * n), width = rows * t.lanes;
            k->winograd_in(tiles, ld_x, columns, &t, 0, C, b * n, rows);
            k->winograd_back(gradients, ld_y, columns, &of_dy, O, b * n, rows);
            for (int64_t p = 0; p < 16; p++) {
                pyops_pack_b(k, packed, (pyops_view){gradients + p * ld_y, 1, columns}, width, O, 0, O);
                pyops_product_packed(k, u + p * C * O, O, (pyops_view){tiles + p * ld_x, columns, 1}, packed, NULL, C, O, width,
                                     0, O, b > first ? PYOPS_ADD : 0, scratch);
            }
        }
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "conv2d_backward_weight: no memory for %zu floats per thread", floats);
    #pragma omp parallel for schedule(static) if (parts * size > PYOPS_SHARE_FLOATS)
    for (int64_t p = 0; p < 16; p++)
        for (int64_t part = 1; part < parts; part++) k->add(partial + p * C * O, partial + part * size + p * C * O, C * O);
    #pragma omp parallel for schedule(static) if (size > PYOPS_SHARE_FLOATS)
    for (int64_t o = 0; o < O; o++)
        for (int64_t c = 0; c < C; c++) add_filter(dweight + 9 * (o * C + c), partial + c * O + o, C * O);
    return PYOPS_OK;
}

static void add_bias_gradient(float *dbias, const float *dy, int64_t N, int64_t O, int64_t area) {
    const pyops_kernels *k = pyops_active();
    /* Images of a few positions: first the sums of each position over the batch, some channels at a time. */
    enum { COLUMNS = 256, FEW_POSITIONS = 32 };
    const int64_t channels = pyops_max(COLUMNS / area, 1);
    #pragma omp parallel for schedule(static) if (N * O * area > PYOPS_SHARE_FLOATS)
    for (int64_t o = 0; o < (area <= FEW_POSITIONS ? O : 0); o += channels) {
        const int64_t some = pyops_min(channels, O - o);
        float sums[COLUMNS] = {0};
        for (int64_t n = 0; n < N; n++) k->add(sums, dy + (n * O + o) * area, some * area);
        for (int64_t c = 0; c < some; c++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < area; i++) sum += sums[c * area + i];
            dbias[o + c] += sum;
        }
    }
    #pragma omp parallel for schedule(static) if (N * O * area > PYOPS_SHARE_FLOATS)
    for (int64_t o = 0; o < (area > FEW_POSITIONS ? O : 0); o++) {
        float sum = 0.0f;
        for (int64_t n = 0; n < N; n++) sum += k->sum_shifted(dy + (n * O + o) * area, 0.0f, area);
        dbias[o] += sum;
    }
}

pyops_status pyops_conv2d_backward_weight(float *dweight, float *dbias, const float *dy, const float *x, float *work, SIZES,
                                          void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    pyops_status status = check_conv2d("conv2d_backward_weight", &s);
    if (status || !N) return status;
    const pyops_kernels *k = pyops_active();
    if (has_tiles(&s, O, C, Wo) && !k->micro.is_bf16) {
        status = add_tiles(dweight, dy, x, work + taps_size(&s), &s);
        if (!status && dbias) add_bias_gradient(dbias, dy, N, O, Ho * Wo);
        return status;
    }
    pyops_tap *const taps = taps_in(work);
    filter_place *const places = places_in(work, &s);
    float *const phases = work + taps_size(&s), *const partial = phases + phases_size(&s);
    const int64_t T = taps_of_x(taps, places, &s), C1 = C / groups, M = O / groups, K = C1 * T, area = Ho * Wo;
    const pyops_windows w = windows_of_x(x, phases, taps, places, T, &s);
    const pyops_tap here = {0, 0, 0};
    const pyops_windows of_dy = {.source = dy,
                                 .size = N * O * area,
                                 .image = O * area,
                                 .channel = area,
                                 .H = Ho,
                                 .W = Wo,
                                 .grid_h = Ho,
                                 .grid_w = Wo,
                                 .columns = w.columns,
                                 .T = 1,
                                 .taps = &here};
    const int64_t parts = parts_of(&s), blocks = ceil_div(w.columns, BLOCK), threads = omp_get_max_threads();
    const int direct = is_direct(k, C1, M, T), is_large = w.columns * O * K > PYOPS_SHARE_FMAS;
    const int64_t units = direct ? 1 : groups;
    const int64_t cuts = direct || !is_large ? 1 : pyops_min(ceil_div(threads, parts * groups), ceil_div(K, k->MR));
    const int64_t rows = ceil_div(K, pyops_max(cuts, 1));
    const size_t floats = direct ? (size_t)(O * T * PYOPS_LANES)
                                 : pyops_product_scratch(k) +
            (size_t)((k->MC + M) * ROW + pyops_packed_b_size(k, BLOCK, M) + (rows + PYOPS_LANES + pyops_max(rows, k->MC)) * M);
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (is_large)
    for (int64_t i = 0; i < (K ? parts * units * cuts : 0); i++) {
        const int64_t part = i / cuts / units, g = i / cuts % units, first = i % cuts * rows;
        const int64_t q = part * blocks / parts * BLOCK, to = pyops_min((part + 1) * blocks / parts * BLOCK, w.columns);
        if (first >= K) continue;
        float *const scratch = pyops_scratch_or_fail(floats, &failed), *const its = partial + (part * O + g * M) * K;
        if (!scratch) continue;
        if (direct) add_products(k, its, &of_dy, &w, M, groups, q, to, scratch);
        else add_windows(k, its, &of_dy, &w, M, C1, g, q, to, first, pyops_min(first + rows, K), scratch);
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "conv2d_backward_weight: no memory for %zu floats per thread", floats);
    #pragma omp parallel for schedule(static) if (parts * O * K > PYOPS_SHARE_FLOATS)
    for (int64_t o = 0; o < O; o++) {
        float *const sums = partial + o * K, *const to = dweight + o * C1 * kh * kw;
        for (int64_t part = 1; part < parts; part++) k->add(sums, partial + (part * O + o) * K, K);
        if (T == kh * kw) k->add(to, sums, K);          /* the taps are in the order of the filter */
        for (int64_t c = 0; T < kh * kw && c < C1; c++)
            for (int64_t t = 0; t < T; t++) to[(c * kh + places[t].a) * kw + places[t].b] += sums[c * T + t];
    }
    if (dbias) add_bias_gradient(dbias, dy, N, O, area);
    return PYOPS_OK;
}

/* ---- doubles, for checks of gradients: a plain loop over the pairs of elements for each map --------------------------- */

/* The positions p of n for which first + p stride is in an axis of `size` elements. */
static pyops_range inside(int64_t first, int64_t stride, int64_t n, int64_t size) {
    const int64_t from = first < 0 ? ceil_div(-first, stride) : 0, to = first < size ? ceil_div(size - first, stride) : 0;
    return (pyops_range){from, pyops_min(to, n)};
}

/* Run a statement for each element `place` of a plane of y and the element `seen` of a plane of x that position (a, b) of a
 * filter multiplies there. */
#define EACH_PAIR(s, a, b, ...) \
    do { \
        const int64_t top = (a) * (s)->dilation_h - (s)->pad_h, left = (b) * (s)->dilation_w - (s)->pad_w; \
        const pyops_range rows = inside(top, (s)->stride_h, (s)->Ho, (s)->H); \
        const pyops_range cols = inside(left, (s)->stride_w, (s)->Wo, (s)->W); \
        for (int64_t i = rows.from; i < rows.to; i++) \
            for (int64_t j = cols.from; j < cols.to; j++) { \
                const int64_t place = i * (s)->Wo + j; \
                const int64_t seen = (top + i * (s)->stride_h) * (s)->W + left + j * (s)->stride_w; \
                __VA_ARGS__; \
            } \
    } while (0)

static int64_t multiply_adds(const pyops_conv2d *s) { return s->N * s->O * s->Ho * s->Wo * s->C / s->groups * s->kh * s->kw; }

pyops_status pyops_conv2d_forward_double(double *y, const double *x, const double *weight, SIZES, void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_forward_double", &s);
    if (status) return status;
    const int64_t own = C / groups, M = O / groups;
    PYOPS_FOR(plane, N * O, multiply_adds(&s) > PYOPS_SHARE_FMAS, {
        const int64_t n = plane / O, o = plane % O;
        double *const to = y + plane * Ho * Wo;
        memset(to, 0, (size_t)(Ho * Wo) * sizeof *to);
        for (int64_t c = 0; c < own; c++) {
            const double *const from = x + (n * C + o / M * own + c) * H * W;
            for (int64_t a = 0; a < kh; a++)
                for (int64_t b = 0; b < kw; b++) {
                    const double factor = weight[((o * own + c) * kh + a) * kw + b];
                    EACH_PAIR(&s, a, b, to[place] += factor * from[seen]);
                }
        }
    });
    return PYOPS_OK;
}

pyops_status pyops_conv2d_backward_x_double(double *dx, const double *dy, const double *weight, SIZES, void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_backward_x_double", &s);
    if (status) return status;
    const int64_t own = C / groups, M = O / groups;
    PYOPS_FOR(plane, N * C, multiply_adds(&s) > PYOPS_SHARE_FMAS, {
        const int64_t n = plane / C, g = plane % C / own, c = plane % own;
        double *const to = dx + plane * H * W;
        memset(to, 0, (size_t)(H * W) * sizeof *to);
        for (int64_t o = g * M; o < (g + 1) * M; o++) {
            const double *const from = dy + (n * O + o) * Ho * Wo;
            for (int64_t a = 0; a < kh; a++)
                for (int64_t b = 0; b < kw; b++) {
                    const double factor = weight[((o * own + c) * kh + a) * kw + b];
                    EACH_PAIR(&s, a, b, to[seen] += factor * from[place]);
                }
        }
    });
    return PYOPS_OK;
}

pyops_status pyops_conv2d_backward_weight_double(double *dweight, const double *dy, const double *x, SIZES, void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    const pyops_status status = check_conv2d("conv2d_backward_weight_double", &s);
    if (status) return status;
    const int64_t own = C / groups, M = O / groups;
    PYOPS_FOR(filter, O * own, multiply_adds(&s) > PYOPS_SHARE_FMAS, {
        const int64_t o = filter / own, c = o / M * own + filter % own;
        for (int64_t a = 0; a < kh; a++)
            for (int64_t b = 0; b < kw; b++) {
                double sum = 0.0;
                for (int64_t n = 0; n < N; n++) {
                    const double *const of_y = dy + (n * O + o) * Ho * Wo, *const of_x = x + (n * C + c) * H * W;
                    EACH_PAIR(&s, a, b, sum += of_y[place] * of_x[seen]);
                }
                dweight[(filter * kh + a) * kw + b] += sum;
            }
    });
    return PYOPS_OK;
}
