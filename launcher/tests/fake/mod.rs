//! The program with CUDA's libraries as ones that run on the processor.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder of the libraries; `None` where there is no C compiler, or a real driver would be found first.
pub fn fake() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_cuda");
        harness::fake_cuda("a GPU on the processor", folder, &["driver", "nccl", "nvrtc", "cublaslt"])
    };
    FOLDER.get_or_init(build).as_ref()
}
