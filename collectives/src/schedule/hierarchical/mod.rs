//! Collectives that treat nodes as units, so that as little as possible crosses the network between them.
//!
//! Every rank r has a partner on each other node: the one with its place among the node's ranks (or, on a node of fewer
//! ranks, that place modulo their number). What goes to r from a node goes through r's partner there, and what comes
//! from r to a node comes to r's partner there: so the ranks of a node share the work and the network, and a node sends
//! to r once what each of its ranks would. Which ranks a node has makes no difference to that.
//!
//! [`sums`] says how bits are kept; [`moves`] passes blocks on unchanged. Trees that cross the network once a node are
//! in [`broadcast`](super::broadcast) and [`barrier`](super::barrier).

mod moves;
#[cfg(test)]
mod saved;
mod sums;

use super::{Build, Group, Span, piece};
use crate::transport::Nodes;
pub(super) use moves::{all_gather, all_to_all, gather, scatter};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
pub(super) use sums::{at_root, crossing, exchange, reduce_scatter};

/// Nodes as one rank sees them.
#[derive(Clone)]
pub(super) struct View {
    nodes: Arc<Nodes>,
    rank: usize,
}

impl View {
    pub(super) fn of(group: &Group) -> Self {
        let nodes = group.nodes.clone().expect("only groups with nodes get these algorithms");
        View { nodes, rank: group.rank }
    }

    fn node(&self) -> usize {
        self.nodes.node(self.rank)
    }

    /// The place of `rank` among the ranks of its node.
    fn place(&self, rank: usize) -> usize {
        self.nodes.with(rank).binary_search(&rank).expect("every rank is on its own node")
    }

    /// The ranks of this rank's node, from this one on, so that not all talk to the first at once.
    fn mates(&self) -> impl Iterator<Item = usize> + Clone {
        let (node, me) = (self.nodes.with(self.rank), self.place(self.rank));
        (1..node.len()).map(move |i| node[(me + i) % node.len()])
    }

    /// The other nodes, from the next on.
    fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let (count, mine) = (self.nodes.count(), self.node());
        (1..count).map(move |i| (mine + i) % count)
    }

    /// The rank of `node` that deals with `rank`.
    fn partner(&self, node: usize, rank: usize) -> usize {
        match self.nodes.node(rank) == node {
            true => rank,
            false => {
                let ranks = &self.nodes.all()[node];
                ranks[self.place(rank) % ranks.len()]
            }
        }
    }

    /// The ranks that `rank` deals with on behalf of its node: itself and others on other nodes.
    fn served_by(&self, rank: usize) -> Vec<usize> {
        let node = self.nodes.node(rank);
        (0..self.nodes.world()).filter(|&r| self.partner(node, r) == rank).collect()
    }

    /// The rank that speaks for each node to `root`, and the root itself for its own, which comes first.
    pub(super) fn speakers(&self, root: usize) -> Vec<usize> {
        let (count, first) = (self.nodes.count(), self.nodes.node(root));
        (0..count).map(|i| self.partner((first + i) % count, root)).collect()
    }

    /// The ranks of this rank's node, from the one on that speaks for it to `root`.
    pub(super) fn behind_speaker(&self, root: usize) -> Vec<usize> {
        let (node, first) = (self.nodes.with(self.rank), self.place(self.partner(self.node(), root)));
        (0..node.len()).map(|i| node[(first + i) % node.len()]).collect()
    }
}

/// The most ranks that one rank deals with: itself, and its share of those of every other node.
pub(super) fn most_served(nodes: &Nodes) -> usize {
    let mut sizes = BTreeMap::new();
    nodes.all().iter().for_each(|node| *sizes.entry(node.len()).or_insert(0) += 1);
    let share = |own: usize| {
        let all = sizes.iter().map(|(&ranks, &nodes): (&usize, &usize)| nodes * ranks.div_ceil(own));
        // Of its own node it deals with itself only, which is what its share of that would be.
        all.sum::<usize>()
    };
    sizes.keys().map(|&own| share(own)).max().unwrap_or(1)
}

