// gru.cu - a gated recurrent unit over a whole sequence.
//
// What does not wait for the state is one product over all steps (pyops_gemm): the inputs' in forward; dx and the weights'
// gradients in backward.  All steps of the recurrence are one kernel, which keeps the recurrent weights in shared memory
// from the first step to the last (persistent RNNs: Diamos et al. 2016, ICML).
//
// Units of the state and rows of the batch are dealt out, a block for each pair, no more blocks than multiprocessors:
//
//                unit 0 ..     U ..     2U ..              A block keeps the weights of its U units: in forward the rows
//               +--------+--------+--------+               of w_hh that form them, in backward the columns.
//     row 0 ..  | block  | block  | block  |  a team       A step needs the whole state before it, of the same rows.  So
//               +--------+--------+--------+               the blocks of a team exchange what each has made through
//     row 8*n.. | block  | block  | block  |  a team       global memory, where it goes anyway (h, u, the gates'
//               +--------+--------+--------+               gradients), and wait for each other; teams do not.
//
// A team's rows are tiles of 8, several tiles a chunk.  A block does step after step, and in a step chunk after chunk:
//
//     wait until the team has arrived with this chunk's rows; copy them to shared memory     (ahead, while another chunk
//     multiply: a warp has one tile, all columns and a slice of K                             is multiplied)
//     add the slices' sums in their order, form the gates, write them out, arrive
//
// With reset before, a step has two phases that do this: r and z from h, then n from u = r * h.
// Where the weights do not fit, or rows are many and long, steps are a product and a kernel for the gates each; see the end.
#include <algorithm>
#include <type_traits>
#include "block.cuh"
#include "columns.cuh"

// ---- how a block multiplies --------------------------------------------------------------------------------
// c (rows of a tile, N) = rows (K) x weights (K,N), where N are the columns that a block forms.  K is padded with zeros to
// whole segments, of which each slice has its share.
static constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 8, SEGMENT = 16;

// In float32 a lane has 3 or 4 columns of all 8 rows.  Where fewer than 32 lanes have all columns, the lanes divide the slice
// among them as well: each has every PARTS-th four of its k.  On tensor cores the weights are the left operand, whose tiles are
// 16 columns.
template <int N> struct Lanes {
    static constexpr int EACH = N % 3 ? 4 : 3, ACROSS = N / EACH, PARTS = 32 / ACROSS;
    // Where fewer than 8 lanes have all columns, the 8 that read at once read of several k.  So that these lie on different
    // banks, each has its columns in another order: column c of four number q at place c ^ swapped(q).
    static __device__ __forceinline__ int swapped(int four) { return ACROSS < 8 ? four % (8 / ACROSS) * ACROSS : 0; }
};
static constexpr int weights_of_k(int n, Precision p) { return p == Precision::bf16 ? n / 2 : n; }     // floats kept for a k
// Sums lie as [warp][row][column], with rows that keep lanes which write at once on different banks.
static constexpr int sums_of_row(int n) { return round_up(n, 16) + 4; }
static constexpr int sums_of_block(int n) { return WARPS * ROWS * sums_of_row(n); }

template <int N, Precision P> struct Product {
    static constexpr int WEIGHTS = weights_of_k(N, P), SUM_ROW = sums_of_row(N);
};

// Four neighbours in k, rounded for the tensor cores.
DEVICE uint4 rounded(float4 x, std::integral_constant<Precision, Precision::tf32>) {
    return {to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)};
}
DEVICE uint2 rounded(float4 x, std::integral_constant<Precision, Precision::bf16>) {
    return {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
}

// The weights as `multiply` wants them; quad(column, k) gives those of k .. k+3, zeros beyond the matrix.
//   float32        [k/4][column] of 4 k each, so that neighbouring lanes read neighbouring columns
//   tensor cores   [segment][8 columns][lane] of 4 k each: lane = 4 g + t has column g and k = 4t .. 4t+3 of the segment.  The
//                  instruction has k = t, t+4 (bfloat16: 2t, 2t+1, 2t+8, 2t+9) there, but which k is which does not matter
//                  as long as both operands agree, and four neighbours are one access.
template <int N, Precision P, class Quad> DEVICE void keep(float *weights, int segments, Quad quad) {
    if constexpr (P == Precision::fp32) {
        float4 *const to = reinterpret_cast<float4 *>(weights);
#pragma unroll 4
        for (int i = threadIdx.x; i < segments * 4 * N; i += THREADS) {        // a warp: 8 columns, 16 k
            const int column = i % 8 + i / 32 % (N / 8) * 8, four = i / (4 * N) * 4 + i / 8 % 4;
            to[four * N + (column ^ Lanes<N>::swapped(four))] = quad(column, four * 4);
        }
    } else {
        using Precise = std::integral_constant<Precision, P>;
        auto *const to = reinterpret_cast<decltype(rounded(float4{}, Precise{})) *>(weights);
#pragma unroll 4
        for (int i = threadIdx.x; i < segments * 4 * N; i += THREADS) {
            const int column = i % 32 / 4 + i / 32 % (N / 8) * 8, k = i / (4 * N) * SEGMENT + i % 4 * 4;
            to[i] = rounded(quad(column, k), Precise{});
        }
    }
}

// Adds COUNT sums over lanes that differ in the bits STEP down to LAST, in half as many steps of half as many sums each: lane
// by lane, in the order of those bits, they end up with COUNT / parts of them each, which are then the first.
template <int COUNT, int STEP, int LAST> DEVICE void add_parts(float *sum) {
    if constexpr (STEP >= LAST) {
        const bool upper = threadIdx.x & STEP;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const float mine = upper ? sum[COUNT / 2 + i] : sum[i], theirs = upper ? sum[i] : sum[COUNT / 2 + i];
            sum[i] = mine + __shfl_xor_sync(ALL_LANES, theirs, STEP);
        }
        add_parts<COUNT / 2, STEP / 2, LAST>(sum);
    }
}

