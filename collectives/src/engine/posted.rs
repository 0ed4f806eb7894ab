//! Messages under way. A long one goes in pieces, two at a time: libraries say of a message only that it is through, so
//! whoever waits for a large one over a slow link would else see nothing of its peer for as long as that takes, and take it
//! for silent. All pieces have one tag, so a user's message is not posted before all of an earlier one under its tag is; and
//! what was called cannot be told of a piece, so a fingerprint goes ahead.

use super::diverged::{differs, in_words};
use super::execute::State;
use crate::error::Result;
use crate::schedule::{Schedule, Space};
use crate::transport::{Request, Tag, Transport};
use crate::watch::Fingerprint;

/// A message under way.
pub(super) struct Posted {
    group: usize,
    pub peer: usize,
    pub incoming: bool,
    /// All of it, or its first piece that is not through.
    request: Request,
    /// Where in scratch it brings the peer's fingerprint, if it does.
    fingerprint: Option<usize>,
    /// What comes behind that piece. Boxed, because few messages are long, and the shortest take a fraction of a microsecond.
    rest: Option<Box<Rest>>,
}

/// What is behind the first piece of a message.
struct Rest {
    /// The next one, if it is under way.
    ahead: Request,
    /// What is not posted yet.
    left: Message,
}

/// Whether it comes, from or to whom, under which tag, where it is and how long.
#[derive(Clone, Copy)]
pub(super) struct Message {
    pub incoming: bool,
    pub peer: usize,
    pub tag: Tag,
    pub at: *mut u8,
    pub bytes: usize,
}

/// Bytes of the next piece of a message of which so many are left. All pieces are about equally long, so that transports that
/// treat short messages in another way treat them alike.
#[inline(always)]
fn piece(left: usize, longest: usize) -> usize {
    if left <= longest {
        return left;
    }
    left.div_ceil(left.div_ceil(longest.max(1))).next_multiple_of(64).min(left)
}

impl Message {
    /// Posts the next piece; the rest is left.
    ///
    /// # Safety
    /// The memory stays as it is, or untouched, until the piece is through.
    #[inline(always)]
    unsafe fn next(&mut self, longest: usize, looks: u32, transport: &mut dyn Transport) -> Result<Request> {
        let Message { incoming, peer, tag, at, bytes } = *self;
        let first = piece(bytes, longest);
        (self.at, self.bytes) = (at.wrapping_add(first), bytes - first);
        // SAFETY: the caller's promise.
        unsafe {
            match incoming {
                true => transport.recv_awaited(peer, tag, at, first, looks),
                false => transport.send(peer, tag, at, first),
            }
        }
    }
}

impl Posted {
    fn is_of(&self, group: usize) -> bool {
        #[cfg(test)]
        tests::COMPARED.set(tests::COMPARED.get() + 1);
        self.group == group
    }

    /// Whether what was posted first is through, for who posts no more.
    pub fn is_over(&self, transport: &mut dyn Transport) -> Result<bool> {
        if self.request == Request::DONE { Ok(true) } else { transport.test(self.request) }
    }

    /// Whether there is nothing left to post.
    pub fn is_whole(&self) -> bool {
        self.rest.as_ref().is_none_or(|rest| rest.left.bytes == 0)
    }

    /// Whether it is through after `looks` further looks; counts the pieces that are.
    #[inline(always)]
    fn is_through(
        &mut self,
        longest: usize,
        looks: u32,
        through: &mut u64,
        transport: &mut dyn Transport,
    ) -> Result<bool> {
        loop {
            if let Some(Rest { ahead, left }) = self.rest.as_deref_mut()
                && *ahead == Request::DONE
                && left.bytes > 0
            {
                // SAFETY: as for the first piece.
                *ahead = unsafe { left.next(longest, 0, transport) }?;
            }
            if self.request != Request::DONE && !transport.test_often(self.request, looks)? {
                return Ok(false);
            }
            *through += 1;
            let Some(Rest { ahead, left }) = self.rest.as_deref_mut() else { return Ok(true) };
            self.request = std::mem::replace(ahead, Request::DONE);
            if self.request == Request::DONE && left.bytes == 0 {
                return Ok(true);
            }
        }
    }
}

