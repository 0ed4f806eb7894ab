//! The messages of a transport that are under way, in places that are used again: no allocation once warm. One
//! message can be several of MPI's, because MPI counts bytes in an `int`.
//!
//! **Receives that are not posted.** When a longer message arrives than was posted, MPI has to report an error, but
//! Open MPI (seen in 4.1.4) writes the whole message over whatever follows the buffer, unless the message was small
//! enough to travel at once. Ranks that disagree must get an error, not a ruined memory, so over such a library large
//! messages have a communicator of their own, and their receives are posted only when a probe has seen a message of
//! exactly the right length. Small messages are posted as usual and meet only small ones.

use super::ffi;
use super::session::Session;
use crate::error::Result;
use crate::transport::Request;
use std::os::raw::c_int;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Recv,
}

/// Where a message goes: communicators for small and large ones (the same where no guard is needed), and its tag.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) small: ffi::MPI_Comm,
    pub(super) large: ffi::MPI_Comm,
    pub(super) tag: c_int,
    /// Messages up to this many bytes are small.
    pub(super) limit: usize,
    /// No other message between these ranks has this tag, so one on the other communicator is of the wrong length.
    pub(super) unique: bool,
}

/// How a message ended.
pub(super) struct Outcome {
    pub(super) kind: Kind,
    pub(super) peer: usize,
    pub(super) bytes: usize,
    /// Bytes that came, for receives.
    pub(super) length: usize,
    /// MPI's code of the first part that failed, or success.
    pub(super) code: c_int,
}

struct Slot {
    /// Counts the uses of this place, so that a stale [`Request`] is not taken for a later one.
    generation: u32,
    active: bool,
    kind: Kind,
    peer: usize,
    bytes: usize,
    length: usize,
    code: c_int,
    route: Route,
    dst: *mut u8,
    /// Of a receive: the bytes whose receives are to be posted when a probe finds them.
    unseen: std::ops::Range<usize>,
    looks: u32,
    /// Parts that are under way.
    parts: Vec<ffi::MPI_Request>,
}

pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    active: usize,
    /// Receives that wait for a probe, in the order in which they were asked for.
    probing: Vec<u32>,
    /// Bytes of one of MPI's messages at most.
    pub(super) chunk: usize,
}

const OK: c_int = ffi::MPI_SUCCESS as c_int;
/// Looks at a waiting receive before the other communicator is looked at for a message of the wrong length.
const LOOKS: u32 = 256;
/// A message of the wrong length is still received, to see what it says and so that its sender need not wait for ever:
/// for this long, and as long again for each so many bytes.
const READING: (Duration, usize) = (Duration::from_millis(100), 16 << 20);

impl Requests {
    pub(super) fn new(chunk: usize) -> Self {
        Requests { slots: Vec::new(), free: Vec::new(), active: 0, probing: Vec::new(), chunk }
    }

