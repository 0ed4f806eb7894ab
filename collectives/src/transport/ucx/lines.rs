//! Hosts that are gone without a word. What is under way to one UCX has the kernel send again for a quarter of an hour; but
//! nothing is under way where the ranks have met, so that the kernel asks there, and finds out within half a minute.
//!
//! What it finds may be of that network alone, or over: it says nothing any more once something has come from the rank.

use crate::bootstrap::Meeting;
use crate::error::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often to look.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long nothing may come from a rank whose host does not answer where it has met.
const SILENT: Duration = Duration::from_secs(10);

/// The connections over which the ranks have met: of rank 0 to all others, and of each of those to rank 0.
#[derive(Default)]
pub(super) struct Lines {
    meeting: Option<Meeting>,
    next: Option<Instant>,
    /// Ranks whose host did not answer at some look, of which nothing has come since, and what the system says of it.
    doubted: BTreeMap<usize, (Instant, String)>,
    /// Those whose host is given up, and the same.
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
        let Some(meeting) = &self.meeting else { return };
        let now = Instant::now();
        if self.next.is_none_or(|next| next <= now) {
            self.next = Some(now + INTERVAL);
            self.doubted.extend(meeting.unanswered().into_iter().map(|(peer, why)| (peer, (now, why))));
        }
    }

    /// Whether it matters what comes.
    #[inline]
    pub(super) fn doubt_any(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// Something has come from `peer`.
    pub(super) fn heard(&mut self, peer: usize) {
        self.doubted.remove(&peer);
    }

    /// Gives up the hosts that are doubted for so long, where a call has had nothing for as long.
    pub(super) fn give_up(&mut self) {
        let gone = &mut self.gone;
        self.doubted.retain(|&peer, (since, why)| {
            let silent = since.elapsed() >= SILENT;
            if silent {
                gone.insert(peer, std::mem::take(why));
            }
            !silent
        });
    }

    /// Whether some host is given up.
    pub(super) fn any(&self) -> bool {
        !self.gone.is_empty()
    }

    /// What was found of the host of `peer`, if it is.
    pub(super) fn gone(&self, peer: usize) -> Option<&str> {
        self.gone.get(&peer).map(String::as_str)
    }
}
