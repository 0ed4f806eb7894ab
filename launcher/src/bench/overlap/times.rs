//! The single times of one size of `bench overlap`, and what they come to over calls and ranks.

use super::row::{Shown, Timings};
use crate::bench::args::Average;
use crate::bench::measure::over_ranks;
use crate::bench::statistics::Summary;
use crate::failure::Result;
use collectives::Communicator;
use serde_json::{Map, Value, json};

/// Whose single times are written.
const WRITTEN: [&str; 7] = ["pure", "compute_alone", "overall", "init", "compute_total", "test", "wait"];

/// This rank's seconds, by call.
pub(super) struct Times {
    pub pure: Vec<f64>,
    pub compute: Vec<f64>,
    pub overlapped: Vec<Timings>,
}

impl Times {
    /// What they come to: `middle` over calls, means over ranks, and what IMB would report.
    pub fn shown(&self, comm: &Communicator, middle: fn(&[f64]) -> f64) -> Result<Shown> {
        let part = |of: fn(&Timings) -> f64| mean(comm, middle(&self.each(of)));
        let timings = Timings {
            overall: part(|t| t.overall)?,
            init: part(|t| t.init)?,
            compute_total: part(|t| t.compute_total)?,
            test: part(|t| t.test)?,
            wait: part(|t| t.wait)?,
        };
        let cpu = middle(&self.each(|t| t.compute_total - t.test));
        let mine = [middle(&self.pure), cpu, middle(&self.each(|t| t.overall))];
        let mut all = vec![0.0; 3 * comm.size()];
        comm.all_gather(&mine[..], &mut all[..])?;
        Ok(Shown { pure: mean(comm, middle(&self.pure))?, timings, slowest: slowest(all.as_chunks().0) })
    }

    /// Every rank's single times with their percentiles, as JSON; on rank 0.
    pub fn calls(&self, comm: &Communicator) -> Result<Value> {
        let parts = [
            self.pure.clone(),
            self.compute.clone(),
            self.each(|t| t.overall),
            self.each(|t| t.init),
            self.each(|t| t.compute_total),
            self.each(|t| t.test),
            self.each(|t| t.wait),
        ];
        let mine = parts.concat();
        let lead = comm.rank() == 0;
        let mut all = vec![0.0; if lead { mine.len() * comm.size() } else { 0 }];
        comm.gather(&mine[..], lead.then_some((&mut all[..]).into()), 0)?;
        let ranks: Vec<&[f64]> = all.chunks_exact(mine.len()).collect();
        Ok(calls(&ranks))
    }

    fn each(&self, of: fn(&Timings) -> f64) -> Vec<f64> {
        self.overlapped.iter().map(of).collect()
    }
}

/// The mean over ranks of one number each.
pub(super) fn mean(comm: &Communicator, mine: f64) -> Result<f64> {
    Ok(over_ranks(comm, &[mine], Average::Mean)?[0])
}

/// Pure, cpu and overall of the rank whose overlapped call takes longest: IMB reports that one's.
fn slowest(all: &[[f64; 3]]) -> [f64; 3] {
    all.iter().copied().max_by(|a, b| a[2].total_cmp(&b[2])).unwrap_or_default()
}

/// What is written of all `ranks`' times, each of which has as many of each part as there were calls.
fn calls(ranks: &[&[f64]]) -> Value {
    let part = |times: &[f64], i: usize| {
        let calls = times.len() / WRITTEN.len();
        times[i * calls..(i + 1) * calls].to_vec()
    };
    let mut all = Map::new();
    for (i, name) in WRITTEN.into_iter().enumerate() {
        let each: Vec<Vec<f64>> = ranks.iter().map(|times| part(times, i)).collect();
        let calls = each.first().map_or(0, Vec::len);
        let means =
            (0..calls).map(|call| each.iter().map(|times| times[call]).sum::<f64>() / each.len() as f64);
        let summary = Summary::of(&means.collect::<Vec<_>>());
        all.insert(format!("{name}_per_iter"), summary.map_or(Value::Null, |summary| summary.json()));
    }
    let of_rank = |(rank, times): (usize, &&[f64])| {
        let us = |i| part(times, i).iter().map(|t| t * 1e6).collect::<Vec<_>>();
        let parts = WRITTEN.into_iter().enumerate().map(|(i, name)| (name.to_owned(), json!(us(i))));
        std::iter::once(("rank".to_owned(), json!(rank))).chain(parts).collect::<Map<_, _>>()
    };
    all.insert("times_us".to_owned(), ranks.iter().enumerate().map(of_rank).collect());
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::statistics::{average, median};

    #[test]
    fn few_long_calls_count_in_means_and_not_in_medians() {
        let call = |overall| Timings { overall, init: 0.0, compute_total: 90e-6, test: 0.0, wait: 0.0 };
        let overlapped = [vec![call(100e-6); 8], vec![call(1000e-6); 2]].concat();
        let times = Times { pure: vec![100e-6; 10], compute: vec![90e-6; 10], overlapped };
        let comm = Communicator::threads(1).remove(0);
        // What a call costs on the mean is 190 us more than it computes, of a call of 100.
        let of = |middle| times.shown(&comm, middle).unwrap();
        let (means, medians) = (of(average), of(median));
        assert!((means.timings.overall - 280e-6).abs() < 1e-12 && means.slowest[2] == means.timings.overall);
        assert_eq!(means.osu(), 0.0);
        assert!((medians.osu() - 90.0).abs() < 1e-9 && (medians.imb() - 90.0).abs() < 1e-9);
    }

    #[test]
    fn the_slowest_rank_counts_over_ranks() {
        let ranks = [[100e-6, 100e-6, 110e-6], [100e-6, 100e-6, 160e-6], [100e-6, 100e-6, 120e-6]];
        assert_eq!(slowest(&ranks), ranks[1]);
    }

    #[test]
    fn every_ranks_times_are_written_with_percentiles_of_their_means() {
        let [first, second] =
            [0.0, 2.0].map(|more: f64| (1..=14).map(|i| f64::from(i) + more).collect::<Vec<_>>());
        let json = calls(&[&first, &second]);
        // Means of calls over ranks: 2 and 3 of the first part, 4 and 5 of the second.
        assert_eq!(
            (&json["pure_per_iter"]["min_us"], &json["pure_per_iter"]["p99_us"]),
            (&json!(2e6), &json!(3e6))
        );
        assert_eq!(json["compute_alone_per_iter"]["p95_us"], 5e6);
        assert_eq!(json["times_us"][0]["pure"], json!([1e6, 2e6]));
        assert_eq!(
            json["times_us"][1],
            json!({
                "rank": 1, "pure": [3e6, 4e6], "compute_alone": [5e6, 6e6], "overall": [7e6, 8e6], "init": [9e6, 10e6],
                "compute_total": [11e6, 12e6], "test": [13e6, 14e6], "wait": [15e6, 16e6],
            })
        );
    }
}
