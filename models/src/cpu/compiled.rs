//! What it takes to compile kernels in this crate. A function with type parameters is compiled in every program that
//! calls it, and of the kernels each instruction set has its own: they were half a minute of the compiler's time in every
//! program that has a model. So for the types that models have, a function without parameters calls them.

use collectives::Float;
use std::mem::{ManuallyDrop, transmute_copy};

/// Whether two element types are one.
pub(super) const fn is<A: Float, B: Float>() -> bool {
    A::DTYPE as u8 == B::DTYPE as u8
}

/// `x`, whose type is known as `B` too.
///
/// # Safety
/// The two types are one, but perhaps for lifetimes, of which those of `B` are not longer.
pub(super) unsafe fn known_as<A, B>(x: A) -> B {
    let x = ManuallyDrop::new(x);
    // SAFETY: the caller's promise; what is copied is not dropped.
    unsafe { transmute_copy(&*x) }
}
