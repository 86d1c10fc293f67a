/* softmax.c - the softmax of attention scores in memory, for attention computed by separate products.
 *
 * There is one row per query; threads share rows.  Masks and dropout as in attention.c.
 */
#include <math.h>
#include "internal.h"

/* y = D x of row r; y may be x */
static void drop(const pyops_kernels *k, float *y, const float *x, int64_t r, int64_t Tk, const int64_t *step, float share,
                 uint64_t key) {
    k->dropout(y, x, r * (pyops_round_up(Tk, 4) / 4), Tk, (uint64_t)step[0], key, pyops_dropout_threshold(share),
               1.0f / (1.0f - share));
}

pyops_status pyops_attention_softmax_forward(float *p, float *w, const float *s, const int32_t *lengths,
                                             const int32_t *q_offsets, const int32_t *k_offsets, const int64_t *step,
                                             int64_t Tq, int64_t Tk, int64_t B, int64_t heads, int32_t causal, float scale,
                                             float share, uint64_t key, void *stream) {
    (void)stream;
    const char *const who = "attention_softmax_forward";
    pyops_status status = check_attention_softmax(who, lengths, k_offsets, Tq, Tk, B, heads, share);
    if (!status) status = pyops_check_lengths(who, lengths, q_offsets, k_offsets, Tq, Tk, B);
    if (status) return status;
    const int drops = step && share > 0.0f;
    PYOPS_REQUIRE(w || !drops, "attention_softmax_forward: w is NULL, expected an array for the weights after dropout");
    const pyops_kernels *k = pyops_active();
    const int64_t rows = B * heads * Tq;
    #pragma omp parallel for schedule(static) if (rows * Tk > PYOPS_SHARE_EXPS)
    for (int64_t r = 0; r < rows; r++) {
        const int64_t i = r % Tq, b = r / (heads * Tq);
        const int64_t queries = q_offsets ? q_offsets[b + 1] - q_offsets[b] : Tq;
        const int64_t keys = k_offsets ? k_offsets[b + 1] - k_offsets[b] : Tk, length = lengths ? lengths[b] : keys;
        const int64_t n = i >= queries ? 0 : causal ? pyops_max(0, pyops_min(length, i + 1 + keys - queries)) : length;
        float *p_r = p + r * Tk;
        k->scale(p_r, s + r * Tk, scale, n);
        const float max = k->max(p_r, n), sum = k->exp_sum(p_r, p_r, max, n);
        k->scale(p_r, p_r, 1.0f / sum, n);
        k->fill(p_r + n, Tk - n, 0.0f);
        if (drops) drop(k, w + r * Tk, p_r, r, Tk, step, share, key);
        else if (w) k->scale(w + r * Tk, p_r, 1.0f, Tk);
    }
    return PYOPS_OK;
}

pyops_status pyops_attention_softmax_backward(float *ds, const float *dw, const float *p, const int64_t *step, int64_t Tq,
                                              int64_t Tk, int64_t B, int64_t heads, float share, uint64_t key, void *stream) {
    (void)stream;
    const pyops_status status = check_attention_softmax("attention_softmax_backward", NULL, NULL, Tq, Tk, B, heads, share);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const int64_t rows = B * heads * Tq;
    const int drops = step && share > 0.0f;
    #pragma omp parallel for schedule(static) if (rows * Tk > (drops ? PYOPS_SHARE_EXPS : PYOPS_SHARE_FLOATS))
    for (int64_t r = 0; r < rows; r++) {
        if (drops) drop(k, ds + r * Tk, dw + r * Tk, r, Tk, step, share, key);
        k->softmax_row_back(ds + r * Tk, (drops ? ds : dw) + r * Tk, p + r * Tk, Tk);
    }
    return PYOPS_OK;
}
