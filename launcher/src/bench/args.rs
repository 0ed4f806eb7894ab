//! The flags of `caravan bench`: those of nccl-tests where they mean something here, by the same letters.

use super::foreign::ForeignArgs;
use super::operation::Operation;
use crate::args::{Mover, RankArgs};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Not in the help of what refuses it, or draws no bar: flags are those of all that runs ranks. What --quiet leaves is said for
/// `bench`, which has neither a sample nor a loss.
fn without(flag: clap::Arg, hidden: &[&str]) -> clap::Arg {
    if flag.get_id().as_str() == "quiet" {
        return flag.help(
            "Nothing but errors is printed: results are in the files that other flags name (--json, --csv, --plot, or \
             tune's --out)",
        );
    }
    let hide = hidden.contains(&flag.get_id().as_str());
    if hide { flag.hide(true) } else { flag }
}

/// The same of one operation, of which alone there are native forms.
fn of_operations(flag: clap::Arg) -> clap::Arg {
    let flag = without(flag, &["threads", "color"]);
    match flag.get_id().as_str() {
        "call_timeout" => flag.help(
            "Seconds that a rank may be silent later while another waits for it; then the run ends and names it. One that gets \
             further with others meanwhile is waited for ten times as long. It has to be longer than 32 MiB take over the \
             slowest link or, with --algo native, than all that a call sends takes",
        ),
        _ => flag,
    }
}

/// Flags of `bench`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan bench all_reduce
      f32 sums from 1 KiB to 64 MiB over 2 local ranks, in nccl-tests' table
  caravan bench reduce_scatter -b 64K -e 64M -f 2 -d bfloat16 --ranks 4 --json rs.json --plot rs.svg
  mpirun -n 4 caravan bench all_gather --transport mpi --algo native
  caravan bench all_reduce -b 1M -e 1M --min-busbw 10
      exit code 1 if the average bus bandwidth is below 10 GB/s
  caravan bench overlap reduce_scatter -b 1M -e 64M
  caravan bench tune --out tuning.txt
  caravan bench plot shm.json mpi.json -o both.svg")]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// What `bench` measures.
#[derive(Subcommand, Debug, Clone)]
pub enum BenchCommand {
    /// Every rank gets the reduction of all ranks' data.
    #[command(name = "all_reduce", alias = "all-reduce", alias = "allreduce")]
    AllReduce(CollectiveArgs),
    /// Rank r gets part r of the reduction.
    #[command(name = "reduce_scatter", alias = "reduce-scatter", alias = "reducescatter")]
    ReduceScatter(CollectiveArgs),
    /// Every rank gets every rank's part.
    #[command(name = "all_gather", alias = "all-gather", alias = "allgather")]
    AllGather(CollectiveArgs),
    /// Every rank gets the root's data.
    #[command(name = "broadcast", alias = "bcast")]
    Broadcast(CollectiveArgs),
    /// The root gets the reduction.
    #[command(name = "reduce")]
    Reduce(CollectiveArgs),
    /// The root gets every rank's part.
    #[command(name = "gather")]
    Gather(CollectiveArgs),
    /// Rank r gets part r of the root's data.
    #[command(name = "scatter")]
    Scatter(CollectiveArgs),
    /// Rank r gets part r of every rank's data.
    #[command(name = "all_to_all", alias = "all-to-all", alias = "alltoall")]
    AllToAll(CollectiveArgs),
    /// Every rank sends to the next and receives from the one before.
    #[command(name = "send_recv", alias = "send-recv", alias = "sendrecv")]
    SendRecv(CollectiveArgs),
    /// Nobody leaves before all have entered.
    #[command(name = "barrier")]
    Barrier(CollectiveArgs),
    /// How much of a collective hides behind computation, and what it costs the computation.
    Overlap(OverlapArgs),
    /// Measure which algorithm is fastest at which size here, for --algo auto to use.
    Tune(TuneArgs),
    /// Time each kernel of a model on a GPU against what bounds it, or check it against its definition.
    Kernels(KernelArgs),
    /// Draw the results of several runs into one figure.
    Plot(PlotArgs),
}

