//! A block: attention and feed-forward, each behind a norm and added to the residual stream.

use super::{Llama, Recompute};
use crate::ops::{AttentionBackward, Matrix, Normed, Ops, Plus, Turn};
use crate::unit::{Gradients, Weights};
use collectives::Float;

/// A block's tensors, in the order of [`LlamaConfig::units`](crate::LlamaConfig::units).
const INPUT_NORM: usize = 0;
const Q: usize = 1;
const K: usize = 2;
const V: usize = 3;
const O: usize = 4;
const POST_NORM: usize = 5;
const GATE: usize = 6;
const UP: usize = 7;
const DOWN: usize = 8;

impl<T: Float, Device: Ops<T>> Llama<T, Device> {
    /// The next stream = middle + down(silu(gate) * up).
    pub(super) fn block(&mut self, layer: usize, weights: &dyn Weights<T>) {
        self.attend_and_gate(layer, weights);
        let (n, h, f) = (self.now.n, self.shape.hidden, self.shape.ffn);
        let (slot, next) = (self.shape.slot(layer), self.shape.stream(layer + 1));
        let (ops, s) = (&mut self.ops, &mut self.state);
        let block = &s.blocks[slot];
        // wide (n, F) = silu(gate) * up
        let (gate, up) = (block.gate.view().slice(0..n * f), block.up.view().slice(0..n * f));
        ops.swiglu(gate, up, s.wide.view_mut().slice(0..n * f));
        // stream (n, H) = middle + wide * down^T
        let down = Matrix::new(weights.tensor(layer + 1, DOWN), h, f);
        let out = s.streams[next].view_mut().slice(0..n * h);
        let middle = Plus::Other(block.middle.view().slice(0..n * h));
        ops.product(out, middle, Matrix::new(&s.wide, n, f), down.t());
    }

    /// Everything of the forward that the backward needs.
    fn attend_and_gate(&mut self, layer: usize, weights: &dyn Weights<T>) {
        let (n, h, f) = (self.now.n, self.shape.hidden, self.shape.ffn);
        let (q, kv, heads, kv_heads) = (self.shape.q, self.shape.kv, self.shape.heads, self.shape.kv_heads);
        let (width, length, eps) = (self.shape.width, self.now.length, self.config.norm_eps);
        let (slot, stream, attention) =
            (self.shape.slot(layer), self.shape.stream(layer), self.attention_shape());
        let w = |tensor: usize, rows: usize, columns: usize| {
            Matrix::new(weights.tensor(layer + 1, tensor), rows, columns)
        };
        let (ops, s) = (&mut self.ops, &mut self.state);
        let block = &mut s.blocks[slot];
        let x = s.streams[stream].view().slice(0..n * h);
        // normed (n, H), then q (n, Q), k and v (n, KV)
        ops.norm(x, weights.tensor(layer + 1, INPUT_NORM), eps, s.normed.view_mut().slice(0..n * h));
        let normed = Matrix::new(&s.normed, n, h);
        ops.product(block.q.view_mut().slice(0..n * q), Plus::Nothing, normed, w(Q, q, h).t());
        ops.product(block.k.view_mut().slice(0..n * kv), Plus::Nothing, normed, w(K, kv, h).t());
        ops.product(block.v.view_mut().slice(0..n * kv), Plus::Nothing, normed, w(V, kv, h).t());
        let angles = s.angles.view();
        ops.rope(block.q.view_mut().slice(0..n * q), angles, heads, width, length, Turn::Forward);
        ops.rope(block.k.view_mut().slice(0..n * kv), angles, kv_heads, width, length, Turn::Forward);
        ops.attention(
            attention,
            block.q.view().slice(0..n * q),
            block.k.view().slice(0..n * kv),
            block.v.view().slice(0..n * kv),
            block.attended.view_mut().slice(0..n * q),
            block.log_sums.view_mut().slice(0..n * heads),
        );
        // middle (n, H) = stream + attended * o^T
        let attended = Matrix::new(&block.attended, n, q);
        let middle = block.middle.view_mut().slice(0..n * h);
        ops.product(middle, Plus::Other(x), attended, w(O, h, q).t());
        // normed (n, H), then gate and up (n, F)
        let middle = block.middle.view().slice(0..n * h);
        ops.norm(middle, weights.tensor(layer + 1, POST_NORM), eps, s.normed.view_mut().slice(0..n * h));
        let normed = Matrix::new(&s.normed, n, h);
        ops.product(block.gate.view_mut().slice(0..n * f), Plus::Nothing, normed, w(GATE, f, h).t());
        ops.product(block.up.view_mut().slice(0..n * f), Plus::Nothing, normed, w(UP, f, h).t());
        self.now.held = Some(layer);
    }

