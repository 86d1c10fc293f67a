// linear_cross_entropy.cu - output layer, masked softmax cross entropy and all their gradients.
//
// Three products over the vocabulary, and small kernels between them.  The logits of the valid rows are stored once; their
// gradient is never stored: both products that need it compute it from the logits while loading their operands.
//
//   gather      x_valid = the valid rows of x, compacted, in order; zeros the masked rows of dx
//   logits      tiles of x_valid weight' + bias; per row and tile: maximum, sum of exponentials, sum of logit - maximum
//   row_losses  per row, from these: maximum, sum of exponentials, loss; the last block to finish computes the mean of the
//               losses, summed in order
//   dx          tiles of dlogits weight; if there are few tiles, each is split into parts of the vocabulary
//   dweight     tiles of dlogits' x_valid, and the column sums of dlogits: dbias.  As many further blocks sum the parts of dx,
//               in order, and scatter the rows to dx; the blocks of dx have no registers left for that.  With operands
//               rounded to bfloat16, a separate kernel, sum_parts
//
//                   V, in tiles of 128               dlogits[p,v] = scale * (exp(logits[p,v] - max[p]) / sum[p] - target[p,v])
//              +-----+-----+--  --+---+                scale = dloss / valid
//   valid rows |     |     |      |   |  logits, rows ldv apart   max and sum come from all tiles of a row, so no gradient
//   p in tiles +-----+-----+--  --+---+                           can be formed before the last tile of the row is done
//   of 128     |     |     |      |   |
//              +-----+-----+--  --+---+
//
// Only the device knows the number of valid rows.  So everything is launched for R rows, and blocks without rows exit at once.
// If all logits exceed LOGITS bytes, the rows are processed in chunks of `chunk` rows.
//
// If x is bfloat16, the three products are gemm.cu's, with the number of valid rows as their limit.  Between them one
// kernel per row, `softmax_row`, computes the loss and replaces the logits by their gradient, rounded to bfloat16, which takes
// half of the memory of the logits.  It is the operand of the other two products, and dbias is the sum of its rows.
#include <algorithm>
#include "columns.cuh"
#include "compact.cuh"
#include "log_sum_exp.cuh"
#include "product.cuh"
#include "tickets.cuh"
#include "tile.cuh"

static constexpr int64_t LOGITS = int64_t(1) << 30;
static constexpr int THREADS = 256;
static constexpr int GATHER = 64;                       // rows per block of `gather`
static constexpr int64_t TILE = 128;                    // rows and columns of a tile in all three products
static constexpr int64_t LEAST_PART = 512;              // minimum number of words in a part of dx

// Every shape fits in 99 KiB of shared memory, which all devices from 80 on provide per block, and in half of 164 KiB, so that
// two blocks are resident on a multiprocessor.  The gradient kernels compute an operand, which takes registers: more warps.
namespace {
template <Precision P> struct Shapes {
    using Logits = TileShape<TILE, TILE, 16, 2, 2, 3>;
    using Gradients = TileShape<TILE, TILE, 16, 4, 2, 3>;
};
template <> struct Shapes<Precision::fp32> {
    using Logits = TileShape<TILE, TILE, 16, 4, 2, 3>;
    using Gradients = Logits;
};

struct alignas(16) ValidRow {
    float max, factor;
    int32_t label;
};      // factor = scale / sum, see above
struct Piece {
    LogSumExp exps;
    float below;
};          // the logits of a row in a tile;  below: the sum of logit - max

template <class T> struct XRows {                        // arrays of the type of x
    T *dx;
    const T *x;
    T *x_valid;                                         // (R rounded up to 64, ldx)   in `work`
};
struct Call {                                           // arguments of all kernels
    float *dx, *dweight, *dbias;                        // dx: NULL in bfloat16
    const float *dloss;                                 // NULL: 1, and dweight and dbias are overwritten
    const float *weight, *bias;
    const int32_t *labels;
    int32_t *valid;
    // in `work`; p counts valid rows
    int32_t *position;                                  // (R)            of row p in x
    float *x_valid;                                     // (R,ldx)
    ValidRow *row;                                      // (R)
    float *losses;                                      // (R)
    Piece *pieces;                                      // (chunk,tiles)
    float *logits;                                      // (chunk,ldv)
    float *parts;                                       // (splits,chunk,D)   of dx; unused if there is only one part
    int64_t R, D, V, ldx, ldv, tiles;                   // tiles: number of tiles along the vocabulary
    int64_t first, chunk;                               // the current chunk: rows first <= p < first + chunk
    int64_t splits, part;                               // dx: number of parts of the vocabulary, and words per part
    unsigned *ticket;                                   // of row_losses
    float smoothing;
    bool weight16;                                      // weight can be copied 16 bytes at a time

