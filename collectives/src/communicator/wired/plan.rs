//! What one rank gives its device for one call, as a value: messages that go on at once, sums in canonical order, copies,
//! and what the wire does itself.

use super::wire::Lane;
use crate::schedule::{Call, Kind, Span, part};
use std::ops::Range;

/// Who adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// We, in rank order: the same bits as on every other transport.
    #[default]
    Canonical,
    /// The wire's own algorithms, in whatever order they take.
    Native,
}

/// One thing to give the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Copy {
        from: Span,
        to: Span,
    },
    /// These of the program's messages; contributions arrive in this half of scratch memory, if it is one.
    Exchange(Range<usize>, Option<usize>),
    /// These of the program's inputs, in rank order, as soon as all before has arrived. What is given next goes on beside
    /// the sum, as far as it needs neither its result nor its half of scratch memory.
    Reduce {
        half: usize,
        inputs: Range<usize>,
        elements: usize,
        out: Span,
    },
    /// The whole call.
    Native,
}

/// One side of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub peer: usize,
    pub outgoing: bool,
    pub span: Span,
}

/// A call's work on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub lane: Lane,
    pub steps: Vec<Step>,
    pub messages: Vec<Planned>,
    /// Contributions to sums.
    pub inputs: Vec<Span>,
    /// Bytes of scratch memory.
    pub scratch: usize,
}

/// What is reduced whole by every rank, if it is no longer than this in bytes: one exchange instead of two.
const WHOLE: usize = 64 << 10;
/// Pieces in scratch memory start at multiples of this, so that kernels move 16 bytes at once.
const ALIGNMENT: usize = 256;

/// Where contributions arrive in turn: while one piece is summed, the next is on its way.
pub(super) const HALVES: usize = 2;
/// A sum is made in so many pieces, unless they would be too short to be worth it or too long for scratch memory.
const PIECES: usize = 4;
/// Bytes of a contribution below which a wire no longer reaches its speed.
const SHORT: usize = 256 << 10;

/// The least scratch memory with which `size` ranks can sum.
pub(super) fn least_scratch(size: usize) -> usize {
    HALVES * size * ALIGNMENT
}

impl Program {
    /// Of `call` on `rank` of `size`, with up to `limit` bytes of scratch memory, which is at least
    /// [`least_scratch`].
    pub fn new(call: &Call, rank: usize, size: usize, order: Order, limit: usize) -> Self {
        let lane = match call.kind {
            kind if kind.reduces() => Lane::Reductions,
            Kind::AllToAll => Lane::Reductions,
            _ => Lane::Gathers,
        };
        let program =
            Program { lane, steps: Vec::new(), messages: Vec::new(), inputs: Vec::new(), scratch: 0 };
        let mut planner = Planner { call: *call, rank, size, limit, program };
        if call.count > 0 {
            planner.plan(order);
        }
        planner.program
    }
}

struct Planner {
    call: Call,
    rank: usize,
    size: usize,
    limit: usize,
    program: Program,
}

