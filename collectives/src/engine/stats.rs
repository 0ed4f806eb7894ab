//! What a communicator has done so far.

/// Counters of one communicator since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Calls started, messages included.
    pub calls: u64,
    /// Payload in bytes that this rank sent, counted by [`Call::volume`](crate::schedule::Call::volume): the same
    /// on every transport and for every algorithm.
    pub bytes_sent: u64,
    /// Seconds in which this rank could do nothing but wait for a call: communication that was not hidden.
    /// Waits below some microseconds are not counted.
    pub exposed_seconds: f64,
    /// Seconds inside reductions and copies of at least 16 KiB.
    pub work_seconds: f64,
}

impl Stats {
    /// Both together.
    pub fn and(&self, other: &Stats) -> Stats {
        Stats {
            calls: self.calls + other.calls,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            exposed_seconds: self.exposed_seconds + other.exposed_seconds,
            work_seconds: self.work_seconds + other.work_seconds,
        }
    }

    /// What happened since `earlier`.
    pub fn since(&self, earlier: &Stats) -> Stats {
        Stats {
            calls: self.calls - earlier.calls,
            bytes_sent: self.bytes_sent - earlier.bytes_sent,
            exposed_seconds: self.exposed_seconds - earlier.exposed_seconds,
            work_seconds: self.work_seconds - earlier.work_seconds,
        }
    }
}