    /// Takes a place for a message.
    fn open(
        &mut self,
        kind: Kind,
        peer: usize,
        route: Route,
        dst: *mut u8,
        bytes: usize,
    ) -> (Request, usize) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                active: false,
                kind,
                peer,
                bytes,
                length: 0,
                code: OK,
                route,
                dst,
                unseen: 0..0,
                looks: 0,
                parts: Vec::with_capacity(1),
            });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        (slot.active, slot.kind, slot.peer, slot.bytes) = (true, kind, peer, bytes);
        (slot.length, slot.code, slot.looks) = (0, OK, 0);
        (slot.route, slot.dst, slot.unseen) = (route, dst, 0..0);
        self.active += 1;
        (Request((slot.generation as u64) << 32 | index as u64), index as usize)
    }

    /// Posts a message in parts; MPI keeps their order.
    ///
    /// # Safety
    /// As of [`Transport::send`](crate::transport::Transport::send); it is this thread's turn.
    pub(super) unsafe fn send(
        &mut self,
        session: &Session,
        to: usize,
        route: Route,
        src: *const u8,
        bytes: usize,
    ) -> Result<Request> {
        let (message, index) = self.open(Kind::Send, to, route, std::ptr::null_mut(), bytes);
        let mut at = 0;
        loop {
            let part = (bytes - at).min(self.chunk);
            let comm = if part > route.limit { route.large } else { route.small };
            // SAFETY: by the caller; the part lies within the message.
            let request = unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let (from, count) = (src.add(at).cast(), part as c_int);
                let code = ffi::MPI_Isend(
                    from,
                    count,
                    ffi::RSMPI_UINT8_T,
                    to as c_int,
                    route.tag,
                    comm,
                    &mut request,
                );
                session.check("MPI_Isend", code)?;
                request
            };
            self.slots[index].parts.push(request);
            at += part;
            if at == bytes {
                return Ok(message);
            }
        }
    }

    /// Posts a receive in parts, or notes it for probing.
    ///
    /// # Safety
    /// As of [`Transport::recv`](crate::transport::Transport::recv); it is this thread's turn.
    pub(super) unsafe fn recv(
        &mut self,
        session: &Session,
        from: usize,
        route: Route,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<Request> {
        let (message, index) = self.open(Kind::Recv, from, route, dst, bytes);
        let mut at = 0;
        loop {
            let part = (bytes - at).min(self.chunk);
            if part > route.limit {
                // Only the last part can be small.
                self.slots[index].unseen.end = at + part;
            } else {
                // SAFETY: by the caller; the part lies within the message.
                let request = unsafe {
                    let mut request = ffi::RSMPI_REQUEST_NULL;
                    let (to, comm) = (dst.add(at).cast(), route.small);
                    let (count, from) = (part as c_int, from as c_int);
                    let code =
                        ffi::MPI_Irecv(to, count, ffi::RSMPI_UINT8_T, from, route.tag, comm, &mut request);
                    session.check("MPI_Irecv", code)?;
                    request
                };
                self.slots[index].parts.push(request);
            }
            at += part;
            if at == bytes {
                break;
            }
        }
        if !self.slots[index].unseen.is_empty() {
            self.probing.push(index as u32);
            // The message may be there already.
            self.probe(session, index)?;
        }
        Ok(message)
    }

    /// Posts what a probe finds of a receive that waits for it.
    fn probe(&mut self, session: &Session, index: usize) -> Result<()> {
        if self.must_wait(index) {
            return Ok(());
        }
        let slot = &mut self.slots[index];
        while !slot.unseen.is_empty() {
            let Some((found, came)) = take(session, slot.peer, slot.route.large, slot.route.tag)? else {
                return Ok(());
            };
            let expected = slot.unseen.len().min(self.chunk);
            if came != expected {
                slot.length += came;
                slot.unseen = 0..0;
                // SAFETY: the rest of the receive's memory, which is this transport's until it is over.
                unsafe { read(found, came, slot.dst.add(slot.bytes - expected.min(slot.bytes)), expected) };
                break;
            }
            // SAFETY: the receive's memory, which stays until it is over; the length is that of the message.
            let request = unsafe { post(session, found, came, slot.dst.add(slot.unseen.start))? };
            slot.parts.push(request);
            slot.unseen.start += came;
        }
        self.probing.retain(|&i| i as usize != index);
        Ok(())
    }

    /// Whether a receive that was asked for before this one waits for the same tag of the same peer.
    fn must_wait(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        self.probing.iter().take_while(|&&i| i as usize != index).any(|&i| {
            let before = &self.slots[i as usize];
            before.peer == slot.peer
                && before.route.tag == slot.route.tag
                && before.route.unique == slot.route.unique
        })
    }

    /// How the message ended, or nothing while it is under way. One that ended before is an outcome of success. It is
    /// this thread's turn.
    pub(super) fn test(&mut self, session: &Session, message: Request) -> Result<Option<Outcome>> {
        let (index, generation) = (message.0 as u32 as usize, (message.0 >> 32) as u32);
        let slot = &self.slots[index];
        if slot.generation != generation || !slot.active {
            return Ok(Some(Outcome { kind: Kind::Send, peer: slot.peer, bytes: 0, length: 0, code: OK }));
        }
        if !slot.unseen.is_empty() {
            self.probe(session, index)?;
        }
        if !self.advance(session, index)? {
            return Ok(None);
        }
        let slot = &mut self.slots[index];
        slot.active = false;
        slot.generation = generation.wrapping_add(1);
        self.free.push(index as u32);
        self.active -= 1;
        Ok(Some(Outcome {
            kind: slot.kind,
            peer: slot.peer,
            bytes: slot.bytes,
            length: slot.length,
            code: slot.code,
        }))
    }

    /// Tests the parts of a message; whether all of it is over.
    fn advance(&mut self, session: &Session, index: usize) -> Result<bool> {
        let slot = &mut self.slots[index];
        while let Some(part) = slot.parts.last_mut() {
            let (mut flag, mut count) = (0, 0);
            let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
            // SAFETY: a request that was posted and not yet reported complete; valid places.
            let code = unsafe { ffi::MPI_Test(part, &mut flag, status.as_mut_ptr()) };
            if code != OK {
                if slot.code == OK {
                    slot.code = code;
                }
            } else if flag == 0 {
                return self.look_aside(session, index);
            } else if slot.kind == Kind::Recv {
                // SAFETY: MPI_Test has filled the status; the type is MPI's own.
                let code = unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count) };
                session.check("MPI_Get_count", code)?;
                slot.length += count.max(0) as usize;
            }
            slot.parts.pop();
        }
        if slot.unseen.is_empty() { Ok(true) } else { self.look_aside(session, index) }
    }

    /// Once in a while: whether a message of the wrong length waits on the communicator of the other lengths.
    fn look_aside(&mut self, session: &Session, index: usize) -> Result<bool> {
        let slot = &mut self.slots[index];
        slot.looks += 1;
        let eligible = slot.kind == Kind::Recv && slot.route.unique && slot.bytes <= self.chunk;
        if slot.route.limit == usize::MAX || !eligible || !slot.looks.is_multiple_of(LOOKS) {
            return Ok(false);
        }
        let other = if slot.bytes > slot.route.limit { slot.route.small } else { slot.route.large };
        let Some((found, came)) = take(session, slot.peer, other, slot.route.tag)? else { return Ok(false) };
        // SAFETY: the receive's memory; what is posted of it is cancelled first, or over.
        unsafe {
            slot.parts.drain(..).for_each(|part| cancel(part));
            read(found, came, slot.dst, slot.bytes);
        }
        (slot.length, slot.unseen) = (came, 0..0);
        self.probing.retain(|&i| i as usize != index);
        Ok(true)
    }

    /// From whom `message` is awaited, if it is a receive.
    pub(super) fn awaits(&self, message: Request) -> Option<usize> {
        let slot = &self.slots[message.0 as u32 as usize];
        (slot.kind == Kind::Recv).then_some(slot.peer)
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

    /// Moves all messages forward; whether none is under way any more.
    pub(super) fn settle(&mut self, session: &Session) -> Result<bool> {
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.active {
                self.test(session, Request((slot.generation as u64) << 32 | index as u64))?;
            }
        }
        Ok(self.active == 0)
    }
}

