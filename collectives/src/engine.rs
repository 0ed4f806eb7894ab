//! Carries calls out: several in flight at once, the awaited and urgent ones first, never blocking inside a step.
//!
//! All ranks start the same collectives in the same order; they may finish in any. Each start does at once what
//! can be done without a peer, so that peers need not wait for this rank to look again. Further progress is made
//! by whoever waits, in this group or in one of its family, by [`progress`](crate::Communicator::progress), and by a
//! thread if one was asked for.

mod diverged;
mod execute;
mod family;
mod flight;
mod history;
mod inquiry;
mod lock;
mod options;
mod order;
mod posted;
mod recorder;
mod scratch;
mod shared;
mod stats;
mod stream;
mod work;

use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::ledger::Account;
use crate::schedule::{Algorithm, Cache, Call, Choice, Group, Kind, Local, Schedule, choose};
use crate::trace::{Of, Trace};
use crate::transport::{LISTED, Transport};
use crate::watch::Waited;
use execute::{Env, Outcome};
pub(crate) use family::{Family, Member, Served};
pub use flight::Ends;
use flight::{Flight, Stage};
use history::History;
use lock::Holds;
pub use options::{Options, Priority, Progress};
use order::Sorted;
pub(crate) use scratch::PAGE;
use scratch::{Pool, READY};
pub use scratch::{ready_bytes, scratch_bytes};
pub(crate) use shared::{Handle, Shared};
pub use stats::Stats;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use stream::Past;

/// Bytes after which calls of higher priority get a look, when there are several.
const QUANTUM: usize = 512 << 10;
/// After so many calls ranks that never wait for long look whether one is lost, and answer those that leave.
const LOOKED_AFTER: u64 = 1024;
/// How long calls that nobody waits for may still take when the last handle goes.
const GRACE: Duration = Duration::from_secs(5);

pub(crate) struct Engine {
    transport: Box<dyn Transport>,
    group: Group,
    options: Options,
    flights: Vec<Flight>,
    free: Vec<u32>,
    /// Messages that each of them has room for; more, once it has had a call with more.
    posted: usize,
    /// Calls in flight, in the order of their start.
    order: Vec<u32>,
    sorted: Sorted,
    /// Those of them that have no scratch yet, likewise.
    waiting: VecDeque<u32>,
    cache: Cache,
    forced: [Option<Algorithm>; Kind::ALL.len()],
    /// Collectives started so far.
    sequence: u64,
    /// Collectives that the transport can tell apart while they are under way.
    window: u64,
    history: History,
    /// Rounds published so far.
    rounds: u64,
    pool: Pool,
    pointers: Vec<*const u8>,
    /// How often a waiting rank looks again at once before it does anything else.
    looks: u32,
    /// Which results go past the caches.
    past: Past,
    /// A progress thread does the work that nobody waits for.
    threaded: bool,
    /// How far calls had got when nobody who waits was last asked for that, and since when.
    quiet: Option<(u64, Waited)>,
    /// Whether what its calls wait for is what this rank waits for: not those of who watches a rank, and goes on while it
    /// stands still.
    pub speaks: bool,
    failed: Option<Error>,
    stats: Stats,
    /// Who wants to know when calls began and ended.
    pub trace: Option<Trace>,
}

// SAFETY: the raw pointers are to buffers that belong to calls in flight; who owns those (`Pending`, a blocking
// caller, or the engine itself) keeps them until the call is done, and any thread may copy to and from them. Schedules
// that are counted without atomics are counted by this engine's cache and calls only, which move together.
unsafe impl Send for Engine {}

