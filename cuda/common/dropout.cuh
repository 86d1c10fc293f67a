// dropout.cuh - dropout of packs of elements, for kernels that do more than that.
#pragma once
#include "index.cuh"
#include "philox.cuh"

struct Dropout {
    const int64_t *step;                // NULL: nothing is dropped
    uint64_t key;
    uint32_t threshold;
    float scale;

    // base + dropout(x), both of them packs at element i of their arrays.
    template <int WIDTH>
    __device__ __forceinline__ Pack<float, WIDTH> add(Pack<float, WIDTH> base, const Pack<float, WIDTH> &x, int64_t i) const {
        if (!step) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++) base.at[k] += x.at[k];
            return base;
        }
        if constexpr (WIDTH > 1) {
#pragma unroll
            for (int four = 0; four < WIDTH; four += 4) {
                const Words random = philox((i + four) / 4, step[0], key);
#pragma unroll
                for (int k = 0; k < 4; k++) base.at[four + k] += dropped(x.at[four + k], random.word[k], threshold, scale);
            }
        } else {
            const Words random = philox(i / 4, step[0], key);
            const int which = i % 4;            // no variable index: that would put the words into local memory
            const uint32_t low = which & 1 ? random.word[1] : random.word[0],
                           high = which & 1 ? random.word[3] : random.word[2];
            base.at[0] += dropped(x.at[0], which & 2 ? high : low, threshold, scale);
        }
        return base;
    }
};

static inline Dropout dropout_of(const int64_t *step, float p, uint64_t key) {
    return {p > 0.0f ? step : nullptr, key, dropout_threshold(p), 1.0f / (1.0f - p)};
}
