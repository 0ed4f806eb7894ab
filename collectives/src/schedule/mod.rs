//! What one rank does in one collective, as a value: a list of steps over named memory.
//!
//! A schedule knows no addresses and no transport, so it can be printed, cached, replayed and simulated. The
//! engine executes it step by step without blocking. There are two families: steps that exchange messages
//! (`Send`, `Recv`, `Wait`) work on every transport; steps that read peers' memory (`Publish`, `Await`, `Read`,
//! `Finish`, `Released`) need one that offers [`Direct`](crate::transport::Direct). Every algorithm of a
//! collective gives the same bits.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod cache;
mod canonical;
mod exposure;
mod gather;
mod hierarchical;
mod messages;
mod reduce;
mod reduce_scatter;
mod scatter;
mod send_recv;
mod table;
pub mod tuner;

use crate::element::{DType, ReduceOp};
use crate::reduce::{Kernel, Stage};
use crate::watch::Fingerprint;
pub(crate) use cache::Cache;
use std::fmt;
pub use table::TuningTable;
pub use tuner::{Algorithm, Choice, Rule, Tuning};

/// The collectives, and the two sides of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Shard r of the reduction ends on rank r.
    ReduceScatter,
    /// Every rank's shard ends on every rank.
    AllGather,
    /// The reduction ends on every rank.
    AllReduce,
    /// The root's data ends on every rank.
    Broadcast,
    /// The reduction ends on the root.
    Reduce,
    /// Every rank's block ends on the root.
    Gather,
    /// Block r of the root ends on rank r.
    Scatter,
    /// Block r of every rank ends on rank r.
    AllToAll,
    /// Nobody leaves before all have entered.
    Barrier,
    /// One side of a message.
    Send,
    /// The other side of a message.
    Recv,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 11] = [
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::AllReduce,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::Gather,
        Kind::Scatter,
        Kind::AllToAll,
        Kind::Barrier,
        Kind::Send,
        Kind::Recv,
    ];

    /// The name of the call.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::AllReduce => "all_reduce",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Barrier => "barrier",
            Kind::Send => "send",
            Kind::Recv => "recv",
        }
    }

    /// Whether contributions are combined.
    pub const fn reduces(self) -> bool {
        matches!(self, Kind::ReduceScatter | Kind::AllReduce | Kind::Reduce)
    }

    /// Whether one rank is special.
    pub const fn rooted(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A call's arguments, without addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Which collective.
    pub kind: Kind,
    /// Of which elements.
    pub dtype: DType,
    /// Combined how; `Sum` where nothing is combined.
    pub op: ReduceOp,
    /// Elements: of one shard in `ReduceScatter` and `AllGather`, of one block in `Gather`, `Scatter` and
    /// `AllToAll`, of the whole otherwise.
    pub count: usize,
    /// The root, or the peer of a message; else 0.
    pub root: usize,
    /// Whether the result replaces the input in one buffer.
    pub in_place: bool,
    /// Whether a reduced result stays in the accumulator's type.
    pub wide: bool,
}

impl Call {
    /// A call of `count` elements, out of place, without a root.
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Self {
        Call { kind, dtype, op: ReduceOp::Sum, count, root: 0, in_place: false, wide: false }
    }

    /// Bytes of `count` elements.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The payload in bytes that this rank contributes to the network in an algorithm of least volume: it depends
    /// on neither the transport nor the schedule, so a plan can predict it.
    ///
    /// With S the bytes of `count` elements and n ranks: `reduce_scatter`, `all_gather` and `all_to_all`
    /// (n-1) S; `all_reduce` what is not this rank's part, plus n-1 times this rank's part (together 2(n-1)/n S);
    /// `broadcast` S from the root; `reduce` and `gather` S from all but the root; `scatter` (n-1) S from the
    /// root; `send` S; `recv` and `barrier` nothing.
    pub fn volume(&self, rank: usize, size: usize) -> usize {
        let bytes = self.bytes();
        let at_root = rank == self.root;
        match self.kind {
            Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll => (size - 1) * bytes,
            Kind::AllReduce => {
                let own = part(self.count, size, rank).len() * self.dtype.size();
                bytes - own + (size - 1) * own
            }
            Kind::Broadcast if at_root && size > 1 => bytes,
            Kind::Scatter if at_root => (size - 1) * bytes,
            Kind::Reduce | Kind::Gather if !at_root => bytes,
            Kind::Send => bytes,
            _ => 0,
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if self.kind != Kind::Barrier {
            write!(f, " of {} {}", self.count, self.dtype)?;
        }
        if self.kind.reduces() {
            write!(f, ", {}", self.op)?;
        }
        match self.kind {
            Kind::Send => write!(f, " to rank {}", self.root),
            Kind::Recv => write!(f, " from rank {}", self.root),
            kind if kind.rooted() => write!(f, ", root {}", self.root),
            _ => Ok(()),
        }
    }
}

/// Bytes of scratch that every call has, without asking for memory, if its peers need not reach it.
pub(crate) const KEPT: usize = 4096;

/// Part `rank` of `count` elements cut into `size` parts that differ by at most one element.
pub fn part(count: usize, size: usize, rank: usize) -> std::ops::Range<usize> {
    let (base, extra) = (count / size, count % size);
    let start = rank * base + rank.min(extra);
    start..start + base + usize::from(rank < extra)
}

/// The memory that a step touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The caller's input.
    Send,
    /// The caller's output; the same memory as the input when the call is in place.
    Recv,
    /// The engine's own memory for this call.
    Scratch,
}

