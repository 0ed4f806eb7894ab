//! What the system lets a process have, and how long it lets it live.

use crate::failure::{Failure, Result};
use collectives::bootstrap::Launcher;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};

/// Takes the limit of open files as far up as this user may: token files stay open, a rank opens some for every other,
/// and many systems grant a few hundred unless asked.
pub fn allow_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Where it cannot be raised, what is opened one day says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// A rank of such a launcher, or of what that has started it through, is asked to end when that is killed: it takes none with
/// it that has not started MPI, and ranks that answer each other would go on for ever. Other launchers see to that, or end
/// before their ranks do. The first thing that a rank does: who has lost its parent already hears nothing any more.
///
/// # Errors
/// The system's.
pub fn end_with(launcher: Launcher) -> Result<()> {
    match launcher {
        Launcher::OpenMpi | Launcher::Pmi => set_parent_process_death_signal(Some(Signal::TERM))
            .map_err(|e| Failure::run(format!("the system does not end ranks with their launcher: {e}"))),
        _ => Ok(()),
    }
}
