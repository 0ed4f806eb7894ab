//! Llama with hand-written forward and backward.
#![warn(missing_docs)]

mod config;
mod cpu;
pub mod cuda;
mod error;
pub mod hf;
mod init;
mod llama;
mod ops;
mod regular;
mod team;
pub mod tokens;
mod unfinished;
mod unit;
mod units;

pub use collectives::device::MatmulPrecision;
pub use config::{LlamaConfig, Rope, RopeScaling};
pub use cpu::has_faster_products;
pub use error::{Error, Result};
pub use init::init_range;
pub use llama::{
    Accounts, Footprint, Llama, Recompute, check_on_device, device_footprint, device_modules, footprint,
};
pub use ops::{AttentionBackward, AttentionShape, Matrix, Normed, Ops, Plus, Turn};
pub use regular::is_there;
pub use team::Team;
pub use unfinished::{NewFile, abandon, is_mount_point, parent, remove_unfinished};
pub use unit::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
