// mlp.cu - all gradients of a network of two linear layers on pixels in one launch, or its whole training step.
//
// A batch of 100 images is so little work that latency dominates: of kernel launches, of memory, of synchronisation between
// blocks.  The kernel is therefore structured to minimise dependent waits.
//
//     one block per image                               one block per eight pixels, one warp per pixel
//     row number -> pixels -> rows of w1                sum over the images b of x[b,pixel] times
//                  -> hidden -> logits -> softmax         da of image 0   [ ............ ]
//                  -> dlogits, da                         da of image 1   [ ............ ]     ->  dw1[pixel,:]
//                        |                                da of image 2   [ ............ ]
//                        +--- through work -- [grid] -->  ...
//
// Before [grid], the barrier across all blocks, a block needs no data of other blocks; after it every block needs da of all
// images.  The pixels for the second half do not depend on the first half, so they are fetched at the start and listed before
// [grid].  The chain of dependent loads is: row index, pixels, rows of w1, [grid], da.
//
// Every gradient is a sum over images of a factor times a row of a matrix, computed by add_terms (pixels.cuh):
//
//     dw1[i,:] = sum_b x[b,i] da[b,:]           over the images in which pixel i is nonzero
//     db1[:]   = sum_b      1 da[b,:]           as for an additional pixel that is always 1
//     dw2[c,:] = sum_b dlogits[b,c] r[b,:]      followed by db2[c], since r has an additional column that is always 1
//
// Images are added in order, for any number of blocks.
//
// The training step continues in the same launch.  The warp that computed a row of gradients also updates the corresponding
// weights, which it fetched, with their moments, at the start.  It still needs the norm of the whole gradient:
//
//     rows of gradients  -> a sum of squares of each --- through work -- [grid] -->  norm -> factor -> Adam on the same rows
//
// Every block adds all sums of squares, in the same order.  Without clipping, neither the norm nor the second [grid] is
// needed.  Further steps follow in the same launch, after another [grid]: all blocks have updated their weights.  The weights
// of a warp and their moments stay in its registers.
//
// Alternatives to one launch with a barrier across the grid:
// - Two launches.  The barrier costs two round trips to L2, an atomic addition and a load that sees the sum.  A second kernel
//   starts when the last block of the first has ended and its writes are visible, and only then fetches its row indices and
//   pixels, one round trip after the other.  With programmatic dependent launch (compute capability 9.0 or later) it could
//   fetch them earlier, but it would still wait for the whole first kernel.
// - A cluster of blocks, which synchronise without L2 and read each other's shared memory.  It has at most 16 blocks, on 16
//   multiprocessors.  An image of 784 pixels has about 150 nonzero ones, whose rows of w1 are 18 KB.  A hundred blocks fetch
//   the rows for one image each, in parallel; sixteen would fetch those for six or seven images each, about 120 KB per
//   multiprocessor, which takes longer than the barrier.
//
// No matrix product here is large enough for tensor cores; everything is float32, whatever the precision.
#include "adam.cuh"
#include "pixels.cuh"

static constexpr int MOST = PYOPS_MLP_WIDEST;                // maximum of H and of C
static constexpr int TILE = 4096;               // floats: rows of da or r, 128 of 32 floats; before that w2, if it fits
static constexpr int CLASSES = 4;               // per block; few, because their sums run over all images
static constexpr int WIDEST = MOST + 4;         // of a row of da or r
static constexpr int PARTS = blocks_for(MOST + 1, 32);      // elements of a row of gradients per lane

