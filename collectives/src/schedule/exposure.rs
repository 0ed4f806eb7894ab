//! Letting peers read memory, in place where they can reach it, else through a small staged window.
//!
//! Whether a buffer is registered may differ between ranks, so the number of rounds of an exchange depends on
//! sizes only. A rank whose memory peers can reach publishes it whole in the first round and nothing in the
//! others; a rank whose memory they cannot reach copies one round's pieces at a time into a window of two
//! rounds. Readers learn in the first round which of the two each peer does.

use super::{Build, Operand, Peers, Remote, Space, Span, Step};
use std::ops::Range;

/// Rounds that may be staged before the first of them has been read.
const WINDOW: usize = 2;

/// What this rank publishes in one exchange.
pub(super) struct Exposure {
    /// All of it, where it is.
    base: Span,
    /// The pieces that different peers read, or the one that all read: offsets from the base.
    pieces: Vec<Range<usize>>,
    /// Bytes of a piece per round.
    per_round: usize,
    rounds: usize,
    first_round: usize,
    staging: Option<Span>,
    /// Publishing copies, so that nobody has to wait for readers.
    copied: bool,
    /// What is read replaces what is exposed, so a round is read only after it has been staged.
    replaced: bool,
}

/// Part of every piece, as one step reads it.
pub(super) struct Part {
    /// Bytes within the piece.
    range: Range<usize>,
    per_round: usize,
}

/// Which of a peer's pieces: where it starts in what the peer publishes in place, and its number.
type Piece = (usize, usize);

impl Part {
    /// This part of a piece of `peer`.
    fn remote(&self, peer: usize, (in_place, piece): Piece) -> Remote {
        let in_place = in_place + self.range.start;
        Remote { peer: peer as u32, in_place, staged: piece * self.per_round }
    }

    /// This part of a piece of `bytes`.
    fn of(&self, bytes: usize) -> Range<usize> {
        self.range.start.min(bytes)..self.range.end.min(bytes)
    }
}

impl Exposure {
    /// Whether all of it has been copied once it is published.
    pub(super) fn is_copied(&self) -> bool {
        self.copied
    }
}

impl Build {
    /// Memory of this rank for peers to read. `most` is the largest number of pieces that any rank has and
    /// `largest` the largest piece: the same on every rank. `replaced` says that what is read of a piece replaces
    /// that piece, so that peers must read a copy even of registered memory.
    pub(super) fn expose(
        &mut self,
        base: Span,
        pieces: Vec<Range<usize>>,
        most: usize,
        largest: usize,
        replaced: bool,
    ) -> Exposure {
        let (per_round, rounds) = self.group.tuning.cut(most, largest, self.group.tuning.staging);
        let first_round = self.schedule.rounds;
        self.schedule.rounds += rounds;
        let copied = base.bytes <= self.group.direct.unwrap_or(0);
        let registered = match base.space {
            Space::Send => self.local.send_registered,
            Space::Recv => self.local.recv_registered,
            Space::Scratch => true,
        };
        let staged = !copied && (replaced || !registered);
        let staging = staged.then(|| {
            if !self.schedule.scratch_published {
                self.push(Step::Claim);
                self.schedule.scratch_published = true;
            }
            self.scratch(WINDOW.min(rounds) * pieces.len() * per_round)
        });
        Exposure { base, pieces, per_round, rounds, first_round, staging, copied, replaced }
    }

    /// Nothing of this rank; it takes part because the rounds are everybody's.
    pub(super) fn expose_nothing(&mut self, most: usize, largest: usize) -> Exposure {
        self.expose(Span::send(0, 0), Vec::new(), most, largest, false)
    }

    fn publish(&mut self, e: &Exposure, k: usize, readers: Peers) {
        let round = e.first_round + k;
        let Some(staging) = e.staging else {
            if k == 0 {
                self.push(Step::Publish { round, span: e.base, staged: false });
            }
            return;
        };
        if k >= WINDOW {
            self.push(Step::Released { round: round - WINDOW, peers: readers });
        }
        let bytes = e.pieces.len() * e.per_round;
        let window = staging.slice(k % WINDOW * bytes, bytes);
        for (i, piece) in e.pieces.iter().enumerate() {
            let from = k * e.per_round;
            let len = piece.len().saturating_sub(from).min(e.per_round);
            if len > 0 {
                let source = e.base.slice(piece.start + from, len);
                self.push(Step::Copy { from: source, to: window.slice(i * e.per_round, len) });
            }
        }
        self.push(Step::Publish { round, span: window, staged: true });
    }

