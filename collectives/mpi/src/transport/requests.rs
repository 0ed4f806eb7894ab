//! The messages of a transport that are under way, in places that are used again: no allocation once warm. One
//! message can be several of MPI's, because MPI counts bytes in an `int`.
//!
//! **Receives that are not posted.** When a longer message arrives than was posted, MPI has to report an error, but
//! Open MPI (seen in 4.1.4) writes the whole message over whatever follows the buffer, unless the message was small
//! enough to travel at once. Ranks that disagree must get an error, not a ruined memory, so over such a library large
//! messages have a communicator of their own, and their receives are posted only when a probe has seen a message of
//! exactly the right length. Small messages are posted as usual and meet only small ones. Messages of middling length
//! are posted at once on a third communicator, where tags say how long they are; see [`tags`](crate::tags).

use super::aside::{post, read, take};
use super::codes::{OK, test};
use super::ffi;
use super::route::{Comms, Kind, Route};
use super::session::Session;
use crate::eager::Eager;
use crate::probing::{Awaited, Probing};
use crate::tags::Tags;
use collectives::Result;
use collectives::transport::{LISTED, Request, Tag};
use collectives::watch::Fingerprint;
use std::os::raw::c_int;
use std::time::Instant;

/// How a message ended.
pub(super) struct Outcome {
    pub(super) kind: Kind,
    pub(super) peer: usize,
    pub(super) bytes: usize,
    /// Bytes that came, for receives.
    pub(super) length: usize,
    /// MPI's code of the first part that failed, or success.
    pub(super) code: c_int,
    /// What the peer has called, if that is known and is something else.
    pub(super) called: Option<Fingerprint>,
}

pub(super) struct Slot {
    /// Counts the uses of this place, so that a stale [`Request`] is not taken for a later one.
    generation: u32,
    active: bool,
    pub(super) kind: Kind,
    pub(super) peer: usize,
    pub(super) bytes: usize,
    pub(super) length: usize,
    pub(super) code: c_int,
    pub(super) route: Route,
    pub(super) dst: *mut u8,
    /// Of a receive: the bytes whose receives are to be posted when a probe finds them.
    pub(super) unseen: std::ops::Range<usize>,
    pub(super) looks: u32,
    /// Since when a message has been seen that speaks for another call of the peer, and that call.
    pub(super) suspected: Option<Instant>,
    pub(super) called: Option<Fingerprint>,
    /// Parts that are under way.
    pub(super) parts: Vec<ffi::MPI_Request>,
}

impl Slot {
    fn free() -> Self {
        Slot {
            generation: 0,
            active: false,
            kind: Kind::Send,
            peer: 0,
            bytes: 0,
            length: 0,
            code: OK,
            route: Route { of: Tag(0), tag: 0, exactly: -1, limit: 0, user: false },
            dst: std::ptr::null_mut(),
            unseen: 0..0,
            looks: 0,
            suspected: None,
            called: None,
            parts: Vec::with_capacity(FEW),
        }
    }
}

pub(super) struct Requests {
    pub(super) tags: Tags,
    pub(super) rank: usize,
    collectives: Comms,
    users: Comms,
    pub(super) slots: Vec<Slot>,
    free: Vec<u32>,
    active: usize,
    /// Receives that wait for a probe.
    pub(super) probing: Probing,
    /// Bytes of one of MPI's messages at most.
    pub(super) chunk: usize,
}

/// So many of MPI's messages that go at once are faster than one that the receiver has to fetch: 4 KiB in two take 0.73 to
/// 0.86 of the time of one on an Intel Xeon. With three and more it depends on the machine: on an AMD EPYC 16 KiB in five
/// took half the time of one, on the Xeon they take 1.7 times as long.
const FEW: usize = 2;

/// Bytes of a message that goes fast.
const SMALL: usize = Eager::USUAL.to_others;

