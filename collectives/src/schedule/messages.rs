//! Posting messages so that the first one between two ranks in a call carries the call's fingerprint.

use super::{Build, Kind, Span, Step};

/// Lets what is posted together begin with its sends. Libraries announce a large message and send it once its receiver
/// answers. A receive that finds its message announced is answered at once; then the peer's data are on their way, and
/// behind those, over one connection, its answer to what this rank announces only afterwards: each link would carry
/// data in one direction at a time.
pub(super) fn send_first(steps: &mut [Step]) {
    let posts = |step: &Step| matches!(step, Step::Frame { .. } | Step::Send { .. } | Step::Recv { .. });
    for run in steps.chunk_by_mut(|a, b| posts(a) && posts(b)) {
        run.sort_by_key(|step| matches!(step, Step::Recv { .. }));
    }
}

/// What has been posted so far, per peer.
pub(super) struct Messages {
    sent: Vec<usize>,
    received: Vec<usize>,
    /// What to do once a group is through: in order of posting.
    after: Vec<(usize, Step)>,
}

/// Bytes of a fingerprint on the wire.
const HEADER: usize = 8;

impl Messages {
    pub fn new(size: usize) -> Self {
        Messages { sent: vec![0; size], received: vec![0; size], after: Vec::new() }
    }
}

impl Build {
    /// Scratch for a fingerprint and `bytes` behind it, which start at a cache line.
    fn frame(&mut self, bytes: usize) -> (usize, Span) {
        let payload = self.schedule.scratch.next_multiple_of(64) + 64;
        self.schedule.scratch = payload + bytes;
        (payload - HEADER, Span::scratch(payload, bytes))
    }

    /// The next slot of a pair. A user's message has one tag for all its parts, which arrive in order.
    fn slot(&self, counter: &mut usize) -> usize {
        let slot = if matches!(self.call.kind, Kind::Send | Kind::Recv) { 0 } else { *counter };
        *counter += 1;
        slot
    }

    /// Posts `span` to `to`. Both sides decide alike, from the length, whether the fingerprint comes in the same
    /// message or in one before.
    pub(super) fn send(&mut self, m: &mut Messages, to: usize, span: Span, group: usize) {
        if m.sent[to] == 0 {
            let together = span.bytes <= self.group.tuning.frame;
            let payload = if together { span } else { Span { bytes: 0, ..span } };
            let (at, room) = self.frame(payload.bytes);
            self.push(Step::Frame { at, payload });
            let slot = self.slot(&mut m.sent[to]);
            self.push(Step::Send { to, slot, group, span: Span::scratch(at, HEADER + room.bytes) });
            if together {
                return;
            }
        }
        if span.bytes > 0 {
            let slot = self.slot(&mut m.sent[to]);
            self.push(Step::Send { to, slot, group, span });
        }
    }

    /// Posts the receive of `span` from `from`.
    pub(super) fn recv(&mut self, m: &mut Messages, from: usize, span: Span, group: usize) {
        let arrived = self.recv_scratch(m, from, span.bytes, group, &mut Some(span));
        if arrived != span && span.bytes > 0 {
            m.after.push((group, Step::Copy { from: arrived, to: span }));
        }
    }

    /// Posts the receive of `bytes` from `from` and says where they will be: behind their fingerprint, or else in
    /// `window`, which is scratch made for the purpose unless it is given.
    pub(super) fn recv_scratch(
        &mut self,
        m: &mut Messages,
        from: usize,
        bytes: usize,
        group: usize,
        window: &mut Option<Span>,
    ) -> Span {
        if m.received[from] == 0 {
            let together = bytes <= self.group.tuning.frame;
            let (at, room) = self.frame(if together { bytes } else { 0 });
            let slot = self.slot(&mut m.received[from]);
            self.push(Step::Recv { from, slot, group, span: Span::scratch(at, HEADER + room.bytes) });
            m.after.push((group, Step::Check { from, at }));
            if together {
                return room;
            }
        }
        let window = *window.get_or_insert_with(|| self.scratch(bytes));
        let span = window.slice(0, bytes);
        if bytes > 0 {
            let slot = self.slot(&mut m.received[from]);
            self.push(Step::Recv { from, slot, group, span });
        }
        span
    }

    /// Waits for all messages of `group`, checks fingerprints and moves framed payloads to their places.
    pub(super) fn wait(&mut self, m: &mut Messages, group: usize) {
        self.push(Step::Wait { group });
        let (now, later) = m.after.drain(..).partition(|(g, _)| *g == group);
        m.after = later;
        let now: Vec<(usize, Step)> = now;
        // A peer that diverged must not be believed before it is checked.
        for (_, step) in now.iter().filter(|(_, s)| matches!(s, Step::Check { .. })) {
            self.push(*step);
        }
        for (_, step) in now.iter().filter(|(_, s)| !matches!(s, Step::Check { .. })) {
            self.push(*step);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Call, Group, Local, Schedule, Tuning};

    #[test]
    fn what_is_posted_together_begins_with_its_sends() {
        let tuning = Tuning { round: 64 << 10, ..Tuning::default() };
        for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::AllToAll, Kind::Barrier] {
            for (rank, size) in [(0, 2), (1, 2), (2, 5)] {
                let group = Group { rank, size, direct: None, block: None, tuning };
                let call = Call::new(kind, DType::F32, if kind == Kind::Barrier { 0 } else { 100_000 });
                let steps = Schedule::new(call, &group, Local::default(), None).steps;
                let (mut sends, mut received) = (0, false);
                for step in &steps {
                    match step {
                        Step::Recv { .. } => received = true,
                        Step::Send { .. } => {
                            assert!(!received, "{kind:?}, rank {rank} of {size}");
                            sends += 1;
                        }
                        Step::Frame { .. } => {}
                        _ => received = false,
                    }
                }
                assert!(sends > 0, "{kind:?}, rank {rank} of {size}");
            }
        }
    }
}
