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
// If x is bfloat16, only the logits of the labels are stored.  The first product is hopper_gemm.cu's or, where that does not
// fit, `exponentials`.  Both store exp(logit - maximum of the row in the tile) in 16 bits (exponentials.cuh).
//
//   row_losses  as above; and per row and tile the factor that makes an exponential a probability, times scale
//   dlogits     replaces the exponentials by the gradient of the logits, in bfloat16; sums its columns: dbias.  A block has a
//               tile of words and a part of the rows; the last block of a tile adds the sums of the parts, in order
//   dx, dweight gemm.cu's products, with the number of valid rows as their limit
//
// With floats rounded to TF32 it is the same on Hopper.  There wgmma reads operands only along K, and does not round.  So all
// operands are stored rounded, and operands of dx and dweight also transposed:
//
//   gather      also x_valid'; further blocks write weight and weight'
//   dlogits     the gradient takes 4 bytes, and so do exponentials (Exp32); also dlogits'
#include <algorithm>
#include "compact.cuh"
#include "device.h"
#include "exponentials.cuh"
#include "product.cuh"
#include "tickets.cuh"
#include "tile.cuh"
#include "tile_bf16.cuh"

static constexpr int64_t LOGITS = int64_t(1) << 30;
static int64_t most_bytes = LOGITS;                     // pyops_set_logits
static constexpr int THREADS = 256;
static constexpr int GATHER = 64;                       // rows per block of `gather`
static constexpr int64_t TILE = 128;                    // rows and columns of a tile in all three products
static constexpr int64_t LEAST_PART = 512;              // minimum number of words in a part of dx
static constexpr int64_t LEAST_ROWS = 256;              // and of rows in a part of dlogits
static_assert(TILE == EXP_TILE, "pieces have one size");

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
    int32_t *label;                                     // (R)            labels[position[p]]
    float *x_valid;                                     // (R,ldx)
    ValidRow *row;                                      // (R)
    float *losses;                                      // (R)
    Piece *pieces;                                      // (chunk,tiles)
    float *logits;                                      // (chunk,ldv)
    float *parts;                                       // (splits,chunk,D)   of dx; unused if there is only one part
    // in `work` if x is bfloat16, or rounded to TF32 for wgmma
    void *exps;                                         // (chunk,ldv)    Exp16 or Exp32; NULL without gradients
    float *at_label;                                    // (R)            logit of the label; then its probability times scale
    float *wide_bias;                                   // (ldv)          -infinity from V on
    float *bias_parts;                                  // (row_splits,ldv)   of dbias; unused if there is only one part
    // in `work` for wgmma with TF32, all rounded; those after the first only with gradients
    float *weight_rows;                                 // (V,ldx)
    float *weight_t;                                    // (D,ldv)        weight'
    float *x_t;                                         // (D,ldr)        x_valid'
    float *dlogits_t;                                   // (V,chunk)      the gradient of the logits, transposed
    int64_t R, D, V, ldx, ldv, tiles;                   // tiles: number of tiles along the vocabulary
    int64_t ldr;                                        // R rounded up to 64
    int64_t first, chunk;                               // the current chunk: rows first <= p < first + chunk
    int64_t splits, part;                               // dx: number of parts of the vocabulary, and words per part
    int64_t row_splits, row_part;                       // dlogits: number of parts of a chunk, and rows per part
    unsigned *ticket;                                   // of row_losses, and of the tiles of dlogits
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
DEVICE float rounded(float x) { return __uint_as_float(to_tf32(x)); }

// Round a square of weight to TF32, and transpose it through shared memory.
static constexpr int SQUARE = 64;
static int64_t squares_of(const Call &c) { return blocks_for<int64_t>(c.V, SQUARE) * blocks_for<int64_t>(c.D, SQUARE); }
DEVICE void round_weight(const Call &c, unsigned square) {
    SHARED(float, numbers, [SQUARE][SQUARE + 1]);
    const unsigned across = static_cast<unsigned>(blocks_for<int64_t>(c.D, SQUARE));
    const int64_t v0 = square / across * int64_t(SQUARE), d0 = square % across * int64_t(SQUARE);
    const int fast = threadIdx.x % SQUARE;
    for (int slow = threadIdx.x / SQUARE; slow < SQUARE; slow += THREADS / SQUARE) {
        if (v0 + slow >= c.V || d0 + fast >= c.D) continue;
        const float x = rounded(c.weight[(v0 + slow) * c.D + d0 + fast]);
        c.weight_rows[(v0 + slow) * c.ldx + d0 + fast] = x;
        numbers[slow][fast] = x;
    }
    if (!c.weight_t) return;
    __syncthreads();
    for (int slow = threadIdx.x / SQUARE; slow < SQUARE; slow += THREADS / SQUARE)
        if (v0 + fast < c.V && d0 + slow < c.D) c.weight_t[(d0 + slow) * c.ldv + v0 + fast] = numbers[fast][slow];
}

