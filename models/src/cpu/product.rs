//! The blocked matrix product over packed operands.

use super::kernel::{Isa, Kernel, Task};
use super::pack::{self, DEPTH, LEFT_PANEL, LEFT_STRIDE, Mat};
use collectives::Float;
use std::ops::Range;

/// Rows of the left operand packed at a time; a multiple of every kernel's `MR`.
const ROWS: usize = 168;
/// Columns of the right operand packed at a time; a multiple of every kernel's `NR`.
const COLUMNS: usize = 512;
/// Rows whose unfinished sums are kept when k has more than one block; a multiple of `ROWS`.
const UNFINISHED: usize = 6 * ROWS;

/// What is added to a product, element by element, before the one rounding.
#[derive(Clone, Copy)]
pub(super) enum Addend<O> {
    /// Nothing.
    None,
    /// What the result holds.
    Old,
    /// Another matrix with the result's stride.
    Other(*const O),
}

/// Where results go: element (i, j) is `pointer[i * stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Out<O> {
    pub pointer: *mut O,
    pub stride: usize,
    pub addend: Addend<O>,
}

// SAFETY: an address of plain numbers; whoever splits a result over threads gives each its own part.
unsafe impl<O: Send> Send for Out<O> {}
// SAFETY: as above.
unsafe impl<O: Sync> Sync for Out<O> {}

impl<O> Out<O> {
    /// The part that starts at an element.
    ///
    /// # Safety
    /// The element is inside the result.
    pub(super) unsafe fn from(self, row: usize, column: usize) -> Self {
        let offset = row * self.stride + column;
        // SAFETY: the caller's promise; an addend has the result's shape.
        unsafe {
            let addend = match self.addend {
                Addend::Other(p) => Addend::Other(p.add(offset)),
                other => other,
            };
            Out { pointer: self.pointer.add(offset), addend, ..self }
        }
    }
}

/// Packed operands and unfinished sums of one thread.
pub(super) struct Scratch<'a> {
    left: &'a mut [u32],
    right: &'a mut [u32],
    unfinished: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    /// 32-bit words that `new` needs for products whose k is at most `depth`.
    pub(super) fn words(depth: usize) -> usize {
        let unfinished = if depth > DEPTH { UNFINISHED * COLUMNS } else { 0 };
        ROWS * LEFT_STRIDE + DEPTH * COLUMNS + unfinished
    }

    /// Divides `words`.
    pub(super) fn new(words: &'a mut [u32]) -> Self {
        let (left, rest) = words.split_at_mut(ROWS * LEFT_STRIDE);
        let (right, unfinished) = rest.split_at_mut(DEPTH * COLUMNS);
        // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
        let unfinished =
            unsafe { std::slice::from_raw_parts_mut(unfinished.as_mut_ptr().cast(), unfinished.len()) };
        Scratch { left, right, unfinished }
    }
}

/// `out (m, n) = left (m, k) * right (k, n) + addend`, on this thread.
pub(super) struct Product<'a, 's, E, O> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub left: Mat<'a, E>,
    pub right: Mat<'a, E>,
    pub out: Out<O>,
    pub scratch: &'a mut Scratch<'s>,
}

impl<E: Float, O: Float> Product<'_, '_, E, O> {
    /// Computes with the kernel `isa`.
    ///
    /// # Safety
    /// `out` and its addend have m rows of n elements that nobody else touches.
    pub(super) unsafe fn run(self, isa: Isa) {
        isa.run(Blocked(self));
    }
}

/// A product whose result is promised to be valid.
struct Blocked<'a, 's, E, O>(Product<'a, 's, E, O>);

