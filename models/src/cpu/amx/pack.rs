//! Packing of operands into tiles of bf16, in the order in which they are read.
//!
//! A panel is 32 rows of a left operand or 32 columns of a right one. Step by step along k it has two tiles. A tile has 16 rows of 16 lanes, pairs along k: of a left operand a row is the operand's, of a
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

/// The first `count` of sixteen elements as f32, the others zero.
///
/// # Safety
/// So many elements to read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load<E: Float>(source: *const E, count: usize) -> __m512 {
    // SAFETY: the caller's promise; the type says how wide an element is.
    unsafe {
        match E::DTYPE {
            DType::F32 => _mm512_maskz_loadu_ps(first(count), source.cast()),
            DType::Bf16 => widened(_mm256_maskz_loadu_epi16(first(count), source.cast())),
            _ => {
                let mut elements = [0f32; 16];
                for (i, element) in elements.iter_mut().enumerate().take(count) {
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

/// 32 numbers rounded, in their order.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn rounded(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 64 bytes.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Sixteen lanes of a row: of 32 neighbours along k, of which `count` are there.
///
/// # Safety
/// So many elements to read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn along<E: Float>(source: *const E, count: usize) -> __m512i {
    // SAFETY: the caller's promise; nothing is read past `count`.
    unsafe {
        if E::DTYPE == DType::Bf16 {
            let there = if count < 32 { (1 << count) - 1 } else { u32::MAX };
            return _mm512_maskz_loadu_epi16(there, source.cast());
        }
        rounded(load(source, count), load(source.wrapping_add(16), count.saturating_sub(16)))
    }
}

/// A lane of each of sixteen neighbours across k, of which `low` are there, and `high` of those of the next element along k.
///
/// # Safety
/// So many elements to read at both places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn across<E: Float>(source: *const E, low: usize, next: *const E, high: usize) -> __m512i {
    const PAIRS: [u16; 32] = {
        let mut pairs = [0; 32];
        let mut i = 0;
        while i < 32 {
            pairs[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        pairs
    };
    // SAFETY: the caller's promise; nothing is read past `low` and `high`.
    unsafe {
        let words = if E::DTYPE == DType::Bf16 {
            let low = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(first(low), source.cast()));
            let high = _mm256_maskz_loadu_epi16(first(high), next.cast());
            _mm512_inserti64x4::<1>(low, high)
        } else {
            rounded(load(source, low), load(next, high))
        };
        _mm512_permutexvar_epi16(_mm512_loadu_si512(PAIRS.as_ptr().cast()), words)
    }
}

/// A matrix of `k` rows and `n` columns, of which those that are contiguous, rows or columns (`ALONG`), are `step` elements
/// apart.
struct Source<E, const ALONG: bool> {
    start: *const E,
    step: usize,
    k: usize,
    n: usize,
}

impl<E: Float, const ALONG: bool> Source<E, ALONG> {
    /// Writes the tile of sixteen lanes from lane s0 on of sixteen columns from c0 on: a row is a column's if `left`, or
    /// else a lane's.
    ///
    /// # Safety
    /// The matrix can be read, and `out` written so far.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn tile(&self, (s0, c0): (usize, usize), left: bool, out: *mut u32) {
        let mut rows = [_mm512_setzero_si512(); 16];
        let Source { start, step, k, n } = *self;
        let (k0, columns) = (2 * s0, n - c0);
        // SAFETY: the caller's promise: what is not in the matrix is not read.
        unsafe {
            for (i, lanes) in rows.iter_mut().enumerate() {
                *lanes = if ALONG {
                    if i >= columns {
                        break;
                    }
                    along(start.add((c0 + i) * step + k0), k - k0)
                } else {
                    let row = start.wrapping_add((k0 + 2 * i) * step + c0);
                    let next = row.wrapping_add(step);
                    // The walk is too wide for the processor to see; past the end nothing is fetched.
                    fetch(row.wrapping_add(2 * LANES * step));
                    fetch(next.wrapping_add(2 * LANES * step));
                    match k.saturating_sub(k0 + 2 * i) {
                        0 => break,
                        1 => across(row, columns, row, 0),
                        _ => across(row, columns, next, columns),
                    }
                };
            }
            let rows = if left == ALONG { rows } else { transpose(rows) };
            for (i, row) in rows.iter().enumerate() {
                _mm512_storeu_si512(out.add(i * LANES).cast(), *row);
            }
        }
    }
}

/// Packs rows `0..m`, columns `0..k` of a left operand.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn left<E: Float>(a: Mat<'_, E>, m: usize, k: usize, depth: usize, out: &mut [u32]) {
    // The columns of its transpose.
    let turned = Mat { data: a.data, row: a.column, column: a.row };
    // SAFETY: the caller's promise.
    unsafe { panels(turned, k, m, depth, true, out) }
}

/// Packs rows `0..k`, columns `0..n` of a right operand.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn right<E: Float>(b: Mat<'_, E>, k: usize, n: usize, depth: usize, out: &mut [u32]) {
    // SAFETY: the caller's promise.
    unsafe { panels(b, k, n, depth, false, out) }
}

/// Packs rows `0..k`, columns `0..n` of a matrix, whose columns become rows of tiles if `left`.
///
/// # Safety
/// The processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn panels<E: Float>(
    matrix: Mat<'_, E>,
    k: usize,
    n: usize,
    depth: usize,
    left: bool,
    out: &mut [u32],
) {
    assert!(k <= 2 * depth && depth.is_multiple_of(LANES), "whole tiles of all that there is along k");
    assert!(n.next_multiple_of(SIDE) * depth <= out.len(), "room for whole panels");
    let (start, len) = (matrix.data.as_ptr(), matrix.data.len());
    let reaches = |rows: usize, step: usize, columns: usize| {
        rows == 0 || columns == 0 || (rows - 1) * step + columns <= len
    };
    for s0 in (0..depth).step_by(LANES) {
        for c0 in (0..n).step_by(16) {
            let at = (c0 / SIDE * depth + s0) * SIDE + c0 % SIDE * LANES;
            // SAFETY: the matrix can be read so far, as asserted, and at the place there is room for a tile.
            unsafe {
                let out = out.as_mut_ptr().add(at);
                if matrix.column == 1 {
                    assert!(reaches(k, matrix.row, n), "the rows of an operand");
                    let source = Source::<E, false> { start, step: matrix.row, k, n };
                    source.tile((s0, c0), left, out);
                } else {
                    assert!(reaches(n, matrix.column, k), "the columns of an operand");
                    let source = Source::<E, true> { start, step: matrix.column, k, n };
                    source.tile((s0, c0), left, out);
                }
            }
        }
    }
}
