//! What a user sees while a run goes: a bar on a terminal, plain lines now and then elsewhere.

use crate::args::Colour;
use crate::human;
use crate::out;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
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
    fn text(&self) -> String {
        format!(
            "loss {:.3}  norm {:.2}  {} tokens/s  {} a rank",
            self.loss,
            self.grad_norm,
            human::count(self.tokens_per_second),
            human::bytes(self.memory)
        )
    }
}

/// Shows progress on stderr.
pub enum Progress {
    /// Nothing.
    Quiet,
    /// A bar that is redrawn.
    Bar(ProgressBar),
    /// A line at steps 1, 2, 5, 10, ... and then every ten seconds.
    Lines {
        /// Of the run.
        steps: usize,
        /// When the last line was printed.
        last: Instant,
        /// The next step that gets a line whatever the time.
        next: usize,
    },
}

impl Progress {
    /// For a run of `steps`.
    pub fn new(steps: usize, quiet: bool, colour: Colour) -> Self {
        if quiet {
            return Progress::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            return Progress::Lines { steps, last: Instant::now(), next: 1 };
        }
        // The bar has colours where all else has them, whatever its library finds.
        console::set_colors_enabled_stderr(coloured(colour, &std::io::stderr()));
        let style = ProgressStyle::with_template("{bar:24.cyan/blue} {pos}/{len}  {msg}  {eta} left");
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr_with_hz(8));
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress::Bar(bar)
    }

    /// One more step is done.
    pub fn tick(&mut self, tick: &Tick) {
        match self {
            Progress::Quiet => {}
            Progress::Bar(bar) => {
                bar.set_position(tick.step as u64);
                bar.set_message(tick.text());
            }
            Progress::Lines { steps, last, next } => {
                if tick.step >= *next || last.elapsed() >= PAUSE || tick.step == *steps {
                    out::note(format_args!("step {}/{steps}  {}", tick.step, tick.text()));
                    *last = Instant::now();
                    *next = following(tick.step);
                }
            }
        }
    }

    /// So much of an evaluation is done: a bar's place is the run's, so it is told in words.
    pub fn evaluating(&self, batches: usize, of: usize) {
        if let Progress::Bar(bar) = self {
            bar.set_message(format!("evaluating {batches}/{of}"));
        }
    }

    /// A line that stays, such as an evaluation.
    pub fn line(&self, text: &str) {
        match self {
            Progress::Quiet => {}
            Progress::Bar(bar) => bar.suspend(|| out::note(text)),
            Progress::Lines { .. } => out::note(text),
        }
    }

    /// The run is over; the bar goes, so that what follows starts on a clean line.
    pub fn finish(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
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

    #[test]
    fn a_line_says_what_a_step_did() {
        let tick =
            Tick { step: 7, loss: 2.3456, grad_norm: 0.812, tokens_per_second: 41234.0, memory: 9 << 20 };
        assert_eq!(tick.text(), "loss 2.346  norm 0.81  41.2k tokens/s  9.00 MiB a rank");
    }
}
