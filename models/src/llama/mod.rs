//! A Llama: embedding, blocks and head, each with its forward above its backward.
//!
//! Shapes in comments: n tokens of the micro-batch, H hidden, Q = heads * width, KV = kv_heads * width, F
//! feed-forward, V vocabulary. Gradients of activations and of weights overwrite (`=`) unless a line says `+=`.

mod block;
mod device;
mod embed;
mod head;
mod memory;
mod rope;
#[cfg(test)]
mod tests;

pub(crate) use device::{ROWS, chunk};
pub use device::{check_on_device, device_footprint, device_modules};
pub use memory::{Accounts, Footprint, Recompute};
pub(crate) use rope::{LARGEST_ANGLE, fastest};

use crate::config::LlamaConfig;
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::ops::{AttentionShape, NO_ROW, Ops};
use crate::unit::{Batch, Gradients, Model, Unit, Weights};
use collectives::device::MatmulPrecision;
use collectives::{DType, Float, bf16, f16};
use memory::{Allocator, Shape, State};

/// A Llama whose elements are stored as `T` and computed as f32 by the kernels `O`.
pub struct Llama<T: Float, O: Ops<T> = Cpu> {
    config: LlamaConfig,
    shape: Shape,
    units: Vec<Unit>,
    state: State<T, O::Work>,
    ops: O,
    now: Now,
}

/// What a model on the CPU holds.
type CpuState<T> = State<T, <Cpu as Ops<T>>::Work>;

/// The micro-batch at hand.
#[derive(Clone, Copy, Default)]
struct Now {
    rows: usize,
    length: usize,
    /// rows * length
    n: usize,
    /// What each token's loss gradient is multiplied by.
    scale: f32,
    /// The block whose activations the shared state holds, when there is only one.
    held: Option<usize>,
}

impl<T: Float> Llama<T> {
    /// A model on the CPU for micro-batches of up to `rows` sequences of up to `length` tokens. All memory is
    /// taken now and booked on `accounts`; with one thread, nothing is allocated afterwards. `threads` changes
    /// speed, never results.
    ///
    /// # Errors
    /// A configuration or micro-batch that cannot be, threads that cannot be started, or too little memory, with what
    /// would be needed.
    pub fn new(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        threads: usize,
        accounts: &Accounts,
    ) -> Result<Self> {
        let shape = Llama::<T>::shape(config, rows, length, recompute, threads)?;
        let mut allocator = Allocator::booking(accounts);
        let state = CpuState::new(&shape, &mut allocator);
        let memory = memory::cpu_memory(&shape, &mut allocator);
        allocator.finish(&shape)?;
        let ops = Cpu::new(&shape.cpu(), memory)?;
        Ok(Llama::with(config, shape, state, ops))
    }

    /// That of a model on the CPU, whose logits are f32: their gradient has another place only where it is not.
    fn shape(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        threads: usize,
    ) -> Result<Shape> {
        let in_place = T::DTYPE == DType::F32;
        Ok(Shape { in_place, ..Shape::new(config, rows, length, recompute, threads)? })
    }

    fn footprint(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        threads: usize,
    ) -> Result<Footprint> {
        let shape = Llama::<T>::shape(config, rows, length, recompute, threads)?;
        let mut allocator = Allocator::planning();
        let _ = (CpuState::<T>::new(&shape, &mut allocator), memory::cpu_memory(&shape, &mut allocator));
        Ok(allocator.counted())
    }
}

impl<T: Float, O: Ops<T>> Llama<T, O> {
    fn with(config: &LlamaConfig, shape: Shape, mut state: State<T, O::Work>, mut ops: O) -> Self {
        let mut angles = vec![0.0; shape.length * shape.width];
        rope::angles(&config.rope, shape.length, shape.width, &mut angles);
        ops.upload(&angles, state.angles.view_mut());
        Llama { config: config.clone(), units: config.units(), shape, state, ops, now: Now::default() }
    }

    /// The same model on other kernels made from its own, such as ones that measure them.
    ///
    /// # Safety
    /// The new ones give the model's own nothing but what the model has given them, as those of a device
    /// ([`Cuda`](crate::cuda::Cuda)) rely on.
    pub unsafe fn with_ops<P: Ops<T, Work = O::Work>>(self, make: impl FnOnce(O) -> P) -> Llama<T, P> {
        let Llama { config, shape, units, state, ops, now } = self;
        Llama { config, shape, units, state, ops: make(ops), now }
    }

    /// The same model, whose products of f32 are so close: by default as close as f32 can tell.
    pub fn precise_to(mut self, precision: MatmulPrecision) -> Self {
        self.ops.precise_to(precision);
        self
    }

