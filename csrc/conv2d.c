/* conv2d.c - convolutions in two dimensions as matrix products, without the matrix of windows in memory.
 *
 *     forward          y  (O, N Ho Wo)         =  weight (O, C kh kw)   x  windows of x (C kh kw, N Ho Wo)
 *     backward_x       dx (C, N H W)           =  weight' (C, O kh kw)  x  windows of dy (O kh kw, N H W)
 *     backward_weight  dweight' (C kh kw, O)  +=  windows of x          x  dy' (N Ho Wo, O)
 *
 * A block of an image is copied with its padding, so that a tap is an offset; tiles of sums read shifted vectors of it
 * (kernels/planes.inc).  If most of a vector would be unused, and with bfloat16, windows are written straight into the panels of
 * a product, a block of columns at a time (kernels/windows.inc), and each block stays in L2 while all filters use it.
 *
 * A convolution with strides (s, t) reads every s-th row and every t-th column.  x is split into its phases when it is copied:
 * element (i, j) of phase (p, r) is x[i s + p, j t + r].  A tap then reads adjacent elements of one phase, as with stride 1.
 * backward_x does the reverse: a phase of dx is a convolution of dy with stride 1 and some of the taps.
 *
 * Filters of 3 x 3 on many channels take 16 products of tiles instead (kernels/winograd.inc).
 *
 * Threads share blocks and, for dweight, parts of the batch; the parts depend on the sizes alone.
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* The kernels of a net follow each other, so the threads are still awake, and sharing repays with less work than elsewhere.
 * Floats that are transposed or gathered take longer than those that are read one after the other. */
#define SHARE_FMAS (PYOPS_SHARE_FMAS / 4)
#define SHARE_FLOATS (PYOPS_SHARE_FLOATS / 8)

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
    int64_t part_row, part_col;         /* element t of this array: the phase that is plane t of a channel */
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
            places[T] = (filter_place){a, b, y - row * s->stride_h, x - col * s->stride_w, 0, 0};
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
            places[T] = (filter_place){a, b, 0, 0, 0, 0};
            taps[T++] = (pyops_tap){0, row, col};
        }
    return T;
}

static int64_t taps_size(const pyops_conv2d *s) {
    return s->kh * s->kw * (int64_t)((sizeof(pyops_tap) + sizeof(filter_place)) / sizeof(float)) + 2;
}

/* The taps, aligned, at the start of work. */
static pyops_tap *taps_in(float *work) { return (pyops_tap *)(((uintptr_t)work + 7) & ~(uintptr_t)7); }
static filter_place *places_in(float *work, const pyops_conv2d *s) { return (filter_place *)(taps_in(work) + s->kh * s->kw); }

/* ---- phases of x --------------------------------------------------------------------------------------------------------- */
static int is_strided(const pyops_conv2d *s) { return s->stride_h > 1 || s->stride_w > 1; }

/* The phases that taps read, at most min(kh, stride_h) min(kw, stride_w). */
static int64_t most_phases(const pyops_conv2d *s) { return pyops_min(s->kh, s->stride_h) * pyops_min(s->kw, s->stride_w); }

/* The floats of an image, or of its phases. */
static int64_t image_size(const pyops_conv2d *s) {
    if (!is_strided(s)) return s->C * s->H * s->W;
    return s->C * most_phases(s) * ceil_div(s->H, s->stride_h) * ceil_div(s->W, s->stride_w);
}
static int64_t phases_size(const pyops_conv2d *s) { return is_strided(s) ? s->N * image_size(s) : 0; }

/* An x (images, channels, H, W) whose phases are the planes of windows; places: of `count` phases of a channel. */
typedef struct {
    const float *x;
    int64_t channels, H, W, step_h, step_w, count;
    const filter_place *places;
} unsplit;

/* Rows and columns of phase p. */
static int64_t phase_rows(const unsplit *u, int64_t p) { return ceil_div(u->H - u->places[p].part_row, u->step_h); }
static int64_t phase_cols(const unsplit *u, int64_t p) { return ceil_div(u->W - u->places[p].part_col, u->step_w); }

/* Windows of x for stride 1.  With strides, set the planes of the taps and `u`, the source of windows that have none yet. */
static pyops_windows windows_of_x(unsplit *u, const float *x, pyops_tap *taps, filter_place *places, int64_t T,
                                  const pyops_conv2d *s) {
    const int64_t H = ceil_div(s->H, s->stride_h), W = ceil_div(s->W, s->stride_w);
    int64_t count = 1;
    if (is_strided(s)) {
        count = 0;
        for (int64_t t = 0; t < T; t++) {
            int64_t p = 0;
            while (p < count && (places[p].part_row != places[t].row_phase || places[p].part_col != places[t].col_phase)) p++;
            if (p == count) places[p].part_row = places[t].row_phase, places[p].part_col = places[t].col_phase, count++;
            taps[t].plane = p * H * W;
        }
        *u = (unsplit){x, s->C, s->H, s->W, s->stride_h, s->stride_w, count, places};
    }
    const int64_t channel = count * H * W;
    return (pyops_windows){.source = is_strided(s) ? NULL : x,
                           .size = s->N * s->C * channel,
                           .image = s->C * channel,
                           .channel = channel,
                           .H = H,
                           .W = W,
                           .grid_h = s->Ho,
                           .grid_w = s->Wo,
                           .columns = s->N * s->Ho * s->Wo,
                           .T = T,
                           .taps = taps};
}

