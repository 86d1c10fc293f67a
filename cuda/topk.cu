// topk.cu - the k largest elements of each row and their log softmax, a block per row; the same for the logits of the
// output layer.
//
// An element and its column are one key of 64 bits, larger for a larger element and, of equal elements, for the first column.
// So the j-th largest element is the largest key below the previous one: each takes a pass over the row, which is in L2 after
// the first.  k is small, a beam's width.
#include "log_sum_exp.cuh"
#include "product.cuh"

namespace {
static constexpr int THREADS = 256, WARPS = THREADS / 32;
using Key = unsigned long long;

DEVICE Key key_of(float value, int64_t index) {
    const unsigned bits = __float_as_uint(value + 0.0f);        // -0 equals 0
    const unsigned order = value != value ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return Key(order) << 32 | ~static_cast<unsigned>(index);
}

// Every thread gets the largest key.  `shared` has one element per warp and can be reused at once.
DEVICE Key block_max(Key key, Key *shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const auto warp_max = [](Key mine) {
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const Key other = __shfl_xor_sync(ALL_LANES, mine, step);
            mine = other > mine ? other : mine;
        }
        return mine;
    };
    key = warp_max(key);
    if (lane == 0) shared[warp] = key;
    __syncthreads();
    key = warp_max(lane < WARPS ? shared[lane] : 0);
    __syncthreads();
    return key;
}

static __global__ void __launch_bounds__(THREADS) topk(int32_t *index, float *logp, const float *x, int64_t C, int64_t k) {
    SHARED(Key, keys, [WARPS]);
    SHARED(float, maxima, [WARPS]);
    SHARED(float, sums, [WARPS]);
    const int64_t r = blockIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x += r * C;
    LogSumExp found;
    Key best = 0;
    for (int64_t c = threadIdx.x; c < C; c += THREADS) {
        const float value[1] = {x[c]};
        found.add(value);
        const Key key = key_of(value[0], c);
        best = key > best ? key : best;
    }
    found = warp_log_sum_exp(found);
    if (lane == 0) maxima[warp] = found.max, sums[warp] = found.sum;
    __syncthreads();
    found = {maxima[0], sums[0]};
    for (int w = 1; w < WARPS; w++) found.add(LogSumExp{maxima[w], sums[w]});
    const float log_sum = logf(found.total());
    for (int64_t j = 0; j < k; j++) {
        if (j) {
            const Key before = best;
            best = 0;
            for (int64_t c = threadIdx.x; c < C; c += THREADS) {
                const Key key = key_of(x[c], c);
                if (key < before && key > best) best = key;
            }
        }
        best = block_max(best, keys);
        if (threadIdx.x > 0) continue;
        const int32_t c = static_cast<int32_t>(~static_cast<unsigned>(best));
        index[r * k + j] = c;
        logp[r * k + j] = x[c] - found.max - log_sum;
    }
}
}

extern "C" pyops_status pyops_log_softmax_topk(int32_t *index, float *logp, const float *x, int64_t R, int64_t C, int64_t k,
                                               void *stream) {
    const pyops_status status = check_topk("log_softmax_topk", R, C, k);
    if (status || R == 0) return status;
    return pyops_launched("log_softmax_topk",
                          LAUNCH(topk, static_cast<unsigned>(R), THREADS, 0, stream_of(stream), index, logp, x, C, k), stream);
}

extern "C" int64_t pyops_linear_topk_work(int64_t R, int64_t, int64_t V, int64_t) { return R * V; }

extern "C" pyops_status pyops_linear_topk(int32_t *index, float *logp, const float *x, const float *weight, const float *bias,
                                          float *work, int64_t R, int64_t D, int64_t V, int64_t k, void *stream) {
    pyops_status status = check_topk("linear_topk", R, V, k);
    if (!status) status = pyops_gemm(work, x, weight, bias, R, V, D, V, D, 1, 1, D, 0, 0, stream);
    return status ? status : pyops_log_softmax_topk(index, logp, work, R, V, k, stream);
}
