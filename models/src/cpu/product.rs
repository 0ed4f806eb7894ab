//! The blocked matrix product over packed operands.

use super::compiled::{is, known_as};
use super::kernel::{Ends, Isa, Kernel, Task};
use super::operands::{Left, Right};
use super::pack::{self, DEPTH, LEFT_STRIDE, Mat, NARROW_PANEL};
use collectives::{DType, Float, bf16, f16};
use std::ops::Range;

/// Rows of the left operand that kernels pack at a time at most, but AMX's, which have fewer lanes along k.
const ROWS: usize = 168;
/// Lanes of the right operand that any kernel packs at a time at most.
const RIGHT: usize = 3 << 18;
/// Columns of the right operand packed at a time are a multiple of this, and of every kernel's `NR`.
const COLUMNS: usize = 64;
/// Lanes of the left operand that any kernel packs at a time at most.
const LEFT: usize = 3 << 16;
// Rows along k, or the most panels that a kernel makes of them: 28 of six rows.
const _: () = assert!(ROWS * LEFT_STRIDE <= LEFT && 28 * NARROW_PANEL * DEPTH <= LEFT);
/// Unfinished sums that are kept when k has more than one block: of six times `ROWS` by as many columns as are packed then,
/// or of fewer columns and more rows.
const UNFINISHED: usize = 6 * ROWS * columns(RIGHT, DEPTH / 2);
/// Elements along k that are one block for every kernel.
const SHALLOW: usize = 512;

/// Lanes of both operands up to which walking across their rows is as fast as along packed ones: about half of the
/// second cache level.
const NEAR: usize = 1 << 18;

/// Sums of the largest kernel's tile.
const TILE: usize = 32 * 32;

/// Columns packed at a time at most, into so many lanes, when each takes this many.
const fn columns(room: usize, depth: usize) -> usize {
    let fit = room / if depth > 0 { depth } else { 1 } / COLUMNS * COLUMNS;
    if fit > 1024 { 1024 } else { fit }
}

/// The length of equal parts of `len`, as few as there may be of at most `most`: a multiple of `step`, which divides `most`.
#[inline(always)]
fn part(len: usize, most: usize, step: usize) -> usize {
    let parts = len.div_ceil(most).max(1);
    len.div_ceil(parts).next_multiple_of(step).max(step)
}

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

    /// Asks for a tile before its sums, in which the wait for memory is hidden.
    #[inline(always)]
    fn fetch(&self, rows: usize, columns: usize) {
        for row in (0..rows).map(|r| r * self.stride) {
            for at in [row, row + columns - 1] {
                pack::fetch(self.pointer.wrapping_add(at));
                if let Addend::Other(other) = self.addend {
                    pack::fetch(other.wrapping_add(at));
                }
            }
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
        LEFT + RIGHT + if depth > SHALLOW { UNFINISHED } else { 0 }
    }

    /// Divides `words`.
    pub(super) fn new(words: &'a mut [u32]) -> Self {
        let (left, rest) = words.split_at_mut(LEFT);
        let (right, unfinished) = rest.split_at_mut(RIGHT);
        // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
        let unfinished =
            unsafe { std::slice::from_raw_parts_mut(unfinished.as_mut_ptr().cast(), unfinished.len()) };
        Scratch { left, right, unfinished }
    }
}

/// `out (m, n) = left (m, k) * right (k, n) + addend`, on this thread.
pub(super) struct Product<'a, 's, L, R, O> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub left: Mat<'a, L>,
    pub right: Mat<'a, R>,
    pub out: Out<O>,
    pub scratch: &'a mut Scratch<'s>,
}

impl<L: Float, R: Float, O: Float> Product<'_, '_, L, R, O> {
    /// Computes with the kernel `isa`.
    ///
    /// # Safety
    /// `out` and its addend have m rows of n elements that nobody else touches.
    pub(super) unsafe fn run(self, isa: Isa) {
        macro_rules! compiled_here {
            ($run:ident: $($l:ident $r:ident $o:ident),+) => {$(
                if const { is::<L, $l>() && is::<R, $r>() && is::<O, $o>() } {
                    #[inline(never)]
                    fn compiled(product: Product<'_, '_, $l, $r, $o>, isa: Isa) {
                        isa.$run(Blocked(product));
                    }
                    // SAFETY: these are its types.
                    return compiled(unsafe { known_as(self) }, isa);
                }
            )+};
        }
        compiled_here!(
            run:
            f32 f32 f32, f32 f32 bf16, f32 bf16 f32, f32 bf16 bf16,
            bf16 f32 bf16, bf16 bf16 f32, bf16 bf16 bf16
        );
        compiled_here!(
            run_widened:
            f32 f32 f16, f32 f16 f32, f32 f16 f16,
            f16 f32 f16, f16 f16 f32, f16 f16 f16
        );
        isa.run(Blocked(self));
    }
}

/// A product whose result is promised to be valid.
struct Blocked<'a, 's, L, R, O>(Product<'a, 's, L, R, O>);

impl<L: Float, R: Float, O: Float> Task for Blocked<'_, '_, L, R, O> {
    #[cfg(target_arch = "x86_64")]
    const F32: bool = is::<L, f32>() && is::<R, f32>() && is::<O, f32>();

