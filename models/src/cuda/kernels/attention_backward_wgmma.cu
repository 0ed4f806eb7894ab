// Causal grouped-query attention, backward, as in attention_backward.cu, on the products of warpgroups (sm_90a): the same
// walks, formulas and sums, a warpgroup owning 64 rows. What a passing tile adds to sums is multiplied while the scores of
// the next one are.
#include "block.cuh"
#include "wgmma.cuh"

using T = ELEMENT;

// Of a block: as many as registers have room for. What one makes of scores takes as long as the tensor cores' products, so
// that others have to use those meanwhile.
constexpr int WARPGROUPS_Q = HEAD == 64 ? 2 : 3, BLOCKS_Q = HEAD == 64 ? 2 : 1, WARPGROUPS_KV = HEAD == 64 ? 3 : 2;
constexpr float LOG2_E = 1.4426950408889634f;

// Shared memory: the two tiles that the block owns, then stages of the two that pass by. Of three stages one is filled while
// products read the two others. With keys and values owned, the logarithms and deltas of the stages' queries follow.
constexpr int STAGES = 3, STAGE = 2 * TILE_BYTES<PASSING>, ROWS_OF_STAGE = 2 * PASSING * 4;

// Waits for what is added to sums, but not for the N youngest groups of products.
template <int N> DEVICE void finish(float (&sums)[HALVES][8][4]) {
    UNROLL
    for (int half = 0; half < HALVES; half++) warpgroup_wait<N>(sums[half]);
}

DEVICE void scale_by(float (&sums)[HALVES][8][4], float factor) {
    UNROLL
    for (int n = 0; n < HEAD / 8; n++) {
        UNROLL
        for (int c = 0; c < 4; c++) sums[n / 8][n % 8][c] *= factor;
    }
}

// A block for each tile of queries of each head of each sequence. `scale` is that of the scores.
KERNEL(WARPGROUPS_Q * WARPGROUP, BLOCKS_Q, attention_backward_q, T *d_q, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale,
       int sequences) {
    constexpr int ROWS = WARPGROUPS_Q * OWNED, THREADS = WARPGROUPS_Q * WARPGROUP;
    SHARED_TILES(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int head = block_x(), heads = grid_x(), row = sequence_index();
    if (row >= sequences) return;
    int first = (tile_count() - 1 - tile_index()) * ROWS; // late queries have the most work: they start first
    int own = warpgroup_index() * OWNED; // this warpgroup's first query, within the tile
    int mine = warp_index() * 16;        // this warp's
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int seen = first + ROWS < length ? first + ROWS : length;
    int tiles = (seen + PASSING - 1) / PASSING;
    u32 kv_column = head / group * HEAD;

    auto copy_stage = [&](int tile) {
        u32 stage = stages + tile % STAGES * STAGE;
        i64 from = (start + tile * PASSING) * kv_stride + kv_column;
        copy_passing(stage, k + from, kv_stride, v + from, kv_stride, length - tile * PASSING);
        copy_commit();
    };
    copy_rows<ROWS, THREADS>(owned, q + (start + first) * q_stride + head * HEAD, q_stride, length - first);
    copy_rows<ROWS, THREADS>(owned + TILE_BYTES<ROWS>, d_out + (start + first) * o_stride + head * HEAD, o_stride,
                             length - first);
    copy_stage(0);

    float lse[2], del[2]; // of rows g and g + 8
    UNROLL
    for (int i = 0; i < 2; i++) {
        int query = first + mine + i * 8 + g;
        i64 at = ((i64)row * heads + head) * length + query;
        lse[i] = query < length ? load(log_sums + at) * LOG2_E : 0.f;
        del[i] = query < length ? load(delta + at) : 0.f;
    }

    u32 q_rows = owned + own * 128, d_rows = q_rows + TILE_BYTES<ROWS>;
    u32 ds[4][4];
    float dq[HALVES][8][4] = {}, s[8][4], dp[8][4];
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        proxy_fence();
        barrier(); // the stage is full, and every warpgroup is done with the one before the last
        if (tile + 1 < tiles) copy_stage(tile + 1);
        u32 stage = stages + tile % STAGES * STAGE;
        int key = tile * PASSING;
        if (key >= first + own + OWNED) continue; // later than all of this warpgroup's queries, as are those that follow
        warpgroup_fence();
        against<ROWS>(s, q_rows, stage, T{});
        warpgroup_commit();
        finish<1>(dq); // what was added of the tile before: its registers are free
        warpgroup_fence();
        against<ROWS>(dp, d_rows, stage + TILE_BYTES<PASSING>, T{});
        warpgroup_commit();
        warpgroup_wait<1>(s);
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) s[n][c] = exp2_fast(s[n][c] * (scale * LOG2_E) - lse[c / 2]);
        }
        int ahead = key - first - mine; // what the tile's first key is after this warp's first query
        if (ahead + PASSING - 1 > 0) {
            UNROLL
            for (int n = 0; n < 8; n++) {
                UNROLL
                for (int c = 0; c < 4; c++) s[n][c] = ahead + t - g > c / 2 * 8 - n * 8 - c % 2 ? 0.f : s[n][c];
            }
        }
        warpgroup_wait<0>(dp);
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) s[n][c] *= dp[n][c] - del[c / 2];
        }
        as_weights<T>(ds, s);
        warpgroup_fence();
        accumulate<T>(dq, ds, stage);
        warpgroup_commit();
    }
    finish<0>(dq);
    scale_by(dq, scale);
    barrier(); // the owned tiles are free
    write<ROWS>(d_q + (start + first + mine) * q_stride + head * HEAD, q_stride, owned, mine, length - first - mine, dq);
}

