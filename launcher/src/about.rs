//! What the JSON of every measurement, and the metrics of every training, say of the run before anything is known of it: what
//! wrote it, when, how it was called, and where.

use crate::gpus::OF_NCCL;
use crate::machine::{Machine, PROGRAM, versions};
use crate::transports::OF_UCX;
use collectives::bootstrap::{spawn, variables};
use collectives::transport::ucx::Segments;
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

/// The time of day, UTC, as nccl-tests prints it.
pub fn now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    stamp(since.as_secs())
}

/// `%Y-%m-%d %H:%M:%S` of seconds since 1970.
fn stamp(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86400, seconds % 86400);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!(
        "{year:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        month + 1,
        days + 1,
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// What of the environment a run goes by: settings of communication libraries and of this program, and which job it is; nothing
/// else of it, for it may hold secrets.
fn environment() -> Vec<String> {
    let supervised = spawn::supervised();
    let mut all: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| is_told(name, supervised))
        .filter(|(name, value)| {
            let set = (name.as_str(), value.as_str());
            set != OF_NCCL && !OF_UCX.contains(&set)
        })
        .filter(|(name, value)| !Segments::are_told_by(name, value))
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
        "CUDA_",
        "MPICH_",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_told_without_what_is_secret_or_our_own() {
        for name in [
            "UCX_TLS",
            "NCCL_DEBUG",
            "CUDA_DEVICE_ORDER",
            "OMPI_MCA_btl",
            "SLURM_JOB_ID",
            "CARAVAN_CACHE",
            "CARAVAN_RENDEZVOUS",
        ] {
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

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_827_696, "2000-02-29 12:34:56"),
            (1_795_132_799, "2026-11-19 23:59:59"),
            (4_102_444_800, "2100-01-01 00:00:00"),
        ] {
            assert_eq!(stamp(seconds), text);
        }
    }
}
