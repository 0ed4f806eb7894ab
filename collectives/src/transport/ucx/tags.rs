//! How a message is named in UCX's 64-bit tags. UCX matches by tag alone within a worker, so the tag holds the
//! source too; the group needs no bits, because each group has a worker of its own.
//!
//! ```text
//! 63       62..48   47    46..0
//! control  source   user  the low 47 bits of our tag
//! ```
//!
//! Of our 64 bits the engine uses the highest to tell users' messages from those of collectives, and that one is
//! kept. Users' tags have 32 bits and fit. A collective's tag is its number on the group, then 16 bits for the message
//! within the call, so dropping the upper bits makes the numbers repeat after 2^31 calls. That cannot mix up messages:
//! UCX matches equal tags in the order of posting, and for one to be posted out of order, 2^31 calls would have to be
//! under way on one rank at once.

use crate::transport::Tag;

/// Set in messages of the transport itself.
pub(super) const CONTROL: u64 = 1 << 63;
/// The bits that hold the source.
pub(super) const SOURCE_MASK: u64 = (MOST_RANKS as u64 - 1) << SOURCE_SHIFT;
/// More ranks do not fit the tag.
pub(super) const MOST_RANKS: usize = 1 << 15;
const SOURCE_SHIFT: u32 = 48;
const TAG_MASK: u64 = (1 << SOURCE_SHIFT) - 1;
/// Where the engine marks users' messages, and where this transport does.
const USER: (u32, u32) = (63, SOURCE_SHIFT - 1);

/// The kind of control message in the lowest byte.
pub(super) const NOTICE: u64 = CONTROL | 1;
/// An exchange of addresses for a subgroup.
pub(super) const EXCHANGE: u64 = CONTROL | 2;
/// Matches a control message of one kind from any source.
pub(super) const KIND_MASK: u64 = CONTROL | 0xff;
/// Matches exactly.
pub(super) const EXACT: u64 = u64::MAX;

/// The tag of a message from `source`.
pub(super) fn message(source: usize, tag: Tag) -> u64 {
    let user = tag.0 >> USER.0 << USER.1;
    (source as u64) << SOURCE_SHIFT | user | tag.0 & (TAG_MASK >> 1)
}

/// The tag of a control message of `kind` from `source`; `about` is cut to 40 bits.
pub(super) fn control(kind: u64, source: usize, about: u64) -> u64 {
    kind | (source as u64) << SOURCE_SHIFT | (about << 8) & TAG_MASK
}

/// Who sent it.
pub(super) fn source(tag: u64) -> usize {
    ((tag & SOURCE_MASK) >> SOURCE_SHIFT) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch_each_other() {
        let top = MOST_RANKS - 1;
        for tag in [0, 1, TAG_MASK, u64::MAX] {
            for from in [0, 1, top] {
                let m = message(from, Tag(tag));
                let kept = tag & (TAG_MASK >> 1) | (tag >> 63) << 47;
                assert_eq!((source(m), m & CONTROL, m & TAG_MASK), (from, 0, kept));
                let c = control(EXCHANGE, from, tag);
                assert_eq!((source(c), c & KIND_MASK), (from, EXCHANGE));
            }
        }
        // A user's message 5 and the message 5 of the first collective.
        assert_ne!(message(0, Tag(1 << 63 | 5)), message(0, Tag(5)));
        assert_ne!(control(EXCHANGE, 0, 1), control(EXCHANGE, 0, 2));
        assert_eq!(SOURCE_MASK | CONTROL | TAG_MASK, u64::MAX);
    }
}
