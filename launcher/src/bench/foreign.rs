//! Flags of nccl-tests that choose what there is no choice of here: taken where they ask for what is always so, so that
//! commands that people have run as they are, and refused with what to take instead.

use crate::failure::{Failure, Result};
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
    /// Whether all of them ask for what is so anyway.
    ///
    /// # Errors
    /// The first that does not, and what to take instead.
    pub fn check(&self) -> Result<()> {
        let ranks = |what: &str, n: Option<u64>| {
            format!("a rank is one process with at most one {what}: take --ranks {}", n.unwrap_or(1))
        };
        let never = |what: &str| format!("{what}: leave it away");
        let all = [
            ("-t", self.nthreads, 1, ranks("calling thread", self.nthreads)),
            ("-g", self.ngpus, 1, ranks("GPU", self.ngpus)),
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
