//! What every rank will hold and where, decided before anything is allocated.
//!
//! The same plan allocates ([`crate::params`], [`crate::grads`], [`crate::optimizer`]) and predicts
//! ([`crate::memory`]), so the prediction is the arithmetic that the run follows.

use crate::clip::Norm;
use crate::config::{Config, Placement};
use crate::schedule::{Schedule, assign_slots};
use collectives::schedule::{Call, Kind};
use collectives::{Bucket, Buckets, DType};
use models::Unit;
use std::collections::HashSet;
use std::ops::Range;

/// Tensors and shards start at multiples of it, so that the partial sums of the gradient norm, and with them its bits, do not
/// depend on who holds what.
pub use models::cuda::NORM_BLOCK;

/// Where whole copies of a unit's parameters or gradient live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Held whole all the time.
    Whole,
    /// Held as a shard; whole only now and then, in the slot of this number.
    Slot(usize),
}

/// Capacities of one slot: elements per bucket position.
pub type Slot = Vec<usize>;

/// The plan of one rank; all ranks' plans differ only in `rank`.
#[derive(Clone, Debug)]
pub struct Plan {
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub world: usize,
    /// Of parameters and gradients.
    pub dtype: DType,
    /// What was asked for.
    pub config: Config,
    /// Per unit, its tensors in padded buckets.
    pub layout: Vec<Buckets>,
    /// Per unit, where whole parameters live.
    pub weights: Vec<Home>,
    /// Capacities of the slots for gathered parameters.
    pub weight_slots: Vec<Slot>,
    /// Per unit, where whole gradients live.
    pub gradients: Vec<Home>,
    /// Capacities of the slots for whole gradients.
    pub gradient_slots: Vec<Slot>,
    /// Per unit, the slot that takes a reduced shard before it is added to the accumulator, if
    /// gradients are accumulated over several micro-batches.
    pub partial_slot: Vec<Option<usize>>,
    /// Capacities of those slots, in f32 elements.
    pub partial_slots: Vec<Slot>,
    /// Forward and backward of a micro-batch.
    pub training: Schedule,
    /// Forward of all units, for evaluation.
    pub evaluation: Schedule,
}

impl Plan {
    /// Plans for `units` on `rank`, one of `world` ranks.
    ///
    /// # Panics
    /// There are no units, or no ranks.
    pub fn new(units: &[Unit], dtype: DType, config: &Config, rank: usize, world: usize) -> Self {
        let bucket_elements = (config.bucket_bytes / dtype.size()).max(1);
        let group = |unit: &Unit| {
            let lengths: Vec<usize> = unit.tensors.iter().map(|t| t.len()).collect();
            Buckets::group(&lengths, bucket_elements, NORM_BLOCK, world)
        };
        let layout: Vec<Buckets> = units.iter().map(group).collect();
        let training = Schedule::training(units, config.prefetch);
        let evaluation = Schedule::forward(units, units.len(), config.prefetch);

        let (weights, weight_slots) = if config.stage.shards_parameters {
            place(&layout, &training.weights_live, |b| b.shard_len())
        } else {
            (vec![Home::Whole; units.len()], Vec::new())
        };
        let gradients_live: Vec<Vec<Range<usize>>> =
            training.gradients_live.iter().map(|live| live.iter().cloned().collect()).collect();
        let (gradients, gradient_slots) = if config.stage.shards_gradients {
            // The sum over micro-batches, which every stage has, is then the shard: there is no other.
            let shard = |b: &Bucket| if config.accumulate > 1 { 0 } else { b.shard_len() };
            place(&layout, &gradients_live, shard)
        } else {
            (vec![Home::Whole; units.len()], Vec::new())
        };
        let everyone = vec![true; units.len()];
        let (partial_slot, partial_slots) = if config.accumulate > 1 {
            slots(&layout, &everyone, &gradients_live, |b| b.shard_len())
        } else {
            (vec![None; units.len()], Vec::new())
        };
        Plan {
            rank,
            world,
            dtype,
            config: config.clone(),
            layout,
            weights,
            weight_slots,
            gradients,
            gradient_slots,
            partial_slot,
            partial_slots,
            training,
            evaluation,
        }
    }

    /// Whether parameters have f32 weights beside them: those of 16 bits need them, and the host keeps its own.
    pub fn keeps_master(&self) -> bool {
        self.dtype != DType::F32 || self.config.placement == Placement::Offloaded
    }

    /// The part of a bucket whose reduced gradient this rank receives.
    pub fn shard(&self, unit: usize, bucket: usize) -> Range<usize> {
        self.layout[unit].bucket(bucket).shard(self.rank)
    }

    /// The part of a bucket that this rank's optimizer updates.
    pub fn owned(&self, unit: usize, bucket: usize) -> Range<usize> {
        if self.config.stage.shards_optimizer {
            self.shard(unit, bucket)
        } else {
            0..self.layout[unit].bucket(bucket).len()
        }
    }

