//! What the crate promises, seen from outside: Hugging Face directories, and the numbers of PyTorch and transformers. One
//! program, because every one compiles the kernels anew.

mod hf;
mod hf_save;
mod parity;
mod trace;
mod transformers;

#[path = "../reference/mod.rs"]
mod reference;
