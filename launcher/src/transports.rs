//! Which transports there are, which this machine can use, and why not the others.

use crate::failure::{Failure, Result};
use crate::gpus;
use crate::mpi;
use collectives::bootstrap::Identity;
use collectives::transport::Medium;

/// How the ranks of a run reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Ranks are processes that read each other's memory.
    Shm,
    /// Ranks are threads of this process.
    Threads,
    /// Ranks exchange messages over MPI, which also starts them.
    Mpi,
    /// Ranks exchange messages over UCX.
    Ucx,
}

/// Where every process finds its program, also when the file was replaced meanwhile.
pub const EXECUTABLE: &str = "/proc/self/exe";

/// What UCX does unless told otherwise, and should not, also inside MPI: it logs to standard output, where results go, and
/// takes SIGHUP, by which a session ends what it has started, for a wish to be debugged.
pub const OF_UCX: [(&str, &str); 2] = [("UCX_LOG_FILE", "stderr"), ("UCX_DEBUG_SIGNO", "0")];

/// Sets [`OF_UCX`] where nobody else has. UCX reads these as it is loaded, as a part of MPICH before the program begins, and
/// would later only warn of variables that it has not used.
///
/// # Safety
/// No other thread runs that could read the environment meanwhile.
pub unsafe fn tame_ucx() {
    let loaded = std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("/libucs.so"));
    for (name, value) in OF_UCX.into_iter().filter(|(name, _)| !loaded && std::env::var_os(name).is_none()) {
        // SAFETY: the caller's promise: nobody reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
}

impl Transport {
    /// The name users choose it by.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Threads => "threads",
            Transport::Mpi => "mpi",
            Transport::Ucx => "ucx",
        }
    }

    /// What carries its messages.
    pub fn medium(self) -> Medium {
        match self {
            Transport::Shm => Medium::Shm,
            Transport::Threads => Medium::Threads,
            Transport::Mpi => Medium::Mpi,
            Transport::Ucx => Medium::Ucx,
        }
    }

    /// What `--transport NAME` means; none: auto.
    ///
    /// # Errors
    /// An unknown name.
    pub fn named(name: &str) -> Result<Option<Self>> {
        match name {
            "auto" => Ok(None),
            "shm" => Ok(Some(Transport::Shm)),
            "threads" => Ok(Some(Transport::Threads)),
            "mpi" => Ok(Some(Transport::Mpi)),
            "ucx" => Ok(Some(Transport::Ucx)),
            _ => Err(Failure::usage(format!(
                "transport '{name}' is not known: there are shm and threads, mpi and ucx, and auto, which chooses; and nccl \
                 between GPUs"
            ))),
        }
    }

    /// What was asked for, or else what is fastest. `with` says how another in its place is asked for.
    ///
    /// # Errors
    /// A transport that cannot be used here.
    pub fn choose(
        asked: Option<Self>,
        identity: Option<&Identity>,
        with: &dyn Fn(Self) -> String,
    ) -> Result<Self> {
        let chosen = asked.map_or_else(|| Self::automatic(identity), Ok)?;
        match chosen.refusal(identity) {
            Some(why) => {
                let instead = chosen.instead(identity, with);
                Err(Failure::usage(format!("transport {} cannot be used: {why}{instead}", chosen.name())))
            }
            None => Ok(chosen),
        }
    }

    /// What joins the same ranks and needs nothing, as the end of the sentence: a launcher starts processes, and on
    /// several hosts nothing else may reach them all.
    fn instead(self, identity: Option<&Identity>, with: &dyn Fn(Self) -> String) -> String {
        let simple: &[Transport] = match identity {
            None => &[Transport::Shm, Transport::Threads],
            Some(identity) if !on_several_hosts(identity) => &[Transport::Shm],
            Some(_) => &[],
        };
        let usable = |t: &&Transport| **t != self && t.refusal(identity).is_none();
        let names: Vec<String> = simple.iter().filter(usable).map(|&t| with(t)).collect();
        match names[..] {
            [] => String::new(),
            _ => format!("; --transport {} needs none of that", names.join(" or ")),
        }
    }

    /// The fastest that reaches every rank: shared memory on one host; between hosts MPI under a launcher of MPI
    /// programs if it is built in, else UCX.
    fn automatic(identity: Option<&Identity>) -> Result<Self> {
        let Some(identity) = identity.filter(|identity| on_several_hosts(identity)) else {
            return Ok(Transport::Shm);
        };
        // The launcher and the library must be of one kind.
        if mpi::launcher() == Some(identity.launcher) {
            return Ok(Transport::Mpi);
        }
        match Transport::Ucx.obstacle() {
            None => Ok(Transport::Ucx),
            Some(why) => Err(Failure::usage(format!(
                "{} started ranks on several hosts, and no transport here reaches those: ucx cannot be used: {why}; \
                 mpi: {}",
                identity.launcher.name(),
                Transport::Mpi
                    .obstacle()
                    .unwrap_or_else(|| "not under this launcher by itself; --transport mpi".into())
            ))),
        }
    }

    /// Why ranks cannot be had over it, if they cannot: where nothing else has started them, they are processes of this one's
    /// program.
    fn refusal(self, identity: Option<&Identity>) -> Option<String> {
        let starts = identity.is_none() && matches!(self, Transport::Shm | Transport::Ucx);
        self.obstacle().or_else(|| unmounted(EXECUTABLE).filter(|_| starts))
    }

    /// Why this machine cannot use it, if it cannot.
    pub fn obstacle(self) -> Option<String> {
        match self {
            Transport::Threads => None,
            Transport::Mpi => mpi::OBSTACLE.map(str::to_owned),
            Transport::Ucx => collectives::transport::ucx::library().err().map(|e| match e {
                collectives::Error::Unavailable { why, .. } => why,
                e => e.to_string(),
            }),
            Transport::Shm => {
                let refusal = collectives::bootstrap::anonymous("caravan-probe").err()?;
                Some(format!("the system grants no anonymous shared memory (memfd_create): {refusal}"))
            }
        }
    }
}

