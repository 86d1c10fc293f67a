// strided.cu - element-wise operations, copies and reductions on arrays with any strides.
//
// The host first simplifies the axes of a call: it drops axes of size 1, orders the others by stride, and merges adjacent axes
// that are contiguous in all operands.  A contiguous array of any shape becomes a single axis.  Then one of three kernels
// runs, each over all elements of y in memory order:
//
//     packs      every operand is contiguous or constant along the last axis: a thread takes four adjacent elements at once
//     elements   any strides: a thread takes one element, the next thread the next element of y
//     tiles      an input is transposed relative to y.  A block reads a tile in the order of the input and transposes it in
//                shared memory, so that both reads and writes are coalesced:
//
//                     x: lanes go down            tile               y: lanes go along
//                     [0 . . .]                                      [0 1 2 3 ..]
//                     [1 . . .]      ->       32 x (32 + 1)    ->    [. . . .   ]
//                     [2 . . .]                                      [. . . .   ]
//
// Reductions are in reduce.cuh, loops and offsets in index.cuh.
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include "index.cuh"
#include "reduce.cuh"

namespace {
static constexpr int THREADS = 256;

// ---- operations --------------------------------------------------------------------------------------
// nvcc's expf, logf and tanhf have an error of at most 2 ulp over all of float32, including denormals.
#define UNARY(NAME, TO, FROM, ...) \
    struct NAME { \
        static constexpr int INPUTS = 1; \
        using In = FROM; \
        using Out = TO; \
        __device__ TO operator()(FROM x) const { return __VA_ARGS__; } \
    };
DEVICE float sigmoid(float x) {
    const float e = expf(-fabsf(x));                      // at most 1: no overflow
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
// Division that rounds towards minus infinity, and its remainder, which has the sign of b.
DEVICE float remainder_of(float a, float b) {
    const float rest = fmodf(a, b);
    if (b == 0.0f || rest != rest) return rest;
    if (rest == 0.0f) return copysignf(0.0f, b);
    return (b < 0.0f) != (rest < 0.0f) ? rest + b : rest;
}
DEVICE float floor_divided(float a, float b) {
    if (b == 0.0f) return a / b;
    const float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0.0f && (b < 0.0f) != (rest < 0.0f)) quotient -= 1.0f;
    if (quotient == 0.0f) return copysignf(0.0f, a / b);
    const float whole = floorf(quotient);
    return quotient - whole > 0.5f ? whole + 1.0f : whole;
}
DEVICE int32_t negated(int32_t x) { return static_cast<int32_t>(0u - static_cast<uint32_t>(x)); }

DEVICE int32_t remainder_of(int32_t a, int32_t b) {
    if (b == 0 || b == -1) return 0;
    const int32_t rest = a % b;
    return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}
DEVICE int32_t floor_divided(int32_t a, int32_t b) {
    if (b == 0) return 0;
    if (b == -1) return negated(a);
    return a / b - (a % b && (a < 0) != (b < 0));
}

DEVICE float relu6_of(float x) {
    const float y = x < 0.0f ? 0.0f : x;                  // NaN stays
    return y > 6.0f ? 6.0f : y;
}

UNARY(Copy, int32_t, int32_t, x)                          // any 4-byte type
UNARY(Negate, float, float, -x)
UNARY(Abs, float, float, fabsf(x))
UNARY(Sqrt, float, float, sqrtf(x))
UNARY(Exp, float, float, expf(x))
UNARY(Log, float, float, logf(x))
UNARY(Tanh, float, float, tanhf(x))
UNARY(Sigmoid, float, float, sigmoid(x))
UNARY(Floor, float, float, floorf(x))
UNARY(Sin, float, float, sinf(x))
UNARY(Cos, float, float, cosf(x))
UNARY(Expm1, float, float, expm1f(x))
UNARY(Log1p, float, float, log1pf(x))
UNARY(Arctan, float, float, atanf(x))
UNARY(Arcsin, float, float, asinf(x))
UNARY(Arccos, float, float, acosf(x))
UNARY(Erf, float, float, erff(x))
UNARY(Round, float, float, rintf(x))
UNARY(Ceil, float, float, ceilf(x))
UNARY(Trunc, float, float, truncf(x))
UNARY(Sign, float, float, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? 0.0f : x)
UNARY(Tan, float, float, tanf(x))
UNARY(Elu, float, float, x > 0.0f ? x : expm1f(x))
UNARY(Softplus, float, float, (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))))
UNARY(Hardsigmoid, float, float, relu6_of(x + 3.0f) / 6.0f)
UNARY(Hardswish, float, float, x *(relu6_of(x + 3.0f) / 6.0f))
UNARY(NegateInt, int32_t, int32_t, negated(x))
UNARY(AbsInt, int32_t, int32_t, x < 0 ? negated(x) : x)
UNARY(FromInt, float, int32_t, static_cast<float>(x))
UNARY(ToInt, int32_t, float, x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN)
#undef UNARY

