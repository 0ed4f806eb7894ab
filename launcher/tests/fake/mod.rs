//! CUDA's libraries as ones that run on the processor: kernels do nothing, products and collectives are what they should be.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Their sources and names.
const LIBRARIES: [(&str, &str); 4] = [
    ("driver.c", "libcuda.so.1"),
    ("nccl.c", "libnccl.so.2"),
    ("nvrtc.c", "libnvrtc.so.13"),
    ("cublaslt.c", "libcublasLt.so.13"),
];

/// The folder of the libraries; `None` where there is no C compiler, or a real driver is found first.
pub fn fake() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if !harness::installed("cc") {
            return None;
        }
        if harness::nvidia_driver() {
            harness::skip("a driver that runs on the processor: there is a real one");
            return None;
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
        std::fs::create_dir_all(&folder).expect("a folder");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../collectives/tests/fake_cuda");
        for (source, library) in LIBRARIES {
            let unfinished = folder.join(format!("{library}.{}", std::process::id()));
            let mut compiler = Command::new("cc");
            compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]);
            compiler.arg(sources.join(source)).arg("-o").arg(&unfinished);
            let status = compiler.status().expect("a compiler");
            assert!(status.success(), "{compiler:?}");
            std::fs::rename(&unfinished, folder.join(library)).expect("a library");
        }
        Some(folder)
    };
    FOLDER.get_or_init(build).as_ref()
}
