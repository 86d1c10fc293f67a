/* checks.h - argument checks that the CPU and the CUDA library share.
 *
 * They read sizes, scalars and whether a pointer is NULL; arrays with strides and shapes are in host memory.  The contents of
 * other arrays are checked by each library itself: a GPU cannot read ids or labels without a copy.
 * The including file defines pyops_fail, PYOPS_REQUIRE and LL.
 */
#ifndef PYOPS_CHECKS_H
#define PYOPS_CHECKS_H

/* N: the number of packed rows, 0 without offsets */
static inline pyops_status check_packed(const char *who, const int32_t *offsets, int64_t T, int64_t B, int64_t N) {
    PYOPS_REQUIRE(offsets || !N, "%s: N=%lld without offsets, expected 0", who, LL(N));
    PYOPS_REQUIRE(N >= 0 && N <= INT32_MAX && N <= T * B, "%s: N=%lld T=%lld B=%lld, expected N from 0 to T * B and below 2^31",
                  who, LL(N), LL(T), LL(B));
    return PYOPS_OK;
}

static inline pyops_status check_pad(const char *who, const int32_t *offsets, int64_t T, int64_t B, int64_t N, int64_t C,
                                     int64_t ldx) {
    PYOPS_REQUIRE(
        offsets && T >= 1 && B >= 0 && C >= 0 && ldx >= C,
        "%s: T=%lld B=%lld C=%lld ldx=%lld, expected offsets, T of at least 1, B and C of at least 0, ldx of at least C", who,
        LL(T), LL(B), LL(C), LL(ldx));
    return check_packed(who, offsets, T, B, N);
}

static inline pyops_status check_gru(const char *who, const pyops_real *x, const int32_t *lengths, const int32_t *offsets,
                                     int64_t T, int64_t B, int64_t N, int64_t I, int64_t H, int32_t reverse) {
    PYOPS_REQUIRE(T >= 1 && B >= 0 && I >= 0 && H >= 1,
                  "%s: T=%lld B=%lld I=%lld H=%lld, expected T and H of at least 1, B and I of at least 0", who, LL(T), LL(B),
                  LL(I), LL(H));
    PYOPS_REQUIRE(!I == !x, "%s: I=%lld, expected 0 if x is NULL, else at least 1", who, LL(I));
    PYOPS_REQUIRE(!lengths || !offsets, "%s: lengths with offsets, expected NULL", who);
    PYOPS_REQUIRE(!reverse || offsets, "%s: reverse=%d without offsets, expected 0", who, reverse);
    return check_packed(who, offsets, T, B, N);
}

static inline pyops_status check_rnn(const char *who, const float *c0, const float *gates, const float *b_ih, const float *b_hh,
                                     int64_t T, int64_t B, int64_t I, int64_t H, int32_t cell) {
    PYOPS_REQUIRE(T >= 1 && B >= 0 && I >= 1 && H >= 1,
                  "%s: T=%lld B=%lld I=%lld H=%lld, expected T, I and H of at least 1, B of at least 0", who, LL(T), LL(B),
                  LL(I), LL(H));
    PYOPS_REQUIRE(cell >= PYOPS_CELL_TANH && cell <= PYOPS_CELL_LSTM, "%s: cell=%d, expected 0 to %d", who, cell,
                  PYOPS_CELL_LSTM);
    PYOPS_REQUIRE((cell == PYOPS_CELL_LSTM) == !!gates, "%s: cell=%d, expected gates with an LSTM, else NULL", who, cell);
    PYOPS_REQUIRE(cell == PYOPS_CELL_LSTM || !c0, "%s: cell=%d with c0, expected NULL without an LSTM", who, cell);
    PYOPS_REQUIRE(!b_ih == !b_hh, "%s: one of two biases, expected both or none", who);
    return PYOPS_OK;
}

static inline pyops_status check_gru_step(const char *who, int64_t B, int64_t H, int32_t stage) {
    PYOPS_REQUIRE(B >= 0 && H >= 1, "%s: B=%lld H=%lld, expected B >= 0, H >= 1", who, LL(B), LL(H));
    PYOPS_REQUIRE(stage >= PYOPS_GRU_AFTER && stage <= PYOPS_GRU_BEFORE_2, "%s: stage=%d, expected 0 to %d", who, stage,
                  PYOPS_GRU_BEFORE_2);
    return PYOPS_OK;
}

