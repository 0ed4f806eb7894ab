//! Messages between two ranks: a ring per ordered pair, written by the sender in its own segment.
//!
//! Small messages travel in the ring. A larger one that lies in the sender's segment is only described there; the
//! receiver copies it straight from where it is and says so. Any other is announced, and once a receive for it is
//! posted it comes through the ring in pieces. Messages with one tag stay in order; others may overtake, so a
//! receiver may wait for any of them first.

use super::bell;
use super::ends::{Answer, Arriving, Early, Incoming, Large, Outgoing, Posted, Waiting};
use super::group::Group;
use super::layout::{Block, Layout};
use super::requests::Requests;
use super::ring::{DONE, HEADER, MESSAGE, PIECE, RANGE, READY, Reader, Record, STAGED};
use crate::error::{Error, Result};
use crate::transport::{Request, Tag, wrong_length};
use std::collections::VecDeque;

/// Bytes up to which a message travels in the ring at once, if a ring is large enough: 8 KiB behind a call's fingerprint.
const EAGER: usize = (8 << 10) + size_of::<u64>();
/// Bytes moved per look at one peer, so that one large message does not hold up the others.
const STEP: usize = 1 << 20;

/// All messages of one group.
pub(super) struct Mail {
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    requests: Requests,
    eager: usize,
    piece: usize,
    /// Buffers of early messages, for reuse; no more than [`SPARE`].
    spare: Vec<Vec<u8>>,
}

// SAFETY: the raw pointers are to callers' buffers, which stay valid wherever the transport moves (contract of
// send and recv).
unsafe impl Send for Mail {}

/// Buffers that are kept.
const SPARE: usize = 64;
/// The most that travels at once beside others in rings of this layout.
fn eager(layout: &Layout) -> usize {
    EAGER.min(piece(layout))
}

/// What is left of that beside a header.
fn framed(eager: usize) -> usize {
    eager - size_of::<u64>()
}

/// What [`Mail::frame`] gives in a group of so many ranks.
pub(in crate::transport) fn frame(size: usize) -> usize {
    framed(eager(&Layout::new(size)))
}

/// Bytes of a piece of a longer message: a ring has room for several.
fn piece(layout: &Layout) -> usize {
    layout.ring_bytes() / 4 - HEADER
}

/// Messages to or from one member that there is room for at once from the start.
pub(super) const FEW: usize = 2;

impl Mail {
    pub fn new(group: &Group) -> Self {
        let size = group.size();
        Mail {
            // With room for a few of each, so that who sends them now and then takes no memory for that in its midst.
            outgoing: (0..size)
                .map(|_| Outgoing { waiting: VecDeque::with_capacity(FEW), ..Outgoing::default() })
                .collect(),
            incoming: (0..size)
                .map(|_| Incoming { posted: VecDeque::with_capacity(FEW), ..Incoming::default() })
                .collect(),
            requests: Requests::none(group.segments.rank()),
            eager: eager(&group.layout),
            piece: piece(&group.layout),
            spare: Vec::new(),
        }
    }

    /// Bytes behind a fingerprint with which they travel at once.
    pub fn frame(&self) -> usize {
        framed(self.eager)
    }

    /// Forgets what is under way: nothing is copied from or to where it was posted any more.
    pub fn forget(&mut self) {
        for outgoing in &mut self.outgoing {
            outgoing.waiting.clear();
            outgoing.large.clear();
        }
        for incoming in &mut self.incoming {
            incoming.posted.clear();
            incoming.arriving.clear();
        }
    }

    /// Posts a send; it may be complete at once.
    pub fn send(
        &mut self,
        group: &mut Group,
        to: usize,
        tag: Tag,
        src: *const u8,
        bytes: usize,
    ) -> Result<Request> {
        let request = self.requests.open();
        self.outgoing[to].waiting.push_back(Waiting { request, tag, src, bytes });
        if self.outgoing[to].waiting.len() == 1 {
            self.push(group, to)?;
        }
        Ok(request)
    }

