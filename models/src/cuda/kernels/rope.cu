// Rotary position embedding in place: element i of the first half of a head turns with element i of the second half.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;

template <int N> DEVICE void turn(T *x, const float *angles, u32 items, u32 heads, u32 length, u32 width, float sign) {
    u32 item = (u32)block_x() * THREADS + thread_index();
    if (item >= items) return;
    u32 half = width / 2, groups = half / N;
    u32 head = item / groups, i = (item - head * groups) * N;
    T *first = x + (i64)head * width + i;
    const float *cosines = angles + (i64)(head / heads % length) * width + i;
    float a[N], b[N], c[N], s[N];
    if constexpr (N == 1) {
        a[0] = load_wide(first), b[0] = load_wide(first + half);
        c[0] = load(cosines), s[0] = load(cosines + half);
    } else {
        load_vector(first, a);
        load_vector(first + half, b);
        UNROLL
        for (int k = 0; k < N; k += 4) {
            float q[4];
            load_vector(cosines + k, q);
            UNROLL
            for (int j = 0; j < 4; j++) c[k + j] = q[j];
            load_vector(cosines + half + k, q);
            UNROLL
            for (int j = 0; j < 4; j++) s[k + j] = q[j];
        }
    }
    UNROLL
    for (int k = 0; k < N; k++) {
        float low = a[k] * c[k] - b[k] * s[k] * sign;
        b[k] = b[k] * c[k] + a[k] * s[k] * sign;
        a[k] = low;
    }
    if constexpr (N == 1) {
        store_narrow(first, a[0]);
        store_narrow(first + half, b[0]);
    } else {
        store_vector(first, a);
        store_vector(first + half, b);
    }
}

// x (tokens, heads, width); token t stands at position t % length. angles (length, width): the cosines of the width/2
// pairs, then their sines. `sign` is 1 forward and -1 backward. One thread takes one item: a pair, or with `vectors` (for
// which the host has checked widths and addresses) 16 bytes of each half of a head.
KERNEL(THREADS, 4, rope, T *x, const float *angles, u32 items, u32 heads, u32 length, u32 width, float sign, int vectors) {
    if (vectors)
        turn<LANES<T>>(x, angles, items, heads, length, width, sign);
    else
        turn<1>(x, angles, items, heads, length, width, sign);
}
