//! `bench overlap`: how much of a collective hides behind matrix products, by the formulas of OSU and IMB, and
//! what it costs them.

mod load;
mod row;
mod times;

use super::args::{Calls, OverlapArgs, Overlapped};
use super::calls::{self, Party, Work};
use super::exact::{self, Data, Exact, Expectation, with_type};
use super::kept::{Pace, Record};
use super::operation::Operation;
use super::plan::{Repeats, dtypes};
use super::slot::Slot;
use super::start::Start;
use super::statistics::{average, median};
use super::table::dtype_name;
use super::timings;
use super::verdict::{self, Verdict};
use crate::about::{self, now};
use crate::agree;
use crate::args::Mover;
use crate::bind;
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use crate::human;
use crate::layers;
use crate::printed::Printed;
use crate::transports;
use crate::tuning;
use collectives::bootstrap::spawn;
use collectives::{Communicator, DType, ReduceOp};
use load::Load;
use row::{Row, Timings, header};
use serde_json::{Value, json};
use std::time::Instant;
use times::{Times, mean};

/// Calls to progress between slices of computation.
const MOST_TESTS: usize = 1_000_000;

/// How often the number of products is corrected by what they took, each time the median of so many.
const CORRECTIONS: usize = 4;
const TRIES: usize = 5;

/// How often call and products are measured at most, and by which part of the call's time they differ where they are again.
const ATTEMPTS: usize = 3;
const UNEQUAL: f64 = 0.15;

/// Products that take as long as a call but for this part of it are left at their number.
const NEAR: f64 = 0.03;

