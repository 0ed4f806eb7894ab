//! Nodes of a job whose ranks have not met but reach each other already, as over MPI: what ranks say of themselves, who
//! shares a node, and shared memory inside it. Every rank sends to every other for that; ranks that have met know it from
//! their [`Rendezvous`].

use super::identity::Identity;
use super::rendezvous::{Hosts, Rendezvous};
use super::{Options, hosts};
use crate::error::{Error, Result};
use crate::transport::shm::ShmTransport;
use crate::transport::{Nodes, PerNode, Request, Tag, Transport};
use crate::watch::Waited;
use std::time::Duration;

/// Which ranks share a node: those whose hosts are the same, or as `per_node` says, for smaller nodes than there are (a
/// cluster's shape can be tried on one machine). All ranks call it together, on a transport that has carried nothing yet.
///
/// # Errors
/// [`Error::Launch`] when nodes by hand would span hosts, and what the transport says.
pub fn nodes_of(outer: &mut dyn Transport, options: &Options, per_node: Option<PerNode>) -> Result<Nodes> {
    let mine = format!("{}\n{}", hosts::host_key(), hosts::host_name());
    let all = exchange(outer, mine.as_bytes(), options.timeout)?;
    Hosts::of(&all).nodes(per_node)
}

/// Shared memory among the ranks of this rank's node, in their order; None where this rank is alone there. All ranks call
/// it together, on the transport that has brought them together and has carried only what they tell each other of themselves.
///
/// # Errors
/// Those of the [`Rendezvous`] and of [`ShmTransport::connect`], and what the transport says.
pub fn shm_inside(
    outer: &mut dyn Transport,
    identity: &Identity,
    options: &Options,
    nodes: &Nodes,
) -> Result<Option<Box<dyn Transport>>> {
    // Ranks of a node may have been started by different processes, and so have different names for the job.
    let jobs = exchange(outer, identity.job_name().as_bytes(), options.timeout)?;
    let node = nodes.with(identity.rank);
    if node.len() == 1 {
        return Ok(None);
    }
    let job = String::from_utf8_lossy(&jobs[node[0]]);
    let mut rendezvous = Rendezvous::among(identity, &job, options, node)?;
    Ok(Some(Box::new(ShmTransport::connect(&mut rendezvous, options)?)))
}

/// Every rank's blob, by rank: what [`Rendezvous::exchange`] gives ranks that have met, for those that a transport has
/// brought together. All ranks call it together, before anything else is on its way.
///
/// # Errors
/// [`Error::Timeout`] with the rank that did not answer, and what the transport says.
pub fn exchange(outer: &mut dyn Transport, blob: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let lengths = exchange_equal(outer, &(blob.len() as u64).to_le_bytes(), timeout)?;
    let lengths = lengths.iter().map(|l| l.iter().rfold(0, |n, &byte| n << 8 | usize::from(byte)));
    let lengths: Vec<usize> = lengths.collect();
    let mut padded = blob.to_vec();
    padded.resize(lengths.iter().copied().max().unwrap_or(0), 0);
    let mut all = exchange_equal(outer, &padded, timeout)?;
    all.iter_mut().zip(lengths).for_each(|(blob, length)| blob.truncate(length));
    Ok(all)
}

/// The same for blobs of one length.
fn exchange_equal(outer: &mut dyn Transport, mine: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let (rank, size) = (outer.rank(), outer.size());
    let mut all = vec![mine.to_vec(); size];
    let mut open: Vec<(usize, Request)> = Vec::with_capacity(2 * size);
    // A transport that is dropped or has given up touches no memory any more; until then both lists stay.
    for i in 1..size {
        let (to, from) = ((rank + i) % size, (rank + size - i) % size);
        // SAFETY: `mine` and `all` live until all requests are complete, or the transport has given up below.
        let posted = unsafe {
            outer.recv(from, Tag(0), all[from].as_mut_ptr(), mine.len()).and_then(|received| {
                open.push((from, received));
                outer.send(to, Tag(0), mine.as_ptr(), mine.len())
            })
        };
        match posted {
            Ok(sent) => open.push((to, sent)),
            Err(error) => return Err(give_up(outer, error)),
        }
    }
    let (mut waited, mut at) = (Waited::begin(), 0);
    while !open.is_empty() {
        // Each has its turn: ranks that look at what they send alone wait for each other.
        at %= open.len();
        let (peer, request) = open[at];
        let looked = match outer.test(request) {
            Ok(true) => {
                open.swap_remove(at);
                continue;
            }
            Ok(false) => outer.check(),
            Err(error) => Err(error),
        };
        if let Err(error) = looked {
            return Err(give_up(outer, error));
        }
        if waited.so_far() > timeout {
            let what = "hearing what each rank is and was asked for";
            return Err(give_up(outer, Error::timeout(what, rank, peer, timeout)));
        }
        at += 1;
        if at == open.len() {
            outer.park(Duration::from_millis(1));
        }
    }
    Ok(all)
}

fn give_up(outer: &mut dyn Transport, error: Error) -> Error {
    outer.abort(&error);
    error
}
