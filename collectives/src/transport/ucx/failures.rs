//! What UCX's failure callbacks have said of connections.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicI8, AtomicUsize, Ordering};
use ucx_sys::{Handle, UCS_OK, ucp_err_handler_t, ucs_status_t};

/// Written from inside `ucp_worker_progress`.
pub(super) struct Failures {
    cells: Box<[Failure]>,
    count: Arc<AtomicUsize>,
}

struct Failure {
    status: AtomicI8,
    count: Arc<AtomicUsize>,
}

impl Failures {
    pub(super) fn none(size: usize) -> Self {
        let count = Arc::new(AtomicUsize::new(0));
        let cells = (0..size).map(|_| Failure { status: AtomicI8::new(0), count: count.clone() }).collect();
        Failures { cells, count }
    }

    /// What to give UCX when connecting to `peer`. It must not be called any more once this is gone.
    pub(super) fn handler(&self, peer: usize) -> ucp_err_handler_t {
        let arg = (&raw const self.cells[peer]).cast_mut().cast();
        ucp_err_handler_t { cb: Some(failed), arg }
    }

    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    pub(super) fn of(&self, peer: usize) -> ucs_status_t {
        self.cells[peer].status.load(Ordering::Relaxed)
    }
}

unsafe extern "C" fn failed(arg: *mut c_void, _endpoint: Handle, status: ucs_status_t) {
    // SAFETY: `arg` is a cell of `Failures`, which outlives every connection of the session that owns it.
    let cell = unsafe { &*arg.cast::<Failure>() };
    if cell.status.swap(status, Ordering::Relaxed) == UCS_OK {
        cell.count.fetch_add(1, Ordering::Relaxed);
    }
}
