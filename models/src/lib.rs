//! Llama with hand-written forward and backward.
#![warn(missing_docs)]

mod unit;

pub use unit::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
