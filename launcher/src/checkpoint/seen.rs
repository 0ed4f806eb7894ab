//! Whether all ranks see the directory of checkpoints, to which each writes its own part.

use super::pen_place;
use crate::agree;
use crate::failure::{Failure, Result};
use collectives::Communicator;
use collectives::bootstrap::host_name;
use collectives::trace::Trace;
use std::fs;
use std::path::Path;

/// Checks that what rank 0 puts into `dir` is there for all ranks, which all call it.
///
/// # Errors
/// The first that does not see it, which all say; what rank 0 is refused.
pub fn check_seen(dir: &Path, comm: &Communicator) -> Result<()> {
    let lead = comm.rank() == 0;
    // Of a name that no host can know from before. What a killed run leaves of it goes with what else is not whole.
    let mut mark = [Trace::now()];
    if lead {
        let made = fs::create_dir(pen_place(dir, mark[0] as usize));
        made.map_err(|e| Failure::usage(format!("--checkpoint {}: {e}", dir.display())))?;
    }
    comm.broadcast(&mut mark[..], 0)?;
    let place = pen_place(dir, mark[0] as usize);
    if !place.is_dir() {
        look_anew(dir);
    }
    let blind = if place.is_dir() { String::new() } else { host_name() };
    let blind = agree::exchange(comm, &blind)?;
    if lead {
        let _ = fs::remove_dir(place);
    }
    let first = blind.iter().enumerate().find(|(_, host)| !host.is_empty());
    first.map_or(Ok(()), |(rank, host)| {
        Err(Failure::Common(format!(
            "--checkpoint {}: rank {} on {host} does not see there what rank 0 puts there, and each writes its own part: name a \
             directory that all hosts share",
            dir.display(),
            comm.job_rank(rank)
        )))
    })
}

/// Has a host forget that something is not there: over NFS it remembers that for half a minute, and a run has looked before rank 0
/// made it. Who would make it is told.
fn look_anew(dir: &Path) {
    let parent = models::parent(dir);
    // It is its own where that is `.`, which nobody makes.
    if dir.is_dir() || parent == dir {
        return;
    }
    look_anew(parent);
    if fs::create_dir(dir).is_ok() {
        // It was not, and is not to be here alone.
        let _ = fs::remove_dir(dir);
    }
}
