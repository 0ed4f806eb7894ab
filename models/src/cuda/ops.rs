//! [`Ops`] on a queue of a device.

use super::attention::TensorCores;
use super::{attention, elementwise, embed, loss, sources};
use crate::error::{Error, Result};
use crate::llama::ROWS;
use crate::ops::{AttentionBackward, AttentionShape, Matrix, Normed, Ops, Plus, Turn};
use collectives::device::{Launch, MatmulPrecision, Module, Product, Queue};
use collectives::{Buffer, DType, Element, Float, View, ViewMut, bytes_of, bytes_of_mut};

/// The kernels of a model on a queue: a GPU's stream, or the emulation.
///
/// Calls return as soon as their work is queued. Once a device has refused any (its memory is damaged, its driver is gone)
/// they do nothing more, and [`check`](Ops::check) says what was refused.
///
/// That is sound by who calls: a [`Llama`](crate::Llama), which alone makes and owns one. It gives the kernels nothing but its
/// own buffers, which it keeps as long as the queue, and weights and gradients on the device, which nobody reaches but by work
/// that is ordered with the queue's, and which are freed only once the device is done with them; and tokens that it has found
/// in the vocabulary.
pub struct Cuda<Q: Queue> {
    queue: Q,
    by: TensorCores,
    precision: MatmulPrecision,
    /// What was fetched last is there.
    fetched: Q::Event,
    /// Attention's delta (rows, heads, length).
    delta: Buffer<f32>,
    /// Partial sums of the norms' weights.
    partials: Buffer<f32>,
    /// What the device has refused first.
    failed: Option<collectives::Error>,
}

/// The lengths that the workspace follows from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaShape {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    pub heads: usize,
    pub hidden: usize,
    /// Width of a head.
    pub width: usize,
    /// Whether gradients are asked for.
    pub backward: bool,
}

impl CudaShape {
    /// Elements of attention's delta.
    pub fn delta(&self) -> usize {
        if self.backward { self.tokens * self.heads } else { 0 }
    }

    /// Elements of the norms' partial sums.
    pub fn partials(&self) -> usize {
        if self.backward { elementwise::norm_partials(self.tokens) * self.hidden } else { 0 }
    }

    /// What a model of such elements launches.
    ///
    /// # Errors
    /// A head that the kernels do not take, or those that `by` asks for.
    pub fn modules(&self, by: TensorCores, element: DType) -> Result<Vec<Module>> {
        if self.width > attention::WIDEST_HEAD {
            return Err(Error::config(format!(
                "heads of {} elements: on CUDA at most {} are possible",
                self.width,
                attention::WIDEST_HEAD
            )));
        }
        by.check(element, self.width)?;
        let plain = [&sources::ROPE, &sources::SWIGLU, &sources::EMBEDDING, &sources::CROSS_ENTROPY];
        let mut modules = plain.map(|source| Module::new(source, element)).to_vec();
        modules.push(elementwise::norm_module(element, self.hidden, self.backward));
        modules.extend(attention::modules(by, element, self.width, self.backward));
        Ok(modules)
    }
}

impl<Q: Queue> Cuda<Q> {
    /// Compiles and loads everything; `delta` and `partials` are as long as the shape says.
    ///
    /// # Errors
    /// A head that the kernels do not take, or something of CUDA is missing.
    pub(crate) fn new<T: Float>(
        mut queue: Q,
        by: TensorCores,
        shape: CudaShape,
        delta: Buffer<f32>,
        partials: Buffer<f32>,
    ) -> Result<Self> {
        let prepared = queue.prepare(&shape.modules(by, T::DTYPE)?).and_then(|()| queue.prepare_products());
        let fetched = prepared.and_then(|()| queue.event()).map_err(|e| Error::config(e.to_string()))?;
        let precision = MatmulPrecision::default();
        Ok(Cuda { queue, by, precision, fetched, delta, partials, failed: None })
    }

    fn run(&mut self, launch: Launch<'_>) {
        run(&mut self.queue, &mut self.failed, &[launch]);
    }

    /// Gives the queue something to do.
    fn give(&mut self, work: impl FnOnce(&mut Q) -> collectives::Result<()>) {
        give(&mut self.queue, &mut self.failed, work);
    }
}

/// Gives a queue something to do unless it has `failed` before.
fn give<Q>(
    queue: &mut Q,
    failed: &mut Option<collectives::Error>,
    work: impl FnOnce(&mut Q) -> collectives::Result<()>,
) {
    if failed.is_none() {
        *failed = work(queue).err();
    }
}

/// Gives a queue launches that this crate has made of what a model gives its kernels, unless it has `failed` before.
fn run<Q: Queue>(queue: &mut Q, failed: &mut Option<collectives::Error>, launches: &[Launch<'_>]) {
    for launch in launches {
        // SAFETY: whatever makes launches here makes such as the kernel takes, and has checked lengths; memory stays, and holds
        // what belongs there, as `Cuda` says.
        give(queue, failed, |queue| unsafe { queue.launch(launch) });
    }
}

/// What memory holds, and whether it is the transpose of what is meant.
fn operand<'a, T: Element>(matrix: Matrix<'a, T>) -> (View<'a, T>, bool) {
    (matrix.data, matrix.transposed)
}

impl<T: Float, Q: Queue> Ops<T> for Cuda<Q> {
    type Work = T;

    fn most_rows(&self) -> usize {
        ROWS
    }

    fn check(&self) -> collectives::Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn precise_to(&mut self, precision: MatmulPrecision) {
        self.precision = precision;
    }

