// 16 bytes of elements at a time, or four of them, as f32.
#pragma once
#include "device.cuh"

// Elements of T in 16 bytes.
template <class T> constexpr int LANES = 16 / (int)sizeof(T);

DEVICE void unpack(Words words, float (&v)[4], float) {
    UNROLL
    for (int i = 0; i < 4; i++) v[i] = float_of(words.w[i]);
}
template <class T> DEVICE void unpack(Words words, float (&v)[8], T) {
    UNROLL
    for (int i = 0; i < 4; i++) {
        v[2 * i] = widen(T{(u16)words.w[i]});
        v[2 * i + 1] = widen(T{(u16)(words.w[i] >> 16)});
    }
}
template <class T> DEVICE Words repack(const float (&v)[8], T) {
    Words words;
    UNROLL
    for (int i = 0; i < 4; i++) words.w[i] = pack<T>(v[2 * i], v[2 * i + 1]);
    return words;
}
DEVICE Words repack(const float (&v)[4], float) {
    Words words;
    UNROLL
    for (int i = 0; i < 4; i++) words.w[i] = bits_of(v[i]);
    return words;
}

// `p` must be aligned to 16 bytes.
template <class T> DEVICE void load_vector(const T *p, float (&v)[LANES<T>]) {
    unpack(load(reinterpret_cast<const Words *>(p)), v, T{});
}
// For what this kernel reads once and no kernel soon.
template <class T> DEVICE void load_vector_once(const T *p, float (&v)[LANES<T>]) {
    unpack(load_once(reinterpret_cast<const Words *>(p)), v, T{});
}
template <class T> DEVICE void store_vector(T *p, const float (&v)[LANES<T>]) {
    store(reinterpret_cast<Words *>(p), repack(v, T{}));
}

// Four elements of any type: for arrays of several types side by side, in each of which a warp moves consecutive bytes. `p`
// must be aligned to them all.
DEVICE void load_four_once(const float *p, float (&v)[4]) { load_vector_once(p, v); }
template <class T> DEVICE void load_four_once(const T *p, float (&v)[4]) {
    Pair words = load_once(reinterpret_cast<const Pair *>(p));
    UNROLL
    for (int i = 0; i < 2; i++) {
        v[2 * i] = widen(T{(u16)words.w[i]});
        v[2 * i + 1] = widen(T{(u16)(words.w[i] >> 16)});
    }
}
DEVICE void store_four(float *p, const float (&v)[4]) { store_vector(p, v); }
template <class T> DEVICE void store_four(T *p, const float (&v)[4]) {
    store(reinterpret_cast<Pair *>(p), Pair{{pack<T>(v[0], v[1]), pack<T>(v[2], v[3])}});
}

template <class T> DEVICE float load_wide(const T *p) { return widen(load(p)); }
template <class T> DEVICE void store_narrow(T *p, float x) {
    T y;
    narrow(x, y);
    store(p, y);
}
// To T and back.
template <class T> DEVICE float rounded(float x) {
    T y;
    narrow(x, y);
    return widen(y);
}

// As many elements as a vector has, or one, which may be anywhere.
template <class T, int N> DEVICE void load_group(const T *p, float (&v)[N]) {
    static_assert(N == LANES<T> || N == 1, "a vector or one element");
    if constexpr (N == 1)
        v[0] = load_wide(p);
    else
        load_vector(p, v);
}
template <class T, int N> DEVICE void store_group(T *p, const float (&v)[N]) {
    static_assert(N == LANES<T> || N == 1, "a vector or one element");
    if constexpr (N == 1)
        store_narrow(p, v[0]);
    else
        store_vector(p, v);
}
