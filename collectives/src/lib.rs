//! Typed collectives over pluggable transports.
#![warn(missing_docs)]

pub mod bootstrap;
mod bucket;
mod buffer;
mod communicator;
pub mod device;
mod digest;
mod element;
mod engine;
mod error;
mod ledger;
#[doc(hidden)]
pub mod oracle;
mod pages;
mod pending;
pub mod reduce;
pub mod schedule;
pub mod simd;
pub mod transport;
pub mod watch;

pub use bucket::{Bucket, Buckets, Placed};
pub use buffer::{Buffer, Memory, Place, View, ViewMut};
pub use communicator::{
    Alone, Carrier, Communicator, Lane, Message, Order, Staged, Wire, Wired, staged_bytes, staged_call,
    wired_bytes,
};
pub use digest::digest;
pub use element::{DType, Element, Float, ReduceOp, bytes_of, bytes_of_mut};
pub use engine::{Ends, Options, Priority, Progress, Stats, ready_bytes, scratch_bytes};
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use ledger::Account;
pub use pending::Pending;
pub use watch::MAX_SIZE;
