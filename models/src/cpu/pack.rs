//! Packing of operands into the lanes that [`Kernel`] reads, widening 16-bit floats on the way.
//!
//! The left operand is (m, k), the right one (k, n). Either may be contiguous along k or across it. Lanes past
//! the last row or column are left as they are: the tile computes with them, and nobody reads the results.

use super::kernel::Kernel;
use collectives::Float;

/// Lanes along k that one packed block holds at most.
pub(super) const DEPTH: usize = 1024;

/// Distance between rows of a left operand packed along k. Not a multiple of 4 KiB, so that the rows of a tile
/// fall into different cache sets; a constant, so that the kernel addresses them with fixed offsets.
pub(super) const LEFT_STRIDE: usize = DEPTH + 16;

/// Distance between steps of a left operand packed across k: one panel of any kernel's `MR` rows.
pub(super) const LEFT_PANEL: usize = 14;

/// A matrix in someone's memory: element (i, j) is `data[i * row + j * column]`, and one of the strides is 1.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a, E> {
    pub data: &'a [E],
    pub row: usize,
    pub column: usize,
}

impl<'a, E> Mat<'a, E> {
    /// Rows one after the other, `stride` apart.
    pub(super) fn rows(data: &'a [E], stride: usize) -> Self {
        Mat { data, row: stride, column: 1 }
    }

    /// The transpose of a matrix whose rows are `stride` apart.
    pub(super) fn columns(data: &'a [E], stride: usize) -> Self {
        Mat { data, row: 1, column: stride }
    }

    /// The matrix without its first rows and columns.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        Mat { data: &self.data[row * self.row + column * self.column..], ..self }
    }
}

/// Lanes for `k` elements.
#[inline(always)]
pub(super) fn lanes<K: Kernel>(k: usize) -> usize {
    k.div_ceil(K::STEP)
}

#[inline(always)]
fn lane<K: Kernel, E: Float>(low: E, high: E) -> u32 {
    if K::STEP == 1 {
        low.to_f32().to_bits()
    } else {
        // A bf16 is the upper half of its f32.
        (low.to_f32().to_bits() >> 16) | (high.to_f32().to_bits() & 0xffff_0000)
    }
}

/// Elements that lie along k into consecutive lanes.
#[inline(always)]
fn along<K: Kernel, E: Float>(source: &[E], out: &mut [u32]) {
    if K::STEP == 1 {
        for (out, &x) in out.iter_mut().zip(source) {
            *out = lane::<K, E>(x, x);
        }
    } else {
        let (pairs, rest) = source.as_chunks::<2>();
        for (out, pair) in out.iter_mut().zip(pairs) {
            *out = lane::<K, E>(pair[0], pair[1]);
        }
        if let Some(&last) = rest.first() {
            out[pairs.len()] = lane::<K, E>(last, E::default());
        }
    }
}

/// Packs rows `0..m`, columns `k` of a left operand that is contiguous along k: row r starts at
/// `r * LEFT_STRIDE`.
#[inline(always)]
pub(super) fn left_along<K: Kernel, E: Float>(a: Mat<'_, E>, m: usize, k: usize, out: &mut [u32]) {
    debug_assert!(a.column == 1 && lanes::<K>(k) <= DEPTH);
    for (r, out) in out.chunks_mut(LEFT_STRIDE).take(m).enumerate() {
        along::<K, E>(&a.data[r * a.row..][..k], &mut out[..lanes::<K>(k)]);
    }
}