#define BINARY(NAME, T, ...) \
    struct NAME { \
        static constexpr int INPUTS = 2; \
        using In = T; \
        using Out = T; \
        __device__ T operator()(T a, T b) const { return __VA_ARGS__; } \
    };
BINARY(Add, float, a + b)
BINARY(Subtract, float, a - b)
BINARY(Multiply, float, a *b)
BINARY(Divide, float, a / b)
BINARY(Maximum, float, a >= b || a != a ? a : b)          // NaN if either is NaN
BINARY(Minimum, float, a <= b || a != a ? a : b)
BINARY(Power, float, static_cast<float>(pow(static_cast<double>(a), static_cast<double>(b))))  // powf: only 4 ulp
BINARY(FloorDivide, float, floor_divided(a, b))
BINARY(Remainder, float, remainder_of(a, b))
BINARY(And, float, a != 0.0f && b != 0.0f ? 1.0f : 0.0f)
BINARY(Or, float, a != 0.0f || b != 0.0f ? 1.0f : 0.0f)
BINARY(Xor, float, (a != 0.0f) != (b != 0.0f) ? 1.0f : 0.0f)
BINARY(FloorDivideInt, int32_t, floor_divided(a, b))
BINARY(RemainderInt, int32_t, remainder_of(a, b))
BINARY(AndInt, int32_t, a &b)
BINARY(OrInt, int32_t, a | b)
BINARY(XorInt, int32_t, a ^ b)
BINARY(AddInt, int32_t, static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)))
BINARY(SubtractInt, int32_t, static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)))
BINARY(MultiplyInt, int32_t, static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)))
BINARY(MaximumInt, int32_t, a >= b ? a : b)
BINARY(MinimumInt, int32_t, a <= b ? a : b)
#undef BINARY

// a^b by squaring, modulo 2^32.  A negative b is a fault: the result is not an integer.
struct PowerInt {
    static constexpr int INPUTS = 2;
    using In = int32_t;
    using Out = int32_t;
    FaultRecord *faults;
    __device__ int32_t operator()(int32_t a, int32_t b) const {
        if (b < 0) report(faults, Fault::exponent, Who::strided_binary_int32, 0, b, 0);
        uint32_t y = 1, square = static_cast<uint32_t>(a);
        for (; b > 0; b >>= 1, square *= square)
            if (b & 1) y *= square;
        return static_cast<int32_t>(y);
    }
};

// The six comparisons: 1 if the relation of a and b is in the bit set `accepted`, else 0.
enum Relation { LESS = 1, EQUAL = 2, GREATER = 4, UNORDERED = 8 };
template <class T> struct Compare {
    static constexpr int INPUTS = 2;
    using In = T;
    using Out = T;
    int accepted;
    __device__ T operator()(T a, T b) const {
        const int relation = a < b ? LESS : a == b ? EQUAL : a > b ? GREATER : UNORDERED;
        return accepted & relation ? T(1) : T(0);
    }
};
static int accepted_relations(int op) {
    switch (op) {
    case PYOPS_OP_EQUAL:      return EQUAL;
    case PYOPS_OP_NOT_EQUAL:  return LESS | GREATER | UNORDERED;
    case PYOPS_OP_LESS:       return LESS;
    case PYOPS_OP_LESS_EQUAL: return LESS | EQUAL;
    case PYOPS_OP_GREATER:    return GREATER;
    default:                  return GREATER | EQUAL;
    }
}

template <class F> DEVICE typename F::Out apply(const F &f, const typename F::In (&in)[F::INPUTS]) {
    if constexpr (F::INPUTS == 1) return f(in[0]);
    else return f(in[0], in[1]);
}

// ---- operands ----------------------------------------------------------------------------------------
// On the host: an array and its strides, or a scalar if both are NULL.
template <class T> struct Operand {
    const T *p;
    const int64_t *strides;
    T number;
};

// The operands as a kernel parameter.
template <class F> struct Arrays {
    using In = typename F::In;
    typename F::Out *y;
    const In *x[F::INPUTS];                               // NULL: the scalar
    In number[F::INPUTS];
    bool same[F::INPUTS];                                 // constant along the last axis, or a scalar
};