// What this warp adds to a chunk's sums: its slice of K for one tile of rows, which lie `stride` apart.
template <int N, Precision P>
DEVICE void multiply(float *sums, const float *weights, const float *rows, int stride, int segments, int slices) {
    constexpr int SUM_ROW = Product<N, P>::SUM_ROW;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp / slices, slice = warp % slices;
    const int from = segments * slice / slices, to = segments * (slice + 1) / slices;
    rows += tile * ROWS * stride;
    sums += warp * ROWS * SUM_ROW;
    if constexpr (P == Precision::fp32) {
        constexpr int EACH = Lanes<N>::EACH, ACROSS = Lanes<N>::ACROSS, PARTS = Lanes<N>::PARTS;
        const int column = lane % ACROSS, part = lane / ACROSS, swapped = Lanes<N>::swapped(part);
        const float4 *const w = reinterpret_cast<const float4 *>(weights) + column;
        float sum[ROWS * EACH] = {};
#pragma unroll 2
        for (int four = from * 4 + part; four < to * 4; four += PARTS) {
            float4 b[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) b[j] = w[four * N + (j * ACROSS ^ swapped)];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 a = *reinterpret_cast<const float4 *>(rows + i * stride + four * 4);
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    float &s = sum[i * EACH + j];
                    s = fmaf(a.x, b[j].x, s);
                    s = fmaf(a.y, b[j].y, s);
                    s = fmaf(a.z, b[j].z, s);
                    s = fmaf(a.w, b[j].w, s);
                }
            }
        }
        add_parts<ROWS * EACH, 16, ACROSS>(sum);
        constexpr int LEFT = ROWS * EACH / PARTS;
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const int row = (part * LEFT + i) / EACH, j = (part * LEFT + i) % EACH;
            sums[row * SUM_ROW + column + j * ACROSS] = sum[i];
        }
    } else {
        using Precise = std::integral_constant<Precision, P>;
        using Quad = decltype(rounded(float4{}, Precise{}));
        constexpr int TILES = round_up(N, 16) / 16;             // of 16 columns; the last may have but 8
        const int g = lane / 4, t = lane % 4;
        const Quad *w = reinterpret_cast<const Quad *>(weights) + from * (N * 4) + lane;
        float sum[TILES][4] = {};                               // columns g, g+8 of rows 2t, 2t+1
        for (int segment = from; segment < to; segment++, w += N * 4) {
            const Quad b = rounded(*reinterpret_cast<const float4 *>(rows + g * stride + segment * SEGMENT + t * 4), Precise{});
            Quad a[2 * TILES] = {};
#pragma unroll
            for (int i = 0; i < N / 8; i++) a[i] = w[i * 32];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const Quad &low = a[2 * m], &high = a[2 * m + 1];
                if constexpr (P == Precision::tf32) mma_tf32(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                else mma_bf16(sum[m], {low.x, high.x, low.y, high.y}, {b.x, b.y});
            }
            if constexpr (P == Precision::tf32) {               // which takes but 8 k at a time
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    const Quad &low = a[2 * m], &high = a[2 * m + 1];
                    mma_tf32(sum[m], {low.z, high.z, low.w, high.w}, {b.z, b.w});
                }
            }
        }
        sums += 2 * t * SUM_ROW + g;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i % 2 * SUM_ROW + m * 16 + i / 2 * 8] = sum[m][i];
    }
}

// The sum of all slices: a row of the chunk, a column.
template <int N, Precision P> DEVICE float total(const float *sums, int slices, int row, int column) {
    constexpr int SUM_ROW = Product<N, P>::SUM_ROW;
    sums += (row / ROWS * slices * ROWS + row % ROWS) * SUM_ROW + column;
    float sum = 0.0f;
    for (int i = 0; i < slices; i++) sum += sums[i * ROWS * SUM_ROW];
    return sum;
}

// ---- how the work is dealt out -------------------------------------------------------------------------------
struct Plan {
    int64_t T, B;
    int H, padded;                          // padded: H in whole segments
    int units, teams, team;                 // units of a block, teams, blocks of a team
    int tiles, chunk;                       // tiles of a team's rows, tiles of a chunk
    int stride, buffers;                    // floats from row to row in shared memory; 2 buffers: chunks are loaded ahead
    size_t shared;                          // bytes of shared memory
};

// What a kernel needs, with blocks of 8, 16 and 32 units.  K comes in parts of H.
struct Needs {
    int weights[3], sums[3];                // floats that a block keeps for each k of a part; of its sums
    int kept, at_once, copied;              // parts that are kept; that are multiplied at once; of a row, copied in a step
};

// Of those layouts that fit, the one whose blocks have least to multiply in a step; of equal ones that whose blocks copy least:
// the weights once, the rows at each step.  teams = 0: there is none.
static Plan plan_for(int64_t T, int64_t B, int64_t H, const Needs &needs) {
    // Every block of a team copies all its rows at each step.  Of long rows and large batches, more than this many floats
    // take longer, by the bandwidth of the second cache, than it takes to launch a product that shares its operands better.
    constexpr int64_t MOST_COPIED = 128 * 1024;
    Plan best = {};
    if (H > 32 * pyops_multiprocessors()) return best;
    const int64_t all = blocks_for<int64_t>(B, ROWS);           // tiles
    int64_t least = INT64_MAX, least_copied = INT64_MAX;
    for (int i = 2; i >= 0; i--) {
        Plan p = {T, B, int(H), round_up(int(H), SEGMENT), 8 << i};
        p.team = blocks_for(p.H, p.units);
        if (p.team > pyops_multiprocessors()) continue;
        const int64_t tiles = blocks_for<int64_t>(all, pyops_multiprocessors() / p.team);
        const int64_t work = tiles * p.units, in_step = tiles * ROWS * needs.copied * p.padded;
        const int64_t copied = int64_t(needs.kept) * p.padded * needs.weights[i] + T * in_step;
        if (in_step > MOST_COPIED || work > least || (work == least && copied >= least_copied)) continue;
        p.tiles = int(tiles);
        p.teams = int(blocks_for<int64_t>(all, tiles));
        p.stride = needs.at_once * p.padded;
        if (p.stride % 32 == 0) p.stride += 16;                 // rows begin 16 banks apart
        // Three chunks or more where there are tiles for them: then a block has work while it waits for its team.
        for (p.chunk = WARPS; p.chunk > 1 && 3 * p.chunk > p.tiles; p.chunk /= 2) {}
        p.buffers = blocks_for(p.tiles, p.chunk) > 2 ? 2 : 1;
        const auto size = [&] {
            const int rows = p.buffers * p.chunk * ROWS;
            return sizeof(float) * (size_t(needs.kept) * p.padded * needs.weights[i] + size_t(rows) * p.stride + needs.sums[i]);
        };
        const size_t most = size_t(pyops_shared_memory());
        while (size() > most && p.chunk > 1) p.chunk /= 2;
        if (size() > most) p.buffers = 1;
        p.shared = size();
        if (p.shared > most) continue;
        best = p;
        least = work;
        least_copied = copied;
    }
    return best;
}

