//! Which algorithm carries a call, and why: by kind, bytes, ranks and what the transport can do. The answer is
//! the same on every rank, because it depends only on what is.

mod nodes;

use super::broadcast::chain_above;
use super::{Algorithm, Call, Group, KEPT, Kind};
use crate::reduce::accumulator;
pub(super) use nodes::sums_pay;
use nodes::{joined, over_nodes};
use std::fmt;
use std::time::Duration;

/// An algorithm with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What carries the call.
    pub algorithm: Algorithm,
    /// Why this one.
    pub why: Why,
    /// Which sizes the tuning table has a rule for, where this call is of another.
    pub measured: Option<Sizes>,
}

impl Choice {
    fn new(algorithm: Algorithm, why: Why) -> Self {
        Choice { algorithm, why, measured: None }
    }

    /// Why, in words, for a collective of this kind.
    pub fn reason(&self, kind: Kind) -> String {
        let why = self.why.of(kind);
        let other = |sizes: Sizes| format!("{why} (the tuning table's rule is for calls {})", sizes.of(kind));
        self.measured.map_or_else(|| why.clone(), other)
    }
}

/// Sizes of calls in bytes, as [`Call::bytes`] counts them, with both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The least.
    pub from: usize,
    /// The greatest.
    pub to: usize,
}

impl Sizes {
    /// Every size.
    pub const ALL: Sizes = Sizes { from: 0, to: usize::MAX };

    /// Whether a call of so many bytes is one of them.
    pub fn contain(self, bytes: usize) -> bool {
        (self.from..=self.to).contains(&bytes)
    }

    /// In words, for a collective of this kind.
    pub fn of(self, kind: Kind) -> String {
        let bytes = bytes_of(kind);
        match self {
            Sizes::ALL => "of every size".into(),
            Sizes { from: 0, to } => format!("up to {to} {bytes}"),
            Sizes { from, to: usize::MAX } => format!("from {from} {bytes} on"),
            Sizes { from, to } => format!("from {from} to {to} {bytes}"),
        }
    }
}

/// What a collective's bytes are counted of, in words.
fn bytes_of(kind: Kind) -> &'static str {
    if kind.counts_a_part() { "bytes a part" } else { "bytes" }
}

/// Why an algorithm was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nothing else is possible here.
    Only,
    /// The caller asked for it.
    Forced,
    /// Peers' memory can be read, so one pass without messages is least work, and without data a look at their flags.
    Direct,
    /// So few bytes that the number of steps counts: at most this many.
    Latency(usize),
    /// So few bytes that the number of messages counts: at most this many.
    Messages(usize),
    /// So many bytes that their volume counts: more than this.
    Bandwidth(usize),
    /// Nothing takes fewer steps, and nothing sends less.
    Least,
    /// Nodes of up to this many ranks send each other once what all their ranks would.
    Nodes(usize),
    /// Sums of nodes would be no less than half of what ranks send each other, which then is as good without them.
    Ranks,
    /// The tuning table has it for calls of these sizes.
    Measured(Sizes),
}

impl Why {
    /// In words, for a collective of this kind, which say what its bytes are counted of.
    pub fn of(self, kind: Kind) -> String {
        let bytes = bytes_of(kind);
        match self {
            Why::Only => "the only one possible here".into(),
            Why::Forced => "as asked for".into(),
            Why::Direct if kind == Kind::Barrier => {
                "because ranks share memory: flags in it, no messages".into()
            }
            Why::Direct => "because peers' memory can be read: one pass, no messages".into(),
            Why::Latency(limit) => format!("because up to {limit} {bytes} the number of steps decides"),
            Why::Messages(limit) => {
                format!("because up to {limit} {bytes} the number of messages decides")
            }
            Why::Bandwidth(limit) => format!("because above {limit} {bytes} the volume decides"),
            Why::Least => "because nothing takes fewer steps or sends less".into(),
            Why::Ranks => "because sums inside nodes would not halve what crosses between them".into(),
            Why::Nodes(ranks) => {
                format!("because up to {ranks} ranks share a node, and least crosses between nodes so")
            }
            // Nobody measures that: it was written by hand, or when tables did not say what had been tried.
            Why::Measured(Sizes::ALL) => "as the tuning table has it for every size".into(),
            Why::Measured(sizes) => format!("measured to be fastest {}", sizes.of(kind)),
        }
    }
}