    __device__ int64_t rows() const {                   // valid rows in this chunk
        const int64_t left = valid[0] - first;
        return left < chunk ? left : chunk;
    }
    __device__ float scale() const { return (dloss ? dloss[0] : 1.0f) / static_cast<float>(valid[0]); }
};
}

// ---- rows ------------------------------------------------------------------------------------------------------
// One block per GATHER rows.  Each block counts the valid rows before its own, its offset in x_valid: there are few labels.
template <class T>
static __global__ void __launch_bounds__(THREADS) gather(Call c, XRows<T> a, FaultRecord *faults, int32_t ignore) {
    SHARED(int, counts, [THREADS / 32]);
    SHARED(int, kept, [GATHER]);
    const int64_t first = blockIdx.x * int64_t(GATHER);
    const int rows = static_cast<int>(c.R - first < GATHER ? c.R - first : GATHER);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const auto is_valid = [&](int64_t r) { return c.labels[r] != ignore && c.labels[r] >= 0 && c.labels[r] < c.V; };

    int before = 0;
#pragma unroll 4
    for (int64_t r = threadIdx.x; r < first; r += THREADS) before += is_valid(r);
    before = block_sum(before, counts);
    const int n = block_compact(
        rows, counts, [&](int r) { return is_valid(first + r); },
        [&](int place, int r) {
            kept[place] = r;
            c.position[before + place] = static_cast<int32_t>(first + r);
        });
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) c.valid[0] = before + n;

    for (int i = warp; i < n; i += THREADS / 32)
#pragma unroll 4
        for (int64_t d = lane; d < c.D; d += 32) a.x_valid[(before + i) * c.ldx + d] = a.x[(first + kept[i]) * c.D + d];
    for (int i = warp; i < rows; i += THREADS / 32) {
        const int64_t r = first + i;
        if (is_valid(r)) continue;
        if (lane == 0 && c.labels[r] != ignore)
            report(faults, Fault::label, Who::linear_cross_entropy, r, c.labels[r], c.V - 1);
        if (a.dx)
            for (int64_t d = lane; d < c.D; d += 32) a.dx[r * c.D + d] = as<T>(0.0f);
    }
}

// The loss of row m of the chunk, by a warp.
DEVICE void row_loss(const Call &c, int64_t m) {
    const int64_t p = c.first + m;
    const int lane = threadIdx.x & 31;
    const Piece *const pieces = c.pieces + m * c.tiles;
    LogSumExp exps;
    for (int64_t tile = lane; tile < c.tiles; tile += 32) exps.add(pieces[tile].exps);
    exps = warp_log_sum_exp(exps);                      // max is the same in all lanes
    float below = 0.0f;
    for (int64_t tile = lane; c.smoothing > 0.0f && tile < c.tiles; tile += 32) {
        const int64_t words = c.V - tile * TILE < TILE ? c.V - tile * TILE : TILE;
        below += pieces[tile].below + static_cast<float>(words) * (pieces[tile].exps.max - exps.max);
    }
    below = warp_sum(below);
    if (lane) return;
    const float sum = exps.total();
    const int32_t label = c.labels[c.position[p]];
    c.row[p] = {exps.max, c.scale() / sum, label};
    c.losses[p] = logf(sum) + (1.0f - c.smoothing) * (exps.max - c.logits[m * c.ldv + label]);
    if (c.smoothing > 0.0f) c.losses[p] -= c.smoothing * (below / static_cast<float>(c.V));
}

// By the last block of the last chunk.
DEVICE void write_mean_loss(float *loss, const Call &c) {
    SHARED(double, sums, [THREADS / 32]);
    const int n = c.valid[0];
    double sum = 0.0;
#pragma unroll 4
    for (int p = threadIdx.x; p < n; p += THREADS) sum += c.losses[p];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) loss[0] = n ? static_cast<float>(sum / n) : 0.0f;
}

