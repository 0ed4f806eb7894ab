//! Messages over UCX: InfiniBand, RoCE, TCP, and on one host shared memory and cross-memory attach, chosen by UCX
//! itself (`UCX_TLS` and `UCX_NET_DEVICES` are respected). The library is opened at run time.
//!
//! One worker per group and rank; tagged messages whose tag holds the source, so matching is exact. Peers are
//! connected at their first message. A lost peer becomes an error in [`check`](Transport::check): on this host its
//! process is watched, because UCX cannot report losses over shared memory; elsewhere UCX's own keep-alive does it.

mod closing;
mod context;
mod peers;
mod requests;
mod tags;

use super::farewell::Farewells;
use super::{Request, Tag, Transport};
use crate::error::{Error, Result};
use context::{Context, Worker};
use peers::{Card, Watch};
use requests::{Kind, Outcome, Requests};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicI8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use ucx_sys::{
    Handle, Posted, UCS_ERR_MESSAGE_TRUNCATED, UCS_INPROGRESS, UCS_OK, ucp_err_handler_t,
    ucp_tag_recv_info_t, ucs_status_t,
};

/// The name and version of the UCX library that would be opened.
///
/// # Errors
/// [`Error::Unavailable`] with what was looked for and what would bring it.
pub fn library() -> Result<String> {
    context::library()
}

/// How long the members of a new subgroup wait for each other.
const MEETING: Duration = Duration::from_secs(60);
/// A card or a notice never comes near this.
const CONTROL_BYTES: usize = 64 << 10;
const NOTICE_BYTES: usize = 1 << 10;
/// How long to wait for a peer's explanation of what went wrong.
const HEARSAY: Duration = Duration::from_millis(300);

/// UCX between the ranks of one group.
pub struct UcxTransport {
    rank: usize,
    cards: Vec<Card>,
    /// Null where there is no connection yet.
    endpoints: Vec<Handle>,
    requests: Requests,
    failures: Failures,
    watch: Watch,
    farewells: Farewells,
    /// Set by the first loss; nothing new is posted from then on.
    lost: Option<Error>,
    /// The worker is gone, after an abort.
    closed: bool,
    notice: Box<[u8]>,
    /// The posted receive of the next notice, or null.
    notice_request: *mut c_void,
    /// Control messages under way, with their bytes.
    outgoing: Vec<(Box<[u8]>, *mut c_void)>,
    /// Last: endpoints and requests above belong to it.
    worker: Worker,
}

// SAFETY: the raw handles belong to the worker, which may move between threads; `&mut self` keeps calls apart.
unsafe impl Send for UcxTransport {}

/// Written by UCX's failure callback, from inside `ucp_worker_progress`.
struct Failures {
    cells: Box<[Failure]>,
    count: Arc<AtomicUsize>,
}

struct Failure {
    status: AtomicI8,
    count: Arc<AtomicUsize>,
}

impl Failures {
    fn none(size: usize) -> Self {
        let count = Arc::new(AtomicUsize::new(0));
        let cells = (0..size).map(|_| Failure { status: AtomicI8::new(0), count: count.clone() }).collect();
        Failures { cells, count }
    }

    fn handler(&self, peer: usize) -> ucp_err_handler_t {
        let arg = (&raw const self.cells[peer]).cast_mut().cast();
        ucp_err_handler_t { cb: Some(failed), arg }
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    fn of(&self, peer: usize) -> ucs_status_t {
        self.cells[peer].status.load(Ordering::Relaxed)
    }
}

unsafe extern "C" fn failed(arg: *mut c_void, _endpoint: Handle, status: ucs_status_t) {
    // SAFETY: `arg` is a cell of `Failures`, which outlives every endpoint of the transport that owns it.
    let cell = unsafe { &*arg.cast::<Failure>() };
    if cell.status.swap(status, Ordering::Relaxed) == UCS_OK {
        cell.count.fetch_add(1, Ordering::Relaxed);
    }
}

impl UcxTransport {
    /// Opens UCX on this rank and learns the peers' addresses. `exchange` gives each rank's bytes to all: its result
    /// holds one entry per rank, in their order. All ranks call this together.
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
        let context = Context::open(rank, size)?;
        Self::with_context(rank, size, &context, exchange)
    }

