// embedding_linear.cu - rows of a table by index, concatenated with a context, and a linear layer over both.
//
// The rows and the context are concatenated in `work`, and the products cover all positions.  The CPU finds the distinct
// tokens first; here that would need a synchronisation, since the launch of a product depends on their number.
//
// With packed rows the product with the contexts has one row per sequence, and a kernel adds it to the rows of the sequence.
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

// rows (T,B,E), followed by the rows concatenated with the context (T,B,E+C) if there is one
// packed: rows (N,E), and with a context its product or the sums of the gradients (B,O).  Backward also has the gradients of the
// rows, and the positions of each token.
static int64_t work_of(int64_t T, int64_t B, int64_t N, int64_t E, int64_t C, int64_t O) {
    const int64_t packed = N * E + (C ? B * O : 0);
    return N ? packed : std::max(packed, T * B * (C ? 2 * E + C : E));      // packed sentences may all be empty
}
}

extern "C" int64_t pyops_embedding_linear_forward_work(int64_t T, int64_t B, int64_t N, int64_t, int64_t E, int64_t C,
                                                       int64_t O) {
    return work_of(T, B, N, E, C, O);
}
extern "C" int64_t pyops_embedding_linear_backward_work(int64_t T, int64_t B, int64_t N, int64_t, int64_t E, int64_t C,
                                                        int64_t O) {
    return work_of(T, B, N, E, C, O) + N * E + N * embedding::GROUP_WORDS;
}

namespace {
// Fill `work`; return the input of the linear layer (T,B,E+C), which is a part of it.
static float *input_of(pyops_status &status, float *work, const float *table, const int32_t *ids, const float *context,
                       int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, void *stream) {
    float *const both = work + T * B * E;
    status = pyops_embedding_forward(real(work), table, ids, T * B, V, E, stream);
    if (!status && C) status = pyops_concat_context_forward(real(both), real(work), real(context), T, B, E, C, stream);
    return C ? both : work;
}

// A block has a sequence.  y (N,O) += x (B,O) of the row's sequence
static __global__ void __launch_bounds__(THREADS)
    add_to_rows(float *y, const float *x, const Sequences in, int64_t O, FaultRecord *faults) {
    wait_for_last_kernel();
    if (blockIdx.x == 0 && blockIdx.y == 0) check_offsets(in, threadIdx.x, THREADS, Who::embedding_linear_forward, faults);
    const int64_t column = blockIdx.y * int64_t(THREADS) + threadIdx.x;
    if (column >= O) return;
    for (int64_t b = blockIdx.x; b < in.B; b += gridDim.x) {
        const float add = x[b * O + column];
        for (int64_t r = in.offsets[b], end = r + in.length(b); r < end; r++) y[r * O + column] += add;
    }
}

// The work of packed_backward that needs no product: the rows of the table for all positions, and with a context the sums of the
// gradients of each sequence's rows, in their order.
struct RowsAndSums {
    float *rows, *sums;                     // (N,E);  (B,O)
    const float *table, *dy;                // rows of dy are ld floats apart
    const int32_t *ids;
    Sequences in;
    int64_t V, E, O, ld, row_blocks;        // the other blocks have one sequence and as many columns as threads each

