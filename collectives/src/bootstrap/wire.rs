//! Frames and descriptors over a socket of either family: small, and every wait has a deadline and looks at the
//! job board and at the star above.

mod descriptors;

use super::board::Board;
use super::star::Star;
use crate::error::{Error, Result};
use crate::watch::Waited;
pub(super) use descriptors::{Descriptors, recv_fds, send_fds};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use std::cell::Cell;
use std::io::{ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// No frame is longer: blobs are addresses and the like. A stranger's length must not make us allocate.
pub(super) const LONGEST_FRAME: usize = 64 << 20;
/// What is said of a peer whose end has come.
pub(super) const CLOSED: &str = "the connection closed";
/// Bytes before a payload: its kind and its length.
const HEADER: usize = 5;
/// Who knows how a rank ended says so within this time.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Who wants to join.
    Hello = 1,
    /// All have joined.
    Welcome = 2,
    /// It failed; the payload says why.
    Refused = 3,
    /// A blob of an exchange.
    Data = 4,
    /// Who wants to join has another secret. Nothing more, because a job's name may be all of its own.
    Stranger = 5,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        let all = [Kind::Hello, Kind::Welcome, Kind::Refused, Kind::Data, Kind::Stranger];
        all.into_iter().find(|&k| k as u8 == byte)
    }
}

/// A connected socket of either family, non-blocking.
pub(super) enum Stream {
    /// Same host; carries descriptors.
    Unix(UnixStream),
    /// Any host.
    Tcp(TcpStream),
}

impl Stream {
    fn read(&self, into: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Stream::Unix(s) => (&*s).read(into),
            Stream::Tcp(s) => (&*s).read(into),
        }
    }

    /// The kind of the frame that comes next, which stays there.
    pub fn next(&self) -> Option<Kind> {
        let mut first = [0];
        match rustix::net::recv(self.fd(), &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 1)) => Kind::of(first[0]),
            _ => None,
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }
}

/// How long to wait, and what could end the wait earlier. While this process is stopped its peers mostly are, too, so that
/// time does not count.
pub(super) struct Wait<'a> {
    waited: Cell<Waited>,
    timeout: Duration,
    pub rank: usize,
    pub board: Option<&'a Board>,
    /// The star whose members wait for each other in stars of their own, as the world's do while those of a host meet.
    above: Option<&'a Star>,
}

/// Why a frame could not be moved.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The deadline passed.
    Late,
    /// The other end is gone or speaks nonsense.
    Gone(String),
    /// The job is failing for another reason.
    Job(Error),
}

impl<'a> Wait<'a> {
    /// From now on.
    pub fn new(timeout: Duration, rank: usize, board: Option<&'a Board>) -> Self {
        Wait { waited: Cell::new(Waited::begin()), timeout, rank, board, above: None }
    }

    /// One that also ends when that star has lost a member.
    pub fn below(self, above: Option<&'a Star>) -> Self {
        Wait { above, ..self }
    }

    /// From now on, until this passes or what ends `self`.
    pub fn anew(&self, timeout: Duration) -> Self {
        Wait::new(timeout, self.rank, self.board).below(self.above)
    }

    /// What is left of it.
    pub fn left(&self) -> Duration {
        let mut waited = self.waited.get();
        let so_far = waited.so_far();
        self.waited.set(waited);
        self.timeout.saturating_sub(so_far)
    }

    /// A call that may take long and lets nobody look meanwhile.
    pub fn blocked<T>(&self, call: impl FnOnce() -> T) -> T {
        let mut waited = self.waited.get();
        let done = waited.blocked(call);
        self.waited.set(waited);
        done
    }

    /// Sleeps until one of `fds` has an event; an error when the deadline passed or the job failed.
    pub fn poll(&self, fds: &mut [PollFd<'_>]) -> std::result::Result<(), Trouble> {
        loop {
            self.job().map_err(Trouble::Job)?;
            let left = self.left();
            if left.is_zero() {
                return Err(Trouble::Late);
            }
            let slice = left.min(Duration::from_millis(50));
            let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(slice.subsec_nanos()) };
            match poll(fds, Some(&timeout)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(e) => return Err(Trouble::Gone(e.to_string())),
            }
        }
    }

    /// Sleeps so long; an error when the deadline passed or the job failed.
    pub fn pause(&self, time: Duration) -> std::result::Result<(), Trouble> {
        self.job().map_err(Trouble::Job)?;
        std::thread::sleep(time);
        if self.left().is_zero() { Err(Trouble::Late) } else { Ok(()) }
    }

    /// What the end of a peer comes from: its supervisor knows, or the star above, and says so in a moment.
    pub fn explained(&self, trouble: Trouble) -> Trouble {
        if self.board.is_none() && self.above.is_none() || !matches!(trouble, Trouble::Gone(_)) {
            return trouble;
        }
        let soon = self.anew(KNOWN_WITHIN);
        loop {
            match soon.pause(Duration::from_millis(2)) {
                Ok(()) => {}
                Err(Trouble::Job(error)) => return Trouble::Job(error),
                Err(_) => return trouble,
            }
        }
    }

    /// Whether the supervisor's board or the star above reports a failed rank.
    pub fn job(&self) -> Result<()> {
        if let Some(star) = self.above {
            star.whole()?;
        }
        match self.board.and_then(|b| b.first_failure().map(|r| (b, r))) {
            Some((board, peer)) if peer != self.rank => {
                let how = board.how(peer).unwrap_or_else(|| "failed".into());
                Err(Error::PeerLost { rank: self.rank, peer, how })
            }
            _ => Ok(()),
        }
    }
}

