// attention_hopper.cu - attention on Hopper: wgmma on bfloat16 operands, for long sequences.
//
// The definition, the masks and the dropout are as in attention.cu.  A block has three warpgroups of 128 threads.  Two
// multiply, 64 rows each; the third copies tiles to shared memory, where it runs ahead by the slots of a ring:
//
//                         shared memory, bfloat16
//    warpgroup 2          resident: 128 rows  +------+------+------+---      warpgroup 0: wgmma and softmax, rows  0 ..  63
//    copies, rounds   --> ring:               | tile | tile | ...  |     --> warpgroup 1: wgmma and softmax, rows 64 .. 127
//    float32 rows                             +------+------+------+---        accumulators in registers
//                            full[slot]: the tile has arrived;   empty[slot]: all 8 warps have used it
//
//    kernel            resident   ring                products of a tile
//    forward           q          k and v             s = q k'      y += P v
//    backward_keys     k, v       q and dy            s' = k q'     dP' = v dy'    dv += W' dy    dk += dS' q
//    backward_queries  q, dy      k and v             s = q k'      dP = dy v'     dq += dS k
//
// The left operand of the last products (P, W', dS', dS) is made from accumulators and stays in registers.  backward_keys
// computes the transposed scores for this reason.  Both backward kernels compute the scores, so that every sum belongs to one
// block and has a fixed order.
//
// A tile has rows of 128 bytes, 64 channels, with the 128-byte swizzle of wgmma: piece p of 16 bytes of row r is at p ^ (r % 8).
// A head of 128 channels has two such panels; a head of 32 uses half of each row.  The same tile is an operand with rows along
// the sum (k in q k') and, with a transposed descriptor, across it (v in P v).
//
// Softmax in base 2: exp(s - max) = 2^(s c - m) with c = log2(e) / sqrt(C), and m = log2(e) * max rounded once per row.  The
// rounding of m multiplies a row by the same factor in all passes, so it cancels in P.
#include <algorithm>
#include <type_traits>
#include "attention_hopper.cuh"
#include "block.cuh"
#include "hopper.cuh"
#include "philox.cuh"
#include "product.cuh"

namespace {
static constexpr int CONSUMERS = 2, GROUP = 128, THREADS = GROUP * (CONSUMERS + 1), READERS = 4 * CONSUMERS;
static constexpr int ROWS = 64 * CONSUMERS; // of the resident tiles
static constexpr int ROW = 128; // bytes of a row in shared memory
static constexpr float LOG2E = 1.4426950408889634f;

template <int C, int N> static constexpr int tile_bytes() { return (C + 63) / 64 * N * ROW; }

// ---- sequences and masks ----------------------------------------------------------------------------------------------
// Row t of a sequence is row first + t * pitch of an array.
struct Sequence {
    int64_t first, pitch;
    int length;

    __device__ __forceinline__ Sequence(const int32_t *offsets, int64_t T, int64_t B, unsigned b) {
        first = offsets ? offsets[b] : b;
        pitch = offsets ? 1 : B;
        length = offsets ? static_cast<int>(min(max(int64_t(offsets[b + 1]) - first, int64_t(0)), T)) : static_cast<int>(T);
    }
    __device__ __forceinline__ int64_t row(int t) const { return first + t * pitch; }
};

// A launch computes `count` heads from `head` on.  q, k, v and dy have these heads only: they may be converted copies.
struct Part : HopperAttention {
    int64_t head, count, lddy;
    bool halves; // y, dq, dk and dv are bfloat16
};

// One head of one sequence, and the first of the block's rows.
struct Task {
    unsigned sequence, part, head, pair; // part: the number of the head in this launch; pair: of head and sequence
    int first, keys, shift; // keys: not padding; with causal, query i sees the first i + 1 + shift of them
    Sequence q, k;

