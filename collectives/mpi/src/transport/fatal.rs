//! What UCX ends the process for where an MPI library sends over it: a copy from the memory of another process of this host
//! that has ended. MPI would take such a message for one that came, so nothing may go on here (over our own transport it can);
//! but before the process ends, this rank says who was lost, instead of a trace of calls.

use super::blocked::{Ranks, Start};
use collectives::Error;
use collectives::transport::HEARSAY;
use collectives::transport::neighbours::SEEN_BY_ALL;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use ucx_sys::{UCS_LOG_FUNC_RC_CONTINUE, UCS_LOG_LEVEL_FATAL};

/// MPI is started once in a process, and UCX's handlers are those of a process.
static KNOWN: OnceLock<(Start, Ranks)> = OnceLock::new();

/// From now on a rank whose end is fatal to this process is named, where MPI has loaded UCX.
pub(super) fn name_the_lost(start: &Start, ranks: Ranks) {
    if let Some(push) = ucx_sys::loaded_log_push_handler()
        && KNOWN.set((start.clone(), ranks)).is_ok()
    {
        // SAFETY: a function of the right type, which stays for as long as the process does.
        unsafe { push(hear) };
    }
}

/// Called by UCX for all that it logs.
unsafe extern "C" fn hear(
    _file: *const c_char,
    _line: c_uint,
    _function: *const c_char,
    level: c_int,
    _component: *const c_void,
    _message: *const c_char,
    _arguments: *mut c_void,
) -> c_int {
    if level == UCS_LOG_LEVEL_FATAL
        && let Some((start, ranks)) = KNOWN.get()
        && let Some(why) = lost(ranks)
    {
        (start.tell)(&why);
        // SAFETY: ends the process, as UCX is about to.
        unsafe { libc::_exit(1) };
    }
    UCS_LOG_FUNC_RC_CONTINUE
}

/// Which rank of the host ended first, as soon as the system tells and all others have had time to see it.
fn lost(ranks: &Ranks) -> Option<Error> {
    let until = Instant::now() + HEARSAY + SEEN_BY_ALL;
    while Instant::now() < until {
        if let Some(lost) = ranks.lost(SEEN_BY_ALL) {
            return Some(lost);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}
