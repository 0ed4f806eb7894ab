//! Tokens that are made of text before ranks start, for all of them.

use super::TAKES;
use super::room::Room;
use crate::failure::{Failure, Result};
use crate::text;
use crate::tokenizer::{Batch, Share, Tokenizer};
use crate::transports::unmounted;
use models::tokens::{Source, TokenFile, TokenWidth};
use rustix::io::{Errno, FdFlags};
use std::fs::File;
use std::io::{Seek, Write};
use std::path::PathBuf;

/// What needs no such file.
const FILES: &str = "'caravan tokenize' makes token files of text, which are read where they lie";

/// What tells a tokenizer from others in one word.
pub(super) fn mark(tokenizer: &Tokenizer) -> String {
    let told = format!("{} {}", tokenizer.fingerprint(), Tokenizer::eod_told(Some(tokenizer)));
    format!("{:016x}", collectives::digest(told.bytes()))
}

/// The tokens that [`make`] made.
pub(super) fn source(path: &str, tokenizer: &Tokenizer) -> Result<Source> {
    let file = match tokenizer {
        Tokenizer::Bytes => TokenFile::open_bytes(path),
        Tokenizer::HuggingFace(_) => TokenFile::open(path),
    };
    file.map(Source::File).map_err(|e| match unmounted(path) {
        Some(why) => Failure::run(format!("cannot read tokens from memory: {why}; {FILES}")),
        None => Failure::run(e),
    })
}

/// What to say where there is to be no file for them.
fn no_file(refusal: Errno) -> Failure {
    let words = collectives::system_words(refusal);
    Failure::run(format!("cannot keep tokens in memory (memfd_create): {words}; {FILES}"))
}

/// Tokens of the text that `flag` names, in an anonymous file that child processes inherit. Files that are no text are a
/// failure, or go from `files` to `left_out`.
pub(super) fn make(
    flag: &str,
    files: &mut Vec<PathBuf>,
    left_out: &mut Option<Vec<PathBuf>>,
    tokenizer: &Tokenizer,
    vocab: usize,
    share: Share,
) -> Result<File> {
    let sizes: Vec<u64> = files.iter().map(|path| path.metadata().map_or(0, |m| m.len())).collect();
    let text = sizes.iter().sum();
    let mut room = Room { flag, text, ranks: share.ranks as u64, have: share.memory };
    // Tokens take about as much as their text, and the largest text is there beside them.
    room.check(text + sizes.iter().max().unwrap_or(&0))?;
    let refused = |e: std::io::Error| {
        let limit = match e.kind() {
            std::io::ErrorKind::FileTooLarge => {
                ", by the limit of file sizes (ulimit -f), which can be raised"
            }
            _ => "",
        };
        Failure::run(format!("cannot keep tokens in memory: {e}{limit}"))
    };
    let fd = collectives::bootstrap::anonymous("caravan-tokens").map_err(no_file)?;
    rustix::io::fcntl_setfd(&fd, FdFlags::empty()).map_err(|e| refused(e.into()))?;
    let mut file = File::from(fd);
    let width = match tokenizer {
        Tokenizer::Bytes => TokenWidth::U8,
        Tokenizer::HuggingFace(_) => TokenWidth::U32,
    };
    file.write_all(&width.header_for(0).map_err(Failure::usage)?).map_err(refused)?;
    let (mut read, mut count, mut checked) = (0, 0, 0);
    let mut taken = Vec::with_capacity(files.len());
    let mut batch = Batch::new(tokenizer, share);
    let takes = format!("{flag} {TAKES}");
    // How many tokens there are with those of the next texts, which are those of the files `taken` that came next.
    let mut keep = |file: &mut File, texts: Vec<Vec<u32>>, taken: &[PathBuf], room: &Room<'_>| {
        check_known(flag, &texts, &taken[checked..], tokenizer, vocab)?;
        checked += texts.len();
        let new: usize = texts.iter().map(Vec::len).sum();
        // These are there twice while they are written.
        room.check(bytes_of(count + 2 * new))?;
        append(file, &texts).map_err(refused)?;
        count += new;
        match count > i32::MAX as usize {
            false => Ok(count),
            true => Err(Failure::usage(format!(
                "{flag} has 2^31 tokens of text or more: 'caravan tokenize --shard-tokens 100000000' makes token files of it, \
                 all of which {flag} then names",
            ))),
        }
    };
    for path in files.drain(..) {
        let text = match (text::read(flag, &path, &takes), &mut *left_out) {
            (Err(_), Some(left_out)) => {
                left_out.push(path);
                continue;
            }
            (text, _) => text?,
        };
        taken.push(path);
        // A pipe does not say how much comes.
        read += text.len() as u64;
        room.text = room.text.max(read);
        match tokenizer {
            Tokenizer::Bytes => {
                room.check(read + text.len() as u64)?;
                file.write_all(text.as_bytes()).map_err(refused)?;
            }
            Tokenizer::HuggingFace(_) => {
                let count = keep(&mut file, batch.push(text)?, &taken, &room)?;
                batch.leave(share.beside(bytes_of(count)));
            }
        }
    }
    let count = keep(&mut file, batch.finish()?, &taken, &room)?;
    *files = taken;
    let header = width.header_for(count).map_err(Failure::usage)?;
    file.rewind().and_then(|()| file.write_all(&header)).map_err(refused)?;
    Ok(file)
}

