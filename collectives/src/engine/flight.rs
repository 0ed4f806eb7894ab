//! Calls in flight.

use super::execute::State;
use super::inquiry::Inquiry;
use super::options::Priority;
use super::posted::Posted;
use crate::buffer::Memory;
use crate::schedule::{Schedule, Step};
use crate::trace::Begun;
use crate::watch::Waited;
use std::any::Any;
use std::rc::Rc;

/// One call's place in the engine.
pub(super) struct Flight {
    pub schedule: Option<Rc<Schedule>>,
    pub state: State,
    pub stage: Stage,
    pub priority: Priority,
    /// The rank that it waits for.
    pub blocked_on: usize,
    /// It is a message that is listed as not wholly posted.
    pub unposted: bool,
    /// When it began, if somebody may want to know.
    pub begun: Option<Begun>,
    /// Once it has waited for too long. Boxed, because calls are begun often and this seldom.
    pub inquiry: Option<Box<Inquiry>>,
    /// How far it and those before it had got when somebody waited for it last, and for how long by now.
    pub stuck: Option<(u64, Waited)>,
    /// Buffers of a call that nobody waits for any more.
    pub orphan: Option<Box<dyn Any + Send>>,
}

impl Flight {
    pub fn new(size: usize, posted: usize, kept: Option<Memory>) -> Self {
        Flight {
            schedule: None,
            state: State::empty(size, posted, kept),
            stage: Stage::Free,
            priority: Priority::default(),
            blocked_on: 0,
            unposted: false,
            begun: None,
            inquiry: None,
            stuck: None,
            orphan: None,
        }
    }

    /// Whether its call is between two ranks, apart from the order of collectives.
    pub fn is_message(&self) -> bool {
        self.schedule.as_ref().is_some_and(|schedule| schedule.call.kind.is_message())
    }

    /// Whether all messages of its call are posted.
    pub fn is_posted(&self) -> bool {
        let steps = self.schedule.as_ref().map_or(&[][..], |schedule| &schedule.steps);
        let posts = |step: &Step| matches!(step, Step::Send { .. } | Step::Recv { .. });
        !steps.iter().skip(self.state.at).any(posts) && self.state.posted.iter().all(Posted::is_whole)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    Running,
    Done,
    /// Ended by the engine's failure.
    Failed,
}

/// The addresses of a call's buffers.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// What goes in.
    pub send: *const u8,
    /// Its length.
    pub send_bytes: usize,
    /// What comes out; the same as `send` for a call in place.
    pub recv: *mut u8,
    /// Its length.
    pub recv_bytes: usize,
}
