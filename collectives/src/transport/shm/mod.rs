//! Processes of one host that read each other's memory.
//!
//! Every rank owns one anonymous segment, which all ranks map. Buffers from [`Transport::alloc`] lie there, so peers
//! read them where they are: a reduce-scatter is one pass over the contributions and an all-gather one copy. The
//! segments have no name anywhere and vanish with the last process, however it ends.

mod arena;
mod bell;
mod budget;
mod ends;
mod group;
mod layout;
mod mail;
mod peers;
mod requests;
mod ring;
mod segments;
mod slots;
mod word;

use crate::bootstrap::{Options, Rendezvous};
use crate::buffer::Memory;
use crate::error::{Error, Result};
use crate::transport::{Direct, Request, Tag, Transport, Wait, Waits, admit, blame, place_among, waits};
pub use budget::{Available, available as memory_available, limit as memory_limit};
use group::Group;
use mail::Mail;
pub(super) use mail::frame;
use peers::Watcher;
use segments::Segments;
pub use segments::control_bytes;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What [`Direct::inline_limit`] gives.
pub(super) const INLINE_LIMIT: usize = layout::INLINE;

/// An offset that says: the payload is in the slot.
const INLINE: u64 = u64::MAX;
/// Nobody sleeps longer than this without looking whether the peers still live.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// The shared-memory transport of one group of ranks on one host.
pub struct ShmTransport {
    group: Group,
    mail: Mail,
    sleeper: bell::Sleeper,
    watcher: Watcher,
    /// All members have finished the calls before this one.
    cleared: u64,
}

/// How many calls are checked at once for whether all members have finished them: their words are in the members'
/// caches, and fetching several takes little longer than fetching one.
const CLEARED_AT_ONCE: u64 = 16;

impl ShmTransport {
    /// The group of all ranks of this host, in the order of their world ranks; called by all of them together.
    /// Errors that name ranks use world ranks.
    ///
    /// # Errors
    /// [`Error::System`] when the machine refuses shared memory or has too little, [`Error::Launch`] when the ranks
    /// run different builds, and those of the [`Rendezvous`].
    pub fn connect(rendezvous: &mut Rendezvous, options: &Options) -> Result<Self> {
        Ok(Self::over(Group::world(Segments::connect(rendezvous, options)?)))
    }

    fn over(group: Group) -> Self {
        let (mail, watcher) = (Mail::new(&group), Watcher::new(&group.segments));
        ShmTransport { group, mail, sleeper: bell::Sleeper::default(), watcher, cleared: 0 }
    }

    /// Wakes every peer that sleeps, after something was made visible to all.
    #[inline(always)]
    fn ring_all(&mut self) {
        self.group.fences().changed();
        self.group.present().for_each(bell::ring);
    }

    /// Whether nobody reads the slot of call `sequence` any more. The own word counts too: this rank reads what it
    /// published like everybody else.
    #[inline(always)]
    fn reusable(&mut self, sequence: u64) -> bool {
        let needed = (sequence + 1).saturating_sub(layout::DEPTH);
        self.cleared >= needed || self.clear(needed)
    }

    #[cold]
    fn clear(&mut self, needed: u64) -> bool {
        let most = needed + CLEARED_AT_ONCE;
        while self.cleared < most && (0..self.group.size()).all(|member| self.finished(member, self.cleared))
        {
            self.cleared += 1;
        }
        self.cleared >= needed
    }

    /// Whether `member` does nothing more in this group: it left it in good order, or its process did. Whatever it did
    /// before is visible then.
    fn gone(&mut self, member: usize) -> bool {
        self.watcher.gone[self.group.members[member]] || self.group.left(member)
    }

    fn lost(&self, peer: usize, how: impl Into<String>) -> Error {
        let (rank, peer) = (self.group.segments.rank(), self.group.rank_of(peer));
        Error::PeerLost { rank, peer, how: how.into() }
    }

    /// That a member left is what is wrong only if nobody failed: who does leaves too.
    #[cold]
    fn unless_failed(&mut self, left: Error) -> Error {
        self.watcher.look(&self.group.segments, Instant::now()).err().unwrap_or(left)
    }

    fn busy(&mut self) {
        self.sleeper.disarm(self.group.own);
    }

    /// What `peer` shows for call `sequence`, as [`Direct::published`] gives it, whether or not it is still there.
    #[inline(always)]
    fn shown(&mut self, peer: usize, sequence: u64) -> Result<Option<(*const u8, usize, u64)>> {
        let Some(block) = self.group.block(peer) else { return Ok(None) };
        let what = match slots::read(block.slot(sequence), sequence) {
            Ok(Some(what)) => what,
            Ok(None) => return Ok(None),
            Err(other) => {
                let what = format!("call {other} where {sequence} was being read");
                return Err(self.group.corrupt(peer, what));
            }
        };
        let bytes = what.bytes as usize;
        let address = match what.offset {
            INLINE if bytes <= layout::INLINE => Some(block.inline(sequence, bytes).as_ptr().cast_const()),
            INLINE => None,
            offset => self.group.address(peer, offset, bytes),
        };
        match address {
            Some(address) => Ok(Some((address, bytes, what.fingerprint))),
            None => Err(self.group.corrupt(peer, format!("{bytes} bytes at {}", what.offset))),
        }
    }

