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

DEVICE u32 token_at(const u64 *order, int entry) { return (u32)(load(order + entry) >> 32); }
// In the place of a token whose lookups teach its row nothing; larger than any token.
constexpr u32 NO_ROW = ~0u;
// Whether a row's entries begin here.
DEVICE bool begins(const u64 *order, int entry) {
    u32 token = token_at(order, entry);
    return token != NO_ROW && (entry == 0 || token_at(order, entry - 1) != token);
}
// Whether this entry's token has more entries from here on than a block has warps.
DEVICE bool many(const u64 *order, int n, int entry) {
    return entry + WARPS < n && token_at(order, entry + WARPS) == token_at(order, entry);
}

// Adds columns of the rows of `entry`, entry + stride, … in this order, as long as these are of its token; some rows are on
// their way at once.
template <int N>
DEVICE void add_rows(float (&sum)[N], const T *d_out, const u64 *order, int n, u32 token, int entry, int stride, int column,
                     int width) {
    constexpr int AT_ONCE = 4;
    for (bool more = true; more; entry += AT_ONCE * stride) {
        u64 entries[AT_ONCE];
        float x[AT_ONCE][N] = {};
        UNROLL
        for (int j = 0; j < AT_ONCE; j++) {
            int i = entry + j * stride;
            entries[j] = load(order + (i < n ? i : n - 1));
        }
        UNROLL
        for (int j = 0; j < AT_ONCE; j++) {
            more = entry + j * stride < n && (u32)(entries[j] >> 32) == token;
            if (more && column < width) load_group(d_out + (i64)(u32)entries[j] * width + column, x[j]);
        }
        UNROLL
        for (int j = 0; j < AT_ONCE; j++) {
            UNROLL
            for (int k = 0; k < N; k++) sum[k] += x[j][k];
        }
    }
}

template <int N> DEVICE void sum_rows(T *d_table, const T *d_out, const u64 *order, int n, int width, int add) {
    SHARED_MEMORY(memory);
    float *sums = reinterpret_cast<float *>(memory); // (WARPS, N, 32)
    int pieces = (width + 32 * N - 1) / (32 * N);
    int column = (block_x() % pieces * 32 + lane_index()) * N, first = block_x() / pieces * WARPS;

    // Most tokens have few entries, and one warp.
    int own = first + warp_index();
    if (own < n && begins(order, own) && !many(order, n, own) && column < width) {
        u32 token = token_at(order, own);
        T *to = d_table + (i64)token * width + column;
        float sum[N] = {};
        if (add) load_group(to, sum);
        add_rows(sum, d_out, order, n, token, own, 1, column, width);
        store_group(to, sum);
    }

    // A token with many entries that begins here has the block's last entry and the one behind it.
    int head = first + WARPS - 1;
    if (head + 1 >= n) return;
    u32 token = token_at(order, head);
    if (token == NO_ROW || token_at(order, head + 1) != token) return;
    while (head > first && !begins(order, head)) head--;
    if (!begins(order, head) || !many(order, n, head)) return;
    // The warps take its entries in turn, and are added in their order.
    float sum[N] = {};
    add_rows(sum, d_out, order, n, token, head + warp_index(), WARPS, column, width);
    UNROLL
    for (int k = 0; k < N; k++) shared_store(sums + (warp_index() * N + k) * 32 + lane_index(), sum[k]);
    barrier();
    if (warp_index() != 0 || column >= width) return;
    T *to = d_table + (i64)token * width + column;
    float total[N] = {};
    if (add) load_group(to, total);
    for (int w = 0; w < WARPS; w++) {
        UNROLL
        for (int k = 0; k < N; k++) total[k] += shared_load(sums + (w * N + k) * 32 + lane_index());
    }
    store_group(to, total);
}

// Row t of d_table gets (add ? itself : 0) + the rows of d_out at the positions of token t, for every token that occurs;
// order (n) holds token << 32 | position, ascending. A block has the tokens that begin among WARPS entries, and 32 groups
// of a row, whose pieces are neighbours in the grid. Shared memory: WARPS * 32 * (elements at once) floats.
KERNEL(THREADS, 4, embed_backward, T *d_table, const T *d_out, const u64 *order, int n, int width, int add, int vectors) {
    if (vectors)
        sum_rows<LANES<T>>(d_table, d_out, order, n, width, add);
    else
        sum_rows<1>(d_table, d_out, order, n, width, add);
}
