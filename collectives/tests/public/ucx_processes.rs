//! Processes that run cases of the tests of UCX.

use crate::ranks::finish;
use collectives::Result;
use collectives::bootstrap::Rendezvous;
use collectives::transport::Transport;
use collectives::transport::ucx::{Start, UcxTransport};
use std::process::{Child, Command, Output, Stdio};

pub const CASE: &str = "CARAVAN_TEST_CASE";

/// Whether UCX is here; why not is among the skips.
pub fn available() -> bool {
    match ucx_sys::Ucp::load() {
        Ok(_) => true,
        Err(why) => {
            harness::skip(&why);
            false
        }
    }
}

/// The transport over ranks that have met.
pub fn ucx(rendezvous: &mut Rendezvous) -> Result<Box<dyn Transport>> {
    let (rank, world) = (rendezvous.rank(), rendezvous.world());
    let exchange = &mut |blob: Vec<u8>| rendezvous.exchange(&blob);
    Ok(Box::new(UcxTransport::connect(rank, world, &Start::default(), exchange)?))
}

/// Starts `ranks` processes of `case` over UCX's transports `tls`.
pub fn start(case: &str, ranks: usize, tls: &str) -> Vec<Child> {
    start_with(case, ranks, tls, |_| None)
}

/// The same, each rank with one more variable.
pub fn start_with(
    case: &str,
    ranks: usize,
    tls: &str,
    variable: fn(usize) -> Option<(&'static str, &'static str)>,
) -> Vec<Child> {
    let job = format!("ucx-test-{}-{case}-{ranks}-{}", std::process::id(), tls.replace(',', "-"));
    (0..ranks)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "ucx::rank_process", "--nocapture"])
                .envs([
                    (CASE, case),
                    ("UCX_TLS", tls),
                    ("CARAVAN_JOB", &job),
                    ("UCX_WARN_UNUSED_ENV_VARS", "n"),
                ])
                .envs([("CARAVAN_RANK", rank.to_string()), ("CARAVAN_WORLD", ranks.to_string())])
                .envs(variable(rank))
                .env_remove("CARAVAN_RENDEZVOUS")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

pub fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub fn passes(case: &str, ranks: usize, tls: &str) {
    if !available() {
        return;
    }
    for (rank, output) in finish(start(case, ranks, tls)).iter().enumerate() {
        // A name that no test has would be a success, too.
        let said = text(output);
        let passed = output.status.success() && said.contains("1 passed");
        assert!(passed, "{case} over {tls}, rank {rank} of {ranks}:\n{said}");
    }
}

/// The errors that the surviving ranks of `case` print, with the time from the start to the end of all.
pub fn errors(case: &str, ranks: usize, tls: &str, survivors: &[usize]) -> Vec<String> {
    let outputs = finish(start(case, ranks, tls));
    survivors
        .iter()
        .map(|&rank| {
            let all = text(&outputs[rank]);
            assert!(outputs[rank].status.success(), "{case} over {tls}, rank {rank}:\n{all}");
            all.lines().find_map(|l| l.split_once("error: ")).expect("an error").1.to_string()
        })
        .collect()
}
