// mlp.cu - the whole gradient of a network of two linear layers on pixels, in one launch.
//
// A batch of 100 images is so little work that what takes time is waiting: for a kernel to start, for memory to answer, for
// other blocks.  So the kernel is laid out by what has to be waited for.
//
//     a block has an image                              a block has eight pixels, a warp each
//     row number -> pixels -> rows of w1                sum over the images b of x[b,pixel] times
//                  -> hidden -> logits -> softmax         da of image 0   [ ............ ]
//                  -> dlogits, da                         da of image 1   [ ............ ]     ->  dw1[pixel,:]
//                        |                                da of image 2   [ ............ ]
//                        +--- through work -- [grid] -->  ...
//
// In front of [grid], where all blocks meet, nothing is needed from another block; behind it everybody needs da of all images.
// The pixels of the second half do not depend on the first, so they are fetched at the very start and listed before [grid].
// The chain of loads that must wait for each other is: row number, pixels, rows of w1, [grid], da.
//
// Every gradient is a sum over images of a factor times a row of a matrix, which is what add_terms (pixels.cuh) does:
//
//     dw1[i,:] = sum_b x[b,i] da[b,:]           of the images with ink at i
//     db1[:]   = sum_b      1 da[b,:]           as if the images had one more pixel, which is always 1
//     dw2[c,:] = sum_b dlogits[b,c] r[b,:]      and db2[c] behind it, since r has one more column, which is always 1
//
// The images are added in their order, whatever the number of blocks.
//
// Why one launch with a meeting of all blocks, and not
// - two launches: a meeting costs two round trips to the second cache, an atomic addition and a load that sees the sum.  A
//   second kernel starts when the last block of the first has ended and its writes are out; then it has its row numbers and
//   pixels still to fetch, one round trip after the other.  One that may start early (programmatic dependent launch, from 9.0
//   on) could fetch them before, but it waits for the whole first kernel, too.
// - a cluster of blocks, which meet without going to the second cache and read each other's shared memory: it has at most 16
//   blocks, on 16 multiprocessors.  Of an image of 784 pixels some 150 are ink, whose rows of w1 are 18 KB.  A hundred blocks
//   fetch these for an image each, all at the same time; sixteen would fetch them for six or seven each, some 120 KB through
//   one multiprocessor, which takes longer than the meeting that it saves.
//
// There is no matrix product that tensor cores would help with, and all is float32 whatever the precision.
#include "pixels.cuh"

static constexpr int MOST = 128;                // of H and of C
static constexpr int TILE = 4096;               // floats: rows of da or r, 128 of 32; before that w2, where it is not larger
static constexpr int CLASSES = 4;               // that a block has: no image is left out of their sums, which makes them long
static constexpr int WIDEST = MOST + 4;         // of a row of da and r

struct Network {
    float *loss, *dw1, *db1, *dw2, *db2;
    const uint8_t *table;
    const int64_t *rows;
    const int32_t *labels;
    const float *w1, *b1, *w2, *b2;
    float *da, *r, *dlogits, *losses;           // in work: (B,width), (B,width), (C,B), (B)
    int64_t N, B;
    int I, H, C, width;                         // width: of a row of da and r
    int most;                                   // of these rows that a tile has
    int pixel_units, units;                     // what a block computes of the gradients: eight pixels or CLASSES classes
    float scale, share;                         // share: of an image in the loss
    FaultRecord *faults;
};

struct Shared {
    alignas(16) float tile[TILE];
    uint64_t columns[TERMS];
    Term terms[WARPS][TERMS];
    float sums[WARPS][WIDEST];
    float b1[MOST], b2[MOST], hidden[MOST], logits[MOST], dlogits[MOST];
};

// ---- the first half: an image -----------------------------------------------------------------------------
// The softmax of the logits, by one warp: dlogits, and the loss of the image.
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

