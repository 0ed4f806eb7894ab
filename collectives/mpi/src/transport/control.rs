//! What ranks tell each other beside their messages: that they leave a group, that they give up and why, that they
//! have come to form a group.
//!
//! All groups share one communicator for this, which lives as long as MPI. On a group's own communicators a farewell
//! could reach a rank that is done with the group; Open MPI keeps such a message for the next communicator of the same
//! number, where it takes the place of a message that is then lost.

use super::codes::{OK, test};
use super::session::Session;
use super::{failures, ffi, unreceived};
use crate::words::LARGEST;
pub(super) use crate::words::{Kind, Word};
use collectives::transport::inbox::Inbox;
use collectives::transport::neighbours::SEEN_BY_ALL;
use collectives::transport::waits::{self, Questions, Wait};
use collectives::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::os::raw::c_int;
use std::time::{Duration, Instant};

/// Of words.
pub(super) const TAG: c_int = 1;
/// How long the end waits for words on their way.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long a process that ends without MPI's end waits until its last word has gone.
const LAST_WORD: Duration = Duration::from_millis(300);
/// How long ago another rank ended, when that means that it has not come to the last barrier: who leaves it early may end
/// before those that share its processors have left it.
const LEFT: Duration = Duration::from_secs(3);
/// Between two looks meanwhile.
const LOOK: Duration = Duration::from_micros(20);
/// In place of a group: all groups, and MPI's end.
const JOB: u64 = 0;

/// The channel of one process.
pub(super) struct Control {
    comm: ffi::MPI_Comm,
    space: Box<[u8]>,
    /// The posted receive of the next word from anybody.
    receive: Option<ffi::MPI_Request>,
    inbox: Inbox<Word>,
    /// Groups that this process has left: nobody takes what still comes for them.
    left: HashSet<u64>,
    /// How often each world, or group out of another by both, was formed: no number comes again.
    formed: HashMap<u64, u64>,
    /// What ranks of the job have said as they left MPI without its end, of whom nothing more comes in any group.
    absent: Vec<Word>,
    /// Ranks of the job that have ended without a word, as far as MPI knows.
    ended: Vec<usize>,
    questions: Questions,
    /// Words said so far to each rank of the job, and words that have come.
    said: Vec<c_int>,
    heard: c_int,
    /// Words under way, with their bytes.
    outgoing: Vec<(Box<[u8]>, ffi::MPI_Request)>,
    /// What groups send their messages on, which stays until MPI ends.
    groups: Vec<ffi::MPI_Comm>,
}

// SAFETY: handles of the process; the session lets one thread at a time use them.
unsafe impl Send for Control {}

impl Control {
    /// All ranks of the job, in MPI's order.
    pub(super) fn comm(&self) -> ffi::MPI_Comm {
        self.comm
    }

    /// On `comm`, whose `size` ranks are those of the job.
    pub(super) fn on(comm: ffi::MPI_Comm, size: usize) -> Self {
        Control {
            comm,
            said: vec![0; size],
            heard: 0,
            space: vec![0; LARGEST].into(),
            receive: None,
            inbox: Inbox::empty(),
            left: HashSet::new(),
            formed: HashMap::new(),
            absent: Vec::new(),
            ended: Vec::new(),
            questions: Questions::default(),
            outgoing: Vec::new(),
            groups: Vec::new(),
        }
    }

    /// Takes note of a group's communicator.
    pub(super) fn keep(&mut self, group: ffi::MPI_Comm) {
        self.groups.push(group);
    }

    /// Says `word` to a rank of the job. It is this thread's turn, here and below.
    pub(super) fn say(&mut self, session: &Session, to: c_int, word: &Word) -> Result<()> {
        let bytes = word.to_bytes();
        // SAFETY: the boxed bytes stay where they are until `settle` sees the request done.
        let request = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (from, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
            let code = ffi::MPI_Isend(from, count, ffi::RSMPI_UINT8_T, to, TAG, self.comm, &mut request);
            session.check("MPI_Isend", code)?;
            request
        };
        self.said[to as usize] += 1;
        self.outgoing.push((bytes, request));
        Ok(())
    }

    /// Takes the first word about `group` that `wanted` accepts, of all that have arrived.
    pub(super) fn hear(
        &mut self,
        session: &Session,
        group: u64,
        wanted: impl Fn(&Word) -> bool,
    ) -> Result<Option<Word>> {
        while self.listen(session)? {}
        self.settle();
        Ok(self.inbox.take(|w| w.group == group && wanted(w)))
    }

    /// This process has left a group, or not come to be in it: what has come for it is forgotten, and what still comes is
    /// not kept. No later group has this number.
    pub(super) fn forget(&mut self, group: u64) {
        self.inbox.retain(|word| word.group != group);
        self.left.insert(group);
    }

