//! Where everything lies in a segment. Every rank owns one segment; all ranks map all of them.
//!
//! ```text
//! header | control block of the world group | arena: buffers, control blocks of subgroups
//! ```
//!
//! A control block is what one rank shows the others of one group. It is written by its owner only, except for the
//! `left` flags and the futex words. Words that different ranks write, or that are polled, have a cache line each.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// First word of a segment, once its owner has filled in the rest.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"caravanS");
/// Changes with anything in this file.
pub(super) const VERSION: u32 = 3;

/// Set when the owner left in good order.
pub(super) const DEPARTED: usize = 64;
/// Whom the owner waits for; see [`waits`](crate::transport::waits).
pub(super) const WAITS: usize = 256;
/// Why the owner gave up, a [`Note`](crate::bootstrap::memfd::Note).
pub(super) const ABORT: usize = 1024;
/// Control blocks of subgroups: pairs of key and offset.
pub(super) const REGISTRY: usize = 2048;
/// Groups beside the world that a rank can be in at once, or has left while others are still in them.
pub(super) const REGISTRY_ENTRIES: usize = 384;
/// Bytes of the header.
pub(super) const HEADER: usize = 8192;

const _: () = assert!(REGISTRY + REGISTRY_ENTRIES * 16 <= HEADER);
const _: () = assert!(ABORT + crate::bootstrap::memfd::NOTE_BYTES <= REGISTRY);

/// Calls in flight at once.
pub(super) const DEPTH: u64 = 64;
/// Bytes that `publish` copies into its slot. Small: the slot's lines were last read by the peers, so that writing
/// them costs about as much as the peers' reading; from here on it is cheaper to wait until they have read the buffer.
pub(super) const INLINE: usize = 512;

pub(super) const LINE: usize = 64;
/// Processors fetch lines in pairs: a word that is polled must not draw its neighbour with it.
const PAIR: usize = 2 * LINE;
const SLOT: usize = (LINE + INLINE).next_multiple_of(PAIR);
/// All rings of a rank together; one ring is never below 16 KiB.
const RINGS: usize = 4 << 20;

/// Offsets in the control blocks of a group of `size` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    size: usize,
    ring: usize,
}

impl Layout {
    pub fn new(size: usize) -> Self {
        // A power of two, so that positions wrap by masking.
        let share = (RINGS / size.max(1)).clamp(16 << 10, 256 << 10);
        Layout { size, ring: 1 << share.ilog2() }
    }

    /// Bytes of one ring of messages.
    pub fn ring_bytes(&self) -> usize {
        self.ring
    }

    /// Bytes of a whole control block.
    pub fn bytes(&self) -> usize {
        self.ring(self.size)
    }

    fn left(&self, member: usize) -> usize {
        LINE + member * 4
    }

    fn done(&self, sequence: u64) -> usize {
        self.left(self.size).next_multiple_of(PAIR) + (sequence % DEPTH) as usize * PAIR
    }

    fn slot(&self, sequence: u64) -> usize {
        self.done(0) + DEPTH as usize * PAIR + (sequence % DEPTH) as usize * SLOT
    }

    fn head(&self, from: usize) -> usize {
        self.slot(0) + DEPTH as usize * SLOT + from * LINE
    }

    fn tail(&self, to: usize) -> usize {
        self.head(self.size) + to * LINE
    }

    fn ring(&self, to: usize) -> usize {
        self.tail(self.size).next_multiple_of(4096) + to * self.ring
    }
}

/// One mapped control block. Valid for as long as the segments are mapped, which whoever holds a `Block` ensures by
/// holding them too; its words are only ever touched as atomics.
#[derive(Clone, Copy)]
pub(super) struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a Block hands out only atomics and raw pointers; it belongs to no thread.
unsafe impl Send for Block {}

