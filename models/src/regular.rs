//! Opening what is to be read.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::Path;

/// The open file and its bytes. Opening a pipe would wait for its writer for ever, and a directory has no content.
pub(crate) fn regular(path: &Path) -> Result<(File, u64)> {
    let refused = |e| Error::system("open", path, e);
    if !fs::metadata(path).map_err(refused)?.is_file() {
        return Err(Error::format(path, "not a regular file"));
    }
    let file = File::open(path).map_err(refused)?;
    let size = file.metadata().map_err(refused)?.len();
    Ok((file, size))
}