/// What was measured to be fastest for one collective: one algorithm up to a size, another above it. Of other sizes than
/// those around what was tried it says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Up to and including `up_to`.
    pub small: Algorithm,
    /// Bytes of the call, as [`Call::bytes`] counts them.
    pub up_to: usize,
    /// Above that.
    pub large: Algorithm,
    /// Where it holds.
    pub sizes: Sizes,
}

impl Rule {
    /// For every size.
    pub const fn new(small: Algorithm, up_to: usize, large: Algorithm) -> Self {
        Rule { small, up_to, large, sizes: Sizes::ALL }
    }

    /// What it has for a call of so many bytes, and for which sizes it has the same; None where it does not hold.
    pub fn at(&self, bytes: usize) -> Option<(Algorithm, Sizes)> {
        let Sizes { from, to } = self.sizes;
        let found = match bytes <= self.up_to {
            true => (self.small, Sizes { from, to: to.min(self.up_to) }),
            false => (self.large, Sizes { from: from.max(self.up_to + 1), to }),
        };
        self.sizes.contain(bytes).then_some(found)
    }
}

impl fmt::Display for Rule {
    /// As a [`TuningTable`](super::TuningTable) has it: `all` is every size where it holds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.up_to {
            usize::MAX => f.write_str("all")?,
            bytes => write!(f, "{bytes}")?,
        }
        write!(f, " {} {}", self.small, self.large)?;
        match self.sizes {
            Sizes::ALL => Ok(()),
            Sizes { from, to } => write!(f, " {from} {to}"),
        }
    }
}

/// By how much two ranks go further in giving each other everything: they move no more so than by halves and save a
/// step; only the reduction is done twice.
const BY_TWO: usize = 8;

/// The same of reading everything, where less than a step decides: halves of a result, which the other has just written, come
/// more slowly out of his caches than an input that was there before. Where the result replaces the input, whose owner keeps it
/// for the other, both take about as long (tried by hand on a Zen 4). More would be too much for second caches of 2 MiB, which
/// have to keep both inputs and the result.
const READ_BY_TWO: usize = 16;

/// What a rank reduces while it deals with one message: in about 2 us some 8 GB/s.
const REDUCED_MEANWHILE: usize = 16_000;

/// Received at once by a root that copies what one other rank sends it. Where its own input is in the way of the result
/// it takes up to twice this of scratch memory, so it has an end.
const COPIED: usize = 64 << 20;

/// More bytes than any round can have.
const MOST_AT_ONCE: usize = 1 << 60;

/// Sizes in bytes at which algorithms change. The same on every rank of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Copied per round when peers cannot read a buffer where it is.
    pub staging: usize,
    /// Sent to a rank or received by it per round.
    pub round: usize,
    /// The same in a reduction that a processor's own cache cannot hold: what a round brings stays there until it is
    /// reduced. Over messages within a node, with 2 MiB of cache a processor 128 to 512 KiB took equally long, 1 MiB a little
    /// and 2 MiB a quarter more; with 1 MiB, 256 KiB took up to a fifth longer than 512 KiB to 2 MiB.
    pub window: usize,
    /// The least piece per peer of a round.
    pub piece: usize,
    /// First messages up to this many bytes travel together with the call's fingerprint.
    pub frame: usize,
    /// A longer message goes in several, of which two are under way: nothing is seen of a peer meanwhile but what is through.
    pub longest: usize,
    /// Up to this many bytes read in total, every rank reduces everything in `all_reduce`; two ranks do so up to 16
    /// times as many, and others up to as many as a rank has room for beside an input that the result replaces.
    pub read_all: usize,
    /// Up to this many bytes sent per rank, every rank sends everything to every other in `all_reduce`; two ranks do so
    /// up to eight times as many.
    pub exchange_all: usize,
    /// What a link carries while a step takes. Up to this many bytes what a node sends one rank in `gather`, `scatter` and
    /// `all_to_all` is joined: there they are those of all blocks. In `broadcast` it counts how many more steps a chain takes
    /// than a tree, in `reduce` what it saves that the root alone reduces what ranks or nodes send it, at most this many
    /// bytes of each, and in `all_gather` and `all_reduce` each step more in which things are passed on.
    pub tree: usize,
    /// What a link carries while a rank deals with one message: what each piece of a `broadcast` costs besides, each part of
    /// a `reduce` that not the root alone reduces, and each message that is saved where things are passed on instead.
    pub handled: usize,
    /// Above this many bytes a rank, a reduction goes through such windows, but for one to the root of two ranks in one
    /// memory, which takes the other's input at once.
    pub windowed: usize,
    /// Measurements by kind, which go before the limits above; see [`TuningTable`](super::TuningTable).
    pub measured: [Option<Rule>; Kind::ALL.len()],
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            staging: 256 << 10,
            round: 2 << 20,
            window: 512 << 10,
            piece: 32 << 10,
            frame: 8 << 10,
            longest: 16 << 20,
            read_all: 32 << 10,
            exchange_all: 16 << 10,
            tree: 64 << 10,
            handled: 16 << 10,
            windowed: 2 << 20,
            measured: [None; Kind::ALL.len()],
        }
    }
}

