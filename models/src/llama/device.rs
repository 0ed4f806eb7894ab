//! A Llama on a device.

use super::Llama;
use super::memory::{Accounts, Allocator, CHUNKS, Footprint, Recompute, Shape, State, tokens};
use crate::config::LlamaConfig;
use crate::cuda::{Cuda, CudaShape, TensorCores};
use crate::error::{Error, Result};
use collectives::device::{Module, Queue};
use collectives::{Buffer, DType, Float, bf16, f16};

/// Logits that exist at once on a device are about this many: each chunk reads and writes the whole gradient of the head's
/// matrix. They are of the model's type, as PyTorch's are: who wants losses without that rounding evaluates in f32.
const LOGITS: usize = 512 << 20;
/// Chunks of logits are of so many tokens, or a multiple: products are cut into tiles of 128 or 256 rows, and a tile that is
/// nearly empty takes as long as a full one.
const TILE: usize = 256;

/// Sequences of a micro-batch at most: one block in a dimension of a grid that is no longer.
pub(crate) const ROWS: usize = 65_535;
/// Tokens of a sequence at most: such a dimension has a block for each eight of them, at worst.
const LONGEST: usize = 8 * ROWS;

/// Of so many tokens, those whose logits exist at once on a device.
pub(crate) fn chunk(tokens: usize, vocab: usize) -> usize {
    let pieces = tokens.div_ceil((LOGITS / vocab).max(TILE)).min(CHUNKS);
    tokens.div_ceil(pieces).next_multiple_of(TILE).min(tokens)
}

/// Whether a device's kernels take micro-batches of `rows` sequences of `length` tokens, of whatever model.
///
/// # Errors
/// None of one of both, or more than their grids can have.
pub fn check_on_device(rows: usize, length: usize) -> Result<()> {
    if rows > ROWS {
        return Err(Error::config(format!(
            "a micro-batch of {rows} sequences: on a device at most {ROWS} are possible"
        )));
    }
    if length > LONGEST {
        return Err(Error::config(format!(
            "sequences of {length} tokens: on a device at most {LONGEST} are possible"
        )));
    }
    tokens(rows, length).map(drop)
}

impl Shape {
    /// As [`Shape::new`], with the chunks of logits that suit a device.
    fn on_device(config: &LlamaConfig, rows: usize, length: usize, recompute: Recompute) -> Result<Self> {
        check_on_device(rows, length)?;
        let shape = Shape::new(config, rows, length, recompute, 1)?;
        Ok(Shape { chunk: chunk(shape.tokens, config.vocab), in_place: true, ..shape })
    }

    fn cuda(&self) -> CudaShape {
        CudaShape {
            tokens: self.tokens,
            heads: self.heads,
            hidden: self.hidden,
            width: self.width,
            backward: self.has_backward(),
        }
    }
}

/// The workspace of the kernels: attention's delta, and the norms' partial sums.
fn workspace(shape: &CudaShape, allocator: &mut Allocator<'_>) -> (Buffer<f32>, Buffer<f32>) {
    (allocator.workspace(shape.delta()), allocator.workspace(shape.partials()))
}

impl<T: Float, Q: Queue> Llama<T, Cuda<Q>> {
    /// A model on the device of `queue` for micro-batches of up to `rows` sequences of up to `length` tokens, with these
    /// kernels for attention. All memory is taken now and booked on `accounts`, kernels are compiled or loaded from where
    /// they were kept. Weights and gradients that it is given lie on this device, and what else is done with them is ordered
    /// with `queue`.
    ///
    /// # Errors
    /// A configuration or micro-batch that cannot be, a model or device that does not take these kernels, something of CUDA
    /// that is missing, or too little memory, with what would be needed.
    pub fn on_device(
        by: TensorCores,
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        mut queue: Q,
        accounts: &Accounts,
    ) -> Result<Self> {
        let shape = Shape::on_device(config, rows, length, recompute)?;
        let cuda = shape.cuda();
        let mut take = |bytes, host| if host { queue.host_memory(bytes) } else { queue.memory(bytes) };
        let mut allocator = Allocator::on_device(accounts, &mut take);
        let state = State::new(&shape, &mut allocator);
        let (delta, partials) = workspace(&cuda, &mut allocator);
        allocator.finish(&shape)?;
        let ops = Cuda::new::<T>(queue, by, cuda, delta, partials)?;
        Ok(Llama::with(config, shape, state, ops))
    }
}

