//! f16: whole chunks are converted by the processor's own instructions where it has them, and joined as f32.

use super::numbers::Arithmetic;
use super::{CHUNK, Kernel, kernel};
use crate::element::{DType, Float, ReduceOp};
use half::f16;
use std::mem::MaybeUninit;

/// Levels of the tree, each holding a power of two of leaves: enough for 2^19 ranks.
const LEVELS: usize = 20;

/// The kernel for f16, with or without the final rounding.
pub(super) fn f16_kernel(op: ReduceOp, wide: bool) -> Kernel {
    match (op, wide) {
        (ReduceOp::Sum, false) => run::<{ ReduceOp::Sum as u8 }, false>,
        (ReduceOp::Average, false) => run::<{ ReduceOp::Average as u8 }, false>,
        (ReduceOp::Product, false) => run::<{ ReduceOp::Product as u8 }, false>,
        (ReduceOp::Min, false) => run::<{ ReduceOp::Min as u8 }, false>,
        (ReduceOp::Max, false) => run::<{ ReduceOp::Max as u8 }, false>,
        (ReduceOp::Sum, true) => run::<{ ReduceOp::Sum as u8 }, true>,
        (ReduceOp::Average, true) => run::<{ ReduceOp::Average as u8 }, true>,
        (ReduceOp::Product, true) => run::<{ ReduceOp::Product as u8 }, true>,
        (ReduceOp::Min, true) => run::<{ ReduceOp::Min as u8 }, true>,
        (ReduceOp::Max, true) => run::<{ ReduceOp::Max as u8 }, true>,
    }
}

/// # Safety
/// The contract of [`Kernel`].
unsafe fn run<const OP: u8, const WIDE: bool>(inputs: &[*const u8], out: *mut u8, count: usize) {
    let op = ReduceOp::ALL.into_iter().find(|&op| op as u8 == OP).expect("one of the operations");
    // The division of an average comes at the end, over all ranks.
    let join = kernel(DType::F32, if op == ReduceOp::Average { ReduceOp::Sum } else { op }, false, 2);
    // Levels are cleared when they are first used: few are, and clearing all would cost more than a short call.
    let mut levels = [const { MaybeUninit::<[f32; CHUNK]>::uninit() }; LEVELS];
    let mut made = 0;
    let mut start = 0;
    while start < count {
        let len = CHUNK.min(count - start);
        let mut depth = 0;
        for (rank, input) in inputs.iter().enumerate() {
            // SAFETY: start + len <= count.
            let leaf = unsafe { std::slice::from_raw_parts(input.cast::<f16>().add(start), len) };
            if depth == made {
                levels[depth].write([0.0; CHUNK]);
                made += 1;
            }
            // SAFETY: written above, now or earlier.
            widen(leaf, unsafe { &mut levels[depth].assume_init_mut()[..len] });
            depth += 1;
            // A binary counter: as many merges as the count of leaves has trailing zeros.
            for _ in 0..(rank + 1).trailing_zeros() {
                depth -= 1;
                // SAFETY: both levels were written above.
                unsafe { merge(join, &mut levels, depth, len) };
            }
        }
        while depth > 1 {
            depth -= 1;
            // SAFETY: both levels were written above.
            unsafe { merge(join, &mut levels, depth, len) };
        }
        // SAFETY: there is at least one input, so the first level was written.
        let result = unsafe { &mut levels[0].assume_init_mut()[..len] };
        if op == ReduceOp::Average {
            result.iter_mut().for_each(|x| *x = x.divide(inputs.len()));
        }
        // SAFETY: start + len <= count, and the chunk's inputs, one of which may be the output, have been read.
        unsafe {
            if WIDE {
                out.cast::<f32>().add(start).copy_from_nonoverlapping(result.as_ptr(), len);
            } else {
                narrow(result, std::slice::from_raw_parts_mut(out.cast::<f16>().add(start), len));
            }
        }
        start += len;
    }
}

type Levels = [MaybeUninit<[f32; CHUNK]>; LEVELS];

/// Joins the partial result at `depth` to the one before it.
///
/// # Safety
/// Both levels are written.
unsafe fn merge(join: Kernel, levels: &mut Levels, depth: usize, len: usize) {
    let (left, right) = levels.split_at_mut(depth);
    let (left, right) = (left[depth - 1].as_mut_ptr().cast::<u8>(), right[0].as_ptr().cast::<u8>());
    // SAFETY: both have at least len elements, and the result replaces the left one.
    unsafe { join(&[left.cast_const(), right], left, len) };
}

/// `to[i] = from[i]`, exactly.
fn widen(from: &[f16], to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if hardware() {
        // SAFETY: the processor has what the function needs.
        return unsafe { x86::widen(from, to) };
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to = Float::to_f32(*from);
    }
}

/// `to[i] = from[i]`, to nearest even.
pub(super) fn narrow(from: &[f32], to: &mut [f16]) {
    #[cfg(target_arch = "x86_64")]
    if hardware() {
        // SAFETY: the processor has what the function needs.
        return unsafe { x86::narrow(from, to) };
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to = <f16 as Float>::from_f32(*from);
    }
}

