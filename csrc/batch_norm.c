/* batch_norm.c - normalise channels to mean 0 and variance 1 over a batch, then scale and shift them.
 *
 * Rows of features and images of a few positions: threads share columns, in blocks whose sums stay in L1 during the loop over
 * rows; the P columns of a channel are then added.  Larger images: threads share channels, whose positions are contiguous in
 * each image.  A sum is computed from partial sums of ROWS rows, so that a long batch loses no more digits than a short one.
 */
#include <math.h>
#include "internal.h"

/* As in conv2d.c: threads are awake, and statistics are several passes over the numbers. */
#define SHARE (PYOPS_SHARE_FLOATS / 8)

enum { COLUMNS = 128 };
#define ROWS PYOPS_TUNED(batch_norm_rows, 64, 1, 128, 1)
#define FEW_POSITIONS PYOPS_TUNED(batch_norm_few_positions, 32, 0, COLUMNS, 1)

/* ---- few positions: rows (R, C P).  Arrays of columns have P equal values for each channel. ---- */

/* Replace each of the P values of a channel by their sum. */
static void sum_positions(float *columns, int64_t n, int64_t P) {
    for (int64_t c = 0; P > 1 && c < n; c += P) {
        float sum = columns[c];
        for (int64_t p = 1; p < P; p++) sum += columns[c + p];
        for (int64_t p = 0; p < P; p++) columns[c + p] = sum;
    }
}

static void spread(float *columns, const float *channels, int64_t n, int64_t P) {
    for (int64_t i = 0; i < n; i++) columns[i] = channels[i / P];
}

/* Mean and variance (n) of x (R,n), rows ldx apart; the sum of the deviations corrects both, as in layer norm. */
static void moments(const pyops_kernels *k, float *mean, float *variance, const float *x, int64_t R, int64_t n, int64_t ldx,
                    int64_t P) {
    float sums[COLUMNS] = {0}, part[COLUMNS], squares[COLUMNS] = {0}, deviations[COLUMNS] = {0}, part_squares[COLUMNS];
    const float share = 1.0f / (float)(R * P);
    for (int64_t r = 0; r < R; r += ROWS) {
        k->fill(part, n, 0.0f);
        for (int64_t i = r; i < pyops_min(r + ROWS, R); i++) k->add(part, x + i * ldx, n);
        k->add(sums, part, n);
    }
    sum_positions(sums, n, P);
    k->scale(mean, sums, share, n);
    for (int64_t r = 0; r < R; r += ROWS) {
        k->fill(part, n, 0.0f);
        k->fill(part_squares, n, 0.0f);
        for (int64_t i = r; i < pyops_min(r + ROWS, R); i++) k->add_deviations(part, part_squares, x + i * ldx, mean, n);
        k->add(deviations, part, n);
        k->add(squares, part_squares, n);
    }
    sum_positions(deviations, n, P);
    sum_positions(squares, n, P);
    for (int64_t c = 0; c < n; c++) {
        const float v = (squares[c] - deviations[c] * (deviations[c] * share)) * share;
        mean[c] += deviations[c] * share;
        variance[c] = v < 0.0f ? 0.0f : v;
    }
}

/* ---- images (R,C,P): x points to channel c of the first one; `image` is their stride ---- */

/* Positions of an image that are summed at a time, so that a large image loses no more digits than a small one. */
#define POSITIONS PYOPS_TUNED(batch_norm_positions, 4096, 16, 8192, 1)

static void moments_of_channel(const pyops_kernels *k, float *mean, float *variance, const float *x, int64_t R, int64_t P,
                               int64_t image) {
    const float share = 1.0f / (float)(R * P);
    double sum = 0.0, deviations = 0.0, squares = 0.0;
    for (int64_t r = 0; r < R; r++)
        for (int64_t p = 0; p < P; p += POSITIONS)
            sum += (double)k->sum_shifted(x + r * image + p, 0.0f, pyops_min(POSITIONS, P - p));
    const float center = (float)sum * share;
    for (int64_t r = 0; r < R; r++)
        for (int64_t p = 0; p < P; p += POSITIONS) {
            float two[2];
            k->deviations(two, x + r * image + p, center, pyops_min(POSITIONS, P - p));
            deviations += (double)two[0];
            squares += (double)two[1];
        }
    const double v = (squares - deviations * deviations * (double)share) * (double)share;
    mean[0] = center + (float)deviations * share;
    variance[0] = v < 0.0 ? 0.0f : (float)v;
}

static void run(float *running, const float *now, float momentum, float scale, int64_t n) {
    for (int64_t c = 0; running && c < n; c++) running[c] += momentum * (scale * now[c] - running[c]);
}

