// attention.cu - multi-head scaled dot-product attention, and the lengths of padded sequences.  On Hopper, in bfloat16,
// attention_hopper.cu computes long sequences.
//
// A pair is one head of one sequence.  Its scores are a matrix of queries x keys.  A block of four warps processes a tile of
// 64 x 64 at a time (or one warp 16 x 16, if there are no more queries and keys), in registers: a warp has 16 queries.
//
//                 64 keys                           fragments of a lane, as for tensor cores: of rows g and g + 8
//            +---------------+                      (g = lane / 4) the columns 8n + 2t, 8n + 2t + 1 (t = lane % 4)
//   16       | warp 0        |
//   queries  | warp 1        |  scores = q k'              0 1   2 3   4 5   6 7     8 9  ...
//   each     | warp 2        |                      g     |t = 0|t = 1|t = 2|t = 3| |t = 0| ...    held[n][0], held[n][1]
//            | warp 3        |                      g + 8 |t = 0|t = 1|t = 2|t = 3| |t = 0| ...    held[n][2], held[n][3]
//            +---------------+
//
// So a row of scores is in four adjacent lanes, and its softmax takes two shuffles.  Rows of q, k, v, dy are in shared memory,
// 64 channels of a head at a time.  Sums over channels (scores) iterate over all of them; of results with channels (y, dq, dk,
// dv) a block computes 64.  So any number of queries, keys and channels is supported, and usual heads take one iteration.
//
//   forward        a block has 64 queries and iterates over the keys with the online softmax (arXiv:1805.02867)
//   backward_keys  a block has 64 keys, iterates over the queries and sums dk and dv; if these are all keys, also dq
//   backward_queries   otherwise: dq as in forward; this computes the scores twice, but no block waits for another
//
// In packed rows, the grid has tiles for the longest possible sequence; those beyond the rows of a sequence end at once.
//
// No two blocks add to the same sum, so the order of every sum is fixed.  Keys that no query of a tile may see are skipped.
// Backward recomputes the weights from stats: the largest score of each query and the sum of exponentials.  Both passes round
// a score before they subtract the largest (__fmul_rn: no fused multiply-add).  Tiles in shared memory have the type T of the
// arrays.  Of floats, operands of products are rounded to TF32 or bf16 in registers, according to the precision; of bfloat16,
// ldmatrix loads whole fragments.
#include "attention_hopper.cuh"
#include "block.cuh"
#include "fragments.cuh"
#include "philox.cuh"
#include "real.cuh"

namespace {
static constexpr int CHANNELS = 64;             // of a head in shared memory at a time
static constexpr int OUT = CHANNELS / 8;        // tiles of 8 columns of a result per warp
// Elements from row to row there, an odd multiple of 16 bytes: no bank conflicts in reads of fragments.
template <class T> static constexpr int PITCH = CHANNELS + WIDEST<T>;

// A tile: a block of WARPS warps with 16 queries each, and as many keys.
template <int WARPS> struct Tile { static constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS, N = ROWS / 8; };
template <class T, int WARPS> static constexpr int SIZE = Tile<WARPS>::ROWS * PITCH<T>;         // elements

// The rows of an array (T, B, heads * C), or of packed rows (N, heads * C).
struct Rows {
    int64_t ld;                     // floats between rows of the array
    int64_t step;                   // floats between rows of a sequence
};

// Common to all blocks of a call.
struct Call {
    int64_t Tq, Tk, B, heads, C;
    Rows y, q, k, dq, dk;           // y also of dy, k of v, dk of dv
    const int32_t *lengths, *q_offsets, *k_offsets;
    const int64_t *step;            // NULL: no dropout
    uint64_t key;
    uint32_t threshold;
    int32_t causal;
    float scale, kept;              // 1 / sqrt(C), 1 / (1 - p)
    unsigned chunks;                // of CHANNELS channels
    bool whole;                     // rows can be read in units of 16 bytes
    FaultRecord *faults;
};

DEVICE int width_of(const Call &c, int64_t channel) { return static_cast<int>(min(c.C - channel, int64_t(CHANNELS))); }

// The results of a block: rows of a pair starting at `first`, channels starting at channel().
struct BlockTask {
    unsigned pair, sequence, head, chunk;
    int first;
    int Tq, Tk, length;             // of the sequence: numbers of queries, of keys, and of keys that are not padding
    int q, k;                       // its first query and its first key, in rows of their arrays
    int width;                      // number of channels, at most CHANNELS

    // Blocks are numbered by pair, tile of `rows` rows, chunk of channels.  32-bit divisions are faster than 64-bit ones.
    __device__ __forceinline__ BlockTask(const Call &c, int64_t T, int rows) {
        const unsigned tiles = static_cast<unsigned>(max((T + rows - 1) / rows, int64_t(1))), block = blockIdx.x / c.chunks;
        pair = block / tiles;
        sequence = pair / static_cast<unsigned>(c.heads);
        head = pair - sequence * static_cast<unsigned>(c.heads);
        first = static_cast<int>(block % tiles) * rows;
        chunk = blockIdx.x % c.chunks;
        width = width_of(c, channel());
        Tq = rows_of(c.q_offsets, c.Tq, q);
        Tk = rows_of(c.k_offsets, c.Tk, k);
        length = c.lengths ? min(max(c.lengths[sequence], 0), Tk) : Tk;
    }

    __device__ __forceinline__ int64_t channel() const { return static_cast<int64_t>(chunk) * CHANNELS; }

