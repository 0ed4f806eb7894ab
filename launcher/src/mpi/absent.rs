//! In the place of MPI, in a build that has none.

use crate::bench::native::Native;
use crate::failure::{Failure, Result};
use crate::plan::Ranks;
use collectives::bootstrap::{Identity, Launcher, Options};
use collectives::transport::Transport;

/// Why this build cannot use MPI.
const WHY: &str = "MPI is not in this build: 'cargo build --release --features mpi' builds it in, which needs \
                   mpicc and libclang (Debian: libopenmpi-dev or libmpich-dev, and libclang-dev)";

/// The same, if it cannot.
pub const OBSTACLE: Option<&str> = Some(WHY);

/// The library, with its version.
pub fn library() -> Option<String> {
    None
}

/// The launcher of its ranks.
pub fn launcher() -> Option<Launcher> {
    None
}

/// The plugin with which srun starts them.
pub fn plugin() -> Option<&'static str> {
    None
}

/// MPI between all ranks, and its own collectives.
///
/// # Errors
/// Always.
pub fn connect(
    _ranks: &Ranks,
    _identity: &Identity,
    _options: &Options,
    _have_met: bool,
) -> Result<(Box<dyn Transport>, Option<Native>)> {
    Err(Failure::usage(WHY))
}
