//! The algorithms by name, and which of them can carry a collective.

use super::{Group, Kind};
use crate::transport::Nodes;
use std::fmt;
use std::sync::Arc;

/// How a collective is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// There is one rank: at most a copy.
    Local,
    /// Each rank reads what it needs straight from its peers' memory.
    DirectRead,
    /// Each rank reads everybody's whole input and reduces all of it.
    DirectReadAll,
    /// Each rank reduces its part out of its peers' memory, then copies the other parts from theirs.
    DirectReduceScatterAllGather,
    /// Each pair of ranks exchanges what it owes each other.
    Pairwise,
    /// Each rank sends its whole input to every other.
    ExchangeAll,
    /// Each rank passes on what it has of all inputs, in steps at doubling distance (Bruck's).
    Bruck,
    /// Pairwise reduce-scatter, then pairwise all-gather.
    PairwiseReduceScatterAllGather,
    /// Pairwise reduce-scatter, then the parts go to the root.
    PairwiseReduceScatterGather,
    /// A binomial tree.
    Binomial,
    /// A pipelined chain of ranks.
    Chain,
    /// The root exchanges with each rank.
    Linear,
    /// Rounds at doubling distance.
    Dissemination,
    /// One message.
    Message,
    /// Nodes as units: what several ranks of a node get crosses the network once, and what they give comes in one.
    Hierarchical,
    /// Each rank sends its whole input inside its node, and a node its partial results to those that need them.
    HierarchicalExchange,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Algorithm; 16] = [
        Algorithm::Local,
        Algorithm::DirectRead,
        Algorithm::DirectReadAll,
        Algorithm::DirectReduceScatterAllGather,
        Algorithm::Pairwise,
        Algorithm::ExchangeAll,
        Algorithm::Bruck,
        Algorithm::PairwiseReduceScatterAllGather,
        Algorithm::PairwiseReduceScatterGather,
        Algorithm::Binomial,
        Algorithm::Chain,
        Algorithm::Linear,
        Algorithm::Dissemination,
        Algorithm::Message,
        Algorithm::Hierarchical,
        Algorithm::HierarchicalExchange,
    ];

    /// The name in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Local => "local",
            Algorithm::DirectRead => "direct-read",
            Algorithm::DirectReadAll => "direct-read-all",
            Algorithm::DirectReduceScatterAllGather => "direct-rs-ag",
            Algorithm::Pairwise => "pairwise",
            Algorithm::ExchangeAll => "exchange-all",
            Algorithm::Bruck => "bruck",
            Algorithm::PairwiseReduceScatterAllGather => "pairwise-rs-ag",
            Algorithm::PairwiseReduceScatterGather => "pairwise-rs-gather",
            Algorithm::Binomial => "binomial",
            Algorithm::Chain => "chain",
            Algorithm::Linear => "linear",
            Algorithm::Dissemination => "dissemination",
            Algorithm::Message => "message",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::HierarchicalExchange => "hierarchical-exchange",
        }
    }

    /// Whether a call of `bytes` between so many ranks may be tried with it.
    pub fn suits(self, bytes: usize, ranks: usize) -> bool {
        bytes <= self.most(ranks)
    }

    /// The most bytes of a call, as [`Call::bytes`](super::Call::bytes) counts them, between so many ranks that may be tried
    /// with it. Where everybody gets everybody's input, at once in memory of its own or one after the other, that is more
    /// than anything gains from it long before it is more than a host has.
    pub fn most(self, ranks: usize) -> usize {
        const MOST: usize = 64 << 20;
        match self {
            Algorithm::DirectReadAll
            | Algorithm::ExchangeAll
            | Algorithm::HierarchicalExchange
            | Algorithm::Bruck => MOST / ranks.saturating_sub(1).max(1),
            _ => usize::MAX,
        }
    }

    /// The algorithms that can carry `kind` in some group of several ranks.
    pub fn anywhere(kind: Kind) -> Vec<Algorithm> {
        let plain = Group::plain(0, 2);
        let direct = Group { direct: Some(0), ..plain.clone() };
        let nodes = Group { nodes: Some(Arc::new(Nodes::apart(2))), ..plain };
        let of = |group: &Group| Self::candidates(kind, group);
        Self::ALL.into_iter().filter(|a| of(&direct).contains(a) || of(&nodes).contains(a)).collect()
    }

    /// The algorithms that can carry `kind` in `group`.
    pub fn candidates(kind: Kind, group: &Group) -> &'static [Algorithm] {
        use Algorithm::*;
        if group.size == 1 {
            return &[Local];
        }
        if let (true, None) = (group.nodes.is_some(), group.direct) {
            match kind {
                Kind::Send | Kind::Recv => {}
                Kind::ReduceScatter | Kind::AllToAll => return &[Pairwise, Hierarchical],
                Kind::AllGather => return &[Pairwise, Bruck, Hierarchical],
                Kind::AllReduce => {
                    return &[
                        ExchangeAll,
                        Bruck,
                        PairwiseReduceScatterAllGather,
                        HierarchicalExchange,
                        Hierarchical,
                    ];
                }
                Kind::Broadcast => return &[Binomial, Chain, Hierarchical],
                Kind::Reduce => {
                    return &[Linear, PairwiseReduceScatterGather, HierarchicalExchange, Hierarchical];
                }
                Kind::Gather | Kind::Scatter => return &[Linear, Hierarchical],
                Kind::Barrier => return &[Dissemination, Hierarchical],
            }
        }
        match (kind, group.direct.is_some()) {
            (Kind::Send | Kind::Recv, _) => &[Message],
            (Kind::ReduceScatter | Kind::AllToAll, true) => &[DirectRead, Pairwise],
            (Kind::ReduceScatter | Kind::AllToAll, false) => &[Pairwise],
            (Kind::AllGather, true) => &[DirectRead, Pairwise, Bruck],
            (Kind::AllGather, false) => &[Pairwise, Bruck],
            (Kind::AllReduce, true) => &[
                DirectReadAll,
                DirectReduceScatterAllGather,
                ExchangeAll,
                Bruck,
                PairwiseReduceScatterAllGather,
            ],
            (Kind::AllReduce, false) => &[ExchangeAll, Bruck, PairwiseReduceScatterAllGather],
            (Kind::Broadcast, true) => &[DirectRead, Binomial, Chain],
            (Kind::Broadcast, false) => &[Binomial, Chain],
            (Kind::Reduce, true) => &[DirectRead, Linear, PairwiseReduceScatterGather],
            (Kind::Reduce, false) => &[Linear, PairwiseReduceScatterGather],
            (Kind::Gather | Kind::Scatter, true) => &[DirectRead, Linear],
            (Kind::Gather | Kind::Scatter, false) => &[Linear],
            (Kind::Barrier, true) => &[DirectRead, Dissemination],
            (Kind::Barrier, false) => &[Dissemination],
        }
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Algorithm::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| {
            let known = Algorithm::ALL.map(Algorithm::name).join(", ");
            format!("unknown algorithm '{s}': known are {known}")
        })
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