/// A range of bytes in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which memory.
    pub space: Space,
    /// The first byte.
    pub offset: usize,
    /// The length in bytes.
    pub bytes: usize,
}

impl Span {
    /// In the caller's input.
    pub const fn send(offset: usize, bytes: usize) -> Span {
        Span { space: Space::Send, offset, bytes }
    }

    /// In the caller's output.
    pub const fn recv(offset: usize, bytes: usize) -> Span {
        Span { space: Space::Recv, offset, bytes }
    }

    /// In the engine's memory.
    pub const fn scratch(offset: usize, bytes: usize) -> Span {
        Span { space: Space::Scratch, offset, bytes }
    }

    /// `bytes` of this span from its byte `at` on.
    pub const fn slice(self, at: usize, bytes: usize) -> Span {
        assert!(at + bytes <= self.bytes);
        Span { space: self.space, offset: self.offset + at, bytes }
    }
}

/// A range in what a peer has published: at one place if the peer published its own memory, at another if it
/// had to copy a round's pieces together first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Whose.
    pub peer: u32,
    /// From the start of what the peer published in place.
    pub in_place: usize,
    /// From the start of the round that the peer staged.
    pub staged: usize,
}

/// An input of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// This rank's own memory.
    Own(Space, usize),
    /// A peer's published memory.
    Peer(Remote),
}

/// Which ranks a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// All but this one.
    All,
    /// Only this one.
    One(usize),
}

/// One thing to do. A step either completes or leaves the call where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write the call's fingerprint at this scratch offset and a copy of `payload` behind it.
    Frame {
        /// Where the eight bytes of the fingerprint start in scratch.
        at: usize,
        /// What follows it.
        payload: Span,
    },
    /// Post a message.
    Send {
        /// The receiver.
        to: usize,
        /// Which message of this pair in this call.
        slot: usize,
        /// Waited for together.
        group: usize,
        /// The bytes.
        span: Span,
    },
    /// Post a receive.
    Recv {
        /// The sender.
        from: usize,
        /// Which message of this pair in this call.
        slot: usize,
        /// Waited for together.
        group: usize,
        /// The bytes.
        span: Span,
    },
    /// Wait until all messages of a group are through.
    Wait {
        /// The group.
        group: usize,
    },
    /// Compare the fingerprint that arrived at this scratch offset.
    Check {
        /// Who sent it.
        from: usize,
        /// Where it lies in scratch.
        at: usize,
    },
    /// Copy within this rank.
    Copy {
        /// From here.
        from: Span,
        /// To here; as long.
        to: Span,
    },
    /// Combine one operand per rank, in rank order.
    Reduce {
        /// The first in the schedule's list of operands.
        first: usize,
        /// How many.
        inputs: usize,
        /// Where the result goes.
        out: Span,
        /// Elements.
        count: usize,
    },
    /// Combine contributions of some ranks to a partial result, or partial results, in rank order.
    Join {
        /// What the operands and the result are.
        stage: Stage,
        /// The first in the schedule's list of operands.
        first: usize,
        /// How many.
        inputs: usize,
        /// Where the result goes.
        out: Span,
        /// Elements.
        count: usize,
    },
    /// Wait until no peer still reads from this scratch on behalf of an earlier call.
    Claim,
    /// Let peers read a span.
    Publish {
        /// Which of the call's rounds.
        round: usize,
        /// What.
        span: Span,
        /// Whether it is a copy of a round's pieces rather than the memory itself.
        staged: bool,
    },
    /// Wait until peers have published.
    Await {
        /// Which of the call's rounds.
        round: usize,
        /// Whether this is the first round of an exchange, in which peers also say how they publish.
        first: bool,
        /// Whose.
        peers: Peers,
    },
    /// Continue at another step unless every awaited peer published its memory itself.
    UnlessInPlace {
        /// Whose.
        peers: Peers,
        /// The other step.
        go: usize,
    },
    /// Continue at another step.
    Go {
        /// The other step.
        to: usize,
    },
    /// Copy from a peer.
    Read {
        /// From here.
        from: Remote,
        /// To here.
        to: Span,
    },
    /// This rank has read all that it reads of these rounds.
    Finish {
        /// The first.
        first: usize,
        /// The last.
        last: usize,
    },
    /// Wait until peers have read all that they read of a round.
    Released {
        /// Which of the call's rounds.
        round: usize,
        /// Whose.
        peers: Peers,
    },
}

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
    /// Payload in bytes that this rank sends; see [`Call::volume`].
    pub volume: usize,
    /// What peers compare.
    pub fingerprint: Fingerprint,
    pub(crate) kernel: Option<Kernel>,
}

