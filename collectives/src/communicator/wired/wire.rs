//! What moves bytes between devices in the order of their queues.

use crate::communicator::Communicator;
use crate::error::Result;
use crate::schedule::Call;

/// Which of two orders of calls: those of one lane come one after the other, the lanes go on side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Calls that computation waits for, and whatever takes no sum.
    Gathers = 0,
    /// Sums, and what needs scratch memory.
    Reductions = 1,
}

impl Lane {
    /// All of them.
    pub const ALL: [Lane; 2] = [Lane::Gathers, Lane::Reductions];
}

/// One side of a message between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The other side.
    pub peer: usize,
    /// Whether this rank sends it.
    pub outgoing: bool,
    /// Where it lies here, or is to lie.
    pub at: *mut u8,
    /// Its length.
    pub bytes: usize,
}

/// Moves bytes between the devices of a group. Every rank gives each lane the same calls in the same order; between
/// two ranks, messages of one lane match in order.
///
/// # Safety
/// [`group`](Self::group) is the one by which it reads and writes. It touches what it was given only as messages and calls say,
/// and in the order of the queue that was given it; once it is [aborted](Self::abort) and the queue synchronized, no more.
pub unsafe trait Wire<Q>: Send + Sync + Sized + 'static {
    /// Its name, such as `nccl`.
    fn name(&self) -> &str;

    /// This rank and the ranks of the group whose bytes it moves.
    fn group(&self) -> (usize, usize);

    /// Gives `queue` messages that all go on at once: none waits for another of them.
    ///
    /// # Safety
    /// The ranges are in memory of the queue's device, those that are received overlap no other, and all stay until
    /// the queue has done it.
    unsafe fn exchange(&self, lane: Lane, queue: &mut Q, messages: &[Message]) -> Result<()>;

    /// Gives `queue` a collective in whatever order of sums the wire has. An all_gather or a broadcast it always can.
    ///
    /// # Safety
    /// The buffers are as long as the call says, in memory of the queue's device, and stay until the queue has done it.
    unsafe fn native(
        &self,
        lane: Lane,
        queue: &mut Q,
        call: &Call,
        send: *const u8,
        recv: *mut u8,
    ) -> Result<()>;

    /// Whether anything has gone wrong since, as far as that can be told without waiting. Any thread may ask.
    fn check(&self) -> Result<()>;

    /// Ends what is under way, so that queues go on, and refuses everything from now on. Any thread may call it.
    fn abort(&self);

    /// The wire of the group that this rank is in after a split, whose communicator of the host is `host`. Every rank
    /// of the whole group calls it; `None` for one that is in no group.
    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Self>>;
}
