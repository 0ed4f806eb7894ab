//! The engine as its users hold it: behind a lock, waited for in three gears, with an optional thread.

use super::family::{Family, Member, Served};
use super::lock::{Guard, Lock};
use super::{Ends, Engine, Options, Priority, Progress, Stage, Stats};
use crate::bootstrap::processors;
use crate::error::{Error, Result};
use crate::schedule::Call;
use crate::transport::Transport;
use crate::watch::Waited;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Turns at a call before the processor is yielded.
const SPIN: u32 = 200;
/// Turns before the clock is read, which the shortest calls take.
const UNTIMED: u32 = 4;
/// Looks within a turn.
const LOOKS: u32 = 64;
/// At most this long, because the scheduler may have put two ranks on one processor for the moment, and what one waits
/// for then comes only once it yields. Two ranks of shared memory on one processor, with another idle, took 17 us for
/// 8 bytes so and 24 us if they waited twice as long, and 360 us without a limit; on two processors 0.33 us throughout.
const SPIN_FOR: Duration = Duration::from_micros(5);
/// The same over messages, where a turn may be a system call.
const SPIN_MESSAGES: Duration = Duration::from_micros(10);
/// The same where ranks share processors: a peer may need this one to make progress.
const SPIN_CROWDED: u32 = 10;
/// Yields before parking.
const YIELD: u32 = 50;
/// How long a rank yields before it parks where only its own looking moves messages on: a nap would hold up peers.
const PATIENCE: Duration = Duration::from_millis(5);
/// The longest nap.
const PARK: Duration = Duration::from_millis(1);
/// The same where calls of other groups are under way, whose peers do not end it; and the progress thread's.
const NAP: Duration = Duration::from_micros(50);

pub(crate) struct Shared {
    engine: Lock<Engine>,
    /// The progress thread, which sleeps while there is nothing to do.
    driver: OnceLock<Thread>,
    /// It is over with that thread, though calls may still be in flight.
    stopped: AtomicBool,
    spin: u32,
    /// However few turns that was.
    spin_for: Duration,
    patience: Duration,
    /// How far the calls in flight had got when somebody who waits elsewhere looked last.
    mark: AtomicU64,
    /// The groups that this one was made from or with, and those made from it.
    family: Arc<Family>,
}

/// A communicator's hold on its engine: when the last one goes, so does the thread.
pub(crate) struct Handle {
    pub shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    pub fn new(transport: Box<dyn Transport>, options: Options, family: Arc<Family>) -> Result<Handle> {
        let crowded = options.crowded.unwrap_or_else(|| transport.size() > processors());
        let spin = if crowded { SPIN_CROWDED } else { SPIN };
        let spin_for = if transport.wakes() { SPIN_FOR } else { SPIN_MESSAGES };
        let rank = transport.rank();
        let mut engine = Engine::new(transport, options);
        engine.looks = if crowded { 0 } else { LOOKS };
        let patience = if engine.transport.wakes() { Duration::ZERO } else { PATIENCE };
        let engine = Lock::new(engine);
        let (driver, stopped, mark) = (OnceLock::new(), AtomicBool::new(false), AtomicU64::new(0));
        let shared = Arc::new(Shared { engine, driver, stopped, spin, spin_for, patience, mark, family });
        shared.family.add(&shared);
        let mut thread = None;
        if let Progress::Thread { cpu } = options.progress {
            let inner = Arc::clone(&shared);
            let (told, hear) = std::sync::mpsc::channel();
            let spawned = std::thread::Builder::new().name(format!("progress-{rank}")).spawn(move || {
                let bound = cpu.map_or(Ok(()), bind);
                let fine = bound.is_ok();
                if told.send(bound).is_ok() && fine {
                    inner.drive();
                }
            });
            let what = "start the progress thread";
            let started = spawned.map_err(|e| Error::start(what, e)).and_then(|handle| {
                // A thread that could not be bound has ended, and dropping its handle detaches nothing.
                hear.recv().map_err(|e| Error::system(what, e))?.map(|()| handle)
            });
            // Or else peers would take the end of the transport for an orderly one.
            let handle = started.map_err(|error| shared.engine.lock().fail(error))?;
            shared.driver.get_or_init(|| handle.thread().clone());
            thread = Some(handle);
        }
        Ok(Handle { shared, thread })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.stopped.store(true, Ordering::Release);
            thread.thread().unpark();
            // The thread never panics on purpose; if it did, its message is already on standard error.
            let _ = thread.join();
        }
    }
}

