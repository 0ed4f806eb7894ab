//! Moments of streams, and recorded sequences of work.

use super::gpu::Gpu;
use super::stream::Stream;
use crate::error::Result;
use cuda_sys::driver::{self, Handle};

/// A moment of a stream: everything that it had been given when the event was recorded.
pub struct Event {
    gpu: Gpu,
    handle: Handle,
}

// SAFETY: the driver's events belong to no thread.
unsafe impl Send for Event {}
// SAFETY: methods of shared references only ask the driver, which locks.
unsafe impl Sync for Event {}

impl Event {
    /// An event that orders streams; nothing has to be waited for yet.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Event::with(gpu, driver::EVENT_DISABLE_TIMING)
    }

    /// An event that also knows when it happened.
    ///
    /// # Errors
    /// The driver's.
    pub fn timed(gpu: &Gpu) -> Result<Self> {
        Event::with(gpu, driver::EVENT_DEFAULT)
    }

    fn with(gpu: &Gpu, flags: u32) -> Result<Self> {
        gpu.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid place to write to.
        gpu.check("creating an event", unsafe { (gpu.driver().event_create)(&mut handle, flags) })?;
        Ok(Event { gpu: gpu.clone(), handle })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn happened(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: a live event.
        match unsafe { (self.gpu.driver().event_query)(self.handle) } {
            driver::NOT_READY => Ok(false),
            status => self.gpu.check("asking for an event", status).map(|()| true),
        }
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: a live event.
        self.gpu.check("waiting for an event", unsafe { (self.gpu.driver().event_synchronize)(self.handle) })
    }

    /// Seconds from `earlier` to this event; both are timed and have happened.
    ///
    /// # Errors
    /// They are not, or have not.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        self.gpu.enter()?;
        let mut milliseconds = 0f32;
        // SAFETY: live events, and a valid place to write to.
        let status =
            unsafe { (self.gpu.driver().event_elapsed)(&mut milliseconds, earlier.handle, self.handle) };
        self.gpu.check("measuring the time between events", status)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: a live event; the driver keeps it until nothing waits for it.
        unsafe {
            let _ = self.gpu.enter();
            (self.gpu.driver().event_destroy)(self.handle);
        }
    }
}

/// A sequence of work that was recorded once and is launched as one.
pub struct Graph {
    gpu: Gpu,
    handle: Handle,
}

// SAFETY: the driver's graphs belong to no thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `record` gives to `stream`, without running it. Arguments are recorded as they are now.
    ///
    /// # Errors
    /// `record`'s, or something in it cannot be recorded (such as waiting for the device).
    pub fn record(stream: &mut Stream, record: impl FnOnce(&mut Stream) -> Result<()>) -> Result<Self> {
        let gpu = stream.gpu().clone();
        gpu.enter()?;
        let driver = gpu.driver();
        // SAFETY: a live stream.
        let status = unsafe { (driver.capture_begin)(stream.handle(), driver::CAPTURE_THREAD_LOCAL) };
        gpu.check("recording a graph", status)?;
        let recorded = record(stream);
        let (mut graph, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the capture began above and ends in any case; valid places to write to.
        let ended = unsafe { (driver.capture_end)(stream.handle(), &mut graph) };
        recorded?;
        gpu.check("recording a graph", ended)?;
        // SAFETY: a whole graph, which is no longer needed once it is ready to run.
        let status = unsafe {
            let status = (driver.graph_instantiate)(&mut handle, graph, 0);
            (driver.graph_destroy)(graph);
            status
        };
        gpu.check("preparing a graph", status)?;
        Ok(Graph { gpu, handle })
    }

    /// Gives the whole sequence to a stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self, stream: &mut Stream) -> Result<()> {
        self.gpu.enter()?;
        // SAFETY: a live graph and stream; what the recorded work uses is kept by whoever recorded it.
        let status = unsafe { (self.gpu.driver().graph_launch)(self.handle, stream.handle()) };
        self.gpu.check("launching a graph", status)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: a live graph; the driver keeps it until it has run.
        unsafe {
            let _ = self.gpu.enter();
            (self.gpu.driver().graph_exec_destroy)(self.handle);
        }
    }
}
