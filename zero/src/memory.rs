//! Bytes that a rank holds, per class: predicted from the plan, and measured by the accounts that every
//! buffer is booked on.

use crate::clip::Norm;
use crate::config::Placement;
use crate::kernels::Needs;
use crate::plan::{Home, Plan};
use collectives::device::{Arena, PRODUCT_WORKSPACE};
use collectives::schedule::Group;
use collectives::{Account, scratch_bytes, staged_call, staged_length};
use models::{Accounts, Footprint};

/// Bytes per class of state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Parameters held all the time: whole units or shards.
    pub parameters: usize,
    /// Gradients held all the time, and f32 sums where micro-batches are accumulated.
    pub gradients: usize,
    /// Master weights and moments.
    pub optimizer: usize,
    /// Slots for units that are whole only now and then.
    pub buckets: usize,
    /// What the forward keeps for the backward.
    pub activations: usize,
    /// Scratch.
    pub workspace: usize,
    /// Beside a device: memory of the host that it copies from and to, and what the engine works in.
    pub host: usize,
}

impl Memory {
    /// Every class with its name, in the order of reports.
    pub fn classes(&self) -> [(&'static str, usize); 7] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("buckets", self.buckets),
            ("activations", self.activations),
            ("workspace", self.workspace),
            ("host", self.host),
        ]
    }

    /// What of it is on a device.
    pub fn on_device(&self, placement: Placement) -> usize {
        let optimizer = if placement.optimizer_on_device() { 0 } else { self.optimizer };
        if placement.on_device() { self.total() - self.host - optimizer } else { 0 }
    }

    /// All classes together.
    pub fn total(&self) -> usize {
        self.classes().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The same with what the engine of a rank of `group` works in during steps of this plan. Calls that go over a
    /// `wire` between devices do not need it.
    pub fn with_engine(mut self, plan: &Plan, group: &Group, wire: bool) -> Self {
        let calls = match (wire, plan.config.placement.on_device()) {
            (true, _) => Vec::new(),
            (false, true) => plan.calls().into_iter().map(staged_call).collect(),
            (false, false) => plan.calls(),
        };
        *plan.config.placement.of_host(&mut self.workspace, &mut self.host) += scratch_bytes(group, &calls);
        self
    }
}

/// What a rank with this plan, and a model with this footprint, will hold.
pub fn predict(plan: &Plan, model: Footprint) -> Memory {
    let element = plan.dtype.size();
    let mut memory = Memory {
        activations: model.activations,
        workspace: model.workspace + Norm::bytes(plan) + products(plan),
        host: model.host + Needs::of(plan).host_bytes(plan),
        ..Memory::default()
    };
    for (u, b) in plan.buckets() {
        let bucket = plan.layout[u].bucket(b);
        let [parameters, gradients, optimizer] = kept(plan, u, bucket.len(), bucket.shard_len());
        memory.parameters += parameters;
        memory.gradients += gradients;
        memory.optimizer += optimizer;
    }
    let elements = |slots: &[Vec<usize>]| slots.iter().flatten().sum::<usize>();
    memory.buckets = element * (elements(&plan.weight_slots) + elements(&plan.gradient_slots))
        + size_of::<f32>() * elements(&plan.partial_slots);
    memory
}

/// Bytes of parameters, gradients and the optimizer's state of a unit's elements, so many where they are whole and so many in
/// a shard.
fn kept(plan: &Plan, unit: usize, whole: usize, shard: usize) -> [usize; 3] {
    let element = plan.dtype.size();
    let parameters = element * if plan.weights[unit] == Home::Whole { whole } else { shard };
    let gradients = match plan.gradients[unit] {
        Home::Whole => element * whole,
        Home::Slot(_) if plan.config.accumulate > 1 => 0,
        Home::Slot(_) => element * shard,
    };
    let sums = plan.config.sums() * size_of::<f32>() * shard;
    let owned = if plan.config.stage.shards_optimizer { shard } else { whole };
    let optimizer = size_of::<f32>() * owned * if plan.keeps_master() { 3 } else { 2 };
    [parameters, gradients + sums, optimizer]
}

/// Bytes of the parameters, gradients and optimizer's state in [`predict`] that no tensor has, for tensors start at multiples of
/// a block, and shards are equally long. Of whose shard they are is of no matter: it is the mean over ranks, rounded up.
pub fn padding(plan: &Plan) -> usize {
    let of_bucket = |(u, b): (usize, usize)| {
        let elements = plan.layout[u].bucket(b).padding().map(|gap| gap.len()).sum::<usize>();
        // By all ranks together.
        kept(plan, u, plan.world * elements, elements).iter().sum::<usize>()
    };
    plan.buckets().map(of_bucket).sum::<usize>().div_ceil(plan.world)
}

/// Bytes of the arena that takes everything of this plan, and of a model with this footprint, on a device: what
/// [`predict`] says, with each buffer at a multiple of the arena's alignment.
pub fn arena(plan: &Plan, model: Footprint) -> usize {
    if !plan.config.placement.on_device() {
        return 0;
    }
    let memory = predict(plan, Footprint::default());
    // All but the norm's are whole blocks of at least 1024 elements, and the last is a carrier's own.
    let blocks = memory.on_device(plan.config.placement) - memory.workspace;
    let alone = if plan.world == 1 { CARRIER } else { 0 };
    model.arena + blocks + Arena::needed([Norm::bytes(plan), products(plan), alone])
}

/// What products work in on a device.
fn products(plan: &Plan) -> usize {
    if plan.config.placement.on_device() { PRODUCT_WORKSPACE } else { 0 }
}

/// Bytes of what the largest call of a step takes on its way through the host: a whole bucket, in which its shard has a
/// place, or has one behind it where it is a sum over micro-batches.
pub fn largest_call(plan: &Plan) -> usize {
    let of_bucket = |(u, b): (usize, usize)| {
        let bucket = plan.layout[u].bucket(b);
        let whole = plan.dtype.size() * bucket.len();
        match plan.config.accumulate > 1 {
            true => staged_length(whole, size_of::<f32>() * bucket.shard_len()),
            false => whole,
        }
    };
    plan.buckets().map(of_bucket).chain([Norm::bytes(plan)]).max().unwrap_or(0)
}

/// What a group of one takes to carry its calls.
const CARRIER: usize = size_of::<u64>();

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
    /// Memory of the host that a device copies from and to.
    pub host: Account,
    /// What the engine of the ranks' communicator works in.
    pub(crate) engine: Account,
    /// Where it counts as that of.
    pub(crate) placement: Placement,
}

