//! MPI's own collectives, as calls that are measured.

use crate::bench::args::Calls;
use crate::bench::calls::{Placement, Work};
use crate::bench::exact::Exact;
use crate::bench::slot::Slot;
use crate::failure::{Failure, Result};
use collectives::schedule::{Call, Kind};

pub use collectives_mpi::native::Native;

/// What is in the way of such a call.
pub fn obstacle(native: &Native, call: &Call) -> Option<String> {
    native.check(call).err().map(|e| match e {
        collectives::Error::Argument { problem, .. } => problem,
        e => e.to_string(),
    })
}

/// Why the library's own algorithm runs.
pub fn why(native: &Native, call: &Call) -> String {
    let caveat = native.caveat().filter(|_| call.kind == Kind::Reduce);
    let caveat = caveat.map_or(String::new(), |caveat| format!("; {caveat}"));
    format!("as asked for: {}{caveat}", collectives_mpi::library())
}

/// Makes one call on each slot: one after the other, or all started before the first is waited for.
///
/// # Errors
/// What the library cannot do, and its own errors.
pub fn several<T: Exact>(native: &Native, work: &Work, call: Call, slots: &mut [Slot<T>]) -> Result<()> {
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