    /// The different collectives of a step, of whole buckets and shards in memory of the communicator.
    pub fn calls(&self) -> Vec<Call> {
        let calls: HashSet<Call> = self.calls_of_a_step().map(|(call, _)| call).collect();
        calls.into_iter().collect()
    }

    /// Bytes that this rank sends in a step: see [`Call::volume`].
    pub fn sent_in_a_step(&self) -> u64 {
        let sent = |(call, times): (Call, usize)| call.volume(self.rank, self.world) as u64 * times as u64;
        self.calls_of_a_step().map(sent).sum()
    }

    /// The collectives of a step, and how often each is called: not at all, if only with other settings.
    fn calls_of_a_step(&self) -> impl Iterator<Item = (Call, usize)> + '_ {
        let norm = Call { in_place: true, ..Call::new(Kind::AllGather, DType::U64, Norm::stride(self)) };
        self.buckets().flat_map(|(u, b)| self.calls_of_a_bucket(u, b)).chain([(norm, 1)])
    }

    /// What reduces the gradients of a bucket, and what gathers its parameters or hands its gradients round.
    fn calls_of_a_bucket(&self, unit: usize, bucket: usize) -> [(Call, usize); 2] {
        let micro_batches = self.config.accumulate;
        let (bucket, owned) = (self.layout[unit].bucket(bucket), self.config.stage.shards_optimizer);
        let in_place = |call: Call| Call { in_place: true, ..call };
        let reduce = Call::new(Kind::ReduceScatter, self.dtype, bucket.shard_len());
        let reduce = match self.gradients[unit] {
            _ if micro_batches > 1 => Call { wide: true, ..reduce },
            Home::Slot(_) => reduce,
            Home::Whole if owned => in_place(reduce),
            Home::Whole => in_place(Call::new(Kind::AllReduce, self.dtype, bucket.len())),
        };
        let gather = Call::new(Kind::AllGather, self.dtype, bucket.shard_len());
        let gather = match self.weights[unit] {
            Home::Slot(_) => (gather, micro_batches * self.training.weights_live[unit].len()),
            // What this rank has updated, or else the sums of which it has rounded its part.
            Home::Whole => (in_place(gather), usize::from(owned || micro_batches > 1)),
        };
        [(reduce, micro_batches), gather]
    }

    /// Every (unit, bucket), in order.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.layout.len()).flat_map(|u| (0..self.layout[u].count()).map(move |b| (u, b)))
    }

    /// What tensors have in the part of a bucket that this rank's optimizer updates, in pieces of at most `most` elements:
    /// tensor, its elements, and where in that part they are.
    pub fn owned_pieces(
        &self,
        unit: usize,
        bucket: usize,
        most: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> + '_ {
        let owned = self.owned(unit, bucket);
        self.layout[unit].bucket(bucket).tensors().iter().flat_map(move |t| {
            let end = owned.end.min(t.offset + t.len);
            let (offset, part) = (t.offset, owned.start);
            (part.max(offset)..end).step_by(most).map(move |start| {
                let end = end.min(start.saturating_add(most));
                (t.tensor, start - offset..end - offset, start - part..end - part)
            })
        })
    }
}

/// Slots for the units that `sharded` names: the slot of each, and capacities.
fn slots(
    layout: &[Buckets],
    sharded: &[bool],
    live: &[Vec<Range<usize>>],
    elements: impl Fn(&Bucket) -> usize,
) -> (Vec<Option<usize>>, Vec<Slot>) {
    let size = |u: usize| if sharded[u] { layout[u].iter().map(&elements).sum() } else { 0 };
    let sizes: Vec<usize> = (0..layout.len()).map(size).collect();
    let (slot_of, count) = assign_slots(&sizes, live);
    let mut capacities = vec![Slot::new(); count];
    for (unit, slot) in slot_of.iter().enumerate() {
        let Some(slot) = slot else { continue };
        for (b, bucket) in layout[unit].iter().enumerate() {
            match capacities[*slot].get_mut(b) {
                Some(capacity) => *capacity = elements(bucket).max(*capacity),
                None => capacities[*slot].push(elements(bucket)),
            }
        }
    }
    (slot_of, capacities)
}

