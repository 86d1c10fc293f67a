// batch_norm.cu - normalise channels to mean 0 and variance 1 over a batch, then scale and shift.
//
// Images (R,C,P): a block per channel, which reads x once for the mean, once for the variance and once to normalise.
//
// Rows of features: a block has 32 columns and 16 warps.  A warp reads 32 adjacent elements of a row (coalesced), and a lane
// stays in its column.  Warp w takes rows w, w + 16, ... of a piece of 256 rows, so a lane has 16 numbers in registers:
//
//                 32 columns
//            +-----------------+
//    row 0   | warp 0          |    A lane sums its numbers, then the block adds its 16 warps in order, then pieces and groups
//        1   | warp 1          |    of rows are added in order: no sum has many terms, and the order is fixed.
//       ..   |  ..             |
//       15   | warp 15         |
//       16   | warp 0          |
//            +-----------------+
//
// If there are few rows, or enough columns for all multiprocessors, a block has all rows of its columns: one launch.
// Otherwise rows are divided into groups.  A first launch writes the sums of each group to the workspace; in a second launch
// every block combines the sums of its columns and then processes the rows of its group.
#include "block.cuh"

namespace {
static constexpr int COLUMNS = 32, WARPS = 16, HELD = 16, PIECE = WARPS * HELD;
static constexpr int MOST_GROUPS = 256;
static const dim3 BLOCK(COLUMNS, WARPS);

// ---- how the work is divided --------------------------------------------------------------------------------------------
struct Shares {
    int64_t R, C, rows; // rows: per group; the last group may have fewer
    int groups;
};

// The mean of n rows of a column, and the sum of the squared deviations from it.
struct Moments { float n, mean, squares; };

struct Statistics { float *running_mean, *running_var, *mean, *rstd; };
struct Saved { const float *dy, *x, *weight, *mean, *rstd; };

static Shares share(int64_t R, int64_t C) {
    const int64_t columns = blocks_for<int64_t>(C, COLUMNS), pieces = blocks_for<int64_t>(R, PIECE);
    int64_t groups = blocks_for<int64_t>(2 * pyops_multiprocessors(), columns); // two blocks per multiprocessor
    if (groups > MOST_GROUPS) groups = MOST_GROUPS;
    if (groups > pieces) groups = pieces > 0 ? pieces : 1;
    const int64_t rows = blocks_for<int64_t>(pieces, groups) * PIECE;
    return {R, C, rows, R > rows ? static_cast<int>(blocks_for<int64_t>(R, rows)) : 1};
}

static dim3 grid_of(const Shares &s) { return dim3(static_cast<unsigned>(blocks_for<int64_t>(s.C, COLUMNS)), s.groups); }

// The results of the first launch: two sums per group and column.
static float2 *workspace_for_sums(const Shares &s) {
    return static_cast<float2 *>(pyops_workspace(sizeof(float2) * static_cast<size_t>(s.groups) * static_cast<size_t>(s.C)));
}

DEVICE int64_t column() { return blockIdx.x * int64_t(COLUMNS) + threadIdx.x; }
DEVICE int64_t rows_in(const Shares &s, int64_t group) { return min(s.rows, s.R - group * s.rows); }

// ---- sums of a block ----------------------------------------------------------------------------------------------------
using Part = float[WARPS][COLUMNS];

// Add x over all warps, in order; every warp gets the sums.
DEVICE float sum_warps(float x, Part &part) {
    part[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += part[w][threadIdx.x];
    __syncthreads();
    return sum;
}

// The moments of the union of a and b: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
// sample variances".
DEVICE Moments join(Moments a, Moments b) {
    if (a.n == 0.0f || b.n == 0.0f) return a.n == 0.0f ? b : a;
    const float n = a.n + b.n, apart = b.mean - a.mean, part = b.n / n;
    return {n, a.mean + apart * part, a.squares + b.squares + apart * apart * a.n * part};
}

// The moments of the rows of a group.  The sum of the deviations, 0 except for rounding, corrects both moments, so a constant
// column has variance 0.
DEVICE Moments moments_of_rows(const float *x, const Shares &s, int64_t group, Part &part) {
    const int64_t c = column(), rows = rows_in(s, group);
    Moments all = {0.0f, 0.0f, 0.0f};
    x += group * s.rows * s.C + c;
    for (int64_t r = 0; r < rows; r += PIECE) {
        const int n = static_cast<int>(min(rows - r, int64_t(PIECE)));
        float held[HELD], sum = 0.0f, deviations = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int row = i * WARPS + threadIdx.y;
            held[i] = row < n && c < s.C ? x[(r + row) * s.C] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) sum += held[i];
        const float share = 1.0f / static_cast<float>(n), mean = sum_warps(sum, part) * share;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const float d = i * WARPS + static_cast<int>(threadIdx.y) < n ? held[i] - mean : 0.0f;
            deviations += d;
            squares += d * d;
        }
        deviations = sum_warps(deviations, part);
        squares = sum_warps(squares, part);
        const float corrected = squares - deviations * (deviations * share);
        all = join(all, {static_cast<float>(n), mean + deviations * share, corrected < 0.0f ? 0.0f : corrected});
    }
    return all;
}

