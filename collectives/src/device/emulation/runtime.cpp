// The emulated GPU: runs the blocks of a launch one after another, and the threads of a block as fibers. One launch per
// thread of the process; several may run at once.
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace emulation {

thread_local Place place __attribute__((tls_model("initial-exec")));
thread_local Machine *machine_here __attribute__((tls_model("initial-exec")));

namespace {

std::vector<Kernel> &kernels() {
    static std::vector<Kernel> all;
    return all;
}

void enter_machine() {
    thread_local std::unique_ptr<Machine> owner;
    if (!owner) owner = std::make_unique<Machine>();
    machine_here = owner.get();
}

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
