//! Who is silent when a call has waited for too long. The peer that it waits for may itself wait for another, as along a
//! ring: so it is asked for whom, and that one likewise, until one does not answer within a quarter of the deadline, at least
//! 300 ms and at most 5 s. Whoever still gets further, as in a long transfer with another, is not silent, nor is who waits for
//! it: but not for ever, because threads that wait for each other in two groups may have beside them a third that gets further.

use super::{Engine, Stage};
use crate::error::Result;
use crate::transport::{HEARSAY, Wait, Waits};
use crate::watch::Waited;
use std::time::Duration;

/// The longest time for an answer, which comes at the next look of a rank that waits.
const PATIENCE: Duration = Duration::from_secs(5);
/// For so long nothing has happened in a call when it is asked whether all hosts are there.
const HOSTS_ASKED_AFTER: Duration = Duration::from_secs(10);
/// For so many deadlines a call may stand still, with all before it, because whom it waits for gets further elsewhere.
const DEADLINES: u32 = 10;

/// The question whom a call waits for in the end; ranks are those of the job. Each call has its own: threads of a rank that
/// wait for several would else begin each other's anew.
pub(super) struct Inquiry {
    /// The rank that was asked last, what tells its answer, and since when it has not answered.
    peer: usize,
    asked: u64,
    waited: Waited,
    /// Ranks that wait for others, in turn, and get no further.
    passed: Vec<usize>,
    /// The last one gets further, as one in a long transfer with another: it is asked again only after a while.
    moves: bool,
}

impl Inquiry {
    fn begin(first: usize, waits: &mut dyn Waits) -> Self {
        let (asked, waited) = (waits.ask(first), Waited::begin());
        Inquiry { peer: first, asked, waited, passed: Vec::new(), moves: false }
    }
}

impl Engine {
    /// Notices peers that are gone, and, where a call is waited for in which nothing has happened for as long as `silent`
    /// says, a peer that has been silent for too long.
    pub(super) fn check(&mut self, id: Option<u32>, silent: Option<Duration>) -> Result<()> {
        if let (true, Some(id)) = (self.speaks, id.or(self.order.first().copied())) {
            self.note_wait(id, silent);
        }
        let checked = match silent {
            Some(silent) if silent >= HOSTS_ASKED_AFTER => self.transport.check_hosts(),
            _ => self.transport.check(),
        };
        if let Err(error) = checked {
            // What the peer sent before it went may be all that was missing.
            self.poll(id)?;
            if id.is_some_and(|id| self.flights[id as usize].stage != Stage::Running) {
                return Ok(());
            }
            return Err(self.fail(error));
        }
        let (Some(id), Some(silent)) = (id, silent) else { return Ok(()) };
        if self.flights[id as usize].stage != Stage::Running {
            return Ok(());
        }
        let (after, stuck) = (self.options.deadline, self.stuck(id));
        if silent < after {
            self.flights[id as usize].inquiry = None;
        } else if let Some((peer, through)) = self.silent_rank(id) {
            let how = through
                .last()
                .map_or(String::new(), |rank| format!(", for which rank {rank} waits as well,"));
            let error = self.timeout(id, &how, peer, after, &through);
            return Err(self.fail(error));
        }
        let longest = after.saturating_mul(DEADLINES);
        if stuck < longest {
            return Ok(());
        }
        let peer = self.transport.job_rank(self.waited_for(id));
        let error = self.timeout(id, ", while other calls got further,", peer, longest, &[]);
        Err(self.fail(error))
    }

    /// How long a call that somebody waits for has stood still, with all that were started before it.
    fn stuck(&mut self, id: u32) -> Duration {
        let until = self.order.iter().position(|&other| other == id).map_or(0, |at| at + 1);
        let mark = self.mark_of(&self.order[..until]);
        match &mut self.flights[id as usize].stuck {
            Some((last, waited)) if *last == mark => waited.so_far(),
            other => other.insert((mark, Waited::begin())).1.so_far(),
        }
    }

