//! The rendezvous of a job: all ranks meet, learn each other's hosts, and exchange small blobs and descriptors.

use super::board::Board;
use super::identity::{Identity, Launcher, variables};
use super::place::Place;
use super::star::{Member, Star};
use super::{Options, hosts};
use crate::digest::digest;
use crate::error::{Error, Result};
use crate::transport::shm::ShmTransport;
use crate::transport::{Nodes, PerNode, Transport};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The ranks of a job, connected. Every method is called by all ranks together, or by all ranks of a host.
pub struct Rendezvous {
    star: Arc<Star>,
    /// The same star when all ranks share a host; otherwise one per host, for descriptors.
    local: Option<Star>,
    hosts: Hosts,
    /// The name for the job by which the ranks of this host meet, and the secret that they share.
    local_job: String,
    token: String,
    /// Ranks in the job.
    job_size: usize,
}

/// Where the ranks of a job have met, for as long as they stay there: what is told there all of them hear, whatever else they
/// wait for.
#[derive(Clone)]
pub(crate) struct Meeting(Arc<Star>);

impl Meeting {
    /// An error once one of them has ended, or has said why it failed.
    pub fn whole(&self) -> Result<()> {
        self.0.whole()
    }

    /// Has hosts asked whether they are there, for [`unanswered`](Self::unanswered); whether there may be others than this one.
    ///
    /// # Errors
    /// The system's.
    pub fn ask_hosts(&self) -> Result<bool> {
        self.0.ask_hosts()
    }

    /// Ranks to which this one's connection has ended because nothing is heard of their host, and what the system says; each
    /// once. Rank 0 has one to all others, and they have one to rank 0.
    pub fn unanswered(&self) -> Vec<(usize, String)> {
        self.0.unanswered()
    }

