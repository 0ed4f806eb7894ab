//! One rank's part of measuring an operation over a sweep of sizes.

use super::args::{Average, Blocking, Calls};
use super::calls::{self, Party, Placement, Work};
use super::cases::Cases;
use super::device;
use super::exact::{self, Data, Exact, Expectation, with_type};
use super::native;
use super::operation::{Operation, bandwidth};
use super::plan::{Algo, Plan};
use super::record::{Measured, Row};
use super::slot::Slot;
use super::statistics::{Summary, average};
use super::table::{Half, Label, dtype_name};
use crate::about::now;
use crate::failure::{Failure, Result};
use collectives::device::Queue;
use collectives::schedule::{Algorithm, Call, Local, Schedule};
use collectives::{Communicator, DType, ReduceOp};
use std::time::Instant;

/// What is done with a row, which rank 0 has, as soon as it is complete: a collective, that says whether anybody sees it.
pub type Show<'a> = dyn FnMut(Option<Row>) -> Result<bool> + 'a;

/// Measures everything that `plan` asks for, in these cases.
///
/// # Errors
/// What a call or the transport said.
pub fn run(plan: &Plan, cases: &Cases, party: &Party, show: &mut Show<'_>) -> Result<()> {
    for (dtype, ops) in &cases.of {
        let seen = with_type!(*dtype, T => typed::<T>(plan, ops, party, show)?);
        if !seen && plan.only_shown {
            break;
        }
    }
    Ok(())
}

/// Makes the communicator take the algorithm that was asked for.
///
/// # Errors
/// It cannot carry the operation between these ranks: of all ranks alike, and with those that can.
pub fn force(plan: &Plan, comm: &Communicator) -> Result<()> {
    let Algo::Named(algorithm) = plan.algo else { return Ok(()) };
    let kind = plan.operation.kind();
    let possible = comm.algorithms(kind);
    if possible.contains(&algorithm) {
        return Ok(comm.force(kind, Some(algorithm))?);
    }
    Err(Failure::usage(format!(
        "--algo {algorithm}: over {} with {} ranks, {} can be carried by {}, or auto",
        comm.transport_name(),
        comm.size(),
        plan.operation.name(),
        possible.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
    )))
}

/// Whether the algorithm that was asked for can carry the operation between several ranks of some machine.
///
/// # Errors
/// It cannot, and with those that can.
pub fn possible_anywhere(plan: &Plan) -> Result<()> {
    let Algo::Named(algorithm) = plan.algo else { return Ok(()) };
    let possible = Algorithm::anywhere(plan.operation.kind());
    match possible.contains(&algorithm) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "--algo {algorithm}: {} of several ranks can be carried by {}, or auto",
            plan.operation.name(),
            possible.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
        ))),
    }
}

/// The types and reductions of `plan`, as far as these ranks can carry them.
///
/// # Errors
/// None of them.
pub fn cases(plan: &Plan, party: &Party) -> Result<Cases> {
    let largest = plan.repeats.sweep.largest();
    Cases::new(plan, &|dtype, op| {
        // What a library takes of few elements it may not take of the most.
        let count = plan.operation.counts(largest, dtype.size(), party.comm.size()).count;
        let call = Call { op: op.unwrap_or(ReduceOp::Sum), ..Call::new(plan.operation.kind(), dtype, count) };
        match &party.native {
            Some(native) => native::obstacle(native, &call),
            None if plan.check == 0 => None,
            None => {
                let data = Data { seed: 0, ranks: party.comm.size(), op, foreign: party.foreign() };
                with_type!(dtype, T => data.obstacle::<T>())
            }
        }
    })
}

/// Bytes of the buffers of all ranks together.
pub fn footprint(plan: &Plan, native: bool, ranks: usize) -> u64 {
    let largest = plan.repeats.sweep.largest();
    let of = |element: usize| {
        let all = works(plan, largest, element, native, ranks);
        let counts = plan.operation.counts(largest, element, ranks);
        // What a check compares with, on each rank.
        let expected = exact::footprint(plan.operation, counts, element);
        calls::footprint(&all, element, ranks).saturating_add(expected.saturating_mul(ranks as u64))
    };
    let most = plan.dtypes.iter().map(|dtype| of(dtype.size())).max();
    most.unwrap_or(0).saturating_mul(plan.aggregate as u64)
}