// loss: NULL, or in the last chunk the mean.
static __global__ void __launch_bounds__(THREADS) row_losses(float *loss, Call c) {
    const int64_t m = blockIdx.x * int64_t(THREADS / 32) + threadIdx.x / 32;
    if (m < c.rows()) row_loss(c, m);
    if (loss && block_arrives_last(c.ticket, gridDim.x)) write_mean_loss(loss, c);
}

// ---- logits ------------------------------------------------------------------------------------------------------
template <Precision P> static __global__ void __launch_bounds__(Shapes<P>::Logits::THREADS, 2) logits(Call c, int64_t tiles_m) {
    using S = typename Shapes<P>::Logits;
    using T = Tile<S, P, Stored<true>, Stored<true>>;
    DYN_SHARED(float, shared);
    const TileIndex place = tile_index<16>(blockIdx.x, tiles_m, c.tiles);
    const int64_t rows = c.rows(), m0 = place.m * S::M, v0 = place.n * S::N;
    if (m0 >= rows) return;
    T::product(shared, {c.x_valid + c.first * c.ldx, rows, c.ldx, 1, true}, {c.weight, c.V, c.D, 1, c.weight16}, m0, v0, 0,
               c.D);

    // Eight lanes share a row: lane t has columns 4 t .. 4 t + 3 of every 32.
    constexpr int ACROSS = 8, WIDE = S::N / (4 * ACROSS);
    static_assert(T::STRIDE % 4 == 0, "rows of the tile are read 16 bytes at a time");
    const int t = threadIdx.x % ACROSS;
    float bias[4 * WIDE];
#pragma unroll
    for (int i = 0; i < 4 * WIDE; i++) {
        const int64_t v = v0 + i / 4 * 4 * ACROSS + 4 * t + i % 4;
        bias[i] = v < c.V ? c.bias[v] : -INFINITY;      // beyond the vocabulary: adds nothing to a sum of exponentials
    }
    for (int m = threadIdx.x / ACROSS; m < S::M; m += S::THREADS / ACROSS) {
        float several[4 * WIDE], below = 0.0f;
#pragma unroll
        for (int w = 0; w < WIDE; w++) {
            const int n = w * 4 * ACROSS + 4 * t;
            load<4>(several + 4 * w, shared + m * T::STRIDE + n);
#pragma unroll
            for (int i = 4 * w; i < 4 * w + 4; i++) several[i] += bias[i];
            if (m0 + m < rows)
                *reinterpret_cast<float4 *>(c.logits + (m0 + m) * c.ldv + v0 + n) = make_float4(
                    several[4 * w], several[4 * w + 1], several[4 * w + 2], several[4 * w + 3]);
        }
        LogSumExp exps;
        exps.add(several);
        exps = warp_log_sum_exp<ACROSS>(exps);          // max is the same in all lanes of the row
#pragma unroll
        for (int i = 0; i < 4 * WIDE; i++)
            below += v0 + i / 4 * 4 * ACROSS + 4 * t + i % 4 < c.V ? several[i] - exps.max : 0.0f;
#pragma unroll
        for (int step = ACROSS / 2; step; step >>= 1) below += __shfl_xor_sync(ALL_LANES, below, step);
        if (t == 0 && m0 + m < rows) c.pieces[(m0 + m) * c.tiles + place.n] = {exps, below};
    }
}

// ---- gradients -----------------------------------------------------------------------------------------------------
// dlogits as an operand, computed from logits.  Its lines are rows p in both products: in dx the words are the K axis, in
// dweight they are the rows of the product.
namespace {
template <Precision P, bool K_INNER> struct DLogits : Stored<K_INNER> {
    static constexpr Way way = Way::formed;
    using Line = ValidRow;
    const ValidRow *row;
    float on_label, everywhere;                       // dlogits = factor * exp - everywhere - (v is the label ? on_label : 0)
    mutable float column_sum[4] = {};                   // of the values of this thread; in dweight, of the same four words

    __device__ __forceinline__ DLogits(const Call &c, int64_t rows)
        : Stored<K_INNER>{c.logits, K_INNER ? rows : c.V, K_INNER ? c.ldv : 1, K_INNER ? 1 : c.ldv, true},
          row(c.row + c.first) {
        const float scale = c.scale();
        on_label = scale * (1.0f - c.smoothing);
        everywhere = scale * c.smoothing / static_cast<float>(c.V);
    }
    __device__ __forceinline__ Line line(int64_t p) const { return row[p]; }
    __device__ __forceinline__ void form(float (&four)[4], const Line &at, int64_t v) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // operands rounded to 11 or 8 bits need no exponential that is accurate to 24 bits
            const float e = P == Precision::fp32 ? expf(four[i] - at.max) : __expf(four[i] - at.max);
            four[i] = at.factor * e - everywhere - (v + i == at.label ? on_label : 0.0f);
            column_sum[i] += four[i];
        }
    }
};
}

