//! Messages over UCX: InfiniBand, RoCE, TCP, and on one host shared memory and cross-memory attach, chosen by UCX
//! itself (`UCX_TLS` and `UCX_NET_DEVICES` are respected). The library is opened at run time.
//!
//! One worker per rank, shared by its groups; tagged messages whose tag holds source and group, so matching is exact.
//! Peers are connected at the start; in jobs of more than 64 ranks at their first message. A lost peer becomes an error in [`check`](Transport::check): on this host
//! its process is watched, because UCX cannot report losses over shared memory; elsewhere UCX's own keep-alive does it.

mod closing;
mod context;
mod defaults;
mod failures;
mod greeting;
mod meeting;
mod peers;
mod requests;
mod session;
mod tags;

use super::farewell::Farewells;
use super::{Request, Tag, Transport};
use crate::error::{Error, Result};
use requests::{Kind, Outcome, Requests};
use session::{Session, State, Word};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tags::Window;
use ucx_sys::{Posted, UCS_ERR_MESSAGE_TRUNCATED, UCS_OK};

/// The name and version of the UCX library that would be opened.
///
/// # Errors
/// [`Error::Unavailable`] with what was looked for and what would bring it.
pub fn library() -> Result<String> {
    context::library()
}

/// How long to wait for a peer's explanation of what went wrong.
const HEARSAY: Duration = Duration::from_millis(300);
/// How long nothing has moved when a waiting rank sleeps, and for how long it does.
const IDLE: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(50);
/// How long a farewell may be on its way when its sender's process has ended.
const LAST_WORDS: Duration = Duration::from_millis(20);

/// UCX between the ranks of one group.
pub struct UcxTransport {
    session: Arc<Session>,
    /// This rank in the group.
    rank: usize,
    /// The members' ranks in the job.
    members: Vec<usize>,
    /// By which number each member knows the group.
    numbers: Vec<u16>,
    requests: Requests,
    window: Window,
    farewells: Farewells,
    /// Set by the first loss; nothing new is posted from then on.
    lost: Option<Error>,
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
        exchange: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        if size > tags::MOST_RANKS {
            let problem =
                format!("{size} ranks asked for, the tags of this transport hold {}", tags::MOST_RANKS);
            return Err(Error::Argument { call: "connect over UCX", rank, problem });
        }
        let session = Session::open(rank, size, exchange)?;
        session.greet()?;
        Ok(Self::over(session, rank, (0..size).collect(), vec![0; size]))
    }

    fn over(session: Arc<Session>, rank: usize, members: Vec<usize>, numbers: Vec<u16>) -> Self {
        UcxTransport {
            session,
            rank,
            requests: Requests::default(),
            window: Window::default(),
            farewells: Farewells::none(members.len()),
            members,
            numbers,
            lost: None,
            announced: false,
            closed: false,
        }
    }

    fn check_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        if peer >= self.members.len() {
            let problem = format!("rank {peer} asked for, the group has {}", self.members.len());
            return Err(Error::Argument { call, rank: self.rank, problem });
        }
        Ok(())
    }

    /// Whether a message can have this tag.
    fn admit(&mut self, call: &'static str, tag: Tag) -> Result<()> {
        self.window.admit(tag).map_err(|problem| Error::Argument { call, rank: self.rank, problem })
    }

    fn other_length(&self, peer: usize, expected: usize, came: String) -> Error {
        let (mine, theirs) = (format!("{expected} bytes"), came);
        Error::Diverged { sequence: 0, rank: self.rank, mine, peer, theirs }
    }

    /// Takes note of what peers have said about this group.
    fn take_notices(&mut self, state: &mut State) -> Result<()> {
        state.listen()?;
        while let Some(notice) = state.take_notice(self.numbers[self.rank]) {
            let Some(peer) = self.members.iter().position(|&m| m == notice.from) else { continue };
            match notice.word {
                Word::Failure if self.lost.is_none() => {
                    let how = format!("gave up: {}", notice.text);
                    self.lost = Some(Error::PeerLost { rank: self.rank, peer, how });
                }
                Word::Farewell => self.farewells.note(peer),
                _ => {}
            }
        }
        Ok(())
    }

    /// What is known to have gone wrong by now.
    fn find_loss(&mut self, state: &mut State) -> Option<Error> {
        state.watch.look();
        if !state.failures.any() && !state.watch.any() {
            return None;
        }
        for peer in 0..self.members.len() {
            let world = self.members[peer];
            if self.farewells.has_left(peer) || !state.is_gone(world) {
                continue;
            }
            // Its farewell may have been on its way.
            let until = Instant::now() + LAST_WORDS;
            while !self.farewells.has_left(peer) && self.lost.is_none() && Instant::now() < until {
                state.worker.progress();
                if let Err(error) = self.take_notices(state) {
                    return Some(error);
                }
            }
            if self.lost.is_some() {
                return self.lost.clone();
            }
            if !self.farewells.has_left(peer) {
                let how = match state.failures.of(world) {
                    UCS_OK => {
                        format!("ended (process {}) without leaving the group", state.cards[world].pid)
                    }
                    status => format!("is unreachable ({})", self.session.context.ucp.status(status)),
                };
                return Some(Error::PeerLost { rank: self.rank, peer, how });
            }
        }
        None
    }
}

