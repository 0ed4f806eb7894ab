//! Fixed tasks spread over threads: which thread runs a task never changes its result.

use crate::error::{Error, Result};
use collectives::simd;
use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};
use std::ops::Range;
use std::sync::Arc;

/// The threads that compute a model: the caller's alone, or a pool. A clone is the same pool.
#[derive(Clone, Default)]
pub struct Team {
    pool: Option<Arc<ThreadPool>>,
}

impl Team {
    /// One thread is the caller's; more are a pool.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        // Threads compute with the instructions of whoever makes them.
        let level = simd::level();
        let build = || {
            let start = |thread: ThreadBuilder| {
                let name = format!("compute-{}", thread.index());
                let started = std::thread::Builder::new().name(name);
                started.spawn(move || simd::with_level(level, || thread.run())).map(drop)
            };
            ThreadPoolBuilder::new().num_threads(threads).spawn_handler(start).build().map_err(|e| {
                Error::config(format!("cannot start {threads} compute threads: {e}; fewer threads may fit"))
            })
        };
        Ok(Team { pool: if threads > 1 { Some(Arc::new(build()?)) } else { None } })
    }

    /// Threads that work at once.
    pub(crate) fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Runs `work` on a thread of the pool, if there is one: what it divides with rayon's `join` then takes all of
    /// them. To enter and leave the pool costs two wake-ups, so whole units go in, not single kernels.
    pub fn install(&self, work: impl FnOnce() + Send) {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Runs `task(i, thread)` for each i below `tasks`; `thread` is below `count` and belongs to one running
    /// task at a time.
    pub(crate) fn each(&self, tasks: usize, task: impl Fn(usize, usize) + Sync) {
        match &self.pool {
            Some(pool) if tasks > 1 => shared(pool, tasks, &task),
            _ => (0..tasks).for_each(|i| task(i, 0)),
        }
    }

    /// Runs `work` on nearly equal parts of `0..len`, at least `grain` long, one for each thread.
    pub(crate) fn split(&self, len: usize, grain: usize, work: impl Fn(Range<usize>) + Sync) {
        let parts = self.count().min(len / grain.max(1)).max(1);
        self.each(parts, |i, _| work(len * i / parts..len * (i + 1) / parts));
    }
}

/// On the pool's threads. Compiled once: rayon brings much code for each kind of task.
fn shared(pool: &ThreadPool, tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
    pool.install(|| halves(0..tasks, task));
}

/// `join` allocates nothing, unlike the pool's scopes.
fn halves(tasks: Range<usize>, task: &(dyn Fn(usize, usize) + Sync)) {
    if tasks.len() == 1 {
        let thread = rayon::current_thread_index().expect("inside the pool");
        task(tasks.start, thread);
        return;
    }
    let middle = tasks.start + tasks.len() / 2;
    rayon::join(|| halves(tasks.start..middle, task), || halves(middle..tasks.end, task));
}

/// A pointer that tasks may share when each touches its own part.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub *mut T);

// SAFETY: an address; whoever dereferences it promises that parts are disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The part `range`.
    ///
    /// # Safety
    /// The range is inside the memory, and nobody else touches it for as long as the slice lives.
    pub(crate) unsafe fn part<'p>(self, range: Range<usize>) -> &'p mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_task_runs_once_on_a_valid_thread() {
        for count in [1, 2, 3, 5] {
            let threads = Team::new(count).unwrap();
            assert_eq!(threads.count(), count);
            for tasks in [0, 1, 2, 7, 100] {
                let seen = Mutex::new(vec![0; tasks]);
                threads.each(tasks, |i, thread| {
                    assert!(thread < count);
                    seen.lock().unwrap()[i] += 1;
                });
                assert!(seen.into_inner().unwrap().iter().all(|&n| n == 1));
            }
        }
    }

    #[test]
    fn threads_compute_with_the_instructions_of_who_makes_them() {
        for level in simd::Level::available() {
            let threads = simd::with_level(level, || Team::new(3)).unwrap();
            threads.each(100, |_, _| assert_eq!(simd::level(), level));
        }
    }

    #[test]
    fn parts_cover_the_range() {
        let threads = Team::new(3).unwrap();
        for (len, grain) in [(0, 1), (1, 1), (10, 1), (100, 40), (7, 100)] {
            let seen = Mutex::new(vec![0; len]);
            threads.split(len, grain, |range| range.for_each(|i| seen.lock().unwrap()[i] += 1));
            assert!(seen.into_inner().unwrap().iter().all(|&n| n == 1));
        }
    }
}