namespace {
struct Network {
    float *loss, *dw1, *db1, *dw2, *db2;
    const uint8_t *table;
    const int64_t *rows;
    const int32_t *labels;
    const float *w1, *b1, *w2, *b2;
    float *da, *r, *dlogits, *losses;           // in work: (B,width), (B,width), (C,B), (B)
    int64_t N, K, B;                            // K: number of steps
    int I, H, C, width;                         // width: of a row of da and r
    int most;                                   // maximum number of these rows in a tile
    int pixel_units, units;                   // unit: the gradients of eight pixels or CLASSES classes, computed by one block
    float scale, share;                         // share: the weight of an image in the loss, 1 / B
    Who who;
    FaultRecord *faults;
};

// Additional data of the training step.
struct Update {
    float *norm, *norms;                        // norm NULL: no clipping;  norms (K): or NULL
    int64_t *step;
    float *param, *m, *v;
    const float *grad, *lr;                     // grad: start of the buffer that contains dw1, db1, dw2 and db2
    double *squares;                            // in work: a sum of squares for each warp in each unit
    float *corrections;                         // in work: step_size and root_correction of the rule
    float max_norm;
    AdamRule rule;
};

struct Shared {
    alignas(16) float tile[TILE];
    uint64_t columns[TERMS];
    Term terms[WARPS][TERMS];
    float sums[WARPS][WIDEST];
    float b1[MOST], b2[MOST], hidden[MOST], logits[MOST], dlogits[MOST];
    double of_warps[WARPS];
};
}

// ---- the first half: an image -----------------------------------------------------------------------------
// Softmax of the logits by one warp: computes dlogits and the loss of the image.
DEVICE void softmax(const Network &net, Shared &s, int64_t b, int label) {
    const int lane = lane_id();
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int c = lane; c < net.C; c += 32) top = nan_max(top, s.logits[c]);
    top = warp_max(top);
#pragma unroll 1
    for (int c = lane; c < net.C; c += 32) sum += s.dlogits[c] = expf(s.logits[c] - top);
    sum = warp_sum(sum);
    const float factor = net.share / sum;
#pragma unroll 1
    for (int c = lane; c < net.C; c += 32) {
        const float d = factor * s.dlogits[c] - (c == label ? net.share : 0.0f);
        s.dlogits[c] = d;
        net.dlogits[c * net.B + b] = d;
    }
    if (lane == 0) net.losses[b] = logf(sum) + (top - s.logits[label]);
}

// rows: of the step k
DEVICE void one_image(const Network &net, Shared &s, const float *w2, const int64_t *rows, int64_t k, int64_t b) {
    const int thread = threadIdx.x, warp = warp_id(), lane = lane_id();
    const int64_t row = rows[b];
    const uint8_t *image = image_of(net.table, row, net.N, net.I);
    int label = image ? net.labels[row] : 0;

    clear(s.sums[warp], net.H);
    for (int from = 0; from < net.I; from += PIXELS) {
        const int n = list_ink(s.terms[warp], nullptr, image, from, net.I, net.scale);
        add_terms(s.sums[warp], s.terms[warp], n, net.w1, net.H, net.H);
    }
    if (thread == 0 && !image) report(net.faults, Fault::row, net.who, k * net.B + b, row, net.N - 1);
    if (label < 0 || label >= net.C) {
        if (thread == 0) report(net.faults, Fault::label, net.who, row, label, net.C - 1);
        label = 0;
    }
    __syncthreads();
    if (thread < net.H) {
        float a = s.b1[thread];
#pragma unroll
        for (int w = 0; w < WARPS; w++) a += s.sums[w][thread];
        s.hidden[thread] = nan_max(a, 0.0f);
    }
    if (thread < net.width) net.r[b * net.width + thread] = thread < net.H ? s.hidden[thread] : thread == net.H ? 1.0f : 0.0f;
    __syncthreads();
#pragma unroll 2
    for (int c = warp; c < net.C; c += WARPS) {
        float sum = 0.0f;
#pragma unroll 1
        for (int h = lane; h < net.H; h += 32) sum += w2[c * net.H + h] * s.hidden[h];
        sum = warp_sum(sum);
        if (lane == 0) s.logits[c] = sum + s.b2[c];
    }
    __syncthreads();
    if (warp == 0) softmax(net, s, b, label);
    __syncthreads();
    if (thread < net.width) {
        float da = 0.0f;
        if (thread < net.H && s.hidden[thread] > 0.0f)
#pragma unroll 4
            for (int c = 0; c < net.C; c++) da += s.dlogits[c] * w2[c * net.H + thread];
        net.da[b * net.width + thread] = da;
    }
    __syncthreads();                            // before the next image
}

