//! Who is silent when a call has waited for too long. The peer that it waits for may itself wait for another, as along a
//! ring: so it is asked for whom, and that one likewise, until one does not answer.

use super::Engine;
use crate::transport::HEARSAY;
use crate::watch::Waited;
use std::time::Duration;

/// The longest time for an answer, which comes at the next look of a rank that waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// The question whom a call waits for in the end.
pub(super) struct Inquiry {
    /// The call.
    pub(super) id: u32,
    /// The member that was asked last, and since when it has not answered.
    member: usize,
    waited: Waited,
    /// Ranks of the job that wait for others, in turn.
    passed: Vec<usize>,
}

impl Engine {
    /// Lets peers that ask know for whom this rank waits.
    pub(super) fn note_wait(&mut self, id: u32) {
        let member = self.waited_for(id);
        if member != self.group.rank {
            let peer = self.transport.job_rank(member);
            self.transport.note_wait(peer);
        }
    }

    /// The rank of the job that is silent where this one waits for a call, and through which others it does; none until
    /// that is known. Called again and again.
    pub(super) fn silent(&mut self, id: u32) -> Option<(usize, Vec<usize>)> {
        let (me, size) = (self.group.rank, self.group.size);
        let first = self.waited_for(id);
        let transport = &mut *self.transport;
        if first == me {
            return Some((transport.job_rank(me), Vec::new()));
        }
        let inquiry = match &mut self.inquiry {
            Some(inquiry) if inquiry.id == id => inquiry,
            other => {
                transport.ask(first);
                other.insert(Inquiry { id, member: first, waited: Waited::begin(), passed: Vec::new() })
            }
        };
        while let Some(next) = transport.answer(inquiry.member) {
            let asked = transport.job_rank(inquiry.member);
            if next == transport.job_rank(me) || next == asked || inquiry.passed.contains(&next) {
                // In a circle, unless it waits for several and names another the next time.
                transport.ask(inquiry.member);
                break;
            }
            inquiry.passed.push(asked);
            let Some(member) = (0..size).find(|&member| transport.job_rank(member) == next) else {
                // Of another group, whom nobody can ask here.
                return Some((next, std::mem::take(&mut inquiry.passed)));
            };
            (inquiry.member, inquiry.waited) = (member, Waited::begin());
            transport.ask(member);
        }
        let patience = (self.options.deadline / 4).clamp(HEARSAY, PATIENCE);
        (inquiry.waited.so_far() > patience)
            .then(|| (transport.job_rank(inquiry.member), std::mem::take(&mut inquiry.passed)))
    }
}