template <Precision P> static __global__ void __launch_bounds__(Shapes<P>::Gradients::THREADS, 2)
    dx(Call c, int64_t tiles_m, int64_t tiles_d) {
    using S = typename Shapes<P>::Gradients;
    using T = Tile<S, P, DLogits<P, true>, Stored<false>>;
    DYN_SHARED(float, shared);
    const int64_t rows = c.rows(), split = blockIdx.x / (tiles_m * tiles_d), tile = blockIdx.x % (tiles_m * tiles_d);
    const int64_t m0 = tile / tiles_d * S::M, d0 = tile % tiles_d * S::N;
    const int64_t v0 = split * c.part, v1 = v0 + c.part < c.V ? v0 + c.part : c.V;
    if (m0 >= rows) return;
    T::product(shared, DLogits<P, true>(c, rows), {c.weight, c.D, 1, c.D, c.weight16}, m0, d0, v0, v1);
    T::each(shared, [&](int m, int n, float sum) {
        if (m0 + m >= rows || d0 + n >= c.D) return;
        float *const to = c.splits > 1 ? c.parts + (split * c.chunk + m0 + m) * c.D : c.dx + c.position[c.first + m0 + m] * c.D;
        to[d0 + n] = sum;
    });
}

// Block `block` of `blocks` takes every blocks-th row.
DEVICE void add_parts(const Call &c, int64_t block, int64_t blocks) {
    const int64_t rows = c.rows();
    for (int64_t m = block; m < rows; m += blocks)
        for (int64_t d = threadIdx.x; d < c.D; d += blockDim.x)
            c.dx[c.position[c.first + m] * c.D + d] = sum_of_parts(c.parts + m * c.D + d, c.splits, c.chunk * c.D);
}

static __global__ void __launch_bounds__(THREADS) sum_parts(Call c) { add_parts(c, blockIdx.x, gridDim.x); }

// Whether further blocks of dweight add the parts of dx.  In bfloat16 it has no registers left either, and sum_parts is launched.
template <Precision P> constexpr bool ADDS_PARTS = P != Precision::bf16;

template <Precision P> static __global__ void __launch_bounds__(Shapes<P>::Gradients::THREADS, 2)
    dweight(Call c, int64_t tiles_d) {
    if constexpr (ADDS_PARTS<P>)
        if (blockIdx.y) return add_parts(c, blockIdx.x, gridDim.x);
    using S = typename Shapes<P>::Gradients;
    using T = Tile<S, P, DLogits<P, false>, Stored<false>>;
    DYN_SHARED(float, shared);
    const bool adds = c.dloss || c.first > 0;           // to the gradients of other calls, or of the previous chunks
    const int64_t rows = c.rows(), v0 = blockIdx.x / tiles_d * S::M, d0 = blockIdx.x % tiles_d * S::N;
    if (adds && rows <= 0) return;
    const DLogits<P, false> dlogits(c, rows);
    T::product(shared, dlogits, {c.x_valid + c.first * c.ldx, c.D, 1, c.ldx, true}, v0, d0, 0, rows);
    T::each(shared, [&](int m, int n, float sum) {
        if (v0 + m >= c.V || d0 + n >= c.D) return;
        float *const to = c.dweight + (v0 + m) * c.D + d0 + n;
        *to = adds ? *to + sum : sum;
    });
    if (d0 > 0) return;
    // dbias: threads whose indices differ by a multiple of Share::ACROSS have the same words of different rows.
    using Share = typename T::PanelA::template Share<4>;
    const int own = threadIdx.x / Share::ACROSS * S::M + threadIdx.x % Share::ACROSS * 4;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) shared[own + i] = dlogits.column_sum[i];
    __syncthreads();
    for (int m = threadIdx.x; m < S::M && v0 + m < c.V; m += S::THREADS) {
        float sum = adds ? c.dbias[v0 + m] : 0.0f;
        for (int i = 0; i < Share::STEP; i++) sum += shared[i * S::M + m];
        c.dbias[v0 + m] = sum;
    }
}

