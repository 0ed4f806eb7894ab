//! The program on emulated GPUs.

use harness::Bench;
use std::process::Command;

pub fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

/// Whether there is a compiler for the emulation's kernels.
pub fn can_emulate() -> bool {
    harness::cxx("bench kernels on emulated GPUs").is_some()
}

/// On an emulated GPU; kernels that one test compiled serve the next.
pub fn emulated(command: &mut Command) {
    command.env("CARAVAN_EMULATED_DEVICE", "1,256M").env("CARAVAN_CACHE", env!("CARGO_TARGET_TMPDIR"));
}
