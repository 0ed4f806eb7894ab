//! Causal softmax attention of one sequence and one key/value head, and its backward.
//!
//! Queries are taken [`QUERIES`] at a time: their scores against all keys up to the last of them are the only
//! thing that is quadratic, and only that much of it exists at once. Tiles above the diagonal are skipped. The
//! backward computes the probabilities again from the logarithms of the denominators.

use super::kernel::{Isa, Kernel, Task};
use super::math::{dot, exp, exp_sum, ln, max};
use super::pack::{self, DEPTH, LEFT_PANEL, LEFT_STRIDE, Mat};
use super::product::Sweep;
use crate::ops::AttentionShape;
use collectives::Float;
use std::ops::Range;

/// Queries of one step: eight tiles of the widest kernel.
const QUERIES: usize = 112;
/// Keys of one step of their gradients; a multiple of every kernel's `MR`.
const KEYS: usize = 168;
/// A multiple of every kernel's `NR`.
const COLUMNS: usize = 32;

/// No lanes, and not even zeros are wanted: see [`Sweep::run`].
const SKIP: Range<usize> = 1..1;

/// One thread's memory for one sequence and key/value head.
struct Scratch<'a> {
    /// Keys as a right operand (width, length).
    keys_t: &'a mut [u32],
    /// Values as a right operand (width, length): only backward.
    values_t: &'a mut [u32],
    /// Values, backward keys, as a right operand (length, width).
    rows: &'a mut [u32],
    /// A left operand.
    left: &'a mut [u32],
    /// Queries and gradients of outputs as right operands (QUERIES, width): only backward.
    queries: &'a mut [u32],
    d_out: &'a mut [u32],
    /// Scores, then probabilities (QUERIES, length).
    scores: &'a mut [f32],
    /// Gradients of scores (QUERIES, length): only backward.
    d_scores: &'a mut [f32],
    /// Sums of unfinished tiles (QUERIES, width).
    sums: &'a mut [f32],
    /// Gradients of keys and values (length, width), in tiles: only backward.
    d_keys: &'a mut [f32],
    d_values: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    fn sizes(length: usize, width: usize) -> [usize; 11] {
        let (long, wide) = (length.next_multiple_of(COLUMNS), width.next_multiple_of(COLUMNS));
        let tall = length.next_multiple_of(KEYS);
        let left = KEYS.max(QUERIES) * LEFT_STRIDE;
        let scores = QUERIES * long;
        [
            width * long,
            width * long,
            length * wide,
            left,
            QUERIES * wide,
            QUERIES * wide,
            scores,
            scores,
            // The last tile may reach over the end.
            (QUERIES + LEFT_PANEL) * wide,
            tall * wide,
            tall * wide,
        ]
    }

    fn new(mut words: &'a mut [u32], length: usize, width: usize) -> Self {
        let parts = Self::sizes(length, width).map(|size| words.split_off_mut(..size).expect("enough words"));
        let [keys_t, values_t, rows, left, queries, d_out, scores, d_scores, sums, d_keys, d_values] = parts;
        let (scores, d_scores, sums) = (floats(scores), floats(d_scores), floats(sums));
        let (d_keys, d_values) = (floats(d_keys), floats(d_values));
        Scratch { keys_t, values_t, rows, left, queries, d_out, scores, d_scores, sums, d_keys, d_values }
    }
}

fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// 32-bit words of scratch that a sequence of `length` needs.
pub(super) fn words(length: usize, width: usize) -> usize {
    Scratch::sizes(length, width).iter().sum()
}

/// Heads of one sequence inside (n, heads * width): a start and a row stride.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub start: usize,
    pub stride: usize,
}

impl Place {
    fn mat<T>(self, data: &[T], row: usize, head: usize, width: usize) -> Mat<'_, T> {
        Mat::rows(&data[self.start + row * self.stride + head * width..], self.stride)
    }
}

/// The forward of one sequence and key/value head.
pub(super) struct Forward<'a, T> {
    pub shape: AttentionShape,
    pub sequence: usize,
    pub kv_head: usize,
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    /// (n, Q): the columns of this group's heads of this sequence are written.
    pub out: *mut T,
    /// (rows, heads, length): the rows of this sequence and group are written.
    pub log_sums: *mut f32,
    pub words: &'a mut [u32],
}

