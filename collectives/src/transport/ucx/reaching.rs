//! Making a connection to a peer, which is the one call of UCX that may not return: over TCP it waits inside connect(2) until
//! the kernel gives up on an address that nobody answers for, after two minutes.
//!
//! Nothing gets out of that but the end of the process, which a thread beside it brings about, as where MPI waits. UCX could
//! connect in the background (`UCX_TCP_CONN_NB`), but then a rank would find only in the middle of a run, at its first long
//! message, that one of two ways does not reach; and it could give up sooner (`UCX_TCP_SYN_CNT`), but 1.13 writes past the end
//! of that setting, over the next.

use super::peers::Chosen;
use super::session::State;
use crate::bootstrap::spawn::unsignalled;
use crate::error::{Error, Result};
use crate::watch::Until;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use ucx_sys::Handle;

/// How often the thread beside a call looks whether it takes too long.
const LOOK: Duration = Duration::from_millis(50);

impl State {
    /// The connection to `peer`, made now if it is the first use.
    pub(super) fn endpoint(&mut self, peer: usize) -> Result<Handle> {
        if !self.endpoints[peer].is_null() {
            return Ok(self.endpoints[peer]);
        }
        if let Some(why) = &self.unreached {
            // The job is lost, and others that cannot be reached would each take as long.
            return Err(why.clone());
        }
        let made = self.reach(peer);
        match &made {
            Ok(endpoint) => self.endpoints[peer] = *endpoint,
            Err(why) => self.unreached = Some(why.clone()),
        }
        made
    }

    fn reach(&mut self, peer: usize) -> Result<Handle> {
        let address = &self.cards[peer].address;
        if self.announcing && self.reports(peer) {
            // What this process is to end with is its failure, and not that a peer cannot be told of it.
            let made = self.worker.connect(address, Some(self.failures.handler(peer)));
            return made.map_err(|error| self.explained(error, peer));
        }
        if !self.reports(peer) {
            return self.worker.connect(address, None).map_err(|error| self.explained(error, peer));
        }
        // Sooner than others who wait for this rank give up, so that what they hear is the cause.
        let limit = self.patience / 4 * 3;
        let silent = self.worker.context.error_text("ucp_ep_create", format!("no answer within {limit:?}"));
        let (silent, rank, tell) = (self.explained(silent, peer), self.rank, self.tell);
        let meeting = self.meeting.clone();
        let late = move || {
            if let Some(meeting) = meeting {
                meeting.tell(&silent);
            }
            tell(rank, &silent);
            // SAFETY: ends the process. What would run at an orderly end is UCX's too, in which a thread is.
            unsafe { libc::_exit(1) };
        };
        let handler = self.failures.handler(peer);
        let made = unless_late(limit, late, || self.worker.connect(address, Some(handler)))?;
        made.map_err(|error| self.explained(error, peer))
    }

    /// With what both ranks have chosen, of which one or the other has to change.
    fn explained(&self, error: Error, peer: usize) -> Error {
        let Error::Library { library, call, rank, text } = error else { return error };
        let (mine, theirs) = (&self.cards[self.rank].chosen, &self.cards[peer].chosen);
        let way = remedy(mine, theirs);
        let text = format!("{text}, connecting to rank {peer} with {mine}, and {theirs} there; {way}");
        Error::Library { library, call, rank, text }
    }
}

/// What helps where UCX finds no way between ranks that have chosen so.
fn remedy(mine: &Chosen, theirs: &Chosen) -> &'static str {
    match mine.tls == theirs.tls {
        true => {
            "set UCX_NET_DEVICES on each host to the devices by which the others can be reached (ucx_info -d lists them)"
        }
        false => "set UCX_TLS alike for all ranks",
    }
}

/// Does something that may not return, and `late` beside it where it takes longer than `limit`.
fn unless_late<T>(limit: Duration, late: impl FnOnce() + Send, call: impl FnOnce() -> T) -> Result<T> {
    let (done, over) = channel::<()>();
    std::thread::scope(|scope| {
        let watch = move || {
            let mut until = Until::after(limit);
            while let Err(RecvTimeoutError::Timeout) = over.recv_timeout(LOOK) {
                if until.is_over() {
                    return late();
                }
            }
        };
        let thread = std::thread::Builder::new().name("ucx-watch".into());
        unsignalled(|| thread.spawn_scoped(scope, watch))
            .map_err(|e| Error::system("starting the thread that watches a connection over UCX", e))?;
        let made = call();
        drop(done);
        Ok(made)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn only_a_call_that_takes_too_long_is_given_up() {
        let given_up = AtomicBool::new(false);
        let give_up = || given_up.store(true, Ordering::SeqCst);
        assert_eq!(unless_late(Duration::from_secs(600), give_up, || 7).unwrap(), 7);
        assert!(!given_up.load(Ordering::SeqCst));
        let until_given_up = || {
            while !given_up.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        unless_late(Duration::from_millis(10), give_up, until_given_up).unwrap();
    }

    #[test]
    fn what_differs_between_ranks_is_what_to_change() {
        let chosen = |tls: &str, devices: &str| Chosen { tls: tls.into(), devices: devices.into() };
        let mine = chosen("tcp,self", "eth0");
        assert!(remedy(&mine, &chosen("tcp,self", "eth1")).contains("UCX_NET_DEVICES"));
        assert!(remedy(&mine, &chosen("rc,self", "eth0")).contains("UCX_TLS alike"));
        assert_eq!(mine.to_string(), "UCX_TLS=tcp,self UCX_NET_DEVICES=eth0");
    }
}