impl State {
    /// Posts a message of a `group`, looking up to `looks` times at once whether it has come.
    pub(super) fn post(
        &mut self,
        mut message: Message,
        group: usize,
        (fingerprint, looks): (Option<usize>, u32),
        schedule: &Schedule,
        transport: &mut dyn Transport,
    ) -> Result<()> {
        let (peer, incoming) = (message.peer, message.incoming);
        // SAFETY: the buffers live, and stay as they are, or untouched, until the call is done, which `Wait` precedes.
        let request = unsafe { message.next(schedule.group.tuning.longest, looks, transport) };
        let request = request.map_err(|e| in_words(e, schedule, self, transport, peer))?;
        if request == Request::DONE && message.bytes == 0 {
            return self.believe(peer, fingerprint, transport);
        }
        debug_assert!(self.posted.len() < self.posted.capacity(), "room for all that a schedule posts");
        let rest = (message.bytes > 0).then(|| Box::new(Rest { ahead: Request::DONE, left: message }));
        self.posted.push(Posted { group, peer, incoming, request, fingerprint, rest });
        Ok(())
    }

    /// Moves the messages of a group on; the peer of one that is not through yet after `looks` further looks. It looks at one
    /// such only, and the next time at the one after it: each look moves what the library moves by itself, which may give up
    /// the processor in it, but of what a transport has yet to ask the library for only this. So each has to have its turn:
    /// ranks that look at what they send alone wait for each other.
    pub(super) fn under_way(
        &mut self,
        group: usize,
        looks: u32,
        schedule: &Schedule,
        transport: &mut dyn Transport,
    ) -> Result<Option<usize>> {
        let longest = schedule.group.tuning.longest;
        loop {
            let (from, count) = (self.look.min(self.posted.len()), self.posted.len());
            let mut turns = (from..count).chain(0..from);
            let Some(at) = turns.find(|&at| self.posted[at].is_of(group)) else { return Ok(None) };
            let posted = &mut self.posted[at];
            let (peer, fingerprint) = (posted.peer, posted.fingerprint);
            let through = posted.is_through(longest, looks, &mut self.through, transport);
            if !through.map_err(|e| in_words(e, schedule, self, transport, peer))? {
                self.look = at + 1;
                return Ok(Some(peer));
            }
            self.posted.swap_remove(at);
            // Those before it are of other groups, and as many as a round has.
            self.look = at;
            self.believe(peer, fingerprint, transport)?;
        }
    }

    /// The first message under way, by its group.
    pub(super) fn first_under_way(&self) -> Option<usize> {
        self.posted.first().map(|posted| posted.group)
    }

    /// Compares the fingerprint that a message of `peer` has brought, before anything else that it sends is waited for: it
    /// may have called what sends nothing more.
    #[inline(always)]
    fn believe(&self, peer: usize, fingerprint: Option<usize>, transport: &dyn Transport) -> Result<()> {
        let Some(at) = fingerprint else { return Ok(()) };
        let header = self.read(Space::Scratch, at).cast::<u64>();
        // SAFETY: the schedule reserved these eight bytes, and they have arrived.
        let theirs = Fingerprint::from_bits(unsafe { header.read_unaligned() });
        if theirs == self.fingerprint { Ok(()) } else { Err(differs(self, transport, peer, theirs)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Call, Group, Kind, Local};
    use crate::transport::threads;
    use std::cell::Cell;

    thread_local! {
        /// How often it was asked of which group a message is.
        pub static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn who_waits_for_one_of_two_rounds_looks_through_the_other_once() {
        const MANY: usize = 1000;
        let [mut first, mut second] = <[_; 2]>::try_from(threads::group(2)).ok().expect("two ranks");
        let call = Call::new(Kind::Barrier, DType::U8, 0);
        let schedule = Schedule::new(call, &Group::plain(0, 2), Local::default(), None);
        let mut state = State::empty(2, 2 * MANY, None);
        let (mut got, sent) = ([0u8; 2 * MANY], [7u8; 2 * MANY]);
        for (slot, place) in got.iter_mut().enumerate() {
            let (tag, group) = (Tag(slot as u64), 1 - slot / MANY);
            let message = Message { incoming: true, peer: 1, tag, at: place, bytes: 1 };
            state.post(message, group, (None, 0), &schedule, &mut first).expect("is posted");
        }
        for (slot, byte) in sent.iter().enumerate() {
            // SAFETY: it stays until the end of the test.
            unsafe { second.send(0, Tag(slot as u64), byte, 1) }.expect("is sent");
        }
        for group in 0..2 {
            COMPARED.set(0);
            let left = state.under_way(group, 0, &schedule, &mut first).expect("nobody fails");
            assert!(left.is_none() && COMPARED.get() <= 4 * MANY, "{} in group {group}", COMPARED.get());
        }
        assert!(state.posted.is_empty() && got == sent);
    }
}
