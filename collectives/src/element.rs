//! The element types and reductions that every collective understands.

use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

mod sealed {
    pub trait Sealed {}
}

/// A type that collectives move and reduce. Sealed: the set is fixed because every transport and
/// every device has to agree on it.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static {
    /// The run-time name of this type.
    const DTYPE: DType;
    /// What a reduction accumulates in: `f32` for 16-bit floats, the type itself otherwise.
    type Acc: Element;
}

/// Elements as the bytes that they are.
pub fn bytes_of<E: Element>(elements: &[E]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding; the borrow covers the result.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The same to be written to.
pub fn bytes_of_mut<E: Element>(elements: &mut [E]) -> &mut [u8] {
    // SAFETY: as above, and every pattern of bits is a number.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}

/// A floating-point element that models compute with: stored as itself, computed as `f32`.
pub trait Float: Element<Acc = f32> {
    /// Widens exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
}

/// The run-time name of an [`Element`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE double.
    F64,
    /// IEEE half.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
    /// 32-bit signed.
    I32,
    /// 64-bit signed.
    I64,
    /// 32-bit unsigned.
    U32,
    /// 64-bit unsigned.
    U64,
    /// 8-bit signed.
    I8,
    /// 8-bit unsigned.
    U8,
}

impl DType {
    /// Every type, in the order in which benchmarks list them.
    pub const ALL: [DType; 10] = [
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::Bf16,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Whether numbers are whole, and reductions of them exact up to wrapping around.
    pub const fn is_integer(self) -> bool {
        !matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }

    /// The short name used on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::I8 => "i8",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    /// Accepts our short names and the names that nccl-tests uses (`float`, `half`, `bfloat16`, …).
    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s {
            "f32" | "float" | "float32" => DType::F32,
            "f64" | "double" | "float64" => DType::F64,
            "f16" | "half" | "float16" => DType::F16,
            "bf16" | "bfloat16" => DType::Bf16,
            "i32" | "int32" | "int" => DType::I32,
            "i64" | "int64" => DType::I64,
            "u32" | "uint32" => DType::U32,
            "u64" | "uint64" => DType::U64,
            "i8" | "int8" => DType::I8,
            "u8" | "uint8" => DType::U8,
            _ => {
                let known = DType::ALL.map(DType::name).join(", ");
                return Err(format!("unknown element type '{s}': known are {known}"));
            }
        })
    }
}

/// How contributions of the ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// a + b; integers wrap.
    Sum,
    /// The sum divided by the number of ranks, before the one rounding; integers truncate.
    Average,
    /// a * b; integers wrap.
    Product,
    /// The smallest, of equal ones, as zeros of either sign are, the lowest rank's; a NaN in any input gives NaN.
    Min,
    /// The largest, in the same way.
    Max,
}

impl ReduceOp {
    /// Every operation, in the order in which nccl-tests lists them.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::Average];

    /// The name that nccl-tests prints.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Average => "avg",
            ReduceOp::Product => "prod",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s {
            "sum" => ReduceOp::Sum,
            "avg" | "average" | "mean" => ReduceOp::Average,
            "prod" | "product" => ReduceOp::Product,
            "min" => ReduceOp::Min,
            "max" => ReduceOp::Max,
            _ => {
                let known = ReduceOp::ALL.map(ReduceOp::name).join(", ");
                return Err(format!("unknown reduction '{s}': known are {known}"));
            }
        })
    }
}

macro_rules! element {
    ($($t:ty => $dtype:ident, $acc:ty;)*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Acc = $acc;
        }
    )*};
}

element! {
    f32 => F32, f32;
    f64 => F64, f64;
    f16 => F16, f32;
    bf16 => Bf16, f32;
    i32 => I32, i32;
    i64 => I64, i64;
    u32 => U32, u32;
    u64 => U64, u64;
    i8 => I8, i8;
    u8 => U8, u8;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    /// Branch-free, so that loops over it vectorise; the same result as the hardware's conversion.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if x.is_nan() { quiet_nan } else { rounded } as u16)
    }
}

