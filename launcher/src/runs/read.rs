//! Trainings, as their metrics tell them.

use crate::failure::{Failure, Result};
use crate::files::label;
use crate::human;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// One training: all that its runs, each of which went on where the one before it had been saved, made of it.
#[derive(Debug, Default)]
pub struct Training {
    /// What tells its file from others.
    pub name: String,
    /// How the last of its runs was called, as its first line has it.
    pub about: Value,
    /// What came of each step, by number.
    pub steps: Vec<Step>,
    /// Held-out losses, one a step.
    pub evaluations: Vec<Evaluation>,
    /// What its last run came to, if it ended.
    pub summary: Option<Value>,
    /// How many runs it took.
    pub runs: usize,
    /// Steps that were lost with a run and made again.
    pub again: usize,
}

/// A held-out loss, which is NaN where it is no number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// After how many steps.
    pub step: u64,
    pub loss: f64,
    /// How many it is the mean over.
    pub tokens: u64,
}

/// One step. A number that is none, as of a loss that overflowed, is NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// From 1.
    pub number: u64,
    pub loss: f64,
    pub grad_norm: f64,
    pub lr: f64,
    /// Of all ranks.
    pub tokens: f64,
    pub seconds: f64,
    /// Seconds in forward and backward.
    pub compute: f64,
    /// Seconds in collectives that nothing hid.
    pub exposed: f64,
    /// Seconds in clipping and the optimizer.
    pub optimizer: f64,
    /// Bytes that rank 0 sent.
    pub sent: f64,
    /// What the loss was multiplied by, in f16.
    pub scale: Option<f64>,
    /// Its gradient overflowed, and no weight was changed.
    pub skipped: bool,
}

const WRITTEN: &str = "give files that 'caravan train --metrics FILE' wrote";

/// Bytes of the longest line, its end included. A summary has some thousand for each rank.
const LONGEST: u64 = 64 << 20;

impl Training {
    /// Reads files, each of one training.
    ///
    /// # Errors
    /// A file that cannot be read, is no metrics, or has no step.
    pub fn read(files: &[PathBuf]) -> Result<Vec<Self>> {
        let read = |file: &PathBuf| Ok(Training { name: label(file, files), ..Self::open(file)? });
        files.iter().map(read).collect()
    }

    fn open(path: &Path) -> Result<Self> {
        let refuse = |what: String| Failure::usage(format!("{} {what}", path.display()));
        let unread = |e: std::io::Error| refuse(format!("cannot be read: {e}"));
        let mut lines = BufReader::new(File::open(path).map_err(unread)?);
        let (mut training, mut line, mut number) = (Training::default(), Vec::new(), 0);
        while lines.by_ref().take(LONGEST).read_until(b'\n', &mut line).map_err(unread)? > 0 {
            number += 1;
            if !line.ends_with(b"\n") {
                // The last line of a run that is under way may not be whole yet.
                if (line.len() as u64) < LONGEST {
                    break;
                }
                let most = human::bytes(LONGEST);
                return Err(refuse(format!(
                    "is no metrics: its line {number} has no end in {most}; {WRITTEN}"
                )));
            }
            let value = serde_json::from_slice(&line).map_err(|e| {
                refuse(format!("is no metrics: its line {number} is not JSON ({e}); {WRITTEN}"))
            })?;
            training
                .take(value)
                .map_err(|what| refuse(format!("is no metrics: its line {number} {what}; {WRITTEN}")))?;
            line.clear();
        }
        match training.steps.is_empty() {
            true if training.runs == 0 => {
                // What is left of it was not read to its end.
                let has = if line.is_empty() { "is empty" } else { "has no whole line" };
                Err(refuse(format!("{has}; {WRITTEN}")))
            }
            true => Err(refuse("has no step yet: there is nothing to show of it".into())),
            false => Ok(training),
        }
    }

