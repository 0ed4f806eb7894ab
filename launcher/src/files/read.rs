//! The files that a command reads: each by a name of its own, and whole.

use super::identity;
use crate::failure::{Failure, Result};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Refuses this process's standard input as a file that processes which it starts read too: they have none.
///
/// # Errors
/// What was asked for, and the name by which they find it.
pub fn check_named(flag: &str, path: &Path) -> Result<()> {
    if !["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"].iter().any(|name| path == Path::new(name)) {
        return Ok(());
    }
    let name =
        fs::canonicalize(path).map_or("a file by its name".to_owned(), |name| name.display().to_string());
    Err(Failure::usage(format!(
        "{flag} {} is read by every rank, and ranks have no standard input: take {name}",
        path.display()
    )))
}

/// Refuses a file that `flag` names more than once: of data, the end would be held out and trained on.
///
/// # Errors
/// Both names.
pub fn check_once(flag: &str, files: &[PathBuf]) -> Result<()> {
    let mut seen = HashMap::with_capacity(files.len());
    for file in files {
        // What cannot be opened is told where it is.
        let Some(there) = file.metadata().ok().filter(|there| there.is_file()) else { continue };
        if let Some(before) = seen.insert(identity(&there), file) {
            return Err(Failure::usage(match before == file {
                true => format!("{flag} names {} twice: name it once", file.display()),
                false => format!(
                    "{flag} names one file as {} and as {}: name it once",
                    before.display(),
                    file.display()
                ),
            }));
        }
    }
    Ok(())
}

/// The text of a regular file: to open a pipe may last for ever, and a device may have no end.
///
/// # Errors
/// The system's words, or no regular file.
pub fn read_regular(path: &Path) -> std::io::Result<String> {
    match fs::metadata(path)?.is_file() {
        true => fs::read_to_string(path),
        false => Err(std::io::Error::other("it is no regular file")),
    }
}
