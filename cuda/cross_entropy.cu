// cross_entropy.cu - masked softmax cross entropy on logits in memory.
//
// Forward has two launches: a team of threads per row computes the maximum and the sum of exponentials in one pass, and with
// label smoothing the mean of x - maximum; then one block adds the losses of the valid rows.  Backward has one launch, also
// with a team per row.  A team is a warp (eight rows per block), or a whole block for long rows:
//
//     row of 10 logits     lane 0 1 2 .. 9 | the other lanes are idle
//     row of 50000         thread 0 1 2 .. 255 | 0 1 2 .. 255 | 0 1 2 ..         coalesced
#include "log_sum_exp.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t LONG_ROW = 1024;               // minimum length for a block per row
static constexpr int SUM_THREADS = 1024;                // threads of the block that adds the losses

namespace {                                             // names local to this file
// The sum of x - max over n logits; raise() adjusts it to a larger max.  No term is positive, so there is no cancellation.
struct Below {
    float sum = 0.0f, n = 0.0f;
    __device__ void raise(float max, float to) {
        if (n > 0.0f) sum += n * (max - to);
    }
};
}

// TEAM threads share a row: 32 or THREADS.  means: NULL, or (R) for the mean of x - max of each row.
template <int TEAM> static __global__ void __launch_bounds__(THREADS)
    row_sums(float *max, float *sum, float *means, const float *x, int64_t R, int64_t C) {
    constexpr int TEAMS = THREADS / TEAM, WARPS = TEAM / 32, AT_ONCE = 4;
    SHARED(float, maxima, [WARPS]);
    SHARED(float, sums, [WARPS]);
    SHARED(float, below_sums, [WARPS]);
    SHARED(float, counts, [WARPS]);
    const int member = threadIdx.x % TEAM, warp = member / 32;
    for (int64_t r = blockIdx.x * int64_t(TEAMS) + threadIdx.x / TEAM; r < R; r += int64_t(gridDim.x) * TEAMS) {
        LogSumExp found;
        Below below;
        for (int64_t c = member; c < C; c += AT_ONCE * TEAM) {
            float several[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) several[i] = c + i * TEAM < C ? x[r * C + c + i * TEAM] : -INFINITY;
            const float before = found.max;
            found.add(several);
            if (!means) continue;
            below.raise(before, found.max);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (c + i * TEAM < C) below.sum += several[i] - found.max, below.n += 1.0f;
        }
        const float own = found.max;
        found = warp_log_sum_exp(found);                // max is the same in all lanes
        if (means) {
            below.raise(own, found.max);
            below = {warp_sum(below.sum), warp_sum(below.n)};
        }
        if constexpr (WARPS > 1) {
            if (member % 32 == 0) {
                maxima[warp] = found.max;
                sums[warp] = found.sum;
                below_sums[warp] = below.sum;
                counts[warp] = below.n;
            }
            __syncthreads();
            if (member == 0)
                for (int w = 1; w < WARPS; w++) {
                    const float before = found.max;
                    Below other = {below_sums[w], counts[w]};
                    found.add(LogSumExp{maxima[w], sums[w]});
                    below.raise(before, found.max);
                    other.raise(maxima[w], found.max);
                    below = {below.sum + other.sum, below.n + other.n};
                }
            __syncthreads();                            // before the next row overwrites them
        }
        if (member == 0) {
            max[r] = found.max;
            sum[r] = found.total();
            if (means) means[r] = below.sum / below.n;
        }
    }
}

