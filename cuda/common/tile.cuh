// tile.cuh - the matrix product of a block, for any kernel: a tile of sums  c[m,n] = sum_k a[m,k] b[n,k].
//
// Both operands are matrices with K as the second dimension and rows along the tile (the rows m of a, the columns n of the
// usual b).  A block traverses K in steps of S::K.  The two panels of a step are in shared memory, in a ring of S::STAGES
// slots that is filled in advance:
//
//              panel of b   S::N rows x S::K              slots    [ computing ][ arriving ][ arriving ]
//            +------------------------+
//   panel    |  warp 0   |  warp 1    |     a warp has S::WARP_M x S::WARP_N sums in its registers:
//   of a     |-----------+------------|     float32       8 columns x 4 rows of lanes, each lane a grid of sums, plain FMAs
//   S::M x   |  warp 2   |  warp 3    |     TF32, bf16    tensor cores, mma.sync on 16 x 8 sums (m16n8k8, m16n8k16)
//   S::K     +------------------------+
//
// A panel keeps the memory order of its operand, so that it is copied 16 bytes at a time in either layout: rows of S::K + 4
// floats if k is contiguous (k_inner), else S::K lines of ROWS + 8 floats.  With this padding no read of a fragment has a bank
// conflict.  From a line of rows, a lane loads several adjacent rows at once; any assignment of the rows of the tile to lanes
// is correct (see `Rows::index`), and the sums are written in the right order.
//
// An operand is a struct, passed to the kernel by value:
//   static constexpr bool k_inner;    whether elements adjacent in memory are adjacent in k (else: in the row)
//   int64_t rows;                     number of rows; outside the rows and the range of k, elements are zero
//   static constexpr Way way;         how its elements get into shared memory:
//     copied   they are in memory, as described by `Stored`, and are copied asynchronously
//     formed   likewise (whole16), then the thread that copied four adjacent numbers computes the elements from them in place:
//                void form(float (&four)[4], const Line &, int64_t first) const      `first`: index of the first k, or row
//                Line line(int64_t) const      data common to a line (a row if k_inner, else a k)
//     made     float operator()(int64_t row, int64_t k) const    computes an element during the load, from any memory
//   struct Line;                      empty unless formed
//
// Use, in a kernel of T::THREADS threads with T::BYTES of dynamic shared memory, T = Tile<TileShape<...>, precision, A, B>:
//   T::product(shared, a, b, m0, n0, k0, k1);                                 the whole block; k0 a multiple of 4
//   T::each(shared, [&](int m, int n, float sum) { ... });                    a warp along a row: n = lane, lane + 32, ...
// A T::RowSums as last argument of product() also sums the rows of a.
// or read sum (m, n) at shared[m * T::STRIDE + n]; the block must synchronise before the next product.
// Every sum adds its terms in the order of k, so results do not depend on the shape or the layout, bit for bit.
#pragma once
#include <type_traits>
#include "real.cuh"

template <int M_, int N_, int K_, int WARPS_M_, int WARPS_N_, int STAGES_> struct TileShape {
    static constexpr int M = M_, N = N_, K = K_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
    static constexpr int WARP_M = M / WARPS_M, WARP_N = N / WARPS_N, WARPS = WARPS_M * WARPS_N, THREADS = 32 * WARPS;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && K % 16 == 0 && STAGES >= 2, "not a shape that Tile can do");
};

enum class Way { copied, formed, made };

// An operand in memory: element (row, k) is p[row * row_step + k * k_step].  whole16: copies of 16 bytes are possible.
template <bool K_INNER> struct Stored {
    static constexpr bool k_inner = K_INNER;
    static constexpr Way way = Way::copied;
    struct Line {};
    const float *p;
    int64_t rows, row_step, k_step;
    bool whole16;
};

