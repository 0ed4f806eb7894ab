//! In the place of MPI's own collectives, in a build that has no MPI: nobody has any.

use crate::bench::calls::Work;
use crate::bench::exact::Exact;
use crate::bench::slot::Slot;
use crate::failure::Result;
use collectives::schedule::Call;

/// Nothing: this build has no library with collectives.
pub enum Native {}

/// What is in the way of such a call.
pub fn obstacle(native: &Native, _call: &Call) -> Option<String> {
    match *native {}
}

/// Why the library's own algorithm runs.
pub fn why(native: &Native, _call: &Call) -> String {
    match *native {}
}

/// Makes one call on each slot.
pub fn several<T: Exact>(native: &Native, _work: &Work, _call: Call, _slots: &mut [Slot<T>]) -> Result<()> {
    match *native {}
}