    /// Publishes `e`, does `meanwhile`, and reads from `sources` with `read`, once per part. `readers` read what
    /// this rank publishes; with `release`, waits at the end until they have read this rank's own memory.
    pub(super) fn exchange(
        &mut self,
        e: &Exposure,
        sources: Option<Peers>,
        (readers, release): (Peers, bool),
        meanwhile: impl FnOnce(&mut Build),
        mut read: impl FnMut(&mut Build, &Part),
    ) {
        let (first, last) = (e.first_round, e.first_round + e.rounds - 1);
        let whole = Part { range: 0..e.rounds * e.per_round, per_round: e.per_round };
        for k in 0..WINDOW.min(e.rounds) {
            self.publish(e, k, readers);
        }
        meanwhile(self);
        let Some(peers) = sources else {
            self.push(Step::Finish { first, last });
            self.publish_rest(e, readers);
            return self.release(e, readers, release);
        };
        self.push(Step::Await { round: first, first: true, peers });
        if e.rounds == 1 {
            read(self, &whole);
            self.push(Step::Finish { first, last });
            return self.release(e, readers, release);
        }
        if e.replaced {
            self.rounds(e, peers, readers, &mut read);
            return self.release(e, readers, release);
        }
        let branch = self.here();
        self.push(Step::UnlessInPlace { peers, go: 0 });
        read(self, &whole);
        self.push(Step::Finish { first, last });
        self.publish_rest(e, readers);
        let skip = self.here();
        self.push(Step::Go { to: 0 });
        self.schedule.steps[branch] = Step::UnlessInPlace { peers, go: self.here() };
        self.rounds(e, peers, readers, &mut read);
        self.schedule.steps[skip] = Step::Go { to: self.here() };
        self.release(e, readers, release);
    }

    /// Copies `part` of a piece of `peer` to its place in `to`, where the whole piece goes.
    pub(super) fn read(&mut self, part: &Part, peer: usize, piece: Piece, to: Span) {
        let range = part.of(to.bytes);
        if !range.is_empty() {
            let to = to.slice(range.start, range.len());
            self.push(Step::Read { from: part.remote(peer, piece), to });
        }
    }

    /// Reduces `part` of a piece that every rank has, this one at `own` in its input and another as `theirs` says, to its
    /// place in `out`, where the result of the whole piece goes.
    pub(super) fn read_reduced(
        &mut self,
        part: &Part,
        own: usize,
        theirs: impl Fn(usize) -> Piece,
        out: Span,
    ) {
        let (rank, element, size) = (self.group.rank, self.call.dtype.size(), self.out_size());
        let range = part.of(out.bytes / size * element);
        let operand = |r: usize| match r {
            r if r == rank => Operand::Own(Space::Send, own + range.start),
            r => Operand::Peer(part.remote(r, theirs(r))),
        };
        let (at, count) = (range.start / element, range.len() / element);
        self.reduce(operand, out.slice(at * size, count * size), count);
    }

    /// Reads round by round, and stages the round after next once one is read.
    fn rounds(
        &mut self,
        e: &Exposure,
        peers: Peers,
        readers: Peers,
        read: &mut impl FnMut(&mut Build, &Part),
    ) {
        for k in 0..e.rounds {
            let round = e.first_round + k;
            if k > 0 {
                self.push(Step::Await { round, first: false, peers });
            }
            let range = k * e.per_round..(k + 1) * e.per_round;
            read(self, &Part { range, per_round: e.per_round });
            self.push(Step::Finish { first: round, last: round });
            if k + WINDOW < e.rounds {
                self.publish(e, k + WINDOW, readers);
            }
        }
    }

    fn publish_rest(&mut self, e: &Exposure, readers: Peers) {
        for k in WINDOW..e.rounds {
            self.publish(e, k, readers);
        }
    }

    fn release(&mut self, e: &Exposure, readers: Peers, release: bool) {
        if release && e.staging.is_none() && !e.copied {
            self.push(Step::Released { round: e.first_round + e.rounds - 1, peers: readers });
        }
    }
}