    // Blocks are numbered by pair and tile.  `reversed`: the last tile first.
    __device__ __forceinline__ Task(const Part &c, int64_t T, bool reversed)
        : sequence(blockIdx.x / tiles(T) / static_cast<unsigned>(c.count)),
          part(blockIdx.x / tiles(T) - sequence * static_cast<unsigned>(c.count)), head(static_cast<unsigned>(c.head) + part),
          pair(sequence * static_cast<unsigned>(c.heads) + head), q(c.q_offsets, c.Tq, c.B, sequence),
          k(c.k_offsets, c.Tk, c.B, sequence) {
        const unsigned tile = blockIdx.x % tiles(T);
        first = static_cast<int>(reversed ? tiles(T) - 1 - tile : tile) * ROWS;
        keys = c.lengths ? min(max(c.lengths[sequence], 0), k.length) : k.length;
        shift = k.length - q.length;
    }
    static __device__ __forceinline__ unsigned tiles(int64_t T) { return static_cast<unsigned>((T + ROWS - 1) / ROWS); }
    // The number of keys that query i sees.
    __device__ __forceinline__ int seen(const Part &c, int i) const {
        return c.causal ? min(keys, max(i + 1 + shift, 0)) : keys;
    }
    // The offset of row t, in an input and in a result.
    __device__ __forceinline__ int64_t input(const Part &c, const Sequence &rows, int t, int64_t ld) const {
        return rows.row(t) * ld + part * c.C;
    }
    __device__ __forceinline__ int64_t result(const Part &c, const Sequence &rows, int t, int64_t ld) const {
        return rows.row(t) * ld + head * c.C;
    }
};

// ---- the copying warpgroup --------------------------------------------------------------------------------------------
// Rows of a head in memory, `step` elements apart; each copy begins where the last one ended.  A thread copies the same piece of
// 16 bytes of every TOGETHER-th row.
//
// Rows of float32 arrive in `staging`, where each thread has DEPTH pieces in flight, without registers; then it rounds its own
// pieces into the tile.
static constexpr int DEPTH = 16;
template <class Element> static constexpr int STAGING = sizeof(Element) == 4 ? DEPTH * GROUP * 16 : 0;

template <class Element, int C> struct Rows {
    static constexpr int ACROSS = C * int(sizeof(Element)) / 16, TOGETHER = GROUP / ACROSS;
    const Element *from;
    int64_t step;

    __device__ __forceinline__ Rows(const Element *x, int64_t step)
        : from(x + first() * step + piece() * (16 / int(sizeof(Element)))), step(TOGETHER * step) {}
    static __device__ __forceinline__ int first() { return threadIdx.x % GROUP / ACROSS; }
    static __device__ __forceinline__ int piece() { return threadIdx.x % ACROSS; }

    // Write N rows to a tile; from row `rows` on, zeros.
    template <int N> __device__ __forceinline__ void copy(char *tile, char *staging, int rows) {
        rows -= first();
        if constexpr (sizeof(Element) == 4) copy_floats<N>(tile, staging, rows);
        else copy_halves<N>(tile, rows);
    }
    __device__ __forceinline__ void fetch(char *to, bool there) { // beyond the end nothing is read
        cp_async16(to, from, there);
        from += step;
    }
    template <int N> __device__ __forceinline__ void copy_floats(char *tile, char *staging, int rows) {
        constexpr int PASSES = N / TOGETHER, AHEAD = PASSES < DEPTH ? PASSES : DEPTH;
        char *const to = tile + piece() / 16 * (N * ROW) + first() * ROW + piece() % 2 * 8;
        char *const mine = staging + 16 * (threadIdx.x % GROUP);
        // Unrolled further, the 24 registers of backward_keys<float, 128> do not suffice.
#pragma unroll 1
        for (int n = 0; n < AHEAD; n++) fetch(mine + n * (GROUP * 16), n * TOGETHER < rows), cp_async_commit();
#pragma unroll 2
        for (int n = 0; n < PASSES; n++) {
            cp_async_wait<AHEAD - 1>(); // piece n has arrived
            const float4 x = *reinterpret_cast<const float4 *>(mine + n % AHEAD * (GROUP * 16));
            const int place = piece() % 16 / 2 ^ ((first() + n * TOGETHER) & 7);
            *reinterpret_cast<uint2 *>(to + n * (TOGETHER * ROW) + 16 * place) = make_uint2(pack_bf16(x.x, x.y),
                                                                                            pack_bf16(x.z, x.w));
            if (n + AHEAD < PASSES) fetch(mine + n % AHEAD * (GROUP * 16), (n + AHEAD) * TOGETHER < rows);
            cp_async_commit();
        }
    }
    template <int N> __device__ __forceinline__ void copy_halves(char *tile, int rows) {
        char *const to = tile + piece() / 8 * (N * ROW) + first() * ROW + 16 * (piece() % 8 ^ (first() & 7));
#pragma unroll 4
        for (int n = 0; n < N; n += TOGETHER) fetch(to + n * ROW, n < rows); // TOGETHER is a multiple of 8
    }
};

// Announces tiles that the copying warpgroup has written.  Asynchronous copies are announced one tile later, so that two tiles
// are in flight.
template <class Element> struct Announcer {
    static constexpr bool IS_ASYNC = sizeof(Element) == 2;
    uint64_t *unannounced = nullptr;

    // wgmma reads shared memory through another path than ordinary stores and cp.async, hence the fence.
    static __device__ __forceinline__ void announce(uint64_t *full) {
        fence_proxy_async();
        __syncwarp();
        if (lane_id() == 0) mbar_arrive(full);
    }
    __device__ __forceinline__ void written(uint64_t *full) {
        cp_async_commit();
        if (!IS_ASYNC) {
            cp_async_wait<0>(); // the small copies of backward_keys
            announce(full);
            return;
        }
        if (unannounced) cp_async_wait<1>(), announce(unannounced);
        unannounced = full;
    }
    __device__ __forceinline__ void flush() {
        if (!unannounced) return;
        cp_async_wait<0>();
        announce(unannounced);
        unannounced = nullptr;
    }
    // Wait until the slot is empty.  The readers may need the unannounced tile to proceed.
    __device__ __forceinline__ void wait(uint64_t *empty, int round) {
        if (__all_sync(ALL_LANES, mbar_test(empty, round ^ 1))) return; // in the first round every slot is empty
        flush();
        mbar_wait(empty, round ^ 1);
    }
};

// ---- the mbarriers of a ring --------------------------------------------------------------------------------------------
template <int SLOTS> struct Bars {
    uint64_t full[SLOTS], empty[SLOTS];

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < SLOTS; slot++) mbar_init(full + slot, 4), mbar_init(empty + slot, READERS);
    }
    // Called by all lanes of a warp that has used the slot.
    __device__ __forceinline__ void release(int slot) {
        __syncwarp();
        if (lane_id() == 0) mbar_arrive(empty + slot);
    }
};

// ---- products of a warpgroup --------------------------------------------------------------------------------------------
// d (64 x N) = 64 rows of a tile of A_ROWS rows times N rows of another tile, over C channels.
template <int C, int A_ROWS, int N> DEVICE void multiply_rows(float (&d)[N / 2], uint64_t a, uint64_t b) {
    wg_fence();
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        wgmma_bf16<N>(d, a + k / 4 * (A_ROWS * ROW / 16) + k % 4 * 2, b + k / 4 * (N * ROW / 16) + k % 4 * 2, k > 0);
    wg_commit();
}
// d (64 x C) += a (64 x N, in registers) times the N rows of a tile, whose descriptor is transposed.  !accumulate overwrites d:
// zeros in registers, written while other products are in flight, would make the compiler wait for each product.
template <int C, int N>
DEVICE void add_rows(float (&d)[C / 2], const unsigned (&a)[N / 16][4], uint64_t b, bool accumulate) {
    wg_fence();
#pragma unroll
    for (int k = 0; k < N / 16; k++) wgmma_bf16_ra<C, true>(d, a[k], b + 128 * k, accumulate || k > 0);
    wg_commit();
}
// Accumulators (64 x N) as a left operand.  A lane has rows g and g + 8 (g = lane / 4) in d[4j], d[4j + 1] and in d[4j + 2],
// d[4j + 3], columns 8j + 2t and the next (t = lane % 4).
template <int N> DEVICE void to_fragments(unsigned (&a)[N / 16][4], const float (&d)[N / 2]) {
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[k][i] = pack_bf16(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
}
DEVICE int lane_row() { return lane_id() >> 2; } // g
DEVICE int lane_pair() { return 2 * (lane_id() & 3); } // 2t
DEVICE int warp_row() { return threadIdx.x % GROUP / 32 * 16; } // the first row of the warp in its warpgroup

// Write d * factor[0] (row g) and d * factor[1] (row g + 8) to rows of a head; at[r] is -1 if the row does not exist.
template <int C, class T>
DEVICE void write_rows(T *y, const float (&d)[C / 2], const float (&factor)[2], const int64_t (&at)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (at[r] < 0) continue;
        T *const to = y + at[r] + lane_pair();
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            float2 x = make_float2(d[4 * j + 2 * r] * factor[r], d[4 * j + 2 * r + 1] * factor[r]);
            if (factor[r] == 0.0f) x = make_float2(0.0f, 0.0f); // also if d is NaN
            if constexpr (sizeof(T) == 2) *reinterpret_cast<unsigned *>(to + 8 * j) = pack_bf16(x.x, x.y);
            else *reinterpret_cast<float2 *>(to + 8 * j) = x;
        }
    }
}
template <int C>
DEVICE void write_rows(const Part &c, void *y, const float (&d)[C / 2], const float (&factor)[2], const int64_t (&at)[2]) {
    if (c.halves) write_rows<C>(static_cast<bf16 *>(y), d, factor, at);
    else write_rows<C>(static_cast<float *>(y), d, factor, at);
}