    // The number of rows of the sequence, and its first row.
    __device__ __forceinline__ int rows_of(const int32_t *offsets, int64_t T, int &row) const {
        row = offsets ? offsets[sequence] : static_cast<int>(sequence);
        const int most = static_cast<int>(T);
        return offsets ? min(max(offsets[sequence + 1] - offsets[sequence], 0), most) : most;
    }
};

// The offset of query i or of key i of the block's pair.
DEVICE int64_t query_at(const Call &c, const BlockTask &p, const Rows &rows, int i) {
    return int64_t(p.q) * rows.ld + p.head * c.C + i * rows.step;
}
DEVICE int64_t key_at(const Call &c, const BlockTask &p, const Rows &rows, int i) {
    return int64_t(p.k) * rows.ld + p.head * c.C + i * rows.step;
}

// The number of keys that query i may see, the first ones.  0 beyond the last query.
DEVICE int seen(const Call &c, const BlockTask &p, int i) {
    if (i >= p.Tq) return 0;
    return c.causal ? max(min(p.length, i + 1 + p.Tk - p.Tq), 0) : p.length;
}
// The maximum over the queries [i, i + n): the last one sees most.
DEVICE int seen_by_any(const Call &c, const BlockTask &p, int i, int n) {
    return i < p.Tq ? seen(c, p, min(i + n, p.Tq) - 1) : 0;
}
DEVICE int in_tile(int n, int rows) { return min(max(n, 0), rows); }

// ---- tiles in shared memory, and fragments in registers -----------------------------------------------------------
DEVICE int lane_row() { return lane_id() >> 2; }            // g; the second row is g + 8
DEVICE int lane_pair() { return 2 * (lane_id() & 3); }      // 2t
DEVICE int warp_row() { return 16 * (threadIdx.x >> 5); }   // this warp's first row of a tile

DEVICE float2 two(const float *x) { return *reinterpret_cast<const float2 *>(x); }
DEVICE float4 four(const float *x) { return *reinterpret_cast<const float4 *>(x); }

// A lane's part of 16 rows and 8N columns, in the layout above.
template <int N> using Held = float[N][4];

// Start to copy rows of x, `row` elements apart, to a tile; elements beyond `rows` and `width` become zeros.
template <int WARPS, class T> DEVICE void load(T *tile, const T *x, int64_t row, int rows, int width, bool whole) {
    constexpr int THREADS = Tile<WARPS>::THREADS, ROWS = Tile<WARPS>::ROWS;
    if (whole) {
        constexpr int ACROSS = CHANNELS / WIDEST<T>, STEP = THREADS / ACROSS;
        const int r = threadIdx.x / ACROSS, c = threadIdx.x % ACROSS * WIDEST<T>;
        const T *from = x + r * row + c;
        T *const to = tile + r * PITCH<T> + c;
        rows -= r;
#pragma unroll
        for (int n = 0; n < ROWS; n += STEP) {
            const bool there = n < rows && c < width;
            cp_async16(to + n * PITCH<T>, there ? from : x, there);
            from += STEP * row;
        }
    } else {
        for (int at = threadIdx.x; at < ROWS * CHANNELS; at += THREADS) {
            const int r = at / CHANNELS, c = at % CHANNELS;
            tile[r * PITCH<T> + c] = r < rows && c < width ? x[r * row + c] : as<T>(0.0f);
        }
    }
}

DEVICE void put_two(float *to, float2 x) { *reinterpret_cast<float2 *>(to) = x; }
DEVICE void put_two(bf16 *to, float2 x) { *reinterpret_cast<unsigned *>(to) = pack_bf16(x.x, x.y); }

template <int N> DEVICE void zero(Held<N> &held) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) held[n][e] = 0.0f;
}

// Write to this warp's 16 rows of a tile.
template <int N, class T> DEVICE void put(T *tile, const Held<N> &held) {
    T *at = tile + (warp_row() + lane_row()) * PITCH<T> + lane_pair();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) put_two(at + 8 * r * PITCH<T> + 8 * n, make_float2(held[n][2 * r], held[n][2 * r + 1]));
}

// Write held * factor[0] (row g) and held * factor[1] (row g + 8) to 16 rows of y in global memory, `row` floats apart.
template <class T> DEVICE void write_rows(T *y, const Held<OUT> &held, const float (&factor)[2], int64_t row, int rows,
                                          int width, bool whole) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        T *to = y + (lane_row() + 8 * r) * row;
        const bool there = lane_row() + 8 * r < rows;
#pragma unroll
        for (int n = 0; n < OUT; n++) {
            const int c = 8 * n + lane_pair();
            float2 x = make_float2(held[n][2 * r] * factor[r], held[n][2 * r + 1] * factor[r]);
            if (factor[r] == 0.0f) x = make_float2(0.0f, 0.0f);                 // also if held is NaN
            if (whole && there && c < width) put_two(to + c, x);
            if (!whole && there && c < width) to[c] = as<T>(x.x);
            if (!whole && there && c + 1 < width) to[c + 1] = as<T>(x.y);
        }
    }
}

