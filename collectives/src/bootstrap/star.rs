//! A star of sockets: member 0 in the middle, the others connected to it. How they find each other, and the
//! exchanges that run over it.

use super::hosts;
use super::place::{self, Found, Listener, Place};
use super::wire::{self, Kind, Partial, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use crate::watch::Waited;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

const MAGIC: &[u8; 8] = b"caravan1";
const LONGEST_HELLO: usize = 4096;
/// Who connects and then says nothing is sent away after this.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// More strangers than this at once are not let in.
const MOST_PENDING: usize = 1024;
/// A leaf gives the middle this much longer, so that it hears from it who is missing.
const EXTRA: Duration = Duration::from_secs(2);
/// More than anybody waits, and what can be added to a clock.
const LONGEST: Duration = Duration::from_secs(1 << 32);
/// Who has listened, was not or no longer the middle, and is gone for so long was the middle.
const GONE_FOR: Duration = Duration::from_secs(5);
/// Between two looks whether somebody listens.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// What helps where one name stands for several jobs, as that of Hydra's in containers without each other's processes does.
const OF_SEVERAL_JOBS: &str =
    "if these are several jobs, set CARAVAN_JOB for all ranks of this one to a name of its own";

/// What helps where ranks do not meet on one host.
const OF_ONE_HOST: &str = "ranks on other hosts need CARAVAN_RENDEZVOUS=host:port of rank 0, and ranks that different processes \
                           start need CARAVAN_JOB, the same for all";

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

struct Hello {
    index: usize,
    world: usize,
    pid: u32,
    token: Vec<u8>,
    host: String,
}

impl Hello {
    fn encode(member: &Member<'_>) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [member.index, member.world, std::process::id() as usize, member.token.len()] {
            bytes.extend_from_slice(&(number as u32).to_le_bytes());
        }
        bytes.extend_from_slice(member.token.as_bytes());
        bytes.extend_from_slice(hosts::host_name().as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let number =
            |i: usize| Some(u32::from_le_bytes(rest.get(4 * i..4 * i + 4)?.try_into().ok()?) as usize);
        let (index, world, pid, len) = (number(0)?, number(1)?, number(2)?, number(3)?);
        let token = rest.get(16..16usize.checked_add(len)?)?.to_vec();
        let host = String::from_utf8_lossy(&rest[16 + len..]).into_owned();
        Some(Hello { index, world, pid: pid as u32, token, host })
    }
}

/// Compares without stopping at the first difference, so that time says nothing about how far a guess was right.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y)) == 0
}

