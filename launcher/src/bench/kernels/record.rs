//! The file of `bench kernels`, which is true at any moment: a device may hang, and nobody knows how long it is still there.

use crate::failure::{Failure, Result};
use crate::files;
use serde_json::{Map, Value};
use std::path::Path;

/// What the file says.
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
        let about = match about {
            Value::Object(about) => about,
            _ => Map::new(),
        };
        Record { path, about, list, rows }
    }

    /// Puts what is known by now in the place of the file. A pipe, which cannot forget, gets only what is said at the end.
    ///
    /// # Errors
    /// The path and the system's words.
    pub fn keep(&self) -> Result<()> {
        match self.path.is_some_and(|path| files::place(path).is_some()) {
            true => self.write(),
            false => Ok(()),
        }
    }

    /// Writes everything.
    ///
    /// # Errors
    /// As of [`keep`](Self::keep).
    pub fn write(&self) -> Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        let mut whole = self.about.clone();
        whole.insert(self.list.to_owned(), Value::Array(self.rows.clone()));
        let text = serde_json::to_string_pretty(&whole).map_err(Failure::run)?;
        files::write_whole(path, text.as_bytes())
    }
}
