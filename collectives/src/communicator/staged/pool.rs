//! Page-locked memory for calls on their way, kept and reused, so that a steady state takes none.

use crate::buffer::{Memory, Place};
use crate::communicator::Communicator;
use crate::device::{Queue, SharedQueue, Streams};
use crate::error::Result;
use crate::ledger::Account;

/// One piece, lent to one call at a time.
pub(super) struct Staging<E> {
    memory: Memory,
    /// What was in it is back on the device.
    raised: E,
}

impl<E> Staging<E> {
    pub fn start(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }

    pub fn raised(&self) -> &E {
        &self.raised
    }
}

/// All pieces that are not lent. Some may still be copied from, but before anything is copied to them again.
pub(super) struct Pool<E>(Vec<Staging<E>>);

impl<E> Default for Pool<E> {
    fn default() -> Self {
        Pool(Vec::with_capacity(16))
    }
}

/// Pieces are whole pages.
const PAGE: usize = 4096;

impl<E> Pool<E> {
    /// A piece of at least `bytes`, or none for none.
    pub fn take<Q: Streams<Event = E>>(
        &mut self,
        bytes: usize,
        queue: &SharedQueue<Q>,
        host: &Communicator,
        account: &Account,
    ) -> Result<Option<Staging<E>>> {
        if bytes == 0 {
            return Ok(None);
        }
        let fits = |i: &usize| self.0[*i].memory.bytes() >= bytes;
        let smallest = (0..self.0.len()).filter(fits).min_by_key(|&i| self.0[i].memory.bytes());
        if let Some(i) = smallest {
            return Ok(Some(self.0.swap_remove(i)));
        }
        let bytes = bytes.next_multiple_of(PAGE);
        // Memory that peers read directly saves the engine a copy; it consists of whole pages.
        let shared = host.alloc::<u8>(bytes)?;
        let memory = match shared.place() {
            Place::Shared { .. } => queue.clone().page_lock(shared.into_memory())?,
            _ => queue.clone().host_memory(bytes)?,
        };
        let memory = memory.booked(account);
        Ok(Some(Staging { memory, raised: queue.event()? }))
    }

    /// The compute queue already comes after the last copy from it, and so does every later call, which comes after the
    /// compute queue.
    pub fn give_back(&mut self, staging: Staging<E>) {
        self.0.push(staging);
    }
}
