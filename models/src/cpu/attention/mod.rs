//! Causal softmax attention of one sequence and query heads of one key/value head, and its backward.
//!
//! Queries are taken [`QUERIES`] at a time: their scores against all keys up to the last of them are the only
//! thing that is quadratic, and only that much of it exists at once. Tiles above the diagonal are skipped. The
//! backward computes the probabilities again from the logarithms of the denominators.

mod abreast;
mod triangles;

use super::WIDEST_HEAD;
use super::compiled::{is, known_as};
use super::kernel::{Isa, Kernel, Task, operand};
use super::math::{dot, ln};
use super::operands::Right;
use super::pack::{LEFT_STRIDE, Mat, WIDE_PANEL, lanes};
use crate::ops::AttentionShape;
use abreast::{ABREAST, Abreast};
use collectives::{Float, bf16, f16};
use std::ops::Range;
use triangles::{Rows, Scores, add_transposed, scores, tile_at, weighted};

/// Queries of one step at most: eight tiles of 14 rows.
const QUERIES: usize = 112;
/// Keys of one step of their gradients at most.
const KEYS: usize = 168;
/// A multiple of every kernel's `NR`, and of the elements along k that it takes at a time.
const COLUMNS: usize = 32;

/// Queries of one step: whole tiles, and whole vectors abreast.
const fn step<K: Kernel>() -> usize {
    const { assert!((QUERIES / K::MR * K::MR).is_multiple_of(ABREAST)) };
    QUERIES / K::MR * K::MR
}

/// Keys of one step of their gradients: whole tiles.
const fn keys<K: Kernel>() -> usize {
    KEYS / K::MR * K::MR
}

/// One thread's memory for one sequence and key/value head.
struct Scratch<'a> {
    /// Keys as a right operand (width, length).
    keys_t: &'a mut [u32],
    /// Values, backward keys, as a right operand (length, width).
    rows: &'a mut [u32],
    /// A left operand.
    left: &'a mut [u32],
    /// Scores, then probabilities (QUERIES, length).
    scores: &'a mut [f32],
    /// Sums of unfinished tiles (QUERIES, width).
    sums: &'a mut [f32],
}

/// What the backward has of it besides.
struct BackwardScratch<'a> {
    /// Values as a right operand (width, length).
    values_t: &'a mut [u32],
    /// Queries and gradients of outputs as right operands (QUERIES, width).
    queries: &'a mut [u32],
    d_out: &'a mut [u32],
    /// Gradients of scores (QUERIES, length).
    d_scores: &'a mut [f32],
    /// Gradients of keys and values (length, width), in tiles.
    d_keys: &'a mut [f32],
    d_values: &'a mut [f32],
}

/// Elements of scores of a sequence; the last tile may reach over the end, as everywhere here.
fn scores_of(length: usize) -> usize {
    (QUERIES + WIDE_PANEL) * length.next_multiple_of(COLUMNS)
}

/// Takes the first of `words`, so many for each.
fn take<'a, const N: usize>(words: &mut &'a mut [u32], sizes: [usize; N]) -> [&'a mut [u32]; N] {
    sizes.map(|size| words.split_off_mut(..size).expect("enough words"))
}

impl<'a> Scratch<'a> {
    fn sizes(length: usize, width: usize) -> [usize; 5] {
        let (long, wide) = (length.next_multiple_of(COLUMNS), width.next_multiple_of(COLUMNS));
        let left = KEYS.max(QUERIES) * LEFT_STRIDE;
        [wide * long, long * wide, left, scores_of(length), (QUERIES + WIDE_PANEL) * wide]
    }

    fn new(words: &mut &'a mut [u32], length: usize, width: usize) -> Self {
        let [keys_t, rows, left, scores, sums] = take(words, Self::sizes(length, width));
        Scratch { keys_t, rows, left, scores: floats(scores), sums: floats(sums) }
    }
}

impl<'a> BackwardScratch<'a> {
    fn sizes(length: usize, width: usize) -> [usize; 6] {
        let (long, wide) = (length.next_multiple_of(COLUMNS), width.next_multiple_of(COLUMNS));
        let tall = length.next_multiple_of(KEYS).max(long);
        [wide * long, QUERIES * wide, QUERIES * wide, scores_of(length), tall * wide, tall * wide]
    }

    fn new(words: &mut &'a mut [u32], length: usize, width: usize) -> Self {
        let [values_t, queries, d_out, d_scores, d_keys, d_values] = take(words, Self::sizes(length, width));
        let [d_scores, d_keys, d_values] = [d_scores, d_keys, d_values].map(floats);
        BackwardScratch { values_t, queries, d_out, d_scores, d_keys, d_values }
    }
}

fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: u32 and f32 have the same size and alignment, and every bit pattern is a value of both.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// 32-bit words of scratch that a sequence of `length` needs, for its forward alone or its backward too.
pub(super) fn words(length: usize, width: usize, backward: bool) -> usize {
    let more = if backward { BackwardScratch::sizes(length, width).iter().sum() } else { 0 };
    Scratch::sizes(length, width).iter().sum::<usize>() + more
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

/// The forward of one sequence and some of the query heads of one key/value head: which are computed together changes no bit.
pub(super) struct Forward<'a, T> {
    pub shape: AttentionShape,
    pub sequence: usize,
    /// Not none.
    pub heads: Range<usize>,
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    /// (n, Q): the columns of these heads of this sequence are written.
    pub out: *mut T,
    /// (rows, heads, length): the rows of this sequence and these heads are written.
    pub log_sums: *mut f32,
    pub words: &'a mut [u32],
}

/// The backward of one sequence and key/value head, whose gradient is one sum over all its query heads.
pub(super) struct Backward<'a, T> {
    pub shape: AttentionShape,
    pub sequence: usize,
    pub kv_head: usize,
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    pub out: &'a [T],
    pub log_sums: &'a [f32],
    pub d_out: &'a [f32],
    pub d_q: *mut f32,
    pub d_k: *mut f32,
    pub d_v: *mut f32,
    pub words: &'a mut [u32],
}

/// Runs a piece of work by code of this crate where models have its type.
macro_rules! run {
    ($work:ident, $task:ident, $isa:ident) => {
        run!($work, $task, $isa, f32, run_widened);
        run!($work, $task, $isa, bf16, run);
        run!($work, $task, $isa, f16, run_widened);
        $isa.run_widened(Checked($task));
    };
    ($work:ident, $task:ident, $isa:ident, $type:ident, $run:ident) => {
        if const { is::<T, $type>() } {
            #[inline(never)]
            fn compiled(task: $work<'_, $type>, isa: Isa) {
                isa.$run(Checked(task));
            }
            // SAFETY: this is its type.
            return compiled(unsafe { known_as($task) }, $isa);
        }
    };
}

impl<T: Float> Forward<'_, T> {
    /// Computes with the kernel `isa`: one that widens, or for bf16 that of AMX.
    ///
    /// # Safety
    /// `out` and `log_sums` reach as far as the shape says, and nobody else touches what this writes.
    pub(super) unsafe fn run(self, isa: Isa) {
        run!(Forward, self, isa);
    }
}

impl<T: Float> Backward<'_, T> {
    /// Computes with the kernel `isa`: one that widens, or for bf16 that of AMX.
    ///
    /// # Safety
    /// `d_q`, `d_k` and `d_v` reach as far as the shape says, and nobody else touches what this writes.
    pub(super) unsafe fn run(self, isa: Isa) {
        run!(Backward, self, isa);
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
    #[cfg(target_arch = "x86_64")]
    const PAIRS: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self) {
        let Forward { shape, sequence, heads: own, q, k, v, out, log_sums, mut words } = self.0;
        let AttentionShape { length, heads, kv_heads, width, .. } = shape;
        let kv_head = own.start / (heads / kv_heads);
        let (queries, keys) = places(&shape, sequence);
        let s = Scratch::new(&mut words, length, width);
        let long = length.next_multiple_of(COLUMNS);
        let scale = 1.0 / (width as f32).sqrt();
        let keys_t = Mat::columns(keys.mat(k, 0, kv_head, width).data, keys.stride);
        // SAFETY: this is compiled and called for the kernel's processor.
        unsafe {
            K::pack_right::<T>(keys_t, width, length, lanes::<K>(width), s.keys_t);
            K::pack_right::<T>(keys.mat(v, 0, kv_head, width), length, width, lanes::<K>(length), s.rows);
        }
        for head in own {
            for first in (0..length).step_by(step::<K>()) {
                let count = step::<K>().min(length - first);
                let rows = queries.mat(q, first, head, width);
                // SAFETY: this is compiled and called for the kernel's processor.
                unsafe {
                    scores::<K, T>(
                        rows,
                        count,
                        s.keys_t,
                        s.left,
                        Scores { out: s.scores, stride: long, width, first },
                    )
                };
                let (mut largest, mut sums) = ([0f32; QUERIES], [1f32; QUERIES]);
                for r in (0..count).step_by(ABREAST) {
                    let mut rows = Abreast::new(s.scores, long, r, first + r);
                    rows.mask(f32::NEG_INFINITY);
                    let most = rows.largest().map(|x| x * scale);
                    largest[r..r + ABREAST].copy_from_slice(&most);
                    sums[r..r + ABREAST].copy_from_slice(&rows.exp_sum(scale, most));
                }
                // SAFETY: rows of this sequence and this head.
                let log_sums = unsafe {
                    let index = (sequence * heads + head) * length + first;
                    std::slice::from_raw_parts_mut(log_sums.add(index), count)
                };
                for ((log_sum, largest), &sum) in log_sums.iter_mut().zip(largest).zip(&sums) {
                    *log_sum = largest + ln(sum);
                }
                let inverse = sums.map(|sum| 1.0 / sum);
                let weights = Mat::rows(&*s.scores, long);
                let right = Right::packed::<K>(s.rows, lanes::<K>(length));
                // SAFETY: as above; the probabilities are (count, first + count), and the result is one of
                // these heads in rows of this sequence.
                unsafe {
                    let out = out.add(queries.start + first * queries.stride + head * width);
                    let to = Rows { out, stride: queries.stride, width, factors: &inverse };
                    weighted::<K, T>(weights, first, count, right, s.left, s.sums, to);
                }
            }
        }
    }
}

