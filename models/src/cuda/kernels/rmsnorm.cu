// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over rows of `width` elements, forward (optionally after adding a
// residual) and backward. ELEMENT is the stored type; arithmetic is f32. Where each thread has at most one group of 16
// bytes of a row, the row stays in registers; wider rows, and those that start anywhere, are read twice.
#include "block.cuh"
#include "vector.cuh"

using T = ELEMENT;

constexpr int MOST_THREADS = 1024;

// Calls `one(i)` for each group of N consecutive elements of a row that this thread is responsible for: the same
// groups in every call.
template <int N, class F> DEVICE void each_group(int width, F one) {
    for (int i = thread_index() * N; i < width; i += thread_count() * N) one(i);
}

// x, or with a residual their sum, which is also stored.
template <int N> DEVICE void load_sum(T *sum, const T *x, const T *residual, i64 at, float (&v)[N]) {
    load_group(x + at, v);
    if (!residual) return;
    float r[N];
    load_group(residual + at, r);
    UNROLL
    for (int k = 0; k < N; k++) v[k] = rounded<T>(v[k] + r[k]);
    store_group(sum + at, v);
}

template <int N> DEVICE float sum_of_squares(const float (&v)[N], float sum) {
    UNROLL
    for (int k = 0; k < N; k++) sum += v[k] * v[k];
    return sum;
}

DEVICE float scale_of(float squares, int width, float eps) {
    return div_rn(1.f, sqrt_rn(squares / (float)width + eps));
}

template <int N> DEVICE void scale_group(T *y, float (&v)[N], const float (&w)[N], float scale) {
    UNROLL
    for (int k = 0; k < N; k++) v[k] = v[k] * scale * w[k];
    store_group(y, v);
}

template <int N> DEVICE void forward(T *y, T *sum, const T *x, const T *residual, const T *weight, int width, float eps) {
    SHARED_ARRAY(float, room, MOST_WARPS);
    i64 row = (i64)block_x() * width;
    float squares[1] = {0.f};
    each_group<N>(width, [&](int i) {
        float v[N];
        load_sum(sum, x, residual, row + i, v);
        squares[0] = sum_of_squares(v, squares[0]);
    });
    block_sum(squares, room);
    float scale = scale_of(squares[0], width, eps);
    const T *from = residual ? sum : x;
    each_group<N>(width, [&](int i) {
        float v[N], w[N];
        load_group(from + row + i, v);
        load_group(weight + i, w);
        scale_group(y + row + i, v, w, scale);
    });
}

// The same with one group a thread.
DEVICE void forward_in_registers(T *y, T *sum, const T *x, const T *residual, const T *weight, int width, float eps) {
    constexpr int N = LANES<T>;
    SHARED_ARRAY(float, room, MOST_WARPS);
    int i = thread_index() * N;
    i64 at = (i64)block_x() * width + i;
    float v[N], w[N], squares[1] = {0.f};
    if (i < width) {
        load_sum(sum, x, residual, at, v);
        load_group(weight + i, w);
        squares[0] = sum_of_squares(v, 0.f);
    }
    block_sum(squares, room);
    if (i < width) scale_group(y + at, v, w, scale_of(squares[0], width, eps));
}

// One block a row. With `residual`, x + residual is written to `sum` (which may be either) and normalised.
KERNEL(MOST_THREADS, 2, rmsnorm_forward, T *y, T *sum, const T *x, const T *residual, const T *weight, int width,
       float eps) {
    bool vectors = width % LANES<T> == 0 && aligned16(y) && aligned16(sum) && aligned16(x) && aligned16(residual) &&
                   aligned16(weight);
    if (vectors && width <= thread_count() * LANES<T>)
        forward_in_registers(y, sum, x, residual, weight, width, eps);
    else if (vectors)
        forward<LANES<T>>(y, sum, x, residual, weight, width, eps);
    else
        forward<1>(y, sum, x, residual, weight, width, eps);
}

// Room for the sums of a row. There are two: a warp may be at the next row while another reads those of the last. They lie in
// the dynamic shared memory, so that who launches the kernel counts all that a block has.
using Room = float[2 * MOST_WARPS];

// What a row's gradient needs of the whole row.
struct Row {
    float scale, along;
};

// Of this thread's sums of x^2 and of x * weight * dy. Takes one room and the other in turn.
DEVICE Row row_of(float (&sums)[2], Room &room, int width, float eps) {
    block_sum(sums, room);
    float scale = scale_of(sums[0], width, eps);
    return {scale, sums[1] / (float)width * scale * scale * scale};
}

template <int N> DEVICE void add_sums(float (&sums)[2], const float (&v)[N], const float (&w)[N], const float (&g)[N]) {
    UNROLL
    for (int k = 0; k < N; k++) {
        sums[0] += v[k] * v[k];
        sums[1] += v[k] * w[k] * g[k];
    }
}

