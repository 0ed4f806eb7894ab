//! What UCX logs, by a handler of ours.
//!
//! Some of it UCX would end the process for: a copy from or to the memory of another process of this host that fails,
//! because that has ended or forbids it. UCX reports no losses of such peers (see [`peers`](super::peers)), takes what nobody
//! has asked to be told for fatal, and ends the process when it has logged it. The handler keeps it from that: the message
//! completes with an error, and this rank says itself who was lost.
//!
//! Some of it is untrue: while the worker ends, peers that need nothing more of this rank end as well, which UCX takes for
//! errors of connections that it is about to close, or was still completing in the background.

use crate::locked;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, Once};
use ucx_sys::{UCS_LOG_FUNC_RC_CONTINUE, UCS_LOG_FUNC_RC_STOP, UCS_LOG_LEVEL_FATAL, UCS_LOG_LEVEL_WARN, Ucp};

/// UCX's handlers are those of a process, and each would be called.
static HEARD: Once = Once::new();

/// The latest such failure in UCX's words; a handler gets nothing that would tell it from whose worker it comes. Not of a
/// thread: any that calls UCX moves the messages of all groups.
static SAID: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    /// This thread ends a worker.
    static ENDING: Cell<bool> = const { Cell::new(false) };
}

/// From now on failures to copy do not end the process.
pub(super) fn listen(ucp: &Ucp) {
    // SAFETY: a function of the right type, which stays for as long as the process does. Who opens UCX at the same time
    // waits here.
    HEARD.call_once(|| unsafe { (ucp.ucs_log_push_handler)(hear) });
}

/// Does something of which errors and warnings mean nothing; who has set `UCX_LOG_LEVEL` sees them all the same.
pub(super) fn unheard(end: impl FnOnce()) {
    ENDING.set(std::env::var_os("UCX_LOG_LEVEL").is_none());
    end();
    ENDING.set(false);
}

/// What UCX last said of such a failure; only once.
pub(super) fn said() -> Option<String> {
    locked(&SAID).take()
}

/// Called by UCX for all that it logs. Nothing here can panic.
unsafe extern "C" fn hear(
    _file: *const c_char,
    _line: c_uint,
    _function: *const c_char,
    level: c_int,
    _component: *const c_void,
    message: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    if level != UCS_LOG_LEVEL_FATAL {
        let unheard = level <= UCS_LOG_LEVEL_WARN && ENDING.get();
        return if unheard { UCS_LOG_FUNC_RC_STOP } else { UCS_LOG_FUNC_RC_CONTINUE };
    }
    unsafe extern "C" {
        fn vsnprintf(to: *mut c_char, room: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
    }
    let mut text = [0u8; 256];
    // SAFETY: UCX gives a format with its arguments, as C passes a list of them on; the text ends with a zero within the
    // room that is given.
    unsafe { vsnprintf(text.as_mut_ptr().cast(), text.len(), message, arguments) };
    let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
    *locked(&SAID) = Some(String::from_utf8_lossy(text).into_owned());
    UCS_LOG_FUNC_RC_STOP
}
