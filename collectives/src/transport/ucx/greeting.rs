//! Connecting to every peer at the start, so that no collective pays for it.
//!
//! UCX makes a connection at the first message: peers then exchange addresses of all their ways to each other and choose
//! among them, which takes milliseconds over TCP. Large jobs leave it at that, because each rank of a collective speaks to
//! few of the others.

use super::session::{State, Word};
use crate::error::{Error, Result};
use crate::transport::neighbours::last_words;
use crate::watch::Waited;
use std::time::{Duration, Instant};

/// Up to so many ranks connect all to all at the start.
pub(super) const MOST: usize = 64;
/// A message that has come over a new connection says that it can be sent over, a second one that the choice among
/// the ways is made.
const ROUNDS: u8 = 2;
/// How long nothing has moved when a waiting rank sleeps between two looks, and for how long it does.
const IDLE: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

impl State {
    /// Connects this rank to all others, which do the same, unless they are many; each waits `within` for the others.
    pub(super) fn greet(&mut self, within: Duration) -> Result<()> {
        if self.cards.len() > MOST {
            return Ok(());
        }
        let later = std::mem::replace(&mut self.patience, within);
        let met = (1..=ROUNDS).try_for_each(|round| self.greet_once(round, within));
        self.patience = later;
        if let Err(why) = &met {
            // Peers are not to be waited for at the end of a rank that failed here. They hear why, or else they would take it
            // for what went wrong.
            (self.failed, self.cause) = (true, Some(why.clone()));
            if let Some(meeting) = &self.meeting {
                // Before what may take long where nobody listens any more.
                meeting.tell(why);
            }
            self.stay_away();
        }
        met
    }

    fn greet_once(&mut self, round: u8, within: Duration) -> Result<()> {
        let (rank, size) = (self.rank, self.cards.len());
        let others = || (0..size).filter(move |&peer| peer != rank);
        for peer in others() {
            self.say(peer, Word::Hello, 0, "")?;
        }
        let (mut waited, mut awake) = (Waited::begin(), Instant::now() + IDLE);
        loop {
            let moved = self.worker.progress();
            self.listen()?;
            let Some(missing) = others().find(|&peer| self.greetings[peer] < round) else {
                return Ok(());
            };
            if let Some(&first) = self.absent.keys().next() {
                return Err(self.stranger(first, within));
            }
            let now = Instant::now();
            if moved {
                awake = now + IDLE;
            }
            let late = waited.so_far() > within;
            if !late && self.meeting.is_some() && self.has_ended(missing) {
                // Where all have met it has said why, or is missed: by who hears all there, if not by this rank.
                self.still_met()?;
                std::thread::sleep(NAP);
                continue;
            }
            if late || self.is_gone(missing) {
                // What it had sent may still be on its way, and so may why it has failed.
                let came = last_words(|| {
                    self.worker.progress();
                    self.listen()?;
                    self.still_met()?;
                    Ok(self.greetings[missing] >= round || !self.absent.is_empty())
                })?;
                if came {
                    continue;
                }
                return Err(self.stranger(missing, within));
            }
            match (moved, now > awake) {
                (true, _) => {}
                (false, false) => std::thread::yield_now(),
                (false, true) => {
                    self.still_met()?;
                    std::thread::sleep(NAP);
                }
            }
        }
    }

    /// Whether the process of `peer` is seen to have ended.
    fn has_ended(&mut self, peer: usize) -> bool {
        self.neighbours.look();
        self.neighbours.ended(peer)
    }

    /// An error once a rank has said where all have met why it cannot connect, or has ended.
    fn still_met(&self) -> Result<()> {
        self.meeting.as_ref().map_or(Ok(()), |meeting| meeting.whole())
    }

    fn stranger(&mut self, peer: usize, after: Duration) -> Error {
        let rank = self.rank;
        if !self.is_gone(peer) {
            return Error::timeout("connecting over UCX", rank, peer, after);
        }
        let how = format!("{}, while ranks were connecting", self.what_became_of(peer));
        Error::PeerLost { rank, peer, how }
    }
}

#[cfg(test)]
mod tests {
    use super::super::peers::Card;
    use super::super::session::State;
    use super::super::{Start, UcxTransport};
    use crate::bootstrap::{Identity, Options, Rendezvous};
    use crate::error::Error;
    use std::sync::{Barrier, Mutex};
    use std::time::Duration;