    /// Tells the others why this rank has failed; who is in the middle passes it on.
    pub fn tell(&self, why: &Error) {
        self.0.tell(why.clone());
    }
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
        let token = identity.token.clone().unwrap_or_default();
        let secret = secret(identity);
        let place = meeting_place(identity, &job)?;
        let star = meet_world((identity, &job), &secret, &place, options, board)?;
        let (key, name) = (hosts::host_key(), hosts::host_name());
        let mut joined = Rendezvous {
            star: Arc::new(star),
            local: None,
            hosts: Hosts { of: vec![0; world], names: vec![name.clone()] },
            local_job: job,
            token,
            job_size: world,
        };
        if let Place::Tcp(_) = place {
            let all = joined.exchange(format!("{key}\n{name}\n{}", joined.local_job).as_bytes())?;
            joined.hosts = Hosts::of(&all);
            let local = joined.local_ranks();
            // Its ranks may have been started by different processes, and so have different names for the job.
            joined.local_job = Hosts::job_of(&all[local[0]]);
            let index = local.iter().position(|&r| r == rank).unwrap_or(0);
            let job = &joined.local_job;
            let place = Place::Unix(socket_name(job, &format!("host of {}", local[0])));
            let program = options.program;
            let me = Member { ranks: &local, index, world, token: &secret, job, program };
            let above = &joined.star;
            let met = Star::meet(&place, &me, options.timeout, joined.board(), Some(above));
            joined.local = Some(met.map_err(|error| above.tell(error))?);
            // Nobody leaves the world's star while others wait below it.
            joined.barrier()?;
        }
        Ok(joined)
    }

    /// Meets the other ranks only to tell them why this one takes no part, so that they do not wait for it.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn decline(identity: &Identity, options: &Options, why: &str) -> Result<()> {
        let (job, board) = (identity.job_name(), board(identity)?);
        let place = meeting_place(identity, &job)?;
        let star = meet_world((identity, &job), &secret(identity), &place, options, board)?;
        let whose = format!("rank {} on {}", identity.rank, hosts::host_name());
        star.decline(format!("{whose}: {why}"));
        Ok(())
    }

    /// The ranks of one node only, of which `identity` is one: for what they share, once it is known who they are and
    /// by which name for the `job` they meet.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn among(identity: &Identity, job: &str, options: &Options, node: &[usize]) -> Result<Self> {
        let token = identity.token.clone().unwrap_or_default();
        meet_node((identity.rank, identity.world), (job, token), node, options, board(identity)?, None)
    }

    /// Which ranks share a node: those of one host, or as `per_node` says, for smaller nodes than there are (a cluster's
    /// shape can be tried on one machine).
    ///
    /// # Errors
    /// [`Error::Launch`] when nodes by hand would span hosts.
    pub fn nodes(&self, per_node: Option<PerNode>) -> Result<Nodes> {
        self.hosts.nodes(per_node)
    }

    /// Shared memory among the ranks of this rank's node, in their order; None where this rank is alone there. All ranks
    /// call it together, with the same nodes, none of which spans hosts. Where those are the hosts, ranks of different ones have
    /// nothing to say to each other for that.
    ///
    /// # Errors
    /// As [`join`](Self::join), and those of [`ShmTransport::connect`].
    pub fn shm_inside(&mut self, nodes: &Nodes, options: &Options) -> Result<Option<Box<dyn Transport>>> {
        if *nodes == self.nodes(None)? {
            return self.shm_of(nodes.with(self.rank()), options);
        }
        let node = nodes.with(self.rank());
        let inside = self.shm_of(node, options).map_err(|error| self.star.tell(error))?;
        // Nobody leaves the star of all while others wait below it.
        self.barrier()?;
        Ok(inside)
    }

    /// The same of this rank's `node`.
    fn shm_of(&mut self, node: &[usize], options: &Options) -> Result<Option<Box<dyn Transport>>> {
        let rank = self.rank();
        if node.len() == 1 {
            return Ok(None);
        }
        if node == self.local_ranks() {
            return Ok(Some(Box::new(ShmTransport::connect(self, options)?)));
        }
        let named = (self.local_job.as_str(), self.token.clone());
        let above = Some(&*self.star);
        let mut inside = meet_node((rank, self.job_size), named, node, options, self.board(), above)?;
        Ok(Some(Box::new(ShmTransport::connect(&mut inside, options)?)))
    }

    /// This rank of the job.
    pub fn rank(&self) -> usize {
        self.star.ranks[self.star.index]
    }

    /// Ranks that have met: those of the job, or of one node.
    pub fn world(&self) -> usize {
        self.star.ranks.len()
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
        self.star.board.clone()
    }

    /// Every rank's blob, by rank. For addresses and the like: all blobs together stay below 64 MiB.
    ///
    /// # Errors
    /// Names the ranks that are gone or did not answer within the timeout.
    pub fn exchange(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.star.exchange(blob)
    }

    /// The blobs of the ranks of this host, in the order of [`local_ranks`](Self::local_ranks).
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn exchange_local(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let local = self.local.as_ref().unwrap_or(&self.star);
        local.exchange(blob).map_err(|error| self.tell(error))
    }

    /// The descriptors of the ranks of this host, in the order of [`local_ranks`](Self::local_ranks); all give
    /// equally many.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub(crate) fn exchange_fds(&mut self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let local = self.local.as_ref().unwrap_or(&self.star);
        local.exchange_fds(fds).map_err(|error| self.tell(error))
    }

    /// Where the ranks are, for one that fails while they do something else than meet.
    pub(crate) fn meeting(&self) -> Meeting {
        Meeting(self.star.clone())
    }

    /// Other hosts hear what has failed on this one.
    pub(crate) fn tell(&self, error: Error) -> Error {
        if self.local.is_some() { self.star.tell(error) } else { error }
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
    /// From each rank's `key\nname`, after which more may stand in a line of its own.
    pub(super) fn of(all: &[Vec<u8>]) -> Self {
        let (mut keys, mut names, mut of) = (HashMap::<&[u8], usize>::new(), Vec::new(), Vec::new());
        for blob in all {
            let mut lines = blob.split(|&b| b == b'\n');
            let key = lines.next().unwrap_or_default();
            of.push(*keys.entry(key).or_insert_with(|| {
                names.push(String::from_utf8_lossy(lines.next().unwrap_or(key)).into_owned());
                names.len() - 1
            }));
        }
        Hosts { of, names }
    }

    /// What stands after the key and the name.
    fn job_of(blob: &[u8]) -> String {
        let job = blob.splitn(3, |&b| b == b'\n').nth(2).unwrap_or_default();
        String::from_utf8_lossy(job).into_owned()
    }

    /// See [`Rendezvous::nodes`].
    pub(super) fn nodes(&self, per_node: Option<PerNode>) -> Result<Nodes> {
        let Some(per_node) = per_node else { return Ok(Nodes::of(&self.of)) };
        let nodes = Nodes::by_hand(self.of.len(), per_node)?;
        let mut neighbours = nodes.all().iter().flat_map(|ranks| ranks.windows(2));
        match neighbours.find(|pair| self.of[pair[0]] != self.of[pair[1]]) {
            None => Ok(nodes),
            Some(pair) => Err(Error::Launch(format!(
                "nodes of {per_node} ranks were asked for, but rank {} runs on {} and rank {} on {}: nodes can be smaller \
                 than hosts, not larger",
                pair[0], self.names[self.of[pair[0]]], pair[1], self.names[self.of[pair[1]]]
            ))),
        }
    }
}

