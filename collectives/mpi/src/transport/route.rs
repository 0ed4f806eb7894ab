//! What a message of a transport is, and over which of MPI's communicators it goes.

use super::ffi;
use collectives::transport::Tag;
use collectives::watch::Coded;
use std::os::raw::c_int;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Recv,
}

/// Communicators for small and large messages (the same where no guard is needed), and for those whose tags say how long
/// they are, if there are such.
#[derive(Clone, Copy)]
pub(super) struct Comms {
    pub(super) small: ffi::MPI_Comm,
    pub(super) large: ffi::MPI_Comm,
    pub(super) exact: Option<ffi::MPI_Comm>,
}

/// Where a message goes. Few words, which stay in registers: reading a larger value back at once would wait for all that
/// the call of MPI before has written.
#[derive(Clone, Copy)]
pub(super) struct Route {
    /// The engine's tag.
    pub(super) of: Tag,
    /// MPI's.
    pub(super) tag: c_int,
    /// MPI's on the communicator where tags say how long messages are, if it goes there; else -1.
    pub(super) exactly: c_int,
    /// Messages up to this many bytes are small.
    pub(super) limit: usize,
    /// A user's message, of which there may be more between these ranks with this tag.
    pub(super) user: bool,
}

impl Route {
    /// Whether messages of different lengths are kept apart.
    pub(super) fn guarded(&self) -> bool {
        self.limit != usize::MAX
    }

    /// What the message is, if it is all of a call between two ranks.
    pub(super) fn coded(&self) -> Option<Coded> {
        Coded::from_slot(self.of.0 as u16).filter(|_| !self.user)
    }

    /// Whether it goes where tags say how long messages are.
    pub(super) fn is_exact(&self) -> bool {
        self.exactly >= 0
    }
}
