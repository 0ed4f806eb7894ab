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
    /// The loss or the gradient is not finite: from the start, or no longer.
    #[error("step {step}: the {what} is {value}{}", why_not_finite(*step, *dtype, *scale))]
    NotFinite {
        /// The optimizer step, counted from 1.
        step: u64,
        /// Which number: the loss, or the gradient's norm.
        what: &'static str,
        /// NaN or infinity.
        value: f64,
        /// The type that the model is trained in.
        dtype: DType,
        /// The scale of the loss, where that may be what is too large, and no other was left.
        scale: Option<f32>,
    },
    /// A rank's source of micro-batches failed; all ranks say so.
    #[error("step {step}: rank {rank} has no tokens to train on: {why}")]
    Batch {
        /// The optimizer step, counted from 1.
        step: u64,
        /// The rank of the job.
        rank: usize,
        /// The source's own words.
        why: String,
    },
    /// Ranks do not do the same in a step, so that nothing right could come of it; all ranks say so.
    #[error(
        "step {step}: rank {rank} has {tokens} tokens in a micro-batch and a learning rate of {lr:e}, and rank {other} {others} \
         and {other_lr:e}: all ranks have to be alike"
    )]
    Unlike {
        /// The optimizer step, counted from 1.
        step: u64,
        /// The first rank of the job that differs.
        rank: usize,
        /// Its tokens of a micro-batch.
        tokens: u32,
        /// Its learning rate.
        lr: f32,
        /// The rank that it differs from.
        other: usize,
        /// Tokens of a micro-batch there.
        others: u32,
        /// The learning rate there.
        other_lr: f32,
    },
    /// Ranks begin with other weights; all say so.
    #[error(
        "the initial weights of rank {rank} are not those of rank {other}: at stage 0 each rank keeps its own, so they must be"
    )]
    Weights {
        /// The first rank of the job that differs.
        rank: usize,
        /// The rank that it differs from.
        other: usize,
    },
    /// A rank cannot go on with the state of an earlier training; all say so.
    #[error("rank {rank} cannot go on from the state that was kept: {why}")]
    Restore {
        /// The rank of the job.
        rank: usize,
        /// What its source said, or in what it differs from others.
        why: String,
    },
    /// A rank's source of micro-batches wants no further step; all ranks say so.
    #[error("step {step} is not made: rank {rank} is to stop (for reason {why})")]
    Stopped {
        /// The optimizer step, counted from 1.
        step: u64,
        /// The rank of the job.
        rank: usize,
        /// The source's own number.
        why: u8,
    },
    /// A learning rate that can be none; all ranks say so.
    #[error("the learning rate is {lr:?}: it has to be at least 0")]
    Rate {
        /// The rate.
        lr: f32,
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

impl Error {
    /// Whether nothing is left half done: all ranks say so together, or a sink does, without which all went on.
    pub(crate) fn leaves_whole(&self) -> bool {
        use Error::{Batch, Export, NotFinite, Rate, Stopped, Unlike};
        matches!(
            self,
            Export { .. } | NotFinite { .. } | Batch { .. } | Unlike { .. } | Stopped { .. } | Rate { .. }
        )
    }

    /// Of the numbers of a step, one of which is not finite, in a training without another scale of the loss.
    pub(crate) fn not_finite(step: u64, norm: f64, loss: f64, dtype: DType, scale: Option<f32>) -> Self {
        let (what, value) = match loss.is_finite() || scale.is_none() && !norm.is_finite() {
            true => ("global gradient norm", norm),
            false => ("loss", loss),
        };
        Error::NotFinite { step, what, value, dtype, scale: scale.filter(|_| loss.is_finite()) }
    }
}

/// What makes such a number, and what helps. What comes before the first update only the weights have made.
fn why_not_finite(step: u64, dtype: DType, scale: Option<f32>) -> String {
    match (step, dtype, scale) {
        (_, _, Some(scale)) => format!(
            " with a loss scale of {}, below which none is left: a smaller scale or bf16 usually helps, and a lower learning \
             rate or a longer warmup where losses rise",
            f64::from(scale)
        ),
        (1, dtype, _) => {
            format!(" before any update: the weights are not all finite, or too large for {dtype}")
        }
        (_, DType::F32, _) => format!("{DESTROYS} or a longer warmup usually helps"),
        (_, DType::F16, _) => format!("{DESTROYS}, a longer warmup or bf16 usually helps"),
        _ => format!("{DESTROYS}, a longer warmup or f32 usually helps"),
    }
}

const DESTROYS: &str = ", so the update would destroy the model; a lower learning rate";
