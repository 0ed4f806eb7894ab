//! Files that are held out whole: `--val-data`.

use super::{HELD_HANDED, Input, RANDOM, check_names, is_random};
use crate::failure::{Failure, Result};
use crate::files;
use std::ffi::OsStr;
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
    Input::named_by("--val-data", paths, of_several).map(Some)
}

/// What can be said of their names on any machine.
///
/// # Errors
/// A dash, or random tokens.
pub fn check(data: &[PathBuf], paths: &[PathBuf]) -> Result<()> {
    check_names("--val-data", paths)?;
    if is_random(data) && !paths.is_empty() {
        return Err(Failure::usage(
            "--val-data beside --data random: what random tokens teach says nothing of other tokens; leave one of them away",
        ));
    }
    match paths.iter().any(|path| path == Path::new(RANDOM)) {
        true => Err(Failure::usage(
            "--val-data random: random tokens are for --data alone, which then has nothing to be evaluated on; name \
             files, and one that has this name as ./random",
        )),
        false => Ok(()),
    }
}

/// Refuses files to hold out that are trained on.
pub(super) fn check_apart(held: &Input, trained: &[PathBuf]) -> Result<()> {
    let is = |path: &PathBuf| {
        path.metadata().ok().filter(|there| there.is_file()).map(|there| files::identity(&there))
    };
    let trained: std::collections::HashSet<_> = trained.iter().filter_map(is).collect();
    let both = held.named().iter().find(|file| is(file).is_some_and(|there| trained.contains(&there)));
    match both {
        None => Ok(()),
        Some(file) => Err(Failure::usage(format!(
            "--val-data has {}, which is trained on, too: name --data without it",
            file.display()
        ))),
    }
}

/// Refuses a directory of token files of which some are for training and others for validation, as llm.c names them
/// (`fineweb_train_000001.bin`, `fineweb_val_000000.bin`): taken as one sequence, a model would be trained on both, or
/// evaluated. `remedy` says how the `train` and `val` files of a directory, `{}`, are named instead.
///
/// # Errors
/// The directory that `flag` names, and how its parts are named.
pub fn check_mixed(flag: &str, paths: &[PathBuf], input: &Input, remedy: &str) -> Result<()> {
    for dir in paths.iter().filter(|path| path.is_dir()) {
        let below = || input.token_files().iter().filter(|file| file.starts_with(dir));
        let of = |words: &[&str]| below().find(|file| has_word(file, words));
        if let (Some(train), Some(val)) = (of(&["train"]), of(&["val", "valid", "validation"])) {
            let [name, other] = [train, val].map(|file| file.strip_prefix(dir).unwrap_or(file));
            // As a shell finds them.
            let finds =
                |name: &Path, word: &str| name.to_str().is_some_and(|n| n.contains(word) && !n.contains('/'));
            let dir = dir.display();
            let or = match finds(name, "train") && finds(other, "val") {
                true => format!(", or take {}", remedy.replace("{}", &dir.to_string())),
                false => String::new(),
            };
            return Err(Failure::usage(format!(
                "{flag} {dir} has token files for training ({}) and for validation ({}): name the files{or}",
                name.display(),
                other.display()
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
            check_mixed(
                "--data",
                &[home.path().to_owned()],
                &Input::Tokens(files),
                "{}/*train*.bin, {}/*val*.bin",
            )
        };
        for (train, val) in [
            ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"),
            ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
            ("train.bin", "val.bin"),
            ("edu-train-1.bin", "edu-validation-1.bin"),
            // No pattern finds these.
            ("edu-Train-1.bin", "edu-validation-1.bin"),
            ("sub/train.bin", "sub/val.bin"),
        ] {
            let e = check(&[val, train]).unwrap_err();
            let dir = home.path().display();
            let found = !train.contains(['T', '/']);
            let remedy =
                if found { format!(", or take {dir}/*train*.bin, {dir}/*val*.bin") } else { String::new() };
            let expected = format!(
                "--data {dir} has token files for training ({train}) and for validation ({val}): name the files{remedy}"
            );
            assert_eq!((e.code(), e.to_string()), (2, expected));
            check(&[train, train]).unwrap();
            check(&[val, val]).unwrap();
        }
        check(&["training_values.bin", "evaluation.bin", "a.bin"]).unwrap();
        // Files that are named are meant.
        let both = Input::Tokens(["a_train.bin", "a_val.bin"].map(|name| home.path().join(name)).to_vec());
        let Input::Tokens(paths) = &both else { unreachable!() };
        check_mixed("--data", paths, &both, "").unwrap();
    }

    #[test]
    fn random_tokens_are_on_neither_side() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        for (data, held, words) in [
            (&["random"][..], &["b.txt"][..], "--val-data beside --data random: "),
            (&["a.txt"], &["b.txt", "random"], "--val-data random: "),
        ] {
            let e = check(&paths(data), &paths(held)).unwrap_err();
            assert!(e.code() == 2 && e.to_string().starts_with(words), "{e}");
        }
        check(&paths(&["random"]), &[]).unwrap();
        check(&paths(&["a.txt"]), &paths(&["./random"])).unwrap();
    }
}
