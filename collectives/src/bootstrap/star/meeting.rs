//! How the members of a star find each other: the middle takes in the others, who look for it.

use super::{EXTRA, Member, lost};
use crate::bootstrap::hosts;
use crate::bootstrap::place::{Found, Listener, Place, Search, Why, is_of_another_host, is_of_every_host};
use crate::bootstrap::spawn;
use crate::bootstrap::wire::{self, Kind, Partial, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use crate::watch::Waited;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, getrlimit};
use std::time::Duration;

/// A hello begins so, and with the version of how ranks meet: another one whenever what they send each other, here or once
/// they have met, changes for all programs.
const MAGIC: &[u8; 7] = b"caravan";
const VERSION: u8 = b'2';
/// Who was sent away is remembered up to so many.
const MOST_SENT_AWAY: usize = 3;
const LONGEST_HELLO: usize = 4096;
/// Who connects and then says nothing is sent away after this.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// More strangers than this at once are not let in.
const MOST_PENDING: usize = 1024;
/// Who has listened, was not or no longer the middle, and is gone for so long was the middle.
const GONE_FOR: Duration = Duration::from_secs(5);
/// Between two looks whether somebody listens on this host.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// And on another, to which thousands of ranks may send.
const LONGEST_PAUSE_APART: Duration = Duration::from_secs(1);

/// What helps where one name stands for several jobs, as that of Hydra's in containers without each other's processes does.
const OF_SEVERAL_JOBS: &str =
    "if these are several jobs, set CARAVAN_JOB for all ranks of this one to a name of its own";

/// What helps where ranks do not meet on one host.
const OF_ONE_HOST: &str = "ranks on other hosts need CARAVAN_RENDEZVOUS=host:port of rank 0, and ranks that different processes \
                           start need CARAVAN_JOB, the same for all";

/// What helps where something else listens.
const OF_ANOTHER: &str =
    "if something else has the port, set CARAVAN_RENDEZVOUS=host:port with a free one for all ranks";

/// What is wrong with an address by which each host means itself.
const OF_EVERY_HOST: &str =
    "by that address every host means itself, so that ranks on others need another one";

/// What comes first. Up to the name of the program it stays as it is in all versions, so that they can tell each other apart.
pub(super) struct Hello {
    index: usize,
    world: usize,
    pid: u32,
    token: Vec<u8>,
    program: String,
    host: String,
}

