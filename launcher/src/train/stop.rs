//! Being asked to end: who keeps a model ends a run between two steps, with what it has learnt.

use crate::failure::{Failure, Result};
use crate::ranks;
use collectives::bootstrap::Launcher;
use collectives::bootstrap::spawn::{self, OnRequest};
use collectives::{Communicator, ReduceOp};
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// With these, batch systems say that a job's time is nearly up.
pub const REQUESTS: [i32; 2] = [SIGTERM, SIGUSR1];

/// The last of them that this process got; 0 for none.
static GOT: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// What being asked to end means to a run that `keeps` something then, or not.
pub fn on_request(keeps: bool) -> OnRequest {
    if keeps { OnRequest::EndWhenReady } else { OnRequest::EndAtOnce }
}

/// From here on this process, whose ranks may be many, does not end when it is asked to, and [`asked`] tells.
///
/// # Errors
/// The system's.
pub fn listen() -> Result<()> {
    // Open MPI's mpirun passes USR1 on. By TERM it ends a job, for Ctrl-C too, and kills it a second later, when a model may be
    // half written.
    let kills = ranks::identity()?.is_some_and(|rank| rank.launcher == Launcher::OpenMpi);
    // What a process is started to ignore it is to outlive.
    let heard = |&signal: &i32| !(spawn::ignored(signal) || kills && signal == SIGTERM);
    let mut done = Ok(());
    GOT.get_or_init(|| {
        let got = Arc::new(AtomicUsize::new(0));
        for signal in REQUESTS.into_iter().filter(heard) {
            if let Err(e) = flag::register_usize(signal, Arc::clone(&got), signal as usize) {
                done = Err(Failure::run(format!("the system lets nobody wait for signal {signal}: {e}")));
            }
        }
        got
    });
    done
}

/// The signal by which this process was asked to end, if it was.
pub fn asked() -> Option<u8> {
    let got = GOT.get()?.load(Ordering::Relaxed);
    (got > 0).then_some(got as u8)
}

/// Whether any of the ranks, which all ask here, was asked to end: they do together, or none does.
///
/// # Errors
/// A verdict if so, or another rank fails.
pub fn any(comm: &Communicator) -> Result<()> {
    any_or(comm, false).map(drop)
}

/// The same, and whether any of them is `done`.
///
/// # Errors
/// As [`any`].
pub fn any_or(comm: &Communicator, done: bool) -> Result<bool> {
    let mut most = [asked().unwrap_or(0), u8::from(done)];
    comm.all_reduce_in_place(&mut most[..], ReduceOp::Max)?;
    match most {
        [0, done] => Ok(done > 0),
        [signal, _] => Err(interrupted(signal)),
    }
}

/// A run that ends because of this signal.
pub fn interrupted(signal: u8) -> Failure {
    Failure::Stopped { text: format!("interrupted by signal {signal}"), signal }
}
