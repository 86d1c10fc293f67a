// dropout.cu - zero a fraction p of the elements and scale the others, with counter-based random numbers; and the residual
// connection with dropout.
//
// A thread takes the four elements of one counter, in one access if the arrays are aligned.
#include "flat.cuh"
#include "philox.cuh"

namespace {
static constexpr int THREADS = 256;

// y = dropout(x) (+ base, unless it is NULL); y may alias either.
template <class T>
static __global__ void drop(T *y, const T *base, const T *x, const int64_t *step, int64_t n, uint64_t key, uint32_t threshold,
                            float scale) {
    wait_for_last_kernel();
    const bool whole = ((uintptr_t(y) | uintptr_t(x) | uintptr_t(base)) & 15) == 0;
    for (int64_t group = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; 4 * group < n;
         group += int64_t(gridDim.x) * blockDim.x) {
        const Words random = philox(group, step[0], key);
        const int64_t i = 4 * group;
        if (whole && i + 4 <= n) {
            const Pack<float, 4> in = load_reals<4>(x + i);
            Pack<float, 4> out = base ? load_reals<4>(base + i) : Pack<float, 4>{};
#pragma unroll
            for (int j = 0; j < 4; j++) out.at[j] += dropped(in.at[j], random.word[j], threshold, scale);
            store_reals<4>(y + i, out);
        } else {
            for (int j = 0; j < 4 && i + j < n; j++)
                y[i + j] = as<T>((base ? as_float(base[i + j]) : 0.0f) +
                                 dropped(as_float(x[i + j]), random.word[j], threshold, scale));
        }
    }
}

struct Add {
    static constexpr int INPUTS = 2, OUTPUTS = 1;
    __device__ bool begin() { return true; }
    __device__ void operator()(const float (&in)[2], float (&y)[1]) const { y[0] = in[0] + in[1]; }
};

template <class T> static pyops_status launch_drop(const char *who, pyops_real *y, const pyops_real *base, const pyops_real *x,
                                                   const int64_t *step, int64_t n, float p, uint64_t key, void *stream) {
    return pyops_launched(who,
                          LAUNCH_DEPENDENT(drop<T>, grid_for(blocks_for<int64_t>(n, 4), THREADS), THREADS, 0, stream_of(stream),
                                           elements<T>(y), elements<T>(base), elements<T>(x), step, n, key,
                                           dropout_threshold(p), 1.0f / (1.0f - p)),
                          stream);
}
}

extern "C" pyops_status pyops_dropout(pyops_real *y, const pyops_real *x, const int64_t *step, int64_t n, float p, uint64_t key,
                                      void *stream) {
    const pyops_status status = check_dropout("dropout", n, p);
    if (status || n == 0) return status;
    return with_type(
        "dropout", [&](auto type) { return launch_drop<decltype(type)>("dropout", y, nullptr, x, step, n, p, key, stream); }, y,
        x);
}

extern "C" pyops_status pyops_residual(pyops_real *y, const pyops_real *x, const pyops_real *branch, const int64_t *step,
                                       int64_t n, float p, uint64_t key, void *stream) {
    const pyops_status status = check_dropout("residual", n, p);
    if (status || n == 0) return status;
    return with_type(
        "residual",
        [&](auto type) {
            using T = decltype(type);
            if (step && p > 0.0f) return launch_drop<T>("residual", y, x, branch, step, n, p, key, stream);
            const FlatArrays<2, 1, T> arrays = {{elements<T>(x), elements<T>(branch)}, {elements<T>(y)}};
            return pyops_launched("residual", launch_flat<T>(Add{}, arrays, n, stream), stream);
        },
        y, x, branch);
}
