//! The middle of a star, while the others come.

use super::{Hello, LONGEST_HELLO, OF_EVERY_HOST, of_one_host, told};
use crate::bootstrap::hosts;
use crate::bootstrap::place::{Listener, Place, is_of_another_host, is_of_every_host};
use crate::bootstrap::star::{Member, lost};
use crate::bootstrap::wire::{self, Kind, Partial, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use crate::watch::Waited;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, getrlimit};
use std::iter::once;
use std::time::Duration;

/// Who was sent away is remembered up to so many.
const MOST_SENT_AWAY: usize = 3;
/// Who connects and then says nothing is sent away after this.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// More strangers than this at once are not let in.
const MOST_PENDING: usize = 1024;

/// What helps where one name stands for several jobs, as that of Hydra's in containers without each other's processes does.
const OF_SEVERAL_JOBS: &str =
    "if these are several jobs, set CARAVAN_JOB for all ranks of this one to a name of its own";

/// Takes in the others until all are there. Also gives the names of their hosts.
pub(in crate::bootstrap::star) fn gather(
    place: &Place,
    me: &Member<'_>,
    timeout: Duration,
    wait: &Wait<'_>,
) -> Result<(Vec<Stream>, Vec<String>)> {
    let mut door = Door::open(place, me, timeout, wait)?;
    let outcome = door.until_all_have_joined();
    let Door { listener, joined, late, .. } = door;
    // Closed before anybody is welcomed, so that the next rendezvous of the same job cannot reach this one.
    drop(listener);
    if let Err(error) = outcome {
        wire::refuse(joined.iter().flatten().map(|(s, _)| s), &error, wait.rank);
        // Looked at only now that nobody waits: a name may take long.
        let doubt = match place {
            Place::Tcp(address) if late => doubt(address, me.ranks[0]),
            _ => None,
        };
        return Err(match (error, doubt) {
            (Error::Launch(text), Some(doubt)) => Error::Launch(format!("{text}; {doubt}")),
            (error, _) => error,
        });
    }
    let (links, homes): (Vec<Stream>, Vec<String>) =
        joined.into_iter().flatten().map(|(stream, hello)| (stream, hello.host)).unzip();
    for (i, link) in links.iter().enumerate() {
        if let Err(trouble) = wire::write(link, Kind::Welcome, &[], wait) {
            let error = lost(wait.rank, me.ranks[i + 1], wait.explained(trouble), "rendezvous", timeout);
            wire::refuse(links.iter(), &error, wait.rank);
            return Err(error);
        }
    }
    Ok((links, homes))
}

/// Where the others come in.
struct Door<'a> {
    place: &'a Place,
    me: &'a Member<'a>,
    timeout: Duration,
    wait: &'a Wait<'a>,
    listener: Listener,
    /// Who of the others has come, by index - 1.
    joined: Vec<Option<(Stream, Hello)>>,
    /// Who has connected and not yet said who it is, and how long it has been silent.
    pending: Vec<(Stream, Partial, Waited)>,
    /// Who was sent away, in words.
    sent_away: Vec<String>,
    /// Not all have come in time.
    late: bool,
}

impl<'a> Door<'a> {
    fn open(place: &'a Place, me: &'a Member<'a>, timeout: Duration, wait: &'a Wait<'a>) -> Result<Self> {
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
        let joined = (1..me.ranks.len()).map(|_| None).collect();
        let (pending, sent_away, late) = Default::default();
        Ok(Door { place, me, timeout, wait, listener, joined, pending, sent_away, late })
    }

    fn until_all_have_joined(&mut self) -> Result<()> {
        while self.joined.iter().any(Option::is_none) {
            self.wait()?;
            let full = self.let_in()?;
            let heard = self.hear();
            if let Some(error) = full {
                self.make_room(&error);
            }
            heard?;
        }
        Ok(())
    }

    /// How many have come, of how many.
    fn come(&self) -> (usize, usize) {
        (1 + self.joined.iter().flatten().count(), self.me.ranks.len())
    }

