//! UCX as one rank of a job has it: one worker and one connection to each peer, shared by all groups of the rank.
//!
//! A worker of each group's own would be simpler, but in UCX 1.13 the shared memory of a worker is named by process and
//! file descriptor: a peer that still speaks to a group that this rank has left would reach whatever group has the
//! descriptor by then.

use super::Start;
use super::context::{Context, Worker};
use super::failures::Failures;
use super::lines::Lines;
use super::peers::Card;
use super::tags;
use super::turns::Hold;
use crate::bootstrap::Meeting;
use crate::error::{Error, Result};
use crate::transport::blame;
use crate::transport::inbox::Inbox;
use crate::transport::neighbours::{Home, Neighbours};
use crate::transport::waits::{self, Questions, Wait};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;
use ucx_sys::{Handle, Posted, UCS_INPROGRESS, UCS_OK, ucp_tag_recv_info_t};

pub(super) const NOTICE_BYTES: usize = 1 << 10;

/// What ranks tell each other beside their messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Word {
    /// The sender leaves a group in order.
    Farewell = 0,
    /// The sender gives a group up; the text says why.
    Failure = 1,
    /// The sender is about to end its worker: it sends nothing more, and waits until that is confirmed.
    Leaving = 2,
    /// The sender has got everything from a rank that is leaving, and sends it nothing more.
    Confirmed = 3,
    /// The sender has connected.
    Hello = 4,
    /// The sender calls UCX no more, for none of its groups; the text says why.
    Absent = 5,
    /// The sender asks for whom the other waits.
    Ask = 6,
    /// The sender, which was asked, waits for the rank in the text.
    Answer = 7,
}

impl Word {
    fn from_tag(tag: u64) -> Option<(Word, u16)> {
        let about = tags::about(tag);
        let all = [
            Word::Farewell,
            Word::Failure,
            Word::Leaving,
            Word::Confirmed,
            Word::Hello,
            Word::Absent,
            Word::Ask,
            Word::Answer,
        ];
        let word = all.into_iter().find(|w| *w as u64 == about >> 16)?;
        Some((word, about as u16))
    }
}

/// What a peer said about a group of this rank.
pub(super) struct Notice {
    /// This rank's number of the group.
    pub(super) group: u16,
    pub(super) word: Word,
    /// The sender's rank in the job.
    pub(super) from: usize,
    pub(super) text: String,
}

/// What is shared by the groups of a rank, which [take turns](super::turns) at it.
pub(super) struct State {
    /// This rank in the job, as everything below.
    pub(super) rank: usize,
    pub(super) cards: Vec<Card>,
    /// Null where there is no connection yet.
    pub(super) endpoints: Vec<Handle>,
    pub(super) failures: Failures,
    pub(super) neighbours: Neighbours,
    /// How often each peer has said that it is connected.
    pub(super) greetings: Vec<u8>,
    /// Peers that are there and call UCX no more, with what they said of it.
    pub(super) absent: BTreeMap<usize, String>,
    questions: Questions,
    /// Peers that send nothing more and need nothing more of this rank.
    pub(super) settled: Vec<bool>,
    /// Peers that have said anything, and so are connected to this rank.
    pub(super) spoke: Vec<bool>,
    /// Peers to whom this rank has said that it leaves.
    pub(super) parting: Vec<bool>,
    /// The numbers of this rank's groups, and how many there can be.
    numbers: Vec<bool>,
    pub(super) most: usize,
    next: usize,
    inbox: Inbox<Notice>,
    pub(super) notice: Box<[u8]>,
    /// The posted receive of the next notice, or null.
    pub(super) notice_request: *mut c_void,
    /// Control messages under way, with their bytes, and messages that are taken out without theirs.
    pub(super) outgoing: Vec<(Box<[u8]>, *mut c_void)>,
    /// How long a rank that leaves waits for living peers to take what it sent.
    pub(super) linger: Duration,
    /// A group has failed: the end must not wait for peers.
    pub(super) failed: bool,
    /// Why the first of them did, where that is known.
    pub(super) cause: Option<Error>,
    /// Why a connection could not be made: then no other is begun.
    pub(super) unreached: Option<Error>,
    /// Peers are being told that this rank has failed.
    pub(super) announcing: bool,
    /// How long ranks have to answer when this one connects to them.
    pub(super) patience: Duration,
    /// Where the ranks have met, while all of them connect to each other.
    pub(super) meeting: Option<Meeting>,
    /// The same afterwards.
    pub(super) lines: Lines,
    /// Gets the reason before this process ends.
    pub(super) tell: fn(usize, &Error),
    /// Messages of a failed group could not be ended: the worker must not move any further.
    pub(super) given_up: bool,
    /// Last: endpoints and requests above belong to it.
    pub(super) worker: Worker,
}