// The mean of the losses of the valid rows.  One block, so that the order of the sum is fixed.
static __global__ void __launch_bounds__(SUM_THREADS)
    mean_loss(float *loss, int32_t *valid, const float *max, const float *sum, const float *means, const float *x,
              const int32_t *labels, FaultRecord *faults, int64_t R, int64_t C, int32_t ignore, float smoothing) {
    SHARED(double, sums, [SUM_THREADS / 32]);
    SHARED(int, counts, [SUM_THREADS / 32]);
    double total = 0.0;
    int count = 0;
    for (int64_t r = threadIdx.x; r < R; r += SUM_THREADS) {
        const int32_t label = labels[r];
        if (label == ignore) continue;
        if (label < 0 || label >= C) {
            report(faults, Fault::label, Who::cross_entropy_forward, r, label, C - 1);
            continue;
        }
        total += logf(sum[r]) + (1.0f - smoothing) * (max[r] - x[r * C + label]) - (means ? smoothing * means[r] : 0.0f);
        count++;
    }
    total = block_sum(total, sums);
    count = block_sum(count, counts);
    if (threadIdx.x == 0) {
        valid[0] = count;
        loss[0] = count ? static_cast<float>(total / count) : 0.0f;
    }
}

template <int TEAM> static __global__ void __launch_bounds__(THREADS)
    backward(float *dx, const float *dloss, const float *x, const int32_t *labels, const float *max, const float *sum,
             const int32_t *valid, int64_t R, int64_t C, int32_t ignore, float smoothing) {
    constexpr int TEAMS = THREADS / TEAM;
    const float scale = valid[0] ? dloss[0] / static_cast<float>(valid[0]) : 0.0f;
    const float on_label = scale * (1.0f - smoothing), everywhere = scale * smoothing / static_cast<float>(C);
    for (int64_t r = blockIdx.x * int64_t(TEAMS) + threadIdx.x / TEAM; r < R; r += int64_t(gridDim.x) * TEAMS) {
        const int32_t label = labels[r];
        const float top = max[r], factor = scale / sum[r];
        const bool masked = label == ignore;
#pragma unroll 4
        for (int64_t c = threadIdx.x % TEAM; c < C; c += TEAM)
            dx[r * C + c] = masked ? 0.0f : factor * expf(x[r * C + c] - top) - (c == label ? on_label : 0.0f) - everywhere;
    }
}

extern "C" pyops_status pyops_cross_entropy_forward(float *loss, int32_t *valid, float *stats, const float *x,
                                                    const int32_t *labels, int64_t R, int64_t C, int32_t ignore,
                                                    float smoothing, void *stream) {
    const pyops_status status = check_cross_entropy("cross_entropy_forward", R, C, smoothing);
    if (status) return status;
    float *const means = smoothing > 0.0f ? static_cast<float *>(pyops_workspace(size_t(R) * sizeof(float))) : nullptr;
    if (smoothing > 0.0f && !means) return pyops_fail(PYOPS_NO_MEMORY, "cross_entropy_forward: no memory for %lld rows", LL(R));
    const int64_t team = C < LONG_ROW ? 32 : THREADS;
    Launches launches;
    if (R)
        launches << LAUNCH(team == 32 ? row_sums<32> : row_sums<THREADS>, grid_for(R * team, THREADS), THREADS, 0,
                           stream_of(stream), stats, stats + R, means, x, R, C);
    launches << LAUNCH(mean_loss, 1, SUM_THREADS, 0, stream_of(stream), loss, valid, stats, stats + R, means, x, labels,
                       pyops_faults(), R, C, ignore, smoothing);
    return pyops_launched("cross_entropy_forward", launches.error, stream);
}

extern "C" pyops_status pyops_cross_entropy_backward(float *dx, const float *dloss, const float *x, const int32_t *labels,
                                                     const float *stats, const int32_t *valid, int64_t R, int64_t C,
                                                     int32_t ignore, float smoothing, void *stream) {
    const pyops_status status = check_cross_entropy("cross_entropy_backward", R, C, smoothing);
    if (status || R == 0) return status;
    const int64_t team = C < LONG_ROW ? 32 : THREADS;
    return pyops_launched("cross_entropy_backward",
                          LAUNCH(team == 32 ? backward<32> : backward<THREADS>, grid_for(R * team, THREADS), THREADS, 0,
                                 stream_of(stream), dx, dloss, x, labels, stats, stats + R, valid, R, C, ignore, smoothing),
                          stream);
}
