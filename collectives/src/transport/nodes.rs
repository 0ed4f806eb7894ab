//! Which ranks share a node: what is cheap to reach, and what crosses the network.

use crate::error::{Error, Result};

/// The node of each rank of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes(Vec<usize>);

impl Nodes {
    /// From any numbers, equal for ranks that share a node.
    pub fn of(nodes: &[usize]) -> Self {
        Nodes(nodes.to_vec())
    }

    /// Every rank on a node of its own.
    pub fn apart(world: usize) -> Self {
        Nodes((0..world).collect())
    }

    /// Nodes of `per_node` consecutive ranks, the last of which may have fewer, whatever the machine says.
    ///
    /// # Errors
    /// [`Error::Launch`] for nodes of no ranks.
    pub fn blocks(world: usize, per_node: usize) -> Result<Self> {
        match per_node {
            0 => Err(Error::Launch("nodes of 0 ranks were asked for: a node has at least 1".into())),
            _ => Ok(Nodes((0..world).map(|rank| rank / per_node).collect())),
        }
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.0.len()
    }

    /// Whether two ranks share a node.
    pub fn shared(&self, a: usize, b: usize) -> bool {
        self.0[a] == self.0[b]
    }

    /// The ranks on the node of `rank`, in order.
    pub fn with(&self, rank: usize) -> Vec<usize> {
        (0..self.0.len()).filter(|&other| self.shared(rank, other)).collect()
    }

    /// How many nodes there are.
    pub fn count(&self) -> usize {
        let mut seen = self.0.clone();
        seen.sort_unstable();
        seen.dedup();
        seen.len()
    }

    /// The nodes of some ranks, in their new order.
    pub fn among(&self, members: &[usize]) -> Self {
        Nodes(members.iter().map(|&m| self.0[m]).collect())
    }

    /// The most consecutive ranks that can be treated as a unit: the largest K of at least 2 for which every block of
    /// K ranks, the last of which may have fewer, is on one node. None where there is no such K below the number of
    /// ranks, because nodes then make no difference to algorithms, or follow no order that they could use.
    pub fn block(&self) -> Option<usize> {
        let world = self.0.len();
        let fits = |k: usize| self.0.chunks(k).all(|block| block.iter().all(|&node| node == block[0]));
        (self.count() > 1).then(|| (2..world).rev().find(|&k| fits(k))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_where_ranks_of_a_node_are_consecutive() {
        for (nodes, block) in [
            (&[0, 0, 1, 1][..], Some(2)),
            (&[5, 5, 5], None),
            (&[3, 1, 2], None),
            (&[0, 0, 1], Some(2)),
            (&[0, 0, 0, 1, 1], Some(3)),
            (&[0, 0, 0, 0, 1, 1, 2, 2], Some(2)),
            (&[0, 0, 0, 1, 1, 2, 2], None),
            (&[0, 1, 0, 1], None),
            (&[0, 0, 1, 1, 0, 0], Some(2)),
            (&[0, 1, 1, 2], None),
            (&[], None),
        ] {
            assert_eq!(Nodes::of(nodes).block(), block, "{nodes:?}");
        }
        assert_eq!(Nodes::blocks(5, 2).unwrap(), Nodes::of(&[0, 0, 1, 1, 2]));
        assert_eq!(Nodes::blocks(5, 4).unwrap().block(), Some(4));
        assert_eq!((Nodes::blocks(5, 9).unwrap().block(), Nodes::apart(4).block()), (None, None));
        assert!(Nodes::blocks(4, 0).unwrap_err().to_string().contains("at least 1"));
    }

    #[test]
    fn a_group_of_some_ranks_keeps_their_nodes() {
        let nodes = Nodes::of(&[7, 8, 7, 9]);
        assert_eq!((nodes.with(2), nodes.count(), nodes.world()), (vec![0, 2], 3, 4));
        assert_eq!(nodes.among(&[3, 2, 0]), Nodes::of(&[9, 7, 7]));
        assert!(nodes.shared(0, 2) && !nodes.shared(0, 1));
    }
}
