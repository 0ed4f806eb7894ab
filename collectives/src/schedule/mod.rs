//! What one rank does in one collective, as a value: a list of steps over named memory.
//!
//! A schedule knows no addresses and no transport, so it can be printed, cached, replayed and simulated. The
//! engine executes it step by step without blocking. There are two families: steps that exchange messages
//! (`Send`, `Recv`, `Wait`) work on every transport; steps that read peers' memory (`Publish`, `Await`, `Read`,
//! `Finish`, `Released`) need one that offers [`Direct`](crate::transport::Direct). Every algorithm of a
//! collective gives the same bits.

mod algorithm;
mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod bruck;
mod cache;
mod call;
mod canonical;
mod contributions;
mod exposure;
mod gather;
mod hierarchical;
mod messages;
mod parcels;
mod print;
mod reduce;
mod reduce_scatter;
mod scatter;
mod send_recv;
#[cfg(test)]
mod simulation;
mod step;
mod table;
mod tuner;

use crate::reduce::Kernel;
use crate::transport::{Nodes, Tells};
use crate::watch::Fingerprint;
pub use algorithm::Algorithm;
pub(crate) use cache::Cache;
pub use call::{Call, Kind, part};
use messages::Messages;
use std::ops::Range;
use std::sync::Arc;
pub use step::{Operand, Peers, Remote, Space, Span, Step};
pub use table::TuningTable;
pub(crate) use tuner::choose;
pub use tuner::{Choice, Rule, Sizes, Tuning, Why};

/// Bytes of scratch that every call has, without asking for memory, if its peers need not reach it.
pub(crate) const KEPT: usize = 4096;

/// What one rank does in one call.
#[derive(Clone)]
pub struct Schedule {
    /// The call.
    pub call: Call,
    /// How it is done, and why so.
    pub choice: Choice,
    /// What it was made for.
    pub group: Group,
    /// In order.
    pub steps: Vec<Step>,
    /// The operands that reductions refer to.
    pub operands: Vec<Operand>,
    /// Bytes of scratch.
    pub scratch: usize,
    /// Whether peers read from the scratch.
    pub scratch_published: bool,
    /// Rounds in which memory is published: the same number on every rank.
    pub rounds: usize,
    /// The most messages that are posted and not yet waited for.
    pub(crate) posted: usize,
    /// Payload in bytes that this rank sends; see [`Call::volume`].
    pub volume: usize,
    /// What peers compare.
    pub fingerprint: Fingerprint,
    pub(crate) kernel: Option<Kernel>,
}

/// What a schedule needs to know about the group and this rank's place in it; all but `rank` is the same on
/// every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub size: usize,
    /// Whether peers' memory can be read, and then up to how many bytes publishing copies.
    pub direct: Option<usize>,
    /// Which ranks share a node, where that makes a difference.
    pub nodes: Option<Arc<Nodes>>,
    /// Which messages that carry all of a call between two ranks need no fingerprint.
    pub tells: Tells,
    /// Whether messages are copies within one host's memory.
    pub one_memory: bool,
    /// Sizes at which algorithms change.
    pub tuning: Tuning,
}

impl Group {
    /// Joined by messages of which nothing is known.
    pub(crate) fn plain(rank: usize, size: usize) -> Group {
        let (tells, tuning) = (Tells::Nothing, Tuning::default());
        Group { rank, size, direct: None, nodes: None, tells, one_memory: false, tuning }
    }
}

/// What a schedule needs to know about this rank's buffers only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Peers can read the input where it is.
    pub send_registered: bool,
    /// Peers can read the output where it is.
    pub recv_registered: bool,
}

impl Schedule {
    /// The schedule of this rank for `call`, by the tuner's choice or by `forced`.
    pub fn new(call: Call, group: &Group, local: Local, forced: Option<Algorithm>) -> Schedule {
        let choice = choose(&call, group, forced);
        let mut build = Build {
            call,
            group: group.clone(),
            local,
            messages: Messages::new(group.size),
            schedule: Schedule::empty(call, group, choice),
        };
        match call.kind {
            Kind::ReduceScatter => reduce_scatter::build(&mut build),
            Kind::AllGather => all_gather::build(&mut build),
            Kind::AllReduce => all_reduce::build(&mut build),
            Kind::Broadcast => broadcast::build(&mut build),
            Kind::Reduce => reduce::build(&mut build),
            Kind::Gather => gather::build(&mut build),
            Kind::Scatter => scatter::build(&mut build),
            Kind::AllToAll => all_to_all::build(&mut build),
            Kind::Barrier => barrier::build(&mut build),
            Kind::Send => send_recv::build_send(&mut build),
            Kind::Recv => send_recv::build_recv(&mut build),
        }
        messages::send_first(&mut build.schedule.steps);
        build.schedule.posted = messages::most_posted(&build.schedule.steps);
        build.schedule
    }

