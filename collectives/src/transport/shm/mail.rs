//! Messages between two ranks: a ring per ordered pair, written by the sender in its own segment.
//!
//! Small messages travel in the ring. A larger one that lies in the sender's segment is only described there; the
//! receiver copies it straight from where it is and acknowledges. Any other is announced, and once a receive for it
//! is posted it comes through the ring in pieces. Messages with one tag stay in order; others may overtake.

use super::bell;
use super::group::Group;
use super::layout::{Block, LARGE};
use super::requests::Requests;
use crate::error::{Error, Result};
use crate::transport::{Request, Tag};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// Bytes up to which a message travels in the ring at once, if a ring is large enough.
const EAGER: usize = 8 << 10;
/// Bytes moved per look at one peer, so that one large message does not hold up the others.
const STEP: usize = 1 << 20;
/// Words at the start of a record: kind with index and generation, tag, bytes, offset.
const HEADER: usize = 32;

const MESSAGE: u64 = 1;
const RANGE: u64 = 2;
const STAGED: u64 = 3;
const PIECE: u64 = 4;
const SKIP: u64 = 5;

/// States of an acknowledgement word, below the message's generation.
const READY: u64 = 1;
const DONE: u64 = 2;

struct Record {
    kind: u64,
    index: usize,
    generation: u32,
    tag: Tag,
    bytes: usize,
    offset: u64,
}

impl Record {
    fn words(&self) -> [u64; 4] {
        let first = self.kind | (self.index as u64) << 8 | u64::from(self.generation) << 32;
        [first, self.tag.0, self.bytes as u64, self.offset]
    }

    fn from_words([first, tag, bytes, offset]: [u64; 4]) -> Self {
        let index = (first >> 8 & 0xff_ffff) as usize;
        Record {
            kind: first & 0xff,
            index,
            generation: (first >> 32) as u32,
            tag: Tag(tag),
            bytes: bytes as usize,
            offset,
        }
    }
}

/// A posted send that has not left yet.
struct Waiting {
    request: Request,
    tag: Tag,
    src: *const u8,
    bytes: usize,
}

/// A large message that the receiver knows of.
struct Large {
    request: Request,
    index: usize,
    generation: u32,
    /// What still has to go through the ring, when the receiver is ready; None when it copies by itself.
    rest: Option<(*const u8, usize)>,
}

#[derive(Default)]
struct Outgoing {
    tail: u64,
    /// The receiver's head when last looked at.
    head: u64,
    waiting: VecDeque<Waiting>,
    large: Vec<Large>,
    /// Generations of the acknowledgement words; odd ones are in use.
    generations: Vec<u32>,
}

/// A posted receive.
struct Posted {
    request: Request,
    tag: Tag,
    dst: *mut u8,
    bytes: usize,
}

/// A message that came before its receive.
enum Early {
    Whole(Vec<u8>),
    Announced { kind: u64, index: usize, generation: u32, bytes: usize, offset: u64 },
}

/// A large message on its way into place.
struct Arriving {
    request: Request,
    index: usize,
    generation: u32,
    dst: *mut u8,
    bytes: usize,
    got: usize,
    /// Where it lies in the sender's segment; None when it comes through the ring.
    src: Option<*const u8>,
}

#[derive(Default)]
struct Incoming {
    head: u64,
    posted: VecDeque<Posted>,
    early: VecDeque<(Tag, Early)>,
    arriving: Vec<Arriving>,
}

/// All messages of one group.
pub(super) struct Mail {
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    requests: Requests,
    ring: usize,
    eager: usize,
    /// Buffers of early messages, for reuse.
    spare: Vec<Vec<u8>>,
}

// SAFETY: the raw pointers are to callers' buffers, which stay valid wherever the transport moves (contract of
// send and recv).
unsafe impl Send for Mail {}