// ---- the second half: rows of the gradients, one per warp -------------------------------------------------------
DEVICE int pixel_of(int unit) { return WARPS * unit + warp_id(); }             // I: the additional pixel that is always 1
DEVICE int class_of(const Network &net, int unit) {                             // -1: none
    const int c = CLASSES * (unit - net.pixel_units) + warp_id();
    return warp_id() < CLASSES && c < net.C ? c : -1;
}

// Of the images from, ..., from + count - 1 each thread has one: its row index, or -1 for none; and its eight pixels of a
// unit.
DEVICE int64_t own_row(const int64_t *rows, int64_t from, int count) {
    return static_cast<int>(threadIdx.x) < count ? rows[from + threadIdx.x] : -1;
}
DEVICE uint64_t pixels_of(const Network &net, int unit, int64_t row) {
    return pixels_at(image_of(net.table, row, net.N, net.I), WARPS * unit, net.I);
}

// List the terms that this warp adds, and return their number.   own: pixels_of this thread's image
DEVICE int list_pixel(const Network &net, Shared &s, int unit, uint64_t own, int count) {
    if (threadIdx.x < TERMS) s.columns[threadIdx.x] = own;
    __syncthreads();
    const int i = pixel_of(unit);
    return i < net.I ? list_column(s.terms[warp_id()], s.columns, net.scale)
        : i == net.I ? list_all(s.terms[warp_id()], nullptr, count)
                     : 0;
}
DEVICE int list_class(const Network &net, Shared &s, int unit, int64_t from, int count) {
    const int c = class_of(net, unit);
    return c < 0 ? 0 : list_all(s.terms[warp_id()], net.dlogits + c * net.B + from, count);
}

// The row of gradients of this warp: H elements, and one bias if it belongs to a class.
namespace {
struct Row {
    float *weights, *bias;
    int H, size;
    __device__ float *at(int o) const { return o < H ? weights + o : bias; }
};
}
DEVICE Row row_of(const Network &net, int unit) {
    if (unit < net.pixel_units) {
        const int i = pixel_of(unit);
        return {i < net.I ? net.dw1 + int64_t(i) * net.H : net.db1, nullptr, net.H, i <= net.I ? net.H : 0};
    }
    const int c = class_of(net, unit);
    return c < 0 ? Row{} : Row{net.dw2 + c * net.H, net.db2 + c, net.H, net.H + 1};
}

DEVICE void write_row(const Row &row, const float *sums) {
#pragma unroll 1
    for (int o = lane_id(); o < row.size; o += 32) *row.at(o) = sums[o];
}

DEVICE void mean_loss(const Network &net, int64_t k) {
    double sum = 0.0;
#pragma unroll 4
    for (int64_t b = lane_id(); b < net.B; b += 32) sum += net.losses[b];
    sum = warp_sum(sum);
    if (lane_id() == 0) net.loss[k] = static_cast<float>(sum / static_cast<double>(net.B));
}

// ---- the step: Adam on the rows whose gradients the warp has computed -------------------------------------------
// The elements lane, lane + 32, ... of a row.
namespace {
struct Elements { float param[PARTS], m[PARTS], v[PARTS], grad[PARTS]; };
}

// Call f(k, o) for each of these elements: element k of the lane is element o of the row.
template <class F> DEVICE void for_elements(const Row &row, F f) {
#pragma unroll
    for (int k = 0; k < PARTS; k++)
        if (const int o = lane_id() + 32 * k; o < row.size) f(k, o);
}

