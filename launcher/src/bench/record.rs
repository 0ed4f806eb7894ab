//! What a run found, and the machine-readable forms it is written in.

use super::messages::Messages;
use super::operation::Operation;
use super::statistics::Summary;
use super::table::{Half, Label};
use crate::about::now;
use serde_json::{Value, json};

/// The first line of a table of values, to which single calls add theirs. GB are 10^9 bytes.
pub const CSV_NAMES: &str = "operation,transport,ranks,placement,size_bytes,count,type,redop,root,time_us,algbw_gb_per_s,\
                             busbw_gb_per_s,wrong,min_us,p50_us,p95_us,p99_us,max_us,algorithm,why,messages";

/// One placement of one size.
#[derive(Clone, Debug)]
pub struct Measured {
    pub half: Half,
    /// Seconds of each timed call, over ranks as `-a` says; empty where nobody writes them.
    pub times: Vec<f64>,
    /// Over these.
    pub calls: Summary,
    /// Seconds of each timed call on its slowest rank; None where single calls are not asked for, or nobody writes them.
    pub slowest: Option<Vec<f64>>,
    /// The same on each of several ranks; empty where nobody writes them.
    pub each: Vec<Vec<f64>>,
    /// What carried the calls.
    pub algorithm: String,
    /// Why that one.
    pub why: String,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub label: Label,
    pub out_of_place: Measured,
    pub in_place: Measured,
    /// When, as [`now`] says it.
    pub printed: String,
}

/// A whole run.
#[derive(Clone, Debug)]
pub struct Run {
    pub operation: Operation,
    /// Those of `send_recv`.
    pub messages: Messages,
    pub transport: String,
    pub ranks: usize,
    /// Flags and machine, as JSON.
    pub about: Value,
    /// Those that files are made of.
    pub rows: Vec<Row>,
    pub found: Found,
    /// Whether no row is to come.
    pub complete: bool,
}

/// What all rows come to, also those that nobody keeps.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Halves of rows.
    pub halves: u64,
    /// Wrong elements.
    pub wrong: u64,
    /// The footer's first number: halves of rows with anything wrong.
    pub failures: u64,
    /// Of all halves together, in GB/s.
    bus_bandwidth: f64,
    /// Which algorithm carried which sizes, and why: a comment line for each run of rows with the same answer, once.
    pub algorithms: Vec<String>,
    /// The last answer.
    last: Option<(String, String)>,
}

impl Found {
    /// The mean bus bandwidth over both halves of all rows, in GB/s.
    pub fn average_bus_bandwidth(&self) -> f64 {
        self.bus_bandwidth / self.halves.max(1) as f64
    }

    fn add(&mut self, row: &Row) {
        for (placement, m) in [("out-of-place", &row.out_of_place), ("in-place", &row.in_place)] {
            let wrong = m.half.wrong.unwrap_or(0);
            self.halves += 1;
            self.wrong += wrong;
            self.failures += u64::from(wrong > 0);
            self.bus_bandwidth += m.half.bus_bandwidth;
            if self.last.as_ref().is_some_and(|(algorithm, why)| (algorithm, why) == (&m.algorithm, &m.why)) {
                continue;
            }
            self.last = Some((m.algorithm.clone(), m.why.clone()));
            let bytes = row.label.bytes;
            let line = format!("# Algorithm from {bytes} bytes {placement}: {}, {}\n", m.algorithm, m.why);
            // A sweep that is repeated has the same answers.
            if !self.algorithms.contains(&line) {
                self.algorithms.push(line);
            }
        }
    }
}

impl Run {
    /// Takes a row into account, and keeps it if it is asked for.
    pub fn add(&mut self, row: Row, keep: bool) {
        self.found.add(&row);
        if keep {
            self.rows.push(row);
        }
    }

    /// nccl-tests' JSON (its keys, types and units: microseconds, GB/s) with ours beside it.
    pub fn json(&self, min_busbw: Option<f64>) -> Value {
        self.told(min_busbw, Row::json)
    }

