//! What peers have said beside their messages, until the group that it is about asks.

use crate::watch::MAX_SIZE;
use std::collections::VecDeque;

/// What nobody took, such as farewells to groups that are gone, is forgotten beyond this many, the oldest first.
/// Forming a group takes one of each member, and several may be formed at once.
const MOST_KEPT: usize = 4 * MAX_SIZE;

/// Words in the order in which they came.
pub struct Inbox<W> {
    words: VecDeque<W>,
}

impl<W> Inbox<W> {
    /// Without words.
    pub fn empty() -> Self {
        Inbox { words: VecDeque::new() }
    }

    /// Keeps `word`.
    pub fn put(&mut self, word: W) {
        self.words.push_back(word);
        if self.words.len() > MOST_KEPT {
            self.words.pop_front();
        }
    }

    /// The oldest word that is `wanted`.
    pub fn take(&mut self, wanted: impl Fn(&W) -> bool) -> Option<W> {
        let at = self.words.iter().position(wanted)?;
        self.words.remove(at)
    }

    /// How many words are kept.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Forgets all words that are not `wanted`.
    pub fn retain(&mut self, wanted: impl Fn(&W) -> bool) {
        self.words.retain(wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_word_is_kept_and_the_oldest_goes() {
        let mut inbox = Inbox::empty();
        (0..=MOST_KEPT).for_each(|word| inbox.put(word));
        assert_eq!((inbox.take(|&w| w == 0), inbox.take(|&w| w == MOST_KEPT)), (None, Some(MOST_KEPT)));
        inbox.retain(|&w| w > 100);
        assert_eq!(inbox.take(|_| true), Some(101));
    }
}