/* The same windows with a source: the phases of u, in `phases`. */
static pyops_windows split(float *phases, const pyops_windows *w, const unsplit *u) {
    pyops_windows all = *w;
    all.source = phases;
    const int64_t images = w->columns / (w->grid_h * w->grid_w);
    #pragma omp parallel for schedule(static) if (w->size > SHARE_FLOATS)
    for (int64_t c = 0; c < images * u->channels; c++)          /* all phases of a channel: it is read from memory once */
        for (int64_t p = 0; p < u->count; p++) {
            const int64_t rows = phase_rows(u, p), cols = phase_cols(u, p);
            float *to = phases + c * w->channel + p * w->H * w->W;
            const float *from = u->x + (c * u->H + u->places[p].part_row) * u->W + u->places[p].part_col;
            for (int64_t i = 0; i < rows; i++, to += w->W, from += u->step_h * u->W) {
                for (int64_t j = 0; j < cols; j++) to[j] = from[j * u->step_w];
                if (cols < w->W) to[cols] = 0.0f;           /* the last phases may have a row or a column less */
            }
            if (rows < w->H) memset(to, 0, (size_t)w->W * sizeof *to);
        }
    return all;
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
        if (k->micro.is_bf16 || k->micro.is_split) {
            k->windows(rows, padded, w, c, q, padded, from + pc, from + pc + kc);
            k->micro.pack_b(to, rows, 1, padded, n, kc);
        } else {
            for (int64_t j = 0; j < n; j += k->NR)
                k->windows(to + j * kc, k->NR, w, c, q + j, k->NR, from + pc, from + pc + kc);
        }
    }
}

/* ---- planes: blocks of images with their padding in memory (kernels/planes.inc) ------------------------------------------ */
#define PLANES PYOPS_TUNED(conv2d_planes, 1 << 16, 1, 1 << 18, 1)

/* A block is `rows` x `cols` positions of the grid of an image, in planes of `width` floats per row.  They start at the
 * position plus (top, left), and extend `high` rows and `wide` columns beyond the block. */
typedef struct {
    int64_t top, left, high, wide, rows, cols, across, count;   /* count: blocks of an image; across: in a row of blocks */
    int64_t width, parts, size, n;      /* parts: planes of a channel; size: floats of a plane; n: positions, as padded */
    int by_row;                         /* whether rows are computed one by one, without the positions between them */
} plane_blocks;

/* Blocks so that C channels and M results fit in L2. */
static plane_blocks plane_blocks_of(const pyops_windows *w, int64_t C, int64_t M) {
    const pyops_tap first = w->T ? w->taps[0] : (pyops_tap){0, 0, 0};
    plane_blocks b = {.top = first.row, .left = first.col, .parts = w->channel / (w->H * w->W)};
    int64_t bottom = first.row, right = first.col;
    for (int64_t t = 1; t < w->T; t++) {
        b.top = pyops_min(b.top, w->taps[t].row), bottom = pyops_max(bottom, w->taps[t].row);
        b.left = pyops_min(b.left, w->taps[t].col), right = pyops_max(right, w->taps[t].col);
    }
    b.high = bottom - b.top, b.wide = right - b.left;
    const int64_t planes = C * b.parts, floats = PLANES;
    const int64_t cols = pyops_max(floats / (planes * (b.high + 1) + M) - b.wide, 4 * PYOPS_LANES);
    b.cols = pyops_min(pyops_round_up(ceil_div(w->grid_w, ceil_div(w->grid_w, cols)), PYOPS_LANES), w->grid_w);
    b.across = ceil_div(w->grid_w, b.cols);
    b.width = b.cols + b.wide;
    const int64_t rows = pyops_max(floats / b.width / (planes + M) - b.high, 1), down = ceil_div(w->grid_h, rows);
    b.rows = ceil_div(w->grid_h, down), b.count = b.across * ceil_div(w->grid_h, b.rows);
    b.n = pyops_round_up((b.rows - 1) * b.width + b.cols, PYOPS_LANES);
    b.by_row = w->grid_w % PYOPS_LANES == 0 && 16 * b.n > 17 * b.rows * b.cols;
    /* an odd number of cache lines, so that equal positions of all planes are in different sets of L1 */
    b.size = pyops_round_up((b.rows + b.high) * b.width, 2 * PYOPS_LANES) + PYOPS_LANES;
    return b;
}

