//! Which call holds up which, and whom a call is said to wait for.

use super::Engine;
use super::flight::Flight;
use crate::error::Error;
use std::time::Duration;

impl Engine {
    /// The first published round of calls before `id` that this rank has not finished.
    pub(super) fn floor(&self, id: u32) -> u64 {
        // Nothing is published where peers' memory cannot be read.
        if self.group.direct.is_none() {
            return u64::MAX;
        }
        let own = self.flights[id as usize].state.base;
        // A call's rounds come after those of all that were started before it: the first that has some left has the first.
        let unfinished = self.order.iter().find_map(|&other| {
            let flight = &self.flights[other as usize];
            let rounds = flight.schedule.as_ref().map_or(0, |s| s.rounds);
            let (base, finished) = (flight.state.base, flight.state.finished);
            (finished < rounds).then_some((base, base + finished as u64))
        });
        unfinished.filter(|&(base, _)| base < own).map_or(u64::MAX, |(_, first)| first)
    }

    /// Whether a collective is so many ahead of the oldest under way that the transport could take a message of the one for
    /// one of the other. It goes on once that one is over: they start in the same order on all ranks, so none of them waits
    /// for a later one.
    pub(super) fn is_too_far(&mut self, id: u32) -> bool {
        let Some(oldest) = self.oldest() else { return false };
        let (first, holds_up) = (oldest.state.number(), oldest.blocked_on);
        let flight = &self.flights[id as usize];
        let number = flight.state.number();
        let peer = match flight.is_message() {
            true => None,
            false if number >= first + self.window => Some(holds_up),
            false => self.compared_first(number),
        };
        if let Some(peer) = peer {
            self.flights[id as usize].blocked_on = peer;
        }
        peer.is_some()
    }

    /// Whether a user's message that is not begun would go before one that was begun earlier between the same ranks under the
    /// same tag, of which not all is posted: transports tell them apart by their order only.
    pub(super) fn overtakes(&mut self, id: u32) -> bool {
        let flight = &self.flights[id as usize];
        if flight.state.at > 0 || !flight.is_message() {
            return false;
        }
        let same = |other: &Flight| {
            let call = |flight: &Flight| flight.schedule.as_ref().map(|s| (s.call.kind, s.call.root));
            other.state.tag == flight.state.tag && call(other) == call(flight)
        };
        let before = self.order.iter().take_while(|&&other| other != id);
        let first = before
            .map(|&other| &self.flights[other as usize])
            .find(|other| same(other) && !other.is_posted());
        let Some(peer) = first.map(|first| first.blocked_on) else { return false };
        self.flights[id as usize].blocked_on = peer;
        true
    }

    /// `peer`, a rank of the job that a call waits for, `how` it is, has not taken part.
    pub(super) fn timeout(
        &mut self,
        id: u32,
        how: &str,
        peer: usize,
        after: Duration,
        there: &[usize],
    ) -> Error {
        let host =
            self.transport.host(peer).map_or(String::new(), |host| format!("; rank {peer} runs on {host}"));
        let past = host + &self.story(id, there);
        let job_rank = |member| self.transport.job_rank(member);
        let schedule = self.flights[id as usize].schedule.as_ref();
        let call = schedule.map_or(String::new(), |s| s.call.in_job(job_rank).to_string());
        Error::Timeout { what: call + how, rank: job_rank(self.group.rank), peer, after, past }
    }

    /// The rank that a call waits for. Where that is this one, an earlier call of its is in the way.
    pub(super) fn waited_for(&self, id: u32) -> usize {
        match self.flights[id as usize].blocked_on {
            peer if peer == self.group.rank => self.oldest_waits_for().unwrap_or(peer),
            peer => peer,
        }
    }

    /// The rank that the oldest collective waits for.
    pub(super) fn oldest_waits_for(&self) -> Option<usize> {
        self.oldest().map(|flight| flight.blocked_on)
    }

    /// The oldest collective under way. Messages are in nobody's way.
    pub(super) fn oldest(&self) -> Option<&Flight> {
        let mut flights = self.order.iter().map(|&id| &self.flights[id as usize]);
        flights.find(|flight| !flight.is_message())
    }
}