/// Whether the model knows the tokens of these texts, which were made of these files.
fn check_known(
    flag: &str,
    texts: &[Vec<u32>],
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    vocab: usize,
) -> Result<()> {
    let unknown = |tokens: &Vec<u32>| tokens.iter().copied().find(|&token| token as usize >= vocab);
    let first = texts.iter().zip(files).find_map(|(tokens, file)| Some((unknown(tokens)?, file)));
    let Some((token, file)) = first else { return Ok(()) };
    Err(Failure::usage(format!(
        "{flag} {} has '{}', which tokenizer {} takes for its token {token}, and the model's vocabulary is {vocab}: text \
         without it or a model of a larger vocabulary is needed",
        file.display(),
        tokenizer.spelling(token),
        tokenizer.name()
    )))
}

/// Bytes of so many tokens of a tokenizer's.
fn bytes_of(tokens: usize) -> u64 {
    (tokens * size_of::<u32>()) as u64
}

/// Writes the tokens of these texts.
fn append(file: &mut File, texts: &[Vec<u32>]) -> std::io::Result<()> {
    for part in texts.iter().flat_map(|tokens| tokens.chunks(1 << 16)) {
        let bytes: Vec<u8> = part.iter().flat_map(|t| t.to_le_bytes()).collect();
        file.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};

    #[test]
    fn a_system_without_anonymous_files_has_token_files() {
        let said = no_file(Errno::PERM).to_string();
        let words = ["(memfd_create): Operation not permitted", "; 'caravan tokenize' makes token files"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }

    #[test]
    fn tokens_that_take_more_memory_than_their_text_are_refused_before_they_are_written() {
        let home = tempfile::tempdir().unwrap();
        let [text, path] = ["corpus.txt", "tokenizer.json"].map(|name| home.path().join(name));
        std::fs::write(&text, "one two ".repeat(8 << 10)).unwrap();
        // Each byte of this text is a token.
        let vocab: Map<String, Value> = ["o", "n", "e", "t", "w", "\u{120}"]
            .iter()
            .zip(0..)
            .map(|(t, i)| ((*t).into(), json!(i)))
            .collect();
        let words =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let model = json!({"type": "BPE", "vocab": vocab, "merges": []});
        std::fs::write(&path, json!({"version": "1.0", "pre_tokenizer": words, "model": model}).to_string())
            .unwrap();
        let tokenizer = Tokenizer::open(&path).unwrap();
        let made = |kib: u64| {
            let mut share = Share::of(None);
            share.memory = kib << 10;
            make("--data", &mut vec![text.clone()], &mut None, &tokenizer, 256, share)
        };
        assert_eq!(made(512).unwrap().metadata().unwrap().len(), 1024 + (256 << 10));
        for kib in [100, 500] {
            let e = made(kib).unwrap_err();
            let words = "--data has 64.0 KiB of text, whose tokens are kept in memory";
            assert!(e.code() == 2 && e.to_string().contains(words), "{e}");
        }
    }
}
