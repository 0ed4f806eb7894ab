//! Flags of nccl-tests that choose what there is no choice of here: taken where they ask for what is always so, so that
//! commands that people have run as they are, and refused with what to take instead.

use crate::failure::{Failure, Result};
use crate::plan::with_ranks;
use clap::Args;

/// Those flags, in nccl-tests' order and by its names.
#[derive(Args, Debug, Clone)]
pub struct ForeignArgs {
    /// Threads of a process.
    #[arg(short = 't', long = "nthreads", value_name = "N", hide = true)]
    nthreads: Option<u64>,
    /// GPUs of a thread.
    #[arg(short = 'g', long = "ngpus", value_name = "N", hide = true)]
    ngpus: Option<u64>,
    /// Whether threads initialise NCCL at once.
    #[arg(short = 'p', long = "parallel_init", value_name = "0|1", hide = true)]
    parallel_init: Option<u64>,
    /// Whether calls go to the null stream.
    #[arg(short = 'y', long = "stream_null", value_name = "0|1", hide = true)]
    stream_null: Option<u64>,
    /// Seconds after which a test is given up.
    #[arg(short = 'T', long = "timeout", value_name = "SECONDS", hide = true)]
    timeout: Option<u64>,
    /// How often a CUDA graph of the calls is launched.
    #[arg(short = 'G', long = "cudagraph", value_name = "N", hide = true)]
    graph: Option<u64>,
    /// Whether the processor's time is shown instead.
    #[arg(short = 'C', long = "report_cputime", value_name = "0|1", hide = true)]
    cpu_time: Option<u64>,
    /// NCCL's policy for thread arrays.
    #[arg(short = 'x', long = "cta_policy", value_name = "N", hide = true)]
    cta_policy: Option<u64>,
    /// Which of NCCL's device-side implementations runs.
    #[arg(short = 'D', long = "device_implementation", value_name = "N", hide = true)]
    device_implementation: Option<u64>,
    /// Thread arrays of that.
    #[arg(short = 'V', long = "device_cta_count", value_name = "N", hide = true)]
    device_cta_count: Option<u64>,
    /// How many calls are left out of what -I shows.
    #[arg(short = 'K', long = "per_iter_skip", value_name = "N", hide = true)]
    skip: Option<u64>,
    /// Whether NCCL's memory is reported.
    #[arg(short = 'M', long = "memory_report", alias = "memory", value_name = "0|1", hide = true)]
    memory: Option<u64>,
    /// Whether buffers start at odd addresses.
    #[arg(short = 'u', long = "unalign", value_name = "N", hide = true)]
    unalign: Option<u64>,
}

impl ForeignArgs {
    /// Whether all of them ask for what is so anyway. `started`: how many processes something else starts, if it does;
    /// `asked`: what `--ranks` says.
    ///
    /// # Errors
    /// The first that does not, and what to take instead.
    pub fn check(&self, started: Option<usize>, asked: Option<usize>) -> Result<()> {
        let each = [self.nthreads, self.ngpus].map(|n| n.unwrap_or(1).max(1));
        let all = each.into_iter().fold(started.unwrap_or(1) as u64, u64::saturating_mul);
        let ranks = |what: &str| {
            let way = match asked {
                Some(ranks) => format!("leave it away, for --ranks {ranks} says how many there are"),
                None => with_ranks(all, started.is_some()),
            };
            format!("a rank is one process with at most one {what}: {way}")
        };
        let never = |what: &str| format!("{what}: leave it away");
        let all = [
            ("-t", self.nthreads, 1, ranks("calling thread")),
            ("-g", self.ngpus, 1, ranks("GPU")),
            ("-y", self.stream_null, 0, never("every rank has streams of its own")),
            ("-T", self.timeout, 0, "take --call-timeout, in seconds".to_owned()),
            ("-G", self.graph, 0, never("calls are not recorded as CUDA graphs")),
            ("-C", self.cpu_time, 0, never("times are those of whole calls")),
            ("-x", self.cta_policy, 0, "take NCCL's own variable NCCL_CTA_POLICY".to_owned()),
            ("-D", self.device_implementation, 0, never("collectives are started by the host")),
            ("-K", self.skip, 0, "take -w, whose calls are not timed".to_owned()),
            ("-M", self.memory, 0, never("NCCL does not say what it takes")),
            ("-u", self.unalign, 0, never("buffers are aligned")),
        ];
        VARIABLES
            .iter()
            .try_for_each(|variable| variable.refuse(std::env::var_os(variable.name).is_some()))?;
        let odd = all.into_iter().find(|(_, asked, neutral, _)| asked.is_some_and(|asked| asked != *neutral));
        match odd {
            // -p changes nothing that is measured, and -V nothing without -D.
            None => Ok(()),
            Some((flag, asked, _, remedy)) => {
                Err(Failure::usage(format!("{flag} {} of nccl-tests: {remedy}", asked.unwrap_or(0))))
            }
        }
    }
}

