//! When nodes are units, and when ranks of several nodes do without that.

use super::{Choice, Effort, Why};
use crate::element::DType;
use crate::schedule::{Algorithm, Call, Group, Kind, hierarchical};
use crate::transport::Nodes;

/// Whether reductions send less than half as much between nodes with nodes as units as if every rank sent to every
/// other: below that, passing contributions on inside the node costs more than it saves.
pub(in crate::schedule) fn sums_pay(group: &Group, dtype: DType) -> bool {
    let (flat, partial) = group.nodes.as_ref().map_or((0, 0), |nodes| hierarchical::crossing(nodes, dtype));
    2 * partial < flat
}

/// Of nodes that send their partial results to all who need them.
fn exchange(nodes: &Nodes) -> Effort {
    Effort { steps: 1, messages: nodes.largest() - 1 + hierarchical::most_served(nodes) - 1 }
}

/// Up to how many bytes ranks on several nodes pass on what they have at doubling distance, which crosses between nodes in
/// each step, instead of nodes as units, 0 if never.
fn doubled_over(call: &Call, group: &Group, nodes: &Nodes, pays: bool) -> usize {
    let (tuning, size) = (&group.tuning, group.size);
    let doubled = |spared| tuning.doubled(size, call.kind.reduces(), spared);
    let exchange = exchange(nodes);
    // A rank's own goes to mates and other nodes, and what comes from those to mates, few bytes in one message each.
    let gathered = exchange.messages + nodes.largest() - 1;
    match call.kind {
        Kind::AllGather => doubled(Effort { steps: 1, messages: gathered }),
        Kind::AllReduce => {
            // Few bytes are exchanged, and above that they are reduced in parts that are gathered.
            let spared = if pays { exchange } else { Effort::of_all(size) };
            let few = doubled(spared);
            match few * spared.messages < tuning.exchange_all {
                true => few,
                false => doubled(Effort { steps: 2, messages: spared.messages + gathered }),
            }
        }
        _ => 0,
    }
}

/// The algorithm for `call` that treats nodes as units, where that sends less between them and latency does not speak
/// for another.
pub(super) fn over_nodes(call: &Call, group: &Group) -> Option<Choice> {
    let nodes = group.nodes.as_ref().filter(|_| group.direct.is_none())?;
    let (tuning, bytes) = (&group.tuning, call.bytes());
    let units = Some(Choice::new(Algorithm::Hierarchical, Why::Nodes(nodes.largest())));
    let few = |algorithm, limit| Some(Choice::new(algorithm, Why::Latency(limit)));
    let pays = call.kind.reduces() && sums_pay(group, call.dtype);
    let suiting = |limit: usize| limit.min(Algorithm::HierarchicalExchange.most(group.size));
    let doubled = doubled_over(call, group, nodes, pays);
    match call.kind {
        Kind::AllGather | Kind::AllReduce if doubled > 0 && bytes <= doubled => {
            Some(Choice::new(Algorithm::Bruck, Why::Messages(doubled)))
        }
        Kind::AllReduce => {
            let limit = suiting(tuning.exchange_all / exchange(nodes).messages);
            match bytes <= limit {
                true if pays => few(Algorithm::HierarchicalExchange, limit),
                true if bytes <= tuning.exchanged(group.size) => None,
                _ => units,
            }
        }
        Kind::ReduceScatter if pays => units,
        Kind::Reduce => {
            let (flat, partial) = hierarchical::crossing(nodes, call.dtype);
            // In parts the root also sends mates what it has, and other nodes partial results.
            let messages = group.size - 1 + exchange(nodes).messages;
            let received = hierarchical::at_root(nodes, call.dtype);
            let limit = tuning.reduced_at_root(group.size, received, messages);
            // Where nodes save little, parts are reduced without them.
            let limit = if pays { limit } else { limit.min(tuning.reduced_alone(group.size)) };
            match partial <= flat && bytes <= suiting(limit) {
                true => few(Algorithm::HierarchicalExchange, suiting(limit)),
                false => units.filter(|_| pays),
            }
        }
        Kind::AllGather | Kind::Broadcast | Kind::Barrier => units,
        // More keeps the link busy block by block, and gains nothing from waiting inside nodes.
        Kind::Gather | Kind::Scatter | Kind::AllToAll if bytes <= joined(group) => {
            few(Algorithm::Hierarchical, joined(group))
        }
        _ => None,
    }
}

/// Up to how many bytes of a block what a node sends one rank is joined.
pub(super) fn joined(group: &Group) -> usize {
    group.tuning.tree / group.size
}