    #[inline(always)]
    fn run<K: Kernel>(self) {
        const {
            assert!(K::DEPTH * K::STEP >= SHALLOW && K::RIGHT <= RIGHT);
            assert!(K::ROWS * K::PARTS * K::DEPTH <= LEFT, "room for what the kernel packs");
        }
        let Product { m, n, k, left, right, out, scratch } = self.0;
        let lanes = pack::lanes::<K>(k);
        // At least one block along k, so that an empty k gives zeros.
        let depth = part(lanes, K::DEPTH, K::LANES);
        let blocks = lanes.div_ceil(depth).max(1);
        let across = part(n, columns(K::RIGHT, depth * K::PARTS), K::NR);
        // The right operand is packed again for each stripe: they are as high as there is room for their sums.
        let stripe = match blocks {
            1 => m.max(1),
            _ => part(m, scratch.unfinished.len() / across / K::ROWS * K::ROWS, K::ROWS),
        };
        // Of an empty k nothing lies anywhere.
        let few = k > 0 && (m + n) * k <= NEAR;
        for m0 in (0..m).step_by(stripe) {
            let end = m.min(m0 + stripe);
            let high = part(end - m0, K::ROWS, K::MR);
            for n0 in (0..n).step_by(across) {
                let columns = across.min(n - n0);
                for block in 0..blocks {
                    let lane0 = (block * depth).min(lanes);
                    let depth = depth.min(lanes - lane0);
                    let (k0, k1) = (lane0 * K::STEP, k.min((lane0 + depth) * K::STEP));
                    let part = right.from(k0, n0);
                    let right = Right::in_place::<K, R>(part, columns).filter(|_| few).unwrap_or_else(|| {
                        // SAFETY: this is compiled and called for the kernel's processor.
                        unsafe { K::pack_right::<R>(part, k1 - k0, columns, depth, scratch.right) };
                        Right::packed::<K>(scratch.right, depth)
                    });
                    for i0 in (m0..end).step_by(high) {
                        let rows = high.min(end - i0);
                        let part = left.from(i0, k0);
                        // An odd last row would be rounded up to one that does not exist.
                        let even = m.is_multiple_of(2) && (part.column == 1 || few);
                        let left = Left::in_place::<K, L>(part).filter(|_| even).unwrap_or_else(|| {
                            // SAFETY: as above.
                            unsafe { K::pack_left::<L>(part, rows, k1 - k0, depth, scratch.left) }
                        });
                        let sweep = Sweep { rows, columns, right };
                        let unfinished = match blocks {
                            1 => &mut [][..],
                            _ => &mut scratch.unfinished[(i0 - m0) * across..],
                        };
                        // SAFETY: this is compiled and called for the kernel's processor; the operands are
                        // packed to `depth`, in the layout that `left` says; the part of the result exists.
                        unsafe {
                            let out = out.from(i0, n0);
                            let (first, last) = (block == 0, block + 1 == blocks);
                            let tile = [0.0; TILE];
                            let mut target = Target { out, depth, first, last, unfinished, across, tile };
                            sweep.run::<K>(left, &mut target);
                        }
                    }
                }
            }
        }
    }
}

/// Where the tiles of a block of a product go.
struct Target<'a, O> {
    /// The block's place in the result.
    out: Out<O>,
    /// Lanes along k.
    depth: usize,
    /// Whether this is the first block along k, and the last.
    first: bool,
    last: bool,
    /// Tiles between blocks along k, or nothing when there is only one.
    unfinished: &'a mut [f32],
    /// Columns of `unfinished`.
    across: usize,
    tile: [f32; TILE],
}

impl<O: Float> Target<'_, O> {
    /// Whole tiles of an f32 result are written by the kernel itself.
    #[inline(always)]
    fn direct<K: Kernel>(&self, rows: &Range<usize>, columns: &Range<usize>) -> bool {
        self.last && O::DTYPE == DType::F32 && rows.len().is_multiple_of(2) && columns.len() == K::NR
    }
}

impl<O: Float> Tiles for Target<'_, O> {
    #[inline(always)]
    fn place<K: Kernel>(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(Range<usize>, Ends)> {
        // SAFETY: rows and columns of this part of the result.
        let out = unsafe { self.out.from(rows.start, columns.start) };
        let direct = self.direct::<K>(&rows, &columns);
        let sums = if self.unfinished.is_empty() {
            &mut self.tile[..]
        } else {
            &mut self.unfinished[rows.start * self.across + columns.start * K::MR..]
        };
        let mut ends = Ends::tile::<K>(sums, !self.first);
        if direct {
            ends.add = match out.addend {
                Addend::None => std::ptr::null(),
                Addend::Old => out.pointer.cast_const().cast(),
                Addend::Other(other) => other.cast(),
            };
            (ends.out, ends.stride) = (out.pointer.cast(), out.stride);
        } else if self.last {
            out.fetch(rows.len(), columns.len());
        }
        Some((0..self.depth, ends))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, rows: Range<usize>, columns: Range<usize>, sums: *const f32) {
        if self.last && !self.direct::<K>(&rows, &columns) {
            // SAFETY: rows and columns of this part of the result.
            unsafe {
                let out = self.out.from(rows.start, columns.start);
                store::<K, O>(sums, rows.len(), columns.len(), out);
            }
        }
    }
}