    fn with_context(
        rank: usize,
        size: usize,
        context: &Arc<Context>,
        exchange: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Self> {
        let worker = Worker::create(context)?;
        let mine = Card::of_this_process(worker.address()?);
        let all = exchange(mine.to_bytes())?;
        if all.len() != size {
            return Err(Error::Launch(format!(
                "{size} ranks exchanged UCX addresses and {} came",
                all.len()
            )));
        }
        let cards: Vec<Card> = all
            .iter()
            .enumerate()
            .map(|(peer, bytes)| Card::from_bytes(peer, bytes))
            .collect::<Result<_>>()?;
        let neighbours = cards
            .iter()
            .enumerate()
            .filter(|(_, card)| card.host == mine.host && card.pid != mine.pid)
            .map(|(peer, card)| (peer, card.pid));
        let watch = Watch::over(rank, neighbours)?;
        let mut transport = UcxTransport {
            rank,
            cards,
            endpoints: vec![null_mut(); size],
            requests: Requests::default(),
            failures: Failures::none(size),
            watch,
            farewells: Farewells::none(size),
            lost: None,
            closed: false,
            notice: vec![0; NOTICE_BYTES].into(),
            notice_request: null_mut(),
            outgoing: Vec::new(),
            worker,
        };
        transport.await_notice()?;
        Ok(transport)
    }

    /// Whether `peer` runs on this host.
    fn local(&self, peer: usize) -> bool {
        self.cards[peer].host == self.cards[self.rank].host
    }

    /// The connection to `peer`, made now if it is the first use.
    fn endpoint(&mut self, peer: usize) -> Result<Handle> {
        if !self.endpoints[peer].is_null() {
            return Ok(self.endpoints[peer]);
        }
        // Both sides must choose alike. Shared memory cannot report losses, and asking for reports would make UCX
        // avoid it; on this host the processes are watched instead.
        let both_network = self.cards[peer].network_only && self.cards[self.rank].network_only;
        let reports = (!self.local(peer) || both_network).then(|| self.failures.handler(peer));
        let endpoint =
            self.worker.connect(&self.cards[peer].address, reports).map_err(|error| match error {
                Error::Library { library, call, rank, text } => {
                    let tls = std::env::var("UCX_TLS").unwrap_or_else(|_| "all".into());
                    let text = format!("{text}, connecting to rank {peer} with UCX_TLS={tls}");
                    Error::Library { library, call, rank, text }
                }
                other => other,
            })?;
        self.endpoints[peer] = endpoint;
        Ok(endpoint)
    }

    fn check_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        if peer >= self.cards.len() {
            let problem = format!("rank {peer} asked for, the group has {}", self.cards.len());
            return Err(Error::Argument { call, rank: self.rank, problem });
        }
        Ok(())
    }

    fn other_length(&self, peer: usize, expected: usize, came: String) -> Error {
        let (mine, theirs) = (format!("{expected} bytes"), came);
        Error::Diverged { sequence: 0, rank: self.rank, mine, peer, theirs }
    }

    /// Posts the receive of the next notice from anybody.
    fn await_notice(&mut self) -> Result<()> {
        // SAFETY: `notice` lives until the request is complete or the worker is gone, and nobody touches it before.
        self.notice_request = unsafe {
            self.worker.recv(tags::NOTICE, tags::KIND_MASK, self.notice.as_mut_ptr(), NOTICE_BYTES)?
        };
        Ok(())
    }

    /// Acts on a notice: an empty one says goodbye, any other says why its sender gives up.
    fn take_notice(&mut self, info: ucp_tag_recv_info_t) {
        let peer = tags::source(info.sender_tag);
        if peer >= self.cards.len() {
            return;
        }
        if info.length == 0 {
            self.farewells.note(peer);
        } else if self.lost.is_none() {
            let text = String::from_utf8_lossy(&self.notice[..info.length.min(NOTICE_BYTES)]).into_owned();
            self.lost = Some(Error::PeerLost { rank: self.rank, peer, how: format!("gave up: {text}") });
        }
    }

