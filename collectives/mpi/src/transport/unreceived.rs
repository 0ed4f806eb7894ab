//! Messages that no group has received before it ended, such as what a neighbour that is behind sends for comparison.

use super::codes::OK;
use super::ffi;
use std::mem::MaybeUninit;

/// Receives all that has come on a communicator that no group uses any more, once no rank sends on it any more. For the
/// thread whose turn it is. Every send is over, so what is left lies here already, and no receive of it waits.
pub(super) fn take_all(comm: ffi::MPI_Comm) {
    let mut space = Vec::<u8>::new();
    loop {
        let (mut found, mut bytes) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: a valid communicator, by its maker; constants of the library and valid places; the status was filled
        // where a message was found, and its length is asked for in what it was sent as.
        unsafe {
            let (any, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            let probed = ffi::MPI_Iprobe(any, tag, comm, &mut found, status.as_mut_ptr());
            if probed != OK || found == 0 {
                return;
            }
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut bytes);
            space.resize(bytes.max(0) as usize, 0);
            let (to, status, ignored) = (space.as_mut_ptr(), status.assume_init(), ffi::RSMPI_STATUS_IGNORE);
            let (from, tag) = (status.MPI_SOURCE, status.MPI_TAG);
            let received = ffi::MPI_Recv(to.cast(), bytes, ffi::RSMPI_UINT8_T, from, tag, comm, ignored);
            if received != OK {
                return;
            }
        }
    }
}
