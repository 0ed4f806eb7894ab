//! Which steps of a training are traced, and where that is written.

use super::usage;
use crate::args::{DeviceKind, TrainArgs};
use crate::failure::{Failure, Result};
use crate::files;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The steps that show what others are like: the first ones have more to do.
const USUAL: RangeInclusive<usize> = 3..=5;

/// What `--trace` asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Traced {
    /// Where it is written.
    pub path: PathBuf,
    /// Of which steps it is, counted from 1; of none, if all that were asked for were made before.
    pub steps: RangeInclusive<usize>,
}

impl fmt::Display for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.steps.is_empty() {
            true => f.write_str("of steps that were made before"),
            false => write!(f, "of steps {}-{}", self.steps.start(), self.steps.end()),
        }
    }
}

impl Traced {
    /// What the flags of a training ask for, if anything, of which so many steps were `made` before. The command of a job that
    /// is started again asks for what it did the first time, so what is made by then is no error.
    ///
    /// # Errors
    /// Steps that no training of so many makes, or of nothing; a device, whose work the host does not see.
    pub fn asked(args: &TrainArgs, made: usize) -> Result<Option<Traced>> {
        let Some(path) = args.trace.clone() else {
            return match &args.trace_steps {
                Some(steps) => {
                    usage(format!("--trace-steps {steps} says of which steps --trace FILE.json is: add that"))
                }
                None => Ok(None),
            };
        };
        if args.device.device != DeviceKind::Cpu {
            return usage(format!(
                "--trace {} is of what processors do, and --device cuda leaves that to GPUs, which 'nsys profile caravan train \
                 ...' traces: leave one of them away",
                path.display()
            ));
        }
        // A reader of a pipe may pause, and ranks would wait for it in the midst of the run.
        let special = path.metadata().is_ok_and(|there| !there.is_file() && !there.is_dir());
        if special || files::is_descriptor(&path) {
            return usage(format!(
                "--trace {} is a stream or a device: a trace is written to a regular file by its name",
                path.display()
            ));
        }
        let last = args.steps;
        let steps = match &args.trace_steps {
            None => last.min(made + USUAL.start())..=last.min(made + USUAL.end()),
            Some(text) => parse(text).filter(|steps| *steps.end() <= last).ok_or_else(|| {
                Failure::usage(format!(
                    "--trace-steps {text}: the steps of this training are 1-{last}, of which it takes some, like {}-{last} or \
                     {last}",
                    last.saturating_sub(2).max(1)
                ))
            })?,
        };
        Ok(Some(Traced { path, steps: (made + 1).max(*steps.start())..=*steps.end() }))
    }
}

/// `3-5`, or `3`.
fn parse(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (1 <= first && first <= last).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;

    fn asked(flags: &str) -> Result<Option<RangeInclusive<usize>>> {
        Ok(Traced::asked(&train(flags), 0)?.map(|traced| traced.steps))
    }

    #[test]
    fn a_trace_is_of_steps_that_are_made() {
        for (flags, steps) in [
            ("", None),
            ("--trace t.json", Some(3..=5)),
            ("--trace t.json --steps 4", Some(3..=4)),
            ("--trace t.json --steps 1", Some(1..=1)),
            ("--trace t.json --trace-steps 7", Some(7..=7)),
            ("--trace t.json --trace-steps 1-20 --steps 20", Some(1..=20)),
        ] {
            assert_eq!(asked(flags).unwrap(), steps, "{flags}");
        }
        // Of those that a run makes which goes on.
        let after = |flags: &str| Traced::asked(&train(flags), 500).map(|traced| traced.unwrap().steps);
        assert_eq!(after("--trace t.json").unwrap(), 503..=505);
        assert_eq!(after("--trace t.json --steps 501").unwrap(), 501..=501);
        assert_eq!(after("--trace t.json --trace-steps 499-503").unwrap(), 501..=503);
        for made in ["--steps 500", "--trace-steps 3-5", "--trace-steps 500"] {
            assert!(after(&format!("--trace t.json {made}")).unwrap().is_empty(), "{made}");
        }
        assert!(after("--trace t.json --trace-steps 1000-1001").is_err());
        for (flags, words) in [
            ("--trace-steps 3-5", "add that"),
            ("--trace t.json --trace-steps 0-5", "are 1-1000, "),
            ("--trace t.json --trace-steps 5-3", "like 998-1000 or 1000"),
            ("--trace t.json --trace-steps 3-", "are 1-1000, "),
            (
                "--trace t.json --trace-steps 3-11 --steps 10",
                "are 1-10, of which it takes some, like 8-10 or 10",
            ),
            ("--trace t.json --device cuda", "nsys profile"),
            ("--trace /dev/null", "a regular file"),
            ("--trace /dev/stdout", "a regular file"),
        ] {
            let e = asked(flags).unwrap_err();
            assert!(e.code() == 2 && e.to_string().contains(words), "{flags}: {e}");
        }
    }
}