// One block per GATHER rows.  Each block counts the valid rows before its own, its offset in x_valid: there are few labels.
// BY_WGMMA: of floats, rounded to TF32; the blocks after the first `blocks` round the weight.
template <class T, bool BY_WGMMA>
static __global__ void __launch_bounds__(THREADS)
    gather(Call c, XRows<T> a, FaultRecord *faults, int32_t ignore, unsigned blocks) {
    wait_for_last_kernel();
    constexpr bool HAS_EXPS = BY_WGMMA || std::is_same_v<T, bf16>;
    if constexpr (BY_WGMMA)
        if (blockIdx.x >= blocks) return round_weight(c, blockIdx.x - blocks);
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
            c.label[before + place] = c.labels[first + r];
        });
    const bool is_last = blockIdx.x == blocks - 1;
    if (is_last && threadIdx.x == 0) c.valid[0] = before + n;
    const int64_t end = before + n, zeros = round_up<int64_t>(end, 64);
    if constexpr (HAS_EXPS) {
        for (int64_t v = blockIdx.x * int64_t(THREADS) + threadIdx.x; v < c.ldv; v += blocks * int64_t(THREADS))
            c.wide_bias[v] = v < c.V ? c.bias[v] : -INFINITY;
        // dweight reads whole steps of 64 rows, and 0 times NaN is NaN
        if (is_last)
            for (int64_t p = end + warp; p < zeros; p += THREADS / 32)
                for (int64_t d = lane; d < c.ldx; d += 32) a.x_valid[p * c.ldx + d] = as<T>(0.0f);
    }
    if constexpr (BY_WGMMA)
        for (int d = warp; c.x_t && d < static_cast<int>(c.D); d += THREADS / 32) {
            float *const to = c.x_t + d * c.ldr + before;
            const float *const from = a.x + first * c.D + d;
            for (int i = lane; i < n; i += 32) to[i] = rounded(from[kept[i] * c.D]);
            for (int i = n + lane; is_last && i < static_cast<int>(zeros) - before; i += 32) to[i] = 0.0f;
        }

    for (int i = warp; i < n; i += THREADS / 32)
#pragma unroll 4
        for (int64_t d = lane; d < c.D; d += 32) {
            const T x = a.x[(first + kept[i]) * c.D + d];
            if constexpr (BY_WGMMA) a.x_valid[(before + i) * c.ldx + d] = rounded(x);
            else a.x_valid[(before + i) * c.ldx + d] = x;
        }
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
    Piece *const pieces = c.pieces + m * c.tiles;
    LogSumExp exps;
    for (int64_t tile = lane; tile < c.tiles; tile += 32) exps.add(pieces[tile].exps);
    exps = warp_log_sum_exp(exps);                      // max is the same in all lanes
    float below = 0.0f;
    for (int64_t tile = lane; c.smoothing > 0.0f && tile < c.tiles; tile += 32) {
        const int64_t words = c.V - tile * TILE < TILE ? c.V - tile * TILE : TILE;
        below += pieces[tile].below + static_cast<float>(words) * (pieces[tile].exps.max - exps.max);
    }
    below = warp_sum(below);
    const float sum = __shfl_sync(ALL_LANES, exps.total(), 0), factor = c.scale() / sum;
    if (c.exps)
        for (int64_t tile = lane; tile < c.tiles; tile += 32)
            pieces[tile].exps.sum = factor * expf(pieces[tile].exps.max - exps.max);
    if (lane) return;
    const int32_t label = c.label[p];
    const float at_label = c.at_label ? c.at_label[p] : c.logits[m * c.ldv + label];
    c.row[p] = {exps.max, factor, label};
    c.losses[p] = logf(sum) + (1.0f - c.smoothing) * (exps.max - at_label);
    if (c.smoothing > 0.0f) c.losses[p] -= c.smoothing * (below / static_cast<float>(c.V));
    if (c.exps) c.at_label[p] = factor * expf(at_label - exps.max);
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
    wait_for_last_kernel();
    const int64_t m = blockIdx.x * int64_t(THREADS / 32) + threadIdx.x / 32;
    if (m < c.rows()) row_loss(c, m);
    if (loss && block_arrives_last(c.ticket, gridDim.x)) write_mean_loss(loss, c);
}

