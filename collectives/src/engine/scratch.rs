//! The engine's own memory for calls: kept and reused, so that a steady state allocates nothing, and bounded, so that
//! how much it is does not depend on timing.

use super::Engine;
use crate::buffer::{Buffer, Memory};
use crate::error::Result;
use crate::ledger::Account;
use crate::schedule::{Call, Group, KEPT, Local, Schedule};
use crate::transport::Transport;

/// Calls in flight that a new engine has places for. How many are in flight at once depends on timing, so that
/// places made only when needed would be allocated in the middle of a steady training step.
pub(super) const READY: usize = 32;

/// What memory is lent for, and in how many kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A collective's that only this rank sees.
    Own,
    /// A collective's that peers read, and the transport's.
    Published,
    /// A user's message: none takes from collectives what was taken for them beforehand.
    Message,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Own, Kind::Published, Kind::Message];

    fn of(schedule: &Schedule) -> Self {
        match (schedule.call.kind.is_message(), schedule.scratch_published) {
            (true, _) => Kind::Message,
            (false, true) => Kind::Published,
            (false, false) => Kind::Own,
        }
    }
}

/// Collectives that have a piece of memory of one kind at once; later ones wait for a piece before they begin. With
/// two, messages of one call travel while contributions of another are reduced: 16 sums in flight between two ranks over
/// UCX took 8% longer than with a piece each at 16 KiB, 2% at 256 KiB, and as long at 4 MiB.
const LENT: usize = 2;

/// Bytes that each of the first [`READY`] calls in flight has without asking: at least what a fingerprint from and to
/// each of `size` ranks takes, so that gathers, which need no more where they pack nothing, do not wait for a piece.
pub(super) fn kept(size: usize) -> usize {
    KEPT.max(128 * size)
}

/// Bytes that the engine of a rank of `group` holds once it is ready for `calls`, with buffers from the communicator's
/// `alloc`: see [`reserve`](crate::Communicator::reserve).
///
/// # Panics
/// A call that the group cannot make, as one whose root it does not have.
pub fn scratch_bytes(group: &Group, calls: &[Call]) -> usize {
    ready_bytes(group.size) + LENT * pieces(group, calls).iter().sum::<usize>()
}

/// Bytes of that which do not depend on the calls: those of its places, in a group of `size` ranks.
pub fn ready_bytes(size: usize) -> usize {
    READY * kept(size)
}

/// Bytes of a piece of each kind that is enough for each of `calls`, 0 if none needs one. What each of the first calls in flight
/// has, later ones find here, too: a call or a message that is none of `calls` and needs no more takes nothing, however many are
/// in flight as it comes.
pub(super) fn pieces(group: &Group, calls: &[Call]) -> [usize; Kind::ALL.len()] {
    let local = Local { send_registered: true, recv_registered: true };
    let usual = if group.size > 1 { kept(group.size).next_multiple_of(PAGE) } else { 0 };
    let mut needed = Kind::ALL.map(|kind| if kind == Kind::Published { 0 } else { usual });
    for &call in calls {
        let schedule = Schedule::new(call, group, local, None);
        let most = &mut needed[Kind::of(&schedule) as usize];
        // Also where it is no more than the first calls in flight have: later ones have none of their own.
        *most = (*most).max(schedule.scratch.next_multiple_of(PAGE));
    }
    needed
}

/// A piece of memory lent to one call at a time.
pub(super) struct Scratch {
    pub memory: Memory,
    /// Peers may read it until they have finished this round of the group.
    pub busy_until: Option<u64>,
    kind: Kind,
}

/// All pieces that are not lent.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Scratch>,
    /// Pieces of each kind that calls have.
    lent: [usize; Kind::ALL.len()],
    pub account: Account,
}

/// Pieces are whole pages.
pub(crate) const PAGE: usize = 4096;

impl Pool {
    /// Makes all pieces at least as long as [`pieces`] says, but for those that peers still read.
    pub fn reserve(&mut self, bytes: [usize; Kind::ALL.len()], transport: &mut dyn Transport) -> Result<()> {
        for (kind, bytes) in Kind::ALL.into_iter().zip(bytes).filter(|&(_, bytes)| bytes > 0) {
            let fits = |s: &Scratch| s.kind == kind && s.memory.bytes() >= bytes;
            self.free.retain(|s| s.kind != kind || fits(s) || !released(s, transport));
            let have = self.lent[kind as usize] + self.free.iter().filter(|s| fits(s)).count();
            for _ in have..LENT {
                let scratch = self.make(bytes, kind, transport)?;
                self.free.push(scratch);
            }
        }
        Ok(())
    }

