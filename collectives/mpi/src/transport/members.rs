//! Coming together, giving up and leaving: what the ranks of a group tell each other beside their messages.

use super::MpiTransport;
use super::control::{Kind, Word};
use collectives::transport::farewell::{self, LINGER_FAILED};
use collectives::transport::neighbours::last_words;
use collectives::transport::{Transport, blame};
use collectives::watch::{Until, Waited};
use collectives::{Error, Result};
use std::os::raw::c_int;
use std::time::Duration;

impl MpiTransport {
    /// Says something to every peer that is still there. Who cannot be told is ended by the launcher.
    fn tell(&self, kind: Kind, group: u64, text: &str, to: impl Iterator<Item = c_int>, from: usize) {
        let session = self.session();
        if let Ok(_turn) = session.turn() {
            let word = Word { group, kind, from, text: text.to_owned() };
            let mut control = session.control();
            for peer in to {
                let _ = control.say(session, peer, &word);
            }
        }
    }

    /// The same to the other members of this group.
    pub(super) fn tell_peers(&self, kind: Kind, text: &str) {
        let present = |&peer: &usize| peer != self.rank && !self.farewells.has_left(peer);
        let peers = (0..self.members.len()).filter(present).map(|peer| self.members[peer]);
        self.tell(kind, self.identity, text, peers, self.rank);
    }

    /// Takes note of what peers have said about this group.
    pub(super) fn listen(&mut self) -> Result<()> {
        let session = self.session().clone();
        loop {
            let word = {
                let _turn = session.turn()?;
                session.control().hear(&session, self.identity, |w| w.kind != Kind::Meeting)?
            };
            match word {
                None => break,
                Some(word) if word.from >= self.members.len() => {}
                Some(Word { kind: Kind::Failure, from, text, .. }) => {
                    let lost = blame::heard(self.job_rank(self.rank), self.job_rank(from), &text);
                    self.give_up(lost)
                }
                Some(word) => self.farewells.note(word.from),
            }
        }
        // Who has left this group in order before is not missed here.
        let member = |from: usize| {
            let peer = self.members.iter().position(|&member| member as usize == from);
            peer.filter(|&peer| !self.farewells.has_left(peer))
        };
        let (absent, ended) = {
            let control = session.control();
            (control.absent(member), control.ended(member))
        };
        if let Some((peer, why)) = absent {
            self.lose(peer, format!("gave up: {why}"));
        }
        if let Some((peer, how)) = ended {
            self.lose(peer, how);
        }
        Ok(())
    }

    /// Takes note that `peer` is lost, unless another was before.
    fn lose(&mut self, peer: usize, how: String) {
        let lost = self.loss(peer, how);
        self.give_up(lost);
    }

    /// This rank has failed, and says so.
    pub(super) fn fail_with(&mut self, why: &Error) {
        self.tell_peers(Kind::Failure, &blame::told(why));
        self.session().fail(why);
        self.lost.get_or_insert_with(|| why.clone());
    }

    /// Takes note of a loss, unless another was before.
    fn give_up(&mut self, lost: Error) {
        self.session().fail(&lost);
        self.lost.get_or_insert(lost);
    }

