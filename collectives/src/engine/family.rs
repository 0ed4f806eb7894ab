//! What groups made from one another have in flight. Who waits in one of them moves the calls of the others on: a peer may
//! wait for one of those before it comes to the call that is waited for here.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// An engine, or what gives it calls of a device.
pub(crate) trait Member: Send + Sync {
    /// Moves what is in flight as far as it goes, for somebody who waits elsewhere, unless a thread is at it anyway. What
    /// fails here is told to those who call this member.
    fn serve(&self) -> Served;
}

/// What became of that.
#[derive(Clone, Copy, Default)]
pub(crate) struct Served {
    /// Something got further.
    pub moved: bool,
    /// Something may get further at any moment without a peer.
    pub soon: bool,
}

#[derive(Default)]
pub(crate) struct Family(Mutex<Vec<Weak<dyn Member>>>);

impl Family {
    pub fn add<M: Member + 'static>(&self, member: &Arc<M>) {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        let member: Weak<M> = Arc::downgrade(member);
        members.push(member);
    }

    /// Moves on what the others than `member` have in flight, except where another thread is at it.
    pub(super) fn serve_others(&self, member: &impl Member) -> Served {
        let Ok(members) = self.0.try_lock() else { return Served::default() };
        let others = members.iter().filter(|other| !std::ptr::addr_eq(other.as_ptr(), member));
        others.filter_map(Weak::upgrade).map(|other| other.serve()).fold(Served::default(), |all, one| {
            Served { moved: all.moved | one.moved, soon: all.soon | one.soon }
        })
    }
}
