//! The global gradient norm: the same bits for every stage, bucketing and number of ranks that hold it.
//!
//! Each rank sums squares in f64 over the fixed blocks of its shard; the blocks' sums are gathered and added
//! in the order of units, tensors and blocks, whoever computed them.

use crate::error::Result;
use crate::grads::Grads;
use crate::hands::Hands;
use crate::kernels::Activity;
use crate::plan::{NORM_BLOCK, Plan};
use collectives::{Account, Buffer, Communicator, Float};

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

    /// Bytes of all ranks' values.
    pub fn bytes(plan: &Plan) -> usize {
        plan.world * Norm::stride(plan) * size_of::<f64>()
    }

    /// Memory on `account`.
    pub fn new(plan: &Plan, comm: &Communicator, account: &Account) -> Result<Self> {
        let stride = Norm::stride(plan);
        Ok(Norm { partials: comm.alloc(plan.world * stride)?.booked(account), stride })
    }

    /// The norm of the reduced gradient over all ranks, and the sum of the ranks' `loss`.
    pub(crate) fn global<T: Float>(
        &mut self,
        hands: &mut Hands<'_, T>,
        grads: &Grads<T>,
        loss: f64,
    ) -> Result<Global> {
        let Hands { plan, comm, model, kernels, clock } = hands;
        let mine = plan.rank * self.stride;
        let partials = &mut self.partials;
        kernels.put(&[loss], partials.view_mut().slice(mine..mine + 1))?;
        let mut next = mine + 1;
        let mut done = Ok(());
        model.install(&mut || {
            done = plan.buckets().try_for_each(|(u, b)| {
                let blocks = plan.layout[u].bucket(b).shard_len() / NORM_BLOCK;
                let out = partials.view_mut().slice(next..next + blocks);
                next += blocks;
                kernels.squares(grads.shard(plan, u, b), out)
            });
        });
        done?;
        kernels.mark(Activity::Communication)?;
        clock.communicate(|| comm.all_gather_in_place(&mut *partials))?;
        kernels.mark(Activity::Optimizer)?;

        let partials = kernels.numbers(partials.view())?;
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
