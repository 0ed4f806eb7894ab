//! What this machine is: for doctor, for the run line of metrics, and for default choices.

use crate::failure::{Failure, Result};
use crate::human;
use collectives::bootstrap::{self, Identity};
use collectives::transport::shm::{Available, memory_available, memory_limit};
use serde_json::{Value, json};
use std::fs;
use std::sync::OnceLock;

/// Facts about the machine that a run depends on.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its name on the network.
    pub host: String,
    /// The operating system's kernel.
    pub kernel: String,
    /// The processor.
    pub cpu: String,
    /// Cores that this process may use (affinity and cgroup quota respected).
    pub cores: usize,
    /// Instruction sets that kernels here can use.
    pub simd: Vec<&'static str>,
    /// Bytes of memory, where `/proc` says so.
    pub memory: Option<u64>,
    /// Bytes of memory that can be had now, as above.
    pub memory_available: Option<u64>,
    /// The cgroup's limits of memory, in bytes, and of processor time, in cores.
    pub cgroup_memory: Option<u64>,
    /// As above.
    pub cgroup_cores: Option<f64>,
    /// Bytes and free bytes of /dev/shm.
    pub shm: Option<(u64, u64)>,
}

impl Machine {
    /// Looks.
    pub fn probe() -> Self {
        let uname = rustix::system::uname();
        let (memory, memory_available) = meminfo();
        Machine {
            host: bootstrap::host_name(),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            cpu: cpu_name(),
            cores: bootstrap::processors(),
            simd: simd(),
            memory,
            memory_available,
            cgroup_memory: memory_limit(),
            cgroup_cores: bootstrap::cpu_quota(),
            shm: rustix::fs::statvfs("/dev/shm")
                .ok()
                .map(|s| (s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize)),
        }
    }

    /// Bytes of memory that processes of this one's cgroup can have; all that can be counted, where nobody says how much
    /// there is: nothing is known to be too much.
    pub fn usable_memory(&self) -> u64 {
        let all = self.memory.unwrap_or(u64::MAX);
        self.cgroup_memory.map_or(all, |limit| limit.min(all))
    }

    /// The same as JSON.
    pub fn json(&self) -> Value {
        json!({
            "host": self.host,
            "kernel": self.kernel,
            "cpu": self.cpu,
            "arch": std::env::consts::ARCH,
            "cores": self.cores,
            "simd": self.simd,
            "memory_bytes": self.memory,
            "memory_available_bytes": self.memory_available,
            "cgroup_memory_bytes": self.cgroup_memory,
            "cgroup_cores": self.cgroup_cores,
            "shm_bytes": self.shm.map(|s| s.0),
            "shm_free_bytes": self.shm.map(|s| s.1),
        })
    }
}

/// What could still be had of this machine's memory when the program first asked: before it held anything itself, and before
/// others of the same start did.
pub fn free() -> &'static Available {
    static FREE: OnceLock<Available> = OnceLock::new();
    FREE.get_or_init(memory_available)
}

/// How many of `world` ranks are on this machine: something else's, of which `identity` is this process's place, are as many
/// as its launcher says, and at least this one is.
pub fn ranks_here(world: usize, identity: Option<&Identity>) -> usize {
    identity.map_or(world, |identity| identity.local_size.unwrap_or(1))
}

/// Whether this machine can hold its part of the `bytes` of all of `world` ranks together: memory that is not there is not
/// refused, it gets ranks killed.
///
/// # Errors
/// What they would hold, what there is, and `advice`.
pub fn check_memory(world: usize, identity: Option<&Identity>, bytes: u64, advice: &str) -> Result<()> {
    check_free(ranks_here(world, identity), world, bytes, free(), advice)
}

/// The same of so many `ranks` that are here.
fn check_free(ranks: usize, world: usize, bytes: u64, free: &Available, advice: &str) -> Result<()> {
    let bytes = (u128::from(bytes) * ranks as u128).div_ceil(world.max(1) as u128) as u64;
    match bytes <= free.bytes {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "{} and this machine has {} for them ({}): {advice}",
            match ranks {
                1 => format!("1 rank would hold {}", human::bytes(bytes)),
                _ => format!("{ranks} ranks would hold {} together", human::bytes(bytes)),
            },
            human::bytes(free.bytes),
            free.source
        ))),
    }
}

/// What would make ranks that hold `bytes` together hold less, if those of the `tokens` of text among them count.
pub fn text_advice(tokens: u64, bytes: u64) -> &'static str {
    match tokens >= bytes / 10 {
        true => {
            ", or name a token file that 'caravan tokenize' makes of the text, which is read from the disk"
        }
        false => "",
    }
}

/// The version of this program, with what tells its sources from others of that version.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("CARAVAN_BUILD"), ")");

/// What runs, as ranks compare it.
pub const PROGRAM: &str = concat!("caravan ", env!("CARGO_PKG_VERSION"), " (", env!("CARAVAN_BUILD"), ")");

/// Versions of what ran.
pub fn versions() -> Value {
    json!({ "caravan": VERSION, "rustc": env!("CARAVAN_RUSTC") })
}

fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name") || l.starts_with("Processor"));
    match line.and_then(|l| l.split_once(':')) {
        Some((_, name)) => name.trim().to_owned(),
        None => format!("unnamed {}", std::env::consts::ARCH),
    }
}

fn meminfo() -> (Option<u64>, Option<u64>) {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    (field("MemTotal:"), field("MemAvailable:"))
}

#[cfg(target_arch = "x86_64")]
fn simd() -> Vec<&'static str> {
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("amx", collectives::simd::tiles()),
    ];
    found.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

#[cfg(target_arch = "aarch64")]
fn simd() -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected;
    let found = [
        ("neon", is_aarch64_feature_detected!("neon")),
        ("bf16", is_aarch64_feature_detected!("bf16")),
        ("fp16", is_aarch64_feature_detected!("fp16")),
        ("sve", is_aarch64_feature_detected!("sve")),
    ];
    found.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn simd() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_this_machine_have_what_is_left_of_it() {
        let left = Available { bytes: 10 << 30, source: "memory limit of /a".into() };
        assert!(check_free(2, 4, 20 << 30, &left, "advice").is_ok());
        let refused = check_free(2, 4, 30 << 30, &left, "take less").unwrap_err().to_string();
        assert_eq!(
            refused,
            "2 ranks would hold 15.0 GiB together and this machine has 10.0 GiB for them (memory limit of /a): take less"
        );
        // Of ranks that nobody has counted, one is here.
        let all = free().bytes.saturating_mul(8);
        let unknown = Identity { local_size: None, local_rank: None, ..Identity::alone() };
        assert!(
            check_memory(4, Some(&unknown), all, "").unwrap_err().to_string().starts_with("1 rank would")
        );
        assert!(check_memory(16, Some(&unknown), all, "").is_ok());
    }

    #[test]
    fn this_machine_has_what_every_machine_has() {
        let machine = Machine::probe();
        assert!(machine.cores >= 1);
        assert!(machine.memory > Some(0) && machine.memory_available <= machine.memory);
        assert!(!machine.cpu.is_empty() && machine.kernel.starts_with("Linux"));
        assert_eq!(machine.json()["cores"], machine.cores);
        assert!(versions()["rustc"].as_str().unwrap().starts_with("rustc "));
    }
}
