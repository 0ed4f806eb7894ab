//! What a rank knows of its peers: where their workers are, whether they share this host, whether they still live.

use crate::bootstrap::boot_and_space;
use crate::digest::digest;
use crate::error::{Error, Result};
use crate::transport::processes::Processes;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::time::{Duration, Instant};

/// What each rank tells the others of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// The host and its process numbers: equal means that a process number of one means the same to the other.
    pub(super) host: u64,
    pub(super) pid: u32,
    /// Whether this rank's `UCX_TLS` leaves out every shared-memory transport.
    pub(super) network_only: bool,
    /// The worker's address.
    pub(super) address: Vec<u8>,
}

const VERSION: u8 = 3;
const FIXED: usize = 1 + 8 + 4 + 1;

impl Card {
    pub(super) fn of_this_process(address: Vec<u8>) -> Self {
        Card {
            host: digest(boot_and_space("pid").bytes()),
            pid: std::process::id(),
            network_only: network_only(std::env::var("UCX_TLS").ok().as_deref()),
            address,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.host.to_le_bytes());
        out.extend(self.pid.to_le_bytes());
        out.push(self.network_only as u8);
        out.extend(&self.address);
        out
    }

    pub(super) fn from_bytes(peer: usize, bytes: &[u8]) -> Result<Self> {
        if bytes.len() <= FIXED || bytes[0] != VERSION {
            return Err(Error::Launch(format!(
                "rank {peer} sent {} bytes as its UCX address, which is not what this version of caravan sends; \
                 all ranks must run the same program",
                bytes.len()
            )));
        }
        Ok(Card {
            host: u64::from_le_bytes(bytes[1..9].try_into().expect("8 bytes")),
            pid: u32::from_le_bytes(bytes[9..13].try_into().expect("4 bytes")),
            network_only: bytes[13] != 0,
            address: bytes[FIXED..].to_vec(),
        })
    }
}

/// Whether `UCX_TLS` allows no shared memory. Such transports can report a dead peer, shared memory cannot.
fn network_only(tls: Option<&str>) -> bool {
    const SHARED: [&str; 9] = ["all", "shm", "sm", "mm", "posix", "sysv", "xpmem", "cma", "knem"];
    let Some(tls) = tls else { return false };
    let list = tls.trim();
    !list.is_empty()
        && !list.starts_with('^')
        && list.split(',').all(|t| !SHARED.contains(&t.trim().trim_start_matches('\\')))
}

/// Watches the processes of peers on this host.
pub(super) struct Watch {
    processes: Processes,
    /// By rank.
    ended: Vec<bool>,
    any: bool,
    next: Instant,
}

/// How often a waiting rank looks at its peers.
const INTERVAL: Duration = Duration::from_millis(2);

impl Watch {
    /// Watches `peers` of `size` ranks, given as rank and process. Kernels before 5.3 cannot; there only the launcher and
    /// deadlines notice a dead peer.
    pub(super) fn over(rank: usize, size: usize, peers: impl Iterator<Item = (usize, u32)>) -> Result<Self> {
        let mut processes = Processes::default();
        for (peer, pid) in peers {
            let Some(pid) = Pid::from_raw(pid as i32) else { continue };
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(fd) => processes.watch(peer, fd),
                Err(rustix::io::Errno::SRCH) => {
                    return Err(Error::PeerLost {
                        rank,
                        peer,
                        how: format!("(process {}) ended at start", pid),
                    });
                }
                Err(_) => {}
            }
        }
        Ok(Watch { processes, ended: vec![false; size], any: false, next: Instant::now() })
    }

    /// Looks which processes have ended; once in a while only, so that it is cheap.
    pub(super) fn look(&mut self) {
        let now = Instant::now();
        if now < self.next || self.processes.is_empty() {
            return;
        }
        self.next = now + INTERVAL;
        self.processes.ended(|peer| (self.ended[peer], self.any) = (true, true));
    }

    /// Whether any process had ended at the last look.
    pub(super) fn any(&self) -> bool {
        self.any
    }

    /// Whether the process of `peer` had ended at the last look.
    pub(super) fn ended(&self, peer: usize) -> bool {
        self.ended[peer]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_survive_the_wire() {
        let card = Card::of_this_process(vec![1, 2, 3]);
        assert_eq!(Card::from_bytes(0, &card.to_bytes()).unwrap(), card);
        for bad in [&[][..], &[VERSION; FIXED], &[9; 40]] {
            let text = Card::from_bytes(3, bad).unwrap_err().to_string();
            assert!(text.contains("rank 3") && text.contains("same program"), "{text}");
        }
    }

    #[test]
    fn lists_of_transports_are_read() {
        for (tls, only) in [
            (None, false),
            (Some("all"), false),
            (Some("tcp"), true),
            (Some("tcp,self"), true),
            (Some("rc,ud"), true),
            (Some("tcp,cma"), false),
            (Some("^posix"), false),
            (Some("sm, tcp"), false),
            (Some(""), false),
        ] {
            assert_eq!(network_only(tls), only, "{tls:?}");
        }
    }

    #[test]
    fn a_process_that_ends_is_noticed_even_as_a_zombie() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut watch = Watch::over(0, 8, [(7, child.id())].into_iter()).unwrap();
        watch.look();
        assert!(!watch.any() && !watch.ended(7));
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !watch.ended(7) {
            assert!(Instant::now() < until, "the end of the process was not noticed");
            std::thread::sleep(Duration::from_millis(1));
            watch.look();
        }
        assert!(watch.any() && !watch.ended(0));
        child.wait().unwrap();
    }
}
