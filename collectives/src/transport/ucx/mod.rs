//! Messages over UCX: InfiniBand, RoCE, TCP, and on one host shared memory and cross-memory attach, chosen by UCX
//! itself (`UCX_TLS` and `UCX_NET_DEVICES` are respected). The library is opened at run time.
//!
//! One worker per rank, shared by its groups; tagged messages whose tag holds source, group and call. Peers are connected
//! at the start; in jobs of more than 64 ranks at their first message. A lost peer becomes an error in
//! [`check`](Transport::check): on this host its process is watched, because UCX cannot report losses over shared memory;
//! elsewhere UCX's own keep-alive does it, and of hosts that are gone without a word the connections by which ranks have met.

mod closing;
mod context;
mod defaults;
mod failures;
mod greeting;
mod lines;
mod log;
mod meeting;
mod members;
mod peers;
mod reaching;
mod requests;
mod segments;
mod session;
mod tags;
mod turns;

use super::{HEARSAY, Request, Tag, Tells, Transport, Wait, Waits, wrong_call, wrong_length};
use crate::bootstrap::Rendezvous;
use crate::error::{Error, Result};
use crate::watch::Fingerprint;
pub use context::library;
use lines::Lines;
use members::Members;
use requests::{Kind, Outcome, Requests};
pub use segments::Segments;
use session::State;
use std::io::Write;
use std::time::{Duration, Instant};
use turns::Hold;
use ucx_sys::{Posted, UCS_ERR_MESSAGE_TRUNCATED, UCS_OK, ucp_tag_recv_info_t};

/// How long nothing has moved when a waiting rank sleeps, and for how long it does.
const IDLE: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);

/// From so many bytes on messages to a rank of this host are copied through shared memory, as shorter ones are, up to what
/// UCX says for sends that are to be over soon (`UCX_RNDV_SEND_NBR_THRESH`, 256 KiB, or less where [`defaults`] say so), as
/// Open MPI's blocking sends are, and not announced for the receiver to fetch them, each time with the kernel's help. Over
/// posix and cma one of 12 KiB then takes 1.3 us instead of 2.8 (Intel Xeon), of 32 KiB 2.3 instead of 4.5 and of 128 KiB
/// 10.8 instead of 20.8 (AMD EPYC of 2019). Between processors that share no cache 32 KiB take half as long again as fetched
/// ones; a virtual machine does not say whether they do.
const ANNOUNCED: usize = 8 << 10;

/// How long ranks wait for each other where no call does.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// How long ranks have to answer when they connect to each other.
    pub within: Duration,
    /// How long a rank that leaves a group, or ends, waits for its peers to take what it sent.
    pub call_timeout: Duration,
    /// Gets this rank and the reason, before the process ends with exit code 1: UCX waits for a peer inside a call that does
    /// not return.
    pub tell: fn(usize, &Error),
}

impl Default for Start {
    fn default() -> Self {
        Start {
            within: crate::bootstrap::Options::default().timeout,
            call_timeout: crate::watch::DEADLINE,
            // In one piece, between which nothing of other ranks comes in a launcher's output.
            tell: |_, why| {
                let line = format!("{why}\n");
                // Who has gone that would read it is in nobody's way.
                let _ = std::io::stderr().write_all(line.as_bytes());
            },
        }
    }
}

/// UCX between the ranks of one group.
pub struct UcxTransport {
    session: Hold,
    members: Members,
    requests: Requests,
    /// Peers have been told that this rank gives up.
    announced: bool,
    /// No message is under way any more, and none will be.
    closed: bool,
}

impl UcxTransport {
    /// Opens UCX on this rank, learns the peers' addresses and connects to them. `exchange` gives each rank's bytes to
    /// all: its result holds one entry per rank, in their order. All ranks call this together. Up to 64 ranks connect
    /// here, so that no call pays for it later; more connect at their first message.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where UCX is missing or refuses `UCX_TLS`; [`Error::Library`] where no transport of it
    /// reaches a peer; [`Error::PeerLost`] and [`Error::Timeout`] for a peer that does not answer; whatever `exchange`
    /// fails with.
    pub fn connect(
        rank: usize,
        size: usize,
        start: &Start,
        exchange: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let mut session = Self::open(rank, size, start, exchange)?;
        session.turn()?.greet(start.within)?;
        Ok(Self::over(session, Members::new(rank, (0..size).collect(), vec![0; size])))
    }

