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
use crate::transport::farewell::{self, LINGER_FAILED};
use crate::transport::{Transport, blame};
use crate::watch::Until;
use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::time::Duration;
use ucx_sys::{Posted, UCS_INPROGRESS, UCS_OK};

/// How long connections may take to close once peers have confirmed.
const CLOSING: Duration = Duration::from_secs(5);

impl UcxTransport {
    /// Tells the peers that this rank gives up, and why.
    pub(super) fn announce_failure(&mut self, why: &Error) {
        let text = blame::told(why);
        self.announced = true;
        if let Ok(mut state) = self.session.turn() {
            let present = self.members.present(&mut state);
            state.announce(Word::Failure, &text, |peer| present.get(&peer).copied());
        }
        self.members.lost.get_or_insert_with(|| why.clone());
        self.wait(&mut Until::after(LINGER_FAILED), |this| match this.session.turn() {
            Ok(mut state) => state.settle_outgoing(),
            Err(_) => true,
        });
    }

    /// Takes leave of the members that are still there and could else take the end of this process for a loss.
    fn take_leave(&mut self) {
        let Ok(mut state) = self.session.turn() else { return };
        for (peer, number) in self.members.present(&mut state) {
            let watches = state.local(peer) && state.cards[peer].home != state.cards[state.rank].home;
            if watches || state.is_met(peer) {
                // A peer that cannot be told finds out by itself.
                let _ = state.say(peer, Word::Farewell, number, "");
            }
        }
    }

    /// Moves things forward until `done` or the deadline; whether it was done.
    fn wait(&mut self, until: &mut Until, done: impl FnMut(&mut Self) -> bool) -> bool {
        let progress = |this: &mut Self| this.session.turn().is_ok_and(|state| state.worker.progress());
        farewell::wait(self, until, progress, done)
    }

    /// Moves all messages forward; whether none is under way any more.
    fn settle(&mut self) -> bool {
        match self.session.turn() {
            Ok(state) => self.requests.settle(&state.worker),
            Err(_) => true,
        }
    }

    /// Whether messages are under way, and every rank that they are for has left the group: nobody takes them any more.
    fn is_done_with_all(&self) -> bool {
        let mut peers = self.requests.peers().peekable();
        peers.peek().is_some() && peers.all(|peer| self.members.farewells.is_done_with(peer))
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
        if std::thread::panicking() {
            // The process may live on, and would be waited for.
            self.members.lost.get_or_insert_with(|| Error::GivenUp("panicked".into()));
        }
        let failed = self.members.lost.is_some();
        if let Some(why) = self.members.lost.clone().filter(|_| !self.announced) {
            // Or else peers would take the end of this process for the cause.
            self.announce_failure(&why);
        }
        let linger = self.session.any_turn().linger;
        let mut until = Until::after(if failed { LINGER_FAILED } else { linger });
        if let Ok(state) = self.session.turn() {
            self.requests.cancel_receives(&state.worker);
        }
        // Also what has begun to come, because who still sends it would take the farewell for a refusal.
        self.wait(&mut until, |this| {
            // A peer that gives up now must not be waited for, nor those that have left without taking anything more.
            this.settle() || !failed && (this.check().is_err() || this.is_done_with_all())
        });
        if self.members.lost.is_none() && !self.settle() {
            let Members { rank, ranks, farewells, .. } = &self.members;
            let lost = farewells.untaken(self.requests.peers(), *rank, |member| ranks[member], linger);
            self.members.lost = lost;
        }
        if self.members.lost.is_none() {
            self.take_leave();
        }
        if let Some(why) = self.members.lost.clone().filter(|_| !self.announced) {
            // Found only now. This process may end before the one that is to blame.
            self.announce_failure(&why);
        }
        let settled = self.wait(&mut Until::after(LINGER_FAILED), Self::settle);
        let mut state = self.session.any_turn();
        state.free_number(self.members.number());
        state.failed |= self.members.lost.is_some() || failed;
        if state.cause.is_none() {
            state.cause = self.members.lost.clone();
        }
        if !settled {
            // UCX cannot take back a message under way, and its memory is the caller's again from here on.
            state.stay_away();
            state.cut(|worker| self.requests.settle(worker));
            self.requests.forget();
        }
    }
}

impl State {
    /// Moves things forward until `done` or the deadline; whether it was done.
    fn wait(&mut self, until: &mut Until, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let done = |this: &mut Self| {
            // A failure to receive notices leaves the deadline.
            let _ = this.listen();
            done(this)
        };
        farewell::wait(self, until, |this| this.worker.progress(), done)
    }