    /// One line; why it is none of metrics, as the end of a sentence.
    fn take(&mut self, mut line: Value) -> std::result::Result<(), String> {
        if let Some(about) = line.get_mut("run") {
            // What came after the state that this run went on with was lost.
            let kept = about["resumed_after"].as_u64().unwrap_or(0);
            let before = self.steps.len();
            self.steps.retain(|step| step.number <= kept);
            self.evaluations.retain(|evaluation| evaluation.step <= kept);
            self.again += before - self.steps.len();
            (self.about, self.summary) = (about.take(), None);
            self.runs += 1;
            return Ok(());
        }
        if self.runs == 0 {
            return Err("comes before any that begins with \"run\"".into());
        }
        if let Some(summary) = line.get_mut("summary") {
            self.summary = Some(summary.take());
        } else if let Some(evaluation) = line.get("evaluation") {
            let evaluation =
                Evaluation::of(evaluation).ok_or("has an evaluation without a step or a number of tokens")?;
            let same = |earlier: &Evaluation| earlier.step == evaluation.step;
            // A training that is over evaluates again where its command is given again.
            if !self.evaluations.iter().any(|earlier| same(earlier) && earlier.tokens > evaluation.tokens) {
                self.evaluations.retain(|earlier| !same(earlier));
                self.evaluations.push(evaluation);
            }
        } else if !line.is_object() {
            return Err("is no object".into());
        } else if let Some(step) = Step::of(&line) {
            if self.steps.last().is_some_and(|last| last.number >= step.number) {
                return Err(format!("has step {} once more", step.number));
            }
            self.steps.push(step);
        }
        Ok(())
    }

    /// A setting in words.
    pub fn setting(&self, name: &str) -> String {
        match &self.about[name] {
            Value::String(text) => text.clone(),
            Value::Null => "none".into(),
            other => other.to_string(),
        }
    }

    /// Held-out losses after how many steps, by the number of tokens that they are of: only those of as many compare, because
    /// all evaluations but the last may take a part of what is held out.
    pub fn held_out(&self) -> BTreeMap<u64, Vec<(u64, f64)>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for evaluation in &self.evaluations {
            all.entry(evaluation.tokens).or_default().push((evaluation.step, evaluation.loss));
        }
        all
    }

    /// Tokens of all steps.
    pub fn tokens(&self) -> f64 {
        self.sum(|step| step.tokens)
    }

    /// Over all steps; what is no number adds nothing.
    pub fn sum(&self, of: impl Fn(&Step) -> f64) -> f64 {
        self.steps.iter().map(of).filter(|x| x.is_finite()).sum()
    }

    /// The middle of what each step has, but for the first, which warms up; of an even number the lower of the two.
    pub fn median(&self, of: impl Fn(&Step) -> f64) -> f64 {
        let from = usize::from(self.steps.len() > 1);
        let mut all: Vec<f64> = self.steps[from..].iter().map(of).filter(|x| x.is_finite()).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
    }
}

impl Evaluation {
    /// None of what has no step or no number of tokens.
    fn of(line: &Value) -> Option<Self> {
        let loss = line["loss"].as_f64().unwrap_or(f64::NAN);
        Some(Evaluation { step: line["step"].as_u64()?, loss, tokens: line["tokens"].as_u64()? })
    }
}

impl Step {
    /// None of a line about something else, such as a checkpoint.
    fn of(line: &Value) -> Option<Self> {
        let number = line["step"].as_u64()?;
        let of = |name: &str| line[name].as_f64().unwrap_or(f64::NAN);
        Some(Step {
            number,
            loss: of("loss"),
            grad_norm: of("grad_norm"),
            lr: of("lr"),
            tokens: of("tokens"),
            seconds: of("seconds"),
            compute: of("compute_seconds"),
            exposed: of("exposed_communication_seconds"),
            optimizer: of("optimizer_seconds"),
            sent: of("bytes_sent"),
            scale: line["loss_scale"].as_f64(),
            skipped: line["skipped"] == true,
        })
    }

