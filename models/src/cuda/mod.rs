//! The kernels of [`Ops`](crate::Ops) for NVIDIA GPUs.
//!
//! `kernels/` holds the CUDA C++ sources, [`sources`] lists them, and the files named like those of `cpu/` turn
//! arguments into launches, which are values: tests give the same ones to the emulation of `collectives::device`,
//! which runs the kernel sources on the processor.

mod attention;
#[doc(hidden)]
pub mod check;
mod elementwise;
mod embed;
mod loss;
mod ops;
mod optimizer;
pub mod sources;
#[doc(hidden)]
pub mod speed;
mod trial;

pub use attention::{TensorCores, WIDEST_HEAD, attention, attention_backward};
pub use elementwise::{norm, norm_backward, norm_partials, rope, swiglu, swiglu_backward};
pub use embed::{embed, embed_backward};
pub use loss::cross_entropy;
pub use ops::Cuda;
pub(crate) use ops::CudaShape;
pub use optimizer::{
    Coefficients, LEAST_MOMENT, NORM_BLOCK, NORM_LANES, SQUARES_WORDS, accumulate, adamw, find_nonfinite,
    narrow, squares,
};
