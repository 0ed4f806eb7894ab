//! Products by AMX, the units of Intel's processors that multiply tiles of 16 rows of 32 bf16.
//!
//! Sums are f32, of pairs of products. In a model of f32 an operand is the sum of three bf16, which hold its 24 bits, and a
//! product the six of nine products of such parts that an f32 can tell: what is left out is below 2^-26 of it. That is as
//! close to the exact result as a chain of f32 multiply-adds, and faster; its bits are others. Where less will do an operand is
//! the sum of two, which hold 16 bits, and a product three of four: half as many. Numbers below 2^-126, also as a
//! part, are zero to these units (or are rounded to it), and those that bf16 rounds to infinity (from 3.39e38 on) no numbers.

mod pack;

use super::kernel::{Ends, Kernel};
use super::operands::Left;
use super::pack::Mat;
use collectives::Float;
use std::arch::{asm, x86_64::*};
use std::mem::MaybeUninit;

/// Rows and columns of what one call computes: two tiles each way, so that each one loaded is used twice.
const SIDE: usize = 32;
/// Lanes of a tile along k.
const LANES: usize = 16;

/// The kernel of operands of `PARTS` bf16 each, 1 to 3.
#[derive(Clone, Copy)]
pub(super) struct Amx<const PARTS: usize>;

