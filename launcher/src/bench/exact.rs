//! Data whose reduction is exact in its own type, in any order, so that a wrong element is one whose bits differ
//! from the expected ones, and no tolerance hides anything.
//!
//! Contributions are a pure function of (seed, index, rank). They are one tile of [`TILE`] elements again and again,
//! a prime, each time from another of its elements on, so that a part that lands at the place of another differs, and so
//! that filling and checking cost a copy and a comparison. What is said of sums is said of each element of the tile, wherever
//! it stands.
//!
//! - Sum: integers of the whole range, which wrap; floats that are whole numbers times one power of two per
//!   element, few enough and small enough that every partial sum over any set of ranks is representable.
//! - Average: the same; integers do not wrap, and truncate at the end. NCCL multiplies floats by its rounded 1/ranks
//!   before it adds them up, and rounds again: for it they are multiples of the number of ranks that come through that
//!   unharmed.
//! - Product: odd integers, which wrap without collapsing to zero; floats that are powers of two and, on three
//!   ranks at most, 3, 5 or 7, within the range of exponents.
//! - Min, max: any value but zero (whose sign an order may choose) and NaN.

use super::operation::{Counts, Operation};
use collectives::{DType, Element, ReduceOp, bf16, f16, mix};
use std::iter::once;

/// Elements of which contributions are made.
pub const TILE: usize = 65521;

/// Where in the tile that stands which is at `index`. Each repetition begins at another place, by the square of its number, so
/// that no two parts of several tiles are alike, as far apart as they are.
fn place(index: usize) -> usize {
    /// With which usual sizes of parts do not meet those distances.
    const TURN: usize = 40503;
    let repetition = index / TILE % TILE;
    (index + repetition * repetition % TILE * TURN) % TILE
}

/// So far those that come back from a rounded division are looked for one by one.
const SMALL: u64 = 64;

/// An element that test data can be made of, by its bits.
pub trait Exact: Element {
    /// Bits of the largest whole number up to which all are representable; 0 for integers.
    const PRECISION: u32;
    /// The largest `e` with 2^e and 2^-e both normal; 0 for integers.
    const EXPONENT: i32;
    /// Whether the type has negative numbers.
    const SIGNED: bool;

    /// From a number that is representable.
    fn from_number(x: f64) -> Self;
    /// From the low bits.
    fn from_bits(bits: u64) -> Self;
    /// All bits, zero extended.
    fn bits(self) -> u64;
    /// The number. Exact for floats; integers above 2^53 are rounded.
    fn number(self) -> f64;
}

/// `body` with `T` as the type that a `DType` names: from a value to types, once for all of them.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $body:expr) => {
        $crate::bench::exact::with_type!(@ $dtype, $t, $body,
            F32 f32, F64 f64, F16 collectives::f16, Bf16 collectives::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64,
            U64 u64)
    };
    (@ $dtype:expr, $t:ident, $body:expr, $($name:ident $type:ty),*) => {
        match $dtype {
            $(collectives::DType::$name => {
                type $t = $type;
                $body
            })*
        }
    };
}
pub(super) use with_type;

macro_rules! integer {
    ($($t:ty, $unsigned:ty, $signed:literal;)*) => {$(
        impl Exact for $t {
            const PRECISION: u32 = 0;
            const EXPONENT: i32 = 0;
            const SIGNED: bool = $signed;
            fn from_number(x: f64) -> Self { x as $t }
            fn from_bits(bits: u64) -> Self { bits as $t }
            fn bits(self) -> u64 { self as $unsigned as u64 }
            fn number(self) -> f64 { self as f64 }
        }
    )*};
}

integer! {
    i8, u8, true; u8, u8, false; i32, u32, true; u32, u32, false; i64, u64, true; u64, u64, false;
}

macro_rules! float {
    ($($t:ty, $bits:ty, $precision:literal, $exponent:literal, $from:expr, $to:expr;)*) => {$(
        impl Exact for $t {
            const PRECISION: u32 = $precision;
            const EXPONENT: i32 = $exponent;
            const SIGNED: bool = true;
            fn from_number(x: f64) -> Self { $from(x) }
            fn from_bits(bits: u64) -> Self { <$t>::from_bits(bits as $bits) }
            fn bits(self) -> u64 { <$t>::to_bits(self) as u64 }
            fn number(self) -> f64 { $to(self) }
        }
    )*};
}

float! {
    f32, u32, 24, 126, |x| x as f32, f64::from;
    f64, u64, 53, 1022, |x| x, |x| x;
    f16, u16, 11, 14, f16::from_f64, f16::to_f64;
    bf16, u16, 8, 126, bf16::from_f64, bf16::to_f64;
}