// ---- the call ------------------------------------------------------------------------------------------------------
// Set the sizes and the arrays in `work`, and return its size in floats.
static int64_t lay_out(Call *c, float *work, int64_t R, int64_t D, int64_t V, bool gradients) {
    c->R = R, c->D = D, c->V = V;
    c->ldx = round_up<int64_t>(D, 4), c->ldv = round_up(V, TILE), c->tiles = blocks_for(V, TILE);
    const int64_t most = LOGITS / int64_t(sizeof(float)) / c->ldv / TILE * TILE, whole = round_up(R, TILE);
    c->chunk = most < TILE ? TILE : most < whole ? most : whole;
    // as many blocks as can be resident, two per multiprocessor
    const int64_t tiles = blocks_for(c->chunk, TILE) * blocks_for(D, TILE), most_splits = blocks_for(V, LEAST_PART);
    const int64_t wanted = tiles ? 2 * pyops_multiprocessors() / tiles : 1;
    const int64_t splits = wanted < most_splits ? wanted : most_splits;
    c->part = round_up<int64_t>(blocks_for<int64_t>(V, splits > 1 ? splits : 1), 64);
    c->splits = blocks_for(V, c->part);

    int64_t used = 0;
    const auto take = [&](auto **array, int64_t n) {
        using T = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
        *array = reinterpret_cast<T *>(work + used);
        used += round_up<int64_t>(n * sizeof(T) / sizeof(float), 32);           // every array is aligned to 128 bytes
    };
    take(&c->position, R);
    take(&c->x_valid, round_up<int64_t>(R, 64) * c->ldx);
    take(&c->row, R);
    take(&c->losses, R);
    take(&c->pieces, c->chunk * c->tiles);
    take(&c->logits, c->chunk * c->ldv);
    if (gradients && c->splits > 1) take(&c->parts, c->splits * c->chunk * D);
    return used;
}

static constexpr int64_t ALIGN = 32;                    // floats: `work` may have any alignment

extern "C" int64_t pyops_linear_cross_entropy_work(int64_t R, int64_t D, int64_t V, int32_t gradients) {
    Call c;
    return lay_out(&c, nullptr, R, D, V, gradients) + ALIGN;
}

template <Precision P>
static cudaError_t launch(Call c, const float *x, float *loss, int32_t ignore, cudaStream_t stream) {
    using TileLogits = Tile<typename Shapes<P>::Logits, P, Stored<true>, Stored<true>>;
    using TileDx = Tile<typename Shapes<P>::Gradients, P, DLogits<P, true>, Stored<false>>;
    using TileDweight = Tile<typename Shapes<P>::Gradients, P, DLogits<P, false>, Stored<false>>;
    const auto grid = [](int64_t blocks) { return static_cast<unsigned>(blocks); };
    const int64_t tiles_m = blocks_for(c.chunk, TILE), tiles_d = blocks_for(c.D, TILE);
    Launches launches;
    launches << allow_shared<logits<P>>(TileLogits::BYTES) << allow_shared<dx<P>>(TileDx::BYTES)
             << allow_shared<dweight<P>>(TileDweight::BYTES);
    const XRows<float> rows = {c.dx, x, c.x_valid};
    launches << LAUNCH(gather<float>, grid(c.R ? blocks_for<int64_t>(c.R, GATHER) : 1), THREADS, 0, stream, c, rows,
                       pyops_faults(), ignore);
    do {
        if (c.R)
            launches << LAUNCH(logits<P>, grid(tiles_m * c.tiles), TileLogits::THREADS, TileLogits::BYTES, stream, c, tiles_m);
        launches << LAUNCH(row_losses, grid(std::max<int64_t>(1, blocks_for<int64_t>(c.chunk, THREADS / 32))), THREADS, 0,
                           stream, c.first + c.chunk < c.R ? nullptr : loss, c);
        if (c.R && c.dx)
            launches << LAUNCH(dx<P>, grid(tiles_m * tiles_d * c.splits), TileDx::THREADS, TileDx::BYTES, stream, c, tiles_m,
                               tiles_d);
        const bool has_parts = c.dx && c.splits > 1;
        if (has_parts && !ADDS_PARTS<P>) launches << LAUNCH(sum_parts, grid(c.chunk), THREADS, 0, stream, c);
        if (c.dx)
            launches << LAUNCH(dweight<P>, dim3(grid(c.tiles * tiles_d), has_parts && ADDS_PARTS<P> ? 2 : 1),
                               TileDweight::THREADS, TileDweight::BYTES, stream, c, tiles_d);
        c.first += c.chunk;
    } while (c.first < c.R);
    return launches.error;
}