    /// d_stream (n, H) goes from the gradient of the block's output to that of its input.
    pub(super) fn block_backward(
        &mut self,
        layer: usize,
        weights: &dyn Weights<T>,
        gradients: &mut dyn Gradients<T>,
    ) {
        if self.shape.recompute == Recompute::Full && self.now.held != Some(layer) {
            self.attend_and_gate(layer, weights);
        }
        // Gradients replace gate and up.
        self.now.held = None;
        self.feed_backward(layer, weights, gradients);
        self.attend_backward(layer, weights, gradients);
    }

    fn feed_backward(&mut self, layer: usize, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>) {
        let (n, h, f) = (self.now.n, self.shape.hidden, self.shape.ffn);
        let (unit, slot, eps) = (layer + 1, self.shape.slot(layer), self.config.norm_eps);
        let w = |tensor: usize, rows: usize, columns: usize| {
            Matrix::new(weights.tensor(unit, tensor), rows, columns)
        };
        let (ops, s) = (&mut self.ops, &mut self.state);
        let block = &mut s.blocks[slot];
        // wide (n, F): its gradient, then itself again; gate and up become their gradients
        let d_stream = Matrix::new(&s.d_stream, n, h);
        ops.product(s.wide.view_mut().slice(0..n * f), Plus::Nothing, d_stream, w(DOWN, h, f));
        let (gate, up) = (block.gate.view_mut().slice(0..n * f), block.up.view_mut().slice(0..n * f));
        ops.swiglu_backward(gate, up, s.wide.view_mut().slice(0..n * f));
        // d_down (H, F)
        ops.product(gradients.tensor(unit, DOWN), Plus::Nothing, d_stream.t(), Matrix::new(&s.wide, n, f));
        gradients.ready(unit, DOWN);
        // d_gate and d_up (F, H)
        let norm = weights.tensor(unit, POST_NORM);
        let middle = block.middle.view().slice(0..n * h);
        ops.norm(middle, norm, eps, s.normed.view_mut().slice(0..n * h));
        let normed = Matrix::new(&s.normed, n, h);
        let (d_gate, d_up) = (Matrix::new(&block.gate, n, f), Matrix::new(&block.up, n, f));
        ops.product(gradients.tensor(unit, GATE), Plus::Nothing, d_gate.t(), normed);
        gradients.ready(unit, GATE);
        ops.product(gradients.tensor(unit, UP), Plus::Nothing, d_up.t(), normed);
        gradients.ready(unit, UP);
        // d_normed (n, H) = d_gate * gate + d_up * up; d_stream += its way through the norm
        ops.product(s.d_normed.view_mut().slice(0..n * h), Plus::Nothing, d_gate, w(GATE, f, h));
        ops.product(s.d_normed.view_mut().slice(0..n * h), Plus::Old, d_up, w(UP, f, h));
        let d_normed = s.d_normed.view().slice(0..n * h);
        let d_stream = s.d_stream.view_mut().slice(0..n * h);
        let normed = Normed { x: middle, weight: norm, eps };
        ops.norm_backward(normed, d_normed, d_stream, true, gradients.tensor(unit, POST_NORM));
        gradients.ready(unit, POST_NORM);
    }