/// Bytes that all ranks together have in the largest call beside their buffers: contributions and messages on their way.
/// Algorithms by which everybody gets everybody's input have all of them at once.
///
/// # Errors
/// A call's.
pub fn scratch(plan: &Plan, comm: &Communicator) -> Result<u64> {
    let (largest, group, registered) = (plan.repeats.sweep.largest(), comm.group(), plan.registered(false));
    let local = Local { send_registered: registered, recv_registered: registered };
    let forced = match plan.algo {
        Algo::Named(algorithm) => Some(algorithm),
        Algo::Auto | Algo::Native => None,
    };
    let of = |dtype: &DType| {
        let works = works(plan, largest, dtype.size(), false, comm.size());
        let calls = works.iter().map(|work| with_type!(*dtype, T => work.call::<T>(comm)));
        calls.map(|call| Schedule::new(call, &group, local, forced).scratch).max()
    };
    let most = plan.dtypes.iter().filter_map(of).max().unwrap_or(0);
    // However many are in flight, two at most have such memory.
    let mut all = [most as u64 * plan.aggregate.min(2) as u64];
    comm.all_reduce_in_place(&mut all[..], ReduceOp::Sum)?;
    Ok(all[0])
}

/// All calls of this size.
fn works(plan: &Plan, bytes: usize, element: usize, native: bool, ranks: usize) -> Vec<Work> {
    let largest = work(plan, bytes, element, ranks);
    let placements = plan.operation.placements(plan.calls, native);
    let roots = plan.roots(ranks);
    let all = roots.iter().flat_map(|root| placements.map(|placement| (root.unwrap_or(0), placement)));
    all.map(|(root, placement)| Work { root, placement, ..largest }).collect()
}

/// A call of this size, as far as it does not differ within a row of the table.
fn work(plan: &Plan, bytes: usize, element: usize, ranks: usize) -> Work {
    Work { messages: plan.messages, ..Work::new(plan.operation, plan.calls, bytes, element, ranks) }
}

/// Everything for one element type, with buffers that are allocated once; whether anybody sees the rows, as far as that
/// matters.
fn typed<T: Exact>(
    plan: &Plan,
    ops: &[Option<ReduceOp>],
    party: &Party,
    show: &mut Show<'_>,
) -> Result<bool> {
    let comm = &party.comm;
    let (rank, ranks) = (comm.rank(), comm.size());
    let sweep = plan.repeats.sweep;
    let roots = plan.roots(ranks);
    let native = party.native.is_some();
    let placements = plan.operation.placements(plan.calls, native);
    let work = |bytes: usize, op: Option<ReduceOp>, root: Option<usize>, placement: Placement| Work {
        placement,
        native,
        op: op.unwrap_or(ReduceOp::Sum),
        root: root.unwrap_or(0),
        ..work(plan, bytes, size_of::<T>(), ranks)
    };
    let longest = works(plan, sweep.largest(), size_of::<T>(), native, ranks);
    let (send, receive) = Slot::<T>::capacity(longest.into_iter(), rank);
    // What is on a device comes from it, registered or not.
    let taken = party.device.is_some() || plan.registered(false);
    let slots = (0..plan.aggregate).map(|_| Slot::<T>::new(comm, send, receive, taken));
    let mut bench = Bench { plan, party, slots: slots.collect::<Result<Vec<_>>>()?, seed: 0 };
    for &op in ops {
        for &root in &roots {
            let (mut done, mut seen) = (0, true);
            // As often as was asked for, or else as long as anybody sees what rank 0 prints.
            while plan.cycles.map_or(seen, |cycles| done < cycles) {
                done += 1;
                for bytes in sweep.sizes() {
                    let mut half = |place| bench.half(bytes, &work(bytes, op, root, place), op);
                    let (out_of_place, in_place) = (half(placements[0])?, half(placements[1])?);
                    let counts = plan.operation.counts(bytes, size_of::<T>(), ranks);
                    let label = Label {
                        bytes: counts.bytes(size_of::<T>()),
                        count: counts.count,
                        dtype: dtype_name(T::DTYPE),
                        op: plan.op_name(op),
                        root: root.map_or(-1, |r| r as i64),
                    };
                    let row = (rank == 0).then(|| Row { label, out_of_place, in_place, printed: now() });
                    seen = show(row)?;
                    if plan.only_shown && !seen {
                        return Ok(false);
                    }
                }
            }
        }
    }
    Ok(true)
}

struct Bench<'a, T: Exact> {
    plan: &'a Plan,
    party: &'a Party,
    slots: Vec<Slot<T>>,
    /// Of the data of the next check.
    seed: u64,
}