    __device__ void operator()(int64_t block) const {
        constexpr int WARPS = embedding::GROUP_THREADS / 32;
        if (block < row_blocks) {
            const int64_t warp = block * WARPS + threadIdx.x / 32;
            embedding::copy_rows(rows, table, ids, in.N, V, E, warp, row_blocks * WARPS, Who::embedding_backward, nullptr);
            return;
        }
        const int64_t across = blocks_for<int64_t>(O, embedding::GROUP_THREADS), b = (block - row_blocks) / across;
        const int64_t column = (block - row_blocks) % across * embedding::GROUP_THREADS + threadIdx.x;
        if (column >= O) return;
        float sum = 0.0f;
        for (int64_t r = in.offsets[b], end = r + in.length(b); r < end; r++) sum += dy[r * ld + column];
        sums[b * O + column] = sum;
    }
};

static dim3 grid_of(int64_t B, int64_t O) {
    return dim3(unsigned(std::min<int64_t>(B, 65535)), unsigned(blocks_for<int64_t>(O, THREADS)));
}

static pyops_status packed_forward(float *y, const float *table, const int32_t *ids, const float *context, const Sequences &in,
                                   const float *weight, const float *bias, float *work, int64_t V, int64_t E, int64_t C,
                                   int64_t O, void *stream) {
    const int64_t B = in.B, N = in.N, I = E + C;
    float *const of_contexts = work + N * E;
    pyops_status status = pyops_embedding_forward(real(work), table, ids, N, V, E, stream);
    if (status) return status;
    const AnyProduct products[2] = {
        {real(y), real(work), real(weight), bias, N, O, E, O, E, 1, 1, I, 0, 0},
        {real(of_contexts), real(context), real(weight + E), nullptr, B, O, C, O, C, 1, 1, I, 0, 0}};
    bool added[2];
    Launches launches;
    launches << any_products(products, C ? 2 : 1, stream_of(stream), added);
    if (C)
        launches << LAUNCH_DEPENDENT(add_to_rows, grid_of(B, O), THREADS, 0, stream_of(stream), y, of_contexts, in, O,
                                     pyops_faults());
    return pyops_launched("embedding_linear_forward", launches.error, stream);
}

// dbias_added: whether dbias has been computed, too.
static pyops_status packed_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight, float *dbias,
                                    bool *dbias_added, const float *dy, const float *table, const int32_t *ids,
                                    const float *context, const Sequences &in, const float *weight, float *work, int64_t V,
                                    int64_t E, int64_t C, int64_t O, int64_t ld, void *stream) {
    using namespace embedding;
    const int64_t B = in.B, N = in.N, I = E + C;
    float *const drows = work + N * E, *const sums = drows + N * E;
    int32_t *const words = reinterpret_cast<int32_t *>(sums + (C ? B * O : 0));
    const auto rows_in = [&](int64_t first) { return std::min<int64_t>(CHUNK, N - first); };
    RowsAndSums also = {work, sums, table, dy, ids, in, V, E, O, ld, grid_for(N * 32, GROUP_THREADS)};
    int64_t more = also.row_blocks + (C ? B * blocks_for<int64_t>(O, GROUP_THREADS) : 0);
    Launches launches;
    for (int64_t first = 0; first == 0 || first < N; first += CHUNK, more = 0)
        launches << launch_group(groups_in(words, N, first), ids + first, Who::embedding_backward, first, rows_in(first), V,
                                 also, more, stream_of(stream));

    // The gradients of a linear layer, from rows of dy that are `distance` apart.
    AnyProduct products[MOST_GROUPED];
    int count = 0;
    const auto gradients = [&](float *dw, float *dx, int64_t ldx, const float *dy, const float *x, const float *w, int64_t rows,
                               int64_t columns, int64_t distance) {
        products[count++] = {real(dw), real(dy), real(x), nullptr, O, columns, rows, I, 1, distance, columns, 1, 1, 0};
        products[count++] = {real(dx), real(dy), real(w), nullptr, rows, columns, O, ldx, distance, 1, I, 1, 0, 0};
    };
    gradients(dweight, drows, E, dy, work, weight, N, E, ld);
    products[0].row_sums = dbias;
    if (C) gradients(dweight + E, dcontext, C, sums, context, weight + E, B, C, O);
    bool added[MOST_GROUPED];
    launches << any_products(products, count, stream_of(stream), added);
    *dbias_added = added[0];
    for (int64_t first = 0; first < N; first += CHUNK)
        launches << launch_add(dtable, touched, groups_in(words, N, first), Plain<float>{drows + first * E}, ids + first,
                               rows_in(first), E, stream_of(stream));
    return pyops_launched("embedding_linear_backward", launches.error, stream);
}
}

extern "C" pyops_status pyops_embedding_linear_forward(float *y, const float *table, const int32_t *ids, const float *context,
                                                       const int32_t *offsets, const float *weight, const float *bias,
                                                       float *work, int64_t T, int64_t B, int64_t N, int64_t V, int64_t E,
                                                       int64_t C, int64_t O, void *stream) {
    pyops_status status = check_embedding_linear("embedding_linear_forward", context, offsets, T, B, N, V, E, C, O);
    if (status || (offsets && B == 0)) return status;
    if (offsets) {
        const Sequences in = {offsets, T, B, N, false};
        return packed_forward(y, table, ids, context, in, weight, bias, work, V, E, C, O, stream);
    }
    const int64_t I = E + C;
    const float *const x = input_of(status, work, table, ids, context, T, B, V, E, C, stream);
    return status ? status : pyops_gemm(y, x, weight, bias, T * B, O, I, O, I, 1, 1, I, 0, 0, stream);
}

extern "C" pyops_status pyops_embedding_linear_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight,
                                                        float *dbias, const float *dy, const float *table, const int32_t *ids,
                                                        const float *context, const int32_t *offsets, const float *weight,
                                                        float *work, int64_t T, int64_t B, int64_t N, int64_t V, int64_t E,
                                                        int64_t C, int64_t O, int64_t ld, void *stream) {
    pyops_status status = check_embedding_linear("embedding_linear_backward", context, offsets, T, B, N, V, E, C, O);
    if (status || (offsets && B == 0)) return status;
    PYOPS_REQUIRE(ld >= O, "embedding_linear_backward: ld=%lld, expected at least O=%lld", LL(ld), LL(O));
    const int64_t I = E + C, R = offsets ? N : T * B;
    bool dbias_added = false;
    if (offsets) {
        const Sequences in = {offsets, T, B, N, false};
        status = packed_backward(dtable, touched, dcontext, dweight, dbias, &dbias_added, dy, table, ids, context, in, weight,
                                 work, V, E, C, O, ld, stream);
    } else {
        float *const x = input_of(status, work, table, ids, context, T, B, V, E, C, stream);
        if (!status) status = pyops_gemm(dweight, dy, x, nullptr, O, I, R, I, 1, ld, I, 1, 1, 0, stream);
        if (!status) status = pyops_gemm(x, dy, weight, nullptr, R, I, O, I, ld, 1, I, 1, 0, 0, stream);   // overwrites x
        if (!status && C) status = pyops_concat_context_backward(real(work), real(dcontext), real(x), T, B, E, C, stream);
        if (!status) status = pyops_embedding_backward(dtable, touched, real(work), ids, R, V, E, stream);
    }
    if (status || dbias_added) return status;
    Space columns, rows;
    columns.add({O, {1, 1}});
    rows.add({R, {ld}});
    return reduce_axes<SumOf<float, double>, SumOf<double>>("embedding_linear_backward", dbias, dy, columns, rows, false, true,
                                                            stream);
}
