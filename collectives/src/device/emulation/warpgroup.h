// The functions of kernels/warpgroup.cuh on a processor, as PTX says of wgmma. Products are made when they are waited for,
// the latest that a GPU may make them; until then their results are NaN. Checked on the way: fences that are missing,
// operands that were not written, not made visible or are being overwritten, and matrices that are none.
#pragma once

namespace emulation {

// What a thread contributes to a product of its warpgroup, and where its part of the results goes.
struct WarpgroupProduct {
    float *c;
    // The left operand's registers, or null where it is in shared memory.
    const u32 *a;
    u64 a_matrix, b_matrix;
    bool across, keep;
    float (*widen)(u16 bits);
};

void proxy_fence();
void warpgroup_fence();
void warpgroup_multiply(WarpgroupProduct product);
void warpgroup_commit();
void warpgroup_wait(int groups);

template <class T> float widen_bits(u16 bits) { return widen(T{bits}); }

} // namespace emulation

#define SHARED_TILES(name) SHARED_MEMORY(name)

DEVICE int warpgroup_index() { return thread_index() / 128; }
DEVICE void proxy_fence() { emulation::proxy_fence(); }
DEVICE void warpgroup_fence() { emulation::warpgroup_fence(); }
DEVICE void warpgroup_commit() { emulation::warpgroup_commit(); }
template <int N> DEVICE void warpgroup_wait() { emulation::warpgroup_wait(N); }
template <int N> DEVICE void warpgroup_wait(float (&)[8][4]) { emulation::warpgroup_wait(N); }

template <bool ACROSS, bool KEEP, class T>
DEVICE void warpgroup_multiply(float (&c)[8][4], const u32 (&a)[4], u64 b, T) {
    emulation::warpgroup_multiply({&c[0][0], a, 0, b, ACROSS, KEEP, emulation::widen_bits<T>});
}
template <bool ACROSS, bool KEEP, class T> DEVICE void warpgroup_multiply(float (&c)[8][4], u64 a, u64 b, T) {
    emulation::warpgroup_multiply({&c[0][0], nullptr, a, b, ACROSS, KEEP, emulation::widen_bits<T>});
}