    /// Nothing moves UCX from now on. The others are told before, who may wait for this rank in other groups.
    pub(super) fn stay_away(&mut self) {
        let why = Error::last_word(self.cause.as_ref());
        self.announce(Word::Absent, &why, |_| Some(0));
        self.wait(&mut Until::after(LINGER_FAILED), State::settle_outgoing);
        self.given_up = true;
    }

    /// Says that this rank has failed, to peers with a number of the group: once those have heard to whom there is a
    /// connection, also to others, where one can be made.
    fn announce(&mut self, word: Word, text: &str, number: impl Fn(usize) -> Option<u16>) {
        self.announcing = true;
        for turn in 0..2 {
            let peers = std::mem::take(&mut self.in_turn()[turn]).into_iter();
            let peers: Vec<_> = peers.filter_map(|peer| Some((peer, number(peer)?))).collect();
            if turn > 0 && !peers.is_empty() {
                self.wait(&mut Until::after(LINGER_FAILED), State::settle_outgoing);
            }
            for (peer, number) in peers {
                if !self.is_gone(peer) {
                    // Who cannot be told finds out by itself.
                    let _ = self.say(peer, word, number, text);
                }
            }
        }
        self.announcing = false;
    }

    fn in_turn(&self) -> [Vec<usize>; 2] {
        let all = 0..self.cards.len();
        let connected: Vec<_> = self.endpoints.iter().map(|endpoint| !endpoint.is_null()).collect();
        let hosts: Vec<_> = self.cards.iter().map(|card| card.home.host).collect();
        let lost: Vec<_> = all.map(|peer| self.failures.of(peer) != UCS_OK).collect();
        in_turn(self.rank, &connected, &hosts, &lost)
    }

    /// Ends the connections that UCX ends by force, until the messages of this rank have `settled`: a network card would still
    /// fetch what a peer has announced, or a peer's put what was announced to it, in memory that has another use by then.
    fn cut(&mut self, mut settled: impl FnMut(&Worker) -> bool) {
        let mut until = Until::after(LINGER_FAILED);
        let reporting = |this: &Self, peer| this.reports(peer).then_some(true);
        self.close_connections(&mut until, reporting);
        self.wait(&mut until, |this| settled(&this.worker));
    }

    /// Whether there is a connection to `peer` or from it: one that has spoken to this rank may wait for its end.
    fn is_met(&self, peer: usize) -> bool {
        !self.endpoints[peer].is_null() || self.spoke[peer]
    }

    /// Whether `peer` neither sends anything more nor waits for anything of this rank.
    fn is_done_with(&mut self, peer: usize) -> bool {
        peer == self.rank || !self.is_met(peer) || self.settled[peer] || self.is_gone(peer)
    }

