//! A communicator of MPI that belongs to one group of ours, whose errors come back as codes.
//!
//! Communicators are not freed before MPI ends: a message on one that its receiver has freed would be kept by Open MPI
//! for the next communicator of the same number and take another's place there. A group costs two numbers of 2048 with
//! MPICH, and five of 65536 with Open MPI (4.1).

use super::codes::{OK, text};
use super::session::Session;
use super::{control, ffi};
use crate::tags;
use collectives::Result;
use std::os::raw::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

pub(super) struct Comm {
    session: Arc<Session>,
    pub(super) raw: ffi::MPI_Comm,
}

// SAFETY: a handle of the process, not of a thread; calls with it take turns.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// A communicator of the same ranks as `from`. All of them call this together.
    pub(super) fn duplicate(session: &Arc<Session>, from: ffi::MPI_Comm) -> Result<Self> {
        let _turn = session.turn()?;
        // SAFETY: MPI is initialised; a place for the result, which `owned` takes over.
        unsafe {
            let mut raw = ffi::RSMPI_COMM_NULL;
            made(session, "MPI_Comm_dup", ffi::MPI_Comm_dup(from, &mut raw))?;
            Self::owned(session, raw)
        }
    }

    /// A communicator of these ranks of the job, in the order given; `identity` is the new group's. Those ranks call this
    /// together.
    ///
    /// They meet on the channel for words: Open MPI sends what makes a communicator as messages of that tag on the
    /// communicator of all, where on a group's own they would be taken for a collective's that is under way.
    pub(super) fn of_members(session: &Arc<Session>, ranks: &[c_int], identity: u64) -> Result<Self> {
        let _turn = session.turn()?;
        let parent = session.control().comm();
        let tag = control::TAG + 1 + (identity % u64::from(tags::LEAST_LIMIT as u32 - 2)) as c_int;
        // SAFETY: MPI is initialised; valid places for the results; the groups are freed on every way out.
        unsafe {
            let (mut all, mut some) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
            session.check("MPI_Comm_group", ffi::MPI_Comm_group(parent, &mut all))?;
            let included = ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut some);
            ffi::MPI_Group_free(&mut all);
            session.check("MPI_Group_incl", included)?;
            let mut raw = ffi::RSMPI_COMM_NULL;
            let created = ffi::MPI_Comm_create_group(parent, some, tag, &mut raw);
            ffi::MPI_Group_free(&mut some);
            made(session, "MPI_Comm_create_group", created)?;
            Self::owned(session, raw)
        }
    }

    /// # Safety
    /// `raw` is a valid communicator that nobody else frees; it is this thread's turn.
    unsafe fn owned(session: &Arc<Session>, raw: ffi::MPI_Comm) -> Result<Self> {
        // SAFETY: by the caller; the predefined handler is valid.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        session.check("MPI_Comm_set_errhandler", code)?;
        session.control().keep(raw);
        Ok(Comm { session: session.clone(), raw })
    }

    pub(super) fn rank_and_size(&self) -> Result<(usize, usize)> {
        let _turn = self.session.turn()?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a valid communicator and places.
        unsafe {
            self.session.check("MPI_Comm_rank", ffi::MPI_Comm_rank(self.raw, &mut rank))?;
            self.session.check("MPI_Comm_size", ffi::MPI_Comm_size(self.raw, &mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    /// The largest tag.
    pub(super) fn tag_limit(&self) -> Result<c_int> {
        let _turn = self.session.turn()?;
        let (mut value, mut found): (*mut c_int, c_int) = (null_mut(), 0);
        // SAFETY: a predefined attribute of every communicator, whose value is a pointer to an int of MPI.
        unsafe {
            let key = ffi::MPI_TAG_UB as c_int;
            let place = (&raw mut value).cast::<c_void>();
            self.session
                .check("MPI_Comm_get_attr", ffi::MPI_Comm_get_attr(self.raw, key, place, &mut found))?;
            // The standard's least limit, where a library says nothing.
            Ok(if found != 0 && !value.is_null() { *value } else { 32767 })
        }
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

/// The result of a call that makes a communicator. Each library has words of its own for there being no more.
fn made(session: &Session, call: &'static str, code: c_int) -> Result<()> {
    if code == OK {
        return Ok(());
    }
    let why = format!(
        "{}; of communicators there are only so many, and they stay until MPI ends: keep groups that are used again \
         instead of forming them anew",
        text(code)
    );
    Err(session.error_text(call, why))
}
