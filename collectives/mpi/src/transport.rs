//! Messages over MPI, whichever library the program was built against.
//!
//! rsmpi starts MPI and gives its C interface; messages go as bytes through `MPI_Isend`, `MPI_Irecv` and `MPI_Test`
//! on communicators of our own, whose errors come back as codes with MPI's own text. MPI is asked for
//! `MPI_THREAD_SERIALIZED`, and a lock makes callers take turns; where a library grants less, or the caller wants no more
//! ([`Start::one_thread`]), only the thread that started it may use the transport.
//!
//! A rank that fails tells its peers and ends without `MPI_Finalize`, which would wait for them; the launcher then
//! ends the job. A rank that panics calls `MPI_Abort` after the panic's message. When the last transport goes in
//! order, MPI is finalised.

mod aside;
mod blocked;
mod codes;
mod comm;
mod control;
mod failures;
mod fatal;
mod library;
mod members;
pub mod native;
mod requests;
mod route;
mod session;
mod unreceived;

use crate::eager::Eager;
use crate::tags::{LEAST_LIMIT, Mapped, Tags};
use blocked::Place;
pub use blocked::Start;
use collectives::transport::farewell::Farewells;
use collectives::transport::{
    HEARSAY, Request, Tag, Tells, Transport, Wait, Waits, admit, place_among, wrong_call, wrong_length,
};
use collectives::{Error, Result, digest};
use comm::Comm;
pub use library::{family, library};
use mpi::ffi;
use requests::{Outcome, Requests};
use route::{Comms, Kind, Route};
use session::Session;
use std::os::raw::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What worlds, groups of all ranks, are numbered after, as others are after the group that they are formed out of.
const WORLD: u64 = 1;
/// Bytes of one of MPI's messages at most: its counts are `int`.
const CHUNK: usize = 1 << 30;

/// MPI between the ranks of one group, of which there can be some 1000 in all with MPICH, and 13000 with Open MPI:
/// communicators stay until MPI ends.
pub struct MpiTransport {
    rank: usize,
    /// The ranks of this group in the job.
    members: Vec<c_int>,
    /// Tells this group's words from those of others.
    identity: u64,
    messages: Comm,
    /// Whether the library has to be kept from receiving more than was posted.
    guarded: bool,
    /// What it sends at once then.
    eager: Eager,
    requests: Requests,
    /// Set by the first loss; nothing new is posted from then on.
    lost: Option<Error>,
    farewells: Farewells,
    /// No message is under way any more, and none will be.
    closed: bool,
}

// SAFETY: the handles are of the process; `&mut self` and the session's turns keep calls apart. Addresses of buffers
// are those that callers of `send` and `recv` have vouched for.
unsafe impl Send for MpiTransport {}

impl MpiTransport {
    /// All ranks of the job, in MPI's order. Starts MPI in this process unless a transport already has. All ranks call
    /// this together. Inside some calls MPI waits for other ranks; where that goes wrong the process ends, as [`Start`]
    /// says, because nothing else leads out of them.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where MPI was finalised or started by something else; [`Error::Library`] with MPI's text.
    pub fn world(start: &Start) -> Result<Self> {
        let session = Session::start(start)?;
        let _watch = session.watch_of(Place::Communicator)?;
        // SAFETY: a predefined communicator.
        let messages = Comm::duplicate(&session, unsafe { ffi::RSMPI_COMM_WORLD })?;
        let (_, size) = messages.rank_and_size()?;
        // Each has a number of its own: what is said as one is left is not about another.
        let identity = digest([WORLD, session.control().forms(WORLD)]);
        Self::over(messages, (0..size as c_int).collect(), identity)
    }

    /// The name that MPI has for this host.
    ///
    /// # Errors
    /// When the name is not UTF-8.
    pub fn processor(&self) -> Result<String> {
        let _turn = self.session().turn()?;
        let name = mpi::environment::processor_name();
        name.map_err(|e| self.session().error_text("MPI_Get_processor_name", e.to_string()))
    }

    /// MPI's own collectives over the same ranks, for comparison. All ranks of the group call this together.
    ///
    /// # Errors
    /// MPI's.
    pub fn native(&self) -> Result<native::Native> {
        let watch = self.session().watch()?;
        let comm = {
            let _inside = watch.enter(Place::Communicator);
            Comm::duplicate(self.session(), self.messages.raw)?
        };
        Ok(native::Native::new(comm, self.rank, self.members.len(), watch))
    }

