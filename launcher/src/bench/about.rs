//! What the JSON of every measurement, and the metrics of every training, say of the run before anything is known of it: what
//! wrote it, when, how it was called, and where.

use super::args::Blocking;
use super::calls::Party;
use super::cases::Cases;
use super::messages::Messages;
use super::plan::Plan;
use super::record;
use super::sweep::Step;
use super::{PCI, algo_name, average_name, native};
use crate::gpus;
use crate::layers;
use crate::machine::{Machine, PROGRAM, versions};
use crate::transports::OF_UCX;
use collectives::bootstrap::{spawn, variables};
use serde_json::{Value, json};

/// What wrote a file, by which it is known later for one that may be replaced.
pub fn generator() -> Value {
    PROGRAM.into()
}

/// Of a run that began at `started`, over `library` where the transport has one.
pub fn about(started: &str, library: Option<String>) -> Value {
    json!({
        "generator": generator(),
        "start_time": started,
        "args": std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "env": environment(),
        "machine": Machine::probe().json(),
        "versions": versions(),
        "transport_library": library,
    })
}

/// What of the environment a run goes by: settings of communication libraries and of this program, and which job it is; nothing
/// else of it, for it may hold secrets.
fn environment() -> Vec<String> {
    let supervised = spawn::supervised();
    let mut all: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_told(name, supervised))
        .filter(|(name, value)| !OF_UCX.contains(&(name.as_str(), value.as_str())))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    all.sort();
    all
}

/// Whether a variable of this name is told of a rank, which may be `supervised` by this program.
fn is_told(name: &str, supervised: bool) -> bool {
    const TOLD: [&str; 13] = [
        "UCX_",
        "OMPI_",
        "MPIR_CVAR_",
        "NCCL_",
        "CARAVAN_",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "SLURM_JOB_ID",
        "SLURM_JOB_NAME",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_PARTITION",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
    ];
    /// What mpirun's daemons tell each other by, among it a key.
    const INNER: [&str; 2] = ["OMPI_MCA_orte_", "OMPI_MCA_ess_"];
    /// What a supervisor sets for its ranks.
    const OWN: [&str; 5] =
        [variables::RANK, variables::WORLD, variables::LOCAL_RANK, variables::LOCAL_SIZE, variables::JOB];
    let begins = |with: &[&str]| with.iter().any(|start| name.starts_with(start));
    let handed = name == variables::TOKEN || name.starts_with("CARAVAN_") && name.ends_with("_FD");
    let inner = begins(&INNER) || handed || supervised && OWN.contains(&name);
    begins(&TOLD) && !inner
}

/// The part of the JSON that says what ran where.
pub fn run(plan: &Plan, cases: &Cases, party: &Party, who: &[String], started: &str) -> Value {
    let sweep = plan.repeats.sweep;
    let devices = who.iter().enumerate().map(|(rank, line)| {
        let fields: Vec<&str> = line.split('\t').collect();
        let field = |i: usize| fields.get(i).copied().unwrap_or("");
        json!({
            "rank": rank, "group": 0, "pid": field(0).parse::<u64>().ok(), "hostname": field(1),
            "device": field(2).parse::<u64>().ok(), "device_hex": PCI, "device_info": field(3),
            "processors": field(4),
        })
    });
    let [first, second] = plan.operation.placements(plan.calls, party.native.is_some());
    let mut config = json!({
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": sweep.begin,
        "maximum_bytes": sweep.end,
        "warmup_iters": plan.repeats.warmup(sweep.largest()),
        "iterations": plan.repeats.iterations(sweep.largest()),
        "iterations_by_size": plan.repeats.adaptive(),
        "aggregated_iterations": plan.aggregate,
        "run_cycles": plan.cycles,
        "validation": plan.check,
        "graph": 0,
        "blocking_collectives": record::told(plan.blocking != Blocking::Streaming),
        "per_iter_timing": record::told(plan.columns.per_call),
        "per_iter_skip": 0,
        "parallel_init": record::told(false),
        "average": average_name(plan.average),
        "blocking": format!("{:?}", plan.blocking).to_lowercase(),
        "calls": format!("{:?}", plan.calls).to_lowercase(),
        "one_way": plan.messages == Messages::OneWay,
        "ping_pong": plan.messages == Messages::PingPong,
        "registered_buffers": plan.registered(party.device.is_some()),
        "algo": algo_name(&plan.algo),
        "one_form": first == second,
        "skipped": cases.skipped,
        "devices": devices.collect::<Vec<_>>(),
    });
    match sweep.step {
        Step::Factor(factor) => config["step_factor"] = json!(factor),
        Step::Bytes(bytes) => config["step_bytes"] = json!(bytes),
    }
    let library = match party.device {
        Some(_) => gpus::library(),
        None => native::library(layers::between(party.comm.transport_name())),
    };
    let mut all = about(started, library);
    // Of nccl-tests' format.
    all["version"] = json!(3);
    all["config"] = config;
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_told_without_what_is_secret_or_our_own() {
        for name in
            ["UCX_TLS", "NCCL_DEBUG", "OMPI_MCA_btl", "SLURM_JOB_ID", "CARAVAN_CACHE", "CARAVAN_RENDEZVOUS"]
        {
            assert!(is_told(name, false) && is_told(name, true), "{name}");
        }
        for name in
            ["HOME", "AWS_SECRET_ACCESS_KEY", "CARAVAN_TOKEN", "CARAVAN_BOARD_FD", "CARAVAN_TOKENS_FD"]
        {
            assert!(!is_told(name, false), "{name}");
        }
        assert!(!is_told("OMPI_MCA_orte_precondition_transports", false));
        // A user sets it, or the program that has started the rank.
        assert!(is_told("CARAVAN_RANK", false) && !is_told("CARAVAN_RANK", true));
    }
}
