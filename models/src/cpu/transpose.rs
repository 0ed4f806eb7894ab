//! Blocks of 16 x 16 lanes transposed in registers, for [`Kernel::transpose`].

use super::kernel::{Kernel, lane};
use collectives::{DType, Float};
use std::arch::x86_64::*;

/// Eight lanes of a row.
///
/// # Safety
/// AVX2, and eight lanes to read.
#[inline(always)]
unsafe fn eight<K: Kernel, E: Float>(source: *const E) -> __m256i {
    // SAFETY: the caller's promise; the type says how wide an element is.
    unsafe {
        match (E::DTYPE, K::STEP) {
            (DType::F32, 1) => _mm256_loadu_si256(source.cast()),
            (DType::Bf16, 1) => {
                _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast())))
            }
            _ => {
                let lane = |i: usize| {
                    let at = source.add(i * K::STEP);
                    lane::<K, E>(*at, *at.add(K::STEP - 1))
                };
                _mm256_loadu_si256(std::array::from_fn::<u32, 8, _>(lane).as_ptr().cast())
            }
        }
    }
}

/// # Safety
/// As for [`Kernel::transpose`], with AVX2.
#[inline(always)]
pub(super) unsafe fn avx2<K: Kernel, E: Float>(source: *const E, row: usize, out: *mut u32) {
    // SAFETY: the caller's promise covers every address.
    unsafe {
        // Each quarter of the block: eight rows from r0, eight lanes from l0.
        for (r0, l0) in [(0, 0), (8, 0), (0, 8), (8, 8)] {
            // Within each half of a register: the 4 x 4 blocks, of rows 0 to 3 and 4 to 7.
            let mut quads = [[_mm256_setzero_si256(); 4]; 2];
            for (g, quad) in quads.iter_mut().enumerate() {
                let row = |r: usize| eight::<K, E>(source.add((r0 + 4 * g + r) * row + l0 * K::STEP));
                let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
                let (low01, high01) = (_mm256_unpacklo_epi32(r0, r1), _mm256_unpackhi_epi32(r0, r1));
                let (low23, high23) = (_mm256_unpacklo_epi32(r2, r3), _mm256_unpackhi_epi32(r2, r3));
                quad[0] = _mm256_unpacklo_epi64(low01, low23);
                quad[1] = _mm256_unpackhi_epi64(low01, low23);
                quad[2] = _mm256_unpacklo_epi64(high01, high23);
                quad[3] = _mm256_unpackhi_epi64(high01, high23);
            }
            // Then the halves: half h of quads[g][c] holds column 4 * h + c.
            let [upper, lower] = quads;
            for (c, (upper, lower)) in upper.into_iter().zip(lower).enumerate() {
                let columns = [
                    _mm256_permute2x128_si256::<0x20>(upper, lower),
                    _mm256_permute2x128_si256::<0x31>(upper, lower),
                ];
                for (h, column) in columns.into_iter().enumerate() {
                    _mm256_storeu_si256(out.add((l0 + 4 * h + c) * K::NR + r0).cast(), column);
                }
            }
        }
    }
}

/// Sixteen lanes of a row.
///
/// # Safety
/// AVX-512 F, and sixteen lanes to read.
#[inline(always)]
unsafe fn sixteen<K: Kernel, E: Float>(source: *const E) -> __m512i {
    // SAFETY: the caller's promise; the type says how wide an element is.
    unsafe {
        match (E::DTYPE, K::STEP) {
            (DType::F32, 1) | (DType::Bf16, 2) => _mm512_loadu_si512(source.cast()),
            (DType::Bf16, _) => {
                _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast())))
            }
            _ => {
                let lane = |i: usize| {
                    let at = source.add(i * K::STEP);
                    lane::<K, E>(*at, *at.add(K::STEP - 1))
                };
                _mm512_loadu_si512(std::array::from_fn::<u32, 16, _>(lane).as_ptr().cast())
            }
        }
    }
}

/// # Safety
/// As for [`Kernel::transpose`], with AVX-512 F.
#[inline(always)]
pub(super) unsafe fn avx512<K: Kernel, E: Float>(source: *const E, row: usize, out: *mut u32) {
    // SAFETY: the caller's promise covers every address.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (r, lanes) in rows.iter_mut().enumerate() {
            *lanes = sixteen::<K, E>(source.add(r * row));
        }
        for (i, column) in transpose(rows).into_iter().enumerate() {
            _mm512_storeu_si512(out.add(i * K::NR).cast(), column);
        }
    }
}

/// The columns of sixteen rows of lanes.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
pub(super) unsafe fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: the caller's promise.
    unsafe {
        // Within each quarter of a register: the 4 x 4 blocks.
        let mut quads = [[_mm512_setzero_si512(); 4]; 4];
        for (quad, rows) in quads.iter_mut().zip(rows.as_chunks::<4>().0) {
            let [r0, r1, r2, r3] = *rows;
            let (low01, high01) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
            let (low23, high23) = (_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
            quad[0] = _mm512_unpacklo_epi64(low01, low23);
            quad[1] = _mm512_unpackhi_epi64(low01, low23);
            quad[2] = _mm512_unpacklo_epi64(high01, high23);
            quad[3] = _mm512_unpackhi_epi64(high01, high23);
        }
        // Then the quarters: row group g, quarter l of quads[g][c] holds column 4 * l + c.
        let [q0, q1, q2, q3] = quads;
        let mut columns = rows;
        for c in 0..4 {
            let even01 = _mm512_shuffle_i32x4::<0x88>(q0[c], q1[c]);
            let odd01 = _mm512_shuffle_i32x4::<0xdd>(q0[c], q1[c]);
            let even23 = _mm512_shuffle_i32x4::<0x88>(q2[c], q3[c]);
            let odd23 = _mm512_shuffle_i32x4::<0xdd>(q2[c], q3[c]);
            columns[c] = _mm512_shuffle_i32x4::<0x88>(even01, even23);
            columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd01, odd23);
            columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even01, even23);
            columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd01, odd23);
        }
        columns
    }
}
