//! Texts that come one after the other.

use super::Share;
use super::Tokenizer::{self, HuggingFace};
use super::segments::Sizes;
use crate::failure::Result;
use collectives::parallel;

/// Bytes of texts that are worth tokenising side by side.
const BATCH: usize = 4 << 20;

/// Texts that come one after the other and are tokenised side by side.
pub struct Batch<'t> {
    tokenizer: &'t Tokenizer,
    share: Share,
    texts: Vec<String>,
    bytes: usize,
}

impl<'t> Batch<'t> {
    /// One without texts, which are tokenised in this share of the machine.
    pub fn new(tokenizer: &'t Tokenizer, share: Share) -> Self {
        Batch { tokenizer, share, texts: Vec::new(), bytes: 0 }
    }

    /// Takes the next text; the tokens of it and of those before, if they are enough.
    ///
    /// # Errors
    /// Text that the tokenizer refuses, that is too long to be tokenised in one piece where it has to be, or that has more
    /// tokens than fit in memory: the first.
    pub fn push(&mut self, text: String) -> Result<Vec<Vec<u32>>> {
        self.bytes += text.len();
        self.texts.push(text);
        if self.bytes < BATCH { Ok(Vec::new()) } else { self.finish() }
    }

    /// Leaves the texts that come this share of the machine.
    pub fn leave(&mut self, share: Share) {
        self.share = share;
    }

    /// The tokens of the texts that are left.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<Vec<Vec<u32>>> {
        self.bytes = 0;
        let (texts, share) = (std::mem::take(&mut self.texts), &self.share);
        let HuggingFace(tokenizer) = self.tokenizer else {
            return texts.iter().map(|text| self.tokenizer.encode(text)).collect();
        };
        let is_long = |text: &str| Sizes::USUAL.is_long(text);
        let short: Vec<&String> = texts.iter().filter(|text| !is_long(text)).collect();
        let short = parallel::map(short.into_iter(), share.threads, |text| tokenizer.encode(text, share));
        // One that is long has segments in all threads, and memory for no more.
        let mut short = short.into_iter();
        let tokens = |text: &String| match is_long(text) {
            true => Some(tokenizer.encode(text, share)),
            false => short.next(),
        };
        texts.iter().filter_map(tokens).collect()
    }
}
