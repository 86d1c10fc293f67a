// matrix.cpp - tensor cores: gather the fragments of all lanes into matrices, multiply in float32, scatter the results.
//
// The layout of fragments is defined in the PTX manual.  With g = lane / 4 and t = lane % 4, a lane has these elements of a 16
// x 8 tile of float32:
//
//     c[0], c[1] at (g, 2t), (g, 2t + 1)        c[2], c[3] at (g + 8, 2t), (g + 8, 2t + 1)
//
// The order in which a device adds the products of one instruction is not documented; here it is the order of k.
#include "matrix.h"
#include <cmath>
#include "block.h"

namespace emu {
static float low_bf16(unsigned pair) { return __uint_as_float(pair << 16); }
static float high_bf16(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
static float as_tf32(unsigned bits) { return __uint_as_float(bits & 0xffffe000u); }     // the low 13 bits are ignored

// FP8: numbers of `bits` fraction bits; codes below 2^bits are subnormal, multiples of 2^(smallest - bits).
struct Fp8Format {
    int bits, smallest;
    unsigned largest;                           // the code of the largest finite number
};
static Fp8Format format_of(Element element) {
    return element == Element::e4m3 ? Fp8Format{3, -6, 0x7e} : Fp8Format{2, -14, 0x7b};
}
unsigned code_of(Element element, float x) {
    const Fp8Format f = format_of(element);
    if (std::isnan(x)) return 0x7f;
    const unsigned sign = std::signbit(x) ? 0x80 : 0;
    if (std::isinf(x)) return sign | f.largest;
    const int exponent = std::abs(x) < std::ldexp(1.0f, f.smallest) ? f.smallest : std::ilogb(x);
    // to even; if it becomes 2^(bits + 1), the sum is the code of the next exponent
    const int significand = static_cast<int>(std::nearbyint(std::ldexp(std::abs(x), f.bits - exponent)));
    const unsigned code = static_cast<unsigned>(((exponent - f.smallest) << f.bits) + significand);
    return sign | (code > f.largest ? f.largest : code);
}
static float as_fp8(unsigned code, Element element) {
    const Fp8Format f = format_of(element);
    const int magnitude = static_cast<int>(code & 0x7f), exponent = magnitude >> f.bits,
              fraction = magnitude & ((1 << f.bits) - 1);
    if (magnitude > static_cast<int>(f.largest)) {
        if (element == Element::e4m3 || fraction) return NAN;
        return code & 0x80 ? -INFINITY : INFINITY;
    }
    const float value = exponent ? std::ldexp(static_cast<float>((1 << f.bits) + fraction), f.smallest + exponent - 1 - f.bits)
                                 : std::ldexp(static_cast<float>(fraction), f.smallest - f.bits);
    return code & 0x80 ? -value : value;
}

// A fragment of a tile of 16 rows and 32 bytes: 8 columns of TF32, 16 of bfloat16, or 32 of FP8.
static void gather_tf32(float (*a)[32], const unsigned *fragment, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 4] = as_tf32(fragment[i]);
}
static void gather_bf16(float (*a)[32], const unsigned *fragment, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        a[g + i % 2 * 8][2 * t + i / 2 * 8] = low_bf16(fragment[i]);
        a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = high_bf16(fragment[i]);
    }
}
static void gather_fp8(float (*a)[32], const unsigned *fragment, int lane, Element element) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) a[g + i % 2 * 8][4 * t + i / 2 * 16 + j] = as_fp8(fragment[i] >> 8 * j & 0xff, element);
}

// c (16 x 8) += a (16 x depth) * b (depth x 8)
static void multiply(float (*c)[8], const float (*a)[32], const float (*b)[8], int depth) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < depth; k++)
            for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
}
static float &element_of(float (*c)[8], int lane, int i) { return c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; }