// ---- copies into shared memory ----------------------------------------------------------------------------------
template <class S, int ROWS, class X> struct Panel {
    static constexpr int INNER = X::k_inner ? S::K : ROWS, LINES = X::k_inner ? ROWS : S::K;
    static constexpr int STRIDE = INNER + (X::k_inner ? 4 : 8), FLOATS = LINES * STRIDE;

    // A thread's share of a panel: WIDTH adjacent elements at offset `inner` of lines `first`, first + STEP, ...
    template <int WIDTH> struct Share {
        static constexpr int ACROSS = INNER / WIDTH, STEP = S::THREADS / ACROSS, COUNT = LINES / STEP;
        static_assert(S::THREADS % ACROSS == 0 && LINES % STEP == 0, "threads do not divide a panel evenly");
        const int inner = threadIdx.x % ACROSS * WIDTH, first = threadIdx.x / ACROSS;
        const int row = X::k_inner ? first : inner, k = X::k_inner ? inner : first;
    };

    static constexpr int HELD = X::way == Way::made ? ROWS * S::K / S::THREADS : 1;
    // Lines of an operand that is formed.  If they are k's, each step has other ones, and they are read a step in advance.  If
    // they are rows, they stay the same: after the first step they are in the L1 cache, and the sums need the registers.
    static constexpr bool AHEAD = X::way == Way::formed && !X::k_inner;
    static constexpr int READ_AHEAD = AHEAD ? Share<4>::COUNT : 1;

    const X &x;
    const int64_t row0, k1;
    const int rows;                         // rows of the operand in this panel
    int64_t k;                              // first k of the next step
    const float *from = nullptr;            // this thread's first element in that step, if the operand is copied
    float held[HELD];                       // elements of an operand that is made, between `begin` and `finish`
    int64_t arrived;                        // first k of the next step to form
    typename X::Line line[READ_AHEAD];      // of this thread's lines in that step

    __device__ __forceinline__ Panel(const X &x, int64_t row0, int64_t k0, int64_t k1)
        : x(x), row0(row0), k1(k1), rows(static_cast<int>(x.rows - row0 < ROWS ? x.rows - row0 : ROWS)), k(k0), arrived(k0) {
        if constexpr (X::way != Way::made) from = X::way == Way::formed || x.whole16 ? first_element<4>() : first_element<1>();
        read_lines();
    }
    template <int WIDTH> __device__ __forceinline__ const float *first_element() const {
        const Share<WIDTH> share;
        return x.p + (row0 + share.row) * x.row_step + (k + share.k) * x.k_step;
    }

    // `begin` starts to fetch the panel of the next step, `finish` completes it.
    __device__ __forceinline__ void begin(float *panel) {
        if constexpr (X::way == Way::made) make();
        else if (X::way == Way::formed || x.whole16) copy<4>(panel);
        else if constexpr (X::way == Way::copied) copy<1>(panel);
        if constexpr (X::way != Way::made) from += S::K * x.k_step;
        k += S::K;
    }
    __device__ __forceinline__ void finish(float *panel) const {
        if constexpr (X::way == Way::made) {
            const Share<1> share;
#pragma unroll
            for (int i = 0; i < HELD; i++) panel[(share.first + i * share.STEP) * STRIDE + share.inner] = held[i];
        }
    }

    // The part of a thread's share that is inside the operand, in the step that starts at k: elements along a line, lines.
    template <int WIDTH>
    __device__ __forceinline__ void left(const Share<WIDTH> &share, int64_t k, int *along, int *lines) const {
        const int ks = static_cast<int>(k1 - k < S::K ? k1 - k : S::K);
        *along = (X::k_inner ? ks : rows) - share.inner, *lines = (X::k_inner ? rows : ks) - share.first;
    }
    template <int WIDTH> __device__ __forceinline__ void copy(float *panel) const {
        const Share<WIDTH> share;
        int along, lines;
        left(share, k, &along, &lines);
        const int bytes = along >= WIDTH ? 4 * WIDTH : along > 0 ? 4 * along : 0;
        const int64_t step = share.STEP * (X::k_inner ? x.row_step : x.k_step);
        const float *at = from;
#pragma unroll
        for (int i = 0; i < share.COUNT; i++, at += step) {
            float *to = panel + (share.first + i * share.STEP) * STRIDE + share.inner;
            if constexpr (WIDTH == 4) cp_async16_part(to, at, i * share.STEP < lines ? bytes : 0);
            else cp_async4(to, at, i * share.STEP < lines && bytes);
        }
    }
    __device__ __forceinline__ void make() {
        const Share<1> share;
        int along, lines;
        left(share, k, &along, &lines);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int further = i * share.STEP;
            held[i] = along > 0 && further < lines
                ? x(row0 + share.row + (X::k_inner ? further : 0), k + share.k + (X::k_inner ? 0 : further))
                : 0.0f;
        }
    }

    // For an operand that is formed: `form` a step after this thread's copies have arrived, then `read_lines` of the next one.
    __device__ __forceinline__ typename X::Line read_line(const Share<4> &share, int i) const {
        return x.line((X::k_inner ? row0 + share.row : arrived + share.k) + i * share.STEP);
    }
    __device__ __forceinline__ void read_lines() {
        if constexpr (AHEAD) {
            const Share<4> share;
            int along, lines;
            left(share, arrived, &along, &lines);
#pragma unroll
            for (int i = 0; i < share.COUNT; i++)
                if (i * share.STEP < lines) line[i] = read_line(share, i);
        }
    }
    __device__ __forceinline__ void form(float *panel) {
        if constexpr (X::way == Way::formed) {
            const Share<4> share;
            int along, lines;
            left(share, arrived, &along, &lines);
#pragma unroll
            for (int i = 0; i < share.COUNT; i++) {
                if (i * share.STEP >= lines) continue;
                float *const at = panel + (share.first + i * share.STEP) * STRIDE + share.inner;
                const float4 copied = *reinterpret_cast<const float4 *>(at);
                float four[4] = {copied.x, copied.y, copied.z, copied.w};
                const typename X::Line own = AHEAD ? line[AHEAD ? i : 0] : read_line(share, i);
                x.form(four, own, X::k_inner ? arrived + share.k : row0 + share.row);
#pragma unroll
                for (int j = 0; j < 4; j++) four[j] = j < along ? four[j] : 0.0f;
                *reinterpret_cast<float4 *>(at) = make_float4(four[0], four[1], four[2], four[3]);
            }
            arrived += S::K;
        }
    }
};

