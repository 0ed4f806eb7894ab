//! One call in flight: runs the steps of its schedule until it is done or has to wait for a peer.

use super::diverged::{differs, published_less};
use super::posted::{Message, Posted};
use super::scratch::Scratch;
use super::stats::Stats;
use super::stream::Past;
use super::work;
use crate::buffer::Memory;
use crate::error::Result;
use crate::schedule::{KEPT, Operand, Peers, Remote, Schedule, Space, Span, Step};
use crate::transport::{Direct, Tag, Transport};
use crate::watch::Fingerprint;

/// How often to look at messages again at once: each look calls a library.
const MESSAGE_LOOKS: u32 = 4;
/// How often at the only message that a call waits for, as soon as it is posted.
const RECV_LOOKS: u32 = 16;

/// Where a call in flight is.
pub(super) struct State {
    pub send: *const u8,
    pub recv: *mut u8,
    pub scratch: Option<Scratch>,
    pub scratch_at: *mut u8,
    pub fingerprint: Fingerprint,
    /// The number of this call among the collectives of its group.
    pub sequence: u64,
    /// The tag of slot 0; other slots follow it.
    pub tag: u64,
    /// The number of its first published round in the group.
    pub base: u64,
    /// How many of its rounds this rank has finished.
    pub finished: usize,
    /// The next step.
    pub at: usize,
    /// Bytes of the current copy or elements of the current reduction that are done.
    pub part: usize,
    pub posted: Vec<Posted>,
    /// Which of them to look at first.
    pub look: usize,
    /// Messages, and pieces of long ones, that are through.
    pub through: u64,
    pub peers: Vec<PeerAt>,
    /// The scratch of calls that need little; only some have it.
    kept: Option<Memory>,
}

/// What a peer has published for this call.
#[derive(Clone, Copy)]
pub(super) struct PeerAt {
    /// The last round that was seen, plus one.
    pub seen: usize,
    /// What it published in the first round of the current exchange, in place, or in the last round, staged.
    ptr: *const u8,
    bytes: usize,
    staged: bool,
}

/// What stopped a call.
pub(super) enum Outcome {
    Done,
    /// It waits for this rank.
    Blocked(usize),
    /// It worked long enough that calls of higher priority should have a look.
    Yield,
}

/// What a call needs of its engine.
pub(super) struct Env<'a> {
    pub transport: &'a mut dyn Transport,
    pub stats: &'a mut Stats,
    pub pointers: &'a mut Vec<*const u8>,
    /// The most bytes to copy or reduce before looking at other calls.
    pub quantum: usize,
    /// How many of them are done.
    pub worked: usize,
    /// The first round of earlier calls that this rank has not finished.
    pub floor: u64,
    /// How often to look again at once for what a peer publishes.
    pub looks: u32,
    /// Which results go past the caches.
    pub past: Past,
}

impl State {
    /// Lists that need no more memory in a group of `size` for calls that have at most `posted` messages under way.
    pub fn empty(size: usize, posted: usize, kept: Option<Memory>) -> Self {
        State {
            send: std::ptr::null(),
            recv: std::ptr::null_mut(),
            scratch: None,
            scratch_at: std::ptr::null_mut(),
            fingerprint: Fingerprint::from_bits(0),
            sequence: 0,
            tag: 0,
            base: 0,
            finished: 0,
            at: 0,
            part: 0,
            posted: Vec::with_capacity(posted),
            look: 0,
            through: 0,
            peers: Vec::with_capacity(size),
            kept,
        }
    }

    /// Prepares for a new call; keeps its lists' memory.
    pub fn reset(&mut self, size: usize, rounds: usize) {
        self.finished = 0;
        self.scratch_at = std::ptr::null_mut();
        self.at = 0;
        self.part = 0;
        self.posted.clear();
        self.look = 0;
        self.through = 0;
        self.peers.clear();
        if rounds > 0 {
            self.peers.resize(size, PeerAt { seen: 0, ptr: std::ptr::null(), bytes: 0, staged: false });
        }
    }

    /// Changes whenever this call gets any further: by a step, a part of one, a message that it waits for or
    /// a piece of one.
    pub fn progress_mark(&self) -> u64 {
        ((self.at as u64) << 40).wrapping_add(self.part as u64).wrapping_add(self.through)
    }