/// The backward of one sequence and key/value head.
pub(super) struct Backward<'a, T> {
    pub shape: AttentionShape,
    pub sequence: usize,
    pub kv_head: usize,
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    pub out: &'a [T],
    pub log_sums: &'a [f32],
    pub d_out: &'a [T],
    pub d_q: *mut T,
    pub d_k: *mut T,
    pub d_v: *mut T,
    pub words: &'a mut [u32],
}

impl<T: Float> Forward<'_, T> {
    /// Computes.
    ///
    /// # Safety
    /// `out` and `log_sums` reach as far as the shape says, and nobody else touches what this writes.
    pub(super) unsafe fn run(self, isa: Isa) {
        isa.run(Checked(self));
    }
}

impl<T: Float> Backward<'_, T> {
    /// Computes.
    ///
    /// # Safety
    /// `d_q`, `d_k` and `d_v` reach as far as the shape says, and nobody else touches what this writes.
    pub(super) unsafe fn run(self, isa: Isa) {
        isa.run(Checked(self));
    }
}

/// Work whose results are promised to be valid.
struct Checked<W>(W);

/// Where this sequence's queries (`.0`) and keys (`.1`) are.
fn places(shape: &AttentionShape, sequence: usize) -> (Place, Place) {
    let place = |heads: usize| {
        let stride = heads * shape.width;
        Place { start: sequence * shape.length * stride, stride }
    };
    (place(shape.heads), place(shape.kv_heads))
}

impl<T: Float> Task for Checked<Forward<'_, T>> {
    #[inline(always)]
    fn run<K: Kernel>(self) {
        let Forward { shape, sequence, kv_head, q, k, v, out, log_sums, words } = self.0;
        let AttentionShape { length, heads, kv_heads, width, .. } = shape;
        let (queries, keys) = places(&shape, sequence);
        let s = Scratch::new(words, length, width);
        let long = length.next_multiple_of(COLUMNS);
        let scale = 1.0 / (width as f32).sqrt();
        let keys_t = Mat::columns(keys.mat(k, 0, kv_head, width).data, keys.stride);
        pack::right::<K, T>(keys_t, width, length, width * K::NR, s.keys_t);
        pack::right::<K, T>(keys.mat(v, 0, kv_head, width), length, width, length * K::NR, s.rows);
        let group = heads / kv_heads;
        for head in kv_head * group..(kv_head + 1) * group {
            for first in (0..length).step_by(QUERIES) {
                let count = QUERIES.min(length - first);
                let rows = queries.mat(q, first, head, width);
                let mut inverse = [0f32; QUERIES];
                // SAFETY: this is compiled and called for the kernel's processor.
                unsafe { scores::<K, T>(rows, width, first, count, s.keys_t, s.left, s.scores, long) };
                for r in 0..count {
                    let (row, masked) = s.scores[r * long..][..first + count].split_at_mut(first + r + 1);
                    let largest = max(row) * scale;
                    let sum = exp_sum(row, scale, largest);
                    masked.fill(0.0);
                    inverse[r] = 1.0 / sum;
                    let index = (sequence * heads + head) * length + first + r;
                    // SAFETY: a row of this sequence and group.
                    unsafe { *log_sums.add(index) = largest + ln(sum) };
                }
                let finish = |rows: Range<usize>, columns: Range<usize>, sums: *const f32| {
                    for (i, r) in rows.enumerate() {
                        let at = queries.start + (first + r) * queries.stride + head * width + columns.start;
                        for c in 0..columns.len() {
                            // SAFETY: a head of this group, in a row of this sequence.
                            unsafe { *out.add(at + c) = T::from_f32(*sums.add(i * K::NR + c) * inverse[r]) };
                        }
                    }
                };
                let weights = Mat::rows(&*s.scores, long);
                let right = Right { packed: s.rows, length, width };
                // SAFETY: as above; the probabilities are (count, first + count).
                unsafe { weighted::<K>(weights, first, count, right, s.left, s.sums, finish) };
            }
        }
    }
}