DEVICE void one_image(const Network &net, Shared &s, const float *w2, int64_t b) {
    const int thread = threadIdx.x, warp = warp_id(), lane = lane_id();
    const int64_t row = net.rows[b];
    const uint8_t *image = image_of(net.table, row, net.N, net.I);
    int label = image ? net.labels[row] : 0;

    clear(s.sums[warp], net.H);
    for (int from = 0; from < net.I; from += PIXELS) {
        const int n = list_ink(s.terms[warp], nullptr, image, from, net.I, net.scale);
        add_terms(s.sums[warp], s.terms[warp], n, net.w1, net.H, net.H);
    }
    if (thread == 0 && !image) report(net.faults, Fault::row, Who::mlp_gradients, b, row, net.N - 1);
    if (label < 0 || label >= net.C) {
        if (thread == 0) report(net.faults, Fault::label, Who::mlp_gradients, row, label, net.C - 1);
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

// ---- the second half: rows of the gradients, one a warp -------------------------------------------------------
DEVICE int pixel_of(int unit) { return WARPS * unit + warp_id(); }             // I: the one that is always 1
DEVICE int class_of(const Network &net, int unit) {                             // -1: none
    const int c = CLASSES * (unit - net.pixel_units) + warp_id();
    return warp_id() < CLASSES && c < net.C ? c : -1;
}

// A thread has an image of `count` from `from` on: the number of its row, -1 for none; and its eight pixels of a unit.
DEVICE int64_t own_row(const Network &net, int64_t from, int count) {
    return static_cast<int>(threadIdx.x) < count ? net.rows[from + threadIdx.x] : -1;
}
DEVICE uint64_t pixels_of(const Network &net, int unit, int64_t row) {
    return pixels_at(image_of(net.table, row, net.N, net.I), WARPS * unit, net.I);
}

// What this warp has to add up: -> how many terms.   own: pixels_of the image of this thread
DEVICE int list_pixel(const Network &net, Shared &s, int unit, uint64_t own, int count) {
    if (threadIdx.x < TERMS) s.columns[threadIdx.x] = own;
    __syncthreads();
    const int i = pixel_of(unit);
    return i < net.I ? list_column(s.terms[warp_id()], s.columns, net.scale)
         : i == net.I ? list_all(s.terms[warp_id()], nullptr, count) : 0;
}
DEVICE int list_class(const Network &net, Shared &s, int unit, int64_t from, int count) {
    const int c = class_of(net, unit);
    return c < 0 ? 0 : list_all(s.terms[warp_id()], net.dlogits + c * net.B + from, count);
}

DEVICE void write_row(const Network &net, const float *sums, int unit) {
    const int lane = lane_id(), H = net.H;
    if (unit < net.pixel_units) {
        const int i = pixel_of(unit);
        float *const to = i < net.I ? net.dw1 + int64_t(i) * H : net.db1;
        if (i <= net.I)
#pragma unroll 1
            for (int h = lane; h < H; h += 32) to[h] = sums[h];
    } else if (const int c = class_of(net, unit); c >= 0) {
#pragma unroll 1
        for (int h = lane; h < H; h += 32) net.dw2[c * H + h] = sums[h];
        if (lane == H % 32) net.db2[c] = sums[H];
    }
}

DEVICE void mean_loss(const Network &net) {
    double sum = 0.0;
#pragma unroll 4
    for (int64_t b = lane_id(); b < net.B; b += 32) sum += net.losses[b];
    sum = warp_sum(sum);
    if (lane_id() == 0) net.loss[0] = static_cast<float>(sum / static_cast<double>(net.B));
}

// One block on a multiprocessor: all its registers may be used, so that many loads are under way at a time.
static __global__ void __launch_bounds__(THREADS, 1) gradients(const Network net) {
    SHARED(Shared, s, );
    const int thread = threadIdx.x, warp = warp_id();
    const int first_count = static_cast<int>(min(net.B, int64_t(net.most)));

    // what is asked for first has to be waited for longest
    const int64_t row = own_row(net, 0, first_count);
    const float b1 = thread < net.H ? net.b1[thread] : 0.0f, b2 = thread < net.C ? net.b2[thread] : 0.0f;
    const bool in_tile = net.C * net.H <= TILE;
    if (in_tile)
#pragma unroll 2
        for (int i = thread; i < net.C * net.H; i += THREADS) s.tile[i] = net.w2[i];
    if (thread < net.H) s.b1[thread] = b1;
    if (thread < net.C) s.b2[thread] = b2;
    bool listed = static_cast<int>(blockIdx.x) < net.pixel_units;
    const uint64_t own = listed ? pixels_of(net, blockIdx.x, row) : 0;

    for (int64_t b = blockIdx.x; b < net.B; b += gridDim.x) one_image(net, s, in_tile ? s.tile : net.w2, b);
    int n = listed ? list_pixel(net, s, blockIdx.x, own, first_count) : 0;
    grid_sync();

    for (int unit = blockIdx.x; unit < net.units; unit += gridDim.x) {
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
            else if (!listed) n = list_pixel(net, s, unit, pixels_of(net, unit, own_row(net, from, count)), count);
            listed = false;
            cp_async_wait<0>();
            __syncthreads();
            add_terms(s.sums[warp], s.terms[warp], n, s.tile, net.width, pixels ? net.H : net.H + 1);
            if (from == 0 && unit == net.units - 1 && warp == WARPS - 1) mean_loss(net);        // a warp without a class
            __syncthreads();                    // before the next tile and the next columns
        }
        write_row(net, s.sums[warp], unit);
    }
}

// ---- the ABI ------------------------------------------------------------------------------------------------
static int64_t width_of(int64_t H) { return round_up<int64_t>(H + 1, 4); }      // in pieces of 16 bytes

extern "C" int64_t pyops_mlp_gradients_work(int64_t B, int64_t, int64_t H, int64_t C) {
    return B * (2 * width_of(H) + C + 1) + 3;   // 3: to begin at a multiple of 16 bytes
}

extern "C" pyops_status pyops_mlp_gradients(float *loss, float *dw1, float *db1, float *dw2, float *db2,
                                            const uint8_t *table, const int64_t *rows, const int32_t *labels,
                                            const float *w1, const float *b1, const float *w2, const float *b2, float *work,
                                            int64_t N, int64_t B, int64_t I, int64_t H, int64_t C, float scale, void *stream) {
    PYOPS_REQUIRE(N >= 0 && B >= 1 && I >= 0 && I < 65536 && H >= 1 && H <= MOST && C >= 1 && C <= MOST,
                  "mlp_gradients: N=%lld B=%lld I=%lld H=%lld C=%lld, want B >= 1, I < 65536, H and C from 1 to 128",
                  LL(N), LL(B), LL(I), LL(H), LL(C));
    PYOPS_REQUIRE(scale == scale, "mlp_gradients: scale is NaN");
    if (!pyops_faults()) return pyops_fail(PYOPS_NO_MEMORY, "mlp_gradients: no device memory is left");
    const int64_t width = width_of(H), pixel_units = blocks_for<int64_t>(I + 1, WARPS);
    const int64_t units = pixel_units + blocks_for<int64_t>(C, CLASSES);
    float *const da = reinterpret_cast<float *>(round_up<uintptr_t>(reinterpret_cast<uintptr_t>(work), 16));
    float *const r = da + B * width, *const dlogits = r + B * width, *const losses = dlogits + B * C;
    const Network net = {loss, dw1, db1, dw2, db2, table, rows, labels, w1, b1, w2, b2, da, r, dlogits, losses, N, B,
                         int(I), int(H), int(C), int(width), int(width * TERMS <= TILE ? TERMS : TILE / width),
                         int(pixel_units), int(units), scale, 1.0f / static_cast<float>(B), pyops_faults()};
    // all blocks must run at the same time, and one for each multiprocessor always do
    const int64_t jobs = B > units ? B : units, blocks = jobs < pyops_multiprocessors() ? jobs : pyops_multiprocessors();
    return pyops_launched("mlp_gradients", LAUNCH_COOP(gradients, static_cast<unsigned>(blocks), THREADS, 0, stream_of(stream), net),
                          stream);
}
