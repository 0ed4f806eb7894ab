//! What of a call's buffers has to be on the host before it, and what of it comes back.

use crate::engine::Ends;
use crate::schedule::{Call, Kind};
use std::ops::Range;

/// Ranges in bytes; empty ones are nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    /// Of the input: start and length.
    down: (usize, usize),
    /// Of the output.
    up: [(usize, usize); 2],
}

const NOTHING: (usize, usize) = (0, 0);

impl Pieces {
    /// Those of a call on `rank` of `size`.
    pub fn of(call: &Call, ends: &Ends, rank: usize, size: usize) -> Pieces {
        let (input, output) = ((0, ends.send_bytes), (0, ends.recv_bytes));
        let block = call.bytes();
        // Of a whole of `size` blocks, this rank's and the others'.
        let own = (rank * block, block);
        let others = [(0, rank * block), ((rank + 1) * block, (size - rank - 1) * block)];
        let root = rank == call.root;
        let all = |down, up| Pieces { down, up: [up, NOTHING] };
        match (call.kind, call.in_place) {
            (Kind::ReduceScatter, true) => all(input, own),
            (Kind::AllGather, true) => Pieces { down: own, up: others },
            (Kind::Broadcast, _) if root => all(input, NOTHING),
            (Kind::Broadcast | Kind::Recv, _) => all(NOTHING, output),
            (Kind::Reduce, true) if !root => all(input, NOTHING),
            (Kind::Gather, true) if root => Pieces { down: own, up: others },
            (Kind::Gather, true) | (Kind::Send, _) => all(input, NOTHING),
            (Kind::Scatter, true) if root => all(input, NOTHING),
            (Kind::Scatter, true) => all(NOTHING, output),
            // What a rank that is not the root does not give or get is empty already.
            _ => all(input, output),
        }
    }

    pub fn down(&self) -> Range<usize> {
        self.down.0..self.down.0 + self.down.1
    }

    pub fn up(&self) -> impl Iterator<Item = Range<usize>> {
        self.up.into_iter().filter(|piece| piece.1 > 0).map(|(start, bytes)| start..start + bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    fn pieces(kind: Kind, in_place: bool, root: usize, send: usize, recv: usize) -> Pieces {
        let call = Call { root, in_place, ..Call::new(kind, DType::F32, 8) };
        let ends =
            Ends { send: std::ptr::null(), send_bytes: send, recv: std::ptr::null_mut(), recv_bytes: recv };
        Pieces::of(&call, &ends, 1, 3)
    }

    #[test]
    fn only_what_is_needed_moves() {
        let up = |p: Pieces| p.up().map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        let scattered = pieces(Kind::ReduceScatter, true, 0, 96, 96);
        assert_eq!((scattered.down(), up(scattered)), (0..96, vec![(32, 64)]));
        let gathered = pieces(Kind::AllGather, true, 0, 96, 96);
        assert_eq!((gathered.down(), up(gathered)), (32..64, vec![(0, 32), (64, 96)]));
        let apart = pieces(Kind::AllGather, false, 0, 32, 96);
        assert_eq!((apart.down(), up(apart)), (0..32, vec![(0, 96)]));
        let root = pieces(Kind::Broadcast, true, 1, 32, 32);
        assert_eq!((root.down(), up(root)), (0..32, vec![]));
        let other = pieces(Kind::Broadcast, true, 0, 32, 32);
        assert_eq!((other.down(), up(other)), (0..0, vec![(0, 32)]));
    }
}