// The moments of all groups: each warp merges some consecutive groups, then every warp merges the results of the warps.
DEVICE Moments moments_of_groups(const float2 *sums, const Shares &s, Part &means, Part &squares) {
    const int64_t c = column();
    const int each = (s.groups + WARPS - 1) / WARPS;
    Moments all = {0.0f, 0.0f, 0.0f};
    for (int g = threadIdx.y * each; g < min(static_cast<int>(threadIdx.y + 1) * each, s.groups); g++) {
        const float2 one = c < s.C ? sums[g * s.C + c] : make_float2(0.0f, 0.0f);
        all = join(all, {static_cast<float>(rows_in(s, g)), one.x, one.y});
    }
    means[threadIdx.y][threadIdx.x] = all.mean;
    squares[threadIdx.y][threadIdx.x] = all.squares;
    __syncthreads();
    all = {0.0f, 0.0f, 0.0f};
    for (int w = 0; w * each < s.groups; w++) {
        const int64_t first = w * each * s.rows, last = min((w + 1) * each * s.rows, s.R);
        all = join(all, {static_cast<float>(last - first), means[w][threadIdx.x], squares[w][threadIdx.x]});
    }
    return all;
}

// ---- forward ------------------------------------------------------------------------------------------------------------
static __global__ void __launch_bounds__(COLUMNS *WARPS, 2) group_moments(float2 *sums, const float *x, Shares s) {
    SHARED(float, part, [WARPS][COLUMNS]);
    const Moments m = moments_of_rows(x, s, blockIdx.y, part);
    if (threadIdx.y == 0 && column() < s.C) sums[blockIdx.y * s.C + column()] = make_float2(m.mean, m.squares);
}

// The source of mean and variance: the rows of this block (all rows), the sums of groups, or the running statistics.
enum class From { rows, groups, running };

template <From FROM>
static __global__ void __launch_bounds__(COLUMNS *WARPS, 2)
    normalise(float *y, Statistics out, const float *x, const float *weight, const float *bias, const float2 *sums, Shares s,
              float eps, float momentum) {
    SHARED(float, part, [WARPS][COLUMNS]);
    SHARED(float, more, [WARPS][COLUMNS]);
    const int64_t c = column(), rows = rows_in(s, blockIdx.y), first = blockIdx.y * s.rows;
    const bool writes = blockIdx.y == 0 && threadIdx.y == 0 && c < s.C;
    float mean = 0.0f, variance = 0.0f;
    if constexpr (FROM == From::running) {
        if (c < s.C) mean = out.running_mean[c], variance = out.running_var[c];
    } else {
        const Moments m = FROM == From::rows ? moments_of_rows(x, s, 0, part) : moments_of_groups(sums, s, part, more);
        const float n = static_cast<float>(s.R);
        mean = m.mean;
        variance = m.squares / n;
        if (writes && out.running_mean) out.running_mean[c] += momentum * (mean - out.running_mean[c]);
        if (writes && out.running_var) out.running_var[c] += momentum * (variance * (n / (n - 1.0f)) - out.running_var[c]);
    }
    const float rstd = 1.0f / sqrtf(variance + eps);
    if (writes) out.mean[c] = mean, out.rstd[c] = rstd;
    if (c >= s.C) return;
    const float w = weight[c], b = bias[c];
#pragma unroll 4
    for (int64_t r = threadIdx.y; r < rows; r += WARPS) {
        const int64_t at = (first + r) * s.C + c;
        y[at] = (x[at] - mean) * rstd * w + b;
    }
}
// ---- images ---------------------------------------------------------------------------------------------------------------
static constexpr int THREADS = 512;

// Offset of position i of channel blockIdx.x.
DEVICE int64_t in_channel(int64_t i, int64_t C, int64_t P) { return (i / P * C + blockIdx.x) * P + i % P; }

