//! The tokens of a run: text files, token files or random tokens, and which of them are held out.

mod made;
mod room;

use crate::failure::{Failure, Result};
use crate::files;
use crate::human;
use crate::text::{self, Reads};
use crate::tokenizer::{Share, Tokenizer};
use made::mark;
use models::tokens::{Source, TokenFile, Tokens, Windows};
use serde_json::{Value, json};
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The word that asks for random tokens instead of a path.
const RANDOM: &str = "random";
/// What those are called in reports.
const RANDOM_TOKENS: &str = "random tokens";
/// What is no text is refused with this.
const TAKES: &str = "--data takes UTF-8 text, or token files made by 'caravan tokenize' or for llm.c, which do not come through a pipe";
/// Ranks find here the descriptor of the tokens that their parent made from text, the [mark] of what made them, and what the
/// parent calls them.
const HANDED: &str = "CARAVAN_TOKENS_FD";

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

/// Refuses a dash, which is no name here for the standard input.
///
/// # Errors
/// What to take instead.
pub fn check_names(paths: &[PathBuf]) -> Result<()> {
    paths.iter().try_for_each(|path| files::check_name("--data", path, "/dev/stdin for the standard input"))
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

/// What `--data` names.
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
        /// The [mark] of what made it.
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
        if let Ok(handed) = std::env::var(HANDED)
            && let Some((descriptor, rest)) = handed.split_once(' ')
            && let Some((by, about)) = rest.split_once(' ')
        {
            let path = format!("/proc/self/fd/{descriptor}");
            return Ok(Input::Handed { path, by: by.to_owned(), about: about.to_owned() });
        }
        if paths.is_empty() {
            let mut left_out = Vec::new();
            let files = text::corpus_below(Path::new("."), &mut left_out)?;
            return Ok(Input::Text { files, left_out: Some(left_out) });
        }
        let files = list(paths, Reads::TextOrTokens)?;
        let mut tokenised = Vec::new();
        for file in &files {
            let pipe = file.metadata().is_ok_and(|there| there.file_type().is_fifo());
            if pipe && of_several {
                return Err(Failure::usage(format!(
                    "--data {} is a pipe, which one process can read and these ranks are several: 'caravan tokenize' makes \
                     a token file of what comes out of it",
                    file.display()
                )));
            }
            // A look would take from it.
            let looks = if pipe { Ok(false) } else { TokenFile::looks_like(file) };
            tokenised.push(looks.map_err(|e| Failure::usage(format!("--data {e}; {TAKES}")))?);
        }
        match tokenised.iter().position(|&tokens| !tokens) {
            None => Ok(Input::Tokens(files)),
            Some(_) if !tokenised.contains(&true) => Ok(Input::Text { files, left_out: None }),
            Some(odd) => Err(Failure::usage(format!(
                "--data has both token files and {}, which is none{}",
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

    /// Whether it is text, so that a tokenizer has to be known.
    pub fn is_text(&self) -> bool {
        !matches!(self, Input::Tokens(_))
    }
}

/// The tokens of a run and what they were made from.
pub struct Feed {
    tokens: Tokens,
    train: Range<usize>,
    held_out: Range<usize>,
    /// What was read, in words; None of random tokens.
    about: Option<String>,
    /// What was read.
    files: Vec<PathBuf>,
    /// Tokens that were made from text, and the [mark] of what made them: ranks read these instead of making them again, of
    /// text that may have changed.
    made: Option<(File, String)>,
}

impl Feed {
    /// Uniform random tokens, enough that none is seen twice.
    pub fn random(seed: u64, vocab: usize, len: usize) -> Self {
        let tokens = Tokens::new(vec![Source::Random { seed, vocab, len }], vocab);
        Feed { train: 0..len, held_out: len..len, tokens, about: None, files: vec![], made: None }
    }

    /// The tokens of `input`, of text by `tokenizer` in this process's `share` of the machine. `vocab` is the model's.
    ///
    /// # Errors
    /// What cannot be read, is empty, is neither text nor tokens, or has tokens that the model does not know.
    pub fn open(input: Input, tokenizer: Option<&Tokenizer>, vocab: usize, share: Share) -> Result<Self> {
        let tokenizer = tokenizer.unwrap_or(&Tokenizer::Bytes);
        let (about, files, sources, made) = match input {
            Input::Tokens(files) => {
                let open = |file: &PathBuf| TokenFile::open(file).map(Source::File).map_err(Failure::usage);
                let sources = files.iter().map(open).collect::<Result<_>>()?;
                (named(&files, "token file"), files, sources, None)
            }
            Input::Text { mut files, mut left_out } => {
                let made = made::make(&mut files, &mut left_out, tokenizer, vocab, share)?;
                let path = format!("/proc/self/fd/{}", made.as_raw_fd());
                let about = named(&files, "text file") + &aside(&left_out.unwrap_or_default());
                (about, files, vec![made::source(&path, tokenizer)?], Some((made, mark(tokenizer))))
            }
            Input::Handed { by, .. } if by != mark(tokenizer) => {
                return Err(Failure::usage(format!(
                    "tokenizer {} has changed since --data was made tokens by it: start again",
                    tokenizer.name()
                )));
            }
            Input::Handed { path, about, .. } => (about, vec![], vec![made::source(&path, tokenizer)?], None),
        };
        let tokens = Tokens::new(sources, vocab);
        if tokens.is_empty() {
            return Err(Failure::usage(format!("the data are empty: {about} with no tokens")));
        }
        let len = tokens.len();
        Ok(Feed { tokens, train: 0..len, held_out: len..len, about: Some(about), files, made })
    }

    /// Finds tokens that the model does not know before they are met in the midst of a run.
    ///
    /// # Errors
    /// The first, with its place.
    pub fn check_tokens(&self) -> Result<()> {
        self.tokens.check().map_err(Failure::usage)
    }

    /// Holds out the last `fraction` of the tokens for validation.
    ///
    /// # Errors
    /// A fraction outside 0 to below 1.
    pub fn hold_out(mut self, fraction: f64) -> Result<Self> {
        (self.train, self.held_out) = self.tokens.split(fraction).map_err(Failure::usage)?;
        Ok(self)
    }

    /// Whether what is held out, if anything, holds a sequence of `length`.
    ///
    /// # Errors
    /// It does not.
    pub fn check_held_out(&self, fraction: f64, length: usize) -> Result<()> {
        match fraction > 0.0 && self.held_out.len() <= length {
            false => Ok(()),
            true => Err(Failure::usage(format!(
                "--val-fraction {fraction} holds out {} of {} tokens, less than one sequence of {length} and its \
                 next token: give more --data, a shorter --seq, or --val-fraction 0",
                self.held_out.len(),
                self.tokens.len()
            ))),
        }
    }

    /// The files that hold them.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Bytes of the tokens that this process keeps in memory, where its ranks find them: none of files, which are read.
    pub fn in_memory(&self) -> u64 {
        self.made.as_ref().and_then(|(file, _)| file.metadata().ok()).map_or(0, |made| made.len())
    }

    /// How many tokens are held out.
    pub fn held_out_tokens(&self) -> usize {
        self.held_out.len()
    }

    /// All tokens.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// Where the tokens for training are.
    pub fn training(&self) -> Range<usize> {
        self.train.clone()
    }

    /// Windows over the tokens that are held out, if any are.
    pub fn held_out(&self, length: usize) -> Option<Windows> {
        Windows::new(self.held_out.clone(), length).ok()
    }

    /// Windows over all tokens, a shorter one over fewer than that.
    ///
    /// # Errors
    /// A single token, after which none comes.
    pub fn windows(&self, length: usize) -> Result<Windows> {
        match self.tokens.len() {
            1 => {
                Err(Failure::usage("the data have one token, and none after it to predict: give more --data"))
            }
            len => Windows::new(0..len, length.min(len - 1)).map_err(Failure::usage),
        }
    }

    /// The environment variable by which ranks find the tokens that were made from text.
    pub fn handover(&self) -> Option<(&'static str, String)> {
        let about = self.about.as_deref().unwrap_or_default();
        self.made.as_ref().map(|(file, by)| (HANDED, format!("{} {by} {about}", file.as_raw_fd())))
    }

    /// A phrase such as `1.2M tokens of 34 text files, 0.12M of them held out`.
    pub fn describe(&self) -> String {
        let Some(about) = &self.about else { return RANDOM_TOKENS.to_owned() };
        let held_out = match self.held_out.len() {
            0 => String::new(),
            n => format!(", {} of them held out", human::count(n as f64)),
        };
        format!("{} tokens of {about}{held_out}", human::count(self.tokens.len() as f64))
    }

    /// What tells these tokens from others: how many there are, and a digest of some of them.
    pub fn fingerprint(&self) -> String {
        format!("of {} tokens, {} held out, digest {}", self.tokens.len(), self.held_out.len(), self.digest())
    }

    fn digest(&self) -> String {
        /// Places that are looked at, and tokens at each.
        const LOOKS: usize = 61;
        const LOOK: usize = 16;
        let len = self.tokens.len();
        let mut some = [0u32; LOOK];
        let mut seen = Vec::with_capacity(LOOKS * LOOK);
        for place in 0..LOOKS {
            let count = LOOK.min(len);
            let start = (len - count) / (LOOKS - 1) * place;
            // Tokens that the model does not know are found where they are used.
            if self.tokens.read(start, &mut some[..count]).is_ok() {
                seen.extend_from_slice(&some[..count]);
            }
        }
        format!("{:016x}", collectives::digest(seen))
    }

    /// All of that as JSON, and the paths by which they were `asked` for, if any.
    pub fn json(&self, asked: &[PathBuf]) -> Value {
        json!({
            "source": self.about.as_deref().unwrap_or(RANDOM_TOKENS),
            "paths": asked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
            "tokens": self.tokens.len(),
            "held_out": self.held_out.len(),
            "digest": self.digest(),
        })
    }
}

/// The files that `--data` names, directories opened up, for who `reads` them.
///
/// # Errors
/// A file that is named twice; a path where nothing is, also where it is the word for random tokens, for which nobody
/// comes here; those of [`text::files_below`].
pub fn list(paths: &[PathBuf], reads: Reads) -> Result<Vec<PathBuf>> {
    check_names(paths)?;
    let mut files = Vec::new();
    for path in paths {
        match path.metadata() {
            Ok(there) if there.is_dir() => files.extend(text::files_below(path, reads)?),
            Ok(_) => files.push(path.clone()),
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(Failure::usage(format!("--data {}: {e}", path.display())));
            }
            Err(_) => {
                let hint = match path == Path::new(RANDOM) {
                    true => ", and random tokens are for 'caravan train'",
                    false => "",
                };
                return Err(Failure::usage(format!(
                    "--data {}: there is no such file or directory{hint}",
                    path.display()
                )));
            }
        }
    }
    files::check_once("--data", &files)?;
    Ok(files)
}

/// `shakespeare.txt`, or `34 text files`.
fn named(files: &[PathBuf], kind: &str) -> String {
    match files {
        [one] => one.display().to_string(),
        many => format!("{} {kind}s", many.len()),
    }
}

/// ` (without 2 that cannot be read or are no text, a/latin1.txt first)`, or nothing.
fn aside(left_out: &[PathBuf]) -> String {
    match left_out {
        [] => String::new(),
        [first, ..] => format!(
            " (without {} that cannot be read or are no text, {} first)",
            left_out.len(),
            first.display()
        ),
    }
}