/// The same with what all operations have in common.
pub enum Task<'a> {
    Operation(Operation, &'a CollectiveArgs),
    Overlap(&'a OverlapArgs),
    Tune(&'a TuneArgs),
    Kernels(&'a KernelArgs),
    Plot(&'a PlotArgs),
}

impl BenchCommand {
    /// What is to be done, with its flags.
    pub fn task(&self) -> Task<'_> {
        let (operation, args) = match self {
            BenchCommand::AllReduce(a) => (Operation::AllReduce, a),
            BenchCommand::ReduceScatter(a) => (Operation::ReduceScatter, a),
            BenchCommand::AllGather(a) => (Operation::AllGather, a),
            BenchCommand::Broadcast(a) => (Operation::Broadcast, a),
            BenchCommand::Reduce(a) => (Operation::Reduce, a),
            BenchCommand::Gather(a) => (Operation::Gather, a),
            BenchCommand::Scatter(a) => (Operation::Scatter, a),
            BenchCommand::AllToAll(a) => (Operation::AllToAll, a),
            BenchCommand::SendRecv(a) => (Operation::SendRecv, a),
            BenchCommand::Barrier(a) => (Operation::Barrier, a),
            BenchCommand::Overlap(a) => return Task::Overlap(a),
            BenchCommand::Tune(a) => return Task::Tune(a),
            BenchCommand::Kernels(a) => return Task::Kernels(a),
            BenchCommand::Plot(a) => return Task::Plot(a),
        };
        Task::Operation(operation, args)
    }

    /// The flags about ranks, if it runs any.
    pub fn ranks(&self) -> Option<&RankArgs> {
        match self.task() {
            Task::Operation(_, args) => Some(&args.ranks),
            Task::Overlap(args) => Some(&args.ranks),
            Task::Tune(args) => Some(&args.ranks),
            Task::Kernels(_) | Task::Plot(_) => None,
        }
    }
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Bind {
    /// Each on its share of the processors, if there are as many as ranks.
    Core,
    /// Wherever the scheduler puts them.
    None,
}

/// Which sizes are measured, how often, and on which processors.
#[derive(Args, Debug, Clone)]
pub struct SweepArgs {
    /// The first size in bytes; suffixes K, M and G (or KiB, MiB, GiB) are powers of 1024.
    #[arg(short = 'b', long = "minbytes", value_name = "BYTES", default_value = "1K")]
    pub begin: String,
    /// The last size in bytes [default: 64M, or -b if that is more].
    #[arg(short = 'e', long = "maxbytes", value_name = "BYTES")]
    pub end: Option<String>,
    /// Each size is the last times this [default: 4, unless -i is given].
    #[arg(short = 'f', long = "stepfactor", value_name = "N")]
    pub factor: Option<String>,
    /// Each size is the last plus this many bytes, unless -f is above 1.
    #[arg(short = 'i', long = "stepbytes", value_name = "BYTES")]
    pub step: Option<String>,
    /// Timed calls of each size [default: 1000 up to 8K, 100 up to 1M, 20 above].
    #[arg(short = 'n', long = "iters", value_name = "N")]
    pub iterations: Option<String>,
    /// Untimed calls before those; one is made in any case, as by nccl-tests [default: a tenth of them, at least 2].
    #[arg(short = 'w', long = "warmup-iters", alias = "warmup_iters", value_name = "N")]
    pub warmup: Option<String>,
    /// Whether ranks that caravan starts stay each on its share of the cores (`mpirun --bind-to core` gives each rank one);
    /// not over NCCL, which has threads of its own [default: core, where the system shows its processors].
    #[arg(long, value_enum, value_name = "TO")]
    pub bind: Option<Bind>,
}

/// How a rank's time becomes the reported time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// Rank 0's.
    First,
    /// The mean over ranks.
    Mean,
    /// The fastest rank's.
    Min,
    /// The slowest rank's.
    Max,
}

/// When ranks wait for each other between calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// Never: one call follows the other.
    Streaming,
    /// A barrier after each call, inside the time.
    Barrier,
    /// Each call is waited for; no barrier.
    Wait,
    /// A barrier after each timed iteration, outside the time.
    Isolated,
}

/// Which form of the calls is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Calls {
    /// The call returns when it is done.
    Blocking,
    /// The call starts and is waited for.
    Started,
}

/// Flags of one operation. -V is a flag of nccl-tests, which means something else by it than the version; and of a flag that
/// is given again the last holds there, as scripts that append to common flags expect.
#[derive(Args, Debug, Clone)]
#[command(
    disable_version_flag = true,
    args_override_self = true,
    after_help = "Examples:
  caravan bench all_reduce -b 8 -e 128M -f 2
  caravan bench reduce_scatter -d all -o all -b 1M -e 1M
  caravan bench all_gather -b 64K -e 64M -f 4 -z 3 -n 100 --json run.json --csv run.csv --plot run.svg

Parts per rank are rounded down to 16 bytes, and bandwidths counted, as nccl-tests does. Its other flags (-g, -t, -p, \
-y, -T, -G, -C, -x, -D, -V, -K, -M, -u) are taken where they ask for what is always so here, as -g 1 does."
)]
#[command(mut_args(of_operations))]
pub struct CollectiveArgs {
    /// Sizes and repetitions.
    #[command(flatten)]
    pub sweep: SweepArgs,
    /// Element type (f32, bf16, float, half, int8, ...) or 'all'.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "float")]
    pub dtype: String,
    /// Reduction (sum, prod, min, max, avg) or 'all'.
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum")]
    pub op: String,
    /// The root, for operations that have one; 'all' or -1 takes every rank in turn.
    #[arg(short = 'r', long, value_name = "RANK", default_value = "0")]
    pub root: String,
    /// Calls whose results are checked, each with other data; 0 checks nothing.
    #[arg(short = 'c', long, value_name = "N", default_value = "1")]
    pub check: String,
    /// Which rank's time is reported: 0 rank 0's, 1 the mean, 2 the fastest, 3 the slowest; a rank's time is the mean of its
    /// calls, so that over ranks 2 and 3 may lie outside what single calls come to.
    #[arg(short = 'a', long, value_name = "0..3", default_value = "1")]
    pub average: String,
    /// Calls in flight at once in each timed iteration; more than 1 starts them all before waiting, but
    /// with -z 1 and 2 one after the other.
    #[arg(short = 'm', long = "agg-iters", alias = "agg_iters", value_name = "N", default_value = "1")]
    pub aggregate: String,
    /// Times that the sweep is repeated and printed; 0 goes on until it is interrupted or nobody reads it.
    #[arg(short = 'N', long = "run-cycles", alias = "run_cycles", value_name = "N", default_value = "1")]
    pub cycles: String,
    /// 0 back to back; 1 a barrier after each call, inside the time; 2 back to back, each call waited for;
    /// 3 a barrier after each iteration, outside the time, where each rank's time begins as it leaves the barrier: on a link
    /// up to a latency apart.
    #[arg(short = 'z', long, value_name = "0..3", default_value = "0")]
    pub blocking: String,
    /// Whether calls return when done, or are started and then waited for (always so with -m above 1).
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Calls::Blocking)]
    pub calls: Calls,
    /// send_recv: ranks 0, 2, … only send and ranks 1, 3, … only receive; with -m a window of messages under way.
    #[arg(long = "one-way", alias = "one_way")]
    pub one_way: bool,
    /// send_recv: ranks 0, 2, … send to ranks 1, 3, …, which answer with as much; times are half of both, as the latency of
    /// OSU's and UCX's benchmarks is.
    #[arg(long = "ping-pong", alias = "ping_pong")]
    pub ping_pong: bool,
    /// 1 takes buffers from the transport, which peers reach fastest; 0 takes them from the heap. Over NCCL, which is given
    /// none to register, 0 alone is possible [default: 1, over NCCL 0].
    #[arg(short = 'R', long = "local-register", alias = "local_register", value_name = "0|1")]
    pub register: Option<String>,
    /// 1 adds columns with the least, greatest and 99th percentile of single calls and their variation, each call as
    /// long as on its slowest rank, whatever -a says, which back to back (-z 0) is more than a call takes where ranks get ahead
    /// of each other in turn; in the file of --json every such call, and each rank's where all are timed.
    #[arg(
        short = 'I',
        long = "per-iter-timing",
        alias = "per_iter_timing",
        value_name = "0|1",
        default_value = "0"
    )]
    pub per_call: String,
    /// 1 adds a column with the time of day (UTC).
    #[arg(
        short = 'S',
        long = "report-timestamps",
        alias = "report_timestamps",
        value_name = "0|1",
        default_value = "0"
    )]
    pub timestamps: String,
    /// How ranks share the work of a call: 'auto' (a tuning table, else the cost model), the name of an algorithm (one that
    /// there is not shows all), or 'native' (the collectives of the transport's own library).
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub algo: String,
    /// Exit with 1 if the average bus bandwidth is below this many GB/s.
    #[arg(long, value_name = "GB/s")]
    pub min_busbw: Option<String>,
    /// Write configuration, machine, algorithms with reasons, and every timing; a FILE that is there is replaced, as by
    /// --csv and --plot: after a row, but at most once a second and a twentieth of the time, with "complete": false, and at
    /// the end.
    #[arg(short = 'J', long, alias = "output_file", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write one line per size and placement; bandwidths are in GB/s, of 10^9 bytes, and percentiles are of single calls, each
    /// over ranks as -a says, where a row's time is that of ranks' means, which with -a 2 and 3 may lie outside its min and max;
    /// those of -I (i_*) are of single calls on their slowest ranks.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw bandwidth and time against size.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// What there is no choice of.
    #[command(flatten)]
    pub foreign: ForeignArgs,
    /// Ranks and how they talk.
    #[command(flatten)]
    pub ranks: RankArgs,
}

