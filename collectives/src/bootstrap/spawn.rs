//! Own spawn: one parent starts the ranks of a job on this host, watches them, and leaves nothing behind.

mod signals;

use super::board::{Board, Ending};
use super::identity::variables;
use crate::error::{Error, Result};
use crate::watch::MAX_SIZE;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signals::{Signals, stop_here};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub use signals::ignored;
pub(crate) use signals::unsignalled;

/// How long the other ranks may take to end by themselves, with their own message, once one has failed.
pub const GRACE: Duration = Duration::from_secs(3);

/// How long ranks may take to end that were killed: one gives back all its memory first, and what a device has pinned of it.
const LEAVING: Duration = Duration::from_secs(30);

/// Whether this process was started by [`supervise`], which has looked at all that it will look at.
pub fn supervised() -> bool {
    std::env::var_os(variables::BOARD_FD).is_some()
}

/// What ranks do when they are asked to end, by SIGTERM or SIGUSR1, which batch systems send before they kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRequest {
    /// As with any signal: they end at once, and who has not within [`GRACE`] is killed.
    EndAtOnce,
    /// They hear of it and end when they are ready, as after saving what they have; until then they are let alone.
    EndWhenReady,
}

/// How a supervised job ended.
#[derive(Clone, Debug)]
pub struct Report {
    /// How each rank ended.
    pub endings: Vec<Ending>,
    /// The rank that failed first, and how, as the end of a sentence that starts with its name.
    pub first_failure: Option<(usize, String)>,
    /// What that rank itself said of it.
    pub announced: Option<String>,
    /// The signal to this process that ended the job: Ctrl-C is 2.
    pub interrupted: Option<i32>,
    /// The signal by which the ranks were asked to end when they are ready.
    pub asked: Option<i32>,
    /// Ranks that had to be killed because they did not end by themselves in time.
    pub killed: Vec<usize>,
    /// Those of them that have not ended even so, as one that waits for a disk that does not answer.
    pub left: Vec<usize>,
}

impl Report {
    /// What this process should exit with: 0 if all ranks went through, else 128 + the signal that interrupted it, else the
    /// code of the rank that failed first (1 if a signal killed it).
    pub fn exit_code(&self) -> u8 {
        if self.endings.iter().all(|&ending| ending == Ending::Exited(0)) && self.first_failure.is_none() {
            return 0;
        }
        if let Some(signal) = self.interrupted {
            return 128 + signal as u8;
        }
        match &self.first_failure {
            None => 0,
            Some((rank, _)) => match self.endings[*rank] {
                // A rank that announced a failure and yet exited with 0 does not make it a success.
                Ending::Exited(0) | Ending::Killed(_) => 1,
                Ending::Exited(code) => code,
            },
        }
    }

    /// One sentence for the user, unless everything went well.
    pub fn sentence(&self) -> Option<String> {
        if self.exit_code() == 0 {
            return None;
        }
        if let Some(signal) = self.interrupted {
            let then = self.stays().unwrap_or_else(|| match self.endings.len() {
                1 => "its rank has ended".into(),
                ranks => format!("all {ranks} ranks have ended"),
            });
            return Some(format!("interrupted by signal {signal}; {then}"));
        }
        let (rank, how) = self.first_failure.as_ref()?;
        let rest = match self.endings.len() - 1 {
            _ if !self.left.is_empty() => self.stays().map_or(String::new(), |stays| format!("; {stays}")),
            0 => String::new(),
            _ if !self.killed.is_empty() => {
                let (itself, was) = match self.killed.len() {
                    1 => ("itself", "was"),
                    _ => ("themselves", "were"),
                };
                format!("; {} did not end by {itself} and {was} killed", super::hosts::list(&self.killed))
            }
            _ => "; the other ranks were stopped".into(),
        };
        let before = self.asked.map_or(String::new(), |signal| format!("asked to end by signal {signal}; "));
        Some(format!("{before}rank {rank} {how}{rest}"))
    }

    /// Who is still there, if anybody is.
    fn stays(&self) -> Option<String> {
        let (was, it) = match self.left.len() {
            0 => return None,
            1 => ("was killed and has", "it"),
            _ => ("were killed and have", "them"),
        };
        let left = super::hosts::list(&self.left);
        Some(format!(
            "{left} {was} not ended: the system waits for a disk or a device in {it} (state D in ps)"
        ))
    }
}

