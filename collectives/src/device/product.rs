//! A product of matrices, as a value.

use super::launch::{Range, address, together};
use crate::buffer::{Memory, Place, View, ViewMut};
use crate::element::{DType, Element, Float};
use std::marker::PhantomData;

/// Bytes that products work in on a device: what cuBLAS recommends for Hopper; older GPUs need less.
pub const PRODUCT_WORKSPACE: usize = 32 << 20;

/// How close products of f32 come to those of the numbers themselves. Sums are f32 either way; products of shorter types are
/// exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// As close as f32 can tell.
    #[default]
    Highest,
    /// Numbers may lose bits before they are multiplied where that is faster: 16 are left of them as sums of two bf16 by AMX, 11
    /// as TF32 on GPUs.
    High,
}

/// `out (m, n) = left (m, k) * right (k, n) + added`, accumulated in f32 and rounded once; matrices are row-major.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows of left and out.
    pub(super) m: usize,
    /// Columns of right and out.
    pub(super) n: usize,
    /// Columns of left, rows of right.
    pub(super) k: usize,
    /// The type of left and right.
    pub(super) inputs: DType,
    /// The type of added and out.
    pub(super) output: DType,
    /// Where left is, and whether memory holds its transpose.
    pub(super) left: (u64, bool),
    /// Where right is, and whether memory holds its transpose.
    pub(super) right: (u64, bool),
    /// Where added is; it may be out itself.
    pub(super) added: Option<u64>,
    /// Where out is.
    pub(super) out: u64,
    /// Of inputs of f32.
    pub(super) precision: MatmulPrecision,
    /// Which of the ways of [`Queue::ways`](super::Queue::ways) is taken.
    pub(super) way: usize,
    place: Place,
    _memory: PhantomData<&'a ()>,
}

