//! `caravan bench`: collectives measured by nccl-tests' conventions over any transport, how much of them hides
//! behind computation, and the tuning of this machine.

pub mod about;
mod args;
mod calls;
mod cases;
mod device;
mod exact;
mod foreign;
mod kept;
mod kernels;
mod measure;
mod messages;
pub mod native;
mod operation;
mod outputs;
mod overlap;
mod plan;
mod plot;
mod record;
mod slot;
mod start;
mod statistics;
mod sweep;
mod table;
mod timings;
mod tune;
mod verdict;

pub use args::BenchArgs;
pub use record::CSV_NAMES;

use crate::about::now;
use crate::agree::{self, Signature};
use crate::args::RankArgs;
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use crate::gpus;
use crate::human;
use crate::plan::{Asked, Ranks, UNASKED, on_hosts};
use crate::printed::Printed;
use crate::ranks::identity;
use crate::transports;
use crate::tuning;
use about::Member;
use args::{Average, Blocking, Calls, CollectiveArgs, PlotArgs, Task};
use calls::Party;
use cases::Cases;
use messages::Messages;
use operation::Operation;
use outputs::Outputs;
use plan::{Algo, Plan, Roots};
use plot::Series;
use record::{Found, Row, Run};
use start::{Start, check_bind, unshared};
use std::path::Path;
use sweep::Step;
use verdict::Verdict;

/// Where the table has a device's place on the bus, which nobody here asks for.
const PCI: &str = "0000:00:00";

/// Runs the subcommand.
///
/// # Errors
/// One sentence: usage, or what went wrong.
pub fn bench(args: &BenchArgs) -> Result<()> {
    args.command.ranks().map_or(Ok(()), plain_calls)?;
    match args.command.task() {
        Task::Operation(operation, flags) => collective(operation, flags),
        Task::Overlap(flags) => overlap::overlap(flags),
        Task::Tune(flags) => tune::tune(flags),
        Task::Kernels(flags) => kernels::kernels(flags),
        Task::Plot(flags) => plot(flags),
    }
}

/// What can be said of the flags on any machine, before there are ranks, of which something else will start `world`, and
/// with what was asked of them.
///
/// # Errors
/// One sentence: wrong usage.
pub fn check(args: &BenchArgs, world: usize, asked: &Asked) -> Result<()> {
    args.command.ranks().map_or(Ok(()), plain_calls)?;
    match args.command.task() {
        Task::Operation(operation, flags) => {
            flags.foreign.check(Some(world), flags.ranks.ranks)?;
            let plan = Plan::new(operation, flags)?;
            plan.check(world, true)?;
            if world > 1 {
                measure::possible_anywhere(&plan)?;
            }
            check_bind(plan.repeats.bind, true, asked.nccl)?;
            files::check_distinct(&outputs::asked_for(flags))?;
            check_together(&plan, flags, asked.nccl, &asked.label())
        }
        Task::Overlap(flags) => {
            on_hosts("bench overlap", &flags.ranks)?;
            unshared(&flags.ranks)?;
            flags.json.iter().try_for_each(|path| files::check_output_name("--json", path))?;
            let (repeats, _) = overlap::check(flags, world)?;
            check_bind(repeats.bind, true, false)
        }
        Task::Tune(flags) => {
            on_hosts("bench tune", &flags.ranks)?;
            unshared(&flags.ranks)?;
            files::check_output_name("-o", &flags.out)?;
            let repeats = tune::check(flags, world, true)?;
            check_bind(repeats.bind, true, false)
        }
        Task::Kernels(_) | Task::Plot(_) => Ok(()),
    }
}

/// Whether the flags of an operation go with what carries it: NCCL, or `transport`.
fn check_together(plan: &Plan, args: &CollectiveArgs, nccl: bool, transport: &str) -> Result<()> {
    if let Some(table) = args.ranks.tuning.as_ref().filter(|_| nccl || plan.algo != Algo::Auto) {
        let why = match nccl {
            true => "NCCL chooses by itself: leave it away".to_owned(),
            false => format!("--algo {} was asked for: leave one of them away", args.algo),
        };
        return Err(Failure::usage(format!("--tuning {} is for --algo auto, and {why}", table.display())));
    }
    match nccl {
        true => device::check(plan)?,
        false => {
            unshared(&args.ranks)?;
            if plan.algo == Algo::Native {
                native::check(plan.operation, plan.calls, transport)?;
            }
        }
    }
    args.plot.as_ref().map_or(Ok(()), |figure| check_figure("--plot", figure))
}

