//! Gradients: opened for a backward, reduced as their buckets become ready, kept as far as the stage says.
//!
//! Each micro-batch's gradient is summed over the ranks in the canonical order of the collectives, and micro-batches are
//! then added in f32 in an order of their own ([`crate::addition`]), on every stage alike; so all stages see the same bits.
//! The sum is rounded to `T` once: by the reduction itself when there is one micro-batch; when there are several, by
//! [`finish`](Grads::finish) where the gradient is always whole, else by the reader ([`Reduced::Wide`]).

use crate::addition::Place;
use crate::error::{Error, Result};
use crate::hands::{Hands, Meanwhile};
use crate::params::alloc_slots;
use crate::plan::{Home, Plan};
use collectives::{Account, Buffer, Communicator, Float, Pending, ReduceOp, View, ViewMut};
use models::Gradients;
use std::mem;

/// One rank's gradients.
pub struct Grads<T: Float> {
    units: Vec<Vec<Bucket<T>>>,
    /// Per slot, per bucket position: memory for whole gradients, `None` while in use.
    slots: Vec<Vec<Option<Buffer<T>>>>,
    /// Likewise, for a micro-batch's reduced shard on its way to the accumulator.
    partials: Vec<Vec<Option<Buffer<f32>>>>,
    /// The micro-batch in hand, counted from 0.
    micro_batch: usize,
    /// A reduction that could not start: kept until the model's backward has returned.
    failed: Option<collectives::Error>,
}

struct Bucket<T: Float> {
    /// Tensors whose gradient is not final yet in this backward.
    awaited: usize,
    state: State<T>,
    /// This rank's reduced shard, where it is kept apart from the whole gradient.
    shard: Option<Buffer<T>>,
    /// Sums over micro-batches of this rank's reduced shard, where there are several; `None` while one is reduced into it.
    sums: Vec<Option<Buffer<f32>>>,
}

enum State<T: Float> {
    /// No whole gradient is held.
    Empty,
    /// The whole gradient, being written, or reduced in this rank's part.
    Whole(Buffer<T>),
    /// Being reduced in place.
    InPlace(Pending<Buffer<T>>),
    /// Being reduced into the shard.
    Into(Pending<(Buffer<T>, Buffer<T>)>),
    /// Being reduced, unrounded, into a sum of which it is the first, or into a partial that is added to one.
    Wide(Pending<(Buffer<T>, Buffer<f32>)>, Place),
}

