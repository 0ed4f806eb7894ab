//! That the checks notice kernels that are wrong, so that their silence means something.

use crate::emulator::emulator;
use crate::outcome;
use collectives::device::emulation::EmulatedQueue;
use collectives::device::{Launch, Module, Product, Queue};
use collectives::{Error, Memory, Place, Result};

/// A device that makes one mistake.
struct Faulty {
    queue: EmulatedQueue,
    fault: Fault,
    launches: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Every third launch is left out.
    Forgets,
    /// The last 16 bytes that a launch writes first are zeros.
    Cuts,
    /// Products are left out.
    Multiplies,
    /// No mistake, but it reaches nothing except its own memory.
    Reaches,
}

impl Faulty {
    fn reaches(&self, place: Option<Place>) -> Result<()> {
        match self.fault == Fault::Reaches && place != Some(self.place()) {
            true => {
                Err(Error::System { what: "a launch".into(), source_text: format!("memory in {place:?}") })
            }
            false => Ok(()),
        }
    }
}

// SAFETY: the inner queue does everything, or a part of it.
unsafe impl Queue for Faulty {
    type Event = <EmulatedQueue as Queue>::Event;

    fn place(&self) -> Place {
        self.queue.place()
    }

    fn memory(&mut self, bytes: usize) -> Result<Memory> {
        self.queue.memory(bytes)
    }

    fn host_memory(&mut self, bytes: usize) -> Result<Memory> {
        self.queue.host_memory(bytes)
    }

    fn page_lock(&mut self, memory: Memory) -> Result<Memory> {
        self.queue.page_lock(memory)
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        self.queue.prepare(modules)
    }

    fn prepare_products(&mut self) -> Result<()> {
        self.queue.prepare_products()
    }

    fn lend(&mut self, workspace: Memory) {
        self.queue.lend(workspace);
    }

    unsafe fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        self.launches += 1;
        self.reaches(launch.place())?;
        if self.fault == Fault::Forgets && self.launches.is_multiple_of(3) {
            return Ok(());
        }
        // SAFETY: by the caller.
        unsafe { self.queue.launch(launch)? };
        let written = launch.ranges().iter().find(|range| range.writable != 0);
        match (self.fault, written) {
            (Fault::Cuts, Some(range)) => {
                let bytes = range.bytes.min(16);
                // SAFETY: the end of an array that the launch was given.
                unsafe { self.queue.zero(range.start + range.bytes - bytes, bytes as usize) }
            }
            _ => Ok(()),
        }
    }

    unsafe fn product(&mut self, product: &Product<'_>) -> Result<()> {
        self.reaches(Some(product.place()))?;
        // SAFETY: by the caller.
        if self.fault == Fault::Multiplies { Ok(()) } else { unsafe { self.queue.product(product) } }
    }

    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.queue.copy(from, to, bytes) }
    }

    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.queue.upload(from, to) }
    }

    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.queue.zero(at, bytes) }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.queue.synchronize()
    }

    fn event(&self) -> Result<Self::Event> {
        self.queue.event()
    }

    fn record(&mut self, event: &Self::Event) -> Result<()> {
        self.queue.record(event)
    }

    fn happened(event: &Self::Event) -> Result<bool> {
        EmulatedQueue::happened(event)
    }
}

#[test]
fn checks_notice_kernels_that_are_wrong() {
    let Some(emulator) = emulator() else { return };
    let faulty = |fault| [0, 1].map(|seed| Faulty { queue: emulator.queue(seed), fault, launches: 0 });
    for name in ["norms", "embeddings", "cross_entropies", "casts_round_once", "swiglu_and_its_backward"] {
        for fault in [Fault::Forgets, Fault::Cuts] {
            let outcome = outcome(name, faulty(fault));
            assert!(!outcome.wrong.is_empty(), "{name} of a device that {fault:?} passes");
        }
    }
    let outcome = outcome("products_of_every_orientation", faulty(Fault::Multiplies));
    assert!(!outcome.wrong.is_empty(), "products that were not made pass");
}

#[test]
fn kernels_are_checked_on_the_memory_that_training_has() {
    let Some(emulator) = emulator() else { return };
    let strict =
        || [0, 1].map(|seed| Faulty { queue: emulator.queue(seed), fault: Fault::Reaches, launches: 0 });
    for name in ["norms", "swiglu_and_its_backward", "reductions_have_the_bits_of_the_processor"] {
        assert_eq!(outcome(name, strict()).wrong, [""; 0], "{name}");
    }
    for name in ["products_of_every_orientation", "an_f32_llama_with_tied_embeddings"] {
        assert_eq!(outcome(name, strict()).wrong, [""; 0], "{name}");
    }
    // One case is about memory of the host that the device reaches.
    let outcome = outcome("what_is_not_finite_is_found_wherever_it_is", strict());
    assert!(outcome.wrong.iter().any(|wrong| wrong.contains("Pinned")), "{:?}", outcome.wrong);
}