/// Refuses what is for ranks that do more than call: compute with several threads, and draw a bar.
fn plain_calls(args: &RankArgs) -> Result<()> {
    if let Some(threads) = args.threads {
        return Err(Failure::usage(format!(
            "--threads {threads} is of train and eval: ranks of bench call and compute with one thread each; leave it away"
        )));
    }
    match args.color {
        Some(_) => Err(Failure::usage("--color is of train and eval: bench draws no bar; leave it away")),
        None => Ok(()),
    }
}

fn plot(args: &PlotArgs) -> Result<()> {
    check_figure("-o", &args.out)?;
    files::check_outputs(&[Output::whole("-o", &args.out, Kind::Svg)], &args.inputs)?;
    let stream = "/dev/stdin for the standard input";
    args.inputs.iter().try_for_each(|input| files::check_name("bench plot", input, stream))?;
    files::check_once("bench plot", &args.inputs)?;
    let series = Series::read(&args.inputs)?;
    files::write_whole(&args.out, plot::svg(&series, "caravan bench")?.as_bytes())
}

/// Figures are SVG, whatever a file is called, so it should not be called another.
fn check_figure(flag: &str, path: &Path) -> Result<()> {
    match path.extension().filter(|kind| !kind.eq_ignore_ascii_case("svg")) {
        Some(_) => Err(Failure::usage(format!(
            "{flag} {}: figures are written as SVG, so take {}",
            path.display(),
            path.with_extension("svg").display()
        ))),
        None => Ok(()),
    }
}

fn collective(operation: Operation, args: &CollectiveArgs) -> Result<()> {
    let identity = identity()?;
    args.foreign.check(identity.as_ref().map(|identity| identity.world), args.ranks.ranks)?;
    let plan = Plan::new(operation, args)?;
    let over_nccl = transports::beside_nccl(&args.ranks.transport).is_some();
    let unasked = match over_nccl && args.ranks.ranks.is_none() && identity.is_none() {
        true => crate::device::one_for_each_gpu(),
        false => UNASKED,
    };
    let ranks = match (&plan.algo, &args.ranks.tuning) {
        // A table that the environment names is for who goes by it.
        (algo, None) if over_nccl || *algo != Algo::Auto => {
            Ranks::untuned(&args.ranks, unasked, identity.as_ref())?
        }
        _ => Ranks::plan(&args.ranks, unasked, identity.as_ref())?,
    };
    plan.check(ranks.world, identity.is_some())?;
    let mut start = Start { identity, ranks };
    start.bind(plan.repeats.bind, over_nccl)?;
    check_together(&plan, args, over_nccl, &start.ranks.label)?;
    if over_nccl && start.identity.is_none() {
        gpus::check_share_over_nccl(&start.ranks)?;
    }
    // What copies to and from devices has threads of its own.
    start.ranks.one_caller = !over_nccl;
    start.ranks.native = plan.algo == Algo::Native && !over_nccl;
    let (world, fewest) = (start.ranks.world, if operation == Operation::SendRecv { 2 } else { 1 });
    let buffers = if over_nccl { 0 } else { measure::footprint(&plan, start.ranks.native, world) };
    let timings = timings::footprint(&plan, world);
    let lower = human::either([
        (plan.repeats.sweep.end_flags(), true),
        ("-n", timings > buffers),
        ("-N", timings > buffers && plan.cycles > Some(1)),
        ("-m", plan.aggregate > 1),
        ("--ranks", start.fewer(fewest)),
    ]);
    let room = |scratch: u64| {
        let other = if scratch > 0 && plan.algo != Algo::Auto { ", or take --algo auto" } else { "" };
        let bytes = buffers.saturating_add(timings).saturating_add(scratch);
        start.check_memory(bytes, &format!("lower {lower}{other}"))
    };
    room(0)?;
    let (asked, read) = (outputs::asked_for(args), tuning::named(args.ranks.tuning.as_ref()));
    start.go(&|| files::check_outputs(&asked, read.as_slice()), &|comm, native| {
        if !over_nccl {
            return rank(&plan, args, &Party { comm, native, device: None }, &room);
        }
        let (comm, gpus) = device::join(&plan, &start.ranks, start.identity.as_ref(), comm)?;
        rank(&plan, args, &Party { comm, native, device: Some(gpus) }, &room)
    })
}

