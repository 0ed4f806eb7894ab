//! The job board: a page or so of memory shared by the supervisor and its ranks, where it records how each rank
//! ended and where a rank that fails says so first.

use super::identity::variables;
use super::memfd::{self, NOTE_BYTES, SharedMap};
use crate::error::{Error, Result};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u64 = u64::from_le_bytes(*b"caravanB");
const WORLD: usize = 8;
const FIRST: usize = 16;
const HEADER: usize = 64;
const ENTRY: usize = 64 + NOTE_BYTES;

/// How a rank's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With this exit code.
    Exited(u8),
    /// By this signal.
    Killed(u8),
}

impl Ending {
    /// Whether it is a failure.
    pub fn failed(self) -> bool {
        self != Ending::Exited(0)
    }

    fn pack(self) -> u64 {
        match self {
            Ending::Exited(code) => 1 << 32 | u64::from(code),
            Ending::Killed(signal) => 2 << 32 | u64::from(signal),
        }
    }

    fn unpack(word: u64) -> Option<Self> {
        match word >> 32 {
            1 => Some(Ending::Exited(word as u8)),
            2 => Some(Ending::Killed(word as u8)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ending::Exited(code) => write!(f, "exited with code {code}"),
            Ending::Killed(signal) => write!(f, "was killed by signal {signal}"),
        }
    }
}

/// The board, as the supervisor or a rank sees it.
pub struct Board {
    map: SharedMap,
    world: usize,
}

impl Board {
    /// A new board for `world` ranks, and the descriptor that they inherit.
    pub(super) fn create(world: usize) -> Result<(Self, OwnedFd)> {
        let fd = memfd::create("caravan-board", HEADER + world * ENTRY)?;
        let map = SharedMap::new(fd.as_fd())?;
        map.u64(WORLD).store(world as u64, Ordering::Relaxed);
        map.u64(0).store(MAGIC, Ordering::Release);
        Ok((Board { map, world }, fd))
    }

    /// The board this process inherited from [`supervise`](super::spawn::supervise), if it did.
    ///
    /// # Errors
    /// [`Error::Launch`] when the environment names a descriptor that is no board.
    pub fn inherited() -> Result<Option<Self>> {
        let Ok(text) = std::env::var(variables::BOARD_FD) else { return Ok(None) };
        let bad =
            |why: String| Error::Launch(format!("{}={text} is no job board: {why}", variables::BOARD_FD));
        let number: i32 =
            text.parse().ok().filter(|&n| n > 2).ok_or_else(|| bad("not a descriptor".into()))?;
        // SAFETY: only borrowed to be mapped; if it is not open or not such a file, mapping says so.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let map = SharedMap::new(fd).map_err(|e| bad(e.to_string()))?;
        // Processes that this rank starts are not ranks.
        let _ = rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC);
        if map.bytes() < HEADER || map.u64(0).load(Ordering::Acquire) != MAGIC {
            return Err(bad("wrong content".into()));
        }
        let world = map.u64(WORLD).load(Ordering::Relaxed) as usize;
        if world.checked_mul(ENTRY).and_then(|b| b.checked_add(HEADER)) != Some(map.bytes()) {
            return Err(bad(format!("made for {world} ranks but {} bytes long", map.bytes())));
        }
        Ok(Some(Board { map, world }))
    }

    /// Ranks the board was made for.
    pub fn world(&self) -> usize {
        self.world
    }

    fn state(&self, rank: usize) -> &AtomicU64 {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        self.map.u64(HEADER + rank * ENTRY)
    }

    /// How `rank` ended, once the supervisor has seen it.
    pub fn ending(&self, rank: usize) -> Option<Ending> {
        Ending::unpack(self.state(rank).load(Ordering::Acquire))
    }

    /// The supervisor saw `rank` end; the first failure is kept as the first.
    pub(super) fn record(&self, rank: usize, ending: Ending) {
        self.state(rank).store(ending.pack(), Ordering::Release);
        if ending.failed() {
            self.blame(rank);
        }
    }

    /// `rank` is about to fail by its own fault, and why; later failures are taken for consequences.
    pub fn announce(&self, rank: usize, why: &str) {
        self.note(rank, why);
        self.blame(rank);
    }

    /// Why `rank` is about to end, which is not its own fault: told should nothing else be known.
    pub fn note(&self, rank: usize, why: &str) {
        self.state(rank);
        self.map.note(HEADER + rank * ENTRY + 64).write(rank as u32, why);
    }

    fn blame(&self, rank: usize) {
        let word = self.map.u64(FIRST);
        // Whoever comes second loses, as it should.
        let _ = word.compare_exchange(0, rank as u64 + 1, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The rank that failed first.
    pub fn first_failure(&self) -> Option<usize> {
        let rank = self.map.u64(FIRST).load(Ordering::Acquire) as usize;
        (1..=self.world).contains(&rank).then(|| rank - 1)
    }

    /// What `rank` said about its failure.
    pub fn announced(&self, rank: usize) -> Option<String> {
        self.state(rank);
        self.map.note(HEADER + rank * ENTRY + 64).read().map(|(_, text)| text)
    }

    /// Everything known about why `rank` failed, as the end of a sentence that starts with its name.
    pub fn how(&self, rank: usize) -> Option<String> {
        match (self.announced(rank), self.ending(rank)) {
            (_, Some(killed @ Ending::Killed(_))) => Some(killed.to_string()),
            (Some(text), _) => Some(format!("failed: {text}")),
            (None, Some(ending)) => Some(ending.to_string()),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stops_for_another_is_not_blamed_and_yet_heard() {
        let (board, _) = Board::create(2).unwrap();
        board.note(1, "rank 0 is unreachable");
        assert_eq!(board.first_failure(), None);
        board.record(1, Ending::Exited(1));
        assert_eq!(board.first_failure(), Some(1));
        assert_eq!(board.how(1).unwrap(), "failed: rank 0 is unreachable");
    }

    #[test]
    fn the_first_failure_stays_the_first() {
        let (board, fd) = Board::create(3).unwrap();
        let other = Board { map: SharedMap::new(fd.as_fd()).unwrap(), world: 3 };
        assert_eq!((other.first_failure(), other.ending(1)), (None, None));
        board.record(0, Ending::Exited(0));
        assert_eq!(other.first_failure(), None, "a good end is no failure");
        other.announce(2, "disk full");
        board.record(1, Ending::Killed(9));
        board.record(2, Ending::Exited(1));
        assert_eq!(other.first_failure(), Some(2));
        assert_eq!(other.how(2).unwrap(), "failed: disk full");
        assert_eq!(other.how(1).unwrap(), "was killed by signal 9");
        assert_eq!(other.how(0).unwrap(), "exited with code 0");
    }
}
