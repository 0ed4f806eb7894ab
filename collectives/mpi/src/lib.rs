//! MPI as a transport of `collectives`: `MpiTransport`.
//!
//! The feature `mpi` brings rsmpi, which needs `mpicc` (or `MPICC=mpicc.mpich` and the like) and libclang to build. It is a crate
//! apart so that whoever changes from one MPI to another builds this and what is linked to it anew, and not all that computes.
//! Without the feature there is only what needs no library, for its tests.
#![cfg_attr(not(feature = "mpi"), allow(dead_code))]
#![warn(missing_docs)]

mod family;
mod tags;
#[cfg(feature = "mpi")]
mod transport;
mod words;

pub use family::Family;
#[cfg(feature = "mpi")]
pub use transport::{MpiTransport, Start, family, library, native};