    /// What each of three ranks that have met comes to.
    fn of_three(job: &str, rank: impl Fn(usize, Rendezvous) -> String + Sync) -> [String; 3] {
        let job = Some(format!("{job}-{}", std::process::id()));
        let one = &|number| {
            let job = job.clone();
            let identity = Identity { rank: number, world: 3, local_size: None, job, ..Identity::alone() };
            rank(number, Rendezvous::join(&identity, &Options::default()).unwrap())
        };
        std::thread::scope(|scope| {
            [0, 1, 2].map(|rank| scope.spawn(move || one(rank))).map(|thread| thread.join().unwrap())
        })
    }

    /// Rank 2 tells where it is, and then where all have met that it gets no further.
    #[test]
    fn who_cannot_connect_tells_those_whom_it_does_not_reach_where_they_have_met() {
        if let Err(why) = ucx_sys::Ucp::load() {
            return harness::skip(&why);
        }
        UcxTransport::connect(0, 1, &Start::default(), &mut |card| Ok(vec![card])).unwrap();
        let (start, over) = (Start { within: Duration::from_secs(600), ..Start::default() }, Barrier::new(3));
        let said = of_three("unreached", |rank, mut met| {
            if rank < 2 {
                let error = UcxTransport::join(&mut met, &start).map(drop).unwrap_err();
                over.wait();
                return error.to_string();
            }
            let mut silent = State::open(2, 3, &start, &mut |card| met.exchange(&card)).unwrap();
            met.meeting().tell(&Error::Launch("rank 2 has no way".into()));
            over.wait();
            silent.turn().unwrap().failed = true;
            String::new()
        });
        assert!(said[..2].iter().all(|said| said.contains("rank 2 has no way")), "{said:?}");
    }

    /// Rank 2 is in that case and has ended by the time that the others look at its process.
    #[test]
    fn who_has_ended_before_anybody_connects_is_heard_where_all_have_met() {
        if let Err(why) = ucx_sys::Ucp::load() {
            return harness::skip(&why);
        }
        UcxTransport::connect(0, 1, &Start::default(), &mut |card| Ok(vec![card])).unwrap();
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let (start, told, over) = (&Start::default(), Barrier::new(3), Barrier::new(3));
        let said = of_three("ended", |rank, mut met| {
            let meeting = met.meeting();
            let exchange = &mut |bytes: Vec<u8>| {
                let mut card = Card::from_bytes(rank, &bytes)?;
                if rank == 2 {
                    card.home.pid = ended.id();
                }
                let all = met.exchange(&card.to_bytes());
                if rank == 2 {
                    meeting.tell(&Error::Launch("rank 2 has no way".into()));
                }
                told.wait();
                all
            };
            let mut session = State::open(rank, 3, start, exchange).unwrap();
            let mut state = session.turn().unwrap();
            state.meeting = Some(met.meeting());
            let said =
                if rank < 2 { state.greet(start.within).unwrap_err().to_string() } else { String::new() };
            over.wait();
            state.failed = true;
            said
        });
        assert!(said[..2].iter().all(|said| said.contains("rank 2 has no way")), "{said:?}");
    }

    /// Rank 2 tells where it is and connects to nobody, and rank 1 has less patience than rank 0.
    #[test]
    fn who_cannot_connect_tells_those_who_wait_for_others() {
        if let Err(why) = ucx_sys::Ucp::load() {
            return harness::skip(&why);
        }
        // Or else the others would wait for one that cannot open it.
        UcxTransport::connect(0, 1, &Start::default(), &mut |card| Ok(vec![card])).unwrap();
        let (cards, all_there, over) = (Mutex::new(vec![Vec::new(); 3]), Barrier::new(3), Barrier::new(3));
        let exchange = |rank: usize, card: Vec<u8>| {
            cards.lock().unwrap()[rank] = card;
            all_there.wait();
            Ok(cards.lock().unwrap().clone())
        };
        let connect = |rank: usize, within| {
            let start = Start { within, ..Start::default() };
            let met = UcxTransport::connect(rank, 3, &start, &mut |card| exchange(rank, card));
            over.wait();
            met.map(drop).unwrap_err()
        };
        let (first, second) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let start = Start { call_timeout: Duration::ZERO, ..Start::default() };
                let mut silent = State::open(2, 3, &start, &mut |card| exchange(2, card)).unwrap();
                over.wait();
                silent.turn().unwrap().failed = true;
            });
            let second = scope.spawn(|| connect(1, Duration::from_secs(2)));
            (connect(0, Duration::from_secs(60)), second.join().unwrap())
        });
        assert!(matches!(second, Error::Timeout { peer: 2, .. }), "{second}");
        let told = first.to_string();
        assert!(
            matches!(first, Error::PeerLost { peer: 1, .. }) && told.contains("no answer from rank 2"),
            "{told}"
        );
    }
}