// ---- mma.sync -----------------------------------------------------------------------------------------------
template <bool TF32> static void multiply_warp(void *const lanes[32], unsigned mask) {
    if (mask != WHOLE_WARP) die("mma.sync requires a whole warp");
    float a[16][32], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Mma &own = *static_cast<Mma *>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) element_of(c, lane, i) = own.d[i];
        if (TF32) {
            gather_tf32(a, own.a, lane);
            for (int i = 0; i < 2; i++) b[t + 4 * i][g] = as_tf32(own.b[i]);
        } else {
            gather_bf16(a, own.a, lane);
            for (int i = 0; i < 2; i++) {
                b[2 * t + 8 * i][g] = low_bf16(own.b[i]);
                b[2 * t + 8 * i + 1][g] = high_bf16(own.b[i]);
            }
        }
    }
    multiply(c, a, b, TF32 ? 8 : 16);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) static_cast<Mma *>(lanes[lane])->d[i] = element_of(c, lane, i);
}
void do_mma_tf32(void *const lanes[32], unsigned mask) { multiply_warp<true>(lanes, mask); }
void do_mma_bf16(void *const lanes[32], unsigned mask) { multiply_warp<false>(lanes, mask); }

// ---- ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements ------------------------------------------------
// Lane 8 m + r provides the address of row r of matrix m.  Of each matrix a lane has elements (g, 2t) and (g, 2t + 1), or
// transposed (2t, g) and (2t + 1, g).

static uint16_t *element_of(void *const lanes[32], int matrix, int lane, int which, bool transposed) {
    const int along = lane % 4 * 2 + which, across = lane / 4;
    const int row = transposed ? along : across, column = transposed ? across : along;
    return static_cast<uint16_t *>(static_cast<Matrices *>(lanes[matrix * 8 + row])->row) + column;
}
static void check_rows(void *const lanes[32], unsigned mask, bool write) {
    if (mask != WHOLE_WARP) die("ldmatrix and stmatrix require a whole warp");
    for (int i = 0; i < static_cast<Matrices *>(lanes[0])->count * 8; i++) {
        void *row = static_cast<Matrices *>(lanes[i])->row;
        if (reinterpret_cast<uintptr_t>(row) % 16) die("ldmatrix or stmatrix: lane %d has a row not aligned to 16 bytes", i);
        if (write) kernel_writes(row, 16);
        else kernel_reads(row, 16);
    }
}
void do_load_matrices(void *const lanes[32], unsigned mask) {
    check_rows(lanes, mask, false);
    for (int lane = 0; lane < 32; lane++) {
        const Matrices &own = *static_cast<Matrices *>(lanes[lane]);
        for (int m = 0; m < own.count; m++)
            own.fragments[m] = *element_of(lanes, m, lane, 0, own.transposed) |
                static_cast<unsigned>(*element_of(lanes, m, lane, 1, own.transposed)) << 16;
    }
}
void do_store_matrices(void *const lanes[32], unsigned mask) {
    check_rows(lanes, mask, true);
    for (int lane = 0; lane < 32; lane++) {
        const Matrices &own = *static_cast<Matrices *>(lanes[lane]);
        for (int m = 0; m < own.count; m++)
            for (int i = 0; i < 2; i++)
                *element_of(lanes, m, lane, i, own.transposed) = static_cast<uint16_t>(own.fragments[m] >> 16 * i);
    }
}

