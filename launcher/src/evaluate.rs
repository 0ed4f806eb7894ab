//! Mean loss over windows of tokens: the same bits for any number of ranks and, on a processor, of windows in a batch.

use crate::agree;
use crate::args::Precision;
use crate::failure::{Failure, Result};
use collectives::Communicator;
use models::Batch;
use models::tokens::{Tokens, Windows};

/// Sums of windows that a rank gives the others in one call: so few that the engine has room for them anyway, and a run
/// holds no more after an evaluation than was planned for its steps.
const AT_ONCE: usize = 16;

/// Deals the windows out in batches, of as many as there is room for (tokens, and those that they predict), batch b to rank
/// b modulo `world`, and gives the mean loss of all; a last window is shorter, `rest` tokens, and a batch of its own unless
/// that is 0. `losses` computes a batch and gives its token losses to the [`Sums`]; ranks that got one batch less are
/// called without one in the last round, because on stage 3 every rank takes part in every forward. Ranks wait for each
/// other after every round, so that a slower one is never behind by more than that.
///
/// # Errors
/// What `losses` or the ranks say; tokens that a rank could not read, of which all ranks hear; a loss that is not finite, of a
/// model with this name and type.
pub fn mean_loss(
    tokens: &Tokens,
    windows: &Windows,
    rest: usize,
    [inputs, targets]: [&mut [u32]; 2],
    (model, dtype): (&str, Precision),
    comm: &Communicator,
    mut losses: impl FnMut(Option<&Batch<'_>>, Sums<'_>) -> Result<()>,
) -> Result<f64> {
    let rows = inputs.len() / windows.length();
    let whole = windows.count().div_ceil(rows);
    let batches = whole + usize::from(rest > 0);
    // Where a batch's windows begin; the shorter one follows all others.
    let all = windows.count() + usize::from(rest > 0);
    let begin = |batch: usize| if batch <= whole { (batch * rows).min(windows.count()) } else { all };
    let width = rows.min(AT_ONCE);
    let mut mine = vec![0f64; rows.next_multiple_of(width)];
    let (mut part, mut sums) = (vec![0f64; width * comm.size()], vec![0f64; rows * comm.size()]);
    let (mut total, mut unread) = (0f64, String::new());
    for from in (0..batches).step_by(comm.size()) {
        let batch = from + comm.rank();
        if batch < batches {
            let (first, end) = (begin(batch), begin(batch + 1));
            let (rows, length) = (end - first, if batch < whole { windows.length() } else { rest });
            let (inputs, targets) = (&mut inputs[..rows * length], &mut targets[..rows * length]);
            let sums = &mut mine[..rows];
            match windows.read(tokens, first, length, inputs, targets) {
                Ok(()) => losses(Some(&Batch { tokens: inputs, targets, rows, length }), Sums(sums))?,
                Err(why) => {
                    // The others compute theirs, and see by the sum that something is wrong.
                    unread = why.to_string();
                    losses(None, Sums(&mut []))?;
                    sums.fill(f64::NAN);
                }
            }
        } else {
            losses(None, Sums(&mut []))?;
        }
        // Added in the order of the windows, whoever had them.
        let start = begin(from);
        let of = |rank: usize| begin(from + rank) - start..begin(from + rank + 1) - start;
        for (piece, first) in mine.chunks(width).zip((0..).step_by(width)) {
            comm.all_gather(piece, &mut part[..])?;
            for (rank, theirs) in part.chunks(width).enumerate() {
                let sums = sums[of(rank)].iter_mut().skip(first);
                sums.zip(theirs).for_each(|(sum, &theirs)| *sum = theirs);
            }
        }
        total = sums[..of(comm.size() - 1).end].iter().fold(total, |total, sum| total + sum);
        if !total.is_finite() {
            break;
        }
    }
    if !total.is_finite() {
        let unread = agree::exchange(comm, &unread)?;
        if let Some((rank, why)) = unread.iter().enumerate().find(|(_, why)| !why.is_empty()) {
            let rank = comm.job_rank(rank);
            return Err(Failure::Unread(format!("rank {rank} has no tokens to evaluate: {why}")));
        }
    }
    let mean = total / (windows.count() * windows.length() + rest) as f64;
    match mean.is_finite() {
        true => Ok(mean),
        false => Err(Failure::Verdict(format!(
            "the loss of {model} is {mean}: its weights are not all finite, or too large for --dtype {}",
            dtype.name()
        ))),
    }
}