/// Binds the calling thread to one processor.
fn bind(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(Error::Launch(format!(
            "the progress thread cannot be bound to processor {cpu}: at most {} are supported",
            rustix::thread::CpuSet::MAX_CPU
        )));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|e| Error::system(format!("bind the progress thread to processor {cpu}"), e))
}

impl Shared {
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, Engine> {
        self.engine.lock()
    }

    pub fn family(&self) -> Arc<Family> {
        Arc::clone(&self.family)
    }

    /// Whether a thread moves calls on.
    fn driven(&self) -> bool {
        self.driver.get().is_some() && !self.stopped.load(Ordering::Acquire)
    }

    pub fn stats(&self) -> Stats {
        self.lock().stats()
    }

    /// Starts a call that will be waited for or dropped by its id.
    ///
    /// # Safety
    /// As for [`Engine::start`].
    pub unsafe fn start(
        &self,
        call: &Call,
        ends: &Ends,
        tag: Option<u64>,
        priority: Priority,
    ) -> Result<u32> {
        // SAFETY: the caller's.
        let id = unsafe { self.lock().start(call, ends, tag, priority, 0) }?;
        if let Some(driver) = self.driver.get() {
            driver.unpark();
        }
        Ok(id)
    }

    /// Starts a call and returns when it is over.
    ///
    /// # Safety
    /// As for [`Engine::start`], but the buffers are free again when this returns.
    pub unsafe fn call(&self, call: &Call, ends: &Ends, tag: Option<u64>, priority: Priority) -> Result<()> {
        let mut engine = self.lock();
        let looks = engine.looks;
        // SAFETY: the caller's.
        let id = unsafe { engine.start(call, ends, tag, priority, looks) }?;
        self.wait_locked(engine, id, || false).map(|_| ())
    }

    /// Returns when the call is over.
    pub fn wait(&self, id: u32) -> Result<()> {
        self.wait_or(id, || false).map(|_| ())
    }

    /// Returns true when the call is over, or false, and the call may be waited for again, when that is `enough`; this is
    /// asked now and then while the engine is free.
    pub fn wait_or(&self, id: u32, enough: impl Fn() -> bool) -> Result<bool> {
        self.wait_locked(self.lock(), id, enough)
    }

    #[inline(always)]
    fn wait_locked(&self, mut engine: Guard<'_, Engine>, id: u32, enough: impl Fn() -> bool) -> Result<bool> {
        let mut turns = 0u32;
        let mut since = None;
        let mut silent: Option<(_, Waited)> = None;
        let mut served = Served::default();
        loop {
            match engine.flights[id as usize].stage {
                Stage::Running => {}
                Stage::Done => {
                    if let Some(since) = since {
                        engine.stats.exposed_seconds += Instant::elapsed(&since).as_secs_f64();
                    }
                    engine.release(id);
                    return Ok(true);
                }
                Stage::Free => unreachable!("a call is waited for once"),
                Stage::Failed => {
                    engine.release(id);
                    return Err(engine.failed.clone().expect("a failed call has a failed engine"));
                }
            }
            // The engine remembers its failure, which the next look at the stage returns.
            let _ = engine.poll(Some(id));
            if engine.flights[id as usize].stage != Stage::Running {
                continue;
            }
            turns = turns.saturating_add(1);
            if turns < self.spin {
                match since {
                    // Pausing takes long enough on some processors to be felt in the shortest calls, as does the clock.
                    Some(_) => std::hint::spin_loop(),
                    None if turns == UNTIMED => since = Some(Instant::now()),
                    None => continue,
                }
                if turns.is_multiple_of(4)
                    && turns > UNTIMED
                    && since.is_some_and(|since| since.elapsed() > self.spin_for)
                {
                    turns = self.spin;
                }
                continue;
            }
            let start = *since.get_or_insert_with(Instant::now);
            let mark = engine.progress_mark().wrapping_add(served.mark);
            let silent = match &mut silent {
                Some((last, waited)) if *last == mark => waited,
                other => &mut other.insert((mark, Waited::begin())).1,
            };
            let mut stop = false;
            if turns < self.spin + YIELD || start.elapsed() < self.patience {
                if turns.is_multiple_of(16) {
                    let _ = engine.check(Some(id), Some(silent.so_far()));
                }
                engine = engine.meanwhile(|| {
                    served = self.family.serve_others(self);
                    stop = enough();
                    std::thread::yield_now();
                });
            } else {
                let fine = engine.check(Some(id), Some(silent.so_far())).is_ok();
                if fine && engine.flights[id as usize].stage == Stage::Running && !served.soon {
                    engine.transport.park(if served.busy { NAP } else { PARK });
                }
                engine = engine.meanwhile(|| {
                    served = self.family.serve_others(self);
                    stop = enough();
                    if served.soon {
                        std::thread::yield_now();
                    }
                });
            }
            if stop {
                engine.stats.exposed_seconds += start.elapsed().as_secs_f64();
                return Ok(false);
            }
        }
    }

