//! The emulation as queues of a device.

use super::work::{Device, Moments, Task};
use super::{Emulator, held, pinned, placed};
use crate::buffer::{Memory, Place};
use crate::device::launch::Launch;
use crate::device::product::{Product, check_workspace};
use crate::device::source::Module;
use crate::device::{Queue, Streams, Urgency};
use crate::element::{DType, Float};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A queue of an emulated device.
pub struct EmulatedQueue {
    pub(super) device: Arc<Device>,
    pub(super) number: usize,
    /// What products would work in.
    lent: Option<Memory>,
}

/// Ends work that may still use memory.
struct Quiet(Arc<Device>);

impl Drop for Quiet {
    fn drop(&mut self) {
        self.0.finish_all();
    }
}

impl EmulatedQueue {
    pub(super) fn new(emulator: Emulator, seed: u64, late: bool) -> Self {
        let device = Device::new(emulator, seed, late);
        let number = device.add_queue();
        EmulatedQueue { device, number, lent: None }
    }

    fn accepts(&self, what: &str, place: Option<Place>) -> Result<()> {
        match place {
            Some(Place::Device(0) | Place::Host | Place::Pinned) | None => Ok(()),
            Some(other) => Err(Error::System {
                what: what.to_string(),
                source_text: format!("memory in {other:?} was given to the emulated device 0"),
            }),
        }
    }
}

// SAFETY: tasks are done in their order, by whoever holds the device's lock, and none after a failure; memory that goes first
// ends what may use it (`Quiet`), or no task outlives its call.
unsafe impl Queue for EmulatedQueue {
    type Event = EmulatedEvent;

    fn place(&self) -> Place {
        Place::Device(0)
    }

    fn memory(&mut self, bytes: usize) -> Result<Memory> {
        Ok(placed(bytes, Place::Device(0), Quiet(self.device.clone())))
    }

    fn host_memory(&mut self, bytes: usize) -> Result<Memory> {
        Ok(match self.device.late {
            true => placed(bytes, Place::Pinned, Quiet(self.device.clone())),
            false => pinned(bytes),
        })
    }

    fn page_lock(&mut self, memory: Memory) -> Result<Memory> {
        let place = memory.place();
        Ok(held(memory, place, Quiet(self.device.clone())))
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        let failed = |source_text| Error::System { what: "building the emulation".into(), source_text };
        self.device.emulator.add(modules).map_err(failed)
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
        if !self.device.late {
            // SAFETY: by the caller.
            return unsafe { self.device.launch(launch) };
        }
        // SAFETY: only the lifetime changes; the caller promises the memory until the launch is done.
        let launch = unsafe { std::mem::transmute::<Launch<'_>, Launch<'static>>(launch.clone()) };
        self.device.give(self.number, Task::Launch(Box::new(launch)))
    }

    unsafe fn product(&mut self, product: &Product<'_>) -> Result<()> {
        self.accepts("a product", Some(product.place()))?;
        if !self.device.late {
            // SAFETY: by the caller.
            return unsafe { multiply_any(product) };
        }
        // SAFETY: as for a launch.
        let product = unsafe { std::mem::transmute::<Product<'_>, Product<'static>>(*product) };
        self.device.give(self.number, Task::Product(Box::new(product)))
    }

    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.device.give(self.number, Task::Copy { from, to, bytes })
    }

    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()> {
        if !self.device.late {
            // SAFETY: by the caller.
            unsafe { copy(from.as_ptr() as u64, to, from.len()) };
            return Ok(());
        }
        self.device.give(self.number, Task::Upload { from: from.to_vec(), to })
    }

    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()> {
        self.device.give(self.number, Task::Zero { at, bytes })
    }

    fn synchronize(&mut self) -> Result<()> {
        self.device.finish(self.number)
    }

    fn event(&self) -> Result<EmulatedEvent> {
        Ok(EmulatedEvent(Arc::default(), self.device.clone()))
    }

    fn record(&mut self, event: &EmulatedEvent) -> Result<()> {
        let number = event.0.recorded.fetch_add(1, Ordering::Relaxed) + 1;
        self.device.give(self.number, Task::Record(event.0.clone(), number))
    }

    fn happened(event: &EmulatedEvent) -> Result<bool> {
        if !event.has_happened() {
            event.1.step()?;
        }
        Ok(event.has_happened())
    }
}

