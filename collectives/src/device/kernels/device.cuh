// Everything that is special to the device, under short names. Kernels use this header and the language, nothing
// else, so that the emulation can put a processor in the place of the GPU and run the same sources in tests.
//
// Lanes are the 32 threads of a warp. Functions marked "warp" must be called by all lanes together.
#pragma once

#if !defined(__CUDACC__)
#include "emulation.h"
#else

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// A function of the device; always inlined, so that arrays passed by reference stay in registers.
#define DEVICE static __device__ __forceinline__
// A method of the device.
#define METHOD __device__ __forceinline__
// An entry point for blocks of `threads`, of which at least `blocks` should fit a multiprocessor.
#define KERNEL(threads, blocks, name, ...) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#define UNROLL _Pragma("unroll")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA(unroll n)
// The block's dynamic shared memory, as long as the launch says.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
// A static array in shared memory.
#define SHARED_ARRAY(type, name, length) __shared__ type name[length]

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int thread_count() { return blockDim.x; }
DEVICE int lane_index() { return threadIdx.x % 32; }
DEVICE int warp_index() { return threadIdx.x / 32; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }

// All threads of the block arrive before any goes on; orders shared memory.
DEVICE void barrier() { __syncthreads(); }
// The same for the lanes of a warp.
DEVICE void warp_barrier() { __syncwarp(); }

// Four words: what one thread moves at once. Addresses of such moves are multiples of 16 bytes.
struct alignas(16) Words {
    u32 w[4];
};
// Half of that: four elements of 16 bits beside four of f32. Addresses are multiples of 8 bytes.
struct alignas(8) Pair {
    u32 w[2];
};

// Global memory. `load_once` is for data that nobody will read again soon.
template <class T> DEVICE T load(const T *p) { return *p; }
template <class T> DEVICE void store(T *p, T value) { *p = value; }

DEVICE Words load(const Words *p) {
    Words v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE Words load_once(const Words *p) {
    Words v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE Pair load_once(const Pair *p) {
    Pair v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p) : "memory");
    return v;
}

DEVICE void store(Words *p, Words v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}
DEVICE void store(Pair *p, Pair v) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]) : "memory");
}

// Sets bits of a word that several blocks write; the result does not depend on their order.
DEVICE void atomic_or(u32 *p, u32 bits) { atomicOr(p, bits); }
// The same for a sum of integers.
DEVICE void atomic_add(u64 *p, u64 value) { atomicAdd(p, value); }

// Shared memory, by pointers or by its own 32-bit addresses, which cost half of the registers.
template <class T> DEVICE T shared_load(const T *p) { return *p; }
template <class T> DEVICE void shared_store(T *p, T value) { *p = value; }

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float shared_load_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
// Two neighbours, from a multiple of 8 bytes.
DEVICE void shared_load_floats(u32 address, float &first, float &second) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}
DEVICE Words shared_load_words(u32 address) {
    Words v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "r"(address)
                 : "memory");
    return v;
}
DEVICE void shared_store_word(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Warp: the value of lane `lane_index() ^ mask`.
DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE double shuffle_xor(double v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
// Warp: whether any lane's predicate holds.
DEVICE bool any_lane(bool predicate) { return __any_sync(0xffffffffu, predicate); }

// Copies 16 (4) bytes from global to shared memory in the background, or writes zeros where `valid` is false. Group
// what was started with `copy_commit`; `copy_wait<N>` waits until at most the N youngest groups are under way. Other
// threads see the data after a barrier.
DEVICE void copy_async16(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void copy_async4(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 4 : 0)
                 : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Warp: loads four matrices of 8 x 8 16-bit elements from shared memory. Lane l gives the address of row l % 8 of
// matrix l / 8 (16 bytes, aligned). Lane l gets of matrix i in r[i]: elements (l / 4, 2 * (l % 4)) and the next in
// that row; `_t` does so for the transposed matrices.
DEVICE void load_matrices(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void load_matrices_t(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// 16-bit floats: the bits, and conversions that round to nearest even.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return float_of((u32)x.bits << 16); }
DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE void narrow(float x, float &y) { y = x; }
DEVICE void narrow(float x, bf16 &y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void narrow(float x, f16 &y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

// Two elements in a word, the first in the low half.
template <class T> DEVICE u32 pack(float first, float second);
template <> __device__ __forceinline__ u32 pack<bf16>(float first, float second) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
template <> __device__ __forceinline__ u32 pack<f16>(float first, float second) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

// Warp: c (16 x 8, f32) += a (16 x 16) * b (16 x 8) on the tensor cores; volatile, so that the compiler does not move it
// to where only some lanes come. Spread over the lanes as PTX says for mma.m16n8k16: with g = lane / 4 and
// t = 2 * (lane % 4),
//   a[0] = (g, t), a[1] = (g + 8, t), a[2] = (g, t + 8), a[3] = (g + 8, t + 8), each with its right neighbour;
//   b[0] = (t, g), b[1] = (t + 8, g), each with its lower neighbour;
//   c[0] = (g, t), c[1] = (g, t + 1), c[2] = (g + 8, t), c[3] = (g + 8, t + 1).
template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void multiply<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same value, computed where this stands: the compiler may not move what depends on it out of a loop, where it would
// occupy registers.
DEVICE i64 here(i64 x) {
    asm volatile("" : "+l"(x));
    return x;
}
DEVICE u32 here(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Fast, to about 2^-22; 2^-inf is 0.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }

// One IEEE rounding each, and never contracted into a fused multiply-add: for what must have the CPU's bits.
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
DEVICE double div_rn(double a, double b) { return __ddiv_rn(a, b); }

DEVICE float infinity() { return float_of(0x7f800000u); }
DEVICE float not_a_number() { return float_of(0x7fc00000u); }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
DEVICE bool aligned16(const void *p) { return ((u64)p & 15) == 0; }

#endif