/// How many times [`mean_loss`] asks each of `world` ranks for losses.
pub fn rounds(windows: &Windows, rows: usize, rest: usize, world: usize) -> usize {
    (windows.count().div_ceil(rows) + usize::from(rest > 0)).div_ceil(world)
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
    use collectives::Options;
    use models::tokens::Source;
    use std::thread::sleep;
    use std::time::Duration;

    const LENGTH: usize = 7;

    /// So many windows and a shorter one of three inputs.
    fn some(count: usize) -> (Tokens, Windows) {
        let vocab = 1 << 20;
        let source = Source::Random { seed: 1, vocab, len: count * LENGTH + 4 };
        let tokens = Tokens::new(vec![source], vocab);
        let windows = Windows::new(0..tokens.len(), LENGTH).unwrap();
        assert_eq!((windows.count(), windows.rest()), (count, 3));
        (tokens, windows)
    }

    /// Losses of many magnitudes, so that every order of adding them up rounds otherwise.
    fn of(token: u32) -> f32 {
        1.7f32.powi((token % 23) as i32 - 19) * (1.0 + token as f32 * 1e-6)
    }

    /// What each of `world` ranks gets, which first does `before` in every round.
    fn means(
        (tokens, windows): &(Tokens, Windows),
        rows: usize,
        (world, options): (usize, Options),
        before: impl Fn(usize) + Sync,
    ) -> Vec<Result<f64>> {
        Communicator::on_threads(world, options, |comm| {
            let mut asked = 0;
            let [mut inputs, mut targets] = [(); 2].map(|()| vec![0; rows * LENGTH]);
            let mean = mean_loss(
                tokens,
                windows,
                windows.rest(),
                [&mut inputs, &mut targets],
                ("m", Precision::F32),
                &comm,
                |batch, sums| {
                    asked += 1;
                    before(comm.rank());
                    let targets = batch.map_or(&[][..], |batch| batch.targets);
                    sums.set(&targets.iter().map(|&t| of(t)).collect::<Vec<f32>>());
                    Ok(())
                },
            );
            assert_eq!(asked, rounds(windows, rows, windows.rest(), world));
            mean
        })
    }

    #[test]
    fn neither_ranks_nor_windows_in_a_batch_change_the_bits() {
        for (count, cases) in [(1001, &[1, 2, 3, 8, 64, 1001][..]), (5, &[1, 2, 4, 5])] {
            let data = some(count);
            let (tokens, windows) = &data;
            // One after the other, as they lie.
            let mut all = vec![0; count * LENGTH + 3];
            tokens.read(1, &mut all).unwrap();
            let window = |window: &[u32]| window.iter().map(|&t| f64::from(of(t))).sum::<f64>();
            let sum: f64 = all.chunks(LENGTH).map(window).sum();
            let expected = sum / all.len() as f64;
            assert!(expected > 0.0 && windows.rest() > 0);
            for (&rows, world) in cases.iter().flat_map(|rows| [1, 2, 3, 4].map(|world| (rows, world))) {
                for mean in means(&data, rows, (world, Options::default()), |_| ()) {
                    assert_eq!(mean.unwrap().to_bits(), expected.to_bits(), "{rows} rows, {world} ranks");
                }
            }
        }
    }

    /// A rank that is slower than another all the time, but in no round for as long as a peer may be silent.
    #[test]
    fn a_slower_rank_is_waited_for_in_every_round() {
        let options = Options { deadline: Duration::from_secs(1), ..Options::default() };
        let slow = |rank| sleep(Duration::from_millis(if rank == 1 { 100 } else { 0 }));
        for mean in means(&some(50), 1, (2, options), slow) {
            mean.unwrap();
        }
    }
}