// ---- bfloat16 --------------------------------------------------------------------------------------------------------
// A block per row of the chunk.  The gradient of the row overwrites the first half of its logits: a step reads 2 THREADS packs
// of four, and writes where this step or an earlier one has read.
DEVICE void softmax_of_row(const Call &c, bf16 *x_valid, bool gradients) {
    constexpr int PACK = 8, STEP = THREADS * PACK;
    SHARED(LogSumExp, of_warps, [THREADS / 32]);
    SHARED(float, sums, [THREADS / 32]);
    const int64_t m = blockIdx.x, p = c.first + m, rows = c.rows(), V = c.V;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float *const row = c.logits + m * c.ldv;
    bf16 *const gradient = reinterpret_cast<bf16 *>(row);
    if (m >= rows) {            // the products read whole steps of 64 rows: the first rows that are not valid must be zero
        if (!gradients || m >= round_up<int64_t>(rows < 0 ? 0 : rows, 64)) return;
        for (int64_t v = threadIdx.x; v < V; v += THREADS) gradient[v] = as<bf16>(0.0f);
        for (int64_t d = threadIdx.x; d < c.ldx; d += THREADS) x_valid[p * c.ldx + d] = as<bf16>(0.0f);
        return;
    }
    LogSumExp exps;
    for (int64_t v = 4 * threadIdx.x; v < V; v += 4 * THREADS) {
        float four[4];
        load<4>(four, row + v);
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] = v + i < V ? four[i] : -INFINITY;
        exps.add(four);
    }
    exps = warp_log_sum_exp(exps);
    if (lane == 0) of_warps[warp] = exps;
    __syncthreads();
    exps = of_warps[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) exps.add(of_warps[w]);
    float below = 0.0f;
    if (c.smoothing > 0.0f) {
        for (int64_t v = threadIdx.x; v < V; v += THREADS) below += row[v] - exps.max;
        below = block_sum(below, sums);
    }
    const float total = exps.total(), scale = c.scale(), factor = scale / total;
    const int32_t label = c.labels[c.position[p]];
    if (threadIdx.x == 0) {
        c.losses[p] = logf(total) + (1.0f - c.smoothing) * (exps.max - row[label]);
        if (c.smoothing > 0.0f) c.losses[p] -= c.smoothing * (below / static_cast<float>(V));
    }
    if (!gradients) return;
    const float on_label = scale * (1.0f - c.smoothing), everywhere = scale * c.smoothing / static_cast<float>(V);
    for (int64_t from = 0; from < V; from += STEP) {
        const int64_t v = from + PACK * threadIdx.x;
        Pack<float, PACK> pack = {};
        if (v < V) pack = load_reals<PACK>(row + v);            // rows are padded to a multiple of TILE
        __syncthreads();
        if (v >= V) continue;
#pragma unroll
        for (int i = 0; i < PACK; i++)
            pack.at[i] = factor * __expf(pack.at[i] - exps.max) - everywhere - (v + i == label ? on_label : 0.0f);
        store_reals<PACK>(gradient + v, pack);
    }
}

// loss: NULL, or in the last chunk the mean.
static __global__ void __launch_bounds__(THREADS) softmax_row(float *loss, Call c, bf16 *x_valid, bool gradients) {
    softmax_of_row(c, x_valid, gradients);
    if (loss && block_arrives_last(c.ticket, gridDim.x)) write_mean_loss(loss, c);
}

static __global__ void add_bias_gradient(Call c, bool adds) {
    const int64_t v = blockIdx.x * int64_t(COLUMNS) + threadIdx.x, rows = c.rows();
    const float sum = column_sum(reinterpret_cast<const bf16 *>(c.logits), rows, 2 * c.ldv, v, c.V);
    if (threadIdx.y || v >= c.V) return;
    c.dbias[v] = adds ? c.dbias[v] + sum : sum;
}