pyops_status pyops_batch_norm_forward(float *y, float *running_mean, float *running_var, float *mean, float *rstd,
                                      const float *x, const float *weight, const float *bias, int64_t R, int64_t C, int64_t P,
                                      float eps, float momentum, int32_t training, void *stream) {
    (void)stream;
    pyops_status status = check_batch_norm("batch_norm_forward", R, C, P, training);
    if (!status) status = check_eps("batch_norm_forward", eps);
    if (status) return status;
    PYOPS_REQUIRE(training || (running_mean && running_var),
                  "batch_norm_forward: running_mean or running_var is NULL, expected both outside training");
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (R * C * P > SHARE)
    for (int64_t c = 0; c < (P > FEW_POSITIONS ? C : 0); c++) {
        float variance;
        if (training) {
            moments_of_channel(k, mean + c, &variance, x + c * P, R, P, C * P);
            run(running_mean ? running_mean + c : NULL, mean + c, momentum, 1.0f, 1);
            run(running_var ? running_var + c : NULL, &variance, momentum, (float)(R * P) / (float)(R * P - 1), 1);
        } else {
            mean[c] = running_mean[c], variance = running_var[c];
        }
        rstd[c] = 1.0f / sqrtf(variance + eps);
        for (int64_t r = 0; r < R; r++)
            k->channel_norm(y + (r * C + c) * P, x + (r * C + c) * P, mean[c], rstd[c] * weight[c], bias[c], P);
    }
    const int64_t channels = pyops_max(COLUMNS / pyops_max(P, 1), 1);
    #pragma omp parallel for schedule(static) if (R * C * P > SHARE)
    for (int64_t c = 0; c < (P <= FEW_POSITIONS ? C : 0); c += channels) {
        const int64_t some = pyops_min(channels, C - c), n = some * P;
        float center[COLUMNS], variance[COLUMNS], scale[COLUMNS], factor[COLUMNS], shift[COLUMNS];
        if (training) moments(k, center, variance, x + c * P, R, n, C * P, P);
        else spread(center, running_mean + c, n, P), spread(variance, running_var + c, n, P);
        for (int64_t i = 0; i < n; i++) scale[i] = 1.0f / sqrtf(variance[i] + eps);
        const float unbiased = (float)(R * P) / (float)(R * P - 1);
        for (int64_t i = 0; training && i < some; i++) {
            mean[c + i] = center[i * P], rstd[c + i] = scale[i * P];
            run(running_mean ? running_mean + c + i : NULL, center + i * P, momentum, 1.0f, 1);
            run(running_var ? running_var + c + i : NULL, variance + i * P, momentum, unbiased, 1);
        }
        for (int64_t i = c; !training && i < c + some; i++)
            mean[i] = running_mean[i], rstd[i] = 1.0f / sqrtf(running_var[i] + eps);
        spread(factor, weight + c, n, P), spread(shift, bias + c, n, P);
        for (int64_t r = 0; r < R; r++)
            k->batch_norm(y + (r * C + c) * P, x + (r * C + c) * P, center, scale, factor, shift, n);
    }
    return PYOPS_OK;
}

pyops_status pyops_batch_norm_backward(float *dx, float *dweight, float *dbias, const float *dy, const float *x,
                                       const float *weight, const float *mean, const float *rstd, int64_t R, int64_t C,
                                       int64_t P, int32_t training, void *stream) {
    (void)stream;
    const pyops_status status = check_batch_norm("batch_norm_backward", R, C, P, training);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (R * C * P > SHARE)
    for (int64_t c = 0; c < (P > FEW_POSITIONS ? C : 0); c++) {
        double sum = 0.0, products = 0.0;
        for (int64_t r = 0; r < R; r++)
            for (int64_t p = 0; p < P; p += POSITIONS) {
                const int64_t at = (r * C + c) * P + p;
                float two[2];
                k->normed_sums(two, dy + at, x + at, mean[c], rstd[c], pyops_min(POSITIONS, P - p));
                sum += (double)two[0];
                products += (double)two[1];
            }
        dbias[c] += (float)sum;
        dweight[c] += (float)products;
        const double share = training ? 1.0 / (double)(R * P) : 0.0;    /* running statistics are constants */
        for (int64_t r = 0; r < R; r++) {
            const int64_t at = (r * C + c) * P;
            k->channel_norm_back(dx + at, dy + at, x + at, mean[c], rstd[c], weight[c] * rstd[c], (float)(sum * share),
                                 (float)(products * share), P);
        }
    }
    const int64_t channels = pyops_max(COLUMNS / pyops_max(P, 1), 1);
    #pragma omp parallel for schedule(static) if (R * C * P > SHARE)
    for (int64_t c = 0; c < (P <= FEW_POSITIONS ? C : 0); c += channels) {
        const int64_t some = pyops_min(channels, C - c), n = some * P;
        float sums[COLUMNS] = {0}, products[COLUMNS] = {0}, part[COLUMNS], part_products[COLUMNS];
        float center[COLUMNS], scale[COLUMNS], factor[COLUMNS];
        spread(center, mean + c, n, P), spread(scale, rstd + c, n, P), spread(factor, weight + c, n, P);
        for (int64_t r = 0; r < R; r += ROWS) {
            k->fill(part, n, 0.0f);
            k->fill(part_products, n, 0.0f);
            for (int64_t i = r; i < pyops_min(r + ROWS, R); i++)
                k->add_normed(part, part_products, dy + (i * C + c) * P, x + (i * C + c) * P, center, scale, n);
            k->add(sums, part, n);
            k->add(products, part_products, n);
        }
        sum_positions(sums, n, P);
        sum_positions(products, n, P);
        for (int64_t i = 0; i < some; i++) dbias[c + i] += sums[i * P], dweight[c + i] += products[i * P];
        const float share = training ? 1.0f / (float)(R * P) : 0.0f;    /* running statistics are constants */
        k->scale(sums, sums, share, n);
        k->scale(products, products, share, n);
        for (int64_t r = 0; r < R; r++) {
            const int64_t at = (r * C + c) * P;
            k->batch_norm_back(dx + at, dy + at, x + at, center, scale, factor, sums, products, n);
        }
    }
    return PYOPS_OK;
}
