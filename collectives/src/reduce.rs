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

use crate::element::{DType, Element, ReduceOp};
use half::{bf16, f16};
use std::mem::MaybeUninit;

/// Elements of one step through all inputs: small enough that the partial results of a deep tree stay in the
/// first-level cache.
const CHUNK: usize = 512;

/// Levels of partial results, each holding a multiple of four leaves: enough for 2^18 ranks.
const LEVELS: usize = 17;

/// Reduces `inputs` (addresses of `count` elements each, in rank order) into `out`.
///
/// # Safety
/// Every input is readable and `out` writable for `count` elements, all aligned to their element. `out` is
/// disjoint from each input or, unless it is wide and the type is 16-bit, the very same range. The length of
/// `inputs` is what the kernel was made for with [`kernel`].
pub type Kernel = unsafe fn(inputs: &[*const u8], out: *mut u8, count: usize);

/// The kernel for `inputs` contributions. `wide` leaves the result in the accumulator's type, unrounded.
pub fn kernel(dtype: DType, op: ReduceOp, wide: bool, inputs: usize) -> Kernel {
    match dtype {
        DType::F32 => by_op::<f32, f32>(op, inputs),
        DType::F64 => by_op::<f64, f64>(op, inputs),
        DType::F16 if wide => by_op::<f16, f32>(op, inputs),
        DType::F16 => by_op::<f16, f16>(op, inputs),
        DType::Bf16 if wide => by_op::<bf16, f32>(op, inputs),
        DType::Bf16 => by_op::<bf16, bf16>(op, inputs),
        DType::I32 => by_op::<i32, i32>(op, inputs),
        DType::I64 => by_op::<i64, i64>(op, inputs),
        DType::U32 => by_op::<u32, u32>(op, inputs),
        DType::U64 => by_op::<u64, u64>(op, inputs),
        DType::I8 => by_op::<i8, i8>(op, inputs),
        DType::U8 => by_op::<u8, u8>(op, inputs),
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

fn by_op<T: Narrow<T> + Narrow<O>, O: Element>(op: ReduceOp, inputs: usize) -> Kernel {
    match op {
        ReduceOp::Sum => by_inputs::<Reduction<T, O, Sum>>(inputs),
        ReduceOp::Average => by_inputs::<Reduction<T, O, Average>>(inputs),
        ReduceOp::Product => by_inputs::<Reduction<T, O, Product>>(inputs),
        ReduceOp::Min => by_inputs::<Reduction<T, O, Min>>(inputs),
        ReduceOp::Max => by_inputs::<Reduction<T, O, Max>>(inputs),
    }
}

fn by_inputs<R: Reduce>(inputs: usize) -> Kernel {
    match inputs {
        1 => run_one::<R>,
        2 => run_two::<R>,
        _ => run_tree::<R>,
    }
}

/// The accumulator's arithmetic.
pub(crate) trait Arithmetic: Element {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// The left one when equal; a NaN when there is one.
    fn min(self, other: Self) -> Self;
    /// The left one when equal; a NaN when there is one.
    fn max(self, other: Self) -> Self;
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! float_arithmetic {
    ($($t:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if (other < self) | other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if (other > self) | other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self { self / ranks as $t }
        }
    )*};
}

macro_rules! integer_arithmetic {
    ($($t:ty as $wide:ty),*) => {$(
        impl Arithmetic for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { if other < self { other } else { self } }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if other > self { other } else { self } }
            // The number of ranks need not fit the element.
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self { (self as $wide / ranks as $wide) as $t }
        }
    )*};
}

float_arithmetic!(f32, f64);
integer_arithmetic!(i8 as i64, u8 as u64, i32 as i64, u32 as u64, i64 as i64, u64 as u64);

/// An element whose reductions can be delivered as `O`: itself, or its accumulator.
pub(crate) trait Narrow<O>: Element<Acc: Arithmetic> {
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> O;
}

macro_rules! narrow {
    ($($t:ty => $o:ty: $widen:expr, $narrow:expr;)*) => {$(
        impl Narrow<$o> for $t {
            #[inline(always)]
            fn widen(self) -> Self::Acc { $widen(self) }
            #[inline(always)]
            fn narrow(acc: Self::Acc) -> $o { $narrow(acc) }
        }
    )*};
}

