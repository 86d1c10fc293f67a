/* gru.c - a gated recurrent unit over a whole sequence.
 *
 * The input product of all steps is one product, or the caller's.  Then the rows of the batch are independent, so each thread
 * takes its rows through all T steps and no thread waits for another; the recurrent weights are packed once for all steps.
 * Backward walks the steps in reverse the same way and leaves the gate gradients of all steps in `dgates`, from which
 * dx and the weight gradients come as one product each over all steps.
 *
 * w_hh is used in two parts, [r z] (2H,H) and n (H,H), where they are multiplied with different things: in backward, and in
 * forward with the reset gate before the product (h and r * h).
 */
#include <omp.h>
#include <string.h>
#include "internal.h"

/* ---- recurrent products: w (K,N), packed, or where it lies for few rows ---- */
typedef struct { pyops_view at; int64_t K, N; float *packed; } weight;

static weight weight_of(pyops_view at, int64_t K, int64_t N, float *packed, int64_t B) {
    return (weight){at, K, N, B > PYOPS_FEW_ROWS ? packed : NULL};
}

/* By all threads, each its share; they have to meet before it is used. */
static void pack(const pyops_kernels *k, const weight *w) {
    if (!w->packed) return;
    #pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < w->N; j += k->NR) pyops_pack_b(k, w->packed, w->at, w->K, w->N, j, pyops_min(j + k->NR, w->N));
}

/* c (M,N) = a w + bias; K is that of w, or 0 where a is zeros, of which nothing comes but the bias */
static void multiply(const pyops_kernels *k, float *c, int64_t ldc, pyops_view a, const weight *w, const float *bias,
                     int64_t M, int64_t K, int flags, float *scratch) {
    if (w->packed) pyops_product_packed(k, c, ldc, a, w->packed, bias, M, w->N, K, 0, w->N, flags, scratch);
    else pyops_product(k, c, ldc, a, w->at, bias, M, w->N, K, flags, scratch);
}

/* ---- work: where its parts begin, in floats ---- */
typedef struct { int64_t rz, n, rows, sums, total; } layout;

static layout forward_layout(const pyops_kernels *k, int64_t B, int64_t H, int before) {
    layout l = {0};                                     /* packed: w_hh[r z]' (H,2H) and w_hh[n]' (H,H), or w_hh' (H,3H) */
    l.n = pyops_packed_b_size(k, H, before ? 2 * H : 3 * H);
    l.rows = l.n + (before ? pyops_packed_b_size(k, H, H) : 0);         /* recurrent products of one step (B,3H) */
    l.total = l.rows + B * 3 * H;
    return l;
}

static layout backward_layout(const pyops_kernels *k, int64_t B, int64_t H) {
    layout l = {0};
    l.n = pyops_packed_b_size(k, 2 * H, H);             /* w_hh[r z] packed (2H,H), then w_hh[n] (H,H) */
    l.rows = l.n + pyops_packed_b_size(k, H, H);        /* dh of one step, zeros: (B,H) each */
    l.sums = l.rows + 2 * B * H;                        /* of dgates, for the biases */
    l.total = l.sums + 4 * H;
    return l;
}

int64_t pyops_gru_forward_work(int64_t T, int64_t B, int64_t I, int64_t H) {
    (void)T, (void)I;
    const pyops_kernels *k = pyops_active();
    return pyops_max(forward_layout(k, B, H, 0).total, forward_layout(k, B, H, 1).total);
}

int64_t pyops_gru_backward_work(int64_t T, int64_t B, int64_t I, int64_t H) {
    (void)T, (void)I;
    return backward_layout(pyops_active(), B, H).total;
}

static pyops_status check(const char *who, const float *x, int64_t T, int64_t B, int64_t I, int64_t H) {
    PYOPS_REQUIRE(T >= 1 && B >= 0 && I >= 0 && H >= 1, "%s: T=%lld B=%lld I=%lld H=%lld", who, LL(T), LL(B), LL(I), LL(H));
    PYOPS_REQUIRE(!I == !x, "%s: I=%lld, want 0 where there is no x, and only there", who, LL(I));
    return PYOPS_OK;
}