/// Decides which units to shard, each bucket of which then takes `shard` elements all the time. Sharding saves the
/// rest of a unit but needs slots for whole units, which can cost more than it saves when one unit is most of the model
/// or the world is small. So the largest units stay whole as far as that lowers the total; with all of them whole the
/// total is that of the stage below, which is why a higher stage never holds more.
fn place(
    layout: &[Buckets],
    live: &[Vec<Range<usize>>],
    shard: impl Fn(&Bucket) -> usize,
) -> (Vec<Home>, Vec<Slot>) {
    let elements = |of: &dyn Fn(&Bucket) -> usize| -> Vec<usize> {
        layout.iter().map(|unit| unit.iter().map(of).sum()).collect()
    };
    let (whole, shard) = (elements(&|b| b.len()), elements(&shard));
    let mut by_size: Vec<usize> = (0..layout.len()).collect();
    by_size.sort_by_key(|&u| (std::cmp::Reverse(whole[u]), u));
    // What units take all the time when none, one, and so on to all of them stay whole.
    let mut held = vec![shard.iter().sum::<usize>()];
    held.extend(by_size.iter().scan(held[0], |sum, &u| {
        *sum += whole[u] - shard[u];
        Some(*sum)
    }));
    let candidate = |kept: usize| {
        let mut sharded = vec![true; layout.len()];
        by_size[..kept].iter().for_each(|&u| sharded[u] = false);
        let (slot_of, capacities) = slots(layout, &sharded, live, |b| b.len());
        let total = held[kept] + capacities.iter().flatten().sum::<usize>();
        (total, slot_of, capacities)
    };
    // Slots take no less than the largest unit that is sharded. That and the total of all whole rule out nearly every
    // number untried, without which thousands of units would take minutes.
    let least = |kept: usize| held[kept] + by_size.get(kept).map_or(0, |&u| whole[u]);
    let all = held[layout.len()];
    let mut best = candidate(0);
    for kept in 1..=layout.len() {
        if least(kept) < best.0 && least(kept) <= all {
            let other = candidate(kept);
            if other.0 < best.0 {
                best = other;
            }
        }
    }
    let (_, slot_of, capacities) = best;
    (slot_of.into_iter().map(|s| s.map_or(Home::Whole, Home::Slot)).collect(), capacities)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Stage;
    use models::LlamaConfig;

    /// Every number of whole units tried, and the first that is least.
    fn tried(layout: &[Buckets], live: &[Vec<Range<usize>>], shard: impl Fn(&Bucket) -> usize) -> usize {
        let len = |u: usize| layout[u].iter().map(|b| b.len()).sum::<usize>();
        let mut by_size: Vec<usize> = (0..layout.len()).collect();
        by_size.sort_by_key(|&u| (std::cmp::Reverse(len(u)), u));
        let total = |kept: &usize| {
            let mut sharded = vec![true; layout.len()];
            by_size[..*kept].iter().for_each(|&u| sharded[u] = false);
            let (_, capacities) = slots(layout, &sharded, live, |b| b.len());
            let units = (0..layout.len()).map(|u| match sharded[u] {
                true => layout[u].iter().map(&shard).sum(),
                false => len(u),
            });
            units.chain(capacities.into_iter().flatten()).sum::<usize>()
        };
        (0..=layout.len()).min_by_key(total).unwrap()
    }

    #[test]
    fn as_many_units_stay_whole_as_trying_every_number_says() {
        let nano = LlamaConfig::preset("nano").unwrap();
        let mut kept = HashSet::new();
        for (layers, vocab, tied) in [(1, 256, true), (2, 5000, false), (9, 90_000, true), (30, 400, false)] {
            let units = LlamaConfig { layers, vocab, tied, ..nano.clone() }.units();
            for (world, accumulate, prefetch) in
                [1, 2, 3, 7, 64].iter().flat_map(|&w| [1, 2].map(|a| (w, a, w != 3)))
            {
                let config = Config { accumulate, prefetch, bucket_bytes: 100 << 10, ..Config::default() };
                let plan = Plan::new(&units, DType::F32, &config, 0, world);
                let whole = |homes: &[Home]| homes.iter().filter(|h| **h == Home::Whole).count();
                let weights = tried(&plan.layout, &plan.training.weights_live, |b| b.shard_len());
                assert_eq!(whole(&plan.weights), weights, "{layers} layers, {world} ranks");
                let live: Vec<Vec<Range<usize>>> =
                    plan.training.gradients_live.iter().map(|live| live.iter().cloned().collect()).collect();
                let shard = |b: &Bucket| if accumulate > 1 { 0 } else { b.shard_len() };
                assert_eq!(whole(&plan.gradients), tried(&plan.layout, &live, shard));
                kept.insert(weights.min(4));
            }
        }
        assert!(kept.len() > 3, "{kept:?}");
    }

    /// With work that grows faster than the units, this would take hours.
    #[test]
    fn a_model_of_as_many_layers_as_there_may_be_is_planned() {
        let nano = LlamaConfig::preset("nano").unwrap();
        let units = LlamaConfig { layers: 1 << 16, tied: true, ..nano }.units();
        for (level, world, accumulate) in [(1, 2, 1), (3, 1, 2), (3, 8, 1)] {
            let stage = Stage::try_from(level).unwrap();
            let config = Config { stage, accumulate, ..Config::default() };
            let plan = Plan::new(&units, DType::F32, &config, 0, world);
            assert!(plan.weight_slots.len() + plan.gradient_slots.len() < 10);
        }
    }
}