    /// The number of a collective in its tags.
    pub(super) fn number(&self) -> u64 {
        self.tag >> 16
    }

    /// Whether messages are under way.
    pub(super) fn awaits_messages(&self) -> bool {
        !self.posted.is_empty()
    }

    /// The memory that this place always has, if it is for `bytes` long enough.
    pub fn kept(&mut self, bytes: usize) -> Option<*mut u8> {
        self.kept.as_mut().filter(|kept| kept.bytes() >= bytes).map(Memory::as_mut_ptr)
    }

    pub(super) fn read(&self, space: Space, offset: usize) -> *const u8 {
        let base = match space {
            Space::Send => self.send,
            Space::Recv => self.recv,
            Space::Scratch => self.scratch_at,
        };
        // SAFETY: schedules stay inside the buffers whose lengths the communicator checked and inside the
        // scratch that they asked for.
        unsafe { base.add(offset) }
    }

    pub(super) fn write(&self, span: Span) -> *mut u8 {
        let base = match span.space {
            // Only in place is the input written to, and then both are one buffer.
            Space::Send | Space::Recv => self.recv,
            Space::Scratch => self.scratch_at,
        };
        // SAFETY: as in `read`.
        unsafe { base.add(span.offset) }
    }

    /// Where so many bytes lie that a peer has published, if it has published as much.
    #[inline(always)]
    pub(super) fn remote(&self, remote: Remote, bytes: usize) -> Option<*const u8> {
        let peer = &self.peers[remote.peer as usize];
        let offset = if peer.staged { remote.staged } else { remote.in_place };
        (offset + bytes <= peer.bytes).then(|| peer.ptr.wrapping_add(offset))
    }

    /// Fills `pointers` with where these operands lie, of so many bytes each, from `skip` bytes on; fails with the first of
    /// which its peer has not published as much.
    #[inline(always)]
    pub(super) fn locate(
        &self,
        operands: &[Operand],
        (bytes, skip): (usize, usize),
        pointers: &mut Vec<*const u8>,
    ) -> std::result::Result<(), Remote> {
        pointers.clear();
        for operand in operands {
            let ptr = match *operand {
                Operand::Own(space, offset) => self.read(space, offset),
                Operand::Peer(remote) => self.remote(remote, bytes).ok_or(remote)?,
            };
            pointers.push(ptr.wrapping_add(skip));
        }
        Ok(())
    }
}

pub(super) fn direct(transport: &mut dyn Transport) -> &mut dyn Direct {
    transport.direct().expect("only transports with direct access get schedules that publish")
}

pub(super) fn each(peers: Peers, rank: usize, size: usize) -> impl Iterator<Item = usize> {
    let range = match peers {
        Peers::All => 0..size,
        Peers::One(peer) => peer..peer + 1,
    };
    range.filter(move |&p| p != rank)
}

/// How often to look again at once at each of these peers: one look is at all of them.
#[inline(always)]
fn looks_at(peers: Peers, size: usize, env: &Env<'_>) -> u32 {
    match peers {
        Peers::All if size > 2 => env.looks / (size as u32 - 1),
        _ => env.looks,
    }
}

/// The first of these peers who may still read what was published as `sequence`, after further looks.
#[inline(always)]
fn reading(env: &mut Env<'_>, peers: Peers, (rank, size): (usize, usize), sequence: u64) -> Option<usize> {
    let mut looks = looks_at(peers, size, env);
    let direct = direct(env.transport);
    loop {
        let peer = each(peers, rank, size).find(|&peer| !direct.finished(peer, sequence))?;
        if looks == 0 {
            return Some(peer);
        }
        looks -= 1;
    }
}