    /// Splits messages above `bytes`, the same on all ranks; for tests of what otherwise takes gigabytes.
    #[doc(hidden)]
    pub fn split_above(&mut self, bytes: usize) {
        self.requests.chunk = bytes.clamp(1, CHUNK);
    }

    /// Tells only so many calls apart; for tests of what otherwise takes thousands.
    #[doc(hidden)]
    pub fn narrow(&mut self, window: u64) {
        self.requests.tags.window = window.min(self.requests.tags.window);
    }

    /// Says that a failure of some group was expected and is over, so that MPI is finalised in the end after all.
    #[doc(hidden)]
    pub fn forgive(&self) {
        self.session().forgive();
    }

    /// How many words of other ranks nobody has taken yet; for tests of what would else take many groups.
    #[doc(hidden)]
    pub fn untaken_words(&self) -> usize {
        self.session().control().untaken()
    }

    fn over(messages: Comm, members: Vec<c_int>, identity: u64) -> Result<Self> {
        let session = messages.session().clone();
        let guarded = family().overruns();
        let (rank, size) = messages.rank_and_size()?;
        let limit = messages.tag_limit()?;
        if limit < LEAST_LIMIT {
            let why = format!(
                "{} takes tags up to {limit}; {} are needed (MPIR_CVAR_CH4_OFI_TAG_BITS gives MPICH and its like more)",
                session.library(),
                LEAST_LIMIT
            );
            return Err(Error::Unavailable { name: "mpi".into(), why });
        }
        // All ranks make them in the same order. They stay until MPI ends, like every communicator.
        let another = || Ok::<_, Error>(Comm::duplicate(&session, messages.raw)?.raw);
        let guard = |small| Ok::<_, Error>(if guarded { another()? } else { small });
        let users = another()?;
        let users = Comms { small: users, large: guard(users)?, exact: None };
        let exact = if guarded { Some(another()?) } else { None };
        let collectives = Comms { small: messages.raw, large: guard(messages.raw)?, exact };
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Ok(MpiTransport {
            rank,
            members,
            identity,
            messages,
            guarded,
            eager: Eager::of(variables),
            requests: Requests::new(Tags::new(limit, guarded), rank, [collectives, users], CHUNK),
            lost: None,
            farewells: Farewells::none(size),
            closed: false,
        })
    }

    fn session(&self) -> &Arc<Session> {
        self.messages.session()
    }

    fn check_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        admit(call, self.job_rank(self.rank), peer, self.members.len())
    }

    /// What `peer`, a member, has done to this rank.
    fn loss(&self, peer: usize, how: impl Into<String>) -> Error {
        Error::PeerLost { rank: self.job_rank(self.rank), peer: self.job_rank(peer), how: how.into() }
    }

    /// Where a message goes.
    #[inline(always)]
    fn route(&mut self, call: &'static str, peer: usize, of: Tag, bytes: usize) -> Result<Route> {
        if self.lost.is_some() || peer >= self.members.len() {
            self.check_peer(call, peer)?;
        }
        let (tag, user) = match self.requests.tags.map(of) {
            Ok(Mapped::Collective(tag)) => (tag, false),
            Ok(Mapped::User(tag)) => (tag, true),
            Err(problem) => return Err(Error::Argument { call, rank: self.job_rank(self.rank), problem }),
        };
        let limit = match (self.guarded, peer == self.rank) {
            (false, _) => usize::MAX,
            (true, false) => self.eager.to_others,
            (true, true) => self.eager.to_self,
        };
        let one = self.guarded && peer != self.rank && bytes > limit && bytes <= self.requests.chunk;
        let exactly = if one { self.requests.tags.exact(of, bytes) } else { None };
        Ok(Route { of, tag, exactly: exactly.unwrap_or(-1), limit, user })
    }

    /// What the end of a message means.
    fn completed(&mut self, done: Outcome) -> Result<bool> {
        let Outcome { kind, peer, bytes, length, code, called } = done;
        if let Some(called) = called {
            return Err(wrong_call(self, peer, called));
        }
        let (rank, peer) = (self.job_rank(self.rank), self.job_rank(peer));
        let fine = code == codes::OK;
        if fine && (kind == Kind::Send || length == bytes) {
            return Ok(true);
        }
        let truncated = !fine && codes::is_truncation(code);
        if kind == Kind::Recv && (fine || truncated) {
            if truncated && !self.guarded {
                // Such a message is dropped whole, so nothing here tells what the peer called. If it was the peer's turn
                // to receive as well, it got the shorter message, knows more, and says so in a moment.
                let until = Instant::now() + HEARSAY;
                while Instant::now() < until {
                    self.check()?;
                }
            }
            return Err(wrong_length(rank, bytes, peer, (!truncated).then_some(length)));
        }
        // A loss that explains the failure is the better message.
        self.check()?;
        let (call, way) = match kind {
            Kind::Send => ("MPI_Isend", "to"),
            Kind::Recv => ("MPI_Irecv", "from"),
        };
        Err(self
            .session()
            .error_text(call, format!("{bytes} bytes {way} rank {peer}: {}", codes::text(code))))
    }
}