    /// How many words nobody has taken.
    pub(super) fn untaken(&self) -> usize {
        self.inbox.len()
    }

    /// A rank that has left MPI without its end, with what it said then: the first of the job that `member` knows, by the
    /// rank that it gives.
    pub(super) fn absent(&self, member: impl Fn(usize) -> Option<usize>) -> Option<(usize, String)> {
        self.absent.iter().find_map(|word| Some((member(word.from)?, word.text.clone())))
    }

    /// A rank that has ended without a word, as far as MPI knows: the first of the job that `member` knows, by the rank that
    /// it gives, and how it was lost.
    pub(super) fn ended(&self, member: impl Fn(usize) -> Option<usize>) -> Option<(usize, String)> {
        let how = "ended without leaving the group, as MPI has found";
        self.ended.iter().find_map(|&rank| Some((member(rank)?, how.into())))
    }

    /// What MPI refuses where it may have found that a rank has ended; nothing if it says which one for the first time.
    fn refused(&mut self, session: &Session, call: &'static str, code: c_int) -> Result<()> {
        if code == OK {
            return Ok(());
        }
        let known = self.ended.len();
        let found = failures::acknowledge(self.comm);
        self.ended.extend(found.into_iter().filter(|rank| !self.ended.contains(rank)).collect::<Vec<_>>());
        if self.ended.len() > known { Ok(()) } else { session.check(call, code) }
    }

    /// Says something of this process to a rank of the job. Who cannot be told is ended by the launcher.
    fn say_of_all(&mut self, session: &Session, to: usize, kind: Kind, text: &str) {
        let word = Word { group: JOB, kind, from: session.rank(), text: text.to_owned() };
        let _ = self.say(session, to as c_int, &word);
    }

    /// Answers those who have asked.
    pub(super) fn note_wait(&mut self, session: &Session, wait: Wait) {
        for asker in std::mem::take(&mut self.questions.askers) {
            self.say_of_all(session, asker, Kind::Answer, &waits::told(wait));
        }
    }

    /// Asks a rank of the job for whom it waits; how often it has answered before.
    pub(super) fn ask(&mut self, session: &Session, peer: usize) -> u64 {
        self.say_of_all(session, peer, Kind::Ask, "");
        self.questions.before(peer)
    }

    /// Whom a rank of the job waits for that was asked after it had answered so often.
    pub(super) fn answer(&self, peer: usize, before: u64) -> Option<Wait> {
        self.questions.answer(peer, before)
    }