template <int N>
DEVICE void backward(T *dx, float *dweight_parts, const T *x, const T *weight, const T *dy, int rows, int width, float eps,
                     int add, Room *rooms) {
    // (N, groups): threads side by side write side by side. Each reads and writes its own groups only, so that these sums
    // need no barrier.
    float *dweight = rooms[2];
    auto place = [&](int i, int k) { return dweight + k * (width / N) + i / N; };
    each_group<N>(width, [&](int i) {
        UNROLL
        for (int k = 0; k < N; k++) shared_store(place(i, k), 0.f);
    });
    int turn = 0;
    for (int r = block_x(); r < rows; r += grid_x(), turn ^= 1) {
        i64 at = (i64)r * width;
        float sums[2] = {0.f, 0.f};
        each_group<N>(width, [&](int i) {
            float v[N], w[N], g[N];
            load_group(x + at + i, v);
            load_group(dy + at + i, g);
            load_group(weight + i, w);
            add_sums(sums, v, w, g);
        });
        Row row = row_of(sums, rooms[turn], width, eps);
        each_group<N>(width, [&](int i) {
            float v[N], w[N], g[N], d[N];
            load_group(x + at + i, v);
            load_group(dy + at + i, g);
            load_group(weight + i, w);
            if (add) load_group(dx + at + i, d);
            UNROLL
            for (int k = 0; k < N; k++) {
                float own = row.scale * w[k] * g[k] - row.along * v[k];
                d[k] = add ? d[k] + own : own;
                shared_store(place(i, k), shared_load(place(i, k)) + g[k] * v[k] * row.scale);
            }
            store_group(dx + at + i, d);
        });
    }
    each_group<N>(width, [&](int i) {
        UNROLL
        for (int k = 0; k < N; k++) store(dweight_parts + (i64)block_x() * width + i + k, shared_load(place(i, k)));
    });
}

// One group of a row and of the gradient after it, as they lie in memory.
struct Group {
    Words x, dy;
};

DEVICE Words here(Words words) {
    UNROLL
    for (int i = 0; i < 4; i++) words.w[i] = here(words.w[i]);
    return words;
}

// The same with one group a thread: the weight and its gradient stay in registers too, and while a row is summed the
// next one is on its way.
DEVICE void backward_in_registers(T *dx, float *dweight_parts, const T *x, const T *weight, const T *dy, int rows, int width,
                                  float eps, int add, Room *rooms) {
    constexpr int N = LANES<T>;
    int i = thread_index() * N;
    // Threads beyond the row add zeros.
    bool inside = i < width;
    auto words = [&](const T *p) { return load(reinterpret_cast<const Words *>(p)); };
    Group next = {};
    auto ask = [&](int r) {
        if (!inside || r >= rows) return;
        i64 at = (i64)r * width + i;
        next.x = words(x + at);
        next.dy = words(dy + at);
    };
    ask(block_x());
    Words weights = inside ? words(weight + i) : Words{};
    float dweight[N] = {};
    int turn = 0;
    for (int r = block_x(); r < rows; r += grid_x(), turn ^= 1) {
        Group group = next;
        Words old = inside && add ? words(dx + (i64)r * width + i) : Words{};
        ask(r + grid_x());
        float v[N], w[N], g[N], d[N], sums[2] = {0.f, 0.f};
        unpack(group.x, v, T{});
        unpack(group.dy, g, T{});
        unpack(weights, w, T{});
        add_sums(sums, v, w, g);
        Row row = row_of(sums, rooms[turn], width, eps);
        // Again: in between they take half of the registers.
        unpack(here(group.x), v, T{});
        unpack(here(group.dy), g, T{});
        unpack(old, d, T{});
        UNROLL
        for (int k = 0; k < N; k++) {
            float own = row.scale * w[k] * g[k] - row.along * v[k];
            d[k] = add ? d[k] + own : own;
            dweight[k] += g[k] * v[k] * row.scale;
        }
        if (inside) store_vector(dx + (i64)r * width + i, d);
    }
    if (!inside) return;
    UNROLL
    for (int k = 0; k < N; k++) store(dweight_parts + (i64)block_x() * width + i + k, dweight[k]);
}

// dx = (add ? dx : 0) + gradient; block b sums the weight's gradient over rows b, b + grid, … into row b of
// dweight_parts (grid, width). Shared memory: two rooms, and width floats.
KERNEL(MOST_THREADS, 1, rmsnorm_backward, T *dx, float *dweight_parts, const T *x, const T *weight, const T *dy, int rows,
       int width, float eps, int add) {
    bool vectors = width % LANES<T> == 0 && aligned16(dx) && aligned16(x) && aligned16(weight) && aligned16(dy);
    SHARED_MEMORY(memory);
    Room *rooms = reinterpret_cast<Room *>(memory);
    if (vectors && width <= thread_count() * LANES<T>)
        backward_in_registers(dx, dweight_parts, x, weight, dy, rows, width, eps, add, rooms);
    else if (vectors)
        backward<LANES<T>>(dx, dweight_parts, x, weight, dy, rows, width, eps, add, rooms);
    else
        backward<1>(dx, dweight_parts, x, weight, dy, rows, width, eps, add, rooms);
}

// dweight = (add ? dweight : 0) + the sum of the parts in their order. A warp takes 32 columns, so that its loads are
// whole lines; the warps of a block take turns over the parts and are added in their order.
KERNEL(MOST_THREADS, 1, rmsnorm_dweight, T *dweight, const float *parts, int count, int width, int add) {
    SHARED_ARRAY(float, sums, MOST_THREADS);
    int column = block_x() * 32 + lane_index(), warps = thread_count() / 32;
    float sum = 0.f;
    if (column < width) {
        UNROLL_BY(8)
        for (int part = warp_index(); part < count; part += warps) sum += load(parts + (i64)part * width + column);
    }
    shared_store(&sums[thread_index()], sum);
    barrier();
    if (warp_index() == 0 && column < width) {
        float total = add ? load_wide(dweight + column) : 0.f;
        for (int w = 0; w < warps; w++) total += shared_load(&sums[w * 32 + lane_index()]);
        store_narrow(dweight + column, total);
    }
}
