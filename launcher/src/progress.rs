//! What a user sees while a run goes: a bar on a terminal, plain lines now and then elsewhere.

mod bar;

use crate::args::Colour;
use crate::human;
use crate::out;
use crate::train::stop;
use bar::Bar;
use indicatif::ProgressDrawTarget;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Seconds between plain lines.
const PAUSE: Duration = Duration::from_secs(10);

/// What one step did, for people.
#[derive(Clone, Copy, Debug)]
pub struct Tick {
    /// Steps done, counted from 1.
    pub step: usize,
    /// Mean loss of the step's tokens.
    pub loss: f64,
    /// The gradient's global norm.
    pub grad_norm: f64,
    /// Tokens a second of all ranks, over the last steps.
    pub tokens_per_second: f64,
    /// Bytes that this rank holds.
    pub memory: u64,
}

impl Tick {
    /// What is another in each step.
    fn words(&self) -> Vec<String> {
        vec![
            format!("loss {}", human::figure(self.loss)),
            format!("norm {}", human::figure(self.grad_norm)),
            format!("{} tokens/s", human::rate(self.tokens_per_second)),
        ]
    }

    fn held(&self) -> String {
        format!("{} a rank", human::bytes(self.memory))
    }

    fn text(&self) -> String {
        format!("{}  {}", self.words().join("  "), self.held())
    }
}

/// Shows progress on stderr. Whoever reads that may pause (Ctrl-S, `| less`), and other ranks do not wait for it: meanwhile what
/// soon is out of date is left out, and lines that stay are held until it goes on.
pub struct Progress {
    form: Form,
    held: RefCell<VecDeque<String>>,
}

enum Form {
    /// Nothing.
    Quiet,
    /// A bar of the run's steps that is redrawn.
    Bar(Bar),
    /// One of the rounds of something by itself.
    Rounds(Bar),
    /// Now and then a line.
    Plain(Plain),
}

impl Progress {
    /// For a run of `steps`.
    pub fn new(steps: usize, quiet: bool, colour: Colour) -> Self {
        Self::shown(Form::Bar, steps, quiet, colour)
    }

    /// For something by itself, of so many `rounds`.
    pub fn of_rounds(rounds: usize, quiet: bool, colour: Colour) -> Self {
        Self::shown(Form::Rounds, rounds, quiet, colour)
    }

    fn shown(bar: fn(Bar) -> Form, length: usize, quiet: bool, colour: Colour) -> Self {
        let of = |form| Progress { form, held: RefCell::default() };
        if quiet {
            return of(Form::Quiet);
        }
        let target = ProgressDrawTarget::stderr_with_hz(8);
        // Where no bar can be drawn: no terminal, or one that cannot move its cursor (TERM=dumb).
        if target.is_hidden() {
            return of(Form::Plain(Plain::new(length, Instant::now())));
        }
        // The bar has colours where all else has them, whatever its library finds.
        console::set_colors_enabled_stderr(coloured(colour, &std::io::stderr()));
        of(bar(Bar::new(length, target, bar::columns)))
    }

    /// One more step is done.
    pub fn tick(&mut self, tick: &Tick) {
        if !self.is_heard() {
            return;
        }
        match &mut self.form {
            Form::Quiet => {}
            Form::Bar(bar) | Form::Rounds(bar) => {
                bar.place(tick.step, tick.words(), Some(tick.held()), Instant::now());
            }
            Form::Plain(lines) => note(lines.step(tick, Instant::now())),
        }
    }

    /// So many rounds of an evaluation, or tokens of a sample, are done: where a bar's place is the run's, it is told in
    /// words.
    pub fn round(&mut self, what: &'static str, rounds: usize, of: usize) {
        if !self.is_heard() {
            return;
        }
        match &mut self.form {
            Form::Quiet => {}
            Form::Bar(bar) => bar.between(what, rounds, of, Instant::now()),
            Form::Rounds(bar) => bar.place(rounds, vec![what.to_owned()], None, Instant::now()),
            Form::Plain(lines) => note(lines.round(what, rounds, of, Instant::now())),
        }
    }

    /// A line that stays, such as an evaluation, which is over with it.
    pub fn line(&self, text: &str) {
        if let Form::Bar(bar) = &self.form {
            bar.resume();
        }
        if !matches!(self.form, Form::Quiet) {
            self.alarm(text);
        }
    }

    /// A line about what has gone wrong, which is shown where nothing else is, too.
    pub fn alarm(&self, text: &str) {
        self.held.borrow_mut().push_back(text.to_owned());
        self.is_heard();
    }

