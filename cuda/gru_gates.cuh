// gru_gates.cuh - the gates of a GRU: forward and backward for one unit of one row.  The numbers refer to docs/gru.md.
#pragma once
#include "packed.cuh"
#include "real.cuh"

namespace gru {

// ---- forward ----------------------------------------------------------------------------------------------------
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct GateInputs {                        // known before the product: a_r, a_z, a_n and h[t-1]; for before_gates_2, z itself
    float r, z, n, h;
};
struct ResetBefore { float z, u; };        // of before_gates_1
// a points to a_r; a_z and a_n follow H elements apart.
template <class T> DEVICE GateInputs gate_inputs(const T *a, float h, int64_t H) {
    return {as_float(a[0]), as_float(a[H]), as_float(a[2 * H]), h};
}

// gate points to r; z, n and u follow H elements apart.  It may alias the a of the inputs.
// Products with h[t-1], bias included.  Each returns what the next product multiplies, before it is rounded to T: h[t], u, h[t];
// before_gates_1 also z.
template <class T>
DEVICE float after_gates(T *h, T *gate, int64_t H, GateInputs in, float product_r, float product_z, float u) {
    const float r = sigmoid(in.r + product_r);                         // 1
    const float z = sigmoid(in.z + product_z);                         // 2
    const float n = tanhf(in.n + r * u);                               // 4
    const float state = (1.0f - z) * n + z * in.h;                     // 5
    *h = as<T>(state);
    gate[0] = as<T>(r);
    gate[H] = as<T>(z);
    gate[2 * H] = as<T>(n);
    gate[3 * H] = as<T>(u);
    return state;
}
template <class T> DEVICE ResetBefore before_gates_1(T *gate, int64_t H, GateInputs in, float product_r, float product_z) {
    const float r = sigmoid(in.r + product_r);                         // 1
    const float z = sigmoid(in.z + product_z);                         // 2
    const float u = r * in.h;                                          // 3
    gate[0] = as<T>(r);
    gate[H] = as<T>(z);
    gate[3 * H] = as<T>(u);
    return {z, u};
}
template <class T> DEVICE float before_gates_2(T *h, T *gate, int64_t H, GateInputs in, float product_n) {
    const float n = tanhf(in.n + product_n);                           // 4
    const float state = (1.0f - in.z) * n + in.z * in.h;               // 5
    *h = as<T>(state);
    gate[2 * H] = as<T>(n);
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
// x (B,H) at i, 0 without x.
DEVICE float given(const float *x, int64_t i) { return x ? x[i] : 0.0f; }

// The recurrent weights (3H,H): of the type T of the activations, or float32.
template <class T> struct Weights {
    const void *p;
    bool is_float;

    explicit Weights(const pyops_real *w) : p(elements<char>(w)), is_float(!is_bf16(w)) {}
    __device__ __forceinline__ float at(int64_t i) const {
        if (std::is_same_v<T, float> || is_float) return static_cast<const float *>(p)[i];
        return as_float(static_cast<const T *>(p)[i]);
    }
    // Elements i to i + 3 of a row; zeros from i + left on, the end of the row.
    __device__ __forceinline__ float4 four(int64_t i, int64_t left) const {
        if (std::is_same_v<T, float> || is_float) return four_of(static_cast<const float *>(p) + i, left);
        return four_of(static_cast<const T *>(p) + i, left);
    }
    template <class E> static __device__ __forceinline__ float4 four_of(const E *x, int64_t left) {
        if (left >= 4 && uintptr_t(x) % (4 * sizeof(E)) == 0) {
            const Pack<float, 4> y = load_reals<4>(x);
            return make_float4(y.at[0], y.at[1], y.at[2], y.at[3]);
        }
        const auto at = [&](int j) { return j < left ? as_float(x[j]) : 0.0f; };
        return make_float4(at(0), at(1), at(2), at(3));
    }
};

template <class T> struct Forward {
    T *h, *gates;
    const T *a;
    const float *h0;
    Weights<T> w_hh;
    const float *b_hh;
    int64_t a_row;                          // elements from row to row of a
    Sequences in;
    unsigned *counters;
    float *last;                            // packed rows: (B,H), the state after the last step of each sequence, or NULL
    float *state;                           // bfloat16: (2,B,H), h and z of the latest step in float32;  float32: NULL
    FaultRecord *faults;

    // h[t-1] of a sequence that has step t.  A unit has one thread, which alone reads and writes its state.
    __device__ __forceinline__ float before(int64_t t, int64_t sequence, int64_t unit, int64_t H) const {
        if (t == 0) return given(h0, sequence * H + unit);
        if constexpr (std::is_same_v<T, float>) return h[in.row(t - 1, sequence) * H + unit];
        else return state[sequence * H + unit];
    }
    __device__ __forceinline__ void keep(int64_t sequence, int64_t unit, int64_t H, float h) const {
        if constexpr (!std::is_same_v<T, float>) state[sequence * H + unit] = h;
    }
    // z between the two phases of a step with reset before the product; `at` is the row of the step.
    __device__ __forceinline__ float z(int64_t at, int64_t sequence, int64_t unit, int64_t H) const {
        if constexpr (std::is_same_v<T, float>) return gates[(at * 4 + 1) * H + unit];
        else return state[(in.B + sequence) * H + unit];
    }
    __device__ __forceinline__ void keep_z(int64_t sequence, int64_t unit, int64_t H, float z) const {
        if constexpr (!std::is_same_v<T, float>) state[(in.B + sequence) * H + unit] = z;
    }
};

template <class T> struct Backward {
    float *dh0;
    T *dgates, *states;                     // dgates (T,B,4H): dr dz dn du;   states (T,B,H): h[t-1], or NULL
    float *carry;                           // (B,H): the part of h[t-1]'s gradient that comes from no product
    const T *dh;
    const float *dh_last, *h0;
    Weights<T> w_hh;
    const T *h, *gates;
    const int32_t *lengths;
    Sequences in;
    int64_t H;
    unsigned *counters;
    T *step;                                // one step at a time with packed rows: its dgates (B,4H)
};

template <class T> DEVICE Saved saved(const Backward<T> &b, int64_t t, int64_t row, int64_t unit) {
    const int64_t H = b.H, state = row * H + unit, at = b.in.row(t, row);
    if (at < 0) return {};
    const T *const gate = b.gates + at * 4 * H + unit;
    const float h = t ? as_float(b.h[b.in.row(t - 1, row) * H + unit]) : given(b.h0, state);
    const float carry = t < b.in.length(row) - 1 ? b.carry[state] : given(b.dh_last, state);
    float d = b.dh ? carry + as_float(b.dh[at * H + unit]) : carry;
    if (b.lengths && t >= b.lengths[row]) d = 0.0f;                     // padding: no gradient until the last valid step
    return {as_float(gate[0]), as_float(gate[H]), as_float(gate[2 * H]), as_float(gate[3 * H]), h, d};
}

// Store the gradient of a gate at row `at` of dgates, and for a product with the gradients of one step.
template <class T> DEVICE void store(const Backward<T> &b, int64_t at, int64_t row, int64_t unit, int gate, float value) {
    b.dgates[(at * 4 + gate) * b.H + unit] = as<T>(value);
    if (b.step) b.step[(row * 4 + gate) * b.H + unit] = as<T>(value);
}

// Both return the gradients; zeros after the end of a sequence, where nothing is stored.
template <bool BEFORE, class T>
DEVICE GateGradients back_gates(const Backward<T> &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float d) {
    const int64_t at = b.in.row(t, row);
    if (at < 0) return {};
    const GateGradients g = back_gates<BEFORE>(s, d);
    store(b, at, row, unit, 1, g.z);
    store(b, at, row, unit, 2, g.n);
    b.carry[row * b.H + unit] = g.h;
    if (b.states) b.states[at * b.H + unit] = as<T>(s.h);
    if (BEFORE) return g;
    store(b, at, row, unit, 0, g.r);
    store(b, at, row, unit, 3, g.u);
    return g;
}
template <class T>
DEVICE GateGradients back_reset(const Backward<T> &b, int64_t t, int64_t row, int64_t unit, const Saved &s, float du) {
    const int64_t at = b.in.row(t, row);
    if (at < 0) return {};
    const GateGradients g = back_reset(s, du);
    store(b, at, row, unit, 0, g.r);
    store(b, at, row, unit, 3, g.u);
    b.carry[row * b.H + unit] += g.h;
    return g;
}

}
