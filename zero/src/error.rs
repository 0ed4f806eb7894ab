//! What can go wrong while training.

use collectives::DType;

/// A failure of one rank's training; every rank ends with one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective failed, or another rank did.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// A configuration that this trainer cannot follow.
    #[error("{problem}")]
    Config {
        /// What was asked for, what there is, and what would work.
        problem: String,
    },
    /// The loss or the gradient is no longer finite.
    #[error(
        "step {step}: the {what} is {value}, so the update would destroy the model; \
         a lower learning rate{} usually helps",
        if *dtype == DType::F32 { " or a longer warmup" } else { ", a longer warmup or f32" }
    )]
    NotFinite {
        /// The optimizer step, counted from 1.
        step: u64,
        /// Which number: the loss, or the gradient's norm.
        what: &'static str,
        /// NaN or infinity.
        value: f64,
        /// The type that the model is trained in.
        dtype: DType,
    },
    /// The caller's source of micro-batches failed.
    #[error("{why}")]
    Batch {
        /// The source's own words.
        why: String,
    },
    /// The caller's source of initial weights failed.
    #[error("initial weights of {tensor}: {why}")]
    Init {
        /// The tensor.
        tensor: String,
        /// The source's own words.
        why: String,
    },
    /// The caller's sink for weights failed.
    #[error("writing {tensor}: {why}")]
    Export {
        /// The tensor.
        tensor: String,
        /// The sink's own words.
        why: String,
    },
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
