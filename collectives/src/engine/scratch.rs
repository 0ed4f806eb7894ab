//! The engine's own memory for calls: kept and reused, so that a steady state allocates nothing.

use crate::buffer::Memory;
use crate::error::Result;
use crate::ledger::Account;
use crate::transport::Transport;

/// A piece of memory lent to one call at a time.
pub(super) struct Scratch {
    pub memory: Memory,
    /// Peers may read it until they have finished this round of the group.
    pub busy_until: Option<u64>,
    /// Whether it came from the transport, so that peers can read it.
    pub published: bool,
}

/// All pieces that are not lent.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Scratch>,
    pub account: Account,
}

/// Pieces are whole pages.
const PAGE: usize = 4096;

impl Pool {
    /// At least `bytes`; readable by peers if `published`. A call that needs more than the free pieces have
    /// replaces the largest of them, so that the pool holds what the most demanding calls at once needed.
    pub fn take(&mut self, bytes: usize, published: bool, transport: &mut dyn Transport) -> Result<Scratch> {
        let fits = |s: &Scratch| s.published == published && s.memory.bytes() >= bytes;
        // Among equals the one whose readers are the longest gone.
        let best = (0..self.free.len())
            .filter(|&i| fits(&self.free[i]))
            .min_by_key(|&i| (self.free[i].memory.bytes(), self.free[i].busy_until));
        if let Some(i) = best {
            return Ok(self.free.swap_remove(i));
        }
        let outgrown = (0..self.free.len())
            .filter(|&i| self.free[i].published == published && released(&self.free[i], transport))
            .max_by_key(|&i| self.free[i].memory.bytes());
        if let Some(i) = outgrown {
            self.free.swap_remove(i);
        }
        let bytes = bytes.next_multiple_of(PAGE);
        let memory = if published { transport.alloc(bytes)? } else { Memory::host(bytes) };
        Ok(Scratch { memory: memory.booked(&self.account), busy_until: None, published })
    }

    pub fn give_back(&mut self, scratch: Scratch) {
        self.free.push(scratch);
    }

    /// Whether peers have finished reading all of it.
    pub fn quiet(&self, transport: &mut dyn Transport) -> bool {
        self.free.iter().all(|s| released(s, transport))
    }

    /// Never gives the memory back: peers may still read it.
    pub fn leak_busy(&mut self, transport: &mut dyn Transport) {
        while let Some(scratch) = self.free.pop() {
            if !released(&scratch, transport) {
                std::mem::forget(scratch);
            }
        }
    }
}

fn released(scratch: &Scratch, transport: &mut dyn Transport) -> bool {
    let (rank, size) = (transport.rank(), transport.size());
    match (scratch.busy_until, transport.direct()) {
        (Some(until), Some(direct)) => (0..size).filter(|&p| p != rank).all(|p| direct.finished(p, until)),
        _ => true,
    }
}