/// Flags of `bench overlap`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan bench overlap reduce_scatter
  caravan bench overlap all_gather -b 1M -e 64M --json overlap.json

Columns: pure is a call alone; compute is the matrix products alone, as many as take as long as the call does on the mean; \
overall is the call started, the products, then the wait; init, test and wait are its time inside the start, the calls to \
progress and the wait. Times are medians over calls and means over ranks. Two formulas of overlap, in per cent, of means over \
calls, as the benchmarks of these names have them (in the file of --json also of medians), and two costs:
  OSU      = max(0, 100 - 100 (overall - compute while communicating) / pure)
  IMB      = 100 max(0, min(1, (pure + cpu - overall) / max(pure, cpu))), where cpu is the compute
             while communicating, all of the rank whose overall is largest
  Exposed  = overall - compute
  Slowdown = compute while communicating / compute")]
#[command(mut_args(|flag| without(flag, &["threads", "color", "share_gpus"])))]
pub struct OverlapArgs {
    /// What is overlapped [default: all of them].
    #[arg(value_enum, value_name = "OPERATION")]
    pub operations: Vec<Overlapped>,
    /// Sizes and repetitions.
    #[command(flatten)]
    pub sweep: SweepArgs,
    /// Element type.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "float")]
    pub dtype: String,
    /// Who moves calls forward while ranks compute.
    #[arg(long, value_enum, value_name = "WHO", default_value_t = Mover::Thread)]
    pub progress: Mover,
    /// Calls to the library's progress between slices of computation, with --progress inline: at most one between two products.
    #[arg(short = 't', long, value_name = "N", default_value_t = 0)]
    pub tests: usize,
    /// Write everything, with every timing; a FILE that is there is replaced: after a row, but at most once a second and a
    /// twentieth of the time, with "complete": false, and at the end.
    #[arg(short = 'J', long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Ranks and how they talk.
    #[command(flatten)]
    pub ranks: RankArgs,
}

