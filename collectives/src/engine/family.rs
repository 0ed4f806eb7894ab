//! What groups made from one another have in flight. Who waits in one of them moves the calls of the others on: a peer may
//! wait for one of those before it comes to the call that is waited for here.

use crate::locked;
use std::sync::{Arc, Mutex, Weak};

/// An engine, or what gives it calls of a device.
pub(crate) trait Member: Send + Sync {
    /// Moves what is in flight as far as it goes, for somebody who waits elsewhere, unless a thread is at it anyway. What
    /// fails here is told to those who call this member.
    fn serve(&self) -> Served;
}

/// What became of that.
#[derive(Clone, Copy, Default)]
pub(crate) struct Served {
    /// How far everything is: another number whenever something got further, whoever moved it on.
    pub mark: u64,
    /// Something may get further at any moment without a peer.
    pub soon: bool,
    /// Something waits for peers whom no thread but this one looks for, and who wake it in the group where it sleeps only.
    pub busy: bool,
}

#[derive(Default)]
pub(crate) struct Family(Mutex<Vec<Weak<dyn Member>>>);

impl Family {
    pub fn add<M: Member + 'static>(&self, member: &Arc<M>) {
        let mut members = locked(&self.0);
        members.retain(|member| member.strong_count() > 0);
        let member: Weak<M> = Arc::downgrade(member);
        members.push(member);
    }

    /// Moves on what the others than `member` have in flight, except where another thread is at it. The list is not held
    /// meanwhile: what is moved on here may be the last hold on a member, whose end moves others on in turn.
    pub(crate) fn serve_others(&self, member: &impl Member) -> Served {
        let (mut all, mut next) = (Served::default(), 0);
        while let Some((at, other)) = self.other(next, member) {
            let one = other.serve();
            let mark = all.mark.wrapping_add(one.mark);
            all = Served { mark, soon: all.soon | one.soon, busy: all.busy | one.busy };
            next = at + 1;
        }
        all
    }

    /// The first other member from a place on, and its place.
    fn other(&self, from: usize, member: &impl Member) -> Option<(usize, Arc<dyn Member>)> {
        let members = locked(&self.0);
        let others = members.iter().enumerate().skip(from);
        others
            .filter(|(_, other)| !std::ptr::addr_eq(other.as_ptr(), member))
            .find_map(|(at, other)| Some((at, other.upgrade()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Member for Counting {
        fn serve(&self) -> Served {
            self.0.fetch_add(1, Ordering::Relaxed);
            Served::default()
        }
    }

    /// Goes as soon as it is moved on, and moves the others on once more then.
    struct Going(Mutex<Option<Arc<Going>>>, Arc<Family>);

    impl Member for Going {
        fn serve(&self) -> Served {
            drop(self.0.lock().unwrap().take());
            Served::default()
        }
    }

    impl Drop for Going {
        fn drop(&mut self) {
            self.1.serve_others(self);
        }
    }

    #[test]
    fn a_member_whose_last_hold_is_the_one_that_moves_it_on_moves_others_on() {
        let family = Arc::<Family>::default();
        let (waiting, other) = (Arc::<Counting>::default(), Arc::<Counting>::default());
        let going = Arc::new(Going(Mutex::default(), Arc::clone(&family)));
        family.add(&waiting);
        family.add(&going);
        family.add(&other);
        *going.0.lock().unwrap() = Some(Arc::clone(&going));
        drop(going);
        family.serve_others(&*waiting);
        let served = |member: &Counting| member.0.load(Ordering::Relaxed);
        assert_eq!((served(&waiting), served(&other)), (1, 2));
    }
}
