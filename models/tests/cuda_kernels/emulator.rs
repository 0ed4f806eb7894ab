//! The kernels of this crate on the processor.

use collectives::device::emulation::Emulator;
use models::cuda::check;
use std::path::Path;
use std::sync::OnceLock;

/// The emulator, built at the first call; `None`, with the reason among the skips, where there is no C++ compiler.
pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Result<Option<Emulator>, String>> = OnceLock::new();
    let built = EMULATOR.get_or_init(|| {
        let built = Emulator::build(&check::modules(), Path::new(env!("CARGO_TARGET_TMPDIR")))?;
        Ok(harness::made_by_cxx("CUDA kernels on the processor", built))
    });
    built.as_ref().unwrap_or_else(|error| panic!("{error}")).as_ref()
}