narrow! {
    f32 => f32: same, same;
    f64 => f64: same, same;
    f16 => f16: f16_to_f32, f32_to_f16;
    f16 => f32: f16_to_f32, same;
    bf16 => bf16: crate::element::Float::to_f32, crate::element::Float::from_f32;
    bf16 => f32: crate::element::Float::to_f32, same;
    i8 => i8: same, same;
    u8 => u8: same, same;
    i32 => i32: same, same;
    u32 => u32: same, same;
    i64 => i64: same, same;
    u64 => u64: same, same;
}

#[inline(always)]
fn same<T>(x: T) -> T {
    x
}

/// Branch-free, so that loops over it vectorise; exact.
#[inline(always)]
fn f16_to_f32(x: f16) -> f32 {
    let bits = x.to_bits() as u32;
    let magnitude = (bits & 0x7fff) << 13;
    // The product moves the exponent's bias and normalises subnormals, exactly.
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits(magnitude | 0x7f80_0000 | (((bits & 0x3ff != 0) as u32) << 22));
    let unsigned = if bits & 0x7c00 == 0x7c00 { special } else { finite };
    f32::from_bits(unsigned.to_bits() | ((bits & 0x8000) << 16))
}

/// Branch-free, so that loops over it vectorise; to nearest even.
#[inline(always)]
fn f32_to_f16(x: f32) -> f16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Normal results: rebias the exponent and round by adding half of the last place, less one when even.
    let normal = bits.wrapping_add(0xc800_0fff).wrapping_add((bits >> 13) & 1) >> 13;
    // Subnormal results: adding 0.5 lets the floating-point unit round at the right place.
    let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let nan = 0x7e00 | ((bits >> 13) & 0x3ff);
    let finite = if bits < 0x3880_0000 { subnormal } else { normal };
    let large = if bits > 0x7f80_0000 { nan } else { 0x7c00 };
    f16::from_bits((sign | if bits >= 0x4780_0000 { large } else { finite }) as u16)
}

pub(crate) struct Sum;
pub(crate) struct Average;
pub(crate) struct Product;
pub(crate) struct Min;
pub(crate) struct Max;

trait Operation: 'static {
    fn join<A: Arithmetic>(a: A, b: A) -> A;
    #[inline(always)]
    fn finish<A: Arithmetic>(a: A, _ranks: usize) -> A {
        a
    }
}

impl Operation for Sum {
    #[inline(always)]
    fn join<A: Arithmetic>(a: A, b: A) -> A {
        a.add(b)
    }
}

impl Operation for Average {
    #[inline(always)]
    fn join<A: Arithmetic>(a: A, b: A) -> A {
        a.add(b)
    }
    #[inline(always)]
    fn finish<A: Arithmetic>(a: A, ranks: usize) -> A {
        a.divide(ranks)
    }
}

impl Operation for Product {
    #[inline(always)]
    fn join<A: Arithmetic>(a: A, b: A) -> A {
        a.mul(b)
    }
}

impl Operation for Min {
    #[inline(always)]
    fn join<A: Arithmetic>(a: A, b: A) -> A {
        a.min(b)
    }
}

impl Operation for Max {
    #[inline(always)]
    fn join<A: Arithmetic>(a: A, b: A) -> A {
        a.max(b)
    }
}

/// One combination of element, result and operation, as a single type parameter.
pub(crate) trait Reduce: 'static {
    type In: Element;
    type Acc: Arithmetic;
    type Out: Element;
    /// Whether wider instruction sets pay: integers reach memory speed with the baseline.
    const WIDE: bool;
    fn widen(x: Self::In) -> Self::Acc;
    fn join(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn finish(a: Self::Acc, ranks: usize) -> Self::Out;
}

struct Reduction<T, O, Op>(std::marker::PhantomData<(T, O, Op)>);

impl<T: Narrow<O>, O: Element, Op: Operation> Reduce for Reduction<T, O, Op> {
    type In = T;
    type Acc = T::Acc;
    type Out = O;
    const WIDE: bool = matches!(T::DTYPE, DType::F16 | DType::F32 | DType::F64 | DType::Bf16);

