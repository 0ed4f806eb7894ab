//! Whether texts and their tokens fit in memory.

use crate::failure::{Failure, Result};
use crate::human;
use crate::machine::Machine;
use std::path::{Path, PathBuf};

/// Whether a text of so many bytes, which `flag` names, can be held.
///
/// # Errors
/// It is larger than this machine's memory.
pub fn check_text(flag: &str, path: &Path, bytes: u64) -> Result<()> {
    check(flag, path, bytes, false, Machine::probe().usable_memory())
}

/// Whether each of these texts, which `flag` names, can be held beside its tokens.
///
/// # Errors
/// The first that is too large.
pub fn check_texts(flag: &str, paths: &[PathBuf]) -> Result<()> {
    let have = Machine::probe().usable_memory();
    // That one cannot be read is told where it is.
    let sizes = paths.iter().filter_map(|path| Some((path, path.metadata().ok()?.len())));
    sizes.into_iter().try_for_each(|(path, bytes)| check(flag, path, bytes, true, have))
}

/// Whether a text of so many bytes can be held, by itself or beside its tokens, which take about as much.
fn check(flag: &str, path: &Path, bytes: u64, with_tokens: bool, have: u64) -> Result<()> {
    let (needed, beside) = match with_tokens {
        true => (2 * bytes, ", its tokens take about as much beside it,"),
        false => (bytes, ""),
    };
    match needed < have {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "{flag} {} has {}{beside} and this machine has {} of memory: split it into smaller files",
            path.display(),
            human::bytes(bytes),
            human::bytes(have)
        ))),
    }
}

/// Where they have to fit.
pub(super) struct Room<'a> {
    /// What names them.
    pub(super) flag: &'a str,
    /// Bytes of the texts.
    pub(super) text: u64,
    /// How many keep their tokens.
    pub(super) ranks: u64,
    /// Bytes of memory for them.
    pub(super) have: u64,
}

impl Room<'_> {
    /// Whether so many bytes fit, once for each rank.
    pub(super) fn check(&self, bytes: u64) -> Result<()> {
        let by = match self.ranks {
            1 => String::new(),
            ranks => format!(" by each of {ranks} ranks"),
        };
        match bytes.saturating_mul(self.ranks) <= self.have {
            true => Ok(()),
            false => Err(Failure::usage(format!(
                "{} has {} of text, whose tokens are kept in memory{by}, and this machine has {} for them: 'caravan \
                 tokenize' makes a token file of it, which is read from the disk",
                self.flag,
                human::bytes(self.text),
                human::bytes(self.have)
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn texts_whose_tokens_do_not_fit_in_memory_are_refused() {
        let of =
            |ranks, gib: u64| Room { flag: "--data", text: 17 << 30, ranks, have: 32 << 30 }.check(gib << 30);
        of(1, 0).unwrap();
        of(1, 32).unwrap();
        of(2, 16).unwrap();
        let e = of(1, 33).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("has 17.0 GiB of text"), "{e}");
        assert!(
            e.to_string().contains("in memory, and this machine has 32.0 GiB for them: 'caravan tokenize'"),
            "{e}"
        );
        let e = of(4, 9).unwrap_err().to_string();
        assert!(e.contains("in memory by each of 4 ranks, and"), "{e}");
    }

    #[test]
    fn a_text_larger_than_memory_is_refused() {
        let of = |bytes, with| check("--data", Path::new("huge.txt"), bytes, with, 32 << 30);
        of(31 << 30, false).unwrap();
        let text = of(40 << 30, false).unwrap_err().to_string();
        assert!(text.contains("huge.txt has 40.0 GiB") && text.contains("32.0 GiB of memory"), "{text}");
        of(15 << 30, true).unwrap();
        let text = of(20 << 30, true).unwrap_err().to_string();
        assert!(
            text.contains("huge.txt has 20.0 GiB, its tokens") && text.contains("32.0 GiB of memory"),
            "{text}"
        );
    }

    #[test]
    fn a_text_that_leaves_its_tokens_no_room_is_refused_before_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (sparse, small) = (dir.path().join("sparse.txt"), dir.path().join("small.txt"));
        fs::write(&small, "text").unwrap();
        fs::File::create(&sparse).unwrap().set_len(Machine::probe().usable_memory() / 2).unwrap();
        check_texts("--data", std::slice::from_ref(&small)).unwrap();
        let text = check_texts("--data", &[small, sparse]).unwrap_err().to_string();
        assert!(text.contains("sparse.txt"), "{text}");
    }
}