// ---- dropout --------------------------------------------------------------------------------------------------------------
// One counter yields the words of four keys.
DEVICE uint64_t philox_group(const Part &c, const Task &p, int i, int j) {
    return (p.pair * c.Tq + i) * ((c.Tk + 3) / 4) + j / 4;
}
// For 64 queries x 64 keys of scores, queries in rows: bit 4n + e of kept[r] is set if dropout keeps element 4n + 2r + e of the
// accumulators.  The four keys of a counter belong to two lanes: the even one generates them for row g, the odd one for row
// g + 8, and they exchange the bits.  `row` is the query of this lane's row g.
DEVICE void kept_in_rows(uint32_t (&kept)[2], const Part &c, const Task &p, int row, int j, uint64_t step) {
    const bool odd = lane_id() & 1;
    const uint64_t group = philox_group(c, p, row + 8 * odd, j) + (lane_id() >> 1 & 1);
    uint32_t bits = 0;
#pragma unroll 2
    for (int n = 0; n < 8; n++) {
        const Words random = philox(group + 2 * n, step, c.key);
        for (int e = 0; e < 4; e++) bits |= static_cast<uint32_t>(random.word[e] >= c.threshold) << (4 * n + e);
    }
    const uint32_t other = __shfl_xor_sync(ALL_LANES, bits, 1);
    kept[0] = (odd ? other : bits) >> 2 * odd;
    kept[1] = (odd ? bits : other) >> 2 * odd;
}
// The same with keys in rows: bit 4n of kept[i] is set if dropout keeps element 4n + i.  The four keys of a counter belong to
// four lanes, those with the same g / 4 and t: each of them generates the bits of one i for all.  `key` is the key of this
// lane's row g, `column` the query of its first column.
DEVICE void kept_in_columns(uint32_t (&kept)[4], const Part &c, const Task &p, int key, int column, uint64_t step) {
    const int mine = lane_row() & 3;
    uint32_t bits = 0;
#pragma unroll 2
    for (int n = 0; n < 8; n++) {
        const Words random = philox(philox_group(c, p, column + 8 * n + (mine & 1), key + 8 * (mine >> 1)), step, c.key);
        for (int e = 0; e < 4; e++) bits |= static_cast<uint32_t>(random.word[e] >= c.threshold) << (4 * n + e);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) kept[i] = __shfl_sync(ALL_LANES, bits, (lane_id() & ~12) | i << 2) >> mine;
}

// ---- forward --------------------------------------------------------------------------------------------------------------
template <class Element, int C> struct Forward {
    static constexpr int KEYS = 128, SLOTS = C > 64 ? 2 : 3;
    static constexpr int Q_BYTES = tile_bytes<C, ROWS>(), K_BYTES = tile_bytes<C, KEYS>();
    struct Shared {
        Bars<SLOTS> k, v;
        uint64_t q;
    };
    static constexpr int BYTES = Q_BYTES + 2 * SLOTS * K_BYTES + STAGING<Element> + int(sizeof(Shared));
    // Registers of a thread that copies, and of the others: together 504 = 40 + 2 * 232, what the launch allocates.
    static constexpr int COPY_REGISTERS = 40, REGISTERS = 232;
};

// The online softmax of a tile of scores: s becomes exp(s - max), `factor` what the sums so far must be multiplied by.
template <int N>
DEVICE void softmax(float (&s)[N / 2], float (&top)[2], float (&sum)[2], float (&factor)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float now = top[r];
#pragma unroll
        for (int j = 0; j < N / 8; j++) now = fmaxf(now, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1])); // ignores NaN
        now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
        now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
        const float m = now == -INFINITY ? 0.0f : __fmul_rn(__fmul_rn(now, scale), LOG2E), c = scale * LOG2E;
        factor[r] = top[r] == -INFINITY ? 0.0f : exp2_fast(__fmul_rn(__fmul_rn(top[r], scale), LOG2E) - m);
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[4 * j + e] = exp2_fast(__fmaf_rn(s[4 * j + e], c, -m));
                part += s[4 * j + e];
            }
        sum[r] = sum[r] * factor[r] + part; // of this lane's columns
        top[r] = now;
    }
}

// Set the elements of keys from the limit of a row on.
template <int N> DEVICE void mask_rows(float (&s)[N / 2], const int (&limit)[2], float value) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * j + (e & 1) >= limit[e >> 1]) s[4 * j + e] = value;
}

