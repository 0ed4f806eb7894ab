//! Reductions over nodes.
//!
//! Sums keep the canonical order: a node reduces only what is a subtree of the tree over all ranks (see
//! [`canonical`](super::super::canonical)) and sends partial results unrounded, which the receiver joins as the tree does.
//! A node that is a block of a power of two of ranks has one partial result, others have a few; where ranks are dealt to
//! nodes in turn, the tree joins ranks of different nodes first, and each contribution is its own partial result. Then
//! nodes save messages but not bytes, except of integers, which may be joined in any order. For 16-bit types partial
//! results are twice as long as contributions. Where nodes save little, the tuner reduces without them ([`crossing`]).

use super::{Passing, View};
use crate::element::DType;
use crate::reduce::{Stage, accumulator};
use crate::schedule::canonical::{Join, Unit, units};
use crate::schedule::{Build, Operand, Space, Span, Step};
use crate::transport::Nodes;
use std::ops::Range;

/// Bytes that cross between nodes for each byte of a part that is reduced for every rank: as contributions of all
/// ranks, and as partial results of nodes. Both as multiples of what one node sends one rank.
pub(in crate::schedule) fn crossing(nodes: &Nodes, dtype: DType) -> (usize, usize) {
    let elsewhere = |node: usize| nodes.world() - nodes.all()[node].len();
    let (units, _) = units(nodes, dtype);
    let partial = units.iter().map(|unit| elsewhere(unit.node)).sum::<usize>() * accumulator(dtype).size();
    let flat = (0..nodes.world()).map(|rank| elsewhere(nodes.node(rank))).sum::<usize>() * dtype.size();
    (flat, partial)
}

/// How many times as much as each rank gives the root of a reduction receives at most, whichever it is, where its mates send
/// it what they have, and other nodes their partial results.
pub(in crate::schedule) fn at_root(nodes: &Nodes, dtype: DType) -> f64 {
    let (units, _) = units(nodes, dtype);
    let mut made = vec![0; nodes.count()];
    units.iter().for_each(|unit| made[unit.node] += 1);
    let wide = accumulator(dtype).size() as f64 / dtype.size() as f64;
    let at = |(node, ranks): (usize, &Vec<usize>)| {
        (ranks.len() - 1) as f64 + (units.len() - made[node]) as f64 * wide
    };
    nodes.all().iter().enumerate().map(at).fold(0.0, f64::max)
}

/// Partial results of this rank's node, and of all nodes, for one rank and one round.
struct Reducer {
    view: View,
    element: usize,
    /// Bytes of an element of a partial result.
    wide: usize,
    /// The partial results of all nodes.
    units: Vec<Unit>,
    /// How many of them each node has.
    made: Vec<usize>,
    join: Join,
    /// Memory for what is joined in several passes.
    passes: Vec<Span>,
}

impl Reducer {
    fn new(b: &Build) -> Self {
        let (view, dtype) = (View::of(&b.group), b.call.dtype);
        let (units, join) = units(&view.nodes, dtype);
        let mut made = vec![0; view.nodes.count()];
        units.iter().for_each(|unit| made[unit.node] += 1);
        let (element, wide) = (dtype.size(), accumulator(dtype).size());
        Reducer { view, element, wide, units, made, join, passes: Vec::new() }
    }

    /// Bytes of a node's partial results of contributions of `bytes` bytes.
    fn partial_bytes(&self, node: usize, bytes: usize) -> usize {
        self.made[node] * bytes / self.element * self.wide
    }

    /// Reduces contributions of `bytes` bytes of this rank's node to its partial results at `to`.
    fn first(&self, b: &mut Build, to: Span, bytes: usize, contribution: impl Fn(usize) -> Operand) {
        let (mine, count) = (self.view.node(), bytes / self.element);
        for unit in self.units.iter().filter(|unit| unit.node == mine) {
            let operands = unit.ranks.iter().map(|&rank| contribution(rank)).collect();
            let bytes = count * self.wide;
            b.join(Stage::First, operands, to.slice(unit.number * bytes, bytes), count);
        }
    }

    /// Joins all nodes' partial results, which lie at `from`, to the result at `out`.
    fn last(&mut self, b: &mut Build, from: &[Span], out: Span, count: usize) {
        let bytes = count * self.wide;
        let at = |unit: &Unit| Operand::Own(Space::Scratch, from[unit.node].offset + unit.number * bytes);
        let units: Vec<Operand> = self.units.iter().map(at).collect();
        let Join::Of(parts) = self.join.clone() else { unreachable!("there are several nodes") };
        let mut used = 0;
        let operands = parts.iter().map(|part| self.middle(b, part, &units, count, &mut used)).collect();
        b.join(Stage::Last, operands, out, count);
    }

