//! Packing of operands into the lanes that [`Kernel`] reads, widening 16-bit floats on the way.
//!
//! The left operand is (m, k), the right one (k, n). Either may be contiguous along k or across it. Lanes past
//! the last row or column are left as they are: the tile computes with them, and nobody reads the results.

use super::kernel::{Kernel, lane};
use collectives::Float;
use std::ops::Range;

/// Lanes along k that one packed block holds at most.
pub(super) const DEPTH: usize = 512;

/// Distance between rows of a left operand packed along k. Not a multiple of 4 KiB, so that the rows of a tile
/// fall into different cache sets; a constant, so that the kernel addresses them with fixed offsets.
pub(super) const LEFT_STRIDE: usize = DEPTH + 16;

/// Distance between steps of a left operand packed across k: a panel of `MR` rows, and room to copy whole
/// vectors.
pub(super) const WIDE_PANEL: usize = 16;
/// The same for kernels of at most eight rows.
pub(super) const NARROW_PANEL: usize = 8;

/// Which of the two a kernel's left operands have.
#[inline(always)]
pub(super) const fn left_panel<K: Kernel>() -> usize {
    if K::MR > NARROW_PANEL { WIDE_PANEL } else { NARROW_PANEL }
}

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

    /// The matrix without its first rows and columns; of one that has no elements there are none to leave out.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        let start = row * self.row + column * self.column;
        Mat { data: &self.data[if self.data.is_empty() { 0 } else { start }..], ..self }
    }
}

/// Packed lanes for `k` elements.
#[inline(always)]
pub(super) fn lanes<K: Kernel>(k: usize) -> usize {
    k.div_ceil(K::STEP).next_multiple_of(K::LANES)
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
            out[pairs.len()] = lane::<K, E>(last, last) & 0xffff;
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
/// lane s of row r of panel p is at `(p * lanes + s) * left_panel + r`.
#[inline(always)]
pub(super) fn left_across<K: Kernel, E: Float>(a: Mat<'_, E>, m: usize, k: usize, out: &mut [u32]) {
    debug_assert!(a.row == 1);
    let (steps, panel) = (lanes::<K>(k), left_panel::<K>());
    let panels = m.div_ceil(K::MR);
    // Eight rows of memory at a time, so that both sides are touched in long stretches.
    for s0 in (0..steps).step_by(AHEAD) {
        for p in 0..panels {
            // A whole vector, even though the last two of its rows belong to the next panel.
            let width = panel.min(m - p * K::MR);
            let part = Mat { data: &a.data[p * K::MR..], row: a.column, column: 1 };
            let out = &mut out[p * steps * panel..][..steps * panel];
            let steps = s0..steps.min(s0 + AHEAD);
            if panel == WIDE_PANEL {
                across::<K, E, WIDE_PANEL>(part, k, width, panel, steps, out);
            } else {
                across::<K, E, NARROW_PANEL>(part, k, width, panel, steps, out);
            }
        }
    }
}

/// Steps along k that are packed in one go, and how far ahead memory is asked for.
const AHEAD: usize = 8;

/// Asks for a cache line, wherever it is.
#[inline(always)]
pub(super) fn fetch<E>(address: *const E) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which no address makes fail; every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Packs some steps of the first `width` columns of a matrix with rows along k into one panel, `stride` lanes a
/// step. Whole vectors of N have a constant length.
#[inline(always)]
fn across<K: Kernel, E: Float, const N: usize>(
    source: Mat<'_, E>,
    k: usize,
    width: usize,
    stride: usize,
    steps: Range<usize>,
    out: &mut [u32],
) {
    if steps.is_empty() {
        return;
    }
    let (last, whole) = (steps.end - 1, width / N * N);
    assert!(
        (last * K::STEP + K::STEP - 1).min(k - 1) * source.row + width <= source.data.len(),
        "rows of the operand"
    );
    assert!(last * stride + width <= out.len(), "room in the panel");
    let (data, out) = (source.data.as_ptr(), out.as_mut_ptr());
    for s in steps {
        // The step past an odd k is zero, whatever the other operand has there.
        let paired = (s + 1) * K::STEP <= k;
        let (keep, next) = if paired { (u32::MAX, (K::STEP - 1) * source.row) } else { (0xffff, 0) };
        // SAFETY: the rows of step s, and of the one after it within the step, end inside the operand, and its
        // lanes inside the panel, as asserted for the last one; c stays below `width`.
        unsafe {
            let low = data.add(s * K::STEP * source.row);
            // The walk is too wide for the processor to see; past the operand's end nothing is fetched.
            for pair in 0..K::STEP {
                fetch(low.wrapping_add((AHEAD * K::STEP + pair) * source.row));
            }
            let out = out.add(s * stride);
            let mut c = 0;
            while c < whole {
                let a = *low.add(c).cast::<[E; N]>();
                let b = *low.add(next + c).cast::<[E; N]>();
                let mut lanes = [0; N];
                for i in 0..N {
                    lanes[i] = lane::<K, E>(a[i], b[i]) & keep;
                }
                *out.add(c).cast::<[u32; N]>() = lanes;
                c += N;
            }
            while c < width {
                *out.add(c) = lane::<K, E>(*low.add(c), *low.add(next + c)) & keep;
                c += 1;
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
    let steps = lanes::<K>(k);
    for s0 in (0..steps).step_by(AHEAD) {
        for (p, c0) in (0..n).step_by(K::NR).enumerate() {
            let part = Mat { data: &b.data[c0..], ..b };
            let steps = s0..steps.min(s0 + AHEAD);
            across::<K, E, 16>(part, k, K::NR.min(n - c0), K::NR, steps, &mut out[p * panel..]);
        }
    }
}

#[inline(always)]
fn right_along<K: Kernel, E: Float>(b: Mat<'_, E>, k: usize, n: usize, panel: usize, out: &mut [u32]) {
    let steps = lanes::<K>(k);
    // Whole lanes: an odd k has one more, of half.
    let whole = k / K::STEP / 16 * 16;
    for c0 in (0..n).step_by(16) {
        let columns = 16.min(n - c0);
        let column = |c: usize| &b.data[(c0 + c) * b.column..][..k];
        let out = &mut out[(c0 / K::NR) * panel + c0 % K::NR..];
        let mut done = 0;
        if columns == 16 {
            let source = &b.data[c0 * b.column..][..15 * b.column + k];
            for s in (0..whole).step_by(16) {
                let out = &mut out[s * K::NR..][..15 * K::NR + 16];
                // SAFETY: this is compiled and called for the kernel's processor; `source` has 16 rows of at
                // least `whole` lanes, and `out` has the length.
                unsafe { K::transpose::<E>(source.as_ptr().add(s * K::STEP), b.column, out.as_mut_ptr()) };
            }
            done = whole;
        }
        for c in 0..columns {
            let column = column(c);
            for s in done..steps {
                let (low, high) = (s * K::STEP, (s + 1) * K::STEP - 1);
                let half = lane::<K, E>(column[low], column[high.min(k - 1)]);
                out[s * K::NR + c] = if high < k { half } else { half & 0xffff };
            }
        }
    }
}
