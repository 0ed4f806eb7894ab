//! The rendezvous of a job: all ranks meet, learn each other's hosts, and exchange small blobs and descriptors.

use super::board::Board;
use super::identity::{Identity, Launcher, variables};
use super::place::Place;
use super::star::{Member, Star};
use super::{Options, hosts};
use crate::digest::digest;
use crate::error::{Error, Result};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The ranks of a job, connected. Every method is called by all ranks together, or by all ranks of a host.
pub struct Rendezvous {
    star: Star,
    /// The same star when all ranks share a host; otherwise one per host, for descriptors.
    local: Option<Star>,
    hosts: Hosts,
    timeout: Duration,
    board: Option<Arc<Board>>,
}

/// Which rank is on which host.
#[derive(Clone, Debug)]
pub(super) struct Hosts {
    /// Host of each rank, numbered in the order of their first ranks.
    pub of: Vec<usize>,
    /// Names of the hosts.
    pub names: Vec<String>,
}

impl Rendezvous {
    /// Meets the other ranks of the job: at an abstract Unix socket when the launcher says that all are on this
    /// host or says nothing, at rank 0's TCP address when there is one.
    ///
    /// # Errors
    /// [`Error::Launch`] naming the ranks that did not arrive in time, that disagree about the number of ranks, or
    /// that exist twice; [`Error::Timeout`] when rank 0 is not there; [`Error::PeerLost`] when a rank of an own
    /// spawn died meanwhile.
    pub fn join(identity: &Identity, options: &Options) -> Result<Self> {
        let board = board(identity)?;
        let Identity { rank, world, .. } = *identity;
        let job = identity.job_name();
        let token = secret(identity);
        let place = match &identity.rendezvous {
            Some(address) => Place::Tcp(address.clone()),
            None if identity.local_size.is_some_and(|local| local < world) => {
                return Err(Error::Launch(format!(
                    "the host of rank {rank} has {} of the {world} ranks and nothing says where rank 0 is; set \
                     CARAVAN_RENDEZVOUS=host:port, with the host of rank 0 and a free port, for all ranks",
                    identity.local_size.unwrap_or(1)
                )));
            }
            None => Place::Unix(socket_name(&job, "world")),
        };
        let ranks: Vec<usize> = (0..world).collect();
        let me = Member { ranks: &ranks, index: rank, world, token: &token, job: &job };
        let star = Star::meet(&place, &me, options.timeout, board.as_deref())?;
        let (key, name) = (hosts::host_key(), hosts::host_name());
        let mut joined = Rendezvous {
            star,
            local: None,
            hosts: Hosts { of: vec![0; world], names: vec![name.clone()] },
            timeout: options.timeout,
            board,
        };
        if let Place::Tcp(_) = place {
            let all = joined.exchange(format!("{key}\n{name}").as_bytes())?;
            joined.hosts = Hosts::of(&all);
            let local = joined.local_ranks();
            // Its ranks may have been started by different processes, and so have different names for the job.
            let jobs = joined.exchange(job.as_bytes())?;
            let job = String::from_utf8_lossy(&jobs[local[0]]);
            let index = local.iter().position(|&r| r == rank).unwrap_or(0);
            let place = Place::Unix(socket_name(&job, &format!("host of {}", local[0])));
            let me = Member { ranks: &local, index, world, token: &token, job: &job };
            joined.local = Some(Star::meet(&place, &me, joined.timeout, joined.board.as_deref())?);
        }
        Ok(joined)
    }

    /// The ranks of one node only, of which `identity` is one: for what they share, once it is known who they are and
    /// by which name for the `job` they meet.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn among(identity: &Identity, job: &str, options: &Options, node: &[usize]) -> Result<Self> {
        let board = board(identity)?;
        let token = identity.token.clone().unwrap_or_default();
        let index = node.iter().position(|&r| r == identity.rank).ok_or_else(|| {
            Error::Launch(format!("rank {} is not one of the ranks {node:?} of its node", identity.rank))
        })?;
        let place = Place::Unix(socket_name(job, &format!("node of {}", node[0])));
        let me = Member { ranks: node, index, world: identity.world, token: &token, job };
        let star = Star::meet(&place, &me, options.timeout, board.as_deref())?;
        let hosts = Hosts { of: vec![0; node.len()], names: vec![hosts::host_name()] };
        Ok(Rendezvous { star, local: None, hosts, timeout: options.timeout, board })
    }

    /// This rank of the job.
    pub fn rank(&self) -> usize {
        self.star.ranks[self.star.index]
    }

    /// Ranks that have met: those of the job, or of one node.
    pub fn world(&self) -> usize {
        self.star.ranks.len()
    }

    /// The host of each rank, as an index into [`host_names`](Self::host_names).
    pub fn host_of(&self) -> &[usize] {
        &self.hosts.of
    }

    /// The hosts' names, in the order of their first ranks.
    pub fn host_names(&self) -> &[String] {
        &self.hosts.names
    }

    /// The ranks of this rank's host, in order; this rank is one of them.
    pub fn local_ranks(&self) -> Vec<usize> {
        let mine = self.hosts.of[self.star.index];
        let here = (0..self.world()).filter(|&index| self.hosts.of[index] == mine);
        here.map(|index| self.star.ranks[index]).collect()
    }

    /// The supervisor's board, when this is an own spawn.
    pub fn board(&self) -> Option<Arc<Board>> {
        self.board.clone()
    }

    /// Every rank's blob, by rank. For addresses and the like: all blobs together stay below 64 MiB.
    ///
    /// # Errors
    /// Names the ranks that are gone or did not answer within the timeout.
    pub fn exchange(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.star.exchange(blob, self.timeout, self.board.as_deref())
    }

    /// The blobs of the ranks of this host, in the order of [`local_ranks`](Self::local_ranks).
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn exchange_local(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.local.as_ref().unwrap_or(&self.star).exchange(blob, self.timeout, self.board.as_deref())
    }

    /// The descriptors of the ranks of this host, in the order of [`local_ranks`](Self::local_ranks); all give
    /// equally many.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub(crate) fn exchange_fds(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.local.as_ref().unwrap_or(&self.star).exchange_fds(fds, self.timeout, self.board.as_deref())
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn barrier(&mut self) -> Result<()> {
        self.exchange(&[]).map(drop)
    }
}