// The sum or maximum over the four lanes of a row; all of them get it.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
DEVICE float row_max(float x) {                                // ignores NaN
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// ---- products of a warp --------------------------------------------------------------------------------------------
// Each function adds a product to d (16, 8N); its operands are in tiles or in registers.  A tensor core instruction takes 16
// summands of 16 rows of the left operand and of 8 columns of the right one, as adjacent pairs: half h of the 16 has summands
// 8h + 2t, 8h + 2t + 1.  (The TF32 instruction defines them as t and t + 4; any permutation used for both operands is
// correct.)
struct Left { unsigned x[2][4]; };              // of rows g and g + 8;  bf16: all 16 summands in x[0]
struct Right { unsigned x[2][2]; };             // of column g

template <Precision P> DEVICE void set(Left &left, int half, int r, float a, float b) {
    if constexpr (P == Precision::tf32) left.x[half][r] = to_tf32(a), left.x[half][r + 2] = to_tf32(b);
    else left.x[0][2 * half + r] = pack_bf16(a, b);
}
template <Precision P> DEVICE void set(Right &right, int half, float a, float b) {
    if constexpr (P == Precision::tf32) right.x[half][0] = to_tf32(a), right.x[half][1] = to_tf32(b);
    else right.x[0][half] = pack_bf16(a, b);
}
template <Precision P> DEVICE void multiply(float (&d)[4], const Left &left, const Right &right) {
    if constexpr (P == Precision::tf32) mma_tf32(d, left.x[0], right.x[0]), mma_tf32(d, left.x[1], right.x[1]);
    else mma_bf16(d, left.x[0], right.x[0]);
}

// Call f(n) for every STEP-th of the tiles of 8 columns in use, four tiles at a time: with a branch for each tile, its loads
// could not start before the product of the previous tile.
template <int N, int STEP = 1, class F> DEVICE void for_columns(int columns, F f) {
#pragma unroll
    for (int first = 0; first < N; first += 4)
        if (8 * first < columns)
#pragma unroll
            for (int n = first; n < first + 4 && n < N; n += STEP) f(n);
}

DEVICE float dot(float sum, float4 a, float4 b) { return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// d += a b':  a (16 rows), b (8N rows, the first `columns` of them in use), over `summands` channels.
template <Precision P, int N>
DEVICE void rows_by_rows(Held<N> &d, const float *a, const float *b, int summands, int columns) {
    if constexpr (P == Precision::fp32) {
        a += lane_row() * PITCH<float>;
        b += lane_pair() * PITCH<float>;
#pragma unroll 1
        for (int k = 0; k < summands; k += 4) {
            const float4 a0 = four(a + k), a1 = four(a + 8 * PITCH<float> + k);
            for_columns<N>(columns, [&](int n) {
                const float4 b0 = four(b + 8 * n * PITCH<float> + k), b1 = four(b + (8 * n + 1) * PITCH<float> + k);
                d[n][0] = dot(d[n][0], a0, b0), d[n][1] = dot(d[n][1], a0, b1);
                d[n][2] = dot(d[n][2], a1, b0), d[n][3] = dot(d[n][3], a1, b1);
            });
        }
    } else {
        a += lane_row() * PITCH<float> + lane_pair();
        b += lane_row() * PITCH<float> + lane_pair();
#pragma unroll 2
        for (int k = 0; k < summands; k += 16) {
            Left left;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float2 x = two(a + 8 * r * PITCH<float> + k + 8 * half);
                    set<P>(left, half, r, x.x, x.y);
                }
            for_columns<N>(columns, [&](int n) {
                Right right;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float2 x = two(b + 8 * n * PITCH<float> + k + 8 * half);
                    set<P>(right, half, x.x, x.y);
                }
                multiply<P>(d[n], left, right);
            });
        }
    }
}

// The same for tiles of bfloat16.  A load of b has two tiles of 8 columns, n and n + 1.
template <int N> DEVICE void multiply_two(Held<N> &d, int n, const unsigned (&left)[4], const unsigned (&right)[4]) {
    const unsigned first[2] = {right[0], right[1]}, second[2] = {right[2], right[3]};
    mma_bf16(d[n], left, first);
    mma_bf16(d[n + 1], left, second);
}
template <Precision P, int N>
DEVICE void rows_by_rows(Held<N> &d, const bf16 *a, const bf16 *b, int summands, int columns) {
#pragma unroll 2
    for (int k = 0; k < summands; k += 16) {
        unsigned left[4];
        fragment<PITCH<bf16>, true, true>(left, a, 0, k);
        for_columns<N, 2>(columns, [&](int n) {
            unsigned right[4];
            fragment<PITCH<bf16>, true, false>(right, b, 8 * n, k);
            multiply_two(d, n, left, right);
        });
    }
}

// The inner step of the two products below, for one summand in float32 or 16 on a tensor core: elements of the left operand,
// of rows g and g + 8, times rows of b.
DEVICE void add_row(Held<OUT> &d, float a0, float a1, const float *b, int columns) {
    for_columns<OUT>(columns, [&](int n) {
        const float2 x = two(b + lane_pair() + 8 * n);
        d[n][0] += a0 * x.x, d[n][1] += a0 * x.y;
        d[n][2] += a1 * x.x, d[n][3] += a1 * x.y;
    });
}
template <Precision P> DEVICE void add_rows(Held<OUT> &d, const Left &left, const float *b, int columns) {
    b += lane_pair() * PITCH<float> + lane_row();
    for_columns<OUT>(columns, [&](int n) {
        Right right;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *x = b + 8 * half * PITCH<float> + 8 * n;
            set<P>(right, half, x[0], x[PITCH<float>]);
        }
        multiply<P>(d[n], left, right);
    });
}

template <Precision P> DEVICE void add_rows(Held<OUT> &d, const Left &left, const bf16 *b, int columns) {
    for_columns<OUT, 2>(columns, [&](int n) {
        unsigned right[4];
        fragment<PITCH<bf16>, false, false>(right, b, 8 * n, 0);
        multiply_two(d, n, left.x[0], right);
    });
}

// d += held b:  held (16, 8N), the first `summands` columns in use, b (as many rows).
template <Precision P, int N, class T>
DEVICE void held_by_columns(Held<OUT> &d, const Held<N> &held, const T *b, int summands, int columns) {
    if constexpr (P == Precision::fp32) {
#pragma unroll
        for (int m = 0; m < N; m++)
#pragma unroll 1
            for (int k = 0; k < 8 && 8 * m < summands; k += 2) {            // from the lane of the row that has both
                const int lane = (lane_id() & ~3) | k >> 1;
                float a[4];
#pragma unroll
                for (int e = 0; e < 4; e++) a[e] = __shfl_sync(ALL_LANES, held[m][e], lane);
                add_row(d, a[0], a[2], b + (8 * m + k) * PITCH<float>, columns);
                add_row(d, a[1], a[3], b + (8 * m + k + 1) * PITCH<float>, columns);
            }
    } else {
#pragma unroll
        for (int m = 0; m < N; m += 2)
            if (8 * m < summands) {
                Left left;
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int r = 0; r < 2; r++) set<P>(left, half, r, held[m + half][2 * r], held[m + half][2 * r + 1]);
                add_rows<P>(d, left, b + 8 * m * PITCH<T>, columns);
            }
    }
}

