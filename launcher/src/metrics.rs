//! The metrics file: one JSON object a line, and never half a line.

use crate::failure::{Failure, Result};
use crate::files;
use crate::out;
use crate::progress::Progress;
use crate::train::stop;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, retry_on_intr};
use serde_json::Value;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
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
    held: Held,
}

/// Lines that wait for a reader.
#[derive(Default)]
struct Held {
    bytes: Vec<u8>,
    /// How many at the front are taken already. They go when they are half of all, so that no more is moved than taken, however
    /// little is taken at once.
    taken: usize,
}

impl Held {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    fn take(&mut self, bytes: usize) {
        self.taken += bytes;
        if self.taken >= self.bytes.len() / 2 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
    }
}

/// The most that is held.
const MOST_HELD: usize = 64 << 20;
/// What a pipe takes at once if it takes anything.
const PAGE: usize = 4096;
/// What is read at once of a file that is gone on with.
const BLOCK: u64 = 64 << 10;

impl Metrics {
    /// Starts the file anew, unless it is standard output or standard error.
    ///
    /// # Errors
    /// A path that cannot be written, or to which another run writes.
    pub fn create(path: &Path) -> Result<Self> {
        let refused = |e| refused(path, &e);
        let (file, whole) = match files::standard(path) {
            Some(file) => (file, None),
            None if path.metadata().is_ok_and(|there| !there.is_file()) => {
                (files::open_special(path, files::READ_WITHIN).map_err(refused)?, Some(0))
            }
            None => {
                let file = alone(path, false)?;
                file.set_len(0).map_err(refused)?;
                (file, Some(0))
            }
        };
        Ok(Metrics::of(file, path, whole))
    }

