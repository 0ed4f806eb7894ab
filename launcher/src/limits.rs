//! What the system lets a process have, and how long it lets it live.

use crate::failure::{Failure, Result};
use collectives::bootstrap::Launcher;
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};

/// Takes the limit of open files as far up as this user may: token files stay open, a rank opens some for every other,
/// and many systems grant a few hundred unless asked.
pub fn allow_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Where it cannot be raised, what is opened one day says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// This rank is asked to end when its launcher ends before it: mpirun, when it is killed, takes none with it that has not started
/// MPI, and ranks that answer each other would go on for ever. The first thing that a rank does: who is above it no longer
/// cannot be watched.
///
/// # Errors
/// No thread can be had.
pub fn end_with(launcher: Launcher) -> Result<()> {
    let end = || {
        // A process may signal itself.
        let _ = kill_process(getpid(), Signal::TERM);
    };
    launcher.on_end(end).map_err(Failure::run)
}