impl Transport for UcxTransport {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        self.check_peer("send", to)?;
        self.admit("send", tag)?;
        if self.farewells.has_left(to) {
            let how = "left the group before a message to it was sent".into();
            return Err(Error::PeerLost { rank: self.rank, peer: to, how });
        }
        let mut state = self.session.turn()?;
        let endpoint = state.endpoint(self.members[to])?;
        let tag = tags::message(state.rank, self.numbers[to], tag);
        // SAFETY: the caller's promise.
        match unsafe { state.worker.send(endpoint, tag, src, bytes) } {
            Posted::Done => Ok(Requests::DONE),
            Posted::Pending(request) => Ok(self.requests.add(Kind::Send, request, to, bytes)),
            Posted::Failed(status) => Err(self.session.context.error("ucp_tag_send_nbx", status)),
        }
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        self.check_peer("recv", from)?;
        self.admit("recv", tag)?;
        let mut state = self.session.turn()?;
        let peer = self.members[from];
        if !state.local(peer) {
            // UCX watches a remote peer through a connection to it.
            state.endpoint(peer)?;
        }
        let tag = tags::message(peer, self.numbers[self.rank], tag);
        // SAFETY: the caller's promise.
        let request = unsafe { state.worker.recv(tag, tags::EXACT, dst, bytes)? };
        Ok(self.requests.add(Kind::Recv, request, from, bytes))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        if request == Requests::DONE {
            return Ok(true);
        }
        if let (true, Some(error)) = (self.closed, &self.lost) {
            return Err(error.clone());
        }
        let state = self.session.turn()?;
        let mut done = self.requests.test(&state.worker, request);
        if done.is_none() {
            state.worker.progress();
            done = self.requests.test(&state.worker, request);
        }
        drop(state);
        match done {
            None => self.still_possible(request),
            Some(done) => self.completed(done),
        }
    }

    fn subgroup(&mut self, members: &[usize], context: u64) -> Result<Box<dyn Transport>> {
        Ok(Box::new(self.form(members, context)?))
    }

    fn check(&mut self) -> Result<()> {
        if self.lost.is_none() {
            let session = self.session.clone();
            let mut state = session.turn()?;
            self.take_notices(&mut state)?;
            if self.lost.is_none() {
                self.lost = self.find_loss(&mut state);
            }
        }
        match &self.lost {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
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

impl UcxTransport {
    /// False for a request that is under way, an error if its peer has left without serving it.
    fn still_possible(&self, request: Request) -> Result<bool> {
        match self.requests.awaits(request) {
            Some(peer) if self.farewells.nothing_comes_from(peer) => {
                let how = "left the group while a message from it was awaited".into();
                Err(Error::PeerLost { rank: self.rank, peer, how })
            }
            _ => Ok(false),
        }
    }

    /// The outcome of a request that is no longer under way.
    fn completed(&mut self, done: Outcome) -> Result<bool> {
        let Outcome { kind, peer, bytes, status, length } = done;
        match (kind, status) {
            (Kind::Send, UCS_OK) => Ok(true),
            (Kind::Recv, UCS_OK) if length == bytes => Ok(true),
            (Kind::Recv, UCS_OK) => Err(self.other_length(peer, bytes, format!("{length} bytes"))),
            (Kind::Recv, UCS_ERR_MESSAGE_TRUNCATED) => {
                // UCX drops such a message whole, so nothing here tells what the peer called. If it was the peer's
                // turn to receive as well, it got the shorter message, knows more, and says so in a moment.
                let until = Instant::now() + HEARSAY;
                while self.lost.is_none() && Instant::now() < until {
                    self.session.turn()?.worker.progress();
                    self.check()?;
                }
                Err(self.other_length(peer, bytes, "more".into()))
            }
            (kind, status) => {
                // A loss that explains the failure is the better message.
                self.check()?;
                let (call, way) = match kind {
                    Kind::Send => ("ucp_tag_send_nbx", "to"),
                    Kind::Recv => ("ucp_tag_recv_nbx", "from"),
                };
                let text = self.session.context.ucp.status(status);
                Err(self.session.context.error_text(call, format!("{bytes} bytes {way} rank {peer}: {text}")))
            }
        }
    }
}
