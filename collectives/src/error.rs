//! One error type: what was asked, what was found, what would work.

use std::fmt::Display;
use std::time::Duration;

/// What can go wrong in a collective, a transport or a launch. Ranks are those of the job, of which all groups are parts:
/// they mean the same to everyone who hears of the error.
#[derive(Debug, thiserror::Error, Clone)]
pub enum Error {
    /// A length, a root, a rank or a type that does not fit the call.
    #[error("{call} on rank {rank}: {problem}")]
    Argument {
        /// The call, such as `reduce_scatter`.
        call: &'static str,
        /// The rank that noticed.
        rank: usize,
        /// What was given, and what would fit.
        problem: String,
    },
    /// Ranks called different collectives, or the same with different arguments.
    #[error(
        "ranks diverged at call {sequence}: rank {rank} calls {mine}, rank {peer} calls {theirs}; \
         every rank must make the same calls in the same order{past}"
    )]
    Diverged {
        /// The number of the call on this communicator.
        sequence: u64,
        /// This rank.
        rank: usize,
        /// What this rank called.
        mine: String,
        /// The peer that differs.
        peer: usize,
        /// What the peer called.
        theirs: String,
        /// What the group had called before, or nothing: `; before it came …`.
        past: String,
    },
    /// A peer's process ended or announced its own failure.
    #[error("rank {peer} {how}; rank {rank} stops")]
    PeerLost {
        /// This rank.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// What is known: "was killed by signal 9", "failed: disk full".
        how: String,
    },
    /// A peer did not take part within the deadline.
    #[error("{what} on rank {rank}: no answer from rank {peer} within {after:?}{past}")]
    Timeout {
        /// The call or phase.
        what: String,
        /// This rank.
        rank: usize,
        /// The silent rank.
        peer: usize,
        /// The deadline that passed.
        after: Duration,
        /// Of whom something has come, and what the group had called before, or nothing: `; something of rank 2 has come …`.
        past: String,
    },
    /// A transport that is not built in, or whose library or device is missing.
    #[error("transport {name} cannot be used: {why}")]
    Unavailable {
        /// The transport.
        name: String,
        /// What is missing, and what would bring it.
        why: String,
    },
    /// The program above gave the group up.
    #[error("{0}")]
    GivenUp(String),
    /// The operating system refused.
    #[error("{what}: {source_text}")]
    System {
        /// What was attempted, with sizes and names.
        what: String,
        /// The system's own words.
        source_text: String,
    },
    /// A communication library failed.
    #[error("{library} failed in {call} on rank {rank}: {text}")]
    Library {
        /// The library and version.
        library: String,
        /// Its function.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// Its own text.
        text: String,
    },
    /// How this process was launched makes no sense.
    #[error("launch: {0}")]
    Launch(String),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// [`Error::Timeout`] of which no more is known.
    pub fn timeout(what: impl Into<String>, rank: usize, peer: usize, after: Duration) -> Self {
        Error::Timeout { what: what.into(), rank, peer, after, past: String::new() }
    }

    /// The operating system's refusal of `what`.
    pub fn system(what: impl Into<String>, error: impl Display) -> Self {
        Error::System { what: what.into(), source_text: system_words(error) }
    }

    /// The same where `what` is to start a process or a thread.
    pub fn start(what: impl Into<String>, error: std::io::Error) -> Self {
        let text = system_words(&error);
        let source_text = match error.raw_os_error() {
            Some(libc::EAGAIN) => {
                text + ": the limit of processes (ulimit -u, or pids.max of a container) may be too low"
            }
            _ => text,
        };
        Error::System { what: what.into(), source_text }
    }

    /// What the peers of one group are told of a failure in another.
    pub fn in_another_group(&self) -> Self {
        Error::GivenUp(format!("failed in another of its groups: {self}"))
    }

    /// What a rank tells all others that will not be heard of again in any group, with the `cause` where it is known.
    pub fn last_word(cause: Option<&Self>) -> String {
        cause.map_or_else(|| "failed".into(), |why| why.in_another_group().to_string())
    }
}

/// What the operating system says of a refusal, and which limit it has gone by where it lets no more files be open.
pub fn system_words(error: impl Display) -> String {
    let words = error.to_string();
    match words.ends_with(&format!("(os error {})", libc::EMFILE)) {
        true => words + ": the limit of open files (ulimit -n) is too low",
        false => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_the_system_goes_by_are_named() {
        let refusal = std::io::Error::from_raw_os_error;
        let said = |error: Error| error.to_string();
        let files = "Too many open files (os error 24): the limit of open files (ulimit -n) is too low";
        assert_eq!(said(Error::system("opening", refusal(libc::EMFILE))), format!("opening: {files}"));
        assert_eq!(said(Error::system("opening", rustix::io::Errno::MFILE)), format!("opening: {files}"));
        assert_eq!(said(Error::start("starting", refusal(libc::EMFILE))), format!("starting: {files}"));
        let processes = said(Error::start("starting", refusal(libc::EAGAIN)));
        assert!(
            processes.contains("(os error 11): the limit of processes (ulimit -u, or pids.max"),
            "{processes}"
        );
        // Of what starts nothing, that is no limit.
        assert!(!said(Error::system("reading", refusal(libc::EAGAIN))).contains("limit"));
    }
}
