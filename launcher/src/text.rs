//! Which files are the text of a run, and their content as UTF-8.

use crate::data::room;
use crate::failure::{Failure, Result};
use crate::files::identity;
use crate::human::{self, several};
use collectives::system_words;
use collectives::transport::shm::memory_available;
use models::tokens::{OTHER_ORDER, TokenFile, is_swapped};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirEntry, FileType};
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// File name endings that count as text in a directory.
const ENDINGS: [&str; 3] = ["md", "rs", "txt"];
/// The ending of token files.
const TOKENS: &str = "bin";
/// Larger files are no sources and documents, but generated tables and logs.
const LARGEST: u64 = 128 << 10;
/// Directories that hold build products and dependencies, besides hidden ones and those of models.
const SKIPPED: [&str; 3] = ["target", "node_modules", "__pycache__"];

/// The text files below `dir`, sorted by path: .md, .rs and .txt, outside hidden directories, build products and models; the
/// token files, where there is no text. Links to files are followed, those to directories are not: there may be rings.
/// Who `reads` only text need not mind what else is there. Messages say by which `flag` it was named.
///
/// # Errors
/// A directory that cannot be read, or in which no such file is, or a link to nothing; text and token files, of which only
/// who named the directory knows which are meant.
pub fn files_below(flag: &str, dir: &Path, reads: Reads) -> Result<Vec<PathBuf>> {
    let named = Walk { sizes: 1..=u64::MAX, links: true };
    let text = named.of(dir, &ENDINGS, &mut |_, e| Err(e))?;
    let first = match (text.first(), reads) {
        (None, Reads::Text) => return Err(nothing_below(flag, dir, reads)),
        (None, Reads::TextOrTokens) => return tokens_below(flag, dir),
        (Some(_), Reads::Text) => return Ok(text),
        (Some(first), Reads::TextOrTokens) => first,
    };
    // Beside text, what cannot be looked at is as good as any other .bin file.
    let found = named.of(dir, &[TOKENS], &mut |_, _| Ok(()))?;
    match found.iter().filter(|file| TokenFile::looks_like(file).unwrap_or(false)).count() {
        0 => Ok(text),
        tokens => Err(Failure::usage(format!(
            "{flag} {} has text ({} first) and {}: name those that are meant",
            dir.display(),
            first.display(),
            several(tokens, "token file")
        ))),
    }
}

/// What a command makes of data.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    Text,
    TextOrTokens,
}

/// The token files below `dir`, in which there is no text. What has their ending and is none is one that is broken, where
/// there are others.
fn tokens_below(flag: &str, dir: &Path) -> Result<Vec<PathBuf>> {
    let named = Walk { sizes: 0..=u64::MAX, links: true };
    let (mut tokens, mut odd) = (Vec::new(), None);
    for file in named.of(dir, &[TOKENS], &mut |_, e| Err(e))? {
        match TokenFile::looks_like(&file).map_err(Failure::usage)? {
            true => tokens.push(file),
            false => odd = odd.or(Some(file)),
        }
    }
    match (tokens.first(), odd) {
        (None, Some(odd)) => Err(Failure::usage(format!(
            "no text below {}, and {} is no token file{}",
            dir.display(),
            odd.display(),
            headerless(&odd)
        ))),
        (None, None) => Err(nothing_below(flag, dir, Reads::TextOrTokens)),
        (Some(_), None) => Ok(tokens),
        (Some(first), Some(odd)) => Err(Failure::usage(format!(
            "{flag} {} has token files ({} first) and {}, which is {}: make it whole or take it away, or name those that \
             are meant",
            dir.display(),
            first.display(),
            odd.display(),
            if odd.metadata().is_ok_and(|there| there.len() == 0) { "empty" } else { "no token file" }
        ))),
    }
}

