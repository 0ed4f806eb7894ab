//! Whom a rank waits for, in a word of its own that its peers read: how often it has said so, then the rank.

use std::sync::atomic::{AtomicU64, Ordering};

/// The owner of `word` waits for `rank`, still or by now.
pub(super) fn note(word: &AtomicU64, rank: usize) {
    let times = (word.load(Ordering::Relaxed) >> 32).wrapping_add(1);
    word.store(times << 32 | rank as u64, Ordering::Relaxed);
}

/// The rank that was noted last, if that was after `word` was `before`.
pub(super) fn noted_since(word: &AtomicU64, before: u64) -> Option<usize> {
    let now = word.load(Ordering::Relaxed);
    (now != before).then_some(now as u32 as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_noted_after_the_question_answers_it() {
        let word = AtomicU64::new(0);
        assert_eq!(noted_since(&word, 0), None);
        note(&word, 7);
        note(&word, 7);
        let asked = word.load(Ordering::Relaxed);
        assert_eq!(noted_since(&word, asked), None);
        note(&word, 7);
        assert_eq!(noted_since(&word, asked), Some(7));
        note(&word, 3);
        assert_eq!(noted_since(&word, asked), Some(3));
        word.store(u64::MAX, Ordering::Relaxed);
        note(&word, 5);
        assert_eq!(noted_since(&word, u64::MAX), Some(5));
    }
}
