//! Summaries of repeated timings.

use serde_json::{Value, json};

/// What many timings of one call come to. All in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub min: f64,
    pub max: f64,
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    /// Of the population, not of a sample from it: as nccl-tests has it.
    pub deviation: f64,
}

impl Summary {
    /// None of no samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let n = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / n;
        let variance = sorted.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let at = |percent| percentile(&sorted, percent);
        // As nccl-tests has it: of an even number the upper of the two in the middle.
        let p50 = sorted[sorted.len() / 2];
        Some(Summary { min, max, mean, p50, p95: at(95), p99: at(99), deviation: variance.sqrt() })
    }

    /// Deviation over mean, in per cent.
    pub fn variation_percent(&self) -> f64 {
        if self.mean > 0.0 { self.deviation / self.mean * 100.0 } else { 0.0 }
    }

    /// The fields that nccl-tests writes, from samples in seconds.
    pub fn json(&self) -> Value {
        json!({
            "min_us": self.min * 1e6,
            "max_us": self.max * 1e6,
            "avg_us": self.mean * 1e6,
            "p50_us": self.p50 * 1e6,
            "p95_us": self.p95 * 1e6,
            "p99_us": self.p99 * 1e6,
            "stdev_us": self.deviation * 1e6,
            "cv_pct": self.variation_percent(),
        })
    }
}

/// The smallest sample that at least `percent` of `sorted` do not exceed (nearest rank).
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).clamp(1, sorted.len()) - 1]
}

/// The mean; 0 of none.
pub fn average(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len().max(1) as f64
}

/// The middle sample, of an even number the upper one; 0 of none.
pub fn median(samples: &[f64]) -> f64 {
    Summary::of(samples).map_or(0.0, |s| s.p50)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks_and_the_median_is_as_nccl_tests_has_it() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let s = Summary::of(&hundred).unwrap();
        assert_eq!((s.min, s.p50, s.p95, s.p99, s.max, s.mean), (1.0, 51.0, 95.0, 99.0, 100.0, 50.5));
        let one = Summary::of(&[3.0]).unwrap();
        assert_eq!((one.min, one.p50, one.p99, one.max, one.deviation), (3.0, 3.0, 3.0, 3.0, 0.0));
        assert_eq!(Summary::of(&[1.0, 2.0, 30.0]).unwrap().p50, 2.0);
        assert_eq!(Summary::of(&[1.0, 2.0, 30.0, 40.0]).unwrap().p50, 30.0);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn deviation_is_of_the_population() {
        let s = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).unwrap();
        assert_eq!((s.mean, s.deviation, s.variation_percent()), (5.0, 2.0, 40.0));
        assert_eq!(s.json()["stdev_us"], 2e6);
    }
}
