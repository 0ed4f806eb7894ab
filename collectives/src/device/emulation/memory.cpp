// Who wrote and read each byte of memory, and what asynchronous copies bring: every access of a kernel passes here.
#include "machine.h"

#include <cstring>

namespace emulation {

namespace {

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

void atomic_add64(u64 *p, u64 value) {
    check_aligned(p, 8);
    if (!find((uintptr_t)p, 8, true)) outside("writes", p, 8);
    *p += value;
}

} // namespace emulation
