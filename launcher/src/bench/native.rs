//! The collectives of the transport's own library (`--algo native`): MPI's, when MPI is built in.

#[cfg_attr(not(feature = "mpi"), path = "native/absent.rs")]
mod mpi;

use super::args::Calls;
use super::operation::Operation;
use crate::failure::{Failure, Result};
use crate::layers;
pub use mpi::{Native, obstacle, several, why};

/// Whether `operation` can be measured that way over the transport of this label.
///
/// # Errors
/// A transport without collectives of its own, or an operation that is none of the library's.
pub fn check(operation: Operation, calls: Calls, transport: &str) -> Result<()> {
    let library = layers::between(transport);
    if library != "mpi" {
        return Err(Failure::usage(format!(
            "--algo native runs the collectives of the transport's own library, and {library} has none: take --transport \
             mpi"
        )));
    }
    if transport != library {
        return Err(Failure::usage(format!(
            "--algo native runs the collectives of the transport's own library, which know nothing of {transport}: take \
             --transport mpi by itself"
        )));
    }
    match (operation, calls) {
        (Operation::SendRecv, _) => Err(Failure::usage(
            "--algo native: send_recv is no collective; take --algo auto, which uses MPI's messages",
        )),
        (Operation::Broadcast, Calls::Started) => Err(Failure::usage(
            "--algo native: broadcast is measured blocking only; leave --calls started and -m away",
        )),
        _ => Ok(()),
    }
}