// ---- the kernels: packs and elements -----------------------------------------------------------------
// Loads of WIDTH elements in flight per operand.  Operations with long code for rare arguments spill registers with more.
template <class F>
constexpr bool IS_LONG = std::is_same_v<F, Sin> || std::is_same_v<F, Cos> || std::is_same_v<F, Tan> ||
    std::is_same_v<F, Remainder>;
template <class F, int WIDTH> constexpr int IN_FLIGHT = (WIDTH == 4 ? 4 : 8) / F::INPUTS / (IS_LONG<F> ? 2 : 1);

// y = f(x) for `count` packs of WIDTH adjacent elements; axes: of the packs, strides in elements.
template <int WIDTH, class F, class Index>
DEVICE void transform(const F &f, const Arrays<F> &arrays, const Axes<Index> &axes, Index count) {
    using In = typename F::In;
    struct Read {
        int64_t to;
        Pack<In, WIDTH> x[F::INPUTS];
    };
    const auto load = [&](Index i) {
        Read read;
        int64_t at[1 + F::INPUTS] = {};
        axes.walk(i, at);
        read.to = at[0];
#pragma unroll
        for (int o = 0; o < F::INPUTS; o++) {
            if (WIDTH > 1 && !arrays.same[o]) read.x[o] = load_pack<WIDTH>(arrays.x[o] + at[1 + o]);
            else read.x[o].at[0] = arrays.x[o] ? arrays.x[o][at[1 + o]] : arrays.number[o];
        }
        return read;
    };
    const auto store = [&](Index, const Read &read) {
        Pack<typename F::Out, WIDTH> y;
#pragma unroll
        for (int w = 0; w < WIDTH; w++) {
            In in[F::INPUTS];
#pragma unroll
            for (int o = 0; o < F::INPUTS; o++) {
                const In own = read.x[o].at[w], first = read.x[o].at[0];       // broadcast here, after all loads are issued
                in[o] = arrays.same[o] ? first : own;
            }
            y.at[w] = apply(f, in);
        }
        store_pack(arrays.y + read.to, y);
    };
    in_rounds<IN_FLIGHT<F, WIDTH>>(Index(0), count, load, store);
}

template <class F, class Index>
static __global__ void __launch_bounds__(THREADS) elements(F f, Arrays<F> arrays, Axes<Index> axes, Index n) {
    transform<1>(f, arrays, axes, n);
}

// n: elements.  A single axis may have up to three elements after its last pack.
template <class F>
static __global__ void __launch_bounds__(THREADS) packs(F f, Arrays<F> arrays, Axes<uint32_t> axes, uint32_t count, int64_t n) {
    transform<4>(f, arrays, axes, count);
    const int64_t i = 4 * int64_t(count) + blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i < n) {
        typename F::In in[F::INPUTS];
#pragma unroll
        for (int o = 0; o < F::INPUTS; o++) in[o] = arrays.x[o] ? arrays.x[o][arrays.same[o] ? 0 : i] : arrays.number[o];
        arrays.y[i] = apply(f, in);
    }
}

// ---- the kernel: tiles -------------------------------------------------------------------------------
// A tile has 1024 elements of the plane of two axes, the last one and the transposed one: 32 x 32, or longer in one axis if
// the other is short.  In shared memory it has the order of the input, with columns padded by one element to reduce bank
// conflicts in both orders.
static constexpr int TILE = 1024, SHORTEST = 4, PER_THREAD = TILE / THREADS, TILE_ROOM = TILE + TILE / SHORTEST;

struct Plane {
    int64_t rows, columns;                                // of the plane
    int row_bits, column_bits;                            // log2 of the size of a tile
    int64_t down[OPERANDS], along[OPERANDS];              // strides
    bool across[OPERANDS];                                // transposed operands
};

// The elements of a thread in a tile: element j is at row r + j * down, column c + j * right.
struct Traversal { int r, c, down, right; };
DEVICE Traversal traversal_of(int thread, const Plane &plane, bool across) {   // across: lanes go down
    if (across) return {thread & ((1 << plane.row_bits) - 1), thread >> plane.row_bits, 0, THREADS >> plane.row_bits};
    return {thread >> plane.column_bits, thread & ((1 << plane.column_bits) - 1), THREADS >> plane.column_bits, 0};
}

