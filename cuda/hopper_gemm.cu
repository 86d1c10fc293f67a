// hopper_gemm.cu - products on Hopper, in bfloat16 or TF32, with bulk copies and wgmma.
//
// Three warpgroups of 128 threads share a block; a tile of c has 128 x TN sums, TN = 256 or 128:
//
//                           ring of rows of 128 bytes along K in shared memory
//    warpgroup 2            +--------------+--------------+--------------+---   warpgroup 0: wgmma, rows  0 ..  63 of the tile
//    one thread issues -->  | a 128, b TN  | a 128, b TN  |   arriving   |  --> warpgroup 1: wgmma, rows 64 .. 127
//    bulk copies            +--------------+--------------+--------------+---     64 x TN sums each, in registers
//                                full[slot]: its bytes have arrived;   empty[slot]: all 8 warps have multiplied it
//
// The copying warpgroup runs ahead of the others by up to the number of slots, also across tiles: while sums are written, the
// panels of the next tile arrive.  It needs few registers and releases the rest.  Blocks are persistent: each computes every
// gridDim.x-th tile.  Tiles are ordered in bands, so that concurrent blocks share rows of a and b in L2.  Rows in shared
// memory have the 128-byte swizzle of bulk copies and wgmma.
//
// A warp writes its 16 rows of sums as pieces of 128 bytes per row, to two places in shared memory in turn, and the copy
// engine writes them to c while the warp fills the other place, or multiplies the next tile.  Where a tensor map cannot
// describe what is written (rows of c that are no multiples of 16 bytes, scattered rows, an end of c that only the device
// knows), the lanes write pairs of sums.
//
// A residual that is added to c arrives in the ring, behind the panels of its tile.  The dropout masks of the sums are computed
// while wgmma multiplies.
//
// A bfloat16 operand that is stored transposed, with its rows along M or N, is copied as it is: as blocks of 64 k's x 64 rows,
// which wgmma reads transposed.  If there are few tiles, several blocks share one, each with a part of K (split-K): a warpgroup
// writes its sums to memory, and the last one to finish adds the parts, in order.
//
// The gradient of a weight, c = dy' x, has the gradient of the bias beside it: the sums of the rows of a = dy'.  The tiles in the
// first column of c compute them from the panels of a that they multiply, with additions that run beside wgmma.
//
// If there are many tiles, two blocks are a cluster and compute two tiles, one below the other, which have the same panels of
// b.  Each block loads half of such a panel for both (multicast), so it is read from L2 once:
//
//    block 0:  a of tile 0 --> block 0        full[slot] of a block: its panel of a, and both halves of b, have arrived
//              upper half of b --> blocks 0, 1
//    block 1:  a of tile 1 --> block 1        empty[slot] of a block: the warps of both blocks have multiplied it, because
//              lower half of b --> blocks 0, 1                        the block will write to both
#include "activation.cuh"
#include "hopper.cuh"
#include "product.cuh"
#include "tickets.cuh"

