//! Hosts that are gone without a word. What is under way to one UCX has the kernel send again for a quarter of an hour; but
//! nothing is under way where the ranks have met, so that the kernel asks there, and finds out within half a minute.

use crate::bootstrap::Meeting;
use crate::error::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often to look.
const INTERVAL: Duration = Duration::from_secs(1);

/// The connections over which the ranks have met: of rank 0 to all others, and of each of those to rank 0.
#[derive(Default)]
pub(super) struct Lines {
    meeting: Option<Meeting>,
    next: Option<Instant>,
    /// Ranks whose host does not answer, and what the system says of it.
    gone: BTreeMap<usize, String>,
}

impl Lines {
    /// Those of ranks that have met there and have no more to say there, as long as this lives; none inside one host.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn of(meeting: Meeting) -> Result<Self> {
        let apart = meeting.ask_hosts()?;
        Ok(Lines { meeting: apart.then_some(meeting), ..Lines::default() })
    }

    /// Looks which hosts answer; once in a while only.
    pub(super) fn look(&mut self) {
        let (Some(meeting), now) = (&self.meeting, Instant::now()) else { return };
        if self.next.is_none_or(|next| next <= now) {
            self.next = Some(now + INTERVAL);
            self.gone.extend(meeting.unanswered());
        }
    }

    /// Whether some host did not answer at the last look.
    pub(super) fn any(&self) -> bool {
        !self.gone.is_empty()
    }

    /// What was found of the host of `peer`, if it did not.
    pub(super) fn gone(&self, peer: usize) -> Option<&str> {
        self.gone.get(&peer).map(String::as_str)
    }
}
