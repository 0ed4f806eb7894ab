//! The metrics file: one JSON object a line, and never half a line.

use crate::failure::{Failure, Result};
use crate::files;
use crate::out;
use crate::progress::Progress;
use crate::train::stop;
use rustix::io::Errno;
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A file of JSON lines that is complete after every call; a pipe whose reader pauses gets them later.
pub struct Metrics {
    file: File,
    path: PathBuf,
    /// Whether it is a file with a place on a disk, and takes whatever there is room for.
    kept: bool,
    /// Bytes of whole lines; None where the file has more than these.
    whole: Option<u64>,
    /// What a pipe or a terminal has not taken yet, whose reader may pause, for which other ranks do not wait.
    held: Vec<u8>,
}

/// The most that is held.
const MOST_HELD: usize = 64 << 20;
/// What a pipe takes at once if it takes anything.
const PAGE: usize = 4096;
/// How long a run that is asked to end waits for a reader.
const LAST: Duration = Duration::from_secs(1);

impl Metrics {
    /// Starts the file anew, unless it is standard output or standard error.
    ///
    /// # Errors
    /// A path that cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        let refused = |e| Failure::usage(format!("cannot write --metrics {}: {e}", path.display()));
        let (file, whole) = match files::standard(path) {
            Some(file) => (file, None),
            None if path.metadata().is_ok_and(|there| !there.is_file()) => {
                (files::open_special(path, files::READ_WITHIN).map_err(refused)?, Some(0))
            }
            None => (File::create(path).map_err(refused)?, Some(0)),
        };
        Ok(Metrics::of(file, path, whole))
    }

    /// Goes on with the file, if there is one.
    ///
    /// # Errors
    /// A path that cannot be written.
    pub fn append(path: &Path) -> Result<Self> {
        if !path.metadata().is_ok_and(|there| there.is_file()) || files::standard(path).is_some() {
            return Metrics::create(path);
        }
        let refused = |e| Failure::usage(format!("cannot write --metrics {}: {e}", path.display()));
        let mut file = File::options().read(true).append(true).open(path).map_err(refused)?;
        // A machine that failed may have left the beginning of a line.
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(refused)?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end as u64 + 1);
        file.set_len(whole).map_err(refused)?;
        Ok(Metrics::of(file, path, Some(whole)))
    }

    fn of(file: File, path: &Path, whole: Option<u64>) -> Self {
        let kept = file.metadata().is_ok_and(|there| there.is_file());
        Metrics { file, path: path.to_owned(), kept, whole, held: Vec::new() }
    }

    /// Appends one line in one write, if it is not longer than a page and has a reader.
    ///
    /// # Errors
    /// A full disk; then the file ends with the last whole line.
    pub fn line(&mut self, value: &Value) -> Result<()> {
        let text = format!("{value}\n");
        self.held.extend(text.as_bytes());
        while self.held.len() > MOST_HELD || (!self.held.is_empty() && self.is_read(Duration::ZERO)) {
            self.write()?;
        }
        Ok(())
    }

    fn is_read(&self, within: Duration) -> bool {
        self.kept || out::is_taken(&self.file, within)
    }

    /// Writes what is held, to a pipe as many of the lines as it takes at once, or one that is longer.
    fn write(&mut self) -> Result<()> {
        let (all, ends) = (self.held.len(), |&byte: &u8| byte == b'\n');
        let most = match self.kept {
            true => all,
            false => {
                let within = self.held[..PAGE.min(all)].iter().rposition(ends);
                within.or_else(|| self.held.iter().position(ends)).map_or(all, |end| end + 1)
            }
        };
        match self.file.write_all(&self.held[..most]) {
            Ok(()) => {
                self.held.drain(..most);
                self.whole = self.whole.map(|bytes| bytes + most as u64);
                Ok(())
            }
            Err(e) => {
                self.held.clear();
                // Pipes and devices cannot be cut; then the reader sees the broken pipe itself.
                let cut = self.whole.is_some_and(|bytes| self.file.set_len(bytes).is_ok());
                let rest = if cut { "" } else { " (its last line is incomplete)" };
                Err(Failure::run(format!("cannot write metrics to {}: {e}{rest}", self.path.display())))
            }
        }
    }

    /// Returns once the lines are read, or on the disk, of which a file system in a network may say only then that it is full.
    ///
    /// # Errors
    /// What was written is not all there.
    fn settle(&mut self) -> Result<()> {
        while !self.held.is_empty() {
            if self.is_read(LAST) {
                self.write()?;
            } else if stop::asked().is_some() {
                return Err(Failure::run(format!(
                    "the last metrics for {} are missing: whoever reads them takes nothing",
                    self.path.display()
                )));
            }
        }
        match rustix::fs::fdatasync(&self.file) {
            // Pipes, terminals and devices keep nothing.
            Err(e) if ![Errno::INVAL, Errno::ROFS].contains(&e) => Err(Failure::run(format!(
                "metrics written to {} may be incomplete: the system says {e}",
                self.path.display()
            ))),
            _ => Ok(()),
        }
    }
}