/// What carries data of hosts where `--transport` has NCCL between GPUs; None where it has not.
pub fn beside_nccl(transport: &str) -> Option<&str> {
    match transport.strip_prefix("nccl")? {
        "" => Some("auto"),
        rest => rest.strip_prefix('+'),
    }
}

/// What `--transport` has before what carries data of hosts: the same, written.
pub fn nccl_prefix(nccl: bool) -> &'static str {
    if nccl { "nccl+" } else { "" }
}

/// What to say where the system does not show this process its own `path`, which is below /proc.
pub fn unmounted(path: &str) -> Option<String> {
    let lost = std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
    lost.then(|| format!("there is no {path} (is /proc mounted?)"))
}

/// Whether ranks were started on more than this host.
fn on_several_hosts(identity: &Identity) -> bool {
    // Who does not know how many of the ranks are here, and has an address, was not told it for one host.
    identity.local_size.map_or(identity.rendezvous.is_some(), |local| local < identity.world)
}

/// The library that a transport runs on, with its version, where there is one.
pub fn library(transport: &str) -> Option<String> {
    match transport {
        "mpi" => mpi::library(),
        "ucx" => collectives::transport::ucx::library().ok(),
        _ => None,
    }
}

/// Every transport by name, whether a process of this `identity` can use it, and a remark or the reason why not.
pub fn survey(identity: Option<&Identity>) -> Vec<(&'static str, bool, String)> {
    let ucx = match collectives::transport::ucx::library() {
        Ok(library) => format!("{library}, opened at run time"),
        Err(e) => e.to_string(),
    };
    let mpi = mpi::library().map_or(String::new(), |library| {
        format!("{library}, which this program was built against; under mpirun or srun")
    });
    let here = [
        (Transport::Threads, "ranks as threads of one process"),
        (Transport::Shm, "ranks as processes that read each other's memory (anonymous, not in /dev/shm)"),
        (Transport::Mpi, &mpi),
        (Transport::Ucx, &ucx),
    ];
    let rows = here.into_iter().map(|(transport, remark)| match transport.refusal(identity) {
        Some(why) => (transport.name(), false, why),
        None => (transport.name(), true, remark.to_owned()),
    });
    let nccl = match gpus::obstacle() {
        None => {
            let library = gpus::library().unwrap_or_default();
            let sharing = gpus::sharing().unwrap_or_default();
            let remark =
                format!("{library}, opened at run time; one GPU for each rank; --share-gpus sets {sharing}");
            ("nccl", true, remark)
        }
        Some(why) => ("nccl", false, why),
    };
    rows.chain([nccl]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;
    use crate::plan::Asked;
    use collectives::bootstrap::Launcher;

    #[test]
    fn a_transport_that_cannot_be_had_says_what_can() {
        let choose = |asked| Transport::choose(asked, None, &|t| t.name().to_owned()).unwrap();
        assert_eq!(choose(None), Transport::Shm);
        assert_eq!(choose(Some(Transport::Threads)), Transport::Threads);
        assert_eq!(Transport::named("auto").unwrap(), None);
        let e = Transport::named("pigeon").unwrap_err();
        assert!(
            e.code() == 2 && e.to_string().contains("'pigeon'") && e.to_string().contains("shm and threads")
        );
        for (name, usable, remark) in survey(None) {
            assert!(!remark.is_empty(), "{name} {usable}");
        }
    }

    #[test]
    fn what_proc_does_not_show_may_not_be_mounted() {
        assert_eq!(unmounted(EXECUTABLE), None);
        let lost = unmounted("/proc/self/none").unwrap();
        assert_eq!(lost, "there is no /proc/self/none (is /proc mounted?)");
    }

    #[test]
    fn what_is_advised_instead_is_not_refused_next() {
        let started = |local_size, rendezvous: Option<&str>| Identity {
            world: 4,
            local_size,
            launcher: Launcher::OpenMpi,
            rendezvous: rendezvous.map(str::to_owned),
            ..Identity::alone()
        };
        let missing = Transport::Ucx;
        let plain = &|t: Transport| t.name().to_owned();
        assert_eq!(missing.instead(None, plain), "; --transport shm or threads needs none of that");
        assert_eq!(Transport::Shm.instead(None, plain), "; --transport threads needs none of that");
        for here in [started(Some(4), None), started(None, None)] {
            assert_eq!(missing.instead(Some(&here), plain), "; --transport shm needs none of that");
            assert_eq!(Transport::Shm.instead(Some(&here), plain), "");
        }
        for apart in [started(Some(2), None), started(None, Some("head:9000"))] {
            assert_eq!(missing.instead(Some(&apart), plain), "");
        }
        if mpi::OBSTACLE.is_some() {
            let e =
                Transport::choose(Some(Transport::Mpi), Some(&started(Some(4), None)), plain).unwrap_err();
            assert!(e.to_string().ends_with("libclang-dev); --transport shm needs none of that"), "{e}");
        }
        let read = |flags: &str| Asked::new(&train(flags).ranks, 4);
        for (flags, advice) in [
            ("--transport ucx", "shm or threads"),
            ("--transport nccl+ucx", "nccl+shm or nccl+threads"),
            ("--transport shm+ucx", "shm or threads"),
            ("--transport shm+ucx --ranks-per-node 2", "shm+shm or threads+threads"),
            ("--transport nccl+shm+ucx --ranks-per-node 2", "nccl+shm+shm or nccl+threads+threads"),
            ("--transport ucx --emulate-link latency=1us", "shm or threads"),
            ("--transport ucx --emulate-link latency=1us --ranks-per-node 2", "shm or threads"),
            ("--transport shm+ucx --emulate-link latency=1us", "shm+shm or threads+threads"),
        ] {
            let asked = read(flags).expect(flags);
            let said = missing.instead(None, &|t| asked.with(t));
            assert_eq!(said, format!("; --transport {advice} needs none of that"), "{flags}");
            let (_, rest) = flags.split_once(' ').unwrap();
            let rest = rest.split_once(' ').map_or("", |(_, rest)| rest);
            for transport in advice.split(" or ") {
                read(&format!("--transport {transport} {rest}")).expect(transport);
            }
        }
        // Nor does what is said of nodes that nothing asks about.
        for prefix in ["", "nccl+"] {
            let e = read(&format!("--transport {prefix}shm --ranks-per-node 2")).unwrap_err().to_string();
            for transport in ["shm+ucx", "shm+mpi", "shm+shm", "threads+threads"] {
                assert!(e.contains(&format!(" {prefix}{transport}")), "{e}");
                read(&format!("--transport {prefix}{transport} --ranks-per-node 2")).expect(transport);
            }
            assert_eq!(e.contains("--emulate-link"), prefix.is_empty(), "{e}");
        }
    }
}
