//! One call on its way through the host.

use super::LINE;
use super::pieces::Pieces;
use super::pool::Staging;
use crate::device::{SharedQueue, Streams};
use crate::engine::{Ends, Priority};
use crate::error::Result;
use crate::schedule::{Call, Kind};
use std::any::Any;

/// One call's place.
pub(super) struct Flight<E> {
    pub stage: Stage,
    /// The compute queue when the call started.
    pub given: E,
    /// All of it is copied down.
    pub lowered: E,
    /// What comes back is on the device.
    pub raised: E,
    /// Whether anything came back that compute has not been made to wait for.
    pub comes_back: bool,
    pub staging: Option<Staging>,
    pub job: Option<Job>,
    /// The host's number of it.
    pub host: u32,
    /// Buffers of a call that nobody waits for any more.
    pub orphan: Option<Box<dyn Any + Send>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    Copying,
    Exchanging,
    /// The host has finished, and what comes back is being copied up.
    Returned,
    Failed,
}

/// What was asked for.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub call: Call,
    pub ends: Ends,
    pub pieces: Pieces,
    pub tag: Option<u64>,
    pub priority: Priority,
}

// SAFETY: the addresses belong to calls in flight, whose buffers their owners keep; any thread may use them.
unsafe impl Send for Job {}

impl Job {
    /// Where the output starts in staging memory.
    pub fn output(&self) -> usize {
        if self.in_one() { 0 } else { self.ends.send_bytes.next_multiple_of(LINE) }
    }

    /// Whether input and output are one buffer, or there is only one of them.
    pub fn in_one(&self) -> bool {
        std::ptr::eq(self.ends.send, self.ends.recv)
    }

    /// Whether it may wait for what a peer has still to start.
    pub fn is_message(&self) -> bool {
        matches!(self.call.kind, Kind::Send | Kind::Recv)
    }

    pub fn staging_bytes(&self) -> usize {
        match self.in_one() {
            true => self.ends.send_bytes.max(self.ends.recv_bytes),
            false => self.output() + self.ends.recv_bytes,
        }
    }
}

impl<E: Send + Sync> Flight<E> {
    pub fn new<Q: Streams<Event = E>>(queue: &SharedQueue<Q>) -> Result<Self> {
        Ok(Flight {
            stage: Stage::Free,
            given: queue.event()?,
            lowered: queue.event()?,
            raised: queue.event()?,
            comes_back: false,
            staging: None,
            job: None,
            host: 0,
            orphan: None,
        })
    }
}