/// One rank's part, if there is `room` for what ranks have beside their buffers; rank 0 shows, writes and judges.
fn rank(
    plan: &Plan,
    args: &CollectiveArgs,
    party: &Party,
    room: &dyn Fn(u64) -> Result<()>,
) -> Result<Verdict> {
    let comm = &party.comm;
    let mut signature = signature(plan, party.device.is_some());
    signature.extend(outputs::all(args).map(|(flag, path, _)| (flag, files::wanted(path))));
    agree::check(comm, &signature)?;
    measure::force(plan, comm)?;
    if party.device.is_none() && party.native.is_none() {
        room(measure::scratch(plan, comm)?)?;
    }
    let cases = measure::cases(plan, party)?;
    let started = now();
    let who = Member::all(party)?;
    let mut run = Run {
        operation: plan.operation,
        messages: plan.messages,
        transport: party.transport().to_owned(),
        ranks: comm.size(),
        about: about::run(plan, &cases, party, &who, &started),
        rows: Vec::new(),
        found: Found::default(),
        complete: false,
    };
    let out = Printed::new(comm, args.ranks.quiet)?;
    out.text(&header(plan, &cases, party, &who))?;
    let mut files = Outputs::new(args, plan.min_busbw);
    let measured = measure::run(plan, &cases, party, &mut |row| {
        let seen = out.text(&row.as_ref().map_or(String::new(), |row| line(plan, row)))?;
        if let Some(row) = row {
            // A long run has more rows than memory, which files alone need once they are printed.
            run.add(row, files.any());
            files.keep(&run);
        }
        Ok(seen)
    });
    if measured.is_err() && comm.rank() == 0 {
        files.cut_short(&run);
    }
    measured?;
    run.complete = true;
    out.text(&footer(plan, &run))?;
    if comm.rank() != 0 {
        return Ok(None);
    }
    verdict::ended(verdict::of(plan, &run), files.write(&run).and(out.end()))
}

fn header(plan: &Plan, cases: &Cases, party: &Party, who: &[Member]) -> String {
    let comm = &party.comm;
    let sweep = plan.repeats.sweep;
    let (step, unit) = match sweep.step {
        Step::Factor(factor) => (factor, "factor"),
        Step::Bytes(bytes) => (bytes, "bytes"),
    };
    let mut text = format!(
        "# caravan version {} transport {} ranks {} algo {}\n\
         # Collective test starting: {}\n\
         # nThread 1 nGpus 1 minBytes {} maxBytes {} step: {step}({unit}) warmup iters: {} iters: {} agg iters: {} \
         validation: {} graph: 0 unalign: 0\n",
        env!("CARGO_PKG_VERSION"),
        party.transport(),
        comm.size(),
        algo_name(&plan.algo),
        plan.operation.name(),
        sweep.begin,
        sweep.end,
        plan.repeats.warmup(sweep.largest()),
        plan.repeats.iterations(sweep.largest()),
        plan.aggregate,
        plan.check,
    );
    if plan.repeats.adaptive() {
        text += "# Iterations by size: 1000 up to 8K, 100 up to 1M, 20 above; -n sets one number for all\n";
    }
    text += match plan.blocking {
        Blocking::Streaming => "",
        Blocking::Barrier => "# Blocking Enabled: wait and barrier after each inner iteration (-m) \n",
        Blocking::Wait => "# Blocking Enabled: wait after each inner iteration (-m), no barrier \n",
        Blocking::Isolated => {
            "# Blocking Enabled: wait and barrier after each outer iteration (-n); time excludes barrier \n"
        }
    };
    let events = party.device.is_some() && plan.blocking == Blocking::Streaming;
    if plan.columns.per_call {
        let clock = if events { "CUDA event" } else { "host clock" };
        let over = if plan.messages.all_timed(comm.size()) { "ranks" } else { "timed ranks" };
        text += &format!("# Per-Iteration Report: {clock} timing; i_* uses max over {over} \n");
    }
    if plan.calls == Calls::Started {
        text += "# Calls are started, then waited for\n";
    }
    if let Some(remark) = plan.messages.remark() {
        text += &format!("# {remark}\n");
    }
    if party.device.is_none() && !plan.registered(false) {
        text += "# Buffers are from the heap, not from the transport\n";
    }
    if let Some(remark) = measure::remark(plan.operation, plan.calls, party.native.is_some()) {
        text += &format!("# {remark}\n");
    }
    for case in &cases.skipped {
        text += &format!("# skipped {case}\n");
    }
    if events {
        text += "# Times are between events of each GPU's compute stream\n";
    }
    text += "#\n# Using devices\n";
    for (rank, Member { pid, host, device, name, .. }) in who.iter().enumerate() {
        text += &format!(
            "#  Rank {rank:2} Group  0 Pid {pid:>6} on {host:>10} device {device:>2} [{PCI}] {name}\n"
        );
    }
    text + &plan.columns.header()
}