    /// Finds members on this host whose processes have ended without a farewell.
    pub(super) fn look(&mut self) -> Result<()> {
        let session = self.session().clone();
        {
            let mut neighbours = session.neighbours();
            neighbours.look();
            if !neighbours.any() {
                return Ok(());
            }
        }
        for peer in 0..self.members.len() {
            if self.farewells.has_left(peer) || !session.neighbours().ended(self.members[peer] as usize) {
                continue;
            }
            // Its farewell may have been on its way.
            let heard = last_words(|| {
                self.listen()?;
                Ok(self.farewells.has_left(peer) || self.lost.is_some())
            })?;
            if !heard {
                let how = session.neighbours().how(self.members[peer] as usize);
                self.lose(peer, how);
            }
            if self.lost.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Returns once every member has come to form the group `identity`, so that the call of MPI that forms it, which
    /// blocks, returns at once; an error where one does not come `within` that time.
    pub(super) fn meet(&mut self, members: &[usize], identity: u64, within: Duration) -> Result<()> {
        let mine = members.iter().position(|&m| m == self.rank).unwrap_or(0);
        let others = members.iter().filter(|&&m| m != self.rank).map(|&m| self.members[m]);
        self.tell(Kind::Meeting, identity, "", others, mine);
        let session = self.session().clone();
        let mut here = vec![false; members.len()];
        here[mine] = true;
        let mut waited = Waited::begin();
        while let Some(missing) = here.iter().position(|h| !h) {
            let word = {
                let _turn = session.turn()?;
                session.control().hear(&session, identity, |w| w.kind == Kind::Meeting)?
            };
            match word {
                Some(word) if word.from < here.len() => here[word.from] = true,
                Some(_) => {}
                None => {
                    self.check()?;
                    if waited.so_far() > within {
                        let what = format!("forming a group of {} ranks", members.len());
                        let (rank, peer) = (self.job_rank(self.rank), self.job_rank(members[missing]));
                        return Err(Error::timeout(what, rank, peer, within));
                    }
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        }
        // Who has come may have failed since, and would be waited for in a call that does not return. One that fails only now
        // is, by all who have not heard; see `Place::Group`.
        self.check()
    }

    /// Moves messages forward until `done`, for so long at most.
    fn wait(&mut self, within: Duration, done: impl FnMut(&mut Self) -> bool) -> bool {
        farewell::wait(self, &mut Until::after(within), |_| false, done)
    }

    /// Moves all messages forward; whether none is under way any more. What cannot be looked at may still be.
    fn settle_requests(&mut self) -> bool {
        let session = self.session().clone();
        match session.turn() {
            Ok(_turn) => self.requests.settle(&session).unwrap_or(false),
            Err(_) => self.requests.none() || session.is_given_up(),
        }
    }

    /// Whether every rank that a message under way is for has left the group: nobody takes it any more.
    fn is_done_with_all(&self) -> bool {
        self.requests.peers().all(|peer| self.farewells.is_done_with(peer))
    }

    /// Whether everything that this process has said has gone.
    fn settle_words(&mut self) -> bool {
        let session = self.session();
        match session.turn() {
            Ok(_turn) => session.control().settle(),
            Err(_) => true,
        }
    }

    /// Ends every message, in order where nothing was lost. Afterwards no memory of a request is touched any more: what
    /// cannot be ended in time ends with all use of MPI by this process.
    pub(super) fn close(&mut self) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        if let Some(why) = self.session().cause().filter(|_| self.lost.is_none()) {
            // Who has failed in one group and leaves another does not leave in order: peers who wait there hear why.
            let why = why.in_another_group();
            self.tell_peers(Kind::Failure, &blame::told(&why));
            self.lost = Some(why);
        }
        if std::thread::panicking() && self.lost.is_none() {
            // The process may live on, and would be waited for.
            self.fail_with(&Error::GivenUp("panicked".into()));
        }
        let failed = |this: &Self| this.session().has_failed() || std::thread::panicking();
        // Where another thread has to call MPI, to wait here moves nothing.
        let refused = self.session().turn().is_err();
        let call_timeout = self.session().call_timeout();
        let linger = |failed: bool| match (refused, failed) {
            (true, _) => Duration::ZERO,
            (_, true) => LINGER_FAILED,
            (_, false) => call_timeout,
        };
        if let Ok(_turn) = self.session().turn() {
            self.requests.cancel_receives();
        }
        self.wait(linger(failed(self)), |this| {
            // A peer that gives up now must not be waited for, nor those that have left without taking anything more.
            this.settle_requests()
                || this.lost.is_none() && (this.check().is_err() || this.is_done_with_all())
        });
        if !refused && !failed(self) && !self.settle_requests() {
            // Not in order: the end of this process would be taken for the cause.
            let (peers, job_rank) = (self.requests.peers(), |member| self.job_rank(member));
            if let Some(why) = self.farewells.untaken(peers, self.rank, job_rank, call_timeout) {
                self.fail_with(&why);
            }
        }
        let settled = if failed(self) {
            self.wait(linger(true), |this| this.settle_requests() && this.settle_words())
        } else {
            // Only now, because what was sent before must not come after the farewell. A peer may compute for long before
            // it takes that, whose memory is not this group's.
            self.tell_peers(Kind::Farewell, "");
            self.settle_requests()
        };
        if !settled {
            self.session().give_up();
        }
        self.session().control().forget(self.identity);
    }
}