impl Mail {
    pub fn new(group: &Group) -> Self {
        let (size, ring) = (group.size(), group.layout.ring_bytes());
        let outgoing = || Outgoing { generations: vec![0; LARGE], ..Outgoing::default() };
        Mail {
            outgoing: (0..size).map(|_| outgoing()).collect(),
            incoming: (0..size).map(|_| Incoming::default()).collect(),
            requests: Requests::default(),
            ring,
            eager: EAGER.min(ring / 4 - HEADER),
            spare: Vec::new(),
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
    /// of the host whether it has left: what it has not sent by now it never will.
    pub fn test(&mut self, group: &mut Group, request: Request, gone: &[bool]) -> Result<bool> {
        if self.requests.take_done(request)? {
            return Ok(true);
        }
        for member in 0..group.size() {
            let out = &self.outgoing[member];
            if !out.waiting.is_empty() || !out.large.is_empty() {
                let stuck = !self.push(group, member)?;
                self.still_there(group, member, stuck, gone)?;
            }
            let incoming = &self.incoming[member];
            if !incoming.posted.is_empty() || !incoming.arriving.is_empty() {
                let stuck = !self.pull(group, member)?;
                self.still_there(group, member, stuck, gone)?;
            }
        }
        self.requests.take_done(request)
    }

    fn still_there(&self, group: &Group, member: usize, stuck: bool, gone: &[bool]) -> Result<()> {
        if stuck && gone[group.members[member]] {
            let how = "left before it took part in all messages".to_owned();
            return Err(Error::PeerLost { rank: group.segments.rank(), peer: group.rank_of(member), how });
        }
        Ok(())
    }

    /// Writes to the ring of `to` what fits; false when something waits and nothing moved.
    fn push(&mut self, group: &mut Group, to: usize) -> Result<bool> {
        let Some(peer) = group.block(to) else { return Ok(false) };
        let tail = self.outgoing[to].tail;
        let mut moved = self.look_at_acks(group, to, peer);
        let mut at = 0;
        while at < self.outgoing[to].waiting.len() {
            let out = &self.outgoing[to];
            // A message that could not leave holds back those with its tag, and only those.
            let tag = out.waiting[at].tag;
            if out.waiting.iter().take(at).any(|w| w.tag == tag) || !self.depart(group, to, peer, at) {
                at += 1;
            }
        }
        self.push_pieces(group, to, peer);
        if self.outgoing[to].tail != tail {
            moved = true;
            group.own.tail(to).store(self.outgoing[to].tail, Ordering::Release);
            bell::before_ringing();
            bell::ring(peer);
        }
        let out = &self.outgoing[to];
        Ok(moved || (out.waiting.is_empty() && out.large.is_empty()))
    }

    /// Completes large messages that the receiver has copied.
    fn look_at_acks(&mut self, group: &Group, to: usize, peer: Block) -> bool {
        let (out, requests, me) = (&mut self.outgoing[to], &mut self.requests, group.me);
        let before = out.large.len();
        let generations = &mut out.generations;
        out.large.retain(|large| {
            let ack = peer.ack(me, large.index).load(Ordering::Acquire);
            let over = ack == u64::from(large.generation) << 2 | DONE;
            if over {
                generations[large.index] = large.generation.wrapping_add(1);
                requests.complete(large.request);
            }
            !over
        });
        out.large.len() < before
    }

    /// Lets the waiting message at `at` leave, if there is room.
    fn depart(&mut self, group: &Group, to: usize, peer: Block, at: usize) -> bool {
        let (eager, out) = (self.eager, &self.outgoing[to]);
        let Waiting { request, tag, src, bytes } = out.waiting[at];
        if bytes <= eager {
            let record = Record { kind: MESSAGE, index: 0, generation: 0, tag, bytes, offset: 0 };
            if !self.write(group, to, peer, &record, src, bytes) {
                return false;
            }
            self.requests.complete(request);
        } else {
            let Some(index) = out.generations.iter().position(|g| g % 2 == 0) else { return false };
            let generation = out.generations[index].wrapping_add(1);
            let offset = group.segments.offset_of(src, bytes);
            let kind = if offset.is_some() { RANGE } else { STAGED };
            let record = Record { kind, index, generation, tag, bytes, offset: offset.unwrap_or(0) as u64 };
            if !self.write(group, to, peer, &record, src, 0) {
                return false;
            }
            let out = &mut self.outgoing[to];
            out.generations[index] = generation;
            let rest = offset.is_none().then_some((src, bytes));
            out.large.push(Large { request, index, generation, rest });
        }
        self.outgoing[to].waiting.remove(at);
        true
    }

    /// Puts pieces of announced messages into the ring, as their receivers are ready.
    fn push_pieces(&mut self, group: &Group, to: usize, peer: Block) {
        let most = self.ring / 4 - HEADER;
        for i in 0..self.outgoing[to].large.len() {
            let Large { index, generation, rest: Some((mut src, mut left)), .. } = self.outgoing[to].large[i]
            else {
                continue;
            };
            // Only READY: when all has gone through the ring the receiver says DONE.
            let ready = u64::from(generation) << 2 | READY;
            if left == 0 || peer.ack(group.me, index).load(Ordering::Acquire) != ready {
                continue;
            }
            while left > 0 {
                let bytes = left.min(most);
                let record = Record { kind: PIECE, index, generation, tag: Tag(0), bytes, offset: 0 };
                if !self.write(group, to, peer, &record, src, bytes) {
                    break;
                }
                // SAFETY: stays inside the message, or one past its end.
                src = unsafe { src.add(bytes) };
                left -= bytes;
                // Pieces are shown one by one, so that the receiver copies while the next is written.
                group.own.tail(to).store(self.outgoing[to].tail, Ordering::Release);
                bell::before_ringing();
                bell::ring(peer);
            }
            self.outgoing[to].large[i].rest = Some((src, left));
        }
    }

    /// Writes one record with `payload` bytes behind it, without showing it yet; false when the ring is full.
    fn write(
        &mut self,
        group: &Group,
        to: usize,
        peer: Block,
        record: &Record,
        src: *const u8,
        payload: usize,
    ) -> bool {
        let (ring, out) = (self.ring as u64, &mut self.outgoing[to]);
        let len = (HEADER + payload).next_multiple_of(64) as u64;
        let to_end = ring - out.tail % ring;
        let needed = if len <= to_end { len } else { to_end + len };
        if out.tail + needed - out.head > ring {
            out.head = peer.head(group.me).load(Ordering::Acquire);
            if out.tail + needed - out.head > ring {
                return false;
            }
        }
        let base = group.own.ring(to);
        if len > to_end {
            let bytes = to_end as usize;
            let skip = Record { kind: SKIP, index: 0, generation: 0, tag: Tag(0), bytes, offset: 0 };
            // SAFETY: the rest of the ring, at least one line, which the receiver has read.
            unsafe { base.add((out.tail % ring) as usize).cast().write(skip.words()) };
            out.tail += to_end;
        }
        // SAFETY: `len` bytes inside the ring that the receiver has read; the caller's source is readable.
        unsafe {
            let place = base.add((out.tail % ring) as usize);
            place.cast().write(record.words());
            place.add(HEADER).as_ptr().copy_from_nonoverlapping(src, payload);
        }
        out.tail += len;
        true
    }

    /// Reads the ring of `from` and copies large messages; false when something is awaited and nothing moved.
    fn pull(&mut self, group: &mut Group, from: usize) -> Result<bool> {
        let Some(peer) = group.block(from) else { return Ok(false) };
        let mut moved = self.copy_ranges(group, from);
        let tail = peer.tail(group.me).load(Ordering::Acquire);
        let start = self.incoming[from].head;
        while self.incoming[from].head != tail && self.incoming[from].head - start < STEP as u64 {
            let at = (self.incoming[from].head % self.ring as u64) as usize;
            // SAFETY: inside the ring; written before the tail that was acquired, and kept until the head passes.
            let place = unsafe { peer.ring(group.me).add(at) };
            // SAFETY: a record starts here, aligned to a line.
            let record = Record::from_words(unsafe { place.cast().read() });
            let len = self.take(group, from, record, place, self.ring - at)?;
            self.incoming[from].head += len as u64;
            // Shown record by record, so that the sender fills the room while the next one is read.
            group.own.head(from).store(self.incoming[from].head, Ordering::Release);
        }
        if self.incoming[from].head != start || moved {
            moved = true;
            bell::before_ringing();
            bell::ring(peer);
        }
        let incoming = &self.incoming[from];
        Ok(moved || (incoming.posted.is_empty() && incoming.arriving.is_empty()))
    }

    /// Takes one record from the ring, and says how long it was.
    fn take(
        &mut self,
        group: &mut Group,
        from: usize,
        record: Record,
        place: NonNull<u8>,
        to_end: usize,
    ) -> Result<usize> {
        let Record { kind, index, generation, tag, bytes, offset } = record;
        let payload = if matches!(kind, MESSAGE | PIECE) { bytes } else { 0 };
        let len = payload.checked_add(HEADER + 63).map_or(usize::MAX, |l| l & !63);
        if len > to_end || index >= LARGE || !(MESSAGE..=SKIP).contains(&kind) {
            return Err(group.corrupt(from, format!("a record of kind {kind} and {bytes} bytes")));
        }
        // SAFETY: a record has at least its header.
        let data = unsafe { place.add(HEADER) }.as_ptr().cast_const();
        match kind {
            SKIP if bytes == to_end => return Ok(bytes),
            SKIP => return Err(group.corrupt(from, format!("{bytes} bytes to skip of {to_end}"))),
            PIECE => {
                let incoming = &mut self.incoming[from];
                let same = |a: &Arriving| a.index == index && a.generation == generation && a.src.is_none();
                let Some(at) = incoming.arriving.iter().position(same) else {
                    return Err(group.corrupt(from, "a piece of no message".into()));
                };
                let arriving = &mut incoming.arriving[at];
                if bytes > arriving.bytes - arriving.got {
                    return Err(group.corrupt(from, format!("a piece of {bytes} bytes too many")));
                }
                // SAFETY: inside the posted receive; the payload is inside the ring by the check of `len`.
                unsafe { arriving.dst.add(arriving.got).copy_from_nonoverlapping(data, bytes) };
                arriving.got += bytes;
                if arriving.got == arriving.bytes {
                    let arriving = incoming.arriving.swap_remove(at);
                    self.arrived(group, from, &arriving);
                }
            }
            _ => {
                let posted = &mut self.incoming[from].posted;
                let found = posted.iter().position(|p| p.tag == tag).and_then(|at| posted.remove(at));
                match (found, kind) {
                    (Some(posted), MESSAGE) => {
                        self.same_length(group, from, &posted, bytes)?;
                        // SAFETY: the lengths agree; the payload is inside the ring.
                        unsafe { posted.dst.copy_from_nonoverlapping(data, bytes) };
                        self.requests.complete(posted.request);
                    }
                    (None, MESSAGE) => {
                        let mut copy = self.spare.pop().unwrap_or_default();
                        // SAFETY: the payload is inside the ring, and does not change before the head passes.
                        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(data, bytes) });
                        self.incoming[from].early.push_back((tag, Early::Whole(copy)));
                    }
                    (found, _) => {
                        let early = Early::Announced { kind, index, generation, bytes, offset };
                        match found {
                            Some(posted) => self.accept(group, from, posted, early)?,
                            None => self.incoming[from].early.push_back((tag, early)),
                        }
                    }
                }
            }
        }
        Ok(len)
    }

