//! MPI as the standard allows it to be and neither library here is by itself: a message has gone only when it is received.
//! The library's own names are weak, for programs to put theirs in their place.

use mpi::ffi::{self, MPI_Comm, MPI_Datatype, MPI_Request};
use std::ffi::c_void;
use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

static STRICT: AtomicBool = AtomicBool::new(false);

/// From now on in this process.
pub fn sends_wait_for_receivers() {
    STRICT.store(true, Ordering::Relaxed);
}

/// What the transport calls.
///
/// # Safety
/// That of MPI's.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn MPI_Isend(
    from: *const c_void,
    count: c_int,
    dtype: MPI_Datatype,
    to: c_int,
    tag: c_int,
    comm: MPI_Comm,
    request: *mut MPI_Request,
) -> c_int {
    let send = if STRICT.load(Ordering::Relaxed) { ffi::PMPI_Issend } else { ffi::PMPI_Isend };
    // SAFETY: by the caller; both take the same.
    unsafe { send(from, count, dtype, to, tag, comm, request) }
}