template <class Element, int C>
static __global__ void __launch_bounds__(THREADS, 1)
    forward(Part c, void *y, float *stats, const Element *q, const Element *k, const Element *v) {
    using F = Forward<Element, C>;
    constexpr int KEYS = F::KEYS;
    DYN_SHARED(char, q_tile); // aligned to 1024 bytes for the swizzle
    char *const k_ring = q_tile + F::Q_BYTES, *const v_ring = k_ring + F::SLOTS * F::K_BYTES;
    char *const staging = v_ring + F::SLOTS * F::K_BYTES;
    auto &bars = *reinterpret_cast<typename F::Shared *>(staging + STAGING<Element>);
    if (threadIdx.x == 0) {
        bars.k.init();
        bars.v.init();
        mbar_init(&bars.q, 4);
        mbar_fence_init();
    }
    __syncthreads();
    wait_for_last_kernel();
    const Task p(c, c.Tq, c.causal);
    if (threadIdx.x == 0 && p.first == 0 && p.head == 0)
        check_sequence(c.faults, c.lengths, c.q_offsets, c.k_offsets, p.sequence, c.Tq, c.Tk);
    const int queries = min(p.q.length - p.first, ROWS);
    if (queries <= 0) return;
    const int all = p.seen(c, p.first + queries - 1), tiles = (all + KEYS - 1) / KEYS, group = threadIdx.x / GROUP;

    if (group == CONSUMERS) {
        reg_dealloc<F::COPY_REGISTERS>();
        if (tiles == 0) return;
        Announcer<Element> announcer;
        Rows<Element, C>(q + p.input(c, p.q, p.first, c.ldq), p.q.pitch * c.ldq).template copy<ROWS>(q_tile, staging, queries);
        announcer.written(&bars.q);
        const int64_t from = p.input(c, p.k, 0, c.ldk), step = p.k.pitch * c.ldk;
        Rows<Element, C> k_rows(k + from, step), v_rows(v + from, step);
        const auto copy = [&](Bars<F::SLOTS> &ring, char *tiles, Turn<F::SLOTS> &turn, Rows<Element, C> &rows, int n) {
            announcer.wait(ring.empty + turn.slot, turn.round);
            rows.template copy<KEYS>(tiles + turn.slot * F::K_BYTES, staging, all - n * KEYS);
            announcer.written(ring.full + turn.slot);
            turn.next();
        };
        Turn<F::SLOTS> k_turn, v_turn;
        for (int n = 0; n <= tiles; n++) { // k is one tile ahead of v
            if (n < tiles) copy(bars.k, k_ring, k_turn, k_rows, n);
            if (n > 0) copy(bars.v, v_ring, v_turn, v_rows, n - 1);
        }
        announcer.flush();
        return;
    }

    reg_alloc<F::REGISTERS>();
    const int row = p.first + 64 * group + warp_row() + lane_row(), least = p.seen(c, p.first + 64 * group);
    const uint64_t q_rows = wg_desc(q_tile + group * (64 * ROW)), random_step = c.step ? *c.step : 0;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, factor[2], s[KEYS / 2], sums[C / 2];
    unsigned weights[KEYS / 16][4];
    // The two warpgroups take turns to issue products, so that one multiplies during the softmax of the other.
    const auto my_turn = [&] { named_bar(1 + group, 2 * GROUP); };
    const auto your_turn = [&] { named_bar_arrive(2 - group, 2 * GROUP); };
    const auto mask_and_softmax = [&](int j) {
        if (j + KEYS > least) {
            const int limit[2] = {p.seen(c, row) - j - lane_pair(), p.seen(c, row + 8) - j - lane_pair()};
            mask_rows<KEYS>(s, limit, -INFINITY);
        }
        softmax<KEYS>(s, top, sum, factor, c.scale);
        if (c.step) {
#pragma unroll
            for (int half = 0; half < KEYS / 64; half++) {
                uint32_t kept[2];
                kept_in_rows(kept, c, p, row, j + 64 * half, random_step);
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!(kept[e >> 1] >> (4 * n + (e & 1)) & 1)) s[32 * half + 4 * n + e] = 0.0f;
            }
        }
    };
    if (tiles) {
        Turn<F::SLOTS> k_turn, v_turn;
        if (group == 1) your_turn();
        mbar_wait(&bars.q, 0);
        mbar_wait(bars.k.full, 0);
        my_turn();
        multiply_rows<C, ROWS, KEYS>(s, q_rows, wg_desc(k_ring));
        your_turn();
        wg_wait<0>();
        wg_finished(s);
        bars.k.release(0);
        k_turn.next();
        mask_and_softmax(0);
        to_fragments<KEYS>(weights, s);
        for (int n = 1; n < tiles; n++, k_turn.next(), v_turn.next()) {
            mbar_wait(bars.k.full + k_turn.slot, k_turn.round);
            my_turn();
            multiply_rows<C, ROWS, KEYS>(s, q_rows, wg_desc(k_ring + k_turn.slot * F::K_BYTES));
            mbar_wait(bars.v.full + v_turn.slot, v_turn.round);
            add_rows<C, KEYS>(sums, weights, wg_desc_trans(v_ring + v_turn.slot * F::K_BYTES, KEYS * ROW), n > 1);
            your_turn();
            wg_wait<1>();
            wg_finished(s);
            bars.k.release(k_turn.slot);
            mask_and_softmax(n * KEYS); // while the weights of the previous tile multiply v
            wg_wait<0>();
            wg_finished(sums);
            bars.v.release(v_turn.slot);
#pragma unroll
            for (int i = 0; i < C / 2; i++) sums[i] *= factor[i >> 1 & 1];
            to_fragments<KEYS>(weights, s);
        }
        mbar_wait(bars.v.full + v_turn.slot, v_turn.round);
        add_rows<C, KEYS>(sums, weights, wg_desc_trans(v_ring + v_turn.slot * F::K_BYTES, KEYS * ROW), tiles > 1);
        if (group == 0) my_turn(); // every arrival has its wait
        wg_wait<0>();
        wg_finished(sums);
    }
    int64_t at[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool there = row + 8 * r < p.q.length;
        sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
        sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
        factor[r] = sum[r] == 0.0f ? 0.0f : c.kept / sum[r];
        at[r] = there ? p.result(c, p.q, row + 8 * r, c.heads * c.C) : -1;
        if (there && lane_pair() == 0) {
            float *const to = stats + p.pair * c.Tq + row + 8 * r;
            to[0] = top[r] == -INFINITY ? -INFINITY : __fmul_rn(top[r], c.scale);
            to[c.B * c.heads * c.Tq] = sum[r];
        }
    }
    write_rows<C>(c, y, sums, factor, at);
}

// ---- backward: three numbers of each query ----------------------------------------------------------------------------------------
// For every 64 queries of a pair: log2(e) * max, 1 / sum and dsum, 64 floats each; of a query that does not exist or sees no key,
// zeros.
static constexpr int QUERIES = 64, NUMBERS = 3 * QUERIES;
static __host__ __device__ __forceinline__ int64_t query_tiles(const HopperAttention &c) {
    return (c.Tq + QUERIES - 1) / QUERIES;
}