    /// Takes in the next word that has arrived; whether there was one.
    fn listen(&mut self, session: &Session) -> Result<bool> {
        let receive = match &mut self.receive {
            Some(receive) => receive,
            // SAFETY: `space` lives and is left alone until the receive is complete or cancelled.
            None => unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let (to, any) = (self.space.as_mut_ptr().cast(), ffi::RSMPI_ANY_SOURCE);
                let code = ffi::MPI_Irecv(
                    to,
                    LARGEST as c_int,
                    ffi::RSMPI_UINT8_T,
                    any,
                    TAG,
                    self.comm,
                    &mut request,
                );
                session.check("MPI_Irecv", code)?;
                self.receive.insert(request)
            },
        };
        let (mut flag, mut length) = (0, 0);
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: a request that was posted and not yet reported complete; valid places.
        let code = unsafe { ffi::MPI_Test(receive, &mut flag, status.as_mut_ptr()) };
        if code != OK {
            // SAFETY: a constant of the library.
            if *receive == unsafe { ffi::RSMPI_REQUEST_NULL } {
                self.receive = None;
            }
            return self.refused(session, "MPI_Test", code).map(|()| false);
        }
        if flag == 0 {
            return Ok(false);
        }
        // SAFETY: MPI_Test has filled the status.
        unsafe { ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut length) };
        self.receive = None;
        self.heard += 1;
        if let Some(word) = Word::from_bytes(&self.space[..(length.max(0) as usize).min(LARGEST)]) {
            match (word.group, word.kind) {
                (JOB, Kind::Ask) => self.questions.askers.push(word.from),
                (JOB, Kind::Answer) => self.questions.answered(word.from, &word.text, self.said.len()),
                (JOB, _) => self.absent.push(word),
                (group, _) if self.left.contains(&group) => {}
                _ => self.inbox.put(word),
            }
        }
        Ok(true)
    }

    /// How often this process has come to form `group`, with this time: all that form it have as often.
    pub(super) fn forms(&mut self, group: u64) -> u64 {
        let times = self.formed.entry(group).or_insert(0);
        *times += 1;
        *times
    }

    /// Forgets the words that have gone; whether none is under way.
    pub(super) fn settle(&mut self) -> bool {
        self.outgoing.retain_mut(|(_, request)| {
            // SAFETY: a request that was posted and not yet reported complete.
            unsafe { test(request) == Ok(false) }
        });
        self.outgoing.is_empty()
    }

    /// Before MPI is finalised, by all ranks of the job together: takes in the words that are still on their way, and returns
    /// once nobody sends any more. False once a word has come that a rank has failed, which then never comes here.
    ///
    /// # Errors
    /// The loss of a rank of this host that has ended without a word; MPI's.
    pub(super) fn end(&mut self, session: &Session) -> Result<bool> {
        // What MPI reads and writes until its calls are over, which a failure leaves under way.
        let said: &'static [c_int] = Box::leak(std::mem::take(&mut self.said).into());
        let coming: &'static mut c_int = Box::leak(Box::new(0));
        let comm = self.comm;
        let counted = |request: *mut ffi::MPI_Request| {
            let (from, to) = (said.as_ptr().cast(), (&raw mut *coming).cast());
            // SAFETY: a number for each rank of the communicator, and a place for one, both for ever.
            unsafe {
                let (number, sum) = (ffi::RSMPI_INT32_T, ffi::RSMPI_SUM);
                ffi::MPI_Ireduce_scatter_block(from, to, 1, number, sum, comm, request)
            }
        };
        // Nobody ends in order before all have come to this.
        if !self.together(session, SEEN_BY_ALL, ("MPI_Ireduce_scatter_block", counted))? {
            return Ok(false);
        }
        let until = Instant::now() + LAST_WORDS;
        while (self.heard < *coming || !self.settle()) && Instant::now() < until {
            // A failure leaves the deadline.
            let _ = self.listen(session);
        }
        // SAFETY: a valid communicator and place.
        let barrier = |request: *mut ffi::MPI_Request| unsafe { ffi::MPI_Ibarrier(comm, request) };
        self.together(session, LEFT, ("MPI_Ibarrier", barrier))
    }

    /// After that: takes in the messages that no group has received, of which some libraries complain otherwise, on standard
    /// output. What has come waits for no rank, unless one is lost with half of it under
    /// way.
    pub(super) fn clear(&mut self) {
        self.groups.drain(..).for_each(unreceived::take_all);
        if let Some(mut receive) = self.receive.take() {
            // SAFETY: a request that was posted and not yet reported complete; cancelling an unmatched receive lets the
            // wait return, and a matched one is of a word, which arrives at once.
            unsafe {
                ffi::MPI_Cancel(&mut receive);
                ffi::MPI_Wait(&mut receive, ffi::RSMPI_STATUS_IGNORE);
            }
        }
    }

    /// Returns once all ranks have come to what `post`, by its name, starts, or false when one of them has said that it has failed
    /// instead. One may have much to do before: nobody knows how much. An error once one of this host was seen to have
    /// ended `grace` ago.
    fn together(
        &mut self,
        session: &Session,
        grace: Duration,
        (name, post): (&'static str, impl FnOnce(*mut ffi::MPI_Request) -> c_int),
    ) -> Result<bool> {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let posted = post(&mut request);
        let refused = self.refused(session, name, posted).and_then(|()| session.check(name, posted));
        refused.map_err(|e| self.lost(session).unwrap_or(e))?;
        loop {
            // Before MPI is asked, whose answer counts for more: this process may have been stopped meanwhile.
            let lost = session.lost(grace);
            // SAFETY: a request that was posted and not yet reported complete.
            match unsafe { test(&mut request) } {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(code) => {
                    self.refused(session, "MPI_Test", code).map_err(|e| self.lost(session).unwrap_or(e))?
                }
            }
            let _ = self.listen(session);
            if !self.absent.is_empty() {
                return Ok(false);
            }
            if let Some(lost) = lost.or_else(|| self.lost(session)) {
                return Err(lost);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The loss of a rank that MPI has found.
    fn lost(&self, session: &Session) -> Option<Error> {
        let (peer, how) = self.ended(Some)?;
        Some(Error::PeerLost { rank: session.rank(), peer, how })
    }

    /// Tells all ranks of the job why this one calls MPI no more: they may wait for it in any group, and at MPI's end.
    pub(super) fn stay_away(&mut self, session: &Session, why: &str) {
        for other in (0..self.said.len()).filter(|&other| other != session.rank()) {
            self.say_of_all(session, other, Kind::Failure, why);
        }
        let until = Instant::now() + LAST_WORD;
        while !self.settle() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }

    /// Where MPI is not finalised: the memory of what is under way stays.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.space));
        std::mem::forget(std::mem::take(&mut self.outgoing));
    }
}
