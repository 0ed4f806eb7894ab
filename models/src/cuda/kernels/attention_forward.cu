// Causal grouped-query attention, forward: softmax(q k^T / sqrt(HEAD)) v, one tile of queries a block, keys and values
// in tiles with a running maximum and sum. ELEMENT is bf16 or f16, HEAD 64 or 128.
//
// Tokens are rows of `stride` elements, head h at column h * HEAD. A warp owns ROWS_OF_WARP queries from start to end: the
// scores of a tile become, in registers, the left operand of the product with the values.
#include "block.cuh"
#include "tile.cuh"

using T = ELEMENT;

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int STRIPS = 2; // of 16 queries, of a warp
constexpr int ROWS_OF_WARP = STRIPS * 16;
constexpr int QUERIES = WARPS * ROWS_OF_WARP;
constexpr int KEYS = HEAD == 64 ? 64 : 48; // of a tile
constexpr int STEPS = HEAD / 16;
constexpr float LN_2 = 0.6931471805599453f;
// Queries stay in registers where there is room for them.
constexpr bool QUERIES_IN_REGISTERS = HEAD == 64;

// A block's shared memory: queries, then two stages of keys and values.
constexpr int STAGE = 2 * TILE_BYTES<KEYS>;

struct Online {
    float most, sum; // in units of the scores; of this lane's columns
};

// Turns the scores of one strip into probabilities relative to the running maximum, and returns the two factors (of
// rows g and g + 8) by which what was summed so far shrinks.
DEVICE void soften(float (&s)[KEYS / 8][4], Online (&rows)[2], float scale, float (&shrink)[2]) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        Online &row = rows[half];
        float most = row.most;
        UNROLL
        for (int n = 0; n < KEYS / 8; n++) most = max_of(most, max_of(s[n][2 * half], s[n][2 * half + 1]));
        // The four lanes of a row are neighbours.
        most = max_of(most, shuffle_xor(most, 1));
        most = max_of(most, shuffle_xor(most, 2));
        shrink[half] = exp2_fast((row.most - most) * scale);
        row.most = most;
        float offset = most * scale;
        UNROLL
        for (int n = 0; n < KEYS / 8; n++) {
            UNROLL
            for (int c = 2 * half; c < 2 * half + 2; c++) s[n][c] = exp2_fast(s[n][c] * scale - offset);
        }
    }
}

