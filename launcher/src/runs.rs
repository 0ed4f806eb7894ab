//! `caravan report`: trainings side by side on one page, from the metrics that they wrote.

mod charts;
mod page;
mod read;

use crate::args::ReportArgs;
use crate::colours::COLOURS;
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use crate::human::several;
use crate::out;
use read::Training;

/// The most trainings that colours tell apart.
const MOST: usize = COLOURS.len();

/// Writes the page, whole or not at all.
///
/// # Errors
/// Files that are no metrics, and a page that cannot be written.
pub fn report(args: &ReportArgs) -> Result<()> {
    files::check_outputs(&[Output::whole("--out", &args.out, Kind::Page)], &args.metrics)?;
    let stream = "/dev/stdin for the standard input";
    args.metrics.iter().try_for_each(|file| files::check_name("report", file, stream))?;
    files::check_once("report", &args.metrics)?;
    if args.metrics.len() > MOST {
        return Err(Failure::usage(format!(
            "a page tells {MOST} trainings apart, and {} were given: give fewer",
            args.metrics.len()
        )));
    }
    let trainings = Training::read(&args.metrics)?;
    let title = args.title.as_deref().unwrap_or("caravan report");
    files::write_whole(&args.out, page::html(title, &trainings)?.as_bytes())?;
    if files::standard(&args.out).is_none() {
        out::line(format_args!("{} in {}", several(trainings.len(), "training"), args.out.display()))?;
    }
    Ok(())
}
