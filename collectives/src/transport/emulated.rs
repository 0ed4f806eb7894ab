//! A network that this machine does not have: [`Emulated`] wraps any transport and holds messages back for as long as
//! links of a given latency and bandwidth would, so that communication can be studied without a cluster.
//!
//! **The model.** Every rank has a port to the network, which sends at the link's bandwidth and receives at it at the
//! same time (full duplex). A message of b bytes from one node to another
//!
//! 1. leaves when it is posted and the sender's port is free, and keeps that port for b / bandwidth;
//! 2. its first byte arrives `hops` times the latency later (switches cut through: bandwidth counts once);
//! 3. it keeps the receiver's port for b / bandwidth from then on, or from the first time when the port is free for
//!    that long, and is then there.
//!
//! The receive completes at that time or later, never earlier, and the send when the message has left the sender's
//! port. So one message alone takes `hops * latency + b / bandwidth`, messages that share a port follow one another,
//! and many-to-one traffic queues at the receiver. Ranks do not share a port, as where each has a network adapter of
//! its own. Messages inside a node have a link of the same kind but of their own (`inside-latency`,
//! `inside-bandwidth`), or none, and a rank's messages to itself have none. Without nodes every rank is one.
//!
//! **Exactness.** Times follow from when messages are posted; nothing is drawn at random. Where messages contend for a
//! receiver's port, it takes them in the order in which that rank hears of them. Real transfers run meanwhile and only
//! add to a message's time where they are slower than the model. A receive is seen to be complete when this rank
//! looks, so the resolution is that of its waiting: a microsecond while spinning.
//!
//! **How.** Each message is preceded by one of 24 bytes under the same tag that says when it left. Both are posted at
//! once, so large payloads are neither copied nor delayed in fact. Peers' memory is never read directly, as it could
//! not be over a network. Clocks are those of one machine: ranks on different ones are an error.

mod link;
mod port;

use super::{LISTED, Nodes, Request, Tag, Transport, Waits};
use crate::bootstrap::boot_and_space;
use crate::buffer::Memory;
use crate::digest::digest;
use crate::error::{Error, Result};
use crate::locked;
use crate::trace::Trace;
pub use link::{Hop, Link};
use port::Port;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What precedes each message.
const HEADER: usize = 24;
/// Sleeping is not exact: whoever waits for a time wakes this many nanoseconds before it.
const EARLY: u64 = 100_000;

/// A message that is under way.
struct Slot {
    generation: u32,
    active: bool,
    receiving: bool,
    peer: usize,
    /// The header's request, while that is under way.
    header: Option<Request>,
    payload: Option<Request>,
    /// Before this time it is not complete.
    due: u64,
    /// The header itself; the box keeps its address while the list of slots grows.
    words: Box<[u8; HEADER]>,
}

impl Slot {
    fn free() -> Self {
        let words = Box::new([0; HEADER]);
        let (generation, active, receiving, peer) = (0, false, false, 0);
        Slot { generation, active, receiving, peer, header: None, payload: None, due: 0, words }
    }
}

/// One rank's ports, shared by all its groups.
#[derive(Default)]
struct Ports {
    between: Port,
    inside: Port,
}

/// A transport behind emulated links.
pub struct Emulated {
    name: String,
    inner: Box<dyn Transport>,
    link: Link,
    nodes: Nodes,
    ports: Arc<Mutex<Ports>>,
    clock: u64,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Beyond so many places nothing was ever under way.
    reached: usize,
}

impl Emulated {
    /// Puts `link` between the ranks of `inner`. All ranks wrap alike; `name` is what users call the result.
    ///
    /// # Errors
    /// [`Error::Launch`] when `nodes` are those of another number of ranks.
    pub fn new(name: &str, inner: Box<dyn Transport>, link: Link, nodes: Nodes) -> Result<Self> {
        if nodes.world() != inner.size() {
            let (known, joined) = (nodes.world(), inner.size());
            let inner = inner.name();
            return Err(Error::Launch(format!(
                "the nodes of {known} ranks are known, but transport {inner} joins {joined}"
            )));
        }
        Ok(Self::over(name.into(), inner, link, nodes, Arc::default(), clock()))
    }

    fn over(
        name: String,
        inner: Box<dyn Transport>,
        link: Link,
        nodes: Nodes,
        ports: Arc<Mutex<Ports>>,
        clock: u64,
    ) -> Self {
        let slots = (0..LISTED).map(|_| Slot::free()).collect();
        let free = (0..LISTED as u32).rev().collect();
        Emulated { name, inner, link, nodes, ports, clock, slots, free, reached: 0 }
    }

    /// What a message to or from `peer` crosses.
    fn hop(&self, peer: usize) -> Option<Hop> {
        let me = self.inner.rank();
        if peer == me || peer >= self.nodes.world() {
            return None;
        }
        match self.nodes.shared(me, peer) {
            true => self.link.inside,
            false => Some(self.link.between),
        }
    }

