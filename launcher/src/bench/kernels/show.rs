//! The lines of `bench kernels`.

use crate::gpus::Limits;
use models::cuda::check::Outcome;
use models::cuda::speed::{Missing, Row, Work};
use serde_json::{Value, json};
use std::time::Duration;

/// Above the checks.
pub fn compiled(modules: usize, whole: bool, elapsed: Duration) -> String {
    format!(
        "# {modules} modules of kernels compiled or found in {:.1} s{}\n# {:<62} {:>11} {:>9} {:>9} {:>7}\n",
        elapsed.as_secs_f64(),
        if whole { "" } else { ", not all of them" },
        "case",
        "comparisons",
        "16-bit",
        "f32",
        "seconds"
    )
}

/// Before a case.
pub fn begins(name: &str) -> String {
    format!("# {} ...\n", name.replace('_', " "))
}

/// Instead of a case.
pub fn not_run(name: &str) -> String {
    format!("      {}: not run, the context is lost\n", name.replace('_', " "))
}

/// A case for programs, of which nothing else is known.
pub fn state(name: &str, state: &str) -> Value {
    json!({"case": name, "state": state})
}

/// A case for programs.
pub fn checked(name: &str, outcome: &Outcome) -> Value {
    let [half, single] = outcome.worst;
    json!({
        "case": name, "state": if outcome.wrong.is_empty() { "ok" } else { "wrong" },
        "comparisons": outcome.comparisons, "worst_16_bit": half, "worst_f32": single, "wrong": outcome.wrong,
    })
}

/// One case: how many comparisons, the largest relative errors, and what was wrong.
pub fn outcome(name: &str, outcome: &Outcome, elapsed: Duration) -> String {
    let error = |worst: f64| if worst == 0.0 { "-".into() } else { format!("{worst:.1e}") };
    let verdict = if outcome.wrong.is_empty() { "ok   " } else { "WRONG" };
    let mut text = format!(
        "{verdict} {:<58} {:>11} {:>9} {:>9} {:>7.1}\n",
        name.replace('_', " "),
        outcome.comparisons,
        error(outcome.worst[0]),
        error(outcome.worst[1]),
        elapsed.as_secs_f64()
    );
    const MOST: usize = 5;
    outcome.wrong.iter().take(MOST).for_each(|why| text += &format!("      {why}\n"));
    if outcome.wrong.len() > MOST {
        text += &format!("      and {} more\n", outcome.wrong.len() - MOST);
    }
    text
}

/// Above the times.
pub fn heading() -> String {
    format!("# {:<50} {:>12} {:>18}  share of the limit\n", "kernel", "us", "rate")
}

/// Bytes or FLOP a second.
fn rate(row: &Row) -> f64 {
    match row.work {
        Work::Moved(bytes) => bytes as f64 / row.seconds,
        Work::Computed(flops) => flops / row.seconds,
    }
}

/// Shares of what bounds it: of the data sheet's, and for what moves data, of a copy.
fn shares(row: &Row, limits: &Limits) -> [Option<f64>; 2] {
    let rate = rate(row);
    match row.work {
        Work::Moved(_) => [limits.bytes, limits.copy].map(|limit| limit.map(|limit| rate / limit)),
        Work::Computed(_) => [limits.flops.map(|limit| rate / limit), None],
    }
}

/// One kernel's time.
pub fn row(row: &Row, limits: &Limits) -> String {
    let (rate, unit) = match row.work {
        Work::Moved(_) => (rate(row) / 1e9, "GB/s"),
        Work::Computed(_) => (rate(row) / 1e12, "TFLOP/s"),
    };
    let per_cent = |share: f64, of: &str| format!("  {:5.1}% of {of}", 100.0 * share);
    let [sheet, copy] = shares(row, limits);
    let sheet = sheet.map_or(String::new(), |share| per_cent(share, "the data sheet"));
    let copy = copy.map_or(String::new(), |share| per_cent(share, "a copy"));
    let best = row.best.filter(|(ways, _)| *ways > 1);
    let best =
        best.map_or(String::new(), |(ways, seconds)| format!("  best of {ways} {:.1} us", seconds * 1e6));
    format!("{:<52} {:>12.1} {rate:>10.1} {unit:<7}{sheet}{copy}{best}\n", row.name, row.seconds * 1e6)
}

/// A kernel without a time.
pub fn missing(missing: &Missing) -> String {
    format!("{:<52} could not be timed: {}\n", missing.name, missing.why)
}

/// The same for programs.
pub fn json_of_missing(missing: &Missing) -> Value {
    json!({"kernel": missing.name.trim(), "group": missing.group, "wrong": missing.why.to_string()})
}

/// A kernel that is being timed, for programs.
pub fn json_of_begun(group: &str, name: &str) -> Value {
    json!({"kernel": name.trim(), "group": group, "state": "not ended"})
}

/// A kernel's time for programs.
pub fn json(row: &Row, limits: &Limits) -> Value {
    let (unit, work) = match row.work {
        Work::Moved(bytes) => ("bytes", bytes as f64),
        Work::Computed(flops) => ("flops", flops),
    };
    let [sheet, copy] = shares(row, limits);
    json!({
        "kernel": row.name.trim(), "group": row.group, "seconds": row.seconds, unit: work, "rate": rate(row),
        "share_of_data_sheet": sheet, "share_of_copy": copy, "ways": row.best.map(|(ways, _)| ways),
        "best_seconds": row.best.map(|(_, seconds)| seconds),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_what_bounds_a_kernel() {
        let limits = Limits { copy: Some(4e12), ..Limits::of("NVIDIA H200") };
        let moved = Row {
            group: "norm",
            name: "norm".into(),
            seconds: 1e-3,
            work: Work::Moved(2_400_000_000),
            best: None,
        };
        let text = row(&moved, &limits);
        assert!(text.contains(" 50.0% of the data sheet") && text.contains(" 60.0% of a copy"), "{text}");
        assert!(text.contains("1000.0     2400.0 GB/s"), "{text}");
        let computed = Row { work: Work::Computed(494.5e9), ..moved };
        let text = row(&computed, &limits);
        assert!(text.contains("494.5 TFLOP/s") && text.contains(" 50.0% of the data sheet"), "{text}");
        assert!(!row(&computed, &Limits::default()).contains('%'));
        let product = |ways| row(&Row { best: Some((ways, 9e-4)), ..computed.clone() }, &limits);
        assert!(product(8).contains("  best of 8 900.0 us") && !product(1).contains("best"));
    }

    #[test]
    fn what_was_wrong_is_told() {
        let wrong = (0..7).map(|i| format!("mistake {i}")).collect();
        let text = outcome("a_case", &Outcome { comparisons: 9, worst: [0.5, 0.0], wrong }, Duration::ZERO);
        assert!(text.starts_with("WRONG a case") && text.contains("5.0e-1"), "{text}");
        assert!(
            text.contains("mistake 4") && !text.contains("mistake 5") && text.contains("and 2 more"),
            "{text}"
        );
    }
}
