/* pool2d.c - the maximum or the average of each window of a plane.
 *
 * Threads share planes.  A window inside the plane is the common case: rows and columns outside are cut off once per window.
 */
#include <math.h>
#include "internal.h"

#define SIZES \
    int64_t planes, int64_t H, int64_t W, int64_t Ho, int64_t Wo, int64_t kh, int64_t kw, int64_t stride_h, int64_t stride_w, \
        int64_t pad_h, int64_t pad_w

/* The steps [from, to) of a window that starts at `first` and are inside an axis of n elements. */
static pyops_range inside(int64_t first, int64_t steps, int64_t dilation, int64_t n) {
    const int64_t from = first < 0 ? (dilation - 1 - first) / dilation : 0;
    const int64_t to = n > first ? pyops_min(steps, (n - first + dilation - 1) / dilation) : 0;
    return (pyops_range){from, pyops_max(from, to)};
}

/* ---- maximum ---- */
pyops_status pyops_max_pool2d_forward(float *y, int32_t *index, const float *x, SIZES, int64_t dilation_h, int64_t dilation_w,
                                      void *stream) {
    (void)stream;
    const pyops_pool2d s = {planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w};
    const pyops_status status = check_pool2d("max_pool2d_forward", &s);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (planes * Ho * Wo * kh * kw > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < planes * Ho; i++) {
        const float *const plane = x + i / Ho * H * W;
        const int64_t top = i % Ho * stride_h - pad_h;
        const pyops_range rows = inside(top, kh, dilation_h, H);
        for (int64_t j = 0; j < Wo; j++) {
            const int64_t left = j * stride_w - pad_w;
            const pyops_range cols = inside(left, kw, dilation_w, W);
            float most = -INFINITY;
            int64_t at = rows.from < rows.to && cols.from < cols.to
                ? (top + rows.from * dilation_h) * W + left + cols.from * dilation_w
                : -1;
            for (int64_t a = rows.from; a < rows.to; a++)
                for (int64_t b = cols.from; b < cols.to; b++) {
                    const int64_t here = (top + a * dilation_h) * W + left + b * dilation_w;
                    const int is_more = plane[here] > most || plane[here] != plane[here];
                    most = is_more ? plane[here] : most;
                    at = is_more ? here : at;
                }
            y[i * Wo + j] = most;
            index[i * Wo + j] = (int32_t)at;
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_max_pool2d_backward(float *dx, const float *dy, const int32_t *index, SIZES, int64_t dilation_h,
                                       int64_t dilation_w, void *stream) {
    (void)stream;
    const pyops_pool2d s = {planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w};
    const pyops_status status = check_pool2d("max_pool2d_backward", &s);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (planes * (H * W + Ho * Wo) > PYOPS_SHARE_FLOATS)
    for (int64_t p = 0; p < planes; p++) {
        float *const plane = dx + p * H * W;
        memset(plane, 0, (size_t)(H * W) * sizeof *plane);
        for (int64_t i = p * Ho * Wo; i < (p + 1) * Ho * Wo; i++)
            if (index[i] >= 0) plane[index[i]] += dy[i];
    }
    return PYOPS_OK;
}

/* ---- average ---- */

/* One over the elements of a window that count. */
static float share(const pyops_pool2d *s, int64_t top, int64_t left, pyops_range rows, pyops_range cols, int32_t count_pad) {
    if (!count_pad) return 1.0f / (float)pyops_max((rows.to - rows.from) * (cols.to - cols.from), 1);
    return 1.0f / (float)(pyops_min(s->kh, s->H + s->pad_h - top) * pyops_min(s->kw, s->W + s->pad_w - left));
}

pyops_status pyops_avg_pool2d_forward(float *y, const float *x, SIZES, int32_t count_pad, void *stream) {
    (void)stream;
    const pyops_pool2d s = {planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, 1, 1};
    const pyops_status status = check_avg_pool2d("avg_pool2d_forward", &s);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (planes * Ho * Wo * kh * kw > PYOPS_SHARE_FLOATS)
    for (int64_t i = 0; i < planes * Ho; i++) {
        const float *const plane = x + i / Ho * H * W;
        const int64_t top = i % Ho * stride_h - pad_h;
        const pyops_range rows = inside(top, kh, 1, H);
        for (int64_t j = 0; j < Wo; j++) {
            const int64_t left = j * stride_w - pad_w;
            const pyops_range cols = inside(left, kw, 1, W);
            float sum = 0.0f;
            for (int64_t a = rows.from; a < rows.to; a++)
                for (int64_t b = cols.from; b < cols.to; b++) sum += plane[(top + a) * W + left + b];
            y[i * Wo + j] = sum * share(&s, top, left, rows, cols, count_pad);
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_avg_pool2d_backward(float *dx, const float *dy, SIZES, int32_t count_pad, void *stream) {
    (void)stream;
    const pyops_pool2d s = {planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, 1, 1};
    const pyops_status status = check_avg_pool2d("avg_pool2d_backward", &s);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (planes * (H * W + Ho * Wo * kh * kw) > PYOPS_SHARE_FLOATS)
    for (int64_t p = 0; p < planes; p++) {
        float *const plane = dx + p * H * W;
        memset(plane, 0, (size_t)(H * W) * sizeof *plane);
        for (int64_t i = 0; i < Ho; i++)
            for (int64_t j = 0; j < Wo; j++) {
                const int64_t top = i * stride_h - pad_h, left = j * stride_w - pad_w;
                const pyops_range rows = inside(top, kh, 1, H), cols = inside(left, kw, 1, W);
                const float d = dy[(p * Ho + i) * Wo + j] * share(&s, top, left, rows, cols, count_pad);
                for (int64_t a = rows.from; a < rows.to; a++)
                    for (int64_t b = cols.from; b < cols.to; b++) plane[(top + a) * W + left + b] += d;
            }
    }
    return PYOPS_OK;
}
