//! ZeRO stages 0 to 3 over the collectives crate.
//!
//! Two verbs carry it all: reduce-scatter of gradients and all-gather of parameters, over flat buckets of each
//! of the model's units. [`Stage`] says what is divided among the ranks, [`Plan`] where everything lives,
//! [`Schedule`] in which order things happen, and [`Trainer::step`] tells the story of a step. Losses and
//! weights agree bit for bit across stages, bucket sizes, transports and prefetching, and, where [`Config::reproducible`]
//! says so, numbers of ranks.
#![warn(missing_docs)]

mod addition;
mod clip;
mod config;
mod doing;
mod error;
mod exact;
mod grads;
mod hands;
mod kernels;
#[cfg(test)]
mod listener;
pub mod memory;
mod optimizer;
mod params;
mod plan;
#[cfg(test)]
mod recorder;
mod scaling;
mod schedule;
mod stage;
mod standing;
mod step;
mod told;
mod trainer;

pub use config::{Config, Placement};
pub use doing::Doing;
pub use error::{Error, Result};
pub use memory::{Ledger, Memory};
pub use optimizer::{AdamW, Source};
pub use plan::{Home, Plan};
pub use scaling::{Scale, Scaling};
pub use schedule::{Action, Schedule};
pub use stage::Stage;
pub use standing::Standing;
pub use step::{Batches, NoBatch, Step};
pub use trainer::{Kept, Sink, StateSink, StateSource, Trainer};