static Plan forward_plan(int64_t T, int64_t B, int64_t H, bool before) {
    const Precision p = pyops_precision_now();
    Needs needs = {{}, {}, 1, 1, before ? 2 : 1};
    for (int i = 0; i < 3; i++) {
        const int u = 8 << i;
        needs.weights[i] = before ? weights_of_k(2 * u, p) + weights_of_k(u, p) : weights_of_k(3 * u, p);
        needs.sums[i] = before ? sums_of_block(2 * u) : sums_of_block(3 * u);
    }
    return plan_for(T, B, H, needs);
}

static Plan backward_plan(int64_t T, int64_t B, int64_t H, bool before) {
    const Precision p = pyops_precision_now();
    Needs needs = {{}, {}, 3, before ? 2 : 3, 3};
    for (int i = 0; i < 3; i++) {
        needs.weights[i] = weights_of_k(8 << i, p);
        needs.sums[i] = sums_of_block(8 << i);
    }
    return plan_for(T, B, H, needs);
}

// ---- the walk through time, of a block ------------------------------------------------------------------------
struct Item {                               // what comes next: a phase of a step, for a chunk of rows
    int64_t step;
    int phase, chunk;
};

struct Place {                              // of a block, and of the thread in it
    int unit, chunks;                       // the thread's unit, which may lie beyond H; chunks of the team
    int64_t first_row, end_row;             // of the team
    unsigned *counters;                     // one for each chunk: how often a block of the team has arrived with it
};
static constexpr int COUNTER = 32;          // words from one counter to the next: each has a cache line of its own

DEVICE Place place_of(const Plan &p, unsigned *counters) {
    const int team = blockIdx.x / p.team;
    Place place;
    place.unit = blockIdx.x % p.team * p.units + threadIdx.x % p.units;
    place.first_row = int64_t(team) * p.tiles * ROWS;
    place.end_row = min(place.first_row + int64_t(p.tiles) * ROWS, p.B);
    const int chunk = p.chunk * ROWS;
    place.chunks = int((place.end_row - place.first_row + chunk - 1) / chunk);
    place.counters = counters + int64_t(team) * p.tiles * COUNTER;
    return place;
}

// The rows of a chunk, from the batch's row `from`.
struct Span {
    int64_t from;
    int count;
};
DEVICE Span rows_of(const Plan &p, const Place &place, int chunk) {
    const int64_t from = place.first_row + int64_t(chunk) * p.chunk * ROWS;
    return {from, int(min(place.end_row - from, int64_t(p.chunk * ROWS)))};
}

// Before the first item: everyone's counters are 0, and what the block keeps is there.
DEVICE void start(const Plan &p, const Place &place, bool exchange) {
    if (!exchange) return __syncthreads();
    if (blockIdx.x % p.team == 0)
        for (int i = threadIdx.x; i < place.chunks; i += THREADS) place.counters[i * COUNTER] = 0;
    grid_sync();
}

// Wait until each block of the team has arrived `times` times with a chunk.
DEVICE void wait_for(const Plan &p, const Place &place, int chunk, int64_t times) {
    if (threadIdx.x == 0)
        while (load_acquire(place.counters + chunk * COUNTER) < unsigned(times * p.team)) {}
    __syncthreads();
}

DEVICE void arrive(const Place &place, int chunk) {
    __syncthreads();
    if (threadIdx.x == 0) add_release(place.counters + chunk * COUNTER, 1);
}

// Copy rows to shared memory: of each, `parts` times H floats from column `first` on, each part padded to whole segments (with
// the zeros that are there).  A third part lies one further: of dr dz dn du, those are dr dz du.  `from` is `ld` floats a row.
DEVICE void load(float *to, const float *from, int64_t ld, int count, int first, int parts, const Plan &p) {
    const bool whole = p.H % 4 == 0 && uintptr_t(from) % 16 == 0;      // then every row and part begins at 16 bytes
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < count; row += WARPS)
        for (int part = 0; part < parts; part++) {
            const float *const source = from + row * ld + first + (part + part / 2) * p.H;
            float *const target = to + row * p.stride + part * p.padded;
            if (whole) {
                for (int k = lane * 4; k < p.H; k += 32 * 4) cp_async16(target + k, source + k);
            } else {
                for (int k = lane; k < p.H; k += 32) target[k] = source[k];
            }
        }
    cp_async_commit();
}

// Do `items` items: fetch(item) reads what of them is known before the exchange, begin(item, rows) waits for the team and
// starts to copy, finish(item, rows, fetched) does the rest.
template <class Fetch, class Begin, class Finish>
DEVICE void walk(const Plan &p, const Place &place, int64_t items, int phases, float *buffer,
                 Fetch fetch, Begin begin, Finish finish) {
    if (p.padded != p.H) {                                             // the padding stays 0 for good
        for (int i = threadIdx.x; i < p.buffers * p.chunk * ROWS * p.stride; i += THREADS) buffer[i] = 0.0f;
        __syncthreads();
    }
    const bool ahead = p.buffers == 2 && place.chunks > 1;             // with one chunk, the next item waits for this one
    float *other = buffer + (p.buffers - 1) * p.chunk * ROWS * p.stride;
    Item item = {0, 0, 0};
    for (int64_t i = 0; i < items; i++) {
        Item next = item;
        if (++next.chunk == place.chunks) {
            next.chunk = 0;
            if (++next.phase == phases) next.phase = 0, next.step++;
        }
        const auto fetched = fetch(item);
        if (i == 0 || !ahead) begin(item, buffer);
        cp_async_wait<0>();
        __syncthreads();
        if (ahead && i + 1 < items) begin(next, other);
        finish(item, buffer, fetched);
        arrive(place, item.chunk);
        item = next;
        float *const used = buffer;
        if (ahead) buffer = other, other = used;
    }
}

