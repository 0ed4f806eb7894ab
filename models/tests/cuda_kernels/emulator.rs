//! Builds the kernels for the processor, and runs launches of them.

use collectives::DType;
use libloading::{Library, Symbol};
use models::cuda::{Launch, Module, Range, Source};
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

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
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let built = EMULATOR.get_or_init(|| {
        let Some(compiler) = compiler() else {
            eprintln!("skipped: no C++ compiler (tried $CXX, c++, g++ and clang++), which the kernels' emulation needs");
            return None;
        };
        let path = build(&compiler);
        // SAFETY: the library was just built from this repository; its constructors only fill a table.
        let library = unsafe { Library::new(&path) }.expect("the library that was just built");
        Some(Emulator { library })
    });
    built.as_ref()
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
                let kinds = [(DType::F32, 64), (DType::F32, 6), (DType::F32, 128), (DType::Bf16, 16), (DType::F16, 40)];
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

fn cuda_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda")
}

fn build(compiler: &str) -> PathBuf {
    let folder = cuda_folder();
    let flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror"];
    let mut hash = DefaultHasher::new();
    (compiler, flags).hash(&mut hash);
    for part in ["kernels", "emulation"] {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(folder.join(part)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hash));
    }
    let modules = modules();
    modules.hash(&mut hash);
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = target.join(format!("emulated-kernels-{:016x}.so", hash.finish()));
    if library.exists() {
        return library;
    }
    let work = tempfile::tempdir_in(target).unwrap();
    let object = |i: usize| work.path().join(format!("{i}.o"));
    let compile = |source: &Path, object: &Path, macros: &[String]| {
        let mut command = Command::new(compiler);
        command.args(flags).args(["-x", "c++", "-c"]).args(macros).arg(source).arg("-o").arg(object);
        run(command);
    };
    // One compiler for each processor: files are small, and most of the time is starting up.
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(module) = modules.get(i) else { break };
                    let mut macros: Vec<String> =
                        module.macros().map(|(name, value)| format!("-D{name}={value}")).collect();
                    macros.push(format!("-DMODULE=\"{module}\""));
                    compile(&folder.join("kernels").join(module.source.file()), &object(i), &macros);
                }
            });
        }
    });
    compile(&folder.join("emulation/runtime.cpp"), &object(modules.len()), &["-O2".to_string()]);
    let linked = work.path().join("kernels.so");
    let mut command = Command::new(compiler);
    command.arg("-shared").args((0..=modules.len()).map(object)).arg("-o").arg(&linked);
    run(command);
    std::fs::rename(&linked, &library).unwrap();
    library
}

fn run(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

impl Emulator {
    /// Runs a launch with blocks and threads in the order of `seed`: 0 ascending, 1 descending, others shuffled.
    pub fn run(&self, launch: &Launch<'_>, seed: u64) -> Result<(), String> {
        if launch.is_empty() {
            return Ok(());
        }
        let place = launch.place().expect("a launch with arrays");
        assert!(place.is_host(), "the emulation runs on host memory");
        let module = CString::new(launch.module.to_string()).unwrap();
        let name = CString::new(launch.kernel).unwrap();
        let mut error = vec![0u8; 1024];
        // SAFETY: the library has this symbol with this signature; the launch's arrays live as long as the launch.
        let failed = unsafe {
            let emulate: Symbol<'_, Emulate> = self.library.get(b"caravan_emulate\0").unwrap();
            emulate(
                module.as_ptr(),
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared,
                launch.slots().as_ptr(),
                launch.slots().len() as u32,
                launch.ranges().as_ptr(),
                launch.ranges().len() as u32,
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
