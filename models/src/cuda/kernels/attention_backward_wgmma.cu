// Causal grouped-query attention, backward, as in attention_backward.cu, on the products of warpgroups (sm_90a): the same
// walks, formulas and sums, a warpgroup owning 64 rows. What a passing tile adds to sums is multiplied while the scores of
// the next one are.
#include "block.cuh"
#include "wgmma.cuh"

using T = ELEMENT;

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * WARPGROUP;
constexpr int ROWS = WARPGROUPS * OWNED; // of the tile that a block owns
constexpr float LOG2_E = 1.4426950408889634f;

// Shared memory: the two tiles that the block owns, then stages of the two that pass by. Of three stages one is filled while
// products read the two others. With keys and values owned, the logarithms and deltas of the stages' queries follow.
constexpr int STAGES = 3, STAGE = 2 * TILE_BYTES<PASSING>, ROWS_OF_STAGE = 2 * PASSING * 4;

#if HEAD == 64
using Left = InRegisters<ROWS>;
#else
using Left = InSharedMemory<ROWS>;
#endif

// Waits for what is added to sums.
DEVICE void finish(float (&sums)[HALVES][8][4]) {
    UNROLL
    for (int half = 0; half < HALVES; half++) warpgroup_wait<0>(sums[half]);
}

DEVICE void scale_by(float (&sums)[HALVES][8][4], float factor) {
    UNROLL
    for (int n = 0; n < HEAD / 8; n++) {
        UNROLL
        for (int c = 0; c < 4; c++) sums[n / 8][n % 8][c] *= factor;
    }
}