namespace {
static constexpr int TM = 128, ROW = 128, CONSUMERS = 2, THREADS = 128 * (CONSUMERS + 1), WARPS_READING = 4 * CONSUMERS;
static constexpr int PIECE_ROWS = 16, PIECE_BYTES = PIECE_ROWS * ROW; // of c: a part of the rows of a warp

template <int TN> struct Ring {
    static constexpr int A_BYTES = TM * ROW, B_BYTES = TN * ROW, SLOT = A_BYTES + B_BYTES, SLOTS = TN == 256 ? 4 : 6;
    static constexpr int PIECES = SLOTS * SLOT, BARRIERS = PIECES + WARPS_READING * 2 * PIECE_BYTES; // where they start
    // panels, pieces of c, barriers, and a word for each consumer
    static constexpr int BYTES = BARRIERS + 2 * SLOTS * int(sizeof(uint64_t)) + CONSUMERS * int(sizeof(int));
    static constexpr int WITH_ROW_SUMS = BYTES + CONSUMERS * 4 * 64 * int(sizeof(float));
    static_assert(WITH_ROW_SUMS <= 227 * 1024, "the shared memory of a block");
};

// What happens to finished sums before they are stored: nothing; a second array is their activation; they are multiplied by
// the derivative of an activation; their dropout is added to a residual.  All but the first require a map of c.
enum class After { nothing, activation, derivative, residual };

// Whether a product can add the sums of the rows of a: the product for the gradient of a weight, whose operands are stored transposed.
template <class Element, class Out> static constexpr bool sums_rows(bool a_k, bool b_k) {
    return sizeof(Element) == 2 && std::is_same_v<Out, float> && !a_k && !b_k;
}
// The settings of a kernel: types, columns of a tile, and whether the operands are stored along K.
template <class Element_, class Out_, int TN_, bool A_K_, bool B_K_> struct Setup {
    using Element = Element_;
    using Out = Out_;
    static constexpr int TN = TN_, TK = ROW / int(sizeof(Element)); // TK: k's in a slot
    static constexpr bool A_K = A_K_, B_K = B_K_;
    static constexpr After AFTER = After::nothing;
    static constexpr bool ROW_SUMS = sums_rows<Element, Out>(A_K, B_K);
};
// Those of pyops_linear_activation: a = x weight', and dx = dy weight.
template <int TN> struct Activating : Setup<bf16, bf16, TN, true, true> { static constexpr After AFTER = After::activation; };
template <int TN> struct Differentiating : Setup<bf16, bf16, TN, true, false> {
    static constexpr After AFTER = After::derivative;
};
// That of pyops_linear_residual.
template <int TN> struct Adding : Setup<bf16, bf16, TN, true, true> { static constexpr After AFTER = After::residual; };
static constexpr int BLOCK = 64, BLOCK_BYTES = BLOCK * ROW; // of a transposed operand: 64 k's x 64 rows

// 64 x TN sums += 32 bytes of k's: 16 elements in bfloat16, 8 in TF32.
template <class S> DEVICE void multiply(float (&sum)[S::TN / 2], uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (sizeof(typename S::Element) == 2) wgmma_bf16<S::TN, !S::A_K, !S::B_K>(sum, a, b, accumulate);
    else wgmma_tf32<S::TN>(sum, a, b, accumulate);
}
// The descriptor of rows that start at row `row` of a panel, and the step to the next 32 bytes of k's.
template <bool K> DEVICE uint64_t descriptor(const char *panel, int row) {
    if constexpr (K) return wg_desc(panel + row * ROW);
    else return wg_desc_trans(panel + row / BLOCK * BLOCK_BYTES, BLOCK_BYTES);
}
template <bool K> static constexpr int NEXT = K ? 2 : 128;
// Copy ROWS rows of an operand, from `row` on, and the k's of a slot; with BOTH to both blocks of a cluster.
template <bool BOTH> DEVICE void load_box(char *to, const CUtensorMap *map, int column, int row, uint64_t *bar) {
    if constexpr (BOTH) tma_load_2d_to_all(to, map, column, row, bar, 3);
    else tma_load_2d(to, map, column, row, bar);
}
template <bool K, int ROWS, bool BOTH = false>
DEVICE void load_panel(char *panel, const CUtensorMap *map, int k, int row, uint64_t *bar) {
    if constexpr (K) {
        load_box<BOTH>(panel, map, k, row, bar);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS / BLOCK; i++) load_box<BOTH>(panel + i * BLOCK_BYTES, map, row + i * BLOCK, k, bar);
    }
}
// The warp has multiplied a slot.
DEVICE void release_slot(uint64_t *empty, int blocks, int lane) {
    if (blocks == 1 && lane == 0) mbar_arrive(empty);
    if (blocks > 1 && lane < blocks) mbar_arrive_at(empty, lane);
}

// ---- the sums of a lane: of each 8 columns, rows lane/4 and lane/4 + 8, and columns 2 (lane%4) and the next one -----------

// The epilogue, in place.  row, column: of the lane's first sum
template <int TN, class Element, class Out>
DEVICE void finish_sums(float (&sum)[TN / 2], const RowProduct<Element, Out> &g, int64_t M, int64_t row, int64_t column) {
    if (!g.bias && !g.accumulate && !g.relu && !g.gate) return;
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
        const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        if (m >= M || n >= g.N) continue;
        const int64_t at = (g.scatter ? g.scatter[m] : m) * g.ldc + n;
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (n + j < g.N)
                sum[i + j] = finished(sum[i + j], g.c + at + j, g.bias ? g.bias + n + j : nullptr, g.accumulate, g.relu,
                                      g.gate ? g.gate + at + j : nullptr);
    }
}

DEVICE void write_two(float *c, float first, float second) { *reinterpret_cast<float2 *>(c) = make_float2(first, second); }
DEVICE void write_two(bf16 *c, float first, float second) { *reinterpret_cast<unsigned *>(c) = pack_bf16(first, second); }

// A warp writes 32 contiguous bytes of floats per row.
template <int TN, class Out>
DEVICE void write_sums(Out *to, const int32_t *scatter, int64_t ldc, int64_t M, int64_t N, const float (&sum)[TN / 2],
                       int64_t row, int64_t column) {
    const bool pairs = ldc % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0;
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
        const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        if (m >= M || n >= N) continue;
        Out *const c = to + (scatter ? scatter[m] : m) * ldc + n;
        if (n + 1 == N) c[0] = as<Out>(sum[i]);
        else if (pairs) write_two(c, sum[i], sum[i + 1]);
        else c[0] = as<Out>(sum[i]), c[1] = as<Out>(sum[i + 1]);
    }
}

