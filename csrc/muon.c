/* muon.c - the parts of Muon that are no matrix product: momentum and scaling, the polynomial of an iteration, the update.
 *
 * Matrices of one shape are updated together.  In the flat buffers they have any distance, so offsets give their starts; x is a
 * batch without gaps, for the batched products.
 */
#include <math.h>
#include <string.h>
#include "internal.h"

#define CHUNK PYOPS_TUNED(muon_chunk, 16384, 1, 32768, 1)

int64_t pyops_muon_momentum_work(int64_t count, int64_t n) { return 2 * count * ((n + CHUNK - 1) / CHUNK); }

pyops_status pyops_muon_momentum(float *x, float *m, const float *grad, const float *norm, const int64_t *offsets, float *work,
                                 int64_t count, int64_t n, float max_norm, float momentum, int32_t nesterov, void *stream) {
    (void)stream;
    const pyops_status status = check_muon_momentum(count, n, max_norm, momentum);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const float clip = pyops_clip_factor(norm, max_norm), rest = 1.0f - momentum;
    const float of_m = nesterov ? momentum : 1.0f, of_grad = nesterov ? rest * clip : 0.0f;
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    #pragma omp parallel for schedule(static) if (count * n > PYOPS_SHARE_FLOATS)
    for (int64_t c = 0; c < count * chunks; c++) {
        const int64_t b = c / chunks, first = c % chunks * CHUNK, length = pyops_min(CHUNK, n - first);
        const float *const restrict g = grad + offsets[b] + first;
        float *const restrict its_m = m + offsets[b] + first, *const restrict its_x = x + b * n + first;
        #pragma omp simd
        for (int64_t i = 0; i < length; i++) {
            its_m[i] = momentum * its_m[i] + rest * (clip * g[i]);
            its_x[i] = of_m * its_m[i] + of_grad * g[i];
        }
        double sum = 0.0;
        for (int64_t i = 0; i < length; i += PYOPS_GRAD_BLOCK)
            sum += k->sum_squares(its_x + i, pyops_min(PYOPS_GRAD_BLOCK, length - i));
        memcpy(work + 2 * c, &sum, sizeof sum);         /* a double in two floats */
    }
    #pragma omp parallel for schedule(static) if (count * n > PYOPS_SHARE_FLOATS)
    for (int64_t c = 0; c < count * chunks; c++) {
        const int64_t b = c / chunks, first = c % chunks * CHUNK, length = pyops_min(CHUNK, n - first);
        double sum = 0.0;
        for (int64_t i = b * chunks; i < (b + 1) * chunks; i++) {
            double s;
            memcpy(&s, work + 2 * i, sizeof s);
            sum += s;
        }
        const float factor = (float)(1.0 / fmax(sqrt(sum), PYOPS_MUON_EPS));
        float *const its_x = x + b * n + first;
        #pragma omp simd
        for (int64_t i = 0; i < length; i++) its_x[i] *= factor;
    }
    return PYOPS_OK;
}

pyops_status pyops_muon_polynomial(float *p, const float *a, int64_t count, int64_t n, float c1, float c2, float c3,
                                   void *stream) {
    (void)stream;
    const pyops_status status = check_muon("muon_polynomial", count, n);
    if (status) return status;
    #pragma omp parallel for schedule(static) if (count * n * n > PYOPS_SHARE_FLOATS)
    for (int64_t r = 0; r < count * n; r++) {
        float *const restrict its_p = p + r * n;
        const float *const restrict its_a = a + r * n;
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) its_p[i] = c3 * its_p[i] + c2 * its_a[i];
        its_p[r % n] += c1;
    }
    return PYOPS_OK;
}

pyops_status pyops_muon_update(float *param, const float *x, const int64_t *offsets, const float *lr, int64_t count, int64_t n,
                               float scale, float weight_decay, void *stream) {
    (void)stream;
    const pyops_status status = check_muon_update(count, n, weight_decay);
    if (status) return status;
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    const float keep = 1.0f - lr[0] * weight_decay, step = lr[0] * scale;
    #pragma omp parallel for schedule(static) if (count * n > PYOPS_SHARE_FLOATS)
    for (int64_t c = 0; c < count * chunks; c++) {
        const int64_t b = c / chunks, first = c % chunks * CHUNK, length = pyops_min(CHUNK, n - first);
        float *const restrict its_param = param + offsets[b] + first;
        const float *const restrict its_x = x + b * n + first;
        #pragma omp simd
        for (int64_t i = 0; i < length; i++) its_param[i] = keep * its_param[i] - step * its_x[i];
    }
    return PYOPS_OK;
}