/// Takes a message out of MPI's queue, if one is there: its handle and its length.
fn take(
    session: &Session,
    from: usize,
    comm: ffi::MPI_Comm,
    tag: c_int,
) -> Result<Option<(ffi::MPI_Message, usize)>> {
    let (mut flag, mut count) = (0, 0);
    let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
    // SAFETY: a valid communicator and places.
    unsafe {
        let mut message = ffi::RSMPI_MESSAGE_NULL;
        let code = ffi::MPI_Improbe(from as c_int, tag, comm, &mut flag, &mut message, status.as_mut_ptr());
        session.check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        session
            .check("MPI_Get_count", ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count))?;
        Ok(Some((message, count.max(0) as usize)))
    }
}

/// Starts to receive a message that was taken.
///
/// # Safety
/// `dst..dst+bytes` is writable and left alone until the request is over; the message has `bytes`.
unsafe fn post(
    session: &Session,
    mut message: ffi::MPI_Message,
    bytes: usize,
    dst: *mut u8,
) -> Result<ffi::MPI_Request> {
    // SAFETY: by the caller.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let code =
            ffi::MPI_Imrecv(dst.cast(), bytes as c_int, ffi::RSMPI_UINT8_T, &mut message, &mut request);
        session.check("MPI_Imrecv", code)?;
        Ok(request)
    }
}

/// Reads the start of a message of the wrong length into memory of `room` bytes, if that can be had in a moment.
///
/// # Safety
/// `dst..dst+room` is writable and nobody else's.
unsafe fn read(mut message: ffi::MPI_Message, bytes: usize, dst: *mut u8, room: usize) {
    let mut space = vec![0u8; bytes.max(1)];
    let until = Instant::now() + READING.0 * (1 + bytes / READING.1) as u32;
    // SAFETY: `space` holds the whole message and outlives the request, being leaked where that is not over in time.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let to = space.as_mut_ptr().cast();
        if ffi::MPI_Imrecv(to, bytes as c_int, ffi::RSMPI_UINT8_T, &mut message, &mut request) != OK {
            return;
        }
        let mut flag = 0;
        while ffi::MPI_Test(&mut request, &mut flag, ffi::RSMPI_STATUS_IGNORE) == OK && flag == 0 {
            if Instant::now() > until {
                std::mem::forget(space);
                return;
            }
        }
        std::ptr::copy_nonoverlapping(space.as_ptr(), dst, room.min(bytes));
    }
}

/// Takes back a receive to which nothing has come.
///
/// # Safety
/// A request that was posted and not yet reported complete, of a receive that matches nothing.
unsafe fn cancel(mut request: ffi::MPI_Request) {
    let mut flag = 0;
    // SAFETY: by the caller.
    unsafe {
        ffi::MPI_Cancel(&mut request);
        for _ in 0..1000 {
            if ffi::MPI_Test(&mut request, &mut flag, ffi::RSMPI_STATUS_IGNORE) != OK || flag != 0 {
                return;
            }
        }
    }
}
