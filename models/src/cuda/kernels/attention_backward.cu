// Causal grouped-query attention, backward. Probabilities are computed again from the scores and the logarithms of their
// sums. Two kernels walk the same triangle, one along the rows and one along the columns, so that every gradient is summed
// in registers by one block in a fixed order: seven products instead of five, and no atomic additions, so the same bits
// in every run. ELEMENT is bf16 or f16, HEAD 64 or 128; layouts as in attention_forward.cu.
//
// With P the probabilities, dP = dO V^T and delta = rowsum(dO * O): dS = P * (dP - delta), dQ = dS K / sqrt(HEAD),
// dK = dS^T Q / sqrt(HEAD), dV = P^T dO.
#include "tile.cuh"

using T = ELEMENT;

constexpr int STEPS = HEAD / 16;
constexpr int ROWS = 128; // of the tile that a block owns
constexpr int OTHERS = 64; // rows of a tile that passes by
constexpr int STRIPS = HEAD == 64 ? 2 : 1; // of 16 rows, of a warp
constexpr int WARPS = ROWS / (16 * STRIPS), THREADS = WARPS * 32;
constexpr int BLOCKS = HEAD == 64 ? 2 : 1; // of a multiprocessor: what shared memory and registers have room for
constexpr float LOG2_E = 1.4426950408889634f;

// delta (rows, heads, length): CHUNKS neighbouring lanes for each head of a token, `count` of them.
constexpr int DELTAS = 256 / CHUNKS; // of a block
KERNEL(256, 4, attention_delta, float *delta, const T *out, const T *d_out, i64 count, int length, int heads) {
    i64 item = (i64)block_x() * DELTAS + thread_index() / CHUNKS;
    int chunk = thread_index() % CHUNKS;
    float sum = 0.f;
    if (item < count) {
        float a[8], b[8];
        load_vector(out + item * HEAD + chunk * 8, a);
        load_vector(d_out + item * HEAD + chunk * 8, b);
        UNROLL
        for (int i = 0; i < 8; i++) sum += a[i] * b[i];
    }
    UNROLL
    for (int mask = CHUNKS / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (item >= count || chunk > 0) return;
    i64 token = item / heads, row = token / length;
    int head = (int)(item - token * heads);
    store(delta + (row * heads + head) * length + token - row * length, sum);
}

// Left operands of a warp's strips of a tile, kept in registers.
DEVICE void hold(u32 (&held)[STEPS][STRIPS][4], u32 tile, int row) {
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) left_operand(held[step][strip], lane_rows(tile), row + strip * 16, step);
    }
}

// What a warp has of (its rows) x (16 rows of a passing tile).
using Chunk = float[STRIPS][2][4];