    fn middle(
        &mut self,
        b: &mut Build,
        join: &Join,
        units: &[Operand],
        count: usize,
        used: &mut usize,
    ) -> Operand {
        let parts = match join {
            Join::Given(unit) => return units[*unit],
            Join::Of(parts) => parts,
        };
        let operands = parts.iter().map(|part| self.middle(b, part, units, count, used)).collect();
        if self.passes.len() == *used {
            // Rounds get no longer, so the first one's memory serves all.
            self.passes.push(b.scratch(count * self.wide));
        }
        let to = self.passes[*used].slice(0, count * self.wide);
        *used += 1;
        b.join(Stage::Middle, operands, to, count);
        Operand::Own(Space::Scratch, to.offset)
    }
}

/// Part r of the reduction ends on rank r, at `out`; `parts` are byte ranges of the input, the first the longest.
pub(in crate::schedule) fn reduce_scatter(b: &mut Build, parts: &[Range<usize>], out: Span) {
    let mut scatter = Scatter::new(b, parts, out);
    let rounds = scatter.passing.rounds;
    scatter.inside(b, 0);
    for k in 0..=rounds {
        if k + 1 < rounds {
            scatter.inside(b, k + 1);
        }
        if k < rounds {
            b.wait(2 * k);
            scatter.first(b, k);
            scatter.pass(b, k);
        }
        if k > 0 {
            b.wait(2 * (k - 1) + 1);
            scatter.last(b, k - 1);
        }
    }
}

/// A reduction of which each rank gets its part, in rounds of which two are under way at once. The messages of round `k` are
/// of group 2 k inside nodes and 2 k + 1 between them.
struct Scatter<'a> {
    reducer: Reducer,
    passing: Passing<'a>,
    /// Where this rank's part goes.
    out: Span,
    /// The ranks that this one deals with.
    served: Vec<usize>,
    /// The other ranks of its node, and those that they deal with.
    mates: Vec<(usize, Vec<usize>)>,
    /// Of two rounds each. Contributions of mates, by rank served and place of the mate: memory for them, and where they are.
    windows: [Vec<Option<Span>>; 2],
    arrived: [Vec<Span>; 2],
    /// Partial results of this node, by rank served.
    partial: [Vec<Span>; 2],
    /// Those of other nodes for this rank, and where those of all nodes are.
    incoming: [Vec<Option<Span>>; 2],
    from: [Vec<Span>; 2],
}

impl<'a> Scatter<'a> {
    fn new(b: &mut Build, parts: &'a [Range<usize>], out: Span) -> Self {
        let reducer = Reducer::new(b);
        let view = &reducer.view;
        let (mine, count) = (view.node(), view.nodes.count());
        let passing = Passing::new(b, parts, Span::send, count * view.nodes.largest());
        let served = view.served_by(view.rank);
        let mates = view.mates().map(|mate| (mate, view.served_by(mate))).collect();
        let by_mate = served.len() * view.nodes.with(view.rank).len();
        let longest = passing.longest();
        let mut room = |node: usize| b.scratch(reducer.partial_bytes(node, longest));
        let partial = std::array::from_fn(|_| served.iter().map(|_| room(mine)).collect());
        let incoming =
            std::array::from_fn(|_| (0..count).map(|node| (node != mine).then(|| room(node))).collect());
        let nowhere = |count: usize| std::array::from_fn(|_| vec![Span::scratch(0, 0); count]);
        Scatter {
            out,
            windows: std::array::from_fn(|_| vec![None; by_mate]),
            arrived: nowhere(by_mate),
            partial,
            incoming,
            from: nowhere(count),
            served,
            mates,
            passing,
            reducer,
        }
    }

    /// Where what `of` gives to the `served`-th of the ranks that this one deals with has its place.
    fn at(&self, served: usize, of: usize) -> usize {
        let view = &self.reducer.view;
        served * view.nodes.with(view.rank).len() + view.place(of)
    }

    /// Exchanges contributions with the mates.
    fn inside(&mut self, b: &mut Build, k: usize) {
        // What is copied is so before anything is posted, which begins with what is sent.
        let parcel = |(_, theirs): &(usize, Vec<usize>)| self.passing.parcel(b, theirs, k);
        let parcels: Vec<Vec<Span>> = self.mates.iter().map(parcel).collect();
        let (mine, packed) = self.passing.pieces(b, &self.served, k);
        for mate in 0..self.mates.len() {
            let from = self.mates[mate].0;
            let mut whole = packed.then(|| {
                let bytes = mine.iter().map(|piece| piece.bytes).sum();
                (b.recv_scratch(from, bytes, 2 * k, &mut None), 0)
            });
            for (i, &Span { bytes, .. }) in mine.iter().enumerate() {
                let place = self.at(i, from);
                self.arrived[k % 2][place] = match &mut whole {
                    Some((whole, at)) => {
                        *at += bytes;
                        whole.slice(*at - bytes, bytes)
                    }
                    None => {
                        let longest = self.passing.longest();
                        let window = self.windows[k % 2][place].get_or_insert_with(|| b.scratch(longest));
                        b.recv_scratch(from, bytes, 2 * k, &mut Some(*window))
                    }
                };
            }
        }
        for (&(to, _), parcel) in self.mates.iter().zip(parcels) {
            parcel.into_iter().for_each(|piece| b.send(to, piece, 2 * k));
        }
    }

