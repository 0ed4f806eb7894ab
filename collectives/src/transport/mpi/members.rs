//! Coming together, giving up and leaving: what the ranks of a group tell each other beside their messages.

use super::MpiTransport;
use super::control::{Kind, Word};
use crate::error::{Error, Result};
use crate::transport::Transport;
use crate::transport::neighbours::last_words;
use std::os::raw::c_int;
use std::time::{Duration, Instant};

/// How long a rank that leaves waits for its peers to take what it sent.
const LINGER: Duration = Duration::from_secs(30);
/// How long a rank that failed does so.
const LINGER_FAILED: Duration = Duration::from_millis(300);

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
                None => return Ok(()),
                Some(word) if word.from >= self.members.len() => {}
                Some(Word { kind: Kind::Failure, from, text, .. }) => {
                    session.fail();
                    let how = format!("gave up: {text}");
                    self.lost.get_or_insert(Error::PeerLost { rank: self.rank, peer: from, how });
                }
                Some(word) => self.farewells.note(word.from),
            }
        }
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
                session.fail();
                let how = session.neighbours().how(self.members[peer] as usize);
                self.lost = Some(Error::PeerLost { rank: self.rank, peer, how });
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
        let start = Instant::now();
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
                    if start.elapsed() > within {
                        let (what, peer) =
                            (format!("forming a group of {} ranks", members.len()), members[missing]);
                        return Err(Error::Timeout { what, rank: self.rank, peer, after: within });
                    }
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        }
        Ok(())
    }

    /// Moves messages forward until `done` or the deadline.
    fn wait(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Moves all messages forward; whether none is under way any more.
    fn settle_requests(&mut self) -> bool {
        let session = self.session().clone();
        match session.turn() {
            Ok(_turn) => self.requests.settle(&session).unwrap_or(true),
            Err(_) => true,
        }
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
        let failed = |this: &Self| this.session().has_failed() || std::thread::panicking();
        let linger = |failed: bool| Instant::now() + if failed { LINGER_FAILED } else { LINGER };
        if let Ok(_turn) = self.session().turn() {
            self.requests.cancel_receives();
        }
        self.wait(linger(failed(self)), |this| {
            // A peer that gives up now must not be waited for.
            this.settle_requests() || this.lost.is_none() && this.check().is_err()
        });
        if !failed(self) {
            // Only now, because what was sent before must not come after the farewell.
            self.tell_peers(Kind::Farewell, "");
        }
        let settled = self.wait(linger(failed(self)), |this| this.settle_requests() && this.settle_words());
        if !settled {
            self.session().give_up();
        }
    }
}