    fn head(&self) -> usize {
        self.shape.layers + 1
    }

    fn attention_shape(&self) -> AttentionShape {
        let Shape { heads, kv_heads, width, .. } = self.shape;
        AttentionShape { rows: self.now.rows, length: self.now.length, heads, kv_heads, width }
    }
}

impl<T: Float, O: Ops<T>> Model<T> for Llama<T, O> {
    fn units(&self) -> &[Unit] {
        &self.units
    }

    /// # Panics
    /// The micro-batch is empty or larger than the model was built for, or a token or target is outside the
    /// vocabulary: whoever makes batches has to check that.
    fn begin(&mut self, batch: &Batch<'_>, gradient_scale: f32) {
        let Batch { tokens, targets, rows, length } = *batch;
        let n = rows.checked_mul(length).unwrap_or(0);
        assert!(n > 0 && tokens.len() == n && targets.len() == n, "a batch of {rows} x {length} tokens");
        assert!(
            length <= self.shape.length && n <= self.shape.tokens && rows <= self.ops.most_rows(),
            "a batch of {rows} x {length} tokens in a model built for {} x {}",
            self.shape.rows,
            self.shape.length
        );
        let vocab = self.shape.vocab;
        let outside = tokens.iter().chain(targets).find(|&&t| t as usize >= vocab);
        assert!(outside.is_none(), "token {outside:?} of a vocabulary of {vocab}");
        self.now = Now { rows, length, n, scale: gradient_scale, held: None };
        let (state, ops) = (&mut self.state, &mut self.ops);
        ops.upload(tokens, state.tokens.view_mut().slice(0..n));
        ops.upload(targets, state.targets.view_mut().slice(0..n));
        if !self.shape.has_backward() {
            return;
        }
        let order = &mut state.host_order.host_mut()[..n];
        for (position, (entry, &token)) in order.iter_mut().zip(tokens).enumerate() {
            let row = if self.config.padding == Some(token) { NO_ROW } else { token };
            *entry = u64::from(row) << 32 | position as u64;
        }
        order.sort_unstable();
        ops.upload(order, state.order.view_mut().slice(0..n));
    }

    fn forward_unit(&mut self, unit: usize, weights: &dyn Weights<T>) {
        self.ops.team().install(|| match unit {
            0 => self.embed(weights),
            u if u == self.head() => self.evaluate(weights),
            u => self.block(u - 1, weights),
        });
    }

    /// # Panics
    /// The model was made without a backward.
    fn backward_unit(&mut self, unit: usize, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>) {
        assert!(self.shape.has_backward(), "the backward of a model without one");
        self.ops.team().install(|| match unit {
            0 => self.embed_backward(gradients),
            u if u == self.head() => self.head_backward(weights, gradients),
            u => self.block_backward(u - 1, weights, gradients),
        });
    }

    fn losses(&mut self) -> &[f32] {
        self.fetched_losses()
    }

    fn check(&self) -> collectives::Result<()> {
        self.ops.check()
    }

    fn install(&self, work: &mut (dyn FnMut() + Send)) {
        self.ops.team().install(work);
    }

    /// # Panics
    /// `position` is outside the micro-batch, or `out` is not as long as the vocabulary.
    fn logits(&mut self, position: usize, weights: &dyn Weights<T>, out: &mut [f32]) {
        assert!(position < self.now.n, "position {position} of {} tokens", self.now.n);
        assert_eq!(out.len(), self.shape.vocab, "one logit for each token of the vocabulary");
        self.logits_at(position, weights, out);
    }
}

/// Where crates share generic code, as in the tests' profile, what these need is compiled here, and not in every program that
/// has a model.
#[cfg(debug_assertions)]
#[used]
static COMPILED: (Seen<f32>, Seen<bf16>, Seen<f16>) = (|model| model, |model| model, |model| model);
#[cfg(debug_assertions)]
type Seen<T> = fn(&Llama<T>) -> &dyn Model<T>;

/// What [`Llama::new`] would hold, in bytes, without taking it.
///
/// # Errors
/// As [`Llama::new`], except for threads and memory, or a type that no model computes with.
pub fn footprint(
    config: &LlamaConfig,
    rows: usize,
    length: usize,
    dtype: DType,
    recompute: Recompute,
    threads: usize,
) -> Result<Footprint> {
    match dtype {
        DType::F32 => Llama::<f32>::footprint(config, rows, length, recompute, threads),
        DType::Bf16 => Llama::<bf16>::footprint(config, rows, length, recompute, threads),
        DType::F16 => Llama::<f16>::footprint(config, rows, length, recompute, threads),
        other => Err(Error::no_model_of(other)),
    }
}