impl Engine {
    fn new(mut transport: Box<dyn Transport>, mut options: Options) -> Self {
        options.tuning.frame = options.tuning.frame.min(transport.frame());
        let direct = transport.direct().map(|d| d.inline_limit());
        let group = Group {
            rank: transport.rank(),
            size: transport.size(),
            direct,
            nodes: transport.nodes().filter(|nodes| nodes.matter()).cloned().map(Arc::new),
            tells: transport.tells(),
            one_memory: transport.one_memory(),
            tuning: options.tuning,
        };
        let pool = Pool::default();
        let past = options.stream.map_or_else(Past::here, Past::From);
        let posted = LISTED.min(2 * group.size);
        let kept = || Memory::host(scratch::kept(group.size)).booked(&pool.account);
        Engine {
            window: transport.window(),
            history: History::new(transport.size()),
            transport,
            flights: (0..READY).map(|_| Flight::new(group.size, posted, Some(kept()))).collect(),
            group,
            options,
            free: (0..READY as u32).rev().collect(),
            posted,
            order: Vec::with_capacity(READY),
            sorted: Sorted::with_room(READY),
            waiting: VecDeque::with_capacity(READY),
            cache: Cache::default(),
            forced: [None; Kind::ALL.len()],
            sequence: 0,
            rounds: 0,
            pool,
            pointers: Vec::with_capacity(64),
            looks: 0,
            past,
            threaded: matches!(options.progress, Progress::Thread { .. }),
            quiet: None,
            speaks: true,
            failed: None,
            stats: Stats::default(),
            trace: None,
        }
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    pub fn scratch_account(&self) -> Account {
        self.pool.account.clone()
    }

    /// Takes now what `calls` will need; see [`scratch_bytes`].
    pub fn reserve(&mut self, calls: &[Call]) -> Result<()> {
        self.pool.reserve(scratch::pieces(&self.group, calls), &mut *self.transport)
    }

    pub fn group(&self) -> Group {
        self.group.clone()
    }

    pub fn alloc(&mut self, bytes: usize) -> Result<Memory> {
        self.transport.alloc(bytes)
    }

    /// A transport over some of the ranks. To fail in that is a failure of this group: others may wait here for this rank,
    /// which has gone about something that they will never hear of.
    pub fn subgroup(&mut self, members: &[usize], context: u64) -> Result<Box<dyn Transport>> {
        let made = self.transport.subgroup(members, context, self.options.deadline);
        made.map_err(|error| self.fail(error))
    }

    pub fn options(&self) -> Options {
        self.options
    }

    pub fn failure(&self) -> Option<&Error> {
        self.failed.as_ref()
    }

    /// Makes every later call of `kind` use `algorithm`; `None` leaves the choice to the tuner.
    pub fn force(&mut self, kind: Kind, algorithm: Option<Algorithm>) -> Result<()> {
        if let Some(algorithm) = algorithm {
            let candidates = Algorithm::candidates(kind, &self.group);
            if !candidates.contains(&algorithm) {
                let known: Vec<&str> = candidates.iter().map(|a| a.name()).collect();
                let problem = format!(
                    "algorithm {algorithm} was asked for, which cannot carry it over {} with {} ranks; \
                     possible: {}",
                    self.transport.name(),
                    self.group.size,
                    known.join(", ")
                );
                let rank = self.transport.job_rank(self.group.rank);
                return Err(Error::Argument { call: kind.name(), rank, problem });
            }
        }
        self.forced[kind as usize] = algorithm;
        self.cache.clear();
        Ok(())
    }

    /// The algorithms that can carry `kind` here.
    pub fn algorithms(&self, kind: Kind) -> &'static [Algorithm] {
        Algorithm::candidates(kind, &self.group)
    }

    /// The schedule that `call` would have with buffers that peers can read where they are, or not.
    pub fn explain(&self, call: Call, registered: bool) -> Schedule {
        let local = Local { send_registered: registered, recv_registered: registered };
        Schedule::new(call, &self.group, local, self.forced[call.kind as usize])
    }

    /// What carries `call`, and why.
    pub fn choice(&self, call: &Call) -> Choice {
        choose(call, &self.group, self.forced[call.kind as usize])
    }

