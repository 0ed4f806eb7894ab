//! Which ranks share a node: what is cheap to reach, and what crosses the network.

use crate::digest::digest;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// The node of each rank of a group. Nodes may have different numbers of ranks, and ranks of a node need not follow each
/// other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Nodes have numbers in the order of their first ranks.
    of: Vec<usize>,
    /// The ranks of each node, in order.
    ranks: Vec<Vec<usize>>,
}

impl Nodes {
    /// From any numbers, equal for ranks that share a node.
    pub fn of(nodes: &[usize]) -> Self {
        let mut numbers = HashMap::new();
        let mut ranks: Vec<Vec<usize>> = Vec::new();
        let number = |(rank, node)| {
            let number = *numbers.entry(node).or_insert(ranks.len());
            if number == ranks.len() {
                ranks.push(Vec::new());
            }
            ranks[number].push(rank);
            number
        };
        let of = nodes.iter().enumerate().map(number).collect();
        Nodes { of, ranks }
    }

    /// Every rank on a node of its own.
    pub fn apart(world: usize) -> Self {
        Nodes { of: (0..world).collect(), ranks: (0..world).map(|rank| vec![rank]).collect() }
    }

    /// Nodes by hand, whatever the machine says.
    ///
    /// # Errors
    /// [`Error::Launch`] for nodes of no ranks.
    pub fn by_hand(world: usize, per_node: PerNode) -> Result<Self> {
        let node_of = |rank: usize| match per_node {
            PerNode::Block(ranks) => rank / ranks,
            PerNode::Cyclic(ranks) => rank % world.div_ceil(ranks),
        };
        match per_node {
            PerNode::Block(0) | PerNode::Cyclic(0) => {
                Err(Error::Launch("nodes of 0 ranks were asked for: a node has at least 1".into()))
            }
            _ => Ok(Nodes::of(&(0..world).map(node_of).collect::<Vec<usize>>())),
        }
    }

    /// Nodes of `per_node` consecutive ranks, the last of which may have fewer.
    ///
    /// # Errors
    /// As [`by_hand`](Self::by_hand).
    pub fn blocks(world: usize, per_node: usize) -> Result<Self> {
        Nodes::by_hand(world, PerNode::Block(per_node))
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.of.len()
    }

    /// How many nodes there are.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The number of the node of `rank`.
    pub fn node(&self, rank: usize) -> usize {
        self.of[rank]
    }

    /// The ranks of each node, in order.
    pub fn all(&self) -> &[Vec<usize>] {
        &self.ranks
    }

    /// The ranks on the node of `rank`, in order.
    pub fn with(&self, rank: usize) -> &[usize] {
        &self.ranks[self.of[rank]]
    }

    /// Whether two ranks share a node.
    pub fn shared(&self, a: usize, b: usize) -> bool {
        self.of[a] == self.of[b]
    }

    /// The most ranks that a node has.
    pub fn largest(&self) -> usize {
        self.ranks.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether some ranks share a node and others do not: only then do nodes make a difference to algorithms.
    pub fn matter(&self) -> bool {
        (2..self.world()).contains(&self.count())
    }

    /// Which ranks share a node, in a word without spaces: as [`PerNode`] where that has one for it, `3+5` for nodes of so
    /// many consecutive ranks, and else with what tells it from others, `3+5:1f2e3d4c5b6a7988`.
    pub fn layout(&self) -> String {
        let most = self.largest().max(1);
        let by_hand = |way: &PerNode| Nodes::by_hand(self.world(), *way).is_ok_and(|nodes| nodes == *self);
        if let Some(way) = [PerNode::Block(most), PerNode::Cyclic(most)].into_iter().find(by_hand) {
            return way.to_string();
        }
        let sizes: Vec<String> = self.ranks.iter().map(|ranks| ranks.len().to_string()).collect();
        let sizes = sizes.join("+");
        match self.of.is_sorted() {
            true => sizes,
            false => format!("{sizes}:{:016x}", digest(self.of.iter().flat_map(|node| node.to_le_bytes()))),
        }
    }

    /// The nodes of some ranks, in their new order.
    pub fn among(&self, members: &[usize]) -> Self {
        Nodes::of(&members.iter().map(|&m| self.of[m]).collect::<Vec<usize>>())
    }
}

/// Which ranks share a node, by hand; in text `4` or `4:cyclic`, by Slurm's words for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerNode {
    /// This many consecutive ones. The last node may have fewer.
    Block(usize),
    /// At most this many of those that are dealt to as few nodes as that takes, in turn.
    Cyclic(usize),
}