/// A moment of an emulated queue.
pub struct EmulatedEvent(Arc<Moments>, Arc<Device>);

impl EmulatedEvent {
    fn recorded(&self) -> u64 {
        self.0.recorded.load(Ordering::Relaxed)
    }

    fn has_happened(&self) -> bool {
        self.0.happened.load(Ordering::Relaxed) >= self.recorded()
    }
}

// SAFETY: a sibling is of the same device, whose queues wait for its events.
unsafe impl Streams for EmulatedQueue {
    fn sibling(&self, _: Urgency) -> Result<Self> {
        Ok(EmulatedQueue { device: self.device.clone(), number: self.device.add_queue(), lent: None })
    }

    fn timed_event(&self) -> Result<EmulatedEvent> {
        self.event()
    }

    fn seconds(from: &EmulatedEvent, to: &EmulatedEvent) -> Result<f64> {
        match (from.0.when(), to.0.when()) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from).as_secs_f64()),
            _ => Err(Error::System {
                what: "measuring the time between emulated events".into(),
                source_text: "one of them has not happened".into(),
            }),
        }
    }

    fn after(&mut self, event: &EmulatedEvent) -> Result<()> {
        self.device.give(self.number, Task::After(event.0.clone(), event.recorded()))
    }
}

/// # Safety
/// Both ranges exist and do not overlap.
pub(super) unsafe fn copy(from: u64, to: u64, bytes: usize) {
    // SAFETY: by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}

/// # Safety
/// The range exists.
pub(super) unsafe fn zero(at: u64, bytes: usize) {
    // SAFETY: by the caller.
    unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes) };
}

/// Multiplies now.
///
/// # Safety
/// As [`Queue::product`], of memory of the process.
pub(super) unsafe fn multiply_any(product: &Product<'_>) -> Result<()> {
    // SAFETY: by the caller; `Product` has checked lengths and types.
    unsafe {
        match (product.inputs, product.output) {
            (DType::F32, DType::F32) => multiply::<f32, f32>(product),
            (DType::Bf16, DType::Bf16) => multiply::<half::bf16, half::bf16>(product),
            (DType::Bf16, DType::F32) => multiply::<half::bf16, f32>(product),
            (DType::F16, DType::F16) => multiply::<half::f16, half::f16>(product),
            (DType::F16, DType::F32) => multiply::<half::f16, f32>(product),
            (a, b) => {
                return Err(Error::System {
                    what: "emulating a product".into(),
                    source_text: format!("from {a} to {b} is not possible"),
                });
            }
        }
    }
    Ok(())
}

/// The definition.
///
/// # Safety
/// The matrices are memory of the process, of these types and of the product's lengths.
unsafe fn multiply<T: Float, O: Float>(p: &Product<'_>) {
    let Product { m, n, k, .. } = *p;
    let (left, right) = (p.left.0 as *const T, p.right.0 as *const T);
    for row in 0..m {
        for column in 0..n {
            let mut sum = 0f32;
            // SAFETY: all indices are inside the matrices, by the caller.
            unsafe {
                for i in 0..k {
                    let a = if p.left.1 { left.add(i * m + row) } else { left.add(row * k + i) };
                    let b = if p.right.1 { right.add(column * k + i) } else { right.add(i * n + column) };
                    sum += (*a).to_f32() * (*b).to_f32();
                }
                if let Some(added) = p.added {
                    sum += (*(added as *const O).add(row * n + column)).to_f32();
                }
                (p.out as *mut O).add(row * n + column).write(O::from_f32(sum));
            }
        }
    }
}