#[cfg(target_arch = "x86_64")]
fn hardware() -> bool {
    crate::simd::level() >= crate::simd::Level::Avx2 && std::is_x86_feature_detected!("f16c")
}

/// Rust's own loops would convert one element at a time, or in software.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::element::Float;
    use half::f16;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx,f16c")]
    pub fn widen(from: &[f16], to: &mut [f32]) {
        let (wide, tail) = to.as_chunks_mut::<8>();
        let (narrow, rest) = from.as_chunks::<8>();
        for (to, from) in wide.iter_mut().zip(narrow) {
            // SAFETY: eight elements on either side, and unaligned access.
            unsafe {
                let x = _mm_loadu_si128(from.as_ptr().cast());
                _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(x));
            }
        }
        for (to, from) in tail.iter_mut().zip(rest) {
            *to = Float::to_f32(*from);
        }
    }

    #[target_feature(enable = "avx,f16c")]
    pub fn narrow(from: &[f32], to: &mut [f16]) {
        let (narrow, tail) = to.as_chunks_mut::<8>();
        let (wide, rest) = from.as_chunks::<8>();
        for (to, from) in narrow.iter_mut().zip(wide) {
            // SAFETY: as above.
            unsafe {
                let x = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
                _mm_storeu_si128(to.as_mut_ptr().cast(), x);
            }
        }
        for (to, from) in tail.iter_mut().zip(rest) {
            *to = <f16 as Float>::from_f32(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};

    #[test]
    fn conversions_are_the_same_with_and_without_the_processors_help() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| !x.is_nan()).collect();
        // Every exponent and sign with all mantissas of one bit more than a half has, and what lies just above them.
        let edges = (0..1 << 21).map(|i| (i >> 12) << 23 | (i >> 1 & 0x7ff) << 12 | i & 1);
        let arbitrary = (0..1 << 18).scan(1u32, |state, _| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some(*state)
        });
        let any: Vec<f32> = edges.chain(arbitrary).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
        let run = |level| {
            with_level(level, || {
                let (mut wide, mut halves) = (vec![0f32; all.len()], vec![f16::ZERO; any.len()]);
                widen(&all, &mut wide);
                narrow(&any, &mut halves);
                let wide: Vec<u32> = wide.into_iter().map(f32::to_bits).collect();
                (wide, halves.into_iter().map(f16::to_bits).collect::<Vec<u16>>())
            })
        };
        let plain: Vec<u16> = any.iter().map(|&x| f16::from_f32_const(x).to_bits()).collect();
        for level in Level::available() {
            let (wide, halves) = run(level);
            assert!(wide.iter().zip(&all).all(|(&w, h)| w == h.to_f32_const().to_bits()), "{level:?}");
            assert!(halves == plain, "{level:?}");
        }
    }

    /// Signalling ones, and such whose bits are not among those that a half keeps.
    #[test]
    fn what_is_no_number_stays_none() {
        let none: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_nan()).collect();
        let wide: Vec<f32> =
            [0x7f80_0001u32, 0x7f80_1fff, 0x7fc0_0000, 0x7fff_ffff, 0xff80_0001, 0xffc0_0000]
                .into_iter()
                .cycle()
                .map(f32::from_bits)
                .take(21)
                .collect();
        for level in Level::available() {
            let (mut widened, mut narrowed) = (vec![0f32; none.len()], vec![f16::ZERO; wide.len()]);
            with_level(level, || {
                widen(&none, &mut widened);
                narrow(&wide, &mut narrowed);
            });
            assert!(widened.into_iter().all(f32::is_nan), "{level:?}");
            assert!(narrowed.into_iter().all(f16::is_nan), "{level:?}");
        }
    }

    #[test]
    fn ties_go_to_even_with_and_without_the_processors_help() {
        let ties = [
            // 1 and the two above it, of either sign: the round bit alone, then with anything below or without it.
            (0x3f80_1000, 0x3c00),
            (0x3f80_3000, 0x3c02),
            (0xbf80_1000, 0xbc00),
            (0xbf80_3000, 0xbc02),
            (0x3f80_1001, 0x3c01),
            (0x3f80_0fff, 0x3c00),
            // Half and one and a half of the smallest, the largest subnormal, and the largest of all.
            (0x3300_0000, 0x0000),
            (0x33c0_0000, 0x0002),
            (0x387f_e000, 0x0400),
            (0x477f_f000, 0x7c00),
        ];
        let (wide, expected): (Vec<f32>, Vec<u16>) =
            ties.iter().map(|&(wide, half)| (f32::from_bits(wide), half)).unzip();
        for level in Level::available() {
            let mut halves = vec![f16::ZERO; wide.len()];
            with_level(level, || narrow(&wide, &mut halves));
            let halves: Vec<u16> = halves.into_iter().map(f16::to_bits).collect();
            assert_eq!(halves, expected, "{level:?}");
        }
    }
}
