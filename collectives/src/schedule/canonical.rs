//! The canonical tree over ranks, cut into parts: which partial results some ranks can make on their own, and how
//! those of all ranks are joined so that every sum is one of the tree's.
//!
//! The tree over `lo..hi` joins those over `lo..mid` and `mid..hi`, where `mid` is `lo` and half of the next power of
//! two of `hi - lo` (see [`reduce`](crate::reduce)).

use crate::element::DType;
use crate::transport::Nodes;
use std::ops::Range;

/// Where the tree over a range of at least two ranks joins.
fn middle(range: &Range<usize>) -> usize {
    range.start + range.len().next_power_of_two() / 2
}

/// A partial result that the ranks of one node can make on their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    /// The node.
    pub node: usize,
    /// Which of the node's partial results it is.
    pub number: usize,
    /// The ranks whose contributions are in it, in order.
    pub ranks: Vec<usize>,
}

/// What nodes can reduce on their own, in the order in which [`Join`] counts it, and how that becomes the result.
pub(super) fn units(nodes: &Nodes, dtype: DType) -> (Vec<Unit>, Join) {
    if dtype.is_integer() {
        // Integers wrap around, so their sums, products, least and greatest are the same in every order.
        let whole = |(node, ranks): (usize, &Vec<usize>)| Unit { node, number: 0, ranks: ranks.clone() };
        let join = Join::Of((0..nodes.count()).map(Join::Given).collect());
        return (nodes.all().iter().enumerate().map(whole).collect(), join);
    }
    let trees = subtrees(nodes);
    let mut made = vec![0; nodes.count()];
    let unit = |tree: &Range<usize>| {
        let node = nodes.node(tree.start);
        made[node] += 1;
        Unit { node, number: made[node] - 1, ranks: tree.clone().collect() }
    };
    (trees.iter().map(unit).collect(), join(nodes.world(), &trees))
}

/// The largest subtrees of the tree over all ranks whose ranks share a node, in rank order. A node that is a block of a
/// power of two of consecutive ranks is one; where ranks are dealt to nodes in turn, each rank is its own.
fn subtrees(nodes: &Nodes) -> Vec<Range<usize>> {
    fn walk(tree: Range<usize>, nodes: &Nodes, found: &mut Vec<Range<usize>>) {
        if tree.clone().all(|rank| nodes.shared(tree.start, rank)) {
            return found.push(tree);
        }
        let mid = middle(&tree);
        walk(tree.start..mid, nodes, found);
        walk(mid..tree.end, nodes, found);
    }
    let mut found = Vec::new();
    walk(0..nodes.world(), nodes, &mut found);
    found
}

/// How partial results become one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Join {
    /// The partial result of this number in the list.
    Given(usize),
    /// Several joined as a balanced tree, in one go.
    Of(Vec<Join>),
}

/// How the partial results over `units`, subtrees of the tree over `size` ranks that together are all of it, in rank
/// order, are joined in as few passes as give the tree's bits.
fn join(size: usize, units: &[Range<usize>]) -> Join {
    plan(0..size, units, 0)
}

fn plan(tree: Range<usize>, units: &[Range<usize>], first: usize) -> Join {
    if units.len() == 1 {
        return Join::Given(first);
    }
    if balanced(&tree, units) {
        return Join::Of((first..first + units.len()).map(Join::Given).collect());
    }
    let mid = middle(&tree);
    let left = units.iter().take_while(|unit| unit.end <= mid).count();
    let low = plan(tree.start..mid, &units[..left], first);
    let high = plan(mid..tree.end, &units[left..], first + left);
    Join::Of(vec![low, high])
}

/// Whether the tree over the units themselves is the tree over their ranks.
fn balanced(tree: &Range<usize>, units: &[Range<usize>]) -> bool {
    if units.len() == 1 {
        return units[0] == *tree;
    }
    let (mid, left) = (middle(tree), middle(&(0..units.len())));
    units[left - 1].end == mid
        && balanced(&(tree.start..mid), &units[..left])
        && balanced(&(mid..tree.end), &units[left..])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree over ranks as text, which shows its shape.
    fn text(tree: Range<usize>) -> String {
        match tree.len() {
            1 => tree.start.to_string(),
            _ => {
                let mid = middle(&tree);
                format!("({} {})", text(tree.start..mid), text(mid..tree.end))
            }
        }
    }

    fn joined(join: &Join, units: &[Range<usize>]) -> String {
        fn fold(parts: &[String]) -> String {
            match parts {
                [one] => one.clone(),
                _ => {
                    let (low, high) = parts.split_at(middle(&(0..parts.len())));
                    format!("({} {})", fold(low), fold(high))
                }
            }
        }
        match join {
            Join::Given(unit) => text(units[*unit].clone()),
            Join::Of(parts) => fold(&parts.iter().map(|part| joined(part, units)).collect::<Vec<_>>()),
        }
    }

    #[test]
    fn joined_parts_are_the_tree_over_all_ranks() {
        for size in 1..40 {
            for k in 1..=size {
                let dealt: Vec<usize> = (0..size).map(|rank| rank % k).collect();
                let uneven: Vec<usize> = (0..size).map(|rank| rank * rank / k % 3).collect();
                for nodes in [Nodes::blocks(size, k).unwrap(), Nodes::of(&dealt), Nodes::of(&uneven)] {
                    let units = subtrees(&nodes);
                    assert_eq!(units.iter().map(Range::len).sum::<usize>(), size);
                    assert_eq!(joined(&join(size, &units), &units), text(0..size), "{nodes:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_powers_of_two_are_one_part_each_and_joined_in_one_pass() {
        for (size, block) in [(8, 2), (8, 4), (12, 4), (5, 2), (64, 8), (7, 4)] {
            let nodes = Nodes::blocks(size, block).unwrap();
            let (units, join) = units(&nodes, DType::F32);
            let ranks: Vec<Vec<usize>> = units.into_iter().map(|unit| unit.ranks).collect();
            assert_eq!(ranks, nodes.all(), "{size} {block}");
            let all = (0..nodes.count()).map(Join::Given).collect();
            assert_eq!(join, Join::Of(all), "{size} {block}");
        }
        assert_eq!(subtrees(&Nodes::blocks(9, 3).unwrap()), [0..2, 2..3, 3..4, 4..6, 6..8, 8..9]);
        assert_eq!(subtrees(&Nodes::of(&[0, 1, 0, 0])), [0..1, 1..2, 2..4]);
    }

    #[test]
    fn integers_are_one_part_a_node_however_ranks_are_dealt() {
        let nodes = Nodes::of(&[0, 1, 0, 1, 1]);
        let parts = |dtype| {
            let (units, _) = units(&nodes, dtype);
            units.into_iter().map(|unit| (unit.node, unit.number, unit.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(parts(DType::I8), [(0, 0, vec![0, 2]), (1, 0, vec![1, 3, 4])]);
        let single = |node, number, rank| (node, number, vec![rank]);
        let each = [single(0, 0, 0), single(1, 0, 1), single(0, 1, 2), single(1, 1, 3), single(1, 2, 4)];
        assert_eq!(parts(DType::F64), each);
    }
}
