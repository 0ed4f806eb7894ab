//! The tokens of a run, and which of them are held out.

use super::made::{self, mark};
use super::{HANDED, HELD_HANDED, Input, RANDOM_TOKENS, held};
use crate::args::Number;
use crate::failure::{Failure, Result};
use crate::human;
use crate::tokenizer::{Share, Tokenizer};
use models::tokens::{Source, TokenFile, Tokens, Windows};
use serde_json::{Value, json};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// The tokens of a run and what they were made from.
pub struct Feed {
    tokens: Tokens,
    train: Range<usize>,
    held_out: Range<usize>,
    data: Part,
    /// Files that are held out whole, whose tokens follow those of `data`.
    held: Option<Part>,
}

/// What one flag names.
struct Part {
    /// How many tokens they are.
    len: usize,
    /// What was read, in words; None of random tokens.
    about: Option<String>,
    /// The files that were asked for, by name or with a directory.
    named: Vec<PathBuf>,
    /// Tokens that were made from text, and the [mark] of what made them: ranks read these instead of making them again, of
    /// text that may have changed.
    made: Option<(File, String)>,
}

impl Part {
    /// The tokens of `input`, which `flag` names, as [`Feed::open`] says.
    fn open(
        flag: &str,
        input: Input,
        tokenizer: Option<&Tokenizer>,
        vocab: usize,
        share: Share,
    ) -> Result<(Self, Vec<Source>)> {
        let tokenizer = tokenizer.unwrap_or(&Tokenizer::Bytes);
        let named_files = input.named().to_vec();
        let (about, sources, made) = match input {
            Input::Tokens(files) => {
                let open = |file: &PathBuf| {
                    TokenFile::open(file).map(Source::File).map_err(|e| Failure::usage(format!("{flag} {e}")))
                };
                let sources = files.iter().map(open).collect::<Result<_>>()?;
                (named(&files, "token file"), sources, None)
            }
            Input::Text { mut files, mut left_out } => {
                let made = made::make(flag, &mut files, &mut left_out, tokenizer, vocab, share)?;
                let path = format!("/proc/self/fd/{}", made.as_raw_fd());
                let about = named(&files, "text file") + &aside(&left_out.unwrap_or_default());
                (about, vec![made::source(&path, tokenizer)?], Some((made, mark(tokenizer))))
            }
            Input::Handed { by, .. } if by != mark(tokenizer) => {
                return Err(Failure::usage(format!(
                    "tokenizer {} has changed since {flag} was made tokens by it: start again",
                    tokenizer.name()
                )));
            }
            Input::Handed { path, about, .. } => (about, vec![made::source(&path, tokenizer)?], None),
        };
        let len = sources.iter().map(Source::len).sum();
        if len == 0 {
            return Err(Failure::usage(format!("{flag} is empty: {about} with no tokens")));
        }
        Ok((Part { len, about: Some(about), named: named_files, made }, sources))
    }

    fn in_memory(&self) -> u64 {
        self.made.as_ref().and_then(|(file, _)| file.metadata().ok()).map_or(0, |made| made.len())
    }

    fn handover(&self, variable: &'static str) -> Option<(&'static str, String)> {
        let about = self.about.as_deref().unwrap_or_default();
        self.made.as_ref().map(|(file, by)| (variable, format!("{} {by} {about}", file.as_raw_fd())))
    }
}

impl Feed {
    /// Uniform random tokens, enough that none is seen twice.
    pub fn random(seed: u64, vocab: usize, len: usize) -> Self {
        let tokens = Tokens::new(vec![Source::Random { seed, vocab, len }], vocab);
        let data = Part { len, about: None, named: vec![], made: None };
        Feed { train: 0..len, held_out: len..len, tokens, data, held: None }
    }

    /// The tokens of `input`, of text by `tokenizer` in this process's `share` of the machine, and those of `held`, all of
    /// which are held out. `vocab` is the model's.
    ///
    /// # Errors
    /// What cannot be read, is empty, is neither text nor tokens, or has tokens that the model does not know; a file that is
    /// among both.
    pub fn open(
        input: Input,
        held: Option<Input>,
        tokenizer: Option<&Tokenizer>,
        vocab: usize,
        share: Share,
    ) -> Result<Self> {
        if let Some(held) = &held {
            held::check_apart(held, input.files())?;
        }
        let (data, mut sources) = Part::open("--data", input, tokenizer, vocab, share)?;
        let mut held_out = None;
        if let Some(input) = held {
            let rest = share.beside(data.in_memory());
            let (part, more) = Part::open("--val-data", input, tokenizer, vocab, rest)?;
            sources.extend(more);
            held_out = Some(part);
        }
        let tokens = Tokens::new(sources, vocab);
        let (train, all) = (data.len, tokens.len());
        Ok(Feed { tokens, train: 0..train, held_out: train..all, data, held: held_out })
    }

    /// Finds tokens that the model does not know before they are met in the midst of a run.
    ///
    /// # Errors
    /// The first, with its place.
    pub fn check_tokens(&self) -> Result<()> {
        self.tokens.check().map_err(Failure::usage)
    }

    /// Holds out the last `fraction` of the tokens for validation, but no more than `most`, where none are named for it.
    ///
    /// # Errors
    /// A fraction outside 0 to below 1.
    pub fn hold_out(mut self, fraction: f64, most: usize) -> Result<Self> {
        if self.held.is_none() {
            let (train, _) = self.tokens.split(fraction).map_err(Failure::usage)?;
            let (all, held_out) = (self.tokens.len(), (self.tokens.len() - train.end).min(most));
            (self.train, self.held_out) = (0..all - held_out, all - held_out..all);
        }
        Ok(self)
    }

