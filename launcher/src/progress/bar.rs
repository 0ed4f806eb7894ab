//! A bar on a terminal, and the words beside it.

use crate::human;
use collectives::locked;
use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Words and numbers, of which those in front are shown where a terminal is too narrow for all.
type Words = Vec<String>;

/// A bar whose number and words change in one draw: its library draws now and then only, and would have the one without
/// the other.
pub struct Bar {
    drawn: ProgressBar,
    /// What is said now.
    told: Arc<Mutex<Words>>,
    /// What is said of the bar's place.
    of_place: Words,
    pace: Pace,
    /// Of what is done in between.
    pace_between: Pace,
}

impl Bar {
    /// Of so many steps, on a terminal of so many `columns`.
    pub fn new(steps: usize, target: ProgressDrawTarget, columns: fn() -> usize) -> Self {
        let told: Arc<Mutex<Words>> = Arc::default();
        let shown = Arc::clone(&told);
        let words = move |state: &ProgressState, line: &mut dyn fmt::Write| {
            let place = format!("{}/{}", state.pos(), state.len().unwrap_or(0));
            let words: Words = [place].into_iter().chain(locked(&shown).iter().cloned()).collect();
            // A space is between it and the bar.
            let _ = line.write_str(&fitting(&words, columns().saturating_sub(1)));
        };
        let style = ProgressStyle::with_template("{wide_bar:.cyan/blue} {words}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("words", words);
        let blocks = takes_blocks(|name| std::env::var(name).ok());
        let style = if blocks { style } else { style.progress_chars("#>-") };
        let drawn = ProgressBar::with_draw_target(Some(steps as u64), target);
        drawn.set_style(style);
        let (pace, pace_between) = (Pace::default(), Pace::default());
        Bar { drawn, told, of_place: Vec::new(), pace, pace_between }
    }

    /// So much is done, of which there is this to say, and `behind` what is left, which changes, what does not.
    pub fn place(&mut self, done: usize, words: Words, behind: Option<String>, now: Instant) {
        let of = self.drawn.length().unwrap_or(0) as usize;
        self.of_place = with_rest(words, self.pace.left(done, of, now));
        self.of_place.extend(behind);
        self.resume();
        self.drawn.update(|state| state.set_pos(done as u64));
    }

    /// Between two steps so many rounds of something else are done.
    pub fn between(&mut self, what: &str, rounds: usize, of: usize, now: Instant) {
        let words = vec![format!("{what} {rounds}/{of}")];
        *locked(&self.told) = with_rest(words, self.pace_between.left(rounds, of, now));
        self.drawn.update(|_| {});
    }

    /// Whatever was done in between is over: the bar's place is what is to be said from its next draw on.
    pub fn resume(&self) {
        *locked(&self.told) = self.of_place.clone();
    }

    /// Takes the bar away while `say` prints something else.
    pub fn suspend(&self, say: impl FnOnce()) {
        self.drawn.suspend(say);
    }

    /// Takes the bar away for ever, unless it is; not from a terminal that takes nothing now.
    pub fn end(&self, heard: impl FnOnce() -> bool) {
        if self.drawn.is_finished() {
            return;
        }
        if !heard() {
            self.drawn.set_draw_target(ProgressDrawTarget::hidden());
        }
        self.drawn.finish_and_clear();
    }
}

/// How many columns the terminal has that standard error is.
pub fn columns() -> usize {
    Term::stderr().size().1.into()
}

fn with_rest(mut words: Words, seconds: Option<f64>) -> Words {
    words.extend(seconds.map(|seconds| format!("{} left", human::seconds(seconds))));
    words
}

/// As many words as fit, at least a part of the first.
fn fitting(words: &[String], room: usize) -> String {
    let mut line = String::new();
    for word in words {
        let gap = if line.is_empty() { "" } else { "  " };
        if line.is_empty() {
            line.extend(word.chars().take(room));
        } else if line.chars().count() + gap.len() + word.chars().count() <= room {
            line.push_str(gap);
            line.push_str(word);
        } else {
            break;
        }
    }
    line
}

/// Whether a terminal shows blocks, which are no ASCII: as far as the locale says, the first of these that does.
fn takes_blocks(variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = |name: &&str| variable(name).filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(set).map(|value| value.to_ascii_lowercase());
    locale.is_none_or(|locale| locale.contains("utf-8") || locale.contains("utf8"))
}

/// How long what is left will take, from what the first look on has taken: what comes before that, as memory that is first
/// touched, comes once.
#[derive(Default)]
struct Pace {
    first: Option<(usize, Instant)>,
}

impl Pace {
    /// Seconds, once they are known, and as long as something is left.
    fn left(&mut self, done: usize, of: usize, now: Instant) -> Option<f64> {
        match self.first {
            Some((before, start)) if done > before => {
                let each = now.duration_since(start).as_secs_f64() / (done - before) as f64;
                (done < of).then(|| each * (of - done) as f64)
            }
            // It begins, or begins again.
            _ => {
                self.first = Some((done, now));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io::Result;
    use std::time::Duration;

    /// Keeps what is drawn.
    #[derive(Clone, Debug, Default)]
    struct Paper(Arc<Mutex<Vec<String>>>);

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            columns() as u16
        }
        fn move_cursor_up(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> Result<()> {
            if !text.trim().is_empty() {
                self.0.lock().unwrap().push(text.to_owned());
            }
            Ok(())
        }
        fn clear_line(&self) -> Result<()> {
            Ok(())
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    fn columns() -> usize {
        40
    }

    fn words(step: usize) -> Words {
        vec![format!("loss {step}.000")]
    }

    /// What was drawn, without the bar itself.
    fn told(paper: &Paper) -> Vec<String> {
        let drawn = std::mem::take(&mut *paper.0.lock().unwrap());
        drawn.iter().map(|line| line.rsplit_once(['█', '░']).unwrap().1.trim().to_owned()).collect()
    }

    #[test]
    fn a_terminal_of_another_encoding_gets_a_bar_of_ascii() {
        let blocks = |set: &[(&str, &str)]| {
            takes_blocks(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
        };
        assert!(
            blocks(&[])
                && blocks(&[("LANG", "de_DE.UTF-8")])
                && blocks(&[("LC_CTYPE", "C.utf8"), ("LANG", "C")])
        );
        assert!(
            !blocks(&[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")])
                && !blocks(&[("LC_ALL", ""), ("LANG", "POSIX")])
        );
    }

    #[test]
    fn a_number_is_drawn_with_its_own_words_at_any_speed() {
        let paper = Paper::default();
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(paper.clone()), 8);
        let mut bar = Bar::new(500, target, columns);
        let start = Instant::now();
        // More often than is drawn at once.
        for step in 1..=300 {
            bar.place(step, words(step), None, start + Duration::from_secs(step as u64));
        }
        let lines = told(&paper);
        assert!((2..300).contains(&lines.len()), "{}", lines.len());
        assert_eq!(lines[0], "1/500  loss 1.000");
        assert_eq!(lines[1], "2/500  loss 2.000  8 min 18 s left");
        for line in lines {
            let (step, rest) = line.split_once("/500  loss ").unwrap();
            assert!(rest.starts_with(&format!("{step}.000")), "{line}");
        }
    }

    #[test]
    fn an_evaluation_has_a_rest_of_its_own_and_leaves_nothing_behind() {
        let paper = Paper::default();
        let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
        let mut bar = Bar::new(3, target, columns);
        let second = |s: u64| Instant::now() + Duration::from_secs(s);
        bar.place(1, words(1), Some("9.00 MiB".to_owned()), second(0));
        for (round, at) in [(0, 5), (1, 10)] {
            bar.between("evaluating", round, 3, second(at));
        }
        bar.resume();
        bar.suspend(|| {});
        bar.place(3, words(3), Some("9.00 MiB".to_owned()), second(20));
        // Nothing is left, whatever comes after the last step.
        assert_eq!(
            told(&paper),
            [
                "1/3  loss 1.000  9.00 MiB",
                "1/3  evaluating 0/3",
                "1/3  evaluating 1/3  10.0 s left",
                "1/3  loss 1.000  9.00 MiB",
                "3/3  loss 3.000  9.00 MiB"
            ]
        );
    }

    #[test]
    fn a_narrow_terminal_shows_whole_words_of_those_in_front() {
        let all = ["12/900", "loss 2.346", "norm 0.812"].map(str::to_owned);
        assert_eq!(fitting(&all, 30), "12/900  loss 2.346  norm 0.812");
        assert_eq!(fitting(&all, 29), "12/900  loss 2.346");
        assert_eq!([fitting(&all, 8), fitting(&all, 4), fitting(&all, 0)], ["12/900", "12/9", ""]);
    }
}