// A block per tile.  axes: of the tiles, strides in elements; the last two are the axes of the plane.
template <class F>
static __global__ void __launch_bounds__(THREADS) tiles(F f, Arrays<F> arrays, Axes<uint32_t> axes, Plane plane) {
    using In = typename F::In;
    SHARED(In, tile, [F::INPUTS][TILE_ROOM]);
    int64_t at[1 + F::INPUTS] = {};
    axes.walk(blockIdx.x, at);
    const Divider<uint32_t> &last = axes.size[axes.n - 1], &before = axes.size[axes.n - 2];
    const uint32_t above = last.divide(blockIdx.x), tile_right = blockIdx.x - above * last.divisor;
    const uint32_t tile_down = above - before.divide(above) * before.divisor;
    const int64_t rows = plane.rows - (int64_t(tile_down) << plane.row_bits);
    const int64_t columns = plane.columns - (int64_t(tile_right) << plane.column_bits);
    const int pitch = (1 << plane.row_bits) + 1;                               // of the columns in shared memory

    In x[F::INPUTS][PER_THREAD];                          // issue all loads before the first use
#pragma unroll
    for (int o = 0; o < F::INPUTS; o++) {
        const Traversal p = traversal_of(threadIdx.x, plane, plane.across[1 + o]);
        const int64_t first = at[1 + o] + p.r * plane.down[1 + o] + p.c * plane.along[1 + o];
        const int64_t step = p.down * plane.down[1 + o] + p.right * plane.along[1 + o];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const bool inside = p.r + j * p.down < rows && p.c + j * p.right < columns;
            x[o][j] = arrays.x[o] && inside ? arrays.x[o][first + j * step] : arrays.number[o];
        }
    }
#pragma unroll
    for (int o = 0; o < F::INPUTS; o++) {
        if (!plane.across[1 + o]) continue;
        const Traversal p = traversal_of(threadIdx.x, plane, true);
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) tile[o][(p.c + j * p.right) * pitch + p.r] = x[o][j];
    }
    __syncthreads();
    const Traversal p = traversal_of(threadIdx.x, plane, false);
    const int64_t first = at[0] + p.r * plane.down[0] + p.c * plane.along[0], step = p.down * plane.down[0];
#pragma unroll
    for (int j = 0; j < PER_THREAD; j++) {
        if (p.r + j * p.down >= rows || p.c >= columns) break;
        In in[F::INPUTS];
#pragma unroll
        for (int o = 0; o < F::INPUTS; o++) in[o] = plane.across[1 + o] ? tile[o][p.c * pitch + p.r + j * p.down] : x[o][j];
        arrays.y[first + j * step] = apply(f, in);
    }
}

// ---- simplification of the axes ----------------------------------------------------------------------
// Whether axis a belongs outside axis b, by the strides of operand `by`; broadcast axes go outermost.
static bool is_outer(const Axis &a, const Axis &b, int by) {
    const int64_t at_a = std::abs(a.stride[by]), at_b = std::abs(b.stride[by]);
    return !at_a ? at_b != 0 : at_b && at_a > at_b;
}

// strides: of each operand, NULL for a scalar.
static Space simplify(const int64_t *shape, const int64_t *const (&strides)[OPERANDS], int64_t ndim, int by) {
    Space s;
    for (int64_t d = 0; d < ndim; d++) {
        if (shape[d] == 1) continue;
        Axis axis = {shape[d], {}};
        for (int o = 0; o < OPERANDS; o++) axis.stride[o] = strides[o] ? strides[o][d] : 0;
        s.add(axis);
        for (int a = s.n - 1; a > 0 && is_outer(s.axis[a], s.axis[a - 1], by); a--) std::swap(s.axis[a], s.axis[a - 1]);
    }
    Space joined;                                         // merge an axis into the previous one if both are contiguous
    for (int d = 0; d < s.n; d++) {
        Axis axis = s.axis[d];
        bool joins = joined.n > 0;
        for (int o = 0; joins && o < OPERANDS; o++) joins = joined.axis[joined.n - 1].stride[o] == axis.stride[o] * axis.size;
        if (joins) axis.size *= joined.axis[--joined.n].size;
        joined.add(axis);
    }
    return joined;
}

// ---- the choice of a kernel --------------------------------------------------------------------------
// The axis along which a transposed input is closest to contiguous.  -1 if no input is transposed, or the plane of that axis
// and the last one is small enough for L1.
static int transposed_axis(const Space &s) {
    int best = -1;
    int64_t nearest = INT64_MAX;
    for (int o = 1; o < OPERANDS; o++)
        for (int d = 0; d < s.n - 1; d++) {
            const int64_t along = std::abs(s.axis[d].stride[o]);
            if (along && along < std::abs(s.axis[s.n - 1].stride[o]) && along < nearest) best = d, nearest = along;
        }
    return best >= 0 && s.axis[best].size * s.axis[s.n - 1].size >= TILE ? best : -1;
}