static cudaError_t launch_bf16(Call c, XRows<bf16> a, const pyops_real *weight, float *loss, int32_t ignore,
                               cudaStream_t stream) {
    const int64_t R = c.R, D = c.D, V = c.V;
    const auto grid = [](int64_t blocks) { return static_cast<unsigned>(blocks); };
    Launches launches;
    launches << LAUNCH(gather<bf16>, grid(R ? blocks_for<int64_t>(R, GATHER) : 1), THREADS, 0, stream, c, a, pyops_faults(),
                       ignore);
    do {
        const bool adds = c.dloss || c.first > 0;
        const int64_t M = R - c.first < c.chunk ? R - c.first : c.chunk;        // rows, if all are valid
        const pyops_real *const x = real(a.x_valid + c.first * c.ldx),
                                *const dlogits = real(reinterpret_cast<bf16 *>(c.logits));
        if (M) {
            RealProduct logits = {c.logits, nullptr, operand(x, M, c.ldx, 1), operand(weight, V, D, 1), c.bias, M, V, D, c.ldv};
            logits.limit = {c.valid, c.first, false};
            launches << real_product(logits, stream);
        }
        launches << LAUNCH(softmax_row, grid(std::max<int64_t>(1, round_up<int64_t>(M, 64))), THREADS, 0, stream,
                           c.first + c.chunk < R ? nullptr : loss, c, a.x_valid, a.dx != nullptr);
        if (M && a.dx) {
            RealProduct dx = {nullptr, a.dx, operand(dlogits, M, 2 * c.ldv, 1), operand(weight, D, 1, D), nullptr, M, D, V, D};
            dx.limit = {c.valid, c.first, false};
            dx.scatter = c.position + c.first;
            launches << real_product(dx, stream);
        }
        if (a.dx && c.dweight) {
            const int64_t K = round_up<int64_t>(M, 64);
            RealProduct dweight = {
                c.dweight, nullptr, operand(dlogits, V, 1, 2 * c.ldv), operand(x, D, 1, c.ldx), nullptr, V, D, K, D, adds};
            dweight.limit = {c.valid, c.first, true};
            launches << real_product(dweight, stream);
            launches << LAUNCH(add_bias_gradient, grid(blocks_for<int64_t>(V, COLUMNS)), dim3(COLUMNS, COLUMN_THREADS), 0,
                               stream, c, adds);
        }
        c.first += c.chunk;
    } while (c.first < R);
    return launches.error;
}

extern "C" pyops_status pyops_linear_cross_entropy(float *loss, int32_t *valid, pyops_real *dx, float *dweight, float *dbias,
                                                   const float *dloss, const pyops_real *x, const pyops_real *weight,
                                                   const float *bias, const int32_t *labels, float *work, int64_t R, int64_t D,
                                                   int64_t V, int32_t ignore, float smoothing, void *stream) {
    const char *const who = "linear_cross_entropy";
    const pyops_status status = check_linear_cross_entropy(dx, dweight, dbias, dloss, R, D, V, smoothing);
    if (status) return status;
    PYOPS_REQUIRE(is_bf16(x) || !is_bf16(weight), "%s: weight is bfloat16 and x float32, expected one type", who);
    Call c = {};
    c.dweight = dweight, c.dbias = dbias, c.dloss = dloss, c.valid = valid, c.ticket = pyops_tickets();
    if (!c.ticket) return pyops_fail(PYOPS_NO_MEMORY, "%s: no memory for counters", who);
    c.weight = elements<float>(weight), c.bias = bias, c.labels = labels, c.smoothing = smoothing;
    c.weight16 = reinterpret_cast<uintptr_t>(weight) % 16 == 0 && D % 4 == 0;
    work = reinterpret_cast<float *>(round_up(reinterpret_cast<uintptr_t>(work), uintptr_t(ALIGN * sizeof(float))));
    lay_out(&c, work, R, D, V, dx);
    const auto run = [&](auto type) {
        using T = decltype(type);
        cudaError_t error;
        if constexpr (std::is_same_v<T, bf16>) {
            c.ldx = round_up<int64_t>(D, 8);                    // fits: half of the bytes of rows of floats
            const XRows<bf16> rows = {elements<bf16>(dx), elements<bf16>(x), reinterpret_cast<bf16 *>(c.x_valid)};
            error = launch_bf16(c, rows, weight, loss, ignore, stream_of(stream));
        } else {
            const Precision precision = pyops_precision_now();
            c.dx = elements<float>(dx);
            error = (precision == Precision::fp32 ? launch<Precision::fp32>
                         : precision == Precision::tf32
                         ? launch<Precision::tf32>
                         : launch<Precision::bf16>)(c, elements<float>(x), loss, ignore, stream_of(stream));
        }
        return pyops_launched(who, error, stream);
    };
    return with_type(who, run, x, dx);
}