DEVICE void fetch(Elements &mine, const Update &update, const Row &row) {
    for_elements(row, [&](int k, int o) {
        const int64_t at = row.at(o) - update.grad;
        mine.param[k] = update.param[at];
        mine.m[k] = update.m[at];
        mine.v[k] = update.v[at];
    });
}

DEVICE void move(Elements &mine, const Update &update, const AdamRule &rule, const Row &row) {
    for_elements(row, [&](int k, int o) {
        const int64_t at = row.at(o) - update.grad;
        rule(mine.param[k], mine.m[k], mine.v[k], mine.grad[k]);
        update.param[at] = mine.param[k];
        update.m[at] = mine.m[k];
        update.v[at] = mine.v[k];
    });
}

// Adam's bias corrections, by one thread; no other thread reads the step count.
DEVICE void correct(const Network &net, const Update &update) {
    const int64_t t = update.step[0] + 1;
    if (t < 1) report(net.faults, Fault::step, net.who, 0, t, 0);
    AdamRule rule = update.rule;
    rule.correct(update.lr[0], t);
    update.corrections[0] = rule.step_size;
    update.corrections[1] = rule.root_correction;
}

DEVICE void square_row(const Network &net, const Update &update, const float *sums, int unit) {
    double sum = 0.0;
#pragma unroll 1
    for (int o = lane_id(); o < net.width; o += 32) sum += square(sums[o]);
    sum = warp_sum(sum);
    if (lane_id() == 0) update.squares[WARPS * unit + warp_id()] = sum;
}

// Return the norm of the whole gradient to every thread.
DEVICE float norm_of(const Network &net, Shared &s, const double *squares) {
    double sum = 0.0;
#pragma unroll 4
    for (int i = threadIdx.x; i < WARPS * net.units; i += THREADS) sum += squares[i];
    return static_cast<float>(sqrt(block_sum(sum, s.of_warps)));
}

// Step k.  mine: of the block's first unit, with UPDATES.   Return false if a row or a label does not exist, in all blocks.
template <bool UPDATES>
DEVICE bool one_step(const Network &net, const Update &update, Shared &s, Elements &mine, int64_t k) {
    const int64_t *const rows = net.rows + k * net.B;
    const int thread = threadIdx.x, warp = warp_id(), first = blockIdx.x;
    const bool leads = UPDATES && thread == 0 && blockIdx.x == gridDim.x - 1;     // the last block has the fewest images
    const int first_count = static_cast<int>(min(net.B, int64_t(net.most)));

    // these loads start first, because the longest chain of loads depends on them
    const int64_t row = own_row(rows, 0, first_count);
    if (k > 0) grid_sync();                     // all blocks have updated their weights
    const float b1 = thread < net.H ? net.b1[thread] : 0.0f, b2 = thread < net.C ? net.b2[thread] : 0.0f;
    if (UPDATES && k == 0) fetch(mine, update, row_of(net, first));
    const bool in_tile = net.C * net.H <= TILE;
    if (in_tile)
#pragma unroll 2
        for (int i = thread; i < net.C * net.H; i += THREADS) s.tile[i] = net.w2[i];
    if (thread < net.H) s.b1[thread] = b1;
    if (thread < net.C) s.b2[thread] = b2;
    bool listed = first < net.pixel_units;
    const uint64_t own = listed ? pixels_of(net, first, row) : 0;
    if (leads) correct(net, update);

    for (int64_t b = first; b < net.B; b += gridDim.x) one_image(net, s, in_tile ? s.tile : net.w2, rows, k, b);
    int n = listed ? list_pixel(net, s, first, own, first_count) : 0;
    grid_sync();

    for (int unit = first; unit < net.units; unit += gridDim.x) {
        const bool pixels = unit < net.pixel_units;
        const float *matrix = pixels ? net.da : net.r;
        clear(s.sums[warp], net.width);
        for (int64_t from = 0; from < net.B; from += net.most) {
            const int count = static_cast<int>(min(net.B - from, int64_t(net.most)));
#pragma unroll 4
            for (int i = 4 * thread; i < count * net.width; i += 4 * THREADS)
                cp_async16(s.tile + i, matrix + from * net.width + i);
            cp_async_commit();
            if (!pixels) n = list_class(net, s, unit, from, count);
            else if (!listed) n = list_pixel(net, s, unit, pixels_of(net, unit, own_row(rows, from, count)), count);
            listed = false;
            cp_async_wait<0>();
            __syncthreads();
            add_terms(s.sums[warp], s.terms[warp], n, s.tile, net.width, pixels ? net.H : net.H + 1);
            if (from == 0 && unit == net.units - 1 && warp == WARPS - 1) mean_loss(net, k);     // this warp has no class
            __syncthreads();                    // before the next tile and the next columns
        }
        write_row(row_of(net, unit), s.sums[warp]);
        if (UPDATES) {
            if (update.norm) square_row(net, update, s.sums[warp], unit);
            if (unit == first) for_elements(row_of(net, unit), [&](int e, int o) { mine.grad[e] = s.sums[warp][o]; });
        }
    }
    if (!UPDATES) return true;

    if (update.norm) grid_sync();
    AdamRule rule = update.rule;
    rule.step_size = update.corrections[0];
    rule.root_correction = update.corrections[1];
    const int32_t fault = net.faults->fault;    // the same for all blocks: no fault is reported after the first barrier
    if (update.norm) {
        const float norm = norm_of(net, s, update.squares);
        rule.clip = clip_factor(norm, update.max_norm);
        if (leads) update.norm[0] = norm;
        if (leads && update.norms) update.norms[k] = norm;
    }
    if (fault) return false;
    if (leads) update.step[0] += 1;
    for (int unit = first; unit < net.units; unit += gridDim.x) {
        const Row row = row_of(net, unit);
        if (unit == first) {
            move(mine, update, rule, row);
        } else {
            Elements others = {};
            fetch(others, update, row);
            for_elements(row, [&](int e, int o) { others.grad[e] = *row.at(o); });
            move(others, update, rule, row);
        }
    }
    return true;
}

