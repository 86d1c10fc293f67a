// fp8_encode.cu - codes and scales of a matrix in FP8, also of its transpose, for products by tensor cores (hopper_fp8.cu).
//
// A block of threads takes a tile of 128 x 128 numbers, which has whole blocks of scales of each kind, and keeps it in shared
// memory as floats:
//
//     warp w reads rows w, w + 8, ..                 the maximum of a row: by shuffles;  of a column: of each warp, then of all
//     a warp writes 128 codes of a row               the row of the codes:       a lane has 4 columns of the tile
//     a lane writes 16 codes of a column             the row of the transpose:   a lane has 16 rows of the tile
//
// So both copies are written from one read of x.  If the whole matrix has one scale, a launch before this one finds the maximum.
#include "amax.cuh"
#include "block.cuh"
#include "index.cuh"
#include "real.cuh"
#define FORMAT_INLINE static __host__ __device__ __forceinline__
#include "number_format.inc"

namespace {
static constexpr int THREADS = 256, WARPS = THREADS / 32, BLOCK = PYOPS_FP8_BLOCK;
static constexpr int PITCH = BLOCK + 4; // floats between rows of the tile, so that float4s of a row are aligned
static constexpr int BYTES = BLOCK * PITCH * int(sizeof(float));

struct Encoding {
    uint8_t *codes, *transposed; // or NULL
    float *scales, *transposed_scales;
    int64_t R, C, ldx, ld, transposed_ld, scale_rows, transposed_scale_rows;
    number_format f;
    int32_t blocks;
    const uint32_t *largest; // TENSOR: the words of find_amax, `count` of them
    unsigned count;
};

DEVICE float scale_of(uint32_t amax, const Encoding &e) { return number_scale(amax, 1.0f, e.f, PYOPS_SCALE_FLOAT, 0, 0); }
DEVICE uint32_t code(float x, float scale, const Encoding &e) {
    return code_of(round_scaled(x, scale, 0, e.f, PYOPS_ROUND_EVEN), e.f);
}
// Four adjacent codes as a word.
template <class Number> DEVICE uint32_t four_codes(Number number, float scale, const Encoding &e) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= code(number(i), scale, e) << 8 * i;
    return word;
}

// The maxima of all rows and columns of a tile, whose numbers outside x are zeros.
template <class T>
DEVICE void load_tile(float *tile, uint32_t *of_rows, uint32_t (*of_columns)[BLOCK], const T *x, int64_t ldx, int64_t rows,
                      int64_t columns) {
    const int lane = lane_id(), warp = threadIdx.x / 32;
    uint32_t amax[BLOCK / 32] = {};
    for (int r = warp; r < BLOCK; r += WARPS) {
        uint32_t of_row = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 32; i++) {
            const int c = lane + 32 * i;
            const float number = r < rows && c < columns ? as_float(x[r * ldx + c]) : 0.0f;
            tile[r * PITCH + c] = number;
            of_row = max(of_row, magnitude_of(number));
            amax[i] = max(amax[i], magnitude_of(number));
        }
        of_row = warp_largest(of_row);
        if (lane == 0) of_rows[r] = of_row;
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 32; i++) of_columns[warp][lane + 32 * i] = amax[i];
}