/// What is moved or reduced.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Changes everything.
    pub seed: u64,
    /// Ranks that contribute.
    pub ranks: usize,
    /// How contributions are combined; None where they are only moved.
    pub op: Option<ReduceOp>,
    /// Whether a library combines by rules of its own. Sums and products of integers then stay within their type, because
    /// libraries differ in what they do beyond it: Open MPI, for one, wraps or saturates bytes as the processor's
    /// instructions do. Floats that are averaged may be multiplied by 1/ranks first.
    pub foreign: bool,
}

impl Data {
    /// Random bits of (index) or of (index, rank).
    fn draw(&self, index: usize, rank: Option<usize>) -> u64 {
        let index = place(index) as u64;
        let rank = rank.map_or(0, |r| r as u64 + 1);
        mix(mix(self.seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            ^ rank.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// What `rank` contributes at `index`.
    pub fn contribution<T: Exact>(&self, index: usize, rank: usize) -> T {
        let bits = self.draw(index, Some(rank));
        match self.op {
            None => T::from_bits(bits),
            Some(ReduceOp::Sum) if T::PRECISION == 0 && !self.foreign => T::from_bits(bits),
            Some(ReduceOp::Sum | ReduceOp::Average) => self.summand(index, rank),
            Some(ReduceOp::Product) if T::PRECISION == 0 && !self.foreign => T::from_bits(bits | 1),
            Some(ReduceOp::Product) if T::PRECISION == 0 => {
                let chosen = rank == self.draw(index, None) as usize % self.ranks;
                let sign = if T::SIGNED && bits & 1 == 1 { -1.0 } else { 1.0 };
                T::from_number(sign * if chosen { 7.0 } else { 1.0 })
            }
            Some(ReduceOp::Product) => self.factor(index, rank),
            Some(ReduceOp::Min | ReduceOp::Max) => ordered(bits),
        }
    }

    /// The most that the magnitudes of all contributions to one element may come to, in units.
    fn budget<T: Exact>() -> u64 {
        match (T::PRECISION, T::SIGNED) {
            (0, signed) => (1u64 << (8 * size_of::<T>().min(7) - usize::from(signed)).min(52)) - 1,
            (precision, _) => 1 << precision,
        }
    }

    /// Whether what is added up are products with the rounded 1/ranks, which may round as well.
    fn divides_first<T: Exact>(&self) -> bool {
        self.op == Some(ReduceOp::Average) && self.foreign && T::PRECISION > 0
    }

    /// Whether `whole` can be passed in times the number of ranks, and is itself again once that is multiplied by 1/ranks.
    fn comes_back<T: Exact>(&self, whole: u64) -> bool {
        let ranks = self.ranks as f64;
        // As NCCL has it: rounded from a double for those, and else from a float.
        let inverse = match T::DTYPE {
            DType::F64 => T::from_number(1.0 / ranks),
            _ => T::from_number(f64::from((1.0 / ranks) as f32)),
        };
        let passed = T::from_number(whole as f64 * ranks);
        passed.number() == whole as f64 * ranks
            && T::from_number(passed.number() * inverse.number()).number() == whole as f64
    }

    /// The least that does, if one does that the type has room for.
    fn least_that_comes_back<T: Exact>(&self) -> Option<u64> {
        let most = Self::budget::<T>() / self.ranks as u64;
        (1..=most.min(SMALL)).find(|&whole| self.comes_back::<T>(whole))
    }

    /// Why no data tell a right result of this reduction from a wrong one, if none do.
    pub fn obstacle<T: Exact>(&self) -> Option<String> {
        (self.divides_first::<T>() && self.least_that_comes_back::<T>().is_none()).then(|| {
            format!(
                "over {0} ranks every {1} rounds when it is divided by {0} before it is added up, so that no average can be \
                 called right or wrong; only -c 0 measures it",
                self.ranks,
                T::DTYPE
            )
        })
    }

    /// One of at most `most` ranks takes part at `index`: every `stride`-th, from a place that varies.
    fn takes_part(&self, index: usize, rank: usize, stride: usize) -> bool {
        (rank + self.draw(index, None) as usize % stride).is_multiple_of(stride)
    }

    /// A contribution to a sum: a whole number times one power of two per element, and times the number of ranks where
    /// that is divided by first.
    fn summand<T: Exact>(&self, index: usize, rank: usize) -> T {
        let (step, least) = match self.divides_first::<T>() {
            true => (self.ranks as u64, self.least_that_comes_back::<T>().unwrap_or(1)),
            false => (1, 1),
        };
        let budget = (Self::budget::<T>() / step).max(1);
        // Where there are more ranks than units to go round, only every so many take part.
        let stride = ((4 * self.ranks as u64 * least).div_ceil(budget) as usize).clamp(1, self.ranks);
        if !self.takes_part(index, rank, stride) {
            return T::default();
        }
        let most = (budget / self.ranks.div_ceil(stride) as u64).min(1 << 40);
        let bits = self.draw(index, Some(rank));
        let whole = (bits >> 8) % (most + 1);
        let whole = match step {
            1 => whole,
            // It, or else a small one, and 0 always does.
            _ => {
                step * once(whole)
                    .chain((0..=whole.min(SMALL)).rev())
                    .find(|&x| self.comes_back::<T>(x))
                    .unwrap_or(0)
            }
        };
        let sign = if T::SIGNED && bits & 1 == 1 && whole > 0 { -1.0 } else { 1.0 };
        let scale = match T::PRECISION {
            0 => 1.0,
            _ => {
                2f64.powi(((self.draw(index, None) >> 32) % 7) as i32 - if T::EXPONENT < 20 { 6 } else { 3 })
            }
        };
        T::from_number(whole as f64 * sign * scale)
    }

    /// A contribution to a product of floats.
    fn factor<T: Exact>(&self, index: usize, rank: usize) -> T {
        let bits = self.draw(index, Some(rank));
        // Three odd factors need 9 bits of exponent together; what is left is for powers of two.
        let stride = self.ranks.div_ceil((T::EXPONENT - 7) as usize / 2).max(1);
        let mut x = if bits & 1 == 1 { -1.0 } else { 1.0 };
        if self.takes_part(index, rank, stride) {
            x *= 2f64.powi(((bits >> 8) % 3) as i32 - 1);
        }
        // 3 * 5 * 7 = 105 has 7 bits: every partial product fits the 8 of bf16.
        let place = (rank + self.draw(index, None) as usize % self.ranks) % self.ranks;
        T::from_number(x * [3.0, 5.0, 7.0].get(place).copied().unwrap_or(1.0))
    }

    /// What all ranks' contributions at `index` come to.
    pub fn reduced<T: Exact>(&self, index: usize) -> T {
        let op = self.op.expect("a reduction");
        let all = (0..self.ranks).map(|rank| self.contribution::<T>(index, rank));
        match op {
            ReduceOp::Sum if T::PRECISION == 0 => T::from_bits(all.fold(0, |a, x| a.wrapping_add(x.bits()))),
            ReduceOp::Product if T::PRECISION == 0 => {
                T::from_bits(all.fold(1, |a: u64, x| a.wrapping_mul(x.bits())))
            }
            ReduceOp::Sum => T::from_number(all.map(T::number).sum()),
            ReduceOp::Product => T::from_number(all.map(T::number).product()),
            ReduceOp::Average => average(all.map(T::number).sum(), self.ranks),
            ReduceOp::Min => all.reduce(|a, b| if below(b, a) { b } else { a }).unwrap_or_default(),
            ReduceOp::Max => all.reduce(|a, b| if below(a, b) { b } else { a }).unwrap_or_default(),
        }
    }
}

/// `sum / ranks`: integers truncate; 16-bit floats and f32 divide as f32, so that only one rounding follows.
fn average<T: Exact>(sum: f64, ranks: usize) -> T {
    match T::DTYPE {
        DType::F64 => T::from_number(sum / ranks as f64),
        DType::F16 | DType::Bf16 | DType::F32 => T::from_number(f64::from(sum as f32 / ranks as f32)),
        _ => T::from_number((sum / ranks as f64).trunc()),
    }
}

/// A value to compare: any but zero and, for floats, of moderate size.
fn ordered<T: Exact>(bits: u64) -> T {
    if T::PRECISION == 0 {
        return T::from_bits(bits | 1);
    }
    let whole = (bits >> 8) % (1 << T::PRECISION) + 1;
    let sign = if bits & 1 == 1 { -1.0 } else { 1.0 };
    T::from_number(
        sign * whole as f64 * 2f64.powi(((bits >> 1) % 4) as i32 - if T::EXPONENT < 20 { 8 } else { 1 }),
    )
}

fn below<T: Exact>(a: T, b: T) -> bool {
    match (T::PRECISION, T::SIGNED) {
        (0, true) => {
            let shift = 64 - 8 * size_of::<T>();
            ((a.bits() << shift) as i64) < ((b.bits() << shift) as i64)
        }
        (0, false) => a.bits() < b.bits(),
        _ => a.number() < b.number(),
    }
}

/// What a sequence is made of, to fill from and compare with.
pub struct Tile<T> {
    /// The index of its first element.
    start: usize,
    /// Its elements, or the whole tile where they are as many.
    values: Vec<T>,
}

impl<T: Exact> Tile<T> {
    /// The `count` elements of a sequence from `start` on.
    fn of(start: usize, count: usize, at: impl Fn(usize) -> T) -> Self {
        let values = match count < TILE {
            true => (start..start + count).map(at).collect(),
            // The first repetition begins where the tile does.
            false => (0..TILE).map(at).collect(),
        };
        Tile { start, values }
    }

    /// What stands from the element `at` on, as far as it lies in one piece.
    fn piece(&self, at: usize) -> &[T] {
        if self.values.len() < TILE {
            return &self.values[at..];
        }
        let index = self.start + at;
        let from = place(index);
        &self.values[from..][..(TILE - from).min(TILE - index % TILE)]
    }

    /// What `rank` contributes to a range of up to `count` elements.
    pub fn contribution(data: &Data, rank: usize, count: usize) -> Self {
        Self::of(0, count, |i| data.contribution(i, rank))
    }

    /// Writes the sequence from its start on.
    pub fn fill(&self, out: &mut [T]) {
        let mut at = 0;
        while at < out.len() {
            let piece = self.piece(at);
            let piece = &piece[..piece.len().min(out.len() - at)];
            out[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }

    /// How many of `found` differ in any bit from the sequence.
    fn wrong(&self, found: &[T]) -> u64 {
        let (mut at, mut wrong) = (0, 0);
        while at < found.len() {
            let piece = self.piece(at);
            let both = found[at..].iter().zip(piece);
            wrong += both.filter(|(a, b)| a.bits() != b.bits()).count() as u64;
            at += piece.len();
        }
        wrong
    }
}

/// What one rank passes in and must get back, for one call. What it is compared with is made then and only for the elements
/// that are compared, which `-c 0` never does.
pub struct Expectation<T> {
    operation: Operation,
    data: Data,
    rank: usize,
    /// The root; of a message, who sends it.
    root: usize,
    /// What this rank contributes.
    own: Tile<T>,
}

/// Bytes that a rank needs to tell what is right: its own tile, and the one that it compares with, of a part where it
/// compares by parts.
pub fn footprint(operation: Operation, counts: Counts, element: usize) -> u64 {
    let compared = if operation.parted() { counts.count } else { counts.receive };
    ((counts.send.min(TILE) + compared.min(TILE)) * element) as u64
}

impl<T: Exact> Expectation<T> {
    /// For a call of these counts.
    pub fn new(operation: Operation, data: &Data, rank: usize, root: usize, counts: Counts) -> Self {
        let own = Tile::contribution(data, rank, counts.send);
        Expectation { operation, data: *data, rank, root, own }
    }

    /// Fills what this rank passes in: `send` has the elements of the call's send side.
    pub fn fill(&self, send: &mut [T]) {
        self.own.fill(send);
    }

    /// Counts wrong elements in what this rank got back; what is undefined on this rank is not looked at.
    pub fn wrong(&self, received: &[T]) -> u64 {
        let (data, ranks, rank) = (&self.data, self.data.ranks, self.rank);
        // Elements from `start` on of what one rank gives, or of what all come to.
        let from = |giver: usize, start: usize, found: &[T]| {
            Tile::of(start, found.len(), |i| data.contribution(i, giver)).wrong(found)
        };
        let reduced = |start: usize| {
            data.op.map_or(0, |_| Tile::of(start, received.len(), |i| data.reduced(i)).wrong(received))
        };
        let parts = |start: usize| {
            let each = received.chunks((received.len() / ranks).max(1)).enumerate();
            each.map(|(giver, found)| from(giver, start, found)).sum()
        };
        match self.operation {
            Operation::AllReduce => reduced(0),
            Operation::Reduce if rank == self.root => reduced(0),
            Operation::ReduceScatter => reduced(rank * received.len()),
            Operation::Broadcast => from(self.root, 0, received),
            Operation::Scatter => from(self.root, rank * received.len(), received),
            Operation::SendRecv => from(self.root, 0, received),
            Operation::AllGather => parts(0),
            Operation::Gather if rank == self.root => parts(0),
            Operation::AllToAll => parts(rank * (received.len() / ranks)),
            Operation::Reduce | Operation::Gather | Operation::Barrier => 0,
        }
    }
}

#[cfg(test)]
mod tests;
