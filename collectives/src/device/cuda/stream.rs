//! A stream: work of a GPU in order.

use super::event::Event;
use super::gathered::{Gathered, Item, Kernel};
use super::gpu::Gpu;
use super::product::Products;
use crate::buffer::{Buffer, Memory, Place};
use crate::device::launch::Launch;
use crate::device::product::{Product, check_workspace};
use crate::device::source::Module;
use crate::device::{Queue, Streams, Urgency};
use crate::error::{Error, Result};
use cuda_sys::driver::{self, Handle};
use std::sync::mpsc::Sender;

/// Bytes that are uploaded at once; more go in parts.
const PART: usize = 4 << 20;
/// Pieces of memory that uploads of a stream go through at most, and bytes of all of them: waiting takes less than
/// page-locking ever more.
const PIECES: usize = 64;
const STAGED: usize = 32 << 20;
/// Page-locked memory comes in pages.
const PAGE: usize = 4096;

/// Work of a GPU in order.
pub struct Stream {
    gpu: Gpu,
    handle: Handle,
    /// cuBLASLt, opened when first needed.
    products: Option<Products>,
    /// For products, until they take it.
    lent: Option<Memory>,
    /// Page-locked memory that uploads go through, each with the moment when it is free again, longest unused first.
    staging: Vec<(Buffer<u8>, Event)>,
    /// What was not given to the driver yet, if it gathers.
    gathered: Option<Gathered>,
}

// SAFETY: the driver's streams belong to no thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of `gpu`, apart from all others.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(gpu: &Gpu, urgency: Urgency) -> Result<Self> {
        gpu.enter()?;
        let (mut least, mut greatest, mut handle) = (0, 0, std::ptr::null_mut());
        // SAFETY: valid places to write to.
        unsafe {
            gpu.check("asking for priorities", (gpu.driver().priorities)(&mut least, &mut greatest))?;
            let priority = match urgency {
                Urgency::Low => least,
                Urgency::Normal => (least + greatest) / 2,
                Urgency::High => greatest,
            };
            let flags = driver::STREAM_NON_BLOCKING;
            gpu.check("creating a stream", (gpu.driver().stream_create)(&mut handle, flags, priority))?;
        }
        Ok(Stream {
            gpu: gpu.clone(),
            handle,
            products: None,
            lent: None,
            staging: Vec::new(),
            gathered: None,
        })
    }

    /// Whether launches and products are gathered, and lists of them that come again launched as CUDA graphs. Errors of
    /// what is gathered are those of a later call, and name the kernel. If the GPU has no memory for a graph, which changes
    /// nothing but the time that launches take, `remarks` gets a sentence.
    pub fn gathering(mut self, gathers: bool, remarks: &Sender<String>) -> Self {
        self.gathered = gathers.then(|| Gathered::new(remarks.clone()));
        self
    }

    /// Its GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// To give it work, or ask about it: nothing is kept back any more.
    pub(super) fn handle(&mut self) -> Result<Handle> {
        self.give()?;
        self.gpu.enter()?;
        Ok(self.handle)
    }

    /// Gives the driver what was gathered.
    fn give(&mut self) -> Result<()> {
        // While a list is given, nothing is gathered.
        let Some(mut gathered) = self.gathered.take() else { return Ok(()) };
        let given = gathered.give(self);
        self.gathered = Some(gathered);
        given
    }

    /// Gathers an item, or gives it to the driver at once.
    fn take(&mut self, item: Item) -> Result<()> {
        match &mut self.gathered {
            None => self.issue(&item),
            Some(gathered) => match gathered.keep(&self.gpu, item) {
                true => self.give(),
                false => Ok(()),
            },
        }
    }

    /// Gives the driver one thing.
    pub(super) fn issue(&self, item: &Item) -> Result<()> {
        match item {
            Item::Kernel(kernel) => kernel.launch(&self.gpu, self.handle),
            Item::Product(call) => {
                self.products.as_ref().expect("opened when it was made ready").run(call, self.handle)
            }
            Item::Zero { at, bytes } => {
                // SAFETY: by the caller of `zero`.
                let status = unsafe { (self.gpu.driver().fill)(*at, 0, *bytes, self.handle) };
                self.gpu.check("clearing", status)
            }
        }
    }

    /// Whether everything is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn idle(&mut self) -> Result<bool> {
        let handle = self.handle()?;
        // SAFETY: a live stream.
        match unsafe { (self.gpu.driver().stream_query)(handle) } {
            driver::NOT_READY => Ok(false),
            status => self.gpu.check("asking for a stream", status).map(|()| true),
        }
    }

    fn products(&mut self) -> Result<&mut Products> {
        if self.products.is_none() {
            self.products = Some(Products::open(&self.gpu)?);
        }
        let products = self.products.as_mut().expect("just opened");
        if let Some(workspace) = self.lent.take() {
            products.lend(workspace);
        }
        Ok(products)
    }

    /// The number of a free piece of staging memory of at least `bytes`; after the first steps there always is one.
    fn staging(&mut self, bytes: usize) -> Result<usize> {
        let size = bytes.next_power_of_two().max(PAGE);
        let oldest = self.staging.iter().position(|(buffer, _)| buffer.len() >= bytes);
        if let Some(oldest) = oldest {
            let free = &self.staging[oldest].1;
            // What is given to a stream later is over later.
            if free.happened()? {
                return Ok(oldest);
            }
            if self.staging.len() >= PIECES || self.staged() + size > STAGED {
                free.wait()?;
                return Ok(oldest);
            }
        }
        // All of these are too short.
        while self.staged() + size > STAGED {
            self.staging.remove(0).1.wait()?;
        }
        let buffer = Buffer::from_memory(self.gpu.pinned(size)?);
        self.staging.push((buffer, Event::new(&self.gpu)?));
        Ok(self.staging.len() - 1)
    }

    /// Bytes that uploads have gone through.
    fn staged(&self) -> usize {
        self.staging.iter().map(|(buffer, _)| buffer.len()).sum()
    }

    fn accepts(&self, what: &str, place: Option<Place>) -> Result<()> {
        match place {
            Some(Place::Device(ordinal)) if ordinal == self.gpu.ordinal() => Ok(()),
            Some(Place::Pinned) | None => Ok(()),
            Some(other) => Err(Error::System {
                what: what.to_string(),
                source_text: format!("memory in {other:?} was given to GPU {}", self.gpu.ordinal()),
            }),
        }
    }
}

