//! Locks that outlive a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What `mutex` holds, also if somebody has panicked who held it: for what is whole between any two of its changes.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
