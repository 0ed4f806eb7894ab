//! The products of attention: triangles of scores and of weights, whose tiles above the diagonal are skipped.

use super::super::kernel::{Ends, Kernel};
use super::super::operands::{Left, Right};
use super::super::pack::{self, DEPTH, LEFT_STRIDE, Mat};
use super::super::product::{Sweep, Tiles};
use super::{KEYS, QUERIES};
use collectives::Float;
use std::ops::Range;

/// Where the tile of this first row and column is among tiles of a matrix of `width` columns.
#[inline(always)]
pub(super) fn tile_at<K: Kernel>(row: usize, column: usize, width: usize) -> usize {
    row * width.next_multiple_of(K::NR) + column * K::MR
}

/// `to (count, first + count) = rows (count, width) * right (width, ..)`, without tiles above the diagonal.
///
/// # Safety
/// As for [`Kernel::tile`].
#[inline(always)]
pub(super) unsafe fn scores<K: Kernel, T: Float>(
    rows: Mat<'_, T>,
    count: usize,
    right: &[u32],
    left: &mut [u32],
    mut to: Scores<'_>,
) {
    let (width, first) = (to.width, to.first);
    // An odd last row would be rounded up to one that may not exist.
    let left = Left::in_place::<K, T>(rows).filter(|_| count.is_multiple_of(2)).unwrap_or_else(|| {
        pack::left_along::<K, T>(rows, count, width, left);
        Left::Along(left, LEFT_STRIDE)
    });
    let right = Right::packed::<K>(right, width * K::NR);
    let sweep = Sweep { rows: count, columns: first + count, right };
    // SAFETY: the caller's promise; the operands are packed as said.
    unsafe { sweep.run::<K>(left, &mut to) };
}

/// Scores on and below the diagonal, written where they belong: there is room for whole tiles.
pub(super) struct Scores<'a> {
    pub out: &'a mut [f32],
    pub stride: usize,
    pub width: usize,
    pub first: usize,
}

impl Tiles for Scores<'_> {
    #[inline(always)]
    fn place<K: Kernel>(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(Range<usize>, Ends)> {
        if columns.start >= self.first + rows.end {
            return None;
        }
        let out = &mut self.out[rows.start * self.stride + columns.start..];
        assert!(out.len() >= (K::MR - 1) * self.stride + K::NR, "room for a tile of scores");
        let (start, add) = (std::ptr::null(), std::ptr::null());
        Some((
            0..self.width,
            Ends { start, add, out: out.as_mut_ptr(), stride: self.stride, next: std::ptr::null() },
        ))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, _: Range<usize>, _: Range<usize>, _: *const f32) {}
}

/// A packed matrix (length, width) of one block along k.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub packed: &'a [u32],
    pub length: usize,
    pub width: usize,
}

/// Where rows of a result go, each multiplied by its factor.
pub(super) struct Rows<'a, T> {
    pub out: *mut T,
    pub stride: usize,
    pub factors: &'a [f32; QUERIES],
}

/// `to = weights (count, first + count) * right (.., width)`; weights above the diagonal are zero.
///
/// # Safety
/// As for [`Kernel::tile`]; `to` has `count` rows of `width` elements that nobody else touches.
#[inline(always)]
pub(super) unsafe fn weighted<K: Kernel, T: Float>(
    weights: Mat<'_, f32>,
    first: usize,
    count: usize,
    right: Packed<'_>,
    left: &mut [u32],
    sums: &mut [f32],
    to: Rows<'_, T>,
) {
    let (end, width) = (first + count, right.width);
    let mut tiles = Weighted { sums, to, width, seen: 0, depth: 0, resume: false, last: false };
    for key in (0..end).step_by(DEPTH) {
        let depth = DEPTH.min(end - key);
        let part = weights.from(0, key);
        let left = Left::in_place::<K, f32>(part).unwrap_or_else(|| {
            pack::left_along::<K, f32>(part, count, depth, left);
            Left::Along(left, LEFT_STRIDE)
        });
        let right = Right::packed::<K>(&right.packed[key * K::NR..], right.length * K::NR);
        let sweep = Sweep { rows: count, columns: width, right };
        (tiles.depth, tiles.resume, tiles.last) = (depth, key > 0, key + depth == end);
        // Before this block, even the first row sees so many keys: a negative number wraps, and adding wraps back.
        tiles.seen = first.wrapping_sub(key);
        // SAFETY: the caller's promise; the operands are packed as said.
        unsafe { sweep.run::<K>(left, &mut tiles) };
    }
}

