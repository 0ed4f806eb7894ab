//! `caravan tokenize`: text to a token file in llm.c's format.

use crate::args::TokenizeArgs;
use crate::data;
use crate::failure::{Failure, Result};
use crate::files::{self, Way};
use crate::out;
use crate::text::{self, Reads};
use crate::tokenizer::{Batch, Tokenizer};
use models::tokens::{TokenWidth, TokenWriter};
use serde_json::json;

/// What is no text is refused with this.
const TAKES: &str =
    "tokenize takes UTF-8 text; token files are for 'caravan train' and 'caravan eval' as they are";

/// Writes the file; it appears under its name when it is complete.
pub fn tokenize(args: &TokenizeArgs) -> Result<()> {
    let tokenizer = Tokenizer::open(&args.tokenizer)?;
    files::check_writable("--out", &args.out, Way::Whole)?;
    let inputs = data::list(&args.data, Reads::Text)?;
    let read: Vec<_> = inputs.iter().cloned().chain(tokenizer.path()).collect();
    files::check_apart("--out", &args.out, &read)?;
    let width = TokenWidth::for_vocab(tokenizer.vocab());
    let mut writer = TokenWriter::create(&args.out, width).map_err(Failure::usage)?;
    let (mut bytes, mut batch) = (0u64, Batch::new(&tokenizer));
    let mut write = |texts: Vec<Vec<u32>>| texts.iter().try_for_each(|tokens| writer.push(tokens));
    for file in &inputs {
        let content = text::read(file, TAKES)?;
        bytes += content.len() as u64;
        write(batch.push(content)?).map_err(Failure::run)?;
    }
    write(batch.finish()?).map_err(Failure::run)?;
    if bytes == 0 {
        return Err(Failure::usage("the data are empty: there is nothing to make tokens of"));
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
                   "tokenizer": tokenizer.name(), "vocab": tokenizer.vocab()}),
        )?;
    } else {
        out::line(format_args!(
            "{count} tokens of {bits} bits from {bytes} bytes of text ({:.3} bytes a token) in {}",
            bytes as f64 / count as f64,
            args.out.display()
        ))?;
    }
    Ok(())
}
