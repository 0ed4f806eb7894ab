//! Packing of operands into tiles of bf16, in the order in which they are read.
//!
//! A panel is 32 rows of a left operand or 32 columns of a right one. Step by step along k it has the two tiles of its first
//! part, then those of the next. A tile has 16 rows of 16 lanes, pairs along k: of a left operand a row is the operand's, of a
//! right one its columns stand beside each other. What is past the end of k is zero.

use super::{LANES, SIDE};
use crate::cpu::pack::{Mat, fetch};
use crate::cpu::transpose::transpose;
use collectives::{DType, Float};
use std::arch::x86_64::*;

/// The first `count` of sixteen elements.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

// Closures and functions without the features would call each instruction as a function: there are none here.

/// Sixteen elements as f32, all of them if `WHOLE`, or else the first `count` and zeros.
///
/// # Safety
/// So many elements to read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load<E: Float, const WHOLE: bool>(source: *const E, count: usize) -> __m512 {
    let there = if WHOLE { 0xffff } else { first(count) };
    // SAFETY: the caller's promise; the type says how wide an element is.
    unsafe {
        match E::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(there, source.cast()),
            DType::Bf16 => widened(_mm256_maskz_loadu_epi16(there, source.cast())),
            _ => {
                let mut elements = [0f32; 16];
                for (i, element) in elements.iter_mut().enumerate().take(if WHOLE { 16 } else { count }) {
                    *element = (*source.add(i)).to_f32();
                }
                _mm512_loadu_ps(elements.as_ptr())
            }
        }
    }
}

/// Sixteen bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn widened(half: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
}

/// Sixteen numbers, each rounded to what a bf16 can hold. Some that are none become zero, which their rest then is not.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> __m512 {
    let up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(!0xffff)))
}

/// Words 0 and 16, 1 and 17, and so on.
const IN_TURN: [u16; 32] = {
    let mut order = [0; 32];
    let mut i = 0;
    while i < 32 {
        order[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    order
};

/// The upper half of each lane of two registers, one after the other, or in turn.
const UPPER: [[u16; 32]; 2] = {
    let mut order = [[0; 32]; 2];
    let mut i = 0;
    while i < 32 {
        order[0][i] = 2 * i as u16 + 1;
        order[1][i] = 2 * IN_TURN[i] + 1;
        i += 1;
    }
    order
};

/// The parts of 32 numbers, those of `high` after those of `low`, or in turn with them: each the bf16 nearest to what those before
/// it leave, so that three are all of an f32. What is no number or is rounded to infinity leaves what is no number.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn parts<const PARTS: usize, const TURNS: bool>(mut low: __m512, mut high: __m512) -> [__m512i; PARTS] {
    // SAFETY: 64 bytes each.
    let (upper, in_turn) = unsafe {
        let order = |words: &[u16; 32]| _mm512_loadu_si512(words.as_ptr().cast());
        (order(&UPPER[TURNS as usize]), order(&IN_TURN))
    };
    let mut parts = [_mm512_setzero_si512(); PARTS];
    for (p, part) in parts.iter_mut().enumerate() {
        let (a, b) = if p + 1 < PARTS { (rounded(low), rounded(high)) } else { (low, high) };
        *part = if PARTS < 3 && p + 1 == PARTS {
            // SAFETY: both types are 64 bytes.
            let words = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a)) };
            if TURNS { _mm512_permutexvar_epi16(in_turn, words) } else { words }
        } else {
            // The lower halves are zeros, also of what two parts leave.
            _mm512_permutex2var_epi16(_mm512_castps_si512(a), upper, _mm512_castps_si512(b))
        };
        (low, high) = (_mm512_sub_ps(low, a), _mm512_sub_ps(high, b));
    }
    parts
}