// The same for exponentials, from tile number `tile` on.
template <int TN, class Exp>
DEVICE void write_tile_exponentials(const Exponentials<Exp> &to, float (&sum)[TN / 2], int64_t M, int64_t row, int64_t tile) {
    constexpr int COUNT = EXP_TILE / 2;
#pragma unroll
    for (int wide = 0; wide < TN / EXP_TILE; wide++) {
        if (tile + wide >= to.tiles) return;
        float *const own = sum + wide * COUNT;
        const float *const bias = to.bias + (tile + wide) * EXP_TILE + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float2 two = *reinterpret_cast<const float2 *>(bias + 2 * i);
            own[i] += two.x, own[i + 1] += two.y, own[i + 2] += two.x, own[i + 3] += two.y;
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
            write_exponentials<4>(to, row + 8 * r, tile + wide, row + 8 * r < M,
                                  [&](int i) { return own[i / 2 * 4 + 2 * r + i % 2]; });
    }
}

// Write 16 x 32 floats, 16 of each lane, to a piece with the swizzle.  Rows r and r ^ 1 would write the same banks at the
// same time, so odd rows write their four groups of 8 columns in another order.
DEVICE void write_piece(char *piece, const float *sum, int lane, float) {
    const int row = lane / 4, pair = lane % 4;
    const bool odd = row & 1;
#pragma unroll
    for (int group = 0; group < 4; group++) {
        const int chunk = (2 * group + pair / 2) ^ (row & 7) ^ (odd ? 4 : 0);
        char *const to = piece + row * ROW + chunk * 16 + pair % 2 * 8;
        const float *const even = sum + 4 * group, *const other = sum + 4 * (group ^ 2);
#pragma unroll
        for (int i = 0; i < 2; i++)
            write_for_copy(reinterpret_cast<float2 *>(to + i * 8 * ROW),
                           odd ? make_float2(other[2 * i], other[2 * i + 1]) : make_float2(even[2 * i], even[2 * i + 1]));
    }
}
// Write 16 x 64 numbers of bfloat16, 32 of each lane.  In a step, lanes 0 to 15 have the addresses of 16 rows of 8 columns,
// the others have them for the next 8 columns.
DEVICE void write_piece(char *piece, const float *sum, int lane, bf16) {
    const int row = lane % 16;
#pragma unroll
    for (int group = 0; group < 8; group += 2) {
        unsigned packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) packed[i] = pack_bf16(sum[4 * group + 2 * i], sum[4 * group + 2 * i + 1]);
        stmatrix_x4(piece + row * ROW + ((group + lane / 16) ^ (row & 7)) * 16, packed);
    }
}

// ---- activations of a piece of bfloat16, in chunks of 16 bytes -----------------------------------------------------------
DEVICE void write_chunk(char *to, const float (&x)[8]) {
    write_for_copy(reinterpret_cast<uint4 *>(to),
                   make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])));
}
// to = the activation of a piece, in the same places.
DEVICE void activate(char *to, const char *piece, int kind) {
    activations::forward_of(kind, [&](auto operation) {
#pragma unroll 1
        for (int at = 16 * lane_id(); at < PIECE_BYTES; at += 16 * 32) {
            const Pack<float, 8> x = load_reals<8>(reinterpret_cast<const bf16 *>(piece + at));
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float in[1] = {x.at[j]};
                float out[1];
                operation(in, out);
                y[j] = out[0];
            }
            write_chunk(to + at, y);
        }
    });
}
// Multiply a piece by the derivative of an activation.  rows, columns: of x from the piece's first element on, a multiple of 8
DEVICE void differentiate(char *piece, int kind, const bf16 *x, int64_t ld, int64_t rows, int64_t columns) {
    activations::backward_of(kind, [&](auto operation) {
#pragma unroll 1
        for (int chunk = lane_id(); chunk < PIECE_BYTES / 16; chunk += 32) {
            const int row = chunk / 8, column = 8 * ((chunk ^ row) % 8);
            if (row >= rows || column >= columns) continue; // not stored
            const Pack<float, 8> at = load_reals<8>(x + row * ld + column),
                                 dy = load_reals<8>(reinterpret_cast<const bf16 *>(piece + 16 * chunk));
            float dx[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float in[2] = {dy.at[j], at.at[j]};
                float out[1];
                operation(in, out);
                dx[j] = out[0];
            }
            write_chunk(piece + 16 * chunk, dx);
        }
    });
}

// ---- a residual connection -------------------------------------------------------------------------------------------------
// The residual of a tile arrives in the ring, behind the panels: in a slot RESIDUAL_COLUMNS columns of it, as boxes with the
// swizzle that have the columns of a piece.
static constexpr int PIECE_COLUMNS = ROW / int(sizeof(bf16)), BOX_BYTES = TM * ROW, BOXES = 2;
static constexpr int RESIDUAL_COLUMNS = BOXES * PIECE_COLUMNS;

// The row and the first column in a piece of chunk `i` of the four that a lane adds.
DEVICE int row_of_chunk(int i) { return (lane_id() + 32 * i) / 8; }
DEVICE int column_of_chunk(int i) { return 8 * ((lane_id() ^ row_of_chunk(i)) % 8); }

