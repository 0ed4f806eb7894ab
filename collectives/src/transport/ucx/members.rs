//! What a rank knows of the members of one group: who they are, who has left, and the first loss.

use super::session::{State, Word};
use crate::error::{Error, Result};
use crate::transport::neighbours::last_words;
use crate::transport::{admit, blame, farewell::Farewells};
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) struct Members {
    /// This rank in the group.
    pub(super) rank: usize,
    /// The members' ranks in the job.
    pub(super) ranks: Vec<usize>,
    /// By which number each member knows the group.
    pub(super) numbers: Vec<u16>,
    pub(super) farewells: Farewells,
    /// Set by the first loss; nothing new is posted from then on.
    pub(super) lost: Option<Error>,
}

impl Members {
    pub(super) fn new(rank: usize, ranks: Vec<usize>, numbers: Vec<u16>) -> Self {
        Members { rank, farewells: Farewells::none(ranks.len()), ranks, numbers, lost: None }
    }

    /// This rank in the job.
    pub(super) fn job_rank(&self) -> usize {
        self.ranks[self.rank]
    }

    /// By which number this rank knows the group.
    pub(super) fn number(&self) -> u16 {
        self.numbers[self.rank]
    }

    /// Whether `call` can have to do with `peer`.
    pub(super) fn admit(&self, call: &'static str, peer: usize) -> Result<()> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        admit(call, self.job_rank(), peer, self.ranks.len())
    }

    /// The error of a message that cannot be, because of what `peer` has done.
    pub(super) fn error(&self, peer: usize, how: impl Into<String>) -> Error {
        Error::PeerLost { rank: self.job_rank(), peer: self.ranks[peer], how: how.into() }
    }

    /// Whether all members are there or have left in order.
    pub(super) fn check(&mut self, state: &mut State) -> Result<()> {
        // Who waits for something else, as inside a node, asks for no message, and UCX may still have the end of one that
        // is sent as far as its sender knows.
        state.worker.progress();
        if self.lost.is_none() {
            self.take_notices(state)?;
        }
        if self.lost.is_none() {
            self.lost = self.find_loss(state)?;
        }
        match &self.lost {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Takes note of what peers have said about this group.
    fn take_notices(&mut self, state: &mut State) -> Result<()> {
        state.listen()?;
        while let Some(notice) = state.take_notice(self.number()) {
            let Some(peer) = self.ranks.iter().position(|&r| r == notice.from) else { continue };
            match notice.word {
                Word::Failure if self.lost.is_none() => {
                    self.lost = Some(blame::heard(self.job_rank(), notice.from, &notice.text));
                }
                Word::Farewell => self.farewells.note(peer),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes note of who has left. It knows this group no more, and may know another by its number.
    pub(super) fn hear_farewells(&mut self, state: &mut State) {
        state.worker.progress();
        // A failure to receive notices is found by whoever waits for one.
        let _ = state.listen();
        while let Some(notice) = state.take_farewell(self.number()) {
            if let Some(peer) = self.ranks.iter().position(|&r| r == notice.from) {
                self.farewells.note(peer);
            }
        }
    }

    /// Who has not left, by its rank in the job, with its number of the group.
    pub(super) fn present(&mut self, state: &mut State) -> BTreeMap<usize, u16> {
        self.hear_farewells(state);
        let others = (0..self.ranks.len()).filter(|&m| m != self.rank && !self.farewells.has_left(m));
        others.map(|member| (self.ranks[member], self.numbers[member])).collect()
    }

    /// What is known to have gone wrong by now.
    fn find_loss(&mut self, state: &mut State) -> Result<Option<Error>> {
        if !state.misses_any() {
            return Ok(None);
        }
        // Those that end after the first mostly do so because of it.
        let first = state.neighbours.first_ended(Duration::ZERO);
        let first = first.and_then(|first| self.ranks.iter().position(|&rank| rank == first));
        for peer in first.into_iter().chain(0..self.ranks.len()) {
            let world = self.ranks[peer];
            if self.farewells.has_left(peer) || !state.is_gone(world) {
                continue;
            }
            // Its farewell may have been on its way.
            let heard = last_words(|| {
                state.worker.progress();
                self.take_notices(state)?;
                Ok(self.farewells.has_left(peer) || self.lost.is_some())
            })?;
            if !heard {
                return Ok(Some(self.error(peer, state.what_became_of(world))));
            }
            if self.lost.is_some() {
                break;
            }
        }
        Ok(self.lost.clone())
    }
}