/// A reduced gradient for the optimizer.
#[derive(Clone, Copy)]
pub enum Reduced<'a, T: Float> {
    /// Rounded to `T` by the reduction.
    Stored(View<'a, T>),
    /// Still to be rounded to `T`, once, by the reader.
    Wide(View<'a, f32>),
}

impl<T: Float> Grads<T> {
    /// Gradients on the account `held`, slots and partials on `slots`.
    pub fn new(plan: &Plan, comm: &Communicator, held: &Account, slots: &Account) -> Result<Self> {
        let sums = plan.config.sums();
        let mut units: Vec<Vec<Bucket<T>>> = (0..plan.layout.len()).map(|_| Vec::new()).collect();
        for (u, b) in plan.buckets() {
            let bucket = plan.layout[u].bucket(b);
            let (state, shard) = match plan.gradients[u] {
                Home::Whole => (State::Whole(comm.alloc(bucket.len())?.booked(held)), None),
                Home::Slot(_) if sums > 0 => (State::Empty, None),
                Home::Slot(_) => (State::Empty, Some(comm.alloc(bucket.shard_len())?.booked(held))),
            };
            let sum = || Ok(Some(comm.alloc(bucket.shard_len())?.booked(held)));
            let sums = (0..sums).map(|_| sum()).collect::<Result<_>>()?;
            units[u].push(Bucket { awaited: 0, state, shard, sums });
        }
        Ok(Grads {
            units,
            slots: alloc_slots(comm, &plan.gradient_slots, slots)?,
            partials: alloc_slots(comm, &plan.partial_slots, slots)?,
            micro_batch: 0,
            failed: None,
        })
    }

    /// Starts a micro-batch of a step, counted from 0.
    pub fn begin(&mut self, micro_batch: usize) {
        self.micro_batch = micro_batch;
    }

    /// Gets memory for the unit's whole gradient. What was reduced in that memory before is finished first.
    pub(crate) fn open(&mut self, hands: &mut Hands<'_, T>, unit: usize) -> Result<()> {
        let plan = hands.plan;
        if let Home::Slot(slot) = plan.gradients[unit] {
            let sharing = |u: &usize| plan.gradients[*u] == Home::Slot(slot);
            for other in (0..plan.layout.len()).filter(sharing) {
                self.settle(hands, other)?;
            }
        }
        // The first micro-batch is reduced into the sums themselves.
        if let Some(slot) = plan.partial_slot[unit].filter(|_| self.micro_batch > 0) {
            let sharing = |u: &usize| plan.partial_slot[*u] == Some(slot);
            for other in (0..plan.layout.len()).filter(sharing) {
                self.settle(hands, other)?;
            }
        }
        for b in 0..self.units[unit].len() {
            let layout = plan.layout[unit].bucket(b);
            let bucket = &mut self.units[unit][b];
            bucket.awaited = layout.tensors().len();
            if let Home::Slot(slot) = plan.gradients[unit] {
                let whole =
                    self.slots[slot][b].take().expect("a free slot: the schedule's units never share");
                let mut whole = whole.with_len(layout.len());
                // Another unit's gradient was here; what no tensor of this one covers must be reduced as zeros. Memory
                // that is always this unit's stays zero there.
                for gap in layout.padding() {
                    hands.compute(|kernels| kernels.clear(whole.view_mut().slice(gap)))?;
                }
                bucket.state = State::Whole(whole);
            }
        }
        Ok(())
    }

    /// All contributions to the unit are made; an error of a reduction inside the backward surfaces here.
    pub fn close(&mut self, unit: usize) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        match self.units[unit].iter().position(|bucket| bucket.awaited > 0) {
            None => Ok(()),
            Some(bucket) => {
                let problem = format!(
                    "the model's backward has not said of all gradients in bucket {bucket} of unit {unit} that they are ready"
                );
                Err(Error::Config { problem })
            }
        }
    }

    /// Starts the reduction of a bucket whose tensors are all final.
    fn reduce(&mut self, plan: &Plan, comm: &Communicator, unit: usize, b: usize) -> collectives::Result<()> {
        let bucket = &mut self.units[unit][b];
        let State::Whole(whole) = mem::replace(&mut bucket.state, State::Empty) else {
            unreachable!("bucket {b} of unit {unit} was opened");
        };
        bucket.state = if !bucket.sums.is_empty() {
            let place = plan.config.place(self.micro_batch);
            let free = match place.first {
                true => bucket.sums[place.sum].take(),
                false => plan.partial_slot[unit].and_then(|slot| self.partials[slot][b].take()),
            };
            let target = free.expect("free: opening the unit settled what was reduced there");
            let target = target.with_len(plan.layout[unit].bucket(b).shard_len());
            State::Wide(comm.start_reduce_scatter_acc(whole, target, ReduceOp::Sum)?, place)
        } else if let Some(shard) = bucket.shard.take() {
            State::Into(comm.start_reduce_scatter(whole, shard, ReduceOp::Sum)?)
        } else if plan.config.stage.shards_optimizer {
            State::InPlace(comm.start_reduce_scatter_in_place(whole, ReduceOp::Sum)?)
        } else {
            State::InPlace(comm.start_all_reduce_in_place(whole, ReduceOp::Sum)?)
        };
        Ok(())
    }

    /// Finishes the unit's reductions that are under way.
    fn settle(&mut self, hands: &mut Hands<'_, T>, unit: usize) -> Result<()> {
        let plan = hands.plan;
        for b in 0..self.units[unit].len() {
            let bucket = &mut self.units[unit][b];
            let whole = match mem::replace(&mut bucket.state, State::Empty) {
                State::InPlace(pending) => hands.wait(pending)?,
                State::Into(pending) => {
                    let (whole, shard) = hands.wait(pending)?;
                    bucket.shard = Some(shard);
                    whole
                }
                State::Wide(pending, Place { sum, first: true, .. }) => {
                    let (whole, reduced) = hands.wait(pending)?;
                    bucket.sums[sum] = Some(reduced);
                    whole
                }
                State::Wide(pending, Place { sum, merges, .. }) => {
                    let (whole, reduced) = hands.wait(pending)?;
                    bucket.add(hands, sum, reduced.view())?;
                    let slot = plan.partial_slot[unit].expect("it was reduced there");
                    self.partials[slot][b] = Some(reduced);
                    for upper in (sum - merges + 1..=sum).rev() {
                        let full = bucket.sums[upper].take().expect("a sum is in it");
                        bucket.add(hands, upper - 1, full.view())?;
                        bucket.sums[upper] = Some(full);
                    }
                    whole
                }
                other => {
                    bucket.state = other;
                    continue;
                }
            };
            match plan.gradients[unit] {
                Home::Whole => bucket.state = State::Whole(whole),
                Home::Slot(slot) => self.slots[slot][b] = Some(whole),
            }
        }
        Ok(())
    }

    /// Finishes all reductions of the step. What was accumulated is rounded to where the unit's gradient always is, and
    /// handed round where every rank updates everything.
    pub(crate) fn finish(&mut self, hands: &mut Hands<'_, T>) -> Result<()> {
        let (plan, comm) = (hands.plan, hands.comm);
        for unit in 0..self.units.len() {
            self.settle(hands, unit)?;
        }
        if plan.config.accumulate == 1 {
            return Ok(());
        }
        for (u, b) in plan.buckets().filter(|&(u, _)| plan.gradients[u] == Home::Whole) {
            let bucket = &mut self.units[u][b];
            let State::Whole(mut whole) = mem::replace(&mut bucket.state, State::Empty) else {
                unreachable!("settled, and always whole");
            };
            let sum = bucket.sums[0].as_ref().expect("settled").view();
            let mut mine = whole.view_mut().slice(plan.shard(u, b));
            hands.compute_on_all(|kernels| kernels.round(sum, mine.reborrow()))?;
            bucket.state = match plan.config.stage.shards_optimizer {
                true => State::Whole(whole),
                false => State::InPlace(hands.clock.communicate(|| comm.start_all_gather_in_place(whole))?),
            };
        }
        for unit in 0..self.units.len() {
            self.settle(hands, unit)?;
        }
        Ok(())
    }

    /// This rank's reduced shard of a bucket, after `finish`.
    pub fn shard(&self, plan: &Plan, unit: usize, bucket: usize) -> Reduced<'_, T> {
        let held = &self.units[unit][bucket];
        match (&held.state, held.sums.first(), &held.shard) {
            (State::Whole(whole), ..) => Reduced::Stored(whole.view().slice(plan.shard(unit, bucket))),
            (_, Some(Some(sum)), _) => Reduced::Wide(sum.view()),
            (_, _, Some(shard)) => Reduced::Stored(shard.view()),
            _ => unreachable!("gradients are read after they are finished"),
        }
    }

    /// The reduced gradient of what this rank's optimizer updates of a bucket, after `finish`.
    pub fn owned(&self, plan: &Plan, unit: usize, bucket: usize) -> Reduced<'_, T> {
        match &self.units[unit][bucket].state {
            State::Whole(whole) if !plan.config.stage.shards_optimizer => Reduced::Stored(whole.view()),
            _ => self.shard(plan, unit, bucket),
        }
    }
}

