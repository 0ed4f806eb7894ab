//! What every collective must compute, element by element and as plainly as possible. Tests compare the bits of
//! the real thing with these.

use crate::element::{DType, Element, ReduceOp, bytes_of, bytes_of_mut};
use half::{bf16, f16};
use std::slice::{from_mut, from_ref};

/// A number in its accumulator.
#[derive(Clone, Copy, Debug)]
enum Number {
    Single(f32),
    Double(f64),
    Signed(i64),
    Unsigned(u64),
}

fn read<T: Element>(x: &T) -> Number {
    let b = bytes_of(from_ref(x));
    macro_rules! get {
        ($t:ty) => {
            <$t>::from_ne_bytes(b.try_into().expect("the element's own size"))
        };
    }
    match T::DTYPE {
        DType::F32 => Number::Single(get!(f32)),
        DType::F64 => Number::Double(get!(f64)),
        DType::F16 => Number::Single(get!(f16).to_f32()),
        DType::Bf16 => Number::Single(get!(bf16).to_f32()),
        DType::I8 => Number::Signed(get!(i8) as i64),
        DType::I32 => Number::Signed(get!(i32) as i64),
        DType::I64 => Number::Signed(get!(i64)),
        DType::U8 => Number::Unsigned(get!(u8) as u64),
        DType::U32 => Number::Unsigned(get!(u32) as u64),
        DType::U64 => Number::Unsigned(get!(u64)),
    }
}

fn write<T: Element>(x: Number) -> T {
    let mut out = T::default();
    macro_rules! put {
        ($x:expr) => {{
            let b = $x.to_ne_bytes();
            assert_eq!(b.len(), size_of::<T>());
            // SAFETY: as many bytes as the element has, and every pattern is a number.
            unsafe { std::ptr::copy_nonoverlapping(b.as_ptr(), (&raw mut out).cast(), b.len()) }
        }};
    }
    match (T::DTYPE, x) {
        (DType::F32, Number::Single(x)) => put!(x),
        (DType::F16, Number::Single(x)) => put!(f16::from_f32(x)),
        (DType::Bf16, Number::Single(x)) => put!(bf16::from_f32(x)),
        (DType::F64, Number::Double(x)) => put!(x),
        (DType::I8, Number::Signed(x)) => put!(x as i8),
        (DType::I32, Number::Signed(x)) => put!(x as i32),
        (DType::I64, Number::Signed(x)) => put!(x),
        (DType::U8, Number::Unsigned(x)) => put!(x as u8),
        (DType::U32, Number::Unsigned(x)) => put!(x as u32),
        (DType::U64, Number::Unsigned(x)) => put!(x),
        (dtype, x) => unreachable!("{x:?} as {dtype}"),
    }
    out
}

/// Element `i` of rank `rank`'s input: a number that differs from all others near it, floats between -2 and 2 and integers
/// over their whole range, so that sums overflow and round.
pub fn sample<T: Element>(rank: usize, i: usize) -> T {
    let x = (rank * 7919 + i * 104_729 + 1) as u64;
    let noise = x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
    let unit = noise as f64 / (1u64 << 53) as f64 * 4.0 - 2.0;
    let spread = noise.wrapping_mul(x);
    write(match T::DTYPE {
        DType::F32 | DType::F16 | DType::Bf16 => Number::Single(unit as f32),
        DType::F64 => Number::Double(unit),
        DType::I8 | DType::I32 | DType::I64 => Number::Signed(spread as i64),
        DType::U8 | DType::U32 | DType::U64 => Number::Unsigned(spread),
    })
}

/// Element `i` of rank `rank`'s input: what no [`sample`] is, and every pair of these between two ranks. Of floats zeros,
/// infinities and what is no number, either way round, the ends of the ranges, and such as are joined to what lies halfway
/// between two of the type; of integers the ends of both ranges.
pub fn edge<T: Element>(rank: usize, i: usize) -> T {
    let width = 8 * size_of::<T>();
    let all = match T::DTYPE {
        DType::F16 => float_edges(width, 10),
        DType::Bf16 => float_edges(width, 7),
        DType::F32 => float_edges(width, 23),
        DType::F64 => float_edges(width, 52),
        _ => {
            let (ones, least) = (u64::MAX >> (64 - width), 1 << (width - 1));
            vec![0, 1, ones, least, least - 1, least + 1, 2, 1 << (width / 2)]
        }
    };
    // The first of two ranks goes through them while the second stays; pairs of later ranks are ahead of those.
    let at = if rank.is_multiple_of(2) { i } else { i / all.len() } + 3 * (rank / 2);
    let mut out = T::default();
    // Little endian, as all machines are that this runs on.
    bytes_of_mut(from_mut(&mut out)).copy_from_slice(&all[at % all.len()].to_le_bytes()[..width / 8]);
    out
}