// One block per multiprocessor: it may use all registers, so that many loads are in flight.
template <bool UPDATES> static __global__ void __launch_bounds__(THREADS, 1) network(const Network net, const Update update) {
    SHARED(Shared, s, );
    Elements mine = {};
    for (int64_t k = 0; k < net.K; k++)
        if (!one_step<UPDATES>(net, update, s, mine, k)) return;
}

// ---- the ABI ------------------------------------------------------------------------------------------------
static int64_t width_of(int64_t H) { return round_up<int64_t>(H + 1, 4); }      // whole pieces of 16 bytes
static int64_t pixel_units_of(int64_t I) { return blocks_for<int64_t>(I + 1, WARPS); }
static int64_t units_of(int64_t I, int64_t C) { return pixel_units_of(I) + blocks_for<int64_t>(C, CLASSES); }

static pyops_status check(const char *who, int64_t N, int64_t B, int64_t I, int64_t H, int64_t C, float scale) {
    const pyops_status status = check_mlp(who, N, B, I, H, C, scale);
    if (status) return status;
    if (!pyops_faults()) return pyops_fail(PYOPS_NO_MEMORY, "%s: no device memory is left", who);
    return PYOPS_OK;
}

static float *on_16_bytes(float *work) {
    return reinterpret_cast<float *>(round_up<uintptr_t>(reinterpret_cast<uintptr_t>(work), 16));
}

