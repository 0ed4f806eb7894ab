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
    /// Whom ranks that were asked wait for.
    answers: BTreeMap<usize, usize>,
}

impl Questions {
    /// `peer` is asked: what it has said before counts no more.
    pub(super) fn ask(&mut self, peer: usize) {
        self.answers.remove(&peer);
    }

    /// `from` has answered with a rank of the `size` that there are.
    pub(super) fn answered(&mut self, from: usize, rank: &str, size: usize) {
        let rank = rank.parse().ok().filter(|&rank| rank < size);
        self.answers.extend(rank.map(|rank| (from, rank)));
    }

    /// What `peer` has answered.
    pub(super) fn answer(&self, peer: usize) -> Option<usize> {
        self.answers.get(&peer).copied()
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
    fn a_question_forgets_the_answer_to_the_one_before() {
        let mut questions = Questions::default();
        questions.answered(2, "1", 4);
        assert_eq!((questions.answer(2), questions.answer(1)), (Some(1), None));
        questions.ask(2);
        assert_eq!(questions.answer(2), None);
        for nonsense in ["4", "-1", "", "x"] {
            questions.answered(2, nonsense, 4);
            assert_eq!(questions.answer(2), None, "{nonsense}");
        }
    }
}