// d += a' b:  16 columns of a, rows [from, to) of both; from is a multiple of 16.
template <Precision P>
DEVICE void columns_by_columns(Held<OUT> &d, const float *a, const float *b, int from, int to, int columns) {
    a += lane_row();
    if constexpr (P == Precision::fp32) {
#pragma unroll 2
        for (int k = from; k < to; k++) add_row(d, a[k * PITCH<float>], a[k * PITCH<float> + 8], b + k * PITCH<float>, columns);
    } else {
#pragma unroll 2
        for (int k = from; k < to; k += 16) {
            Left left;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float *x = a + (k + 8 * half + lane_pair()) * PITCH<float> + 8 * r;
                    set<P>(left, half, r, x[0], x[PITCH<float>]);
                }
            add_rows<P>(d, left, b + k * PITCH<float>, columns);
        }
    }
}
template <Precision P>
DEVICE void columns_by_columns(Held<OUT> &d, const bf16 *a, const bf16 *b, int from, int to, int columns) {
#pragma unroll 2
    for (int k = from; k < to; k += 16) {
        Left left;
        fragment<PITCH<bf16>, false, true>(left.x[0], a, 0, k);
        add_rows<P>(d, left, b + k * PITCH<bf16>, columns);
    }
}

// ---- masks ----------------------------------------------------------------------------------------------------------
// The scores of a tile that a lane uses: visible keys, and among them the keys that dropout keeps.
struct Mask {
    int limit[2];                   // number of visible keys of rows g and g + 8, minus 2t
    int columns;                    // number of keys visible to any row of this warp
    uint32_t kept[2];               // bit 4n + e: dropout keeps key e of the lane's two keys in column group n

    __device__ __forceinline__ bool sees(int n, int e) const { return 8 * n + (e & 1) < limit[e >> 1]; }
    __device__ __forceinline__ bool keeps(int n, int e) const { return kept[e >> 1] >> (4 * n + (e & 1)) & 1; }
};

// The mask of the tile that starts at query i and key j.  A counter yields the words of four keys, which belong to two lanes:
// of a pair of lanes, the even one generates them for row g, the odd one for row g + 8, and they exchange the bits.
template <int WARPS> DEVICE Mask make_mask(const Call &c, const BlockTask &p, int i, int j) {
    constexpr int N = Tile<WARPS>::N;
    const int first = i + warp_row();
    Mask mask;
    mask.columns = in_tile(seen_by_any(c, p, first, 16) - j, 8 * N);
    for (int r = 0; r < 2; r++) {
        mask.limit[r] = in_tile(seen(c, p, first + lane_row() + 8 * r) - j, 8 * N) - lane_pair();
        mask.kept[r] = ~0u;
    }
    if (c.step) {
        const bool odd = lane_id() & 1;
        const uint64_t quarter = (c.Tk + 3) / 4, step = c.step[0];
        const uint64_t group = (p.pair * c.Tq + first + lane_row() + 8 * odd) * quarter + j / 4 + (lane_id() >> 1 & 1);
        uint32_t bits = 0;
#pragma unroll 2
        for (int n = 0; n < N; n++)
            if (8 * n < mask.columns) {
                const Words random = philox(group + 2 * n, step, c.key);
                for (int e = 0; e < 4; e++) bits |= static_cast<uint32_t>(random.word[e] >= c.threshold) << (4 * n + e);
            }
        const uint32_t other = __shfl_xor_sync(ALL_LANES, bits, 1);
        mask.kept[0] = (odd ? other : bits) >> 2 * odd;
        mask.kept[1] = (odd ? bits : other) >> 2 * odd;
    }
    return mask;
}

// ---- forward ----------------------------------------------------------------------------------------------------------
// ONCE: one tile contains all keys.  Then the result needs no registers while the scores are computed, and four blocks fit on
// a multiprocessor instead of three.
template <class T, Precision P, int WARPS, bool ONCE>
static __global__ void __launch_bounds__(Tile<WARPS>::THREADS, (ONCE ? 16 : 12) / WARPS)
    forward(Call c, T *y, float *stats, const T *q, const T *k, const T *v) {
    wait_for_last_kernel();
    constexpr int ROWS = Tile<WARPS>::ROWS, N = Tile<WARPS>::N;
    DYN_SHARED(T, q_tile);
    T *const k_tile = q_tile + SIZE<T, WARPS>, *const v_tile = k_tile + SIZE<T, WARPS>;
    const BlockTask p(c, c.Tq, ROWS);
    const int queries = in_tile(p.Tq - p.first, ROWS), above = warp_row();
    const int all = seen_by_any(c, p, p.first, ROWS);
    if (threadIdx.x == 0 && p.first == 0 && p.chunk == 0 && p.head == 0)
        check_sequence(c.faults, c.lengths, c.q_offsets, c.k_offsets, p.sequence, c.Tq, c.Tk);
    float sum[2] = {0.0f, 0.0f}, top[2] = {-INFINITY, -INFINITY};    // sum of exp(score - top), maximum of the scores, so far
    const auto write_stats = [&] {
        if (p.chunk || lane_pair()) return;
        float *at = stats + p.pair * c.Tq + (p.first + above + lane_row());
        for (int r = 0; r < 2; r++)
            if (lane_row() + 8 * r < queries - above) {
                at[8 * r] = top[r];
                at[c.B * c.heads * c.Tq + 8 * r] = sum[r];
            }
    };
    Held<OUT> result;
    zero(result);
    for (int j = 0; j < all; j += ROWS) {
        const int keys = in_tile(all - j, ROWS);
        const int64_t from_key = key_at(c, p, c.k, j);
        const T *const k_rows = k + from_key, *const v_rows = v + from_key;
        Mask mask = {};
        Held<N> s;
        zero(s);
        for (unsigned chunk = 0; chunk < c.chunks; chunk++) {
            const int64_t channel = int64_t(chunk) * CHANNELS;
            const int width = width_of(c, channel);
            const bool last = chunk + 1 == c.chunks;
            if (j || chunk) __syncthreads();                    // all reads of the tiles have finished
            if (!j || c.chunks > 1)
                load<WARPS>(q_tile, q + query_at(c, p, c.q, p.first) + channel, c.q.step, queries, width, c.whole);
            load<WARPS>(k_tile, k_rows + channel, c.k.step, keys, width, c.whole);
            cp_async_commit();
            if (last) load<WARPS>(v_tile, v_rows + p.channel(), c.k.step, keys, p.width, c.whole);
            cp_async_commit();
            if (chunk == 0) mask = make_mask<WARPS>(c, p, p.first, j);          // while copies are in flight
            cp_async_wait<1>();                                 // v may still be in flight
            __syncthreads();
            rows_by_rows<P>(s, q_tile + above * PITCH<T>, k_tile, width, mask.columns);
        }
        float before[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float now = top[r], part = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = __fmul_rn(s[n][e], c.scale);
                    if (mask.sees(n, e)) now = fmaxf(now, s[n][e]);             // ignores NaN; its weight is NaN
                }
            now = row_max(now);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    const float weight = mask.sees(n, e) ? expf(s[n][e] - now) : 0.0f;
                    part += weight;
                    s[n][e] = mask.keeps(n, e) ? weight : 0.0f;
                }
            before[r] = top[r] == -INFINITY ? 0.0f : expf(top[r] - now);
            sum[r] = sum[r] * before[r] + row_sum(part);
            top[r] = now;
        }
        if (j)