// ---- gates of one unit in one row; the numbers are those of docs/gru.md ---------------------------------------
// gate: the row's r, which has z, n and u H floats apart behind it; a: its a_r, a_z, a_n, which may lie in the same places.
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Known {                              // before the product: a's parts and h[t-1]; for before_gates_2, z itself
    float r, z, n, h;
};
DEVICE Known known(const float *a, const float *h, int64_t H) { return {a[0], a[H], a[2 * H], h ? *h : 0.0f}; }

// The product of h[t-1], with its bias, is given.
DEVICE void after_gates(float *h, float *gate, int64_t H, Known k, float product_r, float product_z, float u) {
    const float r = sigmoid(k.r + product_r);                          // 1
    const float z = sigmoid(k.z + product_z);                          // 2
    const float n = tanhf(k.n + r * u);                                // 4
    *h = (1.0f - z) * n + z * k.h;                                     // 5
    gate[0] = r;
    gate[H] = z;
    gate[2 * H] = n;
    gate[3 * H] = u;
}
DEVICE void before_gates_1(float *gate, int64_t H, Known k, float product_r, float product_z) {
    const float r = sigmoid(k.r + product_r);                          // 1
    gate[0] = r;
    gate[H] = sigmoid(k.z + product_z);                                // 2
    gate[3 * H] = r * k.h;                                             // 3: u
}
DEVICE void before_gates_2(float *h, float *gate, int64_t H, Known k, float product_n) {
    const float n = tanhf(k.n + product_n);                            // 4
    *h = (1.0f - k.z) * n + k.z * k.h;                                 // 5
    gate[2 * H] = n;
}

// ---- forward ----------------------------------------------------------------------------------------------------
struct Forward {
    float *h, *gates;
    const float *a, *h0, *w_hh, *b_hh;
    int64_t a_row;                          // floats from row to row of a
    unsigned *counters;
};

template <int U, Precision P, bool BEFORE>
static __global__ void __launch_bounds__(THREADS, 1) forward_steps(const Forward f, const Plan p) {
    constexpr int PHASES = BEFORE ? 2 : 1, N = BEFORE ? 2 * U : 3 * U;         // columns of the first phase
    DYN_SHARED(float, weights);
    float *const weights_n = weights + p.padded * Product<N, P>::WEIGHTS;
    float *const buffer = weights_n + (BEFORE ? p.padded * Product<U, P>::WEIGHTS : 0);
    float *const sums = buffer + p.buffers * p.chunk * ROWS * p.stride;
    const int64_t B = p.B, H = p.H;
    const int segments = p.padded / SEGMENT, slices = WARPS / p.chunk, column = threadIdx.x % U;
    const Place place = place_of(p, f.counters);

    // The columns of a product are the block's units for one gate after the other, of which `first` is the first.
    const auto row_of_w = [&](int first, int column, int k) {
        const int unit = blockIdx.x % p.team * U + column % U;
        const float *const w = f.w_hh + ((first + column / U) * H + unit) * H + k;
        if (unit >= H) return make_float4(0, 0, 0, 0);
        if (k + 4 <= H && uintptr_t(w) % 16 == 0) return *reinterpret_cast<const float4 *>(w);
        return make_float4(k < H ? w[0] : 0, k + 1 < H ? w[1] : 0, k + 2 < H ? w[2] : 0, k + 3 < H ? w[3] : 0);
    };
    keep<N, P>(weights, segments, [&](int column, int k) { return row_of_w(0, column, k); });
    if (BEFORE) keep<U, P>(weights_n, segments, [&](int column, int k) { return row_of_w(2, column, k); });
    const bool mine = place.unit < H;
    const auto bias = [&](int gate) { return mine ? f.b_hh[gate * H + place.unit] : 0.0f; };
    const float b_r = bias(0), b_z = bias(1), b_n = bias(2);
    start(p, place, p.T * PHASES > 1);

    const auto h_before = [&](int64_t t, int64_t row) -> const float * {      // h[t-1]
        return t ? f.h + ((t - 1) * B + row) * H : f.h0 ? f.h0 + row * H : nullptr;
    };
    const auto fetch_row = [&](const Item &item, Span rows, int row) {
        if (!mine || row >= rows.count) return Known{};
        const float *const h = h_before(item.step, rows.from + row);
        const int64_t at = item.step * B + rows.from + row;
        Known k = known(f.a + at * f.a_row + place.unit, h ? h + place.unit : nullptr, H);
        if (BEFORE && item.phase) k.z = f.gates[(at * 4 + 1) * H + place.unit];
        return k;
    };
    walk(p, place, p.T * PHASES * place.chunks, PHASES, buffer,
        [&](const Item &item) { return fetch_row(item, rows_of(p, place, item.chunk), threadIdx.x / U); },
        [&](const Item &item, float *to) {
            const Span rows = rows_of(p, place, item.chunk);
            const float *const h = h_before(item.step, rows.from);
            if (item.step || item.phase) wait_for(p, place, item.chunk, item.step * PHASES + item.phase);
            if (BEFORE && item.phase) load(to, f.gates + (item.step * B + rows.from) * 4 * H, 4 * H, rows.count, 3 * p.H, 1, p);
            else if (h) load(to, h, H, rows.count, 0, 1, p);
        },
        [&](const Item &item, const float *from, Known next) {
            const Span rows = rows_of(p, place, item.chunk);
            const bool zeros = item.phase == 0 && !h_before(item.step, rows.from);      // nothing comes of zeros but the bias
            if (BEFORE && item.phase) multiply<U, P>(sums, weights_n, from, p.stride, segments, slices);
            else if (!zeros) multiply<N, P>(sums, weights, from, p.stride, segments, slices);
            __syncthreads();
            const auto product = [&](int row, int gate) {
                return zeros ? 0.0f : total<N, P>(sums, slices, row, gate * U + column);
            };
            for (int row = threadIdx.x / U; row < rows.count; row += THREADS / U) {
                const Known k = next;
                next = fetch_row(item, rows, row + THREADS / U);
                if (!mine) continue;
                const int64_t at = item.step * B + rows.from + row;
                float *const h = f.h + at * H + place.unit, *const gate = f.gates + at * 4 * H + place.unit;
                if constexpr (!BEFORE)
                    after_gates(h, gate, H, k, b_r + product(row, 0), b_z + product(row, 1), b_n + product(row, 2));
                else if (item.phase) before_gates_2(h, gate, H, k, b_n + total<U, P>(sums, slices, row, column));
                else before_gates_1(gate, H, k, b_r + product(row, 0), b_z + product(row, 1));
            }
        });
}

