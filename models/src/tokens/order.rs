//! Which tokens make which batch: windows, their order, and who takes which.

use super::{Tokens, below};
use crate::error::{Error, Result};
use crate::init::Stream;
use collectives::mix;
use std::ops::Range;

/// The order in which windows come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Window after window; after the last comes the first.
    Sequential,
    /// Each epoch a permutation of its own, of windows that start at an offset of its own (below the length of a
    /// window), so that text is not always cut at the same places.
    Shuffled {
        /// Chooses permutations and offsets.
        seed: u64,
    },
}

/// Consecutive windows over a range of tokens: window s of length T + 1 starts at token s * T of the range, and
/// overlaps the next by one token, because each token but the first is also a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    range: Range<usize>,
    length: usize,
}

impl Windows {
    /// Windows with `length` (T) inputs and targets each.
    ///
    /// # Errors
    /// Not even one window fits.
    pub fn new(range: Range<usize>, length: usize) -> Result<Self> {
        if length == 0 {
            return Err(Error::config("the sequence length is 0: it must be at least 1"));
        }
        if range.len() <= length {
            let shorter = match range.len() {
                0 | 1 => String::new(),
                n => format!(" or a sequence of at most {}", n - 1),
            };
            return Err(Error::config(format!(
                "{} tokens of data are shorter than one sequence of {length} and its next token: more data{shorter} is \
                 needed",
                range.len()
            )));
        }
        Ok(Windows { range, length })
    }

    /// Whole windows, (tokens - 1) / T.
    pub fn count(&self) -> usize {
        (self.range.len() - 1) / self.length
    }

    /// Inputs that have a target behind the last whole window, fewer than T.
    pub fn rest(&self) -> usize {
        (self.range.len() - 1) % self.length
    }

    /// The first of these windows, whole ones of at most `tokens` inputs in all, but at least one.
    pub fn first(&self, tokens: usize) -> Windows {
        let count = (tokens / self.length).clamp(1, self.count());
        let range = self.range.start..self.start(count) + 1;
        Windows { range, length: self.length }
    }

    /// Inputs of a window, T.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The first token of window `window`.
    pub fn start(&self, window: usize) -> usize {
        self.range.start + window * self.length
    }

    /// Fills inputs and targets, both (rows, `length`), with the beginnings of the `rows` windows from `first`, as an
    /// evaluation does that takes each window once: whole, with T as `length`, and what follows them.
    ///
    /// # Errors
    /// A length of 0 or windows past the last token of these, or those of [`Tokens::read`].
    ///
    /// # Panics
    /// `inputs` and `targets` are not equally long, or no whole rows.
    pub fn read(
        &self,
        tokens: &Tokens,
        first: usize,
        length: usize,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<()> {
        let rows = inputs.len().checked_div(length).unwrap_or(0);
        let end = || {
            let last = first.checked_add(rows)?.checked_sub(1)?;
            last.checked_mul(self.length)?.checked_add(self.range.start)?.checked_add(length)
        };
        if rows == 0 || end().is_none_or(|end| end >= self.range.end) {
            return Err(Error::config(format!(
                "{rows} windows of {length} tokens from the {first}th on are asked for, and there are {} of {} in {} tokens",
                self.count(),
                self.length,
                self.range.len()
            )));
        }
        fill(tokens, length, inputs, targets, |row| self.start(first + row))
    }
}

/// Fills row after row from the token that `start` gives for it.
fn fill(
    tokens: &Tokens,
    length: usize,
    inputs: &mut [u32],
    targets: &mut [u32],
    start: impl Fn(usize) -> usize,
) -> Result<()> {
    assert_eq!(inputs.len(), targets.len(), "as many inputs as targets");
    assert_eq!(inputs.len() % length, 0, "whole rows");
    let rows = inputs.chunks_exact_mut(length).zip(targets.chunks_exact_mut(length));
    for (row, (inputs, targets)) in rows.enumerate() {
        let start = start(row);
        tokens.read(start, inputs)?;
        targets[..length - 1].copy_from_slice(&inputs[1..]);
        tokens.read(start + length, &mut targets[length - 1..])?;
    }
    Ok(())
}

/// The batches of a training run. Micro-batch a of rank r in step k has the global index
/// G = (k * accumulate + a) * world + r and takes windows G * B to G * B + B - 1 of the endless sequence of
/// windows, so that the same G means the same tokens in any world. Where other batches came [before](Self::after), k is
/// counted from behind their steps, and windows from behind theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    windows: Windows,
    order: Order,
    /// Sequences of a micro-batch, B.
    rows: usize,
    accumulate: usize,
    world: usize,
    /// Steps that were made before, and windows that they took.
    before: (u64, u64),
}

