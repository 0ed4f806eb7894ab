//! The kernel for any processor.

use super::{Ends, Kernel};

/// Plain loops. `mul_add` is one instruction on aarch64; where the processor has none, it is slow but has
/// the same bits.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

impl Kernel for Portable {
    const MR: usize = 8;
    const NR: usize = 16;
    const STEP: usize = 1;

    #[inline(always)]
    unsafe fn tile<const ACROSS: bool>(
        rows: usize,
        k: usize,
        a: *const u32,
        stride: usize,
        b: *const u32,
        b_stride: usize,
        ends: Ends,
    ) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pick!(rows, [2, 4, 6, 8], rows_of(k, a, stride, b, b_stride, ends)) }
    }
}

#[inline(never)]
unsafe fn rows_of<const ROWS: usize, const ACROSS: bool>(
    k: usize,
    a: *const u32,
    stride: usize,
    b: *const u32,
    b_stride: usize,
    ends: Ends,
) {
    // Eight columns at a time: with eight rows they fill half of NEON's registers.
    for half in 0..2 {
        // SAFETY: the caller's promise: k steps of 16 lanes, and ROWS rows of 16 at each end.
        unsafe {
            let mut sums = [[0f32; 8]; ROWS];
            if !ends.start.is_null() {
                for (r, sums) in sums.iter_mut().enumerate() {
                    *sums = *ends.start.add(r * 16 + half * 8).cast::<[f32; 8]>();
                }
            }
            for i in 0..k {
                let b = *b.add(i * b_stride + half * 8).cast::<[f32; 8]>();
                for (r, sums) in sums.iter_mut().enumerate() {
                    let at = if ACROSS { r + i * stride } else { r * stride + i };
                    let a = f32::from_bits(*a.add(at));
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum = a.mul_add(b, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let at = r * ends.stride + half * 8;
                if !ends.add.is_null() {
                    for (sum, add) in sums.iter_mut().zip(*ends.add.add(at).cast::<[f32; 8]>()) {
                        *sum += add;
                    }
                }
                *ends.out.add(at).cast::<[f32; 8]>() = *sums;
            }
        }
    }
}