// ---- logits ------------------------------------------------------------------------------------------------------
template <Precision P> static __global__ void __launch_bounds__(Shapes<P>::Logits::THREADS, 2) logits(Call c, int64_t tiles_m) {
    wait_for_last_kernel();
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
    wait_for_last_kernel();
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

static __global__ void __launch_bounds__(THREADS) sum_parts(Call c) {
    wait_for_last_kernel();
    add_parts(c, blockIdx.x, gridDim.x);
}

// Whether further blocks of dweight add the parts of dx.  In bfloat16 it has no registers left either, and sum_parts is launched.
template <Precision P> constexpr bool ADDS_PARTS = P != Precision::bf16;

template <Precision P> static __global__ void __launch_bounds__(Shapes<P>::Gradients::THREADS, 2)
    dweight(Call c, int64_t tiles_d) {
    wait_for_last_kernel();
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
// The number of parts of a loop that gives two blocks per multiprocessor.  A part is `tiles` blocks, with at least `least`
// iterations.
static int64_t parts_to_fill(int64_t tiles, int64_t iterations, int64_t least) {
    const int64_t most = blocks_for(iterations, least), wanted = tiles ? 2 * pyops_multiprocessors() / tiles : 1;
    return std::max<int64_t>(1, std::min(wanted, most));
}

// What is stored of a logit: itself; its exponential and then its gradient, in bfloat16; these in float32, rounded to TF32.
enum class Keeps { logit, half, tf32 };

// Set the sizes and the arrays in `work`, and return its size in floats.
static int64_t lay_out(Call *c, float *work, int64_t R, int64_t D, int64_t V, bool gradients, Keeps keeps) {
    const bool bf16_x = keeps == Keeps::half, by_wgmma = keeps == Keeps::tf32;
    // bytes; the gradient in TF32 is also stored transposed
    const int64_t element = bf16_x ? sizeof(Exp16) : sizeof(float) * (by_wgmma ? 2 : 1);
    c->R = R, c->D = D, c->V = V, c->ldr = round_up<int64_t>(R, 64);
    c->ldx = round_up<int64_t>(D, bf16_x ? 8 : 4), c->ldv = round_up(V, TILE), c->tiles = blocks_for(V, TILE);
    const int64_t most = most_bytes / element / c->ldv / TILE * TILE, whole = round_up(R, TILE);
    c->chunk = most < TILE ? TILE : most < whole ? most : whole;
    c->part = round_up<int64_t>(blocks_for(V, parts_to_fill(blocks_for(c->chunk, TILE) * blocks_for(D, TILE), V, LEAST_PART)),
                                64);
    c->splits = blocks_for(V, c->part);
    c->row_part = c->tiles > TICKETS ? c->chunk : blocks_for(c->chunk, parts_to_fill(c->tiles, c->chunk, LEAST_ROWS));
    c->row_splits = c->chunk ? blocks_for(c->chunk, c->row_part) : 1;

    int64_t used = 0;
    const auto take = [&](auto **array, int64_t n) {
        using T = std::remove_pointer_t<std::remove_pointer_t<decltype(array)>>;
        *array = reinterpret_cast<T *>(work + used);
        used += blocks_for<int64_t>(n * sizeof(T), 128) * 32;                       // every array is aligned to 128 bytes
    };
    take(&c->position, R);
    take(&c->label, R);
    take(&c->x_valid, c->ldr * c->ldx / (bf16_x ? 2 : 1));
    take(&c->row, R);
    take(&c->losses, R);
    take(&c->pieces, c->chunk * c->tiles);
    if (keeps != Keeps::logit) {
        take(&c->at_label, R);
        take(&c->wide_bias, c->ldv);
        Exp16 *exps = nullptr;
        if (gradients) take(&exps, c->chunk * c->ldv * (by_wgmma ? 2 : 1));
        if (gradients && c->row_splits > 1) take(&c->bias_parts, c->row_splits * c->ldv);
        if (by_wgmma) take(&c->weight_rows, V * c->ldx);
        if (by_wgmma && gradients) {
            take(&c->weight_t, D * c->ldv);
            take(&c->x_t, D * c->ldr);
            take(&c->dlogits_t, V * c->chunk);
        }
        c->exps = exps;
    } else {
        take(&c->logits, c->chunk * c->ldv);
        if (gradients && c->splits > 1) take(&c->parts, c->splits * c->chunk * D);
    }
    return used;
}

static constexpr int64_t ALIGN = 32;                    // floats: `work` may have any alignment

extern "C" int64_t pyops_linear_cross_entropy_work(int64_t R, int64_t D, int64_t V, int32_t gradients, int32_t bf16_x,
                                                   int32_t tf32) {
    const auto size = [&](Keeps keeps) {
        Call c = {};
        return lay_out(&c, nullptr, R, D, V, gradients, keeps) + ALIGN;
    };
    if (bf16_x) return size(Keeps::half);
    // the precision may be another one when the call runs
    return tf32 && pyops_has_hopper() ? std::max(size(Keeps::logit), size(Keeps::tf32)) : size(Keeps::logit);
}

extern "C" pyops_status pyops_set_logits(int64_t bytes) {
    PYOPS_REQUIRE(bytes >= 0, "set_logits: bytes=%lld, expected at least 1, or 0 for the usual number", LL(bytes));
    most_bytes = bytes ? bytes : LOGITS;
    return PYOPS_OK;
}

static unsigned blocks_of_rows(int64_t R) { return static_cast<unsigned>(R ? blocks_for<int64_t>(R, GATHER) : 1); }

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
    const unsigned of_rows = blocks_of_rows(c.R);
    launches << LAUNCH_DEPENDENT((gather<float, false>), of_rows, THREADS, 0, stream, c, rows, pyops_faults(), ignore, of_rows);
    do {
        if (c.R)
            launches << LAUNCH_DEPENDENT(logits<P>, grid(tiles_m * c.tiles), TileLogits::THREADS, TileLogits::BYTES, stream, c,
                                         tiles_m);
        launches << LAUNCH_DEPENDENT(row_losses, grid(std::max<int64_t>(1, blocks_for<int64_t>(c.chunk, THREADS / 32))),
                                     THREADS, 0, stream, c.first + c.chunk < c.R ? nullptr : loss, c);
        if (c.R && c.dx)
            launches << LAUNCH_DEPENDENT(dx<P>, grid(tiles_m * tiles_d * c.splits), TileDx::THREADS, TileDx::BYTES, stream, c,
                                         tiles_m, tiles_d);
        const bool has_parts = c.dx && c.splits > 1;
        if (has_parts && !ADDS_PARTS<P>) launches << LAUNCH_DEPENDENT(sum_parts, grid(c.chunk), THREADS, 0, stream, c);
        if (c.dx)
            launches << LAUNCH_DEPENDENT(dweight<P>, dim3(grid(c.tiles * tiles_d), has_parts && ADDS_PARTS<P> ? 2 : 1),
                                         TileDweight::THREADS, TileDweight::BYTES, stream, c, tiles_d);
        c.first += c.chunk;
    } while (c.first < c.R);
    return launches.error;
}

// ---- bfloat16, and TF32 by wgmma --------------------------------------------------------------------------------------
using Bf16Logits = HalfTile<TileShape<TILE, TILE, 32, 2, 2, 3>, true, true>;

static __global__ void __launch_bounds__(Bf16Logits::THREADS, 2)
    exponentials(RealOperand x, RealOperand weight, Limit limit, Exponentials<Exp16> to, int64_t D, int64_t tiles_m) {
    wait_for_last_kernel();
    using T = Bf16Logits;
    DYN_SHARED(float, shared);
    const TileIndex place = tile_index<16>(blockIdx.x, tiles_m, to.tiles);
    const int64_t rows = limit.rows(x.rows), m0 = place.m * TILE, v0 = place.n * TILE;
    if (m0 >= rows) return;
    x.rows = rows;
    T::product(shared, x, weight, m0, v0, 0, D);

    constexpr int LANES = 8, COUNT = TILE / LANES;
    const int first = threadIdx.x % LANES * 2, group = threadIdx.x / LANES;
    float bias[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) bias[i] = to.bias[v0 + first + i / 2 * 2 * LANES + i % 2];
    // The two rows of 16 lanes are 8 apart, so their elements are in different banks.
    static_assert(T::THREADS / LANES == 16, "group / 2 + group % 2 * 8 is a row of the first 16");
    for (int m = group / 2 + group % 2 * 8; m < TILE; m += T::THREADS / LANES) {
        float logits[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            const float2 two = *reinterpret_cast<const float2 *>(shared + m * T::STRIDE + first + i * LANES);
            logits[i] = two.x + bias[i], logits[i + 1] = two.y + bias[i + 1];
        }
        write_exponentials<LANES>(to, m0 + m, place.n, m0 + m < rows, [&](int i) { return logits[i]; });
    }
}

static constexpr int DLOGITS_THREADS = 512;
// T: the type of the gradient, bf16, or float for TF32.
template <class T> struct Gradient {
    using Exp = std::conditional_t<std::is_same_v<T, bf16>, Exp16, Exp32>;
    static_assert(sizeof(Exp) == sizeof(T), "a gradient replaces an exponential");
    static constexpr int PACK = 16 / sizeof(T), ACROSS = TILE / PACK, DOWN = DLOGITS_THREADS / ACROSS;
    // Rows of a thread that are loaded before the first of them is stored.  Two blocks leave 64 registers for a thread.
    static constexpr int AT_ONCE = sizeof(T) == 2 ? 4 : 2, ROWS = AT_ONCE * DOWN;
};

// Write ROWS rows of a tile, from row `first` on and below `end`, to dlogits'.
template <int ROWS> DEVICE void write_transposed(const Call &c, const float (&square)[ROWS][TILE + 1], int64_t first,
                                                 int64_t end) {
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TILE; i += DLOGITS_THREADS) {
        const int row = i % ROWS, column = i / ROWS;
        const int64_t v = blockIdx.x * TILE + column;
        if (v < c.V && first + row < end) c.dlogits_t[v * c.chunk + first + row] = square[row][column];
    }
    __syncthreads();
}

