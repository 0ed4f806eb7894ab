//! Hugging Face model directories: config.json and safetensors weights, read and written.

mod config;
mod load;
mod save;
mod staging;

pub use load::Checkpoint;
pub use save::{SaveOptions, Writer, check_destination};
