//! Kernels that are made ready before anything is launched, on a driver and a compiler that run on the processor.

use collectives::DType;
use collectives::device::cuda::{Gpu, Stream, Urgency};
use collectives::device::{Cache, Module, Queue};
use std::path::Path;

#[test]
fn a_module_that_no_block_could_hold_keeps_no_other_from_being_compiled() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_prepare");
    let Some(folder) =
        harness::fake_cuda("kernels that are made ready", folder, &["driver", "nvrtc", "cublaslt"])
    else {
        return;
    };
    // SAFETY: the only test of this program, before any other thread is started.
    unsafe { std::env::set_var("CARAVAN_CUDA_LIBRARIES", &folder) };
    let kept = tempfile::tempdir().expect("a folder");
    let gpu = Gpu::open_with(0, Cache::at(kept.path())).expect("a GPU");
    let mut stream = Stream::new(&gpu, Urgency::Normal).expect("a stream");
    let modules = [DType::F32, DType::F16, DType::Bf16, DType::F64].map(Module::reduce);
    let [large, larger, rest @ ..] = modules;
    let most = gpu.properties().shared;
    let [large, larger] = [large.shared(most + 1), larger.shared(most + 2)];
    let error = stream.prepare(&[large, larger, rest[0], rest[1]]).unwrap_err().to_string();
    for word in ["preparing reduce:f32", "232449 bytes of shared memory a block", "has 232448"] {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(std::fs::read_dir(kept.path()).expect("a folder").count(), 2);
    stream.prepare(&rest).expect("they fit");
}
