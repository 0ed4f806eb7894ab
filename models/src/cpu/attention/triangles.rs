//! The products of attention: triangles of scores and of weights, whose tiles above the diagonal are skipped.

use super::super::kernel::{Ends, Kernel};
use super::super::operands::{Left, Right};
use super::super::pack::{DEPTH, Mat, lanes};
use super::super::product::{Sweep, Tiles};
use super::{QUERIES, keys};
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
    let depth = lanes::<K>(to.width);
    // SAFETY: the caller's promise; the operands are packed as said.
    unsafe {
        // An odd last row would be rounded up to one that may not exist.
        let left = Left::in_place::<K, T>(rows)
            .filter(|_| count.is_multiple_of(2))
            .unwrap_or_else(|| K::pack_left::<T>(rows, count, to.width, depth, left));
        let sweep = Sweep { rows: count, columns: to.first + count, right: Right::packed::<K>(right, depth) };
        sweep.run::<K>(left, &mut to);
    }
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
            0..lanes::<K>(self.width),
            Ends { start, add, out: out.as_mut_ptr(), stride: self.stride, next: std::ptr::null() },
        ))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, _: Range<usize>, _: Range<usize>, _: *const f32) {}
}

/// Where rows of a result go, each multiplied by its factor.
pub(super) struct Rows<'a, T> {
    pub out: *mut T,
    pub stride: usize,
    pub width: usize,
    pub factors: &'a [f32; QUERIES],
}

/// `to = weights (count, first + count) * right (.., width)`; weights above the diagonal are zero. `right` is one block along k.
///
/// # Safety
/// As for [`Kernel::tile`]; `to` has `count` rows of `width` elements that nobody else touches.
#[inline(always)]
pub(super) unsafe fn weighted<K: Kernel, T: Float>(
    weights: Mat<'_, f32>,
    first: usize,
    count: usize,
    right: Right<'_>,
    left: &mut [u32],
    sums: &mut [f32],
    to: Rows<'_, T>,
) {
    let (end, width) = (first + count, to.width);
    let mut tiles = Weighted { sums, to, seen: 0, depth: 0, resume: false, last: false };
    for key in (0..end).step_by(DEPTH) {
        let keys = DEPTH.min(end - key);
        (tiles.depth, tiles.resume, tiles.last) = (lanes::<K>(keys), key > 0, key + keys == end);
        // Before this block, even the first row sees so many keys: a negative number wraps, and adding wraps back.
        tiles.seen = first.wrapping_sub(key);
        let part = weights.from(0, key);
        // SAFETY: the caller's promise; the operands are packed as said.
        unsafe {
            let left = Left::in_place::<K, f32>(part)
                .unwrap_or_else(|| K::pack_left::<f32>(part, count, keys, tiles.depth, left));
            let sweep = Sweep { rows: count, columns: width, right: right.from(lanes::<K>(key)) };
            sweep.run::<K>(left, &mut tiles);
        }
    }
}

/// Sums over keys, and where they go after the last block of keys.
struct Weighted<'a, 'b, T> {
    sums: &'a mut [f32],
    to: Rows<'b, T>,
    /// Keys of this block that precede the first row's own.
    seen: usize,
    /// Lanes of this block's keys.
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
        let at = tile_at::<K>(rows.start, columns.start, self.to.width);
        let ends = Ends::tile::<K>(&mut self.sums[at..], self.resume);
        // The last row of a tile sees the keys up to itself.
        let seen = (self.seen.wrapping_add(rows.end) as isize).max(0) as usize;
        Some((0..self.depth.min(lanes::<K>(seen)), ends))
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
    let (end, depth) = (first + count, lanes::<K>(count));
    let right = Right::packed::<K>(right, depth);
    for key in (0..end).step_by(keys::<K>()) {
        let keys = keys::<K>().min(end - key);
        let part = weights.from(key, 0);
        let mut tiles = AddTransposed { sums, key, first, depth, width };
        // SAFETY: the caller's promise; the operands are packed as said, or have room for another row.
        unsafe {
            let left = Left::in_place::<K, f32>(part)
                .unwrap_or_else(|| K::pack_left::<f32>(part, keys, count, depth, left));
            Sweep { rows: keys, columns: width, right }.run::<K>(left, &mut tiles);
        }
    }
}

/// Sums over queries, which stay in tiles.
struct AddTransposed<'a> {
    sums: &'a mut [f32],
    key: usize,
    first: usize,
    /// Lanes of queries.
    depth: usize,
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
        let queries = key.saturating_sub(self.first) / (K::STEP * K::LANES) * K::LANES..self.depth;
        Some((queries, Ends::tile::<K>(&mut self.sums[at..], true)))
    }

    #[inline(always)]
    fn finish<K: Kernel>(&mut self, _: Range<usize>, _: Range<usize>, _: *const f32) {}
}
