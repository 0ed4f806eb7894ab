//! `bench overlap`: how much of a collective hides behind matrix products, by the formulas of OSU and IMB, and
//! what it costs them.

use super::args::{Average, Calls, OverlapArgs, Overlapped};
use super::calls::{Party, Placement, Slot, Work};
use super::exact::{Data, Exact, Expectation};
use super::measure::over_ranks;
use super::operation::Operation;
use super::plan::{Repeats, dtypes};
use super::statistics::median;
use super::sweep::Step;
use super::table::dtype_name;
use super::{Out, record};
use crate::agree;
use crate::failure::{Failure, Result};
use crate::machine::{Machine, versions};
use crate::plan::Ranks;
use crate::ranks;
use collectives::{Communicator, DType, ReduceOp, bf16, f16};
use gemmkit::{MatMut, MatRef, Parallelism};
use serde_json::{Value, json};
use std::time::Instant;

/// Side of the square matrices: a product of some microseconds, so that their number fits any call.
const SIDE: usize = 48;

/// Runs the subcommand.
///
/// # Errors
/// Usage, or what a call said.
pub fn overlap(args: &OverlapArgs) -> Result<()> {
    let repeats = Repeats::plan(&args.sweep)?;
    let dtype = match dtypes(&args.dtype)?[..] {
        [one] => one,
        _ => {
            return Err(Failure::usage(
                "-d all: overlap is measured for one type at a time, such as -d float",
            ));
        }
    };
    let identity = collectives::bootstrap::Identity::from_env().map_err(Failure::usage)?;
    let mut ranks = Ranks::plan(&args.ranks, identity.as_ref())?;
    ranks.on_hosts("bench overlap")?;
    ranks.options.progress = args.progress.options();
    for operation in operations(args) {
        repeats.sweep.check(operation, dtype, ranks.world).map_err(Failure::usage)?;
    }
    if let Some(path) = &args.json {
        record::check_writable("--json", path)?;
    }
    ranks::launch(&ranks, identity.as_ref(), None, &|comm| rank(args, &repeats, dtype, comm))
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

fn rank(args: &OverlapArgs, repeats: &Repeats, dtype: DType, comm: Communicator) -> Result<()> {
    let sweep = repeats.sweep;
    let count = |n: Option<usize>| n.map_or("by size".to_owned(), |n| n.to_string());
    let names: Vec<&str> = operations(args).iter().map(|o| o.name()).collect();
    let signature = vec![
        ("overlap", names.join(",")),
        ("-b", sweep.begin.to_string()),
        ("-e", sweep.end.to_string()),
        match sweep.step {
            Step::Factor(factor) => ("-f", factor.to_string()),
            Step::Bytes(bytes) => ("-i", bytes.to_string()),
        },
        ("-n", count(args.sweep.iterations)),
        ("-w", count(args.sweep.warmup)),
        ("-d", dtype.name().to_owned()),
        ("--progress", args.progress.name().to_owned()),
        ("-t", args.tests.to_string()),
    ];
    agree::check(&comm, &signature)?;
    let party = Party { comm: comm.clone(), native: None, device: None };
    let started = record::now();
    let lead = comm.rank() == 0;
    let mut out = Out { quiet: args.ranks.quiet || !lead, failed: None };
    out.text(&header(args, &comm));
    let mut results = Vec::new();
    let mut wrong = 0;
    for operation in operations(args) {
        let mut show = |row: Row| {
            out.text(&row.text(operation, dtype));
            wrong += row.wrong;
            results.push(row.json(operation, dtype));
        };
        match dtype {
            DType::F32 => typed::<f32>(operation, args, repeats, &party, &mut show),
            DType::F64 => typed::<f64>(operation, args, repeats, &party, &mut show),
            DType::F16 => typed::<f16>(operation, args, repeats, &party, &mut show),
            DType::Bf16 => typed::<bf16>(operation, args, repeats, &party, &mut show),
            DType::I8 => typed::<i8>(operation, args, repeats, &party, &mut show),
            DType::U8 => typed::<u8>(operation, args, repeats, &party, &mut show),
            DType::I32 => typed::<i32>(operation, args, repeats, &party, &mut show),
            DType::U32 => typed::<u32>(operation, args, repeats, &party, &mut show),
            DType::I64 => typed::<i64>(operation, args, repeats, &party, &mut show),
            DType::U64 => typed::<u64>(operation, args, repeats, &party, &mut show),
        }?;
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
        record::write_whole(path, text.as_bytes())?;
    }
    out.end()?;
    match wrong {
        0 => Ok(()),
        n => Err(Failure::run(format!("{n} elements were wrong after an overlapped call"))),
    }
}

fn header(args: &OverlapArgs, comm: &Communicator) -> String {
    let columns = |names: [&str; 14]| {
        format!(
            "# {:>10}  {:>14}  {:>8}  {:>9}  {:>9}  {:>9}  {:>8}  {:>8}  {:>9}  {:>7}  {:>7}  {:>9}  {:>8}  {:>6}\n",
            names[0],
            names[1],
            names[2],
            names[3],
            names[4],
            names[5],
            names[6],
            names[7],
            names[8],
            names[9],
            names[10],
            names[11],
            names[12],
            names[13]
        )
    };
    format!(
        "# caravan version {} transport {} ranks {} progress {} tests {}\n\
         # Overlap with products of {SIDE} x {SIDE} matrices in f32; medians over calls, means over ranks\n\
         # OSU = max(0, 100 - 100 (overall - compute while communicating) / pure); \
         IMB = 100 max(0, min(1, (pure + cpu - overall) / max(pure, cpu))), cpu = compute while communicating, \
         of the slowest rank\n\
         # exposed = overall - compute; slowdown = compute while communicating / compute\n#\n",
        env!("CARGO_PKG_VERSION"),
        comm.transport_name(),
        comm.size(),
        args.progress.name(),
        args.tests
    ) + &columns([
        "size",
        "operation",
        "type",
        "pure",
        "compute",
        "overall",
        "init",
        "test",
        "wait",
        "OSU",
        "IMB",
        "exposed",
        "slowdown",
        "#wrong",
    ]) + &columns([
        "(B)", "", "", "(us)", "(us)", "(us)", "(us)", "(us)", "(us)", "(%)", "(%)", "(us)", "", "",
    ])
}

/// One size. Seconds, over ranks.
#[derive(Clone, Debug)]
struct Row {
    bytes: usize,
    products: usize,
    pure: f64,
    compute: f64,
    timings: Timings,
    /// Pure, cpu and overall of the rank that IMB would report.
    slowest: [f64; 3],
    wrong: u64,
    raw: Value,
}

/// The parts of an overlapped call, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Timings {
    overall: f64,
    /// Inside `start_…`.
    init: f64,
    /// From the end of `init` to the beginning of `wait`.
    compute_total: f64,
    /// Of that, inside calls for progress.
    test: f64,
    wait: f64,
}