// ---- backward: the gates' gradients of all steps, last step first -------------------------------------------------
struct Backward {
    float *dh0;
    float *dgates, *states, *carry;         // dgates (T,B,4H): dr dz dn du;   states (T,B,H): h[t-1], where there is an h0
    const float *dh, *dh_last, *h0, *w_hh, *h, *gates;          // carry (B,H): the part of h[t-1]'s gradient that comes from
    const int32_t *lengths;                                     // no product
    int64_t T, B, H;
    unsigned *counters;
};
struct Saved {                              // by forward; and the gradient of h[t] but for a product's part
    float r, z, n, u, h, d;
};
DEVICE Saved saved(const Backward &b, int64_t t, int64_t row, int64_t unit) {
    const int64_t H = b.H, state = row * H + unit, step = b.B * H;      // its place in a step, and the length of that
    const float *const gate = b.gates + (t * b.B + row) * 4 * H + unit;
    const float h = t ? b.h[(t - 1) * step + state] : b.h0 ? b.h0[state] : 0.0f;
    const float carry = t < b.T - 1 ? b.carry[state] : b.dh_last ? b.dh_last[state] : 0.0f;
    float d = b.dh ? carry + b.dh[t * step + state] : carry;
    if (b.lengths && t >= b.lengths[row]) d = 0.0f;                     // and so is all that comes of it, back to the last step
    return {gate[0], gate[H], gate[2 * H], gate[3 * H], h, d};
}

// Steps 5, 4, 2 backwards, and with reset after also 1, for the gradient d of h[t].
template <bool BEFORE>
DEVICE void back_gates(const Backward &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float d) {
    const int64_t H = b.H, at = t * b.B + row;
    float *const dgate = b.dgates + at * 4 * H + unit;
    const float dn = d * (1.0f - s.z) * (1.0f - s.n * s.n);            // 5, 4
    dgate[H] = d * (s.h - s.n) * s.z * (1.0f - s.z);                   // 5, 2
    dgate[2 * H] = dn;
    b.carry[row * H + unit] = d * s.z;                                 // 5
    if (b.h0) b.states[at * H + unit] = s.h;
    if (BEFORE) return;
    dgate[0] = dn * s.u * s.r * (1.0f - s.r);                          // 4, 1
    dgate[3 * H] = dn * s.r;                                           // 4: du
}
// The rest with reset before: du = dn w_hn is the gradient of u = r * h[t-1].
DEVICE void back_reset(const Backward &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float du) {
    float *const dgate = b.dgates + (t * b.B + row) * 4 * b.H + unit;
    dgate[0] = du * s.h * s.r * (1.0f - s.r);                          // 3, 1
    dgate[3 * b.H] = du;
    b.carry[row * b.H + unit] += du * s.r;                                             // 3
}

template <int U, Precision P, bool BEFORE>
static __global__ void __launch_bounds__(THREADS, 1) backward_steps(const Backward b, const Plan p) {
    constexpr int PHASES = BEFORE ? 2 : 1;
    DYN_SHARED(float, weights);
    float *const weights_n = weights + 2 * p.padded * Product<U, P>::WEIGHTS;
    float *const buffer = weights + 3 * p.padded * Product<U, P>::WEIGHTS;
    float *const sums = buffer + p.buffers * p.chunk * ROWS * p.stride;
    const int64_t H = p.H;
    const int segments = p.padded / SEGMENT, slices = WARPS / p.chunk;
    const Place place = place_of(p, b.counters);
    // Items: with reset after one for each step whose h[t-1] has a gradient that someone wants, with it before two, the
    // first of which is needed for dr in any case.
    const int64_t steps = b.dh0 ? p.T : p.T - 1, items = (BEFORE ? steps + p.T : steps) * place.chunks;

    // k: the rows of r, of z, of n, each padded
    keep<U, P>(weights, 3 * segments, [&](int column, int k) {
        const int unit = blockIdx.x % p.team * U + column;
        const int in_gate = k % p.padded;
        const float *const w = b.w_hh + (k / p.padded * H + in_gate) * H + unit;
        const auto at = [&](int i) { return unit < H && in_gate + i < H ? w[i * H] : 0.0f; };
        return make_float4(at(0), at(1), at(2), at(3));
    });
    const bool mine = place.unit < H;
    start(p, place, items > 0);

    const auto fetch_row = [&](int64_t t, Span rows, int row) {
        return mine && row < rows.count ? saved(b, t, rows.from + row, place.unit) : Saved{};
    };
    for (int chunk = 0; chunk < place.chunks; chunk++) {                       // the last step
        const Span rows = rows_of(p, place, chunk);
        for (int row = threadIdx.x / U; row < rows.count && mine; row += THREADS / U) {
            const Saved s = fetch_row(p.T - 1, rows, row);
            back_gates<BEFORE>(b, p.T - 1, rows.from + row, place.unit, s, s.d);
        }
        arrive(place, chunk);
    }
    // An item multiplies gradients of the gates of step t.  The last phase of a step gives the gradient of h[t-1], and with
    // it those of the gates of step t - 1.
    walk(p, place, items, PHASES, buffer,
        [&](const Item &item) {
            const int64_t t = p.T - 1 - item.step;
            return fetch_row(item.phase == PHASES - 1 && t ? t - 1 : t, rows_of(p, place, item.chunk), threadIdx.x / U);
        },
        [&](const Item &item, float *to) {
            const Span rows = rows_of(p, place, item.chunk);
            const float *const from = b.dgates + ((p.T - 1 - item.step) * p.B + rows.from) * 4 * H;
            wait_for(p, place, item.chunk, item.step * PHASES + item.phase + 1);
            if (!BEFORE) load(to, from, 4 * H, rows.count, 0, 3, p);           // dr dz du
            else if (item.phase == 0) load(to, from, 4 * H, rows.count, 2 * p.H, 1, p);        // dn
            else load(to, from, 4 * H, rows.count, 0, 2, p);                   // dr dz
        },
        [&](const Item &item, const float *from, Saved next) {
            const Span rows = rows_of(p, place, item.chunk);
            const int64_t t = p.T - 1 - item.step;
            const bool last = item.phase == PHASES - 1;                        // of the step
            const int parts = !BEFORE ? 3 : last ? 2 : 1;
            multiply<U, P>(sums, BEFORE && !last ? weights_n : weights, from, p.stride, parts * segments, slices);
            __syncthreads();
            for (int row = threadIdx.x / U; row < rows.count; row += THREADS / U) {
                const Saved s = next;
                next = fetch_row(last && t ? t - 1 : t, rows, row + THREADS / U);
                if (!mine) continue;
                const int64_t in_batch = rows.from + row, state = in_batch * H + place.unit;
                const float product = total<U, P>(sums, slices, row, threadIdx.x % U);
                if (!last) back_reset(b, t, in_batch, place.unit, s, product);
                else if (t) back_gates<BEFORE>(b, t - 1, in_batch, place.unit, s, s.d + product);
                else b.dh0[state] = b.carry[state] + product;
            }
        });
}