// c += products of the held rows with 16 rows of a passing tile.
DEVICE void against(Chunk &c, const u32 (&held)[STEPS][STRIPS][4], u32 tile_rows_t, int row) {
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

// sums += weights * 16 rows of a passing tile.
DEVICE void accumulate(float (&sums)[STRIPS][HEAD / 8][4], const Chunk &weights, u32 tile_rows, int row) {
    u32 a[STRIPS][4];
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++) as_left<T>(a[strip], weights[strip][0], weights[strip][1]);
    UNROLL
    for (int n = 0; n < STEPS; n++) {
        u32 b[4];
        right_operands(b, tile_rows, row, n);
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) {
            multiply<T>(sums[strip][2 * n], a[strip], b[0], b[1]);
            multiply<T>(sums[strip][2 * n + 1], a[strip], b[2], b[3]);
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

// A block for each tile of queries of each head of each sequence. `scale` is that of the scores.
KERNEL(THREADS, BLOCKS, attention_backward_q, T *d_q, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale,
       int sequences) {
    SHARED_MEMORY(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int head = block_x(), heads = grid_x(), row = sequence_index();
    if (row >= sequences) return;
    int first = (tile_count() - 1 - tile_index()) * ROWS; // late queries have the most work: they start first
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
    copy_wait<0>();
    barrier(); // what the block owns is there
    hold(q_held, owned, mine);
    hold(d_held, owned + TILE_BYTES<ROWS>, mine);

    float dq[STRIPS][HEAD / 8][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        barrier(); // the stage is full, and every warp is done with the other one
        if (tile + 1 < tiles) copy_stage(tile + 1);
        u32 stage = stages + tile % 2 * STAGE;
        u32 rows_t = lane_rows_t(stage), rows = lane_rows(stage); // of keys; those of values follow
        int ahead = tile * OTHERS - first - mine; // what the tile's first key is after this warp's first query

        // `crosses`: whether some of the keys are later than some of the queries.
        auto add_chunk = [&](int chunk, bool crosses) {
            Chunk s = {}, dp = {};
            against(s, q_held, rows_t, chunk);
            against(dp, d_held, rows_t, OTHERS + chunk);
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                UNROLL
                for (int n = 0; n < 2; n++) {
                    UNROLL
                    for (int c = 0; c < 4; c++) {
                        float p = exp2_fast(s[strip][n][c] * (scale * LOG2_E) - lse[strip][c / 2]);
                        if (crosses && ahead + chunk + t - g > strip * 16 + c / 2 * 8 - n * 8 - c % 2) p = 0.f;
                        dp[strip][n][c] = p * (dp[strip][n][c] - del[strip][c / 2]);
                    }
                }
            }
            accumulate(dq, dp, rows, chunk);
        };
        // Without a branch between them, the products of one chunk run beside the exponentials of another; the kernel for
        // keys and values does so too.
        if (ahead + OTHERS - 1 <= 0) {
            UNROLL_BY(2)
            for (int chunk = 0; chunk < OTHERS; chunk += 16) add_chunk(chunk, false);
        } else {
            UNROLL_BY(1)
            for (int chunk = 0; chunk < OTHERS; chunk += 16) {
                if (ahead + chunk > STRIPS * 16 - 1) break; // later than all of this warp's queries
                add_chunk(chunk, true);
            }
        }
    }
    // Only this warp reads its rows of the owned tiles: they are free once all lanes are here.
    warp_barrier();
    write(d_q + (start + first) * q_stride + head * HEAD, q_stride, owned, mine, length - first, dq, scale);
}

// A block for each tile of keys of each key/value head of each sequence. Sums over the queries of all heads that
// share the keys.
KERNEL(THREADS, BLOCKS, attention_backward_kv, T *d_k, T *d_v, const T *q, const T *k, const T *v, const T *d_out,
       const float *log_sums, const float *delta, int length, int group, int q_stride, int kv_stride, float scale,
       int sequences) {
    SHARED_MEMORY(memory);
    u32 owned = shared_address(memory), stages = owned + 2 * TILE_BYTES<ROWS>;
    int kv_head = block_x(), heads = grid_x() * group, row = sequence_index();
    if (row >= sequences) return;
    int first = tile_index() * ROWS; // early keys have the most work: they start first
    int mine = warp_index() * STRIPS * 16;
    int g = lane_index() / 4, t = 2 * (lane_index() % 4), o_stride = heads * HEAD;
    i64 start = (i64)row * length;
    int before = first / OTHERS; // tiles of queries that see none of the keys
    int tiles = (length + OTHERS - 1) / OTHERS;

    auto copy_stage = [&](u32 stage, int head, int query) {
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
    copy_stage(stages, kv_head * group, before * OTHERS);
    u32 k_held[STEPS][STRIPS][4], v_held[STEPS][STRIPS][4];
    copy_wait<0>();
    barrier(); // what the block owns is there
    hold(k_held, owned, mine);
    hold(v_held, owned + TILE_BYTES<ROWS>, mine);

    float dk[STRIPS][HEAD / 8][4] = {}, dv[STRIPS][HEAD / 8][4] = {};
    // Of the heads in their order, the tiles in theirs.
    int head = kv_head * group, tile = before;
    for (u32 stage = stages, next; head < (kv_head + 1) * group; stage = next) {
        copy_wait<0>();
        barrier(); // the stage is full, and every warp is done with the other one
        next = stages + (stage == stages ? STAGE_WITH_ROWS : 0);
        // What this warp's first key is after the tile's first query. Found again for each tile, as are the columns: no
        // register is left to keep them in.
        int ahead = (int)here((u32)tile_index()) * ROWS + (int)here((u32)warp_index()) * STRIPS * 16 - tile * OTHERS;
        if (++tile == tiles) head++, tile = before;
        if (head < (kv_head + 1) * group) copy_stage(next, head, tile * OTHERS);
        u32 rows_t = lane_rows_t(stage), rows = lane_rows(stage); // of queries; those of d_out follow
        u32 columns = stage + STAGE + here((u32)lane_index()) % 4 * 8; // logarithms of the queries of this lane

        // Transposed: rows are keys, columns queries. `crosses`: whether some of the keys are later than some of the
        // queries.
        auto add_chunk = [&](int chunk, bool crosses) {
            Chunk s = {}, dp = {};
            against(s, k_held, rows_t, chunk);
            against(dp, v_held, rows_t, OTHERS + chunk);
            UNROLL
            for (int n = 0; n < 2; n++) {
                UNROLL
                for (int side = 0; side < 2; side++) {
                    u32 at = columns + (chunk + n * 8 + side) * 4;
                    float lse = shared_load_float(at) * LOG2_E, del = shared_load_float(at + OTHERS * 4);
                    UNROLL
                    for (int strip = 0; strip < STRIPS; strip++) {
                        UNROLL
                        for (int half = 0; half < 2; half++) {
                            int c = 2 * half + side;
                            float p = exp2_fast(s[strip][n][c] * (scale * LOG2_E) - lse);
                            if (crosses && ahead - chunk + g - t > n * 8 + side - strip * 16 - half * 8) p = 0.f;
                            s[strip][n][c] = p;
                            dp[strip][n][c] = p * (dp[strip][n][c] - del);
                        }
                    }
                }
            }
            accumulate(dv, s, rows, OTHERS + chunk);
            accumulate(dk, dp, rows, chunk);
        };
        if (ahead + STRIPS * 16 - 1 <= 0) {
            UNROLL
            for (int chunk = 0; chunk < OTHERS; chunk += 16) add_chunk(chunk, false);
        } else {
            UNROLL
            for (int chunk = 0; chunk < OTHERS; chunk += 16) {
                if (chunk + 15 < ahead) continue; // earlier than all of this warp's keys
                add_chunk(chunk, true);
            }
        }
    }
    warp_barrier();
    write(d_k + kv_start, kv_stride, owned, mine, length - first, dk, scale);
    write(d_v + kv_start, kv_stride, owned + TILE_BYTES<ROWS>, mine, length - first, dv, 1.f);
}