/// What a call takes besides its bytes.
#[derive(Clone, Copy)]
struct Effort {
    /// Between nodes, where there are some.
    steps: usize,
    /// That a rank sends, to ranks of its own node, too.
    messages: usize,
}

impl Effort {
    /// Each of so many ranks exchanges with all others.
    fn of_all(ranks: usize) -> Self {
        Effort { steps: 1, messages: ranks - 1 }
    }
}

impl Tuning {
    /// What the costs of a link between ranks say, before anything is measured. One step more costs its latency and
    /// about 2 us of software.
    ///
    /// - Sending everything to everybody saves an `all_reduce` of n ranks one step. Of B bytes sent per rank it sends
    ///   (1 - 2/n) B more than is needed, and reduces the rest of B/(n-1) only once all is there, at some 8 GB/s. It
    ///   pays up to the B at which both together take as long as the step.
    /// - A root that reduces alone takes fewer steps than all together, and receives more: see `reduced_at_root`. A tree
    ///   has fewer steps than a chain, of which each link carries everything once: see `chain_above` beside them.
    /// - To pass on what many ranks have, at doubling distance, takes more steps than to send it to all, or once to each
    ///   node and on inside it, and fewer messages: see `doubled`. Between nodes in each step, while inside nodes only
    ///   messages are counted: see `doubled_over`.
    /// - Rounds must be longer than that for the next to be under way while one is reduced.
    pub fn for_link(self, ranks: usize, latency: Duration, bandwidth: f64) -> Tuning {
        const SOFTWARE: f64 = 2e-6;
        const REDUCED: f64 = 8e9;
        const MOST: f64 = (4 << 20) as f64;
        let step = latency.as_secs_f64() + SOFTWARE;
        let n = ranks.max(2) as f64;
        let exchanged = step / ((1.0 - 2.0 / n) / bandwidth + 1.0 / (n * REDUCED));
        let exchanged = if ranks <= 2 { exchanged / BY_TWO as f64 } else { exchanged };
        let filled = (2.0 * step * bandwidth).min(16.0 * MOST) as usize;
        Tuning {
            exchange_all: exchanged.min(MOST) as usize,
            tree: (step * bandwidth).min(MOST) as usize,
            handled: (SOFTWARE * bandwidth).min(MOST) as usize,
            round: self.round.max(filled),
            window: self.window.max(filled),
            ..self
        }
    }

    /// Up to how many bytes each of `ranks` ranks sends its whole input to every other in `all_reduce`.
    fn exchanged(&self, ranks: usize) -> usize {
        match ranks {
            2 => self.exchange_all.saturating_mul(BY_TWO),
            _ => self.exchange_all / (ranks - 1),
        }
    }