/* Whether most positions of the planes are positions of the grid, or a product of windows would have one or two rows only.  If
 * many channels leave room for few positions in a block, products of windows, which all filters share, take less time. */
enum { FEW_FILTERS = 16, SHORT = 256 };
static int has_planes(const pyops_kernels *k, const pyops_windows *w, const plane_blocks *b, int64_t C, int64_t M) {
    const int is_full = b->by_row || 4 * b->rows * b->cols >= 3 * b->n;
    if (k->micro.is_bf16 || !w->T || (M > FEW_FILTERS && b->n < SHORT)) return 0;
    return is_full || (C == 1 && M <= 2);
}

/* The floats of the planes of C channels, with room for the last vectors. */
static int64_t planes_size(const plane_blocks *b, int64_t C) {
    return C * b->parts * b->size + pyops_round_up(b->n, PYOPS_LANES) + 4 * PYOPS_LANES;
}

/* Block i of image n in channels [c, c + C) of w, or of u, if that is not NULL. */
static void fetch_planes(const pyops_kernels *k, float *planes, const pyops_windows *w, const unsplit *u, const plane_blocks *b,
                         int64_t n, int64_t i, int64_t c, int64_t C) {
    const int64_t top = i / b->across * b->rows + b->top, left = i % b->across * b->cols + b->left;
    const int64_t first = pyops_max(top, 0), from = pyops_max(left, 0), before = (first - top) * b->width + from - left;
    for (int64_t p = 0; p < C * b->parts; p++) {
        const int64_t part = p % b->parts, H = u ? phase_rows(u, part) : w->H, W = u ? phase_cols(u, part) : w->W;
        const int64_t last = pyops_min(top + b->rows + b->high, H), to = pyops_min(left + b->width, W);
        const int64_t rows = from < to ? pyops_max(last - first, 0) : 0;
        float *const plane = planes + p * b->size;
        if (!u) {
            const float *const source = w->source + n * w->image + c * w->channel + p * H * W + first * W + from;
            k->planes_in(plane, b->width, source, W, rows, rows ? before : 0, to - from, b->size, 1, 0, 1);
        } else {
            const int64_t row = first * u->step_h + u->places[part].part_row;
            const float *const source = u->x + ((n * u->channels + c + p / b->parts) * u->H + row) * u->W + from * u->step_w;
            k->planes_in(plane, b->width, source, u->step_h * u->W, rows, rows ? before : 0, to - from, b->size, u->step_w,
                         u->places[part].part_col, u->W % u->step_w == 0);
        }
    }
}

/* ---- batches as rows of vectors ------------------------------------------------------------------------------------------
 * Narrow images would leave most of a vector unused.  So the batch is cut into pieces, and each is transposed, (n, C, H, W) to
 * (C, H, W, lanes): an image with rows of W lanes floats, whose taps are `lanes` times as far apart. */
enum { NARROW = 8, LEAST_BATCH = 16 };
#define LANES PYOPS_TUNED(conv2d_lanes, 32, 16, 64, 16)

static int is_narrow(int64_t N, int64_t cols) { return N >= LEAST_BATCH && cols <= NARROW; }
static int64_t lanes_for(int64_t N) { return pyops_round_up(ceil_div(N, ceil_div(N, LANES)), PYOPS_LANES); }
/* Floats of a batch of n floats per image in this layout. */
static int64_t spread_size(int64_t N, int64_t n) { return ceil_div(N, lanes_for(N)) * lanes_for(N) * n; }

/* to = images of n floats in this layout; lanes without an image are zeros. */
static void spread(float *to, const float *images, int64_t N, int64_t n) {
    const pyops_kernels *k = pyops_active();
    const int64_t L = lanes_for(N);
    #pragma omp parallel for schedule(static) if (N * n > SHARE_FLOATS)
    for (int64_t i = 0; i < N; i += L) {
        const int64_t some = pyops_min(L, N - i);
        if (pyops_round_up(some, PYOPS_LANES) < L) k->fill(to + i * n, L * n, 0.0f);
        k->transpose(to + i * n, images + i * n, some, n, L, n);
    }
}

