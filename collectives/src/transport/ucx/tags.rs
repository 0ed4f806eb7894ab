//! How a message is named in UCX's 64-bit tags. UCX matches by tag alone within a worker, and a process has one worker
//! for all its groups, so the tag holds the source and the group too.
//!
//! ```text
//! 63       62..49   48    47..36  35..32  31..0
//! control  source   user  group   type    the low 32 bits of our tag
//! ```
//!
//! The source is a rank of the job. The group is the number by which the receiver knows it; each process numbers its own
//! groups, so members need not agree on one.
//!
//! Of our 64 bits the engine uses the highest to tell users' messages from those of collectives, and that one is
//! kept. Users' tags have 32 bits and fit, with the [type](Typed) of the elements. A collective's tag is its number on the
//! group, then 16 bits for the message
//! within the call, so dropping the upper bits makes the numbers repeat after 2^16 calls. UCX matches equal tags in the
//! order of posting, so that mixes up messages only if 2^16 calls are under way on one rank at once; the engine holds
//! later ones back (see [`window`](crate::transport::Transport::window)).
//!
//! **Other calls.** UCX can leave bits out of a comparison of tags. So where the first message of a call between two ranks does
//! not come, it is looked whether another has come that was sent as the first, or a user's message of another type; its tag and
//! length then say what the sender has called.

use crate::transport::Tag;
use crate::watch::{Coded, Fingerprint, Typed};

/// Set in messages of the transport itself.
pub(super) const CONTROL: u64 = 1 << 63;
/// The bits that hold the source.
pub(super) const SOURCE_MASK: u64 = (MOST_RANKS as u64 - 1) << SOURCE_SHIFT;
/// More ranks do not fit the tag.
pub(super) const MOST_RANKS: usize = 1 << 14;
/// More groups at once do not fit the tag.
pub(super) const MOST_GROUPS: usize = 1 << 12;
const SOURCE_SHIFT: u32 = 49;
const GROUP_SHIFT: u32 = 36;
/// Where the engine marks users' messages, and where this transport does.
const USER: (u32, u32) = (63, SOURCE_SHIFT - 1);
/// Bits of a collective's tag that number the message within the call.
const SLOT_BITS: u32 = 16;
/// Calls that can be told apart.
pub(super) const CALLS: u64 = 1 << (Typed::SHIFT - SLOT_BITS);
/// Bits that number the message within the call.
const SLOT: u64 = (1 << SLOT_BITS) - 1;

/// The kind of control message in the lowest byte.
pub(super) const NOTICE: u64 = CONTROL | 1;
/// The forming of a subgroup.
pub(super) const EXCHANGE: u64 = CONTROL | 2;
/// Matches a control message of one kind from any source.
pub(super) const KIND_MASK: u64 = CONTROL | 0xff;
/// What a control message can be about.
const ABOUT: u64 = (1 << 40) - 1;
/// Matches exactly.
pub(super) const EXACT: u64 = u64::MAX;

/// The tag of a message from `source` in the group that its receiver calls `group`.
pub(super) fn message(source: usize, group: u16, tag: Tag) -> u64 {
    let user = tag.0 >> USER.0;
    let kept = u32::MAX as u64 | (Typed::MASK * user);
    (source as u64) << SOURCE_SHIFT | user << USER.1 | (group as u64) << GROUP_SHIFT | tag.0 & kept
}

/// What the tags of all messages of the group have in common that their receiver calls `group`, and which bits say so.
pub(super) fn of_group(group: u16) -> (u64, u64) {
    ((group as u64) << GROUP_SHIFT, CONTROL | (MOST_GROUPS as u64 - 1) << GROUP_SHIFT)
}

/// Which bits of the tag of a message decide whether it is what the receive of `tag` waits for, or was sent in its place.
pub(super) fn deciding(tag: u64) -> u64 {
    let slot = tag as u16;
    match is_user(tag) {
        true => !Typed::MASK,
        false if slot == 0 || Coded::from_slot(slot).is_some() => !SLOT,
        false => EXACT,
    }
}

/// What the sender of a message of `bytes` under `tag` has called, if the tag says it; both ranks are of the group.
pub(super) fn called(tag: u64, bytes: usize, from: usize, to: usize) -> Option<Fingerprint> {
    match is_user(tag) {
        true => Typed::fingerprint(tag, bytes),
        false => Coded::fingerprint(Coded::from_slot(tag as u16)?.what(), bytes, from, to),
    }
}

