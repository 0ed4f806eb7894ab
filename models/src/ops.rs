//! The kernels that a model is made of: what a device has to provide.
//!
//! Memory arrives as views, which on a device are addresses. Shapes: n tokens of the micro-batch, H hidden,
//! F feed-forward, V vocabulary, Q = heads * width, KV = kv_heads * width; all matrices row-major. Every method
//! overwrites (`=`) what it calls `out`, unless it says that it adds. Results are the same bits run to run and
//! for any number of threads.

use crate::team::Team;
use collectives::device::MatmulPrecision;
use collectives::{Element, Float, View, ViewMut};

/// A row-major matrix, or the transpose of one.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T: Element> {
    /// The elements in memory.
    pub data: View<'a, T>,
    /// Rows of the matrix that is meant (after the transposition).
    pub rows: usize,
    /// Columns of the matrix that is meant.
    pub columns: usize,
    /// Whether memory holds the transpose.
    pub transposed: bool,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// The matrix (rows, columns) that lies in the first elements of `data`.
    pub fn new(data: impl Into<View<'a, T>>, rows: usize, columns: usize) -> Self {
        Matrix { data: data.into().slice(0..rows * columns), rows, columns, transposed: false }
    }

    /// The transpose of the same memory.
    pub fn t(self) -> Self {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// What is added to a product before the one rounding.
#[derive(Clone, Copy)]
pub enum Plus<'a, T: Element> {
    /// Nothing.
    Nothing,
    /// What the result holds: `+=`.
    Old,
    /// Another matrix of the result's shape: a residual.
    Other(View<'a, T>),
}

/// The shape of causal self-attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub rows: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head h reads number `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub width: usize,
}

/// What a norm was of.
#[derive(Clone, Copy)]
pub struct Normed<'a, T: Element> {
    /// Its input.
    pub x: View<'a, T>,
    /// Its weight.
    pub weight: View<'a, T>,
    /// Added to the mean square.
    pub eps: f32,
}

/// In the place of a token whose lookups teach its row of the embedding nothing; larger than any token.
pub const NO_ROW: u32 = u32::MAX;

/// Which way a rotary embedding turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Forward.
    Forward,
    /// Backward: by the negative angle.
    Back,
}

/// Kernels over elements stored as `T` and computed as f32.
pub trait Ops<T: Float>: Send {
    /// How the elements are stored that live only within a unit's forward or backward.
    type Work: Float;

    /// The threads that compute.
    fn team(&self) -> Team {
        Team::default()
    }

    /// The most sequences of a batch.
    fn most_rows(&self) -> usize {
        usize::MAX
    }

    /// Fails once anything has that was asked for: nothing that has come of it is true then, and nothing more is done.
    ///
    /// # Errors
    /// What a device has refused.
    fn check(&self) -> collectives::Result<()> {
        Ok(())
    }

    /// How close products of f32 are from here on.
    fn precise_to(&mut self, precision: MatmulPrecision);

