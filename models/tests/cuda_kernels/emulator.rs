//! Builds the kernels for the processor, and runs launches of them.

use collectives::DType;
use libloading::{Library, Symbol};
use models::cuda::{HEADERS, Launch, Module, Range, Source};
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// The kernels, compiled for the processor.
pub struct Emulator {
    library: Library,
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

/// The emulator, built at the first call; `None`, with the reason on standard error, where there is no C++ compiler.
pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Result<Option<Emulator>, String>> = OnceLock::new();
    let built = EMULATOR.get_or_init(|| {
        let Some(compiler) = compiler() else {
            eprintln!(
                "skipped: the kernels' emulation needs a C++ compiler (tried $CXX, c++, g++ and clang++)"
            );
            return Ok(None);
        };
        let path = build(&compiler)?;
        // SAFETY: the library was just built from this repository; its constructors only fill a table.
        let library = unsafe { Library::new(&path) }.map_err(|e| e.to_string())?;
        Ok(Some(Emulator { library }))
    });
    built.as_ref().unwrap_or_else(|error| panic!("{error}")).as_ref()
}

/// Every module that tests run.
fn modules() -> Vec<Module> {
    let floats = [DType::F32, DType::Bf16, DType::F16];
    let mut modules = Vec::new();
    for &source in Source::ALL {
        match source {
            Source::AttentionForward | Source::AttentionBackward => {
                let kinds = [(DType::Bf16, 64), (DType::Bf16, 128), (DType::F16, 64)];
                modules.extend(kinds.map(|(dtype, head)| Module::with_head(source, dtype, head)));
            }
            Source::AttentionPlain => {
                let kinds = [
                    (DType::F32, 64),
                    (DType::F32, 6),
                    (DType::F32, 128),
                    (DType::Bf16, 16),
                    (DType::F16, 40),
                ];
                modules.extend(kinds.map(|(dtype, head)| Module::with_head(source, dtype, head)));
            }
            Source::Reduce => modules.extend(DType::ALL.map(|dtype| Module::new(source, dtype))),
            _ => modules.extend(floats.map(|dtype| Module::new(source, dtype))),
        }
    }
    modules
}

fn compiler() -> Option<String> {
    let wanted = std::env::var("CXX").ok();
    let known = ["c++", "g++", "clang++"].map(String::from);
    wanted.into_iter().chain(known).find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Compiles what has changed since the last time and links it.
fn build(compiler: &str) -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let read = |path: PathBuf| std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()));
    let flags = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE"];
    let mut headers = DefaultHasher::new();
    (compiler, flags).hash(&mut headers);
    HEADERS.hash(&mut headers);
    read(folder.join("emulation/device.h"))?.hash(&mut headers);

    // (source, macros and flags, object)
    let mut objects = Vec::new();
    let mut add = |source: PathBuf, arguments: Vec<String>| -> Result<(), String> {
        let mut hash = headers.clone();
        (read(source.clone())?, &arguments).hash(&mut hash);
        let object = target.join(format!("emulated-{:016x}.o", hash.finish()));
        objects.push((source, arguments, object));
        Ok(())
    };
    add(folder.join("emulation/runtime.cpp"), vec!["-O2".to_string()])?;
    add(folder.join("emulation/faults.cu"), vec!["-DMODULE=\"faults\"".to_string(), "-O1".to_string()])?;
    for module in modules() {
        let mut arguments: Vec<String> =
            module.macros().map(|(name, value)| format!("-D{name}={value}")).collect();
        arguments.extend([format!("-DMODULE=\"{module}\""), "-O1".to_string()]);
        add(folder.join("kernels").join(module.source.file()), arguments)?;
    }

    // One compiler for each processor: the files are small, and most of the time is starting up.
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((source, arguments, object)) =
                    objects.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    if object.exists() {
                        continue;
                    }
                    let mut command = Command::new(compiler);
                    command.args(flags).args(arguments).args(["-x", "c++", "-c"]).arg(source);
                    if let Err(error) = make(command, object) {
                        *failure.lock().unwrap() = Some(error);
                    }
                }
            });
        }
    });
    if let Some(error) = failure.into_inner().unwrap() {
        return Err(error);
    }
    let mut hash = DefaultHasher::new();
    objects.iter().for_each(|(_, _, object)| object.hash(&mut hash));
    let library = target.join(format!("emulated-{:016x}.so", hash.finish()));
    if !library.exists() {
        let mut command = Command::new(compiler);
        command.arg("-shared").args(objects.iter().map(|(_, _, object)| object));
        make(command, &library)?;
    }
    Ok(library)
}

/// Runs a compiler that writes `result`, which appears whole or not at all: other tests may be building too.
fn make(mut command: Command, result: &Path) -> Result<(), String> {
    let unfinished = result.with_extension(format!("{}.unfinished", std::process::id()));
    let output = command.arg("-o").arg(&unfinished).output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    std::fs::rename(&unfinished, result).map_err(|e| format!("{}: {e}", result.display()))
}

impl Emulator {
    /// Runs a launch with blocks and threads in the order of `seed`: 0 ascending, 1 descending, others shuffled.
    pub fn run(&self, launch: &Launch<'_>, seed: u64) -> Result<(), String> {
        if launch.is_empty() {
            return Ok(());
        }
        let place = launch.place().expect("a launch with arrays");
        assert!(place.is_host(), "the emulation runs on host memory");
        let (module, grid) = (launch.module.to_string(), &launch.grid);
        let (threads, shared) = (launch.threads, launch.shared);
        self.run_parts(&module, launch.kernel, grid, threads, shared, launch.slots(), launch.ranges(), seed)
    }

    /// The same from its parts. The ranges are memory of this process that nobody else uses, as far as the slots
    /// say.
    #[allow(clippy::too_many_arguments)]
    pub fn run_parts(
        &self,
        module: &str,
        kernel: &str,
        grid: &[u32; 3],
        threads: u32,
        shared: u32,
        slots: &[u64],
        ranges: &[Range],
        seed: u64,
    ) -> Result<(), String> {
        let (module, name) = (CString::new(module).unwrap(), CString::new(kernel).unwrap());
        let mut error = vec![0u8; 1024];
        // SAFETY: the library has this symbol with this signature, and checks each access against the ranges, which
        // live as long as the launch.
        let failed = unsafe {
            let emulate: Symbol<'_, Emulate> = self.library.get(b"caravan_emulate\0").unwrap();
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