template <class T> static __global__ void __launch_bounds__(DLOGITS_THREADS, 2) dlogits(Call c) {
    wait_for_last_kernel();
    using G = Gradient<T>;
    constexpr int PACK = G::PACK, ACROSS = G::ACROSS, DOWN = G::DOWN, AT_ONCE = G::AT_ONCE;
    constexpr bool TRANSPOSES = std::is_same_v<T, float>;
    SHARED(float, sums, [DOWN][TILE]);
    SHARED(float, square, [TRANSPOSES ? G::ROWS : 1][TILE + 1]);
    const bool adds = c.dloss || c.first > 0;
    const int64_t rows = c.rows(), tile = blockIdx.x, v = tile * TILE + threadIdx.x % ACROSS * PACK;
    if (adds && rows <= 0) return;
    const float scale = c.scale(), on_label = scale * (1.0f - c.smoothing);
    const float everywhere = scale * c.smoothing / static_cast<float>(c.V);
    const int64_t m0 = blockIdx.y * c.row_part;
    // the products read whole steps of 64 rows, and 0 times NaN is NaN
    const int64_t zeros = min(m0 + c.row_part, round_up<int64_t>(rows < 0 ? 0 : rows, 64)), m1 = min(zeros, rows);
    Pack<float, PACK> sum = {};
    for (int64_t base = m0; base < zeros; base += G::ROWS) {
        const int64_t first = base + threadIdx.x / ACROSS;
        uint4 words[AT_ONCE] = {};
        float factor[AT_ONCE] = {};
        int place[AT_ONCE] = {};                        // of the label in the pack
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t m = first + j * DOWN;
            if (m >= m1) continue;
            words[j] = *reinterpret_cast<const uint4 *>(static_cast<const T *>(c.exps) + m * c.ldv + v);
            factor[j] = c.pieces[m * c.tiles + tile].exps.sum;
            place[j] = static_cast<int>(c.label[c.first + m] - v);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t m = first + j * DOWN;
            Pack<float, PACK> pack = {};
            if (m < m1) {
                pack = exps_of(words[j], typename G::Exp());
#pragma unroll
                for (int i = 0; i < PACK; i++) pack.at[i] = factor[j] * pack.at[i] - everywhere;
                if (place[j] >= 0 && place[j] < PACK) { // the probability may be almost 1: the difference needs its digits
                    const float of_label = c.at_label[c.first + m] - everywhere - on_label;
#pragma unroll
                    for (int i = 0; i < PACK; i++) pack.at[i] = i == place[j] ? of_label : pack.at[i];
                }
#pragma unroll
                for (int i = 0; i < PACK; i++) sum.at[i] += pack.at[i];
            }
            if constexpr (TRANSPOSES) {
#pragma unroll
                for (int i = 0; i < PACK; i++) {
                    pack.at[i] = rounded(pack.at[i]);
                    square[threadIdx.x / ACROSS + j * DOWN][threadIdx.x % ACROSS * PACK + i] = pack.at[i];
                }
            }
            if (m < zeros) store_reals<PACK>(static_cast<T *>(c.exps) + m * c.ldv + v, pack);
        }
        if constexpr (TRANSPOSES) write_transposed(c, square, base, zeros);
    }
    store_reals<PACK>(&sums[threadIdx.x / ACROSS][threadIdx.x % ACROSS * PACK], sum);
    __syncthreads();
    const int64_t column = tile * TILE + threadIdx.x;
    const bool has_column = threadIdx.x < TILE && column < c.V;
    float total = 0.0f;
    if (has_column)
        for (int i = 0; i < DOWN; i++) total += sums[i][threadIdx.x];
    if (gridDim.y > 1) {
        if (has_column) c.bias_parts[blockIdx.y * c.ldv + column] = total;
        if (!block_arrives_last(c.ticket + tile, gridDim.y)) return;
        if (has_column) total = sum_of_parts(c.bias_parts + column, gridDim.y, c.ldv);
    }
    if (has_column) c.dbias[column] = adds ? c.dbias[column] + total : total;
}

