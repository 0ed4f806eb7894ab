//! From literal flags to what one run of an operation does: everything that can be checked without ranks is.

use super::args::{Average, Bind, Blocking, Calls, CollectiveArgs, SweepArgs};
use super::messages::{self, Messages};
use super::operation::Operation;
use super::plot::MOST_LINES;
use super::sweep::{DEFAULT_ITERATIONS, Step, Sweep, default_iterations, default_warmup};
use super::table::{Columns, dtype_name, op_name};
use crate::agree::Signature;
use crate::bind::Binding;
use crate::failure::{Failure, Result};
use crate::human;
use crate::plan::with_ranks;
use collectives::schedule::Algorithm;
use collectives::{DType, ReduceOp};

/// More calls of a size than this, timed or not, are a typing error.
const MOST_CALLS: usize = 10_000_000;

/// The reduction of nccl-tests that has no counterpart here: each rank's data times a factor of its own, summed.
const MULSUM: &str = "mulsum";

/// A sweep with its repetitions, and where ranks run meanwhile.
#[derive(Clone, Debug)]
pub struct Repeats {
    pub sweep: Sweep,
    pub bind: Binding,
    /// Timed calls of each size; None: by size.
    iterations: Option<usize>,
    warmup: Option<usize>,
}

impl Repeats {
    /// Checks the flags.
    ///
    /// # Errors
    /// Sizes that cannot be read, an end below the beginning, no iterations.
    pub fn plan(args: &SweepArgs) -> Result<Self> {
        let (begin, end, step) = sizes(args)?;
        let sweep = Sweep::new(begin, end, step).map_err(Failure::usage)?;
        Self::over(sweep, args)
    }

    /// The same of what has no data, whatever the sizes.
    ///
    /// # Errors
    /// Sizes that cannot be read, no iterations.
    pub fn of_nothing(args: &SweepArgs) -> Result<Self> {
        sizes(args)?;
        Self::over(Sweep::NOTHING, args)
    }

    fn over(sweep: Sweep, args: &SweepArgs) -> Result<Self> {
        let count = |flag, text: &Option<String>| {
            text.as_deref().map(|text| whole(flag, text, "such as 100")).transpose()
        };
        let (iterations, warmup) = (count("-n", &args.iterations)?, count("-w", &args.warmup)?);
        if let Some(count) = warmup.filter(|&count| count > MOST_CALLS) {
            return Err(Failure::usage(format!(
                "-w {count}: up to {MOST_CALLS} calls go before those that are timed"
            )));
        }
        if let Some(count) = iterations.filter(|count| !(1..=MOST_CALLS).contains(count)) {
            return Err(Failure::usage(format!(
                "-n {count}: from 1 to {MOST_CALLS} calls are timed, and every time is kept"
            )));
        }
        let bind = match args.bind {
            None => Binding::Default,
            Some(Bind::Core) => Binding::Asked,
            Some(Bind::None) => Binding::None,
        };
        Ok(Repeats { sweep, bind, iterations, warmup })
    }

    /// What ranks must agree on.
    pub fn signature(&self) -> Signature {
        let count = |n: Option<usize>| n.map_or("by size".to_owned(), |n| n.to_string());
        vec![
            ("-b", self.sweep.begin.to_string()),
            ("-e", self.sweep.end.to_string()),
            match self.sweep.step {
                Step::Factor(factor) => ("-f", factor.to_string()),
                Step::Bytes(bytes) => ("-i", bytes.to_string()),
            },
            ("-n", count(self.iterations)),
            ("-w", count(self.warmup)),
            ("--bind", self.bind_name().to_owned()),
        ]
    }

    /// Whether ranks are bound, as `--bind` says it.
    pub fn bind_name(&self) -> &'static str {
        if self.bind == Binding::None { "none" } else { "core" }
    }

    /// Timed calls of a size.
    pub fn iterations(&self, bytes: usize) -> usize {
        self.iterations.unwrap_or_else(|| default_iterations(bytes))
    }

    /// Those of all sizes.
    pub fn calls(&self) -> u64 {
        let mut before = 0;
        let calls = DEFAULT_ITERATIONS.map(|(most, by_size)| {
            let sizes = self.sweep.up_to(most) - before;
            before += sizes;
            (sizes as u64).saturating_mul(self.iterations.unwrap_or(by_size) as u64)
        });
        calls.into_iter().fold(0, u64::saturating_add)
    }

    /// Untimed calls before them, as asked for.
    pub fn warmup(&self, bytes: usize) -> usize {
        self.warmup.unwrap_or_else(|| default_warmup(self.iterations(bytes)))
    }

    /// Those that are made: nccl-tests makes one of each size and placement, whatever was asked for.
    pub fn untimed(&self, bytes: usize) -> usize {
        self.warmup(bytes).max(1)
    }

    /// Whether the number of iterations depends on the size.
    pub fn adaptive(&self) -> bool {
        self.iterations.is_none()
    }
}