impl<T: Float> Bucket<T> {
    /// Adds to a sum that was begun.
    fn add(&mut self, hands: &mut Hands<'_, T>, sum: usize, x: View<'_, f32>) -> Result<()> {
        let sum = self.sums[sum].as_mut().expect("a sum is in it");
        hands.compute_on_all(|kernels| kernels.add(sum.view_mut(), x))
    }
}

impl<T: Float> State<T> {
    fn whole_mut(&mut self) -> Option<&mut Buffer<T>> {
        match self {
            State::Whole(whole) => Some(whole),
            _ => None,
        }
    }
}

/// Gradients as the model's backward sees them.
pub(crate) struct Borrowed<'a, T: Float> {
    /// Where each tensor is.
    pub plan: &'a Plan,
    /// Who reduces.
    pub meanwhile: &'a Meanwhile<'a>,
    /// The values.
    pub grads: &'a mut Grads<T>,
}

impl<T: Float> Gradients<T> for Borrowed<'_, T> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        self.meanwhile.look();
        let (bucket, range) = self.plan.layout[unit].locate(tensor);
        let whole = self.grads.units[unit][bucket].state.whole_mut();
        whole.expect("gradients are written between open and ready").view_mut().slice(range)
    }

    fn ready(&mut self, unit: usize, tensor: usize) {
        let (b, _) = self.plan.layout[unit].locate(tensor);
        let bucket = &mut self.grads.units[unit][b];
        bucket.awaited = bucket.awaited.checked_sub(1).expect("a gradient is ready once");
        if bucket.awaited == 0 && self.grads.failed.is_none() {
            let Borrowed { plan, meanwhile, grads } = self;
            grads.failed = meanwhile.communicate(|comm| grads.reduce(plan, comm, unit, b)).err();
        }
        self.meanwhile.look();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::hands::Clock;
    use crate::recorder::{Nobody, Recorder, backward, units};
    use crate::stage::Stage;
    use collectives::DType;

    #[test]
    fn reductions_of_the_first_micro_batch_are_awaited_for_no_place_that_they_do_not_take() {
        let (units, config) = (units(8), Config { stage: Stage::ALL[0], accumulate: 2, ..Config::default() });
        let plan = &Plan::new(&units, DType::F32, &config, 0, 1);
        assert!(
            plan.partial_slots.len() < units.len(),
            "units share places for a shard on its way to the sum"
        );
        let comm = &Communicator::threads(1).remove(0);
        let mut grads = Grads::<f32>::new(plan, comm, &Account::default(), &Account::default()).unwrap();
        let (mut kernels, mut clock) = (Recorder::default(), Clock::default());
        let mut hands = Hands { plan, comm, model: &Nobody, kernels: &mut kernels, clock: &mut clock };
        // How many units' reductions are under way after each micro-batch.
        let under_way = [0, 1].map(|micro_batch| {
            backward(&mut grads, &mut hands, micro_batch);
            grads.units.iter().filter(|unit| matches!(unit[0].state, State::Wide(..))).count()
        });
        assert_eq!(under_way, [units.len(), plan.partial_slots.len()]);
    }
}