/* layer norm and cross entropy: rows with at least one element */
static inline pyops_status check_rows(const char *who, int64_t R, int64_t C) {
    PYOPS_REQUIRE(R >= 0 && C >= 1, "%s: R=%lld C=%lld, expected R >= 0, C >= 1", who, LL(R), LL(C));
    return PYOPS_OK;
}

static inline pyops_status check_softmax(const char *who, int64_t outer, int64_t n, int64_t inner) {
    PYOPS_REQUIRE(outer >= 0 && n >= 0 && inner >= 0, "%s: outer=%lld n=%lld inner=%lld, expected at least 0", who, LL(outer),
                  LL(n), LL(inner));
    return PYOPS_OK;
}

static inline pyops_status check_eps(const char *who, float eps) {
    PYOPS_REQUIRE(eps >= 0.0f, "%s: eps=%g, expected at least 0", who, (double)eps);
    return PYOPS_OK;
}

/* A single value has no variance. */
static inline pyops_status check_batch_norm(const char *who, int64_t R, int64_t C, int64_t P, int32_t training) {
    PYOPS_REQUIRE(R >= 0 && C >= 0 && P >= 0, "%s: R=%lld C=%lld P=%lld, expected at least 0", who, LL(R), LL(C), LL(P));
    PYOPS_REQUIRE(R * P >= 2 || !training,
                  "%s: R=%lld P=%lld, expected at least 2 values per channel in training: one has no variance", who, LL(R),
                  LL(P));
    return PYOPS_OK;
}

/* The sizes of a convolution, in the order of the ABI. */
typedef struct {
    int64_t N, C, H, W, O, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
} pyops_conv2d;

static inline pyops_status check_conv2d(const char *who, const pyops_conv2d *s) {
    PYOPS_REQUIRE(s->N >= 0 && s->C >= 1 && s->H >= 1 && s->W >= 1 && s->O >= 1 && s->Ho >= 1 && s->Wo >= 1,
                  "%s: N=%lld C=%lld H=%lld W=%lld O=%lld Ho=%lld Wo=%lld, expected N of at least 0, all others at least 1",
                  who, LL(s->N), LL(s->C), LL(s->H), LL(s->W), LL(s->O), LL(s->Ho), LL(s->Wo));
    PYOPS_REQUIRE(s->kh >= 1 && s->kw >= 1 && s->stride_h >= 1 && s->stride_w >= 1 && s->dilation_h >= 1 && s->dilation_w >= 1,
                  "%s: kh=%lld kw=%lld stride=(%lld, %lld) dilation=(%lld, %lld), expected at least 1", who, LL(s->kh),
                  LL(s->kw), LL(s->stride_h), LL(s->stride_w), LL(s->dilation_h), LL(s->dilation_w));
    PYOPS_REQUIRE(s->pad_h >= 0 && s->pad_w >= 0, "%s: padding=(%lld, %lld), expected at least 0", who, LL(s->pad_h),
                  LL(s->pad_w));
    PYOPS_REQUIRE(s->groups >= 1 && s->C % s->groups == 0 && s->O % s->groups == 0,
                  "%s: groups=%lld, expected a divisor of C=%lld and O=%lld", who, LL(s->groups), LL(s->C), LL(s->O));
    return PYOPS_OK;
}

/* The sizes of a pooling, in the order of the ABI. */
typedef struct { int64_t planes, H, W, Ho, Wo, kh, kw, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w; } pyops_pool2d;

static inline pyops_status check_pool2d(const char *who, const pyops_pool2d *s) {
    PYOPS_REQUIRE(s->planes >= 0 && s->H >= 1 && s->W >= 1 && s->Ho >= 1 && s->Wo >= 1,
                  "%s: planes=%lld H=%lld W=%lld Ho=%lld Wo=%lld, expected planes of at least 0, all others at least 1", who,
                  LL(s->planes), LL(s->H), LL(s->W), LL(s->Ho), LL(s->Wo));
    PYOPS_REQUIRE(s->H * s->W <= INT32_MAX, "%s: H=%lld W=%lld, expected a product below 2^31", who, LL(s->H), LL(s->W));
    PYOPS_REQUIRE(s->kh >= 1 && s->kw >= 1 && s->stride_h >= 1 && s->stride_w >= 1 && s->dilation_h >= 1 && s->dilation_w >= 1,
                  "%s: kh=%lld kw=%lld stride=(%lld, %lld) dilation=(%lld, %lld), expected at least 1", who, LL(s->kh),
                  LL(s->kw), LL(s->stride_h), LL(s->stride_w), LL(s->dilation_h), LL(s->dilation_w));
    PYOPS_REQUIRE(s->pad_h >= 0 && s->pad_w >= 0, "%s: padding=(%lld, %lld), expected at least 0", who, LL(s->pad_h),
                  LL(s->pad_w));
    return PYOPS_OK;
}

