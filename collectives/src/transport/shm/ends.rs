//! What is under way to one member of a group, and from it.

use super::ring::{Reader, Writer};
use crate::transport::{Request, Tag};
use std::collections::VecDeque;

/// A posted send that has not left yet.
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) tag: Tag,
    pub(super) src: *const u8,
    pub(super) bytes: usize,
}

/// A large message that the receiver knows of.
pub(super) struct Large {
    pub(super) request: Request,
    pub(super) number: u32,
    /// What still has to go through the ring; None when the receiver copies by itself.
    pub(super) rest: Option<(*const u8, usize)>,
    /// The receiver waits for the pieces.
    pub(super) ready: bool,
}

/// Something to tell the sender of a large message.
pub(super) struct Answer {
    pub(super) kind: u64,
    pub(super) number: u32,
    /// A receive that is complete once the sender is told.
    pub(super) request: Option<Request>,
}

#[derive(Default)]
pub(super) struct Outgoing {
    pub(super) ring: Writer,
    pub(super) answers: VecDeque<Answer>,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) large: Vec<Large>,
    /// Large messages announced so far.
    pub(super) announced: u32,
}

impl Outgoing {
    pub(super) fn idle(&self) -> bool {
        self.answers.is_empty() && self.waiting.is_empty() && self.large.is_empty()
    }

    /// Forgets a message that nobody takes any more; whether it was here.
    pub(super) fn withdraw(&mut self, request: Request) -> bool {
        let Outgoing { answers, waiting, large, .. } = self;
        let before = answers.len() + waiting.len() + large.len();
        answers.retain(|answer| answer.request != Some(request));
        waiting.retain(|waiting| waiting.request != request);
        large.retain(|large| large.request != request);
        before > answers.len() + waiting.len() + large.len()
    }
}

/// A posted receive.
pub(super) struct Posted {
    pub(super) request: Request,
    pub(super) tag: Tag,
    pub(super) dst: *mut u8,
    pub(super) bytes: usize,
}

/// A message that came before its receive.
pub(super) enum Early {
    Whole(Vec<u8>),
    Announced { kind: u64, number: u32, bytes: usize, offset: u64 },
}

/// A large message on its way into place.
pub(super) struct Arriving {
    pub(super) posted: Posted,
    pub(super) number: u32,
    /// Of the message, of which as much as was posted is kept.
    pub(super) bytes: usize,
    pub(super) got: usize,
    /// Where it lies in the sender's segment; None when it comes through the ring.
    pub(super) src: Option<*const u8>,
}

impl Arriving {
    /// Takes the next `bytes` of the message.
    ///
    /// # Safety
    /// So many bytes are at `src`, and the message has as many left.
    pub(super) unsafe fn put(&mut self, src: *const u8, bytes: usize) {
        let room = self.posted.bytes.saturating_sub(self.got).min(bytes);
        // SAFETY: inside the posted receive, of which nothing else is written while its message arrives.
        unsafe { self.posted.dst.wrapping_add(self.got).copy_from_nonoverlapping(src, room) };
        self.got += bytes;
    }
}

#[derive(Default)]
pub(super) struct Incoming {
    pub(super) ring: Reader,
    pub(super) posted: VecDeque<Posted>,
    pub(super) early: VecDeque<(Tag, Early)>,
    pub(super) arriving: Vec<Arriving>,
}

impl Incoming {
    /// Forgets a message that does not come any more; whether it was here.
    pub(super) fn withdraw(&mut self, request: Request) -> bool {
        let Incoming { posted, arriving, .. } = self;
        let before = posted.len() + arriving.len();
        posted.retain(|posted| posted.request != request);
        arriving.retain(|arriving| arriving.posted.request != request);
        before > posted.len() + arriving.len()
    }
}