impl<const PARTS: usize> Kernel for Amx<PARTS> {
    const MR: usize = SIDE;
    const NR: usize = SIDE;
    const STEP: usize = 2;
    // Tiles wait for each line of theirs that the second cache level does not have. Left operands stay there, 0.75 MiB. Right ones
    // need not: each panel is asked for while the one before it is read, so that many are packed at a time, and left ones are not
    // packed again for every few of them. Sums between blocks along k come from far, so that these are long.
    const ROWS: usize = 768 / PARTS;
    const DEPTH: usize = 256;
    const RIGHT: usize = 3 << 18;
    const LANES: usize = LANES;
    const PARTS: usize = PARTS;

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
        debug_assert!(k.is_multiple_of(LANES) && stride == 0 && b_stride == PARTS * SIDE);
        // SAFETY: the caller's promise; the parts of both operands are where the packing put them.
        unsafe { tile::<PARTS>(rows, k, a, b, ends) }
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
        unsafe { pack::left::<PARTS, E>(a, rows, k, depth, out) };
        Left::tiled::<Self>(out, depth)
    }

    #[inline(always)]
    unsafe fn pack_right<E: Float>(b: Mat<'_, E>, k: usize, n: usize, depth: usize, out: &mut [u32]) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack::right::<PARTS, E>(b, k, n, depth, out) };
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

/// What follows each instruction on tiles. While another thread keeps the same core busy, those that come close behind each other
/// wait for each other: with so many others between them products of three parts take 0.6 of the time, of one part 0.65, and as
/// long as without where the core is this thread's alone (measured on Emerald Rapids; fewer do less, more no more).
macro_rules! gap {
    () => {
        "
         .rept 8
         nop
         .endr
        "
    };
}

/// The same in other words: asks for a row of what will be written, and of what is added to it. All rows at once would hold up
/// the tiles that are loaded.
macro_rules! row {
    () => {
        "
         prefetcht0 [{out_row}]
         prefetcht0 [{out_row} + 64]
         prefetcht0 [{start_row}]
         prefetcht0 [{start_row} + 64]
         add {out_row}, {apart}
         add {start_row}, 128
         nop
         nop
        "
    };
}

/// The same: asks the second cache level for a line of what comes next.
macro_rules! next {
    () => {
        "
         prefetcht1 [{next}]
         add {next}, 64
         .rept 6
         nop
         .endr
        "
    };
}

/// A tile of the part that is so many bytes after the first: 4 and 5 are of the left operand, 6 and 7 of the right one.
macro_rules! load {
    (4, $part:literal) => {
        concat!("tileloadd tmm4, [{a} + {row} + ", $part, "]", next!())
    };
    (5, $part:literal) => {
        concat!("tileloadd tmm5, [{a} + {row} + 1024 + ", $part, "]", next!())
    };
    (6, $part:literal) => {
        concat!("tileloadd tmm6, [{b} + {row} + ", $part, "]", next!())
    };
    (7, $part:literal) => {
        concat!("tileloadd tmm7, [{b} + {row} + 1024 + ", $part, "]", next!())
    };
}

/// A product of tiles is added to one of the sums, 0 to 3.
macro_rules! add {
    ($sum:literal, $left:literal, $right:literal, $between:ident) => {
        concat!("tdpbf16ps tmm", $sum, ", tmm", $left, ", tmm", $right, $between!())
    };
}

/// The four products of what is loaded, then the left operand's next part: each tile once it is done with.
macro_rules! then_left {
    ($part:literal) => {
        concat!(
            add!(0, 4, 6, gap),
            add!(1, 4, 7, gap),
            load!(4, $part),
            add!(2, 5, 6, gap),
            add!(3, 5, 7, gap),
            load!(5, $part)
        )
    };
}

/// The same, and the right one's.
macro_rules! then_right {
    ($part:literal) => {
        concat!(
            add!(0, 4, 6, gap),
            add!(2, 5, 6, gap),
            load!(6, $part),
            add!(1, 4, 7, gap),
            add!(3, 5, 7, gap),
            load!(7, $part)
        )
    };
}

/// The first parts of both that a step takes.
macro_rules! first {
    ($left:literal, $right:literal) => {
        concat!(load!(4, $left), load!(6, $right), load!(7, $right), load!(5, $left))
    };
}

/// The four last products of a step.
macro_rules! last {
    () => {
        concat!(add!(0, 4, 6, row), add!(1, 4, 7, row), add!(2, 5, 6, row), add!(3, 5, 7, row))
    };
}

/// A tile of the result, as [`Kernel::tile`] says, of operands where [`pack`] puts them. What there is to start from is added to
/// the sum of this block, so that it may come from far while that is made.
///
/// # Safety
/// As for [`Kernel::tile`], within the life of [`Tiles`]; operands can be read as far as whole tiles reach.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const PARTS: usize>(rows: usize, k: usize, a: *const u32, b: *const u32, ends: Ends) {
    let mut own = MaybeUninit::<[f32; SIDE * SIDE]>::uninit();
    let whole = rows == SIDE && ends.add.is_null() && ends.start.is_null();
    let (out, stride): (*mut f32, _) =
        if whole { (ends.out, ends.stride) } else { (own.as_mut_ptr().cast(), SIDE) };
    // Where nothing is added yet, our own sums are asked for.
    let start = if ends.start.is_null() { own.as_ptr().cast() } else { ends.start };
    // SAFETY: the caller's promise: operands hold k lanes for 32 rows and columns, what they give is written to a whole tile, of
    // the result or of our own, and what is added to that and written has `rows` rows.
    unsafe {
        // All steps along k, each of them these instructions, from zero to 32 rows of sums.
        macro_rules! sum {
            ($($step:expr),+) => {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "test {steps}, {steps}",
                    "jz 3f",
                    "2:",
                    concat!($($step),+),
                    "add {a}, {step}",
                    "add {b}, {step}",
                    "dec {steps}",
                    "jnz 2b",
                    "3:",
                    "tilestored [{out} + {stride}], tmm0",
                    "tilestored [{out} + {stride} + 64], tmm1",
                    "tilestored [{below} + {stride}], tmm2",
                    "tilestored [{below} + {stride} + 64], tmm3",
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    row = in(reg) 64usize,
                    step = const PARTS * 2048,
                    steps = inout(reg) k / LANES => _,
                    out = in(reg) out,
                    below = in(reg) out.add(16 * stride),
                    stride = in(reg) 4 * stride,
                    out_row = inout(reg) ends.out => _,
                    apart = in(reg) 4 * ends.stride,
                    start_row = inout(reg) start => _,
                    next = inout(reg) ends.next => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                )
            };
        }
        // Parts of the left operand by those of the right, so that from one product to the next one of them stays.
        if PARTS == 1 {
            sum!(first!("0", "0"), last!());
        } else if PARTS == 2 {
            // 1 by 2, 1 by 1, 2 by 1.
            sum!(first!("0", "2048"), then_right!("0"), then_left!("2048"), last!());
        } else {
            // 1 by 3, 1 by 2, 2 by 2, 2 by 1, 1 by 1, 3 by 1.
            sum!(
                first!("0", "4096"),
                then_right!("2048"),
                then_left!("2048"),
                then_right!("0"),
                then_left!("0"),
                then_left!("4096"),
                last!()
            );
        }
        if whole {
            return;
        }
        let own = own.as_ptr().cast::<f32>();
        for r in 0..rows {
            for c in [0, 16] {
                let mut sums = _mm512_loadu_ps(own.add(r * SIDE + c));
                if !ends.start.is_null() {
                    sums = _mm512_add_ps(sums, _mm512_loadu_ps(ends.start.add(r * SIDE + c)));
                }
                if !ends.add.is_null() {
                    sums = _mm512_add_ps(sums, _mm512_loadu_ps(ends.add.add(r * ends.stride + c)));
                }
                _mm512_storeu_ps(ends.out.add(r * ends.stride + c), sums);
            }
        }
    }
}
