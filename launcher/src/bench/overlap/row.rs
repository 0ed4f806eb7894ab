//! One size of `bench overlap`: its times, what the formulas of OSU and IMB make of them, and how it is shown.

use super::load::SIDES;
use crate::bench::args::OverlapArgs;
use crate::bench::operation::Operation;
use crate::bench::table::dtype_name;
use collectives::{Communicator, DType};
use serde_json::{Value, json};

/// Name, unit and width of each column.
const COLUMNS: [(&str, &str, usize); 14] = [
    ("size", "(B)", 12),
    ("operation", "", 14),
    ("type", "", 8),
    ("pure", "(us)", 9),
    ("compute", "(us)", 9),
    ("overall", "(us)", 9),
    ("init", "(us)", 8),
    ("test", "(us)", 8),
    ("wait", "(us)", 9),
    ("OSU", "(%)", 7),
    ("IMB", "(%)", 7),
    ("exposed", "(us)", 9),
    ("slowdown", "", 8),
    ("#wrong", "", 6),
];

/// One line of such columns.
fn line(words: [String; 14]) -> String {
    let aligned = words.iter().zip(COLUMNS).map(|(word, (_, _, width))| format!("{word:>width$}"));
    aligned.collect::<Vec<_>>().join("  ") + "\n"
}

/// The same of a comment.
fn comment(words: [&str; 14]) -> String {
    line(words.map(str::to_owned)).replacen("  ", "# ", 1)
}

/// What stands above the rows.
pub(super) fn header(args: &OverlapArgs, comm: &Communicator, remark: Option<String>) -> String {
    let [side, short] = SIDES;
    let remark = remark.map_or(String::new(), |remark| format!("# {remark}\n"));
    format!(
        "# caravan version {} transport {} ranks {} progress {} tests {}\n\
         {remark}\
         # Overlap with products of {side} x {side} matrices in f32, of {short} x {short} beside short calls, that alone take as \
         long as the call does on the mean; times are medians over calls, means over ranks\n\
         # OSU and IMB are of means over calls, as those benchmarks have them; in the JSON also of medians\n\
         # OSU = max(0, 100 - 100 (overall - compute while communicating) / pure); \
         IMB = 100 max(0, min(1, (pure + cpu - overall) / max(pure, cpu))), cpu = compute while communicating, \
         of the slowest rank\n\
         # exposed = overall - compute; slowdown = compute while communicating / compute\n#\n",
        env!("CARGO_PKG_VERSION"),
        comm.transport_name(),
        comm.size(),
        args.progress.name(),
        args.tests
    ) + &comment(COLUMNS.map(|(name, _, _)| name))
        + &comment(COLUMNS.map(|(_, unit, _)| unit))
}

/// One size. Seconds, over ranks.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub bytes: usize,
    /// How many products all ranks compute, of matrices of this side, with so many calls to progress between them.
    pub products: usize,
    pub side: usize,
    pub tests: usize,
    /// Of products alone: the median.
    pub compute: f64,
    /// What the columns of times show, which a few disturbed calls do not move.
    pub medians: Shown,
    /// What OSU's and IMB's benchmarks have: they divide sums over calls by their number.
    pub means: Shown,
    pub wrong: u64,
    pub algorithm: String,
    /// Why that one.
    pub why: String,
    /// Single times, for the JSON.
    pub calls: Value,
}

/// What single times come to over calls, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shown {
    /// The call alone.
    pub pure: f64,
    pub timings: Timings,
    /// Pure, cpu and overall of the rank that IMB would report.
    pub slowest: [f64; 3],
}

impl Shown {
    pub fn osu(&self) -> f64 {
        osu(self.pure, &self.timings)
    }

    pub fn imb(&self) -> f64 {
        let [pure, cpu, overall] = self.slowest;
        imb(pure, cpu, overall)
    }
}

/// The parts of an overlapped call, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Timings {
    pub overall: f64,
    /// Inside `start_…`.
    pub init: f64,
    /// From the end of `init` to the beginning of `wait`.
    pub compute_total: f64,
    /// Of that, inside calls for progress.
    pub test: f64,
    pub wait: f64,
}

/// OSU's micro-benchmarks.
fn osu(pure: f64, t: &Timings) -> f64 {
    (100.0 - (t.overall - (t.compute_total - t.test)) / pure * 100.0).max(0.0)
}

/// Intel's MPI benchmarks (IMB-NBC), of one rank; `cpu` is the time of its computation while it communicates.
fn imb(pure: f64, cpu: f64, overall: f64) -> f64 {
    100.0 * ((pure + cpu - overall) / pure.max(cpu)).clamp(0.0, 1.0)
}

/// What the numbers of the JSON are made by.
pub(super) fn formulas() -> Value {
    json!({
        "osu_overlap_pct": "max(0, 100 - 100 * (overall - (compute_total - test)) / pure), of means over calls: avg_us of \
                            …_per_iter",
        "imb_overlap_pct": "100 * max(0, min(1, (pure + cpu - overall) / max(pure, cpu))), where cpu is \
                            compute_total - test, all means over calls of the rank with the largest overall: imb_times_us",
        "…_overlap_median_pct": "the same of medians over calls",
        "exposed_us": "overall - compute_alone",
        "slowdown": "(compute_total - test) / compute_alone",
        "…_us": "medians over calls, means over ranks",
        "…_per_iter": "over calls, of each call's mean over ranks",
    })
}

