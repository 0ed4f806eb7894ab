//! What was called: the collectives, and a call's arguments without addresses.

use crate::element::{DType, ReduceOp};
use crate::reduce::accumulator;
use std::fmt;

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
    /// Whether it is between two ranks, apart from the order of collectives.
    pub fn is_message(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv)
    }

    /// Whether a call's count is that of one rank's part of the data, not of all.
    pub const fn counts_a_part(self) -> bool {
        use Kind::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, ReduceScatter | AllGather | Gather | Scatter | AllToAll)
    }

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

    /// Every kind but messages, in the same order.
    pub const COLLECTIVES: [Kind; 9] = *Kind::ALL.first_chunk().unwrap();

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
    /// The same with its root, or peer, by its rank in the job: for words.
    pub(crate) fn in_job(self, job_rank: impl Fn(usize) -> usize) -> Self {
        Call { root: job_rank(self.root), ..self }
    }

    /// A call of `count` elements, out of place, without a root.
    pub fn new(kind: Kind, dtype: DType, count: usize) -> Self {
        Call { kind, dtype, op: ReduceOp::Sum, count, root: 0, in_place: false, wide: false }
    }

    /// Bytes of `count` elements.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Bytes of one element of the reduced result.
    pub fn out_size(&self) -> usize {
        if self.wide { accumulator(self.dtype).size() } else { self.dtype.size() }
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

/// Part `rank` of `count` elements cut into `size` parts that differ by at most one element.
pub fn part(count: usize, size: usize, rank: usize) -> std::ops::Range<usize> {
    let (base, extra) = (count / size, count % size);
    let start = rank * base + rank.min(extra);
    start..start + base + usize::from(rank < extra)
}
