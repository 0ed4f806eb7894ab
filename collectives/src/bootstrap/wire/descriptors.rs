//! Descriptors over a Unix stream, in batches of which each has one byte to carry it.

use super::{CLOSED, Kind, Partial, Stream, Trouble, Wait, read_on, refusal};
use crate::error::Error;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// The kernel takes at most 253 descriptors at once.
const FDS_AT_ONCE: usize = 128;

/// Sends descriptors.
pub(in crate::bootstrap) fn send_fds(
    stream: &Stream,
    fds: &[BorrowedFd<'_>],
    wait: &Wait<'_>,
) -> Result<(), Trouble> {
    for batch in fds.chunks(FDS_AT_ONCE) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
        loop {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(batch)) {
                return Err(Trouble::Gone("no room for descriptors".into()));
            }
            match rustix::net::sendmsg(stream.fd(), &[IoSlice::new(b"F")], &mut control, SendFlags::NOSIGNAL)
            {
                Ok(_) => break,
                Err(rustix::io::Errno::AGAIN) => {
                    wait.poll(&mut [PollFd::from_borrowed_fd(stream.fd(), PollFlags::OUT)])?;
                }
                Err(rustix::io::Errno::INTR) => {}
                // So many are on their way between this user's processes that the kernel takes no more, until they are
                // received.
                Err(rustix::io::Errno::TOOMANYREFS) => wait.pause(Duration::from_millis(1))?,
                Err(e) => return Err(Trouble::Gone(e.to_string())),
            }
        }
    }
    Ok(())
}

/// Receives exactly `count` descriptors.
pub(in crate::bootstrap) fn recv_fds(
    stream: &Stream,
    count: usize,
    wait: &Wait<'_>,
) -> Result<Vec<OwnedFd>, Trouble> {
    let mut arriving = Descriptors::expect(count);
    loop {
        match arriving.advance(stream, wait)? {
            Some(all) => return Ok(all),
            None => wait.poll(&mut [PollFd::from_borrowed_fd(stream.fd(), PollFlags::IN)])?,
        }
    }
}

/// Descriptors that are arriving.
pub(in crate::bootstrap) struct Descriptors {
    come: Vec<OwnedFd>,
    due: usize,
}

impl Descriptors {
    /// So many.
    pub fn expect(due: usize) -> Self {
        Descriptors { come: Vec::with_capacity(due), due }
    }

    /// Receives what is there; all of them once they have come.
    pub fn advance(&mut self, stream: &Stream, wait: &Wait<'_>) -> Result<Option<Vec<OwnedFd>>, Trouble> {
        while self.come.len() < self.due {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_AT_ONCE))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0u8; 1];
            let mut room = [IoSliceMut::new(&mut byte)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let message = match rustix::net::recvmsg(stream.fd(), &mut room, &mut control, flags) {
                Ok(message) if message.bytes == 0 => return Err(Trouble::Gone(CLOSED.into())),
                Ok(message) => message,
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Trouble::Gone(e.to_string())),
            };
            let had = self.come.len();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.come.extend(fds);
                }
            }
            // The kernel passes as many as this process may open, and drops the others.
            if message.flags.contains(ReturnFlags::CTRUNC) {
                return Err(self.too_few(wait));
            }
            if self.come.len() == had {
                // Who has failed says so in a frame.
                return Err(match read_on(Partial::begun(byte[0]), stream, wait)? {
                    (Kind::Refused, payload) => Trouble::Job(refusal(&payload, wait.rank)),
                    (kind, _) => Trouble::Gone(format!("it sent {kind:?} where descriptors were due")),
                });
            }
        }
        match self.come.len() == self.due {
            true => Ok(Some(std::mem::take(&mut self.come))),
            false => {
                let (come, due) = (self.come.len(), self.due);
                Err(Trouble::Gone(format!("{come} descriptors came instead of {due}")))
            }
        }
    }

    fn too_few(&self, wait: &Wait<'_>) -> Trouble {
        let (come, due) = (self.come.len(), self.due);
        let problem =
            format!("only {come} of {due} descriptors came: the limit of open files (ulimit -n) is too low");
        let error = Error::system("opening the memory of peers", problem);
        // Before others notice that it is gone, and take that for the cause.
        if let Some(board) = wait.board {
            board.announce(wait.rank, &error.to_string());
        }
        Trouble::Job(error)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{refuse, write};
    use super::*;
    use crate::bootstrap::alone::alone;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_limit_of_open_files_is_named_at_once() {
        if !alone("bootstrap::wire::descriptors::tests::a_limit_of_open_files_is_named_at_once") {
            return;
        }
        let (here, there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let wait = Wait::new(Duration::from_secs(10), 0, None);
        let fds = [here.as_fd(); 8];
        let sender = Stream::Unix(here.try_clone().unwrap());
        send_fds(&sender, &fds, &wait).unwrap();
        // Room for some of them, not for all.
        let next = there.try_clone().unwrap().as_raw_fd() as u64;
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(next + 3), maximum }).unwrap();
        match recv_fds(&Stream::Unix(there), fds.len(), &wait) {
            Err(Trouble::Job(error)) => {
                let text = error.to_string();
                assert!(text.contains("of 8 descriptors") && text.contains("ulimit -n"), "{text}");
                assert!(!text.contains("only 0"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_refusal_may_come_in_place_of_descriptors() {
        let (here, there) = UnixStream::pair().unwrap();
        let [here, there] = [here, there].map(|end| {
            end.set_nonblocking(true).unwrap();
            Stream::Unix(end)
        });
        let wait = Wait::new(Duration::from_secs(10), 0, None);
        let error = Error::PeerLost { rank: 0, peer: 2, how: "was lost".into() };
        refuse(std::iter::once(&here), &error, 0);
        match recv_fds(&there, 2, &Wait::new(Duration::from_secs(10), 1, None)) {
            Err(Trouble::Job(error)) => assert_eq!(error.to_string(), "rank 2 was lost; rank 1 stops"),
            other => panic!("{other:?}"),
        }
        // Other words are no refusal, and say nothing of a limit.
        write(&here, Kind::Data, b"words", &wait).unwrap();
        match recv_fds(&there, 2, &wait) {
            Err(Trouble::Gone(text)) => assert!(text.contains("Data") && !text.contains("ulimit"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}