    /// Up to how many bytes each of `ranks` ranks reads the whole inputs of all others in `all_reduce`. It goes by nothing in
    /// which ranks may differ, as in whether their result replaces the input.
    fn read(&self, ranks: usize) -> usize {
        match ranks {
            2 => self.read_all.saturating_mul(READ_BY_TWO),
            _ => KEPT.min(self.read_all / (ranks - 1)),
        }
    }

    /// Up to how many bytes of each of n `ranks` are passed on at doubling distance instead of in another way, of which
    /// `spared` says what it takes: as many as a rank receives, and in `all_reduce` then `reduces` alone, while it would deal
    /// with the messages that this saves, less the steps that it takes more. Where all are sent to all others as many bytes
    /// are sent either way, but some of them are copied first.
    fn doubled(&self, ranks: usize, reduces: bool, spared: Effort) -> usize {
        let steps = ranks.next_power_of_two().trailing_zeros() as usize;
        let effort = |of: Effort| {
            self.tree.saturating_mul(of.steps).saturating_add(self.handled.saturating_mul(of.messages))
        };
        let saved = effort(spared).saturating_sub(effort(Effort { steps, messages: steps }));
        let reduced = if reduces { ranks.saturating_mul(self.handled) / REDUCED_MEANWHILE } else { 0 };
        (saved / (ranks - 1 + reduced).max(1)).min(Algorithm::Bruck.most(ranks))
    }

    /// Up to how many bytes a root alone reduces those of n `ranks` in `reduce`. Of B bytes each it receives (n - 1) B, and
    /// where all reduce their parts n - 1 messages more.
    fn reduced_alone(&self, ranks: usize) -> usize {
        self.reduced_at_root(ranks, (ranks - 1) as f64, ranks - 1)
    }

    /// Up to how many bytes each a root receives `received` times as many instead of 2 (n - 1)/n times, one after the other,
    /// as where all n `ranks` reduce their parts in a step and so many `messages` more.
    fn reduced_at_root(&self, ranks: usize, received: f64, messages: usize) -> usize {
        let (n, saved) = (ranks as f64, self.tree as f64 + messages as f64 * self.handled as f64);
        let more = received - 2.0 * (n - 1.0) / n;
        if more > 0.0 { ((saved / more) as usize).min(self.tree) } else { self.tree }
    }

    /// How contributions of at most `largest` bytes each, of `peers` ranks at once, are cut into rounds.
    pub(super) fn cut_reduction(&self, peers: usize, largest: usize) -> (usize, usize) {
        self.cut(peers, largest, if largest <= self.windowed { self.round } else { self.window })
    }

    /// How the inputs of `group`, of `bytes` each, are cut that one rank alone reduces. Where there is one that another rank
    /// sends, and to receive it is to copy it, the sender is through as soon as that is done, which rounds would put off;
    /// and it mostly goes to where the result will be.
    pub(super) fn cut_for_root(&self, group: &Group, bytes: usize) -> (usize, usize) {
        match group.size == 2 && group.one_memory {
            true => self.cut(1, bytes, COPIED),
            false => self.cut_reduction(group.size - 1, bytes),
        }
    }

    /// How pieces of at most `largest` bytes, `pieces` of them at once, are cut into rounds of about `budget`
    /// bytes: bytes of a piece per round, and rounds (at least one).
    pub(super) fn cut(&self, pieces: usize, largest: usize, budget: usize) -> (usize, usize) {
        // At most 2^14 rounds, so that slots of messages fit their 15 bits of tags.
        let least = self.piece.max(largest >> 14);
        let most = largest.clamp(1, MOST_AT_ONCE);
        let per_round = (budget / pieces.max(1)).max(least).clamp(1, most).next_multiple_of(64);
        (per_round, largest.div_ceil(per_round).max(1))
    }
}

/// Whether what was measured, with elements of 32 bits, holds for `call`: partial results of 16-bit elements are twice as long
/// as contributions, so that nodes have to pay by what they send less.
fn holds(call: &Call, group: &Group, algorithm: Algorithm) -> bool {
    match (call.kind, algorithm) {
        _ if !call.kind.reduces() || accumulator(call.dtype).size() == call.dtype.size() => true,
        // It reduces without nodes where they do not pay.
        (Kind::AllReduce, Algorithm::Hierarchical) => true,
        (_, Algorithm::Hierarchical | Algorithm::HierarchicalExchange) => sums_pay(group, call.dtype),
        _ => true,
    }
}

