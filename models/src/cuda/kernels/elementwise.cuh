// One thread for each vector of elements, and for each of the rest.
#pragma once
#include "vector.cuh"

constexpr int ELEMENTWISE_THREADS = 256;

// Calls `vector(i)` for the whole vectors of N of n elements and `single(i)` for the rest, one call a thread. Without
// `vectors` (the host found an address that is not aligned) every element is single.
template <int N, class V, class S> DEVICE void elementwise(i64 n, bool vectors, V vector, S single) {
    i64 i = (i64)block_x() * ELEMENTWISE_THREADS + thread_index();
    i64 whole = vectors ? n / N : 0;
    if (i < whole)
        vector(i * N);
    else if (i < n - whole * (N - 1))
        single(i + whole * (N - 1));
}