/// Runs `state` as far as it goes.
pub(super) fn run(schedule: &Schedule, state: &mut State, env: &mut Env<'_>) -> Result<Outcome> {
    let (rank, size) = (schedule.group.rank, schedule.group.size);
    while let Some(step) = schedule.steps.get(state.at) {
        match *step {
            Step::Frame { at, payload } => {
                let frame = state.write(Span::scratch(at, 8 + payload.bytes));
                let from = state.read(payload.space, payload.offset);
                // SAFETY: the schedule reserved the frame for this; payloads do not overlap it.
                unsafe {
                    frame.cast::<u64>().write_unaligned(state.fingerprint.bits());
                    std::ptr::copy_nonoverlapping(from, frame.add(8), payload.bytes);
                }
            }
            Step::Send { to, slot, group, span } => {
                let (tag, at) =
                    (Tag(state.tag + slot as u64), state.read(span.space, span.offset).cast_mut());
                let message = Message { incoming: false, peer: to, tag, at, bytes: span.bytes };
                state.post(message, group, (None, 0), schedule, env.transport)?;
            }
            Step::Recv { from, slot, group, span } => {
                let (tag, at, fingerprint) =
                    (Tag(state.tag + slot as u64), state.write(span), step.fingerprint_at());
                if fingerprint.is_some() {
                    // If anything of the peer's arrives here, it is told from what was here before.
                    // SAFETY: the schedule reserved the eight bytes of a fingerprint.
                    unsafe { at.cast::<u64>().write_unaligned(0) };
                }
                let awaited = state.posted.is_empty() && is_waited_for(&schedule.steps[state.at + 1..]);
                let looks = if awaited { env.looks.min(RECV_LOOKS) } else { 0 };
                let message = Message { incoming: true, peer: from, tag, at, bytes: span.bytes };
                state.post(message, group, (fingerprint, looks), schedule, env.transport)?;
            }
            Step::Wait { group } => {
                let looks = env.looks.min(MESSAGE_LOOKS);
                if let Some(peer) = state.under_way(group, looks, schedule, env.transport)? {
                    return Ok(Outcome::Blocked(peer));
                }
            }
            Step::Copy { from, to } => {
                let (src, dst) = (state.read(from.space, from.offset), state.write(to));
                while !work::copy(schedule, (src, dst), to, state, env) {
                    if !goes_on(schedule, state, env)? {
                        return Ok(Outcome::Yield);
                    }
                }
            }
            Step::Read { from, to } => {
                let Some(src) = state.remote(from, to.bytes) else {
                    return Err(published_less(schedule, state, env.transport, from, to.bytes));
                };
                let dst = state.write(to);
                if !work::copy(schedule, (src, dst), to, state, env) {
                    return Ok(Outcome::Yield);
                }
            }
            Step::Reduce { first, inputs, out, count } => {
                let operands = &schedule.operands[first..first + inputs];
                let bytes = count * schedule.call.dtype.size();
                while !work::reduce(schedule, operands, (out, count), state, env)
                    .map_err(|remote| published_less(schedule, state, env.transport, remote, bytes))?
                {
                    if !goes_on(schedule, state, env)? {
                        return Ok(Outcome::Yield);
                    }
                }
            }
            Step::Join { stage, first, inputs, out, count } => {
                let operands = &schedule.operands[first..first + inputs];
                if !work::join(schedule, (stage, operands), (out, count), state, env) {
                    return Ok(Outcome::Yield);
                }
            }
            Step::Claim => {
                if let Some(until) = state.scratch.as_ref().and_then(|s| s.busy_until)
                    && let Some(peer) = reading(env, Peers::All, (rank, size), until)
                {
                    return Ok(Outcome::Blocked(peer));
                }
            }
            Step::Publish { round, span, staged } => {
                let src = state.read(span.space, span.offset);
                let flag = if staged { Fingerprint::STAGED } else { 0 };
                let (sequence, bits) = (state.base + round as u64, state.fingerprint.bits() | flag);
                // SAFETY: the span is registered or small, and stays as it is until peers have finished: that
                // is what `Released` and `Claim` wait for.
                if !unsafe { direct(env.transport).publish(sequence, bits, src, span.bytes) }? {
                    // Any call before the one in whose place this is may be the one that somebody has not finished.
                    let direct = direct(env.transport);
                    let last = sequence.saturating_sub(direct.depth());
                    let first = (last + 1).saturating_sub(direct.depth());
                    let peer = each(Peers::All, rank, size)
                        .find(|&p| (first..=last).any(|old| !direct.finished(p, old)));
                    return Ok(Outcome::Blocked(peer.unwrap_or(rank)));
                }
            }
            Step::Await { round, first, peers } => {
                let mut looks = looks_at(peers, size, env);
                while let Some(peer) = missing(schedule, state, env.transport, round, first, peers)? {
                    if looks == 0 {
                        return Ok(Outcome::Blocked(peer));
                    }
                    looks -= 1;
                }
            }
            Step::UnlessInPlace { peers, go } => {
                if each(peers, rank, size).any(|p| state.peers[p].staged) {
                    state.at = go;
                    continue;
                }
            }
            Step::Go { to } => {
                state.at = to;
                continue;
            }
            Step::Finish { first, last } => {
                let direct = direct(env.transport);
                // The place of a round is marked for a later round only once the earlier one is through.
                if state.base + last as u64 >= env.floor.saturating_add(direct.depth()) {
                    return Ok(Outcome::Blocked(rank));
                }
                for round in first..=last {
                    // SAFETY: the schedule's reads of these rounds come before this step.
                    unsafe { direct.finish(state.base + round as u64) };
                }
                state.finished = last + 1;
            }
            Step::Released { round, peers } => {
                if let Some(peer) = reading(env, peers, (rank, size), state.base + round as u64) {
                    return Ok(Outcome::Blocked(peer));
                }
            }
        }
        state.at += 1;
    }
    Ok(Outcome::Done)
}