// ---- assignment of rows to lanes -----------------------------------------------------------------------------------
// GROUP adjacent lanes have COUNT rows each; index(q, g) is the row of the tile that is row q of lane g.  In a panel along k
// it is q * GROUP + g: adjacent lanes read adjacent padded rows.  In a panel of lines of rows, a lane has V adjacent rows.
template <bool K_INNER, int GROUP, int COUNT> struct Rows {
    static constexpr int V = K_INNER ? 1 : COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
    static __device__ __forceinline__ constexpr int index(int q, int g) { return q / V * V * GROUP + g * V + q % V; }
};

template <int V> static __device__ __forceinline__ void load(float *to, const float *from) {
    if constexpr (V == 4) {
        const float4 x = *reinterpret_cast<const float4 *>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (V == 2) {
        const float2 x = *reinterpret_cast<const float2 *>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = from[0];
    }
}

// ---- float32: plain multiply-adds ----------------------------------------------------------------------------------
// The lanes form 4 rows of 8; each has a grid of ROWS x COLUMNS sums.
template <class S, bool A_K, bool B_K> struct PlainSums {
    static constexpr int ROWS = S::WARP_M / 4, COLUMNS = S::WARP_N / 8;
    using RowsOf = Rows<A_K, 4, ROWS>;
    static constexpr int UNROLLED = ROWS * COLUMNS < 64 ? 4 : 1;    // 64 sums leave registers for one iteration's operands
    using ColumnsOf = Rows<B_K, 8, COLUMNS>;
    float sum[ROWS][COLUMNS] = {};

    // Elements k .. k+3 of V rows of a lane, starting at row q: the vector load runs along k or along the rows.
    template <class R, bool K_INNER> static __device__ __forceinline__ void load_rows(float (&x)[4][R::V], const float *panel,
                                                                                      int stride, int q, int g, int k) {
        if constexpr (K_INNER) {
            float along[4];
            load<4>(along, panel + R::index(q, g) * stride + k);
#pragma unroll
            for (int i = 0; i < 4; i++) x[i][0] = along[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) load<R::V>(x[i], panel + (k + i) * stride + R::index(q, g));
        }
    }
    template <int A_STRIDE, int B_STRIDE> __device__ __forceinline__ void add(const float *a, const float *b) {
        constexpr int V = RowsOf::V, W = ColumnsOf::V;
        const int g = (threadIdx.x & 31) / 8, t = threadIdx.x % 8;
#pragma unroll UNROLLED
        for (int k = 0; k < S::K; k += 4) {
            float x[ROWS / V][4][V];
#pragma unroll
            for (int m = 0; m < ROWS; m += V) load_rows<RowsOf, A_K>(x[m / V], a, A_STRIDE, m, g, k);
#pragma unroll
            for (int n = 0; n < COLUMNS; n += W) {
                float y[4][W];
                load_rows<ColumnsOf, B_K>(y, b, B_STRIDE, n, t, k);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int m = 0; m < ROWS; m++)
#pragma unroll
                        for (int j = 0; j < W; j++) sum[m][n + j] += x[m / V][i][m % V] * y[i][j];
            }
        }
    }
    __device__ __forceinline__ void store(float *to, int stride) const {
        const int g = (threadIdx.x & 31) / 8, t = threadIdx.x % 8;
#pragma unroll
        for (int m = 0; m < ROWS; m++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) to[RowsOf::index(m, g) * stride + ColumnsOf::index(n, t)] = sum[m][n];
    }
};