    /// Whether what is shown now is taken at once; says what has waited for that.
    fn is_heard(&self) -> bool {
        let mut held = self.held.borrow_mut();
        while out::is_noted(Duration::ZERO) {
            let Some(text) = held.pop_front() else { return true };
            match &self.form {
                Form::Bar(bar) | Form::Rounds(bar) => bar.suspend(|| out::note(text)),
                Form::Quiet | Form::Plain(_) => out::note(text),
            }
        }
        false
    }

    /// Nobody waits for this rank any more, but who asks it to end: says what has waited for a reader.
    pub fn end(&self) {
        self.finish();
        for text in self.held.take() {
            while stop::asked().is_none() && !out::is_noted(out::LAST) {}
            out::last_note(text);
        }
    }

    /// The run is over; the bar goes, so that what follows starts on a clean line.
    pub fn finish(&self) {
        if let Form::Bar(bar) | Form::Rounds(bar) = &self.form {
            bar.end(|| self.is_heard());
        }
    }
}

impl Drop for Progress {
    /// Others may have to hear yet why this rank fails.
    fn drop(&mut self) {
        self.finish();
        self.held.take().into_iter().for_each(out::last_note);
    }
}

fn note(line: Option<String>) {
    if let Some(line) = line {
        out::note(line);
    }
}

/// Which lines there are: of steps 1, 2, 5, 10, ... and otherwise of what is done ten seconds after the last.
struct Plain {
    /// Of the run.
    steps: usize,
    /// When the last line was printed.
    last: Instant,
    /// The next step that gets a line whatever the time.
    next: usize,
}

impl Plain {
    fn new(steps: usize, now: Instant) -> Self {
        Plain { steps, last: now, next: 1 }
    }

    /// The line of a step, if it has one.
    fn step(&mut self, tick: &Tick, now: Instant) -> Option<String> {
        if tick.step < self.next && tick.step != self.steps && !self.pause_over(now) {
            return None;
        }
        self.last = now;
        self.next = following(tick.step);
        Some(format!("step {}/{}  {}", tick.step, self.steps, tick.text()))
    }

    /// The line of a round, if it has one.
    fn round(&mut self, what: &str, rounds: usize, of: usize, now: Instant) -> Option<String> {
        let due = self.pause_over(now);
        due.then(|| {
            self.last = now;
            format!("{what} {rounds}/{of}")
        })
    }

    fn pause_over(&self, now: Instant) -> bool {
        now.duration_since(self.last) >= PAUSE
    }
}

/// The first of 1, 2, 5, 10, 20, 50, ... above `step`.
fn following(step: usize) -> usize {
    let mut decade = 1usize;
    loop {
        for digit in [1, 2, 5] {
            if digit * decade > step {
                return digit * decade;
            }
        }
        decade = decade.saturating_mul(10);
    }
}

/// Whether to colour what goes to `stream`.
pub fn coloured(colour: Colour, stream: &impl IsTerminal) -> bool {
    match colour {
        Colour::Always => true,
        Colour::Never => false,
        // https://no-color.org: any non-empty value means no.
        Colour::Auto => {
            stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_thin_out() {
        assert_eq!([0, 1, 2, 5, 9, 10, 49, 999].map(following), [1, 2, 5, 10, 10, 20, 50, 1000]);
    }

    fn tick(step: usize) -> Tick {
        Tick { step, loss: 2.3456, grad_norm: 0.812, tokens_per_second: 41234.0, memory: 9 << 20 }
    }

    #[test]
    fn a_line_says_what_a_step_did() {
        assert_eq!(tick(7).text(), "loss 2.346  norm 0.812  41.2k tokens/s  9.00 MiB a rank");
    }

    #[test]
    fn lines_come_of_some_steps_and_after_every_pause_in_evaluations_too() {
        let start = Instant::now();
        let mut lines = Plain::new(4, start);
        let steps: Vec<_> = (1..=4).filter_map(|step| lines.step(&tick(step), start)).collect();
        // The last one, too.
        assert_eq!(
            steps.iter().map(|line| &line[..8]).collect::<Vec<_>>(),
            ["step 1/4", "step 2/4", "step 4/4"]
        );
        assert_eq!(lines.round("evaluating", 5, 90, start + PAUSE / 2), None);
        assert_eq!(lines.round("evaluating", 9, 90, start + PAUSE).as_deref(), Some("evaluating 9/90"));
        assert_eq!(lines.round("evaluating", 10, 90, start + PAUSE), None);
        assert_eq!(lines.round("sampling", 19, 90, start + 2 * PAUSE).as_deref(), Some("sampling 19/90"));
        let mut lines = Plain::new(90, start);
        assert!([1, 2].into_iter().all(|step| lines.step(&tick(step), start).is_some()));
        assert_eq!(lines.step(&tick(3), start), None);
        assert!(lines.step(&tick(4), start + PAUSE).is_some());
    }
}
