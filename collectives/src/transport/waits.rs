//! Whom a rank waits for, and whether it gets any further meanwhile: in a word of its own that its peers read, which is how
//! often it has said so, then what; or by questions and answers, where they share no memory.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a rank says that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// For which rank of the job.
    pub rank: usize,
    /// Nothing of its has got any further for as long as half its deadline: it began to wait perhaps later than who asks it,
    /// and one message of two that are under way has to come in that time.
    pub still: bool,
}

/// Of a word, beside the rank.
const STILL: u64 = 1 << 31;

/// The owner of `word` waits, still or by now.
pub fn note(word: &AtomicU64, wait: Wait) {
    let times = (word.load(Ordering::Relaxed) >> 32).wrapping_add(1);
    let still = if wait.still { STILL } else { 0 };
    word.store(times << 32 | still | wait.rank as u64, Ordering::Relaxed);
}

/// What was noted last, if that was after `word` was `before`.
pub fn noted_since(word: &AtomicU64, before: u64) -> Option<Wait> {
    let now = word.load(Ordering::Relaxed);
    let wait = Wait { rank: (now as u32 as u64 & !STILL) as usize, still: now & STILL != 0 };
    (now != before).then_some(wait)
}

/// The same in words.
pub fn told(wait: Wait) -> String {
    format!("{} {}", wait.rank, if wait.still { "still" } else { "moves" })
}

/// What has come of questions and answers.
#[derive(Default)]
pub struct Questions {
    /// Ranks that want to know for whom this one waits.
    pub askers: Vec<usize>,
    /// How often ranks that were asked have answered, and what.
    answers: BTreeMap<usize, (u64, Wait)>,
}

impl Questions {
    /// How often `peer` has answered before it is asked now.
    pub fn before(&self, peer: usize) -> u64 {
        self.answers.get(&peer).map_or(0, |(times, _)| *times)
    }

    /// `from` has answered, with a rank of the `size` that there are.
    pub fn answered(&mut self, from: usize, words: &str, size: usize) {
        let times = self.before(from) + 1;
        let (rank, how) = words.split_once(' ').unwrap_or_default();
        let rank = rank.parse().ok().filter(|&rank| rank < size);
        self.answers.extend(rank.map(|rank| (from, (times, Wait { rank, still: how == "still" }))));
    }

    /// What `peer` has answered last, if that was after it had answered `before` times.
    pub fn answer(&self, peer: usize, before: u64) -> Option<Wait> {
        self.answers.get(&peer).filter(|(times, _)| *times > before).map(|(_, wait)| *wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn moves(rank: usize) -> Wait {
        Wait { rank, still: false }
    }

    #[test]
    fn only_what_is_noted_after_the_question_answers_it() {
        let word = AtomicU64::new(0);
        assert_eq!(noted_since(&word, 0), None);
        note(&word, moves(7));
        note(&word, moves(7));
        let asked = word.load(Ordering::Relaxed);
        assert_eq!(noted_since(&word, asked), None);
        note(&word, moves(7));
        assert_eq!(noted_since(&word, asked), Some(moves(7)));
        note(&word, Wait { rank: 3, still: true });
        assert_eq!(noted_since(&word, asked), Some(Wait { rank: 3, still: true }));
        word.store(u64::MAX, Ordering::Relaxed);
        note(&word, moves(5));
        assert_eq!(noted_since(&word, u64::MAX), Some(moves(5)));
    }

    #[test]
    fn an_answer_is_to_the_questions_before_it() {
        let mut questions = Questions::default();
        let first = questions.before(2);
        questions.answered(2, &told(moves(1)), 4);
        assert_eq!((questions.answer(2, first), questions.answer(1, 0)), (Some(moves(1)), None));
        // Who asks again does not take the answer from who has asked before.
        let second = questions.before(2);
        assert_eq!((questions.answer(2, first), questions.answer(2, second)), (Some(moves(1)), None));
        for nonsense in ["4 still", "-1 moves", "", "x", "still", "3"] {
            questions.answered(2, nonsense, 4);
            assert_eq!(questions.answer(2, second), None, "{nonsense}");
        }
        let wait = Wait { rank: 3, still: true };
        questions.answered(2, &told(wait), 4);
        assert_eq!(questions.answer(2, second), Some(wait));
    }
}