template <class T, int C>
static __global__ void __launch_bounds__(256)
    query_numbers(HopperAttention c, float *numbers, const T *dy, const T *y, const float *stats) {
    wait_for_last_kernel();
    constexpr int LANES = C / 4, TOGETHER = 256 / LANES;
    const int64_t tiles = query_tiles(c), padded = tiles * QUERIES, n = blockIdx.x * int64_t(TOGETHER) + threadIdx.x / LANES;
    const unsigned pair = static_cast<unsigned>(n / padded), sequence = pair / static_cast<unsigned>(c.heads);
    if (pair >= c.B * c.heads) return; // whole warps: padded is a multiple of 64
    const int i = static_cast<int>(n - pair * padded);
    const Sequence rows(c.q_offsets, c.Tq, c.B, sequence);
    const bool there = i < rows.length;
    float dsum = 0.0f;
    if (there) {
        const int64_t at = (rows.row(i) * c.heads + pair % c.heads) * C + threadIdx.x % LANES * 4;
        const auto a = load_reals<4>(dy + at), b = load_reals<4>(y + at);
#pragma unroll
        for (int e = 0; e < 4; e++) dsum += a.at[e] * b.at[e];
    }
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) dsum += __shfl_xor_sync(ALL_LANES, dsum, step);
    if (threadIdx.x % LANES) return;
    const float sum = there ? stats[(c.B * c.heads + pair) * c.Tq + i] : 0.0f;
    float *const to = numbers + (pair * tiles + i / QUERIES) * NUMBERS + i % QUERIES;
    to[0] = sum == 0.0f ? 0.0f : __fmul_rn(stats[pair * c.Tq + i], LOG2E);
    to[QUERIES] = sum == 0.0f ? 0.0f : 1.0f / sum;
    to[2 * QUERIES] = dsum;
}

// ---- backward: dk and dv ----------------------------------------------------------------------------------------------------
template <class Element, int C> struct BackwardKeys {
    static constexpr int SLOTS = sizeof(Element) == 2 ? 4 : 3, K_BYTES = tile_bytes<C, ROWS>(),
                         Q_BYTES = tile_bytes<C, QUERIES>();
    static constexpr int NUMBER_BYTES = NUMBERS * int(sizeof(float)), SLOT = 2 * Q_BYTES;
    struct Shared {
        Bars<SLOTS> ring;
        uint64_t keys;
    };
    static constexpr int BYTES = 2 * K_BYTES + SLOTS * (SLOT + NUMBER_BYTES) + STAGING<Element> + int(sizeof(Shared));
    static constexpr int COPY_REGISTERS = C > 64 ? 24 : 40, REGISTERS = C > 64 ? 240 : 232;
};

// Set the elements of the first `unseen` queries of each row, which do not see its key, to 0.
template <int N> DEVICE void mask_columns(float (&s)[N / 2], const int (&unseen)[2]) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * j + (e & 1) < unseen[e >> 1]) s[4 * j + e] = 0.0f;
}

template <class Element, int C>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_keys(Part c, void *dk, void *dv, const Element *q, const Element *k, const Element *v, const Element *dy,
                  const float *numbers) {
    using K = BackwardKeys<Element, C>;
    DYN_SHARED(char, k_tile);
    char *const v_tile = k_tile + K::K_BYTES, *const ring = v_tile + K::K_BYTES;
    char *const ring_numbers = ring + K::SLOTS * K::SLOT, *const staging = ring_numbers + K::SLOTS * K::NUMBER_BYTES;
    auto &bars = *reinterpret_cast<typename K::Shared *>(staging + STAGING<Element>);
    if (threadIdx.x == 0) {
        bars.ring.init();
        mbar_init(&bars.keys, 4);
        mbar_fence_init();
    }
    __syncthreads();
    wait_for_last_kernel();
    const Task p(c, c.Tk, false);
    if (p.first >= p.k.length) return;
    // Queries from the first tile with one that sees the first key.
    const int begin = p.first >= p.keys ? p.q.length : c.causal ? max(p.first - p.shift, 0) / QUERIES * QUERIES : 0;
    const int group = threadIdx.x / GROUP;

    if (group == CONSUMERS) {
        reg_dealloc<K::COPY_REGISTERS>();
        if (begin >= p.q.length) return;
        Announcer<Element> announcer;
        const int64_t from = p.input(c, p.k, p.first, c.ldk), k_step = p.k.pitch * c.ldk;
        Rows<Element, C>(k + from, k_step).template copy<ROWS>(k_tile, staging, p.keys - p.first);
        Rows<Element, C>(v + from, k_step).template copy<ROWS>(v_tile, staging, p.keys - p.first);
        announcer.written(&bars.keys);
        Rows<Element, C> q_rows(q + p.input(c, p.q, begin, c.ldq), p.q.pitch * c.ldq);
        Rows<Element, C> dy_rows(dy + p.input(c, p.q, begin, c.lddy), p.q.pitch * c.lddy);
        const int t = threadIdx.x % GROUP;
        const float *from_numbers = numbers + (p.pair * query_tiles(c) + begin / QUERIES) * NUMBERS + 4 * t;
        Turn<K::SLOTS> turn;
        for (int left = p.q.length - begin; left > 0; left -= QUERIES, turn.next()) {
            announcer.wait(bars.ring.empty + turn.slot, turn.round);
            char *const slot = ring + turn.slot * K::SLOT;
            if (t < K::NUMBER_BYTES / 16) cp_async16(ring_numbers + turn.slot * K::NUMBER_BYTES + 16 * t, from_numbers);
            from_numbers += NUMBERS;
            q_rows.template copy<QUERIES>(slot, staging, left);
            dy_rows.template copy<QUERIES>(slot + K::Q_BYTES, staging, left);
            announcer.written(bars.ring.full + turn.slot);
        }
        announcer.flush();
        return;
    }

    reg_alloc<K::REGISTERS>();
    const int above = p.first + 64 * group, key = above + warp_row() + lane_row();
    const uint64_t k_rows = wg_desc(k_tile + group * (64 * ROW)), v_rows = wg_desc(v_tile + group * (64 * ROW));
    const uint64_t random_step = c.step ? *c.step : 0;
    const float scale = c.scale * LOG2E;
    float s[QUERIES / 2], ds[QUERIES / 2], dk_sums[C / 2], dv_sums[C / 2];
    unsigned w[QUERIES / 16][4], gradients[QUERIES / 16][4];
    Turn<K::SLOTS> turn;
    if (begin < p.q.length) mbar_wait(&bars.keys, 0);
    int before = -1; // the slot whose last product may still be in flight
    for (int i = begin; i < p.q.length; i += QUERIES, turn.next()) {
        const char *const slot = ring + turn.slot * K::SLOT;
        mbar_wait(bars.ring.full + turn.slot, turn.round);
        multiply_rows<C, ROWS, QUERIES>(s, k_rows, wg_desc(slot));
        wg_wait<1>(); // the previous sums: frees their registers and their slot
        if (before >= 0) bars.ring.release(before);
        multiply_rows<C, ROWS, QUERIES>(ds, v_rows, wg_desc(slot + K::Q_BYTES));
        const float *const mine = reinterpret_cast<const float *>(ring_numbers + turn.slot * K::NUMBER_BYTES) + lane_pair();
        wg_wait<1>();
        wg_finished(s);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 m = *reinterpret_cast<const float2 *>(mine + 8 * n);
            const float2 share = *reinterpret_cast<const float2 *>(mine + QUERIES + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[4 * n + e] = exp2_fast(__fmaf_rn(s[4 * n + e], scale, e & 1 ? -m.y : -m.x)) * (e & 1 ? share.y : share.x);
        }
        const bool is_masked = c.causal && above + 63 > i + p.shift; // some query does not see all keys
        const int unseen[2] = {key - p.shift - i - lane_pair(), key + 8 - p.shift - i - lane_pair()};
        if (is_masked) mask_columns<QUERIES>(s, unseen);
        if (c.step) { // a negative sign marks a dropped weight
            uint32_t kept[4];
            kept_in_columns(kept, c, p, key, i + lane_pair(), random_step);
#pragma unroll
            for (int j = 0; j < QUERIES / 2; j++)
                if (!(kept[j & 3] >> (j & ~3) & 1)) s[j] = -s[j];
        }
        wg_wait<0>();
        wg_finished(ds);
#pragma unroll
        for (int k = 0; k < QUERIES / 16; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float a = s[8 * k + 2 * j], b = s[8 * k + 2 * j + 1];
                w[k][j] = pack_bf16(a < 0.0f ? 0.0f : a, b < 0.0f ? 0.0f : b);
            }
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 dsum = *reinterpret_cast<const float2 *>(mine + 2 * QUERIES + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float weight = s[4 * n + e], dp = weight < 0.0f ? 0.0f : ds[4 * n + e] * c.kept;
                ds[4 * n + e] = fabsf(weight) * (dp - (e & 1 ? dsum.y : dsum.x));
            }
        }
        if (is_masked) mask_columns<QUERIES>(ds, unseen); // also if dp is NaN
        to_fragments<QUERIES>(gradients, ds);
        add_rows<C, QUERIES>(dv_sums, w, wg_desc_trans(slot + K::Q_BYTES, QUERIES * ROW), before >= 0);
        add_rows<C, QUERIES>(dk_sums, gradients, wg_desc_trans(slot, QUERIES * ROW), before >= 0);
        before = turn.slot;
    }
    wg_wait<0>();
    wg_finished(dk_sums);
    wg_finished(dv_sums);
    // Keys that some query sees.
    const int used = p.q.length ? p.seen(c, p.q.length - 1) : 0;
    int64_t at[2];
    float once[2], scaled[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = key + 8 * r;
        at[r] = j < p.k.length ? p.result(c, p.k, j, c.lddk) : -1;
        once[r] = j < used ? c.kept : 0.0f;
        scaled[r] = j < used ? c.scale : 0.0f;
    }
    write_rows<C>(c, dk, dk_sums, scaled, at);
    write_rows<C>(c, dv, dv_sums, once, at);
}