static __global__ void __launch_bounds__(THREADS)
    normalise_channel(float *y, Statistics out, const float *x, const float *weight, const float *bias, int64_t R, int64_t C,
                      int64_t P, float eps, float momentum, bool training) {
    SHARED(double, of_warps, [THREADS / 32]);
    const int64_t c = blockIdx.x, n = R * P;
    float mean, variance;
    if (training) {
        double sum = 0.0, squares = 0.0;
        for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += x[in_channel(i, C, P)];
        const double center = block_sum(sum, of_warps) / static_cast<double>(n);
        for (int64_t i = threadIdx.x; i < n; i += THREADS) {
            const double d = x[in_channel(i, C, P)] - center;
            squares += d * d;
        }
        squares = block_sum(squares, of_warps);
        mean = static_cast<float>(center), variance = static_cast<float>(squares / static_cast<double>(n));
        if (threadIdx.x == 0) {
            if (out.running_mean) out.running_mean[c] += momentum * (mean - out.running_mean[c]);
            const float unbiased = static_cast<float>(squares / static_cast<double>(n - 1));
            if (out.running_var) out.running_var[c] += momentum * (unbiased - out.running_var[c]);
        }
    } else {
        mean = out.running_mean[c], variance = out.running_var[c];
    }
    const float rstd = 1.0f / sqrtf(variance + eps), scale = rstd * weight[c], b = bias[c];
    if (threadIdx.x == 0) out.mean[c] = mean, out.rstd[c] = rstd;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        const int64_t at = in_channel(i, C, P);
        y[at] = (x[at] - mean) * scale + b;
    }
}

// dx may alias dy: the sums are complete before the first write.
static __global__ void __launch_bounds__(THREADS)
    channel_backward(float *dx, float *dweight, float *dbias, Saved in, int64_t R, int64_t C, int64_t P, bool training) {
    SHARED(double, of_warps, [THREADS / 32]);
    const int64_t c = blockIdx.x, n = R * P;
    const float mean = in.mean[c], rstd = in.rstd[c], factor = in.weight[c] * rstd;
    double sum = 0.0, products = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        const int64_t at = in_channel(i, C, P);
        sum += in.dy[at];
        products += in.dy[at] * ((in.x[at] - mean) * rstd);
    }
    sum = block_sum(sum, of_warps);
    products = block_sum(products, of_warps);
    if (threadIdx.x == 0) dbias[c] += static_cast<float>(sum), dweight[c] += static_cast<float>(products);
    const double share = training ? 1.0 / static_cast<double>(n) : 0.0; // fixed statistics have no gradient
    const float a = static_cast<float>(sum * share), b = static_cast<float>(products * share);
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        const int64_t at = in_channel(i, C, P);
        dx[at] = factor * (in.dy[at] - a - (in.x[at] - mean) * rstd * b);
    }
}
}

extern "C" pyops_status pyops_batch_norm_forward(float *y, float *running_mean, float *running_var, float *mean, float *rstd,
                                                 const float *x, const float *weight, const float *bias, int64_t R, int64_t C,
                                                 int64_t P, float eps, float momentum, int32_t training, void *stream) {
    pyops_status status = check_batch_norm("batch_norm_forward", R, C, P, training);
    if (!status) status = check_eps("batch_norm_forward", eps);
    if (status) return status;
    PYOPS_REQUIRE(training || (running_mean && running_var),
                  "batch_norm_forward: running_mean or running_var is NULL, expected both outside training");
    if (C == 0) return PYOPS_OK;
    const Statistics statistics = {running_mean, running_var, mean, rstd};
    if (P != 1)
        return pyops_launched("batch_norm_forward",
                              LAUNCH(normalise_channel, unsigned(C), THREADS, 0, stream_of(stream), y, statistics, x, weight,
                                     bias, R, C, P, eps, momentum, training != 0),
                              stream);
    const Shares s = share(R, C);
    float2 *sums = nullptr;
    Launches launches;
    if (!training) {
        launches << LAUNCH(normalise<From::running>, grid_of(s), BLOCK, 0, stream_of(stream), y, statistics, x, weight, bias,
                           sums, s, eps, momentum);
    } else if (s.groups == 1) {
        launches << LAUNCH(normalise<From::rows>, grid_of(s), BLOCK, 0, stream_of(stream), y, statistics, x, weight, bias, sums,
                           s, eps, momentum);
    } else {
        sums = workspace_for_sums(s);
        if (!sums) return pyops_fail(PYOPS_NO_MEMORY, "batch_norm_forward: no memory for the sums of %d groups", s.groups);
        launches << LAUNCH(group_moments, grid_of(s), BLOCK, 0, stream_of(stream), sums, x, s);
        launches << LAUNCH(normalise<From::groups>, grid_of(s), BLOCK, 0, stream_of(stream), y, statistics, x, weight, bias,
                           sums, s, eps, momentum);
    }
    return pyops_launched("batch_norm_forward", launches.error, stream);
}

