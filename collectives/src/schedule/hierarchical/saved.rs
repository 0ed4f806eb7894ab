//! What crosses between nodes with nodes as units and without, counted in the schedules of all ranks.

use super::super::{Algorithm, Call, Group, Kind, Local, Schedule, Step, Tuning};
use crate::element::DType;
use crate::transport::Nodes;
use std::sync::Arc;

/// Elements of a call: so many that fingerprints are little beside them and so few that nothing is cut into rounds.
const COUNT: usize = 10_000;

/// Messages and bytes that cross.
fn crossing(call: Call, nodes: &Nodes, algorithm: Algorithm) -> (usize, usize) {
    let (size, shared) = (nodes.world(), Some(Arc::new(nodes.clone())));
    let (mut messages, mut sent) = (0, 0);
    for rank in 0..size {
        // Fingerprints in messages of their own would be counted as messages.
        let tuning = Tuning { frame: usize::MAX, round: usize::MAX, ..Tuning::default() };
        let group = Group { nodes: shared.clone(), tuning, ..Group::plain(rank, size) };
        for step in Schedule::new(call, &group, Local::default(), Some(algorithm)).steps {
            match step {
                Step::Send { to, span, .. } if !nodes.shared(rank, to) => {
                    messages += 1;
                    sent += span.bytes;
                }
                _ => {}
            }
        }
    }
    (messages, sent)
}

/// Messages and, in whole shards or blocks of `call.count`, bytes: without nodes and with.
fn compared(
    kind: Kind,
    dtype: DType,
    nodes: &[usize],
    flat: Algorithm,
    units: Algorithm,
) -> [(usize, usize); 2] {
    let count = if kind == Kind::Barrier { 0 } else { COUNT };
    let call = Call { root: 1, ..Call::new(kind, dtype, count) };
    [flat, units].map(|algorithm| {
        let (messages, bytes) = crossing(call, &Nodes::of(nodes), algorithm);
        (messages, bytes / call.bytes().max(1))
    })
}

const BLOCKS: &[usize] = &[0, 0, 0, 0, 1, 1, 1, 1];
const DEALT: &[usize] = &[0, 1, 0, 1, 0, 1, 0, 1];
const UNEVEN: &[usize] = &[0, 1, 1, 2, 2, 2, 2, 0];

#[test]
fn a_block_crosses_once_a_node_whatever_ranks_it_has() {
    use Algorithm::{Binomial, Hierarchical, HierarchicalExchange, Linear, Pairwise};
    for nodes in [BLOCKS, DEALT] {
        let of = |kind, flat, units| compared(kind, DType::F32, nodes, flat, units);
        // 8 ranks, 4 on the other node, of which one gets it and passes it on.
        assert_eq!(of(Kind::AllGather, Pairwise, Hierarchical), [(32, 32), (8, 8)], "{nodes:?}");
        assert_eq!(of(Kind::Broadcast, Binomial, Hierarchical)[1], (1, 1), "{nodes:?}");
        // As many bytes, in a quarter of the messages.
        assert_eq!(of(Kind::AllToAll, Pairwise, Hierarchical), [(32, 32), (8, 32)], "{nodes:?}");
        assert_eq!(of(Kind::Gather, Linear, Hierarchical), [(4, 4), (1, 4)], "{nodes:?}");
        assert_eq!(of(Kind::Scatter, Linear, Hierarchical), [(4, 4), (1, 4)], "{nodes:?}");
        assert_eq!(of(Kind::Barrier, Algorithm::Dissemination, Hierarchical)[1], (2, 16), "{nodes:?}");
        let integers = compared(Kind::Reduce, DType::I32, nodes, Linear, HierarchicalExchange);
        assert_eq!(integers, [(4, 4), (1, 1)], "{nodes:?}");
    }
    // Nodes of 2, 2 and 4 ranks: each of the 8 ranks hears of two other nodes.
    let of = |kind, flat, units| compared(kind, DType::F32, UNEVEN, flat, units);
    assert_eq!(of(Kind::AllGather, Pairwise, Hierarchical), [(40, 40), (16, 16)]);
    assert_eq!(of(Kind::AllToAll, Pairwise, Hierarchical), [(40, 40), (16, 40)]);
    assert_eq!(of(Kind::Gather, Linear, Hierarchical), [(6, 6), (2, 6)]);
    assert_eq!(of(Kind::Broadcast, Algorithm::Chain, Hierarchical)[1], (2, 2));
}

#[test]
fn sums_cross_as_the_canonical_tree_lets_them() {
    use Algorithm::{HierarchicalExchange, Linear, Pairwise};
    let scatter =
        |dtype, nodes| compared(Kind::ReduceScatter, dtype, nodes, Pairwise, Algorithm::Hierarchical);
    let reduce = |dtype, nodes| compared(Kind::Reduce, dtype, nodes, Linear, HierarchicalExchange);
    // One partial result of 4 contributions; in f32 twice as long as bf16.
    assert_eq!(scatter(DType::F32, BLOCKS), [(32, 32), (8, 8)]);
    assert_eq!(scatter(DType::Bf16, BLOCKS), [(32, 32), (8, 16)]);
    assert_eq!(reduce(DType::F32, BLOCKS), [(4, 4), (1, 1)]);
    // The tree joins neighbours first, which share no node here: fewer messages of as many bytes. Integers may be joined
    // in any order.
    assert_eq!(scatter(DType::F32, DEALT), [(32, 32), (8, 32)]);
    assert_eq!(reduce(DType::F64, DEALT), [(4, 4), (1, 4)]);
    assert_eq!(scatter(DType::I8, DEALT), [(32, 32), (8, 8)]);
    // Of ranks 3 to 6, which share a node, only 4 and 5 are joined before others come in; of ranks 1 and 2 none.
    assert_eq!(scatter(DType::F32, UNEVEN), [(40, 40), (16, 36)]);
}
