// Sums of squares of a gradient in f64 over blocks of 1024 elements, with the bits of squares_body in
// zero/src/kernels/host.rs: sixteen lanes take every sixteenth element in order, then are added in a tree. ELEMENT is the
// gradient's type.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;
constexpr int BLOCK = 1024, LANES_OF_BLOCK = 16;
constexpr int BLOCKS = THREADS / LANES_OF_BLOCK; // of the gradient, of a block of threads

// out (blocks). A gradient kept in f32 (`wide`) is rounded to T first.
KERNEL(THREADS, 4, squares, double *out, const void *grad, i64 blocks, int wide) {
    i64 block = (i64)block_x() * BLOCKS + thread_index() / LANES_OF_BLOCK;
    i64 at = block * BLOCK + thread_index() % LANES_OF_BLOCK;
    double sum = 0;
    if (block < blocks) {
        UNROLL_BY(8)
        for (int i = 0; i < BLOCK; i += LANES_OF_BLOCK) {
            double x = wide ? rounded<T>(load(static_cast<const float *>(grad) + at + i))
                            : load_wide(static_cast<const T *>(grad) + at + i);
            sum = add_rn(sum, mul_rn(x, x));
        }
    }
    UNROLL
    for (int mask = LANES_OF_BLOCK / 2; mask > 0; mask /= 2) sum = add_rn(sum, shuffle_xor(sum, mask));
    if (block < blocks && thread_index() % LANES_OF_BLOCK == 0) store(out + block, sum);
}