static Network network_of(Who who, float *loss, float *dw1, float *db1, float *dw2, float *db2, const uint8_t *table,
                          const int64_t *rows, const int32_t *labels, const float *w1, const float *b1, const float *w2,
                          const float *b2, float *work, int64_t N, int64_t K, int64_t B, int64_t I, int64_t H, int64_t C,
                          float scale) {
    const int64_t width = width_of(H);
    float *const da = on_16_bytes(work), *const r = da + B * width;
    float *const dlogits = r + B * width, *const losses = dlogits + B * C;
    return {loss,
            dw1,
            db1,
            dw2,
            db2,
            table,
            rows,
            labels,
            w1,
            b1,
            w2,
            b2,
            da,
            r,
            dlogits,
            losses,
            N,
            K,
            B,
            int(I),
            int(H),
            int(C),
            int(width),
            int(width * TERMS <= TILE ? TERMS : TILE / width),
            int(pixel_units_of(I)),
            int(units_of(I, C)),
            scale,
            1.0f / static_cast<float>(B),
            who,
            pyops_faults()};
}

template <bool UPDATES> static cudaError_t launch(const Network &net, const Update &update, void *stream) {
    // all blocks must be resident at the same time, which is certain for one block per multiprocessor
    const int64_t jobs = max(net.B, int64_t(net.units)), blocks = min(jobs, int64_t(pyops_multiprocessors()));
    return LAUNCH_COOP(network<UPDATES>, static_cast<unsigned>(blocks), THREADS, 0, stream_of(stream), net, update);
}

extern "C" int64_t pyops_mlp_gradients_work(int64_t B, int64_t, int64_t H, int64_t C) {
    return B * (2 * width_of(H) + C + 1) + 3;   // 3: for alignment to 16 bytes
}

extern "C" pyops_status pyops_mlp_gradients(float *loss, float *dw1, float *db1, float *dw2, float *db2, const uint8_t *table,
                                            const int64_t *rows, const int32_t *labels, const float *w1, const float *b1,
                                            const float *w2, const float *b2, float *work, int64_t N, int64_t B, int64_t I,
                                            int64_t H, int64_t C, float scale, void *stream) {
    const pyops_status status = check("mlp_gradients", N, B, I, H, C, scale);
    if (status) return status;
    const Network net = network_of(Who::mlp_gradients, loss, dw1, db1, dw2, db2, table, rows, labels, w1, b1, w2, b2, work, N,
                                   1, B, I, H, C, scale);
    return pyops_launched("mlp_gradients", launch<false>(net, {}, stream), stream);
}

// `work` of the step, before the part of the gradients: a sum for each warp in each unit, and two corrections.
static int64_t sums_of(int64_t I, int64_t C) { return WARPS * units_of(I, C); }

extern "C" int64_t pyops_mlp_step_work(int64_t B, int64_t I, int64_t H, int64_t C) {
    return 2 * sums_of(I, C) + 2 + 3 + pyops_mlp_gradients_work(B, I, H, C);
}

extern "C" pyops_status pyops_mlp_step(float *loss, float *norm, float *norms, int64_t *step, float *param, float *grad,
                                       float *m, float *v, const uint8_t *table, const int64_t *rows, const int32_t *labels,
                                       const float *lr, float *work, int64_t N, int64_t K, int64_t B, int64_t I, int64_t H,
                                       int64_t C, int64_t w1, int64_t b1, int64_t w2, int64_t b2, float scale, float max_norm,
                                       float beta1, float beta2, float eps, float weight_decay, void *stream) {
    pyops_status status = check("mlp_step", N, B, I, H, C, scale);
    if (!status) status = check_mlp_step(K, w1, b1, w2, b2, max_norm, beta1, beta2, weight_decay);
    if (status) return status;
    float *const squares = on_16_bytes(work), *const corrections = squares + 2 * sums_of(I, C);
    const Network net = network_of(Who::mlp_step, loss, grad + w1, grad + b1, grad + w2, grad + b2, table, rows, labels,
                                   param + w1, param + b1, param + w2, param + b2, corrections + 2, N, K, B, I, H, C, scale);
    const Update update = {norm,        norms,    step,
                           param,       m,        v,
                           grad,        lr,       reinterpret_cast<double *>(squares),
                           corrections, max_norm, {beta1, beta2, eps, weight_decay, 1.0f, 0.0f, 0.0f, 1.0f}};
    return pyops_launched("mlp_step", launch<true>(net, update, stream), stream);
}
