//! Messages that nobody has posted a receive for: how one is found, taken out of MPI's queue, and what it says of its
//! sender when it is not what is waited for.

use super::codes::{OK, test};
use super::ffi;
use super::requests::{Requests, Slot};
use super::route::Kind;
use super::session::Session;
use crate::tags::{Said, Tags};
use collectives::Result;
use collectives::watch::{Coded, Fingerprint};
use std::os::raw::c_int;
use std::time::{Duration, Instant};

/// Looks at a waiting receive before others are looked at.
const LOOKS: u32 = 256;
/// For this long a message of another call must have been seen before it is believed that what is waited for does not
/// come: that may just be on its way.
const SUSPECTED: Duration = Duration::from_millis(1);
/// A message of the wrong length is still received, to see what it says and so that its sender need not wait for ever:
/// for this long, and as long again for each so many bytes.
const READING: (Duration, usize) = (Duration::from_millis(100), 16 << 20);

/// A message that shows that its sender has called something else.
struct Other {
    comm: ffi::MPI_Comm,
    tag: c_int,
    /// What it has called, unless the message itself says so.
    called: Option<Fingerprint>,
}

impl Requests {
    /// Once in a while, after another `looks`: whether a message waits that its sender has sent in place of the one that is
    /// waited for. True if so; the receive is then over.
    #[inline(always)]
    pub(super) fn look_aside(&mut self, session: &Session, index: usize, looks: u32) -> Result<bool> {
        let slot = &mut self.slots[index];
        slot.looks = slot.looks.wrapping_add(looks);
        if slot.looks < LOOKS {
            return Ok(false);
        }
        slot.looks = 0;
        match slot.kind == Kind::Recv && !slot.route.user && slot.bytes <= self.chunk {
            true => self.sent_instead(session, index),
            false => Ok(false),
        }
    }

    #[cold]
    fn sent_instead(&mut self, session: &Session, index: usize) -> Result<bool> {
        let comms = *self.comms(&self.slots[index].route);
        let slot = &mut self.slots[index];
        if slot.route.guarded() && slot.route.coded().is_none() {
            // The same message with another length is on the communicator of other lengths.
            let other = if slot.bytes > slot.route.limit { comms.small } else { comms.large };
            // Or it is a later one, whose tag has come again, and what is waited for has come just before it.
            let sent = peek(session, slot.peer, other, Some(slot.route.tag))?.is_some();
            if sent && slot.suspected.get_or_insert_with(Instant::now).elapsed() < SUSPECTED {
                return Ok(false);
            }
            if sent && let Some((found, came)) = take(session, slot.peer, other, slot.route.tag)? {
                // SAFETY: the receive's memory; what is posted of it is cancelled first, or over.
                unsafe {
                    slot.parts.drain(..).for_each(|part| cancel(part));
                    read(found, came, slot.dst, slot.bytes);
                }
                (slot.length, slot.unseen) = (came, 0..0);
                self.probing.remove(index);
                return Ok(true);
            }
        }
        let Some(other) = self.other_call(session, index)? else {
            self.slots[index].suspected = None;
            return Ok(false);
        };
        let slot = &mut self.slots[index];
        if slot.suspected.get_or_insert_with(Instant::now).elapsed() < SUSPECTED {
            return Ok(false);
        }
        let mut header = [0u8; 8];
        let Some((found, came)) = take(session, slot.peer, other.comm, other.tag)? else { return Ok(false) };
        // SAFETY: `header` is this function's; what is posted of the receive is cancelled.
        unsafe {
            slot.parts.drain(..).for_each(|part| cancel(part));
            read(found, came, header.as_mut_ptr(), header.len());
        }
        let says = Fingerprint::from_bits(u64::from_ne_bytes(header));
        (slot.called, slot.unseen) = (Some(other.called.unwrap_or(says)), 0..0);
        self.probing.remove(index);
        Ok(true)
    }

    /// A message from the awaited peer that is of the same call, but cannot be if both have called the same.
    fn other_call(&self, session: &Session, index: usize) -> Result<Option<Other>> {
        let slot = &self.slots[index];
        let (route, comms) = (&slot.route, self.comms(&slot.route));
        let large = route.guarded().then_some((comms.large, false));
        let exact = comms.exact.map(|comm| (comm, true));
        for (comm, exact) in [Some((comms.small, false)), large, exact].into_iter().flatten() {
            let Some((tag, bytes)) = peek(session, slot.peer, comm, None)? else { continue };
            // Of a message in several the first has come, and the tag says how long all of it is.
            let (said, bytes) = match exact {
                true => (self.tags.said_exactly(route.of, tag), Tags::length(tag)),
                false => (self.tags.said(route.of, tag), bytes),
            };
            match (said, route.coded()) {
                // What is waited for, which has come just now.
                (Some(Said::Whole(what)), Some(mine)) if what == mine.what() && bytes == slot.bytes => {}
                (Some(Said::Whole(what)), _) => {
                    let called = Coded::fingerprint(what, bytes, slot.peer, self.rank);
                    return Ok(Some(Other { comm, tag, called }));
                }
                // The first of several messages, which starts with a fingerprint.
                (Some(Said::Slot(0)), Some(_)) => return Ok(Some(Other { comm, tag, called: None })),
                _ => {}
            }
        }
        Ok(None)
    }
}

impl Slot {
    /// What the sender of the message has called, where that is known and is not what was waited for.
    pub(super) fn called(&self, to: usize) -> Option<Fingerprint> {
        self.called.or_else(|| {
            let coded = self.route.coded().filter(|_| self.kind == Kind::Recv && self.code == OK)?;
            (self.length != self.bytes)
                .then(|| Coded::fingerprint(coded.what(), self.length, self.peer, to))?
        })
    }
}

/// The tag and the length of the first message from a rank, with this tag or with any, that no receive has met.
fn peek(
    session: &Session,
    from: usize,
    comm: ffi::MPI_Comm,
    tag: Option<c_int>,
) -> Result<Option<(c_int, usize)>> {
    let (mut flag, mut count) = (0, 0);
    let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
    // SAFETY: a valid communicator and places; a status of zeros is one, and MPI has filled it where there is a message.
    unsafe {
        let tag = tag.unwrap_or(ffi::RSMPI_ANY_TAG);
        let code = ffi::MPI_Iprobe(from as c_int, tag, comm, &mut flag, status.as_mut_ptr());
        session.check("MPI_Iprobe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        session
            .check("MPI_Get_count", ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count))?;
        Ok(Some((status.assume_init().MPI_TAG, count.max(0) as usize)))
    }
}

/// Takes a message out of MPI's queue, if one is there: its handle and its length.
pub(super) fn take(
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
pub(super) unsafe fn post(
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
pub(super) unsafe fn read(mut message: ffi::MPI_Message, bytes: usize, dst: *mut u8, room: usize) {
    let mut space = vec![0u8; bytes.max(1)];
    let until = Instant::now() + READING.0 * (1 + bytes / READING.1) as u32;
    // SAFETY: `space` holds the whole message and outlives the request, being leaked where that is not over in time.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let to = space.as_mut_ptr().cast();
        if ffi::MPI_Imrecv(to, bytes as c_int, ffi::RSMPI_UINT8_T, &mut message, &mut request) != OK {
            return;
        }
        while test(&mut request) == Ok(false) {
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
pub(super) unsafe fn cancel(mut request: ffi::MPI_Request) {
    // SAFETY: by the caller.
    unsafe {
        ffi::MPI_Cancel(&mut request);
        for _ in 0..1000 {
            if test(&mut request) != Ok(false) {
                return;
            }
        }
    }
}
