//! One call on its way through the host.

use super::pieces::Pieces;
use super::pool::Staging;
use crate::device::{Queue, SharedQueue, Streams};
use crate::engine::{Ends, Priority};
use crate::error::Result;
use crate::schedule::{Call, Kind};
use std::any::Any;

/// Where the output starts in staging memory.
const LINE: usize = 64;

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
    /// For a place in memory of the host.
    Waiting,
    Copying,
    Exchanging,
    /// A thread waits for the host's part, and copies up what comes back.
    Awaited,
    /// The host has finished, and what comes back is being copied up.
    Returned,
    Failed,
}

/// What was asked for.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// As the host makes it.
    pub call: Call,
    pub ends: Ends,
    pub tag: Option<u64>,
    pub priority: Priority,
    /// None of a call of the host's own, which only keeps its place among the device's.
    pub copies: Option<Copies>,
}

/// What of a device's buffers is copied, and where in staging memory it has its place.
#[derive(Clone, Copy)]
pub(super) struct Copies {
    pub pieces: Pieces,
    pub layout: Layout,
}

/// Where in staging memory a call has what.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub input: usize,
    pub output: usize,
    pub bytes: usize,
    /// Whether the host makes a call in place, in all of it, that the device does not.
    pub joined: bool,
}

/// The call that the host makes for one of a device: where a shard is as large as its part of the whole, the shard is put
/// there, or taken from there, and the call is one in place.
pub fn staged_call(call: Call) -> Call {
    let shard = matches!(call.kind, Kind::ReduceScatter | Kind::AllGather) && !call.wide;
    Call { in_place: call.in_place || shard, ..call }
}

/// Bytes of staging memory for an input and an output of so many bytes that are not in one place: the output behind the
/// input, where a cache line starts.
pub fn staged_length(send: usize, recv: usize) -> usize {
    send.next_multiple_of(LINE) + recv
}

impl Layout {
    /// That of a call on `rank`, with these buffers.
    pub fn of(call: &Call, ends: &Ends, rank: usize) -> Layout {
        let (send, recv) = (ends.send_bytes, ends.recv_bytes);
        let shard = rank * call.bytes();
        let joined = staged_call(*call).in_place && !call.in_place;
        let (input, output, bytes) = match call.kind {
            Kind::AllGather if joined => (shard, 0, recv),
            _ if joined => (0, shard, send),
            // Input and output are one buffer, or there is only one of them.
            _ if std::ptr::eq(ends.send, ends.recv) => (0, 0, send.max(recv)),
            _ => {
                let bytes = staged_length(send, recv);
                (0, bytes - recv, bytes)
            }
        };
        Layout { input, output, bytes, joined }
    }
}

// SAFETY: the addresses belong to calls in flight, whose buffers their owners keep; any thread may use them.
unsafe impl Send for Job {}

impl Job {
    /// Whether it may wait for what a peer has still to start.
    pub fn is_message(&self) -> bool {
        self.call.kind.is_message()
    }

    /// Bytes of staging memory that it takes.
    pub fn staging(&self) -> usize {
        self.copies.map_or(0, |copies| copies.layout.bytes)
    }

    /// What the host is given, with staging memory that starts there.
    pub fn host_ends(&self, start: *mut u8) -> Ends {
        let Some(Copies { layout: Layout { output, bytes, joined, .. }, .. }) = self.copies else {
            return self.ends;
        };
        match joined {
            true => Ends { send: start, send_bytes: bytes, recv: start, recv_bytes: bytes },
            false => Ends { send: start, recv: start.wrapping_add(output), ..self.ends },
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
