//! Devices: what kernels are built on. A [`Launch`] is a kernel with its arguments, as a value; a [`Queue`] runs
//! launches, products and copies in the order of calls. There are two queues: a GPU's stream ([`cuda`]), and the
//! emulation that runs the same kernel sources on the processor in tests.
//!
//! Kernels are CUDA C++, compiled when first used ([`Compiler`]) for the GPU at hand and kept on disk ([`Cache`]).

mod arena;
mod cache;
mod compile;
pub mod cuda;
#[doc(hidden)]
pub mod emulation;
mod launch;
mod product;
mod reduce;
mod shared;
mod source;

pub use arena::Arena;
pub use cache::Cache;
pub use compile::{Compiler, Machine, Resources};
pub use launch::{Launch, Range, address, aligned, twice};
pub use product::{MatmulPrecision, PRODUCT_WORKSPACE, Product};
pub use reduce::reduce;
pub(crate) use reduce::reduce_addresses;
pub use shared::SharedQueue;
pub use source::{Header, Module, Source};

use crate::buffer::{Memory, Place};
use crate::error::Result;

/// Runs launches, products and copies in the order of calls, behind the caller's back.
///
/// Memory that a call was given must stay, and not be used otherwise, until a later [`synchronize`](Self::synchronize)
/// or whatever else the queue offers to order work has shown that the call is done.
///
/// # Safety
/// Memory that it gives out is as long as was asked for, in its [`place`](Self::place), which never changes, or the host's
/// where that was asked for, and is freed only once no queue of the device uses it any more; page-locked memory stays where it
/// was. Calls touch what they were given and nothing else, in the order of calls. Once [`synchronize`](Self::synchronize) has
/// returned, whatever it says, nothing that was given before touches memory any more; where it returns no error, all that is
/// done. So is what was given before an event was recorded once it has [`happened`](Self::happened).
pub unsafe trait Queue: Send {
    /// A moment of a queue: everything that it had been given when the event was recorded.
    type Event: Send + Sync;

    /// Where its memory lies.
    fn place(&self) -> Place;

    /// Takes zeroed memory for what launches and products work on.
    fn memory(&mut self, bytes: usize) -> Result<Memory>;

    /// Takes zeroed memory of the host that copies to and from the queue's memory like best.
    fn host_memory(&mut self, bytes: usize) -> Result<Memory>;

    /// Makes whole pages of the host that somebody else has taken as good to copy from and to as
    /// [`host_memory`](Self::host_memory), for as long as they are held.
    fn page_lock(&mut self, memory: Memory) -> Result<Memory>;

    /// Compiles and loads what launches of `modules` need, so that nothing of that can be missing later.
    fn prepare(&mut self, modules: &[Module]) -> Result<()>;

    /// The same for products, where they need anything.
    fn prepare_products(&mut self) -> Result<()> {
        Ok(())
    }

    /// Lends products [`PRODUCT_WORKSPACE`] bytes of the queue's memory to work in, before the first of them. A queue
    /// that was lent none takes them from the device.
    ///
    /// # Panics
    /// Fewer bytes, or memory in another place than the queue's.
    fn lend(&mut self, workspace: Memory);

    /// Runs a kernel. A launch without blocks does nothing.
    ///
    /// # Safety
    /// The kernel is written for such a grid, such shared memory and such arguments, and for what memory holds by then that it
    /// finds memory by, such as indices and addresses. The arrays exist, no two overlap of which it writes one unless it is
    /// written for that, and they stay as the trait says; so do those whose addresses it reads.
    unsafe fn launch(&mut self, launch: &Launch<'_>) -> Result<()>;

    /// Multiplies matrices.
    ///
    /// # Safety
    /// The matrices exist, the result overlaps no other but an addend that is the result itself, and they stay as the trait
    /// says.
    unsafe fn product(&mut self, product: &Product<'_>) -> Result<()>;

    /// In how many ways the device's library would compute a product; number 0, the one that it advises, is taken unless
    /// [`Product::by`] says otherwise.
    fn ways(&mut self, _product: &Product<'_>) -> Result<usize> {
        Ok(1)
    }

    /// Copies `bytes` between any two places.
    ///
    /// # Safety
    /// Both ranges exist, do not overlap, and stay as the trait says.
    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Copies from the host; `from` is free when the call returns, even if the copy has not been made yet.
    ///
    /// # Safety
    /// The range at `to` exists and stays as the trait says.
    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()>;

    /// Copies to the host, after everything before is done.
    ///
    /// # Safety
    /// The range at `from` exists and is initialised.
    unsafe fn download(&mut self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: by the caller; the borrow of `to` lasts until the copy is done.
        unsafe { self.copy(from, to.as_mut_ptr() as u64, to.len())? };
        self.synchronize()
    }

    /// Sets `bytes` to zero.
    ///
    /// # Safety
    /// The range exists and stays as the trait says.
    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()>;

    /// Waits until everything is done.
    fn synchronize(&mut self) -> Result<()>;

    /// An event for queues of this device; nothing has to be waited for yet.
    fn event(&self) -> Result<Self::Event>;

    /// Makes `event` the moment after everything that was given so far.
    fn record(&mut self, event: &Self::Event) -> Result<()>;

    /// Whether it has happened; so has an event that was never recorded.
    fn happened(event: &Self::Event) -> Result<bool>;

    /// Waits on the host until it has happened, and no longer.
    fn reach(event: &Self::Event) -> Result<()> {
        while !Self::happened(event)? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Which queues of a device go first where several have work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// For compute.
    Low,
    /// For what nobody waits for yet, but who finds the device full of compute should not have to wait for its end.
    Normal,
    /// For what compute waits for.
    High,
}

/// Queues of one device, which order their work by events and do it side by side otherwise.
///
/// # Safety
/// A [`sibling`](Self::sibling) is of the same device and in the same place: it reaches what this one does. What is given
/// [`after`](Self::after) an event starts only once all is done that was given before the event was last recorded.
pub unsafe trait Streams: Queue + Sized + 'static {
    /// Another queue of the same device, apart from this one.
    fn sibling(&self, urgency: Urgency) -> Result<Self>;

    /// An event that also knows when it happened.
    fn timed_event(&self) -> Result<Self::Event>;

    /// Seconds from one event to another; both are timed and have happened.
    fn seconds(from: &Self::Event, to: &Self::Event) -> Result<f64>;

    /// What is given from now on starts after `event`. An event that was never recorded is no obstacle.
    fn after(&mut self, event: &Self::Event) -> Result<()>;
}
