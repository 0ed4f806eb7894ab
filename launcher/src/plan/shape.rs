//! What a training's memory and messages follow from: the same for a run that is about to begin and for one that is only
//! thought of.

use super::{MicroBatch, ModelChoice};
use crate::args::Precision;
use crate::checkpoint::copied_state;
use crate::device::{Device, Need};
use crate::failure::Result;
use collectives::DType;
use collectives::device::Arena;
use collectives::schedule::Group;

/// A training, but for its trainer's settings and its micro-batch, of which there may be others to compare with.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    /// What is trained.
    pub model: &'a ModelChoice,
    /// In what.
    pub dtype: Precision,
    /// Where.
    pub device: &'a Device,
    /// Ranks.
    pub world: usize,
    /// Whether memory of GPUs goes over NCCL.
    pub nccl: bool,
    /// Whether each rank holds a copy of its part of the state, from which it is written.
    pub copies: bool,
}

impl Shape<'_> {
    /// Where `rank` will keep what.
    pub fn sharded(&self, zero: &zero::Config, rank: usize) -> zero::Plan {
        zero::Plan::new(&self.model.config.units(), self.dtype.dtype(), zero, rank, self.world)
    }

    /// What the model and its state need, and what of it lies on the device.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or a model that the device's kernels do not take.
    pub fn need(&self, zero: &zero::Config, batch: &MicroBatch) -> Result<Need> {
        let plan = self.sharded(zero, 0);
        let footprint = self.model.footprint(batch, self.dtype, self.device)?;
        let mut memory = zero::memory::predict(&plan, footprint);
        let copied = if self.copies { copied_state(&plan) * DType::F32.size() } else { 0 };
        *zero.placement.of_host(&mut memory.workspace, &mut memory.host) += batch.token_bytes() + copied;
        let mut arena = zero::memory::arena(&plan, footprint);
        let mut largest_call = 0;
        if zero.placement.on_device() && self.world > 1 {
            if self.nccl {
                let carrier = collectives::wired_bytes(self.world, None);
                memory.workspace += carrier.iter().sum::<usize>();
                arena += Arena::needed(carrier);
            } else {
                largest_call = zero::memory::largest_call(&plan);
                memory.host += collectives::staged_bytes(largest_call);
            }
        }
        Ok(Need { memory, arena, largest_call })
    }

    /// What a rank of `group` will hold of that and of what its engine works in, to the byte.
    pub fn held(&self, need: &Need, plan: &zero::Plan, group: &Group) -> zero::Memory {
        need.memory.with_engine(plan, group, self.nccl)
    }
}
