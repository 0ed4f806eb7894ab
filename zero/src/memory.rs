//! Bytes that a rank holds, per class: predicted from the plan, and measured by the accounts that every
//! buffer is booked on.

use crate::clip::Norm;
use crate::optimizer::keeps_master;
use crate::plan::{Home, Plan};
use collectives::Account;
use models::Footprint;

/// Bytes per class of state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Parameters held all the time: whole units or shards.
    pub parameters: usize,
    /// Gradients held all the time, and f32 sums when micro-batches are accumulated.
    pub gradients: usize,
    /// Master weights and moments.
    pub optimizer: usize,
    /// Slots for units that are whole only now and then.
    pub buckets: usize,
    /// What the forward keeps for the backward.
    pub activations: usize,
    /// Scratch.
    pub workspace: usize,
}

impl Memory {
    /// Every class with its name, in the order of reports.
    pub fn classes(&self) -> [(&'static str, usize); 6] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("buckets", self.buckets),
            ("activations", self.activations),
            ("workspace", self.workspace),
        ]
    }

    /// All classes together.
    pub fn total(&self) -> usize {
        self.classes().iter().map(|(_, bytes)| bytes).sum()
    }
}

/// What a rank with this plan, and a model with this footprint, will hold.
pub fn predict(plan: &Plan, model: Footprint) -> Memory {
    let element = plan.dtype.size();
    let mut memory = Memory {
        activations: model.activations,
        workspace: model.workspace + plan.world * Norm::stride(plan) * size_of::<f64>(),
        ..Memory::default()
    };
    for (u, b) in plan.buckets() {
        let bucket = plan.layout[u].bucket(b);
        let (whole, shard, owned) = (bucket.len(), bucket.shard_len(), plan.owned(u, b).len());
        memory.parameters += element * if plan.weights[u] == Home::Whole { whole } else { shard };
        let accumulates = plan.config.accumulate > 1;
        memory.gradients += match plan.gradients[u] {
            Home::Whole => element * whole,
            Home::Slot(_) if accumulates => 0,
            Home::Slot(_) => element * shard,
        };
        memory.gradients += if accumulates { size_of::<f32>() * shard } else { 0 };
        memory.optimizer += size_of::<f32>() * owned * if keeps_master(plan.dtype) { 3 } else { 2 };
    }
    let elements = |slots: &[Vec<usize>]| slots.iter().flatten().sum::<usize>();
    memory.buckets = element * (elements(&plan.weight_slots) + elements(&plan.gradient_slots))
        + size_of::<f32>() * elements(&plan.partial_slots);
    memory
}

/// Accounts for every class; what they show is what is held.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// See [`Memory::parameters`]; the others likewise.
    pub parameters: Account,
    /// Gradients.
    pub gradients: Account,
    /// Optimizer state.
    pub optimizer: Account,
    /// Slots.
    pub buckets: Account,
    /// The model's activations.
    pub activations: Account,
    /// Scratch.
    pub workspace: Account,
}

impl Ledger {
    /// Bytes held now.
    pub fn held(&self) -> Memory {
        Memory {
            parameters: self.parameters.bytes(),
            gradients: self.gradients.bytes(),
            optimizer: self.optimizer.bytes(),
            buckets: self.buckets.bytes(),
            activations: self.activations.bytes(),
            workspace: self.workspace.bytes(),
        }
    }
}