impl Hosts {
    /// From each rank's `key\nname`.
    pub(super) fn of(all: &[Vec<u8>]) -> Self {
        let (mut keys, mut names, mut of) = (Vec::<&[u8]>::new(), Vec::new(), Vec::new());
        for blob in all {
            let (key, name) = match blob.iter().position(|&b| b == b'\n') {
                Some(at) => (&blob[..at], &blob[at + 1..]),
                None => (&blob[..], &blob[..]),
            };
            let index = keys.iter().position(|&k| k == key).unwrap_or_else(|| {
                keys.push(key);
                names.push(String::from_utf8_lossy(name).into_owned());
                keys.len() - 1
            });
            of.push(index);
        }
        Hosts { of, names }
    }
}

/// What only ranks of this job have: jobs that chance brings to one address tell each other apart by their names, where the
/// launcher gives each its own or the user has named them.
fn secret(identity: &Identity) -> String {
    let token = identity.token.clone().unwrap_or_default();
    let named = |job: &str| std::env::var(variables::JOB).is_ok_and(|given| given.trim() == job);
    match (&identity.job, identity.launcher) {
        (Some(job), Launcher::Slurm | Launcher::OpenMpi | Launcher::Caravan) => format!("{job}\n{token}"),
        // Hydra's own name may be another on each host.
        (Some(job), _) if named(job) => format!("{job}\n{token}"),
        _ => token,
    }
}

/// The supervisor's board, if this is an own spawn.
fn board(identity: &Identity) -> Result<Option<Arc<Board>>> {
    Ok(match identity.launcher {
        Launcher::Caravan => Board::inherited()?.filter(|b| b.world() == identity.world).map(Arc::new),
        _ => None,
    })
}

/// The abstract socket of a job: per user, and short enough for a socket's name whatever the launcher calls jobs.
fn socket_name(job: &str, part: &str) -> String {
    let user = rustix::process::geteuid().as_raw();
    let hash = digest(format!("{job}\n{part}").bytes());
    let short: String =
        job.chars().filter(|c| c.is_ascii_alphanumeric() || "-._".contains(*c)).take(40).collect();
    format!("caravan-{user}-{short}-{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_first_rank() {
        let all = [b"k1\na".to_vec(), b"k2\nb".to_vec(), b"k1\na".to_vec()];
        let hosts = Hosts::of(&all);
        assert_eq!((hosts.of, hosts.names), (vec![0, 1, 0], vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn who_is_missing_and_where_rank_0_should_be_said_are_told_once() {
        let first = |local, rendezvous| {
            let identity =
                Identity { rank: 0, world: 2, local_size: Some(local), rendezvous, ..Identity::alone() };
            let options = Options { timeout: Duration::from_millis(100), ..Default::default() };
            Rendezvous::join(&identity, &options).err().unwrap().to_string()
        };
        let text = first(1, None);
        assert!(
            text.contains("the host of rank 0 has 1 of the 2 ranks and nothing says where rank 0 is"),
            "{text}"
        );
        let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
        let text = first(1, Some(free.to_string()));
        assert!(
            text.contains("rank 1 of 2 did not arrive") && text.contains("; it may have failed before"),
            "{text}"
        );
    }

    #[test]
    fn jobs_that_were_named_apart_are_strangers_to_each_other() {
        let named =
            |job: &str, launcher| secret(&Identity { job: Some(job.into()), launcher, ..Identity::alone() });
        for launcher in [Launcher::Caravan, Launcher::Slurm, Launcher::OpenMpi] {
            assert_ne!(named("a", launcher), named("b", launcher), "{launcher:?}");
        }
        // Hydra may have given them.
        assert_eq!(named("a", Launcher::Pmi), named("b", Launcher::Pmi));
    }

    #[test]
    fn socket_names_fit_and_differ() {
        let long = "x".repeat(500);
        assert!(socket_name(&long, "world").len() < 107);
        assert_ne!(socket_name("a/b", "world"), socket_name("ab", "world"));
    }
}
