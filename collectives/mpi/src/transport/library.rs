//! Which MPI library this program is built against, and what that says about how it has to be used.

use super::ffi;
use crate::family::{Family, short};
use std::os::raw::c_int;

/// The name and version of the library; MPI need not be started.
pub fn library() -> String {
    short(&mpi::environment::library_version().unwrap_or_default())
}

/// The family of the library; MPI need not be started.
pub fn family() -> Family {
    Family::of(&library(), SMALL_HANDLES)
}

/// Handles are numbers of 32 bits in the binary interface that MPICH and its relatives share, and addresses in Open MPI's and
/// the standard's, which an MPICH may be built for as well.
pub(super) const SMALL_HANDLES: bool = size_of::<ffi::MPI_Comm>() == size_of::<c_int>();
