//! RMSNorm, rotary embedding and SwiGLU over rows, forward above backward.

use super::math::{LANES, dot, exp, tree};
use crate::ops::Turn;
use collectives::Float;

collectives::simd_dispatch! {
    /// RMSNorm of each row of `x`.
    pub(super) fn norm<T: Float>(x: &[T], weight: &[T], eps: f32, out: &mut [f32]) = norm_body;

    /// Its backward over some rows: `d_x` is overwritten or added to, `d_weight` is added to.
    pub(super) fn norm_backward<T: Float>(
        x: &[T],
        weight: &[T],
        eps: f32,
        d_out: &[f32],
        d_x: &mut [f32],
        add: bool,
        d_weight: &mut [f32],
    ) = norm_backward_body;

    /// Adds up rows of partial sums, in order.
    pub(super) fn add_rows<T: Float>(partial: &[f32], sum: &mut [f32], out: &mut [T]) = add_rows_body;

    /// Turns the heads of rows at positions `first`, `first + 1` and so on, modulo `length`.
    pub(super) fn rope<T: Float>(
        x: &mut [T],
        row: usize,
        angles: &[f32],
        width: usize,
        first: usize,
        turn: Turn,
    ) = rope_body;

    /// `gate * sigmoid(gate) * up`.
    pub(super) fn swiglu<T: Float>(gate: &[T], up: &[T], out: &mut [f32]) = swiglu_body;

    /// The gradients of gate and up, in place; `d_out` becomes the forward's result.
    pub(super) fn swiglu_backward<T: Float>(gate: &mut [T], up: &mut [T], d_out: &mut [f32]) =
        swiglu_backward_body;
}

/// One over the root of the mean square.
#[inline(always)]
fn inverse_root<T: Float>(x: &[T], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn norm_body<T: Float>(x: &[T], weight: &[T], eps: f32, out: &mut [f32]) {
    let h = weight.len();
    for (x, out) in x.chunks_exact(h).zip(out.chunks_exact_mut(h)) {
        let scale = inverse_root(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x.to_f32() * scale * w.to_f32();
        }
    }
}

/// With s = 1 / rms(x) and g = d_out * weight: d_x = g s - x s^3 mean(g x), d_weight = d_out x s.
#[inline(always)]
fn norm_backward_body<T: Float>(
    x: &[T],
    weight: &[T],
    eps: f32,
    d_out: &[f32],
    d_x: &mut [f32],
    add: bool,
    d_weight: &mut [f32],
) {
    let h = weight.len();
    let rows = x.chunks_exact(h).zip(d_out.chunks_exact(h)).zip(d_x.chunks_exact_mut(h));
    for ((x, d_out), d_x) in rows {
        let scale = inverse_root(x, eps);
        let mean = weighted_dot(x, d_out, weight) / h as f32;
        let pull = scale * scale * scale * mean;
        let d_norm = d_weight.iter_mut().zip(weight);
        for (((d_weight, w), d_x), (x, d)) in d_norm.zip(d_x).zip(x.iter().zip(d_out)) {
            let x = x.to_f32();
            *d_weight += d * x * scale;
            let own = d * w.to_f32() * scale - x * pull;
            *d_x = if add { *d_x + own } else { own };
        }
    }
}

/// The sum of a * b * c.
#[inline(always)]
fn weighted_dot<T: Float>(a: &[T], b: &[f32], c: &[T]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let (c_chunks, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a_chunks.iter().zip(b_chunks).zip(c_chunks) {
        for l in 0..LANES {
            lanes[l] += a[l].to_f32() * b[l] * c[l].to_f32();
        }
    }
    for (lane, ((a, b), c)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest).zip(c_rest)) {
        *lane += a.to_f32() * b * c.to_f32();
    }
    tree(lanes)
}

#[inline(always)]
fn add_rows_body<T: Float>(partial: &[f32], sum: &mut [f32], out: &mut [T]) {
    sum.fill(0.0);
    for row in partial.chunks_exact(out.len()) {
        for (sum, x) in sum.iter_mut().zip(row) {
            *sum += x;
        }
    }
    for (out, sum) in out.iter_mut().zip(sum) {
        *out = T::from_f32(*sum);
    }
}

#[inline(always)]
fn rope_body<T: Float>(x: &mut [T], row: usize, angles: &[f32], width: usize, first: usize, turn: Turn) {
    let half = width / 2;
    let sign = if turn == Turn::Back { -1.0 } else { 1.0 };
    let mut positions = angles.chunks_exact(width).cycle().skip(first);
    for row in x.chunks_exact_mut(row) {
        let Some(angles) = positions.next() else { return };
        let (cos, sin) = angles.split_at(half);
        for head in row.chunks_exact_mut(width) {
            let (low, high) = head.split_at_mut(half);
            for ((low, high), (c, s)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
                let (a, b, s) = (low.to_f32(), high.to_f32(), s * sign);
                *low = T::from_f32(a * c - b * s);
                *high = T::from_f32(b * c + a * s);
            }
        }
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
fn swiglu_body<T: Float>(gate: &[T], up: &[T], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let g = gate.to_f32();
        *out = g * sigmoid(g) * up.to_f32();
    }
}

#[inline(always)]
fn swiglu_backward_body<T: Float>(gate: &mut [T], up: &mut [T], d_out: &mut [f32]) {
    // A processor works ahead only so many instructions. With the sigmoids alone, which each wait longest for their parts,
    // it has several vectors of them under way; with the rest between them hardly two.
    const AHEAD: usize = 128;
    let chunks = gate.chunks_mut(AHEAD).zip(up.chunks_mut(AHEAD)).zip(d_out.chunks_mut(AHEAD));
    for ((gate, up), d_out) in chunks {
        let mut sigmoids = [0.0; AHEAD];
        for (s, gate) in sigmoids.iter_mut().zip(gate.iter()) {
            *s = sigmoid(gate.to_f32());
        }
        for (((gate, up), d_out), s) in gate.iter_mut().zip(up).zip(d_out).zip(&sigmoids) {
            let (g, u, d) = (gate.to_f32(), up.to_f32(), *d_out);
            let silu = g * s;
            *gate = T::from_f32(d * u * s * (1.0 + g * (1.0 - s)));
            *up = T::from_f32(d * silu);
            *d_out = silu * u;
        }
    }
}
