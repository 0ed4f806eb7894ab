//! A driver and an NCCL that run on the processor, as libraries.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder of the two libraries; `None` where there is no C compiler, or a real driver is found first.
pub fn fake() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if !harness::installed("cc") {
            return None;
        }
        if std::fs::exists("/proc/driver/nvidia/version").unwrap_or(false) {
            harness::skip("bench over a driver that runs on the processor: there is a real one");
            return None;
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
        std::fs::create_dir_all(&folder).expect("a folder");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../collectives/tests/fake_cuda/fake.c");
        for (part, library) in [("FAKE_DRIVER", "libcuda.so.1"), ("FAKE_NCCL", "libnccl.so.2")] {
            let unfinished = folder.join(format!("{library}.{}", std::process::id()));
            let mut compiler = Command::new("cc");
            compiler.args(["-O1", "-shared", "-fPIC", "-pthread"]).arg(format!("-D{part}"));
            let status = compiler.arg(&source).arg("-o").arg(&unfinished).status().expect("a compiler");
            assert!(status.success(), "{compiler:?}");
            std::fs::rename(&unfinished, folder.join(library)).expect("a library");
        }
        Some(folder)
    };
    FOLDER.get_or_init(build).as_ref()
}
