//! Tuning tables on disk, and the choice of one.

use crate::failure::{Failure, Result};
use collectives::schedule::{Tuning, TuningTable};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where a table is named when no flag does.
pub const VARIABLE: &str = "CARAVAN_TUNING";

/// The table that a flag, or else the environment, names.
pub fn named(flag: Option<&PathBuf>) -> Option<PathBuf> {
    flag.cloned().or_else(|| std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from))
}

/// Reads a table.
///
/// # Errors
/// The path, and what is wrong with what is there.
pub fn read(path: &Path) -> Result<TuningTable> {
    let refuse = |what: OsString| {
        Failure::usage(format!("tuning table {}: {}", path.display(), what.to_string_lossy()))
    };
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return Err(refuse("it is no regular file, which every rank could read".into()));
    }
    let text = std::fs::read_to_string(path).map_err(|e| refuse(e.to_string().into()))?;
    text.parse().map_err(|e: String| refuse(e.into()))
}

/// What is known of a group's costs, with what a table says about it; `tune` is the command that would measure it.
///
/// # Errors
/// A table that cannot be read, or has no entry for the group.
pub fn load(path: &Path, transport: &str, ranks: usize, tune: &str, known: Tuning) -> Result<Tuning> {
    let table = read(path)?;
    table.apply(transport, ranks, known).ok_or_else(|| {
        let has: Vec<String> = table.groups().iter().map(|(t, n)| format!("{t} with {n} ranks")).collect();
        let has = if has.is_empty() { "nothing".to_owned() } else { has.join(", ") };
        Failure::usage(format!(
            "tuning table {} is for {has}, not for {transport} with {ranks} ranks: '{tune}' measures that",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_for_its_groups_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        std::fs::write(&path, "caravan-tuning 1\nshm 2 all_reduce 64 direct-read-all direct-rs-ag\n")
            .unwrap();
        let load = |ranks, tune| load(&path, "shm", ranks, tune, Tuning::default());
        assert!(load(2, "").unwrap().measured.iter().flatten().count() == 1);
        let e = load(3, "bench tune of three").unwrap_err().to_string();
        assert!(
            e.contains("shm with 2 ranks, not for shm with 3 ranks: 'bench tune of three' measures"),
            "{e}"
        );
        std::fs::write(&path, "caravan-tuning 1\nshm two\n").unwrap();
        assert!(load(2, "").unwrap_err().to_string().contains("line 2"));
        let missing = read(&dir.path().join("none")).unwrap_err();
        assert!(missing.code() == 2 && missing.to_string().contains("none"), "{missing}");
    }
}