/* The same for the phases of u, in the layout of w. */
static pyops_status spread_phases(float *to, const pyops_windows *w, const unsplit *u, int64_t N) {
    const pyops_kernels *k = pyops_active();
    enum { ELEMENTS = 64 };             /* of an image that are transposed at a time, at least a row */
    const int64_t L = lanes_for(N), all = u->channels * u->H, n = u->H * u->W * u->channels;
    const int64_t at_once = pyops_max(ELEMENTS / u->W, 1), pieces = ceil_div(all, at_once);
    const int has_gaps = u->H % u->step_h || u->W % u->step_w;
    const size_t floats = (size_t)(at_once * u->W * L);
    int failed = 0;
    if (has_gaps) k->fill(to, spread_size(N, w->image), 0.0f);
    #pragma omp parallel for schedule(static) if (N * n > SHARE_FLOATS)
    for (int64_t unit = 0; unit < ceil_div(N, L) * pieces; unit++) {
        const int64_t i = unit / pieces * L, first = unit % pieces * at_once, rows = pyops_min(at_once, all - first);
        const int64_t some = pyops_min(L, N - i);
        float *const lines = pyops_scratch_or_fail(floats, &failed);
        if (!lines) continue;
        if (pyops_round_up(some, PYOPS_LANES) < L) k->fill(lines, rows * u->W * L, 0.0f);
        k->transpose(lines, u->x + i * n + first * u->W, some, rows * u->W, L, n);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t c = (first + r) / u->H, row = (first + r) % u->H;
            for (int64_t p = 0; p < u->count; p++) {
                if (u->places[p].part_row != row % u->step_h) continue;
                float *const line = to + i * w->image + (c * w->channel + (p * w->H + row / u->step_h) * w->W) * L;
                k->planes_out(line, L, lines + (r * u->W + u->places[p].part_col) * L, u->step_w * L, phase_cols(u, p));
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "conv2d: no memory for %zu floats per thread", floats) : PYOPS_OK;
}

/* The reverse of spread. */
static void collect(float *images, const float *from, int64_t N, int64_t n) {
    const pyops_kernels *k = pyops_active();
    const int64_t L = lanes_for(N), whole = n / PYOPS_LANES * PYOPS_LANES;      /* transpose() writes whole vectors */
    #pragma omp parallel for schedule(static) if (N * n > SHARE_FLOATS)
    for (int64_t i = 0; i < N; i += L) {
        const int64_t some = pyops_min(L, N - i);
        k->transpose(images + i * n, from + i * n, whole, some, n, L);
        for (int64_t j = 0; j < some; j++)
            for (int64_t e = whole; e < n; e++) images[(i + j) * n + e] = from[i * n + e * L + j];
    }
}

/* The windows `all` of N images of w, or of u, in this layout, in `to`, with their taps. */
static pyops_status spread_windows(pyops_windows *all, float *to, pyops_tap *taps, const pyops_windows *w, const unsplit *u,
                                   int64_t N) {
    const int64_t L = lanes_for(N);
    *all = *w;
    for (int64_t t = 0; t < w->T; t++) taps[t] = (pyops_tap){w->taps[t].plane * L, w->taps[t].row, w->taps[t].col * L};
    all->source = to, all->taps = taps;
    all->size = spread_size(N, w->image), all->image *= L, all->channel *= L;
    all->W *= L, all->grid_w *= L, all->columns = spread_size(N, w->grid_h * w->grid_w);
    if (u) return spread_phases(to, w, u, N);
    spread(to, w->source, N, w->image);
    return PYOPS_OK;
}

/* ---- products with planes ------------------------------------------------------------------------------------------------ */
/* Where each row of the windows of C channels starts in the planes. */
static void plane_offsets(int64_t *offsets, const pyops_windows *w, const plane_blocks *b, int64_t C) {
    for (int64_t c = 0; c < C; c++)
        for (int64_t t = 0; t < w->T; t++)
            offsets[c * w->T + t] = (c * b->parts + w->taps[t].plane / (w->H * w->W)) * b->size +
                (w->taps[t].row - b->top) * b->width + w->taps[t].col - b->left;
}

/* dst[n, m, :] = filters (groups M, C T) x windows (groups C T, columns) + bias, group by group. */
static pyops_status correlate_planes(const char *who, planes dst, const float *filters, const float *bias,
                                     const pyops_windows *w, const unsplit *u, const plane_blocks *b, int64_t M, int64_t C,
                                     int64_t groups) {
    const pyops_kernels *k = pyops_active();
    const int64_t K = C * w->T, images = w->columns / (w->grid_h * w->grid_w), size = planes_size(b, C);
    const size_t floats = (size_t)(size + M * b->n + PYOPS_LANES + K * (int64_t)(sizeof(int64_t) / sizeof(float)));
    int failed = 0;
    #pragma omp parallel if (w->columns * groups * M * K > SHARE_FMAS)
    {
        float *const x = pyops_scratch_or_fail(floats, &failed), *const sums = x + size;
        int64_t *const offsets = (int64_t *)(x + size + M * b->n + PYOPS_LANES);
        if (x) plane_offsets(offsets, w, b, C);
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < images * groups * b->count; i++) {
            if (!x) continue;
            const int64_t n = i / groups / b->count, g = i / b->count % groups, place = i % b->count;
            const int64_t row = place / b->across * b->rows, col = place % b->across * b->cols;
            const int64_t rows = pyops_min(b->rows, w->grid_h - row), cols = pyops_min(b->cols, w->grid_w - col);
            const int64_t columns = b->by_row ? cols : pyops_round_up((rows - 1) * b->width + cols, PYOPS_LANES);
            fetch_planes(k, x, w, u, b, n, place, g * C, C);
            for (int64_t r = 0; r < (b->by_row ? rows : 1); r++)
                for (int64_t pc = 0; pc < K; pc += k->KC)
                    k->planes_times(sums + r * b->width, b->n, x + r * b->width, offsets + pc, filters + g * M * K + pc, K,
                                    bias ? bias + g * M : NULL, M, pyops_min(k->KC, K - pc), columns, pc > 0);
            for (int64_t m = 0; m < M; m++) {
                float *const to = dst.p + n * dst.image + (g * M + m) * dst.plane + row * w->grid_w + col;
                if (cols == w->grid_w) k->planes_out(to, cols, sums + m * b->n, b->width, rows);
                else
                    for (int64_t r = 0; r < rows; r++)
                        k->planes_out(to + r * w->grid_w, cols, sums + m * b->n + r * b->width, b->width, 1);
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for %zu floats per thread", who, floats) : PYOPS_OK;
}

/* dst[n, m, :] = filters (groups M, C T) x windows (groups C T, columns) + bias, group by group.  u: NULL, or the source of the
 * windows, for which `phases` has room. */
static pyops_status correlate(const char *who, planes dst, const float *filters, const float *bias, const pyops_windows *w,
                              const unsplit *u, float *phases, int64_t M, int64_t C, int64_t groups, float *spare) {
    const pyops_kernels *k = pyops_active();            /* for products of windows another table, below */
    const int64_t K = C * w->T, area = w->grid_h * w->grid_w, N = w->columns / area, threads = omp_get_max_threads();
    if (is_narrow(N, w->grid_w) && K && !k->micro.is_bf16) {
        float *const source = (float *)(taps_in(spare) + w->T), *const results = source + spread_size(N, w->image);
        pyops_windows all;
        pyops_status status = spread_windows(&all, source, taps_in(spare), w, u, N);
        const plane_blocks of_all = plane_blocks_of(&all, C, M);
        const int64_t plane = area * lanes_for(N);
        if (!status)
            status = correlate_planes(who, (planes){results, groups * M * plane, plane}, filters, bias, &all, NULL, &of_all, M,
                                      C, groups);
        if (!status) collect(dst.p, results, N, groups * M * area);
        return status;
    }
    const plane_blocks blocks_of_planes = plane_blocks_of(w, C, M);
    if (has_planes(k, w, &blocks_of_planes, C, M))
        return correlate_planes(who, dst, filters, bias, w, u, &blocks_of_planes, M, C, groups);
    const pyops_windows of_phases = u ? split(phases, w, u) : *w;
    w = &of_phases;
    k = pyops_for_product(k, M, K);             /* not by the columns of a block, so that an image alone has the same bits */
    const int64_t steps = pyops_max(pyops_min(K, k->KB), 1);
    const int64_t most = pyops_min(512, pyops_max(PACKED / steps / k->NR, 2) * k->NR);
    /* blocks of columns within an image write to dst directly, unless much of their last panel would be empty */
    const int in_image = pyops_round_up(area, k->NR) * 16 <= area * 17;
    const int64_t length = in_image ? area : w->columns, pieces = in_image ? w->columns / area : 1;
    const int64_t blocks = ceil_div(length, most), columns = pyops_round_up(ceil_div(length, blocks), k->NR);
    const int is_large = w->columns * groups * M * K > SHARE_FMAS;
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

/* Rows of tiles are rounded up to a multiple of this.  It decides the order of sums for dweight, so with exact kernels it is
 * the same on every instruction set. */
static int64_t lanes_of(const pyops_kernels *k) { return k->is_exact ? PYOPS_LANES : k->lanes; }

/* Whether M filters of C channels on rows of W results are computed so: most lanes of a vector of tiles must be used. */
static int fills_tiles(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W, int64_t unit) {
    const int64_t tiles = ceil_div(W, 2);
    return s->kh == 3 && s->kw == 3 && s->stride_h == 1 && s->stride_w == 1 && s->dilation_h == 1 && s->dilation_w == 1 &&
        s->groups == 1 && pyops_min(M, C) >= WINOGRAD_CHANNELS && 4 * tiles >= 3 * pyops_round_up(tiles, unit);
}
static int has_tiles(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W) {
    return !pyops_active()->micro.is_bf16 && fills_tiles(s, M, C, W, lanes_of(pyops_active()));
}
/* The same with any precision, exact or not: a plan may be replayed with another one than it was recorded with. */
static int may_have_tiles(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W) {
    return fills_tiles(s, M, C, W, PYOPS_LANES) || fills_tiles(s, M, C, W, pyops_active()->lanes);
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
                         .lanes = pyops_round_up(ceil_div(cols, 2), lanes_of(pyops_active()))};
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
    #pragma omp parallel for schedule(dynamic) if (16 * all * t.lanes * M * C > SHARE_FMAS)
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
static int64_t filters_size(const pyops_conv2d *s) { return s->O * (s->C / s->groups) * s->kh * s->kw; }
/* The filters as the product for M results of C channels takes them, on rows of W results. */
static int64_t factors_size(const pyops_conv2d *s, int64_t M, int64_t C, int64_t W) {
    return may_have_tiles(s, M, C, W) ? tile_filters_size(M, C) : filters_size(s);
}

/* Room for images of n floats and results of m floats per image with the batch as the last axis, if rows of `cols` results are
 * narrow. */
static int64_t spare_size(const pyops_conv2d *s, int64_t cols, int64_t n, int64_t m) {
    return is_narrow(s->N, cols) ? taps_size(s) + spread_size(s->N, n + m) : 0;
}

/* ---- forward ------------------------------------------------------------------------------------------------------------- */
int64_t pyops_conv2d_forward_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    return taps_size(&s) + phases_size(&s) + factors_size(&s, O, C, Wo) + spare_size(&s, Wo, image_size(&s), O * Ho * Wo);
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
    if (has_tiles(&s, O, C, Wo)) {
        #pragma omp parallel for schedule(static) if (16 * O * C > SHARE_FLOATS)
        for (int64_t i = 0; i < O * C; i++) transform_filter(filters + i, O * C, weight + 9 * i, 1);
        const pyops_tiles t = tiles_of(x, N, C, H, W, -pad_h, -pad_w, Ho, Wo);
        return correlate_tiles("conv2d_forward", to, Ho, Wo, filters, bias, t, N, O, C);
    }
    const int64_t T = taps_of_x(taps, places, &s), all = kh * kw, Cg = C / groups;
    unsplit u;
    const pyops_windows w = windows_of_x(&u, x, taps, places, T, &s);
    for (int64_t i = 0; T < all && i < O * Cg; i++)
        for (int64_t t = 0; t < T; t++) filters[i * T + t] = weight[i * all + places[t].a * kw + places[t].b];
    return correlate("conv2d_forward", to, T < all ? filters : weight, bias, &w, is_strided(&s) ? &u : NULL, phases, O / groups,
                     Cg, groups, filters + factors_size(&s, O, C, Wo));
}

/* ---- the gradient of x --------------------------------------------------------------------------------------------------- */
static int64_t phase_size(const pyops_conv2d *s) {
    return s->N * s->C * ceil_div(s->H, s->stride_h) * ceil_div(s->W, s->stride_w);
}

static int64_t row_of_phases_size(const pyops_conv2d *s) {
    return is_strided(s) ? pyops_min(s->stride_w, s->W) * phase_size(s) : 0;
}

int64_t pyops_conv2d_backward_x_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    return taps_size(&s) + factors_size(&s, C, O, W) + row_of_phases_size(&s) +
        spare_size(&s, W / stride_w, O * Ho * Wo, phase_size(&s) / pyops_max(N, 1));
}

pyops_status pyops_conv2d_backward_x(float *dx, const float *dy, const float *weight, float *work, SIZES, void *stream) {
    (void)stream;
    const pyops_conv2d s = SIZES_OF;
    pyops_status status = check_conv2d("conv2d_backward_x", &s);
    if (status || !N) return status;
    pyops_tap *const taps = taps_in(work);
    filter_place *const places = places_in(work, &s);
    float *const filters = work + taps_size(&s), *const phase = filters + factors_size(&s, C, O, W);
    const int64_t Cg = C / groups, Og = O / groups, all = kh * kw;
    if (has_tiles(&s, C, O, W)) {
        #pragma omp parallel for schedule(static) if (16 * O * C > SHARE_FLOATS)
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
            #pragma omp parallel for schedule(static) if (O * Cg * T > SHARE_FLOATS / 8)
            for (int64_t i = 0; i < C; i++) /* filters[c, (o, t)] = weight[o, c, t], group by group */
                for (int64_t o = 0; o < Og; o++)
                    for (int64_t t = 0; t < T; t++)
                        filters[(i * Og + o) * T + t] =
                            weight[((i / Cg * Og + o) * Cg + i % Cg) * all + places[t].a * kw + places[t].b];
            const planes to = {is_strided(&s) ? phase + left * size : dx, C * rows * cols, rows * cols};
            status = correlate("conv2d_backward_x", to, filters, NULL, &w, NULL, NULL, Cg, Og, groups,
                               phase + row_of_phases_size(&s));
        }
        #pragma omp parallel for schedule(static) if (N * C * rows * W > SHARE_FLOATS)
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
static int64_t most_tile_parts(const pyops_conv2d *s) {
    return pyops_max(1, pyops_min(PARTS, PARTIAL / tile_filters_size(s->O, s->C)));
}

int64_t pyops_conv2d_backward_weight_work(SIZES) {
    const pyops_conv2d s = SIZES_OF;
    const int64_t tiles = may_have_tiles(&s, O, C, Wo) ? most_tile_parts(&s) * tile_filters_size(O, C) : 0;
    return taps_size(&s) + phases_size(&s) + pyops_max(parts_of(&s) * filters_size(&s), tiles) +
        spare_size(&s, Wo, image_size(&s), O * Ho * Wo);
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

/* partial (parts,O,K) = sums of dy x windows in parts of the blocks, all by dot products along planes. */
static pyops_status add_planes(float *partial, int64_t parts, const float *dy, const pyops_windows *w, const unsplit *u,
                               const plane_blocks *b, int64_t M, int64_t C, int64_t groups) {
    const pyops_kernels *k = pyops_active();
    const int64_t K = C * w->T, area = w->grid_h * w->grid_w, units = w->columns / area * b->count, size = planes_size(b, C);
    const int64_t room = pyops_round_up(M * b->n + PYOPS_LANES, 2);
    const size_t floats = (size_t)(size + room + K * (int64_t)(sizeof(int64_t) / sizeof(float)));
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (w->columns * groups * M * K > SHARE_FMAS)
    for (int64_t i = 0; i < parts * groups; i++) {
        const int64_t part = i / groups, g = i % groups;
        float *const x = pyops_scratch_or_fail(floats, &failed), *const d = x + size;
        float *const its = partial + (part * groups + g) * M * K;
        int64_t *const offsets = (int64_t *)(d + room);
        if (!x) continue;
        plane_offsets(offsets, w, b, C);
        k->fill(its, M * K, 0.0f);
        for (int64_t unit = part * units / parts; unit < (part + 1) * units / parts; unit++) {
            const int64_t n = unit / b->count, place = unit % b->count;
            const int64_t row = place / b->across * b->rows, col = place % b->across * b->cols;
            const int64_t rows = pyops_min(b->rows, w->grid_h - row), cols = pyops_min(b->cols, w->grid_w - col);
            fetch_planes(k, x, w, u, b, n, place, g * C, C);
            for (int64_t m = 0; m < M; m++)
                k->planes_in(d + m * b->n, b->width, dy + ((n * groups + g) * M + m) * area + row * w->grid_w + col, w->grid_w,
                             rows, 0, cols, b->n, 1, 0, 1);
            k->planes_dots(its, K, d, b->n, x, offsets, M, K, b->by_row ? rows : 1, b->width, b->by_row ? cols : b->n);
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "conv2d_backward_weight: no memory for %zu floats per thread", floats)
                  : PYOPS_OK;
}

/* partial (parts,O,K) = sums of dy x windows in parts of the columns, by products. */
static pyops_status add_all_windows(float *partial, int64_t parts, const float *dy, const pyops_windows *w,
                                    const pyops_conv2d *s) {
    const int64_t C = s->C / s->groups, M = s->O / s->groups, K = C * w->T, area = s->Ho * s->Wo, groups = s->groups;
    const pyops_kernels *const k = pyops_for_product(pyops_active(), M, BLOCK);
    const pyops_tap here = {0, 0, 0};
    const pyops_windows of_dy = {.source = dy,
                                 .size = s->N * s->O * area,
                                 .image = s->O * area,
                                 .channel = area,
                                 .H = s->Ho,
                                 .W = s->Wo,
                                 .grid_h = s->Ho,
                                 .grid_w = s->Wo,
                                 .columns = w->columns,
                                 .T = 1,
                                 .taps = &here};
    const int is_large = w->columns * s->O * K > SHARE_FMAS;
    const int64_t blocks = ceil_div(w->columns, BLOCK), threads = omp_get_max_threads();
    const int64_t cuts = is_large ? pyops_min(ceil_div(threads, parts * groups), ceil_div(K, k->MR)) : 1;
    const int64_t rows = ceil_div(K, cuts);
    const size_t floats = pyops_product_scratch(k) +
        (size_t)((k->MC + M) * ROW + pyops_packed_b_size(k, BLOCK, M) + (rows + PYOPS_LANES + pyops_max(rows, k->MC)) * M);
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (is_large)
    for (int64_t i = 0; i < parts * groups * cuts; i++) {
        const int64_t part = i / cuts / groups, g = i / cuts % groups, first = i % cuts * rows;
        const int64_t q = part * blocks / parts * BLOCK, to = pyops_min((part + 1) * blocks / parts * BLOCK, w->columns);
        if (first >= K) continue;
        float *const scratch = pyops_scratch_or_fail(floats, &failed), *const its = partial + (part * s->O + g * M) * K;
        if (!scratch) continue;
        add_windows(k, its, &of_dy, w, M, C, g, q, to, first, pyops_min(first + rows, K), scratch);
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "conv2d_backward_weight: no memory for %zu floats per thread", floats)
                  : PYOPS_OK;
}

/* dweight by Winograd's algorithm: the gradients of the transformed filters are 16 products over all tiles,
 * u (C,O) = tiles of x (C, tiles) x tiles of dy' (tiles, O), summed in parts of the batch. */
static pyops_status add_tiles(float *dweight, const float *dy, const float *x, float *partial, const pyops_conv2d *s) {
    const pyops_kernels *k = pyops_active();
    const pyops_tiles t = tiles_of(x, s->N, s->C, s->H, s->W, -s->pad_h, -s->pad_w, s->Ho, s->Wo);
    const pyops_tiles of_dy = tiles_of(dy, s->N, s->O, s->Ho, s->Wo, 0, 0, s->Ho, s->Wo);
    const int64_t C = s->C, O = s->O, n = block_rows(&t), columns = n * t.lanes, all = s->N * t.rows, blocks = ceil_div(all, n);
    const int64_t parts = pyops_min(most_tile_parts(s), blocks), size = tile_filters_size(O, C);
    const int64_t ld_x = C * columns + PYOPS_LANES, ld_y = O * columns + PYOPS_LANES;
    const size_t floats = pyops_product_scratch(k) + (size_t)(16 * (ld_x + ld_y) + pyops_packed_b_size(k, columns, O));
    int failed = 0;
    #pragma omp parallel for schedule(dynamic) if (all * t.lanes * size > SHARE_FMAS)
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
    #pragma omp parallel for schedule(static) if (parts * size > SHARE_FLOATS)
    for (int64_t p = 0; p < 16; p++)
        for (int64_t part = 1; part < parts; part++) k->add(partial + p * C * O, partial + part * size + p * C * O, C * O);
    #pragma omp parallel for schedule(static) if (size > SHARE_FLOATS)
    for (int64_t o = 0; o < O; o++)
        for (int64_t c = 0; c < C; c++) add_filter(dweight + 9 * (o * C + c), partial + c * O + o, C * O);
    return PYOPS_OK;
}

static void add_bias_gradient(float *dbias, const float *dy, int64_t N, int64_t O, int64_t area) {
    const pyops_kernels *k = pyops_active();
    /* Images of a few positions: first the sums of each position over the batch, some channels at a time. */
    enum { COLUMNS = 256, FEW_POSITIONS = 32 };
    const int64_t channels = pyops_max(COLUMNS / area, 1);
    #pragma omp parallel for schedule(static) if (N * O * area > SHARE_FLOATS)
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
    #pragma omp parallel for schedule(static) if (N * O * area > SHARE_FLOATS)
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
    if (has_tiles(&s, O, C, Wo)) {
        status = add_tiles(dweight, dy, x, work + taps_size(&s), &s);
        if (!status && dbias) add_bias_gradient(dbias, dy, N, O, Ho * Wo);
        return status;
    }
    pyops_tap *const taps = taps_in(work);
    filter_place *const places = places_in(work, &s);
    float *const phases = work + taps_size(&s), *const partial = phases + phases_size(&s);
    float *const spare = partial + parts_of(&s) * filters_size(&s);
    const int64_t T = taps_of_x(taps, places, &s), C1 = C / groups, M = O / groups, K = C1 * T, area = Ho * Wo;
    unsplit u;
    const pyops_windows w = windows_of_x(&u, x, taps, places, T, &s);
    const unsplit *const source_of_w = is_strided(&s) ? &u : NULL;
    const int narrow = is_narrow(N, Wo) && K && !k->micro.is_bf16;
    plane_blocks b = plane_blocks_of(&w, C1, M);
    int64_t parts = parts_of(&s);
    if (narrow) {
        float *const source = (float *)(taps_in(spare) + T), *const of_dy = source + spread_size(N, w.image);
        pyops_windows all;
        status = spread_windows(&all, source, taps_in(spare), &w, source_of_w, N);
        spread(of_dy, dy, N, O * area);
        b = plane_blocks_of(&all, C1, M);
        parts = pyops_min(parts, ceil_div(N, lanes_for(N)) * b.count);
        if (!status) status = add_planes(partial, parts, of_dy, &all, NULL, &b, M, C1, groups);
    } else if (has_planes(k, &w, &b, C1, M)) {
        parts = pyops_min(parts, N * b.count);
        status = add_planes(partial, parts, dy, &w, source_of_w, &b, M, C1, groups);
    } else if (K) {
        const pyops_windows of_phases = source_of_w ? split(phases, &w, source_of_w) : w;
        status = add_all_windows(partial, parts, dy, &of_phases, &s);
    }
    if (status) return status;
    #pragma omp parallel for schedule(static) if (parts * O * K > SHARE_FLOATS)
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
    PYOPS_FOR(plane, N * O, multiply_adds(&s) > SHARE_FMAS, {
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
    PYOPS_FOR(plane, N * C, multiply_adds(&s) > SHARE_FMAS, {
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
    PYOPS_FOR(filter, O * own, multiply_adds(&s) > SHARE_FMAS, {
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
