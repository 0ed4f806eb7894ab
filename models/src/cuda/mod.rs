//! The kernels of [`Ops`](crate::Ops) for NVIDIA GPUs.
//!
//! `kernels/` holds the CUDA C++ sources. [`Module`] says which of them are compiled how, the files named like those
//! of `cpu/` turn arguments into a [`Launch`], and whoever has a device runs it. A launch is a value: tests give the
//! same ones to `emulation/`, which runs the kernel sources on the processor.

mod attention;
mod elementwise;
mod embed;
mod launch;
mod loss;
mod module;
mod optimizer;
mod reduce;

pub use attention::{WIDEST_HEAD, attention, attention_backward};
pub use elementwise::{norm, norm_backward, norm_partials, rope, swiglu, swiglu_backward};
pub use embed::{embed, embed_backward};
pub use launch::{Launch, Range};
pub use loss::cross_entropy;
pub use module::{HEADERS, Module, Source};
pub use optimizer::{Coefficients, accumulate, adamw, find_nonfinite, narrow, squares, widen};
pub use reduce::reduce;
