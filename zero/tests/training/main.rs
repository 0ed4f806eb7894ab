//! Training as its users see it: the same bits on every stage and transport, on the host and on devices, and the numbers
//! of PyTorch. One program, because every one compiles the kernels anew.

mod bits;
mod device;
mod parity;
mod toy;

#[path = "../../../models/tests/reference/mod.rs"]
mod reference;