template <class T> static __global__ void __launch_bounds__(THREADS) fp8_encode(const T *x, Encoding e) {
    DYN_SHARED(float, tile);
    SHARED(uint32_t, of_rows, [BLOCK]);
    SHARED(uint32_t, of_columns, [WARPS][BLOCK]);
    SHARED(float, row_scales, [BLOCK]);
    SHARED(float, column_scales, [BLOCK]);
    wait_for_last_kernel();
    const int lane = lane_id(), warp = threadIdx.x / 32, i = threadIdx.x;
    const int64_t across = blocks_for<int64_t>(e.C, BLOCK), tiles = blocks_for<int64_t>(e.R, BLOCK) * across;
    const float whole = e.blocks == PYOPS_FP8_TENSOR ? scale_of(largest_of(e.largest, e.count), e) : 1.0f;
    if (e.blocks == PYOPS_FP8_TENSOR && blockIdx.x == 0 && i == 0) {
        if (e.codes) e.scales[0] = whole;
        if (e.transposed) e.transposed_scales[0] = whole;
    }
    for (int64_t task = blockIdx.x; task < tiles; task += gridDim.x) {
        const int64_t b = task / across, c = task % across, top = b * BLOCK, left = c * BLOCK;
        const int64_t rows = min(e.R - top, int64_t(BLOCK)), columns = min(e.C - left, int64_t(BLOCK));
        load_tile(tile, of_rows, of_columns, x + top * e.ldx + left, e.ldx, rows, columns);
        __syncthreads();
        if (i < BLOCK) {
            row_scales[i] = column_scales[i] = whole;
            if (e.blocks == PYOPS_FP8_SQUARES) {
                row_scales[i] = column_scales[i] = scale_of(largest_of(of_rows, BLOCK), e);
                if (e.codes && i == 0) e.scales[c * e.scale_rows + b] = row_scales[i];
                if (e.transposed && i == 0) e.transposed_scales[b * e.transposed_scale_rows + c] = row_scales[i];
            } else if (e.blocks == PYOPS_FP8_ROWS) {
                uint32_t amax = 0;
                for (int w = 0; w < WARPS; w++) amax = max(amax, of_columns[w][i]);
                row_scales[i] = scale_of(of_rows[i], e), column_scales[i] = scale_of(amax, e);
                if (e.codes && i < rows) e.scales[c * e.scale_rows + top + i] = row_scales[i];
                if (e.transposed && i < columns) e.transposed_scales[b * e.transposed_scale_rows + left + i] = column_scales[i];
            }
        }
        __syncthreads();
        // Rows end at a multiple of 16 bytes, so whole words fit: numbers beyond the last column have the code of 0.
        if (e.codes && 4 * lane < columns)
            for (int r = warp; r < rows; r += WARPS) {
                const float4 four = *reinterpret_cast<const float4 *>(tile + r * PITCH + 4 * lane);
                const float numbers[4] = {four.x, four.y, four.z, four.w};
                *reinterpret_cast<uint32_t *>(e.codes + (top + r) * e.ld + left +
                                              4 * lane) = four_codes([&](int j) { return numbers[j]; }, row_scales[r], e);
            }
        if (e.transposed)
            for (int task16 = i; task16 < BLOCK * BLOCK / 16; task16 += THREADS) {
                const int column = task16 % BLOCK, first = task16 / BLOCK * 16;
                if (column >= columns || first >= rows) continue;
                uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; w++)
                    words[w] = four_codes([&](int j) { return tile[(first + 4 * w + j) * PITCH + column]; },
                                          column_scales[column], e);
                *reinterpret_cast<uint4 *>(e.transposed + (left + column) * e.transposed_ld + top +
                                           first) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        __syncthreads(); // before the next tile is loaded
    }
}
}

extern "C" pyops_status pyops_fp8_encode(uint8_t *codes, uint8_t *transposed, float *scales, float *transposed_scales,
                                         const pyops_real *x, int64_t R, int64_t C, int64_t ldx, int64_t ld,
                                         int64_t transposed_ld, int32_t format, int32_t blocks, void *stream) {
    const pyops_status status = check_fp8_encode(codes, transposed, scales, transposed_scales, R, C, ldx, ld, transposed_ld,
                                                 format, blocks);
    if (status) return status;
    Encoding e = {codes,
                  transposed,
                  scales,
                  transposed_scales,
                  R,
                  C,
                  ldx,
                  fp8_ld(ld, C),
                  fp8_ld(transposed_ld, R),
                  fp8_scale_rows(R, blocks),
                  fp8_scale_rows(C, blocks),
                  number_formats[format],
                  blocks,
                  nullptr,
                  0};
    return with_type(
        "fp8_encode",
        [&](auto type) {
            using T = decltype(type);
            Launches launches;
            if (blocks == PYOPS_FP8_TENSOR) {
                uint32_t *largest;
                launches << find_amax_of(elements<T>(x), R, C, ldx, &largest, &e.count, stream);
                if (!largest) return no_memory_for_amax("fp8_encode", e.count);
                e.largest = largest;
            }
            const int64_t tiles = blocks_for<int64_t>(R, BLOCK) * blocks_for<int64_t>(C, BLOCK);
            launches << allow_shared<fp8_encode<T>>(BYTES);
            if (tiles || e.largest)
                launches << LAUNCH_DEPENDENT(fp8_encode<T>, grid_for(max(tiles, int64_t(1)) * THREADS, THREADS), THREADS, BYTES,
                                             stream_of(stream), elements<T>(x), e);
            return pyops_launched("fp8_encode", launches.error, stream);
        },
        x);
}
