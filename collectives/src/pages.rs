//! Giving pages back to the system, always by the C library: who registers memory with a network card keeps the
//! registration until it hears that the pages are gone. UCX, Open MPI and libfabric listen where `munmap` and `madvise` of
//! the C library begin. `rustix` makes system calls of its own, of which they hear nothing: later memory at the same
//! addresses would meet the old registration, and the card would send what stands in pages that nobody sees any more.

use std::io::{Error, Result};

/// Unmaps `bytes` at `start`.
///
/// # Safety
/// Whole pages of a mapping of the caller's own, to which nothing refers any more.
pub(crate) unsafe fn unmap(start: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    outcome(unsafe { libc::munmap(start.cast(), bytes) })
}

/// Makes holes of pages of a file that is mapped shared: they take no memory, and read as zero.
///
/// # Safety
/// Whole pages of a mapping, which are the caller's alone and hold nothing that is still needed.
pub(crate) unsafe fn remove(start: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    outcome(unsafe { libc::madvise(start.cast(), bytes, libc::MADV_REMOVE) })
}

fn outcome(status: libc::c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}
