//! Ranks that MPI itself has seen to end, on any host, where the library can: User-Level Failure Mitigation, in Open MPI 5
//! under `mpirun --with-ft ulfm` and in some builds of MPICH. What waits for one of them fails there, and so does what waits
//! for a message from anybody, until the failure is acknowledged; then MPI says who it was.

use super::codes::OK;
use super::ffi;
use std::ffi::CStr;
use std::os::raw::c_int;

/// Of functions that come with that extension and are in no binding.
type Acknowledge = unsafe extern "C" fn(ffi::MPI_Comm) -> c_int;
type Acknowledged = unsafe extern "C" fn(ffi::MPI_Comm, *mut ffi::MPI_Group) -> c_int;

/// The ranks of `comm` that have ended as far as MPI knows, none where it does not. Later receives from anybody wait for the
/// others. It is this thread's turn.
pub(super) fn acknowledge(comm: ffi::MPI_Comm) -> Vec<usize> {
    let (acknowledge, acknowledged) =
        (function(c"MPIX_Comm_failure_ack"), function(c"MPIX_Comm_failure_get_acked"));
    let (Some(acknowledge), Some(acknowledged)) = (acknowledge, acknowledged) else { return Vec::new() };
    // SAFETY: functions of these types by the extension's definition; a valid communicator and places; both groups are
    // freed.
    unsafe {
        let acknowledge = std::mem::transmute::<*mut libc::c_void, Acknowledge>(acknowledge);
        let acknowledged = std::mem::transmute::<*mut libc::c_void, Acknowledged>(acknowledged);
        let (mut ended, mut all, mut count) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL, 0);
        if acknowledge(comm) != OK || acknowledged(comm, &mut ended) != OK {
            return Vec::new();
        }
        let mut ranks = Vec::new();
        if ffi::MPI_Group_size(ended, &mut count) == OK && ffi::MPI_Comm_group(comm, &mut all) == OK {
            let places: Vec<c_int> = (0..count).collect();
            ranks.resize(places.len(), -1);
            if ffi::MPI_Group_translate_ranks(ended, count, places.as_ptr(), all, ranks.as_mut_ptr()) != OK {
                ranks.clear();
            }
            ffi::MPI_Group_free(&mut all);
        }
        ffi::MPI_Group_free(&mut ended);
        ranks.into_iter().filter_map(|rank| usize::try_from(rank).ok()).collect()
    }
}

/// A function of the library, if it has it.
fn function(name: &CStr) -> Option<*mut libc::c_void> {
    // SAFETY: a name that ends; what is loaded already is asked.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}
