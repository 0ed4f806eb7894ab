//! The learning rate of each step.

use crate::args::{Rise, Shape};
use std::f64::consts::{LN_2, PI, SQRT_2};

/// The cosine of `turns` half turns, from 0 to 1, by IEEE additions, products and divisions only: ranks on hosts whose systems
/// round `cos` in other ways have the same rate.
fn cos_pi(turns: f64) -> f64 {
    // A sine around the middle, whose series ends soon: z - z^3/3! + z^5/5! - ..., up to z^27/27!.
    let z = PI * (0.5 - turns);
    let series = (1..=13).rev().fold(1.0, |sum, k| 1.0 - z * z / f64::from(2 * k * (2 * k + 1)) * sum);
    z * series
}

/// The natural logarithm of a number from 1, by IEEE operations only, as [`cos_pi`].
fn ln(x: f64) -> f64 {
    let (mut rest, mut halvings) = (x, 0u32);
    while rest > SQRT_2 {
        (rest, halvings) = (rest / 2.0, halvings + 1);
    }
    // ln((1 + z) / (1 - z)) = 2 (z + z^3/3 + z^5/5 + ...), up to z^25/25, of a z below 0.18.
    let z = (rest - 1.0) / (rest + 1.0);
    let series = (0..=12).rev().fold(0.0, |sum, k| sum * z * z + 1.0 / f64::from(2 * k + 1));
    f64::from(halvings) * LN_2 + 2.0 * z * series
}

/// A warm-up, then a shape down to a floor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The highest rate.
    pub peak: f64,
    /// The floor that linear and cosine come down to.
    pub floor: f64,
    /// What warm-up rises from.
    pub start: f64,
    /// Steps of warm-up.
    pub warmup: usize,
    /// How it rises.
    pub rise: Rise,
    /// Steps until linear and cosine are at the floor.
    pub steps: usize,
    /// What follows the warm-up.
    pub shape: Shape,
}

impl Rate {
    /// The rate of `step`, counted from 0. Of schedules of our own step `warmup` has the peak; the floor would be reached by
    /// step `steps`, the one after the last, so that no step of a schedule down to 0 is wasted.
    pub fn at(&self, step: usize) -> f64 {
        if self.shape.of_deepspeed() {
            return self.of_deepspeed(step);
        }
        if step < self.warmup {
            let (part, whole) = match self.rise {
                Rise::Linear => ((step + 1) as f64, self.warmup as f64),
                Rise::Log => (ln(step as f64 + 2.0), ln(self.warmup as f64 + 1.0)),
            };
            return self.start + (self.peak - self.start) * part / whole;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / span).min(1.0);
        match self.shape {
            Shape::Linear => self.floor + (self.peak - self.floor) * (1.0 - done),
            Shape::Cosine => self.floor + 0.5 * (self.peak - self.floor) * (1.0 + cos_pi(done)),
            _ => self.peak,
        }
    }

    /// The same of one of DeepSpeed's: it makes the first step before it has begun to count, and counts that which follows
    /// as 0, so that both have the rate from which warm-up rises.
    fn of_deepspeed(&self, step: usize) -> f64 {
        let Some(count) = step.checked_sub(1) else {
            return if self.shape == Shape::WarmupCosineLr { 0.0 } else { self.start };
        };
        // Of a logarithm to be divided by.
        let warmup = self.warmup.max(2);
        let risen = match self.rise {
            _ if count >= warmup => 1.0,
            Rise::Linear => count as f64 / warmup as f64,
            Rise::Log => 1.0 / ln(warmup as f64) * ln((count + 1) as f64),
        };
        let span = self.steps.saturating_sub(warmup).max(1) as f64;
        match self.shape {
            Shape::WarmupDecayLr if count >= warmup => {
                let left = self.steps.saturating_sub(count) as f64 / span;
                self.start + (self.peak - self.start) * left
            }
            Shape::WarmupCosineLr if count >= warmup => {
                let done = ((count - warmup + 1) as f64 / span).min(1.0);
                self.floor + 0.5 * (self.peak - self.floor) * (1.0 + cos_pi(done))
            }
            _ => self.start + (self.peak - self.start) * risen,
        }
    }
}

#[cfg(test)]
mod tests;
