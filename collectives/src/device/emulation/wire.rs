//! A wire between emulated devices of one process.

use super::EmulatedQueue;
use super::queue::copy;
use super::work::{Poll, Task};
use crate::communicator::{Communicator, Lane, Message, Wire};
use crate::error::{Error, Result};
use crate::locked;
use crate::schedule::{Call, Kind};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Which message: lane, sender, receiver.
type Key = (usize, usize, usize);

/// What is on its way between the ranks of a group.
#[derive(Default)]
struct Mail {
    letters: Mutex<HashMap<Key, VecDeque<Vec<u8>>>>,
    /// Groups that this one was split into: by number of the split and color.
    groups: Mutex<HashMap<(u64, u32), Arc<Mail>>>,
}

/// One rank's end.
pub struct EmulatedWire {
    mail: Arc<Mail>,
    rank: usize,
    size: usize,
    splits: AtomicU64,
    /// This end does no more; the others notice nothing, as on real wires.
    aborted: Arc<AtomicBool>,
}

/// A message whose address may go to another thread: its memory stays, whoever gave it promised.
struct Sendable(Message);

// SAFETY: as above.
unsafe impl Send for Sendable {}

impl EmulatedWire {
    /// The ends of a wire between `n` ranks.
    pub fn group(n: usize) -> Vec<Self> {
        let mail = Arc::<Mail>::default();
        (0..n).map(|rank| EmulatedWire::new(mail.clone(), rank, n)).collect()
    }

    fn new(mail: Arc<Mail>, rank: usize, size: usize) -> Self {
        EmulatedWire { mail, rank, size, splits: AtomicU64::new(0), aborted: Arc::default() }
    }

    fn task(&self, lane: Lane, messages: impl IntoIterator<Item = Message>) -> Poll {
        let (mail, rank, lane) = (self.mail.clone(), self.rank, lane as usize);
        let aborted = self.aborted.clone();
        let (out, mut due): (VecDeque<_>, VecDeque<_>) =
            messages.into_iter().map(Sendable).partition(|m| m.0.outgoing);
        let mut out = Some(out);
        Box::new(move || {
            check(&aborted)?;
            let mut letters = locked(&mail.letters);
            for Sendable(m) in out.take().into_iter().flatten() {
                // SAFETY: whoever gave the message promised its memory until the task is done.
                let bytes = unsafe { std::slice::from_raw_parts(m.at, m.bytes) }.to_vec();
                letters.entry((lane, rank, m.peer)).or_default().push_back(bytes);
            }
            while let Some(Sendable(m)) = due.front() {
                let Some(inbox) = letters.get_mut(&(lane, m.peer, rank)) else { return Ok(false) };
                // One of another length is never taken: real wires hang too.
                if inbox.front().is_none_or(|letter| letter.len() != m.bytes) {
                    return Ok(false);
                }
                let Some(letter) = inbox.pop_front() else { return Ok(false) };
                // SAFETY: as above.
                unsafe { copy(letter.as_ptr() as u64, m.at as u64, m.bytes) };
                due.pop_front();
            }
            Ok(true)
        })
    }
}

fn check(aborted: &AtomicBool) -> Result<()> {
    match aborted.load(Ordering::Acquire) {
        true => Err(Error::GivenUp("the emulated wire was given up".into())),
        false => Ok(()),
    }
}

// SAFETY: messages are tasks of the queue that was given them; who has aborted does none any more.
unsafe impl Wire<EmulatedQueue> for EmulatedWire {
    fn name(&self) -> &str {
        "emulated wire"
    }

    fn group(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    unsafe fn exchange(&self, lane: Lane, queue: &mut EmulatedQueue, messages: &[Message]) -> Result<()> {
        queue.device.give(queue.number, Task::Poll(self.task(lane, messages.iter().copied())))
    }

    unsafe fn native(
        &self,
        lane: Lane,
        queue: &mut EmulatedQueue,
        call: &Call,
        send: *const u8,
        recv: *mut u8,
    ) -> Result<()> {
        let (bytes, rank) = (call.bytes(), self.rank);
        let block = |p: usize| recv.wrapping_add(p * bytes);
        let peers = (0..self.size).filter(|&p| p != rank);
        let message = |peer: usize, outgoing: bool, at: *mut u8| Message { peer, outgoing, at, bytes };
        let messages: Vec<Message> = match call.kind {
            Kind::AllGather => {
                if !call.in_place {
                    let task = Task::Copy { from: send as u64, to: block(rank) as u64, bytes };
                    queue.device.give(queue.number, task)?;
                }
                peers.flat_map(|p| [message(p, true, block(rank)), message(p, false, block(p))]).collect()
            }
            Kind::Broadcast if rank == call.root => peers.map(|p| message(p, true, recv)).collect(),
            Kind::Broadcast => vec![message(call.root, false, recv)],
            kind => unreachable!("the emulated wire has no order of sums for {kind}"),
        };
        queue.device.give(queue.number, Task::Poll(self.task(lane, messages)))
    }

    fn check(&self) -> Result<()> {
        check(&self.aborted)
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Self>> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let (Some(host), Some(color)) = (host, color) else { return Ok(None) };
        let mail = locked(&self.mail.groups).entry((number, color)).or_default().clone();
        Ok(Some(EmulatedWire::new(mail, host.rank(), host.size())))
    }
}
