//! Devices: what kernels are built on. A [`Launch`] is a kernel with its arguments, as a value; a [`Queue`] runs
//! launches, products and copies in the order of calls. There are two queues: a GPU's stream ([`cuda`]), and the
//! emulation that runs the same kernel sources on the processor in tests.
//!
//! Kernels are CUDA C++, compiled when first used ([`Compiler`]) for the GPU at hand and kept on disk ([`Cache`]).

mod cache;
mod compile;
pub mod cuda;
#[doc(hidden)]
pub mod emulation;
mod launch;
mod product;
mod reduce;
mod source;

pub use cache::Cache;
pub use compile::{Compiler, Machine, Resources};
pub use launch::{Launch, Range, address, aligned, twice};
pub use product::Product;
pub use reduce::reduce;
pub use source::{Header, Module, Source};

use crate::error::Result;

/// Runs launches, products and copies in the order of calls, behind the caller's back.
///
/// Memory that a call was given must stay, and not be used otherwise, until a later [`synchronize`](Self::synchronize)
/// or whatever else the queue offers to order work has shown that the call is done.
pub trait Queue: Send {
    /// Runs a kernel. A launch without blocks does nothing.
    fn launch(&mut self, launch: &Launch<'_>) -> Result<()>;

    /// Multiplies matrices.
    fn product(&mut self, product: &Product<'_>) -> Result<()>;

    /// Copies `bytes` between any two places.
    ///
    /// # Safety
    /// Both ranges exist, do not overlap, and stay as the trait says.
    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Sets `bytes` to zero.
    ///
    /// # Safety
    /// The range exists and stays as the trait says.
    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()>;

    /// Waits until everything is done.
    fn synchronize(&mut self) -> Result<()>;
}
