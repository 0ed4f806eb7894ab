//! A star of sockets: member 0 in the middle, the others connected to it, and the exchanges that run over it.

mod meeting;

use super::hosts;
use super::place::Place;
use super::wire::{self, Kind, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// A leaf gives the middle this much longer, so that it hears from it who is missing.
const EXTRA: Duration = Duration::from_secs(2);
/// More than anybody waits, and what can be added to a clock.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// One member as it introduces itself.
pub(super) struct Member<'a> {
    /// World ranks of the members; member 0 is the middle.
    pub ranks: &'a [usize],
    pub index: usize,
    pub world: usize,
    pub token: &'a str,
    /// What users call the job, for messages.
    pub job: &'a str,
}

/// The connected star.
pub(super) struct Star {
    /// World ranks of the members.
    pub ranks: Vec<usize>,
    pub index: usize,
    /// In the middle: one per other member, by index - 1. Elsewhere: the one to the middle.
    links: Vec<Stream>,
    /// In the middle: the name of the host of each of them.
    homes: Vec<String>,
}

impl Star {
    /// Brings the members together.
    pub fn meet(
        place: &Place,
        me: &Member<'_>,
        timeout: Duration,
        board: Option<&super::Board>,
    ) -> Result<Star> {
        let timeout = timeout.min(LONGEST);
        let wait = Wait::new(timeout, me.ranks[me.index], board);
        let (links, homes) = match (me.ranks.len(), me.index) {
            (1, _) => Default::default(),
            (_, 0) => meeting::gather(place, me, timeout, &wait)?,
            _ => (vec![meeting::connect(place, me, timeout, &wait)?], Vec::new()),
        };
        Ok(Star { ranks: me.ranks.to_vec(), index: me.index, links, homes })
    }

    /// All members' blobs, by index.
    pub fn exchange(
        &self,
        blob: &[u8],
        timeout: Duration,
        board: Option<&super::Board>,
    ) -> Result<Vec<Vec<u8>>> {
        let wait = self.wait(timeout, board);
        if blob.len() > wire::LONGEST_FRAME / self.ranks.len() - 4 {
            let problem = format!("a blob of {} bytes; the rendezvous is for small ones", blob.len());
            return Err(self.tell(Error::Argument { call: "exchange", rank: wait.rank, problem }));
        }
        if self.index > 0 {
            wire::write(&self.links[0], Kind::Data, blob, &wait)
                .map_err(|t| self.lost(0, wire::heard(&self.links[0], t, &wait), "exchange", timeout))?;
            let all = self.answer(Kind::Data, &wait, timeout, "exchange")?;
            return unpack(&all, self.ranks.len())
                .ok_or_else(|| Error::Launch("the rendezvous sent a malformed exchange".into()));
        }
        let (mut all, mut blobs) = (Vec::new(), vec![blob.to_vec()]);
        let mut late = Vec::new();
        for (i, link) in self.links.iter().enumerate() {
            match wire::read(link, &wait) {
                Ok((Kind::Data, blob)) => blobs.push(blob),
                Ok((Kind::Refused, why)) => return Err(self.tell(wire::refusal(&why, wait.rank))),
                Ok((kind, _)) => {
                    return Err(self.tell(Error::Launch(format!(
                        "rank {} sent {kind:?} where an exchange was due",
                        self.ranks[i + 1]
                    ))));
                }
                Err(Trouble::Late) => late.push(i),
                Err(trouble) => return Err(self.tell(self.lost(i + 1, trouble, "exchange", timeout))),
            }
        }
        if !late.is_empty() {
            let ranks: Vec<usize> = late.iter().map(|&i| self.ranks[i + 1]).collect();
            let homes = hosts::places(late.iter().map(|&i| self.homes[i].as_str()));
            return Err(self.tell(Error::Launch(format!(
                "exchange: {} of {}, on {homes}, did not answer within {timeout:?}",
                hosts::list(&ranks),
                self.ranks.len()
            ))));
        }
        for blob in &blobs {
            all.extend_from_slice(&(blob.len() as u32).to_le_bytes());
            all.extend_from_slice(blob);
        }
        for (i, link) in self.links.iter().enumerate() {
            if let Err(trouble) = wire::write(link, Kind::Data, &all, &wait) {
                return Err(self.tell(self.lost(i + 1, trouble, "exchange", timeout)));
            }
        }
        Ok(blobs)
    }

