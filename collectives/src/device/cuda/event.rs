//! Moments of streams.

use super::gpu::Gpu;
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