// ---- backward: dq -----------------------------------------------------------------------------------------------------------
template <class Element, int C> struct BackwardQueries {
    static constexpr int KEYS = C > 64 ? 64 : 128, SLOTS = C > 64 ? 4 : 3;
    static constexpr int Q_BYTES = tile_bytes<C, ROWS>(), K_BYTES = tile_bytes<C, KEYS>(), SLOT = 2 * K_BYTES;
    struct Shared {
        Bars<SLOTS> ring;
        uint64_t queries;
    };
    static constexpr int BYTES = 2 * Q_BYTES + SLOTS * SLOT + STAGING<Element> + int(sizeof(Shared));
    static constexpr int COPY_REGISTERS = 40, REGISTERS = 232;
};

template <class Element, int C>
static __global__ void __launch_bounds__(THREADS, 1)
    backward_queries(Part c, void *dq, const Element *q, const Element *k, const Element *v, const Element *dy,
                     const float *numbers) {
    using Q = BackwardQueries<Element, C>;
    constexpr int KEYS = Q::KEYS;
    DYN_SHARED(char, q_tile);
    char *const dy_tile = q_tile + Q::Q_BYTES, *const ring = dy_tile + Q::Q_BYTES;
    char *const staging = ring + Q::SLOTS * Q::SLOT;
    auto &bars = *reinterpret_cast<typename Q::Shared *>(staging + STAGING<Element>);
    if (threadIdx.x == 0) {
        bars.ring.init();
        mbar_init(&bars.queries, 4);
        mbar_fence_init();
    }
    __syncthreads();
    wait_for_last_kernel();
    const Task p(c, c.Tq, c.causal);
    const int queries = min(p.q.length - p.first, ROWS);
    if (queries <= 0) return;
    const int all = p.seen(c, p.first + queries - 1), group = threadIdx.x / GROUP;

    if (group == CONSUMERS) {
        reg_dealloc<Q::COPY_REGISTERS>();
        if (all == 0) return;
        Announcer<Element> announcer;
        Rows<Element, C>(q + p.input(c, p.q, p.first, c.ldq), p.q.pitch * c.ldq).template copy<ROWS>(q_tile, staging, queries);
        Rows<Element, C>(dy + p.input(c, p.q, p.first, c.lddy), p.q.pitch * c.lddy)
            .template copy<ROWS>(dy_tile, staging, queries);
        announcer.written(&bars.queries);
        const int64_t from = p.input(c, p.k, 0, c.ldk), step = p.k.pitch * c.ldk;
        Rows<Element, C> k_rows(k + from, step), v_rows(v + from, step);
        Turn<Q::SLOTS> turn;
        for (int left = all; left > 0; left -= KEYS, turn.next()) {
            announcer.wait(bars.ring.empty + turn.slot, turn.round);
            char *const slot = ring + turn.slot * Q::SLOT;
            k_rows.template copy<KEYS>(slot, staging, left);
            v_rows.template copy<KEYS>(slot + Q::K_BYTES, staging, left);
            announcer.written(bars.ring.full + turn.slot);
        }
        announcer.flush();
        return;
    }

    reg_alloc<Q::REGISTERS>();
    const int above = p.first + 64 * group, row = above + warp_row() + lane_row(), least = p.seen(c, above);
    const uint64_t q_rows = wg_desc(q_tile + group * (64 * ROW)), dy_rows = wg_desc(dy_tile + group * (64 * ROW));
    const uint64_t random_step = c.step ? *c.step : 0;
    const float scale = c.scale * LOG2E;
    float s[KEYS / 2], ds[KEYS / 2], sums[C / 2], m[2], share[2], dsum[2];
    unsigned gradients[KEYS / 16][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + 8 * r;
        const bool there = i < p.q.length;
        const float *const mine = numbers + (p.pair * query_tiles(c) + i / QUERIES) * NUMBERS + i % QUERIES;
        m[r] = there ? mine[0] : 0.0f;
        share[r] = there ? mine[QUERIES] : 0.0f;
        dsum[r] = there ? mine[2 * QUERIES] : 0.0f;
    }
    Turn<Q::SLOTS> turn;
    if (all) mbar_wait(&bars.queries, 0);
    int before = -1;
    for (int j = 0; j < all; j += KEYS, turn.next()) {
        const char *const slot = ring + turn.slot * Q::SLOT;
        mbar_wait(bars.ring.full + turn.slot, turn.round);
        multiply_rows<C, ROWS, KEYS>(s, q_rows, wg_desc(slot));
        wg_wait<1>();
        if (before >= 0) bars.ring.release(before);
        multiply_rows<C, ROWS, KEYS>(ds, dy_rows, wg_desc(slot + Q::K_BYTES));
        uint32_t kept[KEYS / 64][2];
#pragma unroll
        for (int half = 0; half < KEYS / 64; half++) {
            kept[half][0] = kept[half][1] = ~0u;
            if (c.step) kept_in_rows(kept[half], c, p, row, j + 64 * half, random_step);
        }
        wg_wait<1>();
        wg_finished(s);
        const int limit[2] = {p.seen(c, row) - j - lane_pair(), p.seen(c, row + 8) - j - lane_pair()};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_fast(__fmaf_rn(s[i], scale, -m[i >> 1 & 1])) * share[i >> 1 & 1];
        wg_wait<0>();
        wg_finished(ds);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            const int r = i >> 1 & 1;
            const float dp = kept[i / 32][r] >> ((i % 32 & ~3) + (i & 1)) & 1 ? ds[i] * c.kept : 0.0f;
            ds[i] = s[i] * (dp - dsum[r]);
        }
        if (j + KEYS > least) mask_rows<KEYS>(ds, limit, 0.0f);
        to_fragments<KEYS>(gradients, ds);
        add_rows<C, KEYS>(sums, gradients, wg_desc_trans(slot, KEYS * ROW), before >= 0);
        before = turn.slot;
    }
    wg_wait<0>();
    wg_finished(sums);
    int64_t at[2];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + 8 * r;
        at[r] = i < p.q.length ? p.result(c, p.q, i, c.lddq) : -1;
        factor[r] = i < p.q.length && p.seen(c, i) ? c.scale : 0.0f;
    }
    write_rows<C>(c, dq, sums, factor, at);
}

