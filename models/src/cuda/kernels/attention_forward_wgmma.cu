// Causal grouped-query attention, forward, as in attention_forward.cu, on the products of warpgroups (sm_90a). A warpgroup
// owns 64 queries. While the tensor cores multiply probabilities with the values of one tile, it makes those of the next
// from scores that were multiplied before.
#include "block.cuh"
#include "wgmma.cuh"

using T = ELEMENT;

// Of a block, of which a multiprocessor has so many: what registers have room for.
constexpr int WARPGROUPS = HEAD == 64 ? 2 : 3, BLOCKS = HEAD == 64 ? 2 : 1, THREADS = WARPGROUPS * WARPGROUP;
constexpr int QUERIES = WARPGROUPS * OWNED;
constexpr int KEYS = PASSING; // of a tile
constexpr float LN_2 = 0.6931471805599453f;

// A block's shared memory: queries, then stages of keys and values. Of three stages one is filled while products read the
// values of another and the keys of the third.
constexpr int STAGES = 3, STAGE = 2 * TILE_BYTES<KEYS>;

struct Online {
    float most, sum; // in units of the scores; the sum is of this lane's columns
};

// Turns scores into probabilities relative to the running maximum, and returns the two factors (of rows g and g + 8) by
// which what was summed so far shrinks.
DEVICE void soften(float (&s)[8][4], Online (&rows)[2], float scale, float (&shrink)[2]) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        Online &row = rows[half];
        float most = row.most;
        UNROLL
        for (int n = 0; n < 8; n++) most = max_of(most, max_of(s[n][2 * half], s[n][2 * half + 1]));
        // The four lanes of a row are neighbours.
        most = max_of(most, shuffle_xor(most, 1));
        most = max_of(most, shuffle_xor(most, 2));
        shrink[half] = exp2_fast((row.most - most) * scale);
        row.most = most;
        row.sum *= shrink[half];
        float offset = most * scale;
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 2 * half; c < 2 * half + 2; c++) {
                s[n][c] = exp2_fast(s[n][c] * scale - offset);
                row.sum += s[n][c];
            }
        }
    }
}

// A block for each tile of queries of each head of each sequence. `scale` is that of the scores times log2(e). log_sums
// (sequences, heads, length).
KERNEL(THREADS, BLOCKS, attention_forward, T *out, float *log_sums, const T *q, const T *k, const T *v,
       int length, int group, int q_stride, int kv_stride, float scale, int sequences) {
    SHARED_TILES(memory);
    u32 queries = shared_address(memory), stages = queries + TILE_BYTES<QUERIES>;
    int head = block_x(), heads = grid_x(), row = sequence_index();
    if (row >= sequences) return;
    // Late queries have the most work: they start first.
    int first = (tile_count() - tile_index() - 1) * QUERIES;
    int own = warpgroup_index() * OWNED; // this warpgroup's first query, within the tile
    int mine = warp_index() * 16;        // this warp's
    int g = lane_index() / 4, t = 2 * (lane_index() % 4);

    i64 start = (i64)row * length;
    int seen = first + QUERIES < length ? first + QUERIES : length; // keys that any query of the tile sees
    int tiles = (seen + KEYS - 1) / KEYS;

    u32 kv_column = head / group * HEAD;
    auto copy_stage = [&](int tile) {
        u32 stage = stages + tile % STAGES * STAGE;
        i64 from = (start + tile * KEYS) * kv_stride + kv_column;
        copy_passing(stage, k + from, kv_stride, v + from, kv_stride, length - tile * KEYS);
        copy_commit();
    };
    // Waits for a tile and starts copying the next one.
    auto take_stage = [&](int tile) {
        copy_wait<0>();
        proxy_fence();
        barrier(); // the stage is full, and every warpgroup is done with the one before the last
        if (tile + 1 < tiles) copy_stage(tile + 1);
        return stages + tile % STAGES * STAGE;
    };
    copy_rows<QUERIES, THREADS>(queries, q + (start + first) * q_stride + head * HEAD, q_stride, length - first);
    copy_stage(0);

    float o[HALVES][8][4] = {}, s[8][4], shrink[2];
    Online online[2] = {{-infinity(), 0.f}, {-infinity(), 0.f}};
    u32 own_rows = queries + own * 128, p[4][4];
    // Scores of later keys do not count.
    auto mask = [&](int key) {
        if (key + KEYS - 1 <= first + mine) return;
        UNROLL
        for (int n = 0; n < 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) {
                if (key + n * 8 + t + c % 2 > first + mine + g + c / 2 * 8) s[n][c] = -infinity();
            }
        }
    };

    u32 stage = take_stage(0);
    warpgroup_fence();
    against<QUERIES>(s, own_rows, stage, T{});
    warpgroup_commit();
    warpgroup_wait<0>(s);
    mask(0);
    soften(s, online, scale, shrink);
    as_weights<T>(p, s);
    u32 values = stage + TILE_BYTES<KEYS>;

    for (int tile = 1; tile < tiles; tile++) {
        stage = take_stage(tile);
        int key = tile * KEYS;
        if (key >= first + own + OWNED) continue; // later than all of this warpgroup's queries
        warpgroup_fence();
        against<QUERIES>(s, own_rows, stage, T{});
        warpgroup_commit();
        accumulate<T>(o, p, values);
        warpgroup_commit();
        warpgroup_wait<1>(s);
        mask(key);
        soften(s, online, scale, shrink);
        UNROLL
        for (int half = 0; half < HALVES; half++) warpgroup_wait<0>(o[half]);
        // Late tiles seldom have a higher score than all before.
        if (any_lane(shrink[0] != 1.f || shrink[1] != 1.f)) {
            UNROLL
            for (int n = 0; n < HEAD / 8; n++) {
                UNROLL
                for (int c = 0; c < 4; c++) o[n / 8][n % 8][c] *= shrink[c / 2];
            }
        }
        as_weights<T>(p, s);
        values = stage + TILE_BYTES<KEYS>;
    }
    warpgroup_fence();
    accumulate<T>(o, p, values);
    warpgroup_commit();
    UNROLL
    for (int half = 0; half < HALVES; half++) warpgroup_wait<0>(o[half]);

    UNROLL
    for (int half = 0; half < 2; half++) {
        Online &r = online[half];
        float sum = r.sum + shuffle_xor(r.sum, 1);
        sum += shuffle_xor(sum, 2);
        float inverse = divide_fast(1.f, sum);
        UNROLL
        for (int n = 0; n < HEAD / 8; n++) {
            o[n / 8][n % 8][2 * half] *= inverse;
            o[n / 8][n % 8][2 * half + 1] *= inverse;
        }
        int query = first + mine + half * 8 + g;
        if (t == 0 && query < length)
            store(log_sums + ((i64)row * heads + head) * length + query, (r.most * scale + log2_fast(sum)) * LN_2);
    }
    barrier(); // the queries' place in shared memory is free
    int o_stride = heads * HEAD;
    write<QUERIES>(out + (start + first + mine) * o_stride + head * HEAD, o_stride, queries, mine, length - first - mine, o);
}
