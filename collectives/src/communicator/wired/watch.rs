//! Watches a wire from a thread of its own: the host never waits for a call, and where the wire itself does, to connect ranks,
//! it does not know for whom. So somebody else has to notice that one does not end, and to get the queues going again.
//!
//! The watches of all ranks tell each other over the host's transport how far they are. So a rank that is lost, late or
//! calls something else is named, by all others.

use super::slots::{Numbered, SharedSlots};
use super::wire::{Lane, Wire};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::device::Streams;
use crate::error::{Error, Result};
use crate::locked;
use crate::pending::Pending;
use crate::schedule::{Algorithm, Kind};
use crate::watch::{Fingerprint, Until, Waited};
use std::marker::PhantomData;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest time between two looks.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long the host may take to hear why a peer is gone.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// How long the thread may take to end after a failure.
const GRACE: Duration = Duration::from_secs(5);

/// The thread, and what it shares with the carrier.
pub(super) struct Watch<Q: Streams> {
    state: Arc<State>,
    thread: Mutex<Option<Thread>>,
    _queue: PhantomData<fn(Q)>,
}

/// The thread, how it is told to stop, and how it tells that it has.
type Thread = (JoinHandle<()>, Sender<()>, Receiver<()>);

struct State {
    host: Communicator,
    failed: Mutex<Option<Error>>,
    abort: Box<dyn Fn() + Send + Sync>,
}

impl State {
    /// Ends everything, for the first reason that there is.
    fn fail(&self, error: Error) -> Error {
        let error = self.cause(error);
        {
            let mut failed = locked(&self.failed);
            if let Some(first) = &*failed {
                return first.clone();
            }
            *failed = Some(error.clone());
        }
        // Peers that have not heard of it learn why; the host keeps its own first failure.
        self.host.abort(&error.to_string());
        (self.abort)();
        error
    }