impl Hello {
    pub fn encode(member: &Member<'_>) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &[VERSION]].concat();
        for number in [member.index, member.world, std::process::id() as usize, member.token.len()] {
            bytes.extend_from_slice(&(number as u32).to_le_bytes());
        }
        bytes.extend_from_slice(member.token.as_bytes());
        let program = told(member.program);
        bytes.push(program.len() as u8);
        bytes.extend_from_slice(program.as_bytes());
        bytes.extend_from_slice(hosts::host_name().as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Hello> {
        let (&version, rest) = bytes.strip_prefix(MAGIC)?.split_first()?;
        let number =
            |i: usize| Some(u32::from_le_bytes(rest.get(4 * i..4 * i + 4)?.try_into().ok()?) as usize);
        let (index, world, pid, len) = (number(0)?, number(1)?, number(2)?, number(3)?);
        let token = rest.get(16..16usize.checked_add(len)?)?.to_vec();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let rest = &rest[16 + len..];
        let (program, host) = match version {
            b'1' => ("an older caravan".into(), rest),
            _ => {
                let (&bytes, rest) = rest.split_first()?;
                let (program, host) = rest.split_at_checked(bytes.into())?;
                let other = if version == VERSION { "" } else { ", which meets others in another way" };
                (text(program) + other, host)
            }
        };
        Some(Hello { index, world, pid: pid as u32, token, program, host: text(host) })
    }

    #[cfg(test)]
    pub fn program(&self) -> &str {
        &self.program
    }

    #[cfg(test)]
    pub fn host(&self) -> &str {
        &self.host
    }
}

/// As much of a program's name as a hello has room for.
fn told(program: &str) -> &str {
    let end = (0..=program.len().min(u8::MAX.into())).rfind(|&at| program.is_char_boundary(at));
    &program[..end.unwrap_or(0)]
}

/// Compares without stopping at the first difference, so that time says nothing about how far a guess was right.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y)) == 0
}

/// What the middle says when it can open no connection more.
fn out_of_files(rank: usize, (come, of): (usize, usize), error: &std::io::Error) -> Error {
    let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".into(), |limit| limit.to_string());
    Error::Launch(format!(
        "rank {rank}, to which every rank connects, can open no more connections ({error}): {come} of {of} ranks have come, \
         and its limit of open files (ulimit -n) is {limit}"
    ))
}

/// The middle: takes in the others until all are there. Also gives the names of their hosts.
pub(super) fn gather(
    place: &Place,
    me: &Member<'_>,
    timeout: Duration,
    wait: &Wait<'_>,
) -> Result<(Vec<Stream>, Vec<String>)> {
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
    let mut sent_away: Vec<String> = Vec::new();
    let mut late = false;
    let outcome = loop {
        if joined.iter().all(Option::is_some) {
            break Ok(());
        }
        let mut fds = vec![PollFd::from_borrowed_fd(listener.fd(), PollFlags::IN)];
        fds.extend(pending.iter().map(|(s, ..)| PollFd::from_borrowed_fd(s.fd(), PollFlags::IN)));
        // Who has joined says nothing until it is welcomed: what comes from it is its end.
        fds.extend(joined.iter().flatten().map(|(s, _)| PollFd::from_borrowed_fd(s.fd(), PollFlags::IN)));
        match wait.poll(&mut fds) {
            Ok(()) => {}
            Err(Trouble::Late) => {
                late = true;
                break Err(missing(place, me, &joined, &sent_away, timeout));
            }
            Err(trouble) => break Err(lost(wait.rank, wait.rank, trouble, "rendezvous", timeout)),
        }
        let heard = joined.iter().flatten().zip(&fds[1 + pending.len()..]);
        let mut heard = heard.filter(|(_, fd)| !fd.revents().is_empty());
        if let Some(error) = heard.find_map(|(one, _)| ended(me, one, &joined, wait)) {
            break Err(error);
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
                Ok(Some((Kind::Hello, bytes))) => match admit(me, &joined, &bytes, wait) {
                    Admission::Welcome(hello) => {
                        let slot = hello.index - 1;
                        joined[slot] = Some((stream, hello));
                    }
                    Admission::Foreign(error) => {
                        note(&mut sent_away, "something that is no rank of caravan".into());
                        wire::refuse(std::iter::once(&stream), &error, wait.rank);
                    }
                    Admission::Stranger(hello) => {
                        let Hello { pid, host, index, .. } = &hello;
                        let words = format!(
                            "process {pid} on {host}, which says that it is rank {index}, of another CARAVAN_JOB or \
                             CARAVAN_TOKEN"
                        );
                        note(&mut sent_away, words);
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

/// Remembers who was sent away, once.
fn note(sent_away: &mut Vec<String>, who: String) {
    if sent_away.len() < MOST_SENT_AWAY && !sent_away.contains(&who) {
        sent_away.push(who);
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

fn admit(me: &Member<'_>, joined: &[Option<(Stream, Hello)>], bytes: &[u8], wait: &Wait<'_>) -> Admission {
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
    match joined.get(hello.index.wrapping_sub(1)) {
        Some(None) => Admission::Welcome(hello),
        // One that was started again was not there twice.
        Some(Some(one)) => Admission::Fatal(ended(me, one, joined, wait).unwrap_or_else(|| {
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
fn ended(
    me: &Member<'_>,
    (stream, hello): &(Stream, Hello),
    joined: &[Option<(Stream, Hello)>],
    wait: &Wait<'_>,
) -> Option<Error> {
    let why = match Partial::default().advance(stream, LONGEST_HELLO) {
        Ok(None) => return None,
        Ok(Some((kind, _))) => format!("it sent {kind:?} where it had to wait"),
        Err(why) => why,
    };
    let why = match wait.explained(Trouble::Gone(why)) {
        Trouble::Gone(why) => why,
        known => return Some(lost(wait.rank, me.ranks[hello.index], known, "rendezvous", Duration::ZERO)),
    };
    let (come, of) = (1 + joined.iter().flatten().count(), me.ranks.len());
    let (pid, host) = (hello.pid, &hello.host);
    let how = format!(
        "(process {pid} on {host}) was lost when {come} of {of} ranks had come to the rendezvous: {why}"
    );
    Some(Error::PeerLost { rank: wait.rank, peer: me.ranks[hello.index], how })
}

/// What may be with ranks that have not come to their host's place of meeting: with those of one start only one thing.
fn of_one_host(they: &str) -> String {
    if spawn::supervised() { format!("{they} may hang") } else { OF_ONE_HOST.to_owned() }
}

/// What is wrong with an address at which the middle, this rank, waits in vain, if something is.
fn doubt(address: &str, rank: usize) -> Option<String> {
    if is_of_every_host(address) {
        return Some(OF_EVERY_HOST.to_owned());
    }
    is_of_another_host(address)
        .then(|| format!("rank {rank} runs on {}, which does not have that address", hosts::host_name()))
}

fn missing(
    place: &Place,
    me: &Member<'_>,
    joined: &[Option<(Stream, Hello)>],
    sent_away: &[String],
    timeout: Duration,
) -> Error {
    let gone: Vec<usize> =
        joined.iter().zip(&me.ranks[1..]).filter(|(j, _)| j.is_none()).map(|(_, &r)| r).collect();
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
    let sent_away = match sent_away {
        [] => String::new(),
        some => format!("; who came and was sent away: {}", some.join(", ")),
    };
    Error::Launch(format!(
        "rendezvous of job {}: {} of {of} did not arrive at {place} within {timeout:?}; {hint}{sent_away}",
        me.job,
        hosts::list(&gone)
    ))
}

/// Everyone else: finds the middle, and waits to be welcomed.
pub(super) fn connect(place: &Place, me: &Member<'_>, timeout: Duration, wait: &Wait<'_>) -> Result<Stream> {
    let what = format!("rendezvous of job {} at {place}", me.job);
    let middle = me.ranks[0];
    let mut pause = Duration::from_millis(5);
    let longest = match place {
        Place::Unix(_) => LONGEST_PAUSE,
        Place::Tcp(_) => LONGEST_PAUSE_APART,
    };
    let mut search = Search::new(place);
    // Why who listened last was not the middle, and since when nobody does.
    let mut other: Option<(String, Waited)> = None;
    loop {
        wait.job()?;
        // The middle came before this moment and gives up within its own timeout, then names who is missing.
        let greeted = |stream| match greet(stream, place, me, &wait.anew(timeout + EXTRA)) {
            // Any program may have the port, and close or say what it says to everybody.
            Err(Trouble::Gone(why)) if matches!(place, Place::Tcp(_)) => {
                other = Some((why, Waited::begin()));
                Ok(None)
            }
            Err(Trouble::Late) if matches!(place, Place::Tcp(_)) => {
                let what = format!("{what} (who listens there says nothing; {OF_ANOTHER})");
                Err(lost(wait.rank, middle, wait.explained(Trouble::Late), &what, timeout))
            }
            Err(trouble) => Err(lost(wait.rank, middle, wait.explained(trouble), &what, timeout)),
            Ok(stream) => Ok(Some(stream)),
        };
        let why = match search.look(wait, greeted)? {
            Found::Somebody(stream) => return Ok(stream),
            Found::Nobody(why) => why,
        };
        let late = wait.left().is_zero();
        if let Some((why, _)) = other.take_if(|(_, since)| late || since.so_far() > GONE_FOR) {
            let why = format!("{why}; {OF_ANOTHER}");
            return Err(lost(wait.rank, middle, Trouble::Gone(why), &what, timeout));
        }
        if late {
            let hint = match place {
                Place::Unix(_) => of_one_host(&format!("rank {middle}")),
                Place::Tcp(address) => {
                    let itself =
                        if is_of_every_host(address) { format!("; {OF_EVERY_HOST}") } else { String::new() };
                    format!("CARAVAN_RENDEZVOUS=host:port says where rank {middle} is{itself}")
                }
            };
            let said = match why {
                Why::Unnamed(error) => {
                    return Err(Error::Launch(format!(
                        "{what}: {error}, for {timeout:?}; CARAVAN_RENDEZVOUS=host:port says where rank {middle} is: set it \
                         for all ranks to a name that every host knows, or to an address"
                    )));
                }
                Why::Unanswered(said) => said.map_or(String::new(), |said| format!("{said}; ")),
            };
            return Err(lost(wait.rank, middle, Trouble::Late, &format!("{what} ({said}{hint})"), timeout));
        }
        std::thread::sleep(pause.min(wait.left()));
        // An eighth of the time that has passed, so that nobody waits much longer for having looked too early.
        pause = (pause + pause / 8).min(longest);
    }
}

/// Says hello to who listens there, and waits for the welcome.
fn greet(
    stream: Stream,
    place: &Place,
    me: &Member<'_>,
    wait: &Wait<'_>,
) -> std::result::Result<Stream, Trouble> {
    wire::write(&stream, Kind::Hello, &Hello::encode(me), wait)
        .map_err(|trouble| wire::heard(&stream, trouble, wait))?;
    match wire::read(&stream, wait)? {
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
