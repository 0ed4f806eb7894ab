//! Nodes of a job whose ranks already reach each other: who shares one, and shared memory inside it.

use super::identity::Identity;
use super::rendezvous::{Hosts, Rendezvous};
use super::{Options, hosts};
use crate::error::{Error, Result};
use crate::transport::shm::ShmTransport;
use crate::transport::{Nodes, PerNode, Request, Tag, Transport};
use std::time::{Duration, Instant};

/// Room for what a rank says about its host; names of hosts have at most 64 bytes.
const CARD: usize = 256;

/// Which ranks share a node: those whose hosts are the same, or as `per_node` says, for smaller nodes than there are (a
/// cluster's shape can be tried on one machine). All ranks call it together, on a transport that has carried nothing yet.
///
/// # Errors
/// [`Error::Launch`] when nodes by hand would span hosts, and what the transport says.
pub fn nodes_of(outer: &mut dyn Transport, options: &Options, per_node: Option<PerNode>) -> Result<Nodes> {
    let all = exchange(outer, &format!("{}\n{}", hosts::host_key(), hosts::host_name()), options.timeout)?;
    let hosts = Hosts::of(&all);
    let Some(per_node) = per_node else { return Ok(Nodes::of(&hosts.of)) };
    let nodes = Nodes::by_hand(outer.size(), per_node)?;
    let mut neighbours = nodes.all().iter().flat_map(|ranks| ranks.windows(2));
    match neighbours.find(|pair| hosts.of[pair[0]] != hosts.of[pair[1]]) {
        None => Ok(nodes),
        Some(pair) => Err(Error::Launch(format!(
            "nodes of {per_node} ranks were asked for, but rank {} runs on {} and rank {} on {}: nodes can be smaller \
             than hosts, not larger",
            pair[0], hosts.names[hosts.of[pair[0]]], pair[1], hosts.names[hosts.of[pair[1]]]
        ))),
    }
}

/// Shared memory among the ranks of this rank's node, in their order; None where this rank is alone there. All ranks of
/// a node call it together.
///
/// # Errors
/// Those of the [`Rendezvous`] and of [`ShmTransport::connect`].
pub fn shm_inside(
    identity: &Identity,
    options: &Options,
    nodes: &Nodes,
) -> Result<Option<Box<dyn Transport>>> {
    let node = nodes.with(identity.rank);
    if node.len() == 1 {
        return Ok(None);
    }
    let mut rendezvous = Rendezvous::among(identity, options, node)?;
    Ok(Some(Box::new(ShmTransport::connect(&mut rendezvous, options)?)))
}

/// Every rank's text, by messages.
fn exchange(outer: &mut dyn Transport, text: &str, timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let (rank, size) = (outer.rank(), outer.size());
    let mut mine = [0u8; CARD];
    let length = text.len().min(CARD);
    mine[..length].copy_from_slice(&text.as_bytes()[..length]);
    let mut cards = vec![[0u8; CARD]; size];
    cards[rank] = mine;
    let mut open: Vec<(usize, Request)> = Vec::with_capacity(2 * size);
    // A transport that is dropped or has given up touches no memory any more; until then both lists stay.
    for i in 1..size {
        let (to, from) = ((rank + i) % size, (rank + size - i) % size);
        // SAFETY: `mine` and `cards` live until all requests are complete, or the transport has given up below.
        let posted = unsafe {
            outer.recv(from, Tag(0), cards[from].as_mut_ptr(), CARD).and_then(|received| {
                open.push((from, received));
                outer.send(to, Tag(0), mine.as_ptr(), CARD)
            })
        };
        match posted {
            Ok(sent) => open.push((to, sent)),
            Err(error) => return Err(give_up(outer, error)),
        }
    }
    let start = Instant::now();
    while let Some(&(peer, request)) = open.last() {
        let looked = match outer.test(request) {
            Ok(true) => {
                open.pop();
                continue;
            }
            Ok(false) => outer.check(),
            Err(error) => Err(error),
        };
        if let Err(error) = looked {
            return Err(give_up(outer, error));
        }
        if start.elapsed() > timeout {
            let what = "learning which ranks share a node".into();
            return Err(give_up(outer, Error::Timeout { what, rank, peer, after: timeout }));
        }
        outer.park(Duration::from_millis(1));
    }
    Ok(cards.iter().map(|card| card.split(|&b| b == 0).next().unwrap_or_default().to_vec()).collect())
}

fn give_up(outer: &mut dyn Transport, error: Error) -> Error {
    outer.abort(&error);
    error
}
