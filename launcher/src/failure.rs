//! How a command ends when it cannot do what was asked: one sentence and an exit code.

use crate::out;
use crate::train::stop;
use collectives::DType;
use std::process::ExitCode;

/// The exit code of what made no sense.
pub const USAGE: u8 = 2;

/// The exit code by which a rank tells its supervisor that it has said the verdict itself: no failure has it.
pub const VERDICT: u8 = 3;

/// The exit code of what a signal ended, whether it was killed or went when it was ready.
pub fn stopped_by(signal: u8) -> u8 {
    128 + signal
}

/// A sentence for the user, and whose fault it is.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Failure {
    /// What was asked makes no sense, or cannot be had: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// The same, and all ranks, which have met, find it alike: it is none's in particular.
    #[error("{0}")]
    Common(String),
    /// It made sense, and went wrong: exit code 1.
    #[error("{0}")]
    Run(String),
    /// It went through, and what came of it is no success: exit code 1, and no rank's fault.
    #[error("{0}")]
    Verdict(String),
    /// As a verdict, of tokens that a rank could not read: what a model has learnt is worth no less.
    #[error("{0}")]
    Unread(String),
    /// As a verdict, of a run that was asked to end before its time: exit code 128 and the signal.
    #[error("{text}")]
    Stopped {
        /// The sentence.
        text: String,
        /// By which it was asked.
        signal: u8,
    },
    /// Another rank failed, and this one stopped for it: exit code 1.
    #[error("{0}")]
    Consequence(String),
    /// What the supervisor of the ranks says, with the exit code that it found.
    #[error("{text}")]
    Ranks {
        /// The sentence.
        text: String,
        /// Of the rank that failed first, or 128 and the signal that interrupted.
        code: u8,
    },
    /// The sentence is on the job board, and the supervisor prints it.
    #[error("told to the supervisor")]
    Told {
        /// The exit code.
        code: u8,
    },
}

/// Results of the launcher.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// What was asked makes no sense.
    pub fn usage(text: impl std::fmt::Display) -> Self {
        Failure::Usage(text.to_string())
    }

    /// The run went wrong.
    pub fn run(text: impl std::fmt::Display) -> Self {
        Failure::Run(text.to_string())
    }

    /// The exit code that says so.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Run(_) | Failure::Verdict(_) | Failure::Unread(_) | Failure::Consequence(_) => 1,
            Failure::Usage(_) | Failure::Common(_) => USAGE,
            Failure::Stopped { signal, .. } => stopped_by(*signal),
            Failure::Ranks { code, .. } | Failure::Told { code } => *code,
        }
    }

    /// Whether it is no rank's failure, and all ranks come to it at the same point.
    pub fn is_verdict(&self) -> bool {
        matches!(self, Failure::Verdict(_) | Failure::Unread(_) | Failure::Stopped { .. })
    }

    /// A verdict with something more to say about it; any other failure as it is.
    pub fn remark(mut self, more: &str) -> Self {
        if let Failure::Verdict(text) | Failure::Unread(text) | Failure::Stopped { text, .. } = &mut self {
            text.push_str("; ");
            text.push_str(more);
        }
        self
    }

    /// Prints the sentence, unless it is told already, and gives the exit code.
    pub fn report(&self) -> ExitCode {
        match self {
            Failure::Told { .. } => {}
            told if stop::asked().is_some() || told.code() > stopped_by(0) => {
                out::last_note(format_args!("caravan: {self}"));
            }
            _ => out::note(format_args!("caravan: {self}")),
        }
        ExitCode::from(self.code())
    }
}

impl From<collectives::Error> for Failure {
    fn from(e: collectives::Error) -> Self {
        match e {
            collectives::Error::PeerLost { .. } => Failure::Consequence(e.to_string()),
            collectives::Error::Unavailable { .. } => Failure::usage(e),
            // Whoever shows a failure says first whose it is.
            collectives::Error::Launch(text) => Failure::Run(text),
            collectives::Error::Timeout { what, peer, after, past, .. } => {
                Failure::run(format!("{what}: no answer from rank {peer} within {after:?}{past}"))
            }
            e => Failure::run(e),
        }
    }
}

impl From<zero::Error> for Failure {
    fn from(e: zero::Error) -> Self {
        match e {
            zero::Error::Collective(e) => e.into(),
            // All ranks find it in what they have added up.
            zero::Error::NotFinite { step, dtype, scale, .. } => {
                let flags = match (step, dtype) {
                    _ if scale.is_some() => "--loss-scale, --dtype, --lr, --warmup",
                    (1, DType::F32) => "--model",
                    (1, _) => "--model, --dtype",
                    (_, DType::F32) => "--lr, --warmup",
                    _ => "--lr, --warmup, --dtype",
                };
                Failure::Verdict(format!("{e} ({flags})"))
            }
            zero::Error::Stopped { why: signal, .. } => stop::interrupted(signal),
            zero::Error::Batch { .. }
            | zero::Error::Unlike { .. }
            | zero::Error::Weights { .. }
            | zero::Error::Restore { .. } => Failure::Verdict(e.to_string()),
            e => Failure::run(e),
        }
    }
}

/// Whether clap has nothing to say against flags, but to show what they ask for, or what there is where they say too little.
pub fn asks_for_help(error: &clap::Error) -> bool {
    use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    matches!(error.kind(), DisplayHelp | DisplayHelpOnMissingArgumentOrSubcommand | DisplayVersion)
}

