//! The single times of one size of `bench overlap`, and what they come to over calls and ranks.

use super::row::Timings;
use crate::bench::args::Average;
use crate::bench::measure::over_ranks;
use crate::bench::statistics::{Summary, median};
use crate::failure::Result;
use collectives::Communicator;
use serde_json::{Map, Value, json};

/// Whose single times are written.
const WRITTEN: [&str; 4] = ["pure", "compute_alone", "overall", "compute_total"];

/// This rank's seconds, by call.
pub(super) struct Times {
    pub pure: Vec<f64>,
    pub compute: Vec<f64>,
    pub overlapped: Vec<Timings>,
}

impl Times {
    /// Medians over calls, means over ranks.
    pub fn timings(&self, comm: &Communicator) -> Result<Timings> {
        let part = |of: fn(&Timings) -> f64| mean(comm, median(&self.each(of)));
        Ok(Timings {
            overall: part(|t| t.overall)?,
            init: part(|t| t.init)?,
            compute_total: part(|t| t.compute_total)?,
            test: part(|t| t.test)?,
            wait: part(|t| t.wait)?,
        })
    }

    /// Whose times IMB reports: pure, cpu and overall of the rank whose overlapped call takes longest.
    pub fn slowest(&self, comm: &Communicator) -> Result<[f64; 3]> {
        let cpu = median(&self.each(|t| t.compute_total - t.test));
        let mut all = vec![0.0; 3 * comm.size()];
        let mine = [median(&self.pure), cpu, median(&self.each(|t| t.overall))];
        comm.all_gather(&mine[..], &mut all[..])?;
        Ok(slowest(all.as_chunks().0))
    }

    /// Every rank's single times with their percentiles, as JSON; on rank 0.
    pub fn calls(&self, comm: &Communicator) -> Result<Value> {
        let parts = [
            self.pure.clone(),
            self.compute.clone(),
            self.each(|t| t.overall),
            self.each(|t| t.compute_total),
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

    #[test]
    fn the_slowest_rank_counts_over_ranks() {
        let ranks = [[100e-6, 100e-6, 110e-6], [100e-6, 100e-6, 160e-6], [100e-6, 100e-6, 120e-6]];
        assert_eq!(slowest(&ranks), ranks[1]);
    }

    #[test]
    fn every_ranks_times_are_written_with_percentiles_of_their_means() {
        let [first, second] =
            [0.0, 2.0].map(|more: f64| (1..=8).map(|i| f64::from(i) + more).collect::<Vec<_>>());
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
                "rank": 1, "pure": [3e6, 4e6], "compute_alone": [5e6, 6e6], "overall": [7e6, 8e6],
                "compute_total": [9e6, 10e6],
            })
        );
    }
}
