//! Whom a rank waits for: in a word of its own that its peers read, which is how often it has said so, then the rank; or by
//! questions and answers, where they share no memory.

use std::collections::BTreeMap;
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

/// What has come of questions and answers.
#[derive(Default)]
pub(super) struct Questions {
    /// Ranks that want to know for whom this one waits.
    pub(super) askers: Vec<usize>,
    /// How often ranks that were asked have answered, and whom they wait for.
    answers: BTreeMap<usize, (u64, usize)>,
}

impl Questions {
    /// How often `peer` has answered before it is asked now.
    pub(super) fn before(&self, peer: usize) -> u64 {
        self.answers.get(&peer).map_or(0, |(times, _)| *times)
    }

    /// `from` has answered with a rank of the `size` that there are.
    pub(super) fn answered(&mut self, from: usize, rank: &str, size: usize) {
        let times = self.before(from) + 1;
        let rank = rank.parse().ok().filter(|&rank| rank < size);
        self.answers.extend(rank.map(|rank| (from, (times, rank))));
    }

    /// What `peer` has answered last, if that was after it had answered `before` times.
    pub(super) fn answer(&self, peer: usize, before: u64) -> Option<usize> {
        self.answers.get(&peer).filter(|(times, _)| *times > before).map(|(_, rank)| *rank)
    }
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

    #[test]
    fn an_answer_is_to_the_questions_before_it() {
        let mut questions = Questions::default();
        let first = questions.before(2);
        questions.answered(2, "1", 4);
        assert_eq!((questions.answer(2, first), questions.answer(1, 0)), (Some(1), None));
        // Who asks again does not take the answer from who has asked before.
        let second = questions.before(2);
        assert_eq!((questions.answer(2, first), questions.answer(2, second)), (Some(1), None));
        for nonsense in ["4", "-1", "", "x"] {
            questions.answered(2, nonsense, 4);
            assert_eq!(questions.answer(2, second), None, "{nonsense}");
        }
        questions.answered(2, "3", 4);
        assert_eq!(questions.answer(2, second), Some(3));
    }
}
