//! The thread that waits for the disk, so that no rank waits for it in silence.

use crate::failure::{Failure, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

/// Does what it is given, one thing after the other.
pub struct Worker {
    work: Option<Sender<Box<dyn FnOnce() + Send>>>,
    /// Of which the thread has the other end.
    ended: Receiver<()>,
    /// How long it is waited for where it is dropped: what may be under way then is to come to its end, and a rank that fails is
    /// not to wait for a disk that does not answer.
    patience: Duration,
}

impl Worker {
    /// With nothing to do.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(patience: Duration) -> Result<Worker> {
        let (work, given) = channel::<Box<dyn FnOnce() + Send>>();
        let (running, ended) = channel();
        let all = move || {
            given.iter().for_each(|work| work());
            drop(running);
        };
        match Builder::new().name("checkpoint".into()).spawn(all) {
            Ok(_) => Ok(Worker { work: Some(work), ended, patience }),
            Err(e) => Err(Failure::run(format!("no thread can be started to write checkpoints: {e}"))),
        }
    }

    /// Has it do something after all else.
    pub fn give<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Task<R> {
        let (tell, told) = channel();
        if let Some(to) = &self.work {
            // Nobody hears of it where the run has ended, nor where the thread has.
            let _ = to.send(Box::new(move || drop(tell.send(work()))));
        }
        Task { told, done: None }
    }

    /// Waits until all is done, and takes nothing more.
    pub fn rest(&mut self) {
        self.work = None;
        let _ = self.ended.recv();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.work = None;
        let _ = self.ended.recv_timeout(self.patience);
    }
}

/// Something that it does.
pub struct Task<R> {
    told: Receiver<R>,
    /// What came of it, or nothing, where the thread has ended before.
    done: Option<Option<R>>,
}

impl<R> Task<R> {
    /// Something that is done.
    pub fn done(result: R) -> Self {
        Task { told: channel().1, done: Some(Some(result)) }
    }

    /// What came of it, if it is over by now or within so long: nothing where the thread has ended before it was done.
    pub fn result(&mut self, patience: Duration) -> Option<&Option<R>> {
        if self.done.is_none() {
            self.done = match self.told.recv_timeout(patience) {
                Ok(result) => Some(Some(result)),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(None),
            };
        }
        self.done.as_ref()
    }

    /// The same, of one that is over.
    pub fn take(self) -> Option<R> {
        self.done.flatten()
    }
}
