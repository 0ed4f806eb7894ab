//! How our 64-bit tags become MPI's, of which a library grants as little as 17 bits.
//!
//! The engine marks users' messages by the highest bit; they go over a communicator of their own under their own
//! number, and a number above the library's limit is an error. A collective's tag is its number on the group, then
//! 16 bits for the message within the call. MPI's tag is its low bits, so the numbers of calls repeat after a
//! *window*: 2^11 calls on Open MPI (see below), where its messages go over UCX 2^7, 2^12 on MPICH.
//!
//! Repetition cannot mix up messages. MPI matches messages of one sender, communicator and tag in the order in which
//! they were posted, on both sides. Calls start in the same order on all ranks, so two calls whose tags are equal are
//! posted in the same order on both sides unless a rank posts a message of the earlier call after one of the later,
//! which takes a window of calls under way at once on that rank. The engine holds the later ones back so that there never
//! are (see [`window`](collectives::transport::Transport::window)), and [`Tags::collective`] would refuse them.
//!
//! Over a library with tags of 31 bits that writes past a receive to which a longer message comes (see
//! `transport/requests.rs`), some messages have tags of another kind, on a communicator of their own: 11 bits of the
//! call's number, 8 of what is called, and 12 of the exact length. A message of another length cannot meet such a receive, so
//! it is posted at once.

use collectives::transport::Tag;
use collectives::watch::Coded;
use std::ops::Range;
use std::os::raw::c_int;

/// Bits of a collective's tag that number the message within the call.
const SLOT_BITS: u32 = 16;
/// Set in tags of users' messages.
const USER: u64 = 1 << 63;
/// Below this there would be no window: what MPICH grants over some networks. Intel MPI grants four times as much over
/// InfiniBand.
pub(super) const LEAST_LIMIT: c_int = (1 << (SLOT_BITS + 1)) - 1;

/// Lengths that tags of exact lengths can express: multiples of [`GRAIN`] from the start.
const EXACT: Range<usize> = 4000..4000 + (GRAIN << LENGTH_BITS);
const GRAIN: usize = 8;
const LENGTH_BITS: u32 = 12;
/// Bits of what is called in such tags.
const WHAT_BITS: u32 = 8;
/// Bits of the call's number in such tags.
const NUMBER_BITS: u32 = 31 - LENGTH_BITS - WHAT_BITS;

/// Which communicator carries a message, and under which tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    Collective(c_int),
    User(c_int),
}

/// What a message says about itself by its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// All of a call between two ranks, which is this.
    Whole(u8),
    /// One of several messages.
    Slot(u16),
}

/// The mapping of one group.
#[derive(Clone, Copy)]
pub(super) struct Tags {
    /// Bits of MPI's tags that are used for collectives.
    bits: u32,
    /// Calls that can be told apart.
    pub(super) window: u64,
    /// The largest tag that MPI takes.
    pub(super) limit: c_int,
    /// The latest call for which anything was posted.
    newest: u64,
}

impl Tags {
    /// For a library whose tags go up to `limit`, which is at least [`LEAST_LIMIT`], with or without tags of exact
    /// lengths.
    pub(super) fn new(limit: c_int, exact: bool) -> Self {
        let bits = (limit as u32 + 1).ilog2().min(31);
        let window = 1u64 << (bits - SLOT_BITS);
        let window = if exact && bits == 31 { window.min(1 << NUMBER_BITS) } else { window };
        Tags { bits, window, limit, newest: 0 }
    }

    /// The tag that only messages of just this length have, if there is one.
    #[inline(always)]
    pub(super) fn exact(&self, tag: Tag, bytes: usize) -> Option<c_int> {
        let coded = Coded::from_slot(tag.0 as u16)?;
        let fits = self.bits == 31 && EXACT.contains(&bytes) && (bytes - EXACT.start).is_multiple_of(GRAIN);
        let length = (fits && tag.0 & USER == 0).then(|| (bytes - EXACT.start) / GRAIN)? as u64;
        let number = tag.0 >> SLOT_BITS & ((1 << NUMBER_BITS) - 1);
        Some((number << (WHAT_BITS + LENGTH_BITS) | u64::from(coded.what()) << LENGTH_BITS | length) as c_int)
    }

    /// What a message says that was found under MPI's `found`, if it may be of the same call as `tag`.
    pub(super) fn said(&self, tag: Tag, found: c_int) -> Option<Said> {
        let mask = (1u64 << (self.bits - SLOT_BITS)) - 1;
        let same = found as u64 >> SLOT_BITS == (tag.0 >> SLOT_BITS & mask);
        let slot = found as u16;
        same.then(|| Coded::from_slot(slot).map_or(Said::Slot(slot), |coded| Said::Whole(coded.what())))
    }

    /// The same for a tag of an exact length.
    pub(super) fn said_exactly(&self, tag: Tag, found: c_int) -> Option<Said> {
        let number = tag.0 >> SLOT_BITS & ((1 << NUMBER_BITS) - 1);
        let same = found as u64 >> (WHAT_BITS + LENGTH_BITS) == number;
        same.then_some(Said::Whole((found >> LENGTH_BITS) as u8))
    }

    /// The bytes of a message with a tag of an exact length.
    pub(super) fn length(exact: c_int) -> usize {
        EXACT.start + (exact as usize & ((1 << LENGTH_BITS) - 1)) * GRAIN
    }

