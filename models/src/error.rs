//! One error type: what was asked, what was found, what would work.

use collectives::DType;
use std::path::{Path, PathBuf};

/// What can go wrong with a model's configuration, weights or tokens.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum Error {
    /// A configuration, a name or an argument that makes no sense.
    #[error("{0}")]
    Config(String),
    /// A file or directory whose content is not what it should be.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it, naming the weight or field, and what would fit.
        problem: String,
    },
    /// The operating system refused.
    #[error("cannot {what} {}: {text}", path.display())]
    System {
        /// What was attempted: `open`, `write 4096 bytes to`.
        what: String,
        /// On which file or directory.
        path: PathBuf,
        /// The system's own words.
        text: String,
    },
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A configuration that makes no sense.
    pub fn config(problem: impl Into<String>) -> Self {
        Error::Config(problem.into())
    }

    /// A model of numbers that none is computed with.
    pub(crate) fn no_model_of(dtype: DType) -> Self {
        Error::config(format!("a model of {dtype}: f32, bf16 and f16 are possible"))
    }

    /// A file or directory whose content is wrong.
    pub fn format(path: &Path, problem: impl Into<String>) -> Self {
        Error::Format { path: path.to_owned(), problem: problem.into() }
    }

    /// The operating system's refusal of `what` on `path`.
    pub fn system(what: impl Into<String>, path: &Path, text: impl std::fmt::Display) -> Self {
        Error::System { what: what.into(), path: path.to_owned(), text: collectives::system_words(text) }
    }
}
