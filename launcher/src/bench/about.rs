//! What the JSON of a measurement says of what ran where.

use super::args::Blocking;
use super::calls::Party;
use super::cases::Cases;
use super::messages::Messages;
use super::plan::{Plan, Repeats};
use super::record;
use super::sweep::Step;
use super::{PCI, algo_name, average_name};
use crate::about::about;
use crate::agree;
use crate::bind;
use crate::failure::{Failure, Result};
use crate::gpus;
use crate::layers;
use crate::machine::Machine;
use crate::transports;
use serde_json::{Map, Value, json};

/// What a rank says about itself.
pub struct Member {
    pub pid: u32,
    pub host: String,
    /// The number of its device.
    pub device: usize,
    /// Which processor or GPU that is.
    pub name: String,
    /// Those that it may use, as the system lists them.
    pub processors: String,
}

impl Member {
    /// Every rank, in rank order.
    ///
    /// # Errors
    /// The transport's.
    pub fn all(party: &Party) -> Result<Vec<Member>> {
        let machine = Machine::probe();
        let (device, name) = match &party.device {
            Some(gpus) => (gpus.device.gpu.ordinal(), gpus.device.gpu.properties().name.clone()),
            None => (0, machine.cpu),
        };
        let mine = json!([std::process::id(), machine.host, device, name, bind::listed(&bind::processors())]);
        let all = agree::exchange(&party.comm, &mine.to_string())?;
        let read = |line: &String| {
            let (pid, host, device, name, processors) = serde_json::from_str(line).map_err(Failure::run)?;
            Ok(Member { pid, host, device, name, processors })
        };
        all.iter().map(read).collect()
    }
}

/// The part of the JSON that says what ran where.
pub fn run(plan: &Plan, cases: &Cases, party: &Party, who: &[Member], started: &str) -> Value {
    let devices = who.iter().enumerate().map(|(rank, member)| {
        json!({
            "rank": rank, "group": 0, "pid": member.pid, "hostname": member.host, "device": member.device,
            "device_hex": PCI, "device_info": member.name, "processors": member.processors,
        })
    });
    let [first, second] = plan.operation.placements(plan.calls, party.native.is_some());
    let rest = json!({
        "nthreads": 1,
        "ngpus": 1,
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
    let mut config = repeated(&plan.repeats);
    config.extend(rest.as_object().cloned().unwrap_or_default());
    let library = match party.device {
        Some(_) => gpus::library(),
        None => transports::library(layers::between(party.comm.transport_name())),
    };
    let mut all = about(started, library);
    // Of nccl-tests' format, which has the number of the NCCL that it measures beside it.
    all["version"] = json!(3);
    all["nccl_version"] = json!(party.device.as_ref().and_then(|_| gpus::nccl_number()));
    all["config"] = config.into();
    all
}

/// What its `config` says of sizes and calls: as asked for, or what stands for that.
pub fn repeated(repeats: &Repeats) -> Map<String, Value> {
    let sweep = repeats.sweep;
    let (step, by) = match sweep.step {
        Step::Factor(factor) => ("step_factor", json!(factor)),
        Step::Bytes(bytes) => ("step_bytes", json!(bytes)),
    };
    let told = [
        ("minimum_bytes", json!(sweep.begin)),
        ("maximum_bytes", json!(sweep.end)),
        (step, by),
        ("warmup_iters", json!(repeats.warmup(sweep.largest()))),
        ("iterations", json!(repeats.iterations(sweep.largest()))),
        ("iterations_by_size", json!(repeats.adaptive())),
        ("bind", json!(repeats.bind_name())),
    ];
    told.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