    /// Posts a receive; it may be complete at once.
    pub fn recv(
        &mut self,
        group: &mut Group,
        from: usize,
        tag: Tag,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<Request> {
        let request = self.requests.open();
        let posted = Posted { request, tag, dst, bytes };
        let early = &mut self.incoming[from].early;
        match early.iter().position(|(t, _)| *t == tag).and_then(|at| early.remove(at)) {
            Some((_, early)) => self.accept(group, from, posted, early)?,
            None => self.incoming[from].posted.push_back(posted),
        }
        Ok(request)
    }

    /// Moves all messages forward, and says whether `request` is complete. `gone` tells of each rank
    /// of the host whether its process has left; who has left the group, one way or the other, sends nothing more.
    pub fn test(&mut self, group: &mut Group, request: Request, gone: &[bool]) -> Result<bool> {
        if self.requests.take_done(request)? {
            return Ok(true);
        }
        for member in 0..group.size() {
            let open = self.awaits(member) || !self.outgoing[member].idle();
            let left = open && (gone[group.members[member]] || group.left(member));
            let mut moved = false;
            if !self.outgoing[member].idle() {
                moved |= self.push(group, member)?;
            }
            if self.awaits(member) {
                moved |= self.pull(group, member)?;
            }
            // Only after both: what a message waits for may be the answer that its receiver wrote before it left.
            let stuck = !moved && (self.awaits(member) || !self.outgoing[member].idle());
            if stuck && left {
                // What others wait for does not fail because of it, if whoever asked for it can do without.
                self.withdraw(member, request);
                let how = "left before it took part in all messages".to_owned();
                let (rank, peer) = (group.segments.rank(), group.rank_of(member));
                return Err(Error::PeerLost { rank, peer, how });
            }
        }
        self.requests.take_done(request)
    }

    /// Forgets `request`, if it is of a message to or from `member`.
    #[cold]
    fn withdraw(&mut self, member: usize, request: Request) {
        if self.incoming[member].withdraw(request) || self.outgoing[member].withdraw(request) {
            self.requests.forget(request);
        }
    }

    /// Whether this rank copies messages that lie in their senders' segments.
    pub fn copies(&self) -> bool {
        self.incoming.iter().any(|incoming| incoming.arriving.iter().any(|arriving| arriving.src.is_some()))
    }

    /// Whether anything is expected in the ring of `from`: a message, or an answer about one.
    fn awaits(&self, from: usize) -> bool {
        let incoming = &self.incoming[from];
        !(incoming.posted.is_empty() && incoming.arriving.is_empty() && self.outgoing[from].large.is_empty())
    }

    /// Writes to the ring of `to` what fits; false when something waits and nothing moved.
    fn push(&mut self, group: &mut Group, to: usize) -> Result<bool> {
        let Some(peer) = group.block(to) else { return Ok(false) };
        while let Some(&Answer { kind, number, request }) = self.outgoing[to].answers.front() {
            // SAFETY: an answer carries nothing.
            if !unsafe { self.write(group, to, peer, &Record::new(kind, number, 0), std::ptr::null()) } {
                break;
            }
            self.outgoing[to].answers.pop_front();
            if let Some(request) = request {
                self.requests.complete(request);
            }
        }
        while self.depart(group, to, peer) {}
        let mut moved = self.outgoing[to].ring.show(group, to, peer);
        moved |= self.push_pieces(group, to, peer);
        Ok(moved || self.outgoing[to].idle())
    }

    /// As [`Writer::write`](super::ring::Writer::write), to the ring of `to`.
    ///
    /// # Safety
    /// As its.
    unsafe fn write(
        &mut self,
        group: &Group,
        to: usize,
        peer: Block,
        record: &Record,
        src: *const u8,
    ) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.outgoing[to].ring.write(group, to, peer, record, src) }
    }

    /// Lets the first waiting message leave, if there is one and room for it.
    fn depart(&mut self, group: &Group, to: usize, peer: Block) -> bool {
        let Some(&Waiting { request, tag, src, bytes }) = self.outgoing[to].waiting.front() else {
            return false;
        };
        if bytes <= self.eager {
            let record = Record { tag, ..Record::new(MESSAGE, 0, bytes) };
            // SAFETY: what callers of `send` promise; no longer than `eager`.
            if !unsafe { self.write(group, to, peer, &record, src) } {
                return false;
            }
            self.requests.complete(request);
        } else {
            let number = self.outgoing[to].announced;
            let offset = group.segments.offset_of(src, bytes);
            let (kind, rest) = match offset {
                Some(_) => (RANGE, None),
                None => (STAGED, Some((src, bytes))),
            };
            let record =
                Record { tag, offset: offset.unwrap_or(0) as u64, ..Record::new(kind, number, bytes) };
            // SAFETY: what only announces a message carries nothing of it.
            if !unsafe { self.write(group, to, peer, &record, src) } {
                return false;
            }
            let out = &mut self.outgoing[to];
            out.announced = number.wrapping_add(1);
            out.large.push(Large { request, number, rest, ready: false });
        }
        self.outgoing[to].waiting.pop_front();
        true
    }

    /// Puts pieces of announced messages into the ring, as their receivers are ready.
    fn push_pieces(&mut self, group: &Group, to: usize, peer: Block) -> bool {
        let (mut at, mut moved) = (0, false);
        while at < self.outgoing[to].large.len() {
            let Large { number, rest: Some((mut src, mut left)), ready: true, .. } =
                self.outgoing[to].large[at]
            else {
                at += 1;
                continue;
            };
            while left > 0 {
                let bytes = left.min(self.piece);
                // SAFETY: what callers of `send` promise of the message, which this is a part of; no longer than `piece`.
                if !unsafe { self.write(group, to, peer, &Record::new(PIECE, number, bytes), src) } {
                    break;
                }
                // SAFETY: stays inside the message, or one past its end.
                src = unsafe { src.add(bytes) };
                left -= bytes;
                // Shown one by one, so that the receiver copies while the next is written.
                moved |= self.outgoing[to].ring.show(group, to, peer);
            }
            if left > 0 {
                self.outgoing[to].large[at].rest = Some((src, left));
                return moved;
            }
            let large = self.outgoing[to].large.remove(at);
            self.requests.complete(large.request);
        }
        moved
    }

    /// Reads the ring of `from` and copies large messages; false when something is awaited and nothing moved.
    fn pull(&mut self, group: &mut Group, from: usize) -> Result<bool> {
        let Some(peer) = group.block(from) else { return Ok(false) };
        let mut moved = self.copy_ranges(group, from)?;
        let tail = Reader::tail(group, peer);
        let start = self.incoming[from].ring;
        while self.incoming[from].ring.since(start) < STEP as u64 {
            let Some((record, data)) = self.incoming[from].ring.next(group, from, peer, tail)? else { break };
            self.take(group, from, &record, data)?;
            self.incoming[from].ring.done(group, from, &record);
            moved = true;
        }
        if moved {
            // The sender may wait for room.
            group.fences().changed();
            bell::ring(peer);
        }
        Ok(moved || !self.awaits(from))
    }

    /// Takes one record from the ring; `data` is its payload.
    fn take(&mut self, group: &mut Group, from: usize, record: &Record, data: *const u8) -> Result<()> {
        let &Record { kind, number, tag, bytes, offset } = record;
        match kind {
            READY | DONE => self.answered(group, from, kind, number)?,
            PIECE => {
                let arriving = &mut self.incoming[from].arriving;
                let Some(at) = arriving.iter().position(|a| a.number == number && a.src.is_none()) else {
                    return Err(group.corrupt(from, "a piece of no message".into()));
                };
                let whole = &mut arriving[at];
                if bytes > whole.bytes - whole.got {
                    return Err(group.corrupt(from, format!("a piece of {bytes} bytes, which is too many")));
                }
                // SAFETY: the payload is inside the ring.
                unsafe { whole.put(data, bytes) };
                if whole.got == whole.bytes {
                    let Arriving { posted, bytes, .. } = arriving.swap_remove(at);
                    self.arrived(group, from, &posted, bytes);
                }
            }
            _ => {
                let posted = &mut self.incoming[from].posted;
                let found = posted.iter().position(|p| p.tag == tag).and_then(|at| posted.remove(at));
                match (found, kind) {
                    (Some(posted), MESSAGE) => {
                        // SAFETY: inside the posted receive; the payload is inside the ring.
                        unsafe { posted.dst.copy_from_nonoverlapping(data, bytes.min(posted.bytes)) };
                        self.arrived(group, from, &posted, bytes);
                    }
                    (None, MESSAGE) => {
                        let mut copy = self.spare.pop().unwrap_or_default();
                        // SAFETY: the payload is inside the ring, and does not change before the head passes.
                        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(data, bytes) });
                        self.incoming[from].early.push_back((tag, Early::Whole(copy)));
                    }
                    (found, _) => {
                        let early = Early::Announced { kind, number, bytes, offset };
                        match found {
                            Some(posted) => self.accept(group, from, posted, early)?,
                            None => self.incoming[from].early.push_back((tag, early)),
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The receiver of a large message is ready for its pieces, or has copied it.
    fn answered(&mut self, group: &Group, from: usize, kind: u64, number: u32) -> Result<()> {
        let large = &mut self.outgoing[from].large;
        match large.iter().position(|l| l.number == number && l.rest.is_some() == (kind == READY)) {
            Some(at) if kind == READY => large[at].ready = true,
            Some(at) => self.requests.complete(large.remove(at).request),
            None => {
                return Err(group.corrupt(from, format!("an answer to message {number}, which is not open")));
            }
        }
        Ok(())
    }

    /// Brings a message that came early, or was announced, together with its receive.
    fn accept(&mut self, group: &mut Group, from: usize, posted: Posted, early: Early) -> Result<()> {
        match early {
            Early::Whole(mut copy) => {
                // SAFETY: inside the posted receive.
                unsafe { posted.dst.copy_from_nonoverlapping(copy.as_ptr(), copy.len().min(posted.bytes)) };
                self.arrived(group, from, &posted, copy.len());
                if self.spare.len() < SPARE {
                    copy.clear();
                    self.spare.push(copy);
                }
            }
            Early::Announced { kind, number, bytes, offset } => {
                let src = if kind == RANGE {
                    let address = group.address(from, offset, bytes);
                    Some(address.ok_or_else(|| group.corrupt(from, format!("{bytes} bytes at {offset}")))?)
                } else {
                    self.answer(group, from, Answer { kind: READY, number, request: None })?;
                    None
                };
                self.incoming[from].arriving.push(Arriving { posted, number, bytes, got: 0, src });
            }
        }
        Ok(())
    }

    /// Tells a sender, now or as soon as there is room.
    fn answer(&mut self, group: &mut Group, to: usize, answer: Answer) -> Result<()> {
        self.outgoing[to].answers.push_back(answer);
        self.push(group, to).map(drop)
    }

    /// Copies messages that lie in the sender's segment, a step at a time.
    fn copy_ranges(&mut self, group: &mut Group, from: usize) -> Result<bool> {
        let mut left = STEP;
        let mut at = 0;
        while left > 0 && at < self.incoming[from].arriving.len() {
            let arriving = &mut self.incoming[from].arriving[at];
            let Some(src) = arriving.src else {
                at += 1;
                continue;
            };
            let bytes = left.min(arriving.bytes - arriving.got);
            // SAFETY: inside the message, which was checked against the sender's segment and stays unchanged until the
            // sender is told.
            unsafe { arriving.put(src.add(arriving.got), bytes) };
            left -= bytes;
            if arriving.got == arriving.bytes {
                let Arriving { posted, number, bytes, .. } = self.incoming[from].arriving.remove(at);
                // Complete only once the sender is told: nobody may look here again after the last request.
                let request = (posted.bytes == bytes).then_some(posted.request);
                if request.is_none() {
                    self.arrived(group, from, &posted, bytes);
                }
                self.answer(group, from, Answer { kind: DONE, number, request })?;
            }
        }
        Ok(left < STEP)
    }

    /// All of a message of `bytes` has come.
    fn arrived(&mut self, group: &Group, from: usize, posted: &Posted, bytes: usize) {
        if posted.bytes == bytes {
            return self.requests.complete(posted.request);
        }
        let (rank, peer) = (group.segments.rank(), group.rank_of(from));
        self.requests.fail(posted.request, wrong_length(rank, posted.bytes, peer, Some(bytes)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Tuning;

    #[test]
    fn what_travels_with_its_fingerprint_travels_at_once() {
        let framed = frame;
        for ranks in [2, 16, 64] {
            assert!(framed(ranks) >= Tuning::default().frame, "{ranks}");
        }
        assert!(framed(300) + size_of::<u64>() + HEADER <= Layout::new(300).ring_bytes() / 4);
    }
}
