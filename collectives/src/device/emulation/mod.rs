//! Runs kernels on the processor: for tests on machines without a GPU.
//!
//! `emulation.h` stands in for `device.cuh`; the same kernel sources are compiled with the system's C++ compiler.

use super::Queue;
use super::launch::{Launch, Range};
use super::product::Product;
use super::source::{Header, Module};
use crate::buffer::Memory;
use crate::element::{DType, Float};
use crate::error::{Error, Result};
use libloading::Library;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The test-only implementation of the device header, and the machine under it.
const EMULATION: Header = Header { name: "emulation.h", text: include_str!("emulation.h") };
const RUNTIME: &str = include_str!("runtime.cpp");
const FAULTS: &str = include_str!("faults.cu");

/// Kernels, compiled for the processor.
#[derive(Clone)]
pub struct Emulator {
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

/// One file to compile.
struct Unit {
    name: String,
    text: &'static str,
    headers: Vec<Header>,
    arguments: Vec<String>,
    object: PathBuf,
}

impl Emulator {
    /// Compiles `modules` in `folder`, as far as they are not there from the last time. `None` where there is no C++
    /// compiler.
    pub fn build(modules: &[Module], folder: &Path) -> std::result::Result<Option<Self>, String> {
        let Some(compiler) = compiler() else { return Ok(None) };
        let path = build(&compiler, modules, folder)?;
        // SAFETY: the library was just built from sources of this repository; its constructors only fill a table.
        let library = unsafe { Library::new(&path) }.map_err(|e| e.to_string())?;
        let modules = modules.iter().map(Module::to_string).collect();
        Ok(Some(Emulator { library: Arc::new(library), modules }))
    }

    /// A queue that runs blocks and threads in the order of `seed`: 0 ascending, 1 descending, others shuffled.
    pub fn queue(&self, seed: u64) -> EmulatedQueue {
        EmulatedQueue { emulator: self.clone(), seed }
    }

