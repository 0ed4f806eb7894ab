//! Every CUDA kernel against a naive oracle, without a GPU: the kernel sources run on the processor, through the
//! test-only implementation of their device header in `src/cuda/emulation`.
//!
//! Each case runs in ascending, descending and shuffled order of blocks, warps and lanes, and must give the same
//! bits: a missing barrier or a sum in no fixed order shows. The emulation itself reports accesses out of bounds,
//! races on shared memory and elements written twice. Where there is a GPU, the same cases run on it too.

mod attention;
mod elementwise;
mod emulator;
mod faults;
mod head;
mod model;
mod optimizer;
mod reduction;
mod tools;
