// Causal grouped-query attention for f32 and for head sizes that the tensor-core kernels do not take: one warp a query (or,
// in the backward of keys and values, a key), tiles of 32 of the others in shared memory. ELEMENT is any float, HEAD even
// and at most 256; layouts and formulas as in attention_forward.cu and attention_backward.cu. Arithmetic is f32.
#include "block.cuh"
#include "vector.cuh"

using T = ELEMENT;

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TILE = 32;
constexpr int PITCH = HEAD + 1; // of a row in shared memory: lanes that read a column use different banks
constexpr int PARTS = (HEAD + 31) / 32; // elements of a row that a lane owns: lane, lane + 32, …
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Shared memory: two tiles, then for each warp its two rows and two values for each row of a tile.
struct Memory {
    float *tiles[2], *rows[2], *weights[2];
};
DEVICE Memory divide_memory(u8 *memory) {
    float *p = reinterpret_cast<float *>(memory), *own = p + 2 * TILE * PITCH + warp_index() * (2 * HEAD + 2 * TILE);
    return Memory{{p, p + TILE * PITCH}, {own, own + HEAD}, {own + 2 * HEAD, own + 2 * HEAD + TILE}};
}

// The block copies `valid` rows to a tile and sets the others to zero.
DEVICE void fill_tile(float *tile, const T *from, i64 stride, int valid) {
    for (int i = thread_index(); i < TILE * HEAD; i += THREADS) {
        int row = i / HEAD, column = i % HEAD;
        shared_store(tile + row * PITCH + column, row < valid ? load_wide(from + row * stride + column) : 0.f);
    }
}

// A warp copies its own row.
DEVICE void fill_row(float *row, const T *from, bool valid) {
    for (int i = lane_index(); i < HEAD; i += 32) shared_store(row + i, valid ? load_wide(from + i) : 0.f);
}

// The product of a warp's row with this lane's row of the tile.
DEVICE float dot(const float *row, const float *tile) {
    float sum = 0.f;
    for (int i = 0; i < HEAD; i++) sum += shared_load(row + i) * shared_load(tile + lane_index() * PITCH + i);
    return sum;
}

// sums += weights * tile, each lane its own columns.
DEVICE void accumulate(float (&sums)[PARTS], const float *weights, const float *tile) {
    for (int j = 0; j < TILE; j++) {
        float weight = shared_load(weights + j);
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            int column = lane_index() + 32 * i;
            if (column < HEAD) sums[i] += weight * shared_load(tile + j * PITCH + column);
        }
    }
}

DEVICE void write_row(T *to, const float (&sums)[PARTS], float factor) {
    UNROLL
    for (int i = 0; i < PARTS; i++) {
        int column = lane_index() + 32 * i;
        if (column < HEAD) store_narrow(to + column, sums[i] * factor);
    }
}

// Grid (heads, groups of WARPS queries, rows).
KERNEL(THREADS, 1, attention_forward, T *out, float *log_sums, const T *q, const T *k, const T *v, int length, int group,
       int q_stride, int kv_stride, float scale) {
    SHARED_MEMORY(memory);
    Memory m = divide_memory(memory);
    int head = block_x(), heads = grid_x(), row = block_z(), first = block_y() * WARPS, query = first + warp_index();
    i64 start = (i64)row * length, kv_start = start * kv_stride + head / group * HEAD;
    int seen = first + WARPS < length ? first + WARPS : length;
    fill_row(m.rows[0], q + (start + query) * q_stride + head * HEAD, query < length);
    float most = -infinity(), sum = 0.f, o[PARTS] = {};
    for (int key = 0; key < seen; key += TILE) {
        barrier(); // every warp is done with the tiles
        fill_tile(m.tiles[0], k + kv_start + (i64)key * kv_stride, kv_stride, length - key);
        fill_tile(m.tiles[1], v + kv_start + (i64)key * kv_stride, kv_stride, length - key);
        barrier();
        float s = dot(m.rows[0], m.tiles[0]) * (scale * LOG2_E);
        if (key + lane_index() > query) s = -infinity();
        // A tile later than this query changes nothing: the maximum is finite from the first tile on.
        float higher = max_of(most, warp_max(s));
        float p = exp2_fast(s - higher), shrink = exp2_fast(most - higher);
        most = higher;
        sum = sum * shrink + warp_sum(p);
        UNROLL
        for (int i = 0; i < PARTS; i++) o[i] *= shrink;
        shared_store(m.weights[0] + lane_index(), p);
        warp_barrier();
        accumulate(o, m.weights[0], m.tiles[1]);
        warp_barrier();
    }
    if (query >= length) return;
    write_row(out + (start + query) * heads * HEAD + head * HEAD, o, div_rn(1.f, sum));
    if (lane_index() == 0) store(log_sums + ((i64)row * heads + head) * length + query, (most + log2_fast(sum)) * LN_2);
}