    /// What `schedule` needs; None where as many collectives have pieces of that kind as may at once.
    pub fn lend(&mut self, schedule: &Schedule, transport: &mut dyn Transport) -> Result<Option<Scratch>> {
        let kind = Kind::of(schedule);
        if kind != Kind::Message && self.lent[kind as usize] == LENT {
            return Ok(None);
        }
        let scratch = self.take(schedule.scratch, kind, transport)?;
        self.lent[kind as usize] += 1;
        Ok(Some(scratch))
    }

    /// At least `bytes`. A call that needs more than the free pieces have replaces the largest of them, so that the pool
    /// holds what the most demanding calls at once needed.
    fn take(&mut self, bytes: usize, kind: Kind, transport: &mut dyn Transport) -> Result<Scratch> {
        let fits = |s: &Scratch| s.kind == kind && s.memory.bytes() >= bytes;
        // Among equals the one whose readers are the longest gone.
        let best = (0..self.free.len())
            .filter(|&i| fits(&self.free[i]))
            .min_by_key(|&i| (self.free[i].memory.bytes(), self.free[i].busy_until));
        if let Some(i) = best {
            return Ok(self.free.swap_remove(i));
        }
        let outgrown = (0..self.free.len())
            .filter(|&i| self.free[i].kind == kind && released(&self.free[i], transport))
            .max_by_key(|&i| self.free[i].memory.bytes());
        if let Some(i) = outgrown {
            self.free.swap_remove(i);
        }
        self.make(bytes.next_multiple_of(PAGE), kind, transport)
    }

    fn make(&self, bytes: usize, kind: Kind, transport: &mut dyn Transport) -> Result<Scratch> {
        let memory = match kind {
            Kind::Published => transport.alloc(bytes)?,
            Kind::Own | Kind::Message => Buffer::<u8>::try_zeroed(bytes)?.into_memory(),
        };
        Ok(Scratch { memory: memory.booked(&self.account), busy_until: None, kind })
    }

    pub fn give_back(&mut self, scratch: Scratch) {
        self.lent[scratch.kind as usize] -= 1;
        self.free.push(scratch);
    }

    /// Whether the group can be left as far as peers still read any of it: they have finished, or the transport takes that.
    pub fn can_be_left(&mut self, transport: &mut dyn Transport) -> bool {
        while let Some(busy) = self.free.iter().position(|s| !released(s, transport)) {
            let Scratch { memory, busy_until, kind } = self.free.swap_remove(busy);
            if let Some(memory) = transport.leave_behind(memory) {
                self.free.push(Scratch { memory, busy_until, kind });
                return false;
            }
        }
        true
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

impl Engine {
    /// Gives a call its scratch; false where it has to wait for some. Collectives get it in the order of their start,
    /// which is the same on all ranks: so the oldest that is under way anywhere has it everywhere. A user's message
    /// waits for nobody, because its peer may make other calls first, nor does anything wait for one that may not go yet.
    pub(super) fn equip(&mut self, id: u32) -> Result<bool> {
        let flight = &self.flights[id as usize];
        let schedule = flight.schedule.as_deref().expect("a call in flight has a schedule");
        if schedule.scratch == 0 || !flight.state.scratch_at.is_null() {
            return Ok(true);
        }
        let collective = |&&id: &&u32| !self.flights[id as usize].is_message();
        let may = schedule.call.kind.is_message() || self.waiting.iter().find(collective) == Some(&id);
        let found = if may { self.pool.lend(schedule, &mut *self.transport) } else { Ok(None) };
        match found {
            Ok(Some(mut scratch)) => {
                let flight = &mut self.flights[id as usize];
                flight.state.scratch_at = scratch.memory.as_mut_ptr();
                flight.state.scratch = Some(scratch);
                self.waiting.retain(|&other| other != id);
                Ok(true)
            }
            Ok(None) => {
                if let Some(peer) = self.oldest_waits_for() {
                    self.flights[id as usize].blocked_on = peer;
                }
                Ok(false)
            }
            // Peers expect this call of this rank, which will now never come.
            Err(error) => Err(self.fail(error)),
        }
    }
}