pyops_status pyops_gru_forward(float *h, float *gates, const float *x, const float *a, const float *h0,
                               const float *w_ih, const float *w_hh, const float *b_ih, const float *b_hh,
                               float *work, int64_t T, int64_t B, int64_t I, int64_t H, int32_t reset_before, void *stream) {
    (void)stream;
    pyops_status status = check("gru_forward", x, T, B, I, H);
    if (status) return status;
    PYOPS_REQUIRE(!I == !!a, "gru_forward: I=%lld, want a where it is 0, and only there", LL(I));
    const pyops_kernels *k = pyops_active();
    const layout l = forward_layout(k, B, H, reset_before);

    int64_t lda = 3*H;
    if (I) {                                            /* a = x w_ih' + b_ih for all steps, where r, z, n will be */
        status = pyops_product_threaded(gates, 4*H, (pyops_view){x, I, 1}, (pyops_view){w_ih, 1, I}, b_ih, T*B, 3*H, I, 0);
        if (status) return status;
        a = gates, lda = 4*H;
    }
    /* of r and z, or of all three */
    const weight w_rz = weight_of((pyops_view){w_hh, 1, H}, H, reset_before ? 2*H : 3*H, work + l.rz, B);
    const weight w_n = weight_of((pyops_view){w_hh + 2*H*H, 1, H}, H, H, work + l.n, B);
    int failed = 0;
    #pragma omp parallel if (T * B * H * H > PYOPS_SHARE_FMAS)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t from = B * thread / threads, rows = B * (thread + 1) / threads - from;
        float *scratch = pyops_scratch(pyops_product_scratch(k)), *product = work + l.rows + from * 3 * H;
        if (!scratch) {
            #pragma omp atomic write
            failed = 1;
        }
        pack(k, &w_rz);
        if (reset_before) pack(k, &w_n);
        #pragma omp barrier
        for (int64_t t = 0; t < T && scratch && rows; t++) {
            float *h_t = h + (t*B + from) * H, *gates_t = gates + (t*B + from) * 4 * H;
            const float *a_t = a + (t*B + from) * lda;
            const float *h_prev = t ? h_t - B*H : h0 ? h0 + from*H : NULL;
            const int64_t K = h_prev ? H : 0;
            if (!h_prev) {
                k->fill(h_t, rows * H, 0.0f);
                h_prev = h_t;                           /* read before it is written, element by element */
            }
            multiply(k, product, 3*H, (pyops_view){h_prev, H, 1}, &w_rz, b_hh, rows, K, 0, scratch);
            if (reset_before) {
                for (int64_t b = 0; b < rows; b++)
                    k->gru_before_1(gates_t + b*4*H, a_t + b*lda, product + b*3*H, h_prev + b*H, H);
                multiply(k, product + 2*H, 3*H, (pyops_view){gates_t + 3*H, 4*H, 1}, &w_n, b_hh + 2*H, rows, K, 0, scratch);
                for (int64_t b = 0; b < rows; b++)
                    k->gru_before_2(h_t + b*H, gates_t + b*4*H, a_t + b*lda, product + b*3*H + 2*H, h_prev + b*H, H);
            } else {
                for (int64_t b = 0; b < rows; b++)
                    k->gru_after(h_t + b*H, gates_t + b*4*H, a_t + b*lda, product + b*3*H, h_prev + b*H, H);
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "gru_forward: no memory for packed tiles") : PYOPS_OK;
}

pyops_status pyops_gru_backward(float *dx, float *dh0, float *dw_ih, float *dw_hh, float *db_ih, float *db_hh,
                                float *dgates, const float *dh, const float *dh_last,
                                const float *x, const float *h0, const float *w_ih, const float *w_hh,
                                const float *h, const float *gates, float *work,
                                int64_t T, int64_t B, int64_t I, int64_t H, int32_t reset_before, void *stream) {
    (void)stream;
    pyops_status status = check("gru_backward", x, T, B, I, H);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const layout l = backward_layout(k, B, H);

    /* pass 1: the gate gradients of all steps, last step first */
    const weight w_rz = weight_of((pyops_view){w_hh, H, 1}, 2*H, H, work + l.rz, B);
    const weight w_n = weight_of((pyops_view){w_hh + 2*H*H, H, 1}, H, H, work + l.n, B);
    int failed = 0;
    #pragma omp parallel if (T * B * H * H > PYOPS_SHARE_FMAS)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t from = B * thread / threads, rows = B * (thread + 1) / threads - from;
        float *scratch = pyops_scratch(pyops_product_scratch(k));
        float *carry = work + l.rows + from * H, *zeros = carry + B * H;        /* carry: the gradient of h[t] */
        if (!scratch) {
            #pragma omp atomic write
            failed = 1;
        }
        pack(k, &w_rz);
        pack(k, &w_n);
        if (dh_last && rows) memcpy(carry, dh_last + from*H, (size_t)(rows * H) * sizeof *carry);
        else k->fill(carry, rows * H, 0.0f);
        #pragma omp barrier
        for (int64_t t = T - 1; t >= 0 && scratch && rows; t--) {
            const float *gates_t = gates + (t*B + from) * 4 * H;
            float *dgates_t = dgates + (t*B + from) * 4 * H, *du = dgates_t + 3*H;
            const float *h_prev = t ? h + ((t - 1)*B + from) * H : h0 ? h0 + from*H : NULL;
            const int carry_on = t || dh0;              /* does anyone want the gradient of h[t-1]? */
            if (!h_prev) {
                k->fill(zeros, rows * H, 0.0f);
                h_prev = zeros;
            }
            if (dh) k->add(carry, dh + (t*B + from) * H, rows * H);
            for (int64_t b = 0; b < rows; b++)
                k->gru_back(dgates_t + b*4*H, carry + b*H, gates_t + b*4*H, h_prev + b*H, H);
            if (reset_before) {
                multiply(k, du, 4*H, (pyops_view){dgates_t + 2*H, 4*H, 1}, &w_n, NULL, rows, H, 0, scratch);
                for (int64_t b = 0; b < rows; b++)
                    k->gru_back_reset_before(dgates_t + b*4*H, carry + b*H, gates_t + b*4*H, h_prev + b*H, H);
            } else {
                for (int64_t b = 0; b < rows; b++)
                    k->gru_back_reset_after(dgates_t + b*4*H, gates_t + b*4*H, H);
                if (carry_on) multiply(k, carry, H, (pyops_view){du, 4*H, 1}, &w_n, NULL, rows, H, PYOPS_ADD, scratch);
            }
            if (carry_on) multiply(k, carry, H, (pyops_view){dgates_t, 4*H, 1}, &w_rz, NULL, rows, 2*H, PYOPS_ADD, scratch);
        }
        if (dh0 && rows) memcpy(dh0 + from*H, carry, (size_t)(rows * H) * sizeof *dh0);
    }
    if (failed) return pyops_fail(PYOPS_NO_MEMORY, "gru_backward: no memory for packed tiles");

    /* pass 2: one product each over all steps.  For the n part of w_hh, gradient x input is
     * du x h[t-1] with the reset gate after the product, dn x u with the reset gate before it. */
    const pyops_view dgates_t = {dgates, 1, 4*H};       /* (3H,TB), transposed */
    const float *d_n = dgates + (reset_before ? 2*H : 3*H);
    if (I && dx)
        status = pyops_product_threaded(dx, I, (pyops_view){dgates, 4*H, 1}, (pyops_view){w_ih, I, 1}, NULL, T*B, I, 3*H, 0);
    if (!status && I)
        status = pyops_product_threaded(dw_ih, I, dgates_t, (pyops_view){x, I, 1}, NULL, 3*H, I, T*B, PYOPS_ADD);
    if (!status && h0)
        status = pyops_product_threaded(dw_hh, H, dgates_t, (pyops_view){h0, H, 1}, NULL, 2*H, H, B, PYOPS_ADD);
    if (!status)
        status = pyops_product_threaded(dw_hh, H, (pyops_view){dgates + B*4*H, 1, 4*H}, (pyops_view){h, H, 1}, NULL, 2*H, H, (T - 1)*B, PYOPS_ADD);
    if (reset_before) {
        if (!status)
            status = pyops_product_threaded(dw_hh + 2*H*H, H, (pyops_view){d_n, 1, 4*H}, (pyops_view){gates + 3*H, 4*H, 1}, NULL, H, H, T*B, PYOPS_ADD);
    } else {
        if (!status && h0)
            status = pyops_product_threaded(dw_hh + 2*H*H, H, (pyops_view){d_n, 1, 4*H}, (pyops_view){h0, H, 1}, NULL, H, H, B, PYOPS_ADD);
        if (!status)
            status = pyops_product_threaded(dw_hh + 2*H*H, H, (pyops_view){d_n + B*4*H, 1, 4*H}, (pyops_view){h, H, 1}, NULL, H, H, (T - 1)*B, PYOPS_ADD);
    }
    if (status) return status;
    float *sums = work + l.sums;
    k->fill(sums, 4*H, 0.0f);
    pyops_add_column_sums(sums, dgates, T*B, 4*H, 4*H);
    if (I) k->add(db_ih, sums, 3*H);
    k->add(db_hh, sums, 2*H);
    k->add(db_hh + 2*H, sums + (d_n - dgates), H);
    return PYOPS_OK;
}

