//! Compiles kernel sources for the processor.

use super::{EMULATION, WARPGROUP};
use crate::device::cache::who;
use crate::device::source::{Header, Module};
use crate::parallel;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

const MACHINE: Header = Header { name: "machine.h", text: include_str!("machine.h") };
/// What each library has besides its kernels.
const RUNTIME: [(&str, &str); 4] = [
    ("runtime.cpp", include_str!("runtime.cpp")),
    ("memory.cpp", include_str!("memory.cpp")),
    ("float16.cpp", include_str!("float16.cpp")),
    ("warpgroup.cpp", include_str!("warpgroup.cpp")),
];
const FAULTS: &str = include_str!("faults.cu");

/// One file to compile.
struct Unit {
    name: String,
    text: &'static str,
    headers: Vec<Header>,
    arguments: Vec<String>,
    object: PathBuf,
}

/// The first compiler that works.
pub(super) fn compiler() -> Option<String> {
    let known = ["c++", "g++", "clang++"].map(String::from);
    let names = std::env::var("CXX").into_iter().chain(known);
    names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Compiles `modules` in `folder`, as far as they are not there from the last time, into one library.
pub(super) fn build(
    compiler: &str,
    modules: &[Module],
    folder: &Path,
) -> std::result::Result<PathBuf, String> {
    let flags = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE"];
    let unit = |name: String, text: &'static str, headers: Vec<Header>, arguments: Vec<String>| {
        let mut hash = DefaultHasher::new();
        (compiler, flags, &name, text, &headers, &arguments).hash(&mut hash);
        let object = folder.join(format!("emulated-{:016x}.o", hash.finish()));
        Unit { name, text, headers, arguments, object }
    };
    let of_module = |module: &Module| {
        let mut headers = module.source.headers.to_vec();
        headers.extend([EMULATION, WARPGROUP]);
        let mut arguments = module.macros();
        arguments.extend([format!("-DMODULE=\"{module}\""), "-O1".into()]);
        unit(format!("{}.cu", module.source.name), module.source.text, headers, arguments)
    };
    let mut units: Vec<Unit> = modules.iter().map(of_module).collect();
    for (name, text) in RUNTIME {
        units.push(unit(name.into(), text, vec![EMULATION, WARPGROUP, MACHINE], vec!["-O2".into()]));
    }
    let faults = vec!["-DMODULE=\"faults\"".into(), "-O1".into()];
    units.push(unit(
        "faults.cu".into(),
        FAULTS,
        vec![Header::DEVICE, Header::WARPGROUP, EMULATION, WARPGROUP],
        faults,
    ));

    // One compiler for each processor: the files are small, and most of the time is starting up.
    let compile = |unit: &Unit| match unit.object.exists() {
        true => Ok(()),
        false => compile_unit(compiler, &flags, unit),
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    parallel::map(units.iter(), processors, compile).into_iter().collect::<Result<(), _>>()?;
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
    let sources = unit.object.with_extension(format!("{}.sources", who()));
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
    let unfinished = result.with_extension(format!("{}.unfinished", who()));
    let output = command.arg("-o").arg(&unfinished).output().map_err(|e| format!("{command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    std::fs::rename(&unfinished, result).map_err(|e| format!("{}: {e}", result.display()))
}
