//! Llama with hand-written forward and backward.
#![warn(missing_docs)]

mod config;
mod error;
pub mod hf;
mod init;
pub mod tokens;
mod unit;
mod units;

pub use config::{LlamaConfig, Rope, RopeScaling};
pub use error::{Error, Result};
pub use init::init_range;
pub use unit::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
