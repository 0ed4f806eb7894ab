//! Page-locked memory for calls on their way, kept and reused, so that a steady state takes none.

use crate::buffer::{Memory, Place};
use crate::communicator::Communicator;
use crate::device::{Queue, SharedQueue};
use crate::engine::PAGE;
use crate::error::Result;
use crate::ledger::Account;

/// One piece, lent to one call at a time.
pub(super) struct Staging {
    memory: Memory,
    /// Whether it goes to messages only.
    of_messages: bool,
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
    /// Those of messages where calls are planned. A message may wait for a call that its peer has still to start, for which
    /// there has to be room on this side then.
    of_messages: Vec<Staging>,
    /// Bytes of the largest call that was planned for, if any were: such calls take no more memory.
    planned: usize,
}

/// Pieces that are taken at the start where calls are planned: as many calls are under way at once.
const PLACES: usize = 4;

/// Bytes of the host that a carrier takes for calls whose buffers have up to `largest` bytes together, those of one out of
/// place as [`staged_length`](super::staged_length) counts.
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
                let memory = piece(largest, queue, host)?.booked(account);
                self.free.push(Staging { memory, of_messages: false });
            }
        }
        Ok(())
    }

    /// Whether a call can be lent a piece without more of them than were planned.
    pub fn has_room(&self, bytes: usize, message: bool) -> bool {
        message || bytes == 0 || bytes > self.planned || smallest(&self.free, bytes).is_some()
    }

    /// A piece of at least `bytes`, or none for none.
    pub fn take<Q: Queue>(
        &mut self,
        (bytes, message): (usize, bool),
        queue: &SharedQueue<Q>,
        host: &Communicator,
    ) -> Result<Option<Staging>> {
        if bytes == 0 {
            return Ok(None);
        }
        let of_messages = message && self.planned > 0;
        let free = if of_messages { &mut self.of_messages } else { &mut self.free };
        match smallest(free, bytes) {
            Some(i) => Ok(Some(free.swap_remove(i))),
            None => {
                let memory = piece(grown(bytes, free), queue, host)?;
                Ok(Some(Staging { memory, of_messages }))
            }
        }
    }

    /// Whatever is copied to it next comes after the last copy from it.
    pub fn give_back(&mut self, staging: Staging) {
        if staging.of_messages { &mut self.of_messages } else { &mut self.free }.push(staging);
    }
}

/// Which piece fits best.
fn smallest(free: &[Staging], bytes: usize) -> Option<usize> {
    let length = |i: usize| free[i].memory.bytes();
    (0..free.len()).filter(|&i| length(i) >= bytes).min_by_key(|&i| length(i))
}

/// Bytes of a new piece for `bytes`, where none of those that are free is long enough. They are kept, for the device may still
/// copy from them: each is longer by half, so that calls that grow do not come to take the sum of all their lengths.
fn grown(bytes: usize, free: &[Staging]) -> usize {
    let longest = free.iter().map(|staging| staging.memory.bytes()).max().unwrap_or(0);
    bytes.max(longest + longest / 2)
}

fn piece<Q: Queue>(bytes: usize, queue: &SharedQueue<Q>, host: &Communicator) -> Result<Memory> {
    let bytes = bytes.next_multiple_of(PAGE);
    // Memory that peers read directly saves the engine a copy; it consists of whole pages.
    let shared = host.alloc::<u8>(bytes)?;
    match shared.place() {
        Place::Shared { .. } => queue.clone().page_lock(shared.into_memory()),
        _ => queue.clone().host_memory(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulation::Emulator;

    #[test]
    fn calls_that_grow_take_a_few_times_the_longest() {
        let folder = tempfile::tempdir().unwrap();
        let built = Emulator::build(&[], folder.path()).unwrap();
        let Some(emulator) = harness::made_by_cxx("memory of calls through the host", built) else { return };
        let queue = SharedQueue::new(emulator.queue(0));
        let host = Communicator::threads(1).pop().unwrap();
        let mut pool = Pool::default();
        for pages in 1..=100 {
            let bytes = pages * PAGE;
            let staging = pool.take((bytes, false), &queue, &host).unwrap().unwrap();
            assert!(staging.memory.bytes() >= bytes);
            pool.give_back(staging);
        }
        let held: usize = pool.free.iter().map(|staging| staging.memory.bytes()).sum();
        assert!(held < 500 * PAGE, "{} pages", held / PAGE);
    }
}
