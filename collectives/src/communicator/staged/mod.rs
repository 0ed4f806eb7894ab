//! Carries a device's calls through page-locked memory of the host and the host's own transport.
//!
//! A call goes through three stages: copied down by one queue, exchanged by the host's engine, copied up by another. The
//! compute queue waits for none of them but the last, and that only once somebody waits for the call; so copies,
//! exchanges and computation go on side by side. Where a plan has said how large calls are, they share a fixed number of
//! places in memory of the host, and a call that finds none free is copied down once an earlier one has given its back.
//! To start a call waits for nobody, and who waits for one leaves the carrier to others meanwhile: a peer may wait for
//! something else of this rank first.

mod calls;
mod flight;
mod pieces;
mod pool;

use super::Communicator;
use crate::device::{SharedQueue, Streams, Urgency};
use crate::engine::{Member, Served, Stats};
use crate::error::{Error, Result};
use crate::ledger::Account;
use crate::locked;
use crate::watch::Waited;
use flight::{Copies, Flight, Job, Stage};
pub use flight::{staged_call, staged_length};
pub use pool::staged_bytes;
use pool::{Pool, Staging};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Calls in flight that there are places for from the start.
const READY: usize = 32;
/// How long calls that nobody waits for may still take when the carrier is dropped.
const GRACE: Duration = Duration::from_secs(5);

/// Carries calls over the host's transport, for memory of the device whose compute queue is `compute`.
pub struct Staged<Q: Streams>(Arc<Group<Q>>);

/// The same, as the family of its host's group sees it.
struct Group<Q: Streams> {
    name: String,
    /// The group over the host's transport, without a carrier.
    host: Communicator,
    compute: SharedQueue<Q>,
    state: Mutex<State<Q>>,
    /// How often any call has got from one stage to the next.
    moves: AtomicU64,
}

struct State<Q: Streams> {
    down: Q,
    up: Q,
    flights: Vec<Flight<Q::Event>>,
    free: Vec<u32>,
    /// Collectives that have no place yet in memory of the host, in the order of their start.
    waiting: VecDeque<u32>,
    /// Being copied down, in the order of their start: in this order the host starts them, as every rank does.
    copying: VecDeque<u32>,
    exchanging: Vec<u32>,
    pool: Pool,
    failed: Option<Error>,
    stats: Stats,
}

impl<Q: Streams> Staged<Q> {
    /// A carrier for the group of `host`.
    ///
    /// # Errors
    /// The device gives no more queues or events.
    pub fn new(host: &Communicator, compute: SharedQueue<Q>) -> Result<Self> {
        let host = Communicator { carrier: None, ..host.clone() };
        let mut state = State {
            down: compute.sibling(Urgency::Normal)?,
            up: compute.sibling(Urgency::High)?,
            flights: Vec::with_capacity(READY),
            free: Vec::with_capacity(READY),
            waiting: VecDeque::with_capacity(READY),
            copying: VecDeque::with_capacity(READY),
            exchanging: Vec::with_capacity(READY),
            pool: Pool::default(),
            failed: None,
            stats: Stats::default(),
        };
        for id in (0..READY as u32).rev() {
            state.flights.push(Flight::new(&compute)?);
            state.free.push(id);
        }
        let name = format!("{} through the host", host.transport_name());
        let (state, moves) = (Mutex::new(state), AtomicU64::new(0));
        let group = Arc::new(Group { name, host, compute, state, moves });
        group.host.handle.shared.family().add(&group);
        Ok(Staged(group))
    }

    /// The same with all memory of the host taken now, for calls whose buffers have up to `largest` bytes together, those of one
    /// out of place as [`staged_length`] counts, and booked on `account`: [`staged_bytes`] says how much. Larger calls still take
    /// more.
    ///
    /// # Errors
    /// As [`new`](Self::new), or there is too little memory.
    pub fn planned(
        host: &Communicator,
        compute: SharedQueue<Q>,
        largest: usize,
        account: &Account,
    ) -> Result<Self> {
        let staged = Staged::new(host, compute)?;
        let Group { compute, host, .. } = &*staged.0;
        staged.0.lock().pool.fill(largest, compute, host, account)?;
        Ok(staged)
    }
}