/// Where all ranks of the `job` meet.
fn meeting_place(identity: &Identity, job: &str) -> Result<Place> {
    let Identity { rank, world, .. } = *identity;
    match &identity.rendezvous {
        Some(address) if identity.is_sought_elsewhere() => Err(Error::Launch(format!(
            "rank 0 is on {}, and Open MPI's ranks look for it on the host of mpirun, at {address}, which is another: set \
             CARAVAN_RENDEZVOUS=host:port, with the host of rank 0 and a free port, for all ranks (mpirun -x CARAVAN_RENDEZVOUS \
             ...)",
            hosts::host_name()
        ))),
        Some(address) => Ok(Place::Tcp(address.clone())),
        None if identity.local_size.is_some_and(|local| local < world) => Err(Error::Launch(format!(
            "the host of rank {rank} has {} of the {world} ranks and nothing says where rank 0 is; set \
             CARAVAN_RENDEZVOUS=host:port, with the host of rank 0 and a free port, for all ranks",
            identity.local_size.unwrap_or(1)
        ))),
        None => Ok(Place::Unix(socket_name(job, "world"))),
    }
}

/// All ranks of the `job`.
fn meet_world(
    (identity, job): (&Identity, &str),
    secret: &str,
    place: &Place,
    options: &Options,
    board: Option<Arc<Board>>,
) -> Result<Star> {
    let ranks: Vec<usize> = (0..identity.world).collect();
    let Identity { rank: index, world, .. } = *identity;
    let me = Member { ranks: &ranks, index, world, token: secret, job, program: options.program };
    Star::meet(place, &me, options.timeout, board, None)
}

/// The ranks of one node, of which `rank` of a job of `world` is one, by a name for the job that all of them have, and with
/// the job's secret, while those of a star above, if there is one, are all there.
fn meet_node(
    (rank, world): (usize, usize),
    (job, token): (&str, String),
    node: &[usize],
    options: &Options,
    board: Option<Arc<Board>>,
    above: Option<&Star>,
) -> Result<Rendezvous> {
    let index = node
        .iter()
        .position(|&r| r == rank)
        .ok_or_else(|| Error::Launch(format!("rank {rank} is not one of the ranks {node:?} of its node")))?;
    let place = Place::Unix(socket_name(job, &format!("node of {}", node[0])));
    let me = Member { ranks: node, index, world, token: &token, job, program: options.program };
    let star = Star::meet(&place, &me, options.timeout, board, above)?;
    let hosts = Hosts { of: vec![0; node.len()], names: vec![hosts::host_name()] };
    let local_job = job.to_owned();
    let star = Arc::new(star);
    Ok(Rendezvous { star, local: None, hosts, local_job, token, job_size: world })
}

