// Tiles of 16-bit rows in shared memory for products of warpgroups: halves of 64 columns one after the other, whose rows
// are the 128 bytes that swizzling permutes. HEAD is the width of a row. Tiles start at multiples of 1024 bytes.
#pragma once
#include "tile.cuh"
#include "vector.cuh"
#include "warpgroup.cuh"

constexpr int WARPGROUP = 128;    // threads
constexpr int OWNED = 64;         // rows of a tile whose results a warpgroup has
constexpr int PASSING = 64;       // rows of a tile that all warpgroups of a block multiply with
constexpr int HALVES = HEAD / 64; // of a row
constexpr int STEPS = HEAD / 16;  // of a product that sums over columns

// The address of 16 bytes of a tile of ROWS rows.
template <int ROWS> DEVICE u32 swizzled(u32 tile, int row, int chunk) {
    return tile + (chunk / 8 * ROWS + row) * 128 + ((chunk ^ row) & 7) * 16;
}

// Starts copying ROWS rows, of which the first `valid` exist, to a tile; the others become zeros. The block's first THREADS
// threads take one chunk of every so many rows.
template <int ROWS, int THREADS, class T> DEVICE void copy_rows(u32 tile, const T *from, int stride, int valid) {
    constexpr int AT_ONCE = THREADS / CHUNKS; // rows
    static_assert(AT_ONCE % 8 == 0, "the same permutation in each round");
    static_assert(ROWS % AT_ONCE == 0, "the same work for each thread");
    int row = thread_index() / CHUNKS, chunk = thread_index() % CHUNKS;
    from += (i64)row * stride + chunk * 8;
    u32 to = swizzled<ROWS>(tile, row, chunk);
    UNROLL
    for (int i = 0; i < ROWS; i += AT_ONCE) {
        copy_async16(to + i * 128, from, i < valid - row);
        from += (i64)AT_ONCE * stride;
    }
}

// Starts copying two passing tiles to a stage. Of a block's warpgroups the first two do so, to which rows can be dealt
// evenly.
template <class T>
DEVICE void copy_passing(u32 stage, const T *first, int stride, const T *second, int second_stride, int valid) {
    if (warpgroup_index() >= 2) return;
    copy_rows<PASSING, 2 * WARPGROUP>(stage, first, stride, valid);
    copy_rows<PASSING, 2 * WARPGROUP>(stage + TILE_BYTES<PASSING>, second, second_stride, valid);
}

// Columns 16 * step + 0..16 of rows of a tile of ROWS, of which the first, at `rows`, has a number that is a multiple of 8.
template <int ROWS> DEVICE u64 columns_at(u32 rows, int step) {
    return matrix_at(rows, step / 4 * ROWS * 128 + step % 4 * 32);
}

// Starts c (64 x 64) = the rows that a warpgroup owns, which begin at `owned` within a tile of ROWS, * those of a passing tile,
// transposed. Both are read in shared memory: assemblers up to that of CUDA 13.0 have given registers with rows to others
// although a loop's next round was to read them again.
template <int ROWS, class T> DEVICE void against(float (&c)[8][4], u32 owned, u32 passing, T element) {
    warpgroup_multiply<false, false>(c, columns_at<ROWS>(owned, 0), columns_at<PASSING>(passing, 0), element);
    UNROLL
    for (int step = 1; step < STEPS; step++)
        warpgroup_multiply<false, true>(c, columns_at<ROWS>(owned, step), columns_at<PASSING>(passing, step), element);
}

// Starts sums (64 x HEAD) += weights (64 x 64) * the rows of a passing tile.
template <class T> DEVICE void accumulate(float (&sums)[HALVES][8][4], const u32 (&weights)[4][4], u32 passing) {
    UNROLL
    for (int step = 0; step < 4; step++) {
        UNROLL
        for (int half = 0; half < HALVES; half++)
            warpgroup_multiply<true, true>(sums[half], weights[step], matrix_at(passing, half * PASSING * 128 + step * 2048),
                                           T{});
    }
}

// Results (64 x 64) as the left operands of the next product.
template <class T> DEVICE void as_weights(u32 (&weights)[4][4], const float (&c)[8][4]) {
    UNROLL
    for (int step = 0; step < 4; step++) as_left<T>(weights[step], c[2 * step], c[2 * step + 1]);
}

// Writes this warp's 16 rows from `row` of results, through as many rows of a tile that is free, to global memory, of
// which the first `valid` exist. `to` is that of the first of them.
template <int ROWS, class T> DEVICE void write(T *to, i64 stride, u32 tile, int row, int valid, const float (&c)[HALVES][8][4]) {
    int g = lane_index() / 4, t = lane_index() % 4;
    UNROLL
    for (int n = 0; n < HEAD / 8; n++) {
        const float(&part)[4] = c[n / 8][n % 8];
        shared_store_word(swizzled<ROWS>(tile, row + g, n) + t * 4, pack<T>(part[0], part[1]));
        shared_store_word(swizzled<ROWS>(tile, row + g + 8, n) + t * 4, pack<T>(part[2], part[3]));
    }
    warp_barrier();
    UNROLL
    for (int i = 0; i < 16 * CHUNKS / 32; i++) {
        int item = i * 32 + lane_index(), r = item / CHUNKS, chunk = item % CHUNKS;
        if (r < valid) {
            Words words = shared_load_words(swizzled<ROWS>(tile, row + r, chunk));
            store(reinterpret_cast<Words *>(to + r * stride + chunk * 8), words);
        }
    }
}
