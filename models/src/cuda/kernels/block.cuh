// Sums and maxima over the lanes of a warp and the threads of a block, in a fixed order.
#pragma once
#include "device.cuh"

DEVICE float warp_sum(float x) {
    UNROLL
    for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE float warp_max(float x) {
    UNROLL
    for (int mask = 16; mask > 0; mask /= 2) x = max_of(x, shuffle_xor(x, mask));
    return x;
}

// Room for one value of each warp.
constexpr int MOST_WARPS = 32;

// Sums of N values over the block, the same in every thread. Called by all threads; `room` may be used again after
// the next barrier.
template <int N> DEVICE void block_sum(float (&x)[N], float (&room)[N * MOST_WARPS]) {
    int warps = thread_count() / 32;
    UNROLL
    for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
    if (warps == 1) return;
    if (lane_index() == 0) {
        UNROLL
        for (int i = 0; i < N; i++) shared_store(&room[i * MOST_WARPS + warp_index()], x[i]);
    }
    barrier();
    UNROLL
    for (int i = 0; i < N; i++) {
        float mine = lane_index() < warps ? shared_load(&room[i * MOST_WARPS + lane_index()]) : 0.f;
        x[i] = warp_sum(mine);
    }
}

// The maximum over the block, the same in every thread.
DEVICE float block_max(float x, float (&room)[MOST_WARPS]) {
    int warps = thread_count() / 32;
    x = warp_max(x);
    if (warps == 1) return x;
    if (lane_index() == 0) shared_store(&room[warp_index()], x);
    barrier();
    return warp_max(lane_index() < warps ? shared_load(&room[lane_index()]) : -infinity());
}
