// Elementwise passes over gradients and parameters: copies rounded from f32 to ELEMENT, sums in f32, a search for what is
// not finite.
#include "elementwise.cuh"

using T = ELEMENT;

template <class From, class To> DEVICE void convert(To *to, const From *from, i64 n, int vectors, bool add) {
    constexpr int N = LANES<From> > LANES<To> ? LANES<From> : LANES<To>;
    elementwise<N>(
        n, vectors,
        [&](i64 i) {
            float x[N];
            UNROLL
            for (int part = 0; part < N; part += LANES<From>) {
                float v[LANES<From>];
                load_vector(from + i + part, v);
                UNROLL
                for (int k = 0; k < LANES<From>; k++) x[part + k] = v[k];
            }
            UNROLL
            for (int part = 0; part < N; part += LANES<To>) {
                float v[LANES<To>];
                if (add) load_vector(to + i + part, v);
                UNROLL
                for (int k = 0; k < LANES<To>; k++) v[k] = add ? add_rn(v[k], x[part + k]) : x[part + k];
                store_vector(to + i + part, v);
            }
        },
        [&](i64 i) {
            float x = load_wide(from + i);
            store_narrow(to + i, add ? add_rn(load_wide(to + i), x) : x);
        });
}

// to = from, rounded.
KERNEL(ELEMENTWISE_THREADS, 4, narrow_all, T *to, const float *from, i64 n, int vectors) {
    convert(to, from, n, vectors, false);
}
// to += from, in f32.
KERNEL(ELEMENTWISE_THREADS, 4, accumulate, float *to, const T *from, i64 n, int vectors) {
    convert(to, from, n, vectors, true);
}

// Sets bit 0 of `found` if any element is infinite or not a number.
KERNEL(ELEMENTWISE_THREADS, 4, find_nonfinite, u32 *found, const T *from, i64 n, int vectors) {
    bool bad = false;
    elementwise<LANES<T>>(
        n, vectors,
        [&](i64 i) {
            float v[LANES<T>];
            load_vector(from + i, v);
            UNROLL
            for (int k = 0; k < LANES<T>; k++) bad |= !is_finite(v[k]);
        },
        [&](i64 i) { bad = !is_finite(load_wide(from + i)); });
    if (any_lane(bad) && lane_index() == 0) atomic_or(found, 1);
}
