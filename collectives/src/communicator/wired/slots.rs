//! The places of calls in flight: an event for when a call may start and one for when it is done.

use super::wire::Lane;
use crate::device::{SharedQueue, Streams};
use crate::error::Result;
use crate::schedule::Call;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

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

    /// Whether the call is on its way or about to be. What `done` says before all of the call is given is of the last one.
    pub fn under_way<Q: Streams<Event = E>>(&self) -> Result<bool> {
        Ok(self.is_being_given() || !Q::happened(&self.done)?)
    }

    /// The same once there is nothing of this rank's own that it waits for.
    pub fn waits_for_others<Q: Streams<Event = E>>(&self) -> Result<bool> {
        Ok(self.is_being_given() || (!Q::happened(&self.done)? && Q::happened(&self.given)?))
    }

    fn is_being_given(&self) -> bool {
        self.giving.load(Ordering::Acquire)
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
        let slot = Arc::new(Slot { given, done, giving: AtomicBool::new(false), call: Mutex::new(None) });
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

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
