// Sums of squares of a gradient in f64 over blocks of 1024 elements, with the bits of squares_body in
// zero/src/kernels/host.rs: sixteen lanes take every sixteenth element in order, then are added in a tree. ELEMENT is the
// gradient's type.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;
constexpr int BLOCK = 1024, LANES_OF_BLOCK = 16;

// A thread takes as many neighbouring lanes as it loads elements at once: 8 of 16 bits, or 4 of f32.
template <class E> DEVICE void sum_squares(double *out, const E *grad, i64 blocks) {
    constexpr int MINE = LANES<E>, SHARERS = LANES_OF_BLOCK / MINE;
    i64 block = (i64)block_x() * (THREADS / SHARERS) + thread_index() / SHARERS;
    int sharer = thread_index() % SHARERS;
    double sums[MINE] = {};
    if (block < blocks) {
        const E *from = grad + block * BLOCK + sharer * MINE;
        UNROLL_BY(4)
        for (int i = 0; i < BLOCK; i += LANES_OF_BLOCK) {
            float v[MINE];
            load_vector_once(from + i, v);
            UNROLL
            for (int k = 0; k < MINE; k++) {
                double x = sizeof(E) > sizeof(T) ? rounded<T>(v[k]) : v[k];
                sums[k] = add_rn(sums[k], mul_rn(x, x));
            }
        }
    }
    // The upper levels of the tree lie in different threads, the lower ones in each of them.
    UNROLL
    for (int mask = SHARERS / 2; mask > 0; mask /= 2) {
        UNROLL
        for (int k = 0; k < MINE; k++) sums[k] = add_rn(sums[k], shuffle_xor(sums[k], mask));
    }
    UNROLL
    for (int width = MINE / 2; width > 0; width /= 2) {
        UNROLL
        for (int k = 0; k < width; k++) sums[k] = add_rn(sums[k], sums[k + width]);
    }
    if (block < blocks && sharer == 0) store(out + block, sums[0]);
}

// out (blocks), of a gradient from a 16-byte boundary. One kept in f32 (`wide`) is rounded to T first.
KERNEL(THREADS, 4, squares, double *out, const void *grad, i64 blocks, int wide) {
    if (wide)
        sum_squares(out, static_cast<const float *>(grad), blocks);
    else
        sum_squares(out, static_cast<const T *>(grad), blocks);
}
