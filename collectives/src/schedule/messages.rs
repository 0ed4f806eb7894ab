//! Posting messages so that the first one between two ranks in a call carries the call's fingerprint, or so that the
//! transport tells by a message's tag and length which call it belongs to.

use super::{Algorithm, Build, Kind, Span, Step};
use crate::transport::Tells;
use crate::watch::{Coded, Typed};
use std::collections::HashMap;

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

/// The most messages at once between being posted and being waited for.
pub(super) fn most_posted(steps: &[Step]) -> usize {
    let mut posted: HashMap<usize, usize> = HashMap::new();
    let (mut now, mut most) = (0, 0);
    for step in steps {
        match step {
            Step::Send { group, .. } | Step::Recv { group, .. } => {
                *posted.entry(*group).or_default() += 1;
                now += 1;
                most = most.max(now);
            }
            Step::Wait { group } => now -= posted.remove(group).unwrap_or(0),
            _ => {}
        }
    }
    most
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

/// The next slot of a pair. A user's message has one tag for all its parts, which arrive in order.
fn next_slot(kind: Kind, posted: &mut usize) -> usize {
    let slot = if kind.is_message() { 0 } else { *posted };
    *posted += 1;
    slot
}

impl Build {
    /// Scratch for a fingerprint and `bytes` behind it, which start at a cache line.
    fn frame(&mut self, bytes: usize) -> (usize, Span) {
        let payload = self.schedule.scratch.next_multiple_of(64) + 64;
        self.schedule.scratch = payload + bytes;
        (payload - HEADER, Span::scratch(payload, bytes))
    }

    /// The slot of a message of `bytes` that carries all of the call between two ranks, where the transport tells calls
    /// apart: then no fingerprint travels. What it cannot tell from tag, length and direction, it needs not tell: in
    /// these algorithms the root is one of the two, and no rank sends another more than the call's count. The length says
    /// nothing of a message that goes in pieces.
    fn coded(&self, bytes: usize) -> Option<usize> {
        if bytes > self.group.tuning.longest {
            return None;
        }
        if self.call.kind.is_message() {
            return (self.group.tells == Tells::Everything).then(|| Typed::of(self.call.dtype) as usize);
        }
        let whole = match self.algorithm() {
            Algorithm::Pairwise | Algorithm::ExchangeAll | Algorithm::Linear | Algorithm::Dissemination => {
                true
            }
            Algorithm::Binomial | Algorithm::Chain => self.group.size == 2,
            _ => false,
        };
        let bytes = (self.group.tells >= Tells::Collectives && whole && bytes == self.call.bytes())
            .then_some(bytes)?;
        Coded::of(&self.call, bytes).map(|coded| coded.slot().into())
    }

    /// Posts `span` to `to`. Both sides decide alike, from the length, whether the fingerprint comes in the same
    /// message or in one before.
    pub(super) fn send(&mut self, to: usize, span: Span, group: usize) {
        if self.messages.sent[to] == 0 {
            if let Some(slot) = self.coded(span.bytes) {
                self.messages.sent[to] += 1;
                return self.push(Step::Send { to, slot, group, span });
            }
            let together = span.bytes <= self.group.tuning.frame;
            let payload = if together { span } else { Span { bytes: 0, ..span } };
            let (at, room) = self.frame(payload.bytes);
            self.push(Step::Frame { at, payload });
            let slot = next_slot(self.call.kind, &mut self.messages.sent[to]);
            self.push(Step::Send { to, slot, group, span: Span::scratch(at, HEADER + room.bytes) });
            if together {
                return;
            }
        }
        if span.bytes > 0 {
            let slot = next_slot(self.call.kind, &mut self.messages.sent[to]);
            self.push(Step::Send { to, slot, group, span });
        }
    }

    /// Posts the receive of `span` from `from`.
    pub(super) fn recv(&mut self, from: usize, span: Span, group: usize) {
        let arrived = self.recv_scratch(from, span.bytes, group, &mut Some(span));
        if arrived != span && span.bytes > 0 {
            self.then(group, Step::Copy { from: arrived, to: span });
        }
    }

    /// Posts the receive of `bytes` from `from` and says where they will be: behind their fingerprint if that comes with
    /// them, or else in `window`, which is scratch made for the purpose unless it is given.
    pub(super) fn recv_scratch(
        &mut self,
        from: usize,
        bytes: usize,
        group: usize,
        window: &mut Option<Span>,
    ) -> Span {
        if self.messages.received[from] == 0 {
            if let Some(slot) = self.coded(bytes) {
                self.messages.received[from] += 1;
                let span = window.get_or_insert_with(|| self.scratch(bytes)).slice(0, bytes);
                self.push(Step::Recv { from, slot, group, span });
                return span;
            }
            let together = bytes <= self.group.tuning.frame;
            let (at, room) = self.frame(if together { bytes } else { 0 });
            let slot = next_slot(self.call.kind, &mut self.messages.received[from]);
            self.push(Step::Recv { from, slot, group, span: Span::scratch(at, HEADER + room.bytes) });
            if together {
                return room;
            }
        }
        let window = *window.get_or_insert_with(|| self.scratch(bytes));
        let span = window.slice(0, bytes);
        if bytes > 0 {
            let slot = next_slot(self.call.kind, &mut self.messages.received[from]);
            self.push(Step::Recv { from, slot, group, span });
        }
        span
    }

    /// Another step to take once a group is through.
    pub(super) fn then(&mut self, group: usize, step: Step) {
        self.messages.after.push((group, step));
    }

    /// Waits for all messages of `group` and moves framed payloads to their places.
    pub(super) fn wait(&mut self, group: usize) {
        self.push(Step::Wait { group });
        let now: Vec<(usize, Step)> = self.messages.after.extract_if(.., |(g, _)| *g == group).collect();
        now.into_iter().for_each(|(_, step)| self.push(step));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Call, Group, Kind, Local, Schedule, Tuning};
    use crate::watch::Fingerprint;

    #[test]
    fn what_the_transport_tells_apart_needs_no_fingerprint() {
        for kind in Kind::ALL {
            for count in [0, 10, 5000] {
                let group = |tells| Group { tells, ..Group::plain(0, 2) };
                let call = Call {
                    root: 1,
                    ..Call::new(kind, DType::F32, if kind == Kind::Barrier { 0 } else { count })
                };
                let steps = |tells| Schedule::new(call, &group(tells), Local::default(), None).steps;
                let checks =
                    |step: &Step| matches!(step, Step::Frame { .. }) || step.fingerprint_at().is_some();
                let user = kind.is_message();
                assert!(steps(Tells::Nothing).iter().any(checks), "{call}");
                assert_eq!(steps(Tells::Collectives).iter().any(checks), user, "{call}");
                assert!(!steps(Tells::Everything).iter().any(checks), "{call}");
                let slots = steps(Tells::Everything).into_iter().filter_map(|step| match step {
                    Step::Send { slot, span, .. } | Step::Recv { slot, span, .. } => Some((slot, span.bytes)),
                    _ => None,
                });
                for (slot, bytes) in slots {
                    let told = match user {
                        true => Typed::fingerprint(slot as u64, bytes) == Some(Fingerprint::of(&call)),
                        false => Coded::from_slot(slot as u16).is_some(),
                    };
                    assert!(told && bytes == call.bytes(), "{call}");
                }
            }
        }
    }

    #[test]
    fn what_is_posted_together_begins_with_its_sends() {
        let tuning = Tuning { round: 64 << 10, ..Tuning::default() };
        for kind in [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce, Kind::AllToAll, Kind::Barrier] {
            for (rank, size, tells) in [
                (0, 2, Tells::Nothing),
                (1, 2, Tells::Collectives),
                (2, 5, Tells::Nothing),
                (2, 5, Tells::Everything),
            ] {
                let group = Group { tells, tuning, ..Group::plain(rank, size) };
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
