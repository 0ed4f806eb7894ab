// The sum of squares of a gradient: in f64 over blocks of 1024 elements, with the bits of squares_body in
// zero/src/kernels/host.rs, sixteen lanes of which take every sixteenth element in order, then are added in a tree; and of
// all blocks without rounding, as ExactSum in zero/src/exact.rs does it. ELEMENT is the gradient's type.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCK = 1024, LANES_OF_BLOCK = 16;
// Of the exact sum: digits of 32 bits, the first of which counts 2^-298, and a word for what is not finite.
constexpr int DIGITS = 20, LOWEST = -298, WORDS = DIGITS + 1;

// Blocks that threads of this one add up, as many as share a thread block.
template <class E> constexpr int BLOCKS = THREADS * LANES<E> / LANES_OF_BLOCK;

// The sum of squares of block `block`, in the first of the threads that share it. A thread takes as many neighbouring lanes as
// it loads elements at once: 8 of 16 bits, or 4 of f32.
template <class E> DEVICE double sum_squares(const E *grad, i64 block, i64 blocks) {
    constexpr int MINE = LANES<E>, SHARERS = LANES_OF_BLOCK / MINE;
    double sums[MINE] = {};
    if (block < blocks) {
        const E *from = grad + block * BLOCK + thread_index() % SHARERS * MINE;
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
    return sums[0];
}

// What x, which is not negative, adds to a word of the exact sum.
DEVICE u64 word_of(double x, int word) {
    int exponent = (int)(bits_of(x) >> 52) & 0x7ff;
    u64 mantissa = bits_of(x) & (((u64)1 << 52) - 1);
    if (exponent == 0x7ff) return word < DIGITS ? 0 : mantissa == 0 ? 1 : (u64)1 << 32;
    // Only 0 has none.
    if (exponent > 0) mantissa |= (u64)1 << 52;
    int down = 32 * word - (exponent - 1075 - LOWEST);
    if (down <= -32 || down >= 53) return 0;
    return (u32)(down < 0 ? mantissa << -down : mantissa >> down);
}

template <class E> DEVICE void add_squares(u64 *sum, const E *grad, i64 blocks, double *of_blocks, u64 *words) {
    constexpr int SHARERS = THREADS / BLOCKS<E>;
    int place = thread_index() / SHARERS;
    double mine = sum_squares(grad, (i64)block_x() * BLOCKS<E> + place, blocks);
    if (thread_index() % SHARERS == 0) shared_store(of_blocks + place, mine);
    barrier();
    // Lanes take a word each, and warps every eighth block.
    u64 word = 0;
    if (lane_index() < WORDS) {
        for (int i = warp_index(); i < BLOCKS<E>; i += WARPS) word += word_of(shared_load(of_blocks + i), lane_index());
    }
    shared_store(words + thread_index(), word);
    barrier();
    if (thread_index() >= WORDS) return;
    for (int warp = 1; warp < WARPS; warp++) word += shared_load(words + 32 * warp + thread_index());
    if (word != 0) atomic_add(sum + thread_index(), word);
}

// sum (WORDS) += what a gradient has, from a 16-byte boundary. One kept in f32 (`wide`) is rounded to T first.
KERNEL(THREADS, 4, squares, u64 *sum, const void *grad, i64 blocks, int wide) {
    SHARED_ARRAY(double, of_blocks, THREADS / 2);
    SHARED_ARRAY(u64, words, THREADS);
    if (wide)
        add_squares(sum, static_cast<const float *>(grad), blocks, of_blocks, words);
    else
        add_squares(sum, static_cast<const T *>(grad), blocks, of_blocks, words);
}
