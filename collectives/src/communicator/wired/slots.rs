//! The places of calls in flight: an event for when a call may start and one for when it is done.

use super::wire::Lane;
use crate::device::{Queue, SharedQueue, Streams};
use crate::error::Result;
use crate::locked;
use crate::schedule::Call;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Calls in flight that there are places for from the start.
const READY: usize = 32;

/// One call's place.
pub(super) struct Slot<E> {
    /// What the compute queue had been given when the call started.
    pub given: E,
    /// The call is done.
    pub done: E,
    /// The wire is being given the call, which may take it until other ranks have come to theirs.
    giving: AtomicBool,
    /// The call's queues have part of it: what `done` says is of the last call. To give them the rest may take the host until
    /// something is done that they have, which may wait for other ranks.
    partly: AtomicBool,
    pub call: Mutex<Option<Numbered>>,
}

impl<E> Slot<E> {
    /// Gives the wire something of the call.
    pub fn giving<R>(&self, give: impl FnOnce() -> R) -> R {
        self.giving.store(true, Ordering::Release);
        let given = give();
        self.giving.store(false, Ordering::Release);
        given
    }

    /// Gives the call's queues all of it, the last of which is to record `done`; `given` has been recorded.
    pub fn giving_all<R>(&self, give: impl FnOnce() -> R) -> R {
        self.partly.store(true, Ordering::Release);
        let given = give();
        self.partly.store(false, Ordering::Release);
        given
    }

    /// Whether the call is on its way or about to be.
    pub fn under_way<Q: Streams<Event = E>>(&self) -> Result<bool> {
        Ok(self.is_being_given() || !self.is_done::<Q>()?)
    }

    /// The same once there is nothing of this rank's own that it waits for.
    pub fn waits_for_others<Q: Streams<Event = E>>(&self) -> Result<bool> {
        Ok(self.is_being_given() || (!self.is_done::<Q>()? && Q::happened(&self.given)?))
    }

    fn is_being_given(&self) -> bool {
        self.giving.load(Ordering::Acquire)
    }

    fn is_done<Q: Streams<Event = E>>(&self) -> Result<bool> {
        Ok(!self.partly.load(Ordering::Acquire) && Q::happened(&self.done)?)
    }
}

/// The last call in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbered {
    pub call: Call,
    pub lane: Lane,
    /// Among the collectives of its lane, from 1, the same on every rank; 0 for a message.
    pub number: u64,
    /// Among all calls of this rank.
    pub serial: u64,
}

/// What the watch looks at too.
pub(super) type SharedSlots<E> = Arc<Seen<E>>;

pub(super) struct Seen<E> {
    /// All places.
    pub places: Mutex<Vec<Arc<Slot<E>>>>,
    /// By lane: collectives that were started. Places are used anew, so they do not tell.
    pub started: [AtomicU64; 2],
}

/// All places. One that is free again is not used before its last call is done, so that its events are not recorded
/// anew while anything still waits for them.
pub(super) struct Slots<E> {
    all: Vec<Arc<Slot<E>>>,
    /// The same, for the watch.
    shared: SharedSlots<E>,
    free: VecDeque<u32>,
    serial: u64,
}

impl<E: Send + Sync> Slots<E> {
    pub fn new<Q: Streams<Event = E>>(queue: &SharedQueue<Q>) -> Result<Self> {
        let places = Mutex::new(Vec::with_capacity(READY));
        let shared = Arc::new(Seen { places, started: Default::default() });
        let free = VecDeque::with_capacity(READY);
        let mut slots = Slots { all: Vec::new(), shared, free, serial: 0 };
        for _ in 0..READY {
            let id = slots.add(queue)?;
            slots.free.push_back(id);
        }
        Ok(slots)
    }

    fn add<Q: Streams<Event = E>>(&mut self, queue: &SharedQueue<Q>) -> Result<u32> {
        let (given, done) = (queue.event()?, queue.event()?);
        let [giving, partly] = Default::default();
        let slot = Arc::new(Slot { given, done, giving, partly, call: Mutex::new(None) });
        locked(&self.shared.places).push(Arc::clone(&slot));
        self.all.push(slot);
        Ok(self.all.len() as u32 - 1)
    }

    pub fn shared(&self) -> SharedSlots<E> {
        Arc::clone(&self.shared)
    }

    pub fn slot(&self, id: u32) -> &Slot<E> {
        &self.all[id as usize]
    }

    /// The same, to keep while others are used.
    pub fn place(&self, id: u32) -> Arc<Slot<E>> {
        Arc::clone(&self.all[id as usize])
    }

    /// A place for a call.
    pub fn take<Q: Streams<Event = E>>(
        &mut self,
        queue: &SharedQueue<Q>,
        call: Call,
        lane: Lane,
    ) -> Result<u32> {
        let id = match self.free.front() {
            // The first to become free is the first to be done.
            Some(&id) if Q::happened(&self.slot(id).done)? => {
                self.free.pop_front();
                id
            }
            _ => self.add(queue)?,
        };
        let message = call.kind.is_message();
        let started = &self.shared.started[lane as usize];
        let number = if message { 0 } else { started.load(Ordering::Relaxed) + 1 };
        self.serial += 1;
        *locked(&self.slot(id).call) = Some(Numbered { call, lane, number, serial: self.serial });
        if !message {
            started.store(number, Ordering::Release);
        }
        Ok(id)
    }

    pub fn release(&mut self, id: u32) {
        self.free.push_back(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Queue;
    use crate::device::emulation::{EmulatedQueue, Emulator};
    use crate::element::DType;
    use crate::schedule::Kind;

    /// While the host gives a long call it may come to wait for others, and `done` is still that of the last call.
    #[test]
    fn a_call_that_is_given_in_part_is_under_way() {
        let folder = tempfile::tempdir().unwrap();
        let built = Emulator::build(&[], folder.path()).unwrap();
        let Some(emulator) = harness::made_by_cxx("calls over a wire", built) else { return };
        let mut queue = SharedQueue::new(emulator.queue(0));
        let mut slots = Slots::new(&queue).unwrap();
        let call = Call::new(Kind::AllReduce, DType::F32, 4);
        let id = slots.take(&queue, call, Lane::Reductions).unwrap();
        let slot = slots.place(id);
        let seen = || {
            let under_way = slot.under_way::<EmulatedQueue>().unwrap();
            (under_way, slot.waits_for_others::<EmulatedQueue>().unwrap())
        };
        assert_eq!(seen(), (false, false));
        queue.record(&slot.given).unwrap();
        queue.synchronize().unwrap();
        slot.giving_all(|| {
            assert_eq!(seen(), (true, true));
            queue.record(&slot.done).unwrap();
            queue.synchronize().unwrap();
            assert_eq!(seen(), (true, true), "until the host is through");
        });
        assert_eq!(seen(), (false, false));
    }
}
