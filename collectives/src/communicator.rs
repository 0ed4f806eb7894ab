//! The ranks of one group and everything they can do together.
//!
//! Every length, root and place is checked here, once; what lies below works on addresses.

mod alone;
mod blocking;
mod carrier;
mod check;
mod staged;
mod started;
pub(crate) mod wired;

pub use alone::Alone;
pub use carrier::Carrier;
pub(crate) use carrier::End;
pub use staged::{Staged, staged_bytes, staged_call, staged_length};
pub use wired::{Lane, Message, Order, Wire, Wired, wired_bytes};

use crate::buffer::Buffer;
use crate::element::Element;
use crate::engine::{Family, Handle, Options, Priority, Stats};
use crate::error::{Error, Result};
use crate::ledger::Account;
use crate::schedule::{Algorithm, Call, Choice, Group, Kind, Schedule, Tuning};
use crate::trace::Trace;
use crate::transport::{Nodes, Transport, threads};
use crate::watch::MAX_SIZE;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

/// A group of ranks that call collectives together. All ranks of the group make the same collective calls in the
/// same order; messages ([`send`](Self::send), [`recv`](Self::recv)) are between two ranks and apart from that.
///
/// Blocking calls borrow slices, views or buffers; `start_…` calls take buffers and return a
/// [`Pending`](crate::Pending) that gives them back. Results are the same bits on every transport and for every
/// algorithm (see [`reduce`](crate::reduce)).
///
/// An argument that does not fit ([`Error::Argument`]) is refused before anything moves: nobody is told, and the
/// communicator stays usable. After any other error of a call it is unusable: peers are told, and each later call returns
/// the same error; memory that cannot be had ([`alloc`](Self::alloc), [`reserve`](Self::reserve)) breaks nothing. A peer that
/// has not heard of it yet may still read what a call was given: who goes on after an error leaves those buffers as they are.
///
/// Calls of a group and of those made from it may be in flight at once, and each rank awaits them in any order: who waits
/// for one moves all of them. Where devices reach each other, a message between them goes once somebody waits for it, asks
/// after it or calls [`progress`](Self::progress); until then no peer can have it. There, messages and gathers of a group
/// go over one lane: two ranks come to those between them, and to the gathers, in one order. All messages that a rank has
/// started when somebody waits for one of them go together, and are over together; none is under way at a
/// [`split`](Self::split).
///
/// Ranks whose calls differ hear of it, with both calls. Where nobody waits for the rank that calls something else, as for
/// that of two roots of a broadcast, they hear of it after every 64 collectives of the group, and of those after the last
/// 64 not at all.
///
/// Cloning is cheap and gives another handle on the same group.
#[derive(Clone)]
pub struct Communicator {
    handle: Arc<Handle>,
    rank: usize,
    size: usize,
    /// The rank in the job of each rank.
    job_ranks: Arc<[usize]>,
    transport: Arc<str>,
    nodes: Option<Arc<Nodes>>,
    /// The largest tag of a message.
    most_tag: u32,
    priority: Priority,
    /// Of calls whose buffers lie on a device.
    carrier: Option<Arc<dyn Carrier>>,
}

impl Communicator {
    /// A communicator over any transport.
    pub fn new(transport: Box<dyn Transport>, options: Options) -> Result<Communicator> {
        Self::among(Arc::default(), transport, options)
    }

    /// Whose calls are moved on by whoever waits in a group of this family.
    fn among(family: Arc<Family>, transport: Box<dyn Transport>, options: Options) -> Result<Communicator> {
        let (rank, size, name) = (transport.rank(), transport.size(), Arc::from(transport.name()));
        if size > MAX_SIZE {
            return Err(Error::Launch(format!(
                "{size} ranks were asked for; at most {MAX_SIZE} can be one group"
            )));
        }
        let job_ranks = (0..size).map(|member| transport.job_rank(member)).collect();
        let most_tag = transport.most_tag();
        let nodes = transport.nodes().cloned().map(Arc::new);
        let handle = Arc::new(Handle::new(transport, options, family)?);
        let priority = Priority::default();
        let (transport, carrier) = (name, None);
        Ok(Communicator { handle, rank, size, job_ranks, transport, nodes, most_tag, priority, carrier })
    }

    /// `n` ranks for as many threads of this process; element r is rank r's.
    ///
    /// # Panics
    /// With more than [`MAX_SIZE`].
    pub fn threads(n: usize) -> Vec<Communicator> {
        Self::threads_with(n, Options::default()).expect("as many ranks as one group can have")
    }

    /// The same with options. Fails when a progress thread cannot be started.
    pub fn threads_with(n: usize, options: Options) -> Result<Vec<Communicator>> {
        threads::group(n).into_iter().map(|t| Communicator::new(Box::new(t), options)).collect()
    }