template <class Exp> static Exponentials<Exp> exponentials_of(const Call &c) {
    return {static_cast<Exp *>(c.exps), c.pieces, c.wide_bias, c.label + c.first, c.at_label + c.first, c.V, c.ldv, c.tiles,
            c.smoothing > 0.0f};
}

// The three products, for either type of x.  M: rows of the chunk, if all are valid.
static cudaError_t launch_exponentials(const Call &c, const bf16 *x, const pyops_real *weight, int64_t M, cudaStream_t stream) {
    const Limit limit = {c.valid, c.first, false};
    const Exponentials<Exp16> to = exponentials_of<Exp16>(c);
    if (is_bf16(weight)) {
        RowProduct<bf16, Exp16> p = {nullptr, x, elements<bf16>(weight), nullptr, M, c.V, c.D, 0, c.ldx, c.D, 0, 0};
        p.limit = limit, p.exps = to;
        if (hopper_product_fits(p)) return hopper_product(p, stream);
    }
    const int64_t tiles_m = blocks_for(M, TILE);
    Launches launches;
    launches << allow_shared<exponentials>(Bf16Logits::BYTES)
             << LAUNCH_DEPENDENT(exponentials, static_cast<unsigned>(tiles_m * c.tiles), Bf16Logits::THREADS, Bf16Logits::BYTES,
                                 stream, operand(real(x), M, c.ldx, 1), operand(weight, c.V, c.D, 1), limit, to, c.D, tiles_m);
    return launches.error;
}