// SAFETY: streams do what they are given in its order, and the driver takes memory for them, which it frees once they are done
// with it; what is gathered and not given holds all memory (`Hold`). What has failed runs no more.
unsafe impl Queue for Stream {
    type Event = Event;

    fn place(&self) -> Place {
        Place::Device(self.gpu.ordinal())
    }

    fn memory(&mut self, bytes: usize) -> Result<Memory> {
        // What was freed meanwhile is there again.
        self.give()?;
        self.gpu.memory(bytes)
    }

    fn host_memory(&mut self, bytes: usize) -> Result<Memory> {
        self.gpu.pinned(bytes)
    }

    fn page_lock(&mut self, memory: Memory) -> Result<Memory> {
        self.gpu.page_lock(memory)
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        // One that no block could hold keeps no other from being there: who launches those need not wait for the compiler.
        let (mut fitting, mut refused) = (Vec::with_capacity(modules.len()), Ok(()));
        for module in modules {
            match self.gpu.has_shared(module.shared, || format!("preparing {module}")) {
                Ok(()) => fitting.push(*module),
                Err(error) => refused = refused.and(Err(error)),
            }
        }
        self.gpu.enter()?;
        // Drivers load kernels when they are first named, and may wait then for what the GPU is at.
        let load = |module: &Module| {
            module.source.kernels().try_for_each(|kernel| self.gpu.function(module, kernel).map(drop))
        };
        let loaded = self.gpu.compile(&fitting).and_then(|()| fitting.iter().try_for_each(load));
        refused.and(loaded)
    }