/* ---- one step, between products of the caller's ---- */
static pyops_status check_step(const char *who, int64_t B, int64_t H, int32_t stage) {
    PYOPS_REQUIRE(B >= 0 && H >= 1, "%s: B=%lld H=%lld", who, LL(B), LL(H));
    PYOPS_REQUIRE(stage >= PYOPS_GRU_AFTER && stage <= PYOPS_GRU_BEFORE_2, "%s: stage=%d, want 0 to %d", who, stage, PYOPS_GRU_BEFORE_2);
    return PYOPS_OK;
}

pyops_status pyops_gru_gates_forward(float *y, float *gates, const float *a, const float *product, const float *h_prev,
                                     int64_t B, int64_t H, int32_t stage, void *stream) {
    (void)stream;
    const pyops_status status = check_step("gru_gates_forward", B, H, stage);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    #pragma omp parallel for schedule(static) if (B * H > PYOPS_SHARE_EXPS)
    for (int64_t b = 0; b < B; b++) {
        float *gates_b = gates + b*4*H, *y_b = y + b*H;
        const float *a_b = a + b*3*H, *h_b = h_prev + b*H;
        if (stage == PYOPS_GRU_AFTER) {
            k->gru_after(y_b, gates_b, a_b, product + b*3*H, h_b, H);
        } else if (stage == PYOPS_GRU_BEFORE_1) {
            k->gru_before_1(gates_b, a_b, product + b*2*H, h_b, H);
            memcpy(y_b, gates_b + 3*H, (size_t)H * sizeof *y_b);
        } else {
            k->gru_before_2(y_b, gates_b, a_b, product + b*H, h_b, H);
        }
    }
    return PYOPS_OK;
}