    fn poll_notice(&mut self) -> Result<()> {
        if self.notice_request.is_null() {
            return Ok(());
        }
        let mut info = ucp_tag_recv_info_t::default();
        // SAFETY: posted by `await_notice` and not yet reported complete.
        match unsafe { self.worker.received(self.notice_request, &mut info) } {
            UCS_INPROGRESS => Ok(()),
            UCS_OK => {
                self.notice_request = null_mut();
                self.take_notice(info);
                self.await_notice()
            }
            status => {
                self.notice_request = null_mut();
                Err(self.worker.context.error("ucp_tag_recv_nbx", status))
            }
        }
    }

    /// Sends a control message whose bytes this transport keeps until it is done.
    fn control(&mut self, peer: usize, tag: u64, bytes: Box<[u8]>) -> Result<()> {
        let endpoint = self.endpoint(peer)?;
        // SAFETY: the boxed bytes stay where they are until `settle_outgoing` sees the request done.
        match unsafe { self.worker.send(endpoint, tag, bytes.as_ptr(), bytes.len()) } {
            Posted::Done => Ok(()),
            Posted::Failed(status) => Err(self.worker.context.error("ucp_tag_send_nbx", status)),
            Posted::Pending(request) => {
                self.outgoing.push((bytes, request));
                Ok(())
            }
        }
    }

    /// Forgets the control messages that are done; whether none is left.
    fn settle_outgoing(&mut self) -> bool {
        let worker = &self.worker;
        self.outgoing.retain(|(_, request)| {
            // SAFETY: a request of this worker that was not yet reported complete.
            unsafe { worker.finished(*request) == UCS_INPROGRESS }
        });
        self.outgoing.is_empty()
    }

    /// What is known to have gone wrong by now.
    fn find_loss(&mut self) -> Option<Error> {
        if self.failures.any() {
            for peer in 0..self.cards.len() {
                let status = self.failures.of(peer);
                // A peer that has left in order closes its connections; that is no loss.
                if status != UCS_OK && !self.farewells.has_left(peer) {
                    let how = format!("is unreachable ({})", self.worker.context.ucp.status(status));
                    return Some(Error::PeerLost { rank: self.rank, peer, how });
                }
            }
        }
        let farewells = &self.farewells;
        if let Some(peer) = self.watch.ended(|peer| farewells.has_left(peer)) {
            // Its farewell may have been on its way.
            let until = Instant::now() + Duration::from_millis(20);
            while !self.farewells.has_left(peer) && self.lost.is_none() && Instant::now() < until {
                self.worker.progress();
                if let Err(error) = self.poll_notice() {
                    return Some(error);
                }
            }
            if !self.farewells.has_left(peer) && self.lost.is_none() {
                let how = format!("ended (process {}) without leaving the group", self.cards[peer].pid);
                return Some(Error::PeerLost { rank: self.rank, peer, how });
            }
        }
        None
    }