// The dropout masks of the chunks that a lane adds in a tile: a word for each piece, a byte for each chunk.  Their random words
// take as many instructions as a few k's of the tile, so they are computed while wgmma multiplies.
template <int TN> struct Masks {
    static constexpr int PIECES = TN / PIECE_COLUMNS, CHUNKS = 4 * PIECES;
    unsigned word[PIECES] = {};
    int made = 0;

    // Compute the masks of `count` more chunks, as far as there are any.   first: the element of c at the warp's first row
    __device__ __forceinline__ void make(int count, const Dropout &dropout, uint64_t step, int64_t first, int64_t ldc) {
        const int end = min(made + count, CHUNKS);
#pragma unroll 1 // wgmma has most of the registers
        for (; made < end; made++) {
            const int i = made % 4;
            const int64_t at = first + row_of_chunk(i) * ldc + made / 4 * PIECE_COLUMNS + column_of_chunk(i);
            unsigned mask = 0;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Words random = philox(at / 4 + half, step, dropout.key);
#pragma unroll
                for (int j = 0; j < 4; j++) mask |= unsigned(random.word[j] >= dropout.threshold) << (4 * half + j);
            }
            // The byte enters at the end: a variable index would put the words into local memory.
#pragma unroll
            for (int p = 0; p < PIECES - 1; p++) word[p] = word[p] >> 8 | word[p + 1] << 24;
            word[PIECES - 1] = word[PIECES - 1] >> 8 | mask << 24;
        }
    }
};

// piece = x + dropout(piece), x in the same places.
DEVICE void add_residual(char *piece, const char *x, bool drops, unsigned masks, float scale) {
#pragma unroll 1
    for (int at = 16 * lane_id(); at < PIECE_BYTES; at += 16 * 32, masks >>= 8) {
        const Pack<float, 8> base = load_reals<8>(reinterpret_cast<const bf16 *>(x + at)),
                             branch = load_reals<8>(reinterpret_cast<const bf16 *>(piece + at));
        float sum[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum[j] = base.at[j] + (!drops ? branch.at[j] : masks >> j & 1 ? branch.at[j] * scale : 0.0f);
        write_chunk(piece + at, sum);
    }
}

// The two pieces of a warp.
struct Pieces {
    char *memory;
    int next = 0; // piece to write

    // Store the warp's 16 x TN sums at (row, column) of c.  What is beyond the last row or column of the map is not stored.
    template <class S, int COUNT>
    __device__ __forceinline__ void store(const CUtensorMap *c, const CUtensorMap *activated,
                                          const RowProduct<typename S::Element, typename S::Out> &g, const float (&sum)[COUNT],
                                          int row, int column) {
        constexpr int COLUMNS = ROW / int(sizeof(typename S::Out));
        const int lane = lane_id();
#pragma unroll
        for (int n = 0; n < S::TN; n += COLUMNS) {
            if (column + n >= g.N) return;
            char *const piece = empty_one();
            write_piece(piece, sum + n / 2, lane, typename S::Out());
            if constexpr (S::AFTER == After::derivative) {
                __syncwarp();
                differentiate(piece, g.activation.kind, g.activation.at + row * g.ldc + column + n, g.ldc, g.M - row,
                              g.N - column - n);
            }
            send(piece, c, row, column + n);
            if constexpr (S::AFTER == After::activation) {
                char *const second = empty_one();
                activate(second, piece, g.activation.kind);
                send(second, activated, row, column + n);
            }
        }
    }
    // Store 16 rows of one piece, with dropout and added to x.   sum: the first of the lane's sums;  masks: of a Masks
    __device__ __forceinline__ void store_added(const CUtensorMap *c, const Dropout &dropout, const float *sum, const char *x,
                                                unsigned masks, int row, int column) {
        char *const piece = empty_one();
        write_piece(piece, sum, lane_id(), bf16());
        __syncwarp();
        add_residual(piece, x, dropout.step, masks, dropout.scale);
        send(piece, c, row, column);
    }
    // Before the block exits.
    __device__ __forceinline__ void finish() const {
        if (lane_id() == 0) tma_store_wait_read<0>();
    }

private:
    __device__ __forceinline__ char *empty_one() {
        char *const piece = memory + next * PIECE_BYTES;
        next ^= 1;
        if (lane_id() == 0) tma_store_wait_read<1>(); // only the last store may still read, and it reads the other piece
        __syncwarp();
        return piece;
    }
    static __device__ __forceinline__ void send(const char *piece, const CUtensorMap *map, int row, int column) {
        fence_proxy_async();
        __syncwarp();
        if (lane_id() == 0) {
            tma_store_2d(map, column, row, piece);
            tma_store_commit();
        }
    }
};

// The sums of all parts of K, in order.
template <int TN>
DEVICE void read_sums(float (&sum)[TN / 2], const float *parts, int64_t splits, int64_t all_rows, int64_t M, int64_t N,
                      int64_t row, int64_t column) {
    const bool pairs = N % 2 == 0;
    for (int64_t split = 0; split < splits; split++, parts += all_rows * N) {
#pragma unroll
        for (int i = 0; i < TN / 2; i += 2) {
            const int64_t m = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
            if (m >= M || n >= N) continue;
            const float *const from = parts + m * N + n;
            float2 two = make_float2(0.0f, 0.0f);
            if (pairs) two = *reinterpret_cast<const float2 *>(from);
            else two.x = from[0], two.y = n + 1 < N ? from[1] : 0.0f;
            sum[i] = split ? sum[i] + two.x : two.x;
            sum[i + 1] = split ? sum[i + 1] + two.y : two.y;
        }
    }
}

// ---- sums of the rows of a -------------------------------------------------------------------------------------------------
// A thread of a warpgroup sums four of its 64 rows, over the k's with one remainder modulo 8, in order.
struct RowSums {
    float sum[4] = {};

    // Add a slot.   block: 64 k's x 64 rows, with the swizzle
    __device__ __forceinline__ void add(const char *block) {
        const int thread = threadIdx.x % 128, k = thread / 16;
        const char *const from = block + k * ROW + (thread % 16 / 2 ^ k) * 16 + thread % 2 * 8;
#pragma unroll 2 // wgmma has most of the registers
        for (int i = 0; i < BLOCK / 8; i++) {
            const Pack<float, 4> four = load_reals<4>(reinterpret_cast<const bf16 *>(from + i * 8 * ROW));
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] += four.at[j];
        }
    }
    // Add the sums of 64 rows from `first` on to g.row_sums, or write them behind the parts of c.  The order: the remainders 2 w
    // and 2 w + 1 of each warp w, then the warps.   of_warps: 4 x 64 floats of this warpgroup
    template <class Product>
    __device__ __forceinline__ void write(const Product &g, int64_t first, int64_t split, float *of_warps, int group) const {
        const int thread = threadIdx.x % 128, lane = thread % 32;
        named_bar(1 + group, 128); // all have read the sums of the last tile
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float both = sum[j] + __shfl_xor_sync(ALL_LANES, sum[j], 16);
            if (lane < 16) of_warps[thread / 32 * BLOCK + 4 * lane + j] = both;
        }
        named_bar(1 + group, 128);
        if (thread >= BLOCK || first + thread >= g.M) return;
        const float *const four = of_warps + thread;
        const float total = ((four[0] + four[BLOCK]) + four[2 * BLOCK]) + four[3 * BLOCK];
        if (g.parts) g.parts[g.splits * g.M * g.N + split * g.M + first + thread] = total;
        else g.row_sums[first + thread] += total;
    }
    template <class Product> static __device__ __forceinline__ void add_parts(const Product &g, int64_t first) {
        const int64_t m = first + threadIdx.x % 128;
        if (threadIdx.x % 128 < BLOCK && m < g.M)
            g.row_sums[m] += sum_of_parts(g.parts + g.splits * g.M * g.N + m, g.splits, g.M);
    }
};

