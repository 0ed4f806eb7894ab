//! Mean loss over windows of tokens: the same bits for any number of ranks, and of windows in a batch.

use crate::failure::{Failure, Result};
use collectives::{Communicator, ReduceOp};
use models::Batch;
use models::tokens::{Tokens, Windows};

/// Sums of windows that ranks add in one call: so few that the engine has room for them anyway, and a run holds no more
/// after an evaluation than was planned for its steps.
const AT_ONCE: usize = 8;

/// Deals the windows out in batches of `rows`, batch b to rank b modulo `world`, and gives the mean loss of all; a
/// last window is shorter, `rest` tokens, and a batch of its own unless that is 0. `losses` computes a batch and gives
/// its token losses to the [`Sums`]; ranks that got one batch less are called without one in the last round, because on
/// stage 3 every rank takes part in every forward.
pub fn mean_loss(
    tokens: &Tokens,
    windows: &Windows,
    rows: usize,
    rest: usize,
    comm: &Communicator,
    mut losses: impl FnMut(Option<&Batch<'_>>, Sums<'_>) -> Result<()>,
) -> Result<f64> {
    let whole = windows.count().div_ceil(rows);
    let batches = whole + usize::from(rest > 0);
    let mut sums = vec![0f64; windows.count() + usize::from(rest > 0)];
    let mut inputs = vec![0u32; rows * windows.length()];
    let mut targets = vec![0u32; rows * windows.length()];
    for round in 0..batches.div_ceil(comm.size()) {
        let batch = round * comm.size() + comm.rank();
        if batch >= batches {
            losses(None, Sums(&mut []))?;
            continue;
        }
        let first = batch * rows;
        let (first, rows, length) = match batch < whole {
            true => (first, rows.min(windows.count() - first), windows.length()),
            false => (windows.count(), 1, rest),
        };
        let (inputs, targets) = (&mut inputs[..rows * length], &mut targets[..rows * length]);
        windows.read(tokens, first, length, inputs, targets).map_err(Failure::run)?;
        let batch = Batch { tokens: inputs, targets, rows, length };
        losses(Some(&batch), Sums(&mut sums[first..first + rows]))?;
    }
    // Each sum is on one rank and zero on the others, so adding over ranks is exact; then the order is that of
    // the windows, whoever had them.
    for part in sums.chunks_mut(AT_ONCE) {
        comm.all_reduce_in_place(part, ReduceOp::Sum)?;
    }
    Ok(sums.iter().sum::<f64>() / (windows.count() * windows.length() + rest) as f64)
}

/// Where the losses of a batch's windows go.
pub struct Sums<'a>(&'a mut [f64]);

impl Sums<'_> {
    /// Adds up each window's token losses in their order.
    pub fn set(self, losses: &[f32]) {
        let length = (losses.len() / self.0.len().max(1)).max(1);
        for (sum, window) in self.0.iter_mut().zip(losses.chunks(length)) {
            *sum = window.iter().map(|&loss| f64::from(loss)).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::tokens::Source;

    #[test]
    fn windows_in_a_batch_do_not_change_the_bits() {
        let (length, count, vocab) = (7, 1001, 1 << 20);
        let source = Source::Random { seed: 1, vocab, len: count * length + 4 };
        let tokens = Tokens::new(vec![source], vocab);
        let windows = Windows::new(0..tokens.len(), length).unwrap();
        let comm = Communicator::threads(1).remove(0);
        // Of many magnitudes, so that every order of adding them up rounds otherwise.
        let of = |token: u32| 1.7f32.powi((token % 23) as i32 - 19) * (1.0 + token as f32 * 1e-6);
        let mean = |rows| {
            let loss = mean_loss(&tokens, &windows, rows, windows.rest(), &comm, |batch, sums| {
                sums.set(&batch.unwrap().targets.iter().map(|&t| of(t)).collect::<Vec<f32>>());
                Ok(())
            });
            loss.unwrap().to_bits()
        };
        let one = mean(1);
        assert!([2, 3, 8, 64, 1001].iter().all(|&rows| mean(rows) == one));
        assert!(f64::from_bits(one) > 0.0 && windows.rest() > 0);
    }
}