fn of<T: Float>(config: &LlamaConfig, rows: usize, length: usize, recompute: Recompute) -> Result<Footprint> {
    let shape = Shape::on_device(config, rows, length, recompute)?;
    shape.cuda().modules(TensorCores::Mma, T::DTYPE)?;
    let mut allocator = Allocator::planning_device();
    let _ = (State::<T, T>::new(&shape, &mut allocator), workspace(&shape.cuda(), &mut allocator));
    Ok(allocator.counted())
}

/// What [`Llama::on_device`] would hold, in bytes, without taking it.
///
/// # Errors
/// A configuration or micro-batch that cannot be, a head that the kernels do not take, or a type that no model computes
/// with.
pub fn device_footprint(
    config: &LlamaConfig,
    rows: usize,
    length: usize,
    dtype: DType,
    recompute: Recompute,
) -> Result<Footprint> {
    match dtype {
        DType::F32 => of::<f32>(config, rows, length, recompute),
        DType::Bf16 => of::<bf16>(config, rows, length, recompute),
        DType::F16 => of::<f16>(config, rows, length, recompute),
        other => Err(Error::no_model_of(other)),
    }
}

/// The kernels that a model on a device launches, attention by `by`, with what they ask of the device.
///
/// # Errors
/// A configuration that cannot be, or elements and heads that the kernels do not take.
pub fn device_modules(
    config: &LlamaConfig,
    dtype: DType,
    recompute: Recompute,
    by: TensorCores,
) -> Result<Vec<Module>> {
    Shape::on_device(config, 1, 1, recompute)?.cuda().modules(by, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block's shared memory on GPUs of 8.6, 8.9 and 12.0.
    const SMALL: usize = 99 << 10;

    #[test]
    fn who_evaluates_asks_for_no_kernel_of_a_backward() {
        let config = LlamaConfig::preset("llama-2-7b").unwrap();
        assert_eq!(config.head_dim, 128);
        let most = |dtype, recompute| {
            let modules = device_modules(&config, dtype, recompute, TensorCores::Mma).unwrap();
            modules.iter().map(|module| module.shared).max().unwrap()
        };
        assert!(most(DType::Bf16, Recompute::None) > SMALL && most(DType::Bf16, Recompute::Full) > SMALL);
        assert!(most(DType::Bf16, Recompute::NoBackward) <= SMALL);
        assert!(most(DType::F32, Recompute::None) <= SMALL);
    }

    #[test]
    fn chunks_of_logits_are_equal_and_whole_tiles() {
        let cut = |name: &str, rows, length| {
            let config = LlamaConfig::preset(name).unwrap();
            let shape = Shape::on_device(&config, rows, length, Recompute::None).unwrap();
            (shape.chunk, shape.tokens.div_ceil(shape.chunk))
        };
        assert_eq!(cut("llama-3.2-1b", 8, 2048), (4096, 4));
        assert_eq!(cut("llama-3.2-1b", 5, 2048), (3584, 3));
        // The last is shorter where tiles leave no other choice, or the micro-batch is.
        assert_eq!(cut("llama-3.2-1b", 9, 1000), (3072, 3));
        assert_eq!(cut("llama-3.2-1b", 1, 700), (700, 1));
        assert_eq!(cut("nano", 16, 64), (1024, 1));
        // No more pieces than round a gradient tolerably.
        assert_eq!(cut("llama-3.2-1b", 64, 2048), (8192, 16));
    }
}