// ---- one step at a time, where the weights do not fit on chip -------------------------------------------------------
enum class Stage { after, before_1, before_2 };

// product (B,3H): of h[t-1], or of u in the last third, with the biases
template <Stage STAGE>
static __global__ void forward_step(float *h, float *gates, const float *a, int64_t a_row, const float *h_before,
                                    const float *product, int64_t B, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < B * H; i += int64_t(gridDim.x) * blockDim.x) {
        float *const gate = gates + i / H * 4 * H + i % H;
        const float *const of = product + i / H * 3 * H + i % H;
        Known k = known(a + i / H * a_row + i % H, h_before ? h_before + i : nullptr, H);
        if constexpr (STAGE == Stage::before_2) k.z = gate[H];
        if constexpr (STAGE == Stage::after) after_gates(h + i, gate, H, k, of[0], of[H], of[2 * H]);
        if constexpr (STAGE == Stage::before_1) before_gates_1(gate, H, k, of[0], of[H]);
        if constexpr (STAGE == Stage::before_2) before_gates_2(h + i, gate, H, k, of[2 * H]);
    }
}

static pyops_status forward_by_steps(const Forward &f, float *product, int64_t T, int64_t B, int64_t H, bool before,
                                     void *stream) {
    const unsigned blocks = grid_for(B * H, THREADS);
    const cudaStream_t in = stream_of(stream);
    Launches launches;
    for (int64_t t = 0; t < T; t++) {
        float *const h = f.h + t * B * H, *const gates = f.gates + t * B * 4 * H;
        const float *const a = f.a + t * B * f.a_row;
        const float *const h_before = t ? h - B * H : f.h0, *const rows = h_before ? h_before : h;
        const int64_t K = h_before ? H : 0, N = before ? 2 * H : 3 * H;        // nothing comes of zeros but the bias
        pyops_status status = pyops_gemm(product, rows, f.w_hh, f.b_hh, B, N, K, 3 * H, H, 1, 1, H, 0, 0, stream);
        if (status) return status;
        if (!before) {
            launches << LAUNCH(forward_step<Stage::after>, blocks, THREADS, 0, in, h, gates, a, f.a_row, h_before, product, B, H);
            continue;
        }
        launches << LAUNCH(forward_step<Stage::before_1>, blocks, THREADS, 0, in, h, gates, a, f.a_row, h_before, product, B, H);
        status = pyops_gemm(product + 2 * H, gates + 3 * H, f.w_hh + 2 * H * H, f.b_hh + 2 * H, B, H, H, 3 * H,
                            4 * H, 1, 1, H, 0, 0, stream);
        if (status) return status;
        launches << LAUNCH(forward_step<Stage::before_2>, blocks, THREADS, 0, in, h, gates, a, f.a_row, h_before, product, B, H);
    }
    return pyops_launched("gru_forward", launches.error, stream);
}

template <bool BEFORE> static __global__ void backward_step(const Backward b, int64_t t) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < b.B * b.H; i += int64_t(gridDim.x) * blockDim.x) {
        const Saved s = saved(b, t, i / b.H, i % b.H);
        back_gates<BEFORE>(b, t, i / b.H, i % b.H, s, s.d);
    }
}

static __global__ void backward_reset(const Backward b, const float *du, int64_t t) {          // du (B,H)
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < b.B * b.H; i += int64_t(gridDim.x) * blockDim.x)
        back_reset(b, t, i / b.H, i % b.H, saved(b, t, i / b.H, i % b.H), du[i]);
}

static pyops_status backward_by_steps(const Backward &b, float *du, bool before, void *stream) {
    const int64_t T = b.T, B = b.B, H = b.H;
    const unsigned blocks = grid_for(B * H, THREADS);
    const float *const w_hn = b.w_hh + 2 * H * H;
    pyops_status status = PYOPS_OK;
    // c (+)= part of the gates' gradients x part of w_hh
    const auto product = [&](float *c, const float *d, const float *w, int64_t K, int32_t accumulate) {
        if (!status) status = pyops_gemm(c, d, w, nullptr, B, H, K, H, 4 * H, 1, H, 1, accumulate, 0, stream);
    };
    Launches launches;
    for (int64_t t = T - 1; t >= 0; t--) {
        const float *const d = b.dgates + t * B * 4 * H;
        if (before) {
            launches << LAUNCH(backward_step<true>, blocks, THREADS, 0, stream_of(stream), b, t);
            product(du, d + 2 * H, w_hn, H, 0);
            launches << LAUNCH(backward_reset, blocks, THREADS, 0, stream_of(stream), b, du, t);
        } else {
            launches << LAUNCH(backward_step<false>, blocks, THREADS, 0, stream_of(stream), b, t);
        }
        if (t == 0 && !b.dh0) break;
        if (!before) product(b.carry, d + 3 * H, w_hn, H, 1);
        product(b.carry, d, b.w_hh, 2 * H, 1);
    }
    if (b.dh0) launches << cudaMemcpyAsync(b.dh0, b.carry, B * H * sizeof(float), cudaMemcpyDeviceToDevice, stream_of(stream));
    return status ? status : pyops_launched("gru_backward", launches.error, stream);
}

// ---- the functions of the ABI ------------------------------------------------------------------------------------------
static __global__ void add_bias_gradients(float *db_ih, float *db_hh, const float *dgates, int64_t rows, int64_t H,
                                          bool before) {
    const int64_t column = blockIdx.x * int64_t(COLUMNS) + threadIdx.x, columns = before ? 3 * H : 4 * H;
    const float sum = column_sum(dgates, rows, 4 * H, column, columns);
    if (threadIdx.y || column >= columns) return;
    if (db_ih && column < 3 * H) db_ih[column] += sum;
    if (before || column < 2 * H) db_hh[column] += sum;
    else if (column >= 3 * H) db_hh[column - H] += sum;
}

