//! The operands of a product as kernels read them: packed, or where they are.

use super::kernel::Kernel;
use super::pack::{self, Mat};
use collectives::{DType, Float};

/// A left operand in lanes.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    /// Rows along k, so far apart.
    Along(&'a [u32], usize),
    /// Steps of k so far apart, and panels of `MR` rows so far.
    Across(&'a [u32], usize, usize),
}

impl<'a> Left<'a> {
    /// What [`pack::left_across`] packed, with so many lanes along k.
    #[inline(always)]
    pub(super) fn across<K: Kernel>(packed: &'a [u32], depth: usize) -> Self {
        Left::Across(packed, pack::left_panel::<K>(), depth * pack::left_panel::<K>())
    }

    /// An operand that needs no packing: f32 for a kernel whose lanes are f32, where it is. The kernel reads an even
    /// number of rows, so the last odd one needs another after it.
    #[inline(always)]
    pub(super) fn in_place<K: Kernel, E: Float>(left: Mat<'a, E>) -> Option<Self> {
        match (near::<K, E>(left)?, left.column) {
            (words, 1) => Some(Left::Along(words, left.row)),
            (words, stride) => Some(Left::Across(words, stride, K::MR)),
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
    /// What [`pack::right`] packed with panels of so many lanes.
    #[inline(always)]
    pub(super) fn packed<K: Kernel>(lanes: &'a [u32], panel: usize) -> Self {
        Right { lanes, stride: K::NR, panel }
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
