//! The token file that is written, or several of one length, all of which or none get their names.

use crate::failure::{Failure, Result};
use crate::files;
use crate::leftovers;
use models::tokens::{MOST_TOKENS, TokenWidth, TokenWriter};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// As many as have names that are in their order.
const MOST_FILES: usize = 99_999;

/// Files that take tokens one after the other.
pub(super) struct Shards {
    out: PathBuf,
    width: TokenWidth,
    /// Tokens of a file.
    length: u64,
    /// Whether there is another after that.
    several: bool,
    files: Vec<(PathBuf, TokenWriter)>,
    /// Tokens of the last of them, and of all.
    last: u64,
    count: u64,
}

impl Shards {
    /// The first of them, of `length` tokens each if that is given, else the only one.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn create(out: &Path, width: TokenWidth, length: Option<u64>) -> Result<Self> {
        let (several, length) = (length.is_some(), length.unwrap_or(MOST_TOKENS));
        let out = out.to_owned();
        let mut new = Shards { out, width, length, several, files: Vec::new(), last: 0, count: 0 };
        new.next().map_err(|e| match e {
            // A file could be made there: now it is the disk, as in its midst.
            models::Error::System { .. } => Failure::run(e),
            _ => Failure::usage(e),
        })?;
        Ok(new)
    }

    fn next(&mut self) -> models::Result<()> {
        let path = match self.several {
            true => shard(&self.out, self.files.len() + 1),
            false => self.out.clone(),
        };
        let target = files::through_links(&path);
        leftovers::go_with(&target);
        self.files.push((path, TokenWriter::create(target, self.width)?));
        self.last = 0;
        Ok(())
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// More than files hold, or the system's refusal.
    pub(super) fn push(&mut self, mut tokens: &[u32]) -> Result<()> {
        while !tokens.is_empty() {
            if self.last == self.length {
                self.check_another()?;
                if let Some((_, full)) = self.files.last_mut() {
                    full.seal().map_err(Failure::run)?;
                }
                self.next().map_err(Failure::run)?;
            }
            let room = usize::try_from(self.length - self.last).unwrap_or(usize::MAX);
            let (now, later) = tokens.split_at(tokens.len().min(room));
            if let Some((_, writer)) = self.files.last_mut() {
                writer.push(now).map_err(Failure::run)?;
            }
            (self.last, self.count) = (self.last + now.len() as u64, self.count + now.len() as u64);
            tokens = later;
        }
        Ok(())
    }

    fn check_another(&self) -> Result<()> {
        let (out, length) = (self.out.display(), self.length);
        match self.several {
            true if self.files.len() < MOST_FILES => Ok(()),
            true => Err(Failure::usage(format!(
                "--shard-tokens {length}: there are more tokens than {MOST_FILES} files of so many hold; take a larger number"
            ))),
            false => Err(Failure::usage(format!(
                "--out {out}: there are more than {length} tokens, which is all that a file of them holds: {SEVERAL}"
            ))),
        }
    }

    /// Whether no token came yet.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Gives all of them their names, each complete and on the disk by then; gives back how many tokens they have, and where.
    ///
    /// # Errors
    /// The system's refusal, after which none has its name.
    pub(super) fn finish(mut self) -> Result<(u64, Vec<PathBuf>)> {
        self.files.iter_mut().try_for_each(|(_, writer)| writer.seal()).map_err(Failure::run)?;
        Ok((self.count, leftovers::in_one_piece(|| name(self.files))?))
    }
}

/// Gives all of these their names, or none.
fn name(files: Vec<(PathBuf, TokenWriter)>) -> Result<Vec<PathBuf>> {
    let mut named = Vec::with_capacity(files.len());
    for (path, writer) in files {
        if let Err(e) = writer.finish() {
            // The only one that there was before is the one that was refused.
            for path in &named {
                let _ = std::fs::remove_file(path);
            }
            return Err(Failure::run(e));
        }
        named.push(path);
    }
    Ok(named)
}

/// What writes more than one file holds.
pub(super) const SEVERAL: &str = "add --shard-tokens 100000000 for several files of so many tokens, all of which --data of \
                                  'caravan train' then names";

/// The name of the file of this number, from 1: `corpus-00001.bin` of `corpus.bin`.
pub(super) fn shard(out: &Path, number: usize) -> PathBuf {
    let mut name = OsString::from(out.file_stem().unwrap_or_default());
    name.push(format!("-{number:05}"));
    if let Some(ending) = out.extension() {
        name.push(".");
        name.push(ending);
    }
    out.with_file_name(name)
}

