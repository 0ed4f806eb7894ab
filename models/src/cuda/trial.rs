//! Attention with all the memory that it works on: for checks and timings.

use super::{TensorCores, attention, attention_backward};
use crate::ops::{AttentionBackward, AttentionShape};
use collectives::device::Launch;
use collectives::{Buffer, Float};

/// Inputs and results of attention and its backward. Shapes as in [`Ops`](crate::Ops).
pub(super) struct AttentionTrial<T: Float> {
    pub shape: AttentionShape,
    pub q: Buffer<T>,
    pub k: Buffer<T>,
    pub v: Buffer<T>,
    pub d_out: Buffer<T>,
    pub out: Buffer<T>,
    pub log_sums: Buffer<f32>,
    pub delta: Buffer<f32>,
    pub d_q: Buffer<T>,
    pub d_k: Buffer<T>,
    pub d_v: Buffer<T>,
}

impl<T: Float> AttentionTrial<T> {
    /// Elements of the queries and all that is shaped like them, and of the keys.
    pub fn lengths(shape: AttentionShape) -> (usize, usize) {
        let AttentionShape { rows, length, heads, kv_heads, width } = shape;
        (rows * length * heads * width, rows * length * kv_heads * width)
    }

    /// Elements of the logarithms of sums, and of delta.
    pub fn sums(shape: AttentionShape) -> usize {
        shape.rows * shape.length * shape.heads
    }

    pub fn forward(&mut self, by: TensorCores) -> Launch<'_> {
        let (out, log_sums) = (self.out.view_mut(), self.log_sums.view_mut());
        attention(by, self.shape, self.q.view(), self.k.view(), self.v.view(), out, log_sums)
    }

    /// Gives the launches of the backward to `run`, in their order.
    pub fn backward<R>(&mut self, by: TensorCores, run: impl FnOnce([Launch<'_>; 3]) -> R) -> R {
        let a = AttentionBackward {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            out: self.out.view(),
            log_sums: self.log_sums.view(),
            d_out: self.d_out.view(),
            d_q: self.d_q.view_mut(),
            d_k: self.d_k.view_mut(),
            d_v: self.d_v.view_mut(),
        };
        run(attention_backward(by, self.shape, a, &mut self.delta.view_mut()))
    }
}
