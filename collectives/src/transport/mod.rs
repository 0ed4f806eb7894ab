//! How bytes move between the ranks of one group. Schedules are written once over [`Transport`].

pub mod emulated;
mod expected;
pub mod hierarchical;
mod nodes;
mod processes;
pub mod shm;
pub mod threads;
pub mod ucx;

// What transports share whose library says little about peers, also those of other crates.
pub mod blame;
pub mod farewell;
pub mod inbox;
pub mod neighbours;
pub mod waits;

use crate::buffer::{Memory, NO_MORE};
use crate::error::{Error, Result};
use crate::watch::Fingerprint;
pub use expected::{Expected, Medium};
pub use nodes::{Nodes, PerNode};
use std::time::Duration;
pub use waits::Wait;

/// How long to wait for a peer's explanation of what went wrong, which is better than what this rank can tell.
pub const HEARSAY: Duration = Duration::from_millis(300);

/// Messages of a group that a transport notes without allocating: how many are under way at once depends on timing, and a
/// later step may have more of them than all before it.
pub const LISTED: usize = 1024;

/// What matches a send with its receive: unique per (call, step) on one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// Of which messages a transport tells what their sender has called, from tag and length: then no fingerprint need travel
/// with them. Whatever else a sender has sent under the same call, or the same tag of the user, becomes an
/// [`Error::Diverged`] of who waits for such a message, with nothing as `mine` and the sender's call as `theirs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tells {
    /// Of none.
    Nothing,
    /// Of those whose tag is [`Coded`](crate::watch::Coded).
    Collectives,
    /// Also of users' messages, whose tags are [`Typed`](crate::watch::Typed).
    Everything,
}

/// A posted send or receive of one transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request(pub u64);

impl Request {
    /// Of what was done when it was posted: to test it would only take time.
    pub const DONE: Request = Request(u64::MAX);

    /// The name of what a place was used for in one of its uses, so that a stale one is not taken for a later one.
    #[inline]
    pub const fn of(index: usize, generation: u32) -> Request {
        Request((generation as u64) << 32 | index as u32 as u64)
    }

    /// The place.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as u32 as usize
    }

    /// Which of its uses.
    #[inline]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Moves bytes between the ranks of one group. One thread at a time drives it (the engine's), which is
/// why every method takes `&mut self`. No method waits for a peer but [`subgroup`](Self::subgroup), for at most `within`; when
/// to wait and to [`park`](Self::park) is the engine's to say.
///
/// # Safety
/// Who has been told that a request is done, or that the transport has failed or been aborted, gives its memory back: then
/// nothing of this transport touches it any more. What a receive that is done says has come is there.
pub unsafe trait Transport: Send {
    /// The name users choose it by; where it is made of others, whatever tells it from other such.
    fn name(&self) -> &str;

    /// This rank in the group.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Which ranks share a node, for algorithms that treat nodes as units; None where nobody knows.
    fn nodes(&self) -> Option<&Nodes> {
        None
    }

    /// The rank in the job of a member of the group: errors name ranks by it, so that they mean the same in every group.
    /// The job is the group that all others were split from.
    fn job_rank(&self, member: usize) -> usize;

    /// The name of the host of a rank of the job, where ranks are on several and this knows: errors tell it of a silent one.
    fn host(&mut self, _job_rank: usize) -> Option<String> {
        None
    }

    /// Up to this many bytes it is better to copy a message behind its header than to send two; the same on every rank.
    fn frame(&self) -> usize {
        usize::MAX
    }

    /// Which messages need no fingerprint; the same on every rank.
    fn tells(&self) -> Tells {
        Tells::Nothing
    }

    /// The largest tag of a user's message; the same on every rank.
    fn most_tag(&self) -> u32 {
        u32::MAX
    }

    /// How many collectives may be under way at once, counted from the oldest, so that messages of none are taken for those of
    /// another; the same on every rank.
    fn window(&self) -> u64 {
        u64::MAX
    }

    /// Whether all ranks share one host and messages between them are copies within its memory; the same on every rank.
    fn one_memory(&mut self) -> bool {
        false
    }

    /// Zeroed memory that peers reach fastest: a shared segment, registered, or just host memory.
    fn alloc(&mut self, bytes: usize) -> Result<Memory> {
        Memory::try_host(bytes).ok_or_else(|| {
            let rank = self.job_rank(self.rank());
            let what = format!("allocating {bytes} bytes of memory on rank {rank}");
            Error::system(what, NO_MORE)
        })
    }

