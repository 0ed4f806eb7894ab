//! Typed collectives over pluggable transports: shared memory, UCX, threads of one process, NCCL, MPI (in
//! the crate `caravan-mpi`), and combinations of one inside nodes with another between them.
//!
//! What it promises:
//!
//! - A result has the same bits on every transport, by every algorithm and however buckets are cut: the order of sums is
//!   that of [`reduce`], and 16-bit types are added in f32.
//! - No call blocks without a deadline ([`Options::deadline`]): one whose peer is gone, silent or has called something else
//!   ends with an [`Error`] that names the rank.
//! - What is in flight owns its buffers ([`Pending`]), and a steady state of calls takes no memory: [`scratch_bytes`] says
//!   beforehand how much the engine holds.
//!
//! A [`Communicator`] is made of a [`transport`]; [`bootstrap`] finds a process's rank and its peers. Between threads of one
//! process:
//!
//! ```
//! use collectives::{Communicator, Options, ReduceOp};
//!
//! fn rank(comm: Communicator) -> collectives::Result<()> {
//!     // Blocking: slices go in and out.
//!     let mine = [comm.rank() as f32 + 1.0; 4];
//!     let mut sum = [0.0; 4];
//!     comm.all_reduce(&mine[..], &mut sum[..], ReduceOp::Sum)?;
//!     assert_eq!(sum, [3.0; 4]);
//!     // Started: buffers go in, and `wait` gives them back.
//!     let (mut send, recv) = (comm.alloc::<f32>(8)?, comm.alloc::<f32>(4)?);
//!     send.host_mut().fill(comm.rank() as f32);
//!     let pending = comm.start_reduce_scatter(send, recv, ReduceOp::Average)?;
//!     let (_send, shard) = pending.wait()?;
//!     assert_eq!(shard.host(), [0.5; 4]);
//!     Ok(())
//! }
//!
//! Communicator::on_threads(2, Options::default(), |comm| rank(comm).expect("two ranks that call the same"));
//! ```
#![warn(missing_docs)]

pub mod bootstrap;
mod bucket;
mod buffer;
mod cgroup;
mod communicator;
pub mod device;
mod digest;
mod element;
mod engine;
mod error;
mod ledger;
mod locked;
#[doc(hidden)]
pub mod oracle;
mod pages;
#[doc(hidden)]
pub mod parallel;
mod pending;
mod process;
pub mod reduce;
pub mod schedule;
pub mod simd;
pub mod trace;
pub mod transport;
pub mod watch;

pub use bucket::{Bucket, Buckets, Placed};
pub use buffer::{Buffer, Memory, Place, View, ViewMut};
pub use communicator::{
    Alone, Carrier, Communicator, Lane, Message, Order, Staged, Wire, Wired, staged_bytes, staged_call,
    staged_length, wired_bytes,
};
pub use digest::{digest, mix};
pub use element::{DType, Element, Float, ReduceOp, bytes_of, bytes_of_mut};
pub use engine::{Ends, Options, Priority, Progress, Stats, ready_bytes, scratch_bytes};
pub use error::{Error, Result, system_words};
pub use half::{bf16, f16};
pub use ledger::Account;
#[doc(hidden)]
pub use locked::locked;
pub use pending::Pending;
pub use watch::MAX_SIZE;
