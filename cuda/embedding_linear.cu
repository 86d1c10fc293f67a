// embedding_linear.cu - rows of a table by index, concatenated with a context, and a linear layer over both.
//
// The products cover all positions.  The CPU finds the distinct tokens first; here that would need a synchronisation, since the
// launch of a product depends on their number.
//
// Forward in float32 multiplies each context once, and a kernel adds the product to the rows of the sequence.  In bfloat16 the
// context is concatenated to each row: one launch less, and a result is rounded once.
// Backward has three launches: the rows, the positions of each token, and the sums of the gradients of a sequence's rows; all
// products; the sums of the rows of the table.
#include <algorithm>
#include "embedding.cuh"
#include "index.cuh"
#include "packed.cuh"
#include "product.cuh"
#include "reduce.cuh"

namespace {
static constexpr int THREADS = 256;

static int64_t rows_in(int64_t T, int64_t B, int64_t N) { return N ? N : T * B; } // packed sentences may all be empty
}

// float32: rows (R,E) and with a context its product (B,O).  bfloat16: rows with the context of their sequence (R,E+C)
extern "C" int64_t pyops_embedding_linear_forward_work(int64_t T, int64_t B, int64_t N, int64_t, int64_t E, int64_t C,
                                                       int64_t O) {
    const int64_t R = rows_in(T, B, N);
    return std::max(R * E + (C ? B * O : 0), blocks_for<int64_t>(R * (E + C), 2));
}
// rows (R,E), their gradients (R,E), with a context the sums of the gradients of y (B,O), and the positions of each token
extern "C" int64_t pyops_embedding_linear_backward_work(int64_t T, int64_t B, int64_t N, int64_t, int64_t E, int64_t C,
                                                        int64_t O) {
    return rows_in(T, B, N) * (2 * E + embedding::GROUP_WORDS) + (C ? B * O : 0);
}