impl BatchPlan {
    /// Micro-batches of `rows` sequences, `accumulate` of them per rank and step, over `world` ranks.
    ///
    /// # Errors
    /// One of these is zero, or the data is shorter than one micro-batch.
    pub fn new(windows: Windows, order: Order, rows: usize, accumulate: usize, world: usize) -> Result<Self> {
        for (name, value) in [("micro-batch", rows), ("accumulation", accumulate), ("number of ranks", world)]
        {
            if value == 0 {
                return Err(Error::config(format!("the {name} is 0: it must be at least 1")));
            }
        }
        if windows.count() < rows {
            return Err(Error::config(format!(
                "{} tokens of data hold {} sequences of {}, fewer than one micro-batch of {rows}: more data, a \
                 shorter sequence or a smaller micro-batch is needed",
                windows.range.len(),
                windows.count(),
                windows.length
            )));
        }
        Ok(BatchPlan { windows, order, rows, accumulate, world, before: (0, 0) })
    }

    /// The same after `steps` steps that took `windows` windows of these, in batches that may have been others: none of the
    /// windows comes twice and none is left out, but for what an end of the data does.
    pub fn after(self, steps: u64, windows: u64) -> Self {
        BatchPlan { before: (steps, windows), ..self }
    }

    /// The first window of micro-batch `micro` of rank `rank` in step `step`, all counted from 0.
    ///
    /// # Panics
    /// A step before the first of these.
    pub fn first(&self, step: u64, micro: usize, rank: usize) -> u64 {
        let (steps, windows) = self.before;
        assert!(step >= steps, "a step after those before");
        let index =
            ((step - steps) * self.accumulate as u64 + micro as u64) * self.world as u64 + rank as u64;
        windows + index * self.rows as u64
    }

    /// The first token of the n-th window of the run.
    pub fn start(&self, n: u64) -> usize {
        let seed = match self.order {
            Order::Sequential => return self.windows.start((n % self.windows.count() as u64) as usize),
            Order::Shuffled { seed } => seed,
        };
        // As many windows as fit behind every offset, so that all epochs have equally many.
        let (len, length) = (self.windows.range.len(), self.windows.length);
        let count = ((len - length) / length).max(1);
        let offsets = length.min(len - count * length);
        let (epoch, index) = (n / count as u64, n % count as u64);
        let stream = Stream::new(seed, "epochs");
        let offset = below(stream.bits(2 * epoch), offsets as u64) as usize;
        let window = permute(index, count as u64, stream.bits(2 * epoch + 1)) as usize;
        self.windows.start(window) + offset
    }

    /// Fills inputs and targets, both (rows, T), of the micro-batch that begins with window `first`. Allocates nothing
    /// unless it fails.
    ///
    /// # Errors
    /// Those of [`Tokens::read`].
    pub fn read(&self, tokens: &Tokens, first: u64, inputs: &mut [u32], targets: &mut [u32]) -> Result<()> {
        assert_eq!(inputs.len(), self.rows * self.windows.length, "room for one micro-batch");
        fill(tokens, self.windows.length, inputs, targets, |row| self.start(first + row as u64))
    }
}

