//! The tokens of a run: text files, token files or random tokens, and which of them are held out.

use crate::failure::{Failure, Result};
use crate::human;
use crate::text;
use crate::tokenizer::Tokenizer;
use models::tokens::{Source, TokenFile, TokenWidth, Tokens, Windows};
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The word that asks for random tokens instead of a path.
const RANDOM: &str = "random";
/// What those are called in reports.
const RANDOM_TOKENS: &str = "random tokens";
/// What is no text is refused with this.
const TAKES: &str = "--data takes UTF-8 text, or token files made by 'caravan tokenize' or for llm.c";
/// Ranks find here the descriptor of the tokens that their parent made from text.
const HANDED: &str = "CARAVAN_TOKENS_FD";

/// Whether `--data` asks for random tokens.
pub fn is_random(paths: &[PathBuf]) -> bool {
    paths == [Path::new(RANDOM)]
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
    /// Tokens that were made from text: ranks map them instead of making them again.
    made: Option<File>,
}

impl Feed {
    /// Uniform random tokens, enough that none is seen twice.
    pub fn random(seed: u64, vocab: usize, len: usize) -> Self {
        let tokens = Tokens::new(vec![Source::Random { seed, vocab, len }], vocab);
        Feed { train: 0..len, held_out: len..len, tokens, about: None, files: vec![], made: None }
    }

    /// Files and directories in the order given; with none, the text below the current directory. All must be text
    /// or all token files. `vocab` is the model's.
    ///
    /// # Errors
    /// A path that cannot be read, is empty, or is neither text nor tokens.
    pub fn open(paths: &[PathBuf], tokenizer: &Tokenizer, vocab: usize) -> Result<Self> {
        if paths.len() > 1 && paths.iter().any(|p| p.as_path() == Path::new(RANDOM)) {
            return Err(Failure::usage("--data random stands alone: random tokens do not mix with files"));
        }
        let files = list(paths)?;
        let mut tokenised = Vec::new();
        for file in &files {
            tokenised.push(TokenFile::looks_like(file).map_err(Failure::usage)?);
        }
        let (about, sources, made) = match (tokenised.iter().all(|&t| t), tokenised.iter().any(|&t| t)) {
            (true, _) => {
                let open = |file: &PathBuf| TokenFile::open(file).map(Source::File).map_err(Failure::usage);
                (named(&files, "token file"), files.iter().map(open).collect::<Result<_>>()?, None)
            }
            (false, true) => {
                let odd =
                    files.iter().zip(&tokenised).find(|(_, t)| !**t).map(|(f, _)| f.display().to_string());
                return Err(Failure::usage(format!(
                    "--data has both token files and text ({}): 'caravan tokenize' makes a token file of text",
                    odd.unwrap_or_default()
                )));
            }
            (false, false) => {
                let (sources, made) = text_sources(&files, tokenizer)?;
                (named(&files, "text file"), sources, made)
            }
        };
        let tokens = Tokens::new(sources, vocab);
        if tokens.is_empty() {
            return Err(Failure::usage(format!(
                "the data are empty: {} with no tokens",
                named(&files, "file")
            )));
        }
        let len = tokens.len();
        Ok(Feed { tokens, train: 0..len, held_out: len..len, about: Some(about), files, made })
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
                 next token: give more data, a shorter --seq, or --val-fraction 0",
                self.held_out.len(),
                self.tokens.len()
            ))),
        }
    }

    /// The files that hold them.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
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

    /// Windows over all tokens.
    ///
    /// # Errors
    /// Fewer tokens than one window.
    pub fn windows(&self, length: usize) -> Result<Windows> {
        Windows::new(0..self.tokens.len(), length).map_err(Failure::usage)
    }

    /// The environment variable by which ranks find the tokens that were made from text.
    pub fn handover(&self) -> Option<(&'static str, String)> {
        self.made.as_ref().map(|file| (HANDED, file.as_raw_fd().to_string()))
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
        format!(
            "of {len} tokens, {} held out, digest {:016x}",
            self.held_out.len(),
            collectives::digest(seen)
        )
    }

    /// The same as JSON.
    pub fn json(&self) -> Value {
        let about = self.about.as_deref().unwrap_or(RANDOM_TOKENS);
        json!({"source": about, "tokens": self.tokens.len(), "held_out": self.held_out.len()})
    }
}

/// The files that `--data` names, directories opened up.
///
/// # Errors
/// A path where nothing is, also where it is the word for random tokens, for which nobody comes here.
pub fn list(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if paths.is_empty() {
        return text::files_below(Path::new("."));
    }
    let mut files = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => files.extend(text::files_below(path)?),
            false if path.exists() => files.push(path.clone()),
            false => {
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
    Ok(files)
}

/// `shakespeare.txt`, or `34 text files`.
fn named(files: &[PathBuf], kind: &str) -> String {
    match files {
        [one] => one.display().to_string(),
        many => format!("{} {kind}s", many.len()),
    }
}

/// Text as tokens: bytes are mapped as they lie, other tokens are made once and handed to the ranks.
fn text_sources(files: &[PathBuf], tokenizer: &Tokenizer) -> Result<(Vec<Source>, Option<File>)> {
    if let Tokenizer::Bytes = tokenizer {
        let mut sources = Vec::new();
        for file in files {
            let mapped = TokenFile::open_bytes(file).map_err(Failure::usage)?;
            text::check(file, mapped.bytes(), TAKES)?;
            sources.push(Source::File(mapped));
        }
        return Ok((sources, None));
    }
    if let Ok(fd) = std::env::var(HANDED) {
        let path = format!("/proc/self/fd/{fd}");
        return Ok((vec![Source::File(TokenFile::open(path).map_err(Failure::run)?)], None));
    }
    let made = make(files, tokenizer)?;
    let path = format!("/proc/self/fd/{}", made.as_raw_fd());
    Ok((vec![Source::File(TokenFile::open(path).map_err(Failure::run)?)], Some(made)))
}

/// Tokens of text in an anonymous file that child processes inherit.
fn make(files: &[PathBuf], tokenizer: &Tokenizer) -> Result<File> {
    let refused = |e: std::io::Error| Failure::run(format!("cannot keep tokens in memory: {e}"));
    let fd =
        rustix::fs::memfd_create("caravan-tokens", MemfdFlags::empty()).map_err(|e| refused(e.into()))?;
    rustix::io::fcntl_setfd(&fd, FdFlags::empty()).map_err(|e| refused(e.into()))?;
    let mut file = File::from(fd);
    let mut tokens = Vec::new();
    for path in files {
        tokens.extend(tokenizer.encode(&text::read(path, TAKES)?)?);
    }
    let header = TokenWidth::U32.header_for(tokens.len()).map_err(Failure::usage)?;
    file.write_all(&header).map_err(refused)?;
    for part in tokens.chunks(1 << 16) {
        let bytes: Vec<u8> = part.iter().flat_map(|t| t.to_le_bytes()).collect();
        file.write_all(&bytes).map_err(refused)?;
    }
    Ok(file)
}
