//! The ranks of a job that share this rank's host, by rank: a library that carries messages through shared memory does
//! not say when one of them ends, but its process can be watched.

use super::processes::Processes;
use crate::bootstrap::boot_and_space;
use crate::digest::digest;
use crate::error::{Error, Result};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::time::{Duration, Instant};

/// Where a rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The host and its process numbers: equal means that a process number of one means the same to the other.
    pub host: u64,
    /// The number of its process there.
    pub pid: u32,
}

impl Home {
    /// What [`to_bytes`](Self::to_bytes) makes of one.
    pub const BYTES: usize = 8 + 4;

    /// Of this rank.
    pub fn of_this_process() -> Self {
        Home { host: digest(boot_and_space("pid").bytes()), pid: std::process::id() }
    }

    /// For others to read by [`from_bytes`](Self::from_bytes).
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&self.host.to_le_bytes());
        out[8..].copy_from_slice(&self.pid.to_le_bytes());
        out
    }

    /// What another rank's [`to_bytes`](Self::to_bytes) has said.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let (host, pid) = bytes.split_at(8);
        Home {
            host: u64::from_le_bytes(host.try_into().expect("8 bytes")),
            pid: u32::from_le_bytes(pid.try_into().expect("4 bytes")),
        }
    }
}

/// Watches the processes of the other ranks on this host.
pub struct Neighbours {
    processes: Processes,
    /// By rank, as the rest.
    homes: Vec<Home>,
    ended: Vec<bool>,
    any: bool,
    /// The first that was seen to have ended, and when; of several at one look the lowest.
    first: Option<(usize, Instant)>,
    next: Instant,
}

/// How long a farewell may be on its way when its sender's process has ended.
const LAST_WORDS: Duration = Duration::from_millis(20);
/// How often to listen for it at least.
const LOOKS: usize = 50;
/// For how long a rank that has seen another's end does not end itself, where nothing but ends can be seen: who looks more
/// often than that sees the first one alone, and not also those that it has brought about. Longer than most ranks get no
/// processor.
pub const SEEN_BY_ALL: Duration = Duration::from_millis(500);
/// How often a waiting rank looks at its neighbours.
const INTERVAL: Duration = Duration::from_millis(2);

impl Neighbours {
    /// The neighbours of `rank` among the ranks that live at `homes`. Kernels before 5.3 cannot watch them; there only the
    /// launcher and deadlines notice a dead one. One that has ended already is as one that ends later: what it has said of
    /// it is still to be heard.
    ///
    /// # Errors
    /// No file left to watch one with.
    pub fn of(rank: usize, homes: Vec<Home>) -> Result<Self> {
        let now = Instant::now();
        let (mut processes, mut ended, mut first) = (Processes::default(), vec![false; homes.len()], None);
        let mine = homes[rank];
        for (peer, home) in homes.iter().enumerate() {
            // Ranks that are threads of this process end with it.
            if home.host != mine.host || home.pid == mine.pid {
                continue;
            }
            let Some(pid) = Pid::from_raw(home.pid as i32) else { continue };
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(fd) => processes.watch(peer, fd),
                Err(rustix::io::Errno::SRCH) => {
                    ended[peer] = true;
                    first.get_or_insert((peer, now));
                }
                Err(e @ (rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) => {
                    let here = homes.iter().filter(|home| home.host == mine.host).count();
                    let what = format!("watching the processes of {here} ranks of a host, an open file each");
                    return Err(Error::system(what, e));
                }
                Err(_) => {}
            }
        }
        Ok(Neighbours { processes, homes, any: first.is_some(), ended, first, next: now })
    }

    /// Looks which processes have ended; once in a while only, so that it is cheap.
    pub fn look(&mut self) {
        let now = Instant::now();
        if now < self.next || self.processes.is_empty() {
            return;
        }
        self.next = now + INTERVAL;
        self.processes.ended(|peer| {
            (self.ended[peer], self.any) = (true, true);
            self.first.get_or_insert((peer, now));
        });
    }

    /// Whether any process had ended at the last look.
    pub fn any(&self) -> bool {
        self.any
    }

    /// Whether the process of `peer` had ended at the last look.
    pub fn ended(&self, peer: usize) -> bool {
        self.ended[peer]
    }

    /// Looks, and says which rank ended first, once it was seen to have ended `grace` ago. Those that end after it mostly
    /// do so because of it.
    pub fn first_ended(&mut self, grace: Duration) -> Option<usize> {
        self.look();
        self.first.filter(|(_, seen)| seen.elapsed() >= grace).map(|(peer, _)| peer)
    }

    /// How `peer` was lost, whose process has ended.
    pub fn how(&self, peer: usize) -> String {
        format!("ended (process {}) without leaving the group", self.homes[peer].pid)
    }
}

/// Whether words come from a rank whose process has ended, as far as `listen` hears any.
///
/// # Errors
/// Those of `listen`.
pub fn last_words(mut listen: impl FnMut() -> Result<bool>) -> Result<bool> {
    let until = Instant::now() + LAST_WORDS;
    let mut looks = 0;
    // Who was not given a processor meanwhile has not listened.
    while looks < LOOKS || Instant::now() < until {
        if listen()? {
            return Ok(true);
        }
        looks += 1;
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_survive_the_wire() {
        let home = Home::of_this_process();
        assert_eq!(Home::from_bytes(home.to_bytes()), home);
    }

    #[test]
    fn a_process_that_ends_is_noticed_even_as_a_zombie() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mine = Home::of_this_process();
        let elsewhere = Home { host: !mine.host, pid: u32::MAX >> 1 };
        let homes = vec![mine, elsewhere, mine, Home { pid: child.id(), ..mine }];
        let mut neighbours = Neighbours::of(0, homes.clone()).unwrap();
        neighbours.look();
        assert!(!neighbours.any() && !neighbours.ended(3));
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !neighbours.ended(3) {
            assert!(Instant::now() < until, "the end of the process was not noticed");
            std::thread::sleep(Duration::from_millis(1));
            neighbours.look();
        }
        assert!(neighbours.any() && !neighbours.ended(0) && !neighbours.ended(1) && !neighbours.ended(2));
        child.wait().unwrap();
        // Who looks only now sees no less.
        let mut late = Neighbours::of(0, homes).unwrap();
        assert!(
            late.any() && late.ended(3) && !late.ended(1),
            "the end before the first look was not noticed"
        );
        assert_eq!(late.first_ended(Duration::ZERO), Some(3));
    }

    #[test]
    fn the_first_to_end_stays_the_first() {
        let spawn = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (mut low, mut high) = (spawn(), spawn());
        let mine = Home::of_this_process();
        let homes = vec![mine, Home { pid: low.id(), ..mine }, Home { pid: high.id(), ..mine }];
        let mut neighbours = Neighbours::of(0, homes).unwrap();
        assert_eq!(neighbours.first_ended(Duration::ZERO), None);
        let until = Instant::now() + Duration::from_secs(20);
        for (child, rank) in [(&mut high, 2), (&mut low, 1)] {
            child.kill().unwrap();
            while !neighbours.ended(rank) {
                assert!(Instant::now() < until, "the end of the process was not noticed");
                neighbours.look();
            }
            child.wait().unwrap();
        }
        assert_eq!(neighbours.first_ended(Duration::ZERO), Some(2));
        assert_eq!(neighbours.first_ended(Duration::from_secs(3600)), None);
    }
}
