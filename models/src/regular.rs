//! What is to be read: whether it is there, and opening it.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

/// Whether something has the name. What it leads to may be missing, or be nobody's to see, and what cannot be looked for is not
/// absent: who opens it says why.
pub fn is_there(path: &Path) -> bool {
    !path.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_looked_for_is_not_absent() {
        let dir = tempfile::tempdir().unwrap();
        let [none, link] = ["none", "link"].map(|name| dir.path().join(name));
        // Which leads to itself, so that nobody sees what is behind it.
        std::os::unix::fs::symlink("link", &link).unwrap();
        assert!(!is_there(&none) && is_there(&link) && is_there(&link.join("behind")));
    }
}