    fn prepare_products(&mut self) -> Result<()> {
        self.gpu.enter()?;
        self.products().map(drop)
    }

    fn lend(&mut self, workspace: Memory) {
        check_workspace(&workspace, self.place());
        self.lent = Some(workspace);
    }

    unsafe fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        if launch.is_empty() {
            return Ok(());
        }
        self.accepts(launch.kernel, launch.place())?;
        self.gpu.enter()?;
        let function = self.gpu.function(&launch.module, launch.kernel)?;
        self.take(Item::Kernel(Kernel::new(launch, function)))
    }

    unsafe fn product(&mut self, product: &Product<'_>) -> Result<()> {
        self.accepts("a product", Some(product.place()))?;
        self.gpu.enter()?;
        match self.products()?.ready(product)? {
            Some(call) => self.take(Item::Product(call)),
            None => Ok(()),
        }
    }

    fn ways(&mut self, product: &Product<'_>) -> Result<usize> {
        self.gpu.enter()?;
        self.products()?.ways(product)
    }

    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // Never gathered: memory of the host may hold something else when a list is given.
        let handle = self.handle()?;
        // SAFETY: by the caller.
        let status = unsafe { (self.gpu.driver().copy)(to, from, bytes, handle) };
        self.gpu.check("copying", status)
    }

    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()> {
        self.gpu.enter()?;
        for (at, part) in (0u64..).step_by(PART).zip(from.chunks(PART)) {
            let piece = self.staging(part.len())?;
            let buffer = &mut self.staging[piece].0;
            buffer.host_mut()[..part.len()].copy_from_slice(part);
            let staged = buffer.view().as_ptr() as u64;
            // SAFETY: the piece stays until its event has happened, the target by the caller.
            unsafe { self.copy(staged, to + at, part.len())? };
            let (_, free) = &self.staging[piece];
            // SAFETY: a live event and stream.
            let status = unsafe { (self.gpu.driver().event_record)(free.handle(), self.handle) };
            let used = self.staging.remove(piece);
            self.staging.push(used);
            self.gpu.check("recording an event", status)?;
        }
        Ok(())
    }

    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.gpu.enter()?;
        self.take(Item::Zero { at, bytes })
    }

    fn synchronize(&mut self) -> Result<()> {
        // Where something is refused, what was given before it goes on.
        let given = self.give();
        self.gpu.enter()?;
        // SAFETY: a live stream.
        let status = unsafe { (self.gpu.driver().stream_synchronize)(self.handle) };
        given.and(self.gpu.check("waiting for a stream", status))
    }

    fn event(&self) -> Result<Event> {
        Event::new(&self.gpu)
    }

    fn record(&mut self, event: &Event) -> Result<()> {
        let handle = self.handle()?;
        // SAFETY: a live event and stream.
        let status = unsafe { (self.gpu.driver().event_record)(event.handle(), handle) };
        self.gpu.check("recording an event", status)
    }

    fn happened(event: &Event) -> Result<bool> {
        event.happened()
    }

    fn reach(event: &Event) -> Result<()> {
        event.wait()
    }
}

// SAFETY: a sibling is of the same GPU; the driver's streams wait for its events.
unsafe impl Streams for Stream {
    fn sibling(&self, urgency: Urgency) -> Result<Self> {
        Stream::new(&self.gpu, urgency)
    }

    fn timed_event(&self) -> Result<Event> {
        Event::timed(&self.gpu)
    }

    fn seconds(from: &Event, to: &Event) -> Result<f64> {
        to.seconds_since(from)
    }

    fn after(&mut self, event: &Event) -> Result<()> {
        let handle = self.handle()?;
        // SAFETY: a live event and stream.
        let status = unsafe { (self.gpu.driver().stream_wait)(handle, event.handle(), 0) };
        self.gpu.check("waiting for another stream", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // What was given may still use memory that is about to be freed.
        let _ = self.give();
        let _ = self.synchronize();
        self.gathered = None;
        self.products = None;
        // SAFETY: a live stream without work.
        unsafe { (self.gpu.driver().stream_destroy)(self.handle) };
    }
}