    /// Copies from the host.
    fn upload<E: Element>(&mut self, from: &[E], to: ViewMut<'_, E>);

    /// Copies to memory of the host, which is there after [`finish`](Self::finish) and stays until then.
    fn fetch<E: Element>(&mut self, from: View<'_, E>, to: ViewMut<'_, E>);

    /// Returns when what was fetched last is there; what was asked for later may go on.
    fn finish(&mut self);

    /// Copies to the host, after everything before is done.
    fn download<E: Element>(&mut self, from: View<'_, E>, to: &mut [E]);

    /// `out (m, n) = left (m, k) * right (k, n) + plus`, accumulated in f32 and rounded once to `O`.
    /// Every matrix is of `T` or of `Work`.
    fn product<L: Float, R: Float, O: Float>(
        &mut self,
        out: ViewMut<'_, O>,
        plus: Plus<'_, O>,
        left: Matrix<'_, L>,
        right: Matrix<'_, R>,
    );

    /// Rows of `table` (V, H) at `tokens` (n): `out` (n, H).
    fn embed(&mut self, tokens: View<'_, u32>, table: View<'_, T>, out: ViewMut<'_, T>);

    /// Sums the rows of `d_out` (n, H) by token into `d_table` (V, H): overwritten whole, or added to if `add`.
    /// `order` (n) holds `token << 32 | position`, ascending; what is `NO_ROW`'s teaches none.
    fn embed_backward(
        &mut self,
        order: View<'_, u64>,
        d_out: View<'_, Self::Work>,
        d_table: ViewMut<'_, T>,
        add: bool,
    );

    /// RMSNorm: `out = x / sqrt(mean(x^2) + eps) * weight`, over rows of `weight`'s length.
    fn norm(&mut self, x: View<'_, T>, weight: View<'_, T>, eps: f32, out: ViewMut<'_, Self::Work>);

    /// Backward of `norm` of `normed`: `d_x` is overwritten, or added to if `add`; `d_weight` is overwritten.
    fn norm_backward(
        &mut self,
        normed: Normed<'_, T>,
        d_out: View<'_, Self::Work>,
        d_x: ViewMut<'_, Self::Work>,
        add: bool,
        d_weight: ViewMut<'_, T>,
    );

    /// Turns each head of `x` (rows * length, heads * width) in place, pairing i with i + width/2 as Hugging
    /// Face does. `angles` (length or more, width) holds the cosines of the width/2 pairs, then their sines.
    fn rope<E: Float>(
        &mut self,
        x: ViewMut<'_, E>,
        angles: View<'_, f32>,
        heads: usize,
        width: usize,
        length: usize,
        turn: Turn,
    );

    /// Causal softmax attention: `q` and `out` (n, Q), `k` and `v` (n, KV); `log_sums` (rows, heads, length) gets
    /// the logarithm of each softmax's denominator. Memory grows linearly with the sequence.
    fn attention(
        &mut self,
        shape: AttentionShape,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        out: ViewMut<'_, T>,
        log_sums: ViewMut<'_, f32>,
    );

    /// Backward of `attention`; the probabilities are computed again.
    fn attention_backward(&mut self, shape: AttentionShape, a: AttentionBackward<'_, T, Self::Work>);

    /// `out = gate * sigmoid(gate) * up`.
    fn swiglu(&mut self, gate: View<'_, T>, up: View<'_, T>, out: ViewMut<'_, Self::Work>);

    /// Backward of `swiglu`, in place: `gate` and `up` become their gradients, and `d_out` becomes `out`, which
    /// the gradient of the next matrix needs.
    fn swiglu_backward(&mut self, gate: ViewMut<'_, T>, up: ViewMut<'_, T>, d_out: ViewMut<'_, Self::Work>);

    /// Cross-entropy of each row of `logits` (targets, V), which are lost: `losses` gets one value a row.
    fn losses(&mut self, logits: ViewMut<'_, Self::Work>, targets: View<'_, u32>, losses: ViewMut<'_, f32>);

    /// The same, and the gradient of the sum of the losses times `scale` (targets, V): in the first elements of `room`, or
    /// in the place of the logits, as on devices and of f32 on a CPU, where `room` may be empty.
    fn cross_entropy<'a>(
        &mut self,
        logits: ViewMut<'a, Self::Work>,
        targets: View<'_, u32>,
        losses: ViewMut<'_, f32>,
        room: ViewMut<'a, T>,
        scale: f32,
    ) -> View<'a, T>;
}

/// What the backward of attention reads and writes; shapes as in [`Ops::attention`].
pub struct AttentionBackward<'a, T: Element, W: Element> {
    /// Queries.
    pub q: View<'a, T>,
    /// Keys.
    pub k: View<'a, T>,
    /// Values.
    pub v: View<'a, T>,
    /// The result of the forward.
    pub out: View<'a, T>,
    /// Its logarithms of denominators.
    pub log_sums: View<'a, f32>,
    /// The gradient of `out`.
    pub d_out: View<'a, W>,
    /// Gets the gradient of `q`.
    pub d_q: ViewMut<'a, W>,
    /// Gets the gradient of `k`.
    pub d_k: ViewMut<'a, W>,
    /// Gets the gradient of `v`.
    pub d_v: ViewMut<'a, W>,
}
