//! The requests of a transport that are under way, in places that are used again: no allocation once warm.
//!
//! What is written here or returned is read back word by word, as it was written: a longer load cannot be served from
//! stores that have not reached the cache yet, and waits for all of them; see [`turns`](super::turns).

use super::context::Worker;
use super::tags;
use crate::transport::{LISTED, Request};
use std::ffi::c_void;
use std::time::{Duration, Instant};
use ucx_sys::{UCS_ERR_CANCELED, UCS_INPROGRESS, UCS_OK, ucp_tag_recv_info_t, ucp_tag_t, ucs_status_t};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    /// Of a message under `tag` to `dst`.
    Recv {
        tag: ucp_tag_t,
        dst: *const u8,
    },
}

/// How a request ended that did not end as it should.
pub(super) struct Outcome {
    pub(super) kind: Kind,
    pub(super) peer: usize,
    pub(super) bytes: usize,
    pub(super) status: ucs_status_t,
    /// What came, for receives.
    pub(super) came: ucp_tag_recv_info_t,
}

/// So many looks at a receive in vain, and so long after the last time, it is looked whether something else has come in its
/// place.
const LOOKS: u32 = 32;
const ASIDE: Duration = Duration::from_millis(1);

struct Slot {
    /// Counts the uses of this place, so that a stale [`Request`] is not taken for a later one.
    generation: u32,
    /// Null when free.
    pointer: *mut c_void,
    kind: Kind,
    peer: usize,
    bytes: usize,
    /// In vain since it was last looked aside; [`u32::MAX`] where that makes no sense any more.
    looks: u32,
}

/// Whether a request is done, or how else it ended; unless it is under way, it is freed.
///
/// # Safety
/// `request` is one of this `kind` that came from this worker and was not yet reported as complete.
#[inline(always)]
pub(super) unsafe fn ended(
    worker: &Worker,
    kind: Kind,
    request: *mut c_void,
    peer: usize,
    bytes: usize,
) -> Result<bool, Box<Outcome>> {
    let mut came = ucp_tag_recv_info_t::default();
    // SAFETY: the caller's promise.
    let (status, expected) = unsafe {
        match kind {
            Kind::Send => (worker.finished(request), true),
            Kind::Recv { tag, .. } => {
                let status = worker.received(request, &mut came);
                (status, came.length == bytes && came.sender_tag == tag)
            }
        }
    };
    match (status, expected) {
        (UCS_INPROGRESS, _) => Ok(false),
        (UCS_OK, true) => Ok(true),
        _ => Err(Box::new(Outcome { kind, peer, bytes, status, came })),
    }
}

pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Cancelled receives of which UCX has not let go yet, with the memory they could still write to.
    orphans: Vec<(*mut c_void, Vec<u8>)>,
    /// When it was last looked aside for any of them.
    aside: Option<Instant>,
}

// SAFETY: the pointers are requests of a worker that may move between threads, and turns keep calls apart; and memory that
// callers of `recv` have vouched for.
unsafe impl Send for Requests {}

impl Default for Requests {
    fn default() -> Self {
        let (slots, free) = (Vec::with_capacity(LISTED), Vec::with_capacity(LISTED));
        Requests { slots, free, orphans: Vec::new(), aside: None }
    }
}

