//! A lock that is given back by a plain store.
//!
//! The standard one asks in the same instruction whether somebody sleeps for it, and such an instruction waits until all
//! that was written before has reached the cache. The last that a call writes is often a line that a peer's core has
//! to give up first: a message to it, or that its memory has been read. That wait was 0.3 us of a send of 1 KiB over UCX
//! in shared memory, which takes 0.2 us without. So whoever waits for this lock looks again and again, which is rare: mostly
//! one thread wants it. Who has it often counts on others to be served in [`meanwhile`](Guard::meanwhile).

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How often a waiting thread yields before it sleeps between looks: some hundred microseconds, for which the lock is
/// seldom held.
const YIELDS: u32 = 1000;
const NAP: Duration = Duration::from_micros(50);

/// What a lock keeps.
pub(crate) trait Holds {
    /// A thread panics that holds it.
    fn left_by_a_panic(&mut self);
}

pub(crate) struct Lock<T> {
    held: AtomicBool,
    /// Threads that have found it held.
    waiting: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the guard, through which alone the value is reached.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T: Holds> Lock<T> {
    pub fn new(value: T) -> Self {
        Lock { held: AtomicBool::new(false), waiting: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Returns once no other thread holds the value.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        self.guard()
    }

    /// The value, unless another thread holds it.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        free.then(|| self.guard())
    }

    /// That of the thread that has just taken it.
    #[inline(always)]
    fn guard(&self) -> Guard<'_, T> {
        Guard { lock: self, panicking: std::thread::panicking(), here: PhantomData }
    }

    #[cold]
    fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut looks = 0u32;
        while self.held.load(Ordering::Relaxed) || self.held.swap(true, Ordering::Acquire) {
            looks = looks.saturating_add(1);
            match looks {
                ..YIELDS => std::thread::yield_now(),
                YIELDS.. => std::thread::sleep(NAP),
            }
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The right to the value, of the thread that took it.
pub(crate) struct Guard<'a, T: Holds> {
    lock: &'a Lock<T>,
    /// It panicked before it took it.
    panicking: bool,
    here: PhantomData<*mut T>,
}

impl<T: Holds> Guard<'_, T> {
    /// Gives the value back while `idle` runs and until all that wait for it have had it: a thread that only looks whether
    /// something has happened would else have it again before they notice.
    pub fn meanwhile(self, idle: impl FnOnce()) -> Self {
        let lock = self.lock;
        drop(self);
        let leaving = Leaving(lock);
        idle();
        std::mem::forget(leaving);
        while lock.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        lock.lock()
    }

    /// Gives the value back while `idle` runs, and again until no other thread has it then: nobody waits for this one to have
    /// it once more, unless `idle` says that it has to.
    pub fn aside(self, idle: impl Fn() -> bool) -> Self {
        let lock = self.lock;
        drop(self);
        let leaving = Leaving(lock);
        let guard = loop {
            let needed = idle();
            match lock.try_lock() {
                Some(guard) => break guard,
                None if needed => break lock.lock(),
                None => {}
            }
        };
        std::mem::forget(leaving);
        guard
    }
}

/// Where what is done meanwhile panics, who waits goes with what it had under way, as if it panicked with the value.
struct Leaving<'a, T: Holds>(&'a Lock<T>);

impl<T: Holds> Drop for Leaving<'_, T> {
    fn drop(&mut self) {
        self.0.lock().left_by_a_panic();
    }
}

impl<T: Holds> Deref for Guard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: no other guard exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: Holds> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other guard exists, and this one is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T: Holds> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.panicking {
            self.left_by_a_panic();
        }
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two numbers that go together, and whether a panic has left them.
    type Pair = (usize, usize, bool);

    impl Holds for Pair {
        fn left_by_a_panic(&mut self) {
            self.2 = true;
        }
    }

    #[test]
    fn threads_take_turns() {
        const EACH: usize = 20_000;
        let lock = Lock::new((0usize, 0usize, false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let mut both = lock.lock();
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (3 * EACH, 3 * EACH, false));
    }

    #[test]
    fn a_panic_gives_the_value_back_and_says_so() {
        let lock = Lock::new((1, 1, false));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lock.lock().0 = 2;
            let _held = lock.lock();
            panic!("under the lock");
        }));
        assert!(caught.is_err());
        assert_eq!(*lock.lock(), (2, 1, true));
    }

    #[test]
    fn a_panic_while_others_have_the_value_says_so_too() {
        let lock = Lock::new((1, 1, false));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = lock.lock().meanwhile(|| panic!("at something else"));
        }));
        assert!(caught.is_err());
        assert_eq!(*lock.lock(), (1, 1, true));
        assert!(lock.lock().meanwhile(|| ()).2);
    }

    #[test]
    fn who_panics_for_another_reason_may_still_take_it() {
        struct Taking<'a>(&'a Lock<Pair>);
        impl Drop for Taking<'_> {
            fn drop(&mut self) {
                self.0.lock().0 += 1;
            }
        }
        let lock = Lock::new((1, 1, false));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _taking = Taking(&lock);
            panic!("elsewhere");
        }));
        assert!(caught.is_err());
        assert_eq!(*lock.lock(), (2, 1, false));
    }
}
