//! One queue for several users: the model's kernels, the trainer's, and whoever carries collectives.

use super::arena::Arena;
use super::launch::Launch;
use super::product::Product;
use super::source::Module;
use super::{Queue, Streams, Urgency};
use crate::buffer::{Buffer, Memory, Place};
use crate::element::{Element, bytes_of, bytes_of_mut};
use crate::error::Result;
use crate::locked;
use std::sync::{Arc, Mutex, MutexGuard};

/// A handle of a queue. Clones are the same queue, which does what it is given in the order in which it was given,
/// whoever gave it; and all take memory from the same arena, if one was reserved.
pub struct SharedQueue<Q> {
    inner: Arc<Inner<Q>>,
}

struct Inner<Q> {
    queue: Mutex<Q>,
    arena: Mutex<Option<Arena>>,
    place: Place,
}

impl<Q> Clone for SharedQueue<Q> {
    fn clone(&self) -> Self {
        SharedQueue { inner: self.inner.clone() }
    }
}

impl<Q: Queue> SharedQueue<Q> {
    /// The first handle of a queue.
    pub fn new(queue: Q) -> Self {
        let place = queue.place();
        let inner = Inner { queue: Mutex::new(queue), arena: Mutex::new(None), place };
        SharedQueue { inner: Arc::new(inner) }
    }

    /// The queue, until the guard is dropped.
    pub fn lock(&self) -> MutexGuard<'_, Q> {
        locked(&self.inner.queue)
    }

    /// Takes one piece of memory now, from which [`memory`](Queue::memory) of all handles is taken from then on.
    ///
    /// # Errors
    /// The device has less.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        let arena = Arena::new(self.lock().memory(bytes)?);
        *locked(&self.inner.arena) = Some(arena);
        Ok(())
    }

    /// Copies `from` to a buffer in the queue's memory, and waits.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// A buffer elsewhere, or of another length.
    pub fn fill<E: Element>(&self, to: &mut Buffer<E>, from: &[E]) -> Result<()> {
        self.check(to, from.len());
        let mut queue = self.lock();
        // SAFETY: the buffer is of this device and as long, and borrowed for writing until the wait below has ended, after which
        // nothing touches it.
        let given = unsafe { queue.upload(bytes_of(from), to.view_mut().as_mut_ptr() as u64) };
        given.and(queue.synchronize())
    }

    /// Waits, and copies a buffer in the queue's memory to the host.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// A buffer elsewhere, or of another length.
    pub fn fetch<E: Element>(&self, from: &Buffer<E>, to: &mut [E]) -> Result<()> {
        self.check(from, to.len());
        // SAFETY: the buffer is of this device and as long, and initialised, as all memory of buffers is; it is borrowed until the
        // copy is done.
        unsafe { self.lock().download(from.view().as_ptr() as u64, bytes_of_mut(to)) }
    }

    fn check<E: Element>(&self, buffer: &Buffer<E>, len: usize) {
        assert_eq!(buffer.place(), self.inner.place, "a buffer in the queue's memory");
        assert_eq!(buffer.len(), len, "as many elements on the host as on the device");
    }

    /// Bytes of the reserved piece that are in use, and all of it.
    pub fn reserved(&self) -> Option<(usize, usize)> {
        let arena = locked(&self.inner.arena);
        arena.as_ref().map(|arena| (arena.used(), arena.bytes()))
    }
}

// SAFETY: everything is the inner queue's, but memory of the arena, which was the inner queue's too.
unsafe impl<Q: Queue> Queue for SharedQueue<Q> {
    type Event = Q::Event;

    fn place(&self) -> Place {
        self.inner.place
    }

    fn memory(&mut self, bytes: usize) -> Result<Memory> {
        if let Some(arena) = &mut *locked(&self.inner.arena) {
            return arena.take(bytes);
        }
        self.lock().memory(bytes)
    }

    fn host_memory(&mut self, bytes: usize) -> Result<Memory> {
        self.lock().host_memory(bytes)
    }

    fn page_lock(&mut self, memory: Memory) -> Result<Memory> {
        self.lock().page_lock(memory)
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        self.lock().prepare(modules)
    }

    fn prepare_products(&mut self) -> Result<()> {
        self.lock().prepare_products()
    }

    fn lend(&mut self, workspace: Memory) {
        self.lock().lend(workspace);
    }

    unsafe fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.lock().launch(launch) }
    }

    unsafe fn product(&mut self, product: &Product<'_>) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.lock().product(product) }
    }

    fn ways(&mut self, product: &Product<'_>) -> Result<usize> {
        self.lock().ways(product)
    }

    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.lock().copy(from, to, bytes) }
    }

    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.lock().upload(from, to) }
    }

    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.lock().zero(at, bytes) }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.lock().synchronize()
    }

    fn event(&self) -> Result<Q::Event> {
        self.lock().event()
    }

    fn record(&mut self, event: &Q::Event) -> Result<()> {
        self.lock().record(event)
    }

    fn happened(event: &Q::Event) -> Result<bool> {
        Q::happened(event)
    }

    fn reach(event: &Q::Event) -> Result<()> {
        Q::reach(event)
    }
}

/// A sibling is a queue of its own, with memory from the same arena.
impl<Q: Streams> SharedQueue<Q> {
    /// Another queue of the same device, apart from this one.
    ///
    /// # Errors
    /// The device's.
    pub fn sibling(&self, urgency: Urgency) -> Result<Q> {
        self.lock().sibling(urgency)
    }

    /// An event that also knows when it happened.
    ///
    /// # Errors
    /// The device's.
    pub fn timed_event(&self) -> Result<Q::Event> {
        self.lock().timed_event()
    }

    /// See [`Queue::record`].
    ///
    /// # Errors
    /// The device's.
    pub fn record(&self, event: &Q::Event) -> Result<()> {
        self.lock().record(event)
    }

    /// See [`Streams::after`].
    ///
    /// # Errors
    /// The device's.
    pub fn after(&self, event: &Q::Event) -> Result<()> {
        self.lock().after(event)
    }
}
