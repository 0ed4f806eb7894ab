//! A Llama on a device.

use super::Llama;
use super::memory::{Accounts, Allocator, Footprint, Recompute, Shape, State};
use crate::config::LlamaConfig;
use crate::cuda::{Cuda, CudaShape};
use crate::error::{Error, Result};
use collectives::device::Queue;
use collectives::{Buffer, Float};

impl Shape {
    fn cuda(&self) -> CudaShape {
        CudaShape { tokens: self.tokens, heads: self.heads, hidden: self.hidden, width: self.width }
    }
}

/// The workspace of the kernels: attention's delta, and the norms' partial sums.
fn workspace(shape: &CudaShape, allocator: &mut Allocator<'_>) -> (Buffer<f32>, Buffer<f32>) {
    (allocator.workspace(shape.delta()), allocator.workspace(shape.partials()))
}

impl<T: Float, Q: Queue> Llama<T, Cuda<Q>> {
    /// A model on the device of `queue` for micro-batches of up to `rows` sequences of up to `length` tokens. All
    /// memory is taken now and booked on `accounts`, kernels are compiled or loaded from where they were kept.
    ///
    /// # Errors
    /// A configuration or micro-batch that cannot be, something of CUDA that is missing, or too little memory, with
    /// what would be needed.
    pub fn on_device(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        mut queue: Q,
        accounts: &Accounts,
    ) -> Result<Self> {
        let shape = Shape::new(config, rows, length, recompute, 1)?;
        let cuda = shape.cuda();
        let mut take = |bytes, host| if host { queue.host_memory(bytes) } else { queue.memory(bytes) };
        let mut allocator = Allocator::on_device(accounts, &mut take);
        let state = State::new(&shape, &mut allocator);
        let (delta, partials) = workspace(&cuda, &mut allocator);
        if let Some(refused) = allocator.refused() {
            let Footprint { activations, workspace } =
                Self::device_footprint(config, rows, length, recompute)?;
            return Err(Error::config(format!(
                "{refused}; activations need {activations} bytes and workspace {workspace}, besides weights and \
                 gradients: a smaller micro-batch or recomputing activations needs less"
            )));
        }
        let ops = Cuda::new::<T>(queue, cuda, delta, partials)?;
        Ok(Llama::with(config, shape, state, ops))
    }

    /// What [`on_device`](Self::on_device) would hold, in bytes, without taking it.
    ///
    /// # Errors
    /// A configuration or micro-batch that cannot be.
    pub fn device_footprint(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
    ) -> Result<Footprint> {
        let shape = Shape::new(config, rows, length, recompute, 1)?;
        let mut allocator = Allocator::planning();
        let _ = (State::<T>::new(&shape, &mut allocator), workspace(&shape.cuda(), &mut allocator));
        Ok(allocator.counted())
    }
}
