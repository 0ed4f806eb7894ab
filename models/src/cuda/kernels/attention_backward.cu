// Causal grouped-query attention, backward. Probabilities are computed again from the scores and the logarithms of their
// sums. Two kernels walk the same triangle, one along the rows and one along the columns, so that every gradient is summed
// in registers by one block in a fixed order: seven products instead of five, and no atomic additions, so the same bits
// in every run. ELEMENT is bf16 or f16, HEAD 64 or 128; layouts as in attention_forward.cu.
//
// With P the probabilities, dP = dO V^T and delta = rowsum(dO * O): dS = P * (dP - delta), dQ = dS K / sqrt(HEAD),
// dK = dS^T Q / sqrt(HEAD), dV = P^T dO.
#include "block.cuh"
#include "tile.cuh"

using T = ELEMENT;

constexpr int STEPS = HEAD / 16;
constexpr int ROWS = 128; // of the tile that a block owns
constexpr int OTHERS = 64; // rows of a tile that passes by
constexpr int STRIPS = HEAD == 64 ? 2 : 1; // of 16 rows, of a warp
constexpr int WARPS = ROWS / (16 * STRIPS), THREADS = WARPS * 32;
constexpr float LOG2_E = 1.4426950408889634f;

// delta (rows, heads, length): one warp for each head of a token, `count` of them.
KERNEL(256, 4, attention_delta, float *delta, const T *out, const T *d_out, i64 count, int length, int heads) {
    i64 item = (i64)block_x() * 8 + warp_index();
    if (item >= count) return;
    i64 token = item / heads;
    int head = (int)(item - token * heads);
    float sum = 0.f;
    if (lane_index() < CHUNKS) {
        float a[8], b[8];
        load_vector(out + item * HEAD + lane_index() * 8, a);
        load_vector(d_out + item * HEAD + lane_index() * 8, b);
        UNROLL
        for (int i = 0; i < 8; i++) sum += a[i] * b[i];
    }
    sum = warp_sum(sum);
    i64 row = token / length;
    if (lane_index() == 0) store(delta + (row * heads + head) * length + token - row * length, sum);
}

// Left operands of a warp's strips of a tile, kept in registers.
DEVICE void hold(u32 (&held)[STEPS][STRIPS][4], u32 tile, int row) {
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) left_operand(held[step][strip], lane_rows(tile), row + strip * 16, step);
    }
}

// (strips of 16) x 16 products of the held rows with 16 rows of a passing tile.
DEVICE void against(float (&c)[STRIPS][2][4], const u32 (&held)[STEPS][STRIPS][4], u32 tile_rows_t, int row) {
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        u32 b[4];
        right_operands_t(b, tile_rows_t, row, step);
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) {
            multiply<T>(c[strip][0], held[step][strip], b[0], b[1]);
            multiply<T>(c[strip][1], held[step][strip], b[2], b[3]);
        }
    }
}

// sums += weights (strips x 16) * 16 rows of a passing tile.
DEVICE void accumulate(float (&sums)[STRIPS][HEAD / 8][4], const u32 (&weights)[STRIPS][4], u32 tile_rows, int row) {
    UNROLL
    for (int n = 0; n < STEPS; n++) {
        u32 b[4];
        right_operands(b, tile_rows, row, n);
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) {
            multiply<T>(sums[strip][2 * n], weights[strip], b[0], b[1]);
            multiply<T>(sums[strip][2 * n + 1], weights[strip], b[2], b[3]);
        }
    }
}

// Writes a block's sums through a tile that is free.
DEVICE void write(T *to, i64 stride, u32 tile, int row, int valid, float (&sums)[STRIPS][HEAD / 8][4], float factor) {
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++) {
        UNROLL
        for (int n = 0; n < HEAD / 8; n++) {
            UNROLL
            for (int c = 0; c < 4; c++) sums[strip][n][c] *= factor;
        }
        stage_rows<T>(tile, row + strip * 16, sums[strip]);
    }
    warp_barrier();
    store_rows<STRIPS * 16>(to + row * stride, stride, tile, row, valid - row);
}

// Shared memory: the two tiles that the block owns, then two stages of the two that pass by. With keys and values owned,
// a stage also has the logarithms and deltas of its queries.
constexpr int STAGE = 2 * TILE_BYTES<OTHERS>;
constexpr int STAGE_WITH_ROWS = STAGE + 2 * OTHERS * 4;

