//! What it means that a peer has called something else, or the same in another way, in words that name both sides.

use super::execute::State;
use crate::error::{Error, Result};
use crate::schedule::{Remote, Schedule, Space, Step};
use crate::transport::{HEARSAY, Transport};
use crate::watch::Fingerprint;
use std::time::Instant;

/// A peer has not called the same.
#[cold]
pub(super) fn differs(state: &State, transport: &dyn Transport, peer: usize, theirs: Fingerprint) -> Error {
    let words = |call| in_words_of_the_job(call, transport);
    between(state, transport, peer, words(state.fingerprint), words(theirs))
}

pub(super) fn in_words_of_the_job(call: Fingerprint, transport: &dyn Transport) -> String {
    call.in_job(transport.size(), |member| transport.job_rank(member)).to_string()
}

/// This rank calls `mine` and `peer`, of this group, `theirs`.
fn between(state: &State, transport: &dyn Transport, peer: usize, mine: String, theirs: String) -> Error {
    let (rank, peer) = (transport.job_rank(transport.rank()), transport.job_rank(peer));
    Error::Diverged { sequence: state.sequence, rank, mine, peer, theirs, past: String::new() }
}

/// A peer calls the same and yet shows less than is read of it: it goes about it in another way.
#[cold]
pub(super) fn published_less(
    schedule: &Schedule,
    state: &State,
    transport: &dyn Transport,
    remote: Remote,
    bytes: usize,
) -> Error {
    let call = in_words_of_the_job(state.fingerprint, transport);
    let mine = format!("{call}, {bytes} bytes at once by {}", schedule.choice.algorithm);
    let theirs = format!("{call} by another algorithm or in other pieces");
    between(state, transport, remote.peer as usize, mine, theirs)
}

/// A transport knows lengths only; this adds what the calls were. The first message of the peer says what it called: its
/// first bytes come also where it has another length.
pub(super) fn in_words(
    error: Error,
    schedule: &Schedule,
    state: &mut State,
    transport: &mut dyn Transport,
    peer: usize,
) -> Error {
    let Error::Diverged { mine, theirs, .. } = error else { return error };
    if mine.is_empty() {
        // The transport knows what the peer called.
        return between(state, transport, peer, in_words_of_the_job(schedule.fingerprint, transport), theirs);
    }
    let frame = schedule.steps.iter().find_map(|step| match *step {
        Step::Recv { from, .. } if from == peer => step.fingerprint_at(),
        _ => None,
    });
    let called = match frame.map_or(Ok(None), |at| first_of(peer, at, state, transport)) {
        Ok(called) => called,
        Err(loss) => return loss,
    };
    let (mine, theirs) = match called.filter(|called| *called != state.fingerprint) {
        Some(called) => {
            (in_words_of_the_job(state.fingerprint, transport), in_words_of_the_job(called, transport))
        }
        None => (
            format!("{}, for which it expects {mine}", schedule.call.in_job(|m| transport.job_rank(m))),
            format!("something for which it sent {theirs}"),
        ),
    };
    between(state, transport, peer, mine, theirs)
}

/// The fingerprint that the first message of `peer` brings to `at` in scratch, if it comes: a later one, of which nothing
/// had to be fetched, may have been here before it. A loss explains what happened better: the peer may have noticed first.
fn first_of(
    peer: usize,
    at: usize,
    state: &mut State,
    transport: &mut dyn Transport,
) -> Result<Option<Fingerprint>> {
    let until = Instant::now() + HEARSAY;
    let mut loss = None;
    loop {
        // SAFETY: the schedule reserved these eight bytes, and their receive has cleared them.
        let header = unsafe { state.read(Space::Scratch, at).cast::<u64>().read_unaligned() };
        if header != 0 {
            return Ok(Some(Fingerprint::from_bits(header)));
        }
        if let Some(loss) = loss {
            return Err(loss);
        }
        if state.posted.iter().all(|posted| posted.peer != peer) || Instant::now() > until {
            return Ok(None);
        }
        state.posted.retain(|posted| {
            posted.peer != peer
                || match posted.is_over(transport) {
                    Ok(done) => !done,
                    // Another message of the peer's that has another length.
                    Err(Error::Diverged { .. }) => false,
                    Err(error) => {
                        loss.get_or_insert(error);
                        false
                    }
                }
        });
        transport.check()?;
        std::thread::yield_now();
    }
}