impl Planner {
    fn plan(&mut self, order: Order) {
        let Call { kind, root, in_place, .. } = self.call;
        let (block, at_root) = (self.call.bytes(), self.rank == root);
        let own = self.rank * block;
        match kind {
            _ if self.size == 1 => self.alone(),
            kind if kind.reduces() && order == Order::Native => self.program.steps.push(Step::Native),
            Kind::AllGather | Kind::Broadcast => self.program.steps.push(Step::Native),
            Kind::ReduceScatter => {
                let starts = (0..self.size).map(|p| p * self.call.count).collect();
                let lengths = vec![self.call.count; self.size];
                self.reduce_parts(starts, lengths, if in_place { own } else { 0 });
            }
            Kind::AllReduce if block <= WHOLE && self.size * block <= self.limit => {
                self.reduce_whole(None);
            }
            Kind::AllReduce => {
                let parts = (0..self.size).map(|p| part(self.call.count, self.size, p));
                let (starts, lengths) = parts.map(|p| (p.start, p.len())).unzip();
                let mine = part(self.call.count, self.size, self.rank).start * self.call.dtype.size();
                self.reduce_parts(starts, lengths, mine);
                let first = self.program.messages.len();
                for peer in self.peers() {
                    let outgoing = self.part_of_result(self.rank);
                    let incoming = self.part_of_result(peer);
                    self.message(peer, true, outgoing);
                    self.message(peer, false, incoming);
                }
                self.exchange(first, None);
            }
            Kind::Reduce => self.reduce_whole(Some(root)),
            Kind::Gather | Kind::Scatter => {
                let (whole, incoming) = match kind {
                    Kind::Gather => (Span::recv as fn(usize, usize) -> Span, true),
                    _ => (Span::send as fn(usize, usize) -> Span, false),
                };
                if at_root {
                    if !in_place && kind == Kind::Gather {
                        self.copy(Span::send(0, block), Span::recv(own, block));
                    } else if !in_place {
                        self.copy(Span::send(own, block), Span::recv(0, block));
                    }
                    for peer in self.peers() {
                        self.message(peer, !incoming, whole(peer * block, block));
                    }
                } else {
                    let span = if incoming { Span::send(0, block) } else { Span::recv(0, block) };
                    self.message(root, incoming, span);
                }
                self.exchange(0, None);
            }
            Kind::AllToAll if !in_place => {
                self.copy(Span::send(own, block), Span::recv(own, block));
                for peer in self.peers() {
                    self.message(peer, true, Span::send(peer * block, block));
                    self.message(peer, false, Span::recv(peer * block, block));
                }
                self.exchange(0, None);
            }
            Kind::AllToAll => self.swap_blocks(),
            Kind::Send => {
                self.message(root, true, Span::send(0, block));
                self.exchange(0, None);
            }
            Kind::Recv => {
                self.message(root, false, Span::recv(0, block));
                self.exchange(0, None);
            }
            Kind::Barrier => {}
        }
    }

    /// The other ranks, each starting with the one after it, so that not all send to the same at first.
    fn peers(&self) -> Vec<usize> {
        (1..self.size).map(|k| (self.rank + k) % self.size).collect()
    }

    fn alone(&mut self) {
        let Call { kind, in_place, wide, .. } = self.call;
        let bytes = self.call.bytes();
        match kind {
            Kind::ReduceScatter if wide => {
                self.program.inputs.push(Span::send(0, bytes));
                let out = Span::recv(0, self.call.count * self.call.out_size());
                self.reduce(0, 0, self.call.count, out);
            }
            Kind::Broadcast | Kind::Send | Kind::Recv | Kind::Barrier => {}
            _ if in_place => {}
            _ => self.copy(Span::send(0, bytes), Span::recv(0, bytes)),
        }
    }

    fn copy(&mut self, from: Span, to: Span) {
        self.program.steps.push(Step::Copy { from, to });
    }

    fn message(&mut self, peer: usize, outgoing: bool, span: Span) {
        if span.bytes > 0 {
            self.program.messages.push(Planned { peer, outgoing, span });
        }
    }

    /// All messages from number `first` on go on at once.
    fn exchange(&mut self, first: usize, half: Option<usize>) {
        let messages = first..self.program.messages.len();
        if !messages.is_empty() {
            self.program.steps.push(Step::Exchange(messages, half));
        }
    }

    fn part_of_result(&self, rank: usize) -> Span {
        let (part, bytes) = (part(self.call.count, self.size, rank), self.call.dtype.size());
        Span::recv(part.start * bytes, part.len() * bytes)
    }

    /// Elements of a piece when `pieces` of them are in scratch memory at once.
    fn piece(&self, pieces: usize, longest: usize) -> usize {
        let at_once = ALIGNMENT / self.call.dtype.size();
        let fits = self.limit / pieces / self.call.dtype.size() / at_once * at_once;
        fits.min(longest.next_multiple_of(at_once)).max(at_once)
    }

    /// Elements of a piece of a sum whose contributions have up to `longest`.
    fn summed_piece(&self, longest: usize) -> usize {
        let worth = longest.div_ceil(PIECES).max(SHORT / self.call.dtype.size());
        self.piece(HALVES * (self.size - 1), longest.min(worth))
    }