// A block for each tile of queries of each head of each sequence. `scale` is that of the scores times log2(e). log_sums
// (sequences, heads, length).
KERNEL(THREADS, 2, attention_forward, T *out, float *log_sums, const T *q, const T *k, const T *v, int length, int group,
       int q_stride, int kv_stride, float scale, int sequences) {
    SHARED_MEMORY(memory);
    u32 queries = shared_address(memory), stages = queries + TILE_BYTES<QUERIES>;
    int head = block_x(), heads = grid_x(), row = sequence_index();
    if (row >= sequences) return;
    // Late queries have the most work: they start first.
    int first = (tile_count() - tile_index() - 1) * QUERIES;
    int mine = warp_index() * ROWS_OF_WARP; // this warp's first query, within the tile
    int g = lane_index() / 4, t = 2 * (lane_index() % 4);

    i64 start = (i64)row * length;
    int seen = first + QUERIES < length ? first + QUERIES : length; // keys that any query of the tile sees
    int tiles = (seen + KEYS - 1) / KEYS;

    u32 kv_column = head / group * HEAD;
    auto copy_stage = [&](int tile) {
        u32 stage = stages + tile % 2 * STAGE;
        i64 from = (start + tile * KEYS) * kv_stride + here(kv_column);
        copy_tile<KEYS, THREADS>(stage, k + from, kv_stride, length - tile * KEYS);
        copy_tile<KEYS, THREADS>(stage + TILE_BYTES<KEYS>, v + from, kv_stride, length - tile * KEYS);
        copy_commit();
    };
    copy_tile<QUERIES, THREADS>(queries, q + (start + first) * q_stride + head * HEAD, q_stride, length - first);
    copy_stage(0);

    float o[STRIPS][HEAD / 8][4] = {}, sums[STRIPS][4] = {};
    u32 ones = pack<T>(1.f, 1.f);
    Online online[STRIPS][2];
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++) online[strip][0] = online[strip][1] = Online{-infinity(), 0.f};
    u32 held[QUERIES_IN_REGISTERS ? STEPS : 1][STRIPS][4];

    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<0>();
        barrier(); // the stage is full, and every warp is done with the other one
        if (tile + 1 < tiles) copy_stage(tile + 1);
        u32 stage = stages + tile % 2 * STAGE;
        if (QUERIES_IN_REGISTERS && tile == 0) {
            UNROLL
            for (int step = 0; step < (QUERIES_IN_REGISTERS ? STEPS : 0); step++) {
                UNROLL
                for (int strip = 0; strip < STRIPS; strip++)
                    left_operand(held[step][strip], lane_rows(queries), mine + strip * 16, step);
            }
        }
        // Found again for each tile: with heads of 128 no register is left to keep it in.
        int key = tile * KEYS, mine = (int)here((u32)warp_index()) * ROWS_OF_WARP;
        if (key > first + mine + ROWS_OF_WARP - 1) continue; // later than all of this warp's queries

        u32 query_rows = lane_rows(queries), key_rows = lane_rows_t(stage), value_rows = lane_rows(stage + TILE_BYTES<KEYS>);
        float s[STRIPS][KEYS / 8][4] = {};
        // Set before the products, which leave minus infinity as it is: no branch keeps the exponentials of one strip from
        // running beside the products of the other.
        if (key + KEYS - 1 > first + mine) {
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                UNROLL
                for (int n = 0; n < KEYS / 8; n++) {
                    UNROLL
                    for (int c = 0; c < 4; c++) {
                        int query = first + mine + strip * 16 + g + c / 2 * 8;
                        if (key + n * 8 + t + c % 2 > query) s[strip][n][c] = -infinity();
                    }
                }
            }
        }
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            u32 a[STRIPS][4];
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                if constexpr (QUERIES_IN_REGISTERS) {
                    UNROLL
                    for (int i = 0; i < 4; i++) a[strip][i] = held[step][strip][i];
                } else {
                    left_operand(a[strip], query_rows, mine + strip * 16, step);
                }
            }
            UNROLL
            for (int n = 0; n < KEYS / 16; n++) {
                u32 b[4];
                right_operands_t(b, key_rows, n * 16, step);
                UNROLL
                for (int strip = 0; strip < STRIPS; strip++) {
                    multiply<T>(s[strip][2 * n], a[strip], b[0], b[1]);
                    multiply<T>(s[strip][2 * n + 1], a[strip], b[2], b[3]);
                }
            }
        }
        UNROLL
        for (int strip = 0; strip < STRIPS; strip++) {
            float shrink[2];
            soften(s[strip], online[strip], scale, shrink);
            UNROLL
            for (int c = 0; c < 4; c++) sums[strip][c] *= shrink[c / 2];
            UNROLL
            for (int n = 0; n < HEAD / 8; n++) {
                UNROLL
                for (int c = 0; c < 4; c++) o[strip][n][c] *= shrink[c / 2];
            }
        }
        UNROLL
        for (int step = 0; step < KEYS / 16; step++) {
            u32 p[STRIPS][4];
            UNROLL
            for (int strip = 0; strip < STRIPS; strip++) {
                as_left<T>(p[strip], s[strip][2 * step], s[strip][2 * step + 1]);
                multiply<T>(sums[strip], p[strip], ones, ones);
            }
            UNROLL
            for (int n = 0; n < STEPS; n++) {
                u32 b[4];
                right_operands(b, value_rows, step * 16, n);
                UNROLL
                for (int strip = 0; strip < STRIPS; strip++) {
                    multiply<T>(o[strip][2 * n], p[strip], b[0], b[1]);
                    multiply<T>(o[strip][2 * n + 1], p[strip], b[2], b[3]);
                }
            }
        }
    }

    UNROLL
    for (int strip = 0; strip < STRIPS; strip++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            Online &r = online[strip][half];
            float sum = sums[strip][2 * half];
            float inverse = divide_fast(1.f, sum);
            UNROLL
            for (int n = 0; n < HEAD / 8; n++) {
                o[strip][n][2 * half] *= inverse;
                o[strip][n][2 * half + 1] *= inverse;
            }
            int query = first + mine + strip * 16 + half * 8 + g;
            if (t == 0 && query < length)
                store(log_sums + ((i64)row * heads + head) * length + query, (r.most * scale + log2_fast(sum)) * LN_2);
        }
    }
    // Only this warp reads its queries: their place in shared memory is free, once all lanes are here.
    warp_barrier();
    UNROLL
    for (int strip = 0; strip < STRIPS; strip++) stage_rows<T>(queries, mine + strip * 16, o[strip]);
    warp_barrier();
    int o_stride = heads * HEAD;
    store_rows<ROWS_OF_WARP>(out + (start + first + mine) * o_stride + head * HEAD, o_stride, queries, mine,
                             length - first - mine);
}