static cudaError_t launch_exponentials(const Call &c, const float *x, const pyops_real *, int64_t M, cudaStream_t stream) {
    RowProduct<float, Exp32> p = {nullptr, x, c.weight_rows, nullptr, M, c.V, c.D, 0, c.ldx, c.ldx, 0, 0};
    p.limit = {c.valid, c.first, false}, p.exps = exponentials_of<Exp32>(c);
    return hopper_product(p, stream);
}

static cudaError_t launch_dx(const Call &c, bf16 *dx, const pyops_real *weight, int64_t M, cudaStream_t stream) {
    const pyops_real *const gradient = real(static_cast<const bf16 *>(c.exps));
    RealProduct p = {nullptr, dx, operand(gradient, M, c.ldv, 1), operand(weight, c.D, 1, c.D), nullptr, M, c.D, c.V, c.D};
    p.limit = {c.valid, c.first, false}, p.scatter = c.position + c.first;
    return real_product(p, stream);
}
static cudaError_t launch_dx(const Call &c, float *dx, const pyops_real *, int64_t M, cudaStream_t stream) {
    RowProduct<float> p = {dx, static_cast<const float *>(c.exps), c.weight_t, nullptr, M, c.D, c.V, c.D, c.ldv, c.ldv, 0, 0};
    p.limit = {c.valid, c.first, false}, p.scatter = c.position + c.first;
    return tf32_product(p, stream);
}

