// flat.cuh - one loop for all element-wise operations on flat arrays, of floats or of bfloat16 elements.
//
// An operation F defines how many arrays it reads and writes, and the computation for one element:
//
//     struct F {
//         static constexpr int INPUTS = 2, OUTPUTS = 1;
//         static constexpr int ROUNDS = 1;                            optional: loads of 16 bytes per array and iteration
//         __device__ bool begin();                                    read scalars from memory; false: nothing to do
//         __device__ void operator()(const float (&in)[2], float (&out)[1]) const;
//     };
//
// A thread loads 16 bytes of adjacent elements at once if all arrays are aligned, and several of these per iteration
// (in_rounds).  An output may alias an input: the thread that read an element writes it, afterwards.
#pragma once
#include <type_traits>
#include "real.cuh"

constexpr int FLAT_THREADS = 256, FLAT_RESIDENT = 4;              // blocks that always fit on a multiprocessor

template <int INPUTS, int OUTPUTS, class T = float> struct FlatArrays {
    const T *in[INPUTS ? INPUTS : 1];
    T *out[OUTPUTS];
};

// Long computations set ROUNDS: they need the registers that further loads would occupy.
template <class F, class = void> constexpr int ROUNDS_OF = F::INPUTS <= 1 ? 4 : F::INPUTS == 2 ? 2 : 1;
template <class F> constexpr int ROUNDS_OF<F, std::void_t<decltype(F::ROUNDS)>> = F::ROUNDS;

// Process the packs [from, to) of WIDTH adjacent elements each.
template <int WIDTH, int ROUNDS, class F, class T>
DEVICE void flat_packs(const F &f, const FlatArrays<F::INPUTS, F::OUTPUTS, T> &arrays, int64_t from, int64_t to) {
    struct Read { Pack<float, WIDTH> array[F::INPUTS ? F::INPUTS : 1]; };
    const auto load = [&](int64_t i) {
        Read read;
#pragma unroll
        for (int a = 0; a < F::INPUTS; a++) read.array[a] = load_reals<WIDTH>(arrays.in[a] + WIDTH * i);
        return read;
    };
    const auto store = [&](int64_t i, const Read &read) {
        Pack<float, WIDTH> written[F::OUTPUTS];
#pragma unroll
        for (int w = 0; w < WIDTH; w++) {
            float in[F::INPUTS ? F::INPUTS : 1], out[F::OUTPUTS];
#pragma unroll
            for (int a = 0; a < F::INPUTS; a++) in[a] = read.array[a].at[w];
            f(in, out);
#pragma unroll
            for (int a = 0; a < F::OUTPUTS; a++) written[a].at[w] = out[a];
        }
#pragma unroll
        for (int a = 0; a < F::OUTPUTS; a++) store_reals<WIDTH>(arrays.out[a] + WIDTH * i, written[a]);
    };
    in_rounds<ROUNDS>(from, to, load, store);
}

template <class F, class T>
static __global__ void __launch_bounds__(FLAT_THREADS, FLAT_RESIDENT)
    flat(F f, FlatArrays<F::INPUTS, F::OUTPUTS, T> arrays, int64_t n, bool whole) {
    wait_for_last_kernel();
    if (!f.begin()) return;
    const int64_t packs = whole ? n / WIDEST<T> : 0;
    flat_packs<WIDEST<T>, ROUNDS_OF<F>>(f, arrays, 0, packs);
    flat_packs<1, 4>(f, arrays, WIDEST<T> * packs, n);
}

// stay: begin() is expensive, so launch only as many blocks as fit on the device; each covers a share of the whole array.
// Otherwise launch enough blocks for one iteration per thread; the hardware assigns them to free multiprocessors.
template <class T = float, class F>
static cudaError_t launch_flat(const F &f, const FlatArrays<F::INPUTS, F::OUTPUTS, T> &arrays, int64_t n, void *stream,
                               bool stay = false) {
    if (n == 0) return cudaSuccess;
    bool whole = true;
    for (int a = 0; a < F::INPUTS; a++) whole &= aligned(arrays.in[a]);
    for (int a = 0; a < F::OUTPUTS; a++) whole &= aligned(arrays.out[a]);
    const int64_t packs = whole ? blocks_for<int64_t>(n, WIDEST<T>) : n;
    const unsigned blocks = grid_of_rounds(packs, FLAT_THREADS, whole ? ROUNDS_OF<F> : 4);
    const unsigned held = static_cast<unsigned>(pyops_multiprocessors()) * FLAT_RESIDENT;
    return LAUNCH_DEPENDENT((flat<F, T>), stay && blocks > held ? held : blocks, FLAT_THREADS, 0, stream_of(stream), f, arrays,
                            n, whole);
}
