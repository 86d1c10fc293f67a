// exponentials.cuh - the end of a product whose elements are logits: exponentials in place of the logits.
//
// Of each row and each tile of EXP_TILE columns the maximum and the sum of exp(logit - maximum) are found while the sums of
// the product are in registers, and the exponentials are stored.  So the logits are never in memory.  The softmax of a row is its
// exponentials, times one number for each tile.
//
// An exponential has as many bytes as the gradient that replaces it: 2 of a bfloat16 (Exp16), 4 of a float rounded to TF32 (Exp32).
#pragma once
#include "log_sum_exp.cuh"
#include "real.cuh"

// A number from 0 to 1 in 16 bits.  Bits 31 and 30 of such a float are 0, and the next 16 bits are kept: 10 binary digits of
// numbers down to 2^-126.  bfloat16 has 8: a gradient that is formed from an exponential is rounded to bfloat16 again, and the
// first of the two errors should be the smaller one.
struct Exp16 { uint16_t bits; };
// Round to nearest.  A NaN becomes some number; the sum of its tile is NaN.
DEVICE unsigned pack_exps(float low, float high) {
    return (4 * __float_as_uint(low) + 0x8000u) >> 16 | ((4 * __float_as_uint(high) + 0x8000u) & 0xffff0000u);
}
DEVICE float low_exp(unsigned pair) { return __uint_as_float((pair & 0xffffu) << 14); }
DEVICE float high_exp(unsigned pair) { return __uint_as_float(pair >> 16 << 14); }
// The eight of 16 bytes.
DEVICE Pack<float, 8> eight_exps(uint4 x) {
    return {
        {low_exp(x.x), high_exp(x.x), low_exp(x.y), high_exp(x.y), low_exp(x.z), high_exp(x.z), low_exp(x.w), high_exp(x.w)}};
}

struct Exp32 { float value; };
DEVICE Pack<float, 8> exps_of(uint4 x, Exp16) { return eight_exps(x); }
DEVICE Pack<float, 4> exps_of(uint4 x, Exp32) {
    return {{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)}};
}
template <class Out> constexpr bool IS_EXP = std::is_same_v<Out, Exp16> || std::is_same_v<Out, Exp32>;

constexpr int EXP_TILE = 128;

struct Piece {
    LogSumExp exps;
    float below;
}; // the logits of a row in a tile;  below: the sum of logit - max

template <class Exp> struct Exponentials { // the result of a product with M rows and V columns
    Exp *exps; // (M,ld): exp(logit - maximum of the tile), or NULL
    Piece *pieces; // (M,tiles)
    const float *bias; // (ld): added to the sums; -infinity from V on
    const int32_t *labels; // (M)
    float *at_label; // (M): the logit in column labels[m]
    int64_t V, ld, tiles; // ld: V rounded up to whole tiles
    bool below; // whether pieces need `below`
};

DEVICE void write_two_exps(Exp16 *to, float low, float high) { *reinterpret_cast<unsigned *>(to) = pack_exps(low, high); }
DEVICE void write_two_exps(Exp32 *to, float low, float high) { *reinterpret_cast<float2 *>(to) = make_float2(low, high); }

// Write row m of a tile.  LANES adjacent lanes share it: at(i), i < EXP_TILE / LANES, is the logit, with the bias, in column
// i / 2 * 2 LANES + i % 2 after the first two columns of the lane.  All lanes of the warp call it; row_exists: m < M.
template <int LANES, class Exp, class At>
DEVICE void write_exponentials(const Exponentials<Exp> &to, int64_t m, int64_t tile, bool row_exists, const At &at) {
    constexpr int COUNT = EXP_TILE / LANES;
    const int64_t first = tile * EXP_TILE + threadIdx.x % LANES * 2;
    const auto column = [](int i) { return i / 2 * 2 * LANES + i % 2; };
    Piece piece = {};
    float &max = piece.exps.max;
#pragma unroll
    for (int i = 0; i < COUNT; i++) max = at(i) > max ? at(i) : max;
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) {
        const float other = __shfl_xor_sync(ALL_LANES, max, step);
        max = other > max ? other : max;
    }
    if (const int place = row_exists ? static_cast<int>(to.labels[m] - first) : -1; place >= 0 && place < EXP_TILE) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (column(i) == place) to.at_label[m] = at(i);
    }
    if (to.below) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) piece.below += first + column(i) < to.V ? at(i) - max : 0.0f;
    }
    // Sums are of exponentials before they are rounded: the loss is float32.
    const bool stores = to.exps && row_exists;
    Exp *const exps = stores ? to.exps + m * to.ld + first : nullptr;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const float low = __expf(at(i) - max), high = __expf(at(i + 1) - max);
        piece.exps.sum += low + high;
        if (stores) write_two_exps(exps + column(i), low, high);
    }
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) {
        piece.exps.sum += __shfl_xor_sync(ALL_LANES, piece.exps.sum, step);
        piece.below += __shfl_xor_sync(ALL_LANES, piece.below, step);
    }
    if (threadIdx.x % LANES == 0 && row_exists) to.pieces[m * to.tiles + tile] = piece;
}
