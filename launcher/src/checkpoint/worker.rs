//! The thread that waits for the disk, so that no rank waits for it in silence.

use crate::failure::{Failure, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Does what it is given, one thing after the other. Where it is dropped, what it has still to do is left to it.
pub struct Worker {
    work: Sender<Box<dyn FnOnce() + Send>>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// With nothing to do.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start() -> Result<Worker> {
        let (work, given) = channel::<Box<dyn FnOnce() + Send>>();
        let thread =
            Builder::new().name("checkpoint".into()).spawn(move || given.iter().for_each(|work| work()));
        let thread = thread
            .map_err(|e| Failure::run(format!("no thread can be started to write checkpoints: {e}")))?;
        Ok(Worker { work, thread })
    }

    /// Has it do something after all else.
    pub fn give<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Task<R> {
        let (tell, told) = channel();
        // Nobody hears of it where the run has ended, nor where the thread has.
        let _ = self.work.send(Box::new(move || drop(tell.send(work()))));
        Task { told, done: None }
    }

    /// Waits until all is done.
    pub fn rest(self) {
        drop(self.work);
        let _ = self.thread.join();
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
