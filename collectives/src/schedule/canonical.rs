//! The canonical tree over ranks, cut into parts: which partial results some ranks can make on their own, and how
//! those of all ranks are joined so that every sum is one of the tree's.
//!
//! The tree over `lo..hi` joins those over `lo..mid` and `mid..hi`, where `mid` is `lo` and half of the next power of
//! two of `hi - lo` (see [`reduce`](crate::reduce)).

use std::ops::Range;

/// Where the tree over a range of at least two ranks joins.
fn middle(range: &Range<usize>) -> usize {
    range.start + range.len().next_power_of_two() / 2
}

/// The largest subtrees of the tree over `size` ranks that lie within `block`, in rank order: what the ranks of a
/// block can reduce among themselves. With blocks of a power of two of ranks it is one each.
pub(super) fn subtrees(size: usize, block: &Range<usize>) -> Vec<Range<usize>> {
    fn walk(tree: Range<usize>, block: &Range<usize>, found: &mut Vec<Range<usize>>) {
        if tree.end <= block.start || block.end <= tree.start {
            return;
        }
        if block.start <= tree.start && tree.end <= block.end {
            return found.push(tree);
        }
        let mid = middle(&tree);
        walk(tree.start..mid, block, found);
        walk(mid..tree.end, block, found);
    }
    let mut found = Vec::new();
    walk(0..size, block, &mut found);
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
pub(super) fn join(size: usize, units: &[Range<usize>]) -> Join {
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
            for block in 1..=size {
                let blocks = (0..size).step_by(block).map(|start| start..(start + block).min(size));
                let units: Vec<Range<usize>> = blocks.flat_map(|b| subtrees(size, &b)).collect();
                assert_eq!(units.iter().map(Range::len).sum::<usize>(), size);
                assert_eq!(
                    joined(&join(size, &units), &units),
                    text(0..size),
                    "{size} ranks, {block} a block"
                );
            }
        }
    }

    #[test]
    fn blocks_of_powers_of_two_are_one_part_each_and_joined_in_one_pass() {
        for (size, block) in [(8, 2), (8, 4), (12, 4), (5, 2), (64, 8), (7, 4)] {
            let starts = (0..size).step_by(block);
            let units: Vec<Range<usize>> = starts.map(|s| s..(s + block).min(size)).collect();
            assert!(units.iter().all(|unit| subtrees(size, unit) == [unit.clone()]), "{size} {block}");
            let all = (0..units.len()).map(Join::Given).collect();
            assert_eq!(join(size, &units), Join::Of(all), "{size} {block}");
        }
        assert_eq!(subtrees(9, &(3..6)), [3..4, 4..6]);
        assert_eq!(subtrees(24, &(12..24)), [12..16, 16..24]);
    }
}