    /// Sleeps until somebody comes or speaks; an error when the time is up, or one that has joined is lost.
    fn wait(&mut self) -> Result<()> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.fd(), PollFlags::IN)];
        fds.extend(self.pending.iter().map(|(s, ..)| PollFd::from_borrowed_fd(s.fd(), PollFlags::IN)));
        // Who has joined says nothing until it is welcomed: what comes from it is its end.
        let joined = || self.joined.iter().flatten();
        fds.extend(joined().map(|(s, _)| PollFd::from_borrowed_fd(s.fd(), PollFlags::IN)));
        match self.wait.poll(&mut fds) {
            Ok(()) => {}
            Err(Trouble::Late) => {
                self.late = true;
                return Err(self.missing());
            }
            Err(trouble) => {
                return Err(lost(self.wait.rank, self.wait.rank, trouble, "rendezvous", self.timeout));
            }
        }
        let heard = joined().zip(&fds[1 + self.pending.len()..]);
        let mut heard = heard.filter(|(_, fd)| !fd.revents().is_empty());
        heard.find_map(|(one, _)| self.ended(one)).map_or(Ok(()), Err)
    }

    /// Lets in who knocks; says when there is room for nobody more.
    ///
    /// # Errors
    /// The same where nobody can make room.
    fn let_in(&mut self) -> Result<Option<Error>> {
        while self.pending.len() < MOST_PENDING {
            match self.listener.accept() {
                Ok(Some(stream)) => self.pending.push((stream, Partial::default(), Waited::begin())),
                Ok(None) => break,
                Err(error) => {
                    let error = out_of_files(self.wait.rank, self.come(), &error);
                    // Strangers may hold what is missing.
                    return if self.pending.is_empty() { Err(error) } else { Ok(Some(error)) };
                }
            }
        }
        Ok(None)
    }

    /// Hears who they are that have come in; an error once one of them keeps the job from starting.
    fn hear(&mut self) -> Result<()> {
        let mut heard = Ok(());
        for (stream, mut partial, mut since) in std::mem::take(&mut self.pending) {
            match partial.advance(&stream, LONGEST_HELLO) {
                Ok(None) if since.so_far() < HELLO_WITHIN => self.pending.push((stream, partial, since)),
                Ok(Some((Kind::Hello, bytes))) => heard = heard.and(self.answer(stream, &bytes)),
                // Silent, foreign or gone: not one of us, and no reason to fail.
                _ => {}
            }
        }
        heard
    }

    /// Lets join, or sends away, who has said this.
    fn answer(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let refuse = |error: &Error| wire::refuse(once(&stream), error, self.wait.rank);
        match self.admit(bytes) {
            Admission::Welcome(hello) => {
                let slot = hello.index - 1;
                self.joined[slot] = Some((stream, hello));
            }
            Admission::Foreign(error) => {
                refuse(&error);
                self.note("something that is no rank of caravan".into());
            }
            Admission::Stranger(Hello { pid, host, index, .. }) => {
                self.note(format!(
                    "process {pid} on {host}, which says that it is rank {index}, of another CARAVAN_JOB or CARAVAN_TOKEN"
                ));
                // Goes at once, or to nobody.
                let _ = wire::write(&stream, Kind::Stranger, &[], self.wait);
            }
            Admission::Fatal(error) => {
                refuse(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Sends away who has been silent for longest.
    fn make_room(&mut self, why: &Error) {
        if !self.pending.is_empty() {
            wire::refuse(once(&self.pending.remove(0).0), why, self.wait.rank);
        }
    }

    /// Remembers who was sent away, once.
    fn note(&mut self, who: String) {
        if self.sent_away.len() < MOST_SENT_AWAY && !self.sent_away.contains(&who) {
            self.sent_away.push(who);
        }
    }

    /// What becomes of who has said this.
    fn admit(&self, bytes: &[u8]) -> Admission {
        let me = self.me;
        let Some(hello) = Hello::decode(bytes) else {
            return Admission::Foreign(Error::Launch(format!(
                "not a hello that {}, which runs here, understands: start the same program everywhere",
                me.program
            )));
        };
        if !same_secret(&hello.token, me.token.as_bytes()) {
            return Admission::Stranger(hello);
        }
        // Indices beyond the group have no rank here; name them as they name themselves.
        let name = me.ranks.get(hello.index).copied().unwrap_or(hello.index);
        if hello.program != told(me.program) {
            return Admission::Fatal(Error::Launch(format!(
                "rank {name} on {} runs {}, rank {} on {} {}: start the same program everywhere",
                hello.host,
                hello.program,
                me.ranks[0],
                hosts::host_name(),
                told(me.program)
            )));
        }
        if hello.world != me.world {
            return Admission::Fatal(Error::Launch(format!(
                "rank {} was started for {} ranks but rank {name} (process {} on {}) for {}; \
                 give all processes of job {} the same number",
                me.ranks[0], me.world, hello.pid, hello.host, hello.world, me.job
            )));
        }
        match self.joined.get(hello.index.wrapping_sub(1)) {
            Some(None) => Admission::Welcome(hello),
            // One that was started again was not there twice.
            Some(Some(one)) => Admission::Fatal(self.ended(one).unwrap_or_else(|| {
                let first = &one.1;
                Error::Launch(format!(
                    "two processes are rank {name} of job {}: process {} on {} and process {} on {}; {OF_SEVERAL_JOBS}, and \
                     CARAVAN_RENDEZVOUS, where it is set, to a port of its own",
                    me.job, first.pid, first.host, hello.pid, hello.host
                ))
            })),
            None => Admission::Fatal(Error::Launch(format!(
                "process {} on {} says it is rank {} of {} in job {}, where rank {} already is this one",
                hello.pid, hello.host, hello.index, hello.world, me.job, me.ranks[0]
            ))),
        }
    }

    /// What the middle says if this one, who has joined, is lost before all have come.
    fn ended(&self, (stream, hello): &(Stream, Hello)) -> Option<Error> {
        let (rank, ranks) = (self.wait.rank, self.me.ranks);
        let why = match Partial::default().advance(stream, LONGEST_HELLO) {
            Ok(None) => return None,
            Ok(Some((kind, _))) => format!("it sent {kind:?} where it had to wait"),
            Err(why) => why,
        };
        let why = match self.wait.explained(Trouble::Gone(why)) {
            Trouble::Gone(why) => why,
            known => return Some(lost(rank, ranks[hello.index], known, "rendezvous", Duration::ZERO)),
        };
        let (come, of) = self.come();
        let (pid, host) = (hello.pid, &hello.host);
        let how = format!(
            "(process {pid} on {host}) was lost when {come} of {of} ranks had come to the rendezvous: {why}"
        );
        Some(Error::PeerLost { rank, peer: ranks[hello.index], how })
    }

    /// Who has not come in time.
    fn missing(&self) -> Error {
        let Door { place, me, timeout, .. } = self;
        let gone: Vec<usize> =
            self.joined.iter().zip(&me.ranks[1..]).filter(|(j, _)| j.is_none()).map(|(_, &r)| r).collect();
        let they = if gone.len() == 1 { "it" } else { "they" };
        let (of, part) = (me.ranks.len(), me.ranks.len() < me.world);
        let of = if part { format!("the {of} that share a host or node") } else { of.to_string() };
        let hint = match place {
            // Who has met all others before is neither on another host nor of another job.
            Place::Unix(_) if part => format!("{they} may hang"),
            Place::Unix(_) => of_one_host(they),
            Place::Tcp(_) => {
                format!(
                    "{they} may have failed before, or cannot reach that address, which CARAVAN_RENDEZVOUS=host:port sets"
                )
            }
        };
        let sent_away = match &self.sent_away[..] {
            [] => String::new(),
            some => format!("; who came and was sent away: {}", some.join(", ")),
        };
        Error::Launch(format!(
            "rendezvous of job {}: {} of {of} did not arrive at {place} within {timeout:?}; {hint}{sent_away}",
            me.job,
            hosts::list(&gone)
        ))
    }
}

enum Admission {
    Welcome(Hello),
    /// Speaks another language; the job goes on waiting.
    Foreign(Error),
    /// Has another secret; the job goes on waiting.
    Stranger(Hello),
    /// One of us, and wrong: the job cannot start.
    Fatal(Error),
}

/// What the middle says when it can open no connection more.
fn out_of_files(rank: usize, (come, of): (usize, usize), error: &std::io::Error) -> Error {
    let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".into(), |limit| limit.to_string());
    Error::Launch(format!(
        "rank {rank}, to which every rank connects, can open no more connections ({error}): {come} of {of} ranks have come, \
         and its limit of open files (ulimit -n) is {limit}"
    ))
}

/// Compares without stopping at the first difference, so that time says nothing about how far a guess was right.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y)) == 0
}

/// What is wrong with an address at which the middle, this rank, waits in vain, if something is.
fn doubt(address: &str, rank: usize) -> Option<String> {
    if is_of_every_host(address) {
        return Some(OF_EVERY_HOST.to_owned());
    }
    is_of_another_host(address)
        .then(|| format!("rank {rank} runs on {}, which does not have that address", hosts::host_name()))
}