impl Float for f16 {
    /// Branch-free, as the other way, and without subnormal numbers of f32, which processors are slow with.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        const INFINITE: u32 = 0x7c00;
        let (sign, bits) = (u32::from(self.to_bits() >> 15) << 31, u32::from(self.to_bits() & 0x7fff));
        // The exponent's bias is 127 instead of 15, and 13 bits are added.
        let normal = (bits << 13) + ((127 - 15) << 23);
        let subnormal = (bits as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
        let quiet = if bits > INFINITE { 0x0040_0000 } else { 0 };
        let large = bits << 13 | 0x7f80_0000 | quiet;
        let small = if bits < 0x0400 { subnormal } else { normal };
        f32::from_bits(sign | if bits >= INFINITE { large } else { small })
    }
    /// Branch-free, so that loops over it vectorise; the same result as the hardware's conversion.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        let sign = (x.to_bits() >> 16) & 0x8000;
        let bits = x.to_bits() & 0x7fff_ffff;
        // The exponent's bias is 15 instead of 127, and 13 bits are rounded off to even.
        let normal = bits.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + ((bits >> 13) & 1)) >> 13;
        // To the sum with 0.5 the addition itself rounds at the bit that is the last of a subnormal one.
        let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let nan = 0x7e00 | ((bits >> 13) & 0x3ff);
        let large = if bits > 0x7f80_0000 { nan } else { 0x7c00 };
        let small = if bits < (127 - 14) << 23 { subnormal } else { normal };
        f16::from_bits((sign | if bits >= (127 + 16) << 23 { large } else { small }) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_conversion_equals_the_half_crate_on_every_class_of_value() {
        let edge = [0u32, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0001, 0x7f80_0001, 1, 0x7f7f_ffff];
        let mut bits = 0x9e37_79b9u32;
        for i in 0..100_000u32 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let b = edge.get(i as usize).copied().unwrap_or(bits);
            let x = f32::from_bits(b);
            assert_eq!(<bf16 as Float>::from_f32(x).to_bits(), bf16::from_f32(x).to_bits(), "bits {b:#x}");
        }
    }

    #[test]
    fn f16_conversions_equal_the_half_crates() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            assert_eq!(Float::to_f32(x).to_bits(), x.to_f32_const().to_bits(), "bits {bits:#x}");
            assert_eq!(<f16 as Float>::from_f32(x.to_f32_const()).is_nan(), x.is_nan());
            // Every value, what is half-way to the next, and what lies beside both.
            for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                let near = f32::from_bits(x.to_f32_const().to_bits() | lower);
                let halved = f32::from_bits(u32::from(bits) << 16 | lower);
                for wide in [near, halved, near * 2.0f32.powi(-11)] {
                    let (ours, theirs) = (<f16 as Float>::from_f32(wide), f16::from_f32_const(wide));
                    assert_eq!(ours.to_bits(), theirs.to_bits(), "{wide:e} {:#x}", wide.to_bits());
                }
            }
        }
    }

    /// Arbitrary bits are hardly ever half-way between two values.
    #[test]
    fn bf16_rounds_ties_to_even_and_all_else_to_the_nearest() {
        for (bits, expected) in [
            (0x3f80_8000u32, 0x3f80u16),
            (0x3f81_8000, 0x3f82),
            (0xbf80_8000, 0xbf80),
            (0xbf81_8000, 0xbf82),
            (0x3f80_7fff, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_7fff, 0x3f81),
            // Subnormal, up to the next exponent, and up to infinity.
            (0x0000_8000, 0x0000),
            (0x0001_8000, 0x0002),
            (0x3fff_8000, 0x4000),
            (0x7f7f_8000, 0x7f80),
        ] {
            assert_eq!(<bf16 as Float>::from_f32(f32::from_bits(bits)).to_bits(), expected, "{bits:#x}");
        }
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(<bf16 as Float>::from_f32(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn names_round_trip() {
        for d in DType::ALL {
            assert_eq!(d.name().parse(), Ok(d));
        }
        for op in ReduceOp::ALL {
            assert_eq!(op.name().parse(), Ok(op));
        }
    }
}