    /// Gives every member's `mine` to all, over control messages of this group.
    fn exchange(&mut self, members: &[usize], context: u64, mine: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let mut all: Vec<Vec<u8>> = vec![Vec::new(); members.len()];
        let mut awaited = Vec::new();
        let result = (|| {
            for (index, &member) in members.iter().enumerate() {
                if member == self.rank {
                    all[index] = mine.clone();
                    continue;
                }
                self.control(member, tags::control(tags::EXCHANGE, self.rank, context), mine.clone().into())?;
                let mut space = vec![0u8; CONTROL_BYTES];
                let tag = tags::control(tags::EXCHANGE, member, context);
                // SAFETY: `space` is kept in `awaited` until the request is complete.
                let request =
                    unsafe { self.worker.recv(tag, tags::EXACT, space.as_mut_ptr(), CONTROL_BYTES)? };
                awaited.push((index, space, request));
            }
            let until = Instant::now() + MEETING;
            while let Some((index, space, request)) = awaited.last() {
                let mut info = ucp_tag_recv_info_t::default();
                // SAFETY: a receive of this worker that was not yet reported complete.
                match unsafe { self.worker.received(*request, &mut info) } {
                    UCS_INPROGRESS => {
                        if !self.worker.progress() {
                            std::thread::yield_now();
                        }
                        self.check()?;
                        if Instant::now() > until {
                            let what = format!("forming a group of {} ranks", members.len());
                            let peer = members[*index];
                            return Err(Error::Timeout { what, rank: self.rank, peer, after: MEETING });
                        }
                    }
                    status => {
                        let (index, bytes) = (*index, space[..info.length.min(CONTROL_BYTES)].to_vec());
                        awaited.pop();
                        if status != UCS_OK {
                            return Err(self.worker.context.error("ucp_tag_recv_nbx", status));
                        }
                        all[index] = bytes;
                    }
                }
            }
            Ok(())
        })();
        for (_, space, request) in awaited {
            self.requests.orphan(&self.worker, request, space);
        }
        result.map(|()| all)
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
        self.cards.len()
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        self.check_peer("send", to)?;
        if self.farewells.has_left(to) {
            let how = "left the group before a message to it was sent".into();
            return Err(Error::PeerLost { rank: self.rank, peer: to, how });
        }
        let endpoint = self.endpoint(to)?;
        // SAFETY: the caller's promise.
        match unsafe { self.worker.send(endpoint, tags::message(self.rank, tag), src, bytes) } {
            Posted::Done => Ok(Requests::DONE),
            Posted::Pending(request) => Ok(self.requests.add(Kind::Send, request, to, bytes)),
            Posted::Failed(status) => Err(self.worker.context.error("ucp_tag_send_nbx", status)),
        }
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        self.check_peer("recv", from)?;
        if !self.local(from) {
            // UCX watches a remote peer through a connection to it.
            self.endpoint(from)?;
        }
        // SAFETY: the caller's promise.
        let request = unsafe { self.worker.recv(tags::message(from, tag), tags::EXACT, dst, bytes)? };
        Ok(self.requests.add(Kind::Recv, request, from, bytes))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        if request == Requests::DONE {
            return Ok(true);
        }
        if let (true, Some(error)) = (self.closed, &self.lost) {
            return Err(error.clone());
        }
        match self.requests.test(&self.worker, request) {
            None => {}
            Some(done) => return self.completed(done),
        }
        self.worker.progress();
        match self.requests.test(&self.worker, request) {
            None => self.still_possible(request),
            Some(done) => self.completed(done),
        }
    }

    fn subgroup(&mut self, members: &[usize], context: u64) -> Result<Box<dyn Transport>> {
        let Some(rank) = members.iter().position(|&m| m == self.rank) else {
            let problem = format!("ranks {members:?} form a group without this rank");
            return Err(Error::Argument { call: "subgroup", rank: self.rank, problem });
        };
        if let Some(&bad) = members.iter().find(|&&m| m >= self.cards.len()) {
            self.check_peer("subgroup", bad)?;
        }
        let shared = self.worker.context.clone();
        let group = Self::with_context(rank, members.len(), &shared, &mut |mine| {
            self.exchange(members, context, mine)
        })?;
        Ok(Box::new(group))
    }

    fn check(&mut self) -> Result<()> {
        if self.lost.is_none() {
            self.poll_notice()?;
        }
        if self.lost.is_none() {
            self.lost = self.find_loss();
        }
        if !self.closed && !self.outgoing.is_empty() {
            self.settle_outgoing();
        }
        match &self.lost {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
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
                    self.worker.progress();
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
                let text = self.worker.context.ucp.status(status);
                Err(self.worker.context.error_text(call, format!("{bytes} bytes {way} rank {peer}: {text}")))
            }
        }
    }
}
