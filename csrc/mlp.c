/* mlp.c - all gradients of a network of two linear layers on pixels in one operation, and its whole training step.
 *
 * On a GPU each of the two is one kernel instead of a dozen that would take longer to launch than to run.  Here they call
 * these dozen kernels in sequence: a reference for the GPU, not faster than the separate ops (docs/mlp.md).
 */
#include <string.h>
#include "internal.h"

/* Offsets in `work`, in floats. */
typedef struct { int64_t labels, valid, one, a, da, logits, dlogits, stats, ink, places, rest, size; } layout;

static layout make_layout(int64_t B, int64_t I, int64_t H, int64_t C) {
    layout l;
    int64_t at = 0;
    /* clang-format off */
    l.labels = at;      at += B;
    l.valid = at;       at += 1;
    l.one = at;         at += 1;
    l.a = at;           at += B * H;
    l.da = at;          at += B * H;
    l.logits = at;      at += B * C;
    l.dlogits = at;     at += B * C;
    l.stats = at;       at += 2 * B;
    l.ink = at;         at += B;
    l.places = at;      at += (B * (I + 8) + 1) / 2;        /* two uint16 in the space of a float */
    l.rest = at;        at += pyops_pixel_linear_backward_work(B, I, H);
    /* clang-format on */
    l.size = at;
    return l;
}

int64_t pyops_mlp_gradients_work(int64_t B, int64_t I, int64_t H, int64_t C) { return make_layout(B, I, H, C).size; }

#define TRY(call) \
    do { \
        const pyops_status tried = (call); \
        if (tried) return tried; \
    } while (0)

/* Check rows[first], ..., rows[end - 1] and their labels. */
static pyops_status check_labels(const char *who, const int64_t *rows, const int32_t *labels, int64_t N, int64_t first,
                                 int64_t end, int64_t C) {
    for (int64_t b = first; b < end; b++) {
        const int64_t row = rows[b];
        PYOPS_REQUIRE(row >= 0 && row < N, "%s: rows[%lld]=%lld, expected 0 to %lld", who, LL(b), LL(row), LL(N - 1));
        PYOPS_REQUIRE(labels[row] >= 0 && labels[row] < C, "%s: labels[%lld]=%d, expected 0 to %lld", who, LL(row), labels[row],
                      LL(C - 1));
    }
    return PYOPS_OK;
}

pyops_status pyops_mlp_gradients(float *loss, float *dw1, float *db1, float *dw2, float *db2, const uint8_t *table,
                                 const int64_t *rows, const int32_t *labels, const float *w1, const float *b1, const float *w2,
                                 const float *b2, float *work, int64_t N, int64_t B, int64_t I, int64_t H, int64_t C,
                                 float scale, void *stream) {
    TRY(check_mlp("mlp_gradients", N, B, I, H, C, scale));
    TRY(check_labels("mlp_gradients", rows, labels, N, 0, B, C));
    const layout l = make_layout(B, I, H, C);
    int32_t *const batch_labels = (int32_t *)(work + l.labels), *const ink = (int32_t *)(work + l.ink);
    uint16_t *const places = (uint16_t *)(work + l.places);
    float *const a = work + l.a, *const da = work + l.da, *const logits = work + l.logits, *const dlogits = work + l.dlogits;
    TRY(pyops_pixel_linear_forward(a, ink, places, table, rows, w1, b1, N, B, I, H, scale, stream));
    for (int64_t b = 0; b < B; b++) batch_labels[b] = labels[rows[b]];
    TRY(pyops_relu_forward(a, a, B * H, stream));
    TRY(pyops_gemm(logits, a, w2, b2, B, C, H, C, H, 1, 1, H, 0, 0, stream));
    TRY(pyops_cross_entropy_forward(loss, (int32_t *)(work + l.valid), work + l.stats, logits, batch_labels, B, C, -1, 0.0f,
                                    stream));
    work[l.one] = 1.0f;
    TRY(pyops_cross_entropy_backward(dlogits, work + l.one, logits, batch_labels, work + l.stats, (int32_t *)(work + l.valid),
                                     B, C, -1, 0.0f, stream));
    TRY(pyops_gemm(dw2, dlogits, a, NULL, C, H, B, H, 1, C, H, 1, 0, 0, stream));
    memset(db2, 0, (size_t)C * sizeof *db2);
    TRY(pyops_column_sums(db2, dlogits, B, C, stream));
    TRY(pyops_gemm(da, dlogits, w2, NULL, B, H, C, H, C, 1, H, 1, 0, 0, stream));
    TRY(pyops_relu_backward(da, da, a, B * H, stream));
    memset(dw1, 0, (size_t)(I * H) * sizeof *dw1);
    memset(db1, 0, (size_t)H * sizeof *db1);
    return pyops_pixel_linear_backward(dw1, db1, da, table, rows, ink, places, work + l.rest, N, B, I, H, scale, stream);
}

/* ---- the training step ---- */
int64_t pyops_mlp_step_work(int64_t B, int64_t I, int64_t H, int64_t C) {
    const int64_t largest = (I > C ? I : C) * H;         /* b2, with C floats, is not larger than w2 */
    return pyops_mlp_gradients_work(B, I, H, C) + 4 + pyops_grad_norm_work(largest > 4 ? largest : 4);
}

pyops_status pyops_mlp_step(float *loss, float *norm, float *norms, int64_t *step, float *param, float *grad, float *m,
                            float *v, const uint8_t *table, const int64_t *rows, const int32_t *labels, const float *lr,
                            float *work, int64_t N, int64_t K, int64_t B, int64_t I, int64_t H, int64_t C, int64_t w1,
                            int64_t b1, int64_t w2, int64_t b2, float scale, float max_norm, float beta1, float beta2,
                            float eps, float weight_decay, void *stream) {
    TRY(check_mlp("mlp_step", N, B, I, H, C, scale));
    TRY(check_mlp_step(K, w1, b1, w2, b2, max_norm, beta1, beta2, weight_decay));
    PYOPS_REQUIRE(step[0] >= 0, "mlp_step: step=%lld, expected at least 1", LL(step[0] + 1));
    const int64_t at[4] = {w1, b1, w2, b2}, size[4] = {I * H, H, C * H, C};
    float *const parts = work + pyops_mlp_gradients_work(B, I, H, C), *const rest = parts + 4;
    for (int64_t k = 0; k < K; k++) {
        TRY(check_labels("mlp_step", rows, labels, N, k * B, (k + 1) * B, C));
        TRY(pyops_mlp_gradients(loss + k, grad + w1, grad + b1, grad + w2, grad + b2, table, rows + k * B, labels, param + w1,
                                param + b1, param + w2, param + b2, work, N, B, I, H, C, scale, stream));
        if (norm) {                                     /* the norm of the four norms */
            for (int i = 0; i < 4; i++) TRY(pyops_grad_norm(parts + i, grad + at[i], NULL, rest, size[i], stream));
            TRY(pyops_grad_norm(norm, parts, NULL, rest, 4, stream));
            if (norms) norms[k] = norm[0];
        }
        TRY(pyops_increment(step, stream));
        for (int i = 0; i < 4; i++)
            TRY(pyops_adam(param + at[i], m + at[i], v + at[i], grad + at[i], NULL, norm, step, lr, size[i], max_norm, beta1,
                           beta2, eps, weight_decay, 0, stream));
    }
    return PYOPS_OK;
}
