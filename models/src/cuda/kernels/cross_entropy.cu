// Cross-entropy of rows of f32 logits, and the gradient of its sum times `scale`. ELEMENT is the gradient's type.
#include "block.cuh"
#include "vector.cuh"

using T = ELEMENT;

constexpr int THREADS = 512;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// The maximum of what was seen, and the sum of exponentials relative to it.
struct Online {
    float most = -infinity(), sum = 0.f;

    template <int N> METHOD void add(const float (&x)[N]) {
        float higher = most;
        UNROLL
        for (int i = 0; i < N; i++) higher = max_of(higher, x[i]);
        // Nothing but minus infinity so far adds nothing, where the differences would not be numbers.
        float shift = higher == -infinity() ? 0.f : higher;
        sum *= exp2_fast((most - shift) * LOG2_E);
        UNROLL
        for (int i = 0; i < N; i++) sum += exp2_fast((x[i] - shift) * LOG2_E);
        most = higher;
    }
};

// One block a row: losses[row] = log(sum(exp(logits))) - logits[target], and d_logits, unless null, its gradient. A target
// outside the row gives NaN.
KERNEL(THREADS, 2, cross_entropy, float *losses, T *d_logits, const float *logits, const u32 *targets, int width,
       float scale) {
    SHARED_ARRAY(float, most_room, MOST_WARPS);
    SHARED_ARRAY(float, sum_room, MOST_WARPS);
    constexpr int N = LANES<T>; // elements at once
    i64 start = (i64)block_x() * width;
    const float *row = logits + start;
    bool vectors = width % N == 0 && aligned16(logits) && aligned16(d_logits);
    auto load_many = [&](int i, float (&x)[N]) {
        UNROLL
        for (int part = 0; part < N; part += 4) {
            float four[4];
            load_vector(row + i + part, four);
            UNROLL
            for (int k = 0; k < 4; k++) x[part + k] = four[k];
        }
    };

    Online online;
    if (vectors) {
        for (int i = thread_index() * N; i < width; i += THREADS * N) {
            float x[N];
            load_many(i, x);
            online.add(x);
        }
    } else {
        for (int i = thread_index(); i < width; i += THREADS) {
            float x[1] = {load(row + i)};
            online.add(x);
        }
    }
    float most = block_max(online.most, most_room);
    float sum[1] = {online.sum * exp2_fast((online.most - most) * LOG2_E)};
    block_sum(sum, sum_room);
    u32 target = load(targets + block_x());
    if (thread_index() == 0) {
        float right = target < (u32)width ? load(row + target) : not_a_number();
        store(losses + block_x(), log2_fast(sum[0]) * LN_2 + (most - right));
    }
    if (!d_logits) return;

    float factor = div_rn(scale, sum[0]);
    auto gradient = [&](float x, int i) {
        float p = exp2_fast((x - most) * LOG2_E) * factor;
        return (u32)i == target ? p - scale : p;
    };
    if (vectors) {
        for (int i = thread_index() * N; i < width; i += THREADS * N) {
            float x[N];
            load_many(i, x);
            UNROLL
            for (int k = 0; k < N; k++) x[k] = gradient(x[k], i + k);
            store_vector(d_logits + start + i, x);
        }
    } else {
        for (int i = thread_index(); i < width; i += THREADS) store_narrow(d_logits + start + i, gradient(load(row + i), i));
    }
}
