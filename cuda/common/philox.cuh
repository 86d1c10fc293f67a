// philox.cuh - Philox4x32-10 (Salmon et al. 2011) and the threshold of dropout: the same numbers as on the CPU.
#pragma once
#include "internal.cuh"

struct Words { uint32_t word[4]; };

// The four random words of the counter (group, step) and a key.
DEVICE Words philox(uint64_t group, uint64_t step, uint64_t key) {
    uint32_t c0 = uint32_t(group), c1 = uint32_t(group >> 32), c2 = uint32_t(step), c3 = uint32_t(step >> 32);
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c2 = h0 ^ c3 ^ k1;
        c1 = l1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Dropout of one element.
DEVICE float dropped(float x, uint32_t word, uint32_t threshold, float scale) { return word >= threshold ? x * scale : 0.0f; }

// Dropout keeps an element if its word is at least this.
static inline uint32_t dropout_threshold(float p) { return static_cast<uint32_t>(static_cast<double>(p) * 4294967296.0); }