impl Row {
    fn slowdown(&self) -> f64 {
        let Timings { compute_total, test, .. } = self.medians.timings;
        (compute_total - test) / self.compute
    }

    pub fn text(&self, operation: Operation, dtype: DType) -> String {
        let t = &self.medians.timings;
        let us = |s: f64| format!("{:.2}", s * 1e6);
        line([
            self.bytes.to_string(),
            operation.name().to_owned(),
            dtype_name(dtype).to_owned(),
            us(self.medians.pure),
            us(self.compute),
            us(t.overall),
            us(t.init),
            us(t.test),
            us(t.wait),
            format!("{:.1}", self.means.osu()),
            format!("{:.1}", self.means.imb()),
            us(t.overall - self.compute),
            format!("{:.3}", self.slowdown()),
            self.wrong.to_string(),
        ])
    }

    pub fn json(&self, operation: Operation, dtype: DType) -> Value {
        let t = &self.medians.timings;
        let mut row = json!({
            "operation": operation.name(),
            "size": self.bytes,
            "type": dtype_name(dtype),
            "products": self.products,
            "side": self.side,
            "tests": self.tests,
            "pure_us": self.medians.pure * 1e6,
            "compute_alone_us": self.compute * 1e6,
            "overall_us": t.overall * 1e6,
            "init_us": t.init * 1e6,
            "compute_total_us": t.compute_total * 1e6,
            "test_us": t.test * 1e6,
            "wait_us": t.wait * 1e6,
            "osu_overlap_pct": self.means.osu(),
            "osu_overlap_median_pct": self.medians.osu(),
            "imb_overlap_pct": self.means.imb(),
            "imb_overlap_median_pct": self.medians.imb(),
            "imb_times_us": self.means.slowest.map(|t| t * 1e6),
            "exposed_us": (t.overall - self.compute) * 1e6,
            "slowdown": self.slowdown(),
            "nwrong": self.wrong,
            "algorithm": self.algorithm,
            "why": self.why,
        });
        for (name, value) in self.calls.as_object().into_iter().flatten() {
            row[name] = value.clone();
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_those_of_osu_and_imb() {
        // A call of 100 us and 100 us of products that took 120 us beside it; then 10 us of waiting.
        let t = Timings { overall: 135e-6, init: 5e-6, compute_total: 120e-6, test: 0.0, wait: 10e-6 };
        assert!((osu(100e-6, &t) - 85.0).abs() < 1e-9);
        // Of 220 us of work, 85 were saved, and at best the shorter of the two could have been: by the longer, 120.
        assert!((imb(100e-6, 120e-6, t.overall) - 100.0 * 85.0 / 120.0).abs() < 1e-9);
        // Time in tests is communication to OSU.
        assert!((osu(100e-6, &Timings { test: 20e-6, ..t }) - 65.0).abs() < 1e-9);
        // Nothing hidden, and worse than nothing, are both 0; everything hidden is 100.
        assert_eq!(osu(100e-6, &Timings { overall: 300e-6, compute_total: 100e-6, ..t }), 0.0);
        assert_eq!(imb(100e-6, 100e-6, 300e-6), 0.0);
        assert_eq!(imb(100e-6, 100e-6, 100e-6), 100.0);
        // A call that is half as long as the products hides half of the longer at most.
        assert!((imb(50e-6, 100e-6, 100e-6) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn costs_are_exposed_time_and_slowdown() {
        let timings = Timings { overall: 135e-6, init: 5e-6, compute_total: 120e-6, test: 8e-6, wait: 10e-6 };
        let (pure, compute) = (100e-6, 100e-6);
        // Of the slowest rank: 80 + 100 - 160 of 100.
        let slowest = [80e-6, 100e-6, 160e-6];
        let [algorithm, why] = ["pairwise", "as asked for"].map(str::to_owned);
        let calls = Value::Null;
        let medians = Shown { pure, timings, slowest };
        // Some calls took longer than most.
        let slow = Timings { overall: 145e-6, ..timings };
        let means = Shown { timings: slow, slowest: [80e-6, 100e-6, 164e-6], ..medians };
        let row = Row {
            bytes: 64,
            products: 3,
            side: 48,
            tests: 2,
            compute,
            medians,
            means,
            wrong: 0,
            algorithm,
            why,
            calls,
        };
        assert!((row.slowdown() - 1.12).abs() < 1e-9);
        let all = row.json(Operation::AllGather, DType::F32);
        let near =
            |key: &str, value: f64| assert!((all[key].as_f64().unwrap() - value).abs() < 1e-9, "{key}");
        near("exposed_us", 35.0);
        near("slowdown", 1.12);
        near("osu_overlap_pct", 67.0);
        near("osu_overlap_median_pct", 77.0);
        near("imb_overlap_pct", 16.0);
        near("imb_overlap_median_pct", 20.0);
        let text = row.text(Operation::AllGather, DType::F32);
        let shown: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(shown[9..13], ["67.0", "16.0", "35.00", "1.120"], "{text}");
        // Each ends where its column's name does.
        let names = comment(COLUMNS.map(|(name, _, _)| name));
        assert!(names.starts_with("#       size       operation      type "), "{names}");
        for (value, name) in [("64", "size"), ("35.00", "exposed"), ("1.120", "slowdown")] {
            let end = |line: &str, word: &str| line.find(word).map(|start| start + word.len());
            assert_eq!(end(&text, &format!(" {value}")), end(&names, &format!(" {name}")), "{text}{names}");
        }
    }
}