    /// Seconds in nothing that has a name.
    pub fn rest(&self) -> f64 {
        (self.seconds - self.compute - self.exposed - self.optimizer).max(0.0)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    /// A training of `lines`, read as from a file.
    pub fn read(lines: &[Value]) -> Result<Training> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.jsonl");
        let text: Vec<String> = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text.concat()).unwrap();
        Ok(Training::read(&[path])?.remove(0))
    }

    pub fn step(number: u64, loss: f64) -> Value {
        json!({"step": number, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "seconds": 0.5 * number as f64,
               "compute_seconds": 0.25, "exposed_communication_seconds": 0.125, "optimizer_seconds": 0.0, "bytes_sent": 8})
    }

    #[test]
    fn what_a_resumed_run_makes_again_is_there_once() {
        let run = |after: Value| json!({"run": {"resumed_after": after, "seed": 7}});
        let evaluation =
            |step: u64, loss: f64| json!({"evaluation": {"step": step, "loss": loss, "tokens": 9}});
        let training = read(&[
            run(Value::Null),
            step(1, 5.0),
            evaluation(1, 6.0),
            json!({"checkpoint": {"step": 1}}),
            step(2, 4.0),
            evaluation(2, 5.5),
            step(3, 3.0),
            run(json!(1)),
            step(2, 4.5),
            evaluation(2, 5.25),
            json!({"summary": {"steps": 2}}),
        ])
        .unwrap();
        let losses: Vec<(u64, f64)> = training.steps.iter().map(|s| (s.number, s.loss)).collect();
        assert_eq!(losses, [(1, 5.0), (2, 4.5)]);
        assert_eq!(training.held_out(), BTreeMap::from([(9, vec![(1, 6.0), (2, 5.25)])]));
        assert_eq!((training.runs, training.again), (2, 2));
        assert!(training.summary.is_some() && training.setting("seed") == "7");
        // One that goes on has not come to its end, whatever came before it.
        let under_way =
            read(&[run(Value::Null), step(1, 5.0), json!({"summary": {}}), run(json!(1))]).unwrap();
        assert!(under_way.summary.is_none() && under_way.steps.len() == 1 && under_way.again == 0);
    }

    #[test]
    fn of_evaluations_after_one_step_that_of_more_tokens_counts() {
        let mut lines = vec![json!({"run": {}}), step(1, 5.0)];
        for (step, loss, tokens) in
            [(1, 4.0, 20), (1, 3.0, 90), (1, 2.0, 20), (2, 6.0, 20), (2, 5.0, 20), (3, 1.0, 90)]
        {
            lines.push(json!({"evaluation": {"step": step, "loss": loss, "tokens": tokens}}));
        }
        let held_out = read(&lines).unwrap().held_out();
        let wanted = [(20, vec![(2, 5.0)]), (90, vec![(1, 3.0), (3, 1.0)])];
        assert_eq!(held_out, BTreeMap::from(wanted));
    }

    #[test]
    fn a_line_that_is_being_written_is_not_read_and_others_have_to_be_metrics() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.jsonl");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Training::read(std::slice::from_ref(&path)).map_err(|e| (e.code(), e.to_string()))
        };
        let (run, one) = (r#"{"run":{"seed":1}}"#, step(1, 2.0).to_string());
        assert_eq!(of(&format!("{run}\n{one}\n{{\"step\":2,\"lo")).unwrap()[0].steps.len(), 1);
        assert_eq!(of(&format!("{run}\n{one}\n{one}")).unwrap()[0].steps.len(), 1);
        for (text, words) in [
            (String::new(), "is empty"),
            ("{\"run\":{}}".into(), "has no whole line"),
            ("hello".into(), "has no whole line"),
            (format!("{run}\n"), "has no step yet"),
            (format!("{one}\n"), "line 1 comes before any that begins with \"run\""),
            (format!("{run}\n{{\n"), "line 2 is not JSON"),
            (format!("{run}\n[1]\n"), "line 2 is no object"),
            (format!("{run}\n{one}\n{one}\n"), "line 3 has step 1 once more"),
            (format!("{run}\n{{\"evaluation\":{{}}}}\n"), "evaluation without a step"),
            (format!("{run}\n{{\"evaluation\":{{\"step\":1}}}}\n"), "or a number of tokens"),
        ] {
            let (code, said) = of(&text).unwrap_err();
            assert!(code == 2 && said.contains(words), "{text:?}: {said}");
        }
    }

    #[test]
    fn what_has_no_line_ends_is_not_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("zeros");
        File::create(&path).unwrap().set_len(LONGEST).unwrap();
        let failure = Training::read(&[path]).unwrap_err();
        let said = failure.to_string();
        assert!(
            failure.code() == 2 && said.contains("no metrics: its line 1 has no end in 64.0 MiB"),
            "{said}"
        );
    }

    #[test]
    fn medians_leave_out_the_first_step_and_what_is_no_number() {
        let mut lines = vec![json!({"run": {}})];
        lines.extend((1..=4).map(|n| step(n, 1.0)));
        lines.push(json!({"step": 5, "loss": null, "seconds": null}));
        let training = read(&lines).unwrap();
        assert_eq!(training.median(|s| s.seconds), 1.5);
        assert_eq!(training.tokens(), 400.0);
        assert!(training.steps[4].loss.is_nan());
        let one = read(&lines[..2]).unwrap();
        assert_eq!(one.median(|s| s.seconds), 0.5);
        assert!(one.median(|_| f64::NAN).is_nan());
    }
}