    /// The same of ranks that have met: one that cannot connect tells the others why there, where all of them hear it.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn join(rendezvous: &mut Rendezvous, start: &Start) -> Result<Self> {
        let (rank, size) = (rendezvous.rank(), rendezvous.world());
        let meeting = rendezvous.meeting();
        let opened = Self::open(rank, size, start, &mut |card| rendezvous.exchange(&card));
        // Others wait for it to tell where it is.
        let mut session = opened.inspect_err(|why| meeting.tell(why))?;
        let mut state = session.turn()?;
        state.meeting = Some(meeting.clone());
        let connected = state.greet(start.within);
        state.meeting = None;
        drop(state);
        connected?;
        if size <= greeting::MOST {
            // Nobody leaves while others connect.
            rendezvous.barrier()?;
        }
        session.turn()?.lines = Lines::of(meeting)?;
        Ok(Self::over(session, Members::new(rank, (0..size).collect(), vec![0; size])))
    }

    fn open(
        rank: usize,
        size: usize,
        start: &Start,
        exchange: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Hold> {
        if size > tags::MOST_RANKS {
            let problem =
                format!("{size} ranks asked for, the tags of this transport hold {}", tags::MOST_RANKS);
            return Err(Error::Argument { call: "connect over UCX", rank, problem });
        }
        State::open(rank, size, start, exchange)
    }

    /// Numbers only so many groups; for tests of what otherwise takes thousands.
    #[doc(hidden)]
    pub fn narrow(&mut self, groups: usize) {
        self.session.any_turn().most = groups.min(tags::MOST_GROUPS);
    }

    fn over(session: Hold, members: Members) -> Self {
        UcxTransport { session, members, requests: Requests::default(), announced: false, closed: false }
    }
}

// SAFETY: UCX has ended what it reports as ended, and a closed transport has cancelled the rest or leaves UCX for good.
unsafe impl Transport for UcxTransport {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn rank(&self) -> usize {
        self.members.rank
    }

    fn size(&self) -> usize {
        self.members.ranks.len()
    }

    fn job_rank(&self, member: usize) -> usize {
        self.members.ranks[member]
    }

    fn host(&mut self, job_rank: usize) -> Option<String> {
        self.session.any_turn().host(job_rank)
    }

    fn tells(&self) -> Tells {
        Tells::Everything
    }

    fn window(&self) -> u64 {
        tags::CALLS
    }

    fn one_memory(&mut self) -> bool {
        let ranks = &self.members.ranks;
        let inside = |state: &State, peer: usize| state.local(peer) && !state.cards[peer].network_only;
        self.session.turn().is_ok_and(|state| ranks.iter().all(|&peer| inside(&state, peer)))
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        self.members.admit("send", to)?;
        if self.members.farewells.has_left(to) {
            return Err(self.members.error(to, "left the group before a message to it was sent"));
        }
        let source = self.members.ranks[self.members.rank];
        let tag = tags::message(source, self.members.numbers[to], tag);
        let mut state = self.session.turn()?;
        let peer = self.members.ranks[to];
        let copied = bytes >= ANNOUNCED && state.local(peer);
        let endpoint = state.endpoint(peer)?;
        // SAFETY: the caller's promise.
        match unsafe { state.worker.send(endpoint, tag, src, bytes, copied) } {
            Posted::Done => Ok(Request::DONE),
            Posted::Pending(request) => Ok(self.requests.add(Kind::Send, request, to, bytes)),
            Posted::Failed(status) => {
                drop(state);
                let came = ucp_tag_recv_info_t::default();
                Err(self.failed(&Outcome { kind: Kind::Send, peer: to, bytes, status, came }))
            }
        }
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
        self.members.admit("recv", from)?;
        let source = self.members.ranks[from];
        let tag = tags::message(source, self.members.number(), tag);
        let mut state = self.session.turn()?;
        if !state.local(source) {
            // UCX watches a remote peer through a connection to it.
            state.endpoint(source)?;
        }
        // SAFETY: the caller's promise.
        let request = unsafe { state.worker.recv(tag, tags::EXACT, dst, bytes)? };
        let kind = Kind::Recv { tag, dst };
        if looks > 0 {
            // SAFETY: what was just posted, and is looked at until it has ended.
            let ended = || unsafe { requests::ended(&state.worker, kind, request, from, bytes) };
            match state.worker.look(looks, ended) {
                Ok(true) => {
                    state.lines.heard(source);
                    return Ok(Request::DONE);
                }
                Ok(false) => {}
                Err(outcome) => {
                    drop(state);
                    return Err(self.failed(&outcome));
                }
            }
        }
        Ok(self.requests.add(kind, request, from, bytes))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        self.test_often(request, 0)
    }

    fn test_often(&mut self, request: Request, looks: u32) -> Result<bool> {
        if request == Request::DONE {
            return Ok(true);
        }
        if let (true, Some(error)) = (self.closed, &self.members.lost) {
            return Err(error.clone());
        }
        let mut state = self.session.turn()?;
        let from = if state.lines.doubt_any() { self.requests.source(request) } else { None };
        let done = state.worker.look(looks + 1, || self.requests.test(&state.worker, request));
        if let (Ok(true), Some(from)) = (&done, from) {
            state.lines.heard(self.members.ranks[from]);
        }
        drop(state);
        match done {
            Ok(true) => Ok(true),
            Ok(false) => self.still_possible(request),
            Err(outcome) => Err(self.failed(&outcome)),
        }
    }

    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>> {
        Ok(Box::new(self.form(members, context, within)?))
    }

