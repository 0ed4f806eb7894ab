//! Which files are the text of a run, and their content as UTF-8.

use crate::failure::{Failure, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::str::Utf8Error;

/// File name endings that count as text in a directory.
pub const ENDINGS: [&str; 3] = ["md", "rs", "txt"];
/// Larger files of a directory are skipped: generated tables, logs.
const LARGEST: u64 = 1 << 20;
/// Directories that hold build products and dependencies, besides hidden ones.
const SKIPPED: [&str; 3] = ["target", "node_modules", "__pycache__"];

/// The text files below `dir`, sorted by path: .md, .rs and .txt of at most 1 MiB, outside hidden directories
/// and build products. Links are not followed.
///
/// # Errors
/// A directory that cannot be read, or in which no such file is.
pub fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        let unreadable = |e| Failure::usage(format!("cannot read directory {}: {e}", dir.display()));
        for entry in fs::read_dir(&dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() && !name.starts_with('.') && !SKIPPED.contains(&&*name) {
                open.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|e| ENDINGS.iter().any(|t| e == *t)) {
                let size = entry.metadata().map_or(0, |m| m.len());
                if size > 0 && size <= LARGEST {
                    found.push(path);
                }
            }
        }
    }
    found.sort();
    match found.is_empty() {
        false => Ok(found),
        true => Err(Failure::usage(format!(
            "no text below {}: --data takes text files, token files, or directories with .md, .rs or .txt files",
            dir.display()
        ))),
    }
}

/// The content of a text file, for a command that says what it `takes`.
///
/// # Errors
/// A file that is missing or not UTF-8, with the offset of the first byte that is not.
pub fn read(path: &Path, takes: &str) -> Result<String> {
    let bytes =
        fs::read(path).map_err(|e| Failure::usage(format!("cannot read --data {}: {e}", path.display())))?;
    String::from_utf8(bytes).map_err(|e| not_text(path, e.utf8_error(), e.as_bytes(), takes))
}

/// Checks that the bytes of a file are text.
///
/// # Errors
/// The offset of the first byte that is not UTF-8.
pub fn check(path: &Path, bytes: &[u8], takes: &str) -> Result<()> {
    std::str::from_utf8(bytes).map(drop).map_err(|e| not_text(path, e, bytes, takes))
}

fn not_text(path: &Path, error: Utf8Error, bytes: &[u8], takes: &str) -> Failure {
    let at = error.valid_up_to();
    Failure::usage(format!(
        "{} is not UTF-8 text: byte {:#04x} at offset {at}; {takes}",
        path.display(),
        bytes[at]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_takes_text_and_leaves_products_and_giants() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let write = |name: &str, bytes: &[u8]| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        assert!(files_below(root).unwrap_err().to_string().contains("no text below"));
        write("b/z.rs", b"z");
        write("a.md", b"a");
        write("b/notes.txt", b"n");
        write("b/empty.txt", b"");
        write("b/picture.png", b"p");
        write("target/debug/made.rs", b"m");
        write(".git/description.txt", b"d");
        write("big.txt", &vec![b'x'; LARGEST as usize + 1]);
        let names: Vec<PathBuf> = ["a.md", "b/notes.txt", "b/z.rs"].iter().map(|n| root.join(n)).collect();
        assert_eq!(files_below(root).unwrap(), names);
    }

    #[test]
    fn what_is_not_text_is_named_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latin1.txt");
        fs::write(&path, b"caf\xe9 au lait").unwrap();
        let text = read(&path, "take text").unwrap_err().to_string();
        assert!(text.contains("latin1.txt") && text.contains("0xe9 at offset 3; take text"), "{text}");
        assert!(check(&path, b"caf\xe9", "").is_err() && check(&path, "café".as_bytes(), "").is_ok());
        assert!(read(&dir.path().join("none"), "").unwrap_err().to_string().contains("none"));
    }
}