    /// Whether the call is over, after moving things forward, also in other groups. A peer that is gone ends it; one that is
    /// merely silent does not, because how long to ask again is the caller's to say.
    pub fn is_done(&self, id: u32) -> bool {
        let done = self.is_over(id);
        if !done {
            self.family.serve_others(self);
        }
        done
    }

    /// The same in this group alone, for who serves it.
    pub fn is_over(&self, id: u32) -> bool {
        let mut engine = self.lock();
        // The engine remembers a failure, which ends the call.
        let _ = engine.poll(Some(id));
        if engine.flights[id as usize].stage == Stage::Running {
            let _ = engine.check(Some(id), None);
        }
        engine.flights[id as usize].stage != Stage::Running
    }

    /// Moves every call as far as it goes without waiting, and notices peers that are gone. What a thread moves is left to it:
    /// this one has something else to compute.
    pub fn progress(&self) -> Result<()> {
        self.family.serve_others(self);
        let mut engine = self.lock();
        if !self.driven() {
            engine.poll(None)?;
        }
        engine.check(None, None)?;
        match engine.failure() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Nobody will wait for this call: the engine keeps its buffers until they are free.
    pub fn abandon(&self, id: u32, buffers: Box<dyn Any + Send>) {
        let mut engine = self.lock();
        let flight = &mut engine.flights[id as usize];
        match flight.stage {
            Stage::Running => flight.orphan = Some(buffers),
            _ => {
                engine.release(id);
                drop(engine);
                drop(buffers);
            }
        }
    }

    /// The rank that a call in flight waits for.
    pub fn waits_for(&self, id: u32) -> Option<usize> {
        let engine = self.lock();
        (engine.flights[id as usize].stage == Stage::Running).then(|| engine.waited_for(id))
    }

    /// The progress thread: gives calls turns while there is something to do, sleeps while there is not.
    fn drive(&self) {
        let mut idle = 0u32;
        let mut engine = self.lock();
        while !self.stopped.load(Ordering::Acquire) {
            if engine.order.is_empty() {
                idle = 0;
                engine = engine.meanwhile(std::thread::park);
                continue;
            }
            let before = engine.progress_mark();
            // A failure is remembered; calls in flight are then none.
            let more = engine.turn(None).unwrap_or(false);
            let idles = !more && engine.progress_mark() == before;
            idle = if idles { idle.saturating_add(1) } else { 0 };
            if idle < self.spin + YIELD {
                engine = engine.meanwhile(|| {
                    if idle >= self.spin {
                        std::thread::yield_now();
                    }
                });
            } else {
                let _ = engine.check(None, None);
                // Who waits for a call has the lock while it sleeps, and moves everything.
                engine = engine.aside(|| {
                    std::thread::park_timeout(NAP);
                    self.stopped.load(Ordering::Acquire)
                });
            }
        }
    }
}

impl Member for Shared {
    fn serve(&self) -> Served {
        let Some(mut engine) = self.engine.try_lock() else {
            // What the thread moves on that is at it, the next look sees.
            return Served { mark: self.mark.load(Ordering::Relaxed), ..Served::default() };
        };
        let before = engine.progress_mark();
        let driven = self.driven();
        if !driven {
            let _ = engine.poll(None);
        }
        let mark = engine.progress_mark();
        self.mark.store(mark, Ordering::Relaxed);
        Served { mark, soon: mark != before, busy: !driven && !engine.order.is_empty() }
    }
}

impl Drop for Shared {
    /// Lets calls that nobody waits for end, for a while. A peer may wait for those of other groups first.
    fn drop(&mut self) {
        // Of a rank that is coming down the transport tells the peers; nobody should wait for it.
        let mut waited = Waited::begin();
        while !std::thread::panicking() && self.lock().runs_out(waited.so_far()) {
            self.family.serve_others(self);
        }
    }
}

impl Engine {
    /// Changes whenever a call in flight got any further, one ended or one was started.
    pub(super) fn progress_mark(&self) -> u64 {
        let started_and_left = self.stats.calls << 12 | (self.order.len() as u64 & 0xfff);
        self.mark_of(&self.order).wrapping_add(started_and_left.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Changes whenever one of these got any further.
    pub(super) fn mark_of(&self, calls: &[u32]) -> u64 {
        let marks = calls.iter().map(|&id| self.flights[id as usize].state.progress_mark());
        marks.fold(calls.len() as u64, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests;