// A block for each tile of keys of each key/value head of each sequence. Sums over the queries of all heads that
// share the keys.
KERNEL(WARPGROUPS_KV * WARPGROUP, 1, attention_backward_kv, T *d_k, T *d_v, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale,
       int sequences) {
    constexpr int ROWS = WARPGROUPS_KV * OWNED, THREADS = WARPGROUPS_KV * WARPGROUP;
    SHARED_TILES(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    u32 rows_of_stages = stages + STAGES * STAGE;
    int kv_head = block_x(), heads = grid_x() * group, row = sequence_index();
    if (row >= sequences) return;
    int first = tile_index() * ROWS; // early keys have the most work: they start first
    int own = warpgroup_index() * OWNED, mine = warp_index() * 16;
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int before = first / PASSING; // tiles of queries that see none of the keys
    int tiles = (length + PASSING - 1) / PASSING;

    auto copy_stage = [&](int stage_index, int head, int query) {
        u32 stage = stages + stage_index * STAGE;
        i64 token = start + query;
        copy_passing(stage, q + token * q_stride + head * HEAD, q_stride, d_out + token * o_stride + head * HEAD, o_stride,
                     length - query);
        int i = thread_index();
        if (i < 2 * PASSING) {
            int offset = i % PASSING;
            const float *from = i < PASSING ? log_sums : delta;
            copy_async4(rows_of_stages + stage_index * ROWS_OF_STAGE + i * 4,
                        from + ((i64)row * heads + head) * length + query + offset, query + offset < length);
        }
        copy_commit();
    };
    i64 kv_start = (start + first) * kv_stride + kv_head * HEAD;
    copy_rows<ROWS, THREADS>(owned, k + kv_start, kv_stride, length - first);
    copy_rows<ROWS, THREADS>(owned + TILE_BYTES<ROWS>, v + kv_start, kv_stride, length - first);
    copy_stage(0, kv_head * group, before * PASSING);

    u32 k_rows = owned + own * 128, v_rows = k_rows + TILE_BYTES<ROWS>;
    u32 weights[4][4];
    float dk[HALVES][8][4] = {}, dv[HALVES][8][4] = {}, s[8][4], dp[8][4];
    // Of the heads in their order, the tiles in theirs.
    int head = kv_head * group, tile = before;
    for (int now = 0, next; head < (kv_head + 1) * group; now = next) {
        copy_wait<0>();
        proxy_fence();
        barrier(); // the stage is full, and every warpgroup is done with the one before the last
        next = now + 1 < STAGES ? now + 1 : 0;
        int query = tile * PASSING;
        if (++tile == tiles) head++, tile = before;
        if (head < (kv_head + 1) * group) copy_stage(next, head, tile * PASSING);
        u32 stage = stages + now * STAGE, logarithms = rows_of_stages + now * ROWS_OF_STAGE + t * 4;
        if (query + PASSING <= first + own) { // earlier than all of this warpgroup's keys
            warpgroup_wait<0>();              // the stage before will be filled again
            continue;
        }
        // Transposed: rows are keys, columns queries.
        warpgroup_fence();
        against<ROWS>(s, k_rows, stage, T{});
        warpgroup_commit();
        finish<1>(dk); // what was added of the tile before: its registers are free
        warpgroup_fence();
        against<ROWS>(dp, v_rows, stage + TILE_BYTES<PASSING>, T{});
        warpgroup_commit();
        float lse[8][2]; // of columns t and t + 1; loaded while the products are made
        UNROLL
        for (int n = 0; n < 8; n++) shared_load_floats(logarithms + n * 32, lse[n][0], lse[n][1]);
        warpgroup_wait<1>(s);
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) s[n][c] = exp2_fast(s[n][c] * (scale * LOG2_E) - lse[n][c % 2] * LOG2_E);
        }
        int ahead = first + mine - query; // what this warp's first key is after the tile's first query
        if (ahead + 15 > 0) {
            UNROLL
            for (int n = 0; n < 8; n++) {
                UNROLL
                for (int c = 0; c < 4; c++) s[n][c] = ahead + g - t > n * 8 + c % 2 - c / 2 * 8 ? 0.f : s[n][c];
            }
        }
        as_weights<T>(weights, s);
        warpgroup_fence();
        accumulate<T>(dv, weights, stage + TILE_BYTES<PASSING>);
        warpgroup_commit();
        warpgroup_wait<1>(dp);
        UNROLL
        for (int n = 0; n < 8; n++) {
            float del[2];
            shared_load_floats(logarithms + PASSING * 4 + n * 32, del[0], del[1]);
            UNROLL
            for (int c = 0; c < 4; c++) s[n][c] *= dp[n][c] - del[c % 2];
        }
        finish<0>(dv); // and with it the weights' registers
        as_weights<T>(weights, s);
        warpgroup_fence();
        accumulate<T>(dk, weights, stage);
        warpgroup_commit();
    }
    finish<0>(dk);
    scale_by(dk, scale);
    barrier();
    i64 to = kv_start + (i64)mine * kv_stride;
    write<ROWS>(d_k + to, kv_stride, owned, mine, length - first - mine, dk);
    write<ROWS>(d_v + to, kv_stride, owned + TILE_BYTES<ROWS>, mine, length - first - mine, dv);
}
