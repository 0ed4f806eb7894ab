//! Cross-entropy.

use super::sources;
use collectives::device::{Launch, Module};
use collectives::{Float, View, ViewMut};

const THREADS: usize = 512;

/// Cross-entropy of each row of `logits` (targets, V): `losses` gets one value a row, and `d_logits`, if wanted, the
/// gradient of their sum times `scale`.
pub fn cross_entropy<'a, T: Float>(
    logits: View<'a, f32>,
    targets: View<'a, u32>,
    losses: ViewMut<'a, f32>,
    d_logits: Option<ViewMut<'a, T>>,
    scale: f32,
) -> Launch<'a> {
    let rows = targets.len();
    let width = logits.len() / rows.max(1);
    assert!(logits.len() == rows * width && losses.len() == rows, "one loss for each row of logits");
    assert!(d_logits.as_ref().is_none_or(|d| d.len() == logits.len()), "one gradient for each logit");
    Launch::new(Module::new(&sources::CROSS_ENTROPY, T::DTYPE), "cross_entropy", [rows, 1, 1], THREADS)
        .write(losses)
        .maybe_write(d_logits)
        .read(logits)
        .read(targets)
        .int(width)
        .float(scale)
}