#pragma unroll
            for (int n = 0; n < OUT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) result[n][e] *= before[e >> 1];
        if (ONCE) write_stats();                                // here, not below: registers are scarce during the product
        cp_async_wait<0>();
        __syncthreads();                                        // v has arrived
        held_by_columns<P>(result, s, v_tile, mask.columns, p.width);
        if (ONCE) break;
    }
    const float factor[2] = {sum[0] == 0.0f ? 0.0f : c.kept / sum[0], sum[1] == 0.0f ? 0.0f : c.kept / sum[1]};
    write_rows(y + query_at(c, p, c.y, p.first + above) + p.channel(), result, factor, c.y.step, queries - above, p.width,
               c.whole);
    if (!ONCE || all == 0) write_stats();
}

// ---- backward ---------------------------------------------------------------------------------------------------------
template <class T> struct Saved {                // inputs of both kernels
    const T *dy, *q, *k, *v, *y;
    const float *stats;
};
template <class T> struct Tiles { T *q, *dy, *k, *v; };

// dy . y of rows g and g + 8 of this warp's queries, which start at i; four lanes share a row.
template <class T> DEVICE void row_dots(float (&dsum)[2], const Call &c, const BlockTask &p, const Saved<T> &x, int i) {
    for (int r = 0; r < 2; r++) {
        const int row = i + lane_row() + 8 * r;
        const int64_t at = query_at(c, p, c.y, row);
        float sum = 0.0f;
        if (row < p.Tq)
            for (int64_t n = lane_id() & 3; n < c.C; n += 4) sum += as_float(x.dy[at + n]) * as_float(x.y[at + n]);
        dsum[r] = row_sum(sum);
    }
}

template <int WARPS, class T> DEVICE Tiles<T> lay_out(T *shared) {
    constexpr int AT = SIZE<T, WARPS>;
    return {shared, shared + AT, shared + 2 * AT, shared + 3 * AT};
}

// For queries starting at i and keys starting at j: the weights times D (see pyops.h) and the gradients of the scores, in
// registers.  Tiles are loaded if new_queries or new_keys is set, or if there are several chunks; at the end they contain the
// chunk of this block.  `all`: the number of keys to read.  dsum is an input unless all_keys is set: then it is computed as
// the sum of the weights times their gradients, which makes reading y unnecessary (docs/attention.md, Gradient).
template <class T, Precision P, int WARPS, int N>
DEVICE void weights_and_gradients(Held<N> &w, Held<N> &ds, float (&dsum)[2], const Tiles<T> &tiles, const Call &c,
                                  const BlockTask &p, const Saved<T> &x, int i, int j, int all, bool all_keys, bool new_queries,
                                  bool new_keys) {
    constexpr int ROWS = Tile<WARPS>::ROWS;
    const int queries = in_tile(p.Tq - i, ROWS), keys = in_tile(all - j, ROWS), above = warp_row();
    const int64_t from_query = query_at(c, p, c.q, i), from_dy = query_at(c, p, c.y, i), from_key = key_at(c, p, c.k, j);
    const int mine = i + above + lane_row();
    Mask mask = {};
    float top[2], share[2];
    for (int r = 0; r < 2; r++) {
        const bool there = mine + 8 * r < p.Tq;
        const int64_t at = p.pair * c.Tq + mine + 8 * r;
        top[r] = there ? x.stats[at] : 0.0f;
        share[r] = there ? 1.0f / x.stats[c.B * c.heads * c.Tq + at] : 0.0f;
    }
    zero(w);
    zero(ds);
    for (unsigned n = 0; n < c.chunks; n++) {
        const int64_t channel = static_cast<int64_t>((p.chunk + n + 1) % c.chunks) * CHANNELS;      // this block's chunk last
        const int width = width_of(c, channel);
        __syncthreads();                                        // all reads of the tiles have finished
        const bool queries_too = new_queries || c.chunks > 1, keys_too = new_keys || c.chunks > 1;
        if (queries_too) load<WARPS>(tiles.q, x.q + from_query + channel, c.q.step, queries, width, c.whole);
        if (keys_too) load<WARPS>(tiles.k, x.k + from_key + channel, c.k.step, keys, width, c.whole);
        cp_async_commit();
        if (queries_too) load<WARPS>(tiles.dy, x.dy + from_dy + channel, c.y.step, queries, width, c.whole);
        if (keys_too) load<WARPS>(tiles.v, x.v + from_key + channel, c.k.step, keys, width, c.whole);
        cp_async_commit();
        if (n == 0) mask = make_mask<WARPS>(c, p, i, j);        // while copies are in flight
        cp_async_wait<1>();                                     // dy and v may still be in flight
        __syncthreads();
        rows_by_rows<P>(w, tiles.q + above * PITCH<T>, tiles.k, width, mask.columns);
        cp_async_wait<0>();
        __syncthreads();
        rows_by_rows<P>(ds, tiles.dy + above * PITCH<T>, tiles.v, width, mask.columns);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                w[n][e] = mask.sees(n, e) ? expf(__fmul_rn(w[n][e], c.scale) - top[r]) * share[r] : 0.0f;
                ds[n][e] = mask.sees(n, e) && mask.keeps(n, e) ? ds[n][e] * c.kept : 0.0f;
                sum += w[n][e] * ds[n][e];
            }
        if (all_keys) dsum[r] = row_sum(sum);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                ds[n][e] = mask.sees(n, e) ? w[n][e] * (ds[n][e] - dsum[r]) : 0.0f;
                w[n][e] = mask.keeps(n, e) ? w[n][e] * c.kept : 0.0f;
            }
    }
}

