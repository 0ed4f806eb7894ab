//! Carries a device's calls from device to device, over a wire whose work is ordered by the device's own queues.
//!
//! Two queues beside the compute queue, one for gathers and one for reductions, so that neither holds the other up. A
//! call's queue waits for what the compute queue had been given when the call started; the compute queue waits for the
//! call only once somebody waits for it. The host waits for none. A third queue sums pieces of a reduction while the next
//! ones are on their way.

mod messages;
mod plan;
mod slots;
mod sums;
mod watch;
mod wire;

pub use plan::Order;
pub use wire::{Lane, Message, Wire};

use super::Communicator;
use super::carrier::Carrier;
use crate::buffer::{Buffer, Memory, Place};
use crate::device::{Module, Queue, SharedQueue, Streams, Urgency};
use crate::element::DType;
use crate::engine::{Ends, Priority, Stats};
use crate::error::{Error, Result};
use crate::ledger::Account;
use crate::locked;
use crate::schedule::{Call, Kind, Space, Span};
use plan::{Program, Step, least_scratch};
use slots::Slots;
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use sums::Sums;
use watch::Watch;

/// Scratch memory for contributions to sums, unless set otherwise.
const SCRATCH: usize = 64 << 20;
/// Programs that are kept; a run has a few tens.
const PROGRAMS: usize = 1024;

/// Bytes of each piece of a device's memory that a carrier over a wire takes in a group of `size`, with so much scratch
/// memory or as much as usual.
pub fn wired_bytes(size: usize, limit: Option<usize>) -> [usize; 3] {
    let contributions = if size > 1 { limit.unwrap_or(SCRATCH).max(least_scratch(size)) } else { 0 };
    let table = size * size_of::<u64>();
    [contributions, table, table]
}

/// Carries calls over wire `W`, for memory of the device whose compute queue is of type `Q`.
///
/// Messages are matched with those of the other side by their order, not by their tags: between two ranks tags must come
/// in one order. The wire is given them before a call of their lane, and when somebody waits for, asks after or drops any.
pub struct Wired<Q: Streams, W: Wire<Q>> {
    /// The group over the host's transport, without a carrier.
    host: Communicator,
    compute: SharedQueue<Q>,
    wire: Arc<W>,
    order: Order,
    limit: usize,
    state: Mutex<State<Q>>,
    watch: Watch<Q>,
}

struct State<Q: Streams> {
    lanes: [Q; 2],
    sums: Sums<Q>,
    slots: Slots<Q::Event>,
    programs: HashMap<Call, Arc<Program>>,
    /// Contributions, in use by the lane of sums only.
    scratch: Buffer<u8>,
    addresses: Vec<u64>,
    messages: Vec<Message>,
    /// Messages that the wire has not been given yet.
    deferred: Vec<(u32, Message)>,
    prepared: Vec<DType>,
    /// Buffers of calls that nobody waits for any more.
    orphans: Vec<(u32, Box<dyn Any + Send>)>,
    /// After a failure: nothing is under way any more.
    settled: bool,
    stats: Stats,
}

// SAFETY: the addresses in messages belong to calls in flight, whose buffers their owners keep; any thread may use them.
unsafe impl<Q: Streams> Send for State<Q> {}

impl<Q: Streams, W: Wire<Q>> Wired<Q, W> {
    /// A carrier for the group of `host`, whose wire is `wire`. All ranks call it together.
    ///
    /// # Errors
    /// A wire of another group; the device gives no more memory, queues or events; a rank is lost.
    pub fn new(host: &Communicator, compute: SharedQueue<Q>, wire: W, order: Order) -> Result<Self> {
        Wired::with_scratch(host, compute, wire, order, SCRATCH)
    }

