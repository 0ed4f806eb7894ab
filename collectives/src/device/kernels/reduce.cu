// Reductions in canonical order, with the bits of collectives/src/reduce.rs: a balanced binary tree over the inputs in rank
// order, 16-bit floats accumulated in f32 and rounded once, or delivered unrounded (`wide`). ELEMENT is one of the ten types
// of collectives, ACCUMULATOR its accumulator.
#include "vector.cuh"

using T = ELEMENT;
using Acc = ACCUMULATOR;

constexpr int THREADS = 256;
constexpr int LEVELS = 19; // of the tree above groups of four: up to 2^20 inputs

enum Operation { SUM, AVERAGE, PRODUCT, MIN, MAX };

// Integers wrap, which in C++ only unsigned ones may; the count of an average need not fit them.
template <class A, class Unsigned, class Wide> struct Integers {
    static METHOD A add(A a, A b) { return (A)((Unsigned)a + (Unsigned)b); }
    static METHOD A multiply(A a, A b) { return (A)((Unsigned)a * (Unsigned)b); }
    static METHOD A divide(A a, int count) { return (A)((Wide)a / (Wide)count); }
    static METHOD bool is_nan(A) { return false; }
};
template <class A> struct Floats {
    static METHOD A add(A a, A b) { return add_rn(a, b); }
    static METHOD A multiply(A a, A b) { return mul_rn(a, b); }
    static METHOD A divide(A a, int count) { return div_rn(a, (A)count); }
    static METHOD bool is_nan(A a) { return a != a; }
};
template <class A> struct Arithmetic;
template <> struct Arithmetic<float> : Floats<float> {};
template <> struct Arithmetic<double> : Floats<double> {};
template <> struct Arithmetic<signed char> : Integers<signed char, u32, i64> {};
template <> struct Arithmetic<u8> : Integers<u8, u32, u64> {};
template <> struct Arithmetic<int> : Integers<int, u32, i64> {};
template <> struct Arithmetic<u32> : Integers<u32, u32, u64> {};
template <> struct Arithmetic<i64> : Integers<i64, u64, i64> {};
template <> struct Arithmetic<u64> : Integers<u64, u64, u64> {};

// Of equal ones the left; a NaN when there is one.
template <int OPERATION> DEVICE Acc join(Acc a, Acc b) {
    switch (OPERATION) {
    case PRODUCT: return Arithmetic<Acc>::multiply(a, b);
    case MIN: return b < a || Arithmetic<Acc>::is_nan(b) ? b : a;
    case MAX: return b > a || Arithmetic<Acc>::is_nan(b) ? b : a;
    default: return Arithmetic<Acc>::add(a, b);
    }
}

template <class X> struct Conversion {
    static METHOD Acc widened(X x) { return widen(x); }
    static METHOD X narrowed(Acc x) {
        X y;
        narrow(x, y);
        return y;
    }
};
template <> struct Conversion<Acc> {
    static METHOD Acc widened(Acc x) { return x; }
    static METHOD Acc narrowed(Acc x) { return x; }
};

// What a thread reduces at once.
template <int N> struct Pack {
    Acc x[N];
};
template <int OPERATION, int N> DEVICE Pack<N> join(Pack<N> a, Pack<N> b) {
    UNROLL
    for (int k = 0; k < N; k++) a.x[k] = join<OPERATION>(a.x[k], b.x[k]);
    return a;
}

template <int N> DEVICE Pack<N> read(const T *from) {
    Pack<N> pack;
    if constexpr (N == 1) {
        pack.x[0] = Conversion<T>::widened(load(from));
    } else {
        Words words = load(reinterpret_cast<const Words *>(from));
        UNROLL
        for (int k = 0; k < N; k++) pack.x[k] = Conversion<T>::widened(reinterpret_cast<const T *>(&words)[k]);
    }
    return pack;
}
template <class X, int N> DEVICE void write(X *to, Pack<N> pack) {
    constexpr int AT_ONCE = 16 / (int)sizeof(X);
    if constexpr (N == 1) {
        store(to, Conversion<X>::narrowed(pack.x[0]));
    } else {
        UNROLL
        for (int part = 0; part < N; part += AT_ONCE) {
            Words words;
            UNROLL
            for (int k = 0; k < AT_ONCE; k++)
                reinterpret_cast<X *>(&words)[k] = Conversion<X>::narrowed(pack.x[part + k]);
            store(reinterpret_cast<Words *>(to + part), words);
        }
    }
}