    /// Bytes that this rank itself writes to the result in one go.
    pub(crate) fn piece(&self) -> usize {
        let Schedule { call, group, .. } = self;
        if call.kind == Kind::AllReduce { call.bytes() / group.size } else { call.bytes() }
    }

    /// Bytes of inputs and results that `here` of the group's ranks read and write, the root among them.
    pub(crate) fn touched(&self, here: usize) -> usize {
        let (bytes, size) = (self.call.bytes(), self.group.size);
        match self.call.kind {
            Kind::ReduceScatter | Kind::AllGather => bytes * here * (size + 1),
            Kind::AllReduce => 2 * bytes * here,
            Kind::AllToAll => 2 * bytes * here * size,
            Kind::Broadcast | Kind::Reduce => bytes * (here + 1),
            Kind::Gather | Kind::Scatter => 2 * bytes * size,
            Kind::Barrier | Kind::Send | Kind::Recv => bytes,
        }
    }

    fn empty(call: Call, group: &Group, choice: Choice) -> Schedule {
        let kernel =
            call.kind.reduces().then(|| crate::reduce::kernel(call.dtype, call.op, call.wide, group.size));
        Schedule {
            call,
            group: group.clone(),
            choice,
            steps: Vec::new(),
            operands: Vec::new(),
            scratch: 0,
            scratch_published: false,
            rounds: 0,
            posted: 0,
            volume: call.volume(group.rank, group.size),
            fingerprint: Fingerprint::of(&call),
            kernel,
        }
    }
}

/// A schedule in the making.
struct Build {
    call: Call,
    group: Group,
    local: Local,
    messages: Messages,
    schedule: Schedule,
}

impl Build {
    fn push(&mut self, step: Step) {
        self.schedule.steps.push(step);
    }

    /// The index of the next step.
    fn here(&self) -> usize {
        self.schedule.steps.len()
    }

    fn algorithm(&self) -> Algorithm {
        self.schedule.choice.algorithm
    }

    /// Ranks other than this one, starting with the next, so that not all talk to rank 0 first.
    fn others(&self) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let (rank, size) = (self.group.rank, self.group.size);
        (1..size).map(move |i| (rank + i) % size)
    }

    fn copy(&mut self, from: Span, to: Span) {
        let same = from.offset == to.offset && (self.call.in_place || from.space == to.space);
        if from.bytes > 0 && !(same && from.space != Space::Scratch && to.space != Space::Scratch) {
            self.push(Step::Copy { from, to });
        }
    }

    /// A reduction of one operand per rank.
    fn reduce(&mut self, operand: impl Fn(usize) -> Operand, out: Span, count: usize) {
        if count == 0 {
            return;
        }
        let first = self.schedule.operands.len();
        self.schedule.operands.extend((0..self.group.size).map(operand));
        self.push(Step::Reduce { first, inputs: self.group.size, out, count });
    }

    /// Scratch at a cache line.
    fn scratch(&mut self, bytes: usize) -> Span {
        let offset = self.schedule.scratch.next_multiple_of(64);
        self.schedule.scratch = offset + bytes;
        Span::scratch(offset, bytes)
    }

    /// Bytes of each rank's block, where the call's count is that of one.
    fn blocks(&self) -> Vec<Range<usize>> {
        let block = self.call.bytes();
        (0..self.group.size).map(|r| r * block..(r + 1) * block).collect()
    }

    /// Bytes of each rank's part, where the call's count is that of all.
    fn parts(&self) -> Vec<Range<usize>> {
        let (size, element) = (self.group.size, self.call.dtype.size());
        let elements = (0..size).map(|r| part(self.call.count, size, r));
        elements.map(|part| part.start * element..part.end * element).collect()
    }

    /// Bytes of one element of the reduced result.
    fn out_size(&self) -> usize {
        self.call.out_size()
    }
}

/// What round `k` has of a part, with so many bytes a round.
fn piece(part: &Range<usize>, k: usize, per_round: usize) -> Range<usize> {
    let at = |k: usize| (part.start + k * per_round).min(part.end);
    at(k)..at(k + 1)
}
