//! Runs that go through and are yet no success: the verdict is about what was measured, and no rank has failed.

use super::native::Native;
use crate::failure::{Failure, Result};
use crate::plan::Ranks;
use crate::ranks;
use collectives::Communicator;
use collectives::bootstrap::{Identity, variables};
use std::sync::{Mutex, PoisonError};

/// What makes a run no success, if something does.
pub type Verdict = Option<String>;

/// By this exit code a rank tells its supervisor that it has said the verdict itself. No failure has it.
const SAID: u8 = 3;

/// Runs `body` as every rank, as [`ranks::launch_with_native`] does.
///
/// # Errors
/// The failure of the rank that failed first, else the verdict of the one that has it: with exit code 1.
pub fn launch(
    ranks: &Ranks,
    identity: Option<&Identity>,
    body: &(dyn Fn(Communicator, Option<Native>) -> Result<Verdict> + Sync),
) -> Result<()> {
    let verdict = Mutex::new(None);
    let judged = |comm: Communicator, native: Option<Native>| {
        if let Some(text) = body(comm, native)? {
            *verdict.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        }
        Ok(())
    };
    match ranks::launch_with_native(ranks, identity, None, &judged) {
        Err(Failure::Ranks { code: SAID, .. }) => return Err(Failure::Told { code: 1 }),
        done => done?,
    }
    let Some(text) = verdict.into_inner().unwrap_or_else(PoisonError::into_inner) else { return Ok(()) };
    let failure = Failure::run(text);
    match std::env::var_os(variables::BOARD_FD) {
        Some(_) => {
            failure.report();
            Err(Failure::Told { code: SAID })
        }
        None => Err(failure),
    }
}
