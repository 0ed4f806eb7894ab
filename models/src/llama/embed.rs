//! Unit 0: one row of the table for each token.

use super::Llama;
use crate::ops::Ops;
use crate::unit::{Gradients, Weights};
use collectives::Float;

impl<T: Float, O: Ops<T>> Llama<T, O> {
    /// stream (n, H) = table at tokens
    pub(super) fn embed(&mut self, weights: &dyn Weights<T>) {
        let (n, h) = (self.now.n, self.shape.hidden);
        let out = self.state.streams[0].view_mut().slice(0..n * h);
        self.ops.embed(self.state.tokens.view().slice(0..n), weights.tensor(0, 0), out);
    }

    /// d_table (V, H): overwritten, or `+=` when the tied head has contributed before.
    pub(super) fn embed_backward(&mut self, gradients: &mut dyn Gradients<T>) {
        let (n, h) = (self.now.n, self.shape.hidden);
        let (order, d) = (self.state.order.view().slice(0..n), self.state.d_stream.view().slice(0..n * h));
        self.ops.embed_backward(order, d, gradients.tensor(0, 0), self.config.tied);
        gradients.ready(0, 0);
    }
}
