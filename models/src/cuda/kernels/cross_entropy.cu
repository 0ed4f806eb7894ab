// Cross-entropy of rows of logits, which become the gradient of its sum times `scale`. ELEMENT is their type; what they hold
// is computed with in f32.
#include "block.cuh"
#include "vector.cuh"

using T = ELEMENT;

// A row is read twice. With one block on each multiprocessor the rows of a large vocabulary that are under way (132 of
// 128256 bf16: 34 MB) stay in the second cache.
constexpr int THREADS = 1024;
constexpr int N = LANES<T>; // elements at once
// Loads that a thread has under way, because memory answers late.
constexpr int DEPTH = 4;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

DEVICE void put(T *p, const float (&x)[1]) { store_narrow(p, x[0]); }
DEVICE void put(T *p, const float (&x)[N]) { store_vector(p, x); }

// The maximum of what was seen, and the sum of exponentials relative to it.
struct Online {
    float most = -infinity(), sum = 0.f;

    template <int COUNT> METHOD void use(const float (&x)[COUNT], int) {
        float higher = most;
        UNROLL
        for (int k = 0; k < COUNT; k++) higher = max_of(higher, x[k]);
        // Nothing but minus infinity so far adds nothing, where the differences would not be numbers.
        float shift = higher == -infinity() ? 0.f : higher;
        sum *= exp2_fast((most - shift) * LOG2_E);
        UNROLL
        for (int k = 0; k < COUNT; k++) sum += exp2_fast((x[k] - shift) * LOG2_E);
        most = higher;
    }
};

// Puts the gradient in the place of the logits; factor is scale / sum.
struct Gradient {
    T *row;
    float most, factor, scale;
    u32 target;

    template <int COUNT> METHOD void use(float (&x)[COUNT], int first) {
        UNROLL
        for (int k = 0; k < COUNT; k++) {
            float p = exp2_fast((x[k] - most) * LOG2_E) * factor;
            x[k] = (u32)(first + k) == target ? p - scale : p;
        }
        put(row + first, x);
    }
};

// Shares a row among the threads: `user` gets elements and the index of the first, N at once or one. A thread gets the same
// every time.
template <class User> DEVICE void each(const T *row, int width, bool vectors, User &user) {
    constexpr int STEP = THREADS * N;
    if (!vectors) {
        for (int i = thread_index(); i < width; i += THREADS) {
            float x[1] = {load_wide(row + i)};
            user.use(x, i);
        }
        return;
    }
    for (int first = thread_index() * N; first < width; first += DEPTH * STEP) {
        Words words[DEPTH] = {};
        UNROLL
        for (int d = 0; d < DEPTH; d++) {
            if (first + d * STEP < width) words[d] = load(reinterpret_cast<const Words *>(row + first + d * STEP));
        }
        UNROLL
        for (int d = 0; d < DEPTH; d++) {
            if (first + d * STEP >= width) break;
            float x[N];
            unpack(words[d], x, T{});
            user.use(x, first + d * STEP);
        }
    }
}

// One block a row: losses[row] = log(sum(exp(logits))) - logits[target]; the logits become its gradient if that is wanted.
// A target outside the row gives NaN.
KERNEL(THREADS, 1, cross_entropy, float *losses, T *logits, const u32 *targets, int width, float scale, int wanted) {
    SHARED_ARRAY(float, most_room, MOST_WARPS);
    SHARED_ARRAY(float, sum_room, MOST_WARPS);
    T *row = logits + (i64)block_x() * width;
    bool vectors = width % N == 0 && aligned16(logits);
    u32 target = load(targets + block_x());
    // All have it before the barriers of the sums, behind which it is overwritten.
    float right = target < (u32)width ? load_wide(row + target) : not_a_number();

    Online online;
    each(row, width, vectors, online);
    float most = block_max(online.most, most_room);
    float sum[1] = {online.sum * exp2_fast((online.most - most) * LOG2_E)};
    block_sum(sum, sum_room);
    if (thread_index() == 0) store(losses + block_x(), log2_fast(sum[0]) * LN_2 + (most - right));
    if (!wanted) return;
    Gradient gradient{row, most, div_rn(scale, sum[0]), scale, target};
    each(row, width, vectors, gradient);
}
