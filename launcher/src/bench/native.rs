//! The collectives of the transport's own library (`--algo native`): MPI's, when MPI is built in.

use super::args::Calls;
use super::calls::Work;
use super::exact::Exact;
use super::operation::Operation;
use super::slot::Slot;
use crate::failure::{Failure, Result};
use crate::layers;
use collectives::schedule::Call;
#[cfg(feature = "mpi")]
use collectives::schedule::Kind;

#[cfg(feature = "mpi")]
pub use collectives_mpi::native::Native;

/// Nothing: this build has no library with collectives.
#[cfg(not(feature = "mpi"))]
pub enum Native {}

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

/// What is in the way of such a call.
#[cfg(feature = "mpi")]
pub fn obstacle(native: &Native, call: &Call) -> Option<String> {
    native.check(call).err().map(|e| match e {
        collectives::Error::Argument { problem, .. } => problem,
        e => e.to_string(),
    })
}

/// What is in the way of such a call.
#[cfg(not(feature = "mpi"))]
pub fn obstacle(native: &Native, _call: &Call) -> Option<String> {
    match *native {}
}

/// Why the library's own algorithm runs.
#[cfg(feature = "mpi")]
pub fn why(native: &Native, call: &Call) -> String {
    let caveat = native.caveat().filter(|_| call.kind == Kind::Reduce);
    let caveat = caveat.map_or(String::new(), |caveat| format!("; {caveat}"));
    format!("as asked for: {}{caveat}", collectives_mpi::library())
}

/// Why the library's own algorithm runs.
#[cfg(not(feature = "mpi"))]
pub fn why(native: &Native, _call: &Call) -> String {
    match *native {}
}

/// Makes one call on each slot: one after the other, or all started before the first is waited for.
///
/// # Errors
/// What the library cannot do, and its own errors.
#[cfg(feature = "mpi")]
pub fn several<T: Exact>(native: &Native, work: &Work, call: Call, slots: &mut [Slot<T>]) -> Result<()> {
    use super::calls::Placement;
    // What MPI cannot do (16-bit sums, averages) is a matter of what was asked for.
    let refuse = |e: collectives::Error| match e {
        collectives::Error::Argument { .. } => Failure::usage(e),
        e => e.into(),
    };
    if work.calls == Calls::Started {
        let start = |slot: &mut Slot<T>| match (slot.send.take(), slot.receive.take()) {
            (Some(send), Some(receive)) => native.start(call, send, receive).map_err(refuse),
            _ => Err(Failure::run("a buffer is still in a call")),
        };
        let flights = slots.iter_mut().map(start).collect::<Result<Vec<_>>>()?;
        for (flight, slot) in flights.into_iter().zip(slots) {
            let (send, receive) = flight.wait().map_err(refuse)?;
            (slot.send, slot.receive) = (Some(send), Some(receive));
        }
        return Ok(());
    }
    for slot in slots {
        let (Some(send), Some(receive)) = (&slot.send, &mut slot.receive) else { continue };
        match work.placement {
            Placement::Out => native.run(call, send.host(), receive.host_mut()),
            Placement::In => native.run_in_place(call, receive.host_mut()),
        }
        .map_err(refuse)?;
    }
    Ok(())
}

/// Makes one call on each slot.
#[cfg(not(feature = "mpi"))]
pub fn several<T: Exact>(native: &Native, _work: &Work, _call: Call, _slots: &mut [Slot<T>]) -> Result<()> {
    match *native {}
}
