//! The way out of calls in which MPI waits for other ranks: its start and end, new communicators, its own collectives.
//! Nothing gets out of one that does not return but the end of the process, which a thread beside it brings about. (Until
//! all ranks have come to the end, each looks by itself, see [`Control::end`](super::control::Control::end).)

use super::library::library;
use collectives::transport::neighbours::{Neighbours, SEEN_BY_ALL};
use collectives::watch::Waited;
use collectives::{Error, Result, locked};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;
use std::time::Duration;

/// How a process starts MPI, and when it stops waiting for other ranks inside it.
#[derive(Clone)]
pub struct Start {
    /// Only the thread that starts MPI will ever use it, and others are refused. Open MPI takes locks otherwise, which
    /// make up a quarter of its shortest messages.
    pub one_thread: bool,
    /// How long MPI may take to bring the ranks of the job together.
    pub within: Duration,
    /// Says within so long which ranks have not come, where MPI does not; asked when half of `within` has gone.
    pub missing: Option<Arc<dyn Fn(Duration) -> Option<String> + Send + Sync>>,
    /// How long a call may take that makes a communicator, is one of MPI's own collectives or ends MPI, and how long a rank
    /// that leaves a group waits for its peers to take what it sent.
    pub call_timeout: Duration,
    /// Whether a panic of the calling thread is caught and becomes an error; any other ends the job.
    pub caught: fn() -> bool,
    /// Gets the reason, before the process ends with exit code 1.
    pub tell: Arc<dyn Fn(&Error) + Send + Sync>,
}

impl Default for Start {
    fn default() -> Self {
        Start {
            one_thread: false,
            within: collectives::bootstrap::Options::default().timeout,
            missing: None,
            call_timeout: collectives::Options::default().deadline,
            caught: || false,
            // In one piece, between which nothing of other ranks comes in a launcher's output.
            tell: Arc::new(|why| {
                let line = format!("{why}\n");
                eprint!("{line}");
            }),
        }
    }
}

/// Where MPI waits for other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Place {
    Start = 1,
    Communicator = 2,
    Collective = 3,
    End = 4,
    /// A communicator whose ranks have all come.
    Group = 5,
}

/// What is known of the ranks that are waited for, once MPI has started.
#[derive(Clone)]
pub(super) struct Ranks {
    /// This rank.
    pub(super) rank: usize,
    pub(super) neighbours: Arc<Mutex<Neighbours>>,
}

impl Ranks {
    /// The loss of the rank of this host that ended first, once it was seen to have ended `grace` ago.
    pub(super) fn lost(&self, grace: Duration) -> Option<Error> {
        let mut neighbours = locked(&self.neighbours);
        let peer = neighbours.first_ended(grace)?;
        Some(Error::PeerLost { rank: self.rank, peer, how: neighbours.how(peer) })
    }
}

/// Watches this process's calls of MPI from a thread of its own, while it lives. MPI is called in turns, so there is one
/// such call at a time.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Thread,
}

#[derive(Default)]
struct Shared {
    /// [`CALLS`] times how many calls there were, and the [`Place`] of the one that has not returned.
    call: AtomicU64,
    over: AtomicBool,
}

const CALLS: u64 = 8;
/// How long ranks may take to make a communicator once all have come: one that has failed since does not call MPI any more,
/// and cannot say so to who waits inside.
const COME: Duration = Duration::from_secs(30);
/// How often the thread looks. A call that returns sooner is never seen.
const INTERVAL: Duration = Duration::from_millis(50);
/// How often it looks during a call that it has seen: ranks that are not inside MPI may end some 20 ms after they have seen
/// another's end.
const OFTEN: Duration = Duration::from_millis(10);

impl Watch {
    /// A watch of calls that are announced by [`enter`](Self::enter).
    pub(super) fn new(start: &Start, ranks: Option<Ranks>) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (start, theirs) = (start.clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("mpi-watch".into())
            .spawn(move || watch(&theirs, &start, ranks.as_ref()))
            .map_err(|e| Error::system("starting the thread that watches calls of MPI", e))?;
        Ok(Watch { shared, thread: thread.thread().clone() })
    }

    /// A watch of one call, or of several in a row, which begin now and end with it.
    pub(super) fn of(place: Place, start: &Start, ranks: Option<Ranks>) -> Result<Self> {
        let watch = Self::new(start, ranks)?;
        watch.shared.enter(place);
        Ok(watch)
    }

    /// A call begins, and has returned when this is dropped.
    #[inline(always)]
    pub(super) fn enter(&self, place: Place) -> Inside<'_> {
        self.shared.enter(place);
        Inside(&self.shared)
    }
}

