//! The MPI that is built in: what it is, and ranks that it joins. A build without it has `mpi/absent.rs` in the place of this.

use crate::agree;
use crate::bench::native::Native;
use crate::failure::{Failure, Result};
use crate::out;
use crate::plan::Ranks;
use crate::ranks::meeting;
use crate::tokenizer;
use collectives::bootstrap::{self, Identity, Launcher, Rendezvous};
use collectives::transport::Transport;
use collectives_mpi::{Family, MpiTransport, Start, family};
use std::sync::Arc;
use std::time::Duration;

/// Why this build cannot use MPI, if it cannot.
pub const OBSTACLE: Option<&str> = None;

/// The library, with its version.
pub fn library() -> Option<String> {
    Some(collectives_mpi::library())
}

/// The launcher of the MPI that is built in, where that is known.
pub fn launcher() -> Option<Launcher> {
    match family() {
        Family::OpenMpi => Some(Launcher::OpenMpi),
        Family::Mpich | Family::CrayMpich => Some(Launcher::Pmi),
        Family::Unknown => None,
    }
}

/// The plugin with which srun starts ranks of the MPI that is built in.
pub fn plugin() -> Option<&'static str> {
    Some(match family() {
        Family::OpenMpi => "pmix",
        Family::CrayMpich => "cray_shasta",
        // What most others can be started by.
        Family::Mpich | Family::Unknown => "pmi2",
    })
}

/// Whether srun started this process with a plugin, by what that gives every rank.
fn started_by(plugin: &str) -> bool {
    let mark = match plugin {
        "pmix" => "PMIX_RANK",
        "cray_shasta" => "PALS_RANKID",
        _ => "PMI_RANK",
    };
    std::env::var_os(mark).is_some()
}

/// MPI between all ranks, which are compared before they call anything together, unless they `have_met`; and its own collectives,
/// where those are wanted.
///
/// # Errors
/// Ranks that MPI has started otherwise, or that differ.
pub fn connect(
    ranks: &Ranks,
    identity: &Identity,
    options: &bootstrap::Options,
    have_met: bool,
) -> Result<(Box<dyn Transport>, Option<Native>)> {
    if identity.launcher == Launcher::Slurm
        && identity.rank == 0
        && plugin() == Some("pmix")
        && !started_by("pmix")
    {
        // Not known to fail: an Open MPI may have been built for PMI. One that was not ends the process by itself.
        out::note("caravan: srun brings no PMIx here: if Open MPI cannot start now, take srun --mpi=pmix");
    }
    let (rank, world) = (identity.rank, identity.world);
    let start = Start {
        one_thread: ranks.one_caller,
        within: options.timeout,
        missing: (!have_met && identity.rendezvous.is_some() && !identity.is_sought_elsewhere())
            .then(|| missing(identity)),
        call_timeout: ranks.options.deadline,
        caught: tokenizer::catches,
        tell: Arc::new(move |why| out::note(format_args!("caravan: rank {rank}: {why}"))),
    };
    let mut transport = MpiTransport::world(&start)?;
    let mine = (transport.rank(), transport.size());
    if mine != (rank, world) {
        let library = collectives_mpi::library();
        let blind = library.contains("Intel") && std::env::var_os("I_MPI_PMI_LIBRARY").is_none();
        let way = match (identity.launcher, plugin()) {
            (Launcher::Slurm, Some(plugin)) if !started_by(plugin) => format!("take srun --mpi={plugin}"),
            (Launcher::Caravan, _) => {
                "it gets its ranks from mpirun or srun, and ucx from whoever starts them".into()
            }
            (Launcher::Slurm, _) if blind => "set I_MPI_PMI_LIBRARY to Slurm's libpmi2.so".into(),
            _ => "take the mpirun of that library, or a build for the one that is used".into(),
        };
        return Err(Failure::usage(format!(
            "{} started this process as rank {rank} of {world}, but {library} says rank {} of {}: {way}",
            identity.launcher.name(),
            mine.0,
            mine.1
        )));
    }
    if !have_met {
        let exchange = |blob: &[u8]| bootstrap::exchange(&mut transport, blob, options.timeout);
        agree::check_by(rank, exchange, &ranks.signature())?;
    }
    let native = ranks.native.then(|| transport.native()).transpose()?;
    Ok((Box::new(transport), native))
}

/// Says who is missing, where ranks can meet at an address that may yet not be rank 0's: mpirun's host of Open MPI. Rank 0
/// itself knows whether it is.
fn missing(identity: &Identity) -> Arc<dyn Fn(Duration) -> Option<String> + Send + Sync> {
    let identity = identity.clone();
    Arc::new(move |timeout| match Rendezvous::join(&identity, &meeting(timeout)) {
        Err(collectives::Error::Launch(missing)) => Some(missing),
        Err(e @ collectives::Error::Timeout { .. }) => {
            Some(format!("{e}, or rank 0 is not on the host of mpirun"))
        }
        _ => None,
    })
}
