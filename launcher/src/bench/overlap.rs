//! `bench overlap`: how much of a collective hides behind matrix products, by the formulas of OSU and IMB, and
//! what it costs them.

mod load;
mod row;

use super::args::{Average, Bind, Calls, OverlapArgs, Overlapped};
use super::calls::{self, Party, Slot, Work};
use super::exact::{Data, Exact, Expectation, with_type};
use super::measure::over_ranks;
use super::operation::Operation;
use super::plan::{Repeats, dtypes};
use super::statistics::median;
use super::{Out, record};
use crate::agree;
use crate::failure::{Failure, Result};
use crate::files::{self, Way};
use crate::machine::{self, Machine, versions};
use crate::plan::Ranks;
use crate::ranks;
use collectives::{Communicator, DType, ReduceOp};
use load::Load;
use row::{Row, Timings, header, slowest};
use serde_json::json;
use std::time::Instant;

/// Calls to progress between slices of computation; more would be slices of nothing.
const MOST_TESTS: usize = 1_000_000;

/// Runs the subcommand.
///
/// # Errors
/// Usage, or what a call said.
pub fn overlap(args: &OverlapArgs) -> Result<()> {
    let identity = collectives::bootstrap::Identity::from_env().map_err(Failure::usage)?;
    let mut ranks = Ranks::plan(&args.ranks, identity.as_ref())?;
    ranks.on_hosts("bench overlap")?;
    ranks.options.progress = args.progress.options();
    let (repeats, dtype) = check(args, ranks.world)?;
    ranks.bind = repeats.bind == Bind::Core;
    if identity.is_none() {
        let bytes = footprint(args, &repeats, dtype, ranks.world);
        machine::check_memory(ranks.world, bytes, "lower -e or --ranks")?;
    }
    if let Some(path) = &args.json {
        files::check_writable("--json", path, Way::Whole)?;
    }
    ranks::launch(&ranks, identity.as_ref(), None, &|comm| rank(args, &repeats, dtype, comm))
}

/// What is repeated on elements of which type, between `world` ranks.
///
/// # Errors
/// Flags that describe no sweep, or one that leaves a rank nothing.
pub fn check(args: &OverlapArgs, world: usize) -> Result<(Repeats, DType)> {
    let repeats = Repeats::plan(&args.sweep)?;
    if args.tests > MOST_TESTS {
        return Err(Failure::usage(format!("-t {}: at most {MOST_TESTS} calls to progress", args.tests)));
    }
    let [dtype] = dtypes(&args.dtype)?[..] else {
        return Err(Failure::usage("-d all: overlap is measured for one type at a time, such as -d float"));
    };
    for operation in operations(args) {
        repeats.sweep.check(operation, dtype, world).map_err(Failure::usage)?;
    }
    Ok((repeats, dtype))
}

fn operations(args: &OverlapArgs) -> Vec<Operation> {
    let of = |o: &Overlapped| match o {
        Overlapped::ReduceScatter => Operation::ReduceScatter,
        Overlapped::AllGather => Operation::AllGather,
        Overlapped::AllReduce => Operation::AllReduce,
    };
    match args.operations.is_empty() {
        true => vec![Operation::ReduceScatter, Operation::AllGather, Operation::AllReduce],
        false => args.operations.iter().map(of).collect(),
    }
}

/// Bytes of the buffers of all ranks together, of one operation after the other.
fn footprint(args: &OverlapArgs, repeats: &Repeats, dtype: DType, ranks: usize) -> u64 {
    let of = |operation| {
        let work = Work::new(operation, Calls::Started, repeats.sweep.largest(), dtype.size(), ranks);
        calls::footprint(&[work], dtype.size(), ranks)
    };
    operations(args).into_iter().map(of).max().unwrap_or(0)
}

fn rank(args: &OverlapArgs, repeats: &Repeats, dtype: DType, comm: Communicator) -> Result<()> {
    let names: Vec<&str> = operations(args).iter().map(|o| o.name()).collect();
    let mut signature = vec![("overlap", names.join(","))];
    signature.extend(repeats.signature());
    signature.extend([
        ("-d", dtype.name().to_owned()),
        ("--progress", args.progress.name().to_owned()),
        ("-t", args.tests.to_string()),
    ]);
    agree::check(&comm, &signature)?;
    let party = Party { comm: comm.clone(), native: None, device: None };
    let started = record::now();
    let lead = comm.rank() == 0;
    let mut out = Out::new(args.ranks.quiet || !lead);
    out.text(&header(args, &comm));
    let mut results = Vec::new();
    let mut wrong = 0;
    for operation in operations(args) {
        let mut show = |row: Row| {
            out.text(&row.text(operation, dtype));
            wrong += row.wrong;
            results.push(row.json(operation, dtype));
        };
        with_type!(dtype, T => typed::<T>(operation, args, repeats, &party, &mut show))?;
    }
    if !lead {
        return Ok(());
    }
    if let Some(path) = &args.json {
        let all = json!({
            "generator": format!("caravan {}", env!("CARGO_PKG_VERSION")),
            "start_time": started,
            "end_time": record::now(),
            "args": std::env::args().collect::<Vec<_>>(),
            "machine": Machine::probe().json(),
            "versions": versions(),
            "transport": comm.transport_name(),
            "ranks": comm.size(),
            "progress": args.progress.name(),
            "tests": args.tests,
            "formulas": {
                "osu_overlap_pct": "max(0, 100 - 100 * (overall - (compute_total - test)) / pure)",
                "imb_overlap_pct": "100 * max(0, min(1, (pure + cpu - overall) / max(pure, cpu))), where cpu is \
                                    compute_total - test, all of the rank with the largest overall: imb_times_us",
                "exposed_us": "overall - compute_alone",
                "slowdown": "(compute_total - test) / compute_alone",
            },
            "overlap": results,
        });
        let text = serde_json::to_string_pretty(&all).map_err(Failure::run)?;
        files::write_whole(path, text.as_bytes())?;
    }
    out.end()?;
    match wrong {
        0 => Ok(()),
        n => Err(Failure::run(format!("{n} elements were wrong after an overlapped call"))),
    }
}

