// The functions of kernels/device.cuh on a processor, for tests: each thread of a block is a fiber that switches at
// barriers and warp operations. Checked on the way, each failure ending the launch with a message that names the
// thread: global accesses outside the arguments' arrays, writes to read-only ones, misaligned vectors, one element
// written by two threads or read by another block than wrote it, shared memory used by two threads without a barrier
// between, shared memory read before it was written or while an asynchronous copy into it is under way, and threads
// that wait for each other at different places.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace emulation {

// Where the running fiber is.
struct Place {
    int thread, threads;
    int block[3], grid[3];
};
extern thread_local Place place __attribute__((tls_model("initial-exec")));

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

void global_read(const void *p, u32 bytes);
void global_write(const void *p, u32 bytes);
void shared_read(const void *p, u32 bytes);
void shared_write(const void *p, u32 bytes);
// Reads 16 bytes for products of warpgroups, past the caches: what was written before the last barrier and a fence.
void shared_read_by_products(const void *p, u32 bytes);
u8 *dynamic_shared();
u32 shared_address(const void *p);
u8 *shared_pointer(u32 address);
// Memory for a static shared array, the same for all threads of the block; `site` tells arrays apart.
u8 *static_shared(const void *site, u32 bytes);

void block_barrier();
// Waits for the whole warp; then one lane does `operation` for all, given every lane's operand.
using WarpOperation = void (*)(void *operands[]);
void warp_operation(WarpOperation operation, void *operand, bool orders_memory);
// The same for the `threads` threads of which this is one, a power of two.
void group_operation(int threads, WarpOperation operation, void *operand, bool orders_memory);

void async_copy(u32 to, const void *from, u32 bytes, bool valid);
void async_commit();
void async_wait(int groups);

u64 atomic_or32(u32 *p, u32 bits);
void atomic_add64(u64 *p, u64 value);

// Products of the running thread's warpgroup; of all, which a new block has none of.
bool products_under_way();
void forget_products();

// Reads a launch's arguments from 8-byte slots.
using Entry = void (*)(const u64 *slots);
struct Registration {
    Registration(const char *module, const char *name, int threads, int arguments, Entry entry);
};

template <class F> struct Call;
template <class... A> struct Call<void (*)(A...)> {
    static constexpr int ARGUMENTS = sizeof...(A);
    template <int... I> struct Indices {};
    template <int N, int... I> struct Make : Make<N - 1, N - 1, I...> {};
    template <int... I> struct Make<0, I...> {
        using Type = Indices<I...>;
    };
    template <void (*F)(A...), int... I> static void expand(const u64 *slots, Indices<I...>) {
        F(*reinterpret_cast<const A *>(slots + I)...);
    }
    template <void (*F)(A...)> static void call(const u64 *slots) {
        expand<F>(slots, typename Make<sizeof...(A)>::Type{});
    }
};

} // namespace emulation

#define DEVICE [[maybe_unused]] static inline
#define KERNEL(threads, blocks, name, ...)                                                                             \
    static void name(__VA_ARGS__);                                                                                     \
    static emulation::Registration register_##name(MODULE, #name, threads,                                             \
                                                   emulation::Call<decltype(&name)>::ARGUMENTS,                        \
                                                   &emulation::Call<decltype(&name)>::call<&name>);                    \
    static void name(__VA_ARGS__)
