//! Text to tokens and back: bytes, or a Hugging Face tokenizer.json.

use crate::failure::{Failure, Result};
use std::path::Path;

/// Turns text into tokens and tokens into text.
pub enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// A Hugging Face tokenizer.json, and where it came from.
    HuggingFace(Box<tokenizers::Tokenizer>, String),
}

impl Tokenizer {
    /// `bytes`, or the path of a tokenizer.json.
    ///
    /// # Errors
    /// A file that is missing or is no tokenizer.
    pub fn open(spec: &str) -> Result<Self> {
        if spec == "bytes" {
            return Ok(Tokenizer::Bytes);
        }
        let path = Path::new(spec);
        if !path.is_file() {
            return Err(Failure::usage(format!(
                "tokenizer '{spec}' is no file: give 'bytes' or the path of a Hugging Face tokenizer.json"
            )));
        }
        let inner = tokenizers::Tokenizer::from_file(path).map_err(|e| {
            Failure::usage(format!("tokenizer '{spec}' is not a Hugging Face tokenizer.json: {e}"))
        })?;
        Ok(Tokenizer::HuggingFace(Box::new(inner), spec.to_owned()))
    }

    /// What to call it in reports.
    pub fn name(&self) -> &str {
        match self {
            Tokenizer::Bytes => "bytes",
            Tokenizer::HuggingFace(_, path) => path,
        }
    }

    /// The content of the tokenizer.json, for a saved model; None for bytes.
    ///
    /// # Errors
    /// A file that cannot be read any more.
    pub fn file(&self) -> Result<Option<Vec<u8>>> {
        match self {
            Tokenizer::Bytes => Ok(None),
            Tokenizer::HuggingFace(_, path) => std::fs::read(path)
                .map(Some)
                .map_err(|e| Failure::run(format!("cannot read tokenizer {path} again: {e}"))),
        }
    }

    /// What tells it from others, wherever their files lie.
    pub fn fingerprint(&self) -> String {
        match self.file() {
            Ok(Some(text)) => format!("a file, digest {:016x}", collectives::digest(text)),
            Ok(None) => self.name().to_owned(),
            // Who saves it reads it again, and fails then.
            Err(_) => "a file that cannot be read again".to_owned(),
        }
    }

    /// One more than the largest token it can make.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::HuggingFace(t, _) => {
                t.get_vocab(true).values().map(|&id| id as usize + 1).max().unwrap_or(0)
            }
        }
    }

    /// The tokens of one text, as transformers gives them: with whatever the tokenizer puts around a text.
    ///
    /// # Errors
    /// Text that the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::HuggingFace(t, path) => {
                let encoding = t.encode_fast(text, true);
                let encoding = encoding.map_err(|e| Failure::run(format!("tokenizer '{path}': {e}")))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Readable text for tokens; what is no text shows as replacement characters.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Tokenizer::Bytes => {
                // A model may have a larger vocabulary than bytes; its other tokens stand for nothing.
                let bytes: Vec<u8> = tokens.iter().map(|&t| u8::try_from(t).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::HuggingFace(t, _) => {
                t.decode(tokens, true).unwrap_or_else(|e| format!("(not decodable: {e})"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_as_they_were() {
        let text = "Grüße, 世界\n";
        let tokens = Tokenizer::Bytes.encode(text).unwrap();
        assert_eq!(tokens.len(), text.len());
        assert_eq!(Tokenizer::Bytes.decode(&tokens), text);
        assert!(tokens.iter().all(|&t| (t as usize) < Tokenizer::Bytes.vocab()));
        assert_eq!(Tokenizer::Bytes.decode(&[300, 65]), "\u{fffd}A");
    }

    #[test]
    fn what_is_no_tokenizer_is_an_error_that_names_it() {
        for spec in ["word", "/nonexistent/tokenizer.json", "Cargo.toml"] {
            let Err(e) = Tokenizer::open(spec) else { panic!("{spec} opened") };
            assert_eq!(e.code(), 2);
            assert!(e.to_string().contains(&format!("'{spec}'")), "{e}");
        }
    }
}
