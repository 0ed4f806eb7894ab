//! One stage of a reduction that goes over nodes: of contributions, or of partial results.

use super::execute::{Env, State, TIMED};
use crate::reduce::{Stage, Staged};
use crate::schedule::{Operand, Schedule, Span};
use std::time::Instant;

/// Does the whole step, unless calls of higher priority should have a look first; true when it is done.
pub(super) fn join(
    schedule: &Schedule,
    (stage, operands): (Stage, &[Operand]),
    (out, count): (Span, usize),
    state: &State,
    env: &mut Env<'_>,
    worked: &mut usize,
) -> bool {
    if *worked >= env.quantum {
        return false;
    }
    let call = &schedule.call;
    let staged = Staged { dtype: call.dtype, op: call.op, wide: call.wide, ranks: schedule.group.size };
    env.pointers.clear();
    env.pointers.extend(operands.iter().map(|operand| match *operand {
        Operand::Own(space, offset) => state.read(space, offset),
        Operand::Peer(remote) => state.remote(remote),
    }));
    let bytes = count * staged.in_size(stage);
    let start = (bytes >= TIMED).then(Instant::now);
    // SAFETY: the schedule gives operands and output of `count` elements of the stage's types, in memory that is this
    // call's and has arrived, at multiples of their size; the output is disjoint from them.
    unsafe { staged.run(stage, env.pointers, state.write(out), count) };
    if let Some(start) = start {
        env.stats.work_seconds += start.elapsed().as_secs_f64();
    }
    *worked += bytes;
    true
}
