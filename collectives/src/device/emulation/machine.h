// What the emulated GPU is made of, for the files that run its threads and that watch its memory.
#pragma once
#include "emulation.h"

#include <csetjmp>
#include <cstdint>
#include <memory>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace emulation {

constexpr int WARP = 32;
// Threads that meet for an operation: at most a warpgroup.
constexpr int MOST_OF_GROUP = 128;
constexpr size_t STACK = 256 << 10;
constexpr size_t SHARED = 256 << 10;
// Multiples of what a static array may be aligned to.
constexpr size_t ALIGN = 128;

struct Kernel {
    const char *module, *name;
    int threads, arguments;
    Entry entry;
};

enum class State : u8 { Ready, AtBarrier, AtGroupOperation, Done };

struct Copy {
    void *to;
    u8 data[16];
    u32 bytes;
    int group;
};

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    bool started = false;
    State state = State::Done;
    WarpOperation operation = nullptr;
    void *operand = nullptr;
    int meeting = 0; // how many threads the operation is of
    std::vector<Copy> copies;
    int group = 0;
    // Fences for products that this thread has made in the block, and of those the ones before the last barrier.
    u32 fences = 0, old_fences = 0;
};

// A range of global memory that the launch may touch.
struct Extent {
    uintptr_t start, end;
    bool writable;
    // Per byte: 1 + the number of the thread that wrote it in this launch.
    std::vector<u32> writer;
};

// Who touched two bytes of shared memory since the block began. Times are pairs of counters: barriers of the block,
// and barriers of the thread's warp.
struct Cell {
    u32 generation;
    u32 write_time, write_warp_time;
    u32 read_time, read_warp_time;
    // The writer's fences before it wrote.
    u32 fences;
    u16 writer, reader;
    // More than one lane, or more than one warp, has read since `read_time` began.
    bool many_lanes, many_warps, pending;
};

struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    u8 *stacks = nullptr;
    jmp_buf scheduler, failed;
    std::vector<Extent> extents;
    std::vector<Cell> cells;
    u8 *shared = nullptr;
    size_t dynamic_bytes = 0, shared_bytes = 0;
    std::vector<std::pair<const void *, size_t>> statics;
    u32 generation = 0, time = 0;
    std::vector<u32> warp_time;
    const Kernel *kernel = nullptr;
    const u64 *slots = nullptr;
    int alive = 0, waiting = 0;
    char *error = nullptr;
    size_t error_bytes = 0;

    ~Machine() {
        if (stacks) munmap(stacks, fibers.size() * STACK);
        if (shared) munmap(shared, SHARED);
    }
};

// Behind a pointer: a library that is loaded late gets little room for the variables of threads.
extern thread_local Machine *machine_here __attribute__((tls_model("initial-exec")));
#define machine (*machine_here)

inline Fiber &current() { return *machine.fibers[place.thread]; }

} // namespace emulation