    /// Where a wire only noticed that a peer is gone, the host may know why, or soon will.
    fn cause(&self, error: Error) -> Error {
        let start = Instant::now();
        while matches!(error, Error::Library { .. }) && locked(&self.failed).is_none() {
            if let Err(cause) = self.host.progress() {
                return cause;
            }
            if start.elapsed() > TOLD_WITHIN {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        error
    }
}

impl<Q: Streams> Watch<Q> {
    /// Starts the thread. All ranks call it together.
    pub fn start<W: Wire<Q>>(
        host: &Communicator,
        wire: Arc<W>,
        slots: SharedSlots<Q::Event>,
    ) -> Result<Self> {
        let wire_of_state = Arc::clone(&wire);
        let abort: Box<dyn Fn() + Send + Sync> = Box::new(move || wire_of_state.abort());
        let state = Arc::new(State { host: host.clone(), failed: Mutex::new(None), abort });
        if host.size() == 1 {
            return Ok(Watch { state, thread: Mutex::new(None), _queue: PhantomData });
        }
        let mut rounds = Rounds {
            state: Arc::clone(&state),
            peers: group_of_watches(host)?,
            round: None,
            young: false,
            rows: None,
            table: vec![Row::default(); host.size()],
            over: false,
        };
        let deadline = host.deadline();
        let interval = (deadline / 8).clamp(Duration::from_millis(5), INTERVAL);
        let (stop, stopped) = channel::<()>();
        let (ended, end) = channel::<()>();
        let mut overdue = Overdue { deadline, since: [None; 3] };
        let body = move || {
            // A queue's thread lasts as long as its wire.
            let mut stopping = false;
            while !(stopping && rounds.over) && locked(&rounds.state.failed).is_none() {
                let looked = rounds
                    .look::<Q>(&slots, stopping)
                    .and_then(|()| wire.check())
                    .and_then(|()| overdue.check::<Q>(&slots, &rounds));
                if let Err(error) = looked {
                    rounds.state.fail(error);
                }
                match stopped.recv_timeout(if stopping { Duration::from_millis(1) } else { interval }) {
                    Ok(()) => stopping = true,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            if let Some(error) = locked(&rounds.state.failed).clone() {
                rounds.peers.abort(&error.to_string());
            }
            drop((rounds, wire, slots));
            let _ = ended.send(());
        };
        let name = format!("watch-{}", host.rank());
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(|e| Error::start("start the watch of a wire", e))?;
        Ok(Watch { state, thread: Mutex::new(Some((thread, stop, end))), _queue: PhantomData })
    }

    /// The failure that ended everything, if one did.
    pub fn failed(&self) -> Option<Error> {
        locked(&self.state.failed).clone()
    }

    /// Ends everything; gives the first reason that there was.
    pub fn fail(&self, error: Error) -> Error {
        self.state.fail(error)
    }

    /// Ends the thread, once the others know that this rank leaves in good order.
    pub fn stop(&self) {
        let Some((thread, stop, end)) = locked(&self.thread).take() else { return };
        let _ = stop.send(());
        let (mut orderly, mut failed) = (Until::after(self.state.host.deadline()), Until::after(GRACE));
        while matches!(end.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
            let until = if self.failed().is_some() { &mut failed } else { &mut orderly };
            if until.is_over() {
                return;
            }
        }
        let _ = thread.join();
    }
}

/// The group in which the watches of `host` meet.
fn group_of_watches(host: &Communicator) -> Result<Communicator> {
    // That watches meet must not pass for an answer to a call of the host.
    let peers = host.apart()?;
    // Each hears of each other by itself: whom one waits for is who is silent, and not one that was to pass it on.
    peers.force(Kind::AllGather, Some(Algorithm::Pairwise))?;
    Ok(peers)
}

/// How far one rank is, as it travels.
#[derive(Clone, Copy, Default)]
struct Row {
    /// By lane: the number of the last call that was started.
    started: [u64; 2],
    /// By lane: the number of the first that is not done, or 0, and its fingerprint.
    first: [(u64, u64); 2],
    /// It leaves in good order.
    leaves: bool,
}

const WORDS: usize = 7;

impl Row {
    fn words(&self) -> [u64; WORDS] {
        let [a, b] = self.first;
        [self.started[0], self.started[1], a.0, a.1, b.0, b.1, u64::from(self.leaves)]
    }

    fn from_words(words: &[u64]) -> Self {
        Row {
            started: [words[0], words[1]],
            first: [(words[2], words[3]), (words[4], words[5])],
            leaves: words[6] != 0,
        }
    }
}

/// What watches tell each other, over and over.
struct Rounds {
    state: Arc<State>,
    peers: Communicator,
    round: Option<Pending<Buffer<u64>>>,
    /// It has begun at the last look, and does not tell yet who is silent.
    young: bool,
    /// What the last round came in, for the next.
    rows: Option<Buffer<u64>>,
    table: Vec<Row>,
    /// Somebody leaves: there are no more rounds.
    over: bool,
}

impl Rounds {
    fn look<Q: Streams>(&mut self, slots: &SharedSlots<Q::Event>, leaves: bool) -> Result<()> {
        if self.over {
            // Who has left may still fail before it ends, and others may be lost.
            return self.state.host.progress();
        }
        self.state.host.handle.shared.lock().compare_notes()?;
        if let Some(round) = self.round.take() {
            if !round.is_done() {
                (self.round, self.young) = (Some(round), false);
                return Ok(());
            }
            let rows = round.wait()?;
            for (row, words) in self.table.iter_mut().zip(rows.host().chunks(WORDS)) {
                *row = Row::from_words(words);
            }
            self.rows = Some(rows);
            self.compare()?;
            if self.table.iter().any(|row| row.leaves) {
                self.over = true;
                return Ok(());
            }
        }
        let rank = self.peers.rank();
        let mut rows = self.rows.take().unwrap_or_else(|| Buffer::zeroed(WORDS * self.peers.size()));
        let mine = Row { leaves, ..row::<Q>(slots)? };
        rows.host_mut()[WORDS * rank..WORDS * (rank + 1)].copy_from_slice(&mine.words());
        (self.round, self.young) = (Some(self.peers.start_all_gather_in_place(rows)?), true);
        Ok(())
    }

    /// Calls of one number must be the same call.
    fn compare(&self) -> Result<()> {
        let (rank, job_rank) = (self.peers.rank(), |member| self.peers.job_rank(member));
        for lane in Lane::ALL {
            let mine = self.table[rank].first[lane as usize];
            for (peer, row) in self.table.iter().enumerate() {
                let theirs = row.first[lane as usize];
                if mine.0 != 0 && mine.0 == theirs.0 && mine.1 != theirs.1 {
                    let words =
                        |bits| Fingerprint::from_bits(bits).in_job(self.peers.size(), job_rank).to_string();
                    return Err(Error::Diverged {
                        sequence: mine.0,
                        rank: job_rank(rank),
                        mine: words(mine.1),
                        peer: job_rank(peer),
                        theirs: words(theirs.1),
                        past: String::new(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether `row` is of a rank that had not started this call, a collective.
    fn is_behind(row: &Row, late: &Numbered) -> bool {
        row.started[late.lane as usize] < late.number
    }

    /// Whether it may be known at the next look only why this call does not end.
    fn may_tell_later(&self, late: &Numbered) -> bool {
        self.young && !self.over && Self::is_behind(&self.table[self.peers.rank()], late)
    }

    /// Why a call that has begun here does not end.
    fn blame(&self, late: Numbered, after: Duration) -> Error {
        let (rank, job_rank) = (self.peers.rank(), |member| self.peers.job_rank(member));
        let what = format!("{} between devices", late.call.in_job(job_rank));
        let silent = |peer| Error::timeout(what, job_rank(rank), job_rank(peer), after);
        if late.number == 0 {
            return silent(late.call.root);
        }
        let behind = |row: &Row| Self::is_behind(row, &late);
        let position = |wanted: &dyn Fn(&Row) -> bool| self.table.iter().position(wanted);
        let peer = match behind(&self.table[rank]) {
            false => position(&behind),
            // They have not met since this rank started it: because somebody left, or because somebody does not come.
            true if self.over => position(&|row| row.leaves && behind(row)),
            true => self.round.as_ref().and_then(Pending::waits_for),
        };
        match peer {
            Some(peer) if peer != rank => silent(peer),
            _ => Error::Library {
                library: "the wire between devices".into(),
                call: late.call.kind.name(),
                rank: job_rank(rank),
                text: format!(
                    "{} is not done after {after:?}, although no rank is known to be late",
                    late.call.in_job(job_rank)
                ),
            },
        }
    }
}

/// How far this rank is.
fn row<Q: Streams>(slots: &SharedSlots<Q::Event>) -> Result<Row> {
    let mut row = Row::default();
    for (known, seen) in row.started.iter_mut().zip(&slots.started) {
        *known = seen.load(Ordering::Acquire);
    }
    for slot in locked(&slots.places).iter() {
        let Some(Numbered { call, lane, number, .. }) = *locked(&slot.call) else { continue };
        let lane = lane as usize;
        let first = row.first[lane].0;
        if number > 0 && (first == 0 || number < first) && slot.under_way::<Q>()? {
            row.first[lane] = (number, Fingerprint::of(&call).bits());
        }
    }
    Ok(row)
}

/// Since when the first call of each lane has been under way, and of all messages any.
struct Overdue {
    deadline: Duration,
    since: [Option<(u64, Waited)>; 3],
}

impl Overdue {
    fn check<Q: Streams>(&mut self, slots: &SharedSlots<Q::Event>, rounds: &Rounds) -> Result<()> {
        let mut firsts: [Option<Numbered>; 3] = [None; 3];
        for slot in locked(&slots.places).iter() {
            let Some(numbered) = *locked(&slot.call) else { continue };
            let message = numbered.call.kind.is_message();
            let first = &mut firsts[if message { 2 } else { numbered.lane as usize }];
            let earlier = first.is_none_or(|first| numbered.serial < first.serial);
            // One that has not begun waits for this rank's own computation.
            if earlier && slot.waits_for_others::<Q>()? {
                *first = Some(numbered);
            }
        }
        match self.first_late(firsts).filter(|late| !rounds.may_tell_later(late)) {
            Some(late) => Err(rounds.blame(late, self.deadline)),
            None => Ok(()),
        }
    }

    /// Of these, the one that was started first of those that are late: the others may wait for it.
    fn first_late(&mut self, firsts: [Option<Numbered>; 3]) -> Option<Numbered> {
        let mut late: Option<Numbered> = None;
        for (since, first) in self.since.iter_mut().zip(firsts) {
            let Some(first) = first else {
                *since = None;
                continue;
            };
            match since {
                Some((serial, waited)) if *serial == first.serial => {
                    let earlier = late.is_none_or(|late| first.serial < late.serial);
                    if waited.so_far() > self.deadline && earlier {
                        late = Some(first);
                    }
                }
                _ => *since = Some((first.serial, Waited::begin())),
            }
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::element::{DType, ReduceOp};
    use crate::schedule::Call;
    use crate::transport::hierarchical::Hierarchical;
    use crate::transport::{Nodes, Transport, threads};

    /// One process stands still, and its watch with it; another has only not come so far.
    #[test]
    fn who_does_not_meet_the_others_is_to_blame() {
        let late = |number| {
            let call = Call { op: ReduceOp::Sum, ..Call::new(Kind::AllReduce, DType::F32, 6) };
            Numbered { call, lane: Lane::Reductions, number, serial: number }
        };
        let mut ranks = Communicator::threads(3).into_iter();
        let (peers, other, _still) = (ranks.next().unwrap(), ranks.next().unwrap(), ranks.next().unwrap());
        let met = other.start_all_gather_in_place(Buffer::<u64>::zeroed(3)).unwrap();
        let round = peers.start_all_gather_in_place(Buffer::<u64>::zeroed(3)).unwrap();
        assert!(!round.is_done() && !met.is_done());
        let state = State { host: peers.clone(), failed: Mutex::new(None), abort: Box::new(|| ()) };
        let row = |started| Row { started: [started; 2], ..Row::default() };
        let mut rounds = Rounds {
            state: Arc::new(state),
            peers,
            round: Some(round),
            young: false,
            rows: None,
            table: vec![row(5), row(4), row(5)],
            over: false,
        };
        let blamed = |rounds: &mut Rounds, number| match rounds.blame(late(number), Duration::ZERO) {
            Error::Timeout { peer, .. } => Some(peer),
            _ => None,
        };
        // All are known to be that far but one; then nobody, because one does not come.
        assert_eq!(blamed(&mut rounds, 5), Some(1));
        assert_eq!(blamed(&mut rounds, 6), Some(2));
        rounds.young = true;
        assert!(rounds.may_tell_later(&late(6)) && !rounds.may_tell_later(&late(5)));
        rounds.table[1].leaves = true;
        rounds.over = true;
        assert!(!rounds.may_tell_later(&late(6)), "there are no more rounds");
        assert_eq!(blamed(&mut rounds, 6), Some(1));
    }

    /// Of two nodes, where what a rank hears of the other node is passed on.
    #[test]
    fn who_is_waited_for_is_silent_itself() {
        let watched = |mut outer: threads::Threads| {
            let nodes = Nodes::blocks(4, 2).unwrap();
            let inner = outer.subgroup(nodes.with(outer.rank()), 1, Duration::from_secs(10)).unwrap();
            let both = Hierarchical::new("nodes", Some(inner), Box::new(outer), nodes).unwrap();
            let host = Communicator::new(Box::new(both), Options::default()).unwrap();
            (group_of_watches(&host).unwrap(), host)
        };
        let waited_for = std::thread::scope(|scope| {
            let ranks: Vec<_> =
                threads::group(4).into_iter().map(|rank| scope.spawn(move || watched(rank))).collect();
            let groups: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            let start = |(peers, _): &(Communicator, _)| {
                peers.start_all_gather_in_place(Buffer::<u64>::zeroed(4 * WORDS)).unwrap()
            };
            let rounds: Vec<_> = groups[..3].iter().map(start).collect();
            for _ in 0..100 {
                rounds.iter().for_each(|round| assert!(!round.is_done()));
            }
            let waited_for: Vec<_> = rounds.iter().map(Pending::waits_for).collect();
            groups.iter().for_each(|(peers, _)| peers.abort("nobody waits for the rounds"));
            waited_for
        });
        assert_eq!(waited_for, [Some(3); 3]);
    }

    #[test]
    fn of_late_calls_the_first_is_named() {
        let of = |kind, serial| {
            let number = if kind == Kind::Recv { 0 } else { serial };
            Some(Numbered { call: Call::new(kind, DType::F32, 6), lane: Lane::Gathers, number, serial })
        };
        let mut overdue = Overdue { deadline: Duration::ZERO, since: [None; 3] };
        let under_way = [of(Kind::AllGather, 8), None, of(Kind::Recv, 7)];
        assert!(overdue.first_late(under_way).is_none());
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(overdue.first_late(under_way).map(|late| late.serial), Some(7));
    }
}