// SAFETY: the raw handles belong to the worker, which may move between threads; turns keep calls apart.
unsafe impl Send for State {}

impl State {
    /// Makes the worker and learns the peers' addresses by `exchange`.
    pub(super) fn open(
        rank: usize,
        size: usize,
        start: &Start,
        exchange: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
    ) -> Result<Hold> {
        let context = Context::open(rank, size)?;
        let worker = Worker::create(&context)?;
        let mine = Card::of_this_process(context.version(), worker.address()?);
        let all = exchange(mine.to_bytes())?;
        if all.len() != size {
            return Err(Error::Launch(format!(
                "{size} ranks exchanged UCX addresses and {} came",
                all.len()
            )));
        }
        let read = |(peer, bytes): (usize, &Vec<u8>)| Card::from_bytes(peer, bytes);
        let cards: Vec<Card> = all.iter().enumerate().map(read).collect::<Result<_>>()?;
        cards.iter().enumerate().try_for_each(|(peer, card)| cards[rank].fits(rank, card, peer))?;
        let homes: Vec<Home> = cards.iter().map(|card| card.home).collect();
        let mut state = State {
            rank,
            endpoints: vec![null_mut(); size],
            failures: Failures::none(size),
            neighbours: Neighbours::of(rank, homes)?,
            greetings: vec![0; size],
            absent: BTreeMap::new(),
            questions: Questions::default(),
            settled: vec![false; size],
            spoke: vec![false; size],
            parting: vec![false; size],
            cards,
            numbers: vec![true],
            most: tags::MOST_GROUPS,
            next: 1,
            inbox: Inbox::empty(),
            notice: vec![0; NOTICE_BYTES].into(),
            notice_request: null_mut(),
            outgoing: Vec::new(),
            linger: start.call_timeout,
            failed: false,
            cause: None,
            unreached: None,
            announcing: false,
            patience: start.call_timeout,
            meeting: None,
            lines: Lines::default(),
            tell: start.tell,
            given_up: false,
            worker,
        };
        state.await_notice()?;
        Ok(Hold::new(context, state))
    }

    /// Whether `peer` runs on this host.
    pub(super) fn local(&self, peer: usize) -> bool {
        self.cards[peer].home.host == self.cards[self.rank].home.host
    }

    /// The name of the host of `peer`, where that is not the only one.
    pub(super) fn host(&self, peer: usize) -> Option<String> {
        let several = self.cards.iter().any(|card| card.host != self.cards[self.rank].host);
        several.then(|| self.cards[peer].host.clone())
    }

    /// Whether UCX reports the loss of `peer`. Both sides must choose alike. Shared memory cannot report losses, and asking
    /// for reports would make UCX avoid it; on this host the processes are watched instead.
    pub(super) fn reports(&self, peer: usize) -> bool {
        let both_network = self.cards[peer].network_only && self.cards[self.rank].network_only;
        !self.local(peer) || both_network
    }