    /// Brings a message that came early, or was announced, together with its receive.
    fn accept(&mut self, group: &mut Group, from: usize, posted: Posted, early: Early) -> Result<()> {
        match early {
            Early::Whole(mut copy) => {
                self.same_length(group, from, &posted, copy.len())?;
                // SAFETY: the lengths agree.
                unsafe { posted.dst.copy_from_nonoverlapping(copy.as_ptr(), copy.len()) };
                self.requests.complete(posted.request);
                copy.clear();
                self.spare.push(copy);
            }
            Early::Announced { kind, index, generation, bytes, offset } => {
                self.same_length(group, from, &posted, bytes)?;
                let src = if kind == RANGE {
                    let address = group.address(from, offset, bytes);
                    Some(address.ok_or_else(|| group.corrupt(from, format!("{bytes} bytes at {offset}")))?)
                } else {
                    group.own.ack(from, index).store(u64::from(generation) << 2 | READY, Ordering::Release);
                    bell::before_ringing();
                    // It announced something, so its block is there.
                    group.block(from).into_iter().for_each(bell::ring);
                    None
                };
                let Posted { request, dst, .. } = posted;
                self.incoming[from].arriving.push(Arriving {
                    request,
                    index,
                    generation,
                    dst,
                    bytes,
                    got: 0,
                    src,
                });
            }
        }
        Ok(())
    }