// ---- wgmma --------------------------------------------------------------------------------------------------
// A descriptor of a matrix in shared memory, in units of 16 bytes: bits 0 to 13: start address; 16 to 29: leading offset; 32
// to 45: stride; 62 and 63: swizzle.  The emulator supports the 128-byte swizzle: within each 1024 bytes, the index of a
// 16-byte piece is XORed with the index of its 128-byte row.
//
// Contiguous in K: rows of 128 bytes, in groups of 8 rows, `stride` apart.  A product reads 32 bytes of each row.
// Transposed: rows of 64 elements of bfloat16 along m or n, one row per k; groups of 8 rows are `stride` apart, the next 64
// elements `leading`.
struct Descriptor {
    unsigned start, leading, stride;
    explicit Descriptor(uint64_t bits) : start(bits & 0x3fff), leading(bits >> 16 & 0x3fff), stride(bits >> 32 & 0x3fff) {
        if (bits >> 62 != 1) die("wgmma: the emulator knows the 128-byte swizzle only");
    }
    // The address of element (line, k); a line is a row of a or a column of b.
    const char *at(int line, int k, int size, bool transposed) const {
        const unsigned across = transposed ? k : line, byte = transposed ? line % 64 * 2 : k * size;
        unsigned address = start * 16 + across / 8 * stride * 16 + across % 8 * 128 + byte;
        if (transposed) address += line / 64 * leading * 16;
        address ^= (address >> 7 & 7) << 4;
        return current->dynamic_shared + address;
    }
};

static int size_of(Element element) { return element == Element::tf32 ? 4 : element == Element::bf16 ? 2 : 1; }
static float value_at(const Descriptor &d, Element element, int line, int k, bool transposed) {
    const char *const at = d.at(line, k, size_of(element), transposed);
    if (element == Element::tf32) return as_tf32(*reinterpret_cast<const unsigned *>(at));
    if (element == Element::bf16) return low_bf16(*reinterpret_cast<const uint16_t *>(at));
    return as_fp8(*reinterpret_cast<const uint8_t *>(at), element);
}
// Report the reads of the product to the sanitizers, once, in pieces of 16 bytes.
static void report_reads(const Descriptor &d, int first, int lines, int depth, int size, bool transposed) {
    if (!has_asan() && !has_tsan()) return;
    const int per_piece = 16 / size, line_step = transposed ? per_piece : 1, k_step = transposed ? 1 : per_piece;
    for (int line = first; line < first + lines; line += line_step)
        for (int k = 0; k < depth; k += k_step) kernel_reads(d.at(line, k, size, transposed), 16);
}

// The part of one of the four warps: 16 of the 64 rows.
void multiply_warpgroup(void *const lanes[32], unsigned mask) {
    if (mask != WHOLE_WARP) die("wgmma requires a whole warpgroup");
    const Wgmma &p = *static_cast<WgmmaOfLane *>(lanes[0])->product;
    const int size = size_of(p.element), depth = 32 / size, first = self()->warp % 4 * 16;
    float a[16][32], b[32][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Wgmma &own = *static_cast<WgmmaOfLane *>(lanes[lane])->product;
        if (own.a != p.a || own.b != p.b || own.n != p.n || own.accumulate != p.accumulate)
            die("wgmma: the lanes of a warp differ in a descriptor, or in whether they accumulate");
        if (!p.a_in_registers) continue;
        if (p.element == Element::tf32) gather_tf32(a, own.a_fragments, lane);
        else if (p.element == Element::bf16) gather_bf16(a, own.a_fragments, lane);
        else gather_fp8(a, own.a_fragments, lane, p.element);
    }
    if (!p.a_in_registers) {
        const Descriptor in(p.a);
        report_reads(in, first, 16, depth, size, p.a_transposed);
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < depth; k++) a[i][k] = value_at(in, p.element, first + i, k, p.a_transposed);
    }
    const Descriptor in(p.b);
    report_reads(in, 0, p.n, depth, size, p.b_transposed);
    for (int column = 0; column < p.n; column += 8) {
        for (int k = 0; k < depth; k++)
            for (int j = 0; j < 8; j++) b[k][j] = value_at(in, p.b_element, column + j, k, p.b_transposed);
        auto accumulators = [&](int lane) { return static_cast<WgmmaOfLane *>(lanes[lane])->accumulators + column / 2; };
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) element_of(c, lane, i) = p.accumulate ? accumulators(lane)[i] : 0.0f;
        multiply(c, a, b, depth);
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) accumulators(lane)[i] = element_of(c, lane, i);
    }
    release(&block->warp_order[self()->warp]);  // the last lane has reported all reads; see wgmma_wait
}
}