/// What `bench overlap` can overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overlapped {
    /// Part r of the reduction on rank r.
    #[value(name = "reduce_scatter", alias = "reduce-scatter")]
    ReduceScatter,
    /// Every part on every rank.
    #[value(name = "all_gather", alias = "all-gather")]
    AllGather,
    /// The reduction on every rank.
    #[value(name = "all_reduce", alias = "all-reduce")]
    AllReduce,
}

/// Flags of `bench tune`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan bench tune --ranks 2 --out tuning.txt
  caravan bench all_reduce --tuning tuning.txt
  CARAVAN_TUNING=tuning.txt caravan train

A table holds for the transport, the number of ranks and, with two transports, the layout of nodes that it was measured \
with, on the machine that measured it, which a comment names; nothing checks that. What else is in the file is kept. Over \
mpi or ucx alone it is for ranks that lie on their hosts as they did then. A rule holds from half a step below the smallest \
size tried to half a step above the largest, and the cost model decides about other sizes. It takes the place of the \
collective's old rule, also if that was for more sizes, which is then said; the file is written after each collective. It is \
measured with f32, in place and out of place where a collective has both: a rule is for both, and judges an algorithm by the \
form in which it is further behind the fastest. Sums of 16-bit types go over nodes only where they save more than half. Each \
algorithm is timed in three rounds of a fifth of -n calls, at least 3, after a fifth of -w, at least 2.")]
#[command(mut_args(|flag| without(flag, &["threads", "color", "share_gpus", "tuning"])))]
pub struct TuneArgs {
    /// The table to write; entries of other transports and worlds in it are kept, and comments; those of the same ones are
    /// replaced whole, with the comment that says where they were measured.
    #[arg(short = 'o', long, value_name = "FILE", default_value = "caravan-tuning.txt")]
    pub out: PathBuf,
    /// Sizes and repetitions.
    #[command(flatten)]
    pub sweep: SweepArgs,
    /// Ranks and how they talk.
    #[command(flatten)]
    pub ranks: RankArgs,
}

