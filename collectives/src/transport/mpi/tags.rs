//! How our 64-bit tags become MPI's, of which a library grants as little as 20 bits.
//!
//! The engine marks users' messages by the highest bit; they go over a communicator of their own under their own
//! number, and a number above the library's limit is an error. A collective's tag is its number on the group, then
//! 16 bits for the message within the call. MPI's tag is its low bits, so the numbers of calls repeat after a
//! *window*: 2^15 calls on Open MPI, 2^12 on MPICH.
//!
//! Repetition cannot mix up messages. MPI matches messages of one sender, communicator and tag in the order in which
//! they were posted, on both sides. Calls start in the same order on all ranks, so two calls whose tags are equal are
//! posted in the same order on both sides unless a rank posts a message of the earlier call after one of the later,
//! which takes a window of calls under way at once on that rank. [`Tags::collective`] notices just that and refuses.

use crate::transport::Tag;
use std::os::raw::c_int;

/// Bits of a collective's tag that number the message within the call.
const SLOT_BITS: u32 = 16;
/// Set in tags of users' messages.
const USER: u64 = 1 << 63;
/// Below this a window would be too narrow to be of use.
pub(super) const LEAST_LIMIT: c_int = (1 << 20) - 1;

/// Which communicator carries a message, and under which tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    Collective(c_int),
    User(c_int),
}

/// The mapping of one group.
pub(super) struct Tags {
    /// Bits of MPI's tags that are used for collectives.
    bits: u32,
    /// The largest tag that MPI takes.
    limit: c_int,
    /// The latest call for which anything was posted.
    newest: u64,
}

impl Tags {
    /// For a library whose tags go up to `limit`, which is at least [`LEAST_LIMIT`].
    pub(super) fn new(limit: c_int) -> Self {
        Tags { bits: (limit as u32 + 1).ilog2().min(31), limit, newest: 0 }
    }

    /// Where a message goes, or what is wrong with its tag.
    pub(super) fn map(&mut self, tag: Tag) -> Result<Mapped, String> {
        if tag.0 & USER != 0 {
            self.user(tag.0 & !USER).map(Mapped::User)
        } else {
            self.collective(tag.0).map(Mapped::Collective)
        }
    }

    fn user(&self, tag: u64) -> Result<c_int, String> {
        match c_int::try_from(tag) {
            Ok(small) if small <= self.limit => Ok(small),
            _ => Err(format!("tag {tag} was asked for; this MPI library takes 0 to {}", self.limit)),
        }
    }

    fn collective(&mut self, tag: u64) -> Result<c_int, String> {
        let (call, window) = (tag >> SLOT_BITS, 1u64 << (self.bits - SLOT_BITS));
        if call + window <= self.newest {
            return Err(format!(
                "call {call} is still under way while call {} has begun; over this MPI library fewer than {window} \
                 calls can be under way at once, so wait for some before starting more",
                self.newest
            ));
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
            let mut tags = Tags::new(limit);
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
    fn different_messages_of_a_window_have_different_tags() {
        let mut tags = Tags::new(MPICH);
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
        let mut tags = Tags::new(MPICH);
        tags.map(collective(4096, 0)).unwrap();
        tags.map(collective(1, 0)).expect("the other end of the window");
        let text = tags.map(collective(0, 3)).unwrap_err();
        assert!(text.contains("call 0") && text.contains("fewer than 4096"), "{text}");
    }

    #[test]
    fn users_tags_are_kept_or_refused() {
        let mut tags = Tags::new(MPICH);
        assert_eq!(tags.map(Tag(USER | 7)), Ok(Mapped::User(7)));
        assert_eq!(tags.map(Tag(USER | MPICH as u64)), Ok(Mapped::User(MPICH)));
        for bad in [MPICH as u64 + 1, u32::MAX as u64] {
            let text = tags.map(Tag(USER | bad)).unwrap_err();
            assert!(text.contains(&bad.to_string()) && text.contains("0 to 268435455"), "{text}");
        }
    }
}
