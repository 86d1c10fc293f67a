// fragments.cuh - fragments of bfloat16 for tensor cores, from lines in shared memory.
//
// A line is a row with adjacent k's (K_INNER), or a k with adjacent rows: then ldmatrix transposes.  Lines are STRIDE elements
// apart, an odd multiple of 16 bytes, so the 8 lines of an 8 x 8 matrix are in different banks.
#pragma once
#include "gpu.cuh"

// Load 16 rows x 16 k's, starting at this row and k.  The first two registers are of the lower k's, as mma_bf16 expects of its
// left operand, unless ROWS_FIRST is false: then they are of the lower rows, and two registers each are a right operand.
template <int STRIDE, bool K_INNER, bool ROWS_FIRST>
DEVICE void fragment(unsigned (&x)[4], const __nv_bfloat16 *lines, int row, int k) {
    const int lane = lane_id(), low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    const int r = row + (ROWS_FIRST ? low : high), c = k + (ROWS_FIRST ? high : low);
    if constexpr (K_INNER) ldmatrix_x4(x, lines + (r + lane % 8) * STRIDE + c);
    else ldmatrix_x4_trans(x, lines + (c + lane % 8) * STRIDE + r);
}