// Grid (heads, rows, tiles of queries). `scale` is that of the scores.
KERNEL(THREADS, 1, attention_backward_q, T *d_q, const T *q, const T *k, const T *v, const T *d_out, const float *log_sums,
       const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_TILES(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int head = block_x(), heads = grid_x(), row = block_y();
    int first = (grid_z() - 1 - block_z()) * ROWS; // late queries have the most work: they start first
    int own = thread_index() / WARPGROUP * OWNED;  // this warpgroup's first query, within the tile
    int mine = warp_index() * 16;                  // this warp's
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int seen = first + ROWS < length ? first + ROWS : length;
    int tiles = (seen + PASSING - 1) / PASSING;
    u32 kv_column = head / group * HEAD;

    auto copy_stage = [&](int tile) {
        u32 stage = stages + tile % STAGES * STAGE;
        i64 from = (start + tile * PASSING) * kv_stride + here(kv_column);
        copy_rows<PASSING, THREADS>(stage, k + from, kv_stride, length - tile * PASSING);
        copy_rows<PASSING, THREADS>(stage + TILE_BYTES<PASSING>, v + from, kv_stride, length - tile * PASSING);
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

    Left q_held, d_held;
    u32 ds[4][4];
    float dq[HALVES][8][4] = {}, s[8][4], dp[8][4];
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        proxy_fence();
        barrier(); // the stage is full, and every warpgroup is done with the one before the last
        if (tile + 1 < tiles) copy_stage(tile + 1);
        u32 stage = stages + tile % STAGES * STAGE;
        if (tile == 0) {
            q_held.take(owned);
            d_held.take(owned + TILE_BYTES<ROWS>);
        }
        int key = tile * PASSING;
        if (key >= first + own + OWNED) continue; // later than all of this warpgroup's queries, as are those that follow
        warpgroup_fence();
        q_held.against(s, stage, T{});
        warpgroup_commit();
        d_held.against(dp, stage + TILE_BYTES<PASSING>, T{});
        warpgroup_commit();
        warpgroup_wait<1>(s);
        bool crosses = key + PASSING - 1 > first + mine;
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) {
                s[n][c] = exp2_fast(s[n][c] * (scale * LOG2_E) - lse[c / 2]);
                if (crosses && key + n * 8 + t + c % 2 > first + mine + g + c / 2 * 8) s[n][c] = 0.f;
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
    finish(dq);
    scale_by(dq, scale);
    barrier(); // the owned tiles are free
    write<ROWS>(d_q + (start + first + mine) * q_stride + head * HEAD, q_stride, owned, mine, length - first - mine, dq);
}

// Grid (kv_heads, rows, tiles of keys). Sums over the queries of all heads that share the keys.
KERNEL(THREADS, 1, attention_backward_kv, T *d_k, T *d_v, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_TILES(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    u32 rows_of_stages = stages + STAGES * STAGE;
    int kv_head = block_x(), heads = grid_x() * group, row = block_y();
    int first = block_z() * ROWS; // early keys have the most work: they start first
    int own = thread_index() / WARPGROUP * OWNED, mine = warp_index() * 16;
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int before = first / PASSING; // tiles of queries that see none of the keys
    int tiles = (length + PASSING - 1) / PASSING - before;

    // Of the heads in their order, the tiles in theirs.
    auto copy_stage = [&](int number) {
        u32 stage = stages + number % STAGES * STAGE;
        int head = kv_head * group + number / tiles, query = (before + number % tiles) * PASSING;
        i64 token = start + query;
        copy_rows<PASSING, THREADS>(stage, q + token * q_stride + head * HEAD, q_stride, length - query);
        copy_rows<PASSING, THREADS>(stage + TILE_BYTES<PASSING>, d_out + token * o_stride + head * HEAD, o_stride,
                                    length - query);
        int i = thread_index();
        if (i < 2 * PASSING) {
            int offset = i % PASSING;
            const float *from = i < PASSING ? log_sums : delta;
            copy_async4(rows_of_stages + number % STAGES * ROWS_OF_STAGE + i * 4,
                        from + ((i64)row * heads + head) * length + query + offset, query + offset < length);
        }
        copy_commit();
    };
    i64 kv_start = (start + first) * kv_stride + kv_head * HEAD;
    copy_rows<ROWS, THREADS>(owned, k + kv_start, kv_stride, length - first);
    copy_rows<ROWS, THREADS>(owned + TILE_BYTES<ROWS>, v + kv_start, kv_stride, length - first);
    copy_stage(0);

    Left k_held, v_held;
    u32 p[4][4], ds[4][4];
    float dk[HALVES][8][4] = {}, dv[HALVES][8][4] = {}, s[8][4], dp[8][4];
    for (int number = 0; number < tiles * group; number++) {
        copy_wait<0>();
        proxy_fence();
        barrier(); // the stage is full, and every warpgroup is done with the one before the last
        if (number + 1 < tiles * group) copy_stage(number + 1);
        u32 stage = stages + number % STAGES * STAGE, rows_of_stage = rows_of_stages + number % STAGES * ROWS_OF_STAGE;
        if (number == 0) {
            k_held.take(owned);
            v_held.take(owned + TILE_BYTES<ROWS>);
        }
        int query = (before + number % tiles) * PASSING;
        if (query + PASSING <= first + own) { // earlier than all of this warpgroup's keys
            warpgroup_wait<0>();              // the stage before will be filled again
            continue;
        }
        // Transposed: rows are keys, columns queries.
        warpgroup_fence();
        k_held.against(s, stage, T{});
        warpgroup_commit();
        v_held.against(dp, stage + TILE_BYTES<PASSING>, T{});
        warpgroup_commit();
        warpgroup_wait<1>(s);
        bool crosses = query < first + mine + 15;
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int side = 0; side < 2; side++) {
                float lse = shared_load_float(rows_of_stage + (n * 8 + t + side) * 4) * LOG2_E;
                UNROLL
                for (int c = side; c < 4; c += 2) {
                    s[n][c] = exp2_fast(s[n][c] * (scale * LOG2_E) - lse);
                    if (crosses && first + mine + g + c / 2 * 8 > query + n * 8 + t + side) s[n][c] = 0.f;
                }
            }
        }
        as_weights<T>(p, s);
        warpgroup_fence();
        accumulate<T>(dv, p, stage + TILE_BYTES<PASSING>);
        warpgroup_commit();
        warpgroup_wait<1>(dp);
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int side = 0; side < 2; side++) {
                float del = shared_load_float(rows_of_stage + (PASSING + n * 8 + t + side) * 4);
                UNROLL
                for (int c = side; c < 4; c += 2) s[n][c] *= dp[n][c] - del;
            }
        }
        as_weights<T>(ds, s);
        warpgroup_fence();
        accumulate<T>(dk, ds, stage);
        warpgroup_commit();
    }
    finish(dk);
    finish(dv);
    scale_by(dk, scale);
    barrier();
    i64 to = kv_start + (i64)mine * kv_stride;
    write<ROWS>(d_k + to, kv_stride, owned, mine, length - first - mine, dk);
    write<ROWS>(d_v + to, kv_stride, owned + TILE_BYTES<ROWS>, mine, length - first - mine, dv);
}
