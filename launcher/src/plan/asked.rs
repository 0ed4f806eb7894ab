//! What flags ask of ranks, as far as it makes sense on any machine.

use super::usage;
use crate::args::{Number, RankArgs};
use crate::failure::Result;
use crate::human;
use crate::layers::Layers;
use crate::transports::{self, Transport};
use collectives::transport::emulated::{Hop, Link};
use std::time::Duration;

/// The most compute threads of a rank.
const MOST_THREADS: usize = 1024;

/// The longest that ranks can be told to wait for each other, in seconds.
const MOST_PATIENCE: f64 = 1e6;

/// Bytes that may be under way between two ranks before either hears more of the other.
const LONGEST: f64 = (32u64 << 20) as f64;

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
        let rendezvous_timeout = patience("--rendezvous-timeout", &args.rendezvous_timeout)?;
        let deadline = patience("--call-timeout", &args.call_timeout)?;
        let beside = transports::beside_nccl(&args.transport);
        let (nccl, host) = (beside.is_some(), beside.unwrap_or(&args.transport));
        if let (true, Some(link)) = (nccl, &args.emulate_link) {
            return usage(format!(
                "--emulate-link {link} holds back messages between hosts, and NCCL's go past it from GPU to GPU: take \
                 --transport shm, ucx or mpi, or leave --emulate-link away"
            ));
        }
        let (layers, between) = Layers::plan(host, args, world)?;
        layers.link.filter(|_| world > 1).map_or(Ok(()), |link| check_link(&link, args))?;
        let transport = Transport::named(between)?;
        Ok(Asked { nccl, transport, layers, rendezvous_timeout, deadline })
    }

    /// What `--transport` is called when `other` takes the place of what was asked for between all ranks, and these flags
    /// still go together: also inside nodes, if their ranks were given by hand, which no plain transport asks about.
    pub fn with(&self, other: Transport) -> String {
        let name = other.name();
        let inside = self.layers.inside.filter(|_| self.layers.per_node.is_some());
        let inside = inside.map_or(String::new(), |_| format!("{name}+"));
        format!("{}{inside}{name}", transports::nccl_prefix(self.nccl))
    }

    /// What carries data of hosts, as far as it is known without a machine.
    pub fn label(&self) -> String {
        self.transport.map_or_else(|| "auto".to_owned(), |transport| self.layers.label(transport))
    }
}

/// For commands that send nothing between GPUs. Asked before what NCCL would need is looked for.
///
/// # Errors
/// NCCL was asked for.
pub fn on_hosts(command: &str, args: &RankArgs) -> Result<()> {
    match transports::beside_nccl(&args.transport) {
        Some(host) => usage(format!(
            "--transport {} carries data from GPU to GPU, and {command} sends none: take --transport {host}",
            args.transport
        )),
        None => Ok(()),
    }
}

/// For how long ranks wait for each other.
fn patience(flag: &str, asked: &Number) -> Result<Duration> {
    match (0.001..=MOST_PATIENCE).contains(&asked.value()) {
        true => Ok(Duration::from_secs_f64(asked.value())),
        false => usage(format!("{flag} {asked}: ranks wait for at least 0.001 and at most 1e6 s")),
    }
}

/// Whether a link is so slow that whoever sends over it would be taken for silent, and what would do.
fn check_link(link: &Link, args: &RankArgs) -> Result<()> {
    let text = args.emulate_link.as_deref().unwrap_or_default();
    let patience = args.call_timeout.value();
    let takes = |hop: &Hop| hop.latency.as_secs_f64() + LONGEST / hop.bandwidth;
    let hops = [("", Some(link.between)), ("inside-", link.inside)];
    for (place, hop) in hops.iter().filter_map(|(place, hop)| Some((place, hop.as_ref()?))) {
        let seconds = takes(hop);
        if seconds < patience {
            continue;
        }
        let rest = patience - hop.latency.as_secs_f64();
        let faster =
            (rest > 0.0).then(|| format!("{place}bandwidth={:.0}B/s", (LONGEST / rest).ceil() + 1.0));
        let longer = (seconds * 1.1).ceil();
        let longer = (longer <= MOST_PATIENCE).then(|| format!("--call-timeout {longer:.0}"));
        let ways: Vec<String> = faster.into_iter().chain(longer).collect();
        let ways = if ways.is_empty() { "a faster link".to_owned() } else { ways.join(" or ") };
        return usage(format!(
            "--emulate-link {text}: 32 MiB take {} over it, and after --call-timeout {} a silent rank is given up: take {ways}",
            human::seconds(seconds),
            args.call_timeout
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;

    fn asked(flags: &str) -> Result<Asked> {
        Asked::new(&train(flags).ranks, 2)
    }

    #[test]
    fn a_link_over_which_ranks_would_seem_silent_is_refused_with_one_that_would_do() {
        for (flags, words) in [
            ("bandwidth=1B/s", "take bandwidth=55926B/s"),
            ("bandwidth=40kB/s", "take bandwidth=55926B/s or --call-timeout 923"),
            ("bandwidth=1MB/s --call-timeout 30", "take bandwidth=1118483B/s or --call-timeout 37"),
            ("latency=60s,hops=20", "take --call-timeout 1320"),
            ("latency=60s,hops=20,bandwidth=1B/s", "take a faster link"),
            ("latency=1us,inside-bandwidth=1B/s --ranks-per-node 1", "take inside-bandwidth=55926B/s"),
        ] {
            let e = asked(&format!("--emulate-link {flags}")).unwrap_err();
            assert!(e.code() == 2 && e.to_string().ends_with(words), "{flags}: {e}");
        }
        // Each of these is enough.
        for flags in [
            "bandwidth=55926B/s",
            "bandwidth=40kB/s --call-timeout 923",
            "bandwidth=1MB/s --call-timeout 37",
            "bandwidth=1118483B/s --call-timeout 30",
            "latency=60s,hops=20 --call-timeout 1320",
            "latency=1us,inside-bandwidth=55926B/s --ranks-per-node 1",
        ] {
            assert!(asked(&format!("--emulate-link {flags}")).is_ok(), "{flags}");
        }
        assert!(asked("--emulate-link bandwidth=10Mbit/s").is_ok());
        let alone = Asked::new(&train("--emulate-link bandwidth=1B/s").ranks, 1);
        assert!(alone.is_ok(), "nothing is sent");
    }

    #[test]
    fn what_was_typed_is_told_again() {
        let e = asked("--call-timeout 1e300").unwrap_err().to_string();
        assert!(e.starts_with("--call-timeout 1e300: "), "{e}");
    }
}