impl Block {
    /// # Safety
    /// `layout.bytes()` of mapped control block at `base`, aligned to a cache line, that outlive this value.
    pub unsafe fn new(base: NonNull<u8>, layout: Layout) -> Self {
        Block { base, layout }
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset < self.layout.bytes());
        // SAFETY: every offset of the layout is inside the block.
        unsafe { self.base.add(offset) }
    }

    fn u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the block, a multiple of 8 from a cache line, and touched only as an atomic.
        unsafe { AtomicU64::from_ptr(self.at(offset).as_ptr().cast()) }
    }

    fn u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `u64`.
        unsafe { AtomicU32::from_ptr(self.at(offset).as_ptr().cast()) }
    }

    /// Not 0 while the owner sleeps or is about to.
    pub fn parked(&self) -> &AtomicU32 {
        self.u32(0)
    }

    /// The futex the owner sleeps on; grows with each wake-up.
    pub fn bell(&self) -> &AtomicU32 {
        self.u32(4)
    }

    /// Set by `member` when it will not touch this block again; by the owner when it does nothing more in the group.
    pub fn left(&self, member: usize) -> &AtomicU32 {
        self.u32(self.layout.left(member))
    }

    /// One more than the last call on this slot that the owner has finished reading.
    pub fn done(&self, sequence: u64) -> &AtomicU64 {
        self.u64(self.layout.done(sequence))
    }

    /// The four words of the slot for `sequence`: sequence + 1, offset, bytes, fingerprint.
    pub fn slot(&self, sequence: u64) -> [&AtomicU64; 4] {
        let base = self.layout.slot(sequence);
        [0, 8, 16, 24].map(|word| self.u64(base + word))
    }

    /// Fetches the lines that the owner will write for `sequence`: the peers had them last, and getting them back
    /// only when they are written would keep what is written to itself for that long.
    #[inline(always)]
    pub fn prepare(&self, sequence: u64) {
        prefetch_to_write(self.at(self.layout.slot(sequence)));
        prefetch_to_write(self.at(self.layout.done(sequence)));
    }

    /// The place of an inline payload: up to half a line sits in the line of the slot's words, so that a small
    /// message moves one line between cores.
    pub fn inline(&self, sequence: u64, bytes: usize) -> NonNull<u8> {
        self.at(self.layout.slot(sequence) + if bytes <= LINE / 2 { LINE / 2 } else { LINE })
    }

    /// How far the owner has read the ring that `from` writes to it.
    pub fn head(&self, from: usize) -> &AtomicU64 {
        self.u64(self.layout.head(from))
    }

    /// How far the owner has written its ring to `to`.
    pub fn tail(&self, to: usize) -> &AtomicU64 {
        self.u64(self.layout.tail(to))
    }

    /// The owner's ring of messages to `to`.
    pub fn ring(&self, to: usize) -> NonNull<u8> {
        self.at(self.layout.ring(to))
    }
}

/// Only a hint: it changes nothing but where a line is.
#[inline(always)]
fn prefetch_to_write(line: NonNull<u8>) {
    let line = line.as_ptr();
    // SAFETY: prefetching neither faults nor changes memory, registers or flags.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for size in [1, 2, 5, 64, 300] {
            let l = Layout::new(size);
            assert!(l.left(size) <= l.done(0));
            assert_eq!(l.done(DEPTH - 1) + PAIR, l.slot(0));
            assert_eq!(l.slot(DEPTH - 1) + SLOT, l.head(0));
            assert_eq!(l.head(size - 1) + LINE, l.tail(0));
            assert!(l.tail(size - 1) + LINE <= l.ring(0));
            assert_eq!(l.ring(size - 1) + l.ring_bytes(), l.bytes());
            assert!(l.ring_bytes().is_power_of_two() && l.ring_bytes() >= 16 << 10);
            for line in [l.done(3), l.slot(3), l.head(0), l.tail(0)] {
                assert_eq!(line % LINE, 0);
            }
        }
    }
}