// ---- TF32 and bfloat16: tensor cores -------------------------------------------------------------------------------
// Lane = 4 g + t.  Its fragments: of 16 rows x 8 k's of a, (g,t) (g+8,t) (g,t+4) (g+8,t+4);  of 8 rows of b, (g,t) (g,t+4);
// of the 16 x 8 sums, (g,2t) (g,2t+1) (g+8,2t) (g+8,2t+1).
template <class S, Precision P, bool A_K, bool B_K> struct TensorSums {
    static constexpr int ROWS = S::WARP_M / 16, COLUMNS = S::WARP_N / 8;
    using RowsOf = Rows<A_K, 8, 2 * ROWS>;
    static constexpr int STEP = P == Precision::tf32 ? 8 : 16, UNROLLED = P == Precision::tf32 || ROWS * COLUMNS < 32 ? 4 : 1;
    using ColumnsOf = Rows<B_K, 8, COLUMNS>;
    float sum[ROWS][COLUMNS][4] = {};

    // Load element (g, k + t + 4 h) of each of COUNT groups of 8 rows, starting at group q, into x[..][h].
    template <class R, bool K_INNER, int COUNT> static __device__ __forceinline__ void
    load_groups(unsigned (&x)[COUNT][2], const float *panel, int stride, int q, int k) {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        if constexpr (K_INNER) {                // ldmatrix: four pieces of 8 rows x 4 k's; lane i provides a row of piece i/8
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                unsigned four[4];
                ldmatrix_x4(four, panel + ((q + i) * 8 + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 4);
                x[i][0] = four[0], x[i][1] = four[1], x[i + 1][0] = four[2], x[i + 1][1] = four[3];
            }
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i += R::V)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float side[R::V];
                    load<R::V>(side, panel + (k + t + 4 * h) * stride + R::index(q + i, g));
#pragma unroll
                    for (int j = 0; j < R::V; j++) x[i + j][h] = __float_as_uint(side[j]);
                }
        }
    }
    // The rounded fragment of one instruction: 8 k's in TF32, 16 in bfloat16.  Any permutation of the 16 k's is correct if a
    // and b use the same: here t and t+4 are a pair, so both precisions read panels in the same way.
    template <class R, bool K_INNER, int COUNT> static __device__ __forceinline__ void
    fragment(unsigned (&x)[COUNT][2], const float *panel, int stride, int q, int k) {
        if constexpr (P == Precision::tf32) {
            load_groups<R, K_INNER>(x, panel, stride, q, k);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) x[i / 2][i % 2] = to_tf32(__uint_as_float(x[i / 2][i % 2]));
        } else {
            constexpr int PIECE = R::V == 4 ? 4 : 2;
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i += PIECE) {            // the first 8 k's of a piece, then the other 8
                const int first = i / (2 * PIECE) * PIECE, h = i / PIECE % 2;
                unsigned eight[PIECE][2];
                load_groups<R, K_INNER>(eight, panel, stride, q + first, k + 8 * h);
#pragma unroll
                for (int j = 0; j < PIECE; j++)
                    x[first + j][h] = pack_bf16(__uint_as_float(eight[j][0]), __uint_as_float(eight[j][1]));
            }
        }
    }
    template <int A_STRIDE, int B_STRIDE> __device__ __forceinline__ void add(const float *a, const float *b) {
        constexpr int PIECE = ROWS % 2 ? 2 : 4;
#pragma unroll UNROLLED
        for (int k = 0; k < S::K; k += STEP) {
            unsigned y[COLUMNS][2];
            fragment<ColumnsOf, B_K>(y, b, B_STRIDE, 0, k);
#pragma unroll
            for (int q = 0; q < 2 * ROWS; q += PIECE) {
                unsigned x[PIECE][2];
                fragment<RowsOf, A_K>(x, a, A_STRIDE, q, k);
#pragma unroll
                for (int m = 0; m < PIECE; m += 2) {
                    const unsigned rows[4] = {x[m][0], x[m + 1][0], x[m][1], x[m + 1][1]};
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
                        float (&to)[4] = sum[(q + m) / 2][n];
                        if constexpr (P == Precision::tf32) mma_tf32(to, rows, y[n]);
                        else mma_bf16(to, rows, y[n]);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void store(float *to, int stride) const {
        const int g = (threadIdx.x & 31) / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < ROWS; m++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    to[RowsOf::index(2 * m + i / 2, g) * stride + ColumnsOf::index(n, 2 * t + i % 2)] = sum[m][n][i];
    }
};

// ---- sums of the rows of a ---------------------------------------------------------------------------------------------
// A product calls its `watch` with each panel of a, in shared memory.
struct Unwatched {
    template <class Element> __device__ __forceinline__ void operator()(const Element *) const {}
};

// Computes sum_k a[m,k], if wanted: thread t adds every COUNT-th k of row t % S::M.
template <class S, int STRIDE, bool K_INNER> struct RowSumsOf {
    static constexpr int COUNT = S::THREADS / S::M;
    static_assert(COUNT >= 1, "fewer threads than rows");
    bool wanted;
    float sum = 0.0f;
    template <class Element> __device__ __forceinline__ void operator()(const Element *panel) {
        if (!wanted) return;
        const int m = threadIdx.x % S::M;
#pragma unroll 4
        for (int k = threadIdx.x / S::M; k < S::K; k += COUNT)
            sum += as_float(panel[K_INNER ? m * STRIDE + k : k * STRIDE + m]);
    }
    // Call f(m, sum) for each row, after the product, whose tile this overwrites.
    template <class F> __device__ __forceinline__ void each(float *shared, const F &f) const {
        if (!wanted) return;
        __syncthreads();
        shared[threadIdx.x] = sum;
        __syncthreads();
        for (int m = threadIdx.x; m < S::M; m += S::THREADS) {
            float all = shared[m];
            for (int i = 1; i < COUNT; i++) all += shared[m + i * S::M];
            f(m, all);
        }
    }
};

// ---- the tile --------------------------------------------------------------------------------------------------------
template <class S, Precision P, class A, class B> struct Tile {
    using PanelA = Panel<S, S::M, A>;
    using PanelB = Panel<S, S::N, B>;
    using Sums = std::conditional_t<P == Precision::fp32, PlainSums<S, A::k_inner, B::k_inner>,
                                    TensorSums<S, P, A::k_inner, B::k_inner>>;
    static constexpr int THREADS = S::THREADS, SLOT = PanelA::FLOATS + PanelB::FLOATS;
    // stride of the finished tile: padded to reduce bank conflicts between lanes that store sums of several rows
    static constexpr int STRIDE = S::N + (!B::k_inner ? 1 : A::k_inner ? 8 : 2);
    static constexpr int FLOATS = S::STAGES * SLOT > S::M *STRIDE ? S::STAGES * SLOT : S::M * STRIDE;
    static constexpr size_t BYTES = sizeof(float) * FLOATS;

    using RowSums = RowSumsOf<S, PanelA::STRIDE, A::k_inner>;

    template <class Watch = Unwatched>
    static __device__ __forceinline__ void product(float *shared, const A &a, const B &b, int64_t m0, int64_t n0, int64_t k0,
                                                   int64_t k1, Watch &&watch = Watch()) {
        const int warp = threadIdx.x / 32, m = warp / S::WARPS_N * S::WARP_M, n = warp % S::WARPS_N * S::WARP_N;
        const int64_t steps = blocks_for<int64_t>(k1 - k0, S::K);
        Sums sums;
        PanelA panel_a(a, m0, k0, k1);
        PanelB panel_b(b, n0, k0, k1);
        const auto begin = [&](int slot) {
            panel_a.begin(shared + slot * SLOT);
            panel_b.begin(shared + slot * SLOT + PanelA::FLOATS);
        };
        const auto finish = [&](int slot) {
            panel_a.finish(shared + slot * SLOT);
            panel_b.finish(shared + slot * SLOT + PanelA::FLOATS);
        };
        for (int slot = 0; slot < S::STAGES - 1; slot++) {
            if (slot < steps) begin(slot), finish(slot);
            cp_async_commit();
        }
        int here = 0, ahead = S::STAGES - 1;                    // the slot to compute from, the slot to fill
        for (int64_t step = 0; step < steps; step++) {
            cp_async_wait<S::STAGES - 2>();                     // this thread's copies for this step have arrived
            panel_a.form(shared + here * SLOT);
            panel_b.form(shared + here * SLOT + PanelA::FLOATS);
            __syncthreads();                                  // all copies have arrived, and no thread reads `ahead` any more
            const bool more = step + S::STAGES - 1 < steps;
            if (more) begin(ahead);
            cp_async_commit();
            panel_a.read_lines();
            panel_b.read_lines();
            const float *from = shared + here * SLOT;
            watch(from);
            sums.template add<PanelA::STRIDE, PanelB::STRIDE>(from + (A::k_inner ? m * PanelA::STRIDE : m),
                                                              from + PanelA::FLOATS + (B::k_inner ? n * PanelB::STRIDE : n));
            if (more) finish(ahead);
            here = here + 1 == S::STAGES ? 0 : here + 1;
            ahead = ahead + 1 == S::STAGES ? 0 : ahead + 1;
        }
        cp_async_wait<0>();
        __syncthreads();
        sums.store(shared + m * STRIDE + n, STRIDE);
        __syncthreads();
    }

    template <class F> static __device__ __forceinline__ void each(const float *shared, const F &f) {
        for (int m = threadIdx.x / 32; m < S::M; m += S::WARPS)
#pragma unroll
            for (int n = threadIdx.x & 31; n < S::N; n += 32) f(m, n, shared[m * STRIDE + n]);
    }
};
