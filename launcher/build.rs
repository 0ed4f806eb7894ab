//! Tells the program which compiler built it, for the run line of metrics and for doctor, and of which sources it was built, for
//! ranks that meet. The same sources have the same name wherever and however they are built, also without git; a commit would
//! be another one for each change of a document.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Whatever of the repository goes into the program.
const SOURCES: [&str; 16] = [
    "../Cargo.lock",
    "../Cargo.toml",
    "../collectives/Cargo.toml",
    "../collectives/cuda-sys/Cargo.toml",
    "../collectives/cuda-sys/src",
    "../collectives/mpi/Cargo.toml",
    "../collectives/mpi/src",
    "../collectives/src",
    "../collectives/ucx-sys/Cargo.toml",
    "../collectives/ucx-sys/src",
    "../models/Cargo.toml",
    "../models/src",
    "../zero/Cargo.toml",
    "../zero/src",
    "Cargo.toml",
    "src",
];

fn main() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output();
    let version = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default();
    println!("cargo::rustc-env=CARAVAN_RUSTC={version}");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = Vec::new();
    // What is not there, as in a package without its repository, counts for nothing.
    for source in SOURCES.map(Path::new).into_iter().filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", source.display());
        collect(source, &mut files);
    }
    files.sort();
    // FNV-1a, as of `collectives::digest`.
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut take = |byte: u8| digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    for path in &files {
        let bytes = std::fs::read(path).unwrap_or_default();
        let name = path.display().to_string();
        name.bytes().chain([0]).chain((bytes.len() as u64).to_le_bytes()).chain(bytes).for_each(&mut take);
    }
    println!("cargo::rustc-env=CARAVAN_BUILD={:08x}", (digest ^ digest >> 32) as u32);
}

/// All files there, but what editors leave beside them.
fn collect(path: &Path, into: &mut Vec<PathBuf>) {
    if !path.is_dir() {
        return into.push(path.to_owned());
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let kept = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !name.starts_with('.') && !name.ends_with('~')
    };
    entries.filter(kept).for_each(|path| collect(&path, into));
}
