//! Signals that end or stop a job: a supervisor reads them from a descriptor, and threads that libraries start in it get none.

use crate::error::{Error, Result};
use rustix::process::Signal;
use std::os::fd::{FromRawFd, OwnedFd};

/// The signals that the supervisor passes on, blocked and read from a descriptor for as long as this lives.
pub(super) struct Signals {
    /// Readable when one came.
    pub fd: OwnedFd,
    /// What this thread blocked before.
    pub before: libc::sigset_t,
    /// This process was started to ignore the end of its children: the kernel would say of none how it ended.
    childless: bool,
}

/// Does `work`; threads that it starts never get a signal that ends a job or stops it.
pub(crate) fn unsignalled<T>(work: impl FnOnce() -> T) -> T {
    let blocked = block(&Signals::CAUGHT);
    let done = work();
    if let Ok((_, before)) = blocked {
        // SAFETY: the set that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    }
    done
}

/// Keeps signals from this thread, and from those that it starts; their set, and what was kept from it before.
fn block(signals: &[libc::c_int]) -> Result<(libc::sigset_t, libc::sigset_t)> {
    // SAFETY: plain libc calls on sets that live here; a zeroed sigset_t is what sigemptyset expects.
    unsafe {
        let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before) {
            0 => Ok((set, before)),
            failed => Err(Error::system("blocking signals", std::io::Error::from_raw_os_error(failed))),
        }
    }
}

/// Stops this process as Ctrl-Z does, and returns once it goes on. Where nobody could let it go on, as in `ssh -t host
/// caravan` without a shell that minds its jobs, the kernel discards a stop from the terminal (not a SIGSTOP), and this
/// returns at once. The signal is one that this thread blocks.
pub(super) fn stop_here() {
    // SAFETY: plain libc calls on structures that live here, of which a zeroed one is valid, and as an action the
    // default; what was there before is put back.
    unsafe {
        let (mut stop, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        let (default, mut action): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        libc::sigemptyset(&mut stop);
        libc::sigaddset(&mut stop, libc::SIGTSTP);
        libc::sigaction(libc::SIGTSTP, &default, &mut action);
        libc::raise(libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &stop, &mut before);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        libc::sigaction(libc::SIGTSTP, &action, std::ptr::null_mut());
    }
}

impl Signals {
    const CAUGHT: [libc::c_int; 6] =
        [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGHUP, libc::SIGTSTP];

    /// Blocks and catches them, but for those that this process was started to ignore.
    ///
    /// # Errors
    /// The system's.
    pub fn catch() -> Result<Self> {
        // A descriptor gets ignored signals too. nohup has a job stay when its terminal goes, and a script what it started
        // in the background when Ctrl-C ends the script.
        let caught = Self::CAUGHT.into_iter().filter(|&signal| !ignored(signal));
        let (set, before) = block(&caught.collect::<Vec<_>>())?;
        // SAFETY: plain libc calls on sets that live here.
        unsafe {
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                let error = std::io::Error::last_os_error();
                libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
                return Err(Error::system("signalfd", error));
            }
            let childless = ignored(libc::SIGCHLD);
            if childless {
                libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            }
            Ok(Signals { fd: OwnedFd::from_raw_fd(fd), before, childless })
        }
    }

    /// The next one that has come, if any has.
    pub fn next(&self) -> Option<Signal> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.fd, &mut info) {
            // The signal's number is the structure's first field.
            Ok(n) if n == info.len() => {
                Signal::from_named_raw(i32::from_ne_bytes(info[..4].try_into().expect("four bytes")))
            }
            _ => None,
        }
    }
}

/// Whether this process was started to ignore a signal.
pub fn ignored(signal: libc::c_int) -> bool {
    // SAFETY: it only asks; a zeroed structure is valid, and is filled where the call succeeds.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // What came while the ranks ended, and nobody has read, would end this process before it says how they did.
        while self.next().is_some() {}
        // SAFETY: restores what `catch` found.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
            if self.childless {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
        }
    }
}