    /// A number for a new group.
    pub(super) fn take_number(&mut self) -> Option<u16> {
        let most = self.most;
        // Numbers in turn, so that what comes late for a group that is gone finds no other.
        let number =
            (0..most).map(|i| (self.next + i) % most).find(|&n| !self.numbers.get(n).is_some_and(|u| *u))?;
        if number < self.numbers.len() {
            self.drop_unmet(number as u16);
        } else {
            self.numbers.resize(number + 1, false);
        }
        self.numbers[number] = true;
        self.next = number + 1;
        // Peers have said farewell to the last group of this number, perhaps when this rank had left it.
        self.forget(number as u16);
        Some(number as u16)
    }

    /// Takes out what has come for a group that is gone and nobody has received, as ranks may leave comparisons of what they
    /// have called: a later group of this number would take it for its own.
    fn drop_unmet(&mut self, number: u16) {
        let (tag, mask) = tags::of_group(number);
        // SAFETY: none of their bytes are taken.
        let take = || unsafe { self.worker.recv_unmet(tag, mask, NonNull::dangling().as_ptr(), 0) };
        loop {
            match take() {
                Ok(Some(request)) => self.outgoing.push((Box::default(), request)),
                Ok(None) => break,
                // It is gone all the same.
                Err(_) => {}
            }
        }
    }

    pub(super) fn free_number(&mut self, number: u16) {
        self.numbers[number as usize] = false;
        self.forget(number);
    }

    /// What has been said of a group.
    fn forget(&mut self, number: u16) {
        let _ = self.listen();
        self.inbox.retain(|notice| notice.group != number);
    }

    /// Posts the receive of the next notice from anybody.
    fn await_notice(&mut self) -> Result<()> {
        // SAFETY: `notice` lives until the request is complete or the worker is gone, and nobody touches it before.
        self.notice_request = unsafe {
            self.worker.recv(tags::NOTICE, tags::KIND_MASK, self.notice.as_mut_ptr(), NOTICE_BYTES)?
        };
        Ok(())
    }

    /// Takes in all notices that have arrived, and does what they ask of this rank.
    pub(super) fn listen(&mut self) -> Result<()> {
        while !self.notice_request.is_null() {
            let mut info = ucp_tag_recv_info_t::default();
            // SAFETY: posted by `await_notice` and not yet reported complete.
            match unsafe { self.worker.received(self.notice_request, &mut info) } {
                UCS_INPROGRESS => break,
                UCS_OK => {
                    self.notice_request = null_mut();
                    self.heard(info);
                    self.await_notice()?;
                }
                status => {
                    self.notice_request = null_mut();
                    return Err(self.worker.context.error("ucp_tag_recv_nbx", status));
                }
            }
        }
        if !self.outgoing.is_empty() {
            self.settle_outgoing();
        }
        Ok(())
    }

    fn heard(&mut self, info: ucp_tag_recv_info_t) {
        let from = tags::source(info.sender_tag);
        let Some((word, group)) = Word::from_tag(info.sender_tag) else { return };
        if from >= self.cards.len() {
            return;
        }
        self.spoke[from] = true;
        self.lines.heard(from);
        match word {
            Word::Leaving => {
                // What it sent before has come, because messages between two ranks keep their order.
                self.settled[from] = true;
                // If it cannot be told, it is gone already. Who has given up has told it, and makes no connections. Who has
                // said the same needs no answer, and may be past receiving one, which would then be under way for ever.
                if !self.given_up && !self.parting[from] {
                    let _ = self.say(from, Word::Confirmed, 0, "");
                }
            }
            Word::Confirmed => self.settled[from] = true,
            Word::Hello => self.greetings[from] += 1,
            Word::Absent => drop(self.absent.insert(from, self.text_of(&info))),
            Word::Ask => self.questions.askers.push(from),
            Word::Answer => self.questions.answered(from, &self.text_of(&info), self.cards.len()),
            Word::Farewell | Word::Failure => {
                if self.numbers.get(group as usize).is_some_and(|used| *used) {
                    let text = self.text_of(&info);
                    self.inbox.put(Notice { group, word, from, text });
                }
            }
        }
    }

    /// What came with a notice, which is in its place still.
    fn text_of(&self, info: &ucp_tag_recv_info_t) -> String {
        String::from_utf8_lossy(&self.notice[..info.length.min(NOTICE_BYTES)]).into_owned()
    }

