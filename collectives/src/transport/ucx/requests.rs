//! The requests of a transport that are under way, in places that are used again: no allocation once warm.

use super::context::Worker;
use crate::transport::Request;
use std::ffi::c_void;
use ucx_sys::{UCS_INPROGRESS, ucp_tag_recv_info_t, ucs_status_t};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Recv,
}

/// How a request ended.
pub(super) struct Outcome {
    pub(super) kind: Kind,
    pub(super) peer: usize,
    pub(super) bytes: usize,
    pub(super) status: ucs_status_t,
    /// What came, for receives.
    pub(super) length: usize,
}

#[derive(Clone, Copy)]
struct Slot {
    /// Counts the uses of this place, so that a stale [`Request`] is not taken for a later one.
    generation: u32,
    /// Null when free.
    pointer: *mut c_void,
    kind: Kind,
    peer: usize,
    bytes: usize,
}

#[derive(Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Cancelled receives of which UCX has not let go yet, with the memory they could still write to.
    orphans: Vec<(*mut c_void, Vec<u8>)>,
}

// SAFETY: the pointers are requests of a worker that may move between threads, and its lock keeps calls apart.
unsafe impl Send for Requests {}

impl Requests {
    /// What was done when it was posted.
    pub(super) const DONE: Request = Request(u64::MAX);

    pub(super) fn add(&mut self, kind: Kind, pointer: *mut c_void, peer: usize, bytes: usize) -> Request {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, pointer, kind, peer, bytes });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        *slot = Slot { generation: slot.generation, pointer, kind, peer, bytes };
        Request((slot.generation as u64) << 32 | index as u64)
    }

    /// How `request` ended, or nothing while it is under way. A request that ended before is an outcome of success.
    pub(super) fn test(&mut self, worker: &Worker, request: Request) -> Option<Outcome> {
        let (index, generation) = (request.0 as u32, (request.0 >> 32) as u32);
        let slot = self.slots[index as usize];
        if slot.generation != generation || slot.pointer.is_null() {
            return Some(Outcome { kind: Kind::Send, peer: slot.peer, bytes: 0, status: 0, length: 0 });
        }
        let mut info = ucp_tag_recv_info_t::default();
        // SAFETY: a request of this worker that was not yet reported complete.
        let status = unsafe {
            match slot.kind {
                Kind::Send => worker.finished(slot.pointer),
                Kind::Recv => worker.received(slot.pointer, &mut info),
            }
        };
        if status == UCS_INPROGRESS {
            return None;
        }
        let place = &mut self.slots[index as usize];
        place.pointer = std::ptr::null_mut();
        // Generations stay below the number of `DONE`.
        place.generation = (generation + 1) & 0x7fff_ffff;
        self.free.push(index);
        Some(Outcome { kind: slot.kind, peer: slot.peer, bytes: slot.bytes, status, length: info.length })
    }

    /// From whom `request` awaits a message, if it is a receive.
    pub(super) fn awaits(&self, request: Request) -> Option<usize> {
        let slot = &self.slots[request.0 as u32 as usize];
        (slot.kind == Kind::Recv).then_some(slot.peer)
    }

    /// Takes over a receive that nobody awaits any more, with its memory.
    pub(super) fn orphan(&mut self, worker: &Worker, request: *mut c_void, memory: Vec<u8>) {
        // SAFETY: a receive of this worker that was not yet reported complete.
        unsafe { worker.cancel(request) };
        self.orphans.push((request, memory));
    }

    /// Cancels every receive that is under way.
    pub(super) fn cancel_receives(&mut self, worker: &Worker) {
        for slot in self.slots.iter().filter(|s| !s.pointer.is_null() && s.kind == Kind::Recv) {
            // SAFETY: a request of this worker that was not yet reported complete.
            unsafe { worker.cancel(slot.pointer) };
        }
    }

    /// Frees what is done; how many sends and other requests are still under way.
    pub(super) fn settle(&mut self, worker: &Worker) -> (usize, usize) {
        let (mut sends, mut others) = (0, 0);
        for index in 0..self.slots.len() {
            let slot = self.slots[index];
            if slot.pointer.is_null() {
                continue;
            }
            if self.test(worker, Request((slot.generation as u64) << 32 | index as u64)).is_none() {
                if slot.kind == Kind::Send { sends += 1 } else { others += 1 }
            }
        }
        self.orphans.retain(|(request, _)| {
            // SAFETY: as above.
            unsafe { worker.finished(*request) == UCS_INPROGRESS }
        });
        (sends, others + self.orphans.len())
    }

    /// Leaves everything that is under way as it is, for good; its worker must not move any further.
    pub(super) fn forget(&mut self) {
        self.slots.clear();
        self.free.clear();
        std::mem::forget(std::mem::take(&mut self.orphans));
    }
}
