//! What a process may take of its machine while it tokenises: where something else has started ranks, each of them tokenises
//! all of a text, at the same time.

use super::segments::Sizes;
use super::{MEMORY_OF_A_BYTE, SHORT};
use crate::human;
use crate::machine::Machine;
use collectives::bootstrap::{self, Identity};

/// One process's share of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// How many processes of this host tokenise like this one.
    pub ranks: usize,
    /// Bytes of memory, of all of them.
    pub memory: u64,
    /// Threads of this one.
    pub(super) threads: usize,
}

impl Share {
    /// That of this process, whose place among the ranks is `identity`, if something has started those.
    pub fn of(identity: Option<&Identity>) -> Self {
        let ranks = identity.and_then(|identity| identity.local_size).unwrap_or(1).max(1);
        // As many as a rank computes with.
        let processors = (bootstrap::processors_of_host(identity) / ranks).clamp(1, bootstrap::processors());
        Self::new(ranks, processors, Machine::probe().usable_memory())
    }

    /// What is left of it beside so many bytes of each process.
    pub fn beside(self, bytes: u64) -> Self {
        Share { memory: self.memory.saturating_sub(bytes.saturating_mul(self.ranks as u64)), ..self }
    }

    fn new(ranks: usize, processors: usize, memory: u64) -> Self {
        let segment = Sizes::USUAL.segment as u64 * MEMORY_OF_A_BYTE;
        let room = memory / ranks as u64 / segment;
        Share { ranks, memory, threads: processors.min(room as usize).max(1) }
    }

    /// Bytes of text that each process can tokenise in one piece at the same time.
    pub(super) fn longest(&self) -> u64 {
        let ranks = self.ranks as u64;
        (self.memory / ranks / MEMORY_OF_A_BYTE).max(SHORT / ranks)
    }

    /// Whether a text of so many bytes can be tokenised in one piece, and what would help.
    ///
    /// # Errors
    /// What it takes and what there is.
    pub(super) fn fits(&self, text: u64) -> Result<(), String> {
        if text <= self.longest() {
            return Ok(());
        }
        let most = self.memory / self.ranks as u64 / MEMORY_OF_A_BYTE / 2;
        let need = text.saturating_mul(MEMORY_OF_A_BYTE);
        let ([text, need, most, have], by) = ([text, need, most, self.memory].map(human::bytes), self.by());
        Err(format!(
            "a text of {text} cannot be cut at words, and in one piece it takes about {need} of memory while it is \
             tokenised{by}, of which this machine has {have}; files of {most} at most would fit"
        ))
    }

    /// Whether so many tokens can be held beside the text of so many bytes that they were made of, and what would help.
    ///
    /// # Errors
    /// What both take and what there is.
    pub(super) fn holds(&self, text: u64, tokens: usize) -> Result<(), String> {
        let need = text + (tokens * size_of::<u32>()) as u64;
        if need.saturating_mul(self.ranks as u64) <= self.memory {
            return Ok(());
        }
        let ([text, have], by) = ([text, self.memory].map(human::bytes), self.by());
        Err(format!(
            "a text of {text} and its tokens, which are more than {tokens}, take more memory{by} than this machine has, \
             {have}: split it into smaller files"
        ))
    }

    /// Who takes what is said, where that are several.
    fn by(&self) -> String {
        if self.ranks > 1 { format!(" by each of {} ranks", self.ranks) } else { String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_would_take_all_memory_is_refused_before() {
        let of = |ranks, gib: u64| Share::new(ranks, 4, gib << 30).fits(1 << 30);
        assert_eq!(of(1, 256), Ok(()));
        let text = of(1, 32).unwrap_err();
        assert!(text.contains("a text of 1.00 GiB") && text.contains("32.0 GiB; files of 109"), "{text}");
        let text = of(2, 256).unwrap_err();
        let words = ["150.0 GiB", "by each of 2 ranks", "256.0 GiB; files of 436.9 MiB"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert_eq!(of(2, 512), Ok(()));
    }

    #[test]
    fn ranks_of_a_host_have_no_more_threads_and_memory_together_than_it_has() {
        let threads = |ranks, processors, gib: u64| Share::new(ranks, processors, gib << 30).threads;
        assert_eq!([threads(1, 64, 64), threads(64, 1, 64)], [64, 1]);
        // Segments of all threads are in memory at the same time.
        assert_eq!([threads(1, 64, 1), threads(4, 16, 4), threads(64, 1, 1)], [6, 6, 1]);
        let local = |size| Identity { local_size: Some(size), world: size, ..Identity::alone() };
        let (alone, among) = (Share::of(None), Share::of(Some(&local(1024))));
        assert_eq!((alone.ranks, among.ranks, among.threads), (1, 1024, 1));
        assert!(alone.threads <= bootstrap::processors() && alone.memory == among.memory);
    }
}