/* Every window starts inside the padded plane, so it has elements that count. */
static inline pyops_status check_avg_pool2d(const char *who, const pyops_pool2d *s) {
    const pyops_status status = check_pool2d(who, s);
    if (status) return status;
    PYOPS_REQUIRE((s->Ho - 1) * s->stride_h < s->H + 2 * s->pad_h && (s->Wo - 1) * s->stride_w < s->W + 2 * s->pad_w,
                  "%s: Ho=%lld Wo=%lld, expected windows that start inside the padded plane of H=%lld W=%lld", who, LL(s->Ho),
                  LL(s->Wo), LL(s->H), LL(s->W));
    return PYOPS_OK;
}

static inline pyops_status check_smoothing(const char *who, float smoothing) {
    PYOPS_REQUIRE(smoothing >= 0.0f && smoothing < 1.0f, "%s: smoothing=%g, expected 0 <= smoothing < 1", who,
                  (double)smoothing);
    return PYOPS_OK;
}

static inline pyops_status check_cross_entropy(const char *who, int64_t R, int64_t C, float smoothing) {
    const pyops_status status = check_rows(who, R, C);
    return status ? status : check_smoothing(who, smoothing);
}

static inline pyops_status check_linear_cross_entropy(const pyops_real *dx, const float *dweight, const float *dbias,
                                                      const float *dloss, int64_t R, int64_t D, int64_t V, float smoothing) {
    PYOPS_REQUIRE(R >= 0 && D >= 1 && V >= 1, "linear_cross_entropy: R=%lld D=%lld V=%lld, expected R >= 0, D >= 1, V >= 1",
                  LL(R), LL(D), LL(V));
    PYOPS_REQUIRE(!dweight == !dx && !dbias == !dx, "linear_cross_entropy: dx, dweight and dbias: expected all or none");
    PYOPS_REQUIRE(!dloss || dx, "linear_cross_entropy: dloss without dx, dweight and dbias, expected NULL");
    return check_smoothing("linear_cross_entropy", smoothing);
}

static inline pyops_status check_embedding(const char *who, int64_t R, int64_t V, int64_t E) {
    PYOPS_REQUIRE(R >= 0 && V >= 0 && E >= 0, "%s: R=%lld V=%lld E=%lld, expected at least 0", who, LL(R), LL(V), LL(E));
    return PYOPS_OK;
}

static inline pyops_status check_convert(int64_t R, int64_t C, int64_t ldy, int64_t ldx) {
    PYOPS_REQUIRE(R >= 0 && C >= 0 && ldy >= C && ldx >= C,
                  "convert: R=%lld C=%lld ldy=%lld ldx=%lld, expected R and C of at least 0, ldy and ldx of at least C", LL(R),
                  LL(C), LL(ldy), LL(ldx));
    return PYOPS_OK;
}

static inline pyops_status check_embedding_linear(const char *who, const float *context, const int32_t *offsets, int64_t T,
                                                  int64_t B, int64_t N, int64_t V, int64_t E, int64_t C, int64_t O) {
    PYOPS_REQUIRE(T >= 0 && B >= 0 && V >= 1 && E >= 1 && C >= 0 && O >= 1,
                  "%s: T=%lld B=%lld V=%lld E=%lld C=%lld O=%lld, expected V, E and O of at least 1, the others of at least 0",
                  who, LL(T), LL(B), LL(V), LL(E), LL(C), LL(O));
    PYOPS_REQUIRE(!C == !context, "%s: C=%lld, expected 0 if context is NULL, else at least 1", who, LL(C));
    return check_packed(who, offsets, T, B, N);
}

static inline pyops_status check_gather(const char *who, int64_t N, int64_t B, int64_t C) {
    PYOPS_REQUIRE(N >= 0 && B >= 0 && C >= 0, "%s: N=%lld B=%lld and rows of %lld, expected at least 0", who, LL(N), LL(B),
                  LL(C));
    return PYOPS_OK;
}

