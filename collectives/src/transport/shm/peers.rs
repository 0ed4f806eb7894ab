//! Whether the peers' processes still live, and how those that do not ended.

use super::segments::Segments;
use crate::bootstrap::{Ending, boot_and_space};
use crate::digest::digest;
use crate::error::{Error, Result};
use crate::process::Stat;
use crate::transport::blame;
use crate::transport::processes::Processes;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// A look at all peers costs a few system calls, so it happens at most this often.
const EVERY: Duration = Duration::from_millis(20);
/// The supervisor may notice an end later than we do, where it gets no processor; its word is better than ours, and comes as
/// long as this process lives, which the kernel ends with the supervisor. Only of a rank that it cannot collect, as one that a
/// debugger holds, or that it did not start itself, there is none.
const SUPERVISOR_LAG: Duration = Duration::from_secs(10);

/// How to tell whether the peers' processes live, by their indices.
#[derive(Default)]
pub(super) struct Lives {
    /// Those with a pidfd. It came from the process itself, so it names no other one, whatever numbers are reused and
    /// whatever namespaces lie between.
    processes: Processes,
    /// Number and start time of the others, on kernels without pidfds.
    numbers: Vec<(usize, u32, String)>,
}

impl Lives {
    /// This process's pidfd, if the kernel has them, and its card for those who do not get one.
    pub fn of_this_process() -> (Option<OwnedFd>, String) {
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let pid = std::process::id();
        let start = start_time(pid).unwrap_or_default();
        let card = format!("{} {pid} {start} {}", u8::from(pidfd.is_some()), numbering());
        (pidfd, card)
    }

    /// Adds a peer by its card and descriptor.
    pub fn add(&mut self, index: usize, card: &[u8], pidfd: Option<OwnedFd>) {
        let card = String::from_utf8_lossy(card);
        let mut fields = card.split(' ');
        let has_pidfd = fields.next() == Some("1");
        let pid = fields.next().and_then(|p| p.parse().ok()).unwrap_or(0);
        let start = fields.next().unwrap_or_default().to_owned();
        match pidfd {
            Some(fd) if has_pidfd => self.processes.watch(index, fd),
            _ if fields.next() == Some(&numbering()) => self.numbers.push((index, pid, start)),
            // Of another container: its silence is noticed.
            _ => {}
        }
    }

    /// Tells `found` the indices of those that have ended.
    fn ended(&self, mut found: impl FnMut(usize)) {
        self.processes.ended(&mut found);
        let ended = |(_, pid, start): &&(usize, u32, String)| start_time(*pid).as_ref() != Some(start);
        self.numbers.iter().filter(ended).for_each(|&(index, ..)| found(index));
    }
}

/// Where process numbers mean the same.
fn numbering() -> String {
    format!("{:x}", digest(boot_and_space("pid").bytes()))
}

/// The start time of a process that runs; None when it has ended, also when nobody has reaped it yet.
fn start_time(pid: u32) -> Option<String> {
    Stat::of(pid).filter(|stat| !stat.ended).map(|stat| stat.start)
}

/// The looks of one transport at its peers.
pub(super) struct Watcher {
    next: Instant,
    /// When each peer was first seen dead.
    dead: Vec<Option<Instant>>,
    /// Peers that left in good order: they send nothing any more, and that alone is no error.
    pub gone: Vec<bool>,
}

impl Watcher {
    pub fn new(segments: &Segments) -> Self {
        let size = segments.size();
        Watcher { next: Instant::now() + EVERY, dead: vec![None; size], gone: vec![false; size] }
    }

    /// An error when a rank of the job failed; cheap, because it looks only now and then.
    pub fn check(&mut self, segments: &Segments) -> Result<()> {
        let now = Instant::now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + EVERY;
        self.look(segments, now)
    }

    /// The same at once.
    pub fn look(&mut self, segments: &Segments, now: Instant) -> Result<()> {
        let rank = segments.rank();
        let lost = |peer: usize, how: String| Error::PeerLost { rank, peer, how };
        // The supervisor knows best which failure came first.
        if let Some((board, peer)) = segments.board.as_ref().and_then(|b| b.first_failure().map(|r| (b, r)))
            && peer != rank
        {
            return Err(lost(peer, board.how(peer).unwrap_or_else(|| "failed".into())));
        }
        segments.lives.ended(|index| {
            self.dead[index].get_or_insert(now);
        });
        for index in (0..segments.size()).filter(|&i| i != segments.me) {
            let peer = segments.ranks[index];
            if let Some((culprit, how)) = segments.gave_up(index) {
                return Err(blame::passed_on(rank, peer, culprit, how));
            }
            // The flag is read after the death was seen, so a departure before it is not missed.
            self.gone[index] = segments.departed(index);
            let Some(since) = self.dead[index] else { continue };
            let ending = segments.board.as_ref().and_then(|b| b.ending(peer));
            match ending {
                Some(Ending::Exited(0)) | None if self.gone[index] => {}
                Some(ending) => return Err(lost(peer, ending.to_string())),
                None if segments.board.is_some() && now.duration_since(since) < SUPERVISOR_LAG => {}
                None => return Err(lost(peer, "ended without leaving the job".into())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_has_a_start_time_and_a_zombie_has_none() {
        let start = start_time(std::process::id());
        // Long enough for what the kernel counts beside it: the time that a process has run.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(50) {}
        assert!(start.is_some() && start_time(std::process::id()) == start);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while start_time(pid).is_some() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(start_time(pid), None);
    }

    #[test]
    fn cards_work_without_a_pidfd() {
        let (_, card) = Lives::of_this_process();
        let without = card.replacen('1', "0", 1);
        let mut lives = Lives::default();
        lives.add(5, without.as_bytes(), None);
        lives.ended(|index| panic!("{index} has not ended"));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let start = start_time(std::process::id()).unwrap();
        lives.add(7, format!("0 {} {start} {}", child.id(), numbering()).as_bytes(), None);
        // A number of another container says nothing here.
        lives.add(8, format!("0 {} {start} elsewhere", child.id()).as_bytes(), None);
        child.wait().unwrap();
        let mut ended = Vec::new();
        lives.ended(|index| ended.push(index));
        assert_eq!(ended, [7]);
    }
}