    fn attend_backward(&mut self, layer: usize, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>) {
        let (n, h, q, kv) = (self.now.n, self.shape.hidden, self.shape.q, self.shape.kv);
        let (heads, kv_heads, width) = (self.shape.heads, self.shape.kv_heads, self.shape.width);
        let (unit, slot, eps, length) =
            (layer + 1, self.shape.slot(layer), self.config.norm_eps, self.now.length);
        let attention = self.attention_shape();
        let w = |tensor: usize, rows: usize, columns: usize| {
            Matrix::new(weights.tensor(unit, tensor), rows, columns)
        };
        let (ops, s) = (&mut self.ops, &mut self.state);
        let block = &s.blocks[slot];
        // d_o (H, Q), d_attended (n, Q)
        let d_stream = Matrix::new(&s.d_stream, n, h);
        let attended = Matrix::new(&block.attended, n, q);
        ops.product(gradients.tensor(unit, O), Plus::Nothing, d_stream.t(), attended);
        gradients.ready(unit, O);
        ops.product(s.d_attended.view_mut().slice(0..n * q), Plus::Nothing, d_stream, w(O, h, q));
        // d_q (n, Q), d_k and d_v (n, KV), before the rotary embedding
        ops.attention_backward(
            attention,
            AttentionBackward {
                q: block.q.view().slice(0..n * q),
                k: block.k.view().slice(0..n * kv),
                v: block.v.view().slice(0..n * kv),
                out: block.attended.view().slice(0..n * q),
                log_sums: block.log_sums.view().slice(0..n * heads),
                d_out: s.d_attended.view().slice(0..n * q),
                d_q: s.d_q.view_mut().slice(0..n * q),
                d_k: s.d_k.view_mut().slice(0..n * kv),
                d_v: s.d_v.view_mut().slice(0..n * kv),
            },
        );
        let angles = s.angles.view();
        ops.rope(s.d_q.view_mut().slice(0..n * q), angles, heads, width, length, Turn::Back);
        ops.rope(s.d_k.view_mut().slice(0..n * kv), angles, kv_heads, width, length, Turn::Back);
        // d_q (Q, H), d_k and d_v (KV, H) of the weights
        let norm = weights.tensor(unit, INPUT_NORM);
        let x = s.streams[layer].view().slice(0..n * h);
        ops.norm(x, norm, eps, s.normed.view_mut().slice(0..n * h));
        let normed = Matrix::new(&s.normed, n, h);
        let (d_q, d_k) = (Matrix::new(&s.d_q, n, q), Matrix::new(&s.d_k, n, kv));
        let d_v = Matrix::new(&s.d_v, n, kv);
        for (tensor, d) in [(Q, d_q), (K, d_k), (V, d_v)] {
            ops.product(gradients.tensor(unit, tensor), Plus::Nothing, d.t(), normed);
            gradients.ready(unit, tensor);
        }
        // d_normed (n, H) = d_q * q + d_k * k + d_v * v; d_stream += its way through the norm
        ops.product(s.d_normed.view_mut().slice(0..n * h), Plus::Nothing, d_q, w(Q, q, h));
        ops.product(s.d_normed.view_mut().slice(0..n * h), Plus::Old, d_k, w(K, kv, h));
        ops.product(s.d_normed.view_mut().slice(0..n * h), Plus::Old, d_v, w(V, kv, h));
        let d_normed = s.d_normed.view().slice(0..n * h);
        let d_stream = s.d_stream.view_mut().slice(0..n * h);
        let normed = Normed { x, weight: norm, eps };
        ops.norm_backward(normed, d_normed, d_stream, true, gradients.tensor(unit, INPUT_NORM));
        gradients.ready(unit, INPUT_NORM);
    }
}