// 0 where a sentence has no more steps.  These were computed as the others: they wait for nobody, and nobody for them.
static __global__ void clear_rest(float *h, float *gates, const int32_t *lengths, int64_t T, int64_t B, int64_t H,
                                  FaultRecord *faults) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    for (int64_t b = first; b < B && faults; b += step)
        if (lengths[b] < 0 || lengths[b] > T) report(faults, Fault::length, Who::gru_forward, b, lengths[b], T);
    for (int64_t i = first; i < T * B * H; i += step) {
        const int64_t row = i / H;
        if (row / B < lengths[row % B]) continue;
        h[i] = 0.0f;
        for (int gate = 0; gate < 4; gate++) gates[(row * 4 + gate) * H + i % H] = 0.0f;
    }
}

// Run a kernel of all steps.  Blocks that wait for each other have to be there all at once.
template <class Arguments>
static cudaError_t launch_steps(void (*kernel)(Arguments, Plan), const Arguments &arguments, const Plan &p, bool exchange,
                                void *stream) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, pyops_shared_memory());
    const unsigned blocks = unsigned(p.teams * p.team);
    return exchange ? LAUNCH_COOP(kernel, blocks, THREADS, p.shared, stream_of(stream), arguments, p)
                    : LAUNCH(kernel, blocks, THREADS, p.shared, stream_of(stream), arguments, p);
}

// launch(units, precision, before): each a type that holds the value
template <class Launch> static cudaError_t with_constants(int units, bool before, Launch launch) {
    const auto with_before = [&](auto u, auto p) {
        return before ? launch(u, p, std::true_type()) : launch(u, p, std::false_type());
    };
    const auto with_precision = [&](auto u) {
        switch (pyops_precision_now()) {
        case Precision::tf32: return with_before(u, std::integral_constant<Precision, Precision::tf32>());
        case Precision::bf16: return with_before(u, std::integral_constant<Precision, Precision::bf16>());
        default:              return with_before(u, std::integral_constant<Precision, Precision::fp32>());
        }
    };
    switch (units) {
    case 8:  return with_precision(std::integral_constant<int, 8>());
    case 16: return with_precision(std::integral_constant<int, 16>());
    default: return with_precision(std::integral_constant<int, 32>());
    }
}

static pyops_status check(const char *who, const float *x, int64_t T, int64_t B, int64_t I, int64_t H) {
    PYOPS_REQUIRE(T >= 1 && B >= 0 && I >= 0 && H >= 1, "%s: T=%lld B=%lld I=%lld H=%lld", who, LL(T), LL(B), LL(I), LL(H));
    PYOPS_REQUIRE(!I == !x, "%s: I=%lld, want 0 where there is no x, and only there", who, LL(I));
    return PYOPS_OK;
}

// A counter for each chunk of rows, of which there are no more than tiles; or, one step at a time, floats of a step.
static int64_t counters_or(int64_t floats, int64_t B) { return std::max(blocks_for<int64_t>(B, ROWS) * COUNTER, floats); }

extern "C" int64_t pyops_gru_forward_work(int64_t, int64_t B, int64_t, int64_t H) { return counters_or(B * 3 * H, B); }

extern "C" int64_t pyops_gru_backward_work(int64_t T, int64_t B, int64_t, int64_t H) {
    return T * B * H + B * H + counters_or(B * H, B);
}

extern "C" pyops_status pyops_gru_forward(
    float *h, float *gates, const float *x, const float *a, const float *h0, const int32_t *lengths, const float *w_ih,
    const float *w_hh, const float *b_ih, const float *b_hh, float *work, int64_t T, int64_t B, int64_t I, int64_t H,
    int32_t reset_before, void *stream) {
    pyops_status status = check("gru_forward", x, T, B, I, H);
    if (status || B == 0) return status;
    PYOPS_REQUIRE(!I == !!a, "gru_forward: I=%lld, want a where it is 0, and only there", LL(I));
    // a = x w_ih' + b_ih of all steps, where r, z, n will be
    if (I) status = pyops_gemm(gates, x, w_ih, b_ih, T * B, 3 * H, I, 4 * H, I, 1, 1, I, 0, 0, stream);
    if (status) return status;
    const Forward f = {h, gates, I ? gates : a, h0, w_hh, b_hh, I ? 4 * H : 3 * H, reinterpret_cast<unsigned *>(work)};
    const Plan p = forward_plan(T, B, H, reset_before);
    Launches launches;
    if (!p.teams) status = forward_by_steps(f, work, T, B, H, reset_before, stream);
    else launches << with_constants(p.units, reset_before, [&](auto units, auto precision, auto before) {
        return launch_steps(forward_steps<units, precision, before>, f, p, T > 1 || before, stream);
    });
    if (status) return status;
    if (lengths) launches << LAUNCH(clear_rest, grid_for(T * B * H, THREADS), THREADS, 0, stream_of(stream),
                                    h, gates, lengths, T, B, H, pyops_faults());
    return pyops_launched("gru_forward", launches.error, stream);
}