/// Refuses names of which some are in use: what an earlier run has left would be taken for a part of what is written.
///
/// # Errors
/// The first of them.
pub(super) fn check_unused(out: &Path) -> Result<()> {
    let (begin, end) = (out.file_stem().unwrap_or_default(), out.extension().unwrap_or_default());
    let is_shard = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().as_encoded_bytes();
        let number = name.strip_prefix(begin.as_encoded_bytes()).and_then(|rest| rest.strip_prefix(b"-"));
        let is_number = |digits: &[u8]| digits.len() == 5 && digits.iter().all(u8::is_ascii_digit);
        path.extension().unwrap_or_default() == end && number.is_some_and(is_number)
    };
    let there = std::fs::read_dir(models::parent(out)).into_iter().flatten().flatten();
    match there.map(|entry| out.with_file_name(entry.file_name())).filter(is_shard).min() {
        None => Ok(()),
        Some(first) => Err(Failure::usage(format!(
            "--out {}: {} is there already, and would be taken for one of the files that are written: take another name, or \
             remove it and those after it",
            out.display(),
            first.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::tokens::TokenFile;

    fn names(dir: &Path) -> Vec<String> {
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut all: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| name(entry.unwrap())).collect();
        all.sort();
        all
    }

    #[test]
    fn tokens_go_on_in_the_next_file_and_no_file_is_empty() {
        for (count, expected) in [(1, &[1][..]), (4, &[4]), (5, &[4, 1]), (8, &[4, 4]), (11, &[4, 4, 3])] {
            let home = tempfile::tempdir().unwrap();
            let out = home.path().join("a.b.bin");
            let mut shards = Shards::create(&out, TokenWidth::U16, Some(4)).unwrap();
            assert!(shards.is_empty());
            let tokens: Vec<u32> = (0..count).collect();
            tokens.chunks(3).for_each(|some| shards.push(some).unwrap());
            assert!(names(home.path()).is_empty(), "none has its name before all are whole");
            let (all, files) = shards.finish().unwrap();
            assert_eq!((all, names(home.path()).len()), (u64::from(count), expected.len()));
            let read = files.iter().zip(expected).flat_map(|(file, &expected)| {
                let file = TokenFile::open(file).unwrap();
                assert_eq!(file.len(), expected);
                let mut tokens = vec![0; file.len()];
                file.read(0, &mut tokens).unwrap();
                tokens
            });
            assert!(read.eq(tokens));
            assert_eq!(files[0].file_name().unwrap(), "a.b-00001.bin");
            let e = check_unused(&out).unwrap_err();
            assert!(e.code() == 2 && e.to_string().contains("a.b-00001.bin is there already"), "{e}");
        }
    }

    #[test]
    fn names_of_others_are_not_in_the_way() {
        let home = tempfile::tempdir().unwrap();
        for other in ["c.bin", "c-1.bin", "c-00001.txt", "cc-00001.bin", "c-0000x.bin", "c-00001"] {
            std::fs::write(home.path().join(other), "").unwrap();
        }
        check_unused(&home.path().join("c.bin")).unwrap();
        assert!(check_unused(&home.path().join("c")).is_err());
        assert_eq!(shard(Path::new("d/c"), 7), Path::new("d/c-00007"));
    }

    #[test]
    fn one_file_that_is_full_names_the_flag_for_several_and_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let mut one = Shards::create(&home.path().join("t.bin"), TokenWidth::U16, None).unwrap();
        one.length = 4;
        one.push(&[1, 2, 3, 4]).unwrap();
        let e = one.push(&[5]).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("more than 4 tokens"), "{e}");
        assert!(e.to_string().contains("add --shard-tokens 100000000"), "{e}");
        drop(one);
        assert!(names(home.path()).is_empty());
    }

    #[test]
    fn where_one_cannot_have_its_name_none_has() {
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("t.bin");
        let mut shards = Shards::create(&out, TokenWidth::U16, Some(2)).unwrap();
        shards.push(&[1, 2, 3, 4, 5]).unwrap();
        // Made meanwhile by somebody else, and not to be replaced by a file.
        std::fs::create_dir(shard(&out, 3)).unwrap();
        assert_eq!(shards.finish().unwrap_err().code(), 1);
        assert_eq!(names(home.path()), ["t-00003.bin"]);
    }
}
