//! Where messages to one rank wait for it, or it for them.

use super::super::{LISTED, Tag};
use crate::error::Error;
use crate::locked;
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Up to this many bytes a message waits in the mailbox rather than at the sender.
pub(super) const EAGER: usize = 16 << 10;
/// Messages that have room in a mailbox at once.
pub(super) const ROOM: usize = 32;

#[derive(Default)]
pub(super) struct Mailbox {
    inner: Mutex<Inner>,
    pub(super) bell: Condvar,
    /// Its owner sends nothing more.
    pub(super) left: AtomicBool,
}

pub(super) struct Inner {
    pub(super) arrived: Vec<Letter>,
    pub(super) posted: Vec<Posted>,
    pub(super) requests: Vec<State>,
    /// [`ROOM`] places of [`EAGER`] bytes.
    room: Box<[MaybeUninit<u8>]>,
    /// Places where no message is.
    pub(super) spare: Vec<usize>,
    /// Copies that other ranks are making of or to the owner's memory.
    pub(super) copying: usize,
    /// The owner's memory may not be touched any more.
    pub(super) closed: bool,
    pub(super) events: u64,
}

pub(super) struct Letter {
    pub(super) from: usize,
    pub(super) tag: Tag,
    pub(super) body: Body,
}

pub(super) enum Body {
    /// In a place of the mailbox.
    Short { place: usize, bytes: usize },
    /// In the sender's memory, until its request is done.
    Long { src: *const u8, bytes: usize, request: usize },
}

pub(super) struct Posted {
    pub(super) from: usize,
    pub(super) tag: Tag,
    pub(super) dst: *mut u8,
    pub(super) bytes: usize,
    pub(super) request: usize,
}

pub(super) enum State {
    Free,
    Waiting { peer: usize },
    Done,
    Failed(Error),
}

// SAFETY: the pointers are to memory that the trait's contract keeps valid until the request is done, and
// `closed` and `copying` keep others from it afterwards.
unsafe impl Send for Inner {}

impl Default for Inner {
    fn default() -> Self {
        Inner {
            arrived: Vec::with_capacity(LISTED),
            posted: Vec::with_capacity(LISTED),
            requests: Vec::with_capacity(LISTED),
            room: Box::new_uninit_slice(ROOM * EAGER),
            spare: (0..ROOM).rev().collect(),
            copying: 0,
            closed: false,
            events: 0,
        }
    }
}

impl Inner {
    /// Where a short message lies.
    pub(super) fn place(&mut self, place: usize) -> &mut [MaybeUninit<u8>] {
        &mut self.room[place * EAGER..][..EAGER]
    }

    pub(super) fn request(&mut self, peer: usize) -> usize {
        let free = self.requests.iter().position(|s| matches!(s, State::Free));
        let index = free.unwrap_or_else(|| {
            self.requests.push(State::Free);
            self.requests.len() - 1
        });
        self.requests[index] = State::Waiting { peer };
        index
    }
}

impl Mailbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code under this lock panics halfway through a change.
        locked(&self.inner)
    }

    pub(super) fn ring(&self, inner: &mut Inner) {
        inner.events += 1;
        self.bell.notify_all();
    }
}
