//! How a command ends when it cannot do what was asked: one sentence and an exit code.

use std::process::ExitCode;

/// A sentence for the user, and whose fault it is.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Failure {
    /// What was asked makes no sense, or cannot be had: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// It made sense, and went wrong: exit code 1.
    #[error("{0}")]
    Run(String),
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
            Failure::Run(_) => 1,
            Failure::Usage(_) => 2,
        }
    }

    /// Prints the sentence and gives the exit code.
    pub fn report(&self) -> ExitCode {
        eprintln!("caravan: {self}");
        ExitCode::from(self.code())
    }
}

impl From<collectives::Error> for Failure {
    fn from(e: collectives::Error) -> Self {
        Failure::run(e)
    }
}