impl<E: Float, O: Float> Task for Blocked<'_, '_, E, O> {
    #[inline(always)]
    fn run<K: Kernel>(self) {
        let Product { m, n, k, left, right, out, scratch } = self.0;
        let lanes = pack::lanes::<K>(k);
        // Blocks along k of nearly equal depth; at least one, so that an empty k gives zeros.
        let blocks = lanes.div_ceil(DEPTH).max(1);
        let depth = lanes.div_ceil(blocks);
        let stripe = if blocks > 1 { UNFINISHED } else { m.max(1) };
        let mut tile = [0f32; 14 * 32];
        for m0 in (0..m).step_by(stripe) {
            for n0 in (0..n).step_by(COLUMNS) {
                let columns = COLUMNS.min(n - n0);
                for block in 0..blocks {
                    let lane0 = (block * depth).min(lanes);
                    let depth = depth.min(lanes - lane0);
                    let (k0, k1) = (lane0 * K::STEP, k.min((lane0 + depth) * K::STEP));
                    let panel = depth * K::NR;
                    pack::right::<K, E>(right.from(k0, n0), k1 - k0, columns, panel, scratch.right);
                    for i0 in (m0..m.min(m0 + stripe)).step_by(ROWS) {
                        let rows = ROWS.min(m - i0).min(m0 + stripe - i0);
                        let part = left.from(i0, k0);
                        let sweep = Sweep { rows, columns, right: scratch.right, panel };
                        let unfinished = &mut scratch.unfinished[..];
                        let sums = |r: usize, c: usize| match blocks {
                            1 => tile.as_mut_ptr(),
                            _ => {
                                let index = (i0 - m0 + r) * COLUMNS + c * K::MR;
                                unfinished[index..index + K::MR * K::NR].as_mut_ptr()
                            }
                        };
                        let finish = |r: Range<usize>, c: Range<usize>, sums: *const f32| {
                            if block + 1 == blocks {
                                // SAFETY: rows and columns of this part of the result.
                                unsafe {
                                    let out = out.from(i0 + r.start, n0 + c.start);
                                    store::<O>(sums, K::NR, r.len(), c.len(), out);
                                }
                            }
                        };
                        let all = |_: Range<usize>, _: Range<usize>| 0..depth;
                        // SAFETY: this is compiled and called for the kernel's processor; the operands are
                        // packed to the depth that `all` gives, in the layout that the constants say.
                        unsafe {
                            if part.column == 1 {
                                pack::left_along::<K, E>(part, rows, k1 - k0, scratch.left);
                                let step = K::MR * LEFT_STRIDE;
                                sweep.run::<K, LEFT_STRIDE, 1>(
                                    scratch.left,
                                    step,
                                    all,
                                    block > 0,
                                    sums,
                                    finish,
                                );
                            } else {
                                pack::left_across::<K, E>(part, rows, k1 - k0, scratch.left);
                                let step = depth * LEFT_PANEL;
                                sweep.run::<K, 1, LEFT_PANEL>(
                                    scratch.left,
                                    step,
                                    all,
                                    block > 0,
                                    sums,
                                    finish,
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

/// All tiles of a packed block of rows times a packed block of columns.
pub(super) struct Sweep<'a> {
    pub rows: usize,
    pub columns: usize,
    pub right: &'a [u32],
    /// Lanes of one panel of `right`.
    pub panel: usize,
}

impl Sweep<'_> {
    /// Computes each tile over the lanes that `span` gives for its rows and columns (none: the tile is
    /// skipped), in the memory that `sums` gives for its first row and column, and hands it to `finish`.
    /// `left` has its panels of `MR` rows `step` lanes apart.
    ///
    /// # Safety
    /// As for [`Kernel::tile`], with the layouts that RS, KS, `step` and `panel` say; `sums` gives MR * NR.
    #[inline(always)]
    pub(super) unsafe fn run<K: Kernel, const RS: usize, const KS: usize>(
        &self,
        left: &[u32],
        step: usize,
        span: impl Fn(Range<usize>, Range<usize>) -> Range<usize>,
        resume: bool,
        mut sums: impl FnMut(usize, usize) -> *mut f32,
        mut finish: impl FnMut(Range<usize>, Range<usize>, *const f32),
    ) {
        // A panel of the right operand stays in the first cache while the rows go by.
        for (p, c) in (0..self.columns).step_by(K::NR).enumerate() {
            let columns = c..self.columns.min(c + K::NR);
            for (q, r) in (0..self.rows).step_by(K::MR).enumerate() {
                let rows = r..self.rows.min(r + K::MR);
                let lanes = span(rows.clone(), columns.clone());
                if lanes.is_empty() && lanes.start != 0 {
                    continue;
                }
                let a = &left[q * step + lanes.start * KS..];
                let b = &self.right[p * self.panel + lanes.start * K::NR..];
                let tile = sums(r, c);
                // SAFETY: the caller's promise.
                unsafe {
                    K::tile::<RS, KS>(rows.len(), lanes.len(), a.as_ptr(), b.as_ptr(), tile, resume);
                }
                finish(rows, columns.clone(), tile);
            }
        }
    }
}

/// Rounds a tile into the result.
///
/// # Safety
/// `sums` has `rows` rows `stride` apart, `out` and its addend as many.
#[inline(always)]
unsafe fn store<O: Float>(sums: *const f32, stride: usize, rows: usize, columns: usize, out: Out<O>) {
    for r in 0..rows {
        // SAFETY: the caller's promise; the addend is another matrix or the result itself, read before it is
        // written.
        unsafe {
            let sums = std::slice::from_raw_parts(sums.add(r * stride), columns);
            let to = out.pointer.add(r * out.stride);
            match out.addend {
                Addend::None => {
                    for (c, &sum) in sums.iter().enumerate() {
                        *to.add(c) = O::from_f32(sum);
                    }
                }
                Addend::Old => {
                    for (c, &sum) in sums.iter().enumerate() {
                        *to.add(c) = O::from_f32(sum + (*to.add(c)).to_f32());
                    }
                }
                Addend::Other(other) => {
                    let other = other.add(r * out.stride);
                    for (c, &sum) in sums.iter().enumerate() {
                        *to.add(c) = O::from_f32(sum + (*other.add(c)).to_f32());
                    }
                }
            }
        }
    }
}
