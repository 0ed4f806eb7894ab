// SwiGLU: out = silu(gate) * up, elementwise, and its backward in place.
#include "elementwise.cuh"

using T = ELEMENT;

constexpr float LOG2_E = 1.4426950408889634f;

DEVICE float sigmoid(float x) { return divide_fast(1.f, 1.f + exp2_fast(-LOG2_E * x)); }

KERNEL(ELEMENTWISE_THREADS, 4, swiglu_forward, T *out, const T *gate, const T *up, i64 n, int vectors) {
    elementwise<LANES<T>>(
        n, vectors,
        [&](i64 i) {
            float g[LANES<T>], u[LANES<T>];
            load_vector(gate + i, g);
            load_vector(up + i, u);
            UNROLL
            for (int k = 0; k < LANES<T>; k++) u[k] *= g[k] * sigmoid(g[k]);
            store_vector(out + i, u);
        },
        [&](i64 i) {
            float g = load_wide(gate + i);
            store_narrow(out + i, g * sigmoid(g) * load_wide(up + i));
        });
}

// g, u and d (the gradient of out) become the gradients of gate and up, and out.
DEVICE void differentiate(float &g, float &u, float &d) {
    float s = sigmoid(g), silu = g * s, out = silu * u;
    float d_gate = d * u * s * (1.f + g * (1.f - s));
    u = d * silu;
    g = d_gate;
    d = out;
}

KERNEL(ELEMENTWISE_THREADS, 4, swiglu_backward, T *gate, T *up, T *d_out, i64 n, int vectors) {
    elementwise<LANES<T>>(
        n, vectors,
        [&](i64 i) {
            float g[LANES<T>], u[LANES<T>], d[LANES<T>];
            load_vector(gate + i, g);
            load_vector(up + i, u);
            load_vector(d_out + i, d);
            UNROLL
            for (int k = 0; k < LANES<T>; k++) differentiate(g[k], u[k], d[k]);
            store_vector(gate + i, g);
            store_vector(up + i, u);
            store_vector(d_out + i, d);
        },
        [&](i64 i) {
            float g = load_wide(gate + i), u = load_wide(up + i), d = load_wide(d_out + i);
            differentiate(g, u, d);
            store_narrow(gate + i, g);
            store_narrow(up + i, u);
            store_narrow(d_out + i, d);
        });
}