/// What clap says of flags that it cannot read, as one sentence: without its layout and the way to the help.
pub fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let end = |line: &&str| line.starts_with("Usage:") || line.starts_with("For more information");
    // `-- -g` is for commands that take words without a flag.
    let tip = |line: &&str| line.starts_with("tip: to pass ");
    let told = text.lines().map(str::trim).take_while(|line| !end(line));
    let words = told
        .filter(|line| !line.is_empty() && !tip(line))
        .collect::<Vec<_>>()
        .join(" ")
        .replace(" tip: ", "; ");
    let words = words.strip_prefix("error: ").unwrap_or(&words);
    // Of the standard library's, which do not say what would do.
    let words = [
        ("invalid digit found in string", "a whole number without a sign is needed"),
        ("number too large to fit in target type", "the number is too large"),
        ("invalid float literal", "a number is needed"),
        ("cannot parse float from empty string", "a number is needed"),
        ("cannot parse integer from empty string", "a whole number is needed"),
    ]
    .iter()
    .fold(words.to_owned(), |words, (said, meant)| words.replace(said, meant));
    // Scripts for nccl-tests pass it a number, and people who want a version none.
    if text.contains("a value is required for '--device_cta_count") {
        return format!(
            "{words}; -V is a flag of nccl-tests here, and the version is that of 'caravan --version'"
        );
    }
    match text.contains(" -- <COMMAND>") && lacks_command(error) {
        true => format!("{words}; the command stands after --: caravan sbatch ... -- train ..."),
        false => words,
    }
}

/// Whether flags end without a command, or it is where no word is taken.
fn lacks_command(error: &clap::Error) -> bool {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word))) => !word.starts_with('-'),
        (kind, _) => kind == ErrorKind::MissingRequiredArgument,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_does_not_repeat_whose_it_is() {
        let text = |e: collectives::Error| Failure::from(e).to_string();
        assert_eq!(text(collectives::Error::Launch("no host".into())), "no host");
        let after = std::time::Duration::from_secs(7);
        let past = "; rank 2 has not come".into();
        let late = collectives::Error::Timeout { what: "barrier".into(), rank: 1, peer: 2, after, past };
        assert_eq!(text(late), "barrier: no answer from rank 2 within 7s; rank 2 has not come");
    }

    #[test]
    fn a_norm_that_is_not_finite_names_the_flags_that_help() {
        let (what, value, dtype) = ("global gradient norm", f64::NAN, DType::Bf16);
        let failure = Failure::from(zero::Error::NotFinite { step: 3, what, value, dtype, scale: None });
        let words = "learning rate, a longer warmup or f32 usually helps (--lr, --warmup, --dtype)";
        assert!(failure.code() == 1 && failure.to_string().ends_with(words), "{failure}");
        let scale = Some(2.0);
        let failure = Failure::from(zero::Error::NotFinite { step: 1, what, value, dtype, scale });
        let words = ["with a loss scale of 2, below which", "(--loss-scale, --dtype, --lr, --warmup)"];
        assert!(words.iter().all(|word| failure.to_string().contains(word)), "{failure}");
        // Nothing has been learnt that could have been learnt more slowly.
        let failure = Failure::from(zero::Error::NotFinite { step: 1, what, value, dtype, scale: None });
        let words = "the weights are not all finite, or too large for bf16 (--model, --dtype)";
        assert!(failure.code() == 1 && failure.to_string().ends_with(words), "{failure}");
    }

    #[test]
    fn flags_that_cannot_be_read_are_told_in_one_sentence() {
        for (flags, words) in [
            ("--steps 1e3", &["'1e3'", "--steps", "a whole number"][..]),
            ("--order random", &["'random'", "--order", "shuffled, sequential"]),
            ("--step 3", &["'--step'", "a similar argument exists: '--steps'"]),
            ("--ranks -1", &["'-1'", "--ranks", "a whole number without a sign"]),
            ("--seed 18446744073709551616", &["--seed", "the number is too large"]),
            ("--lr 1e-3x", &["'1e-3x'", "--lr", "a number is needed"]),
            ("--lr=", &["--lr", "a number is needed"]),
        ] {
            let all = ["caravan", "train"].into_iter().chain(flags.split_whitespace());
            let text = sentence(&crate::args::Cli::read(all).unwrap_err());
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
            assert!(!text.contains('\n') && !text.contains("error:") && !text.contains("--help"), "{text}");
        }
        let version = crate::args::Cli::read(["caravan", "bench", "all_reduce", "-V"]).unwrap_err();
        assert!(sentence(&version).ends_with("'caravan --version'"), "{}", sentence(&version));
        // With `-- -g` it would be refused as an operation.
        let unknown = crate::args::Cli::read(["caravan", "bench", "overlap", "-g", "1"]).unwrap_err();
        assert_eq!(sentence(&unknown), "unexpected argument '-g' found");
    }

    #[test]
    fn who_forgets_what_a_command_stands_after_is_told() {
        let of = |line: &str| sentence(&crate::args::Cli::read(line.split(' ')).unwrap_err());
        for line in ["caravan sbatch train --steps 5", "caravan sbatch --nodes 2 train", "caravan sbatch"] {
            let text = of(line);
            assert!(
                text.ends_with("; the command stands after --: caravan sbatch ... -- train ..."),
                "{text}"
            );
        }
        let text = of("caravan sbatch --node 2 -- train");
        assert!(text.ends_with("'--nodes'"), "{text}");
    }
}