/// Where a pseudo-random permutation of `0..n` takes `index`: a Feistel network over the next even number of bits,
/// walked until it is back inside, so that nothing need be stored.
fn permute(index: u64, n: u64, key: u64) -> u64 {
    let half = (u64::BITS - (n - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut x = index;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..6u64 {
            (left, right) = (right, left ^ (mix(key ^ mix(right + (round << 56))) & mask));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Source;
    use super::*;
    use std::collections::HashSet;

    fn counting(len: usize) -> Tokens {
        let tokens = (0..len as u32).collect();
        Tokens::new(vec![Source::Memory { name: "counting".into(), tokens }], len)
    }

    #[test]
    fn sequential_batches_follow_the_published_rule() {
        let (length, rows, accumulate, world) = (4, 2, 3, 2);
        let tokens = counting(60);
        let windows = Windows::new(0..tokens.len(), length).unwrap();
        assert_eq!(windows.count(), 14);
        let plan = BatchPlan::new(windows, Order::Sequential, rows, accumulate, world).unwrap();
        let (mut inputs, mut targets) = (vec![0; 8], vec![0; 8]);
        // Replayed by hand: in each step, micro-batches g = a * world + r in order take the next windows.
        let mut window = 0;
        for step in 0..5 {
            for g in 0..accumulate * world {
                plan.read(&tokens, plan.first(step, g / world, g % world), &mut inputs, &mut targets)
                    .unwrap();
                for row in 0..rows {
                    let start = (window % 14) * length as u32;
                    for t in 0..length {
                        assert_eq!(inputs[row * length + t], start + t as u32);
                        assert_eq!(targets[row * length + t], start + t as u32 + 1);
                    }
                    window += 1;
                }
            }
        }
    }

    #[test]
    fn windows_past_the_end_are_refused_wherever_they_begin() {
        let tokens = counting(60);
        let windows = Windows::new(3..60, 4).unwrap();
        let (mut inputs, mut targets) = (vec![0; 8], vec![0; 8]);
        windows.read(&tokens, 12, 4, &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs[0], targets[7]), (51, 59));
        for first in [13, 14, usize::MAX / 4 - 13, usize::MAX / 4, usize::MAX - 1, usize::MAX] {
            let refused = windows.read(&tokens, first, 4, &mut inputs, &mut targets);
            assert!(refused.unwrap_err().to_string().contains(&format!("from the {first}th on")));
        }
    }

    #[test]
    fn shuffled_epochs_take_each_window_once_at_changing_offsets() {
        for (len, length) in [(1000, 7), (20, 7), (13, 7), (8, 7), (15, 7), (2, 1)] {
            let range = 5..5 + len;
            let windows = Windows::new(range.clone(), length).unwrap();
            let plan = BatchPlan::new(windows, Order::Shuffled { seed: 1 }, 1, 1, 1).unwrap();
            let count = ((len - length) / length).max(1) as u64;
            let (mut offsets, mut orders) = (HashSet::new(), HashSet::new());
            for epoch in 0..200u64 {
                let starts: Vec<usize> = (0..count).map(|i| plan.start(epoch * count + i)).collect();
                let distinct: HashSet<_> = starts.iter().collect();
                assert_eq!(distinct.len() as u64, count);
                let offset = (starts[0] - range.start) % length;
                for start in &starts {
                    assert_eq!((start - range.start) % length, offset);
                    assert!(start + length < range.end, "{start} of {range:?}");
                }
                offsets.insert(offset);
                orders.insert(starts);
            }
            assert_eq!(offsets.len(), length.min(len - length), "every offset occurs");
            assert!(count < 3 || orders.len() > 3);
        }
    }

    #[test]
    fn shuffled_tokens_do_not_depend_on_the_world() {
        let windows = Windows::new(0..1000, 8).unwrap();
        let order = Order::Shuffled { seed: 9 };
        let one = BatchPlan::new(windows.clone(), order, 2, 4, 1).unwrap();
        let four = BatchPlan::new(windows.clone(), order, 2, 1, 4).unwrap();
        for step in 0..9 {
            for g in 0..4 {
                assert_eq!(one.first(step, g, 0), four.first(step, 0, g));
                assert_eq!(one.start(one.first(step, g, 0)), four.start(four.first(step, 0, g)));
            }
        }
        let other = BatchPlan::new(windows, Order::Shuffled { seed: 10 }, 2, 1, 4).unwrap();
        assert!((0..50).any(|n| other.start(n) != four.start(n)));
    }

    /// As of a training that goes on with other batches than it began with.
    #[test]
    fn after_others_the_next_windows_come_none_twice_and_none_left_out() {
        let windows = Windows::new(0..1000, 8).unwrap();
        let order = Order::Shuffled { seed: 9 };
        let plan = |rows, accumulate, world| BatchPlan::new(windows.clone(), order, rows, accumulate, world);
        let (first, then) = (plan(2, 3, 4).unwrap(), plan(5, 1, 3).unwrap().after(7, 7 * 24));
        let mut taken = Vec::new();
        for (batches, steps, rows, accumulate, world) in [(first, 0..7, 2, 3, 4), (then, 7..11, 5, 1, 3)] {
            for (step, micro, rank) in
                steps.flat_map(|s| (0..accumulate * world).map(move |g| (s, g / world, g % world)))
            {
                let first = batches.first(step, micro, rank);
                taken.extend(first..first + rows);
            }
        }
        assert_eq!(taken, (0..7 * 24 + 4 * 15).collect::<Vec<_>>());
        // With the same batches it is as if nothing had been before.
        let (whole, rest) = (plan(2, 3, 4).unwrap(), plan(2, 3, 4).unwrap().after(7, 7 * 24));
        assert!((7..20).all(|step| whole.first(step, 1, 2) == rest.first(step, 1, 2)));
    }

    #[test]
    fn permutations_are_bijections_and_mix() {
        for n in (1..130).chain([1000, 4097]) {
            let image: HashSet<u64> = (0..n).map(|i| permute(i, n, 42)).collect();
            assert_eq!(image.len() as u64, n);
            assert!(image.iter().all(|&x| x < n));
        }
        // The mean distance between an index and its image is n/3 in a random permutation.
        let n = 100_000u64;
        let mean = (0..n).map(|i| permute(i, n, 7).abs_diff(i) as f64).sum::<f64>() / (n * n) as f64;
        assert!((mean - 1.0 / 3.0).abs() < 0.005, "{mean}");
    }

    #[test]
    fn evaluation_takes_the_windows_of_the_baseline() {
        let tokens = counting(1000);
        let (_, held_out) = tokens.split(0.1).unwrap();
        let windows = Windows::new(held_out, 64).unwrap();
        assert_eq!(windows.count(), 1);
        let (mut inputs, mut targets) = (vec![0; 64], vec![0; 64]);
        windows.read(&tokens, 0, 64, &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs[0], targets[63]), (900, 964));
        // What follows has no 64 tokens more.
        assert_eq!(windows.rest(), 35);
        windows.read(&tokens, 1, 35, &mut inputs[..35], &mut targets[..35]).unwrap();
        for (first, length) in [(1, 36), (1, 64), (2, 1), (0, 0)] {
            let (inputs, targets) = (&mut inputs[..length], &mut targets[..length]);
            let refused = windows.read(&tokens, first, length, inputs, targets).unwrap_err().to_string();
            assert!(refused.contains("are asked for"), "{first} {length}: {refused}");
        }
        assert_eq!((inputs[0], targets[34]), (964, 999));
    }

    #[test]
    fn the_first_windows_are_whole_and_at_least_one() {
        let windows = Windows::new(100..190, 9).unwrap();
        assert_eq!((windows.count(), windows.rest()), (9, 8));
        for (tokens, count) in [(0, 1), (17, 1), (18, 2), (80, 8), (81, 9), (usize::MAX, 9)] {
            let first = windows.first(tokens);
            assert_eq!((first.count(), first.rest(), first.start(0)), (count, 0, 100), "{tokens}");
        }
    }

    #[test]
    fn too_little_data_is_named() {
        let text = Windows::new(0..64, 64).unwrap_err().to_string();
        assert!(text.contains("64 tokens") && text.contains("at most 63"), "{text}");
        for none in [0..0, 0..1] {
            let text = Windows::new(none, 4).unwrap_err().to_string();
            assert!(text.ends_with("next token: more data is needed"), "{text}");
        }
        assert!(Windows::new(0..10, 0).is_err());
        let windows = Windows::new(0..100, 9).unwrap();
        let text = BatchPlan::new(windows.clone(), Order::Sequential, 12, 1, 1).unwrap_err().to_string();
        assert!(text.contains("hold 11 sequences of 9") && text.contains("12"), "{text}");
        assert!(BatchPlan::new(windows.clone(), Order::Sequential, 0, 1, 1).is_err());
        assert!(BatchPlan::new(windows.clone(), Order::Sequential, 1, 0, 1).is_err());
        assert!(BatchPlan::new(windows, Order::Sequential, 1, 1, 0).is_err());
    }
}
