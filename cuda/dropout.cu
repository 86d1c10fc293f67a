// dropout.cu - zero a fraction p of the elements and scale the others, with counter-based random numbers; and the residual
// connection with dropout.
//
// A thread takes the four elements of one counter, as one float4 if the arrays are aligned.
#include "philox.cuh"

namespace {
static constexpr int THREADS = 256;

// y = dropout(x) (+ base, unless it is NULL); y may alias either.
static __global__ void drop(float *y, const float *base, const float *x, const int64_t *step, int64_t n, uint64_t key,
                            uint32_t threshold, float scale) {
    const bool whole = ((uintptr_t(y) | uintptr_t(x) | uintptr_t(base)) & 15) == 0;
    for (int64_t group = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; 4 * group < n;
         group += int64_t(gridDim.x) * blockDim.x) {
        const Words random = philox(group, step[0], key);
        const int64_t i = 4 * group;
        if (whole && i + 4 <= n) {
            const float4 in = *reinterpret_cast<const float4 *>(x + i);
            float4 out = base ? *reinterpret_cast<const float4 *>(base + i) : make_float4(0, 0, 0, 0);
            out.x += dropped(in.x, random.word[0], threshold, scale);
            out.y += dropped(in.y, random.word[1], threshold, scale);
            out.z += dropped(in.z, random.word[2], threshold, scale);
            out.w += dropped(in.w, random.word[3], threshold, scale);
            *reinterpret_cast<float4 *>(y + i) = out;
        } else {
            for (int j = 0; j < 4 && i + j < n; j++)
                y[i + j] = (base ? base[i + j] : 0.0f) + dropped(x[i + j], random.word[j], threshold, scale);
        }
    }
}

static __global__ void add(float *y, const float *x, const float *branch, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
        y[i] = x[i] + branch[i];
}
}

extern "C" pyops_status pyops_dropout(float *y, const float *x, const int64_t *step, int64_t n, float p, uint64_t key,
                                      void *stream) {
    const pyops_status status = check_dropout("dropout", n, p);
    if (status || n == 0) return status;
    return pyops_launched("dropout",
                          LAUNCH(drop, grid_for(blocks_for<int64_t>(n, 4), THREADS), THREADS, 0, stream_of(stream), y, nullptr,
                                 x, step, n, key, dropout_threshold(p), 1.0f / (1.0f - p)),
                          stream);
}

extern "C" pyops_status pyops_residual(float *y, const float *x, const float *branch, const int64_t *step, int64_t n, float p,
                                       uint64_t key, void *stream) {
    const pyops_status status = check_dropout("residual", n, p);
    if (status || n == 0) return status;
    const cudaError_t error = step && p > 0.0f
        ? LAUNCH(drop, grid_for(blocks_for<int64_t>(n, 4), THREADS), THREADS, 0, stream_of(stream), y, x, branch, step, n, key,
                 dropout_threshold(p), 1.0f / (1.0f - p))
        : LAUNCH(add, grid_for(n, THREADS), THREADS, 0, stream_of(stream), y, x, branch, n);
    return pyops_launched("residual", error, stream);
}
