//! The head: the final norm, logits and the loss, a chunk of tokens at a time.

use super::Llama;
use crate::ops::{Matrix, Normed, Ops, Plus};
use crate::unit::{Gradients, Weights};
use collectives::Float;
use std::ops::Range;

/// The head's own tensors; a tied head's matrix is the embedding's.
const NORM: usize = 0;
const MATRIX: usize = 1;

impl<T: Float, O: Ops<T>> Llama<T, O> {
    /// Unit and tensor of the matrix (V, H).
    fn matrix(&self) -> (usize, usize) {
        if self.config.tied { (0, 0) } else { (self.head(), MATRIX) }
    }

    /// normed (n, H)
    fn final_norm(&mut self, weights: &dyn Weights<T>, tokens: Range<usize>) {
        let (h, head) = (self.shape.hidden, self.head());
        let (part, last) = (tokens.start * h..tokens.end * h, self.shape.stream(self.shape.layers));
        let (ops, s) = (&mut self.ops, &mut self.state);
        let x = s.streams[last].view().slice(part.clone());
        let normed = s.normed.view_mut().slice(part);
        ops.norm(x, weights.tensor(head, NORM), self.config.norm_eps, normed);
    }

    /// logits (tokens, V) = normed * matrix^T
    fn chunk_logits(&mut self, weights: &dyn Weights<T>, tokens: Range<usize>) {
        let (h, v) = (self.shape.hidden, self.shape.vocab);
        let (unit, tensor) = self.matrix();
        let (ops, s) = (&mut self.ops, &mut self.state);
        let normed = s.normed.view().slice(tokens.start * h..tokens.end * h);
        let logits = s.logits.view_mut().slice(0..tokens.len() * v);
        let matrix = Matrix::new(weights.tensor(unit, tensor), v, h);
        ops.product(logits, Plus::Nothing, Matrix::new(normed, tokens.len(), h), matrix.t());
    }

    /// The ranges of tokens whose logits exist at once.
    fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<T, O> {
        let (n, chunk) = (self.now.n, self.shape.chunk);
        (0..n).step_by(chunk).map(move |start| start..n.min(start + chunk))
    }

    /// Starts to copy the token losses to the host, which goes on with what comes next.
    fn fetch_losses(&mut self) {
        let n = self.now.n;
        let host = self.state.host_losses.view_mut().slice(0..n);
        self.ops.fetch(self.state.losses.view().slice(0..n), host);
    }

    /// The token losses, once they are on the host.
    pub(super) fn fetched_losses(&mut self) -> &[f32] {
        self.ops.finish();
        &self.state.host_losses.host()[..self.now.n]
    }

    /// The losses alone.
    pub(super) fn evaluate(&mut self, weights: &dyn Weights<T>) {
        let v = self.shape.vocab;
        self.final_norm(weights, 0..self.now.n);
        for chunk in self.chunks() {
            self.chunk_logits(weights, chunk.clone());
            let (ops, s) = (&mut self.ops, &mut self.state);
            let logits = s.logits.view_mut().slice(0..chunk.len() * v);
            let losses = s.losses.view_mut().slice(chunk.clone());
            ops.losses(logits, s.targets.view().slice(chunk), losses);
        }
        self.fetch_losses();
    }

    /// Forward, losses and backward; d_stream (n, H) starts here.
    pub(super) fn head_backward(&mut self, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>) {
        let (n, h, v) = (self.now.n, self.shape.hidden, self.shape.vocab);
        let (head, scale, eps) = (self.head(), self.now.scale, self.config.norm_eps);
        let (unit, tensor) = self.matrix();
        self.final_norm(weights, 0..n);
        for chunk in self.chunks() {
            self.chunk_logits(weights, chunk.clone());
            let (ops, s) = (&mut self.ops, &mut self.state);
            let size = chunk.len();
            let logits = s.logits.view_mut().slice(0..size * v);
            let losses = s.losses.view_mut().slice(chunk.clone());
            let targets = s.targets.view().slice(chunk.clone());
            let d_logits = ops.cross_entropy(logits, targets, losses, s.d_logits.view_mut(), scale);
            // d_matrix (V, H): the first chunk overwrites, the others `+=`; d_normed (chunk, H)
            let d_logits = Matrix::new(d_logits, size, v);
            let part = chunk.start * h..chunk.end * h;
            let normed = Matrix::new(s.normed.view().slice(part.clone()), size, h);
            let plus = if chunk.start == 0 { Plus::Nothing } else { Plus::Old };
            ops.product(gradients.tensor(unit, tensor), plus, d_logits.t(), normed);
            let matrix = Matrix::new(weights.tensor(unit, tensor), v, h);
            ops.product(s.d_normed.view_mut().slice(part), Plus::Nothing, d_logits, matrix);
        }
        if !self.config.tied {
            gradients.ready(unit, tensor);
        }
        let (ops, s) = (&mut self.ops, &mut self.state);
        let x = s.streams[self.shape.layers].view().slice(0..n * h);
        let (norm, d_norm) = (weights.tensor(head, NORM), gradients.tensor(head, NORM));
        let (d_normed, d_x) = (s.d_normed.view().slice(0..n * h), s.d_stream.view_mut().slice(0..n * h));
        ops.norm_backward(Normed { x, weight: norm, eps }, d_normed, d_x, false, d_norm);
        gradients.ready(head, NORM);
        self.fetch_losses();
    }

    /// The logits of one token.
    pub(super) fn logits_at(&mut self, position: usize, weights: &dyn Weights<T>, out: &mut [f32]) {
        self.final_norm(weights, position..position + 1);
        self.chunk_logits(weights, position..position + 1);
        // In pieces, for which the stack has room.
        let mut room = [O::Work::from_f32(0.0); 4096];
        let mut start = 0;
        for part in out.chunks_mut(room.len()) {
            let logits = &mut room[..part.len()];
            self.ops.download(self.state.logits.view().slice(start..start + part.len()), logits);
            part.iter_mut().zip(&*logits).for_each(|(out, logit)| *out = logit.to_f32());
            start += part.len();
        }
    }
}
