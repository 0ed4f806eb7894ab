//! What a figure shows: the lines of runs in memory and of files.

use crate::bench::messages::Messages;
use crate::bench::operation::Operation;
use crate::bench::record::Run;
use crate::failure::{Failure, Result};
use crate::files::label;
use serde_json::Value;
use std::path::Path;

/// One line of a figure: (bytes, microseconds, GB/s), by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What was measured, without the placement.
    pub subject: String,
    pub in_place: bool,
    /// How often a size was measured; the middle one of the times is drawn.
    pub cycles: usize,
    pub points: Vec<Point>,
}

pub type Point = (f64, f64, f64);

impl Series {
    /// The two placements of a run that is still in memory.
    ///
    /// # Errors
    /// As [`of_json`](Self::of_json).
    pub fn of_run(run: &Run) -> std::result::Result<Vec<Series>, String> {
        Self::of_json(&run.outline(), "")
    }

    /// The lines of what `--json` wrote (or nccl-tests' `-J`): out of place, and in place where it differs. One
    /// line per type, reduction and root.
    ///
    /// # Errors
    /// What is missing, as the end of a sentence.
    pub fn of_json(json: &Value, fallback: &str) -> std::result::Result<Vec<Series>, String> {
        let results = json["results"].as_array().ok_or("has no list 'results'")?;
        let operation = json["operation"].as_str().unwrap_or(fallback);
        let transport = json["transport"].as_str().unwrap_or("");
        let kinds = [("one_way", Messages::OneWay), ("ping_pong", Messages::PingPong)];
        let messages = kinds.iter().find(|(key, _)| json["config"][key] == true);
        let messages = messages.map_or("", |(_, kind)| kind.name());
        // nccl-tests, and so the file, has a reduction of send_recv, too.
        let reduces = Operation::ALL.iter().all(|known| known.name() != operation || known.reduces());
        // Of what has one form the halves of a row are the same twice.
        let once = json["config"]["one_form"] == true;
        // Where nothing says how many there were, what is there again was in another.
        let cycles = json["config"]["run_cycles"].as_u64().map_or(usize::MAX, |n| n.max(1) as usize);
        let several =
            results.iter().any(|row| row["root"].as_str().is_some_and(|r| !["0", "-1"].contains(&r.trim())));
        let mut all: Vec<Series> = Vec::new();
        for (i, row) in results.iter().enumerate() {
            let field = |value: &Value, what: &str| {
                // No axis has room for more than that.
                value
                    .as_f64()
                    .filter(|x| x.abs() < 1e18)
                    .ok_or_else(|| format!("has no number '{what}' in entry {i} of 'results'"))
            };
            // Fractions of bytes are none, and their logarithms would need marks without end.
            let bytes = field(&row["size"], "size").and_then(|bytes| match bytes == 0.0 || bytes >= 1.0 {
                true => Ok(bytes),
                false => {
                    Err(format!("has a 'size' in entry {i} of 'results' that is neither 0 nor 1 and more"))
                }
            })?;
            let text = |key: &str| row[key].as_str().unwrap_or("").trim().to_owned();
            let mut name = [operation, messages, transport].map(str::to_owned).to_vec();
            name.push(text("type"));
            name.extend(Some(text("redop")).filter(|op| reduces && op != "none"));
            let root = text("root");
            // Where all calls have rank 0 it goes without saying.
            if !matches!(root.as_str(), "" | "-1") && (root != "0" || several) {
                name.push(format!("root {root}"));
            }
            if let Some(ranks) = json["ranks"].as_u64() {
                name.push(format!("{ranks} ranks"));
            }
            name.retain(|part| !part.is_empty());
            let subject = name.join(" ");
            for (placement, in_place) in [("out_of_place", false), ("in_place", true)] {
                if in_place && once {
                    continue;
                }
                let half = &row[placement];
                if half.is_null() {
                    continue;
                }
                // The time that a processor took to start the call, where nccl-tests was asked for that.
                let time = if half["time"].is_null() { &half["cpu_time"] } else { &half["time"] };
                // As nccl-tests writes what is no number.
                if [time, &half["bus_bw"]]
                    .iter()
                    .any(|value| value.as_str().is_some_and(|v| v.contains("nan")))
                {
                    continue;
                }
                let point = (bytes, field(time, "time")?, field(&half["bus_bw"], "bus_bw")?);
                match all.iter_mut().find(|s| s.subject == subject && s.in_place == in_place) {
                    Some(series) => series.points.push(point),
                    None => {
                        let subject = subject.clone();
                        all.push(Series { subject, in_place, cycles: 1, points: vec![point] });
                    }
                }
            }
        }
        for series in &mut all {
            // Sizes of 0 have no place on a logarithmic axis.
            series.points.retain(|p| p.0 > 0.0);
            series.merge(cycles);
        }
        all.retain(|s| !s.points.is_empty());
        Ok(all)
    }

