//! `caravan doctor`: what this machine offers, and why something is missing.

use crate::args::DoctorArgs;
use crate::failure::Result;
use crate::human;
use crate::machine::{Machine, versions};
use crate::transports;
use serde_json::json;

/// Prints the findings.
pub fn doctor(args: &DoctorArgs) -> Result<()> {
    let machine = Machine::probe();
    let transports = transports::survey();
    if args.json {
        let rows: Vec<_> = transports
            .iter()
            .map(|(name, usable, remark)| json!({"name": name, "usable": usable, "remark": remark}))
            .collect();
        println!("{}", json!({"machine": machine.json(), "versions": versions(), "transports": rows}));
        return Ok(());
    }
    let row = |name: &str, text: String| println!("{name:<12}{text}");
    let versions = versions();
    let version = |name: &str| versions[name].as_str().unwrap_or_default().to_owned();
    row("caravan", format!("{} ({})", version("caravan"), version("rustc")));
    row("machine", format!("{}, {}", machine.host, machine.kernel));
    row("processor", machine.cpu.clone());
    let quota = machine.cgroup_cores.map_or(String::new(), |c| format!(", cgroup grants {c:.1}"));
    row("cores", format!("{}{quota}", machine.cores));
    row("simd", if machine.simd.is_empty() { "none known".into() } else { machine.simd.join(" ") });
    let limit =
        machine.cgroup_memory.map_or(String::new(), |m| format!(", cgroup grants {}", human::bytes(m)));
    let (all, free) = (human::bytes(machine.memory), human::bytes(machine.memory_available));
    row("memory", format!("{all}, {free} available{limit}"));
    match machine.shm {
        Some((all, free)) => row("/dev/shm", format!("{}, {} free", human::bytes(all), human::bytes(free))),
        None => row("/dev/shm", "missing (MPI and UCX want it; the transports here do not)".into()),
    }
    println!("\ntransports");
    for (name, usable, remark) in transports {
        println!("  {} {name:<9}{remark}", if usable { "yes" } else { "no " });
    }
    Ok(())
}