static cudaError_t launch_dweight(const Call &c, const bf16 *x, int64_t M, bool adds, cudaStream_t stream) {
    const pyops_real *const gradient = real(static_cast<const bf16 *>(c.exps));
    RealProduct p = {c.dweight,
                     nullptr,
                     operand(gradient, c.V, 1, c.ldv),
                     operand(real(x), c.D, 1, c.ldx),
                     nullptr,
                     c.V,
                     c.D,
                     round_up<int64_t>(M, 64),
                     c.D,
                     adds};
    p.limit = {c.valid, c.first, true};
    return real_product(p, stream);
}
static cudaError_t launch_dweight(const Call &c, const float *, int64_t M, bool adds, cudaStream_t stream) {
    RowProduct<float> p = {c.dweight, c.dlogits_t, c.x_t + c.first, nullptr, c.V, c.D, round_up<int64_t>(M, 64),
                           c.D,       c.chunk,     c.ldr,           adds,    0};
    p.limit = {c.valid, c.first, true};
    return tf32_product(p, stream);
}

// T: bf16, or float for TF32 by wgmma.
template <class T>
static cudaError_t launch_exps(Call c, XRows<T> a, const pyops_real *weight, float *loss, int32_t ignore, cudaStream_t stream) {
    constexpr bool BY_WGMMA = std::is_same_v<T, float>;
    const auto grid = [](int64_t blocks) { return static_cast<unsigned>(blocks); };
    const unsigned of_rows = blocks_of_rows(c.R);
    Launches launches;
    launches << LAUNCH_DEPENDENT((gather<T, BY_WGMMA>), of_rows + grid(BY_WGMMA ? squares_of(c) : 0), THREADS, 0, stream, c, a,
                                 pyops_faults(), ignore, of_rows);
    do {
        const int64_t M = c.R - c.first < c.chunk ? c.R - c.first : c.chunk;    // rows, if all are valid
        const T *const x = a.x_valid + c.first * c.ldx;
        if (M) launches << launch_exponentials(c, x, weight, M, stream);
        launches << LAUNCH_DEPENDENT(row_losses, grid(std::max<int64_t>(1, blocks_for<int64_t>(M, THREADS / 32))), THREADS, 0,
                                     stream, c.first + c.chunk < c.R ? nullptr : loss, c);
        if (c.exps) {
            launches << LAUNCH_DEPENDENT(dlogits<T>, dim3(grid(c.tiles), grid(c.row_splits)), DLOGITS_THREADS, 0, stream, c);
            if (M) launches << launch_dx(c, a.dx, weight, M, stream);
            launches << launch_dweight(c, x, M, c.dloss || c.first > 0, stream);
        }
        c.first += c.chunk;
    } while (c.first < c.R);
    return launches.error;
}

extern "C" pyops_status pyops_linear_cross_entropy(float *loss, int32_t *valid, pyops_real *dx, float *dweight, float *dbias,
                                                   const float *dloss, const pyops_real *x, const pyops_real *weight,
                                                   const float *bias, const int32_t *labels, float *work, int64_t R, int64_t D,
                                                   int64_t V, int32_t ignore, float smoothing, int32_t tf32, void *stream) {
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
    const Precision precision = pyops_precision_now();
    const Keeps keeps = is_bf16(x)                                   ? Keeps::half
        : tf32 && precision == Precision::tf32 && pyops_has_hopper() ? Keeps::tf32
                                                                     : Keeps::logit;
    lay_out(&c, work, R, D, V, dx, keeps);
    const auto run = [&](auto type) {
        using T = decltype(type);
        cudaError_t error;
        if constexpr (std::is_same_v<T, bf16>) {
            const XRows<bf16> rows = {elements<bf16>(dx), elements<bf16>(x), reinterpret_cast<bf16 *>(c.x_valid)};
            error = launch_exps(c, rows, weight, loss, ignore, stream_of(stream));
        } else if (keeps == Keeps::tf32) {
            const XRows<float> rows = {elements<float>(dx), elements<float>(x), c.x_valid};
            error = launch_exps(c, rows, weight, loss, ignore, stream_of(stream));
        } else {
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