impl<T: Float> Task for Checked<Backward<'_, T>> {
    #[cfg(target_arch = "x86_64")]
    const PAIRS: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self) {
        let Backward { shape, sequence, kv_head, q, k, v, out, log_sums, d_out, d_q, d_k, d_v, mut words } =
            self.0;
        let AttentionShape { length, heads, kv_heads, width, .. } = shape;
        let (queries, keys) = places(&shape, sequence);
        let s = Scratch::new(&mut words, length, width);
        let own = BackwardScratch::new(&mut words, length, width);
        let long = length.next_multiple_of(COLUMNS);
        let scale = 1.0 / (width as f32).sqrt();
        let transposed = |x| Mat::columns(keys.mat(x, 0, kv_head, width).data, keys.stride);
        // SAFETY: this is compiled and called for the kernel's processor.
        unsafe {
            K::pack_right::<T>(transposed(k), width, length, lanes::<K>(width), s.keys_t);
            K::pack_right::<T>(transposed(v), width, length, lanes::<K>(width), own.values_t);
            K::pack_right::<T>(keys.mat(k, 0, kv_head, width), length, width, lanes::<K>(length), s.rows);
        }
        let held = length.next_multiple_of(K::MR) * width.next_multiple_of(K::NR);
        own.d_keys[..held].fill(0.0);
        own.d_values[..held].fill(0.0);
        let (group, mut d_row) = (heads / kv_heads, [0f32; WIDEST_HEAD]);
        for head in kv_head * group..(kv_head + 1) * group {
            for first in (0..length).step_by(step::<K>()) {
                let count = step::<K>().min(length - first);
                let rows = queries.mat(q, first, head, width);
                let d_rows = queries.mat(d_out, first, head, width);
                // SAFETY: this is compiled and called for the kernel's processor.
                unsafe {
                    let to = Scores { out: s.scores, stride: long, width, first };
                    scores::<K, T>(rows, count, s.keys_t, s.left, to);
                    let to = Scores { out: own.d_scores, stride: long, width, first };
                    scores::<K, f32>(d_rows, count, own.values_t, s.left, to);
                }
                let (mut log_sum, mut delta) = ([0f32; QUERIES], [0f32; QUERIES]);
                for r in 0..count {
                    let at = queries.start + (first + r) * queries.stride + head * width;
                    // As the products have it, of which this is the mean: where a query sees one key, only the order of sums is
                    // between them.
                    let d_row = &mut d_row[..width];
                    for (own, &x) in d_row.iter_mut().zip(&d_out[at..at + width]) {
                        *own = operand::<K>(x);
                    }
                    delta[r] = dot(&out[at..at + width], d_row);
                    log_sum[r] = log_sums[(sequence * heads + head) * length + first + r];
                }
                for r in (0..count).step_by(ABREAST) {
                    let four = |x: &[f32; QUERIES]| std::array::from_fn(|i| x[r + i]);
                    let mut p = Abreast::new(s.scores, long, r, first + r);
                    p.mask(f32::NEG_INFINITY);
                    let mut d = Abreast::new(own.d_scores, long, r, first + r);
                    d.mask(0.0);
                    p.differentiate(&mut d, scale, four(&log_sum), four(&delta));
                }
                let right = Right::packed::<K>(s.rows, lanes::<K>(length));
                let d_weights = Mat::rows(&*own.d_scores, long);
                // SAFETY: as above; the matrices are (count, end), and the result is a head of this group in
                // rows of this sequence.
                unsafe {
                    K::pack_right::<f32>(d_rows, count, width, lanes::<K>(count), own.d_out);
                    K::pack_right::<T>(rows, count, width, lanes::<K>(count), own.queries);
                    let out = d_q.add(queries.start + first * queries.stride + head * width);
                    let to = Rows { out, stride: queries.stride, width, factors: &[1.0; QUERIES] };
                    weighted::<K, f32>(d_weights, first, count, right, s.left, s.sums, to);
                    let weights = Mat { data: &*s.scores, row: 1, column: long };
                    let d_weights = Mat { data: &*own.d_scores, row: 1, column: long };
                    add_transposed::<K>(weights, first, count, own.d_out, width, s.left, own.d_values);
                    add_transposed::<K>(d_weights, first, count, own.queries, width, s.left, own.d_keys);
                }
            }
        }
        for (sums, out) in [(&*own.d_keys, d_k), (&*own.d_values, d_v)] {
            for row in 0..length {
                let at = keys.start + row * keys.stride + kv_head * width;
                for column in (0..width).step_by(K::NR) {
                    let tile = tile_at::<K>(row / K::MR * K::MR, column, width);
                    let sums = &sums[tile + row % K::MR * K::NR..][..K::NR.min(width - column)];
                    // SAFETY: this head, in a row of this sequence.
                    let out = unsafe { std::slice::from_raw_parts_mut(out.add(at + column), sums.len()) };
                    out.copy_from_slice(sums);
                }
            }
        }
    }
}