static inline pyops_status check_pack(const char *who, int64_t N, int64_t B, int64_t total) {
    PYOPS_REQUIRE(N >= 0 && B >= 0 && total >= 0 && total <= INT32_MAX,
                  "%s: N=%lld B=%lld total=%lld, expected total from 0 to 2^31 - 1, N and B of at least 0", who, LL(N), LL(B),
                  LL(total));
    return PYOPS_OK;
}

static inline pyops_status check_positions(const int32_t *positions, int64_t T, int64_t B, int64_t D, int64_t longest) {
    PYOPS_REQUIRE(T >= 0 && B >= 0 && D >= 0 && longest >= 0,
                  "add_positions_forward: T=%lld B=%lld D=%lld longest=%lld, expected at least 0", LL(T), LL(B), LL(D),
                  LL(longest));
    PYOPS_REQUIRE(positions || T <= longest, "add_positions_forward: T=%lld, expected at most longest=%lld", LL(T),
                  LL(longest));
    return PYOPS_OK;
}

static inline pyops_status check_scatter_rows(int64_t N, int64_t R, int64_t C, int64_t ldy, int64_t ldx) {
    PYOPS_REQUIRE(N >= 0 && R >= 0 && C >= 0 && ldy >= C && ldx >= C,
                  "scatter_rows: N=%lld R=%lld C=%lld ldy=%lld ldx=%lld, expected N, R and C of at least 0, ldy and ldx of at "
                  "least C",
                  LL(N), LL(R), LL(C), LL(ldy), LL(ldx));
    return PYOPS_OK;
}

static inline pyops_status check_gather_rows(int64_t T, int64_t N, int64_t R, int64_t C) {
    PYOPS_REQUIRE(T >= 0 && N >= 0 && R >= 0 && C >= 0, "gather_rows: T=%lld N=%lld R=%lld C=%lld, expected at least 0", LL(T),
                  LL(N), LL(R), LL(C));
    return PYOPS_OK;
}

static inline pyops_status check_topk(const char *who, int64_t R, int64_t C, int64_t k) {
    PYOPS_REQUIRE(R >= 0 && C >= 1 && C <= INT32_MAX, "%s: R=%lld classes=%lld, expected R >= 0, classes from 1 to 2^31 - 1",
                  who, LL(R), LL(C));
    PYOPS_REQUIRE(k >= 1 && k <= PYOPS_TOPK && k <= C, "%s: k=%lld, expected 1 to %lld", who, LL(k),
                  LL(C < PYOPS_TOPK ? C : PYOPS_TOPK));
    return PYOPS_OK;
}

static inline pyops_status check_pixel_linear(const char *who, int64_t N, int64_t B, int64_t I, int64_t O, float scale) {
    PYOPS_REQUIRE(N >= 0 && B >= 0 && I >= 0 && I < 65536 && O >= 0,
                  "%s: N=%lld B=%lld I=%lld O=%lld, expected I from 0 to 65535, the others of at least 0", who, LL(N), LL(B),
                  LL(I), LL(O));
    PYOPS_REQUIRE(scale == scale, "%s: scale is NaN, expected a number", who);
    return PYOPS_OK;
}

static inline pyops_status check_dropout_p(const char *who, float p) {
    PYOPS_REQUIRE(p >= 0.0f && p < 1.0f, "%s: p=%g, expected 0 <= p < 1", who, (double)p);
    return PYOPS_OK;
}

static inline pyops_status check_dropout(const char *who, int64_t n, float p) {
    PYOPS_REQUIRE(n >= 0, "%s: n=%lld, expected at least 0", who, LL(n));
    return check_dropout_p(who, p);
}

static inline pyops_status check_embedding_positions(const char *who, int64_t R, int64_t V, int64_t E, int64_t longest,
                                                     float p) {
    const pyops_status status = check_embedding(who, R, V, E);
    if (status) return status;
    PYOPS_REQUIRE(longest >= 1, "%s: longest=%lld, expected at least 1", who, LL(longest));
    return check_dropout_p(who, p);
}

static inline pyops_status check_residual_norm(const char *who, int64_t R, int64_t C, float p, float eps) {
    pyops_status status = check_rows(who, R, C);
    if (!status) status = check_dropout_p(who, p);
    return status ? status : check_eps(who, eps);
}

static inline pyops_status check_residual_norm_backward(const pyops_real *dbranch, const int64_t *step, int64_t R, int64_t C,
                                                        float p) {
    const pyops_status status = check_residual_norm("residual_norm_backward", R, C, p, 0.0f);
    if (status) return status;
    PYOPS_REQUIRE(!dbranch == !(step && p > 0.0f), "residual_norm_backward: dbranch: expected %s",
                  dbranch ? "NULL without dropout" : "an array with dropout");
    return PYOPS_OK;
}

