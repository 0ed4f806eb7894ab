//! Sleeping without missing a wake-up, for when ranks outnumber cores.
//!
//! The sleeper announces itself (`arm`), looks once more whether there is something to do, and only then sleeps on
//! its bell. Whoever changes something for it first makes the change visible and then looks whether it announced
//! itself. With a sequentially consistent fence between the two steps on both sides, at least one sees the other:
//! either the sleeper finds the change, or the changer finds the sleeper and rings.
//!
//! Changes are frequent and sleeping is rare, so where the kernel can, the sleeper pays for both fences: membarrier(2)
//! makes all running threads of the registered processes pass one.

use super::layout::Block;
use super::word::Word;
use rustix::thread::{MembarrierCommand, futex, membarrier};
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};
use std::time::Duration;

/// Announces a sleeper, before its fence; it sleeps while the bell stands where this says.
fn announce<W: Word<u32>>(parked: &W, bell: &W) -> u32 {
    let epoch = bell.get(Ordering::Acquire);
    parked.set(1, Ordering::Relaxed);
    epoch
}

/// Whether anybody has announced itself, after the changer's fence.
#[inline(always)]
fn announced<W: Word<u32>>(parked: &W) -> bool {
    parked.get(Ordering::Relaxed) != 0
}

/// Rings for who has announced itself: whether it was this one of several who ring at once, of whom one does; the others'
/// changes are visible already.
fn strike<W: Word<u32>>(parked: &W, bell: &W) -> bool {
    let first = parked.swap(0, Ordering::AcqRel) != 0;
    if first {
        bell.add(1, Ordering::Release);
    }
    first
}

/// Who passes the fences between announcing and looking; the same for all ranks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fences {
    /// The sleeper, for everybody.
    Sleeper,
    /// Each for itself.
    Both,
}

impl Fences {
    /// Makes this process pass a fence when a sleeper asks for it; false where the kernel cannot.
    pub fn register() -> bool {
        membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
            && membarrier(MembarrierCommand::GlobalExpedited).is_ok()
    }

    /// Between announcing oneself as a sleeper and looking once more.
    fn announced(self) {
        fence(Ordering::SeqCst);
        if self == Fences::Sleeper && membarrier(MembarrierCommand::GlobalExpedited).is_err() {
            // It worked in `register`; should it fail now, sleeping without it could last until the limit.
            std::thread::yield_now();
        }
    }

    /// Between making a change visible and [`ring`].
    #[inline(always)]
    pub fn changed(self) {
        match self {
            Fences::Sleeper => compiler_fence(Ordering::SeqCst),
            Fences::Both => fence(Ordering::SeqCst),
        }
    }
}

/// The sleeping side, one per group.
#[derive(Default)]
pub(super) struct Sleeper {
    armed: bool,
    epoch: u32,
}

impl Sleeper {
    /// Called after each fruitless look. The first call announces; the next ones, if still nothing was found, sleep
    /// until rung or until `limit` has passed. Where nobody rang, the announcement stands, and its fence need not be passed
    /// again: it interrupts all processors, also those that this rank waits for.
    pub fn park(&mut self, own: Block, fences: Fences, limit: Duration) {
        if !self.armed {
            self.epoch = announce(own.parked(), own.bell());
            fences.announced();
            self.armed = true;
            return;
        }
        if announced(own.parked()) {
            let timeout =
                futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            // However it ends (rung, too late to sleep, timeout, signal): the caller looks again.
            let _ = futex::wait(own.bell(), futex::Flags::empty(), self.epoch, Some(&timeout));
        }
        // Who rang for the announcement before this one may have moved the bell only now; the caller looks before it sleeps.
        self.epoch = own.bell().load(Ordering::Acquire);
        self.armed = announced(own.parked());
    }

    /// The owner is busy again: nobody needs to ring.
    #[inline(always)]
    pub fn disarm(&mut self, own: Block) {
        if self.armed {
            own.parked().store(0, Ordering::Relaxed);
            self.armed = false;
        }
    }
}

/// Wakes the owner of `block` if it sleeps or is about to; after [`Fences::changed`].
#[inline(always)]
pub(super) fn ring(block: Block) {
    if announced(block.parked()) {
        ring_sleeper(block.parked(), block.bell());
    }
}

#[cold]
fn ring_sleeper(parked: &AtomicU32, bell: &AtomicU32) {
    if strike(parked, bell) {
        let _ = futex::wake(bell, futex::Flags::empty(), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    /// A sleeper that nobody rings announces itself once, however often it sleeps; one that was rung does so again.
    #[test]
    fn an_announcement_stands_until_somebody_rings() {
        use super::super::layout::Layout;
        let layout = Layout::new(2);
        let mut room = crate::buffer::Memory::host(layout.bytes());
        let at = std::ptr::NonNull::new(room.as_mut_ptr()).expect("memory");
        // SAFETY: so many zeroed bytes, aligned to a cache line, which outlive the block.
        let block = unsafe { Block::new(at, layout) };
        let mut sleeper = Sleeper::default();
        let mut park = || {
            sleeper.park(block, Fences::Both, Duration::from_micros(50));
            (sleeper.armed, block.parked().load(Ordering::Relaxed))
        };
        assert_eq!([park(), park(), park()], [(true, 1); 3]);
        ring(block);
        assert_eq!(block.bell().load(Ordering::Relaxed), 1);
        // It has not slept, and looks again before it announces itself anew.
        assert_eq!([park(), park(), park()], [(false, 0), (true, 1), (true, 1)]);
        // A ringer was held up between both its steps.
        block.parked().store(0, Ordering::Relaxed);
        assert_eq!([park(), park()], [(false, 0), (true, 1)]);
        block.bell().fetch_add(1, Ordering::Release);
        assert_eq!([park(), park()], [(true, 1); 2]);
        assert_eq!(sleeper.epoch, 2, "it would sleep");
        sleeper.disarm(block);
        assert_eq!(block.parked().load(Ordering::Relaxed), 0);
    }

    /// With a fence on both sides, which is what membarrier amounts to; a futex that sleeps being one that saw the bell
    /// unchanged.
    #[test]
    fn no_interleaving_sleeps_through_a_change() {
        loom::model(|| {
            let words = Arc::new((AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)));
            let theirs = words.clone();
            let changer = thread::spawn(move || {
                let (change, parked, bell) = &*theirs;
                change.set(1, Ordering::Release);
                loom::sync::atomic::fence(Ordering::SeqCst);
                if announced(parked) {
                    strike(parked, bell);
                }
            });
            let (change, parked, bell) = &*words;
            let epoch = announce(parked, bell);
            loom::sync::atomic::fence(Ordering::SeqCst);
            let found = change.get(Ordering::Acquire) == 1;
            changer.join().expect("the changer");
            // If it went to sleep it must have been rung, before or after it fell asleep.
            assert!(found || bell.get(Ordering::Acquire) != epoch, "asleep for ever");
        });
    }
}
