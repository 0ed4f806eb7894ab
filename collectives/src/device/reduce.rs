//! The reduction of several ranks' contributions, with the bits of [`crate::reduce`].

use super::launch::{Launch, address, aligned};
use super::source::Module;
use crate::buffer::{View, ViewMut};
use crate::element::{Element, ReduceOp};

const THREADS: usize = 256;

/// Reduces `inputs`, equally long and in rank order, into `out`: of `T`, or of its accumulator to get the result
/// unrounded. `addresses` holds the inputs' addresses where the kernel can read them, which must stay until it has run.
///
/// # Panics
/// Lengths that differ, no input, or an `out` of another type.
pub fn reduce<'a, T: Element, O: Element>(
    op: ReduceOp,
    inputs: &[View<'a, T>],
    addresses: View<'a, u64>,
    out: ViewMut<'a, O>,
) -> Launch<'a> {
    let n = out.len();
    assert!(!inputs.is_empty() && inputs.iter().all(|i| i.len() == n), "inputs as long as the output");
    assert_eq!(addresses.len(), inputs.len(), "one address for each input");
    let wide = O::DTYPE != T::DTYPE;
    assert!(!wide || O::DTYPE == <T::Acc as Element>::DTYPE, "a reduction of {} into {}", T::DTYPE, O::DTYPE);
    let vectors = aligned(&[address(out.as_view())]) && inputs.iter().all(|i| aligned(&[address(*i)]));
    let at_once = 16 / size_of::<T>();
    let threads = if vectors { n / at_once + n % at_once } else { n };
    let operation = match op {
        ReduceOp::Sum => 0,
        ReduceOp::Average => 1,
        ReduceOp::Product => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
    };
    Launch::new(Module::reduce(T::DTYPE), "reduce", [threads.div_ceil(THREADS), 1, 1], THREADS)
        .write(out)
        .read_addresses(addresses, n * size_of::<T>())
        .int(inputs.len())
        .long(n)
        .int(operation)
        .flag(wide)
        .flag(vectors)
}