#define METHOD inline
#define UNROLL
#define UNROLL_BY(n)
#define SHARED_MEMORY(name) u8 *name = emulation::dynamic_shared()
// A reference to an array that all threads of the block share.
#define SHARED_ARRAY(type, name, length)                                                                               \
    static const char site_of_##name = 0;                                                                              \
    auto &name = *reinterpret_cast<type(*)[length]>(emulation::static_shared(&site_of_##name, sizeof(type) * (length)))

DEVICE int thread_index() { return emulation::place.thread; }
DEVICE int thread_count() { return emulation::place.threads; }
DEVICE int lane_index() { return emulation::place.thread % 32; }
DEVICE int warp_index() { return emulation::place.thread / 32; }
DEVICE int block_x() { return emulation::place.block[0]; }
DEVICE int block_y() { return emulation::place.block[1]; }
DEVICE int block_z() { return emulation::place.block[2]; }
DEVICE int grid_x() { return emulation::place.grid[0]; }
DEVICE int grid_y() { return emulation::place.grid[1]; }

DEVICE void barrier() { emulation::block_barrier(); }
DEVICE void warp_barrier() {
    emulation::warp_operation([](void **) {}, nullptr, true);
}

struct alignas(16) Words {
    u32 w[4];
};
struct alignas(8) Pair {
    u32 w[2];
};

template <class T> DEVICE T load(const T *p) {
    emulation::global_read(p, sizeof(T));
    T value;
    __builtin_memcpy(&value, p, sizeof(T));
    return value;
}
template <class T> DEVICE void store(T *p, T value) {
    emulation::global_write(p, sizeof(T));
    __builtin_memcpy(p, &value, sizeof(T));
}
DEVICE Words load_once(const Words *p) { return load(p); }
DEVICE Pair load_once(const Pair *p) { return load(p); }
DEVICE void atomic_or(u32 *p, u32 bits) { emulation::atomic_or32(p, bits); }
DEVICE void atomic_add(u64 *p, u64 value) { emulation::atomic_add64(p, value); }

template <class T> DEVICE T shared_load(const T *p) {
    emulation::shared_read(p, sizeof(T));
    T value;
    __builtin_memcpy(&value, p, sizeof(T));
    return value;
}
template <class T> DEVICE void shared_store(T *p, T value) {
    emulation::shared_write(p, sizeof(T));
    __builtin_memcpy(p, &value, sizeof(T));
}

DEVICE u32 shared_address(const void *p) { return emulation::shared_address(p); }
DEVICE float shared_load_float(u32 at) { return shared_load((const float *)emulation::shared_pointer(at)); }
DEVICE void shared_load_floats(u32 at, float &first, float &second) {
    struct alignas(8) Both {
        float first, second;
    } both = shared_load((const Both *)emulation::shared_pointer(at));
    first = both.first, second = both.second;
}
DEVICE Words shared_load_words(u32 at) { return shared_load((const Words *)emulation::shared_pointer(at)); }
DEVICE void shared_store_word(u32 at, u32 word) { shared_store((u32 *)emulation::shared_pointer(at), word); }

namespace emulation {
template <class T> struct Shuffle {
    T value, result;
    int mask;
};
template <class T> T shuffle_xor(T value, int mask) {
    Shuffle<T> mine{value, value, mask};
    warp_operation(
        [](void **operands) {
            for (int lane = 0; lane < 32; lane++) {
                auto *to = static_cast<Shuffle<T> *>(operands[lane]);
                to->result = static_cast<Shuffle<T> *>(operands[lane ^ to->mask])->value;
            }
        },
        &mine, false);
    return mine.result;
}
} // namespace emulation

DEVICE float shuffle_xor(float v, int mask) { return emulation::shuffle_xor(v, mask); }
DEVICE double shuffle_xor(double v, int mask) { return emulation::shuffle_xor(v, mask); }
DEVICE bool any_lane(bool predicate) {
    emulation::warp_operation(
        [](void **operands) {
            bool any = false;
            for (int lane = 0; lane < 32; lane++) any |= *static_cast<bool *>(operands[lane]);
            for (int lane = 0; lane < 32; lane++) *static_cast<bool *>(operands[lane]) = any;
        },
        &predicate, false);
    return predicate;
}

DEVICE void copy_async16(u32 to, const void *from, bool valid) { emulation::async_copy(to, from, 16, valid); }
DEVICE void copy_async4(u32 to, const void *from, bool valid) { emulation::async_copy(to, from, 4, valid); }
DEVICE void copy_commit() { emulation::async_commit(); }
template <int N> DEVICE void copy_wait() { emulation::async_wait(N); }

namespace emulation {
struct Matrices {
    const void *row;
    u32 *r;
};
template <bool TRANSPOSED> void load_matrices(u32 (&r)[4], u32 address) {
    const void *row = shared_pointer(address);
    // Every lane's row is read by the whole warp; the check is attributed to the lane that names it.
    shared_read(row, 16);
    Matrices mine{row, r};
    warp_operation(
        [](void **operands) {
            auto element = [&](int matrix, int row, int column) {
                auto *lane = static_cast<Matrices *>(operands[matrix * 8 + row]);
                u16 bits;
                __builtin_memcpy(&bits, static_cast<const u8 *>(lane->row) + column * 2, 2);
                return (u32)bits;
            };
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) {
                    int g = lane / 4, t = 2 * (lane % 4);
                    u32 low = TRANSPOSED ? element(i, t, g) : element(i, g, t);
                    u32 high = TRANSPOSED ? element(i, t + 1, g) : element(i, g, t + 1);
                    static_cast<Matrices *>(operands[lane])->r[i] = low | high << 16;
                }
        },
        &mine, false);
}
} // namespace emulation

DEVICE void load_matrices(u32 (&r)[4], u32 row) { emulation::load_matrices<false>(r, row); }
DEVICE void load_matrices_t(u32 (&r)[4], u32 row) { emulation::load_matrices<true>(r, row); }

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

DEVICE u64 bits_of(double x) {
    u64 bits;
    __builtin_memcpy(&bits, &x, 8);
    return bits;
}
DEVICE u32 bits_of(float x) {
    u32 bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
DEVICE float float_of(u32 bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

namespace emulation {
float f16_to_float(u16 bits);
u16 float_to_f16(float x);
} // namespace emulation

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return float_of((u32)x.bits << 16); }
DEVICE float widen(f16 x) { return emulation::f16_to_float(x.bits); }
DEVICE void narrow(float x, float &y) { y = x; }
DEVICE void narrow(float x, bf16 &y) {
    u32 bits = bits_of(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = nan ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE void narrow(float x, f16 &y) { y.bits = emulation::float_to_f16(x); }

template <class T> DEVICE u32 pack(float first, float second) {
    T low, high;
    narrow(first, low);
    narrow(second, high);
    return low.bits | (u32)high.bits << 16;
}

namespace emulation {
struct Product {
    float *c;
    const u32 *a;
    u32 b0, b1;
};
} // namespace emulation

template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulation::Product mine{c, a, b0, b1};
    emulation::warp_operation(
        [](void **operands) {
            auto value = [](u32 word, int half) { return widen(T{(u16)(word >> 16 * half)}); };
            float a[16][16], b[8][16];
            for (int lane = 0; lane < 32; lane++) {
                auto *p = static_cast<emulation::Product *>(operands[lane]);
                int g = lane / 4, t = 2 * (lane % 4);
                for (int half = 0; half < 2; half++) {
                    a[g][t + half] = value(p->a[0], half);
                    a[g + 8][t + half] = value(p->a[1], half);
                    a[g][t + 8 + half] = value(p->a[2], half);
                    a[g + 8][t + 8 + half] = value(p->a[3], half);
                    b[g][t + half] = value(p->b0, half);
                    b[g][t + 8 + half] = value(p->b1, half);
                }
            }
            for (int lane = 0; lane < 32; lane++) {
                auto *p = static_cast<emulation::Product *>(operands[lane]);
                for (int i = 0; i < 4; i++) {
                    int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
                    float sum = 0;
                    for (int k = 0; k < 16; k++) sum += a[row][k] * b[column][k];
                    p->c[i] += sum;
                }
            }
        },
        &mine, false);
}

DEVICE i64 here(i64 x) { return x; }
DEVICE u32 here(u32 x) { return x; }

DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
DEVICE float log2_fast(float x) { return __builtin_log2f(x); }
DEVICE float divide_fast(float a, float b) { return a / b; }

// The emulation is compiled without contraction of products and sums.
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float sub_rn(float a, float b) { return a - b; }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float a) { return __builtin_sqrtf(a); }
DEVICE double add_rn(double a, double b) { return a + b; }
DEVICE double mul_rn(double a, double b) { return a * b; }
DEVICE double div_rn(double a, double b) { return a / b; }

DEVICE float infinity() { return __builtin_inff(); }
DEVICE float not_a_number() { return __builtin_nanf(""); }
DEVICE float max_of(float a, float b) { return a > b || b != b ? a : b; }
DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
DEVICE bool aligned16(const void *p) { return ((u64)p & 15) == 0; }