    /// The same without single calls, which are most of it.
    pub fn outline(&self) -> Value {
        self.told(None, Row::outline)
    }

    fn told(&self, min_busbw: Option<f64>, row: fn(&Row) -> Value) -> Value {
        let (average, failures) = (self.found.average_bus_bandwidth(), self.found.failures);
        let mut all = self.about.clone();
        all["operation"] = json!(self.operation.name());
        all["transport"] = json!(self.transport);
        all["ranks"] = json!(self.ranks);
        all["complete"] = json!(self.complete);
        all["end_time"] = json!(now());
        all["results"] = self.rows.iter().map(row).collect();
        // A rank that meets one leaves a file that is not complete.
        all["errors"] = json!([]);
        all["out_of_bounds"] = json!({"count": failures, "okay": told(failures == 0)});
        all["average_bus_bandwidth"] = json!({
            "bandwidth": average,
            "okay": min_busbw.map_or("unchecked", |least| told(average >= least)),
        });
        all
    }

    /// One line per size and placement, with `-I 1` also of single calls on their slowest ranks.
    pub fn csv(&self) -> String {
        let mut text = String::from(CSV_NAMES);
        if self.rows.iter().any(|row| row.out_of_place.half.per_call.is_some()) {
            text += ",i_min_us,i_max_us,i_p99_us,i_cv_pct";
        }
        text.push('\n');
        let messages = if self.operation == Operation::SendRecv { self.messages.name() } else { "" };
        for row in &self.rows {
            for (placement, m) in [("out_of_place", &row.out_of_place), ("in_place", &row.in_place)] {
                let (l, h, s) = (&row.label, &m.half, &m.calls);
                text += &format!(
                    "{},{},{},{placement},{},{},{},{},{},{:.3},{:.6},{:.6},{},{:.3},{:.3},{:.3},{:.3},{:.3},{},{},{messages}",
                    self.operation.name(),
                    quoted(&self.transport),
                    self.ranks,
                    l.bytes,
                    l.count,
                    l.dtype,
                    // nccl-tests, and so the table, has one of send_recv, too.
                    if self.operation.reduces() { l.op } else { "none" },
                    l.root,
                    h.seconds * 1e6,
                    h.algorithm_bandwidth,
                    h.bus_bandwidth,
                    h.wrong.map_or(String::new(), |w| w.to_string()),
                    s.min * 1e6,
                    s.p50 * 1e6,
                    s.p95 * 1e6,
                    s.p99 * 1e6,
                    s.max * 1e6,
                    quoted(&m.algorithm),
                    quoted(&m.why),
                );
                if let Some(i) = &h.per_call {
                    let (least, most, p99) = (i.min * 1e6, i.max * 1e6, i.p99 * 1e6);
                    text += &format!(",{least:.3},{most:.3},{p99:.3},{:.3}", i.variation_percent());
                }
                text.push('\n');
            }
        }
        text
    }
}

impl Row {
    fn outline(&self) -> Value {
        let l = &self.label;
        let mut row = json!({
            "size": l.bytes, "count": l.count, "type": l.dtype, "redop": l.op, "root": l.root.to_string(),
            "actual_iterations": self.out_of_place.times.len(),
            // It has one where it repeats what was recorded.
            "experiment_name": "",
        });
        for (name, m) in [("out_of_place", &self.out_of_place), ("in_place", &self.in_place)] {
            row[name] = json!({
                "time": m.half.seconds * 1e6,
                "alg_bw": m.half.algorithm_bandwidth,
                "bus_bw": m.half.bus_bandwidth,
                "nwrong": m.half.wrong,
                "algorithm": m.algorithm,
                "why": m.why,
            });
        }
        row
    }

