//! Llama with hand-written forward and backward.
#![warn(missing_docs)]

mod config;
mod error;
mod unit;

pub use config::{LlamaConfig, Rope, RopeScaling};
pub use error::{Error, Result};
pub use unit::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
