//! How a run of the program ended, and for how long it was waited for.

use serde_json::Value;
use std::time::{Duration, Instant};

/// How a run of the program ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its exit code; None when a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it said about itself.
    pub stderr: String,
    /// For how long it was waited for, until all of it had ended, by a clock that stands still where the tests do.
    pub took: Duration,
}

impl Outcome {
    /// Fails the test unless the run succeeded.
    #[track_caller]
    pub fn success(self) -> Self {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Fails the test unless the run ended with this code and one sentence on stderr that has all of these words,
    /// without a panic.
    #[track_caller]
    pub fn refusal(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        let said: Vec<&str> = self.stderr.lines().filter(|l| l.starts_with("caravan: ")).collect();
        assert_eq!(said.len(), 1, "one sentence, not: {}", self.stderr);
        for word in words {
            assert!(said[0].contains(word), "'{word}' is not in: {}", said[0]);
        }
        self
    }

    /// Standard output as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in: {}", self.stdout))
    }
}

/// How long something was waited for that is looked at again and again. What passes between two looks counts for at most
/// `GAP`: a process that gets no processor cannot see what happens meanwhile, nor say when it did.
#[derive(Debug)]
pub struct Waited {
    sum: Duration,
    last: Instant,
}

impl Waited {
    /// Many times what is between two looks of a process that runs.
    const GAP: Duration = Duration::from_millis(100);

    /// Nothing yet.
    pub fn begin() -> Self {
        Waited { sum: Duration::ZERO, last: Instant::now() }
    }

    /// Until now, which is a look.
    pub fn so_far(&mut self) -> Duration {
        let now = Instant::now();
        self.sum += now.duration_since(self.last).min(Self::GAP);
        self.last = now;
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_still_has_not_waited() {
        let mut waited = Waited::begin();
        waited.last -= Duration::from_secs(600);
        assert_eq!(waited.so_far(), Waited::GAP);
        std::thread::sleep(Duration::from_millis(2));
        assert!(waited.so_far() >= Waited::GAP + Duration::from_millis(2));
    }
}