    fn checked_peer(&self, call: &'static str, peer: usize) -> Result<()> {
        admit(call, self.group.segments.rank(), peer, self.group.size())
    }
}

// SAFETY: what is reported as done was copied whole, and after an abort this rank copies no more.
unsafe impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn rank(&self) -> usize {
        self.group.me
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn job_rank(&self, member: usize) -> usize {
        self.group.rank_of(member)
    }

    fn frame(&self) -> usize {
        self.mail.frame()
    }

    fn alloc(&mut self, bytes: usize) -> Result<Memory> {
        self.group.segments.alloc(bytes)
    }

    fn leave_behind(&mut self, memory: Memory) -> Option<Memory> {
        self.group.leave_behind(memory)
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        self.checked_peer("send", to)?;
        if self.gone(to) {
            return Err(self.unless_failed(self.lost(to, "left the group before a message to it was sent")));
        }
        self.busy();
        self.mail.send(&mut self.group, to, tag, src, bytes)
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        self.checked_peer("recv", from)?;
        self.busy();
        self.mail.recv(&mut self.group, from, tag, dst, bytes)
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        match self.mail.test(&mut self.group, request, &self.watcher.gone) {
            Err(left @ Error::PeerLost { .. }) => Err(self.unless_failed(left)),
            done => done,
        }
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        Some(self)
    }

    fn subgroup(&mut self, members: &[usize], context: u64, _within: Duration) -> Result<Box<dyn Transport>> {
        let place = place_among(members, self)?;
        Ok(Box::new(Self::over(self.group.subgroup(members, place, context)?)))
    }

    fn check(&mut self) -> Result<()> {
        self.watcher.check(&self.group.segments)
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        Some(self)
    }

    fn wakes(&self) -> bool {
        true
    }

    fn park(&mut self, limit: Duration) {
        // What a peer only shows is copied from here, and nobody rings for that.
        if self.mail.copies() {
            return;
        }
        self.sleeper.park(self.group.own, self.group.fences(), limit.min(LONGEST_SLEEP));
    }

    fn abort(&mut self, why: &Error) {
        let segments = &self.group.segments;
        let (culprit, how) = blame::of(why, segments.rank());
        segments.give_up(culprit, &how);
        self.ring_all();
        self.mail.forget();
    }
}

impl Waits for ShmTransport {
    fn note(&mut self, wait: Wait) {
        waits::note(self.group.segments.waits(self.group.segments.me), wait);
    }

    fn ask(&mut self, peer: usize) -> u64 {
        let segments = &self.group.segments;
        segments.index_of(peer).map_or(0, |index| segments.waits(index).load(Ordering::Relaxed))
    }

    fn answer(&mut self, peer: usize, asked: u64) -> Option<Wait> {
        let segments = &self.group.segments;
        waits::noted_since(segments.waits(segments.index_of(peer)?), asked)
    }
}

// SAFETY: what is published lies in the owner's segment, by its own description checked against that, or in its slot; both
// stay mapped as long as the transport, and unchanged until all have finished, as the slots' protocol says.
unsafe impl Direct for ShmTransport {
    fn depth(&self) -> u64 {
        layout::DEPTH
    }

    fn registered(&self, src: *const u8, bytes: usize) -> bool {
        self.group.segments.offset_of(src, bytes).is_some()
    }

    fn inline_limit(&self) -> usize {
        INLINE_LIMIT
    }

    unsafe fn publish(
        &mut self,
        sequence: u64,
        fingerprint: u64,
        src: *const u8,
        bytes: usize,
    ) -> Result<bool> {
        let own = self.group.own;
        if !self.reusable(sequence) {
            return Ok(false);
        }
        self.busy();
        let offset = if bytes <= layout::INLINE {
            let place = own.inline(sequence, bytes);
            // SAFETY: the slot's own room, which no peer reads any more; the caller's range is readable.
            unsafe { place.as_ptr().copy_from_nonoverlapping(src, bytes) };
            INLINE
        } else {
            let Some(offset) = self.group.segments.offset_of(src, bytes) else {
                let problem = format!("{bytes} bytes outside shared memory cannot be published");
                return Err(Error::Argument { call: "publish", rank: self.group.segments.rank(), problem });
            };
            offset as u64
        };
        slots::publish(
            own.slot(sequence),
            sequence,
            slots::Description { offset, bytes: bytes as u64, fingerprint },
        );
        self.ring_all();
        own.prepare(sequence + 1);
        Ok(true)
    }

    #[inline]
    fn published(&mut self, peer: usize, sequence: u64) -> Result<Option<(*const u8, usize, u64)>> {
        match self.shown(peer, sequence)? {
            // Looked at again: it may have been shown, before the peer left, just after the first look.
            None if self.gone(peer) => match self.shown(peer, sequence)? {
                None => {
                    let left = self.lost(peer, "left its group before it came to a call of it");
                    Err(self.unless_failed(left))
                }
                shown => Ok(shown),
            },
            shown => Ok(shown),
        }
    }

    #[inline]
    unsafe fn finish(&mut self, sequence: u64) {
        slots::finish(self.group.own.done(sequence), sequence);
        self.ring_all();
    }

    #[inline]
    fn finished(&mut self, peer: usize, sequence: u64) -> bool {
        let done = |block: layout::Block| slots::finished(block.done(sequence), sequence);
        // Whoever has left reads nothing any more.
        self.group.block(peer).is_some_and(done) || self.gone(peer)
    }
}