    /// Whether what is held out, by the fraction that was `asked` for or a usual one, holds a sequence of `length`.
    ///
    /// # Errors
    /// It does not.
    pub fn check_held_out(&self, asked: Option<&Number>, fraction: f64, length: usize) -> Result<()> {
        let short = self.held_out.len() <= length;
        match (&self.held, fraction > 0.0) {
            (Some(_), _) if short => Err(Failure::usage(format!(
                "--val-data has {} tokens, less than one sequence of {length} and its next token: give more --val-data, or \
                 a shorter --seq",
                self.held_out.len()
            ))),
            (Some(_), _) | (None, false) => Ok(()),
            (None, true) if !short => Ok(()),
            (None, true) => Err(Failure::usage(format!(
                "{} holds out {} of {} tokens, less than one sequence of {length} and its next token: give more --data, a shorter \
                 --seq, or --val-fraction 0",
                asked.map_or("--val-fraction, 0.1 by default,".to_owned(), |asked| format!(
                    "--val-fraction {asked}"
                )),
                self.held_out.len(),
                self.tokens.len()
            ))),
        }
    }

    /// The files that were asked for, by name or with a directory: none of a corpus that nobody named.
    pub fn named(&self) -> Vec<PathBuf> {
        self.parts().flat_map(|part| &part.named).cloned().collect()
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.data).chain(&self.held)
    }

    /// Bytes of the tokens that this process keeps in memory, where its ranks find them: none of files, which are read.
    pub fn in_memory(&self) -> u64 {
        self.parts().map(Part::in_memory).sum()
    }

    /// Whether files were named to be held out.
    pub fn names_held_out(&self) -> bool {
        self.held.is_some()
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

    /// The environment variables by which ranks find the tokens that were made from text.
    pub fn handover(&self) -> Vec<(&'static str, String)> {
        let held = self.held.as_ref().and_then(|held| held.handover(HELD_HANDED));
        self.data.handover(HANDED).into_iter().chain(held).collect()
    }

    /// A phrase such as `1.2M tokens of 34 text files, 0.12M of them held out`.
    pub fn describe(&self) -> String {
        let Some(about) = &self.data.about else { return RANDOM_TOKENS.to_owned() };
        let count = |n: usize| human::count(n as f64);
        let held_out = match (&self.held, self.held_out.len()) {
            (Some(held), n) => {
                format!(", {} of {} held out", count(n), held.about.as_deref().unwrap_or_default())
            }
            (None, 0) => String::new(),
            (None, n) => format!(", {} of them held out", count(n)),
        };
        format!("{} tokens of {about}{held_out}", count(self.data.len))
    }

    /// What tells the tokens of `--data` from others: how many there are, and a digest of some of them.
    pub fn fingerprint(&self) -> String {
        let (all, digest) = (self.data.len, self.digest(0..self.data.len));
        format!("of {all} tokens, {} held out, digest {digest}", self.held_of_data())
    }

    /// The same of those of `--val-data`.
    pub fn held_fingerprint(&self) -> String {
        match self.held {
            Some(_) => {
                format!("of {} tokens, digest {}", self.held_out.len(), self.digest(self.held_out.clone()))
            }
            None => "not given".to_owned(),
        }
    }

    /// How many tokens of `--data` were held out then and are now, by their fingerprints, where nothing else is otherwise.
    pub fn held_otherwise<'a>(then: &'a str, now: &'a str) -> Option<[&'a str; 2]> {
        let parts = |told: &'a str| {
            let (all, rest) = told.split_once(", ")?;
            let (held_out, digest) = rest.split_once(" held out, ")?;
            Some(((all, digest), held_out))
        };
        let ((data, then), (same, now)) = (parts(then)?, parts(now)?);
        (data == same && then != now).then_some([then, now])
    }

    /// How many tokens of `--data` are held out.
    fn held_of_data(&self) -> usize {
        self.data.len - self.train.len()
    }

    fn digest(&self, of: Range<usize>) -> String {
        /// Places that are looked at, and tokens at each.
        const LOOKS: usize = 61;
        const LOOK: usize = 16;
        let mut some = [0u32; LOOK];
        let mut seen = Vec::with_capacity(LOOKS * LOOK);
        for place in 0..LOOKS {
            let count = LOOK.min(of.len());
            let start = of.start + (of.len() - count) / (LOOKS - 1) * place;
            // Tokens that the model does not know are found where they are used.
            if self.tokens.read(start, &mut some[..count]).is_ok() {
                seen.extend_from_slice(&some[..count]);
            }
        }
        format!("{:016x}", collectives::digest(seen))
    }

    /// All of that as JSON, and the paths by which they were `asked` for, if any.
    pub fn json(&self, asked: &[PathBuf]) -> Value {
        let mut all = described(&self.data, asked, self.digest(0..self.data.len));
        all["held_out"] = json!(self.held_of_data());
        all
    }

    /// The same of what is held out by name; null without.
    pub fn held_json(&self, asked: &[PathBuf]) -> Value {
        let digest = || self.digest(self.held_out.clone());
        self.held.as_ref().map_or(Value::Null, |held| described(held, asked, digest()))
    }
}

fn described(part: &Part, asked: &[PathBuf], digest: String) -> Value {
    json!({
        "source": part.about.as_deref().unwrap_or(RANDOM_TOKENS),
        "paths": asked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
        "tokens": part.len,
        "digest": digest,
    })
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
