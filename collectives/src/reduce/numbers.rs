//! What elements are while they are reduced: their accumulators, and how these are joined, finished and rounded.

use crate::element::{Element, Float};
use half::bf16;

/// The accumulator's arithmetic.
pub(super) trait Arithmetic: Copy + Default {
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
pub(super) trait Narrow<O>: Element<Acc: Arithmetic> {
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
    bf16 => bf16: Float::to_f32, Float::from_f32;
    bf16 => f32: Float::to_f32, same;
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

pub(super) struct Sum;
pub(super) struct Average;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;

pub(super) trait Operation: 'static {
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

/// Two bf16 in the accumulator: a load of both needs no widening move, a store of both no narrowing one.
pub(super) type Pair = [f32; 2];

impl Arithmetic for Pair {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        [self[0].add(other[0]), self[1].add(other[1])]
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        [self[0].mul(other[0]), self[1].mul(other[1])]
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        [Arithmetic::min(self[0], other[0]), Arithmetic::min(self[1], other[1])]
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        [Arithmetic::max(self[0], other[0]), Arithmetic::max(self[1], other[1])]
    }
    #[inline(always)]
    fn divide(self, ranks: usize) -> Self {
        [self[0].divide(ranks), self[1].divide(ranks)]
    }
}

/// What two bf16 become: two again, or two `f32`.
pub(super) trait Deliver<P> {
    fn deliver(self) -> P;
}

impl Deliver<Pair> for Pair {
    #[inline(always)]
    fn deliver(self) -> Pair {
        self
    }
}

impl Deliver<u32> for Pair {
    /// To nearest even. A NaN needs no care here: those that come from bf16 end in sixteen zeros, so that rounding
    /// does not carry into their exponent.
    #[inline(always)]
    fn deliver(self) -> u32 {
        let round = |x: f32| x.to_bits().wrapping_add(0x7fff + ((x.to_bits() >> 16) & 1));
        round(self[1]) & 0xffff_0000 | round(self[0]) >> 16
    }
}