    fn check(&mut self) -> Result<()> {
        if let Some(error) = &self.members.lost {
            return Err(error.clone());
        }
        let mut state = self.session.turn()?;
        state.lines.look();
        self.members.check(&mut state)
    }

    fn check_hosts(&mut self) -> Result<()> {
        self.session.turn()?.lines.give_up();
        self.check()
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        Some(self)
    }

    /// Sleeps only when nothing has moved for a while: over TCP each look moves one segment, and a nap between two would
    /// decide the rate.
    fn park(&mut self, limit: Duration) {
        let idle = Instant::now() + IDLE;
        while Instant::now() < idle {
            match self.session.turn() {
                Ok(state) if !state.worker.progress() => drop(state),
                _ => return,
            }
            std::thread::yield_now();
        }
        std::thread::sleep(limit.min(NAP));
    }

    fn abort(&mut self, why: &Error) {
        if !self.closed {
            self.announce_failure(why);
            self.close();
        }
    }
}

impl Waits for UcxTransport {
    fn note(&mut self, wait: Wait) {
        if let Ok(mut state) = self.session.turn() {
            state.note_wait(wait);
        }
    }

    fn ask(&mut self, peer: usize) -> u64 {
        // Where UCX moves no more, nobody answers.
        self.session.turn().map_or(0, |mut state| state.ask(peer))
    }

    fn answer(&mut self, peer: usize, asked: u64) -> Option<Wait> {
        self.session.turn().ok()?.answer(peer, asked)
    }
}

impl UcxTransport {
    /// False for a request that is under way, an error if its peer has left without serving it.
    fn still_possible(&self, request: Request) -> Result<bool> {
        let (kind, peer) = self.requests.with(request);
        match self.members.farewells.unserved(peer, matches!(kind, Kind::Send)) {
            Some(how) => Err(self.members.error(peer, how)),
            None => Ok(false),
        }
    }

    /// What it means that a request did not end as it should.
    #[cold]
    fn failed(&mut self, done: &Outcome) -> Error {
        let (call, way) = match (done.kind, done.status) {
            (Kind::Recv { tag, dst }, UCS_OK | UCS_ERR_MESSAGE_TRUNCATED) => {
                return self.diverged(done, tag, dst);
            }
            (Kind::Recv { .. }, _) => ("ucp_tag_recv_nbx", "from"),
            (Kind::Send, _) => ("ucp_tag_send_nbx", "to"),
        };
        // Of this failure, also where it is told otherwise: no later one is to be told with it.
        let said = log::said();
        // A loss that explains the failure is the better message, and may become known a moment later.
        let until = Instant::now() + HEARSAY;
        while Instant::now() < until {
            if let Err(loss) = self.check() {
                return loss;
            }
            if self.members.farewells.has_left(done.peer) {
                return self.members.error(done.peer, "left the group while messages were under way");
            }
            std::thread::sleep(NAP);
        }
        let context = self.session.context();
        let mut text = context.ucp.status(done.status);
        if let Some(said) = said {
            text = format!("{text}, {said}");
        }
        let (bytes, peer) = (done.bytes, self.members.ranks[done.peer]);
        context.error_text(call, format!("{bytes} bytes {way} rank {peer}: {text}"))
    }

    /// What has come to `dst` is not what was waited for under `tag`.
    fn diverged(&mut self, done: &Outcome, tag: u64, dst: *const u8) -> Error {
        let Outcome { peer, bytes, came, .. } = *done;
        let (sent, here) = (came.length, done.status == UCS_OK);
        let framed = came.sender_tag != tag && tags::is_framed(came.sender_tag) && sent >= size_of::<u64>();
        let called = match framed && here {
            // SAFETY: so many bytes have come there, and until `test` returns they are the transport's.
            true => Some(Fingerprint::from_bits(unsafe { dst.cast::<u64>().read_unaligned() })),
            false => tags::called(came.sender_tag, sent, peer, self.members.rank),
        };
        if let Some(called) = called {
            return wrong_call(self, peer, called);
        }
        let (rank, peer) = (self.members.job_rank(), self.members.ranks[peer]);
        // UCX drops a message whole that is longer than its receive, so nothing here tells what the peer called. If it was
        // the peer's turn to receive as well, it got the shorter message, knows more, and says so in a moment.
        let until = Instant::now() + HEARSAY;
        while !here && Instant::now() < until {
            let heard = self.session.turn().and_then(|mut state| {
                state.worker.progress();
                self.members.check(&mut state)
            });
            if let Err(error) = heard {
                return error;
            }
        }
        wrong_length(rank, bytes, peer, Some(sent))
    }
}