/// Runs the subcommand.
///
/// # Errors
/// Usage, or what a call said.
pub fn overlap(args: &OverlapArgs) -> Result<()> {
    let mut start = Start::on_hosts("bench overlap", &args.ranks, true)?;
    start.ranks.options.progress = args.progress.options();
    let world = start.ranks.world;
    let (repeats, dtype) = check(args, world)?;
    start.bind(repeats.bind, false)?;
    let buffers = footprint(args, &repeats, dtype, world);
    let rows = args.json.as_ref().map_or(0, |_| operations(args).len());
    let timings = timings::of_overlap(&repeats, rows, world);
    let lower = human::either([
        (repeats.sweep.end_flags(), true),
        ("-n", timings > buffers),
        ("--ranks", start.fewer(1)),
    ]);
    start.check_memory(buffers.saturating_add(timings), &format!("lower {lower}"))?;
    let asked: Vec<_> = args.json.iter().map(|path| Output::whole("--json", path, Kind::Json)).collect();
    let read = tuning::named(args.ranks.tuning.as_ref());
    start.go(&|| files::check_outputs(&asked, read.as_slice()), &|comm, _| rank(args, &repeats, dtype, comm))
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
    if args.tests > 0 && args.progress == Mover::Thread {
        return Err(Failure::usage(format!(
            "-t {}: where a thread moves calls forward, calls to progress do nothing; add --progress inline or leave -t away",
            args.tests
        )));
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
    if args.operations.is_empty() {
        return vec![Operation::ReduceScatter, Operation::AllGather, Operation::AllReduce];
    }
    // What is named twice is measured once.
    let first = |(i, o): &(usize, &Overlapped)| !args.operations[..*i].contains(o);
    args.operations.iter().enumerate().filter(first).map(|(_, o)| of(o)).collect()
}

/// Bytes of the buffers of all ranks together, of one operation after the other.
fn footprint(args: &OverlapArgs, repeats: &Repeats, dtype: DType, ranks: usize) -> u64 {
    let of = |operation| {
        let work = Work::new(operation, Calls::Started, repeats.sweep.largest(), dtype.size(), ranks);
        let expected = exact::footprint(operation, work.counts, dtype.size());
        calls::footprint(&[work], dtype.size(), ranks).saturating_add(expected.saturating_mul(ranks as u64))
    };
    operations(args).into_iter().map(of).max().unwrap_or(0)
}

fn rank(args: &OverlapArgs, repeats: &Repeats, dtype: DType, comm: Communicator) -> Result<Verdict> {
    let names: Vec<&str> = operations(args).iter().map(|o| o.name()).collect();
    let mut signature = vec![("overlap", names.join(","))];
    signature.extend(repeats.signature());
    signature.extend([
        ("-d", dtype.name().to_owned()),
        ("--progress", args.progress.name().to_owned()),
        ("-t", args.tests.to_string()),
        ("--json", files::wanted(args.json.as_deref())),
    ]);
    agree::check(&comm, &signature)?;
    let party = Party { comm: comm.clone(), native: None, device: None };
    let lead = comm.rank() == 0;
    let out = Printed::new(&comm, args.ranks.quiet)?;
    let processors = agree::exchange(&comm, &bind::listed(&bind::processors()))?;
    out.text(&header(args, &comm, crowded(args, &processors, &comm)))?;
    let mut record = Record::new(
        args.json.as_deref(),
        about(args, repeats, dtype, &comm, &processors),
        "overlap",
        Vec::new(),
    );
    let (mut pace, mut wrong) = (Pace::new(), 0);
    for operation in operations(args) {
        let mut show = |row: Row| {
            let seen = out.text(&row.text(operation, dtype))?;
            wrong += row.wrong;
            record.rows.push(row.json(operation, dtype));
            if lead {
                pace.keep(|| record.keep());
            }
            // What nobody reads any more and nothing keeps is not measured.
            Ok(args.json.is_some() || seen)
        };
        let measured = with_type!(dtype, T => typed::<T>(operation, args, repeats, &party, &mut show));
        if measured.is_err() && lead {
            record.keep();
        }
        if !measured? {
            break;
        }
    }
    if !lead {
        return Ok(None);
    }
    let found = (wrong > 0).then(|| format!("{wrong} elements were wrong after an overlapped call"));
    verdict::ended(found, record.write().and(out.end()))
}

/// What the JSON says beside its rows.
fn about(
    args: &OverlapArgs,
    repeats: &Repeats,
    dtype: DType,
    comm: &Communicator,
    processors: &[String],
) -> Value {
    let library = transports::library(layers::between(comm.transport_name()));
    let mut all = about::about(&now(), library);
    all["transport"] = json!(comm.transport_name());
    all["ranks"] = json!(comm.size());
    all["progress"] = json!(args.progress.name());
    all["tests"] = json!(args.tests);
    all["processors"] = json!(processors);
    let mut config = super::about::repeated(repeats);
    let names: Vec<&str> = operations(args).iter().map(|o| o.name()).collect();
    config.insert("operations".into(), json!(names));
    config.insert("type".into(), json!(dtype_name(dtype)));
    all["config"] = config.into();
    all["formulas"] = row::formulas();
    all
}

/// What is said of ranks whose progress threads have no processors of their own.
fn crowded(args: &OverlapArgs, processors: &[String], comm: &Communicator) -> Option<String> {
    let alone = |list: &&String| !list.is_empty() && list.parse::<usize>().is_ok();
    let few = match processors.iter().filter(alone).count() {
        // Of ranks on several hosts nobody here can count what they share.
        0 if spawn::supervised() || layers::in_one_process(comm.transport_name()) => {
            let all = bind::processors().len();
            let shared = processors.iter().all(|list| *list == processors[0]) && all < 2 * comm.size();
            shared.then(|| format!("{} ranks have {all} processors", comm.size()))
        }
        0 => None,
        1 if comm.size() > 1 => Some("a rank has one processor".to_owned()),
        _ => Some("ranks have one processor each".to_owned()),
    }?;
    (args.progress == Mover::Thread).then(|| {
        format!("{few} for both products and progress threads: these hold each other up, as with --progress inline they do not")
    })
}

/// The rows of one operation, as long as any rank has a use for more; whether one still has.
fn typed<T: Exact>(
    operation: Operation,
    args: &OverlapArgs,
    repeats: &Repeats,
    party: &Party,
    show: &mut dyn FnMut(Row) -> Result<bool>,
) -> Result<bool> {
    let comm = &party.comm;
    let (rank, ranks) = (comm.rank(), comm.size());
    let work = |bytes: usize| Work::new(operation, Calls::Started, bytes, size_of::<T>(), ranks);
    let sizes = || repeats.sweep.filled(operation, size_of::<T>(), ranks);
    let (send, receive) = Slot::<T>::capacity(sizes().map(work), rank);
    let slot = Slot::<T>::new(comm, send, receive, true)?;
    let mut bench = Bench { args, repeats, party, slot, load: Load::new() };
    for bytes in sizes() {
        if !show(bench.row(&work(bytes), bytes)?)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What a rank measures with.
struct Bench<'a, T: Exact> {
    args: &'a OverlapArgs,
    repeats: &'a Repeats,
    party: &'a Party,
    slot: Slot<T>,
    load: Load,
}

impl<T: Exact> Bench<'_, T> {
    /// One size: the call alone, the products alone, both at once.
    fn row(&mut self, work: &Work, bytes: usize) -> Result<Row> {
        let comm = &self.party.comm;
        let op = work.operation.reduces().then_some(ReduceOp::Sum);
        let data = Data { seed: bytes as u64 + 1, ranks: comm.size(), op, foreign: false };
        let expected = Expectation::new(work.operation, &data, comm.rank(), 0, work.counts);
        self.slot.fit(work, comm.rank());
        self.slot.fill(work, comm.rank(), None, &expected)?;
        for _ in 0..self.repeats.untimed(bytes) {
            work.once(self.party, &mut self.slot)?;
        }
        let iterations = self.repeats.iterations(bytes);
        let (pure, products, compute) = self.alone(work, iterations)?;
        self.slot.fill(work, comm.rank(), None, &expected)?;
        let overlapped = self.beside(work, products, bytes)?;
        drop(expected);
        // With other data, or what an earlier call left would pass for this one's.
        let data = Data { seed: bytes as u64 + 2, ..data };
        let expected = Expectation::new(work.operation, &data, comm.rank(), 0, work.counts);
        self.slot.fill(work, comm.rank(), None, &expected)?;
        self.overlapped(work, products)?;
        let mine = self.slot.wrong(work, comm, None, &expected)?;
        let mut wrong = [0];
        comm.all_reduce(&[mine][..], &mut wrong[..], ReduceOp::Sum)?;
        let times = Times { pure, compute, overlapped };
        let choice = comm.choice(&work.call::<T>(comm))?;
        Ok(Row {
            bytes: work.counts.bytes(size_of::<T>()),
            products,
            side: self.load.side(),
            tests: self.tests(products),
            compute: mean(comm, median(&times.compute))?,
            medians: times.shown(comm, median)?,
            means: times.shown(comm, average)?,
            wrong: wrong[0],
            algorithm: choice.algorithm.to_string(),
            why: choice.reason(work.operation.kind()),
            calls: self.args.json.as_ref().map_or(Ok(Value::Null), |_| times.calls(comm))?,
        })
    }

    /// Seconds of the call alone and of products alone, on this rank, and how many products take as long. What else runs on a
    /// machine may slow one of the two down and not the other: then both are measured again.
    fn alone(&mut self, work: &Work, iterations: usize) -> Result<(Vec<f64>, usize, Vec<f64>)> {
        let mut attempts = 0;
        loop {
            let pure = timed(&self.party.comm, iterations, || work.once(self.party, &mut self.slot))?;
            // As OSU. Both formulas are of the same means.
            let products = self.products(average(&pure))?;
            let compute = self.computed(products, iterations)?;
            let comm = &self.party.comm;
            let ratio = mean(comm, average(&compute))? / mean(comm, average(&pure))?;
            attempts += 1;
            if products == 1 || (ratio - 1.0).abs() < UNEQUAL || attempts == ATTEMPTS {
                return Ok((pure, products, compute));
            }
        }
    }

    /// How many products all ranks compute, as many as alone take about as long as a call that takes `pure` here on the mean.
    fn products(&mut self, pure: f64) -> Result<usize> {
        let comm = self.party.comm.clone();
        let pure = mean(&comm, pure)?;
        let mut products = self.load.suit(pure, |product| mean(&comm, product))?;
        for _ in 0..CORRECTIONS {
            // In turn with messages they may take another time than one after the other.
            let took = mean(&comm, median(&self.computed(products, TRIES)?))?;
            let better = ((products as f64 * pure / took).round() as usize).max(1);
            if better == products || (took / pure - 1.0).abs() < NEAR {
                break;
            }
            products = better;
        }
        Ok(products)
    }

    /// Seconds of so many products, of each of so many times.
    fn computed(&mut self, products: usize, times: usize) -> Result<Vec<f64>> {
        let load = &mut self.load;
        timed(&self.party.comm, times, || {
            load.run(products);
            Ok(())
        })
    }

    /// Calls to progress beside so many products: between them there is no computation to interrupt.
    fn tests(&self, products: usize) -> usize {
        self.args.tests.min(products - 1)
    }

    /// Calls with products beside them, after as many that are not timed as before calls alone: the first ones are slow, and
    /// means would have them.
    fn beside(&mut self, work: &Work, products: usize, bytes: usize) -> Result<Vec<Timings>> {
        for _ in 0..self.repeats.untimed(bytes) {
            self.overlapped(work, products)?;
        }
        (0..self.repeats.iterations(bytes)).map(|_| self.overlapped(work, products)).collect()
    }

    /// One call that is started, computed beside, and waited for.
    fn overlapped(&mut self, work: &Work, products: usize) -> Result<Timings> {
        let comm = &self.party.comm;
        comm.barrier()?;
        let start = Instant::now();
        let flight = work.start(comm, &mut self.slot)?;
        let begun = Instant::now();
        let mut test = 0.0;
        let slices = self.tests(products) + 1;
        for slice in 0..slices {
            self.load.run(products * (slice + 1) / slices - products * slice / slices);
            if slice + 1 < slices {
                let before = Instant::now();
                comm.progress()?;
                test += before.elapsed().as_secs_f64();
            }
        }
        let computed = Instant::now();
        self.slot.finish(flight)?;
        let end = Instant::now();
        Ok(Timings {
            overall: (end - start).as_secs_f64(),
            init: (begun - start).as_secs_f64(),
            compute_total: (computed - begun).as_secs_f64(),
            test,
            wait: (end - computed).as_secs_f64(),
        })
    }
}

/// Seconds of each of so many runs of `body`, which all ranks begin together.
fn timed(comm: &Communicator, iterations: usize, mut body: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut all = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        comm.barrier()?;
        let start = Instant::now();
        body()?;
        all.push(start.elapsed().as_secs_f64());
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::bench;
    use crate::bench::args::BenchCommand;
    use crate::bench::verdict::tests::of_spoiled;
    use crate::plan::{Ranks, UNASKED};
    use collectives::Options;
    use collectives::trace::{Of, Trace};

    #[test]
    fn calls_beside_products_are_warmed_up_too() {
        let args = bench("overlap all_gather -b 4K -e 4K -n 3 -w 5 --transport threads");
        let BenchCommand::Overlap(args) = args.command else { panic!("no overlap") };
        Communicator::on_threads(2, Options::default(), |comm| {
            let (repeats, _) = check(&args, 2).unwrap();
            let trace = Trace::new(100);
            comm.trace(Some(&trace));
            let party = Party { comm: comm.clone(), native: None, device: None };
            let work = Work::new(Operation::AllGather, Calls::Started, 4096, 4, 2);
            let (send, receive) = Slot::<f32>::capacity([work].into_iter(), comm.rank());
            let slot = Slot::<f32>::new(&comm, send, receive, true).unwrap();
            let mut bench = Bench { args: &args, repeats: &repeats, party: &party, slot, load: Load::new() };
            trace.want(true);
            let timed = bench.beside(&work, 1, 4096).unwrap().len();
            let (spans, _) = trace.take();
            let gathers = spans.iter().filter(
                |span| matches!(span.of, Of::Call(call) if call.to_string().starts_with("all_gather")),
            );
            assert_eq!((timed, gathers.count()), (3, 8));
        });
    }

    #[test]
    fn wrong_elements_after_an_overlapped_call_end_in_exit_code_1() {
        let of = |flags: &str| {
            let args = bench(&format!("overlap -b 64K -e 64K -n 2 -q --transport threads {flags}"));
            let BenchCommand::Overlap(args) = args.command else { panic!("no overlap") };
            let mut ranks = Ranks::plan(&args.ranks, UNASKED, None).unwrap();
            ranks.options.progress = args.progress.options();
            let (repeats, dtype) = check(&args, ranks.world).unwrap();
            of_spoiled(&ranks, &|comm| rank(&args, &repeats, dtype, comm))
        };
        let failure = of("");
        let text = failure.to_string();
        let words = " elements were wrong after an overlapped call";
        assert!(failure.code() == 1 && text.ends_with(words), "{text}");
        let dir = tempfile::tempdir().unwrap();
        let text = of(&format!("--json {}", dir.path().join("gone/r.json").display())).to_string();
        assert!(text.contains(&format!("{words}; writing ")), "{text}");
    }
}
