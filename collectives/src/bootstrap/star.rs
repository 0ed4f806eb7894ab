//! A star of sockets: member 0 in the middle, the others connected to it, and the exchanges that run over it.

mod meeting;

use super::board::Board;
use super::hosts;
use super::place::Place;
use super::wire::{self, CLOSED, Descriptors, Kind, Partial, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A leaf gives the middle this much longer, so that it hears from it who is missing.
const EXTRA: Duration = Duration::from_secs(2);
/// More than anybody waits, and what can be added to a clock.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// A host of which nothing was heard for so long is asked, again after as long each, and is taken for gone in the end.
const ASKED_AFTER: Duration = Duration::from_secs(5);
const GONE_AFTER: Duration = Duration::from_secs(25);

/// One member as it introduces itself.
pub(super) struct Member<'a> {
    /// World ranks of the members; member 0 is the middle.
    pub ranks: &'a [usize],
    pub index: usize,
    pub world: usize,
    pub token: &'a str,
    /// What users call the job, for messages.
    pub job: &'a str,
    /// What runs, which has to be the same for all.
    pub program: &'a str,
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
    /// How long members wait for each other.
    timeout: Duration,
    /// The supervisor's, if there is one.
    pub board: Option<Arc<Board>>,
}

impl Star {
    /// Brings the members together, while those of a star above, if there is one, are all there.
    pub fn meet(
        place: &Place,
        me: &Member<'_>,
        timeout: Duration,
        board: Option<Arc<Board>>,
        above: Option<&Star>,
    ) -> Result<Star> {
        let timeout = timeout.min(LONGEST);
        let wait = Wait::new(timeout, me.ranks[me.index], board.as_deref()).below(above);
        let (links, homes) = match (me.ranks.len(), me.index) {
            (1, _) => Default::default(),
            (_, 0) => meeting::gather(place, me, timeout, &wait)?,
            _ => (vec![meeting::connect(place, me, timeout, &wait)?], Vec::new()),
        };
        Ok(Star { ranks: me.ranks.to_vec(), index: me.index, links, homes, timeout, board })
    }

    /// All members' blobs, by index.
    pub fn exchange(&self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let wait = self.wait();
        if blob.len() > wire::LONGEST_FRAME / self.ranks.len() - 4 {
            let problem = format!("a blob of {} bytes; the rendezvous is for small ones", blob.len());
            return Err(self.tell(Error::Argument { call: "exchange", rank: wait.rank, problem }));
        }
        if self.index > 0 {
            wire::write(&self.links[0], Kind::Data, blob, &wait)
                .map_err(|t| self.gone(wire::heard(&self.links[0], t, &wait), &wait, "exchange"))?;
            let all = match wire::read(&self.links[0], &wait) {
                Ok((Kind::Data, all)) => all,
                Ok((Kind::Refused, why)) => return Err(wire::refusal(&why, wait.rank)),
                Ok((kind, _)) => return Err(self.gone(out_of_turn(kind), &wait, "exchange")),
                Err(trouble) => return Err(self.gone(trouble, &wait, "exchange")),
            };
            return unpack(&all, self.ranks.len())
                .ok_or_else(|| Error::Launch("the rendezvous sent a malformed exchange".into()));
        }
        let mut arriving: Vec<Partial> = self.links.iter().map(|_| Partial::default()).collect();
        let others = self.collect(&wait, "exchange", |i, link| {
            match arriving[i].advance(link, wire::LONGEST_FRAME).map_err(Trouble::Gone)? {
                None => Ok(None),
                Some((Kind::Data, blob)) => Ok(Some(blob)),
                Some((Kind::Refused, why)) => Err(Trouble::Job(wire::refusal(&why, wait.rank))),
                Some((kind, _)) => Err(out_of_turn(kind)),
            }
        })?;
        let (mut all, mut blobs) = (Vec::new(), vec![blob.to_vec()]);
        blobs.extend(others);
        for blob in &blobs {
            all.extend_from_slice(&(blob.len() as u32).to_le_bytes());
            all.extend_from_slice(blob);
        }
        for (i, link) in self.links.iter().enumerate() {
            if let Err(trouble) = wire::write(link, Kind::Data, &all, &wait) {
                return Err(self.tell(self.lost(i + 1, trouble, "exchange")));
            }
        }
        Ok(blobs)
    }

