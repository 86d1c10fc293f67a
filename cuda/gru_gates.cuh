// gru_gates.cuh - the gates of a GRU: forward and backward for one unit of one row.  The numbers refer to docs/gru.md.
#pragma once
#include "packed.cuh"

namespace gru {

// ---- forward ----------------------------------------------------------------------------------------------------
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct GateInputs {                        // known before the product: a_r, a_z, a_n and h[t-1]; for before_gates_2, z itself
    float r, z, n, h;
};
// a points to a_r; a_z and a_n follow H floats apart.  h may be NULL.
DEVICE GateInputs gate_inputs(const float *a, const float *h, int64_t H) { return {a[0], a[H], a[2 * H], h ? *h : 0.0f}; }

// gate points to r; z, n and u follow H floats apart.  It may alias the a of the inputs.
// Products with h[t-1], bias included.  Each returns what the next product multiplies: h[t], u, h[t].
DEVICE float after_gates(float *h, float *gate, int64_t H, GateInputs in, float product_r, float product_z, float u) {
    const float r = sigmoid(in.r + product_r);                         // 1
    const float z = sigmoid(in.z + product_z);                         // 2
    const float n = tanhf(in.n + r * u);                               // 4
    const float state = (1.0f - z) * n + z * in.h;                     // 5
    *h = state;
    gate[0] = r;
    gate[H] = z;
    gate[2 * H] = n;
    gate[3 * H] = u;
    return state;
}
DEVICE float before_gates_1(float *gate, int64_t H, GateInputs in, float product_r, float product_z) {
    const float r = sigmoid(in.r + product_r);                         // 1
    const float u = r * in.h;                                          // 3
    gate[0] = r;
    gate[H] = sigmoid(in.z + product_z);                               // 2
    gate[3 * H] = u;
    return u;
}
DEVICE float before_gates_2(float *h, float *gate, int64_t H, GateInputs in, float product_n) {
    const float n = tanhf(in.n + product_n);                           // 4
    const float state = (1.0f - in.z) * n + in.z * in.h;               // 5
    *h = state;
    gate[2 * H] = n;
    return state;
}

// ---- backward ---------------------------------------------------------------------------------------------------
struct Saved {                              // by forward; d: the gradient of h[t] without the part that comes from a product
    float r, z, n, u, h, d;                 // h: h[t-1]
};

// Gradients of the gates' sums (before their activations), of u, and the part of h[t-1]'s that comes from no product.
struct GateGradients { float r, z, n, u, h; };

// Backward through steps 5, 4, 2, and with reset after the product also 1, for the gradient d of h[t].
template <bool BEFORE> DEVICE GateGradients back_gates(const Saved &s, float d) {
    const float dn = d * (1.0f - s.z) * (1.0f - s.n * s.n);            // 5, 4
    GateGradients g = {};
    g.z = d * (s.h - s.n) * s.z * (1.0f - s.z);                        // 5, 2
    g.n = dn;
    g.h = d * s.z;                                                     // 5
    if (BEFORE) return g;
    g.r = dn * s.u * s.r * (1.0f - s.r);                               // 4, 1
    g.u = dn * s.r;                                                    // 4
    return g;
}

// The rest with reset before the product: r and h from du = dn w_hn, the gradient of u = r * h[t-1].
DEVICE GateGradients back_reset(const Saved &s, float du) {
    GateGradients g = {};
    g.r = du * s.h * s.r * (1.0f - s.r);                               // 3, 1
    g.u = du;
    g.h = du * s.r;                                                    // 3
    return g;
}

// ---- a whole sequence: where the gates of step t, row and unit are stored ----------------------------------------
struct Forward {
    float *h, *gates;
    const float *a, *h0, *w_hh, *b_hh;
    int64_t a_row;                          // floats from row to row of a
    Sequences in;
    unsigned *counters;
    float *last;                            // packed rows: (B,H), the state after the last step of each sequence, or NULL
    FaultRecord *faults;
};

struct Backward {
    float *dh0;
    float *dgates, *states, *carry;         // dgates (T,B,4H): dr dz dn du;   states (T,B,H): h[t-1], or NULL
    const float *dh, *dh_last, *h0, *w_hh, *h, *gates;          // carry (B,H): the part of h[t-1]'s gradient that comes from
    const int32_t *lengths;                                     // no product
    Sequences in;
    int64_t H;
    unsigned *counters;
    float *step;                            // one step at a time with packed rows: its dgates (B,4H)
};

DEVICE float given(const float *x, int64_t i) { return x ? x[i] : 0.0f; }

DEVICE Saved saved(const Backward &b, int64_t t, int64_t row, int64_t unit) {
    const int64_t H = b.H, state = row * H + unit, at = b.in.row(t, row);
    if (at < 0) return {};
    const float *const gate = b.gates + at * 4 * H + unit;
    const float h = t ? b.h[b.in.row(t - 1, row) * H + unit] : given(b.h0, state);
    const float carry = t < b.in.length(row) - 1 ? b.carry[state] : given(b.dh_last, state);
    float d = b.dh ? carry + b.dh[at * H + unit] : carry;
    if (b.lengths && t >= b.lengths[row]) d = 0.0f;                     // padding: no gradient until the last valid step
    return {gate[0], gate[H], gate[2 * H], gate[3 * H], h, d};
}

// Store the gradient of a gate at row `at` of dgates, and for a product with the gradients of one step.
DEVICE void store(const Backward &b, int64_t at, int64_t row, int64_t unit, int gate, float value) {
    b.dgates[(at * 4 + gate) * b.H + unit] = value;
    if (b.step) b.step[(row * 4 + gate) * b.H + unit] = value;
}

// Both return the gradients; zeros after the end of a sequence, where nothing is stored.
template <bool BEFORE>
DEVICE GateGradients back_gates(const Backward &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float d) {
    const int64_t at = b.in.row(t, row);
    if (at < 0) return {};
    const GateGradients g = back_gates<BEFORE>(s, d);
    store(b, at, row, unit, 1, g.z);
    store(b, at, row, unit, 2, g.n);
    b.carry[row * b.H + unit] = g.h;
    if (b.states) b.states[at * b.H + unit] = s.h;
    if (BEFORE) return g;
    store(b, at, row, unit, 0, g.r);
    store(b, at, row, unit, 3, g.u);
    return g;
}
DEVICE GateGradients back_reset(const Backward &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float du) {
    const int64_t at = b.in.row(t, row);
    if (at < 0) return {};
    const GateGradients g = back_reset(s, du);
    store(b, at, row, unit, 0, g.r);
    store(b, at, row, unit, 3, g.u);
    b.carry[row * b.H + unit] += g.h;
    return g;
}

}
