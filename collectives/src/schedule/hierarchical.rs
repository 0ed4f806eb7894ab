//! Collectives that treat nodes as units, so that as little as possible crosses the network between them.
//!
//! Ranks come in blocks of consecutive ones that share a node. Every rank r has a partner in each other block: the one
//! with its place in the block (or, in a shorter block, that place modulo the block's ranks). What goes to r from a
//! block goes through r's partner there, and what comes from r to a block comes to r's partner there: so the ranks of
//! a node share the work and the network, and a block sends to r once what each of its ranks would.
//!
//! Sums keep the canonical order: a block reduces only what is a subtree of the tree over all ranks (see
//! [`canonical`](super::canonical)) and sends partial results unrounded, which r joins as the tree does. A block of
//! a power of two of ranks has one partial result, others have a few. For 16-bit types they are twice as long as
//! contributions. Where nodes are so small that this saves little, the tuner reduces without them ([`pays`]).

use super::canonical::{Join, join, subtrees};
use super::messages::Messages;
use super::{Build, Group, Operand, Space, Span, Step};
use crate::element::DType;
use crate::reduce::{Stage, accumulator};
use std::ops::Range;

/// Ranks in blocks.
#[derive(Clone, Copy)]
struct Blocks {
    rank: usize,
    size: usize,
    block: usize,
}

impl Blocks {
    fn of(group: &Group) -> Self {
        let block = group.block.expect("only groups with blocks get these algorithms");
        Blocks { rank: group.rank, size: group.size, block }
    }

    fn count(self) -> usize {
        self.size.div_ceil(self.block)
    }

    fn all(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count()).map(move |i| self.number(i))
    }

    fn number(self, i: usize) -> Range<usize> {
        i * self.block..((i + 1) * self.block).min(self.size)
    }

    fn of_rank(self, rank: usize) -> Range<usize> {
        self.number(rank / self.block)
    }

    /// The other ranks of this rank's block, starting with the next, so that not all talk to the first at once.
    fn mates(self) -> impl Iterator<Item = usize> + Clone {
        let Range { start, end } = self.of_rank(self.rank);
        let (len, me) = (end - start, self.rank - start);
        (1..len).map(move |i| start + (me + i) % len)
    }

    /// The other blocks, starting with the next.
    fn others(self) -> impl Iterator<Item = Range<usize>> + Clone {
        let (count, mine) = (self.count(), self.rank / self.block);
        (1..count).map(move |i| self.number((mine + i) % count))
    }

    /// The rank of `block` that deals with `rank`.
    fn partner(self, block: &Range<usize>, rank: usize) -> usize {
        block.start + rank % self.block % block.len()
    }

    /// The ranks that `rank` deals with on behalf of its block: itself and others in other blocks.
    fn served_by(self, rank: usize) -> Vec<usize> {
        let block = self.of_rank(rank);
        (0..self.size)
            .filter(|&r| self.partner(&block, r) == rank && (r == rank || !block.contains(&r)))
            .collect()
    }
}

/// Whether reductions send less than half as much between nodes this way as if every rank sent to every other: below
/// that, passing contributions on inside the node costs more than it saves.
pub(super) fn pays(group: &Group, dtype: DType) -> bool {
    let blocks = Blocks::of(group);
    let parts = blocks.all().map(|block| subtrees(group.size, &block).len()).max().unwrap_or(1);
    2 * parts * accumulator(dtype).size() < blocks.block * dtype.size()
}

/// Bytes per round and rounds for pieces of at most `largest` bytes, `pieces` of them at once.
fn cut(b: &Build, blocks: Blocks, pieces: usize, largest: usize) -> (usize, usize) {
    // A message per block, rank and round goes to a mate, and 2^16 of a call have names.
    let least = ((largest * blocks.count()) >> 14).next_multiple_of(64);
    let per_round = b.group.tuning.cut(pieces, largest, b.group.tuning.round).0.max(least);
    (per_round, largest.div_ceil(per_round).max(1))
}

/// Bytes `k * per_round..` of a range.
fn piece(part: &Range<usize>, k: usize, per_round: usize) -> Range<usize> {
    let at = |k: usize| (part.start + k * per_round).min(part.end);
    at(k)..at(k + 1)
}

/// Partial results of this rank's block, and of all blocks, for one rank and one round.
struct Reducer {
    blocks: Blocks,
    element: usize,
    /// Bytes of an element of a partial result.
    wide: usize,
    /// The subtrees of each block.
    trees: Vec<Vec<Range<usize>>>,
    join: Join,
    /// Memory for what is joined in several passes.
    passes: Vec<Span>,
}

