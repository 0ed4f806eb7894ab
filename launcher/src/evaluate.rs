//! Mean loss over windows of tokens: the same bits for any number of ranks.

use crate::failure::{Failure, Result};
use collectives::{Communicator, ReduceOp};
use models::Batch;
use models::tokens::{Tokens, Windows};

/// Sums of batches that ranks add in one call: so few that the engine has room for them anyway, and a run holds no more
/// after an evaluation than was planned for its steps.
const AT_ONCE: usize = 8;

/// Deals the windows out in batches of `rows`, batch b to rank b modulo `world`, and gives the mean loss of all; a
/// last window is shorter, `rest` tokens, and a batch of its own unless that is 0. `loss` gives the sum of the token
/// losses of a batch; ranks that got one batch less are called without one in the last round, because on stage 3 every
/// rank takes part in every forward.
pub fn mean_loss(
    tokens: &Tokens,
    windows: &Windows,
    rows: usize,
    rest: usize,
    comm: &Communicator,
    mut loss: impl FnMut(Option<&Batch<'_>>) -> Result<f64>,
) -> Result<f64> {
    let whole = windows.count().div_ceil(rows);
    let batches = whole + usize::from(rest > 0);
    let mut sums = vec![0f64; batches];
    let mut inputs = vec![0u32; rows * windows.length()];
    let mut targets = vec![0u32; rows * windows.length()];
    for round in 0..batches.div_ceil(comm.size()) {
        let batch = round * comm.size() + comm.rank();
        if batch >= batches {
            loss(None)?;
            continue;
        }
        let first = batch * rows;
        let (first, rows, length) = match batch < whole {
            true => (first, rows.min(windows.count() - first), windows.length()),
            false => (windows.count(), 1, rest),
        };
        let (inputs, targets) = (&mut inputs[..rows * length], &mut targets[..rows * length]);
        windows.read(tokens, first, length, inputs, targets).map_err(Failure::run)?;
        sums[batch] = loss(Some(&Batch { tokens: inputs, targets, rows, length }))?;
    }
    // Each sum is on one rank and zero on the others, so adding over ranks is exact; then the order is that of
    // the batches, whoever had them.
    for part in sums.chunks_mut(AT_ONCE) {
        comm.all_reduce_in_place(part, ReduceOp::Sum)?;
    }
    Ok(sums.iter().sum::<f64>() / (windows.count() * windows.length() + rest) as f64)
}