/// Sixteen lanes of a row: of 32 neighbours along k, of which `count` are there, or all if `WHOLE`.
///
/// # Safety
/// So many elements to read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn along<const PARTS: usize, const WHOLE: bool, E: Float>(
    source: *const E,
    count: usize,
) -> [__m512i; PARTS] {
    // SAFETY: the caller's promise; nothing is read past `count`.
    unsafe {
        if PARTS == 1 && E::DTYPE == DType::Bf16 {
            let there = if WHOLE || count >= 32 { u32::MAX } else { (1 << count) - 1 };
            return [_mm512_maskz_loadu_epi16(there, source.cast()); PARTS];
        }
        let low = load::<E, WHOLE>(source, count);
        parts::<PARTS, false>(low, load::<E, WHOLE>(source.wrapping_add(16), count.saturating_sub(16)))
    }
}

/// A lane of each of sixteen neighbours across k, of which `low` are there, and `high` of those of the next element along k;
/// or all if `WHOLE`.
///
/// # Safety
/// So many elements to read at both places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn across<const PARTS: usize, const WHOLE: bool, E: Float>(
    source: *const E,
    low: usize,
    next: *const E,
    high: usize,
) -> [__m512i; PARTS] {
    // SAFETY: the caller's promise; nothing is read past `low` and `high`.
    unsafe {
        if PARTS == 1 && E::DTYPE == DType::Bf16 {
            let (low, high) = if WHOLE { (0xffff, 0xffff) } else { (first(low), first(high)) };
            let low = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(low, source.cast()));
            let high = _mm256_maskz_loadu_epi16(high, next.cast());
            let order = _mm512_loadu_si512(IN_TURN.as_ptr().cast());
            return [_mm512_permutexvar_epi16(order, _mm512_inserti64x4::<1>(low, high)); PARTS];
        }
        parts::<PARTS, true>(load::<E, WHOLE>(source, low), load::<E, WHOLE>(next, high))
    }
}

/// Tiles that are asked for before they are read.
const AHEAD: usize = 3;

/// A matrix of `k` rows and `n` columns, of which those that are contiguous, rows or columns (`ALONG`), are `step` elements
/// apart.
struct Source<E, const ALONG: bool> {
    start: *const E,
    step: usize,
    k: usize,
    n: usize,
}

impl<E: Float, const ALONG: bool> Source<E, ALONG> {
    /// Writes the tile of sixteen lanes from lane s0 on of sixteen columns from c0 on, and those of its other parts: a row is a
    /// column's if `left`, or else a lane's.
    ///
    /// # Safety
    /// The matrix can be read, and `out` written so far.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn tiles<const PARTS: usize>(&self, (s0, c0): (usize, usize), left: bool, out: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if 2 * (s0 + LANES) <= self.k && c0 + 16 <= self.n {
                self.rows::<PARTS, true>(s0, c0, out);
            } else {
                self.rows::<PARTS, false>(s0, c0, out);
            }
            if left == ALONG {
                return;
            }
            for part in 0..PARTS {
                let out = out.add(part * SIDE * LANES);
                let mut rows = [_mm512_setzero_si512(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_loadu_si512(out.add(i * LANES).cast());
                }
                for (i, row) in transpose(rows).iter().enumerate() {
                    _mm512_storeu_si512(out.add(i * LANES).cast(), *row);
                }
            }
        }
    }

    /// Asks for what [`Source::tiles`] will read there, past the end for nothing.
    #[inline(always)]
    fn fetch(&self, (s0, c0): (usize, usize)) {
        let (rows, row, column) = if ALONG { (16, c0, 2 * s0) } else { (2 * LANES, 2 * s0, c0) };
        for i in 0..rows {
            let row = self.start.wrapping_add((row + i) * self.step + column);
            fetch(row);
            if ALONG && size_of::<E>() == 4 {
                fetch(row.wrapping_add(16));
            }
        }
    }

    /// Writes the tiles with a row for what is contiguous; all of it is there if `WHOLE`.
    ///
    /// # Safety
    /// As for `tiles`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn rows<const PARTS: usize, const WHOLE: bool>(&self, s0: usize, c0: usize, out: *mut u32) {
        let Source { start, step, k, n } = *self;
        let (k0, columns) = (2 * s0, n - c0);
        // SAFETY: the caller's promise: what is not in the matrix is not read.
        unsafe {
            for i in 0..16 {
                let parts = if ALONG {
                    let row = start.wrapping_add((c0 + i) * step + k0);
                    match WHOLE || i < columns {
                        true => along::<PARTS, WHOLE, E>(row, k - k0),
                        false => [_mm512_setzero_si512(); PARTS],
                    }
                } else {
                    let row = start.wrapping_add((k0 + 2 * i) * step + c0);
                    let next = row.wrapping_add(step);
                    match k.saturating_sub(k0 + 2 * i) {
                        _ if WHOLE => across::<PARTS, true, E>(row, 16, next, 16),
                        0 => [_mm512_setzero_si512(); PARTS],
                        1 => across::<PARTS, false, E>(row, columns, row, 0),
                        _ => across::<PARTS, false, E>(row, columns, next, columns),
                    }
                };
                for (p, lanes) in parts.iter().enumerate() {
                    _mm512_storeu_si512(out.add(p * SIDE * LANES + i * LANES).cast(), *lanes);
                }
            }
        }
    }
}