static inline pyops_status check_attention(const char *who, const int32_t *lengths, const int32_t *k_offsets, int64_t Tq,
                                           int64_t Tk, int64_t B, int64_t heads, int64_t C, float p) {
    PYOPS_REQUIRE(!lengths || !k_offsets, "%s: lengths and k_offsets, expected one of them to be NULL", who);
    PYOPS_REQUIRE(Tq >= 0 && Tk >= 0 && B >= 0 && heads >= 1 && C >= 1,
                  "%s: Tq=%lld Tk=%lld B=%lld heads=%lld C=%lld, expected heads and C of at least 1, the others of at least 0",
                  who, LL(Tq), LL(Tk), LL(B), LL(heads), LL(C));
    return check_dropout_p(who, p);
}

/* The distance of rows of an array of attention. */
static inline pyops_status check_attention_rows(const char *who, const char *name, int64_t ld, int64_t heads, int64_t C) {
    PYOPS_REQUIRE(ld >= heads * C, "%s: %s=%lld, expected at least heads * C = %lld", who, name, LL(ld), LL(heads * C));
    return PYOPS_OK;
}

static inline pyops_status check_attention_softmax(const char *who, const int32_t *lengths, const int32_t *k_offsets,
                                                   int64_t Tq, int64_t Tk, int64_t B, int64_t heads, float p) {
    PYOPS_REQUIRE(!lengths || !k_offsets, "%s: lengths and k_offsets, expected one of them to be NULL", who);
    PYOPS_REQUIRE(Tq >= 0 && Tk >= 0 && B >= 0 && heads >= 1,
                  "%s: Tq=%lld Tk=%lld B=%lld heads=%lld, expected heads of at least 1, the others of at least 0", who, LL(Tq),
                  LL(Tk), LL(B), LL(heads));
    return check_dropout_p(who, p);
}

enum { PYOPS_MLP_WIDEST = 128 };        /* of H and of C */

static inline pyops_status check_mlp(const char *who, int64_t N, int64_t B, int64_t I, int64_t H, int64_t C, float scale) {
    PYOPS_REQUIRE(N >= 0 && B >= 1 && I >= 0 && I < 65536 && H >= 1 && H <= PYOPS_MLP_WIDEST && C >= 1 && C <= PYOPS_MLP_WIDEST,
                  "%s: N=%lld B=%lld I=%lld H=%lld C=%lld, expected B >= 1, I < 65536, H and C from 1 to %d", who, LL(N), LL(B),
                  LL(I), LL(H), LL(C), PYOPS_MLP_WIDEST);
    PYOPS_REQUIRE(scale == scale, "%s: scale is NaN, expected a number", who);
    return PYOPS_OK;
}

static inline pyops_status check_max_norm(const char *who, int64_t n, float max_norm) {
    PYOPS_REQUIRE(n >= 0, "%s: n=%lld, expected at least 0", who, LL(n));
    PYOPS_REQUIRE(max_norm > 0.0f, "%s: max_norm=%g, expected max_norm > 0", who, (double)max_norm);
    return PYOPS_OK;
}

static inline pyops_status check_weight_decay(const char *who, float weight_decay) {
    PYOPS_REQUIRE(weight_decay >= 0.0f, "%s: weight_decay=%g, expected at least 0", who, (double)weight_decay);
    return PYOPS_OK;
}

static inline pyops_status check_adam(const char *who, int64_t n, float max_norm, float beta1, float beta2,
                                      float weight_decay) {
    const pyops_status status = check_max_norm(who, n, max_norm);
    if (status) return status;
    PYOPS_REQUIRE(beta1 >= 0.0f && beta1 < 1.0f && beta2 >= 0.0f && beta2 < 1.0f,
                  "%s: beta1=%g beta2=%g, expected 0 <= beta < 1", who, (double)beta1, (double)beta2);
    return check_weight_decay(who, weight_decay);
}

static inline pyops_status check_decaying_rate(int64_t warmup, int64_t hold, int64_t total, int32_t decay) {
    PYOPS_REQUIRE(warmup >= 0 && hold >= 0 && total >= 0,
                  "decaying_rate: warmup=%lld hold=%lld total=%lld, expected at least 0", LL(warmup), LL(hold), LL(total));
    PYOPS_REQUIRE(decay >= 0 && decay <= PYOPS_DECAY_LINEAR, "decaying_rate: decay=%d, expected 0 to %d", decay,
                  PYOPS_DECAY_LINEAR);
    return PYOPS_OK;
}