    /// The same with so many bytes of scratch memory, the same on every rank: sums of more go piece by piece.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_scratch(
        host: &Communicator,
        compute: SharedQueue<Q>,
        wire: W,
        order: Order,
        limit: usize,
    ) -> Result<Self> {
        // Of the device itself: an arena holds what the plan of the training knows.
        let take = |bytes: usize| compute.lock().memory(bytes);
        Wired::with(host, compute.clone(), wire, order, limit, &take)
    }

    /// The same with memory from the arena of `compute`, booked on `account`: [`wired_bytes`] says how much.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn planned(
        host: &Communicator,
        compute: SharedQueue<Q>,
        wire: W,
        order: Order,
        limit: Option<usize>,
        account: &Account,
    ) -> Result<Self> {
        let limit = limit.unwrap_or(SCRATCH);
        let take = |bytes: usize| Ok(compute.clone().memory(bytes)?.booked(account));
        Wired::with(host, compute.clone(), wire, order, limit, &take)
    }

    fn with(
        host: &Communicator,
        compute: SharedQueue<Q>,
        wire: W,
        order: Order,
        limit: usize,
        take: &dyn Fn(usize) -> Result<Memory>,
    ) -> Result<Self> {
        let own = (host.rank(), host.size());
        if wire.group() != own {
            let [own, other] = [own, wire.group()].map(|(rank, size)| format!("rank {rank} of {size}"));
            let problem = format!("a carrier for {own} was given the end of {other} over {}", wire.name());
            return Err(Error::Launch(format!("{problem}: it takes that of its own group")));
        }
        let host = Communicator { carrier: None, ..host.clone() };
        let wire = Arc::new(wire);
        let limit = limit.max(least_scratch(host.size()));
        let [contributions, table, _] = wired_bytes(host.size(), Some(limit));
        let scratch = Buffer::from_memory(take(contributions)?);
        let sums = Sums::new(&compute, || Ok(Buffer::from_memory(take(table)?)))?;
        let lanes = [compute.sibling(Urgency::High)?, compute.sibling(Urgency::Normal)?];
        let slots = Slots::new(&compute)?;
        let watch = Watch::start(&host, Arc::clone(&wire), slots.shared())?;
        let state = State {
            lanes,
            sums,
            slots,
            programs: HashMap::new(),
            scratch,
            addresses: Vec::with_capacity(host.size()),
            messages: Vec::with_capacity(2 * host.size()),
            deferred: Vec::new(),
            prepared: Vec::with_capacity(DType::ALL.len()),
            orphans: Vec::new(),
            settled: false,
            stats: Stats::default(),
        };
        let state = Mutex::new(state);
        let wired = Wired { host, compute, wire, order, limit, state, watch };
        if order == Order::Canonical && wired.host.size() > 1 {
            wired.meet()?;
        }
        Ok(wired)
    }

    fn lock(&self) -> MutexGuard<'_, State<Q>> {
        locked(&self.state)
    }

    /// Does `work` unless the carrier has failed; a failure ends everything.
    fn alive<R>(
        &self,
        state: &mut State<Q>,
        work: impl FnOnce(&Self, &mut State<Q>) -> Result<R>,
    ) -> Result<R> {
        let done = match self.watch.failed() {
            Some(failed) => Err(failed),
            None => work(self, state),
        };
        done.map_err(|error| {
            let error = self.watch.fail(error);
            if !std::mem::replace(&mut state.settled, true) {
                // Nothing may touch the buffers any more once their owners hear of it.
                for queue in state.queues() {
                    let _ = queue.synchronize();
                }
                state.deferred.clear();
                state.orphans.clear();
            }
            error
        })
    }

    fn program(&self, state: &mut State<Q>, call: Call) -> Arc<Program> {
        if let Some(known) = state.programs.get(&call) {
            return Arc::clone(known);
        }
        if state.programs.len() == PROGRAMS {
            state.programs.clear();
        }
        let (rank, size) = (self.host.rank(), self.host.size());
        let program = Arc::new(Program::new(&call, rank, size, self.order, self.limit));
        state.programs.insert(call, Arc::clone(&program));
        program
    }

    /// Gives the call's queue all of its work.
    ///
    /// # Safety
    /// As [`Carrier::start`].
    unsafe fn give(
        &self,
        state: &mut State<Q>,
        id: u32,
        program: &Program,
        call: &Call,
        ends: Ends,
    ) -> Result<()> {
        if program.lane == Lane::Gathers {
            self.flush(state)?;
        }
        let State { lanes, sums, slots, scratch, addresses, messages, prepared, .. } = state;
        // Before any of it is under way: to load a kernel may wait for what the device is at, which may wait for a peer.
        let sums_up = program.steps.iter().any(|step| matches!(step, Step::Reduce { .. }));
        if sums_up && !prepared.contains(&call.dtype) {
            self.compute.clone().prepare(&[Module::reduce(call.dtype)])?;
            prepared.push(call.dtype);
        }
        let queue = &mut lanes[program.lane as usize];
        let slot = slots.slot(id);
        queue.after(&slot.given)?;
        let scratch_at = scratch.view_mut().as_mut_ptr();
        let at = |span: &Span| match span.space {
            Space::Send => ends.send.cast_mut().wrapping_add(span.offset),
            Space::Recv => ends.recv.wrapping_add(span.offset),
            Space::Scratch => scratch_at.wrapping_add(span.offset),
        };
        for step in &program.steps {
            if !matches!(step, Step::Reduce { .. } | Step::Exchange(_, Some(_))) {
                sums.await_all(queue)?;
            }
            match step {
                // SAFETY: both are ranges of the call's buffers or of scratch, by the caller and the plan.
                Step::Copy { from, to } => unsafe {
                    queue.copy(at(from) as u64, at(to) as u64, from.bytes)?;
                },
                Step::Exchange(range, half) => {
                    if let Some(half) = half {
                        sums.await_half(*half, queue)?;
                    }
                    messages.clear();
                    messages.extend(program.messages[range.clone()].iter().map(|m| Message {
                        peer: m.peer,
                        outgoing: m.outgoing,
                        at: at(&m.span),
                        bytes: m.span.bytes,
                    }));
                    // SAFETY: as above; what is received overlaps nothing else, as tests of the plan show.
                    slot.giving(|| unsafe { self.wire.exchange(program.lane, queue, messages) })?;
                }
                Step::Reduce { half, inputs, elements, out } => {
                    addresses.clear();
                    addresses.extend(program.inputs[inputs.clone()].iter().map(|span| at(span) as u64));
                    // SAFETY: as above.
                    unsafe { sums.sum(*half, queue, call, addresses, *elements, at(out))? };
                }
                // SAFETY: by the caller.
                Step::Native => slot.giving(|| unsafe {
                    self.wire.native(program.lane, queue, call, ends.send, ends.recv)
                })?,
            }
        }
        sums.await_all(queue)?;
        queue.record(&slot.done)
    }

    /// Frees buffers that nobody waits for, as far as their calls are done.
    fn sweep(&self, state: &mut State<Q>) -> Result<()> {
        for at in (0..state.orphans.len()).rev() {
            let id = state.orphans[at].0;
            if Q::happened(&state.slots.slot(id).done)? {
                drop(state.orphans.swap_remove(at));
                state.slots.release(id);
            }
        }
        Ok(())
    }
}