/// Where the tiles of a [`Sweep`] go. Its methods must be `#[inline(always)]`, which closures cannot be, so that
/// they are compiled with the kernel's instructions.
pub(super) trait Tiles {
    /// The lanes along k and the memory for the tile of these rows and columns; none skips the tile.
    fn place<K: Kernel>(&mut self, rows: Range<usize>, columns: Range<usize>)
    -> Option<(Range<usize>, Ends)>;

    /// The tile's sums are complete.
    fn finish<K: Kernel>(&mut self, rows: Range<usize>, columns: Range<usize>, sums: *const f32);
}

/// All tiles of a block of rows times a packed block of columns.
pub(super) struct Sweep<'a> {
    pub rows: usize,
    pub columns: usize,
    pub right: Right<'a>,
}

impl Sweep<'_> {
    /// Computes each tile.
    ///
    /// # Safety
    /// As for [`Kernel::tile`], with operands packed as `left` and `panel` say.
    #[inline(always)]
    pub(super) unsafe fn run<K: Kernel>(&self, left: Left<'_>, tiles: &mut impl Tiles) {
        // SAFETY: the caller's promise, in the layout's constants.
        unsafe {
            match left.across {
                false => self.tiles::<K, false>(left, tiles),
                true => self.tiles::<K, true>(left, tiles),
            }
        }
    }

    /// # Safety
    /// As for `run`; `left` lies across k if `ACROSS`.
    #[inline(always)]
    unsafe fn tiles<K: Kernel, const ACROSS: bool>(&self, left: Left<'_>, tiles: &mut impl Tiles) {
        // A panel of the right operand stays in the first cache while the rows go by.
        for (p, c) in (0..self.columns).step_by(K::NR).enumerate() {
            let columns = c..self.columns.min(c + K::NR);
            for (q, r) in (0..self.rows).step_by(K::MR).enumerate() {
                let rows = r..self.rows.min(r + K::MR);
                let Some((lanes, mut ends)) = tiles.place::<K>(rows.clone(), columns.clone()) else {
                    continue;
                };
                let a = &left.lanes[q * left.panel + lanes.start * left.step..];
                let Right { lanes: right, stride: b_stride, panel } = self.right;
                let b = &right[p * panel + lanes.start * b_stride..];
                // For each row of tiles its share of the next panel; past the last one it is nothing.
                ends.next =
                    right.as_ptr().wrapping_add((p + 1) * panel + q * panel / self.rows.div_ceil(K::MR));
                // SAFETY: the caller's promise.
                unsafe {
                    K::tile::<ACROSS>(
                        rows.len(),
                        lanes.len(),
                        a.as_ptr(),
                        left.stride,
                        b.as_ptr(),
                        b_stride,
                        ends,
                    );
                }
                tiles.finish::<K>(rows, columns.clone(), ends.out);
            }
        }
    }
}

/// Rounds a tile into the result.
///
/// # Safety
/// `sums` has `rows` rows `NR` apart, `out` and its addend as many.
#[inline(always)]
unsafe fn store<K: Kernel, O: Float>(sums: *const f32, rows: usize, columns: usize, out: Out<O>) {
    for r in 0..rows {
        // SAFETY: the caller's promise; the addend is another matrix or the result itself, whose part is read
        // before it is written.
        unsafe {
            let sums = sums.add(r * K::NR);
            let to = out.pointer.add(r * out.stride);
            let add = match out.addend {
                Addend::None => std::ptr::null(),
                Addend::Old => to.cast_const(),
                Addend::Other(other) => other.add(r * out.stride),
            };
            let mut c = 0;
            while c + 16 <= columns {
                let mut x = *sums.add(c).cast::<[f32; 16]>();
                if !add.is_null() {
                    let add = *add.add(c).cast::<[O; 16]>();
                    for i in 0..16 {
                        x[i] += add[i].to_f32();
                    }
                }
                let mut y = [O::default(); 16];
                for i in 0..16 {
                    y[i] = O::from_f32(x[i]);
                }
                *to.add(c).cast::<[O; 16]>() = y;
                c += 16;
            }
            while c < columns {
                // Nothing is not zero, which would make a positive one of -0.
                let sum = *sums.add(c);
                *to.add(c) = O::from_f32(if add.is_null() { sum } else { sum + (*add.add(c)).to_f32() });
                c += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_equal_but_for_what_steps_leave() {
        for (len, most, step, expected) in [
            (0, 168, 14, 14),
            (1, 168, 14, 14),
            (168, 168, 14, 168),
            (170, 168, 14, 98),
            (1024, 168, 14, 154),
            (1024, 512, 1, 512),
            (1025, 512, 1, 342),
            (2048, 1008, 168, 840),
        ] {
            assert_eq!(part(len, most, step), expected, "{len} in parts of at most {most}");
        }
    }
}