/// Flags of `bench kernels`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan bench kernels
      times on GPU 0, on the shapes of llama-3.2-1b
  caravan bench kernels attention norm --model llama-3.1-8b --micro-batch 1 --json times.json
  caravan bench kernels --check
      every kernel against its definition on the processor; exit code 1 if one is wrong
  caravan bench kernels --check --without attention
      the same without the kernels for Hopper alone

A word that is the whole name of a kernel or a case chooses only that; another one all that have it in their names. What the \
device refuses is said where it belongs, and the rest runs; --json is written anew after each of them, so that it says \
what was running if the device hangs.

What moves data is compared with the memory's speed by the data sheet and with a copy, what computes with the dense \
16-bit FLOP/s of the data sheet. Causal attention is counted without what its mask takes off.")]
pub struct KernelArgs {
    /// Only kernels, or with --check cases, of this name, or whose names have this word in them.
    #[arg(value_name = "KERNEL")]
    pub only: Vec<String>,
    /// Leave these out, by the same rule; may be given several times.
    #[arg(long, value_name = "KERNEL")]
    pub without: Vec<String>,
    /// Compare with the definitions instead of timing, on shapes of their own.
    #[arg(long, conflicts_with_all = ["model", "rows", "length"])]
    pub check: bool,
    /// The model whose shapes are timed.
    #[arg(long, value_name = "MODEL", default_value = "llama-3.2-1b")]
    pub model: String,
    /// Sequences of a micro-batch.
    #[arg(long = "micro-batch", value_name = "N", default_value_t = 8)]
    pub rows: usize,
    /// Tokens of a sequence.
    #[arg(long = "seq", value_name = "N", default_value_t = 2048)]
    pub length: usize,
    /// Write everything.
    #[arg(short = 'J', long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Flags of `bench plot`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan bench plot run.json -o run.svg
  caravan bench plot shm.json mpi.json ucx.json -o transports.svg")]
pub struct PlotArgs {
    /// What --json wrote.
    #[arg(value_name = "FILE.json", required = true)]
    pub inputs: Vec<PathBuf>,
    /// The figure.
    #[arg(short = 'o', long, value_name = "FILE.svg")]
    pub out: PathBuf,
}