static inline pyops_status check_sgd(const float *velocity, int64_t n, float max_norm, float momentum, float dampening,
                                     float weight_decay) {
    const pyops_status status = check_max_norm("sgd", n, max_norm);
    if (status) return status;
    PYOPS_REQUIRE(momentum >= 0.0f && momentum < 1.0f, "sgd: momentum=%g, expected 0 <= momentum < 1", (double)momentum);
    PYOPS_REQUIRE(velocity || momentum == 0.0f, "sgd: momentum=%g, expected 0 if velocity is NULL", (double)momentum);
    PYOPS_REQUIRE(dampening >= 0.0f && dampening <= 1.0f, "sgd: dampening=%g, expected 0 to 1", (double)dampening);
    return check_weight_decay("sgd", weight_decay);
}

static inline pyops_status check_log_step(int64_t steps, int64_t capacity) {
    PYOPS_REQUIRE(steps >= 1 && steps <= capacity, "log_step: steps=%lld capacity=%lld, expected 1 <= steps <= capacity",
                  LL(steps), LL(capacity));
    return PYOPS_OK;
}

static inline pyops_status check_grad_norm_logged(int64_t n, int64_t capacity) {
    PYOPS_REQUIRE(n >= 0 && capacity >= 1, "grad_norm_logged: n=%lld capacity=%lld, expected n >= 0 and capacity >= 1", LL(n),
                  LL(capacity));
    return PYOPS_OK;
}

static inline pyops_status check_mlp_step(int64_t K, int64_t w1, int64_t b1, int64_t w2, int64_t b2, float max_norm,
                                          float beta1, float beta2, float weight_decay) {
    PYOPS_REQUIRE(K >= 1, "mlp_step: K=%lld, expected at least 1", LL(K));
    PYOPS_REQUIRE(w1 >= 0 && b1 >= 0 && w2 >= 0 && b2 >= 0,
                  "mlp_step: w1=%lld b1=%lld w2=%lld b2=%lld, expected offsets of at least 0", LL(w1), LL(b1), LL(w2), LL(b2));
    return check_adam("mlp_step", 0, max_norm, beta1, beta2, weight_decay);
}

static inline pyops_status check_ema(int64_t n, float decay) {
    PYOPS_REQUIRE(n >= 0, "ema: n=%lld, expected at least 0", LL(n));
    PYOPS_REQUIRE(decay >= 0.0f && decay < 1.0f, "ema: decay=%g, expected 0 <= decay < 1", (double)decay);
    return PYOPS_OK;
}

/* Matrices that are updated together are blocks along the second axis of a grid. */
enum { PYOPS_MOST_MATRICES = 65535 };
#define PYOPS_MUON_EPS 1e-7             /* a smaller norm counts as this */

static inline pyops_status check_muon(const char *who, int64_t count, int64_t n) {
    PYOPS_REQUIRE(count >= 0 && count <= PYOPS_MOST_MATRICES && n >= 0,
                  "%s: count=%lld n=%lld, expected count from 0 to %d, n >= 0", who, LL(count), LL(n), PYOPS_MOST_MATRICES);
    return PYOPS_OK;
}

static inline pyops_status check_muon_momentum(int64_t count, int64_t n, float max_norm, float momentum) {
    const pyops_status status = check_muon("muon_momentum", count, n);
    if (status) return status;
    PYOPS_REQUIRE(momentum >= 0.0f && momentum < 1.0f, "muon_momentum: momentum=%g, expected 0 <= momentum < 1",
                  (double)momentum);
    return check_max_norm("muon_momentum", n, max_norm);
}

static inline pyops_status check_muon_update(int64_t count, int64_t n, float weight_decay) {
    const pyops_status status = check_muon("muon_update", count, n);
    return status ? status : check_weight_decay("muon_update", weight_decay);
}

/* A shape in host memory: of strided arrays, and of the batch axes of gemm_batched. */
enum { PYOPS_AXES = 8 };

