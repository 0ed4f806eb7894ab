//! MPI as a transport of `collectives`: `MpiTransport`.
//!
//! The feature `mpi` brings rsmpi, which needs `mpicc` (or `MPICC=mpicc.mpich` and the like) and libclang to build. It is a crate
//! apart so that whoever changes from one MPI to another builds this and what is linked to it anew, and not all that computes.
//! Without the feature it is empty, but for the tests of what needs no library.
#![warn(missing_docs)]

#[cfg(any(feature = "mpi", test))]
mod eager;
#[cfg(any(feature = "mpi", test))]
mod family;
#[cfg(any(feature = "mpi", test))]
mod probing;
#[cfg(any(feature = "mpi", test))]
mod tags;
#[cfg(feature = "mpi")]
mod transport;
#[cfg(any(feature = "mpi", test))]
mod words;

#[cfg(feature = "mpi")]
pub use family::Family;
#[cfg(feature = "mpi")]
pub use transport::{MpiTransport, Start, family, library, native};