// delta (rows, heads, length): one warp for each head of a token, `count` of them.
KERNEL(THREADS, 1, attention_delta, float *delta, const T *out, const T *d_out, i64 count, int length, int heads) {
    i64 item = (i64)block_x() * WARPS + warp_index();
    if (item >= count) return;
    i64 token = item / heads, row = token / length;
    float sum = 0.f;
    for (int i = lane_index(); i < HEAD; i += 32) sum += load_wide(out + item * HEAD + i) * load_wide(d_out + item * HEAD + i);
    sum = warp_sum(sum);
    if (lane_index() == 0) store(delta + (row * heads + item - token * heads) * length + token - row * length, sum);
}

// Grid (heads, groups of WARPS queries, rows).
KERNEL(THREADS, 1, attention_backward_q, T *d_q, const T *q, const T *k, const T *v, const T *d_out, const float *log_sums,
       const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_MEMORY(memory);
    Memory m = divide_memory(memory);
    int head = block_x(), heads = grid_x(), row = block_z(), first = block_y() * WARPS, query = first + warp_index();
    i64 start = (i64)row * length, kv_start = start * kv_stride + head / group * HEAD;
    int seen = first + WARPS < length ? first + WARPS : length;
    bool exists = query < length;
    i64 at = ((i64)row * heads + head) * length + query;
    float lse = exists ? load(log_sums + at) * LOG2_E : 0.f, del = exists ? load(delta + at) : 0.f;
    fill_row(m.rows[0], q + (start + query) * q_stride + head * HEAD, exists);
    fill_row(m.rows[1], d_out + (start + query) * heads * HEAD + head * HEAD, exists);
    float dq[PARTS] = {};
    for (int key = 0; key < seen; key += TILE) {
        barrier();
        fill_tile(m.tiles[0], k + kv_start + (i64)key * kv_stride, kv_stride, length - key);
        fill_tile(m.tiles[1], v + kv_start + (i64)key * kv_stride, kv_stride, length - key);
        barrier();
        float p = exp2_fast(dot(m.rows[0], m.tiles[0]) * (scale * LOG2_E) - lse);
        float ds = p * (dot(m.rows[1], m.tiles[1]) - del);
        shared_store(m.weights[0] + lane_index(), key + lane_index() > query ? 0.f : ds);
        warp_barrier();
        accumulate(dq, m.weights[0], m.tiles[0]);
        warp_barrier();
    }
    if (exists) write_row(d_q + (start + query) * q_stride + head * HEAD, dq, scale);
}

// Grid (kv_heads, groups of WARPS keys, rows). Sums over the queries of all heads that share the keys.
KERNEL(THREADS, 1, attention_backward_kv, T *d_k, T *d_v, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_MEMORY(memory);
    Memory m = divide_memory(memory);
    int kv_head = block_x(), heads = grid_x() * group, row = block_z(), first = block_y() * WARPS;
    int key = first + warp_index(), o_stride = heads * HEAD;
    i64 start = (i64)row * length, at = (start + key) * kv_stride + kv_head * HEAD;
    bool exists = key < length;
    fill_row(m.rows[0], k + at, exists);
    fill_row(m.rows[1], v + at, exists);
    float dk[PARTS] = {}, dv[PARTS] = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = first / TILE * TILE; query < length; query += TILE) {
            barrier();
            fill_tile(m.tiles[0], q + (start + query) * q_stride + head * HEAD, q_stride, length - query);
            fill_tile(m.tiles[1], d_out + (start + query) * o_stride + head * HEAD, o_stride, length - query);
            barrier();
            int mine = query + lane_index();
            float p = 0.f, ds = 0.f;
            if (mine < length) {
                i64 of = ((i64)row * heads + head) * length + mine;
                p = exp2_fast(dot(m.rows[0], m.tiles[0]) * (scale * LOG2_E) - load(log_sums + of) * LOG2_E);
                if (mine < key) p = 0.f;
                ds = p * (dot(m.rows[1], m.tiles[1]) - load(delta + of));
            }
            shared_store(m.weights[0] + lane_index(), p);
            shared_store(m.weights[1] + lane_index(), ds);
            warp_barrier();
            accumulate(dv, m.weights[0], m.tiles[1]);
            accumulate(dk, m.weights[1], m.tiles[0]);
            warp_barrier();
        }
    }
    if (!exists) return;
    write_row(d_k + at, dk, scale);
    write_row(d_v + at, dv, 1.f);
}