/// The bits of such floats, of so many bits in all and so many behind the point.
fn float_edges(width: usize, point: usize) -> Vec<u64> {
    let sign = 1u64 << (width - 1);
    let bias = (1 << (width - point - 2)) - 1;
    let (power, quiet) = (|exponent: u64| exponent << point, 1 << (point - 1));
    let (infinity, one, normal) = (power(2 * bias + 1), power(bias), power(1));
    // 2 to this has an odd number above it that is halfway.
    let whole = power(bias + point as u64 + 1);
    let half_above_most = power(2 * bias - point as u64 - 1);
    let zeros = [0, sign];
    let none = [infinity | quiet, infinity | 1, sign | (infinity + normal - 1)];
    let ends = [infinity, sign | infinity, infinity - 1, sign | (infinity - 1)];
    let least = [1, sign | 1, normal - 1, normal];
    let halves = [one, sign | one, one - normal, one | quiet, whole, whole + 1, half_above_most];
    [&zeros[..], &none, &ends, &least, &halves].concat()
}

/// Whether a result is what it has to be: the same bits, but that any NaN is as good as another.
pub fn alike<T: Element>(found: &[T], expected: &[T]) -> bool {
    // Only what is no number differs from itself.
    let none = |x: &T| x.ne(x);
    let same = |(a, b): (&T, &T)| bytes_of(from_ref(a)) == bytes_of(from_ref(b)) || none(a) && none(b);
    found.len() == expected.len() && found.iter().zip(expected).all(same)
}

/// Calls a function that is generic in the type of elements once for each type.
#[cfg(test)]
macro_rules! for_every_type {
    ($check:ident $(, $given:expr)*) => {
        $check::<f32>($($given),*);
        $check::<f64>($($given),*);
        $check::<$crate::f16>($($given),*);
        $check::<$crate::bf16>($($given),*);
        $check::<i32>($($given),*);
        $check::<u32>($($given),*);
        $check::<i64>($($given),*);
        $check::<u64>($($given),*);
        $check::<i8>($($given),*);
        $check::<u8>($($given),*);
    };
}
#[cfg(test)]
pub(crate) use for_every_type;

fn join(op: ReduceOp, dtype: DType, a: Number, b: Number) -> Number {
    use Number::{Double, Signed, Single, Unsigned};
    macro_rules! float {
        ($a:expr, $b:expr) => {
            match op {
                ReduceOp::Sum | ReduceOp::Average => $a + $b,
                ReduceOp::Product => $a * $b,
                _ if $a.is_nan() => $a,
                _ if $b.is_nan() => $b,
                ReduceOp::Min => {
                    if $b < $a {
                        $b
                    } else {
                        $a
                    }
                }
                ReduceOp::Max => {
                    if $b > $a {
                        $b
                    } else {
                        $a
                    }
                }
            }
        };
    }
    macro_rules! integer {
        ($a:expr, $b:expr) => {
            match op {
                ReduceOp::Sum | ReduceOp::Average => $a.wrapping_add($b),
                ReduceOp::Product => $a.wrapping_mul($b),
                ReduceOp::Min => $a.min($b),
                ReduceOp::Max => $a.max($b),
            }
        };
    }
    match (a, b) {
        (Single(a), Single(b)) => Single(float!(a, b)),
        (Double(a), Double(b)) => Double(float!(a, b)),
        (Signed(a), Signed(b)) => Signed(match dtype {
            DType::I8 => integer!(a, b) as i8 as i64,
            DType::I32 => integer!(a, b) as i32 as i64,
            _ => integer!(a, b),
        }),
        (Unsigned(a), Unsigned(b)) => Unsigned(match dtype {
            DType::U8 => integer!(a, b) as u8 as u64,
            DType::U32 => integer!(a, b) as u32 as u64,
            _ => integer!(a, b),
        }),
        _ => unreachable!("two numbers of one type"),
    }
}

fn tree<T: Element>(op: ReduceOp, values: &[T]) -> Number {
    match values {
        [one] => read(one),
        _ => {
            let mid = values.len().next_power_of_two() / 2;
            join(op, T::DTYPE, tree(op, &values[..mid]), tree(op, &values[mid..]))
        }
    }
}

fn value<T: Element>(op: ReduceOp, values: &[T]) -> Number {
    let n = values.len();
    match (op, tree(op, values)) {
        (ReduceOp::Average, Number::Single(x)) => Number::Single(x / n as f32),
        (ReduceOp::Average, Number::Double(x)) => Number::Double(x / n as f64),
        (ReduceOp::Average, Number::Signed(x)) => Number::Signed(x / n as i64),
        (ReduceOp::Average, Number::Unsigned(x)) => Number::Unsigned(x / n as u64),
        (_, x) => x,
    }
}

fn each<T: Element, O: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<O> {
    (0..inputs[0].len())
        .map(|i| write(value(op, &inputs.iter().map(|input| input[i]).collect::<Vec<T>>())))
        .collect()
}

/// The canonical reduction of the ranks' inputs.
pub fn reduce<T: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<T> {
    each(op, inputs)
}

/// The same, unrounded in the accumulator's type.
pub fn reduce_wide<T: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<T::Acc> {
    each(op, inputs)
}

/// The inputs one after the other.
pub fn gather<T: Element>(inputs: &[&[T]]) -> Vec<T> {
    inputs.concat()
}

/// Block `rank` of every input.
pub fn all_to_all<T: Element>(inputs: &[&[T]], rank: usize) -> Vec<T> {
    let block = inputs[0].len() / inputs.len();
    inputs.iter().flat_map(|input| &input[rank * block..(rank + 1) * block]).copied().collect()
}