/// Starts `ranks` processes, each the command that `command` makes for its rank, with the job's variables added
/// (see [`variables`]) and no standard input, and returns when all have ended.
///
/// When one fails, the others learn how from the job board, get [`GRACE`] to end by themselves, and are then
/// killed. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on likewise, those that ask to end with what `on_request` says of it,
/// and a stop (Ctrl-Z), but for those that this process was started to ignore (nohup, a script's `&`). If this process dies in
/// any way, the kernel kills the ranks. Call it from
/// the main thread before starting others: the signals are blocked in this thread only, and the ranks die with the thread
/// that started them.
///
/// # Errors
/// [`Error::Launch`] for 0 ranks or more than [`MAX_SIZE`], [`Error::System`] when a process cannot be started (those
/// started are killed).
pub fn supervise(
    ranks: usize,
    on_request: OnRequest,
    mut command: impl FnMut(usize) -> Command,
) -> Result<Report> {
    if ranks == 0 || ranks > MAX_SIZE {
        return Err(Error::Launch(format!("cannot start {ranks} ranks; 1 to {MAX_SIZE} are possible")));
    }
    let (board, board_fd) = Board::create(ranks)?;
    let (job, token) = (format!("spawn-{}-{}", std::process::id(), random_hex(4)?), random_hex(16)?);
    let signals = Signals::catch()?;
    let mut family = Family { board, on_request, members: Vec::with_capacity(ranks) };
    for rank in 0..ranks {
        let mut command = command(rank);
        command
            .env(variables::RANK, rank.to_string())
            .env(variables::WORLD, ranks.to_string())
            .env(variables::LOCAL_RANK, rank.to_string())
            .env(variables::LOCAL_SIZE, ranks.to_string())
            .env(variables::JOB, &job)
            .env(variables::TOKEN, &token)
            .env(variables::BOARD_FD, board_fd.as_raw_fd().to_string())
            .env_remove(variables::RENDEZVOUS)
            .stdin(Stdio::null())
            // Ctrl-C at a terminal goes to whole groups; the ranks get it from here, once.
            .process_group(0);
        let (parent, inherited, mask) = (std::process::id(), board_fd.as_raw_fd(), signals.before);
        // SAFETY: between fork and exec the closure makes only system calls: no allocation, no locks.
        unsafe { command.pre_exec(move || before_exec(parent, inherited, &mask)) };
        let child = command.spawn().map_err(|e| {
            Error::start(format!("starting rank {rank} of {ranks} ({:?})", command.get_program()), e)
        })?;
        family.members.push(Member::new(child));
    }
    drop(board_fd);
    Ok(family.watch(&signals))
}

/// Runs in the child: it must not outlive the parent, takes signals as usual, and keeps the board over exec.
fn before_exec(parent: u32, board: RawFd, mask: &libc::sigset_t) -> std::io::Result<()> {
    // SAFETY: an async-signal-safe call with a valid set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
    // A terminal may stop background groups that write to it, which ranks are (`stty tostop`).
    // SAFETY: an async-signal-safe call that touches no memory.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let_writes_fail();
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before the line above; then nobody would ever send the signal.
    if std::os::unix::process::parent_id() != parent {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    }
    // SAFETY: the descriptor is open: the parent holds it until all ranks have been started.
    let board = unsafe { std::os::fd::BorrowedFd::borrow_raw(board) };
    rustix::io::fcntl_setfd(board, rustix::io::FdFlags::empty())?;
    Ok(())
}

/// Makes a write to a file that may not grow (`ulimit -f`) an error that says so, where the system would end the process.
pub fn let_writes_fail() {
    // SAFETY: an async-signal-safe call that touches no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn random_hex(bytes: usize) -> Result<String> {
    let mut random = vec![0u8; bytes];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(&mut random))
        .map_err(|e| Error::system("reading /dev/urandom for the job's secret", e))?;
    Ok(random.iter().map(|b| format!("{b:02x}")).collect())
}

/// How often to look at ranks whose end wakes nobody.
const BLIND: Duration = Duration::from_millis(20);

struct Member {
    child: Child,
    /// Readable when the process has ended; None on kernels before 5.3, where the loop looks at intervals instead.
    pidfd: Option<OwnedFd>,
    ending: Option<Ending>,
}

impl Member {
    fn new(child: Child) -> Self {
        let pidfd = pid(&child).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
        Member { child, pidfd, ending: None }
    }

    fn signal(&self, signal: Signal) {
        if let (None, Some(pid)) = (self.ending, pid(&self.child)) {
            // It may have ended meanwhile, and is then still a zombie of ours: never another process.
            let _ = kill_process(pid, signal);
        }
    }
}

fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(child.id() as i32)
}

fn ending_of(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited(code as u8),
        (None, signal) => Ending::Killed(signal.unwrap_or(0) as u8),
    }
}

/// The started ranks. Dropped early (a later rank could not be started), it kills and reaps them.
struct Family {
    board: Board,
    on_request: OnRequest,
    members: Vec<Member>,
}

