//! Who am I among the ranks of a job, and how the ranks meet.
//!
//! [`Identity::from_env`] reads what mpirun, srun, torchrun or the own [`spawn::supervise`] left in the environment;
//! [`Rendezvous::join`] brings the ranks of a job together to exchange small blobs and file descriptors;
//! [`shm_group`] does both steps for the shared-memory transport.

#[cfg(test)]
mod alone;
mod board;
mod hosts;
mod identity;
mod inside;
pub(crate) mod memfd;
mod place;
mod processors;
mod rendezvous;
pub mod spawn;
mod star;
mod wire;

pub use board::{Board, Ending};
pub(crate) use hosts::boot_and_space;
pub use hosts::{OF_HYDRA, host_name, pmi_socket};
pub use identity::{Identity, Launcher, MARKS, marks, variables};
pub use inside::{exchange, nodes_of, shm_inside};
pub use memfd::anonymous;
pub use processors::{cpu_quota, processors, processors_of_host};
pub(crate) use rendezvous::Meeting;
pub use rendezvous::Rendezvous;

use crate::error::{Error, Result};
use crate::transport::Transport;
use crate::transport::shm::ShmTransport;
use std::time::Duration;

/// How ranks meet and how much they may share.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long to wait for ranks that have not arrived.
    pub timeout: Duration,
    /// The most bytes of shared memory that one rank may allocate; None: as much as the machine has.
    pub segment_limit: Option<usize>,
    /// What runs, by a name that no other build of it has: ranks that run something else are refused.
    pub program: &'static str,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            timeout: Duration::from_secs(60),
            segment_limit: None,
            program: concat!("caravan-collectives ", env!("CARGO_PKG_VERSION")),
        }
    }
}

/// The shared-memory transport over all ranks of the job, which must run on one host.
///
/// # Errors
/// As [`Rendezvous::join`], and [`Error::Unavailable`] when the ranks are on several
/// hosts.
pub fn shm_group(identity: &Identity, options: &Options) -> Result<Box<dyn Transport>> {
    shm_over(&mut Rendezvous::join(identity, options)?, options)
}

/// The shared-memory transport over ranks that have met.
///
/// # Errors
/// As [`shm_group`].
pub fn shm_over(rendezvous: &mut Rendezvous, options: &Options) -> Result<Box<dyn Transport>> {
    let names = rendezvous.host_names();
    if names.len() > 1 {
        return Err(Error::Unavailable {
            name: "shm".into(),
            why: format!(
                "it joins ranks of one host, and these are on {} ({}); mpi and ucx join several",
                names.len(),
                names.join(", ")
            ),
        });
    }
    Ok(Box::new(ShmTransport::connect(rendezvous, options)?))
}
