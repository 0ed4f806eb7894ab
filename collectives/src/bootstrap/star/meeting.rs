//! How the members of a star find each other: the middle takes in the others, who look for it.

mod door;

use super::{EXTRA, Member, lost};
use crate::bootstrap::hosts;
use crate::bootstrap::place::{Found, Place, Search, Why, is_of_every_host};
use crate::bootstrap::spawn;
use crate::bootstrap::wire::{self, Kind, Stream, Trouble, Wait};
use crate::error::{Error, Result};
use crate::watch::Waited;
pub(super) use door::gather;
use std::time::Duration;

/// A hello begins so, and with the version of how ranks meet: another one whenever what they send each other, here or once
/// they have met, changes for all programs.
const MAGIC: &[u8; 7] = b"caravan";
const VERSION: u8 = b'2';
const LONGEST_HELLO: usize = 4096;
/// Who has listened, was not or no longer the middle, and is gone for so long was the middle.
const GONE_FOR: Duration = Duration::from_secs(5);
/// Between two looks whether somebody listens on this host.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
/// And on another, to which thousands of ranks may send.
const LONGEST_PAUSE_APART: Duration = Duration::from_secs(1);

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

/// What may be with ranks that have not come to their host's place of meeting: with those of one start only one thing.
fn of_one_host(they: &str) -> String {
    if spawn::supervised() { format!("{they} may hang") } else { OF_ONE_HOST.to_owned() }
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
