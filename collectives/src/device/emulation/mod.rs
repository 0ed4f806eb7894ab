//! Runs kernels on the processor: for tests on machines without a GPU.
//!
//! `emulation.h` stands in for `device.cuh`, `warpgroup.h` for `warpgroup.cuh`; the same kernel sources are compiled with
//! the system's C++ compiler. Memory of the emulated device is memory of the process, but its place is a device's, so that
//! host code that touches it by mistake is caught as it would be on a GPU.

mod build;
mod queue;
mod wire;
mod work;

use super::launch::Range;
use super::source::{Header, Module};
use crate::buffer::{Memory, Place};
use crate::locked;
use libloading::Library;
pub use queue::{EmulatedEvent, EmulatedQueue};
use std::any::Any;
use std::ffi::c_char;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
pub use wire::EmulatedWire;

/// The test-only implementations of the device headers, and the machine under them.
const EMULATION: Header = Header { name: "emulation.h", text: include_str!("emulation.h") };
const WARPGROUP: Header = Header { name: "warpgroup.h", text: include_str!("warpgroup.h") };

/// Kernels, compiled for the processor: those that it was built with, and others when a queue is prepared for them.
#[derive(Clone)]
pub struct Emulator {
    compiler: Arc<str>,
    folder: Arc<PathBuf>,
    libraries: Arc<Mutex<Vec<Built>>>,
}

/// A library with the names of its modules.
#[derive(Clone)]
struct Built {
    library: Arc<Library>,
    modules: Arc<[String]>,
}

type Emulate = unsafe extern "C" fn(
    module: *const c_char,
    name: *const c_char,
    grid: *const u32,
    threads: u32,
    shared: u32,
    slots: *const u64,
    arguments: u32,
    ranges: *const Range,
    range_count: u32,
    seed: u64,
    error: *mut c_char,
    error_bytes: usize,
) -> i32;

/// A launch as the emulation takes it.
pub struct Parts<'a> {
    /// The name of what was built.
    pub module: &'a str,
    /// The entry in it.
    pub kernel: &'a str,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The arguments.
    pub slots: &'a [u64],
    /// The arrays that they reach.
    pub ranges: &'a [Range],
}

impl Emulator {
    /// Compiles `modules` in `folder`, as far as they are not there from the last time. `None` where there is no C++
    /// compiler.
    pub fn build(modules: &[Module], folder: &Path) -> Result<Option<Self>, String> {
        let Some(compiler) = build::compiler() else { return Ok(None) };
        let emulator = Emulator {
            compiler: compiler.into(),
            folder: Arc::new(folder.to_path_buf()),
            libraries: Arc::default(),
        };
        emulator.add(modules)?;
        Ok(Some(emulator))
    }

    /// Compiles those of `modules` that it does not have yet.
    fn add(&self, modules: &[Module]) -> Result<(), String> {
        let mut libraries = locked(&self.libraries);
        let known = |module: &Module| {
            let name = module.to_string();
            libraries.iter().any(|built| built.modules.contains(&name))
        };
        let missing: Vec<Module> = modules.iter().copied().filter(|module| !known(module)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let path = build::build(&self.compiler, &missing, &self.folder)?;
        // SAFETY: the library was just built from sources of this repository; its constructors only fill a table.
        let library = unsafe { Library::new(&path) }.map_err(|e| e.to_string())?;
        let modules = missing.iter().map(Module::to_string).collect();
        libraries.push(Built { library: Arc::new(library), modules });
        Ok(())
    }

    /// A queue of a device of its own that has done everything when a call returns. It runs blocks and threads in the
    /// order of `seed`: 0 ascending, 1 descending, others shuffled.
    pub fn queue(&self, seed: u64) -> EmulatedQueue {
        EmulatedQueue::new(self.clone(), seed, false)
    }

    /// The same, but nothing is done before somebody waits for it, and what queues of the device have not ordered by
    /// events is done in an order that `seed` chooses.
    pub fn late_queue(&self, seed: u64) -> EmulatedQueue {
        EmulatedQueue::new(self.clone(), seed, true)
    }

    /// Runs a kernel from its parts, in the order of `seed`. What it does wrong is an error.
    ///
    /// # Safety
    /// The ranges are memory of this process that nobody else uses meanwhile as the kernel does.
    pub unsafe fn run(&self, parts: &Parts<'_>, seed: u64) -> Result<(), String> {
        let Parts { module, kernel, grid, threads, shared, slots, ranges } = *parts;
        let library = {
            let libraries = locked(&self.libraries);
            // Each library has the emulation's own faults besides its modules.
            let has = |built: &&Built| built.modules.iter().any(|m| m == module) || module == "faults";
            libraries.iter().find(has).map(|built| built.library.clone())
        };
        let library = library.ok_or_else(|| "it was not prepared".to_string())?;
        let (module, name) = (Name::of(module)?, Name::of(kernel)?);
        let mut error = [0u8; 1024];
        // SAFETY: the library has this symbol with this signature, and checks each access against the ranges, which exist by
        // the caller.
        let failed = unsafe {
            let emulate = library.get::<Emulate>(b"caravan_emulate\0").map_err(|e| e.to_string())?;
            emulate(
                module.0.as_ptr().cast(),
                name.0.as_ptr().cast(),
                grid.as_ptr(),
                threads,
                shared,
                slots.as_ptr(),
                slots.len() as u32,
                ranges.as_ptr(),
                ranges.len() as u32,
                seed,
                error.as_mut_ptr().cast(),
                error.len(),
            )
        };
        match failed {
            0 => Ok(()),
            _ => {
                let end = error.iter().position(|&b| b == 0).unwrap_or(error.len());
                Err(String::from_utf8_lossy(&error[..end]).into_owned())
            }
        }
    }
}

/// A name that ends with a NUL, without taking memory: training on the emulation is to show that it takes none.
struct Name([u8; 128], usize);

impl Name {
    fn of(name: impl fmt::Display) -> Result<Self, String> {
        use fmt::Write;
        let mut text = Name([0; 128], 0);
        write!(text, "{name}").map_err(|_| format!("{name} is too long a name"))?;
        Ok(text)
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.0[..self.1]).unwrap_or("")
    }
}

impl fmt::Write for Name {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let end = self.1 + part.len();
        // The last byte stays 0.
        if end >= self.0.len() || part.contains('\0') {
            return Err(fmt::Error);
        }
        self.0[self.1..end].copy_from_slice(part.as_bytes());
        self.1 = end;
        Ok(())
    }
}

/// Memory of the process that passes as page-locked: both the host and an emulated device reach it.
pub fn pinned(bytes: usize) -> Memory {
    placed(bytes, Place::Pinned, ())
}

/// Memory of the process in another place, which keeps `owner` until it is dropped.
fn placed(bytes: usize, place: Place, owner: impl Any + Send + Sync) -> Memory {
    held(Memory::host(bytes), place, owner)
}

/// Memory as if it were in `place`, with an owner that is dropped before it.
fn held(mut memory: Memory, place: Place, owner: impl Any + Send + Sync) -> Memory {
    let bytes = memory.bytes();
    let start = NonNull::new(memory.as_mut_ptr()).expect("memory is not at 0");
    // The owner goes first: it lets work end that still uses the memory.
    // SAFETY: zeroed, aligned, unique, and alive as long as its owner.
    unsafe { Memory::from_raw(start, bytes, place, Box::new((owner, memory))) }
}