    #[inline(always)]
    fn widen(x: T) -> T::Acc {
        Narrow::<O>::widen(x)
    }
    #[inline(always)]
    fn join(a: T::Acc, b: T::Acc) -> T::Acc {
        Op::join(a, b)
    }
    #[inline(always)]
    fn finish(a: T::Acc, ranks: usize) -> O {
        T::narrow(Op::finish(a, ranks))
    }
}

/// The arguments of a [`Kernel`], whose contract holds for as long as this exists.
#[derive(Clone, Copy)]
struct Task<'a> {
    inputs: &'a [*const u8],
    out: *mut u8,
    count: usize,
}

impl Task<'_> {
    /// # Safety
    /// `i < count`, `rank < inputs.len()`, and the kernel's contract.
    #[inline(always)]
    unsafe fn load<R: Reduce>(&self, rank: usize, i: usize) -> R::Acc {
        // SAFETY: in range by the caller.
        R::widen(unsafe { self.inputs.get_unchecked(rank).cast::<R::In>().add(i).read() })
    }

    /// # Safety
    /// As for `load`.
    #[inline(always)]
    unsafe fn store<R: Reduce>(&self, i: usize, acc: R::Acc) {
        // SAFETY: in range by the caller.
        unsafe { self.out.cast::<R::Out>().add(i).write(R::finish(acc, self.inputs.len())) }
    }
}