impl Family {
    fn watch(mut self, signals: &Signals) -> Report {
        let mut deadline: Option<Instant> = None;
        let (mut interrupted, mut asked, mut killed, mut left) = (None, None, Vec::new(), Vec::new());
        while !self.reap() {
            if deadline.is_none() && self.board.first_failure().is_some() {
                deadline = Some(Instant::now() + GRACE);
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                killed = self.alive();
                left = self.kill(Some(signals), LEAVING);
                break;
            }
            match self.wait(Some(signals), deadline) {
                None => {}
                Some(Signal::TSTP) => {
                    self.signal_all(Signal::STOP);
                    stop_here();
                    self.signal_all(Signal::CONT);
                }
                Some(signal) => {
                    let number = Some(signal.as_raw());
                    let asks = matches!(signal, Signal::TERM | Signal::USR1);
                    if asks && self.on_request == OnRequest::EndWhenReady {
                        asked = asked.or(number);
                    } else {
                        interrupted = interrupted.or(number);
                        deadline = deadline.or(Some(Instant::now() + GRACE));
                    }
                    self.signal_all(signal);
                }
            }
        }
        let endings: Vec<Ending> = self.members.iter().filter_map(|m| m.ending).collect();
        let first = self.board.first_failure();
        // It came before they heard of such: as any other.
        let by = |signal: i32| first.is_some_and(|rank| endings[rank] == Ending::Killed(signal as u8));
        if let Some(signal) = asked.filter(|&signal| by(signal)) {
            interrupted = interrupted.or(Some(signal));
        }
        let announced = first.and_then(|r| self.board.announced(r));
        let how = |rank| match &announced {
            // What it said of itself, and not how it was ended for not ending.
            Some(text) if killed.contains(&rank) => format!("failed: {text}"),
            _ => self.board.how(rank).unwrap_or_else(|| endings[rank].to_string()),
        };
        let first_failure = first.map(|rank| (rank, how(rank)));
        Report { endings, first_failure, announced, interrupted, asked, killed, left }
    }

    /// Sleeps until a rank has ended, which it then collects, a signal came or the deadline passed.
    fn wait(&mut self, signals: Option<&Signals>, deadline: Option<Instant>) -> Option<Signal> {
        let running = self.members.iter().filter(|m| m.ending.is_none());
        let (blind, count) = (running.clone().any(|m| m.pidfd.is_none()), running.clone().count());
        let mut fds: Vec<_> = signals.iter().map(|s| PollFd::new(&s.fd, PollFlags::IN)).collect();
        fds.extend(running.filter_map(|m| m.pidfd.as_ref()).map(|fd| PollFd::new(fd, PollFlags::IN)));
        // A rank announces its failure on the board without waking us, so look now and then.
        let most = if blind { BLIND } else { Duration::from_millis(250) };
        let left = deadline.map_or(most, |d| d.saturating_duration_since(Instant::now()).min(most));
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
        let woken = poll(&mut fds, Some(&timeout));
        let signal = signals.and_then(Signals::next);
        let in_vain = match woken {
            Ok(0) | Err(rustix::io::Errno::INTR) => false,
            // The end of one that only a debugger may collect wakes this at once, every time.
            Ok(_) => signal.is_none() && !self.reap() && self.alive().len() == count,
            // The kernel has no memory for it now, or a limit of open files has sunk.
            Err(_) => true,
        };
        if in_vain {
            std::thread::sleep(left.min(BLIND));
        }
        signal
    }

    /// Collects who has ended; true when all have. When several ended since the last look, those come last that have noted
    /// another's failure, and before those that exited one that a signal killed, which they may have noticed.
    fn reap(&mut self) -> bool {
        let mut seen: Vec<(usize, Ending)> = Vec::new();
        loop {
            let before = seen.len();
            for (rank, member) in self.members.iter_mut().enumerate().filter(|(_, m)| m.ending.is_none()) {
                if let Ok(Some(status)) = member.child.try_wait() {
                    let ending = ending_of(status);
                    member.ending = Some(ending);
                    seen.push((rank, ending));
                }
            }
            // Whom somebody followed that has just been found has ended before, perhaps behind this look.
            if seen.len() == before {
                break;
            }
        }
        // While nobody is the first failure, what a rank has on the board is a note: who announces its own is the first.
        let follows = |rank| self.board.announced(rank).is_some();
        seen.sort_by_key(|&(rank, ending)| (follows(rank), !matches!(ending, Ending::Killed(_)), rank));
        for (rank, ending) in seen {
            self.board.record(rank, ending);
        }
        self.members.iter().all(|m| m.ending.is_some())
    }

    /// Kills who still runs, and returns once all have ended or nobody need wait for them any more: a process whose disk or
    /// device does not answer may never end. Gives those, for whom nobody waits again: they will end by being killed. A signal
    /// meanwhile shortens that: what ended the job was before it.
    fn kill(&mut self, signals: Option<&Signals>, patience: Duration) -> Vec<usize> {
        self.signal_all(Signal::KILL);
        let mut deadline = Instant::now() + patience;
        while !self.reap() && Instant::now() < deadline {
            if self.wait(signals, Some(deadline)).is_some_and(|signal| signal != Signal::TSTP) {
                deadline = deadline.min(Instant::now() + GRACE);
            }
        }
        let left = self.alive();
        left.iter().for_each(|&rank| self.members[rank].ending = Some(Ending::Killed(9)));
        left
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&r| self.members[r].ending.is_none()).collect()
    }

    fn signal_all(&self, signal: Signal) {
        self.members.iter().for_each(|m| m.signal(signal));
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        if !self.reap() {
            self.kill(None, LEAVING);
        }
    }
}

#[cfg(test)]
mod tests;