template <class F> static cudaError_t launch_tiles(const F &f, const Arrays<F> &arrays, Space s, int across, void *stream) {
    for (int d = across; d < s.n - 2; d++) std::swap(s.axis[d], s.axis[d + 1]);
    Axis &row = s.axis[s.n - 2], &column = s.axis[s.n - 1];
    Plane plane = {row.size, column.size, 5, 5, {}, {}, {}};
    while (plane.row_bits > 2 && int64_t(1) << (plane.row_bits - 1) >= row.size) plane.row_bits--, plane.column_bits++;
    while (plane.column_bits > 2 && int64_t(1) << (plane.column_bits - 1) >= column.size) plane.column_bits--, plane.row_bits++;
    const int64_t rows = int64_t(1) << plane.row_bits, columns = int64_t(1) << plane.column_bits;
    row.size = blocks_for(row.size, rows);
    column.size = blocks_for(column.size, columns);
    for (int o = 0; o < OPERANDS; o++) {
        plane.down[o] = row.stride[o], plane.along[o] = column.stride[o];
        plane.across[o] = o && plane.down[o] && std::abs(plane.down[o]) < std::abs(plane.along[o]);
        row.stride[o] *= rows, column.stride[o] *= columns;
    }
    return LAUNCH(tiles<F>, static_cast<unsigned>(s.elements()), THREADS, 0, stream_of(stream), f, arrays, Axes<uint32_t>(s),
                  plane);
}

// Whether every operand is contiguous or constant along the last axis, in packs of four aligned to 16 bytes.
template <class F> static bool comes_in_packs(const Arrays<F> &arrays, const Space &s) {
    const Axis &last = s.axis[s.n - 1];
    if (s.n > 1 && last.size % 4) return false;
    for (int o = 0; o <= F::INPUTS; o++) {
        if (o && (!arrays.x[o - 1] || last.stride[o] == 0)) continue;
        if (last.stride[o] != 1 || !aligned(o ? static_cast<const void *>(arrays.x[o - 1]) : arrays.y)) return false;
        for (int d = 0; d < s.n - 1; d++)
            if (s.axis[d].stride[o] % 4) return false;
    }
    return true;
}

template <class F> static cudaError_t launch_elementwise(const F &f, Arrays<F> arrays, const Space &s, void *stream) {
    const int64_t n = s.elements();
    const int across = transposed_axis(s);
    if (across >= 0) return launch_tiles(f, arrays, s, across, stream);
    if (s.n && comes_in_packs(arrays, s) && fits_int32(n / 4)) {
        Space in_packs = s;
        Axis &last = in_packs.axis[s.n - 1];
        last.size /= 4;
        for (int o = 0; o < OPERANDS; o++) last.stride[o] *= 4;
        for (int o = 0; o < F::INPUTS; o++) arrays.same[o] |= last.stride[1 + o] == 0;
        return LAUNCH(packs<F>, grid_of_rounds(blocks_for<int64_t>(n, 4), THREADS, IN_FLIGHT<F, 4>), THREADS, 0,
                      stream_of(stream), f, arrays, Axes<uint32_t>(in_packs), static_cast<uint32_t>(n / 4), n);
    }
    const unsigned blocks = grid_of_rounds(n, THREADS, IN_FLIGHT<F, 1>);
    return fits_int32(n)
        ? LAUNCH((elements<F, uint32_t>), blocks, THREADS, 0, stream_of(stream), f, arrays, Axes<uint32_t>(s), uint32_t(n))
        : LAUNCH((elements<F, uint64_t>), blocks, THREADS, 0, stream_of(stream), f, arrays, Axes<uint64_t>(s), uint64_t(n));
}

// ---- element by element ------------------------------------------------------------------------------
struct Geometry {                       // shape and strides of a call, in host memory
    const char *who;
    const int64_t *shape, *strides;
    int64_t ndim;
    void *stream;
    const int64_t *of(int operand) const { return strides + operand * ndim; }
};

// y = f(a), or f(a, b)
template <class F, class... More>
static pyops_status elementwise(const Geometry &g, const F &f, typename F::Out *y, const Operand<typename F::In> &a,
                                const More &...b) {
    static_assert(1 + sizeof...(b) == F::INPUTS);
    const int64_t *const strides[OPERANDS] = {g.of(0), a.strides, b.strides...};
    const pyops_status status = check_shape(g.who, g.shape, g.ndim);
    if (status) return status;
    const Space s = simplify(g.shape, strides, g.ndim, 0);
    if (!s.elements()) return PYOPS_OK;
    const Arrays<F> arrays{y, {a.p, b.p...}, {a.number, b.number...}, {!a.p, !b.p...}};
    return pyops_launched(g.who, launch_elementwise(f, arrays, s, g.stream), g.stream);
}