/// OSU's micro-benchmarks.
fn osu(pure: f64, t: &Timings) -> f64 {
    (100.0 - (t.overall - (t.compute_total - t.test)) / pure * 100.0).max(0.0)
}

/// Intel's MPI benchmarks (IMB-NBC), of one rank; `cpu` is the time of its computation while it communicates.
fn imb(pure: f64, cpu: f64, overall: f64) -> f64 {
    100.0 * ((pure + cpu - overall) / pure.max(cpu)).clamp(0.0, 1.0)
}

/// Whose times IMB reports: those of the rank whose overlapped call takes longest. Each brings pure, cpu and overall.
fn slowest(all: &[[f64; 3]]) -> [f64; 3] {
    all.iter().copied().max_by(|a, b| a[2].total_cmp(&b[2])).unwrap_or_default()
}

impl Row {
    fn imb(&self) -> f64 {
        let [pure, cpu, overall] = self.slowest;
        imb(pure, cpu, overall)
    }

    fn slowdown(&self) -> f64 {
        (self.timings.compute_total - self.timings.test) / self.compute
    }

    fn text(&self, operation: Operation, dtype: DType) -> String {
        let t = &self.timings;
        let us = |s: f64| s * 1e6;
        format!(
            "{:>12}  {:>14}  {:>8}  {:>9.2}  {:>9.2}  {:>9.2}  {:>8.2}  {:>8.2}  {:>9.2}  {:>7.1}  {:>7.1}  {:>9.2}  \
             {:>8.3}  {:>6}\n",
            self.bytes,
            operation.name(),
            dtype_name(dtype),
            us(self.pure),
            us(self.compute),
            us(t.overall),
            us(t.init),
            us(t.test),
            us(t.wait),
            osu(self.pure, t),
            self.imb(),
            us(t.overall - self.compute),
            self.slowdown(),
            self.wrong
        )
    }

    fn json(&self, operation: Operation, dtype: DType) -> Value {
        let t = &self.timings;
        json!({
            "operation": operation.name(),
            "size": self.bytes,
            "type": dtype_name(dtype),
            "products": self.products,
            "pure_us": self.pure * 1e6,
            "compute_alone_us": self.compute * 1e6,
            "overall_us": t.overall * 1e6,
            "init_us": t.init * 1e6,
            "compute_total_us": t.compute_total * 1e6,
            "test_us": t.test * 1e6,
            "wait_us": t.wait * 1e6,
            "osu_overlap_pct": osu(self.pure, t),
            "imb_overlap_pct": self.imb(),
            "imb_times_us": self.slowest.map(|t| t * 1e6),
            "exposed_us": (t.overall - self.compute) * 1e6,
            "slowdown": self.slowdown(),
            "nwrong": self.wrong,
            "times_us": self.raw,
        })
    }
}