/// First and last size and the step between, as they were asked for.
fn sizes(args: &SweepArgs) -> Result<(usize, usize, Step)> {
    let bytes =
        |flag: &str, text: &str| human::parse_bytes(text).map_err(|e| Failure::usage(format!("{flag} {e}")));
    let begin = bytes("-b", &args.begin)?;
    let end = args.end.as_deref().map(|e| bytes("-e", e)).transpose()?;
    let step = args.step.as_deref().map(|step| bytes("-i", step)).transpose()?;
    let factor = |text: &str| whole("-f", text, "such as 2; -i takes a step in bytes");
    // As nccl-tests: a factor above 1 goes before a step in bytes.
    let step = match (step, args.factor.as_deref().map(factor).transpose()?) {
        (Some(step), None | Some(0 | 1)) => Step::Bytes(step),
        (_, factor) => Step::Factor(factor.unwrap_or(4)),
    };
    Ok((begin, end.unwrap_or(begin.max(64 << 20)), step))
}

/// Which ranks are roots in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roots {
    One(usize),
    All,
}

/// Which algorithm carries calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algo {
    /// The tuner's choice.
    Auto,
    /// This one.
    Named(Algorithm),
    /// The collectives of the transport's library.
    Native,
}

/// One run of one operation.
#[derive(Clone, Debug)]
pub struct Plan {
    pub operation: Operation,
    pub repeats: Repeats,
    pub dtypes: Vec<DType>,
    /// None once where nothing is reduced.
    pub ops: Vec<Option<ReduceOp>>,
    /// What is shown of that None: nccl-tests shows send_recv with the reduction that was asked for, which it has none of.
    pub unused_op: Option<&'static str>,
    pub roots: Roots,
    pub check: usize,
    pub average: Average,
    pub aggregate: usize,
    /// Times that the sweep is gone through; None: until somebody ends it.
    pub cycles: Option<usize>,
    pub blocking: Blocking,
    pub calls: Calls,
    pub messages: Messages,
    /// Whether buffers are from the transport, if that was said; over NCCL None is.
    pub register: Option<bool>,
    pub columns: Columns,
    pub algo: Algo,
    pub min_busbw: Option<f64>,
    /// Whether a figure is drawn.
    pub plot: bool,
    /// Whether every timing is written.
    pub json: bool,
    /// Whether there is nothing left to do once nobody reads what is printed.
    pub only_shown: bool,
}

