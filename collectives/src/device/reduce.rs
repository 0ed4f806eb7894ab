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
    let vectors = inputs.iter().all(|i| aligned(&[address(*i)]));
    reduce_addresses::<T, O>(op, addresses, vectors, out)
}

/// The same for inputs of which only the addresses are at hand: whether all of them are `vectors`, multiples of 16.
///
/// # Panics
/// No input, or an `out` of another type.
pub(crate) fn reduce_addresses<'a, T: Element, O: Element>(
    op: ReduceOp,
    addresses: View<'a, u64>,
    vectors: bool,
    out: ViewMut<'a, O>,
) -> Launch<'a> {
    let (n, inputs) = (out.len(), addresses.len());
    assert!(inputs > 0, "a sum of nothing");
    let wide = O::DTYPE != T::DTYPE;
    assert!(!wide || O::DTYPE == <T::Acc as Element>::DTYPE, "a reduction of {} into {}", T::DTYPE, O::DTYPE);
    let vectors = vectors && aligned(&[address(out.as_view())]);
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
        .int(inputs)
        .long(n)
        .int(operation)
        .flag(wide)
        .flag(vectors)
}