    /// Copies messages that lie in the sender's segment, a step at a time.
    fn copy_ranges(&mut self, group: &Group, from: usize) -> bool {
        let mut left = STEP;
        let mut at = 0;
        while left > 0 && at < self.incoming[from].arriving.len() {
            let arriving = &mut self.incoming[from].arriving[at];
            let Some(src) = arriving.src else {
                at += 1;
                continue;
            };
            let bytes = left.min(arriving.bytes - arriving.got);
            // SAFETY: both inside the message: the source was checked against the sender's segment and stays
            // unchanged until it is acknowledged, the destination is the posted receive.
            unsafe { arriving.dst.add(arriving.got).copy_from_nonoverlapping(src.add(arriving.got), bytes) };
            arriving.got += bytes;
            left -= bytes;
            if arriving.got == arriving.bytes {
                let arriving = self.incoming[from].arriving.remove(at);
                self.arrived(group, from, &arriving);
            }
        }
        left < STEP
    }

    fn arrived(&mut self, group: &Group, from: usize, arriving: &Arriving) {
        self.requests.complete(arriving.request);
        let ack = u64::from(arriving.generation) << 2 | DONE;
        group.own.ack(from, arriving.index).store(ack, Ordering::Release);
    }

    fn same_length(&self, group: &Group, from: usize, posted: &Posted, bytes: usize) -> Result<()> {
        if posted.bytes == bytes {
            return Ok(());
        }
        let (peer, room) = (group.rank_of(from), posted.bytes);
        let problem = format!("rank {peer} sent {bytes} bytes where {room} were to be received");
        Err(Error::Argument { call: "recv", rank: group.segments.rank(), problem })
    }
}