/// Packs rows `0..m`, columns `0..k` of a left operand that is contiguous across k into panels of `MR` rows:
/// lane s of row r of panel p is at `(p * lanes + s) * LEFT_PANEL + r`.
#[inline(always)]
pub(super) fn left_across<K: Kernel, E: Float>(a: Mat<'_, E>, m: usize, k: usize, out: &mut [u32]) {
    debug_assert!(a.row == 1 && K::MR <= LEFT_PANEL);
    let steps = lanes::<K>(k);
    for s in 0..steps {
        let low = &a.data[s * K::STEP * a.column..][..m];
        let high = match s * K::STEP + 1 < k {
            true => &a.data[(s * K::STEP + K::STEP - 1) * a.column..][..m],
            false => low,
        };
        // The step past an odd k is multiplied by zero on the right.
        for (p, (low, high)) in low.chunks(K::MR).zip(high.chunks(K::MR)).enumerate() {
            let out = &mut out[(p * steps + s) * LEFT_PANEL..][..K::MR];
            if low.len() == K::MR {
                // The full panel has a constant length, which vectorises.
                for r in 0..K::MR {
                    out[r] = lane::<K, E>(low[r], high[r]);
                }
            } else {
                for (out, (&low, &high)) in out.iter_mut().zip(low.iter().zip(high)) {
                    *out = lane::<K, E>(low, high);
                }
            }
        }
    }
}

/// Packs rows `0..k`, columns `0..n` of a right operand into panels of `NR` columns: lane s of column c of panel
/// p is at `p * panel + s * NR + c`.
#[inline(always)]
pub(super) fn right<K: Kernel, E: Float>(b: Mat<'_, E>, k: usize, n: usize, panel: usize, out: &mut [u32]) {
    if b.column == 1 {
        right_across::<K, E>(b, k, n, panel, out);
    } else {
        right_along::<K, E>(b, k, n, panel, out);
    }
}

#[inline(always)]
fn right_across<K: Kernel, E: Float>(b: Mat<'_, E>, k: usize, n: usize, panel: usize, out: &mut [u32]) {
    for s in 0..lanes::<K>(k) {
        let row = |i: usize| &b.data[i * b.row..][..n];
        let low = row(s * K::STEP);
        let paired = s * K::STEP + K::STEP <= k;
        let high = if paired { row(s * K::STEP + K::STEP - 1) } else { low };
        // The step past an odd k is zero here, whatever the left operand has there.
        let keep = if paired { u32::MAX } else { 0xffff };
        for (p, (low, high)) in low.chunks(K::NR).zip(high.chunks(K::NR)).enumerate() {
            let out = &mut out[p * panel + s * K::NR..][..K::NR];
            if low.len() == K::NR {
                for c in 0..K::NR {
                    out[c] = lane::<K, E>(low[c], high[c]) & keep;
                }
            } else {
                for (out, (&low, &high)) in out.iter_mut().zip(low.iter().zip(high)) {
                    *out = lane::<K, E>(low, high) & keep;
                }
            }
        }
    }
}

#[inline(always)]
fn right_along<K: Kernel, E: Float>(b: Mat<'_, E>, k: usize, n: usize, panel: usize, out: &mut [u32]) {
    let steps = lanes::<K>(k);
    let mut block = [[0u32; 16]; 16];
    for c0 in (0..n).step_by(16) {
        let columns = 16.min(n - c0);
        let base = (c0 / K::NR) * panel + c0 % K::NR;
        for s0 in (0..steps).step_by(16) {
            let depth = 16.min(steps - s0);
            for (c, block) in block.iter_mut().take(columns).enumerate() {
                let source = &b.data[(c0 + c) * b.column + s0 * K::STEP..];
                if depth == 16 && source.len() >= 16 * K::STEP && (s0 + 16) * K::STEP <= k {
                    along::<K, E>(&source[..16 * K::STEP], block);
                } else {
                    along::<K, E>(
                        &source[..k.min((s0 + depth) * K::STEP) - s0 * K::STEP],
                        &mut block[..depth],
                    );
                }
            }
            let out = &mut out[base + s0 * K::NR..];
            if depth == 16 {
                assert!(out.len() >= 15 * K::NR + 16, "a packed panel of whole blocks");
                // SAFETY: this is compiled and called for the kernel's processor; the length is asserted.
                unsafe { K::transpose(&block, out.as_mut_ptr(), K::NR) };
            } else {
                for s in 0..depth {
                    for c in 0..columns {
                        out[s * K::NR + c] = block[c][s];
                    }
                }
            }
        }
    }
}