extern "C" pyops_status pyops_gru_backward(
    float *dx, float *dh0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh, float *dgates, const float *dh,
    const float *dh_last, const float *x, const float *h0, const int32_t *lengths, const float *w_ih, const float *w_hh,
    const float *h, const float *gates, float *work,
    int64_t T, int64_t B, int64_t I, int64_t H, int32_t reset_before, void *stream) {
    pyops_status status = check("gru_backward", x, T, B, I, H);
    if (status || B == 0) return status;
    float *const states = work, *const carry = states + T * B * H, *const rest = carry + B * H;

    const Backward b = {dh0, dgates, states, carry, dh, dh_last, h0, w_hh, h, gates, lengths, T, B, H,
                        reinterpret_cast<unsigned *>(rest)};
    const Plan p = backward_plan(T, B, H, reset_before);
    if (p.teams) {
        const cudaError_t error = with_constants(p.units, reset_before, [&](auto units, auto precision, auto before) {
            return launch_steps(backward_steps<units, precision, before>, b, p, T > 1 || dh0 || before, stream);
        });
        status = pyops_launched("gru_backward", error, stream);
    } else {
        status = backward_by_steps(b, rest, reset_before, stream);
    }

    // What sums over all steps.  For the n part of w_hh, gradient x input is du x h[t-1] with the reset gate after the product,
    // dn x u with it before.  Without an h0 the first step adds nothing to dw_hh, and h[t-1] of the others lies in h.
    const auto add_weight_gradient = [&](float *dw, const float *d, int64_t M, const float *input, int64_t N, int64_t ld,
                                         int64_t rows) {
        if (!status && rows) status = pyops_gemm(dw, d, input, nullptr, M, N, rows, N, 1, 4 * H, ld, 1, 1, 0, stream);
    };
    const int64_t skipped = h0 ? 0 : B, rows = T * B - skipped;
    const float *const d = dgates + skipped * 4 * H, *const h_before = h0 ? states : h;
    if (!status && I && dx) status = pyops_gemm(dx, dgates, w_ih, nullptr, T * B, I, 3 * H, I, 4 * H, 1, I, 1, 0, 0, stream);
    if (I) add_weight_gradient(dw_ih, dgates, 3 * H, x, I, I, T * B);
    add_weight_gradient(dw_hh, d, 2 * H, h_before, H, H, rows);
    if (reset_before) add_weight_gradient(dw_hh + 2 * H * H, dgates + 2 * H, H, gates + 3 * H, H, 4 * H, T * B);
    else add_weight_gradient(dw_hh + 2 * H * H, d + 3 * H, H, h_before, H, H, rows);
    if (status) return status;
    const cudaError_t error = LAUNCH(add_bias_gradients, unsigned(blocks_for<int64_t>(4 * H, COLUMNS)),
                                     dim3(COLUMNS, COLUMN_THREADS), 0, stream_of(stream),
                                     db_ih, db_hh, dgates, T * B, H, reset_before != 0);
    return pyops_launched("gru_backward", error, stream);
}

// ---- one step, between products of the caller's ------------------------------------------------------------------------
template <Stage STAGE> static __global__ void gates_forward(
    float *y, float *gates, const float *a, const float *product, const float *h_prev, int64_t B, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < B * H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / H, unit = i % H;
        float *const gate = gates + row * 4 * H + unit;
        const float *const in = a + row * 3 * H + unit;
        Known k = {in[0], in[H], in[2 * H], h_prev[i]};
        if constexpr (STAGE == Stage::after) {
            const float *const of = product + row * 3 * H + unit;
            after_gates(y + i, gate, H, k, of[0], of[H], of[2 * H]);
        }
        if constexpr (STAGE == Stage::before_1) {
            const float *const of = product + row * 2 * H + unit;
            before_gates_1(gate, H, k, of[0], of[H]);
            y[i] = gate[3 * H];
        }
        if constexpr (STAGE == Stage::before_2) {
            k.z = gate[H];
            before_gates_2(y + i, gate, H, k, product[i]);
        }
    }
}

// The steps are those of back_gates and back_reset.
template <Stage STAGE> static __global__ void gates_backward(
    float *dh, float *da, float *dp, const float *dy, const float *du, const float *gates, const float *h_prev, int64_t B, int64_t H) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < B * H; i += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = i / H, unit = i % H;
        const float *const gate = gates + row * 4 * H + unit;
        float *const da_of = da + row * 3 * H + unit;
        const float r = gate[0], z = gate[H], n = gate[2 * H], h = h_prev[i];
        if constexpr (STAGE == Stage::before_2) {
            const float dr = du[i] * h * r * (1.0f - r);
            float *const dp_of = dp + row * 2 * H + unit;
            da_of[0] = dp_of[0] = dr;
            dp_of[H] = da_of[H];
            dh[i] += du[i] * r;
        } else {
            const float d = dy ? dh[i] + dy[i] : dh[i], dn = d * (1.0f - z) * (1.0f - n * n), dz = d * (h - n) * z * (1.0f - z);
            da_of[H] = dz;
            da_of[2 * H] = dn;
            dh[i] = d * z;
            if constexpr (STAGE == Stage::before_1) {
                dp[i] = dn;
            } else {
                float *const dp_of = dp + row * 3 * H + unit;
                da_of[0] = dp_of[0] = dn * gate[3 * H] * r * (1.0f - r);
                dp_of[H] = dz;
                dp_of[2 * H] = dn * r;
            }
        }
    }
}

static pyops_status check_step(const char *who, int64_t B, int64_t H, int32_t stage) {
    PYOPS_REQUIRE(B >= 0 && H >= 1, "%s: B=%lld H=%lld", who, LL(B), LL(H));
    PYOPS_REQUIRE(stage >= PYOPS_GRU_AFTER && stage <= PYOPS_GRU_BEFORE_2, "%s: stage=%d, want 0 to %d", who, stage, PYOPS_GRU_BEFORE_2);
    return PYOPS_OK;
}

extern "C" pyops_status pyops_gru_gates_forward(
    float *y, float *gates, const float *a, const float *product, const float *h_prev,
    int64_t B, int64_t H, int32_t stage, void *stream) {
    const pyops_status status = check_step("gru_gates_forward", B, H, stage);
    if (status || B == 0) return status;
    const auto kernel = stage == PYOPS_GRU_AFTER ? gates_forward<Stage::after> :
                        stage == PYOPS_GRU_BEFORE_1 ? gates_forward<Stage::before_1> : gates_forward<Stage::before_2>;
    return pyops_launched("gru_gates_forward", LAUNCH(kernel, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream),
                                                      y, gates, a, product, h_prev, B, H), stream);
}

extern "C" pyops_status pyops_gru_gates_backward(
    float *dh, float *da, float *dp, const float *dy, const float *du, const float *gates, const float *h_prev,
    int64_t B, int64_t H, int32_t stage, void *stream) {
    const pyops_status status = check_step("gru_gates_backward", B, H, stage);
    if (status || B == 0) return status;
    const auto kernel = stage == PYOPS_GRU_AFTER ? gates_backward<Stage::after> :
                        stage == PYOPS_GRU_BEFORE_1 ? gates_backward<Stage::before_1> : gates_backward<Stage::before_2>;
    return pyops_launched("gru_gates_backward", LAUNCH(kernel, grid_for(B * H, THREADS), THREADS, 0, stream_of(stream),
                                                       dh, da, dp, dy, du, gates, h_prev, B, H), stream);
}
