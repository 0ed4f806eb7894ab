//! The operands of a product as kernels read them: packed, or where they are.

use super::kernel::Kernel;
use super::pack::{self, Mat};
use collectives::{DType, Float};

/// A left operand in lanes: packed, or where it is.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub lanes: &'a [u32],
    /// Whether its rows lie across k, and not along it.
    pub across: bool,
    /// Between rows, or between steps of k if they lie across; a kernel of tiles knows.
    pub stride: usize,
    /// Between steps of k.
    pub step: usize,
    /// Between panels of `MR` rows.
    pub panel: usize,
}

impl<'a> Left<'a> {
    /// Rows along k, `stride` lanes apart.
    #[inline(always)]
    pub(super) fn along<K: Kernel>(lanes: &'a [u32], stride: usize) -> Self {
        Left { lanes, across: false, stride, step: 1, panel: K::MR * stride }
    }

    /// What [`pack::left_across`] packed, with so many lanes along k.
    #[inline(always)]
    pub(super) fn across<K: Kernel>(lanes: &'a [u32], depth: usize) -> Self {
        let stride = pack::left_panel::<K>();
        Left { lanes, across: true, stride, step: stride, panel: depth * stride }
    }

    /// Panels of tiles, of which a lane along k has all rows and parts, with so many lanes along k.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn tiled<K: Kernel>(lanes: &'a [u32], depth: usize) -> Self {
        let step = K::MR * K::PARTS;
        Left { lanes, across: false, stride: 0, step, panel: depth * step }
    }

    /// An operand that needs no packing: f32 for a kernel whose lanes are f32, where it is. The kernel reads an even
    /// number of rows, so the last odd one needs another after it.
    #[inline(always)]
    pub(super) fn in_place<K: Kernel, E: Float>(left: Mat<'a, E>) -> Option<Self> {
        match (near::<K, E>(left)?, left.column) {
            (lanes, 1) => Some(Left::along::<K>(lanes, left.row)),
            (lanes, stride) => Some(Left { lanes, across: true, stride, step: stride, panel: K::MR }),
        }
    }
}

/// A packed right operand, or one where it is: lanes of panels of `NR` columns.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub lanes: &'a [u32],
    /// Between steps of k.
    pub stride: usize,
    /// Between panels.
    pub panel: usize,
}

impl<'a> Right<'a> {
    /// What [`Kernel::pack_right`] packed with so many lanes along k.
    #[inline(always)]
    pub(super) fn packed<K: Kernel>(lanes: &'a [u32], depth: usize) -> Self {
        let stride = K::NR * K::PARTS;
        Right { lanes, stride, panel: depth * stride }
    }

    /// What comes after so many lanes along k.
    #[inline(always)]
    pub(super) fn from(self, lane: usize) -> Self {
        Right { lanes: &self.lanes[lane * self.stride..], ..self }
    }

    /// An operand of whole panels that needs no packing.
    #[inline(always)]
    pub(super) fn in_place<K: Kernel, E: Float>(right: Mat<'a, E>, columns: usize) -> Option<Self> {
        if right.column != 1 || !columns.is_multiple_of(K::NR) {
            return None;
        }
        Some(Right { lanes: near::<K, E>(right)?, stride: right.row, panel: K::NR })
    }
}

/// The elements as lanes, if they are, and if neighbours across the rows of memory do not all fall into the same cache
/// sets.
#[inline(always)]
fn near<'a, K: Kernel, E: Float>(matrix: Mat<'a, E>) -> Option<&'a [u32]> {
    let stride = matrix.row.max(matrix.column);
    if K::STEP != 1 || E::DTYPE != DType::F32 || stride.is_multiple_of(1024) {
        return None;
    }
    // SAFETY: f32 and u32 have the same size and alignment, and E is f32.
    Some(unsafe { std::slice::from_raw_parts(matrix.data.as_ptr().cast(), matrix.data.len()) })
}
