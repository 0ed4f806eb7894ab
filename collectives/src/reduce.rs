//! Reductions in canonical order: every element gets the same bits whatever moved the contributions.
//!
//! The value is that of a balanced binary tree over rank indices, `tree(0..n)`, where
//! `tree(lo..hi) = tree(lo..mid) ⊕ tree(mid..hi)` with `mid = lo + next_power_of_two(hi - lo) / 2`. With a power
//! of two of ranks this is what recursive halving computes too. 16-bit floats are accumulated in `f32` over the
//! whole tree, and an average divides in the accumulator; then there is one rounding, or none when the result is
//! taken in the accumulator's type. Which NaN comes out of several NaNs is not promised, only that one does.
//!
//! The tree is the one that a binary counter walks: leaves are taken in order and two finished subtrees of equal
//! size are merged at once, so the walk needs one partial result per level and no recursion.

mod float16;
mod kernels;
mod numbers;
mod partial;

use crate::element::{DType, Element, ReduceOp};
use half::bf16;
use kernels::{Four, One, Pairs, Reduce, Reduction, Tree, Two, halves, whole};
use numbers::{Average, Deliver, Max, Min, Narrow, Pair, Product, Sum};
pub use partial::{Stage, Staged, accumulator};

/// Elements of one step through all inputs: small enough that the partial results of a deep tree stay in the
/// first-level cache.
const CHUNK: usize = 512;

/// Reduces `inputs` (addresses of `count` elements each, in rank order) into `out`.
///
/// # Safety
/// Every input is readable and `out` writable for `count` elements, all aligned to their element. `out` is
/// disjoint from each input or, unless it is wide and the type is 16-bit, the very same range. The length of
/// `inputs` is what the kernel was made for with [`kernel`].
pub type Kernel = unsafe fn(inputs: &[*const u8], out: *mut u8, count: usize);

/// The kernel for `inputs` contributions. `wide` leaves the result in the accumulator's type, unrounded.
pub fn kernel(dtype: DType, op: ReduceOp, wide: bool, inputs: usize) -> Kernel {
    match (dtype, wide) {
        (DType::F16, true) => float16::f16_kernel(op, true),
        (DType::Bf16, true) if inputs == 1 => {
            kernels::halves::<One, Pairs<Pair, Sum>, Reduction<bf16, f32, Sum>>
        }
        (DType::Bf16, true) => by_op_in_pairs::<f32, Pair>(op, inputs),
        _ if inputs == 1 => match dtype.size() {
            1 => copy::<u8>,
            2 => copy::<u16>,
            4 => copy::<u32>,
            _ => copy::<u64>,
        },
        (DType::F16, false) => float16::f16_kernel(op, false),
        (DType::Bf16, false) => by_op_in_pairs::<bf16, u32>(op, inputs),
        (DType::F32, _) => by_op::<f32>(op, inputs),
        (DType::F64, _) => by_op::<f64>(op, inputs),
        (DType::I32, _) => by_op::<i32>(op, inputs),
        (DType::I64, _) => by_op::<i64>(op, inputs),
        (DType::U32, _) => by_op::<u32>(op, inputs),
        (DType::U64, _) => by_op::<u64>(op, inputs),
        (DType::I8, _) => by_op::<i8>(op, inputs),
        (DType::U8, _) => by_op::<u8>(op, inputs),
    }
}

/// Reduces equally long slices in rank order into `out`: [`kernel`] for code that has slices.
///
/// Panics when lengths differ or there is no input.
pub fn reduce<T: Element>(op: ReduceOp, inputs: &[&[T]], out: &mut [T]) {
    assert!(
        !inputs.is_empty() && inputs.iter().all(|i| i.len() == out.len()),
        "inputs as long as the output"
    );
    let pointers: Vec<*const u8> = inputs.iter().map(|i| i.as_ptr().cast()).collect();
    // SAFETY: slices of the output's length, and the output's borrow is exclusive.
    unsafe { kernel(T::DTYPE, op, false, inputs.len())(&pointers, out.as_mut_ptr().cast(), out.len()) }
}