/// What only ranks of this job have: jobs that chance brings to one address tell each other apart by their names, where the
/// launcher gives each its own or the user has named them.
fn secret(identity: &Identity) -> String {
    let token = identity.token.clone().unwrap_or_default();
    let named = |job: &str| std::env::var(variables::JOB).is_ok_and(|given| given.trim() == job);
    match (&identity.job, identity.launcher) {
        (Some(job), Launcher::Slurm | Launcher::OpenMpi | Launcher::TorchRun | Launcher::Caravan) => {
            format!("{job}\n{token}")
        }
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
    use std::time::Duration;

    #[test]
    fn hosts_are_numbered_by_their_first_rank() {
        let all = [b"k1\na".to_vec(), b"k2\nb\njob\nof two lines".to_vec(), b"k1\na".to_vec()];
        let hosts = Hosts::of(&all);
        assert_eq!(Hosts::job_of(&all[1]), "job\nof two lines");
        assert_eq!((hosts.of, hosts.names), (vec![0, 1, 0], vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn nodes_by_hand_do_not_span_hosts() {
        let hosts = Hosts { of: vec![0, 0, 0, 1], names: vec!["a".into(), "b".into()] };
        assert_eq!(hosts.nodes(None).unwrap(), Nodes::of(&[0, 0, 0, 1]));
        assert_eq!(hosts.nodes(Some(PerNode::Block(1))).unwrap(), Nodes::apart(4));
        let text = hosts.nodes(Some(PerNode::Block(2))).unwrap_err().to_string();
        assert!(text.contains("rank 2 runs on a and rank 3 on b"), "{text}");
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
        let free = format!("127.0.0.1:{}", harness::ports::free_port());
        let text = first(1, Some(free.clone()));
        assert!(
            text.contains("rank 1 of 2 did not arrive") && text.contains("; it may have failed before"),
            "{text}"
        );
        // For documents only.
        let text = first(1, Some(free.replace("127.0.0.1", "192.0.2.1")));
        assert!(
            text.contains(&format!("rank 0 runs on {}, which does not have", hosts::host_name())),
            "{text}"
        );
        // That of mpirun, where all look.
        let (launcher, rendezvous) = (Launcher::OpenMpi, Some("192.0.2.1:4000".to_owned()));
        let led = Identity { world: 2, local_size: Some(1), launcher, rendezvous, ..Identity::alone() };
        let text = Rendezvous::join(&led, &Options::default()).err().unwrap().to_string();
        assert!(text.contains("on the host of mpirun, at 192.0.2.1:4000, which is another"), "{text}");
        let nowhere = Some("no-such-host.invalid:4000".to_owned());
        let one = Identity { rank: 1, world: 2, rendezvous: nowhere, ..Identity::alone() };
        let options = Options { timeout: Duration::from_millis(100), ..Default::default() };
        let text = Rendezvous::join(&one, &options).err().unwrap().to_string();
        assert!(
            text.contains("for 100ms; CARAVAN_RENDEZVOUS=host:port says where rank 0 is: set it"),
            "{text}"
        );
        let one = Identity { rank: 1, world: 2, rendezvous: Some(free.clone()), ..Identity::alone() };
        let options = Options { timeout: Duration::from_millis(100), ..Default::default() };
        let text = Rendezvous::join(&one, &options).err().unwrap().to_string();
        assert!(text.contains(&format!("{free} says: ")) && text.contains("where rank 0 is"), "{text}");
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