/// The connected star.
pub(super) struct Star {
    /// World ranks of the members.
    pub ranks: Vec<usize>,
    pub index: usize,
    /// In the middle: one per other member, by index - 1. Elsewhere: the one to the middle.
    links: Vec<Stream>,
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
        let links = match (me.ranks.len(), me.index) {
            (1, _) => Vec::new(),
            (_, 0) => gather(place, me, timeout, &wait)?,
            _ => vec![connect(place, me, timeout, &wait)?],
        };
        Ok(Star { ranks: me.ranks.to_vec(), index: me.index, links })
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
            return Err(Error::Argument { call: "exchange", rank: wait.rank, problem });
        }
        if self.index > 0 {
            wire::write(&self.links[0], Kind::Data, blob, &wait)
                .map_err(|t| self.lost(0, t, "exchange", timeout))?;
            let all = self.answer(Kind::Data, &wait, timeout, "exchange")?;
            return unpack(&all, self.ranks.len())
                .ok_or_else(|| Error::Launch("the rendezvous sent a malformed exchange".into()));
        }
        let (mut all, mut blobs) = (Vec::new(), vec![blob.to_vec()]);
        let mut late = Vec::new();
        for (i, link) in self.links.iter().enumerate() {
            match wire::read(link, &wait) {
                Ok((Kind::Data, blob)) => blobs.push(blob),
                Ok((kind, _)) => {
                    return Err(self.tell(Error::Launch(format!(
                        "rank {} sent {kind:?} where an exchange was due",
                        self.ranks[i + 1]
                    ))));
                }
                Err(Trouble::Late) => late.push(self.ranks[i + 1]),
                Err(trouble) => return Err(self.tell(self.lost(i + 1, trouble, "exchange", timeout))),
            }
        }
        if !late.is_empty() {
            return Err(self.tell(Error::Launch(format!(
                "exchange: {} of {} did not answer within {timeout:?}",
                hosts::list(&late),
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
            wire::send_fds(link, fds, &wait).map_err(|t| self.lost(0, t, what, timeout))?;
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

/// What the middle says when it can open no connection more.
fn out_of_files(rank: usize, (come, of): (usize, usize), error: &std::io::Error) -> Error {
    let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".into(), |limit| limit.to_string());
    Error::Launch(format!(
        "rank {rank}, to which every rank connects, can open no more connections ({error}): {come} of {of} ranks have come, \
         and its limit of open files (ulimit -n) is {limit}"
    ))
}

/// The middle: takes in the others until all are there.
fn gather(place: &Place, me: &Member<'_>, timeout: Duration, wait: &Wait<'_>) -> Result<Vec<Stream>> {
    let listener = Listener::bind(place).map_err(|e| {
        let hint = match place {
            Place::Unix(_) => {
                format!(
                    "another process may listen there for this job already, or for another; {OF_SEVERAL_JOBS}"
                )
            }
            Place::Tcp(_) => {
                "if another job uses the port, set CARAVAN_RENDEZVOUS=host:port to a free one".to_owned()
            }
        };
        Error::system(format!("listening for the other ranks at {place} ({hint})"), e)
    })?;
    let mut joined: Vec<Option<(Stream, Hello)>> = (1..me.ranks.len()).map(|_| None).collect();
    let mut pending: Vec<(Stream, Partial, Waited)> = Vec::new();
    let outcome = loop {
        if joined.iter().all(Option::is_some) {
            break Ok(());
        }
        let mut fds = vec![PollFd::from_borrowed_fd(listener.fd(), PollFlags::IN)];
        fds.extend(pending.iter().map(|(s, ..)| PollFd::from_borrowed_fd(s.fd(), PollFlags::IN)));
        match wait.poll(&mut fds) {
            Ok(()) => {}
            Err(Trouble::Late) => break Err(missing(place, me, &joined, timeout)),
            Err(trouble) => break Err(lost(wait.rank, wait.rank, trouble, "rendezvous", timeout)),
        }
        let (mut fatal, mut full) = (None, None);
        while pending.len() < MOST_PENDING {
            match listener.accept() {
                Ok(Some(stream)) => pending.push((stream, Partial::default(), Waited::begin())),
                Ok(None) => break,
                Err(error) => {
                    let come = 1 + joined.iter().flatten().count();
                    let error = out_of_files(wait.rank, (come, me.ranks.len()), &error);
                    // Strangers may hold what is missing.
                    *(if pending.is_empty() { &mut fatal } else { &mut full }) = Some(error);
                    break;
                }
            }
        }
        let mut waiting = Vec::new();
        for (stream, mut partial, mut since) in pending {
            match partial.advance(&stream, LONGEST_HELLO) {
                Ok(None) if since.so_far() < HELLO_WITHIN => waiting.push((stream, partial, since)),
                Ok(Some((Kind::Hello, bytes))) => match admit(me, &joined, &bytes) {
                    Admission::Welcome(hello) => {
                        let slot = hello.index - 1;
                        joined[slot] = Some((stream, hello));
                    }
                    Admission::Foreign(error) => wire::refuse(std::iter::once(&stream), &error, wait.rank),
                    Admission::Stranger => {
                        // Goes at once, or to nobody.
                        let _ = wire::write(&stream, Kind::Stranger, &[], wait);
                    }
                    Admission::Fatal(error) => {
                        wire::refuse(std::iter::once(&stream), &error, wait.rank);
                        fatal = fatal.or(Some(error));
                    }
                },
                // Silent, foreign or gone: not one of us, and no reason to fail.
                _ => {}
            }
        }
        if let (Some(error), false) = (full, waiting.is_empty()) {
            // Who has been silent for longest makes room.
            wire::refuse(std::iter::once(&waiting.remove(0).0), &error, wait.rank);
        }
        pending = waiting;
        if let Some(error) = fatal {
            break Err(error);
        }
    };
    // Closed before anybody is welcomed, so that the next rendezvous of the same job cannot reach this one.
    drop(listener);
    if let Err(error) = outcome {
        wire::refuse(joined.iter().flatten().map(|(s, _)| s), &error, wait.rank);
        return Err(error);
    }
    let links: Vec<Stream> = joined.into_iter().flatten().map(|(stream, _)| stream).collect();
    for (i, link) in links.iter().enumerate() {
        if let Err(trouble) = wire::write(link, Kind::Welcome, &[], wait) {
            let error = lost(wait.rank, me.ranks[i + 1], trouble, "rendezvous", timeout);
            wire::refuse(links.iter(), &error, wait.rank);
            return Err(error);
        }
    }
    Ok(links)
}

enum Admission {
    Welcome(Hello),
    /// Speaks another language; the job goes on waiting.
    Foreign(Error),
    /// Has another secret; the job goes on waiting.
    Stranger,
    /// One of us, and wrong: the job cannot start.
    Fatal(Error),
}

fn admit(me: &Member<'_>, joined: &[Option<(Stream, Hello)>], bytes: &[u8]) -> Admission {
    let Some(hello) = Hello::decode(bytes) else {
        return Admission::Foreign(Error::Launch("not a hello of this version of caravan".into()));
    };
    if !same_secret(&hello.token, me.token.as_bytes()) {
        return Admission::Stranger;
    }
    // Indices beyond the group have no rank here; name them as they name themselves.
    let name = me.ranks.get(hello.index).copied().unwrap_or(hello.index);
    if hello.world != me.world {
        return Admission::Fatal(Error::Launch(format!(
            "rank {} was started for {} ranks but rank {name} (process {} on {}) for {}; \
             give all processes of job {} the same number",
            me.ranks[0], me.world, hello.pid, hello.host, hello.world, me.job
        )));
    }
    match joined.get(hello.index.wrapping_sub(1)) {
        Some(None) => Admission::Welcome(hello),
        Some(Some((_, first))) => Admission::Fatal(Error::Launch(format!(
            "two processes are rank {name} of job {}: process {} on {} and process {} on {}; {OF_SEVERAL_JOBS}",
            me.job, first.pid, first.host, hello.pid, hello.host
        ))),
        None => Admission::Fatal(Error::Launch(format!(
            "process {} on {} says it is rank {} of {} in job {}, where rank {} already is this one",
            hello.pid, hello.host, hello.index, hello.world, me.job, me.ranks[0]
        ))),
    }
}

fn missing(place: &Place, me: &Member<'_>, joined: &[Option<(Stream, Hello)>], timeout: Duration) -> Error {
    let gone: Vec<usize> =
        joined.iter().zip(&me.ranks[1..]).filter(|(j, _)| j.is_none()).map(|(_, &r)| r).collect();
    let they = if gone.len() == 1 { "it" } else { "they" };
    let hint = match place {
        Place::Unix(_) => OF_ONE_HOST.to_owned(),
        Place::Tcp(_) => format!(
            "{they} may have failed before, or cannot reach that address, which CARAVAN_RENDEZVOUS=host:port sets"
        ),
    };
    Error::Launch(format!(
        "rendezvous of job {}: {} of {} did not arrive at {place} within {timeout:?}; {hint}",
        me.job,
        hosts::list(&gone),
        me.ranks.len()
    ))
}

/// Everyone else: finds the middle, and waits to be welcomed.
fn connect(place: &Place, me: &Member<'_>, timeout: Duration, wait: &Wait<'_>) -> Result<Stream> {
    let what = format!("rendezvous of job {} at {place}", me.job);
    let middle = me.ranks[0];
    let mut pause = Duration::from_millis(5);
    // Why who listened last was not the middle, and since when nobody does.
    let mut other: Option<(String, Waited)> = None;
    loop {
        wait.job()?;
        let greeted = |stream| match greet(stream, place, me, timeout, wait.board) {
            // Any program may have the port, and close or say what it says to everybody.
            Err(Trouble::Gone(why)) if matches!(place, Place::Tcp(_)) => {
                other = Some((why, Waited::begin()));
                Ok(None)
            }
            Err(trouble) => Err(lost(wait.rank, middle, trouble, &what, timeout)),
            Ok(stream) => Ok(Some(stream)),
        };
        let why = match place::connect(place, wait, greeted)? {
            Found::Somebody(stream) => return Ok(stream),
            Found::Nobody(why) => why,
        };
        let late = wait.left().is_zero();
        if let Some((why, _)) = other.take_if(|(_, since)| late || since.so_far() > GONE_FOR) {
            return Err(lost(wait.rank, middle, Trouble::Gone(why), &what, timeout));
        }
        if late {
            let hint = match place {
                Place::Unix(_) => OF_ONE_HOST.to_owned(),
                Place::Tcp(_) => format!("CARAVAN_RENDEZVOUS=host:port says where rank {middle} is"),
            };
            let what = format!("{what} ({hint})");
            return Err(why.unwrap_or_else(|| lost(wait.rank, middle, Trouble::Late, &what, timeout)));
        }
        std::thread::sleep(pause);
        // Each look may ask a name server, and thousands of ranks may look.
        pause = (pause + pause / 8).min(LONGEST_PAUSE);
    }
}

/// Says hello to who listens there, and waits for the welcome.
fn greet(
    stream: Stream,
    place: &Place,
    me: &Member<'_>,
    timeout: Duration,
    board: Option<&super::Board>,
) -> std::result::Result<Stream, Trouble> {
    // The middle came before this moment and gives up within its own timeout, then names who is missing.
    let wait = Wait::new(timeout + EXTRA, me.ranks[me.index], board);
    wire::write(&stream, Kind::Hello, &Hello::encode(me), &wait)?;
    match wire::read(&stream, &wait)? {
        (Kind::Welcome, _) => Ok(stream),
        (Kind::Refused, payload) => Err(Trouble::Job(wire::refusal(&payload, wait.rank))),
        (Kind::Stranger, _) => Err(Trouble::Job(Error::Launch(format!(
            "the secret of this process, of job {}, is not that of the job at {place}: give all ranks one CARAVAN_JOB and \
             one CARAVAN_TOKEN, or none; if that is another job, set CARAVAN_RENDEZVOUS=host:port with a free port for all \
             ranks of this one",
            me.job
        )))),
        (kind, _) => Err(Trouble::Gone(format!("it sent {kind:?} where {:?} was due", Kind::Welcome))),
    }
}

#[cfg(test)]
mod tests;
