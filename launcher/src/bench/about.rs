//! What the JSON of a measurement says of what ran where.

use super::args::Blocking;
use super::calls::Party;
use super::cases::Cases;
use super::messages::Messages;
use super::plan::Plan;
use super::record;
use super::sweep::Step;
use super::{PCI, algo_name, average_name, native};
use crate::about::about;
use crate::gpus;
use crate::layers;
use serde_json::{Value, json};

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
