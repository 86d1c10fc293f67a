/* packed.c - copies between packed rows and padded, time-major sequences. */
#include "internal.h"

static pyops_status check(const char *who, const int32_t *offsets, int64_t T, int64_t B, int64_t N, int64_t C, int64_t ldx) {
    const pyops_status status = check_pad(who, offsets, T, B, N, C, ldx);
    return status ? status : pyops_check_offsets(who, "offsets", offsets, T, B, N);
}

static int64_t row_of(const int32_t *offsets, int64_t t, int64_t b, int reverse) {
    return reverse ? offsets[b + 1] - 1 - t : offsets[b] + t;
}

pyops_status pyops_pad_rows(float *y, float *first, const float *x, const float *last, const int32_t *offsets, int64_t T,
                            int64_t B, int64_t N, int64_t C, int64_t ldx, int32_t reverse, void *stream) {
    (void)stream;
    const pyops_status status = check("pad_rows", offsets, T, B, N, C, ldx);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (T * B * C > PYOPS_SHARE_FLOATS)
    for (int64_t b = 0; b < B; b++) {
        const int64_t length = offsets[b + 1] - offsets[b];
        for (int64_t t = 0; t < T; t++) {
            float *y_t = y + (t * B + b) * C;
            if (t < length && x) pyops_copy(y_t, x + row_of(offsets, t, b, reverse) * ldx, C);
            else k->fill(y_t, C, 0.0f);
        }
        if (last && length) k->add(y + ((length - 1) * B + b) * C, last + b * C, C);
        if (!first) continue;
        if (last && !length) pyops_copy(first + b * C, last + b * C, C);
        else k->fill(first + b * C, C, 0.0f);
    }
    return PYOPS_OK;
}

pyops_status pyops_unpad_rows(float *x, float *last, const float *y, const float *first, const int32_t *offsets, int64_t T,
                              int64_t B, int64_t N, int64_t C, int32_t reverse, void *stream) {
    (void)stream;
    const pyops_status status = check("unpad_rows", offsets, T, B, N, C, C);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (T * B * C > PYOPS_SHARE_FLOATS)
    for (int64_t b = 0; b < B; b++) {
        const int64_t length = offsets[b + 1] - offsets[b];
        for (int64_t t = 0; t < length; t++) pyops_copy(x + row_of(offsets, t, b, reverse) * C, y + (t * B + b) * C, C);
        if (!last) continue;
        if (length) pyops_copy(last + b * C, y + ((length - 1) * B + b) * C, C);
        else if (first) pyops_copy(last + b * C, first + b * C, C);
        else k->fill(last + b * C, C, 0.0f);
    }
    return PYOPS_OK;
}
