//! What a schedule is made of: steps, and the memory that they touch.

use crate::reduce::Stage;

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
    /// Post a receive. If it brings the sender's fingerprint, that is compared as soon as it has come.
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

impl Step {
    /// Where in scratch a receive puts the fingerprint of its sender, if it brings one: the first message between two ranks
    /// does, which needs scratch for that.
    pub(crate) fn fingerprint_at(&self) -> Option<usize> {
        match self {
            Step::Recv { slot: 0, span: Span { space: Space::Scratch, offset, .. }, .. } => Some(*offset),
            _ => None,
        }
    }
}
