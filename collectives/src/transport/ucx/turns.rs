//! One thread at a time calls UCX. The groups of a rank share its worker and may be driven by different threads, so they
//! take turns by a lock; a group that is the only one needs none.
//!
//! That is worth its `unsafe`: an atomic instruction waits until all that was written before has reached the cache, and
//! after a send over shared memory that is a line of the receiver's queue, which another core has to give up first. So did
//! whatever is loaded in larger pieces than it was stored in just before, as values returned through memory are: hence
//! `inline(always)`. One of the two made up a fifth of the time of messages of 512 bytes.

use super::context::Context;
use super::log;
use super::session::State;
use crate::error::{Error, Result};
use crate::locked;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

/// UCX as one rank of a job has it, shared by its groups.
struct Session {
    context: Arc<Context>,
    state: UnsafeCell<State>,
    lock: Mutex<()>,
}

// SAFETY: `State` may move between threads, and only turns make references to it, of which there is one at a time.
unsafe impl Sync for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        log::unheard(|| self.state.get_mut().close());
    }
}

/// A group's hold on the session of its rank, which ends with the last of them.
#[derive(Clone)]
pub(super) struct Hold(Arc<Session>);

impl Hold {
    pub(super) fn new(context: Arc<Context>, state: State) -> Self {
        Hold(Arc::new(Session { context, state: UnsafeCell::new(state), lock: Mutex::new(()) }))
    }

    /// Errors in UCX's words.
    pub(super) fn context(&self) -> &Context {
        &self.0.context
    }

    /// This thread's turn, as long as messages can be moved at all.
    #[inline(always)]
    pub(super) fn turn(&mut self) -> Result<Turn<'_>> {
        let turn = self.any_turn();
        if turn.given_up {
            return Err(given_up(&turn));
        }
        Ok(turn)
    }

    /// This thread's turn, perhaps only to look.
    #[inline(always)]
    pub(super) fn any_turn(&mut self) -> Turn<'_> {
        let lock = match Arc::strong_count(&self.0) {
            1 => {
                // What another group did before it ended comes before this turn.
                fence(Ordering::Acquire);
                None
            }
            // A thread that panicked in its turn has left UCX as it was between two calls.
            _ => Some(locked(&self.0.lock)),
        };
        // SAFETY: there is no other turn now. Without the lock, this is the only hold, and the turn borrows it, so that it
        // cannot be cloned meanwhile; nobody makes weak ones. With it, there is no turn without: the hold of such a one
        // would be the only one.
        Turn { state: unsafe { &mut *self.0.state.get() }, _lock: lock }
    }
}

#[cold]
fn given_up(state: &State) -> Error {
    match &state.cause {
        // As peers hear it.
        Some(why) => why.in_another_group(),
        None => {
            let text = "messages of a failed group could not be ended".into();
            state.worker.context.error_text("ucp_worker_progress", text)
        }
    }
}

/// The right to call UCX.
pub(super) struct Turn<'a> {
    state: &'a mut State,
    _lock: Option<MutexGuard<'a, ()>>,
}

impl Deref for Turn<'_> {
    type Target = State;

    #[inline(always)]
    fn deref(&self) -> &State {
        self.state
    }
}

impl DerefMut for Turn<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State {
        self.state
    }
}