    /// Takes memory of [`alloc`](Self::alloc) that peers may still read as this rank leaves the group, and frees it when all
    /// have left; or gives it back, where nobody would know when that is.
    fn leave_behind(&mut self, memory: Memory) -> Option<Memory> {
        Some(memory)
    }

    /// Posts a message of `bytes` at `src` to `to`; messages between two ranks with one tag match in order.
    ///
    /// # Safety
    /// `src..src+bytes` stays readable and unchanged until [`test`](Self::test) says that it is done.
    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request>;

    /// Posts the receive of exactly `bytes` from `from`. A message of another length is an [`Error::Diverged`] of
    /// the receiver with both lengths, and its first bytes are there as far as that is possible: they tell what
    /// the sender called.
    ///
    /// # Safety
    /// `dst..dst+bytes` stays writable and untouched until [`test`](Self::test) says that it is done.
    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request>;

    /// The same for a message that is waited for next, looking up to `looks` times at once whether it has come:
    /// [`Request::DONE`] if so, which spares it a place among what is under way.
    ///
    /// # Safety
    /// As of [`recv`](Self::recv).
    unsafe fn recv_awaited(
        &mut self,
        from: usize,
        tag: Tag,
        dst: *mut u8,
        bytes: usize,
        _looks: u32,
    ) -> Result<Request> {
        // SAFETY: the caller's promise.
        unsafe { self.recv(from, tag, dst, bytes) }
    }

    /// Moves everything forward that can move; true once `request` is complete (and then forgotten). Fails when it
    /// can never complete because the peer has left or is lost.
    fn test(&mut self, request: Request) -> Result<bool>;

    /// The same, looking up to `looks` times more if it is not complete.
    fn test_often(&mut self, request: Request, looks: u32) -> Result<bool> {
        for _ in 0..looks {
            if self.test(request)? {
                return Ok(true);
            }
        }
        self.test(request)
    }

    /// Reading peers' memory directly, where the transport can.
    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    /// A transport over `members` (ranks of this group in their new order; this rank is one of them), apart
    /// from every other group by `context`. All members call it together, and who has to wait for others does so no
    /// longer than `within`.
    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>>;

    /// Whether no peer is lost and none has aborted; called while waiting, so it may take microseconds but not
    /// milliseconds. A peer that dropped its transport in good order has left and is not lost: what it did before
    /// still counts.
    fn check(&mut self) -> Result<()>;

    /// The same, and whether the hosts of all peers answer, where the transport can tell; called once a wait has taken seconds,
    /// because a network that only serves to ask may fail while the one that carries messages does not.
    fn check_hosts(&mut self) -> Result<()> {
        self.check()
    }

    /// Knowing whom peers wait for, where the transport can.
    fn waits(&mut self) -> Option<&mut dyn Waits> {
        None
    }

    /// Gives up the processor until something may have changed, at most about `limit`. Called after
    /// spinning and yielding; ranks may outnumber cores.
    fn park(&mut self, limit: Duration) {
        std::thread::sleep(limit.min(Duration::from_micros(50)));
    }

    /// Whether `park` ends when a peer does something for this rank, and peers need nothing of this rank meanwhile.
    /// Where it does not, a rank looks and yields for some milliseconds before it parks.
    fn wakes(&self) -> bool {
        false
    }

    /// Tells all peers, as far as possible, that this rank gives up and why; they see it in `check`. Afterwards, and
    /// after a drop, memory of a request may be dropped: nobody writes there any more. Peers who have not heard may still
    /// read what came from `alloc`, which therefore stays as it is, or fetch a message that was announced to them, from memory
    /// that may have another use by then, and fail only in what they call after it: a process ends soon after it has given up.
    fn abort(&mut self, why: &Error);
}

/// Direct reading of peers' memory. A call is named by its sequence number on the group; the same on all
/// ranks because all make the same calls in the same order.
///
/// Per call each rank publishes at most one range, reads peers', then says `finish`; a published range must stay
/// unchanged until all peers have finished (unless `publish` copied it). Every rank finishes every call, also one
/// that it neither published nor read for, and never call `s` before call `s - depth()`.
///
/// # Safety
/// What [`published`](Self::published) returns can be read until this rank finishes the call, as long as it says, and a peer
/// that [`finished`](Self::finished) names reads no more.
pub unsafe trait Direct {
    /// How many calls may be in flight at once; call `s` reuses the place of call `s - depth()`.
    fn depth(&self) -> u64;

