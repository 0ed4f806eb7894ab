// Kernels with one mistake each, to show that the emulation notices it, and one without.
#include "device.cuh"
#include "warpgroup.cuh"

KERNEL(64, 1, correct, float *x, const float *y, int n) {
    SHARED_ARRAY(float, own, 64);
    SHARED_MEMORY(memory);
    copy_async16(shared_address(memory) + thread_index() * 16, y, true);
    copy_commit();
    shared_store(&own[thread_index()], (float)thread_index());
    copy_wait<0>();
    barrier();
    float other = shared_load(&own[63 - thread_index()]) + shared_load_float((63 - thread_index()) * 16);
    if (thread_index() < n) store(x + thread_index(), other);
}
KERNEL(64, 1, out_of_bounds, float *x, const float *, int n) {
    if (thread_index() <= n) store(x + thread_index(), 1.f);
}
KERNEL(64, 1, write_to_input, float *, const float *y, int) {
    if (thread_index() == 0) store(const_cast<float *>(y), 1.f);
}
KERNEL(64, 1, misaligned, float *, const float *y, int) { load(reinterpret_cast<const Words *>(y + 1)); }
KERNEL(64, 1, no_barrier, float *, const float *, int) {
    SHARED_ARRAY(float, own, 64);
    shared_store(&own[thread_index()], 1.f);
    barrier();
    shared_store(&own[thread_index()], 2.f);
    shared_load(&own[thread_index() ^ 32]);
}
KERNEL(64, 1, no_warp_barrier, float *, const float *, int) {
    SHARED_ARRAY(float, own, 64);
    shared_store(&own[thread_index()], 1.f);
    warp_barrier();
    shared_store(&own[thread_index()], 2.f);
    shuffle_xor(1.f, 1); // does not order memory
    shared_load(&own[thread_index() ^ 1]);
}
KERNEL(64, 1, overwrite_too_early, float *, const float *, int) {
    SHARED_ARRAY(float, own, 64);
    shared_store(&own[thread_index()], 1.f);
    barrier();
    shared_load(&own[63 - thread_index()]);
    shared_store(&own[thread_index()], 2.f);
}
KERNEL(64, 1, nobody_wrote, float *, const float *, int) {
    SHARED_ARRAY(float, own, 64);
    shared_load(&own[0]);
}
KERNEL(64, 1, no_wait, float *, const float *y, int) {
    SHARED_MEMORY(memory);
    copy_async16(shared_address(memory) + thread_index() * 16, y, true);
    copy_commit();
    barrier();
    shared_load_float(thread_index() * 16);
}
KERNEL(64, 1, waits_for_too_few, float *, const float *y, int) {
    SHARED_MEMORY(memory);
    for (int i = 0; i < 2; i++) {
        copy_async4(shared_address(memory) + (thread_index() * 2 + i) * 4, y, true);
        copy_commit();
    }
    copy_wait<1>();
    barrier();
    shared_load_float(thread_index() * 8);
    shared_load_float(thread_index() * 8 + 4);
}
KERNEL(64, 1, outside_shared, float *, const float *, int) {
    SHARED_MEMORY(memory);
    shared_store(reinterpret_cast<float *>(memory) + 256, 1.f);
}
KERNEL(64, 1, written_twice, float *x, const float *, int) { store(x, 1.f); }
KERNEL(64, 1, result_of_another_block, float *x, const float *, int) {
    if (thread_index() == 0) store(x + block_x(), load(x + 1 - block_x()));
}
KERNEL(64, 1, diverges, float *, const float *, int) {
    if (lane_index() < 16) shuffle_xor(1.f, 1);
}
KERNEL(64, 1, meets_at_different_places, float *, const float *, int) {
    if (lane_index() < 16)
        shuffle_xor(1.f, 1);
    else
        any_lane(true);
}
KERNEL(64, 1, leaves_before_the_barrier, float *, const float *, int) {
    if (thread_index() < 32) barrier();
}

// Products of warpgroups, of 128 threads. A tile of 64 rows of ones.
DEVICE void write_tile(u32 tile) {
    for (int i = 0; i < 16; i++) shared_store_word(tile + (i * 128 + thread_index()) * 4, 0x3f803f80);
}
DEVICE void multiply_tile(float (&c)[8][4], u64 matrix) {
    warpgroup_multiply<false, false>(c, matrix, matrix, bf16{});
    warpgroup_commit();
}
KERNEL(128, 1, product, float *x, const float *, int n) {
    SHARED_TILES(memory);
    u32 tile = shared_address(memory);
    write_tile(tile);
    proxy_fence();
    barrier();
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(tile));
    bool early = c[0][0] == c[0][0];
    warpgroup_wait<0>(c);
    if (thread_index() < n) store(x + thread_index(), early ? 0.f : c[7][3]);
}
KERNEL(128, 1, product_without_proxy_fence, float *, const float *, int) {
    SHARED_TILES(memory);
    u32 tile = shared_address(memory);
    write_tile(tile);
    barrier();
    proxy_fence(); // too late: whoever wrote has to
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(tile));
    warpgroup_wait<0>(c);
}
KERNEL(128, 1, product_without_fence, float *, const float *, int) {
    SHARED_TILES(memory);
    u32 tile = shared_address(memory);
    write_tile(tile);
    proxy_fence();
    barrier();
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(tile));
    warpgroup_wait<0>(c);
    multiply_tile(c, matrix_at(tile));
    warpgroup_wait<0>(c);
}
KERNEL(128, 1, product_without_wait, float *, const float *, int) {
    SHARED_TILES(memory);
    u32 tile = shared_address(memory);
    write_tile(tile);
    proxy_fence();
    barrier();
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(tile));
    warpgroup_wait<1>(c);
}
KERNEL(128, 1, product_of_what_is_overwritten, float *, const float *, int) {
    SHARED_TILES(memory);
    u32 tile = shared_address(memory);
    write_tile(tile);
    proxy_fence();
    barrier();
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(tile));
    barrier();
    write_tile(tile);
    warpgroup_wait<0>(c);
}
KERNEL(128, 1, product_without_swizzle, float *, const float *, int) {
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(0) & ~((u64)3 << 62));
    warpgroup_wait<0>(c);
}
KERNEL(128, 1, product_of_different_matrices, float *, const float *, int) {
    float c[8][4];
    warpgroup_fence();
    multiply_tile(c, matrix_at(thread_index() / 64 * 1024));
    warpgroup_wait<0>(c);
}