/// The sources and documents below `dir`, which nobody named one by one: of at most 128 KiB. What cannot be read goes to
/// `left_out`.
///
/// # Errors
/// No such file is there, or `dir` itself cannot be read.
pub fn corpus_below(dir: &Path, left_out: &mut Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    let unnamed = Walk { sizes: 1..=LARGEST, links: false };
    let found = unnamed.of(dir, &ENDINGS, &mut |unread, why| {
        if unread == dir {
            return Err(why);
        }
        left_out.push(unread.to_owned());
        Ok(())
    })?;
    if !found.is_empty() {
        return Ok(found);
    }
    // What a user has put there for it is mostly one large file.
    let all: Vec<&str> = ENDINGS.iter().copied().chain([TOKENS]).collect();
    let mut named = Walk { sizes: 1..=u64::MAX, links: false }.of(dir, &all, &mut |_, _| Ok(()))?;
    named.retain(|file| {
        file.extension().is_none_or(|e| e != TOKENS) || TokenFile::looks_like(file).unwrap_or(false)
    });
    match named.first() {
        None => Err(nothing_below("--data", dir, Reads::TextOrTokens)),
        Some(first) => Err(Failure::usage(format!(
            "no text of at most {} below {}, as is taken where nobody names any, but {} larger or of tokens: take --data {}",
            human::bytes(LARGEST),
            dir.display(),
            if named.len() == 1 { "one file".into() } else { format!("{} files", named.len()) },
            first.display()
        ))),
    }
}

/// What token files have that others of their name do not, for an error about one of those; nothing for other names.
pub fn headerless(file: &Path) -> &'static str {
    match file.extension().is_some_and(|ending| ending == TOKENS) {
        true => "; token files (.bin) begin with llm.c's header of 1024 bytes, which those of nanoGPT lack",
        false => "",
    }
}

/// What is to be said of the first of these files whose name says that it is not all text: it is taken as it is.
pub fn structured<'a>(mut files: impl Iterator<Item = &'a PathBuf>) -> Option<String> {
    let kind = |file: &Path| {
        let ending = file.extension()?.to_str()?.to_lowercase();
        match &*ending {
            "json" => Some(("keys", Some(".[].text"))),
            "jsonl" | "ndjson" => Some(("keys", Some(".text"))),
            "csv" | "tsv" => Some(("other columns", None)),
            _ => None,
        }
    };
    let (file, (others, of_text)) = files.find_map(|file| Some((file, kind(file)?)))?;
    let typed = human::typed(&file.to_string_lossy());
    let alone = match of_text {
        Some(filter) => {
            format!("\"jq -r {filter} {typed} > text.txt\" has what is under the key 'text' of each alone")
        }
        None => "a file of the column with the text alone has none of them".to_owned(),
    };
    let file = file.display();
    Some(format!("{file} is taken as it is, so that its quotes and {others} are learnt as text: {alone}"))
}

fn nothing_below(flag: &str, dir: &Path, reads: Reads) -> Failure {
    let takes = match reads {
        Reads::Text => "text files, or directories with .md, .rs or .txt files",
        Reads::TextOrTokens => {
            "text files, token files, or directories with .md, .rs or .txt files or with token files (.bin)"
        }
    };
    let mut links = Vec::new();
    let seen = entries_below(dir, &mut |_, _| Ok(()), &mut |path, kind| {
        if kind.is_symlink() && !is_skipped(path.file_name()) && path.is_dir() {
            links.push(path);
        }
    });
    let aside = match (seen, links.iter().min()) {
        (Ok(()), Some(link)) => {
            format!(" ({} is a link to a directory, which is not followed)", link.display())
        }
        _ => String::new(),
    };
    Failure::usage(format!("no text below {}{aside}: {flag} takes {takes}", dir.display()))
}

/// Lets `see` what is below `dir`, but for what hidden directories, products, models and links to directories have in them.
/// `unreadable` decides about directories that cannot be read.
fn entries_below(
    dir: &Path,
    unreadable: &mut dyn FnMut(&Path, Failure) -> Result<()>,
    see: &mut dyn FnMut(PathBuf, FileType),
) -> Result<()> {
    let named = dir;
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
        let entries = match entries {
            Ok(entries) => entries,
            Err(e) => {
                let text = format!("cannot read directory {}: {}", dir.display(), system_words(e));
                unreadable(&dir, Failure::usage(text))?;
                continue;
            }
        };
        if dir != named && is_model(&entries) {
            continue;
        }
        for entry in entries {
            let Ok(kind) = entry.file_type() else { continue };
            match kind.is_dir() && !is_skipped(Some(&entry.file_name())) {
                true => open.push(entry.path()),
                false => see(entry.path(), kind),
            }
        }
    }
    Ok(())
}