// A copy moves the bits, whatever the type.
template <class T> static pyops_status copy(const Geometry &g, T *y, const Operand<T> &x) {
    int32_t number;
    memcpy(&number, &x.number, sizeof number);
    const Operand<int32_t> bits{reinterpret_cast<const int32_t *>(x.p), x.strides, number};
    return elementwise(g, Copy(), reinterpret_cast<int32_t *>(y), bits);
}

static pyops_status unary(const Geometry &g, int op, float *y, const Operand<float> &x) {
    switch (op) {
    case PYOPS_OP_COPY:        return copy(g, y, x);
    case PYOPS_OP_NEGATE:      return elementwise(g, Negate(), y, x);
    case PYOPS_OP_ABS:         return elementwise(g, Abs(), y, x);
    case PYOPS_OP_SQRT:        return elementwise(g, Sqrt(), y, x);
    case PYOPS_OP_EXP:         return elementwise(g, Exp(), y, x);
    case PYOPS_OP_LOG:         return elementwise(g, Log(), y, x);
    case PYOPS_OP_TANH:        return elementwise(g, Tanh(), y, x);
    case PYOPS_OP_SIGMOID:     return elementwise(g, Sigmoid(), y, x);
    case PYOPS_OP_FLOOR:       return elementwise(g, Floor(), y, x);
    case PYOPS_OP_SIN:         return elementwise(g, Sin(), y, x);
    case PYOPS_OP_COS:         return elementwise(g, Cos(), y, x);
    case PYOPS_OP_EXPM1:       return elementwise(g, Expm1(), y, x);
    case PYOPS_OP_LOG1P:       return elementwise(g, Log1p(), y, x);
    case PYOPS_OP_ARCTAN:      return elementwise(g, Arctan(), y, x);
    case PYOPS_OP_ARCSIN:      return elementwise(g, Arcsin(), y, x);
    case PYOPS_OP_ARCCOS:      return elementwise(g, Arccos(), y, x);
    case PYOPS_OP_ERF:         return elementwise(g, Erf(), y, x);
    case PYOPS_OP_ROUND:       return elementwise(g, Round(), y, x);
    case PYOPS_OP_CEIL:        return elementwise(g, Ceil(), y, x);
    case PYOPS_OP_TRUNC:       return elementwise(g, Trunc(), y, x);
    case PYOPS_OP_SIGN:        return elementwise(g, Sign(), y, x);
    case PYOPS_OP_TAN:         return elementwise(g, Tan(), y, x);
    case PYOPS_OP_ELU:         return elementwise(g, Elu(), y, x);
    case PYOPS_OP_SOFTPLUS:    return elementwise(g, Softplus(), y, x);
    case PYOPS_OP_HARDSIGMOID: return elementwise(g, Hardsigmoid(), y, x);
    case PYOPS_OP_HARDSWISH:   return elementwise(g, Hardswish(), y, x);
    default:                   return check_op(g.who, op, PYOPS_OP_HARDSWISH);
    }
}

static pyops_status binary(const Geometry &g, int op, float *y, const Operand<float> &a, const Operand<float> &b) {
    switch (op) {
    case PYOPS_OP_ADD:           return elementwise(g, Add(), y, a, b);
    case PYOPS_OP_SUBTRACT:      return elementwise(g, Subtract(), y, a, b);
    case PYOPS_OP_MULTIPLY:      return elementwise(g, Multiply(), y, a, b);
    case PYOPS_OP_DIVIDE:        return elementwise(g, Divide(), y, a, b);
    case PYOPS_OP_POWER:         return elementwise(g, Power(), y, a, b);
    case PYOPS_OP_MAXIMUM:       return elementwise(g, Maximum(), y, a, b);
    case PYOPS_OP_MINIMUM:       return elementwise(g, Minimum(), y, a, b);
    case PYOPS_OP_EQUAL:
    case PYOPS_OP_NOT_EQUAL:
    case PYOPS_OP_LESS:
    case PYOPS_OP_LESS_EQUAL:
    case PYOPS_OP_GREATER:
    case PYOPS_OP_GREATER_EQUAL: return elementwise(g, Compare<float>{accepted_relations(op)}, y, a, b);
    case PYOPS_OP_FLOOR_DIVIDE:  return elementwise(g, FloorDivide(), y, a, b);
    case PYOPS_OP_REMAINDER:     return elementwise(g, Remainder(), y, a, b);
    case PYOPS_OP_AND:           return elementwise(g, And(), y, a, b);
    case PYOPS_OP_OR:            return elementwise(g, Or(), y, a, b);
    case PYOPS_OP_XOR:           return elementwise(g, Xor(), y, a, b);
    default:                     return check_op(g.who, op, PYOPS_OP_XOR);
    }
}

