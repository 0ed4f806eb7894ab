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

pub(crate) struct Lock<T> {
    held: AtomicBool,
    /// Threads that have found it held.
    waiting: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has the guard, through which alone the value is reached.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub fn new(value: T) -> Self {
        Lock { held: AtomicBool::new(false), waiting: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Returns once no other thread holds the value. A thread that panics gives it back as it was then.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Guard { lock: self, here: PhantomData }
    }

    /// The value, unless another thread holds it.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        free.then(|| Guard { lock: self, here: PhantomData })
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
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    here: PhantomData<*mut T>,
}

impl<T> Guard<'_, T> {
    /// Gives the value back while `idle` runs and until all that wait for it have had it: a thread that only looks whether
    /// something has happened would else have it again before they notice.
    pub fn meanwhile(self, idle: impl FnOnce()) -> Self {
        let lock = self.lock;
        drop(self);
        idle();
        while lock.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        lock.lock()
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: no other guard exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other guard exists, and this one is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_turns() {
        const EACH: usize = 20_000;
        let lock = Lock::new((0usize, 0usize));
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
        assert_eq!(*lock.lock(), (3 * EACH, 3 * EACH));
    }

    #[test]
    fn a_panic_gives_the_value_back() {
        let lock = Lock::new(1);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            *lock.lock() = 2;
            let _held = lock.lock();
            panic!("under the lock");
        }));
        assert!(caught.is_err());
        assert_eq!(*lock.lock(), 2);
    }
}