/// What a schedule needs to know about the group and this rank's place in it; all but `rank` is the same on
/// every rank.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub size: usize,
    /// Whether peers' memory can be read, and then up to how many bytes publishing copies.
    pub direct: Option<usize>,
    /// How many consecutive ranks share a node, where that makes a difference; the last block may have fewer.
    pub block: Option<usize>,
    /// Sizes at which algorithms change.
    pub tuning: Tuning,
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
        let choice = tuner::choose(&call, group, forced);
        let mut build = Build { call, group: *group, local, schedule: Schedule::empty(call, group, choice) };
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
        build.schedule
    }

    fn empty(call: Call, group: &Group, choice: Choice) -> Schedule {
        let kernel =
            call.kind.reduces().then(|| crate::reduce::kernel(call.dtype, call.op, call.wide, group.size));
        Schedule {
            call,
            group: *group,
            choice,
            steps: Vec::new(),
            operands: Vec::new(),
            scratch: 0,
            scratch_published: false,
            rounds: 0,
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
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
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

    /// Bytes of one element of the reduced result.
    fn out_size(&self) -> usize {
        match (self.call.wide, self.call.dtype) {
            (true, DType::F16 | DType::Bf16) => 4,
            (_, dtype) => dtype.size(),
        }
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Send => "send",
            Space::Recv => "recv",
            Space::Scratch => "scratch",
        })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}..{}]", self.space, self.offset, self.offset + self.bytes)
    }
}

impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peers::All => f.write_str("all peers"),
            Peers::One(peer) => write!(f, "rank {peer}"),
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Own(space, offset) => write!(f, "{space}[{offset}..]"),
            Operand::Peer(r) => write!(f, "rank{}[{}|{}..]", r.peer, r.in_place, r.staged),
        }
    }
}

impl fmt::Display for Schedule {
    /// One line per step; in `rank3[64|0..]` the first number is the offset in what rank 3 published in place,
    /// the second that in a staged round.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, size, .. } = self.group;
        writeln!(f, "{} on rank {rank} of {size}: {}", self.call, self.choice)?;
        for (i, step) in self.steps.iter().enumerate() {
            write!(f, "{i:4}  ")?;
            match step {
                Step::Frame { at, payload } => writeln!(f, "frame {payload} at scratch[{at}..]")?,
                Step::Send { to, slot, group, span } => {
                    writeln!(f, "send {span} to rank {to}, slot {slot}, group {group}")?;
                }
                Step::Recv { from, slot, group, span } => {
                    writeln!(f, "receive {span} from rank {from}, slot {slot}, group {group}")?;
                }
                Step::Wait { group } => writeln!(f, "wait for group {group}")?,
                Step::Check { from, at } => {
                    writeln!(f, "check the fingerprint of rank {from} at scratch[{at}..]")?;
                }
                Step::Copy { from, to } => writeln!(f, "copy {from} to {to}")?,
                Step::Reduce { first, inputs, out, count } => {
                    write!(f, "reduce {count} of")?;
                    for operand in &self.operands[*first..first + inputs] {
                        write!(f, " {operand}")?;
                    }
                    writeln!(f, " into {out}")?;
                }
                Step::Join { stage, first, inputs, out, count } => {
                    let what = match stage {
                        Stage::First => "contributions to a partial result",
                        Stage::Middle => "partial results to one",
                        Stage::Last => "partial results to the result",
                    };
                    write!(f, "join {count} of")?;
                    for operand in &self.operands[*first..first + inputs] {
                        write!(f, " {operand}")?;
                    }
                    writeln!(f, ", {what}, into {out}")?;
                }
                Step::Claim => writeln!(f, "claim the scratch")?,
                Step::Publish { round, span, staged } => {
                    let how = if *staged { "staged" } else { "in place" };
                    writeln!(f, "publish {span} for round {round}, {how}")?;
                }
                Step::Await { round, peers, .. } => writeln!(f, "await round {round} of {peers}")?,
                Step::UnlessInPlace { peers, go } => writeln!(f, "unless {peers} in place, go to {go}")?,
                Step::Go { to } => writeln!(f, "go to {to}")?,
                Step::Read { from, to } => {
                    writeln!(f, "read {} into {to}", Operand::Peer(*from))?;
                }
                Step::Finish { first, last } => writeln!(f, "finish rounds {first}..={last}")?,
                Step::Released { round, peers } => writeln!(f, "wait until {peers} finished round {round}")?,
            }
        }
        Ok(())
    }
}