impl<'a> Product<'a> {
    /// A product of left (m, k) and right (k, n), each with whether memory holds its transpose.
    ///
    /// # Panics
    /// Lengths that do not fit, or inputs of two types.
    pub fn new<L: Float, R: Float, O: Float>(
        [m, k, n]: [usize; 3],
        left: (View<'a, L>, bool),
        right: (View<'a, R>, bool),
        out: ViewMut<'a, O>,
    ) -> Self {
        assert_eq!(L::DTYPE, R::DTYPE, "the inputs of a product");
        let area =
            |rows: usize, columns: usize| rows.checked_mul(columns).expect("a matrix that memory can hold");
        assert_eq!(left.0.len(), area(m, k), "the left matrix of a product of {m} x {k} and {k} x {n}");
        assert_eq!(right.0.len(), area(k, n), "the right matrix of a product of {m} x {k} and {k} x {n}");
        assert_eq!(out.len(), area(m, n), "the result of a product of {m} x {k} and {k} x {n}");
        let inputs = together(left.0.place(), right.0.place());
        let place = inputs.and_then(|inputs| together(inputs, out.place()));
        let place = place.unwrap_or_else(|| {
            let (a, b, c) = (left.0.place(), right.0.place(), out.place());
            panic!("a product of matrices in {a:?} and {b:?} into {c:?}")
        });
        Product {
            m,
            n,
            k,
            inputs: L::DTYPE,
            output: O::DTYPE,
            left: (address(left.0), left.1),
            right: (address(right.0), right.1),
            added: None,
            out: address(out.as_view()),
            precision: MatmulPrecision::Highest,
            way: 0,
            place,
            _memory: PhantomData,
        }
    }

    /// Adds what the result holds.
    pub fn plus_old(self) -> Self {
        Product { added: Some(self.out), ..self }
    }

    /// Adds another matrix of the result's shape.
    ///
    /// # Panics
    /// Another length or type, or memory that is not reached from where the product is.
    pub fn plus<E: Element>(self, other: View<'a, E>) -> Self {
        assert!(other.len() == self.m * self.n && E::DTYPE == self.output, "an addend of the result's shape");
        let place = together(self.place, other.place());
        let place = place
            .unwrap_or_else(|| panic!("a product in {:?} plus a matrix in {:?}", self.place, other.place()));
        Product { added: Some(address(other)), place, ..self }
    }

    /// The same so closely.
    pub fn precise_to(self, precision: MatmulPrecision) -> Self {
        Product { precision, ..self }
    }

    /// The same computed in another way, perhaps to other bits: for measurements.
    pub fn by(self, way: usize) -> Self {
        Product { way, ..self }
    }

    /// The same product of other memory, all of which `place` reaches: `to` says where a matrix has gone.
    ///
    /// # Safety
    /// Matrices as large are there, as the product's lifetime says.
    pub unsafe fn moved(&self, to: impl Fn(u64) -> u64, place: Place) -> Self {
        let ((left, right), added) = ((self.left, self.right), self.added.map(&to));
        Product {
            left: (to(left.0), left.1),
            right: (to(right.0), right.1),
            added,
            out: to(self.out),
            place,
            ..*self
        }
    }

    /// The matrices that it touches: left, right, the result, and what is added, if anything is.
    pub fn ranges(&self) -> impl Iterator<Item = Range> + use<> {
        let range = |start, elements: usize, dtype: DType, writable| Range {
            start,
            bytes: (elements * dtype.size()) as u64,
            writable,
            reaches: 0,
        };
        let left = range(self.left.0, self.m * self.k, self.inputs, 0);
        let right = range(self.right.0, self.k * self.n, self.inputs, 0);
        let out = range(self.out, self.m * self.n, self.output, 1);
        [left, right, out].into_iter().chain(self.added.map(|start| Range { start, writable: 0, ..out }))
    }

    /// From where all of its matrices are reached.
    pub fn place(&self) -> Place {
        self.place
    }
}

/// # Panics
/// Products on a device in `place` cannot work in this memory: it is elsewhere, or shorter than [`PRODUCT_WORKSPACE`].
pub(super) fn check_workspace(workspace: &Memory, place: Place) {
    let (bytes, found) = (workspace.bytes(), workspace.place());
    assert!(
        bytes >= PRODUCT_WORKSPACE && found == place,
        "{bytes} bytes in {found:?} for products to work in, which need {PRODUCT_WORKSPACE} in {place:?}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// What it says as it panics.
    fn refusal<R>(work: impl FnOnce() -> R) -> String {
        let panicked = catch_unwind(AssertUnwindSafe(work)).err().expect("a refusal");
        *panicked.downcast::<String>().expect("a panic with numbers")
    }

    #[test]
    fn an_addend_lies_where_the_product_is_reached_from() {
        let (mut data, other) = ([0f32; 4], [0f32; 4]);
        // SAFETY: never multiplied.
        let view = |place| unsafe { View::from_raw(other.as_ptr(), other.len(), place) };
        let start = data.as_mut_ptr();
        let product = |place| {
            let operand = (view(place), false);
            // SAFETY: as above.
            let out = unsafe { ViewMut::from_raw(start, 4, place) };
            Product::new([2; 3], operand, operand, out)
        };
        let (gpu, pinned) = (Place::Device(0), Place::Pinned);
        assert_eq!(product(gpu).plus(view(pinned)).place(), gpu);
        assert_eq!(product(pinned).plus(view(gpu)).place(), gpu);
        let said = refusal(|| product(gpu).plus(view(Place::Host)));
        assert_eq!(said, "a product in Device(0) plus a matrix in Host");
        refusal(|| product(gpu).plus(view(Place::Device(1))));
    }

    #[test]
    fn products_are_lent_as_much_as_they_need_and_where_they_are() {
        let lent = |bytes| Memory::host(bytes);
        check_workspace(&lent(PRODUCT_WORKSPACE), Place::Host);
        let said = refusal(|| check_workspace(&lent(PRODUCT_WORKSPACE - 1), Place::Host));
        assert!(
            said.starts_with("33554431 bytes in Host") && said.ends_with("need 33554432 in Host"),
            "{said}"
        );
        let said = refusal(|| check_workspace(&lent(PRODUCT_WORKSPACE), Place::Device(0)));
        assert!(said.ends_with("need 33554432 in Device(0)"), "{said}");
    }
}
