//! Parameters: gathered before use, released after, published after an update.
//!
//! | stage shards parameters | between uses | `prefetch`, `gather` | `release` | `publish` |
//! |---|---|---|---|---|
//! | no | whole | wait for the last publish | nothing | all-gather the updated shards in place |
//! | yes | this rank's shard | all-gather the shards into a slot | the slot is free again | nothing |

use crate::error::Result;
use crate::hands::Meanwhile;
use crate::plan::{Home, Plan};
use collectives::{Account, Buffer, Communicator, Float, Pending, Priority, View, ViewMut};
use models::Weights;
use std::mem;

/// One rank's parameters.
pub struct Params<T: Float> {
    /// Its gathers go before the reductions of gradients: the next unit's pass waits for them.
    comm: Communicator,
    /// Per unit, per bucket.
    units: Vec<Vec<State<T>>>,
    /// Per slot, per bucket position: memory for gathered buckets, `None` while in use.
    slots: Vec<Vec<Option<Buffer<T>>>>,
}

/// One bucket.
enum State<T: Float> {
    /// Held whole.
    Whole(Buffer<T>),
    /// Held whole; the other ranks' updates are arriving.
    Publishing(Pending<Buffer<T>>),
    /// Held as a shard.
    Shard(Buffer<T>),
    /// Held as a shard; the whole is arriving in a slot.
    Gathering(Pending<(Buffer<T>, Buffer<T>)>),
    /// Held as a shard, and whole in a slot.
    Gathered { shard: Buffer<T>, whole: Buffer<T> },
    /// Only inside a method, or after an error.
    Moving,
}

impl<T: Float> Params<T> {
    /// Zeroed parameters: shards and whole units on the account `held`, slots on `slots`.
    pub fn new(plan: &Plan, comm: &Communicator, held: &Account, slots: &Account) -> Result<Self> {
        let bucket = |unit: usize, b: usize| -> Result<State<T>> {
            let bucket = plan.layout[unit].bucket(b);
            Ok(match plan.weights[unit] {
                Home::Whole => State::Whole(comm.alloc(bucket.len())?.booked(held)),
                Home::Slot(_) => State::Shard(comm.alloc(bucket.shard_len())?.booked(held)),
            })
        };
        let mut units: Vec<Vec<State<T>>> = (0..plan.layout.len()).map(|_| Vec::new()).collect();
        for (u, b) in plan.buckets() {
            units[u].push(bucket(u, b)?);
        }
        let slots = alloc_slots(comm, &plan.weight_slots, slots)?;
        Ok(Params { comm: comm.with_priority(Priority::High), units, slots })
    }

    /// Starts to make the unit whole.
    pub fn prefetch(&mut self, plan: &Plan, unit: usize) -> Result<()> {
        let Home::Slot(slot) = plan.weights[unit] else { return Ok(()) };
        for (b, state) in self.units[unit].iter_mut().enumerate() {
            *state = match mem::replace(state, State::Moving) {
                State::Shard(shard) => {
                    let whole =
                        self.slots[slot][b].take().expect("a free slot: the schedule's units never share");
                    let whole = whole.with_len(plan.layout[unit].bucket(b).len());
                    State::Gathering(self.comm.start_all_gather(shard, whole)?)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Makes the unit whole, waiting for what is under way.
    pub fn gather(&mut self, plan: &Plan, unit: usize) -> Result<()> {
        self.prefetch(plan, unit)?;
        for state in &mut self.units[unit] {
            *state = match mem::replace(state, State::Moving) {
                State::Publishing(pending) => State::Whole(pending.wait()?),
                State::Gathering(pending) => {
                    let (shard, whole) = pending.wait()?;
                    State::Gathered { shard, whole }
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Whether the unit is whole, with nothing to wait for.
    pub fn is_whole(&self, unit: usize) -> bool {
        self.units[unit].iter().all(|state| matches!(state, State::Whole(_) | State::Gathered { .. }))
    }

    /// The unit is not needed for a while.
    pub fn release(&mut self, plan: &Plan, unit: usize) {
        let Home::Slot(slot) = plan.weights[unit] else { return };
        for (b, state) in self.units[unit].iter_mut().enumerate() {
            *state = match mem::replace(state, State::Moving) {
                State::Gathered { shard, whole } => {
                    self.slots[slot][b] = Some(whole);
                    State::Shard(shard)
                }
                other => other,
            };
        }
    }

    /// The part of a bucket that this rank's optimizer updates.
    pub fn owned_mut(&mut self, plan: &Plan, unit: usize, bucket: usize) -> ViewMut<'_, T> {
        match &mut self.units[unit][bucket] {
            State::Whole(whole) => whole.view_mut().slice(plan.owned(unit, bucket)),
            State::Shard(shard) => shard.view_mut(),
            _ => unreachable!("parameters are updated between passes"),
        }
    }

    /// This rank's shard of a bucket, between passes.
    pub fn shard(&self, plan: &Plan, unit: usize, bucket: usize) -> View<'_, T> {
        match &self.units[unit][bucket] {
            State::Whole(whole) => whole.view().slice(plan.shard(unit, bucket)),
            State::Shard(shard) => shard.view(),
            _ => unreachable!("parameters are shown between passes"),
        }
    }

    /// This rank's shard of the bucket has changed: tells the ranks that hold it whole.
    pub fn publish(&mut self, unit: usize, bucket: usize) -> Result<()> {
        let state = &mut self.units[unit][bucket];
        *state = match mem::replace(state, State::Moving) {
            State::Whole(whole) => State::Publishing(self.comm.start_all_gather_in_place(whole)?),
            other => other,
        };
        Ok(())
    }
}

/// Memory for every bucket position of every slot.
pub(crate) fn alloc_slots<T: Float>(
    comm: &Communicator,
    slots: &[Vec<usize>],
    account: &Account,
) -> Result<Vec<Vec<Option<Buffer<T>>>>> {
    let slot = |capacities: &Vec<usize>| -> Result<Vec<Option<Buffer<T>>>> {
        capacities.iter().map(|&n| Ok(Some(comm.alloc(n)?.booked(account)))).collect()
    };
    slots.iter().map(slot).collect()
}

/// Parameters as the model sees them.
pub(crate) struct Lent<'a, T: Float> {
    /// Where each tensor is.
    pub plan: &'a Plan,
    /// The values.
    pub params: &'a Params<T>,
    /// What goes on as the model asks for them.
    pub meanwhile: &'a Meanwhile<'a>,
}

impl<T: Float> Weights<T> for Lent<'_, T> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self.meanwhile.look();
        let (bucket, range) = self.plan.layout[unit].locate(tensor);
        match &self.params.units[unit][bucket] {
            State::Whole(whole) | State::Gathered { whole, .. } => whole.view().slice(range),
            _ => unreachable!("unit {unit} is used only while it is gathered"),
        }
    }
}
