//! The engines of groups made from one another. Who waits in one of them moves the calls of the others on: a peer may wait
//! for one of those before it comes to the call that is waited for here.

use super::shared::Shared;
use std::sync::{Arc, Mutex, PoisonError, Weak};

#[derive(Default)]
pub(crate) struct Family(Mutex<Vec<Weak<Shared>>>);

impl Family {
    pub(super) fn add(&self, member: &Arc<Shared>) {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
    }

    /// Moves on what the others than `member` have in flight, except where another thread is at it; whether any of it got
    /// further.
    pub(super) fn serve_others(&self, member: &Shared) -> bool {
        let Ok(members) = self.0.try_lock() else { return false };
        let mut moved = false;
        for other in members.iter().filter(|other| !std::ptr::eq(other.as_ptr(), member)) {
            moved |= other.upgrade().is_some_and(|other| other.serve());
        }
        moved
    }
}
