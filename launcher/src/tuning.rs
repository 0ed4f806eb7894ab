//! Tuning tables on disk, and the choice of one.

use crate::failure::{Failure, Result};
use crate::files;
use collectives::schedule::{Algorithm, Group, Kind, Tuning, TuningTable};
use std::path::{Path, PathBuf};

/// Where a table is named when no flag does.
pub const VARIABLE: &str = "CARAVAN_TUNING";

/// The table that a flag, or else the environment, names.
pub fn named(flag: Option<&PathBuf>) -> Option<PathBuf> {
    flag.cloned().or_else(|| std::env::var_os(VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from))
}

/// What is wrong with the table that [`named`] gave, with who named it.
pub fn told(flag: Option<&PathBuf>, failure: Failure) -> Failure {
    match (flag, failure) {
        // No flag names it, and it may have been exported long ago.
        (None, Failure::Usage(text)) => Failure::usage(format!(
            "{text}; the variable {VARIABLE} names it: --tuning names another, and an empty {VARIABLE} none"
        )),
        (_, failure) => failure,
    }
}

/// Reads a table.
///
/// # Errors
/// The path, and what is wrong with what is there.
pub fn read(path: &Path) -> Result<TuningTable> {
    let refuse = |why: String| Failure::usage(format!("tuning table {}: {why}", path.display()));
    let text = files::read_regular(path).map_err(|e| refuse(e.to_string()))?;
    text.parse().map_err(refuse)
}

/// Whether what a table says of `group`, which is `called` so in it, can be done there.
///
/// # Errors
/// An algorithm that cannot carry its collective.
pub fn check(group: &Group, called: impl FnOnce() -> String) -> Result<()> {
    for (kind, rule) in Kind::ALL.into_iter().zip(group.tuning.measured) {
        let possible = Algorithm::candidates(kind, group);
        let named = rule.into_iter().flat_map(|rule| [rule.small, rule.large]);
        if let Some(other) = named.into_iter().find(|algorithm| !possible.contains(algorithm)) {
            let possible: Vec<&str> = possible.iter().map(|algorithm| algorithm.name()).collect();
            return Err(Failure::usage(format!(
                "the tuning table has {other} for {kind} of {} with {} ranks, which cannot carry it here ({} can): it was \
                 measured on another layout or written by hand, and 'caravan bench tune' with the same flags measures this \
                 one",
                called(),
                group.size,
                possible.join(", ")
            )));
        }
    }
    Ok(())
}

/// What the table has rules for, in words.
fn groups(table: &TuningTable) -> String {
    let has: Vec<String> = table.groups().iter().map(|(t, n)| format!("{t} with {n} ranks")).collect();
    if has.is_empty() { "nothing".to_owned() } else { has.join(", ") }
}

/// What is known of a group's costs, with what a table says about it; `tune` is what would measure it.
///
/// # Errors
/// A table that cannot be read, or has no entry for the group.
pub fn load(path: &Path, transport: &str, ranks: usize, tune: &str, known: Tuning) -> Result<Tuning> {
    let table = read(path)?;
    table.apply(transport, ranks, known).ok_or_else(|| {
        Failure::usage(format!(
            "tuning table {} is for {}, not for {transport} with {ranks} ranks: {tune} measures that",
            path.display(),
            groups(&table)
        ))
    })
}

/// A table for ranks whose nodes are found out once they have met.
#[derive(Clone, Debug)]
pub struct ByLayout {
    path: PathBuf,
    table: TuningTable,
    /// What would measure what it does not have.
    tune: String,
}

impl ByLayout {
    /// Reads it.
    ///
    /// # Errors
    /// A table that cannot be read, or has no entry for so many ranks, whichever their nodes.
    pub fn load(path: &Path, transport: &str, ranks: usize, tune: String) -> Result<Self> {
        let loaded = ByLayout { path: path.to_owned(), table: read(path)?, tune };
        if loaded.rules(transport, ranks).next().is_none() {
            return Err(Failure::usage(format!(
                "tuning table {} is for {}, not for {transport}/K with {ranks} ranks on nodes of K: {} measures that",
                path.display(),
                groups(&loaded.table),
                loaded.tune
            )));
        }
        Ok(loaded)
    }

    /// Its lines about so many ranks, whichever their nodes.
    pub fn rules(&self, transport: &str, ranks: usize) -> impl Iterator<Item = String> + use<> {
        let of = |line: &str| {
            let mut fields = line.split_whitespace();
            let layout = fields.next()?.strip_prefix(transport)?.strip_prefix('/')?;
            (!layout.contains('@') && fields.next()? == ranks.to_string()).then(|| line.to_owned())
        };
        self.table.to_string().lines().filter_map(of).collect::<Vec<_>>().into_iter()
    }

    /// What is known of the costs of `group`, with what the table says about it.
    ///
    /// # Errors
    /// It was measured on other nodes.
    pub fn of(&self, group: &str, ranks: usize, known: Tuning) -> Result<Tuning> {
        self.table.apply(group, ranks, known).ok_or_else(|| {
            Failure::usage(format!(
                "tuning table {} is for {}, not for {group} with {ranks} ranks: it was measured on another layout of nodes, \
                 and {} measures this one",
                self.path.display(),
                groups(&self.table),
                self.tune
            ))
        })
    }
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
            e.contains("shm with 2 ranks, not for shm with 3 ranks: bench tune of three measures"),
            "{e}"
        );
        std::fs::write(&path, "caravan-tuning 1\nshm two\n").unwrap();
        assert!(load(2, "").unwrap_err().to_string().contains("line 2"));
        std::fs::write(
            &path,
            "caravan-tuning 1\nshm+ucx/4 8 reduce all linear linear\nshm+ucx 8 reduce all linear linear\n",
        )
        .unwrap();
        let found = ByLayout::load(&path, "shm+ucx", 8, "bench tune here".into()).unwrap();
        assert_eq!(found.rules("shm+ucx", 8).collect::<Vec<_>>(), ["shm+ucx/4 8 reduce all linear linear"]);
        assert!(found.of("shm+ucx/4", 8, Tuning::default()).is_ok());
        let e = found.of("shm+ucx/2", 8, Tuning::default()).unwrap_err().to_string();
        assert!(e.contains("not for shm+ucx/2 with 8 ranks: it was measured on another layout"), "{e}");
        let e = ByLayout::load(&path, "shm+mpi", 8, "bench tune here".into()).unwrap_err().to_string();
        assert!(e.contains("not for shm+mpi/K with 8 ranks on nodes of K: bench tune here measures"), "{e}");
        let missing = read(&dir.path().join("none")).unwrap_err();
        assert!(missing.code() == 2 && missing.to_string().contains("none"), "{missing}");
    }
}
