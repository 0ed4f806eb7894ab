//! How a group ends: in order, with a farewell; or by giving up, with a notice to the peers. And how the worker ends
//! after the last group. All of it is bounded in time whatever the peers do.
//!
//! A rank that ends its worker first tells every peer that it is connected to, and keeps moving messages until each has
//! confirmed, is leaving as well, or is gone: until then a peer may still be about to take what was sent, or to answer,
//! and over TCP an answer to a closed connection would take back what is on its way.

use super::UcxTransport;
use super::context::Worker;
use super::members::Members;
use super::session::{State, Word};
use crate::error::Error;
use crate::transport::Transport;
use std::ptr::null_mut;
use std::time::{Duration, Instant};
use ucx_sys::{Posted, UCS_INPROGRESS, UCS_OK};

/// How long a rank that leaves waits for living peers to take what it sent.
const LINGER: Duration = Duration::from_secs(30);
/// How long a rank that failed does so.
const LINGER_FAILED: Duration = Duration::from_millis(300);
/// How long connections may take to close once peers have confirmed.
const CLOSING: Duration = Duration::from_secs(5);
/// Between two looks.
const NAP: Duration = Duration::from_micros(20);

impl UcxTransport {
    /// Tells the peers that this rank gives up, and why.
    pub(super) fn announce_failure(&mut self, why: &Error) {
        let text = why.to_string();
        self.announced = true;
        self.tell_peers(Word::Failure, &text, |state, peer| !state.is_gone(peer));
        self.members.lost.get_or_insert_with(|| why.clone());
        self.wait(Instant::now() + LINGER_FAILED, |this| match this.session.turn() {
            Ok(mut state) => state.settle_outgoing(),
            Err(_) => true,
        });
    }

    /// Says something to the members that are still there and that `wanted` accepts.
    fn tell_peers(&mut self, word: Word, text: &str, wanted: fn(&mut State, usize) -> bool) {
        let Ok(mut state) = self.session.turn() else { return };
        let Members { rank, ranks, numbers, farewells, .. } = &self.members;
        for (member, &peer) in ranks.iter().enumerate() {
            if member != *rank && !farewells.has_left(member) && wanted(&mut state, peer) {
                // A peer that cannot be told finds out by itself.
                let _ = state.say(peer, word, numbers[member], text);
            }
        }
    }

