//! How a transport ends: in order, with a farewell and a flush; or by giving up, with a notice to the peers. Both are
//! bounded in time whatever the peers do.

use super::context::Worker;
use super::{UcxTransport, tags};
use crate::error::Error;
use crate::transport::Transport;
use std::ptr::null_mut;
use std::time::{Duration, Instant};
use ucx_sys::{Posted, UCS_INPROGRESS, UCS_OK};

/// How long a rank that leaves waits for living peers to take what it sent.
const LINGER: Duration = Duration::from_secs(30);
/// How long a rank that failed does so.
const LINGER_FAILED: Duration = Duration::from_millis(300);

impl UcxTransport {
    /// Tells the peers that this rank gives up, and why.
    pub(super) fn announce_failure(&mut self, why: &Error) {
        let text = why.to_string();
        let mut cut = text.len().min(super::NOTICE_BYTES);
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        let tag = tags::control(tags::NOTICE, self.rank, 0);
        for peer in 0..self.cards.len() {
            if peer != self.rank && !self.farewells.has_left(peer) && self.failures.of(peer) == UCS_OK {
                // A peer that cannot be told finds out by itself.
                let _ = self.control(peer, tag, text.as_bytes()[..cut].into());
            }
        }
        self.lost.get_or_insert_with(|| why.clone());
        self.wait(Instant::now() + LINGER_FAILED, |this| this.settle_outgoing());
    }

    /// Moves things forward until `done` or the deadline; whether it was done.
    fn wait(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            if !self.worker.progress() {
                if Instant::now() > until {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// Says goodbye to those who could otherwise take the end of this process for a loss.
    fn say_goodbye(&mut self) {
        let tag = tags::control(tags::NOTICE, self.rank, 0);
        let me = self.cards[self.rank].pid;
        for peer in 0..self.cards.len() {
            let watches = self.local(peer) && self.cards[peer].pid != me;
            let connected = !self.endpoints[peer].is_null();
            if peer != self.rank && (watches || connected) && !self.farewells.has_left(peer) {
                // Who cannot be told will report a loss if it still waits for this rank, and is right then.
                let _ = self.control(peer, tag, Box::new([]));
            }
        }
    }

    /// Closes every connection, with a flush where the peer can still take it; whether all are closed.
    fn close_all(&mut self, until: Instant) -> bool {
        let mut closing = Vec::new();
        for peer in 0..self.endpoints.len() {
            let endpoint = std::mem::replace(&mut self.endpoints[peer], null_mut());
            if endpoint.is_null() {
                continue;
            }
            // Forcing is allowed only where losses are reported, and needed only where one was.
            let force = self.failures.of(peer) != UCS_OK;
            if let Posted::Pending(request) = self.worker.close(endpoint, force) {
                closing.push(request);
            }
        }
        self.wait(until, |this| {
            let worker: &Worker = &this.worker;
            // SAFETY: requests of this worker that were not yet reported complete.
            closing.retain(|&request| unsafe { worker.finished(request) == UCS_INPROGRESS });
            // A peer that dies now must not be waited for.
            closing.is_empty() || this.lost.is_none() && this.check().is_err()
        });
        closing.is_empty()
    }
}

impl UcxTransport {
    /// Ends the worker, in order where nothing was lost. Afterwards this process touches no memory of a request any more.
    pub(super) fn close(&mut self) {
        let failed = self.lost.is_some() || std::thread::panicking();
        let until = Instant::now() + if failed { LINGER_FAILED } else { LINGER };
        self.requests.cancel_receives(&self.worker);
        let sent = self.wait(until, |this| {
            let (sends, _) = this.requests.settle(&this.worker);
            sends == 0 || !failed && this.check().is_err()
        });
        if sent && self.lost.is_none() && !failed {
            self.say_goodbye();
            self.wait(until, |this| this.settle_outgoing() || this.check().is_err());
        }
        let until = if self.lost.is_some() { Instant::now() + LINGER_FAILED } else { until };
        let mut settled = self.close_all(until);
        if !self.notice_request.is_null() {
            // SAFETY: posted by `await_notice` and not yet reported complete.
            unsafe { self.worker.cancel(self.notice_request) };
            settled &= self.wait(until, |this| {
                // SAFETY: as above; once it is complete the loop ends.
                unsafe { this.worker.finished(this.notice_request) != UCS_INPROGRESS }
            });
            self.notice_request = null_mut();
        }
        settled &=
            self.wait(until, |this| this.requests.settle(&this.worker) == (0, 0) && this.settle_outgoing());
        if settled {
            self.worker.destroy();
        } else {
            // UCX 1.13 ends the process if a worker goes with something under way. Left alone, it does nothing more.
            self.worker.abandon();
            std::mem::forget(std::mem::take(&mut self.notice));
            std::mem::forget(std::mem::take(&mut self.outgoing));
        }
        self.closed = true;
    }
}

impl Drop for UcxTransport {
    fn drop(&mut self) {
        if !self.closed {
            self.close();
        }
    }
}
