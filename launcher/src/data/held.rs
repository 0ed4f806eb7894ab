//! Files that are held out whole: `--val-data`.

use super::{HELD_HANDED, Input, check_names, is_random};
use crate::failure::{Failure, Result};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What `--val-data` names, if anything; as [`Input::find`].
///
/// # Errors
/// As there; random tokens on either side, of which nothing can be learnt for the others.
pub fn find(data: &[PathBuf], paths: &[PathBuf], of_several: bool) -> Result<Option<Input>> {
    if paths.is_empty() {
        return Ok(None);
    }
    check(data, paths)?;
    if let Some(handed) = Input::handed(HELD_HANDED) {
        return Ok(Some(handed));
    }
    Input::named_by(paths, of_several).map(Some).map_err(of_val_data)
}

/// What can be said of their names on any machine.
///
/// # Errors
/// A dash, or random tokens.
pub fn check(data: &[PathBuf], paths: &[PathBuf]) -> Result<()> {
    check_names(paths).map_err(of_val_data)?;
    match is_random(data) {
        true if !paths.is_empty() => Err(Failure::usage(
            "--val-data beside --data random: what random tokens teach says nothing of other tokens; leave one of them away",
        )),
        _ => Ok(()),
    }
}

/// What is said of `--data` where the files are those of `--val-data`, which are read by the same code.
pub(super) fn of_val_data(failure: Failure) -> Failure {
    match failure {
        Failure::Usage(text) => Failure::Usage(text.replace("--data", "--val-data")),
        Failure::Run(text) => Failure::Run(text.replace("--data", "--val-data")),
        other => other,
    }
}

/// Refuses files to hold out that are trained on.
pub(super) fn check_apart(held: &Input, trained: &[PathBuf]) -> Result<()> {
    let identity =
        |path: &PathBuf| path.metadata().ok().filter(|there| there.is_file()).map(|m| (m.dev(), m.ino()));
    let trained: std::collections::HashSet<_> = trained.iter().filter_map(identity).collect();
    let both = held.named().iter().find(|file| identity(file).is_some_and(|there| trained.contains(&there)));
    match both {
        None => Ok(()),
        Some(file) => Err(Failure::usage(format!(
            "--val-data has {}, which is trained on, too: name --data without it",
            file.display()
        ))),
    }
}

/// Refuses a directory of token files of which some are for training and others for validation, as llm.c names them
/// (`fineweb_train_000001.bin`, `fineweb_val_000000.bin`): taken as one sequence, a model would be trained on both.
///
/// # Errors
/// The directory that `flag` names, and how its parts are named.
pub fn check_mixed(flag: &str, paths: &[PathBuf], input: &Input) -> Result<()> {
    for dir in paths.iter().filter(|path| path.is_dir()) {
        let below = || input.token_files().iter().filter(|file| file.starts_with(dir));
        let of = |words: &[&str]| below().find(|file| has_word(file, words));
        if let (Some(train), Some(val)) = (of(&["train"]), of(&["val", "valid", "validation"])) {
            let [name, other] = [train, val].map(|file| file.strip_prefix(dir).unwrap_or(file).display());
            let dir = dir.display();
            return Err(Failure::usage(format!(
                "{flag} {dir} has token files for training ({name}) and for validation ({other}): name the files, or take \
                 --data {dir}/*train*.bin --val-data {dir}/*val*.bin"
            )));
        }
    }
    Ok(())
}

/// Whether one of these is among the words of a file's name.
fn has_word(file: &Path, words: &[&str]) -> bool {
    let name = file.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_lowercase();
    name.split(|c: char| !c.is_alphanumeric()).any(|word| words.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_mix_files_for_training_and_validation_are_refused() {
        let home = tempfile::tempdir().unwrap();
        let check = |names: &[&str]| {
            let files = names.iter().map(|name| home.path().join(name)).collect();
            check_mixed("--data", &[home.path().to_owned()], &Input::Tokens(files))
        };
        for (train, val) in [
            ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"),
            ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
            ("train.bin", "val.bin"),
            ("edu-Train-1.bin", "edu-validation-1.bin"),
        ] {
            let e = check(&[val, train]).unwrap_err();
            let dir = home.path().display();
            let remedy = format!("take --data {dir}/*train*.bin --val-data {dir}/*val*.bin");
            let words = [&format!("--data {dir} "), train, val, &remedy];
            assert!(e.code() == 2 && words.iter().all(|word| e.to_string().contains(*word)), "{e}");
            check(&[train, train]).unwrap();
            check(&[val, val]).unwrap();
        }
        check(&["training_values.bin", "evaluation.bin", "a.bin"]).unwrap();
        // Files that are named are meant.
        let both = Input::Tokens(["a_train.bin", "a_val.bin"].map(|name| home.path().join(name)).to_vec());
        let Input::Tokens(paths) = &both else { unreachable!() };
        check_mixed("--data", paths, &both).unwrap();
    }
}