/// MPI is inside a call.
pub(super) struct Inside<'w>(&'w Shared);

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Shared {
    #[inline(always)]
    fn enter(&self, place: Place) {
        let calls = self.call.load(Ordering::Relaxed) / CALLS + 1;
        self.call.store(calls * CALLS + place as u64, Ordering::Release);
    }

    #[inline(always)]
    fn leave(&self) {
        let calls = self.call.load(Ordering::Relaxed) / CALLS;
        self.call.store(calls * CALLS, Ordering::Release);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.leave();
        self.shared.over.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// The thread: ends the process when a call has to be given up.
fn watch(shared: &Shared, start: &Start, ranks: Option<&Ranks>) {
    let mut seen = (0, Wait::new());
    let mut pause = INTERVAL;
    loop {
        std::thread::park_timeout(pause);
        if shared.over.load(Ordering::Acquire) {
            return;
        }
        let call = shared.call.load(Ordering::Acquire);
        if call != seen.0 {
            (seen, pause) = ((call, Wait::new()), INTERVAL);
            continue;
        }
        let Some(place) = Place::of(call) else { continue };
        pause = OFTEN;
        if let Some(why) = seen.1.given_up(place, start, ranks)
            && shared.call.load(Ordering::Acquire) == call
        {
            (start.tell)(&why);
            // SAFETY: ends the process. What would run at an orderly end is MPI's too, in which a thread is.
            unsafe { libc::_exit(1) };
        }
    }
}

impl Place {
    fn of(call: u64) -> Option<Self> {
        let places = [Place::Start, Place::Communicator, Place::Collective, Place::End, Place::Group];
        places.into_iter().find(|&p| p as u64 == call % CALLS)
    }

    /// The library's function, or what several are for.
    fn name(self) -> &'static str {
        match self {
            Place::Start => "MPI_Init",
            Place::Communicator | Place::Group => "the making of a communicator",
            Place::Collective => "a collective of its own",
            Place::End => "MPI_Finalize",
        }
    }

    /// How long a call may take.
    fn limit(self, start: &Start) -> Duration {
        if self == Place::Group { start.call_timeout.min(COME) } else { start.call_timeout }
    }
}

/// How one call has gone so far.
struct Wait {
    /// How long it takes, but for what this process was stopped.
    waited: Waited,
    /// Ranks have been looked for.
    asked: bool,
}

impl Wait {
    fn new() -> Self {
        Wait { waited: Waited::begin(), asked: false }
    }

    /// Why nothing more can be hoped for.
    fn given_up(&mut self, place: Place, start: &Start, ranks: Option<&Ranks>) -> Option<Error> {
        let Some(ranks) = ranks else {
            return self.not_started(start);
        };
        // At the end ranks end in order, too.
        if place != Place::End
            && let Some(lost) = ranks.lost(SEEN_BY_ALL)
        {
            return Some(lost);
        }
        let limit = place.limit(start);
        let late = self.waited.so_far() > limit;
        let known = match place {
            Place::Group => {
                ", though all ranks of the group had come: one of them has failed since, or stands still"
            }
            _ => "",
        };
        late.then(|| Error::Library {
            library: library(),
            call: place.name(),
            rank: ranks.rank,
            text: format!("it did not return within {limit:?}{known}"),
        })
    }

    /// The same before it is known who the others are.
    fn not_started(&mut self, start: &Start) -> Option<Error> {
        let half = start.within / 2;
        let missing = match &start.missing {
            Some(missing) if !self.asked && self.waited.so_far() >= half => {
                self.asked = true;
                self.waited.blocked(|| missing(half))
            }
            _ => None,
        };
        if missing.is_none() && self.waited.so_far() < start.within {
            return None;
        }
        let missing = missing.unwrap_or_else(|| {
            "some ranks of the job have not called MPI_Init, or their hosts cannot reach each other".into()
        });
        let why = format!("MPI did not start within {:?}: {missing}", start.within);
        Some(Error::Unavailable { name: "mpi".into(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::transport::neighbours::Home;

    #[test]
    fn a_group_whose_ranks_have_come_is_not_waited_for_as_long_as_they_are() {
        let within = |call_timeout| Start { call_timeout, ..Start::default() };
        let (long, short) = (within(Duration::from_secs(600)), within(Duration::ZERO));
        assert_eq!([Place::Communicator, Place::Group].map(|p| p.limit(&long)), [long.call_timeout, COME]);
        assert_eq!(Place::Group.limit(&short), Duration::ZERO);
        let neighbours = Neighbours::of(0, vec![Home::of_this_process()]).unwrap();
        let ranks = Ranks { rank: 0, neighbours: Arc::new(Mutex::new(neighbours)) };
        let shared = Shared::default();
        shared.enter(Place::Group);
        let place = Place::of(shared.call.load(Ordering::Relaxed)).expect("a call");
        let why = Wait::new().given_up(place, &short, Some(&ranks)).expect("it is late").to_string();
        assert!(why.contains("all ranks of the group had come"), "{why}");
    }
}