impl Requests {
    /// For the messages of `rank` on communicators for collectives and for users' messages.
    pub(super) fn new(tags: Tags, rank: usize, [collectives, users]: [Comms; 2], chunk: usize) -> Self {
        let slots = (0..LISTED).map(|_| Slot::free()).collect();
        let (free, probing) = ((0..LISTED as u32).rev().collect(), Probing::with_room(LISTED));
        Requests { tags, rank, collectives, users, slots, free, active: 0, probing, chunk }
    }

    /// The communicators that a message may go over.
    pub(super) fn comms(&self, route: &Route) -> &Comms {
        if route.user { &self.users } else { &self.collectives }
    }

    /// The communicator and tag of a part.
    #[inline(always)]
    fn of_part(&self, route: &Route, bytes: usize) -> (ffi::MPI_Comm, c_int) {
        let comms = self.comms(route);
        match comms.exact {
            Some(comm) if route.is_exact() => (comm, route.exactly),
            _ if bytes > route.limit => (comms.large, route.tag),
            _ => (comms.small, route.tag),
        }
    }

    /// Takes a place for a message.
    #[inline(always)]
    fn open(
        &mut self,
        kind: Kind,
        peer: usize,
        route: Route,
        dst: *mut u8,
        bytes: usize,
    ) -> (Request, usize) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::free());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        (slot.active, slot.kind, slot.peer, slot.bytes) = (true, kind, peer, bytes);
        (slot.length, slot.code, slot.looks) = (0, OK, 0);
        (slot.suspected, slot.called) = (None, None);
        (slot.route, slot.dst, slot.unseen) = (route, dst, 0..0);
        self.active += 1;
        (Request::of(index as usize, slot.generation), index as usize)
    }

    /// Bytes of each of MPI's messages but the last. What would go at once in a few goes so, where no other length can
    /// meet them: a message that the receiver has to fetch takes Open MPI one to three microseconds more.
    #[inline(always)]
    fn part(&self, route: &Route, bytes: usize) -> usize {
        let few = route.is_exact() && bytes <= FEW * SMALL;
        if few { bytes.div_ceil(bytes.div_ceil(SMALL)) } else { self.chunk }
    }

    /// Posts a message in parts; MPI keeps their order.
    ///
    /// # Safety
    /// As of [`Transport::send`](collectives::transport::Transport::send); it is this thread's turn.
    #[inline(always)]
    pub(super) unsafe fn send(
        &mut self,
        session: &Session,
        to: usize,
        route: Route,
        src: *const u8,
        bytes: usize,
    ) -> Result<Request> {
        let whole = self.part(&route, bytes);
        let first = bytes.min(whole);
        // SAFETY: by the caller; a part of the message.
        let mut request = unsafe { self.send_part(session, to, &route, src, first)? };
        let mut code = OK;
        // So small a message has mostly been sent by now, and then it needs no place.
        if bytes <= SMALL.min(self.chunk) {
            // SAFETY: a request that was just posted.
            match unsafe { test(&mut request) } {
                Ok(true) => return Ok(Request::DONE),
                Ok(false) => {}
                Err(why) => code = why,
            }
        }
        let (message, index) = self.open(Kind::Send, to, route, std::ptr::null_mut(), bytes);
        self.slots[index].code = code;
        if code == OK {
            self.slots[index].parts.push(request);
        }
        let mut at = first;
        while at < bytes {
            let part = (bytes - at).min(whole);
            // SAFETY: as above.
            let request = unsafe { self.send_part(session, to, &route, src.add(at), part)? };
            self.slots[index].parts.push(request);
            at += part;
        }
        Ok(message)
    }

    /// Posts one of its parts.
    ///
    /// # Safety
    /// As of [`send`](Self::send).
    #[inline(always)]
    unsafe fn send_part(
        &self,
        session: &Session,
        to: usize,
        route: &Route,
        src: *const u8,
        bytes: usize,
    ) -> Result<ffi::MPI_Request> {
        let (comm, tag) = self.of_part(route, bytes);
        let (from, count, to) = (src.cast(), bytes as c_int, to as c_int);
        // SAFETY: by the caller; a valid place.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let code = ffi::MPI_Isend(from, count, ffi::RSMPI_UINT8_T, to, tag, comm, &mut request);
            session.check("MPI_Isend", code)?;
            Ok(request)
        }
    }

    /// Posts a receive in parts, or notes it for probing. What is posted whole and comes within `looks` needs no place.
    ///
    /// # Safety
    /// As of [`Transport::recv`](collectives::transport::Transport::recv); it is this thread's turn.
    #[inline(always)]
    pub(super) unsafe fn recv(
        &mut self,
        session: &Session,
        from: usize,
        route: Route,
        dst: *mut u8,
        bytes: usize,
        looks: u32,
    ) -> Result<Request> {
        let whole = self.part(&route, bytes);
        let posted = |part: usize| part <= route.limit || route.is_exact();
        if bytes <= whole && posted(bytes) {
            // SAFETY: by the caller.
            let mut request = unsafe { self.recv_part(session, from, &route, dst, bytes)? };
            let mut left = looks;
            let ended = look_at(session, Kind::Recv, &mut request, &mut left)?;
            if ended == Some((OK, bytes)) {
                return Ok(Request::DONE);
            }
            let (message, index) = self.open(Kind::Recv, from, route, dst, bytes);
            let slot = &mut self.slots[index];
            match ended {
                Some(ended) => (slot.code, slot.length) = ended,
                None => slot.parts.push(request),
            }
            return Ok(message);
        }
        let (message, index) = self.open(Kind::Recv, from, route, dst, bytes);
        let mut at = 0;
        while at < bytes {
            let part = (bytes - at).min(whole);
            if posted(part) {
                // SAFETY: by the caller; the part lies within the message.
                let request = unsafe { self.recv_part(session, from, &route, dst.add(at), part)? };
                self.slots[index].parts.push(request);
            } else {
                // Only the last part can be small.
                self.slots[index].unseen.end = at + part;
            }
            at += part;
        }
        if !self.slots[index].unseen.is_empty() {
            self.probing.add(index, Awaited { peer: from, tag: route.tag, user: route.user });
            // The message may be there already.
            self.probe(session, index)?;
        }
        Ok(message)
    }

    /// Posts the receive of one of its parts.
    ///
    /// # Safety
    /// As of [`recv`](Self::recv).
    #[inline(always)]
    unsafe fn recv_part(
        &self,
        session: &Session,
        from: usize,
        route: &Route,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<ffi::MPI_Request> {
        let (comm, tag) = self.of_part(route, bytes);
        let (to, count, from) = (dst.cast(), bytes as c_int, from as c_int);
        // SAFETY: by the caller; a valid place.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let code = ffi::MPI_Irecv(to, count, ffi::RSMPI_UINT8_T, from, tag, comm, &mut request);
            session.check("MPI_Irecv", code)?;
            Ok(request)
        }
    }

    /// Posts what a probe finds of a receive that waits for it.
    fn probe(&mut self, session: &Session, index: usize) -> Result<()> {
        if self.probing.is_behind(index) {
            return Ok(());
        }
        let large = self.comms(&self.slots[index].route).large;
        let slot = &mut self.slots[index];
        while !slot.unseen.is_empty() {
            let Some((found, came)) = take(session, slot.peer, large, slot.route.tag)? else {
                return Ok(());
            };
            let expected = slot.unseen.len().min(self.chunk);
            if came != expected {
                let at = std::mem::take(&mut slot.unseen).start;
                slot.length += came;
                // SAFETY: the part's own memory, for which nothing is posted, and which is this transport's until the
                // receive is over.
                unsafe { read(found, came, slot.dst.add(at), expected) };
                break;
            }
            // SAFETY: the receive's memory, which stays until it is over; the length is that of the message.
            let request = unsafe { post(session, found, came, slot.dst.add(slot.unseen.start))? };
            slot.parts.push(request);
            slot.unseen.start += came;
        }
        self.probing.remove(index);
        Ok(())
    }

    /// How the message ended, or nothing if it is still under way after `looks` further looks. One that ended before is an
    /// outcome of success. It is this thread's turn.
    #[inline(always)]
    pub(super) fn test(
        &mut self,
        session: &Session,
        message: Request,
        looks: u32,
    ) -> Result<Option<Outcome>> {
        let (index, generation) = (message.index(), message.generation());
        let slot = &self.slots[index];
        if slot.generation != generation || !slot.active {
            let peer = slot.peer;
            return Ok(Some(Outcome { kind: Kind::Send, peer, bytes: 0, length: 0, code: OK, called: None }));
        }
        if !slot.unseen.is_empty() {
            self.probe(session, index)?;
        }
        if !self.advance(session, index, looks)? {
            return Ok(None);
        }
        let slot = &mut self.slots[index];
        slot.active = false;
        // Generations stay below that of `Request::DONE`.
        slot.generation = (generation + 1) & 0x7fff_ffff;
        self.free.push(index as u32);
        self.active -= 1;
        Ok(Some(Outcome {
            kind: slot.kind,
            peer: slot.peer,
            bytes: slot.bytes,
            length: slot.length,
            code: slot.code,
            called: slot.called(self.rank),
        }))
    }

    /// Tests the parts of a message; whether all of it is over.
    #[inline(always)]
    fn advance(&mut self, session: &Session, index: usize, looks: u32) -> Result<bool> {
        let slot = &mut self.slots[index];
        let mut left = looks + 1;
        while let Some(part) = slot.parts.last_mut() {
            let Some((code, came)) = look_at(session, slot.kind, part, &mut left)? else {
                return self.look_aside(session, index, looks + 1);
            };
            if slot.code == OK {
                slot.code = code;
            }
            slot.length += came;
            slot.parts.pop();
        }
        if slot.unseen.is_empty() { Ok(true) } else { self.look_aside(session, index, 1) }
    }

    /// What `message` is, and with whom.
    pub(super) fn with(&self, message: Request) -> (Kind, usize) {
        let slot = &self.slots[message.index()];
        (slot.kind, slot.peer)
    }

    /// Cancels every receive that is under way.
    pub(super) fn cancel_receives(&mut self) {
        self.probing.clear();
        for slot in self.slots.iter_mut().filter(|s| s.active && s.kind == Kind::Recv) {
            slot.unseen = 0..0;
            for part in &mut slot.parts {
                // SAFETY: a request that was posted and not yet reported complete.
                unsafe { ffi::MPI_Cancel(part) };
            }
        }
    }

    /// With whom the messages that are under way are.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().filter(|slot| slot.active).map(|slot| slot.peer)
    }

    /// Whether no message is under way.
    pub(super) fn none(&self) -> bool {
        self.active == 0
    }

    /// Moves all messages forward; whether none is under way any more.
    pub(super) fn settle(&mut self, session: &Session) -> Result<bool> {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.active {
                self.test(session, Request::of(index, slot.generation), 0)?;
            }
        }
        Ok(self.none())
    }
}

/// MPI's code of a message of this kind and the bytes that came, if it is over by one of the next looks, which are counted
/// down.
#[inline(always)]
fn look_at(
    session: &Session,
    kind: Kind,
    request: &mut ffi::MPI_Request,
    looks: &mut u32,
) -> Result<Option<(c_int, usize)>> {
    while *looks > 0 {
        let (mut flag, mut count) = (0, 0);
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: a request that was posted and not yet reported complete; valid places.
        let code = unsafe { ffi::MPI_Test(request, &mut flag, status.as_mut_ptr()) };
        if code == OK && flag == 0 {
            *looks -= 1;
            continue;
        }
        if code == OK && kind == Kind::Recv {
            // SAFETY: MPI_Test has filled the status; the type is MPI's own.
            let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count) };
            session.check("MPI_Get_count", code)?;
        }
        return Ok(Some((code, count.max(0) as usize)));
    }
    Ok(None)
}
