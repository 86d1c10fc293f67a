// pixels.cuh - the nonzero pixels ("ink") of images as lists of terms, and sums over such lists; for pixel_linear.cu and
// mlp.cu.
//
// Most pixels are 0 and add nothing to a sum.  A warp reads 32 pixels at once, one per lane.  A ballot shows every lane which
// of them are nonzero, and a lane with a nonzero pixel gets its index in the list by counting the votes of lower lanes:
//
//     pixel     0    0   17  255    0   80   ...
//     vote      0    0    1    1    0    1   ...
//     index               0    1         2   ...
//
// Then the warp adds up the rows of a matrix that are in the list, each times its factor.  A lane has a column, so that reads
// of a row are coalesced.  AT_ONCE rows are loaded together to hide latency.  The terms are added in the order of the list.
#pragma once
#include "block.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int VOTES = 4, TERMS = 32 * VOTES;    // ballots and terms per list
constexpr int PIXELS = WARPS * TERMS;           // pixels of an image that the lists of a block cover at a time
constexpr int AT_ONCE = 16;

struct alignas(8) Term {
    float factor;
    int32_t row;
};

DEVICE int warp_id() { return threadIdx.x >> 5; }

// A row of the table, or NULL (treated as an image of zeros) if there is no such row.
DEVICE const uint8_t *image_of(const uint8_t *table, int64_t row, int64_t N, int64_t I) {
    return row >= 0 && row < N ? table + row * I : nullptr;
}

// Append the terms of the lanes that have one to a list of n terms; return the new length.
DEVICE int append(Term *terms, int n, bool has, Term term) {
    const unsigned votes = __ballot_sync(ALL_LANES, has);
    if (has) terms[n + __popc(votes & ((1u << lane_id()) - 1))] = term;
    return n + __popc(votes);
}

// sums[o] += sum over the terms of factor * matrix[row * stride + o], for every o < width, by one warp.
DEVICE void add_terms(float *sums, const Term *terms, int n, const float *matrix, int64_t stride, int width) {
#pragma unroll 1
    for (int o = lane_id(); o < width; o += 32) {
        float sum = sums[o];
        for (int k = 0; k < n; k += AT_ONCE) {
            float factor[AT_ONCE], value[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {         // repeat the last term: no branch between the loads
                const Term term = terms[min(k + j, n - 1)];
                factor[j] = term.factor;
                value[j] = matrix[term.row * stride + o];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sum = k + j < n ? sum + factor[j] * value[j] : sum;
        }
        sums[o] = sum;
    }
}

DEVICE void clear(float *sums, int width) {     // by one warp, as add_terms
#pragma unroll 1
    for (int o = lane_id(); o < width; o += 32) sums[o] = 0.0f;
}

// ---- the ink of one image, divided among the warps of a block ----------------------------------------------
// Ink is in the middle of an image, so each warp takes every eighth piece of 32 pixels: this balances the lists.
// List the PIXELS pixels starting at `from`; the row of a term is the index of the pixel.  Return the number of this warp's
// terms.  counts (WARPS * VOTES) or NULL: the number of terms of each piece.
DEVICE int list_ink(Term *terms, int *counts, const uint8_t *image, int64_t from, int64_t I, float scale) {
    uint8_t pixel[VOTES];
    const int64_t mine = from + 32 * warp_id() + lane_id();
#pragma unroll
    for (int j = 0; j < VOTES; j++) {
        const int64_t i = mine + 32 * WARPS * j;
        pixel[j] = image && i < I ? image[i] : 0;
    }
    int n = 0;
#pragma unroll
    for (int j = 0; j < VOTES; j++) {
        const int before = n;
        n = append(terms, n, pixel[j] != 0, {scale * pixel[j], static_cast<int32_t>(mine + 32 * WARPS * j)});
        if (counts && lane_id() == 0) counts[WARPS * j + warp_id()] = n - before;
    }
    __syncwarp();
    return n;
}

// ---- the ink of many images at WARPS adjacent pixels, a pixel per warp ---------------------------------------
// The pixels of an image starting at index i, 0 beyond its end: one per warp, the first in the lowest byte.
static_assert(WARPS == sizeof(uint64_t), "a word has a byte for each warp");
DEVICE uint64_t pixels_at(const uint8_t *image, int64_t i, int64_t I) {
    if (!image) return 0;
    if ((uintptr_t(image + i) & 7) == 0 && i + 8 <= I) return *reinterpret_cast<const uint64_t *>(image + i);
    uint64_t word = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) word |= i + k < I ? uint64_t(image[i + k]) << (8 * k) : 0;
    return word;
}

// columns (TERMS): such words of consecutive images, 0 after the last.
// The row of a term is the image.  Return the number of this warp's terms.
DEVICE int list_column(Term *terms, const uint64_t *columns, float scale) {
    int pixel[VOTES], n = 0;
#pragma unroll
    for (int j = 0; j < VOTES; j++) pixel[j] = columns[32 * j + lane_id()] >> (8 * warp_id()) & 255;
#pragma unroll
    for (int j = 0; j < VOTES; j++) n = append(terms, n, pixel[j] != 0, {scale * pixel[j], 32 * j + lane_id()});
    __syncwarp();
    return n;
}

// A term for each of `count` images; factors NULL: all factors are 1.
DEVICE int list_all(Term *terms, const float *factors, int count) {
    float factor[VOTES];
#pragma unroll
    for (int j = 0; j < VOTES; j++) factor[j] = factors ? factors[min(32 * j + lane_id(), count - 1)] : 1.0f;
#pragma unroll
    for (int j = 0; j < VOTES; j++)
        if (32 * j + lane_id() < count) terms[32 * j + lane_id()] = {factor[j], 32 * j + lane_id()};
    __syncwarp();
    return count;
}