template <class S> static __global__ void __launch_bounds__(THREADS, 1)
    hopper_tiles(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                 const __grid_constant__ CUtensorMap c_map, const __grid_constant__ CUtensorMap second_map, bool c_has_map,
                 RowProduct<typename S::Element, typename S::Out> g) {
    constexpr int TN = S::TN, TK = S::TK;
    using R = Ring<TN>;
    DYN_SHARED(char, shared); // aligned to 1024 bytes for the swizzle
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + R::BARRIERS), *empty = full + R::SLOTS;
    int *const is_last = reinterpret_cast<int *>(empty + R::SLOTS);
    float *const of_warps = reinterpret_cast<float *>(is_last + CONSUMERS);
    const int blocks = cluster_size(), rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < R::SLOTS; slot++) mbar_init(full + slot, 1), mbar_init(empty + slot, WARPS_READING * blocks);
        mbar_fence_init();
    }
    if (blocks > 1) cluster_sync();
    else __syncthreads();
    wait_for_last_kernel();
    const int64_t M = g.limit.rows(g.M), K = g.limit.summands(g.K);
    // An even number of rows of tiles in a cluster.  Tiles of a band are numbered down its columns, so 2 i and 2 i + 1 are one
    // below the other, and both blocks have the same part of K.  A tile below c is computed, from zeros, but not written.
    const int64_t tiles_m = round_up<int64_t>(blocks_for<int64_t>(M, TM), blocks);
    const int64_t tiles_n = blocks_for<int64_t>(g.N, TN), tiles = tiles_m * tiles_n;
    const int all_steps = static_cast<int>(blocks_for<int64_t>(K, TK)), group = threadIdx.x / 128;
    const int steps_a_part = blocks_for(all_steps, static_cast<int>(g.splits));
    const bool drops = S::AFTER == After::residual && g.residual.dropout.step;
    Turn<R::SLOTS> turn;

    if (group == CONSUMERS) {
        reg_dealloc<24>();
        if (threadIdx.x != CONSUMERS * 128) return;
        for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
            const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
            const int from = static_cast<int>(task / tiles) * steps_a_part, to = min(from + steps_a_part, all_steps);
            for (int step = from; step < to; step++, turn.next()) {
                mbar_wait(empty + turn.slot, turn.round ^ 1); // in the first round every slot is empty
                uint64_t *const bar = full + turn.slot;
                mbar_expect(bar, R::SLOT);
                char *const a = shared + turn.slot * R::SLOT, *const b = a + R::A_BYTES;
                const int k = step * TK, column = static_cast<int>(at.n * TN), half = rank * TN / 2;
                load_panel<S::A_K, TM>(a, &a_map, k, static_cast<int>(at.m * TM), bar);
                if (blocks == 1) load_panel<S::B_K, TN>(b, &b_map, k, column, bar);
                else load_panel<S::B_K, TN / 2, true>(b + half * ROW, &b_map, k, column + half, bar);
            }
            if constexpr (S::AFTER == After::residual)
                for (int n = 0; n < TN; n += RESIDUAL_COLUMNS, turn.next()) {
                    mbar_wait(empty + turn.slot, turn.round ^ 1);
                    mbar_expect(full + turn.slot, BOXES * BOX_BYTES);
                    for (int box = 0; box < BOXES; box++)
                        tma_load_2d(shared + turn.slot * R::SLOT + box * BOX_BYTES, &second_map,
                                    static_cast<int>(at.n * TN) + n + box * PIECE_COLUMNS, static_cast<int>(at.m * TM),
                                    full + turn.slot);
                }
        }
    } else {
        reg_alloc<240>();
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
        Pieces pieces{shared + R::PIECES + (group * 4 + warp) * 2 * PIECE_BYTES};
        const uint64_t number = drops ? g.residual.dropout.step[0] : 0;
        for (int64_t task = blockIdx.x; task < tiles * g.splits; task += gridDim.x) {
            const int64_t split = task / tiles;
            const int from = static_cast<int>(split) * steps_a_part, to = min(from + steps_a_part, all_steps);
            float sum[TN / 2];
            RowSums rows;
            const bool has_rows = S::ROW_SUMS && g.row_sums && tile_index<16>(task % tiles, tiles_m, tiles_n).n == 0;
            Masks<TN> masks;
            const auto make_masks = [&] { // as many in each step, until all are there
                const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
                masks.make(blocks_for(Masks<TN>::CHUNKS, to - from), g.residual.dropout, number,
                           (at.m * TM + group * 64 + warp * PIECE_ROWS) * g.ldc + at.n * TN, g.ldc);
            };
            int before = -1; // the slot whose products may still be in flight
            for (int step = from; step < to; step++, turn.next()) {
                mbar_wait(full + turn.slot, turn.round);
                const char *slot = shared + turn.slot * R::SLOT;
                const uint64_t a = descriptor<S::A_K>(slot, group * 64), b = descriptor<S::B_K>(slot + R::A_BYTES, 0);
                wg_fence();
#pragma unroll
                for (int k = 0; k < ROW / 32; k++)
                    multiply<S>(sum, a + NEXT<S::A_K> * k, b + NEXT<S::B_K> * k, step > from || k > 0);
                wg_commit();
                if (has_rows) rows.add(slot + group * BLOCK_BYTES);
                if (drops) make_masks();
                wg_wait<1>(); // the products of the previous slot have finished
                if (before >= 0) release_slot(empty + before, blocks, lane);
                before = turn.slot;
            }
            wg_wait<0>();
            if (before >= 0) release_slot(empty + before, blocks, lane);
            if (before < 0) // no summands
#pragma unroll
                for (int i = 0; i < TN / 2; i++) sum[i] = 0.0f;
            const TileIndex at = tile_index<16>(task % tiles, tiles_m, tiles_n);
            const int64_t first_row = at.m * TM + group * 64 + warp * 16, row = first_row + lane / 4; // of the warp, the lane
            const int64_t column = at.n * TN + lane % 4 * 2;
            if constexpr (S::AFTER == After::residual) { // a tile below c releases its slots, too
                finish_sums<TN>(sum, g, M, row, column);
#pragma unroll
                for (int n = 0; n < TN; n += PIECE_COLUMNS) {
                    const int box = n / PIECE_COLUMNS % BOXES, first_column = static_cast<int>(at.n * TN) + n;
                    if (box == 0) mbar_wait(full + turn.slot, turn.round);
                    const char *const x = shared + turn.slot * R::SLOT + box * BOX_BYTES +
                        (group * 64 + warp * PIECE_ROWS) * ROW;
                    if (first_row < M && first_column < g.N)
                        pieces.store_added(&c_map, g.residual.dropout, sum + n / 2, x, masks.word[n / PIECE_COLUMNS],
                                           static_cast<int>(first_row), first_column);
                    if (box < BOXES - 1) continue;
                    __syncwarp();
                    release_slot(empty + turn.slot, blocks, lane);
                    turn.next();
                }
            }
            if (S::AFTER == After::residual || at.m * TM >= M) continue;
            if (has_rows) rows.write(g, at.m * TM + group * BLOCK, split, of_warps + group * 4 * BLOCK, group);
            if (g.parts) {
                write_sums<TN>(g.parts + split * g.M * g.N, nullptr, g.N, M, g.N, sum, row, column);
                named_bar(1 + group, 128);
                if (threadIdx.x % 128 == 0)
                    is_last[group] = arrives_last(g.tickets + 2 * (at.m * tiles_n + at.n) + group,
                                                  static_cast<unsigned>(g.splits));
                named_bar(1 + group, 128);
                if (!is_last[group]) continue;
                if (has_rows) RowSums::add_parts(g, at.m * TM + group * BLOCK);
                read_sums<TN>(sum, g.parts, g.splits, g.M, M, g.N, row, column);
            }
            if constexpr (IS_EXP<typename S::Out>) {
                write_tile_exponentials<TN>(g.exps, sum, M, row, at.n * TN / EXP_TILE);
            } else {
                if (first_row >= M) continue;
                finish_sums<TN>(sum, g, M, row, column);
                // the map knows the launch's M
                if (S::AFTER != After::nothing || (c_has_map && (M == g.M || first_row + PIECE_ROWS <= M)))
                    pieces.store<S>(&c_map, &second_map, g, sum, static_cast<int>(first_row), static_cast<int>(at.n * TN));
                else write_sums<TN>(g.c, g.scatter, g.ldc, M, g.N, sum, row, column);
            }
        }
        pieces.finish();
        if (blocks > 1) cluster_sync(); // the other block's warps may still arrive at this block's mbarriers
    }
}
}