    fn json(&self) -> Value {
        let mut row = self.outline();
        for (name, m) in [("out_of_place", &self.out_of_place), ("in_place", &self.in_place)] {
            row[format!("{name}_calls")] = timed(&m.calls, &m.times);
            // What nccl-tests means by this name, and the table by its columns.
            if let (Some(summary), Some(slowest)) = (&m.half.per_call, &m.slowest) {
                let mut calls = timed(summary, slowest);
                calls["skipped_iterations"] = json!(0);
                if !m.each.is_empty() {
                    calls["per_process_max_times_us"] =
                        m.each.iter().map(|times| microseconds(times)).collect();
                }
                row[format!("{name}_per_iter")] = calls;
            }
        }
        row
    }
}

/// Single calls: what they come to, and each of them.
fn timed(summary: &Summary, times: &[f64]) -> Value {
    let mut calls = summary.json();
    calls["times_us"] = microseconds(times);
    calls
}

fn microseconds(times: &[f64]) -> Value {
    times.iter().map(|t| t * 1e6).collect()
}

/// What nccl-tests' JSON has for a truth: a string.
pub fn told(truth: bool) -> &'static str {
    if truth { "true" } else { "false" }
}

/// A field of a comma-separated line.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A run with one row per (bytes, seconds).
    pub fn example(transport: &str, points: &[(usize, f64)]) -> Run {
        let measured = |bytes: usize, seconds: f64, wrong| Measured {
            half: Half {
                seconds,
                algorithm_bandwidth: bytes as f64 / 1e9 / seconds,
                bus_bandwidth: bytes as f64 / 2e9 / seconds,
                wrong,
                per_call: None,
            },
            times: vec![seconds],
            calls: Summary::of(&[seconds]).unwrap(),
            slowest: None,
            each: Vec::new(),
            algorithm: "direct-read".into(),
            why: "one pass, no messages".into(),
        };
        let row = |&(bytes, seconds): &(usize, f64)| Row {
            label: Label { bytes, count: bytes / 4, dtype: "float", op: "none", root: -1 },
            out_of_place: measured(bytes, seconds, Some(0)),
            in_place: measured(bytes, seconds, None),
            printed: now(),
        };
        of_rows(transport, points.iter().map(row).collect())
    }

    /// A run with these rows, which are kept.
    pub fn of_rows(transport: &str, rows: Vec<Row>) -> Run {
        let about = json!({"version": 1});
        let (transport, found) = (transport.into(), Found::default());
        let (operation, messages, complete) = (Operation::AllGather, Messages::Ring, true);
        let mut run =
            Run { operation, messages, transport, ranks: 2, about, rows: Vec::new(), found, complete };
        rows.into_iter().for_each(|row| run.add(row, true));
        run
    }

    #[test]
    fn json_has_the_keys_of_nccl_tests_and_the_reasons() {
        let run = example("shm", &[(1000, 1e-6), (2000, 1e-6)]);
        let json = run.json(Some(1.0));
        let row = &json["results"][1];
        assert_eq!(
            (row["size"].as_u64(), row["count"].as_u64(), row["root"].as_str()),
            (Some(2000), Some(500), Some("-1"))
        );
        assert_eq!(row["out_of_place"]["nwrong"], 0);
        assert!(row["in_place"]["nwrong"].is_null());
        assert!((row["out_of_place"]["bus_bw"].as_f64().unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(row["out_of_place"]["why"], "one pass, no messages");
        assert_eq!(row["out_of_place_calls"]["times_us"].as_array().unwrap().len(), 1);
        assert!(row["out_of_place_per_iter"].is_null());
        assert_eq!(json["average_bus_bandwidth"]["okay"], "false");
        assert_eq!(run.json(Some(0.1))["average_bus_bandwidth"]["okay"], "true");
        assert_eq!(run.json(None)["average_bus_bandwidth"]["okay"], "unchecked");
    }

    #[test]
    fn single_calls_are_of_their_slowest_rank_where_nccl_tests_has_them() {
        let mut run = example("shm", &[(1024, 1e-6)]);
        let half = &mut run.rows[0].in_place;
        half.slowest = Some(vec![2e-6, 4e-6]);
        half.half.per_call = Summary::of(&[2e-6, 4e-6]);
        half.each = vec![vec![2e-6, 1e-6], vec![1e-6, 4e-6]];
        let row = run.json(None)["results"][0].clone();
        let slowest = &row["in_place_per_iter"];
        assert_eq!((&slowest["times_us"], &slowest["skipped_iterations"]), (&json!([2.0, 4.0]), &json!(0)));
        assert_eq!((&slowest["max_us"], &row["in_place_calls"]["max_us"]), (&json!(4.0), &json!(1.0)));
        assert_eq!(slowest["per_process_max_times_us"], json!([[2.0, 1.0], [1.0, 4.0]]));
    }

    #[test]
    fn csv_lines_have_as_many_fields_as_names() {
        let mut run = example("shm over, say, \"veth\"", &[(1024, 2e-6)]);
        let text = run.csv();
        let fields = |line: &str| {
            let mut quoted = false;
            line.chars()
                .filter(|&c| {
                    quoted ^= c == '"';
                    c == ',' && !quoted
                })
                .count()
                + 1
        };
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|l| fields(l) == 21), "{text}");
        assert!(lines[1].contains("out_of_place,1024,256,float,none,-1,2.000,0.512000,0.256000,0,"));
        let row = &mut run.rows[0];
        for measured in [&mut row.out_of_place, &mut row.in_place] {
            measured.half.per_call = Summary::of(&[1e-6, 3e-6]);
        }
        let text = run.csv();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|l| fields(l) == 25), "{text}");
        assert!(lines[0].ends_with(",messages,i_min_us,i_max_us,i_p99_us,i_cv_pct"), "{text}");
        assert!(lines[1..].iter().all(|line| line.ends_with(",,1.000,3.000,3.000,50.000")), "{text}");
    }

    #[test]
    fn csv_lines_say_which_messages_went_and_that_they_were_not_reduced() {
        let mut run = example("shm", &[(1024, 2e-6)]);
        (run.operation, run.messages) = (Operation::SendRecv, Messages::PingPong);
        run.rows[0].label.op = "sum";
        let text = run.csv();
        assert!(text.lines().skip(1).all(|line| line.ends_with(",ping-pong")), "{text}");
        assert!(!text.contains("sum"), "{text}");
    }

    #[test]
    fn anything_wrong_counts_once_per_half() {
        let mut run = example("shm", &[(1024, 1e-6), (2048, 1e-6)]);
        assert_eq!((run.found.wrong, run.found.failures, run.found.halves), (0, 0, 4));
        assert_eq!(run.json(None)["out_of_bounds"], json!({"count": 0, "okay": "true"}));
        run.rows[0].in_place.half.wrong = Some(7);
        run.rows[1].out_of_place.half.wrong = Some(5);
        let run = of_rows("shm", run.rows);
        assert_eq!((run.found.wrong, run.found.failures), (12, 2));
        assert_eq!(run.json(None)["out_of_bounds"], json!({"count": 2, "okay": "false"}));
    }

    #[test]
    fn rows_that_nobody_keeps_count_and_say_their_algorithm_once() {
        let mut run = example("shm", &[(1024, 1e-6), (2048, 1e-6)]);
        run.rows[1].out_of_place.algorithm = "pairwise".into();
        let rows = std::mem::take(&mut run.rows);
        run.found = Found::default();
        for _ in 0..1000 {
            rows.iter().for_each(|row| run.add(row.clone(), false));
        }
        assert_eq!((run.rows.len(), run.found.halves), (0, 4000));
        assert!((run.found.average_bus_bandwidth() - 0.768).abs() < 1e-9);
        let said = [
            "1024 bytes out-of-place: direct",
            "2048 bytes out-of-place: pair",
            "2048 bytes in-place: direct",
        ];
        assert_eq!(run.found.algorithms.len(), said.len(), "{:?}", run.found.algorithms);
        assert!(run.found.algorithms.iter().zip(said).all(|(line, words)| line.contains(words)));
    }
}