fn typed<T: Exact>(
    operation: Operation,
    args: &OverlapArgs,
    repeats: &Repeats,
    party: &Party,
    show: &mut dyn FnMut(Row),
) -> Result<()> {
    let comm = &party.comm;
    let (rank, ranks) = (comm.rank(), comm.size());
    let work = |bytes: usize| Work::new(operation, Calls::Started, bytes, size_of::<T>(), ranks);
    let (send, receive) = Slot::<T>::capacity(repeats.sweep.sizes().map(work), rank);
    let mut slot = Slot::<T>::new(comm, send, receive, true)?;
    let mut load = Load::new();
    for bytes in repeats.sweep.sizes() {
        let work = work(bytes);
        slot.fit(&work, rank);
        show(one::<T>(&work, bytes, args, repeats, party, &mut slot, &mut load)?);
    }
    Ok(())
}

fn one<T: Exact>(
    work: &Work,
    bytes: usize,
    args: &OverlapArgs,
    repeats: &Repeats,
    party: &Party,
    slot: &mut Slot<T>,
    load: &mut Load,
) -> Result<Row> {
    let comm = &party.comm;
    let op = work.operation.reduces().then_some(ReduceOp::Sum);
    let data = Data { seed: bytes as u64 + 1, ranks: comm.size(), op, modest: false };
    let longest = work.counts.send.max(work.counts.receive);
    let expected = Expectation::new(work.operation, &data, comm.rank(), 0, longest);
    slot.fill(work, comm.rank(), None, &expected)?;
    let iterations = repeats.iterations(bytes);
    for _ in 0..repeats.warmup(bytes) {
        work.once(party, slot)?;
    }
    let timed = |body: &mut dyn FnMut() -> Result<()>| -> Result<Vec<f64>> {
        let mut all = Vec::with_capacity(iterations);
        for _ in 0..iterations {
            comm.barrier()?;
            let start = Instant::now();
            body()?;
            all.push(start.elapsed().as_secs_f64());
        }
        Ok(all)
    };
    let pure_times = timed(&mut || work.once(party, slot))?;
    let pure = mean(comm, median(&pure_times))?;
    // All ranks compute as much, and alone about as long as the call takes.
    let product = mean(comm, load.calibrate())?;
    let products = ((pure / product).round() as usize).max(1);
    let compute_times = timed(&mut || {
        load.run(products);
        Ok(())
    })?;
    let compute = mean(comm, median(&compute_times))?;

    slot.fill(work, comm.rank(), None, &expected)?;
    let mut all = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        comm.barrier()?;
        let start = Instant::now();
        let flight = work.start(comm, slot)?;
        let begun = Instant::now();
        let mut test = 0.0;
        let slices = args.tests + 1;
        for slice in 0..slices {
            load.run(products * (slice + 1) / slices - products * slice / slices);
            if slice < args.tests {
                let before = Instant::now();
                comm.progress()?;
                test += before.elapsed().as_secs_f64();
            }
        }
        let computed = Instant::now();
        slot.finish(flight)?;
        let end = Instant::now();
        all.push(Timings {
            overall: (end - start).as_secs_f64(),
            init: (begun - start).as_secs_f64(),
            compute_total: (computed - begun).as_secs_f64(),
            test,
            wait: (end - computed).as_secs_f64(),
        });
    }
    let mut wrong = [0];
    let mine = slot.wrong(work, comm.rank(), None, &expected)?;
    comm.all_reduce(&[mine][..], &mut wrong[..], ReduceOp::Sum)?;
    let part = |of: fn(&Timings) -> f64| mean(comm, median(&all.iter().map(of).collect::<Vec<_>>()));
    let timings = Timings {
        overall: part(|t| t.overall)?,
        init: part(|t| t.init)?,
        compute_total: part(|t| t.compute_total)?,
        test: part(|t| t.test)?,
        wait: part(|t| t.wait)?,
    };
    let mine = |of: fn(&Timings) -> f64| median(&all.iter().map(of).collect::<Vec<_>>());
    let cpu = mine(|t| t.compute_total - t.test);
    let mut each = vec![0.0; 3 * comm.size()];
    comm.all_gather(&[median(&pure_times), cpu, mine(|t| t.overall)][..], &mut each[..])?;
    let slowest = slowest(each.as_chunks().0);
    let us = |times: &[f64]| times.iter().map(|t| t * 1e6).collect::<Vec<_>>();
    let raw = json!({
        "rank": comm.rank(),
        "pure": us(&pure_times),
        "compute_alone": us(&compute_times),
        "overall": all.iter().map(|t| t.overall * 1e6).collect::<Vec<_>>(),
        "compute_total": all.iter().map(|t| t.compute_total * 1e6).collect::<Vec<_>>(),
    });
    let bytes = work.counts.bytes(size_of::<T>());
    Ok(Row { bytes, products, pure, compute, timings, slowest, wrong: wrong[0], raw })
}

/// The mean over ranks of one number each.
fn mean(comm: &Communicator, mine: f64) -> Result<f64> {
    Ok(over_ranks(comm, &[mine], Average::Mean)?[0])
}
