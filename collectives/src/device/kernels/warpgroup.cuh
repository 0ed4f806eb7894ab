// Products of warpgroups on the tensor cores, which only sm_90a has: what is special to the device, as in device.cuh.
//
// A warpgroup is 128 threads, of which the first one's index is a multiple of 128; all of them call these together. A
// product runs in the background, where it reads matrices in shared memory: from `warpgroup_multiply` until
// `warpgroup_wait` has waited for its group, nobody touches its results or writes what it reads.
#pragma once
#include "device.cuh"

// Where a matrix of 16-bit elements lies in shared memory, for products: rows of 128 bytes whose 16-byte chunks are
// permuted by the row's number modulo 8 (the 128-byte swizzle), eight rows after eight rows. PTX calls it a matrix
// descriptor: the address, the distance of what lies beside the first 128 bytes (there is none), that of the next eight
// rows, and the kind of swizzle. The matrix begins `offset` bytes behind `address`, within a swizzled tile, which starts at a
// multiple of 1024 bytes; what all matrices of a tile have in common is then computed once, and shared memory ends below
// 2^18 bytes, beyond which addresses would be cut.
DEVICE u64 matrix_at(u32 address, int offset = 0) {
    return (u64)(1u << 30 | 1024 / 16) << 32 | ((1u << 16 | address / 16) + offset / 16);
}

#if !defined(__CUDACC__)
#include "warpgroup.h"
#else

#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "only sm_90a has products of warpgroups"
#endif

// The block's dynamic shared memory, from an address where swizzling begins anew.
#define SHARED_TILES(name) extern __shared__ __align__(1024) u8 name[]

// Which warpgroup of the block this thread is in; the compiler knows that it is the same for all lanes.
DEVICE int warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

// Makes what this thread has written to shared memory, copies that it has waited for included, visible to products that
// start after the next barrier.
DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Comes before products whose registers, results or left operands, were touched since the last one.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Groups the products since the last call.
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the N youngest groups are under way.
template <int N> DEVICE void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The same; `c` are results that are there afterwards, and the compiler may not read them earlier.
template <int N> DEVICE void warpgroup_wait(float (&c)[8][4]) {
    warpgroup_wait<N>();
    UNROLL
    for (int n = 0; n < 8; n++) {
        UNROLL
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[n][i])::"memory");
    }
}

// c (64 x 64, f32) = a (64 x 16) * b (16 x 64), or += with KEEP. Warp w of the warpgroup has rows 16 w + 0..16 of `c`, in
// c[n] their columns 8 n + 0..8, and of `a` if that is in registers; spread over its lanes as for `multiply`. Matrices in
// shared memory are `matrix_at`: of `a` the rows are m; of `b` the rows are n, or k with ACROSS.
#define WARPGROUP_COLUMNS(mode, n) mode(c[n][0]), mode(c[n][1]), mode(c[n][2]), mode(c[n][3])
#define WARPGROUP_RESULTS(mode)                                                                                         \
    WARPGROUP_COLUMNS(mode, 0), WARPGROUP_COLUMNS(mode, 1), WARPGROUP_COLUMNS(mode, 2), WARPGROUP_COLUMNS(mode, 3),    \
        WARPGROUP_COLUMNS(mode, 4), WARPGROUP_COLUMNS(mode, 5), WARPGROUP_COLUMNS(mode, 6), WARPGROUP_COLUMNS(mode, 7)
// The last operands: whether to add, the signs of a and b, and whether rows of a matrix in shared memory are k.
#define WARPGROUP_PRODUCT(mode, type, operands, keep, transposed, ...)                                                  \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                        \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                              \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " operands           \
                 ", keep, 1, 1, " transposed ";\n}"                                                                     \
                 : WARPGROUP_RESULTS(mode)                                                                              \
                 : __VA_ARGS__                                                                                          \
                 : "memory")
#define WARPGROUP_FORMS(T, type)                                                                                        \
    template <bool ACROSS, bool KEEP> DEVICE void warpgroup_multiply(float (&c)[8][4], const u32 (&a)[4], u64 b, T) {  \
        if constexpr (KEEP)                                                                                             \
            WARPGROUP_PRODUCT("+f", type, "{%32, %33, %34, %35}, %36", "1", "%37", "r"(a[0]), "r"(a[1]), "r"(a[2]),     \
                              "r"(a[3]), "l"(b), "n"((int)ACROSS));                                                     \
        else                                                                                                            \
            WARPGROUP_PRODUCT("=f", type, "{%32, %33, %34, %35}, %36", "0", "%37", "r"(a[0]), "r"(a[1]), "r"(a[2]),     \
                              "r"(a[3]), "l"(b), "n"((int)ACROSS));                                                     \
    }                                                                                                                   \
    template <bool ACROSS, bool KEEP> DEVICE void warpgroup_multiply(float (&c)[8][4], u64 a, u64 b, T) {              \
        if constexpr (KEEP)                                                                                             \
            WARPGROUP_PRODUCT("+f", type, "%32, %33", "1", "0, %34", "l"(a), "l"(b), "n"((int)ACROSS));                 \
        else                                                                                                            \
            WARPGROUP_PRODUCT("=f", type, "%32, %33", "0", "0, %34", "l"(a), "l"(b), "n"((int)ACROSS));                 \
    }
WARPGROUP_FORMS(bf16, "bf16")
WARPGROUP_FORMS(f16, "f16")

#endif
