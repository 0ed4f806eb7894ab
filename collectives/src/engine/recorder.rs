//! What a rank adds to the failure of a call that a peer does not make: of whom something has come in it and of whom nothing,
//! and what the group called before.

use super::Engine;
use super::diverged::in_words_of_the_job;
use super::execute::{State, direct, each};
use crate::error::Error;
use crate::schedule::{Schedule, Step};
use crate::transport::Transport;
use crate::watch::Fingerprint;
use std::fmt::Write;

/// Different calls in a row, of those before, that are told.
const TOLD: usize = 6;
/// Ranks that are named one by one.
const NAMED: usize = 8;

impl Engine {
    /// Of whom something has come in the call `id`, which is under way, and what came before it. Ranks `there` are known to
    /// wait for others.
    pub(super) fn story(&mut self, id: u32, there: &[usize]) -> String {
        let flight = &self.flights[id as usize];
        let (sequence, message) = (flight.state.sequence, flight.is_message());
        let (come, mut missing) = if message { (Vec::new(), Vec::new()) } else { self.who_has_come(id) };
        missing.retain(|rank| !there.contains(rank));
        let call = format!("in this call, number {sequence} of its group");
        let text = match (names(&come), names(&missing)) {
            (None, None) => String::new(),
            (Some(come), None) => format!("; something of {come} has come {call}"),
            (None, Some(missing)) => format!("; nothing of {missing} has come {call}"),
            (Some(come), Some(missing)) => {
                format!("; something of {come} has come {call}, and nothing of {missing}")
            }
        };
        text + &self.calls_before(sequence)
    }

    /// The collectives before the one of number `sequence`, the last of them last.
    fn calls_before(&self, sequence: u64) -> String {
        self.in_words(self.history.last_before(sequence))
    }

    /// These calls, as fingerprints, the last of them last.
    pub(super) fn in_words(&self, calls: impl Iterator<Item = u64>) -> String {
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for call in calls {
            match runs.last_mut() {
                Some((same, times)) if *same == call => *times += 1,
                _ => runs.push((call, 1)),
            }
        }
        let mut text = String::new();
        for (i, &(call, times)) in runs.iter().skip(runs.len().saturating_sub(TOLD)).enumerate() {
            text.push_str(if i == 0 { "; before it came " } else { ", then " });
            if times > 1 {
                // Writing to a string does not fail.
                let _ = write!(text, "{times} times ");
            }
            text.push_str(&in_words_of_the_job(Fingerprint::from_bits(call), &*self.transport));
        }
        text
    }

    /// The job's ranks of which this one awaits something in a call: those of which something has come, and the others. The
    /// call goes no further afterwards.
    fn who_has_come(&mut self, id: u32) -> (Vec<usize>, Vec<usize>) {
        let flight = &mut self.flights[id as usize];
        let (mut come, mut missing) = (Vec::new(), Vec::new());
        // What is waited for later may be here already.
        let transport = &mut *self.transport;
        flight.state.posted.retain(|p| !p.incoming || !matches!(p.is_over(transport), Ok(true)));
        let Some(schedule) = flight.schedule.as_deref() else { return (come, missing) };
        for peer in (0..self.group.size).filter(|&peer| peer != self.group.rank) {
            match flight.state.has_come(schedule, peer, &mut *self.transport) {
                Some(true) => come.push(self.transport.job_rank(peer)),
                Some(false) => missing.push(self.transport.job_rank(peer)),
                None => {}
            }
        }
        come.sort_unstable();
        missing.sort_unstable();
        (come, missing)
    }
}

impl State {
    /// Whether anything of `peer` has come in this call; nothing if this rank awaits nothing of it, or not yet.
    fn has_come(&self, schedule: &Schedule, peer: usize, transport: &mut dyn Transport) -> Option<bool> {
        let (rank, size) = (schedule.group.rank, schedule.group.size);
        let (mut received, mut awaited) = (0, None);
        for step in schedule.steps.iter().take(self.at + 1) {
            match *step {
                Step::Recv { from, .. } if from == peer => received += 1,
                Step::Await { round, peers, .. } if each(peers, rank, size).any(|p| p == peer) => {
                    awaited = awaited.or(Some(round));
                }
                _ => {}
            }
        }
        // The step that comes next has not been taken.
        if matches!(schedule.steps.get(self.at), Some(Step::Recv { from, .. }) if *from == peer) {
            received -= 1;
        }
        let under_way = self.posted.iter().filter(|posted| posted.incoming && posted.peer == peer).count();
        let published = awaited.map(|round| {
            let seen = self.peers.get(peer).is_some_and(|peer| peer.seen > 0);
            seen || matches!(direct(transport).published(peer, self.base + round as u64), Ok(Some(_)))
        });
        match received {
            0 => published,
            received => Some(received > under_way || published == Some(true)),
        }
    }
}

/// Adds to a divergence what came before it.
pub(super) fn with_past(error: Error, engine: &Engine) -> Error {
    match error {
        Error::Diverged { sequence, rank, mine, peer, theirs, past } if past.is_empty() => {
            Error::Diverged { sequence, rank, mine, peer, theirs, past: engine.calls_before(sequence) }
        }
        error => error,
    }
}

/// `rank 3`, `ranks 1, 2 and 5`; nothing for none.
fn names(ranks: &[usize]) -> Option<String> {
    let shown: Vec<String> = ranks.iter().take(NAMED).map(usize::to_string).collect();
    match &shown[..] {
        [] => None,
        [one] => Some(format!("rank {one}")),
        shown if shown.len() < ranks.len() => {
            Some(format!("ranks {} and {} more", shown.join(", "), ranks.len() - shown.len()))
        }
        [first @ .., last] => Some(format!("ranks {} and {last}", first.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_while_they_are_few() {
        assert_eq!(names(&[]), None);
        assert_eq!(names(&[3]).as_deref(), Some("rank 3"));
        assert_eq!(names(&[1, 2, 5]).as_deref(), Some("ranks 1, 2 and 5"));
        let many: Vec<usize> = (0..20).collect();
        assert_eq!(names(&many).as_deref(), Some("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"));
    }
}
