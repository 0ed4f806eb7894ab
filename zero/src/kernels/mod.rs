//! What ZeRO itself computes on parameters, gradients and optimizer state, wherever those lie. The rest of the crate
//! says what happens when; it is the same for all of these.

mod device;
mod host;
mod meter;
mod offload;

pub use device::Device;
pub use host::Host;
pub use meter::{Activity, Elapsed};
pub use offload::Offloaded;

use crate::clip::Norm;
use crate::config::Placement;
use crate::error::Result;
use crate::grads::Reduced;
use crate::plan::{Home, Plan};
use collectives::{Buffer, Float, View, ViewMut};
use models::cuda::Coefficients;
use std::ops::Range;

/// Elementwise work and sums of fixed order: all implementations give the same bits.
pub trait Kernels<T: Float>: Send {
    /// Zeroed state of the optimizer.
    fn state(&mut self, len: usize) -> Result<Buffer<f32>>;

    /// out = 0
    fn clear(&mut self, out: ViewMut<'_, T>) -> Result<()>;

    /// sum += x
    fn add(&mut self, sum: ViewMut<'_, f32>, x: View<'_, f32>) -> Result<()>;

    /// to = from, rounded
    fn round(&mut self, from: View<'_, f32>, to: ViewMut<'_, T>) -> Result<()>;

    /// words = 0
    fn clear_words(&mut self, words: ViewMut<'_, u64>) -> Result<()>;

    /// Adds to the words of an [`ExactSum`](crate::exact::ExactSum) the sums of squares in f64 of blocks of
    /// [`NORM_BLOCK`](crate::plan::NORM_BLOCK) elements, rounded to `T` first.
    fn squares(&mut self, gradient: Reduced<'_, T>, sum: ViewMut<'_, u64>) -> Result<()>;

    /// One step of AdamW. `next` is the gradient of the next bucket, to have it ready.
    fn update(&mut self, bucket: Update<'_, T>, next: Option<Reduced<'_, T>>) -> Result<()>;

    /// Sets weights.
    fn set(&mut self, values: &[f32], master: Option<ViewMut<'_, f32>>, param: ViewMut<'_, T>) -> Result<()>;

    /// What is given to a device from here on is this; on the host, where a call's time is the work's, nothing.
    fn mark(&mut self, _activity: Activity) -> Result<()> {
        Ok(())
    }

    /// Where a device's time went between the last mark before the [`numbers`](Self::numbers) of the last call of this and
    /// the last one before those that were read now: what is known to be over. `None` on the host.
    fn elapsed(&mut self) -> Result<Option<Elapsed>> {
        Ok(None)
    }

    /// Copies from the host.
    fn put(&mut self, values: &[u64], to: ViewMut<'_, u64>) -> Result<()>;

    /// The numbers on the host, after everything before.
    fn numbers<'a>(&'a mut self, values: View<'a, u64>) -> Result<&'a [u64]>;

    /// The elements on the host, after everything before; at most [`PART`] of them.
    fn elements<'a>(&'a mut self, values: View<'a, T>) -> Result<&'a [T]>;

    /// Sets state of the optimizer.
    fn load(&mut self, values: &[f32], to: ViewMut<'_, f32>) -> Result<()>;

    /// State of the optimizer on the host, after everything before; at most [`FLOATS`] elements.
    fn floats<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]>;
}

/// What the optimizer has of one bucket; all arrays are equally long.
pub struct Update<'a, T: Float> {
    /// Of this step.
    pub coefficients: &'a Coefficients,
    /// Summed over ranks and micro-batches.
    pub gradient: Reduced<'a, T>,
    /// f32 weights, unless the parameters are f32 themselves.
    pub master: Option<ViewMut<'a, f32>>,
    /// First moments.
    pub m: ViewMut<'a, f32>,
    /// Second moments.
    pub v: ViewMut<'a, f32>,
    /// Parameters.
    pub param: ViewMut<'a, T>,
    /// Where tensors are, perhaps several in a range, and what a step keeps of their weights: 1 - lr * weight_decay, or 1.
    pub ranges: &'a [(Range<usize>, f32)],
}

/// How much memory of the host a device needs beside it.
pub struct Needs {
    /// Numbers that all ranks contribute to the norm.
    numbers: usize,
    /// Elements of the largest bucket that this rank updates.
    bucket: usize,
    /// Bytes of an element of a reduced gradient.
    gradient: usize,
}

/// Elements that come to the host at once where somebody wants the weights.
pub const PART: usize = 256 << 10;

/// As many f32 as a part of the narrowest elements has room for.
pub const FLOATS: usize = PART / 2;

/// Buckets that offloading has under way at once.
const UNDER_WAY: usize = 2;

impl Needs {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        Needs {
            numbers: Norm::bytes(plan) / size_of::<u64>(),
            bucket: plan.buckets().map(|(u, b)| plan.owned(u, b).len()).max().unwrap_or(0),
            // What was accumulated over micro-batches is kept in f32, but not where a gradient is always whole.
            gradient: match plan.config.accumulate > 1 && plan.gradients.iter().any(|g| *g != Home::Whole) {
                true => size_of::<f32>(),
                false => plan.dtype.size(),
            },
        }
    }

    /// All together.
    pub fn host_bytes(&self, plan: &Plan) -> usize {
        let numbers = self.numbers * size_of::<u64>();
        let buckets = UNDER_WAY * self.bucket * (self.gradient + plan.dtype.size());
        match plan.config.placement {
            Placement::Host => 0,
            Placement::Device => numbers + PART * plan.dtype.size(),
            Placement::Offloaded => numbers + PART * plan.dtype.size() + buckets,
        }
    }
}