    /// Goes on with the file, if there is one.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn append(path: &Path) -> Result<Self> {
        if !path.metadata().is_ok_and(|there| there.is_file()) || files::standard(path).is_some() {
            return Metrics::create(path);
        }
        let refused = |e| refused(path, &e);
        let file = alone(path, true)?;
        // A machine that failed may have left the beginning of a line.
        let whole =
            lines_end(file.metadata().map_err(refused)?.len(), |part, at| file.read_exact_at(part, at));
        let whole = whole.map_err(refused)?;
        file.set_len(whole).map_err(refused)?;
        Ok(Metrics::of(file, path, Some(whole)))
    }

    fn of(file: File, path: &Path, whole: Option<u64>) -> Self {
        let kept = file.metadata().is_ok_and(|there| there.is_file());
        Metrics { file, path: path.to_owned(), kept, whole, held: Held::default() }
    }

    /// Appends one line in one write, if it is not longer than a page and has a reader.
    ///
    /// # Errors
    /// A full disk; then the file ends with the last whole line.
    pub fn line(&mut self, value: &Value) -> Result<()> {
        let text = format!("{value}\n");
        self.held.bytes.extend(text.as_bytes());
        while self.held.rest().len() > MOST_HELD
            || (!self.held.rest().is_empty() && self.is_read(Duration::ZERO))
        {
            self.write()?;
        }
        Ok(())
    }

    fn is_read(&self, within: Duration) -> bool {
        self.kept || out::is_taken(&self.file, within)
    }

    /// Writes what is held, to a pipe as many of the lines as it takes at once, or as much of one that is longer.
    fn write(&mut self) -> Result<()> {
        let held = self.held.rest();
        let all = held.len();
        let most = match self.kept {
            true => all,
            false => {
                let page = &held[..PAGE.min(all)];
                page.iter().rposition(|&byte| byte == b'\n').map_or(page.len(), |end| end + 1)
            }
        };
        match out::all(&self.file, &held[..most]) {
            Ok(()) => {
                self.held.take(most);
                self.whole = self.whole.map(|bytes| bytes + most as u64);
                Ok(())
            }
            Err(e) => {
                self.held = Held::default();
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
        while !self.held.rest().is_empty() {
            if self.is_read(if stop::asked().is_some() { out::last_wait() } else { out::LAST }) {
                self.write()?;
            } else if stop::asked().is_some() {
                return Err(Failure::run(format!(
                    "the last metrics for {} are missing: whoever reads them takes nothing",
                    self.path.display()
                )));
            }
        }
        self.sync()
    }

    /// Brings what is written to the disk.
    fn sync(&self) -> Result<()> {
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

/// A file, made if it is not there, to whose end no other run writes as long as it is open, and that may be read, too.
fn alone(path: &Path, read: bool) -> Result<File> {
    let file = File::options().read(read).append(true).create(true).open(path);
    let file = file.map_err(|e| refused(path, &e))?;
    match retry_on_intr(|| flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Err(Errno::WOULDBLOCK) => {
            Err(refused(path, &"another run writes there: wait for its end, or name another file"))
        }
        // A file system without locks costs no run.
        _ => Ok(file),
    }
}

fn refused(path: &Path, why: &dyn Display) -> Failure {
    Failure::usage(format!("cannot write --metrics {}: {why}", path.display()))
}

/// Where the last whole line ends of so many bytes, which `read` gives from any place on: only the last of them are looked at,
/// whatever a long training has written before.
fn lines_end(bytes: u64, mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>) -> io::Result<u64> {
    let (mut block, mut end) = (vec![0; BLOCK as usize], bytes);
    while end > 0 {
        let start = end.saturating_sub(BLOCK);
        let part = &mut block[..(end - start) as usize];
        read(part, start)?;
        if let Some(at) = part.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

impl Drop for Metrics {
    /// Of a run that fails: its reader gets what it still takes.
    fn drop(&mut self) {
        while !self.held.rest().is_empty() && self.is_read(out::last_wait()) && self.write().is_ok() {}
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
            self.lose(progress, e);
        }
    }

    /// Brings the lines to the disk that lie on one, before something is kept that goes on after them: a power failure would
    /// leave a hole there.
    pub fn sync(&mut self, progress: &Progress) {
        let Some(metrics) = self.metrics.as_ref().filter(|metrics| metrics.kept) else { return };
        if let Err(e) = metrics.sync() {
            self.lose(progress, e);
        }
    }

    fn lose(&mut self, progress: &Progress, why: Failure) {
        progress.alarm(&format!("{why}; the run goes on without them"));
        (self.metrics, self.failure) = (None, Some(why));
    }

    /// Notes that something else could not be written, which costs no model either.
    /// Of several of a kind the last is told at the end.
    pub fn without(&mut self, (kind, which): (&str, &str), progress: &Progress, why: &Failure) {
        progress.alarm(&format!("{why}; the run goes on without {kind}{which}"));
        self.missing.retain(|(other, _)| other != kind);
        self.missing.push((kind.to_owned(), format!("{why}; the run went on without {kind}{which}")));
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
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut metrics = Metrics::create(&path).unwrap();
        for step in 0..3 {
            metrics.line(&json!({"step": step, "text": "a\nb"})).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
            assert_eq!(lines.len(), step + 1);
            assert_eq!(lines[step]["step"], step);
            assert!(text.ends_with('\n'));
        }
    }

    #[test]
    fn a_line_that_a_pipe_has_no_room_for_holds_nobody_up() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut metrics = Metrics::of(file, Path::new("pipe"), Some(0));
        let value = json!({"text": "x".repeat(200_000)});
        let line = format!("{value}\n");
        let (told, hear) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            metrics.line(&value).unwrap();
            told.send(metrics).unwrap();
        });
        let minute = Duration::from_secs(60);
        let mut metrics = hear.recv_timeout(minute).expect("nobody reads, and the line is held");
        assert!(metrics.held.rest().len() < line.len(), "a part is taken");
        let read = std::thread::spawn(move || {
            let mut text = String::new();
            io::Read::read_to_string(&mut reader, &mut text).unwrap();
            text
        });
        metrics.line(&json!({"step": 1})).unwrap();
        metrics.settle().unwrap();
        drop(metrics);
        assert_eq!(read.join().unwrap(), format!("{line}{{\"step\":1}}\n"));
    }

    #[test]
    fn the_end_of_the_last_line_is_found_by_the_end_of_the_file() {
        let many = [&b"line\n".repeat(100_000)[..], b"half"].concat();
        let long = [&many[..], &vec![b'x'; 3 * BLOCK as usize]].concat();
        let most = |text: &[u8]| {
            let mut seen = 0;
            let end = lines_end(text.len() as u64, |part, at| {
                part.copy_from_slice(&text[at as usize..][..part.len()]);
                seen += part.len() as u64;
                Ok(())
            });
            (end.unwrap(), seen)
        };
        assert_eq!(most(&many), (500_000, BLOCK));
        assert_eq!(most(&long), (500_000, 4 * BLOCK));
        for (text, end) in [(&b""[..], 0), (b"half", 0), (b"\n", 1), (b"one\ntwo\n", 8)] {
            assert_eq!(most(text), (end, text.len() as u64), "{text:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        std::fs::write(&path, &many).unwrap();
        Metrics::append(&path).unwrap().line(&json!({"step": 1})).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("line\n{\"step\":1}\n") && text.len() == 500_011, "{}", text.len());
    }

    #[test]
    fn what_waits_for_a_reader_is_not_moved_for_each_page() {
        let all: Vec<u8> = (0..1000 * PAGE).map(|i| i as u8).collect();
        let mut held = Held { bytes: all.clone(), taken: 0 };
        let (mut taken, mut moved) = (Vec::<u8>::new(), 0);
        while !held.rest().is_empty() {
            let most = held.rest().len().min(PAGE + 1);
            taken.extend(&held.rest()[..most]);
            let before = held.bytes.len();
            held.take(most);
            moved += if held.bytes.len() < before { held.bytes.len() } else { 0 };
        }
        assert!(taken == all && moved <= all.len(), "{moved}");
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
    fn metrics_that_no_disk_has_before_a_checkpoint_are_no_success_and_the_run_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        std::fs::write(&path, "").unwrap();
        let progress = Progress::new(1, true, crate::args::Colour::Never);
        let synced = |file| {
            let metrics = Metrics::of(file, &path, None);
            let mut record = Record { metrics: Some(metrics), ..Record::default() };
            record.sync(&progress);
            record
        };
        // A descriptor of which the system refuses that.
        let unkept = rustix::fs::open(&path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let mut record = synced(unkept.into());
        record.line(&progress, || panic!("there are no more lines"));
        let e = record.end().unwrap_err();
        assert!(matches!(e, Failure::Verdict(_)), "{e}");
        assert!(e.to_string().ends_with("; the run went on without them"), "{e}");
        synced(File::options().append(true).open(&path).unwrap()).end().unwrap();
        // Nobody waits for what has no disk.
        let (_, pipe) = io::pipe().unwrap();
        synced(std::os::fd::OwnedFd::from(pipe).into()).end().unwrap();
    }

    #[test]
    fn a_full_device_is_an_error() {
        let mut metrics = Metrics::create(Path::new("/dev/full")).unwrap();
        let e = metrics.line(&json!({})).unwrap_err();
        assert!(e.to_string().contains("/dev/full"), "{e}");
        assert_eq!(e.code(), 1);
    }
}
