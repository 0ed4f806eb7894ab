// Rows of a table by token, and the sum of gradients of rows by token, in a fixed order.
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

template <int N> DEVICE void copy_row(T *out, const T *table, const u32 *tokens, u32 items, u32 groups, int width) {
    u32 item = (u32)block_x() * THREADS + thread_index();
    if (item >= items) return;
    u32 position = item / groups, column = (item - position * groups) * N;
    const T *from = table + (i64)load(tokens + position) * width + column;
    T *to = out + (i64)position * width + column;
    if constexpr (N == 1)
        store(to, load(from));
    else
        store(reinterpret_cast<Words *>(to), load(reinterpret_cast<const Words *>(from)));
}

// out (n, width) = rows of table at tokens. One thread takes one item: an element, or with `vectors` 16 bytes; a row has
// `groups` of them.
KERNEL(THREADS, 4, embed_forward, T *out, const T *table, const u32 *tokens, u32 items, u32 groups, int width, int vectors) {
    if (vectors)
        copy_row<LANES<T>>(out, table, tokens, items, groups, width);
    else
        copy_row<1>(out, table, tokens, items, groups, width);
}

template <int N>
DEVICE void sum_rows(T *d_table, const T *d_out, const u64 *order, int n, int width, int add) {
    SHARED_MEMORY(memory);
    float *sums = reinterpret_cast<float *>(memory); // (WARPS, 32 * N)
    int first = block_y() + block_z() * 65535;
    if (first >= n) return;
    u32 token = (u32)(load(order + first) >> 32);
    if (first > 0 && (u32)(load(order + first - 1) >> 32) == token) return;
    int column = (block_x() * 32 + lane_index()) * N;
    float sum[N] = {};
    // The warps take the token's positions in turn, and are added in their order.
    for (int i = first + warp_index(); i < n; i += WARPS) {
        u64 entry = load(order + i);
        if ((u32)(entry >> 32) != token) break;
        if (column < width) {
            float x[N];
            const T *from = d_out + (i64)(u32)entry * width + column;
            if constexpr (N == 1)
                x[0] = load_wide(from);
            else
                load_vector(from, x);
            UNROLL
            for (int k = 0; k < N; k++) sum[k] += x[k];
        }
    }
    UNROLL
    for (int k = 0; k < N; k++) shared_store(sums + (warp_index() * N + k) * 32 + lane_index(), sum[k]);
    barrier();
    if (warp_index() != 0 || column >= width) return;
    T *to = d_table + (i64)token * width + column;
    float total[N] = {};
    if (add) {
        if constexpr (N == 1)
            total[0] = load_wide(to);
        else
            load_vector(to, total);
    }
    for (int w = 0; w < WARPS; w++) {
        UNROLL
        for (int k = 0; k < N; k++) total[k] += shared_load(sums + (w * N + k) * 32 + lane_index());
    }
    if constexpr (N == 1)
        store_narrow(to, total[0]);
    else
        store_vector(to, total);
}

// Row t of d_table gets (add ? itself : 0) + the rows of d_out at the positions of token t, for every token that occurs;
// order (n) holds token << 32 | position, ascending. Grid (groups of 32 items of a row, first entries of tokens; entries
// that are not the first of their token end at once). Shared memory: WARPS * 32 * (elements at once) floats.
KERNEL(THREADS, 2, embed_backward, T *d_table, const T *d_out, const u64 *order, int n, int width, int add, int vectors) {
    if (vectors)
        sum_rows<LANES<T>>(d_table, d_out, order, n, width, add);
    else
        sum_rows<1>(d_table, d_out, order, n, width, add);
}
