//! How members form a subgroup: each tells the others by which number it knows the new group.

use super::members::Members;
use super::{UcxTransport, tags};
use crate::error::{Error, Result};
use crate::transport::place_among;
use crate::watch::Waited;
use std::ffi::c_void;
use std::time::Duration;
use ucx_sys::{UCS_INPROGRESS, UCS_OK, ucp_tag_recv_info_t};

/// A member's number on its way to this rank.
struct Awaited {
    member: usize,
    space: Vec<u8>,
    request: *mut c_void,
}

impl UcxTransport {
    /// The group of `members`, which all call this together and wait `within` for each other.
    pub(super) fn form(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Self> {
        let rank = place_among(members, self)?;
        let mut state = self.session.turn()?;
        let (number, most) = (state.take_number(), state.most);
        drop(state);
        let Some(number) = number else {
            let what = format!("rank {}: forming a group over UCX", self.members.job_rank());
            return Err(Error::system(what, format!("it is in {most} already, the most it can be in")));
        };
        match self.exchange(members, context, number, within) {
            Ok(numbers) => {
                let ranks = members.iter().map(|&m| self.members.ranks[m]).collect();
                Ok(Self::over(self.session.clone(), Members::new(rank, ranks, numbers)))
            }
            Err(error) => {
                self.session.any_turn().free_number(number);
                Err(error)
            }
        }
    }

    /// Gives this rank's number to all members, and learns theirs.
    fn exchange(&mut self, members: &[usize], context: u64, mine: u16, within: Duration) -> Result<Vec<u16>> {
        let mut numbers = vec![mine; members.len()];
        let mut awaited = Vec::new();
        let result = self.post(members, context, mine, &mut awaited);
        let result = result.and_then(|()| self.collect(members, &mut awaited, &mut numbers, within));
        if let Ok(state) = self.session.turn() {
            for left in awaited {
                self.requests.orphan(&state.worker, left.request, left.space);
            }
        } else {
            std::mem::forget(awaited);
        }
        result.map(|()| numbers)
    }

    fn post(&mut self, members: &[usize], context: u64, mine: u16, awaited: &mut Vec<Awaited>) -> Result<()> {
        let mut state = self.session.turn()?;
        for (member, &parent) in members.iter().enumerate().filter(|(_, m)| **m != self.members.rank) {
            let (me, peer) = (state.rank, self.members.ranks[parent]);
            // A name that both sides know: the receiver's number of the group that it is formed from, and the context.
            let tag = |source, number: u16| tags::control(tags::EXCHANGE, source, about(number, context));
            state.control(peer, tag(me, self.members.numbers[parent]), mine.to_le_bytes().into())?;
            let mut space = vec![0u8; size_of::<u16>()];
            let tag = tag(peer, self.members.number());
            // SAFETY: `space` is kept in `awaited` until the request is complete.
            let request = unsafe { state.worker.recv(tag, tags::EXACT, space.as_mut_ptr(), space.len())? };
            awaited.push(Awaited { member, space, request });
        }
        Ok(())
    }

    fn collect(
        &mut self,
        members: &[usize],
        awaited: &mut Vec<Awaited>,
        numbers: &mut [u16],
        within: Duration,
    ) -> Result<()> {
        let mut waited = Waited::begin();
        while let Some(Awaited { member, space, request }) = awaited.last() {
            let mut info = ucp_tag_recv_info_t::default();
            let mut state = self.session.turn()?;
            // SAFETY: a receive of this worker that was not yet reported complete.
            let status = unsafe { state.worker.received(*request, &mut info) };
            if status == UCS_INPROGRESS {
                let moved = state.worker.progress();
                self.members.check(&mut state)?;
                drop(state);
                if !moved {
                    std::thread::yield_now();
                }
                if waited.so_far() > within {
                    let what = format!("forming a group of {} ranks", members.len());
                    let (rank, peer) = (self.members.job_rank(), self.members.ranks[members[*member]]);
                    return Err(Error::timeout(what, rank, peer, within));
                }
                continue;
            }
            numbers[*member] = u16::from_le_bytes([space[0], space[1]]);
            awaited.pop();
            if status != UCS_OK {
                return Err(state.worker.context.error("ucp_tag_recv_nbx", status));
            }
        }
        Ok(())
    }
}

/// 40 bits that name the forming of a group.
fn about(parent: u16, context: u64) -> u64 {
    let mixed = (context ^ (parent as u64) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> 24
}
