//! Token data: files in llm.c's format, text as bytes, tokens in memory, or random ones, read by position; and
//! which tokens make which batch.

mod file;
mod order;

pub use file::{MOST_TOKENS, OTHER_ORDER, TokenFile, TokenWidth, TokenWriter, is_swapped};
pub use order::{BatchPlan, Order, Windows};

use crate::error::{Error, Result};
use crate::init::Stream;
use std::ops::Range;

/// Where tokens come from.
#[derive(Debug)]
pub enum Source {
    /// A file: llm.c's format, or text whose bytes are the tokens.
    File(TokenFile),
    /// Tokens that were made in memory, such as by a tokenizer; `name` is for errors.
    Memory {
        /// What the tokens were made from.
        name: String,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// Uniform random tokens, a function of seed and position; for benchmarks.
    Random {
        /// Chooses the tokens.
        seed: u64,
        /// Tokens are below this.
        vocab: usize,
        /// How many there are.
        len: usize,
    },
}

impl Source {
    /// Tokens.
    pub fn len(&self) -> usize {
        match self {
            Source::File(file) => file.len(),
            Source::Memory { tokens, .. } => tokens.len(),
            Source::Random { len, .. } => *len,
        }
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn name(&self) -> String {
        match self {
            Source::File(file) => file.path().display().to_string(),
            Source::Memory { name, .. } => name.clone(),
            Source::Random { .. } => "random tokens".into(),
        }
    }

    /// Tokens `start..start + out.len()`, which exist.
    fn read(&self, start: usize, out: &mut [u32]) -> Result<()> {
        match self {
            Source::File(file) => file.read(start, out)?,
            Source::Memory { tokens, .. } => out.copy_from_slice(&tokens[start..start + out.len()]),
            Source::Random { seed, vocab, .. } => {
                let stream = Stream::new(*seed, "tokens");
                for (token, index) in out.iter_mut().zip(start as u64..) {
                    *token = below(stream.bits(index), *vocab as u64) as u32;
                }
            }
        }
        Ok(())
    }

    /// Whether some token may be outside a vocabulary of so many.
    fn may_pass(&self, vocab: usize) -> bool {
        match self {
            Source::File(file) => vocab < file.width().vocab(),
            Source::Memory { .. } => true,
            Source::Random { vocab: below, .. } => vocab < *below,
        }
    }
}

/// Scales 64 uniform bits to `0..n`; off uniform by less than n in 2^64.
#[inline(always)]
fn below(bits: u64, n: u64) -> u64 {
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

/// Several sources as one sequence of tokens below a vocabulary.
#[derive(Debug)]
pub struct Tokens {
    sources: Vec<Source>,
    /// Where each source starts, and the end of the last.
    starts: Vec<usize>,
    vocab: usize,
}

impl Tokens {
    /// The sources one after the other, for a model of `vocab` tokens.
    pub fn new(sources: Vec<Source>, vocab: usize) -> Self {
        let sources: Vec<Source> = sources.into_iter().filter(|s| !s.is_empty()).collect();
        let mut starts = vec![0];
        for source in &sources {
            starts.push(starts[starts.len() - 1] + source.len());
        }
        Tokens { sources, starts, vocab }
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.starts[self.sources.len()]
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens `start..start + out.len()`. Allocates nothing unless it fails.
    ///
    /// # Errors
    /// The range passes the end, one of its tokens is outside the vocabulary, or its file cannot be read; each names
    /// the place.
    pub fn read(&self, start: usize, out: &mut [u32]) -> Result<()> {
        if out.len() > self.len() || start > self.len() - out.len() {
            let (count, len) = (out.len(), self.len());
            return Err(Error::config(format!("{count} tokens from {start} were asked for, of {len}")));
        }
        let mut source = self.starts.partition_point(|&s| s <= start).saturating_sub(1);
        let mut done = 0;
        while done < out.len() {
            let at = start + done;
            let part = (self.starts[source + 1] - at).min(out.len() - done);
            let within = at - self.starts[source];
            let part = &mut out[done..done + part];
            self.sources[source].read(within, part)?;
            if let Some(bad) = part.iter().position(|&t| t as usize >= self.vocab) {
                return Err(Error::config(format!(
                    "token {} of {} is {}, and the model's vocabulary is {}: a model of a larger vocabulary or \
                     data of another tokenizer is needed",
                    within + bad,
                    self.sources[source].name(),
                    part[bad],
                    self.vocab
                )));
            }
            done += part.len();
            source += 1;
        }
        Ok(())
    }

    /// Reads the tokens of files that may hold some outside the vocabulary, so that none is met after hours: up to 2^26, and
    /// where there are more of them parts all over them, at least one of each file.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn check(&self) -> Result<()> {
        let mut some = vec![0; Self::PART];
        self.parts().try_for_each(|part| self.read(part.start, &mut some[..part.len()]))
    }

    /// Tokens that are looked at without a gap, and how many such parts are looked at beside the first of each file.
    const PART: usize = 1 << 16;
    const PARTS: usize = 1 << 10;

    /// What [`check`](Self::check) looks at.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> {
        let bounds = self.starts.windows(2).map(|bounds| bounds[0]..bounds[1]);
        let unsure: Vec<Range<usize>> = (self.sources.iter().zip(bounds))
            .filter_map(|(source, bounds)| source.may_pass(self.vocab).then_some(bounds))
            .collect();
        let all: usize = unsure.iter().map(Range::len).sum();
        let every = all.div_ceil(Self::PART * Self::PARTS).max(1);
        unsure.into_iter().flat_map(move |bounds| {
            let starts = bounds.clone().step_by(Self::PART * every);
            starts.map(move |start| start..bounds.end.min(start + Self::PART))
        })
    }

    /// The first part for training, the last `fraction` (0 to below 1) held out for validation.
    ///
    /// # Errors
    /// A fraction outside of that range.
    pub fn split(&self, fraction: f64) -> Result<(Range<usize>, Range<usize>)> {
        if !(0.0..1.0).contains(&fraction) {
            return Err(Error::config(format!(
                "the fraction of tokens held out for validation is {fraction}: it must be at least 0 and below 1"
            )));
        }
        // Of more than an f64 can count it may be rounded to more.
        let train = (((1.0 - fraction) * self.len() as f64) as usize).min(self.len());
        Ok((0..train, train..self.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(tokens: &[u32]) -> Source {
        Source::Memory { name: "a.txt".into(), tokens: tokens.to_vec() }
    }

    #[test]
    fn sources_read_as_one_sequence() {
        let sources =
            vec![memory(&[]), memory(&[0, 1, 2]), memory(&[]), memory(&[3]), memory(&[4, 5]), memory(&[])];
        let tokens = Tokens::new(sources, 6);
        assert_eq!(tokens.len(), 6);
        for start in 0..=6 {
            for end in start..=6 {
                let mut out = vec![9; end - start];
                tokens.read(start, &mut out).unwrap();
                assert_eq!(out, (start as u32..end as u32).collect::<Vec<_>>());
            }
        }
        assert!(tokens.read(6, &mut [0]).is_err());
        assert!(tokens.read(usize::MAX, &mut [0]).is_err());
        assert!(tokens.read(0, &mut [0; 7]).is_err());
        assert!(Tokens::new(vec![], 1).is_empty());
        Tokens::new(vec![], 1).read(0, &mut []).unwrap();
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named() {
        let tokens = Tokens::new(vec![memory(&[0, 1]), memory(&[2, 5, 1])], 5);
        tokens.read(0, &mut [0; 3]).unwrap();
        let text = tokens.read(1, &mut [0; 3]).unwrap_err().to_string();
        assert!(text.contains("token 1 of a.txt is 5") && text.contains("vocabulary is 5"), "{text}");
        assert_eq!(tokens.check().unwrap_err().to_string(), text);
        Tokens::new(vec![memory(&[0, 1]), memory(&vec![4; 100_000])], 5).check().unwrap();
    }

    #[test]
    fn the_look_at_tokens_is_bounded_over_all_files() {
        let random = |len| Source::Random { seed: 3, vocab: 10, len };
        let known = Source::Random { seed: 3, vocab: 5, len: 100 };
        let parts = |sources| Tokens::new(sources, 5).parts().collect::<Vec<_>>();
        // All of what is small, but for what cannot pass.
        let small = parts(vec![random(100_000), known, random(10)]);
        assert_eq!(small, [0..65_536, 65_536..100_000, 100_100..100_110]);
        // And of a hundred large files no more than of one, in parts all over them.
        for files in [1, 100] {
            let large = (0..files).map(|_| random(1 << 34)).chain([random(10)]).collect();
            let parts = parts(large);
            let looked: usize = parts.iter().map(Range::len).sum();
            assert!(
                (1 << 25..=(1 << 26) + (files + 1) * Tokens::PART).contains(&looked),
                "{looked} of {files}"
            );
            assert!((0..files).all(|file| parts.iter().any(|part| part.start == file << 34)), "of {files}");
            assert_eq!(parts.last(), Some(&(files << 34..(files << 34) + 10)));
        }
    }

    #[test]
    fn random_tokens_depend_on_the_position_alone_and_are_uniform() {
        let source = || Source::Random { seed: 3, vocab: 10, len: 1 << 40 };
        let tokens = Tokens::new(vec![source(), source()], 10);
        let mut all = vec![0; 100_000];
        tokens.read(0, &mut all).unwrap();
        let mut part = vec![0; 1000];
        tokens.read(777, &mut part).unwrap();
        assert_eq!(part, all[777..1777]);
        let mut counts = [0i32; 10];
        all.iter().for_each(|&t| counts[t as usize] += 1);
        // Five deviations of a binomial of 100000 with p = 0.1.
        assert!(counts.iter().all(|c| (c - 10_000).abs() < 475), "{counts:?}");
    }

    #[test]
    fn the_last_fraction_is_held_out() {
        let tokens = Tokens::new(vec![Source::Random { seed: 0, vocab: 2, len: 1_115_394 }], 2);
        // As Python's int(.9 * n).
        assert_eq!(tokens.split(0.1).unwrap(), (0..1_003_854, 1_003_854..1_115_394));
        assert_eq!(tokens.split(0.0).unwrap().1.len(), 0);
        for bad in [1.0, -0.1, f64::NAN] {
            assert!(tokens.split(bad).is_err());
        }
    }
}