    /// Ends the worker, after the last group. Afterwards nothing of UCX moves any more.
    pub(super) fn close(&mut self) {
        let failed = self.failed || std::thread::panicking();
        let mut settled = false;
        if !self.given_up {
            let mut until = Until::after(if failed { LINGER_FAILED } else { self.linger });
            let mut told = vec![false; self.cards.len()];
            let parted = self.wait(&mut until, |this| {
                let mut all = true;
                for (peer, told) in told.iter_mut().enumerate() {
                    let done = this.is_done_with(peer);
                    // Some speak to this rank for the first time only now. Who cannot be told is gone, or will be taken for it.
                    if !done && !std::mem::replace(told, true) {
                        this.parting[peer] = this.say(peer, Word::Leaving, 0, "").is_ok();
                    }
                    all &= done;
                }
                all && this.settle_outgoing()
            });
            let mut until = Until::after(if failed || !parted { LINGER_FAILED } else { CLOSING });
            // Forcing is allowed only where losses are reported, and needed only where one was.
            let lost = |this: &Self, peer| Some(this.failures.of(peer) != UCS_OK);
            settled = self.close_connections(&mut until, lost) && self.take_back_notice(&mut until);
            settled &= self.wait(&mut until, |this| this.settle_outgoing());
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

    /// Closes the connections for which `how` says whether by force, and else with a flush; whether all are closed.
    fn close_connections(&mut self, until: &mut Until, how: fn(&Self, usize) -> Option<bool>) -> bool {
        let (mut closing, mut refused) = (Vec::new(), false);
        for peer in 0..self.endpoints.len() {
            let Some(force) = how(self, peer) else { continue };
            let endpoint = std::mem::replace(&mut self.endpoints[peer], null_mut());
            if endpoint.is_null() {
                continue;
            }
            match self.worker.close(endpoint, force) {
                Posted::Done => {}
                Posted::Pending(request) => closing.push(request),
                Posted::Failed(_) => refused = true,
            }
        }
        let closed = self.wait(until, |this| {
            let worker: &Worker = &this.worker;
            // SAFETY: requests of this worker that were not yet reported complete.
            closing.retain(|&request| unsafe { worker.finished(request) == UCS_INPROGRESS });
            closing.is_empty()
        });
        closed && !refused
    }

    /// Takes back the receive of the next notice; whether it is over.
    fn take_back_notice(&mut self, until: &mut Until) -> bool {
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

/// Which peers hear first that this rank, `own`, has failed, because they are `connected`, and which then: none of another
/// host where one is `lost`, because over TCP to connect takes two minutes where nobody answers any more.
fn in_turn(own: usize, connected: &[bool], hosts: &[u64], lost: &[bool]) -> [Vec<usize>; 2] {
    let of_lost = (0..hosts.len()).filter(|&peer| lost[peer]).map(|peer| hosts[peer]);
    let silent: BTreeSet<u64> = of_lost.filter(|&host| host != hosts[own]).collect();
    let others = (0..hosts.len()).filter(|&peer| peer != own);
    let (first, mut then): (Vec<_>, Vec<_>) = others.partition(|&peer| connected[peer]);
    then.retain(|&peer| !silent.contains(&hosts[peer]));
    [first, then]
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Tag;
    use crate::transport::ucx::Start;
    use std::sync::mpsc::channel;

    /// Says to a process that it is this test's.
    const ROLE: &str = "CARAVAN_TEST_CUT";

    #[test]
    fn who_fails_connects_to_no_host_where_a_rank_is_lost() {
        // Two ranks on each of three hosts and three on this one; it is connected to one of each.
        let hosts = [7, 7, 7, 1, 1, 2, 2, 3, 3];
        let connected = [false, true, false, true, false, true, false, true, false];
        let turns = |lost: &[usize]| {
            in_turn(0, &connected, &hosts, &[0, 1, 2, 3, 4, 5, 6, 7, 8].map(|p| lost.contains(&p)))
        };
        assert_eq!(turns(&[]), [vec![1, 3, 5, 7], vec![2, 4, 6, 8]]);
        assert_eq!(turns(&[5]), [vec![1, 3, 5, 7], vec![2, 4, 8]]);
        assert_eq!(turns(&[1, 3, 8]), [vec![1, 3, 5, 7], vec![2, 6]]);
    }

    #[test]
    fn a_message_that_is_not_taken_ends_with_its_connection() {
        if let Err(why) = ucx_sys::Ucp::load() {
            return harness::skip(&why);
        }
        if std::env::var_os(ROLE).is_some() {
            return cut_between_threads();
        }
        // In a process of its own: only there are variables its own.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "transport::ucx::closing::tests::a_message_that_is_not_taken_ends_with_its_connection",
            ])
            .envs([(ROLE, "1"), ("UCX_TLS", "tcp"), ("UCX_WARN_UNUSED_ENV_VARS", "n")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    fn cut_between_threads() {
        let start = Start::default();
        let ((to_1, from_0), (to_0, from_1)) = (channel::<Vec<u8>>(), channel::<Vec<u8>>());
        let (ended, over) = channel::<()>();
        // Whoever fails lets go of what the other waits for.
        std::thread::scope(move |scope| {
            scope.spawn(move || {
                let mut exchange = |mine: Vec<u8>| {
                    to_0.send(mine.clone()).unwrap();
                    Ok(vec![from_0.recv().unwrap(), mine])
                };
                let _idle = UcxTransport::connect(1, 2, &start, &mut exchange).unwrap();
                let _ = over.recv();
            });
            let mut exchange = |mine: Vec<u8>| {
                to_1.send(mine.clone()).unwrap();
                Ok(vec![mine, from_1.recv().unwrap()])
            };
            let mut t = UcxTransport::connect(0, 2, &start, &mut exchange).unwrap();
            let message = vec![1u8; 4 << 20];
            // SAFETY: `message` stays until it has ended.
            unsafe { t.send(1, Tag(7), message.as_ptr(), message.len()).unwrap() };
            assert!(!t.wait(&mut Until::after(LINGER_FAILED), UcxTransport::settle), "nobody takes it");
            let mut state = t.session.turn().unwrap();
            state.cut(|worker| t.requests.settle(worker));
            assert!(t.requests.settle(&state.worker), "a card could still read the message");
            drop(state);
            ended.send(()).unwrap();
        });
    }
}
