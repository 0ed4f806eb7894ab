//! Which peers have left a group in order, and waiting at its end, for transports whose library does not tell.

use crate::error::Error;
use crate::watch::Until;
use std::time::{Duration, Instant};

/// After a peer has left in order, what it sent before may still be on its way for this long.
const AFTER_LEAVING: Duration = Duration::from_secs(1);

/// How a peer has left that was to take a message.
const NOT_TAKEN: &str = "left the group without taking a message";
/// How one has left that was to send a message.
const NOT_SENT: &str = "left the group while a message from it was awaited";

/// How long a rank that failed waits for living peers to take what it sent.
pub const LINGER_FAILED: Duration = Duration::from_millis(300);
/// Between two looks.
const NAP: Duration = Duration::from_micros(20);

/// Looks whether `it` is `done` and else moves it on, which says whether anything moved, until the deadline; whether it was
/// done.
pub fn wait<T>(
    it: &mut T,
    until: &mut Until,
    mut move_on: impl FnMut(&mut T) -> bool,
    mut done: impl FnMut(&mut T) -> bool,
) -> bool {
    while !done(it) {
        let moved = move_on(it);
        if until.is_over() {
            return false;
        }
        if !moved {
            std::thread::sleep(NAP);
        }
    }
    true
}

/// By ranks of the group.
pub struct Farewells {
    left: Vec<Option<Instant>>,
    count: usize,
}

impl Farewells {
    /// Of a group of `size`, which nobody has left.
    pub fn none(size: usize) -> Self {
        Farewells { left: vec![None; size], count: 0 }
    }

    /// `peer` has said goodbye.
    pub fn note(&mut self, peer: usize) {
        if self.left[peer].replace(Instant::now()).is_none() {
            self.count += 1;
        }
    }

    /// Whether `peer` has said goodbye.
    #[inline]
    pub fn has_left(&self, peer: usize) -> bool {
        self.left[peer].is_some()
    }

    /// Whether `peer` has left too long ago for anything of it to come any more, and so for a message that it was taking
    /// to be still under way.
    #[inline]
    pub fn is_done_with(&self, peer: usize) -> bool {
        self.count > 0 && self.left[peer].is_some_and(|at| at.elapsed() > AFTER_LEAVING)
    }

    /// How `peer`, to which a message `sends` or from which it comes, has left without serving it, if it has: what it had begun to
    /// take had all gone to it when it said goodbye.
    #[inline]
    pub fn unserved(&self, peer: usize, sends: bool) -> Option<&'static str> {
        self.is_done_with(peer).then_some(if sends { NOT_TAKEN } else { NOT_SENT })
    }

    /// Why messages with these `peers` of `rank` are under way still, after so long: of one that has not left, if there is one.
    pub fn untaken(
        &self,
        peers: impl Iterator<Item = usize>,
        rank: usize,
        job_rank: impl Fn(usize) -> usize,
        after: Duration,
    ) -> Option<Error> {
        let (left, peer) = peers.map(|peer| (self.is_done_with(peer), peer)).min_by_key(|&(left, _)| left)?;
        let (rank, peer) = (job_rank(rank), job_rank(peer));
        if left {
            return Some(Error::PeerLost { rank, peer, how: NOT_TAKEN.into() });
        }
        Some(Error::timeout("to leave a group with a message under way", rank, peer, after))
    }
}
