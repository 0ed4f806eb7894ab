//! One micro-batch as a list of actions: what is gathered, computed, released and reduced, in which order.
//!
//! The list is a value. It depends only on the model's units and on the plan, never on timing, so every rank
//! has the same one; it can be printed, replayed and played by a simulator. The stage does not change the
//! order: on stages that hold a unit whole, gathering it waits for what other ranks have updated of it and is still on
//! its way, and releasing it does nothing.

use models::Unit;
use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::ops::Range;

/// One action of a micro-batch on the unit it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start the all-gather of the unit's parameters, if they are sharded.
    Prefetch(usize),
    /// Wait until the unit's parameters are whole.
    Gather(usize),
    /// Forward of the unit.
    Forward(usize),
    /// Get memory for the unit's whole gradient.
    Open(usize),
    /// Backward of the unit. Buckets whose tensors become ready start their reduce-scatter inside it.
    Backward(usize),
    /// Every contribution to the unit's gradient has been made: its reduction is under way.
    Close(usize),
    /// The unit's parameters are not needed for a while: give their memory back.
    Release(usize),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Prefetch(u) => write!(f, "prefetch {u}"),
            Action::Gather(u) => write!(f, "gather {u}"),
            Action::Forward(u) => write!(f, "forward {u}"),
            Action::Open(u) => write!(f, "open {u}"),
            Action::Backward(u) => write!(f, "backward {u}"),
            Action::Close(u) => write!(f, "close {u}"),
            Action::Release(u) => write!(f, "release {u}"),
        }
    }
}

/// The actions of one pass, and how long each unit's memory is in use.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// In execution order.
    pub actions: Vec<Action>,
    /// Per unit: the compute steps during which its whole parameters are held, prefetching included.
    pub weights_live: Vec<Vec<Range<usize>>>,
    /// Per unit: the compute steps during which its whole gradient is held, its reduction included.
    pub gradients_live: Vec<Option<Range<usize>>>,
}

/// One forward or backward of a unit: a tick of the schedule's clock.
#[derive(Clone, Copy)]
struct Compute {
    unit: usize,
    backward: bool,
}

impl Schedule {
    /// Forward and backward of one micro-batch. The last unit has no forward of its own: its backward includes it.
    pub fn training(units: &[Unit], prefetch: bool) -> Self {
        let n = units.len();
        let forward = (0..n - 1).map(|unit| Compute { unit, backward: false });
        let backward = (0..n).rev().map(|unit| Compute { unit, backward: true });
        Schedule::of(units, prefetch, forward.chain(backward).collect())
    }

    /// Forward of units `0..count`.
    pub fn forward(units: &[Unit], count: usize, prefetch: bool) -> Self {
        let compute = (0..count).map(|unit| Compute { unit, backward: false }).collect();
        Schedule::of(units, prefetch, compute)
    }

    fn of(units: &[Unit], prefetch: bool, compute: Vec<Compute>) -> Self {
        // Which units' weights a step reads, its own first.
        let reads = |c: &Compute| -> Vec<usize> {
            // The last unit's backward includes its forward, which reads them.
            let forward = !c.backward || c.unit + 1 == units.len();
            let own = (forward || units[c.unit].backward_reads).then_some(c.unit);
            own.into_iter().chain(units[c.unit].uses.iter().copied()).collect()
        };
        let needs: Vec<Vec<usize>> = compute.iter().map(reads).collect();
        let needed = |step: usize, unit: usize| needs.get(step).is_some_and(|n| n.contains(&unit));

        // A gradient is whole from the first backward that contributes to it to the last.
        let contributes = |c: &Compute| -> BTreeSet<usize> {
            let all = || [c.unit].into_iter().chain(units[c.unit].uses.iter().copied());
            if c.backward { all().collect() } else { BTreeSet::new() }
        };
        let mut spans: Vec<Option<Range<usize>>> = vec![None; units.len()];
        for (step, c) in compute.iter().enumerate() {
            for unit in contributes(c) {
                spans[unit].get_or_insert(step..step).end = step + 1;
            }
        }

        let mut actions = Vec::new();
        let mut weights_live = vec![Vec::<Range<usize>>::new(); units.len()];
        let mut begun: Vec<Option<usize>> = vec![None; units.len()];
        for (step, c) in compute.iter().enumerate() {
            for &unit in &needs[step] {
                begun[unit].get_or_insert(step);
                actions.push(Action::Gather(unit));
            }
            if prefetch {
                for &unit in needs.get(step + 1).into_iter().flatten() {
                    if begun[unit].is_none() {
                        begun[unit] = Some(step);
                        actions.push(Action::Prefetch(unit));
                    }
                }
            }
            if c.backward {
                let gradients = contributes(c);
                let opened = |u: &usize| spans[*u].as_ref().is_some_and(|s| s.start == step);
                actions.extend(gradients.iter().copied().filter(opened).map(Action::Open));
                actions.push(Action::Backward(c.unit));
                let closed = |u: &usize| spans[*u].as_ref().is_some_and(|s| s.end == step + 1);
                actions.extend(gradients.iter().copied().filter(closed).map(Action::Close));
            } else {
                actions.push(Action::Forward(c.unit));
            }
            // A unit that would be gathered again in the next step anyway is kept: that saves a transfer.
            let ahead = if prefetch { 2 } else { 1 };
            for unit in BTreeSet::from_iter(needs[step].iter().copied()) {
                if !(1..=ahead).any(|k| needed(step + k, unit)) {
                    let start = begun[unit].take().expect("a needed unit was gathered");
                    weights_live[unit].push(start..step + 1);
                    actions.push(Action::Release(unit));
                }
            }
        }
        // Its reduction overlaps the next backward, so a gradient's memory is in use one step longer.
        let gradients_live = spans.into_iter().map(|s| s.map(|s| s.start..s.end + 1)).collect();
        Schedule { actions, weights_live, gradients_live }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for action in &self.actions {
            writeln!(f, "{action}")?;
        }
        Ok(())
    }
}