    fn slot(&mut self, receiving: bool, peer: usize) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::free());
            self.slots.len() as u32 - 1
        }) as usize;
        self.reached = self.reached.max(index + 1);
        let slot = &mut self.slots[index];
        (slot.active, slot.receiving, slot.peer) = (true, receiving, peer);
        (slot.header, slot.payload, slot.due) = (None, None, 0);
        index
    }

    fn name_of(&self, index: usize) -> Request {
        Request::of(index, self.slots[index].generation)
    }

    fn release(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.active = false;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index as u32);
    }

    fn port<'a>(&self, ports: &'a mut MutexGuard<'_, Ports>, peer: usize) -> &'a mut Port {
        match self.nodes.shared(self.inner.rank(), peer) {
            true => &mut ports.inside,
            false => &mut ports.between,
        }
    }

    /// Reads the header that has come, and so when the message is due.
    fn opened(&mut self, index: usize) -> Result<()> {
        let slot = &self.slots[index];
        let word = |i: usize| u64::from_le_bytes(slot.words[8 * i..8 * i + 8].try_into().expect("8 bytes"));
        let (clock, start, bytes) = (word(0), word(1), word(2) as usize);
        if clock != self.clock {
            let why = format!(
                "rank {} runs on another machine or with another clock, and the clocks of an emulated link are those \
                 of one machine",
                self.inner.job_rank(slot.peer)
            );
            return Err(Error::Unavailable { name: self.name.clone(), why });
        }
        let peer = slot.peer;
        let Some(hop) = self.hop(peer) else { return Ok(()) };
        let mut ports = locked(&self.ports);
        let due = self.port(&mut ports, peer).arrive(&hop, start, bytes);
        drop(ports);
        self.slots[index].due = due;
        Ok(())
    }

    fn advance(&mut self, index: usize) -> Result<bool> {
        if let Some(header) = self.slots[index].header
            && self.inner.test(header)?
        {
            self.slots[index].header = None;
            if self.slots[index].receiving {
                self.opened(index)?;
            }
        }
        if let Some(payload) = self.slots[index].payload
            && self.inner.test(payload)?
        {
            self.slots[index].payload = None;
        }
        let slot = &self.slots[index];
        Ok(slot.header.is_none() && slot.payload.is_none() && (slot.due == 0 || Trace::now() >= slot.due))
    }
}

// SAFETY: as the transport inside keeps the contract, whose messages are only held back.
unsafe impl Transport for Emulated {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn nodes(&self) -> Option<&Nodes> {
        Some(&self.nodes)
    }

    fn job_rank(&self, member: usize) -> usize {
        self.inner.job_rank(member)
    }

    fn host(&mut self, job_rank: usize) -> Option<String> {
        self.inner.host(job_rank)
    }

    fn frame(&self) -> usize {
        self.inner.frame()
    }

    fn most_tag(&self) -> u32 {
        self.inner.most_tag()
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn alloc(&mut self, bytes: usize) -> Result<Memory> {
        self.inner.alloc(bytes)
    }

    fn leave_behind(&mut self, memory: Memory) -> Option<Memory> {
        self.inner.leave_behind(memory)
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        let index = self.slot(false, to);
        if let Some(hop) = self.hop(to) {
            let mut ports = locked(&self.ports);
            let (start, left) = self.port(&mut ports, to).depart(&hop, Trace::now(), bytes);
            drop(ports);
            let slot = &mut self.slots[index];
            for (place, word) in slot.words.chunks_exact_mut(8).zip([self.clock, start, bytes as u64]) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            slot.due = left;
            let at = slot.words.as_ptr();
            // SAFETY: the boxed header stays as it is until its request is complete; slots go after `inner`.
            slot.header = match unsafe { self.inner.send(to, tag, at, HEADER) } {
                Ok(header) => Some(header),
                Err(refused) => {
                    self.release(index);
                    return Err(refused);
                }
            };
        }
        // SAFETY: the caller's promise.
        match unsafe { self.inner.send(to, tag, src, bytes) } {
            Ok(payload) => self.slots[index].payload = Some(payload),
            Err(refused) => {
                // Not awaited, and not used again: its header may still be under way.
                self.slots[index].due = 0;
                return Err(refused);
            }
        }
        Ok(self.name_of(index))
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        let index = self.slot(true, from);
        if self.hop(from).is_some() {
            let at = self.slots[index].words.as_mut_ptr();
            // SAFETY: the boxed header is left alone until its request is complete; slots go after `inner`.
            self.slots[index].header = Some(unsafe { self.inner.recv(from, tag, at, HEADER)? });
        }
        // SAFETY: the caller's promise.
        self.slots[index].payload = Some(unsafe { self.inner.recv(from, tag, dst, bytes)? });
        Ok(self.name_of(index))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        let index = request.index();
        let known = self.slots.get(index);
        if !known.is_some_and(|s| s.active && s.generation == request.generation()) {
            return Ok(true);
        }
        // After an error the place is not used again: the rest of the message may still be under way.
        let done = self.advance(index)?;
        if done {
            self.release(index);
        }
        Ok(done)
    }

    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>> {
        let inner = self.inner.subgroup(members, context, within)?;
        let nodes = self.nodes.among(members);
        let (name, ports) = (self.name.clone(), self.ports.clone());
        Ok(Box::new(Self::over(name, inner, self.link, nodes, ports, self.clock)))
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }

    fn check_hosts(&mut self) -> Result<()> {
        self.inner.check_hosts()
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        self.inner.waits()
    }

    fn wakes(&self) -> bool {
        self.inner.wakes()
    }

    fn park(&mut self, limit: Duration) {
        let waiting = |s: &&Slot| s.active && s.header.is_none() && s.payload.is_none() && s.due > 0;
        match self.slots[..self.reached].iter().filter(waiting).map(|s| s.due).min() {
            None => self.inner.park(limit),
            Some(due) => {
                let left = due.saturating_sub(Trace::now());
                if left > EARLY {
                    self.inner.park(limit.min(Duration::from_nanos(left - EARLY)));
                }
            }
        }
    }

    fn abort(&mut self, why: &Error) {
        self.inner.abort(why);
    }
}

/// Tells this machine's clock from others: by its boot and its namespace of times.
fn clock() -> u64 {
    digest(boot_and_space("time").bytes())
}