    /// Makes this node's partial results.
    fn first(&self, b: &mut Build, k: usize) {
        for (i, &r) in self.served.iter().enumerate() {
            let range = self.passing.range(r, k);
            let contribution = |of: usize| match of {
                of if of == self.reducer.view.rank => Operand::Own(Space::Send, range.start),
                of => Operand::Own(Space::Scratch, self.arrived[k % 2][self.at(i, of)].offset),
            };
            self.reducer.first(b, self.partial[k % 2][i], range.len(), contribution);
        }
    }

    /// Exchanges partial results with other nodes.
    fn pass(&mut self, b: &mut Build, k: usize) {
        let (reducer, partial, from) = (&self.reducer, &self.partial[k % 2], &mut self.from[k % 2]);
        let (view, bytes) = (&reducer.view, |rank| self.passing.range(rank, k).len());
        for node in view.others() {
            let bytes = reducer.partial_bytes(node, bytes(view.rank));
            let window = &mut self.incoming[k % 2][node];
            from[node] = b.recv_scratch(view.partner(node, view.rank), bytes, 2 * k + 1, window);
        }
        for (&r, &partial) in self.served.iter().zip(partial) {
            let bytes = reducer.partial_bytes(view.node(), bytes(r));
            match r == view.rank {
                true => from[view.node()] = partial,
                false => b.send(r, partial.slice(0, bytes), 2 * k + 1),
            }
        }
    }

    /// Joins all partial results for this rank.
    fn last(&mut self, b: &mut Build, k: usize) {
        let rank = self.reducer.view.rank;
        let range = self.passing.range(rank, k);
        let elements = |bytes: usize| bytes / self.reducer.element;
        let (at, count) = (elements(range.start - self.passing.parts[rank].start), elements(range.len()));
        let size = b.out_size();
        self.reducer.last(b, &self.from[k % 2], self.out.slice(at * size, count * size), count);
    }
}

/// The reduction ends on `targets`, in two steps: ranks make their node's partial results for those that they deal with,
/// and send them there.
pub(in crate::schedule) fn exchange(b: &mut Build, targets: &[usize]) {
    let mut reducer = Reducer::new(b);
    let view = &reducer.view.clone();
    let (rank, bytes) = (view.rank, b.call.bytes());
    let served = |by: usize| {
        let node = view.nodes.node(by);
        targets.iter().copied().filter(move |&target| view.partner(node, target) == by)
    };
    let mut arrived = vec![0; view.nodes.world()];
    if served(rank).next().is_some() {
        for from in view.mates() {
            arrived[from] = b.recv_scratch(from, bytes, 0, &mut None).offset;
        }
    }
    for to in view.mates().filter(|&mate| served(mate).next().is_some()) {
        b.send(to, Span::send(0, bytes), 0);
    }
    b.wait(0);
    if served(rank).next().is_none() {
        return;
    }
    let partial = b.scratch(reducer.partial_bytes(view.node(), bytes));
    reducer.first(b, partial, bytes, |of| match of {
        of if of == rank => Operand::Own(Space::Send, 0),
        of => Operand::Own(Space::Scratch, arrived[of]),
    });
    let mut from = vec![partial; view.nodes.count()];
    let is_target = targets.contains(&rank);
    if is_target {
        for node in view.others() {
            let (sender, bytes) = (view.partner(node, rank), reducer.partial_bytes(node, bytes));
            from[node] = b.recv_scratch(sender, bytes, 1, &mut None);
        }
    }
    for to in served(rank).filter(|&target| target != rank) {
        b.send(to, partial, 1);
    }
    b.wait(1);
    if is_target {
        reducer.last(b, &from, Span::recv(0, bytes), b.call.count);
    }
}

impl Build {
    /// A stage of a reduction.
    fn join(&mut self, stage: Stage, operands: Vec<Operand>, out: Span, count: usize) {
        if count == 0 {
            return;
        }
        let (first, inputs) = (self.schedule.operands.len(), operands.len());
        self.schedule.operands.extend(operands);
        self.push(Step::Join { stage, first, inputs, out, count });
    }
}
