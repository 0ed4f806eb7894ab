//! Page-locked memory for calls on their way, kept and reused, so that a steady state takes none.

use crate::buffer::{Memory, Place};
use crate::communicator::Communicator;
use crate::device::{Queue, SharedQueue};
use crate::error::Result;
use crate::ledger::Account;

/// One piece, lent to one call at a time.
pub(super) struct Staging {
    memory: Memory,
}

impl Staging {
    pub fn start(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr()
    }
}

/// All pieces that are not lent. Some may still be copied from, but before anything is copied to them again.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Staging>,
    /// Bytes of the largest call that was planned for, if any were: such calls take no more memory.
    planned: usize,
}

/// Pieces are whole pages.
const PAGE: usize = 4096;
/// Pieces that are taken at the start where calls are planned: as many calls are under way at once.
const PLACES: usize = 4;

/// Bytes of the host that a carrier takes for calls whose buffers have up to `largest` bytes together.
pub fn staged_bytes(largest: usize) -> usize {
    PLACES * largest.next_multiple_of(PAGE)
}

impl Pool {
    /// Takes all pieces now.
    pub fn fill<Q: Queue>(
        &mut self,
        largest: usize,
        queue: &SharedQueue<Q>,
        host: &Communicator,
        account: &Account,
    ) -> Result<()> {
        self.planned = largest;
        self.free.reserve(2 * PLACES);
        if largest > 0 {
            for _ in 0..PLACES {
                let staging = piece(largest, queue, host, account)?;
                self.free.push(staging);
            }
        }
        Ok(())
    }

    /// Whether a call can be lent a piece without more of them than were planned.
    pub fn has_room(&self, bytes: usize) -> bool {
        bytes == 0 || bytes > self.planned || self.smallest(bytes).is_some()
    }

    fn smallest(&self, bytes: usize) -> Option<usize> {
        let length = |i: usize| self.free[i].memory.bytes();
        (0..self.free.len()).filter(|&i| length(i) >= bytes).min_by_key(|&i| length(i))
    }

    /// A piece of at least `bytes`, or none for none.
    pub fn take<Q: Queue>(
        &mut self,
        bytes: usize,
        queue: &SharedQueue<Q>,
        host: &Communicator,
        account: &Account,
    ) -> Result<Option<Staging>> {
        if bytes == 0 {
            return Ok(None);
        }
        match self.smallest(bytes) {
            Some(i) => Ok(Some(self.free.swap_remove(i))),
            None => piece(bytes, queue, host, account).map(Some),
        }
    }

    /// Whatever is copied to it next comes after the last copy from it.
    pub fn give_back(&mut self, staging: Staging) {
        self.free.push(staging);
    }
}

fn piece<Q: Queue>(
    bytes: usize,
    queue: &SharedQueue<Q>,
    host: &Communicator,
    account: &Account,
) -> Result<Staging> {
    let bytes = bytes.next_multiple_of(PAGE);
    // Memory that peers read directly saves the engine a copy; it consists of whole pages.
    let shared = host.alloc::<u8>(bytes)?;
    let memory = match shared.place() {
        Place::Shared { .. } => queue.clone().page_lock(shared.into_memory())?,
        _ => queue.clone().host_memory(bytes)?,
    };
    Ok(Staging { memory: memory.booked(account) })
}
