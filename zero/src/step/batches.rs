//! Where the tokens of a step come from.

use models::Batch;

/// Where the micro-batches of a step come from. All ranks give batches of as many tokens.
pub trait Batches {
    /// Micro-batch `index` of this rank in this step.
    ///
    /// # Errors
    /// Why there is none; the step then ends on all ranks before anything is made of it.
    fn micro_batch(&mut self, index: usize) -> std::result::Result<Batch<'_>, NoBatch>;
}

/// Why a rank has no micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoBatch {
    /// It cannot be had: why, of which other ranks hear the first 1024 bytes.
    Failed(String),
    /// None is wanted, because training is to end before this step: a number for why, which the caller gives a meaning.
    Stop(u8),
}

impl From<String> for NoBatch {
    fn from(why: String) -> Self {
        NoBatch::Failed(why)
    }
}

/// What a rank computes that has no micro-batch.
pub(super) const NOTHING: Batch<'static> = Batch { tokens: &[0], targets: &[0], rows: 1, length: 1 };

/// Every token of a step weighs as much as any other, so its micro-batches have one shape (sequences, tokens of each).
pub(super) fn alike(
    first: (usize, usize),
    other: (usize, usize),
    index: usize,
) -> std::result::Result<(), String> {
    if first == other {
        return Ok(());
    }
    let words = |(rows, length)| format!("{rows} sequences of {length} tokens");
    Err(format!("micro-batch {index} has {}, those before it have {}", words(other), words(first)))
}