impl<T: Float> Task for Checked<Backward<'_, T>> {
    #[inline(always)]
    fn run<K: Kernel>(self) {
        let Backward { shape, sequence, kv_head, q, k, v, out, log_sums, d_out, d_q, d_k, d_v, words } =
            self.0;
        let AttentionShape { length, heads, kv_heads, width, .. } = shape;
        let (queries, keys) = places(&shape, sequence);
        let s = Scratch::new(words, length, width);
        let long = length.next_multiple_of(COLUMNS);
        let scale = 1.0 / (width as f32).sqrt();
        let transposed = |x| Mat::columns(keys.mat(x, 0, kv_head, width).data, keys.stride);
        pack::right::<K, T>(transposed(k), width, length, width * K::NR, s.keys_t);
        pack::right::<K, T>(transposed(v), width, length, width * K::NR, s.values_t);
        pack::right::<K, T>(keys.mat(k, 0, kv_head, width), length, width, length * K::NR, s.rows);
        s.d_keys.fill(0.0);
        s.d_values.fill(0.0);
        let group = heads / kv_heads;
        for head in kv_head * group..(kv_head + 1) * group {
            for first in (0..length).step_by(QUERIES) {
                let count = QUERIES.min(length - first);
                let end = first + count;
                let rows = queries.mat(q, first, head, width);
                let d_rows = queries.mat(d_out, first, head, width);
                // SAFETY: this is compiled and called for the kernel's processor.
                unsafe {
                    scores::<K, T>(rows, width, first, count, s.keys_t, s.left, s.scores, long);
                    scores::<K, T>(d_rows, width, first, count, s.values_t, s.left, s.d_scores, long);
                }
                for r in 0..count {
                    let valid = first + r + 1;
                    let at = queries.start + (first + r) * queries.stride + head * width;
                    let delta = dot(&out[at..at + width], &d_out[at..at + width]);
                    let log_sum = log_sums[(sequence * heads + head) * length + first + r];
                    let (p, masked) = s.scores[r * long..][..end].split_at_mut(valid);
                    let (d, d_masked) = s.d_scores[r * long..][..end].split_at_mut(valid);
                    for (p, d) in p.iter_mut().zip(d) {
                        *p = exp(*p * scale - log_sum);
                        *d = *p * (*d - delta) * scale;
                    }
                    masked.fill(0.0);
                    d_masked.fill(0.0);
                }
                pack::right::<K, T>(d_rows, count, width, count * K::NR, s.d_out);
                pack::right::<K, T>(rows, count, width, count * K::NR, s.queries);
                let finish = |rows: Range<usize>, columns: Range<usize>, sums: *const f32| {
                    for (i, r) in rows.enumerate() {
                        let at = queries.start + (first + r) * queries.stride + head * width + columns.start;
                        for c in 0..columns.len() {
                            // SAFETY: a head of this group, in a row of this sequence.
                            unsafe { *d_q.add(at + c) = T::from_f32(*sums.add(i * K::NR + c)) };
                        }
                    }
                };
                let right = Right { packed: s.rows, length, width };
                let d_weights = Mat::rows(&*s.d_scores, long);
                // SAFETY: as above; the matrices are (count, end).
                unsafe {
                    weighted::<K>(d_weights, first, count, right, s.left, s.sums, finish);
                    let weights = Mat { data: &*s.scores, row: 1, column: long };
                    let d_weights = Mat { data: &*s.d_scores, row: 1, column: long };
                    add_transposed::<K>(weights, first, count, s.d_out, width, s.left, s.d_values);
                    add_transposed::<K>(d_weights, first, count, s.queries, width, s.left, s.d_keys);
                }
            }
        }
        for (sums, out) in [(&*s.d_keys, d_k), (&*s.d_values, d_v)] {
            for row in 0..length {
                let at = keys.start + row * keys.stride + kv_head * width;
                for column in (0..width).step_by(K::NR) {
                    let tile = tile_at::<K>(row / K::MR * K::MR, column, width);
                    let sums = &sums[tile + row % K::MR * K::NR..][..K::NR.min(width - column)];
                    for (c, &sum) in sums.iter().enumerate() {
                        // SAFETY: this head, in a row of this sequence.
                        unsafe { *out.add(at + column + c) = T::from_f32(sum) };
                    }
                }
            }
        }
    }
}

/// Where the tile of this first row and column is among tiles of a matrix of `width` columns.
#[inline(always)]
fn tile_at<K: Kernel>(row: usize, column: usize, width: usize) -> usize {
    row * width.next_multiple_of(K::NR) + column * K::MR
}