namespace {
// The rows of a sequence: `count` of them, `step` apart.
struct Rows { int64_t first, step, count; };
DEVICE Rows rows_of(const Sequences &in, int64_t b) { return {in.row(0, b), in.offsets ? 1 : in.B, in.length(b)}; }

DEVICE void report_offsets(const Sequences &in, FaultRecord *faults) {
    if (in.offsets && blockIdx.x == 0 && blockIdx.y == 0)
        check_offsets(in, threadIdx.x, THREADS, Who::embedding_linear_forward, faults);
}

// A block has a sequence.  y (R,O) += x (B,O) of the row's sequence
static __global__ void __launch_bounds__(THREADS)
    add_to_rows(float *y, const float *x, const Sequences in, int64_t O, FaultRecord *faults) {
    wait_for_last_kernel();
    report_offsets(in, faults);
    const int64_t column = blockIdx.y * int64_t(THREADS) + threadIdx.x;
    if (column >= O) return;
    for (int64_t b = blockIdx.x; b < in.B; b += gridDim.x) {
        const float add = x[b * O + column];
        const Rows rows = rows_of(in, b);
        for (int64_t i = 0; i < rows.count; i++) y[(rows.first + i * rows.step) * O + column] += add;
    }
}

// Copy n elements, by a warp; from NULL: zeros.
DEVICE void copy_row(bf16 *to, const float *from, int64_t n) {
    const int lane = threadIdx.x & 31;
    if (from && n % 4 == 0 && uintptr_t(from) % 16 == 0 && uintptr_t(to) % 8 == 0) {
        for (int64_t e = 4 * lane; e < n; e += 4 * 32) store_reals<4>(to + e, load_reals<4>(from + e));
    } else {
        for (int64_t e = lane; e < n; e += 32) to[e] = as<bf16>(from ? from[e] : 0.0f);
    }
}

// A block has a sequence, a warp some of its rows.  y (R,E+C) = the row of the table and the context of the sequence
static __global__ void __launch_bounds__(THREADS)
    concat_rows(bf16 *y, const float *table, const int32_t *ids, const float *context, const Sequences in, int64_t V, int64_t E,
                int64_t C, FaultRecord *faults) {
    wait_for_last_kernel();
    report_offsets(in, faults);
    const int64_t R = in.offsets ? in.N : in.T * in.B; // a report between the copies would spill registers
    for (int64_t r = blockIdx.x * int64_t(THREADS) + threadIdx.x; r < R; r += int64_t(gridDim.x) * THREADS)
        if (!embedding::in_table(ids[r], V)) report(faults, Fault::embedding_id, Who::embedding_forward, r, ids[r], V - 1);
    for (int64_t b = blockIdx.x; b < in.B; b += gridDim.x) {
        const Rows rows = rows_of(in, b);
        for (int64_t i = threadIdx.x / 32; i < rows.count; i += THREADS / 32) {
            const int64_t r = rows.first + i * rows.step;
            bf16 *const to = y + r * (E + C);
            const int32_t id = ids[r];
            copy_row(to, embedding::in_table(id, V) ? table + id * E : nullptr, E);
            copy_row(to + E, context + b * C, C);
        }
    }
}

// The work of backward that needs no product: the rows of the table for all positions, and with a context the sums of the
// gradients of each sequence's rows, in their order.
template <class T> struct RowsAndSums {
    T *rows, *sums; // (R,E);  (B,O)
    const float *table;
    const T *dy; // rows are ld elements apart
    const int32_t *ids;
    Sequences in;
    int64_t R, V, E, O, ld, row_blocks; // the other blocks have one sequence and as many columns as threads each

    __device__ void operator()(int64_t block) const {
        constexpr int WARPS = embedding::GROUP_THREADS / 32;
        if (block < row_blocks) {
            const int64_t warp = block * WARPS + threadIdx.x / 32;
            embedding::copy_rows(rows, table, ids, R, V, E, warp, row_blocks * WARPS, Who::embedding_backward, nullptr);
            return;
        }
        const int64_t across = blocks_for<int64_t>(O, embedding::GROUP_THREADS), b = (block - row_blocks) / across;
        const int64_t column = (block - row_blocks) % across * embedding::GROUP_THREADS + threadIdx.x;
        if (column >= O) return;
        const Rows of = rows_of(in, b);
        float sum = 0.0f;
        for (int64_t i = 0; i < of.count; i++) sum += as_float(dy[(of.first + i * of.step) * ld + column]);
        sums[b * O + column] = as<T>(sum);
    }
};

static unsigned blocks_of(int64_t B) { return static_cast<unsigned>(std::min<int64_t>(B, 65535)); }

static pyops_status forward_float(float *y, const float *table, const int32_t *ids, const float *context, const Sequences &in,
                                  int64_t R, const float *weight, const float *bias, float *work, int64_t V, int64_t E,
                                  int64_t C, int64_t O, void *stream) {
    const int64_t B = in.B, I = E + C;
    float *const of_contexts = work + R * E;
    const pyops_status status = pyops_embedding_forward(real(work), table, ids, R, V, E, stream);
    if (status) return status;
    const AnyProduct products[2] = {
        {real(y), real(work), real(weight), bias, R, O, E, O, E, 1, 1, I, 0, 0},
        {real(of_contexts), real(context), real(weight + E), nullptr, B, O, C, O, C, 1, 1, I, 0, 0}};
    bool added[2];
    Launches launches;
    launches << any_products(products, C ? 2 : 1, stream_of(stream), added);
    if (C)
        launches << LAUNCH_DEPENDENT(add_to_rows, dim3(blocks_of(B), unsigned(blocks_for<int64_t>(O, THREADS))), THREADS, 0,
                                     stream_of(stream), y, of_contexts, in, O, pyops_faults());
    return pyops_launched("embedding_linear_forward", launches.error, stream);
}

static pyops_status forward_bf16(bf16 *y, const float *table, const int32_t *ids, const float *context, const Sequences &in,
                                 int64_t R, const pyops_real *weight, const float *bias, float *work, int64_t V, int64_t E,
                                 int64_t C, int64_t O, void *stream) {
    bf16 *const x = reinterpret_cast<bf16 *>(work);
    const pyops_status status = C ? pyops_launched("embedding_linear_forward",
                                                   LAUNCH_DEPENDENT(concat_rows, blocks_of(in.B), THREADS, 0, stream_of(stream),
                                                                    x, table, ids, context, in, V, E, C, pyops_faults()),
                                                   stream)
                                  : pyops_embedding_forward(real(x), table, ids, R, V, E, stream);
    const int64_t I = E + C;
    return status ? status : pyops_gemm(real(y), real(x), weight, bias, R, O, I, O, I, 1, 1, I, 0, 0, stream);
}

template <class T>
static pyops_status backward(float *dtable, int32_t *touched, float *dcontext, float *dweight, float *dbias, const T *dy,
                             const float *table, const int32_t *ids, const float *context, const Sequences &in, int64_t R,
                             const pyops_real *weight, float *work, int64_t V, int64_t E, int64_t C, int64_t O, int64_t ld,
                             int32_t add_dcontext, void *stream) {
    using namespace embedding;
    const char *const who = "embedding_linear_backward";
    const int64_t B = in.B, I = E + C;
    T *const rows = reinterpret_cast<T *>(work), *const drows = reinterpret_cast<T *>(work + R * E);
    T *const sums = reinterpret_cast<T *>(work + 2 * R * E);
    int32_t *const words = reinterpret_cast<int32_t *>(work + 2 * R * E + (C ? B * O : 0));
    const auto rows_from = [&](int64_t first) { return std::min<int64_t>(CHUNK, R - first); };
    const RowsAndSums<T> also = {rows, sums, table, dy, ids, in, R, V, E, O, ld, grid_for(R * 32, GROUP_THREADS)};
    int64_t more = also.row_blocks + (C ? B * blocks_for<int64_t>(O, GROUP_THREADS) : 0);
    Launches launches;
    for (int64_t first = 0; first == 0 || first < R; first += CHUNK, more = 0)
        launches << launch_group(groups_in(words, R, first), ids + first, Who::embedding_backward, first, rows_from(first), V,
                                 also, more, stream_of(stream));

    // The gradients of a linear layer, from rows of dy that are `distance` apart.
    AnyProduct products[MOST_GROUPED];
    int count = 0;
    const auto gradients = [&](float *dw, pyops_real *dx, int64_t ldx, const T *dy, const pyops_real *x, const pyops_real *w,
                               int64_t rows, int64_t columns, int64_t distance, int32_t adds) {
        products[count++] = {real(dw), real(dy), x, nullptr, O, columns, rows, I, 1, distance, columns, 1, 1, 0};
        products[count++] = {dx, real(dy), w, nullptr, rows, columns, O, ldx, distance, 1, I, 1, adds, 0};
    };
    gradients(dweight, real(drows), E, dy, real(rows), weight, R, E, ld, 0);
    products[0].row_sums = dbias;
    if (C) gradients(dweight + E, real(dcontext), C, sums, real(context), element(weight, E), B, C, O, add_dcontext);
    bool added[MOST_GROUPED];
    launches << any_products(products, count, stream_of(stream), added);
    for (int64_t first = 0; first < R; first += CHUNK)
        launches << launch_add(dtable, touched, groups_in(words, R, first), Plain<T>{drows + first * E}, ids + first,
                               rows_from(first), E, stream_of(stream));
    const pyops_status status = pyops_launched(who, launches.error, stream);
    if (status || added[0]) return status;
    Space columns, terms;
    columns.add({O, {1, 1}});
    terms.add({R, {ld}});
    return reduce_axes<SumOf<float, double>, SumOf<double>>(who, dbias, dy, columns, terms, false, true, stream);
}
}

