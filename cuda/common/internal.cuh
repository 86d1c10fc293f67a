// internal.cuh - shared by all files of the CUDA library: errors, launches, faults, precision, sizes.
#pragma once
#include <cstdint>
#include <cstring>
#include "gpu.cuh"
#include "pyops.h"

// ---- errors -----------------------------------------------------------------------------------------
pyops_status pyops_fail(pyops_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define PYOPS_REQUIRE(condition, ...) \
    do { \
        if (!(condition)) return pyops_fail(PYOPS_BAD_ARGUMENT, __VA_ARGS__); \
    } while (0)
#define LL(x) ((long long)(x))          // for %lld
#include "checks.h"

// Every function of the ABI that launches ends with `return pyops_launched("gemm", error, stream)`, where error is the result
// of LAUNCH (of several launches, the first failure).  It converts the error into a status and a text.  With PYOPS_SYNC=1 it
// also waits for the stream and checks for faults, so that the call that caused an error also returns it.
pyops_status pyops_launched(const char *who, cudaError_t error, void *stream);

static inline cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }

// The first error of several launches: Launches launches;  launches << LAUNCH(...);  launches << LAUNCH(...);
struct Launches {
    cudaError_t error = cudaSuccess;
    Launches &operator<<(cudaError_t next) {
        if (error == cudaSuccess) error = next;
        return *this;
    }
};

// A kernel that may start before the last one of its stream has ended, if pyops_starts_early: see LAUNCH_EARLY.  Cooperative
// grids, and all kernels that do not call wait_for_last_kernel, start when everything before them has ended.
bool pyops_starts_early();              // pyops_set_early_start
#define LAUNCH_DEPENDENT(kernel, ...) (pyops_starts_early() ? LAUNCH_EARLY(kernel, __VA_ARGS__) : LAUNCH(kernel, __VA_ARGS__))
#define LAUNCH_CLUSTER_DEPENDENT(...) (pyops_starts_early() ? LAUNCH_CLUSTER_EARLY(__VA_ARGS__) : LAUNCH_CLUSTER(__VA_ARGS__))

// ---- faults: invalid data that a kernel found ---------------------------------------------------------
// The host cannot read ids or labels on the device without waiting for it.  So a kernel that finds an invalid one reports it
// here and continues with a harmless value; the next call that waits for the device returns the error.
enum class Fault : int32_t {            // the text of each is in dispatch.cu
    none,
    embedding_id,
    label,
    row,
    length,
    step,
    exponent,
    position,
    start,
    total,
    offset,
    last_offset,
    q_offset,
    k_offset
};
struct FaultRecord {
    int32_t fault, who;                 // who: one of Who
    long long index, value, limit;
};
enum class Who : int32_t {              // the function named in the text
    embedding_forward,
    embedding_backward,
    gather_pixels,
    gather_sequences,
    pixel_linear_forward,
    pixel_linear_backward,
    cross_entropy_forward,
    linear_cross_entropy,
    attention_forward,
    adam,
    mlp_gradients,
    strided_binary_int32,
    mlp_step,
    attention_softmax_forward,
    gru_forward,
    pack_sequences,
    add_positions_forward,
    embedding_linear_forward,
    pad_rows,
    unpad_rows,
    gather_rows,
    rnn_forward,
    scatter_rows,
    embedding_positions_forward,
    embedding_positions_backward,
    pack_pairs
};
FaultRecord *pyops_faults();            // in device memory; NULL if allocation failed
pyops_status pyops_check_faults();      // return and clear a recorded fault; the streams must be synchronised

DEVICE void report(FaultRecord *record, Fault fault, Who who, long long index, long long value, long long limit) {
    if (atomicCAS(&record->fault, 0, static_cast<int32_t>(fault)) == 0) {
        record->who = static_cast<int32_t>(who);
        record->index = index;
        record->value = value;
        record->limit = limit;
    }
}

// Report a length outside [0, T].
DEVICE void check_length(FaultRecord *record, Who who, const int32_t *lengths, int64_t b, int64_t T) {
    if (lengths[b] < 0 || lengths[b] > T) report(record, Fault::length, who, b, lengths[b], T);
}

// Report packed rows of sentence b that do not start where the last ones end, or are more than T.
// fault: of the array in question.
DEVICE void check_offset(FaultRecord *record, Fault fault, Who who, const int32_t *offsets, int64_t b, int64_t T) {
    const int64_t rows = int64_t(offsets[b + 1]) - offsets[b];
    if (rows < 0 || rows > T) report(record, fault, who, b, rows, T);
    if (b == 0 && offsets[0] != 0) report(record, fault, who, -1, offsets[0], 0);
}

// Two floats as a pair of bfloat16 for a tensor core, the first in the low half.
DEVICE unsigned pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// ---- settings and the device --------------------------------------------------------------------------
enum class Precision : int32_t { fp32, tf32, bf16 };       // of the operands of matrix products; sums are float32 always
Precision pyops_precision_now();
enum class AttentionKernels : int32_t { by_size, tiles, hopper };       // pyops_set_attention
AttentionKernels pyops_attention_now();
enum class Exchange : int32_t { by_device, global };        // pyops_set_exchange
Exchange pyops_exchange_now();
enum class Multicast : int32_t { by_size, never, always };              // pyops_set_multicast
Multicast pyops_multicast_now();
int pyops_multiprocessors();            // of the device in use
int pyops_shared_memory();              // bytes that a block may use after cudaFuncSetAttribute
bool pyops_has_hopper();                // whether it has wgmma and bulk copies, and this build contains code for them

// Workspace of the library, for kernels whose ABI has no `work`.  Every call returns the same memory, so a function may use it
// only for its own launches on one stream.  NULL if `bytes` exceeds PYOPS_WORKSPACE or allocation failed.
constexpr size_t PYOPS_WORKSPACE = size_t(64) << 20;
void *pyops_workspace(size_t bytes);

// ---- sizes -----------------------------------------------------------------------------------------------
template <class T> __host__ __device__ static constexpr T round_up(T n, T to) { return (n + to - 1) / to * to; }
template <class T> __host__ __device__ static constexpr T blocks_for(T n, T size) { return (n + size - 1) / size; }
// Blocks for a grid-stride loop: enough to fill the device, but not more than there is work for.
static inline unsigned grid_for(int64_t n, int threads) {
    const int64_t most = int64_t(pyops_multiprocessors()) * (2048 / threads), needed = blocks_for<int64_t>(n, threads);
    return static_cast<unsigned>(needed < most ? needed : most);
}

// More than 48 KiB of dynamic shared memory must be enabled once per kernel.
template <auto *KERNEL> static cudaError_t allow_shared(size_t bytes) {
    static const cudaError_t error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                          static_cast<int>(bytes));
    return error;
}