/// `out (count, first + count) = rows (count, width) * right (width, ..)`, without tiles above the diagonal.
///
/// # Safety
/// As for [`Kernel::tile`].
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn scores<K: Kernel, T: Float>(
    rows: Mat<'_, T>,
    width: usize,
    first: usize,
    count: usize,
    right: &[u32],
    left: &mut [u32],
    out: &mut [f32],
    stride: usize,
) {
    pack::left_along::<K, T>(rows, count, width, left);
    let mut tile = [0f32; 14 * 32];
    let sweep = Sweep { rows: count, columns: first + count, right, panel: width * K::NR };
    let span = |r: Range<usize>, c: Range<usize>| if c.start < first + r.end { 0..width } else { SKIP };
    let finish = |r: Range<usize>, c: Range<usize>, sums: *const f32| {
        for (i, row) in r.enumerate() {
            let out = &mut out[row * stride + c.start..][..c.len()];
            // SAFETY: a row of the tile.
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(sums.add(i * K::NR), c.len()) });
        }
    };
    let step = K::MR * LEFT_STRIDE;
    // SAFETY: the caller's promise; the operands are packed as the constants say.
    unsafe { sweep.run::<K, LEFT_STRIDE, 1>(left, step, span, false, |_, _| tile.as_mut_ptr(), finish) };
}

/// A packed right operand (length, width) of one block along k.
#[derive(Clone, Copy)]
struct Right<'a> {
    packed: &'a [u32],
    length: usize,
    width: usize,
}

/// `finish(weights (count, first + count) * right (.., width))`; weights above the diagonal are zero.
///
/// # Safety
/// As for [`Kernel::tile`].
#[inline(always)]
unsafe fn weighted<K: Kernel>(
    weights: Mat<'_, f32>,
    first: usize,
    count: usize,
    right: Right<'_>,
    left: &mut [u32],
    sums: &mut [f32],
    mut finish: impl FnMut(Range<usize>, Range<usize>, *const f32),
) {
    let end = first + count;
    for key in (0..end).step_by(DEPTH) {
        let depth = DEPTH.min(end - key);
        pack::left_along::<K, f32>(weights.from(0, key), count, depth, left);
        let packed = &right.packed[key * K::NR..];
        let sweep = Sweep { rows: count, columns: right.width, right: packed, panel: right.length * K::NR };
        // The last row of a tile sees the keys up to itself.
        let span = |r: Range<usize>, _: Range<usize>| 0..depth.min((first + r.end).saturating_sub(key));
        let last = |r: Range<usize>, c: Range<usize>, sums: *const f32| {
            if key + depth == end {
                finish(r, c, sums);
            }
        };
        let sums = |r: usize, c: usize| {
            let at = tile_at::<K>(r, c, right.width);
            sums[at..at + K::MR * K::NR].as_mut_ptr()
        };
        let step = K::MR * LEFT_STRIDE;
        // SAFETY: the caller's promise; the operands are packed as the constants say.
        unsafe { sweep.run::<K, LEFT_STRIDE, 1>(left, step, span, key > 0, sums, last) };
    }
}

/// `sums (first + count, width) += weights^T (first + count, count) * right (count, width)`, in tiles; weights
/// above the diagonal are zero. `weights` is given transposed: rows are keys.
///
/// # Safety
/// As for [`Kernel::tile`].
#[inline(always)]
unsafe fn add_transposed<K: Kernel>(
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
        pack::left_across::<K, f32>(weights.from(key, 0), keys, count, left);
        let sweep = Sweep { rows: keys, columns: width, right, panel: count * K::NR };
        // The first key of a tile is seen by the queries from itself on.
        let span = |r: Range<usize>, _: Range<usize>| (key + r.start).saturating_sub(first)..count;
        let tiles = |r: usize, c: usize| {
            let at = tile_at::<K>(key + r, c, width);
            sums[at..at + K::MR * K::NR].as_mut_ptr()
        };
        let step = count * LEFT_PANEL;
        // SAFETY: the caller's promise; the operands are packed as the constants say.
        unsafe { sweep.run::<K, 1, LEFT_PANEL>(left, step, span, true, tiles, |_, _, _| ()) };
    }
}