impl Ledger {
    /// The accounts of a model.
    pub fn of_model(&self) -> Accounts {
        let Ledger { activations, workspace, host, .. } = self.clone();
        Accounts { activations, workspace, host }
    }

    /// Bytes held now.
    pub fn held(&self) -> Memory {
        let mut memory = Memory {
            parameters: self.parameters.bytes(),
            gradients: self.gradients.bytes(),
            optimizer: self.optimizer.bytes(),
            buckets: self.buckets.bytes(),
            activations: self.activations.bytes(),
            workspace: self.workspace.bytes(),
            host: self.host.bytes(),
        };
        *self.placement.of_host(&mut memory.workspace, &mut memory.host) += self.engine.bytes();
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Placement};
    use crate::stage::Stage;
    use collectives::DType;
    use collectives::schedule::{Call, Kind};
    use collectives::staged_bytes;
    use models::LlamaConfig;

    /// Bytes that a carrier copies of a call, the output behind the input or in it.
    fn copied(call: Call, world: usize) -> usize {
        let call = staged_call(call);
        let part = call.count * call.dtype.size();
        let (send, recv) = match call.kind {
            Kind::ReduceScatter if call.wide => (world * part, call.count * size_of::<f32>()),
            Kind::ReduceScatter => (world * part, part),
            Kind::AllGather => (part, world * part),
            _ => (part, part),
        };
        if call.in_place { send.max(recv) } else { staged_length(send, recv) }
    }

    #[test]
    fn no_call_of_a_step_is_larger_than_the_largest() {
        let preset = LlamaConfig::preset("nano").unwrap();
        let models =
            [64, 3200, 1 << 16].map(|vocab| LlamaConfig { vocab, layers: 16, tied: true, ..preset.clone() });
        for model in models.iter().chain([&preset]) {
            for (world, level, accumulate) in
                [1, 2, 3, 8].into_iter().flat_map(|w| (0..4).flat_map(move |l| [1, 2].map(|a| (w, l, a))))
            {
                let stage = Stage::try_from(level).unwrap();
                let config = Config { stage, accumulate, placement: Placement::Device, ..Config::default() };
                let plan = Plan::new(&model.units(), DType::Bf16, &config, 0, world);
                let largest = largest_call(&plan);
                for call in plan.calls() {
                    assert!(copied(call, world) <= largest, "{call:?}, {world} ranks, stage {level}");
                }
            }
        }
    }

    #[test]
    fn gradients_that_are_accumulated_are_sharded_on_one_rank_too() {
        let units = LlamaConfig::preset("32m").unwrap().units();
        let held = |level| {
            let stage = Stage::try_from(level).unwrap();
            let config = Config { stage, accumulate: 2, ..Config::default() };
            let memory = predict(&Plan::new(&units, DType::Bf16, &config, 0, 1), Footprint::default());
            memory.gradients + memory.buckets
        };
        let [below, sharded] = [1, 2].map(held);
        assert!(sharded < below, "{sharded} bytes at stage 2, {below} at stage 1");
    }

    #[test]
    fn a_higher_stage_never_holds_more() {
        for (name, world, accumulate) in ["nano", "baby", "32m"]
            .into_iter()
            .flat_map(|name| [1, 2, 3, 8].into_iter().flat_map(move |w| [1, 2].map(|a| (name, w, a))))
        {
            let units = LlamaConfig::preset(name).unwrap().units();
            for placement in [Placement::Host, Placement::Device, Placement::Offloaded] {
                for dtype in [DType::Bf16, DType::F32] {
                    let held = |level| {
                        let stage = Stage::try_from(level).unwrap();
                        let config = Config { stage, accumulate, placement, ..Config::default() };
                        let plan = Plan::new(&units, dtype, &config, 0, world);
                        let carrier = match placement.on_device() && world > 1 {
                            true => staged_bytes(largest_call(&plan)),
                            false => 0,
                        };
                        let memory = predict(&plan, Footprint::default());
                        match placement {
                            // What it copies of sums in f32 has to pass through the host.
                            Placement::Offloaded => memory.on_device(placement),
                            _ => memory.total() + carrier,
                        }
                    };
                    let at =
                        format!("{name}, {world} ranks, {accumulate} micro-batches, {placement:?}, {dtype}");
                    let all: Vec<usize> = (0..4).map(held).collect();
                    assert!(all.is_sorted_by(|a, b| a >= b), "{at}: {all:?}");
                }
            }
        }
    }
}