/// One contribution is its own reduction, the average too.
///
/// # Safety
/// The contract of [`Kernel`].
unsafe fn copy<T>(inputs: &[*const u8], out: *mut u8, count: usize) {
    // SAFETY: the caller's; `copy` also takes a range onto itself.
    unsafe { std::ptr::copy(inputs[0].cast::<T>(), out.cast::<T>(), count) }
}

fn by_op<T: Narrow<T>>(op: ReduceOp, inputs: usize) -> Kernel {
    match op {
        ReduceOp::Sum => by_inputs::<Reduction<T, T, Sum>>(inputs),
        ReduceOp::Average => by_inputs::<Reduction<T, T, Average>>(inputs),
        ReduceOp::Product => by_inputs::<Reduction<T, T, Product>>(inputs),
        ReduceOp::Min => by_inputs::<Reduction<T, T, Min>>(inputs),
        ReduceOp::Max => by_inputs::<Reduction<T, T, Max>>(inputs),
    }
}

fn by_inputs<R: Reduce>(inputs: usize) -> Kernel {
    match inputs {
        2 => whole::<Two, R>,
        4 => whole::<Four, R>,
        _ => whole::<Tree, R>,
    }
}

fn by_op_in_pairs<O: Element, P: Copy + 'static>(op: ReduceOp, inputs: usize) -> Kernel
where
    bf16: Narrow<O>,
    Pair: Deliver<P>,
{
    match op {
        ReduceOp::Sum => in_pairs::<Pairs<P, Sum>, Reduction<bf16, O, Sum>>(inputs),
        ReduceOp::Average => in_pairs::<Pairs<P, Average>, Reduction<bf16, O, Average>>(inputs),
        ReduceOp::Product => in_pairs::<Pairs<P, Product>, Reduction<bf16, O, Product>>(inputs),
        ReduceOp::Min => in_pairs::<Pairs<P, Min>, Reduction<bf16, O, Min>>(inputs),
        ReduceOp::Max => in_pairs::<Pairs<P, Max>, Reduction<bf16, O, Max>>(inputs),
    }
}