impl<T: Exact> Bench<'_, T> {
    fn half(&mut self, bytes: usize, work: &Work, op: Option<ReduceOp>) -> Result<Measured> {
        let (plan, comm) = (self.plan, &self.party.comm);
        for slot in &mut self.slots {
            slot.fit(work, comm.rank());
        }
        self.fill(work, op)?;
        for _ in 0..plan.repeats.untimed(bytes) {
            work.several(self.party, &mut self.slots)?;
        }
        let mine = self.times(work, plan.repeats.iterations(bytes))?;
        let timed = |rank: &usize| work.is_timed(*rank, comm.size());
        let part = (timed(&comm.rank()), (0..comm.size()).filter(timed).count());
        let times = over_some(comm, &mine, plan.average, part)?;
        // What nccl-tests has in these columns; one more reduction, for those who read them.
        let slowest =
            plan.columns.per_call.then(|| over_some(comm, &mine, Average::Max, part)).transpose()?;
        let per_call = slowest.as_deref().and_then(Summary::of);
        let each = if plan.each_rank(comm.size()) { each(comm, &mine)? } else { Vec::new() };
        // Each rank's own mean comes first: of its single calls the fastest, or slowest, would be nobody's time.
        let seconds = over_some(comm, &[average(&mine)], plan.average, part)?[0];
        let wrong = self.check(work, op)?;
        let size = work.counts.bytes(size_of::<T>());
        let (algorithm_bandwidth, bus_bandwidth) = bandwidth(plan.operation, size, seconds, comm.size());
        let (algorithm, why) = match &self.party.native {
            Some(native) => ("native".to_owned(), native::why(native, &work.call::<T>(comm))),
            None if self.party.device.is_some() => {
                let foreign = self.party.foreign() && work.operation.reduces();
                let (algorithm, why) = device::algorithm(work.operation, foreign);
                (algorithm.to_owned(), why.to_owned())
            }
            None => {
                let choice = comm.choice(&work.call::<T>(comm))?;
                (choice.algorithm.to_string(), choice.reason(work.operation.kind()))
            }
        };
        let calls = Summary::of(&times).ok_or_else(|| Failure::run("no call was timed"))?;
        // Of a long run they would be all memory.
        let (times, slowest) = if plan.json { (times, slowest) } else { (Vec::new(), None) };
        Ok(Measured {
            half: Half { seconds, algorithm_bandwidth, bus_bandwidth, wrong, per_call },
            times,
            calls,
            slowest,
            each,
            algorithm,
            why,
        })
    }

    /// New data in all slots.
    fn fill(&mut self, work: &Work, op: Option<ReduceOp>) -> Result<Vec<Expectation<T>>> {
        let party = self.party;
        let (rank, ranks) = (party.comm.rank(), party.comm.size());
        let seed = &mut self.seed;
        let fill = |slot: &mut Slot<T>| {
            *seed += 1;
            let data = Data { seed: *seed, ranks, op, foreign: party.foreign() };
            let expected =
                Expectation::new(work.operation, &data, rank, work.giver(rank, ranks), work.counts);
            slot.fill(work, rank, party.queue(), &expected)?;
            Ok(expected)
        };
        self.slots.iter_mut().map(fill).collect()
    }

    /// Seconds of each timed iteration on this rank, per call, or of each of the messages that follow on each other in one.
    fn times(&mut self, work: &Work, iterations: usize) -> Result<Vec<f64>> {
        let Bench { plan, party, slots, .. } = self;
        let comm = &party.comm;
        let mut stamps = Vec::with_capacity(iterations);
        let parts = slots.len() * work.messages.in_turn();
        if let Some(gpus) = &party.device
            && plan.blocking == Blocking::Streaming
        {
            return device::times(gpus, comm, (iterations, parts), || work.several(party, slots));
        }
        let settled = || party.queue().map_or(Ok(()), |queue| queue.clone().synchronize());
        let iteration = |slots: &mut [Slot<T>]| -> Result<()> {
            match plan.blocking {
                Blocking::Streaming | Blocking::Isolated => work.several(party, slots),
                Blocking::Wait => slots.iter_mut().try_for_each(|slot| {
                    work.once(party, slot)?;
                    Ok(settled()?)
                }),
                Blocking::Barrier => slots.iter_mut().try_for_each(|slot| {
                    work.once(party, slot)?;
                    settled()?;
                    Ok(comm.barrier()?)
                }),
            }
        };
        // Calls before, which a device may still be at, are not of the first.
        settled()?;
        comm.barrier()?;
        let mut last = Instant::now();
        for _ in 0..iterations {
            iteration(slots)?;
            settled()?;
            let now = Instant::now();
            stamps.push((now - last).as_secs_f64() / parts as f64);
            last = now;
            if plan.blocking == Blocking::Isolated {
                comm.barrier()?;
                last = Instant::now();
            }
        }
        Ok(stamps)
    }

    /// Wrong elements on all ranks in calls with new data; None where there is nothing to check.
    fn check(&mut self, work: &Work, op: Option<ReduceOp>) -> Result<Option<u64>> {
        if self.plan.check == 0 || work.operation == Operation::Barrier {
            return Ok(None);
        }
        let party = self.party;
        for _ in 0..self.plan.check {
            let expected = self.fill(work, op)?;
            work.several(party, &mut self.slots)?;
            let mut found = 0u64;
            for (slot, expected) in self.slots.iter().zip(&expected) {
                found += slot.wrong(work, &party.comm, party.queue(), expected)?;
            }
            let mut all = [0];
            party.comm.all_reduce(&[found][..], &mut all[..], ReduceOp::Sum)?;
            if all[0] > 0 {
                return Ok(Some(all[0]));
            }
        }
        Ok(Some(0))
    }
}