    fn upload<E: Element>(&mut self, from: &[E], mut to: ViewMut<'_, E>) {
        assert_eq!(from.len(), to.len(), "as much memory as is uploaded");
        // SAFETY: the view is that long; the model keeps its buffers for as long as its queue.
        self.give(|queue| unsafe { queue.upload(bytes_of(from), to.as_mut_ptr() as u64) });
    }

    fn fetch<E: Element>(&mut self, from: View<'_, E>, mut to: ViewMut<'_, E>) {
        assert_eq!(from.len(), to.len(), "as much memory as is fetched");
        let bytes = size_of_val(to.reborrow().host());
        // SAFETY: both are that long, and the model keeps its buffers for as long as its queue.
        self.give(|queue| unsafe { queue.copy(from.as_ptr() as u64, to.as_mut_ptr() as u64, bytes) });
        let Cuda { queue, fetched, failed, .. } = self;
        give(queue, failed, |queue| queue.record(fetched));
    }

    fn finish(&mut self) {
        let Cuda { queue, fetched, failed, .. } = self;
        give(queue, failed, |_| Q::reach(fetched));
    }

    fn download<E: Element>(&mut self, from: View<'_, E>, to: &mut [E]) {
        assert_eq!(from.len(), to.len(), "as much memory as is downloaded");
        // SAFETY: the view is that long.
        self.give(|queue| unsafe { queue.download(from.as_ptr() as u64, bytes_of_mut(to)) });
    }

    fn product<L: Float, R: Float, O: Float>(
        &mut self,
        out: ViewMut<'_, O>,
        plus: Plus<'_, O>,
        left: Matrix<'_, L>,
        right: Matrix<'_, R>,
    ) {
        assert_eq!(left.columns, right.rows, "inner dimensions of a product");
        let sizes = [left.rows, left.columns, right.columns];
        let product = Product::new(sizes, operand(left), operand(right), out).precise_to(self.precision);
        let product = match plus {
            Plus::Nothing => product,
            Plus::Old => product.plus_old(),
            Plus::Other(other) => product.plus(other),
        };
        // SAFETY: lengths were checked; the matrices stay, and are apart, as `Cuda` says.
        self.give(|queue| unsafe { queue.product(&product) });
    }

    fn embed(&mut self, tokens: View<'_, u32>, table: View<'_, T>, out: ViewMut<'_, T>) {
        self.run(embed::embed(tokens, table, out));
    }

    fn embed_backward(
        &mut self,
        order: View<'_, u64>,
        d_out: View<'_, T>,
        mut d_table: ViewMut<'_, T>,
        add: bool,
    ) {
        if !add {
            let bytes = d_table.len() * size_of::<T>();
            // SAFETY: the view is that long, and zero is a number of every type.
            self.give(|queue| unsafe { queue.zero(d_table.as_mut_ptr() as u64, bytes) });
        }
        self.run(embed::embed_backward(order, d_out, d_table, add));
    }

    fn norm(&mut self, x: View<'_, T>, weight: View<'_, T>, eps: f32, out: ViewMut<'_, T>) {
        self.run(elementwise::norm(x, None, weight, eps, out));
    }

    fn norm_backward(
        &mut self,
        normed: Normed<'_, T>,
        d_out: View<'_, T>,
        d_x: ViewMut<'_, T>,
        add: bool,
        d_weight: ViewMut<'_, T>,
    ) {
        let Cuda { queue, partials, failed, .. } = self;
        let partials = &mut partials.view_mut();
        let launches = elementwise::norm_backward(normed, d_out, d_x, add, d_weight, partials);
        run(queue, failed, &launches);
    }

    fn rope<E: Float>(
        &mut self,
        x: ViewMut<'_, E>,
        angles: View<'_, f32>,
        heads: usize,
        width: usize,
        length: usize,
        turn: Turn,
    ) {
        self.run(elementwise::rope(x, angles, heads, width, length, turn));
    }

    fn attention(
        &mut self,
        shape: AttentionShape,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        out: ViewMut<'_, T>,
        log_sums: ViewMut<'_, f32>,
    ) {
        self.run(attention::attention(self.by, shape, q, k, v, out, log_sums));
    }

    fn attention_backward(&mut self, shape: AttentionShape, a: AttentionBackward<'_, T, T>) {
        let Cuda { queue, by, delta, failed, .. } = self;
        let delta = &mut delta.view_mut();
        let launches = attention::attention_backward(*by, shape, a, delta);
        run(queue, failed, &launches);
    }

    fn swiglu(&mut self, gate: View<'_, T>, up: View<'_, T>, out: ViewMut<'_, T>) {
        self.run(elementwise::swiglu(gate, up, out));
    }

    fn swiglu_backward(&mut self, gate: ViewMut<'_, T>, up: ViewMut<'_, T>, d_out: ViewMut<'_, T>) {
        self.run(elementwise::swiglu_backward(gate, up, d_out));
    }

    fn losses(&mut self, logits: ViewMut<'_, T>, targets: View<'_, u32>, losses: ViewMut<'_, f32>) {
        self.run(loss::cross_entropy(logits, targets, losses, None));
    }

    /// The gradient takes the logits' place.
    fn cross_entropy<'a>(
        &mut self,
        mut logits: ViewMut<'a, T>,
        targets: View<'_, u32>,
        losses: ViewMut<'_, f32>,
        _: ViewMut<'a, T>,
        scale: f32,
    ) -> View<'a, T> {
        self.run(loss::cross_entropy(logits.reborrow(), targets, losses, Some(scale)));
        logits.into()
    }
}