template <class Element, class Out> bool hopper_product_fits(const RowProduct<Element, Out> &g) {
    const int64_t whole = 16 / sizeof(Element);
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(g.a) | reinterpret_cast<uintptr_t>(g.b);
    const bool aligned = addresses % 16 == 0 && g.lda % whole == 0 && g.ldb % whole == 0;
    return pyops_has_hopper() && aligned && g.K > 0 && g.M <= INT32_MAX && g.N <= INT32_MAX && g.K <= INT32_MAX;
}

template <class Element, class Out> bool hopper_sums_rows(const RowProduct<Element, Out> &g) {
    return sums_rows<Element, Out>(g.a_k, g.b_k);
}

template <class Element, class Out> bool hopper_has_map(const RowProduct<Element, Out> &g) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(g.c) | reinterpret_cast<uintptr_t>(g.activation.result) |
        reinterpret_cast<uintptr_t>(g.activation.at) | reinterpret_cast<uintptr_t>(g.residual.x);
    return !g.scatter && addresses % 16 == 0 && g.ldc * sizeof(Out) % 16 == 0;
}

namespace {
// A map of one operand: `box` rows of an operand stored along K, blocks of 64 x 64 of another.
template <bool K, int TK, class Element>
static cudaError_t make_map(CUtensorMap *map, const Element *x, int64_t rows, int64_t k, int64_t ld, int box) {
    constexpr int SIZE = sizeof(Element);
    return K ? make_tensor_map_2d(map, x, SIZE, k, rows, ld * SIZE, TK, box, true)
             : make_tensor_map_2d(map, x, SIZE, rows, k, ld * SIZE, BLOCK, BLOCK, true);
}

// Whether blocks are clusters of two, given the tiles in a column of c, the columns (times parts of K), and the number of
// clusters that run at once.  By size: there are enough pairs for all of them, and a tile below the last row costs no time
// (13387 rows are 105 tiles, so an odd number must not exclude a product).
static bool has_clusters(int64_t rows, int64_t columns, int64_t clusters) {
    const Multicast wanted = pyops_multicast_now();
    if (clusters == 0 || wanted != Multicast::by_size) return clusters != 0 && wanted == Multicast::always;
    const int64_t pairs = blocks_for<int64_t>(rows, 2) * columns;
    return rows > 1 && pairs >= clusters &&
        blocks_for(pairs, clusters) <= blocks_for<int64_t>(rows * columns, pyops_multiprocessors());
}

// The map of c and of its activation.
template <class Element, class Out>
static cudaError_t make_result_map(CUtensorMap *map, const void *c, const RowProduct<Element, Out> &g) {
    constexpr int SIZE = sizeof(Out);
    return make_tensor_map_2d(map, c, SIZE, g.N, g.M, g.ldc * SIZE, ROW / SIZE, PIECE_ROWS, true);
}

template <class S> static cudaError_t launch(const RowProduct<typename S::Element, typename S::Out> &g, cudaStream_t stream) {
    using R = Ring<S::TN>;
    constexpr int BYTES = S::ROW_SUMS ? R::WITH_ROW_SUMS : R::BYTES;
    if (const cudaError_t error = allow_shared<hopper_tiles<S>>(BYTES); error != cudaSuccess) return error;
    static const int clusters = clusters_at_once(hopper_tiles<S>, 2, THREADS, BYTES);
    const int64_t rows = blocks_for<int64_t>(g.M, TM), columns = blocks_for<int64_t>(g.N, S::TN) * g.splits;
    const bool in_pairs = has_clusters(rows, columns, clusters);
    CUtensorMap a_map, b_map, c_map = {}, second_map = {}; // the second one: of the activation or the residual
    Launches launches;
    const bool c_has_map = !IS_EXP<typename S::Out> && hopper_has_map(g);
    launches << make_map<S::A_K, S::TK>(&a_map, g.a, g.M, g.K, g.lda, TM)
             << make_map<S::B_K, S::TK>(&b_map, g.b, g.N, g.K, g.ldb, in_pairs ? S::TN / 2 : S::TN);
    if (c_has_map) launches << make_result_map(&c_map, g.c, g);
    if (c_has_map && S::AFTER == After::activation) launches << make_result_map(&second_map, g.activation.result, g);
    if constexpr (S::AFTER == After::residual)
        launches << make_tensor_map_2d(&second_map, g.residual.x, sizeof(bf16), g.N, g.M, g.ldc * sizeof(bf16), PIECE_COLUMNS,
                                       TM, true);
    if (launches.error != cudaSuccess) return launches.error;
    const int64_t tasks = (in_pairs ? round_up<int64_t>(rows, 2) : rows) * columns;
    const int64_t most = in_pairs ? 2 * clusters : pyops_multiprocessors();
    const unsigned blocks = static_cast<unsigned>(tasks < most ? tasks : most);
    return in_pairs
        ? LAUNCH_CLUSTER_DEPENDENT(2, hopper_tiles<S>, blocks, THREADS, BYTES, stream, a_map, b_map, c_map, second_map,
                                   c_has_map, g)
        : LAUNCH_DEPENDENT(hopper_tiles<S>, blocks, THREADS, BYTES, stream, a_map, b_map, c_map, second_map, c_has_map, g);
}

// Tiles of 256 columns read less per sum; tiles of 128 columns are twice as many, which fills the device better.
template <class Wide, class Narrow, class Element, class Out>
static cudaError_t launch_best(const RowProduct<Element, Out> &g, cudaStream_t stream) {
    const int64_t rows = blocks_for<int64_t>(g.M, TM) * g.splits, processors = pyops_multiprocessors();
    const int64_t wide = 2 * blocks_for(rows * blocks_for<int64_t>(g.N, 256), processors);
    const int64_t narrow = blocks_for(rows * blocks_for<int64_t>(g.N, 128), processors);
    return wide <= narrow ? launch<Wide>(g, stream) : launch<Narrow>(g, stream);
}
template <bool A_K, bool B_K, class Element, class Out>
static cudaError_t launch_layout(const RowProduct<Element, Out> &g, cudaStream_t stream) {
    return launch_best<Setup<Element, Out, 256, A_K, B_K>, Setup<Element, Out, 128, A_K, B_K>>(g, stream);
}
}

