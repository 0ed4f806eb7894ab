//! The carriers of groups made from one another. Who waits for a call of one hands on what the others have copied down: a
//! peer may wait for that before it comes to the call that is waited for here.

use super::Group;
use crate::device::Streams;
use std::sync::{Arc, Mutex, PoisonError, Weak};

pub(super) struct Family<Q: Streams>(Mutex<Vec<Weak<Group<Q>>>>);

impl<Q: Streams> Default for Family<Q> {
    fn default() -> Self {
        Family(Mutex::default())
    }
}

impl<Q: Streams> Family<Q> {
    pub fn add(&self, member: &Arc<Group<Q>>) {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(member));
    }

    /// Moves on what the others than `member` have in flight, except where another thread is at it; whether any of it has
    /// still to be copied down.
    pub fn serve_others(&self, member: &Group<Q>) -> bool {
        let Ok(members) = self.0.try_lock() else { return false };
        let others = members.iter().filter(|other| !std::ptr::eq(other.as_ptr(), member));
        others.filter_map(Weak::upgrade).fold(false, |copying, other| other.serve() | copying)
    }
}