static inline pyops_status check_shape(const char *who, const int64_t *shape, int64_t ndim) {
    PYOPS_REQUIRE(ndim >= 0 && ndim <= PYOPS_AXES, "%s: ndim=%lld, expected 0 to %d", who, LL(ndim), PYOPS_AXES);
    for (int64_t d = 0; d < ndim; d++)
        PYOPS_REQUIRE(shape[d] >= 0, "%s: shape[%lld]=%lld, expected at least 0", who, LL(d), LL(shape[d]));
    return PYOPS_OK;
}

static inline pyops_status check_op(const char *who, int32_t op, int32_t last) {
    PYOPS_REQUIRE(op >= 0 && op <= last, "%s: op=%d, expected 0 to %d", who, op, last);
    return PYOPS_OK;
}

static inline pyops_status check_no_division(const char *who, int32_t op) {
    PYOPS_REQUIRE(op != PYOPS_OP_DIVIDE, "%s: int32 has no division, expected float32", who);
    return PYOPS_OK;
}

static inline pyops_status check_strided(const char *who, int32_t op, int32_t last, const int64_t *shape, int64_t ndim) {
    const pyops_status status = check_op(who, op, last);
    return status ? status : check_shape(who, shape, ndim);
}

static inline pyops_status check_gemm(const char *who, int64_t M, int64_t N, int64_t K, int64_t ldc) {
    PYOPS_REQUIRE(M >= 0 && N >= 0 && K >= 0, "%s: M=%lld N=%lld K=%lld, expected at least 0", who, LL(M), LL(N), LL(K));
    PYOPS_REQUIRE(ldc >= N, "%s: ldc=%lld, expected at least N=%lld", who, LL(ldc), LL(N));
    return PYOPS_OK;
}

static inline pyops_status check_linear(const pyops_real *dx, int64_t R, int64_t O, int64_t I, int32_t relu,
                                        int32_t accumulate) {
    PYOPS_REQUIRE(R >= 0 && O >= 0 && I >= 0, "linear_backward: R=%lld O=%lld I=%lld, expected at least 0", LL(R), LL(O),
                  LL(I));
    PYOPS_REQUIRE(!relu || (dx && !accumulate),
                  "linear_backward: relu=%d accumulate=%d, expected dx, and one of the two at most", relu, accumulate);
    return PYOPS_OK;
}

static inline pyops_status check_layer(const char *who, int64_t R, int64_t O, int64_t I) {
    PYOPS_REQUIRE(R >= 0 && O >= 0 && I >= 0, "%s: R=%lld O=%lld I=%lld, expected at least 0", who, LL(R), LL(O), LL(I));
    return PYOPS_OK;
}

static inline pyops_status check_linear_activation(const char *who, int64_t R, int64_t O, int64_t I, int32_t activation) {
    const pyops_status status = check_layer(who, R, O, I);
    if (status) return status;
    PYOPS_REQUIRE(activation >= PYOPS_SILU && activation <= PYOPS_GELU_TANH,
                  "%s: activation=%d, expected 0 (SiLU), 1 (GELU) or 2 (GELU with tanh)", who, activation);
    return PYOPS_OK;
}

static inline pyops_status check_linear_activation_backward(const pyops_real *dx, int64_t R, int64_t O, int64_t I,
                                                            int32_t activation) {
    PYOPS_REQUIRE(dx, "linear_activation_backward: dx is NULL, expected an array");
    return check_linear_activation("linear_activation_backward", R, O, I, activation);
}

static inline pyops_status check_linear_residual(const char *who, int64_t R, int64_t O, int64_t I, float p) {
    const pyops_status status = check_layer(who, R, O, I);
    return status ? status : check_dropout_p(who, p);
}

static inline pyops_status check_linear_residual_norm(const char *who, int64_t R, int64_t O, int64_t I, float p, float eps) {
    const pyops_status status = check_linear_residual(who, R, O, I, p);
    return status ? status : check_residual_norm(who, R, O, p, eps);
}

static inline pyops_status check_linear_pair(const char *who, int64_t R1, int64_t R2, int64_t O1, int64_t O2, int64_t I1,
                                             int64_t I2) {
    PYOPS_REQUIRE(R1 >= 0 && R2 >= 0 && O1 >= 0 && O2 >= 0 && I1 >= 0 && I2 >= 0,
                  "%s: R1=%lld R2=%lld O1=%lld O2=%lld I1=%lld I2=%lld, expected at least 0", who, LL(R1), LL(R2), LL(O1),
                  LL(O2), LL(I1), LL(I2));
    return PYOPS_OK;
}