// dk and dv of a tile of keys.  Also dq, unless it is NULL because there are several tiles of keys.  ONCE: there is one tile
// of queries, so the sums need no registers before and after it, and three blocks fit on a multiprocessor instead of two.
template <class T, Precision P, int WARPS, bool ONCE>
static __global__ void __launch_bounds__(Tile<WARPS>::THREADS, (ONCE ? 12 : 8) / WARPS)
    backward_keys(Call c, T *dq, T *dk, T *dv, Saved<T> x) {
    wait_for_last_kernel();
    constexpr int ROWS = Tile<WARPS>::ROWS, N = Tile<WARPS>::N;
    DYN_SHARED(T, shared);
    const Tiles<T> tiles = lay_out<WARPS>(shared);
    T *const transposed = ONCE ? tiles.v : tiles.v + SIZE<T, WARPS>;                // w, then ds; ONCE: in the memory of v
    const BlockTask p(c, c.Tk, ROWS);
    const int j = p.first, all = p.Tq > 0 ? seen(c, p, p.Tq - 1) : 0;
    const int above = warp_row(), mine = in_tile(p.Tk - j - above, 16);
    bool first = true;
    Held<OUT> dk_sum, dv_sum;
    zero(dk_sum);
    zero(dv_sum);
    for (int i = 0; i < p.Tq; i += ROWS) {
        const int queries = in_tile(p.Tq - i, ROWS);
        float dsum[2];
        Held<N> w, ds;
        Held<OUT> dq_sum;
        zero(dq_sum);
        if (seen_by_any(c, p, i, ROWS) > j) {
            if (!dq) row_dots(dsum, c, p, x, i + above);
            weights_and_gradients<T, P, WARPS>(w, ds, dsum, tiles, c, p, x, i, j, all, dq, true, first);
            first = false;
            // The first query of this tile that sees any of these keys, rounded down to a multiple of 16.
            const int from = c.causal ? in_tile(j + above - (p.Tk - p.Tq) - i, ROWS) & ~15 : 0;
            __syncthreads();                                    // all reads of v have finished
            put(transposed, w);
            __syncthreads();
            columns_by_columns<P>(dv_sum, transposed + above, tiles.dy, from, queries, p.width);
            if (dq) held_by_columns<P>(dq_sum, ds, tiles.k, in_tile(all - j, ROWS), p.width);
            __syncthreads();
            put(transposed, ds);
            __syncthreads();
            columns_by_columns<P>(dk_sum, transposed + above, tiles.q, from, queries, p.width);
        }
        if (dq) {
            float factor[2];
            for (int r = 0; r < 2; r++) factor[r] = seen(c, p, i + above + lane_row() + 8 * r) ? c.scale : 0.0f;
            write_rows(dq + query_at(c, p, c.dq, i + above) + p.channel(), dq_sum, factor, c.dq.step, queries - above, p.width,
                       c.whole);
        }
        if (ONCE) break;
    }
    float once[2], scaled[2];
    for (int r = 0; r < 2; r++) {
        const bool used = j + above + lane_row() + 8 * r < all;             // by any query
        once[r] = used ? 1.0f : 0.0f;
        scaled[r] = used ? c.scale : 0.0f;
    }
    const int64_t at = key_at(c, p, c.dk, j + above) + p.channel();
    write_rows(dk + at, dk_sum, scaled, c.dk.step, mine, p.width, c.whole);
    write_rows(dv + at, dv_sum, once, c.dk.step, mine, p.width, c.whole);
}

// dq of a tile of queries.
template <class T, Precision P, int WARPS>
static __global__ void __launch_bounds__(Tile<WARPS>::THREADS, 8 / WARPS) backward_queries(Call c, T *dq, Saved<T> x) {
    wait_for_last_kernel();
    constexpr int ROWS = Tile<WARPS>::ROWS, N = Tile<WARPS>::N;
    DYN_SHARED(T, shared);
    const Tiles<T> tiles = lay_out<WARPS>(shared);
    const BlockTask p(c, c.Tq, ROWS);
    const int i = p.first, all = seen_by_any(c, p, i, ROWS);
    const int above = warp_row();
    float factor[2], dsum[2];
    Held<OUT> sum;
    zero(sum);
    row_dots(dsum, c, p, x, i + above);
    for (int j = 0; j < all; j += ROWS) {
        Held<N> w, ds;
        weights_and_gradients<T, P, WARPS>(w, ds, dsum, tiles, c, p, x, i, j, all, false, j == 0, true);
        held_by_columns<P>(sum, ds, tiles.k, in_tile(all - j, ROWS), p.width);
    }
    for (int r = 0; r < 2; r++) factor[r] = seen(c, p, i + above + lane_row() + 8 * r) ? c.scale : 0.0f;
    const int64_t at = query_at(c, p, c.dq, i + above) + p.channel();
    write_rows(dq + at, sum, factor, c.dq.step, in_tile(p.Tq - i, ROWS) - above, p.width, c.whole);
}

// ---- calls --------------------------------------------------------------------------------------------------------------
// The rows of an array whose rows are ld floats apart.
static Rows rows_of(const int32_t *offsets, int64_t B, int64_t ld) { return {ld, offsets ? ld : B * ld}; }

