//! What the queues of an emulated device have been given and have not done yet.

use super::queue::{copy, multiply_any, zero};
use super::{Emulator, Name, Parts};
use crate::device::launch::Launch;
use crate::device::product::Product;
use crate::error::{Error, Result};
use crate::locked;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// One thing to do.
pub(super) enum Task {
    Launch(Box<Launch<'static>>),
    Product(Box<Product<'static>>),
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    Upload {
        from: Vec<u8>,
        to: u64,
    },
    Zero {
        at: u64,
        bytes: usize,
    },
    /// The event's moment of this number has come.
    Record(Arc<Moments>, u64),
    /// Nothing later goes on before it has.
    After(Arc<Moments>, u64),
    /// Tried until it says that it is done.
    Poll(Poll),
}

/// Work that another device takes part in.
pub(super) type Poll = Box<dyn FnMut() -> Result<bool> + Send>;

/// How often an event was recorded, and the last of its moments that has come.
#[derive(Default)]
pub(super) struct Moments {
    pub recorded: AtomicU64,
    pub happened: AtomicU64,
    /// When the last of them came.
    last: Mutex<Option<Instant>>,
}

impl Moments {
    /// When the last of its moments came.
    pub fn when(&self) -> Option<Instant> {
        *locked(&self.last)
    }

    fn happen(&self, number: u64) {
        *locked(&self.last) = Some(Instant::now());
        self.happened.fetch_max(number, Ordering::Relaxed);
    }
}

/// An emulated device: its queues' tasks.
pub(super) struct Device {
    pub emulator: Emulator,
    pub seed: u64,
    /// Tasks wait until somebody waits for them.
    pub late: bool,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    queues: Vec<VecDeque<Task>>,
    /// The state of the generator that chooses who goes on.
    random: u64,
    /// The first failure, which everything later returns too, as on a GPU.
    failed: Option<Error>,
}

impl Device {
    pub fn new(emulator: Emulator, seed: u64, late: bool) -> Arc<Device> {
        let work = Work { random: seed.wrapping_mul(2).wrapping_add(1), ..Work::default() };
        Arc::new(Device { emulator, seed, late, work: Mutex::new(work) })
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        locked(&self.work)
    }

    /// The number of a new queue.
    pub fn add_queue(&self) -> usize {
        let mut work = self.lock();
        work.queues.push(VecDeque::new());
        work.queues.len() - 1
    }

    /// Gives a queue something to do.
    pub fn give(&self, queue: usize, task: Task) -> Result<()> {
        let mut work = self.lock();
        if let Some(failed) = &work.failed {
            return Err(failed.clone());
        }
        match self.late {
            true => work.queues[queue].push_back(task),
            // Whoever is awaited was given before, and so is done.
            false => self.perform(&mut work, task),
        }
        work.failed.clone().map_or(Ok(()), Err)
    }

    /// Does tasks of all queues, in an order that events allow, until this queue has none left.
    pub fn finish(&self, queue: usize) -> Result<()> {
        self.advance_while(|work| !work.queues[queue].is_empty())
    }

    /// Does everything.
    pub fn finish_all(&self) {
        // A failure is remembered.
        let _ = self.advance_while(|work| work.queues.iter().any(|q| !q.is_empty()));
    }

    fn advance_while(&self, more: impl Fn(&Work) -> bool) -> Result<()> {
        let mut work = self.lock();
        while work.failed.is_none() && more(&work) {
            if !self.advance(&mut work) {
                // Another device has to go on first; whoever watches this one may look.
                drop(work);
                std::thread::yield_now();
                work = self.lock();
            }
        }
        work.failed.clone().map_or(Ok(()), Err)
    }

    /// Does one task, if there is one that can be done.
    pub fn step(&self) -> Result<()> {
        let mut work = self.lock();
        if work.failed.is_none() && work.queues.iter().any(|q| !q.is_empty()) {
            self.advance(&mut work);
        }
        work.failed.clone().map_or(Ok(()), Err)
    }

    /// Does the first task of a queue that may go on, chosen by the seed. False if that was not done after all.
    fn advance(&self, work: &mut Work) -> bool {
        let may = |queue: &VecDeque<Task>| match queue.front() {
            Some(Task::After(moments, number)) => moments.happened.load(Ordering::Relaxed) >= *number,
            Some(_) => true,
            None => false,
        };
        let ready: Vec<usize> = (0..work.queues.len()).filter(|&i| may(&work.queues[i])).collect();
        if ready.is_empty() {
            work.failed = Some(Error::System {
                what: "the emulated device".into(),
                source_text: "its queues wait for each other".into(),
            });
            return true;
        }
        work.random ^= work.random << 13;
        work.random ^= work.random >> 7;
        work.random ^= work.random << 17;
        let chosen = ready[(work.random % ready.len() as u64) as usize];
        let task = work.queues[chosen].pop_front().expect("a queue that may go on has a task");
        match task {
            Task::Poll(mut poll) => match poll() {
                Ok(true) => return true,
                Ok(false) => work.queues[chosen].push_front(Task::Poll(poll)),
                Err(error) => work.failed = Some(error),
            },
            task => {
                self.perform(work, task);
                return true;
            }
        }
        false
    }

    fn perform(&self, work: &mut Work, task: Task) {
        let done = match task {
            // SAFETY: whoever gave the task promised its memory until it is done.
            Task::Launch(launch) => unsafe { self.launch(&launch) },
            // SAFETY: as above.
            Task::Product(product) => unsafe { multiply_any(&product) },
            // SAFETY: as above.
            Task::Copy { from, to, bytes } => unsafe {
                copy(from, to, bytes);
                Ok(())
            },
            // SAFETY: as above.
            Task::Upload { from, to } => unsafe {
                copy(from.as_ptr() as u64, to, from.len());
                Ok(())
            },
            // SAFETY: as above.
            Task::Zero { at, bytes } => unsafe {
                zero(at, bytes);
                Ok(())
            },
            Task::Record(moments, number) => {
                moments.happen(number);
                Ok(())
            }
            Task::After(..) => Ok(()),
            Task::Poll(mut poll) => loop {
                match poll() {
                    Ok(false) => std::thread::yield_now(),
                    done => break done.map(drop),
                }
            },
        };
        if let Err(error) = done {
            work.failed.get_or_insert(error);
        }
    }

    /// Runs a kernel now.
    ///
    /// # Safety
    /// As [`Queue::launch`](crate::device::Queue::launch), of memory of the process.
    pub unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let failed = |source_text| Error::System {
            what: format!("emulating {} of {}", launch.kernel, launch.module),
            source_text,
        };
        let module = Name::of(launch.module).map_err(failed)?;
        let parts = Parts {
            module: module.text(),
            kernel: launch.kernel,
            grid: launch.grid,
            threads: launch.threads,
            shared: launch.shared,
            slots: launch.slots(),
            ranges: launch.ranges(),
        };
        // SAFETY: by the caller.
        unsafe { self.emulator.run(&parts, self.seed) }.map_err(failed)
    }
}