    /// Whether peers can read this range without a copy: it came from `alloc` of this transport.
    fn registered(&self, src: *const u8, bytes: usize) -> bool;

    /// Up to this many bytes are copied by `publish` itself and need not be registered nor kept.
    fn inline_limit(&self) -> usize;

    /// Publishes `bytes` at `src` for call `sequence`, with a fingerprint of the call for peers to compare.
    /// False when the place is still in use by call `sequence - depth()`: try again.
    ///
    /// # Safety
    /// The range is registered or at most `inline_limit`; unless inline it stays unchanged until `finished`
    /// is true for every peer.
    unsafe fn publish(
        &mut self,
        sequence: u64,
        fingerprint: u64,
        src: *const u8,
        bytes: usize,
    ) -> Result<bool>;

    /// What `peer` published for call `sequence`, once it has: address in this process, bytes, fingerprint.
    /// Readable until this rank calls `finish`. Fails when the peer has left without publishing it.
    fn published(&mut self, peer: usize, sequence: u64) -> Result<Option<(*const u8, usize, u64)>>;

    /// This rank has read all it will read of call `sequence`.
    ///
    /// # Safety
    /// It has, and of every call before: peers write there again.
    unsafe fn finish(&mut self, sequence: u64);

    /// Whether `peer` has finished reading for call `sequence`, or a later one in the same place, or has left.
    fn finished(&mut self, peer: usize, sequence: u64) -> bool;
}

/// Whom ranks wait for, in whatever group. All ranks here are those of the job.
pub trait Waits {
    /// This rank waits, still or by now: peers may ask for that. Said again and again while it waits, before
    /// [`check`](Transport::check).
    fn note(&mut self, wait: Wait);

    /// Asks `peer` for whom it waits; gives what tells its answer from what it has said before.
    fn ask(&mut self, peer: usize) -> u64;

    /// Whom `peer` waits for, by what it has said since it was `asked`. A rank that does not wait says nothing.
    fn answer(&mut self, peer: usize, asked: u64) -> Option<Wait>;
}

/// Refuses a `call` of the job's `rank` that has to do with a rank which its group of `size` does not have.
///
/// # Errors
/// [`Error::Argument`], with both.
pub fn admit(call: &'static str, rank: usize, peer: usize, size: usize) -> Result<()> {
    if peer < size {
        return Ok(());
    }
    Err(Error::Argument { call, rank, problem: format!("rank {peer} asked for, the group has {size}") })
}

/// What it means that a receive of `posted` bytes has met a message of another length; `None` where the library says only
/// that it is longer.
pub fn wrong_length(rank: usize, posted: usize, peer: usize, sent: Option<usize>) -> Error {
    let theirs = sent.map_or_else(|| "more".into(), |bytes| format!("{bytes} bytes"));
    let mine = format!("{posted} bytes");
    Error::Diverged { sequence: 0, rank, mine, peer, theirs, past: String::new() }
}

/// What it means that `peer`, a rank of the `group`, has `called` something else than what its message was received for. What
/// that was is added by who knows it.
pub fn wrong_call(group: &impl Transport, peer: usize, called: Fingerprint) -> Error {
    let (rank, peer) = (group.job_rank(group.rank()), group.job_rank(peer));
    let theirs = called.in_job(group.size(), |member| group.job_rank(member)).to_string();
    Error::Diverged { sequence: 0, rank, mine: String::new(), peer, theirs, past: String::new() }
}

/// The place of this rank among the `members` of a group who form one of their own.
///
/// # Errors
/// [`Error::Argument`] where the group has no such member, one is there twice, or this rank is not among them.
pub fn place_among(members: &[usize], group: &impl Transport) -> Result<usize> {
    let (me, rank) = (group.rank(), group.job_rank(group.rank()));
    members.iter().try_for_each(|&member| admit("subgroup", rank, member, group.size()))?;
    let refused = |what| {
        let problem = format!("ranks {members:?} form a group {what}");
        Error::Argument { call: "subgroup", rank, problem }
    };
    if (1..members.len()).any(|i| members[..i].contains(&members[i])) {
        return Err(refused("in which one of them is twice"));
    }
    members.iter().position(|&member| member == me).ok_or_else(|| refused("without this rank"))
}