/// The algorithm for `call` in `group`.
pub fn choose(call: &Call, group: &Group, forced: Option<Algorithm>) -> Choice {
    if let Some(algorithm) = forced {
        return Choice::new(algorithm, Why::Forced);
    }
    let candidates = Algorithm::candidates(call.kind, group);
    if let [algorithm] = *candidates {
        return Choice::new(algorithm, Why::Only);
    }
    let (rule, bytes) = (group.tuning.measured[call.kind as usize], call.bytes());
    let by_rule = rule.and_then(|rule| rule.at(bytes));
    // A table that was written by hand, or for another transport, may name what cannot be done here.
    let possible = |algorithm: Algorithm| {
        candidates.contains(&algorithm) && algorithm.suits(bytes, group.size) && holds(call, group, algorithm)
    };
    match by_rule {
        Some((algorithm, sizes)) if possible(algorithm) => Choice::new(algorithm, Why::Measured(sizes)),
        Some(_) => by_cost(call, group, candidates),
        None => Choice { measured: rule.map(|rule| rule.sizes), ..by_cost(call, group, candidates) },
    }
}

/// What costs say where nothing that was measured does.
fn by_cost(call: &Call, group: &Group, candidates: &[Algorithm]) -> Choice {
    let (tuning, bytes) = (&group.tuning, call.bytes());
    let by_size = |size: usize, limit: usize, small: Algorithm, large: Algorithm| match size <= limit {
        true => Choice::new(small, Why::Latency(limit)),
        false => Choice::new(large, Why::Bandwidth(limit)),
    };
    if let Some(choice) = over_nodes(call, group) {
        return choice;
    }
    // Over nodes it has been looked at.
    let doubled = match group.nodes {
        None => tuning.doubled(group.size, call.kind.reduces(), Effort::of_all(group.size)),
        Some(_) => 0,
    };
    match (call.kind, group.direct) {
        (Kind::AllReduce, Some(_)) => {
            let limit = tuning.read(group.size);
            by_size(bytes, limit, Algorithm::DirectReadAll, Algorithm::DirectReduceScatterAllGather)
        }
        (_, Some(_)) => Choice::new(Algorithm::DirectRead, Why::Direct),
        (Kind::AllReduce | Kind::AllGather, None) if doubled > 0 && bytes <= doubled => {
            Choice::new(Algorithm::Bruck, Why::Messages(doubled))
        }
        (Kind::AllReduce, None) => {
            let limit = tuning.exchanged(group.size).max(doubled);
            by_size(bytes, limit, Algorithm::ExchangeAll, Algorithm::PairwiseReduceScatterAllGather)
        }
        (Kind::Broadcast, None) => {
            by_size(bytes, chain_above(tuning, group.size), Algorithm::Binomial, Algorithm::Chain)
        }
        // Two ranks would send more if both reduced.
        (Kind::Reduce, None) if group.size == 2 => Choice::new(Algorithm::Linear, Why::Least),
        (Kind::Reduce, None) => {
            let limit = tuning.reduced_alone(group.size);
            by_size(bytes, limit, Algorithm::Linear, Algorithm::PairwiseReduceScatterGather)
        }
        (Kind::AllGather, None) if doubled == 0 => Choice::new(Algorithm::Pairwise, Why::Least),
        (Kind::AllGather, None) => Choice::new(Algorithm::Pairwise, Why::Bandwidth(doubled)),
        // What follows is of nodes that are no units for this call; without nodes it has one candidate.
        (Kind::ReduceScatter, None) => Choice::new(Algorithm::Pairwise, Why::Ranks),
        (Kind::Gather | Kind::Scatter | Kind::AllToAll, None) => {
            Choice::new(candidates[0], Why::Bandwidth(joined(group)))
        }
        // Always units over nodes, or messages between two ranks.
        (Kind::Barrier | Kind::Send | Kind::Recv, None) => Choice::new(candidates[0], Why::Only),
    }
}

#[cfg(test)]
mod tests;