static pyops_status binary(const Geometry &g, int op, int32_t *y, const Operand<int32_t> &a, const Operand<int32_t> &b) {
    switch (op) {
    case PYOPS_OP_ADD:           return elementwise(g, AddInt(), y, a, b);
    case PYOPS_OP_SUBTRACT:      return elementwise(g, SubtractInt(), y, a, b);
    case PYOPS_OP_MULTIPLY:      return elementwise(g, MultiplyInt(), y, a, b);
    case PYOPS_OP_DIVIDE:        return check_no_division(g.who, op);
    case PYOPS_OP_POWER:         return elementwise(g, PowerInt{pyops_faults()}, y, a, b);
    case PYOPS_OP_MAXIMUM:       return elementwise(g, MaximumInt(), y, a, b);
    case PYOPS_OP_MINIMUM:       return elementwise(g, MinimumInt(), y, a, b);
    case PYOPS_OP_EQUAL:
    case PYOPS_OP_NOT_EQUAL:
    case PYOPS_OP_LESS:
    case PYOPS_OP_LESS_EQUAL:
    case PYOPS_OP_GREATER:
    case PYOPS_OP_GREATER_EQUAL: return elementwise(g, Compare<int32_t>{accepted_relations(op)}, y, a, b);
    case PYOPS_OP_FLOOR_DIVIDE:  return elementwise(g, FloorDivideInt(), y, a, b);
    case PYOPS_OP_REMAINDER:     return elementwise(g, RemainderInt(), y, a, b);
    case PYOPS_OP_AND:           return elementwise(g, AndInt(), y, a, b);
    case PYOPS_OP_OR:            return elementwise(g, OrInt(), y, a, b);
    case PYOPS_OP_XOR:           return elementwise(g, XorInt(), y, a, b);
    default:                     return check_op(g.who, op, PYOPS_OP_XOR);
    }
}

template <class T> static Operand<T> array(const T *p, const int64_t *strides) { return {p, strides, T()}; }
template <class T> static Operand<T> number(T value) { return {nullptr, nullptr, value}; }
}

extern "C" pyops_status pyops_strided_unary(float *y, const float *x, const int64_t *shape, const int64_t *strides,
                                            int64_t ndim, int32_t op, void *stream) {
    const Geometry g{"strided_unary", shape, strides, ndim, stream};
    return unary(g, op, y, array(x, g.of(1)));
}

extern "C" pyops_status pyops_strided_unary_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                                  int64_t ndim, int32_t op, void *stream) {
    const Geometry g{"strided_unary_int32", shape, strides, ndim, stream};
    switch (op) {
    case PYOPS_OP_COPY:   return copy(g, y, array(x, g.of(1)));
    case PYOPS_OP_NEGATE: return elementwise(g, NegateInt(), y, array(x, g.of(1)));
    case PYOPS_OP_ABS:    return elementwise(g, AbsInt(), y, array(x, g.of(1)));
    default:              return pyops_fail(PYOPS_BAD_ARGUMENT, "%s: op=%d, expected copy, negate or abs for int32", g.who, op);
    }
}

extern "C" pyops_status pyops_strided_binary(float *y, const float *a, const float *b, const int64_t *shape,
                                             const int64_t *strides, int64_t ndim, int32_t op, void *stream) {
    const Geometry g{"strided_binary", shape, strides, ndim, stream};
    return binary(g, op, y, array(a, g.of(1)), array(b, g.of(2)));
}

extern "C" pyops_status pyops_strided_binary_int32(int32_t *y, const int32_t *a, const int32_t *b, const int64_t *shape,
                                                   const int64_t *strides, int64_t ndim, int32_t op, void *stream) {
    const Geometry g{"strided_binary_int32", shape, strides, ndim, stream};
    return binary(g, op, y, array(a, g.of(1)), array(b, g.of(2)));
}

