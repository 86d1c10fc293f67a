// internal.cuh - what the files of the CUDA library share on the host's side: errors, launches, faults, precision.
#pragma once
#include <cstdint>
#include <cstring>
#include "gpu.cuh"
#include "pyops.h"

// ---- errors -----------------------------------------------------------------------------------------
pyops_status pyops_fail(pyops_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define PYOPS_REQUIRE(condition, ...) do { if (!(condition)) return pyops_fail(PYOPS_BAD_ARGUMENT, __VA_ARGS__); } while (0)
#define LL(x) ((long long)(x))          // for %lld

// Every function of the ABI that launches ends with `return pyops_launched("gemm", error, stream)`, where error is what
// LAUNCH gave (the first that was not cudaSuccess, of several): it turns it into a status and a text.  With PYOPS_SYNC=1
// it also waits for the stream and looks for faults, so that an error is raised by the call that made it.
pyops_status pyops_launched(const char *who, cudaError_t error, void *stream);

static inline cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }

// The first error of several launches: Launches launches;  launches << LAUNCH(...);  launches << LAUNCH(...);
struct Launches {
    cudaError_t error = cudaSuccess;
    Launches &operator<<(cudaError_t next) { if (error == cudaSuccess) error = next; return *this; }
};

// ---- faults: what a kernel finds wrong with its data --------------------------------------------------
// The host cannot look at ids or labels on the device without waiting for it.  So a kernel that meets a bad one reports it
// here, goes on with a harmless value, and the next call that waits for the device fails with the text.
enum class Fault : int32_t {            // the text of each is in dispatch.cu
    none, embedding_id, label, row, length, step, exponent
};
struct FaultRecord {
    int32_t fault, who;                 // who: one of pyops_who
    long long index, value, limit;
};
enum class Who : int32_t {              // the function that a text begins with
    embedding_forward, embedding_backward, gather_pixels, gather_sequences, pixel_linear_forward, pixel_linear_backward,
    cross_entropy_forward, linear_cross_entropy, attention_forward, adam, mlp_gradients,
    strided_binary_int32, mlp_step, attention_softmax_forward, gru_forward
};
FaultRecord *pyops_faults();            // in device memory; NULL if there is none left
pyops_status pyops_check_faults();      // of streams that were waited for: the text of what a kernel found, once

DEVICE void report(FaultRecord *record, Fault fault, Who who, long long index, long long value, long long limit) {
    if (atomicCAS(&record->fault, 0, static_cast<int32_t>(fault)) == 0) {
        record->who = static_cast<int32_t>(who);
        record->index = index;
        record->value = value;
        record->limit = limit;
    }
}

// Two numbers as bfloat16, for a tensor core: the first one in the low half.
DEVICE unsigned pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// ---- settings and the device --------------------------------------------------------------------------
enum class Precision : int32_t { fp32, tf32, bf16 };       // of the operands of matrix products; sums are float32 always
Precision pyops_precision_now();
int pyops_multiprocessors();            // of the device in use
int pyops_shared_memory();              // bytes that a block may have there, once cudaFuncSetAttribute has allowed it
bool pyops_has_hopper();                // whether it has wgmma and bulk copies, and this build has code for them

// Scratch of the library, for kernels whose ABI has no `work`: the same memory at every call, so a kernel may use it only
// between its own launches on one stream.  NULL if `bytes` is more than there is (PYOPS_WORKSPACE) or nothing is left.
constexpr size_t PYOPS_WORKSPACE = size_t(64) << 20;
void *pyops_workspace(size_t bytes);

// ---- sizes -----------------------------------------------------------------------------------------------
template <class T> __host__ __device__ static constexpr T round_up(T n, T to) { return (n + to - 1) / to * to; }
template <class T> __host__ __device__ static constexpr T blocks_for(T n, T size) { return (n + size - 1) / size; }
// Blocks for a loop with the stride of the grid: enough to fill the device, no more than there is work for.
static inline unsigned grid_for(int64_t n, int threads) {
    const int64_t most = int64_t(pyops_multiprocessors()) * (2048 / threads), want = blocks_for<int64_t>(n, threads);
    return static_cast<unsigned>(want < most ? want : most);
}

// More than 48 KiB of dynamic shared memory has to be asked for, once a kernel.
template <auto *KERNEL> static cudaError_t allow_shared(size_t bytes) {
    static const cudaError_t error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    return error;
}
