//! What the tokens of a run are made of: text files, token files or random tokens.

mod feed;
pub mod held;
mod made;
pub mod room;

pub use feed::Feed;

use crate::failure::{Failure, Result};
use crate::files;
use crate::text::{self, Reads};
use models::tokens::TokenFile;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The word that asks for random tokens instead of a path.
const RANDOM: &str = "random";
/// What those are called in reports.
const RANDOM_TOKENS: &str = "random tokens";
/// What is no text is refused with this, of the flag that names it.
const TAKES: &str = "takes UTF-8 text, or token files made by 'caravan tokenize' or for llm.c, which do not come through a pipe";
/// Ranks find here the descriptor of the tokens that their parent made from text, the [mark](made::mark) of what made them,
/// and what the parent calls them.
const HANDED: &str = "CARAVAN_TOKENS_FD";
/// The same of `--val-data`.
const HELD_HANDED: &str = "CARAVAN_VAL_TOKENS_FD";

/// Whether `--data` asks for random tokens.
pub fn is_random(paths: &[PathBuf]) -> bool {
    paths == [Path::new(RANDOM)]
}

/// Refuses the word for random tokens where something has that name.
///
/// # Errors
/// Only who asked knows which of both is meant.
pub fn check_random(paths: &[PathBuf]) -> Result<()> {
    match is_random(paths) && files::is_there(Path::new(RANDOM)) {
        true => Err(Failure::usage(
            "--data random means random tokens, and something of that name lies here: take ./random for what lies here, or \
             start elsewhere for random tokens",
        )),
        false => Ok(()),
    }
}

/// Refuses a dash, which is no name here for the standard input, where `flag` names files.
///
/// # Errors
/// What to take instead.
pub fn check_names(flag: &str, paths: &[PathBuf]) -> Result<()> {
    paths.iter().try_for_each(|path| files::check_name(flag, path, "/dev/stdin for the standard input"))
}