impl fmt::Display for PerNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PerNode::Block(ranks) => write!(f, "{ranks}"),
            PerNode::Cyclic(ranks) => write!(f, "{ranks}:cyclic"),
        }
    }
}

impl FromStr for PerNode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (ranks, way) = text.split_once(':').unwrap_or((text, "block"));
        let way = match way {
            "block" => PerNode::Block,
            "cyclic" => PerNode::Cyclic,
            other => return Err(format!("'{other}' is neither block nor cyclic")),
        };
        match ranks.parse() {
            Ok(0) => Err("a node has at least 1 rank".into()),
            Ok(ranks) => Ok(way(ranks)),
            Err(_) => Err(format!("'{ranks}' is no number of ranks")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_numbers_in_the_order_of_their_first_ranks() {
        let nodes = Nodes::of(&[7, 3, 7, 9, 3]);
        assert_eq!(nodes.all(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!((nodes.node(4), nodes.with(4), nodes.largest()), (1, &[1, 4][..], 2));
        assert_eq!(Nodes::blocks(5, 2).unwrap(), Nodes::of(&[0, 0, 1, 1, 2]));
        assert_eq!(Nodes::apart(3), Nodes::of(&[5, 6, 1]));
        assert!(Nodes::blocks(4, 0).unwrap_err().to_string().contains("at least 1"));
    }

    #[test]
    fn nodes_by_hand_are_blocks_or_dealt_in_turn() {
        for (text, nodes) in [
            ("2", &[0, 0, 1, 1, 2][..]),
            ("2:block", &[0, 0, 1, 1, 2]),
            ("2:cyclic", &[0, 1, 2, 0, 1]),
            ("3:cyclic", &[0, 1, 0, 1, 0]),
            ("1:cyclic", &[0, 1, 2, 3, 4]),
            ("9:cyclic", &[0, 0, 0, 0, 0]),
        ] {
            let per_node: PerNode = text.parse().unwrap();
            assert_eq!(Nodes::by_hand(5, per_node).unwrap(), Nodes::of(nodes), "{text}");
            assert_eq!(per_node.to_string().parse(), Ok(per_node));
        }
        for (text, words) in [
            ("", "''"),
            ("0", "at least 1"),
            ("0:cyclic", "at least 1"),
            ("2:plane", "'plane'"),
            ("-2", "'-2'"),
        ] {
            let said = text.parse::<PerNode>().unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn layouts_have_words_that_tell_them_apart() {
        let of = |nodes: &[usize]| Nodes::of(nodes).layout();
        assert_eq!(of(&[0, 0, 1, 1]), "2");
        assert_eq!(of(&[0, 0, 0, 0]), "4");
        assert_eq!(of(&[0, 1, 2]), "1");
        assert_eq!(of(&[0, 0, 1]), "2");
        assert_eq!(of(&[0, 1, 0, 1]), "2:cyclic");
        assert_eq!(of(&[0, 1, 1]), "1+2");
        let (one, other) = (of(&[0, 1, 1, 0]), of(&[0, 1, 1, 0, 0, 1]));
        assert!(one.starts_with("2+2:") && other.starts_with("3+3:"), "{one} {other}");
        assert_ne!(of(&[0, 1, 1, 0, 0, 1]), of(&[0, 1, 1, 0, 1, 0]));
    }

    #[test]
    fn nodes_matter_where_some_ranks_share_one() {
        for (nodes, matter) in [
            (&[][..], false),
            (&[5, 5, 5], false),
            (&[3, 1, 2], false),
            (&[0, 0, 1], true),
            (&[0, 1, 0, 1], true),
            (&[0, 1, 1, 2], true),
        ] {
            assert_eq!(Nodes::of(nodes).matter(), matter, "{nodes:?}");
        }
    }

    #[test]
    fn a_group_of_some_ranks_keeps_their_nodes() {
        let nodes = Nodes::of(&[7, 8, 7, 9]);
        assert_eq!((nodes.with(2), nodes.count(), nodes.world()), (&[0, 2][..], 3, 4));
        assert_eq!(nodes.among(&[3, 2, 0]), Nodes::of(&[9, 7, 7]));
        assert!(nodes.shared(0, 2) && !nodes.shared(0, 1));
    }
}
