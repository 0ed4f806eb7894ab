//! CUDA's libraries as ones that run on the processor, for one process.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Their sources and names, but NCCL's.
const LIBRARIES: [(&str, &str); 3] =
    [("driver.c", "libcuda.so.1"), ("nvrtc.c", "libnvrtc.so.13"), ("cublaslt.c", "libcublasLt.so.13")];

/// Builds them in a folder of this name, which it gives; `None` where there is no C compiler, or a real driver. They are
/// found by who sets `CARAVAN_CUDA_LIBRARIES`.
pub fn fake(about: &str, name: &str) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    if harness::nvidia_driver() || !harness::installed("cc") {
        harness::skip_all(about, "there is a real driver, or no C compiler (cc)");
        return None;
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda");
    for (source, library) in LIBRARIES {
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
        let status = compiler.arg(sources.join(source)).arg("-o").arg(folder.join(library)).status();
        assert!(status.expect("a compiler").success(), "{compiler:?}");
    }
    Some(folder)
}