impl<Q: Streams> Group<Q> {
    fn lock(&self) -> MutexGuard<'_, State<Q>> {
        locked(&self.state)
    }

    /// Does `work` unless the carrier has failed; a failure ends everything.
    fn alive<R>(
        &self,
        state: &mut State<Q>,
        work: impl FnOnce(&Self, &mut State<Q>) -> Result<R>,
    ) -> Result<R> {
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        work(self, state).map_err(|error| self.fail(state, error))
    }

    fn fail(&self, state: &mut State<Q>, error: Error) -> Error {
        // Peers that have not heard of it learn why; the host keeps its own first failure.
        self.host.abort(&error.to_string());
        // Nothing may touch the buffers any more once their owners hear of it.
        let _ = (state.down.synchronize(), state.up.synchronize());
        for id in 0..state.flights.len() {
            let flight = &mut state.flights[id];
            if flight.stage == Stage::Exchanging {
                let _ = self.host.handle.shared.wait(flight.host);
            }
            if flight.stage != Stage::Free {
                flight.stage = Stage::Failed;
            }
            if flight.orphan.take().is_some() {
                state.release(id as u32);
            }
        }
        // They stay among what was started.
        let held = self.held(state);
        state.stats = state.stats.and(&held);
        state.waiting.clear();
        state.copying.clear();
        state.exchanging.clear();
        state.failed = Some(error.clone());
        error
    }

    /// Moves every call as far as it goes without waiting.
    fn pump(&self, state: &mut State<Q>) -> Result<()> {
        self.lower_waiting(state)?;
        while let Some(&id) = state.copying.front() {
            let flight = &state.flights[id as usize];
            let copied = flight.job.is_some_and(|job| job.copies.is_some());
            if copied && !Q::happened(&flight.lowered)? {
                break;
            }
            self.exchange(state, id)?;
        }
        for at in (0..state.exchanging.len()).rev() {
            let id = state.exchanging[at];
            let flight = &mut state.flights[id as usize];
            // Nobody else is moved on from here, where everything of this group is locked.
            if self.host.handle.shared.is_over(flight.host) {
                // Whatever comes of it, it is waited for once.
                flight.stage = Stage::Awaited;
                state.exchanging.remove(at);
                self.host.handle.shared.wait(flight.host)?;
                self.raise(state, id)?;
            }
        }
        self.lower_waiting(state)
    }

    /// Has collectives copied down for as long as there are places for them.
    fn lower_waiting(&self, state: &mut State<Q>) -> Result<()> {
        while let Some(&id) = state.waiting.front() {
            let job = state.flights[id as usize].job.as_ref().expect("a call in flight has a job");
            if !state.pool.has_room(job.staging(), job.is_message()) {
                break;
            }
            state.waiting.pop_front();
            self.lower(state, id)?;
        }
        Ok(())
    }

    /// The calls that the host has not been given yet.
    fn held(&self, state: &State<Q>) -> Stats {
        let calls = state.waiting.iter().chain(&state.copying);
        calls.filter_map(|&id| state.flights[id as usize].job).fold(Stats::default(), |held, job| {
            let bytes_sent = job.call.volume(self.host.rank(), self.host.size()) as u64;
            held.and(&Stats { calls: 1, bytes_sent, ..Stats::default() })
        })
    }

    /// Gives a call its place among those that are started.
    fn enter(&self, state: &mut State<Q>, job: Job) -> Result<u32> {
        let id = match state.free.pop() {
            Some(id) => id,
            None => {
                state.flights.push(Flight::new(&self.compute)?);
                // How many wait or copy at once depends on peers: none of the lists takes memory for it later.
                let calls = state.flights.len();
                state.free.reserve(calls - state.free.len());
                state.waiting.reserve(calls - state.waiting.len());
                state.copying.reserve(calls - state.copying.len());
                state.exchanging.reserve(calls - state.exchanging.len());
                calls as u32 - 1
            }
        };
        let flight = &mut state.flights[id as usize];
        (flight.stage, flight.job) = (Stage::Waiting, Some(job));
        if job.copies.is_some() {
            self.compute.record(&flight.given)?;
        }
        // There is always room for a message, which need not come after collectives.
        match job.is_message() {
            true => self.lower(state, id)?,
            false => state.waiting.push_back(id),
        }
        self.pump(state)?;
        Ok(id)
    }

    /// Has a call copied down.
    fn lower(&self, state: &mut State<Q>, id: u32) -> Result<()> {
        self.moves.fetch_add(1, Ordering::Relaxed);
        let State { flights, copying, down, pool, .. } = state;
        let flight = &mut flights[id as usize];
        let job = flight.job.as_ref().expect("a call in flight has a job");
        flight.stage = Stage::Copying;
        let Some(Copies { pieces, layout }) = &job.copies else {
            copying.push_back(id);
            return Ok(());
        };
        let needed = (layout.bytes, job.is_message());
        flight.staging = pool.take(needed, &self.compute, &self.host)?;
        down.after(&flight.given)?;
        if let Some(staging) = &mut flight.staging {
            let piece = pieces.down();
            let (at, to) = (piece.start as u64, staging.start() as u64 + layout.input as u64);
            if !piece.is_empty() {
                // SAFETY: ranges of the call's buffer and of the staging memory, which stay until the call is done.
                unsafe { down.copy(job.ends.send as u64 + at, to + at, piece.len())? };
            }
        }
        down.record(&flight.lowered)?;
        copying.push_back(id);
        Ok(())
    }

    /// Gives the first call that was copied down to the host.
    fn exchange(&self, state: &mut State<Q>, id: u32) -> Result<()> {
        debug_assert_eq!(state.copying.front(), Some(&id));
        self.moves.fetch_add(1, Ordering::Relaxed);
        state.copying.pop_front();
        let flight = &mut state.flights[id as usize];
        let job = flight.job.as_ref().expect("a call in flight has a job");
        let start = flight.staging.as_mut().map_or(std::ptr::dangling_mut(), Staging::start);
        let ends = job.host_ends(start);
        // SAFETY: the staging memory is as long as the buffers are, and this flight's until the host is done.
        let started = unsafe { self.host.handle.shared.start(&job.call, &ends, job.tag, job.priority) };
        flight.host = started?;
        flight.stage = Stage::Exchanging;
        state.exchanging.push(id);
        Ok(())
    }

    /// Copies up what the host has finished.
    fn raise(&self, state: &mut State<Q>, id: u32) -> Result<()> {
        self.moves.fetch_add(1, Ordering::Relaxed);
        let State { flights, down, up, pool, .. } = state;
        let flight = &mut flights[id as usize];
        flight.stage = Stage::Returned;
        let job = flight.job.as_ref().expect("a call in flight has a job");
        if let (Some(mut staging), Some(Copies { pieces, layout })) = (flight.staging.take(), &job.copies) {
            let from = staging.start().wrapping_add(layout.output) as u64;
            for piece in pieces.up() {
                flight.comes_back = true;
                let (at, bytes) = (piece.start as u64, piece.len());
                // SAFETY: ranges of the staging memory and of the call's buffer, which stay until the event that
                // is recorded next.
                unsafe { up.copy(from + at, job.ends.recv as u64 + at, bytes)? };
            }
            up.record(&flight.raised)?;
            // Whatever is copied there next comes after.
            down.after(&flight.raised)?;
            pool.give_back(staging);
        }
        if flight.orphan.is_some() {
            self.end(state, id)?;
            state.flights[id as usize].orphan = None;
            state.release(id);
        }
        Ok(())
    }

    /// The compute queue comes after the call from now on.
    fn end(&self, state: &mut State<Q>, id: u32) -> Result<()> {
        let flight = &mut state.flights[id as usize];
        match std::mem::take(&mut flight.comes_back) {
            true => self.compute.after(&flight.raised),
            false => Ok(()),
        }
    }

    /// Returns once the call has returned to the device, and makes the compute queue come after it.
    fn finish(&self, id: u32) -> Result<()> {
        let mut state = self.lock();
        loop {
            let over = self.alive(&mut state, |this, state| {
                this.pump(state)?;
                let over = state.flights[id as usize].stage == Stage::Returned;
                if over {
                    this.end(state, id)?;
                }
                Ok(over)
            });
            if over? {
                return Ok(());
            }
            state = self.go_on(state, id)?;
        }
    }

    /// Waits for the host's part of `awaited`, where that has begun; for as long as it waits for a place, for the oldest that
    /// has one; else a moment, for what is being copied down or awaited by another thread. Others may use the carrier
    /// meanwhile, and the host, while it waits, moves on what they start.
    fn go_on<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<Q>>,
        awaited: u32,
    ) -> Result<MutexGuard<'a, State<Q>>> {
        let stage_of = |state: &State<Q>, id: u32| state.flights[id as usize].stage;
        let collective = |id: &&u32| state.flights[**id as usize].job.is_some_and(|job| !job.is_message());
        let next = match stage_of(&state, awaited) {
            Stage::Exchanging => Some(awaited),
            Stage::Waiting if state.copying.is_empty() => state.exchanging.iter().find(collective).copied(),
            _ => None,
        };
        let Some(id) = next else {
            drop(state);
            let since = Instant::now();
            let moved = self.host.progress();
            std::thread::yield_now();
            let mut state = self.lock();
            state.stats.exposed_seconds += since.elapsed().as_secs_f64();
            self.alive(&mut state, |_, _| moved)?;
            return Ok(state);
        };
        state.exchanging.retain(|&other| other != id);
        let flight = &mut state.flights[id as usize];
        flight.stage = Stage::Awaited;
        let host = flight.host;
        drop(state);
        // The host counts how long that takes. Another may find the place meanwhile.
        let has_a_place = || id != awaited && stage_of(&self.lock(), awaited) != Stage::Waiting;
        let came = self.host.handle.shared.wait_or(host, has_a_place);
        let mut state = self.lock();
        self.alive(&mut state, |this, state| {
            if came? {
                return this.raise(state, id);
            }
            state.flights[id as usize].stage = Stage::Exchanging;
            state.exchanging.insert(0, id);
            Ok(())
        })?;
        Ok(state)
    }
}