    /// In place of an exchange: all others learn why there is none.
    pub fn decline(&self, why: String) {
        let wait = self.wait();
        if self.index > 0 {
            self.tell(Error::Launch(why));
            // What comes then is what all are told.
            let _ = wire::read(&self.links[0], &wait);
            return;
        }
        // What they send is taken first: a network would take back what they have not read from who closes over that.
        let mut arriving: Vec<Partial> = self.links.iter().map(|_| Partial::default()).collect();
        let _ = self.collect(&wait, "exchange", |i, link| {
            let frame = arriving[i].advance(link, wire::LONGEST_FRAME).map_err(Trouble::Gone)?;
            Ok(frame.map(drop))
        });
        self.tell(Error::Launch(why));
    }

    /// All members' descriptors, by index; every member gives equally many. Only over Unix sockets.
    pub fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let (wait, each, what) = (self.wait(), fds.len(), "exchange of descriptors");
        if self.index > 0 {
            let link = &self.links[0];
            wire::send_fds(link, fds, &wait)
                .map_err(|t| self.gone(wire::heard(link, t, &wait), &wait, what))?;
            // What is wrong here the others hear in place of what this member sends next.
            let all = wire::recv_fds(link, each * self.ranks.len(), &wait)
                .map_err(|t| self.tell(self.gone(t, &wait, what)))?;
            return Ok(by_member(all, each));
        }
        let own = fds.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let mut all = own.map_err(|e| self.tell(Error::system("duplicating a descriptor", e)))?;
        let mut arriving: Vec<Descriptors> = self.links.iter().map(|_| Descriptors::expect(each)).collect();
        let others = self.collect(&wait, what, |i, link| arriving[i].advance(link, &wait))?;
        all.extend(others.into_iter().flatten());
        let borrowed: Vec<BorrowedFd<'_>> = all.iter().map(AsFd::as_fd).collect();
        for (i, link) in self.links.iter().enumerate() {
            if let Err(trouble) = wire::send_fds(link, &borrowed, &wait) {
                let error = self.lost(i + 1, trouble, what);
                // Only those who have got none: the others have all that they wait for.
                wire::refuse(self.links[i + 1..].iter(), &error, wait.rank);
                return Err(error);
            }
        }
        Ok(by_member(all, each))
    }

    /// In the middle: what each of the others sends, in their order, in whatever order it comes; `take` reads what is there.
    fn collect<T>(
        &self,
        wait: &Wait<'_>,
        what: &str,
        mut take: impl FnMut(usize, &Stream) -> std::result::Result<Option<T>, Trouble>,
    ) -> Result<Vec<T>> {
        let mut taken: Vec<Option<T>> = self.links.iter().map(|_| None).collect();
        while taken.iter().any(Option::is_none) {
            // Who has sent its part waits for the answer, and can only end.
            let of = |part: &Option<T>| if part.is_none() { PollFlags::IN } else { PollFlags::RDHUP };
            let sockets = self.links.iter().zip(&taken);
            let mut fds: Vec<PollFd<'_>> =
                sockets.map(|(link, part)| PollFd::from_borrowed_fd(link.fd(), of(part))).collect();
            if let Err(trouble) = wait.poll(&mut fds) {
                return Err(self.tell(match trouble {
                    Trouble::Late => self.late(&taken, what),
                    trouble => self.lost(0, trouble, what),
                }));
            }
            let stirred = fds.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<bool>>();
            for (i, link) in self.links.iter().enumerate().filter(|&(i, _)| stirred[i]) {
                let said = match taken[i] {
                    None => take(i, link),
                    Some(_) => Err(Trouble::Gone(CLOSED.into())),
                };
                taken[i] =
                    said.map_err(|trouble| self.tell(self.lost(i + 1, wait.explained(trouble), what)))?;
            }
        }
        Ok(taken.into_iter().flatten().collect())
    }

    /// Who has not answered in time.
    fn late<T>(&self, taken: &[Option<T>], what: &str) -> Error {
        let late: Vec<usize> = (0..taken.len()).filter(|&i| taken[i].is_none()).collect();
        let ranks: Vec<usize> = late.iter().map(|&i| self.ranks[i + 1]).collect();
        let homes = hosts::places(late.iter().map(|&i| self.homes[i].as_str()));
        Error::Launch(format!(
            "{what}: {} of {}, on {homes}, did not answer within {:?}",
            hosts::list(&ranks),
            self.ranks.len(),
            self.timeout
        ))
    }

    /// While this member waits in another star, and the members of this one wait for each other: an error once one of them
    /// has ended, or has said why it failed.
    pub fn whole(&self) -> Result<()> {
        let asked = PollFlags::IN | PollFlags::RDHUP;
        let mut fds: Vec<PollFd<'_>> =
            self.links.iter().map(|link| PollFd::from_borrowed_fd(link.fd(), asked)).collect();
        if poll(&mut fds, Some(&Timespec::default())).unwrap_or(0) == 0 {
            return Ok(());
        }
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        for (i, (link, fd)) in self.links.iter().zip(&fds).enumerate() {
            // Who sends its part of the next exchange has come further, and is well.
            if fd.revents().intersects(ended) || link.next() == Some(Kind::Refused) {
                let member = if self.index == 0 { i + 1 } else { 0 };
                let wait = Wait::new(Duration::ZERO, self.ranks[self.index], None);
                let why = wire::heard(link, Trouble::Gone(CLOSED.into()), &wait);
                return Err(self.lost(member, why, "rendezvous"));
            }
        }
        Ok(())
    }

    /// From here on, when members have told each other all that they had to, the kernel asks whether the hosts of those are
    /// there to which this one is connected; whether there may be others than this one.
    ///
    /// # Errors
    /// The system's.
    pub fn ask_hosts(&self) -> Result<bool> {
        let ask = |link: &Stream| {
            let Stream::Tcp(link) = link else { return Ok(false) };
            sockopt::set_tcp_keepidle(link, ASKED_AFTER)?;
            sockopt::set_tcp_keepintvl(link, ASKED_AFTER)?;
            // What was sent last may not have come.
            sockopt::set_tcp_user_timeout(link, GONE_AFTER.as_millis() as u32)?;
            sockopt::set_socket_keepalive(link, true).map(|()| true)
        };
        let asked = self.links.iter().try_fold(false, |any, link| Ok(ask(link)? || any));
        asked.map_err(|e: Errno| Error::system("having the kernel ask whether hosts are there", e))
    }

    /// Members, by their world ranks, to which this one's connection has ended because nothing is heard of their host, and what
    /// the system says; each once.
    pub fn unanswered(&self) -> Vec<(usize, String)> {
        let asked = PollFlags::empty();
        let mut fds: Vec<PollFd<'_>> =
            self.links.iter().map(|link| PollFd::from_borrowed_fd(link.fd(), asked)).collect();
        if poll(&mut fds, Some(&Timespec::default())).unwrap_or(0) == 0 {
            return Vec::new();
        }
        let failed = fds.iter().enumerate().filter(|(_, fd)| fd.revents().contains(PollFlags::ERR));
        let silent = failed.filter_map(|(i, fd)| match sockopt::socket_error(fd.as_fd()).ok()?.err()? {
            // Of these the host has answered: the process has ended, which is seen otherwise, and may be in order.
            Errno::CONNRESET | Errno::CONNREFUSED | Errno::PIPE => None,
            // Mostly that the time is up, or what some router has said instead.
            e => {
                let member = if self.index == 0 { i + 1 } else { 0 };
                Some((self.ranks[member], std::io::Error::from(e).to_string()))
            }
        });
        silent.collect()
    }

    fn wait(&self) -> Wait<'_> {
        let extra = if self.index > 0 { EXTRA } else { Duration::ZERO };
        Wait::new(self.timeout + extra, self.ranks[self.index], self.board.as_deref())
    }

    /// The middle is, as far as this member sees; another may know better why.
    fn gone(&self, trouble: Trouble, wait: &Wait<'_>, what: &str) -> Error {
        self.lost(0, wait.explained(trouble), what)
    }

    fn lost(&self, member: usize, trouble: Trouble, what: &str) -> Error {
        lost(self.ranks[self.index], self.ranks[member], trouble, what, self.timeout)
    }

    /// Tells all others why it failed, as far as they still listen.
    pub fn tell(&self, error: Error) -> Error {
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
        Trouble::Late => Error::timeout(what, rank, peer, after),
        Trouble::Gone(why) => {
            Error::PeerLost { rank, peer, how: format!("was lost during the {what}: {why}") }
        }
        Trouble::Job(error) => error,
    }
}

/// What it means that this comes in an exchange.
fn out_of_turn(kind: Kind) -> Trouble {
    Trouble::Gone(format!("it sent {kind:?} where {:?} was due", Kind::Data))
}

#[cfg(test)]
mod tests;
