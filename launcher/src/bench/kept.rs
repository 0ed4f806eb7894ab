//! Files that say at any moment what has been found by then: a job's time may be up, a device may hang, and nobody knows how
//! long a machine is still there.

use crate::about::{generator, now};
use crate::failure::{Failure, Result};
use crate::files;
use serde_json::{Map, Value};
use std::path::Path;
use std::time::{Duration, Instant};

/// A run that is ended loses no more than what it found in so long.
const EVERY: Duration = Duration::from_secs(1);
/// Writing takes no more than this part of a run's time, however long the files are.
const SHARE: u32 = 20;

/// When files are written anew next.
pub struct Pace(Instant);

impl Pace {
    /// At once.
    pub fn new() -> Self {
        Pace(Instant::now())
    }

    /// Does `write` if it is time for that. Whether it can be done is said at the end, when it has to be: a disk that is
    /// full for a moment must not stop a rank that others wait for.
    pub fn keep(&mut self, write: impl FnOnce()) {
        let begun = Instant::now();
        if begun >= self.0 {
            write();
            self.0 = Instant::now() + EVERY.max(begun.elapsed() * SHARE);
        }
    }
}

/// Whether what is there can be replaced. A pipe, which cannot forget, gets only what is said at the end.
pub fn is_replaced(path: &Path) -> bool {
    files::place(path).is_some()
}

/// A JSON file with one list of rows.
pub struct Record<'a> {
    path: Option<&'a Path>,
    /// What it says before its rows.
    about: Map<String, Value>,
    /// What the list of rows is called.
    list: &'static str,
    pub rows: Vec<Value>,
}

impl<'a> Record<'a> {
    /// A file for `rows`, called `list`, if one is asked for; `about` is an object.
    pub fn new(path: Option<&'a Path>, about: Value, list: &'static str, rows: Vec<Value>) -> Self {
        let mut about = match about {
            Value::Object(about) => about,
            _ => Map::new(),
        };
        about.entry("generator").or_insert_with(generator);
        Record { path, about, list, rows }
    }

    /// Puts what is known by now in the place of the file, if that can be replaced. Whether it can be done is said at the end.
    pub fn keep(&mut self) {
        if self.path.is_some_and(is_replaced) {
            let _ = self.put(false);
        }
    }

    /// Writes everything.
    ///
    /// # Errors
    /// The path and the system's words.
    pub fn write(&mut self) -> Result<()> {
        self.put(true)
    }

    /// Writes what there is of a run that cannot go on.
    ///
    /// # Errors
    /// As of [`write`](Self::write).
    pub fn cut_short(&mut self) -> Result<()> {
        self.put(false)
    }

    fn put(&mut self, complete: bool) -> Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        let mut whole = self.about.clone();
        whole.insert("complete".to_owned(), complete.into());
        whole.insert("end_time".to_owned(), now().into());
        // Lent, because they may be most of what there is memory for.
        whole.insert(self.list.to_owned(), Value::Array(std::mem::take(&mut self.rows)));
        let text = serde_json::to_string_pretty(&whole).map_err(Failure::run);
        if let Some(Value::Array(rows)) = whole.remove(self.list) {
            self.rows = rows;
        }
        files::write_whole(path, text?.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_at_once_and_then_not_all_the_time() {
        let (mut pace, mut written) = (Pace::new(), 0);
        for _ in 0..3 {
            pace.keep(|| written += 1);
        }
        assert_eq!(written, 1);
        // What takes long is done less often.
        pace = Pace::new();
        pace.keep(|| std::thread::sleep(EVERY / 10));
        assert!(pace.0 > Instant::now() + EVERY * 3 / 2);
    }

    #[test]
    fn a_file_that_is_kept_says_that_it_is_not_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        let read = || serde_json::from_slice::<Value>(&std::fs::read(&path).unwrap()).unwrap();
        let mut record = Record::new(Some(&path), serde_json::json!({"device": "one"}), "rows", Vec::new());
        record.rows.push(1.into());
        record.keep();
        assert_eq!((&read()["complete"], &read()["rows"]), (&false.into(), &serde_json::json!([1])));
        record.rows.push(2.into());
        record.cut_short().unwrap();
        assert_eq!((&read()["complete"], &read()["rows"]), (&false.into(), &serde_json::json!([1, 2])));
        record.write().unwrap();
        assert_eq!((&read()["complete"], &read()["rows"]), (&true.into(), &serde_json::json!([1, 2])));
        assert_eq!(read()["device"], "one");
        // What cannot be replaced is left until the end.
        let pipe = Path::new("/dev/stdout");
        assert!(!is_replaced(pipe) && is_replaced(&path));
    }
}
