// linear_argmax.cu - the argmax of each row of logits: a matrix product, then an argmax per row.
//
// The CPU quantizes the weight once, to skip most logits (csrc/linear_argmax.c).  A GPU is fast enough to compute all of them,
// so there is nothing to prepare here, and the logits are stored in `work`.
#include "product.cuh"

extern "C" pyops_status pyops_linear_argmax_prepare(float *, const float *, const float *, int64_t D, int64_t V, void *) {
    PYOPS_REQUIRE(D >= 1 && V >= 1, "linear_argmax_prepare: D=%lld V=%lld, expected D >= 1, V >= 1", LL(D), LL(V));
    return PYOPS_OK;
}

extern "C" int64_t pyops_linear_argmax_prepare_work(int64_t, int64_t) { return 1; }
extern "C" int64_t pyops_linear_argmax_work(int64_t R, int64_t, int64_t V) { return R * V; }

extern "C" pyops_status pyops_linear_argmax(int32_t *index, const float *x, const float *weight, const float *bias,
                                            const float *, float *work, int64_t R, int64_t D, int64_t V, void *stream) {
    PYOPS_REQUIRE(R >= 0 && D >= 1 && V >= 1 && V <= INT32_MAX,
                  "linear_argmax: R=%lld D=%lld V=%lld, expected R >= 0, D >= 1, V from 1 to 2^31 - 1", LL(R), LL(D), LL(V));
    const pyops_status status = pyops_gemm(work, x, weight, bias, R, V, D, V, D, 1, 1, D, 0, 0, stream);
    return status ? status : pyops_argmax(index, work, R, V, stream);
}