/// A variable of the environment by which nccl-tests does something else.
struct Variable {
    name: &'static str,
    remedy: &'static str,
}

const VARIABLES: [Variable; 4] = [
    Variable {
        name: "NCCL_TESTS_MIN_BW",
        remedy: "take --min-busbw with 0.9 of it, below which nccl-tests fails",
    },
    Variable { name: "NCCL_TESTS_DEVICE", remedy: "take CUDA_VISIBLE_DEVICES" },
    Variable { name: "NCCL_TESTS_SPLIT", remedy: "unset it, for all ranks are one group here" },
    Variable { name: "NCCL_TESTS_SPLIT_MASK", remedy: "unset it, for all ranks are one group here" },
];

impl Variable {
    fn refuse(&self, set: bool) -> Result<()> {
        match set {
            false => Ok(()),
            true => Err(Failure::usage(format!("{} of nccl-tests is set: {}", self.name, self.remedy))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::bench;
    use crate::bench::args::Task;

    fn check(flags: &str, started: Option<usize>) -> Result<()> {
        let bench = bench(&format!("all_reduce {flags}"));
        let Task::Operation(_, args) = bench.command.task() else { panic!("{flags}") };
        args.foreign.check(started, args.ranks.ranks)
    }

    #[test]
    fn what_is_always_so_may_be_asked_for() {
        for flags in [
            "-b 8 -e 128M -f 2 -g 1",
            "-t 1 -g 1 -p 1 -y 0 -T 0 -G 0 -C 0 -x 0 -D 0 -V 16 -K 0 -M 0 -u 0",
            "--device_cta_count 16 --per_iter_skip 0",
            "--nthreads 1 --ngpus 1 --parallel_init 0 --stream_null 0 --timeout 0 --cudagraph 0",
        ] {
            check(flags, None).unwrap();
            check(flags, Some(4)).unwrap();
        }
    }

    #[test]
    fn variables_that_would_be_ignored_are_refused() {
        for variable in VARIABLES {
            assert!(variable.refuse(false).is_ok());
            let e = variable.refuse(true).unwrap_err();
            assert!(e.code() == 2 && e.to_string().starts_with(variable.name), "{e}");
        }
    }

    #[test]
    fn what_is_not_so_is_refused_with_what_would_be() {
        for (flags, started, words) in [
            ("-g 4", None, ["-g 4", "take --ranks 4"]),
            ("-t 2", None, ["-t 2", "take --ranks 2"]),
            ("-t 2 -g 4", None, ["-t 2", "take --ranks 8"]),
            ("-t 4 --ranks 4", None, ["-t 4", "leave it away, for --ranks 4"]),
            ("-g 0", None, ["-g 0", "take --ranks 1"]),
            // Processes of nccl-tests have so many ranks each.
            ("-g 8", Some(2), ["-g 8", "start 16 ranks"]),
            ("-T 30", None, ["-T 30", "--call-timeout"]),
            ("-G 1", None, ["-G 1", "CUDA graphs"]),
            ("-K 3", None, ["-K 3", "-w"]),
        ] {
            let e = check(flags, started).expect_err(flags);
            assert!(e.code() == 2 && words.iter().all(|word| e.to_string().contains(word)), "{flags}: {e}");
        }
    }
}