crate::simd_dispatch! {
    fn one<R: Reduce>(task: Task<'_>) = one_body;
    fn two<R: Reduce>(task: Task<'_>) = two_body;
    fn tree<R: Reduce>(task: Task<'_>) = tree_body;
}

macro_rules! entry {
    ($($name:ident: $dispatch:ident, $body:ident;)*) => {$(
        /// # Safety
        /// The contract of [`Kernel`].
        unsafe fn $name<R: Reduce>(inputs: &[*const u8], out: *mut u8, count: usize) {
            let task = Task { inputs, out, count };
            if R::WIDE { $dispatch::<R>(task) } else { $body::<R>(task) }
        }
    )*};
}

entry! {
    run_one: one, one_body;
    run_two: two, two_body;
    run_tree: tree, tree_body;
}

/// Walks the elements in blocks whose loads all come before their stores, so that the result may replace an
/// input: compilers would otherwise have to assume that a store feeds the next load.
#[inline(always)]
fn blocks<R: Reduce>(task: Task<'_>, value: impl Fn(usize) -> R::Acc) {
    const BLOCK: usize = 32;
    let mut i = 0;
    while i + BLOCK <= task.count {
        let acc: [R::Acc; BLOCK] = std::array::from_fn(|k| value(i + k));
        for (k, acc) in acc.into_iter().enumerate() {
            // SAFETY: i + k < count.
            unsafe { task.store::<R>(i + k, acc) };
        }
        i += BLOCK;
    }
    while i < task.count {
        // SAFETY: i < count.
        unsafe { task.store::<R>(i, value(i)) };
        i += 1;
    }
}

#[inline(always)]
fn one_body<R: Reduce>(task: Task<'_>) {
    // SAFETY: `blocks` asks for i < count only, and there is one input.
    blocks::<R>(task, |i| unsafe { task.load::<R>(0, i) });
}

#[inline(always)]
fn two_body<R: Reduce>(task: Task<'_>) {
    // SAFETY: `blocks` asks for i < count only, and there are two inputs.
    blocks::<R>(task, |i| unsafe { R::join(task.load::<R>(0, i), task.load::<R>(1, i)) });
}

type Partial<A> = [MaybeUninit<A>; CHUNK];

/// dst = dst ⊕ src, for the first `len` elements.
///
/// # Safety
/// Both are initialised up to `len`.
#[inline(always)]
unsafe fn merge<R: Reduce>(dst: &mut Partial<R::Acc>, src: &Partial<R::Acc>, len: usize) {
    for (d, s) in dst[..len].iter_mut().zip(&src[..len]) {
        // SAFETY: initialised by the caller.
        *d = MaybeUninit::new(unsafe { R::join(d.assume_init(), s.assume_init()) });
    }
}

#[inline(always)]
fn tree_body<R: Reduce>(task: Task<'_>) {
    let n = task.inputs.len();
    assert!(n <= 4 << (LEVELS - 1), "{n} ranks");
    let mut partials: [Partial<R::Acc>; LEVELS] = [[MaybeUninit::uninit(); CHUNK]; LEVELS];
    let mut start = 0;
    while start < task.count {
        let len = CHUNK.min(task.count - start);
        let mut depth = 0;
        let mut quads = 0usize;
        let mut rank = 0;
        while rank < n {
            let leaves = (n - rank).min(4);
            for (k, p) in partials[depth][..len].iter_mut().enumerate() {
                // SAFETY: start + k < count and the ranks are below n.
                let v = |r: usize| unsafe { task.load::<R>(rank + r, start + k) };
                *p = MaybeUninit::new(match leaves {
                    1 => v(0),
                    2 => R::join(v(0), v(1)),
                    3 => R::join(R::join(v(0), v(1)), v(2)),
                    _ => R::join(R::join(v(0), v(1)), R::join(v(2), v(3))),
                });
            }
            depth += 1;
            rank += leaves;
            if leaves == 4 {
                // A binary counter: as many merges as the count of quads has trailing zeros.
                quads += 1;
                for _ in 0..quads.trailing_zeros() {
                    let (left, right) = partials.split_at_mut(depth - 1);
                    // SAFETY: both levels were written up to len.
                    unsafe { merge::<R>(&mut left[depth - 2], &right[0], len) };
                    depth -= 1;
                }
            }
        }
        while depth > 1 {
            let (left, right) = partials.split_at_mut(depth - 1);
            // SAFETY: both levels were written up to len.
            unsafe { merge::<R>(&mut left[depth - 2], &right[0], len) };
            depth -= 1;
        }
        for (k, p) in partials[0][..len].iter().enumerate() {
            // SAFETY: written above; start + k < count.
            unsafe { task.store::<R>(start + k, p.assume_init()) };
        }
        start += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle;
    use crate::simd::{Level, with_level};

    #[test]
    fn half_conversions_equal_the_half_crate() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            assert_eq!(f16_to_f32(h).to_bits(), h.to_f32_const().to_bits(), "{bits:#x}");
        }
        let mut bits = 1u32;
        for i in 0..3_000_000u32 {
            // Every exponent and sign, with the mantissas where rounding changes, then any bits.
            let x = if i < 1 << 20 { (i >> 11) << 23 | (i & 0x7ff) << 12 | (i & 1) } else { bits };
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(x);
            assert_eq!(f32_to_f16(x).to_bits(), f16::from_f32_const(x).to_bits(), "{:#x}", x.to_bits());
        }
    }

    fn check<T: Element>(make: impl Fn(u64) -> T) {
        let bits = |x: &[T]| crate::oracle::bytes(x).to_vec();
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 23, 33] {
            for count in [0, 1, 15, 31, 32, 33, 511, 512, 513, 1100] {
                let data: Vec<Vec<T>> = (0..n)
                    .map(|r| (0..count).map(|i| make((r * 7919 + i * 104_729 + 1) as u64)).collect())
                    .collect();
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
                    assert_eq!(oracle::bytes(&out), oracle::bytes(&wide), "{} {op} wide", T::DTYPE);
                }
            }
        }
    }

    #[test]
    fn kernels_equal_the_oracle_bit_for_bit() {
        let noise = |x: u64| x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
        let unit = |x: u64| noise(x) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0;
        check::<f32>(|x| unit(x) as f32);
        check::<f64>(unit);
        check::<f16>(|x| f16::from_f64(unit(x)));
        check::<bf16>(|x| bf16::from_f64(unit(x)));
        check::<i32>(|x| noise(x) as i32);
        check::<u32>(|x| noise(x) as u32);
        check::<i64>(|x| noise(x).wrapping_mul(x) as i64);
        check::<u64>(|x| noise(x).wrapping_mul(x));
        check::<i8>(|x| noise(x) as i8);
        check::<u8>(|x| noise(x) as u8);
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
