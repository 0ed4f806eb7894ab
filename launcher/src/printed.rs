//! What is printed while ranks wait for each other.

use crate::failure::{Failure, Result};
use crate::out;
use crate::train::stop;
use collectives::Communicator;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Who waits for what rank 0 prints hears of it so often, or oftener where calls may take no longer.
const BEAT: Duration = Duration::from_millis(100);

/// Standard output, whose loss (a full disk) must not stop a rank in the middle of a collective.
pub struct Out {
    /// Whether anybody reads it.
    printed: Result<bool>,
}

impl Out {
    /// Nothing is printed yet.
    pub fn new() -> Self {
        Out { printed: Ok(true) }
    }

    /// Prints, if there still is a use in it.
    pub fn text(&mut self, text: &str) {
        if self.is_heard() {
            self.printed = out::heard(text);
        }
    }

    fn is_heard(&self) -> bool {
        self.printed.as_ref().is_ok_and(|&heard| heard)
    }

    /// The first thing that went wrong.
    pub fn end(self) -> Result<()> {
        self.printed.map(drop)
    }
}

/// The same of rank 0, for which the others wait no longer than a call may take: while its reader pauses (`| less`), it tells
/// them so.
pub struct Printed<'a> {
    comm: &'a Communicator,
    /// None on ranks that print nothing.
    printer: Option<Printer>,
}

impl<'a> Printed<'a> {
    /// Of these ranks, of which rank 0 prints unless it is `quiet`.
    ///
    /// # Errors
    /// There are no threads left.
    pub fn new(comm: &'a Communicator, quiet: bool) -> Result<Self> {
        let printer = (comm.rank() == 0 && !quiet).then(Printer::start).transpose()?;
        Ok(Printed { comm, printer })
    }

    /// A collective: prints rank 0's text, and says on all ranks whether there still is a use in printing, or nothing is to
    /// be printed. A run that is asked to end waits for a reader for [`out::LAST`].
    ///
    /// # Errors
    /// A call's.
    pub fn text(&self, text: &str) -> Result<bool> {
        self.last(text);
        let beat = BEAT.min(self.comm.options().deadline / 4);
        loop {
            let mut state = [self.printer.as_ref().map_or(State::Heard, |printer| printer.state(beat)) as u8];
            self.comm.broadcast(&mut state[..], 0)?;
            if state[0] != State::Waits as u8 {
                return Ok(state[0] == State::Heard as u8);
            }
        }
    }

    /// Prints what comes when nobody waits any more.
    pub fn last(&self, text: &str) {
        if let Some(printer) = &self.printer {
            // A thread that is no more is told of at the end.
            let _ = printer.texts.send(text.to_owned());
        }
    }

    /// The first thing that went wrong, once everything is printed.
    pub fn end(self) -> Result<()> {
        self.printer.map_or(Ok(()), Printer::end)
    }
}

/// What became of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    Heard,
    Lost,
}

/// Prints what no other rank waits for.
///
/// # Errors
/// There are no threads left, or standard output takes nothing, and not because its reader has gone or this process was asked to
/// end.
pub fn alone(text: String) -> Result<()> {
    let printer = Printer::start()?;
    let _ = printer.texts.send(text);
    printer.end()
}

/// Whether no reader is waited for any more, because this process was asked to end.
fn is_late() -> bool {
    stop::asked().is_some() && out::last_wait().is_zero()
}

/// A thread that prints, for nothing but a thread of its own can wait for a reader and do something else.
struct Printer {
    texts: Sender<String>,
    /// Of each text, whether it was heard.
    heard: Receiver<bool>,
    thread: JoinHandle<Result<()>>,
}

impl Printer {
    fn start() -> Result<Self> {
        let ((texts, given), (told, heard)) = (channel::<String>(), channel());
        let print = move || {
            let mut out = Out::new();
            for text in given {
                out.text(&text);
                // A rank that has failed meanwhile waits for none.
                let _ = told.send(out.is_heard());
            }
            out.end()
        };
        let thread = Builder::new()
            .spawn(print)
            .map_err(|e| collectives::Error::start("start a thread to print", e))?;
        Ok(Printer { texts, heard, thread })
    }

    /// Waits for that long.
    fn state(&self, within: Duration) -> State {
        match self.heard.recv_timeout(within) {
            Ok(true) => State::Heard,
            Ok(false) | Err(RecvTimeoutError::Disconnected) => State::Lost,
            Err(RecvTimeoutError::Timeout) if is_late() => State::Lost,
            Err(RecvTimeoutError::Timeout) => State::Waits,
        }
    }

    /// Leaves a text that nobody takes to a thread that ends with the process.
    fn end(self) -> Result<()> {
        drop(self.texts);
        // Until it has told of every text.
        while self.heard.recv_timeout(BEAT) != Err(RecvTimeoutError::Disconnected) {
            if is_late() {
                return Ok(());
            }
        }
        self.thread.join().unwrap_or_else(|_| Err(Failure::run("the thread that prints panicked")))
    }
}