extern "C" pyops_status pyops_strided_scalar(float *y, const float *x, const int64_t *shape, const int64_t *strides,
                                             int64_t ndim, int32_t op, int32_t reflected, float value, void *stream) {
    const Geometry g{"strided_scalar", shape, strides, ndim, stream};
    const Operand<float> operand = array(x, g.of(1));
    if (reflected) return binary(g, op, y, number(value), operand);
    if (op == PYOPS_OP_POWER) {                           // powers with a faster exact form
        if (value == 1.0f) return unary(g, PYOPS_OP_COPY, y, operand);
        if (value == 0.5f) return unary(g, PYOPS_OP_SQRT, y, operand);
        if (value == -1.0f) return binary(g, PYOPS_OP_DIVIDE, y, number(1.0f), operand);
        if (value == 2.0f) return binary(g, PYOPS_OP_MULTIPLY, y, operand, operand);
    }
    return binary(g, op, y, operand, number(value));
}

extern "C" pyops_status pyops_strided_scalar_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                                   int64_t ndim, int32_t op, int32_t reflected, int32_t value, void *stream) {
    const Geometry g{"strided_scalar_int32", shape, strides, ndim, stream};
    const Operand<int32_t> operand = array(x, g.of(1));
    return reflected ? binary(g, op, y, number(value), operand) : binary(g, op, y, operand, number(value));
}

extern "C" pyops_status pyops_strided_fill(float *y, const int64_t *shape, const int64_t *strides, int64_t ndim, float value,
                                           void *stream) {
    return copy({"strided_fill", shape, strides, ndim, stream}, y, number(value));
}

extern "C" pyops_status pyops_strided_fill_int32(int32_t *y, const int64_t *shape, const int64_t *strides, int64_t ndim,
                                                 int32_t value, void *stream) {
    return copy({"strided_fill_int32", shape, strides, ndim, stream}, y, number(value));
}

extern "C" pyops_status pyops_strided_from_int32(float *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                                 int64_t ndim, void *stream) {
    const Geometry g{"strided_from_int32", shape, strides, ndim, stream};
    return elementwise(g, FromInt(), y, array(x, g.of(1)));
}

extern "C" pyops_status pyops_strided_to_int32(int32_t *y, const float *x, const int64_t *shape, const int64_t *strides,
                                               int64_t ndim, void *stream) {
    const Geometry g{"strided_to_int32", shape, strides, ndim, stream};
    return elementwise(g, ToInt(), y, array(x, g.of(1)));
}

// ---- reductions --------------------------------------------------------------------------------------
namespace {
// The reduced axes are those with stride 0 in y.  Axes are ordered by the strides of x.
template <class T> static pyops_status reduction(const Geometry &g, int op, T *y, const T *x) {
    const pyops_status status = check_strided(g.who, op, PYOPS_OP_MIN, g.shape, g.ndim);
    if (status) return status;
    const int64_t *const strides[OPERANDS] = {g.of(0), g.of(1), nullptr};
    const Space s = simplify(g.shape, strides, g.ndim, 1);
    Space kept, reduced;
    for (int d = 0; d < s.n; d++) {
        if (s.axis[d].stride[0]) kept.add(s.axis[d]);
        else reduced.add({s.axis[d].size, {s.axis[d].stride[1]}});
    }
    if (!kept.elements()) return PYOPS_OK;
    if (!reduced.n) return copy(g, y, array(x, g.of(1)));
    PYOPS_REQUIRE(reduced.elements() || op == PYOPS_OP_SUM, "%s: no elements, expected at least one for a maximum or minimum",
                  g.who);
    const bool along = s.axis[s.n - 1].stride[0] == 0;
    if (op == PYOPS_OP_MAX) return reduce_axes<MaxOf<T>, MaxOf<T>>(g.who, y, x, kept, reduced, along, false, g.stream);
    if (op == PYOPS_OP_MIN) return reduce_axes<MinOf<T>, MinOf<T>>(g.who, y, x, kept, reduced, along, false, g.stream);
    if constexpr (std::is_same_v<T, float>)
        return reduce_axes<SumOf<float, double>, SumOf<double>>(g.who, y, x, kept, reduced, along, false, g.stream);
    else
        return reduce_axes<SumOf<uint32_t>, SumOf<uint32_t>>(g.who, reinterpret_cast<uint32_t *>(y),
                                                             reinterpret_cast<const uint32_t *>(x), kept, reduced, along, false,
                                                             g.stream);
}
}

extern "C" pyops_status pyops_strided_reduce(float *y, const float *x, const int64_t *shape, const int64_t *strides,
                                             int64_t ndim, int32_t op, void *stream) {
    return reduction({"strided_reduce", shape, strides, ndim, stream}, op, y, x);
}

extern "C" pyops_status pyops_strided_reduce_int32(int32_t *y, const int32_t *x, const int64_t *shape, const int64_t *strides,
                                                   int64_t ndim, int32_t op, void *stream) {
    return reduction({"strided_reduce_int32", shape, strides, ndim, stream}, op, y, x);
}