pyops_status pyops_gru_gates_backward(float *dh, float *da, float *dp, const float *dy, const float *du,
                                      const float *gates, const float *h_prev,
                                      int64_t B, int64_t H, int32_t stage, void *stream) {
    (void)stream;
    const pyops_status status = check_step("gru_gates_backward", B, H, stage);
    if (status) return status;
    const pyops_kernels *k = pyops_active();
    const size_t row = (size_t)H * sizeof *dh;
    int failed = 0;
    #pragma omp parallel if (B * H > PYOPS_SHARE_FLOATS)
    {
        float *dgates = pyops_scratch((size_t)(4 * H));         /* dr dz dn du of a row */
        if (!dgates) {
            #pragma omp atomic write
            failed = 1;
        }
        #pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            if (!dgates) continue;
            float *dh_b = dh + b*H, *da_b = da + b*3*H;
            const float *gates_b = gates + b*4*H, *h_b = h_prev + b*H;
            if (stage == PYOPS_GRU_BEFORE_2) {
                memcpy(dgates + 3*H, du + b*H, row);
                k->gru_back_reset_before(dgates, dh_b, gates_b, h_b, H);
                memcpy(da_b, dgates, row);
                memcpy(dp + b*2*H, da_b, 2 * row);
                continue;
            }
            if (dy) k->add(dh_b, dy + b*H, H);
            k->gru_back(dgates, dh_b, gates_b, h_b, H);
            if (stage == PYOPS_GRU_AFTER) {
                k->gru_back_reset_after(dgates, gates_b, H);
                memcpy(da_b, dgates, 3 * row);
                memcpy(dp + b*3*H, dgates, 2 * row);
                memcpy(dp + b*3*H + 2*H, dgates + 3*H, row);
            } else {
                memcpy(da_b + H, dgates + H, 2 * row);
                memcpy(dp + b*H, dgates + 2*H, row);
            }
        }
    }
    return failed ? pyops_fail(PYOPS_NO_MEMORY, "gru_gates_backward: no memory for a row of gates") : PYOPS_OK;
}
