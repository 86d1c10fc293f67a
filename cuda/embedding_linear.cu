// embedding_linear.cu - rows of a table by index, concatenated with a context, and a linear layer over both.
//
// The rows and the context are concatenated in `work`, and the products cover all positions.  The CPU finds the distinct
// tokens first; here that would need a synchronisation, since the launch of a product depends on their number.
#include "index.cuh"
#include "reduce.cuh"

namespace {
// rows (T,B,E), followed by the rows concatenated with the context (T,B,E+C) if there is one
static int64_t work_of(int64_t T, int64_t B, int64_t E, int64_t C) { return T * B * (C ? 2 * E + C : E); }
}

extern "C" int64_t pyops_embedding_linear_forward_work(int64_t T, int64_t B, int64_t, int64_t E, int64_t C, int64_t) {
    return work_of(T, B, E, C);
}
extern "C" int64_t pyops_embedding_linear_backward_work(int64_t T, int64_t B, int64_t, int64_t E, int64_t C, int64_t) {
    return work_of(T, B, E, C);
}

namespace {
// Fill `work`; return the input of the linear layer (T,B,E+C), which is a part of it.
static float *input_of(pyops_status &status, float *work, const float *table, const int32_t *ids, const float *context,
                       int64_t T, int64_t B, int64_t V, int64_t E, int64_t C, void *stream) {
    float *const both = work + T * B * E;
    status = pyops_embedding_forward(work, table, ids, T * B, V, E, stream);
    if (!status && C) status = pyops_concat_context_forward(both, work, context, T, B, E, C, stream);
    return C ? both : work;
}
}

extern "C" pyops_status pyops_embedding_linear_forward(float *y, const float *table, const int32_t *ids, const float *context,
                                                       const float *weight, const float *bias, float *work, int64_t T,
                                                       int64_t B, int64_t V, int64_t E, int64_t C, int64_t O, void *stream) {
    pyops_status status = check_embedding_linear("embedding_linear_forward", context, T, B, V, E, C, O);
    if (status) return status;
    const int64_t I = E + C;
    const float *const x = input_of(status, work, table, ids, context, T, B, V, E, C, stream);
    return status ? status : pyops_gemm(y, x, weight, bias, T * B, O, I, O, I, 1, 1, I, 0, 0, stream);
}

extern "C" pyops_status pyops_embedding_linear_backward(float *dtable, int32_t *touched, float *dcontext, float *dweight,
                                                        float *dbias, const float *dy, const float *table, const int32_t *ids,
                                                        const float *context, const float *weight, float *work, int64_t T,
                                                        int64_t B, int64_t V, int64_t E, int64_t C, int64_t O, int64_t ld,
                                                        void *stream) {
    pyops_status status = check_embedding_linear("embedding_linear_backward", context, T, B, V, E, C, O);
    if (status) return status;
    PYOPS_REQUIRE(ld >= O, "embedding_linear_backward: ld=%lld, expected at least O=%lld", LL(ld), LL(O));
    const int64_t I = E + C, R = T * B;
    float *const x = input_of(status, work, table, ids, context, T, B, V, E, C, stream);
    if (!status) status = pyops_gemm(dweight, dy, x, nullptr, O, I, R, I, 1, ld, I, 1, 1, 0, stream);
    if (!status) status = pyops_gemm(x, dy, weight, nullptr, R, I, O, I, ld, 1, I, 1, 0, 0, stream);  // x is no longer needed
    if (!status && C) status = pyops_concat_context_backward(work, dcontext, x, T, B, E, C, stream);
    if (!status) status = pyops_embedding_backward(dtable, touched, work, ids, R, V, E, stream);
    if (status) return status;
    Space columns, rows;
    columns.add({O, {1, 1}});
    rows.add({R, {ld}});
    return reduce_axes<SumOf<float, double>, SumOf<double>>("embedding_linear_backward", dbias, dy, columns, rows, false, true,
                                                            stream);
}
