// AdamW, with the formulas and the bits of zero/src/optimizer/adamw.rs: every operation is one IEEE rounding. ELEMENT is the
// parameters' type.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;
constexpr int N = 4; // elements of a thread
constexpr float LEAST = 1e-30f; // of first moments
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

struct Coefficients {
    float one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root_correction, keep, gradient_factor;
};

DEVICE float element(const Coefficients &c, float w, float g, float &m, float &v) {
    g = mul_rn(g, c.gradient_factor);
    m = add_rn(m, mul_rn(sub_rn(g, m), c.one_minus_beta1));
    v = add_rn(mul_rn(v, c.beta2), mul_rn(mul_rn(g, g), c.one_minus_beta2));
    // What processors are slow with; what is not a number stays so.
    m = -LEAST < m && m < LEAST ? 0.f : m;
    v = m == 0.f && v < SMALLEST_NORMAL ? 0.f : v;
    float step = div_rn(mul_rn(c.step_size, m), add_rn(mul_rn(sqrt_rn(v), c.root_correction), c.eps));
    return sub_rn(mul_rn(w, c.keep), step);
}

// Elements begin..end of arrays that start at 16-byte boundaries. A gradient kept in f32 (`wide`) is rounded to T first, so
// that it equals one that was stored as T. Without `master`, the parameters are their own master. The first thread takes
// the elements from begin rounded down to N; elements outside the range are left alone.
KERNEL(THREADS, 2, adamw, T *param, float *master, float *m, float *v, const void *grad, i64 begin, i64 end, int wide,
       float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float step_size, float root_correction, float keep,
       float gradient_factor) {
    Coefficients c{one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root_correction, keep, gradient_factor};
    i64 at = begin / N * N + ((i64)block_x() * THREADS + thread_index()) * N;
    if (at >= end) return;
    const T *narrow_grad = static_cast<const T *>(grad);
    const float *wide_grad = static_cast<const float *>(grad);
    if (at >= begin && at + N <= end) {
        float w[N], g[N], ms[N], vs[N];
        if (wide)
            load_four_once(wide_grad + at, g);
        else
            load_four_once(narrow_grad + at, g);
        if (master)
            load_four_once(master + at, w);
        else
            load_four_once(param + at, w);
        load_four_once(m + at, ms);
        load_four_once(v + at, vs);
        UNROLL
        for (int k = 0; k < N; k++) w[k] = element(c, w[k], rounded<T>(g[k]), ms[k], vs[k]);
        if (master) store_four(master + at, w);
        store_four(param + at, w);
        store_four(m + at, ms);
        store_four(v + at, vs);
        return;
    }
    i64 last = at + N < end ? at + N : end;
    for (i64 i = at < begin ? begin : at; i < last; i++) {
        float g = wide ? rounded<T>(load(wide_grad + i)) : load_wide(narrow_grad + i);
        float mi = load(m + i), vi = load(v + i), w = master ? load(master + i) : load_wide(param + i);
        w = element(c, w, g, mi, vi);
        if (master) store(master + i, w);
        store_narrow(param + i, w);
        store(m + i, mi);
        store(v + i, vi);
    }
}