/// Packs rows `0..m`, columns `0..k` of a left operand.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn left<const PARTS: usize, E: Float>(
    a: Mat<'_, E>,
    m: usize,
    k: usize,
    depth: usize,
    out: &mut [u32],
) {
    // The columns of its transpose.
    let turned = Mat { data: a.data, row: a.column, column: a.row };
    // SAFETY: the caller's promise.
    unsafe { panels::<PARTS, E>(turned, k, m, depth, true, out) }
}

/// Packs rows `0..k`, columns `0..n` of a right operand.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn right<const PARTS: usize, E: Float>(
    b: Mat<'_, E>,
    k: usize,
    n: usize,
    depth: usize,
    out: &mut [u32],
) {
    // SAFETY: the caller's promise.
    unsafe { panels::<PARTS, E>(b, k, n, depth, false, out) }
}

/// Packs rows `0..k`, columns `0..n` of a matrix, whose columns become rows of tiles if `left`.
///
/// # Safety
/// The processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn panels<const PARTS: usize, E: Float>(
    matrix: Mat<'_, E>,
    k: usize,
    n: usize,
    depth: usize,
    left: bool,
    out: &mut [u32],
) {
    assert!(k <= 2 * depth && depth.is_multiple_of(LANES), "whole tiles of all that there is along k");
    assert!(n.next_multiple_of(SIDE) * PARTS * depth <= out.len(), "room for whole panels");
    let (start, len) = (matrix.data.as_ptr(), matrix.data.len());
    let reaches = |rows: usize, step: usize, columns: usize| {
        rows == 0 || columns == 0 || (rows - 1) * step + columns <= len
    };
    // Memory is walked along its rows.
    let (steps, columns) = (depth / LANES, n.div_ceil(16));
    let place = |i: usize| match matrix.column {
        1 => (i / columns * LANES, i % columns * 16),
        _ => (i % steps * LANES, i / steps * 16),
    };
    for i in 0..steps * columns {
        let (s0, c0) = place(i);
        let at = (c0 / SIDE * depth + s0) * PARTS * SIDE + c0 % SIDE * LANES;
        // SAFETY: the matrix can be read so far, as asserted, and at the place there is room for the tiles of a step.
        unsafe {
            let out = out.as_mut_ptr().add(at);
            if matrix.column == 1 {
                assert!(reaches(k, matrix.row, n), "the rows of an operand");
                let source = Source::<E, false> { start, step: matrix.row, k, n };
                source.fetch(place(i + AHEAD));
                source.tiles::<PARTS>((s0, c0), left, out);
            } else {
                assert!(reaches(n, matrix.column, k), "the columns of an operand");
                let source = Source::<E, true> { start, step: matrix.column, k, n };
                source.fetch(place(i + AHEAD));
                source.tiles::<PARTS>((s0, c0), left, out);
            }
        }
    }
}