    /// Lets peers that ask know for whom this rank waits, and whether anything of its gets further: by who waits, or else by
    /// what was last seen of it here.
    fn note_wait(&mut self, id: u32, silent: Option<Duration>) {
        let member = self.waited_for(id);
        if member == self.group.rank {
            return;
        }
        let quiet = silent.unwrap_or_else(|| {
            let mark = self.progress_mark();
            match &mut self.quiet {
                Some((last, waited)) if *last == mark => waited.so_far(),
                other => other.insert((mark, Waited::begin())).1.so_far(),
            }
        });
        let (rank, still) = (self.transport.job_rank(member), quiet >= self.options.deadline / 2);
        if let Some(waits) = self.transport.waits() {
            waits.note(Wait { rank, still });
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
        let patience = (self.options.deadline / 4).clamp(HEARSAY, PATIENCE);
        let inquiry = &mut self.flights[id as usize].inquiry;
        let inquiry = inquiry.get_or_insert_with(|| Box::new(Inquiry::begin(first, waits)));
        if inquiry.moves {
            if inquiry.waited.so_far() < patience {
                return None;
            }
            **inquiry = Inquiry::begin(first, waits);
        }
        while let Some(Wait { rank: next, still }) = waits.answer(inquiry.peer, inquiry.asked) {
            if !still {
                // So those that wait for it do, too; or it began to wait later than this one.
                (inquiry.moves, inquiry.waited) = (true, Waited::begin());
                return None;
            }
            if next == me || next == inquiry.peer || inquiry.passed.contains(&next) {
                // In a circle, unless it waits for several and names another the next time.
                inquiry.asked = waits.ask(inquiry.peer);
                break;
            }
            inquiry.passed.push(inquiry.peer);
            (inquiry.peer, inquiry.waited) = (next, Waited::begin());
            inquiry.asked = waits.ask(next);
        }
        let silent = inquiry.waited.so_far() > patience;
        silent.then(|| (inquiry.peer, std::mem::take(&mut inquiry.passed)))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Communicator, Error, Options};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    /// Longer than a rank gets no processor: of one that answers nothing meanwhile it would be said that it is silent.
    const DEADLINE: Duration = Duration::from_secs(2);

    /// Two threads of each rank wait for each other, and a third beside them gets further.
    #[test]
    fn who_gets_further_elsewhere_is_not_waited_for_for_ever() {
        const MOST: usize = 2000;
        let options = Options { deadline: DEADLINE, ..Options::default() };
        let beats = &AtomicUsize::new(0);
        let ends = Communicator::on_threads(2, options, |comm| {
            std::thread::scope(|scope| {
                let rank = comm.rank();
                let [other, busy] = [1, 2].map(|_| comm.split(Some(0), rank as i64).unwrap().unwrap());
                let goes_on = scope.spawn(move || {
                    while beats.load(Ordering::Relaxed) < MOST && busy.barrier().is_ok() {
                        if rank == 0 {
                            beats.fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(20));
                        }
                    }
                });
                let stuck = if rank == 0 { comm.barrier() } else { other.barrier() }.unwrap_err();
                let before = beats.swap(MOST, Ordering::Relaxed);
                goes_on.join().unwrap();
                (before, stuck)
            })
        });
        // Of the rank that gave up first.
        let (before, error) = ends.into_iter().min_by_key(|&(before, _)| before).unwrap();
        assert!(before < MOST, "only when nothing got further any more: {error}");
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("while other calls got further"), "{error}");
    }

    /// The rank stands still, and its watch goes on.
    #[test]
    fn a_group_apart_does_not_answer_for_its_rank() {
        const MOST: usize = 500;
        let options = Options { deadline: DEADLINE, ..Options::default() };
        let beats = &AtomicUsize::new(0);
        Communicator::on_threads(2, options, |comm| {
            std::thread::scope(|scope| {
                let rank = comm.rank();
                let apart = comm.apart().unwrap();
                scope.spawn(move || {
                    while beats.load(Ordering::Relaxed) < MOST && apart.barrier().is_ok() {
                        if rank == 0 {
                            beats.fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(20));
                        }
                    }
                });
                if rank == 0 {
                    let late = comm.barrier().unwrap_err();
                    assert!(matches!(late, Error::Timeout { peer: 1, .. }), "{late}");
                    let before = beats.swap(MOST, Ordering::Relaxed);
                    assert!(before < MOST, "only when there was nothing more to answer");
                }
            })
        });
    }
}