impl<Q: Streams> Member for Group<Q> {
    fn serve(&self) -> Served {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Served { mark: self.moves.load(Ordering::Relaxed), ..Served::default() };
            }
        };
        let _ = self.alive(&mut state, Self::pump);
        // What is being copied down is handed on as soon as it is there, and then the host's group is busy with it.
        let soon = !state.copying.is_empty();
        Served { mark: self.moves.load(Ordering::Relaxed), soon, busy: false }
    }
}

impl<Q: Streams> State<Q> {
    fn release(&mut self, id: u32) {
        self.flights[id as usize].stage = Stage::Free;
        self.free.push(id);
    }
}

impl<Q: Streams> Drop for Group<Q> {
    fn drop(&mut self) {
        let mut waited = Waited::begin();
        let state = &mut *self.lock();
        let under_way = |state: &State<Q>| {
            !(state.waiting.is_empty() && state.copying.is_empty() && state.exchanging.is_empty())
        };
        while state.failed.is_none() && under_way(state) {
            if self.alive(state, |this, state| this.pump(state)).is_err() {
                break;
            }
            if waited.so_far() > GRACE {
                let what = "a call of a device that nobody waits for";
                let gave_up = Error::GivenUp(format!("{what} did not end within {GRACE:?}"));
                self.fail(state, gave_up);
                break;
            }
            // A peer may wait for something of another group first.
            self.host.handle.shared.family().serve_others(self);
            std::thread::yield_now();
        }
        let _ = (state.down.synchronize(), state.up.synchronize());
    }
}