impl Plan {
    /// Checks the flags of one operation.
    ///
    /// # Errors
    /// One sentence with the flag, what was given and what would work.
    pub fn new(operation: Operation, args: &CollectiveArgs) -> Result<Self> {
        let repeats = match operation {
            Operation::Barrier => Repeats::of_nothing(&args.sweep)?,
            _ => Repeats::plan(&args.sweep)?,
        };
        let dtypes = dtypes(&args.dtype)?;
        let ops = match (operation.reduces(), args.op.as_str()) {
            (true, "all") => ReduceOp::ALL.map(Some).to_vec(),
            (true, op) => {
                vec![Some(op.parse().map_err(|e| Failure::usage(format!("-o {op}: {e}, and all")))?)]
            }
            // Scripts pass -o to every test of nccl-tests, also what is not possible here; a name that nobody knows is still an
            // error.
            (false, op) if ["all", "none", MULSUM].contains(&op) || op.parse::<ReduceOp>().is_ok() => {
                vec![None]
            }
            (false, op) => {
                return Err(Failure::usage(format!("-o {op}: {}", op.parse::<ReduceOp>().unwrap_err())));
            }
        };
        let roots =
            match args.root.as_str() {
                // The latter is nccl-tests'.
                "all" | "-1" => Roots::All,
                text => Roots::One(text.parse().map_err(|_| {
                    Failure::usage(format!("-r {text}: the root is a rank such as 0, or all"))
                })?),
            };
        let aggregate = whole("-m", &args.aggregate, "from 1 to 1024")?;
        if aggregate == 0 || aggregate > 1024 {
            return Err(Failure::usage(format!("-m {aggregate}: 1 to 1024 calls can be in flight")));
        }
        let blocking = *choice(
            "-z",
            &args.blocking,
            &[Blocking::Streaming, Blocking::Barrier, Blocking::Wait, Blocking::Isolated],
        )?;
        let messages = messages::asked_for(operation, aggregate, blocking, args)?;
        let cycles =
            Some(whole("-N", &args.cycles, "or 0 to go on until it is interrupted")?).filter(|&n| n > 0);
        let check = whole("-c", &args.check, "at least 0")?;
        if check > MOST_CALLS {
            return Err(Failure::usage(format!(
                "-c {check}: up to {MOST_CALLS} calls of a size are checked"
            )));
        }
        let register = match args.register.as_deref() {
            Some("2") => {
                return Err(Failure::usage(
                    "-R 2 asks for symmetric memory of NCCL, and there is none here: leave it away",
                ));
            }
            asked => asked.map(|asked| switch("-R", asked)).transpose()?,
        };
        let min_busbw = args.min_busbw.as_deref().map(least_bandwidth).transpose()?;
        let columns =
            Columns { per_call: switch("-I", &args.per_call)?, timestamps: switch("-S", &args.timestamps)? };
        let plan = Plan {
            operation,
            repeats,
            dtypes,
            ops,
            unused_op: (operation == Operation::SendRecv).then(|| match args.op.as_str() {
                MULSUM => MULSUM,
                op => op.parse().unwrap_or(ReduceOp::Sum).name(),
            }),
            roots,
            check,
            average: *choice(
                "-a",
                &args.average,
                &[Average::First, Average::Mean, Average::Min, Average::Max],
            )?,
            aggregate,
            cycles,
            blocking,
            calls: if aggregate > 1 { Calls::Started } else { args.calls },
            messages,
            register,
            columns,
            algo: algo(&args.algo)?,
            min_busbw,
            plot: args.plot.is_some(),
            json: args.json.is_some(),
            only_shown: args.json.is_none()
                && args.csv.is_none()
                && args.plot.is_none()
                && args.min_busbw.is_none(),
        };
        plan.check_end(args)?;
        Ok(plan)
    }

    /// Refuses what comes at the end, or after it, of what has none.
    fn check_end(&self, args: &CollectiveArgs) -> Result<()> {
        if self.cycles.is_some() {
            return Ok(());
        }
        let at_end = [
            ("--json", args.json.is_some()),
            ("--csv", args.csv.is_some()),
            ("--plot", args.plot.is_some()),
            ("--min-busbw", args.min_busbw.is_some()),
        ];
        if let Some((flag, _)) = at_end.into_iter().find(|(_, asked)| *asked) {
            return Err(Failure::usage(format!(
                "-N 0 goes on until it is interrupted, and {flag} is of all rows, of which there is no end: leave it away or \
                 give -N 1 or more"
            )));
        }
        if args.ranks.quiet {
            return Err(Failure::usage(
                "-N 0 goes on until it is interrupted, and with --quiet nobody would ever hear of it: leave one of them away",
            ));
        }
        let in_turn = [
            ("-d all", self.dtypes.len() > 1),
            ("-o all", self.ops.len() > 1),
            ("-r all", self.operation.rooted() && self.roots == Roots::All),
        ];
        match in_turn.into_iter().find(|(_, several)| *several) {
            Some((flag, _)) => Err(Failure::usage(format!(
                "-N 0 goes on with the first of {flag} until it is interrupted: name one, or give -N 1 or more"
            ))),
            None => Ok(()),
        }
    }

    /// Checks what depends on the number of ranks, which something else has `started` or will.
    ///
    /// # Errors
    /// A root that is no rank, or sizes that leave a rank nothing.
    pub fn check(&self, ranks: usize, started: bool) -> Result<()> {
        match self.roots {
            Roots::One(root) if self.operation.rooted() && root >= ranks => {
                let most = ranks - 1;
                return Err(Failure::usage(format!("-r {root}: the {ranks} ranks count from 0 to {most}")));
            }
            _ => {}
        }
        if self.operation == Operation::SendRecv && ranks < 2 {
            let way = with_ranks(2, started);
            return Err(Failure::usage(format!("send_recv goes from rank to rank: {way} or more")));
        }
        for &dtype in &self.dtypes {
            self.repeats.sweep.check(self.operation, dtype, ranks).map_err(Failure::usage)?;
        }
        self.check_lines(ranks)?;
        self.check_data(ranks, started)
    }

    /// Refuses a figure of more lines than can be told apart.
    fn check_lines(&self, ranks: usize) -> Result<()> {
        let lines = self.dtypes.len() * self.ops.len() * self.roots(ranks).len();
        match self.plot && lines > MOST_LINES {
            false => Ok(()),
            true => {
                let several = human::either([
                    ("-d", self.dtypes.len() > 1),
                    ("-o", self.ops.len() > 1),
                    ("-r", self.roots(ranks).len() > 1),
                ]);
                Err(Failure::usage(format!(
                    "--plot: {lines} lines are asked for, and a figure tells {MOST_LINES} apart: name one of {several}"
                )))
            }
        }
    }