template <class Element, class Out> cudaError_t hopper_product(const RowProduct<Element, Out> &g, cudaStream_t stream) {
    if constexpr (std::is_same_v<Out, bf16>) {
        if (g.activation.result) return launch_best<Activating<256>, Activating<128>>(g, stream);
        if (g.activation.at) return launch_best<Differentiating<256>, Differentiating<128>>(g, stream);
        if (g.residual.x) return launch_best<Adding<256>, Adding<128>>(g, stream);
    }
    if constexpr (sizeof(Element) == 2 && !IS_EXP<Out>) {
        if (!g.a_k) return g.b_k ? launch_layout<false, true>(g, stream) : launch_layout<false, false>(g, stream);
        if (!g.b_k) return launch_layout<true, false>(g, stream);
    }
    return launch_layout<true, true>(g, stream);
}

template bool hopper_product_fits(const RowProduct<bf16> &);
template bool hopper_product_fits(const RowProduct<bf16, bf16> &);
template bool hopper_sums_rows(const RowProduct<bf16> &);
template bool hopper_sums_rows(const RowProduct<bf16, bf16> &);
template bool hopper_has_map(const RowProduct<bf16, bf16> &);
template bool hopper_product_fits(const RowProduct<bf16, Exp16> &);
template cudaError_t hopper_product(const RowProduct<bf16> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<bf16, bf16> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<bf16, Exp16> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<float> &, cudaStream_t);
template cudaError_t hopper_product(const RowProduct<float, Exp32> &, cudaStream_t);
