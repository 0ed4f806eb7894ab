//! What flags ask of ranks, as far as it makes sense on any machine.

use super::usage;
use crate::args::RankArgs;
use crate::failure::Result;
use crate::layers::Layers;
use crate::transports::Transport;
use std::time::Duration;

/// The most compute threads of a rank.
const MOST_THREADS: usize = 1024;

/// Flags about ranks that have been read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// Whether memory of GPUs goes over NCCL.
    pub nccl: bool,
    /// What reaches every rank; none: what does so fastest, which is auto.
    pub transport: Option<Transport>,
    /// What lies over that.
    pub layers: Layers,
    /// How long ranks wait for each other at the start.
    pub rendezvous_timeout: Duration,
    /// And later.
    pub deadline: Duration,
}

impl Asked {
    /// Reads the flags of a run of `world` ranks.
    ///
    /// # Errors
    /// What makes no sense wherever it runs.
    pub fn new(args: &RankArgs, world: usize) -> Result<Self> {
        if let Some(threads) = args.threads.filter(|&threads| threads == 0 || threads > MOST_THREADS) {
            return usage(format!("--threads {threads}: a rank computes with 1 to {MOST_THREADS} threads"));
        }
        let rendezvous_timeout = patience("--rendezvous-timeout", args.rendezvous_timeout)?;
        let deadline = patience("--call-timeout", args.call_timeout)?;
        let beside = beside_nccl(&args.transport);
        let (nccl, host) = (beside.is_some(), beside.unwrap_or(&args.transport));
        if let (true, Some(link)) = (nccl, &args.emulate_link) {
            return usage(format!(
                "--emulate-link {link} holds back messages between hosts, and NCCL's go past it from GPU to GPU: take \
                 --transport shm, ucx or mpi, or leave --emulate-link away"
            ));
        }
        let (layers, between) = Layers::plan(host, args, world)?;
        let transport = Transport::named(between)?;
        Ok(Asked { nccl, transport, layers, rendezvous_timeout, deadline })
    }

    /// What `--transport` is called when `other` takes the place of what was asked for between all ranks, and these flags
    /// still go together: also inside nodes, if their ranks were given by hand, which no plain transport asks about.
    pub fn with(&self, other: Transport) -> String {
        let name = other.name();
        let inside = self.layers.inside.filter(|_| self.layers.per_node.is_some());
        let inside = inside.map_or(String::new(), |_| format!("{name}+"));
        format!("{}{inside}{name}", if self.nccl { "nccl+" } else { "" })
    }

    /// What carries data of hosts, as far as it is known without a machine.
    pub fn label(&self) -> String {
        self.transport.map_or_else(|| "auto".to_owned(), |transport| self.layers.label(transport))
    }
}

/// What carries data of hosts where GPUs have NCCL; None where they have not.
fn beside_nccl(transport: &str) -> Option<&str> {
    match transport.strip_prefix("nccl")? {
        "" => Some("auto"),
        rest => rest.strip_prefix('+'),
    }
}

/// For commands that send nothing between GPUs. Asked before what NCCL would need is looked for.
///
/// # Errors
/// NCCL was asked for.
pub fn on_hosts(command: &str, args: &RankArgs) -> Result<()> {
    match beside_nccl(&args.transport) {
        Some(host) => usage(format!(
            "--transport {} carries data from GPU to GPU, and {command} sends none: take --transport {host}",
            args.transport
        )),
        None => Ok(()),
    }
}

/// For how long ranks wait for each other.
fn patience(flag: &str, seconds: f64) -> Result<Duration> {
    match (0.001..=1e6).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => usage(format!("{flag} {seconds}: ranks wait for at least 0.001 and at most 1e6 s")),
    }
}