/// Whether a directory of this name is hidden, or has products or dependencies.
fn is_skipped(name: Option<&OsStr>) -> bool {
    let name = name.unwrap_or_default().to_string_lossy();
    name.starts_with('.') || SKIPPED.contains(&&*name)
}

/// Whether these files are a model's. What is named .txt or .bin there (merges.txt, pytorch_model.bin) is a part of it, also
/// where it was saved by an earlier run on the same data.
fn is_model(entries: &[DirEntry]) -> bool {
    let has = |is: fn(&str) -> bool| entries.iter().any(|entry| entry.file_name().to_str().is_some_and(is));
    has(|name| name == "config.json")
        && has(|name| {
            name.ends_with(".safetensors") || name.starts_with("pytorch_model") && name.ends_with(".bin")
        })
}

/// What is taken of a directory, besides the endings.
struct Walk {
    /// Bytes of a file.
    sizes: RangeInclusive<u64>,
    /// Whether files that are links count, unless what they lead to is here already.
    links: bool,
}

impl Walk {
    /// Files with one of these endings below `dir`, sorted. `unreadable` decides about directories and links that cannot
    /// be read.
    fn of(
        &self,
        dir: &Path,
        endings: &[&str],
        unreadable: &mut dyn FnMut(&Path, Failure) -> Result<()>,
    ) -> Result<Vec<PathBuf>> {
        let (mut found, mut links) = (Vec::new(), Vec::new());
        entries_below(dir, unreadable, &mut |path, kind| {
            if path.extension().is_some_and(|e| endings.iter().any(|t| e == *t)) {
                match kind.is_symlink() {
                    true if self.links => links.push(path),
                    false if kind.is_file() => found.push(path),
                    _ => {}
                }
            }
        })?;
        let mut seen = HashSet::new();
        // Files first, so that of a file and a link to it the file is taken, and of files with two names the first.
        found.sort();
        links.sort();
        let mut all = Vec::with_capacity(found.len() + links.len());
        for path in found.into_iter().chain(links) {
            let file = match fs::metadata(&path) {
                Ok(file) => file,
                Err(e) => {
                    let text = format!("cannot open {}: {e}", path.display());
                    unreadable(&path, Failure::usage(text))?;
                    continue;
                }
            };
            let new = seen.insert(identity(&file));
            if file.is_file() && new && self.sizes.contains(&file.len()) {
                all.push(path);
            }
        }
        all.sort();
        Ok(all)
    }
}