    /// One point for each size, by size: of several, the one with the middle time, of an even number the slower of two. Sizes
    /// that one of so many `cycles` rounded to the same are no more of them.
    fn merge(&mut self, cycles: usize) {
        self.points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let sizes: Vec<&[Point]> = self.points.chunk_by(|a, b| a.0 == b.0).collect();
        self.cycles = sizes.iter().map(|times| times.len()).max().unwrap_or(1).min(cycles);
        self.points = sizes.iter().map(|times| times[times.len() / 2]).collect();
    }

    /// As the figure names it: without characters that XML has not, which files and their names may have.
    pub fn name(&self) -> String {
        let placement = if self.in_place { ", in place" } else { "" };
        let cycles = match self.cycles {
            1 => String::new(),
            n => format!(", median of {n}"),
        };
        let odd = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
        format!("{}{placement}{cycles}", self.subject.replace(odd, "\u{fffd}"))
    }

    /// From files; a line's name starts with its file's when several files would give the same name.
    ///
    /// # Errors
    /// A file that cannot be read, is no result, or is named twice.
    pub fn read(files: &[impl AsRef<Path>]) -> Result<Vec<Series>> {
        let mut all: Vec<(String, &str, Series)> = Vec::new();
        for (i, file) in files.iter().enumerate() {
            let path = file.as_ref();
            let refuse = |what: String| Failure::usage(format!("{} {what}", path.display()));
            if files[..i].iter().any(|earlier| earlier.as_ref() == path) {
                return Err(refuse("is given twice: a figure shows each file once".to_owned()));
            }
            let text = std::fs::read_to_string(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
            const WRITTEN: &str = "give files that 'caravan bench OPERATION --json FILE' wrote";
            let json: Value =
                serde_json::from_str(&text).map_err(|e| refuse(format!("is not JSON: {e}: {WRITTEN}")))?;
            let label = label(path, files);
            let series = Self::of_json(&json, &label).map_err(|e| refuse(format!("{e}: {WRITTEN}")))?;
            let unfinished = if json["complete"] == false { ", unfinished" } else { "" };
            all.extend(series.into_iter().map(|series| (label.clone(), unfinished, series)));
        }
        let elsewhere = |label: &str, s: &Series| {
            all.iter().any(|(other, _, o)| other != label && o.subject == s.subject)
        };
        let named = all.iter().map(|(label, unfinished, s)| {
            let label = if elsewhere(label, s) { format!("{label}: ") } else { String::new() };
            Series { subject: format!("{label}{}{unfinished}", s.subject), ..s.clone() }
        });
        Ok(named.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;
    use serde_json::json;

    #[test]
    fn a_size_that_was_measured_again_is_one_point() {
        let run = example("shm", &[(1024, 5e-6), (2048, 1e-6), (1024, 1e-6), (1024, 3e-6)]);
        let series = Series::of_run(&run).unwrap();
        assert_eq!(series[0].name(), "all_gather shm float 2 ranks, median of 3");
        let points: Vec<(f64, f64)> = series[0].points.iter().map(|p| (p.0, p.1.round())).collect();
        assert_eq!(points, [(1024.0, 3.0), (2048.0, 1.0)]);
    }

    #[test]
    fn a_run_with_what_no_axis_has_room_for_says_so() {
        let mut run = example("shm", &[(1024, 1e-6)]);
        run.rows[0].out_of_place.half.bus_bandwidth = 1e18;
        let e = Series::of_run(&run).unwrap_err();
        assert_eq!(e, "has no number 'bus_bw' in entry 0 of 'results'");
    }

    #[test]
    fn sizes_that_are_rounded_to_one_are_no_cycles() {
        let lines = |cycles: usize| {
            let mut run = example("shm", &[(16, 1e-6), (16, 2e-6), (32, 3e-6), (16, 4e-6), (32, 5e-6)]);
            run.about["config"] = json!({"run_cycles": cycles});
            Series::of_run(&run).unwrap().remove(0)
        };
        assert_eq!(lines(1).name(), "all_gather shm float 2 ranks");
        assert_eq!(lines(2).name(), "all_gather shm float 2 ranks, median of 2");
        // A run that was cut short has not been through all of them.
        assert_eq!(lines(9).name(), "all_gather shm float 2 ranks, median of 3");
        assert_eq!(lines(1).points.len(), 2);
    }

    #[test]
    fn files_of_one_name_give_lines_of_several() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["x/run.json", "y/run.json"].map(|name| dir.path().join(name));
        for file in &files {
            std::fs::create_dir(file.parent().unwrap()).unwrap();
            std::fs::write(file, example("shm", &[(1024, 1e-6)]).json(None).to_string()).unwrap();
        }
        let mut cut = example("shm", &[(1024, 1e-6)]).json(None);
        cut["complete"] = json!(false);
        std::fs::write(&files[1], cut.to_string()).unwrap();
        let series = Series::read(&files).unwrap();
        let unfinished = series.iter().map(|series| series.name().contains(", unfinished"));
        assert_eq!(unfinished.collect::<Vec<_>>(), [false, false, true, true]);
        assert!(series[0].name().starts_with("x/run.json: "), "{}", series[0].name());
        assert!(series[2].name().starts_with("y/run.json: "), "{}", series[2].name());
        let e = Series::read(&[&files[0], &files[0]]).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("run.json is given twice"), "{e}");
    }

    #[test]
    fn messages_are_told_apart_and_are_no_sums() {
        let half = json!({"time": 2.5, "bus_bw": 1.5});
        let subject = |operation: &str, config: Value| {
            let json = json!({"operation": operation, "config": config, "results": [
                {"size": 8, "type": "float", "redop": "sum", "out_of_place": half},
            ]});
            Series::of_json(&json, "").unwrap()[0].subject.clone()
        };
        assert_eq!(subject("send_recv", json!({})), "send_recv float");
        let config = |one_way, ping_pong| json!({"one_way": one_way, "ping_pong": ping_pong});
        assert_eq!(subject("send_recv", config(false, false)), "send_recv float");
        assert_eq!(subject("send_recv", config(true, false)), "send_recv one-way float");
        assert_eq!(subject("send_recv", config(false, true)), "send_recv ping-pong float");
        assert_eq!(subject("all_reduce", config(false, false)), "all_reduce float sum");
        assert_eq!(subject("", json!({})), "float sum");
    }

    #[test]
    fn what_has_one_form_is_one_line() {
        let half = json!({"time": 2.5, "bus_bw": 1.5});
        let lines = |one_form: Value| {
            let json = json!({"operation": "broadcast", "config": {"one_form": one_form}, "results": [
                {"size": 8, "type": "float", "out_of_place": half, "in_place": half},
            ]});
            Series::of_json(&json, "").unwrap().len()
        };
        // nccl-tests says nothing of it, and measures two.
        assert_eq!([json!(true), json!(false), Value::Null].map(lines), [1, 2, 2]);
    }
}