impl<Q: Streams> State<Q> {
    /// Everything that calls go on in.
    fn queues(&mut self) -> impl Iterator<Item = &mut Q> {
        self.lanes.iter_mut().chain([self.sums.queue()])
    }
}

// SAFETY: the wire is of the same group; a call's queue comes after what the compute queue was given, and that after the call
// once it is waited for. After a failure the queues have ended what they had.
unsafe impl<Q: Streams, W: Wire<Q>> Carrier for Wired<Q, W> {
    fn name(&self) -> &str {
        self.wire.name()
    }

    fn group(&self) -> (usize, usize) {
        (self.host.rank(), self.host.size())
    }

    fn reaches(&self, place: Place) -> bool {
        place == self.compute.place()
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.compute.clone().memory(bytes)
    }

    unsafe fn start(&self, call: Call, ends: Ends, _: Option<u64>, _: Priority) -> Result<u32> {
        if call.wide && self.order == Order::Native && self.host.size() > 1 && call.dtype.size() == 2 {
            return Err(self.host.argument(
                call.kind.name(),
                format!(
                    "{}'s own sums of {} are rounded to {0}, and unrounded ones were asked for: the canonical order \
                     gives them",
                    call.dtype,
                    self.wire.name()
                ),
            ));
        }
        let state = &mut *self.lock();
        self.alive(state, |this, state| {
            this.sweep(state)?;
            if !call.kind.is_message() {
                // Ranks whose calls move as many bytes would get wrong sums, and never hear of it from the wire.
                this.host.handle.shared.lock().note_other(&call)?;
            }
            let program = this.program(state, call);
            let id = state.slots.take::<Q>(&this.compute, call, program.lane)?;
            this.compute.record(&state.slots.slot(id).given)?;
            state.stats.calls += 1;
            state.stats.bytes_sent += call.volume(this.host.rank(), this.host.size()) as u64;
            if call.kind.is_message() && call.count > 0 {
                let outgoing = call.kind == Kind::Send;
                let at = if outgoing { ends.send.cast_mut() } else { ends.recv };
                let message = Message { peer: call.root, outgoing, at, bytes: call.bytes() };
                state.deferred.push((id, message));
                return Ok(id);
            }
            // SAFETY: by the caller.
            state.slots.place(id).giving_all(|| unsafe { this.give(state, id, &program, &call, ends) })?;
            Ok(id)
        })
    }

