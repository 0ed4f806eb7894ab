//! `caravan tokenize`: text to a token file in llm.c's format.

mod shards;

use crate::args::{Number, TokenizeArgs};
use crate::data::{self, room};
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output, Way};
use crate::human::several;
use crate::out;
use crate::text::{self, Reads};
use crate::tokenizer::{Batch, Share, Tokenizer};
use models::tokens::{MOST_TOKENS, TokenWidth};
use serde_json::json;
use shards::{SEVERAL, Shards};
use std::path::PathBuf;

/// What is no text is refused with this.
const TAKES: &str =
    "tokenize takes UTF-8 text; token files are for 'caravan train' and 'caravan eval' as they are";
/// Bytes that are tokens at once: text may be long, and its tokens are wider.
const PIECE: usize = 1 << 16;

/// Writes the file, or several; they appear under their names when all are complete.
pub fn tokenize(args: &TokenizeArgs) -> Result<()> {
    let mut tokenizer = Tokenizer::open(&args.tokenizer)?;
    if args.append_eod {
        tokenizer.append_eod()?;
    }
    files::check_name("--out", &args.out, "the name of a regular file")?;
    if files::is_descriptor(&args.out) {
        return Err(Failure::usage(format!(
            "--out {} is a stream, whose file would be replaced: tokens are written to a regular file by its name",
            args.out.display()
        )));
    }
    let length = args.shard_tokens.as_ref().map(shard_tokens).transpose()?;
    let first = length.map_or(args.out.clone(), |_| shards::shard(&args.out, 1));
    let inputs = data::list("--data", &args.data, Reads::Text)?;
    let read: Vec<_> = inputs.iter().cloned().chain(tokenizer.path()).collect();
    files::check_outputs(&[Output::whole("--out", &first, Kind::Tokens)], &read)?;
    if length.is_some() {
        // Of what is no file's name no other is made.
        files::check_writable("--out", &args.out, Way::Whole)?;
        shards::check_unused(&args.out)?;
    }
    match &tokenizer {
        Tokenizer::Bytes if length.is_none() => check_count(&inputs)?,
        Tokenizer::Bytes => {}
        Tokenizer::HuggingFace(_) => room::check_texts("--data", &inputs)?,
    }
    let width = TokenWidth::for_vocab(tokenizer.vocab());
    let mut writer = Shards::create(&args.out, width, length)?;
    if let Some(remark) = text::structured(inputs.iter()) {
        out::note(remark);
    }
    let (mut bytes, mut batch) = (0u64, Batch::new(&tokenizer, Share::of(None)));
    let write =
        |writer: &mut Shards, texts: Vec<Vec<u32>>| texts.iter().try_for_each(|tokens| writer.push(tokens));
    for file in &inputs {
        let content = text::read("--data", file, TAKES)?;
        bytes += content.len() as u64;
        match &tokenizer {
            Tokenizer::Bytes => push_bytes(&mut writer, content.as_bytes())?,
            Tokenizer::HuggingFace(_) => write(&mut writer, batch.push(content)?)?,
        }
    }
    write(&mut writer, batch.finish()?)?;
    if bytes == 0 {
        let named: Vec<_> = args.data.iter().map(|path| path.display().to_string()).collect();
        let empty = format!("--data {} is empty: there is nothing to make tokens of", named.join(" "));
        return Err(Failure::usage(empty));
    }
    if writer.is_empty() {
        return Err(Failure::usage(format!(
            "tokenizer {} makes no tokens of {bytes} bytes of text: take one that knows this text",
            tokenizer.name()
        )));
    }
    let (count, written) = writer.finish()?;
    let bits = if width == TokenWidth::U16 { 16 } else { 32 };
    if args.json {
        let files: Vec<_> = written.iter().map(|file| file.display().to_string()).collect();
        out::line(
            json!({"out": args.out.display().to_string(), "files": files, "tokens": count, "token_bits": bits,
                   "text_bytes": bytes, "tokenizer": tokenizer.name(), "vocab": tokenizer.vocab(),
                   "append_eod": tokenizer.eod()}),
        )?;
    } else {
        out::line(format_args!(
            "{} of {bits} bits from {} of text ({:.3} bytes a token) in {}",
            several(count as usize, "token"),
            several(bytes as usize, "byte"),
            bytes as f64 / count as f64,
            match &written[..] {
                [first, .., last] =>
                    format!("{} files, {} to {}", written.len(), first.display(), last.display()),
                _ => first.display().to_string(),
            }
        ))?;
    }
    Ok(())
}

/// How many tokens a file of several is to have.
fn shard_tokens(asked: &Number) -> Result<u64> {
    let length = asked.value();
    match length.fract() == 0.0 && (1.0..=MOST_TOKENS as f64).contains(&length) {
        true => Ok(length as u64),
        false => Err(Failure::usage(format!(
            "--shard-tokens {asked}: a token file has between 1 and {MOST_TOKENS} tokens, and a whole number of them"
        ))),
    }
}

/// Whether one file can count the bytes of these, as far as their sizes are known.
fn check_count(inputs: &[PathBuf]) -> Result<()> {
    let bytes: u64 = inputs.iter().filter_map(|file| file.metadata().ok()).map(|there| there.len()).sum();
    match bytes > MOST_TOKENS {
        false => Ok(()),
        true => Err(Failure::usage(format!(
            "--data has {bytes} bytes of text, each of them a token, and a token file holds at most {MOST_TOKENS}: {SEVERAL}"
        ))),
    }
}

/// Appends bytes as tokens.
fn push_bytes(writer: &mut Shards, bytes: &[u8]) -> Result<()> {
    let mut tokens = Vec::with_capacity(PIECE.min(bytes.len()));
    bytes.chunks(PIECE).try_for_each(|piece| {
        tokens.clear();
        tokens.extend(piece.iter().copied().map(u32::from));
        writer.push(&tokens)
    })
}
