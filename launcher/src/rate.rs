//! The learning rate of each step.

use crate::args::Shape;
use std::f64::consts::PI;

/// The cosine of `turns` half turns, from 0 to 1, by IEEE additions, products and divisions only: ranks on hosts whose systems
/// round `cos` in other ways have the same rate.
fn cos_pi(turns: f64) -> f64 {
    // A sine around the middle, whose series ends soon: z - z^3/3! + z^5/5! - ..., up to z^27/27!.
    let z = PI * (0.5 - turns);
    let series = (1..=13).rev().fold(1.0, |sum, k| 1.0 - z * z / f64::from(2 * k * (2 * k + 1)) * sum);
    z * series
}

/// A linear warm-up, then a shape down to a floor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The highest rate.
    pub peak: f64,
    /// The floor that linear and cosine come down to.
    pub floor: f64,
    /// Steps of warm-up.
    pub warmup: usize,
    /// Steps of the whole run.
    pub steps: usize,
    /// What follows the warm-up.
    pub shape: Shape,
}

impl Rate {
    /// The rate of `step`, counted from 0. Step `warmup` has the peak; the floor would be reached by the step
    /// after the last, so that no step of a schedule down to 0 is wasted.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let span = (self.steps - self.warmup).max(1) as f64;
        let done = (step - self.warmup) as f64 / span;
        match self.shape {
            Shape::Constant => self.peak,
            Shape::Linear => self.floor + (self.peak - self.floor) * (1.0 - done),
            Shape::Cosine => self.floor + 0.5 * (self.peak - self.floor) * (1.0 + cos_pi(done)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(shape: Shape) -> Rate {
        Rate { peak: 1e-3, floor: 1e-4, warmup: 100, steps: 2000, shape }
    }

    #[test]
    fn warm_up_rises_to_the_peak_and_every_shape_starts_there() {
        for shape in [Shape::Constant, Shape::Linear, Shape::Cosine] {
            let r = rate(shape);
            assert_eq!(r.at(0), 1e-3 * 1.0 / 100.0);
            assert_eq!(r.at(99), 1e-3);
            assert!((r.at(100) - 1e-3).abs() < 1e-18);
            assert!((1..100).all(|s| r.at(s) > r.at(s - 1)));
        }
    }

    #[test]
    fn shapes_come_down_as_the_formulas_say() {
        let by_hand = |s: f64| 1e-4 + 0.5 * (1e-3 - 1e-4) * (1.0 + (PI * (s - 100.0) / 1900.0).cos());
        for s in [100, 500, 1050, 1999] {
            assert!((rate(Shape::Cosine).at(s) - by_hand(s as f64)).abs() < 1e-18, "{s}");
        }
        assert!((rate(Shape::Linear).at(1050) - 5.5e-4).abs() < 1e-15);
        assert_eq!(rate(Shape::Constant).at(1999), 1e-3);
        let (linear, cosine) = (rate(Shape::Linear).at(1999), rate(Shape::Cosine).at(1999));
        assert!(linear > 1e-4 && linear < 1.01e-4 && cosine > 1e-4 && cosine < 1.01e-4);
    }

    #[test]
    fn cosines_are_those_of_the_system() {
        assert_eq!((cos_pi(0.5), cos_pi(0.25)), (0.0, -cos_pi(0.75)));
        for i in 0..=10_000 {
            let turns = f64::from(i) / 10_000.0;
            assert!((cos_pi(turns) - (PI * turns).cos()).abs() < 1e-15, "{turns}");
        }
    }

    #[test]
    fn a_run_that_is_all_warm_up_has_a_rate_for_each_step() {
        let r = Rate { warmup: 5, steps: 5, ..rate(Shape::Cosine) };
        assert!((0..5).all(|s| r.at(s).is_finite()));
        assert_eq!(r.at(4), 1e-3);
    }
}
