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
use rustix::thread::{MembarrierCommand, futex, membarrier};
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};
use std::time::Duration;

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
    /// Called after each fruitless look. The first call announces; the next one, if still nothing was found, sleeps
    /// until rung or until `limit` has passed.
    pub fn park(&mut self, own: Block, fences: Fences, limit: Duration) {
        if !self.armed {
            self.epoch = own.bell().load(Ordering::Acquire);
            own.parked().store(1, Ordering::Relaxed);
            fences.announced();
            self.armed = true;
            return;
        }
        if own.parked().load(Ordering::Relaxed) != 0 {
            let timeout =
                futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            // However it ends (rung, too late to sleep, timeout, signal): the caller looks again.
            let _ = futex::wait(own.bell(), futex::Flags::empty(), self.epoch, Some(&timeout));
        }
        self.disarm(own);
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
    if block.parked().load(Ordering::Relaxed) != 0 {
        ring_sleeper(block.parked(), block.bell());
    }
}

#[cold]
fn ring_sleeper(parked: &AtomicU32, bell: &AtomicU32) {
    // Of several who ring at once one does; the others' changes are visible already.
    if parked.swap(0, Ordering::AcqRel) != 0 {
        bell.fetch_add(1, Ordering::Release);
        let _ = futex::wake(bell, futex::Flags::empty(), 1);
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering, fence};
    use loom::thread;

    /// The protocol above on loom's atomics with a fence on both sides, which is what membarrier amounts to; a futex that
    /// sleeps being one that saw the bell unchanged.
    #[test]
    fn no_interleaving_sleeps_through_a_change() {
        loom::model(|| {
            let words = Arc::new((AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)));
            let theirs = words.clone();
            let changer = thread::spawn(move || {
                let (change, parked, bell) = &*theirs;
                change.store(1, Ordering::Release);
                fence(Ordering::SeqCst);
                if parked.load(Ordering::Relaxed) != 0 && parked.swap(0, Ordering::AcqRel) != 0 {
                    bell.fetch_add(1, Ordering::Release);
                }
            });
            let (change, parked, bell) = &*words;
            let epoch = bell.load(Ordering::Acquire);
            parked.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let found = change.load(Ordering::Acquire) == 1;
            changer.join().expect("the changer");
            // If it went to sleep it must have been rung, before or after it fell asleep.
            assert!(found || bell.load(Ordering::Acquire) != epoch, "asleep for ever");
        });
    }
}