fn line(plan: &Plan, row: &Row) -> String {
    let columns = plan.columns;
    row.label.text()
        + &columns.half(&row.out_of_place.half)
        + &columns.half(&row.in_place.half)
        + &columns.end(&row.printed)
}

/// What follows the rows.
fn footer(plan: &Plan, run: &Run) -> String {
    let average = run.found.average_bus_bandwidth();
    let passed = plan.min_busbw.map(|least| average >= least);
    run.found.algorithms.concat()
        + &table::footer(run.found.failures, average, passed)
        + &format!("# Collective test concluded: {}\n#\n\n", plan.operation.name())
}

fn algo_name(algo: &Algo) -> &str {
    match algo {
        Algo::Auto => "auto",
        Algo::Native => "native",
        Algo::Named(algorithm) => algorithm.name(),
    }
}

/// Everything that ranks must agree on.
fn signature(plan: &Plan, nccl: bool) -> Signature {
    let list = |names: Vec<&str>| names.join(",");
    let mut all = vec![("operation", plan.operation.name().to_owned())];
    all.extend(plan.repeats.signature());
    all.extend([
        ("-d", list(plan.dtypes.iter().map(|d| d.name()).collect())),
        ("-o", list(plan.ops.iter().map(|o| table::op_name(*o)).collect())),
        ("-c", plan.check.to_string()),
        ("-m", plan.aggregate.to_string()),
        ("-N", plan.cycles.unwrap_or(0).to_string()),
        ("-z", format!("{:?}", plan.blocking).to_lowercase()),
        ("-a", average_name(plan.average).to_owned()),
        ("--calls", format!("{:?}", plan.calls).to_lowercase()),
        ("--one-way", (plan.messages == Messages::OneWay).to_string()),
        ("--ping-pong", (plan.messages == Messages::PingPong).to_string()),
        ("-R", u8::from(plan.registered(nccl)).to_string()),
        ("--algo", algo_name(&plan.algo).to_owned()),
        ("--min-busbw", plan.min_busbw.map_or("none".to_owned(), |least| least.to_string())),
        ("-I", u8::from(plan.columns.per_call).to_string()),
        ("-S", u8::from(plan.columns.timestamps).to_string()),
    ]);
    if plan.operation.rooted() {
        let root = match plan.roots {
            Roots::All => "all".to_owned(),
            Roots::One(root) => root.to_string(),
        };
        all.push(("-r", root));
    }
    all
}

fn average_name(average: Average) -> &'static str {
    match average {
        Average::First => "rank 0",
        Average::Mean => "mean",
        Average::Min => "min",
        Average::Max => "max",
    }
}
