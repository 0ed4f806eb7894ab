//! What a communicator asks of this carrier.

use super::flight::{Copies, Job, Layout, Stage, staged_call};
use super::pieces::Pieces;
use super::{Group, Staged, State};
use crate::buffer::{Memory, Place};
use crate::communicator::Communicator;
use crate::communicator::carrier::Carrier;
use crate::device::{Queue, Streams};
use crate::engine::{Ends, Priority, Stats};
use crate::error::{Error, Result};
use crate::schedule::Call;
use std::any::Any;
use std::sync::Arc;

// SAFETY: buffers are copied by queues that come after what the compute queue was given, and that it comes after once a call is
// waited for; between lies memory of the carrier's own. After a failure none of them goes on.
unsafe impl<Q: Streams> Carrier for Staged<Q> {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn group(&self) -> (usize, usize) {
        (self.0.host.rank(), self.0.host.size())
    }

    fn reaches(&self, place: Place) -> bool {
        place == self.0.compute.place()
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.0.compute.clone().memory(bytes)
    }

    fn reserve(&self, calls: &[Call]) -> Result<()> {
        self.0.host.reserve(&calls.iter().copied().map(staged_call).collect::<Vec<_>>())
    }

    unsafe fn start(&self, call: Call, ends: Ends, tag: Option<u64>, priority: Priority) -> Result<u32> {
        let pieces = Pieces::of(&call, &ends, self.0.host.rank(), self.0.host.size());
        let layout = Layout::of(&call, &ends, self.0.host.rank());
        let copies = Some(Copies { pieces, layout });
        let job = Job { call: staged_call(call), ends, tag, priority, copies };
        self.guarded(|group| group.alive(&mut group.lock(), |this, state| this.enter(state, job)))
    }

    unsafe fn start_of_host(
        &self,
        call: Call,
        ends: Ends,
        tag: Option<u64>,
        priority: Priority,
    ) -> Result<Option<u32>> {
        let job = Job { call, ends, tag, priority, copies: None };
        let start = |this: &Group<Q>, state: &mut State<Q>| {
            this.pump(state)?;
            let is_message = |&id: &u32| state.flights[id as usize].job.is_some_and(|job| job.is_message());
            let after = match job.is_message() {
                true => state.copying.iter().any(is_message),
                false => !(state.waiting.is_empty() && state.copying.is_empty()),
            };
            after.then(|| this.enter(state, job)).transpose()
        };
        self.guarded(|group| group.alive(&mut group.lock(), start))
    }

    fn wait(&self, id: u32) -> Result<()> {
        let done = self.guarded(|group| group.finish(id));
        self.0.lock().release(id);
        done
    }

    fn is_done(&self, id: u32) -> bool {
        let group = &*self.0;
        let done = {
            let state = &mut *group.lock();
            let _ = group.alive(state, Group::pump);
            matches!(state.flights[id as usize].stage, Stage::Returned | Stage::Failed)
        };
        if !done {
            group.host.handle.shared.family().serve_others(group);
        }
        done
    }

    fn abandon(&self, id: u32, buffers: Box<dyn Any + Send>) {
        let state = &mut *self.0.lock();
        match state.flights[id as usize].stage {
            Stage::Waiting | Stage::Copying | Stage::Exchanging | Stage::Awaited => {
                state.flights[id as usize].orphan = Some(buffers);
            }
            Stage::Free | Stage::Returned | Stage::Failed => {
                let _ = self.0.alive(state, |this, state| this.end(state, id));
                state.release(id);
            }
        }
    }

    fn progress(&self) -> Result<()> {
        let state = &mut *self.0.lock();
        self.0.alive(state, |this, state| this.pump(state))
    }

    fn abort(&self, why: &str) {
        // Whoever is waiting hears of it from the host.
        self.0.host.abort(why);
    }

    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats {
        let state = self.0.lock();
        state.stats.and(&self.0.held(&state)).and(&host())
    }

    fn split(&self, host: Option<&Communicator>, _: Option<u32>) -> Result<Option<Arc<dyn Carrier>>> {
        let Some(host) = host else { return Ok(None) };
        Ok(Some(Arc::new(Staged::new(host, self.0.compute.clone())?)))
    }
}

impl<Q: Streams> Staged<Q> {
    /// Does something for a call whose buffers go where that panics: by then nothing touches them any more.
    fn guarded<R>(&self, work: impl FnOnce(&Group<Q>) -> R) -> R {
        let guard = Unwinding(&self.0);
        let done = work(&self.0);
        std::mem::forget(guard);
        done
    }
}

/// Gives up as it is dropped.
struct Unwinding<'a, Q: Streams>(&'a Group<Q>);

impl<Q: Streams> Drop for Unwinding<'_, Q> {
    fn drop(&mut self) {
        let panicked = Err(Error::GivenUp("it panicked in a call".into()));
        let _ = self.0.alive::<()>(&mut self.0.lock(), |_, _| panicked);
    }
}