    /// What `body` gives on each of `n` ranks, threads of this process that end here; element r is rank r's.
    ///
    /// # Panics
    /// As `body` does on the first rank where it does, once all have ended. With more than [`MAX_SIZE`], or where a progress
    /// thread cannot be started.
    pub fn on_threads<R: Send>(
        n: usize,
        options: Options,
        body: impl Fn(Communicator) -> R + Sync,
    ) -> Vec<R> {
        let ranks = Self::threads_with(n, options).expect("a group of threads");
        let body = &body;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
            let end =
                |rank: ScopedJoinHandle<'_, R>| rank.join().unwrap_or_else(|panic| resume_unwind(panic));
            ranks.into_iter().map(end).collect()
        })
    }

    /// The rank in the job of `member`, a rank of this group: errors name ranks by it.
    ///
    /// # Panics
    /// Where the group has no such rank.
    pub fn job_rank(&self, member: usize) -> usize {
        self.job_ranks[member]
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The name of what moves the bytes.
    pub fn transport_name(&self) -> &str {
        &self.transport
    }

    /// What it was made with.
    pub fn options(&self) -> Options {
        self.handle.shared.lock().options()
    }

    /// Which ranks share a node; None where the transport makes no difference between nodes.
    pub fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_deref()
    }

    /// The same group, whose calls with buffers on a device `carrier` takes. [`alloc`](Self::alloc) then gives memory of
    /// that device; calls with buffers of the host go over the transport as before.
    ///
    /// # Panics
    /// The carrier is of another rank or of a group of another size, by which it would read and write past buffers.
    pub fn with_carrier(self, carrier: Arc<dyn Carrier>) -> Communicator {
        let (rank, size) = carrier.group();
        assert_eq!(
            (rank, size),
            (self.rank, self.size),
            "rank and size of {} and of its group",
            carrier.name()
        );
        Communicator { carrier: Some(carrier), ..self }
    }

    /// Who carries calls with buffers on a device, if anyone does.
    pub fn carrier(&self) -> Option<&Arc<dyn Carrier>> {
        self.carrier.as_ref()
    }

    /// Zeroed memory that the transport moves fastest, or the carrier if there is one.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            return Err(self.argument("alloc", format!("{len} elements of {} exceed all memory", T::DTYPE)));
        };
        Ok(Buffer::from_memory(match &self.carrier {
            Some(carrier) => carrier.alloc(bytes)?,
            None => self.handle.shared.lock().alloc(bytes)?,
        }))
    }

    /// A handle on the same group whose started calls have this priority. Calls that somebody waits for go
    /// first in any case.
    pub fn with_priority(&self, priority: Priority) -> Communicator {
        Communicator { priority, ..self.clone() }
    }

    /// Moves started calls forward without waiting for anything, also those of groups made from this one or with it; those
    /// of a group with [`Progress::Thread`](crate::Progress::Thread) are that thread's.
    /// Fails when this communicator has failed, or a peer is gone.
    pub fn progress(&self) -> Result<()> {
        if let Some(carrier) = &self.carrier {
            carrier.progress()?;
        }
        self.handle.shared.progress()
    }

    /// From now on calls of this group go to `trace`, or to none: those that its engine carries, and not the [`Carrier`] of a
    /// device.
    pub fn trace(&self, trace: Option<&Trace>) {
        self.handle.shared.lock().trace = trace.cloned();
    }

    /// Gives the group up, because of something that has nothing to do with it: peers learn why, instead of waiting for
    /// this rank, and every later call fails with the same reason.
    pub fn abort(&self, why: &str) {
        self.handle.shared.lock().abort(why);
        if let Some(carrier) = &self.carrier {
            carrier.abort(why);
        }
    }

    /// What this communicator has done so far.
    pub fn stats(&self) -> Stats {
        let host = || self.handle.shared.stats();
        self.carrier.as_ref().map_or_else(host, |carrier| carrier.stats(&host))
    }

    /// Bytes of the engine's own memory: fingerprints, staging and contributions on their way.
    pub fn scratch(&self) -> Account {
        self.handle.shared.lock().scratch_account()
    }

    /// Takes now the engine's memory for `calls` with buffers from [`alloc`](Self::alloc), however many of them are in
    /// flight at once: [`scratch_bytes`](crate::scratch_bytes) says how much it holds then, with none of `calls` if a
    /// carrier takes them to others than the engine. Other calls may still take more, and so do more than two messages at a
    /// time, which wait for nobody.
    ///
    /// # Errors
    /// [`Error::Argument`] for a call that cannot be made here, [`Error::System`] where the system refuses the memory.
    pub fn reserve(&self, calls: &[Call]) -> Result<()> {
        calls.iter().try_for_each(|call| self.possible(call))?;
        let Some(carrier) = &self.carrier else { return self.handle.shared.lock().reserve(calls) };
        carrier.reserve(calls)?;
        // What is not a device's still goes by the engine.
        self.handle.shared.lock().reserve(&[])
    }

    /// This rank's place, and what schedules depend on beside it.
    pub fn group(&self) -> Group {
        self.handle.shared.lock().group()
    }

    /// Makes every later call of `kind` use `algorithm`; `None` leaves the choice to the tuner, as at the start.
    /// All ranks do this together, with no call on buffers of a device under way, nor one that was started after such: what
    /// the host carries for a device it starts at a time of its own. Fails when the algorithm cannot carry that kind here.
    pub fn force(&self, kind: Kind, algorithm: Option<Algorithm>) -> Result<()> {
        self.handle.shared.lock().force(kind, algorithm)
    }

    /// The algorithms that can carry `kind` here: what [`force`](Self::force) accepts.
    pub fn algorithms(&self, kind: Kind) -> &'static [Algorithm] {
        self.handle.shared.lock().algorithms(kind)
    }

    /// What this rank would do in `call`, step by step, which algorithm carries it, and why; `registered` tells
    /// whether the buffers come from [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// [`Error::Argument`] for a call that cannot be made here.
    pub fn explain(&self, call: Call, registered: bool) -> Result<Schedule> {
        self.possible(&call)?;
        Ok(self.handle.shared.lock().explain(call, registered))
    }

    /// Which algorithm carries `call` here, and why: what [`explain`](Self::explain) says, without its steps.
    ///
    /// # Errors
    /// [`Error::Argument`] for a call that cannot be made here.
    pub fn choice(&self, call: &Call) -> Result<Choice> {
        self.possible(call)?;
        Ok(self.handle.shared.lock().choice(call))
    }

    /// A communicator for all ranks that gave the same color, ordered by key and then by rank; `None` for a rank
    /// that gave no color. Every rank of this communicator takes part. A tuning table's rules stay with a group of as many
    /// ranks on the same nodes. Over MPI, which forms one group at a time, the
    /// threads of a rank come to their groups in the same order on all ranks; and what a group takes of MPI is never given
    /// back, so that a rank can be in some 1000 groups in all with MPICH, and in 13000 with Open MPI.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Communicator>> {
        self.split_into(self.handle.shared.family(), color, key)
    }

    /// The same ranks as a group whose calls nobody moves on but who makes them: somebody is always at it, and that it moves
    /// says nothing about others.
    pub(crate) fn apart(&self) -> Result<Communicator> {
        let all = self.split_into(Arc::default(), Some(0), self.rank as i64)?;
        let all = all.expect("a rank that gave a color is in a group");
        all.handle.shared.lock().speaks = false;
        Ok(all)
    }

    fn split_into(&self, family: Arc<Family>, color: Option<u32>, key: i64) -> Result<Option<Communicator>> {
        // Whatever the lowest member draws names the new group, apart from every other that ever was.
        let nonce = RandomState::new().build_hasher().finish() as i64;
        let mine = [i64::from(color.is_some()), i64::from(color.unwrap_or(0)), key, nonce];
        let mut all = vec![0i64; 4 * self.size];
        self.all_gather(&mine[..], &mut all[..])?;
        let rows: Vec<&[i64]> = all.chunks(4).collect();
        let host = self.split_host(family, color, rows)?;
        let Some(carrier) = &self.carrier else { return Ok(host) };
        match carrier.split(host.as_ref(), color) {
            Ok(Some(carrier)) => Ok(host.map(|host| host.with_carrier(carrier))),
            Ok(None) => Ok(host),
            Err(error) => {
                // The others may have their part, and wait for this rank in its calls.
                let why = error.to_string();
                host.inspect(|host| host.abort(&why));
                self.abort(&why);
                Err(error)
            }
        }
    }

    /// The communicator over the host's transport of the ranks whose row (colored, color, key, nonce) has this color.
    fn split_host(
        &self,
        family: Arc<Family>,
        color: Option<u32>,
        rows: Vec<&[i64]>,
    ) -> Result<Option<Communicator>> {
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<usize> =
            (0..self.size).filter(|&r| rows[r][..2] == [1, i64::from(color)]).collect();
        let context = rows[members[0]][3] as u64;
        members.sort_by_key(|&r| (rows[r][2], r));
        let mut engine = self.handle.shared.lock();
        let transport = engine.subgroup(&members, context)?;
        let mut options = engine.options();
        drop(engine);
        if members.len() != self.size || transport.nodes() != self.nodes() {
            // What was measured is of other ranks.
            options.tuning.measured = Tuning::default().measured;
        }
        Communicator::among(family, transport, options).map(Some)
    }

    /// How long a peer may be silent.
    pub(crate) fn deadline(&self) -> std::time::Duration {
        self.options().deadline
    }

    pub(crate) fn argument(&self, call: &'static str, problem: String) -> Error {
        Error::Argument { call, rank: self.job_rank(self.rank), problem }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {} over {})", self.rank, self.size, self.transport)
    }
}