/// The content of a text file that `flag` names, for a command that says what it `takes`.
///
/// # Errors
/// A file that is missing or not UTF-8, with the offset of the first byte that is not, or that has a zero byte: tokens of two
/// bytes and UTF-16 are mostly UTF-8 with such, and text has none.
pub fn read(flag: &str, path: &Path, takes: &str) -> Result<String> {
    /// What any machine can hold.
    const LITTLE: u64 = 1 << 30;
    if let Some(bytes) = path.metadata().ok().map(|m| m.len()).filter(|&bytes| bytes > LITTLE) {
        room::check_text(flag, path, bytes)?;
    }
    let cannot = |e| Failure::usage(format!("cannot read {flag} {}: {}", path.display(), system_words(e)));
    let file = fs::File::open(path).map_err(cannot)?;
    let mut bytes = Vec::new();
    match file.metadata().map_err(cannot)?.len() {
        // A pipe or a device says no length, and may never end.
        0 => {
            let most = memory_available().bytes / 2;
            file.take(most).read_to_end(&mut bytes).map_err(cannot)?;
            if bytes.len() as u64 == most {
                return Err(Failure::usage(format!(
                    "{flag} {} goes on after {}, half of this machine's free memory: split it into smaller files",
                    path.display(),
                    human::bytes(most)
                )));
            }
        }
        _ => drop((&file).read_to_end(&mut bytes).map_err(cannot)?),
    }
    if is_swapped(&bytes) {
        return Err(Failure::usage(format!("{flag} {}: {OTHER_ORDER}", path.display())));
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::usage(format!(
            "{flag} {} is not UTF-8 text: byte {:#04x} at offset {at}; {takes}{}",
            path.display(),
            e.as_bytes()[at],
            headerless(path)
        ))
    })?;
    match text.find('\0') {
        None => Ok(text),
        Some(at) => Err(Failure::usage(format!(
            "{flag} {} is no text: it has a zero byte at offset {at}; {takes}{}",
            path.display(),
            headerless(path)
        ))),
    }
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
        assert!(
            files_below("--data", root, Reads::TextOrTokens)
                .unwrap_err()
                .to_string()
                .contains("no text below")
        );
        write("b/z.rs", b"z");
        write("a.md", b"a");
        write("b/notes.txt", b"n");
        write("b/empty.txt", b"");
        write("b/picture.png", b"p");
        write("target/debug/made.rs", b"m");
        write(".git/description.txt", b"d");
        for (model, weights) in
            [("saved", "model.safetensors"), ("b/older", "pytorch_model-00001-of-00002.bin")]
        {
            for file in ["config.json", "merges.txt", weights] {
                write(&format!("{model}/{file}"), b"m");
            }
        }
        write("big.txt", &vec![b'x'; LARGEST as usize + 1]);
        // Of links those that lead to files which are not here, once; a ring of directories is none.
        let elsewhere = tempfile::NamedTempFile::new().unwrap();
        fs::write(elsewhere.path(), "far").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, root.join(name)).unwrap();
        link(elsewhere.path(), "b/far.txt");
        link(elsewhere.path(), "b/further.txt");
        link(Path::new("a.md"), "again.md");
        link(root, "b/ring");
        link(root, "b/ring.txt");
        let named = |names: &[&str]| names.iter().map(|n| root.join(n)).collect::<Vec<_>>();
        let all = ["a.md", "b/far.txt", "b/notes.txt", "b/z.rs", "big.txt"];
        assert_eq!(files_below("--data", root, Reads::TextOrTokens).unwrap(), named(&all));
        let mut left_out = vec![];
        assert_eq!(corpus_below(root, &mut left_out).unwrap(), named(&["a.md", "b/notes.txt", "b/z.rs"]));
        assert!(left_out.is_empty());
        // Who names a model's directory means it.
        assert_eq!(
            files_below("--data", &root.join("saved"), Reads::Text).unwrap(),
            named(&["saved/merges.txt"])
        );
        link(Path::new("nothing"), "lost.txt");
        let e = files_below("--data", root, Reads::TextOrTokens).unwrap_err().to_string();
        assert!(e.contains("cannot open") && e.contains("lost.txt"), "{e}");
        assert_eq!(corpus_below(root, &mut left_out).unwrap().len(), 3);
    }

    #[test]
    fn of_what_is_not_all_text_the_first_is_told() {
        let told = |names: &[&str]| structured(names.iter().map(PathBuf::from).collect::<Vec<_>>().iter());
        assert_eq!(told(&["a.txt", "json", "b.md", "c.bin", "jsonl.txt"]), None);
        let keys = told(&["a.txt", "d/b.JSONL", "c.csv"]).unwrap();
        assert!(
            keys.starts_with("d/b.JSONL is taken") && keys.contains("\"jq -r .text d/b.JSONL > text.txt\""),
            "{keys}"
        );
        let columns = told(&["c.csv", "b.json"]).unwrap();
        assert!(
            columns.starts_with("c.csv is taken") && columns.contains("other columns are learnt"),
            "{columns}"
        );
    }

    #[test]
    fn a_link_to_a_directory_is_named_where_there_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        let refusal = || files_below("--data", dir.path(), Reads::Text).unwrap_err().to_string();
        for name in [".hidden", "target"] {
            std::os::unix::fs::symlink(dir.path(), dir.path().join(name)).unwrap();
        }
        assert!(!refusal().contains("link"), "{}", refusal());
        std::os::unix::fs::symlink(dir.path(), dir.path().join("ring")).unwrap();
        assert!(
            refusal().contains("ring is a link to a directory, which is not followed): "),
            "{}",
            refusal()
        );
    }

    #[test]
    fn a_directory_that_cannot_be_read_is_not_said_to_be_empty() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        let refusal = corpus_below(&gone, &mut vec![]).unwrap_err().to_string();
        assert!(refusal.starts_with("cannot read directory ") && refusal.contains("gone"), "{refusal}");
    }

    #[test]
    fn who_has_put_one_large_file_there_is_told_to_name_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
        let refusal = || corpus_below(dir.path(), &mut vec![]).unwrap_err().to_string();
        write("weights.bin", b"PK no tokens");
        assert!(refusal().starts_with("no text below"), "{}", refusal());
        write("b.bin", &20_240_520i32.to_le_bytes());
        assert!(
            refusal().ends_with("b.bin") && refusal().contains("one file larger or of tokens"),
            "{}",
            refusal()
        );
        write("a.txt", &vec![b'x'; LARGEST as usize + 1]);
        assert!(
            refusal().ends_with("a.txt") && refusal().contains("2 files larger or of tokens"),
            "{}",
            refusal()
        );
    }

    #[test]
    fn a_directory_without_text_may_hold_token_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
        let below = || files_below("--data", dir.path(), Reads::TextOrTokens);
        write("pytorch_model.bin", b"PK no tokens");
        assert!(below().unwrap_err().to_string().contains("token files (.bin)"));
        write("b.bin", &20_240_520i32.to_le_bytes());
        write("a.bin", &20_240_801i32.to_le_bytes());
        // What is none would be a shard that is missed.
        for (odd, what) in [("pytorch_model.bin", "no token file"), ("aa.bin", "empty")] {
            if what == "empty" {
                write(odd, b"");
            }
            let e = below().unwrap_err();
            let words = ["has token files (", "a.bin first)", odd, what, "name those"];
            assert!(e.code() == 2 && words.iter().all(|word| e.to_string().contains(word)), "{e}");
            fs::remove_file(dir.path().join(odd)).unwrap();
        }
        assert_eq!(below().unwrap(), ["a.bin", "b.bin"].map(|name| dir.path().join(name)));
        // Who takes no token files is not told that they are taken.
        let e = files_below("--data", dir.path(), Reads::Text).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("no text below"), "{e}");
        assert!(e.to_string().ends_with("text files, or directories with .md, .rs or .txt files"), "{e}");
        // Only who named the directory knows whether the text is what is meant, or a remark about the tokens.
        write("README.md", b"text");
        let e = below().unwrap_err();
        let words = ["has text (", "README.md first) and 2 token files: name those"];
        assert!(e.code() == 2 && words.iter().all(|word| e.to_string().contains(word)), "{e}");
        assert_eq!(files_below("--data", dir.path(), Reads::Text).unwrap(), [dir.path().join("README.md")]);
        assert_eq!(corpus_below(dir.path(), &mut vec![]).unwrap(), [dir.path().join("README.md")]);
        // What cannot be looked at is no token file for sure.
        fs::remove_file(dir.path().join("a.bin")).unwrap();
        fs::remove_file(dir.path().join("b.bin")).unwrap();
        std::os::unix::fs::symlink("nothing", dir.path().join("c.bin")).unwrap();
        assert_eq!(below().unwrap(), [dir.path().join("README.md")]);
    }

    #[test]
    fn what_is_not_text_is_named_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latin1.txt");
        fs::write(&path, b"caf\xe9 au lait").unwrap();
        let text = read("--data", &path, "take text").unwrap_err().to_string();
        assert!(text.contains("latin1.txt") && text.contains("0xe9 at offset 3; take text"), "{text}");
        assert!(read("--data", &dir.path().join("none"), "").unwrap_err().to_string().contains("none"));
    }
}
