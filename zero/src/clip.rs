//! The global gradient norm: the same bits for every stage, bucketing and number of ranks that hold it.
//!
//! Each rank sums squares in f64 over the fixed blocks of its shard; the blocks' sums are gathered and added
//! in the order of units, tensors and blocks, whoever computed them.

use crate::error::Result;
use crate::grads::{Grads, Reduced};
use crate::plan::{NORM_BLOCK, Plan};
use crate::step::Clock;
use collectives::{Account, Buffer, Communicator, Float};
use models::Model;

/// Lanes of a block's sum: fixed, so that every instruction set adds in the same order.
const LANES: usize = 16;

/// Partial sums of all ranks, kept between steps.
pub struct Norm {
    /// (world, 1 + blocks of a rank): each rank's loss, then its blocks' sums of squares.
    partials: Buffer<f64>,
    /// f64 values of one rank.
    stride: usize,
}

/// What the ranks found together.
pub struct Global {
    /// The sum of what each rank gave as its loss.
    pub loss: f64,
    /// The Euclidean norm of the whole gradient.
    pub norm: f64,
}

impl Norm {
    /// Values that each rank contributes.
    pub fn stride(plan: &Plan) -> usize {
        1 + plan.buckets().map(|(u, b)| plan.layout[u].bucket(b).shard_len() / NORM_BLOCK).sum::<usize>()
    }

    /// Memory on `account`.
    pub fn new(plan: &Plan, comm: &Communicator, account: &Account) -> Result<Self> {
        let stride = Norm::stride(plan);
        Ok(Norm { partials: comm.alloc(plan.world * stride)?.booked(account), stride })
    }

    /// The norm of the reduced gradient over all ranks, and the sum of the ranks' `loss`.
    pub(crate) fn global<T: Float>(
        &mut self,
        plan: &Plan,
        comm: &Communicator,
        model: &dyn Model<T>,
        grads: &Grads<T>,
        loss: f64,
        clock: &mut Clock,
    ) -> Result<Global> {
        let mine = plan.rank * self.stride;
        let partials = self.partials.host_mut();
        partials[mine] = loss;
        let mut next = mine + 1;
        model.install(&mut || {
            for (u, b) in plan.buckets() {
                let blocks = plan.layout[u].bucket(b).shard_len() / NORM_BLOCK;
                let out = &mut partials[next..next + blocks];
                match grads.shard(plan, u, b) {
                    Reduced::Stored(g) => divided::<T, T>(g, out),
                    Reduced::Wide(g) => divided::<T, f32>(g, out),
                }
                next += blocks;
            }
        });
        clock.communicate(|| comm.all_gather_in_place(&mut self.partials))?;

        let partials = self.partials.host();
        let loss = (0..plan.world).map(|r| partials[r * self.stride]).sum();
        // Bucket by bucket in tensor order, rank by rank within a bucket: blocks in the order of the unit.
        let mut sum = 0.0;
        let mut first = 1;
        for (u, b) in plan.buckets() {
            let blocks = plan.layout[u].bucket(b).shard_len() / NORM_BLOCK;
            for r in 0..plan.world {
                let at = r * self.stride + first;
                // Blocks of padding are zeros: adding them changes no bit, so padding does not matter either.
                sum = partials[at..at + blocks].iter().fold(sum, |s, p| s + p);
            }
            first += blocks;
        }
        Ok(Global { loss, norm: f64::sqrt(sum) })
    }
}

/// The factor that brings a gradient of this norm down to `clip`; PyTorch's, its epsilon included.
pub fn factor(norm: f64, clip: Option<f32>) -> f32 {
    match clip {
        Some(most) => (f64::from(most) / (norm + 1e-6)).min(1.0) as f32,
        None => 1.0,
    }
}

/// `squares` with all threads of the pool that this thread is in, if any: which one takes a block changes no bit.
fn divided<T: Float, G: Float>(g: &[G], out: &mut [f64]) {
    const GRAIN: usize = 64;
    if out.len() > GRAIN && rayon::current_thread_index().is_some() {
        let (low, high) = out.split_at_mut(out.len() / 2);
        let (first, second) = g.split_at(low.len() * NORM_BLOCK);
        rayon::join(|| divided::<T, G>(first, low), || divided::<T, G>(second, high));
    } else {
        squares::<T, G>(g, out);
    }
}

/// Sums of squares of the blocks of `g`, each element rounded to `T` first.
#[inline(always)]
fn squares_body<T: Float, G: Float>(g: &[G], out: &mut [f64]) {
    for (block, out) in g.chunks_exact(NORM_BLOCK).zip(out) {
        let mut lanes = [0f64; LANES];
        for row in block.chunks_exact(LANES) {
            for (lane, x) in lanes.iter_mut().zip(row) {
                let x = f64::from(T::from_f32(x.to_f32()).to_f32());
                *lane += x * x;
            }
        }
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        *out = lanes[0];
    }
}

collectives::simd_dispatch! {
    fn squares<T: Float, G: Float>(g: &[G], out: &mut [f64]) = squares_body;
}
