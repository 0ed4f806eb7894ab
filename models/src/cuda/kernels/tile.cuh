// Tiles of 16-bit rows in shared memory, and the operands of tensor-core products in them. HEAD is the width of a row.
#pragma once
#include "vector.cuh"

// Sixteen bytes are a chunk. Chunks of a row are permuted by the row, so that the eight rows of a matrix that
// load_matrices reads lie in different banks.
constexpr int CHUNKS = HEAD / 8;
static_assert(CHUNKS % 8 == 0, "rows of whole bank cycles");

//
// A tile is the shared address of its first row; its rows that matter here start at multiples of 8.
DEVICE u32 chunk_at(u32 tile, int row, int chunk) { return tile + (row * CHUNKS + (chunk ^ (row & 7))) * 16; }

// Bytes of a tile.
template <int ROWS> constexpr int TILE_BYTES = ROWS * HEAD * 2;

// Starts copying ROWS rows, of which the first `valid` exist, to a tile; the others become zeros. The block's threads take
// one chunk of every so many rows. `here`: registers are scarce where tiles are copied, time is not.
template <int ROWS, int THREADS, class T> DEVICE void copy_tile(u32 tile, const T *from, int stride, int valid) {
    constexpr int AT_ONCE = THREADS / CHUNKS; // rows
    static_assert(AT_ONCE % 8 == 0, "the same permutation in each round");
    static_assert(ROWS % AT_ONCE == 0, "the same work for each thread");
    int thread = here((u32)thread_index()), row = thread / CHUNKS, chunk = thread % CHUNKS;
    i64 step = here((i64)stride);
    from += row * step + chunk * 8;
    u32 to = chunk_at(tile, row, chunk);
    UNROLL
    for (int i = 0; i < ROWS; i += AT_ONCE) {
        copy_async16(to + i * CHUNKS * 16, from, i < valid - row);
        from += AT_ONCE * step;
    }
}

// Where a lane reads its operands: the address of one row of a matrix at step 0. Other steps differ in bits 5 to 7
// (128 bytes are a cycle of banks), so that a step costs one instruction and no register.
DEVICE u32 step_address(u32 lane_address, int step) { return (lane_address ^ (step % 4 * 32)) + step / 4 * 128; }

// For left operands (16 rows x 16 columns) of a product whose left matrix is the tile, and for right operands of one
// whose right matrix is the tile (sums over rows). `here`: found again for each tile, as no register is left to keep it.
DEVICE u32 lane_rows(u32 tile) {
    int lane = here((u32)lane_index());
    return chunk_at(tile, lane % 16, lane / 16);
}
// For right operands of a product with the tile's transpose: sums over columns, results are rows.
DEVICE u32 lane_rows_t(u32 tile) {
    int lane = here((u32)lane_index());
    return chunk_at(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The left operand of rows `row` + 0..16, columns 16 * step + 0..16. `row` is a multiple of 16, `at` from lane_rows.
DEVICE void left_operand(u32 (&a)[4], u32 at, int row, int step) {
    load_matrices(a, step_address(at, step) + row * CHUNKS * 16);
}
// Two right operands of a product with the tile's transpose: sums over columns 16 * step + 0..16; results are rows
// `row` + 0..8 with b[0], b[1] and + 8..16 with b[2], b[3]. `at` from lane_rows_t.
DEVICE void right_operands_t(u32 (&b)[4], u32 at, int row, int step) {
    load_matrices(b, step_address(at, step) + row * CHUNKS * 16);
}
// Two right operands of a product with the tile: sums over its rows `row` + 0..16; results are columns 16 * step + 0..8
// with b[0], b[1] and + 8..16 with b[2], b[3]. `at` from lane_rows.
DEVICE void right_operands(u32 (&b)[4], u32 at, int row, int step) {
    load_matrices_t(b, step_address(at, step) + row * CHUNKS * 16);
}

// The results of two neighbouring 16 x 8 products as the left operand of the next product.
template <class T> DEVICE void as_left(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack<T>(left[0], left[1]);
    a[1] = pack<T>(left[2], left[3]);
    a[2] = pack<T>(right[0], right[1]);
    a[3] = pack<T>(right[2], right[3]);
}

// Writes a warp's results (16 rows from `row`, HEAD columns) into its own rows of a tile, for store_rows.
template <class T> DEVICE void stage_rows(u32 tile, int row, const float (&c)[HEAD / 8][4]) {
    int g = lane_index() / 4, t = lane_index() % 4;
    UNROLL
    for (int n = 0; n < HEAD / 8; n++) {
        shared_store_word(chunk_at(tile, row + g, n) + t * 4, pack<T>(c[n][0], c[n][1]));
        shared_store_word(chunk_at(tile, row + g + 8, n) + t * 4, pack<T>(c[n][2], c[n][3]));
    }
}

// Warp: writes ROWS rows of the tile from `row` to global memory, of which the first `valid` exist.
template <int ROWS, class T> DEVICE void store_rows(T *to, i64 stride, u32 tile, int row, int valid) {
    UNROLL
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int item = i * 32 + lane_index(), r = item / CHUNKS, chunk = item % CHUNKS;
        if (r < valid) {
            Words words = shared_load_words(chunk_at(tile, row + r, chunk));
            store(reinterpret_cast<Words *>(to + r * stride + chunk * 8), words);
        }
    }
}

// Which sequence and which of its tiles a block has, of a grid (heads, TOGETHER * tiles, sequences / TOGETHER). Blocks that
// run at the same time read the same rows, which the second cache then has; with the tiles of several sequences together the
// last blocks to start are short ones, as those with most work come first.
constexpr int TOGETHER = 4;
DEVICE int sequence_index() { return block_z() * TOGETHER + block_y() % TOGETHER; }
DEVICE int tile_index() { return block_y() / TOGETHER; }
DEVICE int tile_count() { return grid_y() / TOGETHER; }