    /// All members' descriptors, by index; every member gives equally many. Only over Unix sockets.
    pub fn exchange_fds(
        &self,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
        board: Option<&super::Board>,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let (wait, each, what) = (self.wait(timeout, board), fds.len(), "exchange of descriptors");
        if self.index > 0 {
            let link = &self.links[0];
            wire::send_fds(link, fds, &wait)
                .map_err(|t| self.lost(0, wire::heard(link, t, &wait), what, timeout))?;
            let all = wire::recv_fds(link, each * self.ranks.len(), &wait)
                .map_err(|t| self.lost(0, t, what, timeout))?;
            return Ok(by_member(all, each));
        }
        let own = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let mut all = own.map_err(|e| self.tell(Error::system("duplicating a descriptor", e)))?;
        for (i, link) in self.links.iter().enumerate() {
            match wire::recv_fds(link, each, &wait) {
                Ok(fds) => all.extend(fds),
                Err(trouble) => return Err(self.tell(self.lost(i + 1, trouble, what, timeout))),
            }
        }
        let borrowed: Vec<BorrowedFd<'_>> = all.iter().map(AsFd::as_fd).collect();
        for (i, link) in self.links.iter().enumerate() {
            if let Err(trouble) = wire::send_fds(link, &borrowed, &wait) {
                let error = self.lost(i + 1, trouble, what, timeout);
                // Only those who have got none: the others have all that they wait for.
                wire::refuse(self.links[i + 1..].iter(), &error, wait.rank);
                return Err(error);
            }
        }
        Ok(by_member(all, each))
    }

    fn wait<'a>(&self, timeout: Duration, board: Option<&'a super::Board>) -> Wait<'a> {
        let timeout = timeout.min(LONGEST);
        let extra = if self.index > 0 { EXTRA } else { Duration::ZERO };
        Wait::new(timeout + extra, self.ranks[self.index], board)
    }

    /// The frame the middle owes us.
    fn answer(&self, due: Kind, wait: &Wait<'_>, timeout: Duration, what: &str) -> Result<Vec<u8>> {
        answer(wire::read(&self.links[0], wait), due, wait.rank, |t| self.lost(0, t, what, timeout))
    }

    fn lost(&self, member: usize, trouble: Trouble, what: &str, after: Duration) -> Error {
        lost(self.ranks[self.index], self.ranks[member], trouble, what, after)
    }

    /// Tells all others why it failed, as far as they still listen.
    fn tell(&self, error: Error) -> Error {
        wire::refuse(self.links.iter(), &error, self.ranks[self.index]);
        error
    }
}

fn by_member(all: Vec<OwnedFd>, each: usize) -> Vec<Vec<OwnedFd>> {
    let mut all = all.into_iter();
    let mut members = Vec::new();
    loop {
        let fds: Vec<OwnedFd> = all.by_ref().take(each).collect();
        if fds.is_empty() {
            return members;
        }
        members.push(fds);
    }
}

fn unpack(mut all: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let mut blobs = Vec::with_capacity(count);
    for _ in 0..count {
        let (len, rest) = all.split_first_chunk::<4>()?;
        let (blob, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        blobs.push(blob.to_vec());
        all = rest;
    }
    all.is_empty().then_some(blobs)
}

fn lost(rank: usize, peer: usize, trouble: Trouble, what: &str, after: Duration) -> Error {
    match trouble {
        Trouble::Late => Error::Timeout { what: what.into(), rank, peer, after, past: String::new() },
        Trouble::Gone(why) => {
            Error::PeerLost { rank, peer, how: format!("was lost during the {what}: {why}") }
        }
        Trouble::Job(error) => error,
    }
}

fn answer(
    said: std::result::Result<(Kind, Vec<u8>), Trouble>,
    due: Kind,
    rank: usize,
    lost: impl Fn(Trouble) -> Error,
) -> Result<Vec<u8>> {
    match said {
        Ok((kind, payload)) if kind == due => Ok(payload),
        Ok((Kind::Refused, payload)) => Err(wire::refusal(&payload, rank)),
        Ok((kind, _)) => Err(lost(Trouble::Gone(format!("it sent {kind:?} where {due:?} was due")))),
        Err(trouble) => Err(lost(trouble)),
    }
}

#[cfg(test)]
mod tests;
