//! Cross-entropy of rows of logits, and its gradient from the same exponentials.

use super::math::{exp_sum, ln, max};
use collectives::Float;

collectives::simd_dispatch! {
    /// The losses of rows of logits, which become exponentials, without gradients.
    pub(super) fn losses(logits: &mut [f32], targets: &[u32], losses: &mut [f32]) = losses_body;

    /// The losses and the gradient of their sum times `scale`.
    pub(super) fn losses_and_gradients<T: Float>(
        logits: &mut [f32],
        targets: &[u32],
        losses: &mut [f32],
        d_logits: &mut [T],
        scale: f32,
    ) = losses_and_gradients_body;

    /// The same with the gradient in the place of the logits.
    pub(super) fn gradients_in_place(
        logits: &mut [f32],
        targets: &[u32],
        losses: &mut [f32],
        scale: f32,
    ) = gradients_in_place_body;
}

/// One row: its loss and the sum of its exponentials, which replace the logits.
#[inline(always)]
fn row(logits: &mut [f32], target: usize) -> (f32, f32) {
    let (largest, right) = (max(logits), logits[target]);
    let sum = exp_sum(logits, 1.0, largest);
    (ln(sum) + (largest - right), sum)
}

#[inline(always)]
fn losses_body(logits: &mut [f32], targets: &[u32], losses: &mut [f32]) {
    let vocab = logits.len() / targets.len().max(1);
    for ((logits, &target), loss) in logits.chunks_exact_mut(vocab.max(1)).zip(targets).zip(losses) {
        *loss = row(logits, target as usize).0;
    }
}

#[inline(always)]
fn losses_and_gradients_body<T: Float>(
    logits: &mut [f32],
    targets: &[u32],
    losses: &mut [f32],
    d_logits: &mut [T],
    scale: f32,
) {
    let vocab = (logits.len() / targets.len().max(1)).max(1);
    let rows = logits.chunks_exact_mut(vocab).zip(d_logits.chunks_exact_mut(vocab));
    for ((logits, d_logits), (&target, loss)) in rows.zip(targets.iter().zip(losses)) {
        let target = target as usize;
        let (own, sum) = row(logits, target);
        *loss = own;
        let factor = scale / sum;
        for (d, e) in d_logits.iter_mut().zip(&*logits) {
            *d = T::from_f32(e * factor);
        }
        d_logits[target] = T::from_f32(logits[target] * factor - scale);
    }
}

#[inline(always)]
fn gradients_in_place_body(logits: &mut [f32], targets: &[u32], losses: &mut [f32], scale: f32) {
    let vocab = (logits.len() / targets.len().max(1)).max(1);
    for (logits, (&target, loss)) in logits.chunks_exact_mut(vocab).zip(targets.iter().zip(losses)) {
        let target = target as usize;
        let (own, sum) = row(logits, target);
        *loss = own;
        let (factor, right) = (scale / sum, logits[target]);
        for e in logits.iter_mut() {
            *e *= factor;
        }
        logits[target] = right * factor - scale;
    }
}
