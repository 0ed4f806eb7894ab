//! Who is silent when a call has waited for too long. The peer that it waits for may itself wait for another, as along a
//! ring: so it is asked for whom, and that one likewise, until one does not answer.

use super::{Engine, Stage};
use crate::error::Result;
use crate::transport::HEARSAY;
use crate::watch::Waited;
use std::time::Duration;

/// The longest time for an answer, which comes at the next look of a rank that waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// The question whom a call waits for in the end; ranks are those of the job. Each call has its own: threads of a rank that
/// wait for several would else begin each other's anew.
pub(super) struct Inquiry {
    /// The rank that was asked last, what tells its answer, and since when it has not answered.
    peer: usize,
    asked: u64,
    waited: Waited,
    /// Ranks that wait for others, in turn.
    passed: Vec<usize>,
}

impl Engine {
    /// Notices peers that are gone, and a peer that has been `silent` for too long.
    pub(super) fn check(&mut self, id: Option<u32>, silent: Duration) -> Result<()> {
        if let Some(id) = id.or(self.order.first().copied()) {
            self.note_wait(id);
        }
        if let Err(error) = self.transport.check() {
            // What the peer sent before it went may be all that was missing.
            self.poll(id)?;
            if id.is_some_and(|id| self.flights[id as usize].stage != Stage::Running) {
                return Ok(());
            }
            return Err(self.fail(error));
        }
        let Some(id) = id else { return Ok(()) };
        let after = self.options.deadline;
        if silent < after || self.flights[id as usize].stage != Stage::Running {
            self.flights[id as usize].inquiry = None;
            return Ok(());
        }
        let Some((peer, through)) = self.silent_rank(id) else { return Ok(()) };
        let how =
            through.last().map_or(String::new(), |rank| format!(", for which rank {rank} waits as well,"));
        let error = self.timeout(id, &how, peer, after, &through);
        Err(self.fail(error))
    }

    /// Lets peers that ask know for whom this rank waits.
    fn note_wait(&mut self, id: u32) {
        let member = self.waited_for(id);
        let peer = self.transport.job_rank(member);
        if member != self.group.rank
            && let Some(waits) = self.transport.waits()
        {
            waits.note(peer);
        }
    }

    /// The rank of the job that is silent where this one waits for a call, and through which others it does; none until
    /// that is known. Called again and again.
    fn silent_rank(&mut self, id: u32) -> Option<(usize, Vec<usize>)> {
        let first = self.waited_for(id);
        let (me, first) = (self.transport.job_rank(self.group.rank), self.transport.job_rank(first));
        let Some(waits) = self.transport.waits().filter(|_| first != me) else {
            return Some((first, Vec::new()));
        };
        let inquiry = self.flights[id as usize].inquiry.get_or_insert_with(|| {
            let (asked, waited) = (waits.ask(first), Waited::begin());
            Box::new(Inquiry { peer: first, asked, waited, passed: Vec::new() })
        });
        while let Some(next) = waits.answer(inquiry.peer, inquiry.asked) {
            if next == me || next == inquiry.peer || inquiry.passed.contains(&next) {
                // In a circle, unless it waits for several and names another the next time.
                inquiry.asked = waits.ask(inquiry.peer);
                break;
            }
            inquiry.passed.push(inquiry.peer);
            (inquiry.peer, inquiry.waited) = (next, Waited::begin());
            inquiry.asked = waits.ask(next);
        }
        let patience = (self.options.deadline / 4).clamp(HEARSAY, PATIENCE);
        let silent = inquiry.waited.so_far() > patience;
        silent.then(|| (inquiry.peer, std::mem::take(&mut inquiry.passed)))
    }
}
