//! Which call holds up which, and whom a call is said to wait for.

use super::Engine;
use super::flight::Flight;
use crate::error::Error;
use std::time::Duration;

/// Some of the calls in flight, each in the order of their start.
pub(super) struct Sorted {
    collectives: Vec<u32>,
    /// Messages that are not wholly posted.
    unposted: Vec<u32>,
}

impl Sorted {
    pub fn with_room(calls: usize) -> Self {
        Sorted { collectives: Vec::with_capacity(calls), unposted: Vec::with_capacity(calls) }
    }

    /// Makes room for so many calls in all.
    pub fn make_room(&mut self, calls: usize) {
        for list in [&mut self.collectives, &mut self.unposted] {
            list.reserve(calls - list.len());
        }
    }

    /// Takes in a call that begins.
    #[inline(always)]
    pub fn add(&mut self, id: u32, flight: &mut Flight) {
        flight.unposted = flight.is_message();
        if flight.unposted { &mut self.unposted } else { &mut self.collectives }.push(id);
    }

    /// Strikes out one that is over.
    #[inline(always)]
    pub fn remove(&mut self, id: u32, flight: &Flight) {
        match flight.is_message() {
            true if flight.unposted => remove(&mut self.unposted, id),
            true => {}
            false => remove(&mut self.collectives, id),
        }
    }

    /// Strikes a message out of those that are not wholly posted, once it is.
    #[inline(always)]
    pub fn note_posted(&mut self, id: u32, flight: &mut Flight) {
        if flight.unposted && flight.is_posted() {
            flight.unposted = false;
            remove(&mut self.unposted, id);
        }
    }

    pub fn clear(&mut self) {
        self.collectives.clear();
        self.unposted.clear();
    }
}

/// Takes a call out of a list that it is in.
#[inline(always)]
pub(super) fn remove(list: &mut Vec<u32>, id: u32) {
    match list[..] {
        [_] => list.clear(),
        _ => list.retain(|&other| other != id),
    }
}

impl Engine {
    /// One that is looked at for the sake of another.
    #[inline(always)]
    fn other(&self, id: u32) -> &Flight {
        #[cfg(test)]
        tests::LOOKED.set(tests::LOOKED.get() + 1);
        &self.flights[id as usize]
    }

    /// The first published round of calls before `id` that this rank has not finished.
    pub(super) fn floor(&self, id: u32) -> u64 {
        let rounds = |flight: &Flight| flight.schedule.as_ref().map_or(0, |s| s.rounds);
        let flight = &self.flights[id as usize];
        // Only who finishes rounds asks; nothing is published where peers' memory cannot be read.
        if self.group.direct.is_none() || rounds(flight) == 0 {
            return u64::MAX;
        }
        let own = flight.state.base;
        // A call's rounds come after those of all that were started before it: the first that has some left has the first.
        let unfinished = self.sorted.collectives.iter().find_map(|&other| {
            let flight = self.other(other);
            let (base, finished) = (flight.state.base, flight.state.finished);
            (finished < rounds(flight)).then_some((base, base + finished as u64))
        });
        unfinished.filter(|&(base, _)| base < own).map_or(u64::MAX, |(_, first)| first)
    }

    /// Whether a collective is so many ahead of the oldest under way that the transport could take a message of the one for
    /// one of the other. It goes on once that one is over: they start in the same order on all ranks, so none of them waits
    /// for a later one.
    pub(super) fn is_too_far(&mut self, id: u32) -> bool {
        let flight = &self.flights[id as usize];
        if flight.is_message() {
            return false;
        }
        let Some(oldest) = self.oldest() else { return false };
        let (first, holds_up) = (oldest.state.number(), oldest.blocked_on);
        let number = flight.state.number();
        let peer = match number >= first + self.window {
            true => Some(holds_up),
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
        let before = self.sorted.unposted.iter().take_while(|&&other| other != id);
        let first = before.map(|&other| self.other(other)).find(|other| same(other) && !other.is_posted());
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
        self.sorted.collectives.first().map(|&id| self.other(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::engine::{Ends, Options, Priority};
    use crate::schedule::{Call, Kind};
    use crate::transport::threads;
    use std::cell::Cell;

    thread_local! {
        /// How often a call was looked at for the sake of another.
        pub static LOOKED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn messages_that_nobody_sends_are_in_the_way_of_no_look() {
        const MANY: usize = 1000;
        for (window, direct) in [(u64::MAX, None), (1 << 20, None), (u64::MAX, Some(usize::MAX))] {
            let mut got = [0u8; MANY];
            let [first, _second] = <[_; 2]>::try_from(threads::group(2)).ok().expect("two ranks");
            let mut engine = Engine::new(Box::new(first), Options::default());
            (engine.window, engine.group.direct) = (window, direct);
            LOOKED.set(0);
            let recv = Call { root: 1, ..Call::new(Kind::Recv, DType::U8, 1) };
            for (tag, place) in got.iter_mut().enumerate() {
                let ends = Ends { send: std::ptr::null(), send_bytes: 0, recv: place, recv_bytes: 1 };
                // SAFETY: its place outlives the engine.
                unsafe { engine.start(&recv, &ends, Some(tag as u64), Priority::Low, 0) }.expect("starts");
            }
            let barrier = Call::new(Kind::Barrier, DType::U8, 0);
            // What peers publish this transport has not.
            for _ in 0..if direct.is_none() { MANY } else { 0 } {
                let (send, recv) = (std::ptr::null(), std::ptr::null_mut());
                let ends = Ends { send, send_bytes: 0, recv, recv_bytes: 0 };
                // SAFETY: a barrier has no buffers.
                unsafe { engine.start(&barrier, &ends, None, Priority::Low, 0) }.expect("starts");
            }
            engine.poll(None).expect("nobody fails");
            assert!(LOOKED.get() <= 8 * MANY, "{} of {MANY} in a window of {window}", LOOKED.get());
            let Sorted { collectives, unposted } = &engine.sorted;
            assert_eq!((collectives.len() + MANY, unposted.len()), (engine.order.len(), 0));
        }
    }
}