impl Drop for Metrics {
    /// Of a run that fails: its reader gets what it still takes.
    fn drop(&mut self) {
        while !self.held.is_empty() && self.is_read(LAST) && self.write().is_ok() {}
    }
}

/// The metrics of a run under way, on the rank that writes them. A disk that fills up costs no model: the first line that
/// cannot be written is the last, is told at once, and makes the run end as no success.
#[derive(Default)]
pub struct Record {
    metrics: Option<Metrics>,
    /// Why there are no more lines.
    failure: Option<Failure>,
    /// What else is missing, and why: the last of each kind.
    missing: Vec<(String, String)>,
}

impl Record {
    /// With its first line, before which nothing can be lost; those of a run that this one goes on with stay before it.
    ///
    /// # Errors
    /// A path that cannot be written, or a disk that is full already.
    pub fn begin(path: &Path, first: &Value, goes_on: bool) -> Result<Self> {
        let mut metrics = if goes_on { Metrics::append(path)? } else { Metrics::create(path)? };
        metrics.line(first)?;
        Ok(Record { metrics: Some(metrics), ..Record::default() })
    }

    /// Appends what `line` makes, where lines are still written.
    pub fn line(&mut self, progress: &Progress, line: impl FnOnce() -> Value) {
        let Some(metrics) = &mut self.metrics else { return };
        if let Err(e) = metrics.line(&line()) {
            progress.alarm(&format!("{e}; the run goes on without them"));
            (self.metrics, self.failure) = (None, Some(e));
        }
    }

    /// Notes that something else could not be written, which costs no model either.
    pub fn without(&mut self, what: &str, progress: &Progress, why: &Failure) {
        progress.alarm(&format!("{why}; the run goes on without {what}"));
        self.missing.retain(|(other, _)| other != what);
        self.missing.push((what.to_owned(), format!("{why}; the run went on without {what}")));
    }

    /// Whether all was written, and lines are kept.
    ///
    /// # Errors
    /// Why the rest is missing.
    pub fn end(self) -> Result<()> {
        let settled =
            self.metrics.map_or(Ok(()), |mut metrics| metrics.settle()).err().map(|e| e.to_string());
        let lines = self.failure.map(|e| format!("{e}; the run went on without them"));
        let missing = self.missing.into_iter().map(|(_, why)| why);
        let lost: Vec<String> = lines.into_iter().chain(settled).chain(missing).collect();
        match lost.is_empty() {
            true => Ok(()),
            false => Err(Failure::Verdict(lost.join("; "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lines_are_there_as_soon_as_they_are_written() {
        let path = std::env::temp_dir().join(format!("caravan-metrics-{}", std::process::id()));
        let mut metrics = Metrics::create(&path).unwrap();
        for step in 0..3 {
            metrics.line(&json!({"step": step, "text": "a\nb"})).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
            assert_eq!(lines.len(), step + 1);
            assert_eq!(lines[step]["step"], step);
            assert!(text.ends_with('\n'));
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn metrics_that_are_not_kept_are_no_success() {
        let end = |path: &str, file| {
            let metrics = Metrics::of(file, Path::new(path), None);
            Record { metrics: Some(metrics), ..Record::default() }.end()
        };
        let (_, pipe) = std::io::pipe().unwrap();
        end("/dev/stdout", std::os::fd::OwnedFd::from(pipe).into()).unwrap();
        end("/dev/null", File::options().write(true).open("/dev/null").unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        end("m.jsonl", File::create(&path).unwrap()).unwrap();
        // A descriptor of which the system refuses that.
        let unkept = rustix::fs::open(&path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let e = end("m.jsonl", unkept.into()).unwrap_err();
        assert!(
            matches!(e, Failure::Verdict(_)) && e.to_string().contains("m.jsonl may be incomplete"),
            "{e}"
        );
    }

    #[test]
    fn a_full_device_is_an_error() {
        let mut metrics = Metrics::create(Path::new("/dev/full")).unwrap();
        let e = metrics.line(&json!({})).unwrap_err();
        assert!(e.to_string().contains("/dev/full"), "{e}");
        assert_eq!(e.code(), 1);
    }
}