impl Requests {
    pub(super) fn add(&mut self, kind: Kind, pointer: *mut c_void, peer: usize, bytes: usize) -> Request {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, pointer, kind, peer, bytes, looks: 0 });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        *slot = Slot { generation: slot.generation, pointer, kind, peer, bytes, looks: 0 };
        Request::of(index as usize, slot.generation)
    }

    /// From whom `request` receives, if it does and is not done.
    pub(super) fn source(&self, request: Request) -> Option<usize> {
        let slot = &self.slots[request.index()];
        let open = slot.generation == request.generation() && !slot.pointer.is_null();
        (open && matches!(slot.kind, Kind::Recv { .. })).then_some(slot.peer)
    }

    /// Whether `request` is done, as one is that has been done before; or how else it ended.
    #[inline(always)]
    pub(super) fn test(&mut self, worker: &Worker, request: Request) -> Result<bool, Box<Outcome>> {
        let (index, generation) = (request.index(), request.generation());
        let slot = &mut self.slots[index];
        if slot.generation != generation || slot.pointer.is_null() {
            return Ok(true);
        }
        // SAFETY: a request of this worker that was not yet reported complete.
        let mut ended = unsafe { ended(worker, slot.kind, slot.pointer, slot.peer, slot.bytes) };
        if let Ok(false) = ended {
            slot.looks = slot.looks.saturating_add(1);
            if slot.looks < LOOKS || slot.looks == u32::MAX {
                return Ok(false);
            }
            ended = self.look_aside(worker, index);
            if let Ok(false) = ended {
                return Ok(false);
            }
        }
        let slot = &mut self.slots[index];
        slot.pointer = std::ptr::null_mut();
        // Generations stay below that of `Request::DONE`.
        slot.generation = (generation + 1) & 0x7fff_ffff;
        self.free.push(index as u32);
        ended
    }

    /// Looks whether what was sent in place of an awaited message has come: a receive of any such message, posted from the
    /// start, would be looked for among all that have come, and a fast sender may be thousands of calls ahead of another. Gives
    /// what has become of the receive.
    #[cold]
    fn look_aside(&mut self, worker: &Worker, index: usize) -> Result<bool, Box<Outcome>> {
        let slot = &mut self.slots[index];
        slot.looks = u32::MAX;
        let Kind::Recv { tag, dst } = slot.kind else { return Ok(false) };
        let mask = tags::deciding(tag);
        if mask == tags::EXACT {
            return Ok(false);
        }
        if self.aside.is_some_and(|last| last.elapsed() < ASIDE) {
            // The next time before one that has had its turn, but not each time from now on: to read the clock takes longer
            // than to look.
            slot.looks = LOOKS / 2;
            return Ok(false);
        }
        slot.looks = 0;
        let found = worker.has_unmet(tag, mask);
        self.aside = Some(Instant::now());
        if !found {
            return Ok(false);
        }
        let (kind, peer, bytes) = (slot.kind, slot.peer, slot.bytes);
        let otherwise = |status, came| Err(Box::new(Outcome { kind, peer, bytes, status, came }));
        // SAFETY: a receive of this worker that was not yet reported complete, and once it is cancelled, its memory.
        unsafe {
            worker.cancel(slot.pointer);
            let mut came = ucp_tag_recv_info_t::default();
            match worker.received(slot.pointer, &mut came) {
                // It has met its own message, of which not all has come: the other one is for another receive.
                UCS_INPROGRESS => {
                    slot.looks = u32::MAX;
                    Ok(false)
                }
                UCS_ERR_CANCELED => match worker.recv_unmet(tag, mask, dst.cast_mut(), bytes) {
                    Ok(Some(request)) => {
                        (slot.pointer, slot.looks) = (request, u32::MAX);
                        Ok(false)
                    }
                    Ok(None) => otherwise(UCS_ERR_CANCELED, came),
                    Err(status) => otherwise(status, came),
                },
                UCS_OK if came.length == bytes && came.sender_tag == tag => Ok(true),
                status => otherwise(status, came),
            }
        }
    }

    /// What `request` is of, and with whom.
    pub(super) fn with(&self, request: Request) -> (Kind, usize) {
        let slot = &self.slots[request.index()];
        (slot.kind, slot.peer)
    }

    /// With whom the messages are that are under way.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().filter(|slot| !slot.pointer.is_null()).map(|slot| slot.peer)
    }

    /// Takes over a receive that nobody awaits any more, with its memory.
    pub(super) fn orphan(&mut self, worker: &Worker, request: *mut c_void, memory: Vec<u8>) {
        // SAFETY: a receive of this worker that was not yet reported complete.
        unsafe { worker.cancel(request) };
        self.orphans.push((request, memory));
    }

    /// Cancels every receive that is under way.
    pub(super) fn cancel_receives(&mut self, worker: &Worker) {
        for slot in self.slots.iter().filter(|s| !s.pointer.is_null() && s.kind != Kind::Send) {
            // SAFETY: a request of this worker that was not yet reported complete.
            unsafe { worker.cancel(slot.pointer) };
        }
    }

    /// Frees what is done; whether nothing is under way any more.
    pub(super) fn settle(&mut self, worker: &Worker) -> bool {
        let mut active = false;
        for index in 0..self.slots.len() {
            let Slot { generation, pointer, .. } = self.slots[index];
            let request = Request::of(index, generation);
            active |= !pointer.is_null() && matches!(self.test(worker, request), Ok(false));
        }
        self.orphans.retain(|(request, _)| {
            // SAFETY: as above.
            unsafe { worker.finished(*request) == UCS_INPROGRESS }
        });
        !active && self.orphans.is_empty()
    }

    /// Leaves everything that is under way as it is, for good; its worker must not move any further.
    pub(super) fn forget(&mut self) {
        self.slots.clear();
        self.free.clear();
        std::mem::forget(std::mem::take(&mut self.orphans));
    }
}
