//! Typed collectives over pluggable transports.
#![warn(missing_docs)]

pub mod bootstrap;
mod bucket;
mod buffer;
mod element;
mod error;
mod ledger;
#[doc(hidden)]
pub mod oracle;
pub mod reduce;
pub mod simd;
pub mod transport;

pub use bucket::{Bucket, Buckets, Placed};
pub use buffer::{Buffer, Memory, Place, View, ViewMut};
pub use element::{DType, Element, Float, ReduceOp};
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use ledger::Account;