// SAFETY: MPI has ended what it reports as ended, and a closed transport has cancelled the rest or leaves MPI for good.
unsafe impl Transport for MpiTransport {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn job_rank(&self, member: usize) -> usize {
        self.members[member] as usize
    }

    fn frame(&self) -> usize {
        // A message that is not sent at once gains nothing by being copied.
        if self.guarded { self.eager.to_others.saturating_sub(size_of::<u64>()) } else { usize::MAX }
    }

    fn tells(&self) -> Tells {
        Tells::Collectives
    }

    fn most_tag(&self) -> u32 {
        self.requests.tags.limit as u32
    }

    fn window(&self) -> u64 {
        self.requests.tags.window
    }

    fn one_memory(&mut self) -> bool {
        // No MPI says how it carries messages; within a host it is told to use a network only by hand.
        self.session().one_host()
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        let route = self.route("send", to, tag, bytes)?;
        let session = self.messages.session();
        let _turn = session.turn()?;
        // SAFETY: the caller's promise.
        unsafe { self.requests.send(session, to, route, src, bytes) }
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        // SAFETY: the caller's promise.
        unsafe { self.recv_awaited(from, tag, dst, bytes, 0) }
    }

    unsafe fn recv_awaited(
        &mut self,
        from: usize,
        tag: Tag,
        dst: *mut u8,
        bytes: usize,
        looks: u32,
    ) -> Result<Request> {
        let route = self.route("recv", from, tag, bytes)?;
        let session = self.messages.session();
        let _turn = session.turn()?;
        // SAFETY: the caller's promise.
        unsafe { self.requests.recv(session, from, route, dst, bytes, looks) }
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        self.test_often(request, 0)
    }

    fn test_often(&mut self, request: Request, looks: u32) -> Result<bool> {
        if request == Request::DONE {
            return Ok(true);
        }
        if let (true, Some(error)) = (self.closed, &self.lost) {
            return Err(error.clone());
        }
        let outcome = {
            let session = self.messages.session();
            let _turn = session.turn()?;
            self.requests.test(session, request, looks)?
        };
        match outcome {
            Some(done) => self.completed(done),
            None => {
                let (kind, peer) = self.requests.with(request);
                match self.farewells.unserved(peer, matches!(kind, Kind::Send)) {
                    Some(how) => Err(self.loss(peer, how)),
                    None => Ok(false),
                }
            }
        }
    }

    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>> {
        place_among(members, self)?;
        // Any number that differs between groups.
        let in_job: Vec<c_int> = members.iter().map(|&m| self.members[m]).collect();
        let same = digest([self.identity, context].into_iter().chain(in_job.iter().map(|&m| m as u64)));
        let identity = digest([same, self.session().control().forms(same)]);
        // Before they meet: who cannot start it turns back while nobody waits for it inside MPI.
        let watch = self.session().watch()?;
        if let Err(e) = self.meet(members, identity, within) {
            self.session().control().forget(identity);
            return Err(e);
        }
        let _inside = watch.enter(Place::Group);
        let mut group = Self::over(Comm::of_members(self.session(), &in_job, identity)?, in_job, identity)?;
        group.requests.chunk = self.requests.chunk;
        Ok(Box::new(group))
    }

    fn check(&mut self) -> Result<()> {
        if self.lost.is_none() {
            self.listen()?;
        }
        if self.lost.is_none() {
            self.look()?;
        }
        match &self.lost {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        Some(self)
    }

    fn abort(&mut self, why: &Error) {
        if !self.closed {
            self.fail_with(why);
            self.close();
        }
    }
}

impl Waits for MpiTransport {
    fn note(&mut self, wait: Wait) {
        let session = self.session();
        if let Ok(_turn) = session.turn() {
            session.control().note_wait(session, wait);
        }
    }

    fn ask(&mut self, peer: usize) -> u64 {
        let session = self.session();
        // Where MPI moves no more, nobody answers.
        session.turn().map_or(0, |_turn| session.control().ask(session, peer))
    }

    fn answer(&mut self, peer: usize, asked: u64) -> Option<Wait> {
        self.session().control().answer(peer, asked)
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        self.close();
    }
}
