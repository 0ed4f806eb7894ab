//! The steps that touch data: copies and reductions, in parts, so that calls of higher priority get their look.

use super::execute::{Env, State};
use super::stream;
use crate::reduce::{Kernel, Stage, Staged};
use crate::schedule::{Operand, Remote, Schedule, Span};
use std::mem::MaybeUninit;
use std::time::Instant;

/// Reductions and copies shorter than this many bytes are not timed: reading the clock would cost more.
const TIMED: usize = 16 << 10;

/// Bytes that are copied or reduced before messages under way are looked at: some libraries move them only then.
const BETWEEN_LOOKS: usize = 128 << 10;

/// Bytes of the next part of a step.
fn part(left: usize, state: &State, env: &Env<'_>) -> usize {
    left.min(env.quantum).min(if state.awaits_messages() { BETWEEN_LOOKS } else { usize::MAX })
}

impl Env<'_> {
    /// Does `work` on so many bytes, and counts them.
    #[inline(always)]
    fn timed(&mut self, bytes: usize, work: impl FnOnce(&mut Self)) {
        let start = (bytes >= TIMED).then(Instant::now);
        work(self);
        if let Some(start) = start {
            self.stats.work_seconds += start.elapsed().as_secs_f64();
        }
        self.worked += bytes;
    }
}

impl State {
    /// Another `part` of a step is done; whether that is the `whole` of it.
    #[inline(always)]
    fn advance(&mut self, part: usize, whole: usize) -> bool {
        self.part += part;
        let done = self.part == whole;
        if done {
            self.part = 0;
        }
        done
    }
}

/// Copies what is left of a step, or as much as the quantum allows; true when all is copied.
pub(super) fn copy(
    schedule: &Schedule,
    (src, dst): (*const u8, *mut u8),
    to: Span,
    state: &mut State,
    env: &mut Env<'_>,
) -> bool {
    if env.worked >= env.quantum {
        return false;
    }
    let part = part(to.bytes - state.part, state, env);
    // SAFETY: both ranges are inside their memory (see `State::read`), and schedules never copy onto themselves.
    env.timed(part, |env| unsafe {
        let (src, dst) = (src.add(state.part), dst.add(state.part));
        if env.past.takes(schedule, to.space) {
            stream::copy(src, dst, part);
            stream::fence();
        } else {
            std::ptr::copy_nonoverlapping(src, dst, part);
        }
    });
    state.advance(part, to.bytes)
}

/// Reduces what is left of a step, or as much as the quantum allows; true when all is reduced. Fails with the operand of
/// which its peer has published less than that.
pub(super) fn reduce(
    schedule: &Schedule,
    operands: &[Operand],
    (out, count): (Span, usize),
    state: &mut State,
    env: &mut Env<'_>,
) -> Result<bool, Remote> {
    if env.worked >= env.quantum {
        return Ok(false);
    }
    let kernel = schedule.kernel.expect("a schedule that reduces has a kernel");
    let element = schedule.call.dtype.size();
    let (stream, out_size) = (env.past.takes(schedule, out.space), schedule.call.out_size());
    debug_assert_eq!(out.bytes, count * out_size);
    let out = state.write(out);
    // A shift: a division takes as long as a short reduction.
    let part = (part((count - state.part) * element, state, env) >> element.trailing_zeros()).max(1);
    state.locate(operands, (count * element, state.part * element), env.pointers)?;
    // SAFETY: one operand per rank, each with `count` elements from its place on, all at multiples of their
    // size; the output is disjoint from them or, in place, this rank's operand itself.
    env.timed(part * element, |env| unsafe {
        let out = out.add(state.part * out_size);
        if stream && !env.pointers.contains(&out.cast_const()) {
            streamed(kernel, env.pointers, (out, out_size), part, element);
        } else {
            kernel(env.pointers, out, part);
        }
    });
    Ok(state.advance(part, count))
}

/// Reduces tile by tile and writes the tiles past the caches; moves `inputs` on meanwhile.
///
/// # Safety
/// The contract of [`Kernel`], and the output is disjoint from all inputs.
unsafe fn streamed(
    kernel: Kernel,
    inputs: &mut [*const u8],
    (mut out, out_size): (*mut u8, usize),
    count: usize,
    element: usize,
) {
    let mut tile = MaybeUninit::<stream::Tile>::uninit();
    // SAFETY: an address inside the tile; nothing is read.
    let tile = unsafe { &raw mut (*tile.as_mut_ptr()).0 }.cast::<u8>();
    let mut left = count;
    while left > 0 {
        let part = left.min(stream::TILE / out_size);
        // SAFETY: the tile has room for the part, of which the inputs and the output have at least as much left.
        unsafe {
            kernel(inputs, tile, part);
            for input in &mut *inputs {
                *input = input.wrapping_add(part * element);
                stream::prefetch(*input, part * element);
            }
            stream::copy(tile, out, part * out_size);
            out = out.add(part * out_size);
        }
        left -= part;
    }
    stream::fence();
}

/// One stage of a reduction that goes over nodes. Does the whole step, unless calls of higher priority should have a look
/// first; true when it is done.
pub(super) fn join(
    schedule: &Schedule,
    (stage, operands): (Stage, &[Operand]),
    (out, count): (Span, usize),
    state: &State,
    env: &mut Env<'_>,
) -> bool {
    if env.worked >= env.quantum {
        return false;
    }
    let call = &schedule.call;
    let staged = Staged { dtype: call.dtype, op: call.op, wide: call.wide, ranks: schedule.group.size };
    env.pointers.clear();
    env.pointers.extend(operands.iter().map(|operand| match *operand {
        Operand::Own(space, offset) => state.read(space, offset),
        // Nodes are joined by messages.
        Operand::Peer(_) => unreachable!("a stage reads what has come to this rank"),
    }));
    // SAFETY: the schedule gives operands and output of `count` elements of the stage's types, in memory that is this
    // call's and has arrived, at multiples of their size; the output is disjoint from them.
    env.timed(count * staged.in_size(stage), |env| unsafe {
        staged.run(stage, env.pointers, state.write(out), count);
    });
    true
}
