//! Cross-entropy.

use super::sources;
use collectives::device::{Launch, Module};
use collectives::{Float, View, ViewMut};

const THREADS: usize = 1024;

/// Cross-entropy of each row of `logits` (targets, V): `losses` gets one value a row, and the logits become the gradient
/// of their sum times `scale`, if there is one.
pub fn cross_entropy<'a, T: Float>(
    logits: ViewMut<'a, T>,
    targets: View<'a, u32>,
    losses: ViewMut<'a, f32>,
    scale: Option<f32>,
) -> Launch<'a> {
    let rows = targets.len();
    let width = logits.len() / rows.max(1);
    assert!(logits.len() == rows * width && losses.len() == rows, "one loss for each row of logits");
    Launch::new(Module::new(&sources::CROSS_ENTROPY, T::DTYPE), "cross_entropy", [rows, 1, 1], THREADS)
        .write(losses)
        .write(logits)
        .read(targets)
        .int(width)
        .float(scale.unwrap_or(0.0))
        .flag(scale.is_some())
}