/// Whether a message of this tag begins with a fingerprint, if it is the first: of users' messages long ones do, which have no
/// type.
pub(super) fn is_framed(tag: u64) -> bool {
    let bits = if is_user(tag) { Typed::MASK } else { SLOT };
    tag & bits == 0
}

fn is_user(tag: u64) -> bool {
    tag >> USER.1 & 1 != 0
}

/// The tag of a control message of `kind` from `source`; `about` is cut to 40 bits.
pub(super) fn control(kind: u64, source: usize, about: u64) -> u64 {
    kind | (source as u64) << SOURCE_SHIFT | (about & ABOUT) << 8
}

/// Who sent it.
pub(super) fn source(tag: u64) -> usize {
    ((tag & SOURCE_MASK) >> SOURCE_SHIFT) as usize
}

/// What a control message is about.
pub(super) fn about(tag: u64) -> u64 {
    tag >> 8 & ABOUT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let top = MOST_RANKS - 1;
        for tag in [0, 1, u32::MAX as u64, u64::MAX] {
            for from in [0, 1, top] {
                for group in [0, 1, MOST_GROUPS as u16 - 1] {
                    let m = message(from, group, Tag(tag));
                    assert_eq!((source(m), m & CONTROL), (from, 0));
                    assert_eq!(m & u32::MAX as u64, tag & u32::MAX as u64);
                    assert_eq!(m >> GROUP_SHIFT & 0xfff, group as u64);
                    let is_of = |other| (m ^ of_group(other).0) & of_group(other).1 == 0;
                    assert!(is_of(group) && !is_of(group ^ 1) && !is_of(group ^ 0x800));
                    assert_eq!(m >> USER.1 & 1, tag >> 63);
                    assert_eq!(m & Typed::MASK, tag & (Typed::MASK * (tag >> 63)));
                }
                let c = control(EXCHANGE, from, tag);
                assert_eq!((source(c), c & KIND_MASK, about(c)), (from, EXCHANGE, tag & ABOUT));
                assert!((0..MOST_GROUPS as u16).all(|group| c & of_group(group).1 != of_group(group).0));
            }
        }
        // A user's message 5 and the message 5 of the first collective.
        assert_ne!(message(0, 0, Tag(1 << 63 | 5)), message(0, 0, Tag(5)));
        assert_ne!(control(EXCHANGE, 0, 1), control(EXCHANGE, 0, 2));
    }

    #[test]
    fn whatever_is_sent_in_place_of_a_message_meets_its_receive() {
        use crate::element::DType;
        use crate::schedule::{Call, Kind};
        let of = |tag: u64| message(3, 7, Tag(tag));
        let meet = |posted: u64, sent: u64| (posted ^ sent) & deciding(posted) == 0;
        let gather = Call::new(Kind::AllGather, DType::F32, 10);
        let coded = 5 << SLOT_BITS | u64::from(Coded::of(&gather, 40).unwrap().slot());
        for first in [5 << SLOT_BITS, coded] {
            assert!(meet(of(first), of(coded)) && meet(of(first), of(5 << SLOT_BITS)));
            assert!(!meet(of(first), of(first + (1 << SLOT_BITS))), "another call");
            assert!(
                !meet(of(first), message(2, 7, Tag(first))) && !meet(of(first), message(3, 6, Tag(first)))
            );
        }
        assert!(!meet(of(5 << SLOT_BITS | 1), of(5 << SLOT_BITS)), "a later message of the call");
        assert_eq!(called(of(coded), 40, 3, 1), Some(Fingerprint::of(&gather)));
        assert!(called(of(5 << SLOT_BITS), 40, 3, 1).is_none() && is_framed(of(5 << SLOT_BITS)));

        let user = |dtype, tag: u64| of(1 << 63 | Typed::of(dtype) | tag);
        assert!(
            meet(user(DType::F32, 9), user(DType::F64, 9)) && !meet(user(DType::F32, 9), user(DType::F32, 8))
        );
        assert!(
            !meet(of(9), user(DType::F32, 9))
                && !is_framed(user(DType::F32, 0))
                && is_framed(of(1 << 63 | 9))
        );
        let sent = Fingerprint::of(&Call::new(Kind::Send, DType::F64, 5));
        assert_eq!(called(user(DType::F64, 9), 40, 3, 1), Some(sent));
    }
}
