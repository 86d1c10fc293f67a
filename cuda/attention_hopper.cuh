// attention_hopper.cuh - attention on Hopper's tensor cores (attention_hopper.cu), for attention.cu; what both report.
#pragma once
#include "real.cuh"

// Report a wrong length or offset of sequence b.
DEVICE void check_sequence(FaultRecord *faults, const int32_t *lengths, const int32_t *q_offsets, const int32_t *k_offsets,
                           unsigned b, int64_t Tq, int64_t Tk) {
    constexpr Who WHO = Who::attention_forward;
    if (!faults) return;
    if (lengths) check_length(faults, WHO, lengths, b, Tk);
    if (q_offsets) check_offset(faults, Fault::q_offset, WHO, q_offsets, b, Tq);
    if (k_offsets) check_offset(faults, Fault::k_offset, WHO, k_offsets, b, Tk);
}

// A call, with the definition in pyops.h.  Rows of q, k, v, dq, dk, dv are ldq, ldk, lddq, lddk elements apart; rows of y and dy
// are contiguous.
struct HopperAttention {
    int64_t Tq, Tk, B, heads, C, ldq, ldk, lddq, lddk;
    const int32_t *lengths;
    const int32_t *q_offsets, *k_offsets;       // rows of sequence b: offsets[b] to offsets[b + 1] - 1; NULL: rows t * B + b
    const int64_t *step;                        // NULL: no dropout
    uint64_t key;
    uint32_t threshold;
    int32_t causal;
    float scale, kept;                          // 1 / sqrt(C), 1 / (1 - p)
    FaultRecord *faults;
};

// Whether these kernels support the call.  `aligned`: all rows start at multiples of 16 bytes.
bool hopper_attention_fits(const HopperAttention &c, bool aligned);
// Whether they are faster than the kernels of attention.cu, by estimate.
bool hopper_attention_pays(const HopperAttention &c);
// T: float or bf16, of all arrays but stats.
template <class T>
cudaError_t hopper_attention_forward(const HopperAttention &c, T *y, float *stats, const T *q, const T *k, const T *v,
                                     cudaStream_t stream);
template <class T>
cudaError_t hopper_attention_backward(const HopperAttention &c, T *dq, T *dk, T *dv, const T *dy, const T *q, const T *k,
                                      const T *v, const T *y, const float *stats, cudaStream_t stream);