    /// Refuses what is drawn or judged by bytes where no call moves any.
    fn check_data(&self, ranks: usize, started: bool) -> Result<()> {
        let largest = self.repeats.sweep.largest();
        let moves =
            |dtype: &DType| self.operation.counts(largest, dtype.size(), ranks).bytes(dtype.size()) > 0;
        let asked = [("--plot", self.plot), ("--min-busbw", self.min_busbw.is_some())];
        match asked.into_iter().find(|(_, asked)| *asked) {
            Some((flag, _)) if !self.dtypes.iter().any(moves) => Err(Failure::usage(format!(
                "{flag} goes by sizes above 0, and {} has none here: {}",
                self.operation.name(),
                if self.operation == Operation::Barrier { "leave it away" } else { "raise -e" }
            ))),
            _ if self.min_busbw > Some(0.0) && self.operation.bus_factor(ranks) == 0.0 => {
                let (name, way) = (self.operation.name(), with_ranks(2, started));
                Err(Failure::usage(format!(
                    "--min-busbw: {name} of one rank has no bus bandwidth: {way} or more"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Whether buffers are from what moves them: the transport, or NCCL, with which none are registered.
    pub fn registered(&self, nccl: bool) -> bool {
        self.register.unwrap_or(!nccl)
    }

    /// Whether single calls are written of each of `ranks`. As in nccl-tests a list's place is its rank and the longest is the
    /// call's, which holds only where all are timed; one rank's is the call's itself.
    pub fn each_rank(&self, ranks: usize) -> bool {
        self.columns.per_call && self.json && ranks > 1 && self.messages.all_timed(ranks)
    }

    /// The column `redop` of a row.
    pub fn op_name(&self, op: Option<ReduceOp>) -> &'static str {
        op.map(ReduceOp::name).or(self.unused_op).unwrap_or(op_name(None))
    }

    /// The roots to go through over `ranks`; None once where there is no root.
    pub fn roots(&self, ranks: usize) -> Vec<Option<usize>> {
        match (self.operation.rooted(), self.roots) {
            (false, _) => vec![None],
            (true, Roots::One(root)) => vec![Some(root)],
            (true, Roots::All) => (0..ranks).map(Some).collect(),
        }
    }
}

/// Element types by name, or all of them.
///
/// # Errors
/// An unknown name.
pub fn dtypes(text: &str) -> Result<Vec<DType>> {
    let name = match text {
        "all" => return Ok(DType::ALL.to_vec()),
        "fp16" => "f16",
        "fp32" => "f32",
        "fp64" => "f64",
        other => other,
    };
    let one = name.parse().map_err(|_| {
        let known = DType::ALL.map(|dtype| format!("{} ({dtype})", dtype_name(dtype))).join(", ");
        Failure::usage(format!("-d {text}: element types are {known}, and all"))
    })?;
    Ok(vec![one])
}

fn algo(text: &str) -> Result<Algo> {
    match text {
        "auto" => Ok(Algo::Auto),
        "native" => Ok(Algo::Native),
        name => {
            let known =
                name.parse().map_err(|e| Failure::usage(format!("--algo {name}: {e}, auto, native")))?;
            Ok(Algo::Named(known))
        }
    }
}

/// A whole number; `which` says what would work.
fn whole(flag: &str, text: &str, which: &str) -> Result<usize> {
    text.parse().map_err(|_| Failure::usage(format!("{flag} {text}: give a whole number, {which}")))
}

fn least_bandwidth(text: &str) -> Result<f64> {
    let fits = |b: &f64| b.is_finite() && *b >= 0.0 && !human::vanishes(text, *b);
    let least = text.parse().ok().filter(fits);
    least.ok_or_else(|| Failure::usage(format!("--min-busbw {text}: give a number of GB/s of at least 0")))
}

/// One of numbered choices.
fn choice<'a, T>(flag: &str, text: &str, choices: &'a [T]) -> Result<&'a T> {
    let found = text.parse::<usize>().ok().and_then(|i| choices.get(i));
    found.ok_or_else(|| {
        Failure::usage(format!("{flag} {text}: give a number from 0 to {}", choices.len() - 1))
    })
}

fn switch(flag: &str, text: &str) -> Result<bool> {
    choice(flag, text, &[false, true]).copied()
}

#[cfg(test)]
pub mod tests;