    /// Runs a kernel from its parts. The ranges are memory of this process that nobody else uses meanwhile.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        module: &str,
        kernel: &str,
        grid: &[u32; 3],
        threads: u32,
        shared: u32,
        slots: &[u64],
        ranges: &[Range],
        seed: u64,
    ) -> std::result::Result<(), String> {
        let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
        let (module, name) = (text(module)?, text(kernel)?);
        let mut error = vec![0u8; 1024];
        // SAFETY: the library has this symbol with this signature, and checks each access against the ranges.
        let failed = unsafe {
            let emulate = self.library.get::<Emulate>(b"caravan_emulate\0").map_err(|e| e.to_string())?;
            emulate(
                module.as_ptr(),
                name.as_ptr(),
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

/// The emulation as a queue: everything is done when a call returns.
pub struct EmulatedQueue {
    emulator: Emulator,
    seed: u64,
}

impl Queue for EmulatedQueue {
    fn memory(&mut self, bytes: usize) -> Result<Memory> {
        Ok(Memory::host(bytes))
    }

    fn host_memory(&mut self, bytes: usize) -> Result<Memory> {
        Ok(Memory::host(bytes))
    }

    fn prepare(&mut self, modules: &[Module]) -> Result<()> {
        for module in modules {
            if !self.emulator.modules.contains(&module.to_string()) {
                return Err(Error::System {
                    what: format!("preparing {module}"),
                    source_text: "it was not built for the emulation".into(),
                });
            }
        }
        Ok(())
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        if launch.is_empty() {
            return Ok(());
        }
        let what = || format!("emulating {} of {}", launch.kernel, launch.module);
        if launch.place().is_none_or(|place| !place.is_host()) {
            return Err(Error::System {
                what: what(),
                source_text: "only host memory can be emulated".into(),
            });
        }
        let (module, grid) = (launch.module.to_string(), &launch.grid);
        let (slots, ranges) = (launch.slots(), launch.ranges());
        self.emulator
            .run(&module, launch.kernel, grid, launch.threads, launch.shared, slots, ranges, self.seed)
            .map_err(|source_text| Error::System { what: what(), source_text })
    }

    fn product(&mut self, product: &Product<'_>) -> Result<()> {
        if !product.place().is_host() {
            return Err(Error::System {
                what: "emulating a product".into(),
                source_text: "only host memory can be emulated".into(),
            });
        }
        // SAFETY: `Product` has checked lengths and lent the memory; it is the host's.
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

    unsafe fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller, in host memory.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn upload(&mut self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.copy(from.as_ptr() as u64, to, from.len()) }
    }

    unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: by the caller, in host memory.
        unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes) };
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The definition.
///
/// # Safety
/// The matrices are host memory of these types and of the product's lengths.
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

fn compiler() -> Option<String> {
    let known = ["c++", "g++", "clang++"].map(String::from);
    let names = std::env::var("CXX").into_iter().chain(known);
    names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

fn build(compiler: &str, modules: &[Module], folder: &Path) -> std::result::Result<PathBuf, String> {
    let flags = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE"];
    let unit = |name: String, text: &'static str, headers: Vec<Header>, arguments: Vec<String>| {
        let mut hash = DefaultHasher::new();
        (compiler, flags, &name, text, &headers, &arguments).hash(&mut hash);
        let object = folder.join(format!("emulated-{:016x}.o", hash.finish()));
        Unit { name, text, headers, arguments, object }
    };
    let of_module = |module: &Module| {
        let mut headers = module.source.headers.to_vec();
        headers.push(EMULATION);
        let mut arguments = module.macros();
        arguments.extend([format!("-DMODULE=\"{module}\""), "-O1".into()]);
        unit(format!("{}.cu", module.source.name), module.source.text, headers, arguments)
    };
    let mut units: Vec<Unit> = modules.iter().map(of_module).collect();
    units.push(unit("runtime.cpp".into(), RUNTIME, vec![EMULATION], vec!["-O2".into()]));
    let faults = vec!["-DMODULE=\"faults\"".into(), "-O1".into()];
    units.push(unit("faults.cu".into(), FAULTS, vec![Header::DEVICE, EMULATION], faults));

    // One compiler for each processor: the files are small, and most of the time is starting up.
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if unit.object.exists() {
                        continue;
                    }
                    if let Err(error) = compile_unit(compiler, &flags, unit) {
                        *failure.lock().expect("no panic while locked") = Some(error);
                    }
                }
            });
        }
    });
    if let Some(error) = failure.into_inner().expect("no panic while locked") {
        return Err(error);
    }
    let mut hash = DefaultHasher::new();
    units.iter().for_each(|unit| unit.object.hash(&mut hash));
    let library = folder.join(format!("emulated-{:016x}.so", hash.finish()));
    if !library.exists() {
        let mut command = Command::new(compiler);
        command.arg("-shared").args(units.iter().map(|unit| &unit.object));
        make(command, &library)?;
    }
    Ok(library)
}

fn compile_unit(compiler: &str, flags: &[&str], unit: &Unit) -> std::result::Result<(), String> {
    // Each has its own folder: another process may be compiling the same.
    let sources = unit.object.with_extension(format!("{}.sources", std::process::id()));
    let write = |name: &str, text: &str| {
        let path = sources.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    };
    std::fs::create_dir_all(&sources).map_err(|e| format!("{}: {e}", sources.display()))?;
    write(&unit.name, unit.text)?;
    unit.headers.iter().try_for_each(|header| write(header.name, header.text))?;
    let mut command = Command::new(compiler);
    command.args(flags).args(&unit.arguments).args(["-x", "c++", "-c"]).arg(sources.join(&unit.name));
    let made = make(command, &unit.object);
    let _ = std::fs::remove_dir_all(&sources);
    made
}

/// Runs a compiler that writes `result`, which appears whole or not at all: other tests may be building too.
fn make(mut command: Command, result: &Path) -> std::result::Result<(), String> {
    let unfinished = result.with_extension(format!("{}.unfinished", std::process::id()));
    let output = command.arg("-o").arg(&unfinished).output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    std::fs::rename(&unfinished, result).map_err(|e| format!("{}: {e}", result.display()))
}
