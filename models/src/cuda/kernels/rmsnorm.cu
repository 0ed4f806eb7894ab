// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over rows of `width` elements, forward (optionally after adding a
// residual) and backward. ELEMENT is the stored type; arithmetic is f32.
#include "block.cuh"
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 256;

// Calls `one(i)` for each group of N consecutive elements of a row that this thread is responsible for: the same
// groups in every call.
template <int N, class F> DEVICE void each_group(int width, F one) {
    for (int i = thread_index() * N; i < width; i += thread_count() * N) one(i);
}

template <int N> DEVICE void load_group(const T *p, float (&v)[N]) {
    if constexpr (N == LANES<T>)
        load_vector(p, v);
    else
        v[0] = load_wide(p);
}
template <int N> DEVICE void store_group(T *p, const float (&v)[N]) {
    if constexpr (N == LANES<T>)
        store_vector(p, v);
    else
        store_narrow(p, v[0]);
}

template <int N> DEVICE void forward(T *y, T *sum, const T *x, const T *residual, const T *weight, int width, float eps) {
    SHARED_ARRAY(float, room, MOST_WARPS);
    i64 row = (i64)block_x() * width;
    float squares[1] = {0.f};
    each_group<N>(width, [&](int i) {
        float v[N];
        load_group(x + row + i, v);
        if (residual) {
            float r[N];
            load_group(residual + row + i, r);
            UNROLL
            for (int k = 0; k < N; k++) v[k] = rounded<T>(v[k] + r[k]);
            store_group(sum + row + i, v);
        }
        UNROLL
        for (int k = 0; k < N; k++) squares[0] += v[k] * v[k];
    });
    block_sum(squares, room);
    float scale = div_rn(1.f, sqrt_rn(squares[0] / (float)width + eps));
    const T *from = residual ? sum : x;
    each_group<N>(width, [&](int i) {
        float v[N], w[N];
        load_group(from + row + i, v);
        load_group(weight + i, w);
        UNROLL
        for (int k = 0; k < N; k++) v[k] = v[k] * scale * w[k];
        store_group(y + row + i, v);
    });
}

// One block a row. With `residual`, x + residual is written to `sum` (which may be either) and normalised.
KERNEL(THREADS, 4, rmsnorm_forward, T *y, T *sum, const T *x, const T *residual, const T *weight, int width, float eps) {
    bool vectors = width % LANES<T> == 0 && aligned16(y) && aligned16(sum) && aligned16(x) && aligned16(residual) &&
                   aligned16(weight);
    if (vectors)
        forward<LANES<T>>(y, sum, x, residual, weight, width, eps);
    else
        forward<1>(y, sum, x, residual, weight, width, eps);
}

template <int N>
DEVICE void backward(T *dx, float *dweight_parts, const T *x, const T *weight, const T *dy, int rows, int width, float eps,
                     int add) {
    SHARED_MEMORY(memory);
    SHARED_ARRAY(float, room, 2 * MOST_WARPS);
    // Each thread reads and writes its own groups only, so that these sums need no barrier.
    float *dweight = reinterpret_cast<float *>(memory);
    each_group<N>(width, [&](int i) {
        UNROLL
        for (int k = 0; k < N; k++) shared_store(dweight + i + k, 0.f);
    });
    for (int r = block_x(); r < rows; r += grid_x()) {
        i64 row = (i64)r * width;
        float sums[2] = {0.f, 0.f}; // of x^2, of x * weight * dy
        each_group<N>(width, [&](int i) {
            float v[N], w[N], g[N];
            load_group(x + row + i, v);
            load_group(dy + row + i, g);
            load_group(weight + i, w);
            UNROLL
            for (int k = 0; k < N; k++) {
                sums[0] += v[k] * v[k];
                sums[1] += v[k] * w[k] * g[k];
            }
        });
        block_sum(sums, room);
        float scale = div_rn(1.f, sqrt_rn(sums[0] / (float)width + eps));
        float along = sums[1] / (float)width * scale * scale * scale;
        each_group<N>(width, [&](int i) {
            float v[N], w[N], g[N], d[N];
            load_group(x + row + i, v);
            load_group(dy + row + i, g);
            load_group(weight + i, w);
            if (add) load_group(dx + row + i, d);
            UNROLL
            for (int k = 0; k < N; k++) {
                float own = scale * w[k] * g[k] - along * v[k];
                d[k] = add ? d[k] + own : own;
                float *sum = dweight + i + k;
                shared_store(sum, shared_load(sum) + g[k] * v[k] * scale);
            }
            store_group(dx + row + i, d);
        });
        // The next row's sums go through the same room.
        barrier();
    }
    each_group<N>(width, [&](int i) {
        UNROLL
        for (int k = 0; k < N; k++) store(dweight_parts + (i64)block_x() * width + i + k, shared_load(dweight + i + k));
    });
}

// dx = (add ? dx : 0) + gradient; block b sums the weight's gradient over rows b, b + grid, … into row b of
// dweight_parts (grid, width). Shared memory: width floats.
KERNEL(THREADS, 4, rmsnorm_backward, T *dx, float *dweight_parts, const T *x, const T *weight, const T *dy, int rows,
       int width, float eps, int add) {
    bool vectors = width % LANES<T> == 0 && aligned16(dx) && aligned16(x) && aligned16(weight) && aligned16(dy);
    if (vectors)
        backward<LANES<T>>(dx, dweight_parts, x, weight, dy, rows, width, eps, add);
    else
        backward<1>(dx, dweight_parts, x, weight, dy, rows, width, eps, add);
}

// dweight = (add ? dweight : 0) + the sum of the parts in their order. A warp takes 32 columns, so that its loads are
// whole lines; the warps of a block take turns over the parts and are added in their order.
KERNEL(THREADS, 1, rmsnorm_dweight, T *dweight, const float *parts, int count, int width, int add) {
    SHARED_ARRAY(float, sums, THREADS);
    int column = block_x() * 32 + lane_index(), warps = thread_count() / 32;
    float sum = 0.f;
    if (column < width) {
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
