//! Who carries calls whose buffers lie on a device.

use crate::buffer::{Memory, Place};
use crate::communicator::Communicator;
use crate::engine::{Ends, Priority, Shared, Stats};
use crate::error::Result;
use crate::schedule::Call;
use std::any::Any;
use std::sync::Arc;

/// Carries the calls of a [`Communicator`] whose buffers lie on a device, in the order of the device's compute queue.
///
/// A started call comes after everything that the queue was given before, and everything that the queue is given
/// after [`wait`](Self::wait) comes after the call; neither blocks the host where that can be helped. Calls of one
/// group start in the same order on all ranks. A failure is final: every later call returns it, and the host's
/// communicator, over which ranks agree on other things, is told too.
///
/// # Safety
/// [`group`](Self::group) is the one by which its calls read and write, and [`reaches`](Self::reaches) names no place whose
/// memory it cannot carry. It touches a call's buffers only as the call says; once [`start`](Self::start) has refused it or
/// [`wait`](Self::wait) has returned, whatever that says, only before anything that the compute queue is given from then on,
/// and those of the host no more. The buffers of an [abandoned](Self::abandon) call it keeps until nothing touches them.
pub unsafe trait Carrier: Send + Sync {
    /// The name of what moves the bytes, such as `nccl`.
    fn name(&self) -> &str;

    /// This rank and the ranks of the group whose calls it carries.
    fn group(&self) -> (usize, usize);

    /// Whether it carries buffers in `place`.
    fn reaches(&self, place: Place) -> bool;

    /// Takes zeroed memory of the device that it moves fastest.
    fn alloc(&self, bytes: usize) -> Result<Memory>;

    /// Takes now what the engine of the host needs for `calls`, where they go through it.
    fn reserve(&self, _calls: &[Call]) -> Result<()> {
        Ok(())
    }

    /// Starts a call, which is waited for or abandoned by its id. A message goes under `tag`; a collective has none.
    ///
    /// # Safety
    /// The buffers are in places that it reaches, as long as `call` says, disjoint unless in place, and stay where they
    /// are, not used by anything that is not ordered after the call, until the call is done or has failed.
    unsafe fn start(&self, call: Call, ends: Ends, tag: Option<u64>, priority: Priority) -> Result<u32>;

    /// Makes everything that the compute queue is given from now on come after the call.
    fn wait(&self, id: u32) -> Result<()>;

    /// Whether [`wait`](Self::wait) would return without blocking the host.
    fn is_done(&self, id: u32) -> bool;

    /// Nobody will wait for this call: keeps its buffers until they are free.
    fn abandon(&self, id: u32, buffers: Box<dyn Any + Send>);

    /// Starts a call of the host's own after calls that were started here and that the host's communicator does not have yet:
    /// it would come before them on some ranks and after them on others. `None` where there are none such; the host starts
    /// it itself then. Messages come after messages, collectives after collectives.
    ///
    /// # Safety
    /// The buffers are the host's, as long as `call` says, disjoint unless in place, and stay where they are, untouched,
    /// until the call is done or has failed.
    unsafe fn start_of_host(
        &self,
        _call: Call,
        _ends: Ends,
        _tag: Option<u64>,
        _priority: Priority,
    ) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Moves started calls forward without waiting.
    fn progress(&self) -> Result<()>;

    /// Gives up, so that peers learn why instead of waiting.
    fn abort(&self, why: &str);

    /// What it has done, with that of the host's communicator, which counts what it was given: no call is given to it
    /// between the two.
    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats;

    /// The carrier of the group that this rank is in after a split, whose communicator of the host is `host`; `None`
    /// for a rank that is in none. Every rank of the whole group calls it with the color that it gave to the split.
    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Arc<dyn Carrier>>>;
}

/// Who has a call that was started.
pub(crate) enum End {
    /// The engine of the host.
    Engine(Arc<Shared>),
    /// A device's.
    Carrier(Arc<dyn Carrier>),
}

impl End {
    pub fn wait(&self, id: u32) -> Result<()> {
        match self {
            End::Engine(shared) => shared.wait(id),
            End::Carrier(carrier) => carrier.wait(id),
        }
    }

    pub fn is_done(&self, id: u32) -> bool {
        match self {
            End::Engine(shared) => shared.is_done(id),
            End::Carrier(carrier) => carrier.is_done(id),
        }
    }

    pub fn waits_for(&self, id: u32) -> Option<usize> {
        match self {
            End::Engine(shared) => shared.waits_for(id),
            End::Carrier(_) => None,
        }
    }

    pub fn abandon(&self, id: u32, buffers: Box<dyn Any + Send>) {
        match self {
            End::Engine(shared) => shared.abandon(id, buffers),
            End::Carrier(carrier) => carrier.abandon(id, buffers),
        }
    }
}