/// Writes one frame.
pub(super) fn write(
    stream: &Stream,
    kind: Kind,
    payload: &[u8],
    wait: &Wait<'_>,
) -> std::result::Result<(), Trouble> {
    let mut header = [kind as u8; HEADER];
    header[1..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let mut sent = 0;
    while sent < HEADER + payload.len() {
        // What is left of both, without a copy: the middle of a star sends one payload to thousands.
        let left = [
            IoSlice::new(&header[sent.min(HEADER)..]),
            IoSlice::new(&payload[sent.saturating_sub(HEADER)..]),
        ];
        let none = &mut SendAncillaryBuffer::default();
        match rustix::net::sendmsg(stream.fd(), &left, none, SendFlags::NOSIGNAL) {
            Ok(0) => return Err(Trouble::Gone(CLOSED.into())),
            Ok(n) => sent += n,
            Err(rustix::io::Errno::AGAIN) => {
                wait.poll(&mut [PollFd::from_borrowed_fd(stream.fd(), PollFlags::OUT)])?;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Trouble::Gone(std::io::Error::from(e).to_string())),
        }
    }
    Ok(())
}

/// The cause of `trouble` that writing to `stream` had, at whose other end nothing has been read: who has gone may have said
/// why before, which lies there.
pub(super) fn heard(stream: &Stream, trouble: Trouble, wait: &Wait<'_>) -> Trouble {
    if !matches!(trouble, Trouble::Gone(_)) {
        return trouble;
    }
    // It is there already, or never comes.
    let soon = Wait::new(Duration::from_millis(200), wait.rank, None);
    match read(stream, &soon) {
        Ok((Kind::Refused, payload)) => Trouble::Job(refusal(&payload, wait.rank)),
        _ => trouble,
    }
}

/// Reads one frame.
pub(super) fn read(stream: &Stream, wait: &Wait<'_>) -> std::result::Result<(Kind, Vec<u8>), Trouble> {
    read_on(Partial::default(), stream, wait)
}

/// Reads the rest of one.
fn read_on(
    mut partial: Partial,
    stream: &Stream,
    wait: &Wait<'_>,
) -> std::result::Result<(Kind, Vec<u8>), Trouble> {
    loop {
        match partial.advance(stream, LONGEST_FRAME) {
            Ok(Some(frame)) => return Ok(frame),
            Ok(None) => wait.poll(&mut [PollFd::from_borrowed_fd(stream.fd(), PollFlags::IN)])?,
            Err(why) => return Err(Trouble::Gone(why)),
        }
    }
}

/// In place of a rank: the failure is none's.
const NOBODY: u32 = u32::MAX;

/// Tells others why it failed, as far as they still listen.
pub(super) fn refuse<'a>(links: impl Iterator<Item = &'a Stream>, error: &Error, rank: usize) {
    let (peer, text) = match error {
        Error::PeerLost { peer, how, .. } => (*peer as u32, how.clone()),
        // Of this rank alone, which does not say so.
        Error::System { .. } => (rank as u32, format!("gave up: {error}")),
        Error::Launch(text) => (NOBODY, text.clone()),
        other => (NOBODY, other.to_string()),
    };
    let mut payload = peer.to_le_bytes().to_vec();
    payload.extend_from_slice(text.as_bytes());
    // Whoever does not take it at once is not listening any more.
    let wait = Wait::new(Duration::from_millis(200), rank, None);
    for link in links {
        let _ = write(link, Kind::Refused, &payload, &wait);
    }
}

/// What `rank` has been told so.
pub(super) fn refusal(payload: &[u8], rank: usize) -> Error {
    let (peer, text) = payload.split_first_chunk().unwrap_or((&[0xff; 4], b"the rendezvous failed"));
    let (peer, text) = (u32::from_le_bytes(*peer), String::from_utf8_lossy(text).into_owned());
    match peer {
        NOBODY => Error::Launch(text),
        peer => Error::PeerLost { rank, peer: peer as usize, how: text },
    }
}

/// A frame that is arriving.
#[derive(Default)]
pub(super) struct Partial {
    header: [u8; HEADER],
    /// As long as the header says, once that is there.
    payload: Vec<u8>,
    /// Bytes of both that have come.
    come: usize,
}

impl Partial {
    /// One whose first byte has come.
    fn begun(first: u8) -> Self {
        Partial { header: [first, 0, 0, 0, 0], come: 1, ..Partial::default() }
    }

    /// Reads what is there, never beyond this frame; the frame when it is complete.
    pub fn advance(
        &mut self,
        stream: &Stream,
        longest: usize,
    ) -> std::result::Result<Option<(Kind, Vec<u8>)>, String> {
        loop {
            if self.come >= HEADER {
                let kind = Kind::of(self.header[0]).ok_or("it does not speak the rendezvous protocol")?;
                let len = u32::from_le_bytes(self.header[1..].try_into().expect("four bytes")) as usize;
                if len > longest {
                    return Err(format!("it announced a frame of {len} bytes"));
                }
                if self.come == HEADER {
                    // The system gives pages of it as they are written: a length alone takes none.
                    self.payload = vec![0; len];
                }
                if self.come == HEADER + len {
                    return Ok(Some((kind, std::mem::take(&mut self.payload))));
                }
            }
            let into = match self.come.checked_sub(HEADER) {
                None => &mut self.header[self.come..],
                Some(had) => &mut self.payload[had..],
            };
            match stream.read(into) {
                Ok(0) => return Err(CLOSED.into()),
                Ok(n) => self.come += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
        }
    }
}