// ---- launches -----------------------------------------------------------------------------------------------------------------
static unsigned blocks(const Part &c, int64_t T) { return static_cast<unsigned>(c.B * c.count * blocks_for<int64_t>(T, ROWS)); }

template <class Element> struct Inputs { const Element *q, *k, *v, *dy; };

template <class Element, int C> static cudaError_t run_forward(const Part &c, void *y, float *stats, const Inputs<Element> &x,
                                                               cudaStream_t stream) {
    constexpr int BYTES = Forward<Element, C>::BYTES;
    const cudaError_t error = allow_shared<forward<Element, C>>(BYTES);
    if (error != cudaSuccess) return error;
    return LAUNCH_DEPENDENT((forward<Element, C>), blocks(c, c.Tq), THREADS, BYTES, stream, c, y, stats, x.q, x.k, x.v);
}
template <class Element, int C> static cudaError_t
run_backward(const Part &c, void *dq, void *dk, void *dv, const Inputs<Element> &x, const float *numbers, cudaStream_t stream) {
    constexpr int KEY_BYTES = BackwardKeys<Element, C>::BYTES, QUERY_BYTES = BackwardQueries<Element, C>::BYTES;
    Launches launches;
    launches << allow_shared<backward_keys<Element, C>>(KEY_BYTES) << allow_shared<backward_queries<Element, C>>(QUERY_BYTES);
    if (launches.error != cudaSuccess) return launches.error;
    launches << LAUNCH_DEPENDENT((backward_keys<Element, C>), blocks(c, c.Tk), THREADS, KEY_BYTES, stream, c, dk, dv, x.q, x.k,
                                 x.v, x.dy, numbers)
             << LAUNCH_DEPENDENT((backward_queries<Element, C>), blocks(c, c.Tq), THREADS, QUERY_BYTES, stream, c, dq, x.q, x.k,
                                 x.v, x.dy, numbers);
    return launches.error;
}
template <class T, int C> static cudaError_t run_numbers(const HopperAttention &c, float *numbers, const T *dy, const T *y,
                                                         const float *stats, cudaStream_t stream) {
    const int64_t rows = c.B * c.heads * query_tiles(c) * QUERIES;
    return LAUNCH_DEPENDENT((query_numbers<T, C>), static_cast<unsigned>(blocks_for<int64_t>(rows, 256 / (C / 4))), 256, 0,
                            stream, c, numbers, dy, y, stats);
}
// Call f(std::integral_constant<int, C>()) for the head size.
template <class F> static cudaError_t for_head_size(int64_t C, F f) {
    if (C == 32) return f(std::integral_constant<int, 32>());
    return C == 64 ? f(std::integral_constant<int, 64>()) : f(std::integral_constant<int, 128>());
}