static pyops_status make_call(Call &c, const char *who, int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int64_t C,
                              int64_t ldq, int64_t ldk, const int32_t *lengths, const int32_t *q_offsets,
                              const int32_t *k_offsets, const int64_t *step, int32_t causal, float p, uint64_t key) {
    pyops_status status = check_attention(who, lengths, k_offsets, Tq, Tk, B, heads, C, p);
    if (!status) status = check_attention_rows(who, "ldq", ldq, heads, C);
    if (!status) status = check_attention_rows(who, "ldk", ldk, heads, C);
    if (status) return status;
    PYOPS_REQUIRE(Tq <= 1 << 30 && Tk <= 1 << 30, "%s: Tq=%lld Tk=%lld, expected at most 2^30", who, LL(Tq), LL(Tk));
    const bool drops = step && p > 0.0f;
    c = {Tq,
         Tk,
         B,
         heads,
         C,
         rows_of(q_offsets, B, heads * C),
         rows_of(q_offsets, B, ldq),
         rows_of(k_offsets, B, ldk),
         {},
         {},
         lengths,
         q_offsets,
         k_offsets,
         drops ? step : nullptr,
         key,
         dropout_threshold(p),
         causal,
         1.0f / sqrtf(static_cast<float>(C)),
         drops ? 1.0f / (1.0f - p) : 1.0f,
         static_cast<unsigned>(blocks_for<int64_t>(C, CHANNELS)),
         false,
         pyops_faults()};
    return PYOPS_OK;
}

// Whether rows can be read in units of 16 bytes.  steps: the bitwise or of their distances and lengths, in elements.
template <class T, class... Pointers> static bool rows_of_16_bytes(int64_t steps, Pointers... x) {
    return steps % WIDEST<T> == 0 && (aligned(x) && ...);
}

// Blocks for the tiles of T rows of all pairs; a grid has at most 2^31 - 1 blocks.
static pyops_status count_blocks(unsigned &blocks, const char *who, const Call &c, int64_t T, int rows) {
    const double needed = static_cast<double>(c.B) * static_cast<double>(c.heads) * static_cast<double>(c.chunks) *
        static_cast<double>(T > rows ? blocks_for<int64_t>(T, rows) : 1);
    PYOPS_REQUIRE(needed < 2147483648.0, "%s: B=%lld heads=%lld, expected fewer than 2^31 blocks of scores", who, LL(c.B),
                  LL(c.heads));
    blocks = static_cast<unsigned>(needed);
    return PYOPS_OK;
}

// Launch a kernel with `tiles` tiles in shared memory.
template <class T, int WARPS, class... Wanted, class... Given>
static cudaError_t launch(void (*kernel)(Wanted...), unsigned blocks, int tiles, void *stream, Given... arguments) {
    const int bytes = tiles * SIZE<T, WARPS> * static_cast<int>(sizeof(T));
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return error == cudaSuccess ? LAUNCH_DEPENDENT(kernel, blocks, Tile<WARPS>::THREADS, bytes, stream_of(stream), arguments...)
                                : error;
}

template <class T, Precision P, int WARPS>
static pyops_status run_forward(const Call &c, T *y, float *stats, const T *q, const T *k, const T *v, void *stream) {
    unsigned blocks = 0;
    const pyops_status status = count_blocks(blocks, "attention_forward", c, c.Tq, Tile<WARPS>::ROWS);
    if (status) return status;
    Launches launches;
    if (c.Tk <= Tile<WARPS>::ROWS)
        launches << launch<T, WARPS>(forward<T, P, WARPS, true>, blocks, 3, stream, c, y, stats, q, k, v);
    else if constexpr (WARPS > 1)
        launches << launch<T, WARPS>(forward<T, P, WARPS, false>, blocks, 3, stream, c, y, stats, q, k, v);
    return pyops_launched("attention_forward", launches.error, stream);
}

template <class T, Precision P, int WARPS>
static pyops_status run_backward(const Call &c, T *dq, T *dk, T *dv, const Saved<T> &saved, void *stream) {
    constexpr int ROWS = Tile<WARPS>::ROWS;
    const bool all_keys = c.Tk <= ROWS;
    unsigned key_blocks = 0, query_blocks = 0;
    pyops_status status = count_blocks(key_blocks, "attention_backward", c, c.Tk, ROWS);
    if (!status) status = count_blocks(query_blocks, "attention_backward", c, c.Tq, ROWS);
    if (status) return status;
    T *const dq_too = all_keys ? dq : nullptr;
    Launches launches;
    if (c.Tq <= ROWS)
        launches << launch<T, WARPS>(backward_keys<T, P, WARPS, true>, key_blocks, 4, stream, c, dq_too, dk, dv, saved);
    if constexpr (WARPS > 1) {              // one warp: there are at most ROWS of both
        if (c.Tq > ROWS)
            launches << launch<T, WARPS>(backward_keys<T, P, WARPS, false>, key_blocks, 5, stream, c, dq_too, dk, dv, saved);
        if (!all_keys) launches << launch<T, WARPS>(backward_queries<T, P, WARPS>, query_blocks, 4, stream, c, dq, saved);
    }
    return pyops_launched("attention_backward", launches.error, stream);
}
}

// Call run<T, precision, warps>(...) for the type, the current precision and the size.  Products of bfloat16 arrays have the
// precision bf16.
#define FOR_PRECISION(T, run, warps, ...) \
    (std::is_same_v<T, bf16> || pyops_precision_now() == Precision::bf16 ? run<T, Precision::bf16, warps>(__VA_ARGS__) \
         : pyops_precision_now() == Precision::fp32 ? run<T, NARROWEST<T, Precision::fp32>, warps>(__VA_ARGS__) \
                                                    : run<T, NARROWEST<T, Precision::tf32>, warps>(__VA_ARGS__))
#define FOR_SIZE(T, run, c, ...) \
    ((c).Tq <= 16 && (c).Tk <= 16 ? FOR_PRECISION(T, run, 1, c, __VA_ARGS__) : FOR_PRECISION(T, run, 4, c, __VA_ARGS__))
// P, but bf16 for bfloat16 arrays, so that no kernel is compiled that no call selects.
template <class T, Precision P> static constexpr Precision NARROWEST = std::is_same_v<T, bf16> ? Precision::bf16 : P;