    fn wait(&self, id: u32) -> Result<()> {
        let state = &mut *self.lock();
        self.alive(state, |this, state| {
            if state.deferred.iter().any(|(deferred, _)| *deferred == id) {
                this.flush(state)?;
            }
            this.compute.after(&state.slots.slot(id).done)?;
            state.slots.release(id);
            Ok(())
        })
    }

    fn is_done(&self, _: u32) -> bool {
        // The host goes on, and so does what was deferred.
        let state = &mut *self.lock();
        let _ = self.alive(state, |this, state| this.flush(state));
        true
    }

    fn abandon(&self, id: u32, buffers: Box<dyn Any + Send>) {
        let state = &mut *self.lock();
        let kept = self.alive(state, |this, state| {
            state.orphans.push((id, buffers));
            this.flush(state)?;
            this.sweep(state)
        });
        // After a failure nothing uses them any more.
        drop(kept);
    }

    fn progress(&self) -> Result<()> {
        let state = &mut *self.lock();
        self.alive(state, |this, state| {
            this.flush(state)?;
            this.sweep(state)?;
            this.wire.check()
        })
    }

    fn abort(&self, why: &str) {
        self.watch.fail(Error::GivenUp(why.to_owned()));
    }

    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats {
        self.lock().stats.and(&host())
    }

    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Arc<dyn Carrier>>> {
        let part = || {
            // NCCL wants nothing under way. Messages that it has not been given stay: peers may come to them only afterwards.
            self.alive(&mut self.lock(), |_, state| state.queues().try_for_each(Queue::synchronize))?;
            let wire = self.wire.split(host, color)?;
            let (Some(host), Some(wire)) = (host, wire) else { return Ok(None) };
            let (compute, limit) = (self.compute.clone(), self.limit);
            Ok(Some(
                Arc::new(Wired::with_scratch(host, compute, wire, self.order, limit)?) as Arc<dyn Carrier>
            ))
        };
        // The others wait for this rank.
        part().map_err(|why| self.watch.fail(why))
    }
}

impl<Q: Streams, W: Wire<Q>> Drop for Wired<Q, W> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // That is no good order to leave in.
            self.watch.fail(Error::GivenUp("it panicked".into()));
        }
        let state = &mut *self.lock();
        let ended = self.alive(state, |this, state| {
            this.flush(state)?;
            // The watch ends what peers hold up for too long.
            state.queues().try_for_each(Queue::synchronize)
        });
        if ended.is_ok() {
            state.orphans.clear();
        }
        self.watch.stop();
    }
}
