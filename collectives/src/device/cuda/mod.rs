//! GPUs: [`Gpu`] is a device with its libraries, [`Stream`] a queue of it, [`Event`] a moment of a stream.
//!
//! Streams wait for each other only through events that the caller records: nothing is tracked behind the caller's
//! back, and no call waits for the device but [`synchronize`](super::Queue::synchronize), [`reach`](super::Queue::reach),
//! taking and freeing memory, and uploads that find no staging memory free.

mod event;
mod gathered;
mod gpu;
mod memory;
mod nccl;
mod product;
mod stream;
mod survey;

pub use super::Urgency;
pub use event::Event;
pub use gpu::{Gpu, Properties};
pub use nccl::{BLOCKING, Nccl, share_gpu, share_gpu_on_one_host};
pub use stream::Stream;
pub use survey::{Found, Library, Survey};
