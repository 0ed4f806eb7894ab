//! The protocol of a call's slot, apart from where its words lie, so that a model checker can run it.
//!
//! Call `s` lives in slot `s % depth` of each rank. The owner writes payload and description and then, with release,
//! `sequence = s + 1`; a reader that acquires `s + 1` sees them. A reader that has read all it wants stores, with
//! release, `done = s + 1` in its own word; the owner reuses the slot for `s + depth` only after it has acquired
//! `done >= s + 1` from every peer, so nothing is overwritten that somebody still reads. Both words only grow.

use super::word::Word;
use std::sync::atomic::Ordering;

/// What a rank publishes for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub offset: u64,
    pub bytes: u64,
    pub fingerprint: u64,
}

/// Whether a reader whose word is `done` has finished call `sequence`.
#[inline(always)]
pub(super) fn finished<W: Word<u64>>(done: &W, sequence: u64) -> bool {
    done.get(Ordering::Acquire) > sequence
}

/// Makes the description, and whatever payload was written before, visible to the readers.
#[inline(always)]
pub(super) fn publish<W: Word<u64>>(slot: [&W; 4], sequence: u64, what: Description) {
    slot[1].set(what.offset, Ordering::Relaxed);
    slot[2].set(what.bytes, Ordering::Relaxed);
    slot[3].set(what.fingerprint, Ordering::Relaxed);
    slot[0].set(sequence + 1, Ordering::Release);
}

/// What the slot holds for call `sequence`; `Err` with the call it holds instead when it has moved on, which the
/// protocol rules out.
#[inline(always)]
pub(super) fn read<W: Word<u64>>(slot: [&W; 4], sequence: u64) -> Result<Option<Description>, u64> {
    let found = slot[0].get(Ordering::Acquire);
    if found <= sequence {
        return Ok(None);
    }
    if found != sequence + 1 {
        return Err(found - 1);
    }
    Ok(Some(Description {
        offset: slot[1].get(Ordering::Relaxed),
        bytes: slot[2].get(Ordering::Relaxed),
        fingerprint: slot[3].get(Ordering::Relaxed),
    }))
}

/// Says that all reading of call `sequence` is over.
#[inline(always)]
pub(super) fn finish<W: Word<u64>>(done: &W, sequence: u64) {
    done.set(sequence + 1, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64 as Checked;
    use loom::thread;

    /// One rank's slot (depth 1, so that every call reuses it) with its payload, and its reader's word.
    struct Rank {
        slot: [Checked; 4],
        payload: UnsafeCell<u64>,
        done: Checked,
    }

    fn rank() -> Rank {
        let zero = || Checked::new(0);
        Rank { slot: [zero(), zero(), zero(), zero()], payload: UnsafeCell::new(0), done: zero() }
    }

    fn await_that(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    fn publish_value(me: &Rank, readers: &[&Rank], sequence: u64) {
        await_that(|| readers.iter().all(|r| sequence == 0 || finished(&r.done, sequence - 1)));
        // loom fails the test if a reader may still be at it.
        me.payload.with_mut(|p| unsafe_write(p, 10 + sequence));
        let what = Description { offset: sequence, bytes: 8, fingerprint: 100 + sequence };
        publish([&me.slot[0], &me.slot[1], &me.slot[2], &me.slot[3]], sequence, what);
    }

    fn unsafe_write(p: *mut u64, value: u64) {
        // SAFETY: loom gives the pointer exclusively inside with_mut, and checks that.
        unsafe { *p = value }
    }

    fn read_value(me: &Rank, peer: &Rank, sequence: u64) {
        let slot = [&peer.slot[0], &peer.slot[1], &peer.slot[2], &peer.slot[3]];
        let what = loop {
            match read(slot, sequence).expect("the slot never moves on under a reader") {
                Some(what) => break what,
                None => thread::yield_now(),
            }
        };
        assert_eq!((what.offset, what.fingerprint), (sequence, 100 + sequence));
        // SAFETY: loom checks that nobody writes meanwhile.
        assert_eq!(peer.payload.with(|p| unsafe { *p }), 10 + sequence);
        finish(&me.done, sequence);
    }

    #[test]
    fn no_interleaving_breaks_a_reused_slot() {
        loom::model(|| {
            let (a, b) = (Arc::new(rank()), Arc::new(rank()));
            let (a2, b2) = (a.clone(), b.clone());
            let reader = thread::spawn(move || (0..3).for_each(|s| read_value(&b2, &a2, s)));
            (0..3).for_each(|s| publish_value(&a, &[&b], s));
            reader.join().expect("the reader");
        });
    }

    #[test]
    fn two_readers_both_hold_the_slot() {
        loom::model(|| {
            let ranks = Arc::new([rank(), rank(), rank()]);
            publish_value(&ranks[0], &[&ranks[1], &ranks[2]], 0);
            let readers: Vec<_> = (1..3)
                .map(|me| {
                    let ranks = ranks.clone();
                    thread::spawn(move || read_value(&ranks[me], &ranks[0], 0))
                })
                .collect();
            // One try instead of waiting: overwriting while one still reads would be a race that loom reports.
            if ranks[1..].iter().all(|r| finished(&r.done, 0)) {
                publish_value(&ranks[0], &[&ranks[1], &ranks[2]], 1);
            }
            readers.into_iter().for_each(|r| r.join().expect("a reader"));
        });
    }
}