impl Reducer {
    fn new(b: &Build) -> Self {
        let blocks = Blocks::of(&b.group);
        let trees: Vec<_> = blocks.all().map(|block| subtrees(blocks.size, &block)).collect();
        let join = join(blocks.size, &trees.concat());
        let dtype = b.call.dtype;
        let wide = accumulator(dtype).size();
        Reducer { blocks, element: dtype.size(), wide, trees, join, passes: Vec::new() }
    }

    fn own_trees(&self) -> &[Range<usize>] {
        &self.trees[self.blocks.rank / self.blocks.block]
    }

    /// Bytes of a block's partial results of contributions of `bytes` bytes.
    fn partial_bytes(&self, block: usize, bytes: usize) -> usize {
        self.trees[block].len() * bytes / self.element * self.wide
    }

    /// Reduces contributions of `bytes` bytes of this rank's block to its partial results at `to`.
    fn first(&self, b: &mut Build, to: Span, bytes: usize, contribution: impl Fn(usize) -> Operand) {
        let count = bytes / self.element;
        for (i, tree) in self.own_trees().iter().enumerate() {
            let operands = tree.clone().map(&contribution).collect();
            let bytes = count * self.wide;
            b.join(Stage::First, operands, to.slice(i * bytes, bytes), count);
        }
    }

