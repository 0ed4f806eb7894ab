// The emulated GPU: runs the blocks of a launch one after another, the threads of a block as fibers, and keeps for
// each byte of memory who wrote and read it. One launch per thread of the process; several may run at once.
#include "emulation.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

namespace emulation {

thread_local Place place __attribute__((tls_model("initial-exec")));

namespace {

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

std::vector<Kernel> &kernels() {
    static std::vector<Kernel> all;
    return all;
}

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
    bool scheduled = false;
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
thread_local Machine *machine_here __attribute__((tls_model("initial-exec")));
#define machine (*machine_here)

void enter_machine() {
    thread_local std::unique_ptr<Machine> owner;
    if (!owner) owner = std::make_unique<Machine>();
    machine_here = owner.get();
}

Fiber &current() { return *machine.fibers[place.thread]; }

void to_scheduler() {
    if (!_setjmp(current().resume)) _longjmp(machine.scheduler, 1);
}

void fiber_main() {
    for (;;) {
        machine.kernel->entry(machine.slots);
        Fiber &me = current();
        if (!me.copies.empty()) fail("ends with an asynchronous copy under way");
        if (products_under_way()) fail("ends with a product under way");
        me.state = State::Done;
        to_scheduler();
    }
}

void resume(int thread) {
    Fiber &fiber = *machine.fibers[thread];
    place.thread = thread;
    if (_setjmp(machine.scheduler)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

void make_fibers(int threads) {
    if ((int)machine.fibers.size() < threads) {
        if (machine.stacks) munmap(machine.stacks, machine.fibers.size() * STACK);
        while ((int)machine.fibers.size() < threads) machine.fibers.push_back(std::make_unique<Fiber>());
        void *stacks = mmap(nullptr, machine.fibers.size() * STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        machine.stacks = stacks == MAP_FAILED ? nullptr : static_cast<u8 *>(stacks);
        if (!machine.stacks) fail("no memory for %d stacks", threads);
        for (auto &fiber : machine.fibers) fiber->started = false;
    }
    for (size_t i = 0; i < machine.fibers.size(); i++) {
        Fiber &fiber = *machine.fibers[i];
        if (fiber.started) continue;
        getcontext(&fiber.context);
        // The lowest page of a stack is a guard: an overflow ends the process instead of changing a neighbour.
        u8 *stack = machine.stacks + i * STACK;
        mprotect(stack, 4096, PROT_NONE);
        fiber.context.uc_stack.ss_sp = stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
    }
}

// A small generator for the orders of blocks, warps and lanes.
struct Order {
    u64 seed;
    u64 state;
    void fill(std::vector<int> &order, int n) {
        order.resize(n);
        for (int i = 0; i < n; i++) order[i] = seed == 1 ? n - 1 - i : i;
        if (seed < 2) return;
        for (int i = n - 1; i > 0; i--) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            std::swap(order[i], order[(state >> 33) % (i + 1)]);
        }
    }
};

void run_block(Order &order) {
    int threads = place.threads, warps = threads / WARP;
    machine.generation++;
    machine.time = 1;
    machine.warp_time.assign(warps, 1);
    machine.statics.clear();
    machine.shared_bytes = (machine.dynamic_bytes + ALIGN - 1) / ALIGN * ALIGN;
    machine.alive = threads;
    machine.waiting = 0;
    for (int i = 0; i < threads; i++) {
        machine.fibers[i]->state = State::Ready;
        machine.fibers[i]->copies.clear();
        machine.fibers[i]->group = 0;
        machine.fibers[i]->fences = machine.fibers[i]->old_fences = 0;
    }
    forget_products();
    std::vector<int> warp_order, lane_order;
    while (machine.alive > 0) {
        bool progress = false;
        order.fill(warp_order, warps);
        order.fill(lane_order, WARP);
        for (int warp : warp_order)
            for (bool again = true; again;) {
                again = false;
                for (int lane : lane_order) {
                    Fiber &fiber = *machine.fibers[warp * WARP + lane];
                    if (fiber.state != State::Ready) continue;
                    again = progress = true;
                    resume(warp * WARP + lane);
                    if (fiber.state == State::Done) machine.alive--;
                }
            }
        if (machine.waiting == threads) {
            machine.waiting = 0;
            machine.time++;
            for (int i = 0; i < threads; i++) {
                machine.fibers[i]->state = State::Ready;
                machine.fibers[i]->old_fences = machine.fibers[i]->fences;
            }
        } else if (!progress) {
            int at_barrier = 0, done = 0;
            for (int i = 0; i < threads; i++) {
                at_barrier += machine.fibers[i]->state == State::AtBarrier;
                done += machine.fibers[i]->state == State::Done;
            }
            fail("waits for ever: of %d threads %d are at a barrier, %d at an operation of several, %d have ended", threads,
                 at_barrier, threads - at_barrier - done, done);
        }
    }
}

Extent *find(uintptr_t p, u32 bytes, bool writable_only) {
    Extent *found = nullptr;
    for (Extent &e : machine.extents)
        if (p >= e.start && p + bytes <= e.end) {
            if (e.writable) return &e;
            found = &e;
        }
    return writable_only ? nullptr : found;
}

u32 me() {
    u32 block = ((u32)place.block[2] * place.grid[1] + place.block[1]) * place.grid[0] + place.block[0];
    return 1 + block * place.threads + place.thread;
}

void check_aligned(const void *p, u32 bytes) {
    if ((uintptr_t)p % bytes) fail("accesses %u bytes at %p, which is not aligned to them", bytes, p);
}

// Where an address of global memory is, for messages.
void outside(const char *verb, const void *p, u32 bytes) {
    uintptr_t at = (uintptr_t)p;
    const Extent *nearest = nullptr;
    size_t distance = SIZE_MAX, index = 0;
    for (size_t i = 0; i < machine.extents.size(); i++) {
        const Extent &e = machine.extents[i];
        if (at >= e.start && at + bytes <= e.end) fail("%s %u bytes of array %zu, which is read-only", verb, bytes, i);
        size_t d = at < e.start ? e.start - at : at + bytes - e.end;
        if (d < distance) distance = d, nearest = &e, index = i;
    }
    if (!nearest) fail("%s %u bytes of global memory, but the launch has no arrays", verb, bytes);
    fail("%s %u bytes at byte %lld of array %zu, which has %zu bytes", verb, bytes, (long long)(at - nearest->start), index,
         (size_t)(nearest->end - nearest->start));
}

Cell *cell_of(const void *p, u32 bytes) {
    size_t offset = (const u8 *)p - machine.shared;
    if ((const u8 *)p < machine.shared || offset + bytes > machine.shared_bytes)
        fail("accesses %u bytes outside the block's %zu bytes of shared memory (at %lld)", bytes, machine.shared_bytes,
             (long long)((const u8 *)p - machine.shared));
    return &machine.cells[offset / 2];
}

bool ordered(int thread, u32 time, u32 warp_time) {
    if (thread == place.thread || time < machine.time) return true;
    return thread / WARP == place.thread / WARP && warp_time < machine.warp_time[place.thread / WARP];
}

void write_cells(const void *p, u32 bytes, bool pending) {
    Cell *cell = cell_of(p, bytes);
    u32 warp_time = machine.warp_time[place.thread / WARP];
    for (u32 i = 0; i < bytes / 2; i++, cell++) {
        if (cell->generation == machine.generation) {
            if (cell->pending && cell->writer != place.thread)
                fail("writes shared memory into which thread %d is copying", cell->writer);
            if (cell->writer != 0xffff && !ordered(cell->writer, cell->write_time, cell->write_warp_time))
                fail("writes shared memory (byte %zu) that thread %d wrote, without a barrier between",
                     (size_t)((const u8 *)p - machine.shared), cell->writer);
            if (cell->reader != 0xffff && cell->read_time == machine.time) {
                bool safe = !cell->many_warps && ordered(cell->reader, cell->read_time, cell->read_warp_time) &&
                            !(cell->many_lanes && cell->read_warp_time == warp_time);
                if (!safe)
                    fail("writes shared memory (byte %zu) that thread %d read, without a barrier between",
                         (size_t)((const u8 *)p - machine.shared), cell->reader);
            }
        }
        *cell = Cell{machine.generation, machine.time, warp_time, 0, 0, current().fences, (u16)place.thread, 0xffff, false,
                     false, pending};
    }
}

} // namespace

void fail(const char *format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    snprintf(machine.error, machine.error_bytes, "%s/%s, block (%d, %d, %d), thread %d: %s",
             machine.kernel ? machine.kernel->module : "?", machine.kernel ? machine.kernel->name : "?", place.block[0],
             place.block[1], place.block[2], place.thread, text);
    _longjmp(machine.failed, 1);
}

void global_read(const void *p, u32 bytes) {
    check_aligned(p, bytes);
    Extent *extent = find((uintptr_t)p, bytes, false);
    if (!extent) outside("reads", p, bytes);
    if (!extent->writable) return;
    u32 own = me();
    for (u32 i = 0; i < bytes; i++) {
        u32 writer = extent->writer[(uintptr_t)p - extent->start + i];
        if (writer && (writer - 1) / place.threads != (own - 1) / place.threads)
            fail("reads a result of another block (byte %zu of array %zu)", (size_t)((uintptr_t)p - extent->start),
                 (size_t)(extent - machine.extents.data()));
    }
}

void global_write(const void *p, u32 bytes) {
    check_aligned(p, bytes);
    Extent *extent = find((uintptr_t)p, bytes, true);
    if (!extent) outside("writes", p, bytes);
    u32 own = me();
    for (u32 i = 0; i < bytes; i++) {
        u32 &writer = extent->writer[(uintptr_t)p - extent->start + i];
        if (writer && writer != own)
            fail("writes an element that thread %u of block %u wrote (byte %zu of array %zu)",
                 (writer - 1) % place.threads, (writer - 1) / place.threads, (size_t)((uintptr_t)p - extent->start),
                 (size_t)(extent - machine.extents.data()));
        writer = own;
    }
}

void shared_read(const void *p, u32 bytes) {
    check_aligned(p, bytes);
    Cell *cell = cell_of(p, bytes);
    u32 warp_time = machine.warp_time[place.thread / WARP];
    for (u32 i = 0; i < bytes / 2; i++, cell++) {
        size_t at = (const u8 *)p - machine.shared;
        if (cell->generation != machine.generation) fail("reads shared memory (byte %zu) that nobody wrote", at);
        if (cell->pending) fail("reads shared memory (byte %zu) into which a copy is under way", at);
        if (cell->writer != 0xffff && !ordered(cell->writer, cell->write_time, cell->write_warp_time))
            fail("reads shared memory (byte %zu) that thread %d wrote, without a barrier between", at, cell->writer);
        bool fresh = cell->reader == 0xffff || cell->read_time != machine.time;
        if (!fresh && cell->reader / WARP != place.thread / WARP) cell->many_warps = true;
        if (fresh)
            cell->many_lanes = cell->many_warps = false;
        else if (cell->reader != place.thread)
            cell->many_lanes = true;
        cell->reader = place.thread;
        cell->read_time = machine.time;
        cell->read_warp_time = warp_time;
    }
}

void shared_read_by_products(const void *p, u32 bytes) {
    shared_read(p, bytes);
    Cell *cell = cell_of(p, bytes);
    for (u32 i = 0; i < bytes / 2; i++, cell++) {
        if (machine.fibers[cell->writer]->old_fences <= cell->fences)
            fail("multiplies shared memory (byte %zu) that thread %d wrote, without a fence and a barrier between",
                 (size_t)((const u8 *)p - machine.shared), cell->writer);
        // All warps of the group do.
        cell->many_lanes = cell->many_warps = true;
    }
}

void proxy_fence() { current().fences++; }

void shared_write(const void *p, u32 bytes) {
    check_aligned(p, bytes);
    write_cells(p, bytes, false);
}

u8 *dynamic_shared() { return machine.shared; }

u32 shared_address(const void *p) { return (const u8 *)p - machine.shared; }

u8 *shared_pointer(u32 address) { return machine.shared + address; }

u8 *static_shared(const void *site, u32 bytes) {
    for (auto &known : machine.statics)
        if (known.first == site) return machine.shared + known.second;
    size_t offset = machine.shared_bytes;
    machine.shared_bytes += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (machine.shared_bytes > SHARED) fail("needs more than %zu bytes of shared memory", SHARED);
    machine.statics.emplace_back(site, offset);
    return machine.shared + offset;
}

void block_barrier() {
    current().state = State::AtBarrier;
    machine.waiting++;
    to_scheduler();
}

void warp_operation(WarpOperation operation, void *operand, bool orders_memory) {
    group_operation(WARP, operation, operand, orders_memory);
}

void group_operation(int threads, WarpOperation operation, void *operand, bool orders_memory) {
    int first = place.thread / threads * threads;
    if (first + threads > place.threads) fail("is in no whole group of %d threads", threads);
    Fiber &mine = current();
    mine.operation = operation;
    mine.operand = operand;
    mine.meeting = threads;
    mine.state = State::AtGroupOperation;
    void *operands[MOST_OF_GROUP];
    for (int i = 0; i < threads; i++) {
        Fiber &other = *machine.fibers[first + i];
        if (other.state != State::AtGroupOperation || other.meeting != threads) return to_scheduler();
        if (other.operation != operation)
            fail("is at another %s operation than thread %d", threads == WARP ? "warp" : "warpgroup", first + i);
        operands[i] = other.operand;
    }
    operation(operands);
    for (int i = 0; i < threads; i++) machine.fibers[first + i]->state = State::Ready;
    if (orders_memory) machine.warp_time[first / WARP]++;
    // Whoever came last waits its turn too, so that orders of lanes mix.
    to_scheduler();
}

void async_copy(u32 address, const void *from, u32 bytes, bool valid) {
    void *to = shared_pointer(address);
    check_aligned(to, bytes);
    write_cells(to, bytes, true);
    Copy copy{to, {}, bytes, current().group};
    if (valid) {
        global_read(from, bytes);
        memcpy(copy.data, from, bytes);
    }
    // NaN in every format: whoever reads too early shows.
    memset(to, 0xff, bytes);
    current().copies.push_back(copy);
}

void async_commit() { current().group++; }

void async_wait(int groups) {
    Fiber &mine = current();
    size_t kept = 0;
    for (size_t i = 0; i < mine.copies.size(); i++) {
        Copy &copy = mine.copies[i];
        // Groups are numbered by commits: what was not committed yet has the number of the next one.
        if (copy.group < mine.group - groups) {
            memcpy(copy.to, copy.data, copy.bytes);
            write_cells(copy.to, copy.bytes, false);
        } else {
            mine.copies[kept++] = copy;
        }
    }
    mine.copies.resize(kept);
}

u64 atomic_or32(u32 *p, u32 bits) {
    check_aligned(p, 4);
    if (!find((uintptr_t)p, 4, true)) outside("writes", p, 4);
    u32 old = *p;
    *p |= bits;
    return old;
}

float f16_to_float(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

u16 float_to_f16(float x) {
    u32 bits = bits_of(x);
    u16 sign = bits >> 16 & 0x8000;
    u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00;
    if (magnitude < 0x38800000u) {
        // Below the smallest normal number: in units of 2^-24, to nearest even by the processor's addition.
        float scaled = float_of(magnitude) * 0x1p24f;
        float rounded = (scaled + 0x1p23f) - 0x1p23f;
        return sign | (u16)rounded;
    }
    return sign | (u16)((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

Registration::Registration(const char *module, const char *name, int threads, int arguments, Entry entry) {
    kernels().push_back(Kernel{module, name, threads, arguments, entry});
}

} // namespace emulation

using namespace emulation;

extern "C" {

struct Range {
    u64 start, bytes, writable, reaches;
};

// Runs a launch; returns 0, or 1 with a message in `error`. `seed` 0 runs blocks and threads in ascending order, 1 in
// descending order, others shuffled.
int caravan_emulate(const char *module, const char *name, const u32 grid[3], u32 threads, u32 shared_bytes,
                    const u64 *slots, u32 arguments, const Range *ranges, u32 range_count, u64 seed, char *error,
                    size_t error_bytes) {
    enter_machine();
    machine.error = error;
    machine.error_bytes = error_bytes;
    machine.kernel = nullptr;
    place = Place{};
    if (_setjmp(machine.failed)) {
        // Fibers were left in the middle: they start anew next time.
        for (auto &fiber : machine.fibers) fiber->started = false, fiber->copies.clear();
        return 1;
    }
    for (const Kernel &k : kernels())
        if (!strcmp(k.module, module) && !strcmp(k.name, name)) machine.kernel = &k;
    if (!machine.kernel) fail("no kernel %s in module %s", name, module);
    if ((int)arguments != machine.kernel->arguments)
        fail("launched with %u arguments, has %d", arguments, machine.kernel->arguments);
    if (threads == 0 || threads % WARP || (int)threads > machine.kernel->threads)
        fail("launched with %u threads: a multiple of 32 up to %d is possible", threads, machine.kernel->threads);
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 || grid[2] > 65535)
        fail("launched with a grid of (%u, %u, %u)", grid[0], grid[1], grid[2]);
    if (!machine.shared) {
        void *memory = mmap(nullptr, SHARED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) fail("no memory");
        machine.shared = static_cast<u8 *>(memory);
        machine.cells.assign(SHARED / 2, Cell{});
    }
    if (shared_bytes > 227 << 10) fail("launched with %u bytes of shared memory: at most 227 KiB exist", shared_bytes);
    machine.dynamic_bytes = shared_bytes;
    machine.slots = slots;
    machine.extents.clear();
    for (u32 i = 0; i < range_count; i++) {
        const Range &r = ranges[i];
        machine.extents.push_back(Extent{r.start, r.start + r.bytes, r.writable != 0, {}});
        if (r.writable) machine.extents.back().writer.assign(r.bytes, 0);
        for (u64 i = 0; r.reaches && i < r.bytes / 8; i++) {
            u64 start = reinterpret_cast<const u64 *>(r.start)[i];
            machine.extents.push_back(Extent{start, start + r.reaches, false, {}});
        }
    }
    make_fibers(threads);
    Order order{seed, seed};
    std::vector<int> blocks;
    order.fill(blocks, grid[0] * grid[1] * grid[2]);
    for (int block : blocks) {
        int x = grid[0], y = grid[1];
        place = Place{0, (int)threads, {block % x, block / x % y, block / x / y}, {x, y, (int)grid[2]}};
        run_block(order);
    }
    return 0;
}

} // extern "C"