/// Gives every unit a slot such that units in use at the same time never share one, and the slots are few and small: the
/// largest unit chooses first, and each takes the first slot that is free whenever it is in use. `sizes[u]` of 0 needs none.
///
/// Returns the slot of each unit and the number of slots.
pub fn assign_slots(sizes: &[usize], live: &[Vec<Range<usize>>]) -> (Vec<Option<usize>>, usize) {
    let steps = |unit: usize| live[unit].iter().cloned().flatten();
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&u| sizes[u] > 0).collect();
    order.sort_by_key(|&u| (std::cmp::Reverse(sizes[u]), u));
    // Of each slot, the compute steps in which one of its units is in use.
    let mut slots: Vec<HashSet<usize>> = Vec::new();
    let mut slot_of = vec![None; sizes.len()];
    for unit in order {
        // Larger units came first, so a slot grows only where this one has more buckets or a larger one at its place.
        let free = slots.iter().position(|taken| steps(unit).all(|step| !taken.contains(&step)));
        let slot = free.unwrap_or_else(|| {
            slots.push(HashSet::new());
            slots.len() - 1
        });
        slots[slot].extend(steps(unit));
        slot_of[unit] = Some(slot);
    }
    (slot_of, slots.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(n: usize, tied: bool) -> Vec<Unit> {
        let unit = |i: usize| Unit {
            name: format!("u{i}"),
            tensors: Vec::new(),
            uses: if tied && i == n - 1 { vec![0] } else { Vec::new() },
            backward_reads: i > 0,
        };
        (0..n).map(unit).collect()
    }

    #[test]
    fn one_step_of_three_units_reads_as_expected() {
        let s = Schedule::training(&chain(3, false), true);
        let expected = "gather 0\nprefetch 1\nforward 0\nrelease 0\n\
                        gather 1\nprefetch 2\nforward 1\n\
                        gather 2\nopen 2\nbackward 2\nclose 2\nrelease 2\n\
                        gather 1\nopen 1\nbackward 1\nclose 1\nrelease 1\n\
                        open 0\nbackward 0\nclose 0\n";
        assert_eq!(s.to_string(), expected);
    }

    #[test]
    fn a_tied_table_is_whole_from_the_head_to_the_embedding() {
        let s = Schedule::training(&chain(4, true), true);
        assert_eq!(s.weights_live[0].len(), 2);
        assert_eq!(s.gradients_live[0], Some(3..8));
        assert_eq!(s.gradients_live[3], Some(3..5));
    }

    /// Units are compared with each other.
    fn naive_slots(sizes: &[usize], live: &[Vec<Range<usize>>]) -> (Vec<Option<usize>>, usize) {
        let overlap = |a: usize, b: usize| {
            live[a].iter().any(|x| live[b].iter().any(|y| x.start < y.end && y.start < x.end))
        };
        let mut order: Vec<usize> = (0..sizes.len()).filter(|&u| sizes[u] > 0).collect();
        order.sort_by_key(|&u| (std::cmp::Reverse(sizes[u]), u));
        let (mut slots, mut slot_of) = (Vec::<Vec<usize>>::new(), vec![None; sizes.len()]);
        for unit in order {
            let free = slots.iter().position(|members| members.iter().all(|&m| !overlap(m, unit)));
            let slot = free.unwrap_or(slots.len());
            slots.resize(slots.len().max(slot + 1), vec![]);
            slots[slot].push(unit);
            slot_of[unit] = Some(slot);
        }
        (slot_of, slots.len())
    }

    #[test]
    fn slots_are_those_that_comparing_all_units_gives() {
        for (n, tied, prefetch) in (1..40)
            .flat_map(|n| [(false, false), (false, true), (true, true)].map(|(t, p)| (n, t && n > 1, p)))
        {
            let s = Schedule::training(&chain(n, tied), prefetch);
            let gradients: Vec<_> =
                s.gradients_live.iter().map(|live| live.iter().cloned().collect()).collect();
            let sizes: Vec<usize> = (0..n).map(|u| u * 7 % 5).collect();
            for live in [&s.weights_live, &gradients] {
                assert_eq!(assign_slots(&sizes, live), naive_slots(&sizes, live), "{n} units");
            }
        }
    }

    #[test]
    fn slots_never_share_and_cost_no_more_than_one_big_and_two_small() {
        for (n, prefetch) in [(3, true), (4, true), (7, true), (8, true), (9, false), (12, false)] {
            let units = chain(n, false);
            let s = Schedule::training(&units, prefetch);
            let sizes: Vec<usize> = (0..n).map(|u| if u == 0 || u == n - 1 { 100 } else { 10 }).collect();
            let (slot_of, count) = assign_slots(&sizes, &s.weights_live);
            for a in 0..n {
                for b in 0..a {
                    let apart = s.weights_live[a]
                        .iter()
                        .all(|x| s.weights_live[b].iter().all(|y| x.end <= y.start || y.end <= x.start));
                    assert!(apart || slot_of[a] != slot_of[b], "units {a} and {b} of {n}");
                }
            }
            assert!(count <= 3, "{count} slots for {n} units");
        }
    }
}