    /// Moves things forward until `done` or the deadline; whether it was done.
    fn wait(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            let moved = self.session.turn().is_ok_and(|state| state.worker.progress());
            if Instant::now() > until {
                return false;
            }
            if !moved {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Moves all messages forward; whether none is under way any more.
    fn settle(&mut self) -> bool {
        match self.session.turn() {
            Ok(state) => self.requests.settle(&state.worker),
            Err(_) => true,
        }
    }

    /// Ends the group, in order where nothing was lost. Afterwards this process touches no memory of its requests any
    /// more.
    pub(super) fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        // Who has failed in one group and leaves another does not leave in order: peers who wait there hear why.
        if self.members.lost.is_none() {
            self.members.lost = self.session.any_turn().cause.as_ref().map(Error::in_another_group);
        }
        let failed = self.members.lost.is_some() || std::thread::panicking();
        if let Some(why) = self.members.lost.clone().filter(|_| !self.announced) {
            // Or else peers would take the end of this process for the cause.
            self.announce_failure(&why);
        }
        let until = Instant::now() + if failed { LINGER_FAILED } else { LINGER };
        if let Ok(state) = self.session.turn() {
            self.requests.cancel_receives(&state.worker);
        }
        // Also what has begun to come, because who still sends it would take the farewell for a refusal.
        let settled = self.wait(until, |this| this.settle() || !failed && this.check().is_err());
        if settled && self.members.lost.is_none() && !failed {
            // Only those who could otherwise take the end of this process for a loss.
            self.tell_peers(Word::Farewell, "", |state, peer| {
                let watches = state.local(peer) && state.cards[peer].home != state.cards[state.rank].home;
                watches || !state.endpoints[peer].is_null()
            });
        }
        let until = if self.members.lost.is_some() { Instant::now() + LINGER_FAILED } else { until };
        let settled = self.wait(until, Self::settle);
        let mut state = self.session.any_turn();
        state.free_number(self.members.number());
        state.failed |= self.members.lost.is_some() || failed;
        if state.cause.is_none() {
            state.cause = self.members.lost.clone();
        }
        if !settled {
            // UCX cannot take back a message under way, and its memory is the caller's again from here on.
            state.stay_away();
            self.requests.forget();
        }
    }
}

impl State {
    /// Moves things forward until `done` or the deadline; whether it was done.
    fn wait(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            // A failure to receive notices leaves the deadline.
            let _ = self.listen();
            if done(self) {
                return true;
            }
            let moved = self.worker.progress();
            if Instant::now() > until {
                return false;
            }
            if !moved {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Nothing moves UCX from now on. The others are told before, who may wait for this rank in other groups.
    fn stay_away(&mut self) {
        let why = Error::last_word(self.cause.as_ref());
        for peer in 0..self.cards.len() {
            if peer != self.rank && !self.is_gone(peer) {
                // Who cannot be told finds out by itself.
                let _ = self.say(peer, Word::Absent, 0, &why);
            }
        }
        self.wait(Instant::now() + LINGER_FAILED, State::settle_outgoing);
        self.given_up = true;
    }

    /// Whether `peer` neither sends anything more nor waits for anything of this rank.
    fn is_done_with(&mut self, peer: usize) -> bool {
        peer == self.rank || self.endpoints[peer].is_null() || self.settled[peer] || self.is_gone(peer)
    }

    /// Ends the worker, after the last group. Afterwards nothing of UCX moves any more.
    pub(super) fn close(&mut self) {
        let failed = self.failed || std::thread::panicking();
        let mut settled = false;
        if !self.given_up {
            let until = Instant::now() + if failed { LINGER_FAILED } else { LINGER };
            for peer in 0..self.cards.len() {
                if !self.is_done_with(peer) {
                    // Who cannot be told is gone, or will be taken for it.
                    let _ = self.say(peer, Word::Leaving, 0, "");
                }
            }
            let all = |this: &mut Self| (0..this.cards.len()).all(|peer| this.is_done_with(peer));
            self.wait(until, |this| all(this) && this.settle_outgoing());
            let until = Instant::now() + if failed { LINGER_FAILED } else { CLOSING };
            settled = self.close_connections(until) && self.take_back_notice(until);
            settled &= self.wait(until, |this| this.settle_outgoing());
        }
        if settled {
            self.worker.destroy();
        } else {
            // UCX 1.13 ends the process if a worker goes with something under way. Left alone, it does nothing more.
            self.worker.abandon();
            std::mem::forget(std::mem::take(&mut self.notice));
            std::mem::forget(std::mem::take(&mut self.outgoing));
        }
    }

    /// Closes every connection, with a flush where the peer can still take it; whether all are closed.
    fn close_connections(&mut self, until: Instant) -> bool {
        let mut closing = Vec::new();
        for peer in 0..self.endpoints.len() {
            let endpoint = std::mem::replace(&mut self.endpoints[peer], null_mut());
            if endpoint.is_null() {
                continue;
            }
            // Forcing is allowed only where losses are reported, and needed only where one was.
            let force = self.failures.of(peer) != UCS_OK;
            if let Posted::Pending(request) = self.worker.close(endpoint, force) {
                closing.push(request);
            }
        }
        self.wait(until, |this| {
            let worker: &Worker = &this.worker;
            // SAFETY: requests of this worker that were not yet reported complete.
            closing.retain(|&request| unsafe { worker.finished(request) == UCS_INPROGRESS });
            closing.is_empty()
        })
    }

    /// Takes back the receive of the next notice; whether it is over.
    fn take_back_notice(&mut self, until: Instant) -> bool {
        let request = std::mem::replace(&mut self.notice_request, null_mut());
        if request.is_null() {
            return true;
        }
        // SAFETY: posted by `await_notice` and not yet reported complete.
        unsafe { self.worker.cancel(request) };
        self.wait(until, |this| {
            // SAFETY: as above; once it is complete the loop ends.
            unsafe { this.worker.finished(request) != UCS_INPROGRESS }
        })
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.close();
    }
}
