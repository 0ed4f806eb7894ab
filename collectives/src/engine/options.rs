//! How a communicator behaves.

use crate::schedule::Tuning;
use std::time::Duration;

/// Which of several calls in flight goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// When nothing else can go on.
    #[default]
    Low,
    /// Before all of low priority; a call that somebody waits for goes before both.
    High,
}

/// Who makes progress while nobody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// Nobody; a step happens when a call is started, waited for, or when `progress` is called.
    #[default]
    Inline,
    /// A thread of this communicator.
    Thread {
        /// The processor that it is bound to.
        cpu: Option<usize>,
    },
}

/// How a communicator behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Who makes progress while nobody waits.
    pub progress: Progress,
    /// How long a peer may be silent, while this rank waits, before the call fails. As long as any call of this rank gets
    /// further, nobody is silent; but a call that has itself stood still for ten times as long, with all that were started
    /// before it in its group, fails nevertheless. It gets further by each message that ends, and a long one goes in
    /// several: this has to be longer than two of [`Tuning::longest`] bytes take.
    pub deadline: Duration,
    /// Whether ranks share processors, so that a waiting rank soon leaves its own to others; by default where the group
    /// has more ranks than this process may use processors. A launcher that binds ranks leaves few to each:
    /// [`processors_of_host`](crate::bootstrap::processors_of_host) tells.
    pub crowded: Option<bool>,
    /// From how many bytes that a rank writes of a result in one go on they pass the caches by; by default as this
    /// processor's caches say.
    pub stream: Option<usize>,
    /// Sizes at which algorithms change. The same on every rank: of what each other does by another one ranks hear nothing, and
    /// may take other data for theirs.
    pub tuning: Tuning,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            progress: Progress::default(),
            deadline: crate::watch::DEADLINE,
            crowded: None,
            stream: None,
            tuning: Tuning::default(),
        }
    }
}