    /// The next notice about a group of this rank.
    pub(super) fn take_notice(&mut self, group: u16) -> Option<Notice> {
        self.inbox.take(|notice| notice.group == group)
    }

    /// The next farewell of those.
    pub(super) fn take_farewell(&mut self, group: u16) -> Option<Notice> {
        self.inbox.take(|notice| notice.group == group && notice.word == Word::Farewell)
    }

    /// Answers those who have asked.
    pub(super) fn note_wait(&mut self, wait: Wait) {
        for asker in std::mem::take(&mut self.questions.askers) {
            if !self.is_gone(asker) {
                // Who cannot be told finds out by itself, here and below.
                let _ = self.say(asker, Word::Answer, 0, &waits::told(wait));
            }
        }
    }

    /// Asks `peer` for whom it waits; how often it has answered before.
    pub(super) fn ask(&mut self, peer: usize) -> u64 {
        let _ = self.say(peer, Word::Ask, 0, "");
        self.questions.before(peer)
    }

    /// Whom a peer waits for that was asked after it had answered so often.
    pub(super) fn answer(&self, peer: usize, before: u64) -> Option<Wait> {
        self.questions.answer(peer, before)
    }

    /// Says something about the group that `peer` calls `group`.
    pub(super) fn say(&mut self, peer: usize, word: Word, group: u16, text: &str) -> Result<()> {
        let text = blame::cut(text, NOTICE_BYTES);
        let tag = tags::control(tags::NOTICE, self.rank, (word as u64) << 16 | group as u64);
        self.control(peer, tag, text.as_bytes().into())
    }

    /// Sends a control message whose bytes this session keeps until it is done.
    pub(super) fn control(&mut self, peer: usize, tag: u64, bytes: Box<[u8]>) -> Result<()> {
        let endpoint = self.endpoint(peer)?;
        // SAFETY: the boxed bytes stay where they are until `settle_outgoing` sees the request done.
        match unsafe { self.worker.send(endpoint, tag, bytes.as_ptr(), bytes.len(), false) } {
            Posted::Done => Ok(()),
            Posted::Failed(status) => Err(self.worker.context.error("ucp_tag_send_nbx", status)),
            Posted::Pending(request) => {
                self.outgoing.push((bytes, request));
                Ok(())
            }
        }
    }

    /// Forgets the control messages that are done; whether none is left.
    pub(super) fn settle_outgoing(&mut self) -> bool {
        let worker = &self.worker;
        self.outgoing.retain(|(_, request)| {
            // SAFETY: a request of this worker that was not yet reported complete.
            unsafe { worker.finished(*request) == UCS_INPROGRESS }
        });
        self.outgoing.is_empty()
    }

    /// Whether nothing more can be had of `peer`: its connection has failed, its process has ended, or it has said so.
    pub(super) fn is_gone(&mut self, peer: usize) -> bool {
        self.neighbours.look();
        self.failures.of(peer) != UCS_OK
            || self.neighbours.ended(peer)
            || self.absent.contains_key(&peer)
            || self.lines.gone(peer).is_some()
    }

    /// Whether some peer may be gone.
    pub(super) fn misses_any(&mut self) -> bool {
        self.neighbours.look();
        self.failures.any() || self.neighbours.any() || !self.absent.is_empty() || self.lines.any()
    }

    /// What has become of a peer that is gone.
    pub(super) fn what_became_of(&self, peer: usize) -> String {
        let host = &self.cards[peer].host;
        match (self.absent.get(&peer), self.lines.gone(peer), self.failures.of(peer)) {
            (Some(why), ..) => format!("gave up: {why}"),
            (_, Some(why), _) => {
                format!("on {host} is unreachable: its host, or the way to it, does not answer ({why})")
            }
            (.., UCS_OK) => self.neighbours.how(peer),
            (.., status) => format!("on {host} is unreachable ({})", self.worker.context.ucp.status(status)),
        }
    }
}