static inline pyops_status check_to_bf16(int64_t R, int64_t C, int64_t ld) {
    PYOPS_REQUIRE(R >= 0 && C >= 0 && ld >= C, "to_bf16: R=%lld C=%lld ld=%lld, expected R >= 0, C >= 0, ld >= C", LL(R), LL(C),
                  LL(ld));
    return PYOPS_OK;
}

static inline pyops_status check_gemm_bf16(int64_t M, int64_t N, int64_t K, int64_t ldc, int64_t lda, int64_t ldb) {
    PYOPS_REQUIRE(M >= 0 && N >= 0 && K >= 0 && ldc >= N && lda >= K && ldb >= K,
                  "gemm_bf16: M=%lld N=%lld K=%lld ldc=%lld lda=%lld ldb=%lld, "
                  "expected sizes of at least 0, ldc >= N, lda >= K, ldb >= K",
                  LL(M), LL(N), LL(K), LL(ldc), LL(lda), LL(ldb));
    return PYOPS_OK;
}

/* ---- products in FP8 ---- */
static inline pyops_status check_fp8_format(const char *who, const char *name, int32_t format, int32_t blocks) {
    PYOPS_REQUIRE(format == PYOPS_E4M3 || format == PYOPS_E5M2, "%s: %sformat=%d, expected %d or %d", who, name, format,
                  PYOPS_E4M3, PYOPS_E5M2);
    PYOPS_REQUIRE(blocks >= PYOPS_FP8_TENSOR && blocks <= PYOPS_FP8_SQUARES, "%s: %sblocks=%d, expected 0 to %d", who, name,
                  blocks, PYOPS_FP8_SQUARES);
    return PYOPS_OK;
}

/* The codes of rows of n elements, or NULL;  ld: 0 for the least */
static inline pyops_status check_fp8_codes(const char *who, const char *name, const uint8_t *codes, int64_t ld, int64_t n) {
    PYOPS_REQUIRE(!codes || ((!ld || ld >= n) && ld % 16 == 0 && (uintptr_t)codes % 16 == 0),
                  "%s: %s=%lld, expected a multiple of 16 of at least %lld, or 0, and codes aligned to 16 bytes", who, name,
                  LL(ld), LL(n));
    return PYOPS_OK;
}
static inline int64_t fp8_ld(int64_t ld, int64_t n) { return ld ? ld : (n + 15) / 16 * 16; }

static inline pyops_status check_fp8_encode(const uint8_t *codes, const uint8_t *transposed, const float *scales,
                                            const float *transposed_scales, int64_t R, int64_t C, int64_t ldx, int64_t ld,
                                            int64_t transposed_ld, int32_t format, int32_t blocks) {
    PYOPS_REQUIRE(R >= 0 && C >= 0 && ldx >= C, "fp8_encode: R=%lld C=%lld ldx=%lld, expected at least 0, and ldx >= C", LL(R),
                  LL(C), LL(ldx));
    PYOPS_REQUIRE(!codes == !scales && !transposed == !transposed_scales, "fp8_encode: codes without scales, expected both");
    pyops_status status = check_fp8_format("fp8_encode", "", format, blocks);
    if (!status) status = check_fp8_codes("fp8_encode", "ld", codes, ld, C);
    if (!status) status = check_fp8_codes("fp8_encode", "transposed_ld", transposed, transposed_ld, R);
    return status;
}

static inline pyops_status check_gemm_fp8(const uint8_t *a, const uint8_t *b, int64_t M, int64_t N, int64_t K, int64_t ldc,
                                          int64_t lda, int64_t ldb, int32_t a_format, int32_t b_format, int32_t a_blocks,
                                          int32_t b_blocks) {
    pyops_status status = check_gemm("gemm_fp8", M, N, K, ldc);
    if (!status) status = check_fp8_format("gemm_fp8", "a_", a_format, a_blocks);
    if (!status) status = check_fp8_format("gemm_fp8", "b_", b_format, b_blocks);
    if (!status) status = check_fp8_codes("gemm_fp8", "lda", a, lda, K);
    if (!status) status = check_fp8_codes("gemm_fp8", "ldb", b, ldb, K);
    return status;
}

/* The scales of a matrix of so many rows for each 128 elements of a row. */
static inline int64_t fp8_scale_rows(int64_t rows, int32_t blocks) {
    return blocks == PYOPS_FP8_ROWS ? rows : blocks == PYOPS_FP8_SQUARES ? (rows + PYOPS_FP8_BLOCK - 1) / PYOPS_FP8_BLOCK : 0;
}

#endif