/// Every rank's timings as one, by iteration: the same on all ranks.
pub fn over_ranks(comm: &Communicator, mine: &[f64], average: Average) -> Result<Vec<f64>> {
    over_some(comm, mine, average, (true, comm.size()))
}

/// Each rank's timings; on rank 0.
fn each(comm: &Communicator, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let lead = comm.rank() == 0;
    let mut all = vec![0.0; if lead { mine.len() * comm.size() } else { 0 }];
    comm.gather(mine, lead.then_some((&mut all[..]).into()), 0)?;
    Ok(all.chunks_exact(mine.len()).map(<[f64]>::to_vec).collect())
}

/// The same as [`over_ranks`] of those ranks that take part, where others have nothing to do: whether this one does, and how
/// many do. The first does.
fn over_some(
    comm: &Communicator,
    mine: &[f64],
    average: Average,
    (part, parts): (bool, usize),
) -> Result<Vec<f64>> {
    let (op, nothing, scale) = match average {
        Average::First => {
            let mut first = mine.to_vec();
            comm.broadcast(&mut first[..], 0)?;
            return Ok(first);
        }
        Average::Min => (ReduceOp::Min, f64::INFINITY, 1.0),
        Average::Max => (ReduceOp::Max, 0.0, 1.0),
        Average::Mean => (ReduceOp::Sum, 0.0, 1.0 / parts as f64),
    };
    let mut all = vec![nothing; mine.len()];
    if part {
        all.copy_from_slice(mine);
    }
    comm.all_reduce_in_place(&mut all[..], op)?;
    all.iter_mut().for_each(|time| *time *= scale);
    Ok(all)
}

/// A sentence when the two halves of a row measure the same thing.
pub fn remark(operation: Operation, calls: Calls, native: bool) -> Option<String> {
    let [first, second] = operation.placements(calls, native);
    (first == second).then(|| match operation {
        Operation::Broadcast => "broadcast works in one buffer: both halves measure that".to_owned(),
        Operation::Barrier => "barrier has no data: both halves measure the same".to_owned(),
        Operation::SendRecv => "send_recv needs two buffers: both halves measure that".to_owned(),
        _ => "MPI's form of it here is out of place: both halves measure that".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::tests::plan;
    use collectives::Options;
    use collectives::trace::{Of, Trace};

    /// Bytes beside their buffers of so many ranks with these flags.
    fn beside(flags: &str, ranks: usize) -> Vec<u64> {
        let plan = &plan(flags).expect(flags);
        Communicator::on_threads(ranks, Options::default(), |comm| scratch(plan, &comm).unwrap())
    }

    #[test]
    fn a_call_of_each_placement_is_not_timed_whatever_was_asked_for() {
        for (flags, calls) in [("-w 0", 1 + 3), ("-w 1", 1 + 3), ("-w 5", 5 + 3)] {
            let plan = plan(&format!("all_gather -b 1K -e 1K -n 3 -c 0 {flags}")).unwrap();
            Communicator::on_threads(2, Options::default(), |comm| {
                let trace = Trace::new(100);
                comm.trace(Some(&trace));
                trace.want(true);
                let party = Party { comm: comm.clone(), native: None, device: None };
                let cases = cases(&plan, &party).unwrap();
                run(&plan, &cases, &party, &mut |_| Ok(true)).unwrap();
                let (spans, _) = trace.take();
                let gathers = spans.iter().filter(
                    |span| matches!(span.of, Of::Call(call) if call.to_string().starts_with("all_gather")),
                );
                assert_eq!(gathers.count(), 2 * calls, "{flags}");
            });
        }
    }

    #[test]
    fn whole_inputs_of_all_others_count() {
        let inputs = |ranks: u64| ranks * (ranks - 1) * (8 << 20);
        for (flags, most) in [("", 1), ("-m 8", 2)] {
            let flags = format!("all_reduce -b 8M -e 8M --algo exchange-all {flags}");
            for found in beside(&flags, 5) {
                assert!(
                    (most * inputs(5)..most * inputs(5) + (1 << 16)).contains(&found),
                    "{flags}: {found}"
                );
            }
        }
        for flags in
            ["all_reduce -b 8M -e 8M --algo pairwise-rs-ag", "all_reduce -e 8M", "barrier", "send_recv"]
        {
            assert!(beside(flags, 5).iter().all(|&found| found < inputs(5) / 4), "{flags}");
        }
    }
}
