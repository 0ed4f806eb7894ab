//! Whether the peers' processes still live, and how those that do not ended.

use super::segments::Segments;
use crate::bootstrap::Ending;
use crate::error::{Error, Result};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// A look at all peers costs a few system calls, so it happens at most this often.
const EVERY: Duration = Duration::from_millis(20);
/// The supervisor may notice an end a little later than we do; its word is better than ours.
const SUPERVISOR_LAG: Duration = Duration::from_millis(500);

/// How to tell whether another process lives.
pub(super) enum Life {
    /// A descriptor that becomes readable when the process ends. It came from the process itself, so it names no
    /// other one, whatever numbers are reused and whatever namespaces lie between.
    Pidfd(OwnedFd),
    /// Its number and start time, on kernels without pidfds.
    Number { pid: u32, start: String },
}

impl Life {
    /// This process's pidfd, if the kernel has them, and its card for those who do not get one.
    pub fn of_this_process() -> (Option<OwnedFd>, String) {
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let pid = std::process::id();
        let card = format!("{} {pid} {}", u8::from(pidfd.is_some()), start_time(pid).unwrap_or_default());
        (pidfd, card)
    }

    /// From a peer's card and descriptor.
    pub fn from_card(card: &[u8], pidfd: Option<OwnedFd>) -> Self {
        let card = String::from_utf8_lossy(card);
        let mut fields = card.split(' ');
        let has_pidfd = fields.next() == Some("1");
        let pid = fields.next().and_then(|p| p.parse().ok()).unwrap_or(0);
        let start = fields.next().unwrap_or_default().to_owned();
        match pidfd {
            Some(fd) if has_pidfd => Life::Pidfd(fd),
            _ => Life::Number { pid, start },
        }
    }
}

/// The start time of a process that runs; None when it has ended, also when nobody has reaped it yet.
fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted from behind it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X" | "x")).then(|| fields.nth(18).map(str::to_owned))?
}

/// The looks of one transport at its peers.
pub(super) struct Watcher {
    next: Instant,
    /// Ready for poll(2), one per peer with a pidfd, with the peer's index.
    fds: Vec<libc::pollfd>,
    indices: Vec<usize>,
    /// When each peer was first seen dead.
    dead: Vec<Option<Instant>>,
    /// Peers that left in good order: they send nothing any more, and that alone is no error.
    pub gone: Vec<bool>,
}

impl Watcher {
    pub fn new(segments: &Segments) -> Self {
        let (mut fds, mut indices) = (Vec::new(), Vec::new());
        for (index, life) in segments.lives.iter().enumerate() {
            if let Some(Life::Pidfd(fd)) = life {
                fds.push(libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
                indices.push(index);
            }
        }
        let size = segments.size();
        Watcher {
            next: Instant::now() + EVERY,
            fds,
            indices,
            dead: vec![None; size],
            gone: vec![false; size],
        }
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

    fn look(&mut self, segments: &Segments, now: Instant) -> Result<()> {
        let rank = segments.rank();
        let lost = |peer: usize, how: String| Error::PeerLost { rank, peer, how };
        // The supervisor knows best which failure came first.
        if let Some((board, peer)) = segments.board.as_ref().and_then(|b| b.first_failure().map(|r| (b, r)))
            && peer != rank
        {
            return Err(lost(peer, board.how(peer).unwrap_or_else(|| "failed".into())));
        }
        self.poll(segments, now);
        for index in (0..segments.size()).filter(|&i| i != segments.me) {
            let peer = segments.ranks[index];
            if let Some((culprit, how)) = segments.gave_up(index) {
                // A peer that gave up because of this rank says nothing new about this rank.
                return Err(if culprit == rank {
                    lost(peer, format!("gave up: rank {rank} {how}"))
                } else {
                    lost(culprit, how)
                });
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

    fn poll(&mut self, segments: &Segments, now: Instant) {
        // SAFETY: an array of valid entries and its length; the descriptors are open while the segments live.
        let ready = unsafe { libc::poll(self.fds.as_mut_ptr(), self.fds.len() as libc::nfds_t, 0) };
        if ready > 0 {
            for (fd, &index) in self.fds.iter().zip(&self.indices) {
                if fd.revents != 0 {
                    self.dead[index].get_or_insert(now);
                }
            }
        }
        for (index, life) in segments.lives.iter().enumerate() {
            if let Some(Life::Number { pid, start }) = life
                && start_time(*pid).as_ref() != Some(start)
            {
                self.dead[index].get_or_insert(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_has_a_start_time_and_a_zombie_has_none() {
        assert_eq!(start_time(std::process::id()), start_time(std::process::id()));
        assert!(start_time(std::process::id()).is_some());
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
        let (_, card) = Life::of_this_process();
        let without = card.replacen('1', "0", 1);
        match Life::from_card(without.as_bytes(), None) {
            Life::Number { pid, start } => {
                assert_eq!((pid, Some(start)), (std::process::id(), start_time(std::process::id())));
            }
            Life::Pidfd(_) => panic!("there is none"),
        }
    }
}
