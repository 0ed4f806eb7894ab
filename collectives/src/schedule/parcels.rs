//! Several pieces of memory in one message.

use super::{Build, Span, Step};

/// The pieces as one, if each starts where the one before it ends.
fn joined(pieces: &[Span]) -> Option<Span> {
    let (&first, rest) = pieces.split_first()?;
    rest.iter().try_fold(first, |all, next| {
        let follows = next.space == all.space && next.offset == all.offset + all.bytes;
        follows.then_some(Span { bytes: all.bytes + next.bytes, ..all })
    })
}

fn total(pieces: &[Span]) -> usize {
    pieces.iter().map(|piece| piece.bytes).sum()
}

/// Each of the pieces with its place in a message that lies in `whole`.
fn places(pieces: &[Span], whole: Span) -> impl Iterator<Item = (Span, Span)> {
    let mut at = 0;
    let filled = pieces.iter().filter(|piece| piece.bytes > 0);
    filled.map(move |&piece| {
        at += piece.bytes;
        (piece, whole.slice(at - piece.bytes, piece.bytes))
    })
}

impl Build {
    /// Copies the pieces together.
    pub(super) fn pack(&mut self, pieces: &[Span]) -> Span {
        let whole = self.scratch(total(pieces));
        for (from, to) in places(pieces, whole) {
            self.push(Step::Copy { from, to });
        }
        whole
    }

    /// The pieces as one: where they are if they lie together, or else copied.
    pub(super) fn together(&mut self, pieces: &[Span]) -> Span {
        joined(pieces).unwrap_or_else(|| self.pack(pieces))
    }

    /// Posts the pieces as one message to `to`, from where they are if they lie together.
    pub(super) fn send_all(&mut self, to: usize, pieces: &[Span], group: usize) {
        let span = self.together(pieces);
        self.send(to, span, group);
    }

    /// Posts the receive of one message from `from` that fills the pieces, which it does at once if they lie together.
    pub(super) fn recv_all(&mut self, from: usize, pieces: &[Span], group: usize) {
        match joined(pieces) {
            Some(span) => self.recv(from, span, group),
            None => {
                let arrived = self.recv_scratch(from, total(pieces), group, &mut None);
                for (to, from) in places(pieces, arrived) {
                    self.then(group, Step::Copy { from, to });
                }
            }
        }
    }
}