extern "C" pyops_status pyops_embedding_linear_forward(pyops_real *y, const float *table, const int32_t *ids,
                                                       const float *context, const int32_t *offsets, const pyops_real *weight,
                                                       const float *bias, float *work, int64_t T, int64_t B, int64_t N,
                                                       int64_t V, int64_t E, int64_t C, int64_t O, void *stream) {
    const pyops_status status = check_embedding_linear("embedding_linear_forward", context, offsets, T, B, N, V, E, C, O);
    if (status || B == 0) return status;
    PYOPS_REQUIRE(is_bf16(y) || !is_bf16(weight),
                  "embedding_linear_forward: weight is bfloat16 and y float32, expected one type");
    const Sequences in = {offsets, T, B, N, false};
    const int64_t R = offsets ? N : T * B;
    if (is_bf16(y)) return forward_bf16(elements<bf16>(y), table, ids, context, in, R, weight, bias, work, V, E, C, O, stream);
    return forward_float(elements<float>(y), table, ids, context, in, R, elements<float>(weight), bias, work, V, E, C, O,
                         stream);
}

extern "C" pyops_status pyops_embedding_linear_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight,
                                                        float *dbias, const pyops_real *dy, const float *table,
                                                        const int32_t *ids, const float *context, const int32_t *offsets,
                                                        const pyops_real *weight, float *work, int64_t T, int64_t B, int64_t N,
                                                        int64_t V, int64_t E, int64_t C, int64_t O, int64_t ld,
                                                        int32_t add_dcontext, void *stream) {
    const char *const who = "embedding_linear_backward";
    const pyops_status status = check_embedding_linear(who, context, offsets, T, B, N, V, E, C, O);
    if (status) return status;
    PYOPS_REQUIRE(ld >= O, "%s: ld=%lld, expected at least O=%lld", who, LL(ld), LL(O));
    PYOPS_REQUIRE(is_bf16(dy) || !is_bf16(weight), "%s: weight is bfloat16 and dy float32, expected one type", who);
    if (B == 0) return PYOPS_OK;
    const Sequences in = {offsets, T, B, N, false};
    return with_type(
        who,
        [&](auto type) {
            return backward(dtable, touched, dcontext, dweight, dbias, elements<decltype(type)>(dy), table, ids, context, in,
                            offsets ? N : T * B, weight, work, V, E, C, O, ld, add_dcontext, stream);
        },
        dy);
}