// ---- backward -----------------------------------------------------------------------------------------------------------
namespace {
// The sums of dy and of dy * xhat over the rows of a group.
DEVICE float2 sums_of_rows(const Saved &in, const Shares &s, int64_t group, Part &part) {
    const int64_t c = column(), rows = rows_in(s, group);
    const float mean = c < s.C ? in.mean[c] : 0.0f, rstd = c < s.C ? in.rstd[c] : 0.0f;
    float2 all = make_float2(0.0f, 0.0f);
    for (int64_t r = 0; r < rows; r += PIECE) {
        float sum = 0.0f, products = 0.0f;
#pragma unroll 4
        for (int i = 0; i < HELD; i++) {
            const int64_t row = r + i * WARPS + threadIdx.y, at = (group * s.rows + row) * s.C + c;
            const bool there = row < rows && c < s.C;
            const float dy = there ? in.dy[at] : 0.0f, x = there ? in.x[at] : 0.0f;
            sum += dy;
            products += there ? dy * ((x - mean) * rstd) : 0.0f;
        }
        all.x += sum_warps(sum, part);
        all.y += sum_warps(products, part);
    }
    return all;
}

// The same over all groups: each warp adds every 16th group.
DEVICE float2 sums_of_groups(const float2 *sums, const Shares &s, Part &part) {
    float2 all = make_float2(0.0f, 0.0f);
    if (column() < s.C)
        for (int g = threadIdx.y; g < s.groups; g += WARPS) {
            const float2 one = sums[g * s.C + column()];
            all.x += one.x;
            all.y += one.y;
        }
    all.x = sum_warps(all.x, part);
    all.y = sum_warps(all.y, part);
    return all;
}

static __global__ void __launch_bounds__(COLUMNS *WARPS, 2) group_sums(float2 *sums, Saved in, Shares s) {
    SHARED(float, part, [WARPS][COLUMNS]);
    const float2 all = sums_of_rows(in, s, blockIdx.y, part);
    if (threadIdx.y == 0 && column() < s.C) sums[blockIdx.y * s.C + column()] = all;
}

// dx may alias dy: a block has read all of dy that its sums need before it writes its rows.
template <bool GROUPS>
static __global__ void __launch_bounds__(COLUMNS *WARPS, 2)
    backward(float *dx, float *dweight, float *dbias, Saved in, const float2 *sums, Shares s, float share) {
    SHARED(float, part, [WARPS][COLUMNS]);
    const int64_t c = column(), rows = rows_in(s, blockIdx.y), first = blockIdx.y * s.rows;
    const float2 all = GROUPS ? sums_of_groups(sums, s, part) : sums_of_rows(in, s, 0, part);
    if (c >= s.C) return;
    if (blockIdx.y == 0 && threadIdx.y == 0) dbias[c] += all.x, dweight[c] += all.y;
    const float mean = in.mean[c], rstd = in.rstd[c], factor = in.weight[c] * rstd, a = all.x * share, b = all.y * share;
#pragma unroll 4
    for (int64_t r = threadIdx.y; r < rows; r += WARPS) {
        const int64_t at = (first + r) * s.C + c;
        dx[at] = factor * (in.dy[at] - a - (in.x[at] - mean) * rstd * b);
    }
}
}

extern "C" pyops_status pyops_batch_norm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                                  const float *weight, const float *mean, const float *rstd, int64_t R,
                                                  int64_t C, int64_t P, int32_t training, void *stream) {
    const pyops_status status = check_batch_norm("batch_norm_backward", R, C, P, training);
    if (status || C == 0) return status;
    const Saved saved = {dy, x, weight, mean, rstd};
    if (P != 1)
        return pyops_launched("batch_norm_backward",
                              LAUNCH(channel_backward, unsigned(C), THREADS, 0, stream_of(stream), dx, dweight, dbias, saved, R,
                                     C, P, training != 0),
                              stream);
    const Shares s = share(R, C);
    const float part = training ? 1.0f / static_cast<float>(R) : 0.0f; // fixed statistics have no gradient
    float2 *sums = nullptr;
    Launches launches;
    if (s.groups == 1) {
        launches << LAUNCH(backward<false>, grid_of(s), BLOCK, 0, stream_of(stream), dx, dweight, dbias, saved, sums, s, part);
    } else {
        sums = workspace_for_sums(s);
        if (!sums) return pyops_fail(PYOPS_NO_MEMORY, "batch_norm_backward: no memory for the sums of %d groups", s.groups);
        launches << LAUNCH(group_sums, grid_of(s), BLOCK, 0, stream_of(stream), sums, saved, s);
        launches << LAUNCH(backward<true>, grid_of(s), BLOCK, 0, stream_of(stream), dx, dweight, dbias, saved, sums, s, part);
    }
    return pyops_launched("batch_norm_backward", launches.error, stream);
}
