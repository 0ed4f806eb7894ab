//! `caravan doctor`: what this machine offers, and why something is missing.

use crate::args::DoctorArgs;
use crate::device::{self, Card, EMULATION};
use crate::failure::{Failure, Result};
use crate::gpus::Limits;
use crate::human;
use crate::machine::{Machine, versions};
use crate::out;
use crate::transports;
use collectives::bootstrap::Identity;
use collectives::device::cuda::Survey;
use serde_json::{Value, json};

/// Prints the findings.
pub fn doctor(args: &DoctorArgs) -> Result<()> {
    let machine = Machine::probe();
    let cuda = Survey::take();
    let identity = Identity::from_env().map_err(Failure::from);
    let transports = transports::survey(identity.as_ref().ok().and_then(Option::as_ref));
    if args.json {
        let rows: Vec<_> = transports
            .iter()
            .map(|(name, usable, remark)| json!({"name": name, "usable": usable, "remark": remark}))
            .collect();
        out::line(json!({
            "machine": machine.json(), "versions": versions(), "identity": identity_json(&identity), "transports": rows,
            "cuda": cuda_json(&cuda),
        }))?;
        return Ok(());
    }
    let row = |name: &str, text: String| out::line(format_args!("{name:<12}{text}"));
    let versions = versions();
    let version = |name: &str| versions[name].as_str().unwrap_or_default().to_owned();
    row("caravan", format!("{} ({})", version("caravan"), version("rustc")))?;
    row("machine", format!("{}, {}", machine.host, machine.kernel))?;
    row("processor", machine.cpu.clone())?;
    let quota = machine.cgroup_cores.map_or(String::new(), |c| format!(", cgroup grants {c:.1}"));
    row("cores", format!("{}{quota}", machine.cores))?;
    row("simd", if machine.simd.is_empty() { "none known".into() } else { machine.simd.join(" ") })?;
    let limit =
        machine.cgroup_memory.map_or(String::new(), |m| format!(", cgroup grants {}", human::bytes(m)));
    let [all, free] = [machine.memory, machine.memory_available].map(|m| m.map(human::bytes));
    let free = free.map_or(String::new(), |free| format!(", {free} available"));
    row("memory", format!("{}{free}{limit}", all.unwrap_or("unknown".into())))?;
    match machine.shm {
        Some((0, _)) => row("/dev/shm", "as much as there is memory".into())?,
        Some((all, free)) => row("/dev/shm", format!("{}, {} free", human::bytes(all), human::bytes(free)))?,
        None => row("/dev/shm", "missing (mpi, ucx and nccl want it; shm and threads do not)".into())?,
    }
    row("rank", identity_line(&identity))?;
    out::line("\ntransports")?;
    for (name, usable, remark) in transports {
        out::line(format_args!("  {} {name:<9}{remark}", yes(usable)))?;
    }
    out::line("\nGPUs")?;
    if let Some(line) = emulated_line(&device::emulation()) {
        out::line(format_args!("  {line}"))?;
    }
    for line in cuda_lines(&cuda) {
        out::line(format_args!("  {line}"))?;
    }
    Ok(())
}

fn yes(usable: bool) -> &'static str {
    if usable { "yes" } else { "no " }
}

/// Which rank this process would be, and of what it would be one.
fn identity_line(identity: &Result<Option<Identity>>) -> String {
    let me = match identity {
        Ok(Some(me)) => me,
        Ok(None) => return "none: nothing has started it as one".into(),
        Err(why) => return format!("unknown: {why}"),
    };
    let here = match (me.local_rank, me.local_size) {
        (Some(rank), Some(size)) => format!(", {rank} of {size} on this host"),
        (Some(rank), None) => format!(", {rank} on this host"),
        (None, _) => String::new(),
    };
    let place = me.rendezvous.as_ref().map_or(String::new(), |address| format!(", which meet at {address}"));
    let (rank, world, launcher) = (me.rank, me.world, me.launcher.name());
    format!("{rank} of {world}{here}, by {launcher}, of job {}{place}", me.job_name())
}

/// The same, without the job's secret.
fn identity_json(identity: &Result<Option<Identity>>) -> Value {
    match identity {
        Ok(None) => Value::Null,
        Ok(Some(me)) => json!({
            "launcher": me.launcher.name(), "rank": me.rank, "world": me.world, "local_rank": me.local_rank,
            "local_size": me.local_size, "job": me.job_name(), "rendezvous": me.rendezvous,
        }),
        Err(why) => json!({"error": why.to_string()}),
    }
}

/// A line for each GPU, then for each library.
fn cuda_lines(cuda: &Survey) -> Vec<String> {
    const OLDEST: collectives::device::Machine = collectives::device::Machine::OLDEST;
    let gpus = cuda.gpus.iter().flatten().enumerate().map(|(i, gpu)| {
        let enough = gpu.machine.capability >= OLDEST.capability;
        let remark = match enough {
            true => String::new(),
            false => format!(": the kernels need {} or newer", OLDEST),
        };
        let memory = human::bytes(gpu.memory as u64);
        format!("{} GPU {i:<5}{}, {memory}, {}{remark}", yes(enough), gpu.name, gpu.machine)
    });
    let libraries = cuda.libraries().map(|(name, purpose, found)| match found {
        Ok(library) => {
            let module = cuda.module.as_ref().filter(|_| name == "driver");
            let module = module.map_or(String::new(), |version| format!(" {version}"));
            format!("yes {name:<9}{purpose}:{module} {} ({})", library.version, library.file)
        }
        Err(why) => format!("no  {name:<9}{purpose}: {why}"),
    });
    gpus.chain(libraries).collect()
}

/// What --device cuda is instead of the GPUs that follow.
fn emulated_line(emulation: &Result<Option<Vec<Card>>>) -> Option<String> {
    match emulation {
        Ok(None) => None,
        Ok(Some(each)) => {
            let (gpus, memory) = (human::several(each.len(), "GPU"), human::bytes(each[0].memory as u64));
            let whose = if each.len() == 1 { "" } else { " each" };
            Some(format!(
                "yes emulated {gpus} of {memory}{whose}, which --device cuda takes ({EMULATION} is set)"
            ))
        }
        Err(why) => Some(format!("no  emulated {why}; --device cuda is refused until then")),
    }
}

fn emulated_json(emulation: &Result<Option<Vec<Card>>>) -> Value {
    match emulation {
        Ok(None) => Value::Null,
        Ok(Some(each)) => json!({"usable": true, "gpus": each.len(), "memory": each[0].memory}),
        Err(why) => json!({"usable": false, "remark": why.to_string()}),
    }
}

/// GPUs and libraries, for whoever wants to know what a run had.
pub fn cuda_json(cuda: &Survey) -> Value {
    let libraries = cuda.libraries().map(|(name, _, found)| match found {
        Ok(library) => {
            json!({"name": name, "usable": true, "version": library.version, "file": library.file})
        }
        Err(why) => json!({"name": name, "usable": false, "remark": why}),
    });
    let gpus = match &cuda.gpus {
        Ok(gpus) => gpus
            .iter()
            .map(|gpu| {
                json!({
                    "name": gpu.name, "memory": gpu.memory, "capability": gpu.machine.capability,
                    "multiprocessors": gpu.multiprocessors,
                    "dense_16_bit_flops": Limits::of(&gpu.name).flops,
                })
            })
            .collect(),
        Err(_) => Vec::new(),
    };
    let emulated = emulated_json(&device::emulation());
    json!({"driver": cuda.module, "gpus": gpus, "libraries": libraries, "emulated": emulated})
}