fn in_pairs<P: Reduce, R: Reduce>(inputs: usize) -> Kernel {
    match inputs {
        2 => halves::<Two, P, R>,
        4 => halves::<Four, P, R>,
        // Partial results of pairs would be interleaved in memory, which costs more than pairs save.
        _ => whole::<Tree, R>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::bytes_of;
    use crate::oracle;
    use crate::simd::{Level, with_level};

    fn check<T: Element>() {
        let bits = |x: &[T]| bytes_of(x).to_vec();
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 23, 33] {
            for count in [0, 1, 15, 31, 32, 33, 511, 512, 513, 1100] {
                let data: Vec<Vec<T>> =
                    (0..n).map(|r| (0..count).map(|i| oracle::sample(r, i)).collect()).collect();
                let slices: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
                for op in ReduceOp::ALL {
                    let expected = oracle::reduce(op, &slices);
                    for level in Level::available() {
                        let mut out = vec![T::default(); count];
                        with_level(level, || reduce(op, &slices, &mut out));
                        assert_eq!(bits(&out), bits(&expected), "{} {op} of {n} x {count}", T::DTYPE);
                    }
                    for replaced in [0, n - 1] {
                        let mut own = data[replaced].clone();
                        let pointers: Vec<*const u8> = (0..n)
                            .map(|r| if r == replaced { own.as_ptr() } else { data[r].as_ptr() }.cast())
                            .collect();
                        // SAFETY: the output is exactly one of the inputs.
                        unsafe { kernel(T::DTYPE, op, false, n)(&pointers, own.as_mut_ptr().cast(), count) };
                        assert_eq!(bits(&own), bits(&expected), "{} {op} in place of {replaced}", T::DTYPE);
                    }
                    let wide = oracle::reduce_wide(op, &slices);
                    let mut out = vec![T::Acc::default(); count];
                    let pointers: Vec<*const u8> = slices.iter().map(|s| s.as_ptr().cast()).collect();
                    // SAFETY: slices of the output's length.
                    unsafe { kernel(T::DTYPE, op, true, n)(&pointers, out.as_mut_ptr().cast(), count) };
                    assert_eq!(bytes_of(&out), bytes_of(&wide), "{} {op} wide", T::DTYPE);
                }
            }
        }
    }

    #[test]
    fn kernels_equal_the_oracle_bit_for_bit() {
        oracle::for_every_type!(check);
    }

    /// Of inputs in which every pair of edges comes, and of few of them, so that tails have them too.
    fn check_edges<T: Element>() {
        for n in [1, 2, 3, 4, 5, 8] {
            for count in [1, 2, 3, 33, 410] {
                let input = |r| (0..count).map(|i| oracle::edge(r, i + 7 * count)).collect();
                let data: Vec<Vec<T>> = (0..n).map(input).collect();
                let slices: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
                let pointers: Vec<*const u8> = slices.iter().map(|s| s.as_ptr().cast()).collect();
                for (op, level) in levels() {
                    let (mut out, mut wide) = (vec![T::default(); count], vec![T::Acc::default(); count]);
                    with_level(level, || {
                        reduce(op, &slices, &mut out);
                        // SAFETY: slices of the output's length.
                        unsafe { kernel(T::DTYPE, op, true, n)(&pointers, wide.as_mut_ptr().cast(), count) };
                    });
                    let what = format!("{} {op} of {n} x {count}, {level:?}", T::DTYPE);
                    let (expected, unrounded) =
                        (oracle::reduce(op, &slices), oracle::reduce_wide(op, &slices));
                    assert!(oracle::alike(&out, &expected), "{what}: {out:?}, not {expected:?}");
                    assert!(oracle::alike(&wide, &unrounded), "{what} wide: {wide:?}, not {unrounded:?}");
                }
            }
        }
    }

    fn levels() -> impl Iterator<Item = (ReduceOp, Level)> {
        ReduceOp::ALL.into_iter().flat_map(|op| Level::available().map(move |level| (op, level)))
    }

    #[test]
    fn zeros_infinities_and_ends_of_ranges_are_reduced_as_the_oracle_does() {
        oracle::for_every_type!(check_edges);
    }

    /// Of about as many ranks as the type counts to, and of more than it has numbers.
    fn check_averages<T: Element>() {
        const COUNT: usize = 70;
        for n in [127, 128, 200, 255, 256, 300] {
            let input = |r| (0..COUNT).map(|i| oracle::edge(r, i + r)).collect();
            let data: Vec<Vec<T>> = (0..n).map(input).collect();
            let slices: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
            let mut out = vec![T::default(); COUNT];
            reduce(ReduceOp::Average, &slices, &mut out);
            assert_eq!(out, oracle::reduce(ReduceOp::Average, &slices), "{} of {n}", T::DTYPE);
        }
    }

    #[test]
    fn averages_of_more_ranks_than_an_element_counts() {
        check_averages::<i8>();
        check_averages::<u8>();
    }

    #[test]
    fn sixteen_bit_inputs_round_once() {
        // In bf16, 256 + 1 rounds back to 256 each time; in f32 the three ones are kept.
        let parts = [bf16::from_f32(256.0), bf16::ONE, bf16::ONE, bf16::ONE];
        let slices: Vec<&[bf16]> = parts.iter().map(std::slice::from_ref).collect();
        let mut out = [bf16::ZERO];
        reduce(ReduceOp::Sum, &slices, &mut out);
        assert_eq!(out[0], bf16::from_f32(259.0));
        assert_ne!(out[0], bf16::from_f32(256.0));
    }

    #[test]
    fn a_nan_anywhere_gives_nan_and_ties_keep_the_lower_rank() {
        for op in ReduceOp::ALL {
            for n in [2, 3, 4, 6] {
                for at in 0..n {
                    let data: Vec<[f32; 1]> =
                        (0..n).map(|r| [if r == at { f32::NAN } else { r as f32 }]).collect();
                    let slices: Vec<&[f32]> = data.iter().map(|d| &d[..]).collect();
                    let mut out = [0.0];
                    reduce(op, &slices, &mut out);
                    assert!(out[0].is_nan(), "{op} of {n} with a NaN at {at}");
                }
            }
        }
        let mut out = [1.0f32];
        reduce(ReduceOp::Min, &[&[-0.0], &[0.0]], &mut out);
        assert!(out[0].is_sign_negative());
        reduce(ReduceOp::Max, &[&[-0.0], &[0.0]], &mut out);
        assert!(out[0].is_sign_negative());
    }
}