// The call for attention_hopper.cu, and whether it takes it: arrays of floats only.
static HopperAttention hopper_call(const Call &c, int64_t ldq, int64_t ldk, int64_t lddq, int64_t lddk) {
    return {c.Tq,        c.Tk,        c.B,    c.heads, c.C,         ldq,      ldk,     lddq,   lddk,    c.lengths,
            c.q_offsets, c.k_offsets, c.step, c.key,   c.threshold, c.causal, c.scale, c.kept, c.faults};
}
template <class T> static bool takes(const HopperAttention &h, bool aligned) {
    const AttentionKernels wanted = pyops_attention_now();
    const bool is_bf16 = sizeof(T) == 2 || pyops_precision_now() == Precision::bf16;
    if (!is_bf16 || wanted == AttentionKernels::tiles) return false;
    return hopper_attention_fits(h, aligned) && (wanted == AttentionKernels::hopper || hopper_attention_pays(h));
}

extern "C" pyops_status pyops_attention_forward(pyops_real *y, float *stats, const pyops_real *q, const pyops_real *k,
                                                const pyops_real *v, const int32_t *lengths, const int32_t *q_offsets,
                                                const int32_t *k_offsets, const int64_t *step, int64_t Tq, int64_t Tk,
                                                int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk, int32_t causal,
                                                float p, uint64_t key, void *stream) {
    Call c;
    const pyops_status status = make_call(c, "attention_forward", Tq, Tk, B, heads, C, ldq, ldk, lengths, q_offsets, k_offsets,
                                          step, causal, p, key);
    if (status || Tq == 0 || B == 0) return status;
    const auto run = [&](auto type) {
        using T = decltype(type);
        c.whole = rows_of_16_bytes<T>(C | ldq | ldk, y, q, k, v);
        if (const HopperAttention h = hopper_call(c, ldq, ldk, 0, 0); takes<T>(h, c.whole))
            return pyops_launched("attention_forward",
                                  hopper_attention_forward(h, elements<T>(y), stats, elements<T>(q), elements<T>(k),
                                                           elements<T>(v), stream_of(stream)),
                                  stream);
        return FOR_SIZE(T, run_forward, c, elements<T>(y), stats, elements<T>(q), elements<T>(k), elements<T>(v), stream);
    };
    return with_type("attention_forward", run, y, q, k, v);
}

extern "C" pyops_status pyops_attention_backward(pyops_real *dq, pyops_real *dk, pyops_real *dv, const pyops_real *dy,
                                                 const pyops_real *q, const pyops_real *k, const pyops_real *v,
                                                 const int32_t *lengths, const int32_t *q_offsets, const int32_t *k_offsets,
                                                 const int64_t *step, const pyops_real *y, const float *stats, int64_t Tq,
                                                 int64_t Tk, int64_t B, int64_t heads, int64_t C, int64_t ldq, int64_t ldk,
                                                 int64_t lddq, int64_t lddk, int32_t causal, float p, uint64_t key,
                                                 void *stream) {
    const char *const who = "attention_backward";
    Call c;
    pyops_status status = make_call(c, who, Tq, Tk, B, heads, C, ldq, ldk, lengths, q_offsets, k_offsets, step, causal, p, key);
    if (!status) status = check_attention_rows(who, "lddq", lddq, heads, C);
    if (!status) status = check_attention_rows(who, "lddk", lddk, heads, C);
    if (status || (Tq == 0 && Tk == 0) || B == 0) return status;
    c.dq = rows_of(q_offsets, B, lddq);
    c.dk = rows_of(k_offsets, B, lddk);
    const auto run = [&](auto type) {
        using T = decltype(type);
        const Saved<T> saved = {elements<T>(dy), elements<T>(q), elements<T>(k), elements<T>(v), elements<T>(y), stats};
        c.whole = rows_of_16_bytes<T>(C | ldq | ldk | lddq | lddk, dq, dk, dv, dy, q, k, v, y);
        if (const HopperAttention h = hopper_call(c, ldq, ldk, lddq, lddk); takes<T>(h, c.whole))
            return pyops_launched(who,
                                  hopper_attention_backward(h, elements<T>(dq), elements<T>(dk), elements<T>(dv), saved.dy,
                                                            saved.q, saved.k, saved.v, saved.y, stats, stream_of(stream)),
                                  stream);
        return FOR_SIZE(T, run_backward, c, elements<T>(dq), elements<T>(dk), elements<T>(dv), saved, stream);
    };
    return with_type(who, run, dq, dk, dv, dy, q, k, v, y);
}

// ---- lengths of padded sequences --------------------------------------------------------------------------------------
namespace {
// 32 sequences per block, a lane each; the warps divide the steps.
static constexpr int SEQUENCES = 32, SHARES = 8;

static __global__ void find_lengths(int32_t *lengths, const int32_t *ids, int64_t T, int64_t B, int32_t pad) {
    SHARED(int32_t, part, [SHARES][SEQUENCES]);
    const int64_t b = blockIdx.x * int64_t(SEQUENCES) + threadIdx.x;
    int32_t length = 0;
#pragma unroll 4
    for (int64_t t = threadIdx.y; t < T; t += SHARES)
        if (b < B && ids[t * B + b] != pad) length = static_cast<int32_t>(t + 1);
    part[threadIdx.y][threadIdx.x] = length;
    __syncthreads();
    if (threadIdx.y == 0 && b < B) {
        for (int n = 1; n < SHARES; n++) length = max(length, part[n][threadIdx.x]);
        lengths[b] = length;
    }
}
}

extern "C" pyops_status pyops_sequence_lengths(int32_t *lengths, const int32_t *ids, int64_t T, int64_t B, int32_t pad,
                                               void *stream) {
    PYOPS_REQUIRE(T >= 0 && T <= INT32_MAX && B >= 0, "sequence_lengths: T=%lld B=%lld, expected T from 0 to 2^31 - 1, B >= 0",
                  LL(T), LL(B));
    if (B == 0) return PYOPS_OK;
    const unsigned blocks = static_cast<unsigned>(blocks_for<int64_t>(B, SEQUENCES));
    return pyops_launched("sequence_lengths",
                          LAUNCH(find_lengths, blocks, dim3(SEQUENCES, SHARES), 0, stream_of(stream), lengths, ids, T, B, pad),
                          stream);
}
