//! The token that `--append-eod` puts behind each text, so that none goes on as the next.

use super::Tokenizer;
use crate::failure::{Failure, Result};
use crate::save;

impl Tokenizer {
    /// Puts behind each text from now on the token that ends one, by what lies beside the tokenizer's file.
    ///
    /// # Errors
    /// Nothing names one, as of bytes.
    pub fn append_eod(&mut self) -> Result<()> {
        let end = save::end_token(self)?;
        let name = self.name().to_owned();
        match (self, end) {
            (Tokenizer::HuggingFace(t), Some(end)) => {
                t.eod = Some(end);
                // It is in every text, even if it is an added token.
                t.plain = t.plain.max(end as usize + 1);
                Ok(())
            }
            (Tokenizer::HuggingFace(_), None) => Err(Failure::usage(format!(
                "--append-eod: tokenizer {name} has no token that ends a text: take a tokenizer.json beside which a \
                 tokenizer_config.json names its eos_token"
            ))),
            (Tokenizer::Bytes, _) => Err(Failure::usage(
                "--append-eod puts a tokenizer's token behind each text, and bytes have none that ends one: name a \
                 tokenizer.json with --tokenizer, or leave it away",
            )),
        }
    }

    /// The token that it puts behind each text.
    pub fn eod(&self) -> Option<u32> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => t.eod,
        }
    }

    /// The same in words.
    pub fn eod_told(tokenizer: Option<&Tokenizer>) -> String {
        tokenizer.and_then(Tokenizer::eod).map_or("off".into(), |token| format!("token {token}"))
    }
}

/// The same text with the token behind it, unless it has that there by its post-processor or as it is written. Nothing
/// stays nothing.
pub(super) fn ended(mut tokens: Vec<u32>, eod: Option<u32>) -> Vec<u32> {
    tokens.extend(eod.filter(|eod| tokens.last().is_some_and(|last| last != eod)));
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_with_the_token_once_and_nothing_with_none() {
        for (tokens, eod, expected) in [
            (&[1, 2][..], Some(7), &[1, 2, 7][..]),
            (&[1, 7], Some(7), &[1, 7]),
            (&[7, 1], Some(7), &[7, 1, 7]),
            (&[], Some(7), &[]),
            (&[1, 2], None, &[1, 2]),
        ] {
            assert_eq!(ended(tokens.to_vec(), eod), expected);
        }
    }
}
