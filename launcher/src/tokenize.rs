//! `caravan tokenize`: text to a token file in llm.c's format.

use crate::args::TokenizeArgs;
use crate::data::{self, room};
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use crate::human::several;
use crate::leftovers;
use crate::out;
use crate::text::{self, Reads};
use crate::tokenizer::{Batch, Share, Tokenizer};
use models::tokens::{MOST_TOKENS, TokenWidth, TokenWriter};
use serde_json::json;
use std::path::PathBuf;

/// What is no text is refused with this.
const TAKES: &str =
    "tokenize takes UTF-8 text; token files are for 'caravan train' and 'caravan eval' as they are";
/// Bytes that are tokens at once: text may be long, and its tokens are wider.
const PIECE: usize = 1 << 16;

/// Writes the file; it appears under its name when it is complete.
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
    let inputs = data::list("--data", &args.data, Reads::Text)?;
    let read: Vec<_> = inputs.iter().cloned().chain(tokenizer.path()).collect();
    files::check_outputs(&[Output::whole("--out", &args.out, Kind::Tokens)], &read)?;
    match &tokenizer {
        Tokenizer::Bytes => check_count(&inputs)?,
        Tokenizer::HuggingFace(_) => room::check_texts("--data", &inputs)?,
    }
    let width = TokenWidth::for_vocab(tokenizer.vocab());
    let out = files::through_links(&args.out);
    leftovers::go_with(&out)?;
    let writer = TokenWriter::create(out, width);
    let mut writer = writer.map_err(|e| match e {
        // A file could be made there: now it is the disk, as in its midst.
        models::Error::System { .. } => Failure::run(e),
        _ => Failure::usage(e),
    })?;
    if let Some(remark) = text::structured(inputs.iter()) {
        out::note(remark);
    }
    let (mut bytes, mut batch) = (0u64, Batch::new(&tokenizer, Share::of(None)));
    let write = |writer: &mut TokenWriter, texts: Vec<Vec<u32>>| {
        texts.iter().try_for_each(|tokens| writer.push(tokens)).map_err(Failure::run)
    };
    for file in &inputs {
        let content = text::read("--data", file, TAKES)?;
        bytes += content.len() as u64;
        match &tokenizer {
            Tokenizer::Bytes => push_bytes(&mut writer, content.as_bytes()).map_err(Failure::run)?,
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
    let count = writer.finish().map_err(Failure::run)?;
    let bits = if width == TokenWidth::U16 { 16 } else { 32 };
    if args.json {
        out::line(
            json!({"out": args.out.display().to_string(), "tokens": count, "token_bits": bits, "text_bytes": bytes,
                   "tokenizer": tokenizer.name(), "vocab": tokenizer.vocab(), "append_eod": tokenizer.eod()}),
        )?;
    } else {
        out::line(format_args!(
            "{} of {bits} bits from {} of text ({:.3} bytes a token) in {}",
            several(count as usize, "token"),
            several(bytes as usize, "byte"),
            bytes as f64 / count as f64,
            args.out.display()
        ))?;
    }
    Ok(())
}

/// Whether one file can count the bytes of these, as far as their sizes are known.
fn check_count(inputs: &[PathBuf]) -> Result<()> {
    let bytes: u64 = inputs.iter().filter_map(|file| file.metadata().ok()).map(|there| there.len()).sum();
    match bytes > MOST_TOKENS {
        false => Ok(()),
        true => Err(Failure::usage(format!(
            "--data has {bytes} bytes of text, each of them a token, and a token file holds at most {MOST_TOKENS}: write \
             several of parts of it, all of which --data of 'caravan train' then names"
        ))),
    }
}

/// Appends bytes as tokens.
fn push_bytes(writer: &mut TokenWriter, bytes: &[u8]) -> models::Result<()> {
    let mut tokens = Vec::with_capacity(PIECE.min(bytes.len()));
    bytes.chunks(PIECE).try_for_each(|piece| {
        tokens.clear();
        tokens.extend(piece.iter().copied().map(u32::from));
        writer.push(&tokens)
    })
}
