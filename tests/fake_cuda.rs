//! CUDA's libraries as ones that run on the processor: kernels do nothing, products and collectives are what they should be.

use crate::{installed, nvidia_driver, skip_all};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Their sources, and the names by which they are found.
const LIBRARIES: [(&str, &str); 4] = [
    ("driver", "libcuda.so.1"),
    ("nccl", "libnccl.so.2"),
    ("nvrtc", "libnvrtc.so.13"),
    ("cublaslt", "libcublasLt.so.13"),
];

/// Builds those whose sources are `wanted` in this folder, which it gives; `None`, with a skip, where there is no C compiler,
/// or a real driver, which would be found first. They are found by who sets `CARAVAN_CUDA_LIBRARIES`.
pub fn fake_cuda(about: &str, folder: PathBuf, wanted: &[&str]) -> Option<PathBuf> {
    if nvidia_driver() {
        skip_all(about, "there is a real driver");
        return None;
    }
    if !installed("cc") {
        return None;
    }
    std::fs::create_dir_all(&folder).expect("a folder");
    for (source, library) in LIBRARIES.iter().filter(|(source, _)| wanted.contains(source)) {
        build(source, &folder.join(library), &[]);
    }
    Some(folder)
}

/// A compiler of kernels in this folder that knows GPUs of this architecture, as 120, and of 80, where [`fake_cuda`] has built
/// others; gives its file.
pub fn fake_nvrtc(folder: &Path, knows: u32) -> PathBuf {
    std::fs::create_dir_all(folder).expect("a folder");
    let file = folder.join("libnvrtc.so.13");
    build("nvrtc", &file, &[&format!("-DKNOWS={knows}")]);
    file
}

fn build(source: &str, library: &Path, flags: &[&str]) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../collectives/tests/fake_cuda");
    // Another program may have loaded the last one.
    let unfinished = library.with_extension(format!("{}.unfinished", std::process::id()));
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]).args(flags);
    compiler.arg(sources.join(source).with_extension("c")).arg("-o").arg(&unfinished);
    assert!(compiler.status().expect("a compiler").success(), "{compiler:?}");
    std::fs::rename(&unfinished, library).expect("a library");
}
