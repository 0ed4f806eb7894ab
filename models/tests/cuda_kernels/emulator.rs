//! The kernels of this crate on the processor.

use collectives::DType;
use collectives::device::emulation::Emulator;
use collectives::device::{Module, Source};
use models::cuda::sources;
use std::path::Path;
use std::sync::OnceLock;

/// The emulator, built at the first call; `None`, with the reason among the skips, where there is no C++ compiler.
pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Result<Option<Emulator>, String>> = OnceLock::new();
    let built = EMULATOR.get_or_init(|| {
        let emulator = Emulator::build(&modules(), Path::new(env!("CARGO_TARGET_TMPDIR")))?;
        if emulator.is_none() {
            crate::tools::skip("CUDA kernels on the processor: no C++ compiler ($CXX, c++, g++ or clang++)");
        }
        Ok(emulator)
    });
    built.as_ref().unwrap_or_else(|error| panic!("{error}")).as_ref()
}

/// Every module that tests run: all sources, each for what it is made for.
pub fn modules() -> Vec<Module> {
    use DType::{Bf16, F16, F32};
    let mut modules = Vec::new();
    let same = |a: &Source, b: &Source| a.name == b.name;
    for &source in sources::ALL {
        let heads: &[(DType, usize)] = if same(source, &sources::ATTENTION_PLAIN) {
            &[(F32, 64), (F32, 6), (F32, 128), (Bf16, 16), (F16, 40)]
        } else if same(source, &sources::ATTENTION_FORWARD) || same(source, &sources::ATTENTION_BACKWARD) {
            &[(Bf16, 64), (Bf16, 128), (F16, 64)]
        } else {
            &[(F32, 0), (Bf16, 0), (F16, 0)]
        };
        modules.extend(heads.iter().map(|&(element, head)| Module::with_head(source, element, head)));
    }
    modules.extend(DType::ALL.map(Module::reduce));
    modules
}