/// Refuses streams of the shell where `flag` names files for processes that a script of Slurm's starts.
///
/// # Errors
/// What to take instead.
pub fn check_no_stream(flag: &str, paths: &[PathBuf]) -> Result<()> {
    match paths.iter().find(|path| files::is_descriptor(path)) {
        Some(path) => Err(Failure::usage(format!(
            "{flag} {}: ranks that a script of Slurm's starts have no stream of this shell: name a file, such as the token file \
             that 'caravan tokenize' makes of what comes through a pipe",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// Refuses random tokens beside files.
///
/// # Errors
/// The word for them is one of several.
pub fn check_alone(paths: &[PathBuf]) -> Result<()> {
    match paths.len() > 1 && paths.iter().any(|path| path == Path::new(RANDOM)) {
        true => Err(Failure::usage("--data random stands alone: random tokens do not mix with files")),
        false => Ok(()),
    }
}

/// What `--data` or `--val-data` names.
pub enum Input {
    /// Text files.
    Text {
        /// Which.
        files: Vec<PathBuf>,
        /// What cannot be read of a corpus that nobody named, and is left out; None where all was asked for.
        left_out: Option<Vec<PathBuf>>,
    },
    /// Token files.
    Tokens(Vec<PathBuf>),
    /// What the parent of this rank made of text.
    Handed {
        /// Where it lies.
        path: String,
        /// The [mark](made::mark) of what made it.
        by: String,
        /// What the parent calls it.
        about: String,
    },
}

impl Input {
    /// Files and directories in the order given; with none, the text below the current directory. All must be text
    /// or all token files; pipes are text. Something else may have started this process as one `of_several` ranks.
    ///
    /// # Errors
    /// A path that cannot be read, or not by each rank, or is neither text nor tokens.
    pub fn find(paths: &[PathBuf], of_several: bool) -> Result<Self> {
        check_alone(paths)?;
        if let Some(handed) = Self::handed(HANDED) {
            return Ok(handed);
        }
        if paths.is_empty() {
            let mut left_out = Vec::new();
            let files = text::corpus_below(Path::new("."), &mut left_out)?;
            return Ok(Input::Text { files, left_out: Some(left_out) });
        }
        Self::named_by("--data", paths, of_several)
    }

    /// What the parent of this rank has made, if it says so in this variable.
    fn handed(variable: &str) -> Option<Self> {
        let handed = std::env::var(variable).ok()?;
        let (descriptor, rest) = handed.split_once(' ')?;
        let (by, about) = rest.split_once(' ')?;
        let path = format!("/proc/self/fd/{descriptor}");
        Some(Input::Handed { path, by: by.to_owned(), about: about.to_owned() })
    }

    /// Files and directories that `flag` names, of which there are some.
    fn named_by(flag: &str, paths: &[PathBuf], of_several: bool) -> Result<Self> {
        let files = list(flag, paths, Reads::TextOrTokens)?;
        let mut tokenised = Vec::new();
        for file in &files {
            let pipe = file.metadata().is_ok_and(|there| there.file_type().is_fifo());
            if pipe && of_several {
                return Err(Failure::usage(format!(
                    "{flag} {} is a pipe, which one process can read and these ranks are several: 'caravan tokenize' makes \
                     a token file of what comes out of it",
                    file.display()
                )));
            }
            // A look would take from it.
            let looks = if pipe { Ok(false) } else { TokenFile::looks_like(file) };
            tokenised.push(looks.map_err(|e| match e {
                // Whatever it is, it was not looked at.
                models::Error::System { .. } => Failure::usage(format!("{flag} {e}")),
                e => Failure::usage(format!("{flag} {e}; {flag} {TAKES}")),
            })?);
        }
        match tokenised.iter().position(|&tokens| !tokens) {
            None => Ok(Input::Tokens(files)),
            Some(_) if !tokenised.contains(&true) => Ok(Input::Text { files, left_out: None }),
            Some(odd) => Err(Failure::usage(format!(
                "{flag} has both token files and {}, which is none{}",
                files[odd].display(),
                match text::headerless(&files[odd]) {
                    "" => ": 'caravan tokenize' makes a token file of text",
                    headerless => headerless,
                }
            ))),
        }
    }

    /// The token files, which ranks read where they need them.
    pub fn token_files(&self) -> &[PathBuf] {
        match self {
            Input::Tokens(files) => files,
            _ => &[],
        }
    }

    /// The files that were asked for, by name or with a directory: none of a corpus that nobody named.
    pub fn named(&self) -> &[PathBuf] {
        match self {
            Input::Text { files, left_out: None } => files,
            _ => self.token_files(),
        }
    }

    /// The files that are read.
    pub fn files(&self) -> &[PathBuf] {
        match self {
            Input::Text { files, .. } => files,
            _ => self.token_files(),
        }
    }

    /// Whether it is text, so that a tokenizer has to be known.
    pub fn is_text(&self) -> bool {
        !matches!(self, Input::Tokens(_))
    }
}

/// The files that `flag` names, directories opened up, for who `reads` them.
///
/// # Errors
/// A file that is named twice; a path where nothing is, also where it is the word for random tokens, for which nobody
/// comes here; those of [`text::files_below`].
pub fn list(flag: &str, paths: &[PathBuf], reads: Reads) -> Result<Vec<PathBuf>> {
    check_names(flag, paths)?;
    let mut files = Vec::new();
    for path in paths {
        match path.metadata() {
            Ok(there) if there.is_dir() => files.extend(text::files_below(flag, path, reads)?),
            Ok(_) => files.push(path.clone()),
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(Failure::usage(format!("{flag} {}: {e}", path.display())));
            }
            Err(_) => {
                let hint = match path == Path::new(RANDOM) {
                    true => ", and random tokens are for 'caravan train'",
                    false => "",
                };
                return Err(Failure::usage(format!(
                    "{flag} {}: there is no such file or directory{hint}",
                    path.display()
                )));
            }
        }
    }
    files::check_once(flag, &files)?;
    Ok(files)
}