    /// Bytes of scratch memory that pieces of so many elements take.
    fn summed_scratch(&self, piece: usize, longest: usize) -> usize {
        let halves = if longest > piece { HALVES } else { 1 };
        halves * (self.size - 1) * piece * self.call.dtype.size()
    }

    /// The sum of the inputs that were added from number `first` on.
    fn reduce(&mut self, half: usize, first: usize, elements: usize, out: Span) {
        let inputs = first..self.program.inputs.len();
        self.program.steps.push(Step::Reduce { half, inputs, elements, out });
    }

    /// The place of a peer among all others.
    fn among_others(&self, peer: usize) -> usize {
        peer - usize::from(peer > self.rank)
    }

    /// One piece of a sum, of up to `piece` elements: each peer is sent what `outgoing` says, and what has come from all is
    /// summed with this rank's `own` contribution to byte `at` of the result. Who has none does not sum.
    fn sum_piece(
        &mut self,
        half: usize,
        piece: usize,
        own: Span,
        outgoing: impl Fn(usize) -> Span,
        at: usize,
    ) {
        let (first, first_input) = (self.program.messages.len(), self.program.inputs.len());
        let slot = |this: &Self, peer: usize| {
            let place = half * (this.size - 1) + this.among_others(peer);
            Span::scratch(place * piece * this.call.dtype.size(), own.bytes)
        };
        for peer in self.peers() {
            self.message(peer, true, outgoing(peer));
            self.message(peer, false, slot(self, peer));
        }
        self.exchange(first, Some(half));
        let elements = own.bytes / self.call.dtype.size();
        if elements == 0 {
            return;
        }
        for rank in 0..self.size {
            let input = if rank == self.rank { own } else { slot(self, rank) };
            self.program.inputs.push(input);
        }
        self.reduce(half, first_input, elements, Span::recv(at, elements * self.call.out_size()));
    }

    /// Each rank sums its part (first element and length by rank), which starts at byte `at` of the result, piece by
    /// piece.
    fn reduce_parts(&mut self, starts: Vec<usize>, lengths: Vec<usize>, at: usize) {
        let (element, result) = (self.call.dtype.size(), self.call.out_size());
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let piece = self.summed_piece(longest);
        for (i, begin) in (0..longest).step_by(piece).enumerate() {
            // A piece of the part of rank p, as bytes of the input.
            let of = |p: usize| {
                let (from, to) = (begin.min(lengths[p]), (begin + piece).min(lengths[p]));
                Span::send((starts[p] + from) * element, (to - from) * element)
            };
            self.sum_piece(i % HALVES, piece, of(self.rank), of, at + begin * result);
        }
        self.program.scratch = self.summed_scratch(piece, longest);
    }

    /// One rank, or every one, gets all contributions and sums them, piece by piece.
    fn reduce_whole(&mut self, root: Option<usize>) {
        let (element, count) = (self.call.dtype.size(), self.call.count);
        let piece = self.summed_piece(count);
        for (i, begin) in (0..count).step_by(piece).enumerate() {
            // What a rank sums, or nothing.
            let of = |p: usize| match root.is_none_or(|root| root == p) {
                true => Span::send(begin * element, piece.min(count - begin) * element),
                false => Span::send(begin * element, 0),
            };
            self.sum_piece(i % HALVES, piece, of(self.rank), of, begin * element);
        }
        let sums = root.is_none_or(|root| root == self.rank);
        self.program.scratch = if sums { self.summed_scratch(piece, count) } else { 0 };
    }

    /// An all_to_all in place: a piece of every block is put aside, and what is put aside is sent.
    fn swap_blocks(&mut self) {
        let element = self.call.dtype.size();
        let piece = self.piece(self.size - 1, self.call.count);
        for begin in (0..self.call.count).step_by(piece) {
            let bytes = piece.min(self.call.count - begin) * element;
            let first = self.program.messages.len();
            for peer in self.peers() {
                let here = Span::recv(peer * self.call.bytes() + begin * element, bytes);
                let aside = Span::scratch(self.among_others(peer) * piece * element, bytes);
                self.copy(here, aside);
                self.message(peer, true, aside);
                self.message(peer, false, here);
            }
            self.exchange(first, None);
        }
        self.program.scratch = (self.size - 1) * piece * element;
    }
}

#[cfg(test)]
mod tests;