// Grid (heads, rows, tiles of queries). `scale` is that of the scores.
KERNEL(THREADS, 1, attention_backward_q, T *d_q, const T *q, const T *k, const T *v, const T *d_out, const float *log_sums,
       const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_MEMORY(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int head = block_x(), heads = grid_x(), row = block_y();
    int first = (grid_z() - 1 - block_z()) * ROWS; // late queries have the most work: they start first
    int mine = warp_index() * STRIPS * 16;
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int seen = first + ROWS < length ? first + ROWS : length;
    int tiles = (seen + OTHERS - 1) / OTHERS;
    u32 kv_column = head / group * HEAD;

    auto copy_stage = [&](int tile) {
        u32 stage = stages + tile % 2 * STAGE;
        i64 from = (start + tile * OTHERS) * kv_stride + here(kv_column);
        copy_tile<OTHERS, THREADS>(stage, k + from, kv_stride, length - tile * OTHERS);
        copy_tile<OTHERS, THREADS>(stage + TILE_BYTES<OTHERS>, v + from, kv_stride, length - tile * OTHERS);
        copy_commit();
    };
    copy_tile<ROWS, THREADS>(owned, q + (start + first) * q_stride + head * HEAD, q_stride, length - first);
    copy_tile<ROWS, THREADS>(owned + TILE_BYTES<ROWS>, d_out + (start + first) * o_stride + head * HEAD, o_stride,
                             length - first);
    copy_stage(0);

    float lse[STRIPS][2], del[STRIPS][2]; // of rows g and g + 8
    UNROLL
    for (int i = 0; i < STRIPS * 2; i++) {
        int query = first + mine + i * 8 + g;
        i64 at = ((i64)row * heads + head) * length + query;
        lse[i / 2][i % 2] = query < length ? load(log_sums + at) * LOG2_E : 0.f;
        del[i / 2][i % 2] = query < length ? load(delta + at) : 0.f;
    }

    u32 q_held[STEPS][STRIPS][4], d_held[STEPS][STRIPS][4];
    float dq[STRIPS][HEAD / 8][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        barrier(); // the stage is full, and every warp is done with the other one
        if (tile + 1 < tiles) copy_stage(tile + 1);
        u32 stage = stages + tile % 2 * STAGE;
        if (tile == 0) {
            hold(q_held, owned, mine);
            hold(d_held, owned + TILE_BYTES<ROWS>, mine);
        }
        u32 key_rows_t = lane_rows_t(stage), value_rows_t = lane_rows_t(stage + TILE_BYTES<OTHERS>);
        u32 key_rows = lane_rows(stage);
        UNROLL
        for (int chunk = 0; chunk < OTHERS; chunk += 16) {
            int key = tile * OTHERS + chunk;
            if (key > first + mine + STRIPS * 16 - 1) break; // later than all of this warp's queries
            float s[STRIPS][2][4] = {}, dp[STRIPS][2][4] = {};
            against(s, q_held, key_rows_t, chunk);
            against(dp, d_held, value_rows_t, chunk);
            bool crosses = key + 15 > first + mine;
            u32 ds[STRIPS][4];
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                UNROLL
                for (int n = 0; n < 2; n++) {
                    UNROLL
                    for (int c = 0; c < 4; c++) {
                        float p = exp2_fast(s[strip][n][c] * (scale * LOG2_E) - lse[strip][c / 2]);
                        int query = first + mine + strip * 16 + c / 2 * 8 + g;
                        if (crosses && key + n * 8 + t + c % 2 > query) p = 0.f;
                        s[strip][n][c] = p * (dp[strip][n][c] - del[strip][c / 2]);
                    }
                }
                as_left<T>(ds[strip], s[strip][0], s[strip][1]);
            }
            accumulate(dq, ds, key_rows, chunk);
        }
    }
    // Only this warp reads its rows of the owned tiles: they are free once all lanes are here.
    warp_barrier();
    write(d_q + (start + first) * q_stride + head * HEAD, q_stride, owned, mine, length - first, dq, scale);
}