// Every block of a pair copies the rows of all keys, and rows of float32 take twice the bytes.  So a conversion to bfloat16 in
// advance pays from this many queries and keys on, for three arrays and one kernel, or four arrays and two kernels.  Estimates.
static constexpr int64_t CONVERTED_FORWARD = 512, CONVERTED_BACKWARD = 256;
// The number of heads, with rows of `bytes` each, that fit in the workspace.
static int64_t heads_at_once(const HopperAttention &c, int64_t bytes, int64_t room) {
    const bool is_packed = c.q_offsets || c.k_offsets; // the host does not know the number of rows
    return is_packed || !pyops_workspace(PYOPS_WORKSPACE) ? 0 : std::min(c.heads, room / bytes);
}
// Convert the heads of the part to bfloat16: y points to the copy, and `to` to the memory after it.
static cudaError_t convert_heads(const bf16 *&y, bf16 *&to, const float *x, const Part &c, int64_t T, int64_t ld,
                                 cudaStream_t stream) {
    const int64_t width = c.count * c.C;
    bf16 *const copy = to;
    y = copy;
    to += T * c.B * width;
    return convert_to_bf16(copy, x + c.head * c.C, T * c.B, width, width, ld, 1, stream);
}

template <class Element> static cudaError_t forward_of(const Part &c, void *y, float *stats, const Inputs<Element> &x,
                                                       cudaStream_t stream) {
    return for_head_size(c.C, [&](auto C) { return run_forward<Element, C>(c, y, stats, x, stream); });
}
template <class Element> static cudaError_t backward_of(const Part &c, void *dq, void *dk, void *dv, const Inputs<Element> &x,
                                                        const float *numbers, cudaStream_t stream) {
    return for_head_size(c.C, [&](auto C) { return run_backward<Element, C>(c, dq, dk, dv, x, numbers, stream); });
}
}

bool hopper_attention_fits(const HopperAttention &c, bool aligned) {
    constexpr int64_t MOST = int64_t(1) << 30;
    const double pairs = static_cast<double>(c.B) * static_cast<double>(c.heads);
    return pyops_has_hopper() && aligned && (c.C == 32 || c.C == 64 || c.C == 128) && c.Tq > 0 && c.Tk > 0 && c.Tq < MOST &&
        c.Tk < MOST && pairs * static_cast<double>(std::max(c.Tq, c.Tk) + QUERIES) < MOST &&
        pairs * static_cast<double>(query_tiles(c)) * NUMBERS * sizeof(float) <= PYOPS_WORKSPACE;
}

// From one tile of 128 queries and 128 keys on.  An estimate: not measured yet.
bool hopper_attention_pays(const HopperAttention &c) { return c.Tq >= ROWS && c.Tk >= ROWS; }

template <class T>
cudaError_t hopper_attention_forward(const HopperAttention &c, T *y, float *stats, const T *q, const T *k, const T *v,
                                     cudaStream_t stream) {
    constexpr bool HALVES = sizeof(T) == 2;
    const int64_t some = heads_at_once(c, 2 * (c.Tq + 2 * c.Tk) * c.B * c.C, PYOPS_WORKSPACE);
    if (HALVES || !some || std::min(c.Tq, c.Tk) < CONVERTED_FORWARD)
        return forward_of<T>({c, 0, c.heads, 0, HALVES}, y, stats, {q, k, v, nullptr}, stream);
    Launches launches;
    if constexpr (!HALVES)
        for (int64_t head = 0; head < c.heads; head += some) {
            Part part = {c, head, std::min(some, c.heads - head), 0, false};
            bf16 *to = static_cast<bf16 *>(pyops_workspace(PYOPS_WORKSPACE));
            Inputs<bf16> x = {};
            launches << convert_heads(x.q, to, q, part, c.Tq, c.ldq, stream)
                     << convert_heads(x.k, to, k, part, c.Tk, c.ldk, stream)
                     << convert_heads(x.v, to, v, part, c.Tk, c.ldk, stream);
            part.ldq = part.ldk = part.count * c.C;
            launches << forward_of<bf16>(part, y, stats, x, stream);
        }
    return launches.error;
}

template <class T>
cudaError_t hopper_attention_backward(const HopperAttention &c, T *dq, T *dk, T *dv, const T *dy, const T *q, const T *k,
                                      const T *v, const T *y, const float *stats, cudaStream_t stream) {
    constexpr bool HALVES = sizeof(T) == 2;
    float *const numbers = static_cast<float *>(pyops_workspace(PYOPS_WORKSPACE));
    if (!numbers) return cudaErrorMemoryAllocation;
    const int64_t count = c.B * c.heads * query_tiles(c) * NUMBERS;
    const int64_t room = static_cast<int64_t>(PYOPS_WORKSPACE) - count * int64_t(sizeof(float));
    const int64_t some = heads_at_once(c, 4 * (c.Tq + c.Tk) * c.B * c.C, room);
    Launches launches;
    launches << for_head_size(c.C, [&](auto C) { return run_numbers<T, C>(c, numbers, dy, y, stats, stream); });
    if (HALVES || !some || std::min(c.Tq, c.Tk) < CONVERTED_BACKWARD) {
        const Part whole = {c, 0, c.heads, c.heads * c.C, HALVES};
        launches << backward_of<T>(whole, dq, dk, dv, {q, k, v, dy}, numbers, stream);
    } else if constexpr (!HALVES) {
        for (int64_t head = 0; head < c.heads; head += some) {
            Part part = {c, head, std::min(some, c.heads - head), 0, false};
            bf16 *to = reinterpret_cast<bf16 *>(numbers + count);
            Inputs<bf16> x = {};
            launches << convert_heads(x.q, to, q, part, c.Tq, c.ldq, stream)
                     << convert_heads(x.k, to, k, part, c.Tk, c.ldk, stream)
                     << convert_heads(x.v, to, v, part, c.Tk, c.ldk, stream)
                     << convert_heads(x.dy, to, dy, part, c.Tq, c.heads * c.C, stream);
            part.ldq = part.ldk = part.lddy = part.count * c.C;
            launches << backward_of<bf16>(part, dq, dk, dv, x, numbers, stream);
        }
    }
    return launches.error;
}

#define INSTANTIATE(T) \
    template cudaError_t hopper_attention_forward(const HopperAttention &, T *, float *, const T *, const T *, const T *, \
                                                  cudaStream_t); \
    template cudaError_t hopper_attention_backward(const HopperAttention &, T *, T *, T *, const T *, const T *, const T *, \
                                                   const T *, const T *, const float *, cudaStream_t);
INSTANTIATE(float)
INSTANTIATE(bf16)
