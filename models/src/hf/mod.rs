//! Hugging Face model directories: config.json and safetensors weights, read and written.

mod config;
mod fields;
mod layout;
mod load;
mod names;
mod parts;
mod remarks;
mod rope;
mod save;
mod staging;
mod sum;

pub use config::check_loadable;
pub use load::{Checkpoint, check_fetched, has_weights, read_config, templates};
pub use parts::{Part, Parts, Piece};
pub use remarks::Remarks;
pub use rope::rope_scaling;
pub use save::{SaveOptions, Writer, check_destination};
pub use staging::sync_dir;
pub use sum::Sum;
