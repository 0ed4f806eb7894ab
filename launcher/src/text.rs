//! Which files are the text of a run, and their content as UTF-8.

use crate::failure::{Failure, Result};
use models::tokens::TokenFile;
use std::fs;
use std::path::{Path, PathBuf};

/// File name endings that count as text in a directory.
const ENDINGS: [&str; 3] = ["md", "rs", "txt"];
/// Larger files are no sources and documents, but generated tables and logs.
const LARGEST: u64 = 1 << 20;
/// Directories that hold build products and dependencies, besides hidden ones.
const SKIPPED: [&str; 3] = ["target", "node_modules", "__pycache__"];

/// The text files below `dir`, sorted by path: .md, .rs and .txt, outside hidden directories and build products; the
/// token files, where there is no text. Links are not followed.
///
/// # Errors
/// A directory that cannot be read, or in which no such file is.
pub fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let text = walk(dir, &ENDINGS, u64::MAX, &mut |_, e| Err(e))?;
    if !text.is_empty() {
        return Ok(text);
    }
    let mut tokens = walk(dir, &["bin"], u64::MAX, &mut |_, e| Err(e))?;
    tokens.retain(|file| TokenFile::looks_like(file).unwrap_or(false));
    match tokens.is_empty() {
        false => Ok(tokens),
        true => Err(nothing_below(dir)),
    }
}

/// The sources and documents below `dir`, which nobody named one by one: of at most 1 MiB. What cannot be read goes to
/// `left_out`.
///
/// # Errors
/// No such file is there.
pub fn corpus_below(dir: &Path, left_out: &mut Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    let found = walk(dir, &ENDINGS, LARGEST, &mut |dir, _| {
        left_out.push(dir.to_owned());
        Ok(())
    })?;
    match found.is_empty() {
        false => Ok(found),
        true => Err(nothing_below(dir)),
    }
}

fn nothing_below(dir: &Path) -> Failure {
    Failure::usage(format!(
        "no text below {}: --data takes text files, token files, or directories with .md, .rs or .txt files, or else \
         with token files (.bin)",
        dir.display()
    ))
}

/// Files with one of these endings below `dir`, sorted, none of them empty or larger than `largest`. `unreadable`
/// decides about directories.
fn walk(
    dir: &Path,
    endings: &[&str],
    largest: u64,
    unreadable: &mut dyn FnMut(&Path, Failure) -> Result<()>,
) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
        let entries = match entries {
            Ok(entries) => entries,
            Err(e) => {
                let text = format!("cannot read directory {}: {e}", dir.display());
                unreadable(&dir, Failure::usage(text))?;
                continue;
            }
        };
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() && !name.starts_with('.') && !SKIPPED.contains(&&*name) {
                open.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|e| endings.iter().any(|t| e == *t)) {
                let size = entry.metadata().map_or(0, |m| m.len());
                if size > 0 && size <= largest {
                    found.push(path);
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The content of a text file, for a command that says what it `takes`.
///
/// # Errors
/// A file that is missing or not UTF-8, with the offset of the first byte that is not.
pub fn read(path: &Path, takes: &str) -> Result<String> {
    let bytes =
        fs::read(path).map_err(|e| Failure::usage(format!("cannot read --data {}: {e}", path.display())))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::usage(format!(
            "--data {} is not UTF-8 text: byte {:#04x} at offset {at}; {takes}",
            path.display(),
            e.as_bytes()[at]
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_takes_text_and_leaves_products_and_of_what_nobody_named_giants() {
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
        let named = |names: &[&str]| names.iter().map(|n| root.join(n)).collect::<Vec<_>>();
        assert_eq!(files_below(root).unwrap(), named(&["a.md", "b/notes.txt", "b/z.rs", "big.txt"]));
        let mut left_out = vec![];
        assert_eq!(corpus_below(root, &mut left_out).unwrap(), named(&["a.md", "b/notes.txt", "b/z.rs"]));
        assert!(left_out.is_empty());
    }

    #[test]
    fn a_directory_without_text_may_hold_token_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
        write("pytorch_model.bin", b"PK no tokens");
        assert!(files_below(dir.path()).unwrap_err().to_string().contains("token files (.bin)"));
        write("b.bin", &20_240_520i32.to_le_bytes());
        write("a.bin", &20_240_801i32.to_le_bytes());
        assert_eq!(files_below(dir.path()).unwrap(), ["a.bin", "b.bin"].map(|name| dir.path().join(name)));
        write("c.txt", b"text");
        assert_eq!(files_below(dir.path()).unwrap(), [dir.path().join("c.txt")]);
    }

    #[test]
    fn what_is_not_text_is_named_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latin1.txt");
        fs::write(&path, b"caf\xe9 au lait").unwrap();
        let text = read(&path, "take text").unwrap_err().to_string();
        assert!(text.contains("latin1.txt") && text.contains("0xe9 at offset 3; take text"), "{text}");
        assert!(read(&dir.path().join("none"), "").unwrap_err().to_string().contains("none"));
    }
}