// Grid (kv_heads, rows, tiles of keys). Sums over the queries of all heads that share the keys.
KERNEL(THREADS, 1, attention_backward_kv, T *d_k, T *d_v, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale) {
    SHARED_MEMORY(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int kv_head = block_x(), heads = grid_x() * group, row = block_y();
    int first = block_z() * ROWS; // early keys have the most work: they start first
    int mine = warp_index() * STRIPS * 16;
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int before = first / OTHERS; // tiles of queries that see none of the keys
    int tiles = (length + OTHERS - 1) / OTHERS - before;

    // Of the heads in their order, the tiles in theirs.
    auto copy_stage = [&](int number) {
        u32 stage = stages + number % 2 * STAGE_WITH_ROWS;
        int head = kv_head * group + number / tiles, query = (before + number % tiles) * OTHERS;
        i64 token = start + query;
        copy_tile<OTHERS, THREADS>(stage, q + token * q_stride + head * HEAD, q_stride, length - query);
        copy_tile<OTHERS, THREADS>(stage + TILE_BYTES<OTHERS>, d_out + token * o_stride + head * HEAD, o_stride,
                                   length - query);
        int i = thread_index();
        if (i < 2 * OTHERS) {
            int offset = i % OTHERS;
            const float *from = i < OTHERS ? log_sums : delta;
            copy_async4(stage + STAGE + i * 4, from + ((i64)row * heads + head) * length + query + offset,
                        query + offset < length);
        }
        copy_commit();
    };
    i64 kv_start = (start + first) * kv_stride + kv_head * HEAD;
    copy_tile<ROWS, THREADS>(owned, k + kv_start, kv_stride, length - first);
    copy_tile<ROWS, THREADS>(owned + TILE_BYTES<ROWS>, v + kv_start, kv_stride, length - first);
    copy_stage(0);

    u32 k_held[STEPS][STRIPS][4], v_held[STEPS][STRIPS][4];
    float dk[STRIPS][HEAD / 8][4] = {}, dv[STRIPS][HEAD / 8][4] = {};
    for (int number = 0; number < tiles * group; number++) {
        copy_wait<0>();
        barrier(); // the stage is full, and every warp is done with the other one
        if (number + 1 < tiles * group) copy_stage(number + 1);
        u32 stage = stages + number % 2 * STAGE_WITH_ROWS;
        if (number == 0) {
            hold(k_held, owned, mine);
            hold(v_held, owned + TILE_BYTES<ROWS>, mine);
        }
        u32 q_rows_t = lane_rows_t(stage), d_rows_t = lane_rows_t(stage + TILE_BYTES<OTHERS>);
        u32 q_rows = lane_rows(stage), d_rows = lane_rows(stage + TILE_BYTES<OTHERS>);
        UNROLL
        for (int chunk = 0; chunk < OTHERS; chunk += 16) {
            int query = (before + number % tiles) * OTHERS + chunk;
            if (query + 15 < first + mine) continue; // earlier than all of this warp's keys
            // Transposed: rows are keys, columns queries.
            float s[STRIPS][2][4] = {}, dp[STRIPS][2][4] = {};
            against(s, k_held, q_rows_t, chunk);
            against(dp, v_held, d_rows_t, chunk);
            bool crosses = query < first + mine + STRIPS * 16 - 1;
            u32 p[STRIPS][4], ds[STRIPS][4];
            UNROLL
            for (int n = 0; n < 2; n++) {
                UNROLL
                for (int side = 0; side < 2; side++) {
                    u32 at = stage + STAGE + (chunk + n * 8 + t + side) * 4;
                    float lse = shared_load_float(at) * LOG2_E, del = shared_load_float(at + OTHERS * 4);
                    UNROLL
                    for (int strip = 0; strip < STRIPS; strip++) {
                        UNROLL
                        for (int half = 0; half < 2; half++) {
                            int c = 2 * half + side;
                            float x = exp2_fast(s[strip][n][c] * (scale * LOG2_E) - lse);
                            int key = first + mine + strip * 16 + half * 8 + g;
                            if (crosses && key > query + n * 8 + t + side) x = 0.f;
                            s[strip][n][c] = x;
                            dp[strip][n][c] = x * (dp[strip][n][c] - del);
                        }
                    }
                }
            }
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                as_left<T>(p[strip], s[strip][0], s[strip][1]);
                as_left<T>(ds[strip], dp[strip][0], dp[strip][1]);
            }
            accumulate(dv, p, d_rows, chunk);
            accumulate(dk, ds, q_rows, chunk);
        }
    }
    warp_barrier();
    write(d_k + kv_start, kv_stride, owned, mine, length - first, dk, scale);
    write(d_v + kv_start, kv_stride, owned + TILE_BYTES<ROWS>, mine, length - first, dv, 1.f);
}