/// Square matrix products on the calling thread, whose operands stay in the cache.
struct Load {
    left: Vec<f32>,
    right: Vec<f32>,
    out: Vec<f32>,
}

impl Load {
    fn new() -> Self {
        let matrix = |k: usize| (0..SIDE * SIDE).map(|i| ((i * k) % 7) as f32).collect();
        Load { left: matrix(3), right: matrix(5), out: vec![0.0; SIDE * SIDE] }
    }

    /// Multiplies `products` times.
    fn run(&mut self, products: usize) {
        for _ in 0..products {
            let left = MatRef::from_row_major(std::hint::black_box(&self.left[..]), SIDE, SIDE);
            let right = MatRef::from_row_major(&self.right, SIDE, SIDE);
            let out = MatMut::from_row_major(&mut self.out, SIDE, SIDE);
            gemmkit::gemm(1.0, left, right, 0.0, out, Parallelism::Serial);
        }
        std::hint::black_box(&self.out);
    }

    /// Seconds of one product: the median over batches.
    fn calibrate(&mut self) -> f64 {
        self.run(100);
        let batch = |load: &mut Load| {
            let start = Instant::now();
            load.run(50);
            start.elapsed().as_secs_f64() / 50.0
        };
        median(&(0..9).map(|_| batch(self)).collect::<Vec<_>>())
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
    let work = |bytes: usize| Work {
        operation,
        calls: Calls::Started,
        one_way: false,
        placement: Placement::Out,
        op: ReduceOp::Sum,
        root: 0,
        counts: operation.counts(bytes, size_of::<T>(), ranks),
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_those_of_osu_and_imb() {
        // A call of 100 us and 100 us of products that took 120 us beside it; then 10 us of waiting.
        let t = Timings { overall: 135e-6, init: 5e-6, compute_total: 120e-6, test: 0.0, wait: 10e-6 };
        assert!((osu(100e-6, &t) - 85.0).abs() < 1e-9);
        // Of 220 us of work, 85 were saved, and at best the shorter of the two could have been: by the longer, 120.
        assert!((imb(100e-6, 120e-6, t.overall) - 100.0 * 85.0 / 120.0).abs() < 1e-9);
        // Time in tests is communication to OSU.
        assert!((osu(100e-6, &Timings { test: 20e-6, ..t }) - 65.0).abs() < 1e-9);
        // Nothing hidden, and worse than nothing, are both 0; everything hidden is 100.
        assert_eq!(osu(100e-6, &Timings { overall: 300e-6, compute_total: 100e-6, ..t }), 0.0);
        assert_eq!(imb(100e-6, 100e-6, 300e-6), 0.0);
        assert_eq!(imb(100e-6, 100e-6, 100e-6), 100.0);
        // A call that is half as long as the products hides half of the longer at most.
        assert!((imb(50e-6, 100e-6, 100e-6) - 50.0).abs() < 1e-9);
        // Over ranks, the one that took longest counts, not the mean.
        let ranks = [[100e-6, 100e-6, 110e-6], [100e-6, 100e-6, 160e-6], [100e-6, 100e-6, 120e-6]];
        assert_eq!(slowest(&ranks), ranks[1]);
    }

    #[test]
    fn costs_are_exposed_time_and_slowdown() {
        let timings = Timings { overall: 135e-6, init: 5e-6, compute_total: 120e-6, test: 8e-6, wait: 10e-6 };
        let (pure, compute) = (100e-6, 100e-6);
        // Of the slowest rank: 80 + 100 - 160 of 100.
        let slowest = [80e-6, 100e-6, 160e-6];
        let row = Row { bytes: 64, products: 3, pure, compute, timings, slowest, wrong: 0, raw: Value::Null };
        assert!((row.slowdown() - 1.12).abs() < 1e-9);
        let all = row.json(Operation::AllGather, DType::F32);
        let near =
            |key: &str, value: f64| assert!((all[key].as_f64().unwrap() - value).abs() < 1e-9, "{key}");
        near("exposed_us", 35.0);
        near("slowdown", 1.12);
        near("osu_overlap_pct", 77.0);
        near("imb_overlap_pct", 20.0);
        let text = row.text(Operation::AllGather, DType::F32);
        let shown: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(shown[9..13], ["77.0", "20.0", "35.00", "1.120"], "{text}");
    }

    #[test]
    fn products_are_products() {
        let mut load = Load::new();
        load.run(2);
        for (i, j) in [(0, 0), (3, 17), (SIDE - 1, SIDE - 1)] {
            let exact: f32 = (0..SIDE).map(|k| load.left[i * SIDE + k] * load.right[k * SIDE + j]).sum();
            assert_eq!(load.out[i * SIDE + j], exact);
        }
        assert!(load.calibrate() > 0.0);
    }
}
