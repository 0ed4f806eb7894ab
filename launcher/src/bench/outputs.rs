//! The files of an operation's results: which are asked for, and writing them after rows and at the end.

use super::args::CollectiveArgs;
use super::kept::{Pace, is_replaced};
use super::plot::{self, Series};
use super::record::Run;
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use std::path::Path;

/// What rank 0 writes where.
pub fn all(args: &CollectiveArgs) -> [(&'static str, Option<&Path>, Kind); 3] {
    [
        ("--json", args.json.as_deref(), Kind::Json),
        ("--csv", args.csv.as_deref(), Kind::Csv),
        ("--plot", args.plot.as_deref(), Kind::Svg),
    ]
}

/// Those of them that are asked for.
pub fn asked_for(args: &CollectiveArgs) -> Vec<Output<'_>> {
    let asked = all(args).into_iter();
    asked.filter_map(|(flag, path, kind)| Some(Output::whole(flag, path?, kind))).collect()
}

/// Those files.
pub struct Outputs<'a> {
    /// Each at a pace of its own: the JSON has every timing, and takes long to write when the rest does not.
    asked: Vec<(Output<'a>, Pace)>,
    /// What the JSON judges the bandwidth by.
    least: Option<f64>,
}

impl<'a> Outputs<'a> {
    /// None of them is there yet; their directories are.
    pub fn new(args: &'a CollectiveArgs, least: Option<f64>) -> Self {
        let asked = asked_for(args).into_iter().map(|output| (output, Pace::new()));
        Outputs { asked: asked.collect(), least }
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Puts the rows of an unfinished run in the place of the files, of each if it is time for that.
    pub fn keep(&mut self, run: &Run) {
        for (output, pace) in self.asked.iter_mut().filter(|(output, _)| is_replaced(output.file)) {
            pace.keep(|| drop(write(output, run, self.least)));
        }
    }

    /// The same at once, of a run that fails: rows that came after the last time are in them.
    pub fn cut_short(&self, run: &Run) {
        for (output, _) in self.asked.iter().filter(|(output, _)| is_replaced(output.file)) {
            // Why the run fails is what is said.
            drop(write(output, run, self.least));
        }
    }

    /// Writes everything.
    ///
    /// # Errors
    /// The first path that cannot be written, and the system's words.
    pub fn write(&self, run: &Run) -> Result<()> {
        // Each by itself: what has been measured for an hour is kept where it can be.
        self.asked.iter().map(|(output, _)| write(output, run, self.least)).fold(Ok(()), Result::and)
    }
}

fn write(output: &Output<'_>, run: &Run, least: Option<f64>) -> Result<()> {
    let Output { flag, file, kind, .. } = *output;
    let text = match kind {
        Kind::Json => serde_json::to_string_pretty(&run.json(least)).map_err(Failure::run)?,
        Kind::Csv => run.csv(),
        _ => {
            let unfinished = if run.complete { "" } else { ", unfinished" };
            let (name, transport, ranks) = (run.operation.name(), &run.transport, run.ranks);
            let refuse = |e| Failure::run(format!("{flag}: the run {e}"));
            let series = Series::of_run(run).map_err(refuse)?;
            plot::svg(&series, &format!("{name} over {transport}, {ranks} ranks{unfinished}"))?
        }
    };
    files::write_whole(file, text.as_bytes()).map_err(|e| Failure::run(format!("{flag}: {e}")))
}