/// Bytes per round and rounds for pieces of at most `largest` bytes, `pieces` of them at once.
fn cut(b: &Build, view: &View, pieces: usize, largest: usize) -> (usize, usize) {
    // A message per rank served and round goes to a mate, and 2^15 of a call have names, of which an all_reduce has its two
    // halves.
    let least = ((largest * most_served(&view.nodes)) >> 13).next_multiple_of(64);
    let per_round = b.group.tuning.cut(pieces, largest, b.group.tuning.round).0.max(least);
    (per_round, largest.div_ceil(per_round).max(1))
}

/// Parts of all ranks that pass through partners, in rounds.
struct Passing<'a> {
    view: View,
    parts: &'a [Range<usize>],
    /// Where they lie.
    memory: fn(usize, usize) -> Span,
    per_round: usize,
    rounds: usize,
}

impl<'a> Passing<'a> {
    /// Of `parts`, the first of which is the longest, pieces of so many at once.
    fn new(b: &Build, parts: &'a [Range<usize>], memory: fn(usize, usize) -> Span, at_once: usize) -> Self {
        let view = View::of(&b.group);
        let (per_round, rounds) = cut(b, &view, at_once, parts[0].len());
        Passing { view, parts, memory, per_round, rounds }
    }

    /// What round `k` has of the part of `rank`.
    fn range(&self, rank: usize, k: usize) -> Range<usize> {
        piece(&self.parts[rank], k, self.per_round)
    }

    /// The most that a round has of one.
    fn longest(&self) -> usize {
        self.per_round.min(self.parts[0].len())
    }

    /// What it has of the parts of these ranks, which go from one mate to another, and whether they do in one message.
    fn pieces(&self, b: &Build, ranks: &[usize], k: usize) -> (Vec<Span>, bool) {
        let piece = |&rank: &usize| {
            let range = self.range(rank, k);
            (self.memory)(range.start, range.len())
        };
        let pieces: Vec<Span> = ranks.iter().map(piece).collect();
        let packed = self.rounds == 1 && one_message(b, &self.view, pieces.iter().map(|piece| piece.bytes));
        (pieces, packed)
    }

    /// The same as they are sent.
    fn parcel(&self, b: &mut Build, ranks: &[usize], k: usize) -> Vec<Span> {
        match self.pieces(b, ranks, k) {
            (pieces, true) => vec![b.together(&pieces)],
            (pieces, false) => pieces,
        }
    }
}

/// What is copied together on one rank and apart on another while both deal with one message more: in about 2 us.
const COPIED_MEANWHILE: usize = 8_000;

/// Whether what a rank has for a mate of several ranks, `pieces`, goes there in one message instead of one for each: as far
/// as to copy it takes no longer than those, and what comes so from all mates is no more than what a round brings.
fn one_message(b: &Build, view: &View, pieces: impl ExactSizeIterator<Item = usize>) -> bool {
    let (saved, mates) = (pieces.len().saturating_sub(1), view.nodes.with(view.rank).len() - 1);
    let bytes: usize = pieces.sum();
    bytes <= saved * COPIED_MEANWHILE && bytes * mates <= b.group.tuning.round
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_one_partner_on_each_node() {
        for nodes in [&[0, 0, 1, 1, 2][..], &[0, 1, 2, 0, 1, 2, 0], &[0, 1, 1, 1, 1, 2, 0], &[0, 1, 1, 0]] {
            let nodes = Arc::new(Nodes::of(nodes));
            let world = nodes.world();
            let view = |rank| View { nodes: nodes.clone(), rank };
            let served: Vec<Vec<usize>> = (0..world).map(|rank| view(rank).served_by(rank)).collect();
            for rank in 0..world {
                assert!(served[rank].contains(&rank));
                assert_eq!(served.iter().filter(|s| s.contains(&rank)).count(), nodes.count(), "{nodes:?}");
                let mut around: Vec<usize> = view(rank).mates().chain([rank]).collect();
                around.sort_unstable();
                assert_eq!(around, nodes.with(rank));
                for root in 0..world {
                    let speaker = view(rank).behind_speaker(root)[0];
                    assert!(view(rank).speakers(root).contains(&speaker) && served[speaker].contains(&root));
                }
            }
            assert_eq!(most_served(&nodes), served.iter().map(Vec::len).max().unwrap(), "{nodes:?}");
        }
    }
}