    /// Joins all blocks' partial results, which lie at `from`, to the result at `out`.
    fn last(&mut self, b: &mut Build, from: &[Span], out: Span, count: usize) {
        let bytes = count * self.wide;
        let at = |(block, trees): (usize, &Vec<Range<usize>>)| {
            let start = from[block].offset;
            (0..trees.len()).map(move |i| Operand::Own(Space::Scratch, start + i * bytes)).collect::<Vec<_>>()
        };
        let units: Vec<Operand> = self.trees.iter().enumerate().flat_map(at).collect();
        let Join::Of(parts) = self.join.clone() else { unreachable!("there are several blocks") };
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
pub(super) fn reduce_scatter(b: &mut Build, m: &mut Messages, parts: &[Range<usize>], out: Span) {
    let mut reducer = Reducer::new(b);
    let blocks = reducer.blocks;
    let rank = blocks.rank;
    let served = blocks.served_by(rank);
    let mates: Vec<usize> = blocks.mates().collect();
    let theirs: Vec<Vec<usize>> = mates.iter().map(|&mate| blocks.served_by(mate)).collect();
    let (per_round, rounds) = cut(b, blocks, blocks.count() * blocks.block, parts[0].len());
    let longest = per_round.min(parts[0].len());
    // Of two rounds each: contributions by rank served and mate, partial results by rank served, those of other blocks.
    let mut windows =
        [const { Vec::<Option<Span>>::new() }; 2].map(|_| vec![None; served.len() * blocks.size]);
    let mut arrived = [vec![Span::scratch(0, 0); served.len() * blocks.size], Vec::new()];
    arrived[1] = arrived[0].clone();
    let mine = rank / blocks.block;
    let room = |b: &mut Build, block: usize| b.scratch(reducer.partial_bytes(block, longest));
    let partial: [Vec<Span>; 2] = std::array::from_fn(|_| served.iter().map(|_| room(b, mine)).collect());
    let mut incoming: [Vec<Option<Span>>; 2] = std::array::from_fn(|_| vec![None; blocks.count()]);
    for spans in &mut incoming {
        for block in (0..blocks.count()).filter(|&block| block != mine) {
            spans[block] = Some(room(b, block));
        }
    }
    let inside =
        |b: &mut Build, m: &mut Messages, windows: &mut [Option<Span>], arrived: &mut [Span], k: usize| {
            for (i, &r) in served.iter().enumerate() {
                let bytes = piece(&parts[r], k, per_round).len();
                for &from in &mates {
                    let window = &mut windows[i * blocks.size + from];
                    if window.is_none() {
                        *window = Some(b.scratch(longest));
                    }
                    arrived[i * blocks.size + from] = b.recv_scratch(m, from, bytes, 2 * k, window);
                }
            }
            for (&to, theirs) in mates.iter().zip(&theirs) {
                for &r in theirs {
                    let range = piece(&parts[r], k, per_round);
                    b.send(m, to, Span::send(range.start, range.len()), 2 * k);
                }
            }
        };
    inside(b, m, &mut windows[0], &mut arrived[0], 0);
    let mut from = [vec![Span::scratch(0, 0); blocks.count()], vec![Span::scratch(0, 0); blocks.count()]];
    for k in 0..=rounds {
        if k + 1 < rounds {
            let next = (k + 1) % 2;
            inside(b, m, &mut windows[next], &mut arrived[next], k + 1);
        }
        if k < rounds {
            b.wait(m, 2 * k);
            for (i, &r) in served.iter().enumerate() {
                let range = piece(&parts[r], k, per_round);
                let contribution = |of: usize| match of {
                    of if of == rank => Operand::Own(Space::Send, range.start),
                    of => Operand::Own(Space::Scratch, arrived[k % 2][i * blocks.size + of].offset),
                };
                reducer.first(b, partial[k % 2][i], range.len(), contribution);
            }
            let bytes = piece(&parts[rank], k, per_round).len();
            for block in blocks.others() {
                let (number, sender) = (block.start / blocks.block, blocks.partner(&block, rank));
                let bytes = reducer.partial_bytes(number, bytes);
                from[k % 2][number] =
                    b.recv_scratch(m, sender, bytes, 2 * k + 1, &mut incoming[k % 2][number]);
            }
            for (i, &r) in served.iter().enumerate() {
                let bytes = reducer.partial_bytes(mine, piece(&parts[r], k, per_round).len());
                match r == rank {
                    true => from[k % 2][mine] = partial[k % 2][i],
                    false => b.send(m, r, partial[k % 2][i].slice(0, bytes), 2 * k + 1),
                }
            }
        }
        if k > 0 {
            let k = k - 1;
            b.wait(m, 2 * k + 1);
            let range = piece(&parts[rank], k, per_round);
            let elements = |bytes: usize| bytes / reducer.element;
            let (at, count) = (elements(range.start - parts[rank].start), elements(range.len()));
            let size = b.out_size();
            reducer.last(b, &from[k % 2], out.slice(at * size, count * size), count);
        }
    }
}

/// Everybody's part ends on every rank; part r is `own` on rank r. Messages are of groups from `group` on.
pub(super) fn all_gather(
    b: &mut Build,
    m: &mut Messages,
    own: Span,
    parts: &[Range<usize>],
    group: usize,
    meanwhile: impl FnOnce(&mut Build),
) {
    let blocks = Blocks::of(&b.group);
    let rank = blocks.rank;
    let mates: Vec<usize> = blocks.mates().collect();
    let elsewhere =
        |of: usize| blocks.served_by(of).into_iter().filter(move |&r| r != of).collect::<Vec<_>>();
    let served = elsewhere(rank);
    let (per_round, rounds) = cut(b, blocks, 2, parts[0].len());
    let end = group + rounds;
    let place = |r: usize, k: usize| {
        let range = piece(&parts[r], k, per_round);
        Span::recv(range.start, range.len())
    };
    for k in 0..rounds {
        for &from in &served {
            b.recv(m, from, place(from, k), group + k);
        }
    }
    for &from in &mates {
        b.recv(m, from, Span::recv(parts[from].start, parts[from].len()), end);
        let passed_on = elsewhere(from);
        for k in 0..rounds {
            for &r in &passed_on {
                b.recv(m, from, place(r, k), end);
            }
        }
    }
    for k in 0..rounds {
        let range = piece(&(0..own.bytes), k, per_round);
        for block in blocks.others() {
            b.send(m, blocks.partner(&block, rank), own.slice(range.start, range.len()), end);
        }
    }
    for &to in &mates {
        b.send(m, to, own, end);
    }
    meanwhile(b);
    for k in 0..rounds {
        b.wait(m, group + k);
        for &to in &mates {
            for &r in &served {
                b.send(m, to, place(r, k), end);
            }
        }
    }
    b.wait(m, end);
}

/// An `all_reduce` in two steps: each block's ranks all make its partial results, then partners exchange them.
pub(super) fn exchange(b: &mut Build) {
    let mut reducer = Reducer::new(b);
    let blocks = reducer.blocks;
    let (rank, bytes) = (blocks.rank, b.call.bytes());
    let mut m = Messages::new(blocks.size);
    let mut arrived = vec![0; blocks.size];
    for from in blocks.mates() {
        arrived[from] = b.recv_scratch(&mut m, from, bytes, 0, &mut None).offset;
    }
    for to in blocks.mates() {
        b.send(&mut m, to, Span::send(0, bytes), 0);
    }
    b.wait(&mut m, 0);
    let mine = rank / blocks.block;
    let partial = b.scratch(reducer.partial_bytes(mine, bytes));
    reducer.first(b, partial, bytes, |of| match of {
        of if of == rank => Operand::Own(Space::Send, 0),
        of => Operand::Own(Space::Scratch, arrived[of]),
    });
    let mut from = vec![partial; blocks.count()];
    for block in blocks.others() {
        let (number, sender) = (block.start / blocks.block, blocks.partner(&block, rank));
        from[number] = b.recv_scratch(&mut m, sender, reducer.partial_bytes(number, bytes), 1, &mut None);
    }
    for to in blocks.served_by(rank).into_iter().filter(|&r| r != rank) {
        b.send(&mut m, to, partial, 1);
    }
    b.wait(&mut m, 1);
    reducer.last(b, &from, Span::recv(0, bytes), b.call.count);
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