/// Whether what was posted last is waited for next, or after a short copy, which may as well come later.
#[inline(always)]
fn is_waited_for(rest: &[Step]) -> bool {
    match rest {
        [Step::Wait { .. }, ..] => true,
        [Step::Copy { to, .. }, Step::Wait { .. }, ..] => to.bytes <= KEPT,
        _ => false,
    }
}

/// Between two parts of a copy or a reduction: moves messages on; whether the next part comes at once.
fn goes_on(schedule: &Schedule, state: &mut State, env: &mut Env<'_>) -> Result<bool> {
    if let Some(group) = state.first_under_way() {
        state.under_way(group, 0, schedule, env.transport)?;
    }
    Ok(env.worked < env.quantum)
}

/// Takes note of what peers have published for a round; the first of them that has not.
#[inline(always)]
fn missing(
    schedule: &Schedule,
    state: &mut State,
    transport: &mut dyn Transport,
    round: usize,
    first: bool,
    peers: Peers,
) -> Result<Option<usize>> {
    let sequence = state.base + round as u64;
    let mut missing = None;
    let direct = direct(transport);
    for p in each(peers, schedule.group.rank, schedule.group.size) {
        let seen = state.peers[p];
        if seen.seen > round || !(first || seen.staged) {
            continue;
        }
        match direct.published(p, sequence)? {
            Some((ptr, bytes, bits)) => {
                let theirs = Fingerprint::from_bits(bits);
                if theirs != state.fingerprint {
                    return Err(differs(state, transport, p, theirs));
                }
                let staged = bits & Fingerprint::STAGED != 0;
                state.peers[p] = PeerAt { seen: round + 1, ptr, bytes, staged };
            }
            None => {
                missing.get_or_insert(p);
            }
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_what_a_peer_shows() {
        let shown = [0u8; 64];
        let mut state = State::empty(2, 0, None);
        state.reset(2, 1);
        state.peers[1] = PeerAt { seen: 1, ptr: shown.as_ptr(), bytes: shown.len(), staged: false };
        let remote = Remote { peer: 1, in_place: 32, staged: 0 };
        assert!(state.remote(remote, 32).is_some() && state.remote(remote, 33).is_none());
        let operands = [Operand::Own(Space::Send, 0), Operand::Peer(remote)];
        let mut pointers = Vec::new();
        assert_eq!(state.locate(&operands, (32, 8), &mut pointers), Ok(()));
        assert_eq!(pointers[1], shown.as_ptr().wrapping_add(32 + 8));
        assert_eq!(state.locate(&operands, (33, 0), &mut pointers), Err(remote));
        state.peers[1].staged = true;
        assert!(state.remote(remote, 64).is_some() && state.remote(remote, 65).is_none());
    }
}