// Walks the tree as a binary counter: leaves in order, two finished subtrees of one size merged at once. The partial
// results of up to 8 inputs stay in registers; more go through local memory.
template <int OPERATION, int N> DEVICE Pack<N> tree(const T *const *inputs, int count, i64 i) {
    auto leaf = [&](int rank) { return read<N>(load(inputs + rank) + i); };
    auto up_to_4 = [&](int rank, int n) {
        Pack<N> a = leaf(rank);
        if (n > 1) a = join<OPERATION>(a, leaf(rank + 1));
        if (n == 3) a = join<OPERATION>(a, leaf(rank + 2));
        if (n > 3) a = join<OPERATION>(a, join<OPERATION>(leaf(rank + 2), leaf(rank + 3)));
        return a;
    };
    if (count <= 4) return up_to_4(0, count);
    if (count <= 8) return join<OPERATION>(up_to_4(0, 4), up_to_4(4, count - 4));
    Pack<N> partial[LEVELS];
    int depth = 0;
    for (int rank = 0, fours = 0; rank < count; rank += 4) {
        int n = count - rank < 4 ? count - rank : 4;
        partial[depth++] = up_to_4(rank, n);
        if (n < 4) break;
        fours++;
        for (int rest = fours; rest % 2 == 0; rest /= 2) {
            depth--;
            partial[depth - 1] = join<OPERATION>(partial[depth - 1], partial[depth]);
        }
    }
    for (; depth > 1; depth--) partial[depth - 2] = join<OPERATION>(partial[depth - 2], partial[depth - 1]);
    return partial[0];
}

template <int OPERATION, int N> DEVICE void one(void *out, const T *const *inputs, int count, i64 i, int wide) {
    Pack<N> pack = tree<OPERATION, N>(inputs, count, i);
    if (OPERATION == AVERAGE) {
        UNROLL
        for (int k = 0; k < N; k++) pack.x[k] = Arithmetic<Acc>::divide(pack.x[k], count);
    }
    if (wide)
        write(static_cast<Acc *>(out) + i, pack);
    else
        write(static_cast<T *>(out) + i, pack);
}

template <int OPERATION> DEVICE void run(void *out, const T *const *inputs, int count, i64 n, int wide, int vectors) {
    constexpr int N = 16 / (int)sizeof(T);
    i64 i = (i64)block_x() * THREADS + thread_index(), whole = vectors ? n / N : 0;
    if (i < whole)
        one<OPERATION, N>(out, inputs, count, i * N, wide);
    else if (i < n - whole * (N - 1))
        one<OPERATION, 1>(out, inputs, count, i + whole * (N - 1), wide);
}

// out (n) from `count` inputs of n elements each, whose addresses are in device memory; out may be one of them unless it is
// wide and T is not. One thread takes 16 bytes if the host found all addresses aligned (`vectors`), or one element.
KERNEL(THREADS, 2, reduce, void *out, const T *const *inputs, int count, i64 n, int operation, int wide, int vectors) {
    switch (operation) {
    case SUM: return run<SUM>(out, inputs, count, n, wide, vectors);
    case AVERAGE: return run<AVERAGE>(out, inputs, count, n, wide, vectors);
    case PRODUCT: return run<PRODUCT>(out, inputs, count, n, wide, vectors);
    case MIN: return run<MIN>(out, inputs, count, n, wide, vectors);
    case MAX: return run<MAX>(out, inputs, count, n, wide, vectors);
    }
}