    /// Starts a call and does what can be done at once, or within up to `looks` further looks at what peers do if nothing
    /// else is in flight. A message goes under `tag`; a collective has its own.
    ///
    /// # Safety
    /// The buffers are as long as the schedule of `call` assumes, disjoint unless in place, and stay where they
    /// are, untouched, until the call is done or this engine has failed.
    pub unsafe fn start(
        &mut self,
        call: &Call,
        ends: &Ends,
        tag: Option<u64>,
        priority: Priority,
        looks: u32,
    ) -> Result<u32> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        self.compare_notes()?;
        let local = self.local(call, ends);
        let (group, forced) = (&self.group, self.forced[call.kind as usize]);
        let (posted, flights) = (&mut self.posted, &mut self.flights);
        let schedule = self.cache.get(call, local, || {
            let schedule = Schedule::new(*call, group, local, forced);
            // In all places at once: which of them a later call of a steady step has depends on timing. But of those that
            // have very many few are under way at once.
            *posted = schedule.posted.min(LISTED).max(*posted);
            flights.iter_mut().for_each(|flight| flight.state.posted.reserve(*posted));
            schedule
        });
        let id = self.free.pop().unwrap_or_else(|| {
            self.flights.push(Flight::new(group.size, *posted, None));
            // All may be under way at once, as peers come or not: no later call takes memory for that.
            let calls = self.flights.len();
            self.order.reserve(calls - self.order.len());
            self.sorted.make_room(calls);
            self.waiting.reserve(calls - self.waiting.len());
            calls as u32 - 1
        });
        let flight = &mut self.flights[id as usize];
        let state = &mut flight.state;
        state.reset(group.size, schedule.rounds);
        state.posted.reserve(schedule.posted);
        match state.kept(schedule.scratch).filter(|_| !schedule.scratch_published) {
            Some(kept) => state.scratch_at = kept,
            None if schedule.scratch == 0 => {}
            None => self.waiting.push_back(id),
        }
        (state.send, state.recv) = (ends.send, ends.recv);
        state.fingerprint = schedule.fingerprint;
        state.base = self.rounds;
        state.sequence = self.sequence;
        state.tag = match tag {
            Some(tag) => 1 << 63 | tag,
            None => {
                self.sequence += 1;
                history::number(state.sequence) << 16
            }
        };
        self.rounds += schedule.rounds as u64;
        self.stats.calls += 1;
        self.stats.bytes_sent += schedule.volume as u64;
        (flight.stage, flight.priority, flight.blocked_on) = (Stage::Running, priority, group.rank);
        (flight.inquiry, flight.stuck) = (None, None);
        flight.begun = self.trace.as_ref().map(Trace::begin);
        // A repeated call often finds the schedule where it was: counting references would cost as much as a step.
        if !flight.schedule.as_ref().is_some_and(|last| Rc::ptr_eq(last, schedule)) {
            flight.schedule = Some(Rc::clone(schedule));
        }
        self.order.push(id);
        self.sorted.add(id, flight);
        // With a thread to do the work, a start only tells peers what is ready.
        let quantum = if self.threaded { 0 } else { usize::MAX };
        let called = schedule.fingerprint;
        self.run(id, looks, quantum)?;
        if self.stats.calls.is_multiple_of(LOOKED_AFTER) {
            self.check(None, None)?;
        }
        if tag.is_none() && self.group.size > 1 && self.history.note(called) {
            self.begin_comparison()?;
        }
        Ok(id)
    }

    /// What peers can read where it is. Small inputs are copied anyway.
    fn local(&mut self, call: &Call, ends: &Ends) -> Local {
        let Some(inline) = self.group.direct else { return Local::default() };
        if ends.send_bytes.max(ends.recv_bytes) <= inline {
            return Local::default();
        }
        let direct = self.transport.direct().expect("a transport that had direct access keeps it");
        Local {
            send_registered: direct.registered(ends.send, ends.send_bytes),
            // Only an all_reduce publishes its output.
            recv_registered: call.kind == Kind::AllReduce && direct.registered(ends.recv, ends.recv_bytes),
        }
    }

    /// Runs one call as far as it goes, looking up to `looks` times more for what a peer does if it is the only one, and
    /// copying or reducing about `quantum` bytes, or a little less for one of several calls. True when it could go on.
    fn run(&mut self, id: u32, looks: u32, quantum: usize) -> Result<bool> {
        let others = self.order.len() > 1 || self.history.busy();
        if self.window < u64::MAX && others && self.is_too_far(id) {
            return Ok(false);
        }
        if others && self.overtakes(id) {
            return Ok(false);
        }
        if !self.waiting.is_empty() && !self.equip(id)? {
            return Ok(false);
        }
        let alone = self.order.len() == 1;
        let floor = if alone { u64::MAX } else { self.floor(id) };
        let flight = &mut self.flights[id as usize];
        let schedule = flight.schedule.as_deref().expect("a call in flight has a schedule");
        let mut env = Env {
            transport: &mut *self.transport,
            stats: &mut self.stats,
            pointers: &mut self.pointers,
            quantum: if alone { quantum } else { quantum.min(QUANTUM) },
            worked: 0,
            floor,
            looks: if alone { looks } else { 0 },
            past: self.past,
        };
        match execute::run(schedule, &mut flight.state, &mut env) {
            Ok(Outcome::Done) => {
                self.done(id);
                Ok(false)
            }
            Ok(Outcome::Blocked(peer)) => {
                flight.blocked_on = peer;
                self.sorted.note_posted(id, flight);
                Ok(false)
            }
            Ok(Outcome::Yield) => Ok(true),
            Err(error) => Err(self.fail(error)),
        }
    }

    fn done(&mut self, id: u32) {
        let flight = &mut self.flights[id as usize];
        order::remove(&mut self.order, id);
        self.sorted.remove(id, flight);
        flight.stage = Stage::Done;
        let schedule = flight.schedule.as_deref().expect("a call in flight has a schedule");
        if let (Some(trace), Some(begun)) = (&self.trace, flight.begun) {
            trace.end(Of::Call(schedule.fingerprint), begun);
        }
        if let Some(mut scratch) = flight.state.scratch.take() {
            if schedule.scratch_published {
                scratch.busy_until = Some(flight.state.base + schedule.rounds as u64 - 1);
            }
            self.pool.give_back(scratch);
        }
        if flight.orphan.take().is_some() {
            self.release(id);
        }
    }

    fn release(&mut self, id: u32) {
        self.flights[id as usize].stage = Stage::Free;
        self.free.push(id);
    }

    /// The program gives up: as any other failure.
    pub fn abort(&mut self, why: &str) {
        self.fail(Error::GivenUp(why.to_owned()));
    }

    /// Ends everything: this and every later call fails alike, and peers are told, so that nobody hangs.
    fn fail(&mut self, error: Error) -> Error {
        if let Some(first) = &self.failed {
            return first.clone();
        }
        let error = recorder::with_past(error, self);
        self.transport.abort(&error);
        self.failed = Some(error.clone());
        self.waiting.clear();
        self.sorted.clear();
        for id in std::mem::take(&mut self.order) {
            let flight = &mut self.flights[id as usize];
            flight.stage = Stage::Failed;
            flight.state.scratch = None;
            if flight.orphan.take().is_some() {
                self.release(id);
            }
        }
        error
    }

    /// Moves every call as far as it goes, by priority; `awaited` first, and no further once it is done.
    fn poll(&mut self, awaited: Option<u32>) -> Result<()> {
        if let Some(id) = awaited
            && self.order.len() == 1
        {
            self.compare_notes()?;
            while self.flights[id as usize].stage == Stage::Running && self.run(id, self.looks, usize::MAX)? {
            }
            return Ok(());
        }
        while self.turn(awaited)? {}
        Ok(())
    }

    /// Gives calls a turn, by priority, until one of them has worked for a quantum: then true, because those before
    /// it should have another look.
    fn turn(&mut self, awaited: Option<u32>) -> Result<bool> {
        self.compare_notes()?;
        for class in 0..3 {
            let mut at = 0;
            while let Some(&id) = self.order.get(at) {
                let of = match (awaited == Some(id), self.flights[id as usize].priority) {
                    (true, _) => 0,
                    (_, Priority::High) => 1,
                    (_, Priority::Low) => 2,
                };
                if of == class {
                    if self.run(id, 0, QUANTUM)? {
                        return Ok(true);
                    }
                    if awaited == Some(id) && self.flights[id as usize].stage == Stage::Done {
                        return Ok(false);
                    }
                }
                // A call that is done has left the list.
                at += usize::from(self.order.get(at) == Some(&id));
            }
        }
        Ok(false)
    }

    /// Lets calls that nobody waits for get further, when no more can come; gives up, aloud, when that has taken `so_far`
    /// and too long. Whether any are left.
    fn runs_out(&mut self, so_far: Duration) -> bool {
        if self.failed.is_some() {
            return false;
        }
        // Nothing but published scratch, a call in flight or what a neighbour is to compare can hold this rank up.
        let idle = self.order.is_empty() && !self.owes_a_comparison();
        if idle && self.pool.can_be_left(&mut *self.transport) {
            return false;
        }
        if self.poll(None).is_err() || self.check(None, None).is_err() {
            return false;
        }
        let after = GRACE.min(self.options.deadline);
        if so_far <= after {
            self.transport.park(Duration::from_millis(1));
            return true;
        }
        if let Some(&id) = self.order.first() {
            let peer = self.transport.job_rank(self.waited_for(id));
            let error = self.timeout(id, ", dropped without a wait,", peer, after, &[]);
            self.fail(error);
        }
        false
    }
}

impl Holds for Engine {
    /// A transport that panics has not ended what it was given, whose memory goes as its owners unwind: the failure that
    /// becomes of it ends that first.
    fn left_by_a_panic(&mut self) {
        self.fail(Error::GivenUp("it panicked in a call".into()));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.pool.leak_busy(&mut *self.transport);
        }
    }
}