/// Sums over keys, and where they go after the last block of keys.
struct Weighted<'a, 'b, T> {
    sums: &'a mut [f32],
    to: Rows<'b, T>,
    width: usize,
    /// Keys of this block that precede the first row's own.
    seen: usize,
    /// Keys of this block.
    depth: usize,
    resume: bool,
    last: bool,
}

impl<T: Float> Tiles for Weighted<'_, '_, T> {
    #[inline(always)]
    fn place<K: Kernel>(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(Range<usize>, Ends)> {
        let at = tile_at::<K>(rows.start, columns.start, self.width);
        let ends = Ends::tile::<K>(&mut self.sums[at..], self.resume);
        // The last row of a tile sees the keys up to itself.
        let seen = (self.seen.wrapping_add(rows.end) as isize).max(0) as usize;
        Some((0..self.depth.min(seen), ends))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, rows: Range<usize>, columns: Range<usize>, sums: *const f32) {
        if !self.last {
            return;
        }
        for (i, r) in rows.enumerate() {
            let factor = self.to.factors[r];
            // SAFETY: a row of the tile, and of the result, as the caller of `weighted` promised.
            unsafe {
                let sums = std::slice::from_raw_parts(sums.add(i * K::NR), columns.len());
                let out = self.to.out.add(r * self.to.stride + columns.start);
                let out = std::slice::from_raw_parts_mut(out, columns.len());
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = T::from_f32(sum * factor);
                }
            }
        }
    }
}

/// `sums (first + count, width) += weights^T (first + count, count) * right (count, width)`, in tiles; weights
/// above the diagonal are zero. `weights` is given transposed: rows are keys.
///
/// # Safety
/// As for [`Kernel::tile`].
#[inline(always)]
pub(super) unsafe fn add_transposed<K: Kernel>(
    weights: Mat<'_, f32>,
    first: usize,
    count: usize,
    right: &[u32],
    width: usize,
    left: &mut [u32],
    sums: &mut [f32],
) {
    let end = first + count;
    for key in (0..end).step_by(KEYS) {
        let keys = KEYS.min(end - key);
        let part = weights.from(key, 0);
        let left = Left::in_place::<K, f32>(part).unwrap_or_else(|| {
            pack::left_across::<K, f32>(part, keys, count, left);
            Left::across::<K>(left, count)
        });
        let right = Right::packed::<K>(right, count * K::NR);
        let sweep = Sweep { rows: keys, columns: width, right };
        let mut tiles = AddTransposed { sums, key, first, count, width };
        // SAFETY: the caller's promise; the operands are packed as said, or have room for another row.
        unsafe { sweep.run::<K>(left, &mut tiles) };
    }
}

/// Sums over queries, which stay in tiles.
struct AddTransposed<'a> {
    sums: &'a mut [f32],
    key: usize,
    first: usize,
    count: usize,
    width: usize,
}

impl Tiles for AddTransposed<'_> {
    #[inline(always)]
    fn place<K: Kernel>(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Option<(Range<usize>, Ends)> {
        let key = self.key + rows.start;
        let at = tile_at::<K>(key, columns.start, self.width);
        // The first key of a tile is seen by the queries from itself on.
        let queries = key.saturating_sub(self.first)..self.count;
        Some((queries, Ends::tile::<K>(&mut self.sums[at..], true)))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, _: Range<usize>, _: Range<usize>, _: *const f32) {}
}