    /// Where a message goes, or what is wrong with its tag.
    #[inline(always)]
    pub(super) fn map(&mut self, tag: Tag) -> Result<Mapped, String> {
        if tag.0 & USER != 0 {
            self.user(tag.0 & !USER).map(Mapped::User)
        } else {
            self.collective(tag.0).map(Mapped::Collective)
        }
    }

    #[cold]
    fn overtaken(&self, call: u64) -> String {
        let Tags { newest, window, .. } = *self;
        format!(
            "call {call} is still under way while call {newest} has begun; over this MPI library {window} calls can be \
             told apart"
        )
    }

    fn user(&self, tag: u64) -> Result<c_int, String> {
        match c_int::try_from(tag) {
            Ok(small) if small <= self.limit => Ok(small),
            _ => Err(format!("tag {tag} was asked for; this MPI library takes 0 to {}", self.limit)),
        }
    }

    #[inline(always)]
    fn collective(&mut self, tag: u64) -> Result<c_int, String> {
        let (call, window) = (tag >> SLOT_BITS, self.window);
        if call + window <= self.newest {
            return Err(self.overtaken(call));
        }
        self.newest = self.newest.max(call);
        Ok((tag & ((1 << self.bits) - 1)) as c_int)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MPICH: c_int = (1 << 28) - 1;

    fn collective(call: u64, slot: u64) -> Tag {
        Tag(call << 16 | slot)
    }

    #[test]
    fn tags_stay_within_the_limit() {
        for limit in [LEAST_LIMIT, MPICH, c_int::MAX, MPICH - 5] {
            let mut tags = Tags::new(limit, false);
            for call in [0, 1, 15, 16, 4095, 4096, 1 << 20, 1 << 40] {
                for slot in [0, 1, 65535] {
                    match tags.map(collective(call, slot)).unwrap() {
                        Mapped::Collective(t) => {
                            assert!((0..=limit).contains(&t) && t as u64 & 0xffff == slot)
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn exact_tags_hold_the_length() {
        use collectives::schedule::{Call, Kind};
        use collectives::{DType, ReduceOp};
        let tags = Tags::new(c_int::MAX, true);
        let mut seen = std::collections::HashSet::new();
        for call in [0u64, 1, 2047, 2048 * 5 + 7] {
            for kind in [Kind::AllReduce, Kind::AllToAll] {
                for op in [ReduceOp::Sum, ReduceOp::Max] {
                    for count in 400..5000 {
                        let made = Call { op, ..Call::new(kind, DType::F64, count) };
                        let tag = collective(call, Coded::of(&made, 8 * count).unwrap().slot().into());
                        let exact = tags.exact(tag, 8 * count);
                        assert_eq!(exact.is_some(), (4000..36768).contains(&(8 * count)), "{count}");
                        let Some(exact) = exact else { continue };
                        assert!(exact >= 0 && (seen.insert(exact) || kind == Kind::AllToAll));
                        let what = Coded::of(&made, 0).unwrap().what();
                        assert_eq!(tags.said_exactly(tag, exact), Some(Said::Whole(what)));
                        assert_eq!(Tags::length(exact), 8 * count);
                        assert_eq!(tags.said_exactly(collective(call + 1, 0), exact), None);
                        assert_eq!(tags.exact(tag, 8 * count + 4), None);
                    }
                }
            }
        }
        // Numbers of messages are no codes, and a library with fewer bits has no such tags.
        assert_eq!(tags.exact(collective(1, 7), 8192), None);
        assert_eq!(Tags::new(MPICH, true).exact(collective(1, 0x8000), 8192), None);
        let mut mpich = Tags::new(MPICH, false);
        for (slot, said) in [(7, Said::Slot(7)), (0x8000 | 150 << 7 | 3, Said::Whole(150))] {
            let Ok(Mapped::Collective(found)) = mpich.map(collective(70_000, slot)) else { panic!() };
            assert_eq!(mpich.said(collective(70_000, 5), found), Some(said));
            assert_eq!(mpich.said(collective(70_001, 5), found), None);
        }
    }

    #[test]
    fn different_messages_of_a_window_have_different_tags() {
        let mut tags = Tags::new(MPICH, true);
        let mut seen = std::collections::HashSet::new();
        for call in 10_000..10_000 + 4096 {
            for slot in [0, 1, 65535] {
                assert!(seen.insert(match tags.map(collective(call, slot)).unwrap() {
                    Mapped::Collective(t) => t,
                    other => panic!("{other:?}"),
                }));
            }
        }
    }

    #[test]
    fn a_call_that_is_overtaken_by_a_window_is_refused() {
        let mut tags = Tags::new(MPICH, true);
        tags.map(collective(4096, 0)).unwrap();
        tags.map(collective(1, 0)).expect("the other end of the window");
        let text = tags.map(collective(0, 3)).unwrap_err();
        assert!(text.contains("call 0") && text.contains("4096 calls can be told apart"), "{text}");
    }

    #[test]
    fn users_tags_are_kept_or_refused() {
        let mut tags = Tags::new(MPICH, true);
        assert_eq!(tags.map(Tag(USER | 7)), Ok(Mapped::User(7)));
        assert_eq!(tags.map(Tag(USER | MPICH as u64)), Ok(Mapped::User(MPICH)));
        for bad in [MPICH as u64 + 1, u32::MAX as u64] {
            let text = tags.map(Tag(USER | bad)).unwrap_err();
            assert!(text.contains(&bad.to_string()) && text.contains("0 to 268435455"), "{text}");
        }
    }
}
