//! Products by AMX, the units of Intel's processors that multiply tiles of 16 rows of 32 bf16.
//!
//! Sums are f32, of pairs of products. Numbers below 2^-126 are zero to these units.

mod pack;

use super::kernel::{Ends, Kernel};
use super::pack::Mat;
use super::product::Left;
use collectives::Float;
use std::arch::asm;
use std::mem::MaybeUninit;

/// Rows and columns of what one call computes: two tiles each way, so that each one loaded is used twice.
const SIDE: usize = 32;
/// Lanes of a tile along k.
const LANES: usize = 16;

/// The kernel.
#[derive(Clone, Copy)]
pub(super) struct Amx;

impl Kernel for Amx {
    const MR: usize = SIDE;
    const NR: usize = SIDE;
    const STEP: usize = 2;
    // In the memory that other kernels have for a left operand.
    const ROWS: usize = 160;
    const LANES: usize = LANES;

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
        assert!(!ACROSS, "left operands are packed along k");
        debug_assert!(k.is_multiple_of(LANES) && stride == k && b_stride == SIDE);
        // SAFETY: the caller's promise; both operands are where the packing put them.
        unsafe { tile(rows, k, a, b, ends) }
    }

    #[inline(always)]
    unsafe fn pack_left<'a, E: Float>(
        a: Mat<'_, E>,
        rows: usize,
        k: usize,
        depth: usize,
        out: &'a mut [u32],
    ) -> Left<'a> {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack::left(a, rows, k, depth, out) };
        Left::Along(out, depth)
    }

    #[inline(always)]
    unsafe fn pack_right<E: Float>(b: Mat<'_, E>, k: usize, n: usize, depth: usize, out: &mut [u32]) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack::right(b, k, n, depth, out) };
    }
}

/// While it lives, this thread's tiles have 16 rows of 64 bytes.
pub(super) struct Tiles(());

impl Tiles {
    /// Configures them.
    ///
    /// # Safety
    /// The processor has AMX, and the system lets this process use it.
    pub(super) unsafe fn new() -> Self {
        /// As the instruction reads it: the palette, then for each tile its bytes a row, then its rows.
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start: u8,
            reserved: [u8; 14],
            bytes: [u16; 16],
            rows: [u8; 16],
        }
        const { assert!(size_of::<Configuration>() == 64) };
        let mut shape =
            Configuration { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        shape.bytes[..8].fill(64);
        shape.rows[..8].fill(16);
        // SAFETY: the caller's promise; the 64 bytes are read.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &shape, options(nostack, readonly, preserves_flags)) };
        Tiles(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: there are tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// A tile of the result, as [`Kernel::tile`] says, of operands where [`pack`] puts them.
///
/// # Safety
/// As for [`Kernel::tile`], within the life of [`Tiles`]; operands can be read as far as whole tiles reach.
unsafe fn tile(rows: usize, k: usize, a: *const u32, b: *const u32, ends: Ends) {
    let mut own = MaybeUninit::<[f32; SIDE * SIDE]>::uninit();
    let whole = rows == SIDE && ends.add.is_null();
    let (out, stride) = if whole { (ends.out, ends.stride) } else { (own.as_mut_ptr().cast(), SIDE) };
    // SAFETY: the caller's promise: sums start from a whole tile or nothing, operands hold k lanes for 32 rows and columns, and
    // what they give is written to a whole tile, of the result or of our own.
    unsafe {
        // Sums are in 0 to 3, tiles of the left operand in 4 and 5, of the right one in 6 and 7.
        asm!(
            "test {start}, {start}",
            "jz 2f",
            "tileloadd tmm0, [{start} + 2 * {row}]",
            "tileloadd tmm1, [{start} + 2 * {row} + 64]",
            "tileloadd tmm2, [{start} + 2 * {row} + 2048]",
            "tileloadd tmm3, [{start} + 2 * {row} + 2112]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "test {steps}, {steps}",
            "jz 5f",
            "4:",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm5, [{a} + {row} + 1024]",
            "tileloadd tmm6, [{b} + {row}]",
            "tileloadd tmm7, [{b} + {row} + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 4b",
            "5:",
            "tilestored [{out} + {stride}], tmm0",
            "tilestored [{out} + {stride} + 64], tmm1",
            "tilestored [{below} + {stride}], tmm2",
            "tilestored [{below} + {stride} + 64], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            row = in(reg) 64usize,
            steps = inout(reg) k / LANES => _,
            start = in(reg) ends.start,
            out = in(reg) out,
            below = in(reg) out.add(16 * stride),
            stride = in(reg) 4 * stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
        if !whole {
            let own = own.as_ptr().cast::<f32>();
            for r in 0..rows {
                let from = own.add(r * SIDE).cast::<[f32; SIDE]>();
                let at = r * ends.stride;
                let mut sums = *from;
                if !ends.add.is_null() {
                    let add = ends.add.add(at).cast::<[f32; SIDE]>();
                    for (sum, add) in sums.iter_mut().zip(*add) {
                        *sum += add;
                    }
                }
                *ends.out.add(at).cast::<[f32; SIDE]>() = sums;
            }
        }
    }
}
