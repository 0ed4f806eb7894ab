//! Standard output, where what nobody reads any more (`caravan doctor | head -1`) is no failure and what cannot be
//! written is one; and standard error, whose loss is none: there is nobody left to tell.

use crate::failure::{Failure, Result};
use console::Term;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Standard output that is closed (`>&-`) would be opened anew before `main`, by Rust's library, as what takes everything, and
/// what is printed would be lost without a word. This runs before that, and opens what can only be read: so no file that is
/// opened later takes its place, nothing can be printed on it, and ranks that are started have the same.
#[used]
// SAFETY: the loader calls what this section points to, with the C convention, in a process that has one thread; what is called
// there is two system calls, and does not panic.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn keep_closed() {
        // The lowest number that is free: whatever of 0 and 1 is closed, in turn.
        while let Ok(file) = rustix::fs::open("/dev/null", OFlags::RDONLY, Mode::empty()) {
            if file.as_raw_fd() > 1 {
                break;
            }
            let _ = file.into_raw_fd();
        }
    }
    keep_closed
};

/// Whether something can be written to standard output, of which its own library says nothing.
fn is_open() -> bool {
    let mode = rustix::fs::fcntl_getfl(std::io::stdout()).map(|flags| flags & OFlags::RWMODE);
    mode.is_ok_and(|mode| mode != OFlags::RDONLY)
}

/// How many columns the terminal has that standard output is, if it is one.
pub fn columns() -> Option<usize> {
    let terminal = Term::stdout();
    terminal.is_term().then(|| terminal.size().1.into())
}

/// Prints `text` as it is.
///
/// # Errors
/// Standard output takes nothing, and not because its reader has gone.
pub fn text(text: impl Display) -> Result<()> {
    heard(text).map(drop)
}

/// Writes all of `bytes`, however long the reader pauses, also where a program that shares the file has said that nobody waits
/// there (`O_NONBLOCK`).
///
/// # Errors
/// The system's.
pub fn all(file: &impl AsFd, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(taken) => bytes = &bytes[taken..],
            Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(file, PollFlags::OUT)], None)),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// The same, and whether there still is a reader.
///
/// # Errors
/// As [`text`].
pub fn heard(text: impl Display) -> Result<bool> {
    // Locked, so that what threads print comes in one piece each.
    outcome(all(&std::io::stdout().lock(), text.to_string().as_bytes()))
}

/// What came of printing what has its own way of that.
///
/// # Errors
/// As [`text`].
pub fn written(printed: std::io::Result<()>) -> Result<()> {
    outcome(printed.and_then(|()| std::io::stdout().flush())).map(drop)
}

fn outcome(printed: std::io::Result<()>) -> Result<bool> {
    match printed {
        _ if !is_open() => Err(Failure::run("writing to standard output: it is not open for that")),
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::run(format!("writing to standard output: {e}"))),
    }
}

/// Prints `line` on standard error, in one piece, if it can be.
pub fn note(line: impl Display) {
    let _ = std::io::stderr().lock().write_all(format!("{}\n", harmless(&line.to_string())).as_bytes());
}

/// For so long a process that was asked to end still waits for a reader that takes nothing.
pub const LAST: Duration = Duration::from_secs(1);

/// What is left of that, once it is asked for.
pub fn last_wait() -> Duration {
    static SINCE: OnceLock<Instant> = OnceLock::new();
    LAST.saturating_sub(SINCE.get_or_init(Instant::now).elapsed())
}

/// A [`note`] of such a process.
pub fn last_note(line: impl Display) {
    if is_noted(last_wait()) {
        note(line);
    }
}

/// Whether standard error takes a line without waiting longer for a reader that pauses.
pub fn is_noted(within: Duration) -> bool {
    is_taken(&std::io::stderr(), within)
}

/// Whether a pipe or a terminal takes something within this time, up to a page; files and what has no reader any more do.
pub fn is_taken(stream: &impl AsFd, within: Duration) -> bool {
    let within = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    matches!(poll(&mut [PollFd::new(stream, PollFlags::OUT)], Some(&within)), Ok(1..))
}

/// Lines without what a terminal would obey, which may come from names of files and what is in them.
pub fn harmless(line: &str) -> String {
    let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    let mut shown = String::with_capacity(line.len());
    for c in line.chars() {
        match obeyed(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Prints `line` and ends it.
///
/// # Errors
/// As [`text`].
pub fn line(line: impl Display) -> Result<()> {
    text(format_args!("{line}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_written_where_another_program_has_said_that_nobody_waits() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        let text = vec![b'x'; 1 << 20];
        std::thread::scope(|scope| {
            let written = scope.spawn(|| {
                let writer = writer;
                all(&writer, &text)
            });
            let mut read = Vec::new();
            std::io::Read::read_to_end(&mut reader, &mut read).unwrap();
            written.join().unwrap().unwrap();
            assert!(read == text);
        });
    }

    #[test]
    fn names_give_a_terminal_no_orders() {
        assert_eq!(harmless("'\u{1b}[31mré\r.txt'\n\tend"), "'\\u{1b}[31mré\\r.txt'\n\tend");
    }
}
